//! Decides which nodes a pod may run on, given the pods that are already placed. Applies
//! kube-scheduler's required rules between pods.
//!
//! A [`NodeChecker`] reads the nodes and pods once for one pod, the [`Subject`]. The checker then
//! decides for each node. The checker implements the scheduler's plugins `InterPodAffinity`
//! (required terms only), `PodTopologySpread` (`DoNotSchedule` only), `NodePorts`, and
//! `VolumeBinding` for bound volumes. [`scheduling`](crate::scheduling) covers node selector, node
//! affinity and taints.
//!
//! # Cost
//!
//! [`NodeChecker::new`] makes about [`MAX_REQUIREMENTS`] comparisons at most for each node, and up
//! to three times as many for each placed pod. A subject that exceeds this limit is refused on
//! every node ([`Conflict::TooManyRules`]). The checker ignores a placed pod's anti-affinity terms
//! and host ports beyond the limit. The checker reads nodes and pods only if a rule needs them. For
//! a pod without rules, the checker reads only placed pods with anti-affinity or host ports.
//! [`NodeChecker::check_node`] looks up each of the subject's rules once.
mod affinity;
mod conflict;
mod pods;
mod ports;
mod rules;
mod selector;
mod spread;

use std::cell::LazyCell;
use std::collections::BTreeMap;

pub use conflict::Conflict;
pub use pods::{PlacedPod, Subject};
pub use rules::{HostPort, NodePolicy, PodAffinityTerm, Rules, SpreadConstraint, WhenUnsatisfiable};
pub use selector::{LabelSelector, Labels, MAX_REQUIREMENTS};

use crate::scheduling;
use crate::snapshot::{Node, NodeSelectorTerm};

/// Decides which nodes one pod may run on, in one state of the cluster.
#[derive(Debug)]
pub struct NodeChecker<'a> {
    volumes: &'a [Vec<NodeSelectorTerm>],
    too_many: bool,
    affinity: affinity::RequiredDomains<'a>,
    spread: spread::SpreadCounts<'a>,
    ports: ports::PortConflicts<'a>,
}

impl<'a> NodeChecker<'a> {
    /// Reads the nodes and pods once, and records which nodes the rules require or exclude for the
    /// subject.
    ///
    /// - `nodes` are all nodes of the cluster, not only those with GPUs, without duplicates.
    /// - `all` are all pods on these nodes except the subject. The checker reads these pods only if
    ///   the subject has affinity, anti-affinity or spread constraints.
    /// - `repelling` are the pods in `all` whose rules [repel](Rules::repels). Pods without such
    ///   rules have no effect.
    /// - `namespaces` returns the labels of a namespace. If the labels are unknown, a namespace
    ///   selector with requirements does not match for affinity and matches for anti-affinity.
    pub fn new(
        subject: Subject<'a>,
        nodes: impl IntoIterator<Item = &'a Node>,
        all: impl IntoIterator<Item = PlacedPod<'a>>,
        repelling: impl IntoIterator<Item = PlacedPod<'a>>,
        namespaces: impl Fn(&str) -> Option<&'a Labels>,
    ) -> Self {
        let too_many = subject.rules.are_too_many();
        let mut checker = Self {
            volumes: subject.volumes,
            too_many,
            affinity: affinity::RequiredDomains::new(&subject, &namespaces),
            spread: spread::SpreadCounts::new(&subject),
            ports: ports::PortConflicts::new(&subject.rules.ports),
        };
        if too_many {
            return checker;
        }
        let index: LazyCell<BTreeMap<&str, &'a Node>, _> =
            LazyCell::new(|| nodes.into_iter().map(|node| (node.name.as_str(), node)).collect());
        let find = |name: &str| index.get(name).copied();
        for placed in repelling {
            checker.affinity.record_repelling_pod(&subject, &placed, &namespaces, &find);
            checker.ports.count_pod(&placed);
        }
        let apart = !subject.rules.affinity.is_empty() || !subject.rules.anti_affinity.is_empty();
        if apart || !checker.spread.is_empty() {
            let eligible = if checker.spread.is_empty() {
                BTreeMap::new()
            } else {
                checker.spread.find_domains(&subject, index.values().copied())
            };
            for placed in all {
                checker.affinity.record_pod(&subject, &placed, &namespaces, &find);
                checker.spread.count_pod(&subject, &placed, &eligible);
            }
            checker.spread.find_lowest_counts();
        }
        checker
    }

    /// Returns a checker that checks nodes as the scheduler does after a release narrows the
    /// subject to one node.
    #[must_use]
    pub fn narrowed(mut self) -> Self {
        self.spread.narrow();
        self
    }

    /// Checks whether the pod may run on a node now. Permanent conflicts are reported first.
    ///
    /// # Errors
    ///
    /// Returns the first rule that excludes the node.
    pub fn check_node(&self, node: &Node) -> Result<(), Conflict> {
        if self.too_many {
            return Err(Conflict::TooManyRules);
        }
        // For volumes, the scheduler compares only labels. A term about the node's name matches no
        // node.
        if !self.volumes.iter().all(|terms| scheduling::matches_any(terms, &node.labels, "")) {
            return Err(Conflict::Volume);
        }
        if let Some(key) = self.affinity.missing_key(node).or_else(|| self.spread.missing_key(node)) {
            return Err(Conflict::NoTopologyKey { topology_key: key.to_owned() });
        }
        if let Some(port) = self.ports.conflict_on(&node.name) {
            return Err(Conflict::HostPort(port));
        }
        self.affinity.check_node(node)?;
        self.spread.check_node(node)
    }
}
