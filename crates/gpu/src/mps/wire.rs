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

use serde::{Deserialize, Serialize};

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

/// One MPS control daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Daemon {
    /// Clients of several uids share one server (`-multiuser-server`).
    pub multi_user: bool,
    /// Put the GPU in EXCLUSIVE_PROCESS while the daemon runs, and back afterwards; false leaves it alone (always so for MIG).
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
    /// The status that was asked for.
    Status(Status),
    /// Not done, in words.
    Error {
        /// Why.
        message: String,
    },
}
