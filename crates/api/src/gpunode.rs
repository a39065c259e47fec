//! `GpuNode`: the desired state of a node's GPUs (`spec`, written by the operator) and their actual
//! state (`status`, written by the agent).
#![expect(unreachable_pub, reason = "the schema derives copy public structs into functions")]
#![expect(clippy::duplicated_attributes, reason = "columns of a type repeat `type_`")]

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::sharingpolicy::{ComputeMode, Enforcement, Interval, MpsEnforcement};

/// Desired state of the GPUs of the node with the same name. The spec is complete: the agent
/// applies it without further decisions.
#[derive(CustomResource, Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "cleave.dev",
    version = "v1alpha1",
    kind = "GpuNode",
    plural = "gpunodes",
    shortname = "gpun",
    category = "cleave",
    status = "GpuNodeStatus",
    derive = "PartialEq",
    doc = "Desired state (spec, written by the operator) and actual state (status, written by the node's agent) of the GPUs of the node with the same name.",
    printcolumn(
        name = "GPUs",
        type_ = "integer",
        json_path = ".status.summary.gpus",
        description = "Number of GPUs of the node"
    ),
    printcolumn(name = "Model", type_ = "string", json_path = ".status.summary.models", description = "GPU models"),
    printcolumn(
        name = "Modes",
        type_ = "string",
        json_path = ".status.summary.modes",
        description = "Sharing modes of the GPUs"
    ),
    printcolumn(
        name = "Slices",
        type_ = "string",
        json_path = ".status.summary.slices",
        description = "Slices in use, of those advertised to the kubelet"
    ),
    printcolumn(
        name = "Applied",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Applied\")].status",
        description = "Whether the node matches its spec"
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Applied\")].reason",
        priority = 1
    ),
    printcolumn(name = "Driver", type_ = "string", json_path = ".status.driver", priority = 1),
    printcolumn(name = "Agent", type_ = "string", json_path = ".status.agentVersion", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct GpuNodeSpec {
    /// Hash of `gpus`. The status repeats the hash to report which spec the node matches. The hash
    /// is empty until the operator has planned the node's GPUs.
    #[serde(default)]
    #[schemars(length(max = 64))]
    pub plan_id: String,
    /// GPUs with a desired partition, by index. A GPU that is not listed is served as
    /// `nvidia.com/gpu`. If another program turned its MIG mode on, its existing MIG instances are
    /// served instead. The agent ignores entries for GPUs that the node does not have.
    #[serde(default)]
    #[schemars(length(max = 64))]
    pub gpus: Vec<GpuSpec>,
}

/// Desired state of one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuSpec {
    /// UUID of the GPU.
    pub uuid: String,
    /// Name of the `SharingPolicy` that this entry comes from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// What Cleave does with a pod that exceeds its limits.
    #[serde(default)]
    pub enforcement: Enforcement,
    /// How the GPU is served. If `mig` is set, the GPU's instances are served instead of the GPU.
    pub partition: Partition,
    /// The GPU is cordoned or quiesced: its free slices are reported to the kubelet as Unhealthy.
    /// Slices in use are not affected.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cordoned: bool,
    /// An administrator or the GPU Operator will reset the GPU or change its driver. When no pod
    /// uses the GPU, the agent stops its MPS daemons and closes NVML. `status.gpus[].quiesce`
    /// reports the progress.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub quiesced: bool,
    /// An administrator cleared the GPU's recorded faults up to this time. The time is compared
    /// with `status.gpus[].health.last`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cleared: Option<Time>,
    /// Time at which an administrator decided that the GPU was removed from the node. The agent
    /// forgets the GPU if it has been missing since this time or earlier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forgotten: Option<Time>,
}

/// How a GPU is served. Exactly one field is set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("[has(self.whole), has(self.mps), has(self.timeSlicing), has(self.mig)].filter(given, given).size() == 1")
    .message("a partition must set exactly one of whole, mps, timeSlicing and mig"))]
pub struct Partition {
    /// The undivided GPU, as one device of this resource.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub whole: Option<Whole>,
    /// Shares under MPS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps: Option<MpsPartition>,
    /// Time-sliced replicas.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_slicing: Option<TimeSlicedPartition>,
    /// MIG instances, each with its own partition.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    pub mig: Option<Vec<MigInstanceSpec>>,
}

/// An undivided GPU or MIG instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Whole {
    /// The extended resource, `nvidia.com/gpu` or `nvidia.com/mig-<profile>`.
    pub resource: String,
}

/// MPS slices of a GPU or MIG instance. The sum of the slices' memory limits, if any, does not
/// exceed the device's memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MpsPartition {
    /// Whether processes of different user ids share one MPS server.
    pub multi_user: bool,
    /// Compute mode of the GPU while the daemon runs.
    pub compute_mode: ComputeMode,
    /// Whether the agent serves the slices even if Cleave does not know the driver's MPS handshake.
    #[serde(default, skip_serializing_if = "MpsEnforcement::is_hard")]
    pub enforcement: MpsEnforcement,
    /// Slices that the daemon serves.
    pub slices: Vec<MpsSlices>,
}

/// Equal MPS slices of one resource.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MpsSlices {
    /// The extended resource, such as `nvidia.com/gpu-mps` or `nvidia.com/gpu-10gb`.
    pub resource: String,
    /// Number of slices. Device ids are `<uuid>::<first>`, `<uuid>::<first + 1>` and so on.
    pub count: u32,
    /// Number in the first device id. Device ids do not change when slices of other resources are
    /// added or removed.
    #[serde(default)]
    pub first: u32,
    /// Memory limit of k slices in MiB, at index k - 1. An empty list means no limit.
    ///
    /// The list contains every limit, because the limit of k shares is not k times the rounded
    /// limit of one share.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory_mib: Vec<u64>,
    /// Active thread percentage of k slices, at index k - 1. An empty list means no limit.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub threads: Vec<u8>,
    /// Maximum number of MPS clients of one allocation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_clients: Option<u32>,
}

/// Time-sliced replicas.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TimeSlicedPartition {
    /// Name of the extended resource.
    pub resource: String,
    /// Number of replicas.
    pub replicas: u32,
    /// Length of a time slice.
    #[serde(default)]
    pub interval: Interval,
}

/// One MIG instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigInstanceSpec {
    /// Profile name without prefix, such as `1g.10gb` or `1g.10gb+me`.
    pub profile: String,
    /// First memory slice, numbered as in NVML's placements.
    pub start: u32,
    /// How the instance is served.
    pub partition: MigPartition,
}

/// How a MIG instance is served. Exactly one field is set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("[has(self.whole), has(self.mps), has(self.timeSlicing)].filter(given, given).size() == 1")
    .message("an instance's partition must set exactly one of whole, mps and timeSlicing"))]
pub struct MigPartition {
    /// The undivided instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub whole: Option<Whole>,
    /// Shares under MPS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps: Option<MpsPartition>,
    /// Time-sliced replicas.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_slicing: Option<TimeSlicedPartition>,
}

/// Actual state of a node's GPUs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuNodeStatus {
    /// Generation of the spec that this status describes.
    #[serde(default)]
    pub observed_generation: i64,
    /// The `spec.planId` that the node matches. The value is empty if the node matches no plan.
    #[serde(default)]
    pub plan_id: String,
    /// Version of the agent.
    #[serde(default)]
    pub agent_version: String,
    /// Version of NVIDIA's driver, as NVML reports it.
    #[serde(default)]
    pub driver: String,
    /// Boot id of the node's kernel.
    #[serde(default)]
    pub boot_id: String,
    /// Number of GPUs that the node should have. GPUs that the agent has seen once count until an
    /// administrator runs `cleave forget`. GPUs that could not be identified also count. The
    /// condition `GpusPresent` is False if NVML lists fewer GPUs.
    #[serde(default)]
    pub expected_gpus: u32,
    /// Summary of `gpus` for `kubectl get`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<Summary>,
    /// Properties of GPU models. The properties are not repeated for each GPU, because the agent
    /// writes the whole status whenever a pod starts or ends.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<ModelStatus>,
    /// The GPUs, by index.
    #[serde(default)]
    pub gpus: Vec<GpuStatus>,
    /// GPUs that NVML lists but that the agent has never identified, by index. These GPUs serve no
    /// slices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unidentified_gpus: Vec<UnidentifiedGpuStatus>,
    /// Steps of the last change: done, waiting, refused or failed.
    #[serde(default)]
    pub steps: Vec<StepStatus>,
    /// The oldest findings about tenants that exceeded their limits, at most 32. After a restart of
    /// the agent, the list is empty until the agent finds the violations again.
    #[serde(default)]
    #[schemars(length(max = 32))]
    pub findings: Vec<FindingStatus>,
    /// Conditions by type.
    #[serde(default)]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".to_owned()]))]
    pub conditions: Vec<Condition>,
}

impl GpuNodeStatus {
    /// Moves MIG profiles from the GPUs to `models`, once for each model. If GPUs of one model
    /// differ in their profiles, the profiles remain with the GPUs. [`Self::move_profiles_to_gpus`]
    /// is the inverse.
    #[must_use]
    pub fn move_profiles_to_models(mut self) -> Self {
        let mut common: BTreeMap<&str, Option<&[MigProfileStatus]>> = BTreeMap::new();
        for (model, mig) in self.gpus.iter().filter_map(|gpu| Some((&gpu.model, gpu.mig.as_ref()?))) {
            let same = common.entry(model).or_insert(Some(&mig.profiles));
            *same = same.filter(|same| *same == mig.profiles);
        }
        let common_of = |(model, profiles): (&str, Option<&[MigProfileStatus]>)| {
            let mig_profiles = profiles.filter(|profiles| !profiles.is_empty())?.to_vec();
            Some(ModelStatus { model: model.to_owned(), mig_profiles })
        };
        self.models = common.into_iter().filter_map(common_of).collect();
        for gpu in &mut self.gpus {
            if let Some(mig) = gpu.mig.as_mut().filter(|_| self.models.iter().any(|known| known.model == gpu.model)) {
                mig.profiles = Vec::new();
            }
        }
        self
    }

    /// Moves each model's MIG profiles from `models` to its GPUs. Profiles that a GPU reports
    /// itself take precedence.
    #[must_use]
    pub fn move_profiles_to_gpus(mut self) -> Self {
        for gpu in &mut self.gpus {
            let known = self.models.iter().find(|known| known.model == gpu.model);
            if let (Some(known), Some(mig)) = (known, gpu.mig.as_mut().filter(|mig| mig.profiles.is_empty())) {
                mig.profiles.clone_from(&known.mig_profiles);
            }
        }
        self.models = Vec::new();
        self
    }
}

/// A GPU that NVML lists but cannot describe.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct UnidentifiedGpuStatus {
    /// NVML index.
    pub index: u32,
    /// Why NVML cannot describe the GPU.
    pub message: String,
}

/// Properties of all GPUs of one model.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelStatus {
    /// Product name of the GPUs.
    pub model: String,
    /// MIG profiles and placements as NVML reports them.
    #[serde(default)]
    pub mig_profiles: Vec<MigProfileStatus>,
}

/// Summary of a node's GPUs for `kubectl get gpunodes`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// Number of GPUs.
    pub gpus: u32,
    /// GPU models without duplicates, in the order of the GPUs' indices.
    pub models: String,
    /// Sharing modes of the GPUs: `Mps`, or `Mps=3,Whole=1`.
    pub modes: String,
    /// Slices in use, of those advertised to the kubelet: `7/31`.
    pub slices: String,
}

impl Summary {
    /// Summarizes GPUs that are sorted by index.
    pub fn from_gpus(gpus: &[GpuStatus]) -> Self {
        let mut products: Vec<&str> = Vec::new();
        let mut by_mode: BTreeMap<&str, u32> = BTreeMap::new();
        let (mut in_use, mut total) = (0_u32, 0_u32);
        for gpu in gpus {
            if !products.contains(&gpu.model.as_str()) {
                products.push(&gpu.model);
            }
            if !gpu.mode.is_empty() {
                *by_mode.entry(&gpu.mode).or_default() += 1;
            }
            for slice in &gpu.slices {
                in_use = in_use.saturating_add(slice.in_use);
                total = total.saturating_add(slice.total);
            }
        }
        let modes = match by_mode.iter().next() {
            Some((mode, _)) if by_mode.len() == 1 => (*mode).to_owned(),
            _ => by_mode.iter().map(|(mode, count)| format!("{mode}={count}")).collect::<Vec<_>>().join(","),
        };
        Self {
            gpus: u32::try_from(gpus.len()).unwrap_or(u32::MAX),
            models: products.join(", "),
            modes,
            slices: format!("{in_use}/{total}"),
        }
    }
}

/// Actual state of one GPU.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuStatus {
    /// UUID, as NVML reports it.
    pub uuid: String,
    /// NVML index.
    pub index: u32,
    /// Product name.
    pub model: String,
    /// Total memory in MiB.
    pub memory_mib: u64,
    /// Number of streaming multiprocessors (SMs).
    pub sms: u32,
    /// PCI bus id.
    #[serde(default)]
    pub pci: String,
    /// NUMA node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa: Option<u32>,
    /// MIG state, if the GPU supports MIG.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<MigStatus>,
    /// How the GPU is served now: `Whole`, `Mps`, `TimeSlicing` or `Mig`.
    #[serde(default)]
    pub mode: String,
    /// Slices, by device and resource.
    #[serde(default)]
    pub slices: Vec<SliceStatus>,
    /// Slices that are allocated to containers.
    #[serde(default)]
    pub allocations: Vec<AllocationStatus>,
    /// Whether the GPU can serve slices.
    #[serde(default)]
    pub health: Health,
    /// MPS daemons of the GPU or of its MIG instances.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mps: Vec<MpsStatus>,
    /// Progress of a quiesce, if the spec requests one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quiesce: Option<QuiesceStatus>,
}

/// Progress of the quiesce of one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct QuiesceStatus {
    /// Whether no pod and no process of Cleave uses the GPU. If so, the GPU can be reset. If all
    /// GPUs of the node are quiesced, the driver can be unloaded.
    pub quiesced: bool,
    /// What the quiesce waits for, or what the agent has stopped for it.
    #[serde(default)]
    pub message: String,
}

/// MIG state of one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigStatus {
    /// Whether MIG mode is on.
    pub enabled: bool,
    /// MIG mode after the next reset, if it differs from `enabled`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending: Option<bool>,
    /// Profiles and placements as NVML reports them. The list is empty if `models` lists the
    /// profiles for the GPU's model.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub profiles: Vec<MigProfileStatus>,
    /// MIG instances that exist.
    #[serde(default)]
    pub instances: Vec<MigInstanceStatus>,
}

/// One MIG profile of a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigProfileStatus {
    /// Profile name without prefix.
    pub name: String,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Number of streaming multiprocessors (SMs).
    pub sms: u32,
    /// Number of memory slices of one instance.
    pub size: u32,
    /// Memory slices at which an instance can start.
    pub starts: Vec<u32>,
}

/// One existing MIG instance.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigInstanceStatus {
    /// UUID of the MIG device. The UUID is empty if the instance has no compute instance.
    pub uuid: String,
    /// Profile name without prefix.
    pub profile: String,
    /// First memory slice.
    pub start: u32,
    /// GPU instance id.
    pub gpu_instance: u32,
    /// Compute instance id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_instance: Option<u32>,
    /// Health of this instance, if a fault affects only this instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<Health>,
}

/// Slices of one resource on one device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SliceStatus {
    /// UUID of the GPU or MIG device.
    pub device: String,
    /// Name of the extended resource.
    pub resource: String,
    /// First memory slice, if the device is a MIG instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<u32>,
    /// Number of slices advertised to the kubelet.
    pub total: u32,
    /// Number of these slices in use. All slices count as in use while the agent does not know
    /// which are.
    pub in_use: u32,
    /// Number of these slices reported to the kubelet as Unhealthy.
    pub unhealthy: u32,
}

/// Slices of one GPU that are allocated to one container, as the kubelet's PodResources API reports
/// them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AllocationStatus {
    /// The pod, as `namespace/name`.
    pub pod: String,
    /// Name of the container.
    pub container: String,
    /// Name of the extended resource.
    pub resource: String,
    /// UUID of the GPU or MIG device.
    pub device: String,
    /// Device ids.
    pub ids: Vec<String>,
    /// Active thread percentage under MPS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<u8>,
    /// Number of SMs that the container's processes can use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sms: Option<u32>,
    /// Memory limit of each of the container's processes in MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// Part of the memory limit that each process's CUDA context uses, in MiB. The process can
    /// allocate the remaining memory. The value is set only if it was measured for this GPU and
    /// driver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context_mib: Option<u64>,
    /// Number of MPS clients of the container.
    #[serde(default)]
    pub clients: u32,
}

/// Whether a GPU can serve slices.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Health {
    /// Whether the GPU can serve slices.
    pub healthy: bool,
    /// Health class of the GPU. The class determines what makes the GPU healthy again. `Suspect`: a
    /// period without further faults and an answer from NVML. `NeedsReset`: a reset, or `cleave
    /// uncordon`. `Lost`: an answer from NVML. The class is empty if the GPU is healthy or
    /// quiesced, or if its MPS daemon accepts no clients.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub class: String,
    /// Why the GPU cannot serve slices: `XidError`, `EccErrors`, `ResetRequired`, `RowRemapFailed`,
    /// `GpuLost`, `GpuMissing`, `GpuUnreachable`, `DriverUnavailable`, `MpsUnavailable` or
    /// `Quiesced`. `ResetPending` means that the GPU is healthy and serves slices, but a reset
    /// would repair a minor fault.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The reason as a sentence.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// When the fault was first found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
    /// When the fault was last found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<Time>,
}

/// One MPS daemon.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MpsStatus {
    /// UUID of the GPU or MIG device.
    pub device: String,
    /// State of the daemon: `Starting`, `Active`, `Fault`, `Restarting`, `BackOff` or `Stopping`.
    /// The state is empty while the MPS host does not report the daemon.
    pub state: String,
    /// PID of the control daemon on the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Whether doors enforce the limits of each allocation. Hard: they do. Advisory: the driver's
    /// MPS handshake is unknown, and the policy accepts that. Unknown: the handshake is unknown, or
    /// the daemon's replies to clients are unexpected. New clients cannot use the daemon.
    #[serde(default)]
    pub door: String,
    /// Number of restarts since the MPS host started.
    #[serde(default)]
    pub restarts: u32,
    /// The problem, as a sentence.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// One step towards the spec.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StepStatus {
    /// UUID of the GPU.
    pub gpu: String,
    /// The step, such as `serve 10 nvidia.com/gpu-mps`.
    pub action: String,
    /// Result: `Done`, `Waiting`, `Refused` or `Failed`.
    pub result: String,
    /// `InUse` for a step that waits until no pod or process uses the GPU or the slices that the
    /// step changes. `UsersUnknown` for a step that waits because the kubelet started recently and
    /// may not have listed all pods. Other steps have no reason.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The reason, as a sentence. If the step waits for pods, the message names the pods that use
    /// the slices.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// A tenant that exceeded its limits.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FindingStatus {
    /// Kind of finding: `MemoryExceeded`, `OutsideMps` or `NoShare`.
    pub kind: String,
    /// UUID of the GPU.
    pub gpu: String,
    /// UUID of the GPU or MIG device.
    pub device: String,
    /// Namespace of the pod. The namespace is empty if it is not known yet, or if the process
    /// belongs to no pod.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// Name of the pod.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub pod: String,
    /// UID of the pod. The UID is empty if the process belongs to no pod.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub uid: String,
    /// Name of the container.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub container: String,
    /// PID, on the node, of one of the tenant's processes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// What happened and what to do.
    pub message: String,
    /// When the agent made the finding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(model: &str, mode: &str, in_use: u32, total: u32) -> GpuStatus {
        GpuStatus {
            model: model.to_owned(),
            mode: mode.to_owned(),
            slices: vec![SliceStatus { total, in_use, ..SliceStatus::default() }],
            ..GpuStatus::default()
        }
    }

    fn gpu_with_mig(model: &str, profiles: &[&str]) -> GpuStatus {
        let profile = |name: &&str| MigProfileStatus { name: (*name).to_owned(), ..MigProfileStatus::default() };
        let mig = MigStatus { profiles: profiles.iter().map(profile).collect(), ..MigStatus::default() };
        GpuStatus { mig: Some(mig), ..gpu(model, "", 0, 0) }
    }

    #[test]
    fn common_profiles_move_to_the_model_once_and_back_to_each_gpu() {
        for gpus in [
            vec![],
            vec![gpu("T4", "", 0, 0)],
            vec![gpu_with_mig("A100", &["1g", "7g"]); 8],
            vec![gpu_with_mig("A100", &["1g"]), gpu_with_mig("H100", &["1g", "7g"]), gpu("T4", "", 0, 0)],
            vec![gpu_with_mig("A100", &[]), gpu_with_mig("A100", &[])],
            // A GPU does not receive profiles that only other GPUs of its model have.
            vec![gpu_with_mig("A100", &["1g"]), gpu_with_mig("A100", &[]), gpu_with_mig("H100", &["1g"])],
            vec![gpu("A100", "", 0, 0), gpu_with_mig("A100", &["1g"])],
        ] {
            let original = GpuNodeStatus { gpus, ..GpuNodeStatus::default() };
            let compact = original.clone().move_profiles_to_models();
            let read: GpuNodeStatus = serde_json::from_value(serde_json::to_value(&compact).unwrap()).unwrap();
            assert_eq!(read.move_profiles_to_gpus(), original, "{compact:?}");
        }
        let eight = GpuNodeStatus { gpus: vec![gpu_with_mig("A100", &["1g", "7g"]); 8], ..GpuNodeStatus::default() };
        assert_eq!(serde_json::to_string(&eight.move_profiles_to_models()).unwrap().matches("7g").count(), 1);
    }

    #[test]
    fn a_summary_counts_models_modes_and_slices() {
        let same = Summary::from_gpus(&[gpu("A", "Mps", 3, 10), gpu("A", "Mps", 4, 10)]);
        assert_eq!(
            (same.gpus, same.models.as_str(), same.modes.as_str(), same.slices.as_str()),
            (2, "A", "Mps", "7/20")
        );
        let mixed = Summary::from_gpus(&[gpu("B", "Whole", 1, 1), gpu("A", "Mps", 0, 10), gpu("B", "Mps", 0, 10)]);
        assert_eq!((mixed.models.as_str(), mixed.modes.as_str()), ("B, A", "Mps=2,Whole=1"));
        let none = Summary::from_gpus(&[]);
        assert_eq!((none.gpus, none.models.as_str(), none.modes.as_str(), none.slices.as_str()), (0, "", "", "0/0"));
    }
}
