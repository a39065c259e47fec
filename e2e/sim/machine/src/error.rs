//! What can go wrong with the machine's directory, and what a CUDA program is told.

use std::path::PathBuf;

/// The state directory could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of the state directory could not be read, written or locked.
    #[error("cannot {action} {}", .path.display())]
    Io {
        /// What was tried ("read", "lock", …).
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A file of the state directory is not what this version writes.
    #[error("{} is not a machine's state", .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Where it is wrong.
        #[source]
        source: serde_json::Error,
    },
    /// A description or a change names something that does not exist, or asks for something
    /// impossible.
    #[error("{0}")]
    Invalid(String),
}

/// What a CUDA program is told when it cannot have a context or memory.
#[derive(Debug, thiserror::Error)]
pub enum ContextError {
    /// No driver, no GPU, or the GPU is in MIG mode and has no instance: CUDA sees no device.
    #[error("no CUDA-capable device: {0}")]
    NoDevice(String),
    /// The UUID names nothing.
    #[error("no such device {0}")]
    InvalidDevice(String),
    /// The compute mode does not allow it: PROHIBITED, or `EXCLUSIVE_PROCESS` and another process
    /// is there.
    #[error("device {device} is busy or unavailable: {reason}")]
    Unavailable {
        /// The device's UUID.
        device: String,
        /// Which rule, and which process holds it.
        reason: String,
    },
    /// More memory than is free.
    #[error("out of memory: {wanted} bytes wanted, {free} free")]
    OutOfMemory {
        /// Bytes asked for.
        wanted: u64,
        /// Bytes free on the device.
        free: u64,
    },
    /// The GPU fell off the bus.
    #[error("GPU {0} is lost")]
    Lost(String),
    /// The context is gone: its device was taken away (reboot, MIG instance destroyed).
    #[error("the context was destroyed")]
    Destroyed,
    /// The state directory could not be used.
    #[error(transparent)]
    State(#[from] Error),
}

impl ContextError {
    /// The `CUresult` that a real driver gives for it.
    #[must_use]
    pub fn cuda_code(&self) -> i32 {
        match self {
            Self::OutOfMemory { .. } => 2,
            Self::Unavailable { .. } => 46,
            Self::NoDevice(_) => 100,
            Self::InvalidDevice(_) => 101,
            Self::Destroyed => 709,
            Self::Lost(_) | Self::State(_) => 999,
        }
    }
}
