//! Counts how long pods wait for GPUs, by reason. Pure: callers pass in the time.
use std::collections::BTreeMap;
use std::time::Instant;

/// The number of waiting pods for each reason, and the time until which their waiting time is
/// counted.
#[derive(Debug, Clone, Default)]
pub(crate) struct WaitClock {
    waiting: BTreeMap<&'static str, u32>,
    counted_until: Option<Instant>,
}

impl WaitClock {
    /// Returns the waiting time of all pods since the last call, in seconds, by reason.
    pub(crate) fn advance(&mut self, now: Instant) -> impl Iterator<Item = (&'static str, f64)> {
        let before = self.counted_until.replace(now).unwrap_or(now);
        let seconds = now.saturating_duration_since(before).as_secs_f64();
        self.waiting.iter().map(move |(reason, pods)| (*reason, f64::from(*pods) * seconds))
    }

    /// Replaces the numbers of waiting pods. Call [`Self::advance`] before.
    pub(crate) fn replace(&mut self, waiting: BTreeMap<&'static str, u32>) {
        self.waiting = waiting;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn waiting_time_is_counted_for_each_reason_at_each_read() {
        let start = Instant::now();
        let (mut clock, mut total) = (WaitClock::default(), BTreeMap::new());
        let mut count = |clock: &mut WaitClock, at: u64| {
            for (reason, seconds) in clock.advance(start + Duration::from_secs(at)) {
                *total.entry(reason).or_insert(0.0) += seconds;
            }
        };
        count(&mut clock, 0);
        clock.replace(BTreeMap::from([("no_room", 3)]));
        count(&mut clock, 4);
        count(&mut clock, 5);
        clock.replace(BTreeMap::from([("no_room", 1), ("malformed", 2)]));
        count(&mut clock, 10);
        clock.replace(BTreeMap::new());
        count(&mut clock, 100);
        assert_eq!(total, BTreeMap::from([("no_room", 20.0), ("malformed", 10.0)]));
    }
}
