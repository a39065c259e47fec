//! What the node knows that tenants are judged by. Pure.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::GpuNodeSpec;
use cleave_api::gpunode::GpuSpec;
use cleave_api::sharingpolicy::{Enforcement, HostOutOfMemory};
use cleave_gpu::nvml::Process;
use cleave_kubelet::HeldDevices;

use crate::allocate::allocation_id;
use crate::hardware::Hardware;
use crate::layout::{Kind, Layout, parse_id};
use crate::mps::View;
use crate::usage::Allocations;

/// The shared devices of the node, and who holds what of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scene {
    /// GPUs and MIG devices with MPS shares, by UUID.
    pub devices: BTreeMap<String, Shared>,
    /// Shares that containers hold; none while the kubelet does not say.
    pub shares: Option<Vec<Share>>,
    /// Memory limits in MiB of what was given out, by allocation; none is no limit.
    pub limits: BTreeMap<String, Option<u64>>,
}

/// A device with MPS shares.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Shared {
    /// UUID of the GPU.
    pub gpu: String,
    /// The policy says that who leaves its share is evicted.
    pub evict: bool,
    /// The policy says that programs are ended through MPS before their container is killed for the machine's memory.
    pub end_first: bool,
    /// Somebody may use it.
    pub used: bool,
    /// Pids of its MPS daemon and server.
    pub daemon: BTreeSet<u32>,
    /// MPS clients by pid, with the allocation whose door they came through, if they did.
    pub clients: BTreeMap<u32, Option<String>>,
}

/// Shares of one device that a container holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    /// Namespace of the pod.
    pub namespace: String,
    /// The pod.
    pub pod: String,
    /// The container.
    pub container: String,
    /// The device.
    pub device: String,
    /// The allocation.
    pub allocation: String,
}

/// All that a scene is made of.
#[derive(Debug, Clone, Copy)]
pub struct Facts<'a> {
    /// The GPUs.
    pub hardware: &'a Hardware,
    /// What they are served as, by GPU.
    pub layouts: &'a BTreeMap<String, Layout>,
    /// The spec in force.
    pub spec: Option<&'a GpuNodeSpec>,
    /// The MPS host.
    pub view: &'a View,
    /// What the kubelet lists, where it does.
    pub held: Option<&'a [HeldDevices]>,
    /// What was given out.
    pub allocations: &'a Allocations,
    /// Processes on GPUs that are not of their MPS daemons, as NVML last listed them.
    pub foreign: &'a BTreeMap<String, Vec<Process>>,
}

impl Scene {
    /// The scene that follows from what is known.
    pub fn of(facts: &Facts<'_>) -> Self {
        let Facts { hardware, layouts, spec, view, held, allocations, foreign } = *facts;
        let mut scene = Self::default();
        let says = |gpu: &str, what: fn(&GpuSpec) -> bool| {
            spec.iter().flat_map(|spec| &spec.gpus).find(|spec| spec.uuid == gpu).is_some_and(what)
        };
        for (gpu, layout) in layouts.iter().filter(|(gpu, _)| hardware.gpus.contains_key(*gpu)) {
            for pool in layout.pools.iter().filter(|pool| matches!(pool.kind, Kind::Mps { .. })) {
                let daemon = view.status.daemons.get(&pool.device);
                let clients = daemon.iter().flat_map(|daemon| &daemon.clients);
                let shared = Shared {
                    gpu: gpu.clone(),
                    evict: says(gpu, |spec| spec.enforcement == Enforcement::Evict),
                    end_first: says(gpu, |spec| spec.host_out_of_memory == HostOutOfMemory::EndFirst),
                    used: foreign.get(gpu).is_some_and(|processes| !processes.is_empty()),
                    daemon: daemon.iter().flat_map(|daemon| [daemon.pid, daemon.server_pid]).flatten().collect(),
                    clients: clients.map(|client| (client.pid, client.allocation.clone())).collect(),
                };
                scene.devices.insert(pool.device.clone(), shared);
            }
        }
        if scene.devices.is_empty() {
            return scene;
        }
        for (id, allocation) in allocations.iter() {
            let Some(limits) = allocation.mps else { continue };
            scene.limits.insert(id.clone(), limits.memory_mib);
            for device in &allocation.devices {
                scene.devices.entry(device.clone()).and_modify(|shared| shared.used = true);
            }
        }
        scene.shares = held.map(|rows| rows.iter().flat_map(shares).collect());
        for share in scene.shares.iter().flatten() {
            scene.devices.entry(share.device.clone()).and_modify(|shared| shared.used = true);
        }
        for shared in scene.devices.values_mut() {
            shared.used |= !shared.clients.is_empty();
        }
        scene
    }

    /// Devices that somebody may use.
    pub fn in_use(&self) -> Vec<String> {
        self.devices.iter().filter(|(_, shared)| shared.used).map(|(device, _)| device.clone()).collect()
    }
}

fn shares(row: &HeldDevices) -> Vec<Share> {
    let devices: BTreeSet<&str> = row.ids.iter().filter_map(|id| parse_id(id)).map(|(device, _)| device).collect();
    let allocation = allocation_id(&row.resource, &row.ids);
    let share = |device: &str| Share {
        namespace: row.namespace.clone(),
        pod: row.pod.clone(),
        container: row.container.clone(),
        device: device.to_owned(),
        allocation: allocation.clone(),
    };
    devices.into_iter().map(share).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use cleave_gpu::mps::wire::{Client, DaemonState, DaemonStatus, Door, Status};
    use cleave_gpu::nvml::Inventory;

    use super::*;
    use crate::allocate::{Allocation, MpsLimits};
    use crate::layout::tests::{gpu, mps_spec};
    use crate::node::{Node, Object};
    use crate::serve::Table;
    use crate::usage::tests::{allocation, held};

    struct Known {
        node: Node,
        table: Table,
        start: Instant,
    }

    impl Known {
        fn scene(&mut self) -> Scene {
            self.node.turn(&mut self.table, self.start).scene
        }
    }

    /// A node that serves ten shares of GPU-a, and GPU-b whole.
    fn node(enforcement: Enforcement) -> Known {
        let start = Instant::now();
        let (mut node, allocations) = Node::start("boot".into(), std::time::Duration::ZERO, None, None, start);
        let gpus = [gpu("GPU-a", 0), gpu("GPU-b", 1)].map(|gpu| (gpu.index, Ok(gpu)));
        node.inventory(Ok(Inventory { driver: "580".into(), gpus: gpus.into(), processes: BTreeMap::new() }), start);
        let spec = GpuNodeSpec {
            plan_id: "p".into(),
            gpus: vec![cleave_api::gpunode::GpuSpec { enforcement, ..mps_spec("GPU-a", 10) }],
        };
        node.object(Object::Present(1, spec));
        Known { node, table: Table { allocations, ..Table::default() }, start }
    }

    fn given() -> Allocation {
        let limits = MpsLimits { threads: Some(10), memory_mib: Some(1000), max_clients: None };
        Allocation { mps: Some(limits), ..allocation(&["GPU-a::0"]) }
    }

    #[test]
    fn nothing_is_looked_at_while_nobody_can_use_a_shared_device() {
        let mut known = node(Enforcement::Report);
        let scene = known.scene();
        assert_eq!(scene.devices.keys().collect::<Vec<_>>(), ["GPU-a"], "no GPU that is whole");
        assert_eq!((scene.in_use(), scene.shares), (vec![], None), "the kubelet has not said who holds what");
        known.table.allocations.give(given(), known.start);
        assert_eq!(known.scene().in_use(), ["GPU-a"]);
    }

    #[test]
    fn a_process_is_reason_enough_to_look_though_nobody_holds_a_share() {
        let mut known = node(Enforcement::Report);
        let process = Process { pid: 7, memory: None, mps: false, gpu_instance: None };
        let gpus = [(0, Ok(gpu("GPU-a", 0)))].into();
        let processes = [("GPU-a".to_owned(), vec![process])].into();
        known.node.inventory(Ok(Inventory { driver: "580".into(), gpus, processes }), known.start);
        assert_eq!(known.scene().in_use(), ["GPU-a"]);
    }

    #[test]
    fn who_holds_what_and_who_is_a_client_is_what_the_kubelet_and_mps_say() {
        let mut known = node(Enforcement::Evict);
        let id = given().id();
        known.table.allocations.give(given(), known.start);
        known.node.held(Ok(vec![held("p", &["GPU-a::0"])]), known.start, &mut known.table.allocations);
        let daemon = DaemonStatus {
            state: DaemonState::Active,
            pid: Some(10),
            server_pid: Some(11),
            restarts: 0,
            door: Door::Hard,
            message: String::new(),
            clients: vec![Client { pid: 7, allocation: Some(id.clone()) }, Client { pid: 8, allocation: None }],
            fault: None,
        };
        let status = Status { version: 1, daemons: [("GPU-a".to_owned(), daemon)].into(), ..Status::default() };
        known.node.mps(View { alive: true, status, error: None });
        let scene = known.scene();
        let shared = &scene.devices["GPU-a"];
        assert_eq!((shared.gpu.as_str(), shared.evict, shared.daemon.clone()), ("GPU-a", true, [10, 11].into()));
        assert_eq!(shared.clients, [(7, Some(id.clone())), (8, None)].into());
        assert_eq!(scene.limits, [(id.clone(), Some(1000))].into());
        let share = &scene.shares.as_ref().unwrap()[0];
        assert_eq!((share.pod.as_str(), share.device.as_str(), &share.allocation), ("p", "GPU-a", &id));
        known.node.held(Err("no".into()), known.start, &mut known.table.allocations);
        assert_eq!(known.scene().shares, None, "an answer of before may name a pod that is gone");
    }
}
