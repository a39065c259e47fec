//! Models the daemon's servers and their clients, and chooses the server for a client. Pure:
//! performs no I/O.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::limits::ClientSettings;
use crate::seqpacket::{Connection, Credentials};
use crate::wire::ServerStatus;

/// Servers, settings and counters.
#[derive(Debug)]
pub(super) struct DaemonState {
    /// The initial settings for the clients of new servers.
    pub(super) defaults: ClientSettings,
    /// The servers by PID.
    pub(super) servers: BTreeMap<u32, ServerRecord>,
    /// Number of servers that could not be started, or that exited before they were ACTIVE.
    pub(super) failed_starts: u32,
    /// Answers of servers by request number, until a command reads them.
    pub(super) answers: BTreeMap<u64, i32>,
    last_number: u64,
}

/// One server.
#[derive(Debug)]
pub(super) struct ServerRecord {
    pub(super) uid: u32,
    pub(super) status: ServerStatus,
    pub(super) settings: ClientSettings,
    pub(super) link: Arc<Connection>,
    /// The clients by connection.
    pub(super) clients: BTreeMap<u64, PassedClient>,
    /// Whether the daemon has requested that the server exits. Such a server receives no more
    /// clients.
    pub(super) exiting: bool,
}

/// A connection that was passed on to a server.
#[derive(Debug, Default)]
pub(super) struct PassedClient {
    /// The client's PID. `None` before the introduction.
    pub(super) pid: Option<u32>,
    /// The client's context. `None` before the context is created, and for the connection of a
    /// process.
    pub(super) context: Option<ClientContext>,
}

/// A client's context, as `ps` prints it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ClientContext {
    pub(super) device: String,
    pub(super) namespace: u64,
    pub(super) command: String,
}

/// A client that waits for a server.
pub(super) struct PendingClient {
    pub(super) connection: Connection,
    pub(super) pid: i32,
    pub(super) uid: u32,
    /// Number of failed server starts before the client connected.
    pub(super) failed_before: u32,
    /// Whether the log already mentions the client.
    pub(super) logged: bool,
}

impl PendingClient {
    pub(super) fn new(connection: Connection, credentials: Credentials, failed_before: u32) -> Self {
        let Credentials { pid, uid, .. } = credentials;
        Self { connection, pid, uid, failed_before, logged: false }
    }
}

/// The daemon's decision about a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ServerChoice {
    /// Pass the client on to this server.
    Enter(u32),
    /// Start a server, because no server exists.
    Start,
    /// Replace this server, because it belongs to another user and has no clients.
    Replace(u32),
    /// Queue the client.
    Wait,
}

impl DaemonState {
    pub(super) fn new(defaults: ClientSettings) -> Self {
        Self { defaults, servers: BTreeMap::new(), failed_starts: 0, answers: BTreeMap::new(), last_number: 0 }
    }

    pub(super) fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Decides what to do with a client of the user `uid`. If `multi_user` is true, all users share
    /// one server.
    pub(super) fn choose_server(&self, uid: u32, multi_user: bool) -> ServerChoice {
        // Only one server runs at a time. A stopping server uses the GPU until it has exited.
        let Some((pid, server)) = self.servers.iter().next() else { return ServerChoice::Start };
        match server.status {
            _ if server.exiting => ServerChoice::Wait,
            // A server in FAULT also receives clients, and refuses them with 807 (not ready).
            ServerStatus::Active | ServerStatus::Fault if multi_user || server.uid == uid => ServerChoice::Enter(*pid),
            ServerStatus::Active if server.clients.is_empty() => ServerChoice::Replace(*pid),
            ServerStatus::Initializing | ServerStatus::Fault | ServerStatus::Active => ServerChoice::Wait,
        }
    }

    /// Returns the PIDs of a server's clients, without duplicates.
    pub(super) fn client_pids(&self, server: u32) -> Option<Vec<u32>> {
        let clients = self.servers.get(&server)?.clients.values();
        let mut pids: Vec<u32> = clients.filter_map(|client| client.pid).collect();
        pids.sort_unstable();
        pids.dedup();
        Some(pids)
    }

    /// Returns the lines of `ps`: a header, and a line for each process with a context.
    pub(super) fn ps_lines(&self, only: Option<u32>) -> Vec<String> {
        let mut rows: BTreeMap<(u32, u32), &ClientContext> = BTreeMap::new();
        for (server, pid, context) in self.contexts() {
            if only.is_none_or(|only| only == pid) {
                rows.entry((server, pid)).or_insert(context);
            }
        }
        let line = |pid: &str, id: &str, server: &str, device: &str, namespace: &str, command: &str| {
            format!("{pid:<10}{id:<6}{server:<10}{device:<19}{namespace:<15}{command}")
        };
        let mut lines = vec![line("PID", "ID", "SERVER", "DEVICE", "NAMESPACE", "COMMAND")];
        for ((server, pid), context) in rows {
            let short: String = context.device.chars().take(17).collect();
            let ClientContext { namespace, command, .. } = context;
            lines.push(line(&pid.to_string(), "0", &server.to_string(), &short, &namespace.to_string(), command));
        }
        lines
    }

    /// Returns the lines of `get_device_client_list`: a line for each device that has clients, with
    /// their PIDs.
    pub(super) fn device_client_lines(&self, only: Option<u32>) -> Vec<String> {
        let mut devices: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
        for (server, pid, context) in self.contexts() {
            if only.is_none_or(|only| only == server) {
                devices.entry(&context.device).or_default().push(pid);
            }
        }
        let line = |(device, mut pids): (&str, Vec<u32>)| {
            pids.sort_unstable();
            pids.dedup();
            let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
            format!("{device} {}", pids.join(" "))
        };
        devices.into_iter().map(line).collect()
    }

    fn contexts(&self) -> impl Iterator<Item = (u32, u32, &ClientContext)> {
        self.servers.iter().flat_map(|(server, known)| {
            known.clients.values().filter_map(|client| Some((*server, client.pid?, client.context.as_ref()?)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state_with_server(uid: u32, status: ServerStatus, clients: &[u32]) -> DaemonState {
        let mut state = DaemonState::new(ClientSettings::default());
        let (link, _) = Connection::pair().unwrap();
        let clients = clients.iter().map(|pid| {
            let context = ClientContext {
                device: "GPU-8f3c1a52-0000-4000-8000-000000000001".into(),
                namespace: 4_026_531_836,
                command: "./nbody".into(),
            };
            (u64::from(*pid), PassedClient { pid: Some(*pid), context: Some(context) })
        });
        let server = ServerRecord {
            uid,
            status,
            settings: ClientSettings::default(),
            link: Arc::new(link),
            clients: clients.collect(),
            exiting: false,
        };
        state.servers.insert(6472, server);
        state
    }

    #[test]
    fn a_second_user_waits_until_the_first_user_has_no_clients() {
        assert_eq!(DaemonState::new(ClientSettings::default()).choose_server(0, false), ServerChoice::Start);
        assert_eq!(state_with_server(0, ServerStatus::Active, &[1]).choose_server(0, false), ServerChoice::Enter(6472));
        assert_eq!(state_with_server(0, ServerStatus::Active, &[1]).choose_server(1000, false), ServerChoice::Wait);
        assert_eq!(
            state_with_server(0, ServerStatus::Active, &[]).choose_server(1000, false),
            ServerChoice::Replace(6472)
        );
        assert_eq!(
            state_with_server(0, ServerStatus::Active, &[1]).choose_server(1000, true),
            ServerChoice::Enter(6472)
        );
    }

    #[test]
    fn a_starting_or_stopping_server_accepts_no_client() {
        assert_eq!(state_with_server(0, ServerStatus::Initializing, &[]).choose_server(0, true), ServerChoice::Wait);
        assert_eq!(state_with_server(0, ServerStatus::Fault, &[1]).choose_server(0, true), ServerChoice::Enter(6472));
        assert_eq!(state_with_server(0, ServerStatus::Fault, &[1]).choose_server(1000, false), ServerChoice::Wait);
        let mut state = state_with_server(0, ServerStatus::Active, &[]);
        state.servers.values_mut().for_each(|server| server.exiting = true);
        assert_eq!(state.choose_server(0, true), ServerChoice::Wait);
    }

    #[test]
    fn ps_prints_a_table_with_shortened_uuids() {
        let table = state_with_server(0, ServerStatus::Active, &[9741, 9743]).ps_lines(Some(9741));
        assert_eq!(
            table,
            [
                "PID       ID    SERVER    DEVICE             NAMESPACE      COMMAND",
                "9741      0     6472      GPU-8f3c1a52-0000  4026531836     ./nbody",
            ]
        );
    }
}
