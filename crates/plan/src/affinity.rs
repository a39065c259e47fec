//! Narrowing a gated pod to nodes, beside the affinity that it has.
//!
//! A pod's node selector terms are OR-ed, so the requirement has to go into each of them. While a
//! pod is gated the API server takes additions only: requirements appended to existing terms, or a
//! whole affinity where there was none; never another term, and nothing changed or moved. So the
//! result is a list of JSON Patch additions (RFC 6902), which repeat nothing of what the pod has.
//!
//! Send them with a `test` of `/metadata/resourceVersion`: terms are addressed by their number.
use std::collections::BTreeSet;

use serde::Serialize;

use crate::snapshot::{NodeSelectorTerm, Operator, Requirement};

/// The label by which pods are narrowed to nodes. Fields cannot do it: `metadata.name` takes one
/// value in each term.
pub const HOSTNAME: &str = "kubernetes.io/hostname";

/// How much of an affinity a pod has. An empty or absent object counts as absent unless the field
/// is there, even if only as `{}`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Present<'a> {
    /// No `affinity`.
    Nothing,
    /// `affinity` without `nodeAffinity`.
    Affinity,
    /// `nodeAffinity` that requires nothing.
    NodeAffinity,
    /// Required node affinity with these terms.
    Required(&'a [NodeSelectorTerm]),
}

/// What a pod requires of its node matches none, so there is nothing to narrow: it cannot be
/// scheduled, whatever is added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the pod's required node affinity matches no node: it has no term with a requirement")]
pub struct MatchesNothing;

/// An `add` of a JSON Patch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Operation {
    op: &'static str,
    path: String,
    value: Value,
}

impl Operation {
    fn add(path: String, value: Value) -> Self {
        Self { op: "add", path, value }
    }

    /// Where it adds, as a JSON pointer into the pod.
    pub fn path(&self) -> &str {
        &self.path
    }
}

/// What is added: no more than the pod lacks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
enum Value {
    #[serde(rename_all = "camelCase")]
    Affinity {
        node_affinity: Required,
    },
    NodeAffinity(Required),
    Required(Terms),
    Requirements([Requirement; 1]),
    Requirement(Requirement),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Required {
    #[serde(rename = "requiredDuringSchedulingIgnoredDuringExecution")]
    required: Terms,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Terms {
    node_selector_terms: Vec<NodeSelectorTerm>,
}

const AFFINITY: &str = "/spec/affinity";
const NODE_AFFINITY: &str = "/spec/affinity/nodeAffinity";
const REQUIRED: &str = "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution";

/// To nodes with one of these hostnames; none where there is no hostname, since a pod must not be
/// narrowed to nothing.
pub fn among<'a>(hostnames: impl IntoIterator<Item = &'a str>) -> Option<Requirement> {
    let values: BTreeSet<&str> = hostnames.into_iter().collect();
    let values: Vec<String> = values.into_iter().map(str::to_owned).collect();
    (!values.is_empty()).then(|| Requirement { key: HOSTNAME.to_owned(), operator: Operator::In, values })
}

/// Additions after which the pod goes where it went before and where the requirement matches, and
/// nowhere else. None if it is so already.
pub fn narrow(present: Present<'_>, requirement: &Requirement) -> Result<Vec<Operation>, MatchesNothing> {
    let required = || Terms { node_selector_terms: vec![term(requirement)] };
    let terms = match present {
        Present::Required(terms) => terms,
        Present::Nothing => {
            let node_affinity = Required { required: required() };
            return Ok(vec![Operation::add(AFFINITY.to_owned(), Value::Affinity { node_affinity })]);
        }
        Present::Affinity => {
            let value = Value::NodeAffinity(Required { required: required() });
            return Ok(vec![Operation::add(NODE_AFFINITY.to_owned(), value)]);
        }
        Present::NodeAffinity => return Ok(vec![Operation::add(REQUIRED.to_owned(), Value::Required(required()))]),
    };
    if terms.iter().all(is_empty) {
        return Err(MatchesNothing);
    }
    let addition = |(index, term): (usize, &NodeSelectorTerm)| {
        let path = format!("{REQUIRED}/nodeSelectorTerms/{index}/matchExpressions");
        if term.match_expressions.is_empty() {
            Operation::add(path, Value::Requirements([requirement.clone()]))
        } else {
            Operation::add(format!("{path}/-"), Value::Requirement(requirement.clone()))
        }
    };
    Ok(terms.iter().enumerate().filter(|(_, term)| wants(term, requirement)).map(addition).collect())
}

/// The terms after [`narrow`], for those who send the list as a whole. No terms, of a pod that
/// requires nothing, become one.
pub fn narrowed(present: Present<'_>, requirement: &Requirement) -> Result<Vec<NodeSelectorTerm>, MatchesNothing> {
    let Present::Required(terms) = present else { return Ok(vec![term(requirement)]) };
    if terms.iter().all(is_empty) {
        return Err(MatchesNothing);
    }
    let mut terms = terms.to_vec();
    for term in terms.iter_mut().filter(|term| wants(term, requirement)) {
        term.match_expressions.push(requirement.clone());
    }
    Ok(terms)
}

fn term(requirement: &Requirement) -> NodeSelectorTerm {
    NodeSelectorTerm { match_expressions: vec![requirement.clone()], match_fields: Vec::new() }
}

/// A term without requirements matches no node; with one more it would match some.
fn is_empty(term: &NodeSelectorTerm) -> bool {
    term.match_expressions.is_empty() && term.match_fields.is_empty()
}

fn wants(term: &NodeSelectorTerm, requirement: &Requirement) -> bool {
    !is_empty(term) && !term.match_expressions.contains(requirement)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value as Json, json};

    use super::*;
    use crate::scheduling::Constraints;
    use crate::snapshot::{Node, Pod};

    /// Applies additions as RFC 6902 says.
    fn apply(pod: &mut Json, operations: &[Operation]) {
        for operation in operations {
            let Json::Object(operation) = serde_json::to_value(operation).unwrap() else { panic!("no object") };
            assert_eq!(operation["op"], "add");
            let path = operation["path"].as_str().unwrap();
            let (parent, last) = path.rsplit_once('/').unwrap();
            match pod.pointer_mut(parent).unwrap_or_else(|| panic!("{parent} is not there")) {
                Json::Array(list) if last == "-" => list.push(operation["value"].clone()),
                Json::Object(map) => {
                    map.insert(last.to_owned(), operation["value"].clone());
                }
                other => panic!("{path} in {other}"),
            }
        }
    }

    fn requirement() -> Requirement {
        among(["n2", "n1", "n2"]).unwrap()
    }

    fn patched(mut pod: Json, present: Present<'_>) -> Json {
        apply(&mut pod, &narrow(present, &requirement()).unwrap());
        pod["spec"]["affinity"].clone()
    }

    #[test]
    fn a_pod_without_affinity_gets_one() {
        let ours = json!({"nodeSelectorTerms": [{"matchExpressions": [
            {"key": "kubernetes.io/hostname", "operator": "In", "values": ["n1", "n2"]}]}]});
        let required = "requiredDuringSchedulingIgnoredDuringExecution";
        let expected = json!({"nodeAffinity": {required: ours}});
        assert_eq!(patched(json!({"spec": {}}), Present::Nothing), expected);
        assert_eq!(patched(json!({"spec": {"affinity": {}}}), Present::Affinity), expected);
        let others =
            json!({"podAntiAffinity": {}, "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}});
        let affinity = patched(json!({"spec": {"affinity": others}}), Present::NodeAffinity);
        assert_eq!(affinity["nodeAffinity"][required], ours);
        assert!(affinity["podAntiAffinity"].is_object(), "what was there stays: {affinity}");
        assert!(affinity["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"].is_array());
    }

    #[test]
    fn terms_that_match_no_node_stay_so() {
        let zone = Requirement { key: "zone".to_owned(), operator: Operator::Exists, values: Vec::new() };
        let some = NodeSelectorTerm { match_expressions: vec![zone], match_fields: Vec::new() };
        let empty = NodeSelectorTerm::default();
        assert_eq!(narrow(Present::Required(&[]), &requirement()), Err(MatchesNothing));
        assert_eq!(narrow(Present::Required(&[empty.clone(), empty.clone()]), &requirement()), Err(MatchesNothing));
        let operations = narrow(Present::Required(&[empty.clone(), some]), &requirement()).unwrap();
        assert_eq!(operations.len(), 1);
        assert!(operations[0].path().ends_with("/nodeSelectorTerms/1/matchExpressions/-"), "{operations:?}");
    }

    #[test]
    fn a_term_on_fields_gets_an_expression_beside_them() {
        let name =
            Requirement { key: "metadata.name".to_owned(), operator: Operator::In, values: vec!["n1".to_owned()] };
        let terms = [NodeSelectorTerm { match_expressions: Vec::new(), match_fields: vec![name] }];
        let affinity = patched(pod(&terms), Present::Required(&terms));
        let term = &affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"][0];
        assert_eq!(term["matchFields"][0]["key"], "metadata.name");
        assert_eq!(term["matchExpressions"][0]["key"], HOSTNAME);
    }

    #[test]
    fn nothing_is_added_twice_and_nobody_is_narrowed_to_nothing() {
        let terms = narrowed(Present::Nothing, &requirement()).unwrap();
        assert_eq!(narrow(Present::Required(&terms), &requirement()), Ok(Vec::new()));
        assert_eq!(among([]), None);
    }

    fn pod(terms: &[NodeSelectorTerm]) -> Json {
        json!({"spec": {"affinity": {"nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}}})
    }

    fn requirements() -> impl Strategy<Value = Vec<Requirement>> {
        let operator =
            prop::sample::select(vec![Operator::In, Operator::NotIn, Operator::Exists, Operator::DoesNotExist]);
        let key = prop::sample::select(vec!["zone", "gen", HOSTNAME]);
        let value = prop::sample::select(vec!["a", "b", "n1", "n2"]).prop_map(str::to_owned);
        let one = (key, operator, prop::collection::vec(value, 1..3)).prop_map(|(key, operator, values)| {
            let values = if matches!(operator, Operator::In | Operator::NotIn) { values } else { Vec::new() };
            Requirement { key: key.to_owned(), operator, values }
        });
        prop::collection::vec(one, 0..3)
    }

    fn terms() -> impl Strategy<Value = Vec<NodeSelectorTerm>> {
        let names = prop::sample::select(vec!["n1", "n2", "n3"]).prop_map(str::to_owned);
        let fields = prop::option::of(names).prop_map(|name| {
            let field =
                |name| Requirement { key: "metadata.name".to_owned(), operator: Operator::In, values: vec![name] };
            name.map(field).into_iter().collect::<Vec<_>>()
        });
        let term = (requirements(), fields)
            .prop_map(|(match_expressions, match_fields)| NodeSelectorTerm { match_expressions, match_fields });
        prop::collection::vec(term, 0..4)
    }

    proptest! {
        /// Of all nodes, the pod may go to those where it might before and which are meant; the
        /// patch says the same as the whole list, and nothing that was there is changed or moved.
        #[test]
        fn a_narrowed_pod_goes_where_it_might_before_and_where_it_is_meant_to(
            terms in terms(),
            labels in prop::collection::btree_map(
                prop::sample::select(vec!["zone", "gen"]).prop_map(str::to_owned),
                prop::sample::select(vec!["a", "b"]).prop_map(str::to_owned), 0..3),
        ) {
            let requirement = requirement();
            let present = Present::Required(&terms);
            let Ok(whole) = narrowed(present, &requirement) else {
                prop_assert!(terms.iter().all(is_empty));
                prop_assert!(narrow(present, &requirement).is_err());
                return Ok(());
            };
            let mut patched = pod(&terms);
            apply(&mut patched, &narrow(present, &requirement).unwrap());
            prop_assert_eq!(&patched, &pod(&whole));
            for (old, new) in terms.iter().zip(&whole) {
                prop_assert!(new.match_expressions.starts_with(&old.match_expressions));
                prop_assert_eq!(&new.match_fields, &old.match_fields);
            }
            for name in ["n1", "n2", "n3"] {
                let mut labels = labels.clone();
                labels.insert(HOSTNAME.to_owned(), name.to_owned());
                let node = Node { name: name.to_owned(), labels, ..Node::default() };
                let admits = |affinity: &[NodeSelectorTerm]| {
                    Constraints::of(&Pod { affinity: affinity.to_vec(), ..Pod::default() }).admit(&node).is_ok()
                };
                prop_assert_eq!(admits(&whole), admits(&terms) && name != "n3", "{}", name);
            }
        }
    }
}
