//! Computes the limits of k of n MPS shares of a GPU: thread percentage, SMs and memory.
//!
//! The results must match the figures measured on an H200 with driver 580
//! (`docs/explanation/measurements-gpu.md`).
use serde::{Deserialize, Serialize};

use crate::units::{Mebibytes, Percent, Sms};

/// Maximum number of client contexts of one MPS server. The server refuses the 49th context with
/// CUDA error 808.
pub const MAX_CLIENTS: u32 = 48;

/// Memory reserved for the MPS server's own context. On an H200 with driver 580, the context uses
/// 66 MiB. The remaining memory is a margin.
pub const SERVER_RESERVE: Mebibytes = Mebibytes(128);

/// Minimum number of SMs to which MPS limits a client.
const MIN_CLIENT_SMS: u32 = 8;

/// How strictly the SMs of a share are limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Threads {
    /// k of n shares may use 100·k/n % of the SMs.
    Strict,
    /// k of n shares may use up to twice their part, at most the whole GPU.
    Burst,
    /// No SM limit.
    Uncapped,
}

/// Limits of one allocation of shares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Active thread percentage. `None` means unlimited.
    pub threads: Option<Percent>,
    /// Memory limit. MPS enforces the limit for each process, and the agent checks the sum of the
    /// allocation's processes. `None` means unlimited.
    pub memory: Option<Mebibytes>,
}

/// Returns the memory of a GPU that can be divided into shares.
pub const fn shareable_memory(total: Mebibytes) -> Mebibytes {
    total.saturating_sub(SERVER_RESERVE)
}

/// Returns the thread percentage of `shares` of `units`, rounded down, at least 1 %. Returns `None`
/// if the policy sets no limit.
///
/// If `shares` is larger than `units`, or `units` is 0, the result is the percentage of the whole
/// GPU.
pub fn thread_percentage(shares: u32, units: u32, policy: Threads) -> Option<Percent> {
    let parts = match policy {
        Threads::Strict => 100,
        Threads::Burst => 200,
        Threads::Uncapped => return None,
    };
    let percent = (u64::from(shares) * parts).checked_div(u64::from(units)).unwrap_or(100).clamp(1, 100);
    u8::try_from(percent).ok().and_then(|percent| Percent::new(percent).ok())
}

/// Returns the memory of `shares` of `units` of a GPU with `total` memory, in whole MiB, rounded
/// down.
pub fn memory_limit(shares: u32, units: u32, total: Mebibytes) -> Mebibytes {
    let whole = shareable_memory(total);
    let part = (u128::from(whole.0) * u128::from(shares)).checked_div(u128::from(units)).unwrap_or(u128::from(whole.0));
    Mebibytes(u64::try_from(part).unwrap_or(u64::MAX).min(whole.0))
}

/// Returns the memory that a sized slice of a GPU with `total` memory can use, in whole MiB,
/// rounded down.
///
/// Resource names state nominal sizes, so two slices of 20 GiB fill a GPU of 40 GiB. The memory of
/// the MPS server is deducted from each slice in proportion. A slice larger than the GPU counts as
/// the whole GPU.
pub fn sized_slice_memory(size: Mebibytes, total: Mebibytes) -> Mebibytes {
    let whole = shareable_memory(total);
    let part = (u128::from(whole.0) * u128::from(size.0)).checked_div(u128::from(total.0)).unwrap_or(0);
    Mebibytes(u64::try_from(part).unwrap_or(u64::MAX).min(whole.0))
}

/// Returns the number of SMs that a client can use if it is limited to `threads` of a GPU with
/// `total` SMs.
///
/// MPS rounds the number down to an even number, but not below 8.
pub fn usable_sms(threads: Option<Percent>, total: Sms) -> Sms {
    let Some(percent) = threads.filter(|&percent| percent != Percent::FULL) else { return total };
    let part = u64::from(total.0) * u64::from(percent.get()) / 100;
    let even = u32::try_from(part).unwrap_or(u32::MAX) & !1;
    Sms(even.max(MIN_CLIENT_SMS).min(total.0))
}

/// Returns the part of a client's memory limit that its CUDA context uses, if the client can use
/// `sms` SMs. Returns `None` if no measurement covers the GPU and driver.
///
/// GPUs of compute capability 9.0 with driver 580 need 27.1 MiB plus 3.69 MiB for each SM. The
/// figures are accurate to 1 MiB for 12 to 132 SMs (H100 and H200,
/// `docs/explanation/measurements-gpu.md`). A larger stack and the code of kernels need more
/// memory.
pub fn context_memory(capability: (u32, u32), driver: &str, sms: Sms) -> Option<Mebibytes> {
    let measured = capability == (9, 0) && driver.split('.').next() == Some("580");
    measured.then(|| Mebibytes((2_710 + 369 * u64::from(sms.0) + 50) / 100))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each entry has the SMs, and the MiB of the memory limit that could not be allocated,
    /// measured on an H100 and an H200.
    const MEASURED_CONTEXT_MIB_BY_SMS: [(u32, u64); 10] = [
        (12, 72),
        (26, 123),
        (38, 167),
        (52, 218),
        (66, 271),
        (78, 315),
        (92, 367),
        (104, 411),
        (118, 462),
        (132, 514),
    ];

    /// Each entry has a thread percentage and its SMs, measured on an H200 with 132 SMs.
    const MEASURED_SMS: [(u8, u32); 14] = [
        (1, 8),
        (2, 8),
        (5, 8),
        (10, 12),
        (12, 14),
        (14, 18),
        (20, 26),
        (25, 32),
        (33, 42),
        (50, 66),
        (66, 86),
        (75, 98),
        (90, 118),
        (100, 132),
    ];

    #[test]
    fn usable_sms_match_measurements() {
        for (percent, expected) in MEASURED_SMS {
            assert_eq!(usable_sms(Percent::new(percent).ok(), Sms(132)), Sms(expected), "{percent} %");
        }
        assert_eq!(usable_sms(None, Sms(132)), Sms(132));
    }

    #[test]
    fn context_memory_matches_measurements_and_is_unknown_for_other_gpus_and_drivers() {
        for (sms, measured) in MEASURED_CONTEXT_MIB_BY_SMS {
            let computed = context_memory((9, 0), "580.159.04", Sms(sms)).unwrap();
            assert!(computed.0.abs_diff(measured) <= 1, "{sms} SMs: {measured} MiB measured, {computed:?} computed");
        }
        assert_eq!(context_memory((8, 0), "580.159.04", Sms(108)), None);
        assert_eq!(context_memory((9, 0), "5800.1", Sms(108)), None);
        assert_eq!(context_memory((9, 0), "", Sms(108)), None);
    }

    #[test]
    fn burst_doubles_the_percentage_up_to_the_whole_gpu() {
        assert_eq!(thread_percentage(1, 10, Threads::Burst), Percent::new(20).ok());
        assert_eq!(thread_percentage(7, 10, Threads::Burst), Some(Percent::FULL));
        assert_eq!(thread_percentage(1, 7, Threads::Strict), Percent::new(14).ok());
        assert_eq!(thread_percentage(1, 7, Threads::Uncapped), None);
    }

    #[test]
    fn all_shares_together_never_exceed_the_shareable_memory() {
        let total = Mebibytes(143_155);
        for units in 1..=MAX_CLIENTS {
            assert!(memory_limit(1, units, total).0 * u64::from(units) <= shareable_memory(total).0);
            assert_eq!(memory_limit(units, units, total), shareable_memory(total));
        }
    }

    #[test]
    fn slices_that_fill_a_gpu_leave_memory_for_the_mps_server() {
        let total = Mebibytes::from_gib(40);
        let slice = sized_slice_memory(Mebibytes::from_gib(20), total);
        assert_eq!(slice, Mebibytes(20_416));
        assert!(slice.0 * 2 + SERVER_RESERVE.0 <= total.0);
        assert_eq!(sized_slice_memory(Mebibytes::from_gib(41), total), shareable_memory(total));
        assert_eq!(sized_slice_memory(Mebibytes::from_gib(1), Mebibytes(0)), Mebibytes(0));
    }

    #[test]
    fn a_share_is_never_empty_and_zero_units_are_safe() {
        assert_eq!(thread_percentage(1, 48, Threads::Strict), Percent::new(2).ok());
        assert_eq!(thread_percentage(1, 0, Threads::Strict), Some(Percent::FULL));
        assert_eq!(memory_limit(1, 0, Mebibytes(1024)), Mebibytes(896));
    }
}
