//! Tests how long disruption budgets protect borrowers.
use serde_json::json;

use super::quotas::Case;
use super::world::at;
use crate::evict::EvictionResult;
use crate::placement::actions::{Actions, QuotaEviction};

/// Seconds for which a budget protects a borrower, by default.
const PATIENCE: u64 = 600;

/// Returns the evictions of a reconcile: each pod, and whether its budget is ignored.
fn evictions(actions: &Actions) -> Vec<(&str, bool)> {
    let force = |quota: &QuotaEviction| quota.force;
    actions.evictions.iter().map(|one| (one.pod.as_str(), one.quota.as_ref().is_some_and(force))).collect()
}

/// Creates a case in which a borrower without a quota uses the only GPU, a budget protects it, and a
/// pod within its guarantee waits.
fn protected_borrower() -> Case {
    let mut case =
        Case::new(1, &[("a", json!({"min": 10}))]).running(&[(("x1", "-", 10, 0), 0)]).waiting(&[("a1", "a", 10, 0)]);
    let budget = json!({"metadata": {"name": "all", "namespace": "other", "generation": 1}, "spec": {"selector": {}},
        "status": {"disruptionsAllowed": 0, "observedGeneration": 1, "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1}});
    case.world.budgets.insert("all".to_owned(), budget);
    case
}

#[test]
fn a_budget_protects_a_borrower_without_a_quota_for_a_limited_time() {
    let mut case = protected_borrower();
    let first = case.decide_at(100);
    assert_eq!(evictions(&first), []);
    let reports = case.keeper.quota_reports(&case.world.cluster(), &first.waiting, at(100));
    let labels: Vec<_> = reports.labels.iter().map(|label| (label.pod.as_str(), label.value)).collect();
    // The admission policy permits the operator to delete only pods with this label.
    assert_eq!(labels, [("other/x1", Some("over-quota"))]);
    assert_eq!(evictions(&case.decide_at(100 + PATIENCE - 1)), []);
    assert_eq!(evictions(&case.decide_at(100 + PATIENCE)), [("other/x1", true)]);
}

#[test]
fn a_refused_deletion_of_a_borrower_is_retried_later_and_not_in_each_reconcile() {
    let mut case = protected_borrower();
    case.decide_at(100);
    let actions = case.decide_at(100 + PATIENCE);
    let refused = EvictionResult::Refused("denied by a policy".to_owned());
    case.keeper.record_eviction(&actions.evictions[0], &refused, at(100 + PATIENCE).up);
    assert_eq!(evictions(&case.decide_at(101 + PATIENCE)), []);
    assert_eq!(evictions(&case.decide_at(110 + PATIENCE)), [("other/x1", true)]);
}
