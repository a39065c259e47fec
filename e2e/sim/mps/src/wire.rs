//! Defines the messages between daemon, server and client library after the handshake. NVIDIA's
//! protocol is private and was not examined. The simulation sends one JSON object per packet.

use std::io;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::limits::ClientSettings;
use crate::seqpacket::Connection;

/// Maximum length of a packet, in bytes.
pub const MAX_PACKET_BYTES: usize = 64 * 1024;

/// A server's status, as `get_server_status` prints it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ServerStatus {
    /// The server is starting.
    Initializing,
    /// The server serves clients.
    Active,
    /// A fatal error occurred. Until all broken clients have exited, the server refuses new
    /// clients.
    Fault,
}

impl ServerStatus {
    /// Returns the word that `get_server_status` prints.
    pub fn word(self) -> &'static str {
        match self {
            Self::Initializing => "INITIALIZING",
            Self::Active => "ACTIVE",
            Self::Fault => "FAULT",
        }
    }
}

/// Messages from the daemon to a server.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToServer {
    /// The first message, with the server's configuration.
    Start {
        /// `CUDA_VISIBLE_DEVICES` of the daemon.
        visible: Option<String>,
        /// The pipe directory. The server's user must have access to this directory.
        pipe_directory: String,
        /// The server's user id.
        uid: u32,
        /// The server's initial limits.
        settings: ClientSettings,
    },
    /// A new client. The packet carries the socket for the client's introduction.
    Client {
        /// The daemon's number for the connection.
        connection: u64,
        /// The settings for the client's process, if this is its first connection.
        settings: ClientSettings,
    },
    /// The settings for the next clients. The server only logs these settings.
    ClientSettings(ClientSettings),
    /// Requests an answer. The server answers after it has processed all earlier messages.
    Ping {
        /// The request's number. The answer has the same number.
        request: u64,
    },
    /// Terminates the contexts of a client (`terminate_client`).
    Terminate {
        /// The request's number. The answer has the same number.
        request: u64,
        /// The client's PID.
        pid: u32,
    },
    /// Requests the server's exit.
    Shutdown,
}

/// Messages from a server to the daemon.
#[derive(Debug, Serialize, Deserialize)]
pub enum FromServer {
    /// The server's new status.
    Status(ServerStatus),
    /// The server accepted the connection of a process.
    Process {
        /// The daemon's number for the connection.
        connection: u64,
        /// The client's PID in the server's PID namespace.
        pid: u32,
    },
    /// A process created a context.
    Context {
        /// The daemon's number for the connection.
        connection: u64,
        /// The client's PID in the server's PID namespace.
        pid: u32,
        /// The device's UUID.
        device: String,
        /// The inode of the client's PID namespace, as the client reports it.
        namespace: u64,
        /// Name of the client's program.
        command: String,
    },
    /// The connection was closed or refused.
    Left {
        /// The daemon's number for the connection.
        connection: u64,
    },
    /// The answer to a request.
    Answer {
        /// The request's number.
        request: u64,
        /// 0 for success, or a `CUresult`.
        result: i32,
    },
}

/// Messages from a client library to the server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ToContext {
    /// Requests the devices. Answered with [`FromContext::Devices`].
    Devices,
    /// Requests a context. The server answers with [`FromContext::Created`] or an error.
    Create {
        /// The device's UUID.
        device: String,
        /// The client's `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`, if it is valid.
        threads: Option<f64>,
        /// The program's name for `ps`.
        command: String,
        /// The inode of the client's PID namespace.
        namespace: u64,
    },
    /// Allocates bytes. The server answers with [`FromContext::Memory`] or an error.
    Allocate(u64),
    /// Frees bytes. Answered with [`FromContext::Memory`].
    Free(u64),
    /// Requests the free memory. Answered with [`FromContext::Memory`].
    Query,
    /// Kernels of this duration, in milliseconds, are running. Not answered.
    Busy(f64),
    /// No kernel is running. Not answered.
    Idle,
    /// An illegal access. The server does not answer, because all working contexts receive the
    /// error.
    IllegalAccess,
    /// The client has ended the context, as [`FromContext::Terminate`] requested.
    Terminated,
    /// The client closed the context cleanly. Not answered.
    Goodbye,
}

/// A device that the server serves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// The UUID of the GPU or MIG device.
    pub uuid: String,
    /// Number of SMs of the device.
    pub sms: u32,
    /// Memory of the device, in bytes.
    pub memory: u64,
}

/// Messages from the server to a client library.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromContext {
    /// The devices that the server serves, in the order of their ordinals.
    Devices(Vec<Device>),
    /// The context was created.
    Created {
        /// The number of SMs that the context may use.
        sms: u32,
        /// The server's memory limit for the context, in bytes. The client library enforces this
        /// limit.
        limit: Option<u64>,
        /// The device's free memory in bytes.
        free: u64,
    },
    /// The request succeeded. The answer contains the device's free memory.
    Memory {
        /// The device's free memory in bytes.
        free: u64,
    },
    /// Failure, with a `CUresult`.
    Error(i32),
    /// Notification: an error with this `CUresult` has permanently broken the context.
    Broken(i32),
    /// Request to end the context and to answer with [`ToContext::Terminated`].
    Terminate,
}

/// Sends a message.
///
/// # Errors
/// Returns an error if the packet cannot be sent.
pub fn send<T: Serialize>(connection: &Connection, message: &T) -> io::Result<()> {
    connection.send(&serde_json::to_vec(message)?)
}

/// Sends a message. Fails if the peer does not read.
pub fn try_send<T: Serialize>(connection: &Connection, message: &T) -> io::Result<()> {
    connection.try_send(&serde_json::to_vec(message)?)
}

/// Waits for a message. Returns `None` if the peer has closed the connection.
///
/// # Errors
/// Returns an error if the socket fails, or if the packet is not a valid message.
pub fn recv<T: DeserializeOwned>(connection: &Connection) -> io::Result<Option<T>> {
    connection
        .recv(MAX_PACKET_BYTES)?
        .map(|packet| serde_json::from_slice(&packet.data))
        .transpose()
        .map_err(io::Error::from)
}
