//! Selects the pods to evict for a waiting pod, by priority or by the rules of quotas.
use std::cell::{LazyCell, OnceCell};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_plan::ledger::{Holders, Ledger, Nomination, PendingPod, Preemption};
use cleave_plan::quota::Kind;

use super::actions::{Actions, Eviction, NominationRecord, QuotaEviction};
use super::claims::PodClaims;
use super::constraints;
use super::evictions::{Evictability, TERMINATION_TIME};
use super::handover;
use super::nodes::Nodes;
use super::pod_tracker::PodTracker;
use super::preemptors::{Preemptors, SearchScope};
use super::quota_pass::{PodAndRoom, QuotaPass, QuotaTurn, capped_grace};
use super::search::{Candidate, PlacementSearch, SearchKey};
use super::verdict::{PreemptionProspect, Verdict};
use crate::pods::{PodObject, full_name};

mod gangs;

/// Maximum number of waiting pods per reconcile for which the operator searches for preemption
/// victims for the first time. Each search scans every device.
const MAX_NEW_PREEMPTORS: usize = 4;

/// Maximum number of waiting pods per reconcile for which the operator searches for victims by the
/// rules of quotas. The turns are in the order of the quotas, so pods within a guarantee come
/// first.
const MAX_EXCHANGES: usize = 8;

/// Searches for pods to evict, within one reconcile.
pub(super) struct PreemptionSearch<'a> {
    nodes: &'a Nodes,
    tracker: &'a PodTracker,
    evictability: Evictability<'a>,
    claims: &'a PodClaims,
    preemptors: &'a mut Preemptors,
    /// Pods with allocations. Computed only if a pod may preempt others.
    holders: OnceCell<Holders<'a>>,
    /// The lowest priority in `holders`. `i32::MAX` if `holders` is empty.
    lowest_holder: OnceCell<i32>,
    /// Waiting pods whose turn it is.
    pods_in_turn: BTreeSet<String>,
    /// Number of first searches in this reconcile.
    new: usize,
    /// Number of all searches in this reconcile.
    searches: u64,
    /// Number of searches so far by the rules of quotas.
    exchanges: usize,
    /// Properties of pods for which no preemption helps. Replicas of a workload have the same
    /// result.
    futile: BTreeSet<SearchKey<'a>>,
    /// Whether no pods are evicted now, because the API server limits requests.
    is_paused: bool,
    up: Duration,
}

/// Pods to evict by the rules of quotas, and the units that waiting pods get.
struct Exchange<'a> {
    kind: Kind,
    /// The pod whose turn it is, or the pods of its gang.
    found: Vec<(&'a Candidate<'a>, Preemption)>,
    /// Whether the operator deletes pods that disruption budgets protect.
    force: bool,
}

/// The result of one search.
enum SearchResult {
    /// These evictions free enough units. The list of victims may be empty.
    Preempt(Preemption),
    /// No preemption helps, or the pod may not preempt others.
    Impossible,
    /// It is not this pod's turn, or the pod is about to get units without evictions.
    Later,
    /// Like `Preempt`, but by the rules of quotas. `force` deletes pods that disruption budgets
    /// protect.
    Exchange { kind: Kind, found: Preemption, force: bool },
    /// Only evictions of pods that disruption budgets protect would free enough units.
    Protected,
}

impl<'a> PreemptionSearch<'a> {
    pub(super) fn new(
        (nodes, tracker): (&'a Nodes, &'a PodTracker),
        evictability: Evictability<'a>,
        claims: &'a PodClaims,
        preemptors: &'a mut Preemptors,
        up: Duration,
    ) -> Self {
        let (pods_in_turn, is_paused) = (preemptors.pods_in_turn(up), evictability.is_paused(up));
        let (holders, futile) = (OnceCell::new(), BTreeSet::new());
        Self {
            nodes,
            tracker,
            evictability,
            claims,
            preemptors,
            holders,
            lowest_holder: OnceCell::new(),
            pods_in_turn,
            new: 0,
            searches: 0,
            exchanges: 0,
            futile,
            is_paused,
            up,
        }
    }

    /// If evictions free enough units for a pod at the placement gate, evicts the victims and
    /// nominates the pod. Keeps an earlier nomination while its victims terminate. Returns whether
    /// the pod is nominated.
    ///
    /// `pause` is the time for which evictions are delayed, because this pod is about to get units
    /// without evictions.
    pub(super) fn preempt(
        &mut self,
        ledger: &mut Ledger,
        search: &mut PlacementSearch<'a>,
        candidate: &'a Candidate<'a>,
        (verdict, pause): (&Verdict, Option<Duration>),
        quota: Option<(&mut QuotaPass<'_>, QuotaTurn)>,
        actions: &mut Actions,
    ) -> PreemptionProspect {
        if let Some((pass, turn)) = quota {
            let prospect = self.preempt_by_quota(ledger, search, candidate, verdict, (pass, turn), actions);
            actions.preemption_searches = self.searches;
            return prospect;
        }
        if let Some(pause) = pause {
            actions.requeue_in(pause);
        }
        let prospect = match self.find_victims(ledger, search, candidate, (verdict, pause.is_some())) {
            SearchResult::Preempt(Preemption { node, takes, victims }) => {
                // After that time, a victim that does not terminate counts as running.
                actions.requeue_in(self.unlisted_time_left(&candidate.name).unwrap_or(TERMINATION_TIME));
                self.preemptors.record_victims(&candidate.name, &node, &victims);
                self.add_evictions(&node, victims, &candidate.name, actions);
                self.preemptors.record_success(&candidate.name);
                search.nominate(candidate, &node);
                // Ignore errors: the ledger refuses only nominations for pods with a claim, and
                // waiting pods have none.
                let nomination = Nomination { priority: candidate.plan_pod.priority, node, takes };
                let _ = ledger.nominate(&candidate.name, nomination);
                PreemptionProspect::Nominated
            }
            SearchResult::Impossible | SearchResult::Exchange { .. } | SearchResult::Protected => {
                self.withdraw_nomination(ledger, search, &candidate.name);
                PreemptionProspect::Impossible
            }
            SearchResult::Later if ledger.nominations().contains_key(&candidate.name) => PreemptionProspect::Nominated,
            SearchResult::Later => PreemptionProspect::Unknown,
        };
        actions.preemption_searches = self.searches;
        prospect
    }

    /// Ends the nomination of a waiting pod.
    pub(super) fn withdraw_nomination(&mut self, ledger: &mut Ledger, search: &mut PlacementSearch<'a>, pod: &str) {
        if let Some(nomination) = ledger.withdraw(pod) {
            search.withdraw_nomination(pod, &nomination.node);
            self.preemptors.record_node_change(&nomination.node);
        }
    }

    fn find_victims(
        &mut self,
        ledger: &Ledger,
        search: &PlacementSearch<'a>,
        candidate: &'a Candidate<'a>,
        (verdict, is_paused): (&Verdict, bool),
    ) -> SearchResult {
        let Candidate { name, pod, plan_pod, .. } = candidate;
        if verdict.permanent_obstacle().is_some() || pod.spec.preemption_policy.as_deref() == Some("Never") {
            return SearchResult::Impossible;
        }
        let nominated = ledger.nominations().get(name);
        let scope = self.preemptors.search_scope(name, self.up);
        let key = search.key(candidate);
        // The scheduler may refuse the node, because the volume cannot be created on the node. The
        // evictions would have no effect.
        if key.has_unbound_volume() {
            return SearchResult::Impossible;
        }
        if nominated.is_none() {
            if scope == SearchScope::Nothing {
                if self.preemptors.is_failure_shared(name) {
                    self.futile.insert(key);
                }
                return SearchResult::Impossible;
            }
            if self.futile.contains(&key) {
                self.preemptors.record_failure(name, pod, (key.has_rules(), true), self.up);
                return SearchResult::Impossible;
            }
        }
        if !self.may_preempt(plan_pod.priority) {
            return SearchResult::Impossible;
        }
        let tracker = self.tracker;
        let kept = LazyCell::new(|| pods_of_affinity(tracker, pod));
        if let Some(nomination) = nominated {
            let targets = search.preemption_nodes(ledger, candidate, |node| node == nomination.node);
            let found = ledger.preempt(candidate.pending_pod(), targets, self.holders(), &kept);
            if let Some(found) = self.keep_nomination(ledger, name, nomination, found) {
                return SearchResult::Preempt(found);
            }
        }
        if self.is_paused || is_paused {
            return SearchResult::Later;
        }
        if self.preemptors.is_preemption_delayed(name, self.up) {
            return SearchResult::Impossible;
        }
        let is_turn = if self.preemptors.has_waited(name) {
            self.pods_in_turn.contains(name)
        } else {
            self.new += 1;
            self.new <= MAX_NEW_PREEMPTORS
        };
        if !is_turn {
            self.preemptors.defer(name, pod);
            return SearchResult::Later;
        }
        self.searches += 1;
        let since = match scope {
            SearchScope::ChangedSince(version) if !key.has_rules() && nominated.is_none() => Some(version),
            _ => None,
        };
        let is_searched = |node: &str| since.is_none_or(|version| self.preemptors.has_node_changed(node, version));
        let targets = search.preemption_nodes(ledger, candidate, is_searched);
        match ledger.preempt(candidate.pending_pod(), targets, self.holders(), &kept) {
            Some(found) => SearchResult::Preempt(found),
            None => {
                let eligible = search.eligible_nodes(candidate).into_iter();
                let is_shared = !search.has_lasting_predecessor(ledger, candidate, eligible);
                self.preemptors.record_failure(name, pod, (key.has_rules(), is_shared), self.up);
                if is_shared {
                    self.futile.insert(key);
                }
                SearchResult::Impossible
            }
        }
    }

    /// Returns how long the units of the pod's ended victims may still be in use although the node
    /// lists no pod for them.
    fn unlisted_time_left(&self, pod: &str) -> Option<Duration> {
        let (node, victims) = self.preemptors.last_victims(pod)?;
        victims.iter().filter_map(|victim| self.claims.unlisted_time_left(node, victim, self.up)).max()
    }

    /// Returns the units that a nominated pod waits for without further evictions. `found` is the
    /// search's result on the nominated node.
    fn keep_nomination(
        &self,
        ledger: &Ledger,
        pod: &str,
        nomination: &Nomination,
        found: Option<Preemption>,
    ) -> Option<Preemption> {
        let found = found.filter(|found| found.victims.is_empty());
        found.or_else(|| self.nomination_awaiting_report(ledger, pod, nomination))
    }

    /// Returns the nominated units, if the pod must wait for the report that the units of its ended
    /// victims are free. Without this wait, more pods would be evicted for the same pod.
    fn nomination_awaiting_report(&self, ledger: &Ledger, pod: &str, nomination: &Nomination) -> Option<Preemption> {
        let Nomination { node, takes, .. } = nomination;
        let is_expected = self.preemptors.last_victims(pod).is_some_and(|(evicted_on, _)| evicted_on == node)
            && self.unlisted_time_left(pod).is_some()
            && takes.iter().any(|take| ledger.unlisted_units(node, &take.resource, &take.device) > 0);
        is_expected.then(|| Preemption { node: node.clone(), takes: takes.clone(), victims: Vec::new() })
    }

    /// Like [`Self::preempt`], but follows the rules of quotas.
    fn preempt_by_quota(
        &mut self,
        ledger: &mut Ledger,
        search: &mut PlacementSearch<'a>,
        candidate: &'a Candidate<'a>,
        verdict: &Verdict,
        (pass, turn): (&mut QuotaPass<'_>, QuotaTurn),
        actions: &mut Actions,
    ) -> PreemptionProspect {
        match self.find_exchange(ledger, search, candidate, verdict, (pass, turn), actions) {
            SearchResult::Exchange { kind, found, force } => {
                let found = vec![(candidate, found)];
                self.apply_exchange(ledger, search, (pass, turn), Exchange { kind, found, force }, actions);
                return PreemptionProspect::Nominated;
            }
            SearchResult::Later if ledger.nominations().contains_key(&candidate.name) => {
                pass.keep_nominations(ledger, turn.member, [candidate.name.as_str()].into_iter());
                return PreemptionProspect::Nominated;
            }
            SearchResult::Later => return PreemptionProspect::Unknown,
            SearchResult::Protected => {
                self.withdraw_nomination(ledger, search, &candidate.name);
                return PreemptionProspect::Protected;
            }
            SearchResult::Impossible | SearchResult::Preempt(_) => {}
        }
        self.withdraw_nomination(ledger, search, &candidate.name);
        PreemptionProspect::Impossible
    }

    /// Evicts the victims of an exchange and the other pods of their gangs, and nominates the
    /// waiting pods.
    fn apply_exchange(
        &mut self,
        ledger: &mut Ledger,
        search: &mut PlacementSearch<'a>,
        (pass, turn): (&mut QuotaPass<'_>, QuotaTurn),
        Exchange { kind, found, force }: Exchange<'a>,
        actions: &mut Actions,
    ) {
        let Some(preemptor) = found.first().map(|(candidate, _)| candidate.name.clone()) else { return };
        actions.requeue_in(self.unlisted_time_left(&preemptor).unwrap_or(TERMINATION_TIME));
        let (message, cap) = (pass.eviction_message(kind, turn.member), pass.grace_cap(turn.member));
        let victims = pass.with_gang_members(turn.member, found.iter().flat_map(|(_, found)| &found.victims));
        let named: Vec<PodAndRoom<'_>> =
            found.iter().map(|(candidate, found)| (candidate.name.as_str(), found)).collect();
        pass.nominate(turn.member, &named, &victims);
        let mut evictions = Vec::new();
        for pod in victims {
            let uid = self.claims.uid(&pod).unwrap_or_default().to_owned();
            let living = self.tracker.living_pods().find(|one| full_name(&one.metadata) == pod);
            let grace = living.and_then(|pod| capped_grace(pod, cap));
            let (from, to) = (pass.quota_of(turn.member, &pod), pass.quota_of(turn.member, &preemptor));
            let quota = Some(QuotaEviction { kind, from, to, grace, force, message: message.clone() });
            evictions.push(Eviction { pod, uid, preemptor: preemptor.clone(), quota });
        }
        self.mark_evicted(&evictions);
        let until = self.evictability.now().saturating_add(cap.as_secs()).saturating_add(TERMINATION_TIME.as_secs());
        for (candidate, found) in found {
            if !evictions.is_empty() {
                actions.kept.push(NominationRecord {
                    pod: candidate.name.clone(),
                    uid: candidate.pod.uid().unwrap_or_default(),
                    preemptor: preemptor.clone(),
                    room: handover::annotated_nomination(&found, until),
                });
            }
            self.preemptors.record_victims(&candidate.name, &found.node, &found.victims);
            self.preemptors.record_success(&candidate.name);
            search.nominate(candidate, &found.node);
            // Ignore errors: the ledger refuses only nominations for pods with a claim, and waiting
            // pods have none.
            let Preemption { node, takes, .. } = found;
            let nomination = Nomination { priority: candidate.plan_pod.priority, node, takes };
            let _ = ledger.nominate(&candidate.name, nomination);
        }
        actions.evictions.extend(evictions);
    }

    /// Finds the pods to evict for a waiting pod by the rules of quotas.
    fn find_exchange(
        &mut self,
        ledger: &Ledger,
        search: &mut PlacementSearch<'a>,
        candidate: &'a Candidate<'a>,
        verdict: &Verdict,
        (pass, turn): (&QuotaPass<'_>, QuotaTurn),
        actions: &mut Actions,
    ) -> SearchResult {
        let Candidate { name, pod, .. } = candidate;
        let (tracker, member) = (self.tracker, turn.member);
        let key = search.key(candidate);
        let is_futile = verdict.permanent_obstacle().is_some() || key.has_unbound_volume();
        if is_futile || !turn.rights.is_within_max_later && pod.spec.preemption_policy.as_deref() == Some("Never") {
            return SearchResult::Impossible;
        }
        let kept = pods_of_affinity(tracker, pod);
        // The priorities of the holders express the order of evictions.
        let pending = PendingPod { priority: i32::MAX, ..candidate.pending_pod() };
        if let Some(nomination) = ledger.nominations().get(name).filter(|_| turn.rights.is_within_max_later) {
            let targets = search.preemption_nodes(ledger, candidate, |node| node == nomination.node);
            let mut ending = self.holders().clone();
            ending.pods.values_mut().for_each(|pods| pods.retain(|_, holder| holder.ending));
            let found = ledger.preempt(pending, targets, &ending, &kept);
            if let Some(found) = self.keep_nomination(ledger, name, nomination, found) {
                return SearchResult::Exchange { kind: Kind::Priority, found, force: false };
            }
        }
        if pod.spec.preemption_policy.as_deref() == Some("Never") {
            return SearchResult::Impossible;
        }
        if self.is_paused {
            return SearchResult::Later;
        }
        if self.futile.contains(&key) || self.preemptors.is_preemption_delayed(name, self.up) {
            return SearchResult::Impossible;
        }
        if self.exchanges >= MAX_EXCHANGES {
            return SearchResult::Later;
        }
        self.exchanges += 1;
        self.searches += 1;
        if turn.rights.is_over_max
            && let Ok(fits) = search.find(ledger, candidate)
        {
            let place = fits.iter().next().map(|fit| (fit.node().to_owned(), fit.reservations().to_vec()));
            let free = place.map(|(node, takes)| Preemption { node, takes, victims: Vec::new() });
            let found = free.and_then(|free| pass.victims_for_max(member, self.holders(), free));
            return found.map_or(SearchResult::Impossible, |found| SearchResult::Exchange {
                kind: Kind::Priority,
                found,
                force: false,
            });
        }
        for kind in pass.kinds(&turn) {
            let holders = pass.holders(kind, member, self.holders());
            let targets = search.preemption_nodes(ledger, candidate, |_| true);
            let is_legal = |found: &Preemption| pass.is_legal(kind, member, &[(name.as_str(), found)]);
            let found = ledger.preempt_legally(pending, targets, (&holders, &kept), Some(&is_legal));
            if let Some(found) = found {
                return SearchResult::Exchange { kind, found, force: false };
            }
        }
        let result = self.find_protected(ledger, search, candidate, (pass, turn), &kept, actions);
        if matches!(result, SearchResult::Impossible) {
            let eligible = search.eligible_nodes(candidate).into_iter();
            if !search.has_lasting_predecessor(ledger, candidate, eligible) && !ledger.nominations().contains_key(name)
            {
                self.futile.insert(key);
            }
        }
        result
    }

    /// Finds borrowers that disruption budgets protect although their units are guaranteed to a
    /// waiting pod. The operator deletes the borrowers after [`QuotaPass::budget_patience`].
    fn find_protected(
        &mut self,
        ledger: &Ledger,
        search: &PlacementSearch<'a>,
        candidate: &'a Candidate<'a>,
        (pass, turn): (&QuotaPass<'_>, QuotaTurn),
        kept: &BTreeSet<String>,
        actions: &mut Actions,
    ) -> SearchResult {
        if !pass.kinds(&turn).any(|kind| kind == Kind::Reclaim) {
            return SearchResult::Impossible;
        }
        let holders = pass.holders(Kind::Reclaim, turn.member, &self.holders_ignoring_budgets());
        let targets = search.preemption_nodes(ledger, candidate, |_| true);
        let name = candidate.name.as_str();
        let is_legal = |found: &Preemption| pass.is_legal(Kind::Reclaim, turn.member, &[(name, found)]);
        let pending = PendingPod { priority: i32::MAX, ..candidate.pending_pod() };
        let Some(found) = ledger.preempt_legally(pending, targets, (&holders, kept), Some(&is_legal)) else {
            return SearchResult::Impossible;
        };
        let victims = pass.with_gang_members(turn.member, found.victims.iter());
        match pass.budget_patience(turn.member).map(|patience| self.patience_left(patience, &victims)) {
            Some(Duration::ZERO) => SearchResult::Exchange { kind: Kind::Reclaim, found, force: true },
            left => {
                left.into_iter().for_each(|left| actions.requeue_in(left));
                SearchResult::Protected
            }
        }
    }

    /// Returns the pods with allocations, as if no disruption budget protected a pod.
    fn holders_ignoring_budgets(&self) -> Holders<'a> {
        let is_ending = |node: &str, pod: &str| self.claims.is_ending(node, pod, self.up);
        let mut all = self.nodes.holders(self.tracker, &self.evictability.ignoring_budgets(), is_ending);
        // Pods that are evicted in this reconcile.
        for (node, pods) in &self.holders().pods {
            let evicted: Vec<String> =
                pods.iter().filter(|(_, holder)| holder.ending).map(|(name, _)| name.clone()).collect();
            all.evict(node, &evicted);
        }
        all
    }

    /// Returns how long disruption budgets may still protect these pods.
    fn patience_left(&mut self, patience: Duration, victims: &[String]) -> Duration {
        let mut left = Duration::ZERO;
        for victim in victims {
            let uid = self.claims.uid(victim).unwrap_or_default().to_owned();
            left = left.max(patience.saturating_sub(self.preemptors.record_protected(&uid, self.up)));
        }
        left
    }

    /// Marks pods as evicted for the rest of the reconcile.
    fn mark_evicted(&mut self, evictions: &[Eviction]) {
        let Some(holders) = self.holders.get_mut() else { return };
        for Eviction { pod, .. } in evictions {
            let nodes = holders.pods.iter().filter(|(_, pods)| pods.contains_key(pod));
            let nodes: Vec<String> = nodes.map(|(node, _)| node.clone()).collect();
            nodes.iter().for_each(|node| holders.evict(node, [pod]));
        }
    }

    fn holders(&self) -> &Holders<'a> {
        let is_ending = |node: &str, pod: &str| self.claims.is_ending(node, pod, self.up);
        self.holders.get_or_init(|| self.nodes.holders(self.tracker, &self.evictability, is_ending))
    }

    /// Returns whether a pod with GPUs has a lower priority than `priority`.
    fn may_preempt(&self, priority: i32) -> bool {
        // Include pods that cannot be evicted now, because they may become evictable.
        if self.tracker.lowest_priority().is_some_and(|lowest| lowest < priority) {
            return true;
        }
        // Ended pods whose node still reports their allocations have the priority 0.
        let holders = || self.holders().pods.values().flat_map(BTreeMap::values);
        let lowest = || holders().map(|holder| holder.priority).min().unwrap_or(i32::MAX);
        priority > 0 && *self.lowest_holder.get_or_init(lowest) < priority
    }

    /// Adds the evictions of these victims on a node for the pod `preemptor`. Victims with a
    /// disruption budget come first, because the API server may refuse to evict them. After a
    /// refusal, the operator does not evict the other victims.
    fn add_evictions(&mut self, node: &str, mut victims: Vec<String>, preemptor: &str, actions: &mut Actions) {
        let Some(holders) = self.holders.get_mut() else { return };
        victims.sort_by_key(|pod| holders.get(node, pod).is_none_or(|holder| holder.budget.is_none()));
        holders.evict(node, &victims);
        actions.evictions.extend(victims.into_iter().map(|pod| {
            let uid = self.claims.uid(&pod).unwrap_or_default().to_owned();
            Eviction { pod, uid, preemptor: preemptor.to_owned(), quota: None }
        }));
    }
}

/// Returns the names of the pods with GPUs that the required affinity of a pod selects. The
/// operator does not evict these pods, because the preemptor could not run on the node without
/// them.
fn pods_of_affinity(tracker: &PodTracker, pod: &PodObject) -> BTreeSet<String> {
    let affinity = &pod.spec.rules.affinity;
    if affinity.is_empty() {
        return BTreeSet::new();
    }
    let is_selected = |other: &&PodObject| {
        let (own, other_namespace) = (constraints::namespace(pod), constraints::namespace(other));
        affinity.iter().all(|term| term.may_select(own, other_namespace, constraints::labels(other)))
    };
    let bound = tracker.living_pods().filter(|other| other.node().is_some() && other.requests_gpus());
    bound.filter(is_selected).map(|other| full_name(&other.metadata)).collect()
}
