//! The requests of pods, and the cost of these requests on the nodes that the pods may use.
use std::borrow::Cow;
use std::collections::BTreeMap;

use cleave_plan::ledger::{DeviceRequest, Units};
use cleave_plan::quota::Amount;
use cleave_plan::snapshot::{NodeSelectorTerm, Toleration};

use super::cluster::to_plan_pod;
use super::nodes::Nodes;
use crate::pods::{PodObject, is_interchangeable};
use crate::quotas::charge::NodeCosts;

/// The GPUs of one pool on a node.
pub(super) struct NodeView<'a> {
    pub(super) name: &'a str,
    pub(super) pool: usize,
    pub(super) costs: NodeCosts,
    /// Indexes of the GPUs in the pool.
    pub(super) gpus: Vec<usize>,
}

/// Node selector, affinity and tolerations of a pod.
type NodeRules = (BTreeMap<String, String>, Vec<NodeSelectorTerm>, Vec<Toleration>);

/// The cost of requests on the nodes that a pod may use, by pool. So a node that the pod may not
/// use does not raise the cost of the pod.
pub(super) struct EligibleCosts<'n, 'v> {
    pub(super) nodes: &'n Nodes,
    views: &'n [NodeView<'v>],
    pools: usize,
    known: BTreeMap<NodeRules, Vec<NodeCosts>>,
}

impl<'n, 'v> EligibleCosts<'n, 'v> {
    pub(super) fn new(nodes: &'n Nodes, views: &'n [NodeView<'v>], pools: usize) -> Self {
        Self { nodes, views, pools, known: BTreeMap::new() }
    }

    /// Returns the costs in a pool, on the nodes that the pod may use. Returns `None` if the pool
    /// does not exist.
    pub(super) fn of(&mut self, pod: &PodObject, pool: usize) -> Option<&NodeCosts> {
        let pod = to_plan_pod(pod);
        let rules = (pod.node_selector.clone(), pod.affinity.clone(), pod.tolerations.clone());
        let (nodes, views, pools) = (self.nodes, self.views, self.pools);
        let costs = self.known.entry(rules).or_insert_with(|| {
            let mut costs = vec![NodeCosts::default(); pools];
            let eligible = views.iter().filter(|view| nodes.admits(view.name, &pod));
            eligible.for_each(|view| costs[view.pool].extend(&view.costs));
            costs
        });
        costs.get(pool)
    }
}

/// What a waiting pod requests.
pub(super) struct WaitingRequests<'p> {
    /// Its requests, in order, as many as a node can serve.
    pub(super) listed: Cow<'p, [DeviceRequest]>,
    /// More units of whole GPUs and MIG instances than any node has. No node can serve such a pod.
    more: Vec<(DeviceRequest, u64)>,
}

impl<'p> WaitingRequests<'p> {
    /// Returns the requests of a pod. Requests for any number of units need little memory.
    pub(super) fn of(pod: &'p PodObject, nodes: &Nodes) -> Self {
        let counts = pod.spec.requests.iter().filter(|(resource, _)| is_interchangeable(resource));
        let more = counts.filter_map(|(resource, quantity)| {
            let more = quantity.count()?.saturating_sub(nodes.too_many_units(resource));
            let one = DeviceRequest { resource: resource.clone(), units: Units::new(1)? };
            (more > 0).then_some((one, more))
        });
        let more: Vec<_> = more.collect();
        if more.is_empty() {
            return Self { listed: requests_of(pod), more };
        }
        let mut listed = pod.device_requests_up_to(|resource| nodes.too_many_units(resource));
        listed.sort();
        Self { listed: Cow::Owned(listed), more }
    }

    /// Returns what the requests that are not listed cost.
    pub(super) fn cost_of_more(&self, cost: impl Fn(&DeviceRequest) -> Option<Amount>) -> Amount {
        let all = self.more.iter().filter_map(|(one, count)| Some(Amount(cost(one)?.0.saturating_mul(*count))));
        all.fold(Amount::ZERO, Amount::plus)
    }
}

/// Returns the sorted requests of a pod, including whole GPUs and MIG instances.
pub(super) fn requests_of(pod: &PodObject) -> Cow<'_, [DeviceRequest]> {
    let is_short = pod.spec.device_requests.len() < 2;
    if !is_short || pod.spec.requests.keys().any(|resource| is_interchangeable(resource)) {
        let mut requests = pod.device_requests();
        requests.sort();
        return Cow::Owned(requests);
    }
    Cow::Borrowed(&pod.spec.device_requests)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::placement::search::Candidate;

    /// Thousands of waiting pods may request any number of units.
    #[test]
    fn a_request_for_more_units_than_a_node_has_needs_little_memory_and_costs_all_of_them() {
        for (resource, listed) in [("nvidia.com/gpu", 17), ("nvidia.com/mig-1g.10gb", 113)] {
            let limits = json!({"limits": {resource: "1000000"}});
            let spec = json!({"containers": [{"name": "main", "resources": limits}]});
            let mut pod: PodObject = serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).unwrap();
            pod.trim();
            let nodes = Nodes::default();
            let requests = WaitingRequests::of(&pod, &nodes);
            assert_eq!(requests.listed.len(), listed);
            let rest = u64::try_from(1_000_000 - listed).unwrap();
            assert_eq!(requests.cost_of_more(|_| Some(Amount(3))), Amount(rest * 3));
            let candidate = Candidate::new("team/p".to_owned(), &pod, &nodes, None);
            assert!(candidate.device_requests.len() <= listed);
        }
    }
}
