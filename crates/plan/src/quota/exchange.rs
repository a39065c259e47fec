//! Decides which pods leave so that another pod fits.
//!
//! For each GPU, all pods that may leave are thought away. Then each of them stays if the waiting
//! pod still fits, the most important first. What remains are the victims. Rules about rights
//! judge the complete set of victims, because judging them one at a time leads to endless
//! exchanges.
use std::cell::OnceCell;
use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::amount::Amount;
use super::class::{Class, Share, Since};
use super::room::Rank;
use super::state::State;
use super::world::PodId;

/// Why pods leave for another pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// The pod is within its quota's guarantee, and takes room from borrowers of other quotas.
    Reclaim,
    /// The pod borrows, and takes room from borrowers of quotas that borrow more, even afterwards.
    FairShare,
    /// The pod takes room from pods of lower priority of its own quota.
    Priority,
}

/// Pods of this priority and above are never evicted: components of the system.
const NEVER_EVICTED: i32 = 2_000_000_000;

/// A GPU, and the pods that leave it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Way {
    pub(super) gpu: usize,
    /// Victims, the most important first.
    pub(super) victims: Vec<PodId>,
}

/// Result of a search.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Found {
    Way(Kind, Way),
    /// Only pods that disruption budgets protect could make room.
    Protected,
    Nothing,
}

/// A pod that may leave.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    id: PodId,
    gpu: usize,
    account: usize,
    charge: Amount,
    priority: i32,
    since: Since,
    is_protected: bool,
    class: Class,
    share: Share,
}

/// Cost of a set of victims; lower is better.
type Cost = (usize, bool, Reverse<Option<Share>>, Option<i32>, Amount, i128, usize, Reverse<Option<Since>>);

/// A search for one waiting pod.
pub(super) struct Search<'s, 'w> {
    state: &'s State<'w>,
    taker: PodId,
    account: usize,
    charge: Amount,
    /// Free room of all GPUs that a pod of each class sees: of those that borrow, and of others.
    free: [OnceCell<i128>; 2],
}

impl<'s, 'w> Search<'s, 'w> {
    pub(super) fn new(state: &'s State<'w>, taker: PodId) -> Self {
        let account = state.accounts.account_of(taker);
        Self { state, taker, account, charge: state.charge(taker), free: [OnceCell::new(), OnceCell::new()] }
    }

    /// Finds pods to evict for a pod. `is_over_max` means that the pod's quota would exceed its
    /// maximum now.
    pub(super) fn run(&self, is_within: bool, is_over_max: bool) -> Found {
        let mut is_protected = false;
        let rights = if is_within { Kind::Reclaim } else { Kind::FairShare };
        let is_enforced = self.state.accounts.quota(self.account).is_enforced();
        for kind in [(!is_over_max && is_enforced).then_some(rights), Some(Kind::Priority)].into_iter().flatten() {
            match self.best(kind) {
                Some((true, way)) => return Found::Way(kind, way),
                Some((false, _)) => is_protected = true,
                None => {}
            }
        }
        if is_protected { Found::Protected } else { Found::Nothing }
    }

    /// Returns the best way of a kind, and whether it evicts no protected pod.
    fn best(&self, kind: Kind) -> Option<(bool, Way)> {
        let own: Vec<Candidate> = match kind {
            Kind::Priority => self.candidates_of_own(),
            _ => Vec::new(),
        };
        let ways = (0..self.state.gpus.len()).filter_map(|gpu| {
            let victims = self.way(kind, gpu, &own)?;
            let names = victims.iter().map(|victim| victim.id).collect();
            Some((cost(&victims), Way { gpu, victims: names }))
        });
        if !self.state.accounts.has_cells() {
            let best = ways.min_by(|(one, a), (other, b)| (one, a.gpu).cmp(&(other, b.gpu)));
            return best.map(|((protected, ..), way)| (protected == 0, way));
        }
        let mut ways: Vec<(Cost, Way)> = ways.collect();
        ways.sort_by(|(one, a), (other, b)| (one, a.gpu).cmp(&(other, b.gpu)));
        let best = ways.into_iter().find(|(_, way)| self.holds_after(kind, way));
        best.map(|((protected, ..), way)| (protected == 0, way))
    }

    /// Returns whether the rules hold in the state after an exchange. In a pool with cells, an
    /// exchange can change who owns GPUs, and so the classes of other pods.
    fn holds_after(&self, kind: Kind, way: &Way) -> bool {
        let mut after = self.state.clone();
        way.victims.iter().for_each(|victim| after.evict(*victim));
        after.nominate(self.taker, way.gpu, self.state.rank_on(self.taker, way.gpu));
        let share = |account: usize| after.accounts.share(account, Amount::ZERO, Amount::ZERO);
        let is_fair = |victim: &PodId| share(self.account) <= share(self.state.accounts.account_of(*victim));
        let holds = match kind {
            Kind::Reclaim => after.accounts.class(self.taker) == Some(Class::In),
            Kind::FairShare => way.victims.iter().all(is_fair),
            Kind::Priority => true,
        };
        holds && self.state.keeps_guarantees_in(&after)
    }

    /// Returns the victims on one GPU, or `None` if no set of victims makes room and may leave.
    fn way(&self, kind: Kind, gpu: usize, own: &[Candidate]) -> Option<Vec<Candidate>> {
        if self.state.gpus[gpu].size() < self.charge {
            return None;
        }
        let rank = self.state.rank_on(self.taker, gpu);
        match kind {
            Kind::Reclaim | Kind::FairShare => {
                let is_of_cells = self.state.accounts.quota(self.account).cells().is_some();
                // In cells the pod has a right to GPUs of its quota and of nobody.
                if kind == Kind::Reclaim && is_of_cells && rank.class == Class::Over {
                    return None;
                }
                let candidates = self.candidates_on(gpu, kind);
                let free = self.state.gpus[gpu].free_later(&rank);
                let victims = self.leaving(gpu, free, &candidates, None)?;
                if self.is_legal(kind, gpu, &rank, &victims) {
                    return Some(victims);
                }
                self.one_alone(gpu, free, &rank, &candidates)
            }
            Kind::Priority => {
                let over_only =
                    |own: &[Candidate]| own.iter().copied().filter(|one| one.class == Class::Over).collect();
                self.priority_way(gpu, &rank, own.to_vec()).or_else(|| self.priority_way(gpu, &rank, over_only(own)))
            }
        }
    }

    fn priority_way(&self, gpu: usize, rank: &Rank, mut own: Vec<Candidate>) -> Option<Vec<Candidate>> {
        let accounts = &self.state.accounts;
        let quota = accounts.quota(self.account);
        let after = |used: Amount| used.plus(self.charge);
        let max = quota.max().filter(|max| quota.is_enforced() && after(accounts.used(self.account)) > *max);
        if max.is_none() {
            // Pods on other GPUs are of no use.
            own.retain(|one| one.gpu == gpu);
        }
        let free = self.state.gpus[gpu].free_later(rank);
        let spare = max.map(|max| i128::from(max) - i128::from(after(accounts.used(self.account))));
        let victims = self.leaving(gpu, free, &own, spare)?;
        self.is_legal(Kind::Priority, gpu, rank, &victims).then_some(victims)
    }

    /// Returns the candidates that leave so that the pod fits. Candidates are in the order in which
    /// they stay. `spare` is what is left of the quota's maximum, negative if it is exceeded.
    fn leaving(&self, gpu: usize, free: i128, candidates: &[Candidate], spare: Option<i128>) -> Option<Vec<Candidate>> {
        let on_gpu = |one: &&Candidate| one.gpu == gpu;
        let sum = |all: i128, one: &Candidate| all + i128::from(one.charge);
        let mut free = candidates.iter().filter(on_gpu).fold(free - i128::from(self.charge), sum);
        let mut spare = spare.map(|spare| candidates.iter().fold(spare, sum));
        if free < 0 || spare.is_some_and(|spare| spare < 0) {
            return None;
        }
        let leaves = |one: &&Candidate| {
            let charge = i128::from(one.charge);
            let stays = (one.gpu != gpu || free >= charge) && spare.is_none_or(|spare| spare >= charge);
            if stays {
                free -= if one.gpu == gpu { charge } else { 0 };
                spare = spare.map(|spare| spare - charge);
            }
            !stays
        };
        Some(candidates.iter().filter(leaves).copied().collect())
    }

    /// Returns one candidate that makes room alone and may leave: the lowest priority, then the
    /// smallest, then the youngest.
    fn one_alone(&self, gpu: usize, free: i128, rank: &Rank, candidates: &[Candidate]) -> Option<Vec<Candidate>> {
        let helps = |one: &&Candidate| free + i128::from(one.charge) >= i128::from(self.charge);
        let may_leave = |one: &&Candidate| self.is_legal(Kind::FairShare, gpu, rank, &[**one]);
        let name = |one: &Candidate| &self.state.world.pod(one.id).name;
        let key = |one: &&Candidate| (one.is_protected, one.priority, one.charge, Reverse((one.since, name(one))));
        candidates.iter().filter(helps).filter(may_leave).min_by_key(key).map(|one| vec![*one])
    }

    /// Returns whether these victims may leave for the pod.
    fn is_legal(&self, kind: Kind, gpu: usize, rank: &Rank, victims: &[Candidate]) -> bool {
        let accounts = &self.state.accounts;
        let quota = accounts.quota(self.account);
        if !quota.is_enforced() {
            return true;
        }
        let mut less: BTreeMap<usize, Amount> = BTreeMap::new();
        for victim in victims {
            let sum = less.entry(victim.account).or_default();
            *sum = sum.plus(victim.charge);
        }
        if kind != Kind::Reclaim {
            self.add_displaced(gpu, rank, victims, &mut less);
        }
        match kind {
            Kind::Reclaim => true,
            Kind::FairShare => {
                let share = accounts.share(self.account, self.charge, Amount::ZERO);
                let after = |account: usize| accounts.share(account, Amount::ZERO, less[&account]);
                victims.iter().all(|victim| share <= after(victim.account))
                    && self.leaves_kept_room(rank, victims, &less)
            }
            Kind::Priority => {
                let used = accounts.used(self.account);
                let own = less.get(&self.account).copied().unwrap_or_default();
                let after = used.plus(self.charge).minus(own);
                let names: Vec<PodId> = victims.iter().map(|victim| victim.id).collect();
                let all_over = victims.iter().all(|victim| victim.class == Class::Over);
                quota.max().is_none_or(|max| after <= max)
                    && (all_over || accounts.class_with(self.taker, gpu, &names) == Class::In)
                    && (after <= quota.min() || after <= used || self.leaves_kept_room(rank, victims, &less))
            }
        }
    }

    /// Adds what accounts lose whose pods' nominations would be withdrawn.
    fn add_displaced(&self, gpu: usize, rank: &Rank, victims: &[Candidate], less: &mut BTreeMap<usize, Amount>) {
        let freed: Amount = victims.iter().filter(|victim| victim.gpu == gpu).map(|victim| victim.charge).sum();
        for id in self.state.displaced(rank, gpu, i128::from(freed) - i128::from(self.charge)) {
            let account = self.state.accounts.account_of(id);
            if account != self.account {
                let sum = less.entry(account).or_default();
                *sum = sum.plus(self.state.charge(id));
            }
        }
    }

    /// Returns whether enough stays free for other quotas after the exchange.
    fn leaves_kept_room(&self, rank: &Rank, victims: &[Candidate], less: &BTreeMap<usize, Amount>) -> bool {
        let kept = self.state.accounts.kept_from(self.account, less);
        if kept == Amount::ZERO {
            return true;
        }
        let gpus = &self.state.gpus;
        let free_on = |gpu: usize| self.state.free_beside_older(gpu, rank) + gpus[gpu].leaving();
        let sum = || (0..gpus.len()).map(|gpu| free_on(gpu).max(0)).sum();
        let mut free: i128 = *self.free[usize::from(rank.class == Class::In)].get_or_init(sum);
        let mut freed: BTreeMap<usize, i128> = BTreeMap::new();
        for victim in victims {
            *freed.entry(victim.gpu).or_default() += i128::from(victim.charge);
        }
        for (gpu, freed) in freed {
            free += (free_on(gpu) + freed).max(0) - free_on(gpu).max(0);
        }
        free - i128::from(self.charge) >= i128::from(kept)
    }

    /// Returns the pods of other quotas on a GPU that may leave, in the order in which they stay.
    fn candidates_on(&self, gpu: usize, kind: Kind) -> Vec<Candidate> {
        let settings = &self.state.world.settings;
        let min_runtime = match kind {
            Kind::Reclaim => settings.min_runtime_reclaim,
            _ => settings.min_runtime_fair_share,
        };
        let may_leave = |one: &Candidate| {
            let is_old = one.since.at.0.saturating_add(min_runtime) <= self.state.now.0;
            one.account != self.account && one.class == Class::Over && is_old
        };
        let pods = self.state.gpus[gpu].pods.iter();
        let patience = settings.budget_patience.filter(|_| kind == Kind::Reclaim);
        self.sorted(
            pods.filter_map(|&id| self.candidate(id, patience))
                .filter(|one| may_leave(one) && self.state.accounts.quota(one.account).is_enforced()),
        )
    }

    /// Returns the pods of lower priority that may leave for the pod by priority alone. These are
    /// the pods of its quota. If the quota is not enforced, these are all pods of no enforced
    /// quota.
    fn candidates_of_own(&self) -> Vec<Candidate> {
        let accounts = &self.state.accounts;
        let is_enforced = accounts.quota(self.account).is_enforced();
        let is_own = |id: &PodId| {
            let account = accounts.account_of(*id);
            if is_enforced { account == self.account } else { !accounts.quota(account).is_enforced() }
        };
        let priority = self.state.world.pod(self.taker).priority;
        let pods = (0..self.state.world.pods.len()).map(PodId).filter(is_own);
        self.sorted(pods.filter_map(|id| self.candidate(id, None)).filter(|one| one.priority < priority))
    }

    /// Returns a pod that runs and is not part of the system.
    fn candidate(&self, id: PodId, patience: Option<u64>) -> Option<Candidate> {
        let (state, pod) = (self.state, self.state.world.pod(id));
        let gpu = state.gpu_of(id).filter(|_| pod.priority < NEVER_EVICTED)?;
        let account = state.accounts.account_of(id);
        let is_kept = |since: u64| patience.is_none_or(|patience| state.now.0 < since.saturating_add(patience));
        Some(Candidate {
            id,
            gpu,
            account,
            charge: pod.charge,
            priority: pod.priority,
            since: state.accounts.since(id)?,
            is_protected: pod.protected.is_some_and(|since| is_kept(since.0)),
            class: state.accounts.class(id)?,
            share: state.accounts.share(account, Amount::ZERO, Amount::ZERO),
        })
    }

    /// Sorts candidates in the order in which they stay: protected pods, pods of quotas with a low
    /// share, pods of high priority, pods that run long.
    fn sorted(&self, candidates: impl Iterator<Item = Candidate>) -> Vec<Candidate> {
        let name = |one: &Candidate| &self.state.world.pod(one.id).name;
        let mut sorted: Vec<Candidate> = candidates.collect();
        sorted.sort_by_key(|one| (!one.is_protected, one.share, Reverse(one.priority), one.since, name(one)));
        sorted
    }
}

fn cost(victims: &[Candidate]) -> Cost {
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
