//! One device and the MPS control daemon that serves it.
//!
//! A [`Device`] outlives its daemons: doors keep a reference to the device and wait for
//! [`DevicePhase::is_open`]. A server applies the most recent limits to its next client. A caller
//! therefore holds the [`ControlLock`] while it sets the limits and introduces the client.
//!
//! ```text
//! lifecycle ─▶ probe ─▶ recovery ─▶ server ─▶ Device ─▶ clients, fault ─▶ escalation
//!     └─▶ log ─▶ fault_events ─────────────────▲
//! doors ─▶ admission ─▶ server ────────────────┘
//!              └─▶ handshake
//! ```
mod admission;
pub(super) mod backoff;
mod clients;
mod escalation;
mod fault;
mod fault_events;
mod handshake;
pub(super) mod lifecycle;
mod log;
mod probe;
mod recovery;
mod server;
mod terminate;
pub(super) mod tool;

use std::cell::{Cell, RefCell};
use std::path::PathBuf;
use std::process::Command as Process;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::{Mutex, MutexGuard, Notify, watch};
use tokio::time::Instant;

use self::clients::Clients;
use self::fault::FaultTracker;
use self::handshake::HandshakeRecord;
use super::context::HostContext;
use super::control::{self, ANSWER_DEADLINE, ControlError};
use super::protocol::Command;
use super::wire::{DaemonSettings, DaemonState, DaemonStatus, Enforcement};

/// Time limit for a daemon's first answer. An answer takes less than a second unless the node is
/// busy.
pub(super) const DAEMON_START_DEADLINE: Duration = Duration::from_secs(15);
/// Time limit for a server to become ready. Without a persistence daemon, the driver initializes
/// the GPU first.
pub(super) const SERVER_START_DEADLINE: Duration = Duration::from_secs(60);

/// The state of a device that doors depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DevicePhase {
    pub(crate) state: DaemonState,
    pub(crate) enforcement: Enforcement,
    pub(crate) multi_user: bool,
    /// PID of the server, if one is running.
    pub(crate) server: Option<u32>,
}

impl DevicePhase {
    /// Returns whether doors can admit clients.
    pub(crate) fn is_open(&self) -> bool {
        self.state == DaemonState::Active
    }
}

/// Limits of the clients that connect next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ClientLimits {
    pub(crate) threads: u8,
    pub(crate) memory_mib: Option<u64>,
}

/// The right to change a server's limits and to introduce a client.
#[derive(Debug, Default)]
pub(crate) struct ControlLock {
    /// The PID of a server, and the limits that were most recently set on this server and read
    /// back.
    applied: Option<(u32, ClientLimits)>,
}

/// The fields of a daemon's status besides the [`DevicePhase`].
#[derive(Debug, Default)]
struct DaemonReport {
    pid: Option<u32>,
    restarts: u32,
    message: String,
}

/// A device whose daemon this MPS host supervises.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) name: String,
    /// The daemon's pipe directory.
    pub(crate) pipe: PathBuf,
    context: Rc<HostContext>,
    desired: watch::Sender<Option<DaemonSettings>>,
    /// Settings of the daemon that is starting or running.
    running: RefCell<Option<DaemonSettings>>,
    phase: watch::Sender<DevicePhase>,
    control: Mutex<ControlLock>,
    /// Requests a probe before the next regular probe.
    probe_soon: Notify,
    report: RefCell<DaemonReport>,
    clients: RefCell<Clients>,
    faults: RefCell<FaultTracker>,
    /// Time of the last `terminate_client` that has no answer yet.
    terminating_since: Cell<Option<Instant>>,
    /// Whether a door's request to the daemon timed out. If so, the next probe does not retry.
    unanswered: Cell<bool>,
    handshake: RefCell<HandshakeRecord>,
    /// Number of consecutive probes that ended unexpectedly.
    unexpected_probes: Cell<u32>,
    /// Whether a daemon is starting, running or stopping.
    present: Cell<bool>,
}

impl Device {
    /// Creates a device without a daemon.
    pub(crate) fn new(name: &str, context: Rc<HostContext>) -> Rc<Self> {
        let phase = DevicePhase {
            state: DaemonState::Starting,
            enforcement: Enforcement::Hard,
            multi_user: true,
            server: None,
        };
        Rc::new(Self {
            name: name.to_owned(),
            pipe: context.paths.pipe(name),
            context,
            desired: watch::Sender::new(None),
            running: RefCell::default(),
            phase: watch::Sender::new(phase),
            control: Mutex::default(),
            probe_soon: Notify::new(),
            report: RefCell::default(),
            clients: RefCell::default(),
            faults: RefCell::default(),
            terminating_since: Cell::default(),
            unanswered: Cell::default(),
            handshake: RefCell::default(),
            unexpected_probes: Cell::default(),
            present: Cell::default(),
        })
    }

    /// Sets the desired settings. `None` stops the daemon once its clients have exited.
    pub(crate) fn set_desired_daemon(&self, daemon: Option<DaemonSettings>) {
        self.desired.send_if_modified(|desired| {
            let changed = *desired != daemon;
            *desired = daemon;
            changed
        });
    }

    /// Subscribes to changes of the device's phase.
    pub(crate) fn subscribe_to_phase(&self) -> watch::Receiver<DevicePhase> {
        self.phase.subscribe()
    }

    /// Requests an immediate probe of the daemon.
    pub(crate) fn request_probe(&self) {
        self.probe_soon.notify_one();
    }

    /// Waits for the [`ControlLock`], the right to change the server's limits.
    pub(crate) async fn lock_control(&self) -> MutexGuard<'_, ControlLock> {
        self.control.lock().await
    }

    /// Returns whether a daemon with these settings already has the desired settings. Consent to
    /// advisory limits changes nothing while doors enforce the limits.
    fn has_settings(&self, running: &DaemonSettings, desired: &DaemonSettings) -> bool {
        let enforces = self.phase.borrow().enforcement == Enforcement::Hard;
        running == desired || enforces && running.without_consent() == desired.without_consent()
    }

    /// Returns the status of the daemon. A daemon with older settings is Restarting, even while its
    /// clients delay the restart.
    pub(crate) fn status(&self) -> DaemonStatus {
        let phase = *self.phase.borrow();
        let report = self.report.borrow();
        let desired = self.desired.borrow();
        let running = self.running.borrow();
        let is_outdated =
            desired.as_ref().is_some_and(|desired| running.as_ref().is_none_or(|one| !self.has_settings(one, desired)));
        DaemonStatus {
            state: match phase.state {
                DaemonState::Active if is_outdated => DaemonState::Restarting,
                // The MPS host restarts a process that was terminated.
                DaemonState::Stopping if desired.is_some() && self.context.stopping.is_cancelled() => {
                    DaemonState::Restarting
                }
                state => state,
            },
            pid: report.pid,
            server_pid: phase.server,
            restarts: report.restarts,
            enforcement: phase.enforcement,
            // Doors of a daemon with advisory limits relay all clients.
            holds_clients: phase.enforcement == Enforcement::Hard && self.handshake.borrow().are_clients_held(),
            replies_unproven: self.handshake.borrow().are_replies_unproven(),
            message: report.message.clone(),
            clients: self.clients.borrow().listed_clients(),
            fault: self.faults.borrow().last_fault().cloned(),
        }
    }

    /// Returns whether the status includes this device: its daemon is desired or still stopping.
    pub(crate) fn is_desired_or_stopping(&self) -> bool {
        self.present.get() || self.desired.borrow().is_some()
    }

    /// Sends a command to the daemon, with the usual deadline.
    pub(crate) async fn send_command(&self, command: &Command) -> Result<String, ControlError> {
        self.send_command_within(command, ANSWER_DEADLINE).await
    }

    async fn send_command_within(&self, command: &Command, deadline: Duration) -> Result<String, ControlError> {
        let enforcement = self.phase.borrow().enforcement;
        match enforcement {
            Enforcement::Hard => control::send_command(&self.pipe, command, deadline).await,
            Enforcement::Advisory => {
                control::send_command_by_tool(&self.context.children, self.control_tool(), command, deadline).await
            }
        }
    }

    /// Returns the driver's control tool for this daemon.
    fn control_tool(&self) -> Process {
        let options = &self.context.options;
        tool::control_tool_command(&options.mps_control, options.library_path.as_deref(), &self.pipe, &self.name)
    }

    fn set_server(&self, server: Option<u32>) {
        self.phase.send_modify(|phase| phase.server = server);
    }

    fn set_message(&self, message: &str) {
        let mut report = self.report.borrow_mut();
        if report.message != message {
            message.clone_into(&mut report.message);
            self.context.notify_status_change();
        }
    }

    fn set_state(&self, state: DaemonState, message: Option<&str>) {
        let before = self.phase.borrow().state;
        if before != state {
            tracing::info!(device = self.name, from = ?before, to = ?state, message, "MPS daemon state changed");
        }
        self.phase.send_if_modified(|phase| {
            let changed = phase.state != state;
            phase.state = state;
            changed
        });
        if let Some(message) = message {
            self.set_message(message);
        }
        if before != state {
            self.context.notify_status_change();
        }
    }
}
