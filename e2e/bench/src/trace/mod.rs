//! `cleave-bench trace`: placement policies on a public GPU trace, as in "Beware of Fragmentation"
//! (USENIX ATC'23).
//!
//! All pods of a list, then pods drawn from it until their GPU demand would pass 130 % of the
//! cluster's, shuffled, placed one by one; a pod that fits nowhere is dropped.
mod churn;
mod policies;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use cleave_plan::placement::{Choice, Demand, GPU, Node, Observed, Placer, Value};
use policies::{BestFit, Fgd};
use serde_json::json;

/// Replays a list of pods on a list of nodes and prints how much of the GPUs a placement policy
/// hands out.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Nodes: `sn,cpu_milli,memory_mib,gpu,model`.
    #[arg(long)]
    nodes: PathBuf,
    /// Pods: `name,cpu_milli,memory_mib,num_gpu,gpu_milli[,gpu_spec,…]`.
    #[arg(long)]
    pods: PathBuf,
    /// How a place is chosen.
    #[arg(long, value_enum)]
    policy: Policy,
    /// Seed of the order of arrival.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Write a line for each placed pod: `pod_name,node,gpu_indices,gpu_milli`.
    #[arg(long)]
    placements: Option<PathBuf>,
    /// Pods leave after the lifetime that the trace gives them, those that fit nowhere wait, and
    /// what pods ask for drifts from small shares to large ones: prints allocation and waiting
    /// instead.
    #[arg(long)]
    departures: bool,
}

/// A placement policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Policy {
    /// Cleave's own.
    Cleave,
    /// Fragmentation gradient descent.
    Fgd,
    /// The node and GPU with the least left.
    BestFit,
    /// Any place that fits.
    Random,
}

/// splitmix64: small, and the same everywhere.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from((u128::from(self.next()) * bound as u128) >> 64).unwrap_or(0)
    }

    fn unit(&mut self) -> f64 {
        f64::from(u32::try_from(self.next() >> 32).unwrap_or(0)) / f64::from(u32::MAX)
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

/// One pod of the list.
struct Pod {
    name: String,
    demand: Demand,
    /// Seconds from creation to deletion, where the list says.
    lifetime: Option<f64>,
}

/// The rows of a CSV file without quotes, by column.
fn rows(path: &Path) -> Result<Vec<BTreeMap<String, String>>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let mut lines = text.lines();
    let header: Vec<&str> = lines.next().with_context(|| format!("{} is empty", path.display()))?.split(',').collect();
    let row = |line: &str| header.iter().map(ToString::to_string).zip(line.split(',').map(str::to_owned)).collect();
    Ok(lines.filter(|line| !line.is_empty()).map(row).collect())
}

fn number<T: std::str::FromStr>(row: &BTreeMap<String, String>, column: &str) -> Result<T> {
    let text = row.get(column).with_context(|| format!("no column {column}"))?;
    text.parse().ok().with_context(|| format!("{column}: {text:?} is not a number"))
}

fn nodes(path: &Path) -> Result<(Vec<String>, Vec<Node>)> {
    let mut names = Vec::new();
    let mut nodes = Vec::new();
    for row in rows(path)? {
        names.push(row.get("sn").context("no column sn")?.clone());
        let cpu = number(&row, "cpu_milli")?;
        nodes.push(Node {
            model: row.get("model").context("no column model")?.clone(),
            cpu_total: cpu,
            cpu,
            memory: number(&row, "memory_mib")?,
            gpus: vec![GPU; number(&row, "gpu")?],
        });
    }
    Ok((names, nodes))
}

fn pods(path: &Path) -> Result<Vec<Pod>> {
    rows(path)?
        .iter()
        .map(|row| {
            let mut models: Vec<String> = row
                .get("gpu_spec")
                .filter(|spec| !spec.is_empty())
                .map_or_else(Vec::new, |spec| spec.split('|').map(str::to_owned).collect());
            models.sort();
            let time = |column| number::<f64>(row, column).ok();
            let demand = Demand {
                cpu: number(row, "cpu_milli")?,
                memory: number(row, "memory_mib")?,
                gpus: number(row, "num_gpu")?,
                per_gpu: number(row, "gpu_milli")?,
                models,
            };
            ensure!(demand.per_gpu <= GPU, "gpu_milli above {GPU}");
            let lifetime = time("deletion_time").zip(time("creation_time")).map(|(end, start)| end - start);
            Ok(Pod { name: row.get("name").context("no column name")?.clone(), demand, lifetime })
        })
        .collect()
}

/// Indices into the list, in order of arrival.
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

/// A way to choose a place, with its state.
enum Chooser {
    Cleave(Placer<Value>),
    Fgd(Placer<Fgd>),
    BestFit(Placer<BestFit>),
    Random(Placer<BestFit>, Rng),
}

/// Calls a method of whichever placer it is.
macro_rules! placer {
    ($chooser:expr, $placer:ident => $call:expr) => {
        match $chooser {
            Chooser::Cleave($placer) => $call,
            Chooser::Fgd($placer) => $call,
            Chooser::BestFit($placer) => $call,
            Chooser::Random($placer, _) => $call,
        }
    };
}

impl Chooser {
    fn new(policy: Policy, nodes: Vec<Node>, seen: &Observed, seed: u64) -> Self {
        match policy {
            Policy::Cleave => {
                let value = Value::learn(&seen.typical(true), &nodes);
                Self::Cleave(Placer::new(nodes, value))
            }
            Policy::Fgd => Self::Fgd(Placer::new(nodes, Fgd::new(&seen.typical(true)))),
            Policy::BestFit => Self::BestFit(Placer::new(nodes, BestFit)),
            Policy::Random => Self::Random(Placer::new(nodes, BestFit), Rng(!seed)),
        }
    }

    fn choose(&mut self, demand: &Demand) -> Option<Choice> {
        match self {
            Self::Cleave(placer) => placer.choose(demand),
            Self::Fgd(placer) => placer.choose(demand),
            Self::BestFit(placer) => placer.choose(demand),
            Self::Random(placer, rng) => policies::random(placer.nodes(), demand, rng),
        }
    }

    fn take(&mut self, demand: &Demand, choice: &Choice) {
        placer!(self, placer => placer.take(demand, choice));
    }

    fn give(&mut self, demand: &Demand, choice: &Choice) {
        placer!(self, placer => placer.give(demand, choice));
    }

    /// Learns anew what is typical, where the policy cares.
    fn learn<'a>(&mut self, seen: &Observed, waiting: impl Iterator<Item = &'a Demand>) {
        match self {
            Self::Cleave(placer) => {
                let value = Value::learn(&seen.typical(true), placer.nodes()).awaited(waiting);
                placer.set_policy(value);
            }
            Self::Fgd(placer) => placer.set_policy(Fgd::new(&seen.typical(true))),
            Self::BestFit(_) | Self::Random(..) => {}
        }
    }

    fn nodes(&self) -> &[Node] {
        placer!(self, placer => placer.nodes())
    }
}

#[allow(clippy::cast_precision_loss, reason = "sums of thousandths of some thousand GPUs are far below 2^52")]
fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole as f64
}

fn percentile(sorted: &[f64], percent: usize) -> f64 {
    sorted.get((sorted.len() * percent / 100).min(sorted.len().saturating_sub(1))).copied().unwrap_or(0.0)
}

fn policy_name(policy: Policy) -> String {
    clap::ValueEnum::to_possible_value(&policy).map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// Runs it.
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
    let mut held: Vec<(&Demand, Choice)> = Vec::new();
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
            chooser.take(&pod.demand, choice);
        }
        times.push(start.elapsed().as_secs_f64() * 1e6);
        let Some(choice) = choice else { continue };
        allocated += u64::from(pod.demand.total());
        if let Some(file) = &mut file {
            let devices: Vec<String> = choice.devices.iter().map(ToString::to_string).collect();
            writeln!(file, "{},{},{},{}", pod.name, names[choice.node], devices.join("+"), pod.demand.per_gpu)?;
        }
        held.push((&pod.demand, choice));
    }
    verify(whole, &held, chooser.nodes())?;
    times.sort_by(f64::total_cmp);
    let result = json!({
        "policy": policy_name(args.policy), "seed": args.seed,
        "allocation_at_100": ratio(at_100.unwrap_or(allocated), capacity), "allocation_at_130": ratio(allocated, capacity),
        "decisions": times.len(), "decision_us_p50": percentile(&times, 50), "decision_us_p99": percentile(&times, 99),
    });
    println!("{result}");
    Ok(())
}

/// Replays what was placed, apart from the code that placed it: nothing may be given twice, and the
/// free parts must agree.
fn verify(mut nodes: Vec<Node>, held: &[(&Demand, Choice)], after: &[Node]) -> Result<()> {
    for (demand, choice) in held {
        let node = nodes.get_mut(choice.node).context("a pod on no node")?;
        let mut devices = choice.devices.clone();
        devices.dedup();
        ensure!(devices.len() == demand.gpus as usize, "{demand:?} got GPUs {:?}", choice.devices);
        node.cpu = node.cpu.checked_sub(demand.cpu).context("CPU was given twice")?;
        node.memory = node.memory.checked_sub(demand.memory).context("memory was given twice")?;
        for device in devices {
            let free = node.gpus.get_mut(device).context("a pod on no GPU")?;
            *free = free.checked_sub(demand.per_gpu).context("a GPU was given twice")?;
        }
        if !demand.models.is_empty() && !demand.models.contains(&node.model) {
            bail!("{demand:?} is on a {}", node.model);
        }
    }
    ensure!(nodes == after, "what is free does not agree with what was placed");
    Ok(())
}
