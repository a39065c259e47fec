//! One MPS control daemon for one device: started, given its defaults, watched, started again, ended.
//!
//! A [`Device`] outlives its daemons. Its doors wait for [`Phase::is_open`] and speak to the daemon under its gate, one at a time: the
//! limits that a server has are those of whoever set them last.
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command as Process;
use std::rc::Rc;
use std::time::Duration;

use rustix::process::Signal;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::unix::pipe;
use tokio::sync::{Mutex, MutexGuard, Notify, watch};
use tokio::time::{Instant, sleep, timeout};

use super::compute_mode;
use super::control::{self, ANSWER, ControlError};
use super::decide::Backoff;
use super::fault::Trouble;
use super::host::Host;
use super::process::{self, Child, Exit, Hold};
use super::protocol::{self, Command, LogEvent, ServerState, Terminated, Unexpected};
use super::wire::{Client, Daemon, DaemonState, DaemonStatus, Door};

/// A daemon answers within a second of its start; a busy node may take longer.
pub(super) const DAEMON_START: Duration = Duration::from_secs(15);
/// Without a persistence daemon the driver initialises the GPU first.
pub(super) const SERVER_START: Duration = Duration::from_secs(60);
/// How often a daemon is asked how it is: a tenth of a millisecond of its time.
const LOOK: Duration = Duration::from_secs(1);
/// How often while it is in FAULT or has to go: somebody waits for what comes after.
const LOOK_CLOSELY: Duration = Duration::from_millis(25);
/// How long `quit` may take after its own timeout.
pub(super) const QUIT_SECONDS: u32 = 3;
/// How long a daemon that was killed may take: the driver may keep it.
const KILLED: Duration = Duration::from_secs(10);
/// `terminate_client` on a client that does not run blocks the daemon: so long that is no sign of a daemon that hangs.
const TERMINATING: Duration = Duration::from_secs(30);
/// MPS has told a client's end this long after it, or will not.
const TOLD: Duration = Duration::from_millis(500);

/// Why a daemon's life ended although it was wanted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("cannot start {program}: {source}")]
    Spawn { program: String, source: io::Error },
    #[error("cannot prepare {path}: {source}")]
    Prepare { path: PathBuf, source: io::Error },
    #[error("the MPS control daemon ended with {exit}{said}")]
    Exited { exit: Exit, said: String },
    #[error("the MPS server stayed in FAULT: its daemon was replaced, and ended with {0}")]
    StuckInFault(Exit),
    #[error("{0}")]
    Control(#[from] ControlError),
    #[error("{what} was not taken: it reads back as {is:?}")]
    NotTaken { what: String, is: String },
    #[error("the MPS server did not become ready within {}s: {last}", SERVER_START.as_secs())]
    NoServer { last: String },
    #[error("cannot set the compute mode: {0}")]
    ComputeMode(String),
    #[error("the MPS host stops")]
    Stopping,
}

impl From<Unexpected> for Failure {
    fn from(unexpected: Unexpected) -> Self {
        Self::Control(unexpected.into())
    }
}

/// How a daemon's life ended.
enum End {
    Unwanted,
    NewSettings,
    Failed(Failure),
}

/// What doors need to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Phase {
    pub(crate) state: DaemonState,
    pub(crate) door: Door,
    pub(crate) multi_user: bool,
    /// The server, where there is one for everybody.
    pub(crate) server: Option<u32>,
}

impl Phase {
    /// Whether clients may be let in.
    pub(crate) fn is_open(&self) -> bool {
        self.state == DaemonState::Active
    }
}

/// What a server was last told, and read back as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) threads: u8,
    pub(crate) memory_mib: Option<u64>,
}

/// The right to speak to the daemon, and what its server was last told.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    applied: Option<(u32, Limits)>,
}

/// A client that came through a door.
#[derive(Debug)]
struct Known {
    allocation: String,
    hold: Option<Hold>,
    proof: Proof,
    /// When it was found to have ended, until MPS has said so too.
    died: Option<Instant>,
}

/// Whether `hold` is the client's beyond doubt. Its pid may have become somebody else's between its first word at the door and the hold on it;
/// but the kernel attests it to the server too, and a client meets that only after.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Proof {
    /// MPS listed the pid before: a list says nothing new.
    Never,
    /// MPS did not list it then, nor has since.
    Awaited,
    /// MPS has listed it since.
    Given,
}

impl Known {
    fn has_ended(&self) -> bool {
        self.hold.as_ref().is_none_or(Hold::has_ended)
    }
}

#[derive(Debug, Default)]
struct View {
    pid: Option<u32>,
    restarts: u32,
    message: String,
    clients: BTreeSet<u32>,
}

/// A device whose daemon this host runs.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) pipe: PathBuf,
    pub(super) host: Rc<Host>,
    wanted: watch::Sender<Option<Daemon>>,
    phase: watch::Sender<Phase>,
    gate: Mutex<Gate>,
    look: Notify,
    view: RefCell<View>,
    known: RefCell<BTreeMap<u32, Known>>,
    terminating: Cell<Option<Instant>>,
    /// Clients whose contexts MPS has ended: they may die as they like.
    terminated: RefCell<BTreeSet<u32>>,
    trouble: Trouble,
    /// Whether the daemon left a question unanswered: the next one decides.
    suspect: Cell<bool>,
    /// Whether a client's handshake ever went as it is known to.
    proven: Cell<bool>,
    /// Whether a daemon is or was wanted, and is not gone yet.
    present: Cell<bool>,
}

impl Device {
    pub(crate) fn new(name: &str, host: Rc<Host>) -> Rc<Self> {
        let phase = Phase { state: DaemonState::Starting, door: Door::Hard, multi_user: true, server: None };
        Rc::new(Self {
            name: name.to_owned(),
            pipe: host.paths.pipe(name),
            host,
            wanted: watch::Sender::new(None),
            phase: watch::Sender::new(phase),
            gate: Mutex::default(),
            look: Notify::new(),
            view: RefCell::default(),
            known: RefCell::default(),
            terminating: Cell::default(),
            terminated: RefCell::default(),
            trouble: Trouble::default(),
            suspect: Cell::default(),
            proven: Cell::default(),
            present: Cell::default(),
        })
    }

    /// Says what is wanted from now on; `None`: that it goes.
    pub(crate) fn want(&self, daemon: Option<Daemon>) {
        self.wanted.send_if_modified(|wanted| {
            let changed = *wanted != daemon;
            *wanted = daemon;
            changed
        });
    }

    /// Follows what doors need to know.
    pub(crate) fn phase(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// Asks for a look at the daemon now: something seems wrong, or has changed.
    pub(crate) fn look_now(&self) {
        self.look.notify_one();
    }

    /// The daemon as it is.
    pub(crate) fn status(&self) -> DaemonStatus {
        let phase = *self.phase.borrow();
        let view = self.view.borrow();
        let client = |&pid: &u32| Client { pid, allocation: self.allocation_of(pid) };
        DaemonStatus {
            state: phase.state,
            pid: view.pid,
            server_pid: phase.server,
            restarts: view.restarts,
            door: phase.door,
            message: view.message.clone(),
            clients: view.clients.iter().map(client).collect(),
            fault: self.trouble.told(),
        }
    }

    /// The allocation whose door a client came through.
    pub(super) fn allocation_of(&self, pid: u32) -> Option<String> {
        self.known.borrow().get(&pid).map(|known| known.allocation.clone())
    }

    /// The clients, those that MPS does not list yet, or any more, included.
    pub(super) fn told_clients(&self) -> Vec<Client> {
        let mut pids = self.view.borrow().clients.clone();
        pids.extend(self.known.borrow().keys());
        pids.into_iter().map(|pid| Client { pid, allocation: self.allocation_of(pid) }).collect()
    }

    /// Signals the clients that came through doors and are still there. Returns whom.
    pub(super) fn signal_clients(&self, signal: Signal) -> Vec<Client> {
        let view = self.view.borrow();
        let known = self.known.borrow();
        let held = known.iter().filter_map(|(&pid, known)| {
            let hold = known
                .hold
                .as_ref()
                .filter(|hold| known.proof == Proof::Given && view.clients.contains(&pid) && !hold.has_ended())?;
            Some((Client { pid, allocation: Some(known.allocation.clone()) }, hold))
        });
        let signal = |(client, hold): (Client, &Hold)| {
            hold.signal(signal);
            client
        };
        held.map(signal).collect()
    }

    /// Whether there is anything to tell about: a daemon that is wanted, or one that is going.
    pub(crate) fn is_present(&self) -> bool {
        self.present.get() || self.wanted.borrow().is_some()
    }

    /// Keeps the daemon running whenever it is wanted, until the host stops.
    pub(crate) async fn supervise(self: Rc<Self>) {
        let mut wanted = self.wanted.subscribe();
        while !self.host.stopping.is_cancelled() {
            tokio::select! {
                () = self.host.stopping.cancelled() => return,
                // The sender is this device's own.
                _ = wanted.wait_for(Option::is_some) => {}
            }
            self.present.set(true);
            self.keep_running(&mut wanted).await;
            self.set_state(DaemonState::Stopping, None);
            if let Err(error) = compute_mode::restore(&self.host, &self.name).await {
                tracing::error!(device = self.name, error, "the compute mode could not be put back");
            }
            self.present.set(false);
            self.host.changed();
        }
    }

    async fn keep_running(&self, wanted: &mut watch::Receiver<Option<Daemon>>) {
        let mut backoff = Backoff::default();
        loop {
            let Some(settings) = wanted.borrow_and_update().clone() else { return };
            let start = Instant::now();
            match self.live(&settings, wanted).await {
                End::Unwanted => return,
                End::NewSettings => self.set_state(DaemonState::Restarting, Some("its settings have changed")),
                End::Failed(failure) => {
                    let wait = backoff.failed(start.elapsed());
                    tracing::error!(device = self.name, error = %failure, ?wait, "MPS daemon failed");
                    self.set_state(backoff.state(), Some(&failure.to_string()));
                    self.view.borrow_mut().restarts += 1;
                    self.host.changed();
                    tokio::select! {
                        () = self.host.stopping.cancelled() => return,
                        () = sleep(wait) => {}
                        // Other settings may be what it takes; a device that is to go need not wait.
                        _ = wanted.changed() => {}
                    }
                }
            }
        }
    }

    /// One life of the daemon. Nothing of it is left afterwards.
    async fn live(&self, settings: &Daemon, wanted: &mut watch::Receiver<Option<Daemon>>) -> End {
        let mut child = None;
        let end = match self.start(settings, &mut child).await {
            Ok(()) => self.watch(settings, wanted, child.as_ref()).await,
            Err(Failure::Stopping) => End::Unwanted,
            Err(failure) => End::Failed(failure),
        };
        let state = if matches!(end, End::Unwanted) { DaemonState::Stopping } else { DaemonState::Restarting };
        self.set_state(state, None);
        // An admission that is under way finds the daemon gone, or ends first.
        let mut gate = self.gate.lock().await;
        *gate = Gate::default();
        if let Some(child) = &child {
            if !matches!(end, End::Failed(_)) {
                self.quit(child).await;
            }
            child.kill();
            if timeout(KILLED, child.exited()).await.is_err() {
                tracing::error!(device = self.name, pid = child.pid, "MPS daemon does not end after SIGKILL");
            }
        }
        process::clear(&self.pipe).await;
        self.known.borrow_mut().clear();
        self.terminated.borrow_mut().clear();
        self.trouble.over(self, "its daemon is gone");
        self.trouble.fresh_server();
        let mut view = self.view.borrow_mut();
        view.pid = None;
        view.clients.clear();
        self.phase.send_modify(|phase| phase.server = None);
        self.host.changed();
        end
    }

    async fn quit(&self, child: &Child) {
        let deadline = Duration::from_secs(u64::from(QUIT_SECONDS)) + ANSWER;
        if let Err(error) = self.ask_within(&Command::Quit { seconds: QUIT_SECONDS }, deadline).await {
            tracing::warn!(device = self.name, %error, "MPS daemon does not quit");
        }
        if let Ok(exit) = timeout(ANSWER, child.exited()).await {
            tracing::info!(device = self.name, %exit, "MPS daemon has quit");
        } else {
            tracing::warn!(device = self.name, "MPS daemon is killed: it did not quit");
        }
    }

    /// From nothing to a server whose limits were read back. No client is let in before this returns.
    async fn start(&self, settings: &Daemon, started: &mut Option<Child>) -> Result<(), Failure> {
        let state = if self.view.borrow().restarts == 0 { DaemonState::Starting } else { self.phase.borrow().state };
        self.phase.send_modify(|phase| phase.multi_user = settings.multi_user);
        self.set_state(state, None);
        self.prepare(settings).await?;
        if settings.exclusive {
            compute_mode::set(&self.host, &self.name).await.map_err(Failure::ComputeMode)?;
        } else {
            compute_mode::restore(&self.host, &self.name).await.map_err(Failure::ComputeMode)?;
        }
        let (child, output) = self.spawn(settings)?;
        let last = Rc::new(RefCell::new(String::new()));
        let log = self
            .host
            .device(&self.name)
            .map(|device| tokio::task::spawn_local(device.read_log(output, Rc::clone(&last))));
        self.view.borrow_mut().pid = Some(child.pid);
        self.host.changed();
        let child = started.insert(child);
        let exited = async {
            let exit = child.exited().await;
            // Its last words are in the pipe still.
            if let Some(log) = log {
                let _ = timeout(Duration::from_millis(200), log).await;
            }
            exit
        };
        tokio::select! {
            exit = exited => {
                let said = last.borrow().clone();
                Err(Failure::Exited { exit, said: if said.is_empty() { said } else { format!(": {said}") } })
            }
            () = self.host.stopping.cancelled() => Err(Failure::Stopping),
            result = self.set_up(settings) => result,
        }
    }

    async fn prepare(&self, settings: &Daemon) -> Result<(), Failure> {
        let failed = |source| Failure::Prepare { path: self.pipe.clone(), source };
        std::fs::create_dir_all(&self.pipe).map_err(failed)?;
        // Servers of other uids than root's have to come through.
        let mode = if settings.multi_user { 0o700 } else { 0o711 };
        std::fs::set_permissions(&self.pipe, std::fs::Permissions::from_mode(mode)).map_err(failed)?;
        if !settings.multi_user {
            std::fs::set_permissions(self.host.paths.mps(), std::fs::Permissions::from_mode(0o711)).map_err(failed)?;
        }
        if !process::of_pipe(&self.pipe).await.is_empty() {
            tracing::warn!(device = self.name, "a daemon of an earlier MPS host is there: it has to quit");
            let quit = Command::Quit { seconds: QUIT_SECONDS };
            let deadline = Duration::from_secs(u64::from(QUIT_SECONDS)) + ANSWER;
            if let Err(error) = control::ask(&self.pipe, &quit, deadline).await {
                tracing::warn!(device = self.name, %error, "it does not quit");
            }
            process::clear(&self.pipe).await;
        }
        for left in ["control", "control_privileged"] {
            match std::fs::remove_file(self.pipe.join(left)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
                _ => {}
            }
        }
        Ok(())
    }

    fn spawn(&self, settings: &Daemon) -> Result<(Child, pipe::Receiver), Failure> {
        let mut command = self.tool();
        command.arg("-f");
        if settings.multi_user {
            command.arg("-multiuser-server");
        }
        let program = &self.host.options.mps_control;
        let failed = |source| Failure::Spawn { program: program.display().to_string(), source };
        self.host.children.spawn(&mut command, &[]).map_err(failed)
    }

    fn tool(&self) -> Process {
        let options = &self.host.options;
        tool(&options.mps_control, options.library_path.as_deref(), &self.pipe, &self.name)
    }

    async fn set_up(&self, settings: &Daemon) -> Result<(), Failure> {
        let mut gate = self.gate.lock().await;
        self.answers().await?;
        self.set_defaults(settings).await?;
        if settings.multi_user {
            let server = self.start_server(0).await?;
            self.phase.send_modify(|phase| phase.server = Some(server));
        }
        gate.applied = None;
        self.set_state(DaemonState::Active, None);
        tracing::info!(device = self.name, server = self.phase.borrow().server, "MPS serves");
        Ok(())
    }

    /// Waits until the daemon answers for the first time.
    async fn answers(&self) -> Result<(), Failure> {
        let deadline = Instant::now() + DAEMON_START;
        loop {
            match control::is_known(&self.pipe).await {
                Ok(known) => {
                    if !known {
                        tracing::warn!(device = self.name, "unknown handshake: limits are advisory on this driver");
                    }
                    self.phase.send_modify(|phase| phase.door = if known { Door::Hard } else { Door::Advisory });
                    return Ok(());
                }
                Err(ControlError::Io(_) | ControlError::Closed) if Instant::now() < deadline => {
                    sleep(Duration::from_millis(5)).await;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    async fn set_defaults(&self, settings: &Daemon) -> Result<(), Failure> {
        if let Some(percent) = settings.default_threads {
            self.ask(&Command::SetDefaultThreads(percent)).await?;
            let is = self.ask(&Command::GetDefaultThreads).await?;
            if !protocol::is_percentage(&is, percent) {
                return Err(Failure::NotTaken { what: format!("a default of {percent} % of the threads"), is });
            }
        }
        if let Some(mib) = settings.default_memory_mib {
            self.ask(&Command::SetDefaultMemory(mib)).await?;
            let is = self.ask(&Command::GetDefaultMemory).await?;
            if !protocol::is_memory(&is, Some(mib)) {
                return Err(Failure::NotTaken { what: format!("a default memory limit of {mib} MiB"), is });
            }
        }
        Ok(())
    }

    /// Starts a server for a user and waits until it is ready.
    pub(super) async fn start_server(&self, uid: u32) -> Result<u32, Failure> {
        self.ask(&Command::StartServer { uid }).await?;
        let deadline = Instant::now() + SERVER_START;
        let mut last = String::from("none was started");
        while Instant::now() < deadline {
            let servers = protocol::pids(&self.ask(&Command::ServerList).await?)?;
            if let Some(&server) = servers.first() {
                match protocol::server_state(&self.ask(&Command::ServerStatus(server)).await?)? {
                    ServerState::Active => return Ok(server),
                    state => last = format!("server {server} is {state:?}"),
                }
            } else if last.starts_with("server") {
                return Err(Failure::NoServer { last: format!("{last}, then it ended") });
            }
            sleep(Duration::from_millis(10)).await;
        }
        Err(Failure::NoServer { last })
    }

    /// Watches until the daemon ends, hangs, or has to go.
    async fn watch(
        &self,
        settings: &Daemon,
        wanted: &mut watch::Receiver<Option<Daemon>>,
        child: Option<&Child>,
    ) -> End {
        let Some(child) = child else { return End::NewSettings };
        let mut closely = 0_u32;
        loop {
            closely = if self.phase.borrow().is_open() { 0 } else { closely.saturating_add(1) };
            let pause = match closely {
                0 => LOOK,
                // A FAULT does not last: what is done about it ends with another daemon, if need be.
                _ if self.trouble.is_current() => LOOK_CLOSELY,
                1..=400 => LOOK_CLOSELY,
                _ => LOOK_CLOSELY * 10,
            };
            tokio::select! {
                biased;
                exit = child.exited() => return End::Failed(if self.trouble.is_replacing() {
                    Failure::StuckInFault(exit)
                } else {
                    Failure::Exited { exit, said: String::new() }
                }),
                () = self.host.stopping.cancelled() => return End::Unwanted,
                // Cancel-safe: a look that is given up half-way left only questions behind.
                result = async {
                    tokio::select! {
                        () = sleep(pause) => {}
                        () = self.look.notified() => {}
                        _ = wanted.changed() => {}
                    }
                    self.look(settings, wanted, child).await
                } => match result {
                    Ok(None) => {}
                    Ok(Some(end)) => return end,
                    Err(failure) => return End::Failed(failure),
                },
            }
        }
    }

    /// Asks the daemon how it is, and acts on what is wanted where nobody is disturbed by it.
    async fn look(
        &self,
        settings: &Daemon,
        wanted: &watch::Receiver<Option<Daemon>>,
        child: &Child,
    ) -> Result<Option<End>, Failure> {
        let mut gate = self.gate.lock().await;
        // What others may have told the server meanwhile, with the command line tool, does not last.
        gate.applied = None;
        let looked = match self.examine(settings).await {
            Err(Failure::Control(ControlError::Hung { .. })) if self.is_terminating() => {
                self.set_message("waits for a client that is being terminated");
                self.trouble.climb(self, child).await;
                return Ok(None);
            }
            // Once more: one answer may come late on a busy node.
            Err(Failure::Control(ControlError::Hung { .. })) if !self.suspect.get() => self.examine(settings).await,
            other => other,
        };
        self.suspect.set(false);
        looked?;
        self.trouble.climb(self, child).await;
        self.trouble.renew(self).await?;
        let wanted = wanted.borrow().clone();
        if wanted.as_ref() == Some(settings) {
            if self.phase.borrow().state == DaemonState::Stopping {
                // It was to go, waited for its clients, and is wanted again.
                self.set_state(DaemonState::Active, Some(""));
            }
            return Ok(None);
        }
        let clients = self.clients();
        let end = match wanted {
            None if clients == 0 => Some(End::Unwanted),
            None => {
                // Its doors are closed: nobody comes in any more, and who is in may finish.
                self.set_state(
                    DaemonState::Stopping,
                    Some(&format!("not wanted any more, waits for {clients} clients")),
                );
                None
            }
            Some(_) if clients == 0 => Some(End::NewSettings),
            Some(_) => {
                self.set_message(&format!("other settings wait until its {clients} clients have gone"));
                None
            }
        };
        if end.is_some() {
            // Under the gate: nobody comes in any more.
            self.set_state(DaemonState::Restarting, None);
        }
        Ok(end)
    }

    async fn examine(&self, settings: &Daemon) -> Result<(), Failure> {
        self.forget_the_dead();
        let servers = protocol::pids(&self.ask(&Command::ServerList).await?)?;
        let was = self.phase.borrow().server;
        let server = match servers.first() {
            Some(&server) => server,
            None if self.phase.borrow().state == DaemonState::Stopping => {
                self.lost_server();
                return Ok(());
            }
            None if settings.multi_user => {
                self.lost_server();
                tracing::warn!(device = self.name, server = was, "the MPS server is gone: another is started");
                self.set_state(DaemonState::Restarting, Some("the MPS server ended and was started again"));
                self.start_server(0).await?
            }
            None => {
                self.lost_server();
                self.set_state(DaemonState::Active, None);
                return Ok(());
            }
        };
        if was.is_some_and(|was| was != server) {
            self.lost_server();
        }
        let state = protocol::server_state(&self.ask(&Command::ServerStatus(server)).await?)?;
        let clients = self.ask(&Command::Clients(server)).await?;
        let clients = if protocol::is_not_found(&clients) { Vec::new() } else { protocol::pids(&clients)? };
        for (pid, known) in self.known.borrow_mut().iter_mut() {
            if known.proof == Proof::Awaited && clients.contains(pid) {
                known.proof = Proof::Given;
            }
        }
        self.set_clients(clients.into_iter().collect());
        if self.phase.borrow().server != Some(server) {
            self.phase.send_modify(|phase| phase.server = Some(server));
            self.host.changed();
        }
        if state == ServerState::Fault {
            self.trouble.confirmed(self);
        }
        match state {
            // It goes, whatever its server is like.
            _ if self.phase.borrow().state == DaemonState::Stopping => {
                if state == ServerState::Active {
                    self.trouble.healed(self);
                }
            }
            ServerState::Active if self.trouble.healed(self) => self.set_state(DaemonState::Active, None),
            // Its log said otherwise just now.
            ServerState::Active => {}
            ServerState::Fault => self.set_state(DaemonState::Fault, None),
            ServerState::Initializing => self.set_state(DaemonState::Restarting, None),
            // Between the list and the question: the next look starts another.
            ServerState::Gone => self.look_now(),
        }
        Ok(())
    }

    /// Forgets the server, and whom it served.
    pub(super) fn lost_server(&self) {
        self.known.borrow_mut().clear();
        self.terminated.borrow_mut().clear();
        self.trouble.over(self, "its server is gone");
        self.trouble.fresh_server();
        self.phase.send_modify(|phase| phase.server = None);
        self.set_clients(BTreeSet::new());
    }

    /// Another server serves.
    pub(super) fn serves(&self, server: u32) {
        self.phase.send_modify(|phase| phase.server = Some(server));
        self.host.changed();
    }

    /// How many clients the server has, those without a context included.
    pub(super) fn clients(&self) -> usize {
        let known = self.known.borrow();
        let view = self.view.borrow();
        view.clients.union(&known.keys().copied().collect()).count()
    }

    fn set_clients(&self, clients: BTreeSet<u32>) {
        let mut view = self.view.borrow_mut();
        if view.clients != clients {
            view.clients = clients;
            self.host.changed();
        }
    }

    pub(super) fn set_message(&self, message: &str) {
        let mut view = self.view.borrow_mut();
        if view.message != message {
            message.clone_into(&mut view.message);
            self.host.changed();
        }
    }

    fn set_state(&self, state: DaemonState, message: Option<&str>) {
        let before = self.phase.borrow().state;
        if before != state {
            tracing::info!(device = self.name, ?before, now = ?state, message, "MPS daemon");
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
            self.host.changed();
        }
    }

    pub(crate) async fn ask(&self, command: &Command) -> Result<String, ControlError> {
        self.ask_within(command, ANSWER).await
    }

    pub(super) async fn ask_within(&self, command: &Command, deadline: Duration) -> Result<String, ControlError> {
        let door = self.phase.borrow().door;
        match door {
            Door::Hard => control::ask(&self.pipe, command, deadline).await,
            Door::Advisory => control::ask_by_tool(&self.host.children, self.tool(), command, deadline).await,
        }
    }

    async fn read_log(self: Rc<Self>, output: pipe::Receiver, last: Rc<RefCell<String>>) {
        let mut output = BufReader::new(output);
        let mut line = Vec::new();
        loop {
            line.clear();
            match read_line(&mut output, &mut line).await {
                Ok(true) => self.logged(&String::from_utf8_lossy(&line), &last),
                Ok(false) => return,
                Err(error) => {
                    tracing::warn!(device = self.name, %error, "the MPS daemon's output cannot be read");
                    return;
                }
            }
        }
    }

    fn logged(&self, line: &str, last: &RefCell<String>) {
        let line = protocol::log_line(line);
        let (device, source, pid, text) = (&self.name, line.source, line.pid, line.text);
        if line.event != LogEvent::Chatter {
            text.clone_into(&mut last.borrow_mut());
        }
        let server = self.phase.borrow().server;
        match line.event {
            LogEvent::Chatter => tracing::trace!(device, source, pid, "{text}"),
            LogEvent::Routine => tracing::debug!(device, source, pid, "{text}"),
            LogEvent::ClientConnected(_) => {
                tracing::debug!(device, source, pid, "{text}");
                self.look_now();
            }
            LogEvent::ClientGone(client) => {
                tracing::debug!(device, source, pid, "{text}");
                self.known.borrow_mut().remove(&client);
                self.terminated.borrow_mut().remove(&client);
                self.look_now();
            }
            LogEvent::ClientLost(client) => {
                tracing::debug!(device, source, pid, "{text}");
                if !self.terminated.borrow().contains(&client) {
                    self.trouble.lost(self, client);
                }
                self.look_now();
            }
            LogEvent::Fault { client } => {
                tracing::error!(device, source, pid, "{text}");
                // A server that goes, or does not serve yet, has nobody to be broken.
                let serves = matches!(self.phase.borrow().state, DaemonState::Active | DaemonState::Fault);
                if serves && self.trouble.logged(self, client) {
                    self.set_state(DaemonState::Fault, None);
                }
                self.look_now();
            }
            LogEvent::ServerExited { server: gone, .. } => {
                tracing::warn!(device, source, pid, "{text}");
                if server == Some(gone) && self.phase.borrow().is_open() {
                    // At once, not at the next look: a client that comes now has to be held.
                    self.set_state(DaemonState::Restarting, Some("the MPS server ended and was started again"));
                }
                self.look_now();
            }
            LogEvent::ServerReady(_) | LogEvent::Version(_) | LogEvent::Other => {
                tracing::info!(device, source, pid, "{text}");
            }
        }
    }

    /// Ends a client's contexts, in words when it does not come to that.
    pub(crate) async fn terminate(&self, client: u32) -> Result<Terminated, String> {
        if process::is_stopped(client) {
            // It would block the daemon, and with it every other client, until it runs again.
            return Err(format!("client {client} is stopped: MPS would wait for it"));
        }
        let limit = ANSWER * 2;
        let gate = timeout(limit, self.gate.lock()).await.map_err(|_| "the MPS daemon is busy".to_owned())?;
        let server = self.phase.borrow().server.ok_or_else(|| "there is no MPS server".to_owned())?;
        self.terminating.set(Some(Instant::now()));
        // Before it is asked: its end may be logged before the answer comes.
        self.terminated.borrow_mut().insert(client);
        let output = self.ask_within(&Command::Terminate { server, client }, limit).await;
        drop(gate);
        self.look_now();
        let output = output.map_err(|error| error.to_string())?;
        self.terminating.set(None);
        protocol::terminated(&output).map_err(|error| {
            self.terminated.borrow_mut().remove(&client);
            error.to_string()
        })
    }

    fn is_terminating(&self) -> bool {
        self.terminating.get().is_some_and(|since| since.elapsed() < TERMINATING)
    }

    // What the doors need.

    pub(crate) async fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().await
    }

    /// Tells the server the limits for whoever connects next, and reads them back.
    pub(crate) async fn limit(&self, gate: &mut Gate, server: u32, limits: Limits) -> Result<(), ControlError> {
        if gate.applied == Some((server, limits)) {
            return Ok(());
        }
        // Unknown until read back, also when this is given up half-way.
        gate.applied = None;
        let Limits { threads: percent, memory_mib } = limits;
        let is = self.ask(&Command::SetThreads { server, percent }).await?;
        if !protocol::is_percentage(&is, percent) {
            return Err(Unexpected::new(&is).into());
        }
        let is = self.ask(&Command::SetMemory { server, mib: memory_mib }).await?;
        if !is.trim().is_empty() {
            return Err(Unexpected::new(&is).into());
        }
        let is = self.ask(&Command::GetMemory { server }).await?;
        if !protocol::is_memory(&is, memory_mib) {
            return Err(Unexpected::new(&is).into());
        }
        gate.applied = Some((server, limits));
        Ok(())
    }

    /// The server for a user, where there is one that takes it in now.
    pub(crate) async fn server_for(&self, uid: u32) -> Result<Option<u32>, Failure> {
        let phase = *self.phase.borrow();
        if phase.multi_user {
            return Ok(phase.server);
        }
        let servers = protocol::pids(&self.ask(&Command::ServerList).await?)?;
        match servers.first() {
            None => self.start_server(uid).await.map(Some),
            Some(&server) if process::owner(server) == Some(uid) => Ok(Some(server)),
            // The server of another user: once nobody uses it any more, it makes way.
            Some(&server) => {
                if protocol::pids(&self.ask(&Command::Clients(server)).await?)?.is_empty() {
                    self.ask(&Command::ShutdownServer { server, force: false }).await?;
                }
                Ok(None)
            }
        }
    }

    /// Remembers through which door a client came.
    pub(crate) fn admitted(&self, client: u32, allocation: &str, hold: Option<Hold>) {
        let is_new = self.view.borrow_mut().clients.insert(client);
        let mut all = self.known.borrow_mut();
        // Each process comes several times, and is held since the first.
        if let Some(known) = all.get_mut(&client).filter(|known| !known.has_ended()) {
            allocation.clone_into(&mut known.allocation);
        } else {
            let proof = if is_new { Proof::Awaited } else { Proof::Never };
            all.insert(client, Known { allocation: allocation.to_owned(), hold, proof, died: None });
        }
        drop(all);
        self.proven.set(true);
        self.host.changed();
        // The list is MPS's own: one look soon, not one for each client.
    }

    /// Whether one more client of the allocation would be more than `most`.
    pub(crate) fn is_full(&self, allocation: &str, most: u32, client: u32) -> bool {
        self.forget_the_dead();
        let known = self.known.borrow();
        let is_other =
            |&(pid, known): &(&u32, &Known)| *pid != client && known.allocation == allocation && known.died.is_none();
        let others = known.iter().filter(is_other).count();
        others >= usize::try_from(most).unwrap_or(usize::MAX)
    }

    fn forget_the_dead(&self) {
        self.known.borrow_mut().retain(|_, known| {
            !known.has_ended() || (known.hold.is_some() && known.died.get_or_insert_with(Instant::now).elapsed() < TOLD)
        });
    }

    /// Waits until MPS has told how those ended who have: before that, nobody knows whether its server can be trusted. Not for ever.
    pub(crate) async fn told_of_the_dead(&self) {
        loop {
            self.forget_the_dead();
            if self.known.borrow().values().all(|known| known.died.is_none()) {
                return;
            }
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Whether its server makes way for another first, now that nobody uses it.
    pub(crate) fn must_renew(&self) -> bool {
        self.trouble.must_renew(self)
    }

    /// A reply of an unknown shape to a client's handshake. Before any went well it is another driver: nothing is enforced there.
    pub(crate) fn unknown_handshake(&self) {
        if self.proven.get() {
            tracing::error!(device = self.name, "the MPS daemon answered a client's handshake with something unknown");
        } else {
            tracing::warn!(device = self.name, "unknown handshake: limits are advisory on this driver");
            self.phase.send_modify(|phase| phase.door = Door::Advisory);
            self.host.changed();
        }
    }

    /// Something went wrong at a door: time to look at the daemon.
    pub(crate) fn suspect(&self, failure: &Failure) {
        if matches!(failure, Failure::Control(ControlError::Hung { .. })) {
            self.suspect.set(true);
        }
        self.look_now();
    }

    /// The server refuses clients: it is in FAULT.
    pub(crate) fn faulted(&self) {
        if self.phase.borrow().is_open() {
            self.trouble.confirmed(self);
            self.set_state(DaemonState::Fault, None);
        }
        self.look_now();
    }
}

/// `nvidia-cuda-mps-control` for a device: the daemon, or what speaks to it.
pub(super) fn tool(program: &Path, library_path: Option<&OsStr>, pipe: &Path, device: &str) -> Process {
    let mut command = Process::new(program);
    command
        .env("CUDA_MPS_PIPE_DIRECTORY", pipe)
        .env("CUDA_MPS_LOG_DIRECTORY", pipe)
        .env("CUDA_VISIBLE_DEVICES", device)
        .env_remove("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        .env_remove("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
        .current_dir("/");
    if let Some(path) = library_path {
        command.env("LD_LIBRARY_PATH", path);
    }
    // It looks for the server beside itself through PATH.
    if let Some(directory) = program.parent().filter(|directory| !directory.as_os_str().is_empty()) {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let directories = std::iter::once(directory.to_owned()).chain(std::env::split_paths(&path));
        if let Ok(path) = std::env::join_paths(directories) {
            command.env("PATH", path);
        }
    }
    command
}

/// The longest line that is kept in one piece.
const LONGEST_LINE: usize = 4096;

/// Reads a line of whatever length, in pieces of at most [`LONGEST_LINE`]; false at the end.
async fn read_line(output: &mut BufReader<pipe::Receiver>, line: &mut Vec<u8>) -> io::Result<bool> {
    loop {
        let buffer = output.fill_buf().await?;
        if buffer.is_empty() {
            return Ok(!line.is_empty());
        }
        let room = LONGEST_LINE.saturating_sub(line.len());
        let end = buffer.iter().take(room).position(|&byte| byte == b'\n');
        let taken = end.unwrap_or(buffer.len().min(room));
        line.extend(buffer.iter().take(taken));
        output.consume(taken + usize::from(end.is_some()));
        if end.is_some() || line.len() >= LONGEST_LINE {
            return Ok(true);
        }
    }
}
