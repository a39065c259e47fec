//! Measures memory and time in large clusters. These tests print figures, and developers run them
//! manually:
//!
//! `cargo test --release -p cleave-operator --lib -- --ignored --nocapture --test-threads 1 scale`
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use cleave_api::names::GATE;
use cleave_plan::affinity::HOSTNAME;
use kube::core::DeserializeGuard;
use kube::runtime::watcher::Event;
use serde_json::{Value, json};

use super::world::{MPS_RESOURCE, from_json};
use crate::placement::cluster::{Cluster, ReconcileTime};
use crate::placement::gatekeeper::Gatekeeper;
use crate::pod_store::{self, PodStore, PodWriter};
use crate::pods::RawPod;

const GPUS_PER_NODE: usize = 8;
const UNITS_PER_GPU: usize = 10;
const BYTES_PER_MIB: f64 = 1_048_576.0;

/// Returns the resident memory of this process in bytes.
fn resident_bytes() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse::<f64>().unwrap() * 1024.0
}

/// Returns the CPU time of this thread. Other programs affect CPU time less than wall-clock time.
fn cpu_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
}

fn device_name(node: usize, gpu: usize) -> String {
    format!("GPU-{node:08x}-0000-4000-8000-{gpu:012x}")
}

/// The node and the GPU of a pod of the fleet.
#[derive(Clone, Copy)]
struct PodLocation {
    node: usize,
    gpu: usize,
}

/// Returns a pod of a Deployment with 50 replicas, as the API server reports it. Without `node`,
/// the pod waits at the gate. With `place`, the pod has a reservation.
fn pod(number: usize, shares: Option<&str>, node: Option<usize>, place: Option<PodLocation>) -> RawPod {
    let app = format!("app-{}", number / 50);
    let mut resources = json!({"requests": {"cpu": "250m", "memory": "512Mi"}, "limits": {"memory": "512Mi"}});
    if let Some(shares) = shares {
        resources["limits"][MPS_RESOURCE] = json!(shares);
    }
    let conditions = ["PodScheduled", "Initialized", "ContainersReady", "Ready"];
    let conditions = conditions.map(|condition| json!({"type": condition, "status": "True"}));
    let mut pod = json!({
        "metadata": {
            "name": format!("{app}-7c9f8d6b5d-{number:05x}"), "namespace": format!("team-{}", number / 5000),
            "uid": format!("8d7f3b1e-4c5a-4f6b-9e8d-{number:012x}"), "resourceVersion": (1000 + number).to_string(),
            "creationTimestamp": "2026-01-02T03:04:05Z",
            "labels": {"app.kubernetes.io/name": app, "app.kubernetes.io/instance": "production",
                "app.kubernetes.io/component": "server", "app.kubernetes.io/part-of": "shop",
                "pod-template-hash": "7c9f8d6b5d", "team": format!("team-{}", number / 5000)},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "controller": true,
                "name": format!("{app}-7c9f8d6b5d"), "uid": format!("1a2b3c4d-0000-4000-8000-{:012x}", number / 50)}],
        },
        "spec": {"priority": 0, "containers": [{"name": "main", "resources": resources}],
            "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"}]},
        "status": {"phase": "Running", "conditions": conditions},
    });
    match node {
        Some(node) => pod["spec"]["nodeName"] = json!(node_name(node)),
        None => {
            pod["spec"]["schedulingGates"] = json!([{"name": GATE}]);
            pod["status"] = json!({"phase": "Pending"});
        }
    }
    if let Some(PodLocation { node, gpu }) = place {
        let held = json!({"until": 1_800_000_000u64, "nodes": {node_name(node): [
            {"resource": MPS_RESOURCE, "units": 1, "device": device_name(node, gpu)}]}});
        pod["metadata"]["annotations"] = json!({"cleave.dev/placement": held.to_string()});
    }
    from_json(pod)
}

fn node_name(node: usize) -> String {
    format!("node-{node:04}")
}

/// A fleet of nodes with eight GPUs each. Pods with one share each use the shares. Pods beyond the
/// number of shares use no GPU.
struct Fleet {
    nodes: usize,
    pods: usize,
    version: usize,
    cluster: Cluster,
    store: PodStore,
    writer: PodWriter,
}

impl Fleet {
    fn new(nodes: usize, pods: usize) -> Self {
        let (store, writer) = pod_store::new_store();
        let mut fleet = Self { nodes, pods, version: 1, cluster: Cluster::default(), store, writer };
        for node in 0..nodes {
            let allocatable = json!({"cpu": "192", "memory": "2Ti", "pods": "250", MPS_RESOURCE: (GPUS_PER_NODE * UNITS_PER_GPU).to_string()});
            let labels =
                json!({HOSTNAME: node_name(node), "kubernetes.io/os": "linux", "topology.kubernetes.io/zone": "a"});
            let meta =
                json!({"name": node_name(node), "uid": node_name(node), "resourceVersion": "1", "labels": labels});
            let object = json!({"metadata": meta, "spec": {}, "status": {"allocatable": allocatable}});
            fleet.cluster.nodes.push(Arc::new(from_json(object)));
            let agent = json!({"metadata": {"name": format!("agent-{node}")}, "spec": {"nodeName": node_name(node)},
                "status": {"conditions": [{"type": "Ready", "status": "True"}]}});
            fleet.cluster.agents.push(Arc::new(from_json(agent)));
            let gpu_node = fleet.gpu_node(node);
            fleet.cluster.gpu_nodes.push(gpu_node);
        }
        fleet
    }

    /// Returns the node and the GPU of a pod. Pods beyond the number of shares use no GPU.
    fn place(&self, number: usize) -> Option<PodLocation> {
        let (node, slot) = (number % self.nodes, number / self.nodes);
        (slot < GPUS_PER_NODE * UNITS_PER_GPU).then_some(PodLocation { node, gpu: slot / UNITS_PER_GPU })
    }

    fn listed_pod(&self, number: usize) -> RawPod {
        let place = self.place(number);
        pod(number, place.map(|_| "1"), Some(number % self.nodes), place)
    }

    fn gpu_node(&self, node: usize) -> Arc<DeserializeGuard<cleave_api::GpuNode>> {
        let mut gpus: Vec<Value> = Vec::new();
        for gpu in 0..GPUS_PER_NODE {
            let mut allocations = Vec::new();
            for slot in gpu * UNITS_PER_GPU..(gpu + 1) * UNITS_PER_GPU {
                let number = slot * self.nodes + node;
                if number < self.pods {
                    let meta = pod(number, None, Some(node), None).metadata;
                    allocations.push(json!({"pod": format!("{}/{}", meta.namespace.unwrap(), meta.name.unwrap()),
                        "container": "main", "resource": MPS_RESOURCE, "device": device_name(node, gpu),
                        "ids": [format!("{}::{}", device_name(node, gpu), slot % UNITS_PER_GPU)],
                        "threads": 10, "sms": 13, "memoryMib": 8155, "clients": 0}));
                }
            }
            gpus.push(
                json!({"uuid": device_name(node, gpu), "index": gpu, "model": "NVIDIA H100 80GB HBM3", "memoryMib": 81559,
                "sms": 132, "mode": "Mps", "health": {"healthy": true},
                "slices": [{"device": device_name(node, gpu), "resource": MPS_RESOURCE, "total": UNITS_PER_GPU,
                    "inUse": allocations.len(), "unhealthy": 0}],
                "mps": [{"device": device_name(node, gpu), "state": "Active", "pid": 4000 + gpu, "restarts": 0}],
                "allocations": allocations}),
            );
        }
        let meta = json!({"name": node_name(node), "resourceVersion": self.version.to_string(), "generation": 1});
        let status = json!({"agentVersion": "1", "observedGeneration": 1, "gpus": gpus});
        let object = json!({"apiVersion": "cleave.dev/v1alpha1", "kind": "GpuNode", "metadata": meta, "spec": {}, "status": status});
        Arc::new(from_json(object))
    }

    fn list_pods(&mut self) {
        self.writer.apply(Event::Init);
        for number in 0..self.pods {
            let pod = self.listed_pod(number);
            self.writer.apply(Event::InitApply(pod));
        }
        self.writer.apply(Event::InitDone);
    }

    /// Reads the stores and reconciles, as the placement controller does. Returns the CPU time, and
    /// the number of released pods.
    fn reconcile(&self, keeper: &mut Gatekeeper, second: u64) -> (Duration, usize) {
        let now = ReconcileTime { up: Duration::from_secs(second), epoch: 1_700_000_000 + second };
        let began = cpu_time();
        let (cluster, changes) = (self.cluster.clone(), self.store.changes());
        let actions = keeper.reconcile_changes(&cluster, changes, &BTreeMap::new(), now);
        drop(cluster);
        (cpu_time().saturating_sub(began), actions.releases.len())
    }
}

fn percentiles(mut times: Vec<Duration>) -> impl Debug {
    times.sort();
    let at = |percent: usize| times[(times.len() * percent).div_ceil(100).max(1) - 1];
    (at(50), at(99))
}

fn measure_memory(what: &str, shares: bool, count: usize) {
    let (store, mut writer) = pod_store::new_store();
    writer.apply(Event::Init);
    let before = resident_bytes();
    for number in 0..count {
        let place = PodLocation { node: number % 1000, gpu: number / 1000 % GPUS_PER_NODE };
        let object = pod(number, shares.then_some("1"), Some(number % 1000), shares.then_some(place));
        writer.apply(Event::InitApply(object));
    }
    writer.apply(Event::InitDone);
    let used = resident_bytes() - before;
    println!(
        "{what}: {:.0} bytes a pod, {:.0} MiB in all",
        used / f64::from(u32::try_from(count).unwrap()),
        used / BYTES_PER_MIB
    );
    assert_eq!(store.state().len(), count);
}

#[test]
#[ignore = "prints figures"]
fn scale_memory_of_pods() {
    println!("one pod: {} bytes without what it refers to", size_of::<crate::pods::PodObject>());
    measure_memory("100,000 pods without GPUs", false, 100_000);
    measure_memory("80,000 pods with shares", true, 80_000);
}

fn measure_reconciles(nodes: usize, pods: usize) {
    const RECONCILES: usize = 60;
    let start = resident_bytes();
    let mut fleet = Fleet::new(nodes, pods);
    let with_nodes = resident_bytes();
    fleet.list_pods();
    let with_pods = resident_bytes();
    let mut keeper = Gatekeeper::default();
    let (first, _) = fleet.reconcile(&mut keeper, 0);
    let mib = |bytes: f64| format!("{:.0} MiB", bytes / BYTES_PER_MIB);
    println!(
        "{nodes} nodes, {pods} pods: objects of nodes {}, pods {}, ledger and the rest {}; first reconcile {first:?}",
        mib(with_nodes - start),
        mib(with_pods - with_nodes),
        mib(resident_bytes() - with_pods),
    );
    let mut second = 1;
    // The first reconcile of a series is printed separately, because it also handles the change
    // that starts the series.
    let mut times = |what: &str, fleet: &mut Fleet, change: &mut dyn FnMut(&mut Fleet, usize)| {
        let mut times = Vec::new();
        let mut released = 0;
        for number in 0..RECONCILES {
            change(fleet, number);
            second += 1;
            let (took, releases) = fleet.reconcile(&mut keeper, second);
            times.push(took);
            released += releases;
        }
        let first = times.remove(0);
        println!("  {what}: first {first:?}, then p50 and p99 {:?}, {released} released", percentiles(times));
    };
    times("a pod changes", &mut fleet, &mut |fleet, number| {
        let mut pod = fleet.listed_pod(number);
        pod.status.conditions.clear();
        fleet.writer.apply(Event::Apply(pod));
    });
    times("a GpuNode changes", &mut fleet, &mut |fleet, number| {
        fleet.version += 1;
        let node = number * 7 % fleet.nodes;
        fleet.cluster.gpu_nodes[node] = fleet.gpu_node(node);
    });
    times("a pod that cannot fit waits, and a pod changes", &mut fleet, &mut |fleet, number| {
        if number == 0 {
            fleet.writer.apply(Event::Apply(pod(1_000_000, Some("10"), None, None)));
        }
        fleet.writer.apply(Event::Apply(fleet.listed_pod(number)));
    });
    // Pods end until half of the shares are free.
    fleet.pods = fleet.nodes * GPUS_PER_NODE * UNITS_PER_GPU / 2;
    for node in 0..fleet.nodes {
        fleet.version += 1;
        fleet.cluster.gpu_nodes[node] = fleet.gpu_node(node);
    }
    for number in fleet.pods..pods {
        let gone = fleet.listed_pod(number);
        fleet.writer.apply(Event::Delete(gone));
    }
    times("a pod arrives at a half empty fleet", &mut fleet, &mut |fleet, number| {
        fleet.writer.apply(Event::Apply(pod(2_000_000 + number, Some("1"), None, None)));
    });
}

#[test]
#[ignore = "prints figures"]
fn scale_reconciles_at_1000_nodes() {
    measure_reconciles(1000, 80_000);
}

#[test]
#[ignore = "prints figures"]
fn scale_reconciles_at_5000_nodes() {
    measure_reconciles(5000, 150_000);
}
