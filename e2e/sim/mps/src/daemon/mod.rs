//! Runs the control daemon: `nvidia-cuda-mps-control -d` or `-f`.
//!
//! Like the real daemon, this daemon serves one connection at a time and waits for each peer
//! without a deadline. A peer that connects and sends nothing blocks all other peers. The daemon
//! queues only clients for which no server is ready.

mod administrator;
mod servers;
mod state;

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

use crate::faults::InjectedFaults;
use crate::handshake::{self, HandshakeFailure, IntroducedPeer};
use crate::limits::ClientSettings;
use crate::log::Log;
use crate::seqpacket::{Connection, Listener};
use state::{DaemonState, PendingClient};

/// The environment variable that marks the background process of `-d`.
const DETACHED_DAEMON_ENV: &str = "SIM_MPS_DETACHED";
const READY_MESSAGE: &str = "ready";

/// The daemon's configuration.
#[derive(Debug, Clone)]
pub struct DaemonConfig {
    /// `CUDA_MPS_PIPE_DIRECTORY`.
    pub pipe_directory: PathBuf,
    /// `CUDA_MPS_LOG_DIRECTORY`, which only the background daemon uses.
    pub log_directory: PathBuf,
    /// `CUDA_VISIBLE_DEVICES`.
    pub visible: Option<String>,
    /// Whether the clients of all users share one server.
    pub multi_user: bool,
    /// The initial settings for the clients of new servers.
    pub defaults: ClientSettings,
}

/// The control daemon.
struct Daemon {
    config: DaemonConfig,
    log: Log,
    /// The write end of the FIFO for the servers' logs.
    server_log: File,
    faults: InjectedFaults,
    state: Mutex<DaemonState>,
    changed: Condvar,
    /// Becomes readable after a change of the state.
    wake: OwnedFd,
}

/// Runs the daemon in the foreground until the command `quit` (option `-f`).
///
/// # Errors
/// Returns an error if the daemon cannot be started.
pub fn run_in_foreground(config: DaemonConfig) -> anyhow::Result<ExitCode> {
    run(config, &LogSinks::Stdout, || {})
}

/// Starts the daemon in the background, and returns when the daemon is listening (option `-d`).
///
/// # Errors
/// Returns an error with the daemon's message if the daemon cannot be started.
pub fn start_in_background(config: DaemonConfig) -> anyhow::Result<ExitCode> {
    if std::env::var_os(DETACHED_DAEMON_ENV).is_some() {
        rustix::process::setsid()?;
        return run_detached(config);
    }
    let mut daemon = Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env(DETACHED_DAEMON_ENV, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let mut message = String::new();
    if let Some(stdout) = daemon.stdout.take() {
        BufReader::new(stdout).read_line(&mut message)?;
    }
    match message.trim() {
        READY_MESSAGE => Ok(ExitCode::SUCCESS),
        "" => Ok(to_exit_code(daemon.wait()?.code().unwrap_or(1))),
        error => anyhow::bail!("{error}"),
    }
}

/// Runs the background process of `-d`. Until the daemon is listening, the process that started it
/// receives the daemon's messages.
fn run_detached(config: DaemonConfig) -> anyhow::Result<ExitCode> {
    let send = |text: &str| {
        // Ignore errors, because the daemon continues even if the parent process has exited.
        let _ = writeln!(io::stdout(), "{text}");
    };
    let sinks = LogSinks::Files(config.log_directory.clone());
    let outcome = run(config, &sinks, || send(READY_MESSAGE));
    if let Err(error) = &outcome {
        send(&format!("{error:#}"));
    }
    outcome
}

/// Where the daemon writes its log and the servers' logs.
enum LogSinks {
    Stdout,
    Files(PathBuf),
}

impl LogSinks {
    fn open(&self, name: &str) -> anyhow::Result<Log> {
        match self {
            Self::Stdout => Ok(Log::stdout()),
            Self::Files(directory) => {
                fs::create_dir_all(directory).with_context(|| format!("failed to create {}", directory.display()))?;
                let path = directory.join(name);
                Log::append(&path).with_context(|| format!("failed to write {}", path.display()))
            }
        }
    }
}

fn run(config: DaemonConfig, sinks: &LogSinks, ready: impl FnOnce()) -> anyhow::Result<ExitCode> {
    anyhow::ensure!(!config.multi_user || rustix::process::geteuid().is_root(), "-multiuser-server requires root");
    let faults = InjectedFaults::new(config.visible.clone());
    if let Some(code) = faults.apply_faults("mps:start") {
        return Ok(to_exit_code(code));
    }
    let directory = &config.pipe_directory;
    make_directory(directory)?;
    // The file remains locked until the daemon exits for any reason. Therefore, a killed daemon
    // never blocks the next daemon.
    let _lock = lock_file(&directory.join("control_lock"))?;
    let log = sinks.open("control.log")?;
    let server_log = forward_server_log(&directory.join("log"), sinks.open("server.log")?)?;
    let pid_file = directory.join("nvidia-cuda-mps-control.pid");
    fs::write(&pid_file, std::process::id().to_string())
        .with_context(|| format!("failed to write {}", pid_file.display()))?;

    let control = directory.join("control");
    let bind = |path: &Path, mode| {
        Listener::bind(path, mode).with_context(|| format!("failed to listen on {}", path.display()))
    };
    let listeners = [(bind(&control, 0o666)?, false), (bind(&directory.join("control_privileged"), 0o755)?, true)];

    let state = Mutex::new(DaemonState::new(config.defaults.clone()));
    let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let daemon = Daemon { config, log, server_log, faults, state, changed: Condvar::new(), wake };
    daemon.log(&format!("Starting control daemon using socket {}", control.display()));
    let directory = daemon.config.pipe_directory.display();
    daemon.log(&format!("To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY={directory}"));
    daemon.log("CUDA MPS Control binary version: 13000");
    ready();

    Arc::new(daemon).serve(&listeners)
}

impl Daemon {
    /// Serves all connections. Returns only after an error: the command `quit` exits the process.
    fn serve(self: Arc<Self>, listeners: &[(Listener, bool)]) -> anyhow::Result<ExitCode> {
        let mut pending = VecDeque::new();
        loop {
            self.serve_pending_clients(&mut pending);
            let mut fds: Vec<PollFd<'_>> =
                listeners.iter().map(|(listener, _)| PollFd::new(listener, PollFlags::IN)).collect();
            fds.push(PollFd::new(&self.wake, PollFlags::IN));
            // Check queued clients regularly, because they may disconnect.
            let timeout = (!pending.is_empty()).then_some(Timespec { tv_sec: 0, tv_nsec: 50_000_000 });
            match rustix::event::poll(&mut fds, timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(io::Error::from(error)).context("failed to wait for connections"),
            }
            let ready: Vec<bool> = fds.iter().map(|fd| fd.revents().contains(PollFlags::IN)).collect();
            if ready.last() == Some(&true) {
                // Ignore the value: reading only resets `wake`.
                let _ = rustix::io::read(&self.wake, &mut [0; 8]);
            }
            for ((listener, privileged), _) in listeners.iter().zip(&ready).filter(|(_, ready)| **ready) {
                match listener.accept() {
                    Ok(connection) => {
                        self.log("Accepting connection...");
                        pending.extend(self.serve_connection(connection, *privileged));
                    }
                    Err(error) => {
                        // Retry later: the process probably has no free file descriptors. They
                        // become free when peers disconnect.
                        self.log(&format!("failed to accept a connection: {error}"));
                        thread::sleep(Duration::from_millis(10));
                    }
                }
            }
        }
    }

    /// Serves one connection. Returns the client if it must be queued.
    fn serve_connection(self: &Arc<Self>, connection: Connection, privileged: bool) -> Option<PendingClient> {
        let hello = if self.faults.apply_faults("mps:handshake").is_some() {
            handshake::HELLO_PACKET_OF_OTHER_DRIVER
        } else {
            handshake::HELLO_PACKET
        };
        match handshake::read_peer_kind(&connection, hello) {
            Ok(IntroducedPeer::Client(credentials)) => {
                if self.faults.apply_faults("mps:reply").is_some() {
                    let _ = connection.send(handshake::REPLY_PACKET_OF_OTHER_DRIVER);
                } else if self.faults.apply_faults("mps:client").is_none() {
                    let failed_before = self.lock().failed_starts;
                    return self.serve_client(PendingClient::new(connection, credentials, failed_before));
                }
            }
            Ok(IntroducedPeer::Administrator(_)) => {
                self.log("NEW UI");
                self.serve_administrator(&connection, privileged);
                self.log("UI closed");
            }
            Err(HandshakeFailure::Closed) => self.log("User did not send valid credentials"),
            Err(HandshakeFailure::Malformed(what)) => self.log(&format!("User did not send valid credentials: {what}")),
            Err(HandshakeFailure::Io(error)) => self.log(&format!("connection failed: {error}")),
        }
        None
    }

    /// Reports a change of the state to all waiting threads.
    fn notify(&self) {
        self.changed.notify_all();
        // Ignore errors, because the write fails only if the counter is full, and then `wake` is
        // already readable.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    fn log(&self, text: &str) {
        self.log.write_line("Control", std::process::id(), text);
    }

    fn lock(&self) -> MutexGuard<'_, DaemonState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits up to `timeout` for a change of the state.
    fn wait_for_change<'a>(
        &self,
        state: MutexGuard<'a, DaemonState>,
        timeout: Duration,
    ) -> MutexGuard<'a, DaemonState> {
        self.changed.wait_timeout(state, timeout).map_or_else(|poisoned| poisoned.into_inner().0, |woken| woken.0)
    }
}

/// Creates the pipe directory. The users of all clients can access the directory.
fn make_directory(directory: &Path) -> anyhow::Result<()> {
    if directory.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(directory)
        .and_then(|()| fs::set_permissions(directory, Permissions::from_mode(0o755)))
        .with_context(|| format!("failed to create {}", directory.display()))
}

fn lock_file(path: &Path) -> anyhow::Result<File> {
    let open = OpenOptions::new().create(true).truncate(false).write(true).mode(0o644).open(path);
    let file = open.with_context(|| format!("failed to open {}", path.display()))?;
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => anyhow::bail!("An instance of this daemon is already running"),
        Err(error) => Err(io::Error::from(error)).with_context(|| format!("failed to lock {}", path.display())),
    }
}

/// Creates the FIFO for the servers' logs, and copies its content to the log. Returns the write end
/// of the FIFO.
fn forward_server_log(path: &Path, log: Log) -> anyhow::Result<File> {
    let make = || -> io::Result<(File, File)> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0)?;
        // Open the FIFO for reading and writing. If it were opened only for reading, this thread
        // would wait for a writer, which it opens later. Reading also does not end between two
        // servers.
        let reader = OpenOptions::new().read(true).write(true).open(path)?;
        Ok((reader, OpenOptions::new().write(true).open(path)?))
    };
    let (reader, writer) = make().with_context(|| format!("failed to create {}", path.display()))?;
    thread::spawn(move || {
        let mut reader = BufReader::new(reader);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
            log.write_raw(&line);
            line.clear();
        }
    });
    Ok(writer)
}

fn to_exit_code(code: i32) -> ExitCode {
    ExitCode::from(u8::try_from(code & 0xff).unwrap_or(1))
}
