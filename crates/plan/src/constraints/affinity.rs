//! Evaluates required affinity and anti-affinity between pods.
use std::collections::{BTreeMap, BTreeSet};

use super::conflict::Conflict;
use super::pods::{PlacedPod, Subject};
use super::rules::{PodAffinityTerm, TermMatch};
use super::selector::{Labels, MAX_REQUIREMENTS};
use crate::snapshot::Node;

/// Topology domains: for each topology key, the values of that node label.
type Domains<'a> = BTreeMap<&'a str, BTreeSet<&'a str>>;

fn contains_domain(domains: &Domains<'_>, key: &str, value: &str) -> bool {
    domains.get(key).is_some_and(|values| values.contains(value))
}

/// The topology domains that affinity rules require or exclude. The rules are the subject's
/// affinity and anti-affinity, and the placed pods' anti-affinity.
#[derive(Debug)]
pub(super) struct RequiredDomains<'a> {
    /// The subject's affinity.
    affinity: &'a [PodAffinityTerm],
    /// The subject's anti-affinity.
    anti_affinity: &'a [PodAffinityTerm],
    /// Domains with a pod that matches all terms of the subject's affinity.
    attracting_domains: Domains<'a>,
    /// Whether the subject may be the first pod of a group: it matches its own affinity, and no pod
    /// in any domain matches or may match.
    may_be_first: bool,
    /// Domains with a pod that matches, or may match, a term of the subject's anti-affinity.
    avoided_domains: Domains<'a>,
    /// Domains with a pod that has, or may have, anti-affinity to the subject.
    repelling_domains: Domains<'a>,
}

impl<'a> RequiredDomains<'a> {
    pub(super) fn new(subject: &Subject<'a>, namespaces: &impl Fn(&str) -> Option<&'a Labels>) -> Self {
        let affinity = subject.rules.affinity.as_slice();
        let own = subject.namespace;
        let may_be_first =
            affinity.iter().all(|term| term.selects(own, subject.labels, own, namespaces) == TermMatch::Yes);
        let anti_affinity = subject.rules.anti_affinity.as_slice();
        let (attracting_domains, avoided_domains, repelling_domains) = Default::default();
        Self { affinity, anti_affinity, attracting_domains, may_be_first, avoided_domains, repelling_domains }
    }

    /// Records the domain of a placed pod that the subject's affinity or anti-affinity selects.
    pub(super) fn record_pod(
        &mut self,
        subject: &Subject<'a>,
        placed: &PlacedPod<'a>,
        namespaces: &impl Fn(&str) -> Option<&'a Labels>,
        node: &impl Fn(&str) -> Option<&'a Node>,
    ) {
        let selects =
            |term: &PodAffinityTerm| term.selects(subject.namespace, placed.labels, placed.namespace, namespaces);
        if !self.affinity.is_empty() {
            let mut least = TermMatch::Yes;
            for term in self.affinity {
                least = least.min(selects(term));
                if least == TermMatch::No {
                    break;
                }
            }
            if let Some(node) = node(placed.node).filter(|_| least != TermMatch::No) {
                for (key, value) in self.affinity.iter().filter_map(|term| domain(term, node)) {
                    self.may_be_first = false;
                    if least == TermMatch::Yes {
                        self.attracting_domains.entry(key).or_default().insert(value);
                    }
                }
            }
        }
        for term in self.anti_affinity.iter().filter(|term| selects(term) != TermMatch::No) {
            if let Some((key, value)) = node(placed.node).and_then(|node| domain(term, node)) {
                self.avoided_domains.entry(key).or_default().insert(value);
            }
        }
    }

    /// Records the domain of a placed pod whose own anti-affinity selects the subject.
    pub(super) fn record_repelling_pod(
        &mut self,
        subject: &Subject<'a>,
        placed: &PlacedPod<'a>,
        namespaces: &impl Fn(&str) -> Option<&'a Labels>,
        node: &impl Fn(&str) -> Option<&'a Node>,
    ) {
        let mut left = MAX_REQUIREMENTS;
        for term in &placed.rules.anti_affinity {
            let Some(rest) = left.checked_sub(term.max_comparisons()) else { break };
            left = rest;
            if term.selects(placed.namespace, subject.labels, subject.namespace, namespaces) == TermMatch::No {
                continue;
            }
            if let Some((key, value)) = node(placed.node).and_then(|node| domain(term, node)) {
                self.repelling_domains.entry(key).or_default().insert(value);
            }
        }
    }

    /// Returns the first topology key of the subject's affinity that the node does not have.
    pub(super) fn missing_key(&self, node: &Node) -> Option<&'a str> {
        self.affinity.iter().map(|term| term.topology_key.as_str()).find(|key| !node.labels.contains_key(*key))
    }

    pub(super) fn check_node(&self, node: &Node) -> Result<(), Conflict> {
        let inside = |domains: &Domains<'_>, key: &str| {
            node.labels.get(key).is_some_and(|value| contains_domain(domains, key, value))
        };
        let key = |term: &PodAffinityTerm| term.topology_key.clone();
        let unmatched = |term: &&PodAffinityTerm| !inside(&self.attracting_domains, &term.topology_key);
        if !self.may_be_first
            && let Some(term) = self.affinity.iter().find(unmatched)
        {
            return Err(Conflict::PodAffinity { topology_key: key(term) });
        }
        if let Some(term) = self.anti_affinity.iter().find(|term| inside(&self.avoided_domains, &term.topology_key)) {
            return Err(Conflict::PodAntiAffinity { topology_key: key(term) });
        }
        match self.repelling_domains.keys().find(|key| inside(&self.repelling_domains, key)) {
            Some(key) => Err(Conflict::AntiAffinityOf { topology_key: (*key).to_owned() }),
            None => Ok(()),
        }
    }
}

/// Returns the topology domain of a node for a term. Returns `None` if the node does not have the
/// topology key.
fn domain<'a>(term: &'a PodAffinityTerm, node: &'a Node) -> Option<(&'a str, &'a str)> {
    node.labels.get_key_value(&term.topology_key).map(|(key, value)| (key.as_str(), value.as_str()))
}
