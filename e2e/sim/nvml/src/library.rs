//! Manages the library's state: the initialization count, and the objects of the handles.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nvml_wrapper_sys::bindings as sys;
use sim_machine::{DeviceRef, Gpu, Machine, MigError, Model, SessionLease, State};

/// An NVML return code other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) sys::nvmlReturn_t);

impl Code {
    pub(crate) const UNINITIALIZED: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED);
    pub(crate) const INVALID_ARGUMENT: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT);
    pub(crate) const NOT_SUPPORTED: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED);
    pub(crate) const NO_PERMISSION: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION);
    pub(crate) const NOT_FOUND: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND);
    pub(crate) const INSUFFICIENT_SIZE: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE);
    pub(crate) const DRIVER_NOT_LOADED: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED);
    pub(crate) const TIMEOUT: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT);
    pub(crate) const FUNCTION_NOT_FOUND: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND);
    pub(crate) const GPU_IS_LOST: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST);
    pub(crate) const VERSION_MISMATCH: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    pub(crate) const UNKNOWN: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN);
}

impl From<sim_machine::Error> for Code {
    fn from(_: sim_machine::Error) -> Self {
        Self::UNKNOWN
    }
}

impl From<MigError> for Code {
    fn from(error: MigError) -> Self {
        match error {
            MigError::NotSupported => Self::NOT_SUPPORTED,
            MigError::InvalidArgument => Self::INVALID_ARGUMENT,
            MigError::InsufficientResources => Self(sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES),
            MigError::InUse => Self(sys::nvmlReturn_enum_NVML_ERROR_IN_USE),
            MigError::NotFound => Self::NOT_FOUND,
            MigError::ResetRequired => Self(sys::nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED),
        }
    }
}

pub(crate) type Result<T, E = Code> = std::result::Result<T, E>;

/// The object that a handle refers to, identified by names and numbers. A handle is not reused
/// after its object no longer exists. Calls with the handle then fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HandleTarget {
    /// A GPU or a MIG device, by UUID.
    Device(String),
    /// A GPU instance: the GPU's UUID and the instance's id.
    GpuInstance(String, u32),
    /// A compute instance: the GPU's UUID, the GPU instance's id and the compute instance's id.
    ComputeInstance(String, u32, u32),
    /// An event set, by its number.
    EventSet(u64),
}

/// A handle, as C programs receive it. A handle is a number and not an address, so the library can
/// detect an invalid handle.
pub(crate) type Handle = usize;

/// The state between `nvmlInit` and `nvmlShutdown`.
#[derive(Debug)]
struct InitializedLibrary {
    users: usize,
    machine: Option<Machine>,
    objects: Vec<HandleTarget>,
    /// Sessions of the driver and of every GPU, from the first `nvmlInit` to the last
    /// `nvmlShutdown`. The real library also opens each GPU in `nvmlInit`, before any handle exists
    /// (measured with driver 580 on one H200).
    open: Vec<SessionLease>,
}

static LIBRARY: Mutex<InitializedLibrary> =
    Mutex::new(InitializedLibrary { users: 0, machine: None, objects: Vec::new(), open: Vec::new() });

// Handles start at a large number, so that the library does not mistake 0 or a count for a handle.
const FIRST_HANDLE: usize = 0x4e56_0000;

fn lock_library() -> MutexGuard<'static, InitializedLibrary> {
    LIBRARY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Implements `nvmlInit`. Each successful call requires a call of `nvmlShutdown`.
pub(crate) fn init(name: &str) -> sys::nvmlReturn_t {
    catch_panic(|| {
        // After the last `nvmlShutdown`, reopen the machine at the next `nvmlInit`, because `simgpu
        // init` may have replaced it.
        let known = lock_library().machine.clone();
        let machine = match known {
            Some(machine) => machine,
            None => Machine::open_default().map_err(|e| match e {
                sim_machine::Error::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
                    Code::DRIVER_NOT_LOADED
                }
                _ => Code::UNKNOWN,
            })?,
        };
        let state = begin_call(&machine, name, None)?;
        if !state.driver.present {
            return Err(Code::DRIVER_NOT_LOADED);
        }
        let mut library = lock_library();
        if library.users == 0 {
            let gpus = state.gpus.iter().map(|gpu| Some(gpu.uuid.as_str()));
            let leases = gpus.chain([None]).map(|gpu| machine.open_session(gpu));
            library.open = leases.collect::<Result<_, _>>()?;
        }
        library.users += 1;
        library.machine = Some(machine);
        Ok(())
    })
}

/// Implements `nvmlShutdown`.
pub(crate) fn shutdown() -> sys::nvmlReturn_t {
    catch_panic(|| {
        let mut library = lock_library();
        library.users = library.users.checked_sub(1).ok_or(Code::UNINITIALIZED)?;
        if library.users == 0 {
            library.machine = None;
            library.open.clear();
        }
        Ok(())
    })
}

/// Returns the handle of an object. The handles of equal objects are equal.
pub(crate) fn handle_of(object: HandleTarget) -> Handle {
    let mut library = lock_library();
    let at = library.objects.iter().position(|o| *o == object).unwrap_or_else(|| {
        library.objects.push(object);
        library.objects.len() - 1
    });
    FIRST_HANDLE + at * 16
}

/// Returns the object of a handle.
pub(crate) fn object_of_handle(handle: Handle) -> Result<HandleTarget> {
    let offset = handle.checked_sub(FIRST_HANDLE).filter(|o| o % 16 == 0).ok_or(Code::INVALID_ARGUMENT)?;
    lock_library().objects.get(offset / 16).cloned().ok_or(Code::INVALID_ARGUMENT)
}

/// The machine, and its state during one call.
#[derive(Debug)]
pub(crate) struct MachineView {
    pub(crate) machine: Machine,
    pub(crate) state: Arc<State>,
}

impl MachineView {
    fn new(name: &str, device: Option<&str>) -> Result<Self> {
        let machine = lock_library().machine.clone().ok_or(Code::UNINITIALIZED)?;
        let mut state = begin_call(&machine, name, device)?;
        if !state.driver.present {
            return Err(Code::UNKNOWN);
        }
        if state.gpus.iter().any(|gpu| gpu.removed) {
            let listed = Arc::make_mut(&mut state);
            listed.gpus.retain(|gpu| !gpu.removed);
            listed.gpus.iter_mut().zip(0..).for_each(|(gpu, index)| gpu.index = index);
        }
        Ok(Self { machine, state })
    }

    /// Returns a GPU and its model. Fails if the GPU is lost.
    pub(crate) fn gpu(&self, uuid: &str) -> Result<(&Gpu, &Model)> {
        let gpu = self.state.gpus.iter().find(|g| g.uuid == uuid).ok_or(Code::NOT_FOUND)?;
        if gpu.lost {
            return Err(Code::GPU_IS_LOST);
        }
        Ok((gpu, self.state.model(gpu)?))
    }
}

/// Applies the injected faults for a call. Returns the state that the call uses.
fn begin_call(machine: &Machine, name: &str, device: Option<&str>) -> Result<Arc<State>> {
    let begun = machine.begin_call(name, device)?;
    match begun.code {
        // A fault may inject a code that NVML does not define. Programs must tolerate such codes.
        Some(code) => Err(Code(code.unsigned_abs())),
        None => Ok(begun.state),
    }
}

/// Runs the body of a call. Catches panics, because a panic must not unwind into C.
pub(crate) fn catch_panic(body: impl FnOnce() -> Result<()>) -> sys::nvmlReturn_t {
    // The library ignores poisoned locks: its tables remain consistent after a panic, because each
    // change of an entry is a single write.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => sys::nvmlReturn_enum_NVML_SUCCESS,
        Ok(Err(code)) => code.0,
        Err(_) => Code::UNKNOWN.0,
    }
}

/// Runs a call that is not about a particular GPU.
pub(crate) fn call(name: &str, body: impl FnOnce(&MachineView) -> Result<()>) -> sys::nvmlReturn_t {
    catch_panic(|| body(&MachineView::new(name, None)?))
}

/// Runs a call about an instance of a GPU. Faults of the GPU apply to the call.
pub(crate) fn call_about_instance(name: &str, gpu: &str, body: impl FnOnce(&MachineView) -> Result<()>) -> Result<()> {
    body(&MachineView::new(name, Some(gpu))?)
}

/// Runs a call about a GPU or MIG device.
pub(crate) fn call_on_device(
    name: &str,
    device: Handle,
    body: impl FnOnce(&MachineView, DeviceRef<'_>) -> Result<()>,
) -> sys::nvmlReturn_t {
    catch_panic(|| {
        let HandleTarget::Device(uuid) = object_of_handle(device)? else { return Err(Code::INVALID_ARGUMENT) };
        let view = MachineView::new(name, Some(&uuid))?;
        let device = view.state.device(&uuid).ok_or(Code::NOT_FOUND)?;
        view.gpu(&device.gpu.uuid)?;
        body(&view, device)
    })
}

/// Runs a call about a GPU. MIG devices do not support the call.
pub(crate) fn call_on_gpu(
    name: &str,
    device: Handle,
    body: impl FnOnce(&MachineView, &Gpu, &Model) -> Result<()>,
) -> sys::nvmlReturn_t {
    call_on_device(name, device, |view, device| match device.mig {
        None => body(view, device.gpu, device.model),
        Some(_) => Err(Code::NOT_SUPPORTED),
    })
}

/// Runs a call that changes a GPU and requires root.
pub(crate) fn call_on_gpu_as_root(
    name: &str,
    device: Handle,
    body: impl FnOnce(&MachineView, &Gpu, &Model) -> Result<()>,
) -> sys::nvmlReturn_t {
    call_on_gpu(name, device, |view, gpu, model| {
        require_root()?;
        body(view, gpu, model)
    })
}

/// Returns an error unless the program runs as root: only root may change a GPU.
pub(crate) fn require_root() -> Result<()> {
    if rustix::process::geteuid().is_root() { Ok(()) } else { Err(Code::NO_PERMISSION) }
}
