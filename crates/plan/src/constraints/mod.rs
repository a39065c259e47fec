//! Which nodes a pod may run on, given the pods that are there: kube-scheduler's required rules
//! between pods.
//!
//! A [`Judge`] reads the nodes and the pods once for one pod, the [`Subject`], and then answers for
//! each node. It follows the scheduler's plugins `InterPodAffinity` (required terms only),
//! `PodTopologySpread` (`DoNotSchedule` only), `NodePorts` and the part of `VolumeBinding` that is
//! about bound volumes. Node selector, node affinity and taints are those of
//! [`scheduling`](crate::scheduling) and are not asked here.
//!
//! # Cost
//!
//! [`Judge::new`] makes at most [`MOST_REQUIREMENTS`] comparisons for each node and twice as many
//! for each neighbour. A subject with more rules is refused everywhere
//! ([`Conflict::TooManyRules`]). Of a neighbour's anti-affinity and host ports, only those up to
//! the limit count. Nodes and pods are read only where a rule needs them: a pod without rules, in a
//! cluster without anti-affinity to it, reads only the neighbours with anti-affinity or host ports.
//! [`Judge::refuse`] looks up each of the subject's rules once.
mod affinity;
mod ports;
mod selector;
mod spread;

use std::cell::LazyCell;
use std::collections::BTreeMap;

use serde::Deserialize;

pub use affinity::PodAffinityTerm;
pub use ports::HostPort;
pub use selector::LabelSelector;
pub use spread::{NodePolicy, SpreadConstraint, WhenUnsatisfiable};

use crate::scheduling;
use crate::snapshot::{Node, NodeSelectorTerm, Pod};

/// Labels of a pod, a node or a namespace.
pub type Labels = BTreeMap<String, String>;

/// The most that is compared for a pod's rules: terms, requirements, their values, namespaces and
/// ports together.
///
/// A pod is one API object of up to 1.5 MiB, which has room for 50,000 requirements. Real ones have
/// ten.
pub const MOST_REQUIREMENTS: usize = 256;

/// What of a pod the rules read, besides its labels, node selector, node affinity and tolerations.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Rules {
    /// Required affinity to pods.
    pub affinity: Vec<PodAffinityTerm>,
    /// Required anti-affinity to pods.
    pub anti_affinity: Vec<PodAffinityTerm>,
    /// Topology spread constraints. Only those with `DoNotSchedule` refuse a node.
    pub spread: Vec<SpreadConstraint>,
    /// Host ports of all containers, sidecars included.
    pub ports: Vec<HostPort>,
}

impl Rules {
    /// Whether there are no rules at all.
    pub fn is_empty(&self) -> bool {
        let Self { affinity, anti_affinity, spread, ports } = self;
        affinity.is_empty() && anti_affinity.is_empty() && spread.is_empty() && ports.is_empty()
    }

    /// Whether a pod with these can keep other pods off nodes: it belongs to `repelling` of
    /// [`Judge::new`].
    pub fn repels(&self) -> bool {
        !self.anti_affinity.is_empty() || !self.ports.is_empty()
    }

    /// Whether they have more than [`MOST_REQUIREMENTS`].
    pub fn are_too_many(&self) -> bool {
        let terms = self.affinity.iter().chain(&self.anti_affinity).map(PodAffinityTerm::weight);
        let spread = self.spread.iter().filter(|one| one.is_hard()).map(SpreadConstraint::weight);
        terms.chain(spread).fold(self.ports.len(), usize::saturating_add) > MOST_REQUIREMENTS
    }
}

/// A pod that is on a node, or has a reservation on one. A reservation on several nodes is one
/// neighbour on each.
#[derive(Debug, Clone, Copy)]
pub struct Neighbour<'a> {
    /// Its namespace.
    pub namespace: &'a str,
    /// Its labels.
    pub labels: &'a Labels,
    /// The node's name. A neighbour on a node that [`Judge::new`] is not given only takes ports.
    pub node: &'a str,
    /// Its rules. Only anti-affinity and ports are read.
    pub rules: &'a Rules,
    /// It is being deleted. It still counts for affinity and ports, but not for spread.
    pub terminating: bool,
}

/// The pod to place.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    /// Its namespace.
    pub namespace: &'a str,
    /// Its labels.
    pub labels: &'a Labels,
    /// Its rules.
    pub rules: &'a Rules,
    /// Its node selector, node affinity and tolerations, which decide which nodes count for spread
    /// constraints.
    pub pod: &'a Pod,
    /// Required node affinity of each `PersistentVolume` that it mounts and that is bound. A volume
    /// without terms can be used anywhere.
    pub volumes: &'a [Vec<NodeSelectorTerm>],
}

/// Why a pod may not go to a node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Conflict {
    /// No pod of the node's domain matches the pod's affinity.
    PodAffinity {
        /// Node label that makes the domain.
        topology_key: String,
    },
    /// A pod of the node's domain matches the pod's anti-affinity.
    PodAntiAffinity {
        /// Node label that makes the domain.
        topology_key: String,
    },
    /// A pod of the node's domain has anti-affinity to the pod. Which one is left out: it may be
    /// another tenant's.
    AntiAffinityOf {
        /// Node label that makes the domain.
        topology_key: String,
    },
    /// The node's domain would have too many pods more than the one with the fewest.
    Spread {
        /// Node label that makes the domain.
        topology_key: String,
        /// How many more there may be.
        max_skew: i32,
    },
    /// The node has no label that the pod's affinity or spread constraints need.
    NoTopologyKey {
        /// The label.
        topology_key: String,
    },
    /// Another pod takes a host port of the pod.
    HostPort(u16),
    /// A volume of the pod cannot be used from the node.
    Volume,
    /// The pod has more than [`MOST_REQUIREMENTS`].
    TooManyRules,
}

impl Conflict {
    /// Whether it can pass when other pods come or go.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::PodAffinity { .. }
            | Self::PodAntiAffinity { .. }
            | Self::AntiAffinityOf { .. }
            | Self::Spread { .. }
            | Self::HostPort(_) => true,
            Self::NoTopologyKey { .. } | Self::Volume | Self::TooManyRules => false,
        }
    }
}

impl std::fmt::Display for Conflict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::PodAffinity { topology_key } => write!(f, "no pod there matches the pod's affinity ({topology_key})"),
            Self::PodAntiAffinity { topology_key } => {
                write!(f, "a pod there matches the pod's anti-affinity ({topology_key})")
            }
            Self::AntiAffinityOf { topology_key } => {
                write!(f, "a pod there has anti-affinity to this pod ({topology_key})")
            }
            Self::Spread { topology_key, max_skew } => {
                write!(f, "the pod there would exceed the maximum skew of {max_skew} ({topology_key})")
            }
            Self::NoTopologyKey { topology_key } => {
                write!(f, "it does not have the topology label {topology_key} that the pod's rules need")
            }
            Self::HostPort(port) => write!(f, "a pod there uses host port {port}"),
            Self::Volume => f.write_str("it does not match the node affinity of a volume of the pod"),
            Self::TooManyRules => {
                write!(
                    f,
                    "the pod's affinity, spread constraints and host ports exceed {MOST_REQUIREMENTS} requirements"
                )
            }
        }
    }
}

/// What the rules say of one pod in one state of the cluster.
#[derive(Debug)]
pub struct Judge<'a> {
    volumes: &'a [Vec<NodeSelectorTerm>],
    too_many: bool,
    affinity: affinity::Affinity<'a>,
    spread: spread::Spread<'a>,
    ports: ports::Taken<'a>,
}

impl<'a> Judge<'a> {
    /// Counts pods for a subject.
    ///
    /// - `nodes` are all nodes of the cluster, not only those with GPUs. Each name is there once.
    /// - `all` are all pods on them except the subject. Read only if the subject has affinity,
    ///   anti-affinity or spread constraints.
    /// - `repelling` are those of them whose rules [repel](Rules::repels). Others among them change
    ///   nothing.
    /// - `namespaces` returns the labels of a namespace. Where it does not know them, a namespace
    ///   selector with requirements counts as no match for affinity and as a match for
    ///   anti-affinity.
    pub fn new(
        subject: Subject<'a>,
        nodes: impl IntoIterator<Item = &'a Node>,
        all: impl IntoIterator<Item = Neighbour<'a>>,
        repelling: impl IntoIterator<Item = Neighbour<'a>>,
        namespaces: impl Fn(&str) -> Option<&'a Labels>,
    ) -> Self {
        let too_many = subject.rules.are_too_many();
        let mut judge = Self {
            volumes: subject.volumes,
            too_many,
            affinity: affinity::Affinity::new(&subject, &namespaces),
            spread: spread::Spread::new(&subject),
            ports: ports::Taken::new(&subject.rules.ports),
        };
        if too_many {
            return judge;
        }
        let index: LazyCell<BTreeMap<&str, &'a Node>, _> =
            LazyCell::new(|| nodes.into_iter().map(|node| (node.name.as_str(), node)).collect());
        let find = |name: &str| index.get(name).copied();
        for neighbour in repelling {
            judge.affinity.count_repelling(&subject, &neighbour, &namespaces, &find);
            judge.ports.count(&neighbour);
        }
        let apart = !subject.rules.affinity.is_empty() || !subject.rules.anti_affinity.is_empty();
        if apart || !judge.spread.is_empty() {
            let eligible = if judge.spread.is_empty() {
                BTreeMap::new()
            } else {
                judge.spread.domains(&subject, index.values().copied())
            };
            for neighbour in all {
                judge.affinity.count(&subject, &neighbour, &namespaces, &find);
                judge.spread.count(&subject, &neighbour, &eligible);
            }
            judge.spread.finish();
        }
        judge
    }

    /// Whether the pod may go to a node now, and why not. A conflict that cannot pass comes first.
    ///
    /// # Errors
    ///
    /// The first rule that the node breaks.
    pub fn refuse(&self, node: &Node) -> Result<(), Conflict> {
        if self.too_many {
            return Err(Conflict::TooManyRules);
        }
        // Of a node, the scheduler compares only the labels here: a term on its name matches none.
        if !self.volumes.iter().all(|terms| scheduling::matches_any(terms, &node.labels, "")) {
            return Err(Conflict::Volume);
        }
        if let Some(key) = self.affinity.missing(node).or_else(|| self.spread.missing(node)) {
            return Err(Conflict::NoTopologyKey { topology_key: key.to_owned() });
        }
        if let Some(port) = self.ports.on(&node.name) {
            return Err(Conflict::HostPort(port));
        }
        self.affinity.refuse(node)?;
        self.spread.refuse(node)
    }
}
