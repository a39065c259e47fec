//! Which pods leave the node, and until when. Pure: the time is an argument.
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use cleave_kubelet::HeldDevices;

use crate::allocation::allocation_id;

/// How long a pod that the API server does not have any more is remembered. One that was deleted by
/// force may run on: the kubelet gives it the grace of its spec all the same.
const REMEMBERED: Duration = Duration::from_secs(300);
/// A `preStop` sleep up to this long is no time for a program to finish: it is what gives the agent
/// the time to act.
const NO_DRAIN: Duration = Duration::from_secs(2);
/// The longest time before the end of the grace that clients are ended in: `terminate_client` takes
/// 3 to 10 ms for each, a GPU has 48 at most, and one that fails is tried again.
const MARGIN: Duration = Duration::from_secs(2);
/// Of a short grace that margin would leave nothing: so large a part of it is enough then.
const MARGIN_PART: u32 = 4;

/// No pod is waited for longer. People write graces and sleeps of any 64-bit number of seconds,
/// which no clock can be told to wait for.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// What the API server says of a pod with shares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// Its UID.
    pub uid: String,
    /// `namespace/name`.
    pub name: String,
    /// What its `preStop` hooks are known to wait for, before its programs are sent SIGTERM: the
    /// shortest of its containers with shares.
    pub sleep: Duration,
    /// That it is to end.
    pub deletion: Option<Deletion>,
}

/// A deletion with a grace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deletion {
    /// The grace.
    pub grace: Duration,
    /// What is left of it by the API server's clock, which may not be this node's.
    pub left: Duration,
}

/// A pod that leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leaving {
    /// When that was first seen.
    pub since: Instant,
    /// When the kubelet kills what is left of it, as near as can be said.
    pub end: Instant,
    /// When clients have to be ended that a SIGTERM ends, and when the others.
    due: (Instant, Instant),
    grace: Duration,
}

impl Leaving {
    fn new(since: Instant, end: Instant, grace: Duration, sleep: Duration) -> Self {
        let margin = (grace / MARGIN_PART).min(MARGIN);
        let last = end.checked_sub(margin).unwrap_or(since).max(since);
        let drained = sleep.checked_sub(NO_DRAIN).map_or(since, |drain| since + drain);
        Self { since, end, due: (drained.min(last), last), grace }
    }

    /// The same with an earlier end: nothing is due later by that, although of a shorter grace the
    /// margin is smaller.
    fn shortened(self, end: Instant, grace: Duration) -> Self {
        let Self { since, end: before, due: (ends, survives), .. } = self;
        let Self { due: (_, last), end, .. } = Self::new(since, before.min(end), grace, Duration::ZERO);
        Self { since, end, due: (ends.min(last), survives.min(last)), grace }
    }

    /// When a client has to be ended: one that a SIGTERM does not end has its grace, but for a
    /// margin; one that it ends has until the kubelet sends it.
    pub fn due(&self, survives: bool) -> Instant {
        if survives { self.due.1 } else { self.due.0 }
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Pod {
    name: String,
    leaving: Option<Leaving>,
    /// When the API server was found not to have it any more.
    gone: Option<Instant>,
}

/// The node's pods with shares, as far as their end goes.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct TerminatingPods {
    by_uid: BTreeMap<String, Pod>,
    /// `namespace/name` by allocation, as the kubelet lists them.
    holders: BTreeMap<String, String>,
}

impl TerminatingPods {
    /// The API server's word on a pod. Whether that changes anything.
    pub fn saw(&mut self, seen: Seen, now: Instant) -> bool {
        self.prune(now);
        let Seen { uid, name, sleep, deletion } = seen;
        let sleep = sleep.min(LONGEST);
        let deletion = deletion.map(|deletion| Deletion { grace: deletion.grace.min(LONGEST), ..deletion });
        let before = self.by_uid.get(&uid);
        if before.is_some_and(|pod| pod.gone.is_some()) {
            return false;
        }
        let was = before.and_then(|pod| pod.leaving);
        let leaving = match (deletion, was) {
            (None, _) => None,
            // A grace may be cut short, and never grows.
            (Some(Deletion { grace, .. }), Some(was)) if grace < was.grace => Some(was.shortened(now + grace, grace)),
            (Some(_), Some(was)) => Some(was),
            (Some(Deletion { grace, left }), None) => {
                // Of a pod that was seen to stay, the deletion is new, whatever the clocks say; of
                // another it may be almost over.
                let left = if before.is_some() { grace } else { left.min(grace) };
                Some(Leaving::new(now, now + left, grace, sleep))
            }
        };
        let pod = Pod { name, leaving, gone: None };
        let changed = before != Some(&pod);
        self.by_uid.insert(uid, pod);
        changed
    }

    /// The API server does not have it any more: deleted in order, which leaves nothing to end, or
    /// by force.
    pub fn gone(&mut self, uid: &str, now: Instant) -> bool {
        self.prune(now);
        let Some(pod) = self.by_uid.get_mut(uid).filter(|pod| pod.gone.is_none()) else { return false };
        let unforeseen = || Leaving::new(now, now, Duration::ZERO, Duration::ZERO);
        pod.leaving = Some(pod.leaving.map_or_else(unforeseen, |was| was.shortened(now, Duration::ZERO)));
        pod.gone = Some(now);
        true
    }

    /// These are all that there are.
    pub fn only(&mut self, uids: &BTreeSet<String>, now: Instant) -> bool {
        let missing: Vec<String> = self.by_uid.keys().filter(|uid| !uids.contains(*uid)).cloned().collect();
        missing.iter().filter(|uid| self.gone(uid, now)).count() > 0
    }

    /// It has ended: nothing of it runs.
    pub fn ended(&mut self, uid: &str) -> bool {
        self.by_uid.remove(uid).is_some()
    }

    /// The kubelet's list of who holds what.
    pub fn held(&mut self, rows: &[HeldDevices]) -> bool {
        let of_row =
            |row: &HeldDevices| (allocation_id(&row.resource, &row.ids), format!("{}/{}", row.namespace, row.pod));
        let holders = rows.iter().map(of_row).collect();
        let changed = self.holders != holders;
        self.holders = holders;
        changed
    }

    /// Whether any pod leaves: else nothing need be looked at.
    pub fn any_leaves(&self) -> bool {
        self.by_uid.values().any(|pod| pod.leaving.is_some())
    }

    /// The pod of a client, with its name, if that leaves. By the UIDs of pods that its control
    /// group is below, the outermost first; where there are none, by who holds the allocation that
    /// the client came by, unless another pod of that name stays.
    pub fn leaving(&self, uids: &[String], allocation: Option<&str>) -> Option<(&str, Leaving)> {
        if !uids.is_empty() {
            // Of one that is not known, a static pod's or one that has just come, nothing is
            // concluded from its name.
            let pod = uids.iter().find_map(|uid| self.by_uid.get(uid))?;
            return Some((&pod.name, pod.leaving?));
        }
        let name = self.holders.get(allocation?)?;
        let mut named = self.by_uid.values().filter(|pod| pod.name == *name);
        let first = named.next()?;
        let last = named.try_fold(first.leaving?, |latest, pod| {
            let leaving = pod.leaving?;
            Some(if leaving.end > latest.end { leaving } else { latest })
        })?;
        Some((&first.name, last))
    }

    fn prune(&mut self, now: Instant) {
        let old = |gone: Instant| now.saturating_duration_since(gone) >= REMEMBERED;
        self.by_uid.retain(|_, pod| !pod.gone.is_some_and(old));
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

    pub(in crate::termination) fn seen(uid: &str, grace: Option<(u64, u64)>) -> Seen {
        let deletion = grace.map(|(grace, left)| Deletion { grace: secs(grace), left: secs(left) });
        Seen { uid: uid.into(), name: format!("ns/{uid}"), sleep: secs(1), deletion }
    }

    /// Since when and until when a pod leaves, in milliseconds after `start`.
    fn span(pods: &TerminatingPods, uid: &str, start: Instant) -> Option<(u128, u128)> {
        let (_, Leaving { since, end, .. }) = pods.leaving(&[uid.to_owned()], None)?;
        Some(((since - start).as_millis(), (end - start).as_millis()))
    }

    #[test]
    fn a_deletion_that_was_seen_to_come_has_its_whole_grace_and_another_what_is_left() {
        let now = Instant::now();
        let mut pods = TerminatingPods::default();
        assert!(pods.saw(seen("a", None), now) && !pods.saw(seen("a", None), now));
        assert!(!pods.any_leaves());
        // By the API server's clock it is half over, or has not begun: this node saw it begin.
        assert!(pods.saw(seen("a", Some((30, 15))), now + secs(1)));
        assert_eq!(span(&pods, "a", now), Some((1000, 31_000)));
        assert!(pods.any_leaves());
        assert!(!pods.saw(seen("a", Some((30, 3))), now + secs(9)), "its status has changed, no more");
        pods.saw(seen("b", Some((30, 15))), now);
        assert_eq!(span(&pods, "b", now), Some((0, 15_000)));
        pods.saw(seen("c", Some((30, 300))), now);
        assert_eq!(span(&pods, "c", now), Some((0, 30_000)), "a clock that is late grants nothing");
    }

    #[test]
    fn a_grace_and_a_sleep_longer_than_any_clock_are_long() {
        let now = Instant::now();
        let mut pods = TerminatingPods::default();
        let forever = Duration::from_secs(u64::MAX);
        let longest = LONGEST.as_millis();
        for (uid, before) in [("a", true), ("b", false)] {
            if before {
                pods.saw(Seen { sleep: forever, ..seen(uid, None) }, now);
            }
            let deletion = Some(Deletion { grace: forever, left: forever });
            pods.saw(Seen { sleep: forever, deletion, ..seen(uid, None) }, now);
            assert_eq!(span(&pods, uid, now), Some((0, longest)));
        }
        pods.saw(seen("a", Some((30, 30))), now);
        assert_eq!(span(&pods, "a", now), Some((0, 30_000)), "it can be cut short");
    }

    #[test]
    fn a_grace_may_be_cut_short_and_does_not_grow() {
        let now = Instant::now();
        let mut pods = TerminatingPods::default();
        pods.saw(seen("a", None), now);
        pods.saw(seen("a", Some((30, 30))), now);
        pods.saw(seen("a", Some((60, 60))), now + secs(1));
        assert_eq!(span(&pods, "a", now), Some((0, 30_000)));
        pods.saw(seen("a", Some((5, 5))), now + secs(10));
        assert_eq!(span(&pods, "a", now), Some((0, 15_000)));
        pods.saw(seen("a", Some((4, 4))), now + secs(14));
        assert_eq!(span(&pods, "a", now), Some((0, 15_000)));
    }

    #[test]
    fn one_that_the_api_server_lost_leaves_at_once_for_some_time() {
        let now = Instant::now();
        let mut pods = TerminatingPods::default();
        for uid in ["a", "b", "c"] {
            pods.saw(seen(uid, None), now);
        }
        pods.saw(seen("b", Some((30, 30))), now);
        assert!(pods.gone("b", now + secs(1)) && !pods.gone("b", now + secs(2)) && !pods.gone("z", now));
        assert_eq!(span(&pods, "b", now), Some((0, 1000)));
        assert!(pods.only(&BTreeSet::from(["c".to_owned()]), now + secs(2)));
        assert_eq!(span(&pods, "a", now), Some((2000, 2000)));
        assert_eq!(span(&pods, "c", now), None);
        assert!(!pods.saw(seen("a", None), now + secs(3)), "an older word on it");
        assert!(pods.ended("c") && !pods.ended("c"));
        pods.saw(seen("d", None), now + REMEMBERED + secs(2));
        assert!(!pods.any_leaves(), "what is long gone is forgotten");
    }

    #[test]
    fn when_a_client_is_due() {
        let now = Instant::now();
        let due = |grace: u64, sleep: u64, survives: bool| {
            let leaving = Leaving::new(now, now + secs(grace), secs(grace), secs(sleep));
            (leaving.due(survives) - now).as_millis()
        };
        for (grace, millis) in [(0, 0), (1, 750), (4, 3000), (8, 6000), (30, 28_000), (3600, 3_598_000)] {
            assert_eq!((due(grace, 1, false), due(grace, 1, true)), (0, millis), "{grace}");
        }
        // A hook of its own that sleeps is the time that it wants.
        assert_eq!((due(30, 15, false), due(30, 15, true)), (13_000, 28_000));
        assert_eq!(due(30, 30, false), 28_000);
        assert_eq!(due(0, 15, false), 0);
        // What is due stays due when the grace is cut short, though the margin is smaller then.
        let long = Leaving::new(now, now + secs(8), secs(8), secs(0));
        assert_eq!(long.due(true), now + secs(6));
        assert_eq!(long.shortened(now + secs(8), secs(1)).due(true), now + secs(6));
        assert_eq!(long.shortened(now + secs(3), secs(1)).due(true), now + millis(2750));
    }

    #[test]
    fn a_client_is_its_pods_by_control_group_or_else_by_allocation() {
        let now = Instant::now();
        let row = |pod: &str, id: &str| HeldDevices {
            namespace: "ns".into(),
            pod: pod.into(),
            container: "c".into(),
            resource: "r".into(),
            ids: vec![id.into()],
        };
        let mut pods = TerminatingPods::default();
        let rows = [row("a", "0"), row("web", "1")];
        assert!(pods.held(&rows) && !pods.held(&rows));
        let [a, web] = ["0", "1"].map(|id| allocation_id("r", &[id.to_owned()]));
        pods.saw(seen("a", Some((30, 30))), now);
        let web_of = |uid: &str, grace| Seen { name: "ns/web".into(), ..seen(uid, grace) };
        pods.saw(web_of("first", Some((30, 30))), now);
        let of = |pods: &TerminatingPods, uid: Option<&str>, allocation: Option<&str>| {
            let uids: Vec<String> = uid.map(str::to_owned).into_iter().collect();
            pods.leaving(&uids, allocation).map(|(name, _)| name.to_owned())
        };
        assert_eq!(of(&pods, None, Some(&a)), Some("ns/a".into()));
        assert_eq!(of(&pods, Some("a"), Some(&web)), Some("ns/a".into()), "the kernel's word counts");
        assert_eq!(of(&pods, Some("static"), Some(&a)), None, "another pod's, of which nothing is known");
        assert_eq!(of(&pods, None, None), None);
        assert_eq!(of(&pods, None, Some("00")), None);
        assert_eq!(of(&pods, None, Some(&web)), Some("ns/web".into()));
        // Deleted by force and made again: which of the two it is cannot be said.
        pods.saw(web_of("second", None), now);
        assert_eq!(of(&pods, None, Some(&web)), None);
        assert_eq!(of(&pods, Some("first"), Some(&web)), Some("ns/web".into()));
    }
}
