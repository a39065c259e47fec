//! The claims of released pods, by pod.
use std::collections::BTreeMap;
use std::sync::Arc;

use super::facts::Claim;
use crate::shared::{Interner, Shared};

/// The claims by pod. Pods with equal claims share one value, because a large cluster has many such
/// pods.
#[derive(Debug, Clone, Default)]
pub(super) struct Claims {
    by_pod: BTreeMap<Arc<str>, Shared<Claim>>,
    equal: Interner<Claim>,
}

/// The comparison ignores which pods share a claim.
impl PartialEq for Claims {
    fn eq(&self, other: &Self) -> bool {
        self.by_pod == other.by_pod
    }
}

impl Eq for Claims {}

impl Claims {
    /// Returns the claim of a pod.
    pub(super) fn get(&self, pod: &str) -> Option<&Claim> {
        self.by_pod.get(pod).map(|claim| &**claim)
    }

    /// Returns whether a pod has a claim.
    pub(super) fn contains(&self, pod: &str) -> bool {
        self.by_pod.contains_key(pod)
    }

    /// Returns the shared name of a pod with a claim, so that other maps share its memory.
    pub(super) fn shared_name(&self, pod: &str) -> Option<Arc<str>> {
        self.by_pod.get_key_value(pod).map(|(name, _)| Arc::clone(name))
    }

    /// Sets the claim of a pod.
    pub(super) fn insert(&mut self, pod: Arc<str>, claim: Claim) {
        let mut claim = Shared::from(claim);
        self.equal.share(&mut claim);
        self.by_pod.insert(pod, claim);
    }

    /// Removes the claim of a pod.
    pub(super) fn remove(&mut self, pod: &str) -> Option<Shared<Claim>> {
        self.by_pod.remove(pod)
    }

    /// Changes the claim of a pod, if the pod has a claim. Claims of other pods do not change.
    pub(super) fn change(&mut self, pod: &str, change: impl FnOnce(&mut Claim)) {
        if let Some(claim) = self.by_pod.get_mut(pod) {
            change(claim);
            self.equal.share(claim);
        }
    }

    /// Returns all claims, in order of the pods' names.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &Claim)> {
        self.by_pod.iter().map(|(pod, claim)| (&**pod, &**claim))
    }
}

#[cfg(test)]
mod tests {
    use super::super::facts::Place;
    use super::*;

    fn claim(node: &str) -> Claim {
        Claim { device_requests: Vec::new(), place: Place::Bound(node.to_owned()), annotated: BTreeMap::new() }
    }

    #[test]
    fn equal_claims_are_stored_once_and_a_change_affects_only_one_pod() {
        let mut claims = Claims::default();
        for pod in ["a", "b", "c"] {
            claims.insert(pod.into(), claim("n"));
        }
        let is_same = |claims: &Claims, pod: &str, other: &str| {
            std::ptr::eq(claims.get(pod).unwrap(), claims.get(other).unwrap())
        };
        assert!(is_same(&claims, "a", "b") && is_same(&claims, "b", "c"));
        claims.change("a", |claim| claim.place = Place::Bound("m".to_owned()));
        assert_eq!((claims.get("a"), claims.get("b")), (Some(&claim("m")), Some(&claim("n"))));
        claims.change("b", |claim| claim.place = Place::Bound("m".to_owned()));
        assert!(is_same(&claims, "a", "b") && !is_same(&claims, "b", "c"), "changed claims are shared again");
    }
}
