//! Tests which pods are evicted for pods of higher priority.
use std::time::Duration;

use serde_json::json;

use super::world::{ActualAllocations, TestCluster, reconcile, released};
use crate::placement::gatekeeper::Gatekeeper;

#[test]
fn a_pod_preempts_one_of_lower_priority_and_gets_its_shares() {
    let mut world = TestCluster::default().node("n1", &[0, 0]);
    let mut reality = ActualAllocations::default();
    for (name, units, device, priority) in [("low", 7, 0, 1), ("other", 9, 1, 5), ("small", 3, 0, 3)] {
        world = world.pod_with(name, units, json!({"nodeName": "n1", "schedulingGates": [], "priority": priority}));
        reality.given.insert(format!("team/{name}"), (format!("n1-GPU-{device}"), units));
    }
    reality.report(&mut world);
    let mut world = world.pod_with("high", 6, json!({"priority": 9}));
    let mut keeper = Gatekeeper::default();
    let actions = reconcile(&mut keeper, &world, 0);
    let evicted: Vec<(&str, &str)> =
        actions.evictions.iter().map(|eviction| (eviction.pod.as_str(), eviction.preemptor.as_str())).collect();
    assert_eq!(
        (evicted, released(&actions)),
        (vec![("team/low", "team/high")], vec![]),
        "the pod of lowest priority, and no more than needed"
    );
    let uid = world.pods["team/low"]["metadata"]["uid"].as_str().unwrap();
    assert_eq!(actions.evictions[0].uid, uid);
    world.change(
        |world| &mut world.pods,
        "team/low",
        |pod| pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"),
    );
    assert_eq!(reconcile(&mut keeper, &world, 1).evictions, [], "the victim terminates");
    world.pods.remove("team/low");
    reality.given.remove("team/low");
    reality.report(&mut world);
    let world = world.pod_with("newcomer", 6, json!({"priority": 2}));
    let actions = reconcile(&mut keeper, &world, 2);
    assert_eq!(
        (released(&actions), actions.waiting.len()),
        (vec![("team/high", "reserved")], 1),
        "the freed shares are kept for the preemptor"
    );
}

#[test]
fn a_pod_of_equal_priority_or_with_preemption_policy_never_preempts_no_pod() {
    for (spec, why) in [
        (json!({"priority": 9, "preemptionPolicy": "Never"}), "the pod's policy forbids preemption"),
        (json!({"priority": 1}), "equal priority"),
    ] {
        let mut world = TestCluster::default().node("n1", &[0, 0]).pod_with(
            "low",
            7,
            json!({"nodeName": "n1", "schedulingGates": [], "priority": 1}),
        );
        let mut reality = ActualAllocations::default();
        reality.given.insert("team/low".into(), ("n1-GPU-0".into(), 7));
        reality.given.insert("kube-system/other".into(), ("n1-GPU-1".into(), 7));
        reality.report(&mut world);
        let actions = reconcile(&mut Gatekeeper::default(), &world.pod_with("a", 6, spec), 0);
        assert_eq!((actions.evictions, actions.waiting.len()), (vec![], 1), "{why}");
    }
}

/// Two pods, each on its own GPU. One of them must be evicted for a third pod.
fn high_behind_two() -> (TestCluster, ActualAllocations) {
    let mut world = TestCluster::default().node("n1", &[0, 0]);
    let mut reality = ActualAllocations::default();
    for (name, device) in [("first", 0), ("second", 1)] {
        world = world.pod_with(name, 7, json!({"nodeName": "n1", "schedulingGates": [], "priority": 1}));
        reality.given.insert(format!("team/{name}"), (format!("n1-GPU-{device}"), 7));
    }
    reality.report(&mut world);
    (world.pod_with("high", 6, json!({"priority": 9})), reality)
}

#[test]
fn a_pod_that_a_budget_protects_is_evicted_only_if_no_other_can_be() {
    let (world, _) = high_behind_two();
    let mut keeper = Gatekeeper::default().with_reports(false);
    let first = reconcile(&mut keeper, &world, 0).evictions[0].pod.clone();
    keeper.record_protection(&first, Duration::ZERO);
    let second = reconcile(&mut keeper, &world, 1).evictions[0].pod.clone();
    assert_ne!(first, second);
    keeper.record_protection(&second, Duration::from_secs(1));
    let protected = reconcile(&mut keeper, &world, 2);
    assert_eq!(
        (protected.evictions, protected.requeue),
        (vec![], Some(Duration::from_secs(28))),
        "both pods are protected"
    );
    let again = reconcile(&mut keeper, &world, 30);
    assert_eq!(again.evictions[0].pod, first, "the protection has ended");
}

#[test]
fn no_other_pod_is_evicted_for_shares_that_a_deleted_pod_frees() {
    let (mut world, mut reality) = high_behind_two();
    let mut keeper = Gatekeeper::default();
    let first = reconcile(&mut keeper, &world, 0).evictions[0].pod.clone();
    // The node of the deleted pod has not reported that its shares are free.
    world.pods.remove(&first);
    let actions = reconcile(&mut keeper, &world, 1);
    assert_eq!((actions.evictions, actions.waiting.len()), (vec![], 1));
    reality.given.remove(&first);
    reality.report(&mut world);
    assert_eq!(released(&reconcile(&mut keeper, &world, 2)), [("team/high", "reserved")]);
}
