//! Generates occupancies, and arrivals and departures of pods. Pure, with seeded random numbers.
use std::collections::{BTreeMap, BTreeSet};

/// Returns the GPU of a share: the part of the share's id before the last `::`.
pub(super) fn gpu_of_id(id: &str) -> &str {
    id.rsplit_once("::").map_or(id, |(gpu, _)| gpu)
}

/// Returns the number of GPUs to which these shares belong.
pub(super) fn count_gpus<'a>(ids: impl IntoIterator<Item = &'a str>) -> usize {
    ids.into_iter().map(gpu_of_id).collect::<BTreeSet<_>>().len()
}

/// Returns whether one GPU has at least `units` of the free shares.
pub(super) fn fits_on_one_gpu(free: &[&str], units: usize) -> bool {
    let mut count: BTreeMap<&str, usize> = BTreeMap::new();
    free.iter().any(|id| {
        let count = count.entry(gpu_of_id(id)).or_default();
        *count += 1;
        *count >= units
    })
}

/// Draws free shares in random order. The number of free shares on each GPU is uniformly
/// distributed.
pub(super) fn random_free_shares<'a>(all: &[&'a str], rng: &mut fastrand::Rng) -> Vec<&'a str> {
    let mut by_gpu: BTreeMap<&str, Vec<&'a str>> = BTreeMap::new();
    for id in all {
        by_gpu.entry(gpu_of_id(id)).or_default().push(id);
    }
    let mut free = Vec::new();
    for mut ids in by_gpu.into_values() {
        rng.shuffle(&mut ids);
        ids.truncate(rng.usize(..=ids.len()));
        free.extend(ids);
    }
    rng.shuffle(&mut free);
    free
}

/// Numbers of shares that pods request. Each entry has the same probability.
const POD_SIZES_IN_SHARES: [usize; 4] = [1, 1, 2, 5];

/// A simulation of pods that arrive one by one, and end after some further arrivals.
pub(super) struct PodChurn<'a> {
    free: BTreeSet<&'a str>,
    total: usize,
    /// Allocated shares, by the number of the arrival at which the simulation frees them.
    departures: BTreeMap<usize, Vec<&'a str>>,
    longest: usize,
    arrivals: usize,
    used: usize,
    rng: fastrand::Rng,
}

impl<'a> PodChurn<'a> {
    /// Creates a simulation in which all these shares are free. The mean lifetime of a pod is about
    /// proportional to the number of shares. With 40 shares, the mean lifetime is 12.5 arrivals,
    /// and about two thirds of the shares are in use.
    pub(super) fn new(all: &[&'a str], seed: u64) -> Self {
        Self {
            free: all.iter().copied().collect(),
            total: all.len(),
            departures: BTreeMap::new(),
            longest: all.len() * 24 / 40,
            arrivals: 0,
            used: 0,
            rng: fastrand::Rng::with_seed(seed),
        }
    }

    /// Returns the size of the next pod, and the free shares in random order. Returns `None` if the
    /// pod needs more shares than are free.
    pub(super) fn next_pod(&mut self) -> (usize, Option<Vec<&'a str>>) {
        self.arrivals += 1;
        let remaining = self.departures.split_off(&(self.arrivals + 1));
        let left = std::mem::replace(&mut self.departures, remaining);
        self.free.extend(left.into_values().flatten());
        self.used += self.total - self.free.len();
        let size = self.rng.choice(POD_SIZES_IN_SHARES).unwrap_or(1);
        if self.free.len() < size {
            return (size, None);
        }
        let mut free: Vec<_> = self.free.iter().copied().collect();
        self.rng.shuffle(&mut free);
        (size, Some(free))
    }

    /// Allocates these shares to the pod. Returns whether all these shares were free and distinct.
    pub(super) fn allocate(&mut self, ids: &[String]) -> bool {
        let allocated: Vec<_> = ids.iter().filter_map(|id| self.free.take(id.as_str())).collect();
        let sound = allocated.len() == ids.len();
        let lifetime = self.rng.usize(1..=self.longest.max(1));
        self.departures.entry(self.arrivals + lifetime).or_default().extend(allocated);
        sound
    }

    /// Returns the mean fraction of the shares in use.
    pub(super) fn utilization(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "counts of a few million")]
        let (used, all) = (self.used as f64, (self.arrivals * self.total) as f64);
        used / all.max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(gpus: usize, units: usize) -> Vec<String> {
        (0..gpus).flat_map(|gpu| (0..units).map(move |unit| format!("GPU-{gpu}::{unit}"))).collect()
    }

    #[test]
    fn a_request_fits_if_one_gpu_has_enough_free_shares() {
        let free = ["a::0", "b::0", "a::1", "b::7"];
        assert!(fits_on_one_gpu(&free, 2));
        assert!(!fits_on_one_gpu(&free, 3));
        assert_eq!(count_gpus(free), 2);
        assert_eq!(count_gpus(["a::0", "a::1"]), 1);
    }

    #[test]
    fn random_occupancies_depend_only_on_the_seed_and_cover_all_counts() {
        let all = shares(4, 10);
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        let draw = || {
            let mut rng = fastrand::Rng::with_seed(1);
            (0..1000).map(|_| random_free_shares(&all, &mut rng)).collect::<Vec<_>>()
        };
        let states = draw();
        assert_eq!(states, draw());
        let on_first = |free: &Vec<&str>| free.iter().filter(|id| gpu_of_id(id) == "GPU-0").count();
        let counts: BTreeSet<_> = states.iter().map(on_first).collect();
        assert_eq!(counts, (0..=10).collect());
        assert!(states.iter().all(|free| free.iter().collect::<BTreeSet<_>>().len() == free.len()));
    }

    #[test]
    fn churn_frees_allocated_shares_and_detects_an_allocation_of_used_shares() {
        let all = shares(4, 10);
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        let mut churn = PodChurn::new(&all, 1);
        let mut placed = 0;
        for _ in 0..2000 {
            let (size, Some(free)) = churn.next_pod() else { continue };
            let ids: Vec<String> = free[..size].iter().map(ToString::to_string).collect();
            assert!(churn.allocate(&ids));
            placed += size;
            assert!(!churn.allocate(&ids[..1]), "the share is in use");
        }
        assert!(placed > 40 * 10, "no share was freed");
        assert!((0.5..0.8).contains(&churn.utilization()), "{}", churn.utilization());
    }
}
