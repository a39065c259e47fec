//! The one patch that lets a pod through.
use cleave_api::placement::ANNOTATION;
use cleave_plan::affinity::{Present, among, away_from, narrow};
use serde_json::{Value, json};

use super::{Towards, Why};
use crate::pods::PodObject;

/// Narrows the pod, notes what is held, and takes our gate away, which is the only one: all or nothing, and only of the pod as it was looked at.
pub(super) fn open(pod: &PodObject, why: &Why, towards: Towards<'_>) -> Value {
    let mut operations =
        vec![json!({"op": "test", "path": "/metadata/resourceVersion", "value": pod.metadata.resource_version})];
    let requirement = match towards {
        Towards::Anywhere => None,
        Towards::Among(hostnames) => among(hostnames),
        Towards::Away(hostnames) => away_from(hostnames),
    };
    // What matches no node stays so: there is nothing to narrow.
    let narrowed = requirement.map(|requirement| narrow(present(pod), &requirement).unwrap_or_default());
    operations.extend(narrowed.iter().flatten().map(|operation| json!(operation)));
    if let Why::Held(placement) = why {
        let note = placement.text().unwrap_or_default();
        operations.push(if pod.annotated {
            json!({"op": "add", "path": format!("/metadata/annotations/{}", ANNOTATION.replace('/', "~1")), "value": note})
        } else {
            json!({"op": "add", "path": "/metadata/annotations", "value": {ANNOTATION: note}})
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
