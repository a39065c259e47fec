//! Which devices a program sees: those that its container was given, then those that it wants of
//! them.

use std::fs;
use std::path::Path;

use sim_machine::{DeviceRef, Machine, State};
use sim_mps::wire::Device;

/// Another directory for `/dev`, for tests.
pub(crate) const DEV_ENV: &str = "SIMGPU_DEV";

/// What the environment says.
#[derive(Debug, Clone, Default)]
pub(crate) struct Given {
    /// `NVIDIA_VISIBLE_DEVICES`: what NVIDIA's container runtime acts upon.
    pub(crate) container: Option<String>,
    /// Numbers of the `/dev/nvidia<n>` that are there.
    pub(crate) nodes: Vec<u32>,
    /// `CUDA_VISIBLE_DEVICES`.
    pub(crate) program: Option<String>,
}

/// GPUs that a container was given.
#[derive(Debug, PartialEq, Eq)]
enum Container<'a> {
    All,
    List(&'a str),
    Nodes(&'a [u32]),
    Nothing,
}

impl Given {
    /// This process's.
    pub(crate) fn own() -> Self {
        let text = |name| std::env::var(name).ok();
        let dev = text(DEV_ENV).unwrap_or_else(|| "/dev".to_owned());
        Self {
            container: text("NVIDIA_VISIBLE_DEVICES"),
            nodes: nodes(Path::new(&dev)),
            program: text("CUDA_VISIBLE_DEVICES"),
        }
    }

    fn container(&self) -> Container<'_> {
        match self.container.as_deref() {
            Some("all") => Container::All,
            // `void` is what CDI specifications set: the device nodes say it then.
            Some("void") | None if !self.nodes.is_empty() => Container::Nodes(&self.nodes),
            Some("void" | "none" | "") => Container::Nothing,
            Some(list) => Container::List(list),
            // A program on a host without device nodes, which a simulated machine need not have.
            None if self.program.is_some() => Container::All,
            None => Container::Nothing,
        }
    }

    /// The devices that a program of this machine sees, in the order of its ordinals.
    pub(crate) fn visible(&self, state: &State) -> Vec<Device> {
        let given = match self.container() {
            Container::All => state.visible_devices(None),
            Container::List(list) => state.visible_devices(Some(list)),
            Container::Nodes(nodes) => {
                let has_node = |device: &DeviceRef<'_>| nodes.contains(&device.gpu.minor);
                let whole = state.visible_devices(None).into_iter().filter(has_node);
                // A MIG device is not told from its GPU by a node: the program's own list names it.
                match self.program.as_deref().filter(|list| list.starts_with("MIG-")) {
                    Some(list) => state.visible_devices(Some(list)).into_iter().filter(has_node).collect(),
                    None => whole.collect(),
                }
            }
            Container::Nothing => Vec::new(),
        };
        let given = given.into_iter().map(|device| Device {
            uuid: device.uuid().to_owned(),
            sms: device.sms(),
            memory: device.cuda_memory(),
        });
        self.wanted(given.collect())
    }

    /// Of the devices that an MPS server offers those that the program sees. `machine` is none
    /// where a container has no access to it: then everything that the server offers and the
    /// environment does not exclude.
    pub(crate) fn visible_of(&self, offers: &[Device], machine: Option<&Machine>) -> Vec<Device> {
        let state = machine.and_then(|machine| machine.snapshot().ok());
        match (state, self.container()) {
            (Some(state), _) => {
                let visible = self.visible(&state);
                offers.iter().filter(|offer| visible.iter().any(|device| device.uuid == offer.uuid)).cloned().collect()
            }
            (None, Container::Nothing) => Vec::new(),
            (None, Container::All | Container::Nodes(_)) => self.wanted(offers.to_vec()),
            (None, Container::List(list)) => self.wanted(select(offers, list)),
        }
    }

    fn wanted(&self, given: Vec<Device>) -> Vec<Device> {
        match self.program.as_deref() {
            Some(list) => select(&given, list),
            None => given,
        }
    }
}

/// What a list of ordinals and UUIDs (or their beginnings) names; the first entry that names
/// nothing ends it.
fn select(devices: &[Device], list: &str) -> Vec<Device> {
    let find = |entry: &str| match entry.parse::<usize>() {
        Ok(ordinal) => devices.get(ordinal).cloned(),
        Err(_) if entry.len() > 4 => devices.iter().find(|device| device.uuid.starts_with(entry)).cloned(),
        Err(_) => None,
    };
    list.split(',').map(str::trim).map_while(find).collect()
}

fn nodes(dev: &Path) -> Vec<u32> {
    let entries = fs::read_dir(dev).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.strip_prefix("nvidia")?.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use sim_machine::{Description, GpuDescription};

    use super::*;

    fn state() -> State {
        let gpus = vec![GpuDescription { model: "H200-141".into(), count: Some(2), ..GpuDescription::default() }];
        Description { name: "test".into(), gpus, ..Description::default() }.state().unwrap()
    }

    fn seen(given: &Given) -> Vec<u32> {
        let state = state();
        let index = |device: &Device| state.gpus.iter().find(|gpu| gpu.uuid == device.uuid).unwrap().index;
        given.visible(&state).iter().map(index).collect()
    }

    fn given(container: Option<&str>, nodes: &[u32], program: Option<&str>) -> Given {
        Given { container: container.map(str::to_owned), nodes: nodes.to_vec(), program: program.map(str::to_owned) }
    }

    #[test]
    fn a_program_sees_what_its_container_was_given() {
        let second = state().gpus[1].uuid.clone();
        assert_eq!(seen(&given(None, &[], None)), [] as [u32; 0]);
        assert_eq!(seen(&given(Some("none"), &[], Some("0"))), [] as [u32; 0]);
        assert_eq!(seen(&given(Some("void"), &[], None)), [] as [u32; 0]);
        assert_eq!(seen(&given(Some("all"), &[], None)), [0, 1]);
        assert_eq!(seen(&given(Some(&second), &[], None)), [1]);
        assert_eq!(seen(&given(Some("void"), &[1], None)), [1]);
        assert_eq!(seen(&given(None, &[1], None)), [1]);
    }

    #[test]
    fn a_program_chooses_among_what_its_container_was_given() {
        let second = state().gpus[1].uuid.clone();
        assert_eq!(seen(&given(Some(&second), &[], Some("0"))), [1]);
        assert_eq!(seen(&given(Some(&second), &[], Some("1"))), [] as [u32; 0]);
        assert_eq!(seen(&given(Some("all"), &[], Some(&second))), [1]);
        assert_eq!(seen(&given(None, &[], Some("1,0"))), [1, 0]);
        assert_eq!(seen(&given(None, &[], Some(""))), [] as [u32; 0]);
    }

    #[test]
    fn without_the_machine_a_program_sees_what_the_server_offers_and_its_environment_names() {
        let state = state();
        let offers = state.gpus.iter().map(|gpu| Device { uuid: gpu.uuid.clone(), sms: 132, memory: 0 });
        let offers: Vec<Device> = offers.take(1).collect();
        let first = offers[0].uuid.clone();
        assert_eq!(given(Some(&first), &[], None).visible_of(&offers, None), offers);
        assert_eq!(given(Some("GPU-other"), &[], None).visible_of(&offers, None), []);
        assert_eq!(given(None, &[], None).visible_of(&offers, None), []);
        assert_eq!(given(Some("void"), &[0], None).visible_of(&offers, None), offers);
    }
}
