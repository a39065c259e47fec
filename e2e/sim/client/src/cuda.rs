//! Simulates the CUDA library. Contexts use MPS if a daemon is running, and otherwise use the GPU
//! directly.

use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};

use sim_machine::{ContextKind, EventKind, Machine};
use sim_mps::client::{CUDA_ERROR_NO_DEVICE, LimitEnvironment, MpsConnection, MpsContext};
use sim_mps::limits::context_overhead;
use sim_mps::wire::Device;

use crate::devices::DeviceSelection;

const CUDA_ERROR_ILLEGAL_ADDRESS: i32 = 700;
const CUDA_ERROR_UNKNOWN: i32 = 999;

/// The initialized library. The choice of MPS applies to the whole process.
pub(crate) struct Cuda {
    machine: Option<Machine>,
    mps: Option<MpsConnection>,
    devices: Vec<Device>,
}

/// A context on the program's first device.
pub(crate) enum Context {
    /// A context that an MPS server serves.
    Mps(MpsContext),
    /// A context that shares the whole GPU with other processes by time-slicing.
    Plain(PlainContext),
}

/// A context without MPS.
pub(crate) struct PlainContext {
    machine: Machine,
    context: sim_machine::Context,
    device: Device,
    error: AtomicI32,
}

impl Cuda {
    /// Initializes the library. Connects to the MPS daemon at `control`, if a daemon is listening,
    /// and waits for its answer without a deadline.
    ///
    /// # Errors
    /// Returns a `CUresult` if no device is visible, or if the MPS server refuses clients.
    pub(crate) fn init(control: &Path, given: &DeviceSelection) -> Result<Self, i32> {
        let machine = Machine::open_default().ok();
        let mps = MpsConnection::attach(control)?;
        let devices = match (&mps, &machine) {
            (Some(mps), machine) => given.visible_server_devices(mps.devices(), machine.as_ref()),
            (None, Some(machine)) => machine.snapshot().map(|state| given.visible_devices(&state)).unwrap_or_default(),
            (None, None) => Vec::new(),
        };
        if devices.is_empty() { Err(CUDA_ERROR_NO_DEVICE) } else { Ok(Self { machine, mps, devices }) }
    }

    /// Creates a context on the first device.
    ///
    /// # Errors
    /// Returns the `CUresult` of the failure.
    pub(crate) fn create_context(&self) -> Result<Context, i32> {
        if let Some(mps) = &self.mps {
            return mps.create_context(&LimitEnvironment::of_this_process(), &self.devices, 0).map(Context::Mps);
        }
        let machine = self.machine.clone().ok_or(CUDA_ERROR_NO_DEVICE)?;
        let device = self.devices.first().ok_or(CUDA_ERROR_NO_DEVICE)?.clone();
        let overhead = context_overhead(device.sms);
        let context = machine.open_context(&device.uuid, ContextKind::Compute, overhead);
        let context = context.map_err(|error| error.cuda_code())?;
        Ok(Context::Plain(PlainContext { machine, context, device, error: AtomicI32::new(0) }))
    }
}

impl Context {
    /// Returns whether MPS serves the context.
    pub(crate) fn uses_mps(&self) -> bool {
        matches!(self, Self::Mps(_))
    }

    /// Returns the device on which the context was created.
    pub(crate) fn device(&self) -> &Device {
        match self {
            Self::Mps(context) => context.device(),
            Self::Plain(plain) => &plain.device,
        }
    }

    /// Returns the number of SMs that the context may use.
    pub(crate) fn sms(&self) -> u32 {
        match self {
            Self::Mps(context) => context.sms(),
            Self::Plain(plain) => plain.device.sms,
        }
    }

    /// Returns the memory limit of the context in bytes, or `None` without a limit.
    pub(crate) fn memory_limit(&self) -> Option<u64> {
        match self {
            Self::Mps(context) => context.memory_limit(),
            Self::Plain(_) => None,
        }
    }

    /// Returns the free memory in bytes, as `cudaMemGetInfo` does.
    pub(crate) fn free_memory(&self) -> Result<u64, i32> {
        match self {
            Self::Mps(context) => context.free_memory(),
            Self::Plain(plain) => {
                plain.check_error()?;
                plain.context.memory().map(|memory| memory.free).map_err(|error| error.cuda_code())
            }
        }
    }

    /// Allocates `bytes` bytes of device memory.
    pub(crate) fn allocate(&self, bytes: u64) -> Result<(), i32> {
        match self {
            Self::Mps(context) => context.allocate(bytes),
            Self::Plain(plain) => {
                plain.check_error()?;
                plain.context.allocate(bytes).map_err(|error| error.cuda_code())
            }
        }
    }

    /// Starts kernels of `kernel_ms` milliseconds each.
    pub(crate) fn launch_kernels(&self, kernel_ms: f64) -> Result<(), i32> {
        match self {
            Self::Mps(context) => context.launch_kernels(kernel_ms),
            Self::Plain(plain) => plain.check_error(),
        }
    }

    /// Reports that all kernels have finished. The caller must have waited for the running kernel.
    pub(crate) fn synchronize(&self) -> Result<(), i32> {
        match self {
            Self::Mps(context) => context.synchronize(),
            Self::Plain(plain) => plain.check_error(),
        }
    }

    /// Runs a kernel with an illegal memory access. Later calls on the context return the error.
    pub(crate) fn access_illegally(&self) -> Result<(), i32> {
        match self {
            Self::Mps(context) => context.access_illegally(),
            Self::Plain(plain) => plain.access_illegally(),
        }
    }

    /// Returns the `CUresult` of the error that broke the context, if any.
    pub(crate) fn error(&self) -> Option<i32> {
        match self {
            Self::Mps(context) => context.error(),
            Self::Plain(plain) => plain.check_error().err(),
        }
    }
}

impl PlainContext {
    /// Fails with the `CUresult` of the error that broke the context, or if the context no longer
    /// exists.
    fn check_error(&self) -> Result<(), i32> {
        match self.error.load(Ordering::Relaxed) {
            0 => self.context.check_exists().map_err(|error| error.cuda_code()),
            code => Err(code),
        }
    }

    fn access_illegally(&self) -> Result<(), i32> {
        self.check_error()?;
        self.error.store(CUDA_ERROR_ILLEGAL_ADDRESS, Ordering::Relaxed);
        let updated = self.machine.update(|state| {
            let place = state.device(&self.device.uuid);
            let gpu = place.map(|device| device.gpu.uuid.clone()).unwrap_or_default();
            let instance = place.and_then(|device| device.mig).map(|(gpu, compute)| (gpu.id, compute.id));
            state.push_event(&gpu, EventKind::Xid, 31, instance);
            Ok::<_, sim_machine::Error>(())
        });
        updated.map_err(|_| CUDA_ERROR_UNKNOWN)
    }
}

/// Returns the name of a `CUresult`.
pub(crate) fn error_name(code: i32) -> &'static str {
    match code {
        1 => "CUDA_ERROR_INVALID_VALUE",
        2 => "CUDA_ERROR_OUT_OF_MEMORY",
        46 => "CUDA_ERROR_DEVICE_UNAVAILABLE",
        100 => "CUDA_ERROR_NO_DEVICE",
        101 => "CUDA_ERROR_INVALID_DEVICE",
        201 => "CUDA_ERROR_INVALID_CONTEXT",
        700 => "CUDA_ERROR_ILLEGAL_ADDRESS",
        709 => "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        805 => "CUDA_ERROR_MPS_CONNECTION_FAILED",
        806 => "CUDA_ERROR_MPS_RPC_FAILURE",
        807 => "CUDA_ERROR_MPS_SERVER_NOT_READY",
        808 => "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED",
        810 => "CUDA_ERROR_MPS_CLIENT_TERMINATED",
        _ => "CUDA_ERROR_UNKNOWN",
    }
}
