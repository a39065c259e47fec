//! From a snapshot to a plan.
//!
//! The order of everything is written down in `docs/explanation/planning.md`; nothing here depends
//! on the order of nodes, GPUs or map entries in the snapshot, and pods come in the order of their
//! arrival.
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::board::{Board, Costs, Rule, Spot, group};
use crate::cut::{Cell, Class, Demand, Kind, Used, WHOLE_GPU};
use crate::device::Family;
use crate::greedy::{Greedy, Style};
use crate::model::{Model, as_u32};
use crate::report::{Cluster, Report, report};
use crate::search::{Part, Score, search};
use crate::snapshot::{Slice, Snapshot};
use crate::states::{StateId, States};

/// What holds for all GPUs that do not say otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Policy {
    /// MPS shares of a GPU; without a number no shares are cut.
    pub units: Option<u32>,
    /// Time-sliced replicas of a GPU; without a number none are made.
    pub replicas: Option<u32>,
    /// Steps that the exact search may take on each small part of the cluster, and sixteen times
    /// that in all. The limit is a number of steps and not a time, so that the same input gives the
    /// same plan on every machine.
    pub search_steps: u32,
}

impl Default for Policy {
    fn default() -> Self {
        Self { units: None, replicas: None, search_steps: 5000 }
    }
}

/// What every GPU shall be, and which pod goes where.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Plan {
    /// Some GPU is cut anew.
    pub changed: bool,
    /// All GPUs, by node and index.
    pub gpus: Vec<GpuPlan>,
    /// Pods with a place, in order of arrival.
    pub placements: Vec<Placement>,
    /// Pods without one, in order of arrival.
    pub unplaced: Vec<Unplaced>,
}

/// What one GPU shall be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuPlan {
    /// The node.
    pub node: String,
    /// The GPU.
    pub uuid: String,
    /// It is cut anew.
    pub changed: bool,
    /// How it shall be cut.
    pub mode: Family,
    /// Its slices, those in use among them. An empty list is a whole GPU.
    pub slices: Vec<Slice>,
}

/// Where one pod goes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Placement {
    /// The pod.
    pub pod: String,
    /// The node.
    pub node: String,
    /// UUIDs of the GPUs that it gets something of.
    pub gpus: Vec<String>,
    /// What it gets of which.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub takes: Vec<Take>,
    /// Why there.
    #[serde(default)]
    pub reason: String,
}

/// Something that a pod gets of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Take {
    /// UUID of the GPU.
    pub gpu: String,
    /// The extended resource.
    pub resource: String,
    /// Slices or shares.
    pub count: u32,
}

/// A pod that no node can take.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Unplaced {
    /// The pod.
    pub pod: String,
    /// Why, for its owner.
    pub reason: String,
    /// Whether the pod's requests are malformed, so that no plan can place it.
    #[serde(skip)]
    pub malformed: bool,
}

/// A plan and the reasons for it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Planned {
    /// What shall be.
    pub plan: Plan,
    /// Why.
    pub report: Report,
}

/// Parts of the cluster up to this many pods and GPUs are searched exactly.
const SMALL_PODS: usize = 24;
const SMALL_GPUS: usize = 32;

/// Look-ups that may be spent on moving pods aside, in the whole plan: so many, and so many for
/// each pod.
const MOVING_WORK: u64 = 200_000;
const MOVING_WORK_PER_POD: u64 = 300;
/// And for one attempt at a part that is searched exactly afterwards.
const SMALL_MOVING_WORK: u64 = 10_000;

/// Plans: which GPUs are cut into what, and which waiting pod goes where.
///
/// Most pods of the highest priority, then of the next. Slices in use stay. GPUs that need no
/// change get none.
pub fn plan(snapshot: &Snapshot, policy: &Policy) -> Planned {
    let mut model = Model::new(snapshot, policy);
    let mut states = States::new(std::mem::take(&mut model.classes), model.demands.clone());
    let empty = Board::new(&model, &mut states);
    let mut costs = Costs::default();
    find_nodes(&mut model, &mut states, &mut costs, &empty);
    let mut board = empty.clone();
    let moving = MOVING_WORK.saturating_add(MOVING_WORK_PER_POD.saturating_mul(snapshot.pods.len() as u64));
    let mut budget = Budget { moving, steps: policy.search_steps.saturating_mul(16), each: policy.search_steps };
    for part in parts(&model) {
        solve(&model, &mut states, &mut costs, &mut board, &part, &mut budget);
    }
    first_come_first_served(&model, &mut board);

    let mut plan = Plan { gpus: gpu_plans(&model, &states, &board), ..Plan::default() };
    plan.changed = plan.gpus.iter().any(|gpu| gpu.changed);
    let report = report(&Cluster { model: &model, snapshot, empty: &empty, board: &board }, &mut states);
    for (index, (pod, said)) in snapshot.pods.iter().zip(&report.pods).enumerate() {
        let Some(spot) = board.at.get(index).and_then(Option::as_ref) else {
            let malformed = model.bad_pods.contains_key(&as_u32(index));
            plan.unplaced.push(Unplaced { pod: pod.name.clone(), reason: said.reason.clone(), malformed });
            continue;
        };
        let takes = takes(&model, &states, as_u32(index), spot);
        let mut gpus: Vec<String> = takes.iter().map(|take| take.gpu.clone()).collect();
        gpus.dedup();
        plan.placements.push(Placement {
            pod: pod.name.clone(),
            node: model.node(spot.node).map(|node| node.node.name.clone()).unwrap_or_default(),
            gpus,
            takes,
            reason: said.reason.clone(),
        });
    }
    Planned { plan, report }
}

/// What may still be spent, in steps.
struct Budget {
    moving: u64,
    steps: u32,
    each: u32,
}

/// For each group of pods: the nodes that could take one if no other waited, and the least of a GPU
/// that one takes.
fn find_nodes(model: &mut Model<'_>, states: &mut States, costs: &mut Costs, empty: &Board) {
    let mut admitted: BTreeMap<_, Vec<u32>> = BTreeMap::new();
    let mut groups = std::mem::take(&mut model.groups);
    for group in &groups {
        admitted.entry(group.constraints.clone()).or_insert_with(|| {
            let open = |node: &crate::model::NodeModel<'_>| {
                node.left_out.is_none() && group.constraints.admit(node.node).is_ok()
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
            .filter(|&node| empty.cost(model, states, costs, as_u32(index), node, Rule::Any).is_some())
            .collect();
        groups = std::mem::take(&mut model.groups);
        if let Some(group) = groups.get_mut(index) {
            group.nodes = nodes;
        }
    }
    model.groups = groups;
    let least: Vec<Used> = model.demands.iter().map(|demand| least(states, demand)).collect();
    for group in &mut model.groups {
        for part in group.units.iter().filter_map(|&unit| least.get(usize::from(unit))) {
            group.weight.memory = group.weight.memory.saturating_add(part.memory);
            group.weight.compute = group.weight.compute.saturating_add(part.compute);
        }
    }
}

/// The least part of a GPU that a demand takes, whichever GPU it is.
fn least(states: &States, demand: &Demand) -> Used {
    let parts = || states.classes().iter().filter_map(|class| class.weight(demand));
    Used {
        memory: parts().map(|part| part.memory).min().unwrap_or(WHOLE_GPU),
        compute: parts().map(|part| part.compute).min().unwrap_or(WHOLE_GPU),
    }
}

/// The node that stands for all that one is joined with.
fn find(leader: &mut [u32], of: u32) -> u32 {
    let mut at = of;
    while let Some(&next) = leader.get(at as usize)
        && next != at
    {
        at = next;
    }
    if let Some(slot) = leader.get_mut(of as usize) {
        *slot = at;
    }
    at
}

/// The parts of the cluster between which no pod could choose, each with its groups. Nodes that no
/// pod could use are in none.
fn parts(model: &Model<'_>) -> Vec<Part> {
    let mut leader: Vec<u32> = (0..as_u32(model.nodes.len())).collect();
    for group in &model.groups {
        for pair in group.nodes.windows(2) {
            let (one, other) = (find(&mut leader, pair[0]), find(&mut leader, pair[1]));
            if let Some(slot) = leader.get_mut(one.max(other) as usize) {
                *slot = one.min(other);
            }
        }
    }
    let mut parts: BTreeMap<u32, Part> = BTreeMap::new();
    for (group, index) in model.groups.iter().zip(0..) {
        if let Some(&node) = group.nodes.first() {
            parts.entry(find(&mut leader, node)).or_default().groups.push(index);
        }
    }
    for node in 0..as_u32(model.nodes.len()) {
        if let Some(part) = parts.get_mut(&find(&mut leader, node)) {
            part.nodes.push(node);
        }
    }
    parts.into_values().collect()
}

fn solve(
    model: &Model<'_>,
    states: &mut States,
    costs: &mut Costs,
    board: &mut Board,
    part: &Part,
    budget: &mut Budget,
) {
    let ideal = part.ideal(model);
    let pods: Vec<u32> = part.pods(model).collect();
    let small = pods.len() <= SMALL_PODS && part.gpus(model).count() <= SMALL_GPUS;
    let mut best: Option<(Score, Vec<(u32, Spot)>)> = None;
    let planned = pods.iter().any(|&pod| model.planned.get(pod as usize).is_some_and(Option::is_some));
    for style in [Style::AsPlanned, Style::Thrifty, Style::Packed, Style::LargeFirst] {
        if style == Style::AsPlanned && !planned {
            continue;
        }
        let before = states.work;
        let mut greedy = Greedy::new(model, states, costs, std::mem::take(board));
        greedy.place(part, style, if small { SMALL_MOVING_WORK } else { budget.moving / 3 });
        *board = greedy.board;
        budget.moving = budget.moving.saturating_sub((states.work - before) / 8);
        let score = part.score(model, states, board);
        let spots = pods.iter().filter_map(|&pod| Some((pod, board.remove(model, states, pod)?))).collect();
        if best.as_ref().is_none_or(|(other, _)| score > *other) {
            best = Some((score, spots));
        }
        if best.as_ref().is_some_and(|(score, _)| score.placed == ideal.placed) {
            break;
        }
    }
    let Some((mut score, mut spots)) = best else { return };
    if small && score != ideal {
        for rule in [Rule::Stay, Rule::Any] {
            // Where every pod has a place, only changes are at stake.
            let worth = if score.placed == ideal.placed { budget.each / 5 } else { budget.each };
            let steps = worth.min(budget.steps);
            let found = search(model, states, board, part, rule, score.clone(), steps);
            budget.steps = budget.steps.saturating_sub(found.steps);
            if let Some(better) = found.better {
                (score, spots) = better;
            }
        }
    }
    for (pod, spot) in spots {
        board.put(model, states, pod, spot);
    }
}

/// Of equal pods, those that came first get the places.
fn first_come_first_served(model: &Model<'_>, board: &mut Board) {
    for group in &model.groups {
        let mut spots: Vec<Spot> =
            group.pods.iter().filter_map(|&pod| board.at.get_mut(pod as usize).and_then(Option::take)).collect();
        spots.sort();
        for (&pod, spot) in group.pods.iter().zip(spots) {
            if let Some(at) = board.at.get_mut(pod as usize) {
                *at = Some(spot);
            }
        }
    }
}

fn takes(model: &Model<'_>, states: &States, pod: u32, spot: &Spot) -> Vec<Take> {
    let mut takes: BTreeMap<(u32, &str), u32> = BTreeMap::new();
    let units = group(model, pod).map_or(&[][..], |group| group.units.as_slice());
    for (unit, &gpu) in units.iter().zip(&spot.gpus) {
        let Some(demand) = states.demand(*unit) else { continue };
        *takes.entry((gpu, model.resource(demand.resource))).or_default() += demand.units;
    }
    let take = |((gpu, resource), count): ((u32, &str), u32)| {
        let gpu = model.gpu(gpu)?.gpu.uuid.clone();
        Some(Take { gpu, resource: resource.to_owned(), count })
    };
    takes.into_iter().filter_map(take).collect()
}

fn gpu_plans(model: &Model<'_>, states: &States, board: &Board) -> Vec<GpuPlan> {
    let mut plans = Vec::with_capacity(model.gpus.len());
    for node in &model.nodes {
        for gpu in node.gpus.clone() {
            let Some(observed) = model.gpu(gpu) else { continue };
            let state = board.gpus.get(gpu as usize).copied().unwrap_or(StateId::MAX);
            let mut slices = observed.gpu.slices.clone();
            let mut changed = false;
            if let Some((class, packed)) = states.packed(state).filter(|(_, packed)| packed.changed) {
                changed = true;
                slices.retain(|slice| slice.in_use);
                for cell in &packed.free {
                    let slice = slice(model, class, cell);
                    slices.extend(std::iter::repeat_n(slice, cell.count as usize));
                }
            }
            slices.sort();
            plans.push(GpuPlan {
                node: node.node.name.clone(),
                uuid: observed.gpu.uuid.clone(),
                changed,
                mode: mode(states, state),
                slices,
            });
        }
    }
    plans
}

fn slice(model: &Model<'_>, class: &Class, cell: &Cell) -> Slice {
    let of_instance = cell.instance.filter(|_| cell.kind == Kind::Shares);
    let profile = of_instance.filter(|instance| !class.mig_shared.contains(&(cell.resource, instance.profile)));
    Slice {
        placement: cell.instance.map(|instance| u32::from(instance.start)),
        resource: model.resource(cell.resource).to_owned(),
        in_use: false,
        count: 1,
        profile: profile.and_then(|instance| class.profile_name(instance.profile)),
        pod: None,
    }
}

fn mode(states: &States, state: StateId) -> Family {
    let Some((class, packed)) = states.packed(state) else { return Family::Whole };
    class.held.iter().chain(&packed.free).find_map(|cell| class.family_of(cell)).unwrap_or(Family::Whole)
}
