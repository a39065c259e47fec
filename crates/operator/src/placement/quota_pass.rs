//! Applies the rules of quotas to the decisions of one reconcile: which pod has its turn, which
//! units the pod may use, and which pods may be evicted for it.
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_plan::ledger::{Fits, Holder, Holders, Ledger, Moment, Nomination, Preemption, Rank, Reservation};
use cleave_plan::quota::{Amount, Book, Class, Kind, Owner, Pod, PodId, Rights, Wait, reserved_for_long_waits};

use super::quota_gangs::GangUnit;
use super::quota_reports::{has_label, label_of};
use super::quota_waits::QuotaWait;
use super::quotas::{PoolWorld, QuotaWorlds};
use crate::pods::PodObject;

mod costs;

mod gangs;

/// Where a pod that has waited long can run.
#[derive(Debug, Default)]
pub(super) struct LongWait {
    /// The units that the pod requests, without a device. `None` if the pod is not nominated.
    pub(super) take: Option<Reservation>,
    /// The devices that the pod can use, by GPU: name of the node, and UUID.
    pub(super) devices: BTreeMap<usize, (String, String)>,
}

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
    /// Whether the pod had a nomination before this turn.
    pub(super) was_nominated: bool,
    /// Whether the pod may use units that are free now.
    pub(super) may_use_free_room: bool,
    /// What the pod may do only on devices where it costs less than elsewhere.
    cheap: OnlyWhereCheap,
    pub(super) rank: Rank,
}

impl QuotaTurn {
    /// Returns whether the pod has precedence over borrowers: it is within its guarantee, or
    /// overrides quotas.
    pub(super) const fn has_precedence(&self) -> bool {
        self.rights.is_within || self.cheap.reclaims || self.rank.overriding.is_some()
    }

    /// Returns whether the pod's quota would exceed its maximum with the pod on a new GPU.
    pub(super) const fn needs_no_gpus(&self) -> bool {
        self.rights.is_over_max && !matches!(self.cheap.within_max, WithinMax::OnNewGpus)
    }
}

/// Where a waiting pod's quota stays within its maximum, although it exceeds the maximum elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum WithinMax {
    /// Nowhere, or the quota exceeds the maximum on no device.
    #[default]
    Nowhere,
    /// Only on GPUs that the quota already uses.
    OnUsedGpus,
    /// Also on GPUs that the quota does not use yet.
    OnNewGpus,
}

/// What a waiting pod may do only on devices where it costs less than elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct OnlyWhereCheap {
    /// It may use free units.
    uses_free_room: bool,
    /// It is within its guarantee, so borrowers are evicted for it.
    reclaims: bool,
    /// It may run. Elsewhere, it must wait.
    runs: bool,
    within_max: WithinMax,
}

/// Where a waiting pod, or all waiting pods of its gang, may get units now.
pub(super) struct Turns {
    /// The pools in which the pod may get units, in the order of attempts. `None` stands for the
    /// GPUs that no enforced quota counts.
    pub(super) attempts: Vec<Option<QuotaTurn>>,
    /// Why the pod gets no units in another pool.
    pub(super) hold: Option<QuotaWait>,
    /// Whether more GPUs would not help: a maximum, or the pod's own guarantee, keeps the pod
    /// waiting in all pools.
    pub(super) needs_no_gpus: bool,
}

/// Name of a node, and units of its devices.
type UnitsOnNode<'a> = (&'a str, &'a [Reservation]);

/// Pods that may be evicted, by node and name.
type PodsByNode<'h> = BTreeMap<String, BTreeMap<String, Holder<'h>>>;

/// A pod, and the units that were found for it.
pub(super) type PodAndPreemption<'f> = (&'f str, &'f Preemption);

/// A pod of a waiting pod's quota: priority, start, name, and index of its disruption budget. The
/// least important pod is first.
type OwnPod<'n> = (i32, Reverse<Moment>, &'n str, PodId, Option<usize>);

/// Quotas within one reconcile.
pub(super) struct QuotaPass<'w> {
    worlds: &'w QuotaWorlds,
    books: Vec<Book<'w>>,
    /// Units that are kept for pods that have waited long, by pod. The ledger has a nomination for
    /// these units, except during the turn of the pod. The units do not count as used.
    long_waits: BTreeMap<String, (QuotaTurn, Nomination)>,
    /// The amounts that quotas use of each GPU, by pool and quota. Computed when first needed, and
    /// only in pools with MIG instances.
    own_use: BTreeMap<(usize, &'w Owner), BTreeMap<usize, Amount>>,
}

impl<'w> QuotaPass<'w> {
    /// Starts a reconcile. Sets the ranks of all nominated pods. Withdraws the nominations of
    /// incomplete gangs.
    pub(super) fn new(worlds: &'w QuotaWorlds, ledger: &mut Ledger) -> Self {
        let books = worlds.pools.iter().map(|pool| Book::new(&pool.world, worlds.now)).collect();
        let (long_waits, own_use) = (BTreeMap::new(), BTreeMap::new());
        let mut pass = Self { worlds, books, long_waits, own_use };
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
        pass
    }

    /// Nominates pods that have waited long; see [`reserved_for_long_waits`]. `find` finds
    /// the devices on which such a pod can run. Nominates no pods in the pools `left_out`. Returns
    /// the pods and their nodes.
    pub(super) fn nominate_for_long_waits(
        &mut self,
        ledger: &mut Ledger,
        left_out: &BTreeSet<usize>,
        mut find: impl FnMut(&Ledger, &'w PoolWorld, PodId) -> LongWait,
    ) -> Vec<(&'w str, String)> {
        let mut reserved = Vec::new();
        let pools = self.worlds.pools.iter().enumerate().filter(|(_, of)| of.is_enforced);
        for (pool, of) in pools.filter(|(pool, _)| !left_out.contains(pool)) {
            let mut found: BTreeMap<PodId, LongWait> = BTreeMap::new();
            let usable = |id: PodId| {
                let (member, pod) = (Member { pool, id }, of.world.pod(id));
                if ledger.nominations().contains_key(&pod.name) {
                    // The pod already has a nomination, for example in another pool.
                    return BTreeSet::new();
                }
                // What the pod leaves to nominated pods depends on its rank.
                let is_within = self.book(member).class_with(&[(id, 0)], &[]) == Class::In;
                ledger.set_rank(&pod.name, self.rank_of(member, is_within));
                let long_wait = find(ledger, of, id);
                ledger.remove_rank(&pod.name);
                let gpus = long_wait.devices.keys().copied().collect();
                found.insert(id, long_wait);
                gpus
            };
            for (id, gpu) in reserved_for_long_waits(&of.world, self.worlds.now, usable) {
                let Some(LongWait { take: Some(take), devices }) = found.get(&id) else { continue };
                let Some((node, device)) = devices.get(&gpu) else { continue };
                let (member, pod) = (Member { pool, id }, of.world.pod(id));
                let mut take = take.clone();
                take.device.clone_from(device);
                let nomination = Nomination { priority: pod.priority, node: node.clone(), takes: vec![take] };
                let Ok(rights) = self.book(member).rights(id) else { continue };
                let is_within = self.book(member).class_with(&[(id, gpu)], &[]) == Class::In;
                let rank = self.rank_of(member, is_within);
                let (was_nominated, may_use_free_room, cheap) = (false, false, OnlyWhereCheap::default());
                let turn = QuotaTurn { member, rights, was_nominated, may_use_free_room, cheap, rank };
                ledger.set_rank(&pod.name, rank);
                if ledger.nominate(&pod.name, nomination.clone()).is_ok() {
                    self.books[pool].reserve(id, gpu);
                    self.long_waits.insert(pod.name.clone(), (turn, nomination));
                    reserved.push((pod.name.as_str(), node.clone()));
                }
            }
        }
        reserved
    }

    /// Ends the turn of a pod that still waits. If the pod has waited long, restores its
    /// nomination.
    pub(super) fn end_turn(&self, ledger: &mut Ledger, name: &str) {
        if let Some((turn, nomination)) = self.long_waits.get(name) {
            self.set_rank(ledger, name, Some(*turn));
            // Ignore errors: the ledger refuses only nominations for pods with a claim.
            let _ = ledger.nominate(name, nomination.clone());
        }
    }

    /// Ends the reconcile. The next reconcile nominates the pods that have waited long again.
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
        // Different pools may use the same account number. Equal numbers have no effect, because
        // pods of different pools use different GPUs.
        let book = self.book(member);
        Rank {
            quota: book.account(member.id) + 1,
            is_within,
            priority: book.priority(member.id),
            overriding: book.overriding(member.id),
            created: Some(book.created(member.id)),
        }
    }

    /// Returns a pod's entries in the enforced pools whose GPUs the pod may use. First are pools
    /// that all waiting pods of its gang may use, then the pool of its nomination, and then pools
    /// in which the pod is within its guarantee.
    pub(super) fn members(&self, name: &str) -> Vec<Member> {
        let pools = self.worlds.pools.iter().enumerate().filter(|(_, pool)| pool.is_enforced);
        let mut members: Vec<Member> =
            pools.filter_map(|(pool, world)| Some(Member { pool, id: *world.ids.get(name)? })).collect();
        if members.len() > 1 {
            members.sort_by_key(|member| {
                let book = self.book(*member);
                let (_, share, ..) = book.turn(member.id);
                (!self.has_whole_gang(*member), book.class(member.id).is_none(), share)
            });
        }
        members
    }

    /// Starts the turn of a waiting pod, or of all waiting pods of its gang. During the turn, the
    /// nominations of these pods do not count in the accounts.
    pub(super) fn start_turns(&mut self, ledger: &mut Ledger, name: &str) -> Turns {
        let unit = self.unit(name);
        if let Some(hold) = unit.and_then(GangUnit::obstacle) {
            return Turns { attempts: Vec::new(), hold: Some(hold), needs_no_gpus: false };
        }
        let name = unit.and_then(|unit| unit.head.as_deref()).unwrap_or(name);
        if self.long_waits.contains_key(name) {
            ledger.withdraw(name);
        }
        let (mut attempts, mut hold, mut needs_no_gpus) = (Vec::new(), None, true);
        for member in self.members(name) {
            match self.start_turn(member) {
                Ok(turn) => {
                    needs_no_gpus &= turn.needs_no_gpus();
                    attempts.push(Some(turn));
                }
                Err(wait) => {
                    needs_no_gpus &= matches!(wait, Wait::OverMax | Wait::LargerThanMax | Wait::WaitsForGuarantee);
                    hold = hold.or_else(|| Some(self.explain((member, wait))));
                }
            }
        }
        attempts.sort_by_key(|turn| turn.is_none_or(|turn| !turn.was_nominated));
        let may_use_others = unit.is_none_or(|unit| unit.may_use_others);
        if !may_use_others && attempts.is_empty() && hold.is_none() {
            hold = unit.map(GangUnit::explain_pools);
        } else if may_use_others && (attempts.is_empty() && hold.is_none() || self.worlds.has_other_nodes) {
            // A nominated pod first tries the GPUs of its nomination.
            let is_kept = |of: &Nomination| self.worlds.is_nominated_in(None, of);
            let is_first = ledger.nominations().get(name).is_some_and(is_kept);
            needs_no_gpus = false;
            attempts.insert(if is_first { 0 } else { attempts.len() }, None);
        }
        Turns { attempts, hold, needs_no_gpus }
    }

    /// Starts the turn of a waiting pod, or of all waiting pods of its gang, in one pool.
    ///
    /// # Errors
    /// Returns why the pod must wait regardless of free units.
    fn start_turn(&mut self, member: Member) -> Result<QuotaTurn, Wait> {
        let was_nominated = self.book(member).class(member.id).is_some();
        if was_nominated {
            let unit = self.book(member).unit(member.id).to_vec();
            unit.iter().for_each(|id| self.books[member.pool].withdraw(*id));
        }
        if !self.has_whole_gang(member) {
            return Err(Wait::GangIncomplete);
        }
        if self.book(member).unit(member.id).len() > 1 {
            return self.turn_now(member, was_nominated);
        }
        if let Some(dearest) = self.worlds.pools[member.pool].dearest.get(&member.id) {
            // The search may find other devices than the nominated ones.
            self.books[member.pool].set_charge(member.id, *dearest);
        }
        let turn = self.turn_now(member, was_nominated);
        let turn = self.consider_cheaper_devices(member, was_nominated, turn)?;
        Ok(self.consider_nomination(turn))
    }

    /// Returns the turn of a waiting pod at the pod's current charge.
    ///
    /// # Errors
    /// Returns why the pod must wait regardless of free units.
    fn turn_now(&self, member: Member, was_nominated: bool) -> Result<QuotaTurn, Wait> {
        let book = self.book(member);
        let rights = book.rights(member.id)?;
        let nominated: Amount =
            book.unit(member.id).iter().map(|id| self.pod(Member { id: *id, ..member }).charge).sum();
        let is_nominated = was_nominated && book.charge(member.id) <= nominated;
        let mut long_waits = self.long_waits.values().map(|(turn, _)| turn.member);
        let is_overtaking = |other: Member| other.pool == member.pool && book.overtakes(member.id, other.id);
        if !is_nominated && long_waits.any(is_overtaking) {
            return Err(Wait::Later);
        }
        let parts: Vec<(PodId, usize)> = book.unit(member.id).iter().map(|id| (*id, 0)).collect();
        let is_within = match book.quota(member.id).cells() {
            // The class depends on the GPU.
            Some(_) => rights.is_within,
            None => book.class_with(&parts, &[]) == Class::In,
        };
        let rank = self.rank_of(member, is_within);
        // A nominated pod whose quota's pods still terminate waits for their units, or leaves
        // enough for other quotas.
        let has_room = is_nominated && !book.awaits_own_leaving(member.id);
        let may_use_free_room = !rights.is_over_max && (has_room || book.leaves_kept_room(member.id));
        Ok(QuotaTurn { member, rights, was_nominated, may_use_free_room, cheap: OnlyWhereCheap::default(), rank })
    }

    /// Sets the rank of a waiting pod, or of all waiting pods of its gang, for an attempt to place
    /// these pods. On nodes that are in no pool with an enforced quota, priority alone decides.
    pub(super) fn set_rank(&self, ledger: &mut Ledger, name: &str, turn: Option<QuotaTurn>) {
        match turn {
            Some(QuotaTurn { member, rank, .. }) => {
                for id in self.book(member).unit(member.id) {
                    ledger.set_rank(&self.worlds.pools[member.pool].world.pod(*id).name, rank);
                }
            }
            None => match self.unit(name) {
                Some(unit) => unit.pods.iter().for_each(|name| ledger.remove_rank(name)),
                None => ledger.remove_rank(name),
            },
        }
    }

    /// Withholds the GPUs of other pools, for an attempt to place a pod.
    pub(super) fn withhold_others(&self, ledger: &mut Ledger, turn: Option<QuotaTurn>) {
        ledger.withhold(self.worlds.withheld(turn.map(|turn| turn.member.pool)));
    }

    /// Returns the GPUs of a pod's units, in the order of its requests. For a pod of one request,
    /// this is one GPU.
    fn parts_of(&self, member: Member, name: &str, (node, takes): UnitsOnNode<'_>) -> Vec<(PodId, usize)> {
        let pool = &self.worlds.pools[member.pool];
        let Some(&id) = pool.ids.get(name) else { return Vec::new() };
        let mut takes: Vec<&Reservation> = takes.iter().collect();
        takes.sort_unstable();
        takes.truncate(pool.world.pod(id).pieces.len().max(1));
        let gpu = |take: &Reservation| pool.gpu(node, &take.device).unwrap_or(0);
        match takes.as_slice() {
            [] => vec![(id, 0)],
            many => many.iter().map(|take| (id, gpu(take))).collect(),
        }
    }

    fn gpus_of_found(&self, member: Member, found: &[PodAndPreemption<'_>]) -> Vec<(PodId, usize)> {
        found.iter().flat_map(|(name, found)| self.parts_of(member, name, (&found.node, &found.takes))).collect()
    }

    /// Records that the pods of a turn are released to devices. Returns the class of the pod that
    /// has the turn.
    pub(super) fn record_release(&mut self, member: Member, released: &[(&str, &Fits)]) -> Option<Class> {
        let mut parts = Vec::new();
        for (name, fits) in released {
            let takes = fits.iter().next().map_or(("", &[][..]), |fit| (fit.node(), fit.reservations()));
            if let Some(charge) = self.set_charge(member, name, takes) {
                self.count_own_use(member, takes, charge);
            }
            parts.extend(self.parts_of(member, name, takes));
        }
        self.books[member.pool].release(&parts);
        released.iter().for_each(|(name, _)| drop(self.long_waits.remove(*name)));
        self.book(member).class(member.id)
    }

    /// Records that the pods of a turn are released, and returns the value of their label. Pods of
    /// exempt namespaces, pods of quotas that only count, and pods on nodes in no pool with an
    /// enforced quota have no label.
    pub(super) fn label_released(&mut self, turn: Option<QuotaTurn>, pods: &[(&str, &Fits)]) -> Option<&'static str> {
        let Some(turn) = turn else {
            pods.iter().for_each(|(name, _)| drop(self.long_waits.remove(*name)));
            return None;
        };
        let class = self.record_release(turn.member, pods)?;
        has_label(&self.worlds.pools[turn.member.pool].world, self.pod(turn.member)).then(|| label_of(class))
    }

    /// Records that the pods of a turn are nominated, and that these victims are evicted.
    pub(super) fn nominate(&mut self, member: Member, found: &[PodAndPreemption<'_>], victims: &[String]) {
        for (name, found) in found {
            self.set_charge(member, name, (&found.node, &found.takes));
        }
        let parts = self.gpus_of_found(member, found);
        // A gang may use GPUs of several pools, if a quota has changed since its release.
        for (book, pool) in self.books.iter_mut().zip(&self.worlds.pools) {
            victims.iter().filter_map(|victim| pool.ids.get(victim)).for_each(|id| book.evict(*id));
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
        let takes = |name: &str| {
            let nomination = ledger.nominations().get(name);
            nomination.map_or(("", &[][..]), |of| (of.node.as_str(), of.takes.as_slice()))
        };
        let mut parts = Vec::new();
        for name in names {
            self.set_charge(member, name, takes(name));
            parts.extend(self.parts_of(member, name, takes(name)));
        }
        self.books[member.pool].nominate(&parts);
    }

    /// Returns whether a node has GPUs of the pool of a waiting pod.
    pub(super) fn has_node(&self, member: Member, node: &str) -> bool {
        self.worlds.has_node(member.pool, node)
    }

    fn pod_ids<'n>(&self, member: Member, names: impl Iterator<Item = &'n String>) -> Vec<PodId> {
        let ids = &self.worlds.pools[member.pool].ids;
        names.filter_map(|name| ids.get(name).copied()).collect()
    }

    /// Returns the kinds of evictions that are permitted for a waiting pod, in the order of
    /// attempts. While a quota cannot be read, pods of one quota are not evicted for others: the
    /// malformed quota may guarantee their units.
    pub(super) fn kinds(&self, turn: &QuotaTurn) -> impl Iterator<Item = Kind> + use<> {
        let QuotaTurn { rights, cheap, .. } = *turn;
        let is_enforced = self.book(turn.member).quota(turn.member.id).is_enforced();
        let is_known = !self.worlds.are_incomplete;
        let may_exchange = is_enforced && is_known && (!rights.is_over_max || cheap.within_max != WithinMax::Nowhere);
        let reclaims = may_exchange && (rights.is_within || cheap.reclaims);
        let shares = may_exchange && !rights.is_over_max && !rights.is_within && !cheap.runs;
        let stays_in_quota = matches!(self.pod(turn.member).owner, Owner::Quota(_)) && turn.rank.overriding.is_none();
        let priority = !cheap.runs && (is_known || is_enforced && stays_in_quota);
        [(reclaims, Kind::Reclaim), (shares, Kind::FairShare), (priority, Kind::Priority)]
            .into_iter()
            .filter_map(|(is_permitted, kind)| is_permitted.then_some(kind))
    }

    /// Returns the pods that may be evicted for a waiting pod, and pods that terminate. The
    /// priority of each pod is its position in the order of evictions.
    pub(super) fn holders<'h>(&self, kind: Kind, member: Member, all: &Holders<'h>) -> Holders<'h> {
        let (book, ids) = (self.book(member), &self.worlds.pools[member.pool].ids);
        let leaving = self.evictable(kind, member, all);
        let may_leave = |name: &str| ids.get(name).copied().filter(|id| leaving.contains(id));
        let mut order: Vec<_> = leaving.iter().map(|id| book.importance(*id)).collect();
        order.sort_unstable();
        order.dedup();
        let position = |id: PodId| {
            order.binary_search(&book.importance(id)).map_or(0, |at| i32::try_from(at).unwrap_or(i32::MAX - 1))
        };
        let allowed = |pods: &PodsByNode<'h>| -> PodsByNode<'h> {
            let in_pool = pods.iter().filter(|(node, _)| self.has_node(member, node));
            let of_node = |(node, pods): (&String, &BTreeMap<String, Holder<'h>>)| {
                let allowed = pods.iter().filter_map(|(name, holder)| {
                    let holder = match may_leave(name) {
                        Some(id) => {
                            let started = book.since(id).unwrap_or(holder.started);
                            Holder { priority: position(id), started, ending: false, ..*holder }
                        }
                        None if self.is_ending_soon(member, name, holder) => *holder,
                        None => return None,
                    };
                    Some((name.clone(), holder))
                });
                (node.clone(), allowed.collect())
            };
            in_pool.map(of_node).collect()
        };
        let unlisted = all.unlisted.iter().filter(|(node, _)| self.has_node(member, node));
        let unlisted = unlisted.map(|(node, units)| (node.clone(), units.clone())).collect();
        let (pods, unbound, blocked) = (allowed(&all.pods), allowed(&all.unbound), BTreeMap::new());
        Holders { pods, unbound, blocked, budgets: all.budgets.clone(), unlisted }
    }

    /// Returns whether a pod terminates, and does so within the maximum grace period of evicted
    /// pods. A pod that terminates later counts as running, and can be evicted: an eviction
    /// shortens its grace period.
    fn is_ending_soon(&self, member: Member, name: &str, holder: &Holder<'_>) -> bool {
        let pool = &self.worlds.pools[member.pool];
        let runs_on = |id: &PodId| pool.terminates_late.contains(id) && self.book(member).class(*id).is_some();
        holder.ending && !pool.ids.get(name).is_some_and(runs_on)
    }

    /// Returns the pods that are about to end.
    pub(super) fn ending<'h>(&self, member: Member, all: &Holders<'h>) -> Holders<'h> {
        let mut ending = all.clone();
        for pods in ending.pods.values_mut().chain(ending.unbound.values_mut()) {
            pods.retain(|name, holder| self.is_ending_soon(member, name, holder));
        }
        ending
    }

    /// Returns the pods that may be evicted for a waiting pod. Each gang is examined once: a gang
    /// may have many pods.
    fn evictable(&self, kind: Kind, member: Member, all: &Holders<'_>) -> BTreeSet<PodId> {
        let (book, ids) = (self.book(member), &self.worlds.pools[member.pool].ids);
        let evictable_gangs = self.evictable_gangs(member, all);
        let mut gangs: BTreeMap<usize, bool> = BTreeMap::new();
        let of_pool = all.all().filter(|(node, ..)| self.has_node(member, node));
        let candidates = of_pool.filter(|(_, name, holder)| !self.is_ending_soon(member, name, holder));
        let mut evictable: BTreeSet<PodId> = candidates.filter_map(|(_, name, _)| ids.get(name).copied()).collect();
        evictable.retain(|&id| {
            let may_leave = || book.may_leave(kind, member.id, id);
            match book.gang(id).filter(|_| book.class(id).is_some()) {
                None => may_leave(),
                Some(gang) => *gangs.entry(gang).or_insert_with(|| evictable_gangs.contains(&gang) && may_leave()),
            }
        });
        evictable
    }

    /// Returns how long a disruption budget can protect a borrower from eviction for a pod within
    /// its guarantee. `None` means forever.
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

    /// Returns whether the rules permit an exchange. All pods of the victims' gangs count as
    /// victims.
    pub(super) fn is_legal(&self, kind: Kind, member: Member, found: &[PodAndPreemption<'_>]) -> bool {
        if kind == Kind::Reclaim && !self.book(member).is_guaranteed(member.id) {
            // The pod may be within its guarantee where it costs less.
            let is_within =
                |(_, found): &PodAndPreemption<'_>| self.is_within_with(member, (&found.node, &found.takes));
            if !matches!(found, [one] if is_within(one)) {
                return false;
            }
        }
        let victims = self.ids_with_gang_members(member, found.iter().flat_map(|(_, found)| &found.victims));
        let victims: Vec<PodId> = victims.into_iter().collect();
        self.book(member).is_legal(kind, &self.gpus_of_found(member, found), &victims)
    }

    /// Selects the least important pods of the waiting pod's quota, until their eviction keeps the
    /// quota within its maximum. The waiting pod then uses the free units of `found`. Returns
    /// `None` if no such eviction is possible or permitted.
    pub(super) fn victims_for_max(&self, member: Member, all: &Holders<'_>, found: Preemption) -> Option<Preemption> {
        let (book, pool) = (self.book(member), &self.worlds.pools[member.pool]);
        let max = book.quota(member.id).max()?;
        let leaving = self.evictable(Kind::Priority, member, all);
        let mut own: Vec<OwnPod<'_>> = all
            .all()
            .filter_map(|(_, name, holder)| Some((name, *pool.ids.get(name)?, holder.budget)))
            .filter(|(_, id, _)| leaving.contains(id))
            .map(|(name, id, budget)| {
                let since = book.since(id).unwrap_or(pool.world.pod(id).created);
                (book.priority(id), Reverse(since), name, id, budget)
            })
            .collect();
        own.sort_unstable();
        let (mut budgets, mut leaving) = (all.budgets.clone(), BTreeSet::new());
        let mut after = book.used(member.id).plus(book.charge(member.id));
        let mut chosen = Vec::new();
        for (.., id, budget) in own {
            if after <= max {
                break;
            }
            match budget.map(|budget| budgets.get_mut(budget)) {
                Some(Some(left)) if *left > 0 => *left -= 1,
                Some(_) => continue,
                None => {}
            }
            let mates: Vec<PodId> = book.mates(id).filter(|mate| leaving.insert(*mate)).collect();
            let charge = mates.iter().map(|mate| pool.world.pod(*mate).charge).sum();
            after = after.minus(charge);
            chosen.push((mates, charge));
        }
        // Keep the pods whose eviction is not needed, the most important first.
        for (mates, charge) in chosen.iter().rev().filter(|(_, charge)| *charge > Amount::ZERO) {
            if after.plus(*charge) <= max {
                after = after.plus(*charge);
                leaving.retain(|pod| !mates.contains(pod));
            }
        }
        let victims = leaving.into_iter().map(|id| pool.world.pod(id).name.clone()).collect();
        let found = Preemption { victims, ..found };
        let is_legal = || self.is_legal(Kind::Priority, member, &[(self.pod(member).name.as_str(), &found)]);
        (after <= max && is_legal()).then_some(found)
    }
}

/// Returns the grace period to request for an evicted pod: its own, but not more than the cap.
/// Returns `None` if the API server applies the same grace period without a request. A pod that
/// terminates already gets an explicit grace period: only that shortens the earlier one. A deletion
/// (`force`) requests at least one second, because the operator may not delete pods immediately.
pub(super) fn requested_grace(pod: &PodObject, cap: Duration, force: bool) -> Option<u32> {
    let own = u64::try_from(pod.spec.termination_grace_period_seconds.unwrap_or(30)).unwrap_or(30);
    let capped = u32::try_from(own.min(cap.as_secs())).unwrap_or(u32::MAX);
    let is_explicit = force || pod.metadata.deletion_timestamp.is_some() || own > cap.as_secs();
    is_explicit.then(|| if force { capped.max(1) } else { capped })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deletion_requests_at_least_one_second_even_for_a_pod_whose_own_grace_period_is_zero() {
        let pod = |grace: Option<i64>| {
            let mut pod = PodObject::default();
            pod.spec.termination_grace_period_seconds = grace;
            pod
        };
        let cap = Duration::from_secs(300);
        // The API server would replace a missing grace period by the pod's own, and then refuse the
        // deletion, because the operator may not delete pods immediately.
        assert_eq!(requested_grace(&pod(Some(0)), cap, true), Some(1));
        assert_eq!(requested_grace(&pod(Some(600)), Duration::ZERO, true), Some(1));
        assert_eq!(requested_grace(&pod(Some(600)), cap, true), Some(300));
        assert_eq!(requested_grace(&pod(None), cap, true), Some(30));
        // Evictions change only grace periods that are too long.
        assert_eq!(requested_grace(&pod(Some(0)), cap, false), None);
        assert_eq!(requested_grace(&pod(Some(600)), cap, false), Some(300));
        assert_eq!(requested_grace(&pod(None), cap, false), None);
    }
}
