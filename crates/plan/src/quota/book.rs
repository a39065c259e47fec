//! The use and the rights of quotas, for callers that place pods themselves.
//!
//! The operator searches nodes with its own rules. The operator queries the book for everything
//! that concerns quotas. It also records each decision in the book, so that later decisions of the
//! same pass see the decision.
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::account::Accounts;
use super::amount::Amount;
use super::class::{Class, Share, Since};
use super::exchange::Kind;
use super::look::Wait;
use super::spec::Quota;
use super::world::{NEVER_EVICTED, Place, Pod, PodId, World};
use crate::ledger::Moment;

/// The accounts of one pool in the middle of a pass.
#[derive(Debug, Clone)]
pub struct Book<'w> {
    world: &'w World,
    now: Moment,
    accounts: Accounts<'w>,
    /// Sum of the sizes of the healthy GPUs.
    size: Amount,
    /// Sum of the charges of terminating pods.
    leaving: Amount,
    /// Sum of the charges of nominated pods.
    nominated: Amount,
    /// Sum of the charges of running and nominated pods.
    counted: Amount,
    /// Pods that have waited long, and the free capacity that is reserved for each pod. The pod
    /// whose reservation takes precedence is first.
    reserved: Vec<(PodId, Amount)>,
}

/// The rights of a waiting pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rights {
    /// Whether the pod is within its quota's guarantee.
    pub is_within: bool,
    /// Whether the pod's quota exceeds its maximum if the pod runs now.
    pub is_over_max: bool,
    /// Whether the quota stays within its maximum once terminating pods have exited.
    pub is_within_max_later: bool,
}

/// The amounts and pods of a quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Amount that running and nominated pods use.
    pub used: Amount,
    /// Amount that running, nominated and terminating pods use.
    pub held: Amount,
    /// Amount that pods within the guarantee use.
    pub within: Amount,
    /// Amount that borrowing pods use.
    pub over: Amount,
    /// Amount that the quota uses beyond its guarantee.
    pub excess: Amount,
    /// The unused part of the guarantee that others may use.
    pub lent: Amount,
    /// Weight of the quota.
    pub weight: u32,
    /// Number of pods within the guarantee.
    pub pods_within: u32,
    /// Number of pods that borrow.
    pub pods_over: u32,
    /// Number of GPUs that the quota owns, if it guarantees cells.
    pub cells: Option<usize>,
}

/// A position in the order of waiting pods; lower is earlier. Pods that override quotas are first,
/// then pods within a guarantee.
pub type Turn<'w> = (Reverse<Option<i32>>, Option<Share>, Reverse<i32>, Moment, &'w str);

impl<'w> Book<'w> {
    /// Counts the pods of a pool.
    pub fn new(world: &'w World, now: Moment) -> Self {
        let nothing = Amount::ZERO;
        let accounts = Accounts::new(world);
        let (leaving, nominated, counted, reserved) = (nothing, nothing, nothing, Vec::new());
        let size = world.gpus.iter().copied().sum();
        let mut book = Self { world, now, accounts, size, leaving, nominated, counted, reserved };
        let mut counted = Vec::new();
        for (at, pod) in world.pods.iter().enumerate() {
            let id = PodId(at);
            match pod.place {
                Place::Running { gpu, since } => {
                    book.counted = book.counted.plus(pod.charge);
                    counted.push((id, gpu, Since { at: since, nominated: None }));
                }
                Place::Leaving { held, .. } => {
                    book.leaving = book.leaving.plus(pod.charge);
                    if held {
                        book.accounts.hold_leaving(id);
                    }
                }
                Place::Waiting { nominated: Some(gpu) } => {
                    book.counted = book.counted.plus(pod.charge);
                    book.nominated = book.nominated.plus(pod.charge);
                    counted.push((id, gpu, Since { at: now, nominated: Some(pod.created) }));
                }
                Place::Waiting { nominated: None } => {}
            }
        }
        book.accounts.add_all(counted.into_iter());
        book
    }

    /// Records that a waiting pod, or all waiting pods of a gang, are released to GPUs. A pod that
    /// uses several GPUs has several consecutive parts, in the order of its pieces.
    pub fn release(&mut self, parts: &[(PodId, usize)]) {
        self.counted = self.counted.plus(self.cost(parts));
        self.accounts.add(parts, |_| Since { at: self.now, nominated: None });
        self.end_reservations(parts);
    }

    /// Records that capacity of GPUs is nominated for a pod, or for all waiting pods of a gang.
    pub fn nominate(&mut self, parts: &[(PodId, usize)]) {
        let cost = self.cost(parts);
        self.counted = self.counted.plus(cost);
        self.nominated = self.nominated.plus(cost);
        let (world, now) = (self.world, self.now);
        self.accounts.add(parts, |id| Since { at: now, nominated: Some(world.pod(id).created) });
        self.end_reservations(parts);
    }

    /// Records that capacity of a GPU is reserved for a pod that has waited long. Call this in the
    /// order of precedence, before any decision.
    pub fn reserve(&mut self, id: PodId, gpu: usize) {
        let uses = |pod: &&Pod| match pod.place {
            Place::Running { gpu: at, .. } | Place::Leaving { gpu: at, .. } => at == gpu,
            Place::Waiting { nominated } => nominated == Some(gpu),
        };
        let used: Amount = self.world.pods.iter().filter(uses).map(|pod| pod.charge).sum();
        let free = self.world.gpus.get(gpu).copied().unwrap_or_default().minus(used);
        self.reserved.push((id, free.min(self.world.pod(id).charge)));
    }

    fn end_reservations(&mut self, parts: &[(PodId, usize)]) {
        self.reserved.retain(|(reserved, _)| parts.iter().all(|(id, _)| id != reserved));
    }

    /// Returns the free capacity that a waiting pod leaves to pods whose reservations take
    /// precedence.
    fn reserved_before(&self, id: PodId) -> Amount {
        let is_more_important =
            |other: PodId| self.account(other) == self.account(id) && self.priority(id) > self.priority(other);
        let before = self.reserved.iter().take_while(|(other, _)| *other != id);
        before.filter(|(other, _)| !is_more_important(*other)).map(|(_, free)| *free).sum()
    }

    fn cost(&self, parts: &[(PodId, usize)]) -> Amount {
        self.accounts.cost(parts)
    }

    /// Sets the charge of a waiting pod that does not count yet. The charge depends on the pod's
    /// GPU.
    pub fn set_charge(&mut self, id: PodId, charge: Amount) {
        if self.accounts.class(id).is_none() {
            self.accounts.set_charge(id, charge);
        }
    }

    /// Returns the unit of a waiting pod: the pod and the waiting pods that are released together
    /// with it, in the order of their names. A pod without a gang is a unit of one pod.
    pub fn unit(&self, id: PodId) -> &[PodId] {
        self.accounts.gangs().unit(id)
    }

    /// Returns the number of a pod's gang. Returns `None` if the pod has no gang.
    pub fn gang(&self, id: PodId) -> Option<usize> {
        self.accounts.gangs().of(id)
    }

    /// Returns a running pod and the pods that are evicted together with it: the running pods of
    /// its gang.
    pub fn mates(&self, id: PodId) -> impl Iterator<Item = PodId> {
        self.accounts.counted_with(id).filter(|mate| matches!(self.world.pod(*mate).place, Place::Running { .. }))
    }

    /// Returns whether enough pods of a waiting pod's gang exist. Counts pods that wait, and pods
    /// that run. If running pods of the gang were evicted, the gang waits for their replacements.
    pub fn is_complete(&self, id: PodId) -> bool {
        let gangs = self.accounts.gangs();
        let is_evicted = |pod: &PodId| {
            matches!(self.world.pod(*pod).place, Place::Running { .. }) && self.accounts.class(*pod).is_none()
        };
        let is_present = |pod: &&PodId| {
            matches!(self.world.pod(**pod).place, Place::Waiting { .. }) || self.accounts.class(**pod).is_some()
        };
        let members = || gangs.members(id).iter();
        let is_whole = || !members().any(is_evicted) && members().filter(is_present).count() >= gangs.size(id);
        gangs.of(id).is_none() || is_whole()
    }

    /// Returns the charge of a waiting pod and the waiting pods of its gang.
    pub fn charge(&self, id: PodId) -> Amount {
        self.accounts.charge(id)
    }

    /// Returns the priority of a pod, which is the lowest priority in its gang.
    pub fn priority(&self, id: PodId) -> i32 {
        self.accounts.priority(id)
    }

    /// Returns the time at which the last pod of a waiting pod's unit was created.
    pub fn created(&self, id: PodId) -> Moment {
        self.accounts.gangs().created(self.world, id)
    }

    /// Returns whether a waiting pod must wait for `first`, a pod of the same quota that has waited
    /// long and is at least as important: both together would exceed the quota's maximum or
    /// guarantee.
    pub fn overtakes(&self, id: PodId, first: PodId) -> bool {
        let account = self.accounts.rights_of(id);
        let waits_long = self.world.pod(first);
        if id == first || self.accounts.rights_of(first) != account || waits_long.priority < self.priority(id) {
            return false;
        }
        let both = self.charge(id).plus(self.accounts.charge_of(first));
        let quota = self.accounts.quota(account);
        let exceeds_max = quota.max().is_some_and(|max| self.accounts.held(account).plus(both) > max);
        let is_within = !waits_long.borrows && quota.cells().is_none();
        quota.is_enforced() && (exceeds_max || is_within && self.accounts.used(account).plus(both) > quota.min())
    }

    /// Records that a waiting pod no longer has a nomination.
    pub fn withdraw(&mut self, id: PodId) {
        if self.accounts.class(id).is_some() {
            let charge = self.accounts.charge_of(id);
            self.counted = self.counted.minus(charge);
            self.nominated = self.nominated.minus(charge);
            self.accounts.remove(id);
        }
    }

    /// Records that a pod is evicted. The pod uses its capacity until it has exited, and has no
    /// rights.
    pub fn evict(&mut self, id: PodId) {
        if self.accounts.class(id).is_some() {
            let charge = self.accounts.charge_of(id);
            self.counted = self.counted.minus(charge);
            self.leaving = self.leaving.plus(charge);
            self.accounts.evict(id);
        }
    }

    /// Returns the usage of a quota of the pool. Returns `None` if the pool has no quota of this
    /// name.
    pub fn usage(&self, name: &str) -> Option<Usage> {
        self.world.quotas.keys().position(|quota| quota == name).map(|account| self.usage_of(account))
    }

    /// Returns the usage of pods without a quota.
    pub fn unnamed_usage(&self) -> Usage {
        self.usage_of(self.world.quotas.len())
    }

    fn usage_of(&self, account: usize) -> Usage {
        let quota = self.accounts.quota(account);
        let used = self.accounts.used(account);
        let mut usage = Usage { used, held: self.accounts.held(account), weight: quota.weight(), ..Usage::default() };
        for id in self.accounts.members(account) {
            let (pods, amount) = match self.accounts.class(id) {
                Some(Class::In) => (&mut usage.pods_within, &mut usage.within),
                _ => (&mut usage.pods_over, &mut usage.over),
            };
            *pods += 1;
            *amount = amount.plus(self.accounts.charge_of(id));
        }
        usage.lent = quota.min().minus(used).min(quota.min().minus(quota.unlent()));
        usage.excess = if quota.cells().is_some() { usage.over } else { used.minus(quota.min()) };
        usage.cells =
            quota.cells().map(|_| (0..self.world.gpus.len()).filter(|&gpu| self.accounts.owns(account, gpu)).count());
        usage
    }

    /// Returns the total amount of the pool's healthy GPUs.
    pub fn healthy(&self) -> Amount {
        self.size
    }

    /// Returns the limits of a pod's quota. A pod without a quota has no guarantee and no maximum.
    pub fn quota(&self, id: PodId) -> &Quota {
        self.accounts.quota(self.accounts.account_of(id))
    }

    /// Returns the number of the account whose rights a pod has.
    pub fn account(&self, id: PodId) -> usize {
        self.accounts.rights_of(id)
    }

    /// Returns the class of a running or nominated pod.
    pub fn class(&self, id: PodId) -> Option<Class> {
        self.accounts.class(id)
    }

    /// Returns the class that a waiting pod or gang would have on GPUs without some pods. Without
    /// an enforced quota, the class is always [`Class::Over`].
    pub fn class_with(&self, parts: &[(PodId, usize)], without: &[PodId]) -> Class {
        let is_enforced = parts.first().is_some_and(|(id, _)| self.quota(*id).is_enforced());
        if is_enforced { self.accounts.class_with(parts, without) } else { Class::Over }
    }

    /// Returns the amount that a pod's quota uses, without terminating pods.
    pub fn used(&self, id: PodId) -> Amount {
        self.accounts.used(self.accounts.account_of(id))
    }

    /// Returns the amount that terminating pods of a waiting pod's quota use, if they may have to
    /// exit before pods of other quotas are evicted for the waiting pod. Otherwise returns 0.
    pub fn awaits_leaving(&self, id: PodId) -> Amount {
        let (quota, account) = (self.quota(id), self.accounts.account_of(id));
        let fits = self.accounts.held(account).plus(self.charge(id)) <= quota.min();
        if fits && quota.cells().is_none() { Amount::ZERO } else { self.accounts.leaving(account) }
    }

    /// Returns the share that a waiting pod's quota would have if the pod were released.
    pub fn share_with(&self, id: PodId) -> Share {
        self.accounts.share(self.accounts.account_of(id), self.charge(id), Amount::ZERO)
    }

    /// Returns the share of a pod's quota.
    pub fn share(&self, id: PodId) -> Share {
        self.accounts.share(self.accounts.account_of(id), Amount::ZERO, Amount::ZERO)
    }

    /// Returns the time since which a pod counts.
    pub fn since(&self, id: PodId) -> Option<Moment> {
        self.accounts.since(id).map(|since| since.at)
    }

    /// Returns the position of a waiting pod.
    pub fn turn(&self, id: PodId) -> Turn<'w> {
        let share = match self.accounts.class(id) {
            _ if self.is_guaranteed(id) => None,
            None => Some(self.share_with(id)),
            Some(_) => Some(self.share(id)),
        };
        let pod = self.world.pod(id);
        (Reverse(self.overriding(id)), share, Reverse(self.priority(id)), self.created(id), &pod.name)
    }

    /// Returns whether a waiting pod is within the guarantee of an enforced quota.
    pub fn is_guaranteed(&self, id: PodId) -> bool {
        let quota = self.quota(id);
        quota.is_enforced()
            && match self.accounts.class(id) {
                None => self.accounts.is_within(id),
                // The pod counts already.
                Some(class) if quota.cells().is_some() => class == Class::In,
                Some(_) => self.used(id) <= quota.min(),
            }
    }

    /// Returns whether an enforced quota guarantees room for a waiting pod that does not count yet,
    /// if the pod costs this much.
    pub fn is_guaranteed_at(&self, id: PodId, charge: Amount) -> bool {
        self.quota(id).is_enforced() && self.accounts.is_within_at(id, charge)
    }

    /// Returns the priority of a pod, if its priority overrides quotas.
    pub fn overriding(&self, id: PodId) -> Option<i32> {
        self.accounts.overriding(id)
    }

    /// Returns the rights of a waiting pod, or why it must wait regardless of free capacity. The
    /// pod must not count yet.
    pub fn rights(&self, id: PodId) -> Result<Rights, Wait> {
        let (charge, quota) = (self.charge(id), *self.quota(id));
        let account = self.accounts.account_of(id);
        let is_within = self.accounts.is_within(id);
        if self.accounts.gangs().is_too_large(id) {
            return Err(Wait::GangTooLarge);
        }
        if !self.is_complete(id) {
            return Err(Wait::GangIncomplete);
        }
        if !quota.is_enforced() {
            return Ok(Rights { is_within: false, is_over_max: false, is_within_max_later: true });
        }
        if !is_within && !self.unit(id).iter().all(|pod| self.world.pod(*pod).borrows) {
            return Err(Wait::WaitsForGuarantee);
        }
        if quota.max().is_some_and(|max| charge > max) {
            return Err(Wait::LargerThanMax);
        }
        let fits = |used: Amount| quota.max().is_none_or(|max| used.plus(charge) <= max);
        Ok(Rights {
            is_within,
            is_over_max: !fits(self.accounts.held(account)),
            is_within_max_later: fits(self.accounts.used(account)),
        })
    }

    /// Returns the amount that must stay free for other quotas when a pod borrows.
    pub fn kept_from(&self, id: PodId) -> Amount {
        self.accounts.kept_from(self.accounts.account_of(id), &BTreeMap::new())
    }

    /// Returns whether a waiting pod may use free room: it is within its guarantee together with
    /// the terminating pods of its quota, its priority overrides quotas, or enough stays free for
    /// the other quotas.
    pub fn leaves_kept_room(&self, id: PodId) -> bool {
        let kept = self.kept_from(id);
        let free = i128::from(self.size)
            - i128::from(self.counted.minus(self.nominated))
            - i128::from(self.leaving.max(self.nominated))
            - i128::from(self.reserved_before(id));
        !self.quota(id).is_enforced()
            || self.accounts.is_within_beside_leaving(id)
            || self.overriding(id).is_some()
            || kept == Amount::ZERO
            || free - i128::from(self.charge(id)) >= i128::from(kept)
    }

    /// Returns whether a waiting pod is within its guarantee only without the terminating pods of
    /// its quota.
    pub fn awaits_own_leaving(&self, id: PodId) -> bool {
        self.quota(id).is_enforced() && self.accounts.is_within(id) && !self.accounts.is_within_beside_leaving(id)
    }

    /// Returns whether a running pod and its gang may be evicted for a waiting pod, provided that
    /// [`Self::is_legal`] accepts the complete set of victims.
    pub fn may_leave(&self, kind: Kind, taker: PodId, victim: PodId) -> bool {
        let (accounts, settings) = (&self.accounts, &self.world.settings);
        let (Some(class), Some(since)) =
            (accounts.class(victim), self.mates(victim).filter_map(|id| self.since(id)).min())
        else {
            return false;
        };
        let is_running = matches!(self.world.pod(victim).place, Place::Running { .. });
        let (own, other) = (accounts.account_of(taker), accounts.account_of(victim));
        let priority = accounts.priority(victim);
        if !is_running || priority >= NEVER_EVICTED {
            return false;
        }
        let (is_own_enforced, is_other_enforced) =
            (accounts.quota(own).is_enforced(), accounts.quota(other).is_enforced());
        let is_older_than = |seconds: u64| since.0.saturating_add(seconds) <= self.now.0;
        let are_enforced = is_own_enforced && is_other_enforced;
        // Only a higher priority evicts pods whose priority overrides quotas.
        let borrows = own != other && are_enforced && class == Class::Over && self.overriding(victim).is_none();
        match kind {
            Kind::Reclaim => borrows && is_older_than(settings.min_runtime_reclaim),
            Kind::FairShare => borrows && is_older_than(settings.min_runtime_fair_share),
            Kind::Priority => {
                let is_own = if is_own_enforced { own == other } else { !is_other_enforced };
                let is_overridden = are_enforced && self.overrides_others(taker);
                (is_own || is_overridden) && priority < accounts.priority(taker)
            }
        }
    }

    /// Returns whether pods of other quotas may be evicted for a waiting pod by priority alone. At
    /// the quota's maximum, only evicting pods of the same quota helps.
    fn overrides_others(&self, taker: PodId) -> bool {
        let after = self.used(taker).plus(self.charge(taker));
        self.overriding(taker).is_some() && self.quota(taker).max().is_none_or(|max| after <= max)
    }

    /// Returns the position of a running pod among possible victims; lower is evicted first.
    pub fn importance(&self, victim: PodId) -> (Reverse<Share>, i32) {
        (Reverse(self.share(victim)), self.priority(victim))
    }

    /// Returns whether these victims may be evicted for a waiting pod or gang that then uses these
    /// GPUs. If a victim belongs to a gang, the victims must contain all pods of that gang.
    pub fn is_legal(&self, kind: Kind, parts: &[(PodId, usize)], victims: &[PodId]) -> bool {
        let accounts = &self.accounts;
        let Some(&(taker, _)) = parts.first() else { return false };
        let (account, charge) = (accounts.account_of(taker), self.cost(parts));
        let quota = accounts.quota(account);
        if !quota.is_enforced() {
            return true;
        }
        let mut less: BTreeMap<usize, Amount> = BTreeMap::new();
        let mut freed = Amount::ZERO;
        // The nominated pods of a victim's gang lose their nominations.
        let mut gangs = BTreeSet::new();
        let mut is_first = |victim: &PodId| accounts.gangs().of(*victim).is_none_or(|gang| gangs.insert(gang));
        let leaving: BTreeSet<PodId> = victims
            .iter()
            .filter(|victim| is_first(victim))
            .flat_map(|victim| accounts.counted_with(*victim))
            .collect();
        for pod in leaving {
            let of = less.entry(accounts.account_of(pod)).or_default();
            *of = of.plus(accounts.charge_of(pod));
        }
        for &victim in victims {
            freed = freed.plus(accounts.charge_of(victim));
        }
        match kind {
            Kind::Reclaim => {
                let is_within = quota.cells().is_none() || accounts.class_with(parts, victims) == Class::In;
                let is_permitted = if victims.is_empty() {
                    self.leaves_kept_room(taker) || accounts.replaces_leaving(parts)
                } else {
                    accounts.guarantees_beside_leaving(parts)
                };
                is_within && is_permitted
            }
            Kind::FairShare => {
                // Terminating pods of the quota still use their capacity.
                let share = accounts.share(account, charge.plus(accounts.leaving(account)), Amount::ZERO);
                let after = |victim: &PodId| {
                    let other = accounts.account_of(*victim);
                    accounts.share(other, Amount::ZERO, less.get(&other).copied().unwrap_or_default())
                };
                victims.iter().all(|victim| share <= after(victim))
                    && self.leaves_kept_after((taker, charge), &less, freed)
            }
            Kind::Priority => {
                let used = accounts.used(account);
                let after = used.plus(charge).minus(less.get(&account).copied().unwrap_or_default());
                let all_over = victims.iter().all(|&victim| accounts.class(victim) == Some(Class::Over));
                let is_within_max = quota.max().is_none_or(|max| after <= max);
                if self.overriding(taker).is_some() {
                    return is_within_max;
                }
                is_within_max
                    && (all_over || accounts.class_with(parts, victims) == Class::In)
                    && (after <= quota.min() || after <= used || self.leaves_kept_after((taker, charge), &less, freed))
            }
        }
    }

    /// Returns whether enough capacity is free for other quotas once these victims have exited.
    fn leaves_kept_after(
        &self,
        (taker, charge): (PodId, Amount),
        less: &BTreeMap<usize, Amount>,
        freed: Amount,
    ) -> bool {
        let kept = self.accounts.kept_from(self.accounts.account_of(taker), less);
        let taken = self.counted.plus(self.reserved_before(taker));
        let free = i128::from(self.size) - i128::from(taken) + i128::from(freed);
        kept == Amount::ZERO || free - i128::from(charge) >= i128::from(kept)
    }
}
