//! The steps that end a FAULT, from waiting to replacing the daemon. Pure.
use std::time::Duration;

/// The steps against a server in FAULT. [`Escalation`] starts with `Wait`, and returns each other
/// step at most once, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum EscalationStep {
    /// Do nothing. Programs that check for errors exit by themselves. The server is ACTIVE again
    /// once its last client has exited.
    Wait,
    /// Send SIGTERM to the remaining clients.
    SignalTerm,
    /// Send SIGKILL to the remaining clients.
    SignalKill,
    /// Send `shutdown_server -f`.
    ShutDownServer,
    /// Send `quit`.
    QuitDaemon,
    /// Send SIGKILL to the daemon. The MPS host then starts a new daemon and sets its limits.
    KillDaemon,
}

impl EscalationStep {
    /// Returns the time until the next step is due.
    pub(super) fn time_until_next_step(self) -> Duration {
        let seconds = match self {
            // Measured on driver 580: programs that exit by themselves need at most 0.3 s.
            Self::Wait => 1,
            // Programs that handle a signal need time to exit. All other clients wait during this
            // time.
            Self::SignalTerm | Self::SignalKill => 2,
            Self::ShutDownServer => 3,
            Self::QuitDaemon => 5,
            Self::KillDaemon => return Duration::MAX,
        };
        Duration::from_secs(seconds)
    }

    /// Returns the step after this one. The last step repeats.
    fn next(self) -> Self {
        match self {
            Self::Wait => Self::SignalTerm,
            Self::SignalTerm => Self::SignalKill,
            Self::SignalKill => Self::ShutDownServer,
            Self::ShutDownServer => Self::QuitDaemon,
            Self::QuitDaemon | Self::KillDaemon => Self::KillDaemon,
        }
    }
}

/// Time limit for a server without clients to recover. Recovery took 0.02 to 0.04 s on an H100 and
/// an H200 with driver 580, and up to 1.4 s in published measurements.
const IDLE_SERVER_RECOVERY_TIME: Duration = Duration::from_secs(3);

/// Progress through the steps. Times count from the start of the fault.
#[derive(Debug)]
pub(super) struct Escalation {
    step: EscalationStep,
    /// When [`Escalation::advance`] returned the current step.
    since: Duration,
    /// When the server lost its last client. `None` while it has clients.
    without_clients_since: Option<Duration>,
}

impl Default for Escalation {
    fn default() -> Self {
        Self { step: EscalationStep::Wait, since: Duration::ZERO, without_clients_since: None }
    }
}

impl Escalation {
    /// Returns the current step.
    pub(super) fn step(&self) -> EscalationStep {
        self.step
    }

    /// Records that the server is still in FAULT with this number of clients. Returns the step to
    /// perform now, if one is due.
    pub(super) fn advance(&mut self, at: Duration, clients: usize) -> Option<EscalationStep> {
        if clients > 0 {
            self.without_clients_since = None;
        }
        let next = match (self.step, clients) {
            (EscalationStep::KillDaemon, _) => return None,
            // No client remains to signal: wait for the server to recover.
            (EscalationStep::Wait | EscalationStep::SignalTerm | EscalationStep::SignalKill, 0) => {
                let since = *self.without_clients_since.get_or_insert(at);
                (at.saturating_sub(since) >= IDLE_SERVER_RECOVERY_TIME).then_some(EscalationStep::ShutDownServer)
            }
            (step, _) => (at.saturating_sub(self.since) >= step.time_until_next_step()).then(|| step.next()),
        }?;
        (self.step, self.since) = (next, at);
        Some(next)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the steps and their times in ms for a probe every 25 ms. `clients` returns the
    /// number of clients at a given time.
    fn steps_over_time(mut clients: impl FnMut(u64) -> usize) -> Vec<(u64, EscalationStep)> {
        let mut escalation = Escalation::default();
        let probe = |ms| Some((ms, escalation.advance(Duration::from_millis(ms), clients(ms))?));
        (0..60_000).step_by(25).filter_map(probe).collect()
    }

    #[test]
    fn clients_are_signalled_then_the_server_shut_down_then_the_daemon_replaced() {
        assert_eq!(
            steps_over_time(|_| 2),
            [
                (1000, EscalationStep::SignalTerm),
                (3000, EscalationStep::SignalKill),
                (5000, EscalationStep::ShutDownServer),
                (8000, EscalationStep::QuitDaemon),
                (13000, EscalationStep::KillDaemon),
            ]
        );
    }

    #[test]
    fn a_server_without_clients_gets_time_to_recover_without_signals() {
        let rest = |at| {
            [
                (at, EscalationStep::ShutDownServer),
                (at + 3000, EscalationStep::QuitDaemon),
                (at + 8000, EscalationStep::KillDaemon),
            ]
        };
        assert_eq!(steps_over_time(|_| 0), rest(3000));
        assert_eq!(steps_over_time(|ms| usize::from(ms < 500)), rest(3500));
        let killed = steps_over_time(|ms| usize::from(ms < 3100));
        assert_eq!(killed[..2], [(1000, EscalationStep::SignalTerm), (3000, EscalationStep::SignalKill)]);
        assert_eq!(killed[2..], rest(6100));
    }

    proptest! {
        #[test]
        fn steps_follow_in_order_and_always_reach_the_last_step(probes in prop::collection::vec((1_u64..400, 0_usize..3), 400)) {
            let mut escalation = Escalation::default();
            let mut now = Duration::ZERO;
            let mut last = (EscalationStep::Wait, Duration::ZERO);
            for (ms, clients) in probes {
                now += Duration::from_millis(ms);
                let Some(step) = escalation.advance(now, clients) else { continue };
                prop_assert_eq!(step, escalation.step());
                prop_assert!(step > last.0, "{:?} after {:?}", step, last.0);
                let least = if last.0 < EscalationStep::ShutDownServer { last.0.time_until_next_step().min(IDLE_SERVER_RECOVERY_TIME) } else { last.0.time_until_next_step() };
                let given = now.saturating_sub(last.1);
                prop_assert!(given >= least, "{:?} lasted {:?}", last.0, given);
                // A signal requires a client. A server with clients is shut down only after its
                // clients were signalled.
                prop_assert!(clients > 0 || step >= EscalationStep::ShutDownServer);
                prop_assert!(clients == 0 || step == last.0.next());
                last = (step, now);
            }
            // The limit applies for any probe times, even if clients connect and exit at any time.
            let most = [EscalationStep::Wait, EscalationStep::SignalTerm, EscalationStep::SignalKill].map(|step| step.time_until_next_step() + IDLE_SERVER_RECOVERY_TIME).iter().sum::<Duration>();
            let most = most + EscalationStep::ShutDownServer.time_until_next_step() + EscalationStep::QuitDaemon.time_until_next_step() + Duration::from_millis(400) * 8;
            prop_assert!(last.0 == EscalationStep::KillDaemon || now < most, "{:?} at {:?}", last, now);
        }
    }
}
