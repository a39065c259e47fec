//! What the kernel says of a client's process: whose it is, and what a SIGTERM would do to it.
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

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

/// UIDs of the pods that a process's control group is below, the outermost first. Those that this process is below too are left out: on a node that
/// is itself a pod, that one has everybody.
pub(crate) fn pods_of(pid: u32) -> Vec<String> {
    static OWN: LazyLock<Vec<String>> =
        LazyLock::new(|| in_groups(&read(&folder(std::process::id()).join("cgroup")).unwrap_or_default()));
    let mut pods = in_groups(&read(&folder(pid).join("cgroup")).unwrap_or_default());
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

/// Whoever waits for a signal blocks it in every thread: it would end the process through any other.
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

/// The UIDs of the pods in a process's `/proc/PID/cgroup`, the outermost first: what is below may be its tenant's.
///
/// The kubelet names a pod's group `pod<UID>`, or by way of systemd `kubepods-<class>-pod<UID with underscores>.slice`.
fn in_groups(text: &str) -> Vec<String> {
    let paths = text.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    let of_path = |path: &str| path.split('/').filter_map(pod_of_group).collect::<Vec<_>>();
    // Of several hierarchies all that have pods have the same.
    paths.map(of_path).find(|pods| !pods.is_empty()).unwrap_or_default()
}

fn pod_of_group(name: &str) -> Option<String> {
    let uid = match name.strip_suffix(".slice") {
        Some(slice) => slice.rsplit_once("-pod")?.1.replace('_', "-"),
        None => name.strip_prefix("pod")?.to_owned(),
    };
    // That of a static pod is a hash without dashes.
    let is_uid = uid.len() >= 32 && uid.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f' | b'-'));
    is_uid.then_some(uid)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UID: &str = "3c5a0b6e-52f1-4c92-9d0a-6a1f7b0c9e11";

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
    fn a_pods_control_group_has_its_uid() {
        let under = UID.replace('-', "_");
        for path in [
            format!("0::/kubepods/burstable/pod{UID}/3f0c"),
            format!("0::/kubepods/pod{UID}"),
            format!("0::/../../besteffort/pod{UID}/3f0c"),
            format!(
                "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{under}.slice/cri-containerd-3f.scope"
            ),
            format!(
                "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{under}.slice/crio-3f.scope/container"
            ),
            format!("12:hugetlb:/\n5:cpu,cpuacct:/kubepods/burstable/pod{UID}/3f0c\n0::/"),
            // What a tenant makes below is no pod.
            format!("0::/kubepods/pod{UID}/3f0c/pod00000000-0000-0000-0000-000000000000"),
        ] {
            assert_eq!(in_groups(&path).first().map(String::as_str), Some(UID), "{path}");
        }
        let hash = "0123456789abcdef0123456789abcdef";
        assert_eq!(in_groups(&format!("0::/kubepods/pod{hash}/a/pod{UID}")), [hash, UID]);
        for path in
            ["", "0::/", "0::/user.slice/a.service", "0::/kubepods/burstable", "0::/podman/pods", "0::/pod", "pod"]
        {
            assert!(in_groups(path).is_empty(), "{path}");
        }
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
            let _ = (Status::parse(&text), in_groups(&text));
        }
    }
}
