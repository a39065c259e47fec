//! What to do next, without doing it: the step from what is wanted now to what is wanted next, and when a daemon is tried again.
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

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
}
