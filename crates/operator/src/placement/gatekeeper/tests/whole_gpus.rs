//! Tests that pods that request whole GPUs wait for a reservation, like pods that request shares.
use std::collections::BTreeMap;

use serde_json::json;

use super::world::{TestCluster, at, nodes_of, reconcile, released, requesting, whole_gpus};
use crate::placement::actions::{Actions, ReleaseReason};
use crate::placement::gatekeeper::{Gatekeeper, UNSCHEDULABLE_AFTER};
use crate::policies::demand::{Reason, WaitingPod};

/// Begins or ends an obstacle.
type ClusterChange<'a> = &'a dyn Fn(&mut TestCluster, bool);

/// Adds a pod at the gate that requests `count` whole GPUs.
fn with_whole_gpu_pod(world: TestCluster, name: &str, count: u32) -> TestCluster {
    world.pod_with(name, 1, requesting("nvidia.com/gpu", count))
}

/// Returns the message of a waiting pod.
fn waiting_message<'a>(actions: &'a Actions, pod: &str) -> &'a str {
    &actions.waiting[pod].message
}

#[test]
fn the_whole_gpus_of_a_pod_are_reserved_on_one_node() {
    let world = whole_gpus(TestCluster::default(), "n1", &[0, 1, 0, 1]);
    let world = whole_gpus(world, "n2", &[1, 1, 0, 0]);
    let mut world = with_whole_gpu_pod(with_whole_gpu_pod(with_whole_gpu_pod(world, "a", 2), "b", 2), "c", 1);
    let mut keeper = Gatekeeper::default();
    let actions = reconcile(&mut keeper, &world, 0);
    assert_eq!(released(&actions), [("team/a", "reserved"), ("team/b", "reserved")], "no GPU is left for c");
    assert_eq!(nodes_of(&actions), [["n1"], ["n2"]]);
    assert!(waiting_message(&actions, "team/c").contains("no device has 1 nvidia.com/gpu free"), "{actions:?}");
    assert!(world.apply_release(&actions.releases[0]));
    let placement = TestCluster::placement(&world.pods["team/a"]).unwrap();
    assert_eq!(placement.nodes, BTreeMap::from([("n1".to_owned(), vec![])]), "whole GPUs are only counted");
    assert_eq!(released(&reconcile(&mut keeper, &world, 1)), [], "both reservations are kept");
    assert_eq!(released(&reconcile(&mut Gatekeeper::default(), &world, 2)), [("team/b", "reserved")], "a new leader");
}

#[test]
fn a_request_that_exceeds_the_free_gpus_of_each_node_reports_their_number() {
    let world = with_whole_gpu_pod(whole_gpus(TestCluster::default(), "n1", &[0, 1, 0, 1]), "a", 3);
    let world = with_whole_gpu_pod(whole_gpus(world, "n2", &[0]), "b", 5);
    let mut keeper = Gatekeeper::default();
    let actions = reconcile(&mut keeper, &world, 0);
    assert_eq!(waiting_message(&actions, "team/a"), "no node has 3 nvidia.com/gpu free: one node has 2");
    assert_eq!(waiting_message(&actions, "team/b"), "no node has 5 nvidia.com/gpu: the largest has 4");
    let mut actions = reconcile(&mut keeper, &world, UNSCHEDULABLE_AFTER.as_secs());
    assert_eq!(released(&actions), [("team/b", "unschedulable")]);
    let operations = actions.releases.remove(0).patch;
    let changes_affinity = |operation: &serde_json::Value| operation["path"].as_str().unwrap().contains("affinity");
    assert!(!operations.as_array().unwrap().iter().any(changes_affinity), "the scheduler counts whole GPUs");
}

#[test]
fn a_pod_waits_while_its_gpu_is_repartitioned_cordoned_or_unhealthy() {
    let status = |world: &mut TestCluster, key: &str, value| {
        world.change(|world| &mut world.gpu_nodes, "n1", |node| node["status"]["gpus"][0][key] = value);
    };
    let spec: ClusterChange<'_> = &|world, begins| {
        let replicas = json!({"timeSlicing": {"resource": "nvidia.com/gpu-timeslice", "replicas": 4}});
        let gpu = json!({"uuid": "n1-GPU-0", "enforcement": "Report", "partition": replicas});
        let spec = if begins { json!({"planId": "p", "gpus": [gpu]}) } else { json!({}) };
        world.change(|world| &mut world.gpu_nodes, "n1", |node| node["spec"] = spec);
    };
    let cordon: ClusterChange<'_> = &|world, begins| {
        let cordons = if begins { json!({"cleave.dev/cordon": "n1-GPU-0=new fan"}) } else { json!({}) };
        world.change(|world| &mut world.gpu_nodes, "n1", |node| node["metadata"]["annotations"] = cordons);
    };
    let health: ClusterChange<'_> = &|world, begins| status(world, "health", json!({"healthy": !begins}));
    for change in [spec, cordon, health] {
        let mut world = with_whole_gpu_pod(whole_gpus(TestCluster::default(), "n1", &[0]), "a", 1);
        change(&mut world, true);
        let mut keeper = Gatekeeper::default();
        for second in [0, 5, 10 * UNSCHEDULABLE_AFTER.as_secs()] {
            let actions = reconcile(&mut keeper, &world, second);
            assert_eq!(released(&actions), []);
            assert_eq!(waiting_message(&actions, "team/a"), "no device has 1 nvidia.com/gpu free: the emptiest has 0");
        }
        change(&mut world, false);
        let later = 11 * UNSCHEDULABLE_AFTER.as_secs();
        assert_eq!(released(&reconcile(&mut keeper, &world, later)), [("team/a", "reserved")]);
    }
}

#[test]
fn a_pod_waits_for_gpus_that_become_whole_on_demand_if_one_node_has_enough_gpus() {
    let world =
        with_whole_gpu_pod(with_whole_gpu_pod(whole_gpus(TestCluster::default(), "n1", &[0]), "two", 2), "three", 3);
    let mut world = world;
    // The node's second GPU has shares, and its policy repartitions it on demand.
    world.change(
        |world| &mut world.gpu_nodes,
        "n1",
        |node| {
            let mut second = node["status"]["gpus"][0].clone();
            second["uuid"] = json!("n1-GPU-1");
            second["slices"] = json!([{"device": "n1-GPU-1", "resource": "nvidia.com/gpu-mps", "total": 10, "inUse": 1, "unhealthy": 0}]);
            node["status"]["gpus"].as_array_mut().unwrap().push(second);
        },
    );
    let waits = || WaitingPod { reason: Reason::NoRoom, message: "planned".into() };
    let demand = BTreeMap::from(["team/two", "team/three"].map(|pod| (pod.to_owned(), waits())));
    let mut keeper = Gatekeeper::default();
    keeper.reconcile(&world.cluster(), &demand, at(0));
    let actions = keeper.reconcile(&world.cluster(), &demand, at(UNSCHEDULABLE_AFTER.as_secs()));
    assert_eq!(released(&actions), [("team/three", "unschedulable")]);
    assert_eq!(waiting_message(&actions, "team/two"), "planned");
    assert!(matches!(&actions.releases[0].reason, ReleaseReason::Unschedulable(why) if why.contains("no node has 3")));
}
