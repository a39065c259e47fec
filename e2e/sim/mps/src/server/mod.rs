//! Runs `nvidia-cuda-mps-server`, a child process of the daemon that opens the GPU and serves the
//! clients. The server's standard input is a socket to the daemon, and its standard output goes to
//! the daemon's log. Like the real server, this server exits when the daemon exits.

pub mod clients;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use sim_machine::{Context, ContextKind, EventKind, Machine, sms_of_mps_percentage};

use crate::breakage::{BREAKAGE_RULE_ENV, BREAKAGE_SEED_ENV, BreakageRule};
use crate::faults::InjectedFaults;
use crate::handshake::{self, HandshakeFailure, IntroductionSubject};
use crate::limits::{self, CLIENT_MEMORY_BYTES, ClientSettings, DeviceName, SERVER_MEMORY_BYTES};
use crate::log::Log;
use crate::seqpacket::Connection;
use crate::wire::{self, Device, FromContext, FromServer, ServerStatus, ToContext, ToServer};
use clients::{Clients, ServerAction};

/// The environment variable that sets how long the server's start takes, in milliseconds. The
/// default is [`DEFAULT_SERVER_START_MS`].
pub const SERVER_START_TIME_ENV: &str = "SIM_MPS_SERVER_START_MS";
const DEFAULT_SERVER_START_MS: u64 = 150;
/// The XID of an illegal access: an MMU fault.
const XID_MMU_FAULT: u64 = 31;
const CUDA_ERROR_INVALID_DEVICE: i32 = 101;
const CUDA_ERROR_UNKNOWN: i32 = 999;

/// Runs the program.
pub fn main() -> ExitCode {
    let log = Log::stdout();
    match run(&log) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log.write_line("Other", std::process::id(), &format!("MPS server failed to start: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(log: &Log) -> anyhow::Result<()> {
    let link = Connection::from_fd(io::stdin().as_fd().try_clone_to_owned()?);
    let pid = std::process::id();
    log.write_line("Other", pid, "Startup");
    let start = wire::recv(&link).context("not started by nvidia-cuda-mps-control")?;
    let Some(ToServer::Start { visible, pipe_directory, uid, settings }) = start else {
        anyhow::bail!("not started by nvidia-cuda-mps-control");
    };
    let control = Path::new(&pipe_directory).join("control");
    log.write_line("Other", pid, &format!("Connecting to control daemon on socket: {}", control.display()));
    // The server runs as the user of its clients, who may not have access to the daemon's
    // directory.
    rustix::fs::access(&control, rustix::fs::Access::READ_OK)
        .with_context(|| format!("failed to reach {}", control.display()))?;
    log.write_line("Other", pid, "Initializing server process");
    let faults = InjectedFaults::new(visible.clone());
    if let Some(code) = faults.apply_faults("mps:server") {
        std::process::exit(code);
    }
    let delay =
        std::env::var(SERVER_START_TIME_ENV).ok().and_then(|ms| ms.parse().ok()).unwrap_or(DEFAULT_SERVER_START_MS);
    thread::sleep(Duration::from_millis(delay));

    let machine = Machine::open_default().context("no CUDA-capable device is detected")?;
    let devices = served_devices(&machine, visible.as_deref())?;
    let mut own = Vec::new();
    for (ordinal, device) in devices.iter().enumerate() {
        log.write_line("Server", pid, &format!("Creating server context on device {ordinal} ({})", device.name));
        let context = machine.open_context(&device.offer.uuid, ContextKind::MpsServer, SERVER_MEMORY_BYTES);
        own.push(context.with_context(|| format!("failed to create a context on device {ordinal}"))?);
    }
    log.write_line("Server", pid, &format!("Created anonymous shared memory region mps.shm.{uid}.{pid}"));
    log.write_line("Server", pid, "CUDA MPS Server for Linux/Unix. Binary version: 13000");
    let version = machine.snapshot()?.driver.version.clone();
    let major = version.split('.').next().unwrap_or_default();
    log.write_line("Server", pid, &format!("Display Driver version: {major}"));

    let environment = |name| std::env::var(name).ok();
    let rule = BreakageRule::from_environment(
        environment(BREAKAGE_RULE_ENV).as_deref(),
        environment(BREAKAGE_SEED_ENV).as_deref(),
    );
    let server = Arc::new(Server {
        log: Log::stdout(),
        faults,
        link,
        machine,
        devices,
        inner: Mutex::new(ServerState {
            clients: Clients::new(rule),
            connections: BTreeMap::new(),
            bound: BTreeMap::new(),
        }),
    });
    server.log_settings(&settings);
    server.log("Server has started");
    wire::send(&server.link, &FromServer::Status(ServerStatus::Active))?;
    let watched = Arc::clone(&server);
    // Keep the contexts until the process ends. Otherwise, the GPU could appear free to another
    // process.
    thread::spawn(move || watched.watch_devices(&own));
    let watched = Arc::clone(&server);
    thread::spawn(move || watched.watch_daemon());
    server.serve();
    Ok(())
}

/// A device that the server serves.
#[derive(Debug)]
struct ServedDevice {
    offer: Device,
    name: String,
    gpu: String,
    instance: Option<(u32, u32)>,
}

fn served_devices(machine: &Machine, visible: Option<&str>) -> anyhow::Result<Vec<ServedDevice>> {
    let state = machine.snapshot()?;
    let devices: Vec<ServedDevice> = (state.visible_devices(visible).into_iter())
        .map(|device| ServedDevice {
            offer: Device { uuid: device.uuid().to_owned(), sms: device.sms(), memory: device.cuda_memory_bytes() },
            name: device.model.name.clone(),
            gpu: device.gpu.uuid.clone(),
            instance: device.mig.map(|(gpu, compute)| (gpu.id, compute.id)),
        })
        .collect();
    anyhow::ensure!(!devices.is_empty(), "no CUDA-capable device is detected");
    Ok(devices)
}

/// An MPS server.
struct Server {
    log: Log,
    faults: InjectedFaults,
    link: Connection,
    machine: Machine,
    devices: Vec<ServedDevice>,
    inner: Mutex<ServerState>,
}

/// The server's mutable state.
struct ServerState {
    clients: Clients,
    connections: BTreeMap<u64, ConnectionResources>,
    /// The settings of each client process, from the time of its introduction.
    bound: BTreeMap<u32, ClientSettings>,
}

/// The resources of a connection.
struct ConnectionResources {
    channel: Arc<Connection>,
    /// The context's number within its process, which starts at 1. 0 for the connection of the
    /// process itself.
    id: u32,
    context: Option<RegisteredMemory>,
}

/// A client's memory, as the simulated machine records it.
struct RegisteredMemory {
    memory: Context,
    ordinal: usize,
}

impl Server {
    /// Processes the daemon's messages in order until the daemon closes the link or requests a
    /// shutdown.
    fn serve(self: &Arc<Self>) {
        while let Ok(Some(packet)) = self.link.recv_fd(wire::MAX_PACKET_BYTES) {
            match serde_json::from_slice(&packet.data) {
                Ok(ToServer::Client { connection, settings }) => {
                    if let Some(socket) = packet.fd {
                        self.admit_connection(connection, settings, Connection::from_fd(socket));
                    }
                }
                Ok(ToServer::ClientSettings(settings)) => self.log_settings(&settings),
                Ok(ToServer::Ping { request }) => self.report_to_daemon(&FromServer::Answer { request, result: 0 }),
                Ok(ToServer::Terminate { request, pid }) => {
                    let mut inner = self.lock();
                    let effects = inner.clients.terminate(request, pid);
                    self.apply_effects(&mut inner, effects);
                }
                Ok(ToServer::Start { .. }) | Err(_) => {}
                Ok(ToServer::Shutdown) => break,
            }
        }
        self.log("Server is shutting down");
    }

    /// Exits the process when the daemon has exited, even while the server waits for a client.
    fn watch_daemon(&self) {
        self.link.wait_closed();
        std::process::exit(0);
    }

    /// Exits the process when a device is lost or the machine reboots.
    fn watch_devices(&self, own: &[Context]) {
        let mut seen = 0;
        while let Ok(now) = self.machine.wait_for_change(seen, Duration::from_secs(60)) {
            seen = now;
            if let Some(error) = own.iter().find_map(|context| context.check_exists().err()) {
                self.log(&format!("Server encountered a fatal exception: {error}. Shutting down"));
                std::process::exit(1);
            }
        }
    }

    /// Waits for a client's introduction without a deadline, and admits the client.
    fn admit_connection(self: &Arc<Self>, connection: u64, settings: ClientSettings, socket: Connection) {
        let channels = socket.enable_credentials().and_then(|()| Connection::pair());
        let Ok((channel, theirs)) = channels else {
            self.report_to_daemon(&FromServer::Left { connection });
            return;
        };
        let introduced = handshake::receive_introduction(&socket, &theirs);
        drop(theirs);
        let (subject, pid) = match introduced {
            Ok((subject, credentials)) => (subject, u32::try_from(credentials.pid).unwrap_or(0)),
            Err(refusal) => {
                self.log("User did not send valid credentials");
                if matches!(refusal, HandshakeFailure::Closed) {
                    // As observed, a real server serves no more clients after a client closes
                    // during its introduction.
                    loop {
                        thread::park();
                    }
                }
                // Ignore errors, because the peer may have disconnected.
                let _ = socket.send(&CUDA_ERROR_UNKNOWN.to_le_bytes());
                self.report_to_daemon(&FromServer::Left { connection });
                return;
            }
        };
        let channel = Arc::new(channel);
        let entered = self.register_connection(connection, subject, pid, settings, &channel);
        // Ignore errors, because the thread below detects a closed connection.
        let _ = socket.send(&entered.err().unwrap_or(0).to_le_bytes());
        if entered.is_err() {
            self.report_to_daemon(&FromServer::Left { connection });
            return;
        }
        let server = Arc::clone(self);
        let spawned = thread::Builder::new().stack_size(256 << 10).spawn(move || {
            let orderly = server.serve_client(connection, &channel, &socket);
            server.remove_connection(connection, orderly);
        });
        if spawned.is_err() {
            self.remove_connection(connection, true);
        }
    }

    /// Registers a process or a context. If the server refuses it, returns the `CUresult`.
    fn register_connection(
        &self,
        connection: u64,
        subject: IntroductionSubject,
        pid: u32,
        settings: ClientSettings,
        channel: &Arc<Connection>,
    ) -> Result<(), i32> {
        let mut inner = self.lock();
        let id = match subject {
            IntroductionSubject::Process => inner.clients.add_process(connection, pid).map(|()| 0),
            IntroductionSubject::Context => inner.clients.reserve_context(connection, pid),
        }?;
        inner.bound.entry(pid).or_insert(settings);
        inner.connections.insert(connection, ConnectionResources { channel: Arc::clone(channel), id, context: None });
        self.log(&format!("Received new client request for {{PID: {pid}, Context ID: {id}}}"));
        self.log(&format!("Client {{PID: {pid}, Context ID: {id}}} connected"));
        self.log(&format!("Creating worker thread for client {{PID: {pid}, Context ID: {id}}}"));
        if subject == IntroductionSubject::Process {
            self.report_to_daemon(&FromServer::Process { connection, pid });
        }
        Ok(())
    }

    /// Serves a client's requests until the client disconnects. Returns whether the client sent
    /// [`ToContext::Goodbye`].
    fn serve_client(&self, connection: u64, channel: &Connection, socket: &Connection) -> bool {
        // After the close, process at most this number of messages that have already arrived.
        let mut last_messages = 64;
        loop {
            // Detect the close of either socket, because another process may have a copy of one of
            // them.
            if !channel.wait_readable_unless_closed(socket) {
                last_messages -= 1;
                if last_messages == 0 || !channel.is_readable() {
                    return false;
                }
            }
            match wire::recv::<ToContext>(channel) {
                Ok(Some(ToContext::Goodbye)) => return true,
                Ok(Some(request)) => {
                    if let Some(answer) = self.answer_request(connection, request)
                        && wire::send(channel, &answer).is_err()
                    {
                        return false;
                    }
                }
                // The client closed the connection without `Goodbye`, or sent an invalid message.
                Ok(None) | Err(_) => return false,
            }
        }
    }

    fn answer_request(&self, connection: u64, request: ToContext) -> Option<FromContext> {
        let mut inner = self.lock();
        match request {
            ToContext::Devices => {
                let offers = self.devices.iter().map(|device| device.offer.clone()).collect();
                Some(FromContext::Devices(offers))
            }
            ToContext::Create { device, threads, command, namespace } => {
                let created = self.create_context(&mut inner, connection, &device, threads, command, namespace);
                Some(created.unwrap_or_else(FromContext::Error))
            }
            ToContext::Allocate(bytes) => Some(inner.change_memory(connection, |memory| memory.allocate(bytes))),
            ToContext::Free(bytes) => Some(inner.change_memory(connection, |memory| memory.free(bytes))),
            ToContext::Query => Some(inner.change_memory(connection, |_| Ok(()))),
            ToContext::Busy(kernel_ms) => {
                let effects = inner.clients.start_kernels(connection, kernel_ms);
                self.apply_effects(&mut inner, effects);
                None
            }
            ToContext::Idle => {
                inner.clients.finish_kernels(connection);
                None
            }
            ToContext::IllegalAccess => {
                self.apply_illegal_access(&mut inner, connection);
                None
            }
            ToContext::Terminated => {
                let effects = inner.clients.record_context_end(connection);
                self.apply_effects(&mut inner, effects);
                None
            }
            ToContext::Goodbye => None,
        }
    }

    fn create_context(
        &self,
        inner: &mut ServerState,
        connection: u64,
        uuid: &str,
        threads: Option<f64>,
        command: String,
        namespace: u64,
    ) -> Result<FromContext, i32> {
        let ordinal =
            self.devices.iter().position(|device| device.offer.uuid == uuid).ok_or(CUDA_ERROR_INVALID_DEVICE)?;
        let device = &self.devices[ordinal].offer;
        let pid = inner.clients.pid(connection).ok_or(clients::CUDA_ERROR_INVALID_CONTEXT)?;
        if !inner.clients.is_reserved(connection) {
            return Err(clients::CUDA_ERROR_INVALID_CONTEXT);
        }
        let memory = self.machine.register_client(uuid, pid, CLIENT_MEMORY_BYTES).map_err(|error| error.cuda_code())?;
        let free = memory.memory().map_err(|error| error.cuda_code())?.free;
        let settings = inner.bound.get(&pid).ok_or(clients::CUDA_ERROR_INVALID_CONTEXT)?;
        let sms = sms_of_mps_percentage(device.sms, limits::effective_thread_percentage(settings.threads, threads));
        let limit = settings.memory_limit_of(DeviceName { ordinal, uuid });
        inner.connections.get_mut(&connection).ok_or(clients::CUDA_ERROR_INVALID_CONTEXT)?.context =
            Some(RegisteredMemory { memory, ordinal });
        inner.clients.mark_created(connection);
        self.report_to_daemon(&FromServer::Context { connection, pid, device: uuid.to_owned(), namespace, command });
        Ok(FromContext::Created { sms, limit, free })
    }

    fn apply_illegal_access(&self, inner: &mut ServerState, connection: u64) {
        let Some(ordinal) = inner.connections.get(&connection).and_then(|entry| Some(entry.context.as_ref()?.ordinal))
        else {
            return;
        };
        if !inner.clients.is_live(connection) {
            return;
        }
        let device = &self.devices[ordinal];
        let event = self.machine.update(|state| {
            state.push_event(&device.gpu, EventKind::Xid, XID_MMU_FAULT, device.instance);
            Ok::<_, sim_machine::Error>(())
        });
        if let Err(error) = event {
            self.log(&format!("{error}"));
        }
        let id = inner.connections.get(&connection).map_or(0, |entry| entry.id);
        let pid = inner.clients.pid(connection).unwrap_or(0);
        let client = format!("Client {{PID: {pid}, Context: {id}}} encountered a fatal GPU error.");
        self.log.write_line("Other", std::process::id(), &client);
        let effects = inner.clients.break_all_contexts();
        self.apply_effects(inner, effects);
    }

    fn remove_connection(&self, connection: u64, orderly: bool) {
        let mut inner = self.lock();
        let pid = inner.clients.pid(connection);
        if let (Some(pid), Some(entry)) = (pid, inner.connections.get(&connection)) {
            let client = format!("{{PID: {pid}, Context ID: {}}}", entry.id);
            // This behaviour was observed for the connection of a process. The simulation assumes
            // that the server logs this line for a context only if the context was not closed
            // cleanly.
            if entry.id == 0 || (!orderly && inner.clients.is_live(connection)) {
                let text = "Server failed to recevie command with status 806, assuming client";
                self.log(&format!("{text} {client} exit"));
            } else {
                let left = inner.connections.values().filter(|entry| entry.context.is_some()).count().saturating_sub(1);
                self.log(&format!("Client {client} exiting. Number of active client contexts is {left}."));
            }
        }
        let mut effects = inner.clients.remove_connection(connection, orderly);
        if effects.contains(&ServerAction::Status(ServerStatus::Fault)) {
            // In 47 of 47 measured faults of this kind, the log named a running client and not the
            // client that exited.
            let alive = |other: &u64| *other != connection && inner.connections[other].context.is_some();
            let named = inner.connections.keys().copied().filter(alive).min();
            if let Some((pid, id)) =
                named.and_then(|other| Some((inner.clients.pid(other)?, inner.connections[&other].id)))
            {
                let client = format!("Client {{PID: {pid}, Context: {id}}} encountered a fatal GPU error.");
                self.log.write_line("Other", std::process::id(), &client);
            }
        }
        if effects.contains(&ServerAction::Status(ServerStatus::Active))
            && self.faults.apply_faults("mps:heal").is_some()
        {
            inner.clients.stay_in_fault();
            effects.retain(|effect| *effect != ServerAction::Status(ServerStatus::Active));
        }
        self.apply_effects(&mut inner, effects);
        inner.connections.remove(&connection);
        if let Some(pid) = pid.filter(|pid| !inner.clients.has_process(*pid)) {
            inner.bound.remove(&pid);
            self.log(&format!("Client process {pid} disconnected"));
        }
        self.report_to_daemon(&FromServer::Left { connection });
    }

    fn apply_effects(&self, inner: &mut ServerState, effects: Vec<ServerAction>) {
        for effect in effects {
            match effect {
                ServerAction::Break(connection) => {
                    inner.notify(connection, &FromContext::Broken(clients::CUDA_ERROR_ILLEGAL_ADDRESS));
                }
                ServerAction::RequestEnd(connection) => inner.notify(connection, &FromContext::Terminate),
                ServerAction::Release(connection) => {
                    if let Some(entry) = inner.connections.get_mut(&connection) {
                        entry.context = None;
                    }
                }
                ServerAction::Answer(request, result) => self.report_to_daemon(&FromServer::Answer { request, result }),
                ServerAction::Status(status) => {
                    self.log_status(status, inner);
                    self.report_to_daemon(&FromServer::Status(status));
                }
            }
        }
    }

    fn log_status(&self, status: ServerStatus, inner: &ServerState) {
        let log = |text: &str| self.log.write_line("Other", std::process::id(), text);
        match status {
            ServerStatus::Fault => {
                log("Volta MPS: Server is handling a fatal GPU error.");
                for (connection, entry) in &inner.connections {
                    if let (Some(pid), Some(_)) = (inner.clients.pid(*connection), &entry.context) {
                        log(&format!("Volta MPS: status of client {{{pid}, {}}} is ACTIVE", entry.id));
                    }
                }
                log("The following devices");
                (0..self.devices.len()).for_each(|ordinal| log(&ordinal.to_string()));
                log("The following clients have a sticky error set:");
                inner.clients.broken_pids().iter().for_each(|pid| log(&pid.to_string()));
            }
            ServerStatus::Active => {
                for (ordinal, device) in self.devices.iter().enumerate() {
                    log(&format!("Destroy server context on device {ordinal}"));
                    log(&format!("Creating server context on device {ordinal} ({})", device.name));
                }
            }
            ServerStatus::Initializing => {}
        }
    }

    fn log_settings(&self, settings: &ClientSettings) {
        self.log(&format!("Active Threads Percentage set to {:.1}", settings.threads));
        for (ordinal, device) in self.devices.iter().enumerate() {
            if let Some(limit) = settings.memory_limit_of(DeviceName { ordinal, uuid: &device.offer.uuid }) {
                self.log(&format!("Device pinned memory limit for device {ordinal} set to {limit:#x} bytes"));
            }
        }
        self.log(&format!("Server Priority set to {}", settings.priority));
    }

    fn log(&self, text: &str) {
        self.log.write_line("Server", std::process::id(), text);
    }

    fn report_to_daemon(&self, message: &FromServer) {
        // Ignore errors, because the server exits when the daemon has exited.
        let _ = wire::send(&self.link, message);
    }

    fn lock(&self) -> MutexGuard<'_, ServerState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ServerState {
    /// Changes the memory use of a working context, and returns an answer with the free memory.
    fn change_memory(
        &self,
        connection: u64,
        change: impl FnOnce(&Context) -> Result<(), sim_machine::ContextError>,
    ) -> FromContext {
        let held = self.connections.get(&connection).and_then(|entry| entry.context.as_ref());
        let Some(held) = held.filter(|_| self.clients.is_live(connection)) else {
            return FromContext::Error(clients::CUDA_ERROR_INVALID_CONTEXT);
        };
        match change(&held.memory).and_then(|()| held.memory.memory()) {
            Ok(memory) => FromContext::Memory { free: memory.free },
            Err(error) => FromContext::Error(error.cuda_code()),
        }
    }

    /// Notifies a client without waiting: a client that does not read must not block the other
    /// clients.
    fn notify(&self, connection: u64, message: &FromContext) {
        if let Some(entry) = self.connections.get(&connection) {
            let _ = wire::try_send(&entry.channel, message);
        }
    }
}
