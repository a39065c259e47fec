//! Tests all steps from policies and nodes to desired nodes and policy statuses, without a cluster.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test, its helpers included")]

use std::collections::BTreeMap;
use std::sync::Arc;

use cleave_api::gpunode::{
    AllocationStatus, GpuNode, GpuNodeSpec, GpuNodeStatus, GpuStatus, Health, MigProfileStatus, MigStatus, MpsStatus,
    SliceStatus, StepStatus,
};
use cleave_api::sharingpolicy::{Enforcement, SharingPolicy, SharingPolicyStatus};
use cleave_operator::policies::apply::{self, changes};
use cleave_operator::policies::plan::{Plan, plan};
use cleave_operator::policies::status::{WrittenStatus, WrittenStatuses, condition_event, updates};
use cleave_operator::read::{Agent, Node, Observed};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta};
use kube::core::DeserializeGuard;
use kube::core::error_boundary::InvalidObject;

fn uuid(node: &str, index: u32) -> String {
    let digit = node.len() % 10;
    format!("GPU-0000000{digit}-0000-0000-0000-00000000000{index}")
}

fn gpu(node: &str, index: u32, model: &str, memory_mib: u64) -> GpuStatus {
    GpuStatus {
        uuid: uuid(node, index),
        index,
        model: model.to_owned(),
        memory_mib,
        mode: "Whole".to_owned(),
        slices: vec![SliceStatus {
            device: uuid(node, index),
            resource: "nvidia.com/gpu".to_owned(),
            total: 1,
            ..SliceStatus::default()
        }],
        health: Health { healthy: true, ..Health::default() },
        ..GpuStatus::default()
    }
}

/// The simulated cluster of a test.
#[derive(Default)]
struct TestCluster {
    observed: Observed,
    written: WrittenStatuses,
}

impl TestCluster {
    fn node(mut self, name: &str, labels: &[(&str, &str)], gpus: Vec<GpuStatus>) -> Self {
        let object = GpuNode {
            metadata: ObjectMeta { name: Some(name.to_owned()), generation: Some(1), ..ObjectMeta::default() },
            spec: GpuNodeSpec::default(),
            status: Some(GpuNodeStatus {
                observed_generation: 1,
                agent_version: "0.1.0".to_owned(),
                gpus,
                ..GpuNodeStatus::default()
            }),
        };
        let node = Node {
            uid: format!("uid-of-{name}"),
            labels: labels.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect(),
            agent: Some(Agent { ready: true }),
            gpu_node: Some(Arc::new(DeserializeGuard(Ok(object)))),
            ..Node::default()
        };
        self.observed.nodes.insert(name.to_owned(), node);
        self
    }

    /// Adds a node with four GPUs of 80 GB.
    fn node_with_four_gpus(self, name: &str) -> Self {
        let gpus = (0..4).map(|index| gpu(name, index, "NVIDIA H100 80GB HBM3", 81_559)).collect();
        self.node(name, &[], gpus)
    }

    fn policy(mut self, name: &str, spec: &str) -> Self {
        self.set_policy(name, spec);
        self
    }

    fn set_policy(&mut self, name: &str, spec: &str) {
        let age = self.observed.policies.len();
        let indented: String = spec.lines().map(|line| format!("  {line}\n")).collect();
        let text = format!(
            "apiVersion: cleave.dev/v1alpha1\nkind: SharingPolicy\nmetadata:\n  name: {name}\n  generation: 1\n  \
             resourceVersion: \"{age}\"\n  creationTimestamp: \"2026-01-01T00:00:{age:02}Z\"\nspec:\n{indented}"
        );
        let policy: SharingPolicy = serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        self.observed.policies.insert(name.to_owned(), Ok(policy));
    }

    fn malformed_policy(mut self, name: &str) -> Self {
        let metadata = ObjectMeta { name: Some(name.to_owned()), generation: Some(2), ..ObjectMeta::default() };
        let error = "unknown variant `Sliced`".to_owned();
        self.observed.policies.insert(name.to_owned(), Err(InvalidObject { error, metadata }));
        self
    }

    fn object(&mut self, node: &str) -> &mut GpuNode {
        match self.observed.nodes.get_mut(node).and_then(|node| node.gpu_node.as_mut()).map(Arc::make_mut) {
            Some(DeserializeGuard(Ok(object))) => object,
            _ => panic!("{node} has no GpuNode"),
        }
    }

    fn gpu(&mut self, node: &str, index: usize) -> &mut GpuStatus {
        &mut self.object(node).status.as_mut().unwrap().gpus[index]
    }

    fn plan(&self) -> Plan {
        plan(&self.observed)
    }

    /// Writes the plan as the operator does.
    fn write_plan(&mut self) -> Plan {
        let plan = self.plan();
        for change in changes(&plan, &self.observed) {
            let object = self.object(&change.node);
            object.spec = change.spec;
            object.metadata.generation = object.metadata.generation.map(|generation| generation + 1);
        }
        plan
    }

    /// Applies all specs as agents do.
    fn apply_all_specs(&mut self) {
        let names: Vec<String> = self.observed.nodes.keys().cloned().collect();
        for name in names {
            let object = self.object(&name);
            let (spec, generation) = (object.spec.clone(), object.metadata.generation);
            let status = object.status.as_mut().unwrap();
            status.observed_generation = generation.unwrap();
            status.plan_id = spec.plan_id;
            status.steps.clear();
            for desired in spec.gpus {
                let Some(gpu) = status.gpus.iter_mut().find(|gpu| gpu.uuid == desired.uuid) else { continue };
                if let Some(mps) = desired.partition.mps {
                    gpu.mode = "Mps".to_owned();
                    let slices = mps.slices.iter().map(|slices| SliceStatus {
                        device: gpu.uuid.clone(),
                        resource: slices.resource.clone(),
                        total: slices.count,
                        ..SliceStatus::default()
                    });
                    gpu.slices = slices.collect();
                }
            }
        }
    }

    /// Writes all statuses as the operator does, and returns them.
    fn write_statuses(&mut self) -> BTreeMap<String, SharingPolicyStatus> {
        let plan = self.plan();
        for update in updates(&plan, &self.observed, &self.written, at(0)) {
            if let Some(Ok(policy)) = self.observed.policies.get_mut(&update.policy) {
                policy.status = Some(update.status);
            }
        }
        let policies = self.observed.policies.iter();
        policies.filter_map(|(name, policy)| Some((name.clone(), policy.as_ref().ok()?.status.clone()?))).collect()
    }

    fn condition(&mut self, policy: &str, type_: &str) -> Condition {
        let statuses = self.write_statuses();
        let status = statuses.get(policy).unwrap_or_else(|| panic!("{policy} has no status"));
        status.conditions.iter().find(|condition| condition.type_ == type_).unwrap().clone()
    }

    /// Asserts the status, the reason and a part of the message of a policy's condition.
    #[track_caller]
    fn assert_condition(&mut self, policy: &str, type_: &str, status: &str, reason: &str, part: &str) {
        let condition = self.condition(policy, type_);
        assert_eq!((condition.status.as_str(), condition.reason.as_str()), (status, reason), "{}", condition.message);
        assert!(condition.message.contains(part), "{part:?} is not in {:?}", condition.message);
    }
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

const TEN_SHARES_YAML: &str = "mode: Mps\nmps:\n  units: 10\n  threads: Strict";

#[test]
fn each_gpu_gets_ten_shares_with_limits_for_each_number_of_shares() {
    let world = TestCluster::default().node_with_four_gpus("n1").policy("ten", TEN_SHARES_YAML);
    let plan = world.plan();
    let spec = &plan.nodes["n1"];
    assert_eq!(spec.gpus.len(), 4);
    assert_eq!(spec.plan_id.len(), 16);
    let first = &spec.gpus[0];
    assert_eq!((first.uuid.as_str(), first.policy.as_deref()), (uuid("n1", 0).as_str(), Some("ten")));
    let mps = first.partition.mps.as_ref().unwrap();
    assert!(mps.multi_user);
    let slices = &mps.slices[0];
    assert_eq!((slices.resource.as_str(), slices.count, slices.first), ("nvidia.com/gpu-mps", 10, 0));
    assert_eq!(slices.threads, [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]);
    let whole = 81_559 - 128;
    assert_eq!(slices.memory_mib.len(), 10);
    assert_eq!((slices.memory_mib[0], slices.memory_mib[4], slices.memory_mib[9]), (whole / 10, whole / 2, whole));
}

#[test]
fn the_size_of_a_share_determines_the_number_of_shares() {
    let world = TestCluster::default()
        .node_with_four_gpus("n1")
        .policy("by-memory", "mode: Mps\nmps:\n  unitMemory: 10Gi\n  threads: Uncapped");
    let plan = world.plan();
    let slices = &plan.nodes["n1"].gpus[0].partition.mps.as_ref().unwrap().slices[0];
    assert_eq!((slices.count, slices.memory_mib[0], slices.memory_mib[6]), (7, 10_240, 71_680));
    assert!(slices.threads.is_empty());
    // The number of shares is limited to the maximum of MPS.
    let world = TestCluster::default()
        .node_with_four_gpus("n1")
        .policy("tiny", "mode: Mps\nmps:\n  unitMemory: 1Mi\n  memory: Unlimited");
    let plan = world.plan();
    let slices = &plan.nodes["n1"].gpus[0].partition.mps.as_ref().unwrap().slices[0];
    assert_eq!((slices.count, slices.memory_mib.len()), (48, 0));
}

#[test]
fn each_process_gets_a_part_of_the_memory_if_clients_are_split() {
    let spec = "mode: Mps\nmps:\n  unitMemory: 10Gi\n  clients:\n    max: 4\n    split: true";
    let plan = TestCluster::default().node_with_four_gpus("n1").policy("split", spec).plan();
    let slices = &plan.nodes["n1"].gpus[0].partition.mps.as_ref().unwrap().slices[0];
    assert_eq!((slices.max_clients, slices.memory_mib[0], slices.memory_mib[1]), (Some(4), 2560, 5120));
}

#[test]
fn advisory_enforcement_is_written_only_if_the_policy_sets_it() {
    let partition = |field: &str| {
        let spec = format!("mode: Mps\nmps:\n  units: 10{field}");
        let plan = TestCluster::default().node_with_four_gpus("n1").policy("split", &spec).plan();
        serde_json::to_value(&plan.nodes["n1"].gpus[0].partition.mps).unwrap()
    };
    assert_eq!(partition("\n  enforcement: Advisory")["enforcement"], "Advisory");
    // The default value leaves the plans of earlier operators unchanged.
    for default in ["", "\n  enforcement: Hard"] {
        assert_eq!(partition(default).get("enforcement"), None);
    }
}

#[test]
fn gpus_have_separate_modes_and_gpus_without_a_policy_are_whole() {
    let world = TestCluster::default()
        .node_with_four_gpus("n1")
        .policy("mps", &format!("gpus:\n  indices: [0]\n{TEN_SHARES_YAML}"))
        .policy("time-sliced", "gpus:\n  indices: [1]\nmode: TimeSlicing\ntimeSlicing:\n  replicas: 4\nresourceName: nvidia.com/gpu.shared")
        .policy("whole", "gpus:\n  indices: [2]\nmode: Whole\nenforcement: Evict");
    let plan = world.plan();
    let [mps, time_sliced, whole, unshared] = plan.nodes["n1"].gpus.as_slice() else { panic!("not four GPUs") };
    assert!(mps.partition.mps.is_some());
    let slicing = time_sliced.partition.time_slicing.as_ref().unwrap();
    assert_eq!((slicing.resource.as_str(), slicing.replicas), ("nvidia.com/gpu.shared", 4));
    assert_eq!(whole.partition.whole.as_ref().unwrap().resource, "nvidia.com/gpu");
    assert_eq!(whole.policy.as_deref(), Some("whole"));
    assert_eq!([whole.enforcement, mps.enforcement], [Enforcement::Evict, Enforcement::Report]);
    assert_eq!(unshared.partition.whole, whole.partition.whole);
    assert_eq!(unshared.policy, None);
}

#[test]
fn a_mig_layout_uses_nvml_placements_and_its_instances_can_be_shared() {
    let mut a100 = gpu("n1", 0, "NVIDIA A100-SXM4-80GB", 81_920);
    let profile = |name: &str, size, starts: &[u32], memory_mib| MigProfileStatus {
        name: name.to_owned(),
        size,
        starts: starts.to_vec(),
        memory_mib,
        ..MigProfileStatus::default()
    };
    a100.mig = Some(MigStatus {
        profiles: vec![profile("1g.10gb+me", 1, &[0, 1, 2, 3, 4, 5, 6], 9728), profile("3g.40gb", 4, &[0, 4], 40_192)],
        ..MigStatus::default()
    });
    let world = TestCluster::default().node("n1", &[], vec![a100, gpu("n1", 1, "Tesla T4", 15_360)]);
    let mut world = world.policy("cut", "mode: Mig\nmig:\n  layout: [1g.10gb+me, 3g.40gb]");
    let plan = world.write_plan();
    let instances = plan.nodes["n1"].gpus[0].partition.mig.as_ref().unwrap();
    let found: Vec<(&str, u32, &str)> = instances
        .iter()
        .map(|instance| {
            (instance.profile.as_str(), instance.start, instance.partition.whole.as_ref().unwrap().resource.as_str())
        })
        .collect();
    assert_eq!(found, [("3g.40gb", 0, "nvidia.com/mig-3g.40gb"), ("1g.10gb+me", 4, "nvidia.com/mig-1g.10gb.me")]);
    assert!(plan.nodes["n1"].gpus[1].partition.whole.is_some(), "a T4 stays whole");
    world.assert_condition("cut", "Accepted", "True", "Accepted", "");
    world.assert_condition("cut", "Ready", "False", "MigNotSupported", "GPU 1 of n1: the GPU does not support MIG");

    world.set_policy(
        "cut",
        "gpus:\n  models: [A100]\nmode: Mig\nmig:\n  layout: [3g.40gb]\n  sharing:\n    mps:\n      units: 4",
    );
    let plan = world.plan();
    let mps = plan.nodes["n1"].gpus[0].partition.mig.as_ref().unwrap()[0].partition.mps.clone().unwrap();
    assert_eq!(mps.slices[0].resource, "nvidia.com/mig-3g.40gb.shared");
    assert_eq!(mps.slices[0].memory_mib[3], 40_192 - 128);
    assert_eq!(mps.compute_mode, cleave_api::sharingpolicy::ComputeMode::Default);

    world.set_policy("cut", "gpus:\n  models: [A100]\nmode: Mig\nmig:\n  layout: [3g.40gb, 3g.40gb, 1g.10gb+me]");
    world.assert_condition("cut", "Accepted", "False", "LayoutNotPossible", "do not fit on the GPU at the same time");
}

#[test]
fn the_more_specific_policy_wins_and_the_other_policy_reports_the_conflict() {
    let mut world = TestCluster::default()
        .node_with_four_gpus("n1")
        .policy("all", TEN_SHARES_YAML)
        .policy("first", "gpus:\n  indices: [0]\nmode: Whole");
    world.write_plan();
    world.apply_all_specs();
    assert_eq!(world.plan().nodes["n1"].gpus[0].policy.as_deref(), Some("first"));
    world.assert_condition("all", "Conflict", "True", "Overridden", "first has GPU 0 of n1");
    world.assert_condition("all", "Ready", "True", "Ready", "3 GPUs of n1 are shared as the policy specifies");
    world.assert_condition("first", "Conflict", "False", "NoConflict", "");
    let statuses = world.write_statuses();
    assert_eq!((statuses["all"].gpus, statuses["all"].nodes, statuses["all"].total), (3, 1, 30));

    let mut world = TestCluster::default()
        .node_with_four_gpus("n1")
        .policy("older", TEN_SHARES_YAML)
        .policy("younger", "mode: Whole");
    assert_eq!(world.plan().nodes["n1"].gpus[0].policy.as_deref(), Some("older"));
    world.assert_condition(
        "younger",
        "Ready",
        "False",
        "Overridden",
        "all GPUs that the policy selects follow other policies: older",
    );
}

#[test]
fn a_policy_that_matches_no_gpu_reports_the_existing_gpus() {
    let mut world = TestCluster::default()
        .node("n1", &[("zone", "a")], vec![gpu("n1", 0, "NVIDIA L4", 23_034), gpu("n1", 1, "NVIDIA L4", 23_034)])
        .policy("model", "gpus:\n  models: [A1000]\nmode: Whole")
        .policy("uuid", "gpus:\n  uuids: [GPU-ffffffff-0000-0000-0000-000000000000]\nmode: Whole")
        .policy("index", "gpus:\n  indices: [7]\nmode: Whole")
        .policy("nowhere", "nodeSelector:\n  zone: b\nmode: Whole")
        .policy("large", "gpus:\n  indices: [0]\nmode: Mps\nmps:\n  unitMemory: 40Gi");
    world.assert_condition(
        "model",
        "Accepted",
        "False",
        "UnknownModel",
        "no GPU of the selected nodes is A1000; the selected nodes have NVIDIA L4 (2)",
    );
    world.assert_condition("uuid", "Accepted", "False", "UnknownGpu", "GPU-ffffffff");
    world.assert_condition("index", "Accepted", "False", "NoGpuMatches", "no GPU matches all lists");
    world.assert_condition("nowhere", "Ready", "False", "NoNodeMatches", "no node matches spec.nodeSelector");
    world.assert_condition(
        "large",
        "Accepted",
        "False",
        "GpuTooSmall",
        "GPU 0 of n1: the GPU has 22906 MiB for shares, and one share needs 40960 MiB",
    );
    assert!(world.plan().nodes["n1"].gpus[0].partition.whole.is_some());
}

#[test]
fn an_unreported_node_may_have_the_missing_model() {
    let mut world = TestCluster::default()
        .node_with_four_gpus("n1")
        .node_with_four_gpus("n2")
        .policy("model", "gpus:\n  models: [A1000]\nmode: Whole");
    world.object("n2").status = None;
    world.assert_condition("model", "Accepted", "True", "Accepted", "");
    world.assert_condition("model", "Ready", "False", "AgentNotReporting", "n2");
    let plan = world.plan();
    assert!(!plan.nodes.contains_key("n2"), "the spec of a node without a report stays");
    world.observed.nodes.get_mut("n2").unwrap().gpu_node = None;
    assert_eq!(world.plan().nodes["n2"], GpuNodeSpec::default(), "the agent needs an object for its report");
    world.observed.nodes.get_mut("n2").unwrap().agent = None;
    assert!(!world.plan().nodes.contains_key("n2"), "no object is created without an agent");
}

#[test]
fn a_policy_that_waits_for_pods_names_them() {
    let mut world = TestCluster::default().node_with_four_gpus("n1").policy("p", TEN_SHARES_YAML);
    world.write_plan();
    world.assert_condition("p", "Ready", "False", "Applying", "the agent of n1 has not received the new spec yet");
    world.apply_all_specs();
    world.assert_condition("p", "Ready", "True", "Ready", "");
    world.set_policy("p", "mode: Mps\nmps:\n  units: 5");
    world.write_plan();
    let id = uuid("n1", 2);
    let object = world.object("n1");
    let generation = object.metadata.generation.unwrap();
    let status = object.status.as_mut().unwrap();
    status.observed_generation = generation;
    status.steps = vec![
        StepStatus { gpu: uuid("n1", 0), result: "Done".into(), ..StepStatus::default() },
        StepStatus { gpu: id.clone(), result: "Waiting".into(), reason: "InUse".into(), ..StepStatus::default() },
    ];
    for (index, gpu) in status.gpus.iter_mut().enumerate() {
        if index != 2 {
            gpu.slices[0].total = 5;
        }
    }
    let holds = |pod: &str| AllocationStatus { pod: pod.to_owned(), device: id.clone(), ..AllocationStatus::default() };
    world.gpu("n1", 2).allocations = vec![holds("team/b"), holds("team/a"), holds("team/b")];
    let set_message = |world: &mut TestCluster, message: &str| {
        message.clone_into(&mut world.object("n1").status.as_mut().unwrap().steps[1].message);
    };
    set_message(&mut world, "in use by team/b");
    world.assert_condition("p", "Ready", "False", "WaitingForPods", "GPU 2 of n1 waits: in use by team/b");
    set_message(&mut world, "in use by a pod that is being admitted");
    world.assert_condition(
        "p",
        "Ready",
        "False",
        "WaitingForPods",
        "GPU 2 of n1 waits: in use by a pod that is being admitted",
    );
    set_message(&mut world, "");
    world.assert_condition("p", "Ready", "False", "WaitingForPods", "GPU 2 of n1 waits: in use by team/a, team/b");
    world.object("n1").status.as_mut().unwrap().steps[1].reason.clear();
    set_message(&mut world, "there is no MIG instance 3g.40gb at 0");
    world.assert_condition(
        "p",
        "Ready",
        "False",
        "Applying",
        "GPU 2 of n1 waits: there is no MIG instance 3g.40gb at 0",
    );
}

#[test]
fn failed_and_refused_steps_are_reported_first() {
    let mut world = TestCluster::default().node_with_four_gpus("n1").policy("p", TEN_SHARES_YAML);
    world.write_plan();
    let object = world.object("n1");
    let generation = object.metadata.generation.unwrap();
    let status = object.status.as_mut().unwrap();
    status.observed_generation = generation;
    let step = |index, result: &str, message: &str| StepStatus {
        gpu: uuid("n1", index),
        action: "serve 10 nvidia.com/gpu-mps".into(),
        result: result.into(),
        message: message.into(),
        ..StepStatus::default()
    };
    status.steps = vec![step(0, "Waiting", ""), step(1, "Failed", "NVML: Insufficient Permissions")];
    world.assert_condition("p", "Ready", "False", "ApplyFailed", "GPU 1 of n1: NVML: Insufficient Permissions");
    world.assert_condition("p", "Ready", "False", "ApplyFailed", "GPU 0 of n1 waits: serve 10 nvidia.com/gpu-mps");
    world.assert_condition("p", "Ready", "False", "ApplyFailed", "GPU 2 of n1 is being repartitioned");
}

#[test]
fn gpus_are_quiesced_by_annotation_and_by_the_gpu_operators_labels() {
    let mut world = TestCluster::default().node_with_four_gpus("n1").policy("p", TEN_SHARES_YAML);
    let states = |world: &TestCluster| -> Vec<(bool, bool)> {
        plan(&world.observed).nodes["n1"].gpus.iter().map(|spec| (spec.quiesced, spec.cordoned)).collect()
    };
    let node = world.observed.nodes.get_mut("n1").unwrap();
    let Some(DeserializeGuard(Ok(object))) = node.gpu_node.as_mut().map(Arc::make_mut) else { panic!() };
    object.metadata.annotations = Some(BTreeMap::from([("cleave.dev/quiesce".to_owned(), uuid("n1", 2))]));
    assert_eq!(states(&world), [(false, false), (false, false), (true, true), (false, false)]);

    let label = |world: &mut TestCluster, value: &str| {
        let labels = &mut world.observed.nodes.get_mut("n1").unwrap().labels;
        labels.insert("nvidia.com/gpu.deploy.device-plugin".to_owned(), value.to_owned());
    };
    for paused in ["paused-for-driver-upgrade", "paused-for-mig-change"] {
        label(&mut world, paused);
        assert_eq!(states(&world), [(true, true); 4], "{paused}");
        label(&mut world, "true");
        assert_eq!(states(&world).iter().filter(|state| state.0).count(), 1, "the annotation alone");
    }
}

#[test]
fn annotations_of_administrators_are_copied_to_the_spec() {
    let mut world = TestCluster::default().node_with_four_gpus("n1").policy("p", TEN_SHARES_YAML);
    let annotate = |world: &mut TestCluster, cordon: &str, times: &str| {
        let object = world.observed.nodes.get_mut("n1").unwrap().gpu_node.as_mut().map(Arc::make_mut);
        let Some(DeserializeGuard(Ok(object))) = object else { panic!() };
        let annotations =
            [("cleave.dev/cordon", cordon), ("cleave.dev/cleared", times), ("cleave.dev/forgotten", times)];
        let annotations = annotations.map(|(name, value)| (name.to_owned(), value.to_owned()));
        object.metadata.annotations = Some(BTreeMap::from(annotations));
    };
    let before = plan(&world.observed).nodes["n1"].clone();
    let gpu = uuid("n1", 2);
    annotate(&mut world, &format!("{gpu}=new fan,GPU-elsewhere"), &format!("{gpu}=2026-11-21T20:00:00Z"));
    let mut after = plan(&world.observed).nodes["n1"].clone();
    assert_ne!(after.plan_id, before.plan_id);
    let cordoned: Vec<bool> = after.gpus.iter().map(|spec| spec.cordoned).collect();
    assert_eq!(cordoned, [false, false, true, false]);
    assert_eq!(after.gpus[2].cleared.as_ref().unwrap().0.as_second(), 1_795_291_200);
    after.gpus[2].cordoned = false;
    assert_eq!(after.gpus[2].forgotten, after.gpus[2].cleared);
    (after.gpus[2].cleared, after.gpus[2].forgotten) = (None, None);
    assert_eq!(after.gpus, before.gpus);
    annotate(&mut world, "", "nonsense");
    assert_eq!(plan(&world.observed).nodes["n1"], before);
}

#[test]
fn unhealthy_gpus_and_agents_that_are_not_ready_are_reported() {
    let mut world = TestCluster::default().node_with_four_gpus("n1").policy("p", TEN_SHARES_YAML);
    world.write_plan();
    world.apply_all_specs();
    world.gpu("n1", 3).health =
        Health { healthy: false, reason: "XidError".into(), message: "XID 79".into(), ..Health::default() };
    world.assert_condition("p", "Ready", "False", "GpuUnhealthy", "GPU 3 of n1 is unhealthy: XID 79");
    world.gpu("n1", 3).health.healthy = true;
    world.gpu("n1", 0).mps = vec![MpsStatus { state: "Restarting".into(), ..MpsStatus::default() }];
    world.assert_condition("p", "Ready", "True", "Ready", "");
    world.gpu("n1", 0).mps =
        vec![MpsStatus { state: "BackOff".into(), message: "exited with 1".into(), ..MpsStatus::default() }];
    world.assert_condition(
        "p",
        "Ready",
        "False",
        "GpuUnhealthy",
        "the MPS daemon of GPU 0 of n1 is in state BackOff: exited with 1",
    );
    world.observed.nodes.get_mut("n1").unwrap().agent = Some(Agent { ready: false });
    world.assert_condition("p", "Ready", "False", "AgentNotReporting", "the agent of n1 is not ready");
}

#[test]
fn an_invalid_policy_repartitions_no_gpu() {
    let mut world = TestCluster::default().node_with_four_gpus("n1").policy("p", TEN_SHARES_YAML);
    world.write_plan();
    let before = world.object("n1").spec.clone();
    // In these cases, the policy is malformed, invalid because it was stored under an older CRD,
    // not supported by its GPUs, or partitions GPUs on demand.
    let malformed =
        TestCluster { observed: world.observed.clone(), written: WrittenStatuses::new() }.malformed_policy("p");
    assert_eq!(malformed.plan().nodes["n1"], before);
    for spec in [
        "mode: Mps\nmps:\n  units: 49",
        "mode: Mps",
        "mode: Mps\nmps:\n  unitMemory: 500Gi",
        "mode: Mig\nmig:\n  layout: [1g.10gb]",
        "mode: Auto",
        "mode: Mps\nmps:\n  sizes: Dynamic",
    ] {
        world.set_policy("p", spec);
        assert_eq!(world.plan().nodes["n1"], before, "{spec}");
        assert!(changes(&world.plan(), &world.observed).is_empty(), "{spec}");
    }
    world.write_plan();
    world.apply_all_specs();
    world.assert_condition("p", "Ready", "True", "Ready", "4 GPUs of n1 are partitioned as pods request it");
    // GPUs no longer follow a deleted policy.
    world.observed.policies.clear();
    assert!(world.plan().nodes["n1"].gpus.iter().all(|gpu| gpu.partition.whole.is_some()));
}

#[test]
fn a_malformed_object_affects_no_other_object_and_is_reported_once() {
    let mut world = TestCluster::default()
        .node_with_four_gpus("n1")
        .node_with_four_gpus("node22")
        .malformed_policy("broken")
        .policy("p", TEN_SHARES_YAML);
    let metadata = ObjectMeta { name: Some("node22".into()), ..ObjectMeta::default() };
    world.observed.nodes.get_mut("node22").unwrap().gpu_node =
        Some(Arc::new(DeserializeGuard(Err(InvalidObject { error: "no field".into(), metadata }))));
    let plan = world.plan();
    assert_eq!(plan.nodes["n1"].gpus.len(), 4);
    assert!(
        !plan.nodes.contains_key("node22"),
        "the operator does not write to a malformed object, because its spec is unknown"
    );
    let found = updates(&plan, &world.observed, &world.written, at(0));
    let broken = found.iter().find(|update| update.policy == "broken").unwrap();
    let accepted = &broken.status.conditions[0];
    assert_eq!((accepted.status.as_str(), accepted.reason.as_str()), ("False", "Malformed"));
    assert!(accepted.message.contains("unknown variant `Sliced`"), "{}", accepted.message);
    assert_eq!(broken.status.observed_generation, 2);
    world.written.insert("broken".into(), WrittenStatus { from: None, status: broken.status.clone() });
    assert!(updates(&plan, &world.observed, &world.written, at(9)).iter().all(|update| update.policy != "broken"));
}

#[test]
fn an_invalid_policy_names_the_field_and_the_reason() {
    let mut world = TestCluster::default()
        .node_with_four_gpus("n1")
        .policy("p", "mode: Mps\nmps:\n  units: 49")
        .policy("q", "mode: Auto\ndynamic:\n  idle: soon");
    world.assert_condition("p", "Accepted", "False", "Invalid", "mps.units is 49; it must be from 1 to 48");
    world.assert_condition("q", "Accepted", "False", "Invalid", "dynamic.idle is \"soon\"; it must be a duration");
}

#[test]
fn nothing_is_written_twice() {
    let mut world = TestCluster::default().node_with_four_gpus("n1").policy("p", TEN_SHARES_YAML);
    assert_eq!(changes(&world.plan(), &world.observed).len(), 1);
    world.write_plan();
    assert_eq!(changes(&world.plan(), &world.observed), Vec::<apply::GpuNodeChange>::new());
    world.write_statuses();
    assert!(updates(&world.plan(), &world.observed, &world.written, at(60)).is_empty());
}

#[test]
fn a_status_is_not_written_twice_while_the_watch_lags() {
    let mut world = TestCluster::default().node_with_four_gpus("n1").policy("p", TEN_SHARES_YAML);
    let first = updates(&world.plan(), &world.observed, &world.written, at(0)).remove(0);
    world.written.insert("p".into(), WrittenStatus { from: first.from, status: first.status });
    assert!(updates(&world.plan(), &world.observed, &world.written, at(1)).is_empty());
    // Once the watch delivers a newer object, the status of that object counts.
    if let Some(Ok(policy)) = world.observed.policies.get_mut("p") {
        policy.metadata.resource_version = Some("later".into());
    }
    assert_eq!(updates(&world.plan(), &world.observed, &world.written, at(2)).len(), 1);
}

#[test]
fn a_condition_keeps_its_time_until_its_status_changes() {
    let mut world = TestCluster::default().node_with_four_gpus("n1").policy("p", TEN_SHARES_YAML);
    world.write_statuses();
    let time = |world: &TestCluster, second| {
        let update = updates(&world.plan(), &world.observed, &world.written, at(second)).remove(0);
        update.status.conditions.iter().find(|condition| condition.type_ == "Ready").unwrap().last_transition_time.0
    };
    world.write_plan();
    world.gpu("n1", 0).slices[0].in_use = 1;
    assert_eq!(time(&world, 60), at(0), "still not ready");
    world.apply_all_specs();
    assert_eq!(time(&world, 60), at(60));
}

#[test]
fn a_spec_is_kept_while_the_driver_does_not_respond() {
    let mut world = TestCluster::default().node_with_four_gpus("n1").policy("p", TEN_SHARES_YAML);
    world.write_plan();
    world.object("n1").status.as_mut().unwrap().gpus.clear();
    assert!(!world.plan().nodes.contains_key("n1"));
    // The operator writes a spec even for a node that never had GPUs, so that the agent does not
    // wait for a spec.
    let world = TestCluster::default().node("n1", &[], Vec::new()).policy("p", TEN_SHARES_YAML);
    assert_eq!(world.plan().nodes["n1"].plan_id.len(), 16);
}

#[test]
fn nodes_without_gpus_are_reported_if_no_node_has_gpus() {
    let mut world = TestCluster::default().node("n1", &[], Vec::new()).policy("p", TEN_SHARES_YAML);
    world.assert_condition("p", "Ready", "False", "NoGpu", "n1");
    let mut world = world.node_with_four_gpus("n2");
    world.write_plan();
    world.apply_all_specs();
    world.assert_condition("p", "Ready", "True", "Ready", "4 GPUs of n2");
}

#[test]
fn the_plan_does_not_depend_on_the_order_of_reported_gpus() {
    let mut world = TestCluster::default().node_with_four_gpus("n1").policy("p", TEN_SHARES_YAML);
    let plan = world.plan();
    world.object("n1").status.as_mut().unwrap().gpus.reverse();
    assert_eq!(world.plan().nodes, plan.nodes);
    let other = TestCluster::default().node_with_four_gpus("n1").policy("p", "mode: Mps\nmps:\n  units: 9").plan();
    assert_ne!(other.nodes["n1"].plan_id, plan.nodes["n1"].plan_id);
}

#[test]
fn only_conditions_that_need_attention_get_events() {
    let condition = |type_: &str, status: &str, reason: &str| Condition {
        type_: type_.into(),
        status: status.into(),
        reason: reason.into(),
        message: "m".repeat(5000),
        observed_generation: None,
        last_transition_time: k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(at(0)),
    };
    for (type_, status, reason, expected) in [
        ("Ready", "True", "Ready", true),
        ("Ready", "False", "WaitingForPods", true),
        ("Ready", "False", "Applying", false),
        ("Ready", "False", "Invalid", false),
        ("Accepted", "False", "Invalid", true),
        ("Accepted", "True", "Accepted", false),
        ("Conflict", "True", "Overridden", true),
        ("Conflict", "False", "NoConflict", false),
        ("RolledOut", "False", "RolloutStopped", true),
        ("Ready", "False", "RolloutStopped", false),
        ("RolledOut", "False", "RollingOut", false),
        ("Ready", "False", "RollingOut", false),
        ("RolledOut", "False", "RolloutPaused", false),
        ("RolledOut", "False", "Invalid", false),
        ("RolledOut", "True", "RolledOut", false),
    ] {
        let event = condition_event(&condition(type_, status, reason));
        assert_eq!(event.is_some(), expected, "{type_} {status} {reason}");
        // The API server refuses notes above 1 KiB.
        assert!(event.is_none_or(|event| event.note.unwrap().len() <= 1024));
    }
}
