//! Finds the disruption budgets that limit the eviction of a pod, as the Eviction API does. Pure.
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::pods::PodObject;
use crate::read::BudgetObject;

/// Value of `unhealthyPodEvictionPolicy`: pods that are not ready can always be evicted.
const ALWAYS_ALLOW: &str = "AlwaysAllow";

/// The cluster's disruption budgets.
#[derive(Clone)]
pub(super) struct DisruptionBudgets<'a> {
    all: Vec<&'a BudgetObject>,
    /// Indices in `all`, by the namespace of the budget.
    of_namespace: BTreeMap<&'a str, Vec<usize>>,
}

/// Whether disruption budgets allow the eviction of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BudgetProtection {
    /// No budget limits evictions of the pod.
    None,
    /// The budget with this index allows evictions.
    Budget(usize),
    /// The API server would refuse an eviction now.
    Protected,
    /// The API server has accepted an eviction of the pod. The pod is about to terminate.
    Evicted,
}

impl<'a> DisruptionBudgets<'a> {
    pub(super) fn new(budgets: &'a [Arc<BudgetObject>]) -> Self {
        let all: Vec<&BudgetObject> = budgets.iter().map(AsRef::as_ref).collect();
        let mut of_namespace: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (index, budget) in all.iter().enumerate() {
            of_namespace.entry(namespace(budget.metadata.namespace.as_deref())).or_default().push(index);
        }
        Self { all, of_namespace }
    }

    /// Returns the number of evictions that each budget allows now.
    pub(super) fn allowed_evictions(&self) -> Vec<u32> {
        self.all.iter().map(|budget| budget.allowed_evictions()).collect()
    }

    /// Returns whether budgets allow the eviction of a pod that is bound.
    pub(super) fn protection(&self, pod: &PodObject) -> BudgetProtection {
        // The Eviction API ignores budgets for pods in the phase `Pending`.
        if pod.status.phase == "Pending" {
            return BudgetProtection::None;
        }
        let in_namespace = self.of_namespace.get(namespace(pod.metadata.namespace.as_deref()));
        let mut selecting = in_namespace.into_iter().flatten().filter_map(|&index| {
            let budget = self.all.get(index)?;
            budget.selects(pod).then_some((index, *budget))
        });
        let Some((index, budget)) = selecting.next() else { return BudgetProtection::None };
        if budget.has_evicted(pod) {
            return BudgetProtection::Evicted;
        }
        // The Eviction API supports at most one budget for each pod.
        if selecting.next().is_some() {
            return BudgetProtection::Protected;
        }
        match budget.allowed_evictions() {
            _ if budget.ignores_unready() && !pod.ready => BudgetProtection::None,
            0 => BudgetProtection::Protected,
            _ => BudgetProtection::Budget(index),
        }
    }
}

impl BudgetObject {
    /// Returns the number of evictions that the budget allows now. Returns 0 if the budget's status
    /// does not include the latest change of the budget's spec.
    pub(super) fn allowed_evictions(&self) -> u32 {
        let is_current = self.status.observed_generation >= self.metadata.generation.unwrap_or(0);
        if is_current { u32::try_from(self.status.disruptions_allowed).unwrap_or(0) } else { 0 }
    }

    /// Returns whether pods that are not ready can be evicted even if the budget allows no
    /// evictions.
    pub(super) fn ignores_unready(&self) -> bool {
        let status = &self.status;
        self.spec.unhealthy_pod_eviction_policy.as_deref() == Some(ALWAYS_ALLOW)
            || status.desired_healthy > 0 && status.current_healthy >= status.desired_healthy
    }

    /// Returns whether the budget selects the pod. An empty selector selects all pods of the
    /// namespace. A missing selector selects no pod.
    fn selects(&self, pod: &PodObject) -> bool {
        let labels = pod.labels();
        self.spec.selector.as_ref().is_some_and(|selector| selector.matches(labels))
    }

    /// Returns whether the API server has accepted an eviction of the pod. Ignores an entry of an
    /// earlier pod with the same name.
    fn has_evicted(&self, pod: &PodObject) -> bool {
        let evicted = pod.metadata.name.as_ref().and_then(|name| self.status.disrupted_pods.get(name));
        let created = pod.metadata.creation_timestamp.as_ref();
        evicted.is_some_and(|evicted| created.is_none_or(|created| created.0 <= evicted.0))
    }
}

fn namespace(name: Option<&str>) -> &str {
    name.unwrap_or("default")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn budget(name: &str, selector: Value, status: Value) -> Arc<BudgetObject> {
        let mut object = json!({"metadata": {"name": name, "namespace": "team", "generation": 2}, "spec": {}});
        object["spec"]["selector"] = selector;
        object["status"] = status;
        Arc::new(serde_json::from_value(object).unwrap())
    }

    fn pod(status: Value) -> PodObject {
        let mut object = json!({"metadata": {"name": "p", "namespace": "team", "labels": {"app": "web"},
            "creationTimestamp": "2026-01-02T00:00:00Z"}, "spec": {"nodeName": "n"}});
        object["status"] = status;
        let mut pod: PodObject = serde_json::from_value(object).unwrap();
        pod.trim();
        pod
    }

    fn running_pod() -> PodObject {
        pod(json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}))
    }

    fn budget_status(count: i32) -> Value {
        json!({"observedGeneration": 2, "disruptionsAllowed": count, "currentHealthy": 1, "desiredHealthy": 2})
    }

    #[test]
    fn budgets_protect_a_pod_as_in_the_eviction_api() {
        let web = || json!({"matchLabels": {"app": "web"}});
        for (budgets, expected, why) in [
            (vec![], BudgetProtection::None, "no budget"),
            (
                vec![budget("a", web(), budget_status(1))],
                BudgetProtection::Budget(0),
                "one budget that allows an eviction",
            ),
            (
                vec![budget("a", web(), budget_status(0))],
                BudgetProtection::Protected,
                "one budget that allows no eviction",
            ),
            (
                vec![budget("a", web(), budget_status(1)), budget("b", json!({}), budget_status(1))],
                BudgetProtection::Protected,
                "two budgets",
            ),
            (
                vec![budget("a", json!({}), budget_status(0))],
                BudgetProtection::Protected,
                "an empty selector selects every pod",
            ),
            (
                vec![budget("a", Value::Null, budget_status(0))],
                BudgetProtection::None,
                "a missing selector selects no pod",
            ),
            (
                vec![budget("a", json!({"matchLabels": {"app": "db"}}), budget_status(0))],
                BudgetProtection::None,
                "other labels",
            ),
            (
                vec![budget("a", web(), json!({"observedGeneration": 1, "disruptionsAllowed": 3}))],
                BudgetProtection::Protected,
                "the status is older than the budget",
            ),
            (
                vec![budget(
                    "a",
                    web(),
                    json!({"observedGeneration": 2, "disruptedPods": {"p": "2026-01-02T00:00:05Z"}}),
                )],
                BudgetProtection::Evicted,
                "its eviction was accepted",
            ),
            (
                vec![budget(
                    "a",
                    web(),
                    json!({"observedGeneration": 2, "disruptedPods": {"p": "2026-01-01T00:00:00Z"}}),
                )],
                BudgetProtection::Protected,
                "an earlier pod of this name was evicted",
            ),
        ] {
            assert_eq!(DisruptionBudgets::new(&budgets).protection(&running_pod()), expected, "{why}");
        }
    }

    #[test]
    fn budgets_protect_only_pods_that_are_ready_or_needed() {
        let selector = json!({"matchLabels": {"app": "web"}});
        let protection = |budget: &Arc<BudgetObject>, pod: &PodObject| {
            DisruptionBudgets::new(std::slice::from_ref(budget)).protection(pod)
        };
        let unready = pod(json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "False"}]}));
        let too_few = budget("a", selector.clone(), budget_status(0));
        assert_eq!(protection(&too_few, &unready), BudgetProtection::Protected);
        assert_eq!(
            protection(&too_few, &pod(json!({"phase": "Pending"}))),
            BudgetProtection::None,
            "no container was started"
        );
        let enough =
            json!({"observedGeneration": 2, "disruptionsAllowed": 0, "currentHealthy": 2, "desiredHealthy": 2});
        let enough = budget("a", selector.clone(), enough);
        assert_eq!(protection(&enough, &unready), BudgetProtection::None, "enough other pods are healthy");
        assert_eq!(protection(&enough, &running_pod()), BudgetProtection::Protected);
        let mut always = (*too_few).clone();
        always.spec.unhealthy_pod_eviction_policy = Some("AlwaysAllow".to_owned());
        assert_eq!(protection(&Arc::new(always), &unready), BudgetProtection::None);
    }

    #[test]
    fn a_budget_of_another_namespace_selects_no_pod() {
        let mut other = (*budget("a", json!({}), budget_status(0))).clone();
        other.metadata.namespace = Some("other".to_owned());
        assert_eq!(DisruptionBudgets::new(&[Arc::new(other)]).protection(&running_pod()), BudgetProtection::None);
    }
}
