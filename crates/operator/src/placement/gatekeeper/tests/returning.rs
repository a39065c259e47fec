//! Tests units that are briefly unavailable, because an agent restarts, a GPU is being
//! repartitioned, or a pod was deleted before its node reported it.
use serde_json::json;

use super::world::{ActualAllocations, MPS_RESOURCE, TestCluster, reconcile, released, requesting, whole_gpus};
use crate::placement::actions::Actions;
use crate::placement::gatekeeper::Gatekeeper;
use crate::placement::growth::{FULL_AFTER, MAX_PREEMPTION_PAUSE};
use crate::placement::returning::RETURN_TIME;

fn set_agent_ready(world: &mut TestCluster, node: &str, ready: bool) {
    let status = if ready { "True" } else { "False" };
    let change = |agent: &mut serde_json::Value| agent["status"]["conditions"][0]["status"] = json!(status);
    world.change(|world| &mut world.agents, node, change);
}

fn victims(actions: &Actions) -> Vec<&str> {
    actions.evictions.iter().map(|eviction| eviction.pod.as_str()).collect()
}

fn pods_with_reports(actions: &Actions) -> Vec<&str> {
    actions.reports.iter().map(|report| report.pod.as_str()).collect()
}

/// Returns an empty node `n1` whose agent is not ready, and a node `n2` with a pod of low priority.
/// Each node has one GPU. The pod `high` fits on `n1`, or on `n2` without the other pod.
fn node_without_agent() -> TestCluster {
    let low = json!({"nodeName": "n2", "schedulingGates": [], "priority": 0});
    let mut world = TestCluster::default().node("n1", &[0]).node("n2", &[0]).policy(10).pod_with("low", 6, low);
    let mut reality = ActualAllocations::default();
    reality.given.insert("team/low".to_owned(), ("n2-GPU-0".to_owned(), 6));
    reality.report_on(&mut world, 1);
    set_agent_ready(&mut world, "n1", false);
    world.pod_with("high", 6, json!({"priority": 1000}))
}

#[test]
fn no_pod_is_evicted_while_the_agent_of_a_node_with_free_units_is_briefly_not_ready() {
    let mut world = node_without_agent();
    let mut keeper = Gatekeeper::default();
    let first = reconcile(&mut keeper, &world, 0);
    assert_eq!(victims(&first), [""; 0]);
    assert!(first.requeue.is_some_and(|requeue| requeue <= MAX_PREEMPTION_PAUSE), "{:?}", first.requeue);
    let mut returned = world.clone();
    set_agent_ready(&mut returned, "n1", true);
    assert_eq!(released(&reconcile(&mut keeper, &returned, 5)), [("team/high", "reserved")]);

    world = world.pod_with("next", 6, json!({"priority": 10}));
    let mut keeper = Gatekeeper::default();
    let first = reconcile(&mut keeper, &world, 0);
    let evictions: Vec<&str> = first.evictions.iter().map(|eviction| eviction.preemptor.as_str()).collect();
    assert_eq!(evictions, ["team/next"], "n1 has room for one of the pods");
}

#[test]
fn pods_are_evicted_if_the_agent_does_not_return_or_its_units_serve_another_pod() {
    let world = node_without_agent().pod_with("other", 6, json!({"priority": 0}));
    let pause = MAX_PREEMPTION_PAUSE.as_secs();
    let mut keeper = Gatekeeper::default();
    for (second, reported) in [(0, 0), (pause - 1, 1)] {
        let actions = reconcile(&mut keeper, &world, second);
        assert_eq!((victims(&actions), actions.reported), (vec![], reported), "second {second}");
    }
    for second in [pause, pause + 1] {
        let actions = reconcile(&mut keeper, &world, second);
        assert_eq!((actions.evictions.len(), actions.reported), (1, 0), "n1 will have room for the other pod");
    }
}

#[test]
fn a_gpu_that_waits_long_for_its_repartitioning_does_not_shorten_the_wait_for_an_agent() {
    let mut world = whole_gpus(TestCluster::default(), "n1", &[0, 0]).policy(10);
    let mps = json!({"multiUser": true, "computeMode": "ExclusiveProcess", "slices": [{"resource": MPS_RESOURCE, "count": 10}]});
    let gpu = json!({"uuid": "n1-GPU-0", "enforcement": "Report", "partition": {"mps": mps}});
    world.change(|world| &mut world.gpu_nodes, "n1", |node| node["spec"] = json!({"planId": "p", "gpus": [gpu]}));
    let mut keeper = Gatekeeper::default();
    reconcile(&mut keeper, &world, 0);
    let away = 3600;
    set_agent_ready(&mut world, "n1", false);
    // The first pod fits the other GPU, and the second pod fits the GPU after its repartitioning.
    let world = world.pod_with("whole", 0, requesting("nvidia.com/gpu", 1)).pod("shares", 5);
    reconcile(&mut keeper, &world, away);
    let full = FULL_AFTER.as_secs();
    assert_eq!(pods_with_reports(&reconcile(&mut keeper, &world, away + full)), ["team/shares"]);
    let returned = away + RETURN_TIME.as_secs();
    for second in [returned - 1, returned] {
        assert!(!pods_with_reports(&reconcile(&mut keeper, &world, second)).contains(&"team/whole"), "second {second}");
    }
    assert!(pods_with_reports(&reconcile(&mut keeper, &world, returned + full)).contains(&"team/whole"));
}

#[test]
fn a_pod_does_not_wait_for_the_agent_of_a_node_that_still_lists_its_predecessor() {
    let low = json!({"nodeName": "n2", "schedulingGates": [], "priority": 0});
    let mut world = TestCluster::default().node("n1", &[0, 0]).node("n2", &[0, 0]);
    let mut reality = ActualAllocations::default();
    for (name, device) in [("low-0", "n2-GPU-0"), ("low-1", "n2-GPU-1")] {
        world = world.pod_with(name, 6, low.clone());
        reality.given.insert(format!("team/{name}"), (device.to_owned(), 6));
    }
    reality.given.insert("team/web-0".to_owned(), ("n1-GPU-0".to_owned(), 6));
    reality.report(&mut world);
    let mut keeper = Gatekeeper::default();
    reconcile(&mut keeper, &world, 0);
    set_agent_ready(&mut world, "n1", false);
    for name in ["web-0", "web-1"] {
        world = world.pod_with(name, 6, json!({"priority": 1000}));
    }
    let actions = reconcile(&mut keeper, &world, 100);
    let evictions: Vec<&str> = actions.evictions.iter().map(|eviction| eviction.preemptor.as_str()).collect();
    assert_eq!(evictions, ["team/web-0"], "the other pod waits for n1");
}

/// Returns a node with two GPUs, and a gatekeeper that has seen the node. The pod `batch` of low
/// priority uses 6 shares of one GPU. The pod `kept` of high priority uses a share of the other
/// GPU. The pod `gone` has 6 shares of the other GPU, which the node has not reported.
fn unreported_pod(is_bound: bool) -> (TestCluster, Gatekeeper) {
    let on_n1 = json!({"nodeName": "n1", "schedulingGates": [], "priority": 0});
    let kept = json!({"nodeName": "n1", "schedulingGates": [], "priority": 2000});
    let world = TestCluster::default().node("n1", &[0, 0]).policy(10);
    let mut world = world.pod_with("batch", 6, on_n1.clone()).pod_with("kept", 1, kept);
    let mut reality = ActualAllocations::default();
    for (name, device, shares) in [("batch", "n1-GPU-1", 6), ("kept", "n1-GPU-0", 1)] {
        reality.given.insert(format!("team/{name}"), (device.to_owned(), shares));
    }
    reality.report(&mut world);
    let mut keeper = Gatekeeper::default();
    reconcile(&mut keeper, &world, 0);
    if is_bound {
        world = world.pod_with("gone", 6, on_n1);
    } else {
        world = world.pod_with("gone", 6, json!({"priority": 2000}));
        let release = reconcile(&mut keeper, &world, 1).releases.remove(0);
        assert!(world.apply_release(&release));
    }
    reconcile(&mut keeper, &world, 99);
    (world, keeper)
}

/// The shares count as used for 5 s, because the pod may still use them.
#[test]
fn no_pod_is_evicted_for_shares_of_a_deleted_pod_that_its_node_has_not_reported() {
    for (is_bound, is_recreated) in [(true, false), (false, false), (true, true), (false, true)] {
        let (mut world, mut keeper) = unreported_pod(is_bound);
        world.pods.remove("team/gone");
        if is_recreated {
            world = world.pod_with("gone", 6, json!({"priority": 0}));
        }
        let world = world.pod_with("high", 6, json!({"priority": 1000}));
        for second in [100, 104] {
            let actions = reconcile(&mut keeper, &world, second);
            assert_eq!((victims(&actions), released(&actions)), (vec![], vec![]), "second {second}, bound: {is_bound}");
            assert!(actions.requeue.is_some_and(|requeue| requeue.as_secs() <= 105 - second), "{:?}", actions.requeue);
        }
        assert_eq!(released(&reconcile(&mut keeper, &world, 105)), [("team/high", "reserved")]);
    }
}

#[test]
fn pods_are_evicted_immediately_if_the_shares_of_a_deleted_pod_do_not_suffice() {
    // The shares of the deleted pod serve one of two pods.
    let (mut world, mut keeper) = unreported_pod(true);
    world.pods.remove("team/gone");
    let two = world.pod_with("high", 6, json!({"priority": 1000})).pod_with("next", 6, json!({"priority": 10}));
    let actions = reconcile(&mut keeper, &two, 100);
    let evictions: Vec<(&str, &str)> =
        actions.evictions.iter().map(|eviction| (eviction.preemptor.as_str(), eviction.pod.as_str())).collect();
    assert_eq!(evictions, [("team/next", "team/batch")]);
    // Another pod uses a share of the same GPU.
    let (mut world, mut keeper) = unreported_pod(true);
    world.pods.remove("team/gone");
    let world = world.pod_with("high", 10, json!({"priority": 1000}));
    assert_eq!(victims(&reconcile(&mut keeper, &world, 100)), ["team/batch"]);
}
