//! The input of a ledger: observed nodes, and the claims of pods.
use std::collections::{BTreeMap, BTreeSet};

use super::request::{DeviceRequest, Units};

/// A time in seconds since a fixed moment that the caller chooses, such as the Unix epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(pub u64);

/// The claim of a released pod. The kubelet may not have allocated all its units yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// What the pod requests.
    pub device_requests: Vec<DeviceRequest>,
    /// Where the pod may go.
    pub place: Place,
    /// The reservations in the pod's annotation, by node. Agents follow them when they allocate.
    /// After a swap, these are the reservations of the pod that it swapped with. Empty for a pod
    /// that bypassed the gate.
    pub noted: BTreeMap<String, Vec<Reservation>>,
}

/// Where a claim's pod may go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// The pod may go to any of these nodes. Units are reserved on each until the pod is bound to
    /// one, or the claim expires.
    OneOf {
        /// The nodes.
        nodes: BTreeSet<String>,
        /// When the claim expires.
        expires: Moment,
    },
    /// The pod is bound to this node. Units are reserved until they are allocated or the pod is
    /// deleted.
    Bound(String),
}

impl Place {
    pub(super) fn nodes(&self) -> BTreeSet<&str> {
        match self {
            Self::OneOf { nodes, .. } => nodes.iter().map(String::as_str).collect(),
            Self::Bound(node) => BTreeSet::from([node.as_str()]),
        }
    }
}

/// Observed state of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeFacts {
    /// GPU model, as pods name it. It is used to choose among nodes.
    pub model: String,
    /// Devices of the node.
    pub devices: Vec<DeviceFacts>,
    /// Allocations on the node. A claim needs no reservation for units that its pod has been
    /// allocated.
    pub allocations: Vec<Allocation>,
}

/// Observed units of one resource on one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// UUID of the GPU or MIG device.
    pub device: String,
    /// The extended resource.
    pub resource: String,
    /// Units that can be allocated. Unhealthy units do not count.
    pub capacity: u32,
    /// Units that are allocated, to any pod.
    pub used: u32,
}

/// Units of one device that a pod has been allocated.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Allocation {
    /// The pod, by the same name as in its claim.
    pub pod: String,
    /// The extended resource.
    pub resource: String,
    /// UUID of the device.
    pub device: String,
    /// Number of units.
    pub units: Units,
}

/// Reserved units of one device, for a pod that requests this number of units.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reservation {
    /// The extended resource.
    pub resource: String,
    /// Number of units.
    pub units: Units,
    /// UUID of the device.
    pub device: String,
}

/// Everything that a ledger is built from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Observed nodes by name.
    pub nodes: BTreeMap<String, NodeFacts>,
    /// Claims of released pods, by pod.
    pub claims: BTreeMap<String, Claim>,
}
