//! Tests which pods are released, in which order, and to which nodes.
use std::collections::BTreeMap;

use cleave_api::names::GATE;
use cleave_api::placement::ReservedUnits;
use cleave_plan::affinity::HOSTNAME;
use serde_json::json;

use super::world::{MPS_RESOURCE, TestCluster, at, reconcile, released};
use crate::placement::actions::{Actions, ReleaseReason};
use crate::placement::gatekeeper::{Gatekeeper, UNSCHEDULABLE_AFTER};
use crate::placement::queue::{FIRST_BACKOFF, MAX_REFUSALS};
use crate::policies::demand::Reason;

#[test]
fn a_pod_that_fits_is_released_to_its_node_with_its_reservation_as_annotation() {
    let mut world = TestCluster::default().node("n1", &[8, 5, 0]).pod("a", 3);
    let actions = reconcile(&mut Gatekeeper::default(), &world, 0);
    assert_eq!(released(&actions), [("team/a", "reserved")]);
    assert!(world.apply_release(&actions.releases[0]));
    let pod = &world.pods["team/a"];
    assert_eq!(pod["spec"].get("schedulingGates"), None);
    let terms =
        &pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
    assert_eq!(*terms, json!([{"matchExpressions": [{"key": HOSTNAME, "operator": "In", "values": ["n1"]}]}]));
    let expected = ReservedUnits { resource: MPS_RESOURCE.into(), units: 3, device: "n1-GPU-1".into() };
    assert_eq!(
        TestCluster::placement(pod).unwrap().nodes,
        BTreeMap::from([("n1".to_owned(), vec![expected])]),
        "the fullest GPU that fits"
    );
}

#[test]
fn pods_are_released_by_priority_and_then_by_age() {
    let created = |minute: u32| json!(format!("2026-01-01T00:{minute:02}:00Z"));
    let mut world = TestCluster::default().node("n1", &[0]).pod("young", 10).pod("old", 10).pod_with(
        "important",
        10,
        json!({"priority": 7}),
    );
    for (name, minute) in [("young", 9), ("old", 1), ("important", 10)] {
        world.change(
            |world| &mut world.pods,
            &format!("team/{name}"),
            |pod| pod["metadata"]["creationTimestamp"] = created(minute),
        );
    }
    for expected in ["important", "old", "young"] {
        let actions = reconcile(&mut Gatekeeper::default(), &world, 0);
        assert_eq!(released(&actions), [(format!("team/{expected}").as_str(), "reserved")]);
        world.pods.remove(&format!("team/{expected}"));
    }
}

#[test]
fn a_pod_with_another_gate_is_not_released() {
    let queued = json!({"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}, {"name": GATE}]});
    let mut world = TestCluster::default().node("n1", &[0]).pod_with("a", 1, queued);
    let mut keeper = Gatekeeper::default();
    assert_eq!(reconcile(&mut keeper, &world, 0), Actions::default());
    world.change(|world| &mut world.pods, "team/a", |pod| pod["spec"]["schedulingGates"] = json!([{"name": GATE}]));
    assert_eq!(released(&reconcile(&mut keeper, &world, 1)), [("team/a", "reserved")]);
}

#[test]
fn a_pod_that_fits_on_no_gpu_is_released_after_minutes_to_larger_gpus_on_any_node() {
    let mut world = TestCluster::default().node("n1", &[0, 0]).pod("a", 11);
    let mut keeper = Gatekeeper::default();
    let actions = reconcile(&mut keeper, &world, 0);
    assert_eq!(
        (released(&actions), actions.requeue),
        (vec![], Some(UNSCHEDULABLE_AFTER)),
        "a policy may be applied soon"
    );
    assert_eq!(released(&reconcile(&mut keeper, &world, UNSCHEDULABLE_AFTER.as_secs() - 1)), []);
    let actions = reconcile(&mut keeper, &world, UNSCHEDULABLE_AFTER.as_secs());
    assert_eq!(released(&actions), [("team/a", "unschedulable")]);
    assert!(
        matches!(&actions.releases[0].reason, ReleaseReason::Unschedulable(why) if why.contains("the largest has 10")),
        "{actions:?}"
    );
    assert!(world.apply_release(&actions.releases[0]));
    let spec = &world.pods["team/a"]["spec"];
    let terms =
        &spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
    let larger = json!({"key": "largest.cleave.dev/gpu-mps", "operator": "Gt", "values": ["10"]});
    assert_eq!(terms[0]["matchExpressions"], json!([larger]));
    assert_eq!(TestCluster::placement(&world.pods["team/a"]), None);
}

#[test]
fn a_pod_without_requests_that_cleave_serves_is_released_unchanged() {
    let mig = json!({"containers": [{"resources": {"limits": {"nvidia.com/mig-1g.10gb": "1"}}}]});
    let plain = json!({"containers": [{"resources": {"limits": {"cpu": "1"}}}]});
    let mut world = TestCluster::default().node("n1", &[0]).pod_with("mig", 1, mig).pod_with("plain", 1, plain);
    world.nodes.insert(
        "other".into(),
        json!({"metadata": {"name": "other", "resourceVersion": "1"},
        "status": {"allocatable": {"nvidia.com/mig-1g.10gb": "7"}}}),
    );
    let actions = reconcile(&mut Gatekeeper::default(), &world, 0);
    assert_eq!(released(&actions), [("team/mig", "not_managed"), ("team/plain", "not_managed")]);
    assert!(world.apply_release(&actions.releases[0]));
    assert_eq!(world.pods["team/mig"]["spec"].get("affinity"), None);
}

#[test]
fn every_term_of_the_pods_own_affinity_is_narrowed() {
    let own = json!([{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]},
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}, {}]);
    let affinity = json!({"affinity": {"nodeAffinity":
        {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": own}}}});
    let mut world = TestCluster::default().node("n1", &[0]).pod_with("a", 1, affinity);
    let actions = reconcile(&mut Gatekeeper::default(), &world, 0);
    assert!(world.apply_release(&actions.releases[0]));
    let spec = &world.pods["team/a"]["spec"];
    let terms =
        &spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
    let ours = json!({"key": HOSTNAME, "operator": "In", "values": ["n1"]});
    assert_eq!((&terms[0]["matchExpressions"][1], &terms[1]["matchExpressions"][0]), (&ours, &ours));
    assert_eq!(terms[2], json!({}), "an empty term matches no node and remains empty");
}

#[test]
fn a_pod_whose_release_is_always_refused_has_no_reservation_and_reports_the_reason() {
    let world = TestCluster::default().node("n1", &[4]).pod("a", 4).pod("b", 4);
    let mut keeper = Gatekeeper::default();
    let mut second = 0;
    // The first refusals do not delay the pod, because the pod may have changed after the decision.
    for _ in 0..MAX_REFUSALS {
        assert_eq!(released(&reconcile(&mut keeper, &world, second)), [("team/a", "reserved")]);
        keeper.record_refused_release("team/a", "metadata.annotations: Too long", at(second).up);
    }
    let actions = reconcile(&mut keeper, &world, second);
    assert_eq!(released(&actions), [("team/b", "reserved")]);
    let waits = &actions.waiting["team/a"];
    assert_eq!(waits.reason, Reason::Malformed);
    assert!(waits.message.ends_with("releases this pod: metadata.annotations: Too long"), "{}", waits.message);
    assert_eq!(actions.requeue, Some(FIRST_BACKOFF));
    keeper.record_failed_release("team/b");
    let mut delays = Vec::new();
    for _ in 0..8 {
        let delay = reconcile(&mut keeper, &world, second).requeue.unwrap();
        keeper.record_failed_release("team/b");
        delays.push(delay.as_secs());
        second += delay.as_secs();
        assert_eq!(released(&reconcile(&mut keeper, &world, second)), [("team/a", "reserved")], "the delay has ended");
        keeper.record_refused_release("team/a", "no", at(second).up);
    }
    assert_eq!(delays, [1, 2, 4, 8, 16, 32, 60, 60]);
}
