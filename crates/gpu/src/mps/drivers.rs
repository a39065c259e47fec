//! Records the branches of NVIDIA's driver whose MPS was measured. Pure.

/// The driver branches whose MPS was measured: the handshake, the time at which limits apply, and
/// the effects of faults. See `docs/how-to/check-driver.md`.
pub const MEASURED_BRANCHES: &[u32] = &[580];

/// The basis of what Cleave assumes about the MPS of a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriverEvidence {
    /// The branch was measured on real GPUs.
    Measured,
    /// The branch was not measured. Cleave checks the handshake of the branch, and assumes that the
    /// branch otherwise behaves like a measured branch.
    Assumed,
}

impl DriverEvidence {
    /// Returns the evidence for a driver with this version, such as `580.159.04`.
    pub fn of_version(version: &str) -> Self {
        let branch = version.split('.').next().and_then(|branch| branch.parse().ok());
        let measured = branch.is_some_and(|branch: u32| MEASURED_BRANCHES.contains(&branch));
        if measured { Self::Measured } else { Self::Assumed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_versions_of_measured_branches_are_measured() {
        for version in ["580", "580.159.04", "580.65.06"] {
            assert_eq!(DriverEvidence::of_version(version), DriverEvidence::Measured, "{version}");
        }
        for version in ["", "570.124.06", "5800.1", "58", "580x", "590.44", "nonsense"] {
            assert_eq!(DriverEvidence::of_version(version), DriverEvidence::Assumed, "{version}");
        }
    }
}
