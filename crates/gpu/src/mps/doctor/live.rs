//! A daemon of the doctor's own on a GPU that nobody uses, and what programs see under it. All of it goes when it is over.
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::fs;
use std::future::Future;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command as Process};
use tokio::time::{Instant, sleep, timeout};

use super::NVML;
use super::client::{Program, Running, Start, Trouble};
use super::judge::{Asked, Bound, Ended, Log, Lowered, Memory, Observed, Outcome, Sight};
use crate::mps::control::{self, ANSWER, ControlError};
use crate::mps::daemon::{self, DAEMON_START, QUIT_SECONDS, SERVER_START};
use crate::mps::process;
use crate::mps::protocol::{self, Command, LogEvent, ServerState, Unexpected};
use crate::nvml::{NvmlError, Worker};

/// Percentages whose SMs are looked at.
const PERCENTAGES: [u8; 9] = [1, 10, 14, 20, 33, 50, 75, 90, 100];
/// The thread percentage that programs run under where nothing else is said: fewer SMs than all show that they came through MPS.
const PERCENT: u8 = 50;
/// And a lower one.
const LOW_PERCENT: u8 = 20;
/// Somebody who is not root, and may own nothing.
const NOBODY: u32 = 65_534;
/// How long MPS, its log or NVML may take to tell of a client that comes or goes.
const TOLD: Duration = Duration::from_secs(3);
const LOOK: Duration = Duration::from_millis(20);
/// `terminate_client` answers in milliseconds.
const TERMINATE: Duration = Duration::from_secs(10);
/// Why nothing is tried with programs.
const NO_PROGRAM: &str = "needs a CUDA program (--client)";

/// What is tried on, and with what.
pub(super) struct Setup {
    pub(super) uuid: String,
    pub(super) memory_mib: u64,
    pub(super) control: PathBuf,
    pub(super) library_path: Option<std::ffi::OsString>,
    pub(super) program: Option<Program>,
    pub(super) nvml: Worker,
    /// Others' processes can be seen.
    pub(super) sees_others: bool,
}

/// Why a look came to nothing.
enum Stop {
    NotTried(String),
    Failed(String),
}

impl From<Trouble> for Stop {
    fn from(trouble: Trouble) -> Self {
        match &trouble {
            Trouble::Program(_) => Self::NotTried(trouble.to_string()),
            Trouble::Cuda(_) | Trouble::Silent => Self::Failed(trouble.to_string()),
        }
    }
}

impl From<ControlError> for Stop {
    fn from(error: ControlError) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<Unexpected> for Stop {
    fn from(error: Unexpected) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::NotTried(format!("a file cannot be made: {error}"))
    }
}

impl From<NvmlError> for Stop {
    fn from(error: NvmlError) -> Self {
        Self::Failed(error.to_string())
    }
}

/// What the daemon has logged.
#[derive(Debug, Default)]
struct Logged {
    version: Option<u32>,
    ready: BTreeSet<u32>,
    came: BTreeSet<u32>,
    went: BTreeSet<u32>,
    last: String,
}

/// A daemon with a folder of its own.
pub(super) struct Daemon {
    folder: PathBuf,
    child: Child,
    log: Arc<Mutex<Logged>>,
}

impl Daemon {
    /// Starts it as the MPS host does.
    pub(super) fn start(setup: &Setup) -> io::Result<Self> {
        let folder = std::env::temp_dir().join(format!("cleave-doctor-{}", std::process::id()));
        // Programs of other users come through, and see nothing.
        fs::DirBuilder::new().mode(0o711).create(&folder)?;
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o711))?;
        match Self::start_in(&folder, setup) {
            Ok((child, log)) => Ok(Self { folder, child, log }),
            Err(error) => {
                let _ = fs::remove_dir_all(&folder);
                Err(error)
            }
        }
    }

    fn start_in(folder: &Path, setup: &Setup) -> io::Result<(Child, Arc<Mutex<Logged>>)> {
        for name in ["pipe", "link", "empty"] {
            fs::DirBuilder::new().mode(0o711).create(folder.join(name))?;
            fs::set_permissions(folder.join(name), fs::Permissions::from_mode(0o711))?;
        }
        let tool = daemon::tool(&setup.control, setup.library_path.as_deref(), &folder.join("pipe"), &setup.uuid);
        let mut command = Process::from(tool);
        command.args(["-f", "-multiuser-server"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn()?;
        let log = Arc::default();
        if let Some(output) = child.stdout.take() {
            tokio::spawn(read_log(output, Arc::clone(&log)));
        }
        if let Some(output) = child.stderr.take() {
            tokio::spawn(read_log(output, Arc::clone(&log)));
        }
        Ok((child, log))
    }

    fn pipe(&self) -> PathBuf {
        self.folder.join("pipe")
    }

    /// Waits until it answers: after how long, and whether it greets as known.
    pub(super) async fn answers(&mut self) -> Result<(u128, bool), String> {
        let begun = Instant::now();
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                // Its last words are on their way.
                sleep(LOOK * 5).await;
                let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
                return Err(format!("it ends ({status}): {}", log.last));
            }
            match control::is_known(&self.pipe()).await {
                Ok(known) => return Ok((begun.elapsed().as_millis(), known)),
                Err(ControlError::Io(_) | ControlError::Closed) if begun.elapsed() < DAEMON_START => sleep(LOOK).await,
                Err(error) => return Err(error.to_string()),
            }
        }
    }

    /// Ends it, and whatever it has left.
    pub(super) async fn end(mut self) {
        let quit = Command::Quit { seconds: QUIT_SECONDS };
        let deadline = Duration::from_secs(u64::from(QUIT_SECONDS)) + ANSWER;
        if control::ask(&self.pipe(), &quit, deadline).await.is_err()
            || timeout(ANSWER, self.child.wait()).await.is_err()
        {
            let _ = self.child.kill().await;
        }
        process::clear(&self.pipe()).await;
        if let Err(error) = fs::remove_dir_all(&self.folder) {
            tracing::warn!(folder = %self.folder.display(), %error, "the doctor's folder is left behind");
        }
    }
}

async fn read_log(output: impl AsyncRead + Unpin, log: Arc<Mutex<Logged>>) {
    let mut lines = BufReader::new(output).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let line = protocol::log_line(&line);
        tracing::debug!(source = line.source, pid = line.pid, "{}", line.text);
        let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
        match line.event {
            LogEvent::Version(version) => log.version = Some(version),
            LogEvent::ServerReady(server) => drop(log.ready.insert(server)),
            LogEvent::ClientConnected(client) => drop(log.came.insert(client)),
            LogEvent::ClientGone(client) => drop(log.went.insert(client)),
            LogEvent::Chatter => continue,
            _ => {}
        }
        log.last = crate::mps::beginning(line.text);
    }
}

/// What is looked at, under one daemon.
struct Look<'a> {
    setup: &'a Setup,
    folder: &'a Path,
    log: &'a Mutex<Logged>,
    limit_mib: u64,
    server: Cell<Option<u32>>,
    /// The first client that ran.
    client: Cell<Option<u32>>,
    /// Why nothing more is tried.
    over: RefCell<Option<String>>,
}

/// Looks at all that can be looked at, and adds it to what was seen.
pub(super) async fn look(setup: &Setup, daemon: &Daemon, seen: &mut Observed) {
    let look = Look {
        setup,
        folder: &daemon.folder,
        log: &daemon.log,
        // Not so little that a context's own part counts, nor more than any GPU has to give.
        limit_mib: (setup.memory_mib / 8).clamp(2048, 8192),
        server: Cell::new(None),
        client: Cell::new(None),
        over: RefCell::new(None),
    };
    seen.commands = look.step(look.commands()).await;
    seen.unprivileged = look.step(look.unprivileged()).await;
    let known = look.step(look.known()).await;
    seen.by_mps = known.map(|known| known.0);
    seen.by_nvml = if setup.sees_others {
        known.map(|known| known.1)
    } else {
        Outcome::NotTried("needs the host's process ids".to_owned())
    };
    seen.bound = look.step(look.bound()).await;
    seen.rounding = look.step(look.rounding()).await;
    seen.lowered = look.step(look.lowered()).await;
    seen.memory = look.step(look.memory()).await;
    seen.escape = look.step(look.escape()).await;
    seen.users = look.step(look.users()).await;
    seen.link = look.step(look.link()).await;
    seen.plain = look.step(look.plain()).await;
    seen.ended = look.step(look.ended()).await;
    seen.defaults = look.step(look.defaults()).await;
    // Last: what it tells of clients comes after them.
    seen.log = Outcome::Seen(look.logged().await);
}

impl Look<'_> {
    async fn step<T>(&self, work: impl Future<Output = Result<T, Stop>>) -> Outcome<T> {
        if self.over.borrow().is_none() {
            *self.over.borrow_mut() = self.somebody_else().await;
        }
        if let Some(why) = &*self.over.borrow() {
            return Outcome::NotTried(why.clone());
        }
        match work.await {
            Ok(seen) => Outcome::Seen(seen),
            Err(Stop::NotTried(why)) => Outcome::NotTried(why),
            Err(Stop::Failed(why)) => Outcome::Failed(why),
        }
    }

    /// Whether somebody else has come to the GPU meanwhile, who must not be disturbed.
    async fn somebody_else(&self) -> Option<String> {
        if !self.setup.sees_others {
            return None;
        }
        let deadline = Instant::now() + TOLD;
        loop {
            let uuid = self.setup.uuid.clone();
            match self.setup.nvml.call(NVML, move |gpus| gpus.processes(&uuid)).await {
                Err(error) => return Some(format!("NVML no longer says who uses the GPU: {error}")),
                Ok(processes) => {
                    let other = processes.iter().find(|process| !self.is_ours(process.pid))?;
                    // One of ours that has just ended may be listed still.
                    if Instant::now() > deadline {
                        return Some(format!("process {} has come to the GPU meanwhile", other.pid));
                    }
                }
            }
            sleep(LOOK).await;
        }
    }

    fn is_ours(&self, pid: u32) -> bool {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        self.server.get() == Some(pid) || log.ready.contains(&pid)
    }

    fn pipe(&self) -> PathBuf {
        self.folder.join("pipe")
    }

    async fn ask(&self, command: Command) -> Result<String, Stop> {
        Ok(control::ask(&self.pipe(), &command, ANSWER).await?)
    }

    /// Asks, and keeps the answer.
    async fn keep(&self, asked: &mut Vec<Asked>, command: Command, set: Option<u64>) -> Result<(), Stop> {
        let answer = self.ask(command.clone()).await?;
        asked.push(Asked { command, answer, set });
        Ok(())
    }

    fn server(&self) -> Result<u32, Stop> {
        self.server.get().ok_or_else(|| Stop::NotTried("there is no MPS server".to_owned()))
    }

    fn program(&self) -> Result<&Program, Stop> {
        self.setup.program.as_ref().ok_or_else(|| Stop::NotTried(NO_PROGRAM.to_owned()))
    }

    fn here(&self) -> Start {
        Start { pipe: self.pipe(), ..Start::default() }
    }

    /// What a program sees that is bound by the server's limits alone.
    async fn sight(&self) -> Result<Sight, Stop> {
        Ok(self.program()?.sight(&self.here()).await?)
    }

    /// A program that runs until it is let go.
    async fn running(&self, allocate_mib: Option<u64>) -> Result<Running, Stop> {
        Ok(self.program()?.start(&Start { waits: true, allocate_mib, ..self.here() }).await?)
    }

    /// Limits of whoever connects next.
    async fn limit(&self, percent: u8, mib: Option<u64>) -> Result<(), Stop> {
        // Before anything is asked: without a program there is nobody to be limited.
        self.program()?;
        let server = self.server()?;
        let is = self.ask(Command::SetThreads { server, percent }).await?;
        if !protocol::is_percentage(&is, percent) {
            return Err(Unexpected::new(&is).into());
        }
        let is = self.ask(Command::SetMemory { server, mib }).await?;
        if is.trim().is_empty() { Ok(()) } else { Err(Unexpected::new(&is).into()) }
    }

    async fn usual(&self) -> Result<(), Stop> {
        self.limit(PERCENT, Some(self.limit_mib)).await
    }

    fn usually(&self, sight: Sight) -> Bound {
        Bound { percent: PERCENT, limit_mib: self.limit_mib, sight }
    }

    async fn commands(&self) -> Result<Vec<Asked>, Stop> {
        let mut asked = Vec::new();
        let limit = Some(self.limit_mib);
        self.keep(&mut asked, Command::SetDefaultThreads(PERCENT), None).await?;
        self.keep(&mut asked, Command::GetDefaultThreads, Some(PERCENT.into())).await?;
        self.keep(&mut asked, Command::SetDefaultMemory(self.limit_mib), None).await?;
        self.keep(&mut asked, Command::GetDefaultMemory, limit).await?;
        self.keep(&mut asked, Command::StartServer { uid: 0 }, None).await?;
        let server = self.ready().await?;
        self.server.set(Some(server));
        self.keep(&mut asked, Command::ServerList, None).await?;
        self.keep(&mut asked, Command::ServerStatus(server), None).await?;
        self.keep(&mut asked, Command::SetThreads { server, percent: LOW_PERCENT }, None).await?;
        self.keep(&mut asked, Command::SetMemory { server, mib: limit }, None).await?;
        self.keep(&mut asked, Command::GetMemory { server }, limit).await?;
        self.keep(&mut asked, Command::SetMemory { server, mib: None }, None).await?;
        self.keep(&mut asked, Command::GetMemory { server }, None).await?;
        self.keep(&mut asked, Command::Clients(server), None).await?;
        Ok(asked)
    }

    /// The server, once it serves.
    async fn ready(&self) -> Result<u32, Stop> {
        let deadline = Instant::now() + SERVER_START;
        while Instant::now() < deadline {
            if let Some(&server) = protocol::pids(&self.ask(Command::ServerList).await?)?.first()
                && protocol::server_state(&self.ask(Command::ServerStatus(server)).await?)? == ServerState::Active
            {
                return Ok(server);
            }
            sleep(LOOK).await;
        }
        Err(Stop::Failed(format!("no MPS server became ready within {} s", SERVER_START.as_secs())))
    }

    async fn unprivileged(&self) -> Result<Vec<Asked>, Stop> {
        let server = self.server()?;
        let mut asked = Vec::new();
        for command in [
            Command::SetDefaultThreads(PERCENT),
            Command::SetDefaultMemory(self.limit_mib),
            Command::SetThreads { server, percent: PERCENT },
            Command::SetMemory { server, mib: Some(self.limit_mib) },
            // No client has the server's pid.
            Command::Terminate { server, client: server },
        ] {
            let answer = control::ask_over(&self.pipe().join("control"), &command, ANSWER).await?;
            asked.push(Asked { command, answer, set: None });
        }
        Ok(asked)
    }

    /// Whether MPS lists a client, and NVML as one of MPS.
    async fn known(&self) -> Result<(bool, Option<bool>), Stop> {
        self.limit(100, None).await?;
        let server = self.server()?;
        let client = self.running(None).await?;
        self.client.set(Some(client.pid));
        let deadline = Instant::now() + TOLD;
        let known = loop {
            let by_mps = protocol::pids(&self.ask(Command::Clients(server)).await?)?.contains(&client.pid);
            let uuid = self.setup.uuid.clone();
            let tenants = self.setup.nvml.call(NVML, move |gpus| gpus.tenants(&uuid)).await?;
            let listed = tenants.processes.iter().any(|process| process.pid == client.pid && process.mps);
            if (by_mps && listed) || Instant::now() > deadline {
                break (by_mps, tenants.tells_clients.then_some(listed));
            }
            sleep(LOOK).await;
        };
        client.end().await;
        Ok(known)
    }

    async fn bound(&self) -> Result<[Bound; 2], Stop> {
        self.usual().await?;
        let first = self.running(None).await?;
        let low = self.limit_mib / 2;
        self.limit(LOW_PERCENT, Some(low)).await?;
        let second = Bound { percent: LOW_PERCENT, limit_mib: low, sight: self.sight().await? };
        let first_saw = self.usually(first.sight);
        first.end().await;
        Ok([first_saw, second])
    }

    async fn rounding(&self) -> Result<Vec<(u8, u32)>, Stop> {
        let mut seen = Vec::new();
        for percent in PERCENTAGES {
            self.limit(percent, None).await?;
            seen.push((percent, self.sight().await?.sms));
        }
        Ok(seen)
    }

    async fn asking(&self, percent: u8, mib: u64) -> Result<Sight, Stop> {
        let environment = [
            ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percent.to_string()),
            ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", format!("0={mib}M")),
        ];
        let start = Start { environment: environment.into(), ..self.here() };
        Ok(self.program()?.sight(&start).await?)
    }

    async fn lowered(&self) -> Result<Lowered, Stop> {
        self.usual().await?;
        let set = self.usually(self.sight().await?);
        let asked_more = self.asking(100, self.setup.memory_mib).await?;
        let low = self.limit_mib / 2;
        let sight = self.asking(LOW_PERCENT, low).await?;
        Ok(Lowered { set, asked_more, asked_less: Bound { percent: LOW_PERCENT, limit_mib: low, sight } })
    }

    async fn memory(&self) -> Result<Memory, Stop> {
        self.usual().await?;
        let half = self.program()?.allocate(&self.pipe(), self.limit_mib / 2).await?;
        let all = self.program()?.allocate(&self.pipe(), self.limit_mib).await?;
        Ok(Memory { limit_mib: self.limit_mib, half, all })
    }

    async fn escape(&self) -> Result<Bound, Stop> {
        self.usual().await?;
        let environment = [("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "junk".to_owned())].into();
        let sight = self.program()?.sight(&Start { environment, ..self.here() }).await?;
        Ok(self.usually(sight))
    }

    async fn users(&self) -> Result<Bound, Stop> {
        if !rustix::process::geteuid().is_root() {
            return Err(Stop::NotTried("needs root".to_owned()));
        }
        self.usual().await?;
        let root = self.running(None).await?;
        let sight = self.program()?.sight(&Start { uid: Some(NOBODY), ..self.here() }).await;
        root.end().await;
        match sight {
            Err(trouble @ Trouble::Program(_)) => Err(Stop::NotTried(format!("as user {NOBODY} {trouble}"))),
            sight => Ok(self.usually(sight?)),
        }
    }

    async fn link(&self) -> Result<Bound, Stop> {
        self.usual().await?;
        let pipe = self.folder.join("link");
        fs::hard_link(self.pipe().join("control"), pipe.join("control"))?;
        let sight = self.program()?.sight(&Start { pipe, ..Start::default() }).await?;
        Ok(self.usually(sight))
    }

    async fn plain(&self) -> Result<Result<Sight, i64>, Stop> {
        let start = Start { pipe: self.folder.join("empty"), ..Start::default() };
        match self.program()?.sight(&start).await {
            Ok(sight) => Ok(Ok(sight)),
            Err(Trouble::Cuda(code)) => Ok(Err(code)),
            Err(trouble) => Err(trouble.into()),
        }
    }

    async fn ended(&self) -> Result<Ended, Stop> {
        self.usual().await?;
        let server = self.server()?;
        let mut client = self.running(Some(1)).await?;
        let mut neighbour = self.running(Some(1)).await?;
        let terminate = Command::Terminate { server, client: client.pid };
        let answer = control::ask(&self.pipe(), &terminate, TERMINATE).await?;
        let ended = Ended { answer, client: client.go_on().await?, neighbour: neighbour.go_on().await? };
        client.end().await;
        neighbour.end().await;
        Ok(ended)
    }

    async fn defaults(&self) -> Result<Bound, Stop> {
        self.usual().await?;
        let server = self.server()?;
        self.ask(Command::ShutdownServer { server, force: false }).await?;
        let deadline = Instant::now() + TOLD;
        while !protocol::pids(&self.ask(Command::ServerList).await?)?.is_empty() {
            if Instant::now() > deadline {
                return Err(Stop::Failed("the server does not end when it is told to".to_owned()));
            }
            sleep(LOOK).await;
        }
        Ok(self.usually(self.sight().await?))
    }

    async fn logged(&self) -> Log {
        let deadline = Instant::now() + TOLD;
        loop {
            let told = {
                let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
                let client = self.client.get();
                Log {
                    version: log.version,
                    server_ready: self.server.get().is_some_and(|server| log.ready.contains(&server)),
                    client_came: client.map(|client| log.came.contains(&client)),
                    client_went: client.map(|client| log.went.contains(&client)),
                }
            };
            let complete = told.version.is_some() && told.server_ready && told.client_went != Some(false);
            if complete || Instant::now() > deadline {
                return told;
            }
            sleep(LOOK).await;
        }
    }
}
