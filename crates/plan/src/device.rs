//! Names of what a GPU can be cut into, and what they mean.
use std::fmt;

use serde::{Deserialize, Serialize};

/// Whole GPUs.
pub const WHOLE: &str = "nvidia.com/gpu";
/// Shares of one GPU under MPS, unless a GPU's `resourceName` says otherwise.
pub const SHARES: &str = "nvidia.com/gpu-mps";
/// Time-sliced replicas, unless a GPU's `resourceName` says otherwise.
pub const REPLICAS: &str = "nvidia.com/gpu-timeslice";
/// Prefix of MIG instances.
pub const MIG_PREFIX: &str = "nvidia.com/mig-";
/// Suffix of shares of a MIG instance, as NVIDIA's plugin names them.
pub const SHARED_SUFFIX: &str = ".shared";

/// How a GPU may be shared: what the policy allows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Mode {
    /// Not at all.
    #[default]
    Whole,
    /// Shares and sized slices under MPS.
    Mps,
    /// Replicas in turns.
    TimeSlicing,
    /// MIG instances.
    Mig,
    /// Whatever the waiting pods ask for.
    Auto,
    /// One that this version does not know: the GPU stays as it is.
    #[serde(other)]
    Unknown,
}

/// One way of cutting a GPU. A GPU is cut in one way at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Family {
    /// Not cut.
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
    /// None of them.
    pub const NONE: Self = Self(0);

    /// With one more.
    #[must_use]
    pub const fn with(self, family: Family) -> Self {
        Self(self.0 | 1 << family as u8)
    }

    /// Whether it is one of them.
    pub const fn has(self, family: Family) -> bool {
        self.0 & 1 << family as u8 != 0
    }

    /// None but perhaps this one.
    pub const fn at_most(self, family: Family) -> bool {
        self.0 & !(1 << family as u8) == 0
    }
}

impl Mode {
    /// The ways of cutting that it allows. A GPU that nobody uses can always be given whole.
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

/// The resource of a MIG profile: `1g.10gb+me` is `nvidia.com/mig-1g.10gb.me`, as NVIDIA's plugin
/// names it.
pub fn mig_resource(profile: &str) -> String {
    format!("{MIG_PREFIX}{}", profile.replace('+', "."))
}

/// The G of `nvidia.com/gpu-<G>gb`, a slice of G GiB; at least 1.
pub fn sized(resource: &str) -> Option<u64> {
    let digits = resource.strip_prefix("nvidia.com/gpu-")?.strip_suffix("gb")?;
    // `010` would be a second name of the same slice.
    if digits.starts_with('0') || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    digits.parse().ok().filter(|&gib: &u64| gib <= 1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_whole_gib_without_a_second_spelling() {
        assert_eq!(sized("nvidia.com/gpu-10gb"), Some(10));
        for resource in [
            "nvidia.com/gpu-0gb",
            "nvidia.com/gpu-010gb",
            "nvidia.com/gpu-gb",
            "nvidia.com/gpu-+1gb",
            "nvidia.com/gpu-mps",
            "nvidia.com/gpu-99999999999999999999gb",
        ] {
            assert_eq!(sized(resource), None, "{resource}");
        }
    }

    #[test]
    fn extended_profiles_are_named_as_resources_allow() {
        assert_eq!(mig_resource("1g.10gb+me"), "nvidia.com/mig-1g.10gb.me");
        assert_eq!(mig_resource("1g.24gb-me"), "nvidia.com/mig-1g.24gb-me");
    }

    #[test]
    fn families_are_a_set() {
        let some = Families::NONE.with(Family::Mps).with(Family::Mig);
        assert!(some.has(Family::Mig) && !some.has(Family::Whole) && !some.at_most(Family::Mps));
        assert!(Families::NONE.at_most(Family::Mps));
    }
}
