//! Places for a pod, and why they could not be reserved.
use super::facts::Reservation;
use super::request::Ask;

/// A place for all asks of a pod on one node: one device for each. Only [`Ledger::fit`] makes one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fit {
    pub(super) node: String,
    pub(super) takes: Vec<Reservation>,
}

impl Fit {
    /// The node.
    pub fn node(&self) -> &str {
        &self.node
    }

    /// What is taken of which device: as many as there are asks.
    pub fn takes(&self) -> &[Reservation] {
        &self.takes
    }
}

/// Places for a pod, the best first; at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fits {
    pub(super) asks: Vec<Ask>,
    pub(super) places: Vec<Fit>,
    /// Nominations of this priority or a higher one were heeded.
    pub(super) priority: i32,
}

impl Fits {
    /// One for each node.
    pub fn iter(&self) -> impl Iterator<Item = &Fit> {
        self.places.iter()
    }
}

/// Why a fit was not reserved. Nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The pod has a claim already.
    #[error("the pod has a claim already: it is to be released first")]
    Claimed,
    /// What the fit takes is not free any more.
    #[error("what the fit takes is not free any more")]
    Stale,
}
