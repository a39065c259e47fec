//! What a ledger is made of: observed nodes, and the claims of pods.
use std::collections::{BTreeMap, BTreeSet};

use super::request::{Ask, Units};

/// A time: seconds since a moment that the caller chooses and keeps, such as the Unix epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(pub u64);

/// A pod that is on its way to a node, or on it and perhaps not served yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// What it asks for.
    pub asks: Vec<Ask>,
    /// Where it may go.
    pub place: Place,
    /// What was noted for it when it was let through, by node: who hands units out follows that.
    /// Where pods that ask for the same have swapped, what they have by that. Nothing for one that
    /// came around the gate.
    pub noted: BTreeMap<String, Vec<Reservation>>,
}

/// Where a claim's pod may go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// To one of these nodes; units are held on each until the pod is bound to one, or the time has
    /// come.
    OneOf {
        /// The nodes.
        nodes: BTreeSet<String>,
        /// From when on nothing is held any more.
        expires: Moment,
    },
    /// It is bound to this node: units are held until it is served or gone.
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

/// What was observed of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeFacts {
    /// GPU model, as pods name it; for the choice among nodes.
    pub model: String,
    /// What its devices have.
    pub devices: Vec<DeviceFacts>,
    /// Who holds what of it: of pods with a claim, what they need not be kept any more.
    pub allocations: Vec<Allocation>,
}

/// What a device has of one resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// The GPU or MIG device.
    pub device: String,
    /// The extended resource.
    pub resource: String,
    /// Units that pods can be given: those that cannot serve are not counted.
    pub capacity: u32,
    /// Of these, units that pods hold, whoever they are.
    pub used: u32,
}

/// What a pod holds.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Allocation {
    /// The pod, by the same name as its claim.
    pub pod: String,
    /// The extended resource.
    pub resource: String,
    /// The device.
    pub device: String,
    /// How many units.
    pub units: Units,
}

/// Units of one device that are kept for a pod of that size.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reservation {
    /// The extended resource.
    pub resource: String,
    /// How many units.
    pub units: Units,
    /// The device.
    pub device: String,
}

/// All that a ledger is made of.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Nodes as observed.
    pub nodes: BTreeMap<String, NodeFacts>,
    /// Pods that were let through and may still want something.
    pub claims: BTreeMap<String, Claim>,
}
