//! Starts and reaps child processes, and identifies processes by pidfd.
//!
//! The MPS server is the daemon's child. If the daemon exits first, this process inherits the
//! server as the subreaper (or PID 1). This process must therefore reap every process that exits
//! below it. A reaper also consumes the exit status of tokio's children. The MPS host therefore
//! starts all processes here and none through tokio.
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::rc::Rc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, WaitStatus};
use tokio::net::unix::pipe;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::timeout;

use super::seqpacket::async_fd;

/// How a process exited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChildExit {
    Status(i32),
    Signal(i32),
}

impl fmt::Display for ChildExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => write!(f, "status {status}"),
            Self::Signal(signal) => write!(f, "signal {signal}"),
        }
    }
}

/// The children that are running.
#[derive(Debug, Default)]
pub(crate) struct Children {
    waited: RefCell<BTreeMap<u32, watch::Sender<Option<ChildExit>>>>,
}

/// A handle to a child process. Dropping the handle does not affect the process.
#[derive(Debug)]
pub(crate) struct Child {
    pub(crate) pid: u32,
    exit: watch::Receiver<Option<ChildExit>>,
}

impl Children {
    /// Starts the task that reaps child processes. Call this function on a `LocalSet`, once per
    /// process.
    pub(crate) fn start() -> io::Result<Rc<Self>> {
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
        let children = Rc::new(Self::default());
        let reaper = Rc::clone(&children);
        let mut ended = signal(SignalKind::child())?;
        tokio::task::spawn_local(async move {
            loop {
                reaper.reap();
                if ended.recv().await.is_none() {
                    break;
                }
            }
        });
        Ok(children)
    }

    /// Collects the exit status of all processes that have exited, including orphans.
    fn reap(&self) {
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            let Some(exit) = parse_exit(status) else { continue };
            let waiting =
                u32::try_from(pid.as_raw_nonzero().get()).ok().and_then(|pid| self.waited.borrow_mut().remove(&pid));
            if let Some(waiting) = waiting {
                waiting.send_replace(Some(exit));
            } else {
                tracing::debug!(pid = pid.as_raw_nonzero(), %exit, "reaped an orphaned process");
            }
        }
    }

    /// Starts a process. Returns one pipe with its stdout and stderr. `input` becomes its stdin and
    /// has to fit into a pipe.
    pub(crate) fn spawn(
        &self,
        command: &mut std::process::Command,
        input: &[u8],
    ) -> io::Result<(Child, pipe::Receiver)> {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        rustix::io::ioctl_fionbio(&reader, true)?;
        let reader = pipe::Receiver::from_owned_fd(reader)?;
        let (stdin, typed) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        rustix::io::write(&typed, input)?;
        drop(typed);
        command.stdin(stdin).stdout(writer.try_clone()?).stderr(writer);
        let child = self.start_process(command);
        // The command contains copies of the writer. Replace the copies, because the reader
        // otherwise never reaches the end of the pipe.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        Ok((child?, reader))
    }

    /// Starts a process with the standard streams of the command.
    pub(crate) fn start_process(&self, command: &mut std::process::Command) -> io::Result<Child> {
        // This function awaits nothing after the start, so the reaper cannot run before the child
        // is recorded.
        let pid = command.spawn()?.id();
        let (sender, exit) = watch::channel(None);
        self.waited.borrow_mut().insert(pid, sender);
        Ok(Child { pid, exit })
    }
}

/// Returns how a process ended. Returns `None` if the process was only stopped or continued.
fn parse_exit(status: WaitStatus) -> Option<ChildExit> {
    let signal = status.terminating_signal().map(ChildExit::Signal);
    signal.or_else(|| status.exit_status().map(ChildExit::Status))
}

impl Child {
    /// Waits for the exit. Callers may call this method any number of times.
    pub(crate) async fn wait_for_exit(&self) -> ChildExit {
        let mut exit = self.exit.clone();
        match exit.wait_for(Option::is_some).await {
            Ok(exit) => exit.unwrap_or(ChildExit::Status(0)),
            // The reaper has stopped, so this process is about to exit.
            Err(_) => std::future::pending().await,
        }
    }

    /// Kills the process if it is still running. The process's PID cannot be reused before the
    /// process is reaped.
    pub(crate) fn kill(&self) {
        self.signal(Signal::KILL);
    }

    /// Signals the process if it is still running.
    pub(crate) fn signal(&self, signal: Signal) {
        if self.exit.borrow().is_some() {
            return;
        }
        if let Some(pid) = to_kernel_pid(self.pid) {
            let _ = rustix::process::kill_process(pid, signal);
        }
    }
}

/// Converts a PID. Returns `None` if the PID is outside the kernel's range.
fn to_kernel_pid(pid: u32) -> Option<Pid> {
    Pid::from_raw(i32::try_from(pid).ok()?)
}

/// A pidfd, which refers to one process even after the PID is reused.
#[derive(Debug)]
pub(crate) struct PidFd(OwnedFd);

impl PidFd {
    /// Opens a pidfd. Returns `None` if no process has this PID. A process whose main thread has
    /// ended exists until its last thread ends.
    ///
    /// # Errors
    /// Returns the kernel's error for any other reason: no descriptor is free, or the kernel is
    /// older than Linux 5.3.
    pub(crate) fn open(pid: u32) -> io::Result<Option<Self>> {
        let Some(pid) = to_kernel_pid(pid) else { return Ok(None) };
        // Do not set `NONBLOCK`, which needs Linux 5.10. This process polls the pidfd and never
        // reads it.
        interpret_opened(rustix::process::pidfd_open(pid, PidfdFlags::empty())).map(|fd| fd.map(Self))
    }

    /// Returns whether the process has exited. Never waits.
    pub(crate) fn has_exited(&self) -> bool {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// Sends a signal to this process and no other process. Does nothing if the process has exited.
    pub(crate) fn signal(&self, signal: Signal) {
        let _ = rustix::process::pidfd_send_signal(&self.0, signal);
    }

    /// Waits for the exit. Returns false if the process runs longer than `within`.
    pub(crate) async fn wait_for_exit(&self, within: Duration) -> bool {
        let Ok(fd) = self.0.try_clone().and_then(async_fd) else { return self.has_exited() };
        timeout(within, fd.readable()).await.is_ok()
    }
}

/// Interprets the result of `pidfd_open` without flags. Returns `None` only for errors that prove
/// that no process has the PID.
fn interpret_opened(opened: Result<OwnedFd, Errno>) -> io::Result<Option<OwnedFd>> {
    match opened {
        Ok(fd) => Ok(Some(fd)),
        // No process has the PID, or the process has exited. The error depends on the kernel's
        // version and on whether the kernel still refers to the PID, or a thread has it. Without
        // flags, an argument cannot be invalid for another reason.
        Err(Errno::SRCH | Errno::INVAL | Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_absence_of_a_process_counts_as_no_process() {
        for absent in [Errno::SRCH, Errno::INVAL, Errno::NOENT] {
            assert!(interpret_opened(Err(absent)).unwrap().is_none(), "{absent}");
        }
        // A kernel without `pidfd_open`, a sandbox that refuses it, and a lack of descriptors prove
        // nothing about the process.
        for unknown in [Errno::NOSYS, Errno::PERM, Errno::MFILE, Errno::NFILE, Errno::NOMEM] {
            assert!(interpret_opened(Err(unknown)).is_err(), "{unknown}");
        }
    }

    #[test]
    fn a_pidfd_opens_only_for_an_existing_process() {
        assert!(PidFd::open(std::process::id()).unwrap().is_some_and(|own| !own.has_exited()));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pidfd = PidFd::open(child.id()).unwrap().expect("not reaped yet");
        child.wait().unwrap();
        assert!(pidfd.has_exited());
        assert!(PidFd::open(child.id()).unwrap().is_none_or(|reused| !reused.has_exited()));
        assert!(PidFd::open(u32::MAX).unwrap().is_none());
    }

    #[test]
    fn a_pid_that_is_no_process_is_not_an_error() {
        // This thread is not the main thread, so no process has its ID as PID.
        let thread = std::thread::spawn(|| PidFd::open(rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()));
        assert!(thread.join().unwrap().unwrap().is_none());
    }
}
