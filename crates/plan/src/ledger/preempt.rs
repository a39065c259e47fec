//! Decides which pods to preempt so that a pod of higher priority fits.
//!
//! Victims are chosen as in kube-scheduler, with one difference. kube-scheduler adds up a node's
//! GPUs, so the units that it frees may be on two GPUs and therefore useless. Here, each way to
//! place the requests on devices is considered separately. A pod is preempted only if it frees
//! units on a chosen device.
//!
//! The units are then [nominated](super::Ledger::nominate). Until they are reserved for the pod,
//! pods of the same or lower priority do not see them as free.
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::choose::requested_units;
use super::device_units::DeviceUnits;
use super::facts::{Moment, Reservation};
use super::node::{Node, Nominated};
use super::pack::{pack, tightest};
use super::request::DeviceRequest;

/// Maximum number of ways to place the requests on a node's devices. A pod of one container has one
/// way for each device.
const MAX_OPTIONS: usize = 512;
/// Maximum number of steps of the search for ways to place the requests.
const MAX_STEPS: usize = 20_000;

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

/// Properties of a pod with allocations that decide whether it is preempted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holder {
    /// Priority of the pod.
    pub priority: i32,
    /// When the pod started. The operator passes the time at which the pod was created.
    pub started: Moment,
    /// Whether a disruption budget protects the pod. The operator sets this if the API server
    /// refused the pod's eviction in the last 30 s. Other victims are preferred.
    pub protected: bool,
    /// Whether the pod is terminating. Its units become free without preemption.
    pub ending: bool,
}

/// Units for a pod, and the pods to preempt for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Preemption {
    /// Name of the node.
    pub node: String,
    /// The units of each device that the pod would use, one entry for each request.
    pub takes: Vec<Reservation>,
    /// Names of the pods to preempt. Empty if free units and the units of terminating pods suffice.
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

/// Cost of a preemption, lower is better. In order of weight: the number of protected victims, the
/// highest priority of the victims, the sum of their priorities, and their number. Last is the
/// earliest start among the victims of the highest priority, for which later is better.
type Cost = (usize, Option<i32>, i128, usize, Reverse<Option<Moment>>);

/// The cheapest preemption on these nodes, each with its nominated units. `None` if no preemption
/// helps. Among equal preemptions, the preemption on the first node.
pub(super) fn cheapest<'a>(
    waiting: PendingPod<'_>,
    nodes: impl Iterator<Item = (&'a str, &'a Node, Option<&'a Nominated>)>,
    holders: &BTreeMap<String, Holder>,
) -> Option<Preemption> {
    let mut best: Option<(Cost, Preemption)> = None;
    for (name, node, nominated) in nodes {
        let requested =
            |short: &DeviceRequest| waiting.device_requests.iter().any(|request| request.resource == short.resource);
        if node.short.iter().any(requested) {
            continue;
        }
        for (cost, takes, victims) in NodeView::new(node, waiting, nominated, holders).placements() {
            if best.as_ref().is_none_or(|(least, _)| cost < *least) {
                best = Some((cost, Preemption { node: name.to_owned(), takes, victims }));
            }
        }
    }
    best.map(|(_, preemption)| preemption)
}

/// One requested resource of a device.
struct Slot<'a> {
    resource: &'a str,
    device: &'a str,
    /// Units that are free if all candidates are preempted. Negative if more units are reserved
    /// than exist.
    most: i64,
}

/// A pod that may be preempted.
struct Candidate<'a> {
    pod: &'a str,
    holder: Holder,
    /// Units of the pod by slot.
    units: Vec<(usize, i64)>,
}

/// A node from the point of view of one pending pod.
struct NodeView<'a> {
    slots: Vec<Slot<'a>>,
    /// Candidates in the order in which they are kept.
    candidates: Vec<Candidate<'a>>,
    /// Asks by resource, largest first, with their indices in the pod's list.
    device_requests: Vec<(usize, &'a DeviceRequest)>,
}

impl<'a> NodeView<'a> {
    fn new(
        node: &'a Node,
        waiting: PendingPod<'a>,
        nominated: Option<&Nominated>,
        holders: &BTreeMap<String, Holder>,
    ) -> Self {
        let mut device_requests: Vec<(usize, &DeviceRequest)> = waiting.device_requests.iter().enumerate().collect();
        device_requests.sort_by_key(|&(index, request)| (&request.resource, Reverse(request.units), index));
        let mut slots: Vec<Slot<'a>> = Vec::new();
        let mut at: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        for resource in requested_units(waiting.device_requests).into_keys() {
            for (device, stock) in node.stocks.get(resource).into_iter().flatten() {
                let kept = nominated.and_then(|kept| kept.get(&(resource.to_owned(), device.clone())));
                let kept = kept.copied().unwrap_or(0);
                let most = free_units(stock) - i64::from(kept);
                at.insert((resource, device), slots.len());
                slots.push(Slot { resource, device, most });
            }
        }
        let mut candidates = Vec::new();
        for (pod, allocations) in &node.allocations {
            let Some(holder) = holders.get(pod).filter(|_| pod != waiting.pod) else { continue };
            if !holder.ending && holder.priority >= waiting.priority {
                continue;
            }
            let mut units: BTreeMap<usize, i64> = BTreeMap::new();
            for part in allocations {
                if let Some(&slot) = at.get(&(part.resource.as_str(), part.device.as_str())) {
                    *units.entry(slot).or_default() += i64::from(part.units.get());
                }
            }
            for (&slot, units) in &units {
                if let Some(slot) = slots.get_mut(slot) {
                    slot.most += units;
                }
            }
            if !holder.ending && !units.is_empty() {
                candidates.push(Candidate { pod, holder: *holder, units: units.into_iter().collect() });
            }
        }
        candidates.sort_by_key(|one| (Reverse(one.holder.protected), Reverse(one.holder.priority), one.holder.started));
        Self { slots, candidates, device_requests }
    }

    /// All ways to place the requests: their costs, the units used, and the victims.
    fn placements(&self) -> impl Iterator<Item = (Cost, Vec<Reservation>, Vec<String>)> {
        self.assignments().into_iter().map(|slots| {
            let victims = self.victims(&slots);
            let mut takes: Vec<(usize, Reservation)> = self
                .device_requests
                .iter()
                .zip(&slots)
                .filter_map(|(&(index, request), &slot)| {
                    let device = self.slots.get(slot)?.device.to_owned();
                    Some((index, Reservation { resource: request.resource.clone(), units: request.units, device }))
                })
                .collect();
            takes.sort_by_key(|&(index, _)| index);
            let takes = takes.into_iter().map(|(_, take)| take).collect();
            let mut names: Vec<String> = victims.iter().map(|victim| victim.pod.to_owned()).collect();
            names.sort_unstable();
            (cost(&victims), takes, names)
        })
    }

    /// All ways to place the requests on slots if all candidates were preempted, up to a limit. A
    /// way is a slot for each request, in the order of `device_requests`. Ways that differ only in
    /// the order of equal requests count as one.
    fn assignments(&self) -> BTreeSet<Vec<usize>> {
        let mut found = BTreeSet::new();
        // Find one way first, because the search below can reach its limit without finding any.
        let Some(one) = self.packed() else { return found };
        let mut left: Vec<i64> = self.slots.iter().map(|slot| slot.most).collect();
        let mut steps = 0;
        self.collect_assignments(&mut left, &mut Vec::new(), &mut found, &mut steps);
        if found.len() >= MAX_OPTIONS || steps >= MAX_STEPS {
            found.insert(one);
        }
        found
    }

    /// Adds to `found` each way to place the requests that are not in `chosen` yet.
    fn collect_assignments(
        &self,
        left: &mut [i64],
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
        let units = i64::from(request.units.get());
        for (slot, of) in self.slots.iter().enumerate().skip(from) {
            if of.resource != request.resource || left.get(slot).is_none_or(|left| *left < units) {
                continue;
            }
            if found.len() >= MAX_OPTIONS || *steps >= MAX_STEPS {
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

    /// One way to place all requests if all candidates were preempted.
    fn packed(&self) -> Option<Vec<usize>> {
        let mut chosen = Vec::with_capacity(self.device_requests.len());
        for device_requests in self.device_requests.chunk_by(|(_, one), (_, other)| one.resource == other.resource) {
            let of =
                |slot: &Slot<'_>| device_requests.first().is_some_and(|(_, request)| request.resource == slot.resource);
            let first = self.slots.iter().position(of)?;
            let free = self
                .slots
                .iter()
                .filter(|slot| of(slot))
                .map(|slot| u32::try_from(slot.most.max(0)).unwrap_or(u32::MAX));
            let sizes: Vec<u32> = device_requests.iter().map(|(_, request)| request.units.get()).collect();
            let devices = pack(&sizes, &free.collect::<Vec<u32>>(), &mut tightest)?;
            chosen.extend(devices.into_iter().map(|device| first + device));
        }
        Some(chosen)
    }

    /// The victims of one way. Each candidate, in order, is kept if it still fits.
    fn victims(&self, slots: &[usize]) -> Vec<&Candidate<'a>> {
        let mut spare: BTreeMap<usize, i64> = BTreeMap::new();
        for (&slot, (_, request)) in slots.iter().zip(&self.device_requests) {
            let most = self.slots.get(slot).map_or(0, |slot| slot.most);
            *spare.entry(slot).or_insert(most) -= i64::from(request.units.get());
        }
        let leaves = |candidate: &&Candidate<'a>| {
            let fits = candidate.units.iter().all(|(slot, units)| spare.get(slot).is_none_or(|spare| spare >= units));
            for (slot, units) in candidate.units.iter().filter(|_| fits) {
                if let Some(spare) = spare.get_mut(slot) {
                    *spare -= units;
                }
            }
            !fits
        };
        self.candidates.iter().filter(leaves).collect()
    }
}

/// Free units. Negative if more units are reserved than exist.
fn free_units(stock: &DeviceUnits) -> i64 {
    i64::from(stock.capacity()) - i64::from(stock.used()) - i64::from(stock.reserved())
}

fn cost(victims: &[&Candidate<'_>]) -> Cost {
    let highest = victims.iter().map(|victim| victim.holder.priority).max();
    // Each victim counts at least 1, so that fewer victims have a lower sum even at the lowest
    // priority.
    let above_least = |victim: &&Candidate<'_>| i128::from(victim.holder.priority) - i128::from(i32::MIN) + 1;
    let of_highest = victims.iter().filter(|victim| Some(victim.holder.priority) == highest);
    (
        victims.iter().filter(|victim| victim.holder.protected).count(),
        highest,
        victims.iter().map(above_least).sum(),
        victims.len(),
        Reverse(of_highest.map(|victim| victim.holder.started).min()),
    )
}
