//! `cleave-bench`: measures Cleave beside published figures or a competitor, in one run.
mod kubelet;
mod planner;
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
    /// A device plugin as the kubelet sees it.
    Kubelet(kubelet::Args),
    /// How long a plan takes, from 10 to 1,000 nodes.
    Planner(planner::Args),
    /// Placement policies on a public GPU trace.
    Trace(trace::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse() {
        Cli::Kubelet(args) => kubelet::run(&args),
        Cli::Planner(args) => planner::run(&args),
        Cli::Trace(args) => trace::run(&args),
    }
}
