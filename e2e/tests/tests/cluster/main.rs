//! Tests Cleave's promises on a real Kubernetes cluster with simulated GPUs: node1 has four
//! H100-80, and node2 has two A100-40.
//!
//! Run one test at a time (`--test-threads=1`), because the tests share the cluster. Each test
//! reverts its changes to the cluster.
mod admission;
mod agent_upgrades;
mod bad_input;
mod chart;
mod clocks;
mod daemons;
mod demand;
mod docs;
mod ending;
mod faults;
mod gate;
mod gate_admission;
mod health;
mod hostile;
mod leaders;
mod network;
mod operators;
mod policies;
mod preemption;
mod quiesce;
mod quotas;
mod reboot;
mod restarts;
mod shares;
mod stranded;
mod tenants;
mod toolkit;
mod upgrades;
mod whole_gpus;
mod zones;

use anyhow::Result;
use cleave_e2e::{Cluster, Scope, text, wait_until};
use serde_json::{Value, json};

/// The node that most tests use, and the number of its simulated GPUs.
const NODE: &str = "node1";
const GPUS_PER_NODE: u64 = 4;
/// Number of SMs of an H100.
const SMS_PER_GPU: u32 = 132;
/// The resource of MPS shares, unless a policy sets another name.
const SHARES_RESOURCE: &str = "nvidia.com/gpu-mps";
/// Script of a CUDA client that reports what it sees of the GPU, and then runs until it is killed.
const HOLD_CLIENT_SCRIPT: &str = "exec cleave-client --hold forever";

/// Creates a namespace, and a policy that divides each GPU of [`NODE`] into ten strict shares.
/// Waits until the policy is applied.
fn ten_shares<'a>(cluster: &'a Cluster, name: &str) -> Result<Scope<'a>> {
    ten_shares_of(cluster, name, None)
}

/// Does the same as [`ten_shares`], but divides only the GPUs with these indices, unless `indices`
/// is `None`.
fn ten_shares_of<'a>(cluster: &'a Cluster, name: &str, indices: Option<&[u64]>) -> Result<Scope<'a>> {
    let scope = Scope::new(cluster, name)?;
    let mut spec = json!({"nodeSelector": {"kubernetes.io/hostname": NODE}, "mode": "Mps", "mps": {"units": 10, "threads": "Strict"}});
    if let Some(indices) = indices {
        spec["gpus"] = json!({"indices": indices});
    }
    scope.create_policy("ten-shares", &spec)?;
    let count = indices.map_or(GPUS_PER_NODE, |indices| indices.len() as u64);
    wait_until_advertised(cluster, SHARES_RESOURCE, 10 * count)?;
    let is_selected = |gpu: &Value| indices.is_none_or(|indices| indices.iter().any(|index| gpu["index"] == *index));
    // The agent first sends the devices to the kubelet, and updates the `GpuNode`'s status up to
    // 0.2 s later.
    wait_until("the node reports ten shares of each GPU", || {
        Ok(gpus_without_ten_shares(cluster, is_selected)?.is_empty())
    })?;
    Ok(scope)
}

/// Describes the GPUs of [`NODE`] that do not have ten healthy shares in the `GpuNode`'s status.
/// Considers only the GPUs that `selects` accepts.
fn gpus_without_ten_shares(cluster: &Cluster, selects: impl Fn(&Value) -> bool) -> Result<Vec<String>> {
    let node = cluster.gpu_node(NODE)?;
    let gpus = node["status"]["gpus"].as_array().cloned().unwrap_or_default();
    let healthy = |gpu: &Value| gpu["slices"][0]["total"] == 10 && gpu["slices"][0]["unhealthy"] == 0;
    let others = gpus.iter().filter(|gpu| selects(gpu) && !healthy(gpu));
    Ok(others.map(|gpu| format!("GPU {}: {}", gpu["index"], gpu["slices"])).collect())
}

/// Waits until [`NODE`] advertises exactly this count of a resource as allocatable.
fn wait_until_advertised(cluster: &Cluster, resource: &str, count: u64) -> Result<()> {
    wait_until(&format!("{NODE} advertises {count} {resource}"), || {
        let advertised = cluster.allocatable(NODE, resource)?;
        anyhow::ensure!(advertised == count, "the node advertises {advertised}");
        Ok(true)
    })
}

/// Returns a pod's allocations from the status of [`NODE`]: one for each container and device.
fn allocations(cluster: &Cluster, scope: &Scope, pod: &str) -> Result<Vec<Value>> {
    let name = format!("{}/{pod}", scope.namespace);
    let node = cluster.gpu_node(NODE)?;
    let gpus = node["status"]["gpus"].as_array().cloned().unwrap_or_default();
    let all = gpus.iter().flat_map(|gpu| gpu["allocations"].as_array().cloned().unwrap_or_default());
    Ok(all.filter(|allocation| text(&allocation["pod"]) == name).collect())
}

/// Returns the device and the PID of each MPS daemon of [`NODE`].
fn daemon_pids(cluster: &Cluster) -> Result<Vec<(String, u64)>> {
    let node = cluster.gpu_node(NODE)?;
    let gpus = node["status"]["gpus"].as_array().cloned().unwrap_or_default();
    let daemons = gpus.iter().flat_map(|gpu| gpu["mps"].as_array().cloned().unwrap_or_default());
    let mut pids: Vec<(String, u64)> =
        daemons.filter_map(|daemon| Some((text(&daemon["device"]), daemon["pid"].as_u64()?))).collect();
    pids.sort();
    Ok(pids)
}

/// Returns the container id and restart count of a running pod. These values change if the pod is
/// disturbed.
fn container_and_restarts(cluster: &Cluster, scope: &Scope, pod: &str) -> Result<(String, u64)> {
    let pod = cluster.get(&scope.pod_path(pod))?;
    let status = &pod["status"]["containerStatuses"][0];
    anyhow::ensure!(status["state"]["running"].is_object(), "the container does not run: {status}");
    Ok((text(&status["containerID"]), status["restartCount"].as_u64().unwrap_or(u64::MAX)))
}
