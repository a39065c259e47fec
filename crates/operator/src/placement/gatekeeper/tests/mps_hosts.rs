//! Tests when MPS hosts are replaced.
use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

use super::world::{MPS_RESOURCE, TestCluster, at, nodes_of_replaced_mps_hosts, reconcile, released, revision};
use crate::placement::cluster::ReconcileTime;
use crate::placement::gatekeeper::Gatekeeper;

#[test]
fn no_share_is_reserved_on_a_node_once_its_outdated_mps_host_is_found_idle() {
    let mut world = TestCluster::default().node("n1", &[0, 0]).mps_host("n1", "old").pod("a", 2);
    let mut keeper = Gatekeeper::default();
    let actions = reconcile(&mut keeper, &world, 0);
    assert_eq!((released(&actions), nodes_of_replaced_mps_hosts(&actions)), (vec![], vec![]));
    let message = &actions.waiting["team/a"].message;
    assert!(message.ends_with("; nodes whose MPS host is being replaced or is not ready: n1"), "{message}");
    assert_eq!(actions.requeue, Some(Duration::from_secs(2)));
    let actions = reconcile(&mut keeper, &world, 2);
    assert_eq!((released(&actions), nodes_of_replaced_mps_hosts(&actions)), (vec![], vec!["n1"]));
    let step = actions.rollout.unwrap();
    keeper.rollout.record_replacement(&step.replace[0], at(2).up);
    world.hosts = Some(BTreeMap::new());
    assert_eq!(released(&reconcile(&mut keeper, &world, 10)), [], "the MPS host is deleted");
    // A new leader makes the same decision.
    assert_eq!(released(&reconcile(&mut Gatekeeper::default(), &world, 11)), []);
    world = world.mps_host("n1", "new");
    let actions = reconcile(&mut keeper, &world, 12);
    assert_eq!(
        (released(&actions), nodes_of_replaced_mps_hosts(&actions)),
        (vec![("team/a", "reserved")], vec![]),
        "the new MPS host serves"
    );
}

#[test]
fn an_outdated_mps_host_is_kept_while_a_pod_has_shares_or_a_reservation_and_serves_others() {
    let mut world = TestCluster::default().node("n1", &[0]).pod("a", 2);
    let mut keeper = Gatekeeper::default();
    let actions = reconcile(&mut keeper, &world, 0);
    assert!(world.apply_release(&actions.releases[0]));
    world = world.mps_host("n1", "old");
    let stays = |keeper: &mut Gatekeeper, world: &TestCluster, second: u64| {
        let actions = reconcile(keeper, world, second);
        assert_eq!(nodes_of_replaced_mps_hosts(&actions), [""; 0]);
        assert!(!keeper.rollout.is_withheld("n1"), "{actions:?}");
        actions.rollout.unwrap().waiting["n1"].clone()
    };
    assert_eq!(stays(&mut keeper, &world, 1), "team/a has a reservation");
    world.change(|world| &mut world.pods, "team/a", |pod| pod["spec"]["nodeName"] = json!("n1"));
    assert_eq!(stays(&mut keeper, &world, 10), "team/a has a reservation", "the node has not reported the allocation");
    assert_eq!(
        stays(&mut Gatekeeper::default(), &world, 11),
        "team/a has a reservation",
        "a new leader makes the same decision"
    );
    world.change(
        |world| &mut world.gpu_nodes,
        "n1",
        |node| {
            let gpu = &mut node["status"]["gpus"][0];
            gpu["slices"][0]["inUse"] = json!(2);
            gpu["allocations"] = json!([{"pod": "team/a", "container": "main", "resource": MPS_RESOURCE, "device": "n1-GPU-0", "ids": ["0", "1"]}]);
        },
    );
    assert_eq!(stays(&mut keeper, &world, 20), "team/a has 2 nvidia.com/gpu-mps");
    world = world.pod("b", 8);
    assert_eq!(released(&reconcile(&mut keeper, &world, 30)), [("team/b", "reserved")]);
    // All pods are deleted.
    world.pods.clear();
    world.change(
        |world| &mut world.gpu_nodes,
        "n1",
        |node| {
            let gpu = &mut node["status"]["gpus"][0];
            (gpu["slices"][0]["inUse"], gpu["allocations"]) = (json!(0), json!([]));
        },
    );
    reconcile(&mut keeper, &world, 40);
    reconcile(&mut keeper, &world, 50);
    assert_eq!(nodes_of_replaced_mps_hosts(&reconcile(&mut keeper, &world, 60)), ["n1"]);
}

#[test]
fn an_mps_host_is_replaced_on_a_node_whose_gpus_are_cordoned_or_time_sliced() {
    let cordoned = json!({"cleave.dev/cordon": "n1-GPU-0,n1-GPU-1=until its MPS host is upgraded"});
    let mut world = TestCluster::default()
        .node("n1", &[0, 0])
        .node("n2", &[0])
        .mps_host("n1", "old")
        .mps_host("n2", "new")
        .pod("a", 2);
    world.change(|world| &mut world.gpu_nodes, "n1", |node| node["metadata"]["annotations"] = cordoned);
    let mut keeper = Gatekeeper::default();
    assert_eq!(released(&reconcile(&mut keeper, &world, 0)), [("team/a", "reserved")], "the other node has room");
    assert_eq!(nodes_of_replaced_mps_hosts(&reconcile(&mut keeper, &world, 2)), ["n1"]);
    // Time-slicing needs no MPS host.
    let replicas = "nvidia.com/gpu-timeslice";
    let mut world = TestCluster::default().node("n1", &[0]).mps_host("n1", "old");
    world.change(
        |world| &mut world.gpu_nodes,
        "n1",
        |node| {
            let gpu = &mut node["status"]["gpus"][0];
            gpu["slices"] =
                json!([{"device": "n1-GPU-0", "resource": replicas, "total": 4, "inUse": 3, "unhealthy": 0}]);
        },
    );
    let one = json!({"containers": [{"resources": {"limits": {replicas: "1"}}}]});
    world = world.pod_with("t", 1, one);
    let mut keeper = Gatekeeper::default();
    assert_eq!(released(&reconcile(&mut keeper, &world, 0)), [("team/t", "reserved")], "only MPS shares are withheld");
    assert_eq!(nodes_of_replaced_mps_hosts(&reconcile(&mut keeper, &world, 2)), ["n1"]);
}

#[test]
fn mps_hosts_are_examined_once_per_period_and_no_change_is_missed() {
    let mut world = TestCluster::default().node("n1", &[0]).mps_host("n1", "new");
    let mut keeper = Gatekeeper::default();
    let actions = reconcile(&mut keeper, &world, 0);
    assert_eq!((actions.rollout.is_some(), actions.requeue), (true, None));
    world = world.mps_host("n1", "old");
    let half = ReconcileTime { up: Duration::from_millis(500), epoch: 1_000_000 };
    let actions = keeper.reconcile(&world.cluster(), &BTreeMap::new(), half);
    assert_eq!((actions.rollout.is_some(), actions.requeue), (false, Some(Duration::from_millis(500))));
    assert_eq!(reconcile(&mut keeper, &world, 1).rollout.unwrap().outdated, 1);
}

#[test]
fn a_nodes_agent_is_upgraded_before_its_mps_host() {
    let mut world = TestCluster::default().node("n1", &[0]).mps_host("n1", "old");
    let of_revision = |hash: &str| {
        let metadata = revision(hash, 0)["metadata"].clone();
        move |agent: &mut Value| {
            agent["metadata"].as_object_mut().unwrap().extend(metadata.as_object().unwrap().clone());
        }
    };
    world.change(|world| &mut world.agents, "n1", of_revision("old"));
    let mut keeper = Gatekeeper::default();
    for second in [0, 10] {
        let step = reconcile(&mut keeper, &world, second).rollout.unwrap();
        assert_eq!((step.replace.len(), step.waiting["n1"].as_str()), (0, "the agent is upgraded first"));
    }
    world.change(|world| &mut world.agents, "n1", of_revision("new"));
    reconcile(&mut keeper, &world, 20);
    assert_eq!(nodes_of_replaced_mps_hosts(&reconcile(&mut keeper, &world, 22)), ["n1"]);
}
