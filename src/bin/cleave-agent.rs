//! `cleave agent` as a program of its own, so that the agent does not keep the rest of Cleave in
//! memory on every node.
#[path = "../process.rs"]
mod process;

use std::process::ExitCode;

use clap::Parser;

/// Serve this node's GPUs to the kubelet as its GpuNode says.
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
    process::exit("cleave-agent", process::block_on(cleave_agent::run(cli.args)))
}
