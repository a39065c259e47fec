//! Facts about the node and the GPU, collected without starting anything on the GPU.
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde::Serialize;
use tokio::process::Command;
use tokio::time::timeout;

use crate::mps::daemon::tool;
use crate::mps::log::{LogEvent, parse_log_line};
use crate::nvml::{ComputeMode, Gpu};

/// Time limit of `nvidia-cuda-mps-control -v`, which contacts no daemon.
const VERSION_DEADLINE: Duration = Duration::from_secs(5);

/// Facts about the node and the GPU.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SystemFacts {
    pub(super) kernel: String,
    pub(super) cgroups: &'static str,
    pub(super) driver: String,
    pub(super) cuda: Option<String>,
    /// Path of the MPS control program.
    pub(super) control: Option<PathBuf>,
    pub(super) control_version: Option<u32>,
    pub(super) gpu: GpuFacts,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct GpuFacts {
    pub(super) index: u32,
    pub(super) uuid: String,
    pub(super) model: String,
    pub(super) sms: u32,
    #[serde(rename = "memoryMiB")]
    pub(super) memory_mib: u64,
    pub(super) compute_mode: Option<&'static str>,
    pub(super) mig: &'static str,
    /// Number of processes on the GPU. `None` if NVML does not report the processes.
    pub(super) processes: Option<usize>,
}

pub(super) fn gpu_facts(gpu: &Gpu, compute_mode: Option<ComputeMode>, processes: Option<usize>) -> GpuFacts {
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

/// Returns the cgroup versions that are mounted at `mount`.
pub(super) fn cgroup_versions(mount: &Path) -> &'static str {
    if mount.join("cgroup.controllers").exists() {
        "v2"
    } else if mount.join("unified").exists() {
        "v1 and v2"
    } else {
        "v1"
    }
}

/// Finds a program by its path, or through PATH if the path is only a name. Returns `None` if no
/// such file exists.
pub(super) fn find_program(program: &Path) -> Option<PathBuf> {
    if program.components().count() > 1 {
        return program.is_file().then(|| program.to_owned());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(program)).find(|file| file.is_file())
}

/// Reads the version of the control program. Returns `None` if the program does not report a
/// version in time.
pub(super) async fn read_control_version(control: &Path, library_path: Option<&OsStr>, uuid: &str) -> Option<u32> {
    // Use the environment of this GPU's daemon, so that a doctor of another GPU ignores this
    // process.
    let mut command = Command::from(tool::control_tool_command(control, library_path, Path::new("/nonexistent"), uuid));
    command.arg("-v").stdin(Stdio::null()).kill_on_drop(true);
    let output = timeout(VERSION_DEADLINE, command.output()).await.ok()?.ok()?;
    String::from_utf8_lossy(&output.stdout).lines().find_map(|line| match parse_log_line(line).event {
        LogEvent::Version(version) => Some(version),
        _ => None,
    })
}
