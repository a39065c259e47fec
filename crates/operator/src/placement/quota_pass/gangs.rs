//! Gangs during a pass: which pods are released, nominated and evicted together.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::placement::ReleasedGang;
use cleave_plan::ledger::{Holder, Holders, Ledger};
use cleave_plan::quota::{Place, PodId};

use super::{Member, QuotaPass};
use crate::placement::quota_gangs::GangUnit;

impl<'w> QuotaPass<'w> {
    /// Withdraws the nominations of gangs that may not be released, and of gangs with waiting pods
    /// that are not nominated.
    pub(super) fn withdraw_broken_gangs(&mut self, ledger: &mut Ledger) {
        for (pool, of) in self.worlds.pools.iter().enumerate().filter(|(_, of)| of.is_enforced) {
            let mut seen = BTreeSet::new();
            for (at, pod) in of.world.pods.iter().enumerate().filter(|(_, pod)| pod.gang.is_some()) {
                let (id, book) = (PodId(at), &mut self.books[pool]);
                let is_nominated =
                    matches!(pod.place, Place::Waiting { nominated: Some(_) }) && book.class(id).is_some();
                if !is_nominated || !book.gang(id).is_some_and(|gang| seen.insert(gang)) {
                    continue;
                }
                let unit = book.unit(id).to_vec();
                let may_be_released = self
                    .worlds
                    .gangs
                    .unit(&of.world.pod(id).name)
                    .is_none_or(|unit| unit.obstacle().is_none() && unit.may_use(pool));
                let is_nominated = unit.iter().all(|id| book.class(*id).is_some());
                if may_be_released && book.is_complete(id) && is_nominated {
                    continue;
                }
                for id in unit {
                    book.withdraw(id);
                    ledger.withdraw(&of.world.pod(id).name);
                }
            }
        }
    }

    /// Returns whether all waiting pods of a pod's gang may use the pod's pool.
    pub(super) fn has_whole_gang(&self, member: Member) -> bool {
        self.unit(&self.pod(member).name).is_none_or(|unit| unit.may_use(member.pool))
    }

    /// Returns the waiting pods of a waiting pod's gang.
    pub(in crate::placement) fn unit(&self, name: &str) -> Option<&'w GangUnit> {
        self.worlds.gangs.unit(name)
    }

    /// Returns whether an earlier leader released only a part of a waiting pod's gang, and this pod
    /// belongs to the rest. `leads_since` is when this process became the leader, in seconds since
    /// the Unix epoch.
    pub(in crate::placement) fn is_unfinished_release(&self, name: &str, leads_since: u64) -> bool {
        self.unit(name).is_some_and(|unit| unit.is_unfinished_release(leads_since, self.worlds.now))
    }

    /// Returns the pools that pods of partly released gangs may use; see
    /// [`Self::is_unfinished_release`]. In these pools, such pods precede pods that have waited
    /// long.
    pub(in crate::placement) fn pools_of_unfinished_releases<'n>(
        &self,
        waiting: impl Iterator<Item = &'n str>,
        leads_since: u64,
    ) -> BTreeSet<usize> {
        let unfinished = waiting.filter(|name| self.is_unfinished_release(name, leads_since));
        let units: Vec<&GangUnit> = unfinished.filter_map(|name| self.unit(name)).collect();
        (0..self.worlds.pools.len()).filter(|pool| units.iter().any(|unit| unit.may_use(*pool))).collect()
    }

    /// Returns what a pod records about its gang when this number of pods is released together.
    /// `now` is in seconds since the Unix epoch.
    pub(in crate::placement) fn gang_record(&self, name: &str, count: usize, now: u64) -> Option<ReleasedGang> {
        self.worlds.gangs.record(name, count, now)
    }

    /// Returns these victims and all other running pods of their gangs, in all pools.
    pub(in crate::placement) fn with_gang_members<'n>(&self, victims: impl Iterator<Item = &'n String>) -> Vec<String> {
        let (mut all, mut gangs): (BTreeSet<String>, BTreeSet<usize>) = (BTreeSet::new(), BTreeSet::new());
        for victim in victims {
            all.insert(victim.clone());
            let (gang, mates) = self.worlds.gangs.mates(victim).unzip();
            if gang.is_some_and(|gang| gangs.insert(gang)) {
                all.extend(mates.into_iter().flatten().filter(|mate| self.runs(mate)).cloned());
            }
        }
        all.into_iter().collect()
    }

    /// Returns whether a released pod of a gang was not evicted in this reconcile.
    fn runs(&self, name: &str) -> bool {
        let mut ids =
            self.books.iter().zip(&self.worlds.pools).filter_map(|(book, pool)| Some((book, pool.ids.get(name)?)));
        ids.all(|(book, id)| book.class(*id).is_some())
    }

    /// Returns these victims and all other running pods of their gangs, without victims that quotas
    /// do not count.
    pub(super) fn ids_with_gang_members<'n>(
        &self,
        member: Member,
        victims: impl Iterator<Item = &'n String>,
    ) -> BTreeSet<PodId> {
        let (book, mut gangs, mut all) = (self.book(member), BTreeSet::new(), BTreeSet::new());
        for id in self.pod_ids(member, victims) {
            if book.gang(id).is_none_or(|gang| gangs.insert(gang)) {
                all.extend(book.mates(id));
            }
        }
        all
    }

    /// Returns the gangs of which all pods that run can be evicted now, in all pools. If one of
    /// them is protected, all stay. A pod on a GPU that serves no new pods does not keep the
    /// others.
    pub(super) fn evictable_gangs(&self, member: Member, all: &Holders<'_>) -> BTreeSet<usize> {
        let (book, world) = (self.book(member), &self.worlds.pools[member.pool].world);
        if world.pods.iter().all(|pod| pod.gang.is_none()) {
            return BTreeSet::new();
        }
        let known = all.all().filter(|(_, name, holder)| !self.is_ending_soon(member, name, holder));
        let known: BTreeMap<&str, &Holder<'_>> = known.map(|(_, name, holder)| (name, holder)).collect();
        let running = world.pods.iter().enumerate().filter(|(_, pod)| matches!(pod.place, Place::Running { .. }));
        let mut first: BTreeMap<usize, PodId> = BTreeMap::new();
        for (at, _) in running.filter(|(_, pod)| pod.gang.is_some()) {
            if let Some(gang) = book.gang(PodId(at)) {
                first.entry(gang).or_insert(PodId(at));
            }
        }
        let can_leave = |id: PodId| {
            let mut budgets: BTreeMap<usize, u32> = BTreeMap::new();
            let (_, mates) = self.worlds.gangs.mates(&world.pod(id).name).unzip();
            mates.into_iter().flatten().filter(|mate| self.runs(mate)).all(|mate| {
                let Some(holder) = known.get(mate.as_str()) else { return false };
                holder.budget.is_none_or(|budget| {
                    let count = budgets.entry(budget).or_default();
                    *count += 1;
                    *count <= all.budgets.get(budget).copied().unwrap_or(0)
                })
            })
        };
        first.into_iter().filter(|(_, id)| can_leave(*id)).map(|(gang, _)| gang).collect()
    }
}
