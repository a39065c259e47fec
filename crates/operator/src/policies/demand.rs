//! Decides the partition of each GPU that is partitioned on demand. Pure: callers pass in the time.
//!
//! ```text
//!  Observed + plan::Plan ──[snapshot]──▶ Snapshot ──cleave_plan::plan──▶ Plan ──check──▶
//!      [partition] ──▶ GpuNode.spec of GPUs partitioned on demand
//! ```
//!
//! Other GPUs keep the partition from [`crate::policies::plan`]. The planner counts their free
//! slices, so it repartitions no GPU for a pod that these slices can serve. If `cleave_plan::check`
//! finds a plan invalid, the operator does not apply the plan, and every GPU that is partitioned on
//! demand keeps its partition.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_api::gpunode::{GpuStatus, Partition};
use cleave_api::names::RESOURCE_GPU;
use cleave_plan::device::sized_slice_gib;
use cleave_plan::{ExplainedPlan, GpuPlan, Policy, Violation};

use crate::policies::partition;
use crate::policies::plan::{OnDemandGpu, Plan, plan_id};
use crate::policies::snapshot::{GpuKey, History, PlannerInput, build};
use crate::read::Observed;

/// The decisions of one pass about GPUs that are partitioned on demand, and the results to report.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// The plan. `None` if no GPU is partitioned on demand.
    pub planned: Option<ExplainedPlan>,
    /// Rules that the plan violates. If the list is not empty, the plan was not applied.
    pub violations: Vec<Violation>,
    /// GPUs that are repartitioned.
    pub repartitioned: Vec<GpuKey>,
    /// Waiting pods, each with the reason.
    pub waiting: BTreeMap<String, WaitingPod>,
    /// Nodes on which a repartitioning is in progress.
    pub changing: BTreeSet<String>,
    /// Nodes excluded from the plan, each with the reason.
    pub excluded_nodes: BTreeMap<String, String>,
    /// GPUs that are excluded from the plan or remain unchanged after a failure, each with the
    /// reason.
    pub excluded_gpus: BTreeMap<GpuKey, String>,
    /// The fraction of the free memory of GPUs partitioned on demand that is on partly used GPUs,
    /// in thousandths.
    pub fragmentation: u32,
    /// Time until the next pass, even if nothing changes.
    pub next: Option<Duration>,
}

/// Why a pod waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitingPod {
    /// The reason, for metrics and for callers.
    pub reason: Reason,
    /// The explanation for the pod's owner.
    pub message: String,
}

/// Classes of reasons why a pod waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// A GPU is being repartitioned for the pod.
    Repartitioning,
    /// A GPU has enough free units, but the scheduler has not bound the pod yet.
    Scheduler,
    /// A node that is being repartitioned may have enough units for the pod afterwards.
    NodeChanging,
    /// No GPU has enough free units for the pod.
    NoRoom,
    /// The pod's requests are malformed.
    Malformed,
    /// With the pod, its quota would exceed its maximum.
    OverMax,
    /// The pod does not borrow, and the unused part of its quota's guarantee does not suffice.
    WaitsForGuarantee,
    /// Only pods that disruption budgets protect could be evicted for the pod.
    Protected,
    /// Pods of the pod's gang are missing.
    GangIncomplete,
    /// The pod's gang has too many pods.
    GangTooLarge,
}

impl Reason {
    /// All reasons.
    pub const ALL: [Self; 10] = [
        Self::Repartitioning,
        Self::Scheduler,
        Self::NodeChanging,
        Self::NoRoom,
        Self::Malformed,
        Self::OverMax,
        Self::WaitsForGuarantee,
        Self::Protected,
        Self::GangIncomplete,
        Self::GangTooLarge,
    ];

    /// Returns the value of the `reason` label in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Repartitioning => "repartitioning",
            Self::Scheduler => "scheduler",
            Self::NodeChanging => "node_changing",
            Self::NoRoom => "no_room",
            Self::Malformed => "malformed",
            Self::OverMax => "over_max",
            Self::WaitsForGuarantee => "waits_for_guarantee",
            Self::Protected => "protected",
            Self::GangIncomplete => "gang_incomplete",
            Self::GangTooLarge => "gang_too_large",
        }
    }
}

/// Decides the partitions of GPUs that are partitioned on demand, and writes the partitions into
/// `plan`.
pub fn decide_partitions(plan: &mut Plan, observed: &Observed, history: &mut History, now: Duration) -> Outcome {
    if plan.demand.is_empty() {
        return Outcome::default();
    }
    let input = build(observed, plan, history, now);
    let planned = cleave_plan::plan(&input.snapshot, &Policy::default());
    let violations = cleave_plan::check(&input.snapshot, &planned.plan);
    let mut outcome = Outcome { violations, next: input.next, ..Outcome::default() };
    if outcome.violations.is_empty() {
        apply_plan(plan, observed, &input, &planned, &mut outcome);
        history.placements =
            planned.plan.placements.iter().map(|placement| (placement.pod.clone(), placement.node.clone())).collect();
        outcome.waiting = waiting_pods(&planned, &input, &outcome.repartitioned);
    }
    outcome.fragmentation = fragmentation(&input, &planned);
    let PlannerInput { excluded_nodes, excluded_gpus, changing, .. } = input;
    (outcome.excluded_nodes, outcome.changing) = (excluded_nodes, changing);
    outcome.excluded_gpus.extend(excluded_gpus);
    report_to_policies(plan, observed, &outcome, &planned);
    outcome.planned = Some(planned);
    outcome
}

/// Writes the partitions of a valid plan into the desired state of the nodes.
fn apply_plan(
    plan: &mut Plan,
    observed: &Observed,
    input: &PlannerInput,
    planned: &ExplainedPlan,
    outcome: &mut Outcome,
) {
    for gpu in &planned.plan.gpus {
        let at = (gpu.node.clone(), gpu.uuid.clone());
        let Some(by_demand) = plan.demand.get(&gpu.node).and_then(|node| node.get(&gpu.uuid)) else { continue };
        if !input.repartitionable.contains(&at) {
            // The GPU is being repartitioned, or its state is unknown.
            continue;
        }
        let Some(status) = gpu_status(observed, &at) else { continue };
        let Some(spec) = plan.nodes.get_mut(&gpu.node) else { continue };
        let Some(desired) = spec.gpus.iter_mut().find(|desired| desired.uuid == gpu.uuid) else { continue };
        match gpu_partition(gpu, by_demand, status, &desired.partition) {
            Ok(partition) => {
                if !partition::has_partition(&partition, status) {
                    outcome.repartitioned.push(at);
                }
                desired.partition = partition;
            }
            // Keep slices that the policy no longer allows until the pods that use them end.
            Err(why) => {
                outcome.excluded_gpus.insert(at, why);
            }
        }
        spec.plan_id = plan_id(&spec.gpus);
    }
}

fn gpu_partition(
    gpu: &GpuPlan,
    by_demand: &OnDemandGpu,
    status: &GpuStatus,
    current: &Partition,
) -> Result<Partition, String> {
    partition::partition_with_slices(&gpu.slices, gpu.mode, &by_demand.demand, status, Some(current))
}

fn gpu_status<'a>(observed: &'a Observed, (node, uuid): &GpuKey) -> Option<&'a GpuStatus> {
    observed.nodes.get(node)?.reported()?.iter().find(|gpu| gpu.uuid == *uuid)
}

/// Returns the reason why each pending pod waits.
fn waiting_pods(
    planned: &ExplainedPlan,
    input: &PlannerInput,
    repartitioned: &[GpuKey],
) -> BTreeMap<String, WaitingPod> {
    let mut all = BTreeMap::new();
    for placement in &planned.plan.placements {
        let on = |gpu: &String| repartitioned.contains(&(placement.node.clone(), gpu.clone()));
        let repartitioning = input.changing.contains(&placement.node) || placement.gpus.iter().any(on);
        let reason = if repartitioning { Reason::Repartitioning } else { Reason::Scheduler };
        all.insert(placement.pod.clone(), WaitingPod { reason, message: placement.reason.clone() });
    }
    for unplaced in &planned.plan.unplaced {
        let reason = if unplaced.malformed {
            Reason::Malformed
        } else if input.changing.is_empty() {
            Reason::NoRoom
        } else {
            Reason::NodeChanging
        };
        all.insert(unplaced.pod.clone(), WaitingPod { reason, message: unplaced.reason.clone() });
    }
    all
}

/// Returns the fraction of the free memory of GPUs partitioned on demand that is on partly used
/// GPUs, in thousandths.
fn fragmentation(input: &PlannerInput, planned: &ExplainedPlan) -> u32 {
    let (mut beside, mut all) = (0_u64, 0_u64);
    let plans: BTreeMap<(&str, &str), &GpuPlan> =
        planned.plan.gpus.iter().map(|gpu| ((gpu.node.as_str(), gpu.uuid.as_str()), gpu)).collect();
    for node in input.snapshot.nodes.iter().filter(|node| node.exclusion.is_none()) {
        for gpu in node.gpus.iter().filter(|gpu| gpu.exclusion.is_none() && !gpu.fixed) {
            let Some(plan) = plans.get(&(node.name.as_str(), gpu.uuid.as_str())) else { continue };
            let total = gpu.memory.as_mebibytes().unwrap_or(0);
            let used: u64 =
                plan.slices.iter().filter(|slice| slice.in_use).map(|slice| slice_memory_mib(gpu, slice)).sum();
            let free = total.saturating_sub(used);
            all += free;
            beside += if used > 0 { free } else { 0 };
        }
    }
    u32::try_from((beside * 1000).checked_div(all).unwrap_or(0)).unwrap_or(1000)
}

/// Returns the total memory of a slice's units, in MiB.
fn slice_memory_mib(gpu: &cleave_plan::snapshot::Gpu, slice: &cleave_plan::snapshot::SliceGroup) -> u64 {
    let total = gpu.memory.as_mebibytes().unwrap_or(0);
    let count = u64::from(slice.count);
    if let Some(gib) = sized_slice_gib(&slice.resource) {
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

/// Adds excluded nodes and GPUs, and missing slices, to the reports of the policies.
fn report_to_policies(plan: &mut Plan, observed: &Observed, outcome: &Outcome, planned: &ExplainedPlan) {
    let Outcome { repartitioned, excluded_nodes, excluded_gpus, changing, .. } = outcome;
    for (node, gpus) in &plan.demand {
        for (uuid, by_demand) in gpus {
            let Some(report) = plan.policies.get_mut(&by_demand.policy) else { continue };
            if let Some(reason) = excluded_nodes.get(node) {
                report.excluded.insert(node.clone(), reason.clone());
                continue;
            }
            let at = (node.clone(), uuid.clone());
            if let Some(reason) = excluded_gpus.get(&at) {
                let index = gpu_status(observed, &at).map_or(0, |gpu| gpu.index);
                report.excluded.insert(format!("GPU {index} of {node}"), reason.clone());
            }
        }
    }
    for placement in &planned.plan.placements {
        for take in &placement.takes {
            let pending = repartitioned.contains(&(placement.node.clone(), take.gpu.clone()))
                || changing.contains(&placement.node);
            let by_demand = plan.demand.get(&placement.node).and_then(|gpus| gpus.get(&take.gpu)).filter(|_| pending);
            if let Some(report) = by_demand.and_then(|by_demand| plan.policies.get_mut(&by_demand.policy)) {
                report.wanted = report.wanted.saturating_add(take.count);
            }
        }
    }
}
