//! Records the preemption searches of waiting pods, so that each pod has its turn. For up to a
//! minute, a search without a result is repeated only on nodes that have changed. Pure: callers
//! pass in the time.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::actions::{Actions, Eviction};
use super::cluster::ReconcileTime;
use super::eviction_rounds::{EvictionRounds, QuotaRound};
use super::exchange_turns::{ExchangeTurns, PoolChanges, RECHECK_TIME, RULES_RECHECK_TIME, SearchTurn, Seeker};
use super::quota_pass::QuotaTurn;
use super::quotas::{PoolWorld, QuotaWorlds};
use crate::pods::PodObject;
use crate::read::BudgetObject;

/// Maximum number of waiting pods per reconcile for which the operator repeats the search for
/// preemption victims.
const MAX_REPEATED_SEARCHES: usize = 8;

/// Waiting pods that may preempt others, and the changes since the last searches.
#[derive(Debug, Default)]
pub(super) struct Preemptors {
    /// Number of reconciles so far.
    reconciles: u64,
    /// Number of recorded changes of nodes, pods and budgets so far.
    version: u64,
    /// The last change that may help every pod.
    last_cluster_change: u64,
    /// The last change of each node.
    changed: BTreeMap<String, u64>,
    /// Waiting pods, by name. Excludes pods whose victims terminate.
    waiting: BTreeMap<String, Preemptor>,
    /// The state of the disruption budgets at the last update.
    budgets: BTreeMap<String, BudgetState>,
    /// Whether another reconcile may help a waiting pod that had no turn in this reconcile.
    is_deferred: bool,
    /// Searches by the rules of quotas.
    exchanges: ExchangeTurns,
    /// Evictions for waiting pods.
    rounds: EvictionRounds,
    /// Waiting pods within their guarantee for which disruption budgets block evictions, by UID:
    /// since when, in seconds since the Unix epoch, and when this was last found. The time is
    /// counted for the waiting pod. Otherwise the time would restart whenever a protected pod is
    /// replaced.
    protected: BTreeMap<String, (u64, Duration)>,
    /// When this process first searched for protected pods. Until [`RECHECK_TIME`] later, this
    /// process continues the times that an earlier leader recorded.
    first_protected: Option<Duration>,
}

/// A waiting pod.
#[derive(Debug)]
struct Preemptor {
    /// UID and resource version.
    id: (Option<String>, Option<String>),
    /// The reconcile that last searched for this pod, or that first saw the pod.
    turn: u64,
    /// The last search that found no victims.
    futile_search: Option<FutileSearch>,
}

#[derive(Debug, Clone, Copy)]
struct FutileSearch {
    version: u64,
    until: Duration,
    /// Whether the result also applies to equal pods.
    is_shared: bool,
}

/// The nodes on which a preemption may help a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SearchScope {
    /// No node has changed since the last search.
    Nothing,
    /// Nodes that have changed since this version.
    ChangedSince(u64),
    /// All nodes.
    Everything,
}

/// The fields that determine how many evictions a budget allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct BudgetState {
    generation: Option<i64>,
    allowed: u32,
    ignores_unready: bool,
}

impl Preemptors {
    /// Starts a reconcile. Forgets pods that do not wait or have changed.
    pub(super) fn update(&mut self, waiting: &[(String, &PodObject)]) {
        self.reconciles += 1;
        self.is_deferred = false;
        if self.waiting.is_empty() && self.rounds.is_empty() && self.exchanges.is_empty() {
            return;
        }
        let present: BTreeMap<&str, &PodObject> = waiting.iter().map(|(name, pod)| (name.as_str(), *pod)).collect();
        self.rounds.retain(|name| present.contains_key(name));
        self.exchanges.retain(&present);
        self.waiting.retain(|name, one| present.get(name.as_str()).is_some_and(|pod| one.id == uid_and_version(pod)));
        if self.waiting.is_empty() && self.exchanges.is_empty() {
            self.changed.clear();
        }
    }

    /// Records a change of a node that may make preemption possible on the node.
    pub(super) fn record_node_change(&mut self, node: &str) {
        if !self.waiting.is_empty() || !self.exchanges.is_empty() {
            self.version += 1;
            self.changed.insert(node.to_owned(), self.version);
        }
    }

    /// Records a change that may make preemption possible anywhere.
    pub(super) fn record_cluster_change(&mut self) {
        self.version += 1;
        self.last_cluster_change = self.version;
    }

    /// Compares the disruption budgets with their previous state. Records a change that may allow
    /// more evictions.
    pub(super) fn update_budgets(&mut self, budgets: &[Arc<BudgetObject>]) {
        let state = |budget: &Arc<BudgetObject>| {
            let name = format!(
                "{}/{}",
                budget.metadata.namespace.as_deref().unwrap_or_default(),
                budget.metadata.name.as_deref().unwrap_or_default()
            );
            let (allowed, ignores_unready) = (budget.allowed_evictions(), budget.ignores_unready());
            (name, BudgetState { generation: budget.metadata.generation, allowed, ignores_unready })
        };
        let now: BTreeMap<String, BudgetState> = budgets.iter().map(state).collect();
        let helps = |(name, before): (&String, &BudgetState)| {
            now.get(name).is_none_or(|now| {
                now.generation != before.generation
                    || now.allowed > before.allowed
                    || now.ignores_unready && !before.ignores_unready
            })
        };
        if self.budgets.iter().any(helps) {
            self.record_cluster_change();
        }
        self.budgets = now;
    }

    /// Returns the waiting pods whose turn it is. Among the pods that another search may help, the
    /// pods with the oldest searches have their turn.
    pub(super) fn pods_in_turn(&self, up: Duration) -> BTreeSet<String> {
        let due = self.waiting.iter().filter(|(_, one)| self.scope_of(one, up) != SearchScope::Nothing);
        let mut due: Vec<(u64, &String)> = due.map(|(name, one)| (one.turn, name)).collect();
        due.sort_unstable();
        due.into_iter().take(MAX_REPEATED_SEARCHES).map(|(_, name)| name.clone()).collect()
    }

    /// Returns whether the pod waited in an earlier reconcile.
    pub(super) fn has_waited(&self, pod: &str) -> bool {
        self.waiting.contains_key(pod)
    }

    /// Returns the nodes on which a preemption may help the pod.
    pub(super) fn search_scope(&self, pod: &str, up: Duration) -> SearchScope {
        self.waiting.get(pod).map_or(SearchScope::Everything, |one| self.scope_of(one, up))
    }

    fn scope_of(&self, one: &Preemptor, up: Duration) -> SearchScope {
        match one.futile_search {
            Some(FutileSearch { version, until, .. }) if until > up && self.last_cluster_change <= version => {
                if self.version > version { SearchScope::ChangedSince(version) } else { SearchScope::Nothing }
            }
            _ => SearchScope::Everything,
        }
    }

    /// Returns whether no preemption helps the pod or equal pods.
    pub(super) fn is_failure_shared(&self, pod: &str) -> bool {
        self.waiting.get(pod).and_then(|one| one.futile_search).is_some_and(|futile| futile.is_shared)
    }

    /// Returns whether a node has changed since this version.
    pub(super) fn has_node_changed(&self, node: &str, version: u64) -> bool {
        self.changed.get(node).is_some_and(|changed| *changed > version)
    }

    /// Records that evictions free enough units for the pod.
    pub(super) fn record_success(&mut self, name: &str) {
        self.waiting.remove(name);
        self.exchanges.record_success(name);
    }

    /// Records that disruption budgets block evictions for the guaranteed units of the waiting pod
    /// with this UID. Returns when this began, in seconds since the Unix epoch. `recorded` is the
    /// time that an earlier leader recorded.
    pub(super) fn protected_since(&mut self, uid: &str, recorded: Option<u64>, now: ReconcileTime) -> u64 {
        let ReconcileTime { up, epoch } = now;
        self.protected.retain(|_, (_, found)| found.saturating_add(RECHECK_TIME) >= up);
        let first = *self.first_protected.get_or_insert(up);
        // After this time, the record is of an earlier wait that is over.
        let recorded = recorded.filter(|_| up <= first.saturating_add(RECHECK_TIME));
        let new = (recorded.map_or(epoch, |recorded| recorded.min(epoch)), up);
        let (since, found) = self.protected.entry(uid.to_owned()).or_insert(new);
        *found = up;
        *since
    }

    /// Records that nothing is known to have changed since disruption budgets blocked evictions for
    /// a waiting pod, so the time continues.
    pub(super) fn continue_protection(&mut self, pod: &PodObject, up: Duration) {
        let known = self.protected.get_mut(pod.metadata.uid.as_deref().unwrap_or_default());
        if let Some((_, found)) = known.filter(|(_, found)| found.saturating_add(RECHECK_TIME) >= up) {
            *found = up;
        }
    }

    /// Records that no preemption helps the pod. `has_rules` states whether the pod has rules about
    /// other pods or volumes, and `is_shared` whether the result also applies to equal pods.
    pub(super) fn record_failure(
        &mut self,
        name: &str,
        pod: &PodObject,
        (has_rules, is_shared): (bool, bool),
        up: Duration,
    ) {
        let time = if has_rules { RULES_RECHECK_TIME } else { RECHECK_TIME };
        let futile_search = Some(FutileSearch { version: self.version, until: up.saturating_add(time), is_shared });
        self.waiting
            .insert(name.to_owned(), Preemptor { id: uid_and_version(pod), turn: self.reconciles, futile_search });
    }

    /// Starts the searches of a reconcile by the rules of quotas.
    pub(super) fn start_exchanges(&mut self, worlds: Option<&QuotaWorlds>, now: ReconcileTime) {
        let pools =
            worlds.into_iter().flat_map(|worlds| worlds.pools.iter().enumerate().map(move |pool| (worlds, pool)));
        let changes = |(worlds, (at, pool)): (&QuotaWorlds, (usize, &PoolWorld))| {
            let changed = self.changed.iter().filter(|(node, _)| worlds.has_node(at, node));
            let version = changed.map(|(_, version)| *version).max().unwrap_or(0).max(self.last_cluster_change);
            let next = pool
                .next_change
                .map(|next| now.up.saturating_add(Duration::from_secs(next.0.saturating_sub(now.epoch))));
            PoolChanges { version, next }
        };
        let pools = pools.map(changes).collect();
        self.exchanges.start(pools, now.up);
    }

    /// Decides whether pods to evict by the rules of quotas are searched for a pod now.
    pub(super) fn take_exchange_turn(&mut self, seeker: &Seeker<'_>, up: Duration) -> SearchTurn {
        self.exchanges.take_turn(seeker, up)
    }

    /// Records that by the rules of quotas no pods can be evicted for a pod. `is_protected` states
    /// whether only pods that disruption budgets protect could make room, and `left` is the time
    /// until the operator deletes them, if it does.
    pub(super) fn record_failed_exchange(
        &mut self,
        seeker: &Seeker<'_>,
        (is_protected, left): (bool, Option<Duration>),
        up: Duration,
    ) {
        self.exchanges.record_failure(seeker, (is_protected, left), self.version, up);
    }

    /// Records that this reconcile decided evictions for a waiting pod by the rules of quotas.
    pub(super) fn start_round(&mut self, preemptor: &str, round: QuotaRound) {
        self.rounds.start_by_quota(preemptor, round, self.reconciles);
    }

    /// Records an eviction for a waiting pod. The evictions of one reconcile are one round. The
    /// rest of a gang that an earlier reconcile began to evict does not belong to a round.
    pub(super) fn record_eviction(&mut self, eviction: &Eviction, succeeded: bool, up: Duration) {
        let Eviction { uid, preemptor, quota, .. } = eviction;
        if quota.is_none() || self.rounds.has_decided(preemptor, uid, self.reconciles) {
            self.rounds.record(preemptor, succeeded, (self.reconciles, up));
        }
    }

    /// Returns whether no pods are evicted for a pod now, because earlier evictions had no effect.
    pub(super) fn is_preemption_delayed(&self, pod: &str, up: Duration) -> bool {
        self.rounds.is_delayed(pod, up)
    }

    /// Like [`Self::is_preemption_delayed`], but by the rules of quotas. Evictions are not delayed
    /// if they had an effect, but not for this pod: `is_taken` returns whether the operator itself
    /// has given the units of a round to other pods. A pod whose rights have risen is not delayed
    /// either.
    pub(super) fn is_exchange_delayed(
        &mut self,
        (pod, turn): (&str, &QuotaTurn),
        is_taken: impl FnOnce(&QuotaRound) -> bool,
        up: Duration,
    ) -> bool {
        if !self.rounds.is_delayed(pod, up) {
            return false;
        }
        let last = self.rounds.last_by_quota(pod);
        let is_over = last.is_some_and(|last| !last.has_precedence && turn.has_precedence() || is_taken(last));
        if is_over {
            self.rounds.forget(pod);
        }
        !is_over
    }

    /// Records that the pod must wait for its turn.
    pub(super) fn defer(&mut self, name: &str, pod: &PodObject) {
        let new = || Preemptor { id: uid_and_version(pod), turn: self.reconciles, futile_search: None };
        self.waiting.entry(name.to_owned()).or_insert_with(new);
        self.is_deferred = true;
    }

    /// Ends a reconcile, and records in `actions` when the next reconcile is due.
    pub(super) fn finish_reconcile(&mut self, up: Duration, actions: &mut Actions) {
        self.exchanges.finish(up, actions);
        actions.more |= self.is_deferred;
        actions.awaits_budgets = !self.waiting.is_empty();
        let rechecks = self.waiting.values().filter_map(|one| one.futile_search).map(|futile| futile.until);
        // This reconcile has searched again for a pod whose recheck is due, or the pod waits for
        // something else.
        if let Some(recheck) = rechecks.chain(self.rounds.delays()).filter(|until| *until > up).min() {
            actions.requeue_in(recheck.saturating_sub(up));
        }
    }
}

fn uid_and_version(pod: &PodObject) -> (Option<String>, Option<String>) {
    (pod.uid(), pod.metadata.resource_version.clone())
}
