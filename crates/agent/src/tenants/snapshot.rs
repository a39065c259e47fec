//! Collects the limits and allocations that the tenant watch compares samples with. Pure.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::GpuNodeSpec;
use cleave_api::sharingpolicy::Enforcement;
use cleave_gpu::nvml::Process;
use cleave_kubelet::ContainerDevices;

use crate::allocation::allocation_id;
use crate::allocation::usage::Allocations;
use crate::gpu::hardware::Hardware;
use crate::gpu::layout::{Layout, PoolKind, parse_slice_id};
use crate::mps::HostView;

/// The shared devices of the node and their allocations at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TenantSnapshot {
    /// GPUs and MIG devices with MPS shares, by UUID.
    pub devices: BTreeMap<String, SharedDevice>,
    /// Shares that are allocated to containers. `None` while the kubelet's list is unknown.
    pub shares: Option<Vec<Share>>,
    /// Memory limits in MiB, by allocation id, of the allocations in `shares` and of the
    /// allocations of MPS clients. `None` means unlimited.
    pub limits: BTreeMap<String, Option<u64>>,
}

/// A device with MPS shares.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SharedDevice {
    /// UUID of the GPU.
    pub gpu: String,
    /// Whether the policy evicts pods that exceed their limits.
    pub evict: bool,
    /// Whether a process may be using the device.
    pub in_use: bool,
    /// PIDs of the device's MPS daemon and MPS server.
    pub daemon: BTreeSet<u32>,
    /// Allocation ids of MPS clients, by PID. The id is that of the door that the client used, or
    /// `None` if the client used the daemon's own socket.
    pub clients: BTreeMap<u32, Option<String>>,
}

/// Shares of one device that are allocated to a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// Name of the container.
    pub container: String,
    /// UUID of the device.
    pub device: String,
    /// Id of the allocation.
    pub allocation: String,
}

/// The inputs of a snapshot.
#[derive(Debug, Clone, Copy)]
pub struct SnapshotInputs<'a> {
    /// GPUs of the node, as NVML last reported them.
    pub hardware: &'a Hardware,
    /// Layout of each GPU, by UUID.
    pub layouts: &'a BTreeMap<String, Layout>,
    /// The spec of the `GpuNode`.
    pub spec: Option<&'a GpuNodeSpec>,
    /// The state of the MPS host.
    pub view: &'a HostView,
    /// The kubelet's list of allocated devices, if known.
    pub rows: Option<&'a [ContainerDevices]>,
    /// The agent's allocations.
    pub allocations: &'a Allocations,
    /// Processes on each GPU in NVML's last list, except MPS daemons, MPS servers and MPS clients.
    pub foreign: &'a BTreeMap<String, Vec<Process>>,
}

impl TenantSnapshot {
    /// Builds the snapshot.
    pub fn new(inputs: &SnapshotInputs<'_>) -> Self {
        let SnapshotInputs { hardware, layouts, spec, view, rows, allocations, foreign } = *inputs;
        let mut snapshot = Self::default();
        let evicts = |gpu: &str| {
            let of_gpu = spec.iter().flat_map(|spec| &spec.gpus).find(|spec| spec.uuid == gpu);
            of_gpu.is_some_and(|spec| spec.enforcement == Enforcement::Evict)
        };
        for (gpu, layout) in layouts.iter().filter(|(gpu, _)| hardware.gpus.contains_key(*gpu)) {
            for pool in layout.pools.iter().filter(|pool| matches!(pool.kind, PoolKind::Mps { .. })) {
                let daemon = view.status.daemons.get(&pool.device);
                let clients = daemon.iter().flat_map(|daemon| &daemon.clients);
                let device = SharedDevice {
                    gpu: gpu.clone(),
                    evict: evicts(gpu),
                    in_use: foreign.get(gpu).is_some_and(|processes| !processes.is_empty()),
                    daemon: daemon.iter().flat_map(|daemon| [daemon.pid, daemon.server_pid]).flatten().collect(),
                    clients: clients.map(|client| (client.pid, client.allocation.clone())).collect(),
                };
                snapshot.devices.insert(pool.device.clone(), device);
            }
        }
        if snapshot.devices.is_empty() {
            return snapshot;
        }
        for (_, allocation) in allocations.iter().filter(|(_, allocation)| allocation.mps.is_some()) {
            for uuid in &allocation.devices {
                if let Some(device) = snapshot.devices.get_mut(uuid) {
                    device.in_use = true;
                }
            }
        }
        snapshot.shares = rows.map(|rows| rows.iter().flat_map(shares_in_row).collect());
        for share in snapshot.shares.iter().flatten() {
            snapshot.devices.entry(share.device.clone()).and_modify(|device| device.in_use = true);
        }
        for device in snapshot.devices.values_mut() {
            device.in_use |= !device.clients.is_empty();
        }
        let of_clients = snapshot.devices.values().flat_map(|device| device.clients.values().flatten());
        let of_shares = snapshot.shares.iter().flatten().map(|share| &share.allocation);
        let limit = |id: &String| Some((id.clone(), allocations.get(id)?.mps?.memory_mib));
        snapshot.limits = of_clients.chain(of_shares).filter_map(limit).collect();
        snapshot
    }

    /// Returns the UUIDs of the devices that a process may be using.
    pub fn devices_in_use(&self) -> Vec<String> {
        self.devices.iter().filter(|(_, device)| device.in_use).map(|(uuid, _)| uuid.clone()).collect()
    }
}

/// Returns the shares in one row of the kubelet's list, with one entry for each device.
fn shares_in_row(row: &ContainerDevices) -> Vec<Share> {
    let devices: BTreeSet<&str> =
        row.ids.iter().filter_map(|id| parse_slice_id(id)).map(|(device, _)| device).collect();
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
