//! NVML: what GPUs a node has, how they are, and the few settings that Cleave changes.
//!
//! The consumer's words are [`Gpus`]; [`Nvml`] is the library behind it. GPUs fail one by one, and
//! a call may hang in the driver for as long as the node runs. So each call is about one GPU,
//! except [`Gpus::census`], and a program that has something else to do makes the calls of each GPU
//! on a [`Worker`] of its own. All workers and the [`EventWatch`] share one [`Library`].
//!
//! This module holds the only unsafe code of the product: calls that nvml-wrapper does not wrap
//! (MIG instances, and events with the instance that they are of), in `sys.rs`.
mod events;
mod find;
mod library;
mod shared;
mod sys;
mod worker;

use std::ops::ControlFlow;
use std::path::Path;

use cleave_plan::units::{Mebibytes, Sms};
use nvml_wrapper::error::NvmlError as Code;
use serde::{Deserialize, Serialize};

pub use events::{EventWatch, GpuEvent};
pub use find::Search;
pub use library::Nvml;
pub use shared::Library;
pub use worker::Worker;

/// What NVML could not do.
#[derive(Debug, thiserror::Error)]
pub enum NvmlError {
    /// No library where one may be.
    #[error("there is no NVML library: looked for {0}")]
    NoLibrary(String),
    /// The library is there, the kernel driver is not.
    #[error("the NVIDIA driver is not loaded")]
    NoDriver,
    /// The GPU fell off the bus, or needs a reset.
    #[error("the GPU is lost ({call})")]
    Lost {
        /// The call that said so.
        call: &'static str,
    },
    /// No such GPU or instance.
    #[error("{0} does not exist")]
    NotFound(String),
    /// This GPU or driver cannot do it.
    #[error("{call} is not supported by this GPU or driver")]
    NotSupported {
        /// What cannot be done.
        call: &'static str,
    },
    /// Processes use what should be changed.
    #[error("{call}: it is in use")]
    InUse {
        /// What could not be done.
        call: &'static str,
    },
    /// A call did not return within this deadline, and still has not.
    #[error("NVML did not answer for {} s", .0.as_secs())]
    Hung(std::time::Duration),
    /// Any other error of the library.
    #[error("{call} failed")]
    Call {
        /// The call.
        call: &'static str,
        /// What the library said.
        source: Code,
    },
}

impl NvmlError {
    /// Says what `code`, from `call`, means to a caller.
    fn of(call: &'static str, code: Code) -> Self {
        match code {
            Code::GpuLost | Code::ResetRequired => Self::Lost { call },
            Code::DriverNotLoaded => Self::NoDriver,
            Code::NotSupported | Code::FunctionNotFound | Code::FailedToLoadSymbol(_) => Self::NotSupported { call },
            Code::InUse => Self::InUse { call },
            source => Self::Call { call, source },
        }
    }

    /// Whether only a new start of the library can help.
    pub(crate) fn is_fatal_to_handle(&self) -> bool {
        matches!(self, Self::NoDriver | Self::Call { source: Code::Uninitialized | Code::LibRmVersionMismatch, .. })
    }
}

/// A node's GPUs, in the consumer's words. Threads may call it at the same time.
pub trait Gpus: Send + Sync {
    /// The driver, and how many GPUs it has. Asks no GPU.
    fn census(&self) -> Result<Census, NvmlError>;

    /// The GPU at one of NVML's indices. Asks no other GPU.
    fn at(&self, index: u32) -> Result<Gpu, NvmlError>;

    /// The GPU at an index with its processes: none where the GPU does not say them.
    fn observe(&self, index: u32) -> Result<Observation, NvmlError> {
        let gpu = self.at(index)?;
        let processes = self.processes(&gpu.uuid).unwrap_or_default();
        Ok(Observation { gpu, processes })
    }

    /// Reports events of the GPU at an index, and nothing every few seconds, until `tell` breaks.
    /// Blocks this thread meanwhile.
    fn listen(&self, _index: u32, _tell: &mut dyn FnMut(Option<GpuEvent>) -> ControlFlow<()>) -> Result<(), NvmlError> {
        Err(NvmlError::NotSupported { call: "nvmlDeviceRegisterEvents" })
    }

    /// One GPU by its UUID.
    fn look(&self, uuid: &str) -> Result<Gpu, NvmlError>;

    /// The processes that use a GPU or MIG device by its UUID.
    fn processes(&self, uuid: &str) -> Result<Vec<Process>, NvmlError>;

    /// What the driver says of a GPU's memory, and of what it needs. A part that it does not say is
    /// none; an error is one of the GPU.
    fn vitals(&self, _uuid: &str) -> Result<Vitals, NvmlError> {
        Ok(Vitals::default())
    }

    /// The same, and whether the driver tells MPS clients from other processes.
    fn tenants(&self, uuid: &str) -> Result<Tenants, NvmlError> {
        Ok(Tenants { processes: self.processes(uuid)?, tells_clients: true })
    }

    /// The newest CUDA that the driver serves: major and minor.
    fn cuda_version(&self) -> Result<(u32, u32), NvmlError> {
        Err(NvmlError::NotSupported { call: "nvmlSystemGetCudaDriverVersion" })
    }

    /// The compute mode of a GPU.
    fn compute_mode(&self, _uuid: &str) -> Result<ComputeMode, NvmlError> {
        Err(NvmlError::NotSupported { call: "nvmlDeviceGetComputeMode" })
    }

    /// Sets the compute mode of a GPU, and says what it was before.
    fn set_compute_mode(&self, uuid: &str, mode: ComputeMode) -> Result<ComputeMode, NvmlError>;

    /// Turns MIG mode of a GPU on or off, and says whether it is so already. The GPU must be idle;
    /// a driver may reset it, and change what it says of it.
    fn set_mig_mode(&self, gpu: &str, on: bool) -> Result<MigActivation, NvmlError>;

    /// Makes a GPU instance of `profile` at exactly `start`, with one compute instance over all of
    /// it; nothing is left where it fails.
    fn create_mig_instance(&self, gpu: &str, profile: &str, start: u32) -> Result<MigInstance, NvmlError>;

    /// Destroys a GPU instance and its compute instances.
    fn destroy_mig_instance(&self, gpu: &str, gpu_instance: u32) -> Result<(), NvmlError>;
}

/// The driver, without its GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Census {
    /// Driver version.
    pub driver: String,
    /// Number of GPUs. NVML's indices are those below it.
    pub count: u32,
}

/// One GPU and who uses it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Observation {
    /// The GPU.
    pub gpu: Gpu,
    /// Its processes, those in its MIG instances included.
    pub processes: Vec<Process>,
}

/// What the driver says of a GPU's memory, and of what it needs. None is what this GPU or driver
/// does not say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Vitals {
    /// Uncorrected ECC errors since the driver was loaded, or the GPU reset
    /// (`nvmlDeviceGetTotalEccErrors`, volatile).
    pub uncorrected: Option<u64>,
    /// Pages are to be retired, or rows remapped, at the next reset
    /// (`nvmlDeviceGetRetiredPagesPendingStatus`, `nvmlDeviceGetRemappedRows`).
    pub remap_pending: Option<bool>,
    /// A row could not be remapped (`nvmlDeviceGetRemappedRows`).
    pub remap_failed: Option<bool>,
    /// What the driver wants done (`NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`, from driver 570 on).
    pub recovery: Option<Recovery>,
}

/// What the driver wants done about a GPU (`nvmlDeviceGpuRecoveryAction_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recovery {
    /// Nothing.
    Nothing,
    /// A reset of the GPU, or of its bus.
    Reset,
    /// A restart of the node.
    Reboot,
    /// A reset when convenient, or that it takes no part in transfers between GPUs: it works
    /// meanwhile.
    Drain,
}

/// When a MIG mode that was set holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MigActivation {
    /// Now.
    Now,
    /// After a reset of the GPU, which the driver cannot do: of a GPU that is passed through to a
    /// virtual machine, after its restart.
    AfterReset,
    /// Not before nothing uses the GPU; the driver keeps it pending.
    InUse,
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// NVML's UUID.
    pub uuid: String,
    /// NVML's index.
    pub index: u32,
    /// The number in `/dev/nvidia<minor>`.
    pub minor: u32,
    /// Product name.
    pub model: String,
    /// What CUDA sees as the total: NVML's total less what the driver keeps.
    pub memory: Mebibytes,
    /// Streaming multiprocessors with MIG off.
    pub sms: Sms,
    /// PCI bus id, in sysfs's form: `0000:3b:00.0`.
    pub pci: String,
    /// NUMA node.
    pub numa: Option<u32>,
    /// CUDA compute capability.
    pub compute_capability: (u32, u32),
    /// MIG, where the GPU can.
    pub mig: Option<Mig>,
}

/// MIG of one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mig {
    /// MIG mode is on.
    pub enabled: bool,
    /// The mode after the next reset, where it differs.
    pub pending: Option<bool>,
    /// Profiles and placements as NVML reports them.
    pub profiles: Vec<MigProfile>,
    /// GPU instances that exist, by start.
    pub instances: Vec<MigInstance>,
}

/// One MIG profile of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigProfile {
    /// NVML's id, for making instances on this GPU.
    pub id: u32,
    /// Name without prefix: `1g.10gb`, `1g.10gb+me`.
    pub name: String,
    /// Memory.
    pub memory: Mebibytes,
    /// Streaming multiprocessors.
    pub sms: Sms,
    /// Compute slices.
    pub slices: u32,
    /// Memory slices of one instance.
    pub size: u32,
    /// First memory slices where one may lie.
    pub starts: Vec<u32>,
}

/// One GPU instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigInstance {
    /// UUID of the MIG device; empty while it has no compute instance.
    pub uuid: String,
    /// Profile name without prefix.
    pub profile: String,
    /// First memory slice.
    pub start: u32,
    /// GPU instance id.
    pub gpu_instance: u32,
    /// Compute instance id, of the first one.
    pub compute_instance: Option<u32>,
}

/// A process on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Host pid.
    pub pid: u32,
    /// Memory in bytes, where the driver knows it.
    pub memory: Option<u64>,
    /// It is an MPS client.
    pub mps: bool,
    /// GPU instance, under MIG.
    pub gpu_instance: Option<u32>,
}

/// The processes on a device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tenants {
    /// They, by pid.
    pub processes: Vec<Process>,
    /// The driver says which of them are MPS clients; where not, [`Process::mps`] says nothing.
    pub tells_clients: bool,
}

/// Who may open contexts on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComputeMode {
    /// Any process.
    Default,
    /// One process at a time.
    ExclusiveProcess,
    /// None.
    Prohibited,
}

/// Sets the compute mode of a GPU, and says what it was before.
///
/// For a short-lived process: the library is loaded and let go.
pub fn set_compute_mode(library: Option<&Path>, uuid: &str, mode: ComputeMode) -> Result<ComputeMode, NvmlError> {
    let search = Search { library: library.map(Path::to_owned), ..Search::default() };
    Nvml::open(&search)?.set_compute_mode(uuid, mode)
}
