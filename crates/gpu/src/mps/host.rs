//! `cleave mps-host`: keeps the daemons and doors as the agent wants them, and says how they are.
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::inotify;
use rustix::process::{Resource, Rlimit};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinHandle, LocalSet};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::compute_mode;
use super::daemon::Device;
use super::decide;
use super::door::Door;
use super::process::Children;
use super::protocol::Terminated;
use super::seqpacket::{LONGEST_PATH, watched};
use super::wire::{Desired, Paths, Reply, Request, Status, VERSION};
use crate::nvml;

/// Keeps one MPS control daemon per GPU running, and lets each allocation's clients in under its limits.
#[derive(Debug, Clone, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct HostArgs {
    #[command(subcommand)]
    command: Option<HostCommand>,

    #[command(flatten)]
    place: PlaceArgs,
}

// Where a node has what MPS needs. No doc comment: clap would have it in the place of that of the command.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct PlaceArgs {
    /// Directory that the agent and the MPS host share, mounted at the same path on the host and in both pods. May be a tmpfs.
    #[arg(long, env = "CLEAVE_RUN_DIR", value_name = "DIR", default_value = "/run/cleave")]
    pub(super) run_dir: PathBuf,

    /// The MPS control daemon's program; the server is looked for beside it.
    #[arg(long, env = "CLEAVE_MPS_CONTROL", value_name = "PATH", default_value = "nvidia-cuda-mps-control")]
    pub(super) mps_control: PathBuf,

    /// Directories of the driver's libraries, as `LD_LIBRARY_PATH` for MPS control daemons and CUDA programs. Without it they get this process's own.
    #[arg(long, env = "CLEAVE_MPS_LIBRARY_PATH", value_name = "DIR[:DIR]")]
    pub(super) mps_library_path: Option<OsString>,

    /// The NVML library. Without it: looked for where drivers are.
    #[arg(long, env = "CLEAVE_NVML_LIBRARY", value_name = "PATH")]
    pub(super) nvml_library: Option<PathBuf>,
}

#[derive(Debug, Clone, clap::Subcommand)]
enum HostCommand {
    /// Sets a GPU's compute mode and prints what it was before. The MPS host runs this as a process of its own: NVML would stay in its memory.
    #[command(hide = true)]
    ComputeMode {
        /// UUID of the GPU.
        #[arg(long)]
        device: String,
        #[arg(long, value_enum)]
        mode: Mode,
        #[arg(long, env = "CLEAVE_NVML_LIBRARY", value_name = "PATH")]
        nvml_library: Option<PathBuf>,
    },
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Mode {
    Default,
    ExclusiveProcess,
    Prohibited,
}

/// Why the MPS host cannot work.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// A directory or socket of its own could not be made.
    #[error("cannot prepare {path}")]
    Prepare {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A door below this directory could not have its socket.
    #[error(
        "{run} is too long: a socket's path has at most {LONGEST_PATH} bytes, {door} would have {length}; choose a shorter --run-dir"
    )]
    PathTooLong {
        /// `--run-dir`.
        run: PathBuf,
        /// The longest path that would be needed.
        door: PathBuf,
        /// Its length.
        length: usize,
    },
    /// Another MPS host works in this directory.
    #[error("another MPS host works in {0}")]
    Taken(PathBuf),
    /// Signals, inotify or timers are not to be had.
    #[error("the system refuses what the MPS host needs")]
    System(#[from] io::Error),
    /// The compute mode could not be set.
    #[error("cannot set the compute mode")]
    ComputeMode(#[from] nvml::NvmlError),
}

/// What was given on the command line.
#[derive(Debug, Default)]
pub(crate) struct Options {
    pub(crate) mps_control: PathBuf,
    pub(crate) library_path: Option<OsString>,
    /// How to run the subcommand that sets the compute mode.
    pub(crate) compute_mode: Vec<OsString>,
}

/// What all parts of the MPS host share.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) paths: Paths,
    pub(crate) options: Options,
    pub(crate) children: Rc<Children>,
    /// The host goes: daemons go with or without clients.
    pub(crate) stopping: CancellationToken,
    /// For the connections of all doors together: descriptors remain for what each of them needs to be let in.
    pub(crate) connections: Arc<Semaphore>,
    /// For the clients of all doors together that have their place at a server: two descriptors each.
    pub(crate) places: Arc<Semaphore>,
    devices: RefCell<BTreeMap<String, Weak<Device>>>,
    changes: watch::Sender<u64>,
}

impl Host {
    /// Something that the status tells has changed.
    pub(crate) fn changed(&self) {
        self.changes.send_modify(|changes| *changes = changes.wrapping_add(1));
    }

    /// A device that is supervised.
    pub(crate) fn device(&self, name: &str) -> Option<Rc<Device>> {
        self.devices.borrow().get(name).and_then(Weak::upgrade)
    }
}

/// How often the doors' sockets are looked for.
const KEEP_DOORS: Duration = Duration::from_secs(1);
/// Changes within this time are told at once.
const SETTLE: Duration = Duration::from_millis(5);
/// Connections to the host's own socket, which only root can reach.
const CONNECTIONS: usize = 64;
/// A request is one line of at most this.
const LONGEST_REQUEST: u64 = 64 * 1024;
/// A connection that asks nothing for so long is closed; a reader that does not read, sooner.
const IDLE: Duration = Duration::from_secs(300);
/// For a reply to be taken.
const REPLY: Duration = Duration::from_secs(5);

/// Runs until SIGTERM or SIGINT.
///
/// `subcommand` is what this program's own command line has before [`HostArgs`]: nothing, where it is the MPS host and no more.
///
/// Wants a current-thread runtime. Reaps every child of this process: there can be one in a process, and no other children.
///
/// # Errors
/// [`HostError`], where it cannot start. What goes wrong later is told in the status.
pub async fn run(args: HostArgs, subcommand: Option<&str>) -> Result<(), HostError> {
    if let Some(HostCommand::ComputeMode { device, mode, nvml_library }) = &args.command {
        return set_compute_mode(nvml_library.as_deref(), device, *mode);
    }
    LocalSet::new().run_until(serve(args, subcommand)).await
}

fn set_compute_mode(library: Option<&Path>, device: &str, mode: Mode) -> Result<(), HostError> {
    let mode = match mode {
        Mode::Default => nvml::ComputeMode::Default,
        Mode::ExclusiveProcess => nvml::ComputeMode::ExclusiveProcess,
        Mode::Prohibited => nvml::ComputeMode::Prohibited,
    };
    let [default, exclusive, prohibited] = compute_mode::MODES;
    let former = match nvml::set_compute_mode(library, device, mode)? {
        nvml::ComputeMode::Default => default,
        nvml::ComputeMode::ExclusiveProcess => exclusive,
        nvml::ComputeMode::Prohibited => prohibited,
    };
    writeln!(io::stdout(), "{former}").map_err(HostError::System)
}

async fn serve(args: HostArgs, subcommand: Option<&str>) -> Result<(), HostError> {
    let PlaceArgs { run_dir, mps_control, mps_library_path, nvml_library } = args.place;
    let paths = Paths::new(run_dir);
    let lock = prepare(&paths)?;
    let descriptors = raise_descriptor_limit();
    let mut compute_mode = vec![std::env::current_exe()?.into_os_string()];
    compute_mode.extend(subcommand.map(OsString::from));
    compute_mode.push("compute-mode".into());
    if let Some(library) = nvml_library {
        compute_mode.extend(["--nvml-library".into(), library.into_os_string()]);
    }
    let host = Rc::new(Host {
        paths,
        options: Options { mps_control, library_path: mps_library_path, compute_mode },
        children: Children::start()?,
        stopping: CancellationToken::new(),
        connections: Arc::new(Semaphore::new(descriptors / 6)),
        places: Arc::new(Semaphore::new(descriptors / 6)),
        devices: RefCell::default(),
        changes: watch::Sender::new(0),
    });
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let node = Rc::new(Node::new(Rc::clone(&host)));
    // Watched before it is read for the first time: nothing written in between is missed.
    let mut events = Writes::of(&host.paths.mps())?;
    let listener = node.listen()?;
    tokio::task::spawn_local(Rc::clone(&node).answer(listener));
    let writer = tokio::task::spawn_local(Rc::clone(&node).keep_status());
    node.read_desired();
    node.sweep().await;
    loop {
        tokio::select! {
            // Cancel-safe: signals and events stay queued.
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            () = sleep(KEEP_DOORS) => node.tidy(),
            written = events.next() => {
                written?;
                node.read_desired();
            }
        }
    }
    tracing::info!("stopping");
    node.stop().await;
    writer.abort();
    node.write_last_status();
    drop(lock);
    Ok(())
}

/// Makes the directories, and takes the lock that only one host has.
fn prepare(paths: &Paths) -> Result<OwnedFd, HostError> {
    let longest = paths.door(&"f".repeat(32)).with_extension("new");
    let length = longest.as_os_str().len();
    if length > LONGEST_PATH {
        return Err(HostError::PathTooLong { run: paths.run().to_owned(), door: longest, length });
    }
    for (path, mode) in [(paths.run().to_owned(), 0o755), (paths.allocations(), 0o755), (paths.mps(), 0o700)] {
        let made = std::fs::DirBuilder::new().recursive(true).mode(mode).create(&path);
        made.map_err(|source| HostError::Prepare { path: path.clone(), source })?;
    }
    let path = paths.mps();
    let failed = |source| HostError::Prepare { path: path.clone(), source };
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).map_err(failed)?;
    let directory = std::fs::File::open(&path).map_err(failed)?;
    match rustix::fs::flock(&directory, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(directory.into()),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(HostError::Taken(path)),
        Err(error) => Err(failed(error.into())),
    }
}

/// Doors keep descriptors for each client, and the MPS servers, which inherit this, want 16,384. Returns how many there may be.
fn raise_descriptor_limit() -> usize {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let most = limit.maximum.unwrap_or(u64::MAX).min(65_536);
    let mut current = limit.current.unwrap_or(most);
    if current < most {
        let raised = Rlimit { current: Some(most), maximum: limit.maximum };
        match rustix::process::setrlimit(Resource::Nofile, raised) {
            Ok(()) => current = most,
            Err(error) => tracing::warn!(%error, "the limit of open files could not be raised"),
        }
    }
    usize::try_from(current).unwrap_or(usize::MAX).min(65_536)
}

/// Tells of each file that was written or renamed in a directory.
struct Writes(AsyncFd<OwnedFd>);

impl Writes {
    fn of(directory: &Path) -> io::Result<Self> {
        let fd = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC)?;
        inotify::add_watch(&fd, directory, inotify::WatchFlags::MOVED_TO | inotify::WatchFlags::CLOSE_WRITE)?;
        watched(fd).map(Self)
    }

    /// Returns once the desired file, or something that the kernel did not tell in full, was written.
    async fn next(&mut self) -> io::Result<()> {
        loop {
            let mut ready = self.0.readable().await?;
            let mut space = [MaybeUninit::uninit(); 4096];
            let mut events = inotify::Reader::new(self.0.get_ref(), &mut space);
            let mut written = false;
            loop {
                match events.next() {
                    Ok(event) => {
                        let lost = event.events().contains(inotify::ReadFlags::QUEUE_OVERFLOW);
                        written |= lost || event.file_name().is_some_and(|name| name.to_bytes() == b"desired.json");
                    }
                    Err(rustix::io::Errno::AGAIN) => break ready.clear_ready(),
                    Err(rustix::io::Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            if written {
                return Ok(());
            }
        }
    }
}

/// What runs on this node.
struct Node {
    host: Rc<Host>,
    desired: RefCell<Desired>,
    /// Hash of the file last acted upon.
    acted: RefCell<String>,
    error: RefCell<Option<String>>,
    devices: RefCell<BTreeMap<String, Supervised>>,
    doors: RefCell<BTreeMap<String, Rc<Door>>>,
    /// Doors that could not be opened, and why.
    closed: RefCell<BTreeMap<String, String>>,
}

struct Supervised {
    device: Rc<Device>,
    task: JoinHandle<()>,
}

impl Node {
    fn new(host: Rc<Host>) -> Self {
        Self {
            host,
            desired: RefCell::new(Desired { version: VERSION, ..Desired::default() }),
            acted: RefCell::default(),
            error: RefCell::default(),
            devices: RefCell::default(),
            doors: RefCell::default(),
            closed: RefCell::default(),
        }
    }

    /// Reads what is wanted and acts on it. What cannot be read changes nothing.
    fn read_desired(self: &Rc<Self>) {
        let path = self.host.paths.desired();
        let read = match std::fs::read(&path) {
            // Before the agent wrote anything there is nothing to say.
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.acted.borrow().is_empty() => return,
            Err(error) => Err(format!("cannot read {}: {error}", path.display())),
            Ok(bytes) => Desired::parse(&bytes).map_err(|invalid| invalid.to_string()),
        };
        let error = match read {
            Ok(desired) => {
                self.act(desired);
                None
            }
            Err(error) => {
                tracing::error!(error, "what is wanted cannot be acted upon: everything stays as it is");
                Some(error)
            }
        };
        *self.error.borrow_mut() = error;
        self.host.changed();
    }

    fn act(self: &Rc<Self>, new: Desired) {
        let step = decide::step(&self.desired.borrow(), &new);
        let hash = new.hash();
        if step != decide::Step::default() {
            tracing::info!(
                desired = hash,
                close = ?step.close, stop = ?step.stop, run = ?step.run, open = ?step.open, limit = ?step.limit,
                "acting"
            );
        }
        for id in &step.close {
            self.closed.borrow_mut().remove(id);
            if let Some(door) = self.doors.borrow_mut().remove(id) {
                door.close();
            }
        }
        for device in &step.stop {
            if let Some(supervised) = self.devices.borrow().get(device) {
                supervised.device.want(None);
            }
        }
        for device in &step.run {
            self.supervise(device).want(new.daemons.get(device).cloned());
        }
        for id in step.open.iter().chain(&step.limit) {
            let Some(allocation) = new.allocations.get(id) else { continue };
            let open = self.doors.borrow().get(id).cloned();
            if let Some(door) = open {
                door.limit(allocation);
                continue;
            }
            let device = self.supervise(&allocation.device);
            match Door::open(id, allocation, device, &self.host) {
                Ok(door) => {
                    self.closed.borrow_mut().remove(id);
                    self.doors.borrow_mut().insert(id.clone(), door);
                }
                Err(error) => {
                    let why = format!("the door of {id} cannot be opened: {error}");
                    tracing::error!(allocation = id, %error, "the door cannot be opened");
                    self.closed.borrow_mut().insert(id.clone(), why);
                }
            }
        }
        *self.desired.borrow_mut() = new;
        *self.acted.borrow_mut() = hash;
    }

    /// The device, with a task that keeps its daemon as it is wanted. A door may be there before its daemon is wanted.
    fn supervise(self: &Rc<Self>, name: &str) -> Rc<Device> {
        if let Some(supervised) = self.devices.borrow().get(name)
            && !supervised.task.is_finished()
        {
            return Rc::clone(&supervised.device);
        }
        let device = Device::new(name, Rc::clone(&self.host));
        self.host.devices.borrow_mut().insert(name.to_owned(), Rc::downgrade(&device));
        let task = tokio::task::spawn_local(Rc::clone(&device).supervise());
        self.devices.borrow_mut().insert(name.to_owned(), Supervised { device: Rc::clone(&device), task });
        device
    }
}

impl Node {
    /// Removes what an earlier host left: doors that nobody wants, compute modes that were to be put back.
    async fn sweep(&self) {
        let allocations = std::fs::read_dir(self.host.paths.allocations()).into_iter().flatten().flatten();
        for id in allocations.filter_map(|entry| entry.file_name().into_string().ok()) {
            let wanted = self.desired.borrow().allocations.contains_key(&id);
            if !wanted && std::fs::remove_file(self.host.paths.door(&id)).is_ok() {
                tracing::info!(allocation = id, "removed a door that an earlier host left");
            }
        }
        for device in compute_mode::changed(&self.host.paths.mps()) {
            if self.devices.borrow().contains_key(&device) {
                continue;
            }
            if let Err(error) = compute_mode::restore(&self.host, &device).await {
                tracing::error!(device, error, "a compute mode that an earlier host set could not be put back");
            }
        }
    }

    /// Makes doors anew that somebody removed, and forgets devices that nothing is left of.
    fn tidy(&self) {
        for door in self.doors.borrow().values() {
            door.keep();
        }
        self.devices.borrow_mut().retain(|name, Supervised { device, task }| {
            let used = device.is_present() || self.doors.borrow().values().any(|door| door.is_of(name));
            if !used {
                task.abort();
                self.host.devices.borrow_mut().remove(name);
            }
            used
        });
    }

    fn status(&self) -> Status {
        let closed = self.closed.borrow();
        let error = self.error.borrow();
        let errors: Vec<&str> = error.iter().chain(closed.values()).map(String::as_str).collect();
        Status {
            version: VERSION,
            pid: std::process::id(),
            desired: self.acted.borrow().clone(),
            daemons: self
                .devices
                .borrow()
                .iter()
                .filter(|(_, supervised)| supervised.device.is_present())
                .map(|(name, supervised)| (name.clone(), supervised.device.status()))
                .collect(),
            allocations: self.doors.borrow().iter().map(|(id, door)| (id.clone(), door.status())).collect(),
            error: (!errors.is_empty()).then(|| errors.join("; ")),
        }
    }

    /// Writes the status whenever it has changed.
    async fn keep_status(self: Rc<Self>) {
        let mut changes = self.host.changes.subscribe();
        let mut written = None;
        loop {
            let status = self.status();
            if written.as_ref() != Some(&status) {
                written = write_status(&self.host.paths, &status).then_some(status);
            }
            if changes.changed().await.is_err() {
                return;
            }
            sleep(SETTLE).await;
            changes.mark_unchanged();
        }
    }

    /// Doors close, daemons quit, all at once; each has its own deadlines.
    async fn stop(&self) {
        for door in std::mem::take(&mut *self.doors.borrow_mut()).values() {
            door.close();
        }
        self.host.stopping.cancel();
        let supervised = std::mem::take(&mut *self.devices.borrow_mut());
        for (name, Supervised { device: _, task }) in supervised {
            if task.await.is_err() {
                tracing::error!(device = name, "the daemon's task failed");
            }
        }
        if let Err(error) = std::fs::remove_file(self.host.paths.socket()) {
            tracing::warn!(%error, "the socket could not be removed");
        }
    }

    fn write_last_status(&self) {
        let status = Status { pid: 0, error: Some("the MPS host was stopped".to_owned()), ..self.status() };
        write_status(&self.host.paths, &status);
    }

    fn listen(&self) -> Result<UnixListener, HostError> {
        let path = self.host.paths.socket();
        let failed = |source| HostError::Prepare { path: path.clone(), source };
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        let listener = UnixListener::bind(&path).map_err(failed)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
        Ok(listener)
    }

    async fn answer(self: Rc<Self>, listener: UnixListener) {
        let connections = Arc::new(Semaphore::new(CONNECTIONS));
        loop {
            let Ok(permit) = Arc::clone(&connections).acquire_owned().await else { return };
            match listener.accept().await {
                Ok((stream, _)) => {
                    let node = Rc::clone(&self);
                    tokio::task::spawn_local(async move {
                        if let Err(error) = node.converse(stream).await {
                            tracing::debug!(%error, "a connection to the MPS host's socket failed");
                        }
                        drop(permit);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "no connection to the MPS host's socket can be accepted");
                    sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    async fn converse(&self, stream: UnixStream) -> io::Result<()> {
        let (reader, mut writer) = stream.into_split();
        let mut reader = BufReader::new(reader);
        let mut line = Vec::new();
        loop {
            line.clear();
            let mut limited = (&mut reader).take(LONGEST_REQUEST);
            match timeout(IDLE, limited.read_until(b'\n', &mut line)).await {
                Ok(Ok(0)) | Err(_) => return Ok(()),
                Ok(read) => read?,
            };
            let whole = line.ends_with(b"\n");
            let reply = match serde_json::from_slice(&line) {
                Ok(request) if whole => self.reply(request).await,
                Ok(_) => Reply::Error { message: "the request is not ended by a newline".to_owned() },
                Err(error) => Reply::Error { message: format!("not a request: {error}") },
            };
            let mut text = serde_json::to_vec(&reply).map_err(io::Error::other)?;
            text.push(b'\n');
            timeout(REPLY, writer.write_all(&text)).await.map_err(|_| io::ErrorKind::TimedOut)??;
            if !whole {
                // What follows is the rest of a line that was too long.
                return Ok(());
            }
        }
    }

    async fn reply(&self, request: Request) -> Reply {
        match request {
            Request::Status => Reply::Status(self.status()),
            Request::Await { allocation, timeout_ms } => {
                match timeout(Duration::from_millis(timeout_ms), self.ready(&allocation)).await {
                    Ok(()) => Reply::Done,
                    Err(_) => Reply::Error { message: self.why_not_ready(&allocation).unwrap_or_default() },
                }
            }
            Request::Terminate { device, pid } => match self.host.device(&device) {
                None => Reply::Error { message: format!("there is no MPS daemon for {device}") },
                Some(device) => match device.terminate(pid).await {
                    Ok(Terminated::Done) => Reply::Done,
                    Ok(Terminated::NoContext) => Reply::NoContext,
                    Err(message) => Reply::Error { message },
                },
            },
        }
    }

    async fn ready(&self, allocation: &str) {
        let mut changes = self.host.changes.subscribe();
        while self.why_not_ready(allocation).is_some() && changes.changed().await.is_ok() {}
    }

    /// What an allocation's clients wait for; `None`: nothing.
    fn why_not_ready(&self, allocation: &str) -> Option<String> {
        if let Some(why) = self.closed.borrow().get(allocation) {
            return Some(why.clone());
        }
        match self.doors.borrow().get(allocation) {
            Some(door) => door.is_ready().err(),
            None => match self.error.borrow().as_ref() {
                Some(error) => Some(format!("allocation {allocation} is not known yet: {error}")),
                None => Some(format!("allocation {allocation} is not known yet")),
            },
        }
    }
}

/// Replaces the status file; whether that went well. Where not, the next change tries again.
fn write_status(paths: &Paths, status: &Status) -> bool {
    let path = paths.status();
    let written = serde_json::to_vec(status).map_err(io::Error::other).and_then(|text| replace(&path, &text));
    if let Err(error) = &written {
        tracing::error!(path = %path.display(), %error, "the status cannot be written");
    }
    written.is_ok()
}

/// Replaces a file: at any time there is the old one or the new one.
pub(crate) fn replace(path: &Path, text: &[u8]) -> io::Result<()> {
    let building = path.with_extension("new");
    let mut file = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&building)?;
    file.write_all(text)?;
    file.sync_all()?;
    std::fs::rename(&building, path)
}
