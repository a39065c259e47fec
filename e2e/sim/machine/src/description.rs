//! The file that describes a machine, and the state that a machine starts with.

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::model::{Model, find_model};
use crate::state::{ComputeMode, Driver, Gpu, Pci, State};

/// A machine, as a file describes it. What is not given is derived from the name and the index, always alike.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Description {
    /// The machine's name; UUIDs are derived from it.
    pub name: String,
    /// The driver.
    #[serde(default)]
    pub driver: Driver,
    /// Its GPUs, in the order of their indices.
    #[serde(default)]
    pub gpus: Vec<GpuDescription>,
    /// Models of its own, beside the built-in ones.
    #[serde(default)]
    pub models: Vec<Model>,
}

/// One GPU of a description, or several alike.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GpuDescription {
    /// A model's name or alias.
    pub model: String,
    /// How many of it; none: one. More than one cannot have a UUID, a PCI address or a serial number of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
    /// `GPU-<uuid>`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// PCI address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci: Option<Pci>,
    /// The number of `/dev/nvidia<n>`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor: Option<u32>,
    /// NUMA node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// CPUs near it, such as `0-15`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<String>,
    /// The board's serial number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// MIG mode is on.
    #[serde(default)]
    pub mig: bool,
}

impl Description {
    /// The state of a machine just made from this description.
    ///
    /// # Errors
    /// A model is unknown or has no MIG, or two GPUs have the same UUID, minor number or PCI address.
    pub fn state(&self) -> Result<State, Error> {
        let mut gpus: Vec<Gpu> = Vec::new();
        for entry in &self.gpus {
            let model = find_model(&self.models, &entry.model)
                .ok_or_else(|| Error::Invalid(format!("unknown GPU model {:?}", entry.model)))?;
            if entry.mig && !model.mig_capable() {
                return Err(Error::Invalid(format!("{} has no MIG", model.name)));
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
        let serial = || format!("{:013}", fnv(&["serial", &self.name, &number]) % 10_u128.pow(13));
        // Spread over the buses as an eight-GPU board does it; more than 28 go on in the next domain.
        let pci = || Pci { domain: index / 28, bus: 0x10 + (index % 28) * 8 + index % 2, device: 0 };
        Gpu {
            uuid: entry.uuid.clone().unwrap_or_else(uuid),
            index,
            minor: entry.minor.unwrap_or(index),
            model: model.name.clone(),
            serial: entry.serial.clone().unwrap_or_else(serial),
            pci: entry.pci.unwrap_or_else(pci),
            numa_node: entry.numa_node,
            cpus: entry.cpus.clone().unwrap_or_default(),
            compute_mode: ComputeMode::Default,
            persistence: true,
            mig: entry.mig,
            mig_pending: entry.mig,
            instances: Vec::new(),
            lost: false,
            ecc: [0, 0],
            temperature: None,
            utilization: None,
        }
    }
}

/// A UUID that follows from names: the same names, the same UUID.
pub(crate) fn derive_uuid(names: &[&str]) -> String {
    // Version 5 (from a name) and the usual variant, as real ones carry them.
    let n = (fnv(names) & !(0xf000 << 64) & !(0xc000 << 48)) | (0x5000 << 64) | (0x8000 << 48);
    let part = |shift: u32, bits: u32| (n >> shift) & ((1 << bits) - 1);
    format!("{:08x}-{:04x}-{:04x}-{:04x}-{:012x}", part(96, 32), part(80, 16), part(64, 16), part(48, 16), part(0, 48))
}

/// FNV-1a of 128 bits, each name ended by a zero byte.
fn fnv(names: &[&str]) -> u128 {
    let bytes = names.iter().flat_map(|n| n.bytes().chain([0]));
    bytes.fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, |h, b| {
        (h ^ u128::from(b)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
    })
}
