//! Selects the pods to evict for a waiting pod, by priority or by the rules of quotas.
use std::cell::{LazyCell, OnceCell};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_plan::ledger::{Holders, Ledger, Nomination, PendingPod, Preemption, Reservation};
use cleave_plan::quota::Kind;

use super::actions::{Actions, Eviction, GangId, NominationRecord, ProtectedPod, QuotaEviction};
use super::claims::PodClaims;
use super::cluster::ReconcileTime;
use super::constraints;
use super::eviction_rounds::{QuotaRound, UnitsByDevice, released_units};
use super::evictions::{Evictability, TERMINATION_TIME};
use super::exchange_turns::{SearchTurn, Seeker};
use super::gang_evictions::evicted_gangs;
use super::handover;
use super::nodes::Nodes;
use super::pod_tracker::PodTracker;
use super::preemptors::{Preemptors, SearchScope};
use super::quota_pass::{PodAndPreemption, QuotaPass, QuotaTurn, requested_grace};
use super::search::{Candidate, PlacementSearch, SearchKey};
use super::unbound::UnboundPods;
use super::unlisted::UnlistedUnits;
use super::verdict::{PreemptionProspect, Verdict};
use crate::pods::{PodObject, full_name};

mod gangs;

/// Maximum number of waiting pods per reconcile for which the operator searches for preemption
/// victims for the first time. Each search scans every device.
const MAX_NEW_PREEMPTORS: usize = 4;

/// Searches for pods to evict, within one reconcile.
pub(super) struct PreemptionSearch<'a> {
    nodes: &'a Nodes,
    tracker: &'a PodTracker,
    unlisted: &'a UnlistedUnits,
    evictability: Evictability<'a>,
    claims: &'a PodClaims,
    preemptors: &'a mut Preemptors,
    /// Pods with allocations. Computed only if a pod may preempt others.
    holders: OnceCell<Holders<'a>>,
    /// Released pods that are not bound, in pools with an enforced quota.
    unbound: UnboundPods<'a>,
    /// The lowest priority in `holders`. `i32::MAX` if `holders` is empty.
    lowest_holder: OnceCell<i32>,
    /// Waiting pods whose turn it is.
    pods_in_turn: BTreeSet<String>,
    /// Number of first searches in this reconcile.
    new: usize,
    /// Number of all searches in this reconcile.
    searches: u64,
    /// Properties of pods for which no preemption helps. Replicas of a workload have the same
    /// result.
    futile: BTreeSet<SearchKey<'a>>,
    /// The units of released pods by device. Computed only if evictions are delayed.
    releases: OnceCell<UnitsByDevice>,
    /// Whether no pods are evicted now, because the API server limits requests.
    is_paused: bool,
    /// Whether no pods are evicted by priority alone, because it is not known whether a quota
    /// guarantees their units.
    are_quotas_unknown: bool,
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

/// Why no pods are evicted for a waiting pod or gang now.
enum NoEvictions {
    /// No preemption helps, or the pod may not preempt others.
    Impossible,
    /// It is not the pod's turn, or the pod is about to get units without evictions.
    Later,
    /// Only evictions of pods that disruption budgets protect would free enough units. Contains the
    /// time until the operator deletes these pods, if it does.
    Protected(Option<Duration>),
    /// Evictions are delayed: earlier ones had no effect, or it is not known what a quota
    /// guarantees.
    Delayed,
}

impl<'a> PreemptionSearch<'a> {
    pub(super) fn new(
        (nodes, tracker, unlisted): (&'a Nodes, &'a PodTracker, &'a UnlistedUnits),
        evictability: Evictability<'a>,
        claims: &'a PodClaims,
        preemptors: &'a mut Preemptors,
        up: Duration,
    ) -> Self {
        let (pods_in_turn, is_paused) = (preemptors.pods_in_turn(up), evictability.is_paused(up));
        let (holders, futile, unbound) = (OnceCell::new(), BTreeSet::new(), UnboundPods::new());
        Self {
            nodes,
            tracker,
            unlisted,
            evictability,
            claims,
            preemptors,
            holders,
            unbound,
            lowest_holder: OnceCell::new(),
            pods_in_turn,
            new: 0,
            searches: 0,
            futile,
            releases: OnceCell::new(),
            is_paused,
            are_quotas_unknown: false,
            up,
        }
    }

    /// Lets the rules of quotas evict released pods that are not bound.
    pub(super) fn with_unbound(mut self, unbound: UnboundPods<'a>) -> Self {
        self.unbound = unbound;
        self
    }

    /// Prevents evictions by priority alone while it is not known what a quota guarantees.
    pub(super) fn with_unknown_quotas(mut self, are_unknown: bool) -> Self {
        self.are_quotas_unknown = are_unknown;
        self
    }

    /// Ends the reconcile, and records in `actions` when the next reconcile is due.
    pub(super) fn finish(&mut self, actions: &mut Actions) {
        self.preemptors.finish_reconcile(self.up, actions);
    }

    /// If evictions free enough units for a pod at the placement gate, evicts the victims and
    /// nominates the pod. Keeps an earlier nomination while its victims terminate. Returns the
    /// prospect that evictions free units for the pod.
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
            let of_turn = (verdict, pause);
            let prospect = self.preempt_by_quota(ledger, search, candidate, of_turn, (pass, turn), actions);
            actions.preemption_searches = self.searches;
            return prospect;
        }
        if let Some(pause) = pause {
            actions.requeue_in(pause);
        }
        let prospect = match self.find_victims(ledger, search, candidate, (verdict, pause.is_some())) {
            Ok(Preemption { node, takes, victims }) => {
                // After that time, a victim that does not terminate counts as running.
                actions.requeue_in(TERMINATION_TIME);
                self.add_evictions(&node, victims, &candidate.name, actions);
                self.preemptors.record_success(&candidate.name);
                search.nominate(candidate, &node);
                // Ignore errors: the ledger refuses only nominations for pods with a claim, and
                // waiting pods have none.
                let nomination = Nomination { priority: candidate.plan_pod.priority, node, takes };
                let _ = ledger.nominate(&candidate.name, nomination);
                PreemptionProspect::Nominated
            }
            Err(NoEvictions::Impossible | NoEvictions::Protected(_) | NoEvictions::Delayed) => {
                self.withdraw_nomination(ledger, search, &candidate.name);
                PreemptionProspect::Impossible
            }
            Err(NoEvictions::Later) if ledger.nominations().contains_key(&candidate.name) => {
                PreemptionProspect::Nominated
            }
            Err(NoEvictions::Later) => PreemptionProspect::Unknown,
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

    /// Finds the pods to evict for a waiting pod. The list of victims may be empty.
    fn find_victims(
        &mut self,
        ledger: &Ledger,
        search: &PlacementSearch<'a>,
        candidate: &'a Candidate<'a>,
        (verdict, is_paused): (&Verdict, bool),
    ) -> Result<Preemption, NoEvictions> {
        let Candidate { name, pod, plan_pod, .. } = candidate;
        if verdict.permanent_obstacle().is_some() || pod.spec.preemption_policy.as_deref() == Some("Never") {
            return Err(NoEvictions::Impossible);
        }
        let nominated = ledger.nominations().get(name);
        let scope = self.preemptors.search_scope(name, self.up);
        let key = search.key(candidate);
        // The scheduler may refuse the node, because the volume cannot be created on the node. The
        // evictions would have no effect.
        if key.has_unbound_volume() {
            return Err(NoEvictions::Impossible);
        }
        if nominated.is_none() {
            if scope == SearchScope::Nothing {
                if self.preemptors.is_failure_shared(name) {
                    self.futile.insert(key);
                }
                return Err(NoEvictions::Impossible);
            }
            if self.futile.contains(&key) {
                self.preemptors.record_failure(name, pod, (key.has_rules(), true), self.up);
                return Err(NoEvictions::Impossible);
            }
        }
        if !self.may_preempt(plan_pod.priority) {
            return Err(NoEvictions::Impossible);
        }
        let tracker = self.tracker;
        let kept = LazyCell::new(|| pods_to_keep(tracker, search, pod));
        if let Some(nomination) = nominated {
            let targets = search.preemption_nodes(ledger, candidate, |node| node == nomination.node);
            let found = ledger.preempt(candidate.pending_pod(), targets, self.holders(), &kept);
            if let Some(found) = found.filter(|found| found.victims.is_empty()) {
                return Ok(found);
            }
        }
        if self.is_paused || is_paused {
            return Err(NoEvictions::Later);
        }
        if self.are_quotas_unknown || self.preemptors.is_preemption_delayed(name, self.up) {
            return Err(NoEvictions::Delayed);
        }
        let is_turn = if self.preemptors.has_waited(name) {
            self.pods_in_turn.contains(name)
        } else {
            self.new += 1;
            self.new <= MAX_NEW_PREEMPTORS
        };
        if !is_turn {
            self.preemptors.defer(name, pod);
            return Err(NoEvictions::Later);
        }
        self.searches += 1;
        let since = match scope {
            SearchScope::ChangedSince(version) if !key.has_rules() && nominated.is_none() => Some(version),
            _ => None,
        };
        let is_searched = |node: &str| since.is_none_or(|version| self.preemptors.has_node_changed(node, version));
        let targets = search.preemption_nodes(ledger, candidate, is_searched);
        match ledger.preempt(candidate.pending_pod(), targets, self.holders(), &kept) {
            Some(found) => Ok(found),
            None => {
                let eligible = search.eligible_nodes(candidate).into_iter();
                let is_shared = !search.has_lasting_predecessor(ledger, candidate, eligible);
                self.preemptors.record_failure(name, pod, (key.has_rules(), is_shared), self.up);
                if is_shared {
                    self.futile.insert(key);
                }
                Err(NoEvictions::Impossible)
            }
        }
    }

    /// Like [`Self::preempt`], but follows the rules of quotas.
    fn preempt_by_quota(
        &mut self,
        ledger: &mut Ledger,
        search: &mut PlacementSearch<'a>,
        candidate: &'a Candidate<'a>,
        (verdict, pause): (&Verdict, Option<Duration>),
        (pass, turn): (&mut QuotaPass<'_>, QuotaTurn),
        actions: &mut Actions,
    ) -> PreemptionProspect {
        if let Some(pause) = pause {
            actions.requeue_in(pause);
        }
        let is_paused = self.is_paused || pause.is_some() || self.awaits_answer(ledger, actions, &candidate.name);
        let found = self.find_exchange(ledger, search, candidate, (verdict, is_paused), (pass, turn), actions);
        self.conclude_exchange(ledger, search, &[candidate], (pass, turn), found, actions)
    }

    /// Applies the result of a search by the rules of quotas for a waiting pod, or for all waiting
    /// pods of a gang.
    fn conclude_exchange(
        &mut self,
        ledger: &mut Ledger,
        search: &mut PlacementSearch<'a>,
        pods: &[&'a Candidate<'a>],
        (pass, turn): (&mut QuotaPass<'_>, QuotaTurn),
        found: Result<Exchange<'a>, NoEvictions>,
        actions: &mut Actions,
    ) -> PreemptionProspect {
        if matches!(found, Err(NoEvictions::Later | NoEvictions::Protected(_) | NoEvictions::Delayed)) {
            pods.iter().for_each(|one| self.preemptors.continue_protection(one.pod, self.up));
        }
        let are_nominated =
            |ledger: &Ledger| pods.iter().all(|one| ledger.nominations().contains_key(one.name.as_str()));
        let prospect = match found {
            Ok(exchange) => {
                self.apply_exchange(ledger, search, (pass, turn), exchange, actions);
                return PreemptionProspect::Nominated;
            }
            Err(NoEvictions::Later) if are_nominated(ledger) => {
                pass.keep_nominations(ledger, turn.member, pods.iter().map(|one| one.name.as_str()));
                return PreemptionProspect::Nominated;
            }
            Err(NoEvictions::Later) => PreemptionProspect::Unknown,
            Err(NoEvictions::Protected(_)) => PreemptionProspect::Protected,
            Err(NoEvictions::Impossible | NoEvictions::Delayed) => PreemptionProspect::Impossible,
        };
        pods.iter().for_each(|one| self.withdraw_nomination(ledger, search, &one.name));
        prospect
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
        actions.requeue_in(TERMINATION_TIME);
        let (message, cap) = (pass.eviction_message(kind, turn.member), pass.grace_cap(turn.member));
        let mut victims = pass.with_gang_members(found.iter().flat_map(|(_, found)| &found.victims));
        let with_budget = self.pods_with_budget(&victims);
        // The API server may refuse to evict pods with a disruption budget, and pods whose eviction
        // has failed before. After a refusal, the operator does not evict the others.
        let uid = |pod: &str| self.claims.uid(pod).unwrap_or_default().to_owned();
        let may_be_refused =
            |pod: &String| with_budget.contains(pod) || self.evictability.records().has_failed(&uid(pod));
        victims.sort_by_key(|pod| !may_be_refused(pod));
        let named: Vec<PodAndPreemption<'_>> =
            found.iter().map(|(candidate, found)| (candidate.name.as_str(), found)).collect();
        pass.nominate(turn.member, &named, &victims);
        let to = pass.quota_of(turn.member, &preemptor);
        let objects = self.pods_with_names(&victims);
        let mut evictions = Vec::new();
        for pod in victims {
            let (uid, may_be_refused) = (uid(&pod), may_be_refused(&pod));
            let object = objects.get(&pod);
            let grace = object.and_then(|object| requested_grace(object, cap, force));
            let gang = object.and_then(|object| GangId::of(object));
            let (from, to) = (pass.quota_of(turn.member, &pod), to.clone());
            let quota = Some(QuotaEviction { kind, from, to, grace, force, message: message.clone() });
            evictions.push(Eviction { pod, uid, preemptor: preemptor.clone(), may_be_refused, quota, gang });
        }
        self.mark_evicted(&evictions);
        if !evictions.is_empty() {
            let victims = evictions.iter().map(|one| one.uid.clone()).collect();
            let rooms = found.iter().map(|(_, found)| found);
            let round = QuotaRound::new(turn.has_precedence(), rooms, victims, (self.tracker, ledger));
            self.preemptors.start_round(&preemptor, round);
        }
        let until = self.evictability.now().saturating_add(cap.as_secs()).saturating_add(TERMINATION_TIME.as_secs());
        let mut evicts = evicted_gangs(&evictions);
        for (candidate, found) in found {
            if !evictions.is_empty() {
                // One of the pods records the evicted gangs.
                let evicts = std::mem::take(&mut evicts);
                actions.kept.push(NominationRecord {
                    pod: candidate.name.clone(),
                    uid: candidate.pod.uid().unwrap_or_default(),
                    preemptor: preemptor.clone(),
                    room: handover::annotated_nomination(&found, evicts, until),
                });
            }
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
        (verdict, is_paused): (&Verdict, bool),
        (pass, turn): (&QuotaPass<'_>, QuotaTurn),
        actions: &mut Actions,
    ) -> Result<Exchange<'a>, NoEvictions> {
        let Candidate { name, pod, .. } = candidate;
        let (tracker, key) = (self.tracker, search.key(candidate));
        let is_futile = verdict.permanent_obstacle().is_some() || key.has_unbound_volume();
        if is_futile || !turn.rights.is_within_max_later && pod.spec.preemption_policy.as_deref() == Some("Never") {
            return Err(NoEvictions::Impossible);
        }
        let kept = pods_of_affinity(tracker, pod);
        let nomination = ledger.nominations().get(name).filter(|_| turn.rights.is_within_max_later);
        if let Some(found) =
            nomination.and_then(|of| self.find_on_nominated_node(ledger, search, candidate, of, (pass, turn), &kept))
        {
            return Ok(Exchange { kind: Kind::Priority, found: vec![(candidate, found)], force: false });
        }
        if pod.spec.preemption_policy.as_deref() == Some("Never") {
            return Err(NoEvictions::Impossible);
        }
        if is_paused {
            return Err(NoEvictions::Later);
        }
        if self.is_exchange_delayed(ledger, name, &turn) {
            return Err(NoEvictions::Delayed);
        }
        let seeker = Seeker { name, pod, turn, pods: 1, has_rules: key.has_rules() };
        if self.futile.contains(&key) {
            self.preemptors.record_failed_exchange(&seeker, (false, None), self.up);
            return Err(NoEvictions::Impossible);
        }
        self.take_exchange_turn(&seeker)?;
        let found = self.search_exchange(ledger, search, candidate, (pass, turn), &kept, actions);
        self.record_exchange(&seeker, found)
    }

    /// Finds units that a nominated pod gets without further evictions: the nominated units, or
    /// other units of the node. Other units may cost more, so the rules must permit that the pod
    /// gets these.
    fn find_on_nominated_node(
        &self,
        ledger: &Ledger,
        search: &PlacementSearch<'a>,
        candidate: &'a Candidate<'a>,
        nomination: &Nomination,
        (pass, turn): (&QuotaPass<'_>, QuotaTurn),
        kept: &BTreeSet<String>,
    ) -> Option<Preemption> {
        let (name, member) = (candidate.name.as_str(), turn.member);
        let targets = search.preemption_nodes(ledger, candidate, |node| node == nomination.node);
        let ending = pass.ending(member, self.holders());
        // The priorities of the holders express the order of evictions.
        let pending = PendingPod { priority: i32::MAX, ..candidate.pending_pod() };
        let are_nominated =
            |found: &Preemption| found.victims.is_empty() && sorted(&found.takes) == sorted(&nomination.takes);
        let are_permitted = |found: &Preemption| {
            found.victims.is_empty() && pass.kinds(&turn).any(|kind| pass.is_legal(kind, member, &[(name, found)]))
        };
        let same = ledger.preempt_legally(pending, targets.clone(), (&ending, kept), Some(&are_nominated));
        same.or_else(|| ledger.preempt_legally(pending, targets, (&ending, kept), Some(&are_permitted)))
    }

    /// Returns whether no pods are evicted for a waiting pod or gang now, because earlier evictions
    /// had no effect. Evictions had an effect if the operator has since released other pods to the
    /// freed units. Releases to other units or devices of the node do not count.
    fn is_exchange_delayed(&mut self, ledger: &Ledger, name: &str, turn: &QuotaTurn) -> bool {
        let (tracker, releases) = (self.tracker, &self.releases);
        let is_taken =
            |round: &QuotaRound| round.is_taken(ledger, releases.get_or_init(|| released_units(tracker, ledger)));
        self.preemptors.is_exchange_delayed((name, turn), is_taken, self.up)
    }

    /// Decides whether pods to evict for a waiting pod or gang are searched for now in a pool.
    ///
    /// # Errors
    /// Returns `Later` if other pods come first. Returns the result of the last search if it failed
    /// and nothing has changed.
    fn take_exchange_turn(&mut self, seeker: &Seeker<'_>) -> Result<(), NoEvictions> {
        match self.preemptors.take_exchange_turn(seeker, self.up) {
            SearchTurn::Now => {
                self.searches += 1;
                Ok(())
            }
            SearchTurn::Later => Err(NoEvictions::Later),
            SearchTurn::Futile { is_protected: true } => Err(NoEvictions::Protected(None)),
            SearchTurn::Futile { is_protected: false } => Err(NoEvictions::Impossible),
        }
    }

    /// Records the result of a search by the rules of quotas, and returns it.
    fn record_exchange(
        &mut self,
        seeker: &Seeker<'_>,
        found: Result<Exchange<'a>, NoEvictions>,
    ) -> Result<Exchange<'a>, NoEvictions> {
        let failure = match found {
            Err(NoEvictions::Protected(left)) => Some((true, left)),
            Err(NoEvictions::Impossible) => Some((false, None)),
            _ => None,
        };
        if let Some(failure) = failure {
            self.preemptors.record_failed_exchange(seeker, failure, self.up);
        }
        found
    }

    /// Searches for pods to evict for a waiting pod by the rules of quotas.
    fn search_exchange(
        &mut self,
        ledger: &Ledger,
        search: &mut PlacementSearch<'a>,
        candidate: &'a Candidate<'a>,
        (pass, turn): (&QuotaPass<'_>, QuotaTurn),
        kept: &BTreeSet<String>,
        actions: &mut Actions,
    ) -> Result<Exchange<'a>, NoEvictions> {
        let (name, member, key) = (&candidate.name, turn.member, search.key(candidate));
        // The order of evictions is in the priorities of the holders.
        let pending = PendingPod { priority: i32::MAX, ..candidate.pending_pod() };
        for kind in pass.kinds(&turn) {
            let found = if kind == Kind::Priority
                && turn.rights.is_over_max
                && let Ok(fits) = search.find(ledger, candidate)
            {
                // Units are free, so only the use of the pod's own quota must fall.
                let place = fits.iter().next().map(|fit| (fit.node().to_owned(), fit.reservations().to_vec()));
                let free = place.map(|(node, takes)| Preemption { node, takes, victims: Vec::new() });
                free.and_then(|free| pass.victims_for_max(member, self.holders(), free))
            } else {
                let holders = pass.holders(kind, member, self.holders());
                let targets = search.preemption_nodes(ledger, candidate, |_| true);
                let is_legal = |found: &Preemption| {
                    pass.is_legal(kind, member, &[(name.as_str(), found)])
                        && self.is_within_budgets(pass, &[(name.as_str(), found)])
                };
                ledger.preempt_legally(pending, targets, (&holders, kept), Some(&is_legal))
            };
            if let Some(found) = found {
                return Ok(Exchange { kind, found: vec![(candidate, found)], force: false });
            }
        }
        let result = self.find_protected(ledger, search, candidate, (pass, turn), kept, actions);
        if matches!(result, Err(NoEvictions::Impossible)) {
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
    ) -> Result<Exchange<'a>, NoEvictions> {
        if !pass.kinds(&turn).any(|kind| kind == Kind::Reclaim) {
            return Err(NoEvictions::Impossible);
        }
        let holders = pass.holders(Kind::Reclaim, turn.member, &self.holders_ignoring_budgets());
        let targets = search.preemption_nodes(ledger, candidate, |_| true);
        let name = candidate.name.as_str();
        let is_legal = |found: &Preemption| pass.is_legal(Kind::Reclaim, turn.member, &[(name, found)]);
        let pending = PendingPod { priority: i32::MAX, ..candidate.pending_pod() };
        let Some(found) = ledger.preempt_legally(pending, targets, (&holders, kept), Some(&is_legal)) else {
            return Err(NoEvictions::Impossible);
        };
        self.await_budgets((pass, turn), vec![(candidate, found)], actions)
    }

    /// Decides whether the operator deletes borrowers that disruption budgets protect, after it
    /// waited for [`QuotaPass::budget_patience`].
    fn await_budgets(
        &mut self,
        (pass, turn): (&QuotaPass<'_>, QuotaTurn),
        found: Vec<(&'a Candidate<'a>, Preemption)>,
        actions: &mut Actions,
    ) -> Result<Exchange<'a>, NoEvictions> {
        let patience = pass.budget_patience(turn.member);
        let waiting = found.iter().map(|(one, _)| one.pod);
        match patience.map(|patience| self.patience_left(patience, waiting, actions)) {
            Some(Duration::ZERO) => Ok(Exchange { kind: Kind::Reclaim, found, force: true }),
            left => {
                left.into_iter().for_each(|left| actions.requeue_in(left));
                Err(NoEvictions::Protected(left))
            }
        }
    }

    /// Returns whether disruption budgets allow the evictions of all of these victims, and of the
    /// rest of their gangs, which can run on other nodes.
    fn is_within_budgets(&self, pass: &QuotaPass<'_>, found: &[PodAndPreemption<'_>]) -> bool {
        let victims: BTreeSet<&String> = found.iter().flat_map(|(_, found)| &found.victims).collect();
        let all = pass.with_gang_members(victims.iter().copied());
        if all.len() == victims.len() && found.len() == 1 {
            // The search has considered the budgets of these pods.
            return true;
        }
        let (holders, all): (_, BTreeSet<&str>) = (self.holders(), all.iter().map(String::as_str).collect());
        let mut counts: BTreeMap<usize, u32> = BTreeMap::new();
        let leaving = holders.all().filter(|(_, pod, holder)| all.contains(pod) && !holder.ending);
        leaving.filter_map(|(.., holder)| holder.budget).for_each(|budget| *counts.entry(budget).or_default() += 1);
        counts.iter().all(|(budget, count)| holders.budgets.get(*budget).is_some_and(|allowed| count <= allowed))
    }

    /// Returns the pods with allocations, as if no disruption budget protected a pod.
    fn holders_ignoring_budgets(&self) -> Holders<'a> {
        let is_ending = |node: &str, pod: &str| self.claims.is_ending(node, pod, self.up);
        let mut all = self.nodes.holders(self.tracker, &self.evictability.ignoring_budgets(), self.unlisted, is_ending);
        all.unbound.clone_from(&self.holders().unbound);
        // Pods that are evicted in this reconcile.
        for (node, pods) in self.holders().pods.iter().chain(&self.holders().blocked) {
            let evicted: Vec<String> =
                pods.iter().filter(|(_, holder)| holder.ending).map(|(name, _)| name.clone()).collect();
            all.evict(node, &evicted);
        }
        all
    }

    /// Returns how long disruption budgets may still block evictions for a waiting pod, or for the
    /// waiting pods of a gang. The time is counted for the waiting pod, so it does not restart when
    /// the budgets protect other pods. In a gang, the pod with the least time left counts.
    fn patience_left<'p>(
        &mut self,
        patience: Duration,
        waiting: impl Iterator<Item = &'p PodObject>,
        actions: &mut Actions,
    ) -> Duration {
        let now = ReconcileTime { up: self.up, epoch: self.evictability.now() };
        let mut left = patience;
        for pod in waiting {
            let uid = pod.uid().unwrap_or_default();
            let created = pod.metadata.creation_timestamp.as_ref();
            let created = created.map_or(0, |time| u64::try_from(time.0.as_second()).unwrap_or(0));
            // Budgets blocked no eviction for the pod before the pod existed.
            let recorded = pod.protected_since.map(|since| since.max(created));
            let since = self.preemptors.protected_since(&uid, recorded, now);
            left = left.min(patience.saturating_sub(Duration::from_secs(now.epoch.saturating_sub(since))));
            if recorded != Some(since) {
                actions.protected.push(ProtectedPod { pod: full_name(&pod.metadata), uid, since });
            }
        }
        left
    }

    /// Marks pods as evicted for the rest of the reconcile.
    fn mark_evicted(&mut self, evictions: &[Eviction]) {
        let Some(holders) = self.holders.get_mut() else { return };
        let evicted: BTreeSet<&str> = evictions.iter().map(|eviction| eviction.pod.as_str()).collect();
        let mut by_node: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (node, pod, _) in holders.all().filter(|(_, pod, _)| evicted.contains(pod)) {
            by_node.entry(node.to_owned()).or_default().push(pod.to_owned());
        }
        by_node.iter().for_each(|(node, pods)| holders.evict(node, pods));
    }

    fn holders(&self) -> &Holders<'a> {
        let is_ending = |node: &str, pod: &str| self.claims.is_ending(node, pod, self.up);
        self.holders.get_or_init(|| Holders {
            unbound: self.unbound.clone(),
            ..self.nodes.holders(self.tracker, &self.evictability, self.unlisted, is_ending)
        })
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

    /// Returns the pods of which a disruption budget limits the eviction.
    fn pods_with_budget(&self, pods: &[String]) -> BTreeSet<String> {
        let pods: BTreeSet<&str> = pods.iter().map(String::as_str).collect();
        let limited = self.holders().all().filter(|(_, pod, holder)| holder.budget.is_some() && pods.contains(pod));
        limited.map(|(_, pod, _)| pod.to_owned()).collect()
    }

    /// Returns whether no pods are evicted for a pod before the API server has answered: in this
    /// reconcile, pods are evicted for it, or the rest of a gang whose units are nominated for it.
    fn awaits_answer(&self, ledger: &Ledger, actions: &Actions, pod: &str) -> bool {
        let nomination = ledger.nominations().get(pod);
        let uses_nominated = |eviction: &Eviction| {
            let units = nomination.map(|of| (of, ledger.units_of(&eviction.pod)));
            units.is_some_and(|(of, units)| {
                let here = units.iter().filter(|(node, _)| *node == of.node).flat_map(|(_, units)| units);
                here.into_iter().any(|(_, device, _)| of.takes.iter().any(|take| take.device == *device))
            })
        };
        actions.evictions.iter().any(|eviction| {
            eviction.preemptor == pod
                || self.evictability.records().is_requested(&eviction.uid) && uses_nominated(eviction)
        })
    }

    /// Returns the pods with these names.
    fn pods_with_names(&self, names: &[String]) -> BTreeMap<String, &'a PodObject> {
        if names.is_empty() {
            return BTreeMap::new();
        }
        let names: BTreeSet<&str> = names.iter().map(String::as_str).collect();
        let living = self.tracker.living_pods().filter(|pod| pod.requests_gpus());
        living.map(|pod| (full_name(&pod.metadata), pod)).filter(|(name, _)| names.contains(name.as_str())).collect()
    }

    /// Adds the evictions of these victims on a node for the pod `preemptor`. Victims with a
    /// disruption budget come first, because the API server may refuse to evict them. After a
    /// refusal, the operator does not evict the other victims.
    fn add_evictions(&mut self, node: &str, mut victims: Vec<String>, preemptor: &str, actions: &mut Actions) {
        let Some(holders) = self.holders.get_mut() else { return };
        let has_budget = |pod: &String| holders.get(node, pod).is_some_and(|holder| holder.budget.is_some());
        let with_budget: BTreeSet<String> = victims.iter().filter(|pod| has_budget(pod)).cloned().collect();
        victims.sort_by_key(|pod| !with_budget.contains(pod));
        holders.evict(node, &victims);
        actions.evictions.extend(victims.into_iter().map(|pod| {
            let uid = self.claims.uid(&pod).unwrap_or_default().to_owned();
            let may_be_refused = with_budget.contains(&pod);
            Eviction { pod, uid, preemptor: preemptor.to_owned(), may_be_refused, quota: None, gang: None }
        }));
    }
}

/// Returns units in a fixed order, so that they can be compared.
fn sorted(takes: &[Reservation]) -> Vec<Reservation> {
    let mut takes = takes.to_vec();
    takes.sort_unstable();
    takes
}

/// Returns the pods that are not evicted for a pod: those that its affinity needs, and those that
/// quotas count.
fn pods_to_keep(tracker: &PodTracker, search: &PlacementSearch<'_>, pod: &PodObject) -> BTreeSet<String> {
    let mut kept = pods_of_affinity(tracker, pod);
    kept.extend(search.pods_of_quotas());
    kept
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
