//! `cleave mps-host` as a program of its own: the same, without the rest of Cleave in its memory on every node.
#[path = "../process.rs"]
mod process;

use std::process::ExitCode;

use clap::Parser;

/// Keep this node's MPS daemons and their doors as the agent wants them.
#[derive(Debug, Parser)]
#[command(name = "cleave-mps-host", version)]
struct Cli {
    #[command(flatten)]
    log: process::LogArgs,
    #[command(flatten)]
    args: cleave_gpu::mps::host::HostArgs,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    cli.log.start();
    process::exit("cleave-mps-host", process::serve(async { Ok(cleave_gpu::mps::host::run(cli.args, None).await?) }))
}
