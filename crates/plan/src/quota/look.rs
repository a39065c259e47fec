//! Runs one pass over the waiting pods of a pool.
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::ageing::{UsableGpus, reservations};
use super::amount::Amount;
use super::class::{Class, Share};
use super::exchange::{Found, Kind, Search, Way};
use super::gang::Part;
use super::pack::pack;
use super::room::Rank;
use super::state::State;
use super::world::{Place, PodId, World};
use crate::ledger::Moment;

/// A pod that is released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Released {
    /// The pod.
    pub pod: PodId,
    /// Index of its GPU.
    pub gpu: usize,
}

/// Pods that are evicted for another pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exchange {
    /// Why the pods are evicted.
    pub kind: Kind,
    /// The pod for which the victims are evicted. For a gang, this is the waiting pod with the
    /// first name.
    pub taker: PodId,
    /// The pods to evict, the most important first.
    pub victims: Vec<PodId>,
}

/// Why a pod waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Wait {
    /// Capacity is nominated for the pod, and terminating pods still use a part of it.
    Nominated,
    /// Not enough capacity is free, and no eviction that the rules allow would help.
    NoRoom,
    /// The pod's quota would exceed its maximum.
    OverMax,
    /// The pod alone exceeds its quota's maximum.
    LargerThanMax,
    /// The pod must not borrow, and does not fit into the unused part of its quota's guarantee.
    WaitsForGuarantee,
    /// Only the eviction of pods that disruption budgets protect would help.
    Protected,
    /// The pod, or its gang, would not fit even if all GPUs were empty.
    NoGpuFits,
    /// Pods of the pod's gang are missing.
    GangIncomplete,
    /// Its gang has, or states, more pods than [`MAX_GANG_PODS`](super::MAX_GANG_PODS).
    GangTooLarge,
    /// Other pods come first. Either the pass has already searched for victims for the maximum
    /// number of pods, or a pod of the same quota that is at least as important has a reservation.
    Later,
}

impl Wait {
    /// Returns the name of the reason, as in conditions and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nominated => "Nominated",
            Self::NoRoom => "NoRoom",
            Self::OverMax => "OverMax",
            Self::LargerThanMax => "LargerThanMax",
            Self::WaitsForGuarantee => "WaitsForGuarantee",
            Self::Protected => "Protected",
            Self::NoGpuFits => "NoGpuFits",
            Self::GangIncomplete => "GangIncomplete",
            Self::GangTooLarge => "GangTooLarge",
            Self::Later => "Later",
        }
    }
}

/// The decisions of a pass.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Outcome {
    /// Pods to release, in the order of the decisions. The pods of a gang are consecutive.
    pub released: Vec<Released>,
    /// Pods to evict, in the order of the decisions.
    pub exchanges: Vec<Exchange>,
    /// Index of the nominated GPU of each nominated pod.
    pub nominations: BTreeMap<PodId, usize>,
    /// Reasons of the pods that wait.
    pub waits: BTreeMap<PodId, Wait>,
    /// Class of each running or nominated pod, by pod.
    pub classes: Vec<Option<Class>>,
}

/// Runs one pass: decides about each waiting pod of a pool.
pub fn look(world: &World, now: Moment) -> Outcome {
    let mut pass = Pass::new(world, now);
    while let Some(id) = pass.next() {
        pass.decide(id);
    }
    pass.finish()
}

/// Returns the pods that have waited long and have a reservation, with the index of the GPU, for
/// callers that place pods themselves. The pod whose reservation takes precedence is first.
///
/// `usable` returns the GPUs that a pod can use now, or once the pods that overtook it have ended.
/// `usable` is called for a pod only if no earlier pod of its quota can have a reservation.
pub fn reserved_for_long_waits(
    world: &World,
    now: Moment,
    mut usable: impl FnMut(PodId) -> BTreeSet<usize>,
) -> Vec<(PodId, usize)> {
    let mut usable = |id: PodId| Some(Arc::new(usable(id)));
    Pass::with_usable_gpus(world, now, &mut usable).state.reservations()
}

/// A pass.
pub(super) struct Pass<'w> {
    pub(super) state: State<'w>,
    /// Heads of waiting units by the account whose rights the units have, the most important first.
    queues: Vec<VecDeque<PodId>>,
    pub(super) outcome: Outcome,
    /// Whether the unit with this head would not fit even if all GPUs were empty. `false` for pods
    /// that are no heads.
    never_fits: Vec<bool>,
    /// Number of units for which this pass may still search for victims.
    preemptors: usize,
}

/// Position of an account's first waiting pod. Pods whose priority overrides quotas are first, then
/// pods within a guarantee.
type Turn<'w> = (Reverse<Option<i32>>, Option<Share>, Reverse<i32>, Moment, &'w str, PodId);

enum Decision {
    Release(Vec<Part>),
    Nominate(Vec<Part>, Rank),
    Exchange(Kind, Way),
    Wait(Wait),
}

impl<'w> Pass<'w> {
    pub(super) fn new(world: &'w World, now: Moment) -> Self {
        Self::with_usable_gpus(world, now, &mut |id| world.pod(id).gpus.clone())
    }

    /// Starts a pass. `usable` returns the GPUs that a pod that has waited long may use.
    fn with_usable_gpus(world: &'w World, now: Moment, usable: &mut dyn FnMut(PodId) -> UsableGpus) -> Self {
        let mut state = State::new(world, now);
        let mut queues = vec![VecDeque::new(); state.accounts.len()];
        let mut outcome = Outcome::default();
        let mut waiting: Vec<PodId> = (0..world.pods.len()).map(PodId).collect();
        waiting.retain(|id| matches!(world.pod(*id).place, Place::Waiting { .. }));
        let gangs = state.accounts.gangs();
        let obstacle = |id: PodId| {
            if gangs.is_too_large(id) {
                Some(Wait::GangTooLarge)
            } else {
                (!state.is_complete(id)).then_some(Wait::GangIncomplete)
            }
        };
        outcome.waits.extend(waiting.iter().filter_map(|&id| Some((id, obstacle(id)?))));
        waiting.retain(|&id| obstacle(id).is_none() && gangs.unit(id).first() == Some(&id));
        waiting.sort_by_cached_key(|&id| {
            (Reverse(state.accounts.priority(id)), gangs.created(world, id), &world.pod(id).name, id)
        });
        let mut never_fits = vec![false; world.pods.len()];
        let largest = world.gpus.iter().copied().max().unwrap_or_default();
        for id in waiting {
            never_fits[id.0] = !fits_in_empty_pool(world, gangs.unit(id), largest);
            queues[state.accounts.rights_of(id)].push_back(id);
        }
        state.reserve_all(reservations(&state, &queues, usable));
        Self { state, queues, outcome, never_fits, preemptors: world.settings.max_preemptors }
    }

    /// Removes the next waiting pod from its queue. Pods that cannot be released come first, so
    /// that they delay no other pod. Of the first pods of all quotas, pods whose priority overrides
    /// quotas are next, and then pods within a guarantee. Then come pods whose quota would have the
    /// lowest share with the pod.
    pub(super) fn next(&mut self) -> Option<PodId> {
        let firsts = || self.queues.iter().filter_map(VecDeque::front).copied();
        let hopeless = firsts().find(|&id| self.is_hopeless(id));
        let id = hopeless.or_else(|| firsts().map(|id| self.turn(id)).min().map(|(.., id)| id))?;
        self.queues[self.state.accounts.rights_of(id)].pop_front()
    }

    /// Returns whether no GPU is large enough for a pod, or the pod waits for its quota's
    /// guarantee.
    fn is_hopeless(&self, id: PodId) -> bool {
        self.never_fits[id.0] || self.state.nominated(id).is_none() && !self.may_borrow(id)
    }

    /// Returns whether a pod that does not count yet may be released: it is within its quota's
    /// guarantee, or it may borrow.
    fn may_borrow(&self, id: PodId) -> bool {
        let accounts = &self.state.accounts;
        let is_enforced = accounts.quota(accounts.account_of(id)).is_enforced();
        let borrows = |id: &PodId| self.state.world.pod(*id).borrows;
        !is_enforced || accounts.gangs().unit(id).iter().all(borrows) || accounts.is_within(id)
    }

    fn turn(&self, id: PodId) -> Turn<'w> {
        let accounts = &self.state.accounts;
        let (account, charge) = (accounts.rights_of(id), accounts.charge(id));
        let share = match self.state.nominated(id) {
            None if !accounts.quota(account).is_enforced() => Some(accounts.share(account, charge, Amount::ZERO)),
            Some(_) if !accounts.quota(account).is_enforced() => {
                Some(accounts.share(account, Amount::ZERO, Amount::ZERO))
            }
            None if accounts.is_within(id) => None,
            None => Some(accounts.share(account, charge, Amount::ZERO)),
            // The pod counts already.
            Some(_) if accounts.quota(account).cells().is_some() => match accounts.class(id) {
                Some(Class::In) => None,
                _ => Some(accounts.share(account, Amount::ZERO, Amount::ZERO)),
            },
            Some(_) if accounts.used(account) <= accounts.quota(account).min() => None,
            Some(_) => Some(accounts.share(account, Amount::ZERO, Amount::ZERO)),
        };
        let world = self.state.world;
        let created = accounts.gangs().created(world, id);
        let overriding = Reverse(accounts.overriding(id));
        (overriding, share, Reverse(accounts.priority(id)), created, &world.pod(id).name, id)
    }

    /// Decides about a unit. `id` is its head.
    pub(super) fn decide(&mut self, id: PodId) {
        let reservation = self.state.start_turn(id);
        let class = self.state.accounts.class(id);
        let parts = self.state.withdraw(id);
        let own_place = class.filter(|_| !parts.is_empty()).map(|class| (parts, self.state.rank(id, class)));
        let wait = match self.decision(id, own_place) {
            Decision::Release(parts) => {
                self.state.release(&parts);
                self.outcome.released.extend(parts.into_iter().map(|(pod, gpu)| Released { pod, gpu }));
                return;
            }
            Decision::Nominate(parts, rank) => {
                self.state.nominate(&parts, rank);
                Wait::Nominated
            }
            Decision::Exchange(kind, Way { parts, victims }) => {
                let rank = self.state.rank_of(&parts);
                victims.iter().for_each(|victim| self.state.evict(*victim));
                self.state.nominate(&parts, rank);
                if !victims.is_empty() {
                    self.outcome.exchanges.push(Exchange { kind, taker: id, victims });
                }
                Wait::Nominated
            }
            Decision::Wait(wait) => {
                self.state.end_turn(reservation);
                wait
            }
        };
        self.outcome.waits.extend(self.state.accounts.gangs().unit(id).iter().map(|&pod| (pod, wait)));
    }

    fn decision(&mut self, id: PodId, own_place: Option<(Vec<Part>, Rank)>) -> Decision {
        let accounts = &self.state.accounts;
        let (account, charge) = (accounts.account_of(id), accounts.charge(id));
        let quota = accounts.quota(account);
        let max = quota.max().filter(|_| quota.is_enforced());
        let is_within = accounts.is_within(id);
        if !self.state.is_complete(id) {
            return Decision::Wait(Wait::GangIncomplete);
        }
        if !self.may_borrow(id) {
            return Decision::Wait(Wait::WaitsForGuarantee);
        }
        if self.never_fits[id.0] {
            return Decision::Wait(Wait::NoGpuFits);
        }
        if max.is_some_and(|max| charge > max) {
            return Decision::Wait(Wait::LargerThanMax);
        }
        let is_over_max = max.is_some_and(|max| accounts.held(account).plus(charge) > max);
        if let Some(decision) = own_place.and_then(|place| self.own_place(id, place, is_over_max, max)) {
            return decision;
        }
        if self.state.overtakes(id) {
            return Decision::Wait(Wait::Later);
        }
        if let Some(parts) = (!is_over_max).then(|| self.free_place(id, is_within)).flatten() {
            return Decision::Release(parts);
        }
        let wait = if is_over_max { Wait::OverMax } else { Wait::NoRoom };
        let preempts = |id: &PodId| self.state.world.pod(*id).preempts;
        if !accounts.gangs().unit(id).iter().all(preempts) {
            return Decision::Wait(wait);
        }
        if self.preemptors == 0 {
            return Decision::Wait(Wait::Later);
        }
        self.preemptors -= 1;
        match Search::new(&self.state, id).find_way(is_within, is_over_max) {
            Found::Way(kind, way) => Decision::Exchange(kind, way),
            Found::Protected => Decision::Wait(Wait::Protected),
            Found::Nothing => Decision::Wait(wait),
        }
    }

    /// Decides about a nominated pod: it is released to the nominated GPUs, or keeps its
    /// nomination. Returns `None` if the nomination no longer fits, or would exceed the quota's
    /// maximum. The capacity that must stay free for other quotas was checked at the nomination.
    fn own_place(
        &self,
        id: PodId,
        (parts, rank): (Vec<Part>, Rank),
        is_over_max: bool,
        max: Option<Amount>,
    ) -> Option<Decision> {
        let accounts = &self.state.accounts;
        let mut wanted: BTreeMap<usize, Amount> = BTreeMap::new();
        for &(pod, gpu) in &parts {
            let sum = wanted.entry(gpu).or_default();
            *sum = sum.plus(self.state.charge(pod));
        }
        let gpus = &self.state.gpus;
        let fits_later =
            |(&gpu, &wanted): (&usize, &Amount)| gpus[gpu].free_later_with_reserved(&rank) >= i128::from(wanted);
        if !wanted.iter().all(fits_later) {
            return None;
        }
        let fits =
            |(&gpu, &wanted): (&usize, &Amount)| self.state.free_for_nominee(id, gpu, &rank) >= i128::from(wanted);
        if !is_over_max && wanted.iter().all(fits) {
            return Some(Decision::Release(parts));
        }
        let used = accounts.used(accounts.account_of(id)).plus(accounts.charge(id));
        max.is_none_or(|max| used <= max).then_some(Decision::Nominate(parts, rank))
    }

    /// Returns the GPUs with the least free capacity on which the unit fits now. A borrowing unit
    /// must leave enough capacity free for other quotas, unless its priority overrides quotas.
    fn free_place(&self, id: PodId, is_within: bool) -> Option<Vec<Part>> {
        let accounts = &self.state.accounts;
        let (account, charge) = (accounts.account_of(id), i128::from(accounts.charge(id)));
        let quota = accounts.quota(account);
        let is_of_cells = quota.cells().is_some() && quota.is_enforced();
        let unit: Vec<Part> = accounts.gangs().unit(id).iter().map(|&pod| (pod, 0)).collect();
        // With cells, the class of a unit depends on the GPU only if the unit is within the
        // guarantee.
        let general = if is_of_cells { self.state.rank(id, Class::Over) } else { self.state.rank_of(&unit) };
        if quota.is_enforced() && !accounts.is_within_beside_leaving(id) && accounts.overriding(id).is_none() {
            let kept = accounts.kept_from(account, &BTreeMap::new());
            if kept > Amount::ZERO && self.state.all_free(&general, false) - charge < i128::from(kept) {
                return None;
            }
        }
        if accounts.gangs().of(id).is_some() {
            return self.free_gang_place(id, general, is_of_cells && is_within);
        }
        let rank_on = |gpu: usize| if is_of_cells { self.state.rank_on(id, gpu) } else { general };
        let pod = self.state.world.pod(id);
        let free = |gpu: usize| (gpu, self.state.gpus[gpu].free(&rank_on(gpu)));
        let large = (0..self.state.gpus.len()).filter(|&gpu| i128::from(self.state.unused[gpu]) >= charge);
        let fitting = large.map(free).filter(|&(gpu, free)| free >= charge && pod.may_use(gpu));
        // A pod within its guarantee of cells prefers a GPU that its quota owns.
        let key =
            |&(gpu, free): &(usize, i128)| (!(is_of_cells && is_within && accounts.owns(account, gpu)), free, gpu);
        if !accounts.has_cells() {
            return fitting.min_by_key(key).map(|(gpu, _)| vec![(id, gpu)]);
        }
        let mut fitting: Vec<(usize, i128)> = fitting.collect();
        fitting.sort_by_key(key);
        fitting.into_iter().map(|(gpu, _)| vec![(id, gpu)]).find(|parts| self.state.may_release(parts))
    }

    /// Returns the GPUs on which a gang fits now. A gang with a right to cells prefers GPUs on
    /// which it is within the guarantee.
    fn free_gang_place(&self, id: PodId, general: Rank, has_cells: bool) -> Option<Vec<Part>> {
        let (world, accounts) = (self.state.world, &self.state.accounts);
        let unit = accounts.gangs().unit(id);
        let free = |rank: &Rank| self.state.gpus.iter().map(|gpu| gpu.free(rank)).collect::<Vec<i128>>();
        let in_cells = || {
            let rooms = accounts.only_cells(accounts.account_of(id), free(&self.state.rank(id, Class::In)));
            pack(world, unit, &rooms, true).filter(|parts| accounts.class_with(parts, &[]) == Class::In)
        };
        let may_release = |parts: &Vec<Part>| self.state.may_release(parts);
        let parts = has_cells.then(in_cells).flatten().filter(may_release);
        parts.or_else(|| pack(world, unit, &free(&general), true).filter(may_release))
    }

    pub(super) fn finish(self) -> Outcome {
        let Self { state, mut outcome, .. } = self;
        let all = || (0..state.world.pods.len()).map(PodId);
        outcome.nominations = all().filter_map(|id| Some((id, state.nominated(id)?))).collect();
        for (id, wait) in &mut outcome.waits {
            if *wait == Wait::Nominated && !outcome.nominations.contains_key(id) {
                // A pod of higher rank uses the capacity.
                *wait = Wait::NoRoom;
            }
        }
        outcome.classes = all().map(|id| state.accounts.class(id)).collect();
        outcome
    }
}

/// Returns whether a unit fits if all GPUs are empty. `largest` is the size of the largest GPU.
fn fits_in_empty_pool(world: &World, unit: &[PodId], largest: Amount) -> bool {
    match unit {
        &[id] => {
            let pod = world.pod(id);
            let fits = |(gpu, size): (usize, &Amount)| *size >= pod.charge && pod.may_use(gpu);
            pod.charge <= largest && (pod.gpus.is_none() || world.gpus.iter().enumerate().any(fits))
        }
        many => {
            let rooms: Vec<i128> = world.gpus.iter().map(|&size| size.into()).collect();
            pack(world, many, &rooms, true).is_some()
        }
    }
}
