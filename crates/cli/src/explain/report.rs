//! The result of `cleave explain pod`. `--output json` prints the same fields.
use serde::Serialize;

/// The requests of a pod, its state, and the reasons.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    /// `namespace/name`.
    pub pod: String,
    /// Priority of the pod.
    pub priority: i32,
    /// The pod's remaining scheduling gates.
    pub gates: Vec<String>,
    /// The pod's requests for devices. Each amount must be available on one device.
    pub requests: Vec<RequestedUnits>,
    /// The state of the pod.
    pub verdict: PodVerdict,
    /// Descriptions of the quotas of the pod's namespace. Empty if the user can list no quotas, or
    /// if the pod has ended or requests no device.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub quotas: Vec<String>,
    /// The pod's allocations, or its reservation if the pod is not yet running.
    pub assignments: Vec<Assignment>,
    /// The nodes on which Cleave manages GPUs.
    pub nodes: Vec<NodeView>,
    /// Number of nodes on which Cleave manages no GPUs.
    pub other_nodes: usize,
    /// Changes that would help the pod to run, one sentence each.
    pub help: Vec<String>,
}

/// An amount of a resource that must be available on one device.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RequestedUnits {
    /// Name of the resource.
    pub resource: String,
    /// Number of units of the resource.
    pub units: u32,
}

/// The state of a pod and the reason for it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PodVerdict {
    /// The state in one word.
    pub state: PodState,
    /// The reason, for the owner of the pod.
    pub message: String,
}

/// The state of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum PodState {
    /// The pod is on a node.
    Bound,
    /// The pod has a reservation and waits for the scheduler.
    Reserved,
    /// The pod fits, and the operator will release it.
    Fits,
    /// The pod waits for a GPU, or for its quota.
    Waiting,
    /// The pod fits on no GPU of the cluster, even if all other pods end.
    Never,
    /// The pod waits for another scheduling gate.
    OtherGate,
    /// The pod waits for the scheduler without a reservation.
    Scheduler,
    /// The pod requests no resource that Cleave serves.
    NotManaged,
    /// The pod has ended, or is being deleted and has no node.
    Ended,
}

impl PodState {
    /// Returns whether a pod in this state needs capacity on a GPU.
    pub(super) const fn needs_room(self) -> bool {
        matches!(self, Self::Fits) || self.runs_only_after_a_change()
    }

    /// Returns whether the pod can run only after a change.
    pub(super) const fn runs_only_after_a_change(self) -> bool {
        matches!(self, Self::Waiting | Self::Never | Self::Scheduler)
    }
}

/// An amount of one device, either allocated to the pod or reserved for it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Assignment {
    /// Name of the node.
    pub node: String,
    /// Index of the GPU, if the node reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<u32>,
    /// UUID of the GPU or MIG device.
    pub device: String,
    /// Name of the resource.
    pub resource: String,
    /// Number of units of the resource.
    pub units: u32,
    /// Name of the container. `None` for a reservation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
}

/// A node, as the pod sees it.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeView {
    /// Name of the node.
    pub name: String,
    /// Why the pod cannot use the node even if GPUs are free. `None` if the pod can use the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refusal: Option<String>,
    /// GPUs of the node.
    pub gpus: Vec<GpuView>,
}

/// A GPU, as the pod sees it.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuView {
    /// Index on its node.
    pub index: u32,
    /// UUID of the GPU.
    pub uuid: String,
    /// Product name.
    pub model: String,
    /// Current sharing mode.
    pub mode: String,
    /// Name of the policy that applies to the GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Why no new pod can use the GPU now. `None` if the GPU is usable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unavailable: Option<String>,
    /// The GPU or its MIG devices, with their resources.
    pub devices: Vec<DeviceView>,
}

/// One resource of a GPU or MIG device.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceView {
    /// UUID of the GPU or MIG device.
    pub device: String,
    /// Name of the resource.
    pub resource: String,
    /// Total number of units.
    pub total: u32,
    /// Number of units that pods use or that are currently unavailable.
    pub used: u32,
    /// Number of units reserved for pods that are not yet running.
    pub reserved: u32,
    /// Number of free units.
    pub free: u32,
    /// Whether the pod fits into the resource, or why not. Empty if the pod needs no capacity.
    pub note: String,
}
