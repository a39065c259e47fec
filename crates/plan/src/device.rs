//! Defines the modes of GPUs, the kinds of partitions, and the names of their resources.
use std::fmt;

use serde::{Deserialize, Serialize};

/// Resource of whole GPUs.
pub const WHOLE_GPU_RESOURCE: &str = "nvidia.com/gpu";
/// Resource of MPS shares, unless a GPU sets `resourceName`.
pub const SHARES_RESOURCE: &str = "nvidia.com/gpu-mps";
/// Resource of time-sliced replicas, unless a GPU sets `resourceName`.
pub const REPLICAS_RESOURCE: &str = "nvidia.com/gpu-timeslice";
/// Prefix of the resources of MIG instances.
pub const MIG_PREFIX: &str = "nvidia.com/mig-";
/// Suffix of the resources of shares of MIG instances, as in NVIDIA's device plugin.
pub const SHARED_SUFFIX: &str = ".shared";

/// Sharing mode that the policy allows for a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Mode {
    /// The GPU is not shared.
    #[default]
    Whole,
    /// Shares and sized slices under MPS.
    Mps,
    /// Time-sliced replicas.
    TimeSlicing,
    /// MIG instances.
    Mig,
    /// Any mode. The requests of pending pods determine the mode.
    Auto,
    /// A mode that this version does not support. The GPU is not repartitioned.
    #[serde(other)]
    Unknown,
}

/// Kind of partition. A GPU has one kind of partition at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Family {
    /// The GPU is undivided.
    Whole,
    /// MPS shares and sized slices.
    Mps,
    /// Time-sliced replicas.
    TimeSlicing,
    /// MIG instances.
    Mig,
}

/// A set of [`Family`]s.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Families(u8);

impl Families {
    /// The empty set.
    pub const NONE: Self = Self(0);

    /// Returns the set with one more family.
    #[must_use]
    pub const fn with(self, family: Family) -> Self {
        Self(self.0 | 1 << family as u8)
    }

    /// Returns whether the set has the family.
    pub const fn has(self, family: Family) -> bool {
        self.0 & 1 << family as u8 != 0
    }

    /// Returns whether the set contains no family other than this one.
    pub const fn is_subset_of(self, family: Family) -> bool {
        self.0 & !(1 << family as u8) == 0
    }
}

impl Mode {
    /// Returns the families that the mode allows. In every known mode, an unused GPU can serve as a
    /// whole GPU.
    pub const fn families(self) -> Families {
        let whole = Families::NONE.with(Family::Whole);
        match self {
            Self::Whole => whole,
            Self::Mps => whole.with(Family::Mps),
            Self::TimeSlicing => whole.with(Family::TimeSlicing),
            Self::Mig => whole.with(Family::Mig),
            Self::Auto => whole.with(Family::Mps).with(Family::TimeSlicing).with(Family::Mig),
            Self::Unknown => Families::NONE,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Whole => "whole",
            Self::Mps => "MPS",
            Self::TimeSlicing => "time-slicing",
            Self::Mig => "MIG",
        })
    }
}

/// Returns the resource of a MIG profile. As in NVIDIA's device plugin, `1g.10gb+me` becomes
/// `nvidia.com/mig-1g.10gb.me`.
pub fn mig_resource(profile: &str) -> String {
    format!("{MIG_PREFIX}{}", profile.replace('+', "."))
}

/// Returns the number G in `nvidia.com/gpu-<G>gb`, the resource of slices of G GiB. G is from 1 to
/// 2^20. Returns `None` for any other name.
pub fn sized_slice_gib(resource: &str) -> Option<u64> {
    let digits = resource.strip_prefix("nvidia.com/gpu-")?.strip_suffix("gb")?;
    // Refuse leading zeros: `010` would be a second name of the same slice.
    if digits.starts_with('0') || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    digits.parse().ok().filter(|&gib: &u64| gib <= 1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_whole_gib_without_leading_zeros() {
        assert_eq!(sized_slice_gib("nvidia.com/gpu-10gb"), Some(10));
        for resource in [
            "nvidia.com/gpu-0gb",
            "nvidia.com/gpu-010gb",
            "nvidia.com/gpu-gb",
            "nvidia.com/gpu-+1gb",
            "nvidia.com/gpu-mps",
            "nvidia.com/gpu-99999999999999999999gb",
        ] {
            assert_eq!(sized_slice_gib(resource), None, "{resource}");
        }
    }

    #[test]
    fn profiles_with_a_suffix_become_valid_resource_names() {
        assert_eq!(mig_resource("1g.10gb+me"), "nvidia.com/mig-1g.10gb.me");
        assert_eq!(mig_resource("1g.24gb-me"), "nvidia.com/mig-1g.24gb-me");
    }

    #[test]
    fn families_can_be_added_and_tested() {
        let some = Families::NONE.with(Family::Mps).with(Family::Mig);
        assert!(some.has(Family::Mig) && !some.has(Family::Whole) && !some.is_subset_of(Family::Mps));
        assert!(Families::NONE.is_subset_of(Family::Mps));
    }
}
