//! Selects the pods of lower priority to evict for a waiting pod.
use std::cell::LazyCell;
use std::collections::BTreeMap;
use std::time::Duration;

use cleave_plan::ledger::{Holder, Ledger, Nomination, Preemption};

use super::actions::{Actions, Eviction};
use super::claims::PodClaims;
use super::search::{Candidate, PlacementSearch};
use super::verdict::Verdict;

/// Maximum number of preemptors considered per reconcile. Each one scans every device.
const MAX_PREEMPTORS: usize = 8;

/// Searches for pods to evict, within one reconcile.
pub(super) struct PreemptionSearch<'a, F: FnOnce() -> BTreeMap<String, Holder>> {
    /// Pods with allocations. Computed only if a pod waits.
    pub(super) holders: &'a LazyCell<BTreeMap<String, Holder>, F>,
    /// Pods whose eviction a disruption budget refused, each with the time at which its protection
    /// ends.
    pub(super) protected: &'a BTreeMap<String, Duration>,
    pub(super) claims: &'a PodClaims,
    /// Number of preemptors considered so far.
    pub(super) considered: usize,
}

impl<F: FnOnce() -> BTreeMap<String, Holder>> PreemptionSearch<'_, F> {
    /// Finds the pods to evict so that a waiting pod can be placed. `None` if the pod may not
    /// preempt others, or if no evictions suffice.
    pub(super) fn find<'a>(
        &mut self,
        ledger: &Ledger,
        search: &PlacementSearch<'a>,
        candidate: &'a Candidate<'a>,
        verdict: &Verdict,
    ) -> Option<Preemption> {
        let Candidate { pod, plan_pod, .. } = candidate;
        let may_preempt =
            matches!(verdict, Verdict::Waits(_)) && pod.spec.preemption_policy.as_deref() != Some("Never");
        let over_others = || self.holders.values().any(|holder| holder.priority < plan_pod.priority);
        if !may_preempt || self.considered >= MAX_PREEMPTORS || !over_others() {
            return None;
        }
        self.considered += 1;
        let found = ledger.preempt(candidate.pending_pod(), search.nodes_with_room(candidate), self.holders);
        found.filter(|found| can_evict(found, self.protected))
    }

    /// Nominates the pod for what its victims free, and evicts them.
    pub(super) fn nominate(
        &self,
        ledger: &mut Ledger,
        candidate: &Candidate<'_>,
        found: Preemption,
        actions: &mut Actions,
    ) {
        let Preemption { node, takes, victims } = found;
        actions.evictions.extend(self.evictions(victims, &candidate.name));
        // The ledger refuses only nominations for pods with a claim, and waiting pods have none.
        let nomination = Nomination { priority: candidate.plan_pod.priority, node, takes };
        let _ = ledger.nominate(&candidate.name, nomination);
    }

    /// The evictions of these victims for the pod `preemptor`.
    fn evictions<'e>(&'e self, victims: Vec<String>, preemptor: &'e str) -> impl Iterator<Item = Eviction> + 'e {
        let eviction = |pod: String| {
            let uid = self.claims.uid(&pod).unwrap_or_default().to_owned();
            Eviction { pod, uid, preemptor: preemptor.to_owned() }
        };
        victims.into_iter().map(eviction)
    }
}

/// Whether no victim counts as protected by a disruption budget. Evicting only the other victims
/// would free too few units. A refused eviction must not be repeated at each reconcile.
fn can_evict(preemption: &Preemption, protected: &BTreeMap<String, Duration>) -> bool {
    !preemption.victims.iter().any(|victim| protected.contains_key(victim))
}
