//! What front ends answer from. Pure.
use std::collections::BTreeMap;

use super::pending::PendingAllocations;
use super::usage::Allocations;
use crate::event::NodeEvent;
use crate::gpu::layout::Pool;

/// What is served on this node, and to whom. The main loop brings it up to date; a front end reads
/// it and adds what it gives out.
#[derive(Debug, Default)]
pub struct AllocationTable {
    /// Pools by resource.
    pub pools: BTreeMap<String, Vec<Pool>>,
    /// Containers whose request has not come yet.
    pub pending: PendingAllocations,
    /// What was given out.
    pub allocations: Allocations,
    /// Paths of device nodes by device.
    pub nodes: BTreeMap<String, Vec<String>>,
    /// Events of answers, until the main loop publishes them.
    pub events: Vec<NodeEvent>,
}
