//! Decides whether a client that is killed with a kernel in flight breaks its neighbours.
//!
//! On an H200 with driver 580, these numbers of killed clients broke their neighbours: 0 of 24 with
//! kernels of 0.1 or 0.5 ms, 1 of 12 with 10 ms, 11 of 12 with 100 ms, and 12 of 12 with 1 s. The
//! simulation is deterministic, because tests need reproducible results.

/// The environment variable that selects the rule: `measured` (the default), `always` or `never`.
pub const BREAKAGE_RULE_ENV: &str = "SIM_MPS_BREAK";
/// The environment variable that sets the initial count of exits with kernels of 1 to 100 ms.
pub const BREAKAGE_SEED_ENV: &str = "SIM_MPS_SEED";

/// Of this number of exits with kernels of 1 to 100 ms, one breaks the neighbours.
const EXITS_PER_BREAKAGE: u64 = 12;

/// Which exits with a kernel in flight break the neighbours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BreakageRule {
    /// Exits with kernels of 100 ms or more always break the neighbours. Exits with kernels of less
    /// than 1 ms never do. Every twelfth of the other exits breaks the neighbours.
    Measured {
        /// Number of exits with kernels of 1 to 100 ms, plus the seed.
        counted: u64,
    },
    /// Every exit during a running kernel.
    Always,
    /// No exit.
    Never,
}

impl BreakageRule {
    /// Returns the rule from [`BREAKAGE_RULE_ENV`] and [`BREAKAGE_SEED_ENV`].
    pub fn from_environment(rule: Option<&str>, seed: Option<&str>) -> Self {
        match rule {
            Some("always") => Self::Always,
            Some("never") => Self::Never,
            _ => Self::Measured { counted: seed.and_then(|seed| seed.parse().ok()).unwrap_or(0) },
        }
    }

    /// Returns whether an exit with a kernel of `kernel_ms` milliseconds in flight breaks the
    /// neighbours.
    pub fn breaks_neighbours(&mut self, kernel_ms: f64) -> bool {
        match self {
            Self::Always => true,
            Self::Never => false,
            Self::Measured { .. } if kernel_ms >= 100.0 => true,
            Self::Measured { .. } if kernel_ms < 1.0 => false,
            Self::Measured { counted } => {
                *counted = counted.wrapping_add(1);
                counted.is_multiple_of(EXITS_PER_BREAKAGE)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count_breakages_in_twelve_exits(mut rule: BreakageRule, kernel_ms: f64) -> usize {
        (0..12).filter(|_| rule.breaks_neighbours(kernel_ms)).count()
    }

    #[test]
    fn the_measured_rule_matches_the_measurements() {
        for (kernel_ms, expected) in [(0.1, 0), (0.5, 0), (10.0, 1), (100.0, 12), (1000.0, 12)] {
            assert_eq!(
                count_breakages_in_twelve_exits(BreakageRule::from_environment(None, None), kernel_ms),
                expected,
                "{kernel_ms} ms"
            );
        }
    }

    #[test]
    fn the_seed_selects_the_killed_client_that_breaks_its_neighbours() {
        assert!(BreakageRule::from_environment(None, Some("11")).breaks_neighbours(10.0));
        assert!(!BreakageRule::from_environment(None, Some("3")).breaks_neighbours(10.0));
    }

    #[test]
    fn the_environment_selects_the_rule() {
        assert_eq!(count_breakages_in_twelve_exits(BreakageRule::from_environment(Some("always"), None), 0.1), 12);
        assert_eq!(count_breakages_in_twelve_exits(BreakageRule::from_environment(Some("never"), None), 1000.0), 0);
    }
}
