//! Ranks the GPUs on which a pod fits, so that as many typical requests as possible fit later.
//!
//! The ledger chooses with a [`Score`]. The operator's score is [`LearnedScore`]: the tightest fit
//! until enough pods have arrived, then [`CapacityValue`], which is computed from the typical
//! requests.
//!
//! - [`demand`] learns typical requests of pods.
//! - [`value`] computes the value of free capacity for these requests, and describes the formula.
//! - [`learned`] decides when to learn, and contains the operator's score.
//! - [`placer`] stores the nodes with cached ranks. After a change, the placer ranks only changed
//!   nodes.
pub mod demand;
pub mod learned;
pub mod placer;
pub mod value;

pub use demand::{Demand, ObservedDemands, TypicalPod};
pub use learned::LearnedScore;
pub use placer::{Candidate, Candidates, Placer, ReplicaCounts};
pub use value::CapacityValue;

/// One GPU in thousandths, the unit of placement.
pub const THOUSANDTHS_PER_GPU: u32 = 1000;

/// The GPUs of a node and their free capacity. The GPUs have the same number of units.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Node {
    /// GPU model, as node selectors of pods name it.
    pub model: String,
    /// Allocatable CPU in thousandths of a core.
    pub cpu_total: u64,
    /// Free CPU in thousandths of a core.
    pub cpu: u64,
    /// Free thousandths of each GPU.
    pub gpus: Vec<u32>,
}

/// One way to place a pod on a node: the index of the pod's GPU. `None` for a pod with several
/// GPUs, because it has at most one way.
pub type Way = Option<usize>;

impl Node {
    /// Returns the sum of the free capacity of all GPUs, in thousandths.
    pub fn free(&self) -> u32 {
        self.gpus.iter().sum()
    }

    /// Returns the ways to place the pod on the node.
    fn ways(&self, demand: &Demand) -> impl Iterator<Item = Way> {
        let has_cpu = self.cpu >= demand.cpu;
        let enough = |free: &&u32| **free >= demand.per_gpu;
        let several = has_cpu
            && demand.gpus > 1
            && self.gpus.iter().filter(enough).take(demand.gpus as usize).count() == demand.gpus as usize;
        let gpus = if has_cpu && demand.gpus == 1 { self.gpus.as_slice() } else { &[] };
        let single = gpus.iter().enumerate().filter(|(_, free)| **free >= demand.per_gpu);
        single.map(|(index, _)| Some(index)).chain(several.then_some(None))
    }

    /// Returns the GPUs that the pod uses in one of its ways. A pod with several GPUs uses the
    /// fullest GPUs with enough free capacity.
    fn devices(&self, demand: &Demand, way: Way) -> Vec<usize> {
        match way {
            Some(device) => vec![device],
            None => {
                let mut able: Vec<(u32, usize)> = self.gpus.iter().copied().zip(0..).collect();
                able.retain(|(free, _)| *free >= demand.per_gpu);
                able.sort_unstable();
                able.into_iter().take(demand.gpus as usize).map(|(_, device)| device).collect()
            }
        }
    }
}

/// Rank of a choice. The highest score is best, then the lowest `spread`, then the least remaining
/// capacity.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rank {
    /// Score. Higher is better.
    pub score: f64,
    /// Decides between equal scores. Lower is better.
    pub spread: f64,
    /// Remaining thousandths of the GPU. Decides between equal spreads. Lower is better.
    pub left: u32,
}

impl Rank {
    /// Compares two ranks. The better rank is greater.
    fn compare(&self, other: &Self) -> std::cmp::Ordering {
        self.score
            .total_cmp(&other.score)
            .then_with(|| other.spread.total_cmp(&self.spread))
            .then_with(|| other.left.cmp(&self.left))
    }
}

/// Ranks the ways to place a pod on a node.
///
/// The result must depend only on the arguments and `self`, because callers cache the result until
/// the node changes. The result must not depend on which of several GPUs with equal free capacity
/// is chosen.
pub trait Score {
    /// Values that the score computes once for a node, until the node changes.
    type NodeValues: std::fmt::Debug;

    /// Computes [`Self::NodeValues`] for the node without the pod.
    fn precompute(&self, node: &Node) -> Self::NodeValues;

    /// Ranks one way to place the pod. The caller ensures that the node has enough CPU, and that
    /// the GPUs have enough capacity.
    fn rank(&self, node: &Node, before: &Self::NodeValues, demand: &Demand, way: Way) -> Rank;
}

/// Returns the thousandths of the GPU that remain after a placement. Returns 0 for a pod with
/// several GPUs.
pub fn remaining_thousandths(node: &Node, demand: &Demand, way: Way) -> u32 {
    way.and_then(|device| node.gpus.get(device)).map_or(0, |free| free.saturating_sub(demand.per_gpu))
}

/// A score that prefers the device with the fewest remaining units. Use this score if no typical
/// requests have been learned.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tightest;

impl Score for Tightest {
    type NodeValues = ();

    fn precompute(&self, _: &Node) {}

    fn rank(&self, node: &Node, (): &(), demand: &Demand, way: Way) -> Rank {
        Rank { score: 0.0, spread: 0.0, left: remaining_thousandths(node, demand, way) }
    }
}
