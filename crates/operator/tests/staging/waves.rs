//! Tests which nodes change in which order, and what stops a change.
use std::collections::BTreeMap;

use cleave_api::gpunode::{Health, MpsStatus};
use cleave_api::sharingpolicy::{Enforcement, RolloutStatus};
use cleave_operator::policies::apply::changes;
use cleave_operator::policies::snapshot::DEFAULT_APPLY_DEADLINE;
use cleave_operator::policies::staging::{FAILURE_TIME, PROOF_TIME, Staging};
use cleave_operator::policies::status::condition_event;
use cleave_operator::read::Agent;

use crate::world::{FIVE_SHARES_YAML, TEN_SHARES_TWO_NODES_YAML, TEN_SHARES_YAML, World};

#[test]
fn a_change_reaches_one_node_and_then_waves_of_nodes() {
    let mut world = World::with_policy(5, FIVE_SHARES_YAML);
    world.set_policy("p", TEN_SHARES_TWO_NODES_YAML);
    assert_eq!(world.run_pass(), ["n0"]);
    assert_eq!(world.shares(), [10, 5, 5, 5, 5]);
    assert!(world.run_pass().is_empty(), "the canary does not serve yet");
    world.serve("n0");
    assert_eq!(world.run_pass(), ["n1", "n2"]);
    world.serve("n2");
    assert_eq!(world.run_pass(), ["n3"]);
    world.serve_all();
    assert_eq!(world.run_pass(), ["n4"]);
    world.serve_all();
    assert!(world.run_pass().is_empty());
    assert_eq!(world.shares(), [10; 5]);
}

#[test]
fn by_default_a_quarter_of_the_nodes_changes_at_a_time() {
    let mut world = World::with_policy(8, FIVE_SHARES_YAML);
    world.set_policy("p", TEN_SHARES_YAML);
    let mut waves = Vec::new();
    while waves.last() != Some(&0) {
        waves.push(world.run_pass().len());
        world.serve_all();
    }
    assert_eq!(waves, [1, 2, 2, 2, 1, 0]);
}

#[test]
fn a_new_leader_continues_the_rollout() {
    let mut world = World::with_policy(4, FIVE_SHARES_YAML);
    world.set_policy("p", TEN_SHARES_TWO_NODES_YAML);
    world.run_pass();
    world.staging = Staging::default();
    assert!(world.run_pass().is_empty(), "the canary of the former leader has not finished");
    world.serve_all();
    world.staging = Staging::default();
    assert!(world.run_pass().is_empty(), "the new leader does not know how long the canary has served");
    world.wait_for_proof();
    assert_eq!(world.run_pass(), ["n1"], "the new leader does not know which nodes have changed");
    world.serve("n1");
    assert_eq!(world.run_pass(), ["n2", "n3"]);
    // The former leader began the change of the node that waits for pods.
    let mut world = World::with_policy(5, FIVE_SHARES_YAML);
    (0..5).for_each(|at| world.use_slice(&format!("n{at}")));
    world.set_policy("p", TEN_SHARES_TWO_NODES_YAML);
    assert_eq!(world.run_pass(), ["n0"]);
    world.report_step("n0", "Waiting", "InUse");
    world.staging = Staging::default();
    assert!(world.run_pass().is_empty());
    world.serve("n0");
    assert_eq!(world.run_pass(), ["n1", "n2"]);
}

#[test]
fn a_node_serves_the_change_once_its_agent_and_its_daemon_serve_it() {
    let mut world = World::with_policy(2, FIVE_SHARES_YAML);
    // The numbers of slices do not change, so only the agent knows whether the limits are new.
    world.set_policy("p", "mode: Mps\nmps: {units: 5, threads: Strict}");
    assert_eq!(world.run_pass(), ["n0"]);
    assert!(world.run_pass().is_empty(), "the agent has not read the spec");
    world.serve("n0");
    world.gpu("n0").mps = vec![MpsStatus { state: "Starting".to_owned(), ..MpsStatus::default() }];
    assert!(world.run_pass().is_empty(), "the daemon is starting");
    world.gpu("n0").mps[0].state = "Active".to_owned();
    world.wait_for_proof();
    let mut beside = world.clone();
    assert_eq!(world.run_pass(), ["n1"]);
    // A GPU of another policy is still being repartitioned, so the node does not match its plan.
    beside.object("n0").status.as_mut().unwrap().plan_id.clear();
    let mut unfinished = beside.clone();
    assert_eq!(beside.run_pass(), ["n1"]);
    unfinished.gpu("n0").slices[0].total = 4;
    assert!(unfinished.run_pass().is_empty());
    // The agent's report decides.
    let plan_id = unfinished.object("n0").spec.plan_id.clone();
    unfinished.object("n0").status.as_mut().unwrap().plan_id = plan_id;
    unfinished.wait_for_proof();
    assert_eq!(unfinished.run_pass(), ["n1"]);
}

#[test]
fn a_canary_proves_the_change_after_it_has_served_long_enough() {
    let mut world = World::with_policy(3, FIVE_SHARES_YAML);
    let device = world.gpu("n0").uuid.clone();
    let daemon = |state: &str, restarts: u32| {
        let state = state.to_owned();
        vec![MpsStatus { device: device.clone(), state, restarts, ..MpsStatus::default() }]
    };
    world.set_policy("p", TEN_SHARES_YAML);
    assert_eq!(world.run_pass(), ["n0"]);
    world.apply("n0");
    world.gpu("n0").mps = daemon("Active", 0);
    assert!(world.run_pass().is_empty(), "the canary may still fail");
    assert_eq!(world.staged_plan().1, Some(PROOF_TIME), "the operator plans again when the canary proves the change");
    world.now += PROOF_TIME / 2;
    world.gpu("n0").mps = daemon("Restarting", 1);
    assert!(world.run_pass().is_empty());
    world.gpu("n0").mps = daemon("Active", 1);
    assert!(world.run_pass().is_empty());
    world.now += PROOF_TIME / 2;
    assert!(world.run_pass().is_empty(), "the daemon has restarted");
    // The daemon restarts between two passes.
    world.gpu("n0").mps = daemon("Active", 2);
    assert!(world.run_pass().is_empty());
    world.now += PROOF_TIME / 2;
    assert!(world.run_pass().is_empty());
    world.now += PROOF_TIME / 2;
    assert_eq!(world.run_pass(), ["n1"]);
}

#[test]
fn an_outage_of_a_daemon_without_a_rollout_is_not_a_failed_rollout() {
    let unavailable = || Health { reason: "MpsUnavailable".to_owned(), ..Health::default() };
    let daemon = |state: &str| vec![MpsStatus { state: state.to_owned(), restarts: 3, ..MpsStatus::default() }];
    let mut world = World::with_policy(3, FIVE_SHARES_YAML);
    assert_eq!(world.condition("RolledOut").0, "True");
    // An MPS host restarts, and later its daemon fails repeatedly.
    world.gpu("n1").mps = daemon("");
    assert_eq!(world.condition("RolledOut").0, "True");
    world.gpu("n1").mps = daemon("BackOff");
    world.gpu("n1").health = unavailable();
    world.staged_plan();
    world.now += FAILURE_TIME;
    assert_eq!(world.condition("RolledOut").0, "True");
    assert_eq!(world.condition("Ready").1, "GpuUnhealthy");
    let expected = RolloutStatus { updated: 3, ..RolloutStatus::default() };
    assert_eq!(world.rollout_status(), expected);
    // A node whose daemon fails just after its change has not served the partition.
    let mut world = World::new(2);
    world.set_policy("p", FIVE_SHARES_YAML);
    world.run_pass();
    ["n0", "n1"].into_iter().for_each(|node| world.apply(node));
    assert_eq!(world.condition("RolledOut").0, "True");
    world.now += PROOF_TIME / 2;
    world.gpu("n1").health = unavailable();
    world.staged_plan();
    world.now += FAILURE_TIME;
    assert_eq!(world.condition("RolledOut").0, "False");
}

#[test]
fn the_status_of_a_daemon_with_older_settings_does_not_prove_the_change() {
    let mut world = World::with_policy(2, FIVE_SHARES_YAML);
    world.set_policy("p", "mode: Mps\nmps: {units: 5, threads: Strict}");
    assert_eq!(world.run_pass(), ["n0"]);
    // The agent lists the shares as Unhealthy before it changes them, and until the MPS host has
    // applied the new settings. The numbers of shares do not change.
    let device = world.gpu("n0").uuid.clone();
    world.serve("n0");
    world.gpu("n0").mps = vec![MpsStatus { device, state: "Active".to_owned(), ..MpsStatus::default() }];
    world.gpu("n0").slices[0].unhealthy = 5;
    let plan_id = std::mem::take(&mut world.object("n0").status.as_mut().unwrap().plan_id);
    assert!(world.run_pass().is_empty(), "the agent is about to change the shares");
    world.object("n0").status.as_mut().unwrap().plan_id = plan_id;
    assert!(world.run_pass().is_empty(), "the MPS host has not applied the new settings");
    world.gpu("n0").slices[0].unhealthy = 0;
    world.wait_for_proof();
    assert_eq!(world.run_pass(), ["n1"]);
}

#[test]
fn the_time_of_a_failure_counts_from_the_newest_spec() {
    let mut world = World::with_policy(2, FIVE_SHARES_YAML);
    world.set_policy("p", TEN_SHARES_YAML);
    world.run_pass();
    world.report_step("n0", "Failed", "");
    world.staged_plan();
    let start = world.now;
    world.now = start + FAILURE_TIME * 6 / 10;
    world.set_policy("p", "mode: Mps\nmps: {units: 7}");
    assert_eq!(world.write(), ["n0"], "the node that serves no partition is the canary");
    // The agent has read the spec, and still reports the old failure.
    world.report_step("n0", "Failed", "");
    world.staged_plan();
    world.now = start + FAILURE_TIME * 12 / 10;
    assert_eq!(world.condition("RolledOut").1, "RollingOut");
    world.now = start + FAILURE_TIME * 16 / 10;
    assert_eq!(world.condition("RolledOut").1, "RolloutStopped");
}

#[test]
fn a_failure_lasts_while_only_other_gpus_of_the_node_change() {
    // The operator writes a spec for another GPU of the node.
    fn write_for_another_gpu(world: &mut World) {
        let object = world.object("n0");
        object.spec.plan_id.push('x');
        object.metadata.generation = object.metadata.generation.map(|generation| generation + 1);
    }
    let mut world = World::with_policy(3, FIVE_SHARES_YAML);
    world.set_policy("p", TEN_SHARES_YAML);
    world.run_pass();
    world.report_step("n0", "Failed", "");
    world.staged_plan();
    let start = world.now;
    world.now = start + FAILURE_TIME * 6 / 10;
    write_for_another_gpu(&mut world);
    assert_eq!(world.condition("RolledOut").1, "RollingOut", "the agent has not read the spec");
    world.report_step("n0", "Failed", "");
    world.now = start + FAILURE_TIME * 12 / 10;
    assert_eq!(world.condition("RolledOut").1, "RolloutStopped");
    write_for_another_gpu(&mut world);
    let (_, reason, message) = world.condition("RolledOut");
    assert_eq!(reason, "RolloutStopped");
    assert!(message.contains("n0 failed (GPU 0: NVML: In use by another client)"), "{message}");
    // The agent attempts the change again.
    world.report_step("n0", "Waiting", "");
    assert_eq!(world.condition("RolledOut").1, "RolloutStopped");
    world.report_step("n0", "Waiting", "InUse");
    assert_eq!(world.condition("RolledOut").1, "RollingOut");
}

#[test]
fn nodes_that_the_change_does_not_affect_are_not_canaries() {
    let mut world = World::new(12);
    let label = |world: &mut World, at: usize| {
        let pool = if at < 4 { "old" } else { "new" };
        let labels = [("zone", "a"), ("pool", pool)].map(|(key, value)| (key.to_owned(), value.to_owned()));
        world.observed.nodes.get_mut(&format!("n{at}")).unwrap().labels = BTreeMap::from(labels);
    };
    (0..12).for_each(|at| label(&mut world, at));
    let spec = |selector: &str, units: u32| {
        format!("nodeSelector: {{{selector}}}\nmode: Mps\nmps: {{units: {units}}}\nrollout: {{maxUnavailable: 3}}")
    };
    world.set_policy("p", &spec("pool: old", 10));
    world.set_policy("q", &spec("pool: new", 5));
    world.run_pass();
    world.serve_all();
    assert!(world.run_pass().is_empty());
    // The nodes of policy `q` now follow policy `p`. Other nodes already serve the partition of
    // `p`.
    world.set_policy("q", &spec("pool: none", 5));
    world.set_policy("p", &spec("zone: a", 10));
    assert_eq!(world.run_pass(), ["n10"]);
    world.add_node(12);
    label(&mut world, 12);
    assert_eq!(world.run_pass(), ["n12"]);
    world.serve("n12");
    assert!(world.run_pass().is_empty(), "a new node is also not a canary");
    world.serve("n10");
    assert_eq!(world.run_pass(), ["n11", "n4", "n5"]);
}

#[test]
fn a_fault_without_a_rollout_is_not_a_failed_rollout() {
    let mut world = World::with_policy(3, FIVE_SHARES_YAML);
    world.run_pass();
    world.gpu("n0").health.class = "NeedsReset".to_owned();
    world.staged_plan();
    world.now += FAILURE_TIME;
    assert_eq!(world.condition("RolledOut").0, "True");
    // The nodes that change later may continue, because the change did not cause the fault.
    world.set_policy("p", TEN_SHARES_YAML);
    assert_eq!(world.run_pass(), ["n1"]);
    // A fault of a node that has changed counts until the rollout is complete.
    world.serve_all();
    assert_eq!(world.run_pass(), ["n0"]);
    world.serve_all();
    assert_eq!(world.run_pass(), ["n2"]);
    world.gpu("n2").health.class = "NeedsReset".to_owned();
    world.wait_for_failure();
    let (status, _, message) = world.condition("RolledOut");
    assert_eq!(status, "False");
    assert!(message.contains("n2 failed"), "{message}");
    world.serve("n2");
    assert_eq!(world.condition("RolledOut").0, "True");
    world.gpu("n2").health.class = "NeedsReset".to_owned();
    world.staged_plan();
    world.now += FAILURE_TIME;
    assert_eq!(world.condition("RolledOut").0, "True");
}

#[test]
fn new_nodes_and_first_policies_do_not_wait() {
    let mut world = World::new(3);
    world.set_policy("p", FIVE_SHARES_YAML);
    assert_eq!(world.run_pass(), ["n0", "n1", "n2"], "the GPUs had no policy");
    world.serve_all();
    world.set_policy("p", TEN_SHARES_YAML);
    assert_eq!(world.run_pass(), ["n0"]);
    world.add_node(3);
    assert_eq!(world.run_pass(), ["n3"], "a new node gets the newest partition");
    world.serve("n3");
    assert_eq!(world.run_pass(), Vec::<String>::new(), "25% of four nodes, and n0 is changing");
}

#[test]
fn a_paused_policy_changes_no_gpu() {
    let mut world = World::with_policy(3, FIVE_SHARES_YAML);
    world.set_policy("p", "mode: Mps\nmps: {units: 10}\nrollout: {paused: true}");
    assert!(world.run_pass().is_empty());
    let (status, reason, message) = world.condition("RolledOut");
    assert_eq!((status.as_str(), reason.as_str()), ("False", "RolloutPaused"));
    assert!(message.contains("0 of 3 nodes serve the newest partition; pending: n0, n1, n2"), "{message}");
    assert_eq!(world.condition("Ready").1, "RolloutPaused");
    world.set_policy("p", TEN_SHARES_YAML);
    assert_eq!(world.run_pass(), ["n0"]);
    let mut first = World::new(2);
    first.set_policy("p", "mode: Mps\nmps: {units: 10}\nrollout: {paused: true}");
    assert!(first.run_pass().is_empty(), "not even GPUs without a policy change");
    first.add_node(2);
    assert_eq!(first.run_pass(), ["n2"], "a new node has no partition to keep");
}

#[test]
fn a_pause_during_a_rollout_keeps_both_partitions() {
    let mut world = World::with_policy(3, FIVE_SHARES_YAML);
    world.set_policy("p", TEN_SHARES_YAML);
    world.run_pass();
    world.serve_all();
    world.set_policy("p", "mode: Mps\nmps: {units: 10}\nrollout: {paused: true}");
    assert!(world.run_pass().is_empty());
    assert_eq!(world.shares(), [10, 5, 5]);
    assert_eq!(world.rollout_status(), RolloutStatus { updated: 1, pending: 2, ..RolloutStatus::default() });
}

#[test]
fn a_failed_canary_stops_the_change_and_is_reported_once() {
    for result in ["Failed", "Refused"] {
        let mut world = World::with_policy(3, FIVE_SHARES_YAML);
        world.set_policy("p", TEN_SHARES_YAML);
        world.run_pass();
        world.report_step("n0", result, "");
        assert_eq!(world.condition("RolledOut").1, "RollingOut", "the agent retries");
        world.wait_for_failure();
        assert!(world.run_pass().is_empty());
        let update = world.report().unwrap();
        let events: Vec<String> = update.changed.iter().filter_map(condition_event).map(|event| event.reason).collect();
        assert_eq!(events.iter().filter(|reason| *reason == "RolloutStopped").count(), 1, "{events:?}");
        let (status, reason, message) = world.condition("RolledOut");
        assert_eq!((status.as_str(), reason.as_str()), ("False", "RolloutStopped"));
        for part in ["n0 failed (GPU 0: NVML: In use by another client)", "0 of 3 nodes", "pending: n1, n2"] {
            assert!(message.contains(part), "{message}");
        }
        let expected = RolloutStatus { failed: 1, pending: 2, ..RolloutStatus::default() };
        assert_eq!(world.rollout_status(), expected);
        world.serve("n0");
        assert_eq!(world.run_pass(), ["n1"], "a repaired node lets the change continue");
    }
}

#[test]
fn a_failing_node_holds_back_other_nodes_immediately_and_under_a_new_leader() {
    let mut world = World::with_policy(6, FIVE_SHARES_YAML);
    world.set_policy("p", TEN_SHARES_TWO_NODES_YAML);
    world.run_pass();
    world.serve("n0");
    assert_eq!(world.run_pass(), ["n1", "n2"]);
    world.serve("n2");
    world.report_step("n1", "Failed", "");
    assert!(world.run_pass().is_empty(), "a recent failure holds back other nodes");
    world.wait_for_failure();
    assert!(world.run_pass().is_empty());
    world.staging = Staging::default();
    assert!(world.run_pass().is_empty(), "a new leader does not resume a stopped rollout");
    assert_eq!(world.condition("RolledOut").1, "RollingOut", "the report waits");
    world.wait_for_failure();
    assert_eq!(world.condition("RolledOut").1, "RolloutStopped");
    world.serve("n1");
    assert_eq!(world.run_pass(), ["n3"], "the canary of the new leader");
}

#[test]
fn a_write_for_another_gpu_does_not_begin_the_change_of_a_node() {
    let mut world = World::with_policy(10, FIVE_SHARES_YAML);
    world.set_policy("p", TEN_SHARES_TWO_NODES_YAML);
    world.run_pass();
    world.serve("n0");
    let mut restarting = world.clone();
    for name in (3..10).map(|at| format!("n{at}")) {
        let generation = &mut world.object(&name).metadata.generation;
        *generation = generation.map(|generation| generation + 1);
        restarting.gpu(&name).mps = vec![MpsStatus { state: "Starting".to_owned(), ..MpsStatus::default() }];
    }
    assert_eq!(world.write(), ["n1", "n2"], "the limit applies to nodes whose agent has not read its spec");
    assert!(restarting.write().is_empty(), "nodes whose daemon restarts count as unavailable");
}

#[test]
fn a_daemon_that_does_not_serve_stops_the_change() {
    let mut world = World::with_policy(3, FIVE_SHARES_YAML);
    world.set_policy("p", TEN_SHARES_YAML);
    world.run_pass();
    world.serve("n0");
    let health =
        Health { reason: "MpsUnavailable".to_owned(), message: "state BackOff".to_owned(), ..Health::default() };
    world.gpu("n0").health = health;
    world.wait_for_failure();
    assert!(world.run_pass().is_empty());
    assert_eq!(world.condition("RolledOut").1, "RolloutStopped");
    // The change may have caused the fault.
    world.gpu("n0").health.class = "NeedsReset".to_owned();
    assert!(world.run_pass().is_empty());
}

#[test]
fn failures_do_not_stop_the_change_if_the_policy_continues_on_failure() {
    let mut world = World::with_policy(3, FIVE_SHARES_YAML);
    world.set_policy("p", "mode: Mps\nmps: {units: 10}\nrollout: {onFailure: Continue}");
    world.run_pass();
    world.report_step("n0", "Failed", "");
    world.wait_for_failure();
    assert_eq!(world.run_pass(), ["n1"]);
}

#[test]
fn a_cordoned_node_does_not_stop_the_change() {
    let mut world = World::with_policy(3, FIVE_SHARES_YAML);
    world.set_policy("p", TEN_SHARES_YAML);
    world.run_pass();
    world.report_step("n0", "Failed", "");
    world.wait_for_failure();
    assert!(world.run_pass().is_empty());
    let mut unreachable = world.clone();
    let mut cordoned_gpu = world.clone();
    world.observed.nodes.get_mut("n0").unwrap().unschedulable = true;
    assert_eq!(world.run_pass(), ["n1"]);
    unreachable.taint("n0", "node.kubernetes.io/unreachable");
    assert!(unreachable.run_pass().is_empty(), "the change may have caused the failure of the node");
    let annotations = BTreeMap::from([("cleave.dev/cordon".to_owned(), cordoned_gpu.gpu("n0").uuid.clone())]);
    cordoned_gpu.object("n0").metadata.annotations = Some(annotations);
    assert_eq!(cordoned_gpu.run_pass(), ["n0", "n1"], "the cordon of n0, and the partition of n1");
}

#[test]
fn a_node_that_is_lost_after_its_change_stops_the_change() {
    for faulted in [true, false] {
        let mut world = World::with_policy(3, FIVE_SHARES_YAML);
        world.set_policy("p", TEN_SHARES_YAML);
        assert_eq!(world.run_pass(), ["n0"]);
        world.serve("n0");
        if faulted {
            world.gpu("n0").health.class = "NeedsReset".to_owned();
        } else {
            world.taint("n0", "node.kubernetes.io/not-ready");
        }
        assert!(world.run_pass().is_empty());
        world.wait_for_failure();
        assert!(world.run_pass().is_empty());
        let (status, reason, message) = world.condition("RolledOut");
        assert_eq!((status.as_str(), reason.as_str()), ("False", "RolloutStopped"));
        assert!(message.contains("n0 failed"), "{message}");
        world.observed.nodes.get_mut("n0").unwrap().unschedulable = true;
        assert_eq!(world.run_pass(), ["n1"], "an administrator cordoned the node");
    }
}

#[test]
fn a_gpu_that_was_faulted_before_the_change_does_not_stop_it() {
    let mut world = World::with_policy(3, FIVE_SHARES_YAML);
    world.gpu("n0").health.class = "NeedsReset".to_owned();
    world.observed.nodes.get_mut("n2").unwrap().agent = Some(Agent { ready: false });
    world.set_policy("p", TEN_SHARES_YAML);
    assert_eq!(world.run_pass(), ["n1"], "a faulted GPU is a poor canary");
    world.serve("n1");
    assert_eq!(world.run_pass(), ["n0"]);
    world.apply("n0");
    world.gpu("n0").health.class = "NeedsReset".to_owned();
    world.wait_for_failure();
    world.observed.nodes.get_mut("n2").unwrap().agent = Some(Agent { ready: true });
    assert_eq!(world.run_pass(), ["n2"]);
    world.serve("n2");
    let (status, reason, message) = world.condition("RolledOut");
    assert_eq!((status.as_str(), reason.as_str()), ("False", "RollingOut"));
    assert!(message.contains("2 of 3 nodes"), "{message}");
    world.serve("n0");
    assert_eq!(world.condition("RolledOut").0, "True");
    world.taint("n0", "node.kubernetes.io/unreachable");
    assert_eq!(world.condition("RolledOut").0, "True", "no rollout is in progress");
}

#[test]
fn a_node_whose_agent_does_not_report_counts_as_failed() {
    for has_read in [true, false] {
        let mut world = World::with_policy(3, FIVE_SHARES_YAML);
        world.set_policy("p", TEN_SHARES_YAML);
        assert_eq!(world.run_pass(), ["n0"]);
        if has_read {
            let object = world.object("n0");
            object.status.as_mut().unwrap().observed_generation = object.metadata.generation.unwrap();
        }
        world.observed.nodes.get_mut("n0").unwrap().agent = Some(Agent { ready: false });
        let (_, next) = world.staged_plan();
        assert_eq!(next, Some(DEFAULT_APPLY_DEADLINE), "the operator plans again at the deadline");
        world.now += DEFAULT_APPLY_DEADLINE / 2;
        assert_eq!(world.condition("RolledOut").1, "RollingOut");
        world.now += DEFAULT_APPLY_DEADLINE / 2;
        let mut onward = world.clone();
        assert!(world.run_pass().is_empty());
        let (_, reason, message) = world.condition("RolledOut");
        assert_eq!(reason, "RolloutStopped");
        assert!(message.contains("n0 failed (the agent has not reported the change within 30 s)"), "{message}");
        onward.set_policy("p", "mode: Mps\nmps: {units: 10}\nrollout: {onFailure: Continue}");
        assert_eq!(onward.run_pass(), ["n1"]);
        world.observed.nodes.get_mut("n0").unwrap().agent = Some(Agent { ready: true });
        world.serve("n0");
        assert_eq!(world.run_pass(), ["n1"]);
    }
}

#[test]
fn a_node_without_a_ready_agent_keeps_its_partition() {
    let mut world = World::with_policy(2, FIVE_SHARES_YAML);
    world.observed.nodes.get_mut("n0").unwrap().agent = Some(Agent { ready: false });
    world.set_policy("p", TEN_SHARES_YAML);
    assert_eq!(world.run_pass(), ["n1"]);
    world.serve("n1");
    assert!(world.run_pass().is_empty());
    world.observed.nodes.get_mut("n0").unwrap().agent = Some(Agent { ready: true });
    assert_eq!(world.run_pass(), ["n0"]);
}

#[test]
fn a_reverted_policy_reaches_failed_nodes_immediately() {
    let mut world = World::with_policy(4, FIVE_SHARES_YAML);
    world.set_policy("p", TEN_SHARES_TWO_NODES_YAML);
    world.run_pass();
    world.serve_all();
    world.run_pass();
    world.serve("n1");
    world.report_step("n2", "Failed", "");
    world.wait_for_failure();
    assert!(world.run_pass().is_empty());
    assert_eq!(world.shares(), [10, 10, 10, 5]);
    world.set_policy("p", "mode: Mps\nmps: {units: 5}\nrollout: {maxUnavailable: 1}");
    assert_eq!(world.run_pass(), ["n0", "n2"], "the failed node, and a wave of one");
    // The agent still reports the failure of the former spec.
    assert_eq!(world.condition("RolledOut").1, "RollingOut");
    world.serve_all();
    assert_eq!(world.run_pass(), ["n1"]);
    world.serve_all();
    assert_eq!(world.shares(), [5; 4]);
    let (status, reason, _) = world.condition("RolledOut");
    assert_eq!((status.as_str(), reason.as_str()), ("True", "RolledOut"));
}

#[test]
fn a_node_that_failed_before_the_change_does_not_stop_it() {
    let mut world = World::with_policy(4, FIVE_SHARES_YAML);
    let health = Health { reason: "MpsUnavailable".to_owned(), ..Health::default() };
    world.gpu("n1").health = health.clone();
    world.run_pass();
    world.set_policy("p", TEN_SHARES_YAML);
    assert_eq!(world.run_pass(), ["n0"]);
    world.serve("n0");
    assert_eq!(world.run_pass(), ["n1", "n2"], "n1 serves nothing that the change could interrupt");
    ["n1", "n2"].into_iter().for_each(|node| world.apply(node));
    world.gpu("n1").health = health.clone();
    world.wait_for_proof();
    assert_eq!(world.run_pass(), ["n3"]);
    // After the node has served, its next failure counts.
    world.serve_all();
    world.run_pass();
    world.set_policy("p", FIVE_SHARES_YAML);
    world.run_pass();
    world.serve("n0");
    assert_eq!(world.run_pass(), ["n1"]);
    world.serve("n1");
    world.gpu("n1").health = health;
    world.wait_for_failure();
    assert!(world.run_pass().is_empty());
}

#[test]
fn unused_nodes_do_not_wait_for_nodes_in_use() {
    let mut world = World::with_policy(4, FIVE_SHARES_YAML);
    world.use_slice("n0");
    world.use_slice("n1");
    world.set_policy("p", TEN_SHARES_YAML);
    assert_eq!(world.run_pass(), ["n2"]);
    world.serve("n2");
    assert_eq!(world.run_pass(), ["n3"]);
    world.serve("n3");
    assert_eq!(world.run_pass(), ["n0"]);
    world.report_step("n0", "Waiting", "InUse");
    assert!(world.run_pass().is_empty(), "one node at a time waits for pods");
    let expected = RolloutStatus { updated: 2, changing: 1, pending: 1, ..RolloutStatus::default() };
    assert_eq!(world.rollout_status(), expected);
    world.gpu("n1").slices[0].in_use = 0;
    assert_eq!(world.run_pass(), ["n1"], "its pod has ended");
}

#[test]
fn only_partitions_are_staged() {
    let mut world = World::with_policy(3, FIVE_SHARES_YAML);
    world.set_policy("p", &format!("{FIVE_SHARES_YAML}\nenforcement: Evict"));
    assert_eq!(world.run_pass(), ["n0", "n1", "n2"]);
    assert_eq!(world.object("n2").spec.gpus[0].enforcement, Enforcement::Evict);
    world.serve_all();
    // A GPU that is held back follows administrators' annotations, but not the new policy.
    world.set_policy("p", TEN_SHARES_YAML);
    world.run_pass();
    let uuid = world.gpu("n2").uuid.clone();
    world.object("n2").metadata.annotations = Some(BTreeMap::from([("cleave.dev/cordon".to_owned(), uuid)]));
    assert_eq!(world.run_pass(), ["n2"]);
    let held = &world.object("n2").spec.gpus[0];
    assert!(held.cordoned && held.enforcement == Enforcement::Evict);
    assert_eq!(world.shares(), [10, 5, 5]);
    // After the policy's deletion, all GPUs become whole.
    world.observed.policies.clear();
    assert_eq!(world.run_pass(), ["n0", "n1", "n2"]);
    assert_eq!(world.shares(), [0, 0, 0]);
}

#[test]
fn gpus_that_move_to_another_policy_are_staged_by_that_policy() {
    let mut world = World::with_policy(3, FIVE_SHARES_YAML);
    world.set_policy("specific", "gpus: {models: [H100]}\nmode: Mps\nmps: {units: 10}");
    assert_eq!(world.run_pass(), ["n0"]);
    assert_eq!(world.object("n1").spec.gpus[0].policy.as_deref(), Some("p"));
    world.serve_all();
    assert_eq!(world.run_pass(), ["n1"]);
}

#[test]
fn gpus_that_are_partitioned_on_demand_are_not_staged() {
    let mut world = World::with_policy(3, FIVE_SHARES_YAML);
    world.set_policy("p", "mode: Auto");
    let (plan, next) = world.staged_plan();
    assert_eq!((plan.demand.len(), next), (3, None));
    world.gpu("n0").mps = vec![MpsStatus { state: "Starting".to_owned(), ..MpsStatus::default() }];
    assert_eq!(world.condition("RolledOut").0, "True");
    world.gpu("n0").mps.clear();
    // A change from on-demand partitioning to a fixed partition is staged.
    world.run_pass();
    world.serve_all();
    world.set_policy("p", TEN_SHARES_YAML);
    assert_eq!(world.run_pass(), ["n0"]);
}

#[test]
fn nodes_that_keep_an_older_partition_are_not_ready() {
    let mut world = World::with_policy(2, FIVE_SHARES_YAML);
    assert_eq!(world.condition("Ready").0, "True");
    world.set_policy("p", TEN_SHARES_YAML);
    world.run_pass();
    world.serve_all();
    let (plan, _) = world.staged_plan();
    assert_eq!(changes(&plan, &world.observed).len(), 1);
    let mut paused = world.clone();
    paused.set_policy("p", "mode: Mps\nmps: {units: 10}\nrollout: {paused: true}");
    let (status, _, message) = paused.condition("Ready");
    assert_eq!(status, "False");
    assert!(message.contains("nodes keep an older partition: n1"), "{message}");
}
