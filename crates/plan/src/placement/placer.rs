//! Caches the ranks of nodes for each kind of pod. After a change, computes only the ranks of
//! changed nodes again.
use std::cmp::Ordering;
use std::collections::{BTreeMap, BinaryHeap};

use super::{Demand, Node, Rank, Score};

/// A node and the way to place a pod on it, with its rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Number of replicas of the pod's controller on the GPU, then on the node. Fewer replicas are
    /// better, regardless of the rank.
    replicas: (u32, u32),
    rank: Rank,
    /// Index of the node.
    pub node: usize,
    /// Index of the GPU. `None` for a pod with several GPUs.
    way: Option<usize>,
}

impl Eq for Candidate {}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Candidate {
    /// Compares two candidates. The better candidate is greater. Among equal candidates, the
    /// candidate with the lower indices is greater.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.replicas.cmp(&self.replicas))
            .then_with(|| self.rank.compare(&other.rank))
            .then_with(|| other.node.cmp(&self.node))
            .then_with(|| other.way.cmp(&self.way))
    }
}

/// Replicas of one controller on a node: their number on the node, and on each of its GPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReplicaCounts {
    /// Replicas on the node.
    pub on_node: u32,
    /// Replicas on each GPU, by the GPU's index.
    pub on_gpus: BTreeMap<usize, u32>,
}

/// The best way to place one kind of pod on one node, in a compact form.
#[derive(Debug, Clone, Copy)]
struct BestWay {
    score: f64,
    spread: f64,
    left: u32,
    /// Index of the GPU, or one of the constants below.
    way: u32,
}

impl BestWay {
    /// Value of `way` for a pod with several GPUs.
    const SEVERAL_GPUS: u32 = u32::MAX - 1;
    /// The pod does not fit.
    const DOES_NOT_FIT: Self = Self { score: 0.0, spread: 0.0, left: 0, way: u32::MAX };

    fn candidate(self, node: usize) -> Option<Candidate> {
        let way = match self.way {
            u32::MAX => return None,
            Self::SEVERAL_GPUS => None,
            device => Some(device as usize),
        };
        let rank = Rank { score: self.score, spread: self.spread, left: self.left };
        Some(Candidate { replicas: (0, 0), rank, node, way })
    }
}

/// Cached results for one kind of pod. The results include all changes before a position in the log
/// of changes.
#[derive(Debug, Clone)]
struct CachedRanks {
    best: Vec<BestWay>,
    seen: usize,
}

/// Nodes and a score, with cached ranks for each kind of pod.
#[derive(Debug)]
pub struct Placer<S: Score> {
    nodes: Vec<Node>,
    score: S,
    before: Vec<S::NodeValues>,
    cached_ranks: BTreeMap<Demand, CachedRanks>,
    /// Indices of changed nodes, in order.
    changes: Vec<usize>,
}

/// Maximum length of the log of changes, as a multiple of the number of nodes. A longer log loses
/// its older half.
const MAX_CHANGES_PER_NODE: usize = 8;
/// Maximum number of cached ranks, of 24 bytes each.
const MAX_CACHED_RANKS: usize = 1 << 19;

impl<S: Score + Default> Default for Placer<S> {
    fn default() -> Self {
        Self::new(Vec::new(), S::default())
    }
}

impl<S: Score> Placer<S> {
    /// Creates a placer with its nodes and its score.
    pub fn new(nodes: Vec<Node>, score: S) -> Self {
        let before = nodes.iter().map(|node| score.precompute(node)).collect();
        Self { nodes, score, before, cached_ranks: BTreeMap::new(), changes: Vec::new() }
    }

    /// Returns all nodes, in the order of their indices.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Returns the score that ranks the ways to place a pod.
    pub fn score(&self) -> &S {
        &self.score
    }

    /// Replaces the score and clears the cache.
    pub fn set_score(&mut self, score: S) {
        self.before = self.nodes.iter().map(|node| score.precompute(node)).collect();
        self.score = score;
        self.clear();
    }

    /// Returns the number of cached ranks.
    pub fn count_cached_ranks(&self) -> usize {
        self.cached_ranks.len().saturating_mul(self.nodes.len())
    }

    /// Clears the cache.
    pub fn clear(&mut self) {
        self.cached_ranks.clear();
        self.changes.clear();
    }

    /// Adds a node, and returns its index.
    pub fn add(&mut self, node: Node) -> usize {
        self.before.push(self.score.precompute(&node));
        self.nodes.push(node);
        self.clear();
        self.nodes.len() - 1
    }

    /// Changes a node.
    pub fn change(&mut self, index: usize, change: impl FnOnce(&mut Node)) {
        let (Some(node), Some(before)) = (self.nodes.get_mut(index), self.before.get_mut(index)) else { return };
        change(node);
        *before = self.score.precompute(node);
        self.changes.push(index);
        if self.changes.len() > MAX_CHANGES_PER_NODE * self.nodes.len() {
            // Drop only results that were not used since the middle of the log.
            let cut = self.changes.len() / 2;
            self.changes.drain(..cut);
            self.cached_ranks.retain(|_, cached_ranks| cached_ranks.seen >= cut);
            self.cached_ranks.values_mut().for_each(|cached_ranks| cached_ranks.seen -= cut);
        }
    }

    /// Returns the nodes and GPUs that fit a pod, best first. On a node without replicas of the
    /// pod's controller, only the best GPU is returned.
    pub fn candidates(&mut self, demand: Demand, replicas: BTreeMap<usize, ReplicaCounts>) -> Candidates<'_> {
        self.cache_ranks(&demand);
        let beside = replicas
            .iter()
            .flat_map(|(&index, replicas)| self.candidates_beside_replicas(&demand, index, replicas))
            .collect();
        let best = self.cached_ranks.get(&demand).map(|cached_ranks| cached_ranks.best.as_slice()).unwrap_or_default();
        Candidates { nodes: &self.nodes, best, demand, beside, replicas, rest: RemainingCandidates::All }
    }

    /// Returns all ways to place a pod on a node that runs replicas of the pod's controller.
    fn candidates_beside_replicas(&self, demand: &Demand, index: usize, replicas: &ReplicaCounts) -> Vec<Candidate> {
        let (Some(node), Some(before)) = (self.nodes.get(index), self.before.get(index)) else { return Vec::new() };
        let candidate = |way: Option<usize>| {
            let on_gpu = way.and_then(|way| replicas.on_gpus.get(&way)).copied().unwrap_or(0);
            let rank = self.score.rank(node, before, demand, way);
            Candidate { replicas: (on_gpu, replicas.on_node), rank, node: index, way }
        };
        node.ways(demand).map(candidate).collect()
    }

    /// Computes the ranks for a kind of pod that are not cached or are out of date.
    pub fn cache_ranks(&mut self, demand: &Demand) {
        let behind =
            self.cached_ranks.get(demand).map_or(usize::MAX, |cached_ranks| self.changes.len() - cached_ranks.seen);
        let seen = self.changes.len();
        if behind > self.nodes.len() {
            self.drop_oldest_ranks();
            let best = (0..self.nodes.len()).map(|node| self.best_way(node, demand)).collect();
            self.cached_ranks.insert(demand.clone(), CachedRanks { best, seen });
            return;
        }
        let changed = self.changes.get(seen - behind..).unwrap_or_default();
        let changed: Vec<(usize, BestWay)> = changed.iter().map(|&node| (node, self.best_way(node, demand))).collect();
        let Some(cached_ranks) = self.cached_ranks.get_mut(demand) else { return };
        for (node, best) in changed {
            if let Some(answer) = cached_ranks.best.get_mut(node) {
                *answer = best;
            }
        }
        cached_ranks.seen = seen;
    }

    /// Drops the cached ranks of the least recently placed kinds of pods until another kind fits
    /// into the cache. Keeps at least one kind.
    fn drop_oldest_ranks(&mut self) {
        while self.cached_ranks.len() > 1
            && (self.cached_ranks.len() + 1).saturating_mul(self.nodes.len()) > MAX_CACHED_RANKS
        {
            let oldest = self
                .cached_ranks
                .iter()
                .min_by_key(|(_, cached_ranks)| cached_ranks.seen)
                .map(|(demand, _)| demand.clone());
            oldest.and_then(|oldest| self.cached_ranks.remove(&oldest));
        }
    }

    fn best_way(&self, index: usize, demand: &Demand) -> BestWay {
        let (Some(node), Some(before)) = (self.nodes.get(index), self.before.get(index)) else {
            return BestWay::DOES_NOT_FIT;
        };
        let mut best: Option<(Rank, Option<usize>)> = None;
        for way in node.ways(demand) {
            // GPUs with equal free capacity have equal ranks.
            let free = |way: usize| node.gpus.get(way);
            if way.is_some_and(|way| (0..way).any(|earlier| free(earlier) == free(way))) {
                continue;
            }
            let rank = self.score.rank(node, before, demand, way);
            if best.as_ref().is_none_or(|(other, _)| rank.compare(other).is_gt()) {
                best = Some((rank, way));
            }
        }
        let Some((Rank { score, spread, left }, way)) = best else { return BestWay::DOES_NOT_FIT };
        let way = way.map_or(BestWay::SEVERAL_GPUS, |way| u32::try_from(way).unwrap_or(u32::MAX));
        BestWay { score, spread, left, way }
    }
}

/// The nodes and GPUs that fit a pod, best first, with the indices of the GPUs that the pod uses.
///
/// Most pods use the first candidate. A linear search therefore finds the first candidate. The
/// other candidates are sorted only when the second candidate is needed.
#[derive(Debug)]
pub struct Candidates<'a> {
    nodes: &'a [Node],
    best: &'a [BestWay],
    demand: Demand,
    /// Candidates on nodes with replicas.
    beside: Vec<Candidate>,
    replicas: BTreeMap<usize, ReplicaCounts>,
    rest: RemainingCandidates,
}

/// The candidates that the iterator has not returned yet.
#[derive(Debug)]
enum RemainingCandidates {
    All,
    Except(Candidate),
    Ordered(BinaryHeap<Candidate>),
}

impl Candidates<'_> {
    fn fitting_candidates(&self) -> impl Iterator<Item = Candidate> {
        let alone = |(node, _): &(usize, &BestWay)| self.replicas.is_empty() || !self.replicas.contains_key(node);
        let others = self.best.iter().enumerate().filter(alone);
        others.filter_map(|(node, best)| best.candidate(node)).chain(self.beside.iter().copied())
    }
}

impl Iterator for Candidates<'_> {
    type Item = (Candidate, Vec<usize>);

    fn next(&mut self) -> Option<Self::Item> {
        if let RemainingCandidates::Except(first) = self.rest {
            self.rest = RemainingCandidates::Ordered(
                self.fitting_candidates().filter(|candidate| *candidate != first).collect(),
            );
        }
        let next = if let RemainingCandidates::Ordered(heap) = &mut self.rest {
            heap.pop()?
        } else {
            let first = self.fitting_candidates().max()?;
            self.rest = RemainingCandidates::Except(first);
            first
        };
        Some((next, self.nodes.get(next.node)?.devices(&self.demand, next.way)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Tightest, remaining_thousandths};
    use super::*;

    /// Prefers the node with the least free capacity, so that every change of a node changes its
    /// rank.
    #[derive(Clone, Default)]
    struct Fullest;

    impl Score for Fullest {
        type NodeValues = u32;

        fn precompute(&self, node: &Node) -> u32 {
            node.free()
        }

        fn rank(&self, node: &Node, before: &u32, demand: &Demand, way: Option<usize>) -> Rank {
            Rank { score: -f64::from(*before), spread: 0.0, left: remaining_thousandths(node, demand, way) }
        }
    }

    fn node(gpus: &[u32]) -> Node {
        Node { model: "T4".into(), cpu_total: 64_000, cpu: 64_000, gpus: gpus.to_vec() }
    }

    fn shares(per_gpu: u32) -> Demand {
        Demand { cpu: 1000, gpus: 1, per_gpu, models: Vec::new() }
    }

    fn all_candidates<S: Score>(placer: &mut Placer<S>, demand: &Demand) -> Vec<(usize, Option<usize>)> {
        placer.candidates(demand.clone(), BTreeMap::new()).map(|(found, _)| (found.node, found.way)).collect()
    }

    #[test]
    fn six_free_units_on_two_gpus_do_not_fit_a_request_for_five() {
        let mut placer = Placer::new(vec![node(&[300, 300])], Fullest);
        assert_eq!(all_candidates(&mut placer, &shares(500)), []);
        assert_eq!(all_candidates(&mut placer, &shares(300)), [(0, Some(0))]);
        placer.change(0, |node| node.cpu = 999);
        assert_eq!(all_candidates(&mut placer, &shares(300)), [], "the node has too little CPU");
    }

    #[test]
    fn a_pod_that_requests_two_gpus_uses_two_gpus_of_one_node() {
        let mut placer = Placer::new(vec![node(&[1000, 900]), node(&[900, 1000, 1000])], Fullest);
        let two = Demand { gpus: 2, ..shares(1000) };
        assert_eq!(all_candidates(&mut placer, &two), [(1, None)]);
        assert_eq!(placer.nodes()[1].devices(&two, None), [1, 2]);
    }

    #[test]
    fn candidates_come_best_first_and_avoid_replicas() {
        let mut placer = Placer::new(vec![node(&[400, 900]), node(&[500]), node(&[700])], Tightest);
        assert_eq!(all_candidates(&mut placer, &shares(300)), [(0, Some(0)), (1, Some(0)), (2, Some(0))]);
        let replicas = BTreeMap::from([(0, ReplicaCounts { on_node: 1, on_gpus: BTreeMap::from([(0, 1)]) })]);
        let found: Vec<_> =
            placer.candidates(shares(300), replicas).map(|(found, _)| (found.node, found.way)).collect();
        assert_eq!(found, [(1, Some(0)), (2, Some(0)), (0, Some(1)), (0, Some(0))]);
    }

    #[test]
    fn the_number_of_cached_ranks_is_bounded() {
        let mut placer = Placer::new(vec![node(&[1000]); MAX_CACHED_RANKS / 4], Fullest);
        for per_gpu in 1..10 {
            assert_eq!(placer.candidates(shares(per_gpu), BTreeMap::new()).count(), MAX_CACHED_RANKS / 4);
            assert!(
                placer.cached_ranks.values().map(|cached_ranks| cached_ranks.best.len()).sum::<usize>()
                    <= MAX_CACHED_RANKS
            );
        }
    }

    proptest! {
        /// Cached results equal freshly computed results.
        #[test]
        fn cached_results_equal_computed_results(steps in prop::collection::vec((1u32..=10, 0..6usize), 1..60)) {
            let mut placer = Placer::new((0..3).map(|_| node(&[1000, 1000])).collect(), Fullest);
            for (size, gpu) in steps {
                let demand = shares(size * 100);
                let fresh = all_candidates(&mut Placer::new(placer.nodes().to_vec(), Fullest), &demand);
                prop_assert_eq!(all_candidates(&mut placer, &demand), fresh);
                placer.change(gpu / 2, |node| node.gpus[gpu % 2] = (node.gpus[gpu % 2] + size * 100) % 1100);
            }
        }
    }
}
