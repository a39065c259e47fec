//! Simulates a cluster of nodes that follow policies.
use std::sync::Arc;
use std::time::Duration;

use cleave_api::gpunode::{GpuNode, GpuNodeSpec, GpuNodeStatus, GpuStatus, Health, SliceStatus, StepStatus};
use cleave_api::sharingpolicy::{RolloutStatus, SharingPolicy};
use cleave_operator::policies::apply::changes;
use cleave_operator::policies::plan::{Plan, plan};
use cleave_operator::policies::staging::{FAILURE_TIME, PROOF_TIME, Staging};
use cleave_operator::policies::status::{StatusUpdate, WrittenStatuses, updates};
use cleave_operator::read::{Agent, Node, Observed};
use cleave_plan::snapshot::Taint;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::DeserializeGuard;

pub(crate) const FIVE_SHARES_YAML: &str = "mode: Mps\nmps: {units: 5}";
pub(crate) const TEN_SHARES_YAML: &str = "mode: Mps\nmps: {units: 10}";
pub(crate) const TEN_SHARES_TWO_NODES_YAML: &str = "mode: Mps\nmps: {units: 10}\nrollout: {maxUnavailable: 2}";

/// A cluster of nodes with one GPU each, named n0, n1 and so on.
#[derive(Clone)]
pub(crate) struct World {
    pub(crate) observed: Observed,
    pub(crate) staging: Staging,
    pub(crate) now: Duration,
}

impl World {
    /// Returns a cluster whose nodes serve whole GPUs under no policy.
    pub(crate) fn new(nodes: usize) -> Self {
        let mut world = Self { observed: Observed::default(), staging: Staging::default(), now: Duration::ZERO };
        (0..nodes).for_each(|at| world.add_node(at));
        world.run_pass();
        world.serve_all();
        world
    }

    /// Returns a cluster whose nodes serve the partition of policy `p`.
    pub(crate) fn with_policy(nodes: usize, spec: &str) -> Self {
        let mut world = Self::new(nodes);
        world.set_policy("p", spec);
        world.run_pass();
        world.serve_all();
        world
    }

    pub(crate) fn add_node(&mut self, at: usize) {
        let name = format!("n{at}");
        let gpu = GpuStatus {
            uuid: format!("GPU-{at:08}-0000-0000-0000-000000000000"),
            model: "NVIDIA H100 80GB HBM3".to_owned(),
            memory_mib: 81_559,
            health: Health { healthy: true, ..Health::default() },
            ..GpuStatus::default()
        };
        let status = GpuNodeStatus { agent_version: "0.1.0".to_owned(), gpus: vec![gpu], ..GpuNodeStatus::default() };
        let object = GpuNode {
            metadata: ObjectMeta { name: Some(name.clone()), generation: Some(1), ..ObjectMeta::default() },
            spec: GpuNodeSpec::default(),
            status: Some(status),
        };
        let node = Node {
            agent: Some(Agent { ready: true }),
            gpu_node: Some(Arc::new(DeserializeGuard(Ok(object)))),
            ..Node::default()
        };
        self.observed.nodes.insert(name, node);
    }

    pub(crate) fn set_policy(&mut self, name: &str, spec: &str) {
        let indented: String = spec.lines().map(|line| format!("  {line}\n")).collect();
        let text = format!(
            "apiVersion: cleave.dev/v1alpha1\nkind: SharingPolicy\nmetadata: {{name: {name}}}\nspec:\n{indented}"
        );
        let mut policy: SharingPolicy = serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        if let Some(Ok(before)) = self.observed.policies.get(name) {
            policy.status.clone_from(&before.status);
        }
        self.observed.policies.insert(name.to_owned(), Ok(policy));
    }

    pub(crate) fn object(&mut self, node: &str) -> &mut GpuNode {
        match self.observed.nodes.get_mut(node).and_then(|node| node.gpu_node.as_mut()).map(Arc::make_mut) {
            Some(DeserializeGuard(Ok(object))) => object,
            _ => panic!("{node} has no GpuNode"),
        }
    }

    pub(crate) fn gpu(&mut self, node: &str) -> &mut GpuStatus {
        &mut self.object(node).status.as_mut().unwrap().gpus[0]
    }

    pub(crate) fn staged_plan(&mut self) -> (Plan, Option<Duration>) {
        let mut plan = plan(&self.observed);
        let next = self.staging.withhold_changes(&mut plan, &self.observed, self.now);
        (plan, next)
    }

    /// Runs one pass of the operator. Returns the nodes whose spec it writes.
    pub(crate) fn run_pass(&mut self) -> Vec<String> {
        let written = self.write();
        assert!(changes(&self.staged_plan().0, &self.observed).is_empty(), "one pass writes everything");
        written
    }

    /// Writes the changed specs without planning again. Returns the nodes.
    pub(crate) fn write(&mut self) -> Vec<String> {
        let (plan, _) = self.staged_plan();
        let mut written = Vec::new();
        for change in changes(&plan, &self.observed) {
            let object = self.object(&change.node);
            object.spec = change.spec;
            object.metadata.generation = object.metadata.generation.map(|generation| generation + 1);
            written.push(change.node);
        }
        written
    }

    /// Makes a node serve its spec until the node proves the change.
    pub(crate) fn serve(&mut self, node: &str) {
        self.apply(node);
        self.wait_for_proof();
    }

    pub(crate) fn serve_all(&mut self) {
        let names: Vec<String> = self.observed.nodes.keys().cloned().collect();
        names.iter().for_each(|name| self.apply(name));
        self.wait_for_proof();
    }

    /// Runs the operator, and advances the time until the serving nodes prove a change.
    pub(crate) fn wait_for_proof(&mut self) {
        self.staged_plan();
        self.now += PROOF_TIME;
    }

    /// Simulates that the agent of a node applies the spec, and that the node serves it.
    pub(crate) fn apply(&mut self, node: &str) {
        let object = self.object(node);
        let GpuNode { metadata, spec, status } = object;
        let status = status.as_mut().unwrap();
        (status.observed_generation, status.plan_id) = (metadata.generation.unwrap(), spec.plan_id.clone());
        status.steps.clear();
        for gpu in &mut status.gpus {
            let Some(desired) = spec.gpus.iter().find(|desired| desired.uuid == gpu.uuid) else { continue };
            let (resource, total) = match &desired.partition.mps {
                Some(mps) => (mps.slices[0].resource.clone(), mps.slices[0].count),
                None => ("nvidia.com/gpu".to_owned(), 1),
            };
            gpu.slices = vec![SliceStatus { device: gpu.uuid.clone(), resource, total, ..SliceStatus::default() }];
            gpu.health = Health { healthy: true, ..Health::default() };
        }
    }

    /// Simulates that the agent of a node reads its spec and reports one step.
    pub(crate) fn report_step(&mut self, node: &str, result: &str, reason: &str) {
        let object = self.object(node);
        let status = object.status.as_mut().unwrap();
        status.observed_generation = object.metadata.generation.unwrap();
        status.steps = vec![StepStatus {
            gpu: status.gpus[0].uuid.clone(),
            result: result.to_owned(),
            reason: reason.to_owned(),
            message: "NVML: In use by another client".to_owned(),
            ..StepStatus::default()
        }];
    }

    /// Allocates a slice of a node to a pod.
    pub(crate) fn use_slice(&mut self, node: &str) {
        self.gpu(node).slices[0].in_use = 1;
    }

    pub(crate) fn taint(&mut self, node: &str, key: &str) {
        let taint = Taint { key: key.to_owned(), effect: "NoExecute".to_owned(), ..Taint::default() };
        self.observed.nodes.get_mut(node).unwrap().taints = vec![taint];
    }

    /// Returns the number of shares in the spec of each node. A whole GPU counts as 0 shares.
    pub(crate) fn shares(&mut self) -> Vec<u32> {
        let names: Vec<String> = self.observed.nodes.keys().cloned().collect();
        let shares = |object: &GpuNode| object.spec.gpus[0].partition.mps.as_ref().map_or(0, |mps| mps.slices[0].count);
        names.iter().map(|name| shares(self.object(name))).collect()
    }

    /// Writes the status of policy `p`. Returns the update, if the status changed.
    pub(crate) fn report(&mut self) -> Option<StatusUpdate> {
        let (plan, _) = self.staged_plan();
        let all = updates(&plan, &self.observed, &WrittenStatuses::new(), Timestamp::UNIX_EPOCH);
        let update = all.into_iter().find(|update| update.policy == "p")?;
        if let Some(Ok(policy)) = self.observed.policies.get_mut("p") {
            policy.status = Some(update.status.clone());
        }
        Some(update)
    }

    /// Returns the status, reason and message of a condition of policy `p`.
    pub(crate) fn condition(&mut self, type_: &str) -> (String, String, String) {
        self.report();
        let Some(Ok(policy)) = self.observed.policies.get("p") else { panic!("no policy") };
        let conditions = &policy.status.as_ref().unwrap().conditions;
        let found = conditions.iter().find(|condition| condition.type_ == type_).unwrap();
        (found.status.clone(), found.reason.clone(), found.message.clone())
    }

    pub(crate) fn rollout_status(&mut self) -> RolloutStatus {
        self.report();
        self.observed.policies["p"].as_ref().unwrap().status.as_ref().unwrap().rollout
    }

    /// Advances the time until a failure counts.
    pub(crate) fn wait_for_failure(&mut self) {
        let (_, next) = self.staged_plan();
        assert_eq!(next, Some(FAILURE_TIME), "the operator plans again when the failure counts");
        self.now += FAILURE_TIME;
    }
}
