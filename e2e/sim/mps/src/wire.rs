//! What daemon, server and client library tell each other once the handshake is over.
//!
//! On real hardware this is NVIDIA's own business and was not looked at: here it is JSON, one
//! object a packet.

use std::io;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::limits::Settings;
use crate::seqpacket::Connection;

/// The longest packet.
pub const LONGEST: usize = 64 * 1024;

/// Where a server is in its life, as `get_server_status` prints it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Status {
    /// Not yet serving.
    Initializing,
    /// Serving.
    Active,
    /// Waiting for the clients of a fatal error to exit; no client is let in.
    Fault,
}

impl Status {
    /// The word that the daemon prints.
    pub fn word(self) -> &'static str {
        match self {
            Self::Initializing => "INITIALIZING",
            Self::Active => "ACTIVE",
            Self::Fault => "FAULT",
        }
    }
}

/// Daemon to server.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToServer {
    /// First of all: what to serve.
    Start {
        /// `CUDA_VISIBLE_DEVICES` of the daemon.
        visible: Option<String>,
        /// The pipe directory, which the server's uid must be able to reach.
        pipe_directory: String,
        /// The user whose server this is.
        uid: u32,
        /// The defaults that it starts with.
        settings: Settings,
    },
    /// A client to let in; the socket over which it will introduce itself comes along.
    Client {
        /// The daemon's number of it.
        connection: u64,
        /// The limits that bind it, if this is its process's first.
        settings: Settings,
    },
    /// The limits of the next clients, for the log.
    Settings(Settings),
    /// Answered when everything before it is done.
    Ping {
        /// Comes back with the answer.
        request: u64,
    },
    /// `terminate_client`.
    Terminate {
        /// Comes back with the answer.
        request: u64,
        /// The client.
        pid: u32,
    },
    /// End now.
    Shutdown,
}

/// Server to daemon.
#[derive(Debug, Serialize, Deserialize)]
pub enum FromServer {
    /// Where it is now.
    Status(Status),
    /// A process has introduced itself.
    Process {
        /// The daemon's number of its connection.
        connection: u64,
        /// As the server's pid namespace sees it.
        pid: u32,
    },
    /// A process has a context.
    Context {
        /// The daemon's number of its connection.
        connection: u64,
        /// As the server's pid namespace sees it.
        pid: u32,
        /// Device UUID.
        device: String,
        /// Inode of the client's pid namespace, as it says itself.
        namespace: u64,
        /// The program.
        command: String,
    },
    /// A connection is gone, or came to nothing.
    Left {
        /// The daemon's number of it.
        connection: u64,
    },
    /// The answer to a request: 0, or a `CUresult`.
    Answer {
        /// The request's.
        request: u64,
        /// 0 is done.
        result: i32,
    },
}

/// Client library to server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ToContext {
    /// What devices are there? Answered by [`FromContext::Devices`].
    Devices,
    /// A context, please. Answered by [`FromContext::Created`] or an error.
    Create {
        /// UUID of the device.
        device: String,
        /// `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`, where it means something.
        threads: Option<f64>,
        /// The program, for `ps`.
        command: String,
        /// Inode of its pid namespace.
        namespace: u64,
    },
    /// Memory, please. Answered by [`FromContext::Memory`] or an error.
    Allocate(u64),
    /// Memory back. Answered by [`FromContext::Memory`].
    Free(u64),
    /// How much is free? Answered by [`FromContext::Memory`].
    Query,
    /// Kernels of so many milliseconds are in flight from now on. Not answered.
    Busy(f64),
    /// No kernel is in flight. Not answered.
    Idle,
    /// An illegal access. Not answered: the error comes to all.
    IllegalAccess,
    /// This context was ended as [`FromContext::Terminate`] asked.
    Terminated,
    /// This context is closed in order. Not answered.
    Goodbye,
}

/// One device that the server offers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// UUID of the GPU or the MIG device.
    pub uuid: String,
    /// SMs in all.
    pub sms: u32,
    /// Memory in all, bytes.
    pub memory: u64,
}

/// Server to client library.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromContext {
    /// What the server offers, in the order of its ordinals.
    Devices(Vec<Device>),
    /// The context is there.
    Created {
        /// SMs that it may use.
        sms: u32,
        /// The server's memory limit for it, bytes: the client's library is what keeps it.
        limit: Option<u64>,
        /// Memory of the device that is free, bytes.
        free: u64,
    },
    /// Done: memory of the device that is free, bytes.
    Memory {
        /// Bytes.
        free: u64,
    },
    /// Not done: a `CUresult`.
    Error(i32),
    /// Not an answer: the context is broken for good, with this `CUresult`.
    Broken(i32),
    /// Not an answer: end the context and say [`ToContext::Terminated`].
    Terminate,
}

/// Sends a message.
pub fn send<T: Serialize>(connection: &Connection, message: &T) -> io::Result<()> {
    connection.send(&serde_json::to_vec(message)?)
}

/// Sends a message unless the peer does not read.
pub fn try_send<T: Serialize>(connection: &Connection, message: &T) -> io::Result<()> {
    connection.try_send(&serde_json::to_vec(message)?)
}

/// Waits for a message; `None` when the peer is gone.
pub fn recv<T: DeserializeOwned>(connection: &Connection) -> io::Result<Option<T>> {
    connection.recv(LONGEST)?.map(|packet| serde_json::from_slice(&packet.data)).transpose().map_err(io::Error::from)
}
