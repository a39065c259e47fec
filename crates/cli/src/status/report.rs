//! The result of `cleave status`. `--output json` prints the same fields.
use std::collections::BTreeMap;

use cleave_api::GpuQuota;
use cleave_api::gpunode::{AllocationStatus, GpuNode, GpuNodeStatus, GpuStatus, SliceStatus};
use cleave_api::names::{CONDITION_APPLIED, CONDITION_CONFLICT, CONDITION_GPUS_HEALTHY, CONDITION_READY};
use cleave_api::sharingpolicy::SharingPolicy;
use kube::ResourceExt as _;
use kube::core::DeserializeGuard;
use serde::Serialize;

use crate::condition::ConditionValue;
use crate::quotas::report::{Quota, QuotasReport};

/// The status of a cluster, or of one of its nodes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StatusReport {
    /// Nodes, sorted by name.
    pub nodes: Vec<Node>,
    /// Policies, sorted by name.
    pub policies: Vec<Policy>,
    /// Quotas, sorted by pool and name.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub quotas: Vec<Quota>,
    /// Allocations, sorted by pod, container and device.
    pub allocations: Vec<Allocation>,
}

/// A node with GPUs.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Node {
    /// Name of the node.
    pub name: String,
    /// Version of the GPU driver.
    pub driver: String,
    /// Version of the agent.
    pub agent_version: String,
    /// Whether the agent serves the node's GPUs.
    pub ready: ConditionValue,
    /// Whether the GPUs are partitioned according to the spec.
    pub applied: ConditionValue,
    /// Whether all GPUs are healthy. `None` if the agent does not report the condition.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpus_healthy: Option<ConditionValue>,
    /// GPUs, sorted by index.
    pub gpus: Vec<Gpu>,
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Gpu {
    /// Index on its node.
    pub index: u32,
    /// UUID of the GPU.
    pub uuid: String,
    /// Product name.
    pub model: String,
    /// Total memory, in MiB.
    pub memory_mib: u64,
    /// Number of streaming multiprocessors.
    pub sms: u32,
    /// Current sharing mode.
    pub mode: String,
    /// Name of the policy that applies to the GPU.
    pub policy: Option<String>,
    /// Whether the GPU is healthy.
    pub healthy: bool,
    /// Class of the fault.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub class: String,
    /// Why the GPU is unhealthy, in one word.
    pub reason: String,
    /// Why the GPU is unhealthy, as a sentence.
    pub message: String,
    /// Reason for the cordon, which may be empty. `None` if the GPU is not cordoned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cordoned: Option<String>,
    /// Slices of the GPU, by resource.
    pub slices: Vec<SliceCounts>,
    /// MPS daemons of the GPU or its MIG devices.
    pub mps: Vec<MpsDaemon>,
}

/// The slices of a GPU with the same resource. `free` slices are neither in use nor unhealthy.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SliceCounts {
    /// Name of the resource.
    pub resource: String,
    /// Number of slices.
    pub total: u32,
    /// Number of slices that pods use.
    pub in_use: u32,
    /// Number of slices that new pods can use.
    pub free: u32,
    /// Number of unhealthy slices.
    pub unhealthy: u32,
}

/// An MPS daemon.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MpsDaemon {
    /// The GPU or MIG device that the daemon serves.
    pub device: String,
    /// State of the daemon: `Starting`, `Active`, `Fault`, `Restarting`, `BackOff` or `Stopping`.
    pub state: String,
    /// PID of the daemon. `None` if the daemon does not run.
    pub pid: Option<u32>,
    /// Whether the daemon's doors enforce limits.
    pub door: String,
    /// Number of restarts after failures since the MPS host started.
    pub restarts: u32,
    /// The current or last problem of the daemon. Empty if no problem occurred.
    pub message: String,
}

/// A policy.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Policy {
    /// Name of the policy.
    pub name: String,
    /// Sharing mode of the policy. The mode is empty if the policy is malformed.
    pub mode: String,
    /// Number of GPUs to which the policy applies.
    pub gpus: u32,
    /// Number of nodes with these GPUs.
    pub nodes: u32,
    /// Total number of slices of these GPUs.
    pub total: u32,
    /// Number of these slices that pods use.
    pub in_use: u32,
    /// Whether the policy's GPUs are partitioned according to the policy.
    pub ready: ConditionValue,
    /// The conflict with other policies that select the same GPUs.
    pub conflict: Option<String>,
}

/// Slices of one device that are allocated to one container.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Allocation {
    /// `namespace/name` of the pod.
    pub pod: String,
    /// Name of the container.
    pub container: String,
    /// Name of the node.
    pub node: String,
    /// Index of the GPU.
    pub gpu: u32,
    /// UUID of the GPU or MIG device.
    pub device: String,
    /// Name of the resource.
    pub resource: String,
    /// Number of slices.
    pub shares: usize,
    /// Active thread percentage.
    pub threads: Option<u8>,
    /// Maximum number of SMs.
    pub sms: Option<u32>,
    /// Memory limit of each of the container's processes, in MiB.
    pub memory_mib: Option<u64>,
    /// The part of the memory limit that one program can allocate: the limit without the CUDA
    /// context, in MiB. `None` if the size of the context is unknown.
    pub usable_mib: Option<u64>,
    /// Current number of MPS clients.
    pub clients: u32,
    /// Device IDs that the kubelet allocated.
    pub ids: Vec<String>,
}

impl StatusReport {
    /// Builds the report for the node `only`, or for all nodes. Includes malformed objects, and
    /// reports them as malformed.
    pub fn new(
        nodes: Vec<DeserializeGuard<GpuNode>>,
        policies: Vec<DeserializeGuard<SharingPolicy>>,
        only: Option<&str>,
    ) -> Self {
        let mut report = Self { nodes: Vec::new(), policies: Vec::new(), quotas: Vec::new(), allocations: Vec::new() };
        for node in nodes.into_iter().filter(|node| only.is_none_or(|only| node.name_any() == only)) {
            report.add_node(node);
        }
        report.policies = policies.into_iter().map(Policy::new).collect();
        report.nodes.sort_by(|a, b| a.name.cmp(&b.name));
        report.policies.sort_by(|a, b| a.name.cmp(&b.name));
        report.allocations.sort_by(|a, b| (&a.pod, &a.container, &a.device).cmp(&(&b.pod, &b.container, &b.device)));
        report
    }

    /// Adds the quotas of the cluster.
    #[must_use]
    pub fn with_quotas(self, quotas: Vec<DeserializeGuard<GpuQuota>>) -> Self {
        Self { quotas: QuotasReport::new(quotas).quotas, ..self }
    }

    fn add_node(&mut self, node: DeserializeGuard<GpuNode>) {
        let name = node.name_any();
        let object = match node.0 {
            Ok(object) => object,
            Err(invalid) => {
                self.nodes.push(Node::malformed(name, &invalid.error));
                return;
            }
        };
        for gpu in object.status.iter().flat_map(|status| &status.gpus) {
            self.allocations.extend(gpu.allocations.iter().map(|allocation| Allocation::new(&name, gpu, allocation)));
        }
        self.nodes.push(Node::new(name, object));
    }
}

impl Node {
    fn new(name: String, object: GpuNode) -> Self {
        let cordons = crate::gpu::cordons(&object);
        let policies: BTreeMap<&str, &String> =
            object.spec.gpus.iter().filter_map(|gpu| Some((gpu.uuid.as_str(), gpu.policy.as_ref()?))).collect();
        let GpuNodeStatus { driver, agent_version, conditions, gpus, .. } = object.status.unwrap_or_default();
        let condition = |type_: &str| conditions.iter().find(|condition| condition.type_ == type_);
        let reported = |type_| {
            let unknown = || ConditionValue::new("Unknown", "NotReported", "no agent has reported yet");
            condition(type_).map_or_else(unknown, ConditionValue::of)
        };
        let gpus = gpus.into_iter().map(|gpu| {
            let policy = policies.get(gpu.uuid.as_str()).map(|&policy| policy.clone());
            let cordoned = cordons.0.get(&gpu.uuid).cloned();
            Gpu::new(gpu, policy, cordoned)
        });
        Self {
            name,
            driver,
            agent_version,
            ready: reported(CONDITION_READY),
            applied: reported(CONDITION_APPLIED),
            gpus_healthy: condition(CONDITION_GPUS_HEALTHY).map(ConditionValue::of),
            gpus: gpus.collect(),
        }
    }

    fn malformed(name: String, error: &str) -> Self {
        let malformed = ConditionValue::new("False", "Malformed", error);
        Self {
            name,
            driver: String::new(),
            agent_version: String::new(),
            ready: malformed.clone(),
            applied: malformed,
            gpus_healthy: None,
            gpus: Vec::new(),
        }
    }
}

impl Gpu {
    fn new(gpu: GpuStatus, policy: Option<String>, cordoned: Option<String>) -> Self {
        let mps = gpu.mps.into_iter().map(|daemon| MpsDaemon {
            device: daemon.device,
            state: daemon.state,
            pid: daemon.pid,
            door: daemon.door,
            restarts: daemon.restarts,
            message: daemon.message,
        });
        Self {
            index: gpu.index,
            uuid: gpu.uuid,
            model: gpu.model,
            memory_mib: gpu.memory_mib,
            sms: gpu.sms,
            mode: gpu.mode,
            policy,
            healthy: gpu.health.healthy,
            class: gpu.health.class,
            cordoned,
            reason: gpu.health.reason,
            message: gpu.health.message,
            slices: count_by_resource(gpu.slices),
            mps: mps.collect(),
        }
    }
}

/// Sums the slices of a GPU's devices by resource.
fn count_by_resource(slices: Vec<SliceStatus>) -> Vec<SliceCounts> {
    let mut by_resource: BTreeMap<String, SliceCounts> = BTreeMap::new();
    for slice in slices {
        let sum = by_resource.entry(slice.resource.clone()).or_insert_with(|| SliceCounts {
            resource: slice.resource,
            total: 0,
            in_use: 0,
            free: 0,
            unhealthy: 0,
        });
        sum.total = sum.total.saturating_add(slice.total);
        sum.in_use = sum.in_use.saturating_add(slice.in_use);
        sum.unhealthy = sum.unhealthy.saturating_add(slice.unhealthy);
        sum.free = sum.total.saturating_sub(sum.in_use).saturating_sub(sum.unhealthy);
    }
    by_resource.into_values().collect()
}

impl Policy {
    fn new(policy: DeserializeGuard<SharingPolicy>) -> Self {
        let name = policy.name_any();
        let object = match policy.0 {
            Ok(object) => object,
            Err(invalid) => return Self::malformed(name, &invalid.error),
        };
        let status = object.status.unwrap_or_default();
        let condition = |type_: &str| status.conditions.iter().find(|condition| condition.type_ == type_);
        let unknown = || ConditionValue::new("Unknown", "NotReported", "the operator has not evaluated the policy yet");
        let conflict = condition(CONDITION_CONFLICT).filter(|condition| condition.status == "True");
        Self {
            name,
            mode: format!("{:?}", object.spec.mode),
            gpus: status.gpus,
            nodes: status.nodes,
            total: status.total,
            in_use: status.in_use,
            ready: condition(CONDITION_READY).map_or_else(unknown, ConditionValue::of),
            conflict: conflict.map(|condition| condition.message.clone()),
        }
    }

    fn malformed(name: String, error: &str) -> Self {
        Self {
            name,
            mode: String::new(),
            gpus: 0,
            nodes: 0,
            total: 0,
            in_use: 0,
            ready: ConditionValue::new("False", "Malformed", error),
            conflict: None,
        }
    }
}

impl Allocation {
    fn new(node: &str, gpu: &GpuStatus, allocation: &AllocationStatus) -> Self {
        Self {
            pod: allocation.pod.clone(),
            container: allocation.container.clone(),
            node: node.to_owned(),
            gpu: gpu.index,
            device: allocation.device.clone(),
            resource: allocation.resource.clone(),
            shares: allocation.ids.len(),
            threads: allocation.threads,
            sms: allocation.sms,
            memory_mib: allocation.memory_mib,
            usable_mib: allocation
                .memory_mib
                .zip(allocation.context_mib)
                .map(|(limit, context)| limit.saturating_sub(context)),
            clients: allocation.clients,
            ids: allocation.ids.clone(),
        }
    }
}
