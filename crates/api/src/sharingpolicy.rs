//! `SharingPolicy`: how a set of GPUs is shared.
use std::collections::BTreeMap;

use cleave_plan::mps::Threads;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How the selected GPUs are shared between pods.
#[derive(CustomResource, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(group = "cleave.dev", version = "v1alpha1", kind = "SharingPolicy", plural = "sharingpolicies", shortname = "sp", status = "SharingPolicyStatus")]
#[serde(rename_all = "camelCase")]
pub struct SharingPolicySpec {
    /// Labels that a node must have; every node when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_selector: Option<BTreeMap<String, String>>,
    /// Which GPUs of those nodes; all when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpus: Option<GpuSelector>,
    /// How they are shared.
    pub mode: Mode,
    /// MPS settings, for `mode: Mps` and `Auto`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps: Option<Mps>,
    /// Time-slicing settings, for `mode: TimeSlicing` and `Auto`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_slicing: Option<TimeSlicing>,
    /// MIG settings, for `mode: Mig` and `Auto`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<Mig>,
    /// How pending pods are gathered before GPUs are cut anew.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dynamic: Option<Dynamic>,
    /// What happens to a pod that leaves its limits.
    #[serde(default)]
    pub enforcement: Enforcement,
    /// Another extended resource name for the shares or replicas, for example `nvidia.com/gpu.shared`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource_name: Option<String>,
}

/// GPUs by model, UUID or index. A GPU must match each field that is given.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuSelector {
    /// Product names as NVML gives them, or a part of one between word boundaries: `A100`, `NVIDIA H200`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<String>,
    /// GPU UUIDs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub uuids: Vec<String>,
    /// NVML indices on each node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub indices: Vec<u32>,
}

/// How a GPU is shared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum Mode {
    /// Not at all: `nvidia.com/gpu`.
    #[default]
    Whole,
    /// Shares with limits under MPS.
    Mps,
    /// Replicas without limits, in turns.
    TimeSlicing,
    /// MIG instances.
    Mig,
    /// Whatever the waiting pods ask for.
    Auto,
}

/// MPS settings.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Mps {
    /// Shares of each GPU, 1 to 48. Excludes `unitMemory`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub units: Option<u32>,
    /// Memory of one share, a whole number of Mi or Gi; the GPU gets as many shares as fit. Excludes `units`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit_memory: Option<String>,
    /// How hard the SM limit of a share is.
    #[serde(default)]
    pub threads: ThreadPolicy,
    /// Whether a share's memory is limited.
    #[serde(default)]
    pub memory: MemoryPolicy,
    /// Whether clients of several uids share one MPS server.
    #[serde(default = "yes")]
    pub multi_user: bool,
    /// The compute mode of the GPU while its daemon runs; it is put back afterwards.
    #[serde(default)]
    pub compute_mode: ComputeMode,
    /// Whether sized slices (`nvidia.com/gpu-10gb`) are cut as pods want them.
    #[serde(default)]
    pub sizes: Sizes,
    /// What one allocation's processes may do; none is no rule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clients: Option<Clients>,
}

const fn yes() -> bool {
    true
}

/// How hard the SM limit of a share is. Mirrors [`Threads`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ThreadPolicy {
    /// k of n shares get 100·k/n % of the SMs.
    Strict,
    /// Up to twice that, at most the whole GPU: on an H200 the most throughput at 4 to 7 clients.
    #[default]
    Burst,
    /// No SM limit.
    Uncapped,
}

impl From<ThreadPolicy> for Threads {
    fn from(policy: ThreadPolicy) -> Self {
        match policy {
            ThreadPolicy::Strict => Self::Strict,
            ThreadPolicy::Burst => Self::Burst,
            ThreadPolicy::Uncapped => Self::Uncapped,
        }
    }
}

/// Whether a share's memory is limited.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum MemoryPolicy {
    /// Each process gets the memory of its pod's shares at most.
    #[default]
    Limited,
    /// No limit.
    Unlimited,
}

/// The compute mode of a GPU under MPS.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ComputeMode {
    /// `EXCLUSIVE_PROCESS`: nothing but the MPS server can open the GPU, so nothing escapes MPS. Never set on MIG.
    #[default]
    ExclusiveProcess,
    /// `DEFAULT`, left alone.
    Default,
}

/// Whether MPS slices are cut as pods want them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Sizes {
    /// Equal shares.
    #[default]
    Fixed,
    /// Slices of G GiB, cut when wanted.
    Dynamic,
}

/// What one allocation's processes may do.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Clients {
    /// Most processes at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<u32>,
    /// Give each process its part of the memory (allocation ÷ max) rather than all of it.
    #[serde(default)]
    pub split: bool,
}

/// Time-slicing settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TimeSlicing {
    /// Replicas of each GPU.
    pub replicas: u32,
    /// How long a turn is.
    #[serde(default)]
    pub interval: Interval,
}

/// How long a time slice is, as `nvidia-smi compute-policy --set-timeslice` names it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[allow(missing_docs, reason = "the driver's own names")]
pub enum Interval {
    #[default]
    Default,
    Short,
    Medium,
    Long,
}

/// MIG settings.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Mig {
    /// Profiles that each GPU is cut into, for example `[3g.40gb, 4g.40gb]`; cut as pods want when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layout: Option<Vec<String>>,
    /// Sharing inside each instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sharing: Option<MigSharing>,
}

/// Sharing inside a MIG instance: one of the two.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigSharing {
    /// Shares under an MPS daemon of the instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps: Option<Mps>,
    /// Time-sliced replicas of the instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_slicing: Option<TimeSlicing>,
}

/// How pending pods are gathered before GPUs are cut anew.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Dynamic {
    /// Plan when no further pod came for this long, for example `500ms`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle: Option<String>,
    /// Plan after this long at the latest, for example `10s`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<String>,
}

/// What happens to a pod that leaves its limits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Enforcement {
    /// Event, metric and condition.
    #[default]
    Report,
    /// And it is evicted.
    Evict,
}

/// What a policy amounts to.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SharingPolicyStatus {
    /// Generation of the spec that this status is of.
    #[serde(default)]
    pub observed_generation: i64,
    /// GPUs that the policy shares.
    #[serde(default)]
    pub gpus: u32,
    /// Nodes that they are on.
    #[serde(default)]
    pub nodes: u32,
    /// Slices (shares, replicas, instances, GPUs) in total.
    #[serde(default)]
    pub total: u32,
    /// Slices in use.
    #[serde(default)]
    pub in_use: u32,
    /// Slices that pending pods want beyond what is free.
    #[serde(default)]
    pub wanted: u32,
    /// Conditions by type.
    #[serde(default)]
    pub conditions: Vec<Condition>,
}
