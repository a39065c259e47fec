//! Builds the patch that releases a pod.
use cleave_api::names::{CAPACITY_LABEL, LARGEST_GPU_LABEL_PREFIX, OTHER_NODES_ANNOTATION, UNSCHEDULABLE_ANNOTATION};
use cleave_api::placement::PLACEMENT_ANNOTATION;
use cleave_plan::affinity::{ExistingAffinity, hostname_requirement, narrow};
use cleave_plan::ledger::DeviceRequest;
use cleave_plan::snapshot::{NodeSelectorTerm, Operator, Requirement};
use serde_json::{Value, json};

use super::actions::{Destination, ReleaseReason};
use crate::pods::{PodObject, is_interchangeable};

/// Path of the pod's `resourceVersion` in the patch.
const VERSION_POINTER: &str = "/0/value";

/// Returns the JSON Patch that narrows the pod, annotates it with its reservation and removes its
/// only gate.
///
/// The patch applies completely or not at all, and only to the version of the pod on which the
/// decision is based.
pub(super) fn release_patch(pod: &PodObject, reason: &ReleaseReason, destination: Destination<'_>) -> Value {
    let mut operations =
        vec![json!({"op": "test", "path": "/metadata/resourceVersion", "value": pod.metadata.resource_version})];
    let requirement = match destination {
        Destination::Anywhere => None,
        Destination::Hostnames(hostnames) => hostname_requirement(hostnames),
        Destination::Matching(requirement) => Some(requirement),
        Destination::LargerGpus(device_requests) => larger_gpus_requirement(device_requests),
    };
    // If the required affinity matches no node, the pod needs no narrowing.
    let narrowed = requirement.map(|requirement| narrow(existing_affinity(pod), &requirement).unwrap_or_default());
    operations.extend(narrowed.iter().flatten().map(|operation| json!(operation)));
    let annotation = match reason {
        ReleaseReason::Reserved(placement) => Some((PLACEMENT_ANNOTATION, placement.to_text().unwrap_or_default())),
        ReleaseReason::Unschedulable(_) => Some((UNSCHEDULABLE_ANNOTATION, "true".to_owned())),
        ReleaseReason::OtherPlugin => Some((OTHER_NODES_ANNOTATION, "true".to_owned())),
        ReleaseReason::NotServed => None,
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

/// Adds the pod's capacity label (in quota or over quota) to a patch. The patch still removes the
/// gate last.
pub(super) fn add_label(patch: &mut Value, pod: &PodObject, value: &str) {
    let Some(operations) = patch.as_array_mut() else { return };
    let label = if pod.metadata.labels.is_some() {
        json!({"op": "add", "path": format!("/metadata/labels/{}", CAPACITY_LABEL.replace('/', "~1")), "value": value})
    } else {
        json!({"op": "add", "path": "/metadata/labels", "value": {CAPACITY_LABEL: value}})
    };
    operations.insert(operations.len().saturating_sub(1), label);
}

/// Returns the `resourceVersion` to which the patch applies.
pub(super) fn resource_version(patch: &Value) -> Option<&str> {
    patch.pointer(VERSION_POINTER)?.as_str()
}

/// Returns the patch for another `resourceVersion` of the pod.
pub(super) fn with_resource_version(patch: &Value, version: String) -> Value {
    let mut patch = patch.clone();
    if let Some(value) = patch.pointer_mut(VERSION_POINTER) {
        *value = Value::String(version);
    }
    patch
}

/// Returns which parts of a required node affinity the pod's spec already has.
fn existing_affinity(pod: &PodObject) -> ExistingAffinity<'_> {
    let Some(affinity) = &pod.spec.affinity else { return ExistingAffinity::Nothing };
    let Some(nodes) = &affinity.node_affinity else { return ExistingAffinity::Affinity };
    match &nodes.required_during_scheduling_ignored_during_execution {
        None => ExistingAffinity::NodeAffinity,
        Some(required) => ExistingAffinity::Required(&required.node_selector_terms),
    }
}

/// Requires a node whose GPUs are large enough for the largest request.
///
/// Only autoscalers' node templates and administrators set the label of the requirement. The
/// requirement names no node, so any node with the label may serve the pod. Returns `None` for
/// whole GPUs and whole MIG instances, because the scheduler counts these units correctly.
fn larger_gpus_requirement(device_requests: &[DeviceRequest]) -> Option<Requirement> {
    let request = device_requests
        .iter()
        .filter(|request| !is_interchangeable(&request.resource))
        .max_by_key(|request| request.units)?;
    let (_, name) = request.resource.split_once('/')?;
    let below = request.units.get() - 1;
    Some(Requirement {
        key: format!("{LARGEST_GPU_LABEL_PREFIX}{name}"),
        operator: Operator::Gt,
        values: vec![below.to_string()],
    })
}

/// Returns the affinity terms of a pod that was released as unschedulable, without the requirement
/// that its release added.
pub(super) fn without_larger_gpus(terms: &[NodeSelectorTerm]) -> Vec<NodeSelectorTerm> {
    let mut terms = terms.to_vec();
    let added = |requirement: &Requirement| requirement.key.starts_with(LARGEST_GPU_LABEL_PREFIX);
    terms.iter_mut().for_each(|term| term.match_expressions.retain(|requirement| !added(requirement)));
    // If the term contained only that requirement, the release added the whole term, because the
    // pod had no required affinity.
    if matches!(terms.as_slice(), [term] if term.match_expressions.is_empty() && term.match_fields.is_empty()) {
        terms.clear();
    }
    terms
}
