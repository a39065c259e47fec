//! Decides when to plan. Pure: callers pass in the time since the process started.
use std::collections::BTreeSet;
use std::time::Duration;

/// Delay between the first change of a quiet cluster and the plan. With the delay, one `kubectl
/// apply` of several objects causes one plan.
pub(crate) const FIRST_CHANGE_DELAY: Duration = Duration::from_millis(50);
/// Minimum and maximum time between two plans under load.
const PLAN_INTERVALS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// Maximum time to wait for further pods if a policy sets `dynamic.idle` and no `dynamic.timeout`.
const MAX_GATHERING_TIME: Duration = Duration::from_secs(60);

/// Increases the interval between plans while changes continue, and plans after
/// [`FIRST_CHANGE_DELAY`] when the cluster is quiet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlanPace {
    interval: Duration,
    last: Option<Duration>,
}

impl Default for PlanPace {
    fn default() -> Self {
        Self { interval: PLAN_INTERVALS.0, last: None }
    }
}

impl PlanPace {
    /// Returns the delay between a change and the plan for it.
    pub(crate) fn plan_delay(&mut self, now: Duration) -> Duration {
        let Some(last) = self.last else { return FIRST_CHANGE_DELAY };
        let since = now.saturating_sub(last);
        if since >= self.interval * 2 {
            self.interval = PLAN_INTERVALS.0;
            return FIRST_CHANGE_DELAY;
        }
        self.interval.saturating_sub(since).max(FIRST_CHANGE_DELAY)
    }

    /// Records a plan. `more` states whether further changes arrived during the wait before the
    /// plan.
    pub(crate) fn record_plan(&mut self, now: Duration, more: bool) {
        self.last = Some(now);
        self.interval = if more { (self.interval * 2).min(PLAN_INTERVALS.1) } else { PLAN_INTERVALS.0 };
    }
}

/// Delays plans until no further pods arrive, if a policy sets `dynamic.idle`.
#[derive(Debug, Clone, Default)]
pub(crate) struct QuietPeriod {
    known: BTreeSet<String>,
    first: Option<Duration>,
    last: Option<Duration>,
}

impl QuietPeriod {
    /// Checks whether to plan for these pods now.
    ///
    /// # Errors
    /// Returns the remaining time to wait if it is too early to plan.
    pub(crate) fn check_due<'a>(
        &mut self,
        pods: impl Iterator<Item = &'a str>,
        (idle, timeout): (Option<Duration>, Option<Duration>),
        now: Duration,
    ) -> Result<(), Duration> {
        let pods: BTreeSet<String> = pods.map(str::to_owned).collect();
        let has_new = !pods.is_subset(&self.known);
        self.known = pods;
        let Some(idle) = idle.filter(|idle| !idle.is_zero()) else {
            (self.first, self.last) = (None, None);
            return Ok(());
        };
        if has_new {
            self.last = Some(now);
            self.first.get_or_insert(now);
        }
        let (Some(first), Some(last)) = (self.first, self.last) else { return Ok(()) };
        let until = (last + idle).min(first + timeout.unwrap_or(MAX_GATHERING_TIME));
        if now < until {
            return Err(until.saturating_sub(now));
        }
        (self.first, self.last) = (None, None);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn milliseconds(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn a_change_of_a_quiet_cluster_is_planned_after_a_short_delay() {
        let mut pace = PlanPace::default();
        assert_eq!(pace.plan_delay(milliseconds(0)), FIRST_CHANGE_DELAY);
        pace.record_plan(milliseconds(50), false);
        assert_eq!(pace.plan_delay(milliseconds(5000)), FIRST_CHANGE_DELAY);
    }

    #[test]
    fn plans_are_less_frequent_under_load_and_frequent_again_afterwards() {
        let mut pace = PlanPace::default();
        let mut now = milliseconds(0);
        let mut waits = Vec::new();
        for _ in 0..8 {
            let wait = pace.plan_delay(now);
            now += wait;
            waits.push(wait);
            pace.record_plan(now, true);
        }
        assert_eq!(waits, [50, 200, 400, 800, 1600, 2000, 2000, 2000].map(milliseconds));
        assert_eq!(pace.plan_delay(now + milliseconds(3999)), FIRST_CHANGE_DELAY, "a late change has already waited");
        assert_eq!(pace.plan_delay(now + milliseconds(4000)), FIRST_CHANGE_DELAY);
        pace.record_plan(now + milliseconds(4050), false);
        assert_eq!(pace.plan_delay(now + milliseconds(4060)), milliseconds(90), "the pace is reset");
    }

    #[test]
    fn plans_wait_for_further_pods_as_the_policy_specifies() {
        let mut quiet = QuietPeriod::default();
        let rule = (Some(milliseconds(500)), Some(milliseconds(800)));
        assert_eq!(quiet.check_due([].into_iter(), rule, milliseconds(0)), Ok(()), "no pod waits");
        assert_eq!(quiet.check_due(["a"].into_iter(), rule, milliseconds(0)), Err(milliseconds(500)));
        assert_eq!(quiet.check_due(["a"].into_iter(), rule, milliseconds(400)), Err(milliseconds(100)));
        assert_eq!(
            quiet.check_due(["a", "b"].into_iter(), rule, milliseconds(450)),
            Err(milliseconds(350)),
            "the longest wait counts from the first pod"
        );
        assert_eq!(quiet.check_due(["a", "b"].into_iter(), rule, milliseconds(800)), Ok(()));
        assert_eq!(quiet.check_due(["a", "b"].into_iter(), rule, milliseconds(801)), Ok(()), "both pods are known");
        assert_eq!(quiet.check_due(["b", "c"].into_iter(), rule, milliseconds(900)), Err(milliseconds(500)));
        assert_eq!(
            quiet.check_due(["d"].into_iter(), (None, None), milliseconds(901)),
            Ok(()),
            "without dynamic.idle there is no wait"
        );
    }
}
