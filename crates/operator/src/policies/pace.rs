//! When to plan. Pure: the time is given, since the process started.
use std::collections::BTreeSet;
use std::time::Duration;

/// How long the first change of a quiet cluster waits for others: one `kubectl apply` of several
/// objects is one plan.
pub(crate) const FIRST: Duration = Duration::from_millis(50);
/// The least and the most time between two plans under load.
const BETWEEN: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// How long a policy that says how long to gather, and not how long at most, gathers at most.
const LONGEST: Duration = Duration::from_secs(60);

/// Spreads plans out while changes keep coming, and makes them at once when it is quiet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    between: Duration,
    last: Option<Duration>,
}

impl Default for Pace {
    fn default() -> Self {
        Self { between: BETWEEN.0, last: None }
    }
}

impl Pace {
    /// Something changed: how long to wait before planning.
    pub(crate) fn wait(&mut self, now: Duration) -> Duration {
        let Some(last) = self.last else { return FIRST };
        let since = now.saturating_sub(last);
        if since >= self.between * 2 {
            self.between = BETWEEN.0;
            return FIRST;
        }
        self.between.saturating_sub(since).max(FIRST)
    }

    /// A plan was made; `more` says whether changes kept coming while it was waited for.
    pub(crate) fn planned(&mut self, now: Duration, more: bool) {
        self.last = Some(now);
        self.between = if more { (self.between * 2).min(BETWEEN.1) } else { BETWEEN.0 };
    }
}

/// Waits until no more pods come, where a policy asks for that.
#[derive(Debug, Clone, Default)]
pub(crate) struct Gather {
    known: BTreeSet<String>,
    first: Option<Duration>,
    last: Option<Duration>,
}

impl Gather {
    /// Whether it is time to plan for these pods; if not, when to ask again.
    pub(crate) fn due<'a>(
        &mut self,
        pods: impl Iterator<Item = &'a str>,
        (idle, timeout): (Option<Duration>, Option<Duration>),
        now: Duration,
    ) -> Result<(), Duration> {
        let pods: BTreeSet<String> = pods.map(str::to_owned).collect();
        let come = !pods.is_subset(&self.known);
        self.known = pods;
        let Some(idle) = idle.filter(|idle| !idle.is_zero()) else {
            (self.first, self.last) = (None, None);
            return Ok(());
        };
        if come {
            self.last = Some(now);
            self.first.get_or_insert(now);
        }
        let (Some(first), Some(last)) = (self.first, self.last) else { return Ok(()) };
        let until = (last + idle).min(first + timeout.unwrap_or(LONGEST));
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

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn a_quiet_cluster_is_planned_almost_at_once() {
        let mut pace = Pace::default();
        assert_eq!(pace.wait(ms(0)), FIRST);
        pace.planned(ms(50), false);
        assert_eq!(pace.wait(ms(5000)), FIRST);
    }

    #[test]
    fn plans_get_rarer_while_changes_keep_coming_and_soon_again_when_they_stop() {
        let mut pace = Pace::default();
        let mut now = ms(0);
        let mut waits = Vec::new();
        for _ in 0..8 {
            let wait = pace.wait(now);
            now += wait;
            waits.push(wait);
            pace.planned(now, true);
        }
        assert_eq!(waits, [50, 200, 400, 800, 1600, 2000, 2000, 2000].map(ms));
        assert_eq!(pace.wait(now + ms(3999)), FIRST, "what came late has waited already");
        assert_eq!(pace.wait(now + ms(4000)), FIRST);
        pace.planned(now + ms(4050), false);
        assert_eq!(pace.wait(now + ms(4060)), ms(90), "and the pace is the first again");
    }

    #[test]
    fn pods_are_gathered_as_long_as_the_policy_says() {
        let mut gather = Gather::default();
        let rule = (Some(ms(500)), Some(ms(800)));
        assert_eq!(gather.due([].into_iter(), rule, ms(0)), Ok(()), "nobody waits");
        assert_eq!(gather.due(["a"].into_iter(), rule, ms(0)), Err(ms(500)));
        assert_eq!(gather.due(["a"].into_iter(), rule, ms(400)), Err(ms(100)));
        assert_eq!(
            gather.due(["a", "b"].into_iter(), rule, ms(450)),
            Err(ms(350)),
            "the longest wait is from the first"
        );
        assert_eq!(gather.due(["a", "b"].into_iter(), rule, ms(800)), Ok(()));
        assert_eq!(gather.due(["a", "b"].into_iter(), rule, ms(801)), Ok(()), "those are known");
        assert_eq!(gather.due(["b", "c"].into_iter(), rule, ms(900)), Err(ms(500)));
        assert_eq!(
            gather.due(["d"].into_iter(), (None, None), ms(901)),
            Ok(()),
            "a policy that says nothing waits for nobody"
        );
    }
}
