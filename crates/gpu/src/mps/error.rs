//! Defines the errors of the MPS host: one enum for each step that can fail.
//!
//! [`HostError`] ends the process. After a [`DaemonError`], the MPS host probes or replaces the
//! daemon. A [`DesiredError`] changes no daemon or door. [`TerminateError`] and [`NotReady`] answer
//! a request of the agent. A failed exchange with a daemon is a [`ControlError`].
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::control::ControlError;
use super::process::ChildExit;
use super::procfs::ProcessSearchError;
use super::protocol::{ServerState, UnexpectedAnswer};
use super::seqpacket::MAX_SOCKET_PATH_BYTES;
use super::wire::{DaemonState, InvalidDesired};
use crate::nvml;

/// Why a command of the MPS host failed.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// A directory or the socket of the MPS host could not be created.
    #[error("failed to create {path}")]
    Prepare {
        /// Path of the directory or socket.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The path of a door would be too long for a socket.
    #[error(
        "--run-dir {run} is too long: the door {door} would have {length} bytes, a socket path has at most {MAX_SOCKET_PATH_BYTES}; choose a shorter --run-dir"
    )]
    PathTooLong {
        /// Value of `--run-dir`.
        run: PathBuf,
        /// The longest path of a door.
        door: PathBuf,
        /// Length of the door's path in bytes.
        length: usize,
    },
    /// Another MPS host has locked this directory.
    #[error("another MPS host has locked {0}. Stop the other MPS host before you start this one")]
    Taken(PathBuf),
    /// The MPS host did not answer a probe.
    #[error("the MPS host does not answer on {path}")]
    NoAnswer {
        /// Path of the MPS host's socket.
        path: PathBuf,
        /// Why the exchange failed.
        source: io::Error,
    },
    /// The MPS host that started this process has already exited.
    #[error("the MPS host (process {0}) that started this process has exited")]
    ParentExited(u32),
    /// The kernel cannot report the exit of a client.
    #[error("failed to open a pidfd of this process. Cleave needs Linux 5.4 or newer")]
    PidFd(#[source] io::Error),
    /// A system call for signals, inotify or standard output failed.
    #[error("a system call of the MPS host failed")]
    System(#[from] io::Error),
    /// An NVML call failed.
    #[error("failed to set the compute mode")]
    ComputeMode(#[from] nvml::NvmlError),
}

/// Why a daemon that should run was stopped or has exited.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DaemonError {
    #[error("failed to start {program}: {source}")]
    Spawn { program: String, source: io::Error },
    #[error("failed to prepare {path}: {source}")]
    Prepare { path: PathBuf, source: io::Error },
    #[error("failed to search for processes of an earlier MPS daemon: {0}")]
    Search(#[from] ProcessSearchError),
    #[error("the MPS control daemon exited with {exit}{}", prefix_with_colon(.last_line))]
    Exited { exit: ChildExit, last_line: String },
    #[error("the MPS server stayed in FAULT: the MPS daemon was replaced and exited with {0}")]
    StuckInFault(ChildExit),
    #[error("{0}")]
    Control(#[from] ControlError),
    #[error(
        "the driver's MPS handshake is unknown, so doors cannot enforce limits, and the SharingPolicy does not accept advisory limits"
    )]
    UnknownHandshake,
    #[error("the MPS daemon did not accept {setting}: the daemon reports {actual:?}")]
    NotAccepted { setting: String, actual: String },
    #[error("the MPS server was not ready within {} s: {last}", .after.as_secs())]
    ServerNotReady { after: Duration, last: LastServerState },
    #[error("MPS server {server} exited while it was {state:?}, before it was ready")]
    ServerExited { server: u32, state: ServerState },
    #[error("MPS server {server} did not shut down within {} s", .after.as_secs())]
    ServerNotStopped { server: u32, after: Duration },
    #[error("failed to set the compute mode: {0}")]
    ComputeMode(#[from] ComputeModeError),
    #[error("the MPS host is stopping")]
    HostStopping,
}

impl DaemonError {
    /// Returns whether the error concerns one connection to the daemon, so that the next
    /// connection may succeed.
    pub(crate) fn concerns_one_connection(&self) -> bool {
        use ControlError::{Closed, Io, UnexpectedAnswer, UnknownProtocol};
        matches!(self, Self::Control(Closed | Io(_) | UnexpectedAnswer(_) | UnknownProtocol))
    }

    /// Returns whether this process or the node has no free descriptor. Such an error shows nothing
    /// about the daemon.
    pub(crate) fn is_descriptor_exhaustion(&self) -> bool {
        let Self::Control(ControlError::Io(error)) = self else { return false };
        let exhausted = [rustix::io::Errno::MFILE, rustix::io::Errno::NFILE];
        exhausted.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
    }
}

impl From<UnexpectedAnswer> for DaemonError {
    fn from(unexpected: UnexpectedAnswer) -> Self {
        Self::Control(unexpected.into())
    }
}

fn prefix_with_colon(line: &str) -> String {
    if line.is_empty() { String::new() } else { format!(": {line}") }
}

/// The last state that the daemon reported for a starting server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LastServerState {
    NoServer,
    Server(u32, ServerState),
}

impl std::fmt::Display for LastServerState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NoServer => f.write_str("no server was started"),
            Self::Server(server, state) => write!(f, "server {server} is {state:?}"),
        }
    }
}

/// Why a compute mode was not set.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ComputeModeError {
    #[error("failed to start the child process: {0}")]
    Spawn(io::Error),
    #[error("failed to read the output of the child process: {0}")]
    Output(io::Error),
    #[error("{output} ({exit})")]
    Failed { output: String, exit: ChildExit },
    #[error("the child process printed no compute mode: {0:?}")]
    UnknownOutput(String),
    #[error("NVML did not answer within {} s", .after.as_secs())]
    Timeout { after: Duration },
    #[error("failed to {action} {path}: {source}")]
    Record { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{path} contains no compute mode: {content:?}")]
    UnknownRecord { path: PathBuf, content: String },
}

/// Why a client's contexts were not terminated.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TerminateError {
    #[error("no MPS daemon is running for {0}")]
    NoDaemon(String),
    #[error("client {0} is stopped (SIGSTOP or a debugger): MPS would hang until the client continues")]
    ClientStopped(u32),
    #[error("failed to read whether the client is stopped: {0}")]
    State(#[from] ProcessSearchError),
    #[error("the MPS daemon is busy")]
    Busy,
    #[error("no MPS server is running")]
    NoServer,
    #[error("{0}")]
    Control(#[from] ControlError),
}

impl From<UnexpectedAnswer> for TerminateError {
    fn from(unexpected: UnexpectedAnswer) -> Self {
        Self::Control(unexpected.into())
    }
}

/// Why the desired file was not applied.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DesiredError {
    #[error("failed to read {path}: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{0}")]
    Invalid(#[from] InvalidDesired),
}

/// Why an allocation's clients have to wait.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotReady {
    #[error("failed to open the door of allocation {allocation}: {error}")]
    DoorFailed { allocation: String, error: String },
    #[error("allocation {0} is not in the desired file yet")]
    Unknown(String),
    #[error("allocation {allocation} is unknown, because the MPS host failed to apply the desired file: {error}")]
    DesiredFailed { allocation: String, error: String },
    #[error("the MPS daemon of {device} is {state:?}")]
    Daemon { device: String, state: DaemonState },
    #[error("{device}: {problem}")]
    Process { device: String, problem: String },
}
