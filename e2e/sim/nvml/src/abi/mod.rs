//! Exports NVML's functions, which accept C arguments and return NVML return codes.

mod instances;
pub(crate) mod raw;

use std::ffi::{c_char, c_int, c_uint, c_ulong, c_ulonglong};
use std::time::Duration;

use nvml_wrapper_sys::bindings as sys;
use sim_machine::{EventKind, Gpu, NvLinkEnd, PciAddress};

use self::raw::{Out, Text, to_c_chars};
use crate::device::{self, NO_INSTANCE, ProcessList};
use crate::library::{
    self, Code, Handle, HandleTarget, Result, call, call_on_device, call_on_gpu, call_on_gpu_as_root, catch_panic,
    handle_of, object_of_handle,
};
use crate::{events, mig};

type Return = sys::nvmlReturn_t;

/// Defines exported functions. Each body receives the function's name, by which injected faults
/// refer to the call.
macro_rules! exports {
    ($($name:ident($($argument:ident: $type:ty),* $(,)?) |$own:ident| $body:expr;)*) => {$(
        // SAFETY: the name belongs to NVML, and a program loads either NVML or this library.
        #[unsafe(no_mangle)]
        extern "C" fn $name($($argument: $type),*) -> $crate::abi::Return {
            let $own = stringify!($name);
            $body
        }
    )*};
}
pub(crate) use exports;

/// Returns the version field of a structure, as NVML's macro computes it: the size, with the
/// version number in the top byte.
pub(crate) fn struct_version<T>(number: u32) -> u32 {
    u32::try_from(size_of::<T>()).unwrap_or(0) | number << 24
}

exports! {
    nvmlInit() |own| library::init(own);
    nvmlInit_v2() |own| library::init(own);
    nvmlInitWithFlags(_flags: c_uint) |own| library::init(own);
    nvmlShutdown() |_own| library::shutdown();

    nvmlSystemGetDriverVersion(version: Out<c_char>, length: c_uint) |own|
        call(own, |view| version.text(length, &view.state.driver.version));
    nvmlSystemGetNVMLVersion(version: Out<c_char>, length: c_uint) |own|
        call(own, |view| version.text(length, &format!("{}.{}", view.state.driver.cuda / 1000, view.state.driver.version)));
    nvmlSystemGetCudaDriverVersion(version: Out<c_int>) |own| call(own, |view| version.put(view.state.driver.cuda));
    nvmlSystemGetCudaDriverVersion_v2(version: Out<c_int>) |own| call(own, |view| version.put(view.state.driver.cuda));
    nvmlSystemGetProcessName(pid: c_uint, name: Out<c_char>, length: c_uint) |own| call(own, |_| {
        let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).map_err(|_| Code::NOT_FOUND)?;
        let path = arguments.split(|b| *b == 0).next().unwrap_or_default();
        name.text(length, &String::from_utf8_lossy(path))
    });

    nvmlDeviceGetCount(count: Out<c_uint>) |own| call(own, |view| count.put(to_u32(view.state.gpus.len())));
    nvmlDeviceGetCount_v2(count: Out<c_uint>) |own| call(own, |view| count.put(to_u32(view.state.gpus.len())));
    nvmlDeviceGetHandleByIndex(index: c_uint, out: Out<Handle>) |own| handle_by_index(own, index, out);
    nvmlDeviceGetHandleByIndex_v2(index: c_uint, out: Out<Handle>) |own| handle_by_index(own, index, out);
    nvmlDeviceGetHandleByUUID(uuid: Text, out: Out<Handle>) |own| call(own, |view| {
        out.put(device::handle_by_uuid(view, &uuid.get()?)?)
    });
    nvmlDeviceGetHandleByPciBusId(bus: Text, out: Out<Handle>) |own| handle_by_bus_id(own, bus, out);
    nvmlDeviceGetHandleByPciBusId_v2(bus: Text, out: Out<Handle>) |own| handle_by_bus_id(own, bus, out);
    nvmlDeviceGetHandleBySerial(serial: Text, out: Out<Handle>) |own| call(own, |view| {
        let serial = serial.get()?;
        out.put(device::gpu_handle(view, |g| g.serial == serial, Code::NOT_FOUND)?)
    });

    nvmlDeviceGetName(device: Handle, name: Out<c_char>, length: c_uint) |own|
        call_on_device(own, device, |_, d| name.text(length, &device::product_name(&d)));
    nvmlDeviceGetUUID(device: Handle, uuid: Out<c_char>, length: c_uint) |own|
        call_on_device(own, device, |_, d| uuid.text(length, d.uuid()));
    nvmlDeviceGetIndex(device: Handle, index: Out<c_uint>) |own| call_on_device(own, device, |_, d| {
        let among = mig::mig_devices(d.gpu).iter().position(|(_, ci)| ci.uuid == d.uuid());
        index.put(among.map_or(d.gpu.index, to_u32))
    });
    nvmlDeviceGetMinorNumber(device: Handle, minor: Out<c_uint>) |own|
        call_on_gpu(own, device, |_, gpu, _| minor.put(gpu.minor));
    nvmlDeviceGetSerial(device: Handle, serial: Out<c_char>, length: c_uint) |own|
        call_on_gpu(own, device, |_, gpu, _| serial.text(length, &gpu.serial));
    nvmlDeviceGetBrand(device: Handle, brand: Out<c_uint>) |own| call_on_device(own, device, |_, d| {
        let nvidia = d.model.name.starts_with("NVIDIA");
        brand.put(if nvidia { sys::nvmlBrandType_enum_NVML_BRAND_NVIDIA } else { sys::nvmlBrandType_enum_NVML_BRAND_TESLA })
    });
    nvmlDeviceGetArchitecture(device: Handle, architecture: Out<c_uint>) |own|
        call_on_device(own, device, |_, d| architecture.put(device::architecture(&d.model.architecture)));
    nvmlDeviceGetCudaComputeCapability(device: Handle, major: Out<c_int>, minor: Out<c_int>) |own|
        call_on_device(own, device, |_, d| {
            major.put(d.model.compute_capability.0)?;
            minor.put(d.model.compute_capability.1)
        });
    nvmlDeviceGetNumGpuCores(device: Handle, cores: Out<c_uint>) |own|
        call_on_gpu(own, device, |_, _, model| cores.put(model.sms * model.cores_per_sm));
    nvmlDeviceGetMemoryBusWidth(device: Handle, width: Out<c_uint>) |own|
        call_on_gpu(own, device, |_, _, model| width.put(model.memory_bus_width));
    nvmlDeviceGetPciInfo_v3(device: Handle, info: Out<sys::nvmlPciInfo_t>) |own| call_on_gpu(own, device, |_, gpu, model| {
        info.put(pci_info(gpu.pci, (model.pci_device_id, model.pci_subsystem_id)))
    });
    // This call reports the NUMA node of the GPU's own memory. As on most machines, the memory is
    // not a NUMA node. `nvmlDeviceGetMemoryAffinity` reports the nearest node.
    nvmlDeviceGetNumaNodeId(device: Handle, _node: Out<c_uint>) |own| call_on_gpu(own, device, |_, _, _| Err(Code::NOT_SUPPORTED));
    nvmlDeviceGetMemoryAffinity(device: Handle, size: c_uint, set: Out<c_ulong>, _scope: c_uint) |own|
        call_on_gpu(own, device, |_, gpu, _| put_bits(size, set, &gpu.numa_node.unwrap_or(0).to_string(), 0));
    nvmlDeviceGetCpuAffinity(device: Handle, size: c_uint, set: Out<c_ulong>) |own|
        call_on_gpu(own, device, |_, gpu, _| put_bits(size, set, &gpu.cpus, count_cpus()));
    nvmlDeviceGetCpuAffinityWithinScope(device: Handle, size: c_uint, set: Out<c_ulong>, _scope: c_uint) |own|
        call_on_gpu(own, device, |_, gpu, _| put_bits(size, set, &gpu.cpus, count_cpus()));
    nvmlDeviceGetTopologyCommonAncestor(one: Handle, other: Handle, level: Out<c_uint>) |own|
        call_on_gpu(own, one, |view, gpu, _| {
            let HandleTarget::Device(other) = object_of_handle(other)? else { return Err(Code::INVALID_ARGUMENT) };
            let (other, _) = view.gpu(&other)?;
            if gpu.uuid == other.uuid {
                // An H200 with driver 580.159.03 returns this code.
                return Err(Code::NOT_SUPPORTED);
            }
            level.put(device::topology_level(gpu.common_ancestor(other)))
        });
    nvmlDeviceGetNvLinkState(device: Handle, link: c_uint, active: Out<sys::nvmlEnableState_t>) |own|
        call_on_gpu(own, device, |view, gpu, _| active.put(device::nvlink_peer(view, gpu, link)?.is_some().into()));
    nvmlDeviceGetNvLinkRemoteDeviceType(device: Handle, link: c_uint, kind: Out<c_uint>) |own|
        call_on_gpu(own, device, |view, gpu, _| match device::nvlink_peer(view, gpu, link)? {
            Some(NvLinkEnd::Gpu(_)) => kind.put(sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU),
            Some(NvLinkEnd::Switch(_)) => kind.put(sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH),
            None => Err(Code::NOT_SUPPORTED),
        });
    nvmlDeviceGetNvLinkRemotePciInfo_v2(device: Handle, link: c_uint, info: Out<sys::nvmlPciInfo_t>) |own|
        call_on_gpu(own, device, |view, gpu, _| {
            let peer = device::nvlink_peer(view, gpu, link)?.ok_or(Code::NOT_SUPPORTED)?;
            info.put(pci_info(device::nvlink_peer_pci(view, peer)?, (0, 0)))
        });
    nvmlDeviceGetVirtualizationMode(device: Handle, mode: Out<c_uint>) |own| call_on_gpu(own, device, |_, _, _| {
        mode.put(sys::nvmlGpuVirtualizationMode_NVML_GPU_VIRTUALIZATION_MODE_NONE)
    });

    nvmlDeviceGetMemoryInfo(device: Handle, out: Out<sys::nvmlMemory_t>) |own| call_on_device(own, device, |view, d| {
        let m = device::memory_use(view, &d);
        // The first version of this call counts the memory that the driver reserves as used.
        out.put(sys::nvmlMemory_t { total: m.total, free: m.free, used: m.used + m.reserved })
    });
    nvmlDeviceGetMemoryInfo_v2(device: Handle, out: Out<sys::nvmlMemory_v2_t>) |own| call_on_device(own, device, |view, d| {
        let version = out.cast::<c_uint>().get()?;
        if version != self::struct_version::<sys::nvmlMemory_v2_t>(2) {
            return Err(Code::FUNCTION_NOT_FOUND);
        }
        let m = device::memory_use(view, &d);
        out.put(sys::nvmlMemory_v2_t { version, total: m.total, reserved: m.reserved, free: m.free, used: m.used })
    });
    nvmlDeviceGetBAR1MemoryInfo(device: Handle, out: Out<sys::nvmlBAR1Memory_t>) |own| call_on_gpu(own, device, |_, _, model| {
        let total = model.memory_mib.next_power_of_two() << 20;
        out.put(sys::nvmlBAR1Memory_t { bar1Total: total, bar1Free: total - (1 << 20), bar1Used: 1 << 20 })
    });

    nvmlDeviceGetComputeMode(device: Handle, mode: Out<sys::nvmlComputeMode_t>) |own|
        call_on_device(own, device, |_, d| mode.put(device::compute_mode(d.gpu.compute_mode)));
    nvmlDeviceSetComputeMode(device: Handle, mode: sys::nvmlComputeMode_t) |own| call_on_gpu_as_root(own, device, |view, gpu, _| {
        let mode = device::parse_compute_mode(mode)?;
        change_gpu(view, gpu, move |gpu| if gpu.mig { Err(Code::NOT_SUPPORTED) } else { gpu.compute_mode = mode; Ok(()) })
    });
    nvmlDeviceGetPersistenceMode(device: Handle, mode: Out<c_uint>) |own|
        call_on_gpu(own, device, |_, gpu, _| mode.put(gpu.persistence.into()));
    nvmlDeviceSetPersistenceMode(device: Handle, mode: c_uint) |own| call_on_gpu_as_root(own, device, |view, gpu, _| {
        let on = parse_switch(mode)?;
        change_gpu(view, gpu, move |gpu| { gpu.persistence = on; Ok(()) })
    });

    nvmlDeviceGetComputeRunningProcesses(device: Handle, count: Out<c_uint>, out: Out<sys::nvmlProcessInfo_v1_t>) |own|
        put_processes_v1(own, device, ProcessList::Compute, count, out);
    nvmlDeviceGetComputeRunningProcesses_v2(device: Handle, count: Out<c_uint>, out: Out<sys::nvmlProcessInfo_v2_t>) |own|
        put_processes(own, device, ProcessList::Compute, count, out);
    nvmlDeviceGetComputeRunningProcesses_v3(device: Handle, count: Out<c_uint>, out: Out<sys::nvmlProcessInfo_v2_t>) |own|
        put_processes(own, device, ProcessList::Compute, count, out);
    nvmlDeviceGetMPSComputeRunningProcesses(device: Handle, count: Out<c_uint>, out: Out<sys::nvmlProcessInfo_v1_t>) |own|
        put_processes_v1(own, device, ProcessList::Mps, count, out);
    nvmlDeviceGetMPSComputeRunningProcesses_v2(device: Handle, count: Out<c_uint>, out: Out<sys::nvmlProcessInfo_v2_t>) |own|
        put_processes(own, device, ProcessList::Mps, count, out);
    nvmlDeviceGetMPSComputeRunningProcesses_v3(device: Handle, count: Out<c_uint>, out: Out<sys::nvmlProcessInfo_v2_t>) |own|
        put_processes(own, device, ProcessList::Mps, count, out);
    nvmlDeviceGetGraphicsRunningProcesses(device: Handle, count: Out<c_uint>, out: Out<sys::nvmlProcessInfo_v1_t>) |own|
        put_processes_v1(own, device, ProcessList::Graphics, count, out);
    nvmlDeviceGetGraphicsRunningProcesses_v2(device: Handle, count: Out<c_uint>, out: Out<sys::nvmlProcessInfo_v2_t>) |own|
        put_processes(own, device, ProcessList::Graphics, count, out);
    nvmlDeviceGetGraphicsRunningProcesses_v3(device: Handle, count: Out<c_uint>, out: Out<sys::nvmlProcessInfo_v2_t>) |own|
        put_processes(own, device, ProcessList::Graphics, count, out);

    nvmlDeviceGetUtilizationRates(device: Handle, out: Out<sys::nvmlUtilization_t>) |own| call_on_device(own, device, |view, d| {
        // MIG devices and GPUs in MIG mode report no utilization.
        if d.mig.is_some() || d.gpu.mig {
            return Err(Code::NOT_SUPPORTED);
        }
        let gpu = device::utilization_percent(view, &d);
        out.put(sys::nvmlUtilization_t { gpu, memory: gpu / 2 })
    });
    nvmlDeviceGetPowerUsage(device: Handle, milliwatts: Out<c_uint>) |own| call_on_device(own, device, |view, d| match d.mig {
        None => milliwatts.put(device::power_milliwatts(view, &d)),
        Some(_) => Err(Code::NOT_SUPPORTED),
    });
    nvmlDeviceGetEnforcedPowerLimit(device: Handle, milliwatts: Out<c_uint>) |own|
        call_on_gpu(own, device, |_, _, model| milliwatts.put(model.power_watts.0 * 1000));
    nvmlDeviceGetPowerManagementLimit(device: Handle, milliwatts: Out<c_uint>) |own|
        call_on_gpu(own, device, |_, _, model| milliwatts.put(model.power_watts.0 * 1000));
    nvmlDeviceGetTemperature(device: Handle, sensor: c_uint, degrees: Out<c_uint>) |own| call_on_gpu(own, device, |_, gpu, _| {
        if sensor != sys::nvmlTemperatureSensors_enum_NVML_TEMPERATURE_GPU {
            return Err(Code::INVALID_ARGUMENT);
        }
        degrees.put(gpu.temperature.unwrap_or(33))
    });
    nvmlDeviceGetTotalEnergyConsumption(device: Handle, millijoules: Out<c_ulonglong>) |own|
        call_on_gpu(own, device, |_, gpu, _| millijoules.put(gpu.energy_millijoules));
    nvmlDeviceGetClockInfo(device: Handle, kind: c_uint, mhz: Out<c_uint>) |own| call_on_device(own, device, |view, d| match d.mig {
        None => mhz.put(device::clock_mhz(view, &d, kind)?),
        Some(_) => Err(Code::NOT_SUPPORTED),
    });
    nvmlDeviceGetMaxClockInfo(device: Handle, kind: c_uint, mhz: Out<c_uint>) |own|
        call_on_gpu(own, device, |_, _, _| mhz.put(device::max_clock_mhz(kind)?));
    nvmlDeviceGetCurrentClocksThrottleReasons(device: Handle, reasons: Out<c_ulonglong>) |own|
        put_throttle_reasons(own, device, reasons);
    nvmlDeviceGetCurrentClocksEventReasons(device: Handle, reasons: Out<c_ulonglong>) |own|
        put_throttle_reasons(own, device, reasons);
    nvmlDeviceGetSupportedClocksThrottleReasons(device: Handle, reasons: Out<c_ulonglong>) |own|
        call_on_gpu(own, device, |_, _, _| reasons.put(device::SUPPORTED_THROTTLE_REASONS));
    nvmlDeviceGetSupportedClocksEventReasons(device: Handle, reasons: Out<c_ulonglong>) |own|
        call_on_gpu(own, device, |_, _, _| reasons.put(device::SUPPORTED_THROTTLE_REASONS));
    nvmlDeviceGetPerformanceState(device: Handle, state: Out<c_uint>) |own| call_on_gpu(own, device, |_, _, _| state.put(0));

    nvmlDeviceGetEccMode(device: Handle, current: Out<c_uint>, pending: Out<c_uint>) |own| call_on_gpu(own, device, |_, _, _| {
        current.put(1)?;
        pending.put(1)
    });
    nvmlDeviceGetTotalEccErrors(device: Handle, kind: c_uint, _counter: c_uint, count: Out<c_ulonglong>) |own|
        call_on_gpu(own, device, |_, gpu, _| count.put(count_ecc_errors(gpu, kind)?));
    nvmlDeviceGetMemoryErrorCounter(
        device: Handle, kind: c_uint, _counter: c_uint, location: c_uint, count: Out<c_ulonglong>,
    ) |own| call_on_gpu(own, device, |_, gpu, _| {
        let memory = location == sys::nvmlMemoryLocation_enum_NVML_MEMORY_LOCATION_DEVICE_MEMORY;
        count.put(if memory { count_ecc_errors(gpu, kind)? } else { 0 })
    });
    nvmlDeviceGetRemappedRows(
        device: Handle, corrected: Out<c_uint>, uncorrected: Out<c_uint>, pending: Out<c_uint>, failed: Out<c_uint>,
    ) |own| call_on_gpu(own, device, |_, gpu, model| {
        if model.architecture == "Turing" {
            return Err(Code::NOT_SUPPORTED);
        }
        let rows = u32::try_from(gpu.ecc[1]).unwrap_or(u32::MAX);
        corrected.put(0)?;
        uncorrected.put(rows)?;
        pending.put(u32::from(rows > 0 || gpu.remap_pending))?;
        failed.put(gpu.remap_failed.into())
    });
    nvmlDeviceGetRetiredPagesPendingStatus(device: Handle, pending: Out<sys::nvmlEnableState_t>) |own|
        call_on_gpu(own, device, |_, gpu, model| {
            // Architectures after Turing remap rows instead of retiring pages.
            if model.architecture != "Turing" {
                return Err(Code::NOT_SUPPORTED);
            }
            pending.put(u32::from(gpu.remap_pending))
        });
    nvmlDeviceGetFieldValues(device: Handle, count: c_int, values: Out<sys::nvmlFieldValue_t>) |own|
        call_on_gpu(own, device, |_, gpu, _| {
            // Refuse an invalid count: NVML has fewer than 512 fields.
            let count = usize::try_from(count).ok().filter(|count| (1..=512).contains(count));
            (0..count.ok_or(Code::INVALID_ARGUMENT)?).try_for_each(|at| {
                let mut value = values.get_at(at)?;
                value.nvmlReturn = if value.fieldId == sys::field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION {
                    value.valueType = sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT;
                    value.value.uiVal = gpu.recovery;
                    sys::nvmlReturn_enum_NVML_SUCCESS
                } else {
                    Code::NOT_SUPPORTED.0
                };
                values.put_at(at, value)
            })
        });

    nvmlDeviceGetSupportedEventTypes(device: Handle, types: Out<c_ulonglong>) |own|
        call_on_gpu(own, device, |_, _, _| types.put(events::SUPPORTED_EVENT_TYPES));
    nvmlEventSetCreate(set: Out<Handle>) |own| call(own, |_| set.put(events::create_event_set()));
    nvmlEventSetFree(set: Handle) |own| call(own, |_| events::free_event_set(set));
    nvmlDeviceRegisterEvents(device: Handle, types: c_ulonglong, set: Handle) |own|
        call_on_gpu(own, device, |view, gpu, _| events::register_gpu(view, &gpu.uuid, types, set));
    nvmlEventSetWait(set: Handle, data: Out<sys::nvmlEventData_t>, milliseconds: c_uint) |own|
        wait_for_event(own, set, data, milliseconds);
    nvmlEventSetWait_v2(set: Handle, data: Out<sys::nvmlEventData_t>, milliseconds: c_uint) |own|
        wait_for_event(own, set, data, milliseconds);
}

/// Returns the text of a return code. Works without `nvmlInit`.
// SAFETY: the name belongs to NVML, and a program loads either NVML or this library.
#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(code: Return) -> *const c_char {
    let text = match code {
        0 => c"Success",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        4 => c"Insufficient Permissions",
        5 => c"Already Initialized",
        6 => c"Not Found",
        7 => c"Insufficient Size",
        8 => c"Insufficient External Power",
        9 => c"Driver Not Loaded",
        10 => c"Timeout",
        11 => c"Interrupt Request Issue",
        12 => c"NVML Shared Library Not Found",
        13 => c"Function Not Found",
        14 => c"Corrupted infoROM",
        15 => c"GPU is lost",
        16 => c"GPU requires reset",
        17 => c"GPU access blocked by the operating system",
        18 => c"Driver/library version mismatch",
        19 => c"In use by another client",
        20 => c"Insufficient Memory",
        21 => c"No data",
        22 => c"The requested vgpu operation is not available on target device, because ECC is enabled",
        23 => c"Insufficient Resources",
        25 => c"Argument version mismatch",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

/// Returns the PCI information of a device with these device and subsystem ids.
fn pci_info(pci: PciAddress, (device_id, subsystem_id): (u32, u32)) -> sys::nvmlPciInfo_t {
    sys::nvmlPciInfo_t {
        busIdLegacy: to_c_chars(&pci.short_bus_id()),
        domain: pci.domain,
        bus: pci.bus,
        device: pci.device,
        pciDeviceId: device_id,
        pciSubSystemId: subsystem_id,
        busId: to_c_chars(&pci.bus_id()),
    }
}

fn to_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// Parses a switch: 0 is off, and 1 is on.
fn parse_switch(mode: c_uint) -> Result<bool> {
    match mode {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Code::INVALID_ARGUMENT),
    }
}

fn count_cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn handle_by_index(name: &str, index: c_uint, out: Out<Handle>) -> Return {
    call(name, |view| out.put(device::gpu_handle(view, |g| g.index == index, Code::INVALID_ARGUMENT)?))
}

fn handle_by_bus_id(name: &str, bus: Text, out: Out<Handle>) -> Return {
    call(name, |view| {
        let bus = bus.get()?;
        out.put(device::gpu_handle(view, |g| device::is_bus_id(g.pci, &bus), Code::NOT_FOUND)?)
    })
}

/// Writes a list of numbers as a bit mask to the caller's words.
fn put_bits(size: c_uint, set: Out<c_ulong>, list: &str, all: usize) -> Result<()> {
    // 65,536 bits are enough for any machine. The limit prevents that a call with an invalid size
    // uses all memory.
    let words = (size as usize).min(1024);
    if words == 0 {
        return Err(Code::INSUFFICIENT_SIZE);
    }
    device::to_bit_words(list, words, all).into_iter().enumerate().try_for_each(|(at, word)| set.put_at(at, word))
}

fn put_throttle_reasons(name: &str, device: Handle, reasons: Out<c_ulonglong>) -> Return {
    call_on_device(name, device, |view, d| match d.mig {
        None => reasons.put(device::throttle_reasons(view, &d)),
        Some(_) => Err(Code::NOT_SUPPORTED),
    })
}

/// Returns a GPU's number of ECC errors of a kind.
fn count_ecc_errors(gpu: &Gpu, kind: c_uint) -> Result<u64> {
    gpu.ecc.get(kind as usize).copied().ok_or(Code::INVALID_ARGUMENT)
}

fn change_gpu(view: &library::MachineView, gpu: &Gpu, change: impl FnOnce(&mut Gpu) -> Result<()>) -> Result<()> {
    view.machine.update(|state| change(state.gpu_mut(&gpu.uuid)?))
}

/// Writes the needed count, and checks that the caller's buffer is large enough. The caller must
/// not write elements if the check fails.
fn check_buffer<T: Copy>(count: Out<c_uint>, out: Out<T>, needed: usize) -> Result<()> {
    let size = count.get()? as usize;
    count.put(to_u32(needed))?;
    match needed {
        0 => Ok(()),
        _ if size < needed => Err(Code::INSUFFICIENT_SIZE),
        _ if out.is_null() => Err(Code::INVALID_ARGUMENT),
        _ => Ok(()),
    }
}

fn put_processes(
    name: &str,
    device: Handle,
    list: ProcessList,
    count: Out<c_uint>,
    out: Out<sys::nvmlProcessInfo_v2_t>,
) -> Return {
    call_on_device(name, device, |view, d| {
        let listed = device::list_processes(view, &d, list);
        check_buffer(count, out, listed.len())?;
        listed.iter().enumerate().try_for_each(|(at, p)| {
            let entry = sys::nvmlProcessInfo_v2_t {
                pid: p.pid,
                usedGpuMemory: p.used,
                gpuInstanceId: p.gpu_instance,
                computeInstanceId: p.compute_instance,
            };
            out.put_at(at, entry)
        })
    })
}

fn put_processes_v1(
    name: &str,
    device: Handle,
    list: ProcessList,
    count: Out<c_uint>,
    out: Out<sys::nvmlProcessInfo_v1_t>,
) -> Return {
    call_on_device(name, device, |view, d| {
        let listed = device::list_processes(view, &d, list);
        check_buffer(count, out, listed.len())?;
        listed
            .iter()
            .enumerate()
            .try_for_each(|(at, p)| out.put_at(at, sys::nvmlProcessInfo_v1_t { pid: p.pid, usedGpuMemory: p.used }))
    })
}

fn wait_for_event(name: &str, set: Handle, data: Out<sys::nvmlEventData_t>, milliseconds: c_uint) -> Return {
    call(name, |view| {
        if data.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        let event = events::wait_for_event(view, set, Duration::from_millis(milliseconds.into()))?;
        let device = handle_of(HandleTarget::Device(event.gpu));
        data.put(sys::nvmlEventData_t {
            // The handle is a number, not an address. Programs must not dereference it.
            device: std::ptr::without_provenance_mut(device),
            eventType: events::event_type_bit(event.kind),
            eventData: if event.kind == EventKind::Xid { event.data } else { 0 },
            gpuInstanceId: event.gpu_instance.unwrap_or(NO_INSTANCE),
            computeInstanceId: event.compute_instance.unwrap_or(NO_INSTANCE),
        })
    })
}

/// Writes whether a handle belongs to a MIG device. Does not read the machine's state.
fn is_mig(device: Handle, out: Out<c_uint>) -> Return {
    catch_panic(|| {
        let HandleTarget::Device(uuid) = object_of_handle(device)? else { return Err(Code::INVALID_ARGUMENT) };
        out.put(uuid.starts_with("MIG-").into())
    })
}

exports! {
    nvmlDeviceIsMigDeviceHandle(device: Handle, out: Out<c_uint>) |_own| is_mig(device, out);
}
