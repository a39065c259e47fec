//! `cleave-bench trace`: compares placement policies on a public GPU trace, as in "Beware of
//! Fragmentation" (USENIX ATC'23).
//!
//! The workload is all pods of a list, plus pods drawn from the list at random. Drawing ends when
//! the GPU demand would exceed 130 % of the cluster's capacity. The pods are shuffled and placed
//! one by one. A pod that fits nowhere is dropped.
mod chooser;
mod churn;
mod figures;
mod lists;
mod policies;
mod random;

use std::io::Write as _;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use chooser::{Chooser, Policy};
use cleave_plan::placement::{Choice, Demand, Node, Observed};
use figures::{percentile, ratio};
use lists::{Pod, nodes, pods};
use random::Rng;
use serde_json::json;

/// Replays a list of pods on a list of nodes, and prints how much of the GPUs a placement policy
/// allocates.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// CSV file of nodes: `sn,cpu_milli,memory_mib,gpu,model`.
    #[arg(long)]
    nodes: PathBuf,
    /// CSV file of pods: `name,cpu_milli,memory_mib,num_gpu,gpu_milli[,gpu_spec,…]`.
    #[arg(long)]
    pods: PathBuf,
    /// Placement policy.
    #[arg(long, value_enum)]
    policy: Policy,
    /// Seed of the order of arrival.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// File to write, with a line for each placed pod: `pod_name,node,gpu_indices,gpu_milli`.
    #[arg(long)]
    placements: Option<PathBuf>,
    /// Simulate departures: pods leave after their lifetime in the trace, pods that fit nowhere
    /// wait, and requests drift from small shares to large ones. Prints allocation and waiting
    /// times.
    #[arg(long)]
    departures: bool,
}

/// Draws the workload. Returns indices into the list, in order of arrival.
fn arrivals(pods: &[Pod], capacity: u64, rng: &mut Rng) -> Vec<usize> {
    let limit = capacity * 13 / 10;
    let mut order: Vec<usize> = (0..pods.len()).collect();
    let mut wanted: u64 = pods.iter().map(|pod| u64::from(pod.demand.total())).sum();
    loop {
        let drawn = rng.below(pods.len());
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
pub(crate) fn run(args: &Args) -> Result<()> {
    let (names, nodes) = nodes(&args.nodes)?;
    let pods = pods(&args.pods)?;
    ensure!(!pods.is_empty() && !nodes.is_empty(), "no pods, or no nodes");
    if args.departures {
        return churn::run(args.policy, args.seed, nodes, &pods);
    }
    let capacity: u64 = nodes.iter().map(|node| u64::from(node.free())).sum();
    let mut rng = Rng(args.seed);
    let order = arrivals(&pods, capacity, &mut rng);
    let mut seen = Observed::new(None);
    pods.iter().for_each(|pod| seen.add(&pod.demand));
    let whole = nodes.clone();
    let mut chooser = Chooser::new(args.policy, nodes, &seen, args.seed);
    let mut file = args.placements.as_ref().map(std::fs::File::create).transpose()?.map(std::io::BufWriter::new);
    let (mut arrived, mut allocated, mut at_100) = (0u64, 0u64, None);
    let mut placed: Vec<(&Demand, Choice)> = Vec::new();
    let mut times = Vec::with_capacity(order.len());
    for &index in &order {
        let pod = &pods[index];
        arrived += u64::from(pod.demand.total());
        if arrived > capacity && at_100.is_none() {
            at_100 = Some(allocated);
        }
        let start = Instant::now();
        let choice = chooser.choose(&pod.demand);
        if let Some(choice) = &choice {
            chooser.allocate(&pod.demand, choice);
        }
        times.push(start.elapsed().as_secs_f64() * 1e6);
        let Some(choice) = choice else { continue };
        allocated += u64::from(pod.demand.total());
        if let Some(file) = &mut file {
            let devices: Vec<String> = choice.devices.iter().map(ToString::to_string).collect();
            writeln!(file, "{},{},{},{}", pod.name, names[choice.node], devices.join("+"), pod.demand.per_gpu)?;
        }
        placed.push((&pod.demand, choice));
    }
    verify(whole, &placed, chooser.nodes())?;
    times.sort_by(f64::total_cmp);
    let result = json!({
        "policy": args.policy.name(), "seed": args.seed,
        "allocation_at_100": ratio(at_100.unwrap_or(allocated), capacity), "allocation_at_130": ratio(allocated, capacity),
        "decisions": times.len(), "decision_us_p50": percentile(&times, 50), "decision_us_p99": percentile(&times, 99),
    });
    println!("{result}");
    Ok(())
}

/// Checks the placements independently of the policy: no capacity is allocated twice, and the free
/// capacity at the end agrees.
fn verify(mut nodes: Vec<Node>, placed: &[(&Demand, Choice)], after: &[Node]) -> Result<()> {
    for (demand, choice) in placed {
        let node = nodes.get_mut(choice.node).context("a pod is on an unknown node")?;
        let mut devices = choice.devices.clone();
        devices.dedup();
        ensure!(devices.len() == demand.gpus as usize, "{demand:?} got GPUs {:?}", choice.devices);
        node.cpu = node.cpu.checked_sub(demand.cpu).context("CPU was allocated twice")?;
        node.memory = node.memory.checked_sub(demand.memory).context("memory was allocated twice")?;
        for device in devices {
            let free = node.gpus.get_mut(device).context("a pod is on an unknown GPU")?;
            *free = free.checked_sub(demand.per_gpu).context("a GPU was allocated twice")?;
        }
        if !demand.models.is_empty() && !demand.models.contains(&node.model) {
            bail!("{demand:?} is on a {}", node.model);
        }
    }
    ensure!(nodes == after, "the free capacity does not match the placements");
    Ok(())
}
