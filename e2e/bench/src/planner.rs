//! `cleave-bench planner`: measures the time of a plan for 10 to 1,000 nodes.
//!
//! The cluster is busy. Its GPUs are of three models, in the modes MIG and MPS, and some of their
//! slices are in use. Pods have mixed sizes and three priorities, and a quarter of the pods select
//! a zone. Every run generates the same clusters.
use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use cleave_plan::device::Mode;
use cleave_plan::snapshot::{Gpu, Node, Pod, SliceGroup};
use cleave_plan::{Policy, Quantity, Snapshot, check, plan};
use serde::Serialize;

/// Measures the time of a plan.
#[derive(Debug, clap::Args)]
pub(crate) struct PlannerArgs {
    /// Numbers of nodes. The benchmark measures clusters of each size.
    #[arg(long, value_delimiter = ',', default_values_t = [10, 30, 100, 300, 1000])]
    nodes: Vec<u32>,
    /// GPUs per node.
    #[arg(long, default_value_t = 8)]
    gpus_per_node: u32,
    /// Pending pods per node.
    #[arg(long, default_value_t = 5)]
    pods_per_node: u32,
    /// Mean percentage of the slices that are in use.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(0..=100))]
    in_use: u32,
    /// Number of clusters of each size. The benchmark plans each cluster three times.
    #[arg(long, default_value_t = 7)]
    clusters: u64,
}

/// One line of the output, as JSON.
#[derive(Debug, Serialize)]
struct PlannerOutputLine {
    nodes: u32,
    gpus_per_node: u32,
    pods: u32,
    plan_ms_p50: f64,
    plan_ms_p99: f64,
    placed_p50: usize,
    gpus_changed_p50: usize,
}

/// Runs the benchmark, and prints one JSON line for each number of nodes.
pub(crate) fn run(args: &PlannerArgs) -> anyhow::Result<()> {
    ensure!(args.clusters > 0, "at least one cluster is needed");
    for &nodes in &args.nodes {
        let pods = nodes.checked_mul(args.pods_per_node).context("too many pods")?;
        let (mut times, mut placed, mut changed) = (Vec::new(), Vec::new(), Vec::new());
        for seed in 0..args.clusters {
            let snapshot = random_cluster(seed, nodes, args.gpus_per_node, pods, args.in_use);
            for _ in 0..3 {
                let start = Instant::now();
                let planned = plan(&snapshot, &Policy::default());
                times.push(start.elapsed().as_secs_f64() * 1000.0);
                placed.push(planned.plan.placements.len());
                changed.push(planned.plan.gpus.iter().filter(|gpu| gpu.changed).count());
                if let Some(violation) = check(&snapshot, &planned.plan).first() {
                    anyhow::bail!("cluster {seed} of {nodes} nodes: the plan breaks a rule: {violation}");
                }
            }
        }
        times.sort_by(f64::total_cmp);
        placed.sort_unstable();
        changed.sort_unstable();
        let rounded = |time: f64| (time * 1000.0).round() / 1000.0;
        let line = PlannerOutputLine {
            nodes,
            gpus_per_node: args.gpus_per_node,
            pods,
            plan_ms_p50: rounded(percentile(&times, 50).context("no times")?),
            plan_ms_p99: rounded(percentile(&times, 99).context("no times")?),
            placed_p50: percentile(&placed, 50).context("no plans")?,
            gpus_changed_p50: percentile(&changed, 50).context("no plans")?,
        };
        println!("{}", serde_json::to_string(&line).context("a line as JSON")?);
    }
    Ok(())
}

/// Returns the value at this percentile of sorted values, or `None` if there are no values.
fn percentile<T: Copy>(sorted: &[T], percent: usize) -> Option<T> {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied()
}

/// The random number generator `SplitMix64`, which gives the same numbers in every run.
struct RandomNumberGenerator(u64);

impl RandomNumberGenerator {
    /// Returns a number less than `end`.
    fn next_below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) % (end as u64).max(1)).unwrap_or(0)
    }
}

/// Name, number of memory slices, and possible placements of a MIG profile.
type Profile = (&'static str, u32, &'static [u32]);
const A100_PROFILES: [Profile; 5] = [
    ("1g.5gb", 1, &[0, 1, 2, 3, 4, 5, 6]),
    ("2g.10gb", 2, &[0, 2, 4]),
    ("3g.20gb", 4, &[0, 4]),
    ("4g.20gb", 4, &[0]),
    ("7g.40gb", 8, &[0]),
];
const H100_PROFILES: [Profile; 5] = [
    ("1g.10gb", 1, &[0, 1, 2, 3, 4, 5, 6]),
    ("2g.20gb", 2, &[0, 2, 4]),
    ("3g.40gb", 4, &[0, 4]),
    ("4g.40gb", 4, &[0]),
    ("7g.80gb", 8, &[0]),
];
const SLICE_SIZES_GB: [u64; 4] = [5, 10, 20, 40];

/// Generates a cluster. The same seed gives the same cluster.
fn random_cluster(seed: u64, nodes: u32, gpus_per_node: u32, pods: u32, in_use: u32) -> Snapshot {
    let mut numbers = RandomNumberGenerator(seed);
    let nodes = (0..nodes).map(|node| {
        let kind = numbers.next_below(3);
        let gpus = (0..gpus_per_node).map(|index| random_gpu(&mut numbers, kind, node, index, in_use)).collect();
        Node {
            name: format!("node-{node:04}"),
            labels: BTreeMap::from([("zone".to_owned(), ["a", "b", "c"][numbers.next_below(3)].to_owned())]),
            allocatable: BTreeMap::from([
                ("cpu".to_owned(), Quantity::whole(96)),
                ("memory".to_owned(), Quantity::new("1Ti")),
                ("pods".to_owned(), Quantity::whole(110)),
            ]),
            requested: BTreeMap::from([("cpu".to_owned(), Quantity::whole(numbers.next_below(64) as u64))]),
            gpus,
            ..Node::default()
        }
    });
    let nodes = nodes.collect();
    let pods = (0..pods).map(|pod| {
        let resource = match numbers.next_below(8) {
            0..3 => format!("nvidia.com/mig-{}", A100_PROFILES[numbers.next_below(5)].0),
            3..5 => format!("nvidia.com/mig-{}", H100_PROFILES[numbers.next_below(5)].0),
            5..7 => format!("nvidia.com/gpu-{}gb", SLICE_SIZES_GB[numbers.next_below(4)]),
            _ => "nvidia.com/gpu".to_owned(),
        };
        let mut selector = BTreeMap::new();
        if numbers.next_below(4) == 0 {
            selector.insert("zone".to_owned(), ["a", "b", "c"][numbers.next_below(3)].to_owned());
        }
        Pod {
            name: format!("default/pod-{pod:05}"),
            priority: [0, 100, 1000][numbers.next_below(3)],
            requests: BTreeMap::from([
                (resource, Quantity::whole(1)),
                ("cpu".to_owned(), Quantity::whole(1 + numbers.next_below(4) as u64)),
                ("memory".to_owned(), Quantity::new("4Gi")),
            ]),
            node_selector: selector,
            ..Pod::default()
        }
    });
    Snapshot { nodes, pods: pods.collect() }
}

/// Generates a GPU with a random set of slices. `kind` selects the model, and all GPUs of a node
/// have the same kind.
fn random_gpu(numbers: &mut RandomNumberGenerator, kind: usize, node: u32, index: u32, in_use: u32) -> Gpu {
    let (model, memory, mode) = [
        ("NVIDIA A100-SXM4-40GB", 40_960, Mode::Mig),
        ("NVIDIA H100 80GB HBM3", 81_559, Mode::Mig),
        ("NVIDIA A100-SXM4-80GB", 81_920, Mode::Mps),
    ][kind];
    let mut slices = Vec::new();
    let (mut taken, mut gibibytes) = (0_u32, 0);
    for _ in 0..numbers.next_below(6) {
        let in_use = numbers.next_below(100) < in_use as usize;
        let (resource, placement) = if mode == Mode::Mps {
            let size = SLICE_SIZES_GB[numbers.next_below(4)];
            if gibibytes + size > memory / 1024 {
                continue;
            }
            gibibytes += size;
            (format!("nvidia.com/gpu-{size}gb"), None)
        } else {
            let (name, size, places) = if kind == 0 { A100_PROFILES } else { H100_PROFILES }[numbers.next_below(5)];
            let start = places[numbers.next_below(places.len())];
            let bits = ((1 << size) - 1) << start;
            if taken & bits != 0 {
                continue;
            }
            taken |= bits;
            (format!("nvidia.com/mig-{name}"), Some(start))
        };
        slices.push(SliceGroup { placement, resource, in_use, count: 1, profile: None, pod: None });
    }
    Gpu {
        uuid: format!("GPU-{node:04}-{index}"),
        index,
        model: model.to_owned(),
        memory: Quantity::mebibytes(memory),
        mode,
        slices,
        ..Gpu::default()
    }
}
