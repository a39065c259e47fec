//! Free and nominated capacity of GPUs.
use super::amount::Amount;
use super::class::Class;
use super::world::PodId;

/// Rank of a waiting pod. Ranks decide which nominations a pod must respect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rank {
    pub(super) account: usize,
    pub(super) class: Class,
    pub(super) priority: i32,
    /// The priority, if it overrides quotas.
    pub(super) overriding: Option<i32>,
}

impl Rank {
    /// Returns whether a pod of this rank must respect the nomination of another pod. A pod ignores
    /// nominations of a lower class. In its own quota and class, a pod also ignores nominations of
    /// a lower priority. If one of the priorities overrides quotas, these priorities alone decide.
    pub(super) fn respects(&self, nominee: &Self) -> bool {
        if self.overriding.is_some() || nominee.overriding.is_some() {
            return self.overriding <= nominee.overriding;
        }
        if self.class != nominee.class {
            return self.class < nominee.class;
        }
        self.account != nominee.account || self.priority <= nominee.priority
    }
}

/// A nominated pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Nominee {
    pub(super) id: PodId,
    pub(super) rank: Rank,
    pub(super) charge: Amount,
}

/// A GPU.
#[derive(Debug, Clone, Default)]
pub(super) struct GpuRoom {
    room: Amount,
    held: Amount,
    leaving: Amount,
    /// Pods that run on the GPU, without terminating pods.
    pub(super) pods: Vec<PodId>,
    nominees: Vec<Nominee>,
    /// A pod that has waited long and has a reservation on the GPU, and its position among all such
    /// pods.
    reserved: Option<(Nominee, usize)>,
}

impl GpuRoom {
    pub(super) fn new(room: Amount) -> Self {
        Self { room, ..Self::default() }
    }

    /// Returns the size of the GPU.
    pub(super) const fn size(&self) -> Amount {
        self.room
    }

    /// Returns the capacity that is free now for a pod of this rank. Negative if more capacity is
    /// nominated, reserved or used than exists.
    pub(super) fn free(&self, rank: &Rank) -> i128 {
        self.free_before(rank, usize::MAX)
    }

    /// Returns the capacity that is free now if only the reservations before a position count.
    pub(super) fn free_before(&self, rank: &Rank, position: usize) -> i128 {
        let reserved = self.reserved.filter(|(reserved, at)| *at < position && rank.respects(&reserved.rank));
        self.free_with_reserved(rank) - reserved.map_or(0, |(reserved, _)| i128::from(reserved.charge))
    }

    /// Returns the capacity that is free now for a pod of this rank, including reserved capacity.
    pub(super) fn free_with_reserved(&self, rank: &Rank) -> i128 {
        self.free_beside(rank, |_| true)
    }

    /// Returns the capacity that is free now for a pod of this rank, including reserved capacity.
    /// Of the nominations that the pod must respect, only those that `counts` accepts are
    /// subtracted.
    pub(super) fn free_beside(&self, rank: &Rank, counts: impl Fn(&Nominee) -> bool) -> i128 {
        let respected = self.nominees.iter().filter(|nominee| rank.respects(&nominee.rank) && counts(nominee));
        let respected: Amount = respected.map(|nominee| nominee.charge).sum();
        i128::from(self.room) - i128::from(self.held) - i128::from(respected)
    }

    /// Returns the capacity that is free for a pod of this rank once terminating pods have exited.
    pub(super) fn free_later(&self, rank: &Rank) -> i128 {
        self.free(rank) + i128::from(self.leaving)
    }

    /// Returns the capacity that is free now, including nominated and reserved capacity.
    pub(super) const fn unused(&self) -> Amount {
        self.room.minus(self.held)
    }

    /// Returns the amount that terminating pods use.
    pub(super) fn leaving(&self) -> i128 {
        i128::from(self.leaving)
    }

    /// Returns the capacity that is free for a pod of this rank once terminating pods have exited,
    /// including reserved capacity.
    pub(super) fn free_later_with_reserved(&self, rank: &Rank) -> i128 {
        self.free_with_reserved(rank) + i128::from(self.leaving)
    }

    /// Returns the nominated amount.
    pub(super) fn nominated(&self) -> Amount {
        self.nominees.iter().map(|nominee| nominee.charge).sum()
    }

    /// Returns the nominated pods.
    pub(super) fn nominees(&self) -> impl Iterator<Item = PodId> {
        self.nominees.iter().map(|nominee| nominee.id)
    }

    /// Sets or removes the reservation for a pod that has waited long. The number is the pod's
    /// position among these pods.
    pub(super) const fn reserve(&mut self, pod: Option<(Nominee, usize)>) {
        self.reserved = pod;
    }

    /// Adds a running pod.
    pub(super) fn add(&mut self, id: PodId, charge: Amount) {
        self.pods.push(id);
        self.held = self.held.plus(charge);
    }

    /// Adds a terminating pod.
    pub(super) fn add_terminating(&mut self, charge: Amount) {
        self.held = self.held.plus(charge);
        self.leaving = self.leaving.plus(charge);
    }

    /// Marks a pod as terminating.
    pub(super) fn mark_terminating(&mut self, id: PodId, charge: Amount) {
        self.pods.retain(|pod| *pod != id);
        self.leaving = self.leaving.plus(charge);
    }

    /// Nominates capacity for a pod.
    pub(super) fn nominate(&mut self, nominee: Nominee) {
        self.nominees.push(nominee);
    }

    /// Removes the nomination of a pod.
    pub(super) fn withdraw(&mut self, id: PodId) {
        self.nominees.retain(|nominee| nominee.id != id);
    }

    /// Returns the nominated pods of lower rank for which not enough capacity remains after a pod
    /// of this rank uses some. `more` is capacity that will also become free or, if negative, will
    /// also be used. The least important pods are first. `key` decides between pods of equal rank.
    pub(super) fn displaced<K: Ord>(&self, rank: &Rank, more: i128, key: impl Fn(PodId) -> K) -> Vec<PodId> {
        let room = i128::from(self.room) - i128::from(self.held) + i128::from(self.leaving);
        let mut left = room - i128::from(self.nominated()) + more;
        let mut ignored: Vec<&Nominee> = self.nominees.iter().filter(|nominee| !rank.respects(&nominee.rank)).collect();
        ignored.sort_by_key(|Nominee { id, rank, .. }| {
            (rank.overriding, rank.class, rank.priority, std::cmp::Reverse(key(*id)))
        });
        let mut displaced = Vec::new();
        for nominee in ignored {
            if left >= 0 {
                break;
            }
            left += i128::from(nominee.charge);
            displaced.push(nominee.id);
        }
        displaced
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn rank(account: usize, class: Class, priority: i32) -> Rank {
        Rank { account, class, priority, overriding: None }
    }

    #[test]
    fn a_priority_that_overrides_quotas_decides_alone() {
        let urgent = |priority| Rank { overriding: Some(priority), ..rank(0, Class::Over, priority) };
        let guaranteed = rank(1, Class::In, 5);
        assert!(guaranteed.respects(&urgent(9)) && !urgent(9).respects(&guaranteed));
        assert!(urgent(9).respects(&urgent(9)) && !urgent(10).respects(&urgent(9)) && urgent(9).respects(&urgent(10)));
    }

    #[test]
    fn class_comes_first_and_priority_counts_within_a_quota() {
        let nominee = rank(0, Class::Over, 5);
        assert!(!rank(1, Class::In, -9).respects(&nominee), "a higher class");
        assert!(rank(1, Class::Over, 900).respects(&nominee), "priority does not count across quotas");
        assert!(rank(0, Class::Over, 5).respects(&nominee) && !rank(0, Class::Over, 6).respects(&nominee));
        let guaranteed = rank(0, Class::In, 5);
        assert!(rank(0, Class::Over, 900).respects(&guaranteed), "a lower class of the same quota");
        assert!(rank(1, Class::In, 900).respects(&guaranteed) && !rank(0, Class::In, 6).respects(&guaranteed));
    }

    #[test]
    fn a_pod_displaces_only_as_many_nominations_of_lower_rank_as_needed() {
        let mut gpu = GpuRoom::new(Amount(10));
        gpu.add_terminating(Amount(6));
        for (id, class, priority, charge) in [(1, Class::Over, 3, 3), (2, Class::Over, 1, 3), (3, Class::In, 0, 2)] {
            gpu.nominate(Nominee { id: PodId(id), rank: rank(0, class, priority), charge: Amount(charge) });
        }
        let taker = rank(1, Class::In, 0);
        assert_eq!((gpu.free(&taker), gpu.free_later(&taker)), (2, 8));
        gpu.add(PodId(9), Amount(4));
        assert_eq!(gpu.displaced(&taker, 0, |id| id), [PodId(2)]);
        assert_eq!(gpu.displaced(&taker, -2, |id| id), [PodId(2), PodId(1)]);
        assert_eq!(gpu.displaced(&taker, 2, |id| id), []);
        gpu.add(PodId(10), Amount(2));
        assert_eq!(gpu.displaced(&taker, 0, |id| id), [PodId(2), PodId(1)]);
        assert_eq!(
            gpu.displaced(&rank(2, Class::Over, 9), 0, |id| id),
            [],
            "a borrowing pod of another quota must respect all nominations"
        );
    }
}
