//! What each node's GPUs shall be, by the policies that they follow. Pure.
//!
//! A GPU that no policy matches is whole. A GPU stays what its `GpuNode.spec` says already where
//! its policy cannot be followed: it is malformed or invalid, it shares by demand (which
//! [`crate::policies::demand`] plans), or the GPU cannot serve it. So a slip in a policy re-cuts
//! nothing.
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
use crate::policies::select::{self, by_rank, matching, selects_node};
use crate::policies::validate::{
    self, Demand, Gathering, InstanceShare, MpsShare, Policy, Share, ShareSize, Turns, shared_instance_resource,
};
use crate::read::{Node, Observed};

/// What shall be, and why.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Plan {
    /// Desired `GpuNode.spec` by node.
    pub nodes: BTreeMap<String, GpuNodeSpec>,
    /// What became of each policy, by name; malformed and invalid ones included.
    pub policies: BTreeMap<String, Report>,
    /// GPUs that pods decide about, by node and UUID. In `nodes` they are as they were:
    /// [`crate::policies::demand`] says what they become.
    pub demand: BTreeMap<String, BTreeMap<String, ByDemand>>,
}

/// A GPU that is cut as pods ask for it.
#[derive(Debug, Clone, PartialEq)]
pub struct ByDemand {
    /// The policy.
    pub policy: String,
    /// What it allows.
    pub demand: Demand,
    /// How pods are gathered, and how long a change may take.
    pub gathering: Gathering,
}

/// What became of one policy.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Report {
    /// It could not be read or means nothing, in words; everything below is then empty.
    pub invalid: Option<Invalid>,
    /// It shares by demand, in the words of the policy.
    pub demand: Option<&'static str>,
    /// What pods ask of its GPUs beyond what is there already.
    pub wanted: u32,
    /// Nodes and GPUs of it that plans leave out, and why.
    pub left_out: BTreeMap<String, String>,
    /// Nodes of the cluster with its labels.
    pub nodes: BTreeSet<String>,
    /// Of these, nodes whose GPUs are not known: no agent has reported.
    pub silent: BTreeSet<String>,
    /// Of these, nodes on which no agent runs at all.
    pub without_agent: BTreeSet<String>,
    /// GPUs of its nodes by model: what it could have meant.
    pub models: BTreeMap<String, usize>,
    /// Models of its selector that no GPU of its nodes has.
    pub unknown_models: Vec<String>,
    /// UUIDs of its selector that no GPU of its nodes has.
    pub unknown_uuids: Vec<String>,
    /// GPUs that follow it.
    pub follow: Vec<GpuRef>,
    /// GPUs that should follow it and cannot.
    pub cannot: Vec<(GpuRef, Cannot)>,
    /// GPUs that it matches and another policy has, by that policy.
    pub lost: BTreeMap<String, Vec<GpuRef>>,
}

/// Why a policy is left out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Invalid {
    /// It is not what the definition says.
    Malformed(String),
    /// Its fields mean nothing together.
    Refused(validate::Error),
}

/// One GPU of one node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct GpuRef {
    /// The node.
    pub node: String,
    /// NVML's index.
    pub index: u32,
    /// NVML's UUID.
    pub uuid: String,
}

/// Why a GPU cannot be what its policy says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Cannot {
    /// No share fits.
    #[error("it has {has}, and a share is {wants}")]
    TooSmall {
        /// What shares can be made of.
        has: Mebibytes,
        /// One share.
        wants: Mebibytes,
    },
    /// There is less than 1 MiB for each share.
    #[error("it has {0}, which is less than 1 MiB for each share")]
    NoMemory(Mebibytes),
    /// It knows no MIG.
    #[error("it cannot do MIG")]
    NoMig,
    /// Its places do not allow the layout.
    #[error(transparent)]
    Layout(#[from] layout::Error),
}

impl Cannot {
    /// One word for conditions.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::TooSmall { .. } | Self::NoMemory(_) => reason::GPU_TOO_SMALL,
            Self::NoMig => reason::MIG_NOT_SUPPORTED,
            Self::Layout(_) => reason::LAYOUT_NOT_POSSIBLE,
        }
    }
}

/// Plans all nodes.
pub fn plan(observed: &Observed) -> Plan {
    let mut plan = Plan::default();
    let mut policies = Vec::new();
    for (name, policy) in &observed.policies {
        let report = plan.policies.entry(name.clone()).or_default();
        match policy {
            Err(malformed) => report.invalid = Some(Invalid::Malformed(malformed.error.clone())),
            Ok(object) => {
                let created = object.metadata.creation_timestamp.as_ref().map(|time| time.0);
                match validate::validate(name, created, &object.spec) {
                    Err(error) => report.invalid = Some(Invalid::Refused(error)),
                    Ok(policy) => {
                        if let Share::Demand(demand) = &policy.share {
                            report.demand = Some(demand.words);
                        }
                        policies.push(policy);
                    }
                }
            }
        }
    }
    by_rank(&mut policies);
    for (name, node) in &observed.nodes {
        plan_node(name, node, &policies, &mut plan);
    }
    for policy in &policies {
        if let Some(report) = plan.policies.get_mut(&policy.name) {
            find_unknown(policy, observed, report);
        }
    }
    plan
}

fn plan_node(name: &str, node: &Node, policies: &[Policy], plan: &mut Plan) {
    let reported = node.reported();
    for policy in policies.iter().filter(|policy| selects_node(policy, &node.labels)) {
        let Some(report) = plan.policies.get_mut(&policy.name) else { continue };
        report.nodes.insert(name.to_owned());
        if node.agent.is_none() && reported.is_none() {
            report.without_agent.insert(name.to_owned());
        } else if reported.is_none() {
            report.silent.insert(name.to_owned());
        }
        for gpu in reported.into_iter().flatten() {
            *report.models.entry(gpu.model.clone()).or_default() += 1;
        }
    }
    // A malformed GpuNode is never written to: what it says is unknown, and a person or an older
    // version has put it there.
    let Ok(current) = node.spec() else { return };
    let Some(gpus) = reported else {
        // The object is made for the agent to report in; what an existing one says stays.
        if node.agent.is_some() && !node.has_object() {
            plan.nodes.insert(name.to_owned(), GpuNodeSpec::default());
        }
        return;
    };
    if gpus.is_empty() && !current.gpus.is_empty() {
        // All GPUs gone at once is a driver that is away, not eight GPUs taken out.
        return;
    }
    let mut desired = Vec::with_capacity(gpus.len());
    for gpu in gpus {
        let at = GpuRef { node: name.to_owned(), index: gpu.index, uuid: gpu.uuid.clone() };
        let stays = current.gpus.iter().find(|spec| spec.uuid == gpu.uuid);
        let mut matching = matching(policies, &node.labels, gpu);
        let winner = matching.next();
        for loser in matching {
            if let (Some(report), Some(winner)) = (plan.policies.get_mut(&loser.name), winner) {
                report.lost.entry(winner.name.clone()).or_default().push(at.clone());
            }
        }
        let follows_invalid = stays
            .and_then(|spec| spec.policy.as_ref())
            .is_some_and(|policy| plan.policies.get(policy).is_some_and(|report| report.invalid.is_some()));
        let spec = match winner {
            _ if follows_invalid => stays.cloned(),
            None => None,
            Some(winner) => {
                let Some(report) = plan.policies.get_mut(&winner.name) else { continue };
                match shape(winner, gpu) {
                    Ok(Some(partition)) => {
                        report.follow.push(at);
                        Some(GpuSpec {
                            uuid: gpu.uuid.clone(),
                            policy: Some(winner.name.clone()),
                            enforcement: winner.enforcement,
                            partition,
                            ..GpuSpec::default()
                        })
                    }
                    Ok(None) => {
                        report.follow.push(at);
                        if let Share::Demand(demand) = &winner.share {
                            let by_demand = ByDemand {
                                policy: winner.name.clone(),
                                demand: demand.clone(),
                                gathering: winner.dynamic,
                            };
                            plan.demand.entry(name.to_owned()).or_default().insert(gpu.uuid.clone(), by_demand);
                        }
                        let stays = stays.map(|stays| stays.partition.clone());
                        Some(GpuSpec {
                            policy: Some(winner.name.clone()),
                            enforcement: winner.enforcement,
                            partition: stays.unwrap_or_else(|| whole(&gpu.uuid).partition),
                            uuid: gpu.uuid.clone(),
                            ..GpuSpec::default()
                        })
                    }
                    Err(cannot) => {
                        report.cannot.push((at, cannot));
                        stays.cloned()
                    }
                }
            }
        };
        desired.push(spec.unwrap_or_else(|| whole(&gpu.uuid)));
    }
    follow_administrators(node, &mut desired);
    desired.sort_by_key(|spec| gpus.iter().find(|gpu| gpu.uuid == spec.uuid).map(|gpu| gpu.index));
    let plan_id = plan_id(&desired);
    plan.nodes.insert(name.to_owned(), GpuNodeSpec { plan_id, gpus: desired });
}

/// What administrators say of single GPUs goes to the agent as it is: it reads no annotations.
fn follow_administrators(node: &Node, desired: &mut [GpuSpec]) {
    let (cordons, cleared) = (node.cordons(), node.cleared());
    for spec in desired {
        spec.cordoned = cordons.0.contains_key(&spec.uuid);
        spec.cleared = cleared.0.get(&spec.uuid).cloned();
    }
}

fn find_unknown(policy: &Policy, observed: &Observed, report: &mut Report) {
    let nodes = observed.nodes.values().filter(|node| selects_node(policy, &node.labels));
    let gpus: Vec<&GpuStatus> = nodes.filter_map(Node::reported).flatten().collect();
    report.unknown_models = policy
        .gpus
        .models
        .iter()
        .filter(|model| !gpus.iter().any(|gpu| select::is_model(model, &gpu.model)))
        .cloned()
        .collect();
    report.unknown_uuids =
        policy.gpus.uuids.iter().filter(|uuid| !gpus.iter().any(|gpu| &gpu.uuid == *uuid)).cloned().collect();
}

/// A GPU that nobody shares.
fn whole(uuid: &str) -> GpuSpec {
    GpuSpec {
        uuid: uuid.to_owned(),
        partition: Partition { whole: Some(Whole { resource: RESOURCE_GPU.to_owned() }), ..Partition::default() },
        ..GpuSpec::default()
    }
}

/// What a policy makes of a GPU; none where demand decides.
fn shape(policy: &Policy, gpu: &GpuStatus) -> Result<Option<Partition>, Cannot> {
    let partition = match &policy.share {
        Share::Demand(_) => return Ok(None),
        Share::Whole => Partition { whole: Some(Whole { resource: RESOURCE_GPU.to_owned() }), ..Partition::default() },
        Share::Mps(share) => Partition {
            mps: Some(mps_partition(share, share.resource(), Mebibytes(gpu.memory_mib), share.rules.compute_mode)?),
            ..Partition::default()
        },
        Share::TimeSlicing(turns) => {
            Partition { time_slicing: Some(turns_partition(turns, turns.resource())), ..Partition::default() }
        }
        Share::Mig { layout, each } => {
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
) -> Result<MpsPartition, Cannot> {
    let shareable = mps::shareable(total);
    let count = match share.size {
        ShareSize::Units(units) if shareable.0 < u64::from(units) => return Err(Cannot::NoMemory(shareable)),
        ShareSize::Units(units) => units,
        ShareSize::Memory(one) => match shareable.0.checked_div(one.0) {
            None | Some(0) => return Err(Cannot::TooSmall { has: shareable, wants: one }),
            Some(fit) => u32::try_from(fit).unwrap_or(MAX_CLIENTS).min(MAX_CLIENTS),
        },
    };
    let memory_of = |shares: u32| {
        let all = match share.size {
            ShareSize::Units(units) => mps::memory(shares, units, total).0,
            ShareSize::Memory(one) => one.0.saturating_mul(u64::from(shares)),
        };
        (all / u64::from(share.rules.memory_parts.max(1))).max(1)
    };
    Ok(MpsPartition {
        multi_user: share.rules.multi_user,
        compute_mode,
        slices: vec![MpsSlices {
            resource: resource.to_owned(),
            count,
            first: 0,
            memory_mib: if share.rules.limited { (1..=count).map(memory_of).collect() } else { Vec::new() },
            threads: (1..=count)
                .filter_map(|shares| mps::threads(shares, count, share.rules.threads).map(u8::from))
                .collect(),
            max_clients: share.rules.max_clients,
        }],
    })
}

pub(crate) fn turns_partition(turns: &Turns, resource: &str) -> TimeSlicedPartition {
    TimeSlicedPartition { resource: resource.to_owned(), replicas: turns.replicas, interval: turns.interval }
}

fn mig_partition(layout: &[String], each: &InstanceShare, gpu: &GpuStatus) -> Result<Vec<MigInstanceSpec>, Cannot> {
    let mig = gpu.mig.as_ref().ok_or(Cannot::NoMig)?;
    let starts = layout::place(layout, &mig.profiles, &mig.instances)?;
    let mut instances = Vec::with_capacity(layout.len());
    for (profile, start) in layout.iter().zip(starts) {
        let partition = mig_instance_partition(profile, each, gpu)?;
        instances.push(MigInstanceSpec { profile: profile.clone(), start, partition });
    }
    instances.sort_by_key(|instance| instance.start);
    Ok(instances)
}

/// How one MIG instance is served.
pub(crate) fn mig_instance_partition(
    profile: &str,
    each: &InstanceShare,
    gpu: &GpuStatus,
) -> Result<MigPartition, Cannot> {
    let known = gpu.mig.iter().flat_map(|mig| &mig.profiles).find(|known| known.name == profile);
    let memory = known.map_or(0, |known| known.memory_mib);
    Ok(match each {
        InstanceShare::Whole => {
            MigPartition { whole: Some(Whole { resource: mig_resource(profile) }), ..MigPartition::default() }
        }
        InstanceShare::Mps(share) => {
            let resource = shared_instance_resource(profile, share.resource.as_deref());
            // The compute mode is the GPU's and never EXCLUSIVE_PROCESS under MIG.
            let partition = mps_partition(share, &resource, Mebibytes(memory), ComputeMode::Default)?;
            MigPartition { mps: Some(partition), ..MigPartition::default() }
        }
        InstanceShare::TimeSlicing(turns) => {
            let resource = shared_instance_resource(profile, turns.resource.as_deref());
            MigPartition { time_slicing: Some(turns_partition(turns, &resource)), ..MigPartition::default() }
        }
    })
}

/// A hash of what GPUs shall be: the first 16 hexadecimal digits of the SHA-256 of their JSON,
/// whose fields are in a fixed order.
pub(crate) fn plan_id(gpus: &[GpuSpec]) -> String {
    // These types always have a JSON form: no maps with keys that are not strings, no floats.
    let json = serde_json::to_vec(gpus).unwrap_or_default();
    let digits = Sha256::digest(json).iter().fold(String::new(), |digits, byte| format!("{digits}{byte:02x}"));
    digits.chars().take(16).collect()
}
