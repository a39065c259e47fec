//! A reproducible random number generator.

/// The `SplitMix64` generator: small, and the same on every platform.
#[derive(Debug, Clone)]
pub(super) struct Rng(pub(super) u64);

impl Rng {
    /// Returns the next 64 bits.
    pub(super) fn next_bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number less than `bound`.
    pub(super) fn next_below(&mut self, bound: usize) -> usize {
        usize::try_from((u128::from(self.next_bits()) * bound as u128) >> 64).unwrap_or(0)
    }

    /// Returns a number from 0 to 1.
    pub(super) fn next_fraction(&mut self) -> f64 {
        f64::from(u32::try_from(self.next_bits() >> 32).unwrap_or(0)) / f64::from(u32::MAX)
    }

    /// Shuffles items.
    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.next_below(last + 1));
        }
    }
}
