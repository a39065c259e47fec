//! Measures how long nodes take to serve a changed `GpuNode.spec`. Pure: callers pass in the time.
use std::collections::BTreeMap;
use std::time::Duration;

/// The changes that nodes have not completed. Times are durations since the process started.
#[derive(Debug, Default)]
pub(crate) struct Repartitions(BTreeMap<String, Repartition>);

#[derive(Debug)]
struct Repartition {
    /// The newest plan of the node.
    plan_id: String,
    /// When this process wrote the first plan that the node has not completed.
    since: Duration,
}

impl Repartitions {
    /// Records that a changed spec was written. If the node has not completed the previous change,
    /// both changes count as one repartitioning.
    pub(crate) fn record_write(&mut self, node: &str, plan_id: &str, now: Duration) {
        let new = || Repartition { plan_id: String::new(), since: now };
        self.0.entry(node.to_owned()).or_insert_with(new).plan_id = plan_id.to_owned();
    }

    /// Returns the durations of repartitionings that were completed since the last call. `plan_of`
    /// returns the plan that a node serves, or `None` for a node that no longer exists.
    pub(crate) fn take_completed<'a>(
        &mut self,
        plan_of: impl Fn(&str) -> Option<&'a str>,
        now: Duration,
    ) -> Vec<Duration> {
        let mut completed = Vec::new();
        self.0.retain(|node, repartition| match plan_of(node) {
            None => false,
            Some(plan_id) if plan_id == repartition.plan_id => {
                completed.push(now.saturating_sub(repartition.since));
                false
            }
            Some(_) => true,
        });
        completed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repartitioning_lasts_from_the_first_write_until_the_node_serves_the_newest_plan() {
        let seconds = Duration::from_secs;
        let mut repartitions = Repartitions::default();
        repartitions.record_write("n", "p1", seconds(10));
        repartitions.record_write("removed", "p1", seconds(10));
        let mut completed =
            |plan: &'static str, at| repartitions.take_completed(|node| (node == "n").then_some(plan), seconds(at));
        assert!(completed("p0", 11).is_empty());
        assert_eq!(completed("p1", 15), [seconds(5)]);
        assert!(completed("p1", 16).is_empty(), "counted once");
        repartitions.record_write("n", "p2", seconds(20));
        repartitions.record_write("n", "p3", seconds(25));
        let mut completed =
            |plan: &'static str, at| repartitions.take_completed(|node| (node == "n").then_some(plan), seconds(at));
        assert!(completed("p2", 30).is_empty(), "an older plan");
        assert_eq!(completed("p3", 50), [seconds(30)]);
    }
}
