//! Reads the links between GPUs, and combines them to the node's topology.
use cleave_plan::topology::{GpuLink, PciePath, Topology};
use nvml_wrapper::Device;
use nvml_wrapper::enum_wrappers::device::TopologyLevel;
use nvml_wrapper::error::NvmlError as Code;
use nvml_wrapper_sys::bindings::{
    NVML_NVLINK_MAX_LINKS, nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU as REMOTE_GPU,
    nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH as REMOTE_SWITCH,
    nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_UNKNOWN as REMOTE_UNKNOWN,
};

use super::error::{NvmlError, if_known, if_supported};
use super::sys;

/// The properties of one GPU that determine its links.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GpuPorts {
    /// UUID of the GPU.
    pub(super) uuid: String,
    /// PCI bus ID in the format of sysfs.
    pub(super) pci: String,
    /// NUMA node, if known.
    pub(super) numa: Option<u32>,
    /// The other ends of the active NVLinks.
    pub(super) nvlinks: Vec<NvLinkEnd>,
}

/// The device at the other end of an NVLink.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NvLinkEnd {
    /// The GPU with this PCI bus ID, in the format of sysfs.
    Gpu(String),
    /// An NVSwitch.
    Switch,
}

/// Returns the other ends of a GPU's active NVLinks. `bus_id` converts a bus ID to the format of
/// sysfs.
pub(super) fn read_nvlinks(
    nvml: &nvml_wrapper::Nvml,
    device: &Device<'_>,
    bus_id: impl Fn(&str) -> String,
) -> Result<Vec<NvLinkEnd>, NvmlError> {
    let mut ends = Vec::new();
    for number in 0..NVML_NVLINK_MAX_LINKS {
        let link = device.link_wrapper_for(number);
        match link.is_active() {
            Ok(true) => {}
            // GPUs of one generation have different numbers of links.
            Ok(false) | Err(Code::InvalidArg | Code::NotSupported) => continue,
            Err(code) => return Err(NvmlError::of("nvmlDeviceGetNvLinkState", code)),
        }
        // Drivers before 470 lack this call.
        let kind = if_known("nvmlDeviceGetNvLinkRemoteDeviceType", sys::nvlink_remote_type(nvml, device, number))?;
        match kind.unwrap_or(REMOTE_UNKNOWN) {
            REMOTE_SWITCH => ends.push(NvLinkEnd::Switch),
            REMOTE_GPU | REMOTE_UNKNOWN => {
                let remote = if_known("nvmlDeviceGetNvLinkRemotePciInfo", link.remote_pci_info())?;
                ends.extend(remote.map(|pci| NvLinkEnd::Gpu(bus_id(&pci.bus_id))));
            }
            _ => {}
        }
    }
    Ok(ends)
}

/// Returns the path between two GPUs as NVML reports it. Returns `None` if NVML cannot determine
/// it.
pub(super) fn read_pcie_path(one: &Device<'_>, other: Device<'_>) -> Result<Option<PciePath>, NvmlError> {
    let level = if_supported("nvmlDeviceGetTopologyCommonAncestor", one.topology_common_ancestor(other));
    Ok(level?.map(|level| match level {
        TopologyLevel::Internal => PciePath::SameBoard,
        TopologyLevel::Single => PciePath::OneSwitch,
        TopologyLevel::Multiple => PciePath::SeveralSwitches,
        TopologyLevel::HostBridge => PciePath::SameHostBridge,
        TopologyLevel::Node => PciePath::SameNumaNode,
        TopologyLevel::System => PciePath::AcrossNumaNodes,
    }))
}

/// Combines the GPUs and the PCIe path of each pair. A path that NVML cannot determine is derived
/// from the NUMA nodes.
pub(super) fn build_topology(gpus: &[GpuPorts], path: impl Fn(usize, usize) -> Option<PciePath>) -> Topology {
    let link = |one: usize, other: usize| {
        let (first, second) = (&gpus[one], &gpus[other]);
        let by_numa = || match (first.numa, second.numa) {
            (Some(a), Some(b)) if a == b => PciePath::SameNumaNode,
            (Some(_), Some(_)) => PciePath::AcrossNumaNodes,
            _ => PciePath::Unknown,
        };
        GpuLink { pcie: path(one, other).unwrap_or_else(by_numa), nvlinks: count_nvlinks(first, second) }
    };
    Topology::new(gpus.iter().map(|gpu| gpu.uuid.clone()).collect(), link)
}

/// Returns the number of NVLinks between two GPUs: direct ones, and those through NVSwitches, which
/// connect each GPU to every other one. If the GPUs report different numbers, the lower one counts.
fn count_nvlinks(one: &GpuPorts, other: &GpuPorts) -> u8 {
    let to_gpu = |from: &GpuPorts, to: &GpuPorts| {
        from.nvlinks.iter().filter(|end| matches!(end, NvLinkEnd::Gpu(pci) if *pci == to.pci)).count()
    };
    let to_switch = |from: &GpuPorts| from.nvlinks.iter().filter(|&end| *end == NvLinkEnd::Switch).count();
    let direct = to_gpu(one, other).min(to_gpu(other, one));
    u8::try_from(direct + to_switch(one).min(to_switch(other))).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ports(number: u32, nvlinks: Vec<NvLinkEnd>) -> GpuPorts {
        GpuPorts { uuid: format!("GPU-{number}"), pci: pci(number), numa: Some(number / 2), nvlinks }
    }

    fn pci(number: u32) -> String {
        format!("0000:{number:02x}:00.0")
    }

    fn to_gpu(number: u32) -> NvLinkEnd {
        NvLinkEnd::Gpu(pci(number))
    }

    #[test]
    fn nvlinks_count_in_both_directions_and_through_switches() {
        let count = |one: Vec<NvLinkEnd>, other| count_nvlinks(&ports(0, one), &ports(1, other));
        assert_eq!(count(vec![to_gpu(1), to_gpu(1), to_gpu(2)], vec![to_gpu(0), to_gpu(0)]), 2);
        assert_eq!(count(vec![to_gpu(1), to_gpu(1)], vec![to_gpu(0)]), 1, "one end is inactive");
        assert_eq!(count(vec![to_gpu(1)], vec![]), 0);
        assert_eq!(count(vec![NvLinkEnd::Switch; 18], vec![NvLinkEnd::Switch; 17]), 17);
        assert_eq!(count(vec![to_gpu(7)], vec![to_gpu(7)]), 0, "a GPU that the node does not see");
    }

    #[test]
    fn numa_nodes_replace_paths_that_nvml_cannot_determine() {
        let mut gpus: Vec<GpuPorts> = (0..4).map(|number| ports(number, Vec::new())).collect();
        gpus[3].numa = None;
        let score = |path: Option<PciePath>, pair: [&str; 2]| build_topology(&gpus, |_, _| path).score(&pair);
        assert_eq!(score(None, ["GPU-0", "GPU-1"]), 20);
        assert_eq!(score(None, ["GPU-0", "GPU-2"]), 10);
        assert_eq!(score(None, ["GPU-2", "GPU-3"]), 0, "unknown");
        assert_eq!(score(Some(PciePath::OneSwitch), ["GPU-0", "GPU-2"]), 50, "NVML's answer has precedence");
    }
}
