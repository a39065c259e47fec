//! Tests which pods wait at the gate, and why.
use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::world::{MPS_RESOURCE, TestCluster, at, reconcile, released};
use crate::placement::gatekeeper::{Gatekeeper, UNSCHEDULABLE_AFTER};
use crate::policies::demand::{Reason, WaitingPod};

#[test]
fn a_pod_waits_until_one_gpu_has_enough_free_shares() {
    let mut world = TestCluster::default().node("n1", &[7, 7]).pod("five", 5).pod("three", 3);
    let mut keeper = Gatekeeper::default();
    let actions = reconcile(&mut keeper, &world, 0);
    assert_eq!(
        released(&actions),
        [("team/three", "reserved")],
        "a pod that fits does not wait for a pod that does not fit"
    );
    assert!(actions.waiting["team/five"].message.contains("no device has 5 nvidia.com/gpu-mps free"), "{actions:?}");
    world.change(|world| &mut world.gpu_nodes, "n1", |node| node["status"]["gpus"][1]["slices"][0]["inUse"] = json!(4));
    assert_eq!(released(&reconcile(&mut keeper, &world, 1)), [("team/five", "reserved")]);
}

#[test]
fn a_pod_waits_while_gpus_are_repartitioned_for_it() {
    let ten = json!({"containers": [{"resources": {"limits": {"nvidia.com/gpu-10gb": "1"}}}]});
    let world = TestCluster::default().node("n1", &[0]).pod_with("a", 1, ten);
    let mut keeper = Gatekeeper::default();
    let demand = |reason| BTreeMap::from([("team/a".to_owned(), WaitingPod { reason, message: "planned".into() })]);
    for second in [0, 10] {
        let actions = keeper.reconcile(&world.cluster(), &demand(Reason::Repartitioning), at(second));
        assert_eq!((released(&actions), actions.waiting["team/a"].message.as_str()), (vec![], "planned"));
    }
    keeper.reconcile(&world.cluster(), &demand(Reason::Malformed), at(11));
    let later = at(11 + UNSCHEDULABLE_AFTER.as_secs());
    assert_eq!(
        released(&keeper.reconcile(&world.cluster(), &demand(Reason::Malformed), later)),
        [("team/a", "unschedulable")]
    );
}

#[test]
fn a_pod_waits_if_its_node_lacks_cpu_and_is_released_if_its_selector_matches_no_node() {
    let busy = json!({"containers": [{"resources": {"requests": {"cpu": "6"}, "limits": {MPS_RESOURCE: "2"}}}]});
    let world = |other: Value| {
        TestCluster::default()
            .node("n1", &[0])
            .pod_with("bound", 1, json!({"nodeName": "n1", "schedulingGates": [], "containers": [{"resources": {"requests": {"cpu": "4"}}}]}))
            .pod_with("a", 2, other)
    };
    let actions = reconcile(&mut Gatekeeper::default(), &world(busy), 0);
    let message = &actions.waiting["team/a"].message;
    assert_eq!(message, "No eligible GPU node: 1 node (n1) does not have enough CPU, memory or another resource");
    let elsewhere = world(json!({"nodeSelector": {"zone": "b"}}));
    let mut keeper = Gatekeeper::default();
    let actions = reconcile(&mut keeper, &elsewhere, 0);
    let message = &actions.waiting["team/a"].message;
    assert_eq!(message, "No eligible GPU node: 1 node (n1) does not have the label zone=b that the pod selects");
    assert_eq!(
        released(&reconcile(&mut keeper, &elsewhere, UNSCHEDULABLE_AFTER.as_secs())),
        [("team/a", "unschedulable")],
        "the pod's selector matches no node"
    );
}

#[test]
fn a_pod_waits_for_a_gpu_that_cannot_serve_now() {
    type ClusterChange = fn(&mut TestCluster);
    let cases: [ClusterChange; 5] = [
        |world| {
            world.change(
                |world| &mut world.agents,
                "n1",
                |pod| pod["status"]["conditions"][0]["status"] = json!("False"),
            );
        },
        |world| {
            world.change(
                |world| &mut world.gpu_nodes,
                "n1",
                |node| node["status"]["gpus"][0]["health"] = json!({"healthy": false}),
            );
        },
        |world| {
            world.change(
                |world| &mut world.gpu_nodes,
                "n1",
                |node| node["metadata"]["annotations"] = json!({"cleave.dev/cordon": "n1-GPU-0=new fan"}),
            );
        },
        |world| {
            world.change(
                |world| &mut world.gpu_nodes,
                "n1",
                |node| node["status"]["gpus"][0]["slices"][0]["unhealthy"] = json!(10),
            );
        },
        |world| {
            world.change(
                |world| &mut world.gpu_nodes,
                "n1",
                |node| {
                    node["spec"] = json!({"planId": "p", "gpus": [{"uuid": "n1-GPU-0", "enforcement": "Report",
                    "partition": {"whole": {"resource": "nvidia.com/gpu"}}}]});
                },
            );
        },
    ];
    for (case, break_it) in cases.into_iter().enumerate() {
        let mut world = TestCluster::default().node("n1", &[0]).pod("a", 2);
        break_it(&mut world);
        let mut keeper = Gatekeeper::default();
        for second in [0, 5] {
            let actions = reconcile(&mut keeper, &world, second);
            assert_eq!((released(&actions), actions.waiting.len()), (vec![], 1), "case {case}");
        }
    }
}
