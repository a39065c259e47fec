//! Reads the properties of a device, and lists the processes that use it.

use nvml_wrapper_sys::bindings as sys;
use sim_machine::{
    CommonAncestor, ComputeMode, DeviceRef, Gpu, Machine, NvLinkEnd, PciAddress, Process, ProcessKind, State,
};

use crate::library::{Code, Handle, HandleTarget, MachineView, Result, handle_of};

/// Instance id that NVML reports for processes and events of a whole GPU.
pub(crate) const NO_INSTANCE: u32 = u32::MAX;

/// A device's memory in bytes, as NVML reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceMemory {
    pub(crate) total: u64,
    pub(crate) reserved: u64,
    pub(crate) used: u64,
    pub(crate) free: u64,
}

/// Returns the device's current memory use.
pub(crate) fn memory_use(view: &MachineView, device: &DeviceRef<'_>) -> DeviceMemory {
    let (total, usable) = (device.nvml_memory_bytes(), device.cuda_memory_bytes());
    let processes = processes_on_gpu(&view.machine, &view.state, &device.gpu.uuid);
    let used = view.state.used_bytes(&processes, device.uuid()).min(usable);
    DeviceMemory { total, reserved: total.saturating_sub(usable), used, free: usable - used }
}

/// Returns the product name. For a MIG device, the name includes the profile.
pub(crate) fn product_name(device: &DeviceRef<'_>) -> String {
    let profile = device.mig.and_then(|(gi, ci)| device.model.compute_profile(gi.profile, ci.profile));
    match profile {
        Some(profile) => format!("{} MIG {}", device.model.name, profile.name),
        None => device.model.name.clone(),
    }
}

/// Returns the `NVML_DEVICE_ARCH_…` constant of an architecture.
pub(crate) fn architecture(name: &str) -> u32 {
    match name {
        "Turing" => sys::NVML_DEVICE_ARCH_TURING,
        "Ampere" => sys::NVML_DEVICE_ARCH_AMPERE,
        "Ada" => sys::NVML_DEVICE_ARCH_ADA,
        "Hopper" => sys::NVML_DEVICE_ARCH_HOPPER,
        "Blackwell" => sys::NVML_DEVICE_ARCH_BLACKWELL,
        _ => sys::NVML_DEVICE_ARCH_UNKNOWN,
    }
}

pub(crate) fn compute_mode(mode: ComputeMode) -> sys::nvmlComputeMode_t {
    match mode {
        ComputeMode::Default => sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_DEFAULT,
        ComputeMode::Prohibited => sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_PROHIBITED,
        ComputeMode::ExclusiveProcess => sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
    }
}

/// Converts an NVML constant to a compute mode. `EXCLUSIVE_THREAD` is not supported, as with
/// current drivers.
pub(crate) fn parse_compute_mode(mode: sys::nvmlComputeMode_t) -> Result<ComputeMode> {
    match mode {
        sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_DEFAULT => Ok(ComputeMode::Default),
        sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_PROHIBITED => Ok(ComputeMode::Prohibited),
        sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_EXCLUSIVE_PROCESS => Ok(ComputeMode::ExclusiveProcess),
        sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_EXCLUSIVE_THREAD => Err(Code::NOT_SUPPORTED),
        _ => Err(Code::INVALID_ARGUMENT),
    }
}

/// Returns the `NVML_TOPOLOGY_…` constant for the common ancestor of two GPUs.
pub(crate) fn topology_level(ancestor: CommonAncestor) -> sys::nvmlGpuTopologyLevel_t {
    match ancestor {
        CommonAncestor::OneSwitch => sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_SINGLE,
        CommonAncestor::SeveralSwitches => sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_MULTIPLE,
        CommonAncestor::HostBridge => sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_HOSTBRIDGE,
        CommonAncestor::NumaNode => sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_NODE,
        CommonAncestor::Machine => sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_SYSTEM,
    }
}

/// Returns the other end of an NVLink. Returns `None` if the link is inactive because the GPU at
/// that end is lost. A GPU without NVLinks does not support this query.
pub(crate) fn nvlink_peer(view: &MachineView, gpu: &Gpu, link: u32) -> Result<Option<NvLinkEnd>> {
    if gpu.nvlinks.is_empty() {
        return Err(Code::NOT_SUPPORTED);
    }
    let end = gpu.nvlinks.get(link as usize).ok_or(Code::INVALID_ARGUMENT)?;
    Ok(match *end {
        NvLinkEnd::Gpu(index) if view.state.gpus.iter().any(|other| other.index == index && other.lost) => None,
        end => Some(end),
    })
}

/// Returns the PCI address of the device at the other end of an NVLink.
pub(crate) fn nvlink_peer_pci(view: &MachineView, end: NvLinkEnd) -> Result<PciAddress> {
    match end {
        NvLinkEnd::Gpu(index) => {
            let gpu = view.state.gpus.iter().find(|gpu| gpu.index == index).ok_or(Code::NOT_FOUND)?;
            Ok(gpu.pci)
        }
        // NVSwitches have higher PCI bus numbers than the GPUs.
        NvLinkEnd::Switch(number) => Ok(PciAddress { domain: 0, bus: 0xf0 + number, device: 0 }),
    }
}

/// Returns the handle of the first GPU that `find` selects. Fails with `none` if no GPU matches,
/// and fails if the GPU is lost.
pub(crate) fn gpu_handle(view: &MachineView, find: impl Fn(&sim_machine::Gpu) -> bool, none: Code) -> Result<Handle> {
    let gpu = view.state.gpus.iter().find(|g| find(g)).ok_or(none)?;
    view.gpu(&gpu.uuid)?;
    Ok(handle_of(HandleTarget::Device(gpu.uuid.clone())))
}

/// Returns the handle of a GPU or MIG device.
pub(crate) fn handle_by_uuid(view: &MachineView, uuid: &str) -> Result<Handle> {
    let device = view.state.device(uuid).ok_or(Code::NOT_FOUND)?;
    view.gpu(&device.gpu.uuid)?;
    Ok(handle_of(HandleTarget::Device(uuid.to_owned())))
}

/// Returns whether a text is this PCI address. The domain may have 4 or 8 digits.
pub(crate) fn is_bus_id(pci: sim_machine::PciAddress, text: &str) -> bool {
    pci.bus_id().eq_ignore_ascii_case(text) || pci.short_bus_id().eq_ignore_ascii_case(text)
}

/// Which processes an NVML process list contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcessList {
    /// All compute processes, including MPS clients and servers.
    Compute,
    /// MPS clients.
    Mps,
    /// Graphics processes.
    Graphics,
}

/// An entry of an NVML process list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ListedProcess {
    pub(crate) pid: u32,
    pub(crate) used: u64,
    pub(crate) gpu_instance: u32,
    pub(crate) compute_instance: u32,
}

/// Lists the processes on a device, with the memory that each process uses there. A GPU's list
/// includes the processes on its MIG devices. Omits processes that are not visible in this
/// process's PID namespace.
pub(crate) fn list_processes(view: &MachineView, device: &DeviceRef<'_>, list: ProcessList) -> Vec<ListedProcess> {
    let mut listed: Vec<ListedProcess> = Vec::new();
    for process in processes_on_gpu(&view.machine, &view.state, &device.gpu.uuid) {
        let wanted = match list {
            ProcessList::Compute => process.kind != ProcessKind::Graphics,
            ProcessList::Mps => process.kind == ProcessKind::MpsClient,
            ProcessList::Graphics => process.kind == ProcessKind::Graphics,
        };
        let Some(place) = view.state.device(&process.device) else { continue };
        let inside = place.uuid() == device.uuid() || (device.mig.is_none() && place.gpu.uuid == device.gpu.uuid);
        if !wanted || !inside {
            continue;
        }
        let Some(pid) = view.machine.visible_pid(&process) else { continue };
        let (gpu_instance, compute_instance) = place.mig.map_or((NO_INSTANCE, NO_INSTANCE), |(gi, ci)| (gi.id, ci.id));
        let same = |l: &&mut ListedProcess| {
            (l.pid, l.gpu_instance, l.compute_instance) == (pid, gpu_instance, compute_instance)
        };
        match listed.iter_mut().find(same) {
            Some(entry) => entry.used += process.used,
            None => listed.push(ListedProcess { pid, used: process.used, gpu_instance, compute_instance }),
        }
    }
    listed
}

/// Returns the contexts on a GPU and on its MIG devices.
pub(crate) fn processes_on_gpu(machine: &Machine, state: &State, gpu: &str) -> Vec<Process> {
    let here = |p: &Process| state.device(&p.device).is_some_and(|d| d.gpu.uuid == gpu);
    machine.live_processes_where(state, here)
}

/// Returns the percentage of time in which kernels run. This is the configured value, or 20 % for
/// each context except those of MPS servers, up to 100 %.
pub(crate) fn utilization_percent(view: &MachineView, device: &DeviceRef<'_>) -> u32 {
    if let Some(percent) = device.gpu.utilization {
        return percent.min(100);
    }
    let programs = processes_on_gpu(&view.machine, &view.state, &device.gpu.uuid);
    let programs = programs.iter().filter(|p| p.kind != ProcessKind::MpsServer).count();
    u32::try_from(programs * 20).unwrap_or(100).min(100)
}

/// Returns the power in milliwatts. The power increases with the utilization, from the idle power
/// to the limit.
pub(crate) fn power_milliwatts(view: &MachineView, device: &DeviceRef<'_>) -> u32 {
    let (limit, idle) = device.model.power_watts;
    (idle + limit.saturating_sub(idle) * utilization_percent(view, device) / 100) * 1000
}

/// Mask of the throttle reasons that the driver can report.
pub(crate) const SUPPORTED_THROTTLE_REASONS: u64 = 0x1ff;
/// Mask of the throttle reasons for which the hardware halves the clocks, except the memory clock.
const HARDWARE_SLOWDOWN_REASONS: u64 = (sys::nvmlClocksThrottleReasonHwSlowdown
    | sys::nvmlClocksThrottleReasonHwThermalSlowdown
    | sys::nvmlClocksThrottleReasonHwPowerBrakeSlowdown) as u64;
/// Clocks of an idle GPU in MHz: graphics, SM, memory, video. All models have the clocks of an
/// H200.
const IDLE_CLOCKS_MHZ: [u32; 4] = [345, 345, 3201, 765];
/// Maximum clocks in MHz: graphics, SM, memory, video. All models have the clocks of an H200.
const MAX_CLOCKS_MHZ: [u32; 4] = [1980, 1980, 3201, 1545];

/// Returns the reasons for reduced clocks: the injected reasons, and also idleness if the GPU is
/// idle.
pub(crate) fn throttle_reasons(view: &MachineView, device: &DeviceRef<'_>) -> u64 {
    let idle = utilization_percent(view, device) == 0;
    device.gpu.throttling | if idle { u64::from(sys::nvmlClocksThrottleReasonGpuIdle) } else { 0 }
}

/// Returns the maximum clock of a kind. For `NVML_CLOCK_COUNT`, which is not a kind of clock, fails
/// with `NVML_ERROR_NOT_SUPPORTED`, as an H200 with driver 580 does.
pub(crate) fn max_clock_mhz(kind: u32) -> Result<u32> {
    MAX_CLOCKS_MHZ.get(kind as usize).copied().ok_or(Code::NOT_SUPPORTED)
}

/// Returns the current clock of a kind: the idle clock if the GPU is idle, or half of the maximum
/// if the hardware slows down the clock.
pub(crate) fn clock_mhz(view: &MachineView, device: &DeviceRef<'_>, kind: u32) -> Result<u32> {
    let max = max_clock_mhz(kind)?;
    let reasons = throttle_reasons(view, device);
    let is_memory = kind == sys::nvmlClockType_enum_NVML_CLOCK_MEM;
    Ok(if reasons & u64::from(sys::nvmlClocksThrottleReasonGpuIdle) != 0 {
        IDLE_CLOCKS_MHZ.get(kind as usize).copied().unwrap_or(max)
    } else if reasons & HARDWARE_SLOWDOWN_REASONS != 0 && !is_memory {
        max / 2
    } else {
        max
    })
}

/// Converts a list such as `0-3,8` to a bit mask of 64-bit words, the least significant word first.
/// For an empty list, sets the first `all` bits.
pub(crate) fn to_bit_words(list: &str, words: usize, all: usize) -> Vec<u64> {
    let mut set = vec![0_u64; words];
    let mut add = |bit: usize| {
        if let Some(word) = set.get_mut(bit / 64) {
            *word |= 1 << (bit % 64);
        }
    };
    if list.is_empty() {
        (0..all).for_each(&mut add);
    }
    for part in list.split(',') {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(from), Ok(to)) = (from.trim().parse::<usize>(), to.trim().parse::<usize>()) {
            (from..=to.min(words * 64)).for_each(&mut add);
        }
    }
    set
}

#[cfg(test)]
mod tests {
    use super::to_bit_words;

    #[test]
    fn cpu_lists_convert_to_words_of_bits() {
        assert_eq!(to_bit_words("0-3,65", 2, 0), [0b1111, 0b10]);
        assert_eq!(to_bit_words("", 1, 2), [0b11]);
        assert_eq!(to_bit_words("0-9999999,x,", 1, 0), [u64::MAX]);
    }
}
