//! Tests invalid and changing quotas.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::GpuQuotaStatus;
use cleave_api::names::CAPACITY_LABEL;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::quotas::{Case, PodOfCase};
use super::world::at;
use crate::policies::demand::Reason;

/// Returns the statuses of the quotas of a case, by name.
fn statuses(case: &mut Case) -> BTreeMap<String, GpuQuotaStatus> {
    case.step();
    let actions = case.step();
    let reports = case.keeper.quota_reports(&case.world.cluster(), &actions.waiting, at(case.seconds));
    reports.statuses.into_iter().collect()
}

/// Returns the status, reason and message of a condition.
fn condition(status: &GpuQuotaStatus, type_: &str) -> (String, String, String) {
    let condition = status.conditions.iter().find(|condition| condition.type_ == type_).unwrap();
    (condition.status.clone(), condition.reason.clone(), condition.message.clone())
}

fn spec<'c>(case: &'c mut Case, quota: &str) -> &'c mut Value {
    let found = case.world.quotas.iter_mut().find(|object| object["metadata"]["name"] == quota);
    &mut found.unwrap()["spec"]
}

#[test]
fn absent_namespaces_and_models_are_reported_and_the_quota_is_ready() {
    let mut case = Case::new(1, &[("a", json!({"min": 5})), ("b", json!({"min": 5, "gpus": {"models": ["B300"]}}))]);
    case.world.namespaces.push(json!({"metadata": {"name": "b"}}));
    let statuses = statuses(&mut case);
    let (ready, _, message) = condition(&statuses["a"], "Ready");
    assert!(ready == "True" && message.contains("These namespaces do not exist: a"), "{message}");
    let (ready, _, message) = condition(&statuses["b"], "Ready");
    assert!(ready == "True" && message.contains("No node has such GPUs") && !message.contains("exist"), "{message}");
    let (guaranteed, reason, message) = condition(&statuses["b"], "Guaranteed");
    assert_eq!((guaranteed.as_str(), reason.as_str()), ("False", "Overcommitted"), "{message}");
}

#[test]
fn overcommitted_guarantees_are_reported_on_each_quota_and_no_pod_is_evicted() {
    let mut case = Case::new(1, &[("a", json!({"min": 10})), ("b", json!({"min": 10}))])
        .running(&[(("a1", "a", 10, 0), 0)])
        .waiting(&[("b1", "b", 10, 1000)]);
    let statuses = statuses(&mut case);
    for name in ["a", "b"] {
        let (status, reason, message) = condition(&statuses[name], "Guaranteed");
        assert_eq!((status.as_str(), reason.as_str()), ("False", "Overcommitted"));
        assert!(message.contains("guarantee 2 GPUs, and 1 GPUs are healthy"), "{message}");
        assert_eq!(condition(&statuses[name], "Ready").0, "True");
    }
    case.expect(&[], &["a1"]);
}

#[test]
fn a_pod_that_loses_its_guarantee_is_evicted_only_for_a_pod_within_a_guarantee() {
    let changes: [fn(&mut Case); 3] = [
        |case| spec(case, "a")["min"] = json!("0"),
        |case| case.world.quotas.retain(|quota| quota["metadata"]["name"] != "a"),
        |case| {
            spec(case, "a")["namespaces"] = json!(["elsewhere"]);
            spec(case, "b")["namespaces"] = json!(["a", "b"]);
            spec(case, "b")["min"] = json!("0");
        },
    ];
    for change in changes {
        let mut case = Case::new(1, &[("a", json!({"min": 10})), ("b", json!({})), ("c", json!({"min": 10}))])
            .waiting(&[("a1", "a", 10, 0)])
            .until_rest();
        assert_eq!(case.is_running(), BTreeSet::from(["a1".to_owned()]));
        change(&mut case);
        let case = case.until_rest();
        assert!(case.evicted.is_empty(), "a1 borrows now, and no other pod requests its units: {:?}", case.evicted);
        case.waiting(&[("c1", "c", 10, 0)]).expect(&[("Reclaim", "c1", "a1")], &["c1"]);
    }
}

#[test]
fn a_max_below_the_current_use_evicts_no_pod_and_keeps_new_pods_at_the_gate() {
    let mut case =
        Case::new(2, &[("a", json!({"max": 20}))]).waiting(&[("a1", "a", 10, 0), ("a2", "a", 5, 0)]).until_rest();
    spec(&mut case, "a")["max"] = json!("1");
    case.add(("a3", "a", 1, 0), None);
    let actions = case.step();
    assert_eq!(actions.waiting["a/a3"].reason, Reason::OverMax);
    assert!(actions.waiting["a/a3"].message.contains("its max is 1"), "{}", actions.waiting["a/a3"].message);
    case.expect(&[], &["a1", "a2"]);
}

#[test]
fn a_forged_label_is_overwritten_and_protects_no_pod() {
    let mut case = Case::new(1, &[("a", json!({"min": 10})), ("b", json!({}))]).waiting(&[("b1", "b", 10, 0)]);
    case.world.change(
        |world| &mut world.pods,
        "b/b1",
        |pod| pod["metadata"]["labels"] = json!({CAPACITY_LABEL: "in-quota", "app": "x"}),
    );
    let mut case = case.until_rest();
    assert_eq!(case.world.pods["b/b1"]["metadata"]["labels"], json!({CAPACITY_LABEL: "over-quota", "app": "x"}));
    case.world.change(
        |world| &mut world.pods,
        "b/b1",
        |pod| pod["metadata"]["labels"][CAPACITY_LABEL] = json!("in-quota"),
    );
    let actions = case.step();
    let reports = case.keeper.quota_reports(&case.world.cluster(), &actions.waiting, at(case.seconds));
    assert_eq!(
        reports.labels.iter().map(|label| (label.pod.as_str(), label.value)).collect::<Vec<_>>(),
        [("b/b1", Some("over-quota"))]
    );
    case.waiting(&[("a1", "a", 10, 0)]).expect(&[("Reclaim", "a1", "b1")], &["a1"]);
}

#[test]
fn labels_are_removed_when_the_last_quota_is_deleted() {
    let mut case = Case::new(1, &[("a", json!({"min": 10}))]).waiting(&[("a1", "a", 10, 0)]).until_rest();
    case.world.quotas.clear();
    let actions = case.step();
    let reports = case.keeper.quota_reports(&case.world.cluster(), &actions.waiting, at(case.seconds));
    assert_eq!(
        reports.labels.iter().map(|label| (label.pod.as_str(), label.value)).collect::<Vec<_>>(),
        [("a/a1", None)]
    );
    assert!(reports.statuses.is_empty() && reports.usages.is_empty());
}

#[test]
fn thousands_of_quotas_with_long_names_and_huge_amounts_do_not_prevent_a_release() {
    let mut case = Case::new(1, &[("a", json!({"min": 5}))]).waiting(&[("a1", "a", 5, 0)]);
    let template = case.world.quotas[0].clone();
    for at in 0..10_000 {
        let mut quota = template.clone();
        let name = format!("{at:0>253}");
        quota["metadata"]["name"] = json!(name);
        quota["spec"]["namespaces"] = json!([format!("n{at}")]);
        quota["spec"]["min"] = json!(["1e18", "1000000", "-1", "0.0001"][at % 4]);
        case.world.quotas.push(quota);
    }
    let actions = case.step();
    assert_eq!(actions.releases.len(), 1);
    let reports = case.keeper.quota_reports(&case.world.cluster(), &actions.waiting, at(case.seconds));
    assert_eq!(reports.statuses.len(), 10_001);
    let invalid = reports.statuses.iter().filter(|(_, status)| condition(status, "Ready").1 == "Invalid");
    assert!(invalid.count() >= 5_000, "1e18 and -1 are refused");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Without an enforced quota, every decision is the same as without any quota, even if invalid
    /// quotas exist.
    #[test]
    fn without_an_enforced_quota_decisions_do_not_depend_on_quotas(
        pods in proptest::collection::vec((0_usize..3, 1_u32..9, 0_i32..3), 1..14),
        gpus in 1_usize..3,
        steps in 1_usize..6,
    ) {
        const NAMES: [&str; 3] = ["a", "b", "-"];
        let names: Vec<String> = (0..pods.len()).map(|at| format!("p{at}")).collect();
        let of: Vec<PodOfCase<'_>> = pods
            .iter()
            .zip(&names)
            .map(|((quota, shares, priority), name)| (name.as_str(), NAMES[*quota], *shares, *priority))
            .collect();
        let counting = json!({"min": 5, "max": 6, "lend": 1, "mode": "Count"});
        let invalid = json!({"min": 9, "max": 1});
        let cases = [vec![], vec![("a", counting.clone()), ("b", counting)], vec![("a", invalid)]];
        let decisions = cases.map(|quotas| {
            let mut case = Case::new(gpus, &quotas).waiting(&of);
            (0..steps).map(|_| case.step()).collect::<Vec<_>>()
        });
        prop_assert_eq!(&decisions[0], &decisions[1]);
        prop_assert_eq!(&decisions[0], &decisions[2]);
    }
}

#[test]
fn the_oldest_quota_of_a_pool_shows_what_pods_without_a_quota_use() {
    let mut case = Case::new(1, &[("a", json!({"min": 5})), ("b", json!({}))])
        .running(&[(("x1", "-", 6, 0), 0)])
        .waiting(&[("x2", "-", 10, 0)]);
    let statuses = statuses(&mut case);
    let unnamed = statuses["a"].unnamed.clone().unwrap();
    assert_eq!((unnamed.used.as_str(), unnamed.share.as_str(), unnamed.pods, unnamed.waiting), ("0.6", "0.60", 1, 1));
    assert_eq!(statuses["b"].unnamed, None, "one quota suffices");
}

#[test]
fn pods_that_kueue_admits_are_reported_while_the_quota_is_enforced() {
    for (mode, expected) in [("Enforce", "AlsoKueue"), ("Count", "Counting")] {
        let mut case = Case::new(1, &[("a", json!({"min": 5, "mode": mode}))]).running(&[(("a1", "a", 5, 0), 0)]);
        let label = |pod: &mut Value| pod["metadata"]["labels"] = json!({"kueue.x-k8s.io/podset": "main"});
        case.world.change(|world| &mut world.pods, "a/a1", label);
        let (_, reason, message) = condition(&statuses(&mut case)["a"], "Enforced");
        assert_eq!(reason, expected);
        assert_eq!(message.contains("such as a/a1"), mode == "Enforce", "{message}");
    }
}

/// A later version of Cleave may know values that this version does not know.
fn make_malformed(case: &mut Case, quota: &str) {
    spec(case, quota)["mode"] = json!("OfALaterVersion");
}

#[test]
fn the_last_readable_version_of_a_quota_remains_in_effect() {
    let mut case = Case::new(1, &[("a", json!({"min": 10})), ("b", json!({"min": 10}))])
        .running(&[(("a1", "a", 10, 0), 0)])
        .waiting(&[("b1", "b", 10, 0)]);
    case.step();
    make_malformed(&mut case, "a");
    for _ in 0..3 {
        assert!(case.step().evictions.is_empty(), "{:?}", case.evicted);
    }
    let first = statuses(&mut case);
    let (ready, reason, message) = condition(&first["a"], "Ready");
    assert_eq!((ready.as_str(), reason.as_str(), first["a"].used.as_str()), ("False", "Malformed", "1"));
    assert!(message.contains("OfALaterVersion") && message.contains("remains in effect"), "{message}");
    assert_eq!(statuses(&mut case)["a"], first["a"], "an equal status is not written again");
    let actions = case.step();
    let reports = case.keeper.quota_reports(&case.world.cluster(), &actions.waiting, at(case.seconds));
    assert_eq!(reports.malformed.iter().collect::<Vec<_>>(), ["a"]);
    case.world.quotas.retain(|quota| quota["metadata"]["name"] != "a");
    case.step();
    assert_eq!(case.evicted, [("Reclaim".to_owned(), "b1".to_owned(), "a1".to_owned())], "the quota is deleted");
}

/// A new operator may start with a quota that it cannot read.
#[test]
fn no_pod_is_evicted_for_another_quota_while_an_unknown_quota_may_guarantee_its_units() {
    for others in [vec![], vec![("b", json!({"min": 10}))]] {
        let quotas: Vec<(&str, Value)> = std::iter::once(("a", json!({"min": 10}))).chain(others).collect();
        let mut case = Case::new(1, &quotas)
            .running(&[(("a1", "a", 10, 0), 0)])
            .waiting(&[("b1", "b", 10, 1000), ("x1", "-", 10, 1000)]);
        make_malformed(&mut case, "a");
        for _ in 0..3 {
            assert!(case.step().evictions.is_empty(), "{quotas:?}: {:?}", case.evicted);
        }
        let (ready, reason, message) = condition(&statuses(&mut case)["a"], "Ready");
        assert_eq!((ready.as_str(), reason.as_str()), ("False", "Malformed"));
        assert!(message.contains("evicts no pods"), "{message}");
        spec(&mut case, "a")["mode"] = json!("Enforce");
        case.step();
        case.end("a/a1");
        assert!(case.until_rest().evicted.is_empty());
    }
}

#[test]
fn pods_of_a_quota_that_only_counts_have_no_label() {
    let counting = json!({"min": 5, "mode": "Count"});
    for (others, expected) in [(vec![], vec![]), (vec![("b", json!({"min": 5}))], vec!["b/b1", "other/x1"])] {
        let quotas: Vec<(&str, Value)> = std::iter::once(("a", counting.clone())).chain(others).collect();
        let mut case = Case::new(2, &quotas)
            .running(&[(("a1", "a", 2, 0), 0), (("b1", "b", 2, 0), 0), (("x1", "-", 2, 0), 0)])
            .waiting(&[("a2", "a", 2, 0)]);
        let actions = case.step();
        assert_eq!(case.world.pods["a/a2"]["metadata"]["labels"][CAPACITY_LABEL], Value::Null);
        let reports = case.keeper.quota_reports(&case.world.cluster(), &actions.waiting, at(case.seconds));
        assert_eq!(reports.labels.iter().map(|label| label.pod.as_str()).collect::<Vec<_>>(), expected);
    }
}
