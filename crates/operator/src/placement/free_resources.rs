//! Tracks the free CPU, memory and other resources of nodes within one reconcile.
use std::collections::BTreeMap;

use cleave_api::names::is_served;
use cleave_plan::Quantity;
use cleave_plan::ledger::{Claim, Ledger, Place};

use super::nodes::{self, Nodes};
use super::pod_tracker::PodTracker;
use crate::pods::PodObject;

/// Free resources by node, in thousandths. Pods that are released to a node count as if they were
/// bound to it. A node's free resources are computed when they are first needed.
pub(super) struct FreeResources<'a> {
    nodes: &'a Nodes,
    tracker: &'a PodTracker,
    /// Requests of the pods that are released to each node but not bound.
    released: BTreeMap<&'a str, Vec<&'a BTreeMap<String, Quantity>>>,
    computed: BTreeMap<&'a str, BTreeMap<&'a str, u64>>,
}

impl<'a> FreeResources<'a> {
    pub(super) fn new(nodes: &'a Nodes, tracker: &'a PodTracker, ledger: &Ledger, unsettled: &[&'a PodObject]) -> Self {
        let mut released: BTreeMap<&'a str, Vec<&'a BTreeMap<String, Quantity>>> = BTreeMap::new();
        for pod in unsettled.iter().filter(|pod| pod.node().is_none()) {
            let claim = ledger.claim(&crate::pods::full_name(&pod.metadata));
            if let Some(Claim { place: Place::OneOf { nodes: to, .. }, .. }) = claim {
                for (name, _) in to.iter().filter_map(|node| nodes.0.get_key_value(node)) {
                    released.entry(name).or_default().push(&pod.spec.requests);
                }
            }
        }
        Self { nodes, tracker, released, computed: BTreeMap::new() }
    }

    /// Whether a node has room for a pod with these requests.
    pub(super) fn has_room(&mut self, node: &str, requests: &BTreeMap<String, Quantity>) -> bool {
        self.of(node).is_some_and(|free| nodes::has_room(free, requests))
    }

    /// Subtracts the requests of a pod that is released to the node.
    pub(super) fn subtract(&mut self, node: &str, requests: &BTreeMap<String, Quantity>) {
        if let Some(free) = self.of(node) {
            subtract(free, requests);
        }
    }

    /// Free resources of a node. `None` if the node has no `GpuNode`.
    fn of(&mut self, node: &str) -> Option<&mut BTreeMap<&'a str, u64>> {
        let (name, state) = self.nodes.0.get_key_value(node).filter(|(_, state)| state.managed)?;
        if !self.computed.contains_key(name.as_str()) {
            let mut free = state.free_resources(self.tracker);
            for requests in self.released.get(name.as_str()).into_iter().flatten() {
                subtract(&mut free, requests);
            }
            self.computed.insert(name, free);
        }
        self.computed.get_mut(name.as_str())
    }
}

fn subtract(free: &mut BTreeMap<&str, u64>, requests: &BTreeMap<String, Quantity>) {
    for (name, quantity) in requests.iter().filter(|(name, _)| !is_served(name)) {
        if let Some(free) = free.get_mut(name.as_str()) {
            *free = free.saturating_sub(quantity.milli().unwrap_or(0));
        }
    }
    if let Some(pods) = free.get_mut("pods") {
        *pods = pods.saturating_sub(1000);
    }
}
