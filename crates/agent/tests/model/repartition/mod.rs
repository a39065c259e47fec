//! Tests that the agent repartitions a GPU safely. The tests run the agent's decisions against a
//! simulated GPU, and against models of the kubelet and the MPS host.
mod interruptions;
mod random;
mod simulated_gpu;
mod test_node;

use std::collections::{BTreeMap, BTreeSet};

use cleave_agent::allocation::usage::Allocations;
use cleave_agent::gpu::mig::MAX_CHANGE_ATTEMPTS;
use cleave_agent::node::{Node, REMOVAL_DELAY};

use self::simulated_gpu::GPU_UUID;
use self::test_node::{ALLOCATION_GRACE, TestNode};
use crate::fixtures::{mig_spec, mps_spec};

const WHOLE_GPU_RESOURCE: &str = "nvidia.com/gpu";

/// Profile, first memory slice and number of MPS shares (0 for a whole instance) of each MIG
/// instance.
const MIXED_INSTANCES: [(&str, u32, u32); 3] = [("3g.40gb", 4, 0), ("2g.20gb", 2, 4), ("1g.10gb", 0, 0)];

#[test]
fn a_whole_gpu_is_partitioned_repartitioned_and_made_whole_again() {
    let mut node = TestNode::new("H100-80");
    node.set_spec(vec![]);
    node.run();
    assert_eq!(node.count_healthy_slices(WHOLE_GPU_RESOURCE), 1);
    node.set_spec(vec![mig_spec(GPU_UUID, &MIXED_INSTANCES)]);
    node.reconcile();
    assert!(node.orders.is_empty(), "the slices are withdrawn from the kubelet first");
    assert_eq!(node.count_healthy_slices(WHOLE_GPU_RESOURCE), 0);
    node.run();
    assert!(
        node.is_applied() && node.has_exactly_instances(&[("3g.40gb", 4), ("2g.20gb", 2), ("1g.10gb", 0)]),
        "{:?}",
        node.step_results()
    );
    assert_eq!(node.last.lists.len(), 3);
    assert_eq!(node.count_healthy_slices("nvidia.com/gpu-mps"), 4, "an instance with shares has its own daemon");
    let status = &node.last.status.gpus[0];
    assert_eq!(status.mode, "Mig");
    assert_eq!(status.slices.iter().map(|slice| slice.start.unwrap()).collect::<BTreeSet<_>>(), [0, 2, 4].into());
    assert_eq!(status.mig.as_ref().unwrap().instances.len(), 3);
    let steps = node.step_results();
    let serving = "serve 4 nvidia.com/gpu-mps, 1 nvidia.com/mig-1g.10gb, 1 nvidia.com/mig-3g.40gb";
    for done in [serving, "turn MIG mode on", "create MIG instance 3g.40gb at 4", "create MIG instance 1g.10gb at 0"] {
        assert!(steps.contains(&(done, "Done")), "{steps:?}");
    }
    let kept = node.mig_devices();
    node.set_spec(vec![mig_spec(GPU_UUID, &[("3g.40gb", 4, 0), ("4g.40gb", 0, 0)])]);
    node.run();
    assert!(node.is_applied() && node.has_exactly_instances(&[("3g.40gb", 4), ("4g.40gb", 0)]));
    assert_eq!(
        node.mig_devices().keys().filter(|uuid| kept.contains_key(*uuid)).count(),
        1,
        "a kept instance is not replaced"
    );
    node.set_spec(vec![]);
    node.run();
    assert_eq!(
        (node.count_healthy_slices(WHOLE_GPU_RESOURCE), node.is_applied(), node.gpu.lock().state.mig),
        (1, true, false)
    );
    let reasons: Vec<&str> = node.events.iter().map(|(reason, _)| *reason).collect();
    assert_eq!(reasons, ["MigChanged"; 3], "{:?}", node.events);
}

#[test]
fn an_instance_in_use_is_kept_and_does_not_block_changes_of_other_instances() {
    let mut node = TestNode::new("H100-80");
    node.set_spec(vec![mig_spec(GPU_UUID, &[("3g.40gb", 4, 0), ("1g.10gb", 0, 0), ("1g.10gb", 1, 0)])]);
    node.run();
    let used = node.mig_devices().into_iter().find(|(_, (_, start))| *start == 0).unwrap().0;
    while node.allocate(0).is_some_and(|id| !id.starts_with(&used)) {}
    node.allocated.retain(|row| row.ids[0].starts_with(&used));
    node.table.allocations = Allocations::default();
    node.set_spec(vec![mig_spec(GPU_UUID, &[("2g.20gb", 0, 0), ("2g.20gb", 4, 0), ("1g.10gb", 3, 0)])]);
    node.list_allocations();
    node.reconcile();
    assert_eq!(node.count_healthy_slices("nvidia.com/mig-1g.10gb"), 1, "a kept instance is not reported as Unhealthy");
    node.run();
    assert!(node.has_exactly_instances(&[("1g.10gb", 0), ("2g.20gb", 4), ("1g.10gb", 3)]));
    assert!(node.mig_devices().contains_key(&used) && !node.is_applied());
    assert!(node.step_messages().contains("in use by ns/p"), "{}", node.step_messages());
    assert_eq!(node.count_healthy_slices("nvidia.com/mig-1g.10gb"), 2, "the instance in use is still served");
    node.allocated.clear();
    node.run();
    assert!(
        node.is_applied() && node.has_exactly_instances(&[("2g.20gb", 0), ("2g.20gb", 4), ("1g.10gb", 3)]),
        "{:?}",
        node.step_results()
    );
}

#[test]
fn a_process_outside_pods_blocks_changes_of_its_instance_and_its_gpu() {
    let mut node = TestNode::new("H100-80");
    node.set_spec(vec![]);
    node.gpu.lock().processes.insert(77, None);
    node.run();
    node.set_spec(vec![mig_spec(GPU_UUID, &[("1g.10gb", 0, 0)])]);
    node.run();
    assert!(
        !node.gpu.lock().state.mig && node.count_healthy_slices(WHOLE_GPU_RESOURCE) == 1,
        "the GPU is not repartitioned"
    );
    assert!(node.step_messages().contains("PID 77"), "{}", node.step_messages());
    assert!(node.gpu.lock().calls.is_empty());
    node.gpu.lock().processes.clear();
    node.run();
    assert!(node.is_applied());
    let instance = node.mig_devices().values().next().unwrap().0;
    // Start a process after the agent has stopped serving the slice. The agent must find the
    // process before it destroys the instance.
    node.set_spec(vec![mig_spec(GPU_UUID, &[("2g.20gb", 0, 0)])]);
    node.reconcile();
    node.now += REMOVAL_DELAY;
    node.reconcile();
    assert_eq!(node.orders.len(), 1);
    node.gpu.lock().processes.insert(78, Some(instance));
    node.perform_order();
    node.run();
    assert!(
        node.has_exactly_instances(&[("1g.10gb", 0)]) && node.step_messages().contains("PID 78"),
        "{}",
        node.step_messages()
    );
    node.gpu.lock().processes.clear();
    node.run();
    assert!(node.is_applied() && node.has_exactly_instances(&[("2g.20gb", 0)]));
}

#[test]
fn a_failed_creation_is_rolled_back_and_repeated_a_few_times_and_after_a_change_of_the_gpu() {
    for (call, rollback_fails) in [("gi", false), ("ci", false), ("ci", true)] {
        let mut node = TestNode::new("H100-80");
        node.set_spec(vec![mig_spec(GPU_UUID, &[("3g.40gb", 0, 0), ("1g.10gb", 4, 0)])]);
        node.gpu.lock().failures = BTreeMap::from([(call, u32::MAX), ("gi-destroy", u32::from(rollback_fails))]);
        node.run();
        let attempts = node.gpu.lock().calls.iter().filter(|name| **name == call).count();
        assert_eq!(
            attempts,
            2 * usize::try_from(MAX_CHANGE_ATTEMPTS).unwrap(),
            "{call}: a few attempts for each of the two instances"
        );
        assert!(node.has_exactly_instances(&[]), "{call}: rolled back");
        let steps = node.step_results();
        assert!(steps.contains(&("create MIG instance 3g.40gb at 0", "Failed")), "{steps:?}");
        assert!(
            node.step_messages()
                .contains(&format!("the GPU is lost ({call}); failed 5 times; the agent does not retry until"))
        );
        assert!(!node.is_applied());
        let failures = node.events.iter().filter(|(reason, _)| *reason == "MigFailed").count();
        assert_eq!(failures, 4, "the first and the last failure of each: {:?}", node.events);
        // An administrator clears the cause and changes the GPU manually.
        node.gpu.lock().failures.clear();
        node.run();
        assert!(node.has_exactly_instances(&[]), "{call}: nothing has changed");
        let by_hand = node.gpu.lock().create_gpu_instance("1g.10gb", 6).unwrap();
        node.gpu.lock().create_compute_instance(by_hand).unwrap();
        node.run();
        assert!(
            node.is_applied() && node.has_exactly_instances(&[("3g.40gb", 0), ("1g.10gb", 4)]),
            "{call}: {:?}",
            node.step_results()
        );
        assert!(node.step_results().iter().all(|(_, result)| *result == "Done"));
    }
}

#[test]
fn a_failed_creation_does_not_block_other_creations_and_is_repeated_for_a_new_spec() {
    let mut node = TestNode::new("H100-80");
    // The second instance cannot be created, because a GPU has only one set of media engines.
    node.set_spec(vec![mig_spec(GPU_UUID, &[("1g.10gb+me", 0, 0), ("1g.10gb+me", 1, 0), ("3g.40gb", 4, 0)])]);
    node.run();
    assert!(node.has_exactly_instances(&[("1g.10gb+me", 0), ("3g.40gb", 4)]), "{:?}", node.step_results());
    assert_eq!(node.count_healthy_slices("nvidia.com/mig-3g.40gb"), 1);
    node.gpu.lock().calls.clear();
    node.run();
    assert!(node.gpu.lock().calls.is_empty());
    node.set_spec(vec![mig_spec(GPU_UUID, &[("1g.10gb", 0, 0), ("1g.10gb+me", 1, 0), ("3g.40gb", 4, 0)])]);
    node.run();
    assert!(
        node.is_applied() && node.has_exactly_instances(&[("1g.10gb", 0), ("1g.10gb+me", 1), ("3g.40gb", 4)]),
        "{:?}",
        node.step_results()
    );
}

#[test]
fn an_impossible_spec_is_refused_and_changes_nothing() {
    let mut node = TestNode::new("H100-80");
    node.set_spec(vec![]);
    node.run();
    for (bad, expected) in [
        (&[("9g.90gb", 0, 0)][..], "no MIG profile 9g.90gb"),
        (&[("3g.40gb", 2, 0)][..], "cannot be at 2"),
        (&[("3g.40gb", 0, 0), ("1g.10gb", 3, 0)][..], "overlap"),
        (&[("1g.10gb", 3, 0), ("1g.10gb", 3, 0)][..], "overlap"),
        (&[("1g.10gb", 3, 49)][..], "49 MPS shares"),
    ] {
        node.set_spec(vec![mig_spec(GPU_UUID, bad)]);
        node.run();
        assert!(node.step_messages().contains(expected), "{}", node.step_messages());
        assert_eq!(
            (node.count_healthy_slices(WHOLE_GPU_RESOURCE), node.step_results().last().unwrap().1),
            (1, "Refused")
        );
    }
    assert!(node.gpu.lock().calls.is_empty());
}

#[test]
fn a_mig_mode_that_needs_a_reset_is_requested_once_and_reported() {
    let mut node = TestNode::new("A100-80");
    node.gpu.lock().state.mig_needs_reset = true;
    node.set_spec(vec![mig_spec(GPU_UUID, &[("1g.10gb", 0, 0)])]);
    node.run();
    assert_eq!(node.gpu.lock().calls, ["mode"]);
    assert!(node.step_messages().contains("next reset") && node.step_messages().contains("reboot the node"));
    assert!(node.step_results().contains(&("turn MIG mode on", "Waiting")), "{:?}", node.step_results());
    assert_eq!(node.last.status.gpus[0].mig.as_ref().unwrap().pending, Some(true));
    // When the spec no longer contains the GPU, the agent cancels the pending change of the mode,
    // even while the GPU is in use.
    node.set_spec(vec![]);
    node.gpu.lock().processes.insert(5, None);
    node.run();
    node.gpu.lock().processes.clear();
    assert!(node.is_applied() && node.count_healthy_slices(WHOLE_GPU_RESOURCE) == 1, "{:?}", node.step_results());
    assert!(!node.gpu.lock().state.mig_pending);
    node.set_spec(vec![mig_spec(GPU_UUID, &[("1g.10gb", 0, 0)])]);
    node.run();
    node.gpu.lock().state.reset();
    node.run();
    assert!(node.is_applied() && node.has_exactly_instances(&[("1g.10gb", 0)]), "{:?}", node.step_results());
}

#[test]
fn with_mig_mode_never_the_agent_does_not_change_the_mode() {
    let mut node = TestNode::new("H100-80");
    node.agent =
        std::mem::replace(&mut node.agent, Node::start(String::new(), ALLOCATION_GRACE, None, None, node.now).0)
            .with_fixed_mig_mode(true);
    node.set_spec(vec![]);
    node.run();
    node.set_spec(vec![mig_spec(GPU_UUID, &[("1g.10gb", 0, 0)])]);
    node.run();
    assert_eq!((node.count_healthy_slices(WHOLE_GPU_RESOURCE), node.is_applied()), (1, false));
    assert!(node.step_messages().contains("--mig-mode never") && node.step_messages().contains("-mig 1"));
    assert!(node.gpu.lock().calls.is_empty());
    (node.gpu.lock().state.mig, node.gpu.lock().state.mig_pending) = (true, true);
    node.run();
    assert!(
        node.is_applied() && node.has_exactly_instances(&[("1g.10gb", 0)]),
        "instances are created: {:?}",
        node.step_results()
    );
    node.set_spec(vec![mps_spec(GPU_UUID, 4)]);
    node.run();
    assert!(
        node.has_exactly_instances(&[]) && node.gpu.lock().state.mig && node.step_messages().contains("-mig 0"),
        "{}",
        node.step_messages()
    );
    assert!(!node.gpu.lock().calls.contains(&"mode"));
}

#[test]
fn instances_that_an_administrator_created_are_served_and_kept() {
    let mut node = TestNode::new("H100-80");
    (node.gpu.lock().state.mig, node.gpu.lock().state.mig_pending) = (true, true);
    let complete = node.gpu.lock().create_gpu_instance("3g.40gb", 4).unwrap();
    node.gpu.lock().create_gpu_instance("1g.10gb", 0).unwrap();
    node.gpu.lock().create_compute_instance(complete).unwrap();
    node.gpu.lock().calls.clear();
    node.set_spec(vec![]);
    node.run();
    assert_eq!((node.count_healthy_slices("nvidia.com/mig-3g.40gb"), node.is_applied()), (1, true));
    assert!(node.gpu.lock().calls.is_empty(), "the instance without a compute instance is not changed");
    node.restart_agent(true);
    node.run();
    assert!(node.gpu.lock().calls.is_empty());
}
