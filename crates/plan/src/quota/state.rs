//! Accounts and GPUs together, while a pass changes them.
use std::collections::{BTreeMap, BTreeSet};

use super::account::Accounts;
use super::amount::Amount;
use super::class::{Class, Since};
use super::gang::{Gangs, Part};
use super::room::{GpuRoom, Nominee, Rank};
use super::world::{Place, PodId, World};
use crate::ledger::Moment;

/// The state of a pool during a pass.
#[derive(Debug, Clone)]
pub(super) struct State<'w> {
    pub(super) world: &'w World,
    pub(super) now: Moment,
    pub(super) accounts: Accounts<'w>,
    pub(super) gpus: Vec<GpuRoom>,
    /// Free capacity of each GPU, including nominated and reserved capacity. 0 if too much is used.
    pub(super) unused: Vec<Amount>,
    /// Sum of `unused`.
    all_unused: i128,
    /// GPUs that have or had nominations or reservations, or have terminating pods. This set is
    /// small.
    special: BTreeSet<usize>,
    /// GPU of each running pod, including pods released in this pass.
    running: Vec<Option<usize>>,
    /// GPU of each nominated pod.
    nominated: Vec<Option<usize>>,
    /// Reservations of pods that have waited long, by account.
    reserved: BTreeMap<usize, Reservation>,
    /// Position of the current pod of the pass among the pods that have waited long.
    position: usize,
}

/// Capacity that is reserved for a pod that has waited long.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reservation {
    pub(super) pod: PodId,
    pub(super) gpu: usize,
    /// Position of the pod among all such pods.
    position: usize,
}

impl<'w> State<'w> {
    pub(super) fn new(world: &'w World, now: Moment) -> Self {
        let mut accounts = Accounts::new(world);
        let mut gpus: Vec<GpuRoom> = world.gpus.iter().map(|&room| GpuRoom::new(room)).collect();
        let (mut running, mut nominated) = (vec![None; world.pods.len()], vec![None; world.pods.len()]);
        let mut counted = Vec::new();
        for (at, pod) in world.pods.iter().enumerate() {
            let id = PodId(at);
            match pod.place {
                Place::Running { gpu, since } => {
                    gpus[gpu].add(id, pod.charge);
                    running[at] = Some(gpu);
                    counted.push((id, gpu, Since { at: since, nominated: None }));
                }
                Place::Leaving { gpu, held } => {
                    gpus[gpu].add_terminating(pod.charge);
                    if held {
                        accounts.hold_leaving(id);
                    }
                }
                Place::Waiting { nominated: Some(gpu) } if is_valid_nomination(world, accounts.gangs(), id) => {
                    nominated[at] = Some(gpu);
                    counted.push((id, gpu, Since { at: now, nominated: Some(pod.created) }));
                }
                Place::Waiting { .. } => {}
            }
        }
        accounts.add_all(counted.into_iter());
        let unused: Vec<Amount> = gpus.iter().map(GpuRoom::unused).collect();
        let all_unused = unused.iter().map(|&unused| i128::from(unused)).sum();
        let special = (0..gpus.len()).filter(|&gpu| gpus[gpu].leaving() > 0).collect();
        let mut state = Self {
            world,
            now,
            accounts,
            unused,
            all_unused,
            special,
            gpus,
            running,
            nominated,
            reserved: BTreeMap::new(),
            position: usize::MAX,
        };
        for at in 0..world.pods.len() {
            if let Some(gpu) = state.nominated[at] {
                state.add_nominee(PodId(at), gpu);
            }
        }
        state
    }

    /// Nominates capacity for a pod that counts already, with the rank of its current class.
    fn add_nominee(&mut self, id: PodId, gpu: usize) {
        let Some(class) = self.accounts.class(id) else { return };
        let (pod, rank) = (self.world.pod(id), self.rank(id, class));
        self.special.insert(gpu);
        self.gpus[gpu].nominate(Nominee { id, rank, charge: pod.charge });
    }

    /// Returns the charge of a single pod, without other pods of its gang.
    pub(super) fn charge(&self, id: PodId) -> Amount {
        self.world.pod(id).charge
    }

    /// Returns the rank that a waiting pod has on a GPU.
    pub(super) fn rank_on(&self, id: PodId, gpu: usize) -> Rank {
        self.rank_of(&[(id, gpu)])
    }

    /// Returns the rank that a waiting unit has on GPUs.
    pub(super) fn rank_of(&self, parts: &[Part]) -> Rank {
        let class = self.accounts.class_with(parts, &[]);
        let nobody = Rank { account: 0, class, priority: i32::MIN, overriding: None };
        parts.first().map_or(nobody, |&(id, _)| self.rank(id, class))
    }

    /// Returns the rank of a pod of a class. The class gives rights only if the quota is enforced.
    pub(super) fn rank(&self, id: PodId, class: Class) -> Rank {
        let account = self.accounts.rights_of(id);
        let class = if self.accounts.quota(account).is_enforced() { class } else { Class::Over };
        let (priority, overriding) = (self.accounts.priority(id), self.accounts.overriding(id));
        Rank { account, class, priority, overriding }
    }

    /// Returns the GPU of a running pod.
    pub(super) fn gpu_of(&self, id: PodId) -> Option<usize> {
        self.running[id.0]
    }

    /// Returns the nominated GPU of a pod.
    pub(super) fn nominated(&self, id: PodId) -> Option<usize> {
        self.nominated[id.0]
    }

    /// Releases the pods of a unit to GPUs.
    pub(super) fn release(&mut self, parts: &[Part]) {
        let rank = self.rank_of(parts);
        for &(id, gpu) in parts {
            let charge = self.charge(id);
            self.gpus[gpu].add(id, charge);
            let unused = self.gpus[gpu].unused();
            self.all_unused += i128::from(unused) - i128::from(self.unused[gpu]);
            self.unused[gpu] = unused;
            self.running[id.0] = Some(gpu);
        }
        let now = self.now;
        self.accounts.add(parts, |_| Since { at: now, nominated: None });
        self.displace(&rank, parts);
    }

    /// Nominates capacity of GPUs for the pods of a unit.
    pub(super) fn nominate(&mut self, parts: &[Part], rank: Rank) {
        let (world, now) = (self.world, self.now);
        self.accounts.add(parts, |id| Since { at: now, nominated: Some(world.pod(id).created) });
        for &(id, gpu) in parts {
            self.nominated[id.0] = Some(gpu);
            self.special.insert(gpu);
            self.gpus[gpu].nominate(Nominee { id, rank, charge: world.pod(id).charge });
        }
        self.displace(&rank, parts);
    }

    /// Removes the nominations of a pod's unit. Returns the removed nominations.
    pub(super) fn withdraw(&mut self, id: PodId) -> Vec<Part> {
        let unit = self.accounts.gangs().unit(id).to_vec();
        let take = |id: PodId| Some((id, self.nominated[id.0].take()?));
        let parts: Vec<Part> = unit.into_iter().filter_map(take).collect();
        for &(id, gpu) in &parts {
            self.gpus[gpu].withdraw(id);
            self.accounts.remove(id);
        }
        parts
    }

    /// Returns whether pods of the pool are terminating.
    pub(super) fn has_terminating_pods(&self) -> bool {
        self.gpus.iter().any(|gpu| gpu.leaving() > 0)
    }

    /// Returns whether enough pods of a waiting pod's gang exist. Counts pods that wait, and pods
    /// that run and were not evicted.
    pub(super) fn is_complete(&self, id: PodId) -> bool {
        let gangs = self.accounts.gangs();
        let is_present = |pod: &&PodId| {
            self.running[pod.0].is_some() || matches!(self.world.pod(**pod).place, Place::Waiting { .. })
        };
        gangs.of(id).is_none() || gangs.members(id).iter().filter(is_present).count() >= gangs.size(id)
    }

    /// Evicts a pod. The pod uses its capacity until it has exited, and has no rights. If its gang
    /// is incomplete without the pod, the nominations of the gang are removed.
    pub(super) fn evict(&mut self, id: PodId) {
        let Some(gpu) = self.running[id.0].take() else { return };
        let charge = self.charge(id);
        self.special.insert(gpu);
        self.gpus[gpu].mark_terminating(id, charge);
        self.accounts.evict(id);
        let gangs = self.accounts.gangs();
        let waiting = gangs.of(id).and_then(|gang| gangs.waiting_of(gang).first().copied());
        if let Some(head) = waiting.filter(|&head| self.nominated(head).is_some() && !self.is_complete(head)) {
            self.withdraw(head);
        }
    }

    /// Reserves capacity for pods that have waited long. Reservations of earlier pods in the list
    /// take precedence.
    pub(super) fn reserve_all(&mut self, pods: Vec<(PodId, usize)>) {
        for (position, (pod, gpu)) in pods.into_iter().enumerate() {
            self.reserve(Reservation { pod, gpu, position });
        }
    }

    /// Returns the pods with a reservation, and their GPUs, in the order of precedence.
    pub(super) fn reservations(&self) -> Vec<(PodId, usize)> {
        let mut reserved: Vec<Reservation> = self.reserved.values().copied().collect();
        reserved.sort_by_key(|reservation| reservation.position);
        reserved.into_iter().map(|Reservation { pod, gpu, .. }| (pod, gpu)).collect()
    }

    fn reserve(&mut self, reservation: Reservation) {
        let Reservation { pod: id, gpu, position } = reservation;
        let (rank, charge) = (self.rank_on(id, gpu), self.charge(id));
        self.special.insert(gpu);
        self.gpus[gpu].reserve(Some((Nominee { id, rank, charge }, position)));
        self.reserved.insert(rank.account, reservation);
    }

    /// Returns whether a pod has a reservation because it has waited long.
    #[cfg(test)]
    pub(super) fn is_reserved_for(&self, id: PodId) -> bool {
        self.reserved.values().any(|reservation| reservation.pod == id)
    }

    /// Starts the decision about a pod. Until the decision ends, the pod's own reservation does not
    /// count.
    pub(super) fn start_turn(&mut self, id: PodId) -> Option<Reservation> {
        let account = self.accounts.rights_of(id);
        let reservation = self.reserved.get(&account).copied().filter(|reservation| reservation.pod == id);
        self.position = reservation.map_or(usize::MAX, |reservation| reservation.position);
        let Reservation { gpu, .. } = reservation?;
        self.reserved.remove(&account);
        self.gpus[gpu].reserve(None);
        reservation
    }

    /// Ends the decision about a pod. `kept` is the reservation of a pod that still waits.
    pub(super) fn end_turn(&mut self, kept: Option<Reservation>) {
        if let Some(reservation) = kept {
            self.reserve(reservation);
        }
        self.position = usize::MAX;
    }

    /// Returns the capacity of a GPU that counts as free when checking that enough stays free for
    /// other quotas. Of the reservations, only those that take precedence over the current pod's
    /// are subtracted.
    pub(super) fn free_beside_older(&self, gpu: usize, rank: &Rank) -> i128 {
        self.gpus[gpu].free_before(rank, self.position)
    }

    /// Returns the capacity of a GPU that is free now for a nominated pod. Only nominations that
    /// take precedence are subtracted: those of a higher class, of a higher priority in the same
    /// quota, or of an older pod. Other nominated pods are released later. Without this order,
    /// arriving pods could delay the pod again and again.
    pub(super) fn free_for_nominee(&self, id: PodId, gpu: usize, rank: &Rank) -> i128 {
        let key = |id: PodId| (self.accounts.gangs().created(self.world, id), &self.world.pod(id).name);
        self.gpus[gpu].free_beside(rank, |other| {
            (other.rank.overriding, other.rank.class) > (rank.overriding, rank.class)
                || other.rank.account == rank.account && other.rank.priority > rank.priority
                || key(other.id) < key(id)
        })
    }

    /// Returns whether a GPU has or had nominations or reservations, or has terminating pods.
    pub(super) fn is_special(&self, gpu: usize) -> bool {
        self.special.contains(&gpu)
    }

    /// Returns the capacity of all GPUs that counts as free: see [`Self::free_beside_older`]. With
    /// `later`, terminating pods count as exited.
    pub(super) fn all_free(&self, rank: &Rank, later: bool) -> i128 {
        let free = |gpu: usize| {
            let leaving = if later { self.gpus[gpu].leaving() } else { 0 };
            (self.free_beside_older(gpu, rank) + leaving).max(0)
        };
        let difference = |&gpu: &usize| free(gpu) - i128::from(self.unused[gpu]);
        self.all_unused + self.special.iter().map(difference).sum::<i128>()
    }

    /// Returns whether a pod must wait for a pod of the same quota that has a reservation and is at
    /// least as important: both together would exceed the quota's maximum or guarantee.
    pub(super) fn overtakes(&self, id: PodId) -> bool {
        let (accounts, account) = (&self.accounts, self.accounts.rights_of(id));
        let reserved = self.reserved.get(&account).map(|reservation| self.world.pod(reservation.pod));
        let Some(first) = reserved.filter(|first| first.priority >= accounts.priority(id)) else { return false };
        let both = accounts.charge(id).plus(first.charge);
        let quota = accounts.quota(account);
        let exceeds_max = quota.max().is_some_and(|max| accounts.held(account).plus(both) > max);
        let is_within = !first.borrows && quota.cells().is_none();
        quota.is_enforced() && (exceeds_max || is_within && accounts.used(account).plus(both) > quota.min())
    }

    /// Returns whether no nominated pod would lose its guarantee in the state `after`. A pod that
    /// counts before nominated pods can acquire a GPU in their place.
    pub(super) fn keeps_guarantees_in(&self, after: &Self) -> bool {
        let nominated = (0..self.nominated.len()).map(PodId).filter(|&id| after.nominated(id).is_some());
        let is_within = |state: &Self, id: PodId| {
            let class = state.accounts.class(id);
            class.is_some_and(|class| state.rank(id, class).class == Class::In)
        };
        let mut within = nominated.filter(|&id| is_within(self, id));
        within.all(|id| is_within(after, id))
    }

    /// Returns whether a unit can be released to GPUs without a nominated pod losing its guarantee.
    pub(super) fn may_release(&self, parts: &[Part]) -> bool {
        let is_own = |other: usize| {
            let account = self.accounts.account_of(PodId(other));
            parts.iter().any(|&(id, _)| self.accounts.account_of(id) == account)
        };
        let is_on = |at: usize| parts.iter().any(|&(_, gpu)| gpu == at);
        let is_near = |(other, at): (usize, &Option<usize>)| at.is_some_and(|at| is_on(at) || is_own(other));
        if !self.accounts.has_cells() || !self.nominated.iter().enumerate().any(is_near) {
            return true;
        }
        let mut after = self.clone();
        after.release(parts);
        self.keeps_guarantees_in(&after)
    }

    /// Withdraws nominations of lower rank for which not enough capacity remains.
    fn displace(&mut self, rank: &Rank, parts: &[Part]) {
        for &(_, gpu) in parts {
            for id in self.displaced(rank, gpu, 0) {
                self.withdraw(id);
            }
        }
    }

    /// Returns the nominated pods of lower rank for which a GPU has not enough capacity after
    /// `more` capacity becomes free. Callers must also withdraw the nominations of the pods' gangs.
    pub(super) fn displaced(&self, rank: &Rank, gpu: usize, more: i128) -> Vec<PodId> {
        let world = self.world;
        self.gpus[gpu].displaced(rank, more, |id: PodId| (world.pod(id).created, &world.pod(id).name))
    }
}

/// Returns whether a nomination is valid. A gang's nominations are valid only if the gang is
/// complete and all of its waiting pods are nominated.
fn is_valid_nomination(world: &World, gangs: &Gangs, id: PodId) -> bool {
    let is_nominated = |id: &PodId| matches!(world.pod(*id).place, Place::Waiting { nominated: Some(_) });
    gangs.members(id).len() >= gangs.size(id) && gangs.unit(id).iter().all(is_nominated)
}
