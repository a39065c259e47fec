//! The ledger: records which units of each device are free, used, or reserved for pods.
//!
//! A scheduler that sums the units of a node's GPUs does not know which units are on one GPU.
//! Therefore a pod is released only when the ledger has reserved units of one device for each of
//! the pod's [`DeviceRequest`]s. A [`Claim`] records the requests of a released pod. A
//! [`Reservation`] reserves units of a device. Reservations are stored by node, resource, device
//! and size, not by pod. Two pods with equal requests can therefore swap their units.
//!
//! [`Ledger::observe`] and every other change apply three steps to a node:
//!
//! 1. The claims on the node determine which units must be reserved: the units that the claims'
//!    pods request and that the kubelet has not allocated yet.
//! 2. A reservation remains on the device that the pod's annotation names, while it fits on this
//!    device and is needed.
//! 3. Any other needed unit is reserved on a device with enough free units, if such a device
//!    exists.
//!
//! A claim has a copy of the reservations in its pod's annotation ([`Claim::annotated`]). The
//! copies follow allocations: if the kubelet allocated to a pod the units that another pod's
//! annotation names, the ledger swaps the copies of the two pods. The annotations do not change.
//! Reservations depend on no other history. Therefore:
//!
//! - The units reserved on a device never exceed its free units. Only `device_units.rs` adds a
//!   reservation.
//! - A ledger rebuilt from observations and annotations has the reservations of the lost ledger,
//!   unless a node is short of units ([`Ledger::rebuild`]).
//!
//! The ledger does not depend on how a node allocates units, and it reads no clock: callers pass in
//! the time.
mod choose;
mod chooser;
mod claims;
mod containers;
mod device_units;
mod facts;
mod fit;
mod layout;
mod node;
mod pack;
mod preempt;
mod request;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

pub use choose::NoFit;
use choose::{NodeRank, requested_units};
use chooser::ChangedNodes;
pub use chooser::{ChoiceCriteria, Chooser, NodeCpu, Siblings};
use claims::Claims;
pub use containers::{Container, ContainerKind, RequestPart, device_requests, request_parts};
use device_units::DeviceUnits;
pub use facts::{Allocation, Claim, DeviceFacts, Facts, Moment, NodeFacts, Place, Reservation};
pub use fit::{Fit, Fits, ReserveError};
use layout::missing_units;
use node::Node;
pub use node::{DeviceAmounts, DeviceUsage};
use preempt::SearchedNode;
pub use preempt::{Holder, Holders, IsLegal, Nomination, PendingPod, Preemption, PreemptionNode, Rank};
pub use request::{DeviceRequest, Units};

use crate::placement::Score;
pub use crate::placement::Tightest;
use crate::shared::Shared;

/// Units of a pod on one device: the resource, the device and the number of units.
pub type UnitsOnDevice<'l> = (&'l str, &'l str, Units);

/// When a pod uses units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Use {
    /// It is released now.
    Now,
    /// It is nominated, and waits for more units.
    Later,
}

/// Free, used and reserved units of all nodes, and the claims of released pods.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ledger {
    nodes: BTreeMap<String, Node>,
    claims: Claims,
    /// Pods with a claim that are not bound. Most pods are bound, so this set is small.
    unbound: BTreeSet<Arc<str>>,
    /// Nodes that changed since the last [`Self::synchronize`].
    changes: ChangedNodes,
    /// Pods with a claim, by node. Includes unknown nodes.
    pods: BTreeMap<String, BTreeSet<Arc<str>>>,
    /// Nominations by pod: units that are kept for a pod while its victims terminate.
    nominations: BTreeMap<String, Nomination>,
    /// Ranks of waiting pods, while quotas are enforced. A pod without a rank has the rank of its
    /// priority. Every pass sets all ranks again.
    ranks: BTreeMap<String, Rank>,
    /// Units by node that the pod whose turn it is may not use.
    withheld: BTreeMap<String, DeviceAmounts>,
}

impl Ledger {
    /// Builds a ledger from facts. Units of claims without an annotation are also reserved, if they
    /// fit.
    ///
    /// The facts must be at least as new as the writes of the lost ledger. Otherwise, a released
    /// pod that is not among the claims loses its reservation.
    pub fn rebuild(facts: Facts) -> Self {
        Self::rebuild_from(facts.nodes, facts.claims.into_iter().map(|(pod, claim)| (Arc::from(pod), claim)))
    }

    /// Builds a ledger as [`Self::rebuild`] does, but reads the claims one by one. A list of all
    /// claims of a large cluster would need a lot of memory.
    pub fn rebuild_from(
        nodes: impl IntoIterator<Item = (String, NodeFacts)>,
        claims: impl IntoIterator<Item = (Arc<str>, Claim)>,
    ) -> Self {
        let mut ledger = Self::default();
        for (pod, claim) in claims {
            ledger.insert_claim(pod, claim);
        }
        for (name, observed) in nodes {
            ledger.observe(&name, observed);
            ledger.renew_reservations(&name);
        }
        ledger
    }

    /// Updates a node. Allocated units no longer need a reservation.
    pub fn observe(&mut self, name: &str, facts: NodeFacts) {
        self.nodes.insert(name.to_owned(), Node::from_facts(facts, |pod| self.claims.shared_name(pod)));
        self.update_reservations(name);
    }

    /// Removes a deleted or unknown node with its reservations. Claims on the node are kept,
    /// because the node can return.
    pub fn remove_node(&mut self, name: &str) {
        self.nodes.remove(name);
        self.changes.0.insert(name.to_owned());
    }

    /// Finds up to `most` placements for a pod on these nodes, best first.
    ///
    /// On each node, every request is placed on the device with the best score, unless this choice
    /// would prevent another request from fitting. If a placement exists, it is found, unless the
    /// search for several requests reaches its limit. No units are reserved. A pod without requests
    /// fits on every node.
    ///
    /// [Nominated](Self::nominate) units are not free here. Use [`Self::fit_for`] for a pod with a
    /// priority or a nomination.
    ///
    /// # Errors
    /// Returns why the pod fits on none of the nodes.
    pub fn fit<'a, S: Score>(
        &self,
        device_requests: &[DeviceRequest],
        nodes: impl IntoIterator<Item = &'a str>,
        most: usize,
        score: &S,
    ) -> Result<Fits, NoFit> {
        self.find_fits(device_requests, (None, i32::MIN), nodes, most, score)
    }

    /// Finds placements as [`Self::fit`] does. Units that are nominated for this pod, or for pods
    /// of lower priority, are free. While quotas are enforced, [`Rank`]s decide instead of
    /// priorities.
    ///
    /// # Errors
    /// Returns why the pod fits on none of the nodes.
    pub fn fit_for<'a, S: Score>(
        &self,
        waiting: PendingPod<'_>,
        nodes: impl IntoIterator<Item = &'a str>,
        most: usize,
        score: &S,
    ) -> Result<Fits, NoFit> {
        self.find_fits(waiting.device_requests, (Some(waiting.pod), waiting.priority), nodes, most, score)
    }

    /// Sends the nodes that changed to the chooser. Call this before [`Self::choose`].
    pub fn synchronize<S: Score + Default>(&mut self, chooser: &mut Chooser<S>) {
        for name in std::mem::take(&mut self.changes.0) {
            chooser.update(&name, self.nodes.get(&name));
        }
    }

    /// Finds at most `most` placements on nodes that `may` accepts, best first by the chooser's
    /// score, usually without checking every node.
    ///
    /// Returns `None` if the pod fits on no node. Also returns `None` if the pod has no requests,
    /// has several that are not equal requests for whole devices, or fits only on nodes with
    /// nominated units. In these cases, call [`Self::fit_for`].
    pub fn choose<S: Score>(
        &self,
        waiting: PendingPod<'_>,
        criteria: ChoiceCriteria<'_>,
        chooser: &mut Chooser<S>,
        most: usize,
        mut may: impl FnMut(&str) -> bool,
    ) -> Option<Fits> {
        let PendingPod { pod, priority, device_requests } = waiting;
        let first = device_requests.first()?;
        let nominated = self.nominated_units((Some(pod), priority), Use::Now);
        let mut places: Vec<Fit> = Vec::new();
        let mut refused: BTreeSet<&str> = BTreeSet::new();
        for (name, devices) in chooser.candidates(device_requests, criteria) {
            if places.len() >= most {
                break;
            }
            if nominated.contains_key(name) || refused.contains(name) || places.iter().any(|place| place.node == name) {
                continue;
            }
            if !may(name) {
                refused.insert(name);
                continue;
            }
            let units_by_device = self.nodes.get(name).and_then(|node| node.units_by_device.get(&first.resource));
            let has_room = |device: &&str| {
                units_by_device
                    .and_then(|units_by_device| units_by_device.get(*device))
                    .is_some_and(|device_units| device_units.free() >= first.units.get())
            };
            if devices.len() == device_requests.len() && devices.iter().all(has_room) {
                let take = |device: &str| Reservation {
                    resource: first.resource.clone(),
                    units: first.units,
                    device: device.to_owned(),
                };
                places.push(Fit { node: name.to_owned(), takes: devices.into_iter().map(take).collect() });
            }
        }
        (!places.is_empty()).then(|| Fits { device_requests: device_requests.to_vec(), places, priority })
    }

    /// Returns the devices that a pod uses or that are reserved for the pod, by node.
    pub fn devices_of(&self, pod: &str) -> impl Iterator<Item = (&str, Vec<&str>)> {
        let claim = self.claims.get(pod);
        let nodes = claim.into_iter().flat_map(|claim| claim.place.nodes().into_iter().map(move |node| (claim, node)));
        let pod = pod.to_owned();
        nodes.map(move |(claim, name)| {
            let allocations = self.nodes.get(name).and_then(|node| node.allocations.get(pod.as_str()));
            let annotated = claim.annotated.get(name).into_iter().flatten().map(|note| note.device.as_str());
            let allocated = allocations.into_iter().flatten().map(|part| &*part.device);
            (name, if allocations.is_some() { allocated.collect() } else { annotated.collect() })
        })
    }

    /// Returns the units that a pod uses or that are reserved for it, by node. Allocated units are
    /// in the order of their resources and devices.
    pub fn units_of(&self, pod: &str) -> Vec<(&str, Vec<UnitsOnDevice<'_>>)> {
        let Some(claim) = self.claims.get(pod) else { return Vec::new() };
        let units = |name| {
            let allocations = self.nodes.get(name).and_then(|node| node.allocations.get(pod));
            match allocations {
                Some(parts) => parts.iter().map(|part| (&*part.resource, &*part.device, part.units)).collect(),
                None => {
                    let annotated = claim.annotated.get(name).into_iter().flatten();
                    annotated.map(|note| (note.resource.as_str(), note.device.as_str(), note.units)).collect()
                }
            }
        };
        claim.place.nodes().into_iter().map(|name| (name, units(name))).collect()
    }

    fn find_fits<'a, S: Score>(
        &self,
        device_requests: &[DeviceRequest],
        (pod, priority): (Option<&str>, i32),
        nodes: impl IntoIterator<Item = &'a str>,
        most: usize,
        score: &S,
    ) -> Result<Fits, NoFit> {
        let wanted = requested_units(device_requests);
        let mut found: Vec<(NodeRank, &'a str, Cow<'_, Node>)> = Vec::new();
        let mut why = NoFit::NoNode;
        let nominated = self.nominated_units((pod, priority), Use::Now);
        for name in nodes {
            let Some(node) = self.nodes.get(name) else { continue };
            let node = nominated.get(name).map_or(Cow::Borrowed(node), |kept| Cow::Owned(node.without_nominated(kept)));
            match node.rank_node(&wanted, score) {
                Ok(worth) => found.push((worth, name, node)),
                Err(reason) => why = why.max(reason),
            }
        }
        found.sort_unstable_by(|((score, left), name, _), ((other_score, other_left), other, _)| {
            other_score.total_cmp(score).then(left.cmp(other_left)).then(name.cmp(other))
        });
        found.dedup_by_key(|(_, name, _)| *name);
        let fits = found.into_iter().take(most).map(|(_, name, node)| {
            let (_, takes) = node.fit_requests(&wanted, score)?;
            Ok(Fit { node: name.to_owned(), takes })
        });
        let places = fits.collect::<Result<Vec<Fit>, NoFit>>()?;
        if places.is_empty() {
            Err(why)
        } else {
            Ok(Fits { device_requests: device_requests.to_vec(), places, priority })
        }
    }

    /// Reserves the units of the fits for a pod. The pod may then be released to these nodes.
    ///
    /// # Errors
    /// Returns an error if the pod already has a claim, or units of the fits are no longer free.
    /// Nothing is then reserved.
    pub fn reserve(&mut self, pod: &str, fits: &Fits, expires: Moment) -> Result<(), ReserveError> {
        if self.claims.contains(pod) {
            return Err(ReserveError::Claimed);
        }
        let takes = fits.places.iter().flat_map(|fit| fit.takes.iter().map(|take| (fit.node.as_str(), take)));
        let nominated = self.nominated_units((Some(pod), fits.priority), Use::Now);
        let mut taken: Vec<(&str, &Reservation)> = Vec::new();
        for (node, take) in takes {
            let kept = nominated.get(node).and_then(|kept| kept.get(&(take.resource.clone(), take.device.clone())));
            let kept = kept.copied().unwrap_or(0);
            let spare = |device_units: &&mut DeviceUnits| device_units.free().saturating_sub(kept) >= take.units.get();
            if !self.device_units(node, take).filter(spare).is_some_and(|device_units| device_units.reserve(take.units))
            {
                for (node, take) in taken {
                    if let Some(device_units) = self.device_units(node, take) {
                        device_units.unreserve(take.units);
                    }
                }
                return Err(ReserveError::Stale);
            }
            taken.push((node, take));
        }
        let nodes = fits.places.iter().map(|fit| fit.node.clone()).collect();
        let annotated = fits.places.iter().map(|fit| (fit.node.clone(), fit.takes.clone())).collect();
        self.insert_claim(
            Arc::from(pod),
            Claim { device_requests: fits.device_requests.clone(), place: Place::OneOf { nodes, expires }, annotated },
        );
        fits.places.iter().for_each(|fit| self.update_reservations(&fit.node));
        Ok(())
    }

    /// Records that a pod was bound to a node. The pod keeps its reservations on this node and
    /// loses its reservations on other nodes. A pod that bypassed the gate receives a claim, and a
    /// reservation if it fits.
    pub fn bind(&mut self, pod: &str, node: &str, device_requests: &[DeviceRequest]) {
        let place = Place::Bound(node.to_owned());
        if self.claims.get(pod).is_some_and(|claim| claim.place == place && claim.device_requests == device_requests) {
            return;
        }
        let mut touched = BTreeSet::from([node.to_owned()]);
        let mut annotated = BTreeMap::new();
        if let Some(mut before) = self.take_claim(pod) {
            touched.extend(before.place.nodes().into_iter().map(str::to_owned));
            annotated.extend(before.annotated.remove_entry(node));
        }
        self.insert_claim(Arc::from(pod), Claim { device_requests: device_requests.to_vec(), place, annotated });
        touched.iter().for_each(|node| self.update_reservations(node));
    }

    /// Adds the claim of a pod that the ledger did not release.
    pub fn add_claim(&mut self, pod: impl Into<Arc<str>>, claim: Claim) {
        let pod = pod.into();
        self.remove_claim(&pod);
        let nodes: Vec<String> = claim.place.nodes().into_iter().map(str::to_owned).collect();
        self.insert_claim(pod, claim);
        nodes.iter().for_each(|node| self.update_reservations(node));
    }

    /// Removes the claim of a pod that is deleted or will not run, and frees its reservations.
    /// Units that are allocated to the pod count as used until an observation of the node no longer
    /// lists them.
    pub fn remove_claim(&mut self, pod: &str) -> Option<Shared<Claim>> {
        self.nominations.remove(pod);
        let claim = self.take_claim(pod)?;
        for node in claim.place.nodes() {
            self.update_reservations(node);
        }
        Some(claim)
    }

    /// Returns the pods that are not bound and whose claims have expired.
    pub fn pods_with_expired_claims(&self, now: Moment) -> Vec<String> {
        let due = |claim: &Claim| matches!(claim.place, Place::OneOf { expires, .. } if expires <= now);
        self.unbound_claims().filter(|(_, claim)| due(claim)).map(|(pod, _)| pod.to_owned()).collect()
    }

    /// Returns the claims of pods that are not bound.
    pub fn unbound_claims(&self) -> impl Iterator<Item = (&str, &Claim)> {
        self.unbound.iter().filter_map(|pod| Some((&**pod, self.claims.get(pod)?)))
    }

    /// Extends the claim of a pod that is not bound. The claim's reservations are kept, so no other
    /// pod can use the units.
    pub fn extend_claim(&mut self, pod: &str, until: Moment) {
        self.claims.change(pod, |claim| {
            if let Place::OneOf { expires, .. } = &mut claim.place {
                *expires = until;
            }
        });
    }

    /// Returns the claim of a pod.
    pub fn claim(&self, pod: &str) -> Option<&Claim> {
        self.claims.get(pod)
    }

    /// Returns whether the pod is bound and the kubelet has not allocated all units that it
    /// requests.
    pub fn awaits_allocation(&self, pod: &str) -> bool {
        let Some(Claim { device_requests, place: Place::Bound(node), .. }) = self.claims.get(pod) else { return false };
        let allocated =
            self.nodes.get(node).and_then(|node| node.allocations.get(pod)).map(AsRef::as_ref).unwrap_or_default();
        missing_units(device_requests, allocated).values().any(|missing| !missing.is_empty())
    }

    /// Returns whether the node lists allocations of a pod with this name.
    pub fn has_allocations(&self, node: &str, pod: &str) -> bool {
        self.nodes.get(node).is_some_and(|node| node.allocations.contains_key(pod))
    }

    /// Returns all claims, in order of the pods' names.
    pub fn claims(&self) -> impl Iterator<Item = (&str, &Claim)> {
        self.claims.iter()
    }

    /// Returns the pods with allocations on a node, with or without a claim.
    pub fn pods_with_allocations(&self, node: &str) -> impl Iterator<Item = &str> {
        self.nodes.get(node).into_iter().flat_map(|node| node.allocations.keys().map(AsRef::as_ref))
    }

    /// Returns the pods with a claim on a node.
    pub fn pods_with_claims(&self, node: &str) -> impl Iterator<Item = &str> {
        self.pods.get(node).into_iter().flatten().map(AsRef::as_ref)
    }

    /// Returns a node as it was last observed.
    pub fn facts(&self, node: &str) -> Option<NodeFacts> {
        self.nodes.get(node).map(Node::facts)
    }

    /// Returns the names of the known nodes.
    pub fn nodes(&self) -> impl Iterator<Item = &str> {
        self.nodes.keys().map(String::as_str)
    }

    /// Returns the reservations on a node, by resource, device and size.
    pub fn reservations(&self, node: &str) -> Vec<Reservation> {
        self.nodes.get(node).map(|node| node.reservations().collect()).unwrap_or_default()
    }

    /// Returns the requests of a node's claims that fit on no device. The kubelet rejects a pod
    /// with such a request.
    pub fn unplaced_requests(&self, node: &str) -> &[DeviceRequest] {
        self.nodes.get(node).map(|node| node.short.as_slice()).unwrap_or_default()
    }

    /// Returns the capacity, use and reservations of a node's devices, for reports.
    pub fn devices(&self, node: &str) -> Vec<DeviceUsage> {
        self.nodes.get(node).map(|node| node.devices().collect()).unwrap_or_default()
    }

    /// Returns the allocations that a node lists.
    pub fn allocations(&self, node: &str) -> impl Iterator<Item = Allocation> {
        self.nodes.get(node).into_iter().flat_map(Node::allocations)
    }

    /// Finds the pods to preempt so that the pod fits on one of these nodes. Returns `None` if no
    /// preemption helps.
    ///
    /// Victims are pods of strictly lower priority that are in `holders` and have allocations on
    /// the node, or reservations if they are in [`Holders::unbound`]. Victims free units of devices
    /// and the node's missing resources ([`PreemptionNode::missing`]). Reserved units remain
    /// reserved, except those of [`Holders::unbound`]. Units that are nominated for other pods of
    /// the same or higher priority remain nominated. A node that has too few units of a requested
    /// resource for its claims is excluded. The units and other resources of terminating pods count
    /// as free, so no pod is preempted for units that become free anyway. The same applies to units
    /// of pods that have just ended ([`Holders::unlisted`]). While the victims terminate, another
    /// call returns no further victims.
    ///
    /// For each way to place the requests on devices, every pod is kept that need not be evicted:
    /// first pods of higher priority, then pods that started earlier. The victims never exceed the
    /// evictions that their disruption budgets allow. The best way has victims with the lowest
    /// maximum priority, then the lowest sum of priorities, then the fewest victims. The last
    /// criterion is the earliest start among the victims of the highest priority: a later start is
    /// better. Among equal ways, the first by the node's name is chosen.
    ///
    /// If a budget limits the victims, the search always finds a possible preemption for a pod with
    /// one request on a node that lacks only units of devices. In other cases, the search may miss
    /// a possible preemption.
    ///
    /// Callers must not pass pods with `preemptionPolicy: Never`. Callers must exclude pods that
    /// cannot be evicted, and pods on devices that cannot serve, from `holders`. A preemption on
    /// such a device frees no usable units. The pods in `kept` are not evicted for this pod, but
    /// their units become free if they are terminating.
    pub fn preempt<'a>(
        &self,
        pending: PendingPod<'_>,
        nodes: impl IntoIterator<Item = impl Into<PreemptionNode<'a>>>,
        holders: &Holders<'_>,
        kept: &BTreeSet<String>,
    ) -> Option<Preemption> {
        self.preempt_legally(pending, nodes, (holders, kept), None)
    }

    /// Finds pods to preempt as [`Self::preempt`] does, but returns only a preemption that
    /// `is_legal` accepts.
    pub fn preempt_legally<'a>(
        &self,
        pending: PendingPod<'_>,
        nodes: impl IntoIterator<Item = impl Into<PreemptionNode<'a>>>,
        (holders, kept): (&Holders<'_>, &BTreeSet<String>),
        is_legal: Option<IsLegal<'_>>,
    ) -> Option<Preemption> {
        let nominated = self.nominated_units((Some(pending.pod), pending.priority), Use::Later);
        let nodes = nodes.into_iter().map(Into::into).map(|target: PreemptionNode<'a>| (target.name, target));
        let nodes: BTreeMap<&str, PreemptionNode<'a>> = nodes.collect();
        let nodes = nodes.into_iter().filter_map(|(name, target)| {
            let pods = holders.unbound.get(name).into_iter().flat_map(BTreeMap::keys);
            let reserved = |pod: &'_ String| {
                let pod = self.unbound.get(pod.as_str())?;
                Some((&**pod, self.claims.get(pod)?.annotated.get(name)?.as_slice()))
            };
            let unbound = pods.filter_map(reserved).collect();
            Some(SearchedNode { target, node: self.nodes.get(name)?, nominated: nominated.get(name), unbound })
        });
        preempt::cheapest_preemption(pending, nodes, (holders, kept), is_legal)
    }

    /// Sets the rank of a waiting pod, while quotas are enforced.
    pub fn set_rank(&mut self, pod: &str, rank: Rank) {
        self.ranks.insert(pod.to_owned(), rank);
    }

    /// Forgets the rank of a waiting pod: its priority alone decides.
    pub fn remove_rank(&mut self, pod: &str) {
        self.ranks.remove(pod);
    }

    /// Sets the units by node that no pod may use in the searches that follow, as if they were
    /// nominated for a pod that comes first.
    pub fn withhold(&mut self, units: BTreeMap<String, DeviceAmounts>) {
        self.withheld = units;
    }

    /// Forgets the ranks of all pods: priority alone decides which nominations a pod must respect.
    /// No units are withheld.
    pub fn clear_ranks(&mut self) {
        self.withheld.clear();
        self.ranks.clear();
    }

    /// Nominates units for a pod: free units, and units that terminating pods will free. Replaces
    /// an earlier nomination.
    ///
    /// Nominated units are not reserved: agents do not read nominations, no pod is released to use
    /// the units, and released pods take precedence.
    ///
    /// # Errors
    /// Returns an error if the pod has a claim: it is already released and needs no nomination.
    pub fn nominate(&mut self, pod: &str, nomination: Nomination) -> Result<(), ReserveError> {
        if self.claims.contains(pod) {
            return Err(ReserveError::Claimed);
        }
        self.nominations.insert(pod.to_owned(), nomination);
        Ok(())
    }

    /// Removes the pod's nomination, and returns the nomination if there was one. Adding or
    /// removing a claim of the pod also removes the nomination.
    pub fn withdraw(&mut self, pod: &str) -> Option<Nomination> {
        self.nominations.remove(pod)
    }

    /// Returns all nominations, by pod.
    pub fn nominations(&self) -> &BTreeMap<String, Nomination> {
        &self.nominations
    }

    fn rank(&self, pod: &str, priority: i32) -> Rank {
        self.ranks.get(pod).copied().unwrap_or(Rank::of_priority(priority))
    }

    /// Returns whether a waiting pod leaves the units that are nominated for another pod. Each pod
    /// is its name and priority. With `takes_own`, the waiting pod uses units that are nominated
    /// for itself. The pod then leaves only the units of nominated pods that come before it.
    pub fn leaves_nominated(
        &self,
        (pod, priority): (&str, i32),
        (other, other_priority): (&str, i32),
        takes_own: bool,
    ) -> bool {
        let (rank, nominee) = (self.rank(pod, priority), self.rank(other, other_priority));
        pod != other && rank.respects(&nominee) && (!takes_own || nominee.comes_before(other, (&rank, pod)))
    }

    /// Returns the units by node that a pod leaves to nominated pods, and the units that are
    /// withheld. A nominated pod that uses its own units now leaves fewer: see
    /// [`Self::leaves_nominated`].
    fn nominated_units(
        &self,
        (pod, priority): (Option<&str>, i32),
        use_of_units: Use,
    ) -> BTreeMap<String, DeviceAmounts> {
        let mut units = self.withheld.clone();
        let own = pod.and_then(|pod| self.nominations.get(pod)).filter(|_| use_of_units == Use::Now);
        let is_own = |node: &str, take: &Reservation| {
            let is_same = |of: &Reservation| of.device == take.device && of.resource == take.resource;
            own.is_some_and(|own| own.node == node && own.takes.iter().any(is_same))
        };
        for (of, nomination) in &self.nominations {
            let nominee = (of.as_str(), nomination.priority);
            for take in &nomination.takes {
                let takes_own = is_own(&nomination.node, take);
                let is_left = match pod {
                    Some(pod) => self.leaves_nominated((pod, priority), nominee, takes_own),
                    None => Rank::of_priority(priority).respects(&self.rank(of, nomination.priority)),
                };
                if is_left {
                    let node = units.entry(nomination.node.clone()).or_default();
                    let sum = node.entry((take.resource.clone(), take.device.clone())).or_default();
                    *sum = sum.saturating_add(take.units.get());
                }
            }
        }
        units
    }

    fn insert_claim(&mut self, pod: Arc<str>, claim: Claim) {
        self.nominations.remove(&*pod);
        for node in claim.place.nodes() {
            self.pods.entry(node.to_owned()).or_default().insert(Arc::clone(&pod));
        }
        if matches!(claim.place, Place::OneOf { .. }) {
            self.unbound.insert(Arc::clone(&pod));
        } else {
            self.unbound.remove(&pod);
        }
        self.claims.insert(pod, claim);
    }

    /// Removes a claim. The caller must update the reservations of the claim's nodes.
    fn take_claim(&mut self, pod: &str) -> Option<Shared<Claim>> {
        let claim = self.claims.remove(pod)?;
        self.unbound.remove(pod);
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

    fn device_units(&mut self, node: &str, take: &Reservation) -> Option<&mut DeviceUnits> {
        self.nodes.get_mut(node)?.units_by_device.get_mut(&take.resource)?.get_mut(&take.device)
    }

    /// Finds new reservations for the claims of a rebuilt node if the annotated reservations do not
    /// cover a claim. This case occurs if pods swapped units and then terminated.
    fn renew_reservations(&mut self, name: &str) {
        let (Some(node), Some(pods)) = (self.nodes.get(name), self.pods.get(name)) else { return };
        if node.short.is_empty() {
            return;
        }
        let claimed = layout::claims_on_node(&self.claims, pods, name, &node.allocations);
        let Some(notes) = layout::new_reservations(&node.units_by_device, &claimed) else { return };
        let notes: Vec<(Arc<str>, Vec<Reservation>)> = pods.iter().cloned().zip(notes).collect();
        layout::set_reservations(&mut self.claims, name, notes);
        self.update_reservations(name);
    }

    /// Applies the three steps of the module's description to a node.
    fn update_reservations(&mut self, name: &str) {
        let Some(node) = self.nodes.get_mut(name) else { return };
        let none = BTreeSet::new();
        let pods = self.pods.get(name).unwrap_or(&none);
        layout::swap_reservations(&mut self.claims, pods, name, &node.allocations);
        node.short = layout::reserve_missing(
            &mut node.units_by_device,
            &layout::claims_on_node(&self.claims, pods, name, &node.allocations),
        );
        self.changes.0.insert(name.to_owned());
    }
}

#[cfg(test)]
mod tests;
