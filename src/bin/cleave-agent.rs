//! `cleave agent` as a separate program. The separate program uses less memory on every node,
//! because it does not contain the rest of Cleave.
#[path = "../process.rs"]
mod process;

use std::process::ExitCode;

use clap::Parser;

/// Serve this node's GPUs to the kubelet, and apply its GpuNode.
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
    cli.log.start_logging();
    process::exit_code("cleave-agent", process::block_on(cleave_agent::run(cli.args)))
}
