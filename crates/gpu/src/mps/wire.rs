//! The contract between the agent and the MPS host: two files and one socket.
//!
//! The agent writes [`Desired`] to `RUN/mps/desired.json`. The MPS host writes [`MpsHostStatus`] to
//! `RUN/mps/status.json` and answers [`Request`]s on `RUN/mps/host.sock`. Requests and replies are
//! one line of JSON each. Both components replace files atomically: they write a temporary file,
//! call fsync, and rename the file. `RUN` is `/run/cleave` by default. Its path is the same on the
//! node and in both pods.
//!
//! | path | created by | content |
//! |---|---|---|
//! | `RUN/alloc/<id>/` | agent, before it answers `Allocate` | the directory that a container sees, read-only |
//! | `RUN/alloc/<id>/control` | MPS host | the door of that allocation |
//! | `RUN/mps/<device>/` | MPS host | the daemon's pipe directory; no container sees it |
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::text::shorten;

/// The version of these files. The MPS host refuses a desired file with another version, and
/// reports the refusal.
pub const FILE_FORMAT_VERSION: u32 = 1;

/// Every daemon and every allocation that should exist on this node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Desired {
    /// [`FILE_FORMAT_VERSION`] of the writer.
    pub version: u32,
    /// Daemons by device: the UUID of a GPU or of a MIG instance.
    pub daemons: BTreeMap<String, DaemonSettings>,
    /// Allocations by ID: lower-case hexadecimal, at most 32 characters.
    pub allocations: BTreeMap<String, Allocation>,
}

/// Why a [`Desired`] file is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidDesired {
    /// The file is not JSON, or does not have the structure of [`Desired`].
    #[error("failed to parse desired.json: {0}")]
    Malformed(String),
    /// The file has another version. Usually, a newer agent wrote it.
    #[error(
        "desired.json has version {0}, but this MPS host supports version {FILE_FORMAT_VERSION}: upgrade the MPS host"
    )]
    Version(u32),
    /// The device's name cannot be a directory name.
    #[error("invalid device {0:?}: expected 1 to 80 letters, digits or `-`")]
    Device(String),
    /// The ID of an allocation has a form that the agent never writes.
    #[error("invalid allocation ID {0:?}: expected 1 to 32 lower-case hexadecimal digits")]
    AllocationId(String),
    /// The active thread percentage is outside 1 to 100.
    #[error("{owner}: invalid active thread percentage {threads}: expected 1 to 100")]
    Threads {
        /// The device or allocation with the refused percentage.
        owner: String,
        /// The refused percentage.
        threads: u8,
    },
    /// The memory limit is 0, which MPS treats as unlimited.
    #[error("{0}: invalid memory limit 0 MiB: MPS reads 0 as no limit")]
    Memory(String),
    /// The maximum number of clients is 0.
    #[error("{0}: maxClients is 0: no client could ever connect")]
    Clients(String),
    /// A compute mode is set for a MIG instance, which has no compute mode.
    #[error("{0}: EXCLUSIVE_PROCESS applies to whole GPUs, not to MIG instances")]
    Exclusive(String),
}

impl Desired {
    /// Parses and checks the content of the desired file.
    ///
    /// # Errors
    /// Returns [`InvalidDesired`] with the first problem. Its message becomes
    /// [`MpsHostStatus::error`].
    pub fn parse(bytes: &[u8]) -> Result<Self, InvalidDesired> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        // Shorten the message: serde quotes text of the file, which may be long.
        let malformed = |error: serde_json::Error| InvalidDesired::Malformed(shorten(&error.to_string()));
        // Check the version first: a newer file may differ in everything else.
        let Versioned { version } = serde_json::from_slice(bytes).map_err(malformed)?;
        if version != FILE_FORMAT_VERSION {
            return Err(InvalidDesired::Version(version));
        }
        let desired: Self = serde_json::from_slice(bytes).map_err(malformed)?;
        desired.check()?;
        Ok(desired)
    }

    /// Checks names and limits.
    ///
    /// # Errors
    /// Returns [`InvalidDesired`] with the first problem.
    pub fn check(&self) -> Result<(), InvalidDesired> {
        for (device, daemon) in &self.daemons {
            check_device(device)?;
            check_limits(device, daemon.default_threads, daemon.default_memory_mib)?;
            if daemon.exclusive && device.starts_with("MIG-") {
                return Err(InvalidDesired::Exclusive(device.clone()));
            }
        }
        for (id, allocation) in &self.allocations {
            let hexadecimal = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
            if id.is_empty() || id.len() > 32 || !id.bytes().all(hexadecimal) {
                return Err(InvalidDesired::AllocationId(shorten(id)));
            }
            check_device(&allocation.device)?;
            check_limits(id, allocation.threads, allocation.memory_mib)?;
            if allocation.max_clients == Some(0) {
                return Err(InvalidDesired::Clients(id.clone()));
            }
        }
        Ok(())
    }

    /// Returns 32 hexadecimal digits that identify the content, except for
    /// [`DaemonSettings::accept_advisory`]. [`MpsHostStatus::desired`] contains this hash once the
    /// MPS host has applied the file. An older MPS host does not know `accept_advisory`, and would
    /// never report a hash that depends on it.
    pub fn hash(&self) -> String {
        let mut content = self.clone();
        content.daemons.values_mut().for_each(|daemon| *daemon = daemon.without_consent());
        // Maps are ordered, so equal content has equal text. These types always serialize.
        let text = serde_json::to_vec(&content).unwrap_or_default();
        Sha256::digest(text).iter().take(16).fold(String::new(), |mut digits, byte| {
            let _ = write!(digits, "{byte:02x}");
            digits
        })
    }
}

fn check_device(device: &str) -> Result<(), InvalidDesired> {
    let fits = !device.is_empty() && device.len() <= 80;
    if fits && device.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') {
        Ok(())
    } else {
        Err(InvalidDesired::Device(shorten(device)))
    }
}

fn check_limits(owner: &str, threads: Option<u8>, memory_mib: Option<u64>) -> Result<(), InvalidDesired> {
    if let Some(threads) = threads.filter(|threads| !(1..=100).contains(threads)) {
        return Err(InvalidDesired::Threads { owner: owner.to_owned(), threads });
    }
    if memory_mib == Some(0) {
        return Err(InvalidDesired::Memory(owner.to_owned()));
    }
    Ok(())
}

/// Paths below `RUN`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paths {
    run: PathBuf,
}

impl Paths {
    /// Creates the paths below `run`, which both pods mount at the same path.
    pub fn new(run: impl Into<PathBuf>) -> Self {
        Self { run: run.into() }
    }

    /// Returns `RUN/mps`: the MPS host's directory. Only root can enter the directory, unless a
    /// daemon has one server per user.
    pub fn mps_host_dir(&self) -> PathBuf {
        self.run.join("mps")
    }

    /// Returns the [`Desired`] file, written by the agent.
    pub fn desired(&self) -> PathBuf {
        self.mps_host_dir().join("desired.json")
    }

    /// Returns the [`MpsHostStatus`] file, written by the MPS host.
    pub fn status(&self) -> PathBuf {
        self.mps_host_dir().join("status.json")
    }

    /// Returns the socket on which the MPS host answers [`Request`]s.
    pub fn socket(&self) -> PathBuf {
        self.mps_host_dir().join("host.sock")
    }

    /// Returns the pipe directory of a device's daemon.
    pub fn pipe(&self, device: &str) -> PathBuf {
        self.mps_host_dir().join(device)
    }

    /// Returns `RUN/alloc`: one directory per allocation.
    pub fn allocations(&self) -> PathBuf {
        self.run.join("alloc")
    }

    /// Returns the directory that the allocation's container sees.
    pub fn allocation(&self, id: &str) -> PathBuf {
        self.allocations().join(id)
    }

    /// Returns the door of an allocation.
    pub fn door(&self, id: &str) -> PathBuf {
        self.allocation(id).join("control")
    }

    /// Returns `RUN` itself.
    pub fn run(&self) -> &Path {
        &self.run
    }
}

/// Settings of one MPS control daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DaemonSettings {
    /// Whether clients of several users share one server (`-multiuser-server`).
    pub multi_user: bool,
    /// Whether to set the GPU to `EXCLUSIVE_PROCESS` while the daemon runs and restore the previous
    /// mode afterwards. False only restores a mode that an earlier daemon changed. Always false for
    /// MIG instances.
    pub exclusive: bool,
    /// Default active thread percentage, 1 to 100 (`set_default_active_thread_percentage`). The
    /// default limits clients for which no door sets a limit.
    pub default_threads: Option<u8>,
    /// Default memory limit in MiB (`set_default_device_pinned_mem_limit`).
    pub default_memory_mib: Option<u64>,
    /// Whether the daemon serves even if its handshake is unknown and doors cannot enforce limits.
    /// The agent omits the field if it is false, as older agents do.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub accept_advisory: bool,
}

impl DaemonSettings {
    /// Returns the settings without the consent to advisory limits.
    #[must_use]
    pub fn without_consent(&self) -> Self {
        Self { accept_advisory: false, ..self.clone() }
    }
}

/// Limits of one allocation. The allocation's door sets the limits for each client that connects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Allocation {
    /// UUID of the device whose daemon serves the allocation.
    pub device: String,
    /// Active thread percentage, 1 to 100. `None` means unlimited.
    pub threads: Option<u8>,
    /// Pinned device memory of each process, in MiB. `None` means unlimited.
    pub memory_mib: Option<u64>,
    /// Maximum number of clients at the same time. `None` means that only MPS's own limit applies.
    pub max_clients: Option<u32>,
}

/// The state that the MPS host reports.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MpsHostStatus {
    /// [`FILE_FORMAT_VERSION`] of the writer.
    pub version: u32,
    /// PID of the MPS host, or 0 once the MPS host has stopped.
    pub pid: u32,
    /// [`Desired::hash`] of the most recently applied file. The hash is empty before the first
    /// file. The MPS host does not wait for a device whose process does not answer. Until that
    /// process has applied its part of the file, its daemon is not Active.
    pub desired: String,
    /// Daemons by device, including those that are stopping.
    pub daemons: BTreeMap<String, DaemonStatus>,
    /// Allocations with an open door, by ID.
    pub allocations: BTreeMap<String, AllocationStatus>,
    /// Why the desired file could not be applied, or the information that the MPS host has stopped.
    /// In older MPS hosts, this field also contains the errors of doors.
    pub error: Option<String>,
    /// Why doors could not be opened or restored, by device. Older MPS hosts omit this field.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub door_errors: BTreeMap<String, String>,
}

/// Status of one daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DaemonStatus {
    /// Lifecycle state of the daemon.
    pub state: DaemonState,
    /// PID of the control daemon, in the node's PID namespace.
    pub pid: Option<u32>,
    /// PID of the MPS server.
    pub server_pid: Option<u32>,
    /// Number of restarts after failures since the MPS host started.
    pub restarts: u32,
    /// Whether doors can enforce limits per allocation on this driver.
    pub enforcement: Enforcement,
    /// Whether doors hold all clients, because the daemon sent several unexpected replies to
    /// clients in a row. Clients that are connected still run. Older MPS hosts omit this field.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub holds_clients: bool,
    /// Whether doors no longer hold clients only because no client is waiting: no expected reply
    /// has arrived yet. Older MPS hosts omit this field.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub replies_unproven: bool,
    /// The current or last problem. Empty if no problem occurred.
    pub message: String,
    /// The clients that MPS lists or that a door has just admitted, sorted by PID. Each client has
    /// the allocation of the door that admitted the client, if any.
    pub clients: Vec<Client>,
    /// The last fatal GPU error since the MPS host started, if any. Older MPS hosts omit this
    /// field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<Fault>,
}

/// A fatal GPU error. The error breaks the contexts of all clients of a server (measured on driver
/// 580). The server admits no client until the last broken client has exited.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Fault {
    /// Counts a device's faults from 1 since the MPS host ([`MpsHostStatus::pid`]) started.
    pub number: u64,
    /// The only client that was killed while its kernels ran, just before the fault. If none or
    /// several were killed, the only client that the server's log names. That client may be a
    /// neighbour of the real culprit.
    pub culprit: Option<Client>,
    /// Whether the culprit was killed while its kernels ran and caused no GPU error itself.
    pub killed: bool,
    /// The clients at the time of the fault, including the culprit.
    pub affected: Vec<Client>,
    /// The affected clients that were signalled because they did not exit by themselves.
    pub ended: Vec<Client>,
    /// Whether the fault is over: the device serves again, or its daemon is being replaced.
    pub over: bool,
}

/// Lifecycle state of a daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum DaemonState {
    /// The daemon is starting, and its limits are not confirmed yet. Doors admit no client.
    Starting,
    /// The daemon serves, and its limits are in force.
    Active,
    /// The server is in FAULT until the clients that it broke have exited.
    Fault,
    /// The daemon or its server exited or hung. Clients wait at their doors until the daemon
    /// serves. A daemon whose settings changed also has this state until it has restarted with the
    /// new settings. A daemon also has this state if the MPS host's process for the device has
    /// exited or does not answer.
    Restarting,
    /// The daemon failed repeatedly. Delays between restarts increase up to a maximum.
    BackOff,
    /// The daemon is no longer desired. The daemon quits once its clients have exited.
    Stopping,
}

/// Whether doors enforce limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Enforcement {
    /// The daemon speaks the known handshake: doors set the allocation's limits when a client
    /// connects.
    Hard,
    /// The handshake is unknown, so doors cannot set limits. The daemon does not serve unless
    /// [`DaemonSettings::accept_advisory`] is set. Doors then relay the handshake unchanged, and
    /// limits come from the client's environment, which a tenant can change.
    Advisory,
}

/// A client of an MPS server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Client {
    /// PID in the node's PID namespace.
    pub pid: u32,
    /// The allocation of the door that admitted the client. `None` if no door of this MPS host
    /// admitted the client, for example because the client bypassed the doors or limits are
    /// advisory.
    pub allocation: Option<String>,
}

/// Status of one allocation's door. Counts start when the door opens.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AllocationStatus {
    /// Number of completed handshakes.
    pub admitted: u64,
    /// Number of refused connections, for example because of an administrator's command, an invalid
    /// handshake or too many clients.
    pub refused: u64,
    /// Number of connections that wait for the daemon.
    pub waiting: u32,
}

/// A request to the MPS host on `RUN/mps/host.sock`: one JSON object per line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Request {
    /// Answers once the allocation's door is open and its daemon is Active.
    Await {
        /// ID of the allocation.
        allocation: String,
        /// Time in milliseconds after which the MPS host answers with an error.
        timeout_ms: u64,
    },
    /// Sends `terminate_client` for one client. The MPS host applies its own deadline.
    Terminate {
        /// The daemon's device.
        device: String,
        /// The client's PID in the node's PID namespace.
        pid: u32,
    },
    /// Returns the current [`MpsHostStatus`].
    Status,
}

/// The answer to a [`Request`]: one JSON object on one line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "camelCase")]
pub enum Reply {
    /// The request succeeded.
    Done,
    /// Answer to [`Request::Terminate`]: the client has no context to terminate.
    NoContext,
    /// Answer to [`Request::Status`].
    Status(MpsHostStatus),
    /// The request failed.
    Error {
        /// Why the request failed.
        message: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU_UUID: &str = "GPU-3da61522-b946-8b5e-d0da-5debfa49f742";

    fn sample_daemon() -> DaemonSettings {
        DaemonSettings {
            multi_user: true,
            exclusive: true,
            default_threads: Some(50),
            default_memory_mib: None,
            accept_advisory: false,
        }
    }

    fn sample_allocation() -> Allocation {
        Allocation { device: GPU_UUID.into(), threads: Some(20), memory_mib: Some(8192), max_clients: None }
    }

    fn sample_desired() -> Desired {
        Desired {
            version: FILE_FORMAT_VERSION,
            daemons: BTreeMap::from([(GPU_UUID.into(), sample_daemon())]),
            allocations: BTreeMap::from([("00ff".into(), sample_allocation())]),
        }
    }

    fn round_trip(desired: &Desired) -> Result<Desired, InvalidDesired> {
        Desired::parse(&serde_json::to_vec(desired).unwrap())
    }

    #[test]
    fn a_written_desired_file_parses_to_the_same_content() {
        assert_eq!(round_trip(&sample_desired()), Ok(sample_desired()));
    }

    #[test]
    fn a_newer_version_is_reported_even_if_the_shape_is_unknown() {
        assert_eq!(Desired::parse(br#"{"version": 2, "daemons": 7}"#), Err(InvalidDesired::Version(2)));
    }

    #[test]
    fn invalid_json_is_malformed() {
        for bytes in [&b""[..], b"{", b"[]", b"\xff", br#"{"version":1}"#] {
            assert!(matches!(Desired::parse(bytes), Err(InvalidDesired::Malformed(_))), "{bytes:?}");
        }
    }

    #[test]
    fn error_texts_are_short_for_long_input() {
        let long = "\u{1}".repeat(100_000);
        let mut device = sample_desired();
        device.daemons.insert(long.clone(), sample_daemon());
        let mut id = sample_desired();
        id.allocations.insert(long.clone(), sample_allocation());
        for bad in [device, id].map(|bad| serde_json::to_vec(&bad).unwrap()) {
            assert!(Desired::parse(&bad).unwrap_err().to_string().len() < 2000);
        }
        let error = Desired::parse(format!(r#"{{"version":"{}"}}"#, "x".repeat(100_000)).as_bytes()).unwrap_err();
        assert!(error.to_string().len() < 500 && error.to_string().contains("invalid type: string \"xxx"), "{error}");
    }

    #[test]
    fn names_that_would_escape_their_directory_are_rejected() {
        for name in ["../x", "", ".", "a/b", "a b", &"a".repeat(81)] {
            let mut bad = sample_desired();
            bad.daemons.insert(name.into(), sample_daemon());
            assert_eq!(round_trip(&bad), Err(InvalidDesired::Device(name.into())));
        }
        for id in ["../x", "", "00FF", "0g", &"0".repeat(33)] {
            let mut bad = sample_desired();
            bad.allocations.insert(id.into(), sample_allocation());
            assert_eq!(round_trip(&bad), Err(InvalidDesired::AllocationId(id.into())));
        }
    }

    #[test]
    fn meaningless_limits_are_rejected() {
        for threads in [0, 101] {
            let mut bad = sample_desired();
            bad.allocations.insert("01".into(), Allocation { threads: Some(threads), ..sample_allocation() });
            assert_eq!(round_trip(&bad), Err(InvalidDesired::Threads { owner: "01".into(), threads }));
        }
        let mut bad = sample_desired();
        bad.allocations.insert("01".into(), Allocation { memory_mib: Some(0), ..sample_allocation() });
        assert_eq!(round_trip(&bad), Err(InvalidDesired::Memory("01".into())));
        let mut bad = sample_desired();
        bad.daemons.insert("MIG-1".into(), sample_daemon());
        assert_eq!(round_trip(&bad), Err(InvalidDesired::Exclusive("MIG-1".into())));
    }

    #[test]
    fn statuses_of_older_and_newer_mps_hosts_parse() {
        let older =
            r#"{"state":"Active","pid":7,"serverPid":8,"restarts":0,"enforcement":"Hard","message":"","clients":[]}"#;
        let mut status: DaemonStatus = serde_json::from_str(older).unwrap();
        assert_eq!((&status.fault, status.holds_clients, status.replies_unproven), (&None, false, false));
        assert_eq!(
            serde_json::to_string(&status).unwrap(),
            older,
            "an absent fault adds no field that an older agent lacks"
        );
        let newer = r#"{"number":3,"culprit":{"pid":5,"allocation":"aa","age":1},"course":"what"}"#;
        status.fault = Some(serde_json::from_str(newer).unwrap());
        let culprit = Some(Client { pid: 5, allocation: Some("aa".into()) });
        assert_eq!(status.fault, Some(Fault { number: 3, culprit, ..Fault::default() }));
    }

    #[test]
    fn settings_without_advisory_limits_are_written_as_older_agents_write_them() {
        let older = r#"{"multiUser":true,"exclusive":true,"defaultThreads":50,"defaultMemoryMib":null}"#;
        assert_eq!(serde_json::to_string(&sample_daemon()).unwrap(), older);
        assert_eq!(serde_json::from_str::<DaemonSettings>(older).unwrap(), sample_daemon());
        let accepts = DaemonSettings { accept_advisory: true, ..sample_daemon() };
        let text = serde_json::to_string(&accepts).unwrap();
        assert!(text.contains(r#""acceptAdvisory":true"#), "{text}");
        assert_eq!(serde_json::from_str::<DaemonSettings>(&text).unwrap(), accepts);
    }

    #[test]
    fn the_hash_depends_on_the_content_only() {
        let mut other = sample_desired();
        assert_eq!(other.hash(), sample_desired().hash());
        assert_eq!(other.hash().len(), 32);
        other.daemons.values_mut().for_each(|daemon| daemon.accept_advisory = true);
        assert_eq!(other.hash(), sample_desired().hash(), "an older MPS host does not know this field");
        other.allocations.insert("01".into(), sample_allocation());
        assert_ne!(other.hash(), sample_desired().hash());
    }
}
