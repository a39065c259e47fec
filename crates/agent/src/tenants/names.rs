//! Stores the names of the node's pods and containers, by the ids that cgroup paths contain.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Names of a pod and of its containers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodName {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// Container names by container id, without the prefix `containerd://`.
    pub containers: BTreeMap<String, String>,
}

/// The pods of the node that have not finished, by UID.
#[derive(Debug, Clone, Default)]
pub struct PodNames {
    pods: BTreeMap<String, PodName>,
    /// UIDs in the current list, while the watch reads it.
    listing: Option<BTreeSet<String>>,
    /// Whether the watch has read a complete list. If the list is complete, a pod that is not in
    /// `pods` no longer exists.
    complete: bool,
}

impl PodNames {
    /// Records that the watch begins a list of all pods.
    pub fn begin_list(&mut self) {
        self.listing = Some(BTreeSet::new());
    }

    /// Records that the list is complete, and removes the pods that the list does not contain.
    pub fn end_list(&mut self) {
        if let Some(listed) = self.listing.take() {
            self.pods.retain(|uid, _| listed.contains(uid));
        }
        self.complete = true;
    }

    /// Adds or replaces a pod.
    pub fn insert(&mut self, uid: String, pod: PodName) {
        if let Some(listed) = &mut self.listing {
            listed.insert(uid.clone());
        }
        self.pods.insert(uid, pod);
    }

    /// Removes a pod that was deleted or has finished.
    pub fn remove(&mut self, uid: &str) {
        self.pods.remove(uid);
    }

    /// Returns a pod by its UID.
    pub fn get(&self, uid: &str) -> Option<&PodName> {
        self.pods.get(uid)
    }

    /// Returns whether a pod is known to have been removed. Returns false while a list is
    /// incomplete.
    pub fn is_pod_removed(&self, uid: &str) -> bool {
        self.complete && self.listing.is_none() && !self.pods.contains_key(uid)
    }
}

/// [`PodNames`] that tasks share. Never hold the lock across an `await` point.
#[derive(Debug, Clone, Default)]
pub struct SharedPodNames(Arc<Mutex<PodNames>>);

impl SharedPodNames {
    /// Locks the names.
    pub fn lock(&self) -> MutexGuard<'_, PodNames> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_removed_when_a_complete_list_does_not_contain_it() {
        let mut names = PodNames::default();
        assert!(!names.is_pod_removed("a"), "no list yet");
        names.begin_list();
        names.insert("a".into(), PodName::default());
        assert!(!names.is_pod_removed("b"), "the list is not complete");
        names.end_list();
        assert!(!names.is_pod_removed("a") && names.is_pod_removed("b"));
        names.insert("b".into(), PodName::default());
        names.begin_list();
        names.insert("a".into(), PodName::default());
        names.end_list();
        assert!(names.is_pod_removed("b"));
        names.remove("a");
        assert!(names.is_pod_removed("a"));
    }
}
