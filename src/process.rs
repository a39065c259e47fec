//! Code that Cleave's programs share: it starts logging, starts the runtime and returns the exit
//! status.
use std::future::Future;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::ValueEnum;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// Options that control logging.
#[derive(Debug, clap::Args)]
pub(crate) struct LogArgs {
    /// Format of the log lines.
    #[arg(
        long,
        env = "CLEAVE_LOG_FORMAT",
        value_enum,
        default_value_t = LogFormat::Text,
        global = true,
        help_heading = "Log options"
    )]
    log_format: LogFormat,
    /// Log level of all modules, optionally followed by the levels of single modules, for example
    /// `info,cleave_agent=debug`.
    #[arg(
        long,
        env = "CLEAVE_LOG",
        value_name = "LEVELS",
        default_value = "info",
        global = true,
        help_heading = "Log options"
    )]
    log: Targets,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    /// Human-readable text.
    Text,
    /// One JSON object on each line.
    Json,
}

impl LogArgs {
    /// Starts logging to standard error.
    pub(crate) fn start_logging(&self) {
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

/// Runs a program on the current thread. Cleave's programs mostly wait, so they need no more
/// threads, and each thread would use memory on every node. A panic aborts the process.
pub(crate) fn block_on<T>(program: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    abort_on_panic();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("failed to start the runtime")?.block_on(program)
}

/// Makes each panic print its message and abort the process. The release profile already aborts.
/// The development profile, with which the cluster tests build the programs, cannot: Cargo's tests
/// need panics that unwind. Without this function, a panic in the development profile would end one
/// task only, and the programs would behave differently from those of a release.
fn abort_on_panic() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        print(panic);
        std::process::abort();
    }));
}

/// Returns the exit status for a program's result. Prints an error first.
pub(crate) fn exit_code(program: &str, result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{program}: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::Command;

    use super::*;

    /// Tells a copy of this test program to panic.
    const PANIC_VARIABLE: &str = "CLEAVE_TEST_PANIC";

    #[test]
    fn a_panic_in_a_task_aborts_the_process() {
        const NAME: &str = "process::tests::a_panic_in_a_task_aborts_the_process";
        if std::env::var_os(PANIC_VARIABLE).is_some() {
            let _ = block_on(async {
                let _ = tokio::spawn(async { panic!("a test panics") }).await;
                Ok(())
            });
            return;
        }
        let copy = Command::new(std::env::current_exe().unwrap())
            .args([NAME, "--exact", "--nocapture"])
            .env(PANIC_VARIABLE, "yes")
            .output()
            .unwrap();
        assert_eq!(copy.status.signal(), Some(nix::libc::SIGABRT), "{copy:?}");
        assert!(String::from_utf8_lossy(&copy.stderr).contains("a test panics"), "{copy:?}");
    }
}
