//! Decides which pods to preempt so that a pod of higher priority fits.
//!
//! Chooses victims as kube-scheduler does, with one difference. kube-scheduler sums the units of a
//! node's GPUs, so the units that it frees may be on two GPUs and fit no request. This search
//! considers each way to place the requests on devices separately. A pod is preempted only if it
//! frees units on a chosen device, or a resource that the node lacks.
//!
//! The units are then [nominated](super::Ledger::nominate). Until the units are reserved for the
//! pod, pods of the same or lower priority do not see these units as free.
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::choose::requested_units;
use super::device_units::DeviceUnits;
use super::facts::{Moment, Reservation};
use super::node::{DeviceAmounts, Node};
use super::pack::{assign_to_devices, tightest_devices};
use super::request::DeviceRequest;
use crate::Quantity;
use crate::scheduling::PODS_RESOURCE;

/// Maximum number of ways to place the requests on a node's devices that are considered. A pod of
/// one container has one way for each device.
const MAX_PLACEMENTS_PER_NODE: usize = 512;
/// Maximum number of steps of the search for ways to place the requests.
const MAX_PLACEMENT_SEARCH_STEPS: usize = 20_000;

/// A pending pod.
#[derive(Debug, Clone, Copy)]
pub struct PendingPod<'a> {
    /// Name of the pod, as in [`Ledger::nominate`](super::Ledger::nominate).
    pub pod: &'a str,
    /// Priority of the pod. Higher priorities are placed first.
    pub priority: i32,
    /// Requests of the pod.
    pub device_requests: &'a [DeviceRequest],
}

/// Properties of a pod with allocations that determine whether it is preempted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holder<'a> {
    /// Priority of the pod.
    pub priority: i32,
    /// When the pod started. The operator passes the pod's creation time.
    pub started: Moment,
    /// Index in [`Holders::budgets`] of the disruption budget that limits the pod's eviction.
    /// `None` if no budget limits the eviction.
    pub budget: Option<usize>,
    /// Whether the pod is terminating. The units of a terminating pod become free without
    /// preemption.
    pub ending: bool,
    /// The pod's requests for CPU, memory and other resources of the node, which the pod's eviction
    /// frees. `None` if these resources are already free.
    pub requests: Option<&'a BTreeMap<String, Quantity>>,
}

/// Pods with allocations or reservations, and the disruption budgets that limit their eviction.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Holders<'a> {
    /// Pods by node and name. Excludes pods that must not be evicted now. The node is part of the
    /// key, because a new pod on another node may have the name of a deleted pod that a node still
    /// lists.
    pub pods: BTreeMap<String, BTreeMap<String, Holder<'a>>>,
    /// Released pods that are not bound, in the same form. Their reservations become free when they
    /// are evicted. Empty if such pods must not be evicted.
    pub unbound: BTreeMap<String, BTreeMap<String, Holder<'a>>>,
    /// Pods whose eviction frees no units, because their devices serve no new pods, in the same
    /// form. They are evicted only with other pods.
    pub blocked: BTreeMap<String, BTreeMap<String, Holder<'a>>>,
    /// Number of evictions that each disruption budget allows now.
    pub budgets: Vec<u32>,
    /// Units by node of pods that have just ended and that the node no longer lists. If the units
    /// still count as used, and the node lists no pod for them, they become free without
    /// preemption.
    pub unlisted: BTreeMap<String, DeviceAmounts>,
}

impl<'a> Holders<'a> {
    /// Returns a pod on a node.
    pub fn get(&self, node: &str, pod: &str) -> Option<&Holder<'a>> {
        self.pods.get(node)?.get(pod)
    }

    /// Returns all pods, bound or not, with their nodes and names. Includes blocked pods.
    pub fn all(&self) -> impl Iterator<Item = (&str, &str, &Holder<'a>)> {
        let nodes = self.pods.iter().chain(&self.unbound).chain(&self.blocked);
        nodes.flat_map(|(node, pods)| pods.iter().map(|(name, holder)| (node.as_str(), name.as_str(), holder)))
    }

    /// Records that these pods on a node are being evicted. From now on, the pods count as
    /// terminating, and their budgets allow fewer evictions.
    pub fn evict<'v>(&mut self, node: &str, victims: impl IntoIterator<Item = &'v String>) {
        let mut of_node = [&mut self.pods, &mut self.unbound, &mut self.blocked].map(|pods| pods.get_mut(node));
        for victim in victims {
            let maps = of_node.iter_mut().flatten();
            for holder in maps.filter_map(|pods| pods.get_mut(victim)).filter(|holder| !holder.ending) {
                holder.ending = true;
                if let Some(allowed) = holder.budget.and_then(|budget| self.budgets.get_mut(budget)) {
                    *allowed = allowed.saturating_sub(1);
                }
            }
        }
    }
}

/// A node on which a pod may fit after a preemption.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreemptionNode<'a> {
    /// Name of the node.
    pub name: &'a str,
    /// CPU, memory and other resources of the node that must become free before the pod fits, in
    /// thousandths. The resource `pods` is the number of pods. The map is empty if the node lacks
    /// only units of devices.
    pub missing: BTreeMap<&'a str, u128>,
}

impl<'a> From<&'a str> for PreemptionNode<'a> {
    fn from(name: &'a str) -> Self {
        Self { name, missing: BTreeMap::new() }
    }
}

/// Units for a pod, and the pods to preempt for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Preemption {
    /// Name of the node.
    pub node: String,
    /// The units of each device that the pod would use, one entry for each request.
    pub takes: Vec<Reservation>,
    /// Names of the pods to preempt. The list is empty if free units and the units of terminating
    /// pods suffice.
    pub victims: Vec<String>,
}

/// Units that are kept for a pod while its victims terminate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nomination {
    /// Priority of the pod. Pods of higher priority can use the units.
    pub priority: i32,
    /// Name of the node.
    pub node: String,
    /// The nominated units by device.
    pub takes: Vec<Reservation>,
}

/// Rank of a waiting pod while quotas are enforced. The rank decides which nominations the pod must
/// respect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rank {
    /// Number of the pod's quota. All pods without a quota have one further number.
    pub quota: usize,
    /// Whether the pod is within its quota's guarantee.
    pub is_within: bool,
    /// Priority of the pod.
    pub priority: i32,
    /// The priority, if it overrides quotas.
    pub overriding: Option<i32>,
    /// When the pod was created. `None` while no quota is enforced.
    pub created: Option<Moment>,
}

impl Rank {
    /// Returns the rank of a pod while no quota is enforced: priority alone decides.
    pub const fn of_priority(priority: i32) -> Self {
        Self { quota: 0, is_within: false, priority, overriding: None, created: None }
    }

    /// Returns whether a pod of this rank must respect the nomination of another pod, and leave the
    /// nominated units unused. A pod within its guarantee ignores nominations of pods that borrow.
    /// A pod that borrows must respect all nominations of pods within their guarantee. In the same
    /// class, a pod must respect all nominations of other quotas, and in its own quota those of at
    /// least its priority. If the priority of one of the pods overrides quotas,
    /// [`Self::overriding`] alone decides.
    pub fn respects(&self, nominee: &Self) -> bool {
        if self.overriding.is_some() || nominee.overriding.is_some() {
            return self.overriding <= nominee.overriding;
        }
        if self.is_within != nominee.is_within {
            return nominee.is_within;
        }
        self.quota != nominee.quota || self.priority <= nominee.priority
    }

    /// Returns whether a nominated pod gets its units before another nominated pod that must
    /// respect its nomination: its class is higher, its priority is higher in the same quota, or it
    /// is older. Without this order, pods that arrive could delay the other pod again and again.
    /// Without quotas, each of the two waits until both fit.
    pub(super) fn comes_before(&self, name: &str, (other, other_name): (&Self, &str)) -> bool {
        let (Some(created), Some(other_created)) = (self.created, other.created) else { return true };
        (self.overriding, self.is_within) > (other.overriding, other.is_within)
            || self.quota == other.quota && self.priority > other.priority
            || (created, name) < (other_created, other_name)
    }
}

/// Returns whether the rules of quotas allow a preemption.
pub type IsLegal<'a> = &'a dyn Fn(&Preemption) -> bool;

/// Cost of a preemption, lower is better. In order of weight: the highest priority of the victims,
/// the sum of their priorities, and their number. The last criterion is the earliest start among
/// the victims of the highest priority, where a later start costs less.
type PreemptionCost = (Option<i32>, i128, usize, Reverse<Option<Moment>>);

/// A node that is searched, and its nominated units.
pub(super) struct SearchedNode<'a> {
    pub(super) target: PreemptionNode<'a>,
    pub(super) node: &'a Node,
    pub(super) nominated: Option<&'a DeviceAmounts>,
    /// Reservations on the node of pods that are not bound, if such pods can be evicted.
    pub(super) unbound: Vec<(&'a str, &'a [Reservation])>,
}

/// Returns the cheapest preemption on these nodes. Returns `None` if no preemption helps. Among
/// equal preemptions, returns the preemption on the first node. The second set in `holders`
/// contains pods that are not preempted.
pub(super) fn cheapest_preemption<'a>(
    pending: PendingPod<'_>,
    nodes: impl Iterator<Item = SearchedNode<'a>>,
    holders: (&Holders<'_>, &BTreeSet<String>),
    is_legal: Option<IsLegal<'_>>,
) -> Option<Preemption> {
    let mut best: Option<(PreemptionCost, Preemption)> = None;
    for searched in nodes {
        let requested =
            |short: &DeviceRequest| pending.device_requests.iter().any(|request| request.resource == short.resource);
        if searched.node.short.iter().any(requested) {
            continue;
        }
        for (cost, found) in PreemptionSearch::new(&searched, pending, holders).placements(is_legal) {
            if best.as_ref().is_none_or(|(least, _)| cost < *least) {
                best = Some((cost, found));
            }
        }
    }
    best.map(|(_, preemption)| preemption)
}

/// A limited resource: units of a requested resource on a device, or a resource of the node such as
/// CPU.
struct LimitedResource<'a> {
    resource: &'a str,
    /// UUID of the device. The UUID is empty for a resource of the node.
    device: &'a str,
    /// Amount that is free if all candidates are preempted. For a resource of the node, the missing
    /// amount is subtracted. The value is negative if more units are needed or reserved than exist.
    most: i128,
}

/// A pod that may be preempted.
struct PossibleVictim<'a> {
    pod: &'a str,
    holder: Holder<'a>,
    /// Amounts that the pod frees, by slot.
    frees: Vec<(usize, i128)>,
}

/// A node from the point of view of one pending pod.
struct PreemptionSearch<'a> {
    /// Name of the node.
    node: &'a str,
    /// The slots of devices, then the slots of the node's missing resources.
    slots: Vec<LimitedResource<'a>>,
    /// Number of slots of devices.
    device_slots: usize,
    /// Candidates in the order in which they are kept.
    candidates: Vec<PossibleVictim<'a>>,
    /// Number of evictions that each disruption budget allows.
    budgets: &'a [u32],
    /// Requests by resource, largest first, with their indices in the pod's list.
    device_requests: Vec<(usize, &'a DeviceRequest)>,
}

impl<'a> PreemptionSearch<'a> {
    /// The pods in `kept` are not preempted.
    fn new(
        searched: &'a SearchedNode<'a>,
        pending: PendingPod<'a>,
        (holders, kept): (&'a Holders<'a>, &BTreeSet<String>),
    ) -> Self {
        let SearchedNode { target, node, nominated, unbound } = searched;
        let mut device_requests: Vec<(usize, &DeviceRequest)> = pending.device_requests.iter().enumerate().collect();
        device_requests.sort_by_key(|&(index, request)| (&request.resource, Reverse(request.units), index));
        let mut slots: Vec<LimitedResource<'a>> = Vec::new();
        let mut at: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        for resource in requested_units(pending.device_requests).into_keys() {
            for (device, device_units) in node.units_by_device.get(resource).into_iter().flatten() {
                let key = (resource.to_owned(), device.clone());
                let kept = nominated.and_then(|kept| kept.get(&key)).copied().unwrap_or(0);
                let ended = holders.unlisted.get(target.name).and_then(|units| units.get(&key)).copied().unwrap_or(0);
                let ending = if ended == 0 { 0 } else { ended.min(node.unlisted_units(resource, device)) };
                let most = free_units(device_units) - i128::from(kept) + i128::from(ending);
                at.insert((resource, device), slots.len());
                slots.push(LimitedResource { resource, device, most });
            }
        }
        let device_slots = slots.len();
        let missing = target.missing.iter().map(|(&resource, &amount)| LimitedResource {
            resource,
            device: "",
            most: -i128::try_from(amount).unwrap_or(i128::MAX),
        });
        slots.extend(missing);
        let mut candidates = Vec::new();
        let known =
            |pods: &'a BTreeMap<String, BTreeMap<String, Holder<'a>>>, pod: &str| pods.get(target.name)?.get(pod);
        let allocated = node.allocations.iter().filter_map(|(pod, parts)| {
            let parts: Vec<(&str, &str, u32)> =
                parts.iter().map(|part| (&*part.resource, &*part.device, part.units.get())).collect();
            Some((&**pod, known(&holders.pods, pod)?, parts))
        });
        let reserved = unbound.iter().filter_map(|&(pod, takes)| {
            let parts =
                takes.iter().map(|take| (take.resource.as_str(), take.device.as_str(), take.units.get())).collect();
            Some((pod, known(&holders.unbound, pod)?, parts))
        });
        for (pod, holder, parts) in allocated.chain(reserved) {
            // The pending pod is not bound, so allocations under its name are those of an earlier
            // pod.
            let is_victim = holder.priority < pending.priority && *pod != *pending.pod && !kept.contains(pod);
            if !holder.ending && !is_victim {
                continue;
            }
            let mut frees: BTreeMap<usize, i128> = BTreeMap::new();
            for (resource, device, units) in parts {
                if let Some(&slot) = at.get(&(resource, device)) {
                    *frees.entry(slot).or_default() += i128::from(units);
                }
            }
            for (slot, of) in slots.iter().enumerate().skip(device_slots) {
                frees.extend(freed_amount(holder, of.resource).map(|amount| (slot, amount)));
            }
            for (&slot, amount) in &frees {
                if let Some(slot) = slots.get_mut(slot) {
                    slot.most = slot.most.saturating_add(*amount);
                }
            }
            if !holder.ending && !frees.is_empty() {
                candidates.push(PossibleVictim { pod, holder: *holder, frees: frees.into_iter().collect() });
            }
        }
        candidates.sort_by_key(|one| (Reverse(one.holder.priority), one.holder.started));
        Self { node: target.name, slots, device_slots, candidates, budgets: &holders.budgets, device_requests }
    }

    /// Returns all legal ways to place the requests, with their costs. If the least important
    /// victims must not be evicted, tries each single victim that frees enough units alone.
    fn placements(&self, is_legal: Option<IsLegal<'_>>) -> impl Iterator<Item = (PreemptionCost, Preemption)> {
        self.assignments().into_iter().filter_map(move |slots| {
            let victims = self.victims(&slots)?;
            let found = self.preemption(&slots, &victims);
            match is_legal {
                Some(is_legal) if !is_legal(&found) => {
                    let alone = self.victims_alone(&slots);
                    let mut ways = alone.map(|victim| (vec![victim], self.preemption(&slots, &[victim])));
                    let (victims, found) = ways.find(|(_, found)| is_legal(found))?;
                    Some((victims_cost(&victims), found))
                }
                _ => Some((victims_cost(&victims), found)),
            }
        })
    }

    /// Returns the candidates that free enough units without other victims and whose disruption
    /// budget allows the eviction, the least important first.
    fn victims_alone(&self, slots: &[usize]) -> impl Iterator<Item = &PossibleVictim<'a>> {
        let mut spare = self.spare(slots);
        self.candidates.iter().for_each(|candidate| candidate.deduct_from_spare(&mut spare));
        let helps = move |candidate: &&PossibleVictim<'a>| {
            let freed = |slot: usize| {
                candidate.frees.iter().filter(|(of, _)| *of == slot).map(|(_, amount)| *amount).sum::<i128>()
            };
            spare.iter().all(|(&slot, left)| left + freed(slot) >= 0)
        };
        let allowed = |candidate: &&PossibleVictim<'a>| {
            candidate.holder.budget.is_none_or(|budget| self.budgets.get(budget).is_some_and(|allowed| *allowed > 0))
        };
        self.candidates.iter().rev().filter(helps).filter(allowed)
    }

    fn preemption(&self, slots: &[usize], victims: &[&PossibleVictim<'a>]) -> Preemption {
        let mut takes: Vec<(usize, Reservation)> = self
            .device_requests
            .iter()
            .zip(slots)
            .filter_map(|(&(index, request), &slot)| {
                let device = self.slots.get(slot)?.device.to_owned();
                Some((index, Reservation { resource: request.resource.clone(), units: request.units, device }))
            })
            .collect();
        takes.sort_by_key(|&(index, _)| index);
        let takes = takes.into_iter().map(|(_, take)| take).collect();
        let mut names: Vec<String> = victims.iter().map(|victim| victim.pod.to_owned()).collect();
        names.sort_unstable();
        Preemption { node: self.node.to_owned(), takes, victims: names }
    }

    /// Returns all ways to place the requests on slots if all candidates were preempted, up to a
    /// limit. A way is a slot for each request, in the order of `device_requests`. Ways that differ
    /// only in the order of equal requests count as one.
    fn assignments(&self) -> BTreeSet<Vec<usize>> {
        let mut found = BTreeSet::new();
        // Find one way first, because the search below can reach its limit without finding any.
        let Some(one) = self.pack_requests() else { return found };
        let mut left: Vec<i128> = self.slots.iter().map(|slot| slot.most).collect();
        let mut steps = 0;
        self.collect_assignments(&mut left, &mut Vec::new(), &mut found, &mut steps);
        if found.len() >= MAX_PLACEMENTS_PER_NODE || steps >= MAX_PLACEMENT_SEARCH_STEPS {
            found.insert(one);
        }
        found
    }

    /// Completes `chosen` in every possible way: places the requests that it lacks, and adds each
    /// result to `found`.
    fn collect_assignments(
        &self,
        left: &mut [i128],
        chosen: &mut Vec<usize>,
        found: &mut BTreeSet<Vec<usize>>,
        steps: &mut usize,
    ) {
        let Some(&(_, request)) = self.device_requests.get(chosen.len()) else {
            found.insert(chosen.clone());
            return;
        };
        let equal = chosen
            .len()
            .checked_sub(1)
            .and_then(|before| self.device_requests.get(before))
            .is_some_and(|(_, before)| *before == request);
        let from = chosen.last().copied().filter(|_| equal).unwrap_or(0);
        let units = i128::from(request.units.get());
        for (slot, of) in self.slots.iter().enumerate().take(self.device_slots).skip(from) {
            if of.resource != request.resource || left.get(slot).is_none_or(|left| *left < units) {
                continue;
            }
            if found.len() >= MAX_PLACEMENTS_PER_NODE || *steps >= MAX_PLACEMENT_SEARCH_STEPS {
                return;
            }
            *steps += 1;
            left[slot] -= units;
            chosen.push(slot);
            self.collect_assignments(left, chosen, found, steps);
            chosen.pop();
            left[slot] += units;
        }
    }

    /// Returns one way to place all requests if all candidates were preempted. Returns `None` if
    /// the search finds no way.
    fn pack_requests(&self) -> Option<Vec<usize>> {
        let mut chosen = Vec::with_capacity(self.device_requests.len());
        for device_requests in self.device_requests.chunk_by(|(_, one), (_, other)| one.resource == other.resource) {
            let of = |slot: &LimitedResource<'_>| {
                device_requests.first().is_some_and(|(_, request)| request.resource == slot.resource)
            };
            // The remaining slots are missing amounts of the node, not devices.
            let devices = || self.slots.iter().take(self.device_slots);
            let first = devices().position(of)?;
            let free =
                devices().filter(|slot| of(slot)).map(|slot| u32::try_from(slot.most.max(0)).unwrap_or(u32::MAX));
            let sizes: Vec<u32> = device_requests.iter().map(|(_, request)| request.units.get()).collect();
            let devices = assign_to_devices(&sizes, &free.collect::<Vec<u32>>(), &mut tightest_devices)?;
            chosen.extend(devices.into_iter().map(|device| first + device));
        }
        Some(chosen)
    }

    /// Returns the victims of one way to place the requests. Returns `None` if disruption budgets
    /// do not allow enough evictions.
    fn victims(&self, slots: &[usize]) -> Option<Vec<&PossibleVictim<'a>>> {
        let spare = self.spare(slots);
        // Prefer to evict the least important pods of a budget. If these pods free too little,
        // evict the pods of the budget that free the most.
        self.candidates_to_evict(spare.clone(), &self.evictable_candidates(|_| 0)).or_else(|| {
            let needed = self.needed_amounts(&spare);
            self.candidates_to_evict(spare, &self.evictable_candidates(|candidate| candidate.freed_fraction(&needed)))
        })
    }

    /// Returns the spare amounts if all candidates are evicted and the requests are on these slots.
    fn spare(&self, slots: &[usize]) -> SpareAmounts {
        let missing = self.slots.iter().enumerate().skip(self.device_slots);
        let mut spare: SpareAmounts = missing.map(|(index, slot)| (index, slot.most)).collect();
        for (&slot, (_, request)) in slots.iter().zip(&self.device_requests) {
            let most = self.slots.get(slot).map_or(0, |slot| slot.most);
            *spare.entry(slot).or_insert(most) -= i128::from(request.units.get());
        }
        spare
    }

    /// Returns which candidates may be evicted together. If a disruption budget allows fewer
    /// evictions than it has candidates, the candidates that help most may be evicted. Among equal
    /// candidates, the least important may be evicted.
    fn evictable_candidates(&self, help: impl Fn(&PossibleVictim<'a>) -> i128) -> Vec<bool> {
        let mut evictable = vec![true; self.candidates.len()];
        let mut limited: Vec<(usize, &PossibleVictim<'a>, usize)> = Vec::new();
        for (index, candidate) in self.candidates.iter().enumerate().rev() {
            limited.extend(candidate.holder.budget.map(|budget| (index, candidate, budget)));
        }
        limited.sort_by_key(|(_, candidate, _)| Reverse(help(candidate)));
        let mut counts: BTreeMap<usize, u32> = BTreeMap::new();
        for (index, _, budget) in limited {
            let count = counts.entry(budget).or_default();
            *count += 1;
            evictable[index] = *count <= self.budgets.get(budget).copied().unwrap_or(0);
        }
        evictable
    }

    /// Returns the amount that candidates must free of each slot.
    fn needed_amounts(&self, spare: &SpareAmounts) -> SpareAmounts {
        let of = |slot: usize| {
            let frees = self.candidates.iter().flat_map(|candidate| &candidate.frees);
            frees.filter(|(freed, _)| *freed == slot).map(|(_, amount)| *amount).sum::<i128>()
        };
        spare.iter().map(|(&slot, spare)| (slot, of(slot) - spare)).filter(|(_, needed)| *needed > 0).collect()
    }

    /// Returns the candidates to evict. Keeps the candidates that are not evictable, and then each
    /// candidate, in order, if the pending pod still fits. Returns `None` if the pod does not fit.
    fn candidates_to_evict(&self, mut spare: SpareAmounts, evictable: &[bool]) -> Option<Vec<&PossibleVictim<'a>>> {
        let candidates = || self.candidates.iter().zip(evictable);
        for (candidate, _) in candidates().filter(|(_, evictable)| !**evictable) {
            candidate.deduct_from_spare(&mut spare);
        }
        if spare.values().any(|spare| *spare < 0) {
            return None;
        }
        let leaves = |candidate: &&PossibleVictim<'a>| {
            let fits = candidate.frees.iter().all(|(slot, amount)| spare.get(slot).is_none_or(|spare| spare >= amount));
            if fits {
                candidate.deduct_from_spare(&mut spare);
            }
            !fits
        };
        Some(candidates().filter(|(_, evictable)| **evictable).map(|(candidate, _)| candidate).filter(leaves).collect())
    }
}

/// Spare amounts by slot. Contains only slots that the pending pod needs.
type SpareAmounts = BTreeMap<usize, i128>;

impl PossibleVictim<'_> {
    /// Subtracts the pod's amounts from the spare amounts, because the pod is kept.
    fn deduct_from_spare(&self, spare: &mut SpareAmounts) {
        for (slot, amount) in &self.frees {
            if let Some(spare) = spare.get_mut(slot) {
                *spare -= amount;
            }
        }
    }

    /// Returns the sum, over all needed amounts, of the fraction that the pod frees, in millionths.
    fn freed_fraction(&self, needed: &SpareAmounts) -> i128 {
        let part = |(slot, amount): &(usize, i128)| {
            needed.get(slot).map(|needed| amount.min(needed).saturating_mul(1_000_000) / needed)
        };
        self.frees.iter().filter_map(part).sum()
    }
}

/// Returns the amount of a node's resource that a pod frees, in thousandths. Returns `None` if the
/// pod frees nothing of the resource.
fn freed_amount(holder: &Holder<'_>, resource: &str) -> Option<i128> {
    let requests = holder.requests?;
    let amount = if resource == PODS_RESOURCE { Some(1000) } else { requests.get(resource).and_then(Quantity::milli) };
    amount.filter(|amount| *amount > 0).map(i128::from)
}

/// Returns the free units. The result is negative if more units are reserved than exist.
fn free_units(device_units: &DeviceUnits) -> i128 {
    i128::from(device_units.capacity()) - i128::from(device_units.used()) - i128::from(device_units.reserved())
}

fn victims_cost(victims: &[&PossibleVictim<'_>]) -> PreemptionCost {
    let highest = victims.iter().map(|victim| victim.holder.priority).max();
    // Each victim counts at least 1, so that fewer victims have a lower sum even at the lowest
    // priority.
    let above_least = |victim: &&PossibleVictim<'_>| i128::from(victim.holder.priority) - i128::from(i32::MIN) + 1;
    let of_highest = victims.iter().filter(|victim| Some(victim.holder.priority) == highest);
    (
        highest,
        victims.iter().map(above_least).sum(),
        victims.len(),
        Reverse(of_highest.map(|victim| victim.holder.started).min()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn rank(quota: usize, is_within: bool, priority: i32, created: u64) -> Rank {
        Rank { quota, is_within, priority, overriding: None, created: Some(Moment(created)) }
    }

    #[test]
    fn a_priority_that_overrides_quotas_decides_alone() {
        let urgent = |priority| Rank { overriding: Some(priority), ..rank(1, false, priority, 9) };
        let guaranteed = rank(2, true, 5, 1);
        assert!(guaranteed.respects(&urgent(9)) && !urgent(9).respects(&guaranteed));
        assert!(urgent(9).respects(&urgent(9)) && !urgent(10).respects(&urgent(9)) && urgent(9).respects(&urgent(10)));
        assert!(urgent(9).comes_before("b", (&guaranteed, "a")));
    }

    #[test]
    fn of_nominated_pods_class_then_priority_in_a_quota_then_age_comes_first() {
        let first = |one: Rank, other: Rank| one.comes_before("b", (&other, "a"));
        assert!(first(rank(1, true, 0, 9), rank(2, false, 5, 1)), "the class");
        assert!(first(rank(1, true, 6, 9), rank(1, true, 5, 1)), "the priority in a quota");
        assert!(!first(rank(1, true, 6, 9), rank(2, true, 5, 1)), "priorities of different quotas do not matter");
        assert!(first(rank(1, true, 0, 1), rank(2, true, 0, 2)), "the age");
        assert!(!first(rank(1, true, 0, 1), rank(2, true, 0, 1)), "the name");
        assert!(first(Rank::of_priority(0), Rank::of_priority(0)), "without quotas each waits for the other");
    }
}
