//! Combines monotonic time for decisions with the time of day for reports.
use std::time::Instant;

use k8s_openapi::jiff::{SignedDuration, Timestamp};

/// The time of an event on the monotonic clock and the system clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventTime {
    /// Monotonic time, for decisions.
    pub now: Instant,
    /// Time of day, for reports.
    pub wall: Timestamp,
}

/// Converts instants to the time of day, based on one instant with a known time of day. Update the
/// known instant often, because an administrator may change the system clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clock {
    from: EventTime,
}

impl Clock {
    /// Creates a clock whose time of day at `now` is `wall`.
    pub fn new(now: Instant, wall: Timestamp) -> Self {
        Self { from: EventTime { now, wall } }
    }

    /// Returns `now` together with its time of day.
    pub fn event_time(self, now: Instant) -> EventTime {
        let since = SignedDuration::try_from(now.saturating_duration_since(self.from.now)).unwrap_or_default();
        EventTime { now, wall: self.from.wall.saturating_add(since).unwrap_or(self.from.wall) }
    }
}
