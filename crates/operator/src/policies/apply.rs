//! Writes what nodes shall be: `GpuNode.spec`, by server-side apply, of the nodes that differ and
//! of no other.
use cleave_api::names::OPERATOR_MANAGER;
use cleave_api::{GpuNode, GpuNodeSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::Api;
use kube::api::{Patch, PatchParams};
use kube::core::DeserializeGuard;
use serde_json::{Value, json};

use crate::policies::plan::Plan;
use crate::read::Observed;

/// One `GpuNode` to be written.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// The node.
    pub node: String,
    /// Its UID.
    pub uid: String,
    /// What it shall be.
    pub spec: GpuNodeSpec,
    /// There is no object yet.
    pub create: bool,
}

/// A `GpuNode` could not be written.
#[derive(Debug, thiserror::Error)]
#[error("GpuNode {node} could not be written")]
pub struct Error {
    /// The node.
    pub node: String,
    /// What the API server, or the way there, said.
    #[source]
    pub source: kube::Error,
}

/// What is to be written: the nodes whose object says something else, or is not there. Pure.
pub fn changes(plan: &Plan, observed: &Observed) -> Vec<Change> {
    let differs = |(name, spec): (&String, &GpuNodeSpec)| {
        let node = observed.nodes.get(name)?;
        let same = node.object().is_some_and(|object| &object.spec == spec);
        (!same).then(|| Change {
            node: name.clone(),
            uid: node.uid.clone(),
            spec: spec.clone(),
            create: !node.has_object(),
        })
    };
    plan.nodes.iter().filter_map(differs).collect()
}

/// Writes one change. Repeating it changes nothing. What the API server answers may be malformed
/// and is not looked at.
pub async fn write(api: &Api<DeserializeGuard<GpuNode>>, change: &Change) -> Result<(), Error> {
    let params = PatchParams::apply(OPERATOR_MANAGER).force();
    let written = api.patch(&change.node, &params, &Patch::Apply(body(change))).await;
    written.map(drop).map_err(|source| Error { node: change.node.clone(), source })
}

/// The object as applied. It is the node's: it goes when the node goes.
fn body(change: &Change) -> Value {
    // `blockOwnerDeletion` is left out: setting it needs the right to update the node's finalizers.
    let owner = OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: change.node.clone(),
        uid: change.uid.clone(),
        ..OwnerReference::default()
    };
    json!({
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "GpuNode",
        "metadata": {"name": change.node, "ownerReferences": [owner]},
        "spec": change.spec,
    })
}
