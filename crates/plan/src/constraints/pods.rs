//! The pods to which the rules apply.
use super::rules::Rules;
use super::selector::Labels;
use crate::snapshot::{NodeSelectorTerm, Pod};

/// A pod on a node, or with a reservation on one. A pod with reservations on several nodes is a
/// neighbour on each.
#[derive(Debug, Clone, Copy)]
pub struct Neighbour<'a> {
    /// Its namespace.
    pub namespace: &'a str,
    /// Its labels.
    pub labels: &'a Labels,
    /// Name of the node. If the node is not passed to
    /// [`NodeChecker::new`](super::NodeChecker::new), only the neighbour's ports count.
    pub node: &'a str,
    /// Its rules. Only anti-affinity and ports are read.
    pub rules: &'a Rules,
    /// Whether it is being deleted. It still counts for affinity and ports, but not for spread.
    pub terminating: bool,
}

/// The pod to place.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    /// Its namespace.
    pub namespace: &'a str,
    /// Its labels.
    pub labels: &'a Labels,
    /// Its rules.
    pub rules: &'a Rules,
    /// Its node selector, node affinity and tolerations, which decide which nodes count for spread
    /// constraints.
    pub pod: &'a Pod,
    /// Required node affinity of each bound `PersistentVolume` that it mounts. A volume without
    /// terms can be used on every node.
    pub volumes: &'a [Vec<NodeSelectorTerm>],
}
