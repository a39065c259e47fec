//! Tracks the pods that wait at the gate, their waiting times, and the releases that the API server
//! refused.
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_api::names::GATE;
use cleave_plan::ledger::Ledger;

use super::actions::Actions;
use crate::pods::PodObject;
use crate::policies::demand::{Reason, WaitingPod};

/// Number of consecutive refusals by the API server after which a pod's release is delayed. The
/// first refusals may only mean that the pod changed after the decision.
pub(super) const MAX_REFUSALS: u32 = 3;
/// First delay, after [`MAX_REFUSALS`] refusals. Each further refusal doubles the delay.
pub(super) const FIRST_BACKOFF: Duration = Duration::from_secs(1);
/// Maximum delay before a refused release is attempted again.
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// How long a pod that no longer exists is not released again, if the watch still shows the pod. A
/// watch is stale for at most 35 s.
pub(super) const MISSING_TIME: Duration = Duration::from_secs(60);
/// Maximum length of a reported message of the API server, in characters.
const MAX_MESSAGE_CHARS: usize = 300;

/// Pods at the gate, by name, and the UIDs of pods that have scheduling gates of others.
#[derive(Debug, Default)]
pub(super) struct Queue(BTreeMap<String, GatedPod>, BTreeSet<String>);

/// A pod at the gate. Times are durations since the process started.
#[derive(Debug)]
struct GatedPod {
    uid: String,
    since: Duration,
    /// Whether the pod had another scheduling gate until `since`.
    had_other_gate: bool,
    /// When the pod became unplaceable. `None` if the pod is placeable or the obstacle is
    /// temporary.
    unplaceable_since: Option<Duration>,
    refused: Option<Refusals>,
    /// The time before which the pod is not released again, because the API server answered a
    /// release with "not found".
    missing_until: Option<Duration>,
}

/// The API server's refusals to release a pod.
#[derive(Debug)]
struct Refusals {
    /// Number of consecutive refusals.
    times: u32,
    /// End of the delay.
    until: Duration,
    /// The API server's message for the last refusal.
    message: String,
}

impl Queue {
    /// Removes the pods that are not in `present`, and adds the pods in `waiting`. Returns the
    /// added pods.
    pub(super) fn update<'a>(
        &mut self,
        present: &BTreeSet<String>,
        waiting: &[(String, &'a PodObject)],
        up: Duration,
    ) -> Vec<&'a PodObject> {
        let mut arrived = Vec::new();
        self.0.retain(|name, _| present.contains(name));
        for (name, pod) in waiting {
            let uid = pod.uid().unwrap_or_default();
            let new = || GatedPod {
                uid: uid.clone(),
                since: up,
                had_other_gate: self.1.contains(&uid),
                unplaceable_since: None,
                refused: None,
                missing_until: None,
            };
            if self.0.get(name).is_none_or(|gated| gated.uid != uid) {
                self.0.insert(name.clone(), new());
                arrived.push(*pod);
            }
        }
        arrived
    }

    /// Records which pods have other scheduling gates too.
    pub(super) fn record_other_gates(&mut self, pods: &[&PodObject]) {
        let has_other_gate =
            |pod: &&&PodObject| pod.node().is_none() && pod.spec.scheduling_gates.iter().any(|gate| gate.name != GATE);
        self.1 = pods.iter().filter(has_other_gate).filter_map(|pod| pod.uid()).collect();
    }

    /// Returns how long ago the last other scheduling gate of a pod was removed. Returns `None` if
    /// this process has not seen the pod with another gate.
    pub(super) fn time_since_other_gates(&self, name: &str, up: Duration) -> Option<Duration> {
        let gated = self.0.get(name).filter(|gated| gated.had_other_gate)?;
        Some(up.saturating_sub(gated.since))
    }

    /// Returns how long a pod has waited.
    pub(super) fn waiting_time(&self, name: &str, up: Duration) -> Duration {
        self.0.get(name).map_or(Duration::ZERO, |gated| up.saturating_sub(gated.since))
    }

    /// Returns the pods that have waited longest, at most `count`, longest first.
    pub(super) fn longest_waits(&self, count: usize, up: Duration) -> Vec<(&str, Duration)> {
        let mut oldest = BTreeSet::new();
        for (name, gated) in &self.0 {
            oldest.insert((gated.since, name.as_str()));
            if oldest.len() > count {
                oldest.pop_last();
            }
        }
        oldest.into_iter().map(|(since, name)| (name, up.saturating_sub(since))).collect()
    }

    /// Returns how long a pod has been unplaceable. Returns `None` if the pod is not at the gate,
    /// or if `may_pass` is true, because the obstacle is then temporary.
    pub(super) fn unplaceable_time(&mut self, name: &str, may_pass: bool, up: Duration) -> Option<Duration> {
        let gated = self.0.get_mut(name)?;
        gated.unplaceable_since = if may_pass { None } else { gated.unplaceable_since.or(Some(up)) };
        Some(up.saturating_sub(gated.unplaceable_since?))
    }

    /// Records that the API server refused to release a pod.
    ///
    /// The refusal may be permanent, for example because of the pod's size. Therefore the pod does
    /// not reserve shares at each reconcile, and a message explains the refusal to the pod's owner.
    pub(super) fn record_refusal(&mut self, name: &str, message: &str, up: Duration) {
        let Some(gated) = self.0.get_mut(name) else { return };
        let times = gated.refused.as_ref().map_or(1, |before| before.times.saturating_add(1));
        let delay = match times.checked_sub(MAX_REFUSALS) {
            None => Duration::ZERO,
            Some(more) => FIRST_BACKOFF.saturating_mul(2_u32.saturating_pow(more)).min(MAX_BACKOFF),
        };
        let message = message.chars().take(MAX_MESSAGE_CHARS).collect();
        gated.refused = Some(Refusals { times, until: up.saturating_add(delay), message });
    }

    /// Records that the API server does not have a pod.
    pub(super) fn record_missing(&mut self, name: &str, uid: &str, up: Duration) {
        if let Some(gated) = self.0.get_mut(name).filter(|gated| gated.uid == uid) {
            gated.missing_until = Some(up.saturating_add(MISSING_TIME));
        }
    }

    /// Returns how long a pod that no longer exists is not released again. Returns `None` if the
    /// pod may be released now.
    pub(super) fn missing_time_left(&self, name: &str, up: Duration) -> Option<Duration> {
        let until = self.0.get(name)?.missing_until?;
        Some(until.saturating_sub(up)).filter(|left| !left.is_zero())
    }

    /// Returns whether a pod is not released now: it no longer exists, or the API server refused
    /// its release several times. Reports why the release is delayed.
    pub(super) fn delays_release(&self, name: &str, up: Duration, actions: &mut Actions) -> bool {
        if let Some(left) = self.missing_time_left(name, up) {
            actions.requeue_in(left);
            return true;
        }
        let refused = self.0.get(name).and_then(|gated| gated.refused.as_ref());
        let Some(Refusals { until, message, .. }) = refused.filter(|refused| refused.until > up) else {
            return false;
        };
        actions.requeue_in(until.saturating_sub(up));
        let message = format!("The API server refused the patch that releases this pod: {message}");
        actions.waiting.insert(name.to_owned(), WaitingPod { reason: Reason::Malformed, message });
        true
    }

    /// Removes from `waiting` the pods that no longer exist, and the pods whose release is delayed.
    /// Reports why the release is delayed.
    pub(super) fn remove_delayed<'a>(
        &self,
        ledger: &mut Ledger,
        mut waiting: Vec<(String, &'a PodObject)>,
        up: Duration,
        actions: &mut Actions,
    ) -> Vec<(String, &'a PodObject)> {
        waiting.retain(|(name, _)| {
            let is_delayed = self.delays_release(name, up, actions);
            if is_delayed {
                drop(ledger.withdraw(name));
            }
            !is_delayed
        });
        waiting
    }
}

/// Sorts pods by descending priority, then by age.
pub(super) fn sort_by_priority(waiting: &mut [(String, &PodObject)]) {
    waiting.sort_by(|(name, pod), (other_name, other)| {
        let priority = |pod: &PodObject| pod.spec.priority.unwrap_or(0);
        let created = |pod: &PodObject| pod.metadata.creation_timestamp.as_ref().map(|time| time.0);
        let key = |pod| (Reverse(priority(pod)), created(pod));
        key(pod).cmp(&key(other)).then_with(|| name.cmp(other_name))
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_waiting_pods_are_listed_first() {
        let mut queue = Queue::default();
        for (at, name) in ["c", "a", "b", "d"].into_iter().enumerate() {
            let since = Duration::from_secs(at as u64);
            let gated = GatedPod {
                uid: String::new(),
                since,
                had_other_gate: false,
                unplaceable_since: None,
                refused: None,
                missing_until: None,
            };
            queue.0.insert(name.to_owned(), gated);
        }
        let seconds = Duration::from_secs;
        assert_eq!(queue.longest_waits(3, seconds(10)), [("c", seconds(10)), ("a", seconds(9)), ("b", seconds(8))]);
        assert!(queue.longest_waits(0, seconds(10)).is_empty());
    }
}
