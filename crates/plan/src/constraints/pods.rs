//! The pods that the rules are applied to.
use super::rules::Rules;
use super::selector::Labels;
use crate::snapshot::{NodeSelectorTerm, Pod};

/// A pod that is on a node, or has a reservation on one. A reservation on several nodes is one
/// neighbour on each.
#[derive(Debug, Clone, Copy)]
pub struct Neighbour<'a> {
    /// Its namespace.
    pub namespace: &'a str,
    /// Its labels.
    pub labels: &'a Labels,
    /// The node's name. A neighbour on a node that [`Judge::new`] is not given only takes ports.
    pub node: &'a str,
    /// Its rules. Only anti-affinity and ports are read.
    pub rules: &'a Rules,
    /// It is being deleted. It still counts for affinity and ports, but not for spread.
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
    /// Required node affinity of each `PersistentVolume` that it mounts and that is bound. A volume
    /// without terms can be used anywhere.
    pub volumes: &'a [Vec<NodeSelectorTerm>],
}
