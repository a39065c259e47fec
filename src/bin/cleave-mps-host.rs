//! `cleave mps-host` as a program of its own, so that the MPS host does not keep the rest of Cleave
//! in memory on every node.
#[path = "../process.rs"]
mod process;

use std::process::ExitCode;

use clap::Parser;

/// Run this node's MPS daemons and enforce the limits of their clients.
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
    let program = async { Ok(cleave_gpu::mps::host::run(cli.args, None).await?) };
    process::exit("cleave-mps-host", process::block_on(program))
}
