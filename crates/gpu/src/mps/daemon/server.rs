//! Starts the server of a daemon, and forgets a server that has exited.
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{Device, SERVER_START_DEADLINE};
use crate::mps::error::{DaemonError, LastSeen};
use crate::mps::protocol::{self, Command, ServerState};

/// Poll interval of a starting server.
const START_POLL: Duration = Duration::from_millis(10);

impl Device {
    /// Starts a server for a user and waits until it is ready.
    pub(super) async fn start_server(&self, uid: u32) -> Result<u32, DaemonError> {
        self.send_command(&Command::StartServer { uid }).await?;
        let deadline = Instant::now() + SERVER_START_DEADLINE;
        let mut last = LastSeen::NoServer;
        while Instant::now() < deadline {
            let servers = protocol::pids(&self.send_command(&Command::ServerList).await?)?;
            match (servers.first(), last) {
                (Some(&server), _) => {
                    match protocol::server_state(&self.send_command(&Command::ServerStatus(server)).await?)? {
                        ServerState::Active => return Ok(server),
                        state => last = LastSeen::Server(server, state),
                    }
                }
                (None, LastSeen::Server(server, state)) => return Err(DaemonError::ServerExited { server, state }),
                (None, LastSeen::NoServer) => {}
            }
            sleep(START_POLL).await;
        }
        Err(DaemonError::ServerNotReady { after: SERVER_START_DEADLINE, last })
    }

    /// Clears the server's pid and its clients.
    pub(super) fn server_gone(&self) {
        let had_listed = self.clients.borrow_mut().clear();
        self.end_fault("server is gone");
        self.faults.borrow_mut().fresh_server();
        self.set_server(None);
        if had_listed {
            self.context.status_changed();
        }
    }
}
