//! Places any number of pods, one by one. Moves up to two placed pods if another pod then fits.
use std::collections::BTreeMap;

use crate::assignment::{Assignment, ChangeRule, CostCache, Location, PlacementCost, change_cost, group_of_pod};
use crate::model::Model;
use crate::search::ClusterPart;
use crate::states::{DemandId, States};

pub(crate) struct GreedyPlacer<'g, 'a> {
    model: &'g Model<'a>,
    pub(crate) states: &'g mut States,
    pub(crate) assignment: Assignment,
    /// Values of `states.work` at which the search for moves stops: for all pods, and for the
    /// current group.
    work_limit: u64,
    group_limit: u64,
    /// Version of the assignment. Alternatives that were cached in an older epoch can be wrong.
    epoch: u64,
    /// For each group: the epoch, the rule, and some nodes where one of the group's pods fits under
    /// this rule.
    alternatives: BTreeMap<u32, (u64, ChangeRule, Vec<u32>)>,
    costs: &'g mut CostCache,
}

/// Strategy for placing pods one after the other. No strategy is best for every cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PlacementStyle {
    /// Like `FewestChanges`, but first places pods on their nodes in the previous plan.
    AsPlanned,
    /// Uses existing slices before it repartitions GPUs, and places small pods first. Repartitions
    /// few GPUs.
    FewestChanges,
    /// Places each pod where the most free capacity remains, small pods first. This style can place
    /// more pods than the others if few units are free.
    Packed,
    /// Like `Packed`, but places large pods first.
    LargeFirst,
}

/// Maximum number of alternative nodes that are cached for each group.
const ALTERNATIVES_PER_GROUP: usize = 4;
/// Divisor of the remaining work for moving pods. Each group may use one of the resulting parts.
const GROUP_WORK_DIVISOR: u64 = 8;
/// Maximum number of pods moved in a chain. Each move frees slices for the previous pod.
const MAX_MOVED_PODS_IN_CHAIN: u32 = 2;

impl<'g, 'a> GreedyPlacer<'g, 'a> {
    pub(crate) fn new(
        model: &'g Model<'a>,
        states: &'g mut States,
        costs: &'g mut CostCache,
        assignment: Assignment,
    ) -> Self {
        Self {
            model,
            states,
            assignment,
            work_limit: 0,
            group_limit: 0,
            epoch: 0,
            alternatives: BTreeMap::new(),
            costs,
        }
    }

    /// Places the pods of a part, priority by priority. Pods of a higher priority can be moved for
    /// pods of a lower priority, but remain placed.
    pub(crate) fn place_part(&mut self, part: &ClusterPart, style: PlacementStyle, work: u64) {
        self.work_limit = self.states.work.saturating_add(work);
        let mut groups: Vec<u32> = part.groups.clone();
        let model = self.model;
        let first = |group_id: u32| model.groups.get(group_id as usize);
        groups.sort_by_key(|&group_id| {
            first(group_id).map(|group| {
                let weight = i64::from(group.weight.memory.max(group.weight.compute));
                let weight = if style == PlacementStyle::LargeFirst { -weight } else { weight };
                // Place small pods first, because more small pods fit, except in style
                // `LargeFirst`. Among pods of equal size, start with pods that have the fewest
                // units, and then the fewest candidate nodes.
                (
                    std::cmp::Reverse(group.priority),
                    weight,
                    group.units.len(),
                    group.nodes.len(),
                    group.pods.first().copied(),
                )
            })
        });
        let level = |group_id: &u32| first(*group_id).map(|group| group.priority);
        for level in groups.chunk_by(|a, b| level(a) == level(b)) {
            // Styles for few changes place pods without repartitioning first, so that existing
            // slices are still free for pods that can use them.
            if style == PlacementStyle::AsPlanned {
                for &group_id in level {
                    self.place_as_planned(group_id);
                }
            }
            let few_changes = matches!(style, PlacementStyle::AsPlanned | PlacementStyle::FewestChanges);
            let rules: &[ChangeRule] =
                if few_changes { &[ChangeRule::Stay, ChangeRule::Any] } else { &[ChangeRule::Pack] };
            for &rule in rules {
                for &group_id in level {
                    self.place_group(group_id, rule);
                }
            }
        }
        self.restore_partitions(part);
    }

    fn place_as_planned(&mut self, group_id: u32) {
        let Some(of) = self.model.groups.get(group_id as usize) else { return };
        for &pod in &of.pods {
            let node = self.model.planned.get(pod as usize).copied().flatten();
            if let Some(node) = node.filter(|node| of.nodes.binary_search(node).is_ok()) {
                self.place_on_node(group_id, pod, node, ChangeRule::Stay);
            }
        }
    }

    fn place_group(&mut self, group_id: u32, rule: ChangeRule) {
        let Some(of) = self.model.groups.get(group_id as usize) else { return };
        let mut offers: Vec<Option<PlacementCost>> = Vec::with_capacity(of.nodes.len());
        for &node in &of.nodes {
            offers.push(self.assignment.cost(self.model, self.states, self.costs, group_id, node, rule));
        }
        let mut moving = true;
        // A group that cannot be placed must not use the work that other groups need.
        self.group_limit = self.states.work + self.work_limit.saturating_sub(self.states.work) / GROUP_WORK_DIVISOR;
        for &pod in &of.pods {
            if self.assignment.locations.get(pod as usize).is_some_and(Option::is_some) {
                continue;
            }
            let best = offers.iter().enumerate().filter_map(|(at, offer)| offer.map(|cost| (cost, at))).min();
            if let Some((_, at)) = best {
                let node = of.nodes[at];
                self.place_on_node(group_id, pod, node, rule);
                offers[at] = self.assignment.cost(self.model, self.states, self.costs, group_id, node, rule);
                continue;
            }
            if !moving
                || !(self.place_by_moving_pods(pod, group_id, rule, MAX_MOVED_PODS_IN_CHAIN, &mut vec![pod])
                    || self.move_two_pods(pod, group_id, rule))
            {
                moving = false;
                if rule == ChangeRule::Stay {
                    break;
                }
                continue;
            }
            self.epoch += 1;
            // Other pods moved, so the pod may now fit on any node.
            for (at, &node) in of.nodes.iter().enumerate() {
                offers[at] = self.assignment.cost(self.model, self.states, self.costs, group_id, node, rule);
            }
        }
    }

    fn place_on_node(&mut self, group_id: u32, pod: u32, node: u32, rule: ChangeRule) -> bool {
        let mut gpus = Vec::new();
        let offered = self.assignment.find_location(self.model, self.states, group_id, node, rule, &mut gpus).is_some();
        self.epoch += 1;
        offered && self.assignment.place(self.model, self.states, pod, Location { node, gpus })
    }

    /// Places a pod by moving a second pod. This move may require moving a third pod. Returns
    /// whether the pod is placed. If the pod is not placed, changes nothing.
    fn place_by_moving_pods(
        &mut self,
        pod: u32,
        group_id: u32,
        rule: ChangeRule,
        chain: u32,
        moved: &mut Vec<u32>,
    ) -> bool {
        let model = self.model;
        let Some(of) = model.groups.get(group_id as usize) else { return false };
        let mut gpus = Vec::new();
        for &node in &of.nodes {
            let others = self.assignment.pods.get(node as usize).cloned().unwrap_or_default();
            let mut seen: Vec<(u32, Vec<u32>)> = Vec::new();
            for other in others {
                if self.states.work > self.group_limit {
                    return false;
                }
                let Some(other_group_id) = model.group_of.get(other as usize).copied().flatten() else { continue };
                if other_group_id == group_id
                    || moved.contains(&other)
                    || !self.could_removal_help(group_id, node, other, other_group_id, rule)
                {
                    continue;
                }
                let Some(location) = self.assignment.locations.get(other as usize).cloned().flatten() else { continue };
                let kind = (other_group_id, location.gpus.clone());
                if seen.contains(&kind) {
                    continue;
                }
                seen.push(kind);
                self.assignment.remove(model, self.states, other);
                let offered =
                    self.assignment.find_location(model, self.states, group_id, node, rule, &mut gpus).is_some();
                if offered && self.assignment.place(model, self.states, pod, Location { node, gpus: gpus.clone() }) {
                    if self.relocate_pod(other, other_group_id, node, rule) {
                        return true;
                    }
                    if chain > 1 {
                        moved.push(other);
                        let relocated = self.place_by_moving_pods(other, other_group_id, rule, chain - 1, moved);
                        moved.pop();
                        if relocated {
                            return true;
                        }
                    }
                    self.assignment.remove(model, self.states, pod);
                }
                self.assignment.place(model, self.states, other, location);
            }
        }
        false
    }

    /// Places a pod by moving two other pods from one GPU. Returns whether all three pods are
    /// placed. If a pod is not placed, changes nothing.
    fn move_two_pods(&mut self, pod: u32, group_id: u32, rule: ChangeRule) -> bool {
        let model = self.model;
        let Some(of) = model.groups.get(group_id as usize) else { return false };
        let &[unit] = of.units.as_slice() else { return false };
        for &node in &of.nodes {
            let range = model.node(node).map_or(0..0, |node| node.gpus.clone());
            if !self.assignment.has_room(&of.needs, node) {
                continue;
            }
            for gpu in range {
                let pods = self.pods_on(node, gpu);
                let mut seen: Vec<(Option<u32>, Option<u32>)> = Vec::new();
                for (at, &one) in pods.iter().enumerate() {
                    for &other in pods.iter().skip(at + 1) {
                        if self.states.work > self.group_limit {
                            return false;
                        }
                        let of = |pod: u32| model.group_of.get(pod as usize).copied().flatten();
                        let pair = (of(one), of(other));
                        if seen.contains(&pair) || pair.0 == Some(group_id) || pair.1 == Some(group_id) {
                            continue;
                        }
                        seen.push(pair);
                        if self.replace_two_pods(pod, unit, node, gpu, [one, other], rule) {
                            return true;
                        }
                    }
                }
            }
        }
        false
    }

    /// Places `pod` on a GPU in place of two other pods, if they can be placed elsewhere.
    fn replace_two_pods(
        &mut self,
        pod: u32,
        unit: DemandId,
        node: u32,
        gpu: u32,
        others: [u32; 2],
        rule: ChangeRule,
    ) -> bool {
        let model = self.model;
        // First check whether the pod would fit according to the GPU's states.
        let mut state = self.assignment.gpus.get(gpu as usize).copied();
        for other in others {
            let Some(&[other_unit]) = group_of_pod(model, other).map(|group| group.units.as_slice()) else {
                return false;
            };
            state = state.and_then(|state| self.states.without_demand(state, other_unit));
        }
        let Some(less) = state else { return false };
        if self.states.with_demand(less, unit).is_none_or(|then| change_cost(self.states, less, then, rule).is_none()) {
            return false;
        }
        let before: Vec<(u32, Location)> = others
            .iter()
            .filter_map(|&other| Some((other, self.assignment.remove(model, self.states, other)?)))
            .collect();
        if self.assignment.place(model, self.states, pod, Location { node, gpus: vec![gpu] }) {
            let mut relocated = Vec::new();
            for other in others {
                let group_id = model.group_of.get(other as usize).copied().flatten();
                if !group_id.is_some_and(|group_id| self.relocate_pod(other, group_id, node, rule)) {
                    break;
                }
                relocated.push(other);
            }
            if relocated.len() == others.len() {
                return true;
            }
            for other in relocated {
                self.assignment.remove(model, self.states, other);
            }
            self.assignment.remove(model, self.states, pod);
        }
        for (other, location) in before {
            self.assignment.place(model, self.states, other, location);
        }
        false
    }

    /// Returns whether a pod of group `group_id` could fit on the node if `other` were removed.
    /// Returns false only if removal certainly cannot help.
    fn could_removal_help(
        &mut self,
        group_id: u32,
        node: u32,
        other: u32,
        other_group_id: u32,
        rule: ChangeRule,
    ) -> bool {
        let group = |group_id: u32| self.model.groups.get(group_id as usize);
        let (Some(of), Some(others)) = (group(group_id), group(other_group_id)) else { return false };
        // The node may lack CPU or memory rather than a GPU.
        if !self.assignment.has_room(&of.needs, node) {
            return true;
        }
        let (&[unit], &[other_unit]) = (of.units.as_slice(), others.units.as_slice()) else { return true };
        // Check whether the pod would fit on the other pod's GPU without the other pod.
        let gpu = self
            .assignment
            .locations
            .get(other as usize)
            .and_then(Option::as_ref)
            .and_then(|location| location.gpus.first().copied());
        let state = gpu.and_then(|gpu| self.assignment.gpus.get(gpu as usize).copied());
        let Some(less) = state.and_then(|state| self.states.without_demand(state, other_unit)) else { return false };
        self.states.with_demand(less, unit).is_some_and(|then| change_cost(self.states, less, then, rule).is_some())
    }

    /// Places a pod that was moved from `from`, on the cheapest of a few nodes where it fits. These
    /// nodes include `from`. Returns whether the pod is placed.
    fn relocate_pod(&mut self, pod: u32, group_id: u32, from: u32, rule: ChangeRule) -> bool {
        let known = self.alternatives.get(&group_id).filter(|known| (known.0, known.1) == (self.epoch, rule));
        let mut nodes = match known {
            Some((_, _, alternatives)) => alternatives.clone(),
            None => self.find_alternatives(group_id, rule),
        };
        if !nodes.contains(&from) {
            nodes.push(from);
        }
        let mut best: Option<(PlacementCost, u32)> = None;
        for node in nodes {
            let offer = self.assignment.cost(self.model, self.states, self.costs, group_id, node, rule);
            if let Some(cost) = offer
                && best.is_none_or(|(least, _)| cost < least)
            {
                best = Some((cost, node));
            }
        }
        let Some((_, node)) = best else { return false };
        let mut gpus = Vec::new();
        self.assignment.find_location(self.model, self.states, group_id, node, rule, &mut gpus).is_some()
            && self.assignment.place(self.model, self.states, pod, Location { node, gpus })
    }

    /// Returns the first few nodes where a pod of a group currently fits.
    fn find_alternatives(&mut self, group_id: u32, rule: ChangeRule) -> Vec<u32> {
        let nodes = self.model.groups.get(group_id as usize).map_or(&[][..], |group| &group.nodes);
        let mut alternatives = Vec::new();
        for &node in nodes {
            if self.assignment.cost(self.model, self.states, self.costs, group_id, node, rule).is_some() {
                alternatives.push(node);
            }
            if alternatives.len() == ALTERNATIVES_PER_GROUP {
                break;
            }
        }
        self.alternatives.insert(group_id, (self.epoch, rule, alternatives.clone()));
        alternatives
    }

    /// Restores the partitions of GPUs whose pods can be placed elsewhere without repartitioning a
    /// further GPU.
    fn restore_partitions(&mut self, part: &ClusterPart) {
        let changed = |greedy: &Self, gpu: u32| {
            greedy.assignment.gpus.get(gpu as usize).is_some_and(|&state| greedy.states.summary(state).changed)
        };
        let mut candidates: Vec<(usize, u32, u32)> = Vec::new();
        for &node in &part.nodes {
            let range = self.model.node(node).map_or(0..0, |node| node.gpus.clone());
            for gpu in range.filter(|&gpu| changed(self, gpu)) {
                candidates.push((self.pods_on(node, gpu).len(), node, gpu));
            }
        }
        candidates.sort_unstable();
        for (_, node, gpu) in candidates {
            if self.states.work > self.work_limit || !changed(self, gpu) {
                continue;
            }
            let pods = self.pods_on(node, gpu);
            let before: Vec<(u32, Location)> = pods
                .iter()
                .filter_map(|&pod| Some((pod, self.assignment.remove(self.model, self.states, pod)?)))
                .collect();
            self.epoch += 1;
            let mut relocated = Vec::new();
            for &pod in &pods {
                let group_id = self.model.group_of.get(pod as usize).copied().flatten();
                if !group_id.is_some_and(|group_id| self.relocate_pod(pod, group_id, node, ChangeRule::NoFurther)) {
                    break;
                }
                relocated.push(pod);
                self.epoch += 1;
            }
            if relocated.len() < pods.len() {
                for pod in relocated {
                    self.assignment.remove(self.model, self.states, pod);
                }
                for (pod, location) in before {
                    self.assignment.place(self.model, self.states, pod, location);
                }
                self.epoch += 1;
            }
        }
    }

    fn pods_on(&self, node: u32, gpu: u32) -> Vec<u32> {
        let on = self.assignment.pods.get(node as usize).map_or(&[][..], Vec::as_slice);
        let uses = |pod: &u32| {
            let location = self.assignment.locations.get(*pod as usize).and_then(Option::as_ref);
            location.is_some_and(|location| location.gpus.contains(&gpu))
        };
        let mut pods: Vec<u32> = on.iter().copied().filter(uses).collect();
        // Start with the pods that are hardest to place.
        pods.sort_by_key(|&pod| {
            (std::cmp::Reverse(group_of_pod(self.model, pod).map_or(0, |group| group.weight.memory)), pod)
        });
        pods
    }
}
