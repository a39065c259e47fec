//! Tracks the cluster's pods between two reconciles, so that each reconcile examines only pods that
//! have changed.
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::cluster::is_living;
use crate::pods::{PodObject, full_name};

/// The pods of the previous reconcile.
///
/// A pod is settled if it needs no further examination until it changes.
#[derive(Debug, Default)]
pub(super) struct PodTracker {
    /// The pods, by the address of their object. The watch creates a new object for each change.
    /// Each row keeps its object, so a new object never has the address of a tracked one.
    rows: HashMap<usize, Row>,
    /// Number of updates so far.
    updates: u64,
    /// Sums of the requests of the pods bound to each node, in thousandths. Each pod also counts as
    /// one unit of `pods`, as in the scheduler.
    requested: BTreeMap<String, BTreeMap<String, u128>>,
    /// Names of the pods that were not settled at the previous reconcile.
    unsettled_names: BTreeSet<String>,
    /// Nodes on which pods have changed.
    changed_nodes: BTreeSet<String>,
}

#[derive(Debug)]
struct Row {
    pod: Arc<PodObject>,
    /// The last update that contained the pod.
    update: u64,
    settled: bool,
}

/// The resource with which the scheduler counts pods.
pub(super) const PODS: &str = "pods";

impl PodTracker {
    /// Replaces the tracked pods with the pods of the watch.
    ///
    /// Returns the pods that are not settled, and the names of pods that may have ended or been
    /// deleted. These are pods that were not settled before, and settled pods whose object was
    /// replaced or deleted.
    pub(super) fn update<'a>(&mut self, pods: &'a [Arc<PodObject>]) -> (Vec<&'a PodObject>, BTreeSet<String>) {
        self.updates += 1;
        let (update, mut unsettled) = (self.updates, Vec::new());
        for pod in pods {
            let row = self.rows.entry(address(pod)).or_insert_with(|| {
                // For a pod that neither uses nor awaits a GPU, only its resource requests matter.
                let settled = !is_living(pod) || !pod.waits_at_gate() && !pod.requests_gpus();
                if is_living(pod) {
                    change_sums(&mut self.requested, pod, u128::saturating_add);
                    add_node(&mut self.changed_nodes, pod);
                }
                Row { pod: Arc::clone(pod), update, settled }
            });
            row.update = update;
            if !row.settled {
                unsettled.push(&**pod);
            }
        }
        let mut maybe_deleted = std::mem::take(&mut self.unsettled_names);
        let (requested, changed_nodes) = (&mut self.requested, &mut self.changed_nodes);
        self.rows.retain(|_, row| {
            let stays = row.update == update;
            if !stays {
                if is_living(&row.pod) {
                    change_sums(requested, &row.pod, u128::saturating_sub);
                    add_node(changed_nodes, &row.pod);
                }
                if row.settled && row.pod.requests_gpus() {
                    maybe_deleted.insert(full_name(&row.pod.metadata));
                }
            }
            stays
        });
        (unsettled, maybe_deleted)
    }

    /// Stores the names of the pods that are not settled. The next update returns them as pods that
    /// may have ended or been deleted.
    pub(super) fn remember_unsettled(&mut self, names: BTreeSet<String>) {
        self.unsettled_names = names;
    }

    /// Marks a pod as settled until it changes.
    pub(super) fn mark_settled(&mut self, pod: &PodObject) {
        if let Some(row) = self.rows.get_mut(&std::ptr::from_ref(pod).addr()) {
            row.settled = true;
        }
    }

    /// Takes the nodes on which pods have changed since the last call.
    pub(super) fn take_changed_nodes(&mut self) -> BTreeSet<String> {
        std::mem::take(&mut self.changed_nodes)
    }

    /// Returns the sums of the requests of the pods on a node, by resource, in thousandths.
    pub(super) fn requested(&self, node: &str) -> Option<&BTreeMap<String, u128>> {
        self.requested.get(node)
    }
}

/// Adds the node that a pod is bound to.
fn add_node(nodes: &mut BTreeSet<String>, pod: &PodObject) {
    if let Some(node) = pod.node().filter(|node| !nodes.contains(*node)) {
        nodes.insert(node.to_owned());
    }
}

fn address(pod: &Arc<PodObject>) -> usize {
    Arc::as_ptr(pod).addr()
}

/// Adds a pod's requests to the sums of its node, or subtracts them. Each request has 64 bits, so
/// sums of 128 bits do not overflow.
fn change_sums(
    requested: &mut BTreeMap<String, BTreeMap<String, u128>>,
    pod: &PodObject,
    change: fn(u128, u128) -> u128,
) {
    let Some(node) = pod.node() else { return };
    let mut change = |resource: &str, milli: u64| {
        if !requested.contains_key(node) {
            requested.insert(node.to_owned(), BTreeMap::new());
        }
        let Some(of_node) = requested.get_mut(node) else { return };
        match of_node.get_mut(resource) {
            Some(sum) => *sum = change(*sum, milli.into()),
            None => drop(of_node.insert(resource.to_owned(), change(0, milli.into()))),
        }
    };
    for (resource, quantity) in pod.spec.requests.iter().filter(|(name, _)| *name != PODS) {
        change(resource, quantity.milli().unwrap_or(0));
    }
    change(PODS, 1000);
    if requested.get(node).is_some_and(|of_node| of_node.values().all(|sum| *sum == 0)) {
        requested.remove(node);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(name: &str, node: &str, cpu: &str) -> Arc<PodObject> {
        let spec = json!({"nodeName": node, "containers": [{"resources": {"requests": {"cpu": cpu}, "limits": {"nvidia.com/gpu-mps": 1}}}]});
        let mut pod: PodObject = serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap();
        pod.trim();
        Arc::new(pod)
    }

    fn pod_names(pods: &[&PodObject]) -> Vec<String> {
        pods.iter().map(|pod| full_name(&pod.metadata)).collect()
    }

    #[test]
    fn a_settled_pod_is_skipped_until_it_changes_or_is_gone() {
        let (a, b) = (pod("a", "n", "1"), pod("b", "n", "2"));
        let mut tracker = PodTracker::default();
        let both = [Arc::clone(&a), Arc::clone(&b)];
        assert_eq!(pod_names(&tracker.update(&both).0), ["default/a", "default/b"]);
        tracker.mark_settled(&a);
        assert_eq!(pod_names(&tracker.update(&both).0), ["default/b"]);
        let changed = [pod("a", "n", "1"), Arc::clone(&b)];
        let (unsettled, maybe_deleted) = tracker.update(&changed);
        assert_eq!(pod_names(&unsettled), ["default/a", "default/b"]);
        assert_eq!(maybe_deleted, BTreeSet::from(["default/a".to_owned()]), "the settled pod has changed");
        tracker.mark_settled(&changed[0]);
        let (unsettled, maybe_deleted) = tracker.update(&changed[1..]);
        assert_eq!((pod_names(&unsettled), maybe_deleted.len()), (vec!["default/b".to_owned()], 1), "gone");
    }

    #[test]
    fn the_sums_of_a_node_match_its_pods_after_pods_are_added_and_removed() {
        let mut tracker = PodTracker::default();
        let (a, b) = (pod("a", "n", "1"), pod("b", "n", "1500m"));
        let requested = |tracker: &PodTracker| {
            let of =
                |resource: &str| tracker.requested("n").and_then(|of_node| of_node.get(resource)).copied().unwrap_or(0);
            (of("cpu"), of("pods"), of("nvidia.com/gpu-mps"))
        };
        tracker.update(&[Arc::clone(&a), Arc::clone(&b)]);
        assert_eq!(requested(&tracker), (2500, 2000, 2000));
        tracker.update(&[Arc::clone(&b)]);
        assert_eq!(requested(&tracker), (1500, 1000, 1000));
        // The sum of huge requests must not saturate. A saturated sum would be wrong after a pod is
        // deleted.
        let huge = pod("c", "n", "18000000000000000");
        tracker.update(&[Arc::clone(&b), Arc::clone(&huge), pod("d", "n", "18000000000000000")]);
        tracker.update(&[pod("b", "n", "3")]);
        assert_eq!(requested(&tracker), (3000, 1000, 1000));
        tracker.update(&[]);
        assert!(tracker.requested("n").is_none(), "a node without pods has no entry");
    }
}
