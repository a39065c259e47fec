//! Counts the pods of each gang, wherever they are. Pure.
//!
//! A pool has only those pods of a gang that use or request its GPUs. The size of a gang also counts
//! these pods:
//!
//! | pods | how they count |
//! |---|---|
//! | that request no GPUs, such as a launcher | They exist. |
//! | that were released to GPUs that no quota counts | They exist. |
//! | that have ended | The operator does not watch them. If a pod of the gang runs, or Kueue admitted the gang, pods that are still missing after [`MISSING_PODS_TIME`] count as ended. |
//! | that wait at the gate, and cannot use the pool | The gang does not use the pool: its pods are released together. |
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_plan::ledger::{Ledger, Moment};
use cleave_plan::quota::{Place, PodId};

use super::cluster::is_released;
use super::pod_tracker::PodTracker;
use super::quotas::{QuotaWorlds, created};
use crate::gang::GangSource;
use crate::gang_sizes::GroupSizes;
use crate::pods::{PodObject, full_name};

/// How long waiting pods of a gang wait for pods that are missing, after the newest of them was
/// created. A controller that restarts a gang creates all pods again within this time.
pub(super) const MISSING_PODS_TIME: Duration = Duration::from_secs(30);

/// The pods of a gang that have not ended and do not terminate.
#[derive(Debug, Default)]
struct GangPresence {
    /// Number of pods without which none is released.
    size: usize,
    /// Number of pods that wait at the gate, that were released, or that request no GPUs.
    present: usize,
    /// Number of pods that wait at the gate.
    waiting: usize,
    /// When the newest pod was created that waits at the gate, in seconds since the Unix epoch.
    newest: u64,
    /// Whether a pod was released.
    is_running: bool,
    /// Whether Kueue admits the pods, which it does only once all exist.
    is_of_kueue: bool,
    /// Whether a pod with GPUs has a gate of another controller.
    has_other_gates: bool,
}

impl GangPresence {
    /// Returns the number of pods of the gang that the pool needs, at least 1. `here` is the number
    /// of the gang's pods in the pool.
    fn size_in_pool(&self, here: usize, now: Moment) -> usize {
        let is_over = self.newest.saturating_add(MISSING_PODS_TIME.as_secs()) <= now.0;
        let size = if self.present >= self.size {
            self.size.saturating_sub(self.present.saturating_sub(here))
        } else if is_over && !self.has_other_gates && (self.is_running || self.is_of_kueue) {
            // The missing pods have ended.
            here
        } else {
            self.size
        };
        size.max(1)
    }
}

/// Returns the name of a pod's gang, which contains the namespace.
pub(super) fn gang_name(pod: &PodObject) -> Option<String> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    pod.gang.as_ref().map(|gang| format!("{namespace}/{}", gang.name))
}

/// Sets the size of each gang in each pool to the number of pods that the pool needs, and finds
/// gangs of which a waiting pod cannot use the pool. `waiting` are the pods at the gate, and
/// `is_evicted` returns whether an eviction of the pod with this UID was accepted.
pub(super) fn count_gangs(
    worlds: &mut QuotaWorlds,
    (tracker, ledger): (&PodTracker, &Ledger),
    waiting: &[(&str, &PodObject)],
    is_evicted: impl Fn(&str) -> bool,
    sizes: &GroupSizes,
) {
    if worlds.pools.iter().flat_map(|pool| &pool.world.pods).all(|pod| pod.gang.is_none()) {
        return;
    }
    let gangs = present_gangs((tracker, ledger), waiting, is_evicted, sizes);
    let now = worlds.now;
    for pool in &mut worlds.pools {
        let mut here: BTreeMap<String, (usize, usize)> = BTreeMap::new();
        for pod in &pool.world.pods {
            let Some(gang) = &pod.gang else { continue };
            let is_waiting = matches!(pod.place, Place::Waiting { .. });
            if is_waiting || matches!(pod.place, Place::Running { .. }) {
                let (all, waiting) = here.entry(gang.name.clone()).or_default();
                *all += 1;
                *waiting += usize::from(is_waiting);
            }
        }
        let mut split = BTreeSet::new();
        for (at, pod) in pool.world.pods.iter_mut().enumerate() {
            let Some(gang) = &mut pod.gang else { continue };
            let Some(of) = gangs.get(&gang.name) else { continue };
            let (all, waiting) = here.get(&gang.name).copied().unwrap_or_default();
            gang.size = of.size_in_pool(all, now);
            if matches!(pod.place, Place::Waiting { .. }) && waiting < of.waiting {
                split.insert(PodId(at));
            }
        }
        pool.split_gangs = split;
    }
}

/// Counts the pods of each gang.
fn present_gangs(
    (tracker, ledger): (&PodTracker, &Ledger),
    waiting: &[(&str, &PodObject)],
    is_evicted: impl Fn(&str) -> bool,
    sizes: &GroupSizes,
) -> BTreeMap<String, GangPresence> {
    let mut gangs: BTreeMap<String, GangPresence> = BTreeMap::new();
    let is_terminating = |pod: &PodObject| {
        pod.metadata.deletion_timestamp.is_some() || is_evicted(pod.metadata.uid.as_deref().unwrap_or_default())
    };
    for pod in tracker.living_pods() {
        let (Some(gang), Some(name)) = (&pod.gang, gang_name(pod)) else { continue };
        let of = gangs.entry(name).or_default();
        of.size = of.size.max(sizes.size(pod.metadata.namespace.as_deref().unwrap_or_default(), gang));
        of.is_of_kueue |= gang.source == GangSource::Kueue;
        if is_terminating(pod) {
            continue;
        }
        if !pod.requests_gpus() {
            of.present += 1;
        } else if pod.node().is_some() || is_released(pod) || ledger.claim(&full_name(&pod.metadata)).is_some() {
            of.present += 1;
            of.is_running = true;
        } else if !pod.waits_at_gate() {
            of.has_other_gates = true;
        }
    }
    for (_, pod) in waiting.iter().filter(|(_, pod)| pod.requests_gpus()) {
        let Some(of) = gang_name(pod).and_then(|name| gangs.get_mut(&name)) else { continue };
        of.present += 1;
        of.waiting += 1;
        of.newest = of.newest.max(created(pod).0);
    }
    gangs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_needs_the_pods_that_are_not_elsewhere() {
        let now = Moment(100);
        let of = |size, present| GangPresence { size, present, waiting: 1, newest: now.0, ..GangPresence::default() };
        assert_eq!(of(4, 4).size_in_pool(3, now), 3, "one pod exists elsewhere");
        assert_eq!(of(4, 5).size_in_pool(5, now), 4);
        assert_eq!(of(4, 3).size_in_pool(2, now), 4, "a pod is missing");
        assert_eq!(of(1, 9).size_in_pool(1, now), 1, "no gang needs 0 pods");
    }

    #[test]
    fn missing_pods_of_a_running_gang_count_as_ended_after_some_time() {
        let newest = 100;
        let over = Moment(newest + MISSING_PODS_TIME.as_secs());
        let of = || GangPresence { size: 4, present: 2, waiting: 1, newest, ..GangPresence::default() };
        assert_eq!(of().size_in_pool(2, over), 4, "no pod was released, so none has ended");
        let running = || GangPresence { is_running: true, ..of() };
        assert_eq!(running().size_in_pool(2, Moment(over.0 - 1)), 4);
        assert_eq!(running().size_in_pool(2, over), 2);
        assert_eq!(GangPresence { is_of_kueue: true, ..of() }.size_in_pool(2, over), 2);
        assert_eq!(GangPresence { has_other_gates: true, ..running() }.size_in_pool(2, over), 4);
    }
}
