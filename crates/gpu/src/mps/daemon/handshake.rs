//! Evaluates clients' handshakes as evidence of a daemon's protocol. Pure: the time is an argument.
use std::time::Duration;

use tokio::time::Instant;

use crate::mps::drivers::DriverEvidence;

/// Time after the last unexpected reply at which the MPS host stops reporting that clients are
/// held. Without a waiting client, no reply arrives that could prove the daemon's protocol. While a
/// client waits, a reply arrives several times per second, or after each restart of the daemon.
/// Restarts have a delay of at most 30 s.
const MAX_REPORT_TIME: Duration = Duration::from_secs(60);

/// Number of consecutive connections that must end unexpectedly before the MPS host draws a
/// conclusion about the daemon. A single unexpected packet concerns only its connection.
pub(super) const MIN_UNEXPECTED_ENDS: u32 = 3;

/// The replies of a daemon to clients' handshakes.
#[derive(Debug)]
pub(super) struct HandshakeRecord {
    /// Evidence for the protocol of the driver under the running daemon.
    driver: DriverEvidence,
    /// Whether the running daemon has connected a client. If so, no later reply makes the protocol
    /// unknown.
    succeeded: bool,
    /// Number of unexpected replies of the running daemon since its last expected reply.
    unexpected_replies: u32,
    /// Time of the latest unexpected reply while the MPS host reports that clients are held. `None`
    /// if the status reports no held clients. An expected reply ends the report, but a restart of
    /// the daemon does not.
    held_at: Option<Instant>,
    /// Whether the report about held clients ended because no reply arrived for
    /// [`MAX_REPORT_TIME`]. False again after an expected reply, after a restart of the daemon, and
    /// while the status reports held clients.
    unproven: bool,
}

impl Default for HandshakeRecord {
    fn default() -> Self {
        let driver = DriverEvidence::Assumed;
        Self { driver, succeeded: false, unexpected_replies: 0, held_at: None, unproven: false }
    }
}

impl HandshakeRecord {
    /// Records the start of a daemon. The new daemon's handshakes must prove its protocol.
    pub(super) fn start_daemon(&mut self, driver: DriverEvidence) {
        *self = Self { driver, held_at: self.held_at, ..Self::default() };
    }

    /// Records that a client was connected.
    pub(super) fn record_connected_client(&mut self) {
        self.succeeded = true;
        self.unexpected_replies = 0;
    }

    /// Records an expected reply to a client. Returns whether the status reported held clients or
    /// unproven replies until now.
    pub(super) fn record_expected_reply(&mut self) -> bool {
        self.unexpected_replies = 0;
        let were_held = self.held_at.take().is_some();
        std::mem::take(&mut self.unproven) || were_held
    }

    /// Records an unexpected reply to a client. Returns whether the status reports held clients
    /// from now on.
    pub(super) fn record_unexpected_reply(&mut self, now: Instant) -> bool {
        self.unexpected_replies = self.unexpected_replies.saturating_add(1);
        let were_held = self.held_at.is_some();
        if self.are_latest_replies_unexpected() || were_held {
            self.held_at = Some(now);
            self.unproven = false;
        }
        self.are_latest_replies_unexpected() && !were_held
    }

    /// Ends the report about held clients. Call this method when no client is waiting at a door.
    pub(super) fn end_report(&mut self) {
        self.unexpected_replies = 0;
        self.held_at = None;
        self.unproven = false;
    }

    /// Ends the report about held clients if no reply has arrived for [`MAX_REPORT_TIME`]. Returns
    /// whether the report ends.
    pub(super) fn expire_report(&mut self, now: Instant) -> bool {
        let is_over = |at: Instant| now.saturating_duration_since(at) >= MAX_REPORT_TIME;
        if self.held_at.is_some_and(is_over) {
            self.end_report();
            self.unproven = true;
            return true;
        }
        false
    }

    /// Returns whether the running daemon's protocol is unknown: the driver was not measured, no
    /// client was connected, and the latest replies are all unexpected.
    pub(super) fn is_protocol_unknown(&self) -> bool {
        self.are_latest_replies_unexpected() && !self.succeeded && self.driver == DriverEvidence::Assumed
    }

    /// Returns whether the last replies, at least [`MIN_UNEXPECTED_ENDS`] in a row, are unexpected.
    fn are_latest_replies_unexpected(&self) -> bool {
        self.unexpected_replies >= MIN_UNEXPECTED_ENDS
    }

    /// Returns whether the report about held clients ended without an expected reply.
    pub(super) fn are_replies_unproven(&self) -> bool {
        self.unproven
    }

    /// Returns whether the status reports that doors hold clients.
    pub(super) fn are_clients_held(&self) -> bool {
        self.held_at.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the record of a daemon that sent this number of unexpected replies.
    fn record_after(driver: DriverEvidence, unexpected: u32, now: Instant) -> HandshakeRecord {
        let mut record = HandshakeRecord::default();
        record.start_daemon(driver);
        for _ in 0..unexpected {
            record.record_unexpected_reply(now);
        }
        record
    }

    #[test]
    fn three_unexpected_replies_make_the_protocol_unknown_only_for_unmeasured_drivers() {
        let now = Instant::now();
        for (driver, unexpected, expected) in [
            (DriverEvidence::Assumed, 2, (false, false)),
            (DriverEvidence::Assumed, 3, (true, true)),
            (DriverEvidence::Measured, 2, (false, false)),
            (DriverEvidence::Measured, 3, (false, true)),
        ] {
            let record = record_after(driver, unexpected, now);
            assert_eq!((record.is_protocol_unknown(), record.are_clients_held()), expected, "{driver:?} {unexpected}");
        }
        let mut served = record_after(DriverEvidence::Assumed, 0, now);
        served.record_connected_client();
        let changes: Vec<bool> = (0..4).map(|_| served.record_unexpected_reply(now)).collect();
        assert_eq!((served.is_protocol_unknown(), changes), (false, vec![false, false, true, false]));
    }

    #[test]
    fn only_consecutive_unexpected_replies_count() {
        let now = Instant::now();
        let mut record = record_after(DriverEvidence::Assumed, 2, now);
        assert!(!record.record_expected_reply());
        record.record_unexpected_reply(now);
        record.record_unexpected_reply(now);
        assert!(!record.is_protocol_unknown() && !record.are_clients_held());
        record.record_unexpected_reply(now);
        assert!(record.record_expected_reply() && !record.are_clients_held());
    }

    #[test]
    fn a_restart_makes_the_protocol_known_but_clients_are_held_until_an_expected_reply() {
        let now = Instant::now();
        let mut record = record_after(DriverEvidence::Assumed, 3, now);
        record.start_daemon(DriverEvidence::Assumed);
        assert_eq!((record.is_protocol_unknown(), record.are_clients_held()), (false, true));
        record.record_unexpected_reply(now);
        assert!(!record.is_protocol_unknown(), "one reply of this daemon");
        assert!(record.record_expected_reply() && !record.are_clients_held());
    }

    #[test]
    fn a_client_that_is_connected_after_unexpected_replies_proves_the_protocol() {
        let now = Instant::now();
        let mut record = record_after(DriverEvidence::Assumed, 3, now);
        assert!(record.is_protocol_unknown());
        assert!(record.record_expected_reply());
        record.record_connected_client();
        assert!(!record.is_protocol_unknown());
        for _ in 0..4 {
            record.record_unexpected_reply(now);
        }
        assert!(!record.is_protocol_unknown() && record.are_clients_held());
    }

    #[test]
    fn the_report_expires_when_no_replies_arrive() {
        let now = Instant::now();
        let mut record = record_after(DriverEvidence::Measured, 3, now);
        record.end_report();
        record.start_daemon(DriverEvidence::Measured);
        assert!(!record.are_clients_held() && !record.are_replies_unproven());
        assert!(!record.record_unexpected_reply(now), "earlier replies no longer count");
    }

    #[test]
    fn a_report_that_ends_without_an_expected_reply_proves_nothing() {
        let now = Instant::now();
        let expired = || {
            let mut record = record_after(DriverEvidence::Measured, 3, now);
            assert!(!record.are_replies_unproven());
            assert!(record.expire_report(now + MAX_REPORT_TIME) && record.are_replies_unproven());
            record
        };
        let mut proven = expired();
        assert!(proven.record_expected_reply() && !proven.are_replies_unproven());
        assert!(!proven.record_expected_reply(), "nothing changed");
        let mut restarted = expired();
        restarted.start_daemon(DriverEvidence::Measured);
        assert!(!restarted.are_replies_unproven());
        let mut held = expired();
        for _ in 0..3 {
            held.record_unexpected_reply(now);
        }
        assert!(held.are_clients_held() && !held.are_replies_unproven());
        let mut measured = record_after(DriverEvidence::Measured, 3, now);
        assert!(measured.record_expected_reply() && !measured.are_replies_unproven());
    }

    #[test]
    fn the_report_ends_once_no_client_waits() {
        let now = Instant::now();
        let mut record = record_after(DriverEvidence::Measured, 3, now);
        let later = now + MAX_REPORT_TIME / 2;
        assert!(!record.expire_report(later));
        record.start_daemon(DriverEvidence::Measured);
        assert!(!record.record_unexpected_reply(later), "it was reported before");
        assert!(!record.expire_report(now + MAX_REPORT_TIME), "the latest reply is newer");
        assert!(record.expire_report(later + MAX_REPORT_TIME) && !record.are_clients_held());
        assert!(!record.record_unexpected_reply(later + MAX_REPORT_TIME), "earlier replies no longer count");
    }
}
