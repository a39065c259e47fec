//! The placement policies with which the benchmark compares Cleave's policy.
use std::cell::RefCell;

use cleave_plan::placement::demand::TypicalPod;
use cleave_plan::placement::{Demand, Node, Rank, Score, remaining_thousandths};

use super::random::Rng;

/// Returns the CPU and GPU capacity that remains free on the node after the demand, with equal
/// weights.
fn free_capacity(node: &Node, demand: &Demand) -> f64 {
    let cpu = f64::from(u32::try_from(node.cpu - demand.cpu).unwrap_or(u32::MAX));
    0.5 * cpu / 128_000.0 + 0.5 * f64::from(node.free() - demand.total()) / 8_000.0
}

/// Chooses the node with the least free capacity, and its GPU with the least free capacity.
#[derive(Debug, Clone, Default)]
pub(super) struct BestFitScore;

impl Score for BestFitScore {
    type NodeValues = ();

    fn precompute(&self, _: &Node) {}

    fn rank(&self, node: &Node, (): &(), demand: &Demand, way: Option<usize>) -> Rank {
        Rank { score: 0.0, spread: free_capacity(node, demand), left: remaining_thousandths(node, demand, way) }
    }
}

/// Fragmentation gradient descent: minimizes the growth of the GPU capacity that typical pods
/// cannot use.
#[derive(Debug, Clone, Default)]
pub(super) struct FgdScore(Vec<TypicalPod>);

impl FgdScore {
    pub(super) fn new(typical: &[TypicalPod]) -> Self {
        Self(typical.to_vec())
    }

    /// Returns the free GPU capacity that typical pods cannot use.
    fn fragmentation(&self, model: &str, cpu: u64, gpus: &[u32]) -> f64 {
        let free: u32 = gpus.iter().sum();
        let of = |kind: &TypicalPod| {
            let able = gpus.iter().filter(|&&free| free >= kind.per_gpu).count();
            let other = !kind.models.is_empty() && !kind.models.iter().any(|allowed| allowed == model);
            if kind.gpus == 0 || other || cpu < kind.cpu || able < kind.gpus as usize {
                return f64::from(free);
            }
            f64::from(gpus.iter().filter(|&&free| free < kind.per_gpu).sum::<u32>())
        };
        self.0.iter().map(|kind| kind.weight * of(kind)).sum()
    }
}

impl Score for FgdScore {
    type NodeValues = f64;

    fn precompute(&self, node: &Node) -> f64 {
        self.fragmentation(&node.model, node.cpu, &node.gpus)
    }

    fn rank(&self, node: &Node, before: &f64, demand: &Demand, way: Option<usize>) -> Rank {
        let mut gpus = node.gpus.clone();
        let mut wanted = demand.gpus;
        for (index, free) in gpus.iter_mut().enumerate() {
            let chosen = way.map_or(*free >= demand.per_gpu, |device| device == index);
            if wanted > 0 && chosen {
                *free -= demand.per_gpu;
                wanted -= 1;
            }
        }
        let fall = before - self.fragmentation(&node.model, node.cpu - demand.cpu, &gpus);
        let score = (100.0 / (1.0 + (-fall / 1000.0).exp())).trunc();
        Rank { score, spread: free_capacity(node, demand), left: remaining_thousandths(node, demand, way) }
    }
}

/// Chooses at random among the nodes and GPUs that fit. Each score makes one decision, and the
/// benchmark replaces the score before the next decision.
#[derive(Debug, Clone)]
pub(super) struct RandomScore(RefCell<Rng>);

impl RandomScore {
    /// Returns the score for the next decision.
    pub(super) fn next_score(&self) -> Self {
        Self(RefCell::new(Rng(self.0.borrow_mut().next_bits())))
    }
}

impl Default for RandomScore {
    fn default() -> Self {
        Self(RefCell::new(Rng(0)))
    }
}

impl Score for RandomScore {
    type NodeValues = f64;

    fn precompute(&self, _: &Node) -> f64 {
        self.0.borrow_mut().next_fraction()
    }

    fn rank(&self, _: &Node, before: &f64, _: &Demand, _: Option<usize>) -> Rank {
        Rank { score: *before, spread: self.0.borrow_mut().next_fraction(), left: 0 }
    }
}
