//! Tests that GPUs are partitioned into the slices that pending pods request.
use std::collections::BTreeSet;

use cleave_operator::policies::demand::Reason;

use crate::world::{
    MIG_1G_RESOURCE, MIG_3G_RESOURCE, SLICE_10GB_RESOURCE, SLICE_20GB_RESOURCE, TestCluster, WHOLE_GPU_RESOURCE,
    assert_waits,
};

#[test]
fn instances_of_mixed_profiles_are_created_for_pods() {
    let mut world = TestCluster::new("mode: Mig").node("n1", 1);
    world.pod("small", MIG_1G_RESOURCE, 1);
    world.pod("half", MIG_3G_RESOURCE, 1);
    let (plan, outcome) = world.run_pass();
    assert_eq!(world.written_nodes(), ["n1"]);
    assert_waits(&outcome, "small", Reason::Repartitioning, "1 nvidia.com/mig-1g.5gb");
    assert_eq!(world.readiness(&plan).missing_slices, 2);
    let profiles: BTreeSet<String> = world.mig("n1", 0).into_iter().map(|instance| instance.profile).collect();
    assert_eq!(profiles, BTreeSet::from(["1g.5gb".to_owned(), "3g.20gb".to_owned()]));
    world.settle();
    assert!(world.is_bound("small") && world.is_bound("half"));
    // Creating another instance does not move the instances in use. `list_allocations` panics if an
    // instance in use no longer exists.
    let before = world.mig("n1", 0);
    world.pod("another", MIG_1G_RESOURCE, 1);
    world.settle();
    assert!(world.is_bound("another"));
    let after = world.mig("n1", 0);
    assert!(before.iter().all(|instance| after.contains(instance)), "{before:?}\n{after:?}");
}

#[test]
fn sized_slices_follow_demand_and_an_idle_gpu_changes_its_mode() {
    let mut world = TestCluster::new("mode: Auto").node("n1", 1);
    for pod in ["a", "b", "c", "d"] {
        world.pod(pod, SLICE_10GB_RESOURCE, 1);
    }
    world.settle();
    assert_eq!(world.count("n1", 0, SLICE_10GB_RESOURCE), 4);
    world.pod("large", SLICE_20GB_RESOURCE, 1);
    world.settle();
    assert!(!world.is_bound("large"), "the GPU is full");
    world.remove_pod("b");
    world.remove_pod("d");
    world.settle();
    assert!(world.is_bound("large"));
    assert_eq!((world.count("n1", 0, SLICE_10GB_RESOURCE), world.count("n1", 0, SLICE_20GB_RESOURCE)), (2, 1));
    for pod in ["a", "c", "large"] {
        world.remove_pod(pod);
    }
    world.settle();
    assert_eq!(world.count("n1", 0, SLICE_10GB_RESOURCE), 2, "free slices remain until a pod needs a different slice");
    world.pod("mig", MIG_1G_RESOURCE, 1);
    world.settle();
    assert!(world.is_bound("mig"), "an idle GPU changes from MPS to MIG");
    world.remove_pod("mig");
    world.pod("whole", WHOLE_GPU_RESOURCE, 1);
    world.settle();
    assert!(world.is_bound("whole"), "the idle GPU becomes whole again");
    assert!(world.partition("n1", 0).whole.is_some());
}

#[test]
fn pods_that_free_slices_can_serve_cause_no_repartitioning() {
    let mut world = TestCluster::new("mode: Auto\ngpus:\n  indices: [1]")
        .policy("fixed", "gpus:\n  indices: [0]\nmode: Mps\nmps:\n  units: 4")
        .node("n1", 3);
    world.pod("shares", "nvidia.com/gpu-mps", 2);
    world.pod("whole", WHOLE_GPU_RESOURCE, 1);
    let (_, outcome) = world.run_pass();
    assert_eq!(world.written_nodes(), [] as [&str; 0]);
    assert_waits(&outcome, "shares", Reason::Scheduler, "GPU 0");
    assert_waits(&outcome, "whole", Reason::Scheduler, "GPU");
}

#[test]
fn only_the_node_that_changes_is_written() {
    let mut world = TestCluster::new("mode: Auto").node("n1", 2).node("n2", 2).node("n3", 2);
    let before = world.object("n1").spec.plan_id.clone();
    world.pod("one", SLICE_10GB_RESOURCE, 1);
    world.run_pass();
    assert_eq!(world.changes.len(), 1);
    let node = world.changes[0].node.clone();
    assert_ne!(world.object(&node).spec.plan_id, "");
    world.apply_all_specs();
    world.bind_fitting_pods();
    world.remove_pod("one");
    world.pod("whole", WHOLE_GPU_RESOURCE, 2);
    world.pod("whole2", WHOLE_GPU_RESOURCE, 2);
    world.pod("whole3", WHOLE_GPU_RESOURCE, 2);
    world.settle();
    assert_eq!(world.object("n1").spec.plan_id.len(), before.len());
    assert!(world.is_bound("whole3"), "the partitioned GPU was idle");
}

#[test]
fn instances_are_created_for_shares_inside_them() {
    let mut world =
        TestCluster::new("mode: Mig\nmig:\n  sharing:\n    mps:\n      units: 4\n      threads: Strict").node("n1", 1);
    let shared = "nvidia.com/mig-3g.20gb.shared";
    world.pod("three", shared, 3);
    world.pod("one", shared, 1);
    world.pod("more", shared, 2);
    world.settle();
    assert!(world.is_bound("three") && world.is_bound("one") && world.is_bound("more"));
    let instances = world.mig("n1", 0);
    assert_eq!(instances.len(), 2);
    let mps = instances[0].partition.mps.as_ref().unwrap();
    assert_eq!((mps.slices[0].count, &mps.slices[0].threads[..]), (4, &[25, 50, 75, 100][..]));
}

#[test]
fn shares_and_replicas_have_the_numbers_of_the_policy() {
    let policy = "mode: Auto\nmps:\n  units: 10\n  threads: Strict\ntimeSlicing:\n  replicas: 3";
    let mut world = TestCluster::new(policy).node("n1", 2);
    world.pod("shares", "nvidia.com/gpu-mps", 4);
    world.pod("replica", "nvidia.com/gpu-timeslice", 1);
    world.settle();
    assert!(world.is_bound("shares") && world.is_bound("replica"));
    let partitions = [world.partition("n1", 0), world.partition("n1", 1)];
    let mps = partitions.iter().find_map(|partition| partition.mps.as_ref()).unwrap();
    assert_eq!(mps.slices[0].threads, [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]);
    assert_eq!(mps.slices[0].memory_mib.last(), Some(&(40_960 - 128)));
    let time_sliced = partitions.iter().find_map(|partition| partition.time_slicing.as_ref()).unwrap();
    assert_eq!(time_sliced.replicas, 3);
}

#[test]
fn an_edited_policy_applies_to_idle_gpus_only() {
    let mut world = TestCluster::new("mode: Auto\nmps:\n  threads: Strict").node("n1", 2);
    world.pod("one", SLICE_20GB_RESOURCE, 1);
    world.settle();
    let at = (0..2).find(|&index| world.partition("n1", index).mps.is_some()).unwrap();
    world = world.policy("p", "mode: Auto\nmps:\n  threads: Uncapped");
    world.settle();
    assert_eq!(world.mps("n1", at).slices[0].threads, [50, 100], "a pod uses it");
    world.remove_pod("one");
    world.settle();
    assert!(world.mps("n1", at).slices[0].threads.is_empty());
}

#[test]
fn planned_slices_of_another_policy_count_as_free() {
    let mut world = TestCluster::new("mode: Auto\ngpus:\n  indices: [1]\nmps:\n  units: 4").node("n1", 2);
    // Both policies were created at the same time. The spec of the second policy's GPU is not
    // written yet.
    world = world.policy("fixed", "gpus:\n  indices: [0]\nmode: Mps\nmps:\n  units: 4");
    world.pod("shares", "nvidia.com/gpu-mps", 2);
    let (_, outcome) = world.run_pass();
    assert_waits(&outcome, "shares", Reason::Scheduler, "GPU 0");
    assert!(world.partition("n1", 1).whole.is_some());
    world.settle();
    assert!(world.is_bound("shares") && world.partition("n1", 1).whole.is_some());
}

#[test]
fn shares_of_an_instance_in_use_are_kept_when_the_policy_is_edited() {
    let sharing =
        |units: u32| format!("mode: Mig\nmig:\n  sharing:\n    mps:\n      units: {units}\n      threads: Strict");
    let mut world = TestCluster::new(&sharing(4)).node("n1", 1);
    let shared = "nvidia.com/mig-3g.20gb.shared";
    world.pod("two", shared, 2);
    world.settle();
    world = world.policy("p", &sharing(2));
    world.settle();
    let instance = world.mig("n1", 0).remove(0);
    assert_eq!(instance.partition.mps.unwrap().slices[0].count, 4, "a pod uses two of its shares");
    world.remove_pod("two");
    world.pod("next", shared, 1);
    world.settle();
    assert!(world.is_bound("next"));
}
