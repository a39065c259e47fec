//! `cleave-bench topology`: measures how policies choose whole GPUs by their links.
//!
//! For each kind of machine, the benchmark measures the time of a choice for all occupancies and
//! sizes, or for a sample of the occupancies. For machines with eight GPUs, the benchmark also
//! simulates pods that arrive and end at random, to compare three policies. The policies are the
//! order of UUIDs, the policy of NVIDIA's device plugin (`bestEffortPolicy` of go-gpuallocator) and
//! Cleave's policy. The quality of a choice is its score divided by the best score of the same
//! number of GPUs on an empty machine. Pods with one GPU do not count, because they use no links.
use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use cleave_plan::topology::{GpuLink, PciePath, Topology};
use serde::Serialize;
use sim_machine::cube_mesh_nvlinks;

/// Measures the choice of whole GPUs.
#[derive(Debug, clap::Args)]
pub(crate) struct TopologyArgs {
    /// Number of simulated pods for each machine with eight GPUs and each policy.
    #[arg(long, default_value_t = 50_000)]
    pods: u32,
    /// Mean number of pods that arrive during the mean lifetime of a pod.
    #[arg(long, default_value_t = 3.0)]
    load: f64,
}

/// One line of the output, as JSON.
#[derive(Debug, Serialize)]
struct OutputLine {
    machine: &'static str,
    gpus: usize,
    choose_us_p50: f64,
    choose_us_p99: f64,
    choose_us_max: f64,
    /// Mean quality of each policy. Only for machines with eight GPUs.
    quality: BTreeMap<&'static str, f64>,
}

/// A set of GPUs of a machine: each bit stands for one GPU.
type GpuSet = u32;
type Link = fn(u32, u32) -> GpuLink;

/// A kind of machine.
struct Machine {
    topology: Topology,
    names: Vec<String>,
    /// Score of each set, for machines with eight GPUs.
    scores: Vec<u32>,
    /// Best score of each size, for machines with eight GPUs.
    best: [u32; 9],
}

const MACHINES: [(&str, usize, Link); 5] = [
    ("DGX-1 V100", 8, |one, other| GpuLink {
        pcie: pcie_path(one, other, PciePath::OneSwitch, PciePath::SameHostBridge),
        nvlinks: cube_mesh_nvlinks(one, other),
    }),
    ("DGX A100", 8, |one, other| GpuLink {
        pcie: pcie_path(one, other, PciePath::OneSwitch, PciePath::SameNumaNode),
        nvlinks: 12,
    }),
    ("two sockets with 4 GPUs", 8, |one, other| GpuLink {
        pcie: pcie_path(one, other, PciePath::SameNumaNode, PciePath::SameNumaNode),
        nvlinks: 0,
    }),
    ("4 bridged pairs", 8, |one, other| GpuLink {
        pcie: pcie_path(one, other, PciePath::SameNumaNode, PciePath::SameNumaNode),
        nvlinks: if one / 2 == other / 2 { 12 } else { 0 },
    }),
    ("16 GPUs in 4 NUMA nodes", 16, |one, other| GpuLink {
        pcie: pcie_path(one, other, PciePath::OneSwitch, PciePath::SameNumaNode),
        nvlinks: 0,
    }),
];

/// Returns the PCIe path between two GPUs: `in_pair` for the two GPUs of a pair, `in_node` within a
/// NUMA node of four GPUs, and the path between NUMA nodes otherwise.
fn pcie_path(one: u32, other: u32, in_pair: PciePath, in_node: PciePath) -> PciePath {
    match (one / 2 == other / 2, one / 4 == other / 4) {
        (true, _) => in_pair,
        (false, true) => in_node,
        (false, false) => PciePath::AcrossNumaNodes,
    }
}

/// Runs the benchmark, and prints one JSON line for each kind of machine.
pub(crate) fn run(args: &TopologyArgs) -> anyhow::Result<()> {
    ensure!(args.load > 0.0, "the load must be positive");
    for (title, gpus, link) in MACHINES {
        let machine = Machine::new(gpus, link)?;
        let mut times = measure_choices(&machine);
        times.sort_by(f64::total_cmp);
        let at = |percent: usize| times.get((times.len() * percent).div_ceil(100).max(1) - 1).copied();
        let rounded = |value: f64, digits: f64| (value * digits).round() / digits;
        let mut quality = BTreeMap::new();
        if gpus == 8 {
            let policies: [(&str, Policy); 3] =
                [("uuid", choose_first_by_uuid), ("nvidia", choose_as_nvidia), ("cleave", choose_as_cleave)];
            for (name, policy) in policies {
                quality.insert(name, rounded(simulate(&machine, policy, args), 10_000.0));
            }
        }
        let line = OutputLine {
            machine: title,
            gpus,
            choose_us_p50: rounded(at(50).context("no times")?, 10.0),
            choose_us_p99: rounded(at(99).context("no times")?, 10.0),
            choose_us_max: rounded(at(100).context("no times")?, 10.0),
            quality,
        };
        println!("{}", serde_json::to_string(&line).context("a line as JSON")?);
    }
    Ok(())
}

impl Machine {
    fn new(gpus: usize, link: Link) -> anyhow::Result<Self> {
        let names: Vec<String> = (0..gpus).map(|gpu| format!("GPU-{gpu:02}")).collect();
        let number = |gpu: usize| u32::try_from(gpu).unwrap_or(u32::MAX);
        let topology = Topology::new(names.clone(), |one, other| link(number(one), number(other)));
        let mut machine = Self { topology, names, scores: Vec::new(), best: [0; 9] };
        if gpus == 8 {
            machine.scores = (0..256).map(|set| machine.topology.score(&machine.names_of(set))).collect();
            for (set, &score) in machine.scores.iter().enumerate() {
                let best = machine.best.get_mut(set.count_ones() as usize).context("at most eight GPUs")?;
                *best = score.max(*best);
            }
        }
        Ok(machine)
    }

    fn names_of(&self, set: GpuSet) -> Vec<&str> {
        let names = self.names.iter().enumerate().filter(|(gpu, _)| set >> gpu & 1 == 1);
        names.map(|(_, name)| name.as_str()).collect()
    }

    fn score(&self, set: GpuSet) -> u32 {
        self.scores.get(set as usize).copied().unwrap_or_default()
    }
}

/// Returns the times of choices in microseconds. Measures all occupancies of eight GPUs, or a
/// sample of the occupancies if the machine has more GPUs.
fn measure_choices(machine: &Machine) -> Vec<f64> {
    let all = 1_u32 << machine.names.len();
    let step = if machine.names.len() == 8 { 1 } else { 61 };
    let mut times = Vec::new();
    for free in (1..all).rev().step_by(step) {
        let available = machine.names_of(free);
        for size in 1..=available.len() {
            let start = Instant::now();
            let chosen = machine.topology.choose(std::hint::black_box(&available), &[], size);
            times.push(start.elapsed().as_secs_f64() * 1e6);
            std::hint::black_box(chosen);
        }
    }
    times
}

/// Chooses a number of GPUs among the free GPUs.
type Policy = fn(&Machine, GpuSet, u32) -> GpuSet;

fn choose_as_cleave(machine: &Machine, free: GpuSet, size: u32) -> GpuSet {
    let chosen = machine.topology.choose(&machine.names_of(free), &[], size as usize);
    let gpus = machine.names.iter().enumerate().filter(|(_, name)| chosen.contains(&name.as_str()));
    gpus.fold(0, |set, (gpu, _)| set | 1 << gpu)
}

/// Returns the first free GPUs by UUID. UUIDs are random, so their order is unrelated to the links.
fn choose_first_by_uuid(_: &Machine, free: GpuSet, size: u32) -> GpuSet {
    let order = [5, 0, 3, 6, 1, 7, 2, 4_u32].into_iter().filter(|gpu| free >> gpu & 1 == 1);
    order.take(size as usize).fold(0, |set, gpu| set | 1 << gpu)
}

/// Divides all free GPUs into sets of `size` and a remainder, so that the sum of the scores is
/// maximal. Returns the set of `size` with the highest score. For one GPU, returns the first free
/// GPU.
fn choose_as_nvidia(machine: &Machine, free: GpuSet, size: u32) -> GpuSet {
    fn divide(machine: &Machine, free: GpuSet, size: u32, sets: &mut Vec<GpuSet>, best: &mut (u32, Vec<GpuSet>)) {
        if free == 0 {
            let sum = sets.iter().map(|&set| machine.score(set)).sum();
            if sum > best.0 || best.1.is_empty() {
                *best = (sum, sets.clone());
            }
            return;
        }
        let first = free & free.wrapping_neg();
        let remainder = free.count_ones() % size;
        for set in 1..=free {
            let count = set.count_ones();
            if set & !free == 0 && set & first != 0 && (count == size || remainder > 0 && count == remainder) {
                sets.push(set);
                divide(machine, free & !set, size, sets, best);
                sets.pop();
            }
        }
    }
    if size == 1 {
        return free & free.wrapping_neg();
    }
    let mut best = (0, Vec::new());
    divide(machine, free, size, &mut Vec::new(), &mut best);
    let full = best.1.into_iter().rev().filter(|set| set.count_ones() == size);
    full.max_by_key(|&set| machine.score(set)).unwrap_or_default()
}

/// Returns the mean quality of a policy's choices for random pods. Drops the pods that do not fit.
fn simulate(machine: &Machine, policy: Policy, args: &TopologyArgs) -> f64 {
    const POD_SIZES_IN_GPUS: [u32; 9] = [1, 1, 1, 1, 2, 2, 2, 4, 4];
    let mut numbers = fastrand::Rng::with_seed(1);
    let (mut free, mut running, mut now): (GpuSet, Vec<(f64, GpuSet)>, f64) = (0xff, Vec::new(), 0.0);
    let (mut sum, mut count) = (0.0, 0_u32);
    let mut known: BTreeMap<(GpuSet, u32), GpuSet> = BTreeMap::new();
    for _ in 0..args.pods {
        let mut random_time = |mean: f64| -mean * (1.0 - numbers.f64()).ln();
        now += random_time(1.0 / args.load);
        let end = now + random_time(1.0);
        running.retain(|&(end, set)| {
            let runs = end > now;
            free |= if runs { 0 } else { set };
            runs
        });
        let size = numbers.choice(POD_SIZES_IN_GPUS).unwrap_or(1);
        if free.count_ones() < size {
            continue;
        }
        let set = *known.entry((free, size)).or_insert_with(|| policy(machine, free, size));
        free &= !set;
        running.push((end, set));
        if size > 1 {
            sum += f64::from(machine.score(set)) / f64::from(machine.best[size as usize]);
            count += 1;
        }
    }
    sum / f64::from(count.max(1))
}
