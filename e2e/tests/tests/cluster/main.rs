//! The promises of Cleave, on a real Kubernetes with simulated GPUs: node1 has 4 H100-80, node2 has
//! 2 A100-40.
//!
//! One test at a time (`--test-threads=1`): they share the cluster, and each leaves it as it found
//! it.
mod admission;
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
mod network;
mod policies;
mod reboot;
mod restarts;
mod shares;
mod stranded;
mod tenants;
mod upgrades;

use anyhow::Result;
use cleave_e2e::{Cluster, Scope, text, wait_until};
use serde_json::{Value, json};

/// The node that most tests use, and its simulated GPUs.
const NODE: &str = "node1";
const GPUS: u64 = 4;
/// SMs of an H100.
const SMS: u32 = 132;
/// MPS shares, unless a policy names them otherwise.
const SHARES: &str = "nvidia.com/gpu-mps";
/// A client that prints what it sees and stays.
const HOLD: &str = "exec cleave-client --hold forever";

/// A namespace and a policy that makes ten strict shares of each GPU of [`NODE`], in force.
fn ten_shares<'a>(cluster: &'a Cluster, name: &str) -> Result<Scope<'a>> {
    let scope = Scope::new(cluster, name)?;
    scope.policy(
        "ten-shares",
        &json!({"nodeSelector": {"kubernetes.io/hostname": NODE}, "mode": "Mps", "mps": {"units": 10, "threads": "Strict"}}),
    )?;
    offers(cluster, SHARES, 10 * GPUS)?;
    // The kubelet is told first: the node's own words are written up to a fifth of a second later.
    wait_until("the node says so itself", || Ok(other_than_ten(cluster, |_| true)?.is_empty()))?;
    Ok(scope)
}

/// What GPUs of [`NODE`] offer instead of ten healthy shares, by the node's own words.
fn other_than_ten(cluster: &Cluster, asked: impl Fn(&Value) -> bool) -> Result<Vec<String>> {
    let node = cluster.gpunode(NODE)?;
    let gpus = node["status"]["gpus"].as_array().cloned().unwrap_or_default();
    let healthy = |gpu: &Value| gpu["slices"][0]["total"] == 10 && gpu["slices"][0]["unhealthy"] == 0;
    let others = gpus.iter().filter(|gpu| asked(gpu) && !healthy(gpu));
    Ok(others.map(|gpu| format!("GPU {}: {}", gpu["index"], gpu["slices"])).collect())
}

/// Waits until [`NODE`] offers exactly that many of a resource.
fn offers(cluster: &Cluster, resource: &str, count: u64) -> Result<()> {
    wait_until(&format!("{NODE} offers {count} {resource}"), || {
        let offered = cluster.allocatable(NODE, resource)?;
        anyhow::ensure!(offered == count, "it offers {offered}");
        Ok(true)
    })
}

/// What the node says that a pod's container holds: one entry for each GPU that it is on.
fn allocations(cluster: &Cluster, scope: &Scope, pod: &str) -> Result<Vec<Value>> {
    let name = format!("{}/{pod}", scope.namespace);
    let node = cluster.gpunode(NODE)?;
    let gpus = node["status"]["gpus"].as_array().cloned().unwrap_or_default();
    let all = gpus.iter().flat_map(|gpu| gpu["allocations"].as_array().cloned().unwrap_or_default());
    Ok(all.filter(|allocation| text(&allocation["pod"]) == name).collect())
}

/// Pids of the MPS daemons of [`NODE`], by device.
fn daemon_pids(cluster: &Cluster) -> Result<Vec<(String, u64)>> {
    let node = cluster.gpunode(NODE)?;
    let gpus = node["status"]["gpus"].as_array().cloned().unwrap_or_default();
    let daemons = gpus.iter().flat_map(|gpu| gpu["mps"].as_array().cloned().unwrap_or_default());
    let mut pids: Vec<(String, u64)> =
        daemons.filter_map(|daemon| Some((text(&daemon["device"]), daemon["pid"].as_u64()?))).collect();
    pids.sort();
    Ok(pids)
}

/// Container id and restarts of a pod: what a disturbed pod would not keep.
fn undisturbed(cluster: &Cluster, scope: &Scope, pod: &str) -> Result<(String, u64)> {
    let pod = cluster.get(&scope.pod_path(pod))?;
    let status = &pod["status"]["containerStatuses"][0];
    anyhow::ensure!(status["state"]["running"].is_object(), "it does not run: {status}");
    Ok((text(&status["containerID"]), status["restartCount"].as_u64().unwrap_or(u64::MAX)))
}
