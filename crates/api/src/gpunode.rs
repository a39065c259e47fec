//! `GpuNode`: what a node's GPUs shall be (`spec`, written by the operator) and are (`status`,
//! written by the agent).
#![expect(unreachable_pub, reason = "the schema derives copy public structs into functions")]
#![expect(clippy::duplicated_attributes, reason = "columns of a type repeat `type_`")]

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::sharingpolicy::{ComputeMode, Enforcement, Interval};

/// What the GPUs of the node of the same name shall be. Complete: the agent makes no choices.
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
    doc = "What the GPUs of the node of the same name shall be (spec, written by the operator) and are (status, written by the node's agent).",
    printcolumn(
        name = "GPUs",
        type_ = "integer",
        json_path = ".status.summary.gpus",
        description = "GPUs of the node"
    ),
    printcolumn(name = "Model", type_ = "string", json_path = ".status.summary.models", description = "Their models"),
    printcolumn(
        name = "Modes",
        type_ = "string",
        json_path = ".status.summary.modes",
        description = "What they are served as"
    ),
    printcolumn(
        name = "Slices",
        type_ = "string",
        json_path = ".status.summary.slices",
        description = "Slices in use, of those told to the kubelet"
    ),
    printcolumn(
        name = "Applied",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Applied\")].status",
        description = "The node matches its spec"
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
    /// A hash of `gpus`, so that a status can say which spec it is of. Empty until the operator has
    /// seen the node's GPUs and planned them.
    #[serde(default)]
    #[schemars(length(max = 64))]
    pub plan_id: String,
    /// GPUs that shall be as written, by index; a GPU that is not here is whole and served as
    /// `nvidia.com/gpu`. One that is here and not in the node is to be ignored.
    #[serde(default)]
    #[schemars(length(max = 64))]
    pub gpus: Vec<GpuSpec>,
}

/// What one GPU shall be.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuSpec {
    /// The GPU.
    pub uuid: String,
    /// The `SharingPolicy` that this comes from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// What happens to a pod that leaves its limits.
    #[serde(default)]
    pub enforcement: Enforcement,
    /// How the GPU (or, under `mig`, nothing itself) is served.
    pub partition: Partition,
    /// An administrator keeps new pods away from it: its free slices are told as Unhealthy, those
    /// in use stay as they are.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cordoned: bool,
    /// An administrator says that what was found wrong with it up to this time
    /// (`status.gpus[].health.last`) is over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cleared: Option<Time>,
}

/// How a GPU is served: exactly one field is set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("[has(self.whole), has(self.mps), has(self.timeSlicing), has(self.mig)].filter(given, given).size() == 1")
    .message("a partition is one of whole, mps, timeSlicing and mig"))]
pub struct Partition {
    /// Undivided, one device of this resource.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub whole: Option<Whole>,
    /// Shares under MPS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps: Option<MpsPartition>,
    /// Time-sliced replicas.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_slicing: Option<TimeSlicedPartition>,
    /// MIG instances, each served in its own way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    pub mig: Option<Vec<MigInstanceSpec>>,
}

/// Undivided.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Whole {
    /// The extended resource, `nvidia.com/gpu` or `nvidia.com/mig-<profile>`.
    pub resource: String,
}

/// MPS slices of a GPU or MIG instance. The sum of `count · units` is at most `units` of the GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MpsPartition {
    /// Clients of several uids share one server.
    pub multi_user: bool,
    /// The compute mode while the daemon runs.
    pub compute_mode: ComputeMode,
    /// What is served.
    pub slices: Vec<MpsSlices>,
}

/// Equal MPS slices of one resource.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MpsSlices {
    /// The extended resource: `nvidia.com/gpu-mps`, `nvidia.com/gpu-10gb`.
    pub resource: String,
    /// How many; device ids are `<uuid>::<first>` and so on.
    pub count: u32,
    /// Number of the first device id, so that ids stay what they were when other slices come and
    /// go.
    #[serde(default)]
    pub first: u32,
    /// Memory of k slices, MiB, indexed by k − 1; empty is no limit.
    ///
    /// A list and not a product, because k of n shares of a GPU are not k times one share rounded
    /// down.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory_mib: Vec<u64>,
    /// Active thread percentage of k slices, indexed by k − 1; empty is no limit.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub threads: Vec<u8>,
    /// Most clients of one allocation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_clients: Option<u32>,
}

/// Time-sliced replicas.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TimeSlicedPartition {
    /// The extended resource.
    pub resource: String,
    /// How many.
    pub replicas: u32,
    /// How long a turn is.
    #[serde(default)]
    pub interval: Interval,
}

/// One MIG instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigInstanceSpec {
    /// Profile name without prefix: `1g.10gb`, `1g.10gb+me`.
    pub profile: String,
    /// First memory slice, as NVML's placements count.
    pub start: u32,
    /// How the instance is served.
    pub partition: MigPartition,
}

/// How a MIG instance is served: exactly one field is set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("[has(self.whole), has(self.mps), has(self.timeSlicing)].filter(given, given).size() == 1")
    .message("an instance's partition is one of whole, mps and timeSlicing"))]
pub struct MigPartition {
    /// Undivided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub whole: Option<Whole>,
    /// Shares under MPS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps: Option<MpsPartition>,
    /// Time-sliced replicas.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_slicing: Option<TimeSlicedPartition>,
}

/// What the node is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuNodeStatus {
    /// Generation of the spec that this status is of.
    #[serde(default)]
    pub observed_generation: i64,
    /// `spec.planId` that the node matches, when it does.
    #[serde(default)]
    pub plan_id: String,
    /// Version of the agent.
    #[serde(default)]
    pub agent_version: String,
    /// Driver version, as NVML gives it.
    #[serde(default)]
    pub driver: String,
    /// Boot id of the node's kernel.
    #[serde(default)]
    pub boot_id: String,
    /// `gpus` in a few words, for `kubectl get`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<Summary>,
    /// What GPUs of one model have in common, by model. Told once and not with each GPU: a status
    /// is written whole whenever a pod comes or goes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<ModelStatus>,
    /// GPUs by index.
    #[serde(default)]
    pub gpus: Vec<GpuStatus>,
    /// What was done, or refused, to match the spec; of the last change only.
    #[serde(default)]
    pub steps: Vec<StepStatus>,
    /// Tenants that left their shares, the first 32. Also when empty: it is the agent's word that
    /// nobody did.
    #[serde(default)]
    #[schemars(length(max = 32))]
    pub findings: Vec<FindingStatus>,
    /// Conditions by type.
    #[serde(default)]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".to_owned()]))]
    pub conditions: Vec<Condition>,
}

impl GpuNodeStatus {
    /// Tells MIG profiles once for each model instead of with each GPU; of a model whose GPUs
    /// differ in them they stay with the GPUs. [`Self::complete`] is the way back.
    #[must_use]
    pub fn compact(mut self) -> Self {
        let mut common: BTreeMap<&str, Option<&[MigProfileStatus]>> = BTreeMap::new();
        for (model, mig) in self.gpus.iter().filter_map(|gpu| Some((&gpu.model, gpu.mig.as_ref()?))) {
            let same = common.entry(model).or_insert(Some(&mig.profiles));
            *same = same.filter(|same| *same == mig.profiles);
        }
        let told = |(model, profiles): (&str, Option<&[MigProfileStatus]>)| {
            let mig_profiles = profiles.filter(|profiles| !profiles.is_empty())?.to_vec();
            Some(ModelStatus { model: model.to_owned(), mig_profiles })
        };
        self.models = common.into_iter().filter_map(told).collect();
        for gpu in &mut self.gpus {
            if let Some(mig) = gpu.mig.as_mut().filter(|_| self.models.iter().any(|known| known.model == gpu.model)) {
                mig.profiles = Vec::new();
            }
        }
        self
    }

    /// Gives each GPU the MIG profiles of its model, as those who plan want them. What a GPU says
    /// itself counts.
    #[must_use]
    pub fn complete(mut self) -> Self {
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

/// What GPUs of one model have in common.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelStatus {
    /// Product name, as the GPUs have it.
    pub model: String,
    /// MIG profiles and placements as NVML reports them.
    #[serde(default)]
    pub mig_profiles: Vec<MigProfileStatus>,
}

/// A node's GPUs in a few words, for `kubectl get gpunodes`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// How many GPUs.
    pub gpus: u32,
    /// Their models, each once, by index.
    pub models: String,
    /// What they are served as: `Mps`, or `Mps=3,Whole=1`.
    pub modes: String,
    /// Slices in use, of those told to the kubelet: `7/31`.
    pub slices: String,
}

impl Summary {
    /// The summary of GPUs by index.
    pub fn of(gpus: &[GpuStatus]) -> Self {
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

/// One GPU as it is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuStatus {
    /// NVML's UUID.
    pub uuid: String,
    /// NVML's index.
    pub index: u32,
    /// Product name.
    pub model: String,
    /// Total memory, MiB.
    pub memory_mib: u64,
    /// Streaming multiprocessors.
    pub sms: u32,
    /// PCI bus id.
    #[serde(default)]
    pub pci: String,
    /// NUMA node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa: Option<u32>,
    /// MIG, where the GPU can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<MigStatus>,
    /// Whole, Mps, `TimeSlicing` or Mig: what it is served as now.
    #[serde(default)]
    pub mode: String,
    /// Slices by device and resource.
    #[serde(default)]
    pub slices: Vec<SliceStatus>,
    /// Who holds what.
    #[serde(default)]
    pub allocations: Vec<AllocationStatus>,
    /// Whether it can serve.
    #[serde(default)]
    pub health: Health,
    /// MPS daemons, of the GPU or of its MIG instances.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mps: Vec<MpsStatus>,
}

/// MIG of one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigStatus {
    /// MIG mode is on.
    pub enabled: bool,
    /// MIG mode after the next reset, where it differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending: Option<bool>,
    /// Profiles and placements as NVML reports them, where they are not told for all GPUs of the
    /// model.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub profiles: Vec<MigProfileStatus>,
    /// Instances that exist.
    #[serde(default)]
    pub instances: Vec<MigInstanceStatus>,
}

/// One MIG profile of a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigProfileStatus {
    /// Name without prefix.
    pub name: String,
    /// Memory, MiB.
    pub memory_mib: u64,
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Memory slices of one instance.
    pub size: u32,
    /// First memory slices where one may lie.
    pub starts: Vec<u32>,
}

/// One MIG instance as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigInstanceStatus {
    /// UUID of the MIG device; empty while it has no compute instance.
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
    /// What is wrong with this instance alone; none where nothing is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<Health>,
}

/// Slices of one device and resource.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SliceStatus {
    /// UUID of the GPU or MIG device.
    pub device: String,
    /// The extended resource.
    pub resource: String,
    /// First memory slice, of a MIG instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<u32>,
    /// How many the kubelet is told of.
    pub total: u32,
    /// Of these, in use.
    pub in_use: u32,
    /// Of these, told as Unhealthy.
    pub unhealthy: u32,
}

/// What one container holds on one GPU, from the kubelet's PodResources.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AllocationStatus {
    /// Pod, `namespace/name`.
    pub pod: String,
    /// Container.
    pub container: String,
    /// The extended resource.
    pub resource: String,
    /// UUID of the GPU or MIG device.
    pub device: String,
    /// Device ids.
    pub ids: Vec<String>,
    /// Active thread percentage, under MPS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<u8>,
    /// SMs that its processes see.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sms: Option<u32>,
    /// Memory of each of its processes at most, MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// Of that memory, what each process's CUDA context takes itself, MiB, where it was measured
    /// for the GPU and its driver: the rest can be allocated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context_mib: Option<u64>,
    /// MPS clients.
    #[serde(default)]
    pub clients: u32,
}

/// Whether a GPU can serve.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Health {
    /// It can.
    pub healthy: bool,
    /// What has to happen until it can again: `Suspect` (a quiet time and an answer), `NeedsReset`
    /// (a reset, or an administrator's word), `Lost` (NVML has to answer). Empty where it is
    /// healthy, or another part of the node is in the way.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub class: String,
    /// Why not, as one word: `XidError`, `EccErrors`, `ResetRequired`, `RowRemapFailed`, `GpuLost`,
    /// `GpuUnreachable`, `DriverUnavailable`, `MpsUnavailable`; of a healthy one `ResetPending`,
    /// where a reset would mend what does not hinder it yet.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Why not, in words.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// When that was first found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
    /// When it was last found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<Time>,
}

/// One MPS daemon.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MpsStatus {
    /// UUID of the GPU or MIG device.
    pub device: String,
    /// Starting, Active, Fault, Restarting, `BackOff`, Stopping.
    pub state: String,
    /// Pid of the control daemon on the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Hard or Advisory: whether the door can set each allocation's limits on this driver.
    #[serde(default)]
    pub door: String,
    /// Restarts since the MPS host started.
    #[serde(default)]
    pub restarts: u32,
    /// What is wrong, in words.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// One step towards the spec.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StepStatus {
    /// The GPU.
    pub gpu: String,
    /// What, in words: `serve 10 nvidia.com/gpu-mps`.
    pub action: String,
    /// Done, Waiting, Refused or Failed.
    pub result: String,
    /// `InUse` for a step that waits until pods or processes release what it would remove; otherwise
    /// empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Why, in words; for Waiting and Refused which pods hold it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// A tenant that left its share.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FindingStatus {
    /// What it did: `MemoryExceeded`, `OutsideMps` or `NoShare`.
    pub kind: String,
    /// UUID of the GPU.
    pub gpu: String,
    /// UUID of the GPU or MIG device.
    pub device: String,
    /// Namespace of the pod; empty while that is not known, and where no pod did it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// The pod.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub pod: String,
    /// UID of the pod; empty where no pod did it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub uid: String,
    /// The container.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub container: String,
    /// Pid of one of its processes, on the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// What, in words, and what to do.
    pub message: String,
    /// When it was found.
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

    fn with_mig(model: &str, profiles: &[&str]) -> GpuStatus {
        let profile = |name: &&str| MigProfileStatus { name: (*name).to_owned(), ..MigProfileStatus::default() };
        let mig = MigStatus { profiles: profiles.iter().map(profile).collect(), ..MigStatus::default() };
        GpuStatus { mig: Some(mig), ..gpu(model, "", 0, 0) }
    }

    #[test]
    fn what_gpus_of_a_model_have_in_common_is_told_once_and_nothing_is_lost() {
        for gpus in [
            vec![],
            vec![gpu("T4", "", 0, 0)],
            vec![with_mig("A100", &["1g", "7g"]); 8],
            vec![with_mig("A100", &["1g"]), with_mig("H100", &["1g", "7g"]), gpu("T4", "", 0, 0)],
            vec![with_mig("A100", &[]), with_mig("A100", &[])],
            // One that cannot what its like can is not given it.
            vec![with_mig("A100", &["1g"]), with_mig("A100", &[]), with_mig("H100", &["1g"])],
            vec![gpu("A100", "", 0, 0), with_mig("A100", &["1g"])],
        ] {
            let told = GpuNodeStatus { gpus, ..GpuNodeStatus::default() };
            let compact = told.clone().compact();
            let read: GpuNodeStatus = serde_json::from_value(serde_json::to_value(&compact).unwrap()).unwrap();
            assert_eq!(read.complete(), told, "{compact:?}");
        }
        let eight = GpuNodeStatus { gpus: vec![with_mig("A100", &["1g", "7g"]); 8], ..GpuNodeStatus::default() };
        assert_eq!(serde_json::to_string(&eight.compact()).unwrap().matches("7g").count(), 1);
    }

    #[test]
    fn a_summary_says_what_a_column_holds() {
        let same = Summary::of(&[gpu("A", "Mps", 3, 10), gpu("A", "Mps", 4, 10)]);
        assert_eq!(
            (same.gpus, same.models.as_str(), same.modes.as_str(), same.slices.as_str()),
            (2, "A", "Mps", "7/20")
        );
        let mixed = Summary::of(&[gpu("B", "Whole", 1, 1), gpu("A", "Mps", 0, 10), gpu("B", "Mps", 0, 10)]);
        assert_eq!((mixed.models.as_str(), mixed.modes.as_str()), ("B, A", "Mps=2,Whole=1"));
        let none = Summary::of(&[]);
        assert_eq!((none.gpus, none.models.as_str(), none.modes.as_str(), none.slices.as_str()), (0, "", "", "0/0"));
    }
}
