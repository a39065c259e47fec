//! Narrows a gated pod to nodes, in addition to its own affinity.
//!
//! Kubernetes combines the node selector terms of a pod with OR, so the requirement must be added
//! to each term. While a pod is gated, the API server accepts only additions to required node
//! affinity: requirements appended to existing terms, or terms if the pod has none. The API server
//! refuses additional terms and changes to existing terms. Therefore the result is a list of JSON
//! Patch additions (RFC 6902), which contain only the parts that the pod lacks.
//!
//! Send the patch with a `test` of `/metadata/resourceVersion`, because the patch refers to terms
//! by their index.
use std::collections::BTreeSet;

use serde::Serialize;

use crate::snapshot::{NodeSelectorTerm, Operator, Requirement};

/// Label that narrows pods to nodes. The field `metadata.name` is unsuitable, because each term
/// accepts only one value for this field.
pub const HOSTNAME: &str = "kubernetes.io/hostname";

/// The parts of an affinity that a pod has. A present field counts, even if its value is `{}`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExistingAffinity<'a> {
    /// The pod has no `affinity`.
    Nothing,
    /// The pod has `affinity` without `nodeAffinity`.
    Affinity,
    /// The pod has `nodeAffinity` without required terms.
    NodeAffinity,
    /// The pod has required node affinity with these terms.
    Required(&'a [NodeSelectorTerm]),
}

/// The pod's required node affinity matches no node. The pod cannot be scheduled, so narrowing it
/// is useless.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the pod's required node affinity matches no node: it has no term with a requirement")]
pub struct MatchesNoNode;

/// An `add` operation of a JSON Patch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PatchOperation {
    op: &'static str,
    path: String,
    value: AddedPart,
}

impl PatchOperation {
    fn add(path: String, value: AddedPart) -> Self {
        Self { op: "add", path, value }
    }

    /// Returns the JSON pointer to the part of the pod that the operation adds.
    pub fn path(&self) -> &str {
        &self.path
    }
}

/// The value of the operation: only the parts of the node affinity that the pod does not have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
enum AddedPart {
    #[serde(rename_all = "camelCase")]
    Affinity {
        node_affinity: RequiredNodeAffinity,
    },
    NodeAffinity(RequiredNodeAffinity),
    Required(RequiredTerms),
    Requirements([Requirement; 1]),
    Requirement(Requirement),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct RequiredNodeAffinity {
    #[serde(rename = "requiredDuringSchedulingIgnoredDuringExecution")]
    required: RequiredTerms,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct RequiredTerms {
    node_selector_terms: Vec<NodeSelectorTerm>,
}

const AFFINITY_PATH: &str = "/spec/affinity";
const NODE_AFFINITY_PATH: &str = "/spec/affinity/nodeAffinity";
const REQUIRED_TERMS_PATH: &str = "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution";

/// Returns a requirement for nodes with one of these hostnames. Returns `None` if the list is
/// empty, because a pod must not be narrowed to no nodes.
pub fn hostname_requirement<'a>(hostnames: impl IntoIterator<Item = &'a str>) -> Option<Requirement> {
    let values: BTreeSet<&str> = hostnames.into_iter().collect();
    let values: Vec<String> = values.into_iter().map(str::to_owned).collect();
    (!values.is_empty()).then(|| Requirement { key: HOSTNAME.to_owned(), operator: Operator::In, values })
}

/// Returns the additions that restrict the pod to the nodes that match both its affinity and the
/// requirement. The list is empty if every term with requirements already contains this
/// requirement.
///
/// # Errors
/// Returns [`MatchesNoNode`] if no term of the pod's affinity has requirements.
pub fn narrow(present: ExistingAffinity<'_>, requirement: &Requirement) -> Result<Vec<PatchOperation>, MatchesNoNode> {
    let required = || RequiredTerms { node_selector_terms: vec![term_with_only(requirement)] };
    let terms = match present {
        ExistingAffinity::Required(terms) => terms,
        ExistingAffinity::Nothing => {
            let node_affinity = RequiredNodeAffinity { required: required() };
            return Ok(vec![PatchOperation::add(AFFINITY_PATH.to_owned(), AddedPart::Affinity { node_affinity })]);
        }
        ExistingAffinity::Affinity => {
            let value = AddedPart::NodeAffinity(RequiredNodeAffinity { required: required() });
            return Ok(vec![PatchOperation::add(NODE_AFFINITY_PATH.to_owned(), value)]);
        }
        ExistingAffinity::NodeAffinity => {
            return Ok(vec![PatchOperation::add(REQUIRED_TERMS_PATH.to_owned(), AddedPart::Required(required()))]);
        }
    };
    if terms.iter().all(has_no_requirements) {
        return Err(MatchesNoNode);
    }
    let addition = |(index, term): (usize, &NodeSelectorTerm)| {
        let path = format!("{REQUIRED_TERMS_PATH}/nodeSelectorTerms/{index}/matchExpressions");
        if term.match_expressions.is_empty() {
            PatchOperation::add(path, AddedPart::Requirements([requirement.clone()]))
        } else {
            PatchOperation::add(format!("{path}/-"), AddedPart::Requirement(requirement.clone()))
        }
    };
    Ok(terms.iter().enumerate().filter(|(_, term)| needs_requirement(term, requirement)).map(addition).collect())
}

/// Returns the pod's required terms after [`narrow`], for callers that send the whole list. A pod
/// without required terms receives one term.
///
/// # Errors
/// Returns [`MatchesNoNode`] if no term of the pod's affinity has requirements.
pub fn narrowed_terms(
    present: ExistingAffinity<'_>,
    requirement: &Requirement,
) -> Result<Vec<NodeSelectorTerm>, MatchesNoNode> {
    let ExistingAffinity::Required(terms) = present else { return Ok(vec![term_with_only(requirement)]) };
    if terms.iter().all(has_no_requirements) {
        return Err(MatchesNoNode);
    }
    let mut terms = terms.to_vec();
    for term in terms.iter_mut().filter(|term| needs_requirement(term, requirement)) {
        term.match_expressions.push(requirement.clone());
    }
    Ok(terms)
}

fn term_with_only(requirement: &Requirement) -> NodeSelectorTerm {
    NodeSelectorTerm { match_expressions: vec![requirement.clone()], match_fields: Vec::new() }
}

/// Returns whether a term has no requirements. Such a term matches no node, but would match some
/// nodes with an added requirement.
fn has_no_requirements(term: &NodeSelectorTerm) -> bool {
    term.match_expressions.is_empty() && term.match_fields.is_empty()
}

fn needs_requirement(term: &NodeSelectorTerm, requirement: &Requirement) -> bool {
    !has_no_requirements(term) && !term.match_expressions.contains(requirement)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value as Json, json};

    use super::*;
    use crate::scheduling::NodeConstraints;
    use crate::snapshot::{Node, Pod};

    /// Applies additions as specified in RFC 6902.
    fn apply_patch(pod: &mut Json, operations: &[PatchOperation]) {
        for operation in operations {
            let Json::Object(operation) = serde_json::to_value(operation).unwrap() else { panic!("no object") };
            assert_eq!(operation["op"], "add");
            let path = operation["path"].as_str().unwrap();
            let (parent, last) = path.rsplit_once('/').unwrap();
            match pod.pointer_mut(parent).unwrap_or_else(|| panic!("{parent} is missing")) {
                Json::Array(list) if last == "-" => list.push(operation["value"].clone()),
                Json::Object(map) => {
                    map.insert(last.to_owned(), operation["value"].clone());
                }
                other => panic!("{path} in {other}"),
            }
        }
    }

    fn requirement() -> Requirement {
        hostname_requirement(["n2", "n1", "n2"]).unwrap()
    }

    fn patched_pod(mut pod: Json, present: ExistingAffinity<'_>) -> Json {
        apply_patch(&mut pod, &narrow(present, &requirement()).unwrap());
        pod["spec"]["affinity"].clone()
    }

    #[test]
    fn a_pod_without_affinity_gets_one() {
        let ours = json!({"nodeSelectorTerms": [{"matchExpressions": [
            {"key": "kubernetes.io/hostname", "operator": "In", "values": ["n1", "n2"]}]}]});
        let required = "requiredDuringSchedulingIgnoredDuringExecution";
        let expected = json!({"nodeAffinity": {required: ours}});
        assert_eq!(patched_pod(json!({"spec": {}}), ExistingAffinity::Nothing), expected);
        assert_eq!(patched_pod(json!({"spec": {"affinity": {}}}), ExistingAffinity::Affinity), expected);
        let others =
            json!({"podAntiAffinity": {}, "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}});
        let affinity = patched_pod(json!({"spec": {"affinity": others}}), ExistingAffinity::NodeAffinity);
        assert_eq!(affinity["nodeAffinity"][required], ours);
        assert!(affinity["podAntiAffinity"].is_object(), "the existing terms are kept: {affinity}");
        assert!(affinity["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"].is_array());
    }

    #[test]
    fn terms_that_match_no_node_stay_unchanged() {
        let zone = Requirement { key: "zone".to_owned(), operator: Operator::Exists, values: Vec::new() };
        let some = NodeSelectorTerm { match_expressions: vec![zone], match_fields: Vec::new() };
        let empty = NodeSelectorTerm::default();
        assert_eq!(narrow(ExistingAffinity::Required(&[]), &requirement()), Err(MatchesNoNode));
        assert_eq!(
            narrow(ExistingAffinity::Required(&[empty.clone(), empty.clone()]), &requirement()),
            Err(MatchesNoNode)
        );
        let operations = narrow(ExistingAffinity::Required(&[empty.clone(), some]), &requirement()).unwrap();
        assert_eq!(operations.len(), 1);
        assert!(operations[0].path().ends_with("/nodeSelectorTerms/1/matchExpressions/-"), "{operations:?}");
    }

    #[test]
    fn a_term_on_fields_also_gets_an_expression() {
        let name =
            Requirement { key: "metadata.name".to_owned(), operator: Operator::In, values: vec!["n1".to_owned()] };
        let terms = [NodeSelectorTerm { match_expressions: Vec::new(), match_fields: vec![name] }];
        let affinity = patched_pod(pod(&terms), ExistingAffinity::Required(&terms));
        let term = &affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"][0];
        assert_eq!(term["matchFields"][0]["key"], "metadata.name");
        assert_eq!(term["matchExpressions"][0]["key"], HOSTNAME);
    }

    #[test]
    fn a_requirement_is_added_only_once_and_an_empty_list_narrows_no_pod() {
        let terms = narrowed_terms(ExistingAffinity::Nothing, &requirement()).unwrap();
        assert_eq!(narrow(ExistingAffinity::Required(&terms), &requirement()), Ok(Vec::new()));
        assert_eq!(hostname_requirement([]), None);
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
        /// A narrowed pod can run on exactly the nodes that both its original affinity and the
        /// requirement allow. The patch from `narrow` produces the terms that `narrowed_terms`
        /// returns. The patch does not change or move any existing part of the pod.
        #[test]
        fn a_narrowed_pod_runs_only_on_nodes_that_its_affinity_and_the_requirement_allow(
            terms in terms(),
            labels in prop::collection::btree_map(
                prop::sample::select(vec!["zone", "gen"]).prop_map(str::to_owned),
                prop::sample::select(vec!["a", "b"]).prop_map(str::to_owned), 0..3),
        ) {
            let requirement = requirement();
            let present = ExistingAffinity::Required(&terms);
            let Ok(whole) = narrowed_terms(present, &requirement) else {
                prop_assert!(terms.iter().all(has_no_requirements));
                prop_assert!(narrow(present, &requirement).is_err());
                return Ok(());
            };
            let mut patched = pod(&terms);
            apply_patch(&mut patched, &narrow(present, &requirement).unwrap());
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
                    NodeConstraints::of_pod(&Pod { affinity: affinity.to_vec(), ..Pod::default() }).admit(&node).is_ok()
                };
                prop_assert_eq!(admits(&whole), admits(&terms) && name != "n3", "{}", name);
            }
        }
    }
}
