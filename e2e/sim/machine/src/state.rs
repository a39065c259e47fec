//! Describes the machine's state, which all processes of the machine share: plain data and pure
//! queries.

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::model::{Model, Placement, find_model};
use crate::process::Process;

/// The state of the machine at one time.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct State {
    /// Generation number, which increases with each change.
    pub generation: u64,
    /// The machine's name. UUIDs derive from this name.
    pub machine: String,
    /// Number of boots of the machine. A reboot destroys the contexts of earlier boots.
    pub boot: u64,
    /// State and versions of the driver.
    pub driver: Driver,
    /// The GPUs, in the order of their indices.
    pub gpus: Vec<Gpu>,
    /// Models of the machine's description. These models take precedence over the built-in models.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<Model>,
    /// Contexts on GPUs, including contexts of dead processes. [`crate::Machine::processes`]
    /// returns only contexts of live processes.
    #[serde(default)]
    pub processes: Vec<Process>,
    /// The most recent events, oldest first.
    #[serde(default)]
    pub events: Vec<Event>,
    /// Injected faults.
    #[serde(default)]
    pub faults: Vec<Fault>,
    /// The last number that was assigned to a process, an event or a fault.
    pub last_id: u64,
}

/// The NVIDIA driver.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Driver {
    /// Whether the driver is loaded. If not, `nvmlInit` fails.
    pub present: bool,
    /// Version of the kernel driver, such as `580.159.04`.
    pub version: String,
    /// CUDA version in NVML's encoding: 13000 means 13.0.
    pub cuda: i32,
}

impl Default for Driver {
    fn default() -> Self {
        Self { present: true, version: "580.159.04".to_owned(), cuda: 13000 }
    }
}

/// One GPU.
// NVML reports these properties independently of each other, so an enum cannot replace them.
#[allow(clippy::struct_excessive_bools)]
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Gpu {
    /// `GPU-<uuid>`.
    pub uuid: String,
    /// NVML's index.
    pub index: u32,
    /// The minor number, as in `/dev/nvidia<n>`.
    pub minor: u32,
    /// The model's product name.
    pub model: String,
    /// The board's serial number.
    pub serial: String,
    /// The PCI address.
    pub pci: PciAddress,
    /// The nearest NUMA node, if the machine has more than one.
    pub numa_node: Option<u32>,
    /// Numbers of the host bridge and the PCIe switches between the CPU and the GPU, in this order.
    /// If the paths of two GPUs start with the same numbers, the GPUs share these bridges and
    /// switches.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pcie_path: Vec<u32>,
    /// The other ends of the GPU's NVLinks, by link number.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nvlinks: Vec<NvLinkEnd>,
    /// CPUs near the GPU, as a list such as `0-15,32-47`. An empty string means all CPUs.
    #[serde(default)]
    pub cpus: String,
    /// Which processes may open contexts.
    pub compute_mode: ComputeMode,
    /// Whether persistence mode is on.
    pub persistence: bool,
    /// Whether MIG mode is on now.
    pub mig: bool,
    /// Whether MIG mode will be on after the next reset.
    pub mig_pending: bool,
    /// Whether MIG mode changes only at a reset, as on an Ampere GPU in a VM.
    #[serde(default)]
    pub mig_needs_reset: bool,
    /// GPU instances, sorted by id.
    #[serde(default)]
    pub instances: Vec<GpuInstance>,
    /// Whether the GPU fell off the bus. Every call about a lost GPU fails.
    #[serde(default)]
    pub lost: bool,
    /// Whether the GPU was removed from the machine. The driver does not list a removed GPU, and a
    /// removed GPU is also lost.
    #[serde(default)]
    pub removed: bool,
    /// Numbers of corrected and uncorrected ECC errors since the last boot or reset.
    #[serde(default)]
    pub ecc: [u64; 2],
    /// Whether the next reset remaps memory rows.
    #[serde(default)]
    pub remap_pending: bool,
    /// Whether row remapping failed, so that the board must be replaced.
    #[serde(default)]
    pub remap_failed: bool,
    /// The recovery action that the driver requests, as an NVML value: 0 none, 1 reset, 2 reboot, 4
    /// drain and reset.
    #[serde(default)]
    pub recovery: u32,
    /// Temperature in degrees Celsius. `None` means the default for an idle GPU.
    #[serde(default)]
    pub temperature: Option<u32>,
    /// Percentage of time in which a kernel was running. `None` means that the value is derived
    /// from the processes.
    #[serde(default)]
    pub utilization: Option<u32>,
    /// Reasons for reduced clocks, as a mask of NVML bits (`nvmlClocksThrottleReason…`).
    #[serde(default)]
    pub throttling: u64,
    /// Energy in millijoules since the driver was loaded. The simulation does not increase this
    /// value.
    #[serde(default)]
    pub energy_millijoules: u64,
}

/// The device at the other end of an NVLink.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum NvLinkEnd {
    /// The GPU with this index.
    Gpu(u32),
    /// The NVSwitch with this number.
    Switch(u32),
}

/// A PCI address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PciAddress {
    /// PCI domain.
    pub domain: u32,
    /// PCI bus.
    pub bus: u32,
    /// PCI device.
    pub device: u32,
}

impl PciAddress {
    /// Returns the address in NVML's format, such as `00000000:19:00.0`.
    #[must_use]
    pub fn bus_id(self) -> String {
        format!("{:08X}:{:02X}:{:02X}.0", self.domain, self.bus, self.device)
    }

    /// Returns the address in the format of Linux and of NVML's legacy field, such as
    /// `0000:19:00.0`.
    #[must_use]
    pub fn short_bus_id(self) -> String {
        format!("{:04X}:{:02X}:{:02X}.0", self.domain, self.bus, self.device)
    }
}

/// Which processes may open contexts on a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ComputeMode {
    /// Any number of processes.
    #[default]
    Default,
    /// No process.
    Prohibited,
    /// One process at a time. An MPS server counts as one process.
    ExclusiveProcess,
}

/// A MIG GPU instance.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuInstance {
    /// NVML's instance id, which depends only on the placement.
    pub id: u32,
    /// The profile's id, such as 19 for 1g.10gb on an H100.
    pub profile: u32,
    /// The memory slices that the instance occupies.
    pub placement: Placement,
    /// The compute instances of this GPU instance, sorted by id.
    pub compute: Vec<ComputeInstance>,
}

/// A MIG compute instance. To CUDA, it is a MIG device.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ComputeInstance {
    /// NVML's id, which starts at 0 within the GPU instance.
    pub id: u32,
    /// The profile's id.
    pub profile: u32,
    /// The compute slices that the instance occupies within its GPU instance.
    pub placement: Placement,
    /// `MIG-<uuid>`.
    pub uuid: String,
}

/// An event of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    /// The event's sequence number, which increases with each event.
    pub seq: u64,
    /// The GPU's UUID.
    pub gpu: String,
    /// The type of the event.
    pub kind: EventKind,
    /// The XID, or 0 for any other event.
    pub data: u64,
    /// The GPU instance of the event, if known.
    #[serde(default)]
    pub gpu_instance: Option<u32>,
    /// The compute instance of the event, if known.
    #[serde(default)]
    pub compute_instance: Option<u32>,
}

/// The type of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EventKind {
    /// An XID. `data` contains its number.
    Xid,
    /// A corrected ECC error.
    SingleBitEcc,
    /// An uncorrected ECC error.
    DoubleBitEcc,
    /// MIG instances were created or destroyed, or MIG mode was changed.
    MigConfigChange,
}

/// An injected fault.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Fault {
    /// The fault's number, which `simgpu clear` accepts as an argument.
    pub id: u64,
    /// The call that the fault affects: the name of an NVML function, or a name that the simulated
    /// MPS uses.
    pub call: String,
    /// The UUID of the GPU or MIG device to which the fault applies. `None` means all devices.
    #[serde(default)]
    pub gpu: Option<String>,
    /// Effect on the call.
    pub effect: FaultEffect,
    /// Number of further calls to which the fault applies. `None` means no limit.
    #[serde(default)]
    pub remaining: Option<u32>,
}

/// Effect of an injected fault on a call.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum FaultEffect {
    /// The call returns this code.
    Code(i32),
    /// The call hangs for this number of seconds, and then continues. With `None`, the call hangs
    /// until the fault is cleared.
    Hang(Option<f64>),
}

/// The device that a UUID names: a GPU or a MIG device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceRef<'a> {
    /// The GPU itself, or the GPU that contains the MIG device.
    pub gpu: &'a Gpu,
    /// The GPU's model.
    pub model: &'a Model,
    /// The GPU instance and the compute instance of a MIG device. `None` for a GPU.
    pub mig: Option<(&'a GpuInstance, &'a ComputeInstance)>,
}

impl DeviceRef<'_> {
    /// Returns the device's UUID.
    #[must_use]
    pub fn uuid(&self) -> &str {
        self.mig.map_or(&self.gpu.uuid, |(_, ci)| &ci.uuid)
    }

    /// Returns the device's number of SMs.
    #[must_use]
    pub fn sms(&self) -> u32 {
        match self.mig {
            None => self.model.sms,
            Some((gi, ci)) => self.model.compute_profile(gi.profile, ci.profile).map_or(0, |p| p.sms),
        }
    }

    /// Returns the total memory that CUDA reports, in bytes.
    #[must_use]
    pub fn cuda_memory_bytes(&self) -> u64 {
        match self.mig {
            None => self.model.cuda_memory_mib << 20,
            Some((gi, _)) => self.model.gpu_profile(gi.profile).map_or(0, |p| p.memory_mib << 20),
        }
    }

    /// Returns the total memory that NVML reports, in bytes.
    #[must_use]
    pub fn nvml_memory_bytes(&self) -> u64 {
        match self.mig {
            None => self.model.memory_mib << 20,
            Some(_) => self.cuda_memory_bytes(),
        }
    }
}

impl State {
    /// Returns the GPU with this UUID or index.
    ///
    /// # Errors
    /// Returns an error if the machine has no such GPU.
    pub fn gpu(&self, name: &str) -> Result<&Gpu, Error> {
        self.gpus
            .iter()
            .find(|g| g.uuid == name || g.index.to_string() == name)
            .ok_or_else(|| Error::Invalid(format!("machine {} has no GPU {name}", self.machine)))
    }

    /// Returns the GPU with this UUID or index, so that the caller can change it.
    ///
    /// # Errors
    /// Returns an error if the machine has no such GPU.
    pub fn gpu_mut(&mut self, name: &str) -> Result<&mut Gpu, Error> {
        let none = Error::Invalid(format!("machine {} has no GPU {name}", self.machine));
        self.gpus.iter_mut().find(|g| g.uuid == name || g.index.to_string() == name).ok_or(none)
    }

    /// Returns a GPU's model.
    ///
    /// # Errors
    /// Returns an error if neither the machine's description nor the built-in models define the
    /// GPU's model.
    pub fn model(&self, gpu: &Gpu) -> Result<&Model, Error> {
        find_model(&self.models, &gpu.model).ok_or_else(|| Error::Invalid(format!("unknown GPU model {:?}", gpu.model)))
    }

    /// Returns the GPU or the MIG device with this UUID. A GPU may be in MIG mode.
    #[must_use]
    pub fn device(&self, uuid: &str) -> Option<DeviceRef<'_>> {
        self.gpus.iter().find_map(|gpu| {
            let model = self.model(gpu).ok()?;
            if gpu.uuid == uuid {
                return Some(DeviceRef { gpu, model, mig: None });
            }
            let mig =
                gpu.instances.iter().find_map(|gi| gi.compute.iter().find(|c| c.uuid == uuid).map(|c| (gi, c)))?;
            Some(DeviceRef { gpu, model, mig: Some(mig) })
        })
    }

    /// Returns the devices that CUDA enumerates for a value of `CUDA_VISIBLE_DEVICES`, in CUDA's
    /// order. `None` means that the variable is not set.
    ///
    /// The entries of the value are indices, GPU UUIDs, MIG UUIDs or unambiguous prefixes of a
    /// UUID. The result ends before the first entry that names no device. If two entries name the
    /// same device, the result is empty. Lost GPUs are invisible. A GPU in MIG mode appears as its
    /// first MIG device. CUDA uses only one MIG device per process, so a result with MIG devices
    /// contains only the first MIG device.
    #[must_use]
    pub fn visible_devices(&self, value: Option<&str>) -> Vec<DeviceRef<'_>> {
        let whole: Vec<DeviceRef<'_>> = (self.gpus.iter())
            .filter(|g| !g.lost && self.driver.present)
            .filter_map(|gpu| Some(DeviceRef { gpu, model: self.model(gpu).ok()?, mig: None }))
            .collect();
        let migs = |device: &DeviceRef<'_>| -> Vec<DeviceRef<'_>> {
            let (gpu, model) = (self.gpus.iter().find(|g| g.uuid == device.gpu.uuid), self.model(device.gpu).ok());
            let (Some(gpu), Some(model)) = (gpu, model) else { return Vec::new() };
            (gpu.instances.iter())
                .flat_map(|gi| gi.compute.iter().map(move |ci| DeviceRef { gpu, model, mig: Some((gi, ci)) }))
                .collect()
        };
        let mut seen: Vec<DeviceRef<'_>> = Vec::new();
        match value {
            None => seen.clone_from(&whole),
            Some(list) => {
                for entry in list.split(',').map(str::trim) {
                    let found = if let Ok(index) = entry.parse::<usize>() {
                        whole.get(index).copied()
                    } else if entry.starts_with("MIG-") {
                        find_by_uuid_prefix(whole.iter().flat_map(migs), entry)
                    } else if entry.starts_with("GPU-") {
                        find_by_uuid_prefix(whole.iter().copied(), entry)
                    } else {
                        None
                    };
                    let Some(found) = found else { break };
                    if seen.iter().any(|d| d.uuid() == found.uuid()) {
                        return Vec::new();
                    }
                    seen.push(found);
                }
            }
        }
        let seen: Vec<_> = (seen.into_iter())
            .filter_map(|d| if d.gpu.mig && d.mig.is_none() { migs(&d).first().copied() } else { Some(d) })
            .collect();
        match seen.iter().find(|d| d.mig.is_some()) {
            Some(mig) => vec![*mig],
            None => seen,
        }
    }

    /// Returns the memory that these processes use on a device, in bytes. For a GPU, the sum
    /// includes the memory on its MIG devices.
    #[must_use]
    pub fn used_bytes(&self, processes: &[Process], uuid: &str) -> u64 {
        let inside: Vec<&str> = match self.device(uuid) {
            Some(DeviceRef { gpu, mig: None, .. }) => {
                gpu.instances.iter().flat_map(|gi| gi.compute.iter().map(|c| c.uuid.as_str())).chain([uuid]).collect()
            }
            _ => vec![uuid],
        };
        processes.iter().filter(|p| inside.contains(&p.device.as_str())).map(|p| p.used).sum()
    }

    /// Returns the next number for a process, an event or a fault.
    pub fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// Records an event. Keeps only the latest 256 events.
    pub fn push_event(&mut self, gpu: &str, kind: EventKind, data: u64, instance: Option<(u32, u32)>) {
        let seq = self.next_id();
        self.events.push(Event {
            seq,
            gpu: gpu.to_owned(),
            kind,
            data,
            gpu_instance: instance.map(|i| i.0),
            compute_instance: instance.map(|i| i.1),
        });
        if self.events.len() > 256 {
            self.events.remove(0);
        }
    }

    /// Reboots the machine. A board that stores MIG mode (Ampere) activates the pending mode. Other
    /// boards (Hopper) turn MIG mode off. As on a real machine, a reboot clears processes, MIG
    /// instances, events, ECC counts and compute modes, and restores lost GPUs that were not
    /// removed. Injected faults remain until the test clears them.
    pub fn reboot(&mut self) {
        self.boot += 1;
        self.processes.clear();
        self.events.clear();
        let stored: Vec<bool> = self.gpus.iter().map(|g| self.model(g).is_ok_and(|m| m.mig_mode_stored)).collect();
        for (gpu, stored) in self.gpus.iter_mut().zip(stored) {
            gpu.mig_pending &= stored;
            gpu.reset();
            gpu.compute_mode = ComputeMode::Default;
        }
    }
}

/// Returns the device with this UUID prefix, if exactly one device matches.
fn find_by_uuid_prefix<'a>(devices: impl Iterator<Item = DeviceRef<'a>>, prefix: &str) -> Option<DeviceRef<'a>> {
    let mut found = devices.filter(|d| d.uuid().starts_with(prefix));
    let first = found.next()?;
    found.next().is_none().then_some(first)
}

impl Fault {
    /// Returns whether the fault applies to a call about a device. A fault names a call exactly,
    /// without its version (`nvmlDeviceGetCount` for `nvmlDeviceGetCount_v2`), or by a prefix with
    /// `*`. A fault for a GPU also applies to the GPU's MIG devices.
    #[must_use]
    pub fn applies_to(&self, state: &State, call: &str, device: Option<&str>) -> bool {
        let bare = call.rsplit_once("_v").filter(|(_, v)| v.parse::<u8>().is_ok()).map_or(call, |(name, _)| name);
        let named = match self.call.strip_suffix('*') {
            Some(prefix) => call.starts_with(prefix),
            None => self.call == call || self.call == bare,
        };
        let placed = match (&self.gpu, device) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(wanted), Some(uuid)) => wanted == uuid || state.device(uuid).is_some_and(|d| d.gpu.uuid == *wanted),
        };
        named && placed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::description::{GpuDescription, MachineDescription};

    fn state(models: &[&str]) -> State {
        let gpu = |m: &&str| GpuDescription { model: (*m).to_owned(), ..GpuDescription::default() };
        let gpus = models.iter().map(gpu).collect();
        MachineDescription { name: "test".to_owned(), gpus, ..MachineDescription::default() }.state().unwrap()
    }

    fn visible_indices(state: &State, value: Option<&str>) -> Vec<u32> {
        state.visible_devices(value).iter().map(|d| d.gpu.index).collect()
    }

    #[test]
    fn visible_devices_end_before_the_first_unknown_entry() {
        let mut state = state(&["T4", "L4", "A30", "T4"]);
        let uuid = |i: usize| state.gpus[i].uuid.clone();
        let (first, third) = (uuid(0), uuid(2));
        assert_eq!(visible_indices(&state, None), [0, 1, 2, 3]);
        assert_eq!(visible_indices(&state, Some("3,1")), [3, 1]);
        assert_eq!(visible_indices(&state, Some(&format!("{third},{}", &first[..12]))), [2, 0]);
        assert_eq!(visible_indices(&state, Some("1,7,2")), [1]);
        assert_eq!(visible_indices(&state, Some("1,-1,2")), [1]);
        assert!(visible_indices(&state, Some("")).is_empty());
        assert!(visible_indices(&state, Some("1,1")).is_empty());
        assert!(visible_indices(&state, Some("GPU-")).is_empty());
        assert!(visible_indices(&state, Some("all")).is_empty());
        state.gpus[0].lost = true;
        assert_eq!(visible_indices(&state, Some("0")), [1]);
        state.driver.present = false;
        assert!(visible_indices(&state, None).is_empty());
    }

    #[test]
    fn a_reboot_keeps_mig_mode_only_if_the_board_stores_it() {
        let mut state = state(&["A100-80", "H100-80"]);
        for i in 0..2 {
            let model = state.model(&state.gpus[i]).unwrap().clone();
            state.gpus[i].set_mig_mode(&model, true, false).unwrap();
            state.gpus[i].create_gpu_instance(&model, 0, None).unwrap();
        }
        state.reboot();
        let after: Vec<_> = state.gpus.iter().map(|g| (g.mig, g.mig_pending, g.instances.len())).collect();
        assert_eq!(after, [(true, true, 0), (false, false, 0)]);
    }

    #[test]
    fn only_the_latest_events_are_kept() {
        let mut state = state(&["T4"]);
        (0..300).for_each(|n| state.push_event("GPU-x", EventKind::Xid, n, None));
        assert_eq!((state.events.len(), state.events[255].data), (256, 299));
        assert!(state.events.is_sorted_by_key(|e| e.seq));
    }
}
