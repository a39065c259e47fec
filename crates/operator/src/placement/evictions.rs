//! Records the results of evictions for preemption, and decides which pods can be evicted now.
//! Pure: callers pass in the time.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cleave_plan::ledger::{Holder, Moment};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::budgets::{BudgetProtection, DisruptionBudgets};
use crate::evict::EvictionResult;
use crate::pods::PodObject;
use crate::read::BudgetObject;

/// Time for which an evicted pod counts as terminating before the watch reports its deletion.
const ACCEPTED_TIME: Duration = Duration::from_secs(10);
/// How long a pod counts as terminating after its deletion timestamp, which includes the grace
/// period. A pod that still runs after this time may never end, and other pods must not wait for
/// it.
pub(super) const TERMINATION_TIME: Duration = Duration::from_secs(60);
/// Delay before another eviction of a pod after the first refusal. Each further refusal doubles the
/// delay.
pub(super) const FIRST_BACKOFF: Duration = Duration::from_secs(10);
/// Maximum delay before another eviction of a pod after a refusal.
const MAX_BACKOFF: Duration = Duration::from_secs(600);
/// Number of consecutive requests without an answer after which a pod counts as refused. Until
/// then, it is unknown whether the pod can be evicted, so no other pod is evicted instead.
pub(super) const MAX_UNANSWERED: u32 = 3;
/// Maximum pause after the API server has limited the rate of requests.
const MAX_RATE_LIMIT_PAUSE: Duration = Duration::from_secs(60);

/// Results of earlier evictions. Times are durations since the process started.
#[derive(Debug, Default)]
pub(super) struct EvictionRecords {
    /// UIDs of pods that the API server evicts or did not find, each with the time until which the
    /// pod counts as terminating.
    accepted: BTreeMap<String, Duration>,
    /// Pods that could not be evicted, by UID.
    failures: BTreeMap<String, EvictionFailures>,
    /// The time until which no pods are evicted, because the API server limits requests.
    paused_until: Duration,
    /// UIDs of pods that this reconcile evicts with their gangs.
    requested: BTreeSet<String>,
}

/// Consecutive failures to evict a pod.
#[derive(Debug, Default)]
struct EvictionFailures {
    unanswered: u32,
    refused: u32,
    /// Whether a disruption budget was the last reason.
    by_budget: bool,
    /// The time until which the pod is not evicted. `None` after that time.
    avoided_until: Option<Duration>,
    /// The time at which the failures are forgotten.
    forgotten_at: Duration,
}

impl EvictionRecords {
    /// Records the result of an eviction of the pod with this UID.
    pub(super) fn record(&mut self, uid: &str, result: &EvictionResult, up: Duration) {
        match result {
            EvictionResult::Done | EvictionResult::NotFound => {
                self.failures.remove(uid);
                self.accepted.insert(uid.to_owned(), up.saturating_add(ACCEPTED_TIME));
            }
            EvictionResult::Protected(_) => self.avoid(uid, true, up),
            EvictionResult::Refused(_) => self.avoid(uid, false, up),
            EvictionResult::Throttled(after) => {
                self.paused_until = self.paused_until.max(up.saturating_add((*after).min(MAX_RATE_LIMIT_PAUSE)));
                self.record_unanswered(uid, up);
            }
            EvictionResult::Failed(_) => self.record_unanswered(uid, up),
        }
    }

    fn record_unanswered(&mut self, uid: &str, up: Duration) {
        let failures = self.failures.entry(uid.to_owned()).or_default();
        failures.unanswered = failures.unanswered.saturating_add(1);
        failures.forgotten_at = up.saturating_add(MAX_BACKOFF);
        if failures.unanswered >= MAX_UNANSWERED {
            self.avoid(uid, false, up);
        }
    }

    fn avoid(&mut self, uid: &str, by_budget: bool, up: Duration) {
        let failures = self.failures.entry(uid.to_owned()).or_default();
        let backoff = FIRST_BACKOFF.saturating_mul(2_u32.saturating_pow(failures.refused)).min(MAX_BACKOFF);
        (failures.unanswered, failures.by_budget) = (0, by_budget);
        failures.refused = failures.refused.saturating_add(1);
        failures.avoided_until = Some(up.saturating_add(backoff));
        failures.forgotten_at = up.saturating_add(backoff).saturating_add(MAX_BACKOFF);
    }

    /// Removes accepted evictions, refusals and failures whose time has passed. Returns true if a
    /// pod can be evicted again.
    pub(super) fn update(&mut self, up: Duration) -> bool {
        let before = self.accepted.len();
        self.accepted.retain(|_, until| *until > up);
        let mut ended = before != self.accepted.len();
        for failures in self.failures.values_mut() {
            ended |= failures.avoided_until.take_if(|until| *until <= up).is_some();
        }
        self.failures.retain(|_, failures| failures.forgotten_at > up);
        ended
    }

    /// Returns whether the API server recently accepted an eviction of the pod with this UID, or
    /// did not find the pod.
    pub(super) fn is_accepted(&self, uid: &str) -> bool {
        self.accepted.contains_key(uid)
    }

    /// Returns whether this reconcile evicts the pod with this UID, because other pods of its gang
    /// were evicted before. The API server may refuse, so the pod's units are not about to be free.
    pub(super) fn is_requested(&self, uid: &str) -> bool {
        self.requested.contains(uid)
    }

    /// Returns whether an eviction of the pod with this UID has failed recently.
    pub(super) fn has_failed(&self, uid: &str) -> bool {
        self.failures.contains_key(uid)
    }

    /// Sets the UIDs of the pods that this reconcile evicts with their gangs, part of which was
    /// evicted before.
    pub(super) fn set_requested(&mut self, uids: BTreeSet<String>) {
        self.requested = uids;
    }

    /// Returns whether an eviction of the pod with this UID can be requested now.
    /// Disruption budgets do not delay a deletion (`force`).
    pub(super) fn can_request(&self, uid: &str, force: bool, up: Duration) -> bool {
        let is_avoided =
            |failures: &EvictionFailures| failures.avoided_until.is_some() && !(force && failures.by_budget);
        let is_avoided = self.failures.get(uid).is_some_and(is_avoided);
        !self.is_paused(up) && !self.accepted.contains_key(uid) && !is_avoided
    }

    /// Returns whether evictions are paused, because the API server limits requests.
    pub(super) fn is_paused(&self, up: Duration) -> bool {
        self.paused_until > up
    }

    /// Returns the remaining times until more pods may become evictable.
    pub(super) fn deadlines(&self, up: Duration) -> impl Iterator<Item = Duration> + '_ {
        let avoided = self.failures.values().filter_map(|failures| failures.avoided_until);
        let paused = Some(self.paused_until).filter(|until| *until > up);
        self.accepted.values().copied().chain(avoided).chain(paused).map(move |until| until.saturating_sub(up))
    }
}

/// Decides which pods can be evicted now.
#[derive(Clone)]
pub(super) struct Evictability<'a> {
    budgets: DisruptionBudgets<'a>,
    records: &'a EvictionRecords,
    /// Seconds since the Unix epoch.
    now: u64,
    /// Whether pods that disruption budgets protect can also be evicted.
    ignores_budgets: bool,
}

impl<'a> Evictability<'a> {
    /// Indexes the budgets. `now` is the number of seconds since the Unix epoch.
    pub(super) fn new(budgets: &'a [Arc<BudgetObject>], records: &'a EvictionRecords, now: u64) -> Self {
        Self { budgets: DisruptionBudgets::new(budgets), records, now, ignores_budgets: false }
    }

    /// Returns a copy that also allows evictions of pods that disruption budgets protect.
    pub(super) fn ignoring_budgets(&self) -> Self {
        Self { ignores_budgets: true, ..self.clone() }
    }

    /// Returns the seconds since the Unix epoch.
    pub(super) const fn now(&self) -> u64 {
        self.now
    }

    /// Returns whether evictions are paused, because the API server limits requests.
    pub(super) fn is_paused(&self, up: Duration) -> bool {
        self.records.is_paused(up)
    }

    /// Returns the results of earlier evictions.
    pub(super) const fn records(&self) -> &EvictionRecords {
        self.records
    }

    /// Returns the number of evictions that each disruption budget allows now.
    pub(super) fn allowed_evictions(&self) -> Vec<u32> {
        self.budgets.allowed_evictions()
    }

    /// Returns the properties of a bound pod that determine whether it is preempted. Returns `None`
    /// if the pod cannot be evicted now, or does not terminate after an eviction. The kubelet
    /// creates the mirror of a static pod again, and the static pod runs on.
    pub(super) fn holder(&self, pod: &'a PodObject) -> Option<Holder<'a>> {
        if pod.is_static {
            return None;
        }
        let is_terminating = is_terminating(pod);
        if is_terminating && !ends_soon(pod, self.now) {
            return None;
        }
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let created = pod.metadata.creation_timestamp.as_ref().map_or(0, epoch_seconds);
        let holder = Holder {
            priority: pod.spec.priority.unwrap_or(0),
            started: Moment(created),
            budget: None,
            ending: is_terminating || self.records.is_accepted(uid),
            requests: Some(&pod.spec.requests),
        };
        if holder.ending {
            return Some(holder);
        }
        if self.records.is_requested(uid) {
            return None;
        }
        let is_avoided = |failures: &EvictionFailures| {
            failures.avoided_until.is_some() && !(self.ignores_budgets && failures.by_budget)
        };
        if self.records.failures.get(uid).is_some_and(is_avoided) {
            return None;
        }
        if self.ignores_budgets {
            return Some(holder);
        }
        match self.budgets.protection(pod) {
            BudgetProtection::None => Some(holder),
            BudgetProtection::Budget(index) => Some(Holder { budget: Some(index), ..holder }),
            BudgetProtection::Evicted => Some(Holder { ending: true, ..holder }),
            BudgetProtection::Protected => None,
        }
    }
}

fn is_terminating(pod: &PodObject) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

/// Returns whether a pod terminates and is about to end: [`TERMINATION_TIME`] has not passed since
/// the end of its grace period. `now` is in seconds since the Unix epoch.
pub(super) fn ends_soon(pod: &PodObject, now: u64) -> bool {
    let deadline = pod.metadata.deletion_timestamp.as_ref().map(epoch_seconds);
    deadline.is_some_and(|at| now < at.saturating_add(TERMINATION_TIME.as_secs()))
}

fn epoch_seconds(time: &Time) -> u64 {
    u64::try_from(time.0.as_second()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UPTIME: Duration = Duration::from_secs(100);

    fn is_avoided(records: &EvictionRecords) -> bool {
        records.failures.get("u").is_some_and(|failures| failures.avoided_until.is_some())
    }

    #[test]
    fn a_refused_pod_is_avoided_for_longer_each_time() {
        let mut records = EvictionRecords::default();
        let mut up = UPTIME;
        for seconds in [10, 20, 40, 80, 160, 320, 600, 600] {
            records.record("u", &EvictionResult::Refused("no".to_owned()), up);
            let next = records.deadlines(up).min();
            assert_eq!((is_avoided(&records), next), (true, Some(Duration::from_secs(seconds))));
            up += Duration::from_secs(seconds);
            assert!(records.update(up) && !is_avoided(&records) && !records.update(up));
        }
        assert!(!records.update(up + MAX_BACKOFF) && records.failures.is_empty(), "later it starts again");
    }

    #[test]
    fn a_pod_is_avoided_only_after_several_requests_without_an_answer() {
        let mut records = EvictionRecords::default();
        for count in 1..=MAX_UNANSWERED {
            assert!(!is_avoided(&records));
            records.record("u", &EvictionResult::Failed("timeout".to_owned()), UPTIME * count);
        }
        assert!(is_avoided(&records));
        records.record("u", &EvictionResult::Done, UPTIME * 4);
        assert!(!is_avoided(&records) && records.accepted.contains_key("u"));
    }

    #[test]
    fn a_throttled_request_pauses_all_evictions() {
        let mut records = EvictionRecords::default();
        records.record("u", &EvictionResult::Throttled(Duration::from_secs(3)), UPTIME);
        assert!(records.is_paused(UPTIME) && !is_avoided(&records), "the pod is not protected");
        assert_eq!(records.deadlines(UPTIME).min(), Some(Duration::from_secs(3)));
        assert!(!records.is_paused(UPTIME + Duration::from_secs(3)));
        records.record("u", &EvictionResult::Throttled(Duration::from_secs(9999)), UPTIME);
        assert!(!records.is_paused(UPTIME + MAX_RATE_LIMIT_PAUSE), "a pause is limited");
    }
}
