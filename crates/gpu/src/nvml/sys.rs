//! The calls that nvml-wrapper does not wrap, or wraps incompletely: MIG instances, events with
//! their GPU instance, the first version of the memory call, remapped rows, and the device at the
//! end of an NVLink.
//!
//! The product has no other unsafe code. Each function passes NVML pointers only to its own
//! live, zeroed values and buffers, with their true lengths. Every handle comes from the same
//! library, which is still initialized: `Device` borrows `Nvml`, and [`XidSet`] shares it, so the
//! library outlives the handle.
#![allow(unsafe_code, reason = "NVML has a C interface, and nvml-wrapper leaves these calls to nvml-wrapper-sys")]
use std::ffi::{CStr, c_uint};
use std::mem;
use std::sync::Arc;

use cleave_plan::units::{Mebibytes, Sms};
use nvml_wrapper::error::{NvmlError as Code, nvml_sym, nvml_try};
use nvml_wrapper::{Device, EventSet, Nvml};
use nvml_wrapper_sys::bindings::{
    NVML_COMPUTE_INSTANCE_PROFILE_COUNT, NVML_GPU_INSTANCE_PROFILE_COUNT, nvmlComputeInstance_t,
    nvmlComputeInstanceProfileInfo_t, nvmlDevice_t, nvmlEventData_t, nvmlEventSet_t, nvmlEventTypeXidCriticalError,
    nvmlGpuInstance_t, nvmlGpuInstanceInfo_t, nvmlGpuInstancePlacement_t, nvmlGpuInstanceProfileInfo_v2_t,
    nvmlMemory_t, nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE,
};

use super::error::{NvmlError, ignore_unless_lost};
use super::model::{MigInstance, MigProfile};

/// Upper limit for counts that NVML returns. No GPU has more slices or instances of one profile.
const MAX_RETURNED_COUNT: c_uint = 64;

fn device_handle(device: &Device<'_>) -> nvmlDevice_t {
    // SAFETY: the handle is used while the device, and with it the library, is borrowed.
    unsafe { device.handle() }
}

/// Returns a value that identifies a GPU's handle. Use it only for comparisons.
pub(super) fn handle_identity(device: &Device<'_>) -> usize {
    device_handle(device) as usize
}

/// Returns the total memory in bytes. Uses the version of the call that every driver supports.
pub(super) fn memory_total_v1(nvml: &Nvml, device: &Device<'_>) -> Result<u64, NvmlError> {
    const CALL: &str = "nvmlDeviceGetMemoryInfo";
    let call =
        nvml_sym(nvml.lib().nvmlDeviceGetMemoryInfo.as_ref()).map_err(|code| NvmlError::from_code(CALL, code))?;
    // SAFETY: see the module documentation.
    let (status, memory) = unsafe {
        let mut memory: nvmlMemory_t = mem::zeroed();
        (call(device_handle(device), &raw mut memory), memory)
    };
    nvml_try(status).map_err(|code| NvmlError::from_code(CALL, code))?;
    Ok(memory.total)
}

/// The state of a GPU's remapped rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RemappedRows {
    /// Whether the next reset will remap rows.
    pub(super) pending: bool,
    /// Whether a row could not be remapped.
    pub(super) failed: bool,
}

/// Returns the state of a GPU's remapped rows, or `None` if the GPU or driver does not report it.
pub(super) fn remapped_rows(nvml: &Nvml, device: &Device<'_>) -> Result<Option<RemappedRows>, NvmlError> {
    const CALL: &str = "nvmlDeviceGetRemappedRows";
    let Ok(call) = nvml_sym(nvml.lib().nvmlDeviceGetRemappedRows.as_ref()) else { return Ok(None) };
    let [mut corrected, mut uncorrected, mut pending, mut failed]: [c_uint; 4] = [0; 4];
    // SAFETY: see the module documentation.
    let status = unsafe {
        call(device_handle(device), &raw mut corrected, &raw mut uncorrected, &raw mut pending, &raw mut failed)
    };
    let answered = ignore_unless_lost(CALL, nvml_try(status))?;
    Ok(answered.map(|()| RemappedRows { pending: pending != 0, failed: failed != 0 }))
}

/// Returns the kind of the device at the other end of an NVLink (`nvmlIntNvLinkDeviceType_t`).
/// nvml-wrapper's `remote_device_type` discards NVML's answer.
pub(super) fn nvlink_remote_type(nvml: &Nvml, device: &Device<'_>, link: u32) -> Result<c_uint, Code> {
    let call = nvml_sym(nvml.lib().nvmlDeviceGetNvLinkRemoteDeviceType.as_ref())?;
    let mut kind = 0;
    // SAFETY: see the module documentation.
    nvml_try(unsafe { call(device_handle(device), link, &raw mut kind) })?;
    Ok(kind)
}

/// Returns the MIG profiles of a GPU and their placements, in NVML's order.
pub(super) fn mig_profiles(nvml: &Nvml, device: &Device<'_>) -> Result<Vec<MigProfile>, NvmlError> {
    const CALL: &str = "nvmlDeviceGetGpuInstanceProfileInfoV";
    let lib = nvml.lib();
    // Drivers whose MIG profiles have no names lack this call.
    let Ok(call) = nvml_sym(lib.nvmlDeviceGetGpuInstanceProfileInfoV.as_ref()) else { return Ok(Vec::new()) };
    let mut profiles = Vec::new();
    for number in 0..NVML_GPU_INSTANCE_PROFILE_COUNT {
        // SAFETY: see the module documentation.
        let (status, info) = unsafe {
            let mut info: nvmlGpuInstanceProfileInfo_v2_t = mem::zeroed();
            info.version = struct_version::<nvmlGpuInstanceProfileInfo_v2_t>(2);
            (call(device_handle(device), number, &raw mut info), info)
        };
        match nvml_try(status) {
            Ok(()) => {}
            // This GPU has no such profile, or the driver is too old to know the profile.
            Err(Code::NotSupported | Code::InvalidArg | Code::NotFound) => continue,
            Err(code) => return Err(NvmlError::from_code(CALL, code)),
        }
        let placements = mig_placements(nvml, device, info.id)?;
        profiles.push(MigProfile {
            id: info.id,
            name: profile_name(&info.name),
            memory: Mebibytes(info.memorySizeMB),
            sms: Sms(info.multiprocessorCount),
            slices: info.sliceCount,
            size: placements.first().map_or(0, |placement| placement.size),
            starts: placements.iter().map(|placement| placement.start).collect(),
        });
    }
    Ok(profiles)
}

/// Returns the name of a profile without its prefix `MIG`.
fn profile_name(raw: &[std::ffi::c_char]) -> String {
    // The signedness of C's `char` depends on the architecture, but the bytes are the same.
    let bytes: Vec<u8> = raw.iter().map(|&byte| byte.to_ne_bytes()[0]).collect();
    let name = CStr::from_bytes_until_nul(&bytes).map(CStr::to_string_lossy).unwrap_or_default();
    name.strip_prefix("MIG ").unwrap_or(&name).to_owned()
}

/// Returns `NVML_STRUCT_VERSION` of `nvml.h`: the size is in the lower three bytes, and the version
/// is in the fourth byte.
fn struct_version<T>(version: c_uint) -> c_uint {
    // The size fits into three bytes: every NVML structure is far smaller than 16 MiB.
    c_uint::try_from(mem::size_of::<T>()).unwrap_or(0) | (version << 24)
}

fn mig_placements(
    nvml: &Nvml,
    device: &Device<'_>,
    profile: u32,
) -> Result<Vec<nvmlGpuInstancePlacement_t>, NvmlError> {
    const CALL: &str = "nvmlDeviceGetGpuInstancePossiblePlacements_v2";
    let call = nvml_sym(nvml.lib().nvmlDeviceGetGpuInstancePossiblePlacements_v2.as_ref())
        .map_err(|code| NvmlError::from_code(CALL, code))?;
    let mut count: c_uint = 0;
    // SAFETY: with a null buffer, NVML only returns the count.
    let status = unsafe { call(device_handle(device), profile, std::ptr::null_mut(), &raw mut count) };
    if status != nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE {
        nvml_try(status).map_err(|code| NvmlError::from_code(CALL, code))?;
    }
    count = count.min(MAX_RETURNED_COUNT);
    // SAFETY: a placement is two integers; zero is a valid value of both.
    let mut placements: Vec<nvmlGpuInstancePlacement_t> = vec![unsafe { mem::zeroed() }; count as usize];
    if count > 0 {
        // SAFETY: the buffer has space for `count` placements.
        let status = unsafe { call(device_handle(device), profile, placements.as_mut_ptr(), &raw mut count) };
        nvml_try(status).map_err(|code| NvmlError::from_code(CALL, code))?;
        placements.truncate(count as usize);
    }
    placements.sort_unstable_by_key(|placement| placement.start);
    Ok(placements)
}

/// Returns the GPU instances of a GPU in MIG mode, sorted by start.
pub(super) fn mig_instances(
    nvml: &Nvml,
    device: &Device<'_>,
    profiles: &[MigProfile],
) -> Result<Vec<MigInstance>, NvmlError> {
    let lib = nvml.lib();
    let list = nvml_sym(lib.nvmlDeviceGetGpuInstances.as_ref())
        .map_err(|code| NvmlError::from_code("nvmlDeviceGetGpuInstances", code))?;
    let info = nvml_sym(lib.nvmlGpuInstanceGetInfo.as_ref())
        .map_err(|code| NvmlError::from_code("nvmlGpuInstanceGetInfo", code))?;
    let devices = mig_devices(nvml, device)?;
    let mut found = Vec::new();
    for profile in profiles {
        let mut handles: [nvmlGpuInstance_t; MAX_RETURNED_COUNT as usize] =
            [std::ptr::null_mut(); MAX_RETURNED_COUNT as usize];
        let mut count = MAX_RETURNED_COUNT;
        // SAFETY: NVML requires a buffer for all instances of a profile. This buffer is larger.
        let status = unsafe { list(device_handle(device), profile.id, handles.as_mut_ptr(), &raw mut count) };
        match nvml_try(status) {
            Ok(()) => {}
            Err(Code::NotSupported | Code::NotFound) => continue,
            Err(code) => return Err(NvmlError::from_code("nvmlDeviceGetGpuInstances", code)),
        }
        for &instance in handles.iter().take(count as usize) {
            // SAFETY: see the module documentation.
            let (status, got) = unsafe {
                let mut got: nvmlGpuInstanceInfo_t = mem::zeroed();
                (info(instance, &raw mut got), got)
            };
            nvml_try(status).map_err(|code| NvmlError::from_code("nvmlGpuInstanceGetInfo", code))?;
            // Drivers may list an instance under every profile of the same shape.
            if got.profileId != profile.id {
                continue;
            }
            let of_instance = devices.iter().find(|mig| mig.gpu_instance == got.id);
            found.push(MigInstance {
                uuid: of_instance.map(|mig| mig.uuid.clone()).unwrap_or_default(),
                profile: profile.name.clone(),
                start: got.placement.start,
                gpu_instance: got.id,
                compute_instance: of_instance.map(|mig| mig.compute_instance),
            });
        }
    }
    found.sort_unstable_by_key(|instance: &MigInstance| (instance.start, instance.gpu_instance));
    Ok(found)
}

struct MigDevice {
    uuid: String,
    gpu_instance: u32,
    compute_instance: u32,
}

/// Returns the MIG devices of a GPU, sorted by instance. Each MIG device is a compute instance.
fn mig_devices(nvml: &Nvml, device: &Device<'_>) -> Result<Vec<MigDevice>, NvmlError> {
    let lib = nvml.lib();
    let gpu_instance_id = nvml_sym(lib.nvmlDeviceGetGpuInstanceId.as_ref())
        .map_err(|code| NvmlError::from_code("nvmlDeviceGetGpuInstanceId", code))?;
    let compute_instance_id = nvml_sym(lib.nvmlDeviceGetComputeInstanceId.as_ref())
        .map_err(|code| NvmlError::from_code("nvmlDeviceGetComputeInstanceId", code))?;
    let count = device
        .mig_device_count()
        .map_err(|code| NvmlError::from_code("nvmlDeviceGetMaxMigDeviceCount", code))?
        .min(MAX_RETURNED_COUNT);
    let mut devices = Vec::new();
    for index in 0..count {
        let mig = match device.mig_device_by_index(index) {
            Ok(mig) => mig,
            // Indices may have gaps.
            Err(Code::NotFound | Code::InvalidArg) => continue,
            Err(code) => return Err(NvmlError::from_code("nvmlDeviceGetMigDeviceHandleByIndex", code)),
        };
        let uuid = mig.uuid().map_err(|code| NvmlError::from_code("nvmlDeviceGetUUID", code))?;
        let (mut gpu_instance, mut compute_instance) = (0, 0);
        // SAFETY: see the module documentation.
        nvml_try(unsafe { gpu_instance_id(device_handle(&mig), &raw mut gpu_instance) })
            .map_err(|code| NvmlError::from_code("nvmlDeviceGetGpuInstanceId", code))?;
        // SAFETY: see the module documentation.
        nvml_try(unsafe { compute_instance_id(device_handle(&mig), &raw mut compute_instance) })
            .map_err(|code| NvmlError::from_code("nvmlDeviceGetComputeInstanceId", code))?;
        devices.push(MigDevice { uuid, gpu_instance, compute_instance });
    }
    devices.sort_unstable_by_key(|mig| (mig.gpu_instance, mig.compute_instance));
    Ok(devices)
}

/// Creates a GPU instance at exactly `start`, and one compute instance that spans the GPU instance.
/// Returns the ID of the GPU instance.
pub(super) fn create_gpu_instance(
    nvml: &Nvml,
    device: &Device<'_>,
    profile: &MigProfile,
    start: u32,
) -> Result<u32, NvmlError> {
    const CALL: &str = "nvmlDeviceCreateGpuInstanceWithPlacement";
    let lib = nvml.lib();
    let create = nvml_sym(lib.nvmlDeviceCreateGpuInstanceWithPlacement.as_ref())
        .map_err(|code| NvmlError::from_code(CALL, code))?;
    let info = nvml_sym(lib.nvmlGpuInstanceGetInfo.as_ref())
        .map_err(|code| NvmlError::from_code("nvmlGpuInstanceGetInfo", code))?;
    let destroy = nvml_sym(lib.nvmlGpuInstanceDestroy.as_ref())
        .map_err(|code| NvmlError::from_code("nvmlGpuInstanceDestroy", code))?;
    let placement = nvmlGpuInstancePlacement_t { start, size: profile.size };
    let mut instance: nvmlGpuInstance_t = std::ptr::null_mut();
    // SAFETY: see the module documentation.
    nvml_try(unsafe { create(device_handle(device), profile.id, &raw const placement, &raw mut instance) })
        .map_err(|code| NvmlError::from_code(CALL, code))?;
    // SAFETY: see the module documentation.
    let (status, got) = unsafe {
        let mut got: nvmlGpuInstanceInfo_t = mem::zeroed();
        (info(instance, &raw mut got), got)
    };
    let made = nvml_try(status)
        .map_err(|code| NvmlError::from_code("nvmlGpuInstanceGetInfo", code))
        .and_then(|()| create_compute_instance(nvml, instance, profile.slices));
    if let Err(error) = made {
        // SAFETY: the instance was created above, and no other code has its handle.
        let rollback = unsafe { destroy(instance) };
        if let Err(code) = nvml_try(rollback) {
            tracing::error!(%code, gpu_instance = got.id, "failed to destroy GPU instance without compute instance");
        }
        return Err(error);
    }
    Ok(got.id)
}

/// Creates the compute instance that uses all `slices` of a GPU instance.
fn create_compute_instance(nvml: &Nvml, instance: nvmlGpuInstance_t, slices: u32) -> Result<(), NvmlError> {
    const CALL: &str = "nvmlGpuInstanceCreateComputeInstance";
    let lib = nvml.lib();
    let info = nvml_sym(lib.nvmlGpuInstanceGetComputeInstanceProfileInfo.as_ref())
        .map_err(|code| NvmlError::from_code(CALL, code))?;
    let create =
        nvml_sym(lib.nvmlGpuInstanceCreateComputeInstance.as_ref()).map_err(|code| NvmlError::from_code(CALL, code))?;
    let mut full = None;
    for number in 0..NVML_COMPUTE_INSTANCE_PROFILE_COUNT {
        // SAFETY: see the module documentation; 0 is the only engine profile.
        let (status, got) = unsafe {
            let mut got: nvmlComputeInstanceProfileInfo_t = mem::zeroed();
            (info(instance, number, 0, &raw mut got), got)
        };
        if nvml_try(status).is_ok() && got.sliceCount == slices && got.instanceCount > 0 {
            full = Some(got.id);
            break;
        }
    }
    let Some(profile) = full else { return Err(NvmlError::NotSupported { call: CALL }) };
    let mut compute: nvmlComputeInstance_t = std::ptr::null_mut();
    // SAFETY: see the module documentation.
    nvml_try(unsafe { create(instance, profile, &raw mut compute) }).map_err(|code| NvmlError::from_code(CALL, code))
}

/// Destroys the compute instances of a GPU instance, then the GPU instance.
pub(super) fn destroy_gpu_instance(nvml: &Nvml, device: &Device<'_>, gpu_instance: u32) -> Result<(), NvmlError> {
    const CALL: &str = "nvmlGpuInstanceDestroy";
    let lib = nvml.lib();
    let by_id = nvml_sym(lib.nvmlDeviceGetGpuInstanceById.as_ref()).map_err(|code| NvmlError::from_code(CALL, code))?;
    let info = nvml_sym(lib.nvmlGpuInstanceGetComputeInstanceProfileInfo.as_ref())
        .map_err(|code| NvmlError::from_code(CALL, code))?;
    let list =
        nvml_sym(lib.nvmlGpuInstanceGetComputeInstances.as_ref()).map_err(|code| NvmlError::from_code(CALL, code))?;
    let destroy_compute =
        nvml_sym(lib.nvmlComputeInstanceDestroy.as_ref()).map_err(|code| NvmlError::from_code(CALL, code))?;
    let destroy = nvml_sym(lib.nvmlGpuInstanceDestroy.as_ref()).map_err(|code| NvmlError::from_code(CALL, code))?;
    let mut instance: nvmlGpuInstance_t = std::ptr::null_mut();
    // SAFETY: see the module documentation.
    nvml_try(unsafe { by_id(device_handle(device), gpu_instance, &raw mut instance) }).map_err(|code| match code {
        Code::NotFound | Code::InvalidArg => NvmlError::NotFound(format!("GPU instance {gpu_instance}")),
        code => NvmlError::from_code(CALL, code),
    })?;
    for number in 0..NVML_COMPUTE_INSTANCE_PROFILE_COUNT {
        // SAFETY: see the module documentation.
        let (status, profile) = unsafe {
            let mut got: nvmlComputeInstanceProfileInfo_t = mem::zeroed();
            (info(instance, number, 0, &raw mut got), got)
        };
        if nvml_try(status).is_err() {
            continue;
        }
        let mut handles: [nvmlComputeInstance_t; MAX_RETURNED_COUNT as usize] =
            [std::ptr::null_mut(); MAX_RETURNED_COUNT as usize];
        let mut count = MAX_RETURNED_COUNT;
        // SAFETY: the buffer is larger than any profile's number of instances.
        if nvml_try(unsafe { list(instance, profile.id, handles.as_mut_ptr(), &raw mut count) }).is_err() {
            continue;
        }
        for &compute in handles.iter().take(count as usize) {
            // SAFETY: NVML just returned this handle.
            nvml_try(unsafe { destroy_compute(compute) })
                .map_err(|code| NvmlError::from_code("nvmlComputeInstanceDestroy", code))?;
        }
    }
    // SAFETY: see the module documentation.
    nvml_try(unsafe { destroy(instance) }).map_err(|code| NvmlError::from_code(CALL, code))
}

/// An event as NVML returns it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RawEvent {
    /// [`handle_identity`] of the GPU.
    pub(super) device: usize,
    /// NVML's event type bits.
    pub(super) kind: u64,
    /// The number of the XID, if this is a critical XID.
    pub(super) data: u64,
    /// GPU instance, if the GPU is in MIG mode.
    pub(super) gpu_instance: Option<u32>,
}

/// NVML's event type bit of a critical XID.
pub(super) const XID_EVENT_TYPE: u64 = nvmlEventTypeXidCriticalError as u64;

/// Adds the critical XIDs of a GPU to an event set. The function `register_events` of nvml-wrapper
/// drops the set if the call fails.
fn register_for_xids(nvml: &Nvml, device: &Device<'_>, set: &EventSet<'_>) -> Result<(), NvmlError> {
    const CALL: &str = "nvmlDeviceRegisterEvents";
    let call =
        nvml_sym(nvml.lib().nvmlDeviceRegisterEvents.as_ref()).map_err(|code| NvmlError::from_code(CALL, code))?;
    // SAFETY: the set is borrowed and neither freed nor copied here; see the module
    // documentation.
    nvml_try(unsafe { call(device_handle(device), XID_EVENT_TYPE, set.handle()) })
        .map_err(|code| NvmlError::from_code(CALL, code))
}

/// An event set with the critical XIDs of one GPU. Keeps the library initialized. nvml-wrapper's
/// `EventSet` borrows the library, so only one thread could read it.
#[derive(Debug)]
pub(super) struct XidSet {
    nvml: Arc<Nvml>,
    set: nvmlEventSet_t,
}

// SAFETY: any thread may use a set, but only one at a time. `next_event` borrows the set mutably.
unsafe impl Send for XidSet {}

impl XidSet {
    /// Registers a GPU in a new set.
    pub(super) fn new(nvml: &Arc<Nvml>, device: &Device<'_>) -> Result<Self, NvmlError> {
        let set = nvml.create_event_set().map_err(|code| NvmlError::from_code("nvmlEventSetCreate", code))?;
        register_for_xids(nvml, device, &set)?;
        // SAFETY: this value now owns the set. `forget` prevents that `set` frees it.
        let handle = unsafe { set.handle() };
        mem::forget(set);
        Ok(Self { nvml: Arc::clone(nvml), set: handle })
    }

    /// Returns the next event, or the error `Timeout` if there is none. nvml-wrapper's `wait` omits
    /// the GPU instance.
    pub(super) fn next_event(&mut self) -> Result<RawEvent, Code> {
        let call = nvml_sym(self.nvml.lib().nvmlEventSetWait_v2.as_ref())?;
        // SAFETY: this value owns the set; see the module documentation.
        let (status, data) = unsafe {
            let mut data: nvmlEventData_t = mem::zeroed();
            (call(self.set, &raw mut data, 0), data)
        };
        nvml_try(status)?;
        Ok(RawEvent {
            device: data.device as usize,
            kind: data.eventType,
            data: data.eventData,
            gpu_instance: (data.gpuInstanceId != c_uint::MAX).then_some(data.gpuInstanceId),
        })
    }
}

impl Drop for XidSet {
    fn drop(&mut self) {
        if let Ok(free) = nvml_sym(self.nvml.lib().nvmlEventSetFree.as_ref()) {
            // SAFETY: this value owns the set, and nothing uses the set afterwards.
            unsafe { free(self.set) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profile_names_have_neither_prefix_nor_padding() {
        let raw = |text: &str| {
            let mut name = [0; 96];
            for (slot, byte) in name.iter_mut().zip(text.bytes()) {
                *slot = std::ffi::c_char::from_ne_bytes([byte]);
            }
            name
        };
        assert_eq!(profile_name(&raw("MIG 1g.10gb+me")), "1g.10gb+me");
        assert_eq!(profile_name(&raw("2g.20gb")), "2g.20gb");
        assert_eq!(profile_name(&[b'x'.cast_signed(); 96]), "", "an unterminated name is empty");
    }

    #[test]
    fn structure_versions_match_the_header() {
        assert_eq!(struct_version::<nvmlGpuInstanceProfileInfo_v2_t>(2) >> 24, 2);
        assert_eq!(struct_version::<nvmlGpuInstanceProfileInfo_v2_t>(2) & 0xff_ffff, 152);
    }
}
