//! Reads the pods of a client's process, and the reaction of the process to SIGTERM, from `/proc`.
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use crate::cgroup;

/// Bit of SIGTERM in the masks of `/proc/PID/status`. The lowest bit of a mask is signal 1.
const SIGTERM_MASK: u64 = 1 << 14;

/// State of a process that has not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LiveProcess {
    /// Whether the process continues after SIGTERM: it handles the signal, waits for it, or ignores
    /// it.
    pub(crate) survives_sigterm: bool,
    /// Whether a signal or a debugger has stopped the process.
    pub(crate) stopped: bool,
}

impl LiveProcess {
    /// Reads the process with this PID in the host's PID namespace. Returns `None` if the process
    /// has ended.
    pub(crate) fn read(pid: u32) -> Option<Self> {
        let directory = proc_directory(pid);
        let status = SignalStatus::parse(&read_lossily(&directory.join("status"))?)?;
        let survives_sigterm = status.handles || status.blocks && all_threads_block_sigterm(&directory);
        let stopped = status.state == RunState::Stopped;
        (status.state != RunState::Ended).then_some(Self { survives_sigterm, stopped })
    }
}

/// Returns the UIDs of the pods whose cgroups contain the process, outermost first.
///
/// Excludes pods that also contain the agent's own process, because on a node that runs in a pod,
/// all processes belong to that pod.
pub(crate) fn pod_uids_of_process(pid: u32) -> Vec<String> {
    static OWN_PODS: LazyLock<Vec<String>> = LazyLock::new(|| {
        cgroup::parse_pod_uids(&read_lossily(&proc_directory(std::process::id()).join("cgroup")).unwrap_or_default())
    });
    let mut pods = cgroup::parse_pod_uids(&read_lossily(&proc_directory(pid).join("cgroup")).unwrap_or_default());
    pods.retain(|uid| !OWN_PODS.contains(uid));
    pods
}

/// Returns the directory of a process below `/proc`.
fn proc_directory(pid: u32) -> PathBuf {
    Path::new("/proc").join(pid.to_string())
}

/// Reads a file as text. Replaces invalid UTF-8, because a program may set its name to any bytes.
/// Returns `None` if the file cannot be read.
fn read_lossily(path: &Path) -> Option<String> {
    fs::read(path).ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns whether all threads block SIGTERM. A program that waits for the signal must block it in
/// every thread, because otherwise the signal would end the process through another thread.
fn all_threads_block_sigterm(directory: &Path) -> bool {
    let Ok(threads) = fs::read_dir(directory.join("task")) else { return false };
    // Ignore threads that have ended since the directory was read.
    let status = |path: &Path| read_lossily(&path.join("status")).and_then(|text| SignalStatus::parse(&text));
    threads.flatten().filter_map(|thread| status(&thread.path())).all(|status| status.blocks)
}

/// The run state of a process, and its reaction to SIGTERM, from `/proc/PID/status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SignalStatus {
    /// Whether the process handles or ignores SIGTERM. All threads have the same value.
    handles: bool,
    /// Whether this thread blocks SIGTERM.
    blocks: bool,
    state: RunState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RunState {
    Running,
    Stopped,
    Ended,
}

impl SignalStatus {
    /// Parses `/proc/PID/status`. Returns `None` if a field is missing or malformed.
    fn parse(text: &str) -> Option<Self> {
        let field =
            |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim);
        let has = |name: &str| u64::from_str_radix(field(name)?, 16).ok().map(|mask| mask & SIGTERM_MASK != 0);
        let state = field("State")?.chars().next()?;
        Some(Self {
            handles: has("SigCgt")? || has("SigIgn")?,
            blocks: has("SigBlk")?,
            state: match state {
                'T' | 't' => RunState::Stopped,
                'Z' | 'X' | 'x' => RunState::Ended,
                _ => RunState::Running,
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn proc_status_text(state: &str, blocked: u64, ignored: u64, caught: u64) -> String {
        format!(
            "Name:\tpython3\nUmask:\t0022\nState:\t{state}\nTgid:\t7\nSigQ:\t0/1\nSigPnd:\t0000000000000000\n\
             SigBlk:\t{blocked:016x}\nSigIgn:\t{ignored:016x}\nSigCgt:\t{caught:016x}\n"
        )
    }

    #[test]
    fn handled_ignored_and_blocked_signals_are_parsed() {
        let parse = |text: &str| SignalStatus::parse(text).map(|status| (status.handles, status.blocks));
        assert_eq!(parse(&proc_status_text("S (sleeping)", 0, 0, 0)), Some((false, false)));
        assert_eq!(parse(&proc_status_text("R (running)", 0, 0, 0x4000)), Some((true, false)));
        assert_eq!(parse(&proc_status_text("R (running)", 0, 0x4000, 0)), Some((true, false)));
        assert_eq!(parse(&proc_status_text("R (running)", 0x4000, 0, 0)), Some((false, true)));
        // By default, a Python program ignores SIGPIPE and SIGXFSZ, and handles SIGINT.
        assert_eq!(parse(&proc_status_text("R (running)", 0, 0x0100_1000, 0x2)), Some((false, false)));
        assert_eq!(parse(&proc_status_text("R (running)", u64::MAX, u64::MAX, u64::MAX)), Some((true, true)));
        for text in [
            "",
            "State:\tR\n",
            &proc_status_text("R", 0, 0, 0).replace("SigIgn", "Sig"),
            &proc_status_text("", 0, 0, 0),
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
        let state = |state: &str| SignalStatus::parse(&proc_status_text(state, 0, 0, 0)).map(|status| status.state);
        assert_eq!(state("T (stopped)"), Some(RunState::Stopped));
        assert_eq!(state("t (tracing stop)"), Some(RunState::Stopped));
        assert_eq!(state("Z (zombie)"), Some(RunState::Ended));
        assert_eq!(state("D (disk sleep)"), Some(RunState::Running));
    }

    #[test]
    fn this_process_is_read_and_a_missing_process_is_none() {
        let own = LiveProcess::read(std::process::id()).unwrap();
        assert!(!own.stopped && !own.survives_sigterm, "a test does not handle SIGTERM");
        assert!(pod_uids_of_process(std::process::id()).is_empty() && pod_uids_of_process(u32::MAX).is_empty());
        assert_eq!(LiveProcess::read(u32::MAX), None);
    }

    proptest! {
        #[test]
        fn parsing_a_status_never_panics(text: String) {
            let _ = SignalStatus::parse(&text);
        }
    }
}
