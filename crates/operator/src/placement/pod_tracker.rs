//! Tracks the cluster's pods between two reconciles, so that each reconcile examines only pods that
//! have changed.
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use cleave_plan::scheduling::PODS_RESOURCE;

use crate::pod_store::PodChanges;
use crate::pods::{PodObject, full_name, is_living};

/// The pods of the previous reconcile.
///
/// A pod is settled if it needs no further examination until it changes.
#[derive(Debug, Default)]
pub(super) struct PodTracker {
    /// The pods, by the address of their object. The watch creates a new object for each change.
    /// The map keeps its objects alive, so a new object never has the address of a tracked object.
    pods: HashMap<usize, Arc<PodObject>>,
    /// The pods that are not settled, by name.
    unsettled: BTreeMap<String, Arc<PodObject>>,
    /// Bound pods whose rules exclude other pods from nodes, by address.
    repelling: HashMap<usize, Arc<PodObject>>,
    /// Numbers of bound pods that request GPUs, by priority.
    priorities: BTreeMap<i32, usize>,
    /// Sums of the requests of the pods bound to each node, in thousandths. Each pod also counts as
    /// one unit of `pods`, as in the scheduler.
    requested: BTreeMap<String, BTreeMap<String, u128>>,
    /// Names of the pods that were not settled at the previous reconcile.
    unsettled_names: BTreeSet<String>,
    /// Nodes on which pods have changed.
    changed_nodes: BTreeSet<String>,
    /// Bound pods with GPUs that have ended or were deleted, each with its name and its node.
    ended: Vec<(String, String)>,
}

impl PodTracker {
    /// Updates the tracked pods. The cost depends on the number of changes, unless `changes`
    /// contains all pods.
    ///
    /// Returns the names of pods that may have ended or been deleted. These are the pods that were
    /// not settled before, and settled pods whose object was replaced or deleted.
    pub(super) fn update(&mut self, changes: PodChanges) -> BTreeSet<String> {
        let mut maybe_deleted = std::mem::take(&mut self.unsettled_names);
        let mut removed = Vec::new();
        match changes {
            PodChanges::Since(changes) => {
                for change in changes {
                    for pod in change.before.iter().map(address) {
                        removed.extend(self.bound_pod(pod));
                        maybe_deleted.extend(self.remove(pod));
                    }
                    change.now.into_iter().for_each(|pod| self.add(pod));
                }
            }
            PodChanges::All(pods) => {
                let present: HashSet<usize> = pods.iter().map(address).collect();
                let gone: Vec<usize> = self.pods.keys().filter(|pod| !present.contains(pod)).copied().collect();
                for pod in gone {
                    removed.extend(self.bound_pod(pod));
                    maybe_deleted.extend(self.remove(pod));
                }
                pods.into_iter().for_each(|pod| self.add(pod));
            }
        }
        let ended: Vec<_> = removed.iter().filter_map(|pod| self.ended_pod(pod)).collect();
        self.ended.extend(ended);
        maybe_deleted
    }

    /// Returns the living pod at this address if it is bound and requests GPUs.
    fn bound_pod(&self, address: usize) -> Option<Arc<PodObject>> {
        self.pods.get(&address).filter(|pod| pod.node().is_some() && pod.requests_gpus() && is_living(pod)).cloned()
    }

    /// Returns the name and the node of a removed pod if it has ended or was deleted. A changed pod
    /// is not settled, so its new object is among the unsettled pods.
    fn ended_pod(&self, pod: &PodObject) -> Option<(String, String)> {
        let name = full_name(&pod.metadata);
        let is_same = |now: &Arc<PodObject>| now.metadata.uid == pod.metadata.uid;
        (!self.unsettled.get(&name).is_some_and(is_same)).then_some((name, pod.node()?.to_owned()))
    }

    /// Removes and returns the bound pods with GPUs that have ended or were deleted since the last
    /// call, each with its name and its node.
    pub(super) fn take_ended_pods(&mut self) -> Vec<(String, String)> {
        std::mem::take(&mut self.ended)
    }

    /// Adds a pod, unless it is tracked.
    fn add(&mut self, pod: Arc<PodObject>) {
        if self.pods.contains_key(&address(&pod)) {
            return;
        }
        if is_living(&pod) {
            change_sums(&mut self.requested, &pod, u128::saturating_add);
            add_node(&mut self.changed_nodes, &pod);
            if let Some(priority) = bound_priority(&pod) {
                *self.priorities.entry(priority).or_default() += 1;
            }
            if pod.node().is_some() && pod.spec.rules.repels() {
                self.repelling.insert(address(&pod), Arc::clone(&pod));
            }
            // For a pod that neither uses nor awaits a GPU, only the resource requests and the
            // rules matter.
            if pod.waits_at_gate() || pod.requests_gpus() {
                self.unsettled.insert(full_name(&pod.metadata), Arc::clone(&pod));
            }
        }
        self.pods.insert(address(&pod), pod);
    }

    /// Removes a pod. Returns the pod's name if the pod was settled and may have claims.
    fn remove(&mut self, address: usize) -> Option<String> {
        let pod = self.pods.remove(&address)?;
        if is_living(&pod) {
            change_sums(&mut self.requested, &pod, u128::saturating_sub);
            add_node(&mut self.changed_nodes, &pod);
            if let Some(priority) = bound_priority(&pod)
                && let Some(count) = self.priorities.get_mut(&priority)
            {
                *count = count.saturating_sub(1);
                if *count == 0 {
                    self.priorities.remove(&priority);
                }
            }
            self.repelling.remove(&address);
        }
        if !pod.requests_gpus() && !pod.waits_at_gate() {
            return None;
        }
        let name = full_name(&pod.metadata);
        if self.unsettled.get(&name).is_some_and(|known| Arc::ptr_eq(known, &pod)) {
            self.unsettled.remove(&name);
            return None;
        }
        pod.requests_gpus().then_some(name)
    }

    /// Returns the pods that are not settled, in order of their names.
    pub(super) fn unsettled_pods(&self) -> Vec<Arc<PodObject>> {
        self.unsettled.values().cloned().collect()
    }

    /// Returns the pod with this name. Returns `None` if the pod is settled or not tracked.
    pub(super) fn unsettled_pod(&self, name: &str) -> Option<&PodObject> {
        self.unsettled.get(name).map(AsRef::as_ref)
    }

    /// Stores the names of the pods that are not settled. The next update returns them as pods that
    /// may have ended or been deleted.
    pub(super) fn remember_unsettled(&mut self, names: BTreeSet<String>) {
        self.unsettled_names = names;
    }

    /// Marks a pod as settled until it changes.
    pub(super) fn mark_settled(&mut self, name: &str) {
        self.unsettled.remove(name);
    }

    /// Removes and returns the nodes on which pods have changed since the last call.
    pub(super) fn take_changed_nodes(&mut self) -> BTreeSet<String> {
        std::mem::take(&mut self.changed_nodes)
    }

    /// Returns the pods that have not ended and can still run. The cost is proportional to the
    /// number of pods in the cluster.
    pub(super) fn living_pods(&self) -> impl Iterator<Item = &PodObject> {
        self.pods.values().map(AsRef::as_ref).filter(|pod| is_living(pod))
    }

    /// Returns the bound pods whose rules exclude other pods from nodes.
    pub(super) fn repelling_pods(&self) -> impl Iterator<Item = &PodObject> {
        self.repelling.values().map(AsRef::as_ref)
    }

    /// Returns the lowest priority of a bound pod that requests GPUs.
    pub(super) fn lowest_priority(&self) -> Option<i32> {
        self.priorities.keys().next().copied()
    }

    /// Returns the sums of the requests of the pods on a node, by resource, in thousandths.
    pub(super) fn requested(&self, node: &str) -> Option<&BTreeMap<String, u128>> {
        self.requested.get(node)
    }
}

/// Returns the priority of a pod that is bound and requests GPUs.
fn bound_priority(pod: &PodObject) -> Option<i32> {
    (pod.node().is_some() && pod.requests_gpus()).then(|| pod.spec.priority.unwrap_or(0))
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
    for (resource, quantity) in pod.spec.requests.iter().filter(|(name, _)| *name != PODS_RESOURCE) {
        change(resource, quantity.milli().unwrap_or(0));
    }
    change(PODS_RESOURCE, 1000);
    if requested.get(node).is_some_and(|of_node| of_node.values().all(|sum| *sum == 0)) {
        requested.remove(node);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::pod_store::PodChange;

    fn pod(name: &str, node: &str, cpu: &str) -> Arc<PodObject> {
        let spec = json!({"nodeName": node, "containers": [{"resources": {"requests": {"cpu": cpu}, "limits": {"nvidia.com/gpu-mps": 1}}}]});
        let mut pod: PodObject = serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap();
        pod.trim();
        Arc::new(pod)
    }

    /// Updates the tracker with all pods. Returns the names of the pods that are not settled, and
    /// the names of pods that may have ended or been deleted.
    fn update(tracker: &mut PodTracker, pods: &[Arc<PodObject>]) -> (Vec<String>, BTreeSet<String>) {
        let maybe_deleted = tracker.update(PodChanges::All(pods.to_vec()));
        (tracker.unsettled_pods().iter().map(|pod| full_name(&pod.metadata)).collect(), maybe_deleted)
    }

    #[test]
    fn a_settled_pod_is_skipped_until_it_changes_or_is_deleted() {
        let (a, b) = (pod("a", "n", "1"), pod("b", "n", "2"));
        let mut tracker = PodTracker::default();
        let both = [Arc::clone(&a), Arc::clone(&b)];
        assert_eq!(update(&mut tracker, &both).0, ["default/a", "default/b"]);
        tracker.mark_settled("default/a");
        assert_eq!(update(&mut tracker, &both).0, ["default/b"]);
        let changed = [pod("a", "n", "1"), Arc::clone(&b)];
        let (unsettled, maybe_deleted) = update(&mut tracker, &changed);
        assert_eq!(unsettled, ["default/a", "default/b"]);
        assert_eq!(maybe_deleted, BTreeSet::from(["default/a".to_owned()]), "the settled pod has changed");
        tracker.mark_settled("default/a");
        let (unsettled, maybe_deleted) = update(&mut tracker, &changed[1..]);
        assert_eq!((unsettled, maybe_deleted.len()), (vec!["default/b".to_owned()], 1), "gone");
    }

    #[test]
    fn changes_lead_to_the_same_state_as_a_list_of_all_pods() {
        let (a, b, c) = (pod("a", "n", "1"), pod("b", "m", "2"), pod("c", "n", "4"));
        let (mut all, mut some) = (PodTracker::default(), PodTracker::default());
        for tracker in [&mut all, &mut some] {
            tracker.update(PodChanges::All(vec![Arc::clone(&a), Arc::clone(&b)]));
            tracker.mark_settled("default/a");
        }
        let newer = pod("a", "m", "1");
        let whole = all.update(PodChanges::All(vec![Arc::clone(&newer), Arc::clone(&c)]));
        let change = |before: Option<&Arc<PodObject>>, now: Option<&Arc<PodObject>>| PodChange {
            before: before.cloned(),
            now: now.cloned(),
        };
        let changes = [change(Some(&a), Some(&newer)), change(Some(&b), None), change(None, Some(&c))];
        assert_eq!(some.update(PodChanges::Since(changes.into())), whole);
        let state = |tracker: &PodTracker| {
            let names =
                |pods: Vec<&PodObject>| pods.iter().map(|pod| full_name(&pod.metadata)).collect::<BTreeSet<_>>();
            let unsettled: Vec<String> = tracker.unsettled.keys().cloned().collect();
            (names(tracker.living_pods().collect()), unsettled, tracker.requested.clone(), tracker.lowest_priority())
        };
        assert_eq!(state(&some), state(&all));
        assert_eq!(some.take_changed_nodes(), BTreeSet::from(["m".to_owned(), "n".to_owned()]));
    }

    #[test]
    fn a_pod_has_ended_if_it_was_deleted_or_another_pod_has_its_name() {
        let with_uid = |uid: &str, node: &str| {
            let mut pod = PodObject::clone(&pod("a", node, "1"));
            pod.metadata.uid = Some(uid.into());
            Arc::new(pod)
        };
        let mut tracker = PodTracker::default();
        let mut ended = |pods: &[Arc<PodObject>]| {
            update(&mut tracker, pods);
            tracker.mark_settled("default/a");
            tracker.take_ended_pods()
        };
        let of = |node: &str| vec![("default/a".to_owned(), node.to_owned())];
        assert_eq!(ended(&[with_uid("1", "n")]), []);
        assert_eq!(ended(&[with_uid("1", "n")]), [], "the pod has changed");
        assert_eq!(ended(&[with_uid("2", "m")]), of("n"));
        assert_eq!((ended(&[]), ended(&[])), (of("m"), vec![]));
    }

    #[test]
    fn the_sums_of_a_node_match_its_pods_after_additions_and_removals() {
        let mut tracker = PodTracker::default();
        let (a, b) = (pod("a", "n", "1"), pod("b", "n", "1500m"));
        let requested = |tracker: &PodTracker| {
            let of =
                |resource: &str| tracker.requested("n").and_then(|of_node| of_node.get(resource)).copied().unwrap_or(0);
            (of("cpu"), of("pods"), of("nvidia.com/gpu-mps"))
        };
        update(&mut tracker, &[Arc::clone(&a), Arc::clone(&b)]);
        assert_eq!(requested(&tracker), (2500, 2000, 2000));
        update(&mut tracker, &[Arc::clone(&b)]);
        assert_eq!(requested(&tracker), (1500, 1000, 1000));
        // The sum of huge requests must not saturate. A saturated sum would be wrong after a pod is
        // deleted.
        let huge = pod("c", "n", "18000000000000000");
        update(&mut tracker, &[Arc::clone(&b), Arc::clone(&huge), pod("d", "n", "18000000000000000")]);
        update(&mut tracker, &[pod("b", "n", "3")]);
        assert_eq!(requested(&tracker), (3000, 1000, 1000));
        update(&mut tracker, &[]);
        assert!(tracker.requested("n").is_none(), "a node without pods has no entry");
    }
}
