//! Determines the devices that a program sees: the devices of its container, restricted by the
//! program's environment.

use std::fs;
use std::path::Path;

use sim_machine::{DeviceRef, Machine, State};
use sim_mps::wire::Device;

/// The environment variable that replaces `/dev` in tests.
pub(crate) const DEV_DIRECTORY_ENV: &str = "SIMGPU_DEV";

/// The device selection in the environment.
#[derive(Debug, Clone, Default)]
pub(crate) struct DeviceSelection {
    /// `NVIDIA_VISIBLE_DEVICES`, which NVIDIA's container runtime evaluates.
    pub(crate) container: Option<String>,
    /// The minor numbers of the existing device nodes `/dev/nvidia<n>`.
    pub(crate) nodes: Vec<u32>,
    /// `CUDA_VISIBLE_DEVICES`.
    pub(crate) program: Option<String>,
}

/// The GPUs of a container.
#[derive(Debug, PartialEq, Eq)]
enum ContainerDevices<'a> {
    All,
    List(&'a str),
    Nodes(&'a [u32]),
    Nothing,
}

impl DeviceSelection {
    /// Reads this process's device selection.
    pub(crate) fn from_environment() -> Self {
        let text = |name| std::env::var(name).ok();
        let dev = text(DEV_DIRECTORY_ENV).unwrap_or_else(|| "/dev".to_owned());
        Self {
            container: text("NVIDIA_VISIBLE_DEVICES"),
            nodes: device_node_numbers(Path::new(&dev)),
            program: text("CUDA_VISIBLE_DEVICES"),
        }
    }

    fn container_devices(&self) -> ContainerDevices<'_> {
        match self.container.as_deref() {
            Some("all") => ContainerDevices::All,
            // CDI specifications set `void`. The device nodes then determine the GPUs.
            Some("void") | None if !self.nodes.is_empty() => ContainerDevices::Nodes(&self.nodes),
            Some("void" | "none" | "") => ContainerDevices::Nothing,
            Some(list) => ContainerDevices::List(list),
            // The program runs on the host, where a simulated machine needs no device nodes.
            None if self.program.is_some() => ContainerDevices::All,
            None => ContainerDevices::Nothing,
        }
    }

    /// Returns the devices of this machine that the program sees, in the order of their device
    /// ordinals.
    pub(crate) fn visible_devices(&self, state: &State) -> Vec<Device> {
        let given = match self.container_devices() {
            ContainerDevices::All => state.visible_devices(None),
            ContainerDevices::List(list) => state.visible_devices(Some(list)),
            ContainerDevices::Nodes(nodes) => {
                let has_node = |device: &DeviceRef<'_>| nodes.contains(&device.gpu.minor);
                let whole = state.visible_devices(None).into_iter().filter(has_node);
                // A device node does not identify a MIG device, so the program's list must name the
                // MIG device.
                match self.program.as_deref().filter(|list| list.starts_with("MIG-")) {
                    Some(list) => state.visible_devices(Some(list)).into_iter().filter(has_node).collect(),
                    None => whole.collect(),
                }
            }
            ContainerDevices::Nothing => Vec::new(),
        };
        let given = given.into_iter().map(|device| Device {
            uuid: device.uuid().to_owned(),
            sms: device.sms(),
            memory: device.cuda_memory_bytes(),
        });
        self.selected_devices(given.collect())
    }

    /// Returns the devices of an MPS server that the program sees. `machine` is `None` in a
    /// container without access to the machine's state. In such a container, only the environment
    /// restricts the devices.
    pub(crate) fn visible_server_devices(&self, offers: &[Device], machine: Option<&Machine>) -> Vec<Device> {
        let state = machine.and_then(|machine| machine.snapshot().ok());
        match (state, self.container_devices()) {
            (Some(state), _) => {
                let visible = self.visible_devices(&state);
                offers.iter().filter(|offer| visible.iter().any(|device| device.uuid == offer.uuid)).cloned().collect()
            }
            (None, ContainerDevices::Nothing) => Vec::new(),
            (None, ContainerDevices::All | ContainerDevices::Nodes(_)) => self.selected_devices(offers.to_vec()),
            (None, ContainerDevices::List(list)) => self.selected_devices(select_devices(offers, list)),
        }
    }

    /// Returns the devices that `CUDA_VISIBLE_DEVICES` selects.
    fn selected_devices(&self, given: Vec<Device>) -> Vec<Device> {
        match self.program.as_deref() {
            Some(list) => select_devices(&given, list),
            None => given,
        }
    }
}

/// Returns the devices in a list of ordinals, UUIDs and prefixes of UUIDs. Ignores the first entry
/// that names no device, and all later entries.
fn select_devices(devices: &[Device], list: &str) -> Vec<Device> {
    let find = |entry: &str| match entry.parse::<usize>() {
        Ok(ordinal) => devices.get(ordinal).cloned(),
        Err(_) if entry.len() > 4 => devices.iter().find(|device| device.uuid.starts_with(entry)).cloned(),
        Err(_) => None,
    };
    list.split(',').map(str::trim).map_while(find).collect()
}

/// Returns the minor numbers of the GPU device nodes in a directory.
fn device_node_numbers(dev: &Path) -> Vec<u32> {
    let entries = fs::read_dir(dev).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.strip_prefix("nvidia")?.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use sim_machine::{GpuDescription, MachineDescription};

    use super::*;

    fn state() -> State {
        let gpus = vec![GpuDescription { model: "H200-141".into(), count: Some(2), ..GpuDescription::default() }];
        MachineDescription { name: "test".into(), gpus, ..MachineDescription::default() }.state().unwrap()
    }

    fn visible_indices(given: &DeviceSelection) -> Vec<u32> {
        let state = state();
        let index = |device: &Device| state.gpus.iter().find(|gpu| gpu.uuid == device.uuid).unwrap().index;
        given.visible_devices(&state).iter().map(index).collect()
    }

    fn device_selection(container: Option<&str>, nodes: &[u32], program: Option<&str>) -> DeviceSelection {
        DeviceSelection {
            container: container.map(str::to_owned),
            nodes: nodes.to_vec(),
            program: program.map(str::to_owned),
        }
    }

    #[test]
    fn a_program_sees_the_devices_of_its_container() {
        let second = state().gpus[1].uuid.clone();
        assert_eq!(visible_indices(&device_selection(None, &[], None)), [] as [u32; 0]);
        assert_eq!(visible_indices(&device_selection(Some("none"), &[], Some("0"))), [] as [u32; 0]);
        assert_eq!(visible_indices(&device_selection(Some("void"), &[], None)), [] as [u32; 0]);
        assert_eq!(visible_indices(&device_selection(Some("all"), &[], None)), [0, 1]);
        assert_eq!(visible_indices(&device_selection(Some(&second), &[], None)), [1]);
        assert_eq!(visible_indices(&device_selection(Some("void"), &[1], None)), [1]);
        assert_eq!(visible_indices(&device_selection(None, &[1], None)), [1]);
    }

    #[test]
    fn a_program_selects_among_the_devices_of_its_container() {
        let second = state().gpus[1].uuid.clone();
        assert_eq!(visible_indices(&device_selection(Some(&second), &[], Some("0"))), [1]);
        assert_eq!(visible_indices(&device_selection(Some(&second), &[], Some("1"))), [] as [u32; 0]);
        assert_eq!(visible_indices(&device_selection(Some("all"), &[], Some(&second))), [1]);
        assert_eq!(visible_indices(&device_selection(None, &[], Some("1,0"))), [1, 0]);
        assert_eq!(visible_indices(&device_selection(None, &[], Some(""))), [] as [u32; 0]);
    }

    #[test]
    fn without_the_machine_the_server_and_the_environment_determine_the_devices() {
        let state = state();
        let offers = state.gpus.iter().map(|gpu| Device { uuid: gpu.uuid.clone(), sms: 132, memory: 0 });
        let offers: Vec<Device> = offers.take(1).collect();
        let first = offers[0].uuid.clone();
        assert_eq!(device_selection(Some(&first), &[], None).visible_server_devices(&offers, None), offers);
        assert_eq!(device_selection(Some("GPU-other"), &[], None).visible_server_devices(&offers, None), []);
        assert_eq!(device_selection(None, &[], None).visible_server_devices(&offers, None), []);
        assert_eq!(device_selection(Some("void"), &[0], None).visible_server_devices(&offers, None), offers);
    }
}
