//! Whether a client that is killed with a kernel in flight breaks its neighbours.
//!
//! Measured: kernels of 0.1 and 0.5 ms 0 of 24 times, 10 ms 1 of 12, 100 ms 11 of 12, 1 s 12 of 12.
//! Chance is no help to a test, so the same deaths always have the same outcome here.

/// Chooses the rule: `measured` (the default), `always` or `never`.
pub const RULE_ENV: &str = "SIM_MPS_BREAK";
/// Shifts the count of deaths in between by so many.
pub const SEED_ENV: &str = "SIM_MPS_SEED";

/// Of how many deaths with kernels of 1 to 100 ms one breaks.
const ONE_OF: u64 = 12;

/// Which deaths break.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// Kernels of 100 ms and more always, under 1 ms never, in between every twelfth.
    Measured {
        /// Deaths in between so far; starts with the seed.
        counted: u64,
    },
    /// Every death with a kernel in flight.
    Always,
    /// None.
    Never,
}

impl Rule {
    /// The rule of [`RULE_ENV`] and [`SEED_ENV`].
    pub fn from_environment(rule: Option<&str>, seed: Option<&str>) -> Self {
        match rule {
            Some("always") => Self::Always,
            Some("never") => Self::Never,
            _ => Self::Measured { counted: seed.and_then(|seed| seed.parse().ok()).unwrap_or(0) },
        }
    }

    /// Whether this death, with a kernel of so many milliseconds in flight, breaks.
    pub fn breaks(&mut self, kernel_ms: f64) -> bool {
        match self {
            Self::Always => true,
            Self::Never => false,
            Self::Measured { .. } if kernel_ms >= 100.0 => true,
            Self::Measured { .. } if kernel_ms < 1.0 => false,
            Self::Measured { counted } => {
                *counted = counted.wrapping_add(1);
                counted.is_multiple_of(ONE_OF)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_twelve(mut rule: Rule, kernel_ms: f64) -> usize {
        (0..12).filter(|_| rule.breaks(kernel_ms)).count()
    }

    #[test]
    fn odds_are_those_measured() {
        for (kernel_ms, expected) in [(0.1, 0), (0.5, 0), (10.0, 1), (100.0, 12), (1000.0, 12)] {
            assert_eq!(of_twelve(Rule::from_environment(None, None), kernel_ms), expected, "{kernel_ms} ms");
        }
    }

    #[test]
    fn a_seed_chooses_which_death_breaks() {
        assert!(Rule::from_environment(None, Some("11")).breaks(10.0));
        assert!(!Rule::from_environment(None, Some("3")).breaks(10.0));
    }

    #[test]
    fn the_rule_can_be_chosen() {
        assert_eq!(of_twelve(Rule::from_environment(Some("always"), None), 0.1), 12);
        assert_eq!(of_twelve(Rule::from_environment(Some("never"), None), 1000.0), 0);
    }
}
