//! Simulates the true state of a cluster: the API server, kubelets, agents and controllers.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::placement::{PLACEMENT_ANNOTATION, Placement};
use serde_json::{Value, json};

use super::super::world::{MPS_RESOURCE, TestCluster};
use super::pods::{BOUND_CLAIMS, Owner, Template, ZONES};
use super::scheduler::{View, ZONE, label, list, node_of, text, tolerates};

/// Seconds since the Unix epoch at the beginning of each history, as in `world::at`.
pub(super) const EPOCH_SECONDS: u64 = 1_000_000;
/// Shares of each GPU.
const SHARES_PER_GPU: u32 = 10;

/// Shares of one GPU that are allocated to a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Allocation {
    pub(super) pod: String,
    pub(super) node: String,
    pub(super) device: String,
    pub(super) units: u32,
}

/// A GPU with its health and its partition.
#[derive(Debug, Clone)]
pub(super) struct Gpu {
    pub(super) node: String,
    pub(super) healthy: bool,
    /// Whether the GPU is partitioned into shares.
    shared: bool,
    /// The last second in which the GPU could not serve a new pod.
    last_bad: Option<u64>,
}

/// A controller of pods.
#[derive(Debug)]
struct Controller {
    uid: String,
    template: Template,
    created: usize,
}

/// Properties of a pod at its creation.
#[derive(Debug, Clone)]
pub(super) struct CreatedPod {
    pub(super) pod: Value,
    pub(super) owner: Owner,
    /// Whether a volume of the pod did not exist when the pod was created.
    pub(super) has_new_volume: bool,
}

/// The cluster.
#[derive(Debug)]
pub(super) struct Simulation {
    pub(super) api: TestCluster,
    pub(super) now: u64,
    serial: u32,
    /// Log of the history, for failure messages.
    pub(super) log: Vec<String>,
    controllers: Vec<Controller>,
    /// Properties of the pods at their creation, by UID.
    pub(super) originals: BTreeMap<String, CreatedPod>,
    /// Allocations by the pod's UID.
    pub(super) allocations: BTreeMap<String, Vec<Allocation>>,
    /// When the containers of each deleted pod end, by UID.
    ending: BTreeMap<String, u64>,
    /// Number of deleted pods whose containers have ended.
    pub(super) ended: u64,
    pub(super) gpus: BTreeMap<String, Gpu>,
    /// Nodes whose kubelet and agent do not run.
    pub(super) down: BTreeSet<String>,
    /// Nodes whose agent does not run.
    pub(super) away: BTreeSet<String>,
    /// Zones of volumes that do not exist yet, by `PersistentVolumeClaim`.
    pub(super) zones: BTreeMap<String, BTreeSet<String>>,
    /// Whether a policy partitions the GPUs into shares.
    pub(super) policy: bool,
    /// When each pod was released, by UID.
    pub(super) released_at: BTreeMap<String, u64>,
    /// Pods whose reservation the operator has dropped, by UID.
    pub(super) dropped: BTreeSet<String>,
    /// Devices with units of pods without a reservation, each with the time until which the
    /// operator may not know of these units.
    disturbed: BTreeMap<String, u64>,
    /// Number of pods that each controller has lost to evictions by the operator, by UID.
    pub(super) recreations: BTreeMap<String, usize>,
}

impl Simulation {
    /// Creates a cluster. `nodes` contains the number of GPUs of each node.
    pub(super) fn new(nodes: &[usize]) -> Self {
        let mut api = TestCluster::default().policy(SHARES_PER_GPU);
        api.namespaces = vec![json!({"metadata": {"name": "team", "labels": {}}})];
        for (zone, claim) in ZONES.iter().zip(BOUND_CLAIMS) {
            api.volume_claims
                .push(json!({"metadata": {"name": claim, "namespace": "team"}, "spec": {"volumeName": claim}}));
            api.volumes.push(volume(claim, zone));
        }
        let mut simulation = Self {
            api,
            now: 0,
            serial: 0,
            log: Vec::new(),
            controllers: Vec::new(),
            originals: BTreeMap::new(),
            allocations: BTreeMap::new(),
            ending: BTreeMap::new(),
            ended: 0,
            gpus: BTreeMap::new(),
            down: BTreeSet::new(),
            away: BTreeSet::new(),
            zones: BTreeMap::new(),
            policy: true,
            released_at: BTreeMap::new(),
            dropped: BTreeSet::new(),
            disturbed: BTreeMap::new(),
            recreations: BTreeMap::new(),
        };
        for gpus in nodes {
            simulation.add_node(*gpus);
        }
        simulation
    }

    pub(super) fn log(&mut self, what: impl FnOnce() -> String) {
        let what = what();
        self.log.push(format!("{}: {what}", self.now));
    }

    fn next_serial(&mut self) -> u32 {
        self.serial += 1;
        self.serial
    }

    /// Adds a node. The node's number determines its zone.
    pub(super) fn add_node(&mut self, gpus: usize) {
        let number = self.api.nodes.len();
        let free = |number: &usize| !self.api.nodes.contains_key(&format!("n{number}"));
        let name = format!("n{}", (number..=2 * number).find(free).unwrap());
        let serial = self.next_serial();
        self.api = std::mem::take(&mut self.api).node(&name, &vec![0; gpus]);
        let digit = usize::from(name.as_bytes()[1] - b'0');
        self.api.change(
            |api| &mut api.nodes,
            &name,
            |node| {
                node["metadata"]["uid"] = json!(format!("node-{serial}"));
                node["metadata"]["labels"][ZONE] = json!(ZONES[digit % 3]);
                node["metadata"]["labels"]["generation"] = json!((8 + digit % 2).to_string());
            },
        );
        for index in 0..gpus {
            let gpu = Gpu { node: name.clone(), healthy: true, shared: self.policy, last_bad: None };
            self.gpus.insert(format!("{name}-GPU-{index}"), gpu);
        }
        self.report_node(&name);
    }

    /// Deletes a node and everything that runs on it.
    pub(super) fn remove_node(&mut self, name: &str) {
        self.api.nodes.remove(name);
        self.api.gpu_nodes.remove(name);
        self.api.agents.remove(name);
        self.api.version += 1;
        self.gpus.retain(|_, gpu| gpu.node != name);
        self.down.remove(name);
        self.away.remove(name);
        let pods = self.api.pods.iter().filter(|(_, pod)| node_of(pod) == Some(name));
        for pod in pods.map(|(pod, _)| pod.clone()).collect::<Vec<_>>() {
            self.remove_pod(&pod);
        }
        self.allocations.retain(|_, parts| parts.iter().all(|part| part.node != name));
    }

    /// Creates a pod, or a controller that creates pods.
    pub(super) fn create(&mut self, template: &Template) {
        let serial = self.next_serial();
        if template.owner == Owner::Nothing {
            self.add_pod(template, &format!("p{serial}"), None);
        } else {
            let uid = format!("set-{serial}");
            self.controllers.push(Controller { uid, template: template.clone(), created: 0 });
            self.run_controllers();
        }
    }

    fn add_pod(&mut self, template: &Template, name: &str, controller: Option<&str>) {
        let uid = format!("{name}-{}", self.next_serial());
        let pod = template.pod(name, &uid, controller, &uid);
        let mut has_new_volume = false;
        for (index, rule) in template.rules.iter().enumerate() {
            let Some(zones) = rule.zones_of_new_volume() else { continue };
            has_new_volume = true;
            let claim = format!("{uid}-{index}");
            self.api.volume_claims.push(json!({"metadata": {"name": claim, "namespace": "team"}, "spec": {}}));
            self.zones.insert(claim, zones.map(str::to_owned).collect());
        }
        self.originals.insert(uid, CreatedPod { pod: pod.clone(), owner: template.owner, has_new_volume });
        self.store_pod(&format!("team/{name}"), pod);
    }

    fn store_pod(&mut self, name: &str, pod: Value) {
        self.api.pods.insert(name.to_owned(), pod);
        self.api.change(|api| &mut api.pods, name, |_| ());
    }

    /// Creates the missing pods of each controller.
    pub(super) fn run_controllers(&mut self) {
        for index in 0..self.controllers.len() {
            let Controller { uid, template, .. } = &self.controllers[index];
            let (uid, template) = (uid.clone(), template.clone());
            let is_own = |pod: &&Value| text(pod, "/metadata/ownerReferences/0/uid") == uid;
            let living = |pod: &&Value| pod["metadata"]["deletionTimestamp"].is_null();
            for ordinal in 0..template.replicas {
                let name = if template.owner == Owner::StatefulSet {
                    format!("{uid}-{ordinal}")
                } else {
                    let own = self.api.pods.values().filter(is_own).filter(living).count();
                    if own >= template.replicas {
                        break;
                    }
                    self.controllers[index].created += 1;
                    format!("{uid}-{}", self.controllers[index].created)
                };
                if !self.api.pods.contains_key(&format!("team/{name}")) {
                    self.add_pod(&template, &name, Some(&uid));
                }
            }
        }
    }

    /// Removes a pod from the API server. Its containers may still run.
    fn remove_pod(&mut self, name: &str) {
        self.log(|| format!("{name} is gone"));
        self.api.pods.remove(name);
        self.api.version += 1;
    }

    pub(super) fn uid(&self, pod: &str) -> Option<&str> {
        Some(text(self.api.pods.get(pod)?, "/metadata/uid"))
    }

    /// Deletes a pod. A bound pod terminates for some seconds. If the pod is deleted by force, its
    /// object disappears immediately, and its containers may run for up to four more seconds.
    pub(super) fn delete(&mut self, name: &str, force: bool, seconds: u64) {
        let pod = &self.api.pods[name];
        let uid = text(pod, "/metadata/uid").to_owned();
        let bound = node_of(pod).is_some();
        if self.ending.contains_key(&uid) && !force {
            return;
        }
        if !bound {
            self.remove_pod(name);
        } else if force {
            self.remove_pod(name);
            self.ending.insert(uid, self.now + 1 + seconds % 4);
        } else {
            let grace = 1 + seconds % 30;
            self.ending.insert(uid, self.now + grace);
            let at = jiff::Timestamp::from_second(i64::try_from(EPOCH_SECONDS + self.now + grace).unwrap())
                .unwrap()
                .to_string();
            self.api.change(|api| &mut api.pods, name, |pod| pod["metadata"]["deletionTimestamp"] = json!(at));
        }
    }

    /// Ends a running pod whose programs have completed.
    pub(super) fn complete_pod(&mut self, name: &str) {
        let uid = self.uid(name).unwrap().to_owned();
        if self.allocations.remove(&uid).is_some() {
            self.remove_pod(name);
        }
    }

    /// Records the GPUs that cannot serve. Ends the containers of deleted pods at their due time,
    /// except on nodes that are down. Deletes pods that do not tolerate a taint with `NoExecute`.
    pub(super) fn run_kubelets(&mut self) {
        for (name, gpu) in &self.gpus.clone() {
            if !self.can_serve(gpu) {
                self.gpus.get_mut(name).unwrap().last_bad = Some(self.now);
            }
        }
        let due: Vec<String> =
            self.ending.iter().filter(|(_, end)| **end <= self.now).map(|(uid, _)| uid.clone()).collect();
        for uid in due {
            let pod = self.api.pods.iter().find(|(_, pod)| text(pod, "/metadata/uid") == uid);
            let pod = pod.map(|(name, pod)| (name.clone(), node_of(pod).unwrap_or_default().to_owned()));
            let node = pod.as_ref().map(|(_, node)| node.clone());
            if node.is_some_and(|node| self.down.contains(&node)) {
                continue;
            }
            if let Some((name, _)) = pod {
                self.remove_pod(&name);
            }
            self.ending.remove(&uid);
            if self.allocations.remove(&uid).is_some() {
                self.ended += 1;
            }
        }
        let intolerant = |(_, pod): &(&String, &Value)| {
            let node = node_of(pod).and_then(|node| self.api.nodes.get(node));
            let taints = node.map_or(&[] as &[Value], |node| list(node, "/spec/taints"));
            taints
                .iter()
                .any(|taint| taint["effect"] == "NoExecute" && !tolerates(pod, text(taint, "/key"), "NoExecute"))
        };
        let intolerant: Vec<String> = self.api.pods.iter().filter(intolerant).map(|(name, _)| name.clone()).collect();
        intolerant.iter().for_each(|name| self.delete(name, false, 5));
    }

    /// Returns when the containers of the next deleted pod end.
    pub(super) fn next_container_end(&self) -> Option<u64> {
        self.ending.values().copied().filter(|end| *end > self.now).min()
    }

    fn can_serve(&self, gpu: &Gpu) -> bool {
        gpu.healthy && gpu.shared && !self.down.contains(&gpu.node) && !self.away.contains(&gpu.node)
    }

    /// Returns the free units of a GPU, regardless of reservations. A GPU that cannot serve has no
    /// free units.
    pub(super) fn free(&self, device: &str) -> u32 {
        let serves = self.gpus.get(device).is_some_and(|gpu| self.can_serve(gpu));
        if serves { SHARES_PER_GPU - self.used(device) } else { 0 }
    }

    pub(super) fn used(&self, device: &str) -> u32 {
        self.allocations.values().flatten().filter(|part| part.device == device).map(|part| part.units).sum()
    }

    /// Returns whether a pod without a reservation received units of a device after the release of
    /// this pod, or up to 60 s before the release. A pod whose reservation has ended has no gate,
    /// so the scheduler may bind it at any time.
    pub(super) fn is_disturbed(&self, uid: &str, device: &str) -> bool {
        let released = self.released_at.get(uid).copied().unwrap_or(0);
        self.disturbed.get(device).is_some_and(|until| *until >= released)
    }

    /// Returns the reservation in a pod's annotation.
    pub(super) fn placement(pod: &Value) -> Option<Placement> {
        TestCluster::placement(pod)
    }

    /// Allocates the units of the pods that are bound to a node. Rejects a pod whose reserved units
    /// are not free.
    ///
    /// # Errors
    /// Returns an error if a pod is rejected and no documented exception explains the rejection.
    pub(super) fn admit(&mut self, node: &str) -> Result<(), String> {
        if self.down.contains(node) {
            return Ok(());
        }
        let new = |pod: &Value| {
            let uid = text(pod, "/metadata/uid");
            let alive = pod["metadata"]["deletionTimestamp"].is_null();
            node_of(pod) == Some(node)
                && alive
                && !self.allocations.contains_key(uid)
                && !pod["metadata"]["annotations"][PLACEMENT_ANNOTATION].is_null()
        };
        let new: Vec<String> = self.api.pods.iter().filter(|(_, pod)| new(pod)).map(|(name, _)| name.clone()).collect();
        for name in new {
            let uid = self.uid(&name).unwrap().to_owned();
            let reserved = Self::placement(&self.api.pods[&name]).unwrap().nodes.remove(node).unwrap_or_default();
            let mut parts: Vec<Allocation> = Vec::new();
            for part in reserved {
                let taken: u32 =
                    parts.iter().filter(|other| other.device == part.device).map(|other| other.units).sum();
                if self.free(&part.device) < taken + part.units {
                    let released = self.released_at.get(&uid).copied().unwrap_or(0);
                    let bad =
                        self.gpus.get(&part.device).is_none_or(|gpu| gpu.last_bad.is_some_and(|at| at >= released));
                    if !bad && !self.dropped.contains(&uid) && !self.is_disturbed(&uid, &part.device) {
                        return Err(format!(
                            "{name} needs {part:?}, and {} units are free: {:?}",
                            self.free(&part.device),
                            self.allocations
                        ));
                    }
                    parts.clear();
                    break;
                }
                let (device, units) = (part.device, part.units);
                parts.push(Allocation { pod: name.clone(), node: node.to_owned(), device, units });
            }
            if parts.is_empty() {
                // The pod fails, and its controller recreates it.
                self.log(|| format!("{name} is rejected by the kubelet of {node}"));
                self.remove_pod(&name);
                continue;
            }
            self.log(|| format!("{name} gets {parts:?}"));
            if self.dropped.contains(&uid) {
                self.disturbed.extend(parts.iter().map(|part| (part.device.clone(), self.now + 60)));
            }
            self.allocations.insert(uid, parts);
            self.api.change(|api| &mut api.pods, &name, |pod| pod["status"]["phase"] = json!("Running"));
        }
        Ok(())
    }

    /// Writes the reports of a node's agent and kubelet.
    pub(super) fn report_node(&mut self, name: &str) {
        if self.down.contains(name) {
            return;
        }
        let wanted: BTreeSet<String> = self.reserved_devices();
        let policy = self.policy;
        let gpus: Vec<String> =
            self.gpus.iter().filter(|(_, gpu)| gpu.node == name).map(|(gpu, _)| gpu.clone()).collect();
        let mut allocatable = 0;
        let mut reports = Vec::new();
        for device in gpus {
            let used = self.used(&device);
            let gpu = self.gpus.get_mut(&device).unwrap();
            gpu.shared = policy || gpu.shared && (used > 0 || wanted.contains(&device));
            if gpu.shared && gpu.healthy {
                allocatable += SHARES_PER_GPU;
            }
            reports.push((device.clone(), gpu.clone(), used));
        }
        let away = self.away.contains(name);
        let allocatable = if away { 0 } else { allocatable }.to_string();
        if self.api.nodes[name]["status"]["allocatable"][MPS_RESOURCE] != json!(allocatable) {
            self.api.change(
                |api| &mut api.nodes,
                name,
                |node| node["status"]["allocatable"][MPS_RESOURCE] = json!(allocatable),
            );
        }
        if away {
            return;
        }
        let reports: Vec<Value> =
            reports.iter().map(|(device, gpu, used)| self.gpu_report(device, gpu, *used)).collect();
        if self.api.gpu_nodes[name]["status"]["gpus"] != json!(reports) {
            self.api.change(|api| &mut api.gpu_nodes, name, |node| node["status"]["gpus"] = json!(reports));
        }
    }

    fn gpu_report(&self, device: &str, gpu: &Gpu, used: u32) -> Value {
        let parts = self.allocations.values().flatten().filter(|part| part.device == device);
        let allocations: Vec<Value> = parts
            .enumerate()
            .map(|(index, Allocation { pod, units, .. })| {
                let ids: Vec<String> = (0..*units).map(|unit| format!("{device}::{index}-{unit}")).collect();
                json!({"pod": pod, "container": format!("c{index}"), "resource": MPS_RESOURCE, "device": device, "ids": ids, "clients": 0})
            })
            .collect();
        let unhealthy = if gpu.healthy { 0 } else { SHARES_PER_GPU };
        let slice = json!({"device": device, "resource": MPS_RESOURCE, "total": SHARES_PER_GPU, "inUse": used, "unhealthy": unhealthy});
        let slices = if gpu.shared { vec![slice] } else { Vec::new() };
        json!({"uuid": device, "index": 0, "model": "H100", "memoryMib": 81559, "sms": 132, "mode": "Mps",
            "health": {"healthy": gpu.healthy}, "allocations": allocations, "slices": slices})
    }

    /// Returns the devices on which pods without an allocation have a reservation. A GPU with a
    /// reservation is not repartitioned.
    fn reserved_devices(&self) -> BTreeSet<String> {
        let reserved = self.api.pods.values().filter(|pod| !self.allocations.contains_key(text(pod, "/metadata/uid")));
        let placements = reserved.filter_map(Self::placement);
        placements.flat_map(|placement| placement.nodes.into_values().flatten()).map(|part| part.device).collect()
    }

    /// Returns the scheduler's view of the cluster.
    pub(super) fn view(&self) -> View<'_> {
        View { api: &self.api, zones: &self.zones }
    }

    /// Returns the pods that the scheduler tries to bind.
    pub(super) fn schedulable_pods(&self) -> Vec<String> {
        let waits = |pod: &Value| node_of(pod).is_none() && list(pod, "/spec/schedulingGates").is_empty();
        self.api.pods.iter().filter(|(_, pod)| waits(pod)).map(|(name, _)| name.clone()).collect()
    }

    /// Binds a pod to a node that no filter refuses, or reports that no such node exists.
    pub(super) fn schedule(&mut self, name: &str, which: usize) {
        let pod = &self.api.pods[name];
        let view = self.view();
        let feasible = self.api.nodes.iter().filter(|(_, node)| view.refusal(pod, node).is_none());
        let feasible: Vec<String> = feasible.map(|(name, _)| name.clone()).collect();
        if feasible.is_empty() {
            let why: Vec<_> =
                self.api.nodes.iter().map(|(node, object)| (node.clone(), view.refusal(pod, object))).collect();
            self.log(|| format!("{name} is not bound: {why:?}"));
            self.set_condition(name, "PodScheduled", "False", "Unschedulable");
            return;
        }
        let node = feasible[which % feasible.len()].clone();
        self.log(|| format!("{name} is bound to {node}"));
        let zone = label(&self.api.nodes[&node], ZONE).unwrap().to_owned();
        for mount in list(&self.api.pods[name].clone(), "/spec/volumes") {
            let claim = text(mount, "/persistentVolumeClaim/claimName");
            if self.zones.remove(claim).is_some() {
                let of_pod = self.api.volume_claims.iter_mut().find(|one| one["metadata"]["name"] == claim).unwrap();
                of_pod["spec"]["volumeName"] = json!(claim);
                self.api.volumes.push(volume(claim, &zone));
            }
        }
        self.api.change(|api| &mut api.pods, name, |pod| pod["spec"]["nodeName"] = json!(node));
        self.set_condition(name, "PodScheduled", "True", "");
    }

    /// Sets a condition of a pod, unless the pod already has it.
    pub(super) fn set_condition(&mut self, name: &str, kind: &str, status: &str, reason: &str) {
        let condition = json!({"type": kind, "status": status, "reason": reason});
        let mut conditions = list(&self.api.pods[name], "/status/conditions").to_vec();
        if conditions.contains(&condition) {
            return;
        }
        conditions.retain(|one| one["type"] != kind);
        conditions.push(condition);
        self.api.change(|api| &mut api.pods, name, |pod| pod["status"]["conditions"] = json!(conditions));
    }
}

/// Returns a volume that the nodes of a zone can mount.
fn volume(name: &str, zone: &str) -> Value {
    let terms = json!([{"matchExpressions": [{"key": ZONE, "operator": "In", "values": [zone]}]}]);
    json!({"metadata": {"name": name}, "spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": terms}}}})
}
