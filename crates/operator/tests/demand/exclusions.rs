//! Tests nodes and GPUs that plans exclude, and nodes on which a pod cannot run.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cleave_api::gpunode::Health;
use cleave_operator::policies::demand::Reason;
use cleave_operator::read::Agent;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::DeserializeGuard;
use kube::core::error_boundary::InvalidObject;

use crate::world::{PolicyReadiness, SLICE_10GB_RESOURCE, SLICE_20GB_RESOURCE, TestCluster, assert_waits};

#[test]
fn an_unreachable_node_is_excluded_until_its_agent_reports() {
    let mut world = TestCluster::new("mode: Auto").node("n1", 1).node("n2", 1);
    world.pod("one", SLICE_10GB_RESOURCE, 1);
    let (_, _) = world.run_pass();
    let unreachable = world.written_nodes()[0].to_owned();
    let other = if unreachable == "n1" { "n2" } else { "n1" };
    let (_, outcome) = world.run_pass();
    assert!(outcome.next.is_some_and(|next| next <= Duration::from_secs(30)), "the next pass is at the deadline");
    world.now += Duration::from_secs(29);
    world.run_pass();
    assert_eq!(world.written_nodes(), [] as [&str; 0]);
    world.now += Duration::from_secs(1);
    let (plan, outcome) = world.run_pass();
    assert_eq!(world.written_nodes(), [other], "the pod gets the other node");
    assert!(outcome.excluded_nodes[&unreachable].contains("did not read the GpuNode spec within 30 s"));
    let PolicyReadiness { reason, message, .. } = world.readiness(&plan);
    assert_eq!(reason, "Excluded");
    assert!(message.contains(&format!("{unreachable} is excluded from plans: the agent did not read")), "{message}");
    world.apply_spec(other);
    // The agent applies the spec, and plans include the node again with its new partition.
    world.apply_all_specs();
    let (_, outcome) = world.run_pass();
    assert!(outcome.excluded_nodes.is_empty());
    world.settle();
    assert!(world.is_bound("one"));
}

#[test]
fn a_node_whose_agent_is_not_ready_is_excluded_immediately() {
    let mut world = TestCluster::new("mode: Auto").node("n1", 1).node("n2", 1);
    world.observed.nodes.get_mut("n1").unwrap().agent = Some(Agent { ready: false });
    world.pod("one", SLICE_10GB_RESOURCE, 1);
    world.pod("two", "nvidia.com/mig-7g.40gb", 1);
    let (_, outcome) = world.run_pass();
    assert_eq!(world.written_nodes(), ["n2"]);
    assert_eq!(outcome.excluded_nodes["n1"], "the agent is not ready");
    assert_eq!(outcome.waiting.values().filter(|waiting| waiting.reason == Reason::Repartitioning).count(), 1);
    world.observed.nodes.get_mut("n1").unwrap().agent = Some(Agent { ready: true });
    world.settle();
    assert!(world.is_bound("one") && world.is_bound("two"));
}

#[test]
fn no_gpu_is_repartitioned_on_a_node_where_the_pod_cannot_run() {
    let mut world = TestCluster::new("mode: Auto").node("n1", 1).node("n2", 1);
    let labels = BTreeMap::from([("zone".to_owned(), "b".to_owned())]);
    world.observed.nodes.get_mut("n2").unwrap().labels = labels;
    let cpu = BTreeMap::from([("cpu".to_owned(), cleave_plan::Quantity::new("4"))]);
    world.observed.nodes.get_mut("n1").unwrap().allocatable = cpu;
    world.pod_with("zoned", SLICE_10GB_RESOURCE, 1, "  nodeSelector: {zone: b}\n");
    world.run_pass();
    assert_eq!(world.written_nodes(), ["n2"]);
    world.settle();
    world.pod_with("busy", "cpu", 3, "  nodeName: n1\n");
    world.pod_with(
        "hungry",
        SLICE_20GB_RESOURCE,
        1,
        "  - resources: {requests: {cpu: 2}}\n  nodeSelector: {zone: a}\n",
    );
    let a = BTreeMap::from([("zone".to_owned(), "a".to_owned())]);
    world.observed.nodes.get_mut("n1").unwrap().labels = a;
    let (_, outcome) = world.run_pass();
    assert_waits(&outcome, "hungry", Reason::NoRoom, "cpu");
    world.remove_pod("busy");
    let (_, outcome) = world.run_pass();
    assert_waits(&outcome, "hungry", Reason::Repartitioning, "n1");
}

#[test]
fn a_malformed_pod_or_node_affects_no_other_pod_or_node() {
    let mut world = TestCluster::new("mode: Auto").node("n1", 1).node("n2", 1);
    let error = "no field".to_owned();
    world.observed.nodes.get_mut("n2").unwrap().gpu_node =
        Some(Arc::new(DeserializeGuard(Err(InvalidObject { error, metadata: ObjectMeta::default() }))));
    world.pod("odd", SLICE_10GB_RESOURCE, 1);
    world.pods.get_mut("team/odd").unwrap().spec.requests =
        BTreeMap::from([(SLICE_10GB_RESOURCE.to_owned(), cleave_plan::Quantity::new("one"))]);
    world.pod("fine", SLICE_10GB_RESOURCE, 1);
    let (_, outcome) = world.run_pass();
    assert_waits(&outcome, "odd", Reason::Malformed, "nvidia.com/gpu-10gb");
    assert_waits(&outcome, "fine", Reason::Repartitioning, "n1");
    assert_eq!(world.written_nodes(), ["n1"]);
}

#[test]
fn an_unhealthy_gpu_is_not_repartitioned() {
    let mut world = TestCluster::new("mode: Auto").node("n1", 2);
    world.status("n1").gpus[0].health =
        Health { healthy: false, reason: "XidError".into(), message: "XID 79".into(), ..Health::default() };
    world.pod("one", SLICE_10GB_RESOURCE, 1);
    world.pod("all", "nvidia.com/mig-7g.40gb", 1);
    let (_, outcome) = world.run_pass();
    assert_eq!(outcome.waiting.values().filter(|waiting| waiting.reason == Reason::Repartitioning).count(), 1);
    assert!(world.partition("n1", 0).whole.is_some());
    assert!(outcome.excluded_gpus.values().any(|why| why.contains("XID 79")));
}

#[test]
fn a_cordoned_gpu_is_not_repartitioned() {
    let mut world = TestCluster::new("mode: Auto").node("n1", 2);
    let uuid = world.status("n1").gpus[0].uuid.clone();
    let object = world.observed.nodes.get_mut("n1").unwrap().gpu_node.as_mut().map(Arc::make_mut);
    let Some(DeserializeGuard(Ok(object))) = object else { panic!() };
    object.metadata.annotations = Some(BTreeMap::from([("cleave.dev/cordon".to_owned(), format!("{uuid}=new fan"))]));
    world.pod("one", SLICE_10GB_RESOURCE, 1);
    world.pod("all", "nvidia.com/mig-7g.40gb", 1);
    let (_, outcome) = world.run_pass();
    assert_eq!(outcome.waiting.values().filter(|waiting| waiting.reason == Reason::Repartitioning).count(), 1);
    assert!(world.partition("n1", 0).whole.is_some());
    assert!(outcome.excluded_gpus.values().any(|why| why == "cordoned: new fan"));
}

#[test]
fn a_daemon_that_starts_for_a_change_does_not_exclude_its_gpu() {
    let mut world = TestCluster::new("mode: Auto").node("n1", 1).node("n2", 1);
    world.pod("one", SLICE_10GB_RESOURCE, 1);
    world.run_pass();
    let node = world.written_nodes()[0].to_owned();
    let generation = world.object(&node).metadata.generation.unwrap();
    let status = world.status(&node);
    status.observed_generation = generation;
    status.gpus[0].health =
        Health { healthy: false, reason: "MpsUnavailable".into(), message: "stopping".into(), ..Health::default() };
    let (_, outcome) = world.run_pass();
    assert_eq!(world.written_nodes(), [] as [&str; 0]);
    assert_waits(&outcome, "one", Reason::Repartitioning, "");
}

#[test]
fn a_gpu_that_is_lost_keeps_its_spec() {
    let mut world = TestCluster::new("mode: Auto").node("n1", 1);
    world.pod("one", SLICE_10GB_RESOURCE, 1);
    world.settle();
    let before = world.object("n1").spec.clone();
    let gpu = &mut world.status("n1").gpus[0];
    gpu.health = Health {
        healthy: false,
        reason: "GpuLost".into(),
        message: "the GPU fell off the bus".into(),
        ..Health::default()
    };
    gpu.slices.clear();
    gpu.allocations.clear();
    for _ in 0..3 {
        world.run_pass();
        assert_eq!(world.object("n1").spec, before, "the reported slices are not those in use");
        world.now += Duration::from_secs(31);
    }
}

#[test]
fn a_node_without_a_free_pod_slot_is_not_repartitioned() {
    let mut world = TestCluster::new("mode: Auto").node("n1", 1);
    let full = BTreeMap::from([("pods".to_owned(), cleave_plan::Quantity::whole(1))]);
    world.observed.nodes.get_mut("n1").unwrap().allocatable = full;
    world.pod_with("other", "cpu", 1, "  nodeName: n1\n");
    world.pod("one", SLICE_10GB_RESOURCE, 1);
    let (_, outcome) = world.run_pass();
    assert_waits(&outcome, "one", Reason::NoRoom, "pods");
    world.remove_pod("other");
    let (_, outcome) = world.run_pass();
    assert_waits(&outcome, "one", Reason::Repartitioning, "n1");
}
