//! Amounts that quotas count, and the cost of requests.
use std::fmt;
use std::iter::Sum;

use serde::{Deserialize, Serialize};

use crate::units::Mebibytes;

/// An amount of a pool: millionths of a GPU, or MiB of GPU memory if the quotas of the pool count
/// memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Amount(pub u64);

/// One GPU.
pub const GPU: Amount = Amount(1_000_000);

impl Amount {
    /// The amount 0.
    pub const ZERO: Self = Self(0);

    /// Returns an amount of GPUs in thousandths, or `None` if it exceeds 64 bits.
    pub const fn from_milli_gpus(milli: u64) -> Option<Self> {
        match milli.checked_mul(1000) {
            Some(amount) => Some(Self(amount)),
            None => None,
        }
    }

    /// Returns the sum, or the largest amount if the sum exceeds 64 bits.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// Returns the difference, or 0 if `other` is larger.
    #[must_use]
    pub const fn minus(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl Sum for Amount {
    fn sum<I: Iterator<Item = Self>>(amounts: I) -> Self {
        amounts.fold(Self::ZERO, Self::plus)
    }
}

impl From<Amount> for i128 {
    fn from(amount: Amount) -> Self {
        Self::from(amount.0)
    }
}

/// Writes millionths of a GPU as a decimal number of GPUs, such as `2.5`.
impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, rest) = (self.0 / GPU.0, self.0 % GPU.0);
        if rest == 0 {
            return write!(f, "{whole}");
        }
        let digits = format!("{rest:06}");
        write!(f, "{whole}.{}", digits.trim_end_matches('0'))
    }
}

/// Compute and memory slices of a MIG profile, as NVML reports them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigSlice {
    /// Compute slices, of 7.
    pub compute: u32,
    /// Memory slices, of 8.
    pub memory: u32,
    /// Memory of the profile.
    pub mib: Mebibytes,
}

/// What a container requests of one resource: whole GPUs, or a part of one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Requested {
    /// Whole GPUs.
    Whole {
        /// Number of GPUs.
        count: u32,
    },
    /// Shares of a GPU that is divided into `of` shares: MPS shares or time-sliced replicas.
    Shares {
        /// Number of shares.
        count: u32,
        /// Shares of the GPU.
        of: u32,
    },
    /// Memory of a GPU.
    Memory {
        /// Requested memory.
        mib: Mebibytes,
    },
    /// A MIG instance.
    Mig {
        /// Its profile.
        slice: MigSlice,
    },
    /// Shares of a MIG instance that is divided into `of` shares.
    MigShares {
        /// Profile of the instance.
        slice: MigSlice,
        /// Number of shares.
        count: u32,
        /// Shares of the instance.
        of: u32,
    },
}

const COMPUTE_SLICES: u64 = 7;
const MEMORY_SLICES: u64 = 8;

impl MigSlice {
    fn amount(self) -> Amount {
        let part = |slices: u32, of| part_of(GPU.0, u64::from(slices), of);
        part(self.compute, COMPUTE_SLICES).max(part(self.memory, MEMORY_SLICES))
    }
}

impl Requested {
    /// Returns the cost in millionths of a GPU, rounded down, on a GPU with this memory. The cost
    /// is rounded down, so that shares that fit on a GPU never cost more than the GPU. MIG
    /// instances can: see [`charge_per_gpu`].
    pub fn gpus(self, memory: Mebibytes) -> Amount {
        match self {
            Self::Whole { count } => Amount(GPU.0.saturating_mul(count.into())),
            Self::Shares { count, of } => part_of(GPU.0, count.into(), of.into()),
            Self::Memory { mib } => part_of(GPU.0, mib.0, memory.0),
            Self::Mig { slice } => slice.amount(),
            Self::MigShares { slice, count, of } => part_of(slice.amount().0, count.into(), of.into()),
        }
    }

    /// Returns the cost in MiB, rounded down, on a GPU with this memory.
    pub fn memory(self, memory: Mebibytes) -> Amount {
        match self {
            Self::Whole { count } => Amount(memory.0.saturating_mul(count.into())),
            Self::Shares { count, of } => part_of(memory.0, count.into(), of.into()),
            Self::Memory { mib } => Amount(mib.0),
            Self::Mig { slice } => Amount(slice.mib.0),
            Self::MigShares { slice, count, of } => part_of(slice.mib.0, count.into(), of.into()),
        }
    }
}

/// Returns `whole × count / of`, rounded down. If the number of parts is unknown (`of` is 0), the
/// result is the whole.
fn part_of(whole: u64, count: u64, of: u64) -> Amount {
    let part = u128::from(whole) * u128::from(count) / u128::from(of.max(1));
    Amount(if of == 0 { whole } else { u64::try_from(part).unwrap_or(u64::MAX) })
}

/// Returns the charge of each pod of one quota for its requests on one GPU. The pods are in order,
/// the oldest first. The sum of the charges is at most one GPU, so the youngest pods may be charged
/// less than their costs. For example, MIG instances `4g` and `3g` together cost more than the GPU
/// that they share.
pub fn charge_per_gpu(costs: &[Amount], gpu: Amount) -> Vec<Amount> {
    let mut left = gpu;
    let pay = |&cost: &Amount| {
        let paid = cost.min(left);
        left = left.minus(paid);
        paid
    };
    costs.iter().map(pay).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const A100: Mebibytes = Mebibytes(81_920);

    fn mig(compute: u32, memory: u32) -> MigSlice {
        MigSlice { compute, memory, mib: Mebibytes(u64::from(memory) * 10 * 1024) }
    }

    #[test]
    fn requests_cost_parts_of_a_gpu_rounded_down() {
        for (requested, gpus, memory) in [
            (Requested::Whole { count: 2 }, 2_000_000, 163_840),
            (Requested::Shares { count: 3, of: 10 }, 300_000, 24_576),
            (Requested::Shares { count: 1, of: 3 }, 333_333, 27_306),
            (Requested::Mig { slice: mig(1, 1) }, 142_857, 10_240),
            (Requested::Mig { slice: mig(1, 2) }, 250_000, 20_480),
            (Requested::Mig { slice: mig(3, 4) }, 500_000, 40_960),
            (Requested::Mig { slice: mig(4, 4) }, 571_428, 40_960),
            (Requested::MigShares { slice: mig(3, 4), count: 1, of: 4 }, 125_000, 10_240),
        ] {
            assert_eq!((requested.gpus(A100), requested.memory(A100)), (Amount(gpus), Amount(memory)), "{requested:?}");
        }
        let ten = Requested::Memory { mib: Mebibytes::from_gib(10) };
        assert_eq!(ten.gpus(Mebibytes(81_559)), Amount(125_553));
        assert_eq!(ten.gpus(Mebibytes(0)), GPU, "without known memory, the cost is the whole GPU");
        let most = Requested::Shares { count: u32::MAX, of: 1 };
        assert_eq!(most.memory(Mebibytes(u64::MAX)), Amount(u64::MAX));
    }

    #[test]
    fn charges_on_one_gpu_add_up_to_at_most_the_gpu_and_the_youngest_pod_is_charged_less() {
        let costs = [mig(4, 4), mig(3, 4)].map(MigSlice::amount);
        assert_eq!(costs.into_iter().sum::<Amount>(), Amount(1_071_428));
        assert_eq!(charge_per_gpu(&costs, GPU), [Amount(571_428), Amount(428_572)]);
        assert_eq!(charge_per_gpu(&[GPU, Amount(1)], GPU), [GPU, Amount::ZERO]);
    }

    #[test]
    fn amounts_are_written_as_gpus() {
        assert_eq!([0, 1_000_000, 2_500_000, 1].map(|one| Amount(one).to_string()), ["0", "1", "2.5", "0.000001"]);
        assert_eq!(Amount(u64::MAX).plus(GPU), Amount(u64::MAX));
        assert_eq!(Amount::from_milli_gpus(u64::MAX), None);
    }
}
