//! The `cleave` binary: parses the command line and calls the crate that does the work.
mod cordon;
mod crds;
mod explain;
mod plan;
mod process;
mod simulate;
mod status;

use std::process::ExitCode;

use clap::Parser;
use process::serve;

/// Shares NVIDIA GPUs between Kubernetes pods.
#[derive(Debug, Parser)]
#[command(name = "cleave", version, arg_required_else_help = true)]
struct Cli {
    #[command(flatten)]
    log: process::LogArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Serve this node's GPUs to the kubelet, and keep them as the node's GpuNode says.
    Agent(Box<cleave_agent::AgentArgs>),
    /// Keep this node's MPS daemons and their doors as the agent wants them.
    MpsHost(cleave_gpu::mps::host::HostArgs),
    /// Turn policies into what each node's GPUs shall be.
    Operator(cleave_operator::OperatorArgs),
    Plan(plan::Args),
    Simulate(simulate::Args),
    /// Print the custom resource definitions.
    Crds(crds::CrdsArgs),
    /// Explain why a pod waits, or what it has.
    Explain(explain::Args),
    Cordon(cordon::CordonArgs),
    Uncordon(cordon::UncordonArgs),
    Drain(cordon::DrainArgs),
    Doctor(cleave_gpu::mps::doctor::DoctorArgs),
    /// Show nodes, GPUs, policies, and which pod holds what with which limits.
    Status(status::StatusArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    cli.log.start();
    match run(cli.command) {
        Ok(code) => code,
        Err(error) => process::exit("cleave", Err(error)),
    }
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    let done = match command {
        Command::Agent(args) => serve(cleave_agent::run(*args)),
        Command::MpsHost(args) => serve(async { Ok(cleave_gpu::mps::host::run(args, Some("mps-host")).await?) }),
        Command::Operator(args) => serve(cleave_operator::run(args)),
        Command::Plan(args) if args.live => serve(async move { plan::run_live(&args).await }),
        Command::Plan(args) => plan::run(&args),
        Command::Simulate(args) => simulate::run(&args),
        Command::Crds(args) => crds::run(&args),
        Command::Explain(args) => serve(explain::run(args)),
        Command::Cordon(args) => serve(cordon::cordon(args)),
        Command::Uncordon(args) => serve(cordon::uncordon(args)),
        Command::Drain(args) => return serve(cordon::drain(args)),
        Command::Doctor(args) => return Ok(doctor(args)),
        Command::Status(args) => serve(status::run(args)),
    };
    done.map(|()| ExitCode::SUCCESS)
}

/// Tells what the driver does. An error is neither a good nor a bad answer.
fn doctor(args: cleave_gpu::mps::doctor::DoctorArgs) -> ExitCode {
    match serve(async { Ok(cleave_gpu::mps::doctor::run(args).await?) }) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("cleave: {error:#}");
            ExitCode::from(2)
        }
    }
}
