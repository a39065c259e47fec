//! Defines names, limits and helpers that several parts of the soak use.
use std::collections::BTreeMap;

use cleave_e2e::Random;

/// Name of the node on which each GPU is divided into ten shares.
pub(crate) const SHARES_NODE: &str = "node1";
/// Name of the node whose GPUs are repartitioned when pods request slices.
pub(crate) const DYNAMIC_NODE: &str = "node2";
/// Resource name of the shares on [`SHARES_NODE`].
pub(crate) const SHARES_RESOURCE: &str = "nvidia.com/gpu-mps";
/// Number of shares of each GPU of [`SHARES_NODE`].
pub(crate) const SHARES_PER_GPU: usize = 10;

/// Picks one element at random. Returns `None` if `from` is empty.
pub(crate) fn pick_random<'a, T>(random: &mut Random, from: &'a [T]) -> Option<&'a T> {
    from.get(usize::try_from(random.random_below(from.len() as u64)).unwrap_or_default())
}

/// Number of occurrences of each kind of event, for the summary.
pub(crate) type Counts = BTreeMap<&'static str, u64>;

/// Formats counts for the summary.
pub(crate) fn format_counts(counts: &Counts) -> String {
    let all: Vec<String> = counts.iter().map(|(what, times)| format!("{what} {times}")).collect();
    if all.is_empty() { "nothing".into() } else { all.join(", ") }
}
