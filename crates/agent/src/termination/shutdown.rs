//! A shutdown of the node that the kubelet delays until pods have ended (`shutdownGracePeriod` and
//! its like). It deletes none of them, and what it writes of each comes when that has ended. Before
//! it ends the first it notes in a file of its own that it has begun; whose turn it is then follows
//! from its settings, which are told to the agent. Pure.
use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;
use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;
use serde::Deserialize;

use super::pods::{Deletion, Seen, TerminatingPods};

/// How much longer than all periods together a shutdown may take by its note. One that takes longer
/// was given up.
const SLACK: Duration = Duration::from_secs(60);

/// What pods of this priority, up to the next one named, have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Period {
    /// The lowest priority.
    pub priority: i32,
    /// Seconds until the next ones' turn, and the most that a pod has.
    pub seconds: u32,
}

/// Not `PRIORITY=SECONDS`.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not PRIORITY=SECONDS, of at most a day")]
pub struct NotAPeriod(String);

impl FromStr for Period {
    type Err = NotAPeriod;

    fn from_str(text: &str) -> Result<Self, NotAPeriod> {
        let parse = || {
            let (priority, seconds) = text.split_once('=')?;
            Some(Self { priority: priority.parse().ok()?, seconds: seconds.parse().ok().filter(|&all| all <= 86_400)? })
        };
        parse().ok_or_else(|| NotAPeriod(text.to_owned()))
    }
}

/// The kubelet's settings, the lowest priority first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Periods(Vec<Period>);

impl Periods {
    /// In any order.
    pub fn new(mut periods: Vec<Period>) -> Self {
        periods.sort_unstable();
        Self(periods)
    }

    /// Nothing is known of what the kubelet would do.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// With whom the kubelet ends pods of that priority. Those below the lowest are with these.
    fn group(&self, priority: i32) -> usize {
        self.0.iter().rposition(|period| period.priority <= priority).unwrap_or(0)
    }

    fn lasts(&self, group: usize) -> Duration {
        self.0.get(group).map_or(Duration::ZERO, |period| Duration::from_secs(period.seconds.into()))
    }

    fn total(&self) -> Duration {
        (0..self.0.len()).map(|group| self.lasts(group)).sum()
    }
}

/// A pod of the node that has not ended, with shares or without.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// Its priority.
    pub priority: i32,
    /// The grace of its specification.
    pub grace: Duration,
    /// What the API server says of its end, where it has shares.
    pub seen: Option<Seen>,
}

/// Whose turn it is.
#[derive(Debug)]
struct Course {
    /// When that of each group came, as near as can be said: never later than it did.
    starts: Vec<Instant>,
    /// The last group was seen to have pods.
    occupied: bool,
}

/// The node's pods, as far as their end at a shutdown goes.
#[derive(Debug, Default)]
pub struct Shutdown {
    periods: Periods,
    pods: BTreeMap<String, Pod>,
    /// It is known which there are.
    listed: bool,
    course: Option<Course>,
}

impl Shutdown {
    /// By these settings of the kubelet.
    pub fn new(periods: Periods) -> Self {
        Self { periods, ..Self::default() }
    }

    /// Takes a pod in, and says what is known of its end, by the API server and by the shutdown.
    pub fn pod(&mut self, uid: &str, pod: Pod, now: Instant) -> Option<Seen> {
        let seen = self.word(&pod, now);
        if !self.periods.is_empty() {
            self.pods.insert(uid.to_owned(), pod);
        }
        seen
    }

    /// It has ended, or is gone.
    pub fn ended(&mut self, uid: &str) {
        self.pods.remove(uid);
    }

    /// These are all that there are.
    pub fn only(&mut self, uids: &BTreeSet<String>) {
        self.pods.retain(|uid, _| uids.contains(uid));
        self.listed = true;
    }

    /// Since when the kubelet ends pods; or that it does not.
    pub fn told(&mut self, began: Option<Instant>) {
        self.course = began.map(|began| Course { starts: vec![began], occupied: false });
    }

    /// Tells of the pods whose turn it is; whether that is news, and when to look again.
    pub fn update(&mut self, terminating: &mut TerminatingPods, now: Instant) -> (bool, Option<Instant>) {
        let again = self.advance(now);
        let mut news = false;
        for seen in self.pods.values().filter_map(|pod| self.word(pod, now)) {
            news |= terminating.saw(seen, now);
        }
        (news, again)
    }

    /// Whether the kubelet ends pods.
    pub fn is_on(&self) -> bool {
        self.course.is_some()
    }

    /// Goes on to the group whose turn it is; when the next one's comes at the latest.
    fn advance(&mut self, now: Instant) -> Option<Instant> {
        let Self { periods, pods, listed, course } = self;
        let course = course.as_mut().filter(|_| *listed)?;
        loop {
            let group = course.starts.len().checked_sub(1)?;
            let start = *course.starts.last()?;
            if group + 1 >= periods.0.len() {
                return None;
            }
            let over = start + periods.lasts(group);
            if pods.values().any(|pod| periods.group(pod.priority) == group) {
                course.occupied = true;
                if now < over {
                    return Some(over);
                }
                course.starts.push(over);
            } else {
                // The kubelet waits for nobody where there was none. Where the last has just ended
                // it may still unmount its volumes.
                course.starts.push(if course.occupied { now.min(over) } else { start });
            }
            course.occupied = false;
        }
    }

    fn word(&self, pod: &Pod, now: Instant) -> Option<Seen> {
        let seen = pod.seen.clone()?;
        let turn = || {
            let group = self.periods.group(pod.priority);
            let start = *self.course.as_ref().filter(|_| self.listed)?.starts.get(group)?;
            let grace = pod.grace.min(self.periods.lasts(group));
            Some(Deletion { grace, left: (start + grace).saturating_duration_since(now) })
        };
        let deletion = match (seen.deletion, turn()) {
            (Some(one), Some(other)) => {
                Some(Deletion { grace: one.grace.min(other.grace), left: one.left.min(other.left) })
            }
            (one, other) => one.or(other),
        };
        Some(Seen { deletion, ..seen })
    }
}

/// The kubelet's note.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Note {
    start_time: Timestamp,
    /// In the year 1 until it is over.
    end_time: Timestamp,
}

/// For how long the kubelet has been terminating pods, by its note. One of an earlier boot says
/// nothing.
pub fn lasting(note: &[u8], now: Timestamp, up: Duration, periods: &Periods) -> Option<Duration> {
    let Note { start_time, end_time } = serde_json::from_slice(note).ok()?;
    let elapsed = Duration::try_from(now.duration_since(start_time)).ok()?;
    (end_time < start_time && elapsed < up && elapsed < periods.total() + SLACK).then_some(elapsed)
}

/// A note that says that the kubelet ends pods, and since when.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Begun {
    note: Vec<u8>,
    /// Since when.
    pub(crate) since: Instant,
}

impl Begun {
    /// What a note says that is read now; `before` is what the one before said. One that was
    /// believed is believed on until it is another, or too old: the time of day may have been set
    /// meanwhile, and has no word in it.
    pub(crate) fn read(
        note: Vec<u8>,
        before: Option<Self>,
        (now, wall): (Instant, Timestamp),
        up: Duration,
        periods: &Periods,
    ) -> Option<Self> {
        match before {
            Some(before) if before.note == note => {
                (now.saturating_duration_since(before.since) < periods.total() + SLACK).then_some(before)
            }
            _ => {
                let since = lasting(&note, wall, up, periods).and_then(|elapsed| now.checked_sub(elapsed))?;
                Some(Self { note, since })
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::pods::tests::{secs, seen};
    use super::*;

    /// As the chart's value of the same name would be: batch, the usual, and what is critical.
    pub(crate) fn periods() -> Periods {
        Periods::new(["2000000000=10", "0=20", "-5=60"].map(|text| text.parse().unwrap()).to_vec())
    }

    fn pod(uid: &str, priority: i32, grace: u64, shares: bool) -> Pod {
        Pod { priority, grace: secs(grace), seen: shares.then(|| seen(uid, None)) }
    }

    /// Until when those leave that do, in seconds after `start`.
    fn ends(terminating: &TerminatingPods, uids: [&str; 3], start: Instant) -> [Option<u64>; 3] {
        uids.map(|uid| Some((terminating.leaving(&[uid.to_owned()], None)?.1.end - start).as_secs()))
    }

    #[test]
    fn a_note_that_was_believed_is_believed_on_though_the_time_of_day_is_set() {
        let (periods, start, up) = (periods(), Instant::now(), secs(86_400));
        let noon: Timestamp = "2026-11-22T12:00:00Z".parse().unwrap();
        let note = br#"{"startTime":"2026-11-22T11:59:55Z","endTime":"0001-01-01T00:00:00Z"}"#.to_vec();
        let read = |note: &[u8], before: Option<&Begun>, after: u64, wall: Timestamp| {
            Begun::read(note.to_vec(), before.cloned(), (start + secs(after), wall), up, &periods)
        };
        let hour = secs(3_600);
        for set in [noon + hour, noon - hour] {
            assert_eq!(read(&note, None, 1, set), None, "as it would be without the first");
            let first = read(&note, None, 0, noon);
            let begun = first.clone().unwrap();
            assert_eq!(begun.since, start.checked_sub(secs(5)).unwrap());
            assert_eq!(read(&note, Some(&begun), 1, set), first);
            let over = br#"{"startTime":"2026-11-22T11:59:55Z","endTime":"2026-11-22T12:00:01Z"}"#;
            assert_eq!(read(over, Some(&begun), 2, set), None);
            assert_eq!(read(b"", Some(&begun), 2, set), None);
            assert_eq!(read(&note, Some(&begun), (periods.total() + SLACK).as_secs(), set), None, "for ever");
        }
    }

    #[test]
    fn groups_are_those_of_the_kubelet() {
        let periods = periods();
        for (priority, group) in [(-9, 0), (-5, 0), (-1, 0), (0, 1), (7, 1), (2_000_000_000, 2), (i32::MAX, 2)] {
            assert_eq!(periods.group(priority), group, "{priority}");
        }
        assert_eq!(periods.total(), secs(90));
        for bad in ["", "0", "=", "0=", "a=1", "0=-1", "0=86401", "2147483648=1"] {
            assert!(bad.parse::<Period>().is_err(), "{bad}");
        }
    }

    #[test]
    fn pods_leave_when_it_is_the_turn_of_their_priority_with_the_smaller_grace() {
        let start = Instant::now();
        let (mut shutdown, mut terminating) = (Shutdown::new(periods()), TerminatingPods::default());
        let uids = ["low", "usual", "critical"];
        for (uid, priority, grace) in [("low", -5, 30), ("usual", 0, 30), ("critical", 2_000_000_000, 3)] {
            let seen = shutdown.pod(uid, pod(uid, priority, grace, true), start).unwrap();
            terminating.saw(seen, start);
        }
        shutdown.pod("other", pod("other", -9, 600, false), start);
        shutdown.only(&[&uids[..], &["other"]].concat().iter().map(|&uid| uid.to_owned()).collect());
        assert!(!terminating.any_leaves());
        shutdown.told(Some(start));
        assert_eq!(shutdown.update(&mut terminating, start), (true, Some(start + secs(60))));
        assert_eq!(ends(&terminating, uids, start), [Some(30), None, None], "the grace of its own is the smaller");
        assert_eq!(shutdown.update(&mut terminating, start + secs(1)), (false, Some(start + secs(60))), "no news");
        // One has ended; another of its group, without shares, has not.
        shutdown.ended("low");
        terminating.ended("low");
        assert_eq!(shutdown.update(&mut terminating, start + secs(2)), (false, Some(start + secs(60))));
        shutdown.ended("other");
        assert_eq!(shutdown.update(&mut terminating, start + secs(5)), (true, Some(start + secs(25))));
        assert_eq!(ends(&terminating, uids, start), [None, Some(25), None], "the group's is the smaller");
        // A change of its status does not begin it anew.
        let seen = shutdown.pod("usual", pod("usual", 0, 30, true), start + secs(9)).unwrap();
        assert!(!terminating.saw(seen, start + secs(9)));
        assert_eq!(ends(&terminating, uids, start), [None, Some(25), None]);
        // It does not end in its time: the next ones' comes all the same.
        assert_eq!(shutdown.update(&mut terminating, start + secs(25)), (true, None));
        assert_eq!(ends(&terminating, uids, start), [None, Some(25), Some(28)]);
    }

    #[test]
    fn groups_without_pods_take_no_time_and_deletions_count_besides() {
        let start = Instant::now();
        let (mut shutdown, mut terminating) = (Shutdown::new(periods()), TerminatingPods::default());
        let usual = || pod("usual", 0, 30, true);
        shutdown.told(Some(start));
        // It is not known yet whom the kubelet ends before.
        assert_eq!(shutdown.pod("usual", usual(), start).unwrap().deletion, None);
        assert_eq!(shutdown.update(&mut terminating, start), (true, None));
        assert!(!terminating.any_leaves());
        shutdown.only(&BTreeSet::from(["usual".to_owned()]));
        assert_eq!(shutdown.update(&mut terminating, start), (true, Some(start + secs(20))));
        assert_eq!(ends(&terminating, ["usual", "", ""], start), [Some(20), None, None]);
        let deleted = Pod { seen: Some(seen("usual", Some((5, 4)))), ..usual() };
        let seen = shutdown.pod("usual", deleted, start + secs(1)).unwrap();
        assert_eq!(seen.deletion, Some(Deletion { grace: secs(5), left: secs(4) }), "the shorter one counts");
        // Given up: it stays, as far as is known.
        shutdown.pod("usual", usual(), start);
        shutdown.told(None);
        shutdown.update(&mut terminating, start + secs(2));
        assert!(!terminating.any_leaves() && !shutdown.is_on());
    }

    #[test]
    fn without_settings_nothing_is_kept_or_concluded() {
        let now = Instant::now();
        let mut shutdown = Shutdown::default();
        assert_eq!(shutdown.pod("a", pod("a", 0, 30, true), now), Some(seen("a", None)));
        assert_eq!((shutdown.pods.len(), shutdown.is_on()), (0, false));
    }

    #[test]
    fn a_note_counts_while_it_is_of_this_boot_and_not_over() {
        const NEVER: &str = "0001-01-01T00:00:00Z";
        let now: Timestamp = "2027-01-15T08:00:10Z".parse().unwrap();
        let note = |start: &str, end: &str| format!(r#"{{"startTime":"{start}","endTime":"{end}"}}"#);
        let lasting = |note: &str, up| lasting(note.as_bytes(), now, secs(up), &periods()).map(|lasts| lasts.as_secs());
        let begun = note("2027-01-15T09:00:00.000000001+01:00", NEVER);
        assert_eq!(lasting(&begun, 3600), Some(9));
        assert_eq!(lasting(&begun, 5), None, "of an earlier boot");
        assert_eq!(lasting(&note("2027-01-15T07:57:41Z", NEVER), 3600), Some(149));
        assert_eq!(lasting(&note("2027-01-15T07:57:39Z", NEVER), 3600), None, "given up long ago");
        assert_eq!(lasting(&note("2027-01-15T08:00:00Z", "2027-01-15T08:00:05Z"), 3600), None, "over");
        assert_eq!(lasting(&note("2027-01-15T08:00:11Z", NEVER), 3600), None, "not yet");
        for bad in ["", "{}", "null", "[]", r#"{"startTime":"now","endTime":"x"}"#, &note(NEVER, NEVER)] {
            assert_eq!(lasting(bad, 3600), None, "{bad}");
        }
    }
}
