//! Starts `cleave mps-host`, runs its main loop, and stops it. The process of a device is the same
//! program with the argument `--device`.
use std::ffi::OsString;
use std::io::{self, Write as _};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use rustix::process::{Resource, Rlimit};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::LocalSet;
use tokio::time::sleep;

pub use super::args::HostArgs;
use super::args::{MpsHostCommand, PathArgs};
use super::compute_mode::SettableComputeMode;
use super::context::{HostContext, HostOptions};
use super::device_process;
pub use super::error::HostError;
use super::files::{self, DesiredWatch};
use super::process::{Children, PidFd};
use super::socket;
use super::supervisor::Supervisor;
use super::wire::Paths;
use crate::nvml;

/// Interval at which the MPS host retries failed operations and forgets processes that have ended.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(1);
/// Limit of open files that this process requests. MPS servers inherit the limit and need 16,384.
/// Doors need several descriptors per client.
const WANTED_DESCRIPTOR_LIMIT: u64 = 65_536;

/// Runs the MPS host until SIGTERM or SIGINT, or runs the subcommand of `args`.
///
/// `subcommand` is the word before the arguments [`HostArgs`] on this program's command line, if
/// any.
///
/// Call this function on a current-thread runtime, once per process. The MPS host reaps every child
/// of the process, so other code must not start child processes.
///
/// # Errors
/// Returns [`HostError`] if the MPS host cannot start, or if the subcommand fails. The status
/// reports later errors of the MPS host.
pub async fn run(args: HostArgs, subcommand: Option<&str>) -> Result<(), HostError> {
    match &args.command {
        Some(MpsHostCommand::ComputeMode { device, mode, nvml_library }) => {
            return set_compute_mode(nvml_library.as_deref(), device, *mode);
        }
        Some(MpsHostCommand::Ready { run_dir }) => return socket::probe_host(&Paths::new(run_dir).socket()).await,
        None => {}
    }
    let HostArgs { command: _, paths, device, parent } = args;
    LocalSet::new()
        .run_until(async {
            match (device, parent) {
                (Some(device), Some(parent)) => run_device_process(device, parent, paths, subcommand).await,
                _ => run_host(paths, subcommand).await,
            }
        })
        .await
}

/// Sets a compute mode and prints the previous mode.
fn set_compute_mode(library: Option<&Path>, device: &str, mode: SettableComputeMode) -> Result<(), HostError> {
    let previous = SettableComputeMode::from(nvml::set_compute_mode(library, device, mode.into())?);
    writeln!(io::stdout(), "{previous}").map_err(HostError::System)
}

async fn run_device_process(
    device: String,
    parent: u32,
    args: PathArgs,
    subcommand: Option<&str>,
) -> Result<(), HostError> {
    let paths = Paths::new(&args.run_dir);
    let options = build_host_options(args, subcommand)?;
    device_process::run(device, parent, paths, options, raise_descriptor_limit()).await
}

async fn run_host(args: PathArgs, subcommand: Option<&str>) -> Result<(), HostError> {
    let paths = Paths::new(&args.run_dir);
    let lock = files::prepare_run_directory(&paths)?;
    let max_descriptors = raise_descriptor_limit();
    // Without pidfds, each client would immediately count as exited.
    PidFd::open(std::process::id()).map_err(HostError::PidFd)?;
    let options = build_host_options(args, subcommand)?;
    let context = Rc::new(HostContext::new(paths, options, Children::start()?, max_descriptors));
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let supervisor = Supervisor::new(Rc::clone(&context), std::env::args_os().skip(1).collect());
    // Start the watch before the first read, so that the watch detects every write after this read.
    let mut desired = DesiredWatch::new(context.paths.desired());
    let listener = socket::listen(&context.paths.socket())?;
    tokio::task::spawn_local(socket::serve(Rc::clone(&supervisor), listener));
    supervisor.apply_desired_file();
    supervisor.clean_up();
    let reporter = tokio::task::spawn_local(Rc::clone(&supervisor).write_status_changes());
    loop {
        tokio::select! {
            // Cancel-safe: signals and events remain queued.
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            () = sleep(MAINTENANCE_INTERVAL) => {
                supervisor.retry_failed_read();
                supervisor.forget_ended_processes();
            }
            () = desired.wait_until_written() => supervisor.apply_desired_file(),
        }
    }
    tracing::info!("stopping");
    supervisor.stop().await;
    if let Err(error) = std::fs::remove_file(context.paths.socket()) {
        tracing::warn!(%error, "failed to remove the MPS host's socket");
    }
    reporter.abort();
    supervisor.write_stopped_status();
    drop(lock);
    Ok(())
}

/// Returns the programs and files that the MPS host uses. A child process of this program sets the
/// compute modes.
fn build_host_options(args: PathArgs, subcommand: Option<&str>) -> Result<HostOptions, HostError> {
    let PathArgs { run_dir: _, mps_control, mps_library_path, nvml_library, driver_version_file } = args;
    let mut compute_mode = vec![std::env::current_exe()?.into_os_string()];
    compute_mode.extend(subcommand.map(OsString::from));
    compute_mode.push("compute-mode".into());
    if let Some(library) = nvml_library {
        compute_mode.extend(["--nvml-library".into(), library.into_os_string()]);
    }
    Ok(HostOptions { mps_control, library_path: mps_library_path, compute_mode, driver_version_file })
}

/// Raises the limit of open files to [`WANTED_DESCRIPTOR_LIMIT`], or as far as the kernel allows.
/// Returns the limit in force, at most [`WANTED_DESCRIPTOR_LIMIT`].
fn raise_descriptor_limit() -> usize {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let max = limit.maximum.unwrap_or(u64::MAX).min(WANTED_DESCRIPTOR_LIMIT);
    let mut current = limit.current.unwrap_or(max);
    if current < max {
        let raised = Rlimit { current: Some(max), maximum: limit.maximum };
        match rustix::process::setrlimit(Resource::Nofile, raised) {
            Ok(()) => current = max,
            Err(error) => tracing::warn!(%error, "failed to raise the limit of open files"),
        }
    }
    usize::try_from(current.min(WANTED_DESCRIPTOR_LIMIT)).unwrap_or(usize::MAX)
}
