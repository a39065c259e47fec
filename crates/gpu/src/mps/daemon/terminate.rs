//! Terminates a client's contexts.
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::Device;
use crate::mps::control::ANSWER_DEADLINE;
use crate::mps::error::TerminateError;
use crate::mps::procfs;
use crate::mps::protocol::{self, Command, TerminateResult};

/// Time limit for acquiring the control lock, and then for the daemon's answer.
const TERMINATE_DEADLINE: Duration = ANSWER_DEADLINE.saturating_mul(2);

impl Device {
    /// Terminates a client's contexts through MPS.
    ///
    /// # Errors
    /// Returns [`TerminateError`] if the client is or may be stopped, the control lock is busy, the
    /// device has no server or the command fails.
    pub(crate) async fn terminate(&self, client: u32) -> Result<TerminateResult, TerminateError> {
        if procfs::is_process_stopped(client)? {
            // A stopped client would block the daemon, and therefore all other clients, until the
            // stopped client continues.
            return Err(TerminateError::ClientStopped(client));
        }
        let control = timeout(TERMINATE_DEADLINE, self.control.lock()).await.map_err(|_| TerminateError::Busy)?;
        let server = self.phase.borrow().server.ok_or(TerminateError::NoServer)?;
        self.terminating_since.set(Some(Instant::now()));
        // Mark the client before the command: MPS may log the client's exit before MPS answers the
        // command.
        self.clients.borrow_mut().mark_terminated(client);
        let output = self.send_command_within(&Command::Terminate { server, client }, TERMINATE_DEADLINE).await;
        drop(control);
        self.request_probe();
        let output = output?;
        self.terminating_since.set(None);
        let terminated = protocol::parse_terminate_result(&output);
        if terminated.is_err() {
            self.clients.borrow_mut().unmark_terminated(client);
        }
        Ok(terminated?)
    }
}
