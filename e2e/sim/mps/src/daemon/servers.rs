//! Letting clients in, and the servers that take them.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, MutexGuard};
use std::thread;
use std::time::Duration;

use super::Daemon;
use super::state::{Choice, Client, ClientContext, Server, State};
use crate::handshake;
use crate::seqpacket::{Connection, Credentials};
use crate::wire::{self, FromServer, Status, ToServer};

/// How often a server that does not come up is tried again before its client is turned away.
const START_RETRIES: u32 = 5;
/// How often a waiting client is looked at: it may have gone.
const WAITING: Duration = Duration::from_millis(50);

impl Daemon {
    /// Passes a client on to a server, however long that takes.
    pub(super) fn client(self: &Arc<Self>, connection: &Connection, credentials: Credentials) {
        let pid = u32::try_from(credentials.pid).unwrap_or(0);
        match self.admit(connection, pid, credentials.uid) {
            // The client does not wait for more; it may be gone.
            Some(server) => {
                let _ = connection.send_fd(handshake::DESCRIPTOR, server.as_fd());
                drop(server);
                let _ = connection.recv(64);
            }
            None => self.log(&format!("CLIENT {pid} from user {} is turned away", credentials.uid)),
        }
    }

    /// The client's socket to a server that has been told of it; `None` when it went, or there will be no server.
    fn admit(self: &Arc<Self>, visitor: &Connection, pid: u32, uid: u32) -> Option<Connection> {
        let mut state = self.lock();
        let failed_before = state.failed_starts;
        let mut told = false;
        let mut tell = |text: &str| {
            if !std::mem::replace(&mut told, true) {
                self.log(&format!("NEW CLIENT {pid} from user {uid}: {text}"));
            }
        };
        loop {
            if state.quitting || visitor.is_closed() || state.failed_starts - failed_before > START_RETRIES {
                return None;
            }
            match state.choose(uid, self.config.multi_user) {
                Choice::Enter(server) => {
                    if let Some(socket) = enter(&mut state, server, pid, uid) {
                        tell("Server already exists");
                        return Some(socket);
                    }
                }
                Choice::Start => {
                    tell("Server is not ready, push client to pending list");
                    let owner = if self.config.multi_user { 0 } else { uid };
                    if let Err(error) = self.start_server(&mut state, owner) {
                        self.log(&format!("cannot start a server: {error}"));
                        state.failed_starts += 1;
                    }
                }
                Choice::Replace(server) => {
                    tell("Server is not ready, push client to pending list");
                    self.end_server(&mut state, server);
                }
                Choice::Wait => tell("Server is not ready, push client to pending list"),
            }
            state = self.wait(state, WAITING);
        }
    }

    /// Starts a server of a user; it is INITIALIZING until it says otherwise.
    pub(super) fn start_server(self: &Arc<Self>, state: &mut State, uid: u32) -> std::io::Result<u32> {
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
        // What holds the other end of the link must not outlive the server.
        drop(command);
        let pid = child.id();
        self.log.line("Control", pid, &format!("Starting new server {pid} for user {uid}"));
        let settings = state.defaults.clone();
        let start = ToServer::Start {
            visible: self.config.visible.clone(),
            pipe_directory: self.config.pipe_directory.display().to_string(),
            uid,
            settings: settings.clone(),
        };
        // One that is dead already is found so by the thread below.
        let _ = wire::send(&link, &start);
        let link = Arc::new(link);
        let server = Server {
            uid,
            status: Status::Initializing,
            settings,
            link: Arc::clone(&link),
            clients: std::collections::BTreeMap::new(),
            leaving: false,
        };
        state.servers.insert(pid, server);
        self.changed.notify_all();
        let daemon = Arc::clone(self);
        thread::spawn(move || daemon.watch_server(child, &link));
        Ok(pid)
    }

    /// Tells a server to end; nobody enters it any more.
    pub(super) fn end_server(&self, state: &mut State, pid: u32) {
        if let Some(server) = state.servers.get_mut(&pid) {
            server.leaving = true;
            let _ = wire::send(&server.link, &ToServer::Shutdown);
            self.changed.notify_all();
        }
    }

    /// Hears what a server says until it is gone.
    fn watch_server(&self, mut child: Child, link: &Connection) {
        let pid = child.id();
        let mut served = false;
        while let Ok(Some(message)) = wire::recv(link) {
            served |= matches!(message, FromServer::Status(Status::Active));
            self.hear(pid, message);
        }
        // It closed its link: it is dead, or about to be.
        let status = child.wait().ok();
        let status = status.map_or(-1, |status| status.code().or(status.signal()).unwrap_or(-1));
        self.log(&format!("Server {pid} exited with status {status}"));
        let mut state = self.lock();
        state.servers.remove(&pid);
        if !served {
            state.failed_starts += 1;
        }
        self.changed.notify_all();
    }

    fn hear(&self, pid: u32, message: FromServer) {
        let mut state = self.lock();
        let Some(server) = state.servers.get_mut(&pid) else { return };
        match message {
            FromServer::Status(status) => {
                if server.status == Status::Initializing {
                    self.log(&format!("NEW SERVER {pid}: Ready"));
                }
                server.status = status;
            }
            FromServer::Context { connection, id, device, namespace, command } => {
                if let Some(client) = server.clients.get_mut(&connection) {
                    client.context = Some(ClientContext { id, device, namespace, command });
                }
            }
            FromServer::Left { connection } => {
                server.clients.remove(&connection);
            }
            FromServer::Terminated { request, result } => {
                state.terminated.insert(request, result);
            }
        }
        self.changed.notify_all();
    }
}

/// Tells a server of a client, with the limits that bind it: the client's end of their socket.
fn enter(state: &mut MutexGuard<'_, State>, server: u32, pid: u32, uid: u32) -> Option<Connection> {
    let connection = state.next_number();
    let server = state.servers.get_mut(&server)?;
    let (ours, theirs) = Connection::pair().ok()?;
    let message = ToServer::Client { connection, pid, uid, settings: server.settings.clone() };
    let message = serde_json::to_vec(&message).ok()?;
    // A server that is dead is about to be found so.
    server.link.send_fd(&message, theirs.as_fd()).ok()?;
    server.clients.insert(connection, Client { pid, context: None });
    Some(ours)
}

/// The server beside this program, else the one that `PATH` finds.
fn server_program() -> PathBuf {
    const NAME: &str = "nvidia-cuda-mps-server";
    let beside = std::env::current_exe().ok().map(|own| own.with_file_name(NAME)).filter(|path| path.exists());
    beside.unwrap_or_else(|| PathBuf::from(NAME))
}
