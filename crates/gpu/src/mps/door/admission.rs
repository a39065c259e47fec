//! Admits a client: sets its limits and connects it to the server.
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use super::handshake::{IntroducedPeer, Refusal, introduce_client_to_server, run_client_handshake};
use super::relay::relay;
use super::{Door, MAX_SERVER_CONNECTIONS, WaitingConnection};
use crate::mps::control::{self, AcceptedClient, ControlError};
use crate::mps::daemon::{ClientLimits, ControlLock, DevicePhase};
use crate::mps::error::DaemonError;
use crate::mps::process::PidFd;
use crate::mps::protocol::{self, Command, ServerState};
use crate::mps::seqpacket::{Credentials, Socket};
use crate::mps::wire::Enforcement;

/// Time limit for a client's handshake with the door. A slow handshake delays no other client.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);
/// Time limit for a client to introduce itself to the server. No other client can connect to this
/// GPU during the introduction. A client in a CPU-throttled container can need several periods of
/// 100 ms.
const INTRODUCTION_DEADLINE: Duration = Duration::from_secs(2);
/// Minimum of [`INTRODUCTION_DEADLINE`]. Each stalled client of an allocation halves the deadline
/// for the allocation's next client.
const MIN_INTRODUCTION_DEADLINE: Duration = Duration::from_millis(250);
/// Delay before the door retries to admit a client.
const ADMISSION_RETRY_DELAY: Duration = Duration::from_millis(100);
/// Minimum time between two log entries of a door about pidfds that cannot be opened.
const PIDFD_ERROR_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Result of one attempt to admit a client.
#[derive(Debug)]
enum AdmissionResult {
    /// The client is connected to the server, under its allocation's limits.
    Admitted,
    /// The server refused the client with this `CUresult`.
    Failed(u32),
    /// The client has to wait.
    Held,
    /// The client closed the connection or exited.
    Disconnected,
    Refused(Refusal),
}

/// A client's connection to the server.
struct ServerLink {
    server: OwnedFd,
    relay: Option<JoinHandle<()>>,
}

impl ServerLink {
    /// Starts the relay. Returns the client's end of the connection, or `None` if the relay cannot
    /// start. The caller then introduces the client to the server on the client's behalf.
    fn new(
        server: OwnedFd,
        permits: (OwnedSemaphorePermit, OwnedSemaphorePermit),
        allocation: &str,
    ) -> (Self, Option<OwnedFd>) {
        match server.try_clone().and_then(Socket::prepare_relay) {
            Ok((to_server, to_client, clients_end)) => {
                let relay = tokio::task::spawn_local(async move {
                    relay(&to_client, &to_server).await;
                    drop(permits);
                });
                (Self { server, relay: Some(relay) }, Some(clients_end))
            }
            Err(error) => {
                tracing::error!(allocation, %error, "failed to connect a client to its server");
                (Self { server, relay: None }, None)
            }
        }
    }

    /// Stops the relay, so that packets from the client no longer reach the server.
    fn stop_relay(&self) {
        if let Some(relay) = &self.relay {
            relay.abort();
        }
    }

    /// Introduces the client to the server on the client's behalf. Afterwards, the client can no
    /// longer reach the server.
    fn introduce_client(&self, who: Credentials) {
        self.stop_relay();
        introduce_client_to_server(&self.server, who);
    }

    /// Ends the connection to the server.
    fn disconnect(&self) {
        self.stop_relay();
        let _ = rustix::net::shutdown(&self.server, rustix::net::Shutdown::Both);
    }

    /// Sends the client its end of the connection. Returns the result that the client reports, or
    /// `None` if the client reports no result in time.
    async fn pass_connection_to_client(
        &mut self,
        client: &Socket,
        clients_end: Option<OwnedFd>,
        deadline: Duration,
    ) -> Option<[u8; 4]> {
        let result = async {
            let (clients_end, relay) = (clients_end?, self.relay.as_mut()?);
            client.send_descriptor(protocol::DESCRIPTOR_PACKET, clients_end.as_fd()).await.ok()?;
            // Close this process's copy of the client's end: the connection must close when the
            // client exits.
            drop(clients_end);
            tokio::select! {
                biased;
                result = client.recv() => result.ok()?,
                // The client closed its end. The client's result may still be in transit.
                _ = relay => timeout(MIN_INTRODUCTION_DEADLINE, client.recv()).await.ok()?.ok()?,
            }
        };
        let packet = timeout(deadline, result).await.ok().flatten()?;
        packet.data.as_slice().try_into().ok()
    }
}

impl Door {
    /// Serves one connection from its handshake to its admission or refusal.
    pub(super) async fn serve_connection(self: Rc<Self>, client: Socket) {
        let Ok(peer) = client.peer() else { return };
        if self.device.subscribe_to_phase().borrow().enforcement == Enforcement::Advisory {
            let relayed = tokio::select! {
                () = self.closed.cancelled() => return,
                relayed = self.relay_to_advisory_daemon(&client) => relayed,
            };
            if relayed {
                return;
            }
        }
        let handshake = tokio::select! {
            () = self.closed.cancelled() => return,
            result = timeout(HANDSHAKE_DEADLINE, run_client_handshake(&client, peer)) => result,
        };
        let refusal = match handshake {
            Ok(IntroducedPeer::Client(who)) => self.admit_when_possible(&client, who).await,
            Ok(IntroducedPeer::Closed) => None,
            Ok(IntroducedPeer::Refused(refusal)) => Some(refusal),
            Err(_) => Some(Refusal::TooSlow),
        };
        if let Some(reason) = refusal {
            tracing::warn!(allocation = self.id, pid = peer.pid, uid = peer.uid, %reason, "refused connection");
            self.count_refused();
        }
    }

    /// Admits a client as soon as possible. Returns the reason if the client is refused.
    async fn admit_when_possible(&self, client: &Socket, who: Credentials) -> Option<Refusal> {
        let waiting = WaitingConnection::new(self);
        // From here on, the pidfd refers to this process, even after the process has exited.
        let mut pidfd = loop {
            match PidFd::open(who.pid) {
                Ok(Some(pidfd)) => break Some(pidfd),
                // A process that has exited cannot be counted. Another process may still have the
                // connection of the exited process, and would use the GPU without counting as a
                // client.
                Ok(None) => return self.refusal_of_exited_process(client).await,
                // A client without a pidfd would count as exited, so the allocation's maximum of
                // clients would not apply.
                Err(error) => {
                    self.log_pidfd_error(who, &error);
                    waiting.start_waiting();
                    tokio::select! {
                        () = self.closed.cancelled() => return None,
                        () = client.wait_until_closed_or_readable() => return None,
                        () = sleep(ADMISSION_RETRY_DELAY) => {}
                    }
                }
            }
        };
        loop {
            let mut phase = self.device.subscribe_to_phase();
            let is_open = phase.borrow().is_open();
            if !is_open {
                waiting.start_waiting();
                tokio::select! {
                    () = self.closed.cancelled() => return None,
                    () = client.wait_until_closed_or_readable() => return None,
                    open = phase.wait_for(DevicePhase::is_open) => if open.is_err() { return None },
                }
            }
            match self.try_to_admit(client, who, &mut pidfd).await {
                AdmissionResult::Admitted => {
                    tracing::debug!(allocation = self.id, pid = who.pid, uid = who.uid, "admitted client");
                    self.count_admitted();
                    return None;
                }
                AdmissionResult::Failed(code) => {
                    tracing::warn!(allocation = self.id, pid = who.pid, code, "MPS server refused a client");
                    return None;
                }
                AdmissionResult::Disconnected => return None,
                AdmissionResult::Refused(refusal) => return Some(refusal),
                AdmissionResult::Held => {
                    waiting.start_waiting();
                    tokio::select! {
                        () = self.closed.cancelled() => return None,
                        () = client.wait_until_closed_or_readable() => return None,
                        () = sleep(ADMISSION_RETRY_DELAY) => {}
                    }
                }
            }
        }
    }

    /// Returns why the connection of a process that has exited is refused. Returns `None` if the
    /// connection is also closed, as usual when a program ends.
    async fn refusal_of_exited_process(&self, client: &Socket) -> Option<Refusal> {
        tokio::select! {
            biased;
            () = self.closed.cancelled() => None,
            () = client.wait_until_closed() => None,
            () = sleep(ADMISSION_RETRY_DELAY) => Some(Refusal::ProcessExited),
        }
    }

    /// Logs that a client waits because no pidfd can be opened. Logs only at intervals: the door
    /// retries often, for each client that waits.
    fn log_pidfd_error(&self, who: Credentials, error: &io::Error) {
        let now = Instant::now();
        let logged = self.pidfd_error_logged.get();
        if logged.is_none_or(|logged| now.saturating_duration_since(logged) >= PIDFD_ERROR_LOG_INTERVAL) {
            self.pidfd_error_logged.set(Some(now));
            tracing::warn!(allocation = self.id, pid = who.pid, %error, "failed to open a pidfd; clients wait");
        }
    }

    /// Tries once to admit a client. Once this call has the control lock, it continues even if
    /// the client disconnects, because the server may be waiting for the client.
    async fn try_to_admit(&self, client: &Socket, who: Credentials, pidfd: &mut Option<PidFd>) -> AdmissionResult {
        let locks = async {
            let turn = self.turn.lock().await;
            (turn, self.device.lock_control().await)
        };
        let (_turn, mut control) = tokio::select! {
            () = self.closed.cancelled() => return AdmissionResult::Disconnected,
            () = client.wait_until_closed_or_readable() => return AdmissionResult::Disconnected,
            locks = locks => locks,
        };
        self.device.wait_until_exits_logged().await;
        if self.device.must_replace_server() {
            self.device.request_probe();
            return AdmissionResult::Held;
        }
        let phase = *self.device.subscribe_to_phase().borrow();
        if !phase.is_open() {
            return AdmissionResult::Held;
        }
        if phase.enforcement == Enforcement::Advisory {
            // The client has already received the known greeting.
            return AdmissionResult::Refused(Refusal::UnknownHandshake);
        }
        let max_clients = self.allocation.borrow().max_clients;
        if let Some(max) = max_clients.filter(|&max| self.device.is_allocation_full(&self.id, max, who.pid)) {
            return AdmissionResult::Refused(Refusal::TooManyClients(max));
        }
        let Ok(permit) = Arc::clone(&self.server_connections).try_acquire_owned() else {
            return AdmissionResult::Refused(Refusal::TooManyConnections(MAX_SERVER_CONNECTIONS));
        };
        let Ok(shared_permit) = Arc::clone(&self.context.server_connections).try_acquire_owned() else {
            return AdmissionResult::Held;
        };
        let server = match self.prepare_server(&mut control, who).await {
            Ok(Some(server)) => server,
            Ok(None) => return AdmissionResult::Held,
            Err(error) => {
                tracing::warn!(allocation = self.id, %error, "failed to set limits; the client waits");
                self.device.record_exchange_error(&error);
                return AdmissionResult::Held;
            }
        };
        let introduced = match control::introduce_client(&self.device.pipe, who).await {
            Ok(introduced) => {
                self.device.record_expected_reply();
                introduced
            }
            Err(ControlError::ClientExited) => return AdmissionResult::Disconnected,
            Err(ControlError::UnknownProtocol) => {
                self.device.record_unexpected_reply();
                return AdmissionResult::Held;
            }
            Err(error) => {
                tracing::warn!(allocation = self.id, %error, "failed to introduce a client to the daemon; the client waits");
                self.device.record_exchange_error(&error.into());
                return AdmissionResult::Held;
            }
        };
        self.connect_to_server(client, who, pidfd, introduced, server, (permit, shared_permit)).await
    }

    /// Prepares the server for the next client of this allocation. Returns the server's PID, or
    /// `None` if the client has to wait.
    async fn prepare_server(&self, control: &mut ControlLock, who: Credentials) -> Result<Option<u32>, DaemonError> {
        let Some(server) = self.device.server_for_user(who.uid).await? else { return Ok(None) };
        match protocol::parse_server_state(&self.device.send_command(&Command::ServerStatus(server)).await?)? {
            ServerState::Active => {}
            ServerState::Fault => {
                self.device.record_server_in_fault();
                return Ok(None);
            }
            ServerState::Initializing | ServerState::Gone => {
                self.device.request_probe();
                return Ok(None);
            }
        }
        let limits = {
            let allocation = self.allocation.borrow();
            ClientLimits { threads: allocation.threads.unwrap_or(100), memory_mib: allocation.memory_mib }
        };
        self.device.set_limits(control, server, limits).await?;
        Ok(Some(server))
    }

    /// Connects a client to the server and ensures that the server has finished the client's
    /// handshake.
    async fn connect_to_server(
        &self,
        client: &Socket,
        who: Credentials,
        pidfd: &mut Option<PidFd>,
        introduced: AcceptedClient,
        server: u32,
        permits: (OwnedSemaphorePermit, OwnedSemaphorePermit),
    ) -> AdmissionResult {
        let AcceptedClient { server: socket, daemon } = introduced;
        let (mut link, clients_end) = ServerLink::new(socket, permits, &self.id);
        let deadline = (INTRODUCTION_DEADLINE / (1 << self.stalled.get().min(8))).max(MIN_INTRODUCTION_DEADLINE);
        let result = link.pass_connection_to_client(client, clients_end, deadline).await;
        if result.is_none() {
            link.introduce_client(who);
        }
        daemon.finish(&result.unwrap_or(protocol::CLIENT_CONNECTED_PACKET)).await;
        // The daemon answers only once its server has accepted the client, regardless of the
        // client's report. Therefore, limits that are set afterwards do not apply to this client.
        let mut answer = self.device.send_command(&Command::ServerStatus(server)).await;
        let has_lied = result.is_some() && matches!(answer, Err(ControlError::Timeout { .. }));
        if has_lied {
            link.introduce_client(who);
            answer = self.device.send_command(&Command::ServerStatus(server)).await;
        }
        if let Err(error) = answer {
            tracing::warn!(allocation = self.id, pid = who.pid, %error, "MPS server did not accept a client");
            self.device.record_exchange_error(&error.into());
        }
        match result.map(u32::from_le_bytes).filter(|_| !has_lied) {
            Some(0) => {
                self.stalled.set(0);
                self.device.register_client(who.pid, &self.id, pidfd.take());
                AdmissionResult::Admitted
            }
            Some(code) => {
                // Disconnect: a client that falsely reports a refusal would be connected but not
                // counted.
                link.disconnect();
                AdmissionResult::Failed(code)
            }
            None => {
                // The door introduced the client. Packets that the client still sends must not
                // reach the server.
                link.disconnect();
                if pidfd.as_ref().is_none_or(PidFd::has_exited) {
                    AdmissionResult::Disconnected
                } else {
                    self.stalled.set(self.stalled.get().saturating_add(1));
                    AdmissionResult::Refused(Refusal::Stalled)
                }
            }
        }
    }
}
