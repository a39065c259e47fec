//! The one patch that lets a pod through.
use cleave_api::names::{LARGEST_PREFIX, UNSCHEDULABLE_ANNOTATION};
use cleave_api::placement::ANNOTATION;
use cleave_plan::affinity::{Present, among, narrow};
use cleave_plan::ledger::Ask;
use cleave_plan::snapshot::{NodeSelectorTerm, Operator, Requirement};
use serde_json::{Value, json};

use super::turn::{Towards, Why};
use crate::pods::PodObject;

/// Narrows the pod, notes what is held, and takes our gate away, which is the only one: all or
/// nothing, and only of the pod as it was looked at.
pub(super) fn open(pod: &PodObject, why: &Why, towards: Towards<'_>) -> Value {
    let mut operations =
        vec![json!({"op": "test", "path": "/metadata/resourceVersion", "value": pod.metadata.resource_version})];
    let requirement = match towards {
        Towards::Anywhere => None,
        Towards::Among(hostnames) => among(hostnames),
        Towards::Larger(asks) => larger(asks),
    };
    // What matches no node stays so: there is nothing to narrow.
    let narrowed = requirement.map(|requirement| narrow(present(pod), &requirement).unwrap_or_default());
    operations.extend(narrowed.iter().flatten().map(|operation| json!(operation)));
    let annotation = match why {
        Why::Held(placement) => Some((ANNOTATION, placement.text().unwrap_or_default())),
        Why::Never(_) => Some((UNSCHEDULABLE_ANNOTATION, "true".to_owned())),
        Why::NotOurs => None,
    };
    if let Some((name, value)) = annotation {
        operations.push(if pod.annotated {
            json!({"op": "add", "path": format!("/metadata/annotations/{}", name.replace('/', "~1")), "value": value})
        } else {
            json!({"op": "add", "path": "/metadata/annotations", "value": {name: value}})
        });
    }
    operations.push(json!({"op": "remove", "path": "/spec/schedulingGates"}));
    Value::Array(operations)
}

fn present(pod: &PodObject) -> Present<'_> {
    let Some(affinity) = &pod.spec.affinity else { return Present::Nothing };
    let Some(nodes) = &affinity.node_affinity else { return Present::Affinity };
    match &nodes.required_during_scheduling_ignored_during_execution {
        None => Present::NodeAffinity,
        Some(required) => Present::Required(&required.node_selector_terms),
    }
}

/// A node whose GPUs are large enough for the largest part of what is asked for, by a label that
/// only node templates of autoscalers and administrators set. No node is named: whichever has the
/// label may serve the pod.
fn larger(asks: &[Ask]) -> Option<Requirement> {
    let ask = asks.iter().max_by_key(|ask| ask.units)?;
    let (_, name) = ask.resource.split_once('/')?;
    let below = ask.units.get() - 1;
    Some(Requirement {
        key: format!("{LARGEST_PREFIX}{name}"),
        operator: Operator::Gt,
        values: vec![below.to_string()],
    })
}

/// The terms of a pod that was released as unschedulable, without what may have been added for
/// that.
pub(super) fn without_larger(terms: &[NodeSelectorTerm]) -> Vec<NodeSelectorTerm> {
    let mut terms = terms.to_vec();
    let added = |requirement: &Requirement| requirement.key.starts_with(LARGEST_PREFIX);
    terms.iter_mut().for_each(|term| term.match_expressions.retain(|requirement| !added(requirement)));
    // A term that had nothing else was made for it: the pod required nothing before.
    if matches!(terms.as_slice(), [term] if term.match_expressions.is_empty() && term.match_fields.is_empty()) {
        terms.clear();
    }
    terms
}
