//! Types that prevent mixing up units.
use std::fmt;

use serde::{Deserialize, Serialize};

/// An amount of GPU memory in MiB (2^20 bytes).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Mebibytes(pub u64);

/// A number of streaming multiprocessors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Sms(pub u32);

/// An MPS active thread percentage, 1 to 100.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct Percent(u8);

/// The error for a percentage outside 1 to 100.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0} is not a percentage from 1 to 100")]
pub struct InvalidPercent(u8);

impl Percent {
    /// The whole GPU.
    pub const FULL: Self = Self(100);

    /// Creates a percentage from 1 to 100.
    pub const fn new(value: u8) -> Result<Self, InvalidPercent> {
        if value == 0 || value > 100 { Err(InvalidPercent(value)) } else { Ok(Self(value)) }
    }

    /// Returns the percentage, 1 to 100.
    pub const fn get(self) -> u8 {
        self.0
    }
}

impl TryFrom<u8> for Percent {
    type Error = InvalidPercent;

    fn try_from(value: u8) -> Result<Self, InvalidPercent> {
        Self::new(value)
    }
}

impl From<Percent> for u8 {
    fn from(value: Percent) -> Self {
        value.0
    }
}

impl Mebibytes {
    /// Converts bytes to whole MiB, rounded down.
    pub const fn from_bytes(bytes: u64) -> Self {
        Self(bytes >> 20)
    }

    /// Converts GiB to MiB.
    pub const fn from_gib(gib: u64) -> Self {
        Self(gib * 1024)
    }

    /// Returns the difference, or 0 if `other` is larger.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl fmt::Display for Mebibytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} MiB", self.0)
    }
}

impl fmt::Display for Sms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} SMs", self.0)
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} %", self.0)
    }
}
