//! Simulates a cluster and the true allocations in it.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cleave_api::names::GATE;
use cleave_api::placement::Placement;
use cleave_plan::affinity::HOSTNAME;
use serde_json::{Value, json};

use crate::placement::actions::{Actions, Release, ReleaseReason};
use crate::placement::cluster::{Cluster, ReconcileTime};
use crate::placement::gatekeeper::Gatekeeper;
use crate::pods::PodObject;
use crate::rollout::MpsHosts;

pub(super) const MPS_RESOURCE: &str = "nvidia.com/gpu-mps";

/// Parses a JSON value.
pub(super) fn from_json<T: serde::de::DeserializeOwned>(value: Value) -> T {
    let text = value.to_string();
    serde_json::from_value(value).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// The true state of a simulated cluster, as API objects. Each change of an object raises its
/// `resourceVersion`.
#[derive(Debug, Clone, Default)]
pub(super) struct TestCluster {
    pub(super) version: u64,
    pub(super) nodes: BTreeMap<String, Value>,
    pub(super) gpu_nodes: BTreeMap<String, Value>,
    pub(super) policies: BTreeMap<String, Value>,
    pub(super) agents: BTreeMap<String, Value>,
    pub(super) pods: BTreeMap<String, Value>,
    /// Pods of MPS hosts. `None` if the operator does not replace MPS hosts.
    pub(super) hosts: Option<BTreeMap<String, Value>>,
    pub(super) volume_claims: Vec<Value>,
    pub(super) volumes: Vec<Value>,
    pub(super) budgets: BTreeMap<String, Value>,
    pub(super) namespaces: Vec<Value>,
    pub(super) quotas: Vec<Value>,
}

impl TestCluster {
    fn with_next_resource_version(&mut self, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        object
    }

    /// Adds a node whose GPUs have ten shares each. `used` is the number of used shares of each
    /// GPU. The cluster does not list the pods that use these shares.
    pub(super) fn node(mut self, name: &str, used: &[u32]) -> Self {
        let node = json!({"metadata": {"name": name, "uid": name, "labels": {HOSTNAME: name}},
            "status": {"allocatable": {"cpu": "8", "pods": "110", MPS_RESOURCE: (used.len() * 10).to_string()}}});
        let node = self.with_next_resource_version(node);
        self.nodes.insert(name.into(), node);
        let gpus: Vec<Value> = used
            .iter()
            .enumerate()
            .map(|(index, used)| {
                json!({"uuid": format!("{name}-GPU-{index}"), "index": index, "model": "H100", "memoryMib": 81559, "sms": 132, "mode": "Mps",
                    "health": {"healthy": true}, "allocations": [],
                    "slices": [{"device": format!("{name}-GPU-{index}"), "resource": MPS_RESOURCE, "total": 10, "inUse": used, "unhealthy": 0}]})
            })
            .collect();
        let object = json!({"apiVersion": "cleave.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": name}, "spec": {},
            "status": {"agentVersion": "1", "gpus": gpus}});
        let object = self.with_next_resource_version(object);
        self.gpu_nodes.insert(name.into(), object);
        let agent = json!({"metadata": {"name": format!("agent-{name}")}, "spec": {"nodeName": name},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]}});
        let agent = self.with_next_resource_version(agent);
        self.agents.insert(name.into(), agent);
        self
    }

    /// Adds a node's MPS host of the revision with this hash, `old` or `new`.
    pub(super) fn mps_host(mut self, node: &str, hash: &str) -> Self {
        let mut host = revision(hash, 0);
        let named = json!({"name": format!("host-{node}"), "namespace": "system", "uid": format!("{hash}-{node}")});
        host["metadata"].as_object_mut().unwrap().extend(named.as_object().unwrap().clone());
        host["spec"] = json!({"nodeName": node});
        host["status"] = json!({"conditions": [{"type": "Ready", "status": "True"}]});
        self.hosts.get_or_insert_default().insert(node.into(), host);
        self
    }

    /// Adds a policy that partitions GPUs into shares.
    pub(super) fn policy(mut self, units: u32) -> Self {
        let name = format!("shares-{units}");
        let policy = json!({"apiVersion": "cleave.dev/v1alpha1", "kind": "SharingPolicy", "metadata": {"name": name},
            "spec": {"mode": "Mps", "mps": {"units": units}}});
        let policy = self.with_next_resource_version(policy);
        self.policies.insert(name, policy);
        self
    }

    /// Adds a pod at the gate that requests `shares` shares.
    pub(super) fn pod(self, name: &str, shares: u32) -> Self {
        self.pod_with(name, shares, json!({}))
    }

    /// Adds a pod at the gate that requests `shares` shares. Other fields of its spec come from
    /// `spec`.
    pub(super) fn pod_with(mut self, name: &str, shares: u32, mut spec: Value) -> Self {
        let mut pod = json!({"metadata": {"name": name, "namespace": "team", "uid": format!("{name}-{}", self.version)},
            "spec": {"schedulingGates": [{"name": GATE}],
                "containers": [{"name": "main", "resources": {"limits": {MPS_RESOURCE: shares.to_string()}}}]}});
        pod["spec"].as_object_mut().unwrap().append(spec.as_object_mut().unwrap());
        let pod = self.with_next_resource_version(pod);
        self.pods.insert(format!("team/{name}"), pod);
        self
    }

    /// Applies `edit` to one of `objects`, and raises its resource version.
    pub(super) fn change(
        &mut self,
        objects: fn(&mut Self) -> &mut BTreeMap<String, Value>,
        name: &str,
        edit: impl FnOnce(&mut Value),
    ) {
        let mut object = objects(self)[name].clone();
        edit(&mut object);
        let object = self.with_next_resource_version(object);
        objects(self).insert(name.into(), object);
    }

    /// Deletes a bound pod. The pod's grace period ends at the time `until`.
    pub(super) fn terminate(&mut self, pod: &str, until: &str) {
        self.change(|world| &mut world.pods, pod, |pod| pod["metadata"]["deletionTimestamp"] = json!(until));
    }

    /// Returns the cluster as the watches report it without lag.
    pub(super) fn cluster(&self) -> Cluster {
        let pod = |value: &Value| {
            let mut pod: PodObject = from_json(value.clone());
            pod.trim();
            Arc::new(pod)
        };
        Cluster {
            pods: self.pods.values().map(pod).collect(),
            nodes: self.nodes.values().map(|node| Arc::new(from_json(node.clone()))).collect(),
            gpu_nodes: self.gpu_nodes.values().map(|object| Arc::new(from_json(object.clone()))).collect(),
            policies: self.policies.values().map(|policy| Arc::new(from_json(policy.clone()))).collect(),
            agents: self.agents.values().map(|agent| Arc::new(from_json(agent.clone()))).collect(),
            hosts: self.hosts.as_ref().map(|hosts| MpsHosts {
                pods: hosts.values().map(|host| Arc::new(from_json(host.clone()))).collect(),
                revisions: [("old", 1), ("new", 2)]
                    .map(|(hash, number)| Arc::new(from_json(revision(hash, number))))
                    .into(),
            }),
            volume_claims: self.volume_claims.iter().map(|claim| Arc::new(from_json(claim.clone()))).collect(),
            volumes: self.volumes.iter().map(|volume| Arc::new(from_json(volume.clone()))).collect(),
            budgets: self.budgets.values().map(|budget| Arc::new(from_json(budget.clone()))).collect(),
            quotas: self.quotas.iter().map(|quota| Arc::new(from_json(quota.clone()))).collect(),
            namespaces: self.namespaces.iter().map(|namespace| Arc::new(from_json(namespace.clone()))).collect(),
        }
    }

    /// Returns the pods as the watch reports them after `before`. Only a changed pod is a new
    /// object.
    pub(super) fn changed_pods(&self, before: &[Arc<PodObject>]) -> Vec<Arc<PodObject>> {
        let same = |pod: &Arc<PodObject>| {
            let id = |pod: &PodObject| (pod.name_any(), pod.resource_version());
            before.iter().find(|known| id(known) == id(pod)).cloned()
        };
        self.cluster().pods.into_iter().map(|pod| same(&pod).unwrap_or(pod)).collect()
    }

    /// Applies a release atomically, as the API server does. Returns false if the patch fails.
    pub(super) fn apply_release(&mut self, release: &Release) -> bool {
        let Some(mut pod) = self.pods.get(&release.pod).cloned() else { return false };
        for operation in release.patch.as_array().unwrap() {
            let path = operation["path"].as_str().unwrap();
            let (parent, last) = path.rsplit_once('/').unwrap();
            let last = last.replace("~1", "/");
            match operation["op"].as_str().unwrap() {
                "test" if pod.pointer(path) != Some(&operation["value"]) => return false,
                "test" => {}
                "remove" => drop(pod.pointer_mut(parent).unwrap().as_object_mut().unwrap().remove(&last).unwrap()),
                _ => match pod.pointer_mut(parent).unwrap_or_else(|| panic!("no {parent}")) {
                    Value::Array(list) => list.push(operation["value"].clone()),
                    parent => parent[last.as_str()] = operation["value"].clone(),
                },
            }
        }
        let pod = self.with_next_resource_version(pod);
        self.pods.insert(release.pod.clone(), pod);
        true
    }

    /// Returns the UID of a pod.
    pub(super) fn uid(&self, pod: &str) -> String {
        self.pods[pod]["metadata"]["uid"].as_str().unwrap().to_owned()
    }

    /// Returns the number of shares that a pod requests.
    pub(super) fn units(pod: &Value) -> u32 {
        pod["spec"]["containers"][0]["resources"]["limits"][MPS_RESOURCE].as_str().unwrap().parse().unwrap()
    }

    /// Returns the reservation in a pod's annotation.
    pub(super) fn placement(pod: &Value) -> Option<Placement> {
        Placement::parse(pod["metadata"]["annotations"][cleave_api::placement::PLACEMENT_ANNOTATION].as_str()?).ok()
    }
}

/// Returns a pod's spec with one container that requests `count` units of a resource.
pub(super) fn requesting(resource: &str, count: u32) -> Value {
    json!({"containers": [{"name": "main", "resources": {"limits": {resource: count.to_string()}}}]})
}

/// Adds a node with whole GPUs. `used` contains 1 for each GPU in use, otherwise 0.
pub(super) fn whole_gpus(world: TestCluster, name: &str, used: &[u32]) -> TestCluster {
    const GPU_RESOURCE: &str = "nvidia.com/gpu";
    let mut world = world.node(name, used);
    world.change(
        |world| &mut world.nodes,
        name,
        |node| node["status"]["allocatable"] = json!({"cpu": "8", "pods": "110", GPU_RESOURCE: used.len().to_string()}),
    );
    world.change(
        |world| &mut world.gpu_nodes,
        name,
        |node| {
            for gpu in node["status"]["gpus"].as_array_mut().unwrap() {
                gpu["mode"] = json!("Whole");
                (gpu["slices"][0]["resource"], gpu["slices"][0]["total"]) = (json!(GPU_RESOURCE), json!(1));
            }
        },
    );
    world
}

/// Creates a `ControllerRevision`, or a pod that the `DaemonSet` of MPS hosts owns.
pub(super) fn revision(hash: &str, number: i64) -> Value {
    let owner =
        json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "hosts", "uid": "set", "controller": true});
    json!({"metadata": {"labels": {"controller-revision-hash": hash}, "ownerReferences": [owner]}, "revision": number})
}

/// Returns the names of the nodes whose MPS hosts are replaced.
pub(super) fn nodes_of_replaced_mps_hosts(actions: &Actions) -> Vec<&str> {
    actions.rollout.iter().flat_map(|step| &step.replace).map(|one| one.node.as_str()).collect()
}

/// Returns the time `seconds` after the operator's start.
pub(super) fn at(seconds: u64) -> ReconcileTime {
    ReconcileTime { up: Duration::from_secs(seconds), epoch: 1_000_000 + seconds }
}

/// Reconciles at `seconds` after the start, with watches that do not lag.
pub(super) fn reconcile(keeper: &mut Gatekeeper, world: &TestCluster, seconds: u64) -> Actions {
    keeper.reconcile(&world.cluster(), &BTreeMap::new(), at(seconds))
}

/// Returns the released pods, each with its release reason as in the metrics.
pub(super) fn released(actions: &Actions) -> Vec<(&str, &'static str)> {
    actions.releases.iter().map(|release| (release.pod.as_str(), release.reason.as_str())).collect()
}

/// Returns the reservation of a released pod.
pub(super) fn reservation(release: &Release) -> Placement {
    match &release.reason {
        ReleaseReason::Reserved(placement) => placement.clone(),
        other => panic!("{other:?}"),
    }
}

/// The nodes of the property tests.
pub(super) const NODES: [&str; 2] = ["n1", "n2"];
/// GPUs per node.
pub(super) const GPUS_PER_NODE: usize = 2;

/// The true allocations, as the kubelets record them. A pod that is deleted without a grace period
/// keeps its shares for some steps.
#[derive(Debug, Default)]
pub(super) struct ActualAllocations {
    /// Device and number of shares by pod.
    pub(super) given: BTreeMap<String, (String, u32)>,
    /// The step in which each deleted pod frees its shares.
    pub(super) ending: BTreeMap<String, usize>,
    /// The same as `given`, of ended pods that the node no longer lists.
    pub(super) unlisted: BTreeMap<String, (String, u32)>,
}

impl ActualAllocations {
    /// Returns the number of free shares of a device.
    pub(super) fn free(&self, device: &str) -> u32 {
        let used = self.given.values().chain(self.unlisted.values());
        10 - used.filter(|(of, _)| of == device).map(|(_, units)| units).sum::<u32>()
    }

    /// Writes the allocations into the status of the nodes, as agents do.
    pub(super) fn report(&self, world: &mut TestCluster) {
        self.report_on(world, GPUS_PER_NODE);
    }

    /// Writes the allocations into the status of the nodes. Each node has `gpus` GPUs.
    pub(super) fn report_on(&self, world: &mut TestCluster, gpus: usize) {
        for node in world.gpu_nodes.keys().cloned().collect::<Vec<_>>() {
            let gpus: Vec<(String, u32)> = (0..gpus)
                .map(|index| format!("{node}-GPU-{index}"))
                .map(|gpu| (gpu.clone(), 10 - self.free(&gpu)))
                .collect();
            world.change(|world| &mut world.gpu_nodes, &node, |object| {
                for (index, (gpu, used)) in gpus.iter().enumerate() {
                    let status = &mut object["status"]["gpus"][index];
                    status["slices"][0]["inUse"] = json!(used);
                    let of_gpu = self.given.iter().filter(|(_, (device, _))| device == gpu);
                    status["allocations"] = of_gpu
                        .map(|(pod, (device, units))| {
                            let ids: Vec<String> = (0..*units).map(|unit| format!("{device}::{unit}")).collect();
                            json!({"pod": pod, "container": "main", "resource": MPS_RESOURCE, "device": device, "ids": ids, "clients": 0})
                        })
                        .collect();
                }
            });
        }
    }
}

/// Records in a pod's status that the scheduler finds no node for the pod.
pub(super) fn refuse(world: &mut TestCluster, pod: &str) {
    world.change(
        |world| &mut world.pods,
        pod,
        |pod| {
            pod["status"]["conditions"] =
                json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]);
        },
    );
}

/// Adds a pod of the `ReplicaSet` `web` that requests shares. Other fields of its spec come from
/// `spec`.
pub(super) fn add_replica_set_pod(world: TestCluster, name: &str, spec: Value) -> TestCluster {
    let mut world = world.pod_with(name, 2, spec);
    world.change(
        |world| &mut world.pods,
        &format!("team/{name}"),
        |pod| {
            pod["metadata"]["labels"] = json!({"app": "web"});
            pod["metadata"]["ownerReferences"] = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": "set", "controller": true}]);
        },
    );
    world
}

/// Returns the nodes to which each pod is released.
pub(super) fn nodes_of(actions: &Actions) -> Vec<Vec<String>> {
    actions.releases.iter().map(|release| reservation(release).nodes.into_keys().collect()).collect()
}
