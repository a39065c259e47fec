//! The rules of quotas, written as plainly as possible: sums are added up anew each time, and
//! victims are found among all sets of pods.
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;

use super::super::{
    Amount, Class, Exchange, Kind, Mode, Outcome, Owner, Place, PodId, Quota, Released, Share, Wait, World,
};
use super::worlds::describe;
use crate::ledger::Moment;

/// Pods of this priority and above are never evicted.
const SYSTEM: i32 = 2_000_000_000;

/// A pool at a time.
#[derive(Clone)]
pub(super) struct Pool {
    pub(super) world: World,
    pub(super) now: Moment,
    /// Rank of each nominated pod.
    ranks: BTreeMap<usize, Rank>,
    /// Pods that have waited long: the GPU on which room is reserved for them, and their rank.
    reserved: BTreeMap<usize, (usize, Rank)>,
    /// All pods that have waited long, the first first.
    old: Vec<usize>,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at {}: {}", self.now.0, describe(&self.world))
    }
}

/// Account, class and priority of a pod that has or wants room.
type Rank = (Owner, Class, i32);

/// Classes of all pods, and who owns which GPU.
#[derive(Debug, Clone, Default)]
pub(super) struct Classes {
    pub(super) of: BTreeMap<usize, Class>,
    pub(super) owner: Vec<Option<Owner>>,
    /// What pods within a guarantee use of each GPU.
    pub(super) guaranteed: Vec<Amount>,
}

impl Classes {
    pub(super) fn cells(&self, owner: &Owner) -> usize {
        self.owner.iter().flatten().filter(|one| *one == owner).count()
    }
}

fn has_cells(quota: &Quota) -> bool {
    quota.cells().is_some()
}

impl Pool {
    /// Returns a pool for questions that do not depend on nominations.
    pub(super) fn at(world: World, now: Moment) -> Self {
        Self { world, now, ranks: BTreeMap::new(), reserved: BTreeMap::new(), old: Vec::new() }
    }

    fn new(world: &World, now: Moment) -> Self {
        let mut pool = Self::at(world.clone(), now);
        let classes = pool.classes();
        for at in 0..world.pods.len() {
            if pool.nominated(at).is_some() {
                pool.ranks.insert(at, pool.rank(at, classes.of[&at]));
            }
        }
        pool
    }

    /// Returns the quota of a pod. A pod whose quota does not exist has none.
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

    /// Returns whose rights a pod has. Quotas that are not enforced give none.
    fn rights(&self, pod: usize) -> Owner {
        let owner = self.owner(pod);
        if self.quota(&owner).is_enforced() { owner } else { Owner::Outside }
    }

    fn rank(&self, pod: usize, class: Class) -> Rank {
        let rights = self.rights(pod);
        let class = if rights == Owner::Outside { Class::Over } else { class };
        (rights, class, self.world.pods[pod].priority)
    }

    fn pods(&self) -> impl Iterator<Item = usize> + use<> {
        0..self.world.pods.len()
    }

    fn charge(&self, pod: usize) -> Amount {
        self.world.pods[pod].charge
    }

    fn nominated(&self, pod: usize) -> Option<usize> {
        match self.world.pods[pod].place {
            Place::Waiting { nominated } => nominated,
            _ => None,
        }
    }

    /// Returns the GPU on which a pod counts: it runs there, or room is kept for it.
    fn counts_on(&self, pod: usize) -> Option<usize> {
        match self.world.pods[pod].place {
            Place::Running { gpu, .. } => Some(gpu),
            _ => self.nominated(pod),
        }
    }

    /// Since when a pod counts. Nominated pods count from now on, after all others.
    pub(super) fn since(&self, pod: usize) -> (Moment, Option<Moment>) {
        match self.world.pods[pod].place {
            Place::Running { since, .. } => (since, None),
            _ => (self.now, Some(self.world.pods[pod].created)),
        }
    }

    fn sum(&self, is_counted: impl Fn(usize) -> bool) -> Amount {
        self.pods().filter(|&pod| is_counted(pod)).map(|pod| self.charge(pod)).sum()
    }

    /// Returns what a quota uses, without pods that leave.
    pub(super) fn used(&self, owner: &Owner) -> Amount {
        self.sum(|pod| self.owner(pod) == *owner && self.counts_on(pod).is_some())
    }

    /// Returns what a quota holds, with pods that leave.
    pub(super) fn held(&self, owner: &Owner) -> Amount {
        let leaves = |pod: usize| matches!(self.world.pods[pod].place, Place::Leaving { held: true, .. });
        self.used(owner).plus(self.sum(|pod| self.owner(pod) == *owner && leaves(pod)))
    }

    /// Returns the class of each pod that counts.
    pub(super) fn classes(&self) -> Classes {
        let mut classes = BTreeMap::new();
        let counting: Vec<usize> = self.pods().filter(|&pod| self.counts_on(pod).is_some()).collect();
        let mut important = counting.clone();
        important
            .sort_by_key(|&pod| (Reverse(self.world.pods[pod].priority), self.since(pod), &self.world.pods[pod].name));
        let mut left: BTreeMap<Owner, Amount> = BTreeMap::new();
        for pod in important {
            let owner = self.owner(pod);
            let left = left.entry(owner.clone()).or_insert_with(|| self.quota(&owner).min());
            let is_within = self.charge(pod) <= *left;
            if is_within {
                *left = left.minus(self.charge(pod));
            }
            classes.insert(pod, if is_within { Class::In } else { Class::Over });
        }
        if self.world.quotas.values().all(|quota| !has_cells(quota)) {
            let gpus = self.world.gpus.len();
            return Classes { of: classes, owner: vec![None; gpus], guaranteed: vec![Amount::ZERO; gpus] };
        }
        // Quotas that are not enforced own nothing. Their pods' classes are what they would be.
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
    fn with_cells(&self, counting: &[usize], counted: BTreeMap<usize, Class>) -> Classes {
        let gpus = self.world.gpus.len();
        let mut classes = Classes { of: counted, owner: vec![None; gpus], guaranteed: vec![Amount::ZERO; gpus] };
        let mut oldest: Vec<usize> = counting.to_vec();
        oldest.sort_by_key(|&pod| (self.since(pod), &self.world.pods[pod].name));
        for pod in oldest {
            let (owner, gpu) = (self.owner(pod), self.counts_on(pod).unwrap());
            if has_cells(&self.quota(&owner)) {
                classes.of.insert(pod, self.class_in_cells(&classes, &owner, gpu));
            }
            if classes.of[&pod] == Class::In {
                classes.guaranteed[gpu] = classes.guaranteed[gpu].plus(self.charge(pod));
                classes.owner[gpu].get_or_insert(owner);
            }
        }
        classes
    }

    fn class_in_cells(&self, classes: &Classes, owner: &Owner, gpu: usize) -> Class {
        let limit = self.quota(owner).cells().unwrap();
        match &classes.owner[gpu] {
            Some(other) if other == owner => Class::In,
            None if classes.cells(owner) < limit => Class::In,
            _ => Class::Over,
        }
    }

    /// Returns the class of a pod on a GPU after others are gone. It is the last of its priority.
    fn class_with(&self, pod: usize, gpu: usize, without: &[usize]) -> Class {
        let owner = self.owner(pod);
        let quota = self.quota(&owner);
        let mut others: Vec<usize> = self.pods().filter(|&other| self.counts_on(other).is_some()).collect();
        others.retain(|other| !without.contains(other));
        if has_cells(&quota) {
            others.retain(|&other| self.quota(&self.owner(other)).is_enforced());
            return self.class_in_cells(&self.with_cells(&others, self.classes().of), &owner, gpu);
        }
        let priority = |pod: usize| self.world.pods[pod].priority;
        others.retain(|&other| self.owner(other) == owner && priority(other) >= priority(pod));
        others.sort_by_key(|&other| (Reverse(priority(other)), self.since(other), &self.world.pods[other].name));
        let mut left = quota.min();
        for other in others {
            left = if self.charge(other) <= left { left.minus(self.charge(other)) } else { left };
        }
        if self.charge(pod) <= left { Class::In } else { Class::Over }
    }

    /// Returns what a quota has beyond its guarantee after it uses `more` and `less`.
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

    /// Returns all quotas, and what pods without a quota are counted against.
    pub(super) fn owners(&self) -> Vec<Owner> {
        let quotas = self.world.quotas.keys().cloned().map(Owner::Quota);
        quotas.chain([Owner::Unnamed, Owner::Outside]).collect()
    }

    /// Returns what must stay free for other quotas after some pods have left.
    fn kept(&self, owner: &Owner, without: &[usize]) -> Amount {
        let others = self.owners().into_iter().filter(|other| other != owner && self.quota(other).is_enforced());
        let kept = |other: Owner| {
            let gone: Amount =
                without.iter().filter(|&&pod| self.owner(pod) == other).map(|&pod| self.charge(pod)).sum();
            self.quota(&other).unlent().minus(self.used(&other).minus(gone))
        };
        others.map(kept).sum()
    }

    fn sees(rank: &Rank, nominee: &Rank) -> bool {
        if rank.1 != nominee.1 { rank.1 < nominee.1 } else { rank.0 != nominee.0 || rank.2 <= nominee.2 }
    }

    fn rank_on(&self, pod: usize, gpu: usize) -> Rank {
        self.rank(pod, self.class_with(pod, gpu, &[]))
    }

    /// Returns the room of a GPU that a pod of this rank sees: now, or after pods have left.
    fn free(&self, gpu: usize, rank: &Rank, later: bool) -> i128 {
        let takes = |pod: usize| match self.world.pods[pod].place {
            Place::Running { gpu: at, .. } => at == gpu,
            Place::Leaving { gpu: at, .. } => at == gpu && !later,
            Place::Waiting { nominated } => nominated == Some(gpu) && Self::sees(rank, &self.ranks[&pod]),
        };
        i128::from(self.world.gpus[gpu]) - i128::from(self.sum(takes))
    }

    /// As [`Self::free`], without room that is reserved for pods that have waited long.
    fn unreserved(&self, gpu: usize, rank: &Rank, later: bool) -> i128 {
        let seen = self.reserved.iter().filter(|(_, (at, reserved))| *at == gpu && Self::sees(rank, reserved));
        self.free(gpu, rank, later) - seen.map(|(&pod, _)| i128::from(self.charge(pod))).sum::<i128>()
    }

    /// Reserves room for pods that have waited long.
    fn reserve(&mut self, waiting: &[usize]) {
        let Some(ageing) = self.world.settings.ageing else { return };
        let pods = &self.world.pods;
        let may_run = |pod: usize| {
            let owner = self.rights(pod);
            let quota = self.quota(&owner);
            let is_before = |other: usize| match pods[other].place {
                Place::Running { since, .. } => since <= pods[pod].created || pods[other].priority > pods[pod].priority,
                _ => self.nominated(other).is_some(),
            };
            let used = self.sum(|other| self.rights(other) == owner && is_before(other)).plus(self.charge(pod));
            let is_never = !pods[pod].borrows && !has_cells(&quota);
            let fits = quota.max().is_none_or(|max| used <= max) && (!is_never || used <= quota.min());
            !quota.is_enforced() || fits
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

    /// Returns the GPU on which a pod was overtaken, and whose last pod was released first.
    fn overtaken_on(&self, pod: usize) -> Option<usize> {
        let of_cells = has_cells(&self.quota(&self.rights(pod))) && self.is_within(pod);
        let is_older =
            |other: usize| self.nominated(other).is_some() || self.since(other).0 <= self.world.pods[pod].created;
        let possible = (0..self.world.gpus.len()).filter(|&gpu| {
            let older = self.sum(|other| self.counts_on(other) == Some(gpu) && is_older(other));
            self.world.gpus[gpu].minus(older) >= self.charge(pod)
                && (!of_cells || self.class_with(pod, gpu, &[]) == Class::In)
                && self.reserved.values().all(|(other, _)| *other != gpu)
        });
        let last_release = |gpu: usize| {
            let on = self.pods().filter(|&other| self.counts_on(other) == Some(gpu));
            on.map(|other| self.since(other).0).max()
        };
        possible.min_by_key(|&gpu| (last_release(gpu), gpu))
    }

    /// Returns whether a pod would use what a pod of its quota that has waited long needs.
    fn overtakes(&self, pod: usize) -> bool {
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

    /// Returns the room of a GPU that counts when a pod leaves enough for other quotas. Of the pods
    /// that have waited long, only those before the pod count.
    fn beside_older(&self, pod: usize, gpu: usize, rank: &Rank, later: bool) -> i128 {
        let mut pool = self.clone();
        let before: Vec<usize> = self.old.iter().copied().take_while(|&old| old != pod).collect();
        pool.reserved.retain(|other, _| before.contains(other));
        pool.unreserved(gpu, rank, later)
    }

    // What follows changes the pool.

    fn nominate(&mut self, pod: usize, gpu: usize, rank: &Rank, victims: &[usize]) {
        for &victim in victims {
            let Some(gpu) = self.counts_on(victim) else { continue };
            self.world.pods[victim].place = Place::Leaving { gpu, held: true };
        }
        self.place(pod, Place::Waiting { nominated: Some(gpu) }, rank, gpu);
    }

    /// Returns whether nominated pods that are within a guarantee are so in another pool.
    fn keeps_guarantees_in(&self, after: &Self) -> bool {
        let (before, classes) = (self.classes(), after.classes());
        let nominated = self.pods().filter(|&pod| self.nominated(pod).is_some() && after.nominated(pod).is_some());
        let mut within = nominated.filter(|&pod| self.rank(pod, before.of[&pod]).1 == Class::In);
        within.all(|pod| classes.of[&pod] == Class::In)
    }

    /// Returns whether quotas own GPUs.
    fn has_cells(&self) -> bool {
        self.world.quotas.values().any(|quota| has_cells(quota) && quota.is_enforced())
    }

    /// Returns whether a pod may be released to a GPU without a loss for nominated pods.
    fn may_release(&self, pod: usize, gpu: usize) -> bool {
        let is_near =
            |other: usize| self.nominated(other).is_some_and(|at| at == gpu || self.owner(other) == self.owner(pod));
        if !self.has_cells() || !self.pods().any(is_near) {
            return true;
        }
        let mut after = self.clone();
        after.place(pod, Place::Running { gpu, since: self.now }, &self.rank_on(pod, gpu), gpu);
        self.keeps_guarantees_in(&after)
    }

    /// Returns whether the rules hold after an exchange in a pool where quotas own GPUs.
    fn holds_after(&self, pod: usize, kind: Kind, gpu: usize, victims: &[usize]) -> bool {
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

    fn place(&mut self, pod: usize, place: Place, rank: &Rank, gpu: usize) {
        self.world.pods[pod].place = place;
        if self.nominated(pod).is_some() {
            self.ranks.insert(pod, rank.clone());
        }
        for other in self.displaced(gpu, rank, 0) {
            self.withdraw(other);
        }
    }

    /// Returns the nominated pods of lower rank for which a GPU has no room after `more` is freed.
    fn displaced(&self, gpu: usize, rank: &Rank, more: i128) -> Vec<usize> {
        let mut unseen: Vec<usize> = self.pods().filter(|&other| self.nominated(other) == Some(gpu)).collect();
        unseen.retain(|other| !Self::sees(rank, &self.ranks[other]));
        unseen.sort_by_key(|&other| {
            let pod = &self.world.pods[other];
            (self.ranks[&other].1, self.ranks[&other].2, Reverse((pod.created, pod.name.clone())))
        });
        let mut left = self.room_after_all(gpu) + more;
        unseen.retain(|&other| {
            let is_displaced = left < 0;
            left += if is_displaced { i128::from(self.charge(other)) } else { 0 };
            is_displaced
        });
        unseen
    }

    /// Returns the room that is left on a GPU once pods have left and nominated pods have arrived.
    fn room_after_all(&self, gpu: usize) -> i128 {
        i128::from(self.world.gpus[gpu]) - i128::from(self.sum(|pod| self.counts_on(pod) == Some(gpu)))
    }

    fn withdraw(&mut self, pod: usize) -> Option<usize> {
        let gpu = self.nominated(pod)?;
        self.world.pods[pod].place = Place::Waiting { nominated: None };
        self.ranks.remove(&pod);
        Some(gpu)
    }
}

/// Decides for each waiting pod, as [`look`](super::super::look) does.
pub(super) fn look(world: &World, now: Moment) -> Outcome {
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
    /// Returns the next pod: of the first pods of all quotas, the one with the first turn.
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
        // Pods that cannot get room come first, so that they delay nobody.
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
            ((!within).then_some(share), key(pod))
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
            let fits = |gpu: usize, later: bool| self.free(gpu, &rank, later) >= i128::from(charge);
            if !is_over_max && fits(gpu, false) {
                return Decision::Release(gpu);
            }
            if max.is_none_or(|max| self.used(&owner).plus(charge) <= max) && fits(gpu, true) {
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
            || is_within
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

/// Victims of one GPU and their cost.
type Cost =
    (usize, bool, Reverse<Option<Share>>, Option<i32>, Amount, i128, usize, Reverse<Option<(Moment, Option<Moment>)>>);

impl Pool {
    fn search(&self, pod: usize, is_within: bool, is_over_max: bool) -> Option<Decision> {
        let is_enforced = self.quota(&self.owner(pod)).is_enforced();
        let rights = if is_within { Kind::Reclaim } else { Kind::FairShare };
        let mut is_protected = false;
        for kind in [rights, Kind::Priority] {
            if kind != Kind::Priority && (is_over_max || !is_enforced) {
                continue;
            }
            let ways = (0..self.world.gpus.len()).filter_map(|gpu| Some((gpu, self.way(pod, kind, gpu)?)));
            let ways = ways.filter(|(gpu, victims)| self.holds_after(pod, kind, *gpu, victims));
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

    /// Returns the pods that may leave for a pod, in the order in which they stay.
    fn allowed(&self, taker: usize, kind: Kind) -> Vec<usize> {
        let (owner, classes) = (self.owner(taker), self.classes());
        let settings = &self.world.settings;
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
                    other == owner && one.priority < self.world.pods[taker].priority
                }
                Kind::Priority => !self.quota(&other).is_enforced() && one.priority < self.world.pods[taker].priority,
                _ => {
                    other != owner
                        && classes.of[&pod] == Class::Over
                        && self.quota(&other).is_enforced()
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
                // Pods on other GPUs help only below the maximum.
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

    /// Returns whether the taker fits after these pods have left.
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

    /// Returns, of all sets of pods that make room, the one that spares the most important pods.
    /// `allowed` has the most important pod first.
    fn least_important(&self, taker: usize, gpu: usize, allowed: &[usize], max: Option<Amount>) -> Option<Vec<usize>> {
        let sets = 0..1_u32 << allowed.len();
        let victims_of = |set: u32| -> Vec<usize> {
            let leaves = |at: usize| set >> (allowed.len() - 1 - at) & 1 == 1;
            (0..allowed.len()).filter(|&at| leaves(at)).map(|at| allowed[at]).collect()
        };
        // The most important pod is the highest bit, so the smallest number spares it.
        sets.map(victims_of).find(|victims| self.makes_room(taker, gpu, victims, max))
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
            Kind::Reclaim => true,
            Kind::FairShare => {
                let share = self.share(&owner, charge, Amount::ZERO);
                let others = victims.iter().map(|&pod| self.owner(pod));
                others.into_iter().all(|other| share <= self.share(&other, Amount::ZERO, less(&other))) && leaves_kept()
            }
            Kind::Priority => {
                let used = self.used(&owner);
                let after = used.plus(charge).minus(less(&owner));
                let classes = self.classes();
                quota.max().is_none_or(|max| after <= max)
                    && (victims.iter().all(|pod| classes.of[pod] == Class::Over)
                        || self.class_with(taker, gpu, victims) == Class::In)
                    && (after <= quota.min() || after <= used || leaves_kept())
            }
        }
    }
}
