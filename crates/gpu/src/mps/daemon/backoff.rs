//! Decides when to restart a failed daemon, or the failed process of a device. Pure.
use std::time::Duration;

use crate::mps::wire::DaemonState;

/// Run time after which a daemon's failure count is reset.
const MIN_STABLE_RUN_TIME: Duration = Duration::from_secs(60);
/// Delay after the second consecutive failure.
const FIRST_RESTART_DELAY: Duration = Duration::from_millis(250);
/// Maximum delay before a restart. The delay is short, because a GPU that was repaired in the
/// meantime must serve soon.
const MAX_RESTART_DELAY: Duration = Duration::from_secs(30);
/// Minimum number of consecutive failures for the state [`DaemonState::BackOff`].
const MIN_FAILURES_FOR_BACK_OFF: u32 = 4;

/// Counts a daemon's consecutive failures and sets the delay before each restart.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// Records a failure of a daemon that ran for `ran`. Returns the delay before the restart. The
    /// first failure has no delay, because clients are waiting.
    pub(crate) fn record_failure(&mut self, ran: Duration) -> Duration {
        if ran >= MIN_STABLE_RUN_TIME {
            self.failures = 0;
        }
        self.failures = self.failures.saturating_add(1);
        match self.failures {
            1 => Duration::ZERO,
            n => FIRST_RESTART_DELAY.saturating_mul(1 << (n - 2).min(16)).min(MAX_RESTART_DELAY),
        }
    }

    /// Returns the state to report during the delay.
    pub(crate) fn state(&self) -> DaemonState {
        if self.failures < MIN_FAILURES_FOR_BACK_OFF { DaemonState::Restarting } else { DaemonState::BackOff }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_is_retried_at_once_and_later_failures_with_growing_delays() {
        let mut backoff = Backoff::default();
        let waits: Vec<u128> = (0..10).map(|_| backoff.record_failure(Duration::ZERO).as_millis()).collect();
        assert_eq!(waits, [0, 250, 500, 1000, 2000, 4000, 8000, 16000, 30000, 30000]);
        assert_eq!(backoff.state(), DaemonState::BackOff);
        for _ in 0..1000 {
            assert!(backoff.record_failure(Duration::ZERO) <= MAX_RESTART_DELAY);
        }
    }

    #[test]
    fn a_daemon_that_ran_long_enough_resets_the_backoff() {
        let mut backoff = Backoff::default();
        for _ in 0..5 {
            backoff.record_failure(Duration::ZERO);
        }
        assert_eq!(backoff.record_failure(MIN_STABLE_RUN_TIME), Duration::ZERO);
        assert_eq!(backoff.state(), DaemonState::Restarting);
    }
}
