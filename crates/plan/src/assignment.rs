//! Which waiting pod is where, while a plan is being made: what it would cost to put a pod on a
//! node, putting it there, taking it away.
use std::collections::BTreeMap;

use crate::model::Model;
use crate::states::{DemandId, StateId, States};

/// Where a pod is: its node, and the GPU of each of its units.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Location {
    pub(crate) node: u32,
    pub(crate) gpus: Vec<u32>,
}

/// What putting a pod somewhere costs: less is better, and each number is more than all of the
/// next. Which number is which, the [`Rule`] says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Cost([i64; 3]);

impl Cost {
    pub(crate) fn plus(self, other: Self) -> Self {
        Self(std::array::from_fn(|at| self.0[at] + other.0[at]))
    }
}

/// What may be done to GPUs for a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rule {
    /// Only slices that exist.
    Stay,
    /// Those, and GPUs that are cut anew already.
    NoFurther,
    /// Anything, and of that what cuts fewest GPUs anew and leaves most of what is there.
    Any,
    /// Anything, and of that what leaves most room for pods to come.
    Pack,
}

/// What units cost, and the choice that costs it.
type Row = Vec<(u64, Option<Cost>)>;

/// Costs as far as asked: by rule and shape, then by node, each with the version of the node that
/// it is of.
#[derive(Debug, Default)]
pub(crate) struct Costs {
    rows: BTreeMap<(Rule, u32), Row>,
    scratch: Vec<u32>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Assignment {
    /// By GPU.
    pub(crate) gpus: Vec<StateId>,
    /// By node and dimension.
    free: Vec<u64>,
    dimensions: usize,
    /// By pod.
    pub(crate) locations: Vec<Option<Location>>,
    /// By node, in the order of their coming.
    pub(crate) pods: Vec<Vec<u32>>,
    /// By node: changes with its GPUs, and is never the same again.
    versions: Vec<u64>,
    version: u64,
}

/// Steps of one search for GPUs of a node for a pod with several kinds of units.
const MAX_SPREAD_STEPS: u32 = 500;

impl Assignment {
    /// No pod anywhere.
    pub(crate) fn new(model: &Model<'_>, states: &mut States) -> Self {
        // A class that cannot be packed with nothing does not exist: nothing is what it is now.
        let gpus = model.gpus.iter().map(|gpu| states.base(gpu.class).unwrap_or(StateId::MAX)).collect();
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

    /// The cost of the cheapest way to put one more pod of a group on a node, remembered as long as
    /// the node's GPUs are what they were. What a pod needs besides GPUs does not matter to the
    /// cost, so that pods that want the same of GPUs are asked for once.
    pub(crate) fn cost(
        &self,
        model: &Model<'_>,
        states: &mut States,
        costs: &mut Costs,
        group: u32,
        node: u32,
        rule: Rule,
    ) -> Option<Cost> {
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
            *cost = self.offer(model, states, group, node, rule, &mut costs.scratch);
        }
        *cost
    }

    /// The cheapest way to put one more pod of a group on a node; the GPUs go to `gpus`.
    pub(crate) fn offer(
        &self,
        model: &Model<'_>,
        states: &mut States,
        group: u32,
        node: u32,
        rule: Rule,
        gpus: &mut Vec<u32>,
    ) -> Option<Cost> {
        gpus.clear();
        let of = model.groups.get(group as usize)?;
        let range = model.node(node)?.gpus.clone();
        states.work += 1;
        if !self.has_room(&of.needs, node) {
            return None;
        }
        let slots = self.gpus.get(range.start as usize..range.end as usize)?;
        match of.units.as_slice() {
            [] => Some(Cost::default()),
            [unit] => {
                let (cost, at) = cheapest(states, slots, *unit, rule)?;
                gpus.push(range.start + at);
                Some(cost)
            }
            units => {
                let (cost, chosen) =
                    together(states, slots, units, rule).or_else(|| spread(states, slots, units, rule))?;
                gpus.extend(chosen.iter().map(|at| range.start + at));
                Some(cost)
            }
        }
    }

    /// Puts a pod somewhere. What was offered can be done; a location that was not may not be possible,
    /// and then nothing is done.
    pub(crate) fn put(&mut self, model: &Model<'_>, states: &mut States, pod: u32, location: Location) -> bool {
        let Some(group) = group(model, pod) else { return false };
        if !self.has_room(&group.needs, location.node) {
            return false;
        }
        let mut done = 0;
        for (unit, gpu) in group.units.iter().zip(&location.gpus) {
            let Some(state) = self.gpus.get_mut(*gpu as usize) else { break };
            let Some(next) = states.with(*state, *unit) else { break };
            *state = next;
            done += 1;
        }
        if done < group.units.len() {
            for (unit, gpu) in group.units.iter().zip(&location.gpus).take(done) {
                self.take_back(states, *unit, *gpu);
            }
            return false;
        }
        self.account(&group.needs, location.node, u64::saturating_sub);
        if let Some(on) = self.pods.get_mut(location.node as usize) {
            on.push(pod);
        }
        if let Some(at) = self.locations.get_mut(pod as usize) {
            *at = Some(location);
        }
        true
    }

    /// Takes a pod away; where it was.
    pub(crate) fn remove(&mut self, model: &Model<'_>, states: &mut States, pod: u32) -> Option<Location> {
        let group = group(model, pod)?;
        let location = self.locations.get_mut(pod as usize)?.take()?;
        for (unit, gpu) in group.units.iter().zip(&location.gpus) {
            self.take_back(states, *unit, *gpu);
        }
        self.account(&group.needs, location.node, u64::saturating_add);
        if let Some(on) = self.pods.get_mut(location.node as usize)
            && let Some(place) = on.iter().rposition(|&other| other == pod)
        {
            on.remove(place);
        }
        Some(location)
    }

    fn take_back(&mut self, states: &mut States, unit: DemandId, gpu: u32) {
        if let Some(slot) = self.gpus.get_mut(gpu as usize)
            && let Some(before) = states.without(*slot, unit)
        {
            *slot = before;
        }
    }

    fn account(&mut self, needs: &[(u16, u64)], node: u32, with: impl Fn(u64, u64) -> u64) {
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

pub(crate) fn group<'m, 'a>(model: &'m Model<'a>, pod: u32) -> Option<&'m crate::model::Group<'a>> {
    let group = (*model.group_of.get(pod as usize)?)?;
    model.groups.get(group as usize)
}

/// What a step from one state of a GPU to another costs, where the rule allows it.
pub(crate) fn step(states: &States, from: StateId, to: StateId, rule: Rule) -> Option<Cost> {
    let (before, after) = (states.summary(from), states.summary(to));
    let allowed = match rule {
        Rule::Stay => !after.changed,
        Rule::NoFurther => !after.changed || before.changed,
        Rule::Any | Rule::Pack => true,
    };
    let changed = i64::from(after.changed) - i64::from(before.changed);
    let destroyed = i64::from(after.destroyed) - i64::from(before.destroyed);
    let room = before.worth - after.worth;
    let numbers = if rule == Rule::Pack { [room, changed, destroyed] } else { [changed, destroyed, room] };
    allowed.then_some(Cost(numbers))
}

/// The cheapest GPU for one unit, the first of equals.
fn cheapest(states: &mut States, slots: &[StateId], unit: DemandId, rule: Rule) -> Option<(Cost, u32)> {
    let mut best: Option<(Cost, u32)> = None;
    let mut last = None;
    for (&slot, at) in slots.iter().zip(0..) {
        if last == Some(slot) {
            continue;
        }
        last = Some(slot);
        let Some(next) = states.with(slot, unit) else { continue };
        let Some(cost) = step(states, slot, next, rule) else { continue };
        if best.is_none_or(|(least, _)| cost < least) {
            best = Some((cost, at));
        }
    }
    best
}

/// All units on one GPU.
fn together(states: &mut States, slots: &[StateId], units: &[DemandId], rule: Rule) -> Option<(Cost, Vec<u32>)> {
    let mut best: Option<(Cost, u32)> = None;
    let mut last = None;
    for (&slot, at) in slots.iter().zip(0..) {
        if last == Some(slot) {
            continue;
        }
        last = Some(slot);
        let mut state = Some(slot);
        for &unit in units {
            state = state.and_then(|state| states.with(state, unit));
        }
        let Some(cost) = state.and_then(|state| step(states, slot, state, rule)) else { continue };
        if best.is_none_or(|(least, _)| cost < least) {
            best = Some((cost, at));
        }
    }
    best.map(|(cost, at)| (cost, vec![at; units.len()]))
}

/// The units over several GPUs: each where it is cheapest, and if that does not work out, a search.
fn spread(states: &mut States, slots: &[StateId], units: &[DemandId], rule: Rule) -> Option<(Cost, Vec<u32>)> {
    let mut now = slots.to_vec();
    let mut chosen = Vec::with_capacity(units.len());
    let mut sum = Cost::default();
    for &unit in units {
        let Some((cost, at)) = cheapest(states, &now, unit, rule) else { break };
        let slot = now.get_mut(at as usize)?;
        *slot = states.with(*slot, unit)?;
        sum = sum.plus(cost);
        chosen.push(at);
    }
    if chosen.len() == units.len() {
        return Some((sum, chosen));
    }
    // Equal units fill GPUs independently of each other: where one after the other fails, every way
    // does.
    if units.windows(2).all(|pair| pair[0] == pair[1]) {
        return None;
    }
    let mut now = slots.to_vec();
    chosen.clear();
    let mut steps = 0;
    let found = search(states, &mut now, units, rule, &mut chosen, &mut steps);
    let cost = slots
        .iter()
        .zip(&now)
        .try_fold(Cost::default(), |sum, (&from, &to)| Some(sum.plus(step(states, from, to, rule)?)));
    cost.filter(|_| found).map(|cost| (cost, chosen))
}

fn search(
    states: &mut States,
    now: &mut Vec<StateId>,
    units: &[DemandId],
    rule: Rule,
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
        let Some(next) = states.with(slot, unit).filter(|&next| step(states, slot, next, rule).is_some()) else {
            continue;
        };
        now[at] = next;
        chosen.push(crate::model::as_u32(at));
        if search(states, now, rest, rule, chosen, steps) {
            return true;
        }
        chosen.pop();
        now[at] = slot;
    }
    false
}
