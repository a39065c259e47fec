//! Writes the desired state of nodes to `GpuNode.spec` by server-side apply. Writes only specs that
//! have changed.
use cleave_api::names::OPERATOR_FIELD_MANAGER;
use cleave_api::{GpuNode, GpuNodeSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::Api;
use kube::api::{Patch, PatchParams};
use kube::core::DeserializeGuard;
use serde_json::{Value, json};

use crate::policies::plan::Plan;
use crate::read::Observed;

/// A `GpuNode` to write.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuNodeChange {
    /// Name of the node.
    pub node: String,
    /// UID of the node.
    pub uid: String,
    /// The desired state.
    pub spec: GpuNodeSpec,
    /// Whether the `GpuNode` does not exist yet.
    pub create: bool,
}

/// A `GpuNode` could not be written.
#[derive(Debug, thiserror::Error)]
#[error("failed to write GpuNode {node}")]
pub struct Error {
    /// Name of the node.
    pub node: String,
    /// Error of the request.
    #[source]
    pub source: kube::Error,
}

/// Returns the nodes whose `GpuNode` differs from the plan or does not exist. Pure.
pub fn changes(plan: &Plan, observed: &Observed) -> Vec<GpuNodeChange> {
    let differs = |(name, spec): (&String, &GpuNodeSpec)| {
        let node = observed.nodes.get(name)?;
        let same = node.object().is_some_and(|object| &object.spec == spec);
        (!same).then(|| GpuNodeChange {
            node: name.clone(),
            uid: node.uid.clone(),
            spec: spec.clone(),
            create: !node.has_gpu_node(),
        })
    };
    plan.nodes.iter().filter_map(differs).collect()
}

/// Writes one change. Writes are idempotent. Ignores the object in the response, because it may be
/// malformed.
///
/// # Errors
/// Returns an error if the API server refuses the write or cannot be reached.
pub async fn write(api: &Api<DeserializeGuard<GpuNode>>, change: &GpuNodeChange) -> Result<(), Error> {
    let params = PatchParams::apply(OPERATOR_FIELD_MANAGER).force();
    let written = api.patch(&change.node, &params, &Patch::Apply(apply_body(change))).await;
    written.map(drop).map_err(|source| Error { node: change.node.clone(), source })
}

/// Returns the object to apply. The node owns the object, so the object is deleted with the node.
fn apply_body(change: &GpuNodeChange) -> Value {
    // No `blockOwnerDeletion`: the field requires permission to update the node's finalizers.
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
