//! Implements [`Gpus`] with nvml-wrapper.
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cleave_plan::topology::{PciePath, Topology};
use cleave_plan::units::{Mebibytes, Sms};
use nvml_wrapper::Device;
use nvml_wrapper::bitmasks::InitFlags;
use nvml_wrapper::enum_wrappers::device::{ComputeMode as WrappedMode, EccCounter, MemoryError};
use nvml_wrapper::enums::device::{SampleValue, UsedGpuMemory};
use nvml_wrapper::error::{NvmlError as Code, nvml_try};
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper_sys::bindings::field_id;

use super::error::{NvmlError, ignore_unless_lost, ignore_unsupported};
use super::find::{self, LibrarySearch};
use super::gpus::{GpuEvents, Gpus};
use super::links::{self, GpuPorts, PciePathReading};
use super::model::{
    ComputeMode, DeviceProcesses, DriverInfo, Gpu, GpuReadings, GpuVitals, MigActivation, MigInstance, MigState,
    Process, RecoveryAction,
};
use super::xid::XidEvents;
use super::{readings, sys};

/// The NVML library, loaded and initialized.
#[derive(Debug)]
pub struct Nvml {
    inner: Arc<nvml_wrapper::Nvml>,
    /// Last known index of each GPU, by UUID.
    indices: Mutex<BTreeMap<String, u32>>,
    /// Descriptions that this session has read, by UUID. Most properties do not change while the
    /// driver is loaded, and take longer to read than all other properties.
    descriptions: Mutex<BTreeMap<String, Gpu>>,
}

impl Nvml {
    /// Loads the library and initializes it. A driver without a GPU is not an error.
    ///
    /// # Errors
    /// Returns [`NvmlError::NoLibrary`] if no library is found, and NVML's error if NVML cannot be
    /// initialized.
    pub fn open(search: &LibrarySearch) -> Result<Self, NvmlError> {
        let candidates = search.candidate_files();
        let found = candidates.iter().find(|path| path.exists()).map(|path| path.as_os_str());
        let Some(path) = found.or_else(|| search.library.is_none().then_some(OsStr::new(find::LIBRARY_NAME))) else {
            return Err(NvmlError::NoLibrary(
                candidates.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", "),
            ));
        };
        match nvml_wrapper::Nvml::builder().lib_path(path).flags(InitFlags::NO_GPUS).init() {
            Ok(inner) => Ok(Self { inner: Arc::new(inner), indices: Mutex::default(), descriptions: Mutex::default() }),
            Err(Code::LibloadingError(_)) if found.is_none() => Err(NvmlError::NoLibrary(format!(
                "the usual driver directories and the dynamic loader's path for {}",
                find::LIBRARY_NAME
            ))),
            Err(code) => Err(NvmlError::from_code("nvmlInitWithFlags", code)),
        }
    }

    /// Finds a GPU or MIG device by UUID. Uses the last known index of a GPU, because a search by
    /// UUID accesses other GPUs, and one of them may hang.
    fn find_device(&self, uuid: &str) -> Result<Device<'_>, NvmlError> {
        let index = lock(&self.indices).get(uuid).copied();
        if let Some(index) = index {
            match self.device_at(index) {
                Ok(device) if device.uuid().is_ok_and(|found| found == uuid) => return Ok(device),
                // The indices have changed. Search by UUID.
                Ok(_) | Err(NvmlError::NotFound(_)) => {}
                Err(error) => return Err(error),
            }
        }
        self.inner.device_by_uuid(uuid).map_err(|code| match code {
            Code::NotFound | Code::InvalidArg => NvmlError::NotFound(uuid.to_owned()),
            code => NvmlError::from_code("nvmlDeviceGetHandleByUUID", code),
        })
    }

    fn device_at(&self, index: u32) -> Result<Device<'_>, NvmlError> {
        self.inner.device_by_index(index).map_err(|code| match code {
            Code::NotFound | Code::InvalidArg => NvmlError::NotFound(format!("GPU {index}")),
            code => NvmlError::from_code("nvmlDeviceGetHandleByIndex", code),
        })
    }

    /// Describes a GPU. Reads constant properties once, and all other properties each time.
    fn describe_gpu(&self, device: &Device<'_>, index: u32) -> Result<Gpu, NvmlError> {
        let uuid = device.uuid().map_err(|code| NvmlError::from_code("nvmlDeviceGetUUID", code))?;
        let known = lock(&self.descriptions).get(&uuid).filter(|known| known.index == index).cloned();
        let mig = read_mig(&self.inner, device, known.as_ref().and_then(|known| known.mig.as_ref()))?;
        let memory = Mebibytes::from_bytes(cuda_memory(&self.inner, device)?);
        let described = match known {
            Some(known) => Gpu { memory, mig, ..known },
            None => Self::read_constant_properties(device, index, uuid, mig, memory)?,
        };
        lock(&self.descriptions).insert(described.uuid.clone(), described.clone());
        Ok(described)
    }

    /// Reads the properties that do not change while the driver is loaded.
    fn read_constant_properties(
        device: &Device<'_>,
        index: u32,
        uuid: String,
        mig: Option<MigState>,
        memory: Mebibytes,
    ) -> Result<Gpu, NvmlError> {
        let capability = device
            .cuda_compute_capability()
            .map_err(|code| NvmlError::from_code("nvmlDeviceGetCudaComputeCapability", code))?;
        let compute_capability = (capability.major.unsigned_abs(), capability.minor.unsigned_abs());
        let pci = device
            .pci_info()
            .map(|info| sysfs_bus_id(&info.bus_id))
            .map_err(|code| NvmlError::from_code("nvmlDeviceGetPciInfo", code))?;
        let cores = ignore_unsupported("nvmlDeviceGetNumGpuCores", device.num_cores())?;
        let sms = match cores {
            Some(cores) => Sms(cores / cores_per_sm(compute_capability)),
            // The largest profile has all SMs that instances can use.
            None => mig.iter().flat_map(|mig| &mig.profiles).map(|profile| profile.sms).max().unwrap_or_default(),
        };
        Ok(Gpu {
            index,
            minor: ignore_unsupported("nvmlDeviceGetMinorNumber", device.minor_number())?.unwrap_or(index),
            model: device.name().map_err(|code| NvmlError::from_code("nvmlDeviceGetName", code))?,
            memory,
            sms,
            numa: numa_node(&pci).or_else(|| device.numa_node_id().ok()),
            pci,
            compute_capability,
            mig,
            uuid,
        })
    }
}

impl Nvml {
    /// Returns the properties of a GPU that determine its links.
    fn read_ports(&self, index: u32) -> Result<GpuPorts, NvmlError> {
        let device = self.device_at(index)?;
        let pci = device.pci_info().map_err(|code| NvmlError::from_code("nvmlDeviceGetPciInfo", code))?;
        let pci = sysfs_bus_id(&pci.bus_id);
        Ok(GpuPorts {
            uuid: device.uuid().map_err(|code| NvmlError::from_code("nvmlDeviceGetUUID", code))?,
            numa: numa_node(&pci).or_else(|| device.numa_node_id().ok()),
            pci,
            nvlinks: links::read_nvlinks(&self.inner, &device, sysfs_bus_id)?,
        })
    }

    /// Returns the PCIe path between the GPUs at two indices, or `None` if NVML does not report the
    /// path.
    fn read_path(&self, one: u32, other: u32) -> Result<Option<PciePath>, NvmlError> {
        links::read_pcie_path(&self.device_at(one)?, self.device_at(other)?)
    }
}

impl Gpus for Nvml {
    fn driver_info(&self) -> Result<DriverInfo, NvmlError> {
        let driver =
            self.inner.sys_driver_version().map_err(|code| NvmlError::from_code("nvmlSystemGetDriverVersion", code))?;
        let count = self.inner.device_count().map_err(|code| NvmlError::from_code("nvmlDeviceGetCount", code))?;
        Ok(DriverInfo { driver, count })
    }

    fn gpu_at(&self, index: u32) -> Result<Gpu, NvmlError> {
        let gpu = self.describe_gpu(&self.device_at(index)?, index)?;
        lock(&self.indices).insert(gpu.uuid.clone(), index);
        Ok(gpu)
    }

    fn topology(&self) -> Result<Topology, NvmlError> {
        let count = self.driver_info()?.count;
        let (mut indices, mut gpus) = (Vec::new(), Vec::new());
        for index in 0..count {
            if let Some(ports) = links::ignore_unless_driver_lost(self.read_ports(index))? {
                indices.push(index);
                gpus.push(ports);
            }
        }
        let mut paths = BTreeMap::new();
        for one in 0..indices.len() {
            for other in one + 1..indices.len() {
                let path = match links::ignore_unless_driver_lost(self.read_path(indices[one], indices[other]))? {
                    Some(Some(path)) => PciePathReading::Known(path),
                    Some(None) => PciePathReading::Undetermined,
                    None => PciePathReading::Failed,
                };
                paths.insert((one, other), path);
            }
        }
        Ok(links::build_topology(&gpus, |one, other| {
            paths.get(&(one, other)).copied().unwrap_or(PciePathReading::Failed)
        }))
    }

    fn open_events(&self, index: u32) -> Result<Box<dyn GpuEvents>, NvmlError> {
        Ok(Box::new(XidEvents::open(&self.inner, &self.device_at(index)?)?))
    }

    fn gpu(&self, uuid: &str) -> Result<Gpu, NvmlError> {
        let device = self.find_device(uuid)?;
        let index = device.index().map_err(|code| NvmlError::from_code("nvmlDeviceGetIndex", code))?;
        self.describe_gpu(&device, index)
    }

    fn processes(&self, uuid: &str) -> Result<Vec<Process>, NvmlError> {
        self.device_processes(uuid).map(|found| found.processes)
    }

    fn device_processes(&self, uuid: &str) -> Result<DeviceProcesses, NvmlError> {
        let device = self.find_device(uuid)?;
        let all = device
            .running_compute_processes()
            .map_err(|code| NvmlError::from_code("nvmlDeviceGetComputeRunningProcesses", code))?;
        let clients =
            ignore_unsupported("nvmlDeviceGetMPSComputeRunningProcesses", device.mps_running_compute_processes())?;
        let are_clients_known = clients.is_some();
        Ok(DeviceProcesses { processes: merge_processes(&all, &clients.unwrap_or_default()), are_clients_known })
    }

    fn vitals(&self, uuid: &str) -> Result<GpuVitals, NvmlError> {
        let device = self.find_device(uuid)?;
        let uncorrected = ignore_unless_lost(
            "nvmlDeviceGetTotalEccErrors",
            device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile),
        )?;
        let pages = ignore_unless_lost("nvmlDeviceGetRetiredPagesPendingStatus", device.are_pages_pending_retired())?;
        let rows = sys::remapped_rows(&self.inner, &device)?;
        let pending = pages.into_iter().chain(rows.map(|rows| rows.pending)).reduce(|a, b| a || b);
        Ok(GpuVitals {
            uncorrected,
            remap_pending: pending,
            remap_failed: rows.map(|rows| rows.failed),
            recovery: read_requested_recovery(&device)?,
        })
    }

    fn readings(&self, uuid: &str) -> Result<GpuReadings, NvmlError> {
        // Never search by UUID for sensors. The search accesses other GPUs, and one of them may
        // hang.
        let index = lock(&self.indices).get(uuid).copied().ok_or_else(|| NvmlError::NotFound(uuid.to_owned()))?;
        let device = self.device_at(index)?;
        if device.uuid().is_ok_and(|found| found == uuid) {
            readings::read_sensors(&device)
        } else {
            Err(NvmlError::NotFound(uuid.to_owned()))
        }
    }

    fn cuda_version(&self) -> Result<(u32, u32), NvmlError> {
        let version = self
            .inner
            .sys_cuda_driver_version()
            .map_err(|code| NvmlError::from_code("nvmlSystemGetCudaDriverVersion", code))?;
        let version = version.unsigned_abs();
        Ok((version / 1000, version % 1000 / 10))
    }

    fn compute_mode(&self, uuid: &str) -> Result<ComputeMode, NvmlError> {
        let mode = self.find_device(uuid)?.compute_mode();
        Ok(match mode.map_err(|code| NvmlError::from_code("nvmlDeviceGetComputeMode", code))? {
            WrappedMode::Default => ComputeMode::Default,
            WrappedMode::ExclusiveProcess | WrappedMode::ExclusiveThread => ComputeMode::ExclusiveProcess,
            WrappedMode::Prohibited => ComputeMode::Prohibited,
        })
    }

    fn set_compute_mode(&self, uuid: &str, mode: ComputeMode) -> Result<ComputeMode, NvmlError> {
        let mut device = self.find_device(uuid)?;
        let before = self.compute_mode(uuid)?;
        if before != mode {
            let mode = match mode {
                ComputeMode::Default => WrappedMode::Default,
                ComputeMode::ExclusiveProcess => WrappedMode::ExclusiveProcess,
                ComputeMode::Prohibited => WrappedMode::Prohibited,
            };
            device.set_compute_mode(mode).map_err(|code| NvmlError::from_code("nvmlDeviceSetComputeMode", code))?;
        }
        Ok(before)
    }

    fn set_mig_mode(&self, gpu: &str, on: bool) -> Result<MigActivation, NvmlError> {
        const CALL: &str = "nvmlDeviceSetMigMode";
        let status = self.find_device(gpu)?.set_mig_mode(on).map_err(|code| NvmlError::from_code(CALL, code))?;
        match nvml_try(status) {
            Ok(()) => Ok(MigActivation::Now),
            Err(Code::ResetRequired) => Ok(MigActivation::AfterReset),
            Err(Code::InUse) => Ok(MigActivation::InUse),
            Err(code) => Err(NvmlError::from_code(CALL, code)),
        }
    }

    fn create_mig_instance(&self, gpu: &str, profile: &str, start: u32) -> Result<MigInstance, NvmlError> {
        let device = self.find_device(gpu)?;
        let profiles = sys::mig_profiles(&self.inner, &device)?;
        let Some(profile) = profiles.iter().find(|known| known.name == profile) else {
            return Err(NvmlError::NotFound(format!("MIG profile {profile} on {gpu}")));
        };
        let gpu_instance = sys::create_gpu_instance(&self.inner, &device, profile, start)?;
        let instances = sys::mig_instances(&self.inner, &device, &profiles)?;
        instances
            .into_iter()
            .find(|instance| instance.gpu_instance == gpu_instance)
            .ok_or_else(|| NvmlError::NotListed { gpu: gpu.to_owned(), gpu_instance })
    }

    fn destroy_mig_instance(&self, gpu: &str, gpu_instance: u32) -> Result<(), NvmlError> {
        sys::destroy_gpu_instance(&self.inner, &self.find_device(gpu)?, gpu_instance)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the recovery action that the driver requests. Returns `None` if the driver is too old to
/// report an action, or reports an unknown action.
fn read_requested_recovery(device: &Device<'_>) -> Result<Option<RecoveryAction>, NvmlError> {
    const RECOVERY_ACTION_FIELD: FieldId = FieldId(field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION);
    let values = ignore_unless_lost("nvmlDeviceGetFieldValues", device.field_values_for(&[RECOVERY_ACTION_FIELD]))?;
    let value = values.into_iter().flatten().flatten().find_map(|sample| sample.value.ok());
    let action = match value {
        Some(SampleValue::U32(action)) => Some(u64::from(action)),
        Some(SampleValue::U64(action)) => Some(action),
        Some(SampleValue::I64(action)) => u64::try_from(action).ok(),
        Some(SampleValue::F64(_)) | None => None,
    };
    Ok(action.and_then(parse_recovery_action))
}

/// Translates `nvmlDeviceGpuRecoveryAction_t` of `nvml.h`. Returns `None` for an unknown value.
/// Drivers after 580 report 6 and 7.
const fn parse_recovery_action(action: u64) -> Option<RecoveryAction> {
    match action {
        0 => Some(RecoveryAction::Nothing),
        1 | 6 => Some(RecoveryAction::Reset),
        2 | 7 => Some(RecoveryAction::Reboot),
        3 | 4 => Some(RecoveryAction::Drain),
        _ => None,
    }
}

/// Reads the state of MIG. Returns `None` if the GPU does not support MIG. Reuses the known
/// profiles until MIG mode changes, because reading profiles takes dozens of calls.
fn read_mig(
    nvml: &nvml_wrapper::Nvml,
    device: &Device<'_>,
    known: Option<&MigState>,
) -> Result<Option<MigState>, NvmlError> {
    let Some(mode) = ignore_unsupported("nvmlDeviceGetMigMode", device.mig_mode())? else { return Ok(None) };
    let enabled = mode.current == 1;
    let known = known.filter(|known| known.enabled == enabled && !known.profiles.is_empty());
    let profiles = match known {
        Some(known) => known.profiles.clone(),
        None => sys::mig_profiles(nvml, device)?,
    };
    let instances = if enabled { sys::mig_instances(nvml, device, &profiles)? } else { Vec::new() };
    Ok(Some(MigState {
        enabled,
        pending: (mode.pending != mode.current).then_some(mode.pending == 1),
        profiles,
        instances,
    }))
}

/// Returns the total memory in bytes as CUDA reports it: 143,155 MiB of NVML's 143,771 MiB on an
/// H200.
fn cuda_memory(nvml: &nvml_wrapper::Nvml, device: &Device<'_>) -> Result<u64, NvmlError> {
    match ignore_unsupported("nvmlDeviceGetMemoryInfo_v2", device.memory_info())? {
        Some(info) => Ok(info.total.saturating_sub(info.reserved)),
        // Drivers before 510 report the memory that they reserve as used memory.
        None => sys::memory_total_v1(nvml, device),
    }
}

/// Returns the CUDA cores per SM of a compute capability (CUDA C++ Programming Guide, "Compute
/// Capabilities").
const fn cores_per_sm(capability: (u32, u32)) -> u32 {
    match capability {
        (6 | 8, 0) | (7, _) => 64,
        _ => 128,
    }
}

/// Converts a PCI bus ID from NVML's format `00000000:3B:00.0` to the format of sysfs
/// `0000:3b:00.0`.
fn sysfs_bus_id(id: &str) -> String {
    let id = id.to_ascii_lowercase();
    let Some((domain, rest)) = id.split_once(':') else { return id };
    match u32::from_str_radix(domain, 16) {
        Ok(domain) => format!("{domain:04x}:{rest}"),
        Err(_) => id,
    }
}

fn numa_node(pci: &str) -> Option<u32> {
    // A machine without NUMA reports -1, which does not parse.
    fs::read_to_string(format!("/sys/bus/pci/devices/{pci}/numa_node")).ok()?.trim().parse().ok()
}

/// Merges NVML's list of all processes with its list of MPS clients. A client is in both lists,
/// possibly with different memory values. Uses the larger value.
fn merge_processes(all: &[ProcessInfo], clients: &[ProcessInfo]) -> Vec<Process> {
    let mut processes: BTreeMap<(u32, Option<u32>), Process> = BTreeMap::new();
    for (info, mps) in all.iter().map(|info| (info, false)).chain(clients.iter().map(|info| (info, true))) {
        let memory = match info.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        };
        let entry = processes.entry((info.pid, info.gpu_instance_id)).or_insert(Process {
            pid: info.pid,
            memory,
            mps,
            gpu_instance: info.gpu_instance_id,
        });
        entry.memory = entry.memory.max(memory);
        entry.mps |= mps;
    }
    processes.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sm_counts_of_known_gpus_follow_from_their_cuda_cores() {
        // The models are T4, A100, A30, A10, L4 and H100 SXM.
        for (cores, capability, sms) in [
            (2560, (7, 5), 40),
            (6912, (8, 0), 108),
            (3584, (8, 0), 56),
            (9216, (8, 6), 72),
            (7424, (8, 9), 58),
            (16896, (9, 0), 132),
        ] {
            assert_eq!(cores / cores_per_sm(capability), sms, "{capability:?}");
        }
    }

    #[test]
    fn bus_ids_have_the_format_of_sysfs() {
        assert_eq!(sysfs_bus_id("00000000:3B:00.0"), "0000:3b:00.0");
        assert_eq!(sysfs_bus_id("00010000:3B:00.0"), "10000:3b:00.0");
        assert_eq!(sysfs_bus_id("0000:3b:00.0"), "0000:3b:00.0");
        assert_eq!(sysfs_bus_id("nonsense"), "nonsense");
    }

    #[test]
    fn a_process_in_both_lists_is_one_mps_client() {
        let info =
            |pid, bytes| ProcessInfo { pid, used_gpu_memory: bytes, gpu_instance_id: None, compute_instance_id: None };
        let merged = merge_processes(
            &[info(7, UsedGpuMemory::Used(5)), info(3, UsedGpuMemory::Unavailable)],
            &[info(7, UsedGpuMemory::Used(9)), info(8, UsedGpuMemory::Used(1))],
        );
        let process = |pid, memory, mps| Process { pid, memory, mps, gpu_instance: None };
        assert_eq!(merged, [process(3, None, false), process(7, Some(9), true), process(8, Some(1), true)]);
        let inside = |gpu_instance_id| ProcessInfo { gpu_instance_id, ..info(7, UsedGpuMemory::Used(5)) };
        assert_eq!(merge_processes(&[inside(Some(1)), inside(Some(2))], &[]).len(), 2, "it uses both instances");
    }
}
