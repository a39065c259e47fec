//! Tests that temporary obstacles do not make the operator release or strand a pod, and that the
//! operator recreates or reports stranded pods.
use std::time::Duration;

use cleave_api::names::CONDITION_PLACED;
use cleave_plan::affinity::HOSTNAME;
use serde_json::{Value, json};

use super::world::{TestCluster, add_replica_set_pod, nodes_of, reconcile, refuse, released};
use crate::placement::claims::{MAX_RENEWALS, RESERVATION_TIME};
use crate::placement::gatekeeper::{Gatekeeper, UNSCHEDULABLE_AFTER};
use crate::placement::stranded::{MISSING_NODE_DELAY, Recreation, StrandedActions};

/// Seconds after which a pod that fits no GPU is released.
const UNSCHEDULABLE_SECONDS: u64 = UNSCHEDULABLE_AFTER.as_secs();

/// A change of the cluster.
type ClusterChange = fn(&mut TestCluster);

fn change_node(world: &mut TestCluster, edit: impl FnOnce(&mut Value)) {
    world.change(|world| &mut world.nodes, "n1", edit);
}

fn taint_node(world: &mut TestCluster, key: &str) {
    change_node(world, |node| node["spec"]["taints"] = json!([{"key": key, "effect": "NoSchedule"}]));
}

fn taint_as_not_ready(world: &mut TestCluster) {
    taint_node(world, "node.kubernetes.io/not-ready");
}

fn untaint_node(world: &mut TestCluster) {
    change_node(world, |node| node["spec"]["taints"] = json!([]));
}

#[test]
fn a_pod_remains_gated_during_a_temporary_obstacle_of_any_length() {
    let cases: [(&str, ClusterChange, ClusterChange); 5] = [
        (
            "is cordoned",
            |world| change_node(world, |node| node["spec"]["unschedulable"] = json!(true)),
            |world| change_node(world, |node| node["spec"]["unschedulable"] = json!(false)),
        ),
        (
            "has the taint node.kubernetes.io/not-ready, which the pod does not tolerate",
            taint_as_not_ready,
            untaint_node,
        ),
        (
            "has the taint node.kubernetes.io/memory-pressure, which the pod does not tolerate",
            |world| taint_node(world, "node.kubernetes.io/memory-pressure"),
            untaint_node,
        ),
        (
            "has the taint cleave.dev/unhealthy, which the pod does not tolerate",
            |world| taint_node(world, "cleave.dev/unhealthy"),
            untaint_node,
        ),
        (
            "does not have enough CPU, memory or another resource",
            |world| change_node(world, |node| node["status"]["allocatable"]["pods"] = json!("0")),
            |world| change_node(world, |node| node["status"]["allocatable"]["pods"] = json!("9")),
        ),
    ];
    for (why, begins, ends) in cases {
        let mut world = TestCluster::default().node("n1", &[0]).pod("a", 2);
        begins(&mut world);
        let mut keeper = Gatekeeper::default();
        for second in [0, 3, UNSCHEDULABLE_SECONDS, 10 * UNSCHEDULABLE_SECONDS] {
            let actions = reconcile(&mut keeper, &world, second);
            assert_eq!(released(&actions), [], "{why}");
            let message = &actions.waiting["team/a"].message;
            assert_eq!(*message, format!("No eligible GPU node: 1 node (n1) {why}"));
        }
        ends(&mut world);
        assert_eq!(
            released(&reconcile(&mut keeper, &world, 10 * UNSCHEDULABLE_SECONDS + 1)),
            [("team/a", "reserved")],
            "{why}"
        );
    }
}

#[test]
fn no_pod_is_released_while_a_policy_or_a_gpu_node_is_absent_for_a_short_time() {
    // The kubelet continues to report the shares for some seconds.
    let cases: [(&str, ClusterChange); 2] = [
        ("the policy", |world| {
            world.change(|world| &mut world.gpu_nodes, "n1", |node| node["status"]["gpus"][0]["slices"] = json!([]));
        }),
        ("the GpuNode", |world| drop(world.gpu_nodes.remove("n1"))),
    ];
    for (what, goes) in cases {
        let mut world = TestCluster::default().node("n1", &[0]).pod("a", 2);
        let before = world.gpu_nodes.clone();
        goes(&mut world);
        let mut keeper = Gatekeeper::default();
        for second in [0, 3, UNSCHEDULABLE_SECONDS - 1] {
            assert_eq!(released(&reconcile(&mut keeper, &world, second)), [], "{what}");
        }
        world.version += 1;
        world.gpu_nodes = before;
        world.change(|world| &mut world.gpu_nodes, "n1", |_| ());
        assert_eq!(
            released(&reconcile(&mut keeper, &world, UNSCHEDULABLE_SECONDS)),
            [("team/a", "reserved")],
            "{what}"
        );
    }
}

#[test]
fn a_pod_that_requests_a_resource_of_another_plugin_is_released() {
    let mig = json!({"containers": [{"resources": {"limits": {"nvidia.com/mig-1g.10gb": "1"}}}]});
    let mut world = TestCluster::default().node("n1", &[0]).pod_with("a", 1, mig);
    change_node(&mut world, |node| node["status"]["allocatable"]["nvidia.com/mig-1g.10gb"] = json!("7"));
    let mut keeper = Gatekeeper::default();
    assert_eq!(released(&reconcile(&mut keeper, &world, 0)), []);
    assert_eq!(released(&reconcile(&mut keeper, &world, UNSCHEDULABLE_SECONDS)), [("team/a", "not_managed")]);
}

/// Returns a cluster whose pod, with or without a controller, is released to n1 and not bound. Also
/// returns the gatekeeper.
fn cluster_with_pod_released_to_n1(owned: bool) -> (TestCluster, Gatekeeper) {
    let world = TestCluster::default().node("n1", &[0]);
    let mut world = if owned { add_replica_set_pod(world, "a", json!({})) } else { world.pod("a", 2) };
    let mut keeper = Gatekeeper::default();
    assert!(world.apply_release(&reconcile(&mut keeper, &world, 0).releases[0]));
    let actions = reconcile(&mut keeper, &world, 1);
    assert_eq!(
        (&actions.stranded.recreate, &actions.stranded.placed_reports),
        (&vec![], &vec![]),
        "the scheduler may still bind it"
    );
    (world, keeper)
}

#[test]
fn a_released_pod_whose_node_no_longer_accepts_it_is_recreated() {
    let full: ClusterChange = |world| change_node(world, |node| node["status"]["allocatable"]["pods"] = json!("0"));
    let cases: [(&str, ClusterChange, Duration); 4] = [
        ("no longer exist: n1.", |world| drop(world.nodes.remove("n1")), MISSING_NODE_DELAY),
        (
            "n1: cordoned.",
            |world| change_node(world, |node| node["spec"]["unschedulable"] = json!(true)),
            UNSCHEDULABLE_AFTER,
        ),
        (
            "n1: the pod does not tolerate the taint node.kubernetes.io/not-ready.",
            taint_as_not_ready,
            UNSCHEDULABLE_AFTER,
        ),
        ("n1: not enough CPU, memory or another resource.", full, UNSCHEDULABLE_AFTER),
    ];
    for (why, happens, after) in cases {
        let (mut world, mut keeper) = cluster_with_pod_released_to_n1(true);
        happens(&mut world);
        let actions = reconcile(&mut keeper, &world, 2);
        assert_eq!((&actions.stranded.recreate, actions.requeue), (&vec![], Some(after)), "{why}");
        let actions = reconcile(&mut keeper, &world, 2 + after.as_secs());
        let [Recreation { pod, uid, version, message }] = actions.stranded.recreate.as_slice() else {
            panic!("{why}: {actions:?}")
        };
        let meta = &world.pods["team/a"]["metadata"];
        assert_eq!((pod.as_str(), uid.as_str()), ("team/a", meta["uid"].as_str().unwrap()));
        assert_eq!(version, meta["resourceVersion"].as_str().unwrap(), "the eviction requires this version");
        assert!(message.contains(why) && message.contains("ReplicaSet web recreates it"), "{message}");
    }
}

#[test]
fn a_reservation_is_renewed_while_the_scheduler_has_not_refused_the_pod() {
    // The scheduler is down, or waits for a volume.
    let (mut world, mut keeper) = cluster_with_pod_released_to_n1(true);
    for times in 1..4 {
        let actions = reconcile(&mut keeper, &world, times * RESERVATION_TIME.as_secs());
        assert_eq!(actions.stranded.recreate, [], "after {times}");
        assert!(keeper.ledger().unwrap().claim("team/a").is_some());
    }
    let actions = reconcile(&mut Gatekeeper::default(), &world, 4 * RESERVATION_TIME.as_secs());
    assert_eq!(actions.stranded.recreate, [], "an operator that starts later makes the same decision");
    // No other pod receives the shares of pod `a`.
    let full = world.clone().pod("b", 9);
    assert_eq!(released(&reconcile(&mut keeper, &full, 4 * RESERVATION_TIME.as_secs())), []);
    refuse(&mut world, "team/a");
    assert_eq!(
        reconcile(&mut keeper, &world, 5 * RESERVATION_TIME.as_secs()).stranded.recreate.len(),
        1,
        "the scheduler refused it"
    );
}

#[test]
fn a_pod_whose_reservation_ends_is_recreated_or_gets_a_condition() {
    let (mut world, mut keeper) = cluster_with_pod_released_to_n1(true);
    refuse(&mut world, "team/a");
    assert_eq!(
        reconcile(&mut keeper, &world, RESERVATION_TIME.as_secs() - 1).stranded.recreate,
        [],
        "the reservation has not ended"
    );
    assert_eq!(reconcile(&mut keeper, &world, RESERVATION_TIME.as_secs()).stranded.recreate.len(), 1);
    assert_eq!(
        reconcile(&mut Gatekeeper::default(), &world, RESERVATION_TIME.as_secs()).stranded.recreate.len(),
        1,
        "a new leader makes the same decision"
    );
    let (mut world, mut keeper) = cluster_with_pod_released_to_n1(false);
    refuse(&mut world, "team/a");
    let stranded_actions = reconcile(&mut keeper, &world, RESERVATION_TIME.as_secs()).stranded;
    assert_eq!(stranded_actions.recreate, [], "no controller recreates the pod");
    let message = stranded_actions.placed_reports[0].message.as_deref().unwrap();
    assert!(message.contains("did not bind this pod to n1") && message.contains("Delete and recreate it"), "{message}");
    // The scheduler later binds the pod, and the condition becomes true.
    world.change(
        |world| &mut world.pods,
        "team/a",
        |pod| {
            pod["spec"]["nodeName"] = json!("n1");
            pod["status"]["conditions"] = json!([{"type": CONDITION_PLACED, "status": "False"}]);
        },
    );
    let stranded_actions = reconcile(&mut keeper, &world, RESERVATION_TIME.as_secs() + 1).stranded;
    assert_eq!(stranded_actions.placed_reports.iter().map(|one| &one.message).collect::<Vec<_>>(), [&None]);
}

#[test]
fn a_pod_that_the_scheduler_nominated_to_its_node_is_not_stranded() {
    let (mut world, mut keeper) = cluster_with_pod_released_to_n1(true);
    change_node(&mut world, |node| node["status"]["allocatable"]["pods"] = json!("0"));
    world.change(|world| &mut world.pods, "team/a", |pod| pod["status"]["nominatedNodeName"] = json!("n1"));
    refuse(&mut world, "team/a");
    reconcile(&mut keeper, &world, 2);
    assert_eq!(reconcile(&mut keeper, &world, UNSCHEDULABLE_SECONDS + 60).stranded.recreate, []);
    assert_eq!(
        reconcile(&mut keeper, &world, RESERVATION_TIME.as_secs() + 60).stranded.recreate,
        [],
        "also after its reservation ended"
    );
}

#[test]
fn a_pod_released_as_unschedulable_is_recreated_once_a_gpu_is_large_enough() {
    let mut world =
        add_replica_set_pod(TestCluster::default().node("n1", &[10]), "a", json!({"nodeSelector": {"gen": "9"}}));
    let mut keeper = Gatekeeper::default();
    reconcile(&mut keeper, &world, 0);
    let actions = reconcile(&mut keeper, &world, UNSCHEDULABLE_SECONDS);
    assert_eq!(released(&actions), [("team/a", "unschedulable")]);
    assert!(world.apply_release(&actions.releases[0]));
    let affinity = world.pods["team/a"]["spec"]["affinity"].to_string();
    assert!(
        affinity.contains("largest.cleave.dev/gpu-mps"),
        "n1 must not run the pod without a reservation once n1 has the label: {affinity}"
    );
    assert_eq!(
        reconcile(&mut keeper, &world, UNSCHEDULABLE_SECONDS + 100).stranded,
        StrandedActions::default(),
        "nothing has changed"
    );
    // The GPU is full, but the operator still evicts the pod. Its replacement waits at the gate in
    // order of priority.
    change_node(&mut world, |node| node["metadata"]["labels"]["gen"] = json!("9"));
    reconcile(&mut keeper, &world, 2 * UNSCHEDULABLE_SECONDS);
    let stranded_actions =
        reconcile(&mut keeper, &world, 2 * UNSCHEDULABLE_SECONDS + MISSING_NODE_DELAY.as_secs()).stranded;
    assert!(
        stranded_actions.recreate[0].message.contains("released as unschedulable, but it would fit on a GPU now"),
        "{stranded_actions:?}"
    );
}

#[test]
fn a_pod_whose_resource_no_node_serves_is_released_to_any_node() {
    let mut world = TestCluster::default().pod("a", 2);
    let mut keeper = Gatekeeper::default();
    assert_eq!(released(&reconcile(&mut keeper, &world, 0)), []);
    let actions = reconcile(&mut keeper, &world, UNSCHEDULABLE_SECONDS);
    assert_eq!(released(&actions), [("team/a", "unschedulable")]);
    assert!(world.apply_release(&actions.releases[0]));
    let pod = &world.pods["team/a"];
    assert_eq!(
        (pod["spec"].get("affinity"), &pod["metadata"]["annotations"]),
        (None, &json!({"cleave.dev/unschedulable": "true"}))
    );
}

#[test]
fn a_pod_of_a_job_is_recreated_if_its_node_is_removed_after_its_reservation_ended() {
    let (mut world, mut keeper) = cluster_with_pod_released_to_n1(true);
    world.change(|world| &mut world.pods, "team/a", |pod| pod["metadata"]["ownerReferences"][0]["kind"] = json!("Job"));
    refuse(&mut world, "team/a");
    reconcile(&mut keeper, &world, 1);
    let stranded_actions = reconcile(&mut keeper, &world, RESERVATION_TIME.as_secs()).stranded;
    assert_eq!(
        (stranded_actions.recreate.len(), stranded_actions.placed_reports.len()),
        (0, 1),
        "the Job would count a failure, and the node may still run the pod"
    );
    world.nodes.remove("n1");
    reconcile(&mut keeper, &world, RESERVATION_TIME.as_secs() + 1);
    let stranded_actions = reconcile(&mut keeper, &world, RESERVATION_TIME.as_secs() + 30).stranded;
    assert_eq!(stranded_actions.recreate.len(), 1, "{stranded_actions:?}");
}

#[test]
fn a_temporary_obstacle_when_a_reservation_ends_strands_no_pod() {
    let (mut world, mut keeper) = cluster_with_pod_released_to_n1(false);
    taint_as_not_ready(&mut world);
    let stranded_actions = reconcile(&mut keeper, &world, RESERVATION_TIME.as_secs()).stranded;
    assert_eq!((stranded_actions.recreate, stranded_actions.placed_reports), (vec![], vec![]));
    untaint_node(&mut world);
    reconcile(&mut keeper, &world, RESERVATION_TIME.as_secs() + 1);
    assert!(keeper.ledger().unwrap().claim("team/a").is_some(), "the pod's shares are still reserved");
}

#[test]
fn a_pod_that_no_scheduler_handles_keeps_its_reservation_for_an_hour() {
    let (world, mut keeper) = cluster_with_pod_released_to_n1(true);
    let mut hours = 1..20;
    let gone = hours
        .find(|times| !reconcile(&mut keeper, &world, times * RESERVATION_TIME.as_secs()).stranded.recreate.is_empty());
    assert_eq!(gone, Some(u64::from(MAX_RENEWALS) + 1));
}

#[test]
fn a_pod_whose_volume_excludes_all_gpus_is_not_recreated() {
    let mounts = json!({"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]});
    let mut world = add_replica_set_pod(TestCluster::default().node("n1", &[0]), "a", mounts);
    world.volume_claims =
        vec![json!({"metadata": {"name": "data", "namespace": "team"}, "spec": {"volumeName": "pv"}})];
    world.volumes =
        vec![json!({"metadata": {"name": "pv"}, "spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": HOSTNAME, "operator": "In", "values": ["elsewhere"]}]}]}}}})];
    let mut keeper = Gatekeeper::default();
    reconcile(&mut keeper, &world, 0);
    let actions = reconcile(&mut keeper, &world, UNSCHEDULABLE_SECONDS);
    assert_eq!(released(&actions), [("team/a", "unschedulable")]);
    assert!(world.apply_release(&actions.releases[0]));
    for second in [2, 3, 10] {
        assert_eq!(reconcile(&mut keeper, &world, second * UNSCHEDULABLE_SECONDS).stranded.recreate, []);
    }
}

#[test]
fn a_pod_that_the_scheduler_did_not_bind_to_a_node_is_released_to_another_node() {
    let mut world = add_replica_set_pod(TestCluster::default().node("n1", &[2]).node("n2", &[0]), "a", json!({}));
    let mut keeper = Gatekeeper::default();
    let actions = reconcile(&mut keeper, &world, 0);
    assert_eq!(nodes_of(&actions), [["n1"]], "the fullest GPU that fits");
    assert!(world.apply_release(&actions.releases[0]));
    refuse(&mut world, "team/a");
    reconcile(&mut keeper, &world, 1);
    assert_eq!(reconcile(&mut keeper, &world, RESERVATION_TIME.as_secs()).stranded.recreate.len(), 1);
    world.pods.clear();
    let world = add_replica_set_pod(world, "again", json!({}));
    assert_eq!(nodes_of(&reconcile(&mut keeper, &world, RESERVATION_TIME.as_secs() + 1)), [["n2"]]);
}
