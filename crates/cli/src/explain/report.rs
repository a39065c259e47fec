//! The content of `cleave explain pod`. The fields are those of `--output json`.
use serde::Serialize;

/// What a pod requests and gets, and why.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    /// `namespace/name`.
    pub pod: String,
    /// Priority of the pod.
    pub priority: i32,
    /// Scheduling gates that the pod still has.
    pub gates: Vec<String>,
    /// What the pod requests. Each part must come from one device.
    pub asks: Vec<Part>,
    /// The state of the pod.
    pub verdict: Verdict,
    /// Allocations, or the reservation of a pod that does not run yet.
    pub holds: Vec<Given>,
    /// Nodes on which Cleave manages GPUs.
    pub nodes: Vec<NodeView>,
    /// Number of other nodes.
    pub other_nodes: usize,
    /// What would let the pod run, one sentence each.
    pub help: Vec<String>,
}

/// An amount of a resource that must come from one device.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Part {
    /// Name of the resource.
    pub resource: String,
    /// The amount.
    pub units: u32,
}

/// The state of a pod and the reason for it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
    /// The state in one word.
    pub state: State,
    /// The reason, for the owner of the pod.
    pub message: String,
}

/// The state of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum State {
    /// The pod is on a node.
    Bound,
    /// The pod has a reservation, and waits for the scheduler.
    Held,
    /// The pod fits, and the operator will release it.
    Fits,
    /// The pod waits until a GPU has room.
    Waits,
    /// No GPU of the cluster can ever hold the pod.
    Never,
    /// Another scheduling gate keeps the pod.
    OtherGate,
    /// The pod waits for the scheduler without a reservation.
    Scheduler,
    /// The pod requests nothing that Cleave serves.
    NotOurs,
    /// The pod has ended, or is being deleted.
    Ended,
}

impl State {
    /// Whether a pod in this state needs room on a GPU.
    pub(super) const fn needs_room(self) -> bool {
        matches!(self, Self::Fits) || self.needs_help()
    }

    /// Whether something has to change before the pod can run.
    pub(super) const fn needs_help(self) -> bool {
        matches!(self, Self::Waits | Self::Never | Self::Scheduler)
    }
}

/// An amount of one device that is allocated to the pod, or reserved for it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Given {
    /// The node.
    pub node: String,
    /// Index of the GPU, if the node reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<u32>,
    /// UUID of the GPU or MIG device.
    pub device: String,
    /// Name of the resource.
    pub resource: String,
    /// The amount.
    pub units: u32,
    /// Name of the container. `None` of a reservation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
}

/// A node as the pod sees it.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeView {
    /// Name of the node.
    pub name: String,
    /// Why the pod cannot use the node, whatever its GPUs have free. `None` if it can.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refusal: Option<String>,
    /// GPUs of the node.
    pub gpus: Vec<GpuView>,
}

/// A GPU as the pod sees it.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuView {
    /// Index on its node.
    pub index: u32,
    /// UUID of the GPU.
    pub uuid: String,
    /// Product name.
    pub model: String,
    /// Sharing mode now.
    pub mode: String,
    /// The policy that applies to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Why no pod can get anything of it now. `None` if pods can.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unable: Option<String>,
    /// What it offers.
    pub devices: Vec<DeviceView>,
}

/// What a GPU or MIG device offers of one resource.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceView {
    /// UUID of the GPU or MIG device.
    pub device: String,
    /// Name of the resource.
    pub resource: String,
    /// The total amount.
    pub total: u32,
    /// The amount that pods use, or that no pod can get now.
    pub used: u32,
    /// The amount reserved for pods that do not run yet.
    pub held: u32,
    /// The amount that is left.
    pub free: u32,
    /// What that means for this pod.
    pub note: String,
}
