//! `cleave cordon` and `cleave uncordon`: stop new pods from using one GPU, and allow new pods to
//! use the GPU again.
//!
//! The state is in annotations of the `GpuNode`, which the operator reads. A write fails if the
//! object changed since it was read, so that concurrent administrators cannot overwrite each other.
use std::collections::BTreeMap;

use anyhow::{Context as _, Result, anyhow, bail};
use cleave_api::GpuNode;
use cleave_api::cordon::{GpuTimes, check_reason};
use cleave_api::gpunode::{GpuStatus, Health};
use cleave_api::names::{CLEARED_ANNOTATION, CORDON_ANNOTATION, QUIESCE_ANNOTATION};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{Patch, PatchParams};
use kube::core::DeserializeGuard;
use kube::{Api, Client};
use serde_json::json;

use crate::client::ClusterArgs;
use crate::gpu::{
    GpuArgs, NodeGpu, annotation, cordons, find_gpus, find_reported_and_removed_gpus, read_gpu_node, reported_gpus,
    requested_quiesces,
};

/// Maximum number of attempts to write an object that other clients change at the same time.
const MAX_WRITE_ATTEMPTS: u32 = 5;
/// The field manager of the annotations.
const FIELD_MANAGER: &str = "cleave";

/// Examples in the help of `cleave cordon`.
pub(crate) const HELP_EXAMPLES: &str = "\
Examples:
  cleave cordon gpu-17 3 --reason \"replace the fan\"
  cleave uncordon gpu-17 3
  cleave uncordon gpu-17               all GPUs of the node";

/// Options of `cleave cordon`.
#[derive(Debug, Clone, clap::Args)]
pub struct CordonArgs {
    /// The GPU and its cluster.
    #[command(flatten)]
    gpu: GpuArgs,
    /// Reason, shown to other administrators. Must not contain commas.
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    reason: String,
}

/// Options of `cleave uncordon`.
#[derive(Debug, Clone, clap::Args)]
pub struct UncordonArgs {
    /// Name of the node.
    #[arg(value_name = "NODE")]
    node: String,
    /// Index or UUID of the GPU [default: all GPUs of the node].
    #[arg(value_name = "GPU")]
    gpu: Option<String>,
    /// Connection to the node's cluster.
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Annotations and their new values. `None` removes an annotation.
pub(crate) type Annotations = Vec<(&'static str, Option<String>)>;

/// GPUs, and whether each GPU needs a change.
pub(crate) type GpuChanges = Vec<(NodeGpu, bool)>;

/// Runs `cleave cordon`.
pub(crate) async fn run_cordon(args: CordonArgs) -> Result<()> {
    let client = args.gpu.cluster.connect().await?;
    cordon(&client, &args.gpu, &args.reason).await.map(drop)
}

/// Runs `cleave uncordon`.
pub(crate) async fn run_uncordon(args: UncordonArgs) -> Result<()> {
    let client = args.cluster.connect().await?;
    let find = |object: &GpuNode| find_reported_and_removed_gpus(object, &args.node, args.gpu.as_deref());
    let changes = update_annotations(&client, &args.node, find, annotations_without_cordon).await?;
    for (target, changed) in changes {
        println!("{target} {}", if changed { "is uncordoned" } else { "is not cordoned and has no recorded faults" });
    }
    Ok(())
}

/// Cordons a GPU and prints the change.
///
/// # Errors
/// Returns an error if the reason is not valid, the GPU does not exist, or the `GpuNode` cannot be
/// read or written.
pub async fn cordon(client: &Client, gpu: &GpuArgs, reason: &str) -> Result<NodeGpu> {
    let cordoned = cordon_gpus(client, &gpu.node, Some(&gpu.gpu), reason).await?;
    cordoned.into_iter().next().ok_or_else(|| anyhow!("node {} has no GPU {:?}", gpu.node, gpu.gpu))
}

/// Cordons one GPU of a node, or all if `gpu` is `None`, and prints the change.
pub(crate) async fn cordon_gpus(client: &Client, node: &str, gpu: Option<&str>, reason: &str) -> Result<Vec<NodeGpu>> {
    check_reason(reason).with_context(|| format!("invalid reason {reason:?}"))?;
    let wanted = |object: &GpuNode, uuid: &str| annotations_with_cordon(object, uuid, reason.trim());
    let mut cordoned = Vec::new();
    let find = |object: &GpuNode| find_gpus(object, node, gpu);
    for (target, changed) in update_annotations(client, node, find, wanted).await? {
        println!("{target} is {}", if changed { "cordoned" } else { "already cordoned" });
        cordoned.push(target);
    }
    Ok(cordoned)
}

/// Requests that the agent quiesces GPUs of a node.
pub(crate) async fn quiesce(client: &Client, node: &str, gpus: &[NodeGpu]) -> Result<()> {
    update_annotations(client, node, |_| Ok(gpus.to_vec()), annotations_with_quiesce).await.map(drop)
}

/// Returns the annotations that quiesce a GPU.
fn annotations_with_quiesce(object: &GpuNode, uuid: &str) -> Annotations {
    let mut quiesces = requested_quiesces(object);
    match quiesces.0.insert(uuid.to_owned(), String::new()) {
        Some(_) => Annotations::new(),
        None => vec![(QUIESCE_ANNOTATION, Some(quiesces.to_string()))],
    }
}

/// Writes the annotations that `wanted` computes from the current object, for the GPUs that `find`
/// returns, in one write. Returns these GPUs, and whether each GPU needed a change.
pub(crate) async fn update_annotations(
    client: &Client,
    node: &str,
    find: impl Fn(&GpuNode) -> Result<Vec<NodeGpu>>,
    wanted: impl Fn(&GpuNode, &str) -> Annotations,
) -> Result<GpuChanges> {
    let api = Api::<DeserializeGuard<GpuNode>>::all(client.clone());
    let manager = PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
    for _ in 0..MAX_WRITE_ATTEMPTS {
        let object = read_gpu_node(client, node).await?;
        let (changes, annotations) = compute_gpu_changes(&object, find(&object)?, &wanted);
        if annotations.is_empty() {
            return Ok(changes);
        }
        let annotations: serde_json::Map<_, _> =
            annotations.into_iter().map(|(name, value)| (name.to_owned(), json!(value))).collect();
        let patch =
            json!({"metadata": {"resourceVersion": object.metadata.resource_version, "annotations": annotations}});
        match api.patch(node, &manager, &Patch::Merge(patch)).await {
            Ok(_) => return Ok(changes),
            // Retry: the object changed after it was read.
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(error) => return Err(error).with_context(|| format!("failed to update GpuNode {node}")),
        }
    }
    bail!("failed to update GpuNode {node}: it changed during each of {MAX_WRITE_ATTEMPTS} attempts. Try again.")
}

/// Returns the GPUs, whether each GPU needs a change, and the annotations for all changes.
fn compute_gpu_changes(
    object: &GpuNode,
    gpus: Vec<NodeGpu>,
    wanted: impl Fn(&GpuNode, &str) -> Annotations,
) -> (GpuChanges, Annotations) {
    let mut object = object.clone();
    let mut all = BTreeMap::new();
    let changes = gpus.into_iter().map(|gpu| {
        let annotations = wanted(&object, &gpu.uuid);
        let changed = !annotations.is_empty();
        let present = object.metadata.annotations.get_or_insert_default();
        for (name, value) in annotations {
            match &value {
                Some(value) => drop(present.insert(name.to_owned(), value.clone())),
                None => drop(present.remove(name)),
            }
            all.insert(name, value);
        }
        (gpu, changed)
    });
    (changes.collect(), all.into_iter().collect())
}

/// Returns the annotations that cordon a GPU, or none if the GPU is already cordoned for this
/// reason. An empty reason keeps an existing reason.
fn annotations_with_cordon(object: &GpuNode, uuid: &str, reason: &str) -> Annotations {
    let mut cordons = cordons(object);
    let before = cordons.0.get(uuid);
    if before.is_some_and(|before| reason.is_empty() || before == reason) {
        return Annotations::new();
    }
    cordons.0.insert(uuid.to_owned(), reason.to_owned());
    vec![(CORDON_ANNOTATION, Some(cordons.to_string()))]
}

/// Returns the annotations that uncordon a GPU, end its quiesce and clear its recorded faults.
pub(crate) fn annotations_without_cordon(object: &GpuNode, uuid: &str) -> Annotations {
    let mut annotations = Annotations::new();
    let value = |text: String| (!text.is_empty()).then_some(text);
    let mut cordons = cordons(object);
    if cordons.0.remove(uuid).is_some() {
        annotations.push((CORDON_ANNOTATION, value(cordons.to_string())));
    }
    let mut quiesces = requested_quiesces(object);
    if quiesces.0.remove(uuid).is_some() {
        annotations.push((QUIESCE_ANNOTATION, value(quiesces.to_string())));
    }
    let mut cleared = GpuTimes::read(annotation(object, CLEARED_ANNOTATION));
    let gpus = reported_gpus(object);
    if let Some(last) = gpus.iter().find(|gpu| gpu.uuid == uuid).and_then(last_fault_time)
        && cleared.0.get(uuid).is_none_or(|before| *before < last)
    {
        cleared.0.insert(uuid.to_owned(), last);
        // Remove the entries of removed GPUs: these entries have no effect.
        cleared.0.retain(|uuid, _| gpus.iter().any(|gpu| gpu.uuid == *uuid));
        annotations.push((CLEARED_ANNOTATION, value(cleared.to_string())));
    }
    annotations
}

/// Returns the time of the latest fault of a GPU and its MIG devices. Ignores devices that are
/// healthy now. Returns `None` if no unhealthy device has the time of a fault.
fn last_fault_time(gpu: &GpuStatus) -> Option<Time> {
    let instances = gpu.mig.iter().flat_map(|mig| &mig.instances).filter_map(|instance| instance.health.as_ref());
    let last = |health: &Health| health.last.clone().filter(|_| !health.healthy);
    instances.chain([&gpu.health]).filter_map(last).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a node with two faults: one of GPU `GPU-a`, and a later one of a MIG device of
    /// `GPU-b`.
    fn gpu_node_with_faults() -> GpuNode {
        let instance = json!({"uuid": "MIG-b", "profile": "1g.10gb", "start": 0, "gpuInstance": 1,
            "health": {"healthy": false, "last": "2026-11-21T20:00:05Z"}});
        serde_json::from_value(json!({
            "apiVersion": "cleave.dev/v1alpha1",
            "kind": "GpuNode",
            "metadata": {"name": "n", "annotations": {"other": "x"}},
            "spec": {},
            "status": {"gpus": [
                {"uuid": "GPU-a", "index": 0, "model": "H100", "memoryMib": 1, "sms": 1,
                 "health": {"healthy": false, "class": "NeedsReset", "last": "2026-11-21T20:00:00Z"}},
                {"uuid": "GPU-b", "index": 1, "model": "H100", "memoryMib": 1, "sms": 1, "health": {"healthy": true},
                 "mig": {"enabled": true, "profiles": [], "instances": [instance]}},
            ]},
        }))
        .unwrap()
    }

    fn apply_annotations(annotations: &Annotations, mut object: GpuNode) -> GpuNode {
        let all = object.metadata.annotations.get_or_insert_default();
        for (name, value) in annotations {
            match value {
                Some(value) => drop(all.insert((*name).to_owned(), value.clone())),
                None => drop(all.remove(*name)),
            }
        }
        object
    }

    #[test]
    fn uncordon_ends_only_the_quiesce_of_the_uncordoned_gpu() {
        let first =
            apply_annotations(&annotations_with_quiesce(&gpu_node_with_faults(), "GPU-a"), gpu_node_with_faults());
        assert!(annotations_with_quiesce(&first, "GPU-a").is_empty());
        let both = apply_annotations(&annotations_with_quiesce(&first, "GPU-b"), first);
        assert_eq!(annotation(&both, QUIESCE_ANNOTATION).unwrap(), "GPU-a,GPU-b");
        let resumed = apply_annotations(&annotations_without_cordon(&both, "GPU-a"), both);
        assert_eq!(annotation(&resumed, QUIESCE_ANNOTATION).unwrap(), "GPU-b");
    }

    #[test]
    fn all_gpus_of_a_node_change_in_one_write() {
        let all = |object: &GpuNode, wanted: fn(&GpuNode, &str) -> Annotations| {
            let (changes, annotations) = compute_gpu_changes(object, find_gpus(object, "n", None).unwrap(), wanted);
            (changes.into_iter().map(|(_, changed)| changed).collect::<Vec<_>>(), annotations)
        };
        let first =
            apply_annotations(&annotations_with_quiesce(&gpu_node_with_faults(), "GPU-a"), gpu_node_with_faults());
        let (changed, annotations) = all(&first, annotations_with_quiesce);
        assert_eq!(changed, [false, true]);
        assert_eq!(annotations, [(QUIESCE_ANNOTATION, Some("GPU-a,GPU-b".to_owned()))]);
        let both = apply_annotations(&annotations, first);
        let (changed, annotations) = all(&both, annotations_without_cordon);
        assert_eq!(changed, [true, true]);
        let cleared = "GPU-a=2026-11-21T20:00:00Z,GPU-b=2026-11-21T20:00:05Z".to_owned();
        assert_eq!(annotations, [(CLEARED_ANNOTATION, Some(cleared)), (QUIESCE_ANNOTATION, None)]);
    }

    #[test]
    fn cordon_writes_once_and_keeps_other_gpus_and_reasons() {
        let first = apply_annotations(
            &annotations_with_cordon(&gpu_node_with_faults(), "GPU-a", "new fan"),
            gpu_node_with_faults(),
        );
        assert!(annotations_with_cordon(&first, "GPU-a", "new fan").is_empty());
        assert!(annotations_with_cordon(&first, "GPU-a", "").is_empty(), "an empty reason keeps the existing one");
        let both = apply_annotations(&annotations_with_cordon(&first, "GPU-b", ""), first);
        assert_eq!(annotation(&both, CORDON_ANNOTATION).unwrap(), "GPU-a=new fan,GPU-b");
        assert_eq!(
            annotations_with_cordon(&both, "GPU-b", "x"),
            [(CORDON_ANNOTATION, Some("GPU-a=new fan,GPU-b=x".to_owned()))]
        );
    }

    #[test]
    fn uncordon_keeps_other_gpus_and_clears_faults_once() {
        let both = apply_annotations(
            &annotations_with_cordon(&gpu_node_with_faults(), "GPU-a", "new fan"),
            gpu_node_with_faults(),
        );
        let both = apply_annotations(&annotations_with_cordon(&both, "GPU-b", ""), both);
        let after = annotations_without_cordon(&both, "GPU-a");
        assert_eq!(after[0], (CORDON_ANNOTATION, Some("GPU-b".to_owned())));
        assert_eq!(after[1], (CLEARED_ANNOTATION, Some("GPU-a=2026-11-21T20:00:00Z".to_owned())));
        assert!(annotations_without_cordon(&apply_annotations(&after, both), "GPU-a").is_empty());
        let instance = annotations_without_cordon(&gpu_node_with_faults(), "GPU-b");
        assert_eq!(instance, [(CLEARED_ANNOTATION, Some("GPU-b=2026-11-21T20:00:05Z".to_owned()))]);
    }
}
