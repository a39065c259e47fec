//! Who has to leave so that a pod of higher priority fits, and what is kept for it while they do.
//!
//! Which pods leave is decided as kube-scheduler decides it, with one difference: it adds a node's
//! GPUs up, so what it frees may lie on two of them and help nobody. Here each way to put the asks
//! on devices is looked at by itself, and a pod leaves only for room on a device where an ask goes.
//!
//! The room is then [nominated](Ledger::nominate): until the pod has it, pods of the same or lower
//! priority do not see it as free.
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::choose::wanted;
use super::facts::{Moment, Reservation};
use super::node::{Node, Nominated};
use super::pack::{pack, tightest};
use super::request::Ask;
use super::stock::Stock;

/// Ways to put the asks on a node's devices that are compared. A pod of one container has as many
/// as the node has devices.
const MAX_OPTIONS: usize = 512;
/// Steps of the search for them.
const MAX_STEPS: usize = 20_000;

/// A pod that waits.
#[derive(Debug, Clone, Copy)]
pub struct Waiting<'a> {
    /// Its name, as in a [`Nomination`].
    pub pod: &'a str,
    /// Its priority: it goes before lower ones.
    pub priority: i32,
    /// What it asks for.
    pub asks: &'a [Ask],
}

/// What has to be known of a pod that holds units, besides the units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holder {
    /// Its priority.
    pub priority: i32,
    /// Since when it runs.
    pub started: Moment,
    /// A disruption budget has none left for it: it leaves only where nothing else helps.
    pub protected: bool,
    /// It is on its way out: what it holds will be free without any doing.
    pub ending: bool,
}

/// Room that a pod gets, and who has to leave for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Preemption {
    /// The node.
    pub node: String,
    /// What is taken of which device: as many as there are asks.
    pub takes: Vec<Reservation>,
    /// Pods that have to leave, by name. None where what is free, or held by pods that are on their
    /// way out, is enough.
    pub victims: Vec<String>,
}

/// Room that is kept for a pod while those that hold it leave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nomination {
    /// The pod's priority: pods of higher priority may have the room all the same.
    pub priority: i32,
    /// The node.
    pub node: String,
    /// Units by device.
    pub takes: Vec<Reservation>,
}

/// How good a preemption is, the least the best: protected victims; the highest priority among
/// victims; the sum of their priorities; how many they are; of the highest, when the one began that
/// has run longest, the later the better.
type Cost = (usize, Option<i32>, i128, usize, Reverse<Option<Moment>>);

/// The cheapest preemption on one of these nodes, given with what is nominated on them; none where
/// no preemption helps. Of equal ones, the first node's.
pub(super) fn cheapest<'a>(
    waiting: Waiting<'_>,
    nodes: impl Iterator<Item = (&'a str, &'a Node, Option<&'a Nominated>)>,
    holders: &BTreeMap<String, Holder>,
) -> Option<Preemption> {
    let mut best: Option<(Cost, Preemption)> = None;
    for (name, node, nominated) in nodes {
        let asked = |short: &Ask| waiting.asks.iter().any(|ask| ask.resource == short.resource);
        if node.short.iter().any(asked) {
            continue;
        }
        for (cost, takes, victims) in NodeView::new(node, waiting, nominated, holders).options() {
            if best.as_ref().is_none_or(|(least, _)| cost < *least) {
                best = Some((cost, Preemption { node: name.to_owned(), takes, victims }));
            }
        }
    }
    best.map(|(_, preemption)| preemption)
}

/// A device, as to one resource that is asked for.
struct Slot<'a> {
    resource: &'a str,
    device: &'a str,
    /// Units that are free once all have left who may be made to; below zero where even then more
    /// is kept than there is.
    most: i64,
}

/// A pod that may be made to leave.
struct Candidate<'a> {
    pod: &'a str,
    holder: Holder,
    /// What it holds, by slot.
    units: Vec<(usize, i64)>,
}

/// A node as one waiting pod sees it.
struct NodeView<'a> {
    slots: Vec<Slot<'a>>,
    /// In the order in which they may stay.
    candidates: Vec<Candidate<'a>>,
    /// Asks by resource and the largest first, with their place in the pod's list.
    asks: Vec<(usize, &'a Ask)>,
}

impl<'a> NodeView<'a> {
    fn new(
        node: &'a Node,
        waiting: Waiting<'a>,
        nominated: Option<&Nominated>,
        holders: &BTreeMap<String, Holder>,
    ) -> Self {
        let mut asks: Vec<(usize, &Ask)> = waiting.asks.iter().enumerate().collect();
        asks.sort_by_key(|&(index, ask)| (&ask.resource, Reverse(ask.units), index));
        let mut slots: Vec<Slot<'a>> = Vec::new();
        let mut at: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        for resource in wanted(waiting.asks).into_keys() {
            for (device, stock) in node.stocks.get(resource).into_iter().flatten() {
                let kept = nominated.and_then(|kept| kept.get(&(resource.to_owned(), device.clone())));
                let kept = kept.copied().unwrap_or(0);
                let most = room(stock) - i64::from(kept);
                at.insert((resource, device), slots.len());
                slots.push(Slot { resource, device, most });
            }
        }
        let mut candidates = Vec::new();
        for (pod, held) in &node.held {
            let Some(holder) = holders.get(pod).filter(|_| pod != waiting.pod) else { continue };
            if !holder.ending && holder.priority >= waiting.priority {
                continue;
            }
            let mut units: BTreeMap<usize, i64> = BTreeMap::new();
            for part in held {
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
        Self { slots, candidates, asks }
    }

    /// What each way costs: what is taken where, and who leaves.
    fn options(&self) -> impl Iterator<Item = (Cost, Vec<Reservation>, Vec<String>)> {
        self.assignments().into_iter().map(|slots| {
            let victims = self.victims(&slots);
            let mut takes: Vec<(usize, Reservation)> = self
                .asks
                .iter()
                .zip(&slots)
                .filter_map(|(&(index, ask), &slot)| {
                    let device = self.slots.get(slot)?.device.to_owned();
                    Some((index, Reservation { resource: ask.resource.clone(), units: ask.units, device }))
                })
                .collect();
            takes.sort_by_key(|&(index, _)| index);
            let takes = takes.into_iter().map(|(_, take)| take).collect();
            let mut names: Vec<String> = victims.iter().map(|victim| victim.pod.to_owned()).collect();
            names.sort_unstable();
            (cost(&victims), takes, names)
        })
    }

    /// A slot for each ask, in the order of `asks`, so that all would fit if all left who may be
    /// made to. All such ways, up to a bound, without those that differ in which of equal asks goes
    /// where.
    fn assignments(&self) -> BTreeSet<Vec<usize>> {
        let mut found = BTreeSet::new();
        // Where there are too many ways to look at, this one is among them.
        let Some(one) = self.packed() else { return found };
        let mut left: Vec<i64> = self.slots.iter().map(|slot| slot.most).collect();
        let mut steps = 0;
        self.assign(&mut left, &mut Vec::new(), &mut found, &mut steps);
        if found.len() >= MAX_OPTIONS || steps >= MAX_STEPS {
            found.insert(one);
        }
        found
    }

    fn assign(&self, left: &mut [i64], chosen: &mut Vec<usize>, found: &mut BTreeSet<Vec<usize>>, steps: &mut usize) {
        let Some(&(_, ask)) = self.asks.get(chosen.len()) else {
            found.insert(chosen.clone());
            return;
        };
        let equal = chosen
            .len()
            .checked_sub(1)
            .and_then(|before| self.asks.get(before))
            .is_some_and(|(_, before)| *before == ask);
        let from = chosen.last().copied().filter(|_| equal).unwrap_or(0);
        let units = i64::from(ask.units.get());
        for (slot, of) in self.slots.iter().enumerate().skip(from) {
            if of.resource != ask.resource || left.get(slot).is_none_or(|left| *left < units) {
                continue;
            }
            if found.len() >= MAX_OPTIONS || *steps >= MAX_STEPS {
                return;
            }
            *steps += 1;
            left[slot] -= units;
            chosen.push(slot);
            self.assign(left, chosen, found, steps);
            chosen.pop();
            left[slot] += units;
        }
    }

    /// One way in which all fit if all left who may be made to.
    fn packed(&self) -> Option<Vec<usize>> {
        let mut chosen = Vec::with_capacity(self.asks.len());
        for asks in self.asks.chunk_by(|(_, one), (_, other)| one.resource == other.resource) {
            let of = |slot: &Slot<'_>| asks.first().is_some_and(|(_, ask)| ask.resource == slot.resource);
            let first = self.slots.iter().position(of)?;
            let free = self
                .slots
                .iter()
                .filter(|slot| of(slot))
                .map(|slot| u32::try_from(slot.most.max(0)).unwrap_or(u32::MAX));
            let sizes: Vec<u32> = asks.iter().map(|(_, ask)| ask.units.get()).collect();
            let devices = pack(&sizes, &free.collect::<Vec<u32>>(), &mut tightest)?;
            chosen.extend(devices.into_iter().map(|device| first + device));
        }
        Some(chosen)
    }

    /// Who has to leave for this way: all that can stay do, in order.
    fn victims(&self, slots: &[usize]) -> Vec<&Candidate<'a>> {
        let mut spare: BTreeMap<usize, i64> = BTreeMap::new();
        for (&slot, (_, ask)) in slots.iter().zip(&self.asks) {
            let most = self.slots.get(slot).map_or(0, |slot| slot.most);
            *spare.entry(slot).or_insert(most) -= i64::from(ask.units.get());
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

/// Units that are free, or how many more are kept than there are.
fn room(stock: &Stock) -> i64 {
    i64::from(stock.capacity()) - i64::from(stock.used()) - i64::from(stock.reserved())
}

fn cost(victims: &[&Candidate<'_>]) -> Cost {
    let highest = victims.iter().map(|victim| victim.holder.priority).max();
    // None counts less than nothing, so that of two sums that with fewer is not the greater for it.
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
