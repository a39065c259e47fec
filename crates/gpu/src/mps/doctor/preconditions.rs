//! Decides whether the doctor may start a daemon on the GPU without disturbing other programs.
use std::io;
use std::path::Path;

use super::facts::SystemFacts;
use crate::mps::procfs;
use crate::mps::wire::{Desired, Paths};
use crate::nvml::{ComputeMode, Gpu};

/// The node's initial PID namespace (`PROC_PID_INIT_INO` of the kernel). All processes are visible
/// only in this namespace.
const INITIAL_PID_NAMESPACE: &str = "pid:[4026531836]";

/// The facts that determine whether the doctor may start a daemon.
#[derive(Debug, Clone)]
pub(super) struct Preconditions {
    control: bool,
    root: bool,
    mig: bool,
    compute_mode: Option<ComputeMode>,
    /// Why Cleave may be using the GPU. `None` if Cleave does not use the GPU.
    cleave: Option<String>,
    /// PIDs of MPS processes that may serve the GPU. `None` if the search failed.
    mps: Option<Vec<u32>>,
    /// Number of processes on the GPU. `None` if NVML does not report the processes.
    processes: Option<usize>,
    pub(super) foreign_processes: ForeignProcesses,
}

/// Whether processes of other PID namespaces are visible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ForeignProcesses {
    Visible,
    Hidden,
    /// Processes of other PID namespaces are hidden, but `--idle` asserts that none exist.
    AssumedNone,
}

impl Preconditions {
    /// Returns why the doctor may not start a daemon, or `None` if the doctor may start one.
    pub(super) fn skip_reason(&self) -> Option<String> {
        let why = match self {
            Self { control: false, .. } => "the MPS control program was not found (--mps-control)",
            Self { root: false, .. } => "an MPS daemon for all users needs root",
            Self { mig: true, .. } => "MIG is enabled on the GPU, and MIG devices are not tested",
            Self { compute_mode: Some(ComputeMode::Prohibited), .. } => "the compute mode is Prohibited",
            Self { cleave: Some(why), .. } => why,
            Self { mps: None, .. } => "failed to search for MPS daemons that may serve the GPU",
            Self { mps: Some(pids), .. } if !pids.is_empty() => {
                let pids: Vec<String> = pids.iter().map(ToString::to_string).collect();
                return Some(format!(
                    "an MPS daemon that may serve the GPU is already running (process {})",
                    pids.join(", ")
                ));
            }
            Self { processes: None, .. } => "NVML does not report which processes use the GPU",
            Self { processes: Some(1..), .. } => "the GPU is in use",
            Self { foreign_processes: ForeignProcesses::Hidden, .. } => {
                "processes in other PID namespaces are not visible; pass --idle if no process uses the GPU"
            }
            _ => return None,
        };
        Some(why.to_owned())
    }
}

/// Checks the preconditions. `assume_idle` is `--idle`.
pub(super) async fn check_preconditions(
    run_dir: &Path,
    assume_idle: bool,
    facts: &SystemFacts,
    gpu: &Gpu,
    compute_mode: Option<ComputeMode>,
) -> Preconditions {
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    Preconditions {
        control: facts.control.is_some(),
        root: rustix::process::geteuid().is_root(),
        mig: gpu.mig.as_ref().is_some_and(|mig| mig.enabled),
        compute_mode,
        cleave: reason_to_assume_cleave_uses_gpu(run_dir, &gpu.uuid),
        mps: procfs::find_processes_of_gpu(&gpu.uuid)
            .await
            .inspect_err(|error| tracing::error!(%error, "failed to search for MPS processes"))
            .ok(),
        processes: facts.gpu.processes,
        foreign_processes: match namespace.as_os_str() == INITIAL_PID_NAMESPACE {
            true => ForeignProcesses::Visible,
            false if assume_idle => ForeignProcesses::AssumedNone,
            false => ForeignProcesses::Hidden,
        },
    }
}

/// Returns the reason to assume that Cleave uses the GPU. Returns `None` if Cleave does not use
/// the GPU.
fn reason_to_assume_cleave_uses_gpu(run: &Path, uuid: &str) -> Option<String> {
    let path = Paths::new(run).desired();
    let desired = match std::fs::read(&path) {
        Ok(bytes) => Desired::parse(&bytes),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => {
            return Some(format!("failed to determine whether Cleave uses the GPU: {}: {error}", path.display()));
        }
    };
    match desired {
        Ok(desired) if !desired.daemons.contains_key(uuid) => None,
        Ok(_) => Some(format!(
            "Cleave runs an MPS daemon for the GPU ({}); remove the GPU from its policy first",
            path.display()
        )),
        Err(invalid) => Some(format!("failed to determine whether Cleave uses the GPU: {invalid}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn preconditions_of_free_gpu() -> Preconditions {
        Preconditions {
            control: true,
            root: true,
            mig: false,
            compute_mode: Some(ComputeMode::Default),
            cleave: None,
            mps: Some(Vec::new()),
            processes: Some(0),
            foreign_processes: ForeignProcesses::Visible,
        }
    }

    #[test]
    fn a_daemon_is_started_only_if_it_disturbs_no_program() {
        assert_eq!(preconditions_of_free_gpu().skip_reason(), None);
        assert_eq!(
            Preconditions { compute_mode: Some(ComputeMode::ExclusiveProcess), ..preconditions_of_free_gpu() }
                .skip_reason(),
            None
        );
        assert_eq!(
            Preconditions { foreign_processes: ForeignProcesses::AssumedNone, ..preconditions_of_free_gpu() }
                .skip_reason(),
            None
        );
        for (preconditions, why) in [
            (Preconditions { control: false, ..preconditions_of_free_gpu() }, "control program was not found"),
            (Preconditions { root: false, ..preconditions_of_free_gpu() }, "root"),
            (Preconditions { mig: true, ..preconditions_of_free_gpu() }, "MIG"),
            (
                Preconditions { compute_mode: Some(ComputeMode::Prohibited), ..preconditions_of_free_gpu() },
                "compute mode",
            ),
            (
                Preconditions { cleave: Some("Cleave shares it".to_owned()), ..preconditions_of_free_gpu() },
                "Cleave shares it",
            ),
            (Preconditions { mps: None, ..preconditions_of_free_gpu() }, "search for MPS daemons"),
            (Preconditions { mps: Some(vec![7, 8]), ..preconditions_of_free_gpu() }, "process 7, 8"),
            (Preconditions { processes: None, ..preconditions_of_free_gpu() }, "NVML does not report"),
            (Preconditions { processes: Some(1), ..preconditions_of_free_gpu() }, "in use"),
            (
                Preconditions {
                    processes: Some(1),
                    foreign_processes: ForeignProcesses::AssumedNone,
                    ..preconditions_of_free_gpu()
                },
                "in use",
            ),
            (Preconditions { foreign_processes: ForeignProcesses::Hidden, ..preconditions_of_free_gpu() }, "--idle"),
        ] {
            let reason = preconditions.skip_reason().unwrap_or_default();
            assert!(reason.contains(why), "{preconditions:?}: {reason:?}");
        }
    }

    #[test]
    fn cleave_may_use_a_gpu_if_the_desired_file_lists_it_or_is_unreadable() {
        let run = tempfile::tempdir().unwrap();
        assert_eq!(reason_to_assume_cleave_uses_gpu(run.path(), "GPU-1"), None);
        std::fs::create_dir(run.path().join("mps")).unwrap();
        let path = Paths::new(run.path()).desired();
        let daemon = r#"{"multiUser":true,"exclusive":false,"defaultThreads":null,"defaultMemoryMib":null}"#;
        let desired = format!(r#"{{"version":1,"daemons":{{"GPU-1":{daemon}}},"allocations":{{}}}}"#);
        std::fs::write(&path, desired).unwrap();
        assert!(reason_to_assume_cleave_uses_gpu(run.path(), "GPU-1").unwrap().contains("Cleave runs an MPS daemon"));
        assert_eq!(reason_to_assume_cleave_uses_gpu(run.path(), "GPU-2"), None);
        std::fs::write(&path, "junk").unwrap();
        assert!(reason_to_assume_cleave_uses_gpu(run.path(), "GPU-2").unwrap().contains("failed to determine"));
    }
}
