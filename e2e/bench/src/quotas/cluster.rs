//! The objects of a pool, as the operator's watches store them.
//!
//! A plan's pass reads a pool that is built already. The operator builds the pool in each reconcile
//! from pods, `GpuNode`s and the ledger, and searches nodes with its own rules.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use cleave_api::names::GATE;
use cleave_operator::placement::{Actions, Cluster, Gatekeeper, QuotaSettings, ReconcileTime};
use cleave_operator::pod_store::{PodChange, PodChanges};
use cleave_operator::pods::PodObject;
use cleave_plan::quota::{GPU, Owner, Place, Pod, Quota, World};
use serde_json::{Value, json};

/// Shares of one GPU.
const SHARES: u64 = 10;
const RESOURCE: &str = "nvidia.com/gpu-mps";
/// Seconds since the Unix epoch at the start.
const START: u64 = 1_700_000_000;

fn parse<T: serde::de::DeserializeOwned>(value: Value) -> anyhow::Result<T> {
    serde_json::from_value(value).context("an object of the benchmark")
}

fn node_name(node: usize) -> String {
    format!("node-{node:04}")
}

fn device(gpu: usize) -> String {
    format!("GPU-{gpu:08}")
}

fn shares(pod: &Pod) -> u64 {
    pod.charge.0 * SHARES / GPU.0
}

/// Returns the namespace of an owner. Each quota counts the namespace of its name.
fn namespace(owner: &Owner) -> &str {
    match owner {
        Owner::Quota(name) => name,
        Owner::Unnamed | Owner::Outside => "unnamed",
    }
}

fn pod_object(pod: &Pod, gpus_per_node: usize) -> anyhow::Result<Arc<PodObject>> {
    let (namespace, name) = (namespace(&pod.owner), pod.name.rsplit('/').next().unwrap_or_default());
    let created = START - 100_000 + pod.created.0;
    let mut object = json!({
        "metadata": {"name": name, "namespace": namespace, "uid": format!("uid-{name}"), "resourceVersion": "1",
            "creationTimestamp": jiff_text(created)},
        "spec": {"priority": pod.priority,
            "containers": [{"name": "main", "resources": {"requests": {"cpu": "250m"}, "limits": {RESOURCE: shares(pod)}}}]},
        "status": {"phase": "Running"},
    });
    if let Some(gang) = &pod.gang {
        object["metadata"]["annotations"] =
            json!({"cleave.dev/gang": gang.name, "cleave.dev/gang-size": gang.size.to_string()});
    }
    if let Place::Running { gpu, .. } = pod.place {
        object["spec"]["nodeName"] = json!(node_name(gpu / gpus_per_node));
    } else {
        object["spec"]["schedulingGates"] = json!([{"name": GATE}]);
        object["status"] = json!({"phase": "Pending"});
    }
    let mut object: PodObject = parse(object)?;
    object.trim();
    Ok(Arc::new(object))
}

/// Returns a time as the API server writes it. All pods of the benchmark are of one day.
fn jiff_text(seconds: u64) -> String {
    let of_day = seconds % 86_400;
    format!("2023-11-14T{:02}:{:02}:{:02}Z", of_day / 3600, of_day / 60 % 60, of_day % 60)
}

/// Returns the amount of a quota in thousandths of a GPU.
fn amount(amount: cleave_plan::quota::Amount) -> String {
    format!("{}m", amount.0 / 1000)
}

fn quota_object(name: &str, quota: &Quota) -> Value {
    let mut spec = json!({"namespaces": [name], "min": amount(quota.min()), "weight": quota.weight()});
    if let Some(max) = quota.max() {
        spec["max"] = json!(amount(max));
    }
    if quota.unlent().0 > 0 {
        spec["lend"] = json!(format!("{}m", (quota.min().0 - quota.unlent().0) / 1000));
    }
    if quota.cells().is_some() {
        spec["guarantee"] = json!("Cells");
    }
    json!({"apiVersion": "cleave.dev/v1alpha1", "kind": "GpuQuota", "metadata": {"name": name}, "spec": spec})
}

fn add_node(cluster: &mut Cluster, node: usize, gpus: &[Vec<&Pod>], gpus_per_node: usize) -> anyhow::Result<()> {
    let name = node_name(node);
    let total = gpus.len() as u64 * SHARES;
    let metadata =
        json!({"name": name, "uid": name, "resourceVersion": "1", "labels": {"kubernetes.io/hostname": name}});
    let allocatable = json!({"cpu": "192", "memory": "2Ti", "pods": "250", RESOURCE: total.to_string()});
    cluster
        .nodes
        .push(Arc::new(parse(json!({"metadata": metadata, "spec": {}, "status": {"allocatable": allocatable}}))?));
    let ready = json!({"conditions": [{"type": "Ready", "status": "True"}]});
    let agent = json!({"metadata": {"name": format!("agent-{node}")}, "spec": {"nodeName": name}, "status": ready});
    cluster.agents.push(Arc::new(parse(agent)?));
    let gpus: Vec<Value> = gpus
        .iter()
        .enumerate()
        .map(|(index, pods)| {
            let uuid = device(node * gpus_per_node + index);
            let mut next = 0;
            let allocations: Vec<Value> = pods
                .iter()
                .map(|pod| {
                    let ids: Vec<String> = (next..next + shares(pod)).map(|share| format!("{uuid}::{share}")).collect();
                    next += shares(pod);
                    let name = pod.name.rsplit('/').next().unwrap_or_default();
                    json!({"pod": format!("{}/{name}", namespace(&pod.owner)), "container": "main", "resource": RESOURCE,
                        "device": uuid, "ids": ids, "clients": 0})
                })
                .collect();
            json!({"uuid": uuid, "index": index, "model": "NVIDIA H100 80GB HBM3", "memoryMib": 81559, "sms": 132,
                "mode": "Mps", "health": {"healthy": true}, "allocations": allocations,
                "slices": [{"device": uuid, "resource": RESOURCE, "total": SHARES, "inUse": next, "unhealthy": 0}]})
        })
        .collect();
    let status = json!({"agentVersion": "1", "observedGeneration": 1, "gpus": gpus});
    let metadata = json!({"name": name, "resourceVersion": "1", "generation": 1});
    let object = json!({"apiVersion": "cleave.dev/v1alpha1", "kind": "GpuNode", "metadata": metadata, "spec": {}, "status": status});
    cluster.gpu_nodes.push(Arc::new(parse(object)?));
    Ok(())
}

/// Measures one reconcile of the operator in which all waiting pods of a pool arrive.
pub(super) fn measure_reconcile(world: &World, gpus_per_node: usize) -> anyhow::Result<(Duration, Actions)> {
    let mut cluster = Cluster::default();
    let mut by_gpu: Vec<Vec<&Pod>> = vec![Vec::new(); world.gpus.len()];
    for pod in &world.pods {
        if let Place::Running { gpu, .. } = pod.place {
            by_gpu[gpu].push(pod);
        }
    }
    for (node, gpus) in by_gpu.chunks(gpus_per_node).enumerate() {
        add_node(&mut cluster, node, gpus, gpus_per_node)?;
    }
    for (name, quota) in &world.quotas {
        cluster.quotas.push(Arc::new(parse(quota_object(name, quota))?));
    }
    let mut waiting = Vec::new();
    for pod in &world.pods {
        let object = pod_object(pod, gpus_per_node)?;
        if matches!(pod.place, Place::Running { .. }) { cluster.pods.push(object) } else { waiting.push(object) }
    }
    let settings = QuotaSettings { rules: world.settings, ..QuotaSettings::default() };
    let mut keeper = Gatekeeper::default().with_quotas(settings);
    let at = |second: u64| ReconcileTime { up: Duration::from_secs(second), epoch: START + second };
    // Two reconciles: the first builds the ledger, the second finds that no pod has changed.
    for second in 0..2 {
        keeper.reconcile(&cluster, &BTreeMap::new(), at(second));
    }
    let changes = PodChanges::Since(waiting.into_iter().map(PodChange::added).collect());
    let began = Instant::now();
    let actions = keeper.reconcile_changes(&cluster, changes, &BTreeMap::new(), at(2));
    Ok((began.elapsed(), actions))
}
