//! Which pods of lower priority have to leave for a pod that waits.
use std::cell::LazyCell;
use std::collections::BTreeMap;
use std::time::Duration;

use cleave_plan::ledger::{Holder, Ledger, Preemption};

use super::nodes::Verdict;
use super::placing::{Candidate, Placing};
use super::turn::Eviction;

/// For how many pods at once is thought about who has to leave: it is asked of every device.
const PREEMPTORS: usize = 8;

/// Looks for pods that could make room by leaving.
pub(super) struct Preempting<'a, F: FnOnce() -> BTreeMap<String, Holder>> {
    /// Worked out once somebody waits.
    pub(super) holders: &'a LazyCell<BTreeMap<String, Holder>, F>,
    pub(super) protected: &'a BTreeMap<String, Duration>,
    pub(super) uids: &'a BTreeMap<String, String>,
    /// For how many pods it was tried.
    pub(super) tried: usize,
}

impl<F: FnOnce() -> BTreeMap<String, Holder>> Preempting<'_, F> {
    /// Who would have to leave for a pod that waits behind pods of lower priority.
    pub(super) fn preempt<'a>(
        &mut self,
        ledger: &Ledger,
        placing: &Placing<'a>,
        candidate: &'a Candidate<'a>,
        verdict: &Verdict,
    ) -> Option<Preemption> {
        let Candidate { pod, wanted, .. } = candidate;
        let waits = matches!(verdict, Verdict::Waits(_)) && pod.spec.preemption_policy.as_deref() != Some("Never");
        let over_others = || self.holders.values().any(|holder| holder.priority < wanted.priority);
        if !waits || self.tried >= PREEMPTORS || !over_others() {
            return None;
        }
        self.tried += 1;
        let found = ledger.preempt(candidate.asking(), placing.with_room(candidate), self.holders);
        found.filter(|found| can_leave(found, self.protected))
    }

    pub(super) fn evictions<'e>(&'e self, victims: Vec<String>, by: &'e str) -> impl Iterator<Item = Eviction> + 'e {
        let uid = |victim: &String| self.uids.get(victim).cloned().unwrap_or_default();
        victims.into_iter().map(move |pod| Eviction { uid: uid(&pod), pod, by: by.to_owned() })
    }
}

/// A budget that has none left is not asked again and again, and nobody leaves in vain beside one
/// whom it protects.
fn can_leave(preemption: &Preemption, protected: &BTreeMap<String, Duration>) -> bool {
    !preemption.victims.iter().any(|victim| protected.contains_key(victim))
}
