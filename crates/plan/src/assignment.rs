//! Assigns nodes and GPUs to pending pods while a plan is created. Computes the cost of placing a
//! pod on a node, places pods, and removes them.
use std::collections::BTreeMap;

use crate::model::Model;
use crate::states::{DemandId, StateId, States};

/// The location of a pod: its node, and the GPU of each of its units.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Location {
    pub(crate) node: u32,
    pub(crate) gpus: Vec<u32>,
}

/// Cost of placing a pod: lower is better. Each number outweighs all later numbers. The
/// [`ChangeRule`] determines what each number counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PlacementCost([i64; 3]);

impl PlacementCost {
    pub(crate) fn plus(self, other: Self) -> Self {
        Self(std::array::from_fn(|at| self.0[at] + other.0[at]))
    }
}

/// Which changes of GPUs are allowed to place a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ChangeRule {
    /// Use only existing slices.
    Stay,
    /// Use existing slices, and GPUs that the plan already repartitions.
    NoFurther,
    /// Repartition as few GPUs as possible, and keep as many of their slices as possible.
    Any,
    /// Repartition GPUs so that as much free capacity as possible remains for future pods.
    Pack,
}

/// For each node, its version and the cost at that version.
type NodeCosts = Vec<(u64, Option<PlacementCost>)>;

/// Cached costs by rule and shape, then by node.
#[derive(Debug, Default)]
pub(crate) struct CostCache {
    rows: BTreeMap<(ChangeRule, u32), NodeCosts>,
    scratch: Vec<u32>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Assignment {
    /// State of each GPU.
    pub(crate) gpus: Vec<StateId>,
    /// Free amounts by node and dimension.
    free: Vec<u64>,
    dimensions: usize,
    /// Location of each pod.
    pub(crate) locations: Vec<Option<Location>>,
    /// Pods on each node, in the order in which they were placed.
    pub(crate) pods: Vec<Vec<u32>>,
    /// Version of each node. The version changes when a pod is placed on the node or removed from
    /// it, and never repeats.
    versions: Vec<u64>,
    version: u64,
}

/// Maximum number of steps of one search for a node's GPUs, for a pod with several kinds of units.
const MAX_SPREAD_STEPS: u32 = 500;

impl Assignment {
    /// Creates an assignment that contains no pending pod.
    pub(crate) fn new(model: &Model<'_>, states: &mut States) -> Self {
        // A class without demands always has a state: the GPU's current partition.
        let gpus = model.gpus.iter().map(|gpu| states.base_state(gpu.class).unwrap_or(StateId::MAX)).collect();
        Self {
            gpus,
            free: model.nodes.iter().flat_map(|node| node.free.iter().copied()).collect(),
            dimensions: model.dimensions.len(),
            locations: vec![None; model.group_of.len()],
            pods: vec![Vec::new(); model.nodes.len()],
            versions: vec![1; model.nodes.len()],
            version: 1,
        }
    }

    pub(crate) fn free(&self, node: u32) -> &[u64] {
        let start = node as usize * self.dimensions;
        self.free.get(start..start + self.dimensions).unwrap_or(&[])
    }

    pub(crate) fn has_room(&self, needs: &[(u16, u64)], node: u32) -> bool {
        let free = self.free(node);
        needs.iter().all(|(dimension, need)| free.get(usize::from(*dimension)).is_some_and(|free| free >= need))
    }

    /// Returns the cost of placing one more pod of a group on a node, as [`Self::find_location`]
    /// finds it. The cost is cached until a pod is placed on the node or removed from it. The cost
    /// depends only on the GPU units, so groups with equal units share the cache. Returns `None` if
    /// the pod does not fit.
    pub(crate) fn cost(
        &self,
        model: &Model<'_>,
        states: &mut States,
        costs: &mut CostCache,
        group: u32,
        node: u32,
        rule: ChangeRule,
    ) -> Option<PlacementCost> {
        let of = model.groups.get(group as usize)?;
        states.work += 1;
        if !self.has_room(&of.needs, node) {
            return None;
        }
        let row = costs.rows.entry((rule, of.shape)).or_insert_with(|| vec![(0, None); self.versions.len()]);
        let (version, cost) = row.get_mut(node as usize)?;
        let now = *self.versions.get(node as usize)?;
        if *version != now {
            *version = now;
            *cost = self.find_location(model, states, group, node, rule, &mut costs.scratch);
        }
        *cost
    }

    /// Finds a cheap way to place one more pod of a group on a node. Writes the chosen GPUs to
    /// `gpus` and returns the cost. Returns `None` if the pod does not fit.
    pub(crate) fn find_location(
        &self,
        model: &Model<'_>,
        states: &mut States,
        group: u32,
        node: u32,
        rule: ChangeRule,
        gpus: &mut Vec<u32>,
    ) -> Option<PlacementCost> {
        gpus.clear();
        let of = model.groups.get(group as usize)?;
        let range = model.node(node)?.gpus.clone();
        states.work += 1;
        if !self.has_room(&of.needs, node) {
            return None;
        }
        let slots = self.gpus.get(range.start as usize..range.end as usize)?;
        match of.units.as_slice() {
            [] => Some(PlacementCost::default()),
            [unit] => {
                let (cost, at) = cheapest_gpu(states, slots, *unit, rule)?;
                gpus.push(range.start + at);
                Some(cost)
            }
            units => {
                let (cost, chosen) = place_on_one_gpu(states, slots, units, rule)
                    .or_else(|| place_on_several_gpus(states, slots, units, rule))?;
                gpus.extend(chosen.iter().map(|at| range.start + at));
                Some(cost)
            }
        }
    }

    /// Places a pod. A location from [`Self::find_location`] is possible until the assignment
    /// changes. If a location is not possible, changes nothing and returns false.
    pub(crate) fn place(&mut self, model: &Model<'_>, states: &mut States, pod: u32, location: Location) -> bool {
        let Some(group) = group_of_pod(model, pod) else { return false };
        if !self.has_room(&group.needs, location.node) {
            return false;
        }
        let mut done = 0;
        for (unit, gpu) in group.units.iter().zip(&location.gpus) {
            let Some(state) = self.gpus.get_mut(*gpu as usize) else { break };
            let Some(next) = states.with_demand(*state, *unit) else { break };
            *state = next;
            done += 1;
        }
        if done < group.units.len() {
            for (unit, gpu) in group.units.iter().zip(&location.gpus).take(done) {
                self.remove_demand(states, *unit, *gpu);
            }
            return false;
        }
        self.update_free(&group.needs, location.node, u64::saturating_sub);
        if let Some(on) = self.pods.get_mut(location.node as usize) {
            on.push(pod);
        }
        if let Some(at) = self.locations.get_mut(pod as usize) {
            *at = Some(location);
        }
        true
    }

    /// Removes a pod and returns the pod's location. Returns `None` if the pod has no location.
    pub(crate) fn remove(&mut self, model: &Model<'_>, states: &mut States, pod: u32) -> Option<Location> {
        let group = group_of_pod(model, pod)?;
        let location = self.locations.get_mut(pod as usize)?.take()?;
        for (unit, gpu) in group.units.iter().zip(&location.gpus) {
            self.remove_demand(states, *unit, *gpu);
        }
        self.update_free(&group.needs, location.node, u64::saturating_add);
        if let Some(on) = self.pods.get_mut(location.node as usize)
            && let Some(place) = on.iter().rposition(|&other| other == pod)
        {
            on.remove(place);
        }
        Some(location)
    }

    fn remove_demand(&mut self, states: &mut States, unit: DemandId, gpu: u32) {
        if let Some(slot) = self.gpus.get_mut(gpu as usize)
            && let Some(before) = states.without_demand(*slot, unit)
        {
            *slot = before;
        }
    }

    fn update_free(&mut self, needs: &[(u16, u64)], node: u32, with: impl Fn(u64, u64) -> u64) {
        self.version += 1;
        if let Some(version) = self.versions.get_mut(node as usize) {
            *version = self.version;
        }
        let start = node as usize * self.dimensions;
        for (dimension, need) in needs {
            if let Some(free) = self.free.get_mut(start + usize::from(*dimension))
                && *free != u64::MAX
            {
                *free = with(*free, *need);
            }
        }
    }
}

pub(crate) fn group_of_pod<'m, 'a>(model: &'m Model<'a>, pod: u32) -> Option<&'m crate::model::PodGroup<'a>> {
    let group = (*model.group_of.get(pod as usize)?)?;
    model.groups.get(group as usize)
}

/// Returns the cost of changing a GPU from one state to another. Returns `None` if the rule forbids
/// the change.
pub(crate) fn change_cost(states: &States, from: StateId, to: StateId, rule: ChangeRule) -> Option<PlacementCost> {
    let (before, after) = (states.summary(from), states.summary(to));
    let allowed = match rule {
        ChangeRule::Stay => !after.changed,
        ChangeRule::NoFurther => !after.changed || before.changed,
        ChangeRule::Any | ChangeRule::Pack => true,
    };
    let changed = i64::from(after.changed) - i64::from(before.changed);
    let destroyed = i64::from(after.destroyed) - i64::from(before.destroyed);
    let room = before.room_value - after.room_value;
    let numbers = if rule == ChangeRule::Pack { [room, changed, destroyed] } else { [changed, destroyed, room] };
    allowed.then_some(PlacementCost(numbers))
}

/// Returns the cheapest GPU for one unit. Among GPUs of equal cost, returns the first. Returns
/// `None` if no GPU can serve the unit.
fn cheapest_gpu(
    states: &mut States,
    slots: &[StateId],
    unit: DemandId,
    rule: ChangeRule,
) -> Option<(PlacementCost, u32)> {
    let mut best: Option<(PlacementCost, u32)> = None;
    let mut last = None;
    for (&slot, at) in slots.iter().zip(0..) {
        if last == Some(slot) {
            continue;
        }
        last = Some(slot);
        let Some(next) = states.with_demand(slot, unit) else { continue };
        let Some(cost) = change_cost(states, slot, next, rule) else { continue };
        if best.is_none_or(|(least, _)| cost < least) {
            best = Some((cost, at));
        }
    }
    best
}

/// Places all units on one GPU, at the lowest cost. Returns `None` if no GPU can serve all units.
fn place_on_one_gpu(
    states: &mut States,
    slots: &[StateId],
    units: &[DemandId],
    rule: ChangeRule,
) -> Option<(PlacementCost, Vec<u32>)> {
    let mut best: Option<(PlacementCost, u32)> = None;
    let mut last = None;
    for (&slot, at) in slots.iter().zip(0..) {
        if last == Some(slot) {
            continue;
        }
        last = Some(slot);
        let mut state = Some(slot);
        for &unit in units {
            state = state.and_then(|state| states.with_demand(state, unit));
        }
        let Some(cost) = state.and_then(|state| change_cost(states, slot, state, rule)) else { continue };
        if best.is_none_or(|(least, _)| cost < least) {
            best = Some((cost, at));
        }
    }
    best.map(|(cost, at)| (cost, vec![at; units.len()]))
}

/// Places the units on several GPUs. Places each unit on the cheapest GPU. If that fails, searches
/// for a combination, in at most [`MAX_SPREAD_STEPS`] steps.
fn place_on_several_gpus(
    states: &mut States,
    slots: &[StateId],
    units: &[DemandId],
    rule: ChangeRule,
) -> Option<(PlacementCost, Vec<u32>)> {
    let mut now = slots.to_vec();
    let mut chosen = Vec::with_capacity(units.len());
    let mut sum = PlacementCost::default();
    for &unit in units {
        let Some((cost, at)) = cheapest_gpu(states, &now, unit, rule) else { break };
        let slot = now.get_mut(at as usize)?;
        *slot = states.with_demand(*slot, unit)?;
        sum = sum.plus(cost);
        chosen.push(at);
    }
    if chosen.len() == units.len() {
        return Some((sum, chosen));
    }
    // If placing equal units one by one fails, every other combination also fails.
    if units.windows(2).all(|pair| pair[0] == pair[1]) {
        return None;
    }
    let mut now = slots.to_vec();
    chosen.clear();
    let mut steps = 0;
    let found = search_combinations(states, &mut now, units, rule, &mut chosen, &mut steps);
    let cost = slots
        .iter()
        .zip(&now)
        .try_fold(PlacementCost::default(), |sum, (&from, &to)| Some(sum.plus(change_cost(states, from, to, rule)?)));
    cost.filter(|_| found).map(|cost| (cost, chosen))
}

fn search_combinations(
    states: &mut States,
    now: &mut Vec<StateId>,
    units: &[DemandId],
    rule: ChangeRule,
    chosen: &mut Vec<u32>,
    steps: &mut u32,
) -> bool {
    let Some((&unit, rest)) = units.split_first() else { return true };
    for at in 0..now.len() {
        *steps += 1;
        let slot = now[at];
        if *steps > MAX_SPREAD_STEPS {
            return false;
        }
        if now[..at].contains(&slot) {
            continue;
        }
        let Some(next) = states.with_demand(slot, unit).filter(|&next| change_cost(states, slot, next, rule).is_some())
        else {
            continue;
        };
        now[at] = next;
        chosen.push(crate::model::as_u32(at));
        if search_combinations(states, now, rest, rule, chosen, steps) {
            return true;
        }
        chosen.pop();
        now[at] = slot;
    }
    false
}
