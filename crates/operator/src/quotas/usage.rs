//! The use of quotas, for metrics.
use std::collections::BTreeMap;

use cleave_plan::quota::Usage;

/// The use of a quota, for metrics.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct QuotaUsage {
    pub(crate) usage: Usage,
    pub(crate) limits: Limits,
    /// Number of waiting pods, by reason.
    pub(crate) waiting: BTreeMap<String, u32>,
    /// Amount that waiting pods request.
    pub(crate) waiting_amount: u64,
    /// Amount that waiting pods within the guarantee request.
    pub(crate) unmet_amount: u64,
    /// One unit of the metrics: one GPU, or one GiB.
    pub(crate) one: u64,
}

/// Limits of a quota, in the unit of [`Amount`](cleave_plan::quota::Amount).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) min: u64,
    pub(crate) max: Option<u64>,
}
