//! A program for tests that contains only the MPS host and the doctor. Usage: `mps-host mps-host
//! --run-dir DIR --mps-control PATH`.
use std::process::ExitCode;

use clap::Parser;
use cleave_gpu::mps::doctor::{self, DoctorArgs};
use cleave_gpu::mps::host::{self, HostArgs};

#[derive(Parser)]
enum Cli {
    MpsHost(HostArgs),
    Doctor(DoctorArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).with_writer(std::io::stderr).init();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let done = match cli {
        Cli::MpsHost(args) => runtime.block_on(host::run(args, Some("mps-host"))).map_err(|error| error.to_string()),
        Cli::Doctor(args) => match runtime.block_on(doctor::run(args)) {
            Ok(true) => Ok(()),
            Ok(false) => return ExitCode::FAILURE,
            Err(error) => Err(error.to_string()),
        },
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}
