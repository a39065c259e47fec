//! Tests pods with rules about zones. The operator must release a pod only to nodes that the
//! scheduler accepts, and the pod must wait at the gate while these nodes are full.
use std::collections::BTreeMap;
use std::io::Write as _;
use std::time::Duration;

use anyhow::{Result, ensure};
use cleave_e2e::{Cluster, Scope, pod, text, wait_until};
use serde_json::{Value, json};

use crate::SHARES_RESOURCE;
use crate::gate::{SLEEP_FOREVER_SCRIPT, wait_for_event};
use crate::stranded::{AddedNodes, advertises_shares, check_stays_gated, node_path};

const ZONE_LABEL: &str = "topology.kubernetes.io/zone";
const STORAGE_CLASSES_PATH: &str = "/apis/storage.k8s.io/v1/storageclasses";
const VOLUMES_PATH: &str = "/api/v1/persistentvolumes";
/// Name of a storage class whose volumes are bound only after the scheduler has chosen a node.
const LATE_BINDING_CLASS: &str = "e2e-late";

/// Nodes with zone labels. Dropping this value removes the labels.
struct ZoneLabels<'a> {
    cluster: &'a Cluster,
    nodes: Vec<&'a str>,
}

impl<'a> ZoneLabels<'a> {
    /// Labels each node with its zone.
    fn new(cluster: &'a Cluster, zones: &[(&'a str, &str)]) -> Result<Self> {
        let mut labelled = Self { cluster, nodes: Vec::new() };
        for (node, zone) in zones {
            labelled.nodes.push(*node);
            labelled.label(node, &json!(zone))?;
        }
        Ok(labelled)
    }

    fn label(&self, node: &str, zone: &Value) -> Result<()> {
        self.cluster.patch(&node_path(node), &json!({"metadata": {"labels": {ZONE_LABEL: zone}}})).map(drop)
    }
}

impl Drop for ZoneLabels<'_> {
    fn drop(&mut self) {
        for node in &self.nodes {
            if let Err(error) = self.label(node, &Value::Null) {
                let _ = writeln!(std::io::stderr(), "{node} keeps its zone: {error:#}");
            }
        }
    }
}

/// Volumes, and a storage class without a provisioner. Dropping this value deletes the volumes and
/// the class.
struct Volumes<'a> {
    cluster: &'a Cluster,
    names: Vec<&'static str>,
}

impl<'a> Volumes<'a> {
    fn new(cluster: &'a Cluster) -> Result<Self> {
        let class = format!("{STORAGE_CLASSES_PATH}/{LATE_BINDING_CLASS}");
        cluster.delete(&class, None)?;
        wait_until("the storage class of an earlier run no longer exists", || Ok(cluster.find(&class)?.is_none()))?;
        let volumes = Self { cluster, names: Vec::new() };
        let class = json!({
            "metadata": {"name": LATE_BINDING_CLASS}, "provisioner": "kubernetes.io/no-provisioner",
            "volumeBindingMode": "WaitForFirstConsumer",
        });
        cluster.create(STORAGE_CLASSES_PATH, &class)?;
        Ok(volumes)
    }

    /// Creates a volume in a zone, and a claim of the volume with the same name.
    fn create(&mut self, scope: &Scope, name: &'static str, zone: &str, class: &str) -> Result<()> {
        let path = format!("{VOLUMES_PATH}/{name}");
        self.cluster.delete(&path, None)?;
        wait_until("the volume of an earlier run no longer exists", || Ok(self.cluster.find(&path)?.is_none()))?;
        self.names.push(name);
        let affinity = json!({"required": {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": ZONE_LABEL, "operator": "In", "values": [zone]}]}]}});
        let size = json!({"storage": "1Mi"});
        let volume = json!({"metadata": {"name": name}, "spec": {
            "capacity": size, "accessModes": ["ReadWriteOnce"], "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": class, "nodeAffinity": affinity,
            "hostPath": {"path": format!("/tmp/{name}"), "type": "DirectoryOrCreate"},
        }});
        self.cluster.create(VOLUMES_PATH, &volume)?;
        let claim = json!({"metadata": {"name": name}, "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": class, "volumeName": name,
            "resources": {"requests": size},
        }});
        let claims = format!("/api/v1/namespaces/{}/persistentvolumeclaims", scope.namespace);
        self.cluster.create(&claims, &claim).map(drop)
    }
}

impl Drop for Volumes<'_> {
    fn drop(&mut self) {
        let volumes = self.names.iter().map(|name| format!("{VOLUMES_PATH}/{name}"));
        for path in volumes.chain([format!("{STORAGE_CLASSES_PATH}/{LATE_BINDING_CLASS}")]) {
            if let Err(error) = self.cluster.delete(&path, None) {
                let _ = writeln!(std::io::stderr(), "{path} stays: {error:#}");
            }
        }
    }
}

/// Creates a pod that requests all shares of a GPU and mounts the volume of a claim.
fn create_pod_with_volume(scope: &Scope, name: &str, claim: &str) -> Result<()> {
    let mut pod = pod(name, &json!({SHARES_RESOURCE: 10}), SLEEP_FOREVER_SCRIPT);
    pod["spec"]["volumes"] = json!([{"name": "data", "persistentVolumeClaim": {"claimName": claim}}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]);
    scope.cluster.create(&format!("/api/v1/namespaces/{}/pods", scope.namespace), &pod).map(drop)
}

/// Returns the nodes to which a pod was released.
fn release_nodes(pod: &Value) -> Value {
    let required = &pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    required["nodeSelectorTerms"][0]["matchExpressions"][0]["values"].clone()
}

#[test]
fn pods_with_zonal_volumes_run_in_their_zone_and_wait_while_it_is_full() -> Result<()> {
    let cluster = Cluster::connect()?;
    let mut volumes = Volumes::new(&cluster)?;
    let _zones = ZoneLabels::new(&cluster, &[("node1", "a"), ("node2", "b")])?;
    let scope = Scope::new(&cluster, "zonal")?;
    scope.create_policy("ten-shares", &json!({"mode": "Mps", "mps": {"units": 10}}))?;
    // The node node1 has four GPUs, and node2 has two GPUs.
    for (node, shares) in [("node1", 40), ("node2", 20)] {
        wait_until(&format!("{node} advertises shares"), || Ok(cluster.allocatable(node, SHARES_RESOURCE)? == shares))?;
    }
    volumes.create(&scope, "e2e-bound", "b", "")?;
    let claim = format!("/api/v1/namespaces/{}/persistentvolumeclaims/e2e-bound", scope.namespace);
    wait_until("the claim is bound", || Ok(cluster.get(&claim)?["status"]["phase"] == "Bound"))?;
    create_pod_with_volume(&scope, "bound", "e2e-bound")?;
    let bound = scope.wait_until_running("bound")?;
    ensure!(release_nodes(&bound) == json!(["node2"]), "it was released to {}", release_nodes(&bound));
    // The scheduler binds this volume only when it binds the pod.
    volumes.create(&scope, "e2e-late", "b", LATE_BINDING_CLASS)?;
    create_pod_with_volume(&scope, "late", "e2e-late")?;
    let late = scope.wait_until_running("late")?;
    ensure!(late["spec"]["nodeName"] == "node2", "it runs on {}", late["spec"]["nodeName"]);
    // The node node2 is full. The node node1 has free GPUs, but pods on node1 cannot mount the
    // volume.
    create_pod_with_volume(&scope, "waits", "e2e-bound")?;
    check_stays_gated(&scope, "waits", Duration::from_secs(3))?;
    wait_for_event(&scope, "waits", "NoGpu")?;
    scope.delete_pod("late", 0)?;
    let waits = scope.wait_until_running("waits")?;
    ensure!(waits["spec"]["nodeName"] == "node2", "it runs on {}", waits["spec"]["nodeName"]);
    Ok(())
}

/// Returns a Deployment with a constraint that spreads the replicas evenly over zones.
fn deployment_over_zones(name: &str, replicas: u32) -> Value {
    let labels = json!({"app": name});
    let mut template = pod(name, &json!({SHARES_RESOURCE: 2}), SLEEP_FOREVER_SCRIPT);
    template["spec"]["restartPolicy"] = json!("Always");
    template["spec"]["topologySpreadConstraints"] = json!([{
        "maxSkew": 1, "topologyKey": ZONE_LABEL, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": labels},
    }]);
    let template = json!({"metadata": {"labels": labels}, "spec": template["spec"]});
    json!({"metadata": {"name": name}, "spec": {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}})
}

#[test]
fn replicas_with_a_spread_constraint_use_three_zones_evenly() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "spread-zones")?;
    let added = AddedNodes::new(&cluster, &["node3"])?;
    let zones = ZoneLabels::new(&cluster, &[("node1", "a"), ("node2", "b"), ("node3", "c")])?;
    scope.create_policy("ten-shares", &json!({"mode": "Mps", "mps": {"units": 10}}))?;
    for node in ["node1", "node2", "node3"] {
        wait_until(&format!("{node} advertises shares"), || advertises_shares(&cluster, node))?;
    }
    let deployments = format!("/apis/apps/v1/namespaces/{}/deployments", scope.namespace);
    // The nodes have 4, 2 and 1 GPUs. Without the constraint, each replica would use a separate
    // GPU.
    cluster.create(&deployments, &deployment_over_zones("spread", 6))?;
    let evenly = wait_until("two replicas run in each zone", || {
        let pods = scope.pods()?;
        let mut count = BTreeMap::new();
        for pod in pods.iter().filter(|pod| pod["status"]["phase"] == "Running") {
            *count.entry(text(&pod["spec"]["nodeName"])).or_insert(0) += 1;
        }
        ensure!(count.values().sum::<u32>() == 6, "{count:?} of {} replicas run", pods.len());
        ensure!(count.len() == 3 && count.values().all(|count| *count == 2), "{count:?}");
        Ok(true)
    });
    // Delete the Deployment before the added node is removed.
    cluster.delete(&format!("{deployments}/spread"), None)?;
    wait_until("the replicas no longer exist", || Ok(scope.pods()?.is_empty()))?;
    drop(zones);
    drop(added);
    evenly
}
