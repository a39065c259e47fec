//! Predicts when the kubelet terminates pods during a graceful shutdown of the node
//! (`shutdownGracePeriod` and related settings). Pure.
//!
//! During a shutdown, the kubelet deletes no pods in the API server, and updates the status of each
//! pod only after the pod has ended. Before the kubelet terminates the first pod, it records the
//! start of the shutdown in a file. The settings of the kubelet determine when it terminates each
//! pod. The agent receives the kubelet's settings as arguments.
use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;
use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;
use serde::Deserialize;

use super::pods::{Deletion, PodObservation, TerminatingPods};

/// Maximum time that a shutdown takes beyond the sum of all periods. After this time, the agent
/// assumes that the shutdown has ended.
const MAX_SHUTDOWN_OVERRUN: Duration = Duration::from_secs(60);

/// Time that the kubelet waits for one group of pods during a shutdown. The group contains the pods
/// with a priority of at least `priority`, but below the priority of the next group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ShutdownPeriod {
    /// The lowest priority of the pods in this group.
    pub priority: i32,
    /// Maximum number of seconds until the kubelet terminates the next group. This number is also
    /// the maximum grace period of the pods in this group.
    pub seconds: u32,
}

/// Error for a text that is not `PRIORITY=SECONDS`.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not PRIORITY=SECONDS with at most 86400 seconds")]
pub struct InvalidPeriod(String);

impl FromStr for ShutdownPeriod {
    type Err = InvalidPeriod;

    fn from_str(text: &str) -> Result<Self, InvalidPeriod> {
        let parse = || {
            let (priority, seconds) = text.split_once('=')?;
            Some(Self {
                priority: priority.parse().ok()?,
                seconds: seconds.parse().ok().filter(|&seconds| seconds <= 86_400)?,
            })
        };
        parse().ok_or_else(|| InvalidPeriod(text.to_owned()))
    }
}

/// The kubelet's periods for a graceful shutdown, lowest priority first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShutdownPeriods(Vec<ShutdownPeriod>);

impl ShutdownPeriods {
    /// Creates the settings from periods in any order.
    pub fn new(mut periods: Vec<ShutdownPeriod>) -> Self {
        periods.sort_unstable();
        Self(periods)
    }

    /// Returns whether the kubelet's settings are unknown.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the index of the group in which the kubelet terminates pods of this priority. Pods
    /// below the lowest priority belong to the first group.
    fn group_index(&self, priority: i32) -> usize {
        self.0.iter().rposition(|period| period.priority <= priority).unwrap_or(0)
    }

    /// Returns the length of the period in which a group of pods must terminate.
    fn group_duration(&self, group: usize) -> Duration {
        self.0.get(group).map_or(Duration::ZERO, |period| Duration::from_secs(period.seconds.into()))
    }

    /// Returns the sum of the periods of all groups.
    fn total_duration(&self) -> Duration {
        (0..self.0.len()).map(|group| self.group_duration(group)).sum()
    }
}

/// An unfinished pod of the node, with or without shares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShutdownPod {
    /// Priority of the pod.
    pub priority: i32,
    /// Grace period in the pod's spec.
    pub grace: Duration,
    /// The API server's report about the pod's termination, if the pod has shares.
    pub observation: Option<PodObservation>,
}

/// Progress of a shutdown.
#[derive(Debug)]
struct ShutdownProgress {
    /// Estimated start of each group that has started. The estimate is never later than the real
    /// start.
    starts: Vec<Instant>,
    /// Whether the last group in `starts` had pods.
    had_pods: bool,
}

/// The node's pods, and the progress of a shutdown of the node.
#[derive(Debug, Default)]
pub struct Shutdown {
    periods: ShutdownPeriods,
    pods: BTreeMap<String, ShutdownPod>,
    /// Whether `pods` is complete.
    listed: bool,
    progress: Option<ShutdownProgress>,
}

impl Shutdown {
    /// Creates a state without pods for a kubelet with these settings.
    pub fn new(periods: ShutdownPeriods) -> Self {
        Self { periods, ..Self::default() }
    }

    /// Adds or updates a pod. Returns the observation of the pod. The observation contains a
    /// deletion if the shutdown terminates the pod now.
    pub fn observe(&mut self, uid: &str, pod: ShutdownPod, now: Instant) -> Option<PodObservation> {
        let observation = self.observation(&pod, now);
        if !self.periods.is_empty() {
            self.pods.insert(uid.to_owned(), pod);
        }
        observation
    }

    /// Removes a pod that has finished or was deleted.
    pub fn remove(&mut self, uid: &str) {
        self.pods.remove(uid);
    }

    /// Removes all pods that are not in `uids`. The list `uids` must be complete.
    pub fn retain_listed(&mut self, uids: &BTreeSet<String>) {
        self.pods.retain(|uid, _| uids.contains(uid));
        self.listed = true;
    }

    /// Sets the start of the shutdown. `None` means that the node is not shutting down.
    pub fn set_start(&mut self, start: Option<Instant>) {
        self.progress = start.map(|start| ShutdownProgress { starts: vec![start], had_pods: false });
    }

    /// Updates `terminating` with the pods that the kubelet terminates now. Returns whether
    /// `terminating` changed, and the time of the next update.
    pub fn update(&mut self, terminating: &mut TerminatingPods, now: Instant) -> (bool, Option<Instant>) {
        let next_group = self.advance_group(now);
        let mut changed = false;
        for observation in self.pods.values().filter_map(|pod| self.observation(pod, now)) {
            changed |= terminating.observe(observation, now);
        }
        (changed, next_group)
    }

    /// Returns whether the node is shutting down.
    pub fn is_in_progress(&self) -> bool {
        self.progress.is_some()
    }

    /// Advances to the group that the kubelet terminates now. Returns the latest start of the next
    /// group. Returns `None` if the node is not shutting down, the pods are unknown, or no group
    /// follows.
    fn advance_group(&mut self, now: Instant) -> Option<Instant> {
        let Self { periods, pods, listed, progress } = self;
        let progress = progress.as_mut().filter(|_| *listed)?;
        loop {
            let group = progress.starts.len().checked_sub(1)?;
            let start = *progress.starts.last()?;
            if group + 1 >= periods.0.len() {
                return None;
            }
            let end = start + periods.group_duration(group);
            if pods.values().any(|pod| periods.group_index(pod.priority) == group) {
                progress.had_pods = true;
                if now < end {
                    return Some(end);
                }
                progress.starts.push(end);
            } else {
                // The kubelet does not wait for a group without pods. If the last pod of the group
                // has just ended, the kubelet may still wait to unmount the pod's volumes.
                progress.starts.push(if progress.had_pods { now.min(end) } else { start });
            }
            progress.had_pods = false;
        }
    }

    /// Returns the pod's observation, with a deletion if the shutdown terminates the pod. If the
    /// pod is also being deleted, the shorter grace period and the shorter remaining time apply.
    fn observation(&self, pod: &ShutdownPod, now: Instant) -> Option<PodObservation> {
        let observation = pod.observation.clone()?;
        let shutdown = || {
            let group = self.periods.group_index(pod.priority);
            let start = *self.progress.as_ref().filter(|_| self.listed)?.starts.get(group)?;
            let grace = pod.grace.min(self.periods.group_duration(group));
            Some(Deletion { grace, left: (start + grace).saturating_duration_since(now) })
        };
        let deletion = match (observation.deletion, shutdown()) {
            (Some(one), Some(other)) => {
                Some(Deletion { grace: one.grace.min(other.grace), left: one.left.min(other.left) })
            }
            (one, other) => one.or(other),
        };
        Some(PodObservation { deletion, ..observation })
    }
}

/// The kubelet's record of a shutdown.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ShutdownRecord {
    start_time: Timestamp,
    /// While the shutdown has not ended, this is a time in the year 1.
    end_time: Timestamp,
}

/// Returns the time since the kubelet started to terminate pods, according to its record. `up` is
/// the time since boot. Returns `None` if the record is malformed, too old or from an earlier boot,
/// or if the shutdown has ended.
pub fn elapsed_in_shutdown(record: &[u8], now: Timestamp, up: Duration, periods: &ShutdownPeriods) -> Option<Duration> {
    let ShutdownRecord { start_time, end_time } = serde_json::from_slice(record).ok()?;
    let elapsed = Duration::try_from(now.duration_since(start_time)).ok()?;
    (end_time < start_time && elapsed < up && elapsed < periods.total_duration() + MAX_SHUTDOWN_OVERRUN)
        .then_some(elapsed)
}

/// The start of a shutdown in progress, and the record that contains it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ShutdownStart {
    record: Vec<u8>,
    /// Time at which the shutdown started.
    pub(crate) at: Instant,
}

impl ShutdownStart {
    /// Interprets the kubelet's record. The tuple is the time of this read on both clocks.
    /// `previous` is the result of the previous read.
    ///
    /// The start of an unchanged record remains the same until the record is too old, because the
    /// wall clock may have been changed between two reads.
    pub(crate) fn interpret(
        record: Vec<u8>,
        previous: Option<Self>,
        (now, wall): (Instant, Timestamp),
        up: Duration,
        periods: &ShutdownPeriods,
    ) -> Option<Self> {
        match previous {
            Some(previous) if previous.record == record => {
                let age = now.saturating_duration_since(previous.at);
                (age < periods.total_duration() + MAX_SHUTDOWN_OVERRUN).then_some(previous)
            }
            _ => {
                let at =
                    elapsed_in_shutdown(&record, wall, up, periods).and_then(|elapsed| now.checked_sub(elapsed))?;
                Some(Self { record, at })
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::pods::tests::{observation, secs};
    use super::*;

    /// Returns periods for batch, ordinary and critical pods.
    pub(crate) fn periods() -> ShutdownPeriods {
        ShutdownPeriods::new(["2000000000=10", "0=20", "-5=60"].map(|text| text.parse().unwrap()).to_vec())
    }

    fn pod(uid: &str, priority: i32, grace: u64, shares: bool) -> ShutdownPod {
        ShutdownPod { priority, grace: secs(grace), observation: shares.then(|| observation(uid, None)) }
    }

    /// Returns the end of each pod's termination in seconds after `start`, or `None` for a pod that
    /// is not terminating.
    fn seconds_until_end(terminating: &TerminatingPods, uids: [&str; 3], start: Instant) -> [Option<u64>; 3] {
        uids.map(|uid| Some((terminating.find_terminating(&[uid.to_owned()], None)?.1.end - start).as_secs()))
    }

    #[test]
    fn a_record_remains_valid_when_the_wall_clock_is_changed() {
        let (periods, start, up) = (periods(), Instant::now(), secs(86_400));
        let noon: Timestamp = "2026-11-22T12:00:00Z".parse().unwrap();
        let record = br#"{"startTime":"2026-11-22T11:59:55Z","endTime":"0001-01-01T00:00:00Z"}"#.to_vec();
        let read = |record: &[u8], previous: Option<&ShutdownStart>, after: u64, wall: Timestamp| {
            ShutdownStart::interpret(record.to_vec(), previous.cloned(), (start + secs(after), wall), up, &periods)
        };
        let hour = secs(3_600);
        for set in [noon + hour, noon - hour] {
            assert_eq!(read(&record, None, 1, set), None, "without an earlier read");
            let first = read(&record, None, 0, noon);
            let start_of_first = first.clone().unwrap();
            assert_eq!(start_of_first.at, start.checked_sub(secs(5)).unwrap());
            assert_eq!(read(&record, Some(&start_of_first), 1, set), first);
            let ended = br#"{"startTime":"2026-11-22T11:59:55Z","endTime":"2026-11-22T12:00:01Z"}"#;
            assert_eq!(read(ended, Some(&start_of_first), 2, set), None);
            assert_eq!(read(b"", Some(&start_of_first), 2, set), None);
            assert_eq!(
                read(&record, Some(&start_of_first), (periods.total_duration() + MAX_SHUTDOWN_OVERRUN).as_secs(), set),
                None,
                "too old"
            );
        }
    }

    #[test]
    fn pods_are_grouped_by_priority_as_in_the_kubelet() {
        let periods = periods();
        for (priority, group) in [(-9, 0), (-5, 0), (-1, 0), (0, 1), (7, 1), (2_000_000_000, 2), (i32::MAX, 2)] {
            assert_eq!(periods.group_index(priority), group, "{priority}");
        }
        assert_eq!(periods.total_duration(), secs(90));
        for bad in ["", "0", "=", "0=", "a=1", "0=-1", "0=86401", "2147483648=1"] {
            assert!(bad.parse::<ShutdownPeriod>().is_err(), "{bad}");
        }
    }

    #[test]
    fn pods_terminate_with_their_group_and_with_the_shorter_grace_period() {
        let start = Instant::now();
        let (mut shutdown, mut terminating) = (Shutdown::new(periods()), TerminatingPods::default());
        let uids = ["low", "usual", "critical"];
        for (uid, priority, grace) in [("low", -5, 30), ("usual", 0, 30), ("critical", 2_000_000_000, 3)] {
            let observation = shutdown.observe(uid, pod(uid, priority, grace, true), start).unwrap();
            terminating.observe(observation, start);
        }
        shutdown.observe("other", pod("other", -9, 600, false), start);
        shutdown.retain_listed(&[&uids[..], &["other"]].concat().iter().map(|&uid| uid.to_owned()).collect());
        assert!(!terminating.has_terminating_pods());
        shutdown.set_start(Some(start));
        assert_eq!(shutdown.update(&mut terminating, start), (true, Some(start + secs(60))));
        assert_eq!(
            seconds_until_end(&terminating, uids, start),
            [Some(30), None, None],
            "the pod's grace period is shorter than the group's period"
        );
        assert_eq!(
            shutdown.update(&mut terminating, start + secs(1)),
            (false, Some(start + secs(60))),
            "nothing changes"
        );
        // One pod has finished. A pod without shares in the same group has not finished.
        shutdown.remove("low");
        terminating.remove_finished("low");
        assert_eq!(shutdown.update(&mut terminating, start + secs(2)), (false, Some(start + secs(60))));
        shutdown.remove("other");
        assert_eq!(shutdown.update(&mut terminating, start + secs(5)), (true, Some(start + secs(25))));
        assert_eq!(
            seconds_until_end(&terminating, uids, start),
            [None, Some(25), None],
            "the group's period is shorter than the pod's grace period"
        );
        // A change of the pod's status does not restart its grace period.
        let observation = shutdown.observe("usual", pod("usual", 0, 30, true), start + secs(9)).unwrap();
        assert!(!terminating.observe(observation, start + secs(9)));
        assert_eq!(seconds_until_end(&terminating, uids, start), [None, Some(25), None]);
        // A pod that does not end in time does not delay the next group.
        assert_eq!(shutdown.update(&mut terminating, start + secs(25)), (true, None));
        assert_eq!(seconds_until_end(&terminating, uids, start), [None, Some(25), Some(28)]);
    }

    #[test]
    fn groups_without_pods_take_no_time_and_a_deletion_can_shorten_the_grace_period() {
        let start = Instant::now();
        let (mut shutdown, mut terminating) = (Shutdown::new(periods()), TerminatingPods::default());
        let usual = || pod("usual", 0, 30, true);
        shutdown.set_start(Some(start));
        // Without a complete list of pods, earlier groups may contain pods.
        assert_eq!(shutdown.observe("usual", usual(), start).unwrap().deletion, None);
        assert_eq!(shutdown.update(&mut terminating, start), (true, None));
        assert!(!terminating.has_terminating_pods());
        shutdown.retain_listed(&BTreeSet::from(["usual".to_owned()]));
        assert_eq!(shutdown.update(&mut terminating, start), (true, Some(start + secs(20))));
        assert_eq!(seconds_until_end(&terminating, ["usual", "", ""], start), [Some(20), None, None]);
        let deleted = ShutdownPod { observation: Some(observation("usual", Some((5, 4)))), ..usual() };
        let observation = shutdown.observe("usual", deleted, start + secs(1)).unwrap();
        assert_eq!(observation.deletion, Some(Deletion { grace: secs(5), left: secs(4) }), "the shorter one counts");
        // The shutdown was cancelled, so the pod no longer terminates.
        shutdown.observe("usual", usual(), start);
        shutdown.set_start(None);
        shutdown.update(&mut terminating, start + secs(2));
        assert!(!terminating.has_terminating_pods() && !shutdown.is_in_progress());
    }

    #[test]
    fn without_the_kubelets_settings_no_pods_are_tracked() {
        let now = Instant::now();
        let mut shutdown = Shutdown::default();
        assert_eq!(shutdown.observe("a", pod("a", 0, 30, true), now), Some(observation("a", None)));
        assert_eq!((shutdown.pods.len(), shutdown.is_in_progress()), (0, false));
    }

    #[test]
    fn a_shutdown_record_is_valid_only_in_its_boot_and_until_the_shutdown_ends() {
        const ZERO_TIME: &str = "0001-01-01T00:00:00Z";
        let now: Timestamp = "2027-01-15T08:00:10Z".parse().unwrap();
        let record = |start: &str, end: &str| format!(r#"{{"startTime":"{start}","endTime":"{end}"}}"#);
        let elapsed = |record: &str, up| {
            elapsed_in_shutdown(record.as_bytes(), now, secs(up), &periods()).map(|time| time.as_secs())
        };
        let running = record("2027-01-15T09:00:00.000000001+01:00", ZERO_TIME);
        assert_eq!(elapsed(&running, 3600), Some(9));
        assert_eq!(elapsed(&running, 5), None, "of an earlier boot");
        assert_eq!(elapsed(&record("2027-01-15T07:57:41Z", ZERO_TIME), 3600), Some(149));
        assert_eq!(elapsed(&record("2027-01-15T07:57:39Z", ZERO_TIME), 3600), None, "given up");
        assert_eq!(elapsed(&record("2027-01-15T08:00:00Z", "2027-01-15T08:00:05Z"), 3600), None, "ended");
        assert_eq!(elapsed(&record("2027-01-15T08:00:11Z", ZERO_TIME), 3600), None, "in the future");
        for bad in ["", "{}", "null", "[]", r#"{"startTime":"now","endTime":"x"}"#, &record(ZERO_TIME, ZERO_TIME)] {
            assert_eq!(elapsed(bad, 3600), None, "{bad}");
        }
    }
}
