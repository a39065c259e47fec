//! Simulates a cluster. The test controls whether the nodes apply their specs or fail.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cleave_api::gpunode::{
    AllocationStatus, GpuNode, GpuNodeSpec, GpuNodeStatus, GpuStatus, Health, MigInstanceSpec, MigInstanceStatus,
    MigProfileStatus, MigStatus, MpsPartition, Partition, SliceStatus,
};
use cleave_api::sharingpolicy::SharingPolicy;
use cleave_operator::pods::PodObject;
use cleave_operator::policies::apply::{GpuNodeChange, changes};
use cleave_operator::policies::demand::{Outcome, Reason, decide_partitions};
use cleave_operator::policies::plan::{Plan, plan};
use cleave_operator::policies::snapshot::History;
use cleave_operator::policies::status::{WrittenStatuses, updates};
use cleave_operator::read::{Agent, Node, Observed};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::core::DeserializeGuard;

pub(crate) const SLICE_10GB_RESOURCE: &str = "nvidia.com/gpu-10gb";
pub(crate) const SLICE_20GB_RESOURCE: &str = "nvidia.com/gpu-20gb";
pub(crate) const WHOLE_GPU_RESOURCE: &str = "nvidia.com/gpu";
pub(crate) const MIG_1G_RESOURCE: &str = "nvidia.com/mig-1g.5gb";
pub(crate) const MIG_3G_RESOURCE: &str = "nvidia.com/mig-3g.20gb";

fn a100(node: &str, index: u32) -> GpuStatus {
    let uuid = format!("GPU-{node}-{index}");
    let profile = |name: &str, size, starts: &[u32], memory_mib| MigProfileStatus {
        name: name.to_owned(),
        size,
        starts: starts.to_vec(),
        memory_mib,
        ..MigProfileStatus::default()
    };
    GpuStatus {
        index,
        model: "NVIDIA A100-SXM4-40GB".to_owned(),
        memory_mib: 40_960,
        mode: "Whole".to_owned(),
        slices: vec![SliceStatus {
            device: uuid.clone(),
            resource: WHOLE_GPU_RESOURCE.to_owned(),
            total: 1,
            ..SliceStatus::default()
        }],
        mig: Some(MigStatus {
            profiles: vec![
                profile("1g.5gb", 1, &[0, 1, 2, 3, 4, 5, 6], 4864),
                profile("2g.10gb", 2, &[0, 2, 4], 9856),
                profile("3g.20gb", 4, &[0, 4], 19_968),
                profile("7g.40gb", 8, &[0], 40_192),
            ],
            ..MigStatus::default()
        }),
        health: Health { healthy: true, ..Health::default() },
        uuid,
        ..GpuStatus::default()
    }
}

/// A simulated cluster, with the state that the operator keeps between passes.
#[derive(Default)]
pub(crate) struct TestCluster {
    pub(crate) observed: Observed,
    pub(crate) history: History,
    pub(crate) pods: BTreeMap<String, PodObject>,
    pub(crate) now: Duration,
    /// Allocations that the kubelet lists, each as pod, node and allocation.
    pub(crate) allocations: Vec<(String, String, AllocationStatus)>,
    pub(crate) changes: Vec<GpuNodeChange>,
}

impl TestCluster {
    pub(crate) fn new(policy: &str) -> Self {
        Self::default().policy("p", policy)
    }

    pub(crate) fn policy(mut self, name: &str, spec: &str) -> Self {
        let indented: String = spec.lines().map(|line| format!("  {line}\n")).collect();
        let text = format!(
            "apiVersion: cleave.dev/v1alpha1\nkind: SharingPolicy\nmetadata:\n  name: {name}\n  generation: 1\nspec:\n{indented}"
        );
        let policy: SharingPolicy = serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        self.observed.policies.insert(name.to_owned(), Ok(policy));
        self
    }

    pub(crate) fn node(mut self, name: &str, gpus: u32) -> Self {
        let status = GpuNodeStatus {
            observed_generation: 1,
            agent_version: "0.1.0".to_owned(),
            gpus: (0..gpus).map(|index| a100(name, index)).collect(),
            ..GpuNodeStatus::default()
        };
        let object = GpuNode {
            metadata: ObjectMeta { name: Some(name.to_owned()), generation: Some(1), ..ObjectMeta::default() },
            spec: GpuNodeSpec::default(),
            status: Some(status),
        };
        let node = Node {
            uid: format!("uid-of-{name}"),
            agent: Some(Agent { ready: true }),
            gpu_node: Some(Arc::new(DeserializeGuard(Ok(object)))),
            ..Node::default()
        };
        self.observed.nodes.insert(name.to_owned(), node);
        // The operator has written the node's spec before any pod exists.
        self.run_pass();
        self.apply_all_specs();
        self.changes.clear();
        self
    }

    pub(crate) fn pod(&mut self, name: &str, resource: &str, count: u32) {
        self.pod_with(name, resource, count, "");
    }

    pub(crate) fn pod_with(&mut self, name: &str, resource: &str, count: u32, spec: &str) {
        let text = format!(
            "metadata: {{name: {name}, namespace: team, uid: uid-of-{name}}}\nspec:\n  containers:\n  - resources: {{limits: {{{resource}: {count}}}}}\n{spec}"
        );
        let mut pod: PodObject = serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let age = i64::try_from(self.pods.len()).unwrap();
        pod.metadata.creation_timestamp = Some(Time(Timestamp::from_second(age).unwrap()));
        pod.trim();
        self.pods.insert(format!("team/{name}"), pod);
    }

    pub(crate) fn object(&mut self, node: &str) -> &mut GpuNode {
        match self.observed.nodes.get_mut(node).and_then(|node| node.gpu_node.as_mut()).map(Arc::make_mut) {
            Some(DeserializeGuard(Ok(object))) => object,
            _ => panic!("{node} has no GpuNode"),
        }
    }

    pub(crate) fn status(&mut self, node: &str) -> &mut GpuNodeStatus {
        self.object(node).status.as_mut().unwrap()
    }

    pub(crate) fn partition(&mut self, node: &str, index: usize) -> Partition {
        self.object(node).spec.gpus[index].partition.clone()
    }

    pub(crate) fn mps(&mut self, node: &str, index: usize) -> MpsPartition {
        self.partition(node, index).mps.unwrap_or_else(|| panic!("GPU {index} of {node} does not serve MPS"))
    }

    pub(crate) fn mig(&mut self, node: &str, index: usize) -> Vec<MigInstanceSpec> {
        self.partition(node, index).mig.unwrap_or_else(|| panic!("GPU {index} of {node} has no MIG instances"))
    }

    pub(crate) fn count(&mut self, node: &str, index: usize, resource: &str) -> u32 {
        self.mps(node, index)
            .slices
            .iter()
            .filter(|slices| slices.resource == resource)
            .map(|slices| slices.count)
            .sum()
    }

    /// Runs one pass of the operator: reads, plans and writes.
    pub(crate) fn run_pass(&mut self) -> (Plan, Outcome) {
        let pods: Vec<PodObject> = self.pods.values().cloned().collect();
        self.observed.set_pods(pods.iter());
        let mut observed = self.observed.clone();
        self.history.restore_writes(&mut observed, self.now);
        let mut plan = plan(&observed);
        let outcome = decide_partitions(&mut plan, &observed, &mut self.history, self.now);
        assert_eq!(outcome.violations, []);
        self.changes = changes(&plan, &observed);
        for change in self.changes.clone() {
            let object = self.object(&change.node);
            object.spec = change.spec;
            object.metadata.generation = object.metadata.generation.map(|generation| generation + 1);
        }
        (plan, outcome)
    }

    /// Returns the names of the nodes that the last pass wrote to.
    pub(crate) fn written_nodes(&self) -> Vec<&str> {
        self.changes.iter().map(|change| change.node.as_str()).collect()
    }

    /// Applies each node's spec, as its agent does.
    pub(crate) fn apply_all_specs(&mut self) {
        let names: Vec<String> = self.observed.nodes.keys().cloned().collect();
        names.iter().for_each(|name| self.apply_spec(name));
    }

    pub(crate) fn apply_spec(&mut self, name: &str) {
        let allocations = self.allocations.clone();
        let object = self.object(name);
        let (spec, generation) = (object.spec.clone(), object.metadata.generation.unwrap());
        let status = object.status.as_mut().unwrap();
        status.observed_generation = generation;
        status.plan_id.clone_from(&spec.plan_id);
        status.steps.clear();
        for desired in spec.gpus {
            let Some(gpu) = status.gpus.iter_mut().find(|gpu| gpu.uuid == desired.uuid) else { continue };
            apply_partition(gpu, &desired.partition);
            list_allocations(gpu, &allocations);
        }
    }

    /// Binds every pod that fits the free slices of a node, as the scheduler does. Also lists the
    /// devices of each bound pod, as the kubelet does.
    pub(crate) fn bind_fitting_pods(&mut self) {
        for name in self.pods.keys().cloned().collect::<Vec<_>>() {
            let pod = &self.pods[&name];
            if pod.node().is_some() {
                continue;
            }
            let wants: Vec<(String, u32)> = pod
                .spec
                .requests
                .iter()
                .map(|(resource, count)| (resource.clone(), u32::try_from(count.count().unwrap()).unwrap()))
                .collect();
            let nodes: Vec<String> = self.observed.nodes.keys().cloned().collect();
            let Some(node) = nodes.into_iter().find(|node| {
                let status = self.observed.nodes[node].reported().unwrap();
                wants.iter().all(|(resource, count)| {
                    let slice = status.iter().flat_map(|gpu| &gpu.slices).filter(|slice| slice.resource == *resource);
                    slice.map(|slice| slice.total - slice.in_use).sum::<u32>() >= *count
                })
            }) else {
                continue;
            };
            self.pods.get_mut(&name).unwrap().bind(&node);
            for (resource, count) in wants {
                for _ in 0..count {
                    self.allocate(&name, &node, &resource);
                }
            }
        }
    }

    /// Allocates one free slice of a resource to a pod.
    pub(crate) fn allocate(&mut self, pod: &str, node: &str, resource: &str) {
        let allocations = self.allocations.clone();
        let rows = allocations.iter().filter(|(_, _, row)| row.resource == resource);
        let taken: BTreeSet<String> = rows.flat_map(|(_, _, row)| row.ids.clone()).collect();
        let spec = self.object(node).spec.clone();
        let status = self.status(node);
        let (device, id) = status
            .gpus
            .iter()
            .flat_map(|gpu| {
                device_ids(gpu, spec.gpus.iter().find(|spec| spec.uuid == gpu.uuid).map(|spec| &spec.partition))
            })
            .find(|(_, name, id)| name == resource && !taken.contains(id))
            .map(|(device, _, id)| (device, id))
            .unwrap();
        let row = AllocationStatus {
            pod: pod.to_owned(),
            resource: resource.to_owned(),
            device,
            ids: vec![id],
            ..AllocationStatus::default()
        };
        self.allocations.push((pod.to_owned(), node.to_owned(), row));
        let allocations = self.allocations.clone();
        self.status(node).gpus.iter_mut().for_each(|gpu| list_allocations(gpu, &allocations));
    }

    /// Removes a pod and frees its devices.
    pub(crate) fn remove_pod(&mut self, name: &str) {
        let name = format!("team/{name}");
        self.pods.remove(&name);
        self.allocations.retain(|(pod, ..)| *pod != name);
        let allocations = self.allocations.clone();
        for node in self.observed.nodes.keys().cloned().collect::<Vec<_>>() {
            self.status(&node).gpus.iter_mut().for_each(|gpu| list_allocations(gpu, &allocations));
        }
    }

    pub(crate) fn is_bound(&self, name: &str) -> bool {
        self.pods[&format!("team/{name}")].node().is_some()
    }

    /// Runs the operator, the agents and the scheduler until nothing changes.
    pub(crate) fn settle(&mut self) {
        for _ in 0..20 {
            self.run_pass();
            let quiet = self.changes.is_empty();
            self.apply_all_specs();
            let before = self.allocations.len();
            self.bind_fitting_pods();
            if quiet && self.allocations.len() == before {
                return;
            }
            self.now += Duration::from_secs(1);
        }
        panic!("the cluster does not settle: {:?}", self.changes);
    }

    /// Returns the part of the policy's status that reports whether the policy is ready.
    pub(crate) fn readiness(&self, plan: &Plan) -> PolicyReadiness {
        let update = updates(plan, &self.observed, &WrittenStatuses::new(), Timestamp::UNIX_EPOCH).remove(0);
        let ready = update.status.conditions.iter().find(|condition| condition.type_ == "Ready").unwrap().clone();
        PolicyReadiness { reason: ready.reason, message: ready.message, missing_slices: update.status.wanted }
    }
}

/// The part of a policy's status that reports whether the policy is ready.
pub(crate) struct PolicyReadiness {
    /// Reason of the condition Ready.
    pub(crate) reason: String,
    /// Message of the condition Ready.
    pub(crate) message: String,
    /// Number of slices that the policy's GPUs lack.
    pub(crate) missing_slices: u32,
}

/// Asserts that a pod waits for this reason, with this part of the message.
#[track_caller]
pub(crate) fn assert_waits(outcome: &Outcome, pod: &str, reason: Reason, part: &str) {
    let waiting = outcome.waiting.get(&format!("team/{pod}")).unwrap_or_else(|| panic!("{pod} does not wait"));
    assert_eq!(waiting.reason, reason, "{}", waiting.message);
    assert!(waiting.message.contains(part), "{part:?} is not in {:?}", waiting.message);
}

/// Applies a partition as an agent does.
pub(crate) fn apply_partition(gpu: &mut GpuStatus, partition: &Partition) {
    let uuid = gpu.uuid.clone();
    let slice_status = |device: &str, resource: &str, start, total| SliceStatus {
        device: device.to_owned(),
        resource: resource.to_owned(),
        start,
        total,
        ..SliceStatus::default()
    };
    let mig = gpu.mig.as_mut().unwrap();
    mig.enabled = partition.mig.is_some();
    mig.instances.clear();
    gpu.slices.clear();
    if let Some(whole) = &partition.whole {
        gpu.slices.push(slice_status(&uuid, &whole.resource, None, 1));
    }
    for slices in partition.mps.iter().flat_map(|mps| &mps.slices) {
        match gpu.slices.iter_mut().find(|slice| slice.resource == slices.resource) {
            Some(slice) => slice.total += slices.count,
            None => gpu.slices.push(slice_status(&uuid, &slices.resource, None, slices.count)),
        }
    }
    if let Some(time_sliced) = &partition.time_slicing {
        gpu.slices.push(slice_status(&uuid, &time_sliced.resource, None, time_sliced.replicas));
    }
    for instance in partition.mig.iter().flatten() {
        let device = format!("MIG-{uuid}-{}-{}", instance.profile, instance.start);
        mig.instances.push(MigInstanceStatus {
            uuid: device.clone(),
            profile: instance.profile.clone(),
            start: instance.start,
            ..MigInstanceStatus::default()
        });
        if let Some(whole) = &instance.partition.whole {
            gpu.slices.push(slice_status(&device, &whole.resource, Some(instance.start), 1));
        }
        for slices in instance.partition.mps.iter().flat_map(|mps| &mps.slices) {
            gpu.slices.push(slice_status(&device, &slices.resource, Some(instance.start), slices.count));
        }
    }
}

/// Writes allocations to a status as an agent does. Panics if an allocated slice no longer exists.
pub(crate) fn list_allocations(gpu: &mut GpuStatus, allocations: &[(String, String, AllocationStatus)]) {
    let is_of_gpu =
        |row: &AllocationStatus| row.device == gpu.uuid || row.device.starts_with(&format!("MIG-{}-", gpu.uuid));
    gpu.allocations = allocations.iter().map(|(_, _, row)| row).filter(|row| is_of_gpu(row)).cloned().collect();
    for slice in &mut gpu.slices {
        slice.in_use = 0;
    }
    for row in &gpu.allocations {
        let slice = gpu.slices.iter_mut().find(|slice| slice.device == row.device && slice.resource == row.resource);
        let slice =
            slice.unwrap_or_else(|| panic!("{} has {} of {}, which is gone", row.pod, row.resource, row.device));
        slice.in_use += u32::try_from(row.ids.len()).unwrap();
        assert!(slice.in_use <= slice.total, "{} has more slices than exist", row.pod);
    }
}

/// Returns the device ids of a GPU, as (device, resource, id).
fn device_ids(gpu: &GpuStatus, partition: Option<&Partition>) -> Vec<(String, String, String)> {
    let mut all = Vec::new();
    for slice in &gpu.slices {
        let mps = partition.and_then(|partition| partition.mps.as_ref()).filter(|_| slice.device == gpu.uuid);
        let numbers: Vec<u32> = match mps {
            Some(mps) => {
                let of = mps.slices.iter().filter(|slices| slices.resource == slice.resource);
                of.flat_map(|slices| slices.first..slices.first + slices.count).collect()
            }
            None => (0..slice.total).collect(),
        };
        all.extend(
            numbers
                .iter()
                .map(|number| (slice.device.clone(), slice.resource.clone(), format!("{}::{number}", slice.device))),
        );
    }
    all
}
