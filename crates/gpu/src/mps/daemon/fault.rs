//! Tracks fatal GPU errors of one device: which client caused them, and which clients they broke.
//! Pure: the time is an argument.
//!
//! In FAULT, all clients have lost their contexts, and the server admits no client until the last
//! of these clients has exited. A client that does not exit blocks the GPU for all other pods. The
//! MPS host therefore signals such a client regardless of policies.
//!
//! A server in which a busy client was killed may report ACTIVE and yet break a later client. The
//! MPS host replaces such a server as soon as the server has no clients.
use std::time::Duration;

use tokio::time::Instant;

use super::escalation::{Escalation, EscalationStep};
use crate::mps::wire::{Client, Fault};

/// Time for which a fault in the log takes precedence over the server's state ACTIVE. The log
/// precedes the server's state by at most 0.13 s (measured on driver 580).
const FAULT_CONFIRMATION_TIME: Duration = Duration::from_secs(1);
/// Time for which a killed client is assumed to be the cause of a fault. A client that was killed
/// while its kernels ran causes a fault after 0.1 to 0.23 s (measured on an H200).
const MAX_TIME_FROM_KILL_TO_FAULT: Duration = Duration::from_secs(2);
/// Time after a fault's end during which the log lines of the fault may still arrive.
const MAX_FAULT_LOG_DELAY: Duration = Duration::from_secs(1);

/// A client that exited with an open context.
#[derive(Debug)]
struct ExitedClient {
    client: Client,
    at: Instant,
}

/// A fault in progress.
#[derive(Debug)]
struct CurrentFault {
    began: Instant,
    escalation: Escalation,
    /// Whether the server itself reported FAULT, not only its log.
    confirmed: bool,
    /// PIDs that the server's log names for this fault.
    named: Vec<u32>,
}

/// Tracks the faults of a device.
#[derive(Debug, Default)]
pub(super) struct FaultTracker {
    last: Option<Fault>,
    current: Option<CurrentFault>,
    ended_at: Option<Instant>,
    exited: Vec<ExitedClient>,
    /// Whether a client exited with an open context. If so, the server may break a later client.
    unclean: bool,
}

impl FaultTracker {
    /// Returns the last fault, if any. The fault may be over.
    pub(super) fn last_fault(&self) -> Option<&Fault> {
        self.last.as_ref()
    }

    /// Returns whether a fault is in progress.
    pub(super) fn has_current_fault(&self) -> bool {
        self.current.is_some()
    }

    /// Returns whether the daemon is expected to exit because of a fault.
    pub(super) fn expects_daemon_exit(&self) -> bool {
        self.current.as_ref().is_some_and(|current| current.escalation.step() >= EscalationStep::QuitDaemon)
    }

    /// Returns whether the server should be replaced once it has no clients.
    pub(super) fn is_server_unclean(&self) -> bool {
        self.unclean
    }

    /// Records that a new server serves, or that the old server has recreated its contexts.
    pub(super) fn mark_server_clean(&mut self) {
        self.unclean = false;
    }

    /// Begins a fault that affects `clients`. Returns false if a fault is already in progress.
    pub(super) fn begin_fault(&mut self, clients: Vec<Client>, now: Instant) -> bool {
        if self.current.is_some() {
            return false;
        }
        let causes: Vec<Client> = self
            .exited
            .drain(..)
            .filter(|exited| now.saturating_duration_since(exited.at) < MAX_TIME_FROM_KILL_TO_FAULT)
            .map(|exited| exited.client)
            .collect();
        let number = self.last.as_ref().map_or(0, |fault| fault.number) + 1;
        let mut affected = clients;
        // If several clients exited, any of them may be the cause.
        let culprit = if let [only] = causes.as_slice() { Some(only.clone()) } else { None };
        for client in causes {
            if !affected.iter().any(|known| known.pid == client.pid) {
                affected.push(client);
            }
        }
        let killed = culprit.is_some();
        self.last = Some(Fault { number, culprit, killed, affected, ..Fault::default() });
        let escalation = Escalation::default();
        self.current = Some(CurrentFault { began: now, escalation, confirmed: false, named: Vec::new() });
        true
    }

    /// Records that the server itself reports FAULT.
    pub(super) fn confirm_fault(&mut self) {
        if let Some(current) = &mut self.current {
            current.confirmed = true;
        }
    }

    /// Records that the log names a client. If the log names several clients, the culprit is
    /// unknown. If a client was killed while its kernels ran, this method ignores the log. On an
    /// H200 (driver 580), the log named a running neighbour in 47 of 47 such faults.
    pub(super) fn record_named_client(&mut self, pid: u32, allocation: Option<String>) {
        let (Some(fault), Some(current)) = (&mut self.last, &mut self.current) else { return };
        if current.named.contains(&pid) {
            return;
        }
        current.named.push(pid);
        let known = fault.affected.iter().find(|client| client.pid == pid).cloned();
        let client = known.unwrap_or(Client { pid, allocation });
        if !fault.affected.contains(&client) {
            fault.affected.push(client.clone());
        }
        if !fault.killed {
            fault.culprit = (current.named.len() == 1).then_some(client);
        }
    }

    /// Returns whether a log line that names no client belongs to a fault that is over.
    pub(super) fn is_late_log_of_ended_fault(&self, now: Instant) -> bool {
        self.current.is_none()
            && self.ended_at.is_some_and(|ended| now.saturating_duration_since(ended) < MAX_FAULT_LOG_DELAY)
    }

    /// Returns whether an ACTIVE server with this number of clients has recovered. Returns false if
    /// clients remain and the log has just reported a fault that the server has not confirmed yet.
    pub(super) fn has_recovered(&self, clients: usize, now: Instant) -> bool {
        let is_pending = |current: &CurrentFault| {
            !current.confirmed && clients > 0 && now.saturating_duration_since(current.began) < FAULT_CONFIRMATION_TIME
        };
        !self.current.as_ref().is_some_and(is_pending)
    }

    /// Ends the current fault. Returns the duration of the fault, or `None` if no fault is in
    /// progress.
    pub(super) fn end_fault(&mut self, now: Instant) -> Option<Duration> {
        let current = self.current.take()?;
        if let Some(fault) = &mut self.last {
            fault.over = true;
        }
        self.ended_at = Some(now);
        // During a fault, the server recreates its contexts, so it breaks no later client.
        self.unclean = false;
        Some(now.saturating_duration_since(current.began))
    }

    /// Records a client that exited with an open context. Do not call this method during a fault,
    /// because all clients then exit with open contexts.
    pub(super) fn record_exit(&mut self, client: Client, now: Instant) {
        self.unclean = true;
        self.exited.retain(|exited| {
            exited.client.pid != client.pid && now.saturating_duration_since(exited.at) < MAX_TIME_FROM_KILL_TO_FAULT
        });
        self.exited.push(ExitedClient { client, at: now });
    }

    /// Returns the step to perform now against the current fault, and the time since the fault
    /// began. Returns `None` if no step is due.
    pub(super) fn next_step(&mut self, clients: usize, now: Instant) -> Option<(EscalationStep, Duration)> {
        let current = self.current.as_mut()?;
        let at = now.saturating_duration_since(current.began);
        Some((current.escalation.advance(at, clients)?, at))
    }

    /// Records clients that were signalled because they did not exit.
    pub(super) fn record_signalled(&mut self, clients: Vec<Client>) {
        let Some(fault) = &mut self.last else { return };
        for client in clients {
            if !fault.ended.contains(&client) {
                fault.ended.push(client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client_with_pid(pid: u32) -> Client {
        Client { pid, allocation: Some(format!("{pid:02x}")) }
    }

    fn exited_client(pid: u32, at: Instant) -> ExitedClient {
        ExitedClient { client: client_with_pid(pid), at }
    }

    fn culprit_pid(faults: &FaultTracker) -> Option<u32> {
        faults.last.as_ref()?.culprit.as_ref().map(|client| client.pid)
    }

    #[test]
    fn several_reports_of_a_fault_count_as_one_fault() {
        let now = Instant::now();
        let mut faults = FaultTracker::default();
        assert!(faults.begin_fault(vec![client_with_pid(1), client_with_pid(2)], now));
        faults.record_named_client(2, None);
        assert!(!faults.begin_fault(vec![client_with_pid(1)], now + MAX_FAULT_LOG_DELAY));
        assert_eq!(culprit_pid(&faults), Some(2));
        assert_eq!(faults.last.as_ref().unwrap().affected, [client_with_pid(1), client_with_pid(2)]);
        assert!(!faults.last.as_ref().unwrap().killed);
        assert_eq!(faults.end_fault(now + MAX_FAULT_LOG_DELAY), Some(MAX_FAULT_LOG_DELAY));
        assert!(faults.end_fault(now + MAX_FAULT_LOG_DELAY).is_none());
        assert!(
            faults.is_late_log_of_ended_fault(now + MAX_FAULT_LOG_DELAY * 3 / 2)
                && !faults.is_late_log_of_ended_fault(now + MAX_FAULT_LOG_DELAY * 2)
        );
        faults.record_named_client(1, None);
        assert_eq!(culprit_pid(&faults), Some(2), "a fault that is over does not change");
        assert!(faults.begin_fault(vec![], now + MAX_FAULT_LOG_DELAY * 2));
        assert_eq!((faults.last.as_ref().unwrap().number, culprit_pid(&faults)), (2, None));
    }

    #[test]
    fn no_culprit_is_reported_if_several_clients_may_be_the_cause() {
        let now = Instant::now();
        let mut faults = FaultTracker::default();
        faults.begin_fault(vec![client_with_pid(1), client_with_pid(2)], now);
        faults.record_named_client(1, None);
        faults.record_named_client(1, None);
        assert_eq!(culprit_pid(&faults), Some(1));
        faults.record_named_client(2, None);
        assert_eq!(culprit_pid(&faults), None);
        let mut faults =
            FaultTracker { exited: vec![exited_client(1, now), exited_client(2, now)], ..FaultTracker::default() };
        faults.begin_fault(vec![client_with_pid(3)], now);
        assert_eq!(culprit_pid(&faults), None);
        assert_eq!(faults.last.unwrap().affected.len(), 3);
    }

    #[test]
    fn a_client_killed_just_before_a_fault_is_the_culprit_even_if_the_log_names_another_client() {
        let now = Instant::now();
        let mut faults = FaultTracker { exited: vec![exited_client(1, now)], ..FaultTracker::default() };
        faults.begin_fault(vec![client_with_pid(2)], now + MAX_TIME_FROM_KILL_TO_FAULT / 2);
        assert_eq!((culprit_pid(&faults), faults.last.as_ref().unwrap().killed), (Some(1), true));
        faults.record_named_client(2, None);
        assert_eq!(
            (culprit_pid(&faults), faults.last.as_ref().unwrap().killed),
            (Some(1), true),
            "the log names a survivor"
        );
        let mut faults = FaultTracker { exited: vec![exited_client(1, now)], ..FaultTracker::default() };
        faults.begin_fault(vec![client_with_pid(2)], now + MAX_TIME_FROM_KILL_TO_FAULT);
        assert_eq!(culprit_pid(&faults), None, "too long ago");
    }

    #[test]
    fn a_logged_fault_takes_precedence_over_the_state_active_for_a_second() {
        let now = Instant::now();
        let mut faults = FaultTracker::default();
        assert!(faults.has_recovered(3, now));
        faults.begin_fault(vec![client_with_pid(1)], now);
        assert!(!faults.has_recovered(1, now + FAULT_CONFIRMATION_TIME / 2));
        assert!(faults.has_recovered(0, now + FAULT_CONFIRMATION_TIME / 2), "all clients have exited");
        assert!(faults.has_recovered(1, now + FAULT_CONFIRMATION_TIME), "the server did not confirm it");
        faults.current.as_mut().unwrap().confirmed = true;
        assert!(faults.has_recovered(1, now), "the server confirmed it and has recovered");
    }
}
