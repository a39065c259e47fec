//! Remembers how many pods of each gang the operator evicted. If some pods of a gang had completed
//! before, its controller creates only the evicted pods again, and these must not wait for more.
//!
//! The memory is of this process. After a change of the leader, a gang waits for as many pods as it
//! states.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::actions::{Eviction, GangId};
use super::pod_tracker::PodTracker;

/// How long an evicted gang without pods is remembered. Its controller may create the pods again
/// later.
const RECREATION_TIME: Duration = Duration::from_secs(600);

/// The evicted pods of gangs, by namespace and name of the gang.
#[derive(Debug, Default)]
pub(super) struct GangRestarts(BTreeMap<(String, String), EvictedPods>);

/// The pods of a gang that the API server evicted.
#[derive(Debug, Default)]
struct EvictedPods {
    /// When the gang was released, as its pods record it.
    since: Option<u64>,
    /// UIDs of the pods.
    pods: BTreeSet<String>,
    /// Until this time, the gang is remembered although it has no pods.
    until: Duration,
}

impl GangRestarts {
    /// Records that the API server evicted a pod.
    pub(super) fn record_eviction(&mut self, eviction: &Eviction, up: Duration) {
        let Some(GangId { namespace, name, since }) = &eviction.gang else { return };
        let of = self.0.entry((namespace.clone(), name.clone())).or_default();
        if of.since != *since {
            // The gang was released again since its last eviction.
            *of = EvictedPods { since: *since, ..EvictedPods::default() };
        }
        of.pods.insert(eviction.uid.clone());
        of.until = up.saturating_add(RECREATION_TIME);
    }

    /// Forgets gangs that have no pods any more.
    pub(super) fn update(&mut self, tracker: &PodTracker, up: Duration) {
        if self.0.is_empty() {
            return;
        }
        let gangs = tracker.living_pods().filter_map(|pod| Some((pod.namespace(), pod.gang.as_ref()?.name.as_str())));
        let present: BTreeSet<(&str, &str)> = gangs.collect();
        self.0.retain(|(namespace, name), of| of.until > up || present.contains(&(namespace.as_str(), name.as_str())));
    }

    /// Returns how many pods of a gang were evicted when it last ran. Returns `None` if the
    /// operator did not evict it.
    pub(super) fn evicted_pods(&self, namespace: &str, name: &str) -> Option<usize> {
        self.0.get(&(namespace.to_owned(), name.to_owned())).map(|of| of.pods.len())
    }
}
