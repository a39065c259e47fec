//! Runs fuzz targets for a given time, or one target on one input.
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Parser;
use cleave_fuzz::engine::{RunLimit, fuzz};
use cleave_fuzz::{Target, all_targets, guard, target_named};

/// Run fuzz targets, which read input from outside Cleave.
///
/// Runs the targets one after another. The first input that fails ends the run with exit status
/// 101. An input fails if its target panics or takes more than 20 s, or if the program uses more
/// than 2 GiB of memory. The program prints the failing input and writes it to
/// target/fuzz-failures. Copy the file to e2e/fuzz/corpus/TARGET in the commit that fixes the
/// failure.
///
/// With `--profile fuzz`, as in `make fuzz`, an arithmetic overflow is also a failure.
#[derive(Debug, Parser)]
struct Args {
    /// Targets to run [default: all].
    #[arg(value_name = "TARGET")]
    targets: Vec<String>,
    /// Duration of the whole run in seconds.
    #[arg(long, value_name = "N", default_value_t = 60)]
    seconds: u64,
    /// Seed of the inputs [default: random]. The run prints it.
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Run one target once, on the content of a file.
    #[arg(long, value_name = "FILE", conflicts_with = "seed")]
    input: Option<PathBuf>,
    /// List the targets, each with a description of its input.
    #[arg(long)]
    list: bool,
}

fn main() -> Result<()> {
    let args = Args::parse();
    if args.list {
        all_targets().iter().for_each(|target| println!("{:<20} {}", target.name, target.what));
        return Ok(());
    }
    let chosen: Vec<&Target> = match args.targets.as_slice() {
        [] => all_targets().iter().collect(),
        names => names
            .iter()
            .map(|name| {
                target_named(name).with_context(|| format!("unknown target {name:?}; --list prints the targets"))
            })
            .collect::<Result<_>>()?,
    };
    if let Some(path) = &args.input {
        let [target] = chosen.as_slice() else { bail!("--input requires exactly one target") };
        let input = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
        println!("{}: {:?}", target.name, guard::run(target, &input));
        return Ok(());
    }
    let seed = args.seed.unwrap_or_else(|| fastrand::u64(..));
    println!("seed {seed}, {} targets, {} s", chosen.len(), args.seconds);
    let each = Duration::from_secs(args.seconds).checked_div(u32::try_from(chosen.len())?).unwrap_or_default();
    for target in chosen {
        let mut seconds = 0_u64;
        let progress = fuzz(target, seed, RunLimit::Time(each), |progress| {
            seconds += 1;
            if seconds.is_multiple_of(10) {
                println!(
                    "{:<20} {seconds:>5} s {:>12} inputs, {:>3} % read",
                    target.name,
                    progress.inputs,
                    progress.read_percent()
                );
            }
        });
        let progress = progress.with_context(|| format!("failed to read the corpus of {}", target.name))?;
        println!("{:<20} done    {:>12} inputs, {:>3} % read", target.name, progress.inputs, progress.read_percent());
    }
    Ok(())
}
