//! `cleave-bench trace`: compares placement policies on a public GPU trace, as in "Beware of
//! Fragmentation" (USENIX ATC'23).
//!
//! The workload consists of all pods of a list, and pods drawn from the list at random. Drawing
//! ends before the GPU demand exceeds 130 % of the cluster's capacity. The benchmark shuffles the
//! pods and places them one by one. It drops a pod that fits on no node.
mod chooser;
mod churn;
mod cluster;
mod figures;
mod lists;
mod policies;
mod random;

use std::io::Write as _;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use chooser::{PlacementPolicy, Policy};
use cleave_plan::placement::{LearnedScore, ObservedDemands};
use cluster::{Cluster, CpuPodPlacement, PodPlacement};
use figures::{percentile, ratio};
use lists::{Host, Pod, read_hosts, read_pods};
use policies::{BestFitScore, FgdScore, RandomScore};
use random::Rng;
use serde_json::json;

/// Replays a list of pods on a list of nodes, and prints the fraction of the GPU capacity that a
/// placement policy allocates.
#[derive(clap::Args)]
pub(crate) struct TraceArgs {
    /// CSV file of nodes: `sn,cpu_milli,memory_mib,gpu,model`.
    #[arg(long)]
    nodes: PathBuf,
    /// CSV file of pods: `name,cpu_milli,memory_mib,num_gpu,gpu_milli[,gpu_spec,…]`.
    #[arg(long)]
    pods: PathBuf,
    /// Placement policy.
    #[arg(long, value_enum)]
    policy: Policy,
    /// Seed of the random workload.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// File to write, with a line for each placed pod: `pod_name,node,gpu_indices,gpu_milli`.
    #[arg(long)]
    placements: Option<PathBuf>,
    /// Start without a history, so that policies learn typical requests only from pods that arrive.
    /// Without this option, the whole list is the history.
    #[arg(long)]
    no_history: bool,
    /// How the benchmark places pods without GPUs. In a real cluster, Cleave does not place them.
    #[arg(long, value_enum, default_value_t = CpuPodPlacement::Policy)]
    without_gpus: CpuPodPlacement,
    /// Simulate departures: pods end after their lifetime in the trace, and pods that fit on no
    /// node wait. Requests drift from small shares to large shares. Prints allocation and waiting
    /// times.
    #[arg(long)]
    departures: bool,
}

/// Draws the workload. Returns indices into the list, in order of arrival.
fn draw_arrivals(pods: &[Pod], capacity: u64, rng: &mut Rng) -> Vec<usize> {
    let limit = capacity * 13 / 10;
    let mut order: Vec<usize> = (0..pods.len()).collect();
    let mut wanted: u64 = pods.iter().map(|pod| u64::from(pod.demand.total())).sum();
    loop {
        let drawn = rng.next_below(pods.len());
        wanted += u64::from(pods[drawn].demand.total());
        if wanted > limit {
            break;
        }
        order.push(drawn);
    }
    rng.shuffle(&mut order);
    order
}

/// Runs the benchmark, and prints its result as JSON.
pub(crate) fn run(args: &TraceArgs) -> Result<()> {
    match args.policy {
        Policy::Cleave => run_policy::<LearnedScore>(args),
        Policy::Fgd => run_policy::<FgdScore>(args),
        Policy::BestFit => run_policy::<BestFitScore>(args),
        Policy::Random => run_policy::<RandomScore>(args),
    }
}

fn run_policy<P: PlacementPolicy>(args: &TraceArgs) -> Result<()> {
    let whole = read_hosts(&args.nodes)?;
    let pods = read_pods(&args.pods)?;
    ensure!(!pods.is_empty() && !whole.is_empty(), "no pods, or no nodes");
    let mut cluster = Cluster::<P>::new(whole.clone(), args.without_gpus);
    if args.departures {
        return churn::run(args.policy, args.seed, cluster, &pods);
    }
    let capacity: u64 = whole.iter().map(|host| u64::from(host.free_gpu_thousandths())).sum();
    let mut rng = Rng(args.seed);
    let order = draw_arrivals(&pods, capacity, &mut rng);
    let mut seen = ObservedDemands::new(None);
    if !args.no_history {
        let mut history: Vec<&Pod> = pods.iter().collect();
        Rng(!args.seed).shuffle(&mut history);
        for pod in history {
            seen.add(&pod.demand);
            P::count_arrived_pod(&mut cluster, pod);
        }
        P::update_score(&mut cluster, &seen, &[]);
    }
    let mut file = args.placements.as_ref().map(std::fs::File::create).transpose()?.map(std::io::BufWriter::new);
    let (mut arrived, mut allocated, mut at_100) = (0u64, 0u64, None);
    let mut placements: Vec<(&Pod, PodPlacement)> = Vec::new();
    let (mut times, mut learning) = (Vec::with_capacity(order.len()), Vec::new());
    for (turn, &index) in order.iter().enumerate() {
        let pod = &pods[index];
        arrived += u64::from(pod.demand.total());
        if arrived > capacity && at_100.is_none() {
            at_100 = Some(allocated);
        }
        seen.add(&pod.demand);
        P::count_arrived_pod(&mut cluster, pod);
        if args.policy == Policy::Cleave || args.no_history && turn % 500 == 499 {
            let start = Instant::now();
            P::update_score(&mut cluster, &seen, &[]);
            learning.push(start.elapsed().as_secs_f64() * 1e6);
        }
        let start = Instant::now();
        let placed = P::place_pod(&mut cluster, pod);
        if pod.demand.gpus > 0 {
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
        let Some(placed) = placed else { continue };
        cluster.start_pod(pod, &placed);
        allocated += u64::from(pod.demand.total());
        if let Some(file) = &mut file {
            let devices: Vec<String> = placed.devices.iter().map(ToString::to_string).collect();
            writeln!(file, "{},{},{},{}", pod.name, whole[placed.node].name, devices.join("+"), pod.demand.per_gpu)?;
        }
        placements.push((pod, placed));
    }
    verify_placements(whole, &placements, cluster.hosts())?;
    times.sort_by(f64::total_cmp);
    let result = json!({
        "policy": args.policy.name(), "seed": args.seed, "history": !args.no_history,
        "allocation_at_100": ratio(at_100.unwrap_or(allocated), capacity), "allocation_at_130": ratio(allocated, capacity),
        "decisions": times.len(), "decision_us_p50": percentile(&times, 50), "decision_us_p99": percentile(&times, 99),
        "learning_us_max": learning.iter().copied().fold(0.0, f64::max),
    });
    println!("{result}");
    Ok(())
}

/// Checks the placements independently of the policy: no capacity is allocated twice, and the free
/// capacity at the end matches the placements.
fn verify_placements(mut hosts: Vec<Host>, placements: &[(&Pod, PodPlacement)], after: &[Host]) -> Result<()> {
    for (pod, placed) in placements {
        let demand = &pod.demand;
        let host = hosts.get_mut(placed.node).context("a pod is on an unknown node")?;
        let mut devices = placed.devices.clone();
        devices.sort_unstable();
        devices.dedup();
        ensure!(devices.len() == demand.gpus as usize, "{demand:?} got GPUs {:?}", placed.devices);
        host.cpu = host.cpu.checked_sub(demand.cpu).context("CPU was allocated twice")?;
        host.memory = host.memory.checked_sub(pod.memory).context("memory was allocated twice")?;
        for device in devices {
            let free = host.gpus.get_mut(device).context("a pod is on an unknown GPU")?;
            *free = free.checked_sub(demand.per_gpu).context("a GPU was allocated twice")?;
        }
        if !demand.models.is_empty() && !demand.models.contains(&host.model) {
            bail!("{demand:?} is on a {}", host.model);
        }
    }
    ensure!(hosts == after, "the free capacity does not match the placements");
    Ok(())
}
