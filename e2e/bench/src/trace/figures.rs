//! Computes ratios and percentiles for the figures that the benchmark reports.

/// Returns `part` divided by `whole`.
#[allow(clippy::cast_precision_loss, reason = "sums of thousandths of some thousand GPUs are far below 2^52")]
pub(super) fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole as f64
}

/// Returns the value at this percentile of sorted values, or 0 if there are no values.
pub(super) fn percentile(sorted: &[f64], percent: usize) -> f64 {
    sorted.get((sorted.len() * percent / 100).min(sorted.len().saturating_sub(1))).copied().unwrap_or(0.0)
}
