//! The cluster's pods from one look to the next: most have not changed, and are not gone through
//! again.
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use cleave_api::names::is_served;

use super::cluster::is_living;
use crate::pods::{PodObject, full_name};

/// Pods as last looked at.
#[derive(Debug, Default)]
pub(super) struct Present {
    /// By address. The watch makes a new object of each change, and none has the address of one
    /// that is kept here.
    rows: HashMap<usize, Row>,
    looks: u64,
    /// What pods take of the node that they are bound to, in thousandths; `pods` as the scheduler
    /// counts them.
    taken: BTreeMap<String, BTreeMap<String, u128>>,
    /// Names of those that were not settled at the last look.
    before: BTreeSet<String>,
}

#[derive(Debug)]
struct Row {
    pod: Arc<PodObject>,
    /// The look that saw it last.
    look: u64,
    /// Nothing is to be done of it until it changes.
    settled: bool,
}

/// The resource by which the scheduler counts pods.
const PODS: &str = "pods";

impl Present {
    /// Takes in what the watch tells now; gives the pods that are to be gone through, and the names
    /// of those that were at the last look or were settled, and may be gone.
    pub(super) fn look<'a>(&mut self, pods: &'a [Arc<PodObject>]) -> (Vec<&'a PodObject>, BTreeSet<String>) {
        self.looks += 1;
        let (look, mut open) = (self.looks, Vec::new());
        for pod in pods {
            let row = self.rows.entry(address(pod)).or_insert_with(|| {
                // It holds nothing, and waits for nothing: only its node's CPU and the like are of
                // interest.
                let settled = !is_living(pod) || !pod.waits_at_gate() && !pod.wants_gpus();
                if is_living(pod) {
                    count(&mut self.taken, pod, u128::saturating_add);
                }
                Row { pod: Arc::clone(pod), look, settled }
            });
            row.look = look;
            if !row.settled {
                open.push(&**pod);
            }
        }
        let mut left = std::mem::take(&mut self.before);
        let taken = &mut self.taken;
        self.rows.retain(|_, row| {
            let stays = row.look == look;
            if !stays {
                if is_living(&row.pod) {
                    count(taken, &row.pod, u128::saturating_sub);
                }
                if row.settled && row.pod.wants_gpus() {
                    left.insert(full_name(&row.pod.metadata));
                }
            }
            stays
        });
        (open, left)
    }

    /// Those that are there and are not settled: the next look goes through them again, or tells
    /// that they are gone.
    pub(super) fn remember(&mut self, names: BTreeSet<String>) {
        self.before = names;
    }

    /// Nothing is to be done of this one any more, until it changes.
    pub(super) fn settle(&mut self, pod: &PodObject) {
        if let Some(row) = self.rows.get_mut(&std::ptr::from_ref(pod).addr()) {
            row.settled = true;
        }
    }

    /// What pods take of a node.
    pub(super) fn taken(&self, node: &str) -> Option<&BTreeMap<String, u128>> {
        self.taken.get(node)
    }
}

fn address(pod: &Arc<PodObject>) -> usize {
    Arc::as_ptr(pod).addr()
}

/// Adds to, or takes from, what is taken of a pod's node. A sum of 64 bits' worth of pods of 64
/// bits' worth each is exact.
fn count(taken: &mut BTreeMap<String, BTreeMap<String, u128>>, pod: &PodObject, change: fn(u128, u128) -> u128) {
    let Some(node) = pod.node() else { return };
    let mut change = |resource: &str, milli: u64| {
        if !taken.contains_key(node) {
            taken.insert(node.to_owned(), BTreeMap::new());
        }
        let Some(of_node) = taken.get_mut(node) else { return };
        match of_node.get_mut(resource) {
            Some(sum) => *sum = change(*sum, milli.into()),
            None => drop(of_node.insert(resource.to_owned(), change(0, milli.into()))),
        }
    };
    for (resource, quantity) in pod.spec.requests.iter().filter(|(name, _)| !is_served(name) && *name != PODS) {
        change(resource, quantity.milli().unwrap_or(0));
    }
    change(PODS, 1000);
    if taken.get(node).is_some_and(|of_node| of_node.values().all(|sum| *sum == 0)) {
        taken.remove(node);
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

    fn names(pods: &[&PodObject]) -> Vec<String> {
        pods.iter().map(|pod| full_name(&pod.metadata)).collect()
    }

    #[test]
    fn who_is_settled_is_not_gone_through_until_it_changes_or_is_gone() {
        let (a, b) = (pod("a", "n", "1"), pod("b", "n", "2"));
        let mut present = Present::default();
        let both = [Arc::clone(&a), Arc::clone(&b)];
        assert_eq!(names(&present.look(&both).0), ["default/a", "default/b"]);
        present.settle(&a);
        assert_eq!(names(&present.look(&both).0), ["default/b"]);
        let changed = [pod("a", "n", "1"), Arc::clone(&b)];
        let (open, left) = present.look(&changed);
        assert_eq!(names(&open), ["default/a", "default/b"]);
        assert_eq!(left, BTreeSet::from(["default/a".to_owned()]), "the one that was settled is no more as it was");
        present.settle(&changed[0]);
        let (open, left) = present.look(&changed[1..]);
        assert_eq!((names(&open), left.len()), (vec!["default/b".to_owned()], 1), "gone");
    }

    #[test]
    fn what_is_taken_of_a_node_is_what_the_pods_there_take_whatever_came_and_went() {
        let mut present = Present::default();
        let (a, b) = (pod("a", "n", "1"), pod("b", "n", "1500m"));
        let taken = |present: &Present| {
            let of =
                |resource: &str| present.taken("n").and_then(|of_node| of_node.get(resource)).copied().unwrap_or(0);
            (of("cpu"), of("pods"), of("nvidia.com/gpu-mps"))
        };
        present.look(&[Arc::clone(&a), Arc::clone(&b)]);
        assert_eq!(taken(&present), (2500, 2000, 0));
        present.look(&[Arc::clone(&b)]);
        assert_eq!(taken(&present), (1500, 1000, 0));
        // One that asks for more than there can be does not take others' away when it goes.
        let huge = pod("c", "n", "18000000000000000");
        present.look(&[Arc::clone(&b), Arc::clone(&huge), pod("d", "n", "18000000000000000")]);
        present.look(&[pod("b", "n", "3")]);
        assert_eq!(taken(&present), (3000, 1000, 0));
        present.look(&[]);
        assert!(present.taken("n").is_none(), "a node that is gone leaves nothing behind");
    }
}
