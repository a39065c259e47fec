//! Parses the file that describes a machine, and derives the machine's initial state.

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::model::{Model, find_model};
use crate::state::{ComputeMode, Driver, Gpu, PciAddress, State};
use crate::topology::MachineTopology;

/// The description of a machine, as read from a file. Omitted values derive from the machine's name
/// and the GPU's index, so equal files describe equal machines.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MachineDescription {
    /// The machine's name. UUIDs derive from this name.
    pub name: String,
    /// Initial state and versions of the driver.
    #[serde(default)]
    pub driver: Driver,
    /// The GPUs, in the order of their indices.
    #[serde(default)]
    pub gpus: Vec<GpuDescription>,
    /// How the GPUs are linked. By default, each GPU has a separate host bridge and no NVLinks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topology: Option<MachineTopology>,
    /// Models that this description adds to the built-in models.
    #[serde(default)]
    pub models: Vec<Model>,
}

/// One or more GPUs of the same model.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GpuDescription {
    /// A model's name or alias.
    pub model: String,
    /// The number of GPUs, by default 1. If the number is not 1, the UUID, PCI address, minor
    /// number and serial number must be omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
    /// `GPU-<uuid>`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// PCI address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci: Option<PciAddress>,
    /// The minor number, as in `/dev/nvidia<n>`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor: Option<u32>,
    /// NUMA node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// CPUs near the GPU, such as `0-15`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<String>,
    /// The board's serial number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// Whether MIG mode is on.
    #[serde(default)]
    pub mig: bool,
}

impl MachineDescription {
    /// Returns the initial state of the described machine.
    ///
    /// # Errors
    /// Returns an error if a model is unknown, if a model with MIG mode does not support MIG, if
    /// two GPUs have the same UUID, minor number or PCI address, if an entry for several GPUs sets
    /// a serial number, or if the topology requires another number of GPUs.
    pub fn state(&self) -> Result<State, Error> {
        let mut gpus: Vec<Gpu> = Vec::new();
        for entry in &self.gpus {
            let model = find_model(&self.models, &entry.model)
                .ok_or_else(|| Error::Invalid(format!("unknown GPU model {:?}", entry.model)))?;
            if entry.mig && !model.is_mig_capable() {
                return Err(Error::Invalid(format!("{} does not support MIG", model.name)));
            }
            let count = entry.count.unwrap_or(1);
            if count != 1
                && (entry.uuid.is_some() || entry.pci.is_some() || entry.minor.is_some() || entry.serial.is_some())
            {
                let what = "several GPUs cannot share a UUID, PCI address, minor number or serial number";
                return Err(Error::Invalid(format!("{count} x {}: {what}", entry.model)));
            }
            for _ in 0..count {
                let index = u32::try_from(gpus.len()).unwrap_or(u32::MAX);
                gpus.push(self.gpu(entry, model, index));
            }
        }
        if let Some(topology) = self.topology {
            let is_ampere =
                |gpu: &Gpu| find_model(&self.models, &gpu.model).is_some_and(|model| model.architecture == "Ampere");
            topology.link(&mut gpus, |gpu| if is_ampere(gpu) { 12 } else { 18 })?;
        }
        for (i, a) in gpus.iter().enumerate() {
            for b in &gpus[i + 1..] {
                if a.uuid == b.uuid || a.minor == b.minor || a.pci == b.pci {
                    let what = "have the same UUID, minor number or PCI address";
                    return Err(Error::Invalid(format!("GPUs {} and {} {what}", a.index, b.index)));
                }
            }
        }
        Ok(State {
            machine: self.name.clone(),
            driver: self.driver.clone(),
            gpus,
            models: self.models.clone(),
            ..State::default()
        })
    }

    fn gpu(&self, entry: &GpuDescription, model: &Model, index: u32) -> Gpu {
        let number = index.to_string();
        let uuid = || format!("GPU-{}", derive_uuid(&["gpu", &self.name, &number]));
        let serial = || format!("{:013}", hash_names(&["serial", &self.name, &number]) % 10_u128.pow(13));
        // Number the buses as on a board with eight GPUs. A new PCI domain starts after every 28
        // GPUs.
        let pci = || PciAddress { domain: index / 28, bus: 0x10 + (index % 28) * 8 + index % 2, device: 0 };
        Gpu {
            uuid: entry.uuid.clone().unwrap_or_else(uuid),
            index,
            minor: entry.minor.unwrap_or(index),
            model: model.name.clone(),
            serial: entry.serial.clone().unwrap_or_else(serial),
            pci: entry.pci.unwrap_or_else(pci),
            numa_node: entry.numa_node,
            pcie_path: Vec::new(),
            nvlinks: Vec::new(),
            cpus: entry.cpus.clone().unwrap_or_default(),
            compute_mode: ComputeMode::Default,
            persistence: true,
            mig: entry.mig,
            mig_pending: entry.mig,
            mig_needs_reset: false,
            instances: Vec::new(),
            lost: false,
            removed: false,
            ecc: [0, 0],
            remap_pending: false,
            remap_failed: false,
            recovery: 0,
            temperature: None,
            utilization: None,
            throttling: 0,
            energy_millijoules: 0,
        }
    }
}

/// Derives a UUID from names. Equal names always result in equal UUIDs.
pub(crate) fn derive_uuid(names: &[&str]) -> String {
    // Set the bits of UUID version 5 (derived from a name) and of the standard variant.
    let n = (hash_names(names) & !(0xf000 << 64) & !(0xc000 << 48)) | (0x5000 << 64) | (0x8000 << 48);
    let part = |shift: u32, bits: u32| (n >> shift) & ((1 << bits) - 1);
    format!("{:08x}-{:04x}-{:04x}-{:04x}-{:012x}", part(96, 32), part(80, 16), part(64, 16), part(48, 16), part(0, 48))
}

/// Returns a 128-bit hash of names. Each half is the FNV-1a hash of the names, with a zero byte
/// after each name, and has its own initial value. A final mixing step gives similar names
/// dissimilar hashes.
fn hash_names(names: &[&str]) -> u128 {
    let half = |start: u64| {
        let bytes = names.iter().flat_map(|n| n.bytes().chain([0]));
        let h = bytes.fold(start, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3));
        let h = (h ^ (h >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let h = (h ^ (h >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        h ^ (h >> 31)
    };
    u128::from(half(0xcbf2_9ce4_8422_2325)) << 64 | u128::from(half(0x8422_2325_cbf2_9ce4))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(name: &str, text: &str) -> Result<State, Error> {
        MachineDescription {
            name: name.to_owned(),
            gpus: serde_json::from_str(text).unwrap(),
            ..MachineDescription::default()
        }
        .state()
    }

    #[test]
    fn equal_descriptions_describe_equal_machines_with_distinct_gpus() {
        let text = r#"[{"model":"H100-80","count":8},{"model":"t4"},{"model":"NVIDIA H200"}]"#;
        let (one, again, other) = (machine("a", text), machine("a", text), machine("b", text));
        let (one, again, other) = (one.unwrap(), again.unwrap(), other.unwrap());
        assert_eq!(serde_json::to_string(&one).unwrap(), serde_json::to_string(&again).unwrap());
        let mut uuids: Vec<&String> = one.gpus.iter().chain(&other.gpus).map(|g| &g.uuid).collect();
        uuids.sort();
        uuids.dedup();
        assert_eq!(uuids.len(), 20);
        assert_eq!(one.gpus[9].model, "NVIDIA H200");
        assert!(uuids.iter().all(|u| u.len() == 40 && u.as_bytes()[18] == b'5'), "{uuids:?}");
    }

    #[test]
    fn values_in_the_description_take_precedence_over_derived_values() {
        let text = r#"[{"model":"A30","uuid":"GPU-1","pci":{"domain":0,"bus":7,"device":0},"minor":3,"numaNode":1,"mig":true}]"#;
        let gpu = machine("a", text).unwrap().gpus.remove(0);
        assert_eq!((gpu.uuid.as_str(), gpu.minor, gpu.numa_node, gpu.mig), ("GPU-1", 3, Some(1), true));
        assert_eq!(gpu.pci.bus_id(), "00000000:07:00.0");
    }

    #[test]
    fn invalid_descriptions_are_rejected_with_a_reason() {
        let refused = |text: &str| machine("a", text).unwrap_err().to_string();
        assert!(refused(r#"[{"model":"H900"}]"#).contains("H900"));
        assert!(refused(r#"[{"model":"T4","mig":true}]"#).contains("does not support MIG"));
        assert!(refused(r#"[{"model":"T4","count":2,"uuid":"GPU-1"}]"#).contains("cannot share"));
        assert!(refused(r#"[{"model":"T4","uuid":"GPU-1"},{"model":"T4","uuid":"GPU-1"}]"#).contains("GPUs 0 and 1"));
    }

    #[test]
    fn many_gpus_have_valid_pci_addresses() {
        let state = machine("a", r#"[{"model":"T4","count":100}]"#).unwrap();
        assert!(state.gpus.iter().all(|g| g.pci.bus <= 0xff));
    }
}
