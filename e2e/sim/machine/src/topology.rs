//! Links the GPUs of a machine by NVLinks, PCIe switches and NUMA nodes.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::state::{Gpu, NvLinkEnd};

/// How the GPUs of a kind of machine are linked. All kinds have four GPUs per NUMA node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MachineTopology {
    /// A DGX-1 with V100: eight GPUs, each with six NVLinks to four other GPUs.
    HybridCubeMesh,
    /// A DGX or HGX with A100 or newer GPUs. NVSwitches connect all GPUs. The GPUs 0 and 1 share a
    /// PCIe switch, as do 2 and 3, and so on.
    NvSwitch,
    /// A server with PCIe boards only. Each GPU has a separate host bridge.
    TwoSockets,
}

/// The links of a hybrid cube mesh: the indices of two GPUs, and the number of NVLinks between
/// them.
const CUBE_MESH: [(u32, u32, u8); 16] = [
    (0, 1, 1),
    (0, 2, 1),
    (0, 3, 2),
    (0, 4, 2),
    (1, 2, 2),
    (1, 3, 1),
    (1, 5, 2),
    (2, 3, 2),
    (2, 6, 1),
    (3, 7, 1),
    (4, 5, 1),
    (4, 6, 1),
    (4, 7, 2),
    (5, 6, 2),
    (5, 7, 1),
    (6, 7, 2),
];
/// Number of NVSwitches in a machine with NVSwitches.
const NV_SWITCHES: u32 = 6;

impl FromStr for MachineTopology {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        match name {
            "hybrid-cube-mesh" => Ok(Self::HybridCubeMesh),
            "nv-switch" => Ok(Self::NvSwitch),
            "two-sockets" => Ok(Self::TwoSockets),
            _ => {
                let known = "known are hybrid-cube-mesh, nv-switch and two-sockets";
                Err(Error::Invalid(format!("unknown topology {name:?}: {known}")))
            }
        }
    }
}

impl MachineTopology {
    /// Links the GPUs. `nvlinks` returns the number of NVLinks from a GPU to NVSwitches.
    pub(crate) fn link(self, gpus: &mut [Gpu], nvlinks: impl Fn(&Gpu) -> u32) -> Result<(), Error> {
        if self == Self::HybridCubeMesh && gpus.len() != 8 {
            return Err(Error::Invalid(format!("a hybrid cube mesh has 8 GPUs, not {}", gpus.len())));
        }
        for gpu in gpus {
            gpu.numa_node = gpu.numa_node.or(Some(gpu.index / 4));
            (gpu.pcie_path, gpu.nvlinks) = match self {
                Self::HybridCubeMesh => (vec![gpu.index / 4, gpu.index / 2], cube_mesh_links(gpu.index)),
                Self::NvSwitch => {
                    let switches = (0..nvlinks(gpu)).map(|link| NvLinkEnd::Switch(link % NV_SWITCHES));
                    (vec![gpu.index / 2, gpu.index / 2], switches.collect())
                }
                Self::TwoSockets => (vec![gpu.index], Vec::new()),
            };
        }
        Ok(())
    }
}

/// Returns the number of NVLinks between two GPUs of a hybrid cube mesh, by their indices.
pub fn cube_mesh_nvlinks(one: u32, other: u32) -> u8 {
    let pair = (one.min(other), one.max(other));
    CUBE_MESH.iter().find(|&&(from, to, _)| (from, to) == pair).map_or(0, |&(_, _, count)| count)
}

fn cube_mesh_links(gpu: u32) -> Vec<NvLinkEnd> {
    (0..8).flat_map(|other| vec![NvLinkEnd::Gpu(other); cube_mesh_nvlinks(gpu, other).into()]).collect()
}

/// The lowest common component on the PCIe paths from two GPUs to the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommonAncestor {
    /// One PCIe switch.
    OneSwitch,
    /// Several PCIe switches.
    SeveralSwitches,
    /// A host bridge.
    HostBridge,
    /// A NUMA node.
    NumaNode,
    /// Only the machine itself.
    Machine,
}

impl Gpu {
    /// Returns the lowest common component on the PCIe paths from this GPU and another GPU to the
    /// CPU.
    #[must_use]
    pub fn common_ancestor(&self, other: &Self) -> CommonAncestor {
        let common = self.pcie_path.iter().zip(&other.pcie_path).take_while(|(one, other)| one == other).count();
        if self.numa_node != other.numa_node {
            return CommonAncestor::Machine;
        }
        match common {
            0 => CommonAncestor::NumaNode,
            1 => CommonAncestor::HostBridge,
            _ if self.pcie_path == other.pcie_path => CommonAncestor::OneSwitch,
            _ => CommonAncestor::SeveralSwitches,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::description::{GpuDescription, MachineDescription};

    fn machine(topology: MachineTopology, model: &str, count: u32) -> Result<Vec<Gpu>, Error> {
        let gpus = vec![GpuDescription { model: model.to_owned(), count: Some(count), ..GpuDescription::default() }];
        let topology = Some(topology);
        let description =
            MachineDescription { name: "test".to_owned(), gpus, topology, ..MachineDescription::default() };
        Ok(description.state()?.gpus)
    }

    #[test]
    fn each_gpu_of_a_cube_mesh_has_six_nvlinks_and_each_link_two_ends() {
        let gpus = machine(MachineTopology::HybridCubeMesh, "H100-80", 8).unwrap();
        let count =
            |from: u32, to: u32| gpus[from as usize].nvlinks.iter().filter(|&&end| end == NvLinkEnd::Gpu(to)).count();
        assert!(gpus.iter().all(|gpu| gpu.nvlinks.len() == 6));
        assert!((0..8).all(|one| (0..8).all(|other| count(one, other) == count(other, one))));
        assert_eq!((count(0, 3), count(0, 1), count(0, 5)), (2, 1, 0));
        assert!(machine(MachineTopology::HybridCubeMesh, "H100-80", 4).is_err());
    }

    #[test]
    fn gpus_share_switches_bridges_and_numa_nodes_as_in_the_machine() {
        use CommonAncestor::{HostBridge, Machine, NumaNode, OneSwitch};
        for (topology, expected) in [
            (MachineTopology::HybridCubeMesh, [OneSwitch, HostBridge, Machine]),
            (MachineTopology::NvSwitch, [OneSwitch, NumaNode, Machine]),
            (MachineTopology::TwoSockets, [NumaNode, NumaNode, Machine]),
        ] {
            let gpus = machine(topology, "A100-80", 8).unwrap();
            assert_eq!([1, 2, 4].map(|other| gpus[0].common_ancestor(&gpus[other])), expected, "{topology:?}");
        }
        let numbers = |model| machine(MachineTopology::NvSwitch, model, 2).unwrap()[1].nvlinks.len();
        assert_eq!((numbers("A100-80"), numbers("H100-80")), (12, 18));
    }

    #[test]
    fn topologies_have_the_same_names_in_files_and_options() {
        for name in ["hybrid-cube-mesh", "nv-switch", "two-sockets"] {
            let parsed: MachineTopology = name.parse().unwrap();
            assert_eq!(serde_json::to_string(&parsed).unwrap(), format!("{name:?}"));
        }
        assert!("ring".parse::<MachineTopology>().unwrap_err().to_string().contains("nv-switch"));
    }
}
