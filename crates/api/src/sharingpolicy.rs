//! `SharingPolicy`: how a set of GPUs is shared.
#![expect(unreachable_pub, reason = "the schema derives copy public structs into functions")]
#![expect(clippy::duplicated_attributes, reason = "columns of a type repeat `type_`")]

use std::collections::BTreeMap;

use cleave_plan::mps::Threads;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::{CustomResource, KubeSchema};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// How the selected GPUs are shared between pods.
#[derive(CustomResource, Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "cleave.dev",
    version = "v1alpha1",
    kind = "SharingPolicy",
    plural = "sharingpolicies",
    shortname = "sp",
    category = "cleave",
    status = "SharingPolicyStatus",
    derive = "PartialEq",
    doc = "How the selected GPUs are shared between pods. If two policies select one GPU, the more specific policy applies. If both are equally specific, the older policy applies.",
    printcolumn(name = "Mode", type_ = "string", json_path = ".spec.mode", description = "How a GPU is shared"),
    printcolumn(
        name = "GPUs",
        type_ = "integer",
        json_path = ".status.gpus",
        description = "Number of GPUs that the policy shares"
    ),
    printcolumn(
        name = "Nodes",
        type_ = "integer",
        json_path = ".status.nodes",
        description = "Number of nodes with these GPUs"
    ),
    printcolumn(
        name = "Units",
        type_ = "integer",
        json_path = ".status.total",
        description = "Total number of shares, replicas, instances and GPUs"
    ),
    printcolumn(
        name = "In-Use",
        type_ = "integer",
        json_path = ".status.inUse",
        description = "Number of slices in use"
    ),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status",
        description = "Whether the GPUs are shared as the policy specifies"
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason",
        priority = 1
    ),
    printcolumn(
        name = "Message",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].message",
        priority = 1
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.mode != 'Mps' || (has(self.mps) && (has(self.mps.units) || has(self.mps.unitMemory) || (has(self.mps.sizes) && self.mps.sizes == 'Dynamic')))")
        .message("mode Mps needs mps.units (how many shares each GPU has), mps.unitMemory (how large a share is) or mps.sizes: Dynamic"),
    validation = Rule::new("!has(self.mps) || self.mode in ['Mps', 'Auto']")
        .message("the section mps is for mode Mps or Auto; shares inside MIG instances are set by mig.sharing.mps"),
    validation = Rule::new("self.mode != 'TimeSlicing' || has(self.timeSlicing)")
        .message("mode TimeSlicing needs timeSlicing.replicas (how many pods take turns on each GPU)"),
    validation = Rule::new("!has(self.timeSlicing) || self.mode in ['TimeSlicing', 'Auto']")
        .message("the section timeSlicing is for mode TimeSlicing or Auto; replicas of MIG instances are set by mig.sharing.timeSlicing"),
    validation = Rule::new("!has(self.mig) || self.mode in ['Mig', 'Auto']")
        .message("the section mig is for mode Mig or Auto"),
    validation = Rule::new("!has(self.dynamic) || self.mode == 'Auto' || (self.mode == 'Mig' && !(has(self.mig) && has(self.mig.layout))) || (self.mode == 'Mps' && has(self.mps) && has(self.mps.sizes) && self.mps.sizes == 'Dynamic')")
        .message("dynamic sets when GPUs are repartitioned, but this policy never repartitions GPUs: dynamic is for mode Auto, mode Mig without a layout, and mps.sizes: Dynamic"),
    validation = Rule::new("!has(self.resourceName) || (self.mode == 'Mps' && !(has(self.mps) && has(self.mps.sizes) && self.mps.sizes == 'Dynamic')) || self.mode == 'TimeSlicing' || (self.mode == 'Mig' && has(self.mig) && has(self.mig.layout) && has(self.mig.sharing))")
        .message("resourceName renames equal shares or replicas: set it only for mode Mps with units or unitMemory, mode TimeSlicing, and mig.sharing with a layout; the names of other resources are fixed"),
    validation = Rule::new("!has(self.resourceName) || self.mode == 'Mps' || self.resourceName != 'nvidia.com/gpu-mps'")
        .message("nvidia.com/gpu-mps is the name of MPS shares of GPUs: choose another resourceName"),
    validation = Rule::new("!has(self.resourceName) || self.mode == 'TimeSlicing' || !(self.resourceName in ['nvidia.com/gpu-timeslice', 'nvidia.com/gpu.shared'])")
        .message("nvidia.com/gpu-timeslice and nvidia.com/gpu.shared are names of time-sliced replicas of GPUs: choose another resourceName")
)]
pub struct SharingPolicySpec {
    /// Labels that a node must have. Default: every node is selected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "labels_schema")]
    #[x_kube(validation = Rule::new("size(self) > 0")
        .message("nodeSelector is empty: omit it to select every node, or name a label"))]
    pub node_selector: Option<BTreeMap<String, String>>,
    /// GPUs of the selected nodes. Default: every GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpus: Option<GpuSelector>,
    /// How the GPUs are shared.
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
    /// How long the operator collects pending pods before it repartitions GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dynamic: Option<DynamicPartitioning>,
    /// How a change of this policy is rolled out to its nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<Rollout>,
    /// What Cleave does with a pod that exceeds its limits.
    #[serde(default)]
    pub enforcement: Enforcement,
    /// Whether replicas of one controller use different GPUs and nodes if possible. The pod
    /// annotation `cleave.dev/replica-placement` overrides this field.
    #[serde(default)]
    pub replica_placement: ReplicaPlacement,
    /// Another name of the extended resource of the shares or replicas: `nvidia.com/gpu.shared`, or
    /// `nvidia.com/gpu-` followed by a word of your choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 74))]
    #[x_kube(validation = Rule::new(r"self == 'nvidia.com/gpu.shared' || self.matches('^nvidia\\.com/gpu-[a-z0-9]([-a-z0-9.]{0,56}[a-z0-9])?$')")
        .message("resourceName must be nvidia.com/gpu.shared or nvidia.com/gpu- followed by at most 58 lower-case letters, digits, dashes and dots, for example nvidia.com/gpu-small: Cleave does not place pods that request other names"))]
    #[x_kube(validation = Rule::new(r"!self.matches('^nvidia\\.com/gpu-[0-9]+gb$')")
        .message("names like nvidia.com/gpu-10gb are reserved for sized slices (mps.sizes: Dynamic)"))]
    pub resource_name: Option<String>,
}

/// Where replicas of one controller are placed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ReplicaPlacement {
    /// Replicas use different GPUs if possible, and different nodes if possible. Pods of Jobs are
    /// placed like pods without a controller.
    #[default]
    Spread,
    /// Replicas are placed like other pods, so several may use one GPU.
    Pack,
}

impl ReplicaPlacement {
    /// Parses the value of the annotation [`crate::names::REPLICA_PLACEMENT_ANNOTATION`].
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "Spread" => Some(Self::Spread),
            "Pack" => Some(Self::Pack),
            _ => None,
        }
    }
}

/// Returns the schema of node labels. The schema is bounded, so that the cost of rules about labels
/// is bounded.
fn labels_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": 32,
        "additionalProperties": {"type": "string", "maxLength": 63},
    })
}

/// GPUs by model, UUID or index. A GPU must match every field that is set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(has(self.models) && size(self.models) > 0) || (has(self.uuids) && size(self.uuids) > 0) || (has(self.indices) && size(self.indices) > 0)")
    .message("gpus selects nothing: omit it to select every GPU, or set models, uuids or indices"))]
pub struct GpuSelector {
    /// Product names as NVML reports them, or parts of them between word boundaries, such as `A100`
    /// or `NVIDIA H200`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(max = 96)))]
    #[x_kube(validation = Rule::new(r"self.all(model, model.matches('^[A-Za-z0-9]([-A-Za-z0-9 ./()+]*[A-Za-z0-9)])?$'))")
        .message("a model is a product name or part of one, for example A100 or NVIDIA H200: letters, digits, spaces and -./()+ between them"))]
    pub models: Vec<String>,
    /// GPU UUIDs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), inner(length(max = 40)))]
    #[x_kube(validation = Rule::new("self.all(uuid, uuid.matches('^GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'))")
        .message("a GPU's UUID is written GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx, as `nvidia-smi -L` and `kubectl get gpunodes -o yaml` print it"))]
    pub uuids: Vec<String>,
    /// NVML indices on each node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    #[x_kube(validation = Rule::new("self.all(index, index >= 0 && index < 64)")
        .message("an index is a number from 0 to 63"))]
    pub indices: Vec<u32>,
}

/// How a GPU is shared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum Mode {
    /// Not shared: `nvidia.com/gpu`.
    #[default]
    Whole,
    /// Shares with limits under MPS.
    Mps,
    /// Time-sliced replicas without limits.
    TimeSlicing,
    /// MIG instances.
    Mig,
    /// Any of these modes, as pending pods request.
    Auto,
}

/// MPS settings.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!(has(self.units) && has(self.unitMemory))")
        .message("set units (how many shares each GPU has) or unitMemory (how large a share is), not both"),
    validation = Rule::new("!(has(self.sizes) && self.sizes == 'Dynamic') || !(has(self.units) || has(self.unitMemory))")
        .message("sizes: Dynamic creates slices as pods request them: omit units and unitMemory")
)]
pub struct Mps {
    /// Number of shares of each GPU, 1 to 48. Mutually exclusive with `unitMemory`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self >= 1 && self <= 48")
        .message("units must be from 1 to 48: the MPS server of a GPU serves 48 clients at most"))]
    pub units: Option<u32>,
    /// Memory of one share, a whole number of Mi or Gi. The GPU is divided into as many shares as
    /// fit. Mutually exclusive with `units`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    #[x_kube(validation = Rule::new("self.matches('^[1-9][0-9]{0,6}(Mi|Gi)$')")
        .message("unitMemory must be a whole number of Mi or Gi, for example 10Gi or 5120Mi: MPS limits memory in whole MiB"))]
    pub unit_memory: Option<String>,
    /// How strictly the SMs of a share are limited.
    #[serde(default)]
    pub threads: ThreadPolicy,
    /// Whether the memory of a share is limited.
    #[serde(default)]
    pub memory: MemoryPolicy,
    /// Whether processes of different user ids share one MPS server.
    #[serde(default = "default_true")]
    pub multi_user: bool,
    /// Compute mode of the GPU while its daemon runs. The previous mode is restored afterwards.
    #[serde(default)]
    pub compute_mode: ComputeMode,
    /// What happens to shares on a driver whose MPS handshake Cleave does not know. `Hard`: the
    /// shares are reported as Unhealthy. `Advisory`: the shares are served with limits that pods
    /// can change.
    #[serde(default)]
    pub enforcement: MpsEnforcement,
    /// Whether sized slices (`nvidia.com/gpu-10gb`) are created when pods request them.
    #[serde(default)]
    pub sizes: MpsSizes,
    /// Limits on the processes of one allocation. Default: no limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clients: Option<ClientLimits>,
}

const fn default_true() -> bool {
    true
}

/// How strictly the SMs of a share are limited. Mirrors [`Threads`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ThreadPolicy {
    /// k of n shares get at most 100·k/n % of the SMs.
    Strict,
    /// k of n shares get up to twice their part, at most the whole GPU. Seven busy pods on an H200
    /// had 20 % more throughput under this policy than under `Strict`.
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

/// Whether the memory of a share is limited.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum MemoryPolicy {
    /// Each process can use at most the memory of its container's shares.
    #[default]
    Limited,
    /// No limit.
    Unlimited,
}

/// Compute mode of a GPU under MPS.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ComputeMode {
    /// `EXCLUSIVE_PROCESS`: only one process can open the GPU. While this process is the MPS
    /// server, no other process can bypass MPS. Cleave never sets this mode on a GPU in MIG mode.
    #[default]
    ExclusiveProcess,
    /// `DEFAULT`: the mode is not changed.
    Default,
}

/// Whether shares are served on a driver whose MPS handshake Cleave does not know. Cleave cannot
/// enforce the limits of shares on such a driver.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum MpsEnforcement {
    /// The shares are not served: they are reported to the kubelet as Unhealthy.
    #[default]
    Hard,
    /// The shares are served with advisory limits. The limits are in the environment of a pod's
    /// programs, which a pod can change. A pod can also send administrators' commands to the MPS
    /// daemon.
    Advisory,
}

impl MpsEnforcement {
    /// Returns whether this is the default value, which serialization omits.
    pub fn is_hard(&self) -> bool {
        *self == Self::Hard
    }
}

/// Whether sized slices are created when pods request them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum MpsSizes {
    /// A fixed number of equal shares.
    #[default]
    Fixed,
    /// Sized slices, created when pods request them.
    Dynamic,
}

/// Limits on the processes of one allocation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!(has(self.split) && self.split) || has(self.max)")
    .message("clients.split divides an allocation's memory by clients.max: set max too"))]
pub struct ClientLimits {
    /// Maximum number of MPS clients of one allocation at the same time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self >= 1 && self <= 48")
        .message("clients.max must be from 1 to 48: the MPS server of a GPU serves 48 clients at most"))]
    pub max: Option<u32>,
    /// Whether each process is limited to the allocation's memory divided by `max`, instead of the
    /// allocation's whole memory.
    #[serde(default)]
    pub split: bool,
}

/// Maximum number of replicas of one GPU. The program in each replica has a CUDA context, which
/// uses memory of the GPU even if the program allocates nothing.
pub const MAX_REPLICAS: u32 = 100;

/// Time-slicing settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct TimeSlicing {
    /// Number of replicas of each GPU, 1 to 100.
    #[x_kube(validation = Rule::new("self >= 1 && self <= 100")
        .message("replicas must be from 1 to 100"))]
    pub replicas: u32,
    /// Length of a time slice. Values other than `Default` have no effect, because NVML has no call
    /// to set the length.
    #[serde(default)]
    pub interval: Interval,
}

/// Length of a time slice, in the terms of `nvidia-smi compute-policy --set-timeslice`.
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
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Mig {
    /// MIG profiles of each GPU, such as `[3g.40gb, 4g.40gb]`. Default: the operator plans
    /// instances as pods request them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16), inner(length(max = 32)))]
    #[x_kube(validation = Rule::new("size(self) > 0")
        .message("layout is empty: omit it to partition GPUs as pods request, or name a profile"))]
    #[x_kube(validation = Rule::new("size(self) <= 8")
        .message("layout names more than 8 profiles: no GPU can have that many MIG instances"))]
    #[x_kube(validation = Rule::new(r"self.all(profile, profile.matches('^[1-9]g\\.[1-9][0-9]{0,2}gb([+-](me|gfx|me\\.all))?$'))")
        .message("a MIG profile is written as nvidia-smi mig -lgip prints it, without MIG, for example 1g.10gb, 3g.40gb or 1g.10gb+me; instances within instances (1c.3g.40gb) are not served"))]
    pub layout: Option<Vec<String>>,
    /// Sharing inside each MIG instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sharing: Option<MigSharing>,
}

/// Sharing inside a MIG instance. Exactly one field is set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.mps) != has(self.timeSlicing)")
        .message("mig.sharing needs either mps or timeSlicing"),
    validation = Rule::new("!has(self.mps) || has(self.mps.units) || has(self.mps.unitMemory)")
        .message("mig.sharing.mps needs units (how many shares each instance has) or unitMemory (how large a share is)")
)]
pub struct MigSharing {
    /// Shares under an MPS daemon of the instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps: Option<Mps>,
    /// Time-sliced replicas of the instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_slicing: Option<TimeSlicing>,
}

/// How long the operator collects pending pods before it repartitions GPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!(has(self.idle) && has(self.timeout)) || !self.idle.matches('^([0-9]{1,6}(ms|s|m))+$') || !self.timeout.matches('^([0-9]{1,6}(ms|s|m))+$') || duration(self.idle) <= duration(self.timeout)")
    .message("dynamic.timeout is the longest wait and cannot be shorter than dynamic.idle"))]
pub struct DynamicPartitioning {
    /// The operator plans when no further pod has arrived for this time, for example `500ms`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    #[x_kube(validation = Rule::new("self.matches('^([0-9]{1,6}(ms|s|m))+$')")
        .message("idle must be a duration, for example 500ms, 10s or 1m30s"))]
    pub idle: Option<String>,
    /// Maximum time before the operator plans, for example `10s`. The field also limits the time
    /// that a node has to apply a partition. For this purpose, the default is 30 s and the minimum
    /// is 5 s. After this time, the operator places the node's pods elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    #[x_kube(validation = Rule::new("self.matches('^([0-9]{1,6}(ms|s|m))+$')")
        .message("timeout must be a duration, for example 500ms, 10s or 1m30s"))]
    pub timeout: Option<String>,
}

/// How a change of a policy is rolled out to its nodes. The operator changes one node first. When
/// that node's GPUs serve the new partition, other nodes follow in waves. Nodes without pods on the
/// GPUs come first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Rollout {
    /// Maximum number of nodes that are repartitioned at a time, or a percentage of the policy's
    /// nodes, rounded up. Nodes that wait for pods count separately, up to the same number.
    #[serde(default = "default_max_unavailable")]
    #[schemars(schema_with = "nodes_or_percentage_schema")]
    pub max_unavailable: IntOrString,
    /// Whether the rollout is paused. If so, nodes keep their current partition.
    #[serde(default)]
    pub paused: bool,
    /// What happens to the other nodes when a node fails to apply the change.
    #[serde(default)]
    pub on_failure: OnFailure,
}

impl Default for Rollout {
    fn default() -> Self {
        Self { max_unavailable: default_max_unavailable(), paused: false, on_failure: OnFailure::default() }
    }
}

/// Default of [`Rollout::max_unavailable`].
pub const DEFAULT_MAX_UNAVAILABLE_PERCENT: u32 = 25;

fn default_max_unavailable() -> IntOrString {
    IntOrString::String(format!("{DEFAULT_MAX_UNAVAILABLE_PERCENT}%"))
}

/// Returns the schema of a number of nodes or a percentage. CEL cannot check a field of two types
/// at a bounded cost, so the schema itself has the limits.
fn nodes_or_percentage_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "x-kubernetes-int-or-string": true,
        "minimum": 1,
        "pattern": "^([1-9][0-9]?|100)%$",
    })
}

/// What happens to the other nodes when a node fails to apply a change.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OnFailure {
    /// The other nodes do not change until the failed nodes are repaired or cordoned, or the policy
    /// is reverted.
    #[default]
    Stop,
    /// The other nodes change.
    Continue,
}

/// What Cleave does with a pod that exceeds its limits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Enforcement {
    /// The finding is reported: an Event, a metric and a condition.
    #[default]
    Report,
    /// The finding is reported, and the pod is evicted.
    Evict,
}

/// Effect of a policy.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct SharingPolicyStatus {
    /// Generation of the spec that this status describes.
    #[serde(default)]
    pub observed_generation: i64,
    /// Number of GPUs that the policy shares.
    #[serde(default)]
    pub gpus: u32,
    /// Number of nodes with these GPUs.
    #[serde(default)]
    pub nodes: u32,
    /// Total number of slices.
    #[serde(default)]
    pub total: u32,
    /// Number of slices in use.
    #[serde(default)]
    pub in_use: u32,
    /// Number of slices that pending pods request in addition to the free slices.
    #[serde(default)]
    pub wanted: u32,
    /// Progress of the last change, in nodes.
    #[serde(default)]
    pub rollout: RolloutStatus,
    /// Conditions by type: `Accepted`, `Ready`, `Conflict` and `RolledOut`.
    #[serde(default)]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".to_owned()]))]
    pub conditions: Vec<Condition>,
}

/// How many nodes have the newest partition of a policy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RolloutStatus {
    /// Number of nodes that serve the newest partition.
    #[serde(default)]
    pub updated: u32,
    /// Number of nodes that are being repartitioned, including nodes that wait for pods.
    #[serde(default)]
    pub changing: u32,
    /// Number of nodes that failed to apply the newest partition.
    #[serde(default)]
    pub failed: u32,
    /// Number of nodes that keep an older partition until their wave begins.
    #[serde(default)]
    pub pending: u32,
}
