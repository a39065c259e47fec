//! `cleave-bench quotas`: measures the time of a pass over waiting pods with quotas.
//!
//! The pool is busy. Some quotas use more and some use less than their guarantees, and pods without
//! a quota borrow. Some waiting pods are within the guarantee of their quota, and some must borrow.
//! Every run generates the same pools.
mod cluster;

use std::time::Instant;

use anyhow::{Context as _, ensure};
use cleave_plan::ledger::Moment;
use cleave_plan::quota::{Amount, GPU, Gang, Guarantee, Outcome, Owner, Place, Pod, Quota, Settings, World, look};
use serde::Serialize;

/// Measures the time of a pass with quotas.
#[derive(Debug, clap::Args)]
pub(crate) struct QuotasArgs {
    /// Numbers of quotas. The benchmark measures pools with each number.
    #[arg(long, value_delimiter = ',', default_values_t = [0, 1, 20, 200])]
    quotas: Vec<usize>,
    /// Number of nodes.
    #[arg(long, default_value_t = 1000)]
    nodes: usize,
    /// GPUs per node.
    #[arg(long, default_value_t = 8)]
    gpus_per_node: usize,
    /// Number of pods, including waiting pods. Drops running pods that fit on no GPU.
    #[arg(long, default_value_t = 10_000)]
    pods: usize,
    /// Number of waiting pods.
    #[arg(long, default_value_t = 128)]
    waiting: usize,
    /// Interval of quotas that guarantee whole GPUs: 10 means every tenth quota, and 0 means no
    /// quota.
    #[arg(long, default_value_t = 0)]
    cells: usize,
    /// Number of pods of each gang. All waiting pods belong to gangs, except if the number is 0.
    #[arg(long, default_value_t = 0)]
    gang: usize,
    /// Number of pools for each number of quotas. In each pool, the benchmark measures the plan's
    /// pass three times and the reconcile once.
    #[arg(long, default_value_t = 10)]
    pools: u64,
}

/// One line of the output, as JSON.
#[derive(Debug, Serialize)]
struct QuotasOutputLine {
    quotas: usize,
    gpus: usize,
    pods: usize,
    waiting: usize,
    /// A pass of the plan over a pool that is built already.
    look_ms_p50: f64,
    look_ms_p99: f64,
    /// A reconcile of the operator in which all waiting pods arrive. The reconcile also builds the
    /// pool.
    reconcile_ms_p50: f64,
    reconcile_ms_p99: f64,
    released_p50: usize,
    exchanges_p50: usize,
}

/// Runs the benchmark, and prints one JSON line for each number of quotas.
pub(crate) fn run(args: &QuotasArgs) -> anyhow::Result<()> {
    ensure!(args.pools > 0, "at least one pool is needed");
    let gpus = args.nodes.checked_mul(args.gpus_per_node).context("too many GPUs")?;
    for &quotas in &args.quotas {
        let (mut times, mut released, mut exchanges) = (Vec::new(), Vec::new(), Vec::new());
        let mut reconciles = Vec::new();
        let mut waiting = 0;
        for seed in 0..args.pools {
            let world = random_pool(seed, quotas, gpus, args)?;
            waiting = world.pods.iter().filter(|pod| matches!(pod.place, Place::Waiting { .. })).count();
            for _ in 0..3 {
                let start = Instant::now();
                let outcome: Outcome = look(&world, Moment(1_000_000));
                times.push(start.elapsed().as_secs_f64() * 1000.0);
                released.push(outcome.released.len());
                exchanges.push(outcome.exchanges.len());
            }
            let (time, _) = cluster::measure_reconcile(&world, args.gpus_per_node)?;
            reconciles.push(time.as_secs_f64() * 1000.0);
        }
        times.sort_by(f64::total_cmp);
        reconciles.sort_by(f64::total_cmp);
        released.sort_unstable();
        exchanges.sort_unstable();
        let rounded = |time: f64| (time * 1000.0).round() / 1000.0;
        let line = QuotasOutputLine {
            quotas,
            gpus,
            pods: args.pods,
            waiting,
            look_ms_p50: rounded(percentile(&times, 50).context("no times")?),
            look_ms_p99: rounded(percentile(&times, 99).context("no times")?),
            reconcile_ms_p50: rounded(percentile(&reconciles, 50).context("no times")?),
            reconcile_ms_p99: rounded(percentile(&reconciles, 99).context("no times")?),
            released_p50: percentile(&released, 50).context("no passes")?,
            exchanges_p50: percentile(&exchanges, 50).context("no passes")?,
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

/// Generates a pool. The quotas divide all GPUs equally as guarantees.
fn random_pool(seed: u64, quotas: usize, gpus: usize, args: &QuotasArgs) -> anyhow::Result<World> {
    let mut numbers = fastrand::Rng::with_seed(seed);
    let tenth = GPU.0 / 10;
    let mut world = World { gpus: vec![GPU; gpus], settings: Settings::default(), ..World::default() };
    let part = (gpus / quotas.max(1)) as u64;
    for number in 0..quotas {
        let min = Amount(GPU.0 * part);
        let quota = Quota::new(min).with_weight(numbers.i64(1..4))?;
        let lend = (numbers.usize(0..10) == 0).then_some(Amount(min.0 / 10 * 9));
        let guarantees_whole_gpus = args.cells > 0 && number % args.cells == 0;
        let guarantee = if guarantees_whole_gpus { Guarantee::Cells } else { Guarantee::Count };
        let quota = quota.with_lend(lend)?.with_max(Some(Amount(min.0 * 2)))?.with_guarantee(guarantee)?;
        world.quotas.insert(format!("team-{number:03}"), quota);
    }
    let mut free = vec![GPU.0; gpus];
    let running = args.pods.saturating_sub(args.waiting);
    for number in 0..args.pods {
        // 10,000 pods of these sizes use about 7,500 GPUs.
        let tenths = [5, 5, 7, 8, 10, 10][numbers.usize(0..6)];
        let charge = tenths * tenth;
        // Quotas with a high number use more than their guarantees.
        let team = numbers.usize(0..=quotas).max(if number < running { numbers.usize(0..=quotas) } else { 0 });
        let owner = if team == quotas { Owner::Unnamed } else { Owner::Quota(format!("team-{team:03}")) };
        let start = numbers.usize(0..gpus);
        let gpu = (start..gpus).chain(0..start).find(|&gpu| free[gpu] >= charge);
        let gpu = gpu.filter(|_| number < running);
        if let Some(gpu) = gpu {
            free[gpu] -= charge;
        } else if number < running {
            continue;
        }
        let created = Moment(number as u64);
        let name = number / args.gang.max(1);
        world.pods.push(Pod {
            name: format!("default/pod-{number:05}"),
            owner: if args.gang > 0 && gpu.is_none() { owner_of_gang(name, quotas) } else { owner },
            charge: Amount(charge),
            priority: numbers.i32(0..3),
            created,
            place: gpu.map_or(Place::Waiting { nominated: None }, |gpu| Place::Running { gpu, since: created }),
            borrows: true,
            preempts: true,
            protected: None,
            gang: (args.gang > 0 && gpu.is_none())
                .then(|| Gang { name: format!("gang-{name}"), size: args.gang.min(args.waiting) }),
            gpus: None,
            pieces: Vec::new(),
        });
    }
    Ok(world)
}

/// Returns the owner of a gang.
fn owner_of_gang(gang: usize, quotas: usize) -> Owner {
    if quotas == 0 { Owner::Unnamed } else { Owner::Quota(format!("team-{:03}", gang % quotas)) }
}
