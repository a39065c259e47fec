//! Tests pods that may use several pools of GPUs, and nodes without quotas.
use std::collections::BTreeMap;

use cleave_api::names::CAPACITY_LABEL;
use serde_json::{Value, json};

use super::quotas::{Case, keeper};
use super::world::{at, nodes_of, released, requesting, whole_gpus};
use crate::policies::demand::Reason;

/// Returns the spec of a quota of H100 GPUs. Node `n1` has H100 GPUs.
fn of_h100(mut spec: Value) -> Value {
    spec["gpus"] = json!({"models": ["H100"]});
    spec
}

/// Adds the node `n2` with this number of L4 GPUs.
fn with_l4(mut case: Case, gpus: usize) -> Case {
    case.world = case.world.node("n2", &vec![0; gpus]);
    let set = |object: &mut Value| {
        for gpu in object["status"]["gpus"].as_array_mut().unwrap() {
            gpu["model"] = json!("L4");
        }
    };
    case.world.change(|world| &mut world.gpu_nodes, "n2", set);
    case
}

#[test]
fn a_pod_uses_gpus_without_a_quota_if_its_pool_is_full() {
    let exempt = |case: &mut Case| {
        let labels = json!({"cleave.dev/allow": "quota"});
        case.world.namespaces.push(json!({"metadata": {"name": "other", "labels": labels}}));
    };
    let counted = |case: &mut Case| {
        let mut quota = case.world.quotas[0].clone();
        (quota["metadata"]["name"], quota["spec"]) =
            (json!("counted"), json!({"namespaces": ["l"], "gpus": {"models": ["L4"]}, "mode": "Count"}));
        case.world.quotas.push(quota);
    };
    let changes: [fn(&mut Case); 3] = [|_| {}, exempt, counted];
    for change in changes {
        let case = Case::new(1, &[("a", of_h100(json!({"min": 10})))]);
        let mut case = with_l4(case, 1).running(&[(("a1", "a", 10, 0), 0)]).waiting(&[("x1", "-", 5, 0)]);
        change(&mut case);
        let actions = case.step();
        assert_eq!(
            (released(&actions), nodes_of(&actions)),
            (vec![("other/x1", "reserved")], vec![vec!["n2".to_owned()]])
        );
        assert!(case.evicted.is_empty(), "{:?}", case.evicted);
    }
}

#[test]
fn a_pod_uses_a_second_pool_if_the_first_is_full() {
    // In the first pool, the pods without a quota have the lower share.
    let quotas = [("a", of_h100(json!({"min": 10}))), ("l", json!({"gpus": {"models": ["L4"]}}))];
    let mut case = with_l4(Case::new(1, &quotas), 1).running(&[(("a1", "a", 10, 0), 0)]).waiting(&[("x1", "-", 3, 0)]);
    assert_eq!(nodes_of(&case.step()), [["n2"]]);
    let mut case = case.waiting(&[("x2", "-", 3, 0)]);
    assert_eq!(nodes_of(&case.step()), [["n2"]]);
}

#[test]
fn a_pod_over_the_maximum_of_one_pool_uses_others() {
    let case = Case::new(2, &[("a", of_h100(json!({"min": 5, "max": 5})))]);
    let mut case =
        with_l4(case, 2).running(&[(("a1", "a", 5, 0), 0)]).waiting(&[("a2", "a", 5, 0), ("a3", "a", 10, 0)]);
    assert_eq!(nodes_of(&case.step()), [["n2"], ["n2"]]);
}

#[test]
fn free_room_of_any_pool_is_used_before_pods_are_evicted() {
    let case = Case::new(1, &[("a", of_h100(json!({"min": 10}))), ("b", of_h100(json!({})))]);
    let mut case = with_l4(case, 1).running(&[(("b1", "b", 10, 0), 0)]).waiting(&[("a1", "a", 10, 0)]);
    let actions = case.step();
    assert_eq!((nodes_of(&actions), actions.evictions.len()), (vec![vec!["n2".to_owned()]], 0));
    let mut case = case.waiting(&[("a2", "a", 10, 0)]);
    assert_eq!(case.step().evictions.len(), 1, "no pool has room");
}

#[test]
fn without_free_room_a_pod_keeps_its_nomination_in_one_pool() {
    let quotas =
        [("a", of_h100(json!({"min": 10}))), ("b", of_h100(json!({}))), ("l", json!({"gpus": {"models": ["L4"]}}))];
    let mut case = with_l4(Case::new(1, &quotas), 1);
    case.world = case.world.pod_with("l4", 10, json!({"nodeName": "n2", "schedulingGates": [], "priority": 0}));
    case.reality.given.insert("team/l4".to_owned(), ("n2-GPU-0".to_owned(), 10));
    let mut case = case.running(&[(("b1", "b", 10, 0), 0)]).waiting(&[("a1", "a", 10, 1000)]);
    case.ending = super::quotas::Ending::Terminating;
    assert_eq!(case.step().evictions.len(), 1);
    for _ in 0..3 {
        let actions = case.step();
        assert!(actions.evictions.is_empty(), "{actions:?}");
    }
    case.end("b/b1");
    assert_eq!(nodes_of(&case.step()), [["n1"]]);
}

#[test]
fn whole_gpus_count() {
    let world = whole_gpus(super::world::TestCluster::default(), "n1", &[0, 0, 0]);
    let two = |name: &str| (name.to_owned(), requesting("nvidia.com/gpu", 2));
    let mut world =
        [two("first"), two("second")].into_iter().fold(world, |world, (name, spec)| world.pod_with(&name, 0, spec));
    world.quotas.push(json!({"apiVersion": "cleave.dev/v1alpha1", "kind": "GpuQuota", "metadata": {"name": "team"},
        "spec": {"namespaces": ["team"], "min": "2", "max": "3"}}));
    let mut keeper = keeper();
    let actions = keeper.reconcile(&world.cluster(), &BTreeMap::new(), at(1));
    assert_eq!(released(&actions), [("team/first", "reserved")]);
    let waiting = &actions.waiting["team/second"];
    assert_eq!(waiting.reason, Reason::OverMax);
    assert!(waiting.message.contains("would use 4 GPUs, and its max is 3"), "{}", waiting.message);
    assert!(world.apply_release(&actions.releases[0]));
    assert_eq!(world.pods["team/first"]["metadata"]["labels"][CAPACITY_LABEL], "in-quota");
}
