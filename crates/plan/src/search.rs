//! Searches small parts of a cluster exactly. Up to its limits, the search tries every assignment
//! that can be better than the best known assignment.
//!
//! The search is depth first over the pods, highest priority first. The search skips a branch that
//! cannot be better than the best known assignment, even if all remaining pods are placed. The
//! search also skips a branch that leads to GPU states that it has already visited with at least as
//! many placed pods.
use std::collections::BTreeMap;

use crate::assignment::{Assignment, ChangeRule, Location, change_cost, group_of_pod};
use crate::model::Model;
use crate::partition::WHOLE_GPU;
use crate::states::{StateId, States};

/// Score of an assignment: the number of placed pods by priority, highest first, then the number of
/// GPUs that are not repartitioned.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PlanScore {
    pub(crate) placed: Vec<u32>,
    pub(crate) unchanged: u32,
}

/// A part of the cluster. All candidate nodes of a pod are in the same part.
#[derive(Debug, Clone, Default)]
pub(crate) struct ClusterPart {
    pub(crate) nodes: Vec<u32>,
    /// Groups of pods with candidate nodes, in order.
    pub(crate) groups: Vec<u32>,
}

impl ClusterPart {
    pub(crate) fn pods<'m>(&'m self, model: &'m Model<'_>) -> impl Iterator<Item = u32> + 'm {
        self.groups
            .iter()
            .filter_map(|&group| model.groups.get(group as usize))
            .flat_map(|group| group.pods.iter().copied())
    }

    pub(crate) fn gpus<'m>(&'m self, model: &'m Model<'_>) -> impl Iterator<Item = u32> + 'm {
        self.nodes.iter().filter_map(|&node| model.node(node)).flat_map(|node| node.gpus.clone())
    }

    /// Returns the priorities of the part's pods, highest first.
    fn priorities(&self, model: &Model<'_>) -> Vec<i32> {
        let mut levels: Vec<i32> = self
            .groups
            .iter()
            .filter_map(|&group| model.groups.get(group as usize))
            .map(|group| group.priority)
            .collect();
        levels.sort_unstable_by_key(|&level| std::cmp::Reverse(level));
        levels.dedup();
        levels
    }

    /// Returns the score if every pod is placed and no GPU is repartitioned.
    pub(crate) fn ideal_score(&self, model: &Model<'_>) -> PlanScore {
        let levels = self.priorities(model);
        let mut placed = vec![0; levels.len()];
        for &group in &self.groups {
            let Some(group) = model.groups.get(group as usize) else { continue };
            if let Some(level) = levels.iter().position(|&level| level == group.priority) {
                placed[level] += crate::model::as_u32(group.pods.len());
            }
        }
        PlanScore { placed, unchanged: crate::model::as_u32(self.gpus(model).count()) }
    }

    pub(crate) fn score(&self, model: &Model<'_>, states: &States, assignment: &Assignment) -> PlanScore {
        let levels = self.priorities(model);
        let mut placed = vec![0; levels.len()];
        for pod in self.pods(model) {
            let there = assignment.locations.get(pod as usize).is_some_and(Option::is_some);
            let Some(group) = group_of_pod(model, pod).filter(|_| there) else { continue };
            if let Some(level) = levels.iter().position(|&level| level == group.priority) {
                placed[level] += 1;
            }
        }
        let unchanged =
            |&gpu: &u32| assignment.gpus.get(gpu as usize).is_some_and(|&state| !states.summary(state).changed);
        PlanScore { placed, unchanged: crate::model::as_u32(self.gpus(model).filter(unchanged).count()) }
    }
}

/// Result of a search: an assignment that is better than the given assignment, if the search found
/// one.
pub(crate) struct SearchResult {
    pub(crate) better: Option<(PlanScore, Vec<(u32, Location)>)>,
    /// Number of steps used.
    pub(crate) steps: u32,
}

struct ExactSearch<'s, 'a> {
    model: &'s Model<'a>,
    states: &'s mut States,
    assignment: Assignment,
    rule: ChangeRule,
    nodes: &'s [u32],
    pods: Vec<u32>,
    level_of: Vec<usize>,
    /// A number for each node of the part. Nodes with equal numbers are interchangeable.
    equivalence_class: Vec<u32>,
    gpus: Vec<u32>,
    placed: Vec<u32>,
    best: PlanScore,
    found: Option<Vec<(u32, Location)>>,
    seen: BTreeMap<Vec<u32>, Vec<u32>>,
    steps: u32,
    max_steps: u32,
}

/// Maximum number of ways to spread one pod's units over a node's GPUs that are considered.
const MAX_SPREADS_PER_POD: usize = 24;

/// Searches for an assignment better than `best`. `assignment` must not place any pod of the part.
/// On return, `assignment` still places none of these pods.
pub(crate) fn search(
    model: &Model<'_>,
    states: &mut States,
    assignment: &mut Assignment,
    part: &ClusterPart,
    rule: ChangeRule,
    best: PlanScore,
    max_steps: u32,
) -> SearchResult {
    let levels = part.priorities(model);
    let mut pods: Vec<u32> = part.pods(model).collect();
    let weight = |pod: u32| group_of_pod(model, pod).map_or(0, |group| group.weight.memory);
    let index = |pod: u32| model.group_of.get(pod as usize).copied().flatten();
    let priority = |pod: u32| group_of_pod(model, pod).map_or(i32::MIN, |group| group.priority);
    pods.sort_by_key(|&pod| (std::cmp::Reverse(priority(pod)), std::cmp::Reverse(weight(pod)), index(pod), pod));
    let level_of =
        pods.iter().map(|&pod| levels.iter().position(|&level| level == priority(pod)).unwrap_or(0)).collect();
    let mut search = ExactSearch {
        equivalence_class: equivalence_classes(model, assignment, part),
        model,
        states,
        assignment: std::mem::take(assignment),
        rule,
        nodes: &part.nodes,
        gpus: part.gpus(model).collect(),
        placed: vec![0; levels.len()],
        pods,
        level_of,
        best,
        found: None,
        seen: BTreeMap::new(),
        steps: 0,
        max_steps,
    };
    search.search_from(0, false);
    *assignment = search.assignment;
    let score = search.best;
    SearchResult { better: search.found.map(|found| (score, found)), steps: search.steps }
}

/// Returns a number for each node of the part. Interchangeable nodes have equal numbers: they have
/// equal GPU states, equal free resources, and the same candidate pods.
fn equivalence_classes(model: &Model<'_>, assignment: &Assignment, part: &ClusterPart) -> Vec<u32> {
    let mut kinds = BTreeMap::new();
    let mut numbers = Vec::with_capacity(part.nodes.len());
    for &node in &part.nodes {
        let wanted_by = |group: &&u32| {
            model.groups.get(**group as usize).is_some_and(|group| group.nodes.binary_search(&node).is_ok())
        };
        let groups: Vec<u32> = part.groups.iter().filter(wanted_by).copied().collect();
        let next = crate::model::as_u32(kinds.len());
        numbers.push(
            *kinds.entry((sorted_states(model, assignment, node), assignment.free(node), groups)).or_insert(next),
        );
    }
    numbers
}

fn sorted_states(model: &Model<'_>, assignment: &Assignment, node: u32) -> Vec<StateId> {
    let range = model.node(node).map_or(0..0, |node| node.gpus.clone());
    let mut states = assignment.gpus.get(range.start as usize..range.end as usize).unwrap_or(&[]).to_vec();
    states.sort_unstable();
    states
}

impl ExactSearch<'_, '_> {
    /// Tries each choice for the pod at this position, each with all choices for the later pods.
    fn search_from(&mut self, at: usize, skipped: bool) {
        self.steps += 1;
        if self.steps > self.max_steps || !self.can_improve(at) {
            return;
        }
        let Some(&pod) = self.pods.get(at) else { return self.record_assignment() };
        let key = self.state_key(at, skipped);
        if let Some(before) = self.seen.get(&key)
            && *before >= self.placed
        {
            return;
        }
        self.seen.insert(key, self.placed.clone());

        let group = self.model.group_of.get(pod as usize).copied().flatten();
        let same_group = |other: Option<&u32>| {
            other.is_some_and(|&other| self.model.group_of.get(other as usize).copied().flatten() == group)
        };
        // If the search skips one of several equal pods, it also skips the later pods of the group.
        let forced = skipped && at.checked_sub(1).is_some_and(|before| same_group(self.pods.get(before)));
        if !forced {
            for location in self.locations_for(pod) {
                if !self.assignment.place(self.model, self.states, pod, location) {
                    continue;
                }
                self.placed[self.level_of[at]] += 1;
                self.search_from(at + 1, false);
                self.placed[self.level_of[at]] -= 1;
                self.assignment.remove(self.model, self.states, pod);
            }
        }
        self.search_from(at + 1, true);
    }

    fn record_assignment(&mut self) {
        let changed = |&&gpu: &&u32| {
            self.assignment.gpus.get(gpu as usize).is_some_and(|&state| self.states.summary(state).changed)
        };
        let changed = self.gpus.iter().filter(changed).count();
        let unchanged = crate::model::as_u32(self.gpus.len() - changed);
        let score = PlanScore { placed: self.placed.clone(), unchanged };
        if score > self.best {
            self.best = score;
            let location = |&pod: &u32| Some((pod, self.assignment.locations.get(pod as usize)?.clone()?));
            self.found = Some(self.pods.iter().filter_map(location).collect());
        }
    }

    /// Returns whether the best possible continuation is better than the best known assignment.
    fn can_improve(&self, at: usize) -> bool {
        let mut room = (0_u64, 0_u64); // Remaining memory and compute.
        let mut unchanged = 0;
        for &gpu in &self.gpus {
            let Some(&state) = self.assignment.gpus.get(gpu as usize) else { continue };
            let summary = self.states.summary(state);
            room.0 += u64::from(WHOLE_GPU.saturating_sub(summary.used.memory));
            room.1 += u64::from(WHOLE_GPU.saturating_sub(summary.used.compute));
            unchanged += u32::from(!summary.changed);
        }
        // Compensate for the rounding down of each part.
        let slack = self.gpus.len() as u64 * 64;
        room = (room.0 + slack, room.1 + slack);
        let mut rest = at;
        for (level, &best) in self.best.placed.iter().enumerate() {
            let mut weights = (Vec::new(), Vec::new());
            while let Some(&pod) = self.pods.get(rest)
                && self.level_of[rest] == level
            {
                let weight = group_of_pod(self.model, pod).map(|group| group.weight).unwrap_or_default();
                weights.0.push(u64::from(weight.memory));
                weights.1.push(u64::from(weight.compute));
                rest += 1;
            }
            let more = count_that_fit(&mut weights.0, room.0).min(count_that_fit(&mut weights.1, room.1));
            let most = self.placed.get(level).copied().unwrap_or(0) + crate::model::as_u32(more);
            if most != best {
                return most > best;
            }
            // An assignment as good as the best known assignment places these pods, so it uses at
            // least their weights.
            room.0 = room.0.saturating_sub(weights.0.iter().take(more).sum());
            room.1 = room.1.saturating_sub(weights.1.iter().take(more).sum());
        }
        unchanged > self.best.unchanged
    }

    /// Returns the part of the state that determines the possible continuations.
    fn state_key(&self, at: usize, skipped: bool) -> Vec<u32> {
        let mut nodes: Vec<Vec<u32>> = Vec::with_capacity(self.nodes.len());
        for (&node, &equivalence_class) in self.nodes.iter().zip(&self.equivalence_class) {
            let mut key = vec![equivalence_class];
            key.extend(sorted_states(self.model, &self.assignment, node));
            for &free in self.assignment.free(node) {
                key.push(u32::try_from(free >> 32).unwrap_or(u32::MAX));
                key.push(u32::try_from(free & u64::from(u32::MAX)).unwrap_or(u32::MAX));
            }
            nodes.push(key);
        }
        nodes.sort_unstable();
        let mut key = vec![crate::model::as_u32(at) << 1 | u32::from(skipped)];
        key.extend(nodes.into_iter().flatten());
        key
    }

    /// Returns the locations for a pod, cheapest first, up to [`MAX_SPREADS_PER_POD`] for each node
    /// and the cheapest one. Includes only one of several interchangeable locations.
    fn locations_for(&mut self, pod: u32) -> Vec<Location> {
        let Some(group_id) = self.model.group_of.get(pod as usize).copied().flatten() else { return Vec::new() };
        let model = self.model;
        let Some(group) = model.groups.get(group_id as usize) else { return Vec::new() };
        let mut options = Vec::new();
        let mut seen = Vec::new();
        let mut gpus = Vec::new();
        let nodes = self.nodes;
        for (at, &node) in nodes.iter().enumerate() {
            let equivalence_class = self.equivalence_class.get(at).copied();
            if group.nodes.binary_search(&node).is_err() {
                continue;
            }
            let kind = (
                equivalence_class,
                sorted_states(self.model, &self.assignment, node),
                self.assignment.free(node).to_vec(),
            );
            if seen.contains(&kind) {
                continue;
            }
            seen.push(kind);
            let Some(cost) =
                self.assignment.find_location(self.model, self.states, group_id, node, self.rule, &mut gpus)
            else {
                continue;
            };
            options.push((cost, Location { node, gpus: gpus.clone() }));
            self.add_spreads(&group.units, node, &mut options);
        }
        options.sort();
        options.dedup_by(|next, first| next.1 == first.1);
        options.into_iter().map(|(_, location)| location).collect()
    }

    /// Adds ways to spread units over a node's GPUs to `options`, at most [`MAX_SPREADS_PER_POD`].
    /// Includes only one of several interchangeable combinations.
    fn add_spreads(
        &mut self,
        units: &[u16],
        node: u32,
        options: &mut Vec<(crate::assignment::PlacementCost, Location)>,
    ) {
        let range = self.model.node(node).map_or(0..0, |node| node.gpus.clone());
        let slots = self.assignment.gpus.get(range.start as usize..range.end as usize).unwrap_or(&[]).to_vec();
        let mut combinations: Vec<(Vec<StateId>, Vec<u32>)> = vec![(slots.clone(), Vec::new())];
        for &unit in units {
            let mut next: Vec<(Vec<StateId>, Vec<u32>)> = Vec::new();
            for (now, chosen) in &combinations {
                for at in 0..now.len() {
                    if now[..at].contains(&now[at]) && units.len() == 1 {
                        continue;
                    }
                    let Some(state) = self.states.with_demand(now[at], unit) else { continue };
                    if self.rule == ChangeRule::Stay && self.states.summary(state).changed {
                        continue;
                    }
                    let mut states = now.clone();
                    states[at] = state;
                    let mut chosen = chosen.clone();
                    chosen.push(range.start + crate::model::as_u32(at));
                    next.push((states, chosen));
                }
            }
            // Ways with the same resulting states count as one way, even if the states are on
            // different GPUs.
            let canonical = |states: &[StateId]| {
                let mut states = states.to_vec();
                states.sort_unstable();
                states
            };
            next.sort_by_cached_key(|(states, chosen)| (canonical(states), chosen.clone()));
            next.dedup_by(|next, first| canonical(&next.0) == canonical(&first.0));
            next.truncate(MAX_SPREADS_PER_POD);
            combinations = next;
        }
        for (now, chosen) in combinations {
            if chosen.len() == units.len() && !units.is_empty() {
                let steps = slots.iter().zip(&now).map(|(&from, &to)| change_cost(self.states, from, to, self.rule));
                let Some(cost) = steps.reduce(|sum, cost| Some(sum?.plus(cost?))).flatten() else { continue };
                options.push((cost, Location { node, gpus: chosen }));
            }
        }
    }
}

/// Sorts the weights in ascending order. Returns how many of the smallest weights fit into `room`
/// together.
fn count_that_fit(weights: &mut [u64], mut room: u64) -> usize {
    weights.sort_unstable();
    let fits = |weight: &&u64| match room.checked_sub(**weight) {
        Some(left) => {
            room = left;
            true
        }
        None => false,
    };
    weights.iter().take_while(fits).count()
}
