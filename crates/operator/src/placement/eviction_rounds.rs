//! Delays evictions for a waiting pod if earlier evictions for it had no effect. Pure: callers pass
//! in the time.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

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

/// A release to a device: the time in seconds since the Unix epoch, and the number of units.
pub(super) type ReleaseToDevice = (u64, u32);

/// A round of evictions by the rules of quotas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct QuotaRound {
    /// Whether the waiting pod had precedence over borrowers.
    pub(super) has_precedence: bool,
    /// The number of units that were found on each device for the pod, or for the pods of its gang.
    pub(super) found: BTreeMap<DeviceOfNode, u32>,
    /// UIDs of the pods to evict.
    pub(super) victims: BTreeSet<String>,
    /// When the evictions were decided, in seconds since the Unix epoch.
    pub(super) decided: u64,
}

impl QuotaRound {
    /// Returns whether the operator itself has given the units to other pods: one of the devices
    /// has too few free units, and would have enough without the operator's releases since the
    /// round. `state_of` returns the number of free units of a device, and the releases to it.
    /// Releases to other units of the device take nothing from the waiting pod. A release in the
    /// second of the decision came before the decision, which considered it.
    pub(super) fn is_taken<'r>(&self, state_of: impl Fn(&DeviceOfNode) -> (u32, &'r [ReleaseToDevice])) -> bool {
        self.found.iter().any(|(device, needed)| {
            let (free, releases) = state_of(device);
            let since = releases.iter().filter(|(time, _)| *time > self.decided);
            let taken = since.fold(0_u32, |sum, (_, units)| sum.saturating_add(*units));
            free < *needed && free.saturating_add(taken) >= *needed
        })
    }
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

    fn device(index: usize) -> DeviceOfNode {
        ("n1".to_owned(), "nvidia.com/gpu-mps".to_owned(), format!("GPU-{index}"))
    }

    /// Returns a round that found five units of GPU 0.
    fn round() -> QuotaRound {
        let (found, victims) = (BTreeMap::from([(device(0), 5)]), BTreeSet::from(["u".to_owned()]));
        QuotaRound { has_precedence: true, found, victims, decided: 100 }
    }

    #[test]
    fn only_releases_to_the_units_of_a_round_take_them() {
        let is_taken = |free: u32, releases: &[ReleaseToDevice]| round().is_taken(|_| (free, releases));
        assert!(is_taken(0, &[(101, 5)]), "one pod uses the units");
        assert!(is_taken(2, &[(101, 1), (150, 2)]), "several pods use a part of the units");
        assert!(!is_taken(0, &[]), "pods that the operator did not release use the units");
        assert!(!is_taken(0, &[(101, 4)]), "other pods use a part of the units too");
        assert!(!is_taken(5, &[(101, 5)]), "the units are free, and the releases use others");
        assert!(!is_taken(0, &[(99, 5), (100, 5)]), "the releases were earlier");
    }

    #[test]
    fn a_gang_needs_its_units_on_all_devices() {
        let mut round = round();
        round.found.insert(device(1), 5);
        let (releases, none): (Vec<ReleaseToDevice>, Vec<ReleaseToDevice>) = (vec![(101, 5)], Vec::new());
        let is_taken = |taken: usize| {
            round.is_taken(|of| if *of == device(taken) { (0, releases.as_slice()) } else { (5, none.as_slice()) })
        };
        assert!(is_taken(0) && is_taken(1) && !is_taken(2));
    }

    #[test]
    fn only_the_evictions_that_a_reconcile_decided_belong_to_its_round() {
        let mut rounds = EvictionRounds::default();
        rounds.start_by_quota("team/a", round(), 7);
        assert!(rounds.has_decided("team/a", "u", 7));
        assert!(!rounds.has_decided("team/a", "u", 8), "the pod is the rest of a gang");
        assert!(!rounds.has_decided("team/a", "other", 7) && !rounds.has_decided("team/b", "u", 7));
    }
}
