//! Inputs of a ledger: observed nodes, and the claims of pods.
use std::collections::{BTreeMap, BTreeSet};

use super::request::{DeviceRequest, Units};

/// A time in seconds since a fixed moment that the caller chooses, such as the Unix epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(pub u64);

/// The claim of a released or bound pod. The kubelet may not have allocated all units of the claim
/// yet.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Claim {
    /// Requests of the pod.
    pub device_requests: Vec<DeviceRequest>,
    /// Nodes on which the pod may run.
    pub place: Place,
    /// The reservations in the pod's annotation, by node. Agents follow these reservations when
    /// they allocate units. After two pods swapped units, each pod has the other pod's reservations
    /// here. The list is empty for a pod that bypassed the gate.
    pub annotated: BTreeMap<String, Vec<Reservation>>,
}

/// Nodes on which a claim's pod may run.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Place {
    /// The pod may run on any of these nodes. Units are reserved on each node until the pod is
    /// bound to one of the nodes, or the claim expires.
    OneOf {
        /// Names of the nodes.
        nodes: BTreeSet<String>,
        /// Time at which the claim expires.
        expires: Moment,
    },
    /// The pod is bound to this node. Units are reserved until the kubelet allocates them or the
    /// pod is deleted.
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
    /// GPU model, as node selectors of pods name it. The chooser prefers nodes by model.
    pub model: String,
    /// Devices of the node.
    pub devices: Vec<DeviceFacts>,
    /// Allocations on the node. A claim needs no reservation for units that the kubelet has
    /// allocated to its pod.
    pub allocations: Vec<Allocation>,
}

/// Observed units of one resource on one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// UUID of the GPU or MIG device.
    pub device: String,
    /// Name of the extended resource.
    pub resource: String,
    /// Units that the kubelet can allocate. Unhealthy units do not count.
    pub capacity: u32,
    /// Units that are allocated, to any pod.
    pub used: u32,
}

/// Units of one device that the kubelet has allocated to a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Allocation {
    /// Name of the pod, as in its claim.
    pub pod: String,
    /// Name of the extended resource.
    pub resource: String,
    /// UUID of the device.
    pub device: String,
    /// Number of units.
    pub units: Units,
}

/// Reserved units of one device, for a pod that requests this number of units.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reservation {
    /// Name of the extended resource.
    pub resource: String,
    /// Number of units.
    pub units: Units,
    /// UUID of the device.
    pub device: String,
}

/// All inputs of a ledger.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Observed nodes by name.
    pub nodes: BTreeMap<String, NodeFacts>,
    /// Claims of released pods, by name of the pod.
    pub claims: BTreeMap<String, Claim>,
}
