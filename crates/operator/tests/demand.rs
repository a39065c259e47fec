//! Pods wait, GPUs are cut for them: the operator's decisions over a cluster whose nodes do as they
//! are told, or do not.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test, its helpers included")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cleave_api::gpunode::{
    AllocationStatus, GpuNode, GpuNodeSpec, GpuNodeStatus, GpuStatus, Health, MigInstanceSpec, MigInstanceStatus,
    MigProfileStatus, MigStatus, MpsPartition, Partition, SliceStatus, StepStatus,
};
use cleave_api::sharingpolicy::SharingPolicy;
use cleave_operator::pods::PodObject;
use cleave_operator::policies::apply::{Change, changes};
use cleave_operator::policies::demand::{Outcome, Reason, overlay};
use cleave_operator::policies::plan::{Plan, plan};
use cleave_operator::policies::snapshot::Memory;
use cleave_operator::policies::status::{Told, updates};
use cleave_operator::read::{Agent, Node, Observed};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::core::DeserializeGuard;
use kube::core::error_boundary::InvalidObject;

const TEN: &str = "nvidia.com/gpu-10gb";
const TWENTY: &str = "nvidia.com/gpu-20gb";
const WHOLE: &str = "nvidia.com/gpu";
const SMALL: &str = "nvidia.com/mig-1g.5gb";
const HALF: &str = "nvidia.com/mig-3g.20gb";

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
            resource: WHOLE.to_owned(),
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

/// A cluster, and the operator that looks at it.
#[derive(Default)]
struct World {
    observed: Observed,
    memory: Memory,
    pods: BTreeMap<String, PodObject>,
    now: Duration,
    /// What the kubelet has told of pods' devices: pod, node, device, resource, ids.
    held: Vec<(String, String, AllocationStatus)>,
    changes: Vec<Change>,
}

impl World {
    fn new(policy: &str) -> Self {
        Self::default().policy("p", policy)
    }

    fn policy(mut self, name: &str, spec: &str) -> Self {
        let indented: String = spec.lines().map(|line| format!("  {line}\n")).collect();
        let text = format!(
            "apiVersion: cleave.dev/v1alpha1\nkind: SharingPolicy\nmetadata:\n  name: {name}\n  generation: 1\nspec:\n{indented}"
        );
        let policy: SharingPolicy = serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        self.observed.policies.insert(name.to_owned(), Ok(policy));
        self
    }

    fn node(mut self, name: &str, gpus: u32) -> Self {
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
        // The operator has told what the node is before there are pods.
        self.pass();
        self.obey();
        self.changes.clear();
        self
    }

    fn pod(&mut self, name: &str, resource: &str, count: u32) {
        self.pod_with(name, resource, count, "");
    }

    fn pod_with(&mut self, name: &str, resource: &str, count: u32, spec: &str) {
        let text = format!(
            "metadata: {{name: {name}, namespace: team, uid: uid-of-{name}}}\nspec:\n  containers:\n  - resources: {{limits: {{{resource}: {count}}}}}\n{spec}"
        );
        let mut pod: PodObject = serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let age = i64::try_from(self.pods.len()).unwrap();
        pod.metadata.creation_timestamp = Some(Time(Timestamp::from_second(age).unwrap()));
        pod.trim();
        self.pods.insert(format!("team/{name}"), pod);
    }

    fn object(&mut self, node: &str) -> &mut GpuNode {
        match self.observed.nodes.get_mut(node).and_then(|node| node.gpu_node.as_mut()).map(Arc::make_mut) {
            Some(DeserializeGuard(Ok(object))) => object,
            _ => panic!("{node} has no GpuNode"),
        }
    }

    fn status(&mut self, node: &str) -> &mut GpuNodeStatus {
        self.object(node).status.as_mut().unwrap()
    }

    fn partition(&mut self, node: &str, index: usize) -> Partition {
        self.object(node).spec.gpus[index].partition.clone()
    }

    fn mps(&mut self, node: &str, index: usize) -> MpsPartition {
        self.partition(node, index).mps.unwrap_or_else(|| panic!("GPU {index} of {node} is not for MPS"))
    }

    fn mig(&mut self, node: &str, index: usize) -> Vec<MigInstanceSpec> {
        self.partition(node, index).mig.unwrap_or_else(|| panic!("GPU {index} of {node} is not cut by MIG"))
    }

    fn count(&mut self, node: &str, index: usize, resource: &str) -> u32 {
        self.mps(node, index)
            .slices
            .iter()
            .filter(|slices| slices.resource == resource)
            .map(|slices| slices.count)
            .sum()
    }

    /// One pass of the operator: it reads, plans, and writes.
    fn pass(&mut self) -> (Plan, Outcome) {
        let pods: Vec<PodObject> = self.pods.values().cloned().collect();
        self.observed.set_pods(pods.iter());
        let mut observed = self.observed.clone();
        self.memory.recall(&mut observed, self.now);
        let mut plan = plan(&observed);
        let outcome = overlay(&mut plan, &observed, &mut self.memory, self.now);
        assert_eq!(outcome.violations, []);
        self.changes = changes(&plan, &observed);
        for change in self.changes.clone() {
            let object = self.object(&change.node);
            object.spec = change.spec;
            object.metadata.generation = object.metadata.generation.map(|generation| generation + 1);
        }
        (plan, outcome)
    }

    /// Nodes that were written to in the last pass.
    fn written(&self) -> Vec<&str> {
        self.changes.iter().map(|change| change.node.as_str()).collect()
    }

    /// All agents do what they were told.
    fn obey(&mut self) {
        let names: Vec<String> = self.observed.nodes.keys().cloned().collect();
        names.iter().for_each(|name| self.obey_on(name));
    }

    fn obey_on(&mut self, name: &str) {
        let held = self.held.clone();
        let object = self.object(name);
        let (spec, generation) = (object.spec.clone(), object.metadata.generation.unwrap());
        let status = object.status.as_mut().unwrap();
        status.observed_generation = generation;
        status.plan_id.clone_from(&spec.plan_id);
        status.steps.clear();
        for desired in spec.gpus {
            let Some(gpu) = status.gpus.iter_mut().find(|gpu| gpu.uuid == desired.uuid) else { continue };
            serve(gpu, &desired.partition);
            list(gpu, &held);
        }
    }

    /// The scheduler and the kubelet: every pod that fits what is served and free is bound and
    /// listed.
    fn bind(&mut self) {
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
                    let told = status.iter().flat_map(|gpu| &gpu.slices).filter(|told| told.resource == *resource);
                    told.map(|told| told.total - told.in_use).sum::<u32>() >= *count
                })
            }) else {
                continue;
            };
            self.pods.get_mut(&name).unwrap().spec.node_name = Some(node.clone());
            for (resource, count) in wants {
                for _ in 0..count {
                    self.take(&name, &node, &resource);
                }
            }
        }
    }

    /// Gives a pod one free slice of a resource.
    fn take(&mut self, pod: &str, node: &str, resource: &str) {
        let held = self.held.clone();
        let rows = held.iter().filter(|(_, _, row)| row.resource == resource);
        let taken: BTreeSet<String> = rows.flat_map(|(_, _, row)| row.ids.clone()).collect();
        let spec = self.object(node).spec.clone();
        let status = self.status(node);
        let (device, id) = status
            .gpus
            .iter()
            .flat_map(|gpu| ids(gpu, spec.gpus.iter().find(|spec| spec.uuid == gpu.uuid).map(|spec| &spec.partition)))
            .find(|(_, told, id)| told == resource && !taken.contains(id))
            .map(|(device, _, id)| (device, id))
            .unwrap();
        let row = AllocationStatus {
            pod: pod.to_owned(),
            resource: resource.to_owned(),
            device,
            ids: vec![id],
            ..AllocationStatus::default()
        };
        self.held.push((pod.to_owned(), node.to_owned(), row));
        let held = self.held.clone();
        self.status(node).gpus.iter_mut().for_each(|gpu| list(gpu, &held));
    }

    /// A pod ends and gives back what it holds.
    fn end(&mut self, name: &str) {
        let name = format!("team/{name}");
        self.pods.remove(&name);
        self.held.retain(|(pod, ..)| *pod != name);
        let held = self.held.clone();
        for node in self.observed.nodes.keys().cloned().collect::<Vec<_>>() {
            self.status(&node).gpus.iter_mut().for_each(|gpu| list(gpu, &held));
        }
    }

    fn is_bound(&self, name: &str) -> bool {
        self.pods[&format!("team/{name}")].node().is_some()
    }

    /// All parts work until nothing changes any more.
    fn settle(&mut self) {
        for _ in 0..20 {
            self.pass();
            let quiet = self.changes.is_empty();
            self.obey();
            let before = self.held.len();
            self.bind();
            if quiet && self.held.len() == before {
                return;
            }
            self.now += Duration::from_secs(1);
        }
        panic!("it does not settle: {:?}", self.changes);
    }

    fn says(&self, plan: &Plan) -> (String, String, u32) {
        let update = updates(plan, &self.observed, &Told::new(), Timestamp::UNIX_EPOCH).remove(0);
        let ready = update.status.conditions.iter().find(|condition| condition.type_ == "Ready").unwrap().clone();
        (ready.reason, ready.message, update.status.wanted)
    }
}

#[track_caller]
fn waits(outcome: &Outcome, pod: &str, reason: Reason, part: &str) {
    let waiting = outcome.waiting.get(&format!("team/{pod}")).unwrap_or_else(|| panic!("{pod} does not wait"));
    assert_eq!(waiting.reason, reason, "{}", waiting.message);
    assert!(waiting.message.contains(part), "{part:?} is not in {:?}", waiting.message);
}

/// What an agent does with a partition.
fn serve(gpu: &mut GpuStatus, partition: &Partition) {
    let uuid = gpu.uuid.clone();
    let told = |device: &str, resource: &str, start, total| SliceStatus {
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
        gpu.slices.push(told(&uuid, &whole.resource, None, 1));
    }
    for slices in partition.mps.iter().flat_map(|mps| &mps.slices) {
        match gpu.slices.iter_mut().find(|told| told.resource == slices.resource) {
            Some(told) => told.total += slices.count,
            None => gpu.slices.push(told(&uuid, &slices.resource, None, slices.count)),
        }
    }
    if let Some(turns) = &partition.time_slicing {
        gpu.slices.push(told(&uuid, &turns.resource, None, turns.replicas));
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
            gpu.slices.push(told(&device, &whole.resource, Some(instance.start), 1));
        }
        for slices in instance.partition.mps.iter().flat_map(|mps| &mps.slices) {
            gpu.slices.push(told(&device, &slices.resource, Some(instance.start), slices.count));
        }
    }
}

/// Who holds what, as PodResources and so the status tells it. What is held and not there any more
/// is a broken promise.
fn list(gpu: &mut GpuStatus, held: &[(String, String, AllocationStatus)]) {
    let here = |row: &AllocationStatus| row.device == gpu.uuid || row.device.starts_with(&format!("MIG-{}-", gpu.uuid));
    gpu.allocations = held.iter().map(|(_, _, row)| row).filter(|row| here(row)).cloned().collect();
    for told in &mut gpu.slices {
        told.in_use = 0;
    }
    for row in &gpu.allocations {
        let told = gpu.slices.iter_mut().find(|told| told.device == row.device && told.resource == row.resource);
        let told =
            told.unwrap_or_else(|| panic!("{} holds {} of {}, which is gone", row.pod, row.resource, row.device));
        told.in_use += u32::try_from(row.ids.len()).unwrap();
        assert!(told.in_use <= told.total, "{} holds more than there is", row.pod);
    }
}

/// Device ids: device, resource, id.
fn ids(gpu: &GpuStatus, partition: Option<&Partition>) -> Vec<(String, String, String)> {
    let mut all = Vec::new();
    for told in &gpu.slices {
        let mps = partition.and_then(|partition| partition.mps.as_ref()).filter(|_| told.device == gpu.uuid);
        let numbers: Vec<u32> = match mps {
            Some(mps) => {
                let of = mps.slices.iter().filter(|slices| slices.resource == told.resource);
                of.flat_map(|slices| slices.first..slices.first + slices.count).collect()
            }
            None => (0..told.total).collect(),
        };
        all.extend(
            numbers
                .iter()
                .map(|number| (told.device.clone(), told.resource.clone(), format!("{}::{number}", told.device))),
        );
    }
    all
}

#[test]
fn mig_pods_of_mixed_profiles_are_served_by_cutting() {
    let mut world = World::new("mode: Mig").node("n1", 1);
    world.pod("small", SMALL, 1);
    world.pod("half", HALF, 1);
    let (plan, outcome) = world.pass();
    assert_eq!(world.written(), ["n1"]);
    waits(&outcome, "small", Reason::Cutting, "repartitioned, gives 1 nvidia.com/mig-1g.5gb");
    let (_, _, wanted) = world.says(&plan);
    assert_eq!(wanted, 2);
    let profiles: BTreeSet<String> = world.mig("n1", 0).into_iter().map(|instance| instance.profile).collect();
    assert_eq!(profiles, BTreeSet::from(["1g.5gb".to_owned(), "3g.20gb".to_owned()]));
    world.settle();
    assert!(world.is_bound("small") && world.is_bound("half"));
    // A further one leaves those in use where they are: `list` fails where something held is gone.
    let before = world.mig("n1", 0);
    world.pod("another", SMALL, 1);
    world.settle();
    assert!(world.is_bound("another"));
    let after = world.mig("n1", 0);
    assert!(before.iter().all(|instance| after.contains(instance)), "{before:?}\n{after:?}");
}

#[test]
fn sized_slices_are_cut_and_merged_and_a_gpu_comes_back_whole() {
    let mut world = World::new("mode: Auto").node("n1", 1);
    for pod in ["a", "b", "c", "d"] {
        world.pod(pod, TEN, 1);
    }
    world.settle();
    assert_eq!(world.count("n1", 0, TEN), 4);
    world.pod("large", TWENTY, 1);
    world.settle();
    assert!(!world.is_bound("large"), "all is in use");
    world.end("b");
    world.end("d");
    world.settle();
    assert!(world.is_bound("large"));
    assert_eq!((world.count("n1", 0, TEN), world.count("n1", 0, TWENTY)), (2, 1));
    for pod in ["a", "c", "large"] {
        world.end(pod);
    }
    world.settle();
    assert_eq!(world.count("n1", 0, TEN), 2, "what is free stays until its room is needed");
    world.pod("mig", SMALL, 1);
    world.settle();
    assert!(world.is_bound("mig"), "an idle GPU for MPS becomes one for MIG");
    world.end("mig");
    world.pod("whole", WHOLE, 1);
    world.settle();
    assert!(world.is_bound("whole"), "and comes back whole");
    assert!(world.partition("n1", 0).whole.is_some());
}

#[test]
fn what_is_free_already_is_not_cut_again_and_nothing_is_written() {
    let mut world = World::new("mode: Auto\ngpus:\n  indices: [1]")
        .policy("fixed", "gpus:\n  indices: [0]\nmode: Mps\nmps:\n  units: 4")
        .node("n1", 3);
    world.pod("shares", "nvidia.com/gpu-mps", 2);
    world.pod("whole", WHOLE, 1);
    let (_, outcome) = world.pass();
    assert_eq!(world.written(), [] as [&str; 0]);
    waits(&outcome, "shares", Reason::Scheduler, "GPU 0 has 2 nvidia.com/gpu-mps free");
    waits(&outcome, "whole", Reason::Scheduler, "which is free");
}

#[test]
fn only_the_node_that_changes_is_written_and_the_id_is_of_the_content() {
    let mut world = World::new("mode: Auto").node("n1", 2).node("n2", 2).node("n3", 2);
    let before = world.object("n1").spec.plan_id.clone();
    world.pod("one", TEN, 1);
    world.pass();
    assert_eq!(world.changes.len(), 1);
    let node = world.changes[0].node.clone();
    assert_ne!(world.object(&node).spec.plan_id, "");
    world.obey();
    world.bind();
    world.end("one");
    world.pod("whole", WHOLE, 2);
    world.pod("whole2", WHOLE, 2);
    world.pod("whole3", WHOLE, 2);
    world.settle();
    assert_eq!(world.object("n1").spec.plan_id.len(), before.len());
    assert!(world.is_bound("whole3"), "the cut GPU was idle");
}

#[test]
fn nothing_of_a_node_is_cut_while_it_changes_and_its_pods_keep_their_place() {
    let mut world = World::new("mode: Auto").node("n1", 2);
    world.pod("first", TEN, 1);
    world.pass();
    let told = world.object("n1").spec.clone();
    // The node has not read it: a pod that could be served by another GPU of it waits, and what was
    // begun is not begun again.
    world.pod("second", SMALL, 1);
    world.now += Duration::from_secs(1);
    let (_, outcome) = world.pass();
    assert_eq!(world.written(), [] as [&str; 0]);
    assert_eq!(world.object("n1").spec, told);
    waits(&outcome, "first", Reason::Cutting, "has 1 nvidia.com/gpu-10gb free");
    waits(&outcome, "second", Reason::NodeChanging, "");
    // It has read it, and is at it.
    let generation = world.object("n1").metadata.generation.unwrap();
    world.status("n1").observed_generation = generation;
    world.pass();
    assert_eq!(world.written(), [] as [&str; 0]);
    world.obey();
    let (_, outcome) = world.pass();
    assert_eq!(world.written(), ["n1"]);
    waits(&outcome, "second", Reason::Cutting, "");
    world.settle();
    assert!(world.is_bound("first") && world.is_bound("second"));
}

#[test]
fn what_was_written_counts_before_the_watch_brings_it_back() {
    let mut world = World::new("mode: Auto").node("n1", 1);
    world.pod("first", TEN, 1);
    let old = world.object("n1").clone();
    world.pass();
    let change = world.changes[0].clone();
    *world.object("n1") = old;
    world.memory.wrote("n1", Some(2), &change.spec, world.now);
    world.pod("second", SMALL, 1);
    world.pass();
    assert_eq!(world.written(), [] as [&str; 0], "the node does the first");
    world.now += Duration::from_secs(11);
    world.pass();
    assert_eq!(world.written(), ["n1"], "somebody has put it back");
}

#[test]
fn a_silent_node_delays_nobody_and_comes_back_when_it_answers() {
    let mut world = World::new("mode: Auto").node("n1", 1).node("n2", 1);
    world.pod("one", TEN, 1);
    let (_, _) = world.pass();
    let silent = world.written()[0].to_owned();
    let other = if silent == "n1" { "n2" } else { "n1" };
    let (_, outcome) = world.pass();
    assert!(outcome.next.is_some_and(|next| next <= Duration::from_secs(30)), "it looks again at the deadline");
    world.now += Duration::from_secs(29);
    world.pass();
    assert_eq!(world.written(), [] as [&str; 0]);
    world.now += Duration::from_secs(1);
    let (plan, outcome) = world.pass();
    assert_eq!(world.written(), [other], "the pod goes elsewhere");
    assert!(outcome.silent[&silent].contains("has not read what was written to it within 30 s"));
    let (reason, message, _) = world.says(&plan);
    assert_eq!(reason, "LeftOut");
    assert!(message.contains(&format!("{silent} is left out of plans: its agent has not read")), "{message}");
    world.obey_on(other);
    // It answers: it takes part again, with what it has cut meanwhile.
    world.obey();
    let (_, outcome) = world.pass();
    assert!(outcome.silent.is_empty());
    world.settle();
    assert!(world.is_bound("one"));
}

#[test]
fn a_node_whose_agent_is_not_ready_is_left_out_at_once() {
    let mut world = World::new("mode: Auto").node("n1", 1).node("n2", 1);
    world.observed.nodes.get_mut("n1").unwrap().agent = Some(Agent { ready: false });
    world.pod("one", TEN, 1);
    world.pod("two", "nvidia.com/mig-7g.40gb", 1);
    let (_, outcome) = world.pass();
    assert_eq!(world.written(), ["n2"]);
    assert_eq!(outcome.silent["n1"], "its agent is not ready");
    assert_eq!(outcome.waiting.values().filter(|waiting| waiting.reason == Reason::Cutting).count(), 1);
    world.observed.nodes.get_mut("n1").unwrap().agent = Some(Agent { ready: true });
    world.settle();
    assert!(world.is_bound("one") && world.is_bound("two"));
}

#[test]
fn a_cut_that_fails_is_undone_left_alone_for_a_while_and_tried_again() {
    let mut world = World::new("mode: Auto").node("n1", 1);
    world.pod("mig", SMALL, 1);
    world.pass();
    let fail = |world: &mut World| {
        let generation = world.object("n1").metadata.generation.unwrap();
        let status = world.status("n1");
        status.observed_generation = generation;
        let uuid = status.gpus[0].uuid.clone();
        let step = |result: &str, message: &str| StepStatus {
            gpu: uuid.clone(),
            action: "create 1g.5gb at 0".into(),
            result: result.into(),
            message: message.into(),
        };
        status.steps = vec![step("Done", ""), step("Failed", "NVML: Insufficient Resources")];
    };
    fail(&mut world);
    let (plan, outcome) = world.pass();
    assert!(world.partition("n1", 0).whole.is_some(), "it shall be what it is");
    assert!(outcome.stuck.values().any(|why| why.contains("Insufficient Resources")), "{:?}", outcome.stuck);
    waits(&outcome, "mig", Reason::NoRoom, "");
    assert!(world.says(&plan).1.contains("GPU 0 of n1 is left out of plans: it could not be cut: NVML"));
    world.obey();
    world.now += Duration::from_secs(4);
    world.pass();
    assert_eq!(world.written(), [] as [&str; 0], "not for ever, and not at once");
    // A pod that it can serve as it is has it meanwhile.
    world.pod("whole", WHOLE, 1);
    let (_, outcome) = world.pass();
    waits(&outcome, "whole", Reason::Scheduler, "which is free");
    world.end("whole");
    world.now += Duration::from_secs(1);
    world.pass();
    assert_eq!(world.written(), ["n1"], "again");
    fail(&mut world);
    world.pass();
    world.obey();
    world.now += Duration::from_secs(9);
    world.pass();
    assert_eq!(world.written(), [] as [&str; 0], "twice as long");
    world.now += Duration::from_secs(1);
    world.settle();
    assert!(world.is_bound("mig"));
}

#[test]
fn a_gpu_that_does_not_get_there_in_time_is_put_back_and_the_pod_goes_elsewhere() {
    let mut world = World::new("mode: Auto").node("n1", 1).node("n2", 1);
    world.pod("mig", SMALL, 1);
    world.pass();
    let slow = world.written()[0].to_owned();
    let generation = world.object(&slow).metadata.generation.unwrap();
    let status = world.status(&slow);
    status.observed_generation = generation;
    status.steps = vec![StepStatus {
        gpu: status.gpus[0].uuid.clone(),
        action: "turn MIG mode on".into(),
        result: "Waiting".into(),
        message: "MIG mode changes with the next reset of this GPU".into(),
    }];
    world.pass();
    world.now += Duration::from_secs(30);
    let (_, outcome) = world.pass();
    assert_eq!(world.written().len(), 2, "the one is told to be what it is, the other to be cut");
    assert!(outcome.stuck.values().any(|why| why.contains("within 30 s: MIG mode changes with the next reset")));
    assert!(world.partition(&slow, 0).whole.is_some());
}

#[test]
fn a_gpu_of_another_policy_that_is_late_holds_the_node_up_once() {
    let mut world = World::new("mode: Auto\ngpus:\n  indices: [1]").node("n1", 2);
    world = world.policy("fixed", "gpus:\n  indices: [0]\nmode: Mig\nmig:\n  layout: [3g.20gb]");
    world.pass();
    let generation = world.object("n1").metadata.generation.unwrap();
    let status = world.status("n1");
    status.observed_generation = generation;
    status.steps = vec![StepStatus {
        gpu: status.gpus[0].uuid.clone(),
        result: "Waiting".into(),
        message: "MIG mode changes with the next reset of this GPU".into(),
        ..StepStatus::default()
    }];
    world.pod("one", TEN, 1);
    world.pass();
    assert_eq!(world.written(), [] as [&str; 0], "the node is at it");
    world.now += Duration::from_secs(30);
    world.pass();
    assert_eq!(world.written(), ["n1"]);
    let generation = world.object("n1").metadata.generation.unwrap();
    world.status("n1").observed_generation = generation;
    let partition = world.partition("n1", 1);
    serve(&mut world.status("n1").gpus[1], &partition);
    world.pod("two", SMALL, 1);
    world.now += Duration::from_secs(1);
    let (_, outcome) = world.pass();
    assert!(outcome.changing.is_empty(), "it is late, and nobody waits for it again");
}

#[test]
fn a_bound_pod_uses_its_slice_before_the_kubelet_lists_it() {
    let mut world = World::new("mode: Auto").node("n1", 1);
    world.pod("one", TEN, 1);
    world.pass();
    world.obey();
    // The scheduler has bound it; PodResources does not show it yet.
    world.pods.get_mut("team/one").unwrap().spec.node_name = Some("n1".to_owned());
    world.pod("whole", WHOLE, 1);
    world.pod("mig", SMALL, 1);
    let (_, outcome) = world.pass();
    assert_eq!(world.written(), [] as [&str; 0], "its slice would have gone");
    waits(&outcome, "whole", Reason::NoRoom, "");
    // And nobody else is given that slice.
    world.pod("two", TEN, 1);
    let (_, outcome) = world.pass();
    assert_ne!(outcome.waiting["team/two"].reason, Reason::Scheduler);
    // Once it is listed, the rest can be cut around it.
    world.take("team/one", "n1", TEN);
    world.settle();
    assert!(world.is_bound("two") && !world.is_bound("whole") && !world.is_bound("mig"));
}

#[test]
fn a_bound_pod_uses_a_whole_gpu_before_the_kubelet_lists_it() {
    let mut world = World::new("mode: Auto").node("n1", 2);
    world.pod("whole", WHOLE, 1);
    world.pass();
    world.pods.get_mut("team/whole").unwrap().spec.node_name = Some("n1".to_owned());
    world.pod("one", TEN, 1);
    world.pod("whole2", WHOLE, 1);
    let (_, outcome) = world.pass();
    assert_eq!(world.written(), [] as [&str; 0], "which of the two it is nobody knows");
    waits(&outcome, "whole2", Reason::Scheduler, "which is free");
    world.take("team/whole", "n1", WHOLE);
    world.end("whole2");
    world.settle();
    assert!(world.is_bound("one"));
    assert!(world.partition("n1", 0).whole.is_some());
}

#[test]
fn a_plan_overtaken_by_a_pod_is_made_anew_around_it() {
    let mut world = World::new("mode: Auto").node("n1", 1);
    world.pod("one", TEN, 1);
    world.settle();
    world.end("one");
    world.pod("mig", SMALL, 1);
    world.pass();
    // Before the node reads it, a pod has taken the slice that was free.
    world.pod("late", TEN, 1);
    world.pods.get_mut("team/late").unwrap().spec.node_name = Some("n1".to_owned());
    let partition = world.partition("n1", 0);
    assert!(partition.mig.is_some());
    world.held.push((
        "team/late".into(),
        "n1".into(),
        AllocationStatus {
            pod: "team/late".into(),
            resource: TEN.into(),
            device: "GPU-n1-0".into(),
            ids: vec!["GPU-n1-0::0".into()],
            ..AllocationStatus::default()
        },
    ));
    let held = world.held.clone();
    let generation = world.object("n1").metadata.generation.unwrap();
    let status = world.status("n1");
    status.gpus.iter_mut().for_each(|gpu| list(gpu, &held));
    status.observed_generation = generation;
    status.steps = vec![StepStatus {
        gpu: "GPU-n1-0".into(),
        result: "Waiting".into(),
        message: "in use by team/late".into(),
        ..StepStatus::default()
    }];
    let (_, outcome) = world.pass();
    assert_eq!(world.count("n1", 0, TEN), 1, "it shall be what its pods hold");
    waits(&outcome, "mig", Reason::NoRoom, "in use");
    world.settle();
    world.end("late");
    world.settle();
    assert!(world.is_bound("mig"));
}

#[test]
fn shares_inside_mig_instances_are_cut() {
    let mut world =
        World::new("mode: Mig\nmig:\n  sharing:\n    mps:\n      units: 4\n      threads: Strict").node("n1", 1);
    let shared = "nvidia.com/mig-3g.20gb.shared";
    world.pod("three", shared, 3);
    world.pod("one", shared, 1);
    world.pod("more", shared, 2);
    world.settle();
    assert!(world.is_bound("three") && world.is_bound("one") && world.is_bound("more"));
    let instances = world.mig("n1", 0);
    assert_eq!(instances.len(), 2);
    let mps = instances[0].partition.mps.as_ref().unwrap();
    assert_eq!((mps.slices[0].count, &mps.slices[0].threads[..]), (4, &[25, 50, 75, 100][..]));
}

#[test]
fn shares_and_replicas_are_as_many_as_the_policy_says() {
    let policy = "mode: Auto\nmps:\n  units: 10\n  threads: Strict\ntimeSlicing:\n  replicas: 3";
    let mut world = World::new(policy).node("n1", 2);
    world.pod("shares", "nvidia.com/gpu-mps", 4);
    world.pod("turn", "nvidia.com/gpu-timeslice", 1);
    world.settle();
    assert!(world.is_bound("shares") && world.is_bound("turn"));
    let partitions = [world.partition("n1", 0), world.partition("n1", 1)];
    let mps = partitions.iter().find_map(|partition| partition.mps.as_ref()).unwrap();
    assert_eq!(mps.slices[0].threads, [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]);
    assert_eq!(mps.slices[0].memory_mib.last(), Some(&(40_960 - 128)));
    let turns = partitions.iter().find_map(|partition| partition.time_slicing.as_ref()).unwrap();
    assert_eq!(turns.replicas, 3);
}

#[test]
fn where_a_pod_cannot_run_nothing_is_cut_for_it() {
    let mut world = World::new("mode: Auto").node("n1", 1).node("n2", 1);
    let labels = BTreeMap::from([("zone".to_owned(), "b".to_owned())]);
    world.observed.nodes.get_mut("n2").unwrap().labels = labels;
    let cpu = BTreeMap::from([("cpu".to_owned(), cleave_plan::Quantity::new("4"))]);
    world.observed.nodes.get_mut("n1").unwrap().allocatable = cpu;
    world.pod_with("zoned", TEN, 1, "  nodeSelector: {zone: b}\n");
    world.pass();
    assert_eq!(world.written(), ["n2"]);
    world.settle();
    world.pod_with("busy", "cpu", 3, "  nodeName: n1\n");
    world.pod_with("hungry", TWENTY, 1, "  - resources: {requests: {cpu: 2}}\n  nodeSelector: {zone: a}\n");
    let a = BTreeMap::from([("zone".to_owned(), "a".to_owned())]);
    world.observed.nodes.get_mut("n1").unwrap().labels = a;
    let (_, outcome) = world.pass();
    waits(&outcome, "hungry", Reason::NoRoom, "not enough cpu: 2 requested, 1 free");
    world.end("busy");
    let (_, outcome) = world.pass();
    waits(&outcome, "hungry", Reason::Cutting, "n1");
}

#[test]
fn a_malformed_pod_or_node_costs_only_itself() {
    let mut world = World::new("mode: Auto").node("n1", 1).node("n2", 1);
    let error = "no field".to_owned();
    world.observed.nodes.get_mut("n2").unwrap().gpu_node =
        Some(Arc::new(DeserializeGuard(Err(InvalidObject { error, metadata: ObjectMeta::default() }))));
    world.pod("odd", TEN, 1);
    world.pods.get_mut("team/odd").unwrap().spec.requests =
        BTreeMap::from([(TEN.to_owned(), cleave_plan::Quantity::new("one"))]);
    world.pod("fine", TEN, 1);
    let (_, outcome) = world.pass();
    waits(&outcome, "odd", Reason::Malformed, "one, is not a quantity");
    waits(&outcome, "odd", Reason::Malformed, "It cannot be planned");
    waits(&outcome, "fine", Reason::Cutting, "n1");
    assert_eq!(world.written(), ["n1"]);
}

#[test]
fn an_unhealthy_gpu_is_not_cut() {
    let mut world = World::new("mode: Auto").node("n1", 2);
    world.status("n1").gpus[0].health =
        Health { healthy: false, reason: "XidError".into(), message: "XID 79".into(), ..Health::default() };
    world.pod("one", TEN, 1);
    world.pod("all", "nvidia.com/mig-7g.40gb", 1);
    let (_, outcome) = world.pass();
    assert_eq!(outcome.waiting.values().filter(|waiting| waiting.reason == Reason::Cutting).count(), 1);
    assert!(world.partition("n1", 0).whole.is_some());
    assert!(outcome.stuck.values().any(|why| why.contains("XID 79")));
}

#[test]
fn a_cordoned_gpu_is_not_cut_and_another_is() {
    let mut world = World::new("mode: Auto").node("n1", 2);
    let uuid = world.status("n1").gpus[0].uuid.clone();
    let object = world.observed.nodes.get_mut("n1").unwrap().gpu_node.as_mut().map(Arc::make_mut);
    let Some(DeserializeGuard(Ok(object))) = object else { panic!() };
    object.metadata.annotations = Some(BTreeMap::from([("cleave.dev/cordon".to_owned(), format!("{uuid}=new fan"))]));
    world.pod("one", TEN, 1);
    world.pod("all", "nvidia.com/mig-7g.40gb", 1);
    let (_, outcome) = world.pass();
    assert_eq!(outcome.waiting.values().filter(|waiting| waiting.reason == Reason::Cutting).count(), 1);
    assert!(world.partition("n1", 0).whole.is_some());
    assert!(outcome.stuck.values().any(|why| why == "it is cordoned: new fan"));
}

#[test]
fn a_daemon_that_starts_for_a_change_is_no_reason_to_cut_another_gpu() {
    let mut world = World::new("mode: Auto").node("n1", 1).node("n2", 1);
    world.pod("one", TEN, 1);
    world.pass();
    let node = world.written()[0].to_owned();
    let generation = world.object(&node).metadata.generation.unwrap();
    let status = world.status(&node);
    status.observed_generation = generation;
    status.gpus[0].health =
        Health { healthy: false, reason: "MpsUnavailable".into(), message: "stopping".into(), ..Health::default() };
    let (_, outcome) = world.pass();
    assert_eq!(world.written(), [] as [&str; 0]);
    waits(&outcome, "one", Reason::Cutting, "");
}

#[test]
fn an_edited_policy_tells_idle_gpus_and_leaves_those_in_use() {
    let mut world = World::new("mode: Auto\nmps:\n  threads: Strict").node("n1", 2);
    world.pod("one", TWENTY, 1);
    world.settle();
    let at = (0..2).find(|&index| world.partition("n1", index).mps.is_some()).unwrap();
    world = world.policy("p", "mode: Auto\nmps:\n  threads: Uncapped");
    world.settle();
    assert_eq!(world.mps("n1", at).slices[0].threads, [50, 100], "a pod holds it");
    world.end("one");
    world.settle();
    assert!(world.mps("n1", at).slices[0].threads.is_empty());
}

#[test]
fn a_gpu_that_is_lost_keeps_its_spec() {
    let mut world = World::new("mode: Auto").node("n1", 1);
    world.pod("one", TEN, 1);
    world.settle();
    let before = world.object("n1").spec.clone();
    let gpu = &mut world.status("n1").gpus[0];
    gpu.health =
        Health { healthy: false, reason: "GpuLost".into(), message: "it fell off the bus".into(), ..Health::default() };
    gpu.slices.clear();
    gpu.allocations.clear();
    for _ in 0..3 {
        world.pass();
        assert_eq!(world.object("n1").spec, before, "what it shows now is not what its pods hold");
        world.now += Duration::from_secs(31);
    }
}

#[test]
fn what_another_policy_is_about_to_give_counts() {
    let mut world = World::new("mode: Auto\ngpus:\n  indices: [1]\nmps:\n  units: 4").node("n1", 2);
    // Both in one `kubectl apply`: the first policy's GPU is not told yet.
    world = world.policy("fixed", "gpus:\n  indices: [0]\nmode: Mps\nmps:\n  units: 4");
    world.pod("shares", "nvidia.com/gpu-mps", 2);
    let (_, outcome) = world.pass();
    waits(&outcome, "shares", Reason::Scheduler, "GPU 0 has 2 nvidia.com/gpu-mps free");
    assert!(world.partition("n1", 1).whole.is_some());
    world.settle();
    assert!(world.is_bound("shares") && world.partition("n1", 1).whole.is_some());
}

#[test]
fn shares_of_an_instance_in_use_stay_when_the_policy_is_edited() {
    let sharing =
        |units: u32| format!("mode: Mig\nmig:\n  sharing:\n    mps:\n      units: {units}\n      threads: Strict");
    let mut world = World::new(&sharing(4)).node("n1", 1);
    let shared = "nvidia.com/mig-3g.20gb.shared";
    world.pod("two", shared, 2);
    world.settle();
    world = world.policy("p", &sharing(2));
    world.settle();
    let held = world.mig("n1", 0).remove(0);
    assert_eq!(held.partition.mps.unwrap().slices[0].count, 4, "a pod holds two of it");
    world.end("two");
    world.pod("next", shared, 1);
    world.settle();
    assert!(world.is_bound("next"));
}

#[test]
fn a_node_that_is_full_of_pods_is_not_cut() {
    let mut world = World::new("mode: Auto").node("n1", 1);
    let full = BTreeMap::from([("pods".to_owned(), cleave_plan::Quantity::whole(1))]);
    world.observed.nodes.get_mut("n1").unwrap().allocatable = full;
    world.pod_with("other", "cpu", 1, "  nodeName: n1\n");
    world.pod("one", TEN, 1);
    let (_, outcome) = world.pass();
    waits(&outcome, "one", Reason::NoRoom, "not enough pods");
    world.end("other");
    let (_, outcome) = world.pass();
    waits(&outcome, "one", Reason::Cutting, "n1");
}
