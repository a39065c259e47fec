//! Child processes and orphans: every process that ends below this one is reaped, and who waits for it is told.
//!
//! The MPS server is the daemon's child, so it becomes this process's when the daemon dies before it: as a subreaper (or pid 1) one has to
//! reap whatever comes. That would take the exit status away from tokio's own children, so none are used: all are started here.
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Stdio;
use std::rc::Rc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, WaitStatus};
use tokio::net::unix::pipe;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{oneshot, watch};
use tokio::time::timeout;

use super::seqpacket::watched;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    Status(i32),
    Signal(i32),
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => write!(f, "status {status}"),
            Self::Signal(signal) => write!(f, "signal {signal}"),
        }
    }
}

/// Every child that was started here and has not ended.
#[derive(Debug, Default)]
pub(crate) struct Children {
    waited: RefCell<BTreeMap<u32, watch::Sender<Option<Exit>>>>,
}

/// A child. Dropping it leaves the process alone.
#[derive(Debug)]
pub(crate) struct Child {
    pub(crate) pid: u32,
    exit: watch::Receiver<Option<Exit>>,
}

impl Children {
    /// Starts to reap. Must run on a `LocalSet`, once in a process.
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

    fn reap(&self) {
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            let Some(exit) = exit(status) else { continue };
            let waiting =
                u32::try_from(pid.as_raw_nonzero().get()).ok().and_then(|pid| self.waited.borrow_mut().remove(&pid));
            if let Some(waiting) = waiting {
                waiting.send_replace(Some(exit));
            } else {
                tracing::debug!(pid = pid.as_raw_nonzero(), %exit, "reaped an orphan");
            }
        }
    }

    /// Starts a process with stdout and stderr in one pipe, and this on its stdin: at most as much as a pipe takes at once.
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
        let child = command.spawn();
        // The command keeps copies of the pipe's other end: without this the pipe would never end.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        // Nothing is awaited between the start and this: the reaper cannot come in between.
        let pid = child?.id();
        let (sender, exit) = watch::channel(None);
        self.waited.borrow_mut().insert(pid, sender);
        Ok((Child { pid, exit }, reader))
    }
}

fn exit(status: WaitStatus) -> Option<Exit> {
    let signal = status.terminating_signal().map(Exit::Signal);
    signal.or_else(|| status.exit_status().map(Exit::Status))
}

impl Child {
    /// Waits for its end; as often as one likes.
    pub(crate) async fn exited(&self) -> Exit {
        let mut exit = self.exit.clone();
        match exit.wait_for(Option::is_some).await {
            Ok(exit) => exit.unwrap_or(Exit::Status(0)),
            // The reaper is gone, so is this process soon.
            Err(_) => std::future::pending().await,
        }
    }

    /// Kills it, unless it has ended: until it is reaped, its pid is nobody else's.
    pub(crate) fn kill(&self) {
        if self.exit.borrow().is_some() {
            return;
        }
        if let Some(pid) = raw(self.pid) {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
    }
}

fn raw(pid: u32) -> Option<Pid> {
    Pid::from_raw(i32::try_from(pid).ok()?)
}

/// A hold on a process: says when it has ended, whoever has its pid by then.
#[derive(Debug)]
pub(crate) struct Hold(OwnedFd);

impl Hold {
    /// `None`: there is no such process, or none that can be held.
    pub(crate) fn of(pid: u32) -> Option<Self> {
        rustix::process::pidfd_open(raw(pid)?, PidfdFlags::NONBLOCK).ok().map(Self)
    }

    /// Whether it has ended. Never waits.
    pub(crate) fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// Sends a signal to it, and to nobody else. To one that has ended it means nothing.
    pub(crate) fn signal(&self, signal: Signal) {
        let _ = rustix::process::pidfd_send_signal(&self.0, signal);
    }

    /// Waits for its end; false when it has not come in time.
    async fn ended(&self, within: Duration) -> bool {
        let Ok(fd) = self.0.try_clone().and_then(watched) else { return self.has_ended() };
        timeout(within, fd.readable()).await.is_ok()
    }
}

/// How long looking through the node's processes may take: a tenth of a second for ten thousand.
const SEARCH: Duration = Duration::from_secs(5);
/// Enough for that.
const SEARCH_STACK: usize = 128 * 1024;

/// Daemons and servers of MPS whose pipe directory is `pipe`: ours, or left by an earlier MPS host.
pub(crate) async fn of_pipe(pipe: &Path) -> Vec<(u32, Hold)> {
    let of = pipe.to_owned();
    aside(move || search(&of)).await.unwrap_or_default()
}

/// Daemons and servers of MPS that may serve a GPU, whoever started them; none where that cannot be said.
pub(crate) async fn of_gpu(uuid: &str) -> Option<Vec<u32>> {
    let uuid = uuid.to_owned();
    aside(move || pids().filter(|&pid| is_mps(pid) && serves(pid, &uuid)).collect()).await
}

/// Looks through the node's processes on a thread of its own: reading the environment of a process that hangs in the driver waits for as long
/// as it does, and other devices must not. A thread that does is left behind.
async fn aside<T: Send + 'static>(search: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (found, answer) = oneshot::channel();
    let search = move || {
        // Whoever asked may have lost patience.
        let _ = found.send(search());
    };
    let started = std::thread::Builder::new().stack_size(SEARCH_STACK).spawn(search);
    match (started, timeout(SEARCH, answer).await) {
        (Ok(_), Ok(Ok(found))) => return Some(found),
        (Err(error), _) => tracing::error!(%error, "no thread to look for MPS daemons"),
        _ => tracing::error!("looking for MPS daemons takes too long"),
    }
    None
}

fn pids() -> impl Iterator<Item = u32> {
    let processes = std::fs::read_dir("/proc").into_iter().flatten();
    processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

fn read(pid: u32, what: &str) -> Vec<u8> {
    std::fs::read(format!("/proc/{pid}/{what}")).unwrap_or_default()
}

fn is_mps(pid: u32) -> bool {
    read(pid, "comm").starts_with(b"nvidia-cuda-mps")
}

fn serves(pid: u32, uuid: &str) -> bool {
    // One that is being started has no environment for a moment, and one that has ended has none any more.
    for _ in 0..20 {
        let environment = read(pid, "environ");
        if !environment.is_empty() {
            return may_serve(&environment, uuid);
        }
        if state(pid).is_none_or(|state| matches!(state, 'Z' | 'X')) {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}

/// Whether a daemon with this environment may serve a GPU: it does not unless it names others, and no indices.
fn may_serve(environment: &[u8], uuid: &str) -> bool {
    let name = b"CUDA_VISIBLE_DEVICES=".as_slice();
    let list = environment.split(|&byte| byte == 0).find_map(|variable| variable.strip_prefix(name));
    let is_other = |entry: &[u8]| {
        (entry.starts_with(b"GPU-") && !uuid.as_bytes().starts_with(entry)) || entry.starts_with(b"MIG-")
    };
    list.is_none_or(|list| !list.split(|&byte| byte == b',').all(is_other))
}

fn search(pipe: &Path) -> Vec<(u32, Hold)> {
    pids()
        .filter(|&pid| is_of_pipe(pid, pipe))
        // Held first, then looked at once more: the pid may have become somebody else's in between.
        .filter_map(|pid| Some((pid, Hold::of(pid)?)))
        .filter(|&(pid, _)| is_of_pipe(pid, pipe))
        .collect()
}

fn is_of_pipe(pid: u32, pipe: &Path) -> bool {
    if !is_mps(pid) {
        return false;
    }
    let wanted = [b"CUDA_MPS_PIPE_DIRECTORY=", pipe.as_os_str().as_encoded_bytes()].concat();
    read(pid, "environ").split(|&byte| byte == 0).any(|variable| variable == wanted)
}

/// Kills what is left of MPS in a pipe directory. Returns how many there were.
pub(crate) async fn clear(pipe: &Path) -> usize {
    let left = of_pipe(pipe).await;
    for (pid, hold) in &left {
        tracing::warn!(pid, pipe = %pipe.display(), "killing what is left of an MPS daemon");
        hold.signal(Signal::KILL);
    }
    for (pid, hold) in &left {
        if !hold.ended(Duration::from_secs(5)).await {
            tracing::error!(pid, "does not end after SIGKILL");
        }
    }
    left.len()
}

/// Whether a process is stopped, by a signal or a debugger: it answers nobody until it is continued.
pub(crate) fn is_stopped(pid: u32) -> bool {
    matches!(state(pid), Some('T' | 't'))
}

/// A process's state, as `/proc/PID/stat` has it; none where it is gone.
fn state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the name in parentheses, which may hold anything.
    stat.rsplit_once(") ")?.1.chars().next()
}

/// The user whose process it is.
pub(crate) fn owner(pid: u32) -> Option<u32> {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(format!("/proc/{pid}")).ok().map(|metadata| metadata.uid())
}

#[cfg(test)]
mod tests {
    use super::{may_serve, serves, state};

    #[test]
    fn a_daemon_serves_others_only_where_it_names_nothing_else() {
        let serves = |list: &str| may_serve(format!("A=1\0CUDA_VISIBLE_DEVICES={list}\0B=2").as_bytes(), "GPU-12-34");
        for list in ["GPU-12-34", "GPU-12", "0", "", "GPU-56,GPU-12-34", "GPU-56,1"] {
            assert!(serves(list), "{list}");
        }
        for list in ["GPU-56", "GPU-56,GPU-78", "MIG-12-34"] {
            assert!(!serves(list), "{list}");
        }
        assert!(may_serve(b"A=1\0", "GPU-12-34"), "it sees every GPU");
    }
    #[test]
    fn one_that_has_ended_serves_nobody() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        while state(child.id()) != Some('Z') {
            std::thread::yield_now();
        }
        assert!(!serves(child.id(), "GPU-1"), "it has no environment any more");
        child.wait().unwrap();
    }
}
