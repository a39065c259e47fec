//! Tracks the free CPU, memory and other resources of nodes within one reconcile.
use std::collections::BTreeMap;

use cleave_plan::Quantity;
use cleave_plan::ledger::{Claim, Ledger, Nomination, Place};
use cleave_plan::scheduling::PODS_RESOURCE;

use super::amounts::{self, FreeAmounts, Shortage};
use super::evictions::ends_soon;
use super::nodes::Nodes;
use super::pod_tracker::PodTracker;
use crate::pods::PodObject;

/// Free resources by node, in thousandths. Pods that are released to a node count as if they were
/// bound to it. A node's free resources are computed when they are first needed.
///
/// The free units of GPUs are the units that the scheduler counts as free. The ledger decides
/// whether a GPU has enough free units. The scheduler's sum is smaller than the ledger's sum only
/// while a GPU is faulted, or while a terminating pod no longer uses its units.
#[derive(Clone)]
pub(super) struct FreeResources<'a> {
    nodes: &'a Nodes,
    tracker: &'a PodTracker,
    /// Requests of the pods that are released to each node but not bound.
    released: BTreeMap<&'a str, Vec<&'a BTreeMap<String, Quantity>>>,
    /// Waiting pods with a nomination on each node, by name. The resources that these pods request
    /// do not count as free for pods that must leave resources to them.
    nominated: BTreeMap<String, BTreeMap<String, Nominee<'a>>>,
    /// Requests of terminating pods without units of healthy GPUs, by node. These requests count
    /// only in the scheduler's sum, and only until the pods end.
    ending: BTreeMap<&'a str, Vec<&'a BTreeMap<String, Quantity>>>,
    computed: BTreeMap<&'a str, FreeAmounts<'a>>,
}

/// A waiting pod with a nomination.
#[derive(Clone)]
struct Nominee<'a> {
    priority: i32,
    requests: &'a BTreeMap<String, Quantity>,
}

/// The properties of a pod that determine whether a node has enough resources for the pod.
#[derive(Clone, Copy)]
pub(super) struct Requester<'r, 'l> {
    /// The pod, as `namespace/name`.
    pub(super) name: &'r str,
    pub(super) priority: i32,
    pub(super) requests: &'r BTreeMap<String, Quantity>,
    /// Decides what the pod leaves to nominated pods.
    pub(super) ledger: &'l Ledger,
    /// Whether the pod uses the resources now. Otherwise it waits for more resources.
    pub(super) uses_now: bool,
}

impl Requester<'_, '_> {
    /// Returns whether the pod leaves to a nominated pod the resources of a node that this pod
    /// requests.
    fn leaves(&self, node: &str, name: &str, nominee: &Nominee<'_>) -> bool {
        let is_own = |of: &Nomination| of.node == node;
        let takes_own = self.uses_now && self.ledger.nominations().get(self.name).is_some_and(is_own);
        self.ledger.leaves_nominated((self.name, self.priority), (name, nominee.priority), takes_own)
    }
}

impl<'a> FreeResources<'a> {
    /// `now` is in seconds since the Unix epoch.
    pub(super) fn new(
        (nodes, tracker): (&'a Nodes, &'a PodTracker),
        ledger: &Ledger,
        unsettled: &[&'a PodObject],
        now: u64,
    ) -> Self {
        let (released, nominated, computed) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let mut resources = Self { nodes, tracker, released, nominated, ending: BTreeMap::new(), computed };
        for pod in unsettled.iter().filter(|pod| pod.node().is_none() || ends_soon(pod, now)) {
            let name = crate::pods::full_name(&pod.metadata);
            if let Some(node) = pod.node() {
                if !ledger.has_allocations(node, &name) || nodes.is_blocked(node, &name) {
                    resources.ending.entry(node).or_default().push(&pod.spec.requests);
                }
                continue;
            }
            if let Some(Claim { place: Place::OneOf { nodes: to, .. }, .. }) = ledger.claim(&name) {
                for (name, _) in to.iter().filter_map(|node| nodes.0.get_key_value(node)) {
                    resources.released.entry(name).or_default().push(&pod.spec.requests);
                }
            } else if let Some(nomination) = ledger.nominations().get(&name) {
                resources.nominate(name, nomination.priority, &pod.spec.requests, &nomination.node);
            }
        }
        resources
    }

    /// Nominates a waiting pod for a node, so that pods that must leave resources to the waiting
    /// pod cannot use the resources that it requests.
    pub(super) fn nominate(
        &mut self,
        pod: String,
        priority: i32,
        requests: &'a BTreeMap<String, Quantity>,
        node: &str,
    ) {
        self.nominated.entry(node.to_owned()).or_default().insert(pod, Nominee { priority, requests });
    }

    /// Ends a nomination.
    pub(super) fn withdraw_nomination(&mut self, pod: &str, node: &str) {
        if let Some(nominees) = self.nominated.get_mut(node) {
            nominees.remove(pod);
        }
    }

    /// Returns whether a node has enough free resources for a pod, apart from units of GPUs.
    pub(super) fn has_room(&mut self, node: &str, pod: Requester<'_, '_>) -> bool {
        self.missing_resources(node, pod).is_some_and(|missing| missing.is_empty())
    }

    /// Returns the kind of resource that a node lacks for a pod. Returns `None` if the node lacks
    /// no resource, or if only the ledger shows that no GPU has enough free units.
    pub(super) fn shortage(&mut self, node: &str, pod: Requester<'_, '_>) -> Option<Shortage> {
        if !self.has_room(node, pod) {
            return Some(Shortage::Resources);
        }
        self.missing_units(node, pod).next().map(|_| Shortage::Units)
    }

    /// Returns the amount of each resource that a node lacks for a pod. Returns `None` if the node
    /// has no `GpuNode`, or is too small for the pod even without other pods.
    pub(super) fn missing_resources<'r>(
        &mut self,
        node: &str,
        pod: Requester<'r, '_>,
    ) -> Option<BTreeMap<&'r str, u128>> {
        let allocatable = &self.nodes.0.get(node)?.node.allocatable;
        self.compute_free(node)?;
        let free = self.computed.get(node)?;
        let is_left = |(name, nominee): &(&String, &Nominee<'a>)| pod.leaves(node, name, nominee);
        let nominees: Vec<_> = self.nominated.get(node).into_iter().flatten().filter(is_left).collect();
        let mut missing = BTreeMap::new();
        let slot = free.contains_key(PODS_RESOURCE).then_some((PODS_RESOURCE, 1000));
        for (resource, wanted) in amounts::requested(pod.requests).chain(slot) {
            let free = *free.get(resource)?;
            let kept: i128 = nominees.iter().map(|(_, nominee)| amounts::amount(nominee.requests, resource)).sum();
            let short = wanted.saturating_add(kept).saturating_sub(free);
            if short > 0 {
                if allocatable.get(resource).and_then(Quantity::milli).is_none_or(|all| i128::from(all) < wanted) {
                    return None;
                }
                missing.insert(resource, short.unsigned_abs());
            }
        }
        Some(missing)
    }

    /// Returns the units that a node with a faulted GPU lacks for a pod in the scheduler's sum, by
    /// resource, in thousandths. Terminating pods without units do not count, because they are
    /// about to end. A node without a faulted GPU lacks no units. If the ledger has free units on
    /// such a node, the sum includes them as soon as terminating pods have ended.
    pub(super) fn units_missing_by_faults<'r>(
        &mut self,
        node: &str,
        pod: Requester<'r, '_>,
    ) -> BTreeMap<&'r str, u128> {
        let (nodes, ending) = (self.nodes, self.ending.get(node).cloned().unwrap_or_default());
        let missing = self.missing_units(node, pod);
        let missing = missing.filter(|(resource, _)| has_unhealthy_units(nodes, node, resource));
        let left = missing.filter_map(|(resource, missing)| {
            let amounts = ending.iter().map(|requests| amounts::amount(requests, resource).unsigned_abs());
            let missing = missing.saturating_sub(amounts.fold(0, u128::saturating_add));
            (missing > 0).then_some((resource, missing))
        });
        left.collect()
    }

    /// Returns the units that a node lacks for a pod in the scheduler's sum, by resource, in
    /// thousandths. Ignores resources that the node does not serve now, because the ledger handles
    /// planned partitions.
    fn missing_units<'r>(&mut self, node: &str, pod: Requester<'r, '_>) -> impl Iterator<Item = (&'r str, u128)> {
        self.compute_free(node);
        let free = self.computed.get(node);
        let nominated = self.nominated.get(node);
        let nodes = self.nodes;
        amounts::requested_units(pod.requests).filter_map(move |(resource, wanted)| {
            let free = *free?.get(resource)?;
            // On a node without a faulted GPU, the ledger keeps the nominated units. The victims
            // still count in the sum, so the units must not be subtracted twice.
            let nominees = nominated.into_iter().flatten().filter(|_| has_unhealthy_units(nodes, node, resource));
            let kept: i128 = nominees
                .filter(|(name, nominee)| pod.leaves(node, name, nominee))
                .map(|(_, nominee)| amounts::amount(nominee.requests, resource))
                .fold(0, i128::saturating_add);
            let short = wanted.saturating_add(kept).saturating_sub(free);
            (short > 0).then(|| (resource, short.unsigned_abs()))
        })
    }

    /// Subtracts the requests of a pod that is released to the node.
    pub(super) fn subtract(&mut self, node: &str, requests: &BTreeMap<String, Quantity>) {
        self.compute_free(node);
        if let Some(free) = self.computed.get_mut(node) {
            amounts::subtract(free, requests);
        }
    }

    /// Computes the free resources of a node. Returns `None` if the node has no `GpuNode`.
    fn compute_free(&mut self, node: &str) -> Option<()> {
        let (name, state) = self.nodes.0.get_key_value(node).filter(|(_, state)| state.managed)?;
        if !self.computed.contains_key(name.as_str()) {
            let mut free = state.free_resources(self.tracker);
            free.extend(state.units_free_for_scheduler(self.tracker));
            for requests in self.released.get(name.as_str()).into_iter().flatten() {
                amounts::subtract(&mut free, requests);
            }
            self.computed.insert(name, free);
        }
        Some(())
    }
}

/// Returns whether some of a node's units of a resource are unhealthy.
fn has_unhealthy_units(nodes: &Nodes, node: &str, resource: &str) -> bool {
    let counts = nodes.0.get(node).and_then(|state| state.unit_counts.get(resource));
    counts.is_some_and(|counts| counts.healthy < counts.total)
}
