//! Errors about the state directory, and errors that a CUDA program receives.

use std::path::PathBuf;

/// An error about the state directory or its contents.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file in the state directory could not be read, written or locked.
    #[error("failed to {action} {}", .path.display())]
    Io {
        /// The action that failed ("read", "lock", …).
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// The error of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// A file in the state directory has an invalid format.
    #[error("{} is not a machine's state", .path.display())]
    Malformed {
        /// Path of the file.
        path: PathBuf,
        /// Position and reason of the parse error.
        #[source]
        source: serde_json::Error,
    },
    /// A description or a change is invalid: for example, it names an unknown model or GPU.
    #[error("{0}")]
    Invalid(String),
}

/// The error that a CUDA program receives when it cannot create a context or allocate memory.
#[derive(Debug, thiserror::Error)]
pub enum ContextError {
    /// CUDA finds no device: the driver is not loaded, or the GPU is in MIG mode.
    #[error("no CUDA-capable device: {0}")]
    NoDevice(String),
    /// No device has this UUID.
    #[error("no such device {0}")]
    InvalidDevice(String),
    /// The compute mode does not allow a context: it is `PROHIBITED`, or it is `EXCLUSIVE_PROCESS`
    /// and another process uses the device.
    #[error("device {device} is busy or unavailable: {reason}")]
    Unavailable {
        /// The device's UUID.
        device: String,
        /// The compute mode that refuses the context, and the process that uses the device, if any.
        reason: String,
    },
    /// The request exceeds the free memory.
    #[error("out of memory: {wanted} bytes requested, {free} free")]
    OutOfMemory {
        /// Requested bytes.
        wanted: u64,
        /// Free bytes of the device.
        free: u64,
    },
    /// The GPU fell off the bus.
    #[error("GPU {0} is lost")]
    Lost(String),
    /// The context no longer exists: the machine rebooted, or the process that owned the context
    /// has exited.
    #[error("the context was destroyed")]
    Destroyed,
    /// The state directory is unusable.
    #[error(transparent)]
    State(#[from] Error),
}

impl ContextError {
    /// Returns the `CUresult` that CUDA returns for this error.
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
