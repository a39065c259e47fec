//! The requests of pods, and the cost of these requests on the nodes that the pods may use.
use std::borrow::Cow;
use std::collections::BTreeMap;

use cleave_plan::ledger::DeviceRequest;
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
    nodes: &'n Nodes,
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
