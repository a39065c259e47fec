//! The names of the node's pods and containers, by what cgroups call them.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What people call a pod and its containers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodName {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// Container names by the runtime's id, without `containerd://`.
    pub containers: BTreeMap<String, String>,
}

/// The pods of the node that have not ended, by UID.
#[derive(Debug, Clone, Default)]
pub struct Names {
    pods: BTreeMap<String, PodName>,
    /// Pods of the list that is being read.
    listing: Option<BTreeSet<String>>,
    /// All pods have been listed once: one that is not there is gone.
    complete: bool,
}

impl Names {
    /// A list of all pods begins.
    pub fn begin(&mut self) {
        self.listing = Some(BTreeSet::new());
    }

    /// The list ends.
    pub fn end(&mut self) {
        if let Some(listed) = self.listing.take() {
            self.pods.retain(|uid, _| listed.contains(uid));
        }
        self.complete = true;
    }

    /// A pod as it is now.
    pub fn put(&mut self, uid: String, pod: PodName) {
        if let Some(listed) = &mut self.listing {
            listed.insert(uid.clone());
        }
        self.pods.insert(uid, pod);
    }

    /// A pod is gone, or has ended.
    pub fn remove(&mut self, uid: &str) {
        self.pods.remove(uid);
    }

    /// A pod by its UID.
    pub fn get(&self, uid: &str) -> Option<&PodName> {
        self.pods.get(uid)
    }

    /// Whether a pod is known to be gone.
    pub fn is_gone(&self, uid: &str) -> bool {
        self.complete && self.listing.is_none() && !self.pods.contains_key(uid)
    }
}

/// [`Names`] to share: held for moments only, never across an await.
#[derive(Debug, Clone, Default)]
pub struct Directory(Arc<Mutex<Names>>);

impl Directory {
    /// The names.
    pub fn lock(&self) -> MutexGuard<'_, Names> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_gone_when_a_whole_list_does_not_have_it_and_not_before() {
        let mut names = Names::default();
        assert!(!names.is_gone("a"), "nobody has told yet");
        names.begin();
        names.put("a".into(), PodName::default());
        assert!(!names.is_gone("b"), "the list goes on");
        names.end();
        assert!(!names.is_gone("a") && names.is_gone("b"));
        names.put("b".into(), PodName::default());
        names.begin();
        names.put("a".into(), PodName::default());
        names.end();
        assert!(names.is_gone("b"));
        names.remove("a");
        assert!(names.is_gone("a"));
    }
}
