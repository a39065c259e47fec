//! Tracks the terminating pods of the node and their deadlines. Pure: callers pass in the time.
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use cleave_kubelet::ContainerDevices;

use crate::allocation::allocation_id;

/// Time for which the agent tracks a pod after the API server has removed it. The programs of a pod
/// that was deleted by force may still run, because the kubelet grants them the grace period of the
/// spec.
const REMOVED_POD_RETENTION: Duration = Duration::from_secs(300);
/// Part of a `preStop` sleep that gives the agent time to act. The rest of a longer sleep gives the
/// program time to finish its work.
const MAX_SLEEP_FOR_AGENT: Duration = Duration::from_secs(2);
/// Maximum time before the end of the grace period at which the agent terminates clients that
/// survive SIGTERM. On an H200 with driver 580, `terminate_client` takes 3 to 10 ms for each
/// client, and a GPU has at most 48 clients. The margin also leaves time to repeat failed attempts.
const MAX_TERMINATION_MARGIN: Duration = Duration::from_secs(2);
/// Minimum ratio of the grace period to the margin. The margin is at most a quarter of the grace
/// period.
const MIN_GRACE_TO_MARGIN_RATIO: u32 = 4;

/// Maximum grace period or sleep. Longer values count as this maximum, because a spec may contain
/// any 64-bit number of seconds, which could overflow an [`Instant`].
const MAX_GRACE_OR_SLEEP: Duration = Duration::from_secs(365 * 24 * 3600);

/// The API server's report about the termination of a pod with shares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodObservation {
    /// UID of the pod.
    pub uid: String,
    /// `namespace/name`.
    pub name: String,
    /// Time by which the pod's `preStop` hooks are known to delay SIGTERM: the shortest sleep of
    /// its containers with shares.
    pub sleep: Duration,
    /// The deletion, if the pod is being deleted.
    pub deletion: Option<Deletion>,
}

/// A deletion of a pod, with its grace period.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deletion {
    /// Grace period that the deletion requested.
    pub grace: Duration,
    /// Remaining grace period, from the API server's time of deletion and the node's clock. The
    /// node's clock may differ from the API server's clock.
    pub left: Duration,
}

/// The deadlines of a terminating pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TerminationDeadlines {
    /// Time at which the agent first observed that the pod terminates.
    pub since: Instant,
    /// Estimated time at which the kubelet kills the remaining programs.
    pub end: Instant,
    /// Two times at which the agent terminates clients: first those that SIGTERM ends, and later
    /// those that survive SIGTERM.
    due: (Instant, Instant),
    grace: Duration,
}

impl TerminationDeadlines {
    fn new(since: Instant, end: Instant, grace: Duration, sleep: Duration) -> Self {
        let margin = (grace / MIN_GRACE_TO_MARGIN_RATIO).min(MAX_TERMINATION_MARGIN);
        let last = end.checked_sub(margin).unwrap_or(since).max(since);
        let before_sigterm = sleep.checked_sub(MAX_SLEEP_FOR_AGENT).map_or(since, |wait| since + wait);
        Self { since, end, due: (before_sigterm.min(last), last), grace }
    }

    /// Returns the deadlines with an earlier end. No client becomes due later than before, although
    /// a shorter grace period has a smaller margin.
    fn with_earlier_end(self, end: Instant, grace: Duration) -> Self {
        let Self { since, end: before, due: (ends, survives), .. } = self;
        let Self { due: (_, last), end, .. } = Self::new(since, before.min(end), grace, Duration::ZERO);
        Self { since, end, due: (ends.min(last), survives.min(last)), grace }
    }

    /// Returns the time at which the agent must terminate a client. If SIGTERM ends the client, the
    /// time is during the `preStop` sleep, or at once if no sleep delays SIGTERM. If the client
    /// survives SIGTERM, the time is shortly before the end of the grace period.
    pub fn termination_time(&self, survives_sigterm: bool) -> Instant {
        if survives_sigterm { self.due.1 } else { self.due.0 }
    }
}

/// A tracked pod, which may be terminating.
#[derive(Debug, PartialEq, Eq)]
struct TerminatingPod {
    name: String,
    /// The deadlines, if the pod terminates.
    deadlines: Option<TerminationDeadlines>,
    /// Time at which the agent observed that the API server has removed the pod. `None` if the pod
    /// exists.
    removed: Option<Instant>,
}

/// The node's pods with shares, and the deadlines of the terminating pods.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct TerminatingPods {
    by_uid: BTreeMap<String, TerminatingPod>,
    /// `namespace/name` of pods by allocation id, from the kubelet's list.
    holders: BTreeMap<String, String>,
}

impl TerminatingPods {
    /// Adds or updates a pod. Returns whether the tracked state changed.
    pub fn observe(&mut self, observation: PodObservation, now: Instant) -> bool {
        self.forget_removed_pods(now);
        let PodObservation { uid, name, sleep, deletion } = observation;
        let sleep = sleep.min(MAX_GRACE_OR_SLEEP);
        let deletion = deletion.map(|deletion| Deletion { grace: deletion.grace.min(MAX_GRACE_OR_SLEEP), ..deletion });
        let before = self.by_uid.get(&uid);
        if before.is_some_and(|pod| pod.removed.is_some()) {
            return false;
        }
        let was = before.and_then(|pod| pod.deadlines);
        let deadlines = match (deletion, was) {
            (None, _) => None,
            // A grace period can be shortened, but not extended.
            (Some(Deletion { grace, .. }), Some(was)) if grace < was.grace => {
                Some(was.with_earlier_end(now + grace, grace))
            }
            (Some(_), Some(was)) => Some(was),
            (Some(Deletion { grace, left }), None) => {
                // If the agent has observed the pod before, the deletion is new, regardless of the
                // clocks. If the agent sees the pod for the first time, the grace period of the pod
                // may be almost over.
                let left = if before.is_some() { grace } else { left.min(grace) };
                Some(TerminationDeadlines::new(now, now + left, grace, sleep))
            }
        };
        let pod = TerminatingPod { name, deadlines, removed: None };
        let changed = before != Some(&pod);
        self.by_uid.insert(uid, pod);
        changed
    }

    /// Records that the API server has removed a pod. The pod's programs may still run if it was
    /// deleted by force. Returns whether the tracked state changed.
    pub fn record_removal(&mut self, uid: &str, now: Instant) -> bool {
        self.forget_removed_pods(now);
        let Some(pod) = self.by_uid.get_mut(uid).filter(|pod| pod.removed.is_none()) else { return false };
        let immediate = || TerminationDeadlines::new(now, now, Duration::ZERO, Duration::ZERO);
        pod.deadlines = Some(pod.deadlines.map_or_else(immediate, |was| was.with_earlier_end(now, Duration::ZERO)));
        pod.removed = Some(now);
        true
    }

    /// Records the removal of all pods that are not in `uids`. Returns whether the tracked state
    /// changed.
    pub fn retain_listed(&mut self, uids: &BTreeSet<String>, now: Instant) -> bool {
        let missing: Vec<String> = self.by_uid.keys().filter(|uid| !uids.contains(*uid)).cloned().collect();
        missing.iter().filter(|uid| self.record_removal(uid, now)).count() > 0
    }

    /// Removes a pod after all of its programs have ended. Returns whether the pod was tracked.
    pub fn remove_finished(&mut self, uid: &str) -> bool {
        self.by_uid.remove(uid).is_some()
    }

    /// Replaces the pods of allocations with those in the kubelet's list. Returns whether the pod
    /// of any allocation changed.
    pub fn set_holders(&mut self, rows: &[ContainerDevices]) -> bool {
        let of_row =
            |row: &ContainerDevices| (allocation_id(&row.resource, &row.ids), format!("{}/{}", row.namespace, row.pod));
        let holders = rows.iter().map(of_row).collect();
        let changed = self.holders != holders;
        self.holders = holders;
        changed
    }

    /// Returns whether any pod terminates.
    pub fn has_terminating_pods(&self) -> bool {
        self.by_uid.values().any(|pod| pod.deadlines.is_some())
    }

    /// Finds the terminating pod of a client. Returns the pod's `namespace/name` and deadlines.
    ///
    /// `uids` contains the UIDs of the pods whose cgroups contain the client, outermost first. If
    /// `uids` is empty, returns the pod that `allocation` belongs to, unless another pod with the
    /// same name is not terminating.
    pub fn find_terminating(&self, uids: &[String], allocation: Option<&str>) -> Option<(&str, TerminationDeadlines)> {
        if !uids.is_empty() {
            // Do not search by allocation if no tracked pod has one of these UIDs. The client's pod
            // may be a static pod or a new pod, and the search could find another pod.
            let pod = uids.iter().find_map(|uid| self.by_uid.get(uid))?;
            return Some((&pod.name, pod.deadlines?));
        }
        let name = self.holders.get(allocation?)?;
        let mut named = self.by_uid.values().filter(|pod| pod.name == *name);
        let first = named.next()?;
        let last = named.try_fold(first.deadlines?, |latest, pod| {
            let deadlines = pod.deadlines?;
            Some(if deadlines.end > latest.end { deadlines } else { latest })
        })?;
        Some((&first.name, last))
    }

    /// Stops tracking the pods that the API server removed at least [`REMOVED_POD_RETENTION`] ago.
    fn forget_removed_pods(&mut self, now: Instant) {
        let old = |removed: Instant| now.saturating_duration_since(removed) >= REMOVED_POD_RETENTION;
        self.by_uid.retain(|_, pod| !pod.removed.is_some_and(old));
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::termination) const fn secs(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    pub(in crate::termination) const fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// Returns an observation of a pod. `grace` contains the grace period and the remaining time of
    /// the pod's deletion in seconds, if any.
    pub(in crate::termination) fn observation(uid: &str, grace: Option<(u64, u64)>) -> PodObservation {
        let deletion = grace.map(|(grace, left)| Deletion { grace: secs(grace), left: secs(left) });
        PodObservation { uid: uid.into(), name: format!("ns/{uid}"), sleep: secs(1), deletion }
    }

    /// Returns the start and end of a pod's termination in milliseconds after `start`.
    fn termination_span_ms(pods: &TerminatingPods, uid: &str, start: Instant) -> Option<(u128, u128)> {
        let (_, TerminationDeadlines { since, end, .. }) = pods.find_terminating(&[uid.to_owned()], None)?;
        Some(((since - start).as_millis(), (end - start).as_millis()))
    }

    #[test]
    fn a_new_deletion_has_its_whole_grace_period_and_an_earlier_deletion_has_the_remaining_time() {
        let now = Instant::now();
        let mut pods = TerminatingPods::default();
        assert!(pods.observe(observation("a", None), now) && !pods.observe(observation("a", None), now));
        assert!(!pods.has_terminating_pods());
        // According to the API server's clock, half of the grace period is over. However, the agent
        // itself has observed the start of the grace period.
        assert!(pods.observe(observation("a", Some((30, 15))), now + secs(1)));
        assert_eq!(termination_span_ms(&pods, "a", now), Some((1000, 31_000)));
        assert!(pods.has_terminating_pods());
        assert!(!pods.observe(observation("a", Some((30, 3))), now + secs(9)), "only its status has changed");
        pods.observe(observation("b", Some((30, 15))), now);
        assert_eq!(termination_span_ms(&pods, "b", now), Some((0, 15_000)));
        pods.observe(observation("c", Some((30, 300))), now);
        assert_eq!(
            termination_span_ms(&pods, "c", now),
            Some((0, 30_000)),
            "a slow clock does not extend the grace period"
        );
    }

    #[test]
    fn very_long_grace_periods_and_sleeps_do_not_overflow() {
        let now = Instant::now();
        let mut pods = TerminatingPods::default();
        let forever = Duration::from_secs(u64::MAX);
        let longest = MAX_GRACE_OR_SLEEP.as_millis();
        for (uid, observed) in [("a", true), ("b", false)] {
            if observed {
                pods.observe(PodObservation { sleep: forever, ..observation(uid, None) }, now);
            }
            let deletion = Some(Deletion { grace: forever, left: forever });
            pods.observe(PodObservation { sleep: forever, deletion, ..observation(uid, None) }, now);
            assert_eq!(termination_span_ms(&pods, uid, now), Some((0, longest)));
        }
        pods.observe(observation("a", Some((30, 30))), now);
        assert_eq!(termination_span_ms(&pods, "a", now), Some((0, 30_000)), "it can be shortened");
    }

    #[test]
    fn a_grace_period_can_be_shortened_but_not_extended() {
        let now = Instant::now();
        let mut pods = TerminatingPods::default();
        pods.observe(observation("a", None), now);
        pods.observe(observation("a", Some((30, 30))), now);
        pods.observe(observation("a", Some((60, 60))), now + secs(1));
        assert_eq!(termination_span_ms(&pods, "a", now), Some((0, 30_000)));
        pods.observe(observation("a", Some((5, 5))), now + secs(10));
        assert_eq!(termination_span_ms(&pods, "a", now), Some((0, 15_000)));
        pods.observe(observation("a", Some((4, 4))), now + secs(14));
        assert_eq!(termination_span_ms(&pods, "a", now), Some((0, 15_000)));
    }

    #[test]
    fn a_pod_that_the_api_server_removed_terminates_at_once_and_is_forgotten_later() {
        let now = Instant::now();
        let mut pods = TerminatingPods::default();
        for uid in ["a", "b", "c"] {
            pods.observe(observation(uid, None), now);
        }
        pods.observe(observation("b", Some((30, 30))), now);
        assert!(
            pods.record_removal("b", now + secs(1))
                && !pods.record_removal("b", now + secs(2))
                && !pods.record_removal("z", now)
        );
        assert_eq!(termination_span_ms(&pods, "b", now), Some((0, 1000)));
        assert!(pods.retain_listed(&BTreeSet::from(["c".to_owned()]), now + secs(2)));
        assert_eq!(termination_span_ms(&pods, "a", now), Some((2000, 2000)));
        assert_eq!(termination_span_ms(&pods, "c", now), None);
        assert!(!pods.observe(observation("a", None), now + secs(3)), "an outdated observation");
        assert!(pods.remove_finished("c") && !pods.remove_finished("c"));
        pods.observe(observation("d", None), now + REMOVED_POD_RETENTION + secs(2));
        assert!(!pods.has_terminating_pods(), "pods removed long ago are forgotten");
    }

    #[test]
    fn clients_are_due_before_sigterm_or_before_the_grace_period_ends() {
        let now = Instant::now();
        let termination_time = |grace: u64, sleep: u64, survives_sigterm: bool| {
            let deadlines = TerminationDeadlines::new(now, now + secs(grace), secs(grace), secs(sleep));
            (deadlines.termination_time(survives_sigterm) - now).as_millis()
        };
        for (grace, millis) in [(0, 0), (1, 750), (4, 3000), (8, 6000), (30, 28_000), (3600, 3_598_000)] {
            assert_eq!((termination_time(grace, 1, false), termination_time(grace, 1, true)), (0, millis), "{grace}");
        }
        // A longer sleep gives the program time to finish its work.
        assert_eq!((termination_time(30, 15, false), termination_time(30, 15, true)), (13_000, 28_000));
        assert_eq!(termination_time(30, 30, false), 28_000);
        assert_eq!(termination_time(0, 15, false), 0);
        // A shorter grace period does not delay a deadline, although its margin is smaller.
        let long = TerminationDeadlines::new(now, now + secs(8), secs(8), secs(0));
        assert_eq!(long.termination_time(true), now + secs(6));
        assert_eq!(long.with_earlier_end(now + secs(8), secs(1)).termination_time(true), now + secs(6));
        assert_eq!(long.with_earlier_end(now + secs(3), secs(1)).termination_time(true), now + millis(2750));
    }

    #[test]
    fn the_pod_of_a_client_is_found_by_cgroup_or_otherwise_by_allocation() {
        let now = Instant::now();
        let row = |pod: &str, id: &str| ContainerDevices {
            namespace: "ns".into(),
            pod: pod.into(),
            container: "c".into(),
            resource: "r".into(),
            ids: vec![id.into()],
        };
        let mut pods = TerminatingPods::default();
        let rows = [row("a", "0"), row("web", "1")];
        assert!(pods.set_holders(&rows) && !pods.set_holders(&rows));
        let [a, web] = ["0", "1"].map(|id| allocation_id("r", &[id.to_owned()]));
        pods.observe(observation("a", Some((30, 30))), now);
        let web_pod = |uid: &str, grace| PodObservation { name: "ns/web".into(), ..observation(uid, grace) };
        pods.observe(web_pod("first", Some((30, 30))), now);
        let find = |pods: &TerminatingPods, uid: Option<&str>, allocation: Option<&str>| {
            let uids: Vec<String> = uid.map(str::to_owned).into_iter().collect();
            pods.find_terminating(&uids, allocation).map(|(name, _)| name.to_owned())
        };
        assert_eq!(find(&pods, None, Some(&a)), Some("ns/a".into()));
        assert_eq!(find(&pods, Some("a"), Some(&web)), Some("ns/a".into()), "the cgroup takes precedence");
        assert_eq!(find(&pods, Some("static"), Some(&a)), None, "the client is in the cgroup of an untracked pod");
        assert_eq!(find(&pods, None, None), None);
        assert_eq!(find(&pods, None, Some("00")), None);
        assert_eq!(find(&pods, None, Some(&web)), Some("ns/web".into()));
        // The pod was deleted by force and recreated, so the client may belong to either pod.
        pods.observe(web_pod("second", None), now);
        assert_eq!(find(&pods, None, Some(&web)), None);
        assert_eq!(find(&pods, Some("first"), Some(&web)), Some("ns/web".into()));
    }
}
