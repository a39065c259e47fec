//! NVML: what GPUs a node has, how they are, and the few settings that Cleave changes.
//!
//! The consumer's words are [`Gpus`]; [`Nvml`] is the library behind it. GPUs fail one by one: an [`Inventory`] has a result for each.
//! A call may hang in the driver, so a program that has something else to do puts NVML behind a [`Worker`].
//!
//! This module holds the only unsafe code of the product: calls that nvml-wrapper does not wrap (MIG instances, and events with the
//! instance that they are of), in `sys.rs`.
mod events;
mod find;
mod library;
mod sys;
mod worker;

use std::collections::BTreeMap;
use std::path::Path;

use cleave_plan::units::{Mebibytes, Sms};
use nvml_wrapper::error::NvmlError as Code;
use serde::{Deserialize, Serialize};

pub use events::{EventWatch, GpuEvent};
pub use find::Search;
pub use library::Nvml;
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
    /// An earlier call has not returned.
    #[error("the driver does not answer: a call has not returned for {0:?}")]
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

/// A node's GPUs, in the consumer's words.
pub trait Gpus: Send {
    /// Every GPU by index, each with its own result.
    fn inventory(&self) -> Result<Inventory, NvmlError>;

    /// One GPU by its UUID.
    fn look(&self, uuid: &str) -> Result<Gpu, NvmlError>;

    /// The processes that use a GPU or MIG device by its UUID.
    fn processes(&self, uuid: &str) -> Result<Vec<Process>, NvmlError>;

    /// What the driver says of a GPU's memory, and of what it needs. A part that it does not say is none; an error is one of the GPU.
    fn vitals(&self, _uuid: &str) -> Result<Vitals, NvmlError> {
        Ok(Vitals::default())
    }

    /// The same, and whether the driver tells MPS clients from other processes.
    fn tenants(&self, uuid: &str) -> Result<Tenants, NvmlError> {
        Ok(Tenants { processes: self.processes(uuid)?, tells_clients: true })
    }

    /// The tenants of several devices. A device that does not say them is left out: nothing is known of it.
    ///
    /// # Errors
    /// Only where no device can be asked before the library is started anew.
    fn tenants_of(&self, uuids: &[String]) -> Result<BTreeMap<String, Tenants>, NvmlError> {
        let mut told = BTreeMap::new();
        for uuid in uuids {
            match self.tenants(uuid) {
                Ok(tenants) => {
                    told.insert(uuid.clone(), tenants);
                }
                Err(error) if error.is_fatal_to_handle() => return Err(error),
                Err(error) => {
                    tracing::debug!(device = uuid, error = &error as &dyn std::error::Error, "no processes are told");
                }
            }
        }
        Ok(told)
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

    /// Turns MIG mode of a GPU on or off, and says whether it is so already. The GPU must be idle; a driver may reset it, and change what
    /// it says of it.
    fn set_mig_mode(&self, gpu: &str, on: bool) -> Result<MigActivation, NvmlError>;

    /// Makes a GPU instance of `profile` at exactly `start`, with one compute instance over all of it; nothing is left where it fails.
    fn create_mig_instance(&self, gpu: &str, profile: &str, start: u32) -> Result<MigInstance, NvmlError>;

    /// Destroys a GPU instance and its compute instances.
    fn destroy_mig_instance(&self, gpu: &str, gpu_instance: u32) -> Result<(), NvmlError>;
}

/// The driver and its GPUs.
#[derive(Debug)]
pub struct Inventory {
    /// Driver version.
    pub driver: String,
    /// GPUs by NVML's index; one that cannot be asked says why.
    pub gpus: BTreeMap<u32, Result<Gpu, NvmlError>>,
    /// Processes by the GPU's UUID, those in its MIG instances included; a GPU that does not say them is left out.
    pub processes: BTreeMap<String, Vec<Process>>,
}

/// What the driver says of a GPU's memory, and of what it needs. None is what this GPU or driver does not say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Vitals {
    /// Uncorrected ECC errors since the driver was loaded, or the GPU reset (`nvmlDeviceGetTotalEccErrors`, volatile).
    pub uncorrected: Option<u64>,
    /// Pages are to be retired, or rows remapped, at the next reset (`nvmlDeviceGetRetiredPagesPendingStatus`, `nvmlDeviceGetRemappedRows`).
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
    /// A reset when convenient, or that it takes no part in transfers between GPUs: it works meanwhile.
    Drain,
}

/// When a MIG mode that was set holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MigActivation {
    /// Now.
    Now,
    /// After a reset of the GPU, which the driver cannot do: of a GPU that is passed through to a virtual machine, after its restart.
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
