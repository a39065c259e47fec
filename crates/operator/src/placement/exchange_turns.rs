//! The turns of waiting pods in the search for pods to evict by the rules of quotas. Pure: callers
//! pass in the time.
//!
//! Each search examines all devices of a pool, so a reconcile searches only for some of the pods.
//! The first searches are in the order of the quotas, with one search for each quota even if many
//! pods of another quota wait. A pod whose rights have risen has a first search again. A search
//! without a result is repeated after a change in the pool, in turns:
//!
//! - Pods within a guarantee and pods that override quotas have turns of their own. Borrowers do
//!   not delay them.
//! - Each quota has the same number of turns. A quota with many waiting pods does not delay the
//!   others.
//! - Of one quota, the pod with the oldest search comes first.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_plan::quota::Rights;

use super::actions::Actions;
use super::quota_pass::QuotaTurn;
use crate::pods::PodObject;

/// Maximum number of waiting pods in the first searches of one reconcile, and in the repeated
/// searches of pods with equal rights. All pods of a gang count, because each is a search of all
/// devices. A larger gang is searched for alone.
const MAX_SEARCHES: usize = 8;
/// Time for which the search for a large gang is not repeated, for each pod beyond
/// [`MAX_SEARCHES`]. Each pod costs a search of all devices. Without the pause, a gang of 1,000
/// pods that fits nowhere would delay the releases of all other pods after each change.
const GANG_SEARCH_PAUSE: Duration = Duration::from_millis(10);
/// The same limit for the first pod of each quota in the first searches of one reconcile.
const MAX_WITH_EACH_QUOTA: usize = 16;
/// Time after which a search without a result is repeated even if nothing has changed. After this
/// time, changes that this module does not track, such as another pod's labels, take effect.
pub(super) const RECHECK_TIME: Duration = Duration::from_secs(60);
/// Time after which a search is repeated for a pod with rules about other pods or volumes. A change
/// of any node may affect such rules.
pub(super) const RULES_RECHECK_TIME: Duration = Duration::from_secs(10);
/// Delay before searches for more borrowers are repeated. It limits the load of many pods that no
/// eviction helps.
const REPEAT_DELAY: Duration = Duration::from_millis(100);

/// A waiting pod and a pool.
type PodInPool = (String, usize);
/// The account of a quota in a pool: index of the pool, and number of the account.
type Account = (usize, usize);

/// A waiting pod, or the waiting pods of a gang, that may need evictions in the pool of its turn.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seeker<'p> {
    /// Name of the pod, or of the pod that represents the gang.
    pub(super) name: &'p str,
    /// The pod with this name.
    pub(super) pod: &'p PodObject,
    pub(super) turn: QuotaTurn,
    /// Number of pods.
    pub(super) pods: usize,
    /// Whether the pods have rules about other pods or volumes.
    pub(super) has_rules: bool,
}

impl Seeker<'_> {
    fn key(&self) -> PodInPool {
        (self.name.to_owned(), self.turn.member.pool)
    }

    fn account(&self) -> Account {
        (self.turn.member.pool, self.turn.rank.quota)
    }

    fn uid(&self) -> &str {
        self.pod.metadata.uid.as_deref().unwrap_or_default()
    }
}

/// Whether pods to evict are searched for a waiting pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SearchTurn {
    /// Now.
    Now,
    /// In a later reconcile.
    Later,
    /// The last search found no pods, and nothing that matters has changed since.
    Futile {
        /// Whether only pods that disruption budgets protect could make room.
        is_protected: bool,
    },
}

/// What may change the result of a search in a pool.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct PoolChanges {
    /// The last recorded change.
    pub(super) version: u64,
    /// When the rules next treat a running or terminating pod differently.
    pub(super) next: Option<Duration>,
}

/// The last search for a waiting pod.
#[derive(Debug)]
struct Search {
    uid: String,
    pods: usize,
    account: Account,
    rights: Rights,
    has_precedence: bool,
    /// The position among all searches and deferrals.
    position: u64,
    /// Whether there was a search. Otherwise, the pod was deferred.
    is_done: bool,
    /// The result, unless the search is due again.
    failure: Option<Failure>,
}

/// A search that found no victims.
#[derive(Debug, Clone, Copy)]
struct Failure {
    version: u64,
    until: Duration,
    /// Until then, changes do not repeat the search.
    settled_until: Duration,
    is_protected: bool,
}

/// The searches by the rules of quotas, and the turns of one reconcile.
#[derive(Debug, Default)]
pub(super) struct ExchangeTurns {
    /// The last searches. Excludes pods for which victims were found.
    searches: BTreeMap<PodInPool, Search>,
    /// Number of searches and deferrals so far.
    count: u64,
    /// The last repeated search of each account.
    last_of_account: BTreeMap<Account, u64>,
    /// The pools of this reconcile.
    pools: Vec<PoolChanges>,
    /// Pods with a turn for a repeated search that have not used it.
    in_turn: BTreeSet<PodInPool>,
    /// Number of pods in first searches of this reconcile.
    first: usize,
    /// Accounts with a first search in this reconcile.
    first_of: BTreeSet<Account>,
    /// Whether another reconcile may help a pod immediately.
    is_urgent: bool,
    /// Whether borrowers wait for a repeated search.
    is_postponed: bool,
}

impl ExchangeTurns {
    /// Forgets pods that do not wait.
    pub(super) fn retain(&mut self, waiting: &BTreeMap<&str, &PodObject>) {
        let uid = |name: &str| Some(waiting.get(name)?.metadata.uid.as_deref().unwrap_or_default());
        self.searches.retain(|(name, _), search| uid(name) == Some(search.uid.as_str()));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.searches.is_empty()
    }

    /// Starts a reconcile: selects the pods whose searches are repeated.
    pub(super) fn start(&mut self, pools: Vec<PoolChanges>, up: Duration) {
        (self.pools, self.first, self.is_urgent, self.is_postponed) = (pools, 0, false, false);
        self.first_of.clear();
        let accounts: BTreeSet<Account> = self.searches.values().map(|search| search.account).collect();
        self.last_of_account.retain(|account, _| accounts.contains(account));
        let (preferred, borrowers): (Vec<_>, Vec<_>) = self
            .searches
            .iter()
            .filter(|((_, pool), search)| self.failure(*pool, search, up).is_none())
            .partition(|(_, search)| search.has_precedence);
        self.in_turn = [preferred, borrowers].into_iter().flat_map(|due| self.select(due)).collect();
    }

    /// Selects the searches to repeat: those of the accounts with the oldest searches, and one of
    /// each account before the second of another.
    fn select(&self, due: Vec<(&PodInPool, &Search)>) -> Vec<PodInPool> {
        let mut by_account: BTreeMap<Account, Vec<(u64, &PodInPool, usize)>> = BTreeMap::new();
        for (key, search) in due {
            by_account.entry(search.account).or_default().push((search.position, key, search.pods));
        }
        let mut order = Vec::new();
        for (account, mut searches) in by_account {
            let last = self.last_of_account.get(&account).copied().unwrap_or(0);
            searches.sort_unstable();
            let first = searches.into_iter().take(MAX_SEARCHES).enumerate();
            order.extend(first.map(|(number, (position, key, pods))| (number, last, position, key, pods)));
        }
        order.sort_unstable();
        let mut sum = 0_usize;
        let is_in_turn = |(.., pods): &(usize, u64, u64, &PodInPool, usize)| {
            let is_first = sum == 0;
            sum = sum.saturating_add(*pods);
            is_first || sum <= MAX_SEARCHES
        };
        order.into_iter().take_while(is_in_turn).map(|(.., key, _)| key.clone()).collect()
    }

    /// Returns the result of a search if it has failed, and nothing that matters has changed since.
    fn failure(&self, pool: usize, search: &Search, up: Duration) -> Option<Failure> {
        let changed = self.pools.get(pool)?.version;
        search.failure.filter(|failure| failure.settled_until > up || failure.until > up && changed <= failure.version)
    }

    /// Decides whether pods to evict are searched for a waiting pod now.
    pub(super) fn take_turn(&mut self, seeker: &Seeker<'_>, up: Duration) -> SearchTurn {
        let (key, rights) = (seeker.key(), (seeker.turn.rights, seeker.turn.has_precedence()));
        let known = self.searches.get(&key).filter(|search| search.uid == seeker.uid());
        let is_same = |search: &&Search| (search.rights, search.has_precedence) == rights && search.pods == seeker.pods;
        let failure = known.filter(is_same).and_then(|search| self.failure(key.1, search, up));
        if let Some(Failure { is_protected, .. }) = failure {
            return SearchTurn::Futile { is_protected };
        }
        let has_precedence = seeker.turn.has_precedence();
        let is_first = known.is_none_or(|search| has_precedence && !search.has_precedence);
        let is_done = known.is_some_and(|search| search.is_done);
        if is_first {
            let has_had_turn = self.first_of.contains(&seeker.account());
            let limit = if has_had_turn { MAX_SEARCHES } else { MAX_WITH_EACH_QUOTA };
            let sum = self.first.saturating_add(seeker.pods);
            if self.first == 0 || sum <= limit {
                self.first = sum;
                self.first_of.insert(seeker.account());
                return SearchTurn::Now;
            }
        } else if self.in_turn.remove(&key) {
            self.count += 1;
            self.last_of_account.insert(seeker.account(), self.count);
            return SearchTurn::Now;
        }
        self.is_urgent |= has_precedence || !is_done;
        self.is_postponed = true;
        let position = known.map(|search| search.position);
        self.record(seeker, position, is_done, None);
        SearchTurn::Later
    }

    fn record(&mut self, seeker: &Seeker<'_>, position: Option<u64>, is_done: bool, failure: Option<Failure>) {
        let position = position.unwrap_or_else(|| {
            self.count += 1;
            self.count
        });
        let search = Search {
            uid: seeker.uid().to_owned(),
            pods: seeker.pods,
            account: seeker.account(),
            rights: seeker.turn.rights,
            has_precedence: seeker.turn.has_precedence(),
            position,
            is_done,
            failure,
        };
        self.searches.insert(seeker.key(), search);
    }

    /// Records that no pods can be evicted for a waiting pod. `version` is the number of the last
    /// change. `is_protected` states whether only pods that disruption budgets protect could make
    /// room, and `left` is the time until the operator deletes them, if it does.
    pub(super) fn record_failure(
        &mut self,
        seeker: &Seeker<'_>,
        (is_protected, left): (bool, Option<Duration>),
        version: u64,
        up: Duration,
    ) {
        let recheck = if seeker.has_rules { RULES_RECHECK_TIME } else { RECHECK_TIME };
        let next = self.pools.get(seeker.turn.member.pool).and_then(|pool| pool.next);
        let until = up.saturating_add(left.map_or(recheck, |left| left.min(recheck)));
        let until = next.map_or(until, |next| next.min(until));
        let more = u32::try_from(seeker.pods.saturating_sub(MAX_SEARCHES)).unwrap_or(u32::MAX);
        let settled_until = up.saturating_add(GANG_SEARCH_PAUSE.saturating_mul(more));
        let until = until.max(settled_until);
        self.record(seeker, None, true, Some(Failure { version, until, settled_until, is_protected }));
    }

    /// Records that evictions free enough units for a pod.
    pub(super) fn record_success(&mut self, name: &str) {
        self.searches.retain(|(pod, _), _| pod != name);
    }

    /// Ends a reconcile, and records in `actions` when the next reconcile is due. Forgets the last
    /// search of a pod that had a turn but did not use it, for example because its quota is at its
    /// maximum or no longer exists. Otherwise such a pod could have a turn in each reconcile, and
    /// the turns of other pods would never come. If the pod needs a search later, it has a first
    /// search.
    pub(super) fn finish(&mut self, up: Duration, actions: &mut Actions) {
        for key in std::mem::take(&mut self.in_turn) {
            self.searches.remove(&key);
        }
        actions.more |= self.is_urgent;
        if self.is_postponed {
            actions.requeue_in(REPEAT_DELAY);
        }
        let due = self.searches.values().filter_map(|search| search.failure).map(|failure| failure.until);
        if let Some(next) = due.filter(|until| *until > up).min() {
            actions.requeue_in(next.saturating_sub(up));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_that_does_not_use_its_turn_gives_way_to_the_pods_of_other_quotas() {
        let search = |pods: usize, account: Account, position: u64| Search {
            uid: String::new(),
            pods,
            account,
            rights: Rights { is_within: true, is_over_max: false, is_within_max_later: true },
            has_precedence: true,
            position,
            is_done: true,
            failure: None,
        };
        let key = |name: &str, pool: usize| (name.to_owned(), pool);
        let mut turns = ExchangeTurns::default();
        // A gang waits at its quota's maximum, and a pod was in a pool that no longer exists.
        turns.searches.insert(key("gang", 0), search(10, (0, 0), 1));
        turns.searches.insert(key("elsewhere", 7), search(8, (7, 0), 2));
        turns.searches.insert(key("other", 0), search(1, (0, 1), 3));
        turns.last_of_account.insert((0, 1), 9);
        let mut in_turn = Vec::new();
        for _ in 0..3 {
            turns.start(vec![PoolChanges::default()], Duration::ZERO);
            in_turn.extend(turns.in_turn.iter().map(|(name, _)| name.clone()));
            turns.finish(Duration::ZERO, &mut Actions::default());
        }
        assert_eq!(in_turn, ["gang", "elsewhere", "other"]);
    }
}
