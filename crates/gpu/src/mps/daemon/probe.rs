//! Probes a daemon and its server, and reacts to their state.
use std::collections::BTreeSet;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::Device;
use super::handshake::MIN_UNEXPECTED_ENDS;
use crate::mps::control::ControlError;
use crate::mps::error::DaemonError;
use crate::mps::process::Child;
use crate::mps::protocol::{self, Command, ServerState};
use crate::mps::wire::{DaemonSettings, DaemonState, Enforcement};

/// Time that a daemon may take to answer `terminate_client` before the MPS host treats it as hung.
/// A stopped client delays the answer.
const MAX_TERMINATE_COMMAND_TIME: Duration = Duration::from_secs(30);

/// Why the MPS host stops or replaces a running daemon.
pub(super) enum DaemonEndReason {
    NotDesired,
    NewSettings,
    Failed(DaemonError),
}

impl Device {
    /// Probes the daemon and performs the recovery steps that are due. Returns the reason if the
    /// MPS host has to stop or replace this daemon, for example because it has no clients and its
    /// settings have changed.
    pub(super) async fn probe_daemon(
        &self,
        settings: &DaemonSettings,
        desired: &watch::Receiver<Option<DaemonSettings>>,
        child: &Child,
    ) -> Result<Option<DaemonEndReason>, DaemonError> {
        let mut control = self.control.lock().await;
        // An administrator may have changed the server's limits since the last probe. Set the
        // limits again.
        control.applied = None;
        let examined = match self.read_server_and_clients(settings).await {
            Err(DaemonError::Control(ControlError::Timeout { .. })) if self.is_terminate_command_running() => {
                self.set_message("waiting for a client that is being terminated");
                self.perform_due_step(child).await;
                return Ok(None);
            }
            // Retry once: on a busy node, an answer may be late.
            Err(DaemonError::Control(ControlError::Timeout { .. })) if !self.unanswered.get() => {
                self.read_server_and_clients(settings).await
            }
            other => other,
        };
        self.unanswered.set(false);
        if self.handshake.borrow_mut().expire_report(Instant::now()) {
            tracing::info!(device = self.name, "no client waits, but daemon's replies remain unproven");
            self.context.notify_status_change();
        }
        if self.handshake.borrow().is_protocol_unknown() && self.phase.borrow().enforcement == Enforcement::Hard {
            self.set_enforcement(false, settings)?;
        }
        let recovered = match examined {
            Ok(()) => {
                self.perform_due_step(child).await;
                self.replace_unclean_server().await
            }
            failed => failed,
        };
        if let Err(error) = recovered {
            return self.tolerate_unexpected_end(error).map(|()| None);
        }
        if self.unexpected_probes.replace(0) > 0 {
            tracing::info!(device = self.name, "the MPS daemon answers probes again");
        }
        let desired = desired.borrow().clone();
        let end = self.compare_settings(settings, desired.as_ref());
        if end.is_some() {
            // Set the state before the lock is released, so that no further client is admitted.
            self.set_state(DaemonState::Restarting, None);
        }
        Ok(end)
    }

    /// Accepts the failure of a probe if it concerns one connection only. An unexpected packet must
    /// not stop the daemon, because its clients would lose their contexts. If several probes in a
    /// row fail, the error concerns the daemon.
    fn tolerate_unexpected_end(&self, error: DaemonError) -> Result<(), DaemonError> {
        if error.is_descriptor_exhaustion() {
            tracing::warn!(device = self.name, %error, "failed to probe the MPS daemon: no free descriptors");
            return Ok(());
        }
        let failures = self.unexpected_probes.get().saturating_add(1);
        if !error.concerns_one_connection() || failures >= MIN_UNEXPECTED_ENDS {
            self.unexpected_probes.set(0);
            return Err(error);
        }
        self.unexpected_probes.set(failures);
        tracing::warn!(device = self.name, %error, failures, "a probe of the MPS daemon ended unexpectedly");
        Ok(())
    }

    /// Returns the reason to stop or replace this daemon now: new settings, or a daemon that is no
    /// longer desired. Returns `None` if there is no reason, or while clients still run.
    fn compare_settings(&self, settings: &DaemonSettings, desired: Option<&DaemonSettings>) -> Option<DaemonEndReason> {
        let clients = self.clients.borrow().count_clients();
        let count = || if clients == 1 { "1 client".to_owned() } else { format!("{clients} clients") };
        match desired {
            Some(desired) if self.has_settings(settings, desired) => {
                if self.phase.borrow().state == DaemonState::Stopping {
                    // The daemon was waiting for its clients to exit, and is desired again.
                    self.set_state(DaemonState::Active, Some(""));
                }
                None
            }
            None if clients == 0 => Some(DaemonEndReason::NotDesired),
            None => {
                // The doors are closed, so clients can no longer connect. Running clients may
                // finish.
                let message = format!("the daemon is no longer desired; waiting for {} to exit", count());
                self.set_state(DaemonState::Stopping, Some(&message));
                None
            }
            Some(_) if clients == 0 => Some(DaemonEndReason::NewSettings),
            Some(_) => {
                self.set_message(&format!("waiting for {} to exit before the new settings apply", count()));
                None
            }
        }
    }

    /// Reads the server, its state and its clients.
    async fn read_server_and_clients(&self, settings: &DaemonSettings) -> Result<(), DaemonError> {
        self.clients.borrow_mut().forget_exited(Instant::now());
        let servers = protocol::parse_pids(&self.send_command(&Command::ServerList).await?)?;
        let known = self.phase.borrow().server;
        let Some(server) = self.find_or_start_server(servers.first().copied(), settings).await? else { return Ok(()) };
        if known.is_some_and(|known| known != server) {
            self.clear_server();
        }
        let state = protocol::parse_server_state(&self.send_command(&Command::ServerStatus(server)).await?)?;
        let clients = self.send_command(&Command::Clients(server)).await?;
        let clients =
            if protocol::is_server_not_found(&clients) { Vec::new() } else { protocol::parse_pids(&clients)? };
        if self.clients.borrow_mut().set_listed_pids(clients.into_iter().collect::<BTreeSet<u32>>()) {
            self.context.notify_status_change();
        }
        if self.phase.borrow().server != Some(server) {
            self.set_server(Some(server));
            self.context.notify_status_change();
        }
        self.apply_server_state(state);
        Ok(())
    }

    /// Returns the server that the daemon lists. If the daemon lists none and all users share one
    /// server, starts the server, unless the daemon is stopping. Returns `None` if there is no
    /// server afterwards.
    async fn find_or_start_server(
        &self,
        listed: Option<u32>,
        settings: &DaemonSettings,
    ) -> Result<Option<u32>, DaemonError> {
        if listed.is_some() {
            return Ok(listed);
        }
        let (was, state) = {
            let phase = self.phase.borrow();
            (phase.server, phase.state)
        };
        self.clear_server();
        if state == DaemonState::Stopping {
            return Ok(None);
        }
        if !settings.multi_user {
            self.set_state(DaemonState::Active, None);
            return Ok(None);
        }
        tracing::warn!(device = self.name, server = was, "MPS server exited; restarting it");
        self.set_state(DaemonState::Restarting, Some("the MPS server exited"));
        self.start_server(0).await.map(Some)
    }

    fn apply_server_state(&self, state: ServerState) {
        if state == ServerState::Fault {
            self.record_confirmed_fault();
        }
        match state {
            // The daemon is stopping, so its state does not depend on the server's state.
            _ if self.phase.borrow().state == DaemonState::Stopping => {
                if state == ServerState::Active {
                    self.record_active_server();
                }
            }
            ServerState::Active if self.record_active_server() => self.set_state(DaemonState::Active, None),
            // Keep the state: the log has just reported a fault that the server does not report
            // yet.
            ServerState::Active => {}
            ServerState::Fault => self.set_state(DaemonState::Fault, None),
            ServerState::Initializing => self.set_state(DaemonState::Restarting, None),
            // The server exited after it was listed. The next probe starts another server.
            ServerState::Gone => self.request_probe(),
        }
    }

    fn is_terminate_command_running(&self) -> bool {
        self.terminating_since.get().is_some_and(|since| since.elapsed() < MAX_TERMINATE_COMMAND_TIME)
    }
}
