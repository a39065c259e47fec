//! The `cleave` binary: parses the command line and calls the crate that does the work.
mod plan;

use clap::Parser;

/// Shares NVIDIA GPUs between Kubernetes pods.
#[derive(Debug, Parser)]
#[command(name = "cleave", version, arg_required_else_help = true)]
enum Cli {
    /// Plan a snapshot of a cluster: which GPUs are cut into what, and which pod goes where.
    Plan(plan::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse() {
        Cli::Plan(args) => plan::run(&args),
    }
}
