//! Kubernetes Events that the agent publishes.
use cleave_api::gpunode::FindingStatus;

/// An Event about the node, or about a pod on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeEvent {
    /// Whether it is a warning.
    pub warning: bool,
    /// The reason, in one word.
    pub reason: &'static str,
    /// The note, in full sentences.
    pub note: String,
    /// The pod that the Event is about. The Event is published on that pod too.
    pub regarding: Option<PodRef>,
    /// The pod that caused the Event, if the Event is published on the node alone. Events with
    /// different related pods are not merged.
    pub related: Option<PodRef>,
}

/// A pod that an Event refers to.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodRef {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID, or empty if unknown.
    pub uid: String,
}

/// An Event about a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodEvent {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub pod: String,
    /// Its UID.
    pub uid: String,
    /// The reason, in one word.
    pub reason: String,
    /// The note, in full sentences.
    pub note: String,
}

impl PodEvent {
    /// The Event for a finding.
    pub fn of(finding: FindingStatus) -> Self {
        let FindingStatus { kind, namespace, pod, uid, message, .. } = finding;
        Self { namespace, pod, uid, reason: kind, note: message }
    }
}

/// A warning about the node.
pub fn warning(reason: &'static str, note: String) -> NodeEvent {
    NodeEvent { warning: true, reason, note, regarding: None, related: None }
}

/// A normal Event about the node: something works again.
pub fn recovered(note: String) -> NodeEvent {
    NodeEvent { warning: false, reason: "Recovered", note, regarding: None, related: None }
}
