//! Runs fuzz targets for as long as it is told, or one of them with one input.
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Parser;
use cleave_fuzz::engine::{Budget, fuzz};
use cleave_fuzz::{Target, all, guard, named};

/// Give hostile input to everything that Cleave reads of others.
///
/// Targets run one after the other. The first input that fails (by a panic, by taking more than 20
/// s, or memory without bound) ends the run with status 101: it is printed, and kept in
/// target/fuzz-failures. A panic whose cause is mended belongs into e2e/fuzz/corpus/TARGET.
///
/// Built with `--profile fuzz` (as `make fuzz` does), arithmetic that overflows fails too.
#[derive(Debug, Parser)]
struct Args {
    /// The targets; all where none is named.
    #[arg(value_name = "TARGET")]
    targets: Vec<String>,
    /// How long, in all.
    #[arg(long, value_name = "N", default_value_t = 60)]
    seconds: u64,
    /// Which inputs; another each time where it is left out. It is printed.
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Run one target with the content of a file, once.
    #[arg(long, value_name = "FILE", conflicts_with = "seed")]
    input: Option<PathBuf>,
    /// Print the targets, and what each reads.
    #[arg(long)]
    list: bool,
}

fn main() -> Result<()> {
    let args = Args::parse();
    if args.list {
        all().iter().for_each(|target| println!("{:<20} {}", target.name, target.what));
        return Ok(());
    }
    let chosen: Vec<&Target> = match args.targets.as_slice() {
        [] => all().iter().collect(),
        names => names
            .iter()
            .map(|name| {
                named(name).with_context(|| format!("there is no target {name:?}; --list says which there are"))
            })
            .collect::<Result<_>>()?,
    };
    if let Some(path) = &args.input {
        let [target] = chosen.as_slice() else { bail!("--input is for one target") };
        let input = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
        println!("{}: {:?}", target.name, guard::run(target, &input));
        return Ok(());
    }
    let seed = args.seed.unwrap_or_else(|| fastrand::u64(..));
    println!("seed {seed}, {} targets, {} s", chosen.len(), args.seconds);
    let each = Duration::from_secs(args.seconds).checked_div(u32::try_from(chosen.len())?).unwrap_or_default();
    for target in chosen {
        let mut seconds = 0_u64;
        let progress = fuzz(target, seed, Budget::Time(each), |progress| {
            seconds += 1;
            if seconds.is_multiple_of(10) {
                println!(
                    "{:<20} {seconds:>5} s {:>12} inputs, {:>3} % read",
                    target.name,
                    progress.inputs,
                    progress.percent()
                );
            }
        });
        let progress = progress.with_context(|| format!("the corpus of {}", target.name))?;
        println!("{:<20} done    {:>12} inputs, {:>3} % read", target.name, progress.inputs, progress.percent());
    }
    Ok(())
}
