//! What the node knows that tenants are judged by. Pure.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::GpuNodeSpec;
use cleave_api::sharingpolicy::Enforcement;
use cleave_gpu::nvml::Process;
use cleave_kubelet::HeldDevices;

use crate::allocation::allocation_id;
use crate::allocation::usage::Allocations;
use crate::gpu::hardware::Hardware;
use crate::gpu::layout::{Kind, Layout, parse_id};
use crate::mps::View;

/// The shared devices of the node, and who holds what of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TenantSnapshot {
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

/// The inputs of a snapshot.
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

impl TenantSnapshot {
    /// Builds the snapshot.
    pub fn of(facts: &Facts<'_>) -> Self {
        let Facts { hardware, layouts, spec, view, held, allocations, foreign } = *facts;
        let mut snapshot = Self::default();
        let evicts = |gpu: &str| {
            let of_gpu = spec.iter().flat_map(|spec| &spec.gpus).find(|spec| spec.uuid == gpu);
            of_gpu.is_some_and(|spec| spec.enforcement == Enforcement::Evict)
        };
        for (gpu, layout) in layouts.iter().filter(|(gpu, _)| hardware.gpus.contains_key(*gpu)) {
            for pool in layout.pools.iter().filter(|pool| matches!(pool.kind, Kind::Mps { .. })) {
                let daemon = view.status.daemons.get(&pool.device);
                let clients = daemon.iter().flat_map(|daemon| &daemon.clients);
                let shared = Shared {
                    gpu: gpu.clone(),
                    evict: evicts(gpu),
                    used: foreign.get(gpu).is_some_and(|processes| !processes.is_empty()),
                    daemon: daemon.iter().flat_map(|daemon| [daemon.pid, daemon.server_pid]).flatten().collect(),
                    clients: clients.map(|client| (client.pid, client.allocation.clone())).collect(),
                };
                snapshot.devices.insert(pool.device.clone(), shared);
            }
        }
        if snapshot.devices.is_empty() {
            return snapshot;
        }
        for (id, allocation) in allocations.iter() {
            let Some(limits) = allocation.mps else { continue };
            snapshot.limits.insert(id.clone(), limits.memory_mib);
            for device in &allocation.devices {
                snapshot.devices.entry(device.clone()).and_modify(|shared| shared.used = true);
            }
        }
        snapshot.shares = held.map(|rows| rows.iter().flat_map(shares).collect());
        for share in snapshot.shares.iter().flatten() {
            snapshot.devices.entry(share.device.clone()).and_modify(|shared| shared.used = true);
        }
        for shared in snapshot.devices.values_mut() {
            shared.used |= !shared.clients.is_empty();
        }
        snapshot
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
