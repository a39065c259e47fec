//! What the agent and the MPS host tell each other.
//!
//! The agent writes [`Desired`] to `RUN/mps/desired.json`, atomically (write, fsync, rename); the MPS host answers in
//! `RUN/mps/status.json`, atomically too, and serves [`Request`]s on `RUN/mps/host.sock`, one JSON line each way.
//! `RUN` is a host path, `/run/cleave` unless told otherwise, mounted at the same path in both pods:
//!
//! | path | made by | what |
//! |---|---|---|
//! | `RUN/alloc/<allocation id>/` | agent, before `Allocate` answers | the folder that a container sees, read-only |
//! | `RUN/alloc/<allocation id>/control` | MPS host | the door of that allocation |
//! | `RUN/mps/<device>/` | MPS host | the daemon's own pipe directory; no container sees it |
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The version of these files; a reader refuses a higher one and says so.
pub const VERSION: u32 = 1;

/// What should run on this node: every daemon and every allocation, complete.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Desired {
    /// [`VERSION`] of the writer.
    pub version: u32,
    /// Daemons by device: the UUID of a GPU or of a MIG instance.
    pub daemons: BTreeMap<String, Daemon>,
    /// Allocations by id (lower-case hexadecimal, at most 32 characters).
    pub allocations: BTreeMap<String, Allocation>,
}

/// Why a [`Desired`] cannot be acted upon.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// Not JSON, or not of this shape.
    #[error("the desired file is not readable: {0}")]
    Malformed(String),
    /// Written by a newer agent.
    #[error("the desired file has version {0}; this MPS host knows {VERSION}: upgrade it")]
    Version(u32),
    /// A device's name cannot be a directory's.
    #[error("{0:?} is no device: letters, digits and `-` are expected, at most 80")]
    Device(String),
    /// An allocation's id is not what the agent makes.
    #[error("{0:?} is no allocation id: lower-case hexadecimal is expected, at most 32 characters")]
    AllocationId(String),
    /// An active thread percentage of nothing, or of more than the GPU.
    #[error("{whose}: {threads} is no active thread percentage: 1 to 100 is expected")]
    Threads {
        /// The device or allocation.
        whose: String,
        /// What was asked for.
        threads: u8,
    },
    /// A memory limit of nothing would be none.
    #[error("{0}: a memory limit of 0 MiB would be no limit")]
    Memory(String),
    /// An allocation that may have no client.
    #[error("{0}: at most 0 clients could never run")]
    Clients(String),
    /// A MIG instance has no compute mode.
    #[error("{0}: EXCLUSIVE_PROCESS is for whole GPUs, not for MIG instances")]
    Exclusive(String),
}

impl Desired {
    /// Reads the file's bytes and checks them: what comes out can be acted upon.
    ///
    /// # Errors
    /// [`Invalid`] says what is wrong in the words for [`Status::error`].
    pub fn parse(bytes: &[u8]) -> Result<Self, Invalid> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        // It repeats texts of the file, however long.
        let malformed = |error: serde_json::Error| Invalid::Malformed(super::beginning(&error.to_string()));
        // The version first: of a newer file nothing else can be taken for granted.
        let Versioned { version } = serde_json::from_slice(bytes).map_err(malformed)?;
        if version != VERSION {
            return Err(Invalid::Version(version));
        }
        let desired: Self = serde_json::from_slice(bytes).map_err(malformed)?;
        desired.check()?;
        Ok(desired)
    }

    /// Whether it can be acted upon.
    ///
    /// # Errors
    /// [`Invalid`] says the first thing that is wrong.
    pub fn check(&self) -> Result<(), Invalid> {
        for (device, daemon) in &self.daemons {
            check_device(device)?;
            check_limits(device, daemon.default_threads, daemon.default_memory_mib)?;
            if daemon.exclusive && device.starts_with("MIG-") {
                return Err(Invalid::Exclusive(device.clone()));
            }
        }
        for (id, allocation) in &self.allocations {
            let hexadecimal = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
            if id.is_empty() || id.len() > 32 || !id.bytes().all(hexadecimal) {
                return Err(Invalid::AllocationId(super::beginning(id)));
            }
            check_device(&allocation.device)?;
            check_limits(id, allocation.threads, allocation.memory_mib)?;
            if allocation.max_clients == Some(0) {
                return Err(Invalid::Clients(id.clone()));
            }
        }
        Ok(())
    }

    /// What [`Status::desired`] says once this was acted upon: 32 hexadecimal digits of the content.
    pub fn hash(&self) -> String {
        // Maps are ordered: equal content is equal text. Nothing in it can fail to be JSON.
        let text = serde_json::to_vec(self).unwrap_or_default();
        Sha256::digest(text).iter().take(16).fold(String::new(), |mut digits, byte| {
            let _ = write!(digits, "{byte:02x}");
            digits
        })
    }
}

fn check_device(device: &str) -> Result<(), Invalid> {
    let fits = !device.is_empty() && device.len() <= 80;
    if fits && device.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') {
        Ok(())
    } else {
        Err(Invalid::Device(super::beginning(device)))
    }
}

fn check_limits(whose: &str, threads: Option<u8>, memory_mib: Option<u64>) -> Result<(), Invalid> {
    if let Some(threads) = threads.filter(|threads| !(1..=100).contains(threads)) {
        return Err(Invalid::Threads { whose: whose.to_owned(), threads });
    }
    if memory_mib == Some(0) {
        return Err(Invalid::Memory(whose.to_owned()));
    }
    Ok(())
}

/// Where things are below `RUN`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paths {
    run: PathBuf,
}

impl Paths {
    /// Below `run`, which both pods mount at the same path.
    pub fn new(run: impl Into<PathBuf>) -> Self {
        Self { run: run.into() }
    }

    /// `RUN/mps`: of the MPS host; only root enters it.
    pub fn mps(&self) -> PathBuf {
        self.run.join("mps")
    }

    /// What should run; the agent writes it.
    pub fn desired(&self) -> PathBuf {
        self.mps().join("desired.json")
    }

    /// What runs; the MPS host writes it.
    pub fn status(&self) -> PathBuf {
        self.mps().join("status.json")
    }

    /// Where the MPS host answers [`Request`]s.
    pub fn socket(&self) -> PathBuf {
        self.mps().join("host.sock")
    }

    /// A daemon's own pipe directory.
    pub fn pipe(&self, device: &str) -> PathBuf {
        self.mps().join(device)
    }

    /// `RUN/alloc`: a folder for each allocation.
    pub fn allocations(&self) -> PathBuf {
        self.run.join("alloc")
    }

    /// The folder that a container of the allocation sees.
    pub fn allocation(&self, id: &str) -> PathBuf {
        self.allocations().join(id)
    }

    /// The door of an allocation.
    pub fn door(&self, id: &str) -> PathBuf {
        self.allocation(id).join("control")
    }

    /// `RUN` itself.
    pub fn run(&self) -> &Path {
        &self.run
    }
}

/// One MPS control daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Daemon {
    /// Clients of several uids share one server (`-multiuser-server`).
    pub multi_user: bool,
    /// Put the GPU in `EXCLUSIVE_PROCESS` while the daemon runs, and back afterwards; false leaves it alone (always so for MIG).
    pub exclusive: bool,
    /// `set_default_active_thread_percentage`: what a client gets that no door limits, 1 to 100.
    pub default_threads: Option<u8>,
    /// `set_default_device_pinned_mem_limit`, MiB.
    pub default_memory_mib: Option<u64>,
}

/// The limits of one allocation, set by its door for each client that connects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Allocation {
    /// The device whose daemon serves it.
    pub device: String,
    /// Active thread percentage, 1 to 100; none is no limit.
    pub threads: Option<u8>,
    /// Pinned device memory, MiB; none is no limit. MPS binds it for each process.
    pub memory_mib: Option<u64>,
    /// Most clients at once; none is MPS's own limit.
    pub max_clients: Option<u32>,
}

/// What runs: the MPS host's answer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// [`VERSION`] of the writer.
    pub version: u32,
    /// Pid of the MPS host.
    pub pid: u32,
    /// [`Desired::hash`] of the file last acted upon; empty before the first.
    pub desired: String,
    /// Daemons by device, those that are going included.
    pub daemons: BTreeMap<String, DaemonStatus>,
    /// Allocations by id whose door is open.
    pub allocations: BTreeMap<String, AllocationStatus>,
    /// Why the desired file could not be read or acted upon, if so.
    pub error: Option<String>,
}

/// One daemon as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DaemonStatus {
    /// Where it is in its life.
    pub state: DaemonState,
    /// Pid of the control daemon, in the host's pid namespace.
    pub pid: Option<u32>,
    /// Pid of the MPS server.
    pub server_pid: Option<u32>,
    /// Starts after the first, since the MPS host started.
    pub restarts: u32,
    /// Whether doors can set limits for each allocation on this driver.
    pub door: Door,
    /// What is wrong, or was last, in words; empty when nothing is.
    pub message: String,
    /// Host pids of the clients, as MPS lists them, with the allocation whose door they came through.
    pub clients: Vec<Client>,
    /// The last fatal GPU error since the MPS host started; none before the first, and from an MPS host that knows of none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<Fault>,
}

/// A fatal GPU error: it breaks the contexts of all clients of a server (measured on driver 580), and the server lets nobody in until the
/// last of them has exited.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Fault {
    /// 1 for a device's first since the MPS host ([`Status::pid`]) started, 2 for the next.
    pub number: u64,
    /// The one client that died in the midst of its work right before; else the one whom the server's log names, which may be a neighbour.
    pub culprit: Option<Client>,
    /// The culprit did nothing wrong itself: it was killed while its kernels ran.
    pub killed: bool,
    /// The clients at that time, the culprit included.
    pub affected: Vec<Client>,
    /// Those of them that were ended, because they did not exit by themselves.
    pub ended: Vec<Client>,
    /// The device serves again, or another daemon is started for it.
    pub over: bool,
}

/// Where a daemon is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum DaemonState {
    /// Started, limits not yet read back: no client is let in.
    Starting,
    /// Serving, with its limits.
    Active,
    /// The server is in FAULT until the clients that it holds have exited.
    Fault,
    /// It died or hung; doors hold their clients until it is back.
    Restarting,
    /// It failed again and again; tried again at a capped interval.
    BackOff,
    /// No longer wanted; going.
    Stopping,
}

/// Whether limits are enforced at the door.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Door {
    /// The handshake is the known one: each allocation's limits are set at connect.
    Hard,
    /// The handshake differs: passed through untouched; limits are the environment's, which a tenant can change.
    Advisory,
}

/// A client of an MPS server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Client {
    /// Host pid.
    pub pid: u32,
    /// Allocation whose door it came through; none for a client that came another way.
    pub allocation: Option<String>,
}

/// One allocation's door as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AllocationStatus {
    /// Handshakes passed on.
    pub admitted: u64,
    /// Connections refused: administrators' commands, lies in the handshake, too many clients.
    pub refused: u64,
    /// Connections waiting for the daemon.
    pub waiting: u32,
}

/// Asked of the MPS host on `RUN/mps/host.sock`, one JSON object a line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Request {
    /// Answer when the desired file with this hash has been read and the allocation's door is open and its daemon Active.
    Await {
        /// The allocation's id.
        allocation: String,
        /// Answer with an error after this long.
        timeout_ms: u64,
    },
    /// `terminate_client` of a client, with a deadline of its own.
    Terminate {
        /// The daemon's device.
        device: String,
        /// The client's host pid.
        pid: u32,
    },
    /// The current [`Status`].
    Status,
}

/// The answer to a [`Request`], one JSON object in a line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "camelCase")]
pub enum Reply {
    /// Done.
    Done,
    /// To [`Request::Terminate`]: the client has no context that could be ended.
    NoContext,
    /// The status that was asked for.
    Status(Status),
    /// Not done, in words.
    Error {
        /// Why.
        message: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: &str = "GPU-3da61522-b946-8b5e-d0da-5debfa49f742";

    fn daemon() -> Daemon {
        Daemon { multi_user: true, exclusive: true, default_threads: Some(50), default_memory_mib: None }
    }

    fn allocation() -> Allocation {
        Allocation { device: GPU.into(), threads: Some(20), memory_mib: Some(8192), max_clients: None }
    }

    fn desired() -> Desired {
        Desired {
            version: VERSION,
            daemons: BTreeMap::from([(GPU.into(), daemon())]),
            allocations: BTreeMap::from([("00ff".into(), allocation())]),
        }
    }

    fn parse(desired: &Desired) -> Result<Desired, Invalid> {
        Desired::parse(&serde_json::to_vec(desired).unwrap())
    }

    #[test]
    fn what_the_agent_writes_is_read_back() {
        assert_eq!(parse(&desired()), Ok(desired()));
    }

    #[test]
    fn a_newer_file_is_told_by_its_version_even_if_its_shape_is_unknown() {
        assert_eq!(Desired::parse(br#"{"version": 2, "daemons": 7}"#), Err(Invalid::Version(2)));
    }

    #[test]
    fn what_is_no_json_is_malformed() {
        for bytes in [&b""[..], b"{", b"[]", b"\xff", br#"{"version":1}"#] {
            assert!(matches!(Desired::parse(bytes), Err(Invalid::Malformed(_))), "{bytes:?}");
        }
    }

    #[test]
    fn what_is_wrong_is_told_in_short() {
        let long = "\u{1}".repeat(100_000);
        let mut device = desired();
        device.daemons.insert(long.clone(), daemon());
        let mut id = desired();
        id.allocations.insert(long.clone(), allocation());
        for bad in [device, id].map(|bad| serde_json::to_vec(&bad).unwrap()) {
            assert!(Desired::parse(&bad).unwrap_err().to_string().len() < 2000);
        }
        let error = Desired::parse(format!(r#"{{"version":"{}"}}"#, "x".repeat(100_000)).as_bytes()).unwrap_err();
        assert!(error.to_string().len() < 500 && error.to_string().contains("invalid type: string \"xxx"), "{error}");
    }

    #[test]
    fn names_that_would_leave_their_directory_are_refused() {
        for name in ["../x", "", ".", "a/b", "a b", &"a".repeat(81)] {
            let mut bad = desired();
            bad.daemons.insert(name.into(), daemon());
            assert_eq!(parse(&bad), Err(Invalid::Device(name.into())));
        }
        for id in ["../x", "", "00FF", "0g", &"0".repeat(33)] {
            let mut bad = desired();
            bad.allocations.insert(id.into(), allocation());
            assert_eq!(parse(&bad), Err(Invalid::AllocationId(id.into())));
        }
    }

    #[test]
    fn limits_that_mean_nothing_are_refused() {
        for threads in [0, 101] {
            let mut bad = desired();
            bad.allocations.insert("01".into(), Allocation { threads: Some(threads), ..allocation() });
            assert_eq!(parse(&bad), Err(Invalid::Threads { whose: "01".into(), threads }));
        }
        let mut bad = desired();
        bad.allocations.insert("01".into(), Allocation { memory_mib: Some(0), ..allocation() });
        assert_eq!(parse(&bad), Err(Invalid::Memory("01".into())));
        let mut bad = desired();
        bad.daemons.insert("MIG-1".into(), daemon());
        assert_eq!(parse(&bad), Err(Invalid::Exclusive("MIG-1".into())));
    }

    #[test]
    fn an_older_or_newer_host_can_be_read() {
        let older = r#"{"state":"Active","pid":7,"serverPid":8,"restarts":0,"door":"Hard","message":"","clients":[]}"#;
        let mut status: DaemonStatus = serde_json::from_str(older).unwrap();
        assert_eq!(status.fault, None);
        assert_eq!(serde_json::to_string(&status).unwrap(), older, "nothing that an older agent does not know");
        let newer = r#"{"number":3,"culprit":{"pid":5,"allocation":"aa","age":1},"course":"what"}"#;
        status.fault = Some(serde_json::from_str(newer).unwrap());
        let culprit = Some(Client { pid: 5, allocation: Some("aa".into()) });
        assert_eq!(status.fault, Some(Fault { number: 3, culprit, ..Fault::default() }));
    }

    #[test]
    fn the_hash_follows_the_content() {
        let mut other = desired();
        assert_eq!(other.hash(), desired().hash());
        assert_eq!(other.hash().len(), 32);
        other.allocations.insert("01".into(), allocation());
        assert_ne!(other.hash(), desired().hash());
    }
}
