//! Follows the decisions of one reconcile by the rules of quotas: whose turn it is, what the pod
//! may do, and who may be evicted for it.
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_plan::ledger::{Fits, Holder, Holders, Ledger, Moment, Nomination, Preemption, Rank};
use cleave_plan::quota::{Book, Class, Kind, Owner, Place, Pod, PodId, Rights, Wait, reserved_for_long_waits};

use super::quota_reports::label_of;
use super::quotas::{LongWait, QuotaWorlds};
use crate::pods::PodObject;

/// A waiting pod in its pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Member {
    pub(super) pool: usize,
    pub(super) id: PodId,
}

/// The turn of a waiting pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct QuotaTurn {
    pub(super) member: Member,
    pub(super) rights: Rights,
    /// Whether room was kept for the pod before this turn.
    pub(super) was_nominated: bool,
    /// Whether the pod may use room that is free now.
    pub(super) may_use_free_room: bool,
    pub(super) rank: Rank,
}

/// A waiting pod that must wait regardless of free room, and why.
pub(super) type Hold = (Member, Wait);
/// A pod, and the room that is found for it.
pub(super) type PodAndRoom<'f> = (&'f str, &'f Preemption);

/// Quotas within one reconcile.
pub(super) struct QuotaPass<'w> {
    worlds: &'w QuotaWorlds,
    books: Vec<Book<'w>>,
    /// Room that is reserved for pods that have waited long, by pod. It is nominated in the ledger,
    /// except during the turn of the pod, and does not count as used.
    long_waits: BTreeMap<String, (Member, Nomination)>,
}

impl<'w> QuotaPass<'w> {
    /// Starts a reconcile. Sets the ranks of all nominated pods. Of gangs, room is kept for all
    /// waiting pods or for none. Reserves room for pods that have waited long.
    pub(super) fn new(worlds: &'w QuotaWorlds, ledger: &mut Ledger) -> Self {
        let books = worlds.pools.iter().map(|pool| Book::new(&pool.world, worlds.now)).collect();
        let mut pass = Self { worlds, books, long_waits: BTreeMap::new() };
        pass.withdraw_broken_gangs(ledger);
        let nominated: Vec<String> = ledger.nominations().keys().cloned().collect();
        for name in nominated {
            if let Some(member) =
                pass.members(&name).into_iter().find(|member| pass.book(*member).class(member.id).is_some())
            {
                let is_within = pass.book(member).class(member.id) == Some(Class::In);
                ledger.set_rank(&name, pass.rank_of(member, is_within));
            }
        }
        pass.reserve_for_long_waits(ledger);
        pass
    }

    /// Withdraws nominations of gangs of which not all waiting pods are nominated, or of which pods
    /// are missing.
    fn withdraw_broken_gangs(&mut self, ledger: &mut Ledger) {
        for (pool, of) in self.worlds.pools.iter().enumerate() {
            for (at, pod) in of.world.pods.iter().enumerate().filter(|(_, pod)| pod.gang.is_some()) {
                let (id, book) = (PodId(at), &mut self.books[pool]);
                if !matches!(pod.place, Place::Waiting { nominated: Some(_) }) || book.class(id).is_none() {
                    continue;
                }
                let unit = book.unit(id).to_vec();
                if book.is_complete(id) && unit.iter().all(|id| book.class(*id).is_some()) {
                    continue;
                }
                for id in unit {
                    book.withdraw(id);
                    ledger.withdraw(&of.world.pod(id).name);
                }
            }
        }
    }

    /// Reserves room for pods that have waited long; see [`reserved_for_long_waits`].
    fn reserve_for_long_waits(&mut self, ledger: &mut Ledger) {
        for (pool, of) in self.worlds.pools.iter().enumerate().filter(|(_, of)| !of.long_waits.is_empty()) {
            for (id, gpu) in reserved_for_long_waits(&of.world, self.worlds.now) {
                let Some(LongWait { take, devices }) = of.long_waits.get(&id) else { continue };
                let Some((node, device)) = devices.get(&gpu) else { continue };
                let (member, pod) = (Member { pool, id }, of.world.pod(id));
                let mut take = take.clone();
                take.device.clone_from(device);
                let nomination = Nomination { priority: pod.priority, node: node.clone(), takes: vec![take] };
                let is_within = self.book(member).class_with(&[(id, gpu)], &[]) == Class::In;
                ledger.set_rank(&pod.name, self.rank_of(member, is_within));
                if ledger.nominate(&pod.name, nomination.clone()).is_ok() {
                    self.long_waits.insert(pod.name.clone(), (member, nomination));
                }
            }
        }
    }

    /// Ends the turn of a pod that still waits: the room that is reserved for it counts again.
    pub(super) fn end_turn(&self, ledger: &mut Ledger, name: &str) {
        if let Some((_, nomination)) = self.long_waits.get(name) {
            // Ignore errors: the ledger refuses only nominations for pods with a claim.
            let _ = ledger.nominate(name, nomination.clone());
        }
    }

    /// Ends the reconcile. Room for pods that have waited long is reserved anew in the next one.
    pub(super) fn finish(self, ledger: &mut Ledger) {
        self.long_waits.keys().for_each(|name| drop(ledger.withdraw(name)));
        ledger.clear_ranks();
    }

    pub(super) fn book(&self, member: Member) -> &Book<'w> {
        &self.books[member.pool]
    }

    pub(super) fn pod(&self, member: Member) -> &'w Pod {
        self.worlds.pools[member.pool].world.pod(member.id)
    }

    fn rank_of(&self, member: Member, is_within: bool) -> Rank {
        // Numbers of accounts are per pool. Pods of different pools use different GPUs.
        let book = self.book(member);
        Rank { quota: book.account(member.id) + 1, is_within, priority: book.priority(member.id) }
    }

    /// Returns a pod in the enforced pools whose GPUs it may use, the pool first in which it is
    /// within its guarantee.
    pub(super) fn members(&self, name: &str) -> Vec<Member> {
        let pools = self.worlds.pools.iter().enumerate().filter(|(_, pool)| pool.is_enforced);
        let mut members: Vec<Member> =
            pools.filter_map(|(pool, world)| Some(Member { pool, id: *world.ids.get(name)? })).collect();
        if members.len() > 1 {
            members.sort_by_key(|member| {
                let book = self.book(*member);
                (book.class(member.id).is_none(), book.turn(member.id).0)
            });
        }
        members
    }

    /// Starts the turn of a waiting pod, or of all waiting pods of its gang. Their nominations do
    /// not count meanwhile. Returns `None` if no quota concerns the pod.
    ///
    /// # Errors
    /// Returns why the pod must wait regardless of free room.
    pub(super) fn start_turn(&mut self, ledger: &mut Ledger, name: &str) -> Option<Result<QuotaTurn, Hold>> {
        if self.long_waits.contains_key(name) {
            ledger.withdraw(name);
        }
        let members = self.members(name);
        let was_nominated = |member: &Member| self.book(*member).class(member.id).is_some();
        let nominated = members.iter().copied().find(was_nominated);
        let member = nominated.or(members.first().copied())?;
        let unit = self.book(member).unit(member.id).to_vec();
        if nominated.is_some() {
            unit.iter().for_each(|id| self.books[member.pool].withdraw(*id));
        }
        let book = self.book(member);
        let rights = match book.rights(member.id) {
            Ok(rights) => rights,
            Err(wait) => return Some(Err((member, wait))),
        };
        let mut long_waits = self.long_waits.values().filter(|(other, _)| other.pool == member.pool);
        if nominated.is_none() && long_waits.any(|(other, _)| book.overtakes(member.id, other.id)) {
            return Some(Err((member, Wait::Later)));
        }
        let parts: Vec<(PodId, usize)> = unit.iter().map(|id| (*id, 0)).collect();
        let rank = self.rank_of(member, book.class_with(&parts, &[]) == Class::In);
        for id in &unit {
            ledger.set_rank(&self.worlds.pools[member.pool].world.pod(*id).name, rank);
        }
        let may_use_free_room = !rights.is_over_max && (nominated.is_some() || book.leaves_kept_room(member.id));
        Some(Ok(QuotaTurn { member, rights, was_nominated: nominated.is_some(), may_use_free_room, rank }))
    }

    fn gpu(&self, member: Member, device: Option<&str>) -> usize {
        device.and_then(|device| self.worlds.pools[member.pool].gpus.get(device).copied()).unwrap_or(0)
    }

    /// Returns the pods of a turn with the GPUs of their first devices.
    fn parts<'n>(&self, member: Member, pods: impl Iterator<Item = (&'n str, Option<&'n str>)>) -> Vec<(PodId, usize)> {
        let ids = &self.worlds.pools[member.pool].ids;
        pods.filter_map(|(name, device)| Some((*ids.get(name)?, self.gpu(member, device)))).collect()
    }

    fn parts_of_found(&self, member: Member, found: &[PodAndRoom<'_>]) -> Vec<(PodId, usize)> {
        let named = found.iter().map(|(name, found)| (*name, found.takes.first().map(|take| take.device.as_str())));
        self.parts(member, named)
    }

    /// Records that the pods of a turn are released to devices. Returns the class of the first.
    pub(super) fn release(&mut self, member: Member, released: &[(&str, &Fits)]) -> Option<Class> {
        let first =
            |fits: &Fits| fits.iter().next().and_then(|fit| fit.reservations().first()).map(|take| take.device.clone());
        let devices: Vec<(&str, Option<String>)> = released.iter().map(|(name, fits)| (*name, first(fits))).collect();
        let parts = self.parts(member, devices.iter().map(|(name, device)| (*name, device.as_deref())));
        self.books[member.pool].release(&parts);
        released.iter().for_each(|(name, _)| drop(self.long_waits.remove(*name)));
        self.book(member).class(member.id)
    }

    /// Records that the pods of a turn are released, and returns the value of their label. Pods of
    /// no quota have no label.
    pub(super) fn label_released(&mut self, turn: QuotaTurn, pods: &[(&str, &Fits)]) -> Option<&'static str> {
        let class = self.release(turn.member, pods)?;
        (!matches!(self.pod(turn.member).owner, Owner::Outside)).then(|| label_of(class))
    }

    /// Records that room is kept for the pods of a turn, and that these victims are evicted.
    pub(super) fn nominate(&mut self, member: Member, found: &[PodAndRoom<'_>], victims: &[String]) {
        let parts = self.parts_of_found(member, found);
        for victim in self.ids(member, victims.iter()) {
            self.books[member.pool].evict(victim);
        }
        self.books[member.pool].nominate(&parts);
        found.iter().for_each(|(name, _)| drop(self.long_waits.remove(*name)));
    }

    /// Records that the nominations of the pods of a turn are kept.
    pub(super) fn keep_nominations<'n>(
        &mut self,
        ledger: &Ledger,
        member: Member,
        names: impl Iterator<Item = &'n str>,
    ) {
        let device = |name: &str| {
            let nomination = ledger.nominations().get(name);
            nomination.and_then(|of| of.takes.first()).map(|take| take.device.clone())
        };
        let devices: Vec<(&str, Option<String>)> = names.map(|name| (name, device(name))).collect();
        let parts = self.parts(member, devices.iter().map(|(name, device)| (*name, device.as_deref())));
        self.books[member.pool].nominate(&parts);
    }

    /// Returns whether a node is in the pool of a waiting pod.
    pub(super) fn has_node(&self, member: Member, node: &str) -> bool {
        self.worlds.has_node(member.pool, node)
    }

    fn ids<'n>(&self, member: Member, names: impl Iterator<Item = &'n String>) -> Vec<PodId> {
        let ids = &self.worlds.pools[member.pool].ids;
        names.filter_map(|name| ids.get(name).copied()).collect()
    }

    /// Returns the pods that leave with these victims: of a gang, all pods that run.
    pub(super) fn with_mates<'n>(&self, member: Member, victims: impl Iterator<Item = &'n String>) -> Vec<String> {
        let (book, world) = (self.book(member), &self.worlds.pools[member.pool].world);
        let mut all = BTreeSet::new();
        for victim in victims {
            match self.worlds.pools[member.pool].ids.get(victim) {
                Some(&id) => all.extend(book.mates(id).map(|mate| world.pod(mate).name.clone())),
                None => drop(all.insert(victim.clone())),
            }
        }
        all.into_iter().collect()
    }

    /// Returns the ways in which a waiting pod may make room, in order.
    pub(super) fn kinds(&self, turn: &QuotaTurn) -> impl Iterator<Item = Kind> + use<> {
        let rights = if turn.rights.is_within { Kind::Reclaim } else { Kind::FairShare };
        let is_enforced = self.book(turn.member).quota(turn.member.id).is_enforced();
        let rights = (!turn.rights.is_over_max && is_enforced).then_some(rights);
        rights.into_iter().chain([Kind::Priority])
    }

    /// Returns the pods that may be evicted for a waiting pod, and pods that terminate. Their
    /// priorities are their positions in the order in which they leave.
    pub(super) fn holders<'h>(&self, kind: Kind, member: Member, all: &Holders<'h>) -> Holders<'h> {
        let (book, ids) = (self.book(member), &self.worlds.pools[member.pool].ids);
        let evictable = self.evictable_gangs(member, all);
        let may_leave = |name: &str, holder: &Holder<'_>| {
            let id = ids.get(name).copied()?;
            let leaves = !holder.ending && book.may_leave(kind, member.id, id);
            (leaves && (self.pod(Member { id, ..member }).gang.is_none() || evictable.contains(&id))).then_some(id)
        };
        let in_pool = || all.pods.iter().filter(|(node, _)| self.has_node(member, node));
        let mut order: Vec<_> = in_pool()
            .flat_map(|(_, pods)| pods.iter().filter_map(|(name, holder)| may_leave(name, holder)))
            .map(|id| book.importance(id))
            .collect();
        order.sort_unstable();
        order.dedup();
        let position = |id: PodId| {
            order.binary_search(&book.importance(id)).map_or(0, |at| i32::try_from(at).unwrap_or(i32::MAX - 1))
        };
        let mut holders = Holders { pods: BTreeMap::new(), budgets: all.budgets.clone() };
        for (node, pods) in in_pool() {
            let allowed = pods.iter().filter_map(|(name, holder)| {
                let holder = match may_leave(name, holder) {
                    Some(id) => {
                        Holder { priority: position(id), started: book.since(id).unwrap_or(holder.started), ..*holder }
                    }
                    None if holder.ending => *holder,
                    None => return None,
                };
                Some((name.clone(), holder))
            });
            holders.pods.insert(node.clone(), allowed.collect());
        }
        holders
    }

    /// Returns the pods of gangs of which all pods that run can be evicted now. If one of them is
    /// protected, all stay.
    fn evictable_gangs(&self, member: Member, all: &Holders<'_>) -> BTreeSet<PodId> {
        let pool = &self.worlds.pools[member.pool];
        if pool.world.pods.iter().all(|pod| pod.gang.is_none()) {
            return BTreeSet::new();
        }
        let known = all.pods.values().flatten().filter(|(_, holder)| !holder.ending);
        let known: BTreeMap<&str, &Holder<'_>> = known.map(|(name, holder)| (name.as_str(), holder)).collect();
        let mut evictable = BTreeSet::new();
        for (at, _) in pool.world.pods.iter().enumerate().filter(|(_, pod)| pod.gang.is_some()) {
            let mut budgets: BTreeMap<usize, u32> = BTreeMap::new();
            let can_leave = self.book(member).mates(PodId(at)).all(|mate| {
                let Some(holder) = known.get(pool.world.pod(mate).name.as_str()) else { return false };
                holder.budget.is_none_or(|budget| {
                    let count = budgets.entry(budget).or_default();
                    *count += 1;
                    *count <= all.budgets.get(budget).copied().unwrap_or(0)
                })
            });
            if can_leave {
                evictable.insert(PodId(at));
            }
        }
        evictable
    }

    /// Returns how long a disruption budget may keep a borrower from leaving for a guarantee.
    pub(super) fn budget_patience(&self, member: Member) -> Option<Duration> {
        self.worlds.pools[member.pool].world.settings.budget_patience.map(Duration::from_secs)
    }

    /// Returns the maximum grace period of an evicted pod.
    pub(super) fn grace_cap(&self, member: Member) -> Duration {
        Duration::from_secs(self.worlds.pools[member.pool].world.settings.grace_cap)
    }

    /// Returns the quota of a pod of the same pool.
    pub(super) fn quota_of(&self, member: Member, pod: &str) -> Option<String> {
        let pool = &self.worlds.pools[member.pool];
        match &pool.world.pod(*pool.ids.get(pod)?).owner {
            Owner::Quota(name) => Some(name.clone()),
            Owner::Unnamed | Owner::Outside => None,
        }
    }

    /// Explains an eviction to the owner of the evicted pod.
    pub(super) fn eviction_message(&self, kind: Kind, member: Member) -> String {
        let (book, pod) = (self.book(member), self.pod(member));
        let used = book.used(member.id).plus(book.charge(member.id));
        let min = book.quota(member.id).min();
        let owner = match &pod.owner {
            Owner::Quota(name) => format!("quota {name}"),
            Owner::Unnamed | Owner::Outside => "the namespaces without a quota".to_owned(),
        };
        match kind {
            Kind::Reclaim => {
                format!("{owner} is guaranteed {min} GPUs and uses {used} with the pod; this pod borrowed")
            }
            Kind::FairShare => format!("{owner} borrows less than this pod's quota for its weight, even with the pod"),
            Kind::Priority => format!("the pod of {owner} has a higher priority"),
        }
    }

    /// Returns whether the rules permit an exchange. The rest of the victims' gangs leaves too.
    pub(super) fn is_legal(&self, kind: Kind, member: Member, found: &[PodAndRoom<'_>]) -> bool {
        let victims = self.with_mates(member, found.iter().flat_map(|(_, found)| &found.victims));
        let victims = self.ids(member, victims.iter());
        self.book(member).is_legal(kind, &self.parts_of_found(member, found), &victims)
    }

    /// Returns the least important pods of a waiting pod's own quota without which the quota stays
    /// within its maximum. Returns `None` if that is not possible or not allowed. The pod then uses
    /// room that is free.
    pub(super) fn victims_for_max(&self, member: Member, all: &Holders<'_>, found: Preemption) -> Option<Preemption> {
        let (book, pool) = (self.book(member), &self.worlds.pools[member.pool]);
        let max = book.quota(member.id).max()?;
        let evictable = self.evictable_gangs(member, all);
        let mut own: Vec<(i32, Reverse<Moment>, &str, PodId)> = all
            .pods
            .values()
            .flatten()
            .filter(|(_, holder)| {
                !holder.ending
                    && holder.budget.is_none_or(|budget| all.budgets.get(budget).is_some_and(|left| *left > 0))
            })
            .filter_map(|(name, _)| Some((name.as_str(), *pool.ids.get(name)?)))
            .filter(|(_, id)| book.may_leave(Kind::Priority, member.id, *id))
            .filter(|(_, id)| pool.world.pod(*id).gang.is_none() || evictable.contains(id))
            .map(|(name, id)| {
                let since = book.since(id).unwrap_or(pool.world.pod(id).created);
                (book.priority(id), Reverse(since), name, id)
            })
            .collect();
        own.sort_unstable();
        let mut after = book.used(member.id).plus(book.charge(member.id));
        let mut leaving = BTreeSet::new();
        for (.., id) in own {
            if after <= max {
                break;
            }
            for mate in book.mates(id).filter(|mate| leaving.insert(*mate)) {
                after = after.minus(pool.world.pod(mate).charge);
            }
        }
        let victims = leaving.into_iter().map(|id| pool.world.pod(id).name.clone()).collect();
        let found = Preemption { victims, ..found };
        let is_legal = || self.is_legal(Kind::Priority, member, &[(self.pod(member).name.as_str(), &found)]);
        (after <= max && is_legal()).then_some(found)
    }
}

/// Returns the grace period of an evicted pod: its own, but not more than the cap.
pub(super) fn capped_grace(pod: &PodObject, cap: Duration) -> Option<u32> {
    let own = u64::try_from(pod.spec.termination_grace_period_seconds.unwrap_or(30)).unwrap_or(30);
    (own > cap.as_secs()).then(|| u32::try_from(cap.as_secs()).unwrap_or(u32::MAX))
}
