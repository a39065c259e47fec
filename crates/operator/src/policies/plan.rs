//! Computes the desired state of each node's GPUs from their policies. Pure.
//!
//! A GPU that no policy matches is a whole GPU. If a policy is malformed or invalid, or the GPU
//! does not support it, the GPU keeps the partition in its `GpuNode.spec`. So such a policy never
//! repartitions a GPU. GPUs that are partitioned on demand also keep their partition in this step:
//! [`crate::policies::demand`] plans them.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::gpunode::{
    GpuNodeSpec, GpuSpec, GpuStatus, MigInstanceSpec, MigPartition, MpsPartition, MpsSlices, Partition,
    TimeSlicedPartition, Whole,
};
use cleave_api::names::{RESOURCE_GPU, mig_resource, reason};
use cleave_api::sharingpolicy::ComputeMode;
use cleave_plan::mps::{self, MAX_CLIENTS};
use cleave_plan::units::Mebibytes;
use sha2::{Digest, Sha256};

use crate::policies::layout;
use crate::policies::select::{self, matching_policies, selects_node, sort_by_rank};
use crate::policies::validate::{
    self, BatchRules, Demand, InstanceShare, MpsShare, Policy, ReplicaRules, RolloutRules, ShareSize, SharingMode,
    shared_instance_resource,
};
use crate::policies::waves::RolloutProgress;
use crate::read::{Node, Observed};

/// The desired state of all nodes, and a report about each policy.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Plan {
    /// Desired `GpuNode.spec` by node.
    pub nodes: BTreeMap<String, GpuNodeSpec>,
    /// The report about each policy, by name. Includes malformed and invalid policies.
    pub policies: BTreeMap<String, PolicyReport>,
    /// GPUs that are partitioned on demand, by node and UUID. In `nodes`, these GPUs keep their
    /// partition until [`crate::policies::demand`] decides about them.
    pub demand: BTreeMap<String, BTreeMap<String, OnDemandGpu>>,
}

/// A GPU that is partitioned on demand.
#[derive(Debug, Clone, PartialEq)]
pub struct OnDemandGpu {
    /// Name of the GPU's policy.
    pub policy: String,
    /// The partitions that the policy allows.
    pub demand: Demand,
    /// Time to wait for further pods, and for a change of the node.
    pub batch_rules: BatchRules,
}

/// The GPUs that one policy applies to, and the reasons why the policy does not apply to other
/// GPUs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PolicyReport {
    /// Why the policy is invalid. An invalid policy leaves the other fields empty.
    pub invalid: Option<PolicyError>,
    /// The setting that selects on-demand partitioning, if the policy has one.
    pub demand: Option<&'static str>,
    /// How a change of the policy reaches its nodes.
    pub rollout: RolloutRules,
    /// Progress of the last change. Set by `staging`.
    pub progress: RolloutProgress,
    /// Number of slices that pods request and that the policy's GPUs do not have yet.
    pub wanted: u32,
    /// Nodes and GPUs of the policy that are excluded from plans, each with the reason.
    pub excluded: BTreeMap<String, String>,
    /// Nodes that the policy selects.
    pub nodes: BTreeSet<String>,
    /// Selected nodes whose agent has not reported GPUs.
    pub unreported: BTreeSet<String>,
    /// Selected nodes without an agent.
    pub without_agent: BTreeSet<String>,
    /// Number of GPUs of the selected nodes, by model.
    pub models: BTreeMap<String, usize>,
    /// Models in the policy's selector that no GPU of the selected nodes has.
    pub unknown_models: Vec<String>,
    /// UUIDs in the policy's selector that no GPU of the selected nodes has.
    pub unknown_uuids: Vec<String>,
    /// GPUs that follow the policy.
    pub following: Vec<GpuRef>,
    /// GPUs that match the policy and do not support it, each with the reason.
    pub unsupported: Vec<(GpuRef, UnsupportedReason)>,
    /// GPUs that match the policy and follow another policy, by the name of the other policy.
    pub overridden: BTreeMap<String, Vec<GpuRef>>,
}

/// Why a policy is ignored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PolicyError {
    /// The policy does not match the schema of the CRD. Contains the error.
    Malformed(String),
    /// The policy's fields violate a rule.
    Refused(validate::Error),
}

/// A GPU of a node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct GpuRef {
    /// Name of the node.
    pub node: String,
    /// Index of the GPU, as NVML reports it.
    pub index: u32,
    /// UUID of the GPU, as NVML reports it.
    pub uuid: String,
}

/// Why a GPU does not support its policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnsupportedReason {
    /// The GPU has too little memory for one share.
    #[error("the GPU has {has} for shares, and one share needs {wants}")]
    TooSmall {
        /// The memory available for shares.
        has: Mebibytes,
        /// The memory of one share.
        wants: Mebibytes,
    },
    /// The GPU has less than 1 MiB for each share.
    #[error("the GPU has {0} for shares, which is less than 1 MiB for each share")]
    NoMemory(Mebibytes),
    /// The GPU does not support MIG.
    #[error("the GPU does not support MIG")]
    NoMig,
    /// The GPU does not support the MIG layout.
    #[error(transparent)]
    Layout(#[from] layout::Error),
}

impl UnsupportedReason {
    /// Returns the value of the field `reason` in a condition.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::TooSmall { .. } | Self::NoMemory(_) => reason::GPU_TOO_SMALL,
            Self::NoMig => reason::MIG_NOT_SUPPORTED,
            Self::Layout(_) => reason::LAYOUT_NOT_POSSIBLE,
        }
    }
}

/// Computes the desired state of all nodes.
pub fn plan(observed: &Observed) -> Plan {
    let mut plan = Plan::default();
    let mut policies = Vec::new();
    for (name, policy) in &observed.policies {
        let report = plan.policies.entry(name.clone()).or_default();
        match policy {
            Err(malformed) => report.invalid = Some(PolicyError::Malformed(malformed.error.clone())),
            Ok(object) => {
                let created = object.metadata.creation_timestamp.as_ref().map(|time| time.0);
                match validate::validate(name, created, &object.spec) {
                    Err(error) => report.invalid = Some(PolicyError::Refused(error)),
                    Ok(policy) => {
                        if let SharingMode::Demand(demand) = &policy.share {
                            report.demand = Some(demand.words);
                        }
                        report.rollout = policy.rollout;
                        policies.push(policy);
                    }
                }
            }
        }
    }
    sort_by_rank(&mut policies);
    for (name, node) in &observed.nodes {
        plan_node(name, node, &policies, &mut plan);
    }
    for policy in &policies {
        if let Some(report) = plan.policies.get_mut(&policy.name) {
            report_unknown_selectors(policy, observed, report);
        }
    }
    plan
}

/// Computes the desired state of one node and adds it to the plan.
fn plan_node(name: &str, node: &Node, policies: &[Policy], plan: &mut Plan) {
    report_node(name, node, policies, plan);
    // Never write to a malformed `GpuNode`, because its spec is unknown. Another writer or an older
    // version of the operator wrote the object.
    let Ok(current) = node.spec() else { return };
    let Some(gpus) = node.reported() else {
        // Create the object so that the agent can report its status. Keep an existing spec.
        if node.agent.is_some() && !node.has_gpu_node() {
            plan.nodes.insert(name.to_owned(), GpuNodeSpec::default());
        }
        return;
    };
    if gpus.is_empty() && !current.gpus.is_empty() {
        // Keep the spec. If all GPUs disappear at the same time, the driver has probably failed,
        // and the GPUs are still installed.
        return;
    }
    let mut desired: Vec<GpuSpec> = Vec::with_capacity(gpus.len());
    for gpu in gpus {
        let current = current.gpus.iter().find(|spec| spec.uuid == gpu.uuid);
        let spec = plan_gpu((name, node), gpu, current, policies, plan);
        desired.push(spec.unwrap_or_else(|| whole_gpu_spec(&gpu.uuid)));
    }
    apply_annotations(node, &mut desired);
    desired.sort_by_key(|spec| gpus.iter().find(|gpu| gpu.uuid == spec.uuid).map(|gpu| gpu.index));
    let plan_id = plan_id(&desired);
    plan.nodes.insert(name.to_owned(), GpuNodeSpec { plan_id, gpus: desired });
}

/// Adds a node to the reports of the policies that select it.
fn report_node(name: &str, node: &Node, policies: &[Policy], plan: &mut Plan) {
    let reported = node.reported();
    for policy in policies.iter().filter(|policy| selects_node(policy, &node.labels)) {
        let Some(report) = plan.policies.get_mut(&policy.name) else { continue };
        report.nodes.insert(name.to_owned());
        if node.agent.is_none() && reported.is_none() {
            report.without_agent.insert(name.to_owned());
        } else if reported.is_none() {
            report.unreported.insert(name.to_owned());
        }
        for gpu in reported.into_iter().flatten() {
            *report.models.entry(gpu.model.clone()).or_default() += 1;
        }
    }
}

/// Computes the desired state of one GPU. Returns `None` for a GPU that becomes a whole GPU without
/// a policy. `current` is the GPU's current spec.
fn plan_gpu(
    (name, node): (&str, &Node),
    gpu: &GpuStatus,
    current: Option<&GpuSpec>,
    policies: &[Policy],
    plan: &mut Plan,
) -> Option<GpuSpec> {
    let at = GpuRef { node: name.to_owned(), index: gpu.index, uuid: gpu.uuid.clone() };
    let mut matching = matching_policies(policies, &node.labels, gpu);
    let winner = matching.next();
    for loser in matching {
        if let (Some(report), Some(winner)) = (plan.policies.get_mut(&loser.name), winner) {
            report.overridden.entry(winner.name.clone()).or_default().push(at.clone());
        }
    }
    let follows_invalid = current
        .and_then(|spec| spec.policy.as_ref())
        .is_some_and(|policy| plan.policies.get(policy).is_some_and(|report| report.invalid.is_some()));
    if follows_invalid {
        return current.cloned();
    }
    let winner = winner?;
    let report = plan.policies.get_mut(&winner.name)?;
    let partition = match partition_of_gpu(winner, gpu) {
        Ok(Some(partition)) => partition,
        Ok(None) => {
            if let SharingMode::Demand(demand) = &winner.share {
                let by_demand =
                    OnDemandGpu { policy: winner.name.clone(), demand: demand.clone(), batch_rules: winner.dynamic };
                plan.demand.entry(name.to_owned()).or_default().insert(gpu.uuid.clone(), by_demand);
            }
            current.map_or_else(|| whole_gpu_spec(&gpu.uuid).partition, |current| current.partition.clone())
        }
        Err(unsupported) => {
            report.unsupported.push((at, unsupported));
            return current.cloned();
        }
    };
    report.following.push(at);
    Some(GpuSpec {
        uuid: gpu.uuid.clone(),
        policy: Some(winner.name.clone()),
        enforcement: winner.enforcement,
        partition,
        ..GpuSpec::default()
    })
}

/// Copies administrators' annotations on GPUs to the spec, because agents do not read annotations.
fn apply_annotations(node: &Node, desired: &mut [GpuSpec]) {
    let (cordons, cleared, forgotten) = (node.cordons(), node.cleared_faults(), node.forgotten_gpus());
    for spec in desired {
        spec.quiesced = node.is_quiesced(&spec.uuid);
        spec.cordoned = spec.quiesced || cordons.0.contains_key(&spec.uuid);
        spec.cleared = cleared.0.get(&spec.uuid).cloned();
        spec.forgotten = forgotten.0.get(&spec.uuid).cloned();
    }
}

fn report_unknown_selectors(policy: &Policy, observed: &Observed, report: &mut PolicyReport) {
    let nodes = observed.nodes.values().filter(|node| selects_node(policy, &node.labels));
    let gpus: Vec<&GpuStatus> = nodes.filter_map(Node::reported).flatten().collect();
    report.unknown_models = policy
        .gpus
        .models
        .iter()
        .filter(|model| !gpus.iter().any(|gpu| select::matches_model(model, &gpu.model)))
        .cloned()
        .collect();
    report.unknown_uuids =
        policy.gpus.uuids.iter().filter(|uuid| !gpus.iter().any(|gpu| &gpu.uuid == *uuid)).cloned().collect();
}

/// Returns the desired state of a GPU that is not shared.
fn whole_gpu_spec(uuid: &str) -> GpuSpec {
    GpuSpec {
        uuid: uuid.to_owned(),
        partition: Partition { whole: Some(Whole { resource: RESOURCE_GPU.to_owned() }), ..Partition::default() },
        ..GpuSpec::default()
    }
}

/// Returns the partition of a GPU under a policy. Returns `None` if the GPU is partitioned on
/// demand.
fn partition_of_gpu(policy: &Policy, gpu: &GpuStatus) -> Result<Option<Partition>, UnsupportedReason> {
    let partition = match &policy.share {
        SharingMode::Demand(_) => return Ok(None),
        SharingMode::Whole => {
            Partition { whole: Some(Whole { resource: RESOURCE_GPU.to_owned() }), ..Partition::default() }
        }
        SharingMode::Mps(share) => Partition {
            mps: Some(mps_partition(share, share.resource(), Mebibytes(gpu.memory_mib), share.rules.compute_mode)?),
            ..Partition::default()
        },
        SharingMode::TimeSlicing(slicing) => {
            Partition { time_slicing: Some(time_sliced_partition(slicing, slicing.resource())), ..Partition::default() }
        }
        SharingMode::Mig { layout, each } => {
            Partition { mig: Some(mig_partition(layout, each, gpu)?), ..Partition::default() }
        }
    };
    Ok(Some(partition))
}

fn mps_partition(
    share: &MpsShare,
    resource: &str,
    total: Mebibytes,
    compute_mode: ComputeMode,
) -> Result<MpsPartition, UnsupportedReason> {
    let shareable = mps::shareable_memory(total);
    let count = match share.size {
        ShareSize::Units(units) if shareable.0 < u64::from(units) => {
            return Err(UnsupportedReason::NoMemory(shareable));
        }
        ShareSize::Units(units) => units,
        ShareSize::Memory(one) => match shareable.0.checked_div(one.0) {
            None | Some(0) => return Err(UnsupportedReason::TooSmall { has: shareable, wants: one }),
            Some(fit) => u32::try_from(fit).unwrap_or(MAX_CLIENTS).min(MAX_CLIENTS),
        },
    };
    let memory_of = |shares: u32| {
        let all = match share.size {
            ShareSize::Units(units) => mps::memory_limit(shares, units, total).0,
            ShareSize::Memory(one) => one.0.saturating_mul(u64::from(shares)),
        };
        (all / u64::from(share.rules.memory_parts.max(1))).max(1)
    };
    Ok(MpsPartition {
        multi_user: share.rules.multi_user,
        compute_mode,
        enforcement: share.rules.enforcement,
        slices: vec![MpsSlices {
            resource: resource.to_owned(),
            count,
            first: 0,
            memory_mib: if share.rules.limited { (1..=count).map(memory_of).collect() } else { Vec::new() },
            threads: (1..=count)
                .filter_map(|shares| mps::thread_percentage(shares, count, share.rules.threads).map(u8::from))
                .collect(),
            max_clients: share.rules.max_clients,
        }],
    })
}

pub(crate) fn time_sliced_partition(slicing: &ReplicaRules, resource: &str) -> TimeSlicedPartition {
    TimeSlicedPartition { resource: resource.to_owned(), replicas: slicing.replicas, interval: slicing.interval }
}

fn mig_partition(
    layout: &[String],
    each: &InstanceShare,
    gpu: &GpuStatus,
) -> Result<Vec<MigInstanceSpec>, UnsupportedReason> {
    let mig = gpu.mig.as_ref().ok_or(UnsupportedReason::NoMig)?;
    let starts = layout::place_instances(layout, &mig.profiles, &mig.instances)?;
    let mut instances = Vec::with_capacity(layout.len());
    for (profile, start) in layout.iter().zip(starts) {
        let partition = mig_instance_partition(profile, each, gpu)?;
        instances.push(MigInstanceSpec { profile: profile.clone(), start, partition });
    }
    instances.sort_by_key(|instance| instance.start);
    Ok(instances)
}

/// Returns the partition of one MIG instance.
pub(crate) fn mig_instance_partition(
    profile: &str,
    each: &InstanceShare,
    gpu: &GpuStatus,
) -> Result<MigPartition, UnsupportedReason> {
    let known = gpu.mig.iter().flat_map(|mig| &mig.profiles).find(|known| known.name == profile);
    let memory = known.map_or(0, |known| known.memory_mib);
    Ok(match each {
        InstanceShare::Whole => {
            MigPartition { whole: Some(Whole { resource: mig_resource(profile) }), ..MigPartition::default() }
        }
        InstanceShare::Mps(share) => {
            let resource = shared_instance_resource(profile, share.resource.as_deref());
            // The compute mode is a setting of the GPU. On a GPU in MIG mode, the compute mode is
            // never EXCLUSIVE_PROCESS.
            let partition = mps_partition(share, &resource, Mebibytes(memory), ComputeMode::Default)?;
            MigPartition { mps: Some(partition), ..MigPartition::default() }
        }
        InstanceShare::TimeSlicing(slicing) => {
            let resource = shared_instance_resource(profile, slicing.resource.as_deref());
            MigPartition { time_slicing: Some(time_sliced_partition(slicing, &resource)), ..MigPartition::default() }
        }
    })
}

/// Returns a hash of the desired state: the first 16 hexadecimal digits of the SHA-256 of its JSON.
/// The fields of the JSON are in a fixed order.
pub(crate) fn plan_id(gpus: &[GpuSpec]) -> String {
    // Serialization cannot fail: the maps of these types have only strings as keys.
    let json = serde_json::to_vec(gpus).unwrap_or_default();
    let digits = Sha256::digest(json).iter().fold(String::new(), |digits, byte| format!("{digits}{byte:02x}"));
    digits.chars().take(16).collect()
}
