//! The `cleave` binary: parses the command line and calls the crate that does the work.
mod crds;
mod plan;
mod status;

use std::future::Future;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Parser, ValueEnum};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// Shares NVIDIA GPUs between Kubernetes pods.
#[derive(Debug, Parser)]
#[command(name = "cleave", version, arg_required_else_help = true)]
struct Cli {
    /// How log lines are written.
    #[arg(long, env = "CLEAVE_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text, global = true)]
    log_format: LogFormat,
    /// What is logged: a level, or levels by module, for example `info,cleave_agent=debug`.
    #[arg(long, env = "CLEAVE_LOG", value_name = "LEVELS", default_value = "info", global = true)]
    log: Targets,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    /// For a person.
    Text,
    /// One JSON object a line.
    Json,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Serve this node's GPUs to the kubelet, and keep them as the node's GpuNode says.
    Agent(Box<cleave_agent::AgentArgs>),
    /// Keep this node's MPS daemons and their doors as the agent wants them.
    MpsHost(cleave_gpu::mps::host::HostArgs),
    /// Turn policies into what each node's GPUs shall be.
    Operator(cleave_operator::OperatorArgs),
    /// Plan a snapshot of a cluster: which GPUs are cut into what, and which pod goes where.
    Plan(plan::Args),
    /// Print the custom resource definitions.
    Crds(crds::CrdsArgs),
    /// Show nodes, GPUs, policies, and which pod holds what with which limits.
    Status(status::StatusArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    log_to_stderr(&cli);
    match run(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cleave: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Agent(args) => serve(cleave_agent::run(*args)),
        Command::MpsHost(args) => serve(async { Ok(cleave_gpu::mps::host::run(args).await?) }),
        Command::Operator(args) => serve(cleave_operator::run(args)),
        Command::Plan(args) => plan::run(&args),
        Command::Crds(args) => crds::run(&args),
        Command::Status(args) => serve(status::run(args)),
    }
}

/// Runs a server on this thread alone: each of them waits much more than it works, and threads cost memory on every node.
fn serve(server: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting the runtime")?;
    runtime.block_on(server)
}

fn log_to_stderr(cli: &Cli) {
    let registry = tracing_subscriber::registry().with(cli.log.clone());
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    match cli.log_format {
        LogFormat::Text => registry.with(lines.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))).init(),
        LogFormat::Json => registry.with(lines.json().flatten_event(true)).init(),
    }
}
