//! Starts the server of a daemon, and clears the state of a server that has exited.
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{Device, SERVER_START_DEADLINE};
use crate::mps::error::{DaemonError, LastServerState};
use crate::mps::protocol::{self, Command, ServerState};

/// Poll interval of a starting server.
const SERVER_START_POLL_INTERVAL: Duration = Duration::from_millis(10);

impl Device {
    /// Starts a server for a user and waits until it is ready.
    pub(super) async fn start_server(&self, uid: u32) -> Result<u32, DaemonError> {
        self.send_command(&Command::StartServer { uid }).await?;
        let deadline = Instant::now() + SERVER_START_DEADLINE;
        let mut last = LastServerState::NoServer;
        while Instant::now() < deadline {
            let servers = protocol::parse_pids(&self.send_command(&Command::ServerList).await?)?;
            match (servers.first(), last) {
                (Some(&server), _) => {
                    match protocol::parse_server_state(&self.send_command(&Command::ServerStatus(server)).await?)? {
                        ServerState::Active => return Ok(server),
                        state => last = LastServerState::Server(server, state),
                    }
                }
                (None, LastServerState::Server(server, state)) => {
                    return Err(DaemonError::ServerExited { server, state });
                }
                (None, LastServerState::NoServer) => {}
            }
            sleep(SERVER_START_POLL_INTERVAL).await;
        }
        Err(DaemonError::ServerNotReady { after: SERVER_START_DEADLINE, last })
    }

    /// Clears the state of a server that has exited.
    pub(super) fn clear_server(&self) {
        self.forget_server("the MPS server has exited");
        self.faults.borrow_mut().mark_server_clean();
    }

    /// Clears the server's PID and its clients, and ends a fault. If the server still runs, the
    /// next probe finds it again.
    pub(super) fn forget_server(&self, why: &'static str) {
        let had_listed = self.clients.borrow_mut().remove_all();
        self.end_fault(why);
        self.set_server(None);
        if had_listed {
            self.context.notify_status_change();
        }
    }
}
