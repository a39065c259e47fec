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
use super::pack::{pack, tightest};
use super::stock::Stock;
use super::{Ask, Ledger, Moment, Node, Refused, Reservation, Units};

/// Ways to put the asks on a node's devices that are compared. A pod of one container has as many
/// as the node has devices.
const WAYS: usize = 512;
/// Steps of the search for them.
const STEPS: usize = 20_000;

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

impl Ledger {
    /// Who has to leave so that the pod fits on one of the nodes that it may go to; none where
    /// nobody's leaving would help.
    ///
    /// Only pods of strictly lower priority leave, of which `holders` tells and of which the node
    /// lists what they hold. Room that is reserved, and room that is nominated for others of the
    /// same or higher priority, stays theirs; a node that is short of what is asked for has none to
    /// give. What pods on their way out hold counts as free, so that nobody leaves for what comes
    /// anyway, and asking again after the victims were told to go names nobody more.
    ///
    /// Of one way to put the asks on devices, all that can stay do: protected pods first, then
    /// those of higher priority, then those that run longer. Of all ways, the one is taken that has
    /// fewest protected victims, then the lowest highest priority, the smallest sum of priorities,
    /// the fewest victims, the latest start among the highest; then the first by names.
    ///
    /// Pods that must not make others leave (`preemptionPolicy: Never`) are not to be asked about.
    /// Of pods on a device that is to give nothing now, such as one that is not healthy, nothing is
    /// to be told in `holders`: their leaving frees nothing.
    pub fn preempt<'a>(
        &self,
        waiting: Waiting<'_>,
        nodes: impl IntoIterator<Item = &'a str>,
        holders: &BTreeMap<String, Holder>,
    ) -> Option<Preemption> {
        let nodes: BTreeSet<&str> = nodes.into_iter().collect();
        let nominated = self.nominated(Some(waiting.pod), waiting.priority);
        let mut best: Option<(Cost, Preemption)> = None;
        for name in nodes {
            let Some(node) = self.nodes.get(name) else { continue };
            let asked = |short: &Ask| waiting.asks.iter().any(|ask| ask.resource == short.resource);
            if node.short.iter().any(asked) {
                continue;
            }
            for (cost, takes, victims) in View::new(node, waiting, nominated.get(name), holders).ways() {
                if best.as_ref().is_none_or(|(least, _)| cost < *least) {
                    best = Some((cost, Preemption { node: name.to_owned(), takes, victims }));
                }
            }
        }
        best.map(|(_, preemption)| preemption)
    }

    /// Keeps room for a pod: what is free there, and what will be. Takes the place of an earlier
    /// nomination.
    ///
    /// Nothing is reserved: the nodes' agents know nothing of it, and no pod is let through for it.
    /// Pods that were let through already go first.
    ///
    /// # Errors
    /// The pod has a claim: it was let through, and needs no other room.
    pub fn nominate(&mut self, pod: &str, nomination: Nomination) -> Result<(), Refused> {
        if self.claims.contains_key(pod) {
            return Err(Refused::Claimed);
        }
        self.nominations.insert(pod.to_owned(), nomination);
        Ok(())
    }

    /// Nothing is kept for the pod any more. That is so too once it has a claim, or is released.
    pub fn withdraw(&mut self, pod: &str) -> Option<Nomination> {
        self.nominations.remove(pod)
    }

    /// All nominations, by pod.
    pub fn nominations(&self) -> &BTreeMap<String, Nomination> {
        &self.nominations
    }

    /// Units that are nominated for pods of this priority or a higher one, but not for this pod, by
    /// node.
    pub(super) fn nominated(&self, pod: Option<&str>, priority: i32) -> BTreeMap<String, Nominated> {
        let mut units: BTreeMap<String, Nominated> = BTreeMap::new();
        for (of, nomination) in &self.nominations {
            if nomination.priority >= priority && Some(of.as_str()) != pod {
                let node = units.entry(nomination.node.clone()).or_default();
                for take in &nomination.takes {
                    let sum = node.entry((take.resource.clone(), take.device.clone())).or_default();
                    *sum = sum.saturating_add(take.units.get());
                }
            }
        }
        units
    }
}

/// Units by resource and device.
pub(super) type Nominated = BTreeMap<(String, String), u32>;

impl Node {
    /// The node as those see it for whom these units are not free.
    pub(super) fn without(&self, nominated: &Nominated) -> Self {
        let mut node = self.clone();
        for ((resource, device), &units) in nominated {
            let stock = node.stocks.get_mut(resource).and_then(|stocks| stocks.get_mut(device));
            if let Some(stock) = stock
                && let Some(units) = Units::new(units.min(stock.free()))
            {
                // It is no more than is free.
                let _ = stock.hold(units);
            }
        }
        node
    }
}

/// A device, as to one resource that is asked for.
struct Spot<'a> {
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
    /// What it holds, by spot.
    units: Vec<(usize, i64)>,
}

/// A node as one waiting pod sees it.
struct View<'a> {
    spots: Vec<Spot<'a>>,
    /// In the order in which they may stay.
    candidates: Vec<Candidate<'a>>,
    /// Asks by resource and the largest first, with their place in the pod's list.
    asks: Vec<(usize, &'a Ask)>,
}

impl<'a> View<'a> {
    fn new(
        node: &'a Node,
        waiting: Waiting<'a>,
        nominated: Option<&Nominated>,
        holders: &BTreeMap<String, Holder>,
    ) -> Self {
        let mut asks: Vec<(usize, &Ask)> = waiting.asks.iter().enumerate().collect();
        asks.sort_by_key(|&(index, ask)| (&ask.resource, Reverse(ask.units), index));
        let mut spots: Vec<Spot<'a>> = Vec::new();
        let mut at: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        for resource in wanted(waiting.asks).into_keys() {
            for (device, stock) in node.stocks.get(resource).into_iter().flatten() {
                let kept = nominated.and_then(|kept| kept.get(&(resource.to_owned(), device.clone())));
                let kept = kept.copied().unwrap_or(0);
                let most = room(stock) - i64::from(kept);
                at.insert((resource, device), spots.len());
                spots.push(Spot { resource, device, most });
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
                if let Some(&spot) = at.get(&(part.resource.as_str(), part.device.as_str())) {
                    *units.entry(spot).or_default() += i64::from(part.units.get());
                }
            }
            for (&spot, units) in &units {
                if let Some(spot) = spots.get_mut(spot) {
                    spot.most += units;
                }
            }
            if !holder.ending && !units.is_empty() {
                candidates.push(Candidate { pod, holder: *holder, units: units.into_iter().collect() });
            }
        }
        candidates.sort_by_key(|one| (Reverse(one.holder.protected), Reverse(one.holder.priority), one.holder.started));
        Self { spots, candidates, asks }
    }

    /// What each way costs: what is taken where, and who leaves.
    fn ways(&self) -> impl Iterator<Item = (Cost, Vec<Reservation>, Vec<String>)> {
        self.assignments().into_iter().map(|spots| {
            let victims = self.victims(&spots);
            let mut takes: Vec<(usize, Reservation)> = self
                .asks
                .iter()
                .zip(&spots)
                .filter_map(|(&(index, ask), &spot)| {
                    let device = self.spots.get(spot)?.device.to_owned();
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

    /// A spot for each ask, in the order of `asks`, so that all would fit if all left who may be
    /// made to. All such ways, up to a bound, without those that differ in which of equal asks goes
    /// where.
    fn assignments(&self) -> BTreeSet<Vec<usize>> {
        let mut found = BTreeSet::new();
        // Where there are too many ways to look at, this one is among them.
        let Some(one) = self.packed() else { return found };
        let mut left: Vec<i64> = self.spots.iter().map(|spot| spot.most).collect();
        let mut steps = 0;
        self.assign(&mut left, &mut Vec::new(), &mut found, &mut steps);
        if found.len() >= WAYS || steps >= STEPS {
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
        for (spot, of) in self.spots.iter().enumerate().skip(from) {
            if of.resource != ask.resource || left.get(spot).is_none_or(|left| *left < units) {
                continue;
            }
            if found.len() >= WAYS || *steps >= STEPS {
                return;
            }
            *steps += 1;
            left[spot] -= units;
            chosen.push(spot);
            self.assign(left, chosen, found, steps);
            chosen.pop();
            left[spot] += units;
        }
    }

    /// One way in which all fit if all left who may be made to.
    fn packed(&self) -> Option<Vec<usize>> {
        let mut chosen = Vec::with_capacity(self.asks.len());
        for asks in self.asks.chunk_by(|(_, one), (_, other)| one.resource == other.resource) {
            let of = |spot: &Spot<'_>| asks.first().is_some_and(|(_, ask)| ask.resource == spot.resource);
            let first = self.spots.iter().position(of)?;
            let free = self
                .spots
                .iter()
                .filter(|spot| of(spot))
                .map(|spot| u32::try_from(spot.most.max(0)).unwrap_or(u32::MAX));
            let sizes: Vec<u32> = asks.iter().map(|(_, ask)| ask.units.get()).collect();
            let devices = pack(&sizes, &free.collect::<Vec<u32>>(), &mut tightest)?;
            chosen.extend(devices.into_iter().map(|device| first + device));
        }
        Some(chosen)
    }

    /// Who has to leave for this way: all that can stay do, in order.
    fn victims(&self, spots: &[usize]) -> Vec<&Candidate<'a>> {
        let mut spare: BTreeMap<usize, i64> = BTreeMap::new();
        for (&spot, (_, ask)) in spots.iter().zip(&self.asks) {
            let most = self.spots.get(spot).map_or(0, |spot| spot.most);
            *spare.entry(spot).or_insert(most) -= i64::from(ask.units.get());
        }
        let leaves = |candidate: &&Candidate<'a>| {
            let fits = candidate.units.iter().all(|(spot, units)| spare.get(spot).is_none_or(|spare| spare >= units));
            for (spot, units) in candidate.units.iter().filter(|_| fits) {
                if let Some(spare) = spare.get_mut(spot) {
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
