//! `cleave agent` as a program of its own: the same, without the rest of Cleave in its memory on every node.
#[path = "../process.rs"]
mod process;

use std::process::ExitCode;

use clap::Parser;

/// Serve this node's GPUs to the kubelet, and keep them as the node's GpuNode says.
#[derive(Debug, Parser)]
#[command(name = "cleave-agent", version)]
struct Cli {
    #[command(flatten)]
    log: process::LogArgs,
    #[command(flatten)]
    args: cleave_agent::AgentArgs,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    cli.log.start();
    process::exit("cleave-agent", process::serve(cleave_agent::run(cli.args)))
}
