//! The state that front ends use to answer requests. Pure.
use std::collections::BTreeMap;

use cleave_plan::topology::Topology;

use super::pending::PendingAllocations;
use super::usage::Allocations;
use crate::event::NodeEvent;
use crate::gpu::layout::Pool;

/// The slices that this node serves, and their allocations. The main loop updates the table. Front
/// ends read the table and add allocations.
#[derive(Debug, Default)]
pub struct AllocationTable {
    /// Pools by resource.
    pub pools: BTreeMap<String, Vec<Pool>>,
    /// Containers for which the kubelet has not called `Allocate` yet, with their reservations.
    pub pending: PendingAllocations,
    /// Allocations that have not ended.
    pub allocations: Allocations,
    /// Paths of device nodes, by UUID of the device.
    pub nodes: BTreeMap<String, Vec<String>>,
    /// Links between the GPUs, as NVML last reported them.
    pub topology: Topology,
    /// Events about refused requests that the main loop has not published yet.
    pub events: Vec<NodeEvent>,
}
