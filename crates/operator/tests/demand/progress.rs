//! Tests changes that are slow, fail or are superseded, and a kubelet that lists devices late.
use std::time::Duration;

use cleave_api::gpunode::{AllocationStatus, StepStatus};
use cleave_operator::policies::demand::Reason;

use crate::world::{
    MIG_1G_RESOURCE, SLICE_10GB_RESOURCE, TestCluster, WHOLE_GPU_RESOURCE, apply_partition, assert_waits,
    list_allocations,
};

#[test]
fn a_node_gets_no_second_change_while_it_changes() {
    let mut world = TestCluster::new("mode: Auto").node("n1", 2);
    world.pod("first", SLICE_10GB_RESOURCE, 1);
    world.run_pass();
    let written = world.object("n1").spec.clone();
    // The node has not read its spec. Another GPU of the node could serve the pod, but the pod
    // waits, and the operator starts no second change.
    world.pod("second", MIG_1G_RESOURCE, 1);
    world.now += Duration::from_secs(1);
    let (_, outcome) = world.run_pass();
    assert_eq!(world.written_nodes(), [] as [&str; 0]);
    assert_eq!(world.object("n1").spec, written);
    assert_waits(&outcome, "first", Reason::Repartitioning, "nvidia.com/gpu-10gb");
    assert_waits(&outcome, "second", Reason::NodeChanging, "");
    // The node has read its spec and is changing.
    let generation = world.object("n1").metadata.generation.unwrap();
    world.status("n1").observed_generation = generation;
    world.run_pass();
    assert_eq!(world.written_nodes(), [] as [&str; 0]);
    world.apply_all_specs();
    let (_, outcome) = world.run_pass();
    assert_eq!(world.written_nodes(), ["n1"]);
    assert_waits(&outcome, "second", Reason::Repartitioning, "");
    world.settle();
    assert!(world.is_bound("first") && world.is_bound("second"));
}

#[test]
fn a_written_spec_is_used_before_the_watch_returns_it() {
    let mut world = TestCluster::new("mode: Auto").node("n1", 1);
    world.pod("first", SLICE_10GB_RESOURCE, 1);
    let old = world.object("n1").clone();
    world.run_pass();
    let change = world.changes[0].clone();
    *world.object("n1") = old;
    world.history.record_write("n1", Some(2), &change.spec, world.now);
    world.pod("second", MIG_1G_RESOURCE, 1);
    world.run_pass();
    assert_eq!(world.written_nodes(), [] as [&str; 0], "the node is still changing");
    world.now += Duration::from_secs(11);
    world.run_pass();
    assert_eq!(world.written_nodes(), ["n1"], "another writer has restored the old spec");
}

#[test]
fn a_failed_change_is_undone_and_retried_after_a_backoff() {
    let mut world = TestCluster::new("mode: Auto").node("n1", 1);
    world.pod("mig", MIG_1G_RESOURCE, 1);
    world.run_pass();
    let fail = |world: &mut TestCluster| {
        let generation = world.object("n1").metadata.generation.unwrap();
        let status = world.status("n1");
        status.observed_generation = generation;
        let uuid = status.gpus[0].uuid.clone();
        let step = |result: &str, message: &str| StepStatus {
            gpu: uuid.clone(),
            action: "create 1g.5gb at 0".into(),
            result: result.into(),
            message: message.into(),
            ..StepStatus::default()
        };
        status.steps = vec![step("Done", ""), step("Failed", "NVML: Insufficient Resources")];
    };
    fail(&mut world);
    let (plan, outcome) = world.run_pass();
    assert!(world.partition("n1", 0).whole.is_some(), "the operator restores the current partition");
    assert!(
        outcome.excluded_gpus.values().any(|why| why.contains("Insufficient Resources")),
        "{:?}",
        outcome.excluded_gpus
    );
    assert_waits(&outcome, "mig", Reason::NoRoom, "");
    assert!(
        world
            .readiness(&plan)
            .message
            .contains("GPU 0 of n1 is excluded from plans: the last repartitioning failed: NVML")
    );
    world.apply_all_specs();
    world.now += Duration::from_secs(4);
    world.run_pass();
    assert_eq!(world.written_nodes(), [] as [&str; 0], "the backoff has not ended");
    // During the backoff, a pod can use the GPU's current slices.
    world.pod("whole", WHOLE_GPU_RESOURCE, 1);
    let (_, outcome) = world.run_pass();
    assert_waits(&outcome, "whole", Reason::Scheduler, "GPU");
    world.remove_pod("whole");
    world.now += Duration::from_secs(1);
    world.run_pass();
    assert_eq!(world.written_nodes(), ["n1"], "the operator retries");
    fail(&mut world);
    world.run_pass();
    world.apply_all_specs();
    world.now += Duration::from_secs(9);
    world.run_pass();
    assert_eq!(world.written_nodes(), [] as [&str; 0], "the backoff doubles");
    world.now += Duration::from_secs(1);
    world.settle();
    assert!(world.is_bound("mig"));
}

/// Reports that the agent has read its node's spec, and that the change of the node's first GPU
/// waits.
fn report_waiting_step(world: &mut TestCluster, node: &str, reason: &str, message: &str) {
    let generation = world.object(node).metadata.generation.unwrap();
    let status = world.status(node);
    status.observed_generation = generation;
    status.steps = vec![StepStatus {
        gpu: status.gpus[0].uuid.clone(),
        action: "turn MIG mode on".into(),
        result: "Waiting".into(),
        reason: reason.into(),
        message: message.into(),
    }];
}

#[test]
fn a_change_that_misses_its_deadline_is_undone() {
    let mut world = TestCluster::new("mode: Auto").node("n1", 1).node("n2", 1);
    world.pod("mig", MIG_1G_RESOURCE, 1);
    world.run_pass();
    let slow = world.written_nodes()[0].to_owned();
    report_waiting_step(&mut world, &slow, "", "MIG mode changes with the next reset of this GPU");
    world.run_pass();
    world.now += Duration::from_secs(30);
    let (_, outcome) = world.run_pass();
    assert_eq!(world.written_nodes().len(), 2, "one GPU gets its partition back, and the other a new one");
    assert!(
        outcome.excluded_gpus.values().any(|why| why.contains("within 30 s: MIG mode changes with the next reset"))
    );
    assert!(world.partition(&slow, 0).whole.is_some());
}

/// An agent that has just started on a new node waits for up to 30 s, as long as the deadline.
#[test]
fn the_deadline_does_not_count_while_the_agent_waits_for_the_kubelet() {
    let mut world = TestCluster::new("mode: Auto").node("n1", 1);
    world.pod("mig", MIG_1G_RESOURCE, 1);
    world.run_pass();
    report_waiting_step(&mut world, "n1", "UsersUnknown", "");
    world.run_pass();
    world.now += Duration::from_secs(30);
    let (_, outcome) = world.run_pass();
    assert_eq!((world.written_nodes(), outcome.excluded_gpus.len()), (vec![], 0));
    world.status("n1").steps.clear();
    world.now += Duration::from_secs(29);
    assert_eq!(world.run_pass().1.excluded_gpus.len(), 0);
    world.now += Duration::from_secs(1);
    assert_eq!(world.run_pass().1.excluded_gpus.len(), 1);
}

#[test]
fn a_late_gpu_of_another_policy_delays_its_node_only_once() {
    let mut world = TestCluster::new("mode: Auto\ngpus:\n  indices: [1]").node("n1", 2);
    world = world.policy("fixed", "gpus:\n  indices: [0]\nmode: Mig\nmig:\n  layout: [3g.20gb]");
    world.run_pass();
    report_waiting_step(&mut world, "n1", "", "MIG mode changes with the next reset of this GPU");
    world.pod("one", SLICE_10GB_RESOURCE, 1);
    world.run_pass();
    assert_eq!(world.written_nodes(), [] as [&str; 0], "the node is changing");
    world.now += Duration::from_secs(30);
    world.run_pass();
    assert_eq!(world.written_nodes(), ["n1"]);
    let generation = world.object("n1").metadata.generation.unwrap();
    world.status("n1").observed_generation = generation;
    let partition = world.partition("n1", 1);
    apply_partition(&mut world.status("n1").gpus[1], &partition);
    world.pod("two", MIG_1G_RESOURCE, 1);
    world.now += Duration::from_secs(1);
    let (_, outcome) = world.run_pass();
    assert!(outcome.changing.is_empty(), "the late GPU does not delay the node again");
}

#[test]
fn a_plan_that_a_new_pod_makes_obsolete_is_replaced() {
    let mut world = TestCluster::new("mode: Auto").node("n1", 1);
    world.pod("one", SLICE_10GB_RESOURCE, 1);
    world.settle();
    world.remove_pod("one");
    world.pod("mig", MIG_1G_RESOURCE, 1);
    world.run_pass();
    // Before the node reads its spec, the kubelet allocates the free slice to a pod.
    world.pod("late", SLICE_10GB_RESOURCE, 1);
    world.pods.get_mut("team/late").unwrap().bind("n1");
    let partition = world.partition("n1", 0);
    assert!(partition.mig.is_some());
    world.allocations.push((
        "team/late".into(),
        "n1".into(),
        AllocationStatus {
            pod: "team/late".into(),
            resource: SLICE_10GB_RESOURCE.into(),
            device: "GPU-n1-0".into(),
            ids: vec!["GPU-n1-0::0".into()],
            ..AllocationStatus::default()
        },
    ));
    let allocations = world.allocations.clone();
    let generation = world.object("n1").metadata.generation.unwrap();
    let status = world.status("n1");
    status.gpus.iter_mut().for_each(|gpu| list_allocations(gpu, &allocations));
    status.observed_generation = generation;
    status.steps = vec![StepStatus {
        gpu: "GPU-n1-0".into(),
        result: "Waiting".into(),
        reason: "InUse".into(),
        message: "in use by team/late".into(),
        ..StepStatus::default()
    }];
    let (_, outcome) = world.run_pass();
    assert_eq!(world.count("n1", 0, SLICE_10GB_RESOURCE), 1, "the slices in use are kept");
    assert_waits(&outcome, "mig", Reason::NoRoom, "in use");
    world.settle();
    world.remove_pod("late");
    world.settle();
    assert!(world.is_bound("mig"));
}

#[test]
fn a_bound_pod_uses_its_slice_before_the_kubelet_lists_it() {
    let mut world = TestCluster::new("mode: Auto").node("n1", 1);
    world.pod("one", SLICE_10GB_RESOURCE, 1);
    world.run_pass();
    world.apply_all_specs();
    // The scheduler has bound the pod, and the kubelet does not list its devices yet.
    world.pods.get_mut("team/one").unwrap().bind("n1");
    world.pod("whole", WHOLE_GPU_RESOURCE, 1);
    world.pod("mig", MIG_1G_RESOURCE, 1);
    let (_, outcome) = world.run_pass();
    assert_eq!(world.written_nodes(), [] as [&str; 0], "the pod's slice would be removed");
    assert_waits(&outcome, "whole", Reason::NoRoom, "");
    // The kubelet allocates the slice to no other pod.
    world.pod("two", SLICE_10GB_RESOURCE, 1);
    let (_, outcome) = world.run_pass();
    assert_ne!(outcome.waiting["team/two"].reason, Reason::Scheduler);
    // Once the pod's slice is listed, the rest of the GPU can be repartitioned around it.
    world.allocate("team/one", "n1", SLICE_10GB_RESOURCE);
    world.settle();
    assert!(world.is_bound("two") && !world.is_bound("whole") && !world.is_bound("mig"));
}

#[test]
fn a_bound_pod_uses_a_whole_gpu_before_the_kubelet_lists_it() {
    let mut world = TestCluster::new("mode: Auto").node("n1", 2);
    world.pod("whole", WHOLE_GPU_RESOURCE, 1);
    world.run_pass();
    world.pods.get_mut("team/whole").unwrap().bind("n1");
    world.pod("one", SLICE_10GB_RESOURCE, 1);
    world.pod("whole2", WHOLE_GPU_RESOURCE, 1);
    let (_, outcome) = world.run_pass();
    assert_eq!(world.written_nodes(), [] as [&str; 0], "it is unknown which GPU the pod uses");
    assert_waits(&outcome, "whole2", Reason::Scheduler, "GPU");
    world.allocate("team/whole", "n1", WHOLE_GPU_RESOURCE);
    world.remove_pod("whole2");
    world.settle();
    assert!(world.is_bound("one"));
    assert!(world.partition("n1", 0).whole.is_some());
}
