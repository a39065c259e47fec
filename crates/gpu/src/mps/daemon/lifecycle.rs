//! Starts, watches, restarts and stops the daemon of a device.
use std::cell::RefCell;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use tokio::net::unix::pipe;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use super::backoff::Backoff;
use super::handshake::MIN_UNEXPECTED_ENDS;
use super::probe::DaemonEndReason;
use super::{ControlLock, DAEMON_START_DEADLINE, Device};
use crate::mps::compute_mode;
use crate::mps::control::{self, ANSWER_DEADLINE, ControlError, QUIT_COMMAND, QUIT_DEADLINE};
use crate::mps::error::DaemonError;
use crate::mps::process::Child;
use crate::mps::procfs::{self, ProcessSearchError};
use crate::mps::protocol::{self, Command};
use crate::mps::wire::{DaemonSettings, DaemonState, Enforcement};

/// Interval of probes while the daemon serves.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of probes while the daemon does not serve. The interval is short because clients are
/// waiting.
const FAST_PROBE_INTERVAL: Duration = Duration::from_millis(25);
/// Number of fast probes without a fault after which the interval increases tenfold.
const FAST_PROBE_COUNT: u32 = 400;
/// Interval of attempts to reach a starting daemon.
const DAEMON_START_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Time limit for reading the last log lines of an exited daemon.
const LAST_LOG_LINES_DEADLINE: Duration = Duration::from_millis(200);
/// Interval of searches for leftover processes while the search fails.
const SEARCH_RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Minimum time between two log entries about searches that fail.
const SEARCH_ERROR_LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Time limit for a killed daemon to exit. The driver may delay the exit.
const KILLED_DAEMON_EXIT_DEADLINE: Duration = Duration::from_secs(10);

/// Stops the MPS processes of a device that an earlier process of the MPS host started.
///
/// # Errors
/// Returns [`ProcessSearchError`] if it is unknown which processes there are.
pub(crate) async fn stop_earlier_daemon(device: &str, pipe: &Path) -> Result<(), ProcessSearchError> {
    if !procfs::find_processes_of_pipe(pipe, None).await?.is_empty() {
        tracing::warn!(device, "stopping the daemon of an earlier MPS host");
        if let Err(error) = control::send_command(pipe, &QUIT_COMMAND, QUIT_DEADLINE).await {
            tracing::warn!(device, %error, "failed to stop the daemon of an earlier MPS host");
        }
        procfs::kill_processes_of_pipe(pipe, None).await?;
    }
    Ok(())
}

impl Device {
    /// Keeps the daemon running while it is desired. Returns when the MPS host stops.
    pub(crate) async fn supervise(self: Rc<Self>) {
        let mut desired = self.desired.subscribe();
        while !self.context.stopping.is_cancelled() {
            tokio::select! {
                () = self.context.stopping.cancelled() => return,
                // Cannot fail: this device owns the sender.
                _ = desired.wait_for(Option::is_some) => {}
            }
            self.present.set(true);
            self.keep_daemon_running(&mut desired).await;
            self.set_state(DaemonState::Stopping, None);
            if let Err(error) = compute_mode::restore_compute_mode(&self.context, &self.name).await {
                tracing::error!(device = self.name, %error, "failed to restore compute mode");
            }
            // No daemon runs that could send replies, so the status must no longer report held
            // clients.
            self.handshake.borrow_mut().end_report();
            self.present.set(false);
            self.context.notify_status_change();
        }
    }

    async fn keep_daemon_running(self: &Rc<Self>, desired: &mut watch::Receiver<Option<DaemonSettings>>) {
        let mut backoff = Backoff::default();
        loop {
            let Some(settings) = desired.borrow_and_update().clone() else { return };
            *self.running.borrow_mut() = Some(settings.clone());
            let start = Instant::now();
            match self.run_daemon_once(&settings, desired).await {
                DaemonEndReason::NotDesired => return,
                DaemonEndReason::NewSettings => {
                    self.set_state(DaemonState::Restarting, Some("restarting with new settings"));
                }
                DaemonEndReason::Failed(error) => {
                    let delay = backoff.record_failure(start.elapsed());
                    tracing::error!(device = self.name, %error, ?delay, "MPS daemon failed");
                    self.set_state(backoff.state(), Some(&error.to_string()));
                    self.report.borrow_mut().restarts += 1;
                    self.context.notify_status_change();
                    tokio::select! {
                        () = self.context.stopping.cancelled() => return,
                        () = sleep(delay) => {}
                        // New settings may fix the failure, and the removal of a daemon need not
                        // wait for the back-off.
                        _ = desired.changed() => {}
                    }
                }
            }
        }
    }

    /// Runs the daemon once, from its start until all its processes have exited.
    async fn run_daemon_once(
        self: &Rc<Self>,
        settings: &DaemonSettings,
        desired: &mut watch::Receiver<Option<DaemonSettings>>,
    ) -> DaemonEndReason {
        let mut child = None;
        let end = match self.start_daemon(settings, &mut child).await {
            Ok(()) => self.watch_daemon(settings, desired, child.as_ref()).await,
            Err(DaemonError::HostStopping) => DaemonEndReason::NotDesired,
            Err(error) => DaemonEndReason::Failed(error),
        };
        let state =
            if matches!(end, DaemonEndReason::NotDesired) { DaemonState::Stopping } else { DaemonState::Restarting };
        self.set_state(state, None);
        // Acquire the lock, so that an admission in progress either finishes first or finds that
        // the daemon has exited.
        let mut control = self.control.lock().await;
        *control = ControlLock::default();
        if let Some(child) = &child {
            if !matches!(end, DaemonEndReason::Failed(_)) {
                self.quit_daemon(child).await;
            }
            child.kill();
            if timeout(KILLED_DAEMON_EXIT_DEADLINE, child.wait_for_exit()).await.is_err() {
                tracing::error!(device = self.name, pid = child.pid, "MPS daemon still runs after SIGKILL");
            }
        }
        self.end_leftover_processes().await;
        self.clients.borrow_mut().remove_all();
        self.end_fault("the MPS daemon has exited");
        self.faults.borrow_mut().mark_server_clean();
        self.report.borrow_mut().pid = None;
        self.set_server(None);
        self.context.notify_status_change();
        end
    }

    /// Kills the processes of the daemon that are left. Repeats a search that fails: the agent must
    /// not conclude that the device is free.
    async fn end_leftover_processes(&self) {
        let server = self.phase.borrow().server;
        let mut logged: Option<Instant> = None;
        while let Err(error) = procfs::kill_processes_of_pipe(&self.pipe, server).await {
            if logged.is_none_or(|logged| logged.elapsed() >= SEARCH_ERROR_LOG_INTERVAL) {
                tracing::error!(device = self.name, %error, "failed to search for processes of the MPS daemon; retrying");
                logged = Some(Instant::now());
            }
            tokio::select! {
                () = self.context.stopping.cancelled() => return,
                () = sleep(SEARCH_RETRY_INTERVAL) => {}
            }
        }
    }

    /// Sends the daemon the command to quit. Logs a warning if the daemon does not exit in time.
    /// The caller then kills the daemon.
    async fn quit_daemon(&self, child: &Child) {
        if let Err(error) = self.send_command_within(&QUIT_COMMAND, QUIT_DEADLINE).await {
            tracing::warn!(device = self.name, %error, "failed to send the MPS daemon the command to quit");
        }
        if let Ok(exit) = timeout(ANSWER_DEADLINE, child.wait_for_exit()).await {
            tracing::info!(device = self.name, %exit, "MPS daemon quit");
        } else {
            tracing::warn!(device = self.name, "killing the MPS daemon, which did not quit");
        }
    }

    /// Starts the daemon and confirms its default limits. If all users share one server, also
    /// starts the server. Doors admit no client before these steps are done.
    async fn start_daemon(
        self: &Rc<Self>,
        settings: &DaemonSettings,
        started: &mut Option<Child>,
    ) -> Result<(), DaemonError> {
        self.forget_earlier_daemon();
        let is_first = self.report.borrow().restarts == 0;
        let state = if is_first { DaemonState::Starting } else { self.phase.borrow().state };
        self.phase.send_modify(|phase| phase.multi_user = settings.multi_user);
        self.set_state(state, None);
        self.prepare_daemon(settings).await?;
        if settings.exclusive {
            compute_mode::set_exclusive_compute_mode(&self.context, &self.name).await?;
        } else {
            compute_mode::restore_compute_mode(&self.context, &self.name).await?;
        }
        let (child, output) = self.spawn_daemon(settings)?;
        let last_line = Rc::new(RefCell::new(String::new()));
        let log = tokio::task::spawn_local(Rc::clone(self).read_log(output, Rc::clone(&last_line)));
        self.report.borrow_mut().pid = Some(child.pid);
        self.context.notify_status_change();
        let child = started.insert(child);
        let exited = async {
            let exit = child.wait_for_exit().await;
            // Wait for the log: the daemon's last lines may still be in the pipe.
            let _ = timeout(LAST_LOG_LINES_DEADLINE, log).await;
            exit
        };
        tokio::select! {
            exit = exited => Err(DaemonError::Exited { exit, last_line: last_line.borrow().clone() }),
            () = self.context.stopping.cancelled() => Err(DaemonError::HostStopping),
            result = self.set_up_started_daemon(settings) => result,
        }
    }

    /// Clears the recorded state of an earlier daemon of this device.
    fn forget_earlier_daemon(&self) {
        self.handshake.borrow_mut().start_daemon(self.context.read_driver_evidence());
        self.unexpected_probes.set(0);
        self.unanswered.set(false);
        self.terminating_since.set(None);
    }

    /// Prepares the pipe directory and stops the MPS processes that an earlier MPS host started
    /// for this device.
    async fn prepare_daemon(&self, settings: &DaemonSettings) -> Result<(), DaemonError> {
        let failed = |source| DaemonError::Prepare { path: self.pipe.clone(), source };
        std::fs::create_dir_all(&self.pipe).map_err(failed)?;
        // Servers of users other than root must be able to enter the pipe directory.
        let mode = if settings.multi_user { 0o700 } else { 0o711 };
        std::fs::set_permissions(&self.pipe, std::fs::Permissions::from_mode(mode)).map_err(failed)?;
        if !settings.multi_user {
            std::fs::set_permissions(self.context.paths.mps_host_dir(), std::fs::Permissions::from_mode(0o711))
                .map_err(failed)?;
        }
        stop_earlier_daemon(&self.name, &self.pipe).await?;
        for name in ["control", "control_privileged"] {
            match std::fs::remove_file(self.pipe.join(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
                _ => {}
            }
        }
        Ok(())
    }

    fn spawn_daemon(&self, settings: &DaemonSettings) -> Result<(Child, pipe::Receiver), DaemonError> {
        let mut command = self.control_tool();
        command.arg("-f");
        if settings.multi_user {
            command.arg("-multiuser-server");
        }
        let program = &self.context.options.mps_control;
        let failed = |source| DaemonError::Spawn { program: program.display().to_string(), source };
        self.context.children.spawn(&mut command, &[]).map_err(failed)
    }

    async fn set_up_started_daemon(&self, settings: &DaemonSettings) -> Result<(), DaemonError> {
        let mut control = self.control.lock().await;
        self.wait_for_first_answer(settings).await?;
        self.set_default_limits(settings).await?;
        if settings.multi_user {
            let server = self.start_server(0).await?;
            self.set_server(Some(server));
        }
        control.applied = None;
        self.set_state(DaemonState::Active, None);
        tracing::info!(device = self.name, server = self.phase.borrow().server, "MPS daemon is serving");
        Ok(())
    }

    /// Waits for the daemon's first answer. The daemon's greeting shows whether doors can enforce
    /// limits.
    async fn wait_for_first_answer(&self, settings: &DaemonSettings) -> Result<(), DaemonError> {
        let deadline = Instant::now() + DAEMON_START_DEADLINE;
        let mut unknown_greetings = 0;
        let known_greeting = loop {
            match control::has_known_greeting(&self.pipe).await {
                Ok(true) => break true,
                Ok(false) => {
                    unknown_greetings += 1;
                    if unknown_greetings >= MIN_UNEXPECTED_ENDS {
                        break false;
                    }
                }
                Err(ControlError::Io(_) | ControlError::Closed) if Instant::now() < deadline => {}
                Err(error) => return Err(error.into()),
            }
            sleep(DAEMON_START_POLL_INTERVAL).await;
        };
        self.set_enforcement(known_greeting, settings)
    }

    /// Sets whether doors enforce limits.
    ///
    /// # Errors
    /// Returns [`DaemonError::UnknownHandshake`] if doors cannot enforce limits and the settings do
    /// not accept advisory limits.
    pub(super) fn set_enforcement(&self, known: bool, settings: &DaemonSettings) -> Result<(), DaemonError> {
        let enforcement = if known { Enforcement::Hard } else { Enforcement::Advisory };
        self.phase.send_modify(|phase| phase.enforcement = enforcement);
        self.context.notify_status_change();
        match enforcement {
            Enforcement::Hard => Ok(()),
            Enforcement::Advisory if settings.accept_advisory => {
                tracing::warn!(device = self.name, "unknown MPS handshake; limits are advisory");
                // Doors relay all clients from now on.
                self.handshake.borrow_mut().end_report();
                Ok(())
            }
            Enforcement::Advisory => Err(DaemonError::UnknownHandshake),
        }
    }

    /// Sets the default limits and reads them back.
    async fn set_default_limits(&self, settings: &DaemonSettings) -> Result<(), DaemonError> {
        if let Some(percent) = settings.default_threads {
            self.send_command(&Command::SetDefaultThreads(percent)).await?;
            let actual = self.send_command(&Command::GetDefaultThreads).await?;
            if !protocol::is_answer_with_percentage(&actual, percent) {
                let setting = format!("the default active thread percentage {percent}");
                return Err(DaemonError::NotAccepted { setting, actual });
            }
        }
        if let Some(mib) = settings.default_memory_mib {
            self.send_command(&Command::SetDefaultMemory(mib)).await?;
            let actual = self.send_command(&Command::GetDefaultMemory).await?;
            if !protocol::is_answer_with_memory_limit(&actual, Some(mib)) {
                let setting = format!("the default memory limit of {mib} MiB");
                return Err(DaemonError::NotAccepted { setting, actual });
            }
        }
        Ok(())
    }

    /// Probes the daemon until it exits, hangs, or has to stop.
    async fn watch_daemon(
        &self,
        settings: &DaemonSettings,
        desired: &mut watch::Receiver<Option<DaemonSettings>>,
        child: Option<&Child>,
    ) -> DaemonEndReason {
        let Some(child) = child else { return DaemonEndReason::NewSettings };
        let mut fast_probes = 0_u32;
        loop {
            fast_probes = if self.phase.borrow().is_open() { 0 } else { fast_probes.saturating_add(1) };
            let pause = match fast_probes {
                0 => PROBE_INTERVAL,
                // The interval never increases in a fault: the escalation limits the fault's
                // duration.
                _ if self.faults.borrow().has_current_fault() => FAST_PROBE_INTERVAL,
                1..=FAST_PROBE_COUNT => FAST_PROBE_INTERVAL,
                _ => FAST_PROBE_INTERVAL * 10,
            };
            tokio::select! {
                biased;
                exit = child.wait_for_exit() => return DaemonEndReason::Failed(if self.faults.borrow().expects_daemon_exit() {
                    DaemonError::StuckInFault(exit)
                } else {
                    DaemonError::Exited { exit, last_line: String::new() }
                }),
                () = self.context.stopping.cancelled() => return DaemonEndReason::NotDesired,
                // Cancel-safe: cancelling a probe only discards the daemon's answers.
                result = async {
                    tokio::select! {
                        () = sleep(pause) => {}
                        () = self.probe_soon.notified() => {}
                        _ = desired.changed() => {}
                    }
                    self.probe_daemon(settings, desired, child).await
                } => match result {
                    Ok(None) => {}
                    Ok(Some(end)) => return end,
                    Err(error) => return DaemonEndReason::Failed(error),
                },
            }
        }
    }
}
