//! The ledger: which units of which device are kept for pods that are on their way.
//!
//! A scheduler that adds units up over a node's GPUs cannot see which are together. So a pod is let
//! through only when the ledger holds units of one device for each of its [`Ask`]s. What is held is
//! keyed by (node, resource, size), not by pod: two pods that ask for the same may swap, and
//! nothing is lost. Which pods are on their way, and what for, is a [`Claim`]; how many units lie
//! where, a reservation.
//!
//! Each node is laid out by one rule, in [`Ledger::observe`] and everywhere else: what its claims
//! still lack is wanted; what was noted for their pods stays where it was noted while it fits and
//! is wanted; what is still missing gets a device, if one has room. Notes follow what pods were
//! given: where one was given what was noted for another, they have swapped. There is no other
//! history in it. So
//! - there are never more units reserved on a device than are free (`stock.rs` has the one
//!   subtraction, and the one way to add),
//! - a ledger made anew from what was observed and the same notes equals the one that was lost,
//!   while nobody is short ([`Ledger::rebuild`]).
//!
//! Nothing here knows how a node hands units out, and there is no clock: times are arguments.
mod choose;
mod containers;
mod facts;
mod fit;
mod index;
mod layout;
mod node;
mod pack;
mod preempt;
mod request;
mod stock;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

pub use choose::{NoFit, Tightest};
use choose::{Worth, wanted};
pub use containers::{Container, Kind, Part, asks, parts};
pub use facts::{Allocation, Claim, DeviceFacts, Facts, Moment, NodeFacts, Place, Reservation};
pub use fit::{Fit, Fits, Refused};
use index::Index;
use layout::outstanding;
pub use node::DeviceUsage;
use node::{Node, Nominated};
pub use preempt::{Holder, Nomination, Preemption, Waiting};
pub use request::{Ask, Units};
use stock::Stock;

use crate::placement::Score;

/// Who is on the way where, and what is kept for them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ledger {
    nodes: BTreeMap<String, Node>,
    claims: BTreeMap<String, Claim>,
    /// Nodes by what they have free.
    index: Index,
    /// Claims by node, also by nodes that are not known.
    pods: BTreeMap<String, BTreeSet<String>>,
    /// Room that is kept for pods while others leave, by pod.
    nominations: BTreeMap<String, Nomination>,
}

impl Ledger {
    /// The ledger that facts make. What is claimed and was not noted is reserved too, if it can be.
    ///
    /// The facts have to be at least as new as what the lost ledger wrote: a pod that was let
    /// through and is not among the claims loses what was held for it.
    pub fn rebuild(facts: Facts) -> Self {
        let mut ledger = Self::default();
        for (pod, claim) in facts.claims {
            ledger.insert(pod, claim);
        }
        for (name, observed) in facts.nodes {
            ledger.observe(&name, observed);
            ledger.renew_notes(&name);
        }
        ledger
    }

    /// Takes in what was observed of a node. Pods that hold what they asked for are not kept
    /// anything any more.
    pub fn observe(&mut self, name: &str, facts: NodeFacts) {
        self.nodes.insert(name.to_owned(), Node::of(facts));
        self.update_reservations(name);
    }

    /// A node that is gone, or that nothing is known of: nothing is held there. Claims stay, for
    /// when it comes back.
    pub fn forget(&mut self, name: &str) {
        self.nodes.remove(name);
        self.index.remove(name);
    }

    /// Places for a pod on the nodes that it may go to, at most `most` and the best first.
    ///
    /// Of one node, each ask goes where the score says it costs least, unless there would then be
    /// no place for another; a place that there is is found. Nothing is taken yet. A pod that asks
    /// for nothing fits everywhere.
    ///
    /// Room that is [nominated](Self::nominate) is not free, for whomever: [`Self::fit_for`] knows
    /// whose turn it is.
    ///
    /// # Errors
    /// Why it fits nowhere.
    pub fn fit<'a, S: Score>(
        &self,
        asks: &[Ask],
        nodes: impl IntoIterator<Item = &'a str>,
        most: usize,
        score: &S,
    ) -> Result<Fits, NoFit> {
        self.find(asks, (None, i32::MIN), nodes, most, score)
    }

    /// As [`Self::fit`], for a pod to whom what is nominated for itself, or for pods of lower
    /// priority, is free.
    ///
    /// # Errors
    /// Why it fits nowhere.
    pub fn fit_for<'a, S: Score>(
        &self,
        waiting: Waiting<'_>,
        nodes: impl IntoIterator<Item = &'a str>,
        most: usize,
        score: &S,
    ) -> Result<Fits, NoFit> {
        self.find(waiting.asks, (Some(waiting.pod), waiting.priority), nodes, most, score)
    }

    /// As [`Self::fit_for`] with [`Tightest`] on all nodes that `may` lets through, without asking
    /// each node. It answers only where that is simple: of one ask, while nothing is nominated, and
    /// where there is a place. Otherwise [`Self::fit_for`] knows more.
    pub fn fit_tightest(&self, waiting: Waiting<'_>, most: usize, mut may: impl FnMut(&str) -> bool) -> Option<Fits> {
        let Waiting { asks, priority, .. } = waiting;
        let [ask] = asks else { return None };
        if !self.nominations.is_empty() {
            return None;
        }
        let wanted = wanted(asks);
        let mut places: Vec<Fit> = Vec::new();
        for name in self.index.at_least(&ask.resource, ask.units.get()) {
            if places.len() >= most {
                break;
            }
            if places.iter().any(|place| place.node == name) || !may(name) {
                continue;
            }
            let (_, takes) = self.nodes.get(name)?.fit(&wanted, &Tightest).ok()?;
            places.push(Fit { node: name.to_owned(), takes });
        }
        (!places.is_empty()).then(|| Fits { asks: asks.to_vec(), places, priority })
    }

    fn find<'a, S: Score>(
        &self,
        asks: &[Ask],
        (pod, priority): (Option<&str>, i32),
        nodes: impl IntoIterator<Item = &'a str>,
        most: usize,
        score: &S,
    ) -> Result<Fits, NoFit> {
        let wanted = wanted(asks);
        let mut found: Vec<(Worth, &'a str, Cow<'_, Node>)> = Vec::new();
        let mut why = NoFit::NoNode;
        let nominated = self.nominated(pod, priority);
        for name in nodes {
            let Some(node) = self.nodes.get(name) else { continue };
            let node = nominated.get(name).map_or(Cow::Borrowed(node), |kept| Cow::Owned(node.without(kept)));
            match node.worth(&wanted, score) {
                Ok(worth) => found.push((worth, name, node)),
                Err(reason) => why = why.max(reason),
            }
        }
        found.sort_unstable_by(|((score, left), name, _), ((other_score, other_left), other, _)| {
            other_score.total_cmp(score).then(left.cmp(other_left)).then(name.cmp(other))
        });
        found.dedup_by_key(|(_, name, _)| *name);
        let fits = found.into_iter().take(most).map(|(_, name, node)| {
            let (_, takes) = node.fit(&wanted, score)?;
            Ok(Fit { node: name.to_owned(), takes })
        });
        let places = fits.collect::<Result<Vec<Fit>, NoFit>>()?;
        if places.is_empty() { Err(why) } else { Ok(Fits { asks: asks.to_vec(), places, priority }) }
    }

    /// Holds all that the fits take, for a pod that may then be let through to these nodes.
    ///
    /// # Errors
    /// Nothing is held.
    pub fn reserve(&mut self, pod: &str, fits: &Fits, expires: Moment) -> Result<(), Refused> {
        if self.claims.contains_key(pod) {
            return Err(Refused::Claimed);
        }
        let takes = fits.places.iter().flat_map(|fit| fit.takes.iter().map(|take| (fit.node.as_str(), take)));
        let nominated = self.nominated(Some(pod), fits.priority);
        let mut taken: Vec<(&str, &Reservation)> = Vec::new();
        for (node, take) in takes {
            let kept = nominated.get(node).and_then(|kept| kept.get(&(take.resource.clone(), take.device.clone())));
            let kept = kept.copied().unwrap_or(0);
            let spare = |stock: &&mut Stock| stock.free().saturating_sub(kept) >= take.units.get();
            if !self.stock(node, take).filter(spare).is_some_and(|stock| stock.reserve(take.units)) {
                for (node, take) in taken {
                    if let Some(stock) = self.stock(node, take) {
                        stock.unreserve(take.units);
                    }
                }
                return Err(Refused::Stale);
            }
            taken.push((node, take));
        }
        let nodes = fits.places.iter().map(|fit| fit.node.clone()).collect();
        let noted = fits.places.iter().map(|fit| (fit.node.clone(), fit.takes.clone())).collect();
        self.insert(pod.to_owned(), Claim { asks: fits.asks.clone(), place: Place::OneOf { nodes, expires }, noted });
        fits.places.iter().for_each(|fit| self.update_reservations(&fit.node));
        Ok(())
    }

    /// A pod was bound to a node: what was held for it elsewhere is free. One that came around the
    /// gate gets a claim, and units if there are. What was held for it on the node stays where it
    /// is.
    pub fn bind(&mut self, pod: &str, node: &str, asks: &[Ask]) {
        let place = Place::Bound(node.to_owned());
        if self.claims.get(pod).is_some_and(|claim| claim.place == place && claim.asks == asks) {
            return;
        }
        let mut touched = BTreeSet::from([node.to_owned()]);
        let mut noted = BTreeMap::new();
        if let Some(mut before) = self.remove(pod) {
            touched.extend(before.place.nodes().into_iter().map(str::to_owned));
            noted.extend(before.noted.remove_entry(node));
        }
        self.insert(pod.to_owned(), Claim { asks: asks.to_vec(), place, noted });
        touched.iter().for_each(|node| self.update_reservations(node));
    }

    /// A pod that somebody else has let through.
    pub fn adopt(&mut self, pod: &str, claim: Claim) {
        self.release(pod);
        let nodes: Vec<String> = claim.place.nodes().into_iter().map(str::to_owned).collect();
        self.insert(pod.to_owned(), claim);
        nodes.iter().for_each(|node| self.update_reservations(node));
    }

    /// A pod is gone, or will not come: nothing is held for it any more. What it still holds is
    /// free when the node is observed without it.
    pub fn release(&mut self, pod: &str) -> Option<Claim> {
        self.nominations.remove(pod);
        let claim = self.remove(pod)?;
        for node in claim.place.nodes() {
            self.update_reservations(node);
        }
        Some(claim)
    }

    /// Pods that are not bound and whose time has come.
    pub fn overdue(&self, now: Moment) -> Vec<String> {
        let due = |claim: &Claim| matches!(claim.place, Place::OneOf { expires, .. } if expires <= now);
        self.claims.iter().filter(|(_, claim)| due(claim)).map(|(pod, _)| pod.clone()).collect()
    }

    /// Keeps what is reserved for a pod that is not bound until another time. Nothing is released
    /// meanwhile, so nobody else can take it.
    pub fn extend(&mut self, pod: &str, until: Moment) {
        if let Some(Claim { place: Place::OneOf { expires, .. }, .. }) = self.claims.get_mut(pod) {
            *expires = until;
        }
    }

    /// The claim of a pod.
    pub fn claim(&self, pod: &str) -> Option<&Claim> {
        self.claims.get(pod)
    }

    /// Whether a pod that is bound has not been seen with all that it asks for.
    pub fn is_unserved(&self, pod: &str) -> bool {
        let Some(Claim { asks, place: Place::Bound(node), .. }) = self.claims.get(pod) else { return false };
        let held = self.nodes.get(node).and_then(|node| node.held.get(pod)).map(Vec::as_slice).unwrap_or_default();
        outstanding(asks, held).values().any(|missing| !missing.is_empty())
    }

    /// All claims.
    pub fn claims(&self) -> &BTreeMap<String, Claim> {
        &self.claims
    }

    /// The nodes that are known.
    pub fn nodes(&self) -> impl Iterator<Item = &str> {
        self.nodes.keys().map(String::as_str)
    }

    /// What is held on a node: by resource, then by device, then by size.
    pub fn reservations(&self, node: &str) -> Vec<Reservation> {
        self.nodes.get(node).map(|node| node.reservations().collect()).unwrap_or_default()
    }

    /// What claims lack on a node and no device has room for. A pod that gets there is refused.
    pub fn short(&self, node: &str) -> &[Ask] {
        self.nodes.get(node).map(|node| node.short.as_slice()).unwrap_or_default()
    }

    /// Capacity, use and reservations of a node's devices, for people.
    pub fn devices(&self, node: &str) -> Vec<DeviceUsage> {
        self.nodes.get(node).map(|node| node.devices().collect()).unwrap_or_default()
    }

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
        let nominated = self.nominated(Some(waiting.pod), waiting.priority);
        let nodes: BTreeSet<&str> = nodes.into_iter().collect();
        let nodes = nodes.into_iter().filter_map(|name| Some((name, self.nodes.get(name)?, nominated.get(name))));
        preempt::cheapest(waiting, nodes, holders)
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
    fn nominated(&self, pod: Option<&str>, priority: i32) -> BTreeMap<String, Nominated> {
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

    fn insert(&mut self, pod: String, claim: Claim) {
        self.nominations.remove(&pod);
        for node in claim.place.nodes() {
            self.pods.entry(node.to_owned()).or_default().insert(pod.clone());
        }
        self.claims.insert(pod, claim);
    }

    /// Takes a claim out; the nodes are to be laid out again.
    fn remove(&mut self, pod: &str) -> Option<Claim> {
        let claim = self.claims.remove(pod)?;
        for node in claim.place.nodes() {
            if let Some(pods) = self.pods.get_mut(node) {
                pods.remove(pod);
                if pods.is_empty() {
                    self.pods.remove(node);
                }
            }
        }
        Some(claim)
    }

    fn stock(&mut self, node: &str, take: &Reservation) -> Option<&mut Stock> {
        self.nodes.get_mut(node)?.stocks.get_mut(&take.resource)?.get_mut(&take.device)
    }

    /// Where pods have swapped and then gone, what is noted on others may not be what the lost
    /// ledger held: a place for all is sought then, wherever notes are.
    fn renew_notes(&mut self, name: &str) {
        let (Some(node), Some(pods)) = (self.nodes.get(name), self.pods.get(name)) else { return };
        if node.short.is_empty() {
            return;
        }
        let claimed = layout::claimed(&self.claims, pods, name, &node.held);
        let Some(notes) = layout::notes_for_all(&node.stocks, &claimed) else { return };
        let notes: Vec<(String, Vec<Reservation>)> = pods.iter().cloned().zip(notes).collect();
        layout::put_notes(&mut self.claims, name, notes);
        self.update_reservations(name);
    }

    /// The one rule: see the module's description.
    fn update_reservations(&mut self, name: &str) {
        let Some(node) = self.nodes.get_mut(name) else { return };
        let none = BTreeSet::new();
        let pods = self.pods.get(name).unwrap_or(&none);
        layout::follow_swaps(&mut self.claims, pods, name, &node.held);
        node.short = layout::reserve_missing(&mut node.stocks, &layout::claimed(&self.claims, pods, name, &node.held));
        let free = node
            .stocks
            .iter()
            .flat_map(|(resource, stocks)| stocks.values().map(move |stock| (resource.as_str(), stock.free())));
        self.index.put(name, free);
    }
}

#[cfg(test)]
mod tests;
