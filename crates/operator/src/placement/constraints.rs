//! Evaluates the scheduler's rules about other pods, the spread of replicas, host ports and the
//! location of volumes. [`super::nodes`] checks labels, taints and amounts of resources.
//!
//! A released pod that is not bound counts on every node of its reservation, even if the current
//! reconcile releases it. So replicas that must not share a node are released to different nodes
//! before the scheduler has bound any of them.
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};

use cleave_plan::constraints::{Conflict, NodeChecker, PlacedPod, PodAffinityTerm, Rules, Subject};
use cleave_plan::ledger::{Ledger, Place};
use cleave_plan::snapshot::{Node as PlanNode, NodeSelectorTerm, Pod as PlanPod};
use kube::Resource;

use super::cluster::Cluster;
use super::nodes::Nodes;
use super::pod_tracker::PodTracker;
use crate::pods::{PodObject, full_name};
use crate::read::VolumeObject;

/// The pods of the cluster with their current or future nodes, and the volumes and namespaces that
/// their rules refer to.
pub(super) struct Constraints<'a> {
    cluster: &'a Cluster,
    nodes: &'a Nodes,
    tracker: &'a PodTracker,
    /// Bound pods whose rules exclude other pods from nodes.
    repelling: Vec<&'a PodObject>,
    /// The anti-affinity terms of `repelling` pods and of pods with a reservation, each with its
    /// pod's namespace. Identical terms, such as those of replicas, are stored once.
    terms: BTreeSet<(&'a str, &'a PodAffinityTerm)>,
    /// Pods that have a reservation and are not bound.
    reserved: Vec<ReservedPod<'a>>,
    /// Volume claims by namespace and name. Each value is the name of the bound volume, if any.
    claims: OnceCell<BTreeMap<(&'a str, &'a str), Option<&'a str>>>,
    volumes: OnceCell<BTreeMap<&'a str, &'a VolumeObject>>,
    namespaces: OnceCell<BTreeMap<&'a str, &'a BTreeMap<String, String>>>,
}

/// A state of [`Constraints`] that [`Constraints::restore`] restores.
pub(super) struct ConstraintsCheckpoint<'a> {
    terms: BTreeSet<(&'a str, &'a PodAffinityTerm)>,
    reserved: usize,
}

/// A pod that will run on one of these nodes.
struct ReservedPod<'a> {
    pod: &'a PodObject,
    nodes: Vec<String>,
}

/// Requirements that a pod's volumes have for the pod's node.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Volumes {
    /// The required node affinity of each bound volume.
    pub(super) terms: Vec<Vec<NodeSelectorTerm>>,
    /// Whether a claim has no volume yet. Only the scheduler and the provisioner know where the
    /// volume can be created.
    pub(super) unbound: bool,
}

/// Namespace, labels, rules and volumes of a pod. Pods with equal keys may use the same nodes.
pub(super) type ConstraintKey<'a> = (&'a str, &'a BTreeMap<String, String>, &'a Rules, Volumes);

const NO_LABELS: &BTreeMap<String, String> = &BTreeMap::new();

impl<'a> Constraints<'a> {
    /// Indexes the pods, volumes and namespaces that rules refer to. `unsettled` is a subset of the
    /// pods in `tracker` that includes all pods with a reservation.
    pub(super) fn new(
        cluster: &'a Cluster,
        nodes: &'a Nodes,
        (tracker, unsettled): (&'a PodTracker, &[&'a PodObject]),
        ledger: &Ledger,
    ) -> Self {
        let mut constraints = Self {
            cluster,
            nodes,
            tracker,
            repelling: tracker.repelling_pods().collect(),
            terms: BTreeSet::new(),
            reserved: Vec::new(),
            claims: OnceCell::new(),
            volumes: OnceCell::new(),
            namespaces: OnceCell::new(),
        };
        for pod in constraints.repelling.clone() {
            constraints.terms.extend(pod.spec.rules.anti_affinity.iter().map(|term| (namespace(pod), term)));
        }
        // A pod with a claim is already released, although the watch may still show its gate.
        for pod in unsettled.iter().filter(|pod| pod.node().is_none()) {
            if let Some(claim) = ledger.claim(&full_name(&pod.metadata))
                && let Place::OneOf { nodes, .. } = &claim.place
            {
                constraints.add_reserved(pod, nodes.iter().cloned().collect());
            }
        }
        constraints
    }

    /// Returns the current state, for [`Self::restore`].
    pub(super) fn checkpoint(&self) -> ConstraintsCheckpoint<'a> {
        ConstraintsCheckpoint { terms: self.terms.clone(), reserved: self.reserved.len() }
    }

    /// Removes the pods that were added since a checkpoint.
    pub(super) fn restore(&mut self, before: ConstraintsCheckpoint<'a>) {
        self.terms = before.terms;
        self.reserved.truncate(before.reserved);
    }

    /// Adds a pod that will run on one of these nodes.
    pub(super) fn add_reserved(&mut self, pod: &'a PodObject, nodes: Vec<String>) {
        self.terms.extend(pod.spec.rules.anti_affinity.iter().map(|term| (namespace(pod), term)));
        self.reserved.push(ReservedPod { pod, nodes });
    }

    /// Returns the key of a pod. Returns `None` if neither the pod's own rules and volumes nor
    /// other pods' rules restrict the pod.
    pub(super) fn key<'p>(&self, pod: &'p PodObject) -> Option<ConstraintKey<'p>> {
        let rules = &pod.spec.rules;
        let repelled = || self.terms.iter().any(|(own, term)| term.may_select(own, namespace(pod), labels(pod)));
        if rules.is_empty() && pod.spec.volume_claims.is_empty() && !repelled() {
            return None;
        }
        Some((namespace(pod), labels(pod), rules, self.volumes(pod)))
    }

    /// Returns the requirements that a pod's volumes have for the pod's node.
    fn volumes(&self, pod: &PodObject) -> Volumes {
        let mut found = Volumes::default();
        if pod.spec.volume_claims.is_empty() {
            return found;
        }
        let claims = self.claims.get_or_init(|| {
            let claims = self.cluster.volume_claims.iter();
            claims
                .filter_map(|claim| {
                    let name = claim.metadata.name.as_deref()?;
                    let namespace = claim.metadata.namespace.as_deref().unwrap_or("default");
                    Some(((namespace, name), claim.spec.volume_name.as_deref().filter(|name| !name.is_empty())))
                })
                .collect()
        });
        for name in &pod.spec.volume_claims {
            let volume = claims.get(&(namespace(pod), name.as_str())).copied().flatten();
            match volume.and_then(|volume| self.volumes_by_name().get(volume)) {
                Some(volume) => found.terms.extend(volume.required().map(<[_]>::to_vec)),
                None => found.unbound = true,
            }
        }
        found.terms.sort();
        found.terms.dedup();
        found
    }

    fn volumes_by_name(&self) -> &BTreeMap<&'a str, &'a VolumeObject> {
        self.volumes.get_or_init(|| {
            let volumes = self.cluster.volumes.iter();
            volumes.filter_map(|volume| Some((volume.metadata.name.as_deref()?, &**volume))).collect()
        })
    }

    /// Prepares the evaluation of a pod's rules on all nodes. Returns `None` if the pod has too
    /// many rules.
    pub(super) fn evaluate_rules<'p>(
        &'p self,
        key: &'p ConstraintKey<'p>,
        plan_pod: &'p PlanPod,
    ) -> Option<NodeChecker<'p>> {
        let (namespace, labels, rules, volumes) = key;
        if rules.are_too_many() {
            return None;
        }
        let subject = Subject { namespace, labels, rules, pod: plan_pod, volumes: &volumes.terms };
        let all_nodes = self.nodes.0.values().map(|state| &state.node);
        let namespaces = self.namespaces();
        let reserved = || self.reserved.iter().flat_map(ReservedPod::placed_pods);
        let bound = self.tracker.living_pods().filter_map(|pod| Some(placed_pod(pod, pod.node()?)));
        let repelling = self.repelling.iter().filter_map(|pod| Some(placed_pod(pod, pod.node()?)));
        let (all, repelling) = (bound.chain(reserved()), repelling.chain(reserved()));
        let checker = NodeChecker::new(subject, all_nodes, all, repelling, |name| namespaces.get(name).copied());
        // Check the rules that the pod has after its release, which narrows the pod to one node.
        Some(checker.narrowed())
    }

    fn namespaces(&self) -> &BTreeMap<&'a str, &'a BTreeMap<String, String>> {
        self.namespaces.get_or_init(|| {
            let namespaces = self.cluster.namespaces.iter();
            let labels = |object: &'a crate::read::NamespaceObject| {
                Some((object.meta().name.as_deref()?, object.meta().labels.as_ref().unwrap_or(NO_LABELS)))
            };
            namespaces.filter_map(|object| labels(object)).collect()
        })
    }
}

impl ReservedPod<'_> {
    fn placed_pods(&self) -> impl Iterator<Item = PlacedPod<'_>> {
        self.nodes.iter().map(|node| placed_pod(self.pod, node))
    }
}

fn placed_pod<'p>(pod: &'p PodObject, node: &'p str) -> PlacedPod<'p> {
    PlacedPod {
        namespace: namespace(pod),
        labels: labels(pod),
        node,
        rules: &pod.spec.rules,
        terminating: pod.metadata.deletion_timestamp.is_some(),
    }
}

/// Checks whether the rules of a pod allow a node. A pod without rules has no conflict.
///
/// # Errors
/// Returns the rule that excludes the node.
pub(super) fn check_rules(checker: Option<&NodeChecker<'_>>, node: &PlanNode) -> Result<(), Conflict> {
    checker.map_or(Ok(()), |checker| checker.check_node(node))
}

pub(super) fn namespace(pod: &PodObject) -> &str {
    pod.namespace()
}

pub(super) fn labels(pod: &PodObject) -> &BTreeMap<String, String> {
    pod.labels()
}
