//! Passes the CPU of nodes and the arriving pods to the chooser, which ranks nodes.
use std::collections::BTreeMap;

use cleave_plan::Quantity;
use cleave_plan::ledger::{Chooser, Claim, Ledger, NodeCpu, Place};
use cleave_plan::snapshot::{NodeSelectorTerm, Pod as PlanPod};

use super::cluster::to_plan_pod;
use super::nodes::Nodes;
use super::pod_tracker::PodTracker;
use crate::pods::{PodObject, full_name};

/// Name of the CPU resource.
const CPU_RESOURCE: &str = "cpu";
/// Maximum number of pods that are counted after a start. Only the newest pods are counted, because
/// older pods have little weight.
const MAX_COUNTED_AT_START: usize = 16_000;
/// Maximum number of different node selectors and affinities that are evaluated in one reconcile.
/// Further pods count as pods that can run on any model.
const MAX_SELECTORS: usize = 64;

/// Node selector and node affinity of a pod.
type Selectors = (BTreeMap<String, String>, Vec<NodeSelectorTerm>);

/// Returns the amount of CPU, in thousandths of a core.
pub(super) fn cpu_millis(requests: &BTreeMap<String, Quantity>) -> u64 {
    requests.get(CPU_RESOURCE).and_then(Quantity::milli).unwrap_or(0)
}

/// Passes the CPU of all nodes to the chooser. Pods that are released to a node count as if they
/// were bound to it.
pub(super) fn update_cpu(
    chooser: &mut Chooser,
    nodes: &Nodes,
    tracker: &PodTracker,
    ledger: &Ledger,
    unsettled: &[&PodObject],
) {
    let mut released: BTreeMap<&str, u64> = BTreeMap::new();
    for pod in unsettled.iter().filter(|pod| pod.node().is_none()) {
        if let Some(Claim { place: Place::OneOf { nodes, .. }, .. }) = ledger.claim(&full_name(&pod.metadata)) {
            for node in nodes {
                let sum = released.entry(node).or_default();
                *sum = sum.saturating_add(cpu_millis(&pod.spec.requests));
            }
        }
    }
    for (name, state) in nodes.0.iter().filter(|(_, state)| state.managed) {
        let total = cpu_millis(&state.node.allocatable);
        let bound = tracker.requested(name).and_then(|requested| requested.get(CPU_RESOURCE)).copied().unwrap_or(0);
        let bound = u64::try_from(bound).unwrap_or(u64::MAX);
        let used = bound.saturating_add(released.get(name.as_str()).copied().unwrap_or(0));
        chooser.set_cpu(name, NodeCpu { total, free: total.saturating_sub(used) });
    }
}

/// Updates the chooser's score if an update is due. Call [`update_cpu`] first.
pub(super) fn update_score(chooser: &mut Chooser, unsettled: &[&PodObject]) {
    let waiting = unsettled.iter().filter(|pod| pod.waits_at_gate());
    chooser.learn(waiting.map(|pod| (pod.device_requests(), cpu_millis(&pod.spec.requests))));
}

/// Counts the pods that arrived at the gate.
pub(super) fn count_arrived_pods(chooser: &mut Chooser, nodes: &Nodes, arrived: &[&PodObject]) {
    let mut known: BTreeMap<Selectors, Vec<String>> = BTreeMap::new();
    for pod in arrived {
        let plan_pod = to_plan_pod(pod);
        let key = (plan_pod.node_selector.clone(), plan_pod.affinity.clone());
        let models = if (key.0.is_empty() && key.1.is_empty()) || known.len() >= MAX_SELECTORS {
            Vec::new()
        } else {
            known.entry(key).or_insert_with(|| usable_models(nodes, &plan_pod)).clone()
        };
        chooser.count_arrival(&pod.device_requests(), cpu_millis(&pod.spec.requests), models);
    }
}

/// Counts the pods that run when the operator starts, because the operator keeps no record of
/// earlier pods. The result differs from a complete record, because short-lived pods are missing
/// and selectors of bound pods are unknown. Both differences shrink as pods arrive.
pub(super) fn count_running_pods(chooser: &mut Chooser, tracker: &PodTracker) {
    let mut pods: Vec<&PodObject> =
        tracker.living_pods().filter(|pod| pod.requests_gpus() && !pod.waits_at_gate()).collect();
    let age = |pod: &PodObject| pod.metadata.creation_timestamp.as_ref().map(|time| time.0);
    pods.sort_by(|a, b| (age(a), &a.metadata.name).cmp(&(age(b), &b.metadata.name)));
    let first = pods.len().saturating_sub(MAX_COUNTED_AT_START);
    for pod in pods.into_iter().skip(first) {
        chooser.count_arrival(&pod.device_requests(), cpu_millis(&pod.spec.requests), Vec::new());
    }
}

/// Returns the models of the nodes that the pod can use, sorted. Returns an empty list if the pod
/// can use all models, or none.
fn usable_models(nodes: &Nodes, pod: &PlanPod) -> Vec<String> {
    let mut models: BTreeMap<&str, bool> = BTreeMap::new();
    for state in nodes.0.values().filter(|state| state.managed) {
        *models.entry(&state.model).or_default() |= state.may_admit_later(pod);
    }
    if models.values().all(|can| *can) {
        return Vec::new();
    }
    models.into_iter().filter(|(_, can)| *can).map(|(model, _)| model.to_owned()).collect()
}
