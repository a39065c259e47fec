//! Which nodes a pod may run on, by the scheduler's rules: selector, required affinity, taints.
use std::collections::BTreeMap;

use crate::snapshot::{Node, NodeSelectorTerm, Operator, Pod, Requirement, Taint, Toleration};

/// What of a pod decides which nodes it may run on. Pods that agree in this are asked once.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Constraints<'a> {
    selector: &'a BTreeMap<String, String>,
    affinity: &'a [NodeSelectorTerm],
    tolerations: &'a [Toleration],
}

/// Why a pod may not run on a node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Refused {
    Selector(String),
    Affinity,
    Taint(String),
    Cordoned,
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Selector(label) => write!(f, "it does not have the label {label} that the pod selects"),
            Self::Affinity => f.write_str("it does not match the pod's node affinity"),
            Self::Taint(taint) => write!(f, "the pod does not tolerate its taint {taint}"),
            Self::Cordoned => f.write_str("it is cordoned"),
        }
    }
}

/// Why a pod may not run on a node, whoever leaves; nothing where it may.
pub fn refusal(pod: &Pod, node: &Node) -> Option<String> {
    Constraints::of(pod).admit(node).err().map(|refused| refused.to_string())
}

impl<'a> Constraints<'a> {
    pub(crate) fn of(pod: &'a Pod) -> Self {
        Self { selector: &pod.node_selector, affinity: &pod.affinity, tolerations: &pod.tolerations }
    }

    /// Whether a pod with these may run on the node.
    pub(crate) fn admit(&self, node: &Node) -> Result<(), Refused> {
        if let Some((key, value)) = self.selector.iter().find(|(key, value)| node.labels.get(*key) != Some(*value)) {
            return Err(Refused::Selector(format!("{key}={value}")));
        }
        if !self.affinity.is_empty() && !self.affinity.iter().any(|term| matches_term(term, node)) {
            return Err(Refused::Affinity);
        }
        if node.unschedulable && !self.tolerates(&cordon()) {
            return Err(Refused::Cordoned);
        }
        let hard = |taint: &&Taint| taint.effect == "NoSchedule" || taint.effect == "NoExecute";
        match node.taints.iter().filter(hard).find(|taint| !self.tolerates(taint)) {
            Some(taint) => Err(Refused::Taint(described(taint))),
            None => Ok(()),
        }
    }

    fn tolerates(&self, taint: &Taint) -> bool {
        self.tolerations.iter().any(|toleration| {
            let key = toleration.key.is_empty() && toleration.operator == "Exists" || toleration.key == taint.key;
            let value = match toleration.operator.as_str() {
                "Exists" => true,
                "" | "Equal" => toleration.value == taint.value,
                _ => false,
            };
            key && value && (toleration.effect.is_empty() || toleration.effect == taint.effect)
        })
    }
}

fn cordon() -> Taint {
    let key = "node.kubernetes.io/unschedulable".to_owned();
    Taint { key, value: String::new(), effect: "NoSchedule".to_owned() }
}

fn described(taint: &Taint) -> String {
    if taint.value.is_empty() { taint.key.clone() } else { format!("{}={}", taint.key, taint.value) }
}

fn matches_term(term: &NodeSelectorTerm, node: &Node) -> bool {
    let some = !term.match_expressions.is_empty() || !term.match_fields.is_empty();
    let field = |requirement: &Requirement| {
        let name = (requirement.key == "metadata.name").then_some(node.name.as_str());
        name.is_some() && matches(requirement, name)
    };
    some && term
        .match_expressions
        .iter()
        .all(|requirement| matches(requirement, node.labels.get(&requirement.key).map(String::as_str)))
        && term.match_fields.iter().all(field)
}

fn matches(requirement: &Requirement, value: Option<&str>) -> bool {
    let listed = value.is_some_and(|value| requirement.values.iter().any(|one| one == value));
    let compared = || {
        let bound: i64 = requirement.values.first()?.parse().ok()?;
        let value: i64 = value?.parse().ok()?;
        Some(value.cmp(&bound))
    };
    match requirement.operator {
        Operator::In => listed,
        Operator::NotIn => !listed,
        Operator::Exists => value.is_some(),
        Operator::DoesNotExist => value.is_none(),
        Operator::Gt => compared() == Some(std::cmp::Ordering::Greater),
        Operator::Lt => compared() == Some(std::cmp::Ordering::Less),
        Operator::Unknown => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(labels: &[(&str, &str)], taints: &[(&str, &str, &str)]) -> Node {
        Node {
            name: "n1".to_owned(),
            labels: labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
            taints: taints
                .iter()
                .map(|(key, value, effect)| Taint {
                    key: (*key).to_owned(),
                    value: (*value).to_owned(),
                    effect: (*effect).to_owned(),
                })
                .collect(),
            ..Node::default()
        }
    }

    fn pod(json: &str) -> Pod {
        serde_json::from_str(json).expect("a pod")
    }

    fn admitted(pod: &Pod, node: &Node) -> bool {
        Constraints::of(pod).admit(node).is_ok()
    }

    #[test]
    fn selectors_and_affinity_are_those_of_kubernetes() {
        let here = node(&[("zone", "a"), ("gen", "9")], &[]);
        for (expected, json) in [
            (true, r#"{"nodeSelector": {"zone": "a"}}"#),
            (false, r#"{"nodeSelector": {"zone": "b"}}"#),
            (
                true,
                r#"{"affinity": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b", "a"]}]}]}"#,
            ),
            (false, r#"{"affinity": [{"matchExpressions": [{"key": "zone", "operator": "NotIn", "values": ["a"]}]}]}"#),
            (true, r#"{"affinity": [{"matchExpressions": [{"key": "no", "operator": "NotIn", "values": ["a"]}]}]}"#),
            (true, r#"{"affinity": [{"matchExpressions": [{"key": "gen", "operator": "Gt", "values": ["8"]}]}]}"#),
            (false, r#"{"affinity": [{"matchExpressions": [{"key": "gen", "operator": "Lt", "values": ["9"]}]}]}"#),
            (false, r#"{"affinity": [{"matchExpressions": [{"key": "zone", "operator": "Gt", "values": ["8"]}]}]}"#),
            (true, r#"{"affinity": [{}, {"matchExpressions": [{"key": "gen", "operator": "Exists"}]}]}"#),
            (false, r#"{"affinity": [{"matchExpressions": [{"key": "zone", "operator": "Like", "values": ["a"]}]}]}"#),
            (false, r#"{"affinity": [{}]}"#),
            (
                true,
                r#"{"affinity": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]}"#,
            ),
            (
                false,
                r#"{"affinity": [{"matchFields": [{"key": "metadata.uid", "operator": "NotIn", "values": ["x"]}]}]}"#,
            ),
        ] {
            assert_eq!(admitted(&pod(json), &here), expected, "{json}");
        }
    }

    #[test]
    fn taints_keep_away_whom_they_should() {
        let tainted = node(&[], &[("gpu", "yes", "NoSchedule"), ("soft", "", "PreferNoSchedule")]);
        for (expected, json) in [
            (false, "{}"),
            (true, r#"{"tolerations": [{"key": "gpu", "value": "yes"}]}"#),
            (false, r#"{"tolerations": [{"key": "gpu", "value": "no"}]}"#),
            (true, r#"{"tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]}"#),
            (false, r#"{"tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoExecute"}]}"#),
            (true, r#"{"tolerations": [{"operator": "Exists"}]}"#),
            (false, r#"{"tolerations": [{"key": "gpu", "operator": "Matches"}]}"#),
        ] {
            assert_eq!(admitted(&pod(json), &tainted), expected, "{json}");
        }
        let cordoned = Node { unschedulable: true, ..node(&[], &[]) };
        assert!(!admitted(&pod("{}"), &cordoned));
        assert!(admitted(&pod(r#"{"tolerations": [{"operator": "Exists"}]}"#), &cordoned));
    }
}
