//! Starts servers, and passes clients on to them.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, MutexGuard};
use std::thread;

use super::Daemon;
use super::state::{ClientContext, DaemonState, PassedClient, PendingClient, ServerChoice, ServerRecord};
use crate::handshake;
use crate::seqpacket::Connection;
use crate::wire::{self, FromServer, ServerStatus, ToServer};

/// Number of failed server starts that a waiting client survives. After one more failure, the
/// daemon refuses the client.
const MAX_FAILED_SERVER_STARTS: u32 = 5;

impl Daemon {
    /// Tries to serve the queued clients, in the order of their arrival.
    pub(super) fn serve_pending_clients(self: &Arc<Self>, pending: &mut VecDeque<PendingClient>) {
        for _ in 0..pending.len() {
            let waits = pending.pop_front().and_then(|client| self.serve_client(client));
            pending.extend(waits);
        }
    }

    /// Passes a client on to a server, and waits for the last packet of the client's handshake.
    /// Returns the client if no server is ready, so that the caller queues it.
    pub(super) fn serve_client(self: &Arc<Self>, mut client: PendingClient) -> Option<PendingClient> {
        let mut state = self.lock();
        let PendingClient { pid, uid, .. } = client;
        if client.connection.is_closed() {
            return None;
        }
        if state.failed_starts - client.failed_before > MAX_FAILED_SERVER_STARTS {
            self.log(&format!("CLIENT {pid} from user {uid} is rejected: no server starts"));
            return None;
        }
        match state.choose_server(uid, self.config.multi_user) {
            ServerChoice::Enter(server) => {
                self.log_client(&mut client, "Server already exists");
                pass_to_server(state, server, &client.connection);
                return None;
            }
            ServerChoice::Start => {
                let owner = if self.config.multi_user { 0 } else { uid };
                if let Err(error) = self.start_server(&mut state, owner) {
                    self.log(&format!("failed to start a server: {error}"));
                    state.failed_starts += 1;
                }
            }
            ServerChoice::Replace(server) => self.end_server(&mut state, server),
            ServerChoice::Wait => {}
        }
        drop(state);
        self.log_client(&mut client, "Server is not ready, push client to pending list");
        Some(client)
    }

    fn log_client(&self, client: &mut PendingClient, text: &str) {
        if !std::mem::replace(&mut client.logged, true) {
            self.log(&format!("NEW CLIENT {} from user {}: {text}", client.pid, client.uid));
        }
    }

    /// Starts a user's server. The server's status is INITIALIZING until the server reports another
    /// status.
    pub(super) fn start_server(self: &Arc<Self>, state: &mut DaemonState, uid: u32) -> std::io::Result<u32> {
        let (link, theirs) = Connection::pair()?;
        let mut command = Command::new(server_program());
        command
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::from(self.server_log.try_clone()?))
            .stderr(Stdio::null());
        if uid != rustix::process::geteuid().as_raw() {
            command.uid(uid);
        }
        let child = command.spawn()?;
        // Drop `command`, which owns the other end of the link: the link must close when the server
        // exits.
        drop(command);
        let pid = child.id();
        self.log.write_line("Control", pid, &format!("Starting new server {pid} for user {uid}"));
        let settings = state.defaults.clone();
        let start = ToServer::Start {
            visible: self.config.visible.clone(),
            pipe_directory: self.config.pipe_directory.display().to_string(),
            uid,
            settings: settings.clone(),
        };
        // Ignore errors, because the thread below detects a server that has exited.
        let _ = wire::send(&link, &start);
        let link = Arc::new(link);
        let server = ServerRecord {
            uid,
            status: ServerStatus::Initializing,
            settings,
            link: Arc::clone(&link),
            clients: BTreeMap::new(),
            exiting: false,
        };
        state.servers.insert(pid, server);
        self.notify();
        let daemon = Arc::clone(self);
        thread::spawn(move || daemon.watch_server(child, &link));
        Ok(pid)
    }

    /// Requests that a server exits, and marks the server so that it receives no more clients.
    pub(super) fn end_server(&self, state: &mut DaemonState, pid: u32) {
        if let Some(server) = state.servers.get_mut(&pid) {
            server.exiting = true;
            let _ = wire::send(&server.link, &ToServer::Shutdown);
            self.notify();
        }
    }

    /// Processes a server's messages until the server exits.
    fn watch_server(&self, mut child: Child, link: &Connection) {
        let pid = child.id();
        let mut served = false;
        while let Ok(Some(message)) = wire::recv(link) {
            served |= matches!(message, FromServer::Status(ServerStatus::Active));
            self.process_message(pid, message);
        }
        // The link is closed, so the server has exited or will exit soon.
        let status = child.wait().ok();
        // Print 0 even for a killed server, as the real daemon does.
        let status = status.and_then(|status| status.code()).unwrap_or(0);
        self.log(&format!("Server {pid} exited with status {status}"));
        let mut state = self.lock();
        state.servers.remove(&pid);
        if !served {
            state.failed_starts += 1;
        }
        self.notify();
    }

    fn process_message(&self, pid: u32, message: FromServer) {
        let mut state = self.lock();
        let Some(server) = state.servers.get_mut(&pid) else { return };
        match message {
            FromServer::Status(status) => {
                if server.status == ServerStatus::Initializing {
                    self.log(&format!("NEW SERVER {pid}: Ready"));
                }
                server.status = status;
            }
            FromServer::Process { connection, pid } => {
                if let Some(client) = server.clients.get_mut(&connection) {
                    client.pid = Some(pid);
                }
            }
            FromServer::Context { connection, pid, device, namespace, command } => {
                if let Some(client) = server.clients.get_mut(&connection) {
                    client.pid = Some(pid);
                    client.context = Some(ClientContext { device, namespace, command });
                }
            }
            FromServer::Left { connection } => {
                server.clients.remove(&connection);
            }
            FromServer::Answer { request, result } => {
                state.answers.insert(request, result);
            }
        }
        self.notify();
    }
}

/// Sends the two ends of a socket pair to a client and a server. The server's current settings
/// apply to the client.
fn pass_to_server(mut state: MutexGuard<'_, DaemonState>, server: u32, client: &Connection) {
    let connection = state.next_number();
    let Some(server) = state.servers.get_mut(&server) else { return };
    let Ok((theirs, servers)) = Connection::pair() else { return };
    let message = ToServer::Client { connection, settings: server.settings.clone() };
    let Ok(message) = serde_json::to_vec(&message) else { return };
    // Enable credentials on both ends, as the real daemon does. The kernel then attests all
    // messages between client and server, even messages that are sent before the other end reads.
    let attested = servers.enable_credentials().and_then(|()| theirs.enable_credentials());
    if attested.is_err() || client.send_fd(handshake::DESCRIPTOR_PACKET, theirs.as_fd()).is_err() {
        return;
    }
    drop(theirs);
    server.clients.insert(connection, PassedClient::default());
    // Ignore errors, because the daemon and the client detect it if the server has exited.
    let _ = server.link.send_fd(&message, servers.as_fd());
    drop(servers);
    drop(state);
    // Wait for the last packet of the handshake, as the real daemon does.
    let _ = client.recv(64);
}

/// Returns the path of the server program in this program's directory. If the program is not there,
/// returns its name, to be found in `PATH`.
fn server_program() -> PathBuf {
    const SERVER_PROGRAM_NAME: &str = "nvidia-cuda-mps-server";
    let beside =
        std::env::current_exe().ok().map(|own| own.with_file_name(SERVER_PROGRAM_NAME)).filter(|path| path.exists());
    beside.unwrap_or_else(|| PathBuf::from(SERVER_PROGRAM_NAME))
}
