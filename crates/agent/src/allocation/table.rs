//! The state from which front ends answer requests. Pure.
use std::collections::BTreeMap;

use super::pending::PendingAllocations;
use super::usage::Allocations;
use crate::event::NodeEvent;
use crate::gpu::layout::Pool;

/// The slices that this node serves, and their allocations. The main loop updates the table. Front
/// ends read it and add their allocations.
#[derive(Debug, Default)]
pub struct AllocationTable {
    /// Pools by resource.
    pub pools: BTreeMap<String, Vec<Pool>>,
    /// Requests that the kubelet has yet to make.
    pub pending: PendingAllocations,
    /// The allocations.
    pub allocations: Allocations,
    /// Paths of device nodes, by device.
    pub nodes: BTreeMap<String, Vec<String>>,
    /// Events of denied requests, until the main loop publishes them.
    pub events: Vec<NodeEvent>,
}
