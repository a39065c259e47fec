//! `cleave doctor`: checks whether this node's driver behaves as Cleave expects.
//!
//! | module | purpose |
//! |---|---|
//! | `facts` | facts about the node and the GPU |
//! | `preconditions` | whether a daemon may be started without disturbing other programs |
//! | `setup` | the GPU to test, the daemon and the CUDA program |
//! | `own_daemon`, `program` | the doctor's daemon, the user's CUDA program |
//! | `tests_on_gpu` | runs the tests |
//! | `observed` | the tests' observations (data) |
//! | `judge` | what Cleave expects, and whether the observations match (pure) |
//! | `report` | formats the report as JSON or text |
mod facts;
mod judge;
mod observed;
mod own_daemon;
mod preconditions;
mod program;
mod report;
mod setup;
mod tests_on_gpu;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;

use self::facts::SystemFacts;
use self::judge::CheckVerdict;
use self::observed::{Observations, TestOutcome, TestedGpu};
use self::own_daemon::OwnDaemon;
use self::preconditions::ForeignProcesses;
use self::program::Program;
use self::report::Report;
use self::setup::{DoctorSetup, NVML_CALL_DEADLINE};
use super::args::PathArgs;
use crate::nvml::{DriverInfo, Gpu, Library, LibrarySearch, NvmlError, Worker};

/// Check that this node's GPU driver enforces limits as Cleave expects.
///
/// Starts its own MPS daemon on an idle GPU. On a GPU that is in use, the command starts nothing
/// and reports only facts. Exits with 0 if all tested checks are as expected, 1 if a check differs,
/// and 2 if there is no result. Run the command as root in the node's PID namespace.
#[derive(Debug, Clone, clap::Args)]
pub struct DoctorArgs {
    /// Index or UUID of the GPU. Default: the first GPU.
    #[arg(long, value_name = "INDEX|UUID")]
    gpu: Option<String>,

    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,

    /// A CUDA program that shows the limits in force, with its first arguments (see
    /// docs/how-to/check-driver.md). Without this program, the doctor does not test limits.
    #[arg(long, value_name = "PROGRAM [ARGUMENT…]")]
    client: Option<String>,

    /// Assume that the GPU is idle although processes of other PID namespaces are not visible.
    #[arg(long, help_heading = "Advanced options")]
    idle: bool,

    // The doctor only reads the run directory, to detect which GPUs Cleave uses.
    #[command(flatten, next_help_heading = "Advanced options")]
    paths: PathArgs,
}

/// Why the doctor has no result.
#[derive(Debug, thiserror::Error)]
pub enum DoctorError {
    /// NVML failed.
    #[error("NVML failed: {0}")]
    Nvml(#[from] NvmlError),
    /// The node does not have the requested GPU.
    #[error("no GPU {wanted} on this node; its GPUs: {}", if .available.is_empty() { "none" } else { .available })]
    NoGpu {
        /// The requested index or UUID.
        wanted: String,
        /// The GPUs of the node.
        available: String,
    },
    /// A signal handler could not be installed, or a write to standard output failed.
    #[error("system call failed: {0}")]
    System(#[from] io::Error),
    /// The doctor received a signal, and has stopped all processes that it started.
    #[error("stopped by a signal")]
    Stopped,
}

/// Runs the checks and prints the report. Returns whether all tested checks are as expected.
///
/// # Errors
/// Returns [`DoctorError`] if there is no result.
pub async fn run(args: DoctorArgs) -> Result<bool, DoctorError> {
    let search = LibrarySearch { library: args.paths.nvml_library.clone(), ..LibrarySearch::default() };
    let library = Library::find(search);
    let nvml = Worker::start(&library, "nvml")?;
    let DriverInfo { driver, count } = nvml.call(NVML_CALL_DEADLINE, |gpus| gpus.driver_info()).await?;
    let gpu = choose_gpu(describe_gpus(&library, count).await?, args.gpu.as_deref())?;
    let (uuid, of) = (gpu.uuid.clone(), gpu.uuid.clone());
    let compute_mode = nvml.call(NVML_CALL_DEADLINE, move |gpus| gpus.compute_mode(&uuid)).await.ok();
    let processes = nvml.call(NVML_CALL_DEADLINE, move |gpus| gpus.processes(&of)).await.ok();
    let cuda = nvml.call(NVML_CALL_DEADLINE, |gpus| gpus.cuda_version()).await.ok();
    let control = facts::find_program(&args.paths.mps_control);
    let library_path = args.paths.mps_library_path.as_deref();
    let mut facts = SystemFacts {
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        cgroups: facts::cgroup_versions(Path::new("/sys/fs/cgroup")),
        driver,
        cuda: cuda.map(|(major, minor)| format!("{major}.{minor}")),
        control_version: match &control {
            Some(control) => facts::read_control_version(control, library_path, &gpu.uuid).await,
            None => None,
        },
        control,
        gpu: facts::gpu_facts(&gpu, compute_mode, processes.map(|processes| processes.len())),
    };
    let preconditions =
        preconditions::check_preconditions(&args.paths.run_dir, args.idle, &facts, &gpu, compute_mode).await;
    let skip_reason = preconditions.skip_reason();
    let are_others_visible = preconditions.foreign_processes == ForeignProcesses::Visible;
    let seen = match (&skip_reason, &facts.control) {
        (None, Some(control)) => {
            test_driver(&build_doctor_setup(&args, control.clone(), &gpu, nvml, are_others_visible)).await?
        }
        (reason, _) => Observations::for_skipped_tests(reason.as_deref().unwrap_or_default()),
    };
    if let TestOutcome::Observed(log) = &seen.log {
        facts.control_version = log.version.or(facts.control_version);
    }
    let findings = judge::judge_all_checks(&seen, TestedGpu { sms: gpu.sms.0, compute_mode });
    let as_expected = findings.iter().all(|finding| finding.verdict != CheckVerdict::Differs);
    print_report(&Report { facts, skip_reason, as_expected, findings }, args.json)?;
    Ok(as_expected)
}

fn print_report(report: &Report, json: bool) -> Result<(), DoctorError> {
    let text = if json {
        serde_json::to_string_pretty(report).map_err(io::Error::from)? + "\n"
    } else {
        report::format_report(report)
    };
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// Describes every GPU, by index. Each GPU has its own worker, so a GPU that hangs does not block
/// calls to the other GPUs.
async fn describe_gpus(library: &Library, count: u32) -> Result<BTreeMap<u32, Result<Gpu, NvmlError>>, DoctorError> {
    let mut calls = JoinSet::new();
    for index in 0..count {
        let worker = Worker::start(library, format!("nvml-gpu-{index}"))?;
        calls.spawn(async move { (index, worker.call(NVML_CALL_DEADLINE, move |gpus| gpus.gpu_at(index)).await) });
    }
    Ok(calls.join_all().await.into_iter().collect())
}

/// Returns the first GPU with the wanted index or UUID, or the first GPU if `wanted` is `None`.
fn choose_gpu(gpus: BTreeMap<u32, Result<Gpu, NvmlError>>, wanted: Option<&str>) -> Result<Gpu, DoctorError> {
    let mut available = Vec::new();
    for (index, gpu) in gpus {
        let uuid = gpu.as_ref().map(|gpu| gpu.uuid.clone()).unwrap_or_default();
        if wanted.is_none_or(|wanted| wanted == uuid || wanted == index.to_string()) {
            return Ok(gpu?);
        }
        available.push(format!("{index} ({uuid})"));
    }
    let wanted = wanted.unwrap_or("at all").to_owned();
    Err(DoctorError::NoGpu { wanted, available: available.join(", ") })
}

/// Returns the settings of the tests.
fn build_doctor_setup(
    args: &DoctorArgs,
    control: PathBuf,
    gpu: &Gpu,
    nvml: Worker,
    are_others_visible: bool,
) -> DoctorSetup {
    let words = args.client.as_deref().map(|client| client.split_whitespace().map(OsString::from).collect());
    DoctorSetup {
        uuid: gpu.uuid.clone(),
        memory_mib: gpu.memory.0,
        control,
        library_path: args.paths.mps_library_path.clone(),
        program: words.map(|words| Program {
            words,
            library_path: args.paths.mps_library_path.clone(),
            device: gpu.uuid.clone(),
        }),
        nvml,
        are_others_visible,
    }
}

/// Starts a daemon, runs the tests and stops the daemon.
async fn test_driver(setup: &DoctorSetup) -> Result<Observations, DoctorError> {
    // Install signal handlers before starting anything that has to be stopped.
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let mut seen = Observations::for_skipped_tests("the daemon does not answer");
    let mut daemon = match OwnDaemon::start(setup) {
        Ok(daemon) => daemon,
        Err(error) => {
            seen.start = TestOutcome::Failed(error.to_string());
            return Ok(seen);
        }
    };
    let stopped = tokio::select! {
        _ = terminate.recv() => true,
        _ = interrupt.recv() => true,
        () = observe(setup, &mut daemon, &mut seen) => false,
    };
    daemon.stop().await;
    if stopped { Err(DoctorError::Stopped) } else { Ok(seen) }
}

/// Runs the tests and records what they observe.
async fn observe(setup: &DoctorSetup, daemon: &mut OwnDaemon, seen: &mut Observations) {
    match daemon.wait_for_first_answer().await {
        Err(error) => seen.start = TestOutcome::Failed(error.to_string()),
        Ok(answer) => {
            if !answer.is_known {
                *seen = Observations::for_skipped_tests(
                    "the daemon's protocol is unknown, so Cleave sends commands with the driver's own tool",
                );
            }
            seen.start = TestOutcome::Observed(answer.after_ms);
            seen.greeting = TestOutcome::Observed(answer.is_known);
            if answer.is_known {
                tests_on_gpu::run_tests(setup, daemon, seen).await;
            }
        }
    }
}
