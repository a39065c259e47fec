//! Decides which pods to evict so that another pod fits.
//!
//! For each GPU, the search starts as if all candidates, the pods that may be evicted, were
//! evicted. Then it keeps each candidate if the waiting pod still fits, the most important first.
//! The other candidates are the victims. Rules about rights judge the complete set of victims,
//! because judging single victims leads to endless exchanges. The pods of a gang are all kept or
//! all evicted.
use std::cell::OnceCell;
use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::amount::Amount;
use super::class::{Class, Share, Since};
use super::gang::Part;
use super::room::Rank;
use super::state::State;
use super::world::{NEVER_EVICTED, PodId};

/// Why pods are evicted for another pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// The pod is within its quota's guarantee, and evicts borrowing pods of other quotas.
    Reclaim,
    /// The pod borrows, and evicts borrowing pods of other quotas. After the eviction, the shares
    /// of these quotas are still at least as high as the share of the pod's quota.
    FairShare,
    /// The pod evicts pods of lower priority of its own quota, or of no enforced quota if its own
    /// is not enforced. If its priority overrides quotas, it evicts pods of lower priority of all
    /// enforced quotas.
    Priority,
}

impl Kind {
    /// Returns the name of the kind, as in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reclaim => "Reclaim",
            Self::FairShare => "FairShare",
            Self::Priority => "Priority",
        }
    }

    /// Returns the kind with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Reclaim, Self::FairShare, Self::Priority].into_iter().find(|kind| kind.name() == name)
    }
}

/// Maximum number of candidates that are considered if a quota would exceed its maximum. The
/// candidates are the least important pods.
const MAX_CANDIDATES_OVER_MAXIMUM: usize = 256;

/// The GPUs for a unit, and the pods to evict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Way {
    pub(super) parts: Vec<Part>,
    /// Victims, the most important first.
    pub(super) victims: Vec<PodId>,
}

/// Result of a search.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Found {
    Way(Kind, Way),
    /// Only the eviction of pods that disruption budgets protect would help.
    Protected,
    Nothing,
}

/// A pod or a gang that may be evicted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    /// The pod, or the first pod of the gang.
    pub(super) id: PodId,
    /// Amount that its eviction frees on the examined GPU.
    on: Amount,
    pub(super) account: usize,
    /// Charge of the pod, or of all running pods of the gang.
    pub(super) charge: Amount,
    priority: i32,
    since: Since,
    is_protected: bool,
    pub(super) class: Class,
    share: Share,
}

/// Cost of a set of victims. A lower cost is better.
type VictimsCost = (usize, bool, Reverse<Option<Share>>, Option<i32>, Amount, i128, usize, Reverse<Option<Since>>);

/// A search for one waiting pod.
pub(super) struct Search<'s, 'w> {
    pub(super) state: &'s State<'w>,
    /// Head of the waiting unit.
    pub(super) taker: PodId,
    pub(super) account: usize,
    /// Charge of the unit.
    pub(super) charge: Amount,
    /// Free capacity of all GPUs for a pod of each class, computed when needed: index 0 for pods
    /// that borrow, index 1 for pods within a guarantee.
    pub(super) free: [OnceCell<i128>; 2],
    /// Rank of the unit, if the rank does not depend on the GPU.
    rank: Option<Rank>,
}

impl<'s, 'w> Search<'s, 'w> {
    pub(super) fn new(state: &'s State<'w>, taker: PodId) -> Self {
        let (accounts, account) = (&state.accounts, state.accounts.account_of(taker));
        let parts: Vec<Part> = accounts.gangs().unit(taker).iter().map(|&id| (id, 0)).collect();
        let rank = accounts.quota(account).cells().is_none().then(|| state.rank_of(&parts));
        let free = [OnceCell::new(), OnceCell::new()];
        Self { state, taker, account, charge: accounts.charge(taker), free, rank }
    }

    /// Finds pods to evict for a pod. `is_over_max` means that the pod's quota would exceed its
    /// maximum now.
    pub(super) fn find_way(&self, is_within: bool, is_over_max: bool) -> Found {
        let mut is_protected = false;
        let rights = if is_within { Kind::Reclaim } else { Kind::FairShare };
        let is_enforced = self.state.accounts.quota(self.account).is_enforced();
        for kind in [(!is_over_max && is_enforced).then_some(rights), Some(Kind::Priority)].into_iter().flatten() {
            match self.best_way(kind) {
                Some((true, way)) => return Found::Way(kind, way),
                Some((false, _)) => is_protected = true,
                None => {}
            }
        }
        if is_protected { Found::Protected } else { Found::Nothing }
    }

    /// Returns the rank of the unit on GPUs.
    pub(super) fn rank_of(&self, parts: &[Part]) -> Rank {
        self.rank.unwrap_or_else(|| self.state.rank_of(parts))
    }

    /// Returns the best way of a kind, and true if this way evicts no protected pod.
    fn best_way(&self, kind: Kind) -> Option<(bool, Way)> {
        let own: Vec<Candidate> = match kind {
            Kind::Priority => self.candidates_by_priority(),
            _ => Vec::new(),
        };
        if self.state.accounts.gangs().of(self.taker).is_some() {
            let (parts, victims) = self.gang_way(kind, own)?;
            let way = self.way_of(parts, &victims);
            return self.meets_rules_after(kind, &way).then(|| (victims.iter().all(|one| !one.is_protected), way));
        }
        if kind == Kind::Priority
            && own.is_empty()
            && !self.state.accounts.has_cells()
            && !self.state.has_terminating_pods()
        {
            return None;
        }
        let pod = self.state.world.pod(self.taker);
        let own_on = self.freed_by(&own);
        let is_final = self.state.accounts.has_cells();
        let mut ways: Vec<(VictimsCost, usize, Vec<Candidate>)> = Vec::new();
        let mut has_seen_free = false;
        for gpu in (0..self.state.gpus.len()).filter(|&gpu| pod.may_use(gpu)) {
            // Without cells, the cheapest way is the best, so keep only this way.
            let best = ways.first().filter(|_| !is_final).map(|(cost, ..)| cost);
            if !self.may_be_better(kind, gpu, &own_on, best) {
                continue;
            }
            if kind == Kind::Priority
                && !is_final
                && self.rank.is_some()
                && !own_on.contains_key(&gpu)
                && !self.state.is_special(gpu)
            {
                // All such GPUs have enough free capacity, so the victims are the same for each of
                // them.
                if std::mem::replace(&mut has_seen_free, true) {
                    continue;
                }
            }
            let Some(victims) = self.victims_on(kind, gpu, &own) else { continue };
            let cost = victims_cost(&victims);
            if is_final || best.is_none_or(|best| cost < *best) {
                ways.truncate(if is_final { usize::MAX } else { 0 });
                ways.push((cost, gpu, victims));
            }
        }
        ways.sort_by(|(one, a, _), (other, b, _)| (one, a).cmp(&(other, b)));
        ways.into_iter().find_map(|((protected, ..), gpu, victims)| {
            let way = self.way_of(vec![(self.taker, gpu)], &victims);
            self.meets_rules_after(kind, &way).then_some((protected == 0, way))
        })
    }

    /// Returns whether evictions could make the pod fit on a GPU at a lower cost than the best way
    /// so far. The check is quick: `true` can be wrong, but `false` is always right.
    fn may_be_better(
        &self,
        kind: Kind,
        gpu: usize,
        own_on: &BTreeMap<usize, i128>,
        best: Option<&VictimsCost>,
    ) -> bool {
        let Some(rank) = self.rank else { return true };
        let missing = i128::from(self.charge) - self.state.gpus[gpu].free_later(&rank);
        if missing <= 0 {
            return true;
        }
        if best.is_some_and(|&(protected, has_victims, ..)| protected == 0 && !has_victims) {
            return false;
        }
        if kind == Kind::Priority {
            return own_on.get(&gpu).is_some_and(|&own| own >= missing);
        }
        let accounts = &self.state.accounts;
        let (mut freed, mut largest) = (0, None);
        for &id in &self.state.gpus[gpu].pods {
            let account = accounts.account_of(id);
            if account != self.account && accounts.class(id) == Some(Class::Over) {
                freed += i128::from(self.state.charge(id));
                largest = largest.max(Some(accounts.share(account, Amount::ZERO, Amount::ZERO)));
            }
        }
        // The victims' smallest share orders the ways without protected pods.
        let is_worse = best.is_some_and(|&(protected, _, Reverse(share), ..)| protected == 0 && largest < share);
        freed >= missing && !is_worse
    }

    /// Returns a way. The victims include all running pods of each gang.
    fn way_of(&self, parts: Vec<Part>, victims: &[Candidate]) -> Way {
        Way { parts, victims: self.pods_of(victims) }
    }

    /// Returns all pods of the candidates.
    pub(super) fn pods_of(&self, candidates: &[Candidate]) -> Vec<PodId> {
        candidates.iter().flat_map(|one| self.running_with(one.id)).collect()
    }

    /// Returns the running pods of a pod's gang, or only the pod if it has no gang.
    pub(super) fn running_with(&self, id: PodId) -> impl Iterator<Item = PodId> {
        self.state.accounts.counted_with(id).filter(|&pod| self.state.gpu_of(pod).is_some())
    }

    /// Returns whether the rules are met in the state after an exchange. In a pool with cells, an
    /// exchange can change the owners of GPUs, and therefore the classes of other pods.
    fn meets_rules_after(&self, kind: Kind, way: &Way) -> bool {
        if !self.state.accounts.has_cells() {
            return true;
        }
        let mut after = self.state.clone();
        way.victims.iter().for_each(|victim| after.evict(*victim));
        after.nominate(&way.parts, self.rank_of(&way.parts));
        let share = |account: usize| after.accounts.share(account, Amount::ZERO, Amount::ZERO);
        let is_fair = |victim: &PodId| share(self.account) <= share(self.state.accounts.account_of(*victim));
        let holds = match kind {
            Kind::Reclaim => after.accounts.class(self.taker) == Some(Class::In),
            Kind::FairShare => way.victims.iter().all(is_fair),
            Kind::Priority => true,
        };
        holds && self.state.keeps_guarantees_in(&after)
    }

    /// Returns the victims on one GPU, or `None` if no legal set of victims frees enough capacity.
    fn victims_on(&self, kind: Kind, gpu: usize, own: &[Candidate]) -> Option<Vec<Candidate>> {
        if self.state.gpus[gpu].size() < self.charge {
            return None;
        }
        let parts = [(self.taker, gpu)];
        let rank = self.rank_of(&parts);
        match kind {
            Kind::Reclaim | Kind::FairShare => {
                let is_of_cells = self.state.accounts.quota(self.account).cells().is_some();
                // With cells, the pod has a right only to GPUs of its quota and GPUs without an
                // owner.
                if kind == Kind::Reclaim && is_of_cells && rank.class == Class::Over {
                    return None;
                }
                let candidates = self.candidates_on(gpu, kind);
                let free = self.state.gpus[gpu].free_later(&rank);
                let victims = self.victims_among(free, &candidates, None)?;
                if self.is_legal(kind, &parts, &rank, &victims) {
                    return Some(victims);
                }
                match kind {
                    Kind::FairShare => self.single_victim(free, &parts, &rank, &candidates),
                    Kind::Reclaim | Kind::Priority => None,
                }
            }
            Kind::Priority => {
                let on_gpu = |one: &Candidate| Candidate { on: self.freed_on(one.id, gpu), ..*one };
                let own: Vec<Candidate> = match self.spare() {
                    Some(_) => own.iter().map(on_gpu).collect(),
                    // Evicting pods on other GPUs would not help.
                    None => self.candidates_by_priority_on(gpu),
                };
                self.priority_way(&parts, &rank, &own).or_else(|| {
                    let over: Vec<Candidate> = own.iter().copied().filter(|one| one.class == Class::Over).collect();
                    self.priority_way(&parts, &rank, &over)
                })
            }
        }
    }

    /// Returns the amount of a GPU that a pod or its gang uses.
    fn freed_on(&self, id: PodId, gpu: usize) -> Amount {
        let on = self.running_with(id).filter(|&pod| self.state.gpu_of(pod) == Some(gpu));
        on.map(|pod| self.state.charge(pod)).sum()
    }

    /// Returns the unused part of the quota's maximum if the unit were released without evictions.
    /// The result is negative, or `None` if the maximum would not be exceeded.
    pub(super) fn spare(&self) -> Option<i128> {
        let (accounts, account) = (&self.state.accounts, self.account);
        let after = accounts.used(account).plus(self.charge);
        let quota = accounts.quota(account);
        let max = quota.max().filter(|max| quota.is_enforced() && after > *max)?;
        Some(i128::from(max) - i128::from(after))
    }

    fn priority_way(&self, parts: &[Part], rank: &Rank, own: &[Candidate]) -> Option<Vec<Candidate>> {
        let spare = self.spare();
        let free = self.state.gpus[parts[0].1].free_later(rank);
        let victims = self.victims_among(free, own, spare)?;
        self.is_legal(Kind::Priority, parts, rank, &victims).then_some(victims)
    }

    /// Returns the candidates to evict so that the pod fits on a GPU. The most important candidate
    /// must be first. `spare` is the unused part of the quota's maximum, negative if the maximum is
    /// exceeded.
    fn victims_among(&self, free: i128, candidates: &[Candidate], spare: Option<i128>) -> Option<Vec<Candidate>> {
        let on = |all: i128, one: &Candidate| all + i128::from(one.on);
        let sum = |all: i128, one: &Candidate| all + i128::from(one.charge);
        let mut free = candidates.iter().fold(free - i128::from(self.charge), on);
        let mut spare = spare.map(|spare| candidates.iter().fold(spare, sum));
        if free < 0 || spare.is_some_and(|spare| spare < 0) {
            return None;
        }
        let leaves = |one: &&Candidate| {
            let (on, charge) = (i128::from(one.on), i128::from(one.charge));
            let stays = free >= on && spare.is_none_or(|spare| spare >= charge);
            if stays {
                free -= on;
                spare = spare.map(|spare| spare - charge);
            }
            !stays
        };
        Some(candidates.iter().filter(leaves).copied().collect())
    }

    /// Returns one candidate that may be evicted and frees enough capacity alone. Prefers
    /// candidates that no disruption budget protects, then the lowest priority, the smallest, and
    /// the youngest.
    fn single_victim(
        &self,
        free: i128,
        parts: &[Part],
        rank: &Rank,
        candidates: &[Candidate],
    ) -> Option<Vec<Candidate>> {
        let helps = |one: &&Candidate| free + i128::from(one.on) >= i128::from(self.charge);
        let may_leave = |one: &&Candidate| self.is_legal(Kind::FairShare, parts, rank, &[**one]);
        let one = candidates.iter().filter(helps).filter(may_leave).min_by_key(|one| self.single_victim_key(one));
        one.map(|one| vec![*one])
    }

    /// Returns the position of a candidate in the order in which single victims are tried.
    pub(super) fn single_victim_key(&self, one: &Candidate) -> impl Ord + use<'s, 'w> {
        let name = &self.state.world.pod(one.id).name;
        (one.is_protected, one.priority, one.charge, Reverse((one.since, name)))
    }

    /// Returns the pods of other quotas on a GPU that may be evicted, the most important first.
    fn candidates_on(&self, gpu: usize, kind: Kind) -> Vec<Candidate> {
        let pods = self.state.gpus[gpu].pods.iter();
        let first_on =
            |id: &PodId| self.running_with(*id).find(|&pod| self.state.gpu_of(pod) == Some(gpu)) == Some(*id);
        let of_others = pods.copied().filter(first_on).filter_map(|id| self.candidate_of_others(id, kind));
        self.sorted_by_importance(of_others.map(|one| Candidate { on: self.freed_on(one.id, gpu), ..one }))
    }

    /// Returns all pods of other quotas that may be evicted, the most important first.
    pub(super) fn candidates_of_others(&self, kind: Kind) -> Vec<Candidate> {
        let first = |id: &PodId| self.running_with(*id).next() == Some(*id);
        let pods = (0..self.state.world.pods.len()).map(PodId).filter(|&id| self.state.gpu_of(id).is_some());
        self.sorted_by_importance(pods.filter(first).filter_map(|id| self.candidate_of_others(id, kind)))
    }

    fn candidate_of_others(&self, id: PodId, kind: Kind) -> Option<Candidate> {
        let (accounts, settings) = (&self.state.accounts, &self.state.world.settings);
        let account = accounts.account_of(id);
        if account == self.account || accounts.class(id) != Some(Class::Over) || !accounts.quota(account).is_enforced()
        {
            return None;
        }
        let (min_runtime, patience) = match kind {
            Kind::Reclaim => (settings.min_runtime_reclaim, settings.budget_patience),
            _ => (settings.min_runtime_fair_share, None),
        };
        // Only a higher priority evicts pods whose priority overrides quotas.
        let one = self.candidate(id, patience).filter(|_| accounts.overriding(id).is_none())?;
        (one.since.at.0.saturating_add(min_runtime) <= self.state.now.0).then_some(one)
    }

    /// Returns the pods of lower priority that may be evicted by priority alone. These are the pods
    /// of the waiting pod's quota. If this quota is not enforced, these are all pods without an
    /// enforced quota. If the waiting pod's priority overrides quotas, these are the pods of all
    /// enforced quotas.
    fn candidates_by_priority(&self) -> Vec<Candidate> {
        let accounts = &self.state.accounts;
        let of_account = |account: usize| {
            self.is_evictable_by_priority(account).then(|| accounts.members(account)).into_iter().flatten()
        };
        let first = |id: &PodId| self.running_with(*id).next() == Some(*id);
        let pods = (0..accounts.len()).flat_map(of_account).filter(first);
        let mut own = self.sorted_by_importance(pods.filter_map(|id| self.candidate_by_priority(id)));
        if self.spare().is_some() {
            own.drain(..own.len().saturating_sub(MAX_CANDIDATES_OVER_MAXIMUM));
        }
        own
    }

    /// Returns the pods on a GPU that may be evicted by priority alone.
    fn candidates_by_priority_on(&self, gpu: usize) -> Vec<Candidate> {
        let first_on =
            |id: &PodId| self.running_with(*id).find(|&pod| self.state.gpu_of(pod) == Some(gpu)) == Some(*id);
        let pods = self.state.gpus[gpu].pods.iter().copied().filter(first_on);
        let own = pods.filter(|&id| self.is_evictable_by_priority(self.state.accounts.account_of(id)));
        let own = own.filter_map(|id| self.candidate_by_priority(id));
        self.sorted_by_importance(own.map(|one| Candidate { on: self.freed_on(one.id, gpu), ..one }))
    }

    /// Returns whether pods of an account may be evicted by priority alone.
    fn is_evictable_by_priority(&self, account: usize) -> bool {
        let accounts = &self.state.accounts;
        let is_enforced = accounts.quota(account).is_enforced();
        if !accounts.quota(self.account).is_enforced() {
            return !is_enforced;
        }
        account == self.account || is_enforced && self.overrides_others()
    }

    /// Returns whether pods of other quotas may be evicted by priority alone. At the quota's
    /// maximum, only evicting pods of the same quota helps.
    fn overrides_others(&self) -> bool {
        self.state.accounts.overriding(self.taker).is_some() && self.spare().is_none()
    }

    fn candidate_by_priority(&self, id: PodId) -> Option<Candidate> {
        self.candidate(id, None).filter(|one| one.priority < self.state.accounts.priority(self.taker))
    }

    /// Returns a pod or its gang as a candidate, if it runs and is not a component of the system.
    fn candidate(&self, id: PodId, patience: Option<u64>) -> Option<Candidate> {
        let (state, accounts) = (self.state, &self.state.accounts);
        let priority = accounts.priority(id);
        let gpu = state.gpu_of(id).filter(|_| priority < NEVER_EVICTED)?;
        let account = accounts.account_of(id);
        let is_kept = |since: u64| patience.is_none_or(|patience| state.now.0 < since.saturating_add(patience));
        let is_protected = |id: PodId| state.world.pod(id).protected.is_some_and(|since| is_kept(since.0));
        let first = self.running_with(id).next()?;
        Some(Candidate {
            id: first,
            on: if first == id { state.charge(id) } else { self.freed_on(id, gpu) },
            account,
            charge: self.running_with(id).map(|pod| state.charge(pod)).sum(),
            priority,
            since: self.running_with(id).filter_map(|pod| accounts.since(pod)).min()?,
            is_protected: self.running_with(id).any(is_protected),
            class: accounts.class(id)?,
            share: accounts.share(account, Amount::ZERO, Amount::ZERO),
        })
    }

    /// Sorts candidates, the most important first: protected pods, then pods of quotas with a low
    /// share, then pods of high priority, then pods that have run long.
    fn sorted_by_importance(&self, candidates: impl Iterator<Item = Candidate>) -> Vec<Candidate> {
        let name = |one: &Candidate| &self.state.world.pod(one.id).name;
        let mut sorted: Vec<Candidate> = candidates.collect();
        sorted.sort_by_key(|one| (!one.is_protected, one.share, Reverse(one.priority), one.since, name(one)));
        sorted
    }
}

fn victims_cost(victims: &[Candidate]) -> VictimsCost {
    let highest = victims.iter().map(|victim| victim.priority).max();
    let of_highest = victims.iter().filter(|victim| Some(victim.priority) == highest);
    (
        victims.iter().filter(|victim| victim.is_protected).count(),
        !victims.is_empty(),
        Reverse(victims.iter().map(|victim| victim.share).min()),
        highest,
        victims.iter().map(|victim| victim.charge).sum(),
        victims.iter().map(|victim| i128::from(victim.priority)).sum(),
        victims.len(),
        Reverse(of_highest.map(|victim| victim.since).min()),
    )
}
