//! The operations on a device that doors use to admit a client.
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{ClientLimits, ControlLock, Device};
use crate::mps::control::ControlError;
use crate::mps::error::DaemonError;
use crate::mps::process::PidFd;
use crate::mps::procfs;
use crate::mps::protocol::{self, Command, UnexpectedAnswer};
use crate::mps::wire::DaemonState;

/// Interval of checks for exited clients.
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(5);

impl Device {
    /// Sets the limits of the clients that connect next, and reads them back.
    ///
    /// # Errors
    /// Returns [`ControlError`] if a command fails or the daemon reports other limits.
    pub(crate) async fn set_limits(
        &self,
        control: &mut ControlLock,
        server: u32,
        limits: ClientLimits,
    ) -> Result<(), ControlError> {
        if control.applied == Some((server, limits)) {
            return Ok(());
        }
        // The limits are unknown until this call has read them back. The caller may cancel the call
        // earlier.
        control.applied = None;
        let ClientLimits { threads: percent, memory_mib } = limits;
        let actual = self.send_command(&Command::SetThreads { server, percent }).await?;
        if !protocol::is_answer_with_percentage(&actual, percent) {
            return Err(UnexpectedAnswer::new(&actual).into());
        }
        let output = self.send_command(&Command::SetMemory { server, mib: memory_mib }).await?;
        if !output.trim().is_empty() {
            return Err(UnexpectedAnswer::new(&output).into());
        }
        let actual = self.send_command(&Command::GetMemory { server }).await?;
        if !protocol::is_answer_with_memory_limit(&actual, memory_mib) {
            return Err(UnexpectedAnswer::new(&actual).into());
        }
        control.applied = Some((server, limits));
        Ok(())
    }

    /// Returns the server for a user's clients, or `None` if the clients have to wait.
    ///
    /// # Errors
    /// Returns [`DaemonError`] if a command fails or a new server does not become ready.
    pub(crate) async fn server_for_user(&self, uid: u32) -> Result<Option<u32>, DaemonError> {
        let phase = *self.phase.borrow();
        if phase.multi_user {
            return Ok(phase.server);
        }
        let servers = protocol::parse_pids(&self.send_command(&Command::ServerList).await?)?;
        let Some(&server) = servers.first() else { return self.start_server(uid).await.map(Some) };
        match procfs::owner_uid(server) {
            Ok(Some(owner)) if owner == uid => Ok(Some(server)),
            // The server may belong to this user. The client waits.
            Err(error) => {
                tracing::warn!(device = self.name, server, %error, "failed to read the user of an MPS server");
                Ok(None)
            }
            // The server belongs to another user. Shut it down once it has no clients.
            Ok(_) => {
                if protocol::parse_pids(&self.send_command(&Command::Clients(server)).await?)?.is_empty() {
                    self.send_command(&Command::ShutdownServer { server, force: false }).await?;
                }
                Ok(None)
            }
        }
    }

    /// Registers a client that a door admitted. The next regular probe reads MPS's own list, so no
    /// extra probe is needed.
    pub(crate) fn register_client(&self, client: u32, allocation: &str, pidfd: Option<PidFd>) {
        self.clients.borrow_mut().admit(client, allocation, pidfd);
        self.handshake.borrow_mut().record_connected_client();
        self.context.notify_status_change();
    }

    /// Returns whether one more client would exceed the allocation's maximum.
    pub(crate) fn is_allocation_full(&self, allocation: &str, max_clients: u32, client: u32) -> bool {
        let mut clients = self.clients.borrow_mut();
        clients.forget_exited(Instant::now());
        clients.count_other_clients(allocation, client) >= usize::try_from(max_clients).unwrap_or(usize::MAX)
    }

    /// Waits until MPS has logged the exit of each exited client, or the time limit for these log
    /// lines has passed. The server may break a client that connects during this wait.
    pub(crate) async fn wait_until_exits_logged(&self) {
        loop {
            self.clients.borrow_mut().forget_exited(Instant::now());
            if !self.clients.borrow().has_unlogged_exit() {
                return;
            }
            sleep(EXIT_POLL_INTERVAL).await;
        }
    }

    /// Records an expected reply to a client's handshake. Afterwards, the status no longer reports
    /// held clients.
    pub(crate) fn record_expected_reply(&self) {
        if self.handshake.borrow_mut().record_expected_reply() {
            tracing::info!(device = self.name, "MPS daemon sends expected replies again");
            self.context.notify_status_change();
        }
    }

    /// Records an unexpected reply to a client's handshake. The reply ends one connection to the
    /// daemon, and the client waits. After several such replies in a row, the status reports that
    /// clients are held. If a driver was not measured and no handshake has succeeded, several such
    /// replies mean that the protocol is unknown. The next probe then closes the doors or makes
    /// limits advisory.
    pub(crate) fn record_unexpected_reply(&self) {
        tracing::error!(device = self.name, "unexpected reply to client's handshake; client waits");
        if self.handshake.borrow_mut().record_unexpected_reply(Instant::now()) {
            tracing::error!(device = self.name, "MPS daemon sends only unexpected replies; clients are held");
            self.context.notify_status_change();
        }
        if self.handshake.borrow().is_protocol_unknown() {
            self.request_probe();
        }
    }

    /// Records an error in a door's communication with the daemon and requests a probe.
    pub(crate) fn record_exchange_error(&self, error: &DaemonError) {
        if matches!(error, DaemonError::Control(ControlError::Timeout { .. })) {
            self.unanswered.set(true);
        }
        self.request_probe();
    }

    /// Records that the server refuses clients because it is in FAULT, and requests a probe.
    pub(crate) fn record_server_in_fault(&self) {
        if self.phase.borrow().is_open() {
            self.record_confirmed_fault();
            self.set_state(DaemonState::Fault, None);
        }
        self.request_probe();
    }
}
