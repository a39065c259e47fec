//! Which containers are guarded, and what to do about each. Pure: the time is an argument.
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::figures::{Bytes, Figures, high_below};
use crate::ending::{Key, Outcome};
use crate::tenants::cgroup::Owner;

/// How long clients may take to be ended: until then the container is slowed down.
pub const DEADLINE: Duration = Duration::from_secs(5);
/// Between looks while nothing is told: a limit may change without a word.
const LOOK: Duration = Duration::from_secs(5);
/// The same where `memory.events` cannot be watched.
const LOOK_UNWATCHED: Duration = Duration::from_millis(100);
/// Between looks at a container that is too full to be guarded.
const FULL: Duration = Duration::from_secs(1);
/// Between the look that suspects and the one that is sure: files are not read at one moment.
const SURE: Duration = Duration::from_millis(10);
/// Faster no program allocates, in bytes a second: so long a look can wait.
const FASTEST: u64 = 8 << 30;
/// Longest and shortest pause by that.
const PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(250));
/// How long what an agent before this one has set is left, until it is known who is a client.
const ADOPTED: Duration = Duration::from_secs(10);

/// What is to be done with a container's files. After each its figures are to be told to [`Guards::looked`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Job {
    /// Nothing but a look.
    Look,
    /// Its `memory.high` is to change, if it still is as it was.
    Change {
        /// From this; none is `max`.
        from: Option<Bytes>,
        /// To this.
        to: Option<Bytes>,
    },
}

/// Why nothing is known of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unread {
    /// It has ended.
    Gone,
    /// Its files cannot be read, or not be written.
    Failed,
}

/// What came of an ending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Told {
    /// Whose container.
    pub owner: Owner,
    /// How many of its clients were ended.
    pub ended: usize,
    /// How many were not in time.
    pub left: usize,
    /// What it used that could not be reclaimed.
    pub held: Bytes,
    /// Its limit.
    pub max: Bytes,
}

/// What to do now.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// By the container's folder: one at a time of each.
    pub jobs: Vec<(PathBuf, Job)>,
    /// What is over.
    pub told: Vec<Told>,
    /// Look again then, at the latest.
    pub again: Option<Instant>,
}

/// The containers that have MPS clients, under a policy that says so.
#[derive(Debug)]
pub struct Guards {
    by_folder: BTreeMap<PathBuf, Guard>,
    pause: Duration,
}

#[derive(Debug)]
struct Guard {
    owner: Owner,
    clients: BTreeSet<Key>,
    /// What this agent, or one before it, has set.
    set: Option<Bytes>,
    /// It has been seen with room: else it is as full as its program wants it, and nothing is about to happen.
    armed: bool,
    suspected: bool,
    ending: Option<Ending>,
    /// A job is on its way.
    busy: bool,
    /// The next one, before any look.
    next: Option<Job>,
    look: Option<Instant>,
    /// What is told before need not be looked at yet.
    not_before: Instant,
    /// Nothing is done before: the last job has failed.
    rest: Instant,
    /// Until then it stays without clients.
    keep: Option<Instant>,
}

#[derive(Debug)]
struct Ending {
    since: Instant,
    /// Clients that are ended, and those of them that had nothing to end.
    over: BTreeMap<Key, bool>,
    held: Bytes,
    max: Bytes,
}

impl Guard {
    fn new(owner: Owner, now: Instant) -> Self {
        Self {
            owner,
            clients: BTreeSet::new(),
            set: None,
            armed: false,
            suspected: false,
            ending: None,
            busy: false,
            next: None,
            look: Some(now),
            not_before: now,
            rest: now,
            keep: None,
        }
    }

    fn in_vain(&self, now: Instant) -> bool {
        self.clients.is_empty() && self.keep.is_none_or(|until| now >= until)
    }

    fn told(&self, ending: &Ending) -> Told {
        Told {
            owner: self.owner.clone(),
            ended: ending.over.values().filter(|had_one| **had_one).count(),
            left: self.clients.iter().filter(|client| !ending.over.contains_key(client)).count(),
            held: ending.held,
            max: ending.max,
        }
    }

    /// What follows from its figures.
    fn judge(&mut self, figures: &Figures, pause: Duration, now: Instant) {
        let Figures { max, high, .. } = *figures;
        self.look = Some(now + pause);
        self.not_before = now;
        let Some((max, level)) = max.and_then(|max| Some((max, high_below(max)?))) else {
            // No limit any more, or one that is too small.
            (self.armed, self.suspected) = (false, false);
            self.release();
            return;
        };
        let held = figures.held();
        let room = level.0.saturating_sub(held.0);
        self.not_before = now + Duration::from_millis(room.saturating_mul(1000) / FASTEST).clamp(PAUSE.0, PAUSE.1);
        if high == Some(level) {
            // Also what an agent before this one has set.
            self.armed |= self.set.is_none();
            self.set = high;
        }
        if room > 0 {
            (self.armed, self.suspected) = (true, false);
            if high.is_none() || high == self.set && high != Some(level) {
                self.next = Some(Job::Change { from: high, to: Some(level) });
            }
        } else if !self.armed {
            // It has been as full as that since before it was guarded, or lives on after its clients: to slow it down for good helps nobody.
            self.look = Some(now + FULL.min(pause));
            self.release();
        } else if self.clients.is_empty() {
            // Whose clients it has is not known yet.
            self.look = Some(now + FULL.min(pause));
        } else if self.suspected {
            self.ending = Some(Ending { since: now, over: BTreeMap::new(), held, max });
        } else {
            self.suspected = true;
            self.look = Some(now + SURE);
        }
    }

    fn release(&mut self) {
        self.next = self.set.map(|set| Job::Change { from: Some(set), to: None });
    }
}

impl Guards {
    /// Without any; `watched`: somebody calls [`Self::touched`].
    pub fn new(watched: bool) -> Self {
        Self { by_folder: BTreeMap::new(), pause: if watched { LOOK } else { LOOK_UNWATCHED } }
    }

    /// An agent before this one has set this.
    pub fn adopt(&mut self, folder: PathBuf, owner: Owner, high: Bytes, now: Instant) {
        let guard = Guard { set: Some(high), armed: true, keep: Some(now + ADOPTED), ..Guard::new(owner, now) };
        self.by_folder.insert(folder, guard);
    }

    /// These are all clients that are to be guarded, by the folder of their container.
    pub fn clients(&mut self, mut wanted: BTreeMap<PathBuf, (Owner, BTreeSet<Key>)>, now: Instant) {
        for (folder, guard) in &mut self.by_folder {
            guard.clients = wanted.remove(folder).map(|(_, clients)| clients).unwrap_or_default();
            if !guard.clients.is_empty() && guard.keep.take().is_some() {
                guard.look = Some(now);
            }
        }
        for (folder, (owner, clients)) in wanted {
            self.by_folder.insert(folder, Guard { clients, ..Guard::new(owner, now) });
        }
    }

    /// The folders of the containers.
    pub fn folders(&self) -> BTreeSet<&Path> {
        self.by_folder.keys().map(PathBuf::as_path).collect()
    }

    /// A container's `memory.events` have changed.
    pub fn touched(&mut self, folder: &Path) {
        if let Some(guard) = self.by_folder.get_mut(folder) {
            let soon = guard.not_before;
            guard.look = Some(guard.look.map_or(soon, |look| look.min(soon)));
        }
    }

    /// A job has come to this.
    pub fn looked(&mut self, folder: &Path, job: Job, figures: Result<Figures, Unread>, now: Instant) {
        let Some(guard) = self.by_folder.get_mut(folder) else { return };
        guard.busy = false;
        match figures {
            Ok(figures) => {
                guard.set = match job {
                    Job::Change { to, .. } if figures.high == to => to,
                    // What is there now somebody else has set.
                    _ => guard.set.filter(|_| figures.high == guard.set),
                };
                if guard.ending.is_none() && !guard.in_vain(now) {
                    guard.judge(&figures, self.pause, now);
                }
            }
            Err(Unread::Gone) => {
                // Its clients are gone with it, and will not be listed any more.
                guard.set = None;
                guard.look = Some(now + LOOK);
            }
            Err(Unread::Failed) => {
                (guard.look, guard.rest) = (Some(now + LOOK), now + FULL);
                if matches!(job, Job::Change { to: None, .. }) {
                    guard.release();
                }
            }
        }
    }

    /// Clients that are to be ended, with the owner of their container, and since when.
    pub fn doomed(&self) -> impl Iterator<Item = (&Key, &Owner, Instant)> {
        let of = |guard: &'_ Guard| guard.ending.as_ref().map(|ending| ending.since);
        let clients = self.by_folder.values().filter_map(move |guard| Some((guard, of(guard)?)));
        clients.flat_map(|(guard, since)| guard.clients.iter().map(move |client| (client, &guard.owner, since)))
    }

    /// An attempt to end a client has come to this.
    pub fn answered(&mut self, client: &Key, outcome: &Outcome) {
        let had_one = match outcome {
            Outcome::Terminated => true,
            Outcome::Idle => false,
            Outcome::Failed(_) => return,
        };
        for guard in self.by_folder.values_mut().filter(|guard| guard.clients.contains(client)) {
            if let Some(ending) = &mut guard.ending {
                let before = ending.over.entry(client.clone()).or_default();
                *before |= had_one;
            }
        }
    }

    /// What to do.
    pub fn decide(&mut self, now: Instant) -> Decision {
        let mut decision = Decision::default();
        let mut at: Vec<Instant> = Vec::new();
        for (folder, guard) in &mut self.by_folder {
            if let Some(ending) = &guard.ending {
                let until = ending.since + DEADLINE;
                let over = guard.clients.iter().all(|client| ending.over.contains_key(client));
                if over || now >= until {
                    decision.told.push(guard.told(ending));
                    (guard.ending, guard.armed, guard.suspected) = (None, false, false);
                    guard.look = Some(now + FULL);
                    guard.release();
                } else {
                    at.push(until);
                }
            }
            if guard.busy {
                continue;
            }
            if now < guard.rest {
                at.push(guard.rest);
                continue;
            }
            if guard.ending.is_none() && guard.in_vain(now) {
                guard.look = None;
                guard.release();
            }
            let due = guard.look.is_some_and(|look| now >= look) && guard.ending.is_none();
            if let Some(job) = guard.next.take().or(due.then_some(Job::Look)) {
                guard.busy = true;
                decision.jobs.push((folder.clone(), job));
            } else {
                at.extend(guard.look.filter(|_| guard.ending.is_none()));
                at.extend(guard.keep.filter(|until| now < *until));
            }
        }
        self.by_folder.retain(|_, guard| guard.busy || guard.set.is_some() || !guard.in_vain(now));
        decision.again = at.into_iter().min().map(|at| at.max(now));
        decision
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MAX: Bytes = Bytes::mib(1000);
    const LEVEL: Bytes = Bytes::mib(950);

    fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn owner() -> Owner {
        Owner { pod: "uid".into(), container: Some("id".into()) }
    }

    fn key(pid: u32) -> Key {
        Key { device: "GPU".into(), pid }
    }

    fn folder() -> PathBuf {
        "/c".into()
    }

    /// One container, and the agent that guards it.
    struct World {
        guards: Guards,
        figures: Figures,
        now: Instant,
        told: Vec<Told>,
        /// What `memory.high` was set to.
        set: Vec<Option<Bytes>>,
    }

    impl World {
        fn new() -> Self {
            let figures = Figures { max: Some(MAX), high: None, current: Bytes::mib(100), reclaimable: Bytes(0) };
            Self { guards: Guards::new(true), figures, now: Instant::now(), told: Vec::new(), set: Vec::new() }
        }

        fn with_clients(pids: &[u32]) -> Self {
            let mut world = Self::new();
            world.clients(pids);
            world
        }

        fn clients(&mut self, pids: &[u32]) {
            let clients: BTreeSet<Key> = pids.iter().copied().map(key).collect();
            let wanted = (!clients.is_empty()).then(|| (folder(), (owner(), clients)));
            self.guards.clients(wanted.into_iter().collect(), self.now);
            self.turn();
        }

        fn uses(&mut self, current: Bytes, reclaimable: Bytes) {
            (self.figures.current, self.figures.reclaimable) = (current, reclaimable);
            self.guards.touched(&folder());
            // A look and a second one, and before them the pause after the last.
            self.later(PAUSE.1 + SURE);
        }

        /// All jobs are done at once. When to look again.
        fn turn(&mut self) -> Option<Instant> {
            for _ in 0..20 {
                let Decision { jobs, told, again } = self.guards.decide(self.now);
                self.told.extend(told);
                if jobs.is_empty() {
                    assert!(again.is_none_or(|at| at > self.now), "nothing to do, and at once again");
                    return again;
                }
                for (folder, job) in jobs {
                    if let Job::Change { from, to } = job
                        && self.figures.high == from
                    {
                        self.figures.high = to;
                        self.set.push(to);
                    }
                    self.guards.looked(&folder, job, Ok(self.figures), self.now);
                }
            }
            panic!("it never rests");
        }

        /// Time passes, and whatever is due meanwhile is done.
        fn later(&mut self, time: Duration) {
            let end = self.now + time;
            while let Some(at) = self.turn().filter(|at| *at <= end) {
                self.now = at;
            }
            self.now = end;
            self.turn();
        }

        fn doomed(&self) -> Vec<u32> {
            self.guards.doomed().map(|(key, ..)| key.pid).collect()
        }

        fn ended(&mut self, pid: u32) {
            self.guards.answered(&key(pid), &Outcome::Terminated);
            self.turn();
        }
    }

    #[test]
    fn a_container_is_slowed_down_near_its_limit_for_as_long_as_it_has_clients() {
        let mut world = World::with_clients(&[1]);
        assert_eq!(world.figures.high, Some(LEVEL));
        world.clients(&[1, 2]);
        world.later(millis(60_000));
        assert_eq!(world.set, [Some(LEVEL)]);
        world.clients(&[]);
        assert_eq!((world.figures.high, world.guards.folders().len()), (None, 0));
    }

    #[test]
    fn one_that_is_about_to_be_killed_has_its_clients_ended_and_is_let_go_on() {
        let mut world = World::with_clients(&[1, 2]);
        world.uses(LEVEL, Bytes(0));
        assert_eq!(world.doomed(), [1, 2]);
        assert_eq!(world.figures.high, Some(LEVEL), "until then it is slowed down");
        world.ended(1);
        assert_eq!((world.doomed(), world.figures.high), (vec![1, 2], Some(LEVEL)));
        world.ended(2);
        assert_eq!((world.doomed(), world.figures.high), (vec![], None));
        assert_eq!(world.told, [Told { owner: owner(), ended: 2, left: 0, held: LEVEL, max: MAX }]);
        // It lives on, as full as it is, and then gives some back.
        world.later(millis(60_000));
        assert_eq!((world.set.len(), world.told.len(), world.doomed().len()), (2, 1, 0));
        world.uses(Bytes::mib(800), Bytes(0));
        world.later(millis(1000));
        assert_eq!(world.figures.high, Some(LEVEL));
        world.uses(LEVEL, Bytes(0));
        assert_eq!(world.doomed(), [1, 2]);
    }

    #[test]
    fn page_cache_alone_is_no_reason() {
        let mut world = World::with_clients(&[1]);
        for cache in [1, 100, 950] {
            world.uses(Bytes(LEVEL.0 + 1), Bytes::mib(cache));
            assert_eq!((world.doomed(), world.figures.high), (vec![], Some(LEVEL)), "{cache}");
        }
        world.uses(Bytes(LEVEL.0 + 1), Bytes(1));
        assert_eq!(world.doomed(), [1]);
    }

    #[test]
    fn one_look_is_not_enough() {
        let mut world = World::with_clients(&[1]);
        world.figures.current = LEVEL;
        world.guards.touched(&folder());
        world.later(millis(10));
        assert!(world.doomed().is_empty());
        world.figures.current = Bytes(LEVEL.0 - 1);
        world.later(millis(1000));
        assert!(world.doomed().is_empty());
    }

    #[test]
    fn one_without_a_limit_and_one_that_is_full_from_the_beginning_are_left_alone() {
        let mut world = World::new();
        world.figures.max = None;
        world.clients(&[1]);
        world.uses(Bytes::mib(100_000), Bytes(0));
        assert!(world.doomed().is_empty() && world.set.is_empty());
        let mut world = World::new();
        world.figures.current = Bytes::mib(960);
        world.clients(&[1]);
        world.uses(Bytes::mib(999), Bytes(0));
        world.later(millis(10_000));
        assert!(world.doomed().is_empty() && world.set.is_empty());
        world.figures.current = Bytes::mib(900);
        world.later(millis(1000));
        assert_eq!(world.set, [Some(LEVEL)]);
    }

    #[test]
    fn what_somebody_else_has_set_stays_and_is_judged_by() {
        let mut world = World::new();
        world.figures.high = Some(Bytes::mib(700));
        world.clients(&[1]);
        world.uses(Bytes::mib(800), Bytes(0));
        assert!(world.doomed().is_empty());
        world.uses(LEVEL, Bytes(0));
        assert_eq!(world.doomed(), [1]);
        world.ended(1);
        world.clients(&[]);
        assert_eq!((world.set.len(), world.figures.high), (0, Some(Bytes::mib(700))));
        // Set after ours.
        let mut world = World::with_clients(&[1]);
        world.figures.high = Some(Bytes::mib(700));
        world.later(LOOK);
        world.clients(&[]);
        assert_eq!((world.set.len(), world.figures.high), (1, Some(Bytes::mib(700))));
    }

    #[test]
    fn a_limit_that_changes_is_followed() {
        let mut world = World::with_clients(&[1]);
        world.figures.max = Some(Bytes::mib(2000));
        world.later(LOOK);
        assert_eq!(world.figures.high, Some(Bytes::mib(1900)));
        world.figures.max = None;
        world.later(LOOK);
        assert_eq!(world.figures.high, None);
        world.figures.max = Some(MAX);
        world.later(LOOK);
        assert_eq!(world.figures.high, Some(LEVEL));
        assert!(world.doomed().is_empty());
    }

    #[test]
    fn a_client_that_cannot_be_ended_does_not_slow_its_container_down_for_ever() {
        let mut world = World::with_clients(&[1, 2, 3]);
        world.uses(LEVEL, Bytes(0));
        world.guards.answered(&key(1), &Outcome::Failed("busy".into()));
        world.guards.answered(&key(2), &Outcome::Idle);
        world.ended(3);
        world.later(millis(4500));
        assert_eq!((world.doomed().len(), world.figures.high), (3, Some(LEVEL)));
        world.later(millis(500));
        assert_eq!((world.doomed().len(), world.figures.high), (0, None));
        assert_eq!(world.told, [Told { owner: owner(), ended: 1, left: 1, held: LEVEL, max: MAX }]);
    }

    #[test]
    fn what_an_agent_before_has_set_is_known_by_its_value_and_kept_until_it_is_known_who_is_a_client() {
        let adopted = |current: Bytes| {
            let mut world = World::new();
            (world.figures.high, world.figures.current) = (Some(LEVEL), current);
            world.guards.adopt(folder(), owner(), LEVEL, world.now);
            world.clients(&[]);
            world
        };
        // That one was killed in the midst of an ending.
        let mut world = adopted(LEVEL);
        world.later(millis(3000));
        assert_eq!((world.figures.high, world.doomed()), (Some(LEVEL), vec![]));
        world.clients(&[1]);
        world.later(millis(100));
        assert_eq!(world.doomed(), [1]);
        world.ended(1);
        assert_eq!(world.figures.high, None);
        // Its clients have gone meanwhile, or the policy says otherwise.
        let mut world = adopted(Bytes::mib(1));
        world.later(ADOPTED);
        assert_eq!((world.figures.high, world.guards.folders().len()), (None, 0));
    }

    #[test]
    fn files_that_cannot_be_written_are_tried_again_and_those_that_are_gone_are_not() {
        let mut world = World::with_clients(&[1]);
        world.guards.clients(BTreeMap::new(), world.now);
        let (mut tries, end) = (0, world.now + millis(10_000));
        while world.now < end {
            let decision = world.guards.decide(world.now);
            for (folder, job) in decision.jobs {
                assert_eq!(job, Job::Change { from: Some(LEVEL), to: None });
                tries += 1;
                world.guards.looked(&folder, job, Err(Unread::Failed), world.now);
            }
            world.now = decision.again.unwrap_or(world.now).max(world.now + millis(1));
        }
        assert!((5..20).contains(&tries), "{tries}");
        world.turn();
        assert_eq!((world.figures.high, world.guards.folders().len()), (None, 0));
        let mut world = World::with_clients(&[1]);
        world.guards.clients(BTreeMap::new(), world.now);
        let (folder, job) = world.guards.decide(world.now).jobs.remove(0);
        world.guards.looked(&folder, job, Err(Unread::Gone), world.now);
        assert_eq!(world.guards.decide(world.now), Decision::default());
        assert!(world.guards.folders().is_empty());
    }

    #[test]
    fn a_container_full_of_page_cache_is_not_looked_at_for_ever() {
        let mut world = World::with_clients(&[1]);
        let mut looks = 0;
        for _ in 0..1000 {
            // The kernel tells up to a hundred times a second.
            world.guards.touched(&folder());
            world.figures = Figures { current: LEVEL, reclaimable: Bytes::mib(400), ..world.figures };
            world.now += millis(10);
            for (folder, job) in world.guards.decide(world.now).jobs {
                looks += 1;
                world.guards.looked(&folder, job, Ok(world.figures), world.now);
            }
        }
        assert!(looks <= 210, "{looks} in ten seconds");
    }

    #[derive(Debug, Clone)]
    enum Step {
        Use { current: u64, reclaimable: u64 },
        Limit(Option<u64>),
        Somebody(Option<u64>),
        Clients(Vec<u32>),
        Answer { pid: u32, outcome: u8 },
        Restart,
        Wait(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let limit = || prop_oneof![Just(None), (0..4000_u64).prop_map(Some)];
        let step = prop_oneof![
            4 => (0..2000_u64, 0..300_u64).prop_map(|(current, reclaimable)| Step::Use { current, reclaimable }),
            1 => limit().prop_map(Step::Limit),
            1 => limit().prop_map(Step::Somebody),
            2 => proptest::collection::vec(1..4_u32, 0..3).prop_map(Step::Clients),
            3 => (1..4_u32, 0..3_u8).prop_map(|(pid, outcome)| Step::Answer { pid, outcome }),
            1 => Just(Step::Restart),
            4 => (0..12_000_u64).prop_map(Step::Wait),
        ];
        proptest::collection::vec(step, 0..80)
    }

    proptest! {
        #[test]
        fn whatever_happens_nobody_elses_is_touched_nobody_is_ended_for_nothing_and_nothing_stays(steps in steps()) {
            let mut world = World::new();
            let mut theirs = None;
            for step in steps {
                let before = world.set.len();
                match step {
                    Step::Use { current, reclaimable } => world.uses(Bytes::mib(current), Bytes::mib(reclaimable)),
                    Step::Limit(max) => {
                        world.figures.max = max.map(Bytes::mib);
                        world.later(millis(20));
                    }
                    Step::Somebody(high) => {
                        // One that sets just what we would is taken for us.
                        theirs = high.map(|high| Bytes(Bytes::mib(high).0 + 1));
                        world.figures.high = theirs;
                        world.turn();
                    }
                    Step::Clients(pids) => world.clients(&pids),
                    Step::Answer { pid, outcome } => {
                        let outcome = [Outcome::Terminated, Outcome::Idle, Outcome::Failed(String::new())][usize::from(outcome)].clone();
                        world.guards.answered(&key(pid), &outcome);
                        world.turn();
                    }
                    Step::Restart => {
                        world.guards = Guards::new(true);
                        let ours = world.figures.max.and_then(high_below);
                        if let Some(high) = ours.filter(|_| world.figures.high == ours) {
                            world.guards.adopt(folder(), owner(), high, world.now);
                        }
                        world.turn();
                    }
                    Step::Wait(time) => world.later(millis(time)),
                }
                prop_assert!(theirs.is_none() || world.set.len() == before, "somebody else has set {theirs:?}");
                prop_assert!(world.told.iter().all(|told| told.held >= high_below(told.max).unwrap()));
            }
            world.clients(&[]);
            world.later(ADOPTED + DEADLINE);
            prop_assert!(world.guards.folders().is_empty());
            // But for what was set for a limit that changed while no agent was there.
            let ours = world.figures.max.and_then(high_below);
            prop_assert!(world.figures.high.is_none() || world.figures.high != ours, "{:?} stays", world.figures.high);
        }
    }
}
