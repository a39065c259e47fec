//! Runs a pass of the naive model, which tries all sets of victims.
use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::super::{Amount, Class, Exchange, Kind, Outcome, Owner, Place, PodId, Released, Share, Wait, World};
use super::naive::{Pool, Rank, has_cells};
use crate::ledger::Moment;

/// Pods of this priority and above are never evicted.
const SYSTEM: i32 = 2_000_000_000;

/// Decides about each waiting pod, as [`look`](super::super::look) does.
pub(super) fn naive_look(world: &World, now: Moment) -> Outcome {
    let mut pool = Pool::new(world, now);
    let mut outcome = Outcome::default();
    let mut waiting: Vec<usize> =
        pool.pods().filter(|&pod| matches!(world.pods[pod].place, Place::Waiting { .. })).collect();
    pool.reserve(&waiting);
    let mut searches = world.settings.max_preemptors;
    while let Some(pod) = pool.next(&waiting) {
        waiting.retain(|other| *other != pod);
        pool.decide(pod, &mut searches, &mut outcome);
    }
    for pod in pool.pods() {
        pool.nominated(pod).map(|gpu| outcome.nominations.insert(PodId(pod), gpu));
    }
    for (id, wait) in &mut outcome.waits {
        if *wait == Wait::Nominated && !outcome.nominations.contains_key(id) {
            *wait = Wait::NoRoom;
        }
    }
    let classes = pool.classes();
    outcome.classes = pool.pods().map(|pod| classes.of.get(&pod).copied()).collect();
    outcome
}

impl Pool {
    /// Returns the next pod: of the first pods of all quotas, the pod with the first turn.
    fn next(&self, waiting: &[usize]) -> Option<usize> {
        let key = |pod: usize| {
            let one = &self.world.pods[pod];
            (Reverse(one.priority), one.created, one.name.clone(), pod)
        };
        let first =
            |owner: Owner| waiting.iter().copied().filter(|&pod| self.rights(pod) == owner).min_by_key(|&pod| key(pod));
        let firsts: Vec<usize> = self.owners().into_iter().filter_map(first).collect();
        let is_hopeless = |pod: usize| {
            let one = &self.world.pods[pod];
            let is_enforced = self.quota(&self.owner(pod)).is_enforced();
            let waits = is_enforced && !one.borrows && self.nominated(pod).is_none() && !self.is_within(pod);
            waits || self.world.gpus.iter().all(|size| *size < one.charge)
        };
        // Pods that cannot be released come first, so that they delay no other pod.
        if let Some(pod) = firsts.iter().find(|&&pod| is_hopeless(pod)) {
            return Some(*pod);
        }
        firsts.into_iter().min_by_key(|&pod| {
            // The pod itself is not counted twice.
            let mut without = self.clone();
            without.withdraw(pod);
            let owner = self.rights(pod);
            let quota = self.quota(&owner);
            let is_in_cells = self.nominated(pod).is_some() && has_cells(&quota);
            let within = quota.is_enforced()
                && if is_in_cells { self.classes().of[&pod] == Class::In } else { without.is_within(pod) };
            let share = if is_in_cells {
                self.share(&owner, Amount::ZERO, Amount::ZERO)
            } else {
                without.share(&owner, self.charge(pod), Amount::ZERO)
            };
            (Reverse(self.overriding(pod)), (!within).then_some(share), key(pod))
        })
    }

    fn decide(&mut self, pod: usize, searches: &mut usize, outcome: &mut Outcome) {
        let reserved = self.reserved.remove(&pod);
        let rank = self.nominated(pod).map(|_| self.rank(pod, self.classes().of[&pod]));
        let own_place = self.withdraw(pod).zip(rank);
        let wait = match self.decision(pod, own_place, searches) {
            Decision::Release(gpu) => {
                let rank = self.rank_on(pod, gpu);
                self.place(pod, Place::Running { gpu, since: self.now }, &rank, gpu);
                outcome.released.push(Released { pod: PodId(pod), gpu });
                return;
            }
            Decision::Nominate(kind, gpu, rank, victims) => {
                self.nominate(pod, gpu, &rank, &victims);
                if let (Some(kind), false) = (kind, victims.is_empty()) {
                    let victims = victims.into_iter().map(PodId).collect();
                    outcome.exchanges.push(Exchange { kind, taker: PodId(pod), victims });
                }
                Wait::Nominated
            }
            Decision::Wait(wait) => {
                reserved.map(|place| self.reserved.insert(pod, (place.0, self.rank_on(pod, place.0))));
                wait
            }
        };
        outcome.waits.insert(PodId(pod), wait);
    }

    fn decision(&self, pod: usize, own_place: Option<(usize, Rank)>, searches: &mut usize) -> Decision {
        let (one, owner, charge) = (&self.world.pods[pod], self.owner(pod), self.charge(pod));
        let quota = self.quota(&owner);
        let is_within = self.is_within(pod);
        let max = quota.max().filter(|_| quota.is_enforced());
        if quota.is_enforced() && !one.borrows && !is_within {
            return Decision::Wait(Wait::WaitsForGuarantee);
        }
        if self.world.gpus.iter().all(|size| *size < charge) {
            return Decision::Wait(Wait::NoGpuFits);
        }
        if max.is_some_and(|max| charge > max) {
            return Decision::Wait(Wait::LargerThanMax);
        }
        let is_over_max = max.is_some_and(|max| self.held(&owner).plus(charge) > max);
        let fits = |gpu: usize, later: bool| self.unreserved(gpu, &self.rank_on(pod, gpu), later) >= i128::from(charge);
        if let Some((gpu, rank)) = own_place {
            let fits_later = self.free(gpu, &rank, true) >= i128::from(charge);
            if !is_over_max && fits_later && self.free_for_nominee(pod, gpu, &rank) >= i128::from(charge) {
                return Decision::Release(gpu);
            }
            if max.is_none_or(|max| self.used(&owner).plus(charge) <= max) && fits_later {
                return Decision::Nominate(None, gpu, rank, Vec::new());
            }
        }
        let borrower = if has_cells(&quota) { self.rank(pod, Class::Over) } else { self.rank_on(pod, 0) };
        if self.overtakes(pod) {
            return Decision::Wait(Wait::Later);
        }
        let all_free: i128 =
            (0..self.world.gpus.len()).map(|gpu| self.beside_older(pod, gpu, &borrower, false).max(0)).sum();
        let may_borrow = !quota.is_enforced()
            || self.is_within_beside_leaving(pod)
            || self.overriding(pod).is_some()
            || self.kept(&owner, &[]) == Amount::ZERO
            || all_free - i128::from(charge) >= i128::from(self.kept(&owner, &[]));
        if !is_over_max && may_borrow {
            let owned = self.classes().owner;
            let is_of_cells = has_cells(&quota) && quota.is_enforced();
            let is_foreign = |gpu: usize| !(is_within && is_of_cells && owned[gpu].as_ref() == Some(&owner));
            let fitting = (0..self.world.gpus.len()).filter(|&gpu| fits(gpu, false) && self.may_release(pod, gpu));
            let free = |gpu: usize| self.unreserved(gpu, &self.rank_on(pod, gpu), false);
            if let Some(gpu) = fitting.min_by_key(|&gpu| (is_foreign(gpu), free(gpu), gpu)) {
                return Decision::Release(gpu);
            }
        }
        let wait = if is_over_max { Wait::OverMax } else { Wait::NoRoom };
        if !one.preempts {
            return Decision::Wait(wait);
        }
        if *searches == 0 {
            return Decision::Wait(Wait::Later);
        }
        *searches -= 1;
        self.search(pod, is_within, is_over_max).unwrap_or(Decision::Wait(wait))
    }
}

enum Decision {
    Release(usize),
    Nominate(Option<Kind>, usize, Rank, Vec<usize>),
    Wait(Wait),
}

/// Cost of the victims on one GPU.
type Cost =
    (usize, bool, Reverse<Option<Share>>, Option<i32>, Amount, i128, usize, Reverse<Option<(Moment, Option<Moment>)>>);

impl Pool {
    /// Returns whether the rules are met after an exchange in a pool where quotas own GPUs.
    pub(super) fn meets_rules_after(&self, pod: usize, kind: Kind, gpu: usize, victims: &[usize]) -> bool {
        if !self.has_cells() {
            return true;
        }
        let mut after = self.clone();
        after.nominate(pod, gpu, &self.rank_on(pod, gpu), victims);
        let holds = match kind {
            Kind::Reclaim => after.classes().of[&pod] == Class::In,
            Kind::FairShare => victims.iter().all(|&victim| after.share_now(pod) <= after.share_now(victim)),
            Kind::Priority => true,
        };
        holds && self.keeps_guarantees_in(&after)
    }

    fn search(&self, pod: usize, is_within: bool, is_over_max: bool) -> Option<Decision> {
        let is_enforced = self.quota(&self.owner(pod)).is_enforced();
        let rights = if is_within { Kind::Reclaim } else { Kind::FairShare };
        let mut is_protected = false;
        for kind in [rights, Kind::Priority] {
            if kind != Kind::Priority && (is_over_max || !is_enforced) {
                continue;
            }
            let ways = (0..self.world.gpus.len()).filter_map(|gpu| Some((gpu, self.way(pod, kind, gpu)?)));
            let ways = ways.filter(|(gpu, victims)| self.meets_rules_after(pod, kind, *gpu, victims));
            let Some((gpu, victims)) = ways.min_by_key(|(gpu, victims)| (self.cost(victims, kind), *gpu)) else {
                continue;
            };
            if victims.iter().any(|&victim| self.is_protected(victim, kind)) {
                is_protected = true;
                continue;
            }
            return Some(Decision::Nominate(Some(kind), gpu, self.rank_on(pod, gpu), victims));
        }
        is_protected.then_some(Decision::Wait(Wait::Protected))
    }

    fn is_protected(&self, pod: usize, kind: Kind) -> bool {
        let patience = self.world.settings.budget_patience.filter(|_| kind == Kind::Reclaim);
        let is_kept = |since: Moment| patience.is_none_or(|patience| self.now.0 < since.0 + patience);
        self.world.pods[pod].protected.is_some_and(is_kept)
    }

    fn share_now(&self, pod: usize) -> Share {
        self.share(&self.owner(pod), Amount::ZERO, Amount::ZERO)
    }

    fn cost(&self, victims: &[usize], kind: Kind) -> Cost {
        let priority = |pod: usize| self.world.pods[pod].priority;
        let highest = victims.iter().map(|&pod| priority(pod)).max();
        (
            victims.iter().filter(|&&pod| self.is_protected(pod, kind)).count(),
            !victims.is_empty(),
            Reverse(victims.iter().map(|&pod| self.share_now(pod)).min()),
            highest,
            victims.iter().map(|&pod| self.charge(pod)).sum(),
            victims.iter().map(|&pod| i128::from(priority(pod))).sum(),
            victims.len(),
            Reverse(victims.iter().filter(|&&pod| Some(priority(pod)) == highest).map(|&pod| self.since(pod)).min()),
        )
    }

    /// Returns the pods that may be evicted for a pod, the most important first.
    fn allowed(&self, taker: usize, kind: Kind) -> Vec<usize> {
        let (owner, classes) = (self.owner(taker), self.classes());
        let settings = &self.world.settings;
        let used = self.used(&owner).plus(self.charge(taker));
        let overrides = self.overriding(taker).is_some() && self.quota(&owner).max().is_none_or(|max| used <= max);
        let may_leave = |pod: usize| {
            let (one, other) = (&self.world.pods[pod], self.owner(pod));
            let Place::Running { since, .. } = one.place else { return false };
            if one.priority >= SYSTEM {
                return false;
            }
            let min_runtime = match kind {
                Kind::Reclaim => settings.min_runtime_reclaim,
                _ => settings.min_runtime_fair_share,
            };
            match kind {
                Kind::Priority if self.quota(&owner).is_enforced() => {
                    let is_possible = other == owner || overrides && self.quota(&other).is_enforced();
                    is_possible && one.priority < self.world.pods[taker].priority
                }
                Kind::Priority => !self.quota(&other).is_enforced() && one.priority < self.world.pods[taker].priority,
                _ => {
                    other != owner
                        && classes.of[&pod] == Class::Over
                        && self.quota(&other).is_enforced()
                        && self.overriding(pod).is_none()
                        && since.0 + min_runtime <= self.now.0
                }
            }
        };
        let mut allowed: Vec<usize> = self.pods().filter(|&pod| may_leave(pod)).collect();
        allowed.sort_by_key(|&pod| {
            let one = &self.world.pods[pod];
            (
                !self.is_protected(pod, kind),
                self.share_now(pod),
                Reverse(one.priority),
                self.since(pod),
                one.name.clone(),
            )
        });
        allowed
    }

    fn way(&self, taker: usize, kind: Kind, gpu: usize) -> Option<Vec<usize>> {
        let owner = self.owner(taker);
        let quota = self.quota(&owner);
        if self.world.gpus[gpu] < self.charge(taker) {
            return None;
        }
        if kind == Kind::Reclaim && has_cells(&quota) && self.class_with(taker, gpu, &[]) == Class::Over {
            return None;
        }
        let allowed = self.allowed(taker, kind);
        let on_gpu = |pod: &usize| self.counts_on(*pod) == Some(gpu);
        if kind == Kind::Priority {
            let classes = self.classes();
            let over: Vec<usize> = allowed.iter().copied().filter(|pod| classes.of[pod] == Class::Over).collect();
            let max = quota.max().filter(|_| quota.is_enforced());
            let max = max.filter(|max| self.used(&owner).plus(self.charge(taker)) > *max);
            let way = |mut allowed: Vec<usize>| {
                // Evicting pods on other GPUs helps only if the quota's maximum is exceeded.
                allowed.retain(|pod| max.is_some() || on_gpu(pod));
                let victims = self.least_important(taker, gpu, &allowed, max)?;
                self.is_legal(taker, kind, gpu, &victims).then_some(victims)
            };
            return way(allowed).or_else(|| way(over));
        }
        let allowed: Vec<usize> = allowed.into_iter().filter(on_gpu).collect();
        let victims = self.least_important(taker, gpu, &allowed, None)?;
        if self.is_legal(taker, kind, gpu, &victims) {
            return Some(victims);
        }
        let alone = allowed.into_iter().filter(|&pod| self.makes_room(taker, gpu, &[pod], None));
        let legal = alone.filter(|&pod| self.is_legal(taker, kind, gpu, &[pod]));
        let key = |pod: usize| {
            let one = &self.world.pods[pod];
            (self.is_protected(pod, kind), one.priority, one.charge, Reverse((self.since(pod), one.name.clone())))
        };
        legal.min_by_key(|&pod| key(pod)).map(|pod| vec![pod])
    }

    /// Returns whether the taker fits after these pods have exited.
    fn makes_room(&self, taker: usize, gpu: usize, victims: &[usize], max: Option<Amount>) -> bool {
        let sum = |of: &dyn Fn(usize) -> bool| -> i128 {
            victims.iter().filter(|&&pod| of(pod)).map(|&pod| i128::from(self.charge(pod))).sum()
        };
        let charge = i128::from(self.charge(taker));
        let freed =
            self.unreserved(gpu, &self.rank_on(taker, gpu), true) + sum(&|pod| self.counts_on(pod) == Some(gpu));
        let used = i128::from(self.used(&self.owner(taker))) + charge - sum(&|_| true);
        freed >= charge && max.is_none_or(|max| used <= i128::from(max))
    }

    /// Returns the set of pods that frees enough capacity and spares the most important pods.
    /// `allowed` has the most important pod first.
    fn least_important(&self, taker: usize, gpu: usize, allowed: &[usize], max: Option<Amount>) -> Option<Vec<usize>> {
        let sets = 0..1_u32 << allowed.len();
        let victims_of = |set: u32| -> Vec<usize> {
            let leaves = |at: usize| set >> (allowed.len() - 1 - at) & 1 == 1;
            (0..allowed.len()).filter(|&at| leaves(at)).map(|at| allowed[at]).collect()
        };
        // The most important pod is the highest bit, so the smallest number spares the most
        // important pods.
        sets.map(victims_of).find(|victims| self.makes_room(taker, gpu, victims, max))
    }

    /// Returns the GPUs of the terminating pods of a quota.
    fn leaving_on(&self, owner: &Owner) -> BTreeSet<usize> {
        let leaving = self.pods().filter(|&pod| self.owner(pod) == *owner).filter_map(|pod| {
            let place = self.world.pods[pod].place;
            if let Place::Leaving { gpu, held: true } = place { Some(gpu) } else { None }
        });
        leaving.collect()
    }

    /// Returns whether a waiting pod is within its quota's guarantee together with the terminating
    /// pods of its quota.
    fn is_within_beside_leaving(&self, pod: usize) -> bool {
        let (owner, charge) = (self.owner(pod), self.charge(pod));
        let quota = self.quota(&owner);
        let Some(limit) = quota.cells() else { return self.held(&owner).plus(charge) <= quota.min() };
        let classes = self.classes();
        let is_own = |gpu: usize| classes.owner[gpu].as_ref() == Some(&owner);
        let gpus = || 0..self.world.gpus.len();
        let leaving_on = self.leaving_on(&owner);
        let has_room = |gpu: usize| is_own(gpu) && self.world.gpus[gpu].minus(classes.guaranteed[gpu]) >= charge;
        gpus().filter(|gpu| is_own(*gpu) || leaving_on.contains(gpu)).count() < limit || gpus().any(has_room)
    }

    /// Returns whether a quota stays within its guarantee if a pod gets a GPU before its pods that
    /// leave are gone.
    fn guarantees_beside_leaving(&self, taker: usize, gpu: usize) -> bool {
        let owner = self.owner(taker);
        let quota = self.quota(&owner);
        let mut gpus: Vec<usize> = self.leaving_on(&owner).into_iter().collect();
        if gpus.is_empty() {
            return true;
        }
        let Some(limit) = quota.cells() else {
            return self.held(&owner).plus(self.charge(taker)) <= quota.min();
        };
        let classes = self.classes();
        gpus.extend((0..self.world.gpus.len()).filter(|&at| classes.owner[at].as_ref() == Some(&owner)));
        gpus.push(gpu);
        gpus.sort_unstable();
        gpus.dedup();
        gpus.len() <= limit
    }

    fn is_legal(&self, taker: usize, kind: Kind, gpu: usize, victims: &[usize]) -> bool {
        let (owner, charge) = (self.owner(taker), self.charge(taker));
        let quota = self.quota(&owner);
        let sum = |pods: &[usize], of: &dyn Fn(usize) -> bool| -> Amount {
            pods.iter().filter(|&&pod| of(pod)).map(|&pod| self.charge(pod)).sum()
        };
        // Nominations that are withdrawn count like victims.
        let freed = i128::from(sum(victims, &|pod| self.counts_on(pod) == Some(gpu)));
        let displaced = self.displaced(gpu, &self.rank_on(taker, gpu), freed - i128::from(charge));
        let mut losers = victims.to_vec();
        losers.extend(displaced.into_iter().filter(|&pod| self.owner(pod) != owner));
        let less = |owner: &Owner| sum(&losers, &|pod| self.owner(pod) == *owner);
        let leaves_kept = || {
            let kept = self.kept(&owner, &losers);
            let rank = self.rank_on(taker, gpu);
            let freed = |gpu: usize| i128::from(sum(victims, &|pod| self.counts_on(pod) == Some(gpu)));
            let free: i128 = (0..self.world.gpus.len())
                .map(|gpu| (self.beside_older(taker, gpu, &rank, true) + freed(gpu)).max(0))
                .sum();
            kept == Amount::ZERO || free - i128::from(charge) >= i128::from(kept)
        };
        match kind {
            _ if !quota.is_enforced() => true,
            Kind::Reclaim if victims.is_empty() => {
                self.is_within_beside_leaving(taker) || self.leaving_on(&owner).contains(&gpu) || leaves_kept()
            }
            Kind::Reclaim => self.guarantees_beside_leaving(taker, gpu),
            Kind::FairShare => {
                let leaving = self.held(&owner).minus(self.used(&owner));
                let share = self.share(&owner, charge.plus(leaving), Amount::ZERO);
                let others = victims.iter().map(|&pod| self.owner(pod));
                others.into_iter().all(|other| share <= self.share(&other, Amount::ZERO, less(&other))) && leaves_kept()
            }
            Kind::Priority => {
                let used = self.used(&owner);
                let after = used.plus(charge).minus(less(&owner));
                let classes = self.classes();
                if self.overriding(taker).is_some() {
                    return quota.max().is_none_or(|max| after <= max);
                }
                quota.max().is_none_or(|max| after <= max)
                    && (victims.iter().all(|pod| classes.of[pod] == Class::Over)
                        || self.class_with(taker, gpu, victims) == Class::In)
                    && (after <= quota.min() || after <= used || leaves_kept())
            }
        }
    }
}
