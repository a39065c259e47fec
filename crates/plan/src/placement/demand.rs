//! Learns typical requests from the pods that arrived.
use std::collections::BTreeMap;

/// Requests of one pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Demand {
    /// CPU in thousandths of a core.
    pub cpu: u64,
    /// Number of GPUs. The pod uses `per_gpu` of each GPU.
    pub gpus: u32,
    /// Thousandths of each GPU.
    pub per_gpu: u32,
    /// Models that the pod can run on, sorted. An empty list means any model.
    pub models: Vec<String>,
}

impl Demand {
    /// Returns the sum of the pod's requests on all its GPUs, in thousandths.
    pub fn total(&self) -> u32 {
        self.gpus * self.per_gpu
    }
}

/// A typical kind of pod and its frequency. The frequencies of all kinds add up to 1.
#[derive(Debug, Clone, PartialEq)]
pub struct TypicalPod {
    /// CPU in thousandths of a core.
    pub cpu: u64,
    /// Number of GPUs.
    pub gpus: u32,
    /// Thousandths of each GPU.
    pub per_gpu: u32,
    /// Models that the pod can run on. An empty list means any model.
    pub models: Vec<String>,
    /// Frequency from 0 to 1.
    pub weight: f64,
}

impl TypicalPod {
    /// Returns the sum of the pod's requests on all its GPUs, in thousandths.
    pub fn total(&self) -> f64 {
        f64::from(self.gpus) * f64::from(self.per_gpu)
    }
}

/// Minimum fraction of all pods that the typical kinds cover, as in "Beware of Fragmentation"
/// (USENIX ATC'23).
const TYPICAL_COVERAGE: f64 = 0.95;

/// Maximum number of kinds that are counted. Beyond this maximum, [`ObservedDemands::add`] drops
/// about half of the kinds, those with the lowest weights. Otherwise, pods with different requests
/// could exhaust memory.
const MAX_OBSERVED_KINDS: usize = 4096;

/// Kinds of pods that arrived, each with its weight. Older pods weigh less.
#[derive(Debug, Clone)]
pub struct ObservedDemands {
    kinds: BTreeMap<Demand, f64>,
    total: f64,
    /// Weight of the next pod. The weight grows with each pod, so that the relative weight of
    /// earlier pods falls without an update.
    next: f64,
    growth: f64,
}

impl ObservedDemands {
    /// Creates an empty record. A pod's weight halves after `half_life` further pods. `None` means
    /// never.
    pub fn new(half_life: Option<f64>) -> Self {
        let growth = half_life.map_or(1.0, |pods| 2f64.powf(1.0 / pods));
        Self { kinds: BTreeMap::new(), total: 0.0, next: 1.0, growth }
    }

    /// Counts a pod.
    pub fn add(&mut self, demand: &Demand) {
        match self.kinds.get_mut(demand) {
            Some(weight) => *weight += self.next,
            None => drop(self.kinds.insert(demand.clone(), self.next)),
        }
        self.total += self.next;
        self.next *= self.growth;
        if self.kinds.len() > MAX_OBSERVED_KINDS {
            let mut weights: Vec<f64> = self.kinds.values().copied().collect();
            let (_, median, _) = weights.select_nth_unstable_by(MAX_OBSERVED_KINDS / 2, f64::total_cmp);
            // Also drop all kinds with the median weight.
            self.kinds.retain(|_, weight| *weight > *median);
            self.total = self.kinds.values().sum();
        }
        if self.next > 1e12 {
            // Weights are relative. Scale weights down before they lose precision, and drop kinds
            // with negligible weight.
            self.kinds.values_mut().for_each(|weight| *weight /= 1e12);
            self.kinds.retain(|_, weight| *weight > 1e-9);
            self.total = self.kinds.values().sum();
            self.next /= 1e12;
        }
    }

    /// Returns all kinds with their weights, the most frequent first.
    pub fn by_weight(&self) -> Vec<(&Demand, f64)> {
        let mut kinds: Vec<(&Demand, f64)> = self.kinds.iter().map(|(kind, weight)| (kind, *weight)).collect();
        // The sort is stable: kinds with equal weights keep their order.
        kinds.sort_by(|(_, one), (_, other)| other.total_cmp(one));
        kinds
    }

    /// Returns the most frequent kinds that together cover at least 95 % of the pods, by weight.
    pub fn typical_pods(&self) -> Vec<TypicalPod> {
        let kinds = self.by_weight();
        let mut sum = 0.0;
        let mut typical = Vec::new();
        for (kind, weight) in kinds {
            if sum >= TYPICAL_COVERAGE * self.total {
                break;
            }
            sum += weight;
            let Demand { cpu, gpus, per_gpu, models } = kind.clone();
            typical.push(TypicalPod { cpu, gpus, per_gpu, models, weight });
        }
        typical.iter_mut().for_each(|kind| kind.weight /= sum);
        typical
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(per_gpu: u32) -> Demand {
        Demand { cpu: 1, gpus: 1, per_gpu, models: Vec::new() }
    }

    #[test]
    fn rare_kinds_are_not_typical() {
        let mut observed = ObservedDemands::new(None);
        (0..96).for_each(|_| observed.add(&pod(500)));
        (0..4).for_each(|_| observed.add(&pod(100)));
        let typical = observed.typical_pods();
        assert_eq!(typical.len(), 1);
        assert!((typical[0].weight - 1.0).abs() < 1e-9 && typical[0].per_gpu == 500);
    }

    #[test]
    fn older_pods_count_less() {
        let mut observed = ObservedDemands::new(Some(50.0));
        (0..1000).for_each(|_| observed.add(&pod(100)));
        (0..500).for_each(|_| observed.add(&pod(900)));
        assert_eq!(observed.typical_pods().iter().map(|kind| kind.per_gpu).collect::<Vec<_>>(), [900]);
    }

    #[test]
    fn decay_neither_overflows_nor_drops_recent_pods() {
        let mut observed = ObservedDemands::new(Some(1.0));
        (0..10_000).for_each(|turn| observed.add(&pod(100 + turn % 2)));
        let typical = observed.typical_pods();
        assert!(
            typical.len() == 2 && typical.iter().all(|kind| kind.weight.is_finite() && kind.weight > 0.3),
            "{typical:?}"
        );
    }

    #[test]
    fn pods_whose_requests_all_differ_do_not_exhaust_memory() {
        let mut observed = ObservedDemands::new(Some(4000.0));
        for turn in 0..20_000 {
            observed.add(&Demand { cpu: turn, ..pod(100) });
            observed.add(&pod(500));
            assert!(observed.kinds.len() <= MAX_OBSERVED_KINDS);
        }
        assert_eq!(observed.typical_pods()[0].per_gpu, 500, "the frequent kind is still known");
    }

    #[test]
    fn without_pods_there_are_no_typical_pods() {
        assert!(ObservedDemands::new(None).typical_pods().is_empty());
    }
}
