//! How the rules of quotas treat a released pod now, and when that next changes although the pod
//! does not.
use cleave_plan::ledger::Moment;
use cleave_plan::quota::{Place, Settings};

use super::claims::RESERVATION_TIME;
use crate::pods::PodObject;

/// Seconds after the end of a pod's grace period during which the pod counts towards its quota's
/// maximum.
const HELD_AFTER_GRACE_SECONDS: u64 = 30;
/// A pod terminates late if it ends more than this time after the maximum grace period of evicted
/// pods. The time is for clocks that differ.
const LATE_AFTER_GRACE_CAP: u64 = 30;

/// A released pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReleasedPlace {
    pub(super) place: Place,
    /// Whether the pod terminates later than an evicted pod would. Such a pod counts as running:
    /// otherwise a long grace period would keep its room from a guarantee.
    pub(super) terminates_late: bool,
    /// When the rules next treat the pod differently.
    pub(super) next_change: Option<Moment>,
}

impl ReleasedPlace {
    /// Returns the place of a pod on a GPU. `is_evicted` returns whether the API server accepted an
    /// eviction of the pod with this UID.
    pub(super) fn of(
        pod: &PodObject,
        gpu: usize,
        is_evicted: &impl Fn(&str) -> bool,
        (rules, Moment(now)): (&Settings, Moment),
    ) -> Self {
        let is_evicted = is_evicted(pod.metadata.uid.as_deref().unwrap_or_default());
        let seconds = |time: i64| u64::try_from(time).unwrap_or(0);
        let deleted = pod.metadata.deletion_timestamp.as_ref().map(|deleted| seconds(deleted.0.as_second()));
        let late_time = rules.grace_cap.saturating_add(LATE_AFTER_GRACE_CAP);
        let is_late = |deleted: &u64| *deleted > now.saturating_add(late_time);
        let (terminates_late, since) = (!is_evicted && deleted.as_ref().is_some_and(is_late), released(pod));
        let place = match deleted {
            _ if is_evicted => Place::Leaving { gpu, held: true },
            Some(deleted) if !terminates_late => {
                Place::Leaving { gpu, held: now < deleted.saturating_add(HELD_AFTER_GRACE_SECONDS) }
            }
            _ => Place::Running { gpu, since },
        };
        let ends_late = deleted.filter(|_| terminates_late).map(|deleted| deleted.saturating_sub(late_time));
        let changes = match place {
            Place::Running { .. } => {
                let end = |run_time: u64| Some(since.0.saturating_add(run_time));
                [end(rules.min_runtime_reclaim), end(rules.min_runtime_fair_share), ends_late]
            }
            _ => [deleted.map(|deleted| deleted.saturating_add(HELD_AFTER_GRACE_SECONDS)), None, None],
        };
        let next_change = changes.into_iter().flatten().filter(|time| *time > now).min().map(Moment);
        Self { place, terminates_late, next_change }
    }
}

/// Returns when a pod was released. A pod that did not wait at the gate counts from its creation.
pub(super) fn released(pod: &PodObject) -> Moment {
    let released = pod.reserved_until.map(|until| until.saturating_sub(RESERVATION_TIME.as_secs()));
    released.map_or_else(|| created(pod), Moment)
}

/// Returns when a pod was created.
pub(super) fn created(pod: &PodObject) -> Moment {
    let seconds = pod.metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second());
    Moment(u64::try_from(seconds).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_next_change_of_a_pod_is_the_end_of_a_minimum_run_time_or_of_its_termination() {
        let rules =
            Settings { min_runtime_reclaim: 10, min_runtime_fair_share: 100, grace_cap: 300, ..Settings::default() };
        let pod = |deleted: Option<&str>| -> PodObject {
            let metadata = json!({"name": "p", "uid": "u", "creationTimestamp": "1970-01-01T00:01:00Z", "deletionTimestamp": deleted});
            serde_json::from_value(json!({"metadata": metadata, "spec": {}})).unwrap()
        };
        let of = |deleted: Option<&str>, now: u64| {
            let of = ReleasedPlace::of(&pod(deleted), 0, &|_: &str| false, (&rules, Moment(now)));
            (matches!(of.place, Place::Running { .. }), of.terminates_late, of.next_change.map(|next| next.0))
        };
        assert_eq!(of(None, 60), (true, false, Some(70)));
        assert_eq!(of(None, 70), (true, false, Some(160)));
        assert_eq!(of(None, 160), (true, false, None));
        // It ends after 1,000 s. An evicted pod would end after 330 s.
        let deleted = Some("1970-01-01T00:16:40Z");
        assert_eq!(of(deleted, 100), (true, true, Some(160)));
        assert_eq!(of(deleted, 160), (true, true, Some(670)));
        assert_eq!(of(deleted, 670), (false, false, Some(1030)));
        assert_eq!(of(deleted, 1030), (false, false, None));
        let evicted = ReleasedPlace::of(&pod(deleted), 0, &|_: &str| true, (&rules, Moment(100)));
        assert_eq!(evicted.place, Place::Leaving { gpu: 0, held: true });
    }
}
