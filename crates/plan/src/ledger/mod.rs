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
mod index;
mod layout;
mod pack;
mod preempt;
mod stock;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::num::NonZeroU32;

pub use choose::{NoFit, Tightest};
use choose::{Worth, wanted};
pub use containers::{Container, Kind, Part, asks, parts};
use index::Index;
use layout::outstanding;
pub use preempt::{Holder, Nomination, Preemption, Waiting};
use stock::Stock;

use crate::placement::Score;

/// Units of one resource, at least one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Units(NonZeroU32);

impl Units {
    /// As many, unless that is none.
    pub const fn new(units: u32) -> Option<Self> {
        match NonZeroU32::new(units) {
            Some(units) => Some(Self(units)),
            None => None,
        }
    }

    /// How many.
    pub const fn get(self) -> u32 {
        self.0.get()
    }
}

impl fmt::Display for Units {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A time: seconds since a moment that the caller chooses and keeps, such as the Unix epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(pub u64);

/// Units that must be of one device. A pod that wants several devices asks several times.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ask {
    /// The extended resource.
    pub resource: String,
    /// How many.
    pub units: Units,
}

/// A pod that is on its way to a node, or on it and perhaps not served yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// What it asks for.
    pub asks: Vec<Ask>,
    /// Where it may go.
    pub place: Place,
    /// What was noted for it when it was let through, by node: who hands units out follows that.
    /// Where pods that ask for the same have swapped, what they have by that. Nothing for one that
    /// came around the gate.
    pub noted: BTreeMap<String, Vec<Reservation>>,
}

/// Where a claim's pod may go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// To one of these nodes; units are held on each until the pod is bound to one, or the time has
    /// come.
    OneOf {
        /// The nodes.
        nodes: BTreeSet<String>,
        /// From when on nothing is held any more.
        expires: Moment,
    },
    /// It is bound to this node: units are held until it is served or gone.
    Bound(String),
}

impl Place {
    fn nodes(&self) -> BTreeSet<&str> {
        match self {
            Self::OneOf { nodes, .. } => nodes.iter().map(String::as_str).collect(),
            Self::Bound(node) => BTreeSet::from([node.as_str()]),
        }
    }
}

/// What was observed of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeFacts {
    /// GPU model, as pods name it; for the choice among nodes.
    pub model: String,
    /// What its devices have.
    pub devices: Vec<DeviceFacts>,
    /// Who holds what of it: of pods with a claim, what they need not be kept any more.
    pub allocations: Vec<Allocation>,
}

/// What a device has of one resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// The GPU or MIG device.
    pub device: String,
    /// The extended resource.
    pub resource: String,
    /// Units that pods can be given: those that cannot serve are not counted.
    pub capacity: u32,
    /// Of these, units that pods hold, whoever they are.
    pub used: u32,
}

/// What a pod holds.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Allocation {
    /// The pod, by the same name as its claim.
    pub pod: String,
    /// The extended resource.
    pub resource: String,
    /// The device.
    pub device: String,
    /// How many units.
    pub units: Units,
}

/// Units of one device that are kept for a pod of that size.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reservation {
    /// The extended resource.
    pub resource: String,
    /// How many units.
    pub units: Units,
    /// The device.
    pub device: String,
}

/// All that a ledger is made of.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Nodes as observed.
    pub nodes: BTreeMap<String, NodeFacts>,
    /// Pods that were let through and may still want something.
    pub claims: BTreeMap<String, Claim>,
}

/// What a device has, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Room {
    /// The extended resource.
    pub resource: String,
    /// The device.
    pub device: String,
    /// Units that pods can be given.
    pub capacity: u32,
    /// Of these, units that pods hold.
    pub used: u32,
    /// Units that are kept for pods on their way.
    pub reserved: u32,
    /// Units that are neither.
    pub free: u32,
}

/// A place for all asks of a pod on one node: one device for each. Only [`Ledger::fit`] makes one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fit {
    node: String,
    takes: Vec<Reservation>,
}

impl Fit {
    /// The node.
    pub fn node(&self) -> &str {
        &self.node
    }

    /// What is taken of which device: as many as there are asks.
    pub fn takes(&self) -> &[Reservation] {
        &self.takes
    }
}

/// Places for a pod, the best first; at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fits {
    asks: Vec<Ask>,
    places: Vec<Fit>,
    /// Nominations of this priority or a higher one were heeded.
    priority: i32,
}

impl Fits {
    /// One for each node.
    pub fn iter(&self) -> impl Iterator<Item = &Fit> {
        self.places.iter()
    }
}

/// Why a fit was not reserved. Nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The pod has a claim already.
    #[error("the pod has a claim already: it is to be released first")]
    Claimed,
    /// What the fit takes is not free any more.
    #[error("what the fit takes is not free any more")]
    Stale,
}

/// One resource of a node: stocks by device.
type Stocks = BTreeMap<String, Stock>;

/// A node as observed, and what is reserved on it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Node {
    model: String,
    /// By resource, then by device.
    stocks: BTreeMap<String, Stocks>,
    /// What each pod holds here.
    held: BTreeMap<String, Vec<Allocation>>,
    /// What claims lack here and no device has room for.
    short: Vec<Ask>,
}

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
            ledger.note_anew(&name);
        }
        ledger
    }

    /// Takes in what was observed of a node. Pods that hold what they asked for are not kept
    /// anything any more.
    pub fn observe(&mut self, name: &str, facts: NodeFacts) {
        self.nodes.insert(name.to_owned(), Node::of(facts));
        self.lay_out(name);
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
            if !self.stock(node, take).filter(spare).is_some_and(|stock| stock.hold(take.units)) {
                for (node, take) in taken {
                    if let Some(stock) = self.stock(node, take) {
                        stock.give_back(take.units);
                    }
                }
                return Err(Refused::Stale);
            }
            taken.push((node, take));
        }
        let nodes = fits.places.iter().map(|fit| fit.node.clone()).collect();
        let noted = fits.places.iter().map(|fit| (fit.node.clone(), fit.takes.clone())).collect();
        self.insert(pod.to_owned(), Claim { asks: fits.asks.clone(), place: Place::OneOf { nodes, expires }, noted });
        fits.places.iter().for_each(|fit| self.lay_out(&fit.node));
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
        touched.iter().for_each(|node| self.lay_out(node));
    }

    /// A pod that somebody else has let through.
    pub fn adopt(&mut self, pod: &str, claim: Claim) {
        self.release(pod);
        let nodes: Vec<String> = claim.place.nodes().into_iter().map(str::to_owned).collect();
        self.insert(pod.to_owned(), claim);
        nodes.iter().for_each(|node| self.lay_out(node));
    }

    /// A pod is gone, or will not come: nothing is held for it any more. What it still holds is
    /// free when the node is observed without it.
    pub fn release(&mut self, pod: &str) -> Option<Claim> {
        self.nominations.remove(pod);
        let claim = self.remove(pod)?;
        for node in claim.place.nodes() {
            self.lay_out(node);
        }
        Some(claim)
    }

    /// Releases the claims whose time has come, and says which. A pod that is bound keeps what it
    /// has until it is served or gone.
    ///
    /// A gate cannot come back: what becomes of a pod that was let through and found no node is for
    /// the caller to say.
    pub fn expire(&mut self, now: Moment) -> Vec<(String, Claim)> {
        let pods = self.overdue(now);
        pods.into_iter().filter_map(|pod| self.release(&pod).map(|claim| (pod, claim))).collect()
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

    /// What a node's devices have.
    pub fn rooms(&self, node: &str) -> Vec<Room> {
        let stocks = self.nodes.get(node).into_iter().flat_map(|node| &node.stocks);
        let stocks = stocks.flat_map(|(resource, stocks)| stocks.iter().map(move |stock| (resource, stock)));
        stocks
            .map(|(resource, (device, stock))| Room {
                resource: resource.clone(),
                device: device.clone(),
                capacity: stock.capacity(),
                used: stock.used(),
                reserved: stock.reserved(),
                free: stock.free(),
            })
            .collect()
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
    fn note_anew(&mut self, name: &str) {
        let (Some(node), Some(pods)) = (self.nodes.get(name), self.pods.get(name)) else { return };
        if node.short.is_empty() {
            return;
        }
        let claimed = layout::claimed(&self.claims, pods, name, &node.held);
        let Some(notes) = layout::notes_for_all(&node.stocks, &claimed) else { return };
        let notes: Vec<(String, Vec<Reservation>)> = pods.iter().cloned().zip(notes).collect();
        layout::put_notes(&mut self.claims, name, notes);
        self.lay_out(name);
    }

    /// The one rule: see the module's description.
    fn lay_out(&mut self, name: &str) {
        let Some(node) = self.nodes.get_mut(name) else { return };
        let none = BTreeSet::new();
        let pods = self.pods.get(name).unwrap_or(&none);
        layout::follow_swaps(&mut self.claims, pods, name, &node.held);
        node.short = layout::keep(&mut node.stocks, &layout::claimed(&self.claims, pods, name, &node.held));
        let free = node
            .stocks
            .iter()
            .flat_map(|(resource, stocks)| stocks.values().map(move |stock| (resource.as_str(), stock.free())));
        self.index.put(name, free);
    }
}

impl Node {
    fn of(facts: NodeFacts) -> Self {
        let mut held: BTreeMap<String, Vec<Allocation>> = BTreeMap::new();
        let mut amounts: BTreeMap<(String, String), (u32, u32)> = BTreeMap::new();
        for DeviceFacts { device, resource, capacity, used } in facts.devices {
            // Told twice, the worse counts.
            let amount = amounts.entry((resource, device)).or_insert((capacity, used));
            *amount = (amount.0.min(capacity), amount.1.max(used));
        }
        let mut told: BTreeMap<(String, String), u32> = BTreeMap::new();
        for allocation in facts.allocations {
            let sum = told.entry((allocation.resource.clone(), allocation.device.clone())).or_default();
            *sum = sum.saturating_add(allocation.units.get());
            held.entry(allocation.pod.clone()).or_default().push(allocation);
        }
        held.values_mut().for_each(|allocations| allocations.sort());
        let mut stocks: BTreeMap<String, Stocks> = BTreeMap::new();
        for ((resource, device), (capacity, used)) in amounts {
            let key = (resource, device);
            let used = used.max(told.get(&key).copied().unwrap_or(0));
            stocks.entry(key.0).or_default().insert(key.1, Stock::new(capacity, used));
        }
        Self { model: facts.model, stocks, held, short: Vec::new() }
    }

    fn reservations(&self) -> impl Iterator<Item = Reservation> {
        self.stocks.iter().flat_map(|(resource, stocks)| {
            stocks.iter().flat_map(|(device, stock)| {
                stock.reservations().map(|units| Reservation {
                    resource: resource.clone(),
                    units,
                    device: device.clone(),
                })
            })
        })
    }
}

#[cfg(test)]
mod tests;
