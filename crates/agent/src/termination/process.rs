//! What the kernel says of a client's process: whose it is, and what a SIGTERM would do to it.
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use crate::cgroup;

/// SIGTERM in the masks of `/proc/PID/status`, whose lowest bit is signal 1.
const SIGTERM: u64 = 1 << 14;

/// A process that lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Process {
    /// A SIGTERM does not end it: it handles it, waits for it, or ignores it.
    pub(crate) survives: bool,
    /// It is stopped, by a signal or a debugger.
    pub(crate) stopped: bool,
}

impl Process {
    /// The process with this pid, in the pid namespace of the host; none where it has ended.
    pub(crate) fn look(pid: u32) -> Option<Self> {
        let folder = folder(pid);
        let status = Status::parse(&read(&folder.join("status"))?)?;
        let survives = status.takes || status.blocks && all_threads_block(&folder);
        let stopped = status.state == State::Stopped;
        (status.state != State::Ended).then_some(Self { survives, stopped })
    }
}

/// UIDs of the pods that a process's control group is below, the outermost first. Those that this
/// process is below too are left out: on a node that is itself a pod, that one has everybody.
pub(crate) fn pods_of(pid: u32) -> Vec<String> {
    static OWN: LazyLock<Vec<String>> =
        LazyLock::new(|| cgroup::pods(&read(&folder(std::process::id()).join("cgroup")).unwrap_or_default()));
    let mut pods = cgroup::pods(&read(&folder(pid).join("cgroup")).unwrap_or_default());
    pods.retain(|uid| !OWN.contains(uid));
    pods
}

fn folder(pid: u32) -> PathBuf {
    Path::new("/proc").join(pid.to_string())
}

/// A program may have named itself in any bytes.
fn read(path: &Path) -> Option<String> {
    fs::read(path).ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// Whoever waits for a signal blocks it in every thread: it would end the process through any
/// other.
fn all_threads_block(folder: &Path) -> bool {
    let Ok(threads) = fs::read_dir(folder.join("task")) else { return false };
    // One that has ended since blocks nothing.
    let status = |path: &Path| read(&path.join("status")).and_then(|text| Status::parse(&text));
    threads.flatten().filter_map(|thread| status(&thread.path())).all(|status| status.blocks)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Status {
    /// It handles or ignores SIGTERM, which all of its threads do alike.
    takes: bool,
    /// This thread blocks SIGTERM.
    blocks: bool,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Runs,
    Stopped,
    Ended,
}

impl Status {
    /// `None`: not of this shape.
    fn parse(text: &str) -> Option<Self> {
        let field =
            |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim);
        let has = |name: &str| u64::from_str_radix(field(name)?, 16).ok().map(|mask| mask & SIGTERM != 0);
        let state = field("State")?.chars().next()?;
        Some(Self {
            takes: has("SigCgt")? || has("SigIgn")?,
            blocks: has("SigBlk")?,
            state: match state {
                'T' | 't' => State::Stopped,
                'Z' | 'X' | 'x' => State::Ended,
                _ => State::Runs,
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn status(state: &str, blocked: u64, ignored: u64, caught: u64) -> String {
        format!(
            "Name:\tpython3\nUmask:\t0022\nState:\t{state}\nTgid:\t7\nSigQ:\t0/1\nSigPnd:\t0000000000000000\n\
             SigBlk:\t{blocked:016x}\nSigIgn:\t{ignored:016x}\nSigCgt:\t{caught:016x}\n"
        )
    }

    #[test]
    fn what_a_sigterm_would_do() {
        let parse = |text: &str| Status::parse(text).map(|status| (status.takes, status.blocks));
        assert_eq!(parse(&status("S (sleeping)", 0, 0, 0)), Some((false, false)));
        assert_eq!(parse(&status("R (running)", 0, 0, 0x4000)), Some((true, false)));
        assert_eq!(parse(&status("R (running)", 0, 0x4000, 0)), Some((true, false)));
        assert_eq!(parse(&status("R (running)", 0x4000, 0, 0)), Some((false, true)));
        // A Python program: SIGPIPE and SIGXFSZ are ignored, SIGINT is handled.
        assert_eq!(parse(&status("R (running)", 0, 0x0100_1000, 0x2)), Some((false, false)));
        assert_eq!(parse(&status("R (running)", u64::MAX, u64::MAX, u64::MAX)), Some((true, true)));
        for text in ["", "State:\tR\n", &status("R", 0, 0, 0).replace("SigIgn", "Sig"), &status("", 0, 0, 0)] {
            assert_eq!(parse(text), None, "{text}");
        }
        let state = |state: &str| Status::parse(&status(state, 0, 0, 0)).map(|status| status.state);
        assert_eq!(state("T (stopped)"), Some(State::Stopped));
        assert_eq!(state("t (tracing stop)"), Some(State::Stopped));
        assert_eq!(state("Z (zombie)"), Some(State::Ended));
        assert_eq!(state("D (disk sleep)"), Some(State::Runs));
    }

    #[test]
    fn this_process_and_one_that_is_none() {
        let own = Process::look(std::process::id()).unwrap();
        assert!(!own.stopped && !own.survives, "a test handles no SIGTERM");
        assert!(pods_of(std::process::id()).is_empty() && pods_of(u32::MAX).is_empty());
        assert_eq!(Process::look(u32::MAX), None);
    }

    proptest! {
        #[test]
        fn whatever_is_there_is_read(text: String) {
            let _ = Status::parse(&text);
        }
    }
}
