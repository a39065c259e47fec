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
}

/// Name of a node, and a device of this node.
pub(super) type DeviceOfNode = (String, String);

/// A round of evictions by the rules of quotas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct QuotaRound {
    /// Whether the waiting pod had precedence over borrowers.
    pub(super) has_precedence: bool,
    /// The devices whose units were freed for the pod, or for the pods of its gang.
    pub(super) devices: BTreeSet<DeviceOfNode>,
    /// When the evictions were decided, in seconds since the Unix epoch.
    pub(super) decided: u64,
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
    pub(super) fn start_by_quota(&mut self, pod: &str, round: QuotaRound) {
        self.0.entry(pod.to_owned()).or_default().of_quota = Some(round);
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
