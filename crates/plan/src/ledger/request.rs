//! Types for the requests of pods.
use std::fmt;
use std::num::NonZeroU32;

/// A number of units of one resource, at least one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Units(NonZeroU32);

impl Units {
    /// Creates a number of units. Returns `None` for 0.
    pub const fn new(units: u32) -> Option<Self> {
        match NonZeroU32::new(units) {
            Some(units) => Some(Self(units)),
            None => None,
        }
    }

    /// Returns the number.
    pub const fn get(self) -> u32 {
        self.0.get()
    }
}

impl fmt::Display for Units {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A request for units of one device. A pod that requests units of several devices has several
/// requests.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceRequest {
    /// Name of the extended resource.
    pub resource: String,
    /// Number of units.
    pub units: Units,
}
