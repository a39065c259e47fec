//! What a waiting pod costs. The cost depends on the device, for example if the GPUs of a pool have
//! different numbers of shares. A pod has its rights with what it costs where it costs most. Where
//! it costs less, it may have more rights.
use std::collections::BTreeMap;

use cleave_plan::ledger::{DeviceRequest, Fits, Ledger, Reservation};
use cleave_plan::quota::{Amount, Rights, Wait};

use super::{Member, OnlyWhereCheap, QuotaPass, QuotaTurn, UnitsOnNode, WithinMax};
use crate::quotas::charge::is_mig;

impl QuotaPass<'_> {
    /// Adds to a turn what the pod may do where it costs less. `turn` is the turn with what the pod
    /// costs where it costs most.
    ///
    /// # Errors
    /// Returns why the pod must wait regardless of free units.
    pub(super) fn consider_cheaper_devices(
        &mut self,
        member: Member,
        was_nominated: bool,
        turn: Result<QuotaTurn, Wait>,
    ) -> Result<QuotaTurn, Wait> {
        if matches!(&turn, Ok(turn) if turn.may_use_free_room && turn.rights.is_within) {
            return turn;
        }
        let cheaper = self.least(member).and_then(|least| self.turn_at(member, was_nominated, least));
        let Some(cheaper) = cheaper else { return turn };
        match turn {
            Ok(turn) => {
                let is_within_max = turn.rights.is_over_max && !cheaper.rights.is_over_max;
                let within_max = if !is_within_max {
                    WithinMax::Nowhere
                } else if self.worlds.pools[member.pool].has_mig {
                    // A MIG instance costs less only beside others of its quota.
                    WithinMax::OnUsedGpus
                } else {
                    WithinMax::OnNewGpus
                };
                let cheap = OnlyWhereCheap {
                    uses_free_room: cheaper.may_use_free_room && !turn.may_use_free_room,
                    reclaims: cheaper.rights.is_within && !turn.rights.is_within,
                    runs: false,
                    within_max,
                };
                Ok(QuotaTurn { may_use_free_room: turn.may_use_free_room || cheap.uses_free_room, cheap, ..turn })
            }
            Err(_) if cheaper.may_use_free_room || cheaper.rights.is_within => {
                let cheap = OnlyWhereCheap {
                    uses_free_room: cheaper.may_use_free_room,
                    reclaims: cheaper.rights.is_within,
                    runs: true,
                    ..OnlyWhereCheap::default()
                };
                Ok(QuotaTurn { cheap, ..cheaper })
            }
            Err(wait) => Err(wait),
        }
    }

    /// Adds to a turn what a nominated pod may do with the nominated devices, if it costs less
    /// there than elsewhere. If the pod may not run there, its quota does not get these devices
    /// later either, so the pod no longer waits for them.
    pub(super) fn consider_nomination(&mut self, turn: QuotaTurn) -> QuotaTurn {
        let (member, pool) = (turn.member, &self.worlds.pools[turn.member.pool]);
        if !pool.dearest.contains_key(&member.id) {
            return turn;
        }
        let there = self.turn_at(member, turn.was_nominated, pool.world.pod(member.id).charge);
        let is_within_max_later = there.is_some_and(|there| there.rights.is_within_max_later);
        let rank = there.map_or(turn.rank, |there| there.rank);
        QuotaTurn { rank, rights: Rights { is_within_max_later, ..turn.rights }, ..turn }
    }

    /// Returns the turn of a waiting pod if it costs this much.
    fn turn_at(&mut self, member: Member, was_nominated: bool, charge: Amount) -> Option<QuotaTurn> {
        let now = self.book(member).charge(member.id);
        self.books[member.pool].set_charge(member.id, charge);
        let turn = self.turn_now(member, was_nominated).ok();
        self.books[member.pool].set_charge(member.id, now);
        turn
    }

    /// Returns what a waiting pod costs at least, if this depends on the device.
    fn least(&mut self, member: Member) -> Option<Amount> {
        let pool = &self.worlds.pools[member.pool];
        let least = *pool.least.get(&member.id)?;
        if !pool.has_mig {
            return Some(least);
        }
        let left = self.own_use(member).iter().map(|(&gpu, used)| pool.sizes[gpu].minus(*used));
        left.filter(|left| *left > Amount::ZERO).chain([least]).min()
    }

    /// Returns what the quota of a pod uses of each GPU.
    fn own_use(&mut self, member: Member) -> &mut BTreeMap<usize, Amount> {
        let owner = &self.pod(member).owner;
        let pool = &self.worlds.pools[member.pool];
        self.own_use.entry((member.pool, owner)).or_insert_with(|| pool.use_of(owner))
    }

    /// Returns what a waiting pod costs with these units. `own_use` is what its quota uses of each
    /// GPU. Returns `None` if the cost is not known.
    fn cost_beside(
        &self,
        member: Member,
        (node, takes): UnitsOnNode<'_>,
        own_use: &BTreeMap<usize, Amount>,
    ) -> Option<Amount> {
        let pool = &self.worlds.pools[member.pool];
        let mut sum = Amount::ZERO;
        for take in takes {
            let mut cost = pool.cost(node, (&take.resource, &take.device, take.units))?;
            if let Some(gpu) = pool.gpu(node, &take.device).filter(|_| is_mig(&take.resource)) {
                let used = own_use.get(&gpu).copied().unwrap_or_default();
                cost = cost.min(pool.sizes[gpu].minus(used));
            }
            sum = sum.plus(cost);
        }
        (!takes.is_empty()).then_some(sum)
    }

    /// Returns what a waiting pod costs with these units. Returns `None` if that is not known.
    fn cost_of(&mut self, member: Member, takes: UnitsOnNode<'_>) -> Option<Amount> {
        let own_use = std::mem::take(self.own_use(member));
        let cost = self.cost_beside(member, takes, &own_use);
        *self.own_use(member) = own_use;
        cost
    }

    /// Returns whether a waiting pod may use the units that a search found: the pod may use all
    /// free units, or costs little enough there.
    pub(in crate::placement) fn may_use(&mut self, turn: QuotaTurn, fits: &Fits) -> bool {
        if !turn.cheap.uses_free_room {
            return true;
        }
        let mut most = Amount::ZERO;
        for fit in fits.iter() {
            let Some(cost) = self.cost_of(turn.member, (fit.node(), fit.reservations())) else { return false };
            most = most.max(cost);
        }
        let there = self.turn_at(turn.member, turn.was_nominated, most);
        there.is_some_and(|turn| turn.may_use_free_room)
    }

    /// Withholds the devices on which a waiting pod may not use free units, because it costs too
    /// much there. Does nothing for pods with several requests.
    pub(in crate::placement) fn withhold_dear_devices(
        &mut self,
        ledger: &mut Ledger,
        turn: QuotaTurn,
        requests: &[DeviceRequest],
    ) {
        let [request] = requests else { return };
        let pool = &self.worlds.pools[turn.member.pool];
        let mut is_dear = BTreeMap::new();
        let mut withheld = self.worlds.withheld(Some(turn.member.pool));
        for (node, device) in pool.devices() {
            let (resource, device) = (request.resource.clone(), device.to_owned());
            let take = [Reservation { resource, units: request.units, device }];
            let Some(cost) = self.cost_of(turn.member, (node, &take)) else { continue };
            let is_dear = *is_dear.entry(cost).or_insert_with(|| {
                let there = self.turn_at(turn.member, turn.was_nominated, cost);
                there.is_none_or(|turn| !turn.may_use_free_room)
            });
            if is_dear {
                let [Reservation { resource, device, .. }] = take;
                withheld.entry(node.to_owned()).or_default().insert((resource, device), u32::MAX);
            }
        }
        ledger.withhold(withheld);
    }

    /// Returns whether a waiting pod without a gang is within its guarantee with these units.
    pub(super) fn is_within_with(&self, member: Member, takes: UnitsOnNode<'_>) -> bool {
        let (book, pool) = (self.book(member), &self.worlds.pools[member.pool]);
        let own_use = if pool.has_mig { pool.use_of(&self.pod(member).owner) } else { BTreeMap::new() };
        self.cost_beside(member, takes, &own_use).is_some_and(|cost| book.is_guaranteed_at(member.id, cost))
    }

    /// Records what a waiting pod costs with these units, and returns the cost. Returns `None` if
    /// the cost is not known.
    pub(super) fn set_charge(&mut self, member: Member, name: &str, takes: UnitsOnNode<'_>) -> Option<Amount> {
        let id = *self.worlds.pools[member.pool].ids.get(name)?;
        let charge = self.cost_of(Member { id, ..member }, takes)?;
        self.books[member.pool].set_charge(id, charge);
        Some(charge)
    }

    /// Counts what a released pod uses of its GPU, so that later pods of its quota cost less there.
    pub(super) fn count_own_use(&mut self, member: Member, (node, takes): UnitsOnNode<'_>, charge: Amount) {
        let pool = &self.worlds.pools[member.pool];
        let gpu = takes.first().and_then(|take| pool.gpu(node, &take.device));
        if let Some(gpu) = gpu.filter(|_| pool.has_mig) {
            let used = self.own_use(member).entry(gpu).or_default();
            *used = used.plus(charge);
        }
    }
}
