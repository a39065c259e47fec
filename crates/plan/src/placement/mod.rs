//! Where a pod that asks for shares, or for whole GPUs, goes: the choice that leaves the most of
//! what pods typically ask for.
//!
//! Three parts, each with one reason to change:
//! - [`demand`]: what pods typically ask for, learned from those that came.
//! - [`value`]: what free capacity is worth under that demand; the formula is explained in
//!   `docs/explanation/planning.md`.
//! - this file: nodes, what fits where, and a cache that scores only the nodes that changed.
pub mod demand;
pub mod value;

use std::collections::BTreeMap;

pub use demand::{Demand, Observed, Typical};
pub use value::Value;

/// One GPU in the units that placement counts in.
pub const GPU: u32 = 1000;

/// A node as it is: what it has and what is free.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// GPU model, as pods name it.
    pub model: String,
    /// Allocatable CPU, thousandths of a core.
    pub cpu_total: u64,
    /// Free CPU, thousandths of a core.
    pub cpu: u64,
    /// Free memory, MiB.
    pub memory: u64,
    /// Free thousandths of each GPU.
    pub gpus: Vec<u32>,
}

impl Node {
    /// Free thousandths of a GPU, of all its GPUs together.
    pub fn free(&self) -> u32 {
        self.gpus.iter().sum()
    }

    /// Whether CPU, memory and model allow the pod, whatever its GPUs.
    fn admits(&self, demand: &Demand) -> bool {
        self.cpu >= demand.cpu
            && self.memory >= demand.memory
            && (demand.models.is_empty() || demand.models.contains(&self.model))
    }

    /// The ways to hold the pod, one for each distinct GPU that it could be on; for several GPUs,
    /// and for none, at most one way.
    ///
    /// A way is the GPU's index, or none where the pod wants none or several.
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

    /// The GPUs that the pod gets in one of the ways of [`Node::fits`].
    ///
    /// A pod of several GPUs takes the fullest that still hold it.
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

    /// Takes what a pod gets.
    fn take(&mut self, demand: &Demand, devices: &[usize]) {
        self.cpu = self.cpu.saturating_sub(demand.cpu);
        self.memory = self.memory.saturating_sub(demand.memory);
        for &device in devices {
            if let Some(free) = self.gpus.get_mut(device) {
                *free = free.saturating_sub(demand.per_gpu);
            }
        }
    }

    /// Gives back what a pod got.
    fn give(&mut self, demand: &Demand, devices: &[usize]) {
        self.cpu += demand.cpu;
        self.memory += demand.memory;
        for &device in devices {
            if let Some(free) = self.gpus.get_mut(device) {
                *free = (*free + demand.per_gpu).min(GPU);
            }
        }
    }
}

/// How good a choice is. The greatest is taken: by score, then by the least `spread`, then by the
/// least left on the GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rank {
    /// What counts.
    pub score: f64,
    /// Among equals, the least.
    pub spread: f64,
    /// Among these, the least left on the GPU, thousandths.
    pub left: u32,
}

impl Rank {
    /// Whether this choice is strictly better.
    fn beats(&self, other: &Self) -> bool {
        self.score
            .total_cmp(&other.score)
            .then(other.spread.total_cmp(&self.spread))
            .then(other.left.cmp(&self.left))
            .is_gt()
    }
}

/// A policy: how good it is to put a pod on a node in one of the ways that [`Node::fits`] gives.
///
/// It may look at nothing but its arguments and itself, because answers are kept until the node
/// changes.
pub trait Score {
    /// What the policy wants to know of a node, kept until the node changes.
    type Before;

    /// Looks at the node before any pod is put on it.
    fn before(&self, node: &Node) -> Self::Before;

    /// Ranks one way to hold the pod.
    fn rank(&self, node: &Node, before: &Self::Before, demand: &Demand, way: Option<usize>) -> Rank;
}

/// Where a pod goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// Index of the node.
    pub node: usize,
    /// Indices of its GPUs that the pod gets.
    pub devices: Vec<usize>,
}

/// The answer for one kind of pod on one node.
type Best = Option<(Rank, Option<usize>)>;

/// Answers for one kind of pod, and up to where in the log of changes they hold.
#[derive(Debug, Clone)]
struct Answers {
    best: Vec<Best>,
    seen: usize,
}

/// Nodes, a policy, and the policy's answers for each kind of pod, of which only those for changed
/// nodes are asked again.
pub struct Placer<S: Score> {
    nodes: Vec<Node>,
    policy: S,
    before: Vec<S::Before>,
    answers: BTreeMap<Demand, Answers>,
    /// Nodes in the order in which they changed.
    changes: Vec<usize>,
}

/// The older half of the log of changes is forgotten when it is this many times longer than there
/// are nodes.
const LOG: usize = 8;

impl<S: Score> Placer<S> {
    /// Nodes as they are, and the policy that ranks them.
    pub fn new(nodes: Vec<Node>, policy: S) -> Self {
        let before = nodes.iter().map(|node| policy.before(node)).collect();
        Self { nodes, policy, before, answers: BTreeMap::new(), changes: Vec::new() }
    }

    /// The nodes as they are.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Goes on with another policy: all answers are asked anew.
    pub fn set_policy(&mut self, policy: S) {
        self.before = self.nodes.iter().map(|node| policy.before(node)).collect();
        self.policy = policy;
        self.answers.clear();
    }

    /// The best place for a pod, or none where it fits nowhere. Nothing is taken yet.
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
            if winner.as_ref().is_none_or(|(best, ..)| rank.beats(best)) {
                winner = Some((*rank, node, *way));
            }
        }
        let (_, node, way) = winner?;
        let devices = self.nodes.get(node)?.devices(demand, way);
        Some(Choice { node, devices })
    }

    /// Takes what a choice gives to a pod.
    pub fn take(&mut self, demand: &Demand, choice: &Choice) {
        self.change(choice.node, |node| node.take(demand, &choice.devices));
    }

    /// Gives back what a pod had.
    pub fn give(&mut self, demand: &Demand, choice: &Choice) {
        self.change(choice.node, |node| node.give(demand, &choice.devices));
    }

    fn change(&mut self, index: usize, change: impl FnOnce(&mut Node)) {
        let (Some(node), Some(before)) = (self.nodes.get_mut(index), self.before.get_mut(index)) else { return };
        change(node);
        *before = self.policy.before(node);
        self.changes.push(index);
        if self.changes.len() > LOG * self.nodes.len() {
            // Only answers that are all but useless go: those that nobody has asked for through
            // half of the log.
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
            if best.as_ref().is_none_or(|(other, _)| rank.beats(other)) {
                best = Some((rank, way));
            }
        }
        best
    }
}

/// What would be left on the GPU of one way, thousandths.
pub fn left(node: &Node, demand: &Demand, way: Option<usize>) -> u32 {
    way.and_then(|device| node.gpus.get(device)).map_or(0, |free| free.saturating_sub(demand.per_gpu))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Prefers what is left tightest, so that every change of a node changes its answers.
    struct Tightest;

    impl Score for Tightest {
        type Before = u32;

        fn before(&self, node: &Node) -> u32 {
            node.free()
        }

        fn rank(&self, node: &Node, before: &u32, demand: &Demand, way: Option<usize>) -> Rank {
            Rank { score: -f64::from(*before), spread: 0.0, left: left(node, demand, way) }
        }
    }

    fn node(gpus: &[u32]) -> Node {
        Node { model: "T4".into(), cpu_total: 64_000, cpu: 64_000, memory: 1 << 20, gpus: gpus.to_vec() }
    }

    fn shares(per_gpu: u32) -> Demand {
        Demand { cpu: 1000, memory: 1, gpus: 1, per_gpu, models: Vec::new() }
    }

    #[test]
    fn six_free_as_three_and_three_do_not_hold_five() {
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
        /// The cache never changes an answer, whatever came before.
        #[test]
        fn a_kept_answer_is_the_answer(steps in prop::collection::vec((1u32..=10, any::<bool>()), 1..60)) {
            let mut placer = Placer::new((0..3).map(|_| node(&[1000, 1000])).collect(), Tightest);
            let mut held: Vec<(Demand, Choice)> = Vec::new();
            for (size, depart) in steps {
                if depart && !held.is_empty() {
                    let (demand, choice) = held.remove(size as usize % held.len());
                    placer.give(&demand, &choice);
                    continue;
                }
                let demand = shares(size * 100);
                let fresh = Placer::new(placer.nodes().to_vec(), Tightest).choose(&demand);
                let choice = placer.choose(&demand);
                prop_assert_eq!(&choice, &fresh);
                if let Some(choice) = choice {
                    placer.take(&demand, &choice);
                    held.push((demand, choice));
                }
            }
            for (demand, choice) in &held {
                placer.give(demand, choice);
            }
            prop_assert!(placer.nodes().iter().all(|left| left == &node(&[1000, 1000])), "everything given back");
        }
    }
}
