//! Kubernetes Events that the agent publishes.
use cleave_api::gpunode::FindingStatus;

/// An Event about the node, or about a pod on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeEvent {
    /// Whether the type of the Event is Warning.
    pub warning: bool,
    /// Reason of the Event, in one word.
    pub reason: &'static str,
    /// Note of the Event, in full sentences.
    pub note: String,
    /// The pod that the Event is about. The agent also publishes the Event on this pod.
    pub regarding: Option<PodRef>,
    /// The pod or device that the Event concerns, if the agent publishes the Event on the node
    /// alone. The recorder merges Events with the same reason and the same subject, and keeps only
    /// the first note.
    pub related: Option<EventSubject>,
}

/// The pod or device that an Event about the node concerns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EventSubject {
    /// A pod on the node.
    Pod(PodRef),
    /// The GPU or MIG device with this UUID.
    Device(String),
}

impl EventSubject {
    /// Returns the device as a related object.
    pub fn device(device: &str) -> Option<Self> {
        Some(Self::Device(device.to_owned()))
    }
}

/// A pod that an Event refers to.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodRef {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// UID of the pod, or empty if unknown.
    pub uid: String,
}

/// An Event about a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodEvent {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// UID of the pod.
    pub uid: String,
    /// Reason of the Event, in one word.
    pub reason: String,
    /// Note of the Event, in full sentences.
    pub note: String,
}

impl PodEvent {
    /// Returns the Event for a finding.
    pub fn for_finding(finding: FindingStatus) -> Self {
        let FindingStatus { kind, namespace, pod, uid, message, .. } = finding;
        Self { namespace, pod, uid, reason: kind, note: message }
    }
}

/// Returns a warning about a device of the node.
pub fn device_warning(reason: &'static str, device: &str, note: String) -> NodeEvent {
    NodeEvent { warning: true, reason, note, regarding: None, related: EventSubject::device(device) }
}

/// Returns an Event of type Normal, which reports that a device of the node has recovered.
pub fn device_recovery(device: &str, note: String) -> NodeEvent {
    NodeEvent { warning: false, reason: "Recovered", note, regarding: None, related: EventSubject::device(device) }
}
