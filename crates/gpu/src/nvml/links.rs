//! Reads the links between GPUs, and combines them into the node's topology.
use cleave_plan::topology::{GpuLink, PciePath, Topology};
use nvml_wrapper::Device;
use nvml_wrapper::enum_wrappers::device::TopologyLevel;
use nvml_wrapper::error::NvmlError as Code;
use nvml_wrapper_sys::bindings::{
    NVML_NVLINK_MAX_LINKS, nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU as REMOTE_GPU,
    nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH as REMOTE_SWITCH,
    nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_UNKNOWN as REMOTE_UNKNOWN,
};

use super::error::{NvmlError, ignore_unsupported};
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
    pub(super) nvlinks: NvLinks,
}

/// The other ends of a GPU's active NVLinks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct NvLinks {
    /// The ends that are known.
    pub(super) ends: Vec<NvLinkEnd>,
    /// Whether NVML failed for at least one link, so that ends may be missing.
    pub(super) is_incomplete: bool,
}

/// The device at the other end of an NVLink.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NvLinkEnd {
    /// The GPU with this PCI bus ID, in the format of sysfs.
    Gpu(String),
    /// An NVSwitch.
    Switch,
}

/// Returns the other ends of a GPU's active NVLinks. If NVML cannot read a link, only that link is
/// unknown. `bus_id` converts a bus ID to the format of sysfs.
///
/// # Errors
/// Returns an error only if the driver is lost.
pub(super) fn read_nvlinks(
    nvml: &nvml_wrapper::Nvml,
    device: &Device<'_>,
    bus_id: impl Fn(&str) -> String,
) -> Result<NvLinks, NvmlError> {
    let mut links = NvLinks::default();
    for number in 0..NVML_NVLINK_MAX_LINKS {
        if ignore_unless_driver_lost(read_nvlink(nvml, device, number, &bus_id, &mut links))?.is_none() {
            links.is_incomplete = true;
        }
    }
    Ok(links)
}

/// Adds the other end of one NVLink to `links` if the link is active.
fn read_nvlink(
    nvml: &nvml_wrapper::Nvml,
    device: &Device<'_>,
    number: u32,
    bus_id: impl Fn(&str) -> String,
    links: &mut NvLinks,
) -> Result<(), NvmlError> {
    let link = device.link_wrapper_for(number);
    match link.is_active() {
        Ok(true) => {}
        // Most GPUs have fewer links than the maximum.
        Ok(false) | Err(Code::InvalidArg | Code::NotSupported) => return Ok(()),
        Err(code) => return Err(NvmlError::from_code("nvmlDeviceGetNvLinkState", code)),
    }
    // Drivers before 470 lack this call.
    let kind = sys::nvlink_remote_type(nvml, device, number);
    let kind = ignore_unless_driver_lost(ignore_unsupported("nvmlDeviceGetNvLinkRemoteDeviceType", kind))?;
    links.is_incomplete |= kind.is_none();
    match kind.flatten().unwrap_or(REMOTE_UNKNOWN) {
        REMOTE_SWITCH => links.ends.push(NvLinkEnd::Switch),
        REMOTE_GPU | REMOTE_UNKNOWN => {
            let remote = ignore_unsupported("nvmlDeviceGetNvLinkRemotePciInfo", link.remote_pci_info())?;
            links.ends.extend(remote.map(|pci| NvLinkEnd::Gpu(bus_id(&pci.bus_id))));
        }
        _ => {}
    }
    Ok(())
}

/// Returns `None` for an error that concerns only one GPU. Returns an error if the driver is lost.
pub(super) fn ignore_unless_driver_lost<T>(result: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.requires_reload() => Err(error),
        Err(error) => {
            tracing::debug!(error = &error as &dyn std::error::Error, "failed to read a GPU's links");
            Ok(None)
        }
    }
}

/// Returns the path between two GPUs as NVML reports it. Returns `None` if NVML cannot determine
/// the path.
pub(super) fn read_pcie_path(one: &Device<'_>, other: Device<'_>) -> Result<Option<PciePath>, NvmlError> {
    let level = ignore_unsupported("nvmlDeviceGetTopologyCommonAncestor", one.topology_common_ancestor(other));
    Ok(level?.map(|level| match level {
        TopologyLevel::Internal => PciePath::SameBoard,
        TopologyLevel::Single => PciePath::OneSwitch,
        TopologyLevel::Multiple => PciePath::SeveralSwitches,
        TopologyLevel::HostBridge => PciePath::SameHostBridge,
        TopologyLevel::Node => PciePath::SameNumaNode,
        TopologyLevel::System => PciePath::AcrossNumaNodes,
    }))
}

/// Result of reading the PCIe path between two GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PciePathReading {
    /// NVML reports this path.
    Known(PciePath),
    /// NVML cannot determine the path on this machine.
    Undetermined,
    /// The call failed.
    Failed,
}

/// Combines the GPUs and the PCIe path of each pair into a topology. If NVML does not report a
/// path, derives it from the NUMA nodes. The link of a pair is unknown if the path or an NVLink
/// could not be read.
pub(super) fn build_topology(gpus: &[GpuPorts], path: impl Fn(usize, usize) -> PciePathReading) -> Topology {
    let link = |one: usize, other: usize| {
        let (first, second) = (&gpus[one], &gpus[other]);
        let by_numa = || match (first.numa, second.numa) {
            (Some(a), Some(b)) if a == b => PciePath::SameNumaNode,
            (Some(_), Some(_)) => PciePath::AcrossNumaNodes,
            _ => PciePath::Unknown,
        };
        let pcie = match path(one, other) {
            PciePathReading::Known(path) => path,
            PciePathReading::Undetermined | PciePathReading::Failed => by_numa(),
        };
        GpuLink { pcie, nvlinks: count_nvlinks(first, second) }
    };
    let is_known = |one: usize, other: usize| {
        let is_incomplete = [one, other].iter().any(|&at| gpus[at].nvlinks.is_incomplete);
        !is_incomplete && path(one, other) != PciePathReading::Failed
    };
    Topology::with_unknown_links(gpus.iter().map(|gpu| gpu.uuid.clone()).collect(), link, is_known)
}

/// Returns the number of NVLinks between two GPUs: direct links, and links through NVSwitches,
/// which connect each GPU to every other GPU. If the GPUs report different numbers, returns the
/// lower number.
fn count_nvlinks(one: &GpuPorts, other: &GpuPorts) -> u8 {
    let to_gpu = |from: &GpuPorts, to: &GpuPorts| {
        from.nvlinks.ends.iter().filter(|end| matches!(end, NvLinkEnd::Gpu(pci) if *pci == to.pci)).count()
    };
    let to_switch = |from: &GpuPorts| from.nvlinks.ends.iter().filter(|&end| *end == NvLinkEnd::Switch).count();
    let direct = to_gpu(one, other).min(to_gpu(other, one));
    u8::try_from(direct + to_switch(one).min(to_switch(other))).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ports(number: u32, ends: Vec<NvLinkEnd>) -> GpuPorts {
        let nvlinks = NvLinks { ends, is_incomplete: false };
        GpuPorts { uuid: format!("GPU-{number}"), pci: pci_bus_id(number), numa: Some(number / 2), nvlinks }
    }

    fn pci_bus_id(number: u32) -> String {
        format!("0000:{number:02x}:00.0")
    }

    fn to_gpu(number: u32) -> NvLinkEnd {
        NvLinkEnd::Gpu(pci_bus_id(number))
    }

    #[test]
    fn nvlinks_count_if_both_gpus_report_them_or_switches_connect_the_gpus() {
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
        let score = |path: PciePathReading, pair: [&str; 2]| build_topology(&gpus, |_, _| path).score(&pair);
        let undetermined = PciePathReading::Undetermined;
        assert_eq!(score(undetermined, ["GPU-0", "GPU-1"]), 20);
        assert_eq!(score(undetermined, ["GPU-0", "GPU-2"]), 10);
        assert_eq!(score(undetermined, ["GPU-2", "GPU-3"]), 0, "unknown");
        let known = PciePathReading::Known(PciePath::OneSwitch);
        assert_eq!(score(known, ["GPU-0", "GPU-2"]), 50, "NVML's answer has precedence");
        assert!([undetermined, known].iter().all(|&path| build_topology(&gpus, |_, _| path).has_all_links()));
    }

    #[test]
    fn only_links_that_could_not_be_read_are_unknown() {
        let pairs = |failed: usize| {
            let mut gpus: Vec<GpuPorts> = (0..3).map(|number| ports(number, vec![NvLinkEnd::Switch; 2])).collect();
            gpus[failed].nvlinks = NvLinks { ends: vec![NvLinkEnd::Switch], is_incomplete: true };
            build_topology(&gpus, |_, _| PciePathReading::Known(PciePath::OneSwitch))
        };
        let complete = pairs(0).with_earlier_links(&pairs(2));
        assert!(!pairs(0).has_all_links() && !complete.has_all_links(), "both reads lack the links of 0 and 2");
        assert_eq!((pairs(0).gpus().len(), pairs(0).score(&["GPU-0", "GPU-1"])), (3, 150), "the known part counts");
        assert_eq!(complete.score(&["GPU-0", "GPU-1"]), 250);
        assert_eq!(complete.score(&["GPU-1", "GPU-2"]), 250);
        let gpus: Vec<GpuPorts> = (0..3).map(|number| ports(number, Vec::new())).collect();
        let failed = |one: usize, other: usize| {
            if one + other == 1 { PciePathReading::Failed } else { PciePathReading::Undetermined }
        };
        assert!(!build_topology(&gpus, failed).has_all_links());
    }
}
