//! The operator's score, and the rules for when to learn the score.
use super::value::{self, CapacityValue};
use super::{Demand, Node, ObservedDemands, Rank, Score, THOUSANDTHS_PER_GPU, Tightest, TypicalPod};

/// Number of arrivals after which the weight of an earlier arrival has halved.
const HALF_LIFE_PODS: f64 = 4_000.0;
/// Minimum number of counted pods for a learned score. Below this number, the score is the tightest
/// fit.
const MIN_PODS_TO_LEARN: usize = 50;
/// Maximum number of kinds of pods that are ranked when the score is updated.
const MAX_RANKED_KINDS: usize = 256;
/// Maximum number of arrivals between two updates of the score.
const MAX_ARRIVALS_BETWEEN_UPDATES: usize = 500;

/// The operator's score: the tightest fit until typical requests are known.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum LearnedScore {
    /// Too few pods have arrived.
    #[default]
    Tightest,
    /// The value of free capacity for typical requests.
    Value(CapacityValue),
}

impl Score for LearnedScore {
    type NodeValues = Option<value::NodeValues>;

    fn precompute(&self, node: &Node) -> Self::NodeValues {
        match self {
            Self::Tightest => None,
            Self::Value(value) => Some(value.precompute(node)),
        }
    }

    fn rank(&self, node: &Node, before: &Self::NodeValues, demand: &Demand, way: Option<usize>) -> Rank {
        match (self, before) {
            (Self::Value(value), Some(before)) => value.rank(node, before, demand, way),
            _ => Tightest.rank(node, &(), demand, way),
        }
    }
}

/// Counts the pods that request one resource, and learns the score from them.
///
/// Requests are counted in units of the resource. [`Self::score`] converts them to thousandths of a
/// GPU, because GPUs can have different numbers of units.
#[derive(Debug, Clone)]
pub struct Learner {
    observed: ObservedDemands,
    /// Number of pods that were counted.
    pods: usize,
    /// Number of pods that were counted when the score was last updated.
    learned_at: usize,
}

impl Default for Learner {
    fn default() -> Self {
        Self { observed: ObservedDemands::new(Some(HALF_LIFE_PODS)), pods: 0, learned_at: 0 }
    }
}

impl Learner {
    /// Counts a pod. The pod's `per_gpu` is a number of units.
    pub fn add(&mut self, units: &Demand) {
        self.observed.add(units);
        self.pods += 1;
    }

    /// Returns whether enough pods were counted to learn a score.
    pub fn has_enough_pods(&self) -> bool {
        self.pods >= MIN_PODS_TO_LEARN
    }

    /// Returns whether enough pods arrived since the last update of the score.
    pub fn is_update_due(&self) -> bool {
        let interval = (self.learned_at / 8).clamp(MIN_PODS_TO_LEARN, MAX_ARRIVALS_BETWEEN_UPDATES);
        self.has_enough_pods() && self.pods - self.learned_at >= interval
    }

    /// Records that an update of the scores has begun.
    pub fn record_update(&mut self) {
        self.learned_at = self.pods;
    }

    /// Returns the most frequent requests for GPUs of `capacity` units, so that the caller can
    /// compute their ranks before the next such pod arrives.
    pub fn frequent_requests(&self, capacity: u32) -> impl Iterator<Item = Demand> {
        let fits = move |kind: &&Demand| {
            if kind.gpus == 1 { kind.per_gpu <= capacity } else { kind.per_gpu == capacity }
        };
        let kinds = self.observed.by_weight().into_iter().map(|(kind, _)| kind).filter(fits).take(MAX_RANKED_KINDS);
        kinds.map(move |units| Demand {
            per_gpu: to_thousandths(units.per_gpu, capacity),
            models: Vec::new(),
            ..units.clone()
        })
    }

    /// Returns the score for GPUs of `capacity` units on these nodes. `waiting` are the requests of
    /// pending pods, in units. Takes milliseconds.
    pub fn score<'a>(&self, capacity: u32, nodes: &[Node], waiting: impl Iterator<Item = &'a Demand>) -> LearnedScore {
        let typical = self.observed.typical_pods().into_iter().filter(|kind| kind.per_gpu <= capacity);
        let typical: Vec<TypicalPod> =
            typical.map(|kind| TypicalPod { per_gpu: to_thousandths(kind.per_gpu, capacity), ..kind }).collect();
        if !self.has_enough_pods() || typical.is_empty() {
            return LearnedScore::Tightest;
        }
        let waiting = waiting.filter(|demand| demand.per_gpu <= capacity);
        let waiting: Vec<Demand> =
            waiting.map(|units| Demand { per_gpu: to_thousandths(units.per_gpu, capacity), ..units.clone() }).collect();
        LearnedScore::Value(CapacityValue::learn(&typical, nodes).with_pending(waiting.iter()))
    }
}

/// Converts units of a GPU with `capacity` units to thousandths of the GPU.
pub fn to_thousandths(units: u32, capacity: u32) -> u32 {
    let part = u64::from(units) * u64::from(THOUSANDTHS_PER_GPU) / u64::from(capacity.max(1));
    u32::try_from(part).map_or(THOUSANDTHS_PER_GPU, |part| part.min(THOUSANDTHS_PER_GPU))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn units(per_gpu: u32) -> Demand {
        Demand { cpu: 1000, gpus: 1, per_gpu, models: Vec::new() }
    }

    fn nodes() -> Vec<Node> {
        vec![Node { model: "H100".into(), cpu_total: 64_000, cpu: 64_000, gpus: vec![THOUSANDTHS_PER_GPU; 2] }]
    }

    #[test]
    fn the_score_is_the_tightest_fit_until_fifty_pods_arrived() {
        let mut learner = Learner::default();
        (0..49).for_each(|_| learner.add(&units(6)));
        assert!(!learner.is_update_due());
        assert_eq!(learner.score(10, &nodes(), [].iter()), LearnedScore::Tightest);
        learner.add(&units(4));
        assert!(learner.is_update_due());
        assert!(matches!(learner.score(10, &nodes(), [].iter()), LearnedScore::Value(_)));
        assert_eq!(learner.score(3, &nodes(), [].iter()), LearnedScore::Tightest, "no such pod fits these GPUs");
    }

    #[test]
    fn an_update_is_due_after_an_eighth_more_pods_but_at_least_50_and_at_most_500() {
        let mut learner = Learner::default();
        let mut updates = Vec::new();
        for pod in 1..=20_000 {
            learner.add(&units(3));
            if learner.is_update_due() {
                learner.record_update();
                updates.push(pod);
            }
        }
        assert_eq!(updates[..3], [50, 100, 150]);
        assert!(updates.windows(2).all(|pair| pair[1] - pair[0] <= 500));
        assert!(updates.len() < 100, "{}", updates.len());
    }

    #[test]
    fn a_learned_score_keeps_free_units_that_fit_typical_pods() {
        let mut learner = Learner::default();
        (0..30).for_each(|_| [6, 4].iter().for_each(|size| learner.add(&units(*size))));
        let score = learner.score(10, &nodes(), [].iter());
        let node = Node { gpus: vec![1000, 600], ..nodes().remove(0) };
        let rank = |score: &LearnedScore, way| {
            score.rank(&node, &score.precompute(&node), &Demand { per_gpu: 400, ..units(0) }, Some(way))
        };
        let better = |score: &LearnedScore, way, than| rank(score, way).compare(&rank(score, than)).is_gt();
        // 6 of 10 units are free on the second GPU, which a pod of 6 could use.
        assert!(better(&score, 0, 1));
        assert!(better(&LearnedScore::Tightest, 1, 0));
    }
}
