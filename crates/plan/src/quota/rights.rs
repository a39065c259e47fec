//! Decides whether the victims of an exchange may be evicted.
use std::collections::BTreeMap;

use super::amount::Amount;
use super::class::Class;
use super::exchange::{Candidate, Kind, Search};
use super::gang::Part;
use super::room::Rank;
use super::world::PodId;

impl Search<'_, '_> {
    /// Returns whether these victims may be evicted for the unit.
    pub(super) fn is_legal(&self, kind: Kind, parts: &[Part], rank: &Rank, victims: &[Candidate]) -> bool {
        let accounts = &self.state.accounts;
        let quota = accounts.quota(self.account);
        if !quota.is_enforced() {
            return true;
        }
        if kind == Kind::Reclaim {
            return if victims.is_empty() {
                accounts.is_within_beside_leaving(self.taker)
                    || accounts.replaces_leaving(parts)
                    || self.keeps_enough_free(rank, &BTreeMap::new(), &BTreeMap::new())
            } else {
                accounts.guarantees_beside_leaving(parts)
            };
        }
        let mut less: BTreeMap<usize, Amount> = BTreeMap::new();
        for victim in victims {
            let sum = less.entry(victim.account).or_default();
            *sum = sum.plus(victim.charge);
        }
        let freed = self.freed_by(victims);
        self.add_displaced(parts, rank, victims, &freed, &mut less);
        match kind {
            Kind::Reclaim => true,
            Kind::FairShare => {
                // Terminating pods of the quota still use their capacity.
                let more = self.charge.plus(accounts.leaving(self.account));
                let share = accounts.share(self.account, more, Amount::ZERO);
                let after = |account: usize| accounts.share(account, Amount::ZERO, less[&account]);
                victims.iter().all(|victim| share <= after(victim.account))
                    && self.keeps_enough_free(rank, &freed, &less)
            }
            Kind::Priority => {
                let used = accounts.used(self.account);
                let own = less.get(&self.account).copied().unwrap_or_default();
                let after = used.plus(self.charge).minus(own);
                let all_over = victims.iter().all(|victim| victim.class == Class::Over);
                if accounts.overriding(self.taker).is_some() {
                    return quota.max().is_none_or(|max| after <= max);
                }
                quota.max().is_none_or(|max| after <= max)
                    && (all_over || accounts.class_with(parts, &self.pods_of(victims)) == Class::In)
                    && (after <= quota.min() || after <= used || self.keeps_enough_free(rank, &freed, &less))
            }
        }
    }

    /// Returns the amount that victims free on each GPU.
    pub(super) fn freed_by(&self, victims: &[Candidate]) -> BTreeMap<usize, i128> {
        let mut freed = BTreeMap::new();
        for pod in victims.iter().flat_map(|victim| self.running_with(victim.id)) {
            if let Some(gpu) = self.state.gpu_of(pod) {
                *freed.entry(gpu).or_default() += i128::from(self.state.charge(pod));
            }
        }
        freed
    }

    /// Adds to `less` the amounts of pods that would lose their nominations: pods of other
    /// accounts, and pods of the victims' gangs.
    fn add_displaced(
        &self,
        parts: &[Part],
        rank: &Rank,
        victims: &[Candidate],
        freed: &BTreeMap<usize, i128>,
        less: &mut BTreeMap<usize, Amount>,
    ) {
        let mut left = freed.clone();
        for &(id, gpu) in parts {
            *left.entry(gpu).or_default() -= i128::from(self.state.charge(id));
        }
        let accounts = &self.state.accounts;
        let mut displaced: Vec<_> = parts
            .iter()
            .flat_map(|(_, gpu)| self.state.displaced(rank, *gpu, left[gpu]))
            .filter(|&id| accounts.account_of(id) != self.account)
            .flat_map(|id| accounts.gangs().unit(id).iter().copied())
            .collect();
        displaced.extend(victims.iter().flat_map(|victim| self.rest_without(victim)));
        displaced.sort_unstable();
        displaced.dedup();
        for id in displaced {
            let sum = less.entry(accounts.account_of(id)).or_default();
            *sum = sum.plus(self.state.charge(id));
        }
    }

    /// Returns the nominated pods of a victim's gang, if the gang is incomplete without the victim.
    fn rest_without(&self, victim: &Candidate) -> impl Iterator<Item = PodId> {
        let gangs = self.state.accounts.gangs();
        let waiting = gangs.of(victim.id).map(|gang| gangs.waiting_of(gang)).unwrap_or_default();
        let rest = waiting.iter().copied().filter(|&id| self.state.nominated(id).is_some());
        rest.filter(move |_| waiting.len() < gangs.size(victim.id))
    }

    /// Returns whether enough capacity stays free for other quotas after the exchange.
    fn keeps_enough_free(&self, rank: &Rank, freed: &BTreeMap<usize, i128>, less: &BTreeMap<usize, Amount>) -> bool {
        let kept = self.state.accounts.kept_from(self.account, less);
        if kept == Amount::ZERO {
            return true;
        }
        let gpus = &self.state.gpus;
        let free_on = |gpu: usize| self.state.free_beside_older(gpu, rank) + gpus[gpu].leaving();
        let mut free: i128 =
            *self.free[usize::from(rank.class == Class::In)].get_or_init(|| self.state.all_free(rank, true));
        for (&gpu, freed) in freed {
            free += (free_on(gpu) + freed).max(0) - free_on(gpu).max(0);
        }
        free - i128::from(self.charge) >= i128::from(kept)
    }
}
