//! Tests `cleave-supervise` with small shell scripts as the supervised programs.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic fails the test")]
use std::fs;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Time limit of each wait. Long enough for a busy machine.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
/// A shell script that appends its PID to the file `$PIDS` and waits until its input closes. On
/// SIGTERM the script exits with status 7.
const WAITING_SCRIPT: &str = r#"trap "exit 7" TERM; exec 3<&0; cat <&3 & echo $$ >>"$PIDS"; wait"#;

struct RunningSupervisor {
    directory: tempfile::TempDir,
    child: Child,
    /// Kept open, because the script exits when its input closes.
    _stdin: Option<ChildStdin>,
}

impl RunningSupervisor {
    fn start(command: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_cleave-supervise"))
            .args(command)
            .env("PIDS", directory.path().join("pids"))
            .env("CLEAVE_SUPERVISOR_DIR", directory.path().join("relay"))
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take();
        Self { directory, child, _stdin: stdin }
    }

    /// Waits until the supervised program was started at least `count` times. Returns the PIDs of
    /// all starts.
    fn wait_for_starts(&self, count: usize) -> Vec<Pid> {
        wait_until(&format!("{count} programs"), || {
            let text = fs::read_to_string(self.directory.path().join("pids")).unwrap_or_default();
            let pids: Vec<Pid> = text.lines().map(|line| Pid::from_raw(line.parse().unwrap()).unwrap()).collect();
            (pids.len() >= count && text.ends_with('\n')).then_some(pids)
        })
    }

    /// Returns whether the supervisor shows the kubelet relay that it runs.
    fn shows_itself(&self) -> bool {
        let lock = fs::File::open(self.directory.path().join("relay/supervisor")).unwrap();
        matches!(lock.try_lock(), Err(fs::TryLockError::WouldBlock))
    }

    /// Waits until the supervisor exits. Returns its exit status.
    fn wait_for_exit(&mut self) -> ExitStatus {
        wait_until("the end of the supervisor", || self.child.try_wait().unwrap())
    }
}

impl Drop for RunningSupervisor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Polls until the condition returns a value, and returns the value. Panics after [`WAIT_TIMEOUT`].
fn wait_until<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + WAIT_TIMEOUT;
    while Instant::now() < end {
        if let Some(found) = condition() {
            return found;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("timed out waiting for {what}")
}

/// Returns whether a process has exited. A zombie has exited, although its new parent has not
/// reaped it yet.
fn has_exited(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid())).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z'))
}

#[test]
fn a_killed_program_is_restarted_and_one_that_exits_is_not() {
    let mut supervised = RunningSupervisor::start(&["sh", "-c", WAITING_SCRIPT]);
    let first = supervised.wait_for_starts(1)[0];
    kill_process(first, Signal::KILL).unwrap();
    let second = supervised.wait_for_starts(2)[1];
    assert_ne!(first, second);
    kill_process(second, Signal::ABORT).unwrap();
    let third = supervised.wait_for_starts(3)[2];
    assert!(supervised.child.try_wait().unwrap().is_none());
    kill_process(Pid::from_child(&supervised.child), Signal::TERM).unwrap();
    assert_eq!(
        supervised.wait_for_exit().code(),
        Some(7),
        "the supervisor forwarded SIGTERM and exited with the program's status"
    );
    assert!(has_exited(third));
}

#[test]
fn the_supervisor_shows_the_relay_that_it_runs_until_it_no_longer_restarts_the_program() {
    // This script exits only when its input closes.
    const STUBBORN_SCRIPT: &str = r#"trap "" TERM; echo $$ >>"$PIDS"; read line"#;
    let mut supervised = RunningSupervisor::start(&["sh", "-c", STUBBORN_SCRIPT]);
    let first = supervised.wait_for_starts(1)[0];
    assert!(supervised.shows_itself());
    kill_process(first, Signal::KILL).unwrap();
    supervised.wait_for_starts(2);
    assert!(supervised.shows_itself(), "the supervisor restarted the program");
    kill_process(Pid::from_child(&supervised.child), Signal::TERM).unwrap();
    wait_until("the supervisor to release its lock", || (!supervised.shows_itself()).then_some(()));
    assert!(supervised.child.try_wait().unwrap().is_none(), "the program still runs");

    let mut supervised = RunningSupervisor::start(&["sh", "-c", WAITING_SCRIPT]);
    let program = supervised.wait_for_starts(1)[0];
    assert!(supervised.shows_itself());
    supervised.child.kill().unwrap();
    supervised.child.wait().unwrap();
    assert!(!supervised.shows_itself(), "the lock ends with the supervisor, even while the program still ends");
    wait_until("the end of the program", || has_exited(program).then_some(()));
}

#[test]
fn a_program_that_is_killed_repeatedly_is_restarted_twenty_times() {
    let mut supervised = RunningSupervisor::start(&["sh", "-c", r#"echo $$ >>"$PIDS"; kill -9 $$"#]);
    assert_eq!(supervised.wait_for_exit().code(), Some(137));
    assert_eq!(supervised.wait_for_starts(21).len(), 21, "twenty restarts");
}

#[test]
fn a_program_is_killed_when_its_supervisor_is_killed() {
    let mut supervised = RunningSupervisor::start(&["sh", "-c", WAITING_SCRIPT]);
    let program = supervised.wait_for_starts(1)[0];
    supervised.child.kill().unwrap();
    supervised.child.wait().unwrap();
    wait_until("the end of the program", || has_exited(program).then_some(()));
}

#[test]
fn the_supervisor_exits_with_the_status_of_the_program_or_with_1_if_the_program_cannot_start() {
    assert_eq!(RunningSupervisor::start(&["sh", "-c", "exit 3"]).wait_for_exit().code(), Some(3));
    assert_eq!(RunningSupervisor::start(&["sh", "-c", "exit 0"]).wait_for_exit().code(), Some(0));
    assert_eq!(RunningSupervisor::start(&["/no/such/program"]).wait_for_exit().code(), Some(1));
    assert_eq!(RunningSupervisor::start(&[]).wait_for_exit().code(), Some(1));
}
