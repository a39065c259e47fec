//! Decides which pods to evict so that a gang fits.
//!
//! As for one pod, the search starts as if all candidates were evicted. Then it keeps each
//! candidate if the gang still fits, the most important first. A gang uses several GPUs, so the
//! search considers all GPUs together.
use super::class::Class;
use super::exchange::{Candidate, Kind, Search};
use super::gang::Part;
use super::pack::pack;
use super::room::Rank;

/// Maximum number of pods that are tried as the only victim.
const MAX_SINGLE_VICTIMS_TRIED: usize = 100;

impl Search<'_, '_> {
    /// Returns GPUs for the gang and the victims, or `None` if no legal set of victims frees enough
    /// capacity.
    pub(super) fn gang_way(&self, kind: Kind, own: Vec<Candidate>) -> Option<(Vec<Part>, Vec<Candidate>)> {
        let candidates = if kind == Kind::Priority { own } else { self.candidates_of_others(kind) };
        let rank = self.gang_rank(kind);
        let legal = |(parts, victims): (Vec<Part>, Vec<Candidate>)| {
            self.is_legal(kind, &parts, &rank, &victims).then_some((parts, victims))
        };
        if let Some(way) = self.victims_for_gang(kind, &rank, &candidates).and_then(legal) {
            return Some(way);
        }
        match kind {
            Kind::Reclaim => None,
            Kind::FairShare => self.single_victim_for_gang(&rank, &candidates),
            Kind::Priority => {
                let over: Vec<Candidate> = candidates.into_iter().filter(|one| one.class == Class::Over).collect();
                self.victims_for_gang(kind, &rank, &over).and_then(legal)
            }
        }
    }

    /// Returns the rank of the gang. With cells, a gang that reclaims is within the guarantee.
    fn gang_rank(&self, kind: Kind) -> Rank {
        let state = self.state;
        let is_of_cells = state.accounts.quota(self.account).cells().is_some();
        match kind {
            _ if !is_of_cells => self.rank_of(&[]),
            Kind::Reclaim => state.rank(self.taker, Class::In),
            _ => state.rank(self.taker, Class::Over),
        }
    }

    /// Returns GPUs for the gang, and the candidates to evict. The most important candidate must be
    /// first.
    fn victims_for_gang(
        &self,
        kind: Kind,
        rank: &Rank,
        candidates: &[Candidate],
    ) -> Option<(Vec<Part>, Vec<Candidate>)> {
        let mut room = self.free_capacities(kind, rank, candidates);
        let charge = |all: i128, one: &Candidate| all + i128::from(one.charge);
        let mut spare = self.spare().map(|spare| candidates.iter().fold(spare, charge));
        let mut parts = self.find_gpus(&room, spare)?;
        let mut victims = Vec::new();
        let mut left = candidates;
        while !left.is_empty() {
            // The more candidates are kept, the less capacity is free. Find the largest number that
            // can be kept by binary search.
            let staying = |count: usize| {
                let rooms = self.adjust_capacities(room.clone(), &left[..count], false);
                let spare = spare.map(|spare| spare - left[..count].iter().fold(0, charge));
                self.find_gpus(&rooms, spare).map(|parts| (parts, rooms, spare))
            };
            let (mut low, mut high) = (0, left.len() + 1);
            while high - low > 1 {
                let middle = low.midpoint(high);
                match staying(middle) {
                    Some(_) => low = middle,
                    None => high = middle,
                }
            }
            if let Some(found) = (low > 0).then(|| staying(low)).flatten() {
                (parts, room, spare) = found;
            }
            victims.extend(left.get(low).copied());
            left = left.get(low + 1..).unwrap_or_default();
        }
        Some((parts, victims))
    }

    /// Returns one candidate that may be evicted and frees enough capacity alone, as for one pod.
    fn single_victim_for_gang(&self, rank: &Rank, candidates: &[Candidate]) -> Option<(Vec<Part>, Vec<Candidate>)> {
        if self.find_gpus(&self.free_capacities(Kind::FairShare, rank, &[]), self.spare()).is_some() {
            // The gang fits already, so an eviction does not help.
            return None;
        }
        let mut order = candidates.to_vec();
        order.sort_by_cached_key(|one| self.single_victim_key(one));
        order.into_iter().take(MAX_SINGLE_VICTIMS_TRIED).find_map(|one| {
            let parts = self.find_gpus(&self.free_capacities(Kind::FairShare, rank, &[one]), self.spare())?;
            self.is_legal(Kind::FairShare, &parts, rank, &[one]).then(|| (parts, vec![one]))
        })
    }

    /// Finds GPUs for the gang. `spare` is the unused part of the quota's maximum.
    fn find_gpus(&self, rooms: &[i128], spare: Option<i128>) -> Option<Vec<Part>> {
        let unit = self.state.accounts.gangs().unit(self.taker);
        spare.is_none_or(|spare| spare >= 0).then(|| pack(self.state.world, unit, rooms, true)).flatten()
    }

    /// Returns the free capacity of each GPU once these candidates have exited. For a gang that
    /// reclaims cells, only GPUs that its quota owns or may acquire have capacity.
    fn free_capacities(&self, kind: Kind, rank: &Rank, gone: &[Candidate]) -> Vec<i128> {
        let free = |gpu: usize| self.state.gpus[gpu].free_later(rank);
        let rooms = self.adjust_capacities((0..self.state.gpus.len()).map(free).collect(), gone, true);
        let accounts = &self.state.accounts;
        if kind == Kind::Reclaim && accounts.quota(self.account).cells().is_some() {
            accounts.only_cells(self.account, rooms)
        } else {
            rooms
        }
    }

    /// Adds the capacity of candidates that are evicted to the free capacity of each GPU, or
    /// subtracts the capacity of candidates that are kept.
    fn adjust_capacities(&self, mut rooms: Vec<i128>, candidates: &[Candidate], leave: bool) -> Vec<i128> {
        for pod in candidates.iter().flat_map(|one| self.running_with(one.id)) {
            if let Some(gpu) = self.state.gpu_of(pod) {
                let charge = i128::from(self.state.charge(pod));
                rooms[gpu] = rooms[gpu].saturating_add(if leave { charge } else { -charge });
            }
        }
        rooms
    }
}

impl super::account::Accounts<'_> {
    /// Removes the capacity of all GPUs on which a gang of the account would not be within its
    /// guarantee of cells. Keeps the account's own GPUs, and as many GPUs without an owner as the
    /// account may acquire, those with the most free capacity.
    pub(super) fn only_cells(&self, account: usize, mut rooms: Vec<i128>) -> Vec<i128> {
        let (is_own, new) = self.cells_for(account);
        let mut of_nobody: Vec<usize> = (0..rooms.len()).filter(|&gpu| is_own(gpu) == Some(false)).collect();
        of_nobody.sort_by_key(|&gpu| (std::cmp::Reverse(rooms[gpu]), gpu));
        let allowed = of_nobody.get(..new.min(of_nobody.len())).unwrap_or_default();
        for (gpu, room) in rooms.iter_mut().enumerate() {
            if is_own(gpu) != Some(true) && !allowed.contains(&gpu) {
                *room = i128::MIN / 2;
            }
        }
        rooms
    }
}
