//! The doctor's own MPS daemon on an idle GPU.
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command as Process};
use tokio::time::{Instant, sleep, timeout};

use super::setup::DoctorSetup;
use crate::mps::control::{self, ANSWER_DEADLINE, ControlError, QUIT_COMMAND, QUIT_DEADLINE};
use crate::mps::daemon::{DAEMON_START_DEADLINE, tool};
use crate::mps::log::{LogEvent, parse_log_line};
use crate::mps::procfs;
use crate::mps::text::shorten;

/// Interval at which the doctor checks its daemon.
const DAEMON_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The events that the daemon has logged.
#[derive(Debug, Default)]
pub(super) struct DaemonLog {
    pub(super) version: Option<u32>,
    /// PIDs of servers that became ready.
    pub(super) ready: BTreeSet<u32>,
    /// PIDs of clients that connected.
    pub(super) connected: BTreeSet<u32>,
    /// PIDs of clients that exited.
    pub(super) disconnected: BTreeSet<u32>,
    last_line: String,
}

/// Why the daemon did not answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum OwnDaemonError {
    #[error("failed to start the daemon: {0}")]
    Start(io::Error),
    #[error("the daemon exited ({status}): {last_line}")]
    Exited { status: ExitStatus, last_line: String },
    #[error("{0}")]
    Control(#[from] ControlError),
}

/// The daemon's first answer.
pub(super) struct FirstAnswer {
    /// Milliseconds from the daemon's start to the answer.
    pub(super) after_ms: u128,
    /// Whether the daemon sent the known greeting.
    pub(super) is_known: bool,
}

/// A running daemon with its own directory.
pub(super) struct OwnDaemon {
    pub(super) directory: PathBuf,
    child: Child,
    pub(super) log: Arc<Mutex<DaemonLog>>,
}

impl OwnDaemon {
    /// Starts a daemon with the options that the MPS host uses for servers that all users share.
    pub(super) fn start(setup: &DoctorSetup) -> Result<Self, OwnDaemonError> {
        Self::try_start(setup).map_err(OwnDaemonError::Start)
    }

    fn try_start(setup: &DoctorSetup) -> io::Result<Self> {
        let directory = std::env::temp_dir().join(format!("cleave-doctor-{}", std::process::id()));
        // Programs of other users can enter the directory but not list it.
        fs::DirBuilder::new().mode(0o711).create(&directory)?;
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o711))?;
        match Self::start_in_directory(&directory, setup) {
            Ok((child, log)) => Ok(Self { directory, child, log }),
            Err(error) => {
                let _ = fs::remove_dir_all(&directory);
                Err(error)
            }
        }
    }

    fn start_in_directory(directory: &Path, setup: &DoctorSetup) -> io::Result<(Child, Arc<Mutex<DaemonLog>>)> {
        for name in ["pipe", "link", "empty"] {
            fs::DirBuilder::new().mode(0o711).create(directory.join(name))?;
            fs::set_permissions(directory.join(name), fs::Permissions::from_mode(0o711))?;
        }
        let tool = tool::control_tool_command(
            &setup.control,
            setup.library_path.as_deref(),
            &directory.join("pipe"),
            &setup.uuid,
        );
        let mut command = Process::from(tool);
        command.args(["-f", "-multiuser-server"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn()?;
        let log = Arc::default();
        if let Some(output) = child.stdout.take() {
            tokio::spawn(read_log(output, Arc::clone(&log)));
        }
        if let Some(output) = child.stderr.take() {
            tokio::spawn(read_log(output, Arc::clone(&log)));
        }
        Ok((child, log))
    }

    /// Returns the daemon's pipe directory.
    pub(super) fn pipe_directory(&self) -> PathBuf {
        self.directory.join("pipe")
    }

    /// Waits until the daemon sends a greeting, known or unknown.
    ///
    /// # Errors
    /// Returns an error if the daemon exits, or sends no greeting within [`DAEMON_START_DEADLINE`].
    pub(super) async fn wait_for_first_answer(&mut self) -> Result<FirstAnswer, OwnDaemonError> {
        let begun = Instant::now();
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                // Wait for the log: the exited daemon's last lines may still be in the pipe.
                sleep(DAEMON_POLL_INTERVAL * 5).await;
                let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
                return Err(OwnDaemonError::Exited { status, last_line: log.last_line.clone() });
            }
            match control::has_known_greeting(&self.pipe_directory()).await {
                Ok(is_known) => return Ok(FirstAnswer { after_ms: begun.elapsed().as_millis(), is_known }),
                Err(ControlError::Io(_) | ControlError::Closed) if begun.elapsed() < DAEMON_START_DEADLINE => {
                    sleep(DAEMON_POLL_INTERVAL).await;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Stops the daemon and removes its processes and its directory.
    pub(super) async fn stop(mut self) {
        if control::send_command(&self.pipe_directory(), &QUIT_COMMAND, QUIT_DEADLINE).await.is_err()
            || timeout(ANSWER_DEADLINE, self.child.wait()).await.is_err()
        {
            let _ = self.child.kill().await;
        }
        if let Err(error) = procfs::kill_processes_of_pipe(&self.pipe_directory(), None).await {
            tracing::warn!(%error, "failed to search for processes of the doctor's MPS daemon");
        }
        if let Err(error) = fs::remove_dir_all(&self.directory) {
            tracing::warn!(directory = %self.directory.display(), %error, "failed to remove the doctor's directory");
        }
    }
}

async fn read_log(output: impl AsyncRead + Unpin, log: Arc<Mutex<DaemonLog>>) {
    let mut lines = BufReader::new(output).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let line = parse_log_line(&line);
        tracing::debug!(source = line.source, pid = line.pid, "{}", line.text);
        let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
        match line.event {
            LogEvent::Version(version) => log.version = Some(version),
            LogEvent::ServerReady(server) => drop(log.ready.insert(server)),
            LogEvent::ClientConnected(client) => drop(log.connected.insert(client)),
            LogEvent::ClientDisconnected(client) => drop(log.disconnected.insert(client)),
            LogEvent::Chatter => continue,
            _ => {}
        }
        log.last_line = shorten(line.text);
    }
}
