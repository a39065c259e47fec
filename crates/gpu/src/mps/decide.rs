//! What to do next, without doing it: the step from what is wanted now to what is wanted next, when a daemon is tried again, and what is
//! done about a server that stays in FAULT.
use std::time::Duration;

use super::wire::{DaemonState, Desired};

/// What has to be done, in this order: what goes first, what comes after.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Step {
    /// Allocations whose door closes.
    pub(crate) close: Vec<String>,
    /// Devices whose daemon goes.
    pub(crate) stop: Vec<String>,
    /// Devices whose daemon comes, or gets other settings.
    pub(crate) run: Vec<String>,
    /// Allocations whose door opens.
    pub(crate) open: Vec<String>,
    /// Allocations whose open door gets other limits: they bind for clients that come after.
    pub(crate) limit: Vec<String>,
}

/// The step from `old` to `new`.
pub(crate) fn step(old: &Desired, new: &Desired) -> Step {
    let mut step = Step::default();
    for (id, was) in &old.allocations {
        // A door belongs to one device for its life.
        if new.allocations.get(id).is_none_or(|is| is.device != was.device) {
            step.close.push(id.clone());
        }
    }
    step.stop.extend(old.daemons.keys().filter(|device| !new.daemons.contains_key(*device)).cloned());
    for (device, is) in &new.daemons {
        if old.daemons.get(device) != Some(is) {
            step.run.push(device.clone());
        }
    }
    for (id, is) in &new.allocations {
        match old.allocations.get(id) {
            Some(was) if was == is => {}
            Some(was) if was.device == is.device => step.limit.push(id.clone()),
            _ => step.open.push(id.clone()),
        }
    }
    step
}

/// A daemon that ran this long was not failing.
const SOUND: Duration = Duration::from_secs(60);
/// The first wait after a failure that followed another.
const FIRST: Duration = Duration::from_millis(250);
/// A daemon is tried again at least this often: what was wrong with the GPU may have been put right.
const LONGEST: Duration = Duration::from_secs(30);
/// Failures in a row from which on it is called a back-off.
const MANY: u32 = 4;

/// When a daemon that ends is started again.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// After an end that nobody wanted, `ran` after the start: how long to wait. Nothing after the first: tenants wait for it.
    pub(crate) fn failed(&mut self, ran: Duration) -> Duration {
        if ran >= SOUND {
            self.failures = 0;
        }
        self.failures = self.failures.saturating_add(1);
        match self.failures {
            1 => Duration::ZERO,
            n => FIRST.saturating_mul(1 << (n - 2).min(16)).min(LONGEST),
        }
    }

    /// What to call the time until then.
    pub(crate) fn state(&self) -> DaemonState {
        if self.failures < MANY { DaemonState::Restarting } else { DaemonState::BackOff }
    }
}

/// What is done about a server in FAULT, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rung {
    /// Nothing: a program that looks at errors exits by itself, and with the last of them the server is ACTIVE again.
    Wait,
    /// SIGTERM to the clients that are still there.
    Terminate,
    /// SIGKILL to them.
    Kill,
    /// `shutdown_server -f`.
    ShutDown,
    /// `quit`.
    Quit,
    /// SIGKILL to the daemon: another is started, and given its limits.
    Replace,
}

impl Rung {
    /// How long it may take.
    pub(crate) fn deadline(self) -> Duration {
        let seconds = match self {
            // Programs that exit by themselves were seen to do so within 0.3 s.
            Self::Wait => 1,
            // As long as most programs take for what they do at SIGTERM, and no longer: everybody waits for them.
            Self::Terminate | Self::Kill => 2,
            Self::ShutDown => 3,
            Self::Quit => 5,
            Self::Replace => return Duration::MAX,
        };
        Duration::from_secs(seconds)
    }

    fn next(self) -> Self {
        match self {
            Self::Wait => Self::Terminate,
            Self::Terminate => Self::Kill,
            Self::Kill => Self::ShutDown,
            Self::ShutDown => Self::Quit,
            Self::Quit | Self::Replace => Self::Replace,
        }
    }
}

/// A server that nobody holds is ACTIVE again after 0.03 s (measured); others measured 1.4 s at most for its contexts to be made anew.
const HEALS: Duration = Duration::from_secs(3);

/// The way up from a FAULT to another daemon. Times are since the fault began.
#[derive(Debug)]
pub(crate) struct Ladder {
    rung: Rung,
    /// When that was stepped on.
    since: Duration,
    /// Since when nobody holds it.
    alone: Option<Duration>,
}

impl Default for Ladder {
    fn default() -> Self {
        Self { rung: Rung::Wait, since: Duration::ZERO, alone: None }
    }
}

impl Ladder {
    /// What is being done.
    pub(crate) fn rung(&self) -> Rung {
        self.rung
    }

    /// The step to take at a look that still sees FAULT, and so many clients in it. One at a time, each once, never back.
    pub(crate) fn climb(&mut self, at: Duration, clients: usize) -> Option<Rung> {
        if clients > 0 {
            self.alone = None;
        }
        let next = match (self.rung, clients) {
            (Rung::Replace, _) => return None,
            // There is nobody to be ended: all depends on the server.
            (Rung::Wait | Rung::Terminate | Rung::Kill, 0) => {
                let alone = *self.alone.get_or_insert(at);
                (at.saturating_sub(alone) >= HEALS).then_some(Rung::ShutDown)
            }
            (rung, _) => (at.saturating_sub(self.since) >= rung.deadline()).then(|| rung.next()),
        }?;
        (self.rung, self.since) = (next, at);
        Some(next)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::super::wire::{Allocation, Daemon, VERSION};
    use super::*;

    fn desired(daemons: &[(&str, u8)], allocations: &[(&str, &str, u8)]) -> Desired {
        let daemon = |threads| Daemon {
            multi_user: true,
            exclusive: false,
            default_threads: Some(threads),
            default_memory_mib: None,
        };
        let allocation = |device: &str, threads| Allocation {
            device: device.into(),
            threads: Some(threads),
            memory_mib: None,
            max_clients: None,
        };
        Desired {
            version: VERSION,
            daemons: daemons.iter().map(|&(name, threads)| (name.into(), daemon(threads))).collect(),
            allocations: allocations
                .iter()
                .map(|&(id, device, threads)| (id.into(), allocation(device, threads)))
                .collect::<BTreeMap<_, _>>(),
        }
    }

    #[test]
    fn nothing_changed_is_nothing_to_do() {
        let same = desired(&[("a", 50)], &[("1", "a", 10)]);
        assert_eq!(step(&same, &same), Step::default());
    }

    #[test]
    fn each_change_is_its_own_kind_of_step() {
        let old = desired(
            &[("a", 50), ("b", 50), ("c", 50)],
            &[("1", "a", 10), ("2", "a", 10), ("3", "b", 10), ("4", "a", 10)],
        );
        let new = desired(
            &[("a", 60), ("b", 50), ("d", 50)],
            &[("2", "a", 20), ("3", "a", 10), ("4", "a", 10), ("5", "d", 10)],
        );
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        assert_eq!(
            step(&old, &new),
            Step {
                close: names(&["1", "3"]),
                stop: names(&["c"]),
                run: names(&["a", "d"]),
                open: names(&["3", "5"]),
                limit: names(&["2"]),
            }
        );
    }

    #[test]
    fn the_first_failure_is_tried_again_at_once_and_many_rarely() {
        let mut backoff = Backoff::default();
        let waits: Vec<u128> = (0..10).map(|_| backoff.failed(Duration::ZERO).as_millis()).collect();
        assert_eq!(waits, [0, 250, 500, 1000, 2000, 4000, 8000, 16000, 30000, 30000]);
        assert_eq!(backoff.state(), DaemonState::BackOff);
        for _ in 0..1000 {
            assert!(backoff.failed(Duration::ZERO) <= LONGEST);
        }
    }

    #[test]
    fn a_daemon_that_ran_well_starts_afresh() {
        let mut backoff = Backoff::default();
        for _ in 0..5 {
            backoff.failed(Duration::ZERO);
        }
        assert_eq!(backoff.failed(SOUND), Duration::ZERO);
        assert_eq!(backoff.state(), DaemonState::Restarting);
    }

    /// The steps, each with its time in ms, that looks every 25 ms take; `clients` are those that are there at a time.
    fn steps(mut clients: impl FnMut(u64) -> usize) -> Vec<(u64, Rung)> {
        let mut ladder = Ladder::default();
        let look = |ms| Some((ms, ladder.climb(Duration::from_millis(ms), clients(ms))?));
        (0..60_000).step_by(25).filter_map(look).collect()
    }

    #[test]
    fn whoever_holds_a_fault_is_asked_then_killed_and_then_the_server_goes_and_the_daemon() {
        assert_eq!(
            steps(|_| 2),
            [
                (1000, Rung::Terminate),
                (3000, Rung::Kill),
                (5000, Rung::ShutDown),
                (8000, Rung::Quit),
                (13000, Rung::Replace),
            ]
        );
    }

    #[test]
    fn a_server_that_nobody_holds_has_its_time_to_heal_and_nobody_is_ended() {
        let rest = |at| [(at, Rung::ShutDown), (at + 3000, Rung::Quit), (at + 8000, Rung::Replace)];
        assert_eq!(steps(|_| 0), rest(3000));
        assert_eq!(steps(|ms| usize::from(ms < 500)), rest(3500));
        let killed = steps(|ms| usize::from(ms < 3100));
        assert_eq!(killed[..2], [(1000, Rung::Terminate), (3000, Rung::Kill)]);
        assert_eq!(killed[2..], rest(6100));
    }

    proptest! {
        #[test]
        fn it_climbs_step_by_step_and_always_to_the_end(looks in prop::collection::vec((1_u64..400, 0_usize..3), 400)) {
            let mut ladder = Ladder::default();
            let mut now = Duration::ZERO;
            let mut last = (Rung::Wait, Duration::ZERO);
            for (ms, clients) in looks {
                now += Duration::from_millis(ms);
                let Some(step) = ladder.climb(now, clients) else { continue };
                prop_assert_eq!(step, ladder.rung());
                prop_assert!(step > last.0, "{:?} after {:?}", step, last.0);
                let least = if last.0 < Rung::ShutDown { last.0.deadline().min(HEALS) } else { last.0.deadline() };
                let given = now.saturating_sub(last.1);
                prop_assert!(given >= least, "{:?} was given {:?}", last.0, given);
                // Nobody is ended where nobody is, and no server shut down before those in it were.
                prop_assert!(clients > 0 || step >= Rung::ShutDown);
                prop_assert!(clients == 0 || step == last.0.next());
                last = (step, now);
            }
            // However the looks fall and whoever comes and goes.
            let most = [Rung::Wait, Rung::Terminate, Rung::Kill].map(|rung| rung.deadline() + HEALS).iter().sum::<Duration>();
            let most = most + Rung::ShutDown.deadline() + Rung::Quit.deadline() + Duration::from_millis(400) * 8;
            prop_assert!(last.0 == Rung::Replace || now < most, "{:?} at {:?}", last, now);
        }
    }
}
