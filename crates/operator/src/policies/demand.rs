//! What GPUs become that pods decide about. Pure: the time is given.
//!
//! ```text
//!  Observed + plan::Plan ──[snapshot]──▶ Snapshot ──cleave_plan::plan──▶ Plan ──check──▶ [cut] ──▶ GpuNode.spec of GPUs by demand
//! ```
//!
//! GPUs of other policies are as [`crate::policies::plan`] makes them; what is free on them counts,
//! so that a pod that they can serve has nothing cut. A plan that its judge finds fault with is not
//! acted on: everything then stays as it is.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_api::gpunode::{GpuStatus, Partition};
use cleave_api::names::RESOURCE_GPU;
use cleave_plan::device::sized;
use cleave_plan::{GpuPlan, Planned, Policy, Violation};

use crate::policies::partition;
use crate::policies::plan::{ByDemand, Plan, plan_id};
use crate::policies::snapshot::{At, Built, Memory, build};
use crate::read::Observed;

/// What was decided, and what there is to tell of it.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// The plan; none where no GPU is shared by demand.
    pub planned: Option<Planned>,
    /// What is wrong with it; then nothing of it was taken over.
    pub violations: Vec<Violation>,
    /// GPUs that become something else.
    pub cuts: Vec<At>,
    /// Pods that wait, with what for.
    pub waiting: BTreeMap<String, Waiting>,
    /// Nodes of which something is still being changed.
    pub changing: BTreeSet<String>,
    /// Nodes that take no part, and why.
    pub silent: BTreeMap<String, String>,
    /// GPUs that take no part, or are left alone, and why.
    pub stuck: BTreeMap<At, String>,
    /// Of the free memory of GPUs by demand, the part on GPUs that are partly in use, in
    /// thousandths.
    pub fragmentation: u32,
    /// When to look again at the latest, from now.
    pub next: Option<Duration>,
}

/// What a pod waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiting {
    /// In one word.
    pub reason: Reason,
    /// In words for its owner.
    pub message: String,
}

/// What a pod waits for, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// A GPU is being cut for it.
    Cutting,
    /// What it wants is there: the scheduler has not bound it yet.
    Scheduler,
    /// A node that is being cut may have room for it afterwards.
    NodeChanging,
    /// There is no room for it.
    NoRoom,
    /// What it asks for makes no sense.
    Malformed,
}

impl Reason {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Cutting, Self::Scheduler, Self::NodeChanging, Self::NoRoom, Self::Malformed];

    /// As metrics name it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Cutting => "cutting",
            Self::Scheduler => "scheduler",
            Self::NodeChanging => "node_changing",
            Self::NoRoom => "no_room",
            Self::Malformed => "malformed",
        }
    }
}

/// Decides what GPUs by demand become, and writes it into `plan`.
pub fn overlay(plan: &mut Plan, observed: &Observed, memory: &mut Memory, now: Duration) -> Outcome {
    if plan.demand.is_empty() {
        return Outcome::default();
    }
    let built = build(observed, plan, memory, now);
    let planned = cleave_plan::plan(&built.snapshot, &Policy::default());
    let violations = cleave_plan::check(&built.snapshot, &planned.plan);
    let mut outcome = Outcome { violations, next: built.next, ..Outcome::default() };
    if outcome.violations.is_empty() {
        adopt(plan, observed, &built, &planned, &mut outcome);
        memory.placements =
            planned.plan.placements.iter().map(|placement| (placement.pod.clone(), placement.node.clone())).collect();
        outcome.waiting = waiting(&planned, &built, &outcome.cuts);
    }
    outcome.fragmentation = fragmentation(&built, &planned);
    let Built { silent, stuck, changing, .. } = built;
    (outcome.silent, outcome.changing) = (silent, changing);
    outcome.stuck.extend(stuck);
    tell_policies(plan, observed, &outcome, &planned);
    outcome.planned = Some(planned);
    outcome
}

/// Takes a plan over into what nodes shall be.
fn adopt(plan: &mut Plan, observed: &Observed, built: &Built, planned: &Planned, outcome: &mut Outcome) {
    for gpu in &planned.plan.gpus {
        let at = (gpu.node.clone(), gpu.uuid.clone());
        let Some(by_demand) = plan.demand.get(&gpu.node).and_then(|node| node.get(&gpu.uuid)) else { continue };
        if !built.open.contains(&at) {
            // It is becoming what its spec says, or nobody knows what it is.
            continue;
        }
        let Some(status) = gpu_status(observed, &at) else { continue };
        let Some(spec) = plan.nodes.get_mut(&gpu.node) else { continue };
        let Some(desired) = spec.gpus.iter_mut().find(|desired| desired.uuid == gpu.uuid) else { continue };
        match partition(gpu, by_demand, status, &desired.partition) {
            Ok(partition) => {
                if !partition::is_reached(&partition, status) {
                    outcome.cuts.push(at);
                }
                desired.partition = partition;
            }
            // It holds what its policy no longer makes: it stays until that is given back.
            Err(why) => {
                outcome.stuck.insert(at, why);
            }
        }
        spec.plan_id = plan_id(&spec.gpus);
    }
}

fn partition(
    gpu: &GpuPlan,
    by_demand: &ByDemand,
    status: &GpuStatus,
    current: &Partition,
) -> Result<Partition, String> {
    partition::partition(&gpu.slices, gpu.mode, &by_demand.demand, status, Some(current))
}

fn gpu_status<'a>(observed: &'a Observed, (node, uuid): &At) -> Option<&'a GpuStatus> {
    observed.nodes.get(node)?.reported()?.iter().find(|gpu| gpu.uuid == *uuid)
}

/// What each waiting pod waits for.
fn waiting(planned: &Planned, built: &Built, cuts: &[At]) -> BTreeMap<String, Waiting> {
    let mut all = BTreeMap::new();
    for placement in &planned.plan.placements {
        let on = |gpu: &String| cuts.contains(&(placement.node.clone(), gpu.clone()));
        let cutting = built.changing.contains(&placement.node) || placement.gpus.iter().any(on);
        let reason = if cutting { Reason::Cutting } else { Reason::Scheduler };
        all.insert(placement.pod.clone(), Waiting { reason, message: placement.reason.clone() });
    }
    for unplaced in &planned.plan.unplaced {
        let reason = if unplaced.malformed {
            Reason::Malformed
        } else if built.changing.is_empty() {
            Reason::NoRoom
        } else {
            Reason::NodeChanging
        };
        all.insert(unplaced.pod.clone(), Waiting { reason, message: unplaced.reason.clone() });
    }
    all
}

/// Of the free memory of GPUs by demand, the part that lies beside something in use, in
/// thousandths.
fn fragmentation(built: &Built, planned: &Planned) -> u32 {
    let (mut beside, mut all) = (0_u64, 0_u64);
    let plans: BTreeMap<(&str, &str), &GpuPlan> =
        planned.plan.gpus.iter().map(|gpu| ((gpu.node.as_str(), gpu.uuid.as_str()), gpu)).collect();
    for node in built.snapshot.nodes.iter().filter(|node| node.left_out.is_none()) {
        for gpu in node.gpus.iter().filter(|gpu| gpu.left_out.is_none() && !gpu.fixed) {
            let Some(plan) = plans.get(&(node.name.as_str(), gpu.uuid.as_str())) else { continue };
            let total = gpu.memory.as_mebibytes().unwrap_or(0);
            let used: u64 = plan.slices.iter().filter(|slice| slice.in_use).map(|slice| memory(gpu, slice)).sum();
            let free = total.saturating_sub(used);
            all += free;
            beside += if used > 0 { free } else { 0 };
        }
    }
    u32::try_from((beside * 1000).checked_div(all).unwrap_or(0)).unwrap_or(1000)
}

/// MiB of a slice, all of its count.
fn memory(gpu: &cleave_plan::snapshot::Gpu, slice: &cleave_plan::snapshot::Slice) -> u64 {
    let total = gpu.memory.as_mebibytes().unwrap_or(0);
    let count = u64::from(slice.count);
    if let Some(gib) = sized(&slice.resource) {
        return gib.saturating_mul(1024).saturating_mul(count);
    }
    if slice.placement.is_some() {
        let resource = slice.resource.trim_end_matches(cleave_plan::device::SHARED_SUFFIX);
        let profile = gpu.profiles.iter().flatten().find(|profile| {
            slice.profile.as_ref().map_or_else(
                || cleave_plan::device::mig_resource(&profile.name) == resource,
                |name| *name == profile.name,
            )
        });
        let units = gpu.mig_sharing.as_ref().map_or(1, |sharing| u64::from(sharing.units.max(1)));
        return profile.map_or(0, |profile| profile.memory_mib.saturating_mul(count) / units);
    }
    let parts = if slice.resource == RESOURCE_GPU { 1 } else { gpu.units.or(gpu.replicas).unwrap_or(1).max(1) };
    total.saturating_mul(count) / u64::from(parts)
}

/// What the policies are to tell of it.
fn tell_policies(plan: &mut Plan, observed: &Observed, outcome: &Outcome, planned: &Planned) {
    let Outcome { cuts, silent, stuck, changing, .. } = outcome;
    for (node, gpus) in &plan.demand {
        for (uuid, by_demand) in gpus {
            let Some(report) = plan.policies.get_mut(&by_demand.policy) else { continue };
            if let Some(reason) = silent.get(node) {
                report.left_out.insert(node.clone(), reason.clone());
                continue;
            }
            let at = (node.clone(), uuid.clone());
            if let Some(reason) = stuck.get(&at) {
                let index = gpu_status(observed, &at).map_or(0, |gpu| gpu.index);
                report.left_out.insert(format!("GPU {index} of {node}"), reason.clone());
            }
        }
    }
    for placement in &planned.plan.placements {
        for take in &placement.takes {
            let cut = cuts.contains(&(placement.node.clone(), take.gpu.clone())) || changing.contains(&placement.node);
            let by_demand = plan.demand.get(&placement.node).and_then(|gpus| gpus.get(&take.gpu)).filter(|_| cut);
            if let Some(report) = by_demand.and_then(|by_demand| plan.policies.get_mut(&by_demand.policy)) {
                report.wanted = report.wanted.saturating_add(take.count);
            }
        }
    }
}
