//! The MPS host alone, without the rest of `cleave`: `mps-host mps-host --run-dir DIR --mps-control PATH`.
use std::process::ExitCode;

use clap::Parser;
use cleave_gpu::mps::host::{self, HostArgs};

#[derive(Parser)]
enum Cli {
    MpsHost(HostArgs),
}

fn main() -> ExitCode {
    let Cli::MpsHost(args) = Cli::parse();
    tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).with_writer(std::io::stderr).init();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(host::run(args, Some("mps-host"))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
