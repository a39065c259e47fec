//! Tests that gangs at the gate are reported to cluster autoscalers.
use serde_json::{Value, json};

use super::quotas::Case;
use super::world::{TestCluster, refuse};
use crate::placement::actions::Actions;
use crate::placement::growth::{FULL_AFTER, NO_NODE_AFTER};

/// Returns the pods whose report changes, and whether each pod is now reported.
fn reports(actions: &Actions) -> Vec<(&str, bool)> {
    actions.reports.iter().map(|report| (report.pod.as_str(), report.message.is_some())).collect()
}

/// Reconciles each second. Returns the first reports.
fn first_reports(case: &mut Case, seconds: u64) -> Vec<(String, bool)> {
    for _ in 0..seconds {
        let actions = case.step();
        let reports = reports(&actions).into_iter().map(|(pod, wanted)| (pod.to_owned(), wanted)).collect::<Vec<_>>();
        if !reports.is_empty() {
            return reports;
        }
    }
    Vec::new()
}

fn with_policy(mut case: Case) -> Case {
    case.world = std::mem::take(&mut case.world).policy(10);
    case
}

fn all(wanted: bool) -> Vec<(String, bool)> {
    ["a/g1", "a/g2"].map(|pod| (pod.to_owned(), wanted)).into()
}

/// An autoscaler that knew only one of the pods would plan it for the GPU that is free.
#[test]
fn all_pods_of_a_gang_are_reported_while_the_pool_is_full_and_until_pods_leave_for_it() {
    let mut case = with_policy(
        Case::new(2, &[("a", json!({"min": 20})), ("b", json!({}))])
            .running(&[(("a1", "a", 10, 0), 0)])
            .waiting(&[("g1", "a", 10, 0), ("g2", "a", 10, 0)])
            .gang("a", "train", 2, &["g1", "g2"]),
    );
    let reported = first_reports(&mut case, FULL_AFTER.as_secs() + 2);
    assert_eq!(reported, all(true), "one GPU is free");
    ["a/g1", "a/g2"].into_iter().for_each(|pod| refuse(&mut case.world, pod));
    // Now the gang is within its guarantee, and b borrows both GPUs.
    case.end("a/a1");
    let mut case = case.running(&[(("b1", "b", 10, 0), 0), (("b2", "b", 10, 0), 1)]);
    assert_eq!(first_reports(&mut case, 2), all(false), "{:?}", case.evicted);
    assert_eq!(case.evicted.len(), 2);
}

#[test]
fn a_gang_that_its_quota_keeps_waiting_is_not_reported() {
    let mut case = with_policy(
        Case::new(1, &[("a", json!({"max": 10}))])
            .running(&[(("a1", "a", 5, 0), 0)])
            .waiting(&[("g1", "a", 5, 0), ("g2", "a", 5, 0)])
            .gang("a", "train", 2, &["g1", "g2"]),
    );
    assert_eq!(first_reports(&mut case, 2 * NO_NODE_AFTER.as_secs()), []);
}

/// One more GPU lets the pod borrow.
#[test]
fn a_borrower_to_which_others_do_not_lend_enough_is_reported() {
    let mut case = with_policy(
        Case::new(1, &[("a", json!({"min": 10, "lend": 0})), ("b", json!({}))]).waiting(&[("b1", "b", 5, 0)]),
    );
    assert_eq!(first_reports(&mut case, FULL_AFTER.as_secs() + 2), [("b/b1".to_owned(), true)]);
}

fn select(world: &mut TestCluster, pod: &str, selector: &Value) {
    world.change(|world| &mut world.pods, pod, |pod| pod["spec"]["nodeSelector"] = selector.clone());
}

#[test]
fn a_gang_with_a_pod_that_no_node_may_run_says_so_is_reported_and_is_not_released() {
    let mut case = with_policy(
        Case::new(2, &[("a", json!({"min": 20}))]).waiting(&[("g1", "a", 10, 0), ("g2", "a", 10, 0)]).gang(
            "a",
            "train",
            2,
            &["g1", "g2"],
        ),
    );
    select(&mut case.world, "a/g2", &json!({"zone": "b"}));
    let message = case.step().waiting["a/g1"].message.clone();
    assert!(message.starts_with("The pod a/g2 of the gang fits no GPU:") && message.contains("zone=b"), "{message}");
    assert_eq!(first_reports(&mut case, NO_NODE_AFTER.as_secs() + 2), all(true));
    for _ in 0..10 {
        case.seconds += 60;
        assert!(case.step().releases.is_empty(), "a part of the gang must not run");
    }
}

/// The nodes of a gang appear one after the other.
#[test]
fn a_gang_is_reported_while_some_of_its_nodes_are_missing() {
    let mut case =
        with_policy(Case::new(1, &[("a", json!({}))]).waiting(&[("g1", "a", 10, 0), ("g2", "a", 10, 0)]).gang(
            "a",
            "train",
            2,
            &["g1", "g2"],
        ));
    ["a/g1", "a/g2"].into_iter().for_each(|pod| refuse(&mut case.world, pod));
    assert_eq!(first_reports(&mut case, 30), [], "the reports stay");
}
