//! Tests gangs at the gate: pods that are released and evicted together.
use std::collections::BTreeMap;

use cleave_api::names::CAPACITY_LABEL;
use serde_json::json;

use super::quotas::{Case, keeper};
use super::world::at;
use crate::policies::demand::Reason;

#[test]
fn a_gang_is_released_by_one_reconcile_or_not_at_all() {
    let gang =
        |gpus: usize| {
            Case::new(gpus, &[("a", json!({}))])
                .waiting(&[("g1", "a", 5, 0), ("g2", "a", 5, 0), ("g3", "a", 5, 0)])
                .gang("a", "train", 3, &["g1", "g2", "g3"])
        };
    let mut full = gang(1);
    let actions = full.step();
    assert!(actions.releases.is_empty() && actions.waiting.len() == 3, "{actions:?}");
    // The free units suffice for two of the three pods, and remain available to other pods.
    full.waiting(&[("other", "a", 10, 0)]).expect(&[], &["other"]);
    let mut enough = gang(2);
    assert_eq!(enough.step().releases.len(), 3, "in one reconcile");
}

#[test]
fn a_gang_waits_until_all_of_its_pods_exist() {
    let mut case = Case::new(2, &[("a", json!({"min": 20}))])
        .waiting(&[("g1", "a", 5, 0), ("g2", "a", 5, 0), ("alone", "a", 5, 0)])
        .gang("a", "train", 3, &["g1", "g2"]);
    let actions = case.step();
    assert_eq!(actions.releases.len(), 1, "the pod without a gang");
    for name in ["a/g1", "a/g2"] {
        let waiting = &actions.waiting[name];
        assert_eq!(waiting.reason, Reason::GangIncomplete, "{name}");
        assert!(waiting.message.contains("none is released before 3 pods exist"), "{}", waiting.message);
    }
    case.waiting(&[("g3", "a", 5, 0)]).gang("a", "train", 3, &["g3"]).expect(&[], &["alone", "g1", "g2", "g3"]);
}

#[test]
fn a_gang_within_its_guarantee_reclaims_units_for_all_of_its_pods() {
    Case::new(2, &[("a", json!({"min": 20})), ("b", json!({}))])
        .running(&[(("b1", "b", 10, 0), 0), (("b2", "b", 10, 0), 1)])
        .waiting(&[("g1", "a", 10, 0), ("g2", "a", 10, 0)])
        .gang("a", "train", 2, &["g1", "g2"])
        .expect(&[("Reclaim", "g1", "b1"), ("Reclaim", "g1", "b2")], &["g1", "g2"]);
}

#[test]
fn no_pod_is_evicted_for_a_gang_that_would_get_only_part_of_its_units() {
    Case::new(2, &[("a", json!({"min": 20})), ("b", json!({"min": 10})), ("c", json!({}))])
        .running(&[(("b1", "b", 10, 0), 0), (("c1", "c", 10, 0), 1)])
        .waiting(&[("g1", "a", 10, 0), ("g2", "a", 10, 0)])
        .gang("a", "train", 2, &["g1", "g2"])
        .expect(&[], &["b1", "c1"]);
}

#[test]
fn all_pods_of_a_gang_are_evicted_together() {
    Case::new(3, &[("a", json!({"min": 5})), ("b", json!({}))])
        .running(&[(("g1", "b", 10, 0), 0), (("g2", "b", 10, 0), 1), (("b3", "b", 10, 7), 2)])
        .gang("b", "train", 2, &["g1", "g2"])
        .waiting(&[("a1", "a", 5, 0)])
        .expect(&[("Reclaim", "a1", "g1"), ("Reclaim", "a1", "g2")], &["a1", "b3"]);
}

#[test]
fn a_disruption_budget_of_one_pod_protects_the_whole_gang() {
    let mut case = Case::new(2, &[("a", json!({"min": 5})), ("b", json!({}))])
        .running(&[(("g1", "b", 10, 0), 0), (("g2", "b", 10, 0), 1)])
        .gang("b", "train", 2, &["g1", "g2"])
        .waiting(&[("a1", "a", 5, 0)]);
    case.world.change(|world| &mut world.pods, "b/g2", |pod| pod["metadata"]["labels"] = json!({"app": "g2"}));
    let budget = json!({"metadata": {"name": "keep", "namespace": "b", "generation": 1},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "g2"}}},
        "status": {"disruptionsAllowed": 0, "currentHealthy": 1, "desiredHealthy": 2, "expectedPods": 1, "observedGeneration": 1}});
    case.world.budgets.insert("keep".to_owned(), budget);
    let actions = case.step();
    assert!(actions.evictions.is_empty(), "{actions:?}");
    assert_eq!(actions.waiting["a/a1"].reason, Reason::Protected);
}

#[test]
fn a_replacement_pod_of_a_running_gang_is_released_alone() {
    Case::new(2, &[("a", json!({}))])
        .running(&[(("g1", "a", 5, 0), 0)])
        .waiting(&[("g2", "a", 5, 0)])
        .gang("a", "train", 2, &["g1", "g2"])
        .expect(&[], &["g1", "g2"]);
}

#[test]
fn a_gang_has_one_class_and_one_label() {
    let mut case = Case::new(2, &[("a", json!({"min": 10}))])
        .waiting(&[("g1", "a", 6, 0), ("g2", "a", 6, 0), ("small", "a", 4, 0)])
        .gang("a", "train", 2, &["g1", "g2"]);
    while !case.step().releases.is_empty() {}
    let label = |name: &str| case.world.pods[name]["metadata"]["labels"][CAPACITY_LABEL].clone();
    assert_eq!([label("a/g1"), label("a/g2"), label("a/small")], ["over-quota", "over-quota", "in-quota"]);
}

#[test]
fn gangs_have_no_effect_without_an_enforced_quota() {
    for quotas in [vec![], vec![("a", json!({"mode": "Count"}))]] {
        let case =
            Case::new(1, &quotas).waiting(&[("g1", "a", 6, 0), ("g2", "a", 6, 0)]).gang("a", "train", 2, &["g1", "g2"]);
        let actions = keeper().reconcile(&case.world.cluster(), &BTreeMap::new(), at(1));
        assert_eq!(actions.releases.len(), 1, "the pod that fits is released");
    }
}
