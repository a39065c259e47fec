//! Decides which nodes a pod may run on, by the scheduler's rules for node selectors, required node
//! affinity and taints.
use std::collections::BTreeMap;

use crate::snapshot::{Node, NodeSelectorTerm, Operator, Pod, Requirement, Taint, Toleration};

/// Resource by which the scheduler counts pods.
pub const PODS_RESOURCE: &str = "pods";
/// Resources that are unlimited on a node that does not list them.
pub(crate) const UNLIMITED_BY_DEFAULT: [&str; 4] = ["cpu", "memory", "ephemeral-storage", PODS_RESOURCE];

/// The properties of a pod that determine which nodes it may run on. Pods with equal constraints
/// are checked once.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct NodeConstraints<'a> {
    selector: &'a BTreeMap<String, String>,
    affinity: &'a [NodeSelectorTerm],
    tolerations: &'a [Toleration],
}

/// Why a pod cannot run on a node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum NodeRefusal {
    /// The node lacks a label of the pod's node selector: `key=value`.
    Selector(String),
    /// The node does not match the pod's required node affinity.
    Affinity,
    /// The pod does not tolerate a taint of the node.
    Taint {
        /// Key of the taint.
        key: String,
        /// Value of the taint. Often empty.
        value: String,
    },
    /// The node is cordoned.
    Cordoned,
}

/// Taints that controllers add and remove without an administrator: for node conditions, during
/// startup, and when an autoscaler removes a node. An entry that ends with `/` is a prefix.
const TEMPORARY_TAINTS: [&str; 11] = [
    "node.kubernetes.io/",
    "node.cloudprovider.kubernetes.io/",
    "node.cluster.x-k8s.io/",
    "node.cilium.io/",
    "karpenter.sh/",
    "cleave.dev/",
    "ToBeDeletedByClusterAutoscaler",
    "DeletionCandidateOfClusterAutoscaler",
    "ignore-taint.cluster-autoscaler.kubernetes.io/",
    "startup-taint.cluster-autoscaler.kubernetes.io/",
    "status-taint.cluster-autoscaler.kubernetes.io/",
];

impl NodeRefusal {
    /// Returns whether the refusal can end without a change of the pod or a permanent change of the
    /// node. Returns true for a cordon and for taints that controllers add and remove. Missing
    /// labels and other taints are permanent.
    pub fn is_temporary(&self) -> bool {
        match self {
            Self::Selector(_) | Self::Affinity => false,
            Self::Taint { key, .. } => TEMPORARY_TAINTS
                .iter()
                .any(|passing| if passing.ends_with('/') { key.starts_with(passing) } else { key == passing }),
            Self::Cordoned => true,
        }
    }
}

impl std::fmt::Display for NodeRefusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Selector(label) => write!(f, "the label {label}, which the pod selects, is missing"),
            Self::Affinity => f.write_str("the pod's node affinity does not match"),
            Self::Taint { key, value } if value.is_empty() => write!(f, "the pod does not tolerate the taint {key}"),
            Self::Taint { key, value } => write!(f, "the pod does not tolerate the taint {key}={value}"),
            Self::Cordoned => f.write_str("cordoned"),
        }
    }
}

/// Checks whether a pod may run on a node, regardless of other pods.
///
/// # Errors
/// Returns why the pod cannot run on the node.
pub fn admit(pod: &Pod, node: &Node) -> Result<(), NodeRefusal> {
    NodeConstraints::of_pod(pod).admit(node)
}

/// Returns why a pod cannot run on a node, as a clause for messages. Returns `None` if the pod can
/// run on the node.
pub fn refusal(pod: &Pod, node: &Node) -> Option<String> {
    admit(pod, node).err().map(|refused| refused.to_string())
}

impl<'a> NodeConstraints<'a> {
    pub(crate) fn of_pod(pod: &'a Pod) -> Self {
        Self { selector: &pod.node_selector, affinity: &pod.affinity, tolerations: &pod.tolerations }
    }

    /// Checks whether a pod with these constraints may run on the node.
    pub(crate) fn admit(&self, node: &Node) -> Result<(), NodeRefusal> {
        if let Some((key, value)) = self.missing_label(node) {
            return Err(NodeRefusal::Selector(format!("{key}={value}")));
        }
        if !self.has_affinity_to(node) {
            return Err(NodeRefusal::Affinity);
        }
        let cordoned = || (node.unschedulable && !self.tolerates(&cordon_taint())).then_some(NodeRefusal::Cordoned);
        let tainted = |taint: &Taint| NodeRefusal::Taint { key: taint.key.clone(), value: taint.value.clone() };
        let taints: Vec<NodeRefusal> = self.untolerated_taints(node).map(tainted).collect();
        // Report permanent reasons first. A temporary reason must not hide that the pod can never
        // run on the node.
        let lasting = taints.iter().find(|refused| !refused.is_temporary()).cloned();
        lasting.or_else(cordoned).or_else(|| taints.into_iter().next()).map_or(Ok(()), Err)
    }

    /// Returns whether the node matches the pod's node selector and required node affinity,
    /// regardless of taints.
    pub(crate) fn selects(&self, node: &Node) -> bool {
        self.missing_label(node).is_none() && self.has_affinity_to(node)
    }

    /// Returns whether the pod tolerates all taints of the node with effect `NoSchedule` or
    /// `NoExecute`.
    pub(crate) fn tolerates_all(&self, node: &Node) -> bool {
        self.untolerated_taints(node).next().is_none()
    }

    /// Returns the first label of the node selector that the node does not have.
    fn missing_label(&self, node: &Node) -> Option<(&'a String, &'a String)> {
        self.selector.iter().find(|(key, value)| node.labels.get(*key) != Some(*value))
    }

    fn has_affinity_to(&self, node: &Node) -> bool {
        matches_any(self.affinity, &node.labels, &node.name)
    }

    /// Returns the taints of the node that the pod does not tolerate.
    fn untolerated_taints<'n>(&self, node: &'n Node) -> impl Iterator<Item = &'n Taint> {
        let hard = |taint: &&Taint| taint.effect == "NoSchedule" || taint.effect == "NoExecute";
        node.taints.iter().filter(hard).filter(|taint| !self.tolerates(taint))
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

fn cordon_taint() -> Taint {
    let key = "node.kubernetes.io/unschedulable".to_owned();
    Taint { key, value: String::new(), effect: "NoSchedule".to_owned() }
}

/// Returns whether a node with these labels and this name matches one of the terms. An empty list
/// matches every node.
pub(crate) fn matches_any(terms: &[NodeSelectorTerm], labels: &BTreeMap<String, String>, name: &str) -> bool {
    terms.is_empty() || terms.iter().any(|term| matches_term(term, labels, name))
}

fn matches_term(term: &NodeSelectorTerm, labels: &BTreeMap<String, String>, name: &str) -> bool {
    let some = !term.match_expressions.is_empty() || !term.match_fields.is_empty();
    let field =
        |requirement: &Requirement| requirement.key == "metadata.name" && requirement_matches(requirement, Some(name));
    let label =
        |requirement: &Requirement| requirement_matches(requirement, labels.get(&requirement.key).map(String::as_str));
    some && term.match_expressions.iter().all(label) && term.match_fields.iter().all(field)
}

/// Returns whether a value meets a requirement. `None` means that the node does not have the label.
pub(crate) fn requirement_matches(requirement: &Requirement, value: Option<&str>) -> bool {
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

    fn is_admitted(pod: &Pod, node: &Node) -> bool {
        NodeConstraints::of_pod(pod).admit(node).is_ok()
    }

    #[test]
    fn selectors_and_affinity_match_as_in_kubernetes() {
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
            assert_eq!(is_admitted(&pod(json), &here), expected, "{json}");
        }
    }

    #[test]
    fn taints_refuse_pods_without_tolerations() {
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
            assert_eq!(is_admitted(&pod(json), &tainted), expected, "{json}");
        }
        let cordoned = Node { unschedulable: true, ..node(&[], &[]) };
        assert!(!is_admitted(&pod("{}"), &cordoned));
        assert!(is_admitted(&pod(r#"{"tolerations": [{"operator": "Exists"}]}"#), &cordoned));
    }

    #[test]
    fn a_permanent_taint_is_reported_before_temporary_reasons() {
        let both = node(&[], &[("node.kubernetes.io/not-ready", "", "NoSchedule"), ("dedicated", "", "NoSchedule")]);
        let both = Node { unschedulable: true, ..both };
        let refused = NodeConstraints::of_pod(&pod("{}")).admit(&both).unwrap_err();
        assert_eq!(refused, NodeRefusal::Taint { key: "dedicated".to_owned(), value: String::new() });
        let dedicated = pod(r#"{"tolerations": [{"key": "dedicated", "operator": "Exists"}]}"#);
        assert_eq!(NodeConstraints::of_pod(&dedicated).admit(&both), Err(NodeRefusal::Cordoned));
    }

    #[test]
    fn only_cordons_and_taints_of_controllers_are_temporary() {
        let taint = |key: &str| NodeRefusal::Taint { key: key.to_owned(), value: String::new() };
        for passing in [
            NodeRefusal::Cordoned,
            taint("node.kubernetes.io/not-ready"),
            taint("node.kubernetes.io/unschedulable"),
            taint("node.cloudprovider.kubernetes.io/uninitialized"),
            taint("cleave.dev/unhealthy"),
            taint("ToBeDeletedByClusterAutoscaler"),
        ] {
            assert!(passing.is_temporary(), "{passing:?}");
        }
        for lasting in [
            NodeRefusal::Selector("zone=a".to_owned()),
            NodeRefusal::Affinity,
            taint("dedicated"),
            taint("nvidia.com/gpu"),
            taint("node-role.kubernetes.io/control-plane"),
            taint("ToBeDeletedByClusterAutoscaler/x"),
        ] {
            assert!(!lasting.is_temporary(), "{lasting:?}");
        }
    }
}
