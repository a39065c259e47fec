//! Recovers a device: performs the steps against a FAULT, and replaces a server that may break a
//! client.
use std::time::Duration;

use rustix::process::Signal;
use tokio::time::{Instant, sleep};

use super::Device;
use super::escalation::EscalationStep;
use crate::mps::error::DaemonError;
use crate::mps::process::Child;
use crate::mps::protocol::{self, Command};
use crate::mps::wire::Client;

/// Time limit for a server without clients to shut down.
const SERVER_SHUTDOWN_DEADLINE: Duration = Duration::from_secs(5);
/// Poll interval while a server shuts down.
const SERVER_SHUTDOWN_POLL_INTERVAL: Duration = Duration::from_millis(10);

impl Device {
    /// Performs the next step against a fault if the step is due. The caller holds the
    /// [`super::ControlLock`]. Returns within the step's deadline.
    pub(super) async fn perform_due_step(&self, daemon: &Child) {
        let clients = self.clients.borrow().count_clients();
        let Some((step, at)) = self.faults.borrow_mut().next_step(clients, Instant::now()) else { return };
        tracing::warn!(device = self.name, ?step, ?at, clients, "MPS server stays in FAULT");
        let message = match step {
            EscalationStep::Wait => return,
            EscalationStep::SignalTerm => {
                self.signal_clients(Signal::TERM);
                format!("in FAULT until all clients have exited ({clients} remaining): SIGTERM sent")
            }
            EscalationStep::SignalKill => {
                self.signal_clients(Signal::KILL);
                format!("in FAULT until all clients have exited ({clients} remaining): SIGKILL sent")
            }
            EscalationStep::ShutDownServer => "in FAULT for too long: shutting the server down".to_owned(),
            EscalationStep::QuitDaemon => "in FAULT for too long: stopping the daemon".to_owned(),
            EscalationStep::KillDaemon => {
                daemon.kill();
                "in FAULT for too long: the daemon was killed".to_owned()
            }
        };
        self.set_message(&message);
        let server = self.phase.borrow().server;
        let command = match (step, server) {
            (EscalationStep::ShutDownServer, Some(server)) => Command::ShutdownServer { server, force: true },
            (EscalationStep::QuitDaemon, _) => Command::Quit { seconds: 0 },
            _ => return,
        };
        if let Err(error) = self.send_command_within(&command, step.time_until_next_step()).await {
            tracing::warn!(device = self.name, %error, ?step, "recovery step failed; trying the next step");
        }
    }

    /// Signals the running clients that a door admitted and whose identity is proven.
    fn signal_clients(&self, signal: Signal) {
        let signalled: Vec<Client> = {
            let clients = self.clients.borrow();
            let send = |(client, pidfd): (Client, &crate::mps::process::PidFd)| {
                pidfd.signal(signal);
                client
            };
            clients.signalable_clients().map(send).collect()
        };
        tracing::warn!(device = self.name, ?signal, clients = ?signalled, "signalling clients of MPS server in FAULT");
        self.faults.borrow_mut().record_signalled(signalled);
        self.context.notify_status_change();
    }

    /// Returns whether the server may break a client, and has no clients now.
    pub(crate) fn must_replace_server(&self) -> bool {
        self.faults.borrow().is_server_unclean()
            && self.phase.borrow().is_open()
            && self.clients.borrow().count_clients() == 0
    }

    /// Replaces a server that may break a client, if it has no clients. The caller holds the
    /// [`super::ControlLock`], so doors wait. Shares remain healthy, because a replacement takes no
    /// longer than the start of a program.
    pub(super) async fn replace_unclean_server(&self) -> Result<(), DaemonError> {
        let phase = *self.phase.borrow();
        let Some(server) = phase.server.filter(|_| self.must_replace_server()) else { return Ok(()) };
        tracing::info!(
            device = self.name,
            server,
            "replacing the MPS server after a client exited with an open context"
        );
        // The server's exit is expected from here on. The server remains unclean until it has
        // exited, so the next probe retries if a command fails.
        self.forget_server("the MPS server is being replaced");
        self.send_command_within(&Command::ShutdownServer { server, force: false }, SERVER_SHUTDOWN_DEADLINE).await?;
        let deadline = Instant::now() + SERVER_SHUTDOWN_DEADLINE;
        while protocol::parse_pids(&self.send_command(&Command::ServerList).await?)?.contains(&server) {
            if Instant::now() > deadline {
                return Err(DaemonError::ServerNotStopped { server, after: SERVER_SHUTDOWN_DEADLINE });
            }
            sleep(SERVER_SHUTDOWN_POLL_INTERVAL).await;
        }
        self.faults.borrow_mut().mark_server_clean();
        if phase.multi_user {
            let server = self.start_server(0).await?;
            self.set_server(Some(server));
            self.context.notify_status_change();
        }
        Ok(())
    }
}
