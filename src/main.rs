//! The `cleave` program, which contains the commands that people run, the operator, the agent and
//! the MPS host.
mod process;

use std::process::ExitCode;

use clap::{Args as _, CommandFactory as _, FromArgMatches as _};

/// Share NVIDIA GPUs between Kubernetes pods.
#[derive(Debug, clap::Parser)]
#[command(
    name = "cleave",
    version,
    arg_required_else_help = true,
    after_help = AFTER_HELP
)]
struct Cli {
    #[command(flatten)]
    log: process::LogArgs,
    #[command(subcommand)]
    command: Command,
}

/// Text below the list of commands in the help. clap cannot list subcommands under two headings.
/// The list therefore hides the components, and this text describes them.
const AFTER_HELP: &str = "\
Components, started by the chart:
  operator  Plan how GPUs are shared
  agent     Serve this node's GPUs to the kubelet
  mps-host  Run this node's MPS daemons

Run `cleave COMMAND --help` for its options. Installed as `kubectl-cleave`,
the program also runs as `kubectl cleave`.";

/// The commands whose help shows the log options. The other commands also accept these options, but
/// rarely need them.
const COMPONENTS: [&str; 3] = ["operator", "agent", "mps-host"];

#[derive(Debug, clap::Subcommand)]
enum Command {
    #[command(flatten)]
    User(cleave_cli::Command),
    /// Plan how GPUs are shared, and write the plan to each node's GpuNode.
    #[command(hide = true)]
    Operator(cleave_operator::OperatorArgs),
    /// Serve this node's GPUs to the kubelet, and apply its GpuNode.
    #[command(hide = true)]
    Agent(Box<cleave_agent::AgentArgs>),
    /// Run this node's MPS daemons and enforce the limits of their clients.
    #[command(hide = true)]
    MpsHost(cleave_gpu::mps::host::HostArgs),
}

fn main() -> ExitCode {
    let mut command = command();
    let parsed = command.try_get_matches_from_mut(std::env::args_os());
    let cli = match parsed.and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        Err(error) => error.format(&mut command).exit(),
    };
    cli.log.start_logging();
    match process::block_on(run(cli.command)) {
        Ok(code) => code,
        Err(error) => process::exit_code("cleave", Err(error)),
    }
}

/// Builds the command line. Every command accepts the log options, but only the help of the
/// components shows them.
fn command() -> clap::Command {
    let log = process::LogArgs::augment_args(clap::Command::new("log"));
    let hidden = Cli::command().mut_args(|arg| arg.hide(true));
    // clap adds each global option only to subcommands that do not define it. The components keep
    // the definition that is visible in the help.
    COMPONENTS.into_iter().fold(hidden, |command, name| {
        command.mut_subcommand(name, |component| component.args(log.get_arguments().cloned()))
    })
}

async fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::User(command) => return command.run().await,
        Command::Operator(args) => cleave_operator::run(args).await?,
        Command::Agent(args) => cleave_agent::run(*args).await?,
        Command::MpsHost(args) => cleave_gpu::mps::host::run(args, Some("mps-host")).await?,
    }
    Ok(ExitCode::SUCCESS)
}
