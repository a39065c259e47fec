//! Events: what the agent reports to people through Kubernetes.
use cleave_api::gpunode::FindingStatus;

/// Something that happened, for an `Event`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeEvent {
    /// A warning, or good news.
    pub warning: bool,
    /// One word.
    pub reason: &'static str,
    /// A sentence.
    pub note: String,
    /// The pod that it is about; it is told on that pod too.
    pub regarding: Option<PodRef>,
    /// A pod that it comes from, where it is told on the node alone: what comes from two is told
    /// twice.
    pub related: Option<PodRef>,
}

/// A pod that something is told of.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodRef {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID; empty where it is not known.
    pub uid: String,
}

/// What a pod is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodEvent {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub pod: String,
    /// Its UID.
    pub uid: String,
    /// One word.
    pub reason: String,
    /// A sentence.
    pub note: String,
}

impl PodEvent {
    /// The event of a finding.
    pub fn of(finding: FindingStatus) -> Self {
        let FindingStatus { kind, namespace, pod, uid, message, .. } = finding;
        Self { namespace, pod, uid, reason: kind, note: message }
    }
}

/// A warning about the node.
pub fn warning(reason: &'static str, note: String) -> NodeEvent {
    NodeEvent { warning: true, reason, note, regarding: None, related: None }
}

/// Good news about the node: something works again.
pub fn recovered(note: String) -> NodeEvent {
    NodeEvent { warning: false, reason: "Recovered", note, regarding: None, related: None }
}
