//! `cleave-supervise PROGRAM [ARGUMENT]...`: runs a program, and restarts it at once if a signal
//! kills it.
//!
//! The agent and the kubelet relay run under this program. Without a supervisor, the container of a
//! killed agent would exit, and the kubelet would restart it with a backoff (1 s, 10 s, 20 s and so
//! on). During the backoff, new pods that request GPUs would wait, and after 10 s the kubelet would
//! reject them. The kubelet also restarts no container while it waits for a device plugin.
//!
//! Supervisors run on every node with an agent. To use little memory, the supervisor has one thread
//! and no asynchronous runtime. The supervisor forwards signals and exits with the program's exit
//! status. If the supervisor is killed, the kernel also kills the program.
//!
//! While the agent is absent, the kubelet relay waits longer if a supervisor runs, because only a
//! supervisor restarts the agent while the kubelet waits for the relay. The environment variable
//! `CLEAVE_SUPERVISOR_DIR` names the relay's directory, in which the supervisor shows that it runs.
//! Only the agent's container has this variable.
use std::collections::VecDeque;
use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use cleave_kubelet::SupervisorLock;
use nix::sys::signal::{SigSet, Signal};
use rustix::process::{Pid, WaitOptions, WaitStatus};

/// Prefix of an argument with the supervisor's PID. With this argument, this executable does not
/// supervise: it sets a parent death signal and replaces itself with the program. The signal
/// remains set after exec.
const PARENT_PID_FLAG: &str = "--under=";
/// Environment variable with the directory in which the supervisor shows that it runs.
const DIRECTORY_VARIABLE: &str = "CLEAVE_SUPERVISOR_DIR";
/// Signals that the supervisor forwards to the program.
const FORWARDED_SIGNALS: [Signal; 6] =
    [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGUSR1, Signal::SIGUSR2];
/// Maximum number of restarts within a period, and the period. If the program is killed once more
/// within the period, the supervisor exits, and the kubelet restarts the container with its
/// backoff.
const RESTART_LIMIT: (usize, Duration) = (20, Duration::from_secs(60));
/// Delay before a restart. Without the delay, a kubelet up to 1.36 could still handle the end of
/// the old `ListAndWatch` stream, and then also close the new stream.
const RESTART_DELAY: Duration = Duration::from_millis(50);
/// Number that is added to a signal's number to form the exit status, as in a shell.
const SIGNAL_EXIT_CODE_OFFSET: i32 = 128;

fn main() -> ExitCode {
    let mut args: VecDeque<OsString> = std::env::args_os().skip(1).collect();
    let under = args.front().and_then(|first| first.to_str()?.strip_prefix(PARENT_PID_FLAG)).map(str::to_owned);
    let ended = match under {
        Some(parent) => {
            args.pop_front();
            exec_program(&parent, args.make_contiguous())
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

/// How the program ended: it exited with a status, or a signal with this number killed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProgramEnd {
    Exit(i32),
    Signal(i32),
}

/// What the supervisor does after the program has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reaction {
    /// Restart the program.
    Restart,
    /// Exit from the supervisor with this status.
    Exit(u8),
}

/// The times of the restarts within the period of [`RESTART_LIMIT`].
#[derive(Debug, Default)]
struct RecentRestarts(VecDeque<Instant>);

impl RecentRestarts {
    /// Returns what to do after the program has ended, and records a restart. `stopping` states
    /// whether the supervisor received a signal that requests it to stop.
    fn reaction_to(&mut self, end: ProgramEnd, stopping: bool, now: Instant) -> Reaction {
        let code = |code: i32| Reaction::Exit(u8::try_from(code).unwrap_or(u8::MAX));
        let signal = match end {
            ProgramEnd::Exit(status) => return code(status),
            ProgramEnd::Signal(signal) => signal,
        };
        let (most, within) = RESTART_LIMIT;
        self.0.retain(|at| now.saturating_duration_since(*at) < within);
        if stopping || self.0.len() >= most {
            return code(SIGNAL_EXIT_CODE_OFFSET + signal);
        }
        self.0.push_back(now);
        Reaction::Restart
    }
}

/// Runs the program, and restarts it when a signal kills it. Returns the exit status of the
/// supervisor.
fn supervise(command: &[OsString]) -> anyhow::Result<u8> {
    let Some((program, args)) = command.split_first() else { bail!("usage: cleave-supervise PROGRAM [ARGUMENT]...") };
    let awaited = awaited_signals();
    // Blocked signals remain pending until `wait` below returns them. Blocking also works if the
    // supervisor is process 1 of a container, to which the kernel delivers no signals that have no
    // handler.
    awaited.thread_block().context("failed to block signals")?;
    let mut lock = acquire_lock();
    let mut worker = start_program(program, args)?;
    let mut restarts = RecentRestarts::default();
    let mut stopping = false;
    loop {
        let signal = awaited.wait().context("failed to wait for signals")?;
        if signal != Signal::SIGCHLD {
            stopping |= matches!(signal, Signal::SIGTERM | Signal::SIGINT | Signal::SIGQUIT);
            if stopping {
                // This supervisor no longer restarts the program.
                drop(lock.take());
            }
            let signal = rustix::process::Signal::from_named_raw(signal as i32).context("unknown signal")?;
            // Ignore errors. If the program has already exited, SIGCHLD follows.
            let _ = rustix::process::kill_process(worker, signal);
            continue;
        }
        // One SIGCHLD can report several exited processes. As process 1 of a container, the
        // supervisor also receives SIGCHLD for orphaned processes.
        while let Some((pid, status)) = reap_child()? {
            let Some(end) = program_end(status).filter(|_| pid == worker) else { continue };
            match restarts.reaction_to(end, stopping, Instant::now()) {
                Reaction::Exit(code) => return Ok(code),
                Reaction::Restart => {
                    eprintln!("cleave-supervise: process {} ended with {end:?}; restarting", pid.as_raw_pid());
                    std::thread::sleep(RESTART_DELAY);
                    worker = start_program(program, args)?;
                }
            }
        }
    }
}

/// Shows the kubelet relay that this supervisor runs, if the environment names the relay's
/// directory. Continues after a failure: the relay then only waits less for an absent agent.
fn acquire_lock() -> Option<SupervisorLock> {
    let directory = std::env::var_os(DIRECTORY_VARIABLE)?;
    let lock = SupervisorLock::acquire(Path::new(&directory));
    lock.inspect_err(|error| eprintln!("cleave-supervise: failed to lock a file in {}: {error}", directory.display()))
        .ok()
}

/// Returns the signals that the supervisor waits for.
fn awaited_signals() -> SigSet {
    FORWARDED_SIGNALS.into_iter().chain([Signal::SIGCHLD]).collect()
}

/// Starts this executable in a new process, which replaces itself with the program.
fn start_program(program: &OsString, args: &[OsString]) -> anyhow::Result<Pid> {
    let own = rustix::process::getpid().as_raw_pid();
    // Do not start this executable by its path, because an upgrade may have replaced the file.
    let child = Command::new("/proc/self/exe").arg(format!("{PARENT_PID_FLAG}{own}")).arg(program).args(args).spawn();
    Ok(Pid::from_child(&child.with_context(|| format!("failed to start {}", program.display()))?))
}

/// Reaps one child that has exited. Returns its PID and status, or `None` if no child has exited.
fn reap_child() -> anyhow::Result<Option<(Pid, WaitStatus)>> {
    match rustix::process::wait(WaitOptions::NOHANG) {
        Ok(reaped) => Ok(reaped),
        Err(rustix::io::Errno::CHILD) => Ok(None),
        Err(error) => Err(error).context("failed to wait for the program"),
    }
}

/// Returns how a child ended, or `None` if it did not end but only stopped.
fn program_end(status: WaitStatus) -> Option<ProgramEnd> {
    status.exit_status().map(ProgramEnd::Exit).or_else(|| status.terminating_signal().map(ProgramEnd::Signal))
}

/// Replaces this process with the program. Returns only if the replacement fails. `parent` is the
/// supervisor's PID.
fn exec_program(parent: &str, command: &[OsString]) -> anyhow::Result<u8> {
    let Some((program, args)) = command.split_first() else { bail!("no program given") };
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .context("failed to set the parent death signal")?;
    let is_parent = rustix::process::getppid().is_some_and(|pid| pid.as_raw_pid().to_string() == parent);
    if !is_parent {
        bail!("the supervisor (process {parent}) has already exited");
    }
    // Unblock the signals, because the program inherits the set of blocked signals.
    awaited_signals().thread_unblock().context("failed to unblock signals")?;
    let error = Command::new(program).args(args).exec();
    Err(error).with_context(|| format!("failed to start {}", program.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KILLED_BY_SIGKILL: ProgramEnd = ProgramEnd::Signal(9);

    #[test]
    fn a_program_that_exits_is_not_restarted() {
        for status in [0, 1, 2, 255] {
            let code = u8::try_from(status).unwrap();
            assert_eq!(
                RecentRestarts::default().reaction_to(ProgramEnd::Exit(status), false, Instant::now()),
                Reaction::Exit(code)
            );
        }
    }

    #[test]
    fn a_killed_program_is_restarted_at_most_twenty_times_a_minute() {
        let start = Instant::now();
        let mut restarts = RecentRestarts::default();
        for second in 0..20 {
            assert_eq!(
                restarts.reaction_to(KILLED_BY_SIGKILL, false, start + Duration::from_secs(second)),
                Reaction::Restart
            );
        }
        assert_eq!(
            restarts.reaction_to(KILLED_BY_SIGKILL, false, start + Duration::from_secs(59)),
            Reaction::Exit(137)
        );
        assert_eq!(
            restarts.reaction_to(KILLED_BY_SIGKILL, false, start + RESTART_LIMIT.1),
            Reaction::Restart,
            "the first restart was a minute ago"
        );
        assert_eq!(restarts.reaction_to(KILLED_BY_SIGKILL, false, start + RESTART_LIMIT.1), Reaction::Exit(137));
    }

    #[test]
    fn a_program_is_not_restarted_while_stopping() {
        assert_eq!(
            RecentRestarts::default().reaction_to(ProgramEnd::Signal(15), true, Instant::now()),
            Reaction::Exit(143)
        );
    }
}
