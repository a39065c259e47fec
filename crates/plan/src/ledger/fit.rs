//! Placements for a pod, and why they cannot be reserved.
use super::facts::Reservation;
use super::request::DeviceRequest;

/// A placement of all requests of a pod on one node, with one device for each request. Only
/// [`Ledger::fit`](super::Ledger::fit) and its variants create a `Fit`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fit {
    pub(super) node: String,
    pub(super) takes: Vec<Reservation>,
}

impl Fit {
    /// Returns the name of the node.
    pub fn node(&self) -> &str {
        &self.node
    }

    /// Returns the units of each device that the pod would use, one entry for each request.
    pub fn reservations(&self) -> &[Reservation] {
        &self.takes
    }
}

/// Placements for a pod, best first. The list is never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fits {
    pub(super) device_requests: Vec<DeviceRequest>,
    pub(super) places: Vec<Fit>,
    /// Priority of the pod for which the placements were found. The lowest priority if no pod was
    /// named.
    pub(super) priority: i32,
}

impl Fits {
    /// Returns the placements, one for each node.
    pub fn iter(&self) -> impl Iterator<Item = &Fit> {
        self.places.iter()
    }
}

/// Why a fit was not reserved, or units were not nominated. In this case, the ledger does not
/// change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ReserveError {
    /// The pod already has a claim.
    #[error("the pod already has a claim: remove that claim first")]
    Claimed,
    /// Units of the fit are no longer free.
    #[error("units of the fit are no longer free")]
    Stale,
}
