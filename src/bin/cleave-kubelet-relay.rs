//! `cleave-kubelet-relay`: serves the agent's resources to the kubelet, and continues while the
//! agent restarts or is upgraded.
#[path = "../process.rs"]
mod process;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser;
use cleave_kubelet::{DEVICE_PLUGIN_DIRECTORY, PluginServerConfig, RelayConfig, RelayTimings, run_relay};
use tokio::signal::unix::{SignalKind, signal};

/// Serve the agent's resources to the kubelet, even while the agent is absent.
#[derive(Debug, Parser)]
#[command(name = "cleave-kubelet-relay", version)]
struct Cli {
    #[command(flatten)]
    log: process::LogArgs,
    /// The kubelet's device plugin directory. Mount the directory, not the socket, because the
    /// kubelet replaces the socket when it restarts.
    #[arg(long, env = "CLEAVE_DEVICE_PLUGIN_DIR", value_name = "DIR", default_value = DEVICE_PLUGIN_DIRECTORY)]
    device_plugin_dir: PathBuf,
    /// The directory in which the relay serves the socket on which the agent registers. The agent
    /// must use the same directory.
    #[arg(long, env = "CLEAVE_RELAY_DIR", value_name = "DIR", default_value = "/run/cleave/kubelet")]
    relay_dir: PathBuf,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    cli.log.start_logging();
    let config = RelayConfig {
        kubelet: PluginServerConfig::new(cli.device_plugin_dir),
        agent_directory: cli.relay_dir,
        timings: RelayTimings::default(),
    };
    let program = async {
        let mut terminate = signal(SignalKind::terminate()).context("failed to wait for SIGTERM")?;
        let stop = async move {
            terminate.recv().await;
        };
        Ok(run_relay(config, stop).await?)
    };
    process::exit_code("cleave-kubelet-relay", process::block_on(program))
}
