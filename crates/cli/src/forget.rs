//! `cleave forget`: removes a missing GPU from the status of its node.
//!
//! The agent keeps a GPU that NVML no longer lists, so that a failed GPU is not overlooked. Only an
//! administrator knows whether the GPU was removed for good. The command applies to the current
//! absence only: if the GPU returns and is missing again later, the agent reports the GPU again.
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use cleave_api::GpuNode;
use cleave_api::cordon::{GpuTimes, whole_seconds};
use cleave_api::gpunode::GpuStatus;
use cleave_api::names::{FORGOTTEN_ANNOTATION, HEALTH_GPU_MISSING};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use tokio::time::Instant;

use crate::cordon::{Annotations, annotations_without_cordon, update_annotations};
use crate::gpu::{GpuArgs, NodeGpu, annotation, find_gpu, read_gpu_node, reported_gpus};

/// Interval between two reads of the `GpuNode`.
const GPU_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The exit status after a timeout.
const TIMEOUT_EXIT_STATUS: u8 = 3;

/// Examples in the help of `cleave forget`.
pub(crate) const HELP_EXAMPLES: &str = "\
Examples:
  cleave forget gpu-17 3
  cleave forget gpu-17 GPU-5d2f0c3e-1b7a-4f7e-9c53-0c8f1d8ab111";

/// Options of `cleave forget`.
#[derive(Debug, Clone, clap::Args)]
pub struct ForgetArgs {
    /// The GPU and its cluster.
    #[command(flatten)]
    pub gpu: GpuArgs,
    /// Seconds to wait until the agent has forgotten the GPU. 0 waits forever.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub timeout: u64,
}

/// The result of `cleave forget`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ForgetOutcome {
    /// The agent no longer reports the GPU.
    Forgotten,
    /// The agent still reports the GPU.
    TimedOut,
}

/// Runs `cleave forget`.
pub(crate) async fn run(args: ForgetArgs) -> Result<ExitCode> {
    let client = args.gpu.cluster.connect().await?;
    Ok(match forget(&client, &args, Timestamp::now()).await? {
        ForgetOutcome::Forgotten => ExitCode::SUCCESS,
        ForgetOutcome::TimedOut => ExitCode::from(TIMEOUT_EXIT_STATUS),
    })
}

/// Requests that the agent forgets a missing GPU, waits until the agent no longer reports the GPU,
/// and prints the result.
///
/// # Errors
/// Returns an error if the GPU is unknown, not missing or in use, or if the API server refuses a
/// request.
pub async fn forget(client: &Client, args: &ForgetArgs, now: Timestamp) -> Result<ForgetOutcome> {
    let begun = Instant::now();
    let GpuArgs { node, gpu, .. } = &args.gpu;
    let find = |object: &GpuNode| Ok(vec![find_missing_gpu(object, node, gpu)?]);
    let wanted = |object: &GpuNode, uuid: &str| annotations_to_forget(object, uuid, now);
    let changes = update_annotations(client, node, find, wanted).await?;
    let Some((target, _)) = changes.into_iter().next() else { bail!("node {node} has no GPU {gpu:?}") };
    loop {
        let object = read_gpu_node(client, node).await?;
        if reported_gpus(&object).iter().all(|gpu| gpu.uuid != target.uuid) {
            println!("{target} is forgotten");
            return Ok(ForgetOutcome::Forgotten);
        }
        if args.timeout > 0 && begun.elapsed() >= Duration::from_secs(args.timeout) {
            println!("{target} is not forgotten yet: the operator or the node's agent has not read the change");
            return Ok(ForgetOutcome::TimedOut);
        }
        tokio::time::sleep(GPU_POLL_INTERVAL).await;
    }
}

/// Finds a missing GPU that no pod uses, by its UUID or its last index.
fn find_missing_gpu(object: &GpuNode, node: &str, name: &str) -> Result<NodeGpu> {
    let gpus = reported_gpus(object);
    // Another GPU may have the missing GPU's index now.
    let is_named = |gpu: &&GpuStatus| is_missing(gpu) && (gpu.uuid == name || gpu.index.to_string() == name);
    let mut missing = gpus.iter().filter(is_named);
    let Some(gpu) = missing.next() else {
        let found = find_gpu(object, node, name)?;
        bail!("{found} is not missing: the driver lists it, or does not answer. Only a missing GPU can be forgotten.");
    };
    ensure!(
        missing.next().is_none(),
        "several missing GPUs of node {node} had the index {name}. Name one by its UUID."
    );
    let target = NodeGpu { node: node.to_owned(), index: Some(gpu.index), uuid: gpu.uuid.clone() };
    let mut pods: Vec<&str> = gpu.allocations.iter().map(|allocation| allocation.pod.as_str()).collect();
    pods.sort_unstable();
    pods.dedup();
    ensure!(pods.is_empty(), "{target} is in use by {}. Run `cleave drain` first.", pods.join(", "));
    Ok(target)
}

fn is_missing(gpu: &GpuStatus) -> bool {
    gpu.health.reason == HEALTH_GPU_MISSING
}

/// Returns the annotations that make the agent forget a GPU. They also end the GPU's cordon and its
/// quiesce.
fn annotations_to_forget(object: &GpuNode, uuid: &str, now: Timestamp) -> Annotations {
    let gpus = reported_gpus(object);
    let mut forgotten = GpuTimes::read(annotation(object, FORGOTTEN_ANNOTATION));
    // Remove the entries of GPUs that the agent has forgotten: these entries have no effect.
    forgotten.0.retain(|uuid, _| gpus.iter().any(|gpu| gpu.uuid == *uuid));
    let since: Option<&Time> = gpus.iter().find(|gpu| gpu.uuid == uuid).and_then(|gpu| gpu.health.since.as_ref());
    // The node's clock may be ahead of the clock of this computer.
    let until = since.map_or(now, |since| since.0.max(now));
    forgotten.0.insert(uuid.to_owned(), whole_seconds(until));
    let mut annotations = annotations_without_cordon(object, uuid);
    annotations.push((FORGOTTEN_ANNOTATION, Some(forgotten.to_string())));
    annotations
}

#[cfg(test)]
mod tests {
    use cleave_api::names::{CORDON_ANNOTATION, QUIESCE_ANNOTATION};
    use serde_json::json;

    use super::*;

    /// Returns a node on which `GPU-b` is missing and `GPU-c` has the index of `GPU-b`.
    fn gpu_node_with_missing_gpu() -> GpuNode {
        let missing =
            json!({"healthy": false, "class": "Lost", "reason": "GpuMissing", "since": "2026-11-21T20:00:00Z"});
        serde_json::from_value(json!({
            "apiVersion": "cleave.dev/v1alpha1",
            "kind": "GpuNode",
            "metadata": {"name": "n", "annotations": {
                CORDON_ANNOTATION: "GPU-a,GPU-b=fan", QUIESCE_ANNOTATION: "GPU-b", FORGOTTEN_ANNOTATION: "GPU-x=2026-01-01T00:00:00Z"}},
            "spec": {},
            "status": {"gpus": [
                {"uuid": "GPU-a", "index": 0, "model": "H100", "memoryMib": 1, "sms": 1, "health": {"healthy": true}},
                {"uuid": "GPU-b", "index": 1, "model": "H100", "memoryMib": 1, "sms": 1, "health": missing},
                {"uuid": "GPU-c", "index": 1, "model": "H100", "memoryMib": 1, "sms": 1, "health": {"healthy": true}},
            ]},
        }))
        .unwrap()
    }

    #[test]
    fn only_a_missing_gpu_that_no_pod_uses_is_found() {
        for name in ["1", "GPU-b"] {
            assert_eq!(find_missing_gpu(&gpu_node_with_missing_gpu(), "n", name).unwrap().uuid, "GPU-b");
        }
        let error = |object: &GpuNode, name: &str| find_missing_gpu(object, "n", name).unwrap_err().to_string();
        assert!(
            error(&gpu_node_with_missing_gpu(), "0").starts_with("GPU 0 (GPU-a) on node n is not missing"),
            "{}",
            error(&gpu_node_with_missing_gpu(), "0")
        );
        assert!(error(&gpu_node_with_missing_gpu(), "GPU-c").contains("is not missing"));
        assert!(error(&gpu_node_with_missing_gpu(), "GPU-x").contains("has no GPU"));
        let mut used = gpu_node_with_missing_gpu();
        let allocation =
            json!({"pod": "ns/p", "container": "c", "resource": "r", "device": "GPU-b", "ids": ["GPU-b::0"]});
        used.status.as_mut().unwrap().gpus[1].allocations = vec![serde_json::from_value(allocation).unwrap()];
        assert_eq!(error(&used, "GPU-b"), "GPU 1 (GPU-b) on node n is in use by ns/p. Run `cleave drain` first.");
        let mut two = gpu_node_with_missing_gpu();
        two.status.as_mut().unwrap().gpus[2].health.reason = HEALTH_GPU_MISSING.to_owned();
        assert!(error(&two, "1").contains("Name one by its UUID"));
        assert_eq!(find_missing_gpu(&two, "n", "GPU-c").unwrap().uuid, "GPU-c");
    }

    #[test]
    fn forgetting_covers_the_current_absence_even_if_clocks_differ() {
        for (now, expected) in [
            ("2026-11-21T20:00:07.5Z", "GPU-b=2026-11-21T20:00:07Z"),
            ("2026-11-21T19:00:00Z", "GPU-b=2026-11-21T20:00:00Z"),
        ] {
            let annotations = annotations_to_forget(&gpu_node_with_missing_gpu(), "GPU-b", now.parse().unwrap());
            assert_eq!(
                annotations,
                [
                    (CORDON_ANNOTATION, Some("GPU-a".to_owned())),
                    (QUIESCE_ANNOTATION, None),
                    (FORGOTTEN_ANNOTATION, Some(expected.to_owned())),
                ]
            );
        }
    }
}
