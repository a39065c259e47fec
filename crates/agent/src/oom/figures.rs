//! A container's memory in figures, and when it is about to be killed for it. Pure.
use std::fmt;

/// An amount of the machine's memory in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Bytes(pub u64);

impl Bytes {
    /// So many MiB.
    pub const fn mib(mib: u64) -> Self {
        Self(mib << 20)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} MiB", self.0 >> 20)
    }
}

/// Which part of its limit a container may not use without being slowed down.
const PART: u64 = 20;
/// The least of that: some milliseconds for a program that allocates as fast as it can.
const LEAST: Bytes = Bytes::mib(4);
/// The most of that.
const MOST: Bytes = Bytes::mib(1024);
/// The kernel rounds to whole pages, of this size at most; what is written is to be read again.
const PAGE: u64 = 64 << 10;

/// The `memory.high` for a `memory.max`; none where that leaves nothing.
pub fn high_below(max: Bytes) -> Option<Bytes> {
    let margin = (max.0 / PART).clamp(LEAST.0, MOST.0);
    let high = max.0.checked_sub(margin)?;
    (high >= LEAST.0).then_some(Bytes(high - high % PAGE))
}

/// What a container uses, and may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Figures {
    /// `memory.max`; none is no limit.
    pub max: Option<Bytes>,
    /// `memory.high`; none is `max`.
    pub high: Option<Bytes>,
    /// `memory.current`.
    pub current: Bytes,
    /// What of that the kernel can take back.
    pub reclaimable: Bytes,
}

impl Figures {
    /// What is used and cannot be taken back.
    pub fn held(&self) -> Bytes {
        Bytes(self.current.0.saturating_sub(self.reclaimable.0))
    }
}

/// What a limit's file says: `max` is none.
///
/// # Errors
/// The text, where it is neither `max` nor a number.
pub fn limit(text: &str) -> Result<Option<Bytes>, String> {
    match text.trim() {
        "max" => Ok(None),
        number => number.parse().map(|bytes| Some(Bytes(bytes))).map_err(|_| text.chars().take(40).collect()),
    }
}

/// What the kernel can take back, by the text of `memory.stat`, with so much room left in swap: pages of files, caches of names, and of anonymous and
/// shared memory what swap has room for.
pub fn reclaimable(stat: &str, swap: Bytes) -> Bytes {
    let of = |name: &str| {
        let number = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.parse::<u64>().ok();
        stat.lines().find_map(number).unwrap_or_default()
    };
    let sum = |names: &[&str]| names.iter().fold(0, |sum: u64, name| sum.saturating_add(of(name)));
    // Shared memory is on the lists of anonymous pages, and in neither of the first two.
    let dropped = sum(&["inactive_file", "active_file", "slab_reclaimable"]);
    Bytes(dropped.saturating_add(sum(&["anon", "shmem"]).min(swap.0)))
}

/// What is free in swap, by the text of `/proc/meminfo`.
pub fn swap_free(meminfo: &str) -> Bytes {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("SwapFree:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    Bytes(kib.unwrap_or_default().saturating_mul(1024))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_margin_is_a_twentieth_and_neither_too_small_nor_too_large() {
        for (max, high) in [
            (Bytes::mib(1000), Some(Bytes::mib(950))),
            (Bytes::mib(64), Some(Bytes::mib(60))),
            (Bytes::mib(8), Some(Bytes::mib(4))),
            (Bytes::mib(7), None),
            (Bytes::mib(4), None),
            (Bytes(0), None),
            (Bytes::mib(20 << 10), Some(Bytes::mib(19 << 10))),
            (Bytes::mib(512 << 10), Some(Bytes::mib(511 << 10))),
            // To the kernel's rounding it is a number of whole pages.
            (Bytes::mib(1024), Some(Bytes(1_020_002_304))),
        ] {
            assert_eq!(high_below(max), high, "{max}");
            assert!(high.is_none_or(|high| high.0.is_multiple_of(PAGE)), "{max}");
        }
    }

    #[test]
    fn what_a_limit_says() {
        assert_eq!(limit("max\n"), Ok(None));
        assert_eq!(limit("1073741824\n"), Ok(Some(Bytes::mib(1024))));
        for text in ["", "-1", "1G", "max max"] {
            assert_eq!(limit(text), Err(text.to_owned()));
        }
    }

    const STAT: &str = "anon 900\nfile 400\nkernel 50\nshmem 100\nfile_mapped 7\ninactive_anon 1000\nactive_anon 0\ninactive_file 200\n\
                        active_file 80\nunevictable 20\nslab_reclaimable 30\nslab_unreclaimable 20\nworkingset_refault_file 1\n";

    #[test]
    fn page_cache_is_taken_back_and_anonymous_and_shared_memory_only_by_swap() {
        for (swap, reclaimed) in [(0, 310), (100, 410), (5000, 1310)] {
            assert_eq!(reclaimable(STAT, Bytes(swap)), Bytes(reclaimed), "{swap}");
        }
        assert_eq!(reclaimable("", Bytes(1)), Bytes(0));
        let figures = Figures { current: Bytes(1350), reclaimable: Bytes(310), ..Figures::default() };
        assert_eq!(figures.held(), Bytes(1040));
        assert_eq!(
            Figures { reclaimable: Bytes(2000), ..figures }.held(),
            Bytes(0),
            "files are not read at one moment"
        );
    }

    #[test]
    fn swap_is_what_the_machine_has_free() {
        assert_eq!(swap_free("MemTotal:  10 kB\nSwapTotal:    8 kB\nSwapFree:         4 kB\n"), Bytes(4096));
        for text in ["", "SwapFree:", "SwapFree: x kB", "SwapFree: 4"] {
            assert_eq!(swap_free(text), Bytes(0), "{text}");
        }
    }

    proptest! {
        #[test]
        fn whatever_is_there_is_read(text: String, swap: u64) {
            let _ = (limit(&text), reclaimable(&text, Bytes(swap)), swap_free(&text));
        }

        #[test]
        fn there_is_room_above_and_below(max: u64) {
            if let Some(high) = high_below(Bytes(max)) {
                prop_assert!(max - high.0 >= LEAST.0 && max - high.0 <= MOST.0 + PAGE && high.0 >= LEAST.0 - PAGE);
            }
        }
    }
}
