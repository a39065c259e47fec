//! `cleave mps-host` as a separate program. The separate program uses less memory on every node,
//! because it does not contain the rest of Cleave.
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
    cli.log.start_logging();
    let program = async { Ok(cleave_gpu::mps::host::run(cli.args, None).await?) };
    process::exit_code("cleave-mps-host", process::block_on(program))
}
