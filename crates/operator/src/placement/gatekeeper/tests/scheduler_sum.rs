//! Tests that the operator releases no pod to a node whose units the scheduler counts as used. The
//! scheduler counts pods on a faulted GPU, although their units are no longer allocatable.
use serde_json::{Value, json};

use super::world::{ActualAllocations, MPS_RESOURCE, TestCluster, nodes_of, reconcile, refuse, released, reservation};
use crate::placement::gatekeeper::{Gatekeeper, UNSCHEDULABLE_AFTER};
use crate::placement::growth::FULL_AFTER;
use crate::placement::returning::RETURN_TIME;

const TOO_FEW_UNITS_MESSAGE: &str =
    "too few free units in the scheduler's sum, which includes pods on faulted GPUs and pods that terminate";

/// Adds a pod that is bound to `n1` and has shares of a GPU of `n1`.
fn with_bound_pod(mut world: TestCluster, (name, priority): (&str, i32), (gpu, shares): (usize, u32)) -> TestCluster {
    let spec = json!({"nodeName": "n1", "schedulingGates": [], "priority": priority});
    world = world.pod_with(name, shares, spec);
    world.change(
        |world| &mut world.gpu_nodes,
        "n1",
        |node| {
            let gpu = &mut node["status"]["gpus"][gpu];
            let device = gpu["uuid"].as_str().unwrap().to_owned();
            let ids: Vec<String> = (0..shares).map(|id| format!("{device}::{name}-{id}")).collect();
            let allocation = json!({"pod": format!("team/{name}"), "container": "main", "resource": MPS_RESOURCE,
                "device": device, "ids": ids, "clients": 0});
            gpu["allocations"].as_array_mut().unwrap().push(allocation);
            let used = gpu["slices"][0]["inUse"].as_u64().unwrap();
            gpu["slices"][0]["inUse"] = json!(used + u64::from(shares));
        },
    );
    world
}

/// Returns a node with two GPUs of ten shares. The pod `a` has eight shares of the first GPU.
fn two_gpus() -> TestCluster {
    node_with_pods(2, &[("a", 0, 0, 8)])
}

/// Changes the health of the first GPU of `n1`.
fn set_health(world: &mut TestCluster, healthy: bool) {
    world.change(
        |world| &mut world.gpu_nodes,
        "n1",
        |node| {
            let gpu = &mut node["status"]["gpus"][0];
            gpu["health"]["healthy"] = json!(healthy);
            gpu["slices"][0]["unhealthy"] = json!(if healthy { 0 } else { 10 });
        },
    );
}

/// Returns a node with GPUs of ten shares. Each pod has a priority, and shares of one GPU.
fn node_with_pods(gpus: usize, pods: &[(&str, i32, usize, u32)]) -> TestCluster {
    let empty = TestCluster::default().node("n1", &vec![0; gpus]).policy(10);
    let add =
        |world, &(name, priority, gpu, shares): &(_, _, _, _)| with_bound_pod(world, (name, priority), (gpu, shares));
    pods.iter().fold(empty, add)
}

/// Returns the cluster after the first GPU of `n1` has failed, and a gatekeeper that has seen the
/// cluster before.
fn after_fault(mut world: TestCluster) -> (TestCluster, Gatekeeper) {
    let mut keeper = Gatekeeper::default();
    reconcile(&mut keeper, &world, 0);
    set_health(&mut world, false);
    (world, keeper)
}

fn cluster_with_faulted_gpu() -> (TestCluster, Gatekeeper) {
    after_fault(two_gpus())
}

fn set_allocatable(world: &mut TestCluster, shares: u32) {
    world.change(
        |world| &mut world.nodes,
        "n1",
        |node| node["status"]["allocatable"][MPS_RESOURCE] = json!(shares.to_string()),
    );
}

#[test]
fn a_pod_is_released_to_a_node_with_a_faulted_gpu_only_if_the_scheduler_counts_enough_units() {
    let (world, mut keeper) = cluster_with_faulted_gpu();
    let world = world.pod("five", 5).pod("two", 2).pod("other-two", 2);
    let actions = reconcile(&mut keeper, &world, 10);
    assert_eq!(
        released(&actions),
        [("team/other-two", "reserved")],
        "ten shares are allocatable, and pods request eight of them"
    );
    let message = &actions.waiting["team/five"].message;
    assert_eq!(*message, format!("No eligible GPU node: 1 node (n1) has {TOO_FEW_UNITS_MESSAGE}"));
    let actions = reconcile(&mut keeper, &world, 20 + FULL_AFTER.as_secs());
    let reported: Vec<&str> = actions.reports.iter().map(|report| report.pod.as_str()).collect();
    assert_eq!(reported, ["team/five", "team/two"], "an autoscaler that counts like the scheduler adds a node");
}

#[test]
fn a_pod_prefers_a_healthy_node_to_a_node_whose_sum_is_too_small() {
    let (world, mut keeper) = cluster_with_faulted_gpu();
    let actions = reconcile(&mut keeper, &world.node("n2", &[0, 0]).pod("five", 5), 10);
    assert_eq!(nodes_of(&actions), [["n2"]]);
}

#[test]
fn units_return_to_the_sum_when_the_pod_is_deleted_or_the_gpu_is_repaired() {
    let (world, mut keeper) = cluster_with_faulted_gpu();
    let mut deleted = world.clone().pod("five", 5);
    deleted.pods.remove("team/a");
    let actions = reconcile(&mut keeper, &deleted, 10);
    assert_eq!(released(&actions), [("team/five", "reserved")], "the GPU still lists the deleted pod");

    let (mut world, mut keeper) = cluster_with_faulted_gpu();
    set_allocatable(&mut world, 10);
    reconcile(&mut keeper, &world, 10);
    set_health(&mut world, true);
    let actions = reconcile(&mut keeper, &world.pod("five", 5), 11);
    assert_eq!(released(&actions), [("team/five", "reserved")], "the kubelet reports the repair some seconds later");
    assert_eq!(reservation(&actions.releases[0]).nodes["n1"][0].device, "n1-GPU-1");
}

#[test]
fn a_released_pod_whose_node_lost_units_is_stranded_with_the_reason() {
    let mut world = two_gpus().pod("five", 5);
    let owner =
        json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": "set", "controller": true}]);
    world.change(|world| &mut world.pods, "team/five", |pod| pod["metadata"]["ownerReferences"] = owner);
    let mut keeper = Gatekeeper::default();
    let actions = reconcile(&mut keeper, &world, 0);
    assert!(world.apply_release(&actions.releases[0]));
    set_health(&mut world, false);
    refuse(&mut world, "team/five");
    let patience = UNSCHEDULABLE_AFTER.as_secs();
    for second in [1, patience] {
        assert_eq!(reconcile(&mut keeper, &world, second).stranded.recreate, [], "second {second}");
    }
    let stranded_actions = reconcile(&mut keeper, &world, 1 + patience).stranded;
    assert_eq!(stranded_actions.recreate.len(), 1);
    assert!(
        stranded_actions.recreate[0].message.contains(&format!("n1: {TOO_FEW_UNITS_MESSAGE}")),
        "{}",
        stranded_actions.recreate[0].message
    );
}

#[test]
fn pods_are_preempted_only_if_the_scheduler_then_counts_enough_units() {
    let evictions = |shares: u32, wanted: u32| {
        let (world, mut keeper) = after_fault(with_bound_pod(two_gpus(), ("low", 1), (1, shares)));
        let actions = reconcile(&mut keeper, &world.pod_with("high", wanted, json!({"priority": 9})), 10);
        actions.evictions.len()
    };
    assert_eq!(evictions(9, 2), 1, "without the victim, two units remain in the sum");
    assert_eq!(evictions(9, 3), 0, "even without the victim, the sum is too small");
    assert_eq!(evictions(4, 2), 1, "the GPU has room, but the sum has not");
}

#[test]
fn a_nomination_on_a_node_with_a_faulted_gpu_keeps_its_part_of_the_sum() {
    let pods = [("a", 0, 0, 10), ("v1", 1, 1, 3), ("v2", 1, 1, 2), ("w", 9, 1, 5), ("x", 9, 2, 10)];
    let (world, mut keeper) = after_fault(node_with_pods(4, &pods));
    let mut world = world.pod_with("high", 5, json!({"priority": 9}));
    let actions = reconcile(&mut keeper, &world, 10);
    let victims: Vec<&str> = actions.evictions.iter().map(|eviction| eviction.pod.as_str()).collect();
    assert_eq!(victims, ["team/v1", "team/v2"], "thirty shares are allocatable, and pods request all of them");
    world.terminate("team/v2", "2026-01-01T00:00:00Z");
    world.pods.remove("team/v1");
    world.change(
        |world| &mut world.gpu_nodes,
        "n1",
        |node| {
            let gpu = &mut node["status"]["gpus"][1];
            gpu["allocations"].as_array_mut().unwrap().retain(|one| one["pod"] != "team/v1");
            gpu["slices"][0]["inUse"] = json!(7);
        },
    );
    let with = |priority: i32| world.clone().pod_with("three", 3, json!({"priority": priority}));
    let actions = reconcile(&mut keeper, &with(2), 11);
    assert_eq!((released(&actions), actions.evictions.len()), (vec![], 0), "three shares are free for both");
    assert_eq!(released(&reconcile(&mut keeper, &with(10), 12)), [("team/three", "reserved")], "a higher priority");
}

/// The node no longer lists the victim, but the scheduler counts the victim until its object is
/// deleted.
#[test]
fn no_further_pod_is_evicted_while_a_victim_without_units_still_terminates() {
    let pods = [("a", 0, 0, 8), ("victim", 1, 1, 10), ("other", 2, 2, 10)];
    let (world, mut keeper) = after_fault(node_with_pods(3, &pods));
    let mut world = world.pod_with("high", 2, json!({"priority": 9}));
    let actions = reconcile(&mut keeper, &world, 10);
    assert_eq!(actions.evictions.len(), 1);
    world.terminate("team/victim", "2026-01-01T00:00:00Z");
    let end = |gpu: &mut Value| (gpu["allocations"], gpu["slices"][0]["inUse"]) = (json!([]), json!(0));
    world.change(|world| &mut world.gpu_nodes, "n1", |node| end(&mut node["status"]["gpus"][1]));
    let actions = reconcile(&mut keeper, &world, 11);
    assert_eq!((released(&actions), actions.evictions.as_slice()), (vec![], [].as_slice()));
    world.pods.remove("team/victim");
    assert_eq!(released(&reconcile(&mut keeper, &world, 12)), [("team/high", "reserved")]);
}

/// The units of the faulted GPU count in the sum until the object of its pod is deleted.
#[test]
fn no_pod_is_evicted_while_a_pod_on_a_faulted_gpu_terminates() {
    let (mut world, mut keeper) = after_fault(with_bound_pod(two_gpus(), ("low", 1), (1, 4)));
    // The grace period ends at second 30.
    world.terminate("team/a", "1970-01-12T13:47:10Z");
    let mut world = world.pod_with("high", 2, json!({"priority": 9}));
    for second in [1, 89] {
        let actions = reconcile(&mut keeper, &world, second);
        assert_eq!((released(&actions), actions.evictions.len()), (vec![], 0), "second {second}");
    }
    let mut overdue = Gatekeeper::default();
    reconcile(&mut overdue, &world, 80);
    assert_eq!(reconcile(&mut overdue, &world, 91).evictions.len(), 1, "it does not end");
    world.pods.remove("team/a");
    assert_eq!(released(&reconcile(&mut keeper, &world, 90)), [("team/high", "reserved")]);
}

#[test]
fn the_current_sum_does_not_count_for_units_that_return() {
    let mut world = two_gpus();
    world.change(
        |world| &mut world.gpu_nodes,
        "n1",
        |node| {
            for gpu in node["status"]["gpus"].as_array_mut().unwrap() {
                gpu["slices"][0]["unhealthy"] = json!(10);
            }
            let mps = json!({"multiUser": true, "computeMode": "ExclusiveProcess",
                "slices": [{"resource": MPS_RESOURCE, "count": 20}]});
            let gpu = json!({"uuid": "n1-GPU-1", "enforcement": "Report", "partition": {"mps": mps}});
            node["spec"] = json!({"planId": "p", "gpus": [gpu]});
        },
    );
    let world = world.pod("five", 5);
    let mut keeper = Gatekeeper::default();
    for second in [0, FULL_AFTER.as_secs(), RETURN_TIME.as_secs() - 1] {
        assert_eq!(reconcile(&mut keeper, &world, second).reports, [], "second {second}");
    }
    reconcile(&mut keeper, &world, RETURN_TIME.as_secs());
    let actions = reconcile(&mut keeper, &world, RETURN_TIME.as_secs() + FULL_AFTER.as_secs());
    assert_eq!(actions.reports.len(), 1);
}

#[test]
fn a_node_is_tainted_if_only_the_scheduler_sum_has_free_units() {
    // The pods of the first node were deleted by force, and their programs still run.
    let reality = |world: &mut TestCluster| {
        let mut reality = ActualAllocations::default();
        for (pod, device, units) in [("ghost", "n1-GPU-0", 8), ("other", "n1-GPU-1", 8), ("x", "n2-GPU-0", 10)] {
            reality.given.insert(format!("team/{pod}"), (device.to_owned(), units));
        }
        reality.report_on(world, 2);
    };
    let tainted = |edit: fn(&mut TestCluster)| {
        let mut world = TestCluster::default().node("n1", &[0, 0]).node("n2", &[0, 0]).policy(10);
        reality(&mut world);
        for (pod, node, shares) in [("other", "n1", 8), ("x", "n2", 10), ("y", "n2", 10)] {
            world = world.pod_with(pod, shares, json!({"nodeName": node, "schedulingGates": []}));
        }
        edit(&mut world);
        let world = world.pod("five", 5);
        let mut keeper = Gatekeeper::default().with_taints(true);
        reconcile(&mut keeper, &world, 0);
        let actions = reconcile(&mut keeper, &world, FULL_AFTER.as_secs());
        assert_eq!(actions.reported, 1);
        actions.taints.into_iter().map(|change| change.node).collect::<Vec<String>>()
    };
    assert_eq!(tainted(|_| ()), ["n1"], "an autoscaler counts twelve free units");
    let claimed: fn(&mut TestCluster) = |world| {
        let placement = json!({"until": 1_000_290, "nodes": {"n1": []}}).to_string();
        *world = std::mem::take(world).pod_with("released", 8, json!({"schedulingGates": []}));
        let annotate = |pod: &mut Value| pod["metadata"]["annotations"] = json!({"cleave.dev/placement": placement});
        world.change(|world| &mut world.pods, "team/released", annotate);
    };
    assert_eq!(tainted(claimed), [""; 0], "a released pod is about to use eight of them");
    let away: fn(&mut TestCluster) = |world| drop(world.agents.remove("n1"));
    assert_eq!(tainted(away), [""; 0], "without an agent, the kubelet advertises no units");
}
