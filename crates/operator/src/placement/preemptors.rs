//! Records the preemption searches of waiting pods, so that each pod has its turn. For up to a
//! minute, a search without a result is repeated only on nodes that have changed. Pure: callers
//! pass in the time.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::actions::Actions;
use super::cluster::ReconcileTime;
use crate::pods::PodObject;
use crate::read::BudgetObject;

/// Maximum number of waiting pods per reconcile for which the operator repeats the search for
/// preemption victims.
const MAX_REPEATED_SEARCHES: usize = 8;
/// Time after which a search without a result is repeated even if nothing has changed. After this
/// time, changes that this module does not track, such as another pod's labels, take effect.
pub(super) const RECHECK_TIME: Duration = Duration::from_secs(60);
/// Time after which a search is repeated for a pod with rules about other pods or volumes. A change
/// of any node may affect such rules.
const RULES_RECHECK_TIME: Duration = Duration::from_secs(10);
/// Time after which a search by the rules of quotas is repeated even if nothing has changed. After
/// this time, the end of a minimum run time takes effect.
const EXCHANGE_RECHECK_TIME: Duration = Duration::from_secs(2);
/// Time for which the search for a large gang is not repeated, for each pod beyond
/// [`MAX_REPEATED_SEARCHES`]. Each pod costs a search of all devices. Without the pause, a gang of
/// 1,000 pods that fits nowhere would delay the releases of all other pods after each change.
const GANG_SEARCH_PAUSE: Duration = Duration::from_millis(10);
/// Number of rounds of evictions for a waiting pod that are not delayed.
const UNDELAYED_ROUNDS: u32 = 3;
/// First delay between two rounds of evictions for a pod that still waits. Each further round
/// doubles the delay.
const FIRST_ROUND_DELAY: Duration = Duration::from_secs(60);
/// Maximum delay between two rounds of evictions for a pod that still waits.
const MAX_ROUND_DELAY: Duration = Duration::from_secs(3600);

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
    /// Searches by the rules of quotas, by pod and pool. Excludes pods for which victims were
    /// found.
    exchanges: BTreeMap<(String, usize), ExchangeSearch>,
    /// Waiting pods for which pods were evicted, by name.
    rounds: BTreeMap<String, EvictionRounds>,
    /// Waiting pods within their guarantee for which disruption budgets block evictions, by UID:
    /// since when, in seconds since the Unix epoch, and when this was last found. The time is
    /// counted for the waiting pod. Otherwise the time would restart whenever a protected pod is
    /// replaced.
    protected: BTreeMap<String, (u64, Duration)>,
    /// When this process first searched for protected pods. Until [`RECHECK_TIME`] later, this
    /// process continues the times that an earlier leader recorded.
    first_protected: Option<Duration>,
}

/// The evictions for one waiting pod. Evictions have no effect if the waiting pod's rules then
/// refuse the node. Without a delay, the operator would repeatedly evict the victims' replacements.
#[derive(Debug)]
struct EvictionRounds {
    count: u32,
    /// The reconcile that decided the last evictions.
    reconcile: u64,
    /// Whether one of the last evictions did not succeed. The next evictions complete the round, so
    /// they are neither counted nor delayed.
    is_incomplete: bool,
    /// No pods are evicted for the waiting pod before this time, unless `is_incomplete` is set.
    until: Duration,
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

/// The last search by the rules of quotas for a waiting pod.
#[derive(Debug, Clone, Copy)]
struct ExchangeSearch {
    /// The reconcile that last searched, or that first deferred the pod.
    turn: u64,
    /// The result. `None` if the pod was deferred.
    failed: Option<FailedExchange>,
    /// Number of pods: those of the gang that wait, or 1.
    pods: usize,
}

/// A search by the rules of quotas that found no victims.
#[derive(Debug, Clone, Copy)]
struct FailedExchange {
    version: u64,
    until: Duration,
    /// Until then, changes do not repeat the search.
    settled_until: Duration,
    /// Whether only evictions of pods that disruption budgets protect would free enough units.
    is_protected: bool,
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
        self.rounds.retain(|name, _| present.contains_key(name.as_str()));
        self.waiting.retain(|name, one| present.get(name.as_str()).is_some_and(|pod| one.id == uid_and_version(pod)));
        if self.waiting.is_empty() {
            self.changed.clear();
        }
        self.exchanges.retain(|(name, _), _| present.contains_key(name.as_str()));
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
        self.exchanges.retain(|(pod, _), _| pod != name);
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

    /// Returns the pods and pools whose turn it is for a repeated search by the rules of quotas:
    /// those with the oldest searches, among those that another search may help.
    pub(super) fn exchanges_in_turn(&self, up: Duration) -> BTreeSet<(String, usize)> {
        let due = self.exchanges.iter().filter(|(_, search)| self.result_of(search, up).is_none());
        let mut due: Vec<(u64, &(String, usize), usize)> =
            due.map(|(key, search)| (search.turn, key, search.pods)).collect();
        due.sort_unstable();
        let mut pods = 0_usize;
        // All pods of a gang count. A larger gang is searched for alone.
        let is_in_turn = |(.., of): &(u64, &(String, usize), usize)| {
            let is_first = pods == 0;
            pods = pods.saturating_add(*of);
            is_first || pods <= MAX_REPEATED_SEARCHES
        };
        due.into_iter().take_while(is_in_turn).map(|(_, key, _)| key.clone()).collect()
    }

    /// Returns whether victims were searched for a pod in a pool, or the pod was deferred.
    pub(super) fn has_exchange(&self, key: &(String, usize)) -> bool {
        self.exchanges.contains_key(key)
    }

    /// Records that by the rules of quotas no pods can be evicted in a pool for a pod, or for this
    /// number of pods of a gang.
    pub(super) fn record_failed_exchange(
        &mut self,
        key: (String, usize),
        (pods, is_protected): (usize, bool),
        up: Duration,
    ) {
        let more = u32::try_from(pods.saturating_sub(MAX_REPEATED_SEARCHES)).unwrap_or(u32::MAX);
        let settled_until = up.saturating_add(GANG_SEARCH_PAUSE.saturating_mul(more));
        let until = settled_until.max(up.saturating_add(EXCHANGE_RECHECK_TIME));
        let failed = Some(FailedExchange { version: self.version, until, settled_until, is_protected });
        self.exchanges.insert(key, ExchangeSearch { turn: self.reconciles, failed, pods });
    }

    /// Returns whether only evictions of protected pods would free enough units for a pod in a
    /// pool. Returns `None` unless a recent search there found no victims, and nothing has changed
    /// since.
    pub(super) fn failed_exchange(&self, key: &(String, usize), up: Duration) -> Option<bool> {
        self.exchanges.get(key).and_then(|search| self.result_of(search, up))
    }

    fn result_of(&self, search: &ExchangeSearch, up: Duration) -> Option<bool> {
        let failed = search.failed?;
        let is_same = self.version == failed.version && self.last_cluster_change <= failed.version;
        (failed.settled_until > up || failed.until > up && is_same).then_some(failed.is_protected)
    }

    /// Records that a pod, or this number of pods of a gang, must wait for a turn in a pool.
    pub(super) fn defer_exchange(&mut self, key: (String, usize), pods: usize) {
        self.exchanges.entry(key).or_insert(ExchangeSearch { turn: self.reconciles, failed: None, pods });
        self.is_deferred = true;
    }

    /// Records an eviction for a waiting pod. The evictions of one reconcile are one round.
    pub(super) fn record_eviction(&mut self, preemptor: &str, succeeded: bool, up: Duration) {
        let new = EvictionRounds { count: 0, reconcile: 0, is_incomplete: false, until: Duration::ZERO };
        let rounds = self.rounds.entry(preemptor.to_owned()).or_insert(new);
        if !succeeded {
            rounds.is_incomplete = true;
            return;
        }
        let is_counted = rounds.reconcile == self.reconciles;
        rounds.reconcile = self.reconciles;
        if is_counted || std::mem::take(&mut rounds.is_incomplete) {
            return;
        }
        rounds.count = rounds.count.saturating_add(1);
        if let Some(more) = rounds.count.checked_sub(UNDELAYED_ROUNDS) {
            let delay = FIRST_ROUND_DELAY.saturating_mul(2_u32.saturating_pow(more)).min(MAX_ROUND_DELAY);
            rounds.until = up.saturating_add(delay);
        }
    }

    /// Returns whether no pods are evicted for a pod now, because earlier evictions had no effect.
    pub(super) fn is_preemption_delayed(&self, pod: &str, up: Duration) -> bool {
        self.rounds.get(pod).is_some_and(|rounds| !rounds.is_incomplete && rounds.until > up)
    }

    /// Records that the pod must wait for its turn.
    pub(super) fn defer(&mut self, name: &str, pod: &PodObject) {
        let new = || Preemptor { id: uid_and_version(pod), turn: self.reconciles, futile_search: None };
        self.waiting.entry(name.to_owned()).or_insert_with(new);
        self.is_deferred = true;
    }

    /// Ends a reconcile, and records in `actions` when the next reconcile is due.
    pub(super) fn finish_reconcile(&self, up: Duration, actions: &mut Actions) {
        actions.more |= self.is_deferred;
        actions.awaits_budgets = !self.waiting.is_empty();
        let rechecks = self.waiting.values().filter_map(|one| one.futile_search).map(|futile| futile.until);
        let delays = self.rounds.values().map(|rounds| rounds.until);
        let exchanges = self.exchanges.values().filter_map(|search| search.failed).map(|failed| failed.until);
        // This reconcile has searched again for a pod whose recheck is due, or the pod waits for
        // something else.
        if let Some(recheck) = rechecks.chain(delays).chain(exchanges).filter(|until| *until > up).min() {
            actions.requeue_in(recheck.saturating_sub(up));
        }
    }
}

fn uid_and_version(pod: &PodObject) -> (Option<String>, Option<String>) {
    (pod.uid(), pod.metadata.resource_version.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise each change of a node would repeat 1,000 searches of all devices.
    #[test]
    fn the_search_for_a_large_gang_is_not_repeated_at_once_after_a_change() {
        let seconds = Duration::from_secs;
        for (pods, pause) in [(1, 0), (8, 0), (1000, 9)] {
            let (mut preemptors, key) = (Preemptors::default(), ("team/head".to_owned(), 0));
            preemptors.record_failed_exchange(key.clone(), (pods, false), seconds(100));
            assert_eq!(preemptors.failed_exchange(&key, seconds(101)), Some(false), "{pods}: nothing has changed");
            preemptors.record_node_change("n1");
            assert_eq!(preemptors.failed_exchange(&key, seconds(100 + pause)), (pause > 0).then_some(false), "{pods}");
            assert_eq!(preemptors.failed_exchange(&key, seconds(110)), None, "{pods}");
        }
    }
}
