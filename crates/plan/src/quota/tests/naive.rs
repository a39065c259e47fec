//! The naive model: the rules of quotas, written in the simplest way. Each call computes all sums
//! again.
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::super::{Amount, Class, Mode, Owner, Place, Quota, Share, World};
use super::worlds::describe;
use crate::ledger::Moment;

/// A pool at one moment.
#[derive(Clone)]
pub(super) struct Pool {
    pub(super) world: World,
    pub(super) now: Moment,
    /// Rank of each nominated pod.
    pub(super) ranks: BTreeMap<usize, Rank>,
    /// Pods with a reservation because they have waited long: the GPU and the pod's rank.
    pub(super) reserved: BTreeMap<usize, (usize, Rank)>,
    /// Pods with a reservation, in the order of precedence.
    old: Vec<usize>,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at {}: {}", self.now.0, describe(&self.world))
    }
}

/// Owner, class and priority of a nominated or waiting pod, and the priority again if it overrides
/// quotas.
pub(super) type Rank = (Owner, Class, i32, Option<i32>);

/// Classes of all pods, and the owner of each GPU.
#[derive(Debug, Clone, Default)]
pub(super) struct Classes {
    pub(super) of: BTreeMap<usize, Class>,
    pub(super) owner: Vec<Option<Owner>>,
    /// Amount of each GPU that pods within a guarantee use.
    pub(super) guaranteed: Vec<Amount>,
}

impl Classes {
    pub(super) fn cells(&self, owner: &Owner) -> usize {
        self.owner.iter().flatten().filter(|one| *one == owner).count()
    }
}

pub(super) fn has_cells(quota: &Quota) -> bool {
    quota.cells().is_some()
}

impl Pool {
    /// Creates a pool without the ranks of nominated pods, for functions that do not read ranks.
    pub(super) fn at(world: World, now: Moment) -> Self {
        Self { world, now, ranks: BTreeMap::new(), reserved: BTreeMap::new(), old: Vec::new() }
    }

    pub(super) fn new(world: &World, now: Moment) -> Self {
        let mut pool = Self::at(world.clone(), now);
        let classes = pool.classes();
        for at in 0..world.pods.len() {
            if pool.nominated(at).is_some() {
                pool.ranks.insert(at, pool.rank(at, classes.of[&at]));
            }
        }
        pool
    }

    /// Returns the owner of a pod. A pod whose quota does not exist has no quota.
    pub(super) fn owner(&self, pod: usize) -> Owner {
        match &self.world.pods[pod].owner {
            Owner::Quota(name) if !self.world.quotas.contains_key(name) => Owner::Unnamed,
            owner => owner.clone(),
        }
    }

    pub(super) fn quota(&self, owner: &Owner) -> Quota {
        match owner {
            Owner::Quota(name) => self.world.quotas[name],
            Owner::Unnamed => Quota::new(Amount::ZERO),
            Owner::Outside => Quota::new(Amount::ZERO).with_mode(Mode::Count),
        }
    }

    /// Returns the owner whose rights a pod has. Quotas that are not enforced grant no rights.
    pub(super) fn rights(&self, pod: usize) -> Owner {
        let owner = self.owner(pod);
        if self.quota(&owner).is_enforced() { owner } else { Owner::Outside }
    }

    pub(super) fn rank(&self, pod: usize, class: Class) -> Rank {
        let rights = self.rights(pod);
        let class = if rights == Owner::Outside { Class::Over } else { class };
        (rights, class, self.world.pods[pod].priority, self.overriding(pod))
    }

    /// Returns whether a pod, and all other pods of its gang, may run outside the guarantee.
    pub(super) fn borrows(&self, pod: usize) -> bool {
        self.pods().filter(|&other| self.are_together(pod, other)).all(|other| self.world.pods[other].borrows)
    }

    /// Returns the priority of a pod if it overrides quotas.
    pub(super) fn overriding(&self, pod: usize) -> Option<i32> {
        let priority = self.world.pods[pod].priority;
        let overrides = self.world.settings.override_priority.is_some_and(|limit| priority >= limit);
        (overrides && self.rights(pod) != Owner::Outside).then_some(priority)
    }

    pub(super) fn pods(&self) -> impl Iterator<Item = usize> + use<> {
        0..self.world.pods.len()
    }

    pub(super) fn charge(&self, pod: usize) -> Amount {
        self.world.pods[pod].charge
    }

    pub(super) fn nominated(&self, pod: usize) -> Option<usize> {
        match self.world.pods[pod].place {
            Place::Waiting { nominated } => nominated,
            _ => None,
        }
    }

    /// Returns the GPU on which a pod runs or is nominated.
    pub(super) fn counts_on(&self, pod: usize) -> Option<usize> {
        match self.world.pods[pod].place {
            Place::Running { gpu, .. } => Some(gpu),
            _ => self.nominated(pod),
        }
    }

    /// Returns the time since which a pod counts. Nominated pods count from now on, after all other
    /// pods.
    pub(super) fn since(&self, pod: usize) -> (Moment, Option<Moment>) {
        match self.world.pods[pod].place {
            Place::Running { since, .. } => (since, None),
            _ => (self.now, Some(self.world.pods[pod].created)),
        }
    }

    pub(super) fn sum(&self, is_counted: impl Fn(usize) -> bool) -> Amount {
        self.pods().filter(|&pod| is_counted(pod)).map(|pod| self.charge(pod)).sum()
    }

    /// Returns the amount that a quota uses, without terminating pods.
    pub(super) fn used(&self, owner: &Owner) -> Amount {
        self.sum(|pod| self.owner(pod) == *owner && self.counts_on(pod).is_some())
    }

    /// Returns the amount that a quota uses, with terminating pods.
    pub(super) fn held(&self, owner: &Owner) -> Amount {
        let leaves = |pod: usize| matches!(self.world.pods[pod].place, Place::Leaving { held: true, .. });
        self.used(owner).plus(self.sum(|pod| self.owner(pod) == *owner && leaves(pod)))
    }

    /// Returns the class of each counted pod.
    pub(super) fn classes(&self) -> Classes {
        let mut classes = BTreeMap::new();
        let counting: Vec<usize> = self.pods().filter(|&pod| self.counts_on(pod).is_some()).collect();
        let mut important = counting.clone();
        important.sort_by_key(|&pod| {
            (self.borrows(pod), Reverse(self.priority(pod)), self.since(pod), &self.world.pods[pod].name)
        });
        let mut left: BTreeMap<Owner, Amount> = BTreeMap::new();
        for pod in important {
            if classes.contains_key(&pod) {
                continue;
            }
            let owner = self.owner(pod);
            let left = left.entry(owner.clone()).or_insert_with(|| self.quota(&owner).min());
            let gang: Vec<usize> = counting.iter().copied().filter(|&other| self.are_together(pod, other)).collect();
            let charge = self.sum(|other| gang.contains(&other));
            let is_within = charge <= *left;
            if is_within {
                *left = left.minus(charge);
            }
            classes.extend(gang.into_iter().map(|pod| (pod, if is_within { Class::In } else { Class::Over })));
        }
        if self.world.quotas.values().all(|quota| !has_cells(quota)) {
            let gpus = self.world.gpus.len();
            return Classes { of: classes, owner: vec![None; gpus], guaranteed: vec![Amount::ZERO; gpus] };
        }
        // Quotas that are not enforced own no GPUs. Their pods have the classes that they would
        // have if the quotas were enforced.
        let as_if = self.with_cells(&counting, classes.clone());
        let enforced: Vec<usize> =
            counting.into_iter().filter(|&pod| self.quota(&self.owner(pod)).is_enforced()).collect();
        let mut real = self.with_cells(&enforced, classes);
        for (pod, class) in as_if.of {
            if !enforced.contains(&pod) {
                real.of.insert(pod, class);
            }
        }
        real
    }

    /// Determines the classes of pods whose quotas guarantee cells, from the other pods' classes.
    pub(super) fn with_cells(&self, counting: &[usize], counted: BTreeMap<usize, Class>) -> Classes {
        let gpus = self.world.gpus.len();
        let mut classes = Classes { of: counted, owner: vec![None; gpus], guaranteed: vec![Amount::ZERO; gpus] };
        let mut oldest: Vec<usize> = counting.to_vec();
        oldest.sort_by_key(|&pod| (self.since(pod), &self.world.pods[pod].name));
        let mut seen = BTreeSet::new();
        for pod in oldest {
            if !seen.insert(pod) {
                continue;
            }
            let owner = self.owner(pod);
            let gang: Vec<usize> = counting.iter().copied().filter(|&other| self.are_together(pod, other)).collect();
            let gpus: Vec<usize> = gang.iter().filter_map(|&pod| self.counts_on(pod)).collect();
            seen.extend(gang.iter().copied());
            if has_cells(&self.quota(&owner)) {
                let class = self.class_in_cells(&classes, &owner, &gpus);
                gang.iter().for_each(|&pod| {
                    classes.of.insert(pod, class);
                });
            }
            for (pod, gpu) in gang.into_iter().zip(gpus) {
                if classes.of[&pod] == Class::In {
                    classes.guaranteed[gpu] = classes.guaranteed[gpu].plus(self.charge(pod));
                    classes.owner[gpu].get_or_insert(owner.clone());
                }
            }
        }
        classes
    }

    pub(super) fn class_in_cells(&self, classes: &Classes, owner: &Owner, gpus: &[usize]) -> Class {
        let limit = self.quota(owner).cells().unwrap();
        let mut after = classes.clone();
        for &gpu in gpus {
            let is_mine = after.owner[gpu].get_or_insert_with(|| owner.clone()) == owner;
            let is_new = classes.owner[gpu].is_none();
            if !is_mine || is_new && after.cells(owner) > limit {
                return Class::Over;
            }
        }
        Class::In
    }

    /// Returns the priority of a pod, which is the highest priority in its gang.
    pub(super) fn priority(&self, pod: usize) -> i32 {
        let members = self.pods().filter(|&other| self.are_together(pod, other));
        members.map(|other| self.world.pods[other].priority).max().unwrap()
    }

    /// Returns whether two pods are the same pod or belong to one gang. Terminating pods belong to
    /// no gang.
    pub(super) fn are_together(&self, pod: usize, other: usize) -> bool {
        let gang = |pod: usize| {
            let one = &self.world.pods[pod];
            let stays = !matches!(one.place, Place::Leaving { .. });
            one.gang.as_ref().filter(|_| stays).map(|gang| (self.owner(pod), &gang.name))
        };
        pod == other || gang(pod).is_some() && gang(pod) == gang(other)
    }

    /// Returns the class that a pod would have on a GPU without some other pods. The pod is the
    /// last of its priority.
    pub(super) fn class_with(&self, pod: usize, gpu: usize, without: &[usize]) -> Class {
        let owner = self.owner(pod);
        let quota = self.quota(&owner);
        let mut others: Vec<usize> = self.pods().filter(|&other| self.counts_on(other).is_some()).collect();
        others.retain(|other| !without.contains(other));
        if has_cells(&quota) {
            others.retain(|&other| self.quota(&self.owner(other)).is_enforced());
            return self.class_in_cells(&self.with_cells(&others, self.classes().of), &owner, &[gpu]);
        }
        let priority = |pod: usize| self.world.pods[pod].priority;
        let rank = |pod: usize| (self.world.pods[pod].borrows, Reverse(priority(pod)));
        others.retain(|&other| self.owner(other) == owner && rank(other) <= rank(pod));
        others.sort_by_key(|&other| (rank(other), self.since(other), &self.world.pods[other].name));
        let mut left = quota.min();
        for other in others {
            left = if self.charge(other) <= left { left.minus(self.charge(other)) } else { left };
        }
        if self.charge(pod) <= left { Class::In } else { Class::Over }
    }

    /// Returns the share of a quota after its use grows by `more` and falls by `less`.
    pub(super) fn share(&self, owner: &Owner, more: Amount, less: Amount) -> Share {
        let quota = self.quota(owner);
        let excess = if !quota.is_enforced() {
            let is_outside = |pod: usize| self.counts_on(pod).is_some() && self.rights(pod) == Owner::Outside;
            self.sum(is_outside).plus(more).minus(less)
        } else if has_cells(&quota) {
            let classes = self.classes();
            self.sum(|pod| self.owner(pod) == *owner && classes.of.get(&pod) == Some(&Class::Over))
                .plus(more)
                .minus(less)
        } else {
            self.used(owner).plus(more).minus(less).minus(quota.min())
        };
        Share { excess, weight: if quota.is_enforced() { quota.weight() } else { 1 } }
    }

    /// Returns whether a waiting pod is within its quota's guarantee.
    pub(super) fn is_within(&self, pod: usize) -> bool {
        let (owner, charge) = (self.owner(pod), self.charge(pod));
        let quota = self.quota(&owner);
        let Some(limit) = quota.cells() else { return self.used(&owner).plus(charge) <= quota.min() };
        let classes = self.classes();
        let has_room = |gpu: usize| {
            classes.owner[gpu].as_ref() == Some(&owner) && self.world.gpus[gpu].minus(classes.guaranteed[gpu]) >= charge
        };
        classes.cells(&owner) < limit || (0..self.world.gpus.len()).any(has_room)
    }

    /// Returns all owners: the quotas, and the two owners of pods without a quota.
    pub(super) fn owners(&self) -> Vec<Owner> {
        let quotas = self.world.quotas.keys().cloned().map(Owner::Quota);
        quotas.chain([Owner::Unnamed, Owner::Outside]).collect()
    }

    /// Returns the amount that must stay free for other quotas, without some pods.
    pub(super) fn kept(&self, owner: &Owner, without: &[usize]) -> Amount {
        let others = self.owners().into_iter().filter(|other| other != owner && self.quota(other).is_enforced());
        let kept = |other: Owner| {
            let gone: Amount =
                without.iter().filter(|&&pod| self.owner(pod) == other).map(|&pod| self.charge(pod)).sum();
            self.quota(&other).unlent().minus(self.used(&other).minus(gone))
        };
        others.map(kept).sum()
    }

    pub(super) fn respects(rank: &Rank, nominee: &Rank) -> bool {
        if rank.3.max(nominee.3).is_some() {
            return rank.3 <= nominee.3;
        }
        if rank.1 == nominee.1 { rank.0 != nominee.0 || rank.2 <= nominee.2 } else { rank.1 < nominee.1 }
    }

    pub(super) fn rank_on(&self, pod: usize, gpu: usize) -> Rank {
        self.rank(pod, self.class_with(pod, gpu, &[]))
    }

    /// Returns the free capacity of a GPU for a pod of this rank. With `later`, terminating pods
    /// count as exited.
    pub(super) fn free(&self, gpu: usize, rank: &Rank, later: bool) -> i128 {
        let takes = |pod: usize| match self.world.pods[pod].place {
            Place::Running { gpu: at, .. } => at == gpu,
            Place::Leaving { gpu: at, .. } => at == gpu && !later,
            Place::Waiting { nominated } => nominated == Some(gpu) && Self::respects(rank, &self.ranks[&pod]),
        };
        i128::from(self.world.gpus[gpu]) - i128::from(self.sum(takes))
    }

    /// Returns the capacity of a GPU that is free now for a pod that was nominated there.
    /// Nominations of pods that come after the pod do not count.
    pub(super) fn free_for_nominee(&self, pod: usize, gpu: usize, rank: &Rank) -> i128 {
        let key = |pod: usize| (self.world.pods[pod].created, self.world.pods[pod].name.clone());
        let mut alone = self.clone();
        for other in self.pods().filter(|&other| self.nominated(other) == Some(gpu)) {
            let (owner, class, priority, overriding) = self.ranks[&other].clone();
            let is_higher = (overriding, class) > (rank.3, rank.1) || owner == rank.0 && priority > rank.2;
            if !is_higher && key(other) > key(pod) {
                alone.withdraw(other);
            }
        }
        alone.free(gpu, rank, false)
    }

    /// Like [`Self::free`], but without capacity that is reserved for pods that have waited long.
    pub(super) fn unreserved(&self, gpu: usize, rank: &Rank, later: bool) -> i128 {
        let seen = self.reserved.iter().filter(|(_, (at, reserved))| *at == gpu && Self::respects(rank, reserved));
        self.free(gpu, rank, later) - seen.map(|(&pod, _)| i128::from(self.charge(pod))).sum::<i128>()
    }

    /// Reserves capacity for pods that have waited long.
    pub(super) fn reserve(&mut self, waiting: &[usize]) {
        let Some(ageing) = self.world.settings.ageing else { return };
        let pods = &self.world.pods;
        let may_run = |pod: usize| {
            let owner = self.rights(pod);
            let quota = self.quota(&owner);
            let is_before = |other: usize| {
                let is_more_important = pods[other].priority > pods[pod].priority;
                self.counts_on(other).is_some() && (is_more_important || !self.has_overtaken(other, pod))
            };
            let used = self.sum(|other| self.rights(other) == owner && is_before(other)).plus(self.charge(pod));
            let is_never = !pods[pod].borrows && !has_cells(&quota);
            let fits = quota.max().is_none_or(|max| used <= max) && (!is_never || used <= quota.min());
            !quota.is_enforced() || fits && self.would_leave_kept_room(pod)
        };
        let first = |owner: Owner| {
            let old = waiting.iter().copied().filter(|&pod| self.rights(pod) == owner && may_run(pod));
            let old = old.filter(|&pod| pods[pod].created.0 + ageing <= self.now.0);
            old.min_by_key(|&pod| (Reverse(pods[pod].priority), pods[pod].created, &pods[pod].name))
        };
        let mut old: Vec<usize> = self.owners().into_iter().filter_map(first).collect();
        old.retain(|&pod| self.nominated(pod).is_none());
        let is_within = |pod: usize| self.rights(pod) != Owner::Outside && self.is_within(pod);
        old.sort_by_key(|&pod| (!is_within(pod), pods[pod].created, pods[pod].name.clone()));
        for pod in old {
            if let Some(gpu) = self.overtaken_on(pod) {
                let rank = self.rank_on(pod, gpu);
                self.reserved.insert(pod, (gpu, rank));
                self.old.push(pod);
            }
        }
    }

    /// Returns whether a pod would leave enough free for other quotas if no pod had overtaken it.
    fn would_leave_kept_room(&self, pod: usize) -> bool {
        let counted = || self.pods().filter(|&other| self.counts_on(other).is_some());
        let overtaking: Vec<usize> = counted().filter(|&other| self.has_overtaken(other, pod)).collect();
        let older = self.sum(|other| self.counts_on(other).is_some() && !overtaking.contains(&other));
        let size: i128 = self.world.gpus.iter().map(|&size| i128::from(size)).sum();
        let kept = i128::from(self.kept(&self.owner(pod), &overtaking));
        let may_borrow_all = self.is_within(pod) || self.overriding(pod).is_some() || kept == 0;
        may_borrow_all || size - i128::from(older) - i128::from(self.charge(pod)) >= kept
    }

    /// Returns whether a counted pod has overtaken a waiting pod: it was released after the waiting
    /// pod's creation, or it is nominated and was created later.
    fn has_overtaken(&self, other: usize, pod: usize) -> bool {
        let key = |pod: usize| (self.world.pods[pod].created, self.world.pods[pod].name.clone());
        match self.world.pods[other].place {
            Place::Running { since, .. } => since > key(pod).0,
            _ => key(other) > key(pod),
        }
    }

    /// Returns the GPU on which capacity is reserved for a pod. Of the GPUs on which the pod would
    /// fit without the pods that overtook it, this is the GPU on which the last pod that must end
    /// was released first.
    pub(super) fn overtaken_on(&self, pod: usize) -> Option<usize> {
        let of_cells = has_cells(&self.quota(&self.rights(pod))) && self.is_within(pod);
        let possible = (0..self.world.gpus.len()).filter(|&gpu| {
            let older = self.sum(|other| self.counts_on(other) == Some(gpu) && !self.has_overtaken(other, pod));
            self.world.gpus[gpu].minus(older) >= self.charge(pod)
                && (!of_cells || self.class_with(pod, gpu, &[]) == Class::In)
                && self.reserved.values().all(|(other, _)| *other != gpu)
        });
        // The pod fits once all pods that were released up to this time have ended.
        let last_to_end = |gpu: usize| {
            let times =
                self.pods().filter(|&other| self.counts_on(other) == Some(gpu)).map(|other| self.since(other).0);
            let fits = |time: &Moment| {
                let left = self.sum(|other| self.counts_on(other) == Some(gpu) && self.since(other).0 > *time);
                self.world.gpus[gpu].minus(left) >= self.charge(pod)
            };
            times.chain([Moment(0)]).filter(fits).min()
        };
        possible.min_by_key(|&gpu| (last_to_end(gpu), gpu))
    }

    /// Returns whether a pod must wait for a pod of the same quota that has a reservation: both
    /// together would exceed the quota's maximum or guarantee.
    pub(super) fn overtakes(&self, pod: usize) -> bool {
        let (owner, charge) = (self.rights(pod), self.charge(pod));
        let quota = self.quota(&owner);
        let pods = &self.world.pods;
        let mut firsts = self.reserved.keys().filter(|&&first| {
            first != pod && self.rights(first) == owner && pods[first].priority >= pods[pod].priority
        });
        quota.is_enforced()
            && firsts.any(|&first| {
                let both = charge.plus(self.charge(first));
                quota.max().is_some_and(|max| self.held(&owner).plus(both) > max)
                    || !pods[first].borrows && !has_cells(&quota) && self.used(&owner).plus(both) > quota.min()
            })
    }

    /// Returns the capacity of a GPU that counts as free when checking that enough stays free for
    /// other quotas. Only reservations that precede the pod's own reservation are subtracted.
    pub(super) fn beside_older(&self, pod: usize, gpu: usize, rank: &Rank, later: bool) -> i128 {
        let mut pool = self.clone();
        let before: Vec<usize> = self.old.iter().copied().take_while(|&old| old != pod).collect();
        pool.reserved.retain(|other, _| before.contains(other));
        pool.unreserved(gpu, rank, later)
    }

    // The following functions change the pool.

    pub(super) fn nominate(&mut self, pod: usize, gpu: usize, rank: &Rank, victims: &[usize]) {
        for &victim in victims {
            let Some(gpu) = self.counts_on(victim) else { continue };
            self.world.pods[victim].place = Place::Leaving { gpu, held: true };
        }
        self.place(pod, Place::Waiting { nominated: Some(gpu) }, rank, gpu);
    }

    /// Returns whether all nominated pods that are within a guarantee in this pool are also within
    /// a guarantee in another pool.
    pub(super) fn keeps_guarantees_in(&self, after: &Self) -> bool {
        let (before, classes) = (self.classes(), after.classes());
        let nominated = self.pods().filter(|&pod| self.nominated(pod).is_some() && after.nominated(pod).is_some());
        let mut within = nominated.filter(|&pod| self.rank(pod, before.of[&pod]).1 == Class::In);
        within.all(|pod| classes.of[&pod] == Class::In)
    }

    /// Returns whether an enforced quota guarantees cells.
    pub(super) fn has_cells(&self) -> bool {
        self.world.quotas.values().any(|quota| has_cells(quota) && quota.is_enforced())
    }

    /// Returns whether a pod can be released to a GPU without a nominated pod losing its guarantee.
    pub(super) fn may_release(&self, pod: usize, gpu: usize) -> bool {
        let is_near =
            |other: usize| self.nominated(other).is_some_and(|at| at == gpu || self.owner(other) == self.owner(pod));
        if !self.has_cells() || !self.pods().any(is_near) {
            return true;
        }
        let mut after = self.clone();
        after.place(pod, Place::Running { gpu, since: self.now }, &self.rank_on(pod, gpu), gpu);
        self.keeps_guarantees_in(&after)
    }

    pub(super) fn place(&mut self, pod: usize, place: Place, rank: &Rank, gpu: usize) {
        self.world.pods[pod].place = place;
        if self.nominated(pod).is_some() {
            self.ranks.insert(pod, rank.clone());
        }
        for other in self.displaced(gpu, rank, 0) {
            self.withdraw(other);
        }
    }

    /// Returns the nominated pods of lower rank for which a GPU has not enough capacity after
    /// `more` capacity becomes free.
    pub(super) fn displaced(&self, gpu: usize, rank: &Rank, more: i128) -> Vec<usize> {
        let mut ignored: Vec<usize> = self.pods().filter(|&other| self.nominated(other) == Some(gpu)).collect();
        ignored.retain(|other| !Self::respects(rank, &self.ranks[other]));
        ignored.sort_by_key(|&other| {
            let pod = &self.world.pods[other];
            let (_, class, priority, overriding) = self.ranks[&other];
            (overriding, class, priority, Reverse((pod.created, pod.name.clone())))
        });
        let mut left = self.room_after_all(gpu) + more;
        ignored.retain(|&other| {
            let is_displaced = left < 0;
            left += if is_displaced { i128::from(self.charge(other)) } else { 0 };
            is_displaced
        });
        ignored
    }

    /// Returns the free capacity of a GPU once terminating pods have exited and nominated pods have
    /// been released.
    pub(super) fn room_after_all(&self, gpu: usize) -> i128 {
        i128::from(self.world.gpus[gpu]) - i128::from(self.sum(|pod| self.counts_on(pod) == Some(gpu)))
    }

    pub(super) fn withdraw(&mut self, pod: usize) -> Option<usize> {
        let gpu = self.nominated(pod)?;
        self.world.pods[pod].place = Place::Waiting { nominated: None };
        self.ranks.remove(&pod);
        Some(gpu)
    }
}
