//! Errors of NVML calls, grouped by how a caller can react.
use nvml_wrapper::error::NvmlError as Code;

/// Why an NVML call failed.
#[derive(Debug, thiserror::Error)]
pub enum NvmlError {
    /// No library file was found.
    #[error("found no NVML library; searched {0}")]
    NoLibrary(String),
    /// The library exists, but the kernel driver is not loaded.
    #[error("the NVIDIA driver is not loaded")]
    NoDriver,
    /// The GPU fell off the bus or needs a reset.
    #[error("the GPU is lost ({call})")]
    Lost {
        /// Name of the NVML function that failed.
        call: &'static str,
    },
    /// The GPU, MIG device or MIG profile does not exist.
    #[error("{0} does not exist")]
    NotFound(String),
    /// NVML created a GPU instance but does not list it.
    #[error("NVML created GPU instance {gpu_instance} on {gpu}, but does not list it")]
    NotListed {
        /// UUID of the GPU.
        gpu: String,
        /// NVML's ID of the GPU instance.
        gpu_instance: u32,
    },
    /// This GPU or driver does not support the call.
    #[error("{call} is not supported by this GPU or driver")]
    NotSupported {
        /// Name of the NVML function that failed.
        call: &'static str,
    },
    /// Processes still use the GPU or instance that the call would change.
    #[error("{call} failed: the GPU is in use")]
    InUse {
        /// Name of the NVML function that failed.
        call: &'static str,
    },
    /// A call has not returned within this deadline, and is still blocked.
    #[error("NVML did not answer for {} s", .0.as_secs())]
    Hung(std::time::Duration),
    /// This process keeps NVML closed, so that a GPU can be reset or the driver unloaded.
    #[error("NVML is closed while a GPU is quiesced")]
    Closed,
    /// A call failed while this process could not open any file. The error shows nothing about the
    /// GPU or the driver.
    #[error("this process has no free file descriptor")]
    NoDescriptors,
    /// Any other error of the library.
    #[error("{call} failed")]
    Call {
        /// Name of the NVML function that failed.
        call: &'static str,
        /// NVML's error code.
        source: Code,
    },
}

impl NvmlError {
    /// Classifies the error `code` of `call`.
    pub(super) fn from_code(call: &'static str, code: Code) -> Self {
        match code {
            Code::GpuLost | Code::ResetRequired => Self::Lost { call },
            Code::DriverNotLoaded => Self::NoDriver,
            Code::NotSupported | Code::FunctionNotFound | Code::FailedToLoadSymbol(_) => Self::NotSupported { call },
            Code::InUse => Self::InUse { call },
            source => Self::Call { call, source },
        }
    }

    /// Returns whether this process is the cause. Such an error shows nothing about the GPU or the
    /// driver.
    pub const fn is_caused_by_this_process(&self) -> bool {
        matches!(self, Self::Closed | Self::NoDescriptors)
    }

    /// Returns whether calls can succeed only after the library is reloaded.
    pub(super) fn requires_reload(&self) -> bool {
        matches!(self, Self::NoDriver | Self::Call { source: Code::Uninitialized | Code::LibRmVersionMismatch, .. })
    }
}

/// Returns the result of a call, or `None` if this GPU or driver does not support it.
pub(super) fn ignore_unsupported<T>(call: &'static str, result: Result<T, Code>) -> Result<Option<T>, NvmlError> {
    match result.map_err(|code| NvmlError::from_code(call, code)) {
        Ok(value) => Ok(Some(value)),
        Err(NvmlError::NotSupported { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the result of a call. Returns an error if the GPU or the driver is lost, and `None` for
/// every other error.
pub(super) fn ignore_unless_lost<T>(call: &'static str, result: Result<T, Code>) -> Result<Option<T>, NvmlError> {
    match result.map_err(|code| NvmlError::from_code(call, code)) {
        Ok(value) => Ok(Some(value)),
        Err(error @ (NvmlError::Lost { .. } | NvmlError::NoDriver)) => Err(error),
        Err(_) => Ok(None),
    }
}
