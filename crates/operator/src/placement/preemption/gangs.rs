//! Selects the pods to evict for a gang. Either all waiting pods of the gang are nominated, or
//! none.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_plan::ledger::{Holders, Ledger, Nomination, PendingPod, Preemption};
use cleave_plan::quota::Kind;

use super::{Exchange, NoEvictions, PreemptionSearch, pods_of_affinity};
use crate::placement::actions::Actions;
use crate::placement::exchange_turns::Seeker;
use crate::placement::quota_pass::{PodAndPreemption, QuotaPass, QuotaTurn};
use crate::placement::search::{Candidate, PlacementSearch};
use crate::placement::verdict::{PreemptionProspect, Verdict};

/// The nodes of each pod, by the pod's name.
type NodesOfPods = BTreeMap<String, Vec<String>>;

/// Pods of a gang, each with the units that it gets and the pods to evict.
type Rooms<'a> = Vec<(&'a Candidate<'a>, Preemption)>;

impl<'a> PreemptionSearch<'a> {
    /// Like [`Self::preempt`], but nominates either all waiting pods of a gang or none.
    pub(in crate::placement) fn preempt_for_gang(
        &mut self,
        ledger: &mut Ledger,
        search: &mut PlacementSearch<'a>,
        (gang, verdict, pause): (&[&'a Candidate<'a>], &Verdict, Option<Duration>),
        (pass, turn): (&mut QuotaPass<'_>, QuotaTurn),
        actions: &mut Actions,
    ) -> PreemptionProspect {
        if let Some(pause) = pause {
            actions.requeue_in(pause);
        }
        let is_paused = pause.is_some() || gang.iter().any(|one| self.awaits_answer(ledger, actions, &one.name));
        let found = self.find_for_gang(ledger, search, (gang, verdict, is_paused), (pass, turn), actions);
        actions.preemption_searches = self.searches;
        self.conclude_exchange(ledger, search, gang, (pass, turn), found, actions)
    }

    /// Finds units for the pods of a gang, and the pods to evict.
    fn find_for_gang(
        &mut self,
        ledger: &Ledger,
        search: &mut PlacementSearch<'a>,
        (gang, verdict, is_paused): (&[&'a Candidate<'a>], &Verdict, bool),
        (pass, turn): (&QuotaPass<'_>, QuotaTurn),
        actions: &mut Actions,
    ) -> Result<Exchange<'a>, NoEvictions> {
        let Some(head) = gang.first() else { return Err(NoEvictions::Impossible) };
        let is_futile = verdict.permanent_obstacle().is_some();
        if is_futile || gang.iter().any(|one| search.key(one).has_unbound_volume()) {
            return Err(NoEvictions::Impossible);
        }
        let tracker = self.tracker;
        let kept: BTreeSet<String> = gang.iter().flat_map(|one| pods_of_affinity(tracker, one.pod)).collect();
        let nominations = ledger.nominations();
        if turn.rights.is_within_max_later && gang.iter().all(|one| nominations.contains_key(&one.name)) {
            let ending = pass.ending(turn.member, self.holders());
            let is_own = |one: &Candidate<'_>, node: &str| nominations.get(&one.name).is_some_and(|of| of.node == node);
            if let Some(found) = rooms(ledger, search, gang, pass, (ending, &kept), is_own) {
                return Ok(Exchange { kind: Kind::Priority, found, force: false });
            }
        }
        if gang.iter().any(|one| one.pod.spec.preemption_policy.as_deref() == Some("Never")) {
            return Err(NoEvictions::Impossible);
        }
        if self.is_paused || is_paused {
            return Err(NoEvictions::Later);
        }
        // At the maximum, a gang waits until pods of its quota end.
        if turn.rights.is_over_max {
            return Err(NoEvictions::Impossible);
        }
        if self.is_exchange_delayed(ledger, &head.name, &turn) {
            return Err(NoEvictions::Delayed);
        }
        let has_rules = gang.iter().any(|one| search.key(one).has_rules());
        let seeker = Seeker { name: &head.name, pod: head.pod, turn, pods: gang.len(), has_rules };
        self.take_exchange_turn(&seeker)?;
        let found = self.search_for_gang(ledger, search, gang, (pass, turn), &kept, actions);
        self.record_exchange(&seeker, found)
    }

    /// Searches for pods to evict for a gang.
    fn search_for_gang(
        &mut self,
        ledger: &Ledger,
        search: &mut PlacementSearch<'a>,
        gang: &[&'a Candidate<'a>],
        (pass, turn): (&QuotaPass<'_>, QuotaTurn),
        kept: &BTreeSet<String>,
        actions: &mut Actions,
    ) -> Result<Exchange<'a>, NoEvictions> {
        for kind in pass.kinds(&turn) {
            let holders = pass.holders(kind, turn.member, self.holders());
            let found = legal_rooms(ledger, search, gang, (pass, turn), (holders, kept), kind);
            let is_allowed = |found: &Rooms<'a>| {
                let named: Vec<PodAndPreemption<'_>> =
                    found.iter().map(|(one, found)| (one.name.as_str(), found)).collect();
                self.is_within_budgets(pass, &named)
            };
            if let Some(found) = found.filter(is_allowed) {
                return Ok(Exchange { kind, found, force: false });
            }
        }
        if !pass.kinds(&turn).any(|kind| kind == Kind::Reclaim) {
            return Err(NoEvictions::Impossible);
        }
        let kind = Kind::Reclaim;
        let holders = pass.holders(kind, turn.member, &self.holders_ignoring_budgets());
        let Some(found) = legal_rooms(ledger, search, gang, (pass, turn), (holders, kept), kind) else {
            return Err(NoEvictions::Impossible);
        };
        self.await_budgets((pass, turn), found, actions)
    }
}

/// Like [`rooms`], but returns `None` if the rules do not permit the evictions.
fn legal_rooms<'a>(
    ledger: &Ledger,
    search: &mut PlacementSearch<'a>,
    gang: &[&'a Candidate<'a>],
    (pass, turn): (&QuotaPass<'_>, QuotaTurn),
    holders: (Holders<'a>, &BTreeSet<String>),
    kind: Kind,
) -> Option<Rooms<'a>> {
    let found = rooms(ledger, search, gang, pass, holders, |_, _| true)?;
    let named: Vec<PodAndPreemption<'_>> = found.iter().map(|(one, found)| (one.name.as_str(), found)).collect();
    pass.is_legal(kind, turn.member, &named).then_some(found)
}

/// Finds units for the pods of a gang, one pod after the other, the largest first. If a pod is
/// evicted, all pods of its gang are evicted, and their units count as free for the next pod.
/// Returns `None` if one of the pods gets no units. Changes nothing.
fn rooms<'a>(
    ledger: &Ledger,
    search: &mut PlacementSearch<'a>,
    gang: &[&'a Candidate<'a>],
    pass: &QuotaPass<'_>,
    (mut holders, kept): (Holders<'a>, &BTreeSet<String>),
    may_use: impl Fn(&Candidate<'_>, &str) -> bool,
) -> Option<Rooms<'a>> {
    let mut scratch = ledger.clone();
    gang.iter().for_each(|one| drop(scratch.withdraw(&one.name)));
    let (mut found, mut nodes): (Rooms<'a>, Option<NodesOfPods>) = (Vec::new(), None);
    for &one in gang {
        // The priorities of the holders express the order of evictions.
        let pending = PendingPod { priority: i32::MAX, ..one.pending_pod() };
        let targets = search.preemption_nodes(&scratch, one, |node| may_use(one, node));
        let Some(room) = scratch.preempt(pending, targets, &holders, kept) else { break };
        if !room.victims.is_empty() {
            let leaving = pass.with_gang_members(room.victims.iter());
            let nodes = nodes.get_or_insert_with(|| nodes_of_holders(&holders));
            for pod in &leaving {
                nodes.get(pod).into_iter().flatten().for_each(|node| holders.evict(node, [pod]));
            }
        }
        let (priority, node, takes) = (one.plan_pod.priority, room.node.clone(), room.takes.clone());
        search.nominate(one, &room.node);
        found.push((one, room));
        if scratch.nominate(&one.name, Nomination { priority, node, takes }).is_err() {
            break;
        }
    }
    let is_complete = found.len() == gang.len();
    for (one, room) in &found {
        search.withdraw_nomination(&one.name, &room.node);
    }
    // Restore the existing nominations of these pods.
    for one in gang {
        if let Some(nomination) = ledger.nominations().get(&one.name) {
            search.nominate(one, &nomination.node);
        }
    }
    is_complete.then_some(found)
}

fn nodes_of_holders(holders: &Holders<'_>) -> NodesOfPods {
    let mut nodes = NodesOfPods::new();
    for (node, pod, _) in holders.all() {
        nodes.entry(pod.to_owned()).or_default().push(node.to_owned());
    }
    nodes
}
