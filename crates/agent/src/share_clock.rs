//! Counts share-seconds: the number of a holder's shares, multiplied by the seconds for which the
//! holder has them. Pure: callers pass in the time.
use std::collections::BTreeMap;
use std::time::Instant;

/// The current shares of each holder, and the time up to which share-seconds are counted.
#[derive(Debug, Clone)]
pub struct ShareClock<K> {
    held: BTreeMap<K, u32>,
    counted_until: Option<Instant>,
}

impl<K> Default for ShareClock<K> {
    fn default() -> Self {
        Self { held: BTreeMap::new(), counted_until: None }
    }
}

impl<K: Ord> ShareClock<K> {
    /// Returns the share-seconds of each holder since the last call. Returns 0 for each holder at
    /// the first call, or if the time has not advanced.
    pub fn advance(&mut self, now: Instant) -> impl Iterator<Item = (&K, f64)> {
        let before = self.counted_until.replace(now).unwrap_or(now);
        let seconds = now.saturating_duration_since(before).as_secs_f64();
        self.held.iter().map(move |(holder, shares)| (holder, f64::from(*shares) * seconds))
    }

    /// Replaces the holders and their shares, and returns the previous ones. Call [`Self::advance`]
    /// with the current time first. Otherwise the time since the last call of `advance` counts for
    /// the new holders.
    pub fn replace(&mut self, held: BTreeMap<K, u32>) -> BTreeMap<K, u32> {
        std::mem::replace(&mut self.held, held)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Advances the clock and adds the share-seconds of each holder to `total`.
    fn count_share_seconds(
        clock: &mut ShareClock<&'static str>,
        now: Instant,
        total: &mut BTreeMap<&'static str, f64>,
    ) {
        for (holder, seconds) in clock.advance(now) {
            *total.entry(holder).or_default() += seconds;
        }
    }

    #[test]
    fn share_seconds_are_counted_from_the_allocation_to_its_end() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let (mut clock, mut total) = (ShareClock::default(), BTreeMap::new());
        count_share_seconds(&mut clock, at(0), &mut total);
        clock.replace(BTreeMap::from([("a", 3)]));
        // A scrape between two changes of allocations calls the clock at second 4.
        count_share_seconds(&mut clock, at(4), &mut total);
        count_share_seconds(&mut clock, at(10), &mut total);
        let ended = clock.replace(BTreeMap::from([("a", 1), ("b", 2)]));
        assert_eq!(ended, BTreeMap::from([("a", 3)]));
        count_share_seconds(&mut clock, at(15), &mut total);
        clock.replace(BTreeMap::new());
        count_share_seconds(&mut clock, at(100), &mut total);
        assert_eq!(total, BTreeMap::from([("a", 35.0), ("b", 10.0)]));
        // The total would not decrease even if the monotonic clock went back.
        clock.replace(BTreeMap::from([("a", 1)]));
        count_share_seconds(&mut clock, at(50), &mut total);
        assert_eq!(total, BTreeMap::from([("a", 35.0), ("b", 10.0)]));
    }
}
