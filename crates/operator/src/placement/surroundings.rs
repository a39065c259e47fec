//! What the scheduler looks at beside labels, taints and amounts: other pods, how replicas are
//! spread, host ports, and where volumes are.
//!
//! Pods that were released and are not bound yet count where room is reserved for them, those of
//! this look included. So replicas that must not share a node get nodes of their own although the
//! scheduler has bound none of them.
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};

use cleave_plan::constraints::{Conflict, Judge, Neighbour, PodAffinityTerm, Rules, Subject};
use cleave_plan::ledger::{Ledger, Place};
use cleave_plan::snapshot::{Node as PlanNode, NodeSelectorTerm, Pod as PlanPod};
use kube::Resource;

use super::cluster::Cluster;
use super::nodes::Nodes;
use crate::pods::{PodObject, full_name};
use crate::read::VolumeObject;

/// Pods with where they are or will be, and what their volumes and namespaces say.
pub(super) struct Surroundings<'a> {
    cluster: &'a Cluster,
    nodes: &'a Nodes,
    living: &'a [&'a PodObject],
    /// Bound pods that keep others away.
    repelling: Vec<&'a PodObject>,
    /// Their anti-affinity and that of pods with a reservation, each term once with its pod's
    /// namespace: replicas share theirs.
    terms: BTreeSet<(&'a str, &'a PodAffinityTerm)>,
    /// Pods that are not bound yet and have a reservation.
    reserved: Vec<Reserved<'a>>,
    /// Claims of volumes that are bound, with the volume's name, by namespace and name.
    claims: OnceCell<BTreeMap<(&'a str, &'a str), Option<&'a str>>>,
    volumes: OnceCell<BTreeMap<&'a str, &'a VolumeObject>>,
    namespaces: OnceCell<BTreeMap<&'a str, &'a BTreeMap<String, String>>>,
}

/// A pod that will be on one of these nodes.
struct Reserved<'a> {
    pod: &'a PodObject,
    nodes: Vec<String>,
}

/// What a pod's volumes require of its node.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Volumes {
    /// Required node affinity of each volume that is there.
    pub(super) terms: Vec<Vec<NodeSelectorTerm>>,
    /// A claim has no volume yet: where it can be, only the scheduler and the provisioner know.
    pub(super) unbound: bool,
}

/// What of a pod and the others decides where it may run: pods that agree in this are asked once.
pub(super) type Peculiar<'a> = (&'a str, &'a BTreeMap<String, String>, &'a Rules, Volumes);

const NO_LABELS: &BTreeMap<String, String> = &BTreeMap::new();

impl<'a> Surroundings<'a> {
    /// `open` are those of `living` that are not settled: only among them are pods with a
    /// reservation.
    pub(super) fn new(
        cluster: &'a Cluster,
        nodes: &'a Nodes,
        (living, open): (&'a [&'a PodObject], &[&'a PodObject]),
        ledger: &Ledger,
    ) -> Self {
        let repelling = living.iter().filter(|pod| pod.node().is_some() && pod.spec.rules.repels()).copied();
        let mut surroundings = Self {
            cluster,
            nodes,
            living,
            repelling: repelling.collect(),
            terms: BTreeSet::new(),
            reserved: Vec::new(),
            claims: OnceCell::new(),
            volumes: OnceCell::new(),
            namespaces: OnceCell::new(),
        };
        for pod in surroundings.repelling.clone() {
            surroundings.terms.extend(pod.spec.rules.anti_affinity.iter().map(|term| (namespace(pod), term)));
        }
        // Who has a claim was released, although the watch may still show its gate.
        for pod in open.iter().filter(|pod| pod.node().is_none()) {
            if let Some(claim) = ledger.claim(&full_name(&pod.metadata))
                && let Place::OneOf { nodes, .. } = &claim.place
            {
                surroundings.place(pod, nodes.iter().cloned().collect());
            }
        }
        surroundings
    }

    /// A pod will be on one of these nodes.
    pub(super) fn place(&mut self, pod: &'a PodObject, nodes: Vec<String>) {
        self.terms.extend(pod.spec.rules.anti_affinity.iter().map(|term| (namespace(pod), term)));
        self.reserved.push(Reserved { pod, nodes });
    }

    /// What of a pod's own and of the others' rules has to be looked at; nothing where nobody has
    /// any.
    pub(super) fn peculiar<'p>(&self, pod: &'p PodObject) -> Option<Peculiar<'p>> {
        let rules = &pod.spec.rules;
        let repelled = || self.terms.iter().any(|(own, term)| term.may_select(own, namespace(pod), labels(pod)));
        if rules.is_empty() && pod.spec.volume_claims.is_empty() && !repelled() {
            return None;
        }
        Some((namespace(pod), labels(pod), rules, self.volumes(pod)))
    }

    /// What a pod's volumes require.
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

    /// Works out where a pod may run by these rules; nothing for one that has too many to be worked
    /// out.
    pub(super) fn judge<'p>(&'p self, peculiar: &'p Peculiar<'p>, wanted: &'p PlanPod) -> Option<Judge<'p>> {
        let (namespace, labels, rules, volumes) = peculiar;
        if rules.are_too_many() {
            return None;
        }
        let subject = Subject { namespace, labels, rules, pod: wanted, volumes: &volumes.terms };
        let all_nodes = self.nodes.0.values().map(|known| &known.node);
        let namespaces = self.namespaces();
        let reserved = || self.reserved.iter().flat_map(Reserved::neighbours);
        let bound = self.living.iter().filter_map(|pod| Some(neighbour(pod, pod.node()?)));
        let repelling = self.repelling.iter().filter_map(|pod| Some(neighbour(pod, pod.node()?)));
        let (all, repelling) = (bound.chain(reserved()), repelling.chain(reserved()));
        Some(Judge::new(subject, all_nodes, all, repelling, |name| namespaces.get(name).copied()))
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

impl Reserved<'_> {
    fn neighbours(&self) -> impl Iterator<Item = Neighbour<'_>> {
        self.nodes.iter().map(|node| neighbour(self.pod, node))
    }
}

fn neighbour<'p>(pod: &'p PodObject, node: &'p str) -> Neighbour<'p> {
    Neighbour {
        namespace: namespace(pod),
        labels: labels(pod),
        node,
        rules: &pod.spec.rules,
        terminating: pod.metadata.deletion_timestamp.is_some(),
    }
}

/// Whether a pod's rules let it run on a node; without rules they do.
pub(super) fn refused(judge: Option<&Judge<'_>>, node: &PlanNode) -> Result<(), Conflict> {
    judge.map_or(Ok(()), |judge| judge.refuse(node))
}

fn namespace(pod: &PodObject) -> &str {
    pod.metadata.namespace.as_deref().unwrap_or("default")
}

fn labels(pod: &PodObject) -> &BTreeMap<String, String> {
    pod.metadata.labels.as_ref().unwrap_or(NO_LABELS)
}
