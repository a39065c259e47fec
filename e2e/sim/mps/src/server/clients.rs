//! Models the clients of a server. Pure: performs no I/O.
//!
//! The following rules were measured on a real GPU. An illegal access breaks every client, and the
//! server refuses clients in FAULT until the last broken client has exited. A client that exits
//! while its kernel runs may break the other clients. Terminating a client with `terminate_client`
//! breaks no other client.
//!
//! A process has one connection for itself and one for each context.

use std::collections::BTreeMap;

use crate::breakage::BreakageRule;
use crate::limits::MAX_CLIENT_CONTEXTS;
use crate::wire::ServerStatus;

/// `CUDA_ERROR_ILLEGAL_ADDRESS`: a client accessed memory illegally. The server sends this error to
/// all working contexts.
pub const CUDA_ERROR_ILLEGAL_ADDRESS: i32 = 700;
/// `CUDA_ERROR_MPS_SERVER_NOT_READY`: the server is in FAULT.
pub const CUDA_ERROR_MPS_SERVER_NOT_READY: i32 = 807;
/// `CUDA_ERROR_MPS_MAX_CLIENTS_REACHED`: the server already has 48 contexts.
pub const CUDA_ERROR_MPS_MAX_CLIENTS_REACHED: i32 = 808;
/// `CUDA_ERROR_INVALID_VALUE`: the client does not exist.
pub const CUDA_ERROR_INVALID_VALUE: i32 = 1;
/// `CUDA_ERROR_INVALID_CONTEXT`: the client has no context.
pub const CUDA_ERROR_INVALID_CONTEXT: i32 = 201;

/// One connection of a client process.
#[derive(Debug)]
struct ClientConnection {
    pid: u32,
    stage: ConnectionStage,
    /// Duration of the running kernels, in milliseconds. `None` if no kernel runs.
    busy: Option<f64>,
    /// Whether a `terminate_client` command waits for this connection.
    terminating: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConnectionStage {
    /// The connection of a process.
    Process,
    /// The connection of a context that is not created yet.
    Reserved,
    /// The connection of a working context.
    Live,
    /// A fatal error broke the context. The server remains in FAULT until the client's process has
    /// exited.
    Broken,
    /// `terminate_client` ended the context.
    Ended,
}

/// A `terminate_client` command that waits until the client's contexts have ended.
#[derive(Debug)]
struct PendingTermination {
    request: u64,
    pid: u32,
}

/// An action that the server must perform.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerAction {
    /// Send a client the notification that [`CUDA_ERROR_ILLEGAL_ADDRESS`] broke its context.
    Break(u64),
    /// Request that a client ends its context.
    RequestEnd(u64),
    /// Free the memory of a context that has ended.
    Release(u64),
    /// Answer a `terminate_client` command. The result is 0 for success,
    /// [`CUDA_ERROR_INVALID_VALUE`] for an unknown client, and [`CUDA_ERROR_INVALID_CONTEXT`] for a
    /// client without a context.
    Answer(u64, i32),
    /// The server's status changed.
    Status(ServerStatus),
}

/// All clients of a server.
#[derive(Debug)]
pub struct Clients {
    connected: BTreeMap<u64, ClientConnection>,
    terminations: Vec<PendingTermination>,
    status: ServerStatus,
    rule: BreakageRule,
    /// Whether the exit of a busy client poisoned the server while no other client existed. A
    /// poisoned server remains ACTIVE, and breaks all clients when the next kernel starts.
    poisoned: bool,
}

impl Clients {
    /// Returns a model without clients.
    pub fn new(rule: BreakageRule) -> Self {
        let connected = BTreeMap::new();
        Self { connected, terminations: Vec::new(), status: ServerStatus::Active, rule, poisoned: false }
    }

    /// Adds a process. If the server refuses the process, returns the `CUresult`.
    pub fn add_process(&mut self, connection: u64, pid: u32) -> Result<(), i32> {
        self.add_connection(connection, pid, ConnectionStage::Process)
    }

    /// Reserves a context for a process. Returns the context's number within the process, which
    /// starts at 1. If the server refuses the context, returns the `CUresult`.
    pub fn reserve_context(&mut self, connection: u64, pid: u32) -> Result<u32, i32> {
        if self.contexts().count() >= MAX_CLIENT_CONTEXTS {
            return Err(CUDA_ERROR_MPS_MAX_CLIENTS_REACHED);
        }
        let own = self.contexts().filter(|other| other.pid == pid).count();
        self.add_connection(connection, pid, ConnectionStage::Reserved)?;
        Ok(u32::try_from(own + 1).unwrap_or(u32::MAX))
    }

    fn add_connection(&mut self, connection: u64, pid: u32, stage: ConnectionStage) -> Result<(), i32> {
        if self.status == ServerStatus::Fault {
            return Err(CUDA_ERROR_MPS_SERVER_NOT_READY);
        }
        self.connected.insert(connection, ClientConnection { pid, stage, busy: None, terminating: false });
        Ok(())
    }

    fn contexts(&self) -> impl Iterator<Item = &ClientConnection> {
        self.connected.values().filter(|client| client.has_context() || client.stage == ConnectionStage::Reserved)
    }

    /// Marks a reserved context as created.
    pub fn mark_created(&mut self, connection: u64) {
        if let Some(client) =
            self.connected.get_mut(&connection).filter(|client| client.stage == ConnectionStage::Reserved)
        {
            client.stage = ConnectionStage::Live;
        }
    }

    /// Returns whether the context of a connection is reserved but not yet created.
    pub fn is_reserved(&self, connection: u64) -> bool {
        self.connected.get(&connection).is_some_and(|client| client.stage == ConnectionStage::Reserved)
    }

    /// Returns whether a process has a connection.
    pub fn has_process(&self, pid: u32) -> bool {
        self.connected.values().any(|client| client.pid == pid)
    }

    /// Returns whether the context of a connection works.
    pub fn is_live(&self, connection: u64) -> bool {
        self.connected.get(&connection).is_some_and(|client| client.stage == ConnectionStage::Live)
    }

    /// Returns the PID of the client process of a connection.
    pub fn pid(&self, connection: u64) -> Option<u32> {
        self.connected.get(&connection).map(|client| client.pid)
    }

    /// Returns the PIDs of the clients that a fatal error broke, without adjacent duplicates.
    pub fn broken_pids(&self) -> Vec<u32> {
        let mut pids: Vec<u32> = self
            .connected
            .values()
            .filter(|client| client.stage == ConnectionStage::Broken)
            .map(|client| client.pid)
            .collect();
        pids.dedup();
        pids
    }

    /// Records that a client's kernels run. If the server is poisoned, breaks all live contexts,
    /// and returns the actions of the server.
    pub fn start_kernels(&mut self, connection: u64, kernel_ms: f64) -> Vec<ServerAction> {
        match self.connected.get_mut(&connection) {
            Some(client) if client.stage == ConnectionStage::Live => client.busy = Some(kernel_ms),
            _ => return Vec::new(),
        }
        if std::mem::take(&mut self.poisoned) { self.break_all_contexts() } else { Vec::new() }
    }

    /// Records that a client's kernels have finished.
    pub fn finish_kernels(&mut self, connection: u64) {
        if let Some(client) = self.connected.get_mut(&connection) {
            client.busy = None;
        }
    }

    /// Breaks all live contexts with a fatal error.
    pub fn break_all_contexts(&mut self) -> Vec<ServerAction> {
        let mut effects = Vec::new();
        for (connection, client) in &mut self.connected {
            if client.stage == ConnectionStage::Live {
                client.stage = ConnectionStage::Broken;
                client.busy = None;
                effects.push(ServerAction::Break(*connection));
            }
        }
        if !effects.is_empty() && self.status != ServerStatus::Fault {
            self.status = ServerStatus::Fault;
            effects.push(ServerAction::Status(ServerStatus::Fault));
        }
        effects
    }

    /// Starts a `terminate_client` command.
    pub fn terminate(&mut self, request: u64, pid: u32) -> Vec<ServerAction> {
        let mut effects = Vec::new();
        for (connection, client) in &mut self.connected {
            if client.pid == pid && client.has_context() && !client.terminating {
                client.terminating = true;
                effects.push(ServerAction::RequestEnd(*connection));
            }
        }
        if self.connected.values().any(|client| client.pid == pid && client.terminating) {
            self.terminations.push(PendingTermination { request, pid });
        } else {
            let result = if self.has_process(pid) { CUDA_ERROR_INVALID_CONTEXT } else { CUDA_ERROR_INVALID_VALUE };
            effects.push(ServerAction::Answer(request, result));
        }
        effects
    }

    /// Records a client's report that its context has ended.
    pub fn record_context_end(&mut self, connection: u64) -> Vec<ServerAction> {
        let Some(client) = self.connected.get_mut(&connection).filter(|client| client.terminating) else {
            return Vec::new();
        };
        client.terminating = false;
        client.busy = None;
        let mut effects = Vec::new();
        // A broken client keeps the server in FAULT until its process exits, even after this
        // report.
        if client.stage == ConnectionStage::Live {
            client.stage = ConnectionStage::Ended;
            effects.push(ServerAction::Release(connection));
        }
        effects.extend(self.termination_replies());
        effects
    }

    /// Removes a closed connection. `orderly` is true if the client closed the connection cleanly,
    /// with [`ToContext::Goodbye`](crate::wire::ToContext::Goodbye).
    pub fn remove_connection(&mut self, connection: u64, orderly: bool) -> Vec<ServerAction> {
        let Some(client) = self.connected.remove(&connection) else { return Vec::new() };
        let mut effects = Vec::new();
        if client.has_context() {
            effects.push(ServerAction::Release(connection));
        }
        if let (ConnectionStage::Live, Some(kernel_ms), false) = (client.stage, client.busy, orderly)
            && self.rule.breaks_neighbours(kernel_ms)
        {
            let broken = self.break_all_contexts();
            self.poisoned = broken.is_empty();
            effects.extend(broken);
        }
        effects.extend(self.termination_replies());
        if self.status == ServerStatus::Fault
            && self.connected.values().all(|client| client.stage != ConnectionStage::Broken)
        {
            self.status = ServerStatus::Active;
            effects.push(ServerAction::Status(ServerStatus::Active));
        }
        effects
    }

    /// Keeps the server in FAULT although all broken clients have exited.
    pub fn stay_in_fault(&mut self) {
        self.status = ServerStatus::Fault;
    }

    /// Returns the answers to all `terminate_client` commands for which no context remains.
    fn termination_replies(&mut self) -> Vec<ServerAction> {
        let waits = |pid: u32| self.connected.values().any(|client| client.pid == pid && client.terminating);
        let (waiting, done): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.terminations).into_iter().partition(|termination| waits(termination.pid));
        self.terminations = waiting;
        done.into_iter().map(|termination| ServerAction::Answer(termination.request, 0)).collect()
    }
}

impl ClientConnection {
    fn has_context(&self) -> bool {
        matches!(self.stage, ConnectionStage::Live | ConnectionStage::Broken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds processes, each with one context. The PIDs are 101, 102 and so on, and the numbers of
    /// the connections are 1, 2 and so on.
    fn clients_with_contexts(count: u64) -> Clients {
        let mut clients = Clients::new(BreakageRule::from_environment(None, None));
        for connection in 1..=count {
            let pid = 100 + u32::try_from(connection).unwrap();
            clients.add_process(1000 + connection, pid).unwrap();
            add_context(&mut clients, connection, pid, 1);
        }
        clients
    }

    fn add_context(clients: &mut Clients, connection: u64, pid: u32, number: u32) {
        assert_eq!(clients.reserve_context(connection, pid), Ok(number));
        clients.mark_created(connection);
    }

    #[test]
    fn the_49th_context_is_refused_until_another_ends() {
        let mut clients = clients_with_contexts(48);
        assert_eq!(clients.add_process(2000, 149), Ok(()));
        assert_eq!(clients.reserve_context(49, 149), Err(CUDA_ERROR_MPS_MAX_CLIENTS_REACHED));
        clients.remove_connection(7, true);
        assert_eq!(clients.reserve_context(49, 149), Ok(1));
        assert_eq!(clients.reserve_context(50, 149), Err(CUDA_ERROR_MPS_MAX_CLIENTS_REACHED));
    }

    #[test]
    fn a_fault_lasts_until_the_last_broken_client_exits() {
        let mut clients = clients_with_contexts(3);
        let effects = clients.break_all_contexts();
        assert_eq!(
            effects,
            [
                ServerAction::Break(1),
                ServerAction::Break(2),
                ServerAction::Break(3),
                ServerAction::Status(ServerStatus::Fault)
            ]
        );
        assert_eq!(clients.broken_pids(), [101, 102, 103]);
        assert_eq!(clients.add_process(2000, 104), Err(CUDA_ERROR_MPS_SERVER_NOT_READY));
        assert_eq!(clients.reserve_context(4, 101), Err(CUDA_ERROR_MPS_SERVER_NOT_READY));
        assert_eq!(clients.remove_connection(1, false), [ServerAction::Release(1)]);
        assert_eq!(clients.remove_connection(3, false), [ServerAction::Release(3)]);
        assert_eq!(clients.remove_connection(1001, false), []);
        assert_eq!(
            clients.remove_connection(2, false),
            [ServerAction::Release(2), ServerAction::Status(ServerStatus::Active)]
        );
        assert_eq!(clients.add_process(2000, 104), Ok(()));
    }

    #[test]
    fn a_busy_client_breaks_its_neighbours_if_it_is_killed_but_not_if_it_exits_cleanly() {
        let mut clients = clients_with_contexts(3);
        clients.start_kernels(1, 100.0);
        clients.start_kernels(2, 100.0);
        assert_eq!(clients.remove_connection(1, true), [ServerAction::Release(1)]);
        assert_eq!(
            clients.remove_connection(2, false),
            [ServerAction::Release(2), ServerAction::Break(3), ServerAction::Status(ServerStatus::Fault)]
        );
    }

    #[test]
    fn a_killed_client_that_is_idle_or_has_short_kernels_breaks_no_client() {
        let mut clients = clients_with_contexts(3);
        clients.start_kernels(1, 100.0);
        clients.finish_kernels(1);
        clients.start_kernels(2, 0.5);
        assert_eq!(clients.remove_connection(1, false), [ServerAction::Release(1)]);
        assert_eq!(clients.remove_connection(2, false), [ServerAction::Release(2)]);
    }

    #[test]
    fn a_busy_client_killed_without_neighbours_breaks_the_next_busy_client() {
        let mut clients = clients_with_contexts(1);
        clients.start_kernels(1, 1000.0);
        assert_eq!(clients.remove_connection(1, false), [ServerAction::Release(1)]);
        add_context(&mut clients, 2, 102, 1);
        assert_eq!(clients.start_kernels(2, 0.1), [ServerAction::Break(2), ServerAction::Status(ServerStatus::Fault)]);
        assert_eq!(
            clients.remove_connection(2, false),
            [ServerAction::Release(2), ServerAction::Status(ServerStatus::Active)]
        );
    }

    #[test]
    fn the_exit_of_a_terminated_client_breaks_no_client() {
        let mut clients = clients_with_contexts(2);
        clients.start_kernels(1, 1000.0);
        assert_eq!(clients.terminate(7, 101), [ServerAction::RequestEnd(1)]);
        assert_eq!(clients.record_context_end(1), [ServerAction::Release(1), ServerAction::Answer(7, 0)]);
        assert_eq!(clients.terminate(8, 101), [ServerAction::Answer(8, CUDA_ERROR_INVALID_CONTEXT)]);
        assert_eq!(clients.remove_connection(1, false), []);
    }

    #[test]
    fn terminate_client_waits_for_all_contexts_of_the_process_and_for_no_other_context() {
        let mut clients = clients_with_contexts(2);
        add_context(&mut clients, 3, 101, 2);
        assert_eq!(clients.terminate(7, 101), [ServerAction::RequestEnd(1), ServerAction::RequestEnd(3)]);
        assert_eq!(clients.terminate(8, 101), []);
        assert_eq!(clients.record_context_end(1), [ServerAction::Release(1)]);
        assert_eq!(
            clients.remove_connection(3, false),
            [ServerAction::Release(3), ServerAction::Answer(7, 0), ServerAction::Answer(8, 0)]
        );
        clients.remove_connection(1, false);
        clients.remove_connection(1001, false);
        assert_eq!(clients.terminate(9, 101), [ServerAction::Answer(9, CUDA_ERROR_INVALID_VALUE)]);
    }

    #[test]
    fn a_terminated_broken_client_keeps_the_fault_until_it_exits() {
        let mut clients = clients_with_contexts(1);
        clients.break_all_contexts();
        assert_eq!(clients.terminate(7, 101), [ServerAction::RequestEnd(1)]);
        assert_eq!(clients.record_context_end(1), [ServerAction::Answer(7, 0)]);
        assert_eq!(clients.broken_pids(), [101]);
        assert_eq!(
            clients.remove_connection(1, false),
            [ServerAction::Release(1), ServerAction::Status(ServerStatus::Active)]
        );
    }
}
