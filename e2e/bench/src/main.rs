//! `cleave-bench`: measures Cleave beside published figures or a competitor, in one run.
mod trace;

use clap::Parser;

#[derive(Parser)]
#[command(
    name = "cleave-bench",
    version,
    about = "Measures Cleave beside published figures",
    arg_required_else_help = true
)]
enum Cli {
    /// Placement policies on a public GPU trace.
    Trace(trace::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse() {
        Cli::Trace(args) => trace::run(&args),
    }
}
