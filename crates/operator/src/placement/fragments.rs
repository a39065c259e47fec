//! Taints nodes that look free to autoscalers although no GPU has enough free units. These taints
//! are disabled by default. Pure.
//!
//! Autoscalers sum the free units of a node's GPUs. If two GPUs together have six free shares, an
//! autoscaler assumes that a pod with five shares fits, and adds no node. Karpenter treats the
//! effect `PreferNoSchedule` as a strict rule, so it skips tainted nodes when it searches for a
//! node. The scheduler may still use tainted nodes, so the taint does not affect pods that Cleave
//! releases to these nodes.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_api::names::FRAGMENTED_TAINT;
use cleave_plan::ledger::{Ledger, Place};

use super::growth::ReportedPods;
use super::nodes::{NodeState, Nodes};
use super::pod_tracker::PodTracker;
use crate::policies::taint::{TaintBackoff, TaintChange, add_patch, remove_patch};

/// Key and effect of the taint.
const FRAGMENTED_KEY_AND_EFFECT: (&str, &str) = (FRAGMENTED_TAINT, "PreferNoSchedule");
/// Maximum number of nodes that change in one reconcile.
const MAX_CHANGES_PER_RECONCILE: usize = 32;

/// The taint changes that earlier reconciles decided.
#[derive(Debug)]
pub(super) struct FragmentationTaints {
    enabled: bool,
    /// The `resourceVersion` for which each change was decided, by node. The watch may lag.
    decided: BTreeMap<String, String>,
    backoff: TaintBackoff,
}

impl FragmentationTaints {
    /// Creates the state before the first decision. If `enabled` is false, no node is changed.
    pub(super) fn new(enabled: bool) -> Self {
        Self { enabled, decided: BTreeMap::new(), backoff: TaintBackoff::default() }
    }

    /// Returns whether nodes may be tainted.
    pub(super) const fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Records whether a node's taint was written. If the write failed, a later reconcile retries
    /// it.
    pub(super) fn record_write(&mut self, node: &str, written: bool, up: Duration) {
        self.backoff.record_write(node, written, up);
        if !written {
            self.decided.remove(node);
        }
    }

    /// Returns the time until a failed write is retried.
    pub(super) fn next_retry(&self, up: Duration) -> Option<Duration> {
        self.backoff.time_to_retry(up)
    }

    /// Returns the nodes whose taint changes. `reported` are the pods that are reported to
    /// autoscalers. None of these pods fits on a node.
    pub(super) fn update(
        &mut self,
        (nodes, tracker): (&Nodes, &PodTracker),
        ledger: &Ledger,
        reported: &[ReportedPods],
        up: Duration,
    ) -> Vec<TaintChange> {
        if !self.enabled {
            return Vec::new();
        }
        let mut changes = Vec::new();
        let mut differing = BTreeSet::new();
        let released = released_units(ledger);
        for (name, state) in &nodes.0 {
            let wanted = looks_free((ledger, &released), (state, tracker), reported);
            let Some(change) = taint_change(name, state, wanted) else { continue };
            differing.insert(name.as_str());
            let version = state.resource_version().to_owned();
            let is_due = self.decided.get(name) != Some(&version) && !self.backoff.is_delayed(name, up);
            if changes.len() < MAX_CHANGES_PER_RECONCILE && is_due {
                self.decided.insert(name.clone(), version);
                changes.push(change);
            }
        }
        self.decided.retain(|name, _| differing.contains(name.as_str()));
        self.backoff.retain(&differing);
        changes
    }
}

/// Units of pods that are released to nodes but not bound, by node and resource.
type ReleasedUnits<'a> = BTreeMap<(&'a str, &'a str), u64>;

/// Returns the units of the pods that are released but not bound.
fn released_units(ledger: &Ledger) -> ReleasedUnits<'_> {
    let mut released = ReleasedUnits::new();
    for (_, claim) in ledger.unbound_claims() {
        let Place::OneOf { nodes, .. } = &claim.place else { continue };
        for (node, request) in nodes.iter().flat_map(|node| claim.device_requests.iter().map(move |one| (node, one))) {
            *released.entry((node, &request.resource)).or_default() += u64::from(request.units.get());
        }
    }
    released
}

/// Returns whether the sum of a node's free units suffices for one of the reported pods that may
/// use the node. A node that no reported pod may use does not prevent autoscalers from adding a
/// node.
///
/// The function uses the larger of two sums: the ledger's sum and the autoscaler's sum, which
/// equals the scheduler's sum. An autoscaler counts units as free if only a deleted pod still uses
/// them.
fn looks_free(
    (ledger, released): (&Ledger, &ReleasedUnits<'_>),
    (node, tracker): (&NodeState, &PodTracker),
    reported: &[ReportedPods],
) -> bool {
    if reported.is_empty() {
        return false;
    }
    let mut free: BTreeMap<String, u64> = BTreeMap::new();
    for usage in ledger.devices(&node.node.name) {
        *free.entry(usage.resource).or_default() += u64::from(usage.free);
    }
    // Without an agent, the kubelet advertises no units.
    for (resource, milli) in node.units_free_for_scheduler(tracker).into_iter().filter(|_| node.has_ready_agent()) {
        let released = released.get(&(node.node.name.as_str(), resource)).copied().unwrap_or(0);
        let units = u64::try_from(milli / 1000).unwrap_or(0).saturating_sub(released);
        let most = free.entry(resource.to_owned()).or_default();
        *most = units.max(*most);
    }
    let suffices = |(resource, units): (&String, &u64)| free.get(resource).is_some_and(|free| free >= units);
    reported.iter().any(|pods| pods.smallest.iter().any(suffices) && node.may_admit_later(&pods.pod))
}

/// Returns the change of a node's taint. Returns `None` if the taint is already present or absent
/// as `wanted` requires.
fn taint_change(name: &str, state: &NodeState, wanted: bool) -> Option<TaintChange> {
    let is_own =
        |taint: &cleave_plan::snapshot::Taint| (taint.key.as_str(), taint.effect.as_str()) == FRAGMENTED_KEY_AND_EFFECT;
    let (why, patch) = match (wanted, state.node.taints.iter().position(is_own)) {
        (true, None) => (
            Some("its free shares are on several GPUs"),
            add_patch(&FRAGMENTED_KEY_AND_EFFECT, &state.node.taints, state.resource_version()),
        ),
        (false, Some(index)) => (None, remove_patch(&FRAGMENTED_KEY_AND_EFFECT, index)),
        _ => return None,
    };
    Some(TaintChange { node: name.to_owned(), why, patch })
}
