//! Tests that pods that request whole GPUs wait at the placement gate, and that pods can still use
//! nodes with another device plugin.
use std::io::Write as _;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cleave_e2e::{Cluster, POLICIES_PATH, Scope, WAIT_TIMEOUT, text, wait_for, wait_until};
use serde_json::{Value, json};

use crate::gate::{is_gated, wait_for_event};
use crate::stranded::check_stays_gated;
use crate::{GPUS_PER_NODE, NODE, SHARES_RESOURCE, ten_shares, wait_until_advertised};

const WHOLE_GPU_RESOURCE: &str = "nvidia.com/gpu";
const SLEEP_FOREVER_SCRIPT: &str = "exec sleep 1000000";
/// Name of the node on which another device plugin serves whole GPUs. The node exists only as an
/// object.
const OTHER_NODE: &str = "other-plugin";
/// Number of GPUs of [`OTHER_NODE`].
const OTHER_NODE_GPU_COUNT: u64 = 2;

#[test]
fn a_pod_for_a_whole_gpu_waits_while_the_gpu_has_shares_in_use() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "whole-gate")?;
    for index in 0..GPUS_PER_NODE {
        scope.create_pod(&format!("seven-{index}"), &json!({SHARES_RESOURCE: 7}), SLEEP_FOREVER_SCRIPT)?;
    }
    for index in 0..GPUS_PER_NODE {
        scope.wait_until_running(&format!("seven-{index}"))?;
    }
    cluster.delete(&format!("{POLICIES_PATH}/ten-shares"), None)?;
    scope.create_pod_on_node(NODE, "whole", &json!({WHOLE_GPU_RESOURCE: 1}), SLEEP_FOREVER_SCRIPT)?;
    check_stays_gated(&scope, "whole", Duration::from_secs(6))?;
    wait_for_event(&scope, "whole", WHOLE_GPU_RESOURCE)?;
    scope.delete_pod("seven-0", 0)?;
    scope.wait_until_running("whole").map(drop)
}

#[test]
fn no_pod_for_whole_gpus_is_refused_while_gpus_are_repartitioned() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "whole-again")?;
    let spec = cluster.get(&format!("{POLICIES_PATH}/ten-shares"))?["spec"].clone();
    for round in 0..5 {
        let name = format!("whole-{round}");
        // For some time after the policy is applied, the kubelet still reports whole GPUs.
        cluster.delete(&format!("{POLICIES_PATH}/ten-shares"), None)?;
        wait_until_advertised(&cluster, WHOLE_GPU_RESOURCE, GPUS_PER_NODE)?;
        scope.create_policy("ten-shares", &spec)?;
        wait_until("the operator has decided to repartition the GPUs", || {
            let gpus = cluster.gpu_node(NODE)?["spec"]["gpus"].as_array().cloned().unwrap_or_default();
            Ok(gpus.len() as u64 == GPUS_PER_NODE && gpus.iter().all(|gpu| !gpu["partition"]["mps"].is_null()))
        })?;
        scope.create_pod_on_node(NODE, &name, &json!({WHOLE_GPU_RESOURCE: GPUS_PER_NODE}), SLEEP_FOREVER_SCRIPT)?;
        wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * GPUS_PER_NODE)?;
        ensure!(is_gated(&cluster.get(&scope.pod_path(&name))?), "{name} was released");
        cluster.delete(&format!("{POLICIES_PATH}/ten-shares"), None)?;
        scope.wait_until_running(&name)?;
        scope.delete_pod(&name, 0)?;
        scope.create_policy("ten-shares", &spec)?;
        wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * GPUS_PER_NODE)?;
    }
    Ok(())
}

/// A node without a kubelet, on which another device plugin serves whole GPUs. No agent runs on the
/// node, because the node has no label `kubernetes.io/os`. Dropping this value deletes the node.
struct OtherNode<'a>(&'a Cluster);

impl<'a> OtherNode<'a> {
    fn new(cluster: &'a Cluster) -> Result<Self> {
        let path = format!("/api/v1/nodes/{OTHER_NODE}");
        if cluster.find(&path)?.is_some() {
            cluster.delete(&path, None)?;
        }
        let labels = json!({"kubernetes.io/hostname": OTHER_NODE});
        let node =
            json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": OTHER_NODE, "labels": labels}, "spec": {}});
        cluster.create("/api/v1/nodes", &node)?;
        let added = Self(cluster);
        let amounts =
            json!({"cpu": "8", "memory": "8Gi", "pods": "110", WHOLE_GPU_RESOURCE: OTHER_NODE_GPU_COUNT.to_string()});
        let conditions = json!([{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "ready"}]);
        let status = json!({"capacity": amounts, "allocatable": amounts, "conditions": conditions});
        cluster.patch(&format!("{path}/status"), &json!({"status": status}))?;
        wait_until("the other node has no taint", || Ok(cluster.get(&path)?["spec"]["taints"].is_null()))?;
        Ok(added)
    }
}

impl Drop for OtherNode<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.0.delete(&format!("/api/v1/nodes/{OTHER_NODE}"), None) {
            let _ = writeln!(std::io::stderr(), "failed to delete the node {OTHER_NODE}: {error:#}");
        }
    }
}

/// Waits until a pod is bound, and returns the name of its node and its required node affinity.
fn wait_until_bound(scope: &Scope, name: &str) -> Result<(String, Value)> {
    wait_for(&format!("{name} is bound"), WAIT_TIMEOUT, || {
        let pod = scope.cluster.get(&scope.pod_path(name))?;
        let node = text(&pod["spec"]["nodeName"]);
        ensure!(!node.is_empty(), "{} {}", pod["spec"]["schedulingGates"], pod["status"]);
        let required = "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution";
        Ok(Some((node, pod.pointer(required).cloned().unwrap_or_default())))
    })
}

#[test]
fn pods_use_nodes_of_another_plugin_when_cleaves_nodes_are_full() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "mixed-fleet")?;
    let nodes = cluster.nodes()?;
    for node in &nodes {
        let gpus = cluster.allocatable(node, WHOLE_GPU_RESOURCE)?;
        scope.create_pod_on_node(
            node,
            &format!("all-{node}"),
            &json!({WHOLE_GPU_RESOURCE: gpus}),
            SLEEP_FOREVER_SCRIPT,
        )?;
        scope.wait_until_running(&format!("all-{node}"))?;
    }
    // Create this node last, because it has no kubelet and becomes NotReady in less than a minute.
    let other = OtherNode::new(&cluster)?;
    let pods = format!("/api/v1/namespaces/{}/pods", scope.namespace);
    for name in ["first", "second"] {
        scope.create_pod(name, &json!({WHOLE_GPU_RESOURCE: 1}), SLEEP_FOREVER_SCRIPT)?;
        let (node, required) = wait_until_bound(&scope, name)?;
        ensure!(node == OTHER_NODE, "{name} is on {node}");
        let expression = &required["nodeSelectorTerms"][0]["matchExpressions"][0];
        ensure!(expression["operator"] == "NotIn" && expression["key"] == "kubernetes.io/os", "{required}");
    }
    scope.create_pod("third", &json!({WHOLE_GPU_RESOURCE: 1}), SLEEP_FOREVER_SCRIPT)?;
    check_stays_gated(&scope, "third", Duration::from_secs(3))?;
    scope.delete_pod(&format!("all-{NODE}"), 0)?;
    scope.wait_until_running("third")?;
    ensure!(wait_until_bound(&scope, "third")?.0 == NODE, "the pod is not on {NODE}");
    // Delete these pods with grace period 0, because no kubelet terminates them.
    for name in ["first", "second"] {
        cluster.delete(&format!("{pods}/{name}"), Some(0)).context("failed to delete a pod")?;
    }
    drop(other);
    Ok(())
}
