//! Chooses whole GPUs for a container by the links between them.
//!
//! The score of a set of GPUs is the sum of the scores of its pairs. Each pair has the same score
//! as in NVIDIA's device plugin. If several sets have the highest score, [`Topology::choose`]
//! prefers the set after which the remaining free GPUs have the highest score. A small request
//! therefore uses a partly used group, and complete groups remain free for larger requests.

/// Maximum number of free GPUs for which [`Topology::choose`] compares all sets. The time doubles
/// with each GPU, and few machines have more than 16 GPUs.
const MAX_GPUS_FOR_EXHAUSTIVE_SEARCH: usize = 16;

/// The path between two GPUs over PCIe, slowest first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum PciePath {
    /// The path is unknown.
    #[default]
    Unknown,
    /// The GPUs are on different NUMA nodes.
    AcrossNumaNodes,
    /// The GPUs are at different host bridges of one NUMA node.
    SameNumaNode,
    /// The GPUs are at the same host bridge.
    SameHostBridge,
    /// The path crosses several PCIe switches and no host bridge.
    SeveralSwitches,
    /// The path crosses one PCIe switch.
    OneSwitch,
    /// The GPUs are on the same board.
    SameBoard,
}

/// The links between two GPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GpuLink {
    /// Path over PCIe.
    pub pcie: PciePath,
    /// Number of active NVLinks, directly or through NVSwitches.
    pub nvlinks: u8,
}

impl GpuLink {
    /// Returns the score of the link. Uses the values of NVIDIA's device plugin, which ignores
    /// NVSwitches.
    pub fn score(self) -> u32 {
        let pcie = match self.pcie {
            PciePath::Unknown => 0,
            PciePath::AcrossNumaNodes => 10,
            PciePath::SameNumaNode => 20,
            PciePath::SameHostBridge => 30,
            PciePath::SeveralSwitches => 40,
            PciePath::OneSwitch => 50,
            PciePath::SameBoard => 60,
        };
        pcie + 100 * u32::from(self.nvlinks)
    }
}

/// The GPUs of a node and the links between them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Topology {
    /// UUIDs in NVML's order.
    gpus: Vec<String>,
    /// Score of each pair, row by row.
    scores: Vec<u32>,
    /// Whether the link of each pair is known, row by row.
    known: Vec<bool>,
}

impl Topology {
    /// Creates the topology of GPUs in NVML's order. `link` returns the link between two GPUs, by
    /// index.
    pub fn new(gpus: Vec<String>, link: impl Fn(usize, usize) -> GpuLink) -> Self {
        Self::from_pairs(gpus, |one, other| (link(one, other).score(), true))
    }

    /// Creates the topology of GPUs as [`Topology::new`] does. `is_known` returns whether the link
    /// between two GPUs is known. For an unknown link, `link` returns the known part.
    pub fn with_unknown_links(
        gpus: Vec<String>,
        link: impl Fn(usize, usize) -> GpuLink,
        is_known: impl Fn(usize, usize) -> bool,
    ) -> Self {
        Self::from_pairs(gpus, |one, other| (link(one, other).score(), is_known(one, other)))
    }

    /// Creates a topology. `pair` returns the score of two GPUs and whether their link is known.
    fn from_pairs(gpus: Vec<String>, pair: impl Fn(usize, usize) -> (u32, bool)) -> Self {
        let symmetric = |one: usize, other: usize| {
            if one == other { (0, true) } else { pair(one.min(other), one.max(other)) }
        };
        let pairs = (0..gpus.len()).flat_map(|one| (0..gpus.len()).map(move |other| (one, other)));
        let (scores, known) = pairs.map(|(one, other)| symmetric(one, other)).unzip();
        Self { gpus, scores, known }
    }

    /// Returns whether all links are known.
    pub fn has_all_links(&self) -> bool {
        self.known.iter().all(|known| *known)
    }

    /// Returns this topology with the GPUs and links of `earlier` that are not known now. A GPU of
    /// this topology keeps an earlier link to another GPU if the current link is unknown.
    #[must_use]
    pub fn with_earlier_links(&self, earlier: &Self) -> Self {
        let added = self.gpus.iter().filter(|gpu| earlier.position(gpu).is_none());
        let gpus: Vec<String> = earlier.gpus.iter().chain(added).cloned().collect();
        let positions: Vec<_> = gpus.iter().map(|gpu| (self.position(gpu), earlier.position(gpu))).collect();
        Self::from_pairs(gpus, |one, other| {
            let present = self.pair_link(positions[one].0, positions[other].0);
            let before = earlier.pair_link(positions[one].1, positions[other].1);
            match (present, before) {
                (Some((score, true)), _) | (_, Some((score, true))) => (score, true),
                (Some(unknown), _) | (None, Some(unknown)) => unknown,
                (None, None) => (0, false),
            }
        })
    }

    /// Returns the UUIDs of the GPUs.
    pub fn gpus(&self) -> &[String] {
        &self.gpus
    }

    /// Returns the score of a set of GPUs: the sum over its pairs.
    pub fn score(&self, gpus: &[&str]) -> u32 {
        let pairs = gpus.iter().enumerate().flat_map(|(at, one)| gpus[at + 1..].iter().map(move |other| (one, other)));
        pairs.map(|(one, other)| self.pair_score(self.position(one), self.position(other))).sum()
    }

    /// Chooses `size` of the available GPUs, including `required`. GPUs that the topology does not
    /// contain have no links. The result does not depend on the order of `available`.
    ///
    /// Returns all available GPUs if there are at most `size`. With at most 16 available GPUs, no
    /// set that includes `required` has a higher score than the choice. With more available GPUs,
    /// the choice adds one GPU at a time.
    pub fn choose<'a>(&self, available: &[&'a str], required: &[&str], size: usize) -> Vec<&'a str> {
        let mut free: Vec<&str> = available.to_vec();
        free.sort_by_key(|gpu| (self.position(gpu).unwrap_or(usize::MAX), *gpu));
        free.dedup();
        if free.len() <= size {
            return free;
        }
        let required: Vec<usize> = (0..free.len()).filter(|&at| required.contains(&free[at])).take(size).collect();
        let positions: Vec<Option<usize>> = free.iter().map(|gpu| self.position(gpu)).collect();
        let pair = |one: usize, other: usize| self.pair_score(positions[one], positions[other]);
        let candidates = Candidates::new(free.len(), pair);
        let chosen = if free.len() <= MAX_GPUS_FOR_EXHAUSTIVE_SEARCH {
            candidates.best_set(&required, size)
        } else {
            candidates.grow_set(&required, size)
        };
        chosen.into_iter().map(|at| free[at]).collect()
    }

    fn position(&self, gpu: &str) -> Option<usize> {
        self.gpus.iter().position(|known| known == gpu)
    }

    fn pair_score(&self, one: Option<usize>, other: Option<usize>) -> u32 {
        self.pair_link(one, other).map_or(0, |(score, _)| score)
    }

    /// Returns the score of two GPUs and whether their link is known. Returns `None` if the
    /// topology does not contain both GPUs.
    fn pair_link(&self, one: Option<usize>, other: Option<usize>) -> Option<(u32, bool)> {
        let at = one? * self.gpus.len() + other?;
        Some((self.scores[at], self.known[at]))
    }
}

/// The available GPUs of one choice, by number.
struct Candidates {
    /// Score of each pair.
    scores: Vec<Vec<u32>>,
}

impl Candidates {
    fn new(count: usize, pair: impl Fn(usize, usize) -> u32) -> Self {
        Self { scores: (0..count).map(|one| (0..count).map(|other| pair(one, other)).collect()).collect() }
    }

    /// Returns the best of all sets of `size` candidates that contain `required`. Among equally
    /// good sets, returns the first.
    fn best_set(&self, required: &[usize], size: usize) -> Vec<usize> {
        let count = self.scores.len();
        let (all, required) = ((1_usize << count) - 1, required.iter().fold(0, |set, at| set | 1 << at));
        let scores = self.scores_of_sets();
        let (mut best, mut best_quality) = (0, None);
        for set in sets_of(size, count).filter(|set| set & required == required) {
            let quality = Some((scores[set], scores[all & !set]));
            if quality > best_quality {
                (best, best_quality) = (set, quality);
            }
        }
        (0..count).filter(|at| best >> at & 1 == 1).collect()
    }

    /// Returns the score of each set of candidates. Bit `n` of a set's index stands for candidate
    /// `n`.
    fn scores_of_sets(&self) -> Vec<u32> {
        let mut scores = vec![0_u32; 1 << self.scores.len()];
        for set in 1..scores.len() {
            let first = set.trailing_zeros() as usize;
            let without_first = set & (set - 1);
            if without_first != 0 {
                let last = without_first.ilog2() as usize;
                let between = without_first & !(1 << last);
                // Both sets contain the pairs without `first` and `last`.
                let separate = scores[without_first] + scores[set & !(1 << last)] - scores[between];
                scores[set] = separate + self.scores[first][last];
            }
        }
        scores
    }

    /// Returns `required`, extended to `size` members. Each step adds the candidate that has the
    /// best links to the set. Among several equally good candidates, the step adds the candidate
    /// with the best links to all candidates, because later steps add members from among these
    /// candidates.
    fn grow_set(&self, required: &[usize], size: usize) -> Vec<usize> {
        let mut set = required.to_vec();
        while set.len() < size {
            let to_set = |at: usize| set.iter().map(|&member| self.scores[at][member]).sum::<u32>();
            let to_all = |at: usize| self.scores[at].iter().sum::<u32>();
            // `max_by_key` returns the last of several maxima.
            let others = (0..self.scores.len()).rev().filter(|at| !set.contains(at));
            let Some(next) = others.max_by_key(|&at| (to_set(at), to_all(at))) else { break };
            set.push(next);
        }
        set.sort_unstable();
        set
    }
}

/// Returns all sets of `size` of `count` numbers as bits, in ascending order.
fn sets_of(size: usize, count: usize) -> impl Iterator<Item = usize> {
    let first = (1_usize << size) - 1;
    let next = move |&set: &usize| {
        // Changes the lowest group of set bits: moves its highest bit up by one, and its other bits
        // to the bottom.
        let lowest = set & set.wrapping_neg();
        let moved = set + lowest;
        let next = moved | ((set ^ moved) >> 2).checked_div(lowest)?;
        (next < 1 << count).then_some(next)
    };
    std::iter::successors(Some(first), next)
}
