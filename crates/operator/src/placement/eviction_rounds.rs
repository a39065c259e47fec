//! Delays evictions for a waiting pod if earlier evictions for it had no effect. Pure: callers pass
//! in the time.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_plan::ledger::{DeviceUsage, Ledger, Preemption};

use super::pod_tracker::PodTracker;
use crate::pods::{PodObject, full_name};

/// Number of rounds of evictions for a waiting pod that are not delayed.
const UNDELAYED_ROUNDS: u32 = 3;
/// First delay between two rounds of evictions for a pod that still waits. Each further round
/// doubles the delay.
const FIRST_ROUND_DELAY: Duration = Duration::from_secs(60);
/// Maximum delay between two rounds of evictions for a pod that still waits.
const MAX_ROUND_DELAY: Duration = Duration::from_secs(3600);

/// The rounds of evictions for all waiting pods, by the pod's name.
#[derive(Debug, Default)]
pub(super) struct EvictionRounds(BTreeMap<String, Rounds>);

/// The evictions for one waiting pod. Evictions have no effect if the waiting pod's rules then
/// refuse the node, or pods that the operator does not release use the units. Without a delay, the
/// operator would repeatedly evict the victims' replacements.
#[derive(Debug, Default)]
struct Rounds {
    count: u32,
    /// The reconcile that decided the last evictions.
    reconcile: u64,
    /// Whether one of the last evictions did not succeed. The next evictions complete the round, so
    /// they are neither counted nor delayed.
    is_incomplete: bool,
    /// No pods are evicted for the waiting pod before this time.
    until: Duration,
    /// The last round by the rules of quotas.
    of_quota: Option<QuotaRound>,
    /// The reconcile that decided `of_quota`.
    quota_reconcile: u64,
}

/// Name of a node, a resource, and a device of this node.
pub(super) type DeviceOfNode = (String, String, String);

/// Numbers of units by device.
pub(super) type UnitsByDevice = BTreeMap<DeviceOfNode, u32>;

/// A round of evictions by the rules of quotas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct QuotaRound {
    /// Whether the waiting pod had precedence over borrowers.
    pub(super) has_precedence: bool,
    /// The units of each device that were found for the pod, or for the pods of its gang.
    found: BTreeMap<DeviceOfNode, FoundUnits>,
    /// UIDs of the pods to evict.
    victims: BTreeSet<String>,
}

/// The units of a device that a round of evictions is to free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FoundUnits {
    needed: u32,
    /// The units that neither the evicted pods nor other pods that the operator released use, for
    /// example those of static pods.
    foreign: u32,
}

impl FoundUnits {
    /// Returns whether pods that the operator released leave too few units. If they leave enough,
    /// other pods use what was freed, and the evictions had no effect.
    fn are_taken(self, capacity: u32, released: u32) -> bool {
        capacity.saturating_sub(self.foreign).saturating_sub(released) < self.needed
    }
}

impl QuotaRound {
    /// Returns a round that frees these units by evicting the pods with the UIDs `victims`.
    pub(super) fn new<'f>(
        has_precedence: bool,
        found: impl Iterator<Item = &'f Preemption>,
        victims: BTreeSet<String>,
        (tracker, ledger): (&PodTracker, &Ledger),
    ) -> Self {
        let mut needed = UnitsByDevice::new();
        for Preemption { node, takes, .. } in found {
            for take in takes {
                add(&mut needed, (node.clone(), take.resource.clone(), take.device.clone()), take.units.get());
            }
        }
        let is_victim = |pod: &PodObject| pod.metadata.uid.as_ref().is_some_and(|uid| victims.contains(&**uid));
        let leave = |pod: &PodObject| is_terminating(pod) || is_victim(pod);
        let known = units_of_pods((tracker, ledger), |pod| is_released(pod) || leave(pod));
        let found = needed.into_iter().map(|(device, needed)| {
            let used = usage(ledger, &device).map_or(0, |of| of.capacity.saturating_sub(of.free));
            let foreign = used.saturating_sub(known.get(&device).copied().unwrap_or_default());
            (device, FoundUnits { needed, foreign })
        });
        Self { has_precedence, found: found.collect(), victims }
    }

    /// Returns whether the operator itself has given the units of a device to other pods.
    /// `released` are the units of the pods that the operator released. Releases to other units of
    /// the device take nothing from the waiting pod.
    pub(super) fn is_taken(&self, ledger: &Ledger, released: &UnitsByDevice) -> bool {
        self.found.iter().any(|(device, found)| {
            let capacity = usage(ledger, device).map_or(0, |of| of.capacity);
            found.are_taken(capacity, released.get(device).copied().unwrap_or_default())
        })
    }
}

/// Returns the units of the pods that the operator released and that do not terminate, by device.
pub(super) fn released_units(tracker: &PodTracker, ledger: &Ledger) -> UnitsByDevice {
    units_of_pods((tracker, ledger), |pod| is_released(pod) && !is_terminating(pod))
}

/// Returns the units of the pods with GPUs that `counts` selects, by device.
fn units_of_pods((tracker, ledger): (&PodTracker, &Ledger), counts: impl Fn(&PodObject) -> bool) -> UnitsByDevice {
    let mut units = UnitsByDevice::new();
    for pod in tracker.living_pods().filter(|pod| pod.requests_gpus() && counts(pod)) {
        for (node, parts) in ledger.units_of(&full_name(&pod.metadata)) {
            for (resource, device, count) in parts {
                add(&mut units, (node.to_owned(), resource.to_owned(), device.to_owned()), count.get());
            }
        }
    }
    units
}

/// Returns whether the operator released a pod. Pods without a reservation, such as static pods,
/// were not released.
fn is_released(pod: &PodObject) -> bool {
    pod.reserved_until.is_some()
}

fn is_terminating(pod: &PodObject) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

fn add(units: &mut UnitsByDevice, device: DeviceOfNode, more: u32) {
    let sum = units.entry(device).or_default();
    *sum = sum.saturating_add(more);
}

fn usage(ledger: &Ledger, (node, resource, device): &DeviceOfNode) -> Option<DeviceUsage> {
    ledger.devices(node).into_iter().find(|of| of.resource == *resource && of.device == *device)
}

impl EvictionRounds {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Forgets the rounds for pods that do not wait.
    pub(super) fn retain(&mut self, waits: impl Fn(&str) -> bool) {
        self.0.retain(|name, _| waits(name));
    }

    /// Records that a reconcile decided evictions for a waiting pod by the rules of quotas.
    pub(super) fn start_by_quota(&mut self, pod: &str, round: QuotaRound, reconcile: u64) {
        let rounds = self.0.entry(pod.to_owned()).or_default();
        (rounds.of_quota, rounds.quota_reconcile) = (Some(round), reconcile);
    }

    /// Returns whether this reconcile decided by the rules of quotas to evict the pod with this UID
    /// for a waiting pod. The rest of a gang is evicted later, independently of the waiting pod.
    pub(super) fn has_decided(&self, pod: &str, uid: &str, reconcile: u64) -> bool {
        let rounds = self.0.get(pod).filter(|rounds| rounds.quota_reconcile == reconcile);
        rounds.and_then(|rounds| rounds.of_quota.as_ref()).is_some_and(|round| round.victims.contains(uid))
    }

    /// Records an eviction for a waiting pod. The evictions of one reconcile are one round.
    pub(super) fn record(&mut self, pod: &str, succeeded: bool, (reconcile, up): (u64, Duration)) {
        let rounds = self.0.entry(pod.to_owned()).or_default();
        if !succeeded {
            rounds.is_incomplete = true;
            return;
        }
        let is_counted = rounds.reconcile == reconcile;
        rounds.reconcile = reconcile;
        if is_counted || std::mem::take(&mut rounds.is_incomplete) {
            return;
        }
        rounds.count = rounds.count.saturating_add(1);
        if let Some(more) = rounds.count.checked_sub(UNDELAYED_ROUNDS) {
            let delay = FIRST_ROUND_DELAY.saturating_mul(2_u32.saturating_pow(more)).min(MAX_ROUND_DELAY);
            rounds.until = up.saturating_add(delay);
        }
    }

    /// Returns whether no pods are evicted for a pod now, because earlier evictions had no effect.
    pub(super) fn is_delayed(&self, pod: &str, up: Duration) -> bool {
        self.0.get(pod).is_some_and(|rounds| !rounds.is_incomplete && rounds.until > up)
    }

    /// Returns the last round by the rules of quotas.
    pub(super) fn last_by_quota(&self, pod: &str) -> Option<&QuotaRound> {
        self.0.get(pod)?.of_quota.as_ref()
    }

    /// Forgets the rounds for a pod: they do not show that evictions have no effect.
    pub(super) fn forget(&mut self, pod: &str) {
        self.0.remove(pod);
    }

    /// Returns the ends of the delays.
    pub(super) fn delays(&self) -> impl Iterator<Item = Duration> {
        self.0.values().map(|rounds| rounds.until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_releases_to_the_units_of_a_round_take_them() {
        let are_taken = |foreign: u32, released: u32| FoundUnits { needed: 5, foreign }.are_taken(10, released);
        assert!(are_taken(0, 10), "one pod uses the units, or several pods together");
        assert!(are_taken(4, 2), "pods that were not released used a part of the other units before");
        assert!(!are_taken(0, 5), "released pods use other units");
        assert!(!are_taken(4, 1), "pods that were not released use the units now");
        assert!(FoundUnits { needed: 1, foreign: 0 }.are_taken(0, 0), "the GPU was repartitioned");
    }

    #[test]
    fn only_the_evictions_that_a_reconcile_decided_belong_to_its_round() {
        let mut rounds = EvictionRounds::default();
        let victims = BTreeSet::from(["u".to_owned()]);
        rounds.start_by_quota("team/a", QuotaRound { has_precedence: true, found: BTreeMap::new(), victims }, 7);
        assert!(rounds.has_decided("team/a", "u", 7));
        assert!(!rounds.has_decided("team/a", "u", 8), "the pod is the rest of a gang");
        assert!(!rounds.has_decided("team/a", "other", 7) && !rounds.has_decided("team/b", "u", 7));
    }
}
