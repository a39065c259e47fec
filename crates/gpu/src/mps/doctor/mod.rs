//! `cleave doctor`: whether this node's driver does what Cleave relies on.
//!
//! `judge` knows what that is and does no I/O; `live` tries it with a daemon of its own, on a GPU that nobody uses; `client` is the CUDA
//! program that it tries it with; `table` is what a person reads.
mod client;
mod judge;
mod live;
mod table;

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde::Serialize;
use tokio::process::Command;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::timeout;

use super::daemon;
use super::host::PlaceArgs;
use super::process;
use super::protocol::{self, LogEvent};
use super::wire::{Desired, Paths};
use crate::nvml::{ComputeMode, Gpu, Gpus, Nvml, NvmlError, Search, Worker};
use client::Program;
use judge::{Finding, Observed, Outcome, Verdict, Whole};
use live::{Daemon, Setup};

/// NVML answers in milliseconds; where it has to initialise a GPU, in seconds.
const NVML: Duration = Duration::from_secs(20);
/// `nvidia-cuda-mps-control -v` asks nobody.
const CONTROL_VERSION: Duration = Duration::from_secs(5);
/// The node's first pid namespace (`PROC_PID_INIT_INO` of the kernel): from any other, others' processes are not to be seen.
const FIRST_PID_NAMESPACE: &str = "pid:[4026531836]";

/// Tells whether this node's driver does what Cleave relies on of MPS. It starts an MPS daemon of its own for that, on a GPU that nobody uses;
/// of one that is in use it tells only what can be read. It exits with 0 when all that was tried is as relied on, 1 when something
/// differs, and 2 when nothing could be said. Run it as root, with the host's process ids.
#[derive(Debug, Clone, clap::Args)]
pub struct DoctorArgs {
    /// The GPU, by its index or UUID; the first without this.
    #[arg(long, value_name = "INDEX|UUID")]
    gpu: Option<String>,

    /// Print JSON in place of a table.
    #[arg(long)]
    json: bool,

    /// A CUDA program and its first arguments, by which limits are looked at (docs/doctor.md says what it does). Without it they are not tried.
    #[arg(long, value_name = "PROGRAM [ARGUMENT…]")]
    client: Option<String>,

    /// Take it that nobody uses the GPU, where others' processes cannot be seen.
    #[arg(long)]
    idle: bool,

    // The run directory is only read: it says for what GPUs this node's Cleave has daemons.
    #[command(flatten)]
    place: PlaceArgs,
}

/// Why nothing can be said.
#[derive(Debug, thiserror::Error)]
pub enum DoctorError {
    /// NVML says nothing.
    #[error("the driver cannot be asked: {0}")]
    Nvml(#[from] NvmlError),
    /// No such GPU.
    #[error("there is no GPU {wanted}; there are {}", if .there.is_empty() { "none" } else { .there })]
    NoGpu {
        /// What was asked for.
        wanted: String,
        /// What there is.
        there: String,
    },
    /// Signals or standard output are not to be had.
    #[error("the system refuses what the doctor needs: {0}")]
    System(#[from] io::Error),
    /// A signal came; what was started has been ended.
    #[error("stopped by a signal")]
    Stopped,
}

/// What the node says of itself, without anything being started.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
struct Facts {
    kernel: String,
    cgroups: &'static str,
    driver: String,
    cuda: Option<String>,
    /// Where the control program is.
    control: Option<PathBuf>,
    control_version: Option<u32>,
    gpu: GpuFacts,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
struct GpuFacts {
    index: u32,
    uuid: String,
    model: String,
    sms: u32,
    #[serde(rename = "memoryMiB")]
    memory_mib: u64,
    compute_mode: Option<&'static str>,
    mig: &'static str,
    /// None: NVML does not say.
    processes: Option<usize>,
}

/// All that is told.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    #[serde(flatten)]
    facts: Facts,
    /// Why nothing was tried, where that is so.
    left_out: Option<String>,
    as_relied_on: bool,
    findings: Vec<Finding>,
}

/// Looks, and prints what it has seen: whether all that was tried is as relied on.
///
/// # Errors
/// [`DoctorError`], where nothing can be said.
pub async fn run(args: DoctorArgs) -> Result<bool, DoctorError> {
    let search = Search { library: args.place.nvml_library.clone(), ..Search::default() };
    let nvml = Worker::start(Box::new(move || Ok(Box::new(Nvml::open(&search)?) as Box<dyn Gpus>)))?;
    let inventory = nvml.call(NVML, |gpus| gpus.inventory()).await?;
    let gpu = choose(inventory.gpus, args.gpu.as_deref())?;
    let uuid = gpu.uuid.clone();
    let compute_mode = nvml.call(NVML, move |gpus| gpus.compute_mode(&uuid)).await.ok();
    let cuda = nvml.call(NVML, |gpus| gpus.cuda_version()).await.ok();
    let control = find_program(&args.place.mps_control);
    let mut facts = Facts {
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        cgroups: cgroups(Path::new("/sys/fs/cgroup")),
        driver: inventory.driver,
        cuda: cuda.map(|(major, minor)| format!("{major}.{minor}")),
        control_version: match &control {
            Some(control) => control_version(control, args.place.mps_library_path.as_deref(), &gpu.uuid).await,
            None => None,
        },
        control,
        gpu: gpu_facts(&gpu, compute_mode, inventory.processes.get(&gpu.uuid).map(Vec::len)),
    };
    let scene = scene(&args, &facts, &gpu, compute_mode).await;
    let left_out = scene.left_out();
    let seen = match (&left_out, &facts.control) {
        (None, Some(control)) => try_it(&args, control.clone(), &gpu, nvml, scene.others == Others::Seen).await?,
        (why, _) => Observed::nothing(why.as_deref().unwrap_or_default()),
    };
    if let Outcome::Seen(log) = &seen.log {
        facts.control_version = log.version.or(facts.control_version);
    }
    let findings = judge::findings(&seen, Whole { sms: gpu.sms.0, compute_mode });
    let as_relied_on = findings.iter().all(|finding| finding.verdict != Verdict::Differs);
    let report = Report { facts, left_out, as_relied_on, findings };
    let text = if args.json {
        serde_json::to_string_pretty(&report).map_err(io::Error::from)? + "\n"
    } else {
        table::text(&report)
    };
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(as_relied_on),
    }
}

fn choose(gpus: BTreeMap<u32, Result<Gpu, NvmlError>>, wanted: Option<&str>) -> Result<Gpu, DoctorError> {
    let mut there = Vec::new();
    for (index, gpu) in gpus {
        let uuid = gpu.as_ref().map(|gpu| gpu.uuid.clone()).unwrap_or_default();
        if wanted.is_none_or(|wanted| wanted == uuid || wanted == index.to_string()) {
            return Ok(gpu?);
        }
        there.push(format!("{index} ({uuid})"));
    }
    Err(DoctorError::NoGpu { wanted: wanted.unwrap_or("at all").to_owned(), there: there.join(", ") })
}

fn gpu_facts(gpu: &Gpu, compute_mode: Option<ComputeMode>, processes: Option<usize>) -> GpuFacts {
    GpuFacts {
        index: gpu.index,
        uuid: gpu.uuid.clone(),
        model: gpu.model.clone(),
        sms: gpu.sms.0,
        memory_mib: gpu.memory.0,
        compute_mode: compute_mode.map(|mode| match mode {
            ComputeMode::Default => "Default",
            ComputeMode::ExclusiveProcess => "ExclusiveProcess",
            ComputeMode::Prohibited => "Prohibited",
        }),
        mig: match &gpu.mig {
            None => "not supported",
            Some(mig) if mig.enabled => "on",
            Some(_) => "off",
        },
        processes,
    }
}

/// The versions of control groups that are mounted.
fn cgroups(mount: &Path) -> &'static str {
    if mount.join("cgroup.controllers").exists() {
        "v2"
    } else if mount.join("unified").exists() {
        "v1 and v2"
    } else {
        "v1"
    }
}

/// Where a program is, by its path or through PATH.
fn find_program(program: &Path) -> Option<PathBuf> {
    if program.components().count() > 1 {
        return program.is_file().then(|| program.to_owned());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(program)).find(|file| file.is_file())
}

async fn control_version(control: &Path, library_path: Option<&OsStr>, uuid: &str) -> Option<u32> {
    // As for a daemon: another doctor beside this one sees that it is of this GPU.
    let mut command = Command::from(daemon::tool(control, library_path, Path::new("/nonexistent"), uuid));
    command.arg("-v").stdin(Stdio::null()).kill_on_drop(true);
    let output = timeout(CONTROL_VERSION, command.output()).await.ok()?.ok()?;
    String::from_utf8_lossy(&output.stdout).lines().find_map(|line| match protocol::log_line(line).event {
        LogEvent::Version(version) => Some(version),
        _ => None,
    })
}

/// What decides whether a daemon may be started.
#[derive(Debug, Clone)]
struct Scene {
    control: bool,
    root: bool,
    mig: bool,
    compute_mode: Option<ComputeMode>,
    /// Why Cleave has the GPU.
    cleave: Option<String>,
    /// Pids of MPS that may serve the GPU; none where that cannot be said.
    mps: Option<Vec<u32>>,
    /// Processes on it; none where NVML does not say.
    processes: Option<usize>,
    others: Others,
}

/// Whether others' processes are among those that can be seen here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Others {
    Seen,
    Unseen,
    /// And it was said that there are none.
    Nobody,
}

impl Scene {
    /// Why nothing is started.
    fn left_out(&self) -> Option<String> {
        let why = match self {
            Self { control: false, .. } => "there is no MPS control program (--mps-control)",
            Self { root: false, .. } => "an MPS daemon for all users needs root",
            Self { mig: true, .. } => "the GPU is cut by MIG: nothing is tried on MIG devices",
            Self { compute_mode: Some(ComputeMode::Prohibited), .. } => "the compute mode lets nobody use the GPU",
            Self { cleave: Some(why), .. } => why,
            Self { mps: None, .. } => "whether MPS serves the GPU already cannot be said",
            Self { mps: Some(pids), .. } if !pids.is_empty() => {
                let pids: Vec<String> = pids.iter().map(ToString::to_string).collect();
                return Some(format!("MPS that may serve the GPU runs already (process {})", pids.join(", ")));
            }
            Self { processes: None, .. } => "NVML does not say who uses the GPU",
            Self { processes: Some(1..), .. } => "the GPU is in use",
            Self { others: Others::Unseen, .. } => {
                "others' processes cannot be seen from this pid namespace: --idle takes it that nobody uses the GPU"
            }
            _ => return None,
        };
        Some(why.to_owned())
    }
}

async fn scene(args: &DoctorArgs, facts: &Facts, gpu: &Gpu, compute_mode: Option<ComputeMode>) -> Scene {
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    Scene {
        control: facts.control.is_some(),
        root: rustix::process::geteuid().is_root(),
        mig: gpu.mig.as_ref().is_some_and(|mig| mig.enabled),
        compute_mode,
        cleave: cleave(&args.place.run_dir, &gpu.uuid),
        mps: process::of_gpu(&gpu.uuid).await,
        processes: facts.gpu.processes,
        others: match namespace.as_os_str() == FIRST_PID_NAMESPACE {
            true => Others::Seen,
            false if args.idle => Others::Nobody,
            false => Others::Unseen,
        },
    }
}

/// Why this node's Cleave has the GPU, where it does.
fn cleave(run: &Path, uuid: &str) -> Option<String> {
    let path = Paths::new(run).desired();
    let desired = match std::fs::read(&path) {
        Ok(bytes) => Desired::parse(&bytes),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => return Some(format!("what Cleave does here cannot be read: {}: {error}", path.display())),
    };
    match desired {
        Ok(desired) if !desired.daemons.contains_key(uuid) => None,
        Ok(_) => Some(format!("Cleave shares the GPU by MPS ({})", path.display())),
        Err(invalid) => Some(format!("what Cleave does here cannot be read: {invalid}")),
    }
}

async fn try_it(
    args: &DoctorArgs,
    control: PathBuf,
    gpu: &Gpu,
    nvml: Worker,
    sees_others: bool,
) -> Result<Observed, DoctorError> {
    let words = args.client.as_deref().map(|client| client.split_whitespace().map(OsString::from).collect());
    let setup = Setup {
        uuid: gpu.uuid.clone(),
        memory_mib: gpu.memory.0,
        control,
        library_path: args.place.mps_library_path.clone(),
        program: words.map(|words| Program {
            words,
            library_path: args.place.mps_library_path.clone(),
            device: gpu.uuid.clone(),
        }),
        nvml,
        sees_others,
    };
    // Before there is anything that has to be ended.
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let mut seen = Observed::nothing("the daemon does not answer");
    let mut daemon = match Daemon::start(&setup) {
        Ok(daemon) => daemon,
        Err(error) => {
            seen.start = Outcome::Failed(format!("it cannot be started: {error}"));
            return Ok(seen);
        }
    };
    let stopped = tokio::select! {
        _ = terminate.recv() => true,
        _ = interrupt.recv() => true,
        () = watch(&setup, &mut daemon, &mut seen) => false,
    };
    daemon.end().await;
    if stopped { Err(DoctorError::Stopped) } else { Ok(seen) }
}

async fn watch(setup: &Setup, daemon: &mut Daemon, seen: &mut Observed) {
    match daemon.answers().await {
        Err(why) => seen.start = Outcome::Failed(why),
        Ok((ms, known)) => {
            if !known {
                *seen = Observed::nothing(
                    "the daemon's protocol is unknown: Cleave gives commands by the driver's own tool there",
                );
            }
            seen.start = Outcome::Seen(ms);
            seen.greeting = Outcome::Seen(known);
            if known {
                live::look(setup, daemon, seen).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn free() -> Scene {
        Scene {
            control: true,
            root: true,
            mig: false,
            compute_mode: Some(ComputeMode::Default),
            cleave: None,
            mps: Some(Vec::new()),
            processes: Some(0),
            others: Others::Seen,
        }
    }

    #[test]
    fn a_daemon_is_started_only_where_it_disturbs_nobody() {
        assert_eq!(free().left_out(), None);
        assert_eq!(Scene { compute_mode: Some(ComputeMode::ExclusiveProcess), ..free() }.left_out(), None);
        assert_eq!(Scene { others: Others::Nobody, ..free() }.left_out(), None);
        for (scene, why) in [
            (Scene { control: false, ..free() }, "no MPS control program"),
            (Scene { root: false, ..free() }, "root"),
            (Scene { mig: true, ..free() }, "MIG"),
            (Scene { compute_mode: Some(ComputeMode::Prohibited), ..free() }, "compute mode"),
            (Scene { cleave: Some("Cleave shares it".to_owned()), ..free() }, "Cleave shares it"),
            (Scene { mps: None, ..free() }, "cannot be said"),
            (Scene { mps: Some(vec![7, 8]), ..free() }, "process 7, 8"),
            (Scene { processes: None, ..free() }, "NVML does not say"),
            (Scene { processes: Some(1), ..free() }, "in use"),
            (Scene { processes: Some(1), others: Others::Nobody, ..free() }, "in use"),
            (Scene { others: Others::Unseen, ..free() }, "--idle"),
        ] {
            let left_out = scene.left_out().unwrap_or_default();
            assert!(left_out.contains(why), "{scene:?}: {left_out:?}");
        }
    }

    #[test]
    fn what_cleave_has_a_daemon_for_is_its_own_and_what_cannot_be_read_may_be() {
        let run = tempfile::tempdir().unwrap();
        assert_eq!(cleave(run.path(), "GPU-1"), None);
        std::fs::create_dir(run.path().join("mps")).unwrap();
        let path = Paths::new(run.path()).desired();
        let daemon = r#"{"multiUser":true,"exclusive":false,"defaultThreads":null,"defaultMemoryMib":null}"#;
        let desired = format!(r#"{{"version":1,"daemons":{{"GPU-1":{daemon}}},"allocations":{{}}}}"#);
        std::fs::write(&path, desired).unwrap();
        assert!(cleave(run.path(), "GPU-1").unwrap().contains("Cleave shares the GPU"));
        assert_eq!(cleave(run.path(), "GPU-2"), None);
        std::fs::write(&path, "junk").unwrap();
        assert!(cleave(run.path(), "GPU-2").unwrap().contains("cannot be read"));
    }
}
