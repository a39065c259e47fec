//! Tests interrupted changes: the kubelet does not answer, a daemon has not exited, the driver
//! hangs, or the agent is killed.
use std::sync::Arc;
use std::time::Duration;

use cleave_agent::gpu::mig::{ChangeOutcome, MigChange, MigOrder, MigOrderResult};
use cleave_agent::node::REMOVAL_DELAY;
use cleave_gpu::mps::wire::Desired;

use super::WHOLE_GPU_RESOURCE;
use super::simulated_gpu::GPU_UUID;
use super::test_node::{ALLOCATION_GRACE, TestNode};
use crate::fixtures::{mig_spec, record_answer};

#[test]
fn nothing_is_removed_without_the_kubelets_list_of_allocations() {
    let mut node = TestNode::new("H100-80");
    node.set_spec(vec![mig_spec(GPU_UUID, &[("1g.10gb", 0, 0)])]);
    node.run();
    let before = node.mig_devices();
    node.set_spec(vec![mig_spec(GPU_UUID, &[("2g.20gb", 0, 0)])]);
    node.agent.record_pod_resources(Err("no".into()), node.now, &mut node.table.allocations);
    for _ in 0..10 {
        node.reconcile();
        assert!(node.orders.is_empty());
        node.now += REMOVAL_DELAY;
    }
    assert_eq!(node.mig_devices(), before);
    // Without a checkpoint, the agent waits for the grace period, in which it learns the
    // allocations from the kubelet's lists.
    node.restart_agent(false);
    for _ in 0..10 {
        node.reconcile();
        assert!(node.orders.is_empty(), "{:?}", node.orders);
        node.now += REMOVAL_DELAY;
    }
    node.now += ALLOCATION_GRACE;
    node.run();
    assert!(node.is_applied() && node.has_exactly_instances(&[("2g.20gb", 0)]));
}

/// On a new node, the first pod does not wait for the grace period.
#[test]
fn a_new_agent_knows_all_users_once_the_list_contains_the_kubelets_checkpoint() {
    let mut node = TestNode::new("H100-80");
    node.set_spec(vec![mig_spec(GPU_UUID, &[("1g.10gb", 0, 0)])]);
    node.agent.record_kubelet_checkpoint(Some(Arc::default()));
    let started = node.now;
    node.run_until_applied();
    assert!(node.is_applied() && node.now < started + ALLOCATION_GRACE, "{:?}", node.step_results());

    let instance = node.mig_devices().into_keys().next().unwrap();
    let allocated = [("example.com/nic", "eth1".to_owned()), ("nvidia.com/mig-1g.10gb", format!("{instance}::0"))];
    let allocated = allocated.map(|(resource, id)| (resource.to_owned(), id));
    node.set_spec(vec![mig_spec(GPU_UUID, &[("2g.20gb", 0, 0)])]);
    node.restart_agent(false);
    node.agent.record_kubelet_checkpoint(Some(Arc::new(allocated.into())));
    for _ in 0..10 {
        node.run_round();
        assert!(node.orders.is_empty(), "the kubelet has not listed the pod yet: {:?}", node.orders);
    }
    let waits = node.last.status.steps.iter().find(|step| step.result == "Waiting").unwrap();
    assert_eq!((waits.gpu.as_str(), waits.reason.as_str()), (GPU_UUID, "UsersUnknown"));
    // The kubelet found that the pod has ended.
    node.agent.record_kubelet_checkpoint(Some(Arc::default()));
    let started = node.now;
    node.run_until_applied();
    assert!(node.has_exactly_instances(&[("2g.20gb", 0)]) && node.now < started + ALLOCATION_GRACE / 2);
}

#[test]
fn a_slice_in_use_is_kept_after_a_restart_without_a_checkpoint() {
    let mut node = TestNode::new("H100-80");
    node.set_spec(vec![mig_spec(GPU_UUID, &[("1g.10gb", 0, 0)])]);
    node.run();
    node.allocate(0);
    let before = node.mig_devices();
    node.set_spec(vec![mig_spec(GPU_UUID, &[("2g.20gb", 0, 0)])]);
    node.restart_agent(false);
    node.now += ALLOCATION_GRACE;
    node.run();
    assert_eq!(node.mig_devices(), before);
    assert!(node.step_messages().contains("in use by ns/p1"), "{}", node.step_messages());
    node.allocated.clear();
    node.run();
    assert!(node.is_applied() && node.has_exactly_instances(&[("2g.20gb", 0)]));
}

#[test]
fn an_instance_is_destroyed_only_after_its_daemon_has_exited() {
    let mut node = TestNode::new("H100-80");
    node.set_spec(vec![mig_spec(GPU_UUID, &[("2g.20gb", 0, 4)])]);
    node.run();
    node.set_spec(vec![mig_spec(GPU_UUID, &[])]);
    node.reconcile();
    assert!(node.orders.is_empty(), "the slices are withdrawn from the kubelet first");
    node.now += REMOVAL_DELAY;
    node.reconcile();
    assert!(node.orders.is_empty() && node.step_messages().contains("has not exited yet"), "{}", node.step_messages());
    node.read_desired_file();
    node.reconcile();
    assert!(node.orders.is_empty() && node.step_messages().contains("has not exited yet"), "{}", node.step_messages());
    node.apply_desired_file();
    node.reconcile();
    assert!(matches!(node.orders[0].change, MigChange::Destroy(_)));
    node.perform_order();
    node.run();
    assert!(node.is_applied() && node.has_exactly_instances(&[]));
}

#[test]
fn an_instance_is_kept_while_a_new_mps_host_may_start_its_daemon() {
    let mut node = TestNode::new("H100-80");
    node.set_spec(vec![mig_spec(GPU_UUID, &[("2g.20gb", 0, 4)])]);
    node.run();
    node.host = Desired::default();
    node.report_mps_host_status(String::new());
    node.set_spec(vec![mig_spec(GPU_UUID, &[])]);
    node.reconcile();
    node.now += REMOVAL_DELAY;
    node.reconcile();
    assert!(node.orders.is_empty() && node.step_messages().contains("has not yet read"), "{}", node.step_messages());
    node.apply_desired_file();
    node.reconcile();
    assert_eq!(node.orders.len(), 1);
}

#[test]
fn a_late_answer_to_a_query_before_a_change_is_ignored() {
    let mut node = TestNode::new("H100-80");
    node.set_spec(vec![mig_spec(GPU_UUID, &[("1g.10gb", 0, 0)])]);
    node.run();
    let (requested_at, late) = (node.now, node.gpu.inventory());
    node.set_spec(vec![mig_spec(GPU_UUID, &[("2g.20gb", 0, 0)])]);
    node.now += ALLOCATION_GRACE;
    node.run();
    record_answer(&mut node.agent, late, requested_at);
    node.reconcile();
    assert!(node.is_applied() && node.orders.is_empty() && node.count_healthy_slices("nvidia.com/mig-2g.20gb") == 1);
}

#[test]
fn a_change_that_hangs_is_reported_and_delays_other_changes_of_its_gpu() {
    let mut node = TestNode::new("H100-80");
    node.set_spec(vec![mig_spec(GPU_UUID, &[("1g.10gb", 0, 0), ("1g.10gb", 1, 0)])]);
    while !matches!(node.orders.first(), Some(MigOrder { change: MigChange::Create { .. }, .. })) {
        node.perform_order();
        node.apply_desired_file();
        node.list_allocations();
        node.now += ALLOCATION_GRACE;
        node.reconcile();
    }
    let order = node.orders.pop().unwrap();
    let slow = ChangeOutcome::Slow(Duration::from_secs(15));
    node.agent.record_order_result(
        MigOrderResult { order: order.clone(), outcome: slow, after: None, at: node.now },
        node.now,
    );
    for _ in 0..10 {
        node.read_gpu();
        node.reconcile();
        assert!(node.orders.is_empty());
        node.now += ALLOCATION_GRACE;
    }
    assert!(node.step_messages().contains("has not answered for 15 s"), "{}", node.step_messages());
    // Now the call that was hanging returns.
    node.orders = vec![order];
    node.perform_order();
    node.run();
    assert!(
        node.is_applied() && node.has_exactly_instances(&[("1g.10gb", 0), ("1g.10gb", 1)]),
        "{:?}",
        node.step_results()
    );
    assert!(node.step_results().iter().all(|(_, result)| *result == "Done"), "{:?}", node.step_results());
}

#[test]
fn a_device_that_is_being_removed_is_not_allocated_even_if_the_spec_contains_it_again() {
    let mut node = TestNode::new("H100-80");
    node.set_spec(vec![]);
    node.run();
    node.set_spec(vec![mig_spec(GPU_UUID, &[("1g.10gb", 0, 0)])]);
    node.reconcile();
    node.now += REMOVAL_DELAY;
    node.reconcile();
    assert_eq!(node.orders.len(), 1);
    node.set_spec(vec![]);
    node.reconcile();
    assert!(node.allocate(0).is_none() && !node.is_applied());
    node.perform_order();
    node.run();
    assert!(node.is_applied() && node.count_healthy_slices(WHOLE_GPU_RESOURCE) == 1);
}

/// Kills the agent after each possible number of steps of a repartitioning.
#[test]
fn a_repartitioning_continues_after_the_agent_was_killed_at_any_step() {
    for checkpoint in [true, false] {
        for in_change in [false, true] {
            for killed_after in 0..40 {
                let mut node = TestNode::new("H100-80");
                node.set_spec(vec![mig_spec(GPU_UUID, &[("3g.40gb", 4, 0), ("1g.10gb", 0, 0), ("1g.10gb", 1, 4)])]);
                node.run_until_applied();
                node.allocate(usize::MAX);
                let used = node.allocated[0].ids[0].clone();
                let kept: Vec<_> =
                    node.mig_devices().into_iter().filter(|(uuid, _)| used.starts_with(uuid.as_str())).collect();
                let start = kept[0].1.1;
                let wanted = match start {
                    4 => vec![("3g.40gb", 4, 0), ("2g.20gb", 0, 4), ("1g.10gb", 2, 0)],
                    0 => vec![("1g.10gb", 0, 0), ("1g.10gb", 2, 0), ("2g.20gb", 4, 4)],
                    _ => vec![("1g.10gb", 1, 4), ("1g.10gb", 2, 0), ("2g.20gb", 4, 4)],
                };
                node.set_spec(vec![mig_spec(GPU_UUID, &wanted)]);
                for step in 0..killed_after {
                    match step % 4 {
                        0 => node.reconcile(),
                        1 => node.apply_desired_file(),
                        2 => node.perform_order(),
                        _ => node.now += REMOVAL_DELAY,
                    }
                }
                if in_change && let Some(MigOrder { change, .. }) = node.orders.pop() {
                    let mut gpu = node.gpu.lock();
                    match change {
                        MigChange::Create { profile, start } => drop(gpu.create_gpu_instance(&profile, start)),
                        MigChange::Destroy(instance) => gpu.destroy_compute_instance(instance.gpu_instance).unwrap(),
                        MigChange::Mode(_) => {}
                    }
                }
                node.orders.clear();
                node.restart_agent(checkpoint);
                node.now += ALLOCATION_GRACE;
                node.run_until_applied();
                let case = format!(
                    "after {killed_after} steps, in a change: {in_change}, with a checkpoint: {checkpoint}: {:?}",
                    node.step_results()
                );
                assert!(node.is_applied(), "{case}");
                assert!(
                    node.has_exactly_instances(
                        &wanted.iter().map(|&(name, start, _)| (name, start)).collect::<Vec<_>>()
                    ),
                    "{case}"
                );
                assert_eq!(node.mig_devices()[&kept[0].0], kept[0].1, "{case}");
            }
        }
    }
}
