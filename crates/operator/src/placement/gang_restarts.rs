//! Remembers how many pods of each gang ran when the operator evicted it. If other pods of the gang
//! had completed before, its controller creates only the evicted pods again, and these must not
//! wait for more.
//!
//! The memory is of this process. After a change of the leader, a gang waits for as many pods as it
//! states.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::actions::{Eviction, GangId};
use super::pod_tracker::PodTracker;
use crate::evict::EvictionResult;

/// How long an evicted gang without pods is remembered. Its controller may create the pods again
/// later.
const RECREATION_TIME: Duration = Duration::from_secs(600);

/// The evicted gangs, by namespace and name.
#[derive(Debug, Default)]
pub(super) struct GangRestarts(BTreeMap<(String, String), EvictedGangPods>);

/// The pods of a gang that the operator evicts.
#[derive(Debug, Default)]
struct EvictedGangPods {
    /// When the gang was released, as its pods record it.
    since: Option<u64>,
    /// The pods with GPUs that existed when the evictions began, by UID, including those that
    /// terminated already.
    pods: BTreeSet<String>,
    /// Whether a pod was evicted, or may have been.
    has_begun: bool,
    /// Until this time, the gang is remembered although it has no pods.
    until: Duration,
}

impl GangRestarts {
    /// Remembers the pods of the gangs whose evictions this reconcile decided.
    pub(super) fn remember(&mut self, evictions: &[Eviction], tracker: &PodTracker, up: Duration) {
        let gangs: BTreeSet<&GangId> = evictions.iter().filter_map(|eviction| eviction.gang.as_ref()).collect();
        if gangs.is_empty() {
            return;
        }
        for gang in &gangs {
            let of = self.0.entry((gang.namespace.clone(), gang.name.clone())).or_default();
            of.until = up.saturating_add(RECREATION_TIME);
            // The rest of a gang is evicted later, and then the gang no longer has all of its pods.
            let mut uids = evictions.iter().filter(|one| one.gang.as_ref() == Some(gang)).map(|one| &one.uid);
            if of.since != gang.since || !of.has_begun || uids.any(|uid| !of.pods.contains(uid)) {
                *of = EvictedGangPods { since: gang.since, until: of.until, ..EvictedGangPods::default() };
            }
        }
        for pod in tracker.living_pods().filter(|pod| pod.requests_gpus() && pod.has_left_gate()) {
            let Some(gang) = GangId::of(pod).filter(|gang| gangs.contains(gang)) else { continue };
            if let Some(of) = self.0.get_mut(&(gang.namespace, gang.name)).filter(|of| !of.has_begun) {
                of.pods.extend(pod.uid());
            }
        }
    }

    /// Records the result of an eviction.
    pub(super) fn record(&mut self, eviction: &Eviction, result: &EvictionResult) {
        let Some(GangId { namespace, name, since }) = &eviction.gang else { return };
        let of = self.0.get_mut(&(namespace.clone(), name.clone())).filter(|of| of.since == *since);
        if let Some(of) = of {
            of.has_begun |= matches!(result, EvictionResult::Done | EvictionResult::Failed(_));
        }
    }

    /// Forgets gangs that were released again, and those that have no pods any more.
    pub(super) fn update(&mut self, tracker: &PodTracker, up: Duration) {
        if self.0.is_empty() {
            return;
        }
        let mut present: BTreeSet<(String, String)> = BTreeSet::new();
        for pod in tracker.living_pods() {
            let Some(gang) = &pod.gang else { continue };
            let key = (pod.namespace().to_owned(), gang.name.clone());
            let is_other = |of: &EvictedGangPods| gang.released.is_some() && gang.released != of.since;
            if self.0.get(&key).is_some_and(is_other) {
                self.0.remove(&key);
            }
            present.insert(key);
        }
        self.0.retain(|key, of| of.until > up || present.contains(key));
    }

    /// Returns how many pods of a gang ran when the operator last evicted it. Returns `None` if the
    /// operator did not evict it, or released it again since.
    pub(super) fn evicted_pods(&self, namespace: &str, name: &str) -> Option<usize> {
        let of = self.0.get(&(namespace.to_owned(), name.to_owned())).filter(|of| of.has_begun);
        of.map(|of| of.pods.len())
    }
}
