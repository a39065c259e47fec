//! `cleave-bench kubelet`: measures a device plugin in another process, with a fake kubelet over
//! real Unix sockets.
//!
//! The plugin is Cleave's agent on simulated GPUs (`--agent`), or any program given after `--`.
//! Without `--agent` and a program, this program serves MPS shares of synthetic GPUs as the plugin.
//! The synthetic plugin uses the kubelet's protocol and the agent's choice of devices, but no NVML.
mod faults;
mod measure;
mod occupancy;
mod process;
mod report;
mod simulated;
mod synthetic;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use process::Launcher;
use report::BenchmarkReport;
use simulated::Sharing;

/// Measures a device plugin from the kubelet's side, and compares the plugin with NVIDIA's plugin.
#[derive(clap::Args)]
pub(crate) struct KubeletArgs {
    /// Measure the agent of this `cleave` program, on simulated GPUs. The simulated NVML and MPS,
    /// and `cleave-mps-host`, must be in the directory of the program.
    #[arg(long, value_name = "PATH", conflicts_with = "command")]
    agent: Option<PathBuf>,
    /// Run this `cleave-kubelet-relay` between the kubelet and the agent, as the chart does.
    #[arg(long, value_name = "PATH", requires = "agent")]
    relay: Option<PathBuf>,
    /// How the agent shares the simulated GPUs.
    #[arg(long, value_enum, default_value_t = Sharing::Mps, requires = "agent")]
    sharing: Sharing,
    /// Resource to request.
    #[arg(long, default_value = "nvidia.com/gpu-mps")]
    resource: String,
    /// Number of starts of the plugin.
    #[arg(long, default_value_t = 20)]
    starts: usize,
    /// Number of calls of each kind.
    #[arg(long, default_value_t = 2000)]
    calls: usize,
    /// Number of times that kubelet.sock is replaced.
    #[arg(long, default_value_t = 40)]
    restarts: usize,
    /// Number of random occupancies on which splits are measured.
    #[arg(long, default_value_t = 1000)]
    states: usize,
    /// Number of pods that arrive in the churn measurement.
    #[arg(long, default_value_t = 4000)]
    arrivals: usize,
    /// Length of the measurement of processor time without requests, in seconds.
    #[arg(long, default_value_t = 10)]
    idle: u64,
    /// Seed of the random occupancies, arrivals and orders of ids.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = OutputFormat::Table)]
    output: OutputFormat,
    /// Serve synthetic shares in this directory instead of measuring.
    #[arg(long, hide = true, value_name = "DIR")]
    serve: Option<PathBuf>,
    /// Number of simulated or synthetic GPUs.
    #[arg(long, default_value_t = 8)]
    gpus: u32,
    /// Shares of each GPU.
    #[arg(long, default_value_t = 10)]
    units: u32,
    /// Command of the plugin. The plugin finds its directories and socket in
    /// `CLEAVE_DEVICE_PLUGIN_DIR`, `CLEAVE_POD_RESOURCES_SOCKET`, `CLEAVE_RUN_DIR`,
    /// `CLEAVE_STATE_DIR` and `CLEAVE_CDI_DIR`. `{dir}` in an argument stands for a new directory
    /// that contains all of them, except that `CLEAVE_RUN_DIR` is in `/dev/shm` if the machine has
    /// one.
    #[arg(last = true)]
    command: Vec<String>,
}

/// Output format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum OutputFormat {
    /// A table for people.
    Table,
    /// JSON for programs.
    Json,
}

/// Runs the benchmark and prints the report.
pub(crate) fn run(args: &KubeletArgs) -> Result<()> {
    // Use one thread, as the agent does: on two cores, the fake kubelet and the plugin then have
    // one core each.
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    // A latency measurement keeps this thread busy, so the runtime must poll for answers in each
    // iteration.
    let runtime = runtime.enable_all().event_interval(1).build().context("a runtime")?;
    if let Some(directory) = &args.serve {
        return runtime.block_on(synthetic::serve(directory, &args.resource, args.gpus, args.units));
    }
    let report = runtime.block_on(measure_all(args))?;
    match args.output {
        OutputFormat::Table => print!("{report}"),
        OutputFormat::Json => println!("{}", serde_json::to_string_pretty(&report)?),
    }
    Ok(())
}

/// Runs all measurements.
async fn measure_all(args: &KubeletArgs) -> Result<BenchmarkReport> {
    let launcher = |gpus, units| match (&args.agent, args.command.is_empty()) {
        (Some(cleave), _) => {
            let launcher = Launcher::for_agent(&args.resource, cleave, args.sharing, gpus, units)?;
            Ok(launcher.with_relay(args.relay.as_deref()))
        }
        (None, true) => Launcher::for_synthetic_gpus(&args.resource, gpus, units),
        (None, false) => Ok(Launcher::for_command(&args.resource, &args.command)),
    };
    let mut report = BenchmarkReport::new(match (&args.agent, args.command.is_empty()) {
        (Some(cleave), _) => {
            let relay = if args.relay.is_some() { ", with the kubelet relay" } else { "" };
            format!("{} agent, {:?} on simulated GPUs{relay}", cleave.display(), args.sharing)
        }
        (None, true) => "Cleave's protocol and choice of devices, without NVML".to_owned(),
        (None, false) => args.command.join(" "),
    });
    let main = launcher(args.gpus, args.units)?;
    measure::measure_starts_and_stops(&main, args.starts, &mut report).await?;
    let mut plugin = main.start().await?;
    measure::measure_idle_plugin(&plugin, Duration::from_secs(args.idle), &mut report).await?;
    measure::measure_call_latencies(&plugin, args.calls, args.seed, &mut report).await?;
    measure::measure_random_occupancy(&plugin, args.states, args.seed, &mut report).await?;
    measure::measure_churn(&plugin, args.arrivals, args.seed, &mut report).await?;
    measure::measure_list_size(&plugin, &mut report);
    measure::measure_memory(&plugin, "after these calls", None, &mut report)?;
    measure::measure_kubelet_restarts(&mut plugin, args.restarts, &mut report).await?;
    measure::measure_refused_registration(&mut plugin, &mut report).await?;
    measure::measure_deleted_socket(&plugin, &mut report).await?;
    measure::measure_memory(&plugin, "after the restarts", None, &mut report)?;
    plugin.stop().await?;
    if args.command.is_empty() {
        let plugin = launcher(4, 10)?.start().await?;
        measure::measure_random_occupancy(&plugin, args.states, args.seed, &mut report).await?;
        measure::measure_churn(&plugin, args.arrivals, args.seed, &mut report).await?;
        plugin.stop().await?;
        for (gpus, units) in [(8, 1), (8, 5), (8, 48)] {
            let plugin = launcher(gpus, units)?.start().await?;
            measure::measure_list_size(&plugin, &mut report);
            plugin.stop().await?;
        }
    }
    if args.agent.is_some() {
        faults::measure_xid(&main, &mut report).await?;
        faults::measure_lost_gpu(&main, &mut report).await?;
        faults::measure_event_wait(&main, Duration::from_secs(args.idle), &mut report).await?;
    }
    Ok(report)
}
