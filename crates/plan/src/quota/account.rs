//! Accounts: the amount that each quota uses, and the class of each pod.
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::amount::Amount;
use super::cells::{Occupant, Ownership};
use super::class::{Class, FirstFit, Importance, Share, Since};
use super::gang::{Gangs, Part};
use super::pack::fits;
use super::spec::{Mode, Quota};
use super::world::{Owner, Place, PodId, World};

/// A quota and its pods. Pods without a quota have an account too.
#[derive(Debug, Clone)]
struct Account<'w> {
    quota: Quota,
    /// Pods that are released, bound or nominated. Excludes terminating pods.
    members: BTreeSet<Importance<'w>>,
    /// Sum of the members' charges.
    used: Amount,
    /// Sum of the charges of terminating pods.
    leaving: Amount,
    /// GPUs that terminating pods still use.
    leaving_on: BTreeSet<usize>,
    /// Sum of the charges of the members that borrow.
    over: Amount,
}

/// A pod that counts against its quota: it is released, bound or nominated.
#[derive(Debug, Clone, Copy)]
struct Counted {
    gpu: usize,
    since: Since,
    class: Class,
}

/// The accounts of the quotas of a pool, and of pods without a quota.
#[derive(Debug, Clone)]
pub(super) struct Accounts<'w> {
    world: &'w World,
    entries: Vec<Account<'w>>,
    /// Account of each pod.
    account_of: Vec<usize>,
    /// Charge of each pod.
    charges: Vec<Amount>,
    gangs: Arc<Gangs>,
    /// Counted pods, by pod.
    counted: Vec<Option<Counted>>,
    /// GPUs that quotas own, if a quota guarantees cells.
    cells: Option<Cells<'w>>,
}

/// Pods in the order in which they acquire GPUs, and the resulting ownership.
#[derive(Debug, Clone)]
struct Cells<'w> {
    order: BTreeSet<(Since, &'w str, PodId)>,
    /// Amounts that pods use of each of their GPUs, if they use several.
    pieces: BTreeMap<PodId, Vec<(usize, Amount)>>,
    limits: Vec<usize>,
    /// Whether a quota that guarantees cells is enforced. Quotas that are not enforced own no GPUs.
    are_enforced: bool,
    ownership: Ownership,
}

impl<'w> Accounts<'w> {
    /// Creates the accounts. No pod counts yet.
    pub(super) fn new(world: &'w World) -> Self {
        let (unnamed, outside) = (world.quotas.len(), world.quotas.len() + 1);
        let at: BTreeMap<&str, usize> = world.quotas.keys().enumerate().map(|(at, name)| (name.as_str(), at)).collect();
        let account_of = world.pods.iter().map(|pod| match &pod.owner {
            Owner::Quota(name) => at.get(name.as_str()).copied().unwrap_or(unnamed),
            Owner::Unnamed => unnamed,
            Owner::Outside => outside,
        });
        let account_of: Vec<usize> = account_of.collect();
        let nothing = Quota::new(Amount::ZERO);
        let quotas: Vec<Quota> =
            world.quotas.values().copied().chain([nothing, nothing.with_mode(Mode::Count)]).collect();
        let cells = quotas.iter().any(|quota| quota.cells().is_some()).then(|| Cells {
            order: BTreeSet::new(),
            pieces: BTreeMap::new(),
            are_enforced: quotas.iter().any(|quota| quota.cells().is_some() && quota.is_enforced()),
            limits: quotas.iter().map(|quota| quota.cells().unwrap_or(0)).collect(),
            ownership: Ownership::assign(world.gpus.len(), &vec![0; quotas.len()], &[]),
        });
        let account = |quota| Account {
            quota,
            members: BTreeSet::new(),
            used: Amount::ZERO,
            leaving: Amount::ZERO,
            leaving_on: BTreeSet::new(),
            over: Amount::ZERO,
        };
        Self {
            world,
            gangs: Arc::new(Gangs::new(world, &account_of)),
            account_of,
            charges: world.pods.iter().map(|pod| pod.charge).collect(),
            counted: vec![None; world.pods.len()],
            entries: quotas.into_iter().map(account).collect(),
            cells,
        }
    }

    /// Returns the charge of a pod, without the rest of its gang.
    pub(super) fn charge_of(&self, id: PodId) -> Amount {
        self.charges[id.0]
    }

    /// Sets the charge of a pod that does not count.
    pub(super) fn set_charge(&mut self, id: PodId, charge: Amount) {
        self.charges[id.0] = charge;
    }

    /// Returns the sum of the charges of the pods of these parts.
    pub(super) fn cost(&self, parts: &[Part]) -> Amount {
        parts.chunk_by(|one, next| one.0 == next.0).map(|pod| self.charge_of(pod[0].0)).sum()
    }

    /// Counts many pods, each on the given GPU, or on the GPUs of its pieces if it uses several.
    pub(super) fn add_all(&mut self, pods: impl Iterator<Item = (PodId, usize, Since)>) {
        for (id, gpu, since) in pods {
            let further = self.world.pod(id).pieces.iter().filter_map(|piece| piece.gpu);
            let mut gpus: Vec<usize> = further.collect();
            if gpus.len() < 2 {
                gpus = vec![gpu];
            }
            self.insert(id, &gpus, since);
        }
        (0..self.entries.len()).for_each(|account| self.count_classes(account));
        self.assign_cells();
    }

    /// Counts the pods of a unit, each since the given time.
    pub(super) fn add(&mut self, parts: &[Part], since: impl Fn(PodId) -> Since) {
        for pod in parts.chunk_by(|one, next| one.0 == next.0) {
            let gpus: Vec<usize> = pod.iter().map(|&(_, gpu)| gpu).collect();
            self.insert(pod[0].0, &gpus, since(pod[0].0));
        }
        if let Some((id, _)) = parts.first() {
            self.count_classes(self.account_of[id.0]);
            self.assign_cells();
        }
    }

    /// Stops counting a pod.
    pub(super) fn remove(&mut self, id: PodId) {
        let Some(counted) = self.counted[id.0].take() else { return };
        let (account, key) = (self.account_of[id.0], self.importance(id, counted.since));
        self.entries[account].members.remove(&key);
        self.entries[account].used = self.entries[account].used.minus(self.charges[id.0]);
        if let Some(cells) = &mut self.cells {
            cells.order.remove(&(counted.since, key.name, id));
            cells.pieces.remove(&id);
        }
        self.count_classes(account);
        self.assign_cells();
    }

    /// Counts a terminating pod against its quota's maximum.
    pub(super) fn hold_leaving(&mut self, id: PodId) {
        let pod = self.world.pod(id);
        let first = match pod.place {
            Place::Running { gpu, .. } | Place::Leaving { gpu, .. } => Some(gpu),
            Place::Waiting { .. } => None,
        };
        let further = pod.pieces.iter().filter_map(|piece| piece.gpu);
        self.hold_on(id, first.into_iter().chain(further));
    }

    /// Stops counting a pod that is evicted, and counts it against its quota's maximum until it has
    /// exited.
    pub(super) fn evict(&mut self, id: PodId) {
        let first = self.counted[id.0].map(|counted| counted.gpu);
        let pieces = self.cells.as_ref().and_then(|cells| cells.pieces.get(&id));
        let further: Vec<usize> = pieces.into_iter().flatten().map(|(gpu, _)| *gpu).collect();
        self.remove(id);
        self.hold_on(id, first.into_iter().chain(further));
    }

    fn hold_on(&mut self, id: PodId, gpus: impl Iterator<Item = usize>) {
        let account = &mut self.entries[self.account_of[id.0]];
        account.leaving = account.leaving.plus(self.charges[id.0]);
        account.leaving_on.extend(gpus);
    }

    fn importance(&self, id: PodId, since: Since) -> Importance<'w> {
        let pod = self.world.pod(id);
        Importance { borrows: self.borrows(id), priority: Reverse(self.priority(id)), since, name: &pod.name, id }
    }

    /// Counts a pod on its GPUs.
    fn insert(&mut self, id: PodId, gpus: &[usize], since: Since) {
        let Some(&gpu) = gpus.first() else { return };
        let key = self.importance(id, since);
        let account = &mut self.entries[self.account_of[id.0]];
        account.members.insert(key);
        account.used = account.used.plus(self.charges[id.0]);
        self.counted[id.0] = Some(Counted { gpu, since, class: Class::Over });
        let pieces = (gpus.len() > 1).then(|| self.pieces_on(id, gpus));
        if let Some(cells) = &mut self.cells {
            cells.order.insert((since, key.name, id));
            cells.pieces.extend(pieces.map(|pieces| (id, pieces)));
        }
    }

    /// Returns the amounts that a pod uses of several GPUs: those of its requests, in order, or
    /// equal parts if the number of requests differs.
    fn pieces_on(&self, id: PodId, gpus: &[usize]) -> Vec<(usize, Amount)> {
        let pieces = &self.world.pod(id).pieces;
        if pieces.len() == gpus.len() {
            return gpus.iter().zip(pieces).map(|(&gpu, piece)| (gpu, piece.charge)).collect();
        }
        let part = Amount(self.charges[id.0].0 / (gpus.len().max(1) as u64));
        gpus.iter().map(|&gpu| (gpu, part)).collect()
    }

    /// Determines the classes of an account's pods, if its quota guarantees an amount.
    fn count_classes(&mut self, account: usize) {
        let Account { quota, members, .. } = &self.entries[account];
        if quota.cells().is_some() {
            return;
        }
        let (mut fit, mut over) = (FirstFit::new(quota.min()), Amount::ZERO);
        let mut of_gangs = BTreeMap::new();
        for member in members {
            let charge = self.charge_of(member.id);
            let class = match self.gangs.of(member.id) {
                None => fit.next(charge),
                Some(gang) => *of_gangs.entry(gang).or_insert_with(|| fit.next(self.counted_of(gang, &[]))),
            };
            if class == Class::Over {
                over = over.plus(charge);
            }
            if let Some(counted) = &mut self.counted[member.id.0] {
                counted.class = class;
            }
        }
        self.entries[account].over = over;
    }

    /// Returns the charge of a gang's counted pods, excluding the pods in `without`.
    fn counted_of(&self, gang: usize, without: &[PodId]) -> Amount {
        let pods = self.gangs.members_of(gang).iter().filter(|id| self.counted[id.0].is_some());
        pods.filter(|id| !without.contains(id)).map(|&id| self.charge_of(id)).sum()
    }

    /// Determines the owner of each GPU, and the classes of pods whose quotas guarantee cells.
    fn assign_cells(&mut self) {
        let Some(ownership) = self.ownership_without(&[], false) else { return };
        for account in &mut self.entries {
            if account.quota.cells().is_some() {
                account.over = Amount::ZERO;
            }
        }
        let mut classes = ownership.classes.clone();
        if self.entries.iter().any(|account| account.quota.cells().is_some() && !account.quota.is_enforced()) {
            // Quotas that are not enforced own no GPUs. Their pods have the classes that they would
            // have if the quotas were enforced.
            let as_if = self.ownership_without(&[], true).map(|ownership| ownership.classes).unwrap_or_default();
            let of_unenforced = |(id, _): &(PodId, Class)| !self.entries[self.account_of[id.0]].quota.is_enforced();
            classes.extend(as_if.into_iter().filter(of_unenforced));
        }
        for (id, class) in classes {
            if let Some(counted) = &mut self.counted[id.0] {
                counted.class = class;
            }
            if class == Class::Over {
                let over = &mut self.entries[self.account_of[id.0]].over;
                *over = over.plus(self.charges[id.0]);
            }
        }
        if let Some(cells) = &mut self.cells {
            cells.ownership = ownership;
        }
    }

    /// Returns the owner that each GPU would have without some pods. `with_unenforced` includes
    /// quotas that are not enforced. Returns `None` if no quota guarantees cells.
    fn ownership_without(&self, without: &[PodId], with_unenforced: bool) -> Option<Ownership> {
        let cells = self.cells.as_ref()?;
        let occupy = |occupants: &mut Vec<Occupant>, id: PodId| {
            let (Some(counted), account) = (self.counted[id.0], self.account_of[id.0]) else { return };
            let quota = &self.entries[account].quota;
            if !quota.is_enforced() && !with_unenforced {
                return;
            }
            let is_counted = quota.cells().is_none();
            let class = is_counted.then_some(counted.class);
            let unit = self.gangs.of(id).map_or((false, id.0), |gang| (true, gang));
            let one = Occupant { id, account, gpu: counted.gpu, charge: self.charge_of(id), counted: class, unit };
            match cells.pieces.get(&id) {
                None => occupants.push(one),
                Some(pieces) => occupants.extend(pieces.iter().map(|&(gpu, charge)| Occupant { gpu, charge, ..one })),
            }
        };
        let mut seen = BTreeSet::new();
        let mut occupants = Vec::with_capacity(cells.order.len());
        for &(_, _, id) in cells.order.iter().filter(|(_, _, id)| !without.contains(id)) {
            match self.gangs.of(id) {
                None => occupy(&mut occupants, id),
                // A gang counts as one pod, in the place of its first pod.
                Some(gang) if seen.insert(gang) => {
                    let stays = self.gangs.members_of(gang).iter().filter(|id| !without.contains(id));
                    stays.for_each(|&id| occupy(&mut occupants, id));
                }
                Some(_) => {}
            }
        }
        Some(Ownership::assign(self.world.gpus.len(), &cells.limits, &occupants))
    }

    /// Returns the gangs.
    pub(super) fn gangs(&self) -> &Gangs {
        &self.gangs
    }

    /// Returns the priority of a pod, which is the lowest priority in its gang.
    pub(super) fn priority(&self, id: PodId) -> i32 {
        self.gangs.priority(self.world, id)
    }

    /// Returns the priority of a pod, if this priority overrides quotas and the pod's quota is
    /// enforced.
    pub(super) fn overriding(&self, id: PodId) -> Option<i32> {
        let is_enforced = self.entries[self.account_of[id.0]].quota.is_enforced();
        self.world.settings.overriding(self.priority(id)).filter(|_| is_enforced)
    }

    /// Returns the charge of a waiting pod's unit.
    pub(super) fn charge(&self, id: PodId) -> Amount {
        // Only the charges of single pods change.
        if self.gangs.of(id).is_some() { self.gangs.charge(self.world, id) } else { self.charge_of(id) }
    }

    /// Returns whether a pod, and all of its gang, may borrow.
    pub(super) fn borrows(&self, id: PodId) -> bool {
        self.gangs.borrows(self.world, id)
    }

    /// Returns the counted pods of a pod's gang, or only the pod if it has no gang.
    pub(super) fn counted_with(&self, id: PodId) -> impl Iterator<Item = PodId> {
        self.gangs.members(id).iter().copied().filter(|member| self.counted[member.0].is_some())
    }

    /// Returns the account of a pod.
    pub(super) fn account_of(&self, id: PodId) -> usize {
        self.account_of[id.0]
    }

    /// Returns the account whose rights a pod has. Quotas that are not enforced grant no rights, so
    /// their pods have the rights of pods in exempt namespaces.
    pub(super) fn rights_of(&self, id: PodId) -> usize {
        let account = self.account_of[id.0];
        if self.entries[account].quota.is_enforced() { account } else { self.len() - 1 }
    }

    /// Returns the number of accounts.
    pub(super) const fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the limits of an account.
    pub(super) fn quota(&self, account: usize) -> &Quota {
        &self.entries[account].quota
    }

    /// Returns the amount that an account uses, without terminating pods. This amount determines
    /// rights.
    pub(super) fn used(&self, account: usize) -> Amount {
        self.entries[account].used
    }

    /// Returns the amount that an account uses, with terminating pods. This amount is compared with
    /// the maximum.
    pub(super) fn held(&self, account: usize) -> Amount {
        let Account { used, leaving, .. } = &self.entries[account];
        used.plus(*leaving)
    }

    /// Returns the amount that terminating pods of an account use.
    pub(super) fn leaving(&self, account: usize) -> Amount {
        self.entries[account].leaving
    }

    /// Returns whether an account stays within its guarantee if a unit gets GPUs before the
    /// account's terminating pods have exited.
    ///
    /// Only then are pods of other quotas evicted for the unit. Otherwise, a quota whose pods are
    /// deleted and replaced again and again could use a multiple of its guarantee while the earlier
    /// pods terminate.
    pub(super) fn guarantees_beside_leaving(&self, parts: &[Part]) -> bool {
        let Some(&(id, _)) = parts.first() else { return true };
        let account = self.account_of[id.0];
        let Account { quota, leaving, leaving_on, .. } = &self.entries[account];
        if *leaving == Amount::ZERO {
            return true;
        }
        let (Some(limit), Some(cells)) = (quota.cells(), &self.cells) else {
            return self.held(account).plus(self.cost(parts)) <= quota.min();
        };
        let mut gpus = leaving_on.clone();
        gpus.extend(cells.ownership.owned_by(account));
        gpus.extend(parts.iter().map(|(_, gpu)| *gpu));
        gpus.len() <= limit
    }

    /// Returns whether a unit uses only GPUs of terminating pods of its own quota.
    pub(super) fn replaces_leaving(&self, parts: &[Part]) -> bool {
        let Some(&(id, _)) = parts.first() else { return false };
        let leaving_on = &self.entries[self.account_of[id.0]].leaving_on;
        parts.iter().all(|(_, gpu)| leaving_on.contains(gpu))
    }

    /// Returns the amount that an account uses beyond its guarantee, after its use grows by `more`
    /// and falls by `less`. Accounts without an enforced quota count together, and have no
    /// guarantee.
    pub(super) fn excess(&self, account: usize, more: Amount, less: Amount) -> Amount {
        let Account { quota, used, over, .. } = &self.entries[account];
        if !quota.is_enforced() {
            let outside = self.entries.iter().filter(|other| !other.quota.is_enforced());
            return outside.map(|other| other.used).sum::<Amount>().plus(more).minus(less);
        }
        match quota.cells() {
            Some(_) => over.plus(more).minus(less),
            None => used.plus(more).minus(less).minus(quota.min()),
        }
    }

    /// Returns the share of an account, after its use grows by `more` and falls by `less`.
    pub(super) fn share(&self, account: usize, more: Amount, less: Amount) -> Share {
        let quota = self.quota(account);
        let weight = if quota.is_enforced() { quota.weight() } else { 1 };
        Share { excess: self.excess(account, more, less), weight }
    }

    /// Returns the counted pods of an account, the most important first.
    pub(super) fn members(&self, account: usize) -> impl Iterator<Item = PodId> {
        self.entries[account].members.iter().map(|member| member.id)
    }

    /// Returns whether an enforced quota guarantees cells.
    pub(super) fn has_cells(&self) -> bool {
        self.cells.as_ref().is_some_and(|cells| cells.are_enforced)
    }

    /// Returns the class of a counted pod.
    pub(super) fn class(&self, id: PodId) -> Option<Class> {
        self.counted[id.0].map(|counted| counted.class)
    }

    /// Returns the time since which a pod counts.
    pub(super) fn since(&self, id: PodId) -> Option<Since> {
        self.counted[id.0].map(|counted| counted.since)
    }

    /// Returns the class that a unit would have on GPUs without some pods. The unit must not count
    /// yet. Among pods of equal priority that may all borrow, or may all not borrow, the unit is
    /// the last.
    pub(super) fn class_with(&self, parts: &[Part], without: &[PodId]) -> Class {
        let Some(&(id, _)) = parts.first() else { return Class::Over };
        let account = self.account_of[id.0];
        let Account { quota, members, .. } = &self.entries[account];
        let (Some(limit), Some(cells)) = (quota.cells(), &self.cells) else {
            return self.count_class_with(quota.min(), members, parts, without);
        };
        let gpus: Vec<usize> = parts.iter().map(|&(_, gpu)| gpu).collect();
        let rest_borrows = self.counted_with(id).any(|mate| self.class(mate) == Some(Class::Over));
        if rest_borrows {
            return Class::Over;
        }
        if without.iter().any(|&gone| self.class(gone) == Some(Class::In)) {
            let ownership = self.ownership_without(without, false);
            return ownership.map_or(Class::Over, |ownership| ownership.class_of_next(account, &gpus, limit));
        }
        cells.ownership.class_of_next(account, &gpus, limit)
    }

    fn count_class_with(
        &self,
        min: Amount,
        members: &BTreeSet<Importance<'w>>,
        parts: &[Part],
        without: &[PodId],
    ) -> Class {
        let (id, charge) = (parts[0].0, self.cost(parts));
        let (position, own) = ((self.borrows(id), Reverse(self.priority(id))), self.gangs.of(id));
        let mut fit = FirstFit::new(min);
        let mut seen = BTreeSet::new();
        let more_important = members.iter().take_while(|member| (member.borrows, member.priority) <= position);
        for member in more_important.filter(|member| !without.contains(&member.id)) {
            // Many pods may wait for a quota that many pods use.
            if !fit.has_room(charge) {
                return Class::Over;
            }
            match self.gangs.of(member.id) {
                None => {
                    fit.next(self.charge_of(member.id));
                }
                // Other pods of the gang count already. The whole gang has their position.
                Some(gang) if own == Some(gang) => return fit.next(charge.plus(self.counted_of(gang, without))),
                Some(gang) if seen.insert(gang) => {
                    fit.next(self.counted_of(gang, without));
                }
                Some(_) => {}
            }
        }
        fit.next(charge)
    }

    /// Returns whether a unit that does not count yet would be within its quota's guarantee.
    pub(super) fn is_within(&self, id: PodId) -> bool {
        self.is_within_at(id, self.charge(id))
    }

    /// Like [`Self::is_within`], for a unit that costs this much.
    pub(super) fn is_within_at(&self, id: PodId, charge: Amount) -> bool {
        let account = self.account_of[id.0];
        let cells = self.cells.as_ref().map_or(0, |cells| cells.ownership.cells[account]);
        self.is_within_beside((id, charge), self.entries[account].used, cells)
    }

    /// Like [`Self::is_within`], but terminating pods of the quota count too. Otherwise a quota
    /// could use a multiple of its guarantee, if its pods are deleted and replaced again and again
    /// while the earlier ones still terminate.
    pub(super) fn is_within_beside_leaving(&self, id: PodId) -> bool {
        let account = self.account_of[id.0];
        let cells = self.cells.as_ref().map_or(0, |cells| {
            let leaving_on = &self.entries[account].leaving_on;
            let others = leaving_on.iter().filter(|gpu| cells.ownership.owner[**gpu] != Some(account));
            cells.ownership.cells[account] + others.count()
        });
        self.is_within_beside((id, self.charge(id)), self.held(account), cells)
    }

    /// Returns whether a unit with this charge would be within its quota's guarantee if the quota's
    /// other pods use this amount, and this number of GPUs.
    fn is_within_beside(&self, (id, charge): (PodId, Amount), used: Amount, gpus: usize) -> bool {
        let account = self.account_of[id.0];
        let quota = &self.entries[account].quota;
        let (Some(limit), Some(Cells { ownership, .. })) = (quota.cells(), &self.cells) else {
            return used.plus(charge) <= quota.min();
        };
        let room = |gpu: usize| self.world.gpus[gpu].minus(ownership.guaranteed[gpu]);
        let unit = self.gangs.unit(id);
        if let [one] = unit
            && self.world.pod(*one).pieces.len() < 2
        {
            let has_room = |gpu: usize| room(gpu) >= charge;
            return gpus < limit || ownership.owned_by(account).any(has_room);
        }
        // Check whether the requests of the unit fit on the quota's GPUs together with any GPUs
        // that the quota may still acquire.
        let largest = self.world.gpus.iter().copied().max().unwrap_or_default();
        let charges: Vec<Amount> = unit.iter().flat_map(|&pod| self.pieces(pod)).collect();
        let new = limit.saturating_sub(gpus).min(charges.len());
        let owned = ownership.owned_by(account).map(|gpu| i128::from(room(gpu)));
        let rooms: Vec<i128> = owned.chain(std::iter::repeat_n(i128::from(largest), new)).collect();
        fits(&charges, &rooms)
    }

    /// Returns the amounts that a pod requests of each GPU.
    fn pieces(&self, id: PodId) -> Vec<Amount> {
        match self.world.pod(id).pieces.as_slice() {
            [] | [_] => vec![self.charge_of(id)],
            many => many.iter().map(|piece| piece.charge).collect(),
        }
    }

    /// Returns a function of a GPU: `Some(true)` for GPUs of the account, `Some(false)` for GPUs
    /// without an owner, and otherwise `None`. Also returns how many GPUs the account may still
    /// acquire.
    pub(super) fn cells_for(&self, account: usize) -> (impl Fn(usize) -> Option<bool>, usize) {
        let cells = self.cells.as_ref();
        let limit = self.quota(account).cells().unwrap_or(0);
        let new = limit.saturating_sub(cells.map_or(0, |cells| cells.ownership.cells[account]));
        let is_own = move |gpu: usize| match cells.map(|cells| cells.ownership.owner[gpu])? {
            Some(owner) => (owner == account).then_some(true),
            None => Some(false),
        };
        (is_own, new)
    }

    /// Returns whether an account owns a GPU.
    pub(super) fn owns(&self, account: usize, gpu: usize) -> bool {
        self.cells.as_ref().is_some_and(|cells| cells.ownership.owner[gpu] == Some(account))
    }

    /// Returns whether a quota other than an account's keeps a part of its guarantee from
    /// borrowers.
    pub(super) fn has_unlent(&self, account: usize) -> bool {
        let others = self.entries.iter().enumerate().filter(|(other, _)| *other != account);
        let mut quotas = others.map(|(_, other)| &other.quota).filter(|quota| quota.is_enforced());
        quotas.any(|quota| quota.unlent() > Amount::ZERO)
    }

    /// Returns the amount that must stay free for the other quotas if a pod of an account borrows.
    /// `less` contains the amounts by which the use of some accounts falls first.
    pub(super) fn kept_from(&self, account: usize, less: &BTreeMap<usize, Amount>) -> Amount {
        let others = self.entries.iter().enumerate().filter(|(other, _)| *other != account);
        let enforced = others.filter(|(_, other)| other.quota.is_enforced());
        let kept = |(other, account): (usize, &Account<'_>)| {
            let used = account.used.minus(less.get(&other).copied().unwrap_or_default());
            account.quota.unlent().minus(used)
        };
        enforced.map(kept).sum()
    }
}
