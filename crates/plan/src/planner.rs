//! Creates a plan for a snapshot.
//!
//! `docs/explanation/planning.md` describes the order of all decisions. No result depends on the
//! order of nodes, GPUs or map entries in the snapshot. Equal pods receive their locations in order
//! of arrival.
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::assignment::{Assignment, ChangeRule, CostCache, Location, group_of_pod};
use crate::device::Family;
use crate::greedy::{GreedyPlacer, PlacementStyle};
use crate::model::{Model, as_u32};
use crate::partition::{GpuClass, GpuDemand, GpuUsage, ResourceKind, SliceCell, WHOLE_GPU};
use crate::policy::Policy;
use crate::report::{PlanContext, PlanReport, create_report};
use crate::search::{ClusterPart, PlanScore, search};
use crate::snapshot::{SliceGroup, Snapshot};
use crate::states::{StateId, States};

/// The partition of every GPU, and the placement of every pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Plan {
    /// Whether any GPU is repartitioned.
    pub changed: bool,
    /// All GPUs, by node and index.
    pub gpus: Vec<GpuPlan>,
    /// Pods that are placed, in order of arrival.
    pub placements: Vec<Placement>,
    /// Pods that are not placed, in order of arrival.
    pub unplaced: Vec<Unplaced>,
}

/// The planned partition of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuPlan {
    /// Name of the node.
    pub node: String,
    /// UUID of the GPU.
    pub uuid: String,
    /// Whether the GPU is repartitioned.
    pub changed: bool,
    /// Kind of partition.
    pub mode: Family,
    /// All slices of the GPU, including those in use. An empty list means that the GPU is whole.
    pub slices: Vec<SliceGroup>,
}

/// The placement of one pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Placement {
    /// Name of the pod.
    pub pod: String,
    /// Name of the node.
    pub node: String,
    /// UUIDs of the GPUs on which the pod uses slices.
    pub gpus: Vec<String>,
    /// The slices that the pod uses on each GPU.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub takes: Vec<PlannedSlices>,
    /// Why the pod is placed on this node and these GPUs.
    #[serde(default)]
    pub reason: String,
}

/// Equal slices of one GPU that a pod uses.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedSlices {
    /// UUID of the GPU.
    pub gpu: String,
    /// Name of the extended resource.
    pub resource: String,
    /// Number of slices or shares.
    pub count: u32,
}

/// A pod that the plan does not place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Unplaced {
    /// Name of the pod.
    pub pod: String,
    /// Why the plan does not place the pod, for the pod's owner.
    pub reason: String,
    /// Whether the pod cannot be planned, for example because its requests are invalid. The JSON of
    /// a plan omits this field.
    #[serde(skip)]
    pub malformed: bool,
}

/// A plan and its explanation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ExplainedPlan {
    /// The plan.
    pub plan: Plan,
    /// The explanation.
    pub report: PlanReport,
}

/// Maximum number of pods in a part of the cluster that is searched exactly.
const MAX_EXACT_PODS: usize = 24;
/// Maximum number of GPUs in a part of the cluster that is searched exactly.
const MAX_EXACT_GPUS: usize = 32;

/// Fixed part of the maximum number of look-ups for moving pods in a whole plan. Each pod adds
/// [`MOVE_LOOKUPS_PER_POD`].
const BASE_MOVE_LOOKUPS: u64 = 200_000;
/// Number of look-ups that each pod adds to [`BASE_MOVE_LOOKUPS`].
const MOVE_LOOKUPS_PER_POD: u64 = 300;
/// Maximum number of look-ups for moving pods in one attempt at a part that is searched exactly
/// afterwards.
const MAX_LOOKUPS_BEFORE_EXACT_SEARCH: u64 = 10_000;

/// Plans the partition of each GPU and the placement of each pending pod.
///
/// The plan places as many pods of the highest priority as the search finds places for, then as
/// many of the next priority. Slices in use are kept. A GPU is repartitioned only if a pod needs
/// it.
pub fn plan(snapshot: &Snapshot, policy: &Policy) -> ExplainedPlan {
    let mut model = Model::new(snapshot, policy);
    let mut states = States::new(std::mem::take(&mut model.classes), model.demands.clone());
    let empty = Assignment::new(&model, &mut states);
    let mut costs = CostCache::default();
    find_candidate_nodes(&mut model, &mut states, &mut costs, &empty);
    let mut assignment = empty.clone();
    let moving = BASE_MOVE_LOOKUPS.saturating_add(MOVE_LOOKUPS_PER_POD.saturating_mul(snapshot.pods.len() as u64));
    let mut budget = WorkBudget { moving, steps: policy.search_steps.saturating_mul(16), each: policy.search_steps };
    for part in divide_into_parts(&model) {
        plan_part(&model, &mut states, &mut costs, &mut assignment, &part, &mut budget);
    }
    assign_locations_in_order_of_arrival(&model, &mut assignment);

    let mut plan = Plan { gpus: gpu_plans(&model, &states, &assignment), ..Plan::default() };
    plan.changed = plan.gpus.iter().any(|gpu| gpu.changed);
    let report =
        create_report(&PlanContext { model: &model, snapshot, empty: &empty, assignment: &assignment }, &mut states);
    for (index, (pod, explained)) in snapshot.pods.iter().zip(&report.pods).enumerate() {
        let Some(location) = assignment.locations.get(index).and_then(Option::as_ref) else {
            let malformed = model.unplannable_pods.contains_key(&as_u32(index));
            plan.unplaced.push(Unplaced { pod: pod.name.clone(), reason: explained.reason.clone(), malformed });
            continue;
        };
        let takes = planned_slices(&model, &states, as_u32(index), location);
        let mut gpus: Vec<String> = takes.iter().map(|take| take.gpu.clone()).collect();
        gpus.dedup();
        plan.placements.push(Placement {
            pod: pod.name.clone(),
            node: model.node(location.node).map(|node| node.node.name.clone()).unwrap_or_default(),
            gpus,
            takes,
            reason: explained.reason.clone(),
        });
    }
    ExplainedPlan { plan, report }
}

/// Remaining work of a plan: look-ups for moving pods, and steps of the exact search.
struct WorkBudget {
    moving: u64,
    steps: u32,
    each: u32,
}

/// Finds the candidate nodes of each group: nodes on which one of its pods could run if no other
/// pod were pending. Also finds the smallest part of a GPU that one of the pods uses.
fn find_candidate_nodes(model: &mut Model<'_>, states: &mut States, costs: &mut CostCache, empty: &Assignment) {
    let mut admitted: BTreeMap<_, Vec<u32>> = BTreeMap::new();
    let mut groups = std::mem::take(&mut model.groups);
    for group in &groups {
        admitted.entry(group.constraints.clone()).or_insert_with(|| {
            let open = |node: &crate::model::NodeModel<'_>| {
                node.exclusion.is_none() && group.constraints.admit(node.node).is_ok()
            };
            model.nodes.iter().zip(0..).filter(|(node, _)| open(node)).map(|(_, at)| at).collect()
        });
    }
    for index in 0..groups.len() {
        model.groups = groups;
        let nodes = model.groups.get(index).and_then(|group| admitted.get(&group.constraints));
        let nodes: Vec<u32> = nodes
            .map_or(&[][..], Vec::as_slice)
            .iter()
            .copied()
            .filter(|&node| empty.cost(model, states, costs, as_u32(index), node, ChangeRule::Any).is_some())
            .collect();
        groups = std::mem::take(&mut model.groups);
        if let Some(group) = groups.get_mut(index) {
            group.nodes = nodes;
        }
    }
    model.groups = groups;
    let least: Vec<GpuUsage> = model.demands.iter().map(|demand| smallest_usage(states, demand)).collect();
    for group in &mut model.groups {
        for part in group.units.iter().filter_map(|&unit| least.get(usize::from(unit))) {
            group.weight.memory = group.weight.memory.saturating_add(part.memory);
            group.weight.compute = group.weight.compute.saturating_add(part.compute);
        }
    }
}

/// Returns the smallest part of a GPU that a demand uses, over all classes of GPUs.
fn smallest_usage(states: &States, demand: &GpuDemand) -> GpuUsage {
    let parts = || states.classes().iter().filter_map(|class| class.weight(demand));
    GpuUsage {
        memory: parts().map(|part| part.memory).min().unwrap_or(WHOLE_GPU),
        compute: parts().map(|part| part.compute).min().unwrap_or(WHOLE_GPU),
    }
}

/// Returns the node that represents this node's part of the cluster.
fn representative_of(leader: &mut [u32], node: u32) -> u32 {
    let mut at = node;
    while let Some(&next) = leader.get(at as usize)
        && next != at
    {
        at = next;
    }
    if let Some(slot) = leader.get_mut(node as usize) {
        *slot = at;
    }
    at
}

/// Divides the cluster into parts with their groups. No pod can be placed in two parts. Nodes that
/// no pod can use belong to no part.
fn divide_into_parts(model: &Model<'_>) -> Vec<ClusterPart> {
    let mut leader: Vec<u32> = (0..as_u32(model.nodes.len())).collect();
    for group in &model.groups {
        for pair in group.nodes.windows(2) {
            let (one, other) = (representative_of(&mut leader, pair[0]), representative_of(&mut leader, pair[1]));
            if let Some(slot) = leader.get_mut(one.max(other) as usize) {
                *slot = one.min(other);
            }
        }
    }
    let mut parts: BTreeMap<u32, ClusterPart> = BTreeMap::new();
    for (group, index) in model.groups.iter().zip(0..) {
        if let Some(&node) = group.nodes.first() {
            parts.entry(representative_of(&mut leader, node)).or_default().groups.push(index);
        }
    }
    for node in 0..as_u32(model.nodes.len()) {
        if let Some(part) = parts.get_mut(&representative_of(&mut leader, node)) {
            part.nodes.push(node);
        }
    }
    parts.into_values().collect()
}

fn plan_part(
    model: &Model<'_>,
    states: &mut States,
    costs: &mut CostCache,
    assignment: &mut Assignment,
    part: &ClusterPart,
    budget: &mut WorkBudget,
) {
    let ideal = part.ideal_score(model);
    let pods: Vec<u32> = part.pods(model).collect();
    let small = pods.len() <= MAX_EXACT_PODS && part.gpus(model).count() <= MAX_EXACT_GPUS;
    let mut best: Option<(PlanScore, Vec<(u32, Location)>)> = None;
    let planned = pods.iter().any(|&pod| model.planned.get(pod as usize).is_some_and(Option::is_some));
    for style in
        [PlacementStyle::AsPlanned, PlacementStyle::FewestChanges, PlacementStyle::Packed, PlacementStyle::LargeFirst]
    {
        if style == PlacementStyle::AsPlanned && !planned {
            continue;
        }
        let before = states.work;
        let mut greedy = GreedyPlacer::new(model, states, costs, std::mem::take(assignment));
        greedy.place_part(part, style, if small { MAX_LOOKUPS_BEFORE_EXACT_SEARCH } else { budget.moving / 3 });
        *assignment = greedy.assignment;
        budget.moving = budget.moving.saturating_sub((states.work - before) / 8);
        let score = part.score(model, states, assignment);
        let locations = pods.iter().filter_map(|&pod| Some((pod, assignment.remove(model, states, pod)?))).collect();
        if best.as_ref().is_none_or(|(other, _)| score > *other) {
            best = Some((score, locations));
        }
        if best.as_ref().is_some_and(|(score, _)| score.placed == ideal.placed) {
            break;
        }
    }
    let Some((mut score, mut locations)) = best else { return };
    if small && score != ideal {
        for rule in [ChangeRule::Stay, ChangeRule::Any] {
            // If every pod is placed, the search can only lower the number of repartitioned GPUs.
            let max_steps = if score.placed == ideal.placed { budget.each / 5 } else { budget.each };
            let steps = max_steps.min(budget.steps);
            let found = search(model, states, assignment, part, rule, score.clone(), steps);
            budget.steps = budget.steps.saturating_sub(found.steps);
            if let Some(better) = found.better {
                (score, locations) = better;
            }
        }
    }
    for (pod, location) in locations {
        assignment.place(model, states, pod, location);
    }
}

/// Assigns the locations of equal pods in order of arrival.
fn assign_locations_in_order_of_arrival(model: &Model<'_>, assignment: &mut Assignment) {
    for group in &model.groups {
        let mut locations: Vec<Location> = group
            .pods
            .iter()
            .filter_map(|&pod| assignment.locations.get_mut(pod as usize).and_then(Option::take))
            .collect();
        locations.sort();
        for (&pod, location) in group.pods.iter().zip(locations) {
            if let Some(at) = assignment.locations.get_mut(pod as usize) {
                *at = Some(location);
            }
        }
    }
}

fn planned_slices(model: &Model<'_>, states: &States, pod: u32, location: &Location) -> Vec<PlannedSlices> {
    let mut takes: BTreeMap<(u32, &str), u32> = BTreeMap::new();
    let units = group_of_pod(model, pod).map_or(&[][..], |group| group.units.as_slice());
    for (unit, &gpu) in units.iter().zip(&location.gpus) {
        let Some(demand) = states.demand(*unit) else { continue };
        *takes.entry((gpu, model.resource(demand.resource))).or_default() += demand.units;
    }
    let take = |((gpu, resource), count): ((u32, &str), u32)| {
        let gpu = model.gpu(gpu)?.gpu.uuid.clone();
        Some(PlannedSlices { gpu, resource: resource.to_owned(), count })
    };
    takes.into_iter().filter_map(take).collect()
}

fn gpu_plans(model: &Model<'_>, states: &States, assignment: &Assignment) -> Vec<GpuPlan> {
    let mut plans = Vec::with_capacity(model.gpus.len());
    for node in &model.nodes {
        for gpu in node.gpus.clone() {
            let Some(observed) = model.gpu(gpu) else { continue };
            let state = assignment.gpus.get(gpu as usize).copied().unwrap_or(StateId::MAX);
            let mut slices = observed.gpu.slices.clone();
            let mut changed = false;
            if let Some((class, packed)) = states.class_and_partition(state).filter(|(_, packed)| packed.changed) {
                changed = true;
                slices.retain(|slice| slice.in_use);
                for cell in &packed.free {
                    let slice = slice_of_cell(model, class, cell);
                    slices.extend(std::iter::repeat_n(slice, cell.count as usize));
                }
            }
            slices.sort();
            plans.push(GpuPlan {
                node: node.node.name.clone(),
                uuid: observed.gpu.uuid.clone(),
                changed,
                mode: partition_kind(states, state),
                slices,
            });
        }
    }
    plans
}

fn slice_of_cell(model: &Model<'_>, class: &GpuClass, cell: &SliceCell) -> SliceGroup {
    let of_instance = cell.instance.filter(|_| cell.kind == ResourceKind::Shares);
    let profile = of_instance.filter(|instance| !class.mig_shared.contains(&(cell.resource, instance.profile)));
    SliceGroup {
        placement: cell.instance.map(|instance| u32::from(instance.start)),
        resource: model.resource(cell.resource).to_owned(),
        in_use: false,
        count: 1,
        profile: profile.and_then(|instance| class.profile_name(instance.profile)),
        pod: None,
    }
}

/// Returns the kind of partition that the plan assigns to the GPU. A GPU without slices is whole.
fn partition_kind(states: &States, state: StateId) -> Family {
    let Some((class, packed)) = states.class_and_partition(state) else { return Family::Whole };
    class.in_use.iter().chain(&packed.free).find_map(|cell| class.family_of(cell)).unwrap_or(Family::Whole)
}
