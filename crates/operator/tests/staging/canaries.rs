//! Tests which node is the canary, what proves a change, and what replaces the canary.
use std::collections::BTreeMap;

use cleave_api::gpunode::Health;
use cleave_operator::policies::staging::{FAILURE_TIME, PROOF_TIME};

use crate::world::{FIVE_SHARES_YAML, TEN_SHARES_TWO_NODES_YAML, TEN_SHARES_YAML, World};

/// Returns the spec of a policy that selects the nodes with this label.
fn spec(selector: &str, units: u32) -> String {
    format!("nodeSelector: {{{selector}}}\nmode: Mps\nmps: {{units: {units}}}\nrollout: {{maxUnavailable: 3}}")
}

fn set_pool(world: &mut World, node: &str, pool: &str) {
    let labels = [("zone", "a"), ("pool", pool)].map(|(key, value)| (key.to_owned(), value.to_owned()));
    world.observed.nodes.get_mut(node).unwrap().labels = BTreeMap::from(labels);
}

/// Returns a cluster in which policy `p` selects the nodes n0 to n3 of pool `old`, and policy `q`
/// the nodes n4 to n9 of pool `new`.
fn two_pools() -> World {
    let mut world = World::new(10);
    (0..10).for_each(|at| set_pool(&mut world, &format!("n{at}"), if at < 4 { "old" } else { "new" }));
    world.set_policy("p", &spec("pool: old", 5));
    world.set_policy("q", &spec("pool: new", 5));
    world.run_pass();
    world.serve_all();
    world
}

/// Sets or removes the cordon annotation of a node's first GPU.
fn set_gpu_cordon(world: &mut World, node: &str, cordoned: bool) {
    let uuid = world.gpu(node).uuid.clone();
    let annotations = BTreeMap::from([("cleave.dev/cordon".to_owned(), uuid)]);
    world.object(node).metadata.annotations = cordoned.then_some(annotations);
}

fn daemon_is_unavailable() -> Health {
    Health { reason: "MpsUnavailable".to_owned(), ..Health::default() }
}

#[test]
fn a_change_reaches_one_node_of_a_cordoned_pool() {
    let mut world = World::with_policy(5, FIVE_SHARES_YAML);
    (0..5).for_each(|at| world.observed.nodes.get_mut(&format!("n{at}")).unwrap().unschedulable = true);
    world.set_policy("p", TEN_SHARES_TWO_NODES_YAML);
    assert_eq!(world.run_pass(), ["n0"]);
    assert!(world.run_pass().is_empty(), "the canary is being repartitioned");
    world.report_step("n0", "Failed", "");
    world.wait_for_failure();
    assert!(world.run_pass().is_empty(), "the canary failed");
    world.apply("n0");
    assert!(world.run_pass().is_empty(), "the canary has served only briefly");
    world.wait_for_proof();
    assert_eq!(world.write(), ["n1", "n2"]);
}

#[test]
fn a_change_reaches_one_node_of_a_pool_with_cordoned_gpus() {
    let mut world = World::with_policy(5, FIVE_SHARES_YAML);
    (0..5).for_each(|at| set_gpu_cordon(&mut world, &format!("n{at}"), true));
    world.run_pass();
    world.serve_all();
    world.set_policy("p", TEN_SHARES_TWO_NODES_YAML);
    assert_eq!(world.run_pass(), ["n0"]);
    world.serve("n0");
    assert!(world.run_pass().is_empty(), "the canary does not prove the change");
    let (_, reason, message) = world.condition("RolledOut");
    assert_eq!(reason, "RollingOut");
    assert!(message.contains("hold back the other nodes until they are uncordoned and serve: n0"), "{message}");
    let mut other = world.clone();
    set_gpu_cordon(&mut other, "n3", false);
    assert_eq!(other.run_pass(), ["n3"], "a node that can serve replaces the canary");
    assert!(other.run_pass().is_empty());
    set_gpu_cordon(&mut world, "n0", false);
    assert_eq!(world.run_pass(), ["n0"], "the end of the cordon");
    world.apply("n0");
    let (_, _, message) = world.condition("RolledOut");
    assert!(message.contains("have served for less than 10 s: n0"), "{message}");
    world.wait_for_proof();
    assert_eq!(world.write(), ["n1", "n2"]);
}

#[test]
fn a_change_reaches_only_one_node_of_a_pool_that_failed_before() {
    let mut world = World::with_policy(4, FIVE_SHARES_YAML);
    (0..4).for_each(|at| world.gpu(&format!("n{at}")).health = daemon_is_unavailable());
    world.run_pass();
    world.now += FAILURE_TIME;
    world.set_policy("p", TEN_SHARES_TWO_NODES_YAML);
    assert_eq!(world.run_pass(), ["n0"]);
    assert!(world.run_pass().is_empty());
    world.report_step("n0", "Failed", "");
    world.staged_plan();
    world.now += FAILURE_TIME;
    assert!(world.run_pass().is_empty(), "a second failed node would not show whether the change works");
    world.serve("n2");
    assert_eq!(world.run_pass(), ["n2"], "a repaired node replaces the canary");
    world.serve("n2");
    assert_eq!(world.run_pass(), ["n1", "n3"]);
}

#[test]
fn a_node_that_joins_during_a_rollout_extends_it() {
    let mut world = two_pools();
    world.set_policy("p", &spec("pool: old", 10));
    assert_eq!(world.run_pass(), ["n0"]);
    world.apply("n0");
    world.staged_plan();
    world.now += PROOF_TIME / 2;
    set_pool(&mut world, "n4", "old");
    assert!(world.run_pass().is_empty(), "the canary has not served for long enough");
    world.now += PROOF_TIME / 2;
    assert_eq!(world.run_pass(), ["n1", "n2", "n3"], "the canary proves the change");
    world.serve_all();
    set_pool(&mut world, "n5", "old");
    assert_eq!(world.run_pass(), ["n4", "n5"]);
    world.gpu("n0").health = daemon_is_unavailable();
    world.wait_for_failure();
    let (_, _, message) = world.condition("RolledOut");
    assert!(message.contains("n0 failed"), "the change may have caused the failure: {message}");
}

#[test]
fn an_incomplete_change_does_not_prove_a_change_of_other_gpus() {
    let mut world = two_pools();
    for at in 4..10 {
        let gpu = world.gpu(&format!("n{at}"));
        (gpu.model, gpu.memory_mib) = ("NVIDIA A100-SXM4-40GB".to_owned(), 40_960);
    }
    for _ in 0..4 {
        world.run_pass();
        world.serve_all();
    }
    assert!(world.run_pass().is_empty());
    world.set_policy("p", &spec("pool: old", 10));
    assert_eq!(world.run_pass(), ["n0"]);
    world.serve("n0");
    assert_eq!(world.run_pass(), ["n1", "n2", "n3"]);
    world.serve("n1");
    world.serve("n2");
    world.set_policy("q", &spec("pool: none", 5));
    world.set_policy("p", &spec("zone: a", 10));
    assert!(world.run_pass().is_empty(), "the canary waits for n3");
    world.apply("n3");
    assert!(world.run_pass().is_empty(), "n3 may still fail");
    world.wait_for_proof();
    assert_eq!(world.run_pass(), ["n4"], "the canary");
    world.serve("n4");
    world.gpu("n0").health = daemon_is_unavailable();
    assert!(world.run_pass().is_empty(), "the first change may have caused the failure");
}

#[test]
fn faults_of_nodes_that_changed_before_do_not_stop_the_next_change() {
    let mut world = two_pools();
    world.set_policy("p", &spec("pool: old", 10));
    for _ in 0..3 {
        world.run_pass();
        world.serve_all();
    }
    assert_eq!(world.condition("RolledOut").0, "True");
    // The nodes of policy `q` now follow policy `p`. The first change has already brought the
    // partition of `p` to other nodes.
    world.set_policy("q", &spec("pool: none", 5));
    world.set_policy("p", &spec("zone: a", 10));
    assert_eq!(world.run_pass(), ["n4"], "the canary");
    world.gpu("n0").health.class = "NeedsReset".to_owned();
    world.gpu("n1").health = daemon_is_unavailable();
    world.serve("n4");
    assert_eq!(world.run_pass(), ["n5", "n6", "n7"], "the second change did not cause the faults");
    world.gpu("n4").health.class = "NeedsReset".to_owned();
    world.wait_for_failure();
    let (_, reason, message) = world.condition("RolledOut");
    assert_eq!(reason, "RolloutStopped");
    assert!(message.contains("n4 failed"), "{message}");
}

#[test]
fn a_change_is_complete_once_the_last_node_has_served_long_enough() {
    let mut world = World::with_policy(1, FIVE_SHARES_YAML);
    world.set_policy("p", TEN_SHARES_YAML);
    world.run_pass();
    world.apply("n0");
    let (status, _, message) = world.condition("RolledOut");
    assert_eq!(status, "False");
    assert!(message.contains("1 of 1 nodes serve the newest partition"), "{message}");
    assert!(message.contains("have served for less than 10 s: n0"), "{message}");
    assert_eq!(world.staged_plan().1, Some(PROOF_TIME), "the operator plans again when the change is complete");
    world.now += PROOF_TIME / 5;
    world.gpu("n0").health = daemon_is_unavailable();
    world.wait_for_failure();
    let (status, _, message) = world.condition("RolledOut");
    assert_eq!(status, "False");
    assert!(message.contains("n0 failed"), "{message}");
    world.serve("n0");
    assert_eq!(world.condition("RolledOut").0, "True");
}

#[test]
fn only_gpus_that_the_change_affects_prove_the_change() {
    let mut world = World::new(0);
    for at in 0..3 {
        world.add_node(at);
        let gpus = &mut world.object(&format!("n{at}")).status.as_mut().unwrap().gpus;
        let mut first = gpus[0].clone();
        first.uuid = format!("GPU-{at:08}-1111-0000-0000-000000000000");
        (first.model, first.memory_mib) = ("NVIDIA A100-SXM4-40GB".to_owned(), 40_960);
        gpus.insert(0, first);
    }
    world.set_policy("p", TEN_SHARES_TWO_NODES_YAML);
    world.set_policy("q", &format!("gpus: {{models: [A100]}}\n{FIVE_SHARES_YAML}"));
    world.run_pass();
    world.serve_all();
    (0..3).for_each(|at| world.use_slice(&format!("n{at}")));
    // The first GPU of each node now follows policy `p`. The second GPU already serves the
    // partition of `p`.
    world.observed.policies.remove("q");
    assert_eq!(world.run_pass(), ["n0"]);
    world.apply("n0");
    world.use_slice("n0");
    world.report_step("n0", "Waiting", "InUse");
    world.wait_for_proof();
    assert!(world.run_pass().is_empty(), "the second GPU does not prove the change");
    world.serve("n0");
    assert_eq!(world.run_pass(), ["n1", "n2"]);
}
