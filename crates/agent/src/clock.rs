//! The time for decisions and the time of day for people.
use std::time::Instant;

use k8s_openapi::jiff::{SignedDuration, Timestamp};

/// When something happened: for deciding, and for telling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// For deciding.
    pub now: Instant,
    /// For telling.
    pub wall: Timestamp,
}

/// The time of day at one moment of the clock that decides, so that times that are told need not be
/// passed everywhere. The moment is to be a recent one: the time of day may be set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clock {
    from: Stamp,
}

impl Clock {
    /// It is `wall` at `now`.
    pub fn new(now: Instant, wall: Timestamp) -> Self {
        Self { from: Stamp { now, wall } }
    }

    /// What time it is at `now`.
    pub fn stamp(self, now: Instant) -> Stamp {
        let since = SignedDuration::try_from(now.saturating_duration_since(self.from.now)).unwrap_or_default();
        Stamp { now, wall: self.from.wall.saturating_add(since).unwrap_or(self.from.wall) }
    }
}
