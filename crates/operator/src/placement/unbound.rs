//! Finds released pods that are not bound, and that the rules of quotas may evict.
//!
//! A scheduler may bind such a pod late or never. The pod's reservation counts like an allocation,
//! so the reservation can be reclaimed like an allocation. Otherwise one unbound pod would protect
//! its whole gang.
use std::collections::{BTreeMap, BTreeSet};

use cleave_plan::ledger::{Holder, Ledger, Moment, Place};

use super::claims::PodClaims;
use super::evictions::Evictability;
use super::pod_tracker::PodTracker;

/// Released pods that are not bound, by node and name.
pub(super) type UnboundPods<'a> = BTreeMap<String, BTreeMap<String, Holder<'a>>>;

/// Returns the unbound pods with reservations on the nodes that `is_searched` accepts. Deleted pods
/// count as terminating while their reservations last. Disruption budgets are ignored: the API
/// server evicts pending pods regardless of budgets.
pub(super) fn unbound_pods<'a>(
    ledger: &Ledger,
    (tracker, claims): (&'a PodTracker, &PodClaims),
    evictability: &Evictability<'a>,
    is_searched: impl Fn(&str) -> bool,
) -> UnboundPods<'a> {
    let (evictability, mut found) = (evictability.ignoring_budgets(), UnboundPods::new());
    let deleted: BTreeSet<&str> = claims.lingering_pods().collect();
    let gone = Holder { priority: 0, started: Moment(0), budget: None, ending: true, requests: None };
    for (name, claim) in ledger.unbound_claims() {
        let Place::OneOf { nodes, .. } = &claim.place else { continue };
        // A new pod at the gate may have the name of a deleted pod.
        let is_same = |uid: Option<&str>| uid.is_some() && uid == claims.uid(name);
        let pod = tracker.unsettled_pod(name).filter(|pod| is_same(pod.metadata.uid.as_deref()));
        let holder = match pod {
            Some(pod) if pod.node().is_none() => evictability.holder(pod),
            Some(_) => None,
            None => deleted.contains(name).then_some(gone),
        };
        for node in nodes.iter().filter(|node| is_searched(node)) {
            if let Some(holder) = holder {
                found.entry(node.clone()).or_default().insert(name.to_owned(), holder);
            }
        }
    }
    found
}
