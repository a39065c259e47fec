//! What Cleave's programs have in common: log lines on standard error, and a runtime.
use std::future::Future;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::ValueEnum;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// What is logged, and how.
#[derive(Debug, clap::Args)]
pub(crate) struct LogArgs {
    /// How log lines are written.
    #[arg(long, env = "CLEAVE_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text, global = true)]
    log_format: LogFormat,
    /// What is logged: a level, or levels by module, for example `info,cleave_agent=debug`.
    #[arg(long, env = "CLEAVE_LOG", value_name = "LEVELS", default_value = "info", global = true)]
    log: Targets,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    /// For a person.
    Text,
    /// One JSON object a line.
    Json,
}

impl LogArgs {
    /// Logs from here on.
    pub(crate) fn start(&self) {
        let registry = tracing_subscriber::registry().with(self.log.clone());
        let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
        match self.log_format {
            LogFormat::Text => {
                registry.with(lines.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))).init();
            }
            LogFormat::Json => registry.with(lines.json().flatten_event(true)).init(),
        }
    }
}

/// Runs a server on this thread alone: each of them waits much more than it works, and threads cost memory on every node.
pub(crate) fn serve<T>(server: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting the runtime")?;
    runtime.block_on(server)
}

/// Says what went wrong, and how the program ends.
pub(crate) fn exit(program: &str, result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{program}: {error:#}");
            ExitCode::FAILURE
        }
    }
}
