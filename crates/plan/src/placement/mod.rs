//! Chooses the node and GPU for a pod so that as many typical requests as possible still fit.
//!
//! The operator uses [`Score`] and its types through the ledger, with the tightest fit as score.
//! [`Placer`] and the learned score [`Value`] are used only by the simulation `cleave-bench trace`
//! and by tests.
//!
//! - [`demand`] learns typical requests of pods.
//! - [`value`] computes the value of free capacity for these requests, and describes the formula.
//! - This file contains the nodes, the test which pods fit on them, and a cache. After a change,
//!   the cache scores only the changed nodes.
pub mod demand;
pub mod value;

use std::collections::BTreeMap;

pub use demand::{Demand, Observed, TypicalPod};
pub use value::Value;

/// One GPU in thousandths, the unit of placement.
pub const GPU: u32 = 1000;

/// The capacity of a node and how much of it is free.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// GPU model, as pods name it.
    pub model: String,
    /// Allocatable CPU in thousandths of a core.
    pub cpu_total: u64,
    /// Free CPU in thousandths of a core.
    pub cpu: u64,
    /// Free memory in MiB.
    pub memory: u64,
    /// Free thousandths of each GPU.
    pub gpus: Vec<u32>,
}

impl Node {
    /// Sum of the free capacity of all GPUs, in thousandths.
    pub fn free(&self) -> u32 {
        self.gpus.iter().sum()
    }

    /// Whether CPU, memory and model allow the pod, regardless of GPUs.
    fn admits(&self, demand: &Demand) -> bool {
        self.cpu >= demand.cpu
            && self.memory >= demand.memory
            && (demand.models.is_empty() || demand.models.contains(&self.model))
    }

    /// The ways to place the pod on the node: one way for each GPU with enough free capacity. GPUs
    /// with equal free capacity count once. A pod without GPUs or with several GPUs has at most one
    /// way.
    ///
    /// A way is the GPU's index, or `None` if the pod requests no GPU or several.
    pub fn fits(&self, demand: &Demand) -> impl Iterator<Item = Option<usize>> {
        let admitted = self.admits(demand);
        let enough = |free: &&u32| **free >= demand.per_gpu;
        let single = admitted && demand.gpus == 1;
        let other = admitted
            && match demand.gpus {
                0 => true,
                1 => false,
                gpus => self.gpus.iter().filter(enough).take(gpus as usize).count() == gpus as usize,
            };
        let gpus = if single { self.gpus.as_slice() } else { &[] };
        let devices = gpus.iter().enumerate().filter(move |&(index, free)| {
            *free >= demand.per_gpu && !gpus.iter().take(index).any(|earlier| earlier == free)
        });
        devices.map(|(index, _)| Some(index)).chain(other.then_some(None))
    }

    /// The GPUs that the pod uses in one of the ways of [`Node::fits`].
    ///
    /// A pod with several GPUs uses the fullest GPUs with enough free capacity.
    fn devices(&self, demand: &Demand, way: Option<usize>) -> Vec<usize> {
        match way {
            Some(device) => vec![device],
            None => {
                let mut able: Vec<usize> = (0..self.gpus.len())
                    .filter(|&device| self.gpus.get(device).is_some_and(|&free| free >= demand.per_gpu))
                    .collect();
                able.sort_by_key(|&device| (self.gpus.get(device).copied(), device));
                able.truncate(demand.gpus as usize);
                able
            }
        }
    }

    /// Allocates a pod's requests.
    fn allocate(&mut self, demand: &Demand, devices: &[usize]) {
        self.cpu = self.cpu.saturating_sub(demand.cpu);
        self.memory = self.memory.saturating_sub(demand.memory);
        for &device in devices {
            if let Some(free) = self.gpus.get_mut(device) {
                *free = free.saturating_sub(demand.per_gpu);
            }
        }
    }

    /// Frees a pod's requests.
    fn deallocate(&mut self, demand: &Demand, devices: &[usize]) {
        self.cpu += demand.cpu;
        self.memory += demand.memory;
        for &device in devices {
            if let Some(free) = self.gpus.get_mut(device) {
                *free = (*free + demand.per_gpu).min(GPU);
            }
        }
    }
}

/// How good a choice is: highest score first, then lowest `spread`, then least remaining capacity.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rank {
    /// Score. Higher is better.
    pub score: f64,
    /// Among equal scores, lower is better.
    pub spread: f64,
    /// Remaining thousandths of the GPU. Among equal spreads, lower is better.
    pub left: u32,
}

impl Rank {
    /// Whether this choice is strictly better than the other.
    fn is_better_than(&self, other: &Self) -> bool {
        self.score
            .total_cmp(&other.score)
            .then(other.spread.total_cmp(&self.spread))
            .then(other.left.cmp(&self.left))
            .is_gt()
    }
}

/// A placement policy: ranks the ways to place a pod on a node that [`Node::fits`] returns.
///
/// The result must depend only on the arguments and `self`, because it is cached until the node
/// changes.
pub trait Score {
    /// Values that the policy computes once for a node, until the node changes.
    type NodeValues;

    /// Computes [`Self::NodeValues`] for the node without the pod.
    fn precompute(&self, node: &Node) -> Self::NodeValues;

    /// Ranks one way to place the pod.
    fn rank(&self, node: &Node, before: &Self::NodeValues, demand: &Demand, way: Option<usize>) -> Rank;
}

/// A node and the GPUs for a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// Index of the node.
    pub node: usize,
    /// Indices of the node's GPUs that the pod uses.
    pub devices: Vec<usize>,
}

/// The best way to place one kind of pod on one node.
type Best = Option<(Rank, Option<usize>)>;

/// Cached results for one kind of pod, and the position in the log of changes up to which the
/// results are valid.
#[derive(Debug, Clone)]
struct Answers {
    best: Vec<Best>,
    seen: usize,
}

/// Nodes and a policy, with cached results for each kind of pod. Only results for changed nodes are
/// computed again.
pub struct Placer<S: Score> {
    nodes: Vec<Node>,
    policy: S,
    before: Vec<S::NodeValues>,
    answers: BTreeMap<Demand, Answers>,
    /// Indices of changed nodes, in order.
    changes: Vec<usize>,
}

/// The older half of the log of changes is dropped when the log is this many times longer than the
/// list of nodes.
const MAX_CHANGES_PER_NODE: usize = 8;

impl<S: Score> Placer<S> {
    /// Creates a placer with its nodes and its policy.
    pub fn new(nodes: Vec<Node>, policy: S) -> Self {
        let before = nodes.iter().map(|node| policy.precompute(node)).collect();
        Self { nodes, policy, before, answers: BTreeMap::new(), changes: Vec::new() }
    }

    /// The nodes.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Replaces the policy and clears the cache.
    pub fn set_policy(&mut self, policy: S) {
        self.before = self.nodes.iter().map(|node| policy.precompute(node)).collect();
        self.policy = policy;
        self.answers.clear();
    }

    /// Returns the best placement for a pod. `None` if the pod fits nowhere. Allocates nothing.
    pub fn choose(&mut self, demand: &Demand) -> Option<Choice> {
        let behind = self.answers.get(demand).map_or(usize::MAX, |answers| self.changes.len() - answers.seen);
        if behind > self.nodes.len() {
            let best = (0..self.nodes.len()).map(|node| self.best(node, demand)).collect();
            self.answers.insert(demand.clone(), Answers { best, seen: self.changes.len() });
        } else {
            let changed: Vec<(usize, Best)> = self
                .changes
                .get(self.changes.len() - behind..)?
                .iter()
                .map(|&node| (node, self.best(node, demand)))
                .collect();
            let answers = self.answers.get_mut(demand)?;
            for (node, best) in changed {
                if let Some(answer) = answers.best.get_mut(node) {
                    *answer = best;
                }
            }
            answers.seen = self.changes.len();
        }
        let answers = self.answers.get(demand)?;
        let mut winner: Option<(Rank, usize, Option<usize>)> = None;
        for (node, best) in answers.best.iter().enumerate() {
            let Some((rank, way)) = best else { continue };
            if winner.as_ref().is_none_or(|(best, ..)| rank.is_better_than(best)) {
                winner = Some((*rank, node, *way));
            }
        }
        let (_, node, way) = winner?;
        let devices = self.nodes.get(node)?.devices(demand, way);
        Some(Choice { node, devices })
    }

    /// Allocates a pod's requests at the chosen placement.
    pub fn allocate(&mut self, demand: &Demand, choice: &Choice) {
        self.change(choice.node, |node| node.allocate(demand, &choice.devices));
    }

    /// Frees a pod's requests at the chosen placement.
    pub fn deallocate(&mut self, demand: &Demand, choice: &Choice) {
        self.change(choice.node, |node| node.deallocate(demand, &choice.devices));
    }

    fn change(&mut self, index: usize, change: impl FnOnce(&mut Node)) {
        let (Some(node), Some(before)) = (self.nodes.get_mut(index), self.before.get_mut(index)) else { return };
        change(node);
        *before = self.policy.precompute(node);
        self.changes.push(index);
        if self.changes.len() > MAX_CHANGES_PER_NODE * self.nodes.len() {
            // Drop only results that were not used during half of the log.
            let cut = self.changes.len() / 2;
            self.changes.drain(..cut);
            self.answers.retain(|_, answers| answers.seen >= cut);
            self.answers.values_mut().for_each(|answers| answers.seen -= cut);
        }
    }

    fn best(&self, index: usize, demand: &Demand) -> Best {
        let (node, before) = (self.nodes.get(index)?, self.before.get(index)?);
        let mut best: Best = None;
        for way in node.fits(demand) {
            let rank = self.policy.rank(node, before, demand, way);
            if best.as_ref().is_none_or(|(other, _)| rank.is_better_than(other)) {
                best = Some((rank, way));
            }
        }
        best
    }
}

/// Thousandths of the GPU that remain after a placement.
pub fn remaining(node: &Node, demand: &Demand, way: Option<usize>) -> u32 {
    way.and_then(|device| node.gpus.get(device)).map_or(0, |free| free.saturating_sub(demand.per_gpu))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Prefers the node with the least free capacity. So every change of a node changes its rank.
    struct Tightest;

    impl Score for Tightest {
        type NodeValues = u32;

        fn precompute(&self, node: &Node) -> u32 {
            node.free()
        }

        fn rank(&self, node: &Node, before: &u32, demand: &Demand, way: Option<usize>) -> Rank {
            Rank { score: -f64::from(*before), spread: 0.0, left: remaining(node, demand, way) }
        }
    }

    fn node(gpus: &[u32]) -> Node {
        Node { model: "T4".into(), cpu_total: 64_000, cpu: 64_000, memory: 1 << 20, gpus: gpus.to_vec() }
    }

    fn shares(per_gpu: u32) -> Demand {
        Demand { cpu: 1000, memory: 1, gpus: 1, per_gpu, models: Vec::new() }
    }

    #[test]
    fn six_free_units_on_two_gpus_cannot_hold_five() {
        let mut placer = Placer::new(vec![node(&[300, 300])], Tightest);
        assert_eq!(placer.choose(&shares(500)), None);
        assert_eq!(placer.choose(&shares(300)), Some(Choice { node: 0, devices: vec![0] }));
    }

    #[test]
    fn a_pod_of_two_gpus_takes_two_gpus_of_one_node() {
        let mut placer = Placer::new(vec![node(&[1000, 900]), node(&[900, 1000, 1000])], Tightest);
        let two = Demand { gpus: 2, per_gpu: 1000, ..shares(0) };
        assert_eq!(placer.choose(&two), Some(Choice { node: 1, devices: vec![1, 2] }));
    }

    #[test]
    fn a_model_that_is_not_allowed_is_not_chosen() {
        let mut placer = Placer::new(vec![node(&[1000])], Tightest);
        assert_eq!(placer.choose(&Demand { models: vec!["A100".into()], ..shares(1) }), None);
    }

    proptest! {
        /// Cached results equal computed ones.
        #[test]
        fn cached_results_equal_computed_ones(steps in prop::collection::vec((1u32..=10, any::<bool>()), 1..60)) {
            let mut placer = Placer::new((0..3).map(|_| node(&[1000, 1000])).collect(), Tightest);
            let mut placed: Vec<(Demand, Choice)> = Vec::new();
            for (size, depart) in steps {
                if depart && !placed.is_empty() {
                    let (demand, choice) = placed.remove(size as usize % placed.len());
                    placer.deallocate(&demand, &choice);
                    continue;
                }
                let demand = shares(size * 100);
                let fresh = Placer::new(placer.nodes().to_vec(), Tightest).choose(&demand);
                let choice = placer.choose(&demand);
                prop_assert_eq!(&choice, &fresh);
                if let Some(choice) = choice {
                    placer.allocate(&demand, &choice);
                    placed.push((demand, choice));
                }
            }
            for (demand, choice) in &placed {
                placer.deallocate(demand, choice);
            }
            prop_assert!(placer.nodes().iter().all(|left| left == &node(&[1000, 1000])), "all units are free again");
        }
    }
}
