//! Finds GPUs of a node by index or UUID.
use std::collections::BTreeSet;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use cleave_api::GpuNode;
use cleave_api::cordon::Cordons;
use cleave_api::gpunode::GpuStatus;
use cleave_api::names::{CORDON_ANNOTATION, HEALTH_GPU_MISSING, QUIESCE_ANNOTATION};
use kube::core::DeserializeGuard;
use kube::{Api, Client};

use crate::client::ClusterArgs;

/// Options that name a GPU.
#[derive(Debug, Clone, clap::Args)]
pub struct GpuArgs {
    /// Name of the node.
    #[arg(value_name = "NODE")]
    pub node: String,
    /// Index or UUID of the GPU.
    #[arg(value_name = "GPU")]
    pub gpu: String,
    /// Connection to the node's cluster.
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// A GPU of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeGpu {
    /// Name of the node.
    pub node: String,
    /// Index of the GPU. `None` if the agent no longer reports the GPU.
    pub index: Option<u32>,
    /// The GPU's UUID.
    pub uuid: String,
}

impl std::fmt::Display for NodeGpu {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.index {
            Some(index) => write!(formatter, "GPU {index} ({}) on node {}", self.uuid, self.node),
            None => write!(formatter, "GPU {} (removed) on node {}", self.uuid, self.node),
        }
    }
}

/// Reads the `GpuNode` of a node.
///
/// # Errors
/// Returns an error if the `GpuNode` cannot be read, does not exist or is malformed.
pub(crate) async fn read_gpu_node(client: &Client, node: &str) -> Result<GpuNode> {
    let found = Api::<DeserializeGuard<GpuNode>>::all(client.clone()).get_opt(node).await;
    let Some(found) = found.with_context(|| format!("failed to read GpuNode {node}"))? else {
        return Err(gpu_node_not_found(node));
    };
    found.0.map_err(|invalid| anyhow!("GpuNode {node} is malformed: {}", invalid.error))
}

/// Returns the error for a node that has no `GpuNode`.
pub(crate) fn gpu_node_not_found(node: &str) -> anyhow::Error {
    anyhow!("GpuNode {node} not found. Run `kubectl get gpunodes` to list them.")
}

/// Returns the GPUs that a node's agent reported.
pub(crate) fn reported_gpus(object: &GpuNode) -> &[GpuStatus] {
    object.status.as_ref().map_or(&[], |status| status.gpus.as_slice())
}

/// Finds a GPU of a node by its index or UUID.
///
/// # Errors
/// Returns an error if the node has no such GPU or has not reported its GPUs, or if `name` is the
/// UUID of a MIG device.
pub(crate) fn find_gpu(object: &GpuNode, node: &str, name: &str) -> Result<NodeGpu> {
    let gpus = reported_gpus(object);
    let has_index = |gpu: &&GpuStatus| gpu.index.to_string() == name;
    // Another GPU may have the last index of a missing GPU now.
    let is_listed = |gpu: &&GpuStatus| gpu.health.reason != HEALTH_GPU_MISSING;
    let by_uuid = gpus.iter().find(|gpu| gpu.uuid == name);
    let found =
        by_uuid.or_else(|| gpus.iter().filter(is_listed).find(has_index)).or_else(|| gpus.iter().find(has_index));
    if let Some(gpu) = found {
        return Ok(NodeGpu { node: node.to_owned(), index: Some(gpu.index), uuid: gpu.uuid.clone() });
    }
    // Find a removed GPU by its UUID, so that `cleave uncordon` can clear its cordon.
    if unreported_gpus(object).contains(name) {
        return Ok(NodeGpu { node: node.to_owned(), index: None, uuid: name.to_owned() });
    }
    let has_instance = |gpu: &&GpuStatus| {
        gpu.mig.iter().flat_map(|mig| &mig.instances).any(|instance| !name.is_empty() && instance.uuid == name)
    };
    if let Some(gpu) = gpus.iter().find(has_instance) {
        bail!("{name} is a MIG device of GPU {} ({}). Name the GPU instead.", gpu.index, gpu.uuid);
    }
    let all: Vec<String> = gpus.iter().map(|gpu| format!("{} ({})", gpu.index, gpu.uuid)).collect();
    ensure!(!all.is_empty(), "the agent on node {node} has not reported its GPUs");
    bail!("node {node} has no GPU {name:?}. It has GPUs {}.", all.join(", "))
}

/// Finds the GPU with this index or UUID, or all GPUs that the node reports if `name` is `None`.
///
/// # Errors
/// Returns an error if the node has no such GPU, or has not reported its GPUs.
pub(crate) fn find_gpus(object: &GpuNode, node: &str, name: Option<&str>) -> Result<Vec<NodeGpu>> {
    if let Some(name) = name {
        return Ok(vec![find_gpu(object, node, name)?]);
    }
    let gpus = reported_gpus(object);
    ensure!(!gpus.is_empty(), "the agent on node {node} has not reported its GPUs");
    let gpu = |gpu: &GpuStatus| NodeGpu { node: node.to_owned(), index: Some(gpu.index), uuid: gpu.uuid.clone() };
    Ok(gpus.iter().map(gpu).collect())
}

/// Finds the GPU with this index or UUID. If `name` is `None`, finds all GPUs that the node
/// reports, and removed GPUs that an annotation still cordons or quiesces.
///
/// # Errors
/// Returns the errors of [`find_gpus`].
pub(crate) fn find_reported_and_removed_gpus(object: &GpuNode, node: &str, name: Option<&str>) -> Result<Vec<NodeGpu>> {
    let removed = unreported_gpus(object);
    if name.is_some() || removed.is_empty() {
        return find_gpus(object, node, name);
    }
    let mut gpus = find_gpus(object, node, None).unwrap_or_default();
    gpus.extend(removed.into_iter().map(|uuid| NodeGpu { node: node.to_owned(), index: None, uuid }));
    Ok(gpus)
}

/// Returns the GPUs that an annotation cordons or quiesces and that the agent does not report.
fn unreported_gpus(object: &GpuNode) -> BTreeSet<String> {
    let named = cordons(object).0.into_keys().chain(requested_quiesces(object).0.into_keys());
    named.filter(|uuid| reported_gpus(object).iter().all(|gpu| gpu.uuid != *uuid)).collect()
}

/// Returns the value of an annotation, or `None` if the object lacks the annotation.
pub(crate) fn annotation<'a>(object: &'a GpuNode, name: &str) -> Option<&'a String> {
    object.metadata.annotations.as_ref()?.get(name)
}

/// Returns the cordoned GPUs of a node.
pub(crate) fn cordons(object: &GpuNode) -> Cordons {
    Cordons::read(annotation(object, CORDON_ANNOTATION))
}

/// Returns the GPUs of a node for which an annotation requests a quiesce.
pub(crate) fn requested_quiesces(object: &GpuNode) -> Cordons {
    Cordons::read(annotation(object, QUIESCE_ANNOTATION))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn gpu_node_with_two_gpus() -> GpuNode {
        let instance = json!({"uuid": "MIG-b", "profile": "1g.10gb", "start": 0, "gpuInstance": 1});
        serde_json::from_value(json!({
            "apiVersion": "cleave.dev/v1alpha1",
            "kind": "GpuNode",
            "metadata": {"name": "n"},
            "spec": {},
            "status": {"gpus": [
                {"uuid": "GPU-a", "index": 0, "model": "H100", "memoryMib": 1, "sms": 1, "health": {"healthy": true}},
                {"uuid": "GPU-b", "index": 1, "model": "H100", "memoryMib": 1, "sms": 1, "health": {"healthy": true},
                 "mig": {"enabled": true, "profiles": [], "instances": [instance]}},
            ]},
        }))
        .unwrap()
    }

    #[test]
    fn finds_a_gpu_by_index_and_by_uuid() {
        for name in ["1", "GPU-b"] {
            assert_eq!(find_gpu(&gpu_node_with_two_gpus(), "n", name).unwrap().to_string(), "GPU 1 (GPU-b) on node n");
        }
    }

    #[test]
    fn an_index_names_the_listed_gpu_and_not_a_missing_gpu_that_had_the_index() {
        let mut object = gpu_node_with_two_gpus();
        let gpus = &mut object.status.as_mut().unwrap().gpus;
        gpus[1].index = 0;
        gpus[0].health.reason = HEALTH_GPU_MISSING.to_owned();
        assert_eq!(find_gpu(&object, "n", "0").unwrap().uuid, "GPU-b");
        assert_eq!(find_gpu(&object, "n", "GPU-a").unwrap().uuid, "GPU-a");
    }

    #[test]
    fn an_unknown_gpu_is_an_error_that_names_the_alternatives() {
        for (name, message) in [
            ("2", "node n has no GPU \"2\". It has GPUs 0 (GPU-a), 1 (GPU-b)."),
            ("", "node n has no GPU \"\". It has GPUs 0 (GPU-a), 1 (GPU-b)."),
            ("MIG-b", "MIG-b is a MIG device of GPU 1 (GPU-b). Name the GPU instead."),
        ] {
            assert_eq!(find_gpu(&gpu_node_with_two_gpus(), "n", name).unwrap_err().to_string(), message);
        }
        let mut unreported = gpu_node_with_two_gpus();
        unreported.status = None;
        let error = find_gpu(&unreported, "n", "0").unwrap_err().to_string();
        assert_eq!(error, "the agent on node n has not reported its GPUs");
    }

    #[test]
    fn finds_all_gpus_that_the_node_reports() {
        let names: Vec<String> =
            find_gpus(&gpu_node_with_two_gpus(), "n", None).unwrap().into_iter().map(|gpu| gpu.uuid).collect();
        assert_eq!(names, ["GPU-a", "GPU-b"]);
        let mut unreported = gpu_node_with_two_gpus();
        unreported.status = None;
        let error = find_gpus(&unreported, "n", None).unwrap_err().to_string();
        assert_eq!(error, "the agent on node n has not reported its GPUs");
    }

    #[test]
    fn finds_a_removed_gpu_that_is_still_cordoned() {
        let mut object = gpu_node_with_two_gpus();
        let annotations = object.metadata.annotations.get_or_insert_default();
        annotations.insert(CORDON_ANNOTATION.to_owned(), "GPU-gone".to_owned());
        assert_eq!(find_gpu(&object, "n", "GPU-gone").unwrap().to_string(), "GPU GPU-gone (removed) on node n");
    }

    #[test]
    fn a_whole_node_includes_removed_gpus_only_if_they_can_be_returned_to_service() {
        let mut object = gpu_node_with_two_gpus();
        let annotations = object.metadata.annotations.get_or_insert_default();
        annotations.insert(CORDON_ANNOTATION.to_owned(), "GPU-a".to_owned());
        annotations.insert(QUIESCE_ANNOTATION.to_owned(), "GPU-gone".to_owned());
        let uuids = |found: Result<Vec<NodeGpu>>| found.unwrap().into_iter().map(|gpu| gpu.uuid).collect::<Vec<_>>();
        assert_eq!(uuids(find_gpus(&object, "n", None)), ["GPU-a", "GPU-b"]);
        assert_eq!(uuids(find_reported_and_removed_gpus(&object, "n", None)), ["GPU-a", "GPU-b", "GPU-gone"]);
        assert_eq!(uuids(find_reported_and_removed_gpus(&object, "n", Some("1"))), ["GPU-b"]);
        object.status = None;
        assert_eq!(uuids(find_reported_and_removed_gpus(&object, "n", None)), ["GPU-a", "GPU-gone"]);
        object.metadata.annotations = None;
        assert!(find_reported_and_removed_gpus(&object, "n", None).is_err());
    }
}
