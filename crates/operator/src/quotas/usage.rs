//! What a quota uses, for metrics.
use std::collections::BTreeMap;

use cleave_plan::quota::Usage;

/// What a quota uses, for metrics.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct QuotaUsage {
    pub(crate) usage: Usage,
    pub(crate) limits: Limits,
    /// What waits, by reason: number of pods.
    pub(crate) waiting: BTreeMap<String, u32>,
    /// Amount that waits.
    pub(crate) waiting_amount: u64,
    /// Amount that waits within the guarantee.
    pub(crate) unmet_amount: u64,
    /// One GPU, or one GiB: the unit of the metrics.
    pub(crate) one: u64,
}

/// Limits of a quota, in the smallest unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) min: u64,
    pub(crate) max: Option<u64>,
}
