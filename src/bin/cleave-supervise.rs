//! `cleave-supervise PROGRAM [ARGUMENT]...`: runs a program, and starts it again at once when a signal ended it.
//!
//! For the agent. Without it a killed agent is its container's end: the kubelet starts that again after a second, then after ten, twenty and
//! so on, and as long tells the node's shares as unhealthy, so that pods which come meanwhile fail for good.
//!
//! It is small because it is on every node: no threads, no runtime, nothing kept. Signals are passed on, the program's own exit is its own,
//! and the program does not outlive it.
use std::collections::VecDeque;
use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nix::sys::signal::{SigSet, Signal};
use rustix::process::{Pid, WaitOptions, WaitStatus};

/// The same program between fork and the program that is wanted: it has itself killed with its parent, which outlasts exec.
const UNDER: &str = "--under=";
/// Signals that are the program's to act upon.
const PASSED_ON: [Signal; 6] =
    [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGUSR1, Signal::SIGUSR2];
/// So often in so long a time it is started again; then the kubelet's back-off is what is wanted.
const RESTARTS: (usize, Duration) = (20, Duration::from_secs(60));
/// Before it is started again. A kubelet (up to 1.36) that still works on the end of the old stream takes down the new one with it.
const SETTLE: Duration = Duration::from_millis(50);
/// What a shell makes of a signal.
const BY_SIGNAL: i32 = 128;

fn main() -> ExitCode {
    let mut args: VecDeque<OsString> = std::env::args_os().skip(1).collect();
    let under = args.front().and_then(|first| first.to_str()?.strip_prefix(UNDER)).map(str::to_owned);
    let ended = match under {
        Some(parent) => {
            args.pop_front();
            become_program(&parent, args.make_contiguous())
        }
        None => supervise(args.make_contiguous()),
    };
    match ended {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("cleave-supervise: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// How the program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Exit(i32),
    Signal(i32),
}

/// What follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Again,
    Exit(u8),
}

/// When the program was started again, as far back as it counts.
#[derive(Debug, Default)]
struct Restarts(VecDeque<Instant>);

impl Restarts {
    fn next(&mut self, end: End, stopping: bool, now: Instant) -> Next {
        let code = |code: i32| Next::Exit(u8::try_from(code).unwrap_or(u8::MAX));
        let signal = match end {
            End::Exit(status) => return code(status),
            End::Signal(signal) => signal,
        };
        let (most, within) = RESTARTS;
        self.0.retain(|at| now.saturating_duration_since(*at) < within);
        if stopping || self.0.len() >= most {
            return code(BY_SIGNAL + signal);
        }
        self.0.push_back(now);
        Next::Again
    }
}

fn supervise(command: &[OsString]) -> anyhow::Result<u8> {
    let Some((program, args)) = command.split_first() else { bail!("usage: cleave-supervise PROGRAM [ARGUMENT]...") };
    let awaited = awaited();
    // Blocked, they wait for `wait` below, also where this is process 1, which is sent no signal that it does not handle.
    awaited.thread_block().context("blocking signals")?;
    let mut worker = start(program, args)?;
    let mut restarts = Restarts::default();
    let mut stopping = false;
    loop {
        let signal = awaited.wait().context("waiting for signals")?;
        if signal != Signal::SIGCHLD {
            stopping |= matches!(signal, Signal::SIGTERM | Signal::SIGINT | Signal::SIGQUIT);
            let signal = rustix::process::Signal::from_named_raw(signal as i32).context("a signal without a name")?;
            // It may have ended just now: then its end is told next.
            let _ = rustix::process::kill_process(worker, signal);
            continue;
        }
        // One SIGCHLD may stand for several ends; as process 1 of a container also for those of strangers.
        while let Some((pid, status)) = reaped()? {
            let Some(end) = end(status).filter(|_| pid == worker) else { continue };
            match restarts.next(end, stopping, Instant::now()) {
                Next::Exit(code) => return Ok(code),
                Next::Again => {
                    eprintln!(
                        "cleave-supervise: process {pid} ended by {end:?}: starting it again",
                        pid = pid.as_raw_pid()
                    );
                    std::thread::sleep(SETTLE);
                    worker = start(program, args)?;
                }
            }
        }
    }
}

fn awaited() -> SigSet {
    PASSED_ON.into_iter().chain([Signal::SIGCHLD]).collect()
}

fn start(program: &OsString, args: &[OsString]) -> anyhow::Result<Pid> {
    let own = rustix::process::getpid().as_raw_pid();
    // Not by its name: another file may lie there by now.
    let child = Command::new("/proc/self/exe").arg(format!("{UNDER}{own}")).arg(program).args(args).spawn();
    Ok(Pid::from_child(&child.with_context(|| format!("starting {}", program.display()))?))
}

fn reaped() -> anyhow::Result<Option<(Pid, WaitStatus)>> {
    match rustix::process::wait(WaitOptions::NOHANG) {
        Ok(reaped) => Ok(reaped),
        Err(rustix::io::Errno::CHILD) => Ok(None),
        Err(error) => Err(error).context("waiting for the program"),
    }
}

/// None while it is only stopped.
fn end(status: WaitStatus) -> Option<End> {
    status.exit_status().map(End::Exit).or_else(|| status.terminating_signal().map(End::Signal))
}

fn become_program(parent: &str, command: &[OsString]) -> anyhow::Result<u8> {
    let Some((program, args)) = command.split_first() else { bail!("no program") };
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).context("prctl")?;
    let is_parent = rustix::process::getppid().is_some_and(|pid| pid.as_raw_pid().to_string() == parent);
    if !is_parent {
        bail!("process {parent} that started this is gone");
    }
    // What a program finds blocked stays so.
    awaited().thread_unblock().context("unblocking signals")?;
    let error = Command::new(program).args(args).exec();
    Err(error).with_context(|| format!("starting {}", program.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KILLED: End = End::Signal(9);

    #[test]
    fn what_ends_by_itself_is_not_started_again() {
        for status in [0, 1, 2, 255] {
            let code = u8::try_from(status).unwrap();
            assert_eq!(Restarts::default().next(End::Exit(status), false, Instant::now()), Next::Exit(code));
        }
    }

    #[test]
    fn it_is_started_again_so_often_within_a_minute_and_not_more() {
        let start = Instant::now();
        let mut restarts = Restarts::default();
        for second in 0..20 {
            assert_eq!(restarts.next(KILLED, false, start + Duration::from_secs(second)), Next::Again);
        }
        assert_eq!(restarts.next(KILLED, false, start + Duration::from_secs(59)), Next::Exit(137));
        assert_eq!(restarts.next(KILLED, false, start + RESTARTS.1), Next::Again, "the first is forgotten");
        assert_eq!(restarts.next(KILLED, false, start + RESTARTS.1), Next::Exit(137));
    }

    #[test]
    fn told_to_stop_it_is_not_started_again() {
        assert_eq!(Restarts::default().next(End::Signal(15), true, Instant::now()), Next::Exit(143));
    }
}
