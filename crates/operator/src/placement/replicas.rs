//! Finds the nodes and devices of the replicas of a pod's controller, so that the search can avoid
//! them.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cleave_api::SharingPolicy;
use cleave_api::sharingpolicy::ReplicaPlacement;
use cleave_plan::ledger::{Ledger, Siblings};
use kube::ResourceExt;
use kube::core::DeserializeGuard;

use super::nodes::Nodes;
use crate::pods::{ControllerId, PodObject};

/// Pods with a claim, by their controller.
#[derive(Debug, Default)]
pub(super) struct ReplicaIndex {
    pods: BTreeMap<ControllerId, BTreeSet<Arc<str>>>,
    controllers: BTreeMap<Arc<str>, ControllerId>,
}

impl ReplicaIndex {
    /// Adds a pod. A pod without a controller is not indexed.
    pub(super) fn add(&mut self, name: &Arc<str>, controller: Option<ControllerId>) {
        if self.controllers.get(name).copied() == controller {
            return;
        }
        self.remove(name);
        if let Some(controller) = controller {
            self.controllers.insert(Arc::clone(name), controller);
            self.pods.entry(controller).or_default().insert(Arc::clone(name));
        }
    }

    /// Removes a pod.
    pub(super) fn remove(&mut self, name: &str) {
        let Some(controller) = self.controllers.remove(name) else { return };
        if let Some(pods) = self.pods.get_mut(&controller) {
            pods.remove(name);
            if pods.is_empty() {
                self.pods.remove(&controller);
            }
        }
    }
}

/// A controller, and whether replicas on GPUs whose policy packs are included.
type ReplicaKey = (ControllerId, bool);

/// What is known about the replicas of some controllers.
pub(super) type KnownReplicas = Vec<(ReplicaKey, Option<Siblings>)>;

/// Finds the replicas that the search avoids for a pod, within one reconcile. Finds the replicas of
/// each controller once, and adds the reservations of this reconcile.
pub(super) struct ReplicaSearch<'a> {
    index: &'a ReplicaIndex,
    nodes: &'a Nodes,
    /// Policies that pack replicas on their GPUs.
    packing: BTreeSet<String>,
    known: BTreeMap<ReplicaKey, Siblings>,
    no_siblings: Siblings,
}

impl<'a> ReplicaSearch<'a> {
    pub(super) fn new<P>(index: &'a ReplicaIndex, nodes: &'a Nodes, policies: &[P]) -> Self
    where
        P: AsRef<DeserializeGuard<SharingPolicy>>,
    {
        let valid = policies.iter().filter_map(|policy| policy.as_ref().0.as_ref().ok());
        let packing = valid.filter(|policy| policy.spec.replica_placement == ReplicaPlacement::Pack);
        let packing = packing.map(ResourceExt::name_any).collect();
        Self { index, nodes, packing, known: BTreeMap::new(), no_siblings: Siblings::default() }
    }

    /// Returns the replicas that the search avoids for a pod.
    ///
    /// The pod's annotation decides. Without an annotation, the policy of each replica's GPU
    /// decides. In this case, a replica is ignored if the policy of its GPU packs replicas.
    pub(super) fn siblings_of(&mut self, pod: &PodObject, ledger: &Ledger) -> &Siblings {
        let Some(controller) = avoided_controller(pod) else { return &self.no_siblings };
        let everywhere = pod.replica_placement == Some(ReplicaPlacement::Spread);
        let Self { index, nodes, packing, known, .. } = self;
        known.entry((controller, everywhere)).or_insert_with(|| {
            let mut siblings = Siblings::default();
            for (node, devices) in
                index.pods.get(&controller).into_iter().flatten().flat_map(|pod| ledger.devices_of(pod))
            {
                add_devices(&mut siblings, nodes, (node, devices), if everywhere { None } else { Some(packing) });
            }
            siblings
        })
    }

    /// Returns what is known about the replicas of these pods' controllers, for [`Self::restore`].
    pub(super) fn known_about<'p>(&self, pods: impl Iterator<Item = &'p PodObject>) -> KnownReplicas {
        let controllers: BTreeSet<ControllerId> = pods.filter_map(|pod| pod.controller_id).collect();
        let keys = controllers.into_iter().flat_map(|controller| [(controller, false), (controller, true)]);
        keys.map(|key| (key, self.known.get(&key).cloned())).collect()
    }

    /// Removes the reservations that were added since [`Self::known_about`] was called.
    pub(super) fn restore(&mut self, before: KnownReplicas) {
        for (key, siblings) in before {
            match siblings {
                Some(siblings) => drop(self.known.insert(key, siblings)),
                None => drop(self.known.remove(&key)),
            }
        }
    }

    /// Adds the reservation of a pod.
    pub(super) fn reserve<'d>(&mut self, pod: &PodObject, node: &str, devices: impl Iterator<Item = &'d str>) {
        let Some(controller) = pod.controller_id else { return };
        let devices: Vec<&str> = devices.collect();
        for everywhere in [false, true] {
            if let Some(siblings) = self.known.get_mut(&(controller, everywhere)) {
                let packing = if everywhere { None } else { Some(&self.packing) };
                add_devices(siblings, self.nodes, (node, devices.clone()), packing);
            }
        }
    }
}

/// Returns the controller whose replicas the search avoids for the pod. Returns `None` if the pod
/// has no controller, or packs replicas.
fn avoided_controller(pod: &PodObject) -> Option<ControllerId> {
    pod.controller_id.filter(|_| pod.replica_placement != Some(ReplicaPlacement::Pack))
}

/// Adds the devices of a pod, except devices whose policy packs replicas.
fn add_devices(
    siblings: &mut Siblings,
    nodes: &Nodes,
    (node, devices): (&str, Vec<&str>),
    packing: Option<&BTreeSet<String>>,
) {
    let policy = |device: &str| nodes.0.get(node).and_then(|state| state.policy_of_device(device));
    let packs =
        |device: &&str| packing.is_some_and(|packing| policy(device).is_some_and(|policy| packing.contains(policy)));
    let apart: Vec<&str> = devices.iter().copied().filter(|device| !packs(device)).collect();
    if !apart.is_empty() || devices.is_empty() {
        siblings.add(node, apart);
    }
}
