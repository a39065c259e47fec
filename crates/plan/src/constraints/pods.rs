//! The subject of the rules, and the pods that are already placed.
use super::rules::Rules;
use super::selector::Labels;
use crate::snapshot::{NodeSelectorTerm, Pod};

/// A pod that runs on a node or has a reservation on the node. A pod with reservations on several
/// nodes counts on each of these nodes.
#[derive(Debug, Clone, Copy)]
pub struct PlacedPod<'a> {
    /// Namespace of the pod.
    pub namespace: &'a str,
    /// Labels of the pod.
    pub labels: &'a Labels,
    /// Name of the node. If [`NodeChecker::new`](super::NodeChecker::new) does not receive the
    /// node, only the pod's ports count.
    pub node: &'a str,
    /// Rules of the pod. The checker reads only their anti-affinity and ports.
    pub rules: &'a Rules,
    /// Whether the pod is being deleted. A terminating pod still counts for affinity and ports, but
    /// not for spread.
    pub terminating: bool,
}

/// The pod to place.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    /// Namespace of the pod.
    pub namespace: &'a str,
    /// Labels of the pod.
    pub labels: &'a Labels,
    /// Rules of the pod.
    pub rules: &'a Rules,
    /// The pod with its node selector, node affinity and tolerations. These fields determine which
    /// nodes count for spread constraints.
    pub pod: &'a Pod,
    /// Required node affinity of each bound `PersistentVolume` that the pod mounts. A volume
    /// without terms can be used on every node.
    pub volumes: &'a [Vec<NodeSelectorTerm>],
}
