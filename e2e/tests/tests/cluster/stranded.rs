//! Tests that no pod waits forever although it could run. A temporary condition may keep a pod
//! gated only while the condition lasts. The operator must release a pod only to a node that the
//! scheduler accepts.
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use cleave_e2e::{
    Cluster, POLICIES_PATH, Scope, WAIT_TIMEOUT, driver_directory, on_node, pod, run_launcher, text, wait_for,
    wait_until,
};
use serde_json::{Value, json};

use crate::gate::{is_gated, wait_for_event};
use crate::{NODE, SHARES_RESOURCE, ten_shares};

const SLEEP_FOREVER_SCRIPT: &str = "exec sleep 1000000";
/// Maximum time from when a node can accept a pod until the operator releases the pod. A failed
/// probe of an MPS host delays the release by 10 s.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(30);

/// Cordons a node until this value is dropped.
struct Cordon<'a> {
    cluster: &'a Cluster,
    node: &'a str,
}

impl<'a> Cordon<'a> {
    fn new(cluster: &'a Cluster, node: &'a str) -> Result<Self> {
        let cordon = Self { cluster, node };
        cordon.set(true)?;
        Ok(cordon)
    }

    fn set(&self, unschedulable: bool) -> Result<()> {
        self.cluster.patch(&node_path(self.node), &json!({"spec": {"unschedulable": unschedulable}})).map(drop)
    }
}

impl Drop for Cordon<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.set(false) {
            let _ = writeln!(std::io::stderr(), "failed to uncordon {}: {error:#}", self.node);
        }
    }
}

/// Returns the API path of a node.
pub(crate) fn node_path(node: &str) -> String {
    format!("/api/v1/nodes/{node}")
}

/// Checks that a pod remains gated for this time.
pub(crate) fn check_stays_gated(scope: &Scope, pod: &str, time: Duration) -> Result<()> {
    let until = Instant::now() + time;
    while Instant::now() < until {
        let object = scope.cluster.get(&scope.pod_path(pod))?;
        ensure!(is_gated(&object), "{pod} was released: {}", object["spec"]["affinity"]);
        std::thread::sleep(Duration::from_millis(200));
    }
    Ok(())
}

/// Checks that a pod is released within [`RELEASE_TIMEOUT`], and waits until the pod runs. Running
/// may take longer, because the scheduler and the kubelet may be busy with other pods.
pub(crate) fn check_runs_soon(scope: &Scope, pod: &str) -> Result<()> {
    wait_for(&format!("{pod} is released"), RELEASE_TIMEOUT, || {
        let object = scope.cluster.get(&scope.pod_path(pod))?;
        ensure!(!is_gated(&object), "{} {}", object["spec"], object["status"]);
        Ok(Some(()))
    })?;
    scope.wait_until_running(pod).map(drop)
}

#[test]
fn a_pod_that_is_created_while_its_only_node_is_cordoned_runs_after_uncordon() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "cordoned")?;
    let cordon = Cordon::new(&cluster, NODE)?;
    scope.create_pod("waits", &json!({SHARES_RESOURCE: 2}), SLEEP_FOREVER_SCRIPT)?;
    check_stays_gated(&scope, "waits", Duration::from_secs(6))?;
    wait_for_event(&scope, "waits", "cordoned")?;
    cordon.set(false)?;
    check_runs_soon(&scope, "waits")
}

#[test]
fn a_pod_that_waits_while_its_policy_is_deleted_and_applied_again_runs() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "policy-again")?;
    let spec = cluster.get(&format!("{POLICIES_PATH}/ten-shares"))?["spec"].clone();
    cluster.delete(&format!("{POLICIES_PATH}/ten-shares"), None)?;
    wait_until("the node advertises no shares", || Ok(cluster.allocatable(NODE, SHARES_RESOURCE)? == 0))?;
    scope.create_pod("waits", &json!({SHARES_RESOURCE: 2}), SLEEP_FOREVER_SCRIPT)?;
    check_stays_gated(&scope, "waits", Duration::from_secs(6))?;
    scope.create_policy("ten-shares", &spec)?;
    wait_until("the node advertises its shares again", || Ok(cluster.allocatable(NODE, SHARES_RESOURCE)? == 40))?;
    check_runs_soon(&scope, "waits")
}

/// Nodes that a test adds. Each node has one GPU. Dropping this value removes the nodes.
pub(crate) struct AddedNodes<'a> {
    cluster: &'a Cluster,
    names: Vec<String>,
}

impl<'a> AddedNodes<'a> {
    pub(crate) fn new(cluster: &'a Cluster, names: &[&str]) -> Result<Self> {
        let mut added = Self { cluster, names: Vec::new() };
        let driver = driver_directory()?;
        for name in names {
            added.names.push((*name).to_owned());
            run_launcher(&["node", "add", name, "--driver-root", &driver])?;
            let simgpu = "[ -e /var/lib/simgpu/machine.json ] || /opt/simgpu/bin/simgpu init --machine \"$0\" --gpus 1xA100-40 >/dev/null";
            on_node(name, &["sh", "-c", simgpu, name])?;
        }
        Ok(added)
    }
}

impl AddedNodes<'_> {
    /// Removes the nodes and their pods. If the pods remained, Kubernetes would keep them for a
    /// minute, and a later test would count an MPS host without a node.
    fn remove_all(&mut self) -> Result<()> {
        while let Some(name) = self.names.pop() {
            run_launcher(&["node", "remove", &name])?;
            self.cluster.delete(&node_path(&name), None)?;
            self.delete_pods(&name)?;
        }
        Ok(())
    }

    /// Deletes all pods of a removed node.
    fn delete_pods(&self, name: &str) -> Result<()> {
        wait_until(&format!("{name} has no pods"), || {
            let pods = self.cluster.list(&format!("/api/v1/pods?fieldSelector=spec.nodeName%3D{name}"))?;
            for pod in &pods {
                let (namespace, pod) = (text(&pod["metadata"]["namespace"]), text(&pod["metadata"]["name"]));
                self.cluster.delete(&format!("/api/v1/namespaces/{namespace}/pods/{pod}"), Some(0))?;
            }
            Ok(pods.is_empty())
        })
    }
}

impl Drop for AddedNodes<'_> {
    fn drop(&mut self) {
        // Each call removes at least one name from the list, even if the call fails.
        while !self.names.is_empty() {
            if let Err(error) = self.remove_all() {
                let _ = writeln!(std::io::stderr(), "failed to remove a node: {error:#}");
            }
        }
    }
}

/// Returns whether a node exists and advertises shares.
pub(crate) fn advertises_shares(cluster: &Cluster, node: &str) -> Result<bool> {
    Ok(cluster.find(&node_path(node))?.is_some() && cluster.allocatable(node, SHARES_RESOURCE)? > 0)
}

/// Returns a Deployment whose replicas must run on different nodes.
fn deployment_on_different_nodes(name: &str, replicas: u32) -> Value {
    let labels = json!({"app": name});
    let mut template = pod(name, &json!({SHARES_RESOURCE: 2}), SLEEP_FOREVER_SCRIPT);
    template["metadata"] = json!({"labels": labels});
    template["spec"]["restartPolicy"] = json!("Always");
    template["spec"]["affinity"] = json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}]}});
    let template = json!({"metadata": template["metadata"], "spec": template["spec"]});
    json!({"metadata": {"name": name}, "spec": {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}})
}

#[test]
fn replicas_with_required_anti_affinity_run_on_different_nodes() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "apart")?;
    scope.create_policy("ten-shares", &json!({"mode": "Mps", "mps": {"units": 10}}))?;
    let added = AddedNodes::new(&cluster, &["node3", "node4", "node5", "node6"])?;
    let nodes: Vec<&str> = ["node1", "node2"].into_iter().chain(added.names.iter().map(String::as_str)).collect();
    for node in &nodes {
        wait_until(&format!("{node} advertises shares"), || advertises_shares(&cluster, node))?;
    }
    cluster.create(
        &format!("/apis/apps/v1/namespaces/{}/deployments", scope.namespace),
        &deployment_on_different_nodes("apart", 6),
    )?;
    let on = wait_for("six of six run", 2 * WAIT_TIMEOUT, || {
        let pods = scope.pods()?;
        let runs = |pod: &&Value| pod["status"]["phase"] == "Running";
        let on: BTreeSet<String> = pods.iter().filter(runs).map(|pod| text(&pod["spec"]["nodeName"])).collect();
        let wanted: BTreeMap<String, String> = pods
            .iter()
            .map(|pod| (text(&pod["metadata"]["name"]), pod["spec"]["affinity"]["nodeAffinity"].to_string()))
            .collect();
        ensure!(on.len() == 6, "{on:?} of {wanted:#?}");
        Ok(Some(on))
    });
    // Delete the Deployment before its nodes are removed.
    cluster.delete(&format!("/apis/apps/v1/namespaces/{}/deployments/apart", scope.namespace), None)?;
    wait_until("no replica exists", || Ok(scope.pods()?.is_empty()))?;
    ensure!(on?.len() == nodes.len());
    Ok(())
}

/// Keeps the scheduler stopped until this value is dropped. When the scheduler starts, it lists the
/// nodes before it binds a pod.
struct StoppedScheduler;

impl StoppedScheduler {
    fn new() -> Result<Self> {
        run_launcher(&["kill", "scheduler"])?;
        Ok(Self)
    }
}

impl Drop for StoppedScheduler {
    fn drop(&mut self) {
        if let Err(error) = run_launcher(&["start", "scheduler"]) {
            let _ = writeln!(std::io::stderr(), "the scheduler does not start: {error:#}");
        }
    }
}

/// Waits until a pod is not gated. Returns the node to which the pod was released, and the pod.
fn wait_until_released(scope: &Scope, find: impl Fn() -> Result<Option<Value>>) -> Result<(String, Value)> {
    wait_for(&format!("a pod of {} is released", scope.namespace), RELEASE_TIMEOUT, || {
        let Some(pod) = find()?.filter(|pod| !is_gated(pod)) else { return Ok(None) };
        let terms = &pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
        Ok(Some((text(&terms[0]["matchExpressions"][0]["values"][0]), pod.clone())))
    })
}

#[test]
fn a_released_pod_whose_node_is_cordoned_before_binding_is_recreated() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "stranded")?;
    scope.create_policy("ten-shares", &json!({"mode": "Mps", "mps": {"units": 10}}))?;
    for node in ["node1", "node2"] {
        wait_until(&format!("{node} advertises shares"), || advertises_shares(&cluster, node))?;
    }
    let stopped = StoppedScheduler::new()?;
    let apps = format!("/apis/apps/v1/namespaces/{}/deployments", scope.namespace);
    cluster.create(&apps, &deployment_on_different_nodes("owned", 1))?;
    scope.create_pod_on_node(NODE, "bare", &json!({SHARES_RESOURCE: 1}), SLEEP_FOREVER_SCRIPT)?;
    let of_deployment = || Ok(scope.pods()?.into_iter().find(|pod| pod["metadata"]["labels"]["app"] == "owned"));
    let (node, first) = wait_until_released(&scope, of_deployment)?;
    wait_until_released(&scope, || cluster.find(&scope.pod_path("bare")))?;
    let node = ["node1", "node2"].into_iter().find(|name| *name == node).unwrap_or("node1");
    let cordon = Cordon::new(&cluster, node)?;
    let other = if node == NODE { None } else { Some(Cordon::new(&cluster, NODE)?) };
    drop(stopped);
    // The scheduler binds the replacement pod to the other node, unless both nodes are cordoned.
    if let Some(other) = other {
        wait_for_advice(&scope, "bare")?;
        // Uncordon the other node, so that the scheduler can bind the pod.
        other.set(false)?;
    }
    wait_until("the replacement runs elsewhere", || {
        let Some(pod) = of_deployment()? else { return Ok(false) };
        ensure!(pod["metadata"]["uid"] != first["metadata"]["uid"], "the pod was not replaced");
        ensure!(pod["status"]["phase"] == "Running", "{}", pod["status"]);
        Ok(text(&pod["spec"]["nodeName"]) != node)
    })?;
    if node == NODE {
        wait_for_advice(&scope, "bare")?;
    }
    // After the uncordon, the pod runs on the node, which shows that no decision was permanent.
    cordon.set(false)?;
    scope.wait_until_running("bare")?;
    wait_until("the condition is True", || {
        Ok(placed_condition(&scope, "bare")?.is_some_and(|condition| condition["status"] == "True"))
    })
}

#[test]
fn a_released_pod_whose_node_is_deleted_before_binding_is_recreated() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "node-deleted")?;
    let mut added = AddedNodes::new(&cluster, &["node3"])?;
    scope.create_policy("ten-shares", &json!({"mode": "Mps", "mps": {"units": 10}}))?;
    for node in ["node1", "node2", "node3"] {
        wait_until(&format!("{node} advertises shares"), || advertises_shares(&cluster, node))?;
    }
    let stopped = StoppedScheduler::new()?;
    let cordons = ["node1", "node2"].map(|node| Cordon::new(&cluster, node));
    let apps = format!("/apis/apps/v1/namespaces/{}/deployments", scope.namespace);
    cluster.create(&apps, &deployment_on_different_nodes("owned", 1))?;
    scope.create_pod("bare", &json!({SHARES_RESOURCE: 1}), SLEEP_FOREVER_SCRIPT)?;
    let of_deployment = || Ok(scope.pods()?.into_iter().find(|pod| pod["metadata"]["labels"]["app"] == "owned"));
    let (node, first) = wait_until_released(&scope, of_deployment)?;
    let (node_of_bare, _) = wait_until_released(&scope, || cluster.find(&scope.pod_path("bare")))?;
    ensure!(node == "node3" && node_of_bare == "node3", "released to {node} and {node_of_bare}");
    added.remove_all()?;
    drop(cordons);
    drop(stopped);
    wait_until("the replacement runs on another node", || {
        let Some(pod) = of_deployment()? else { return Ok(false) };
        ensure!(pod["metadata"]["uid"] != first["metadata"]["uid"], "the pod was not replaced");
        Ok(pod["status"]["phase"] == "Running")
    })?;
    wait_for_advice(&scope, "bare")
}

/// Returns the condition `cleave.dev/Placed` of a pod, which reports whether the pod can be bound.
fn placed_condition(scope: &Scope, pod: &str) -> Result<Option<Value>> {
    let conditions = scope.cluster.get(&scope.pod_path(pod))?["status"]["conditions"].as_array().cloned();
    Ok(conditions.unwrap_or_default().into_iter().find(|condition| condition["type"] == "cleave.dev/Placed"))
}

/// Waits until the condition of a pod that cannot be bound and has no controller names the required
/// action.
fn wait_for_advice(scope: &Scope, pod: &str) -> Result<()> {
    wait_until(&format!("the condition of {pod} names the required action"), || {
        let condition = placed_condition(scope, pod)?;
        Ok(condition.is_some_and(|one| {
            let message = text(&one["message"]);
            let names_reason = message.contains("to which this pod was released no longer");
            one["status"] == "False" && names_reason && message.contains("Delete and recreate it")
        }))
    })
}
