//! What pods request of devices.
use std::fmt;
use std::num::NonZeroU32;

/// Units of one resource, at least one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Units(NonZeroU32);

impl Units {
    /// As many, unless that is none.
    pub const fn new(units: u32) -> Option<Self> {
        match NonZeroU32::new(units) {
            Some(units) => Some(Self(units)),
            None => None,
        }
    }

    /// How many.
    pub const fn get(self) -> u32 {
        self.0.get()
    }
}

impl fmt::Display for Units {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Units that must be of one device. A pod that wants several devices asks several times.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ask {
    /// The extended resource.
    pub resource: String,
    /// How many.
    pub units: Units,
}
