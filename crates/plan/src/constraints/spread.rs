//! Evaluates topology spread constraints.
use std::collections::BTreeMap;

use super::conflict::Conflict;
use super::pods::{PlacedPod, Subject};
use super::rules::SpreadConstraint;
use super::selector::{LabelSelector, Labels};
use crate::scheduling;
use crate::snapshot::Node;

/// One constraint with the number of selected pods in each domain.
#[derive(Debug)]
struct DomainCounts<'a> {
    constraint: &'a SpreadConstraint,
    /// Labels of the subject that selected pods must have, from `matchLabelKeys`.
    common_labels: Vec<(&'a String, &'a String)>,
    /// Number of selected pods by the value of the topology key.
    domains: BTreeMap<&'a str, i64>,
    /// Number of selected pods by node.
    nodes: BTreeMap<&'a str, i64>,
    /// Whether the pods of a single node must not exceed the maximum skew.
    narrowed: bool,
    /// 1 if the subject itself is selected, otherwise 0.
    subject_count: i64,
    /// Number of selected pods in the domain with the fewest selected pods. 0 if there are fewer
    /// domains than `minDomains`.
    lowest_count: i64,
}

impl DomainCounts<'_> {
    fn selects(&self, labels: &Labels) -> bool {
        self.constraint.label_selector.as_ref().is_some_and(|selector| selector.matches(labels))
            && self.common_labels.iter().all(|(key, value)| labels.get(*key) == Some(*value))
    }

    /// Returns whether the selector has no requirements. kube-scheduler counts no pods for such a
    /// selector.
    fn counts_nothing(&self) -> bool {
        self.common_labels.is_empty() && self.constraint.label_selector.as_ref().is_none_or(LabelSelector::is_empty)
    }
}

/// Counts of the pods that the subject's hard constraints select.
#[derive(Debug, Default)]
pub(super) struct SpreadCounts<'a> {
    counts: Vec<DomainCounts<'a>>,
}

impl<'a> SpreadCounts<'a> {
    /// Creates the counts for the subject's hard constraints.
    pub(super) fn new(subject: &Subject<'a>) -> Self {
        let count = |constraint: &'a SpreadConstraint| {
            let keys = constraint.match_label_keys.iter();
            let common = keys.filter_map(|key| subject.labels.get_key_value(key)).collect();
            let (domains, nodes) = (BTreeMap::new(), BTreeMap::new());
            let mut count = DomainCounts {
                constraint,
                common_labels: common,
                domains,
                nodes,
                narrowed: false,
                subject_count: 0,
                lowest_count: 0,
            };
            count.subject_count = i64::from(count.selects(subject.labels));
            count
        };
        Self { counts: subject.rules.spread.iter().filter(|one| one.is_hard()).map(count).collect() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }

    /// Finds the domains of each constraint: the values of its topology key on nodes that count. A
    /// node counts if it has every topology key and no policy ignores the node. Returns all nodes
    /// with every topology key. Each node has two flags: whether the subject's node affinity
    /// selects the node, and whether the subject tolerates the node's taints.
    pub(super) fn find_domains(
        &mut self,
        subject: &Subject<'a>,
        nodes: impl Iterator<Item = &'a Node>,
    ) -> BTreeMap<&'a str, EligibleNode<'a>> {
        let mut eligible = BTreeMap::new();
        let constraints = scheduling::NodeConstraints::of_pod(subject.pod);
        for node in nodes {
            if self.missing_key(node).is_some() {
                continue;
            }
            let found =
                EligibleNode { node, selected: constraints.selects(node), tolerated: constraints.tolerates_all(node) };
            for count in &mut self.counts {
                if let Some(value) = found.domain(count.constraint) {
                    count.domains.entry(value).or_default();
                }
            }
            eligible.insert(node.name.as_str(), found);
        }
        eligible
    }

    /// Counts a placed pod in its domains, for each constraint that selects the pod.
    pub(super) fn count_pod(
        &mut self,
        subject: &Subject<'a>,
        placed: &PlacedPod<'a>,
        eligible: &BTreeMap<&'a str, EligibleNode<'a>>,
    ) {
        if placed.terminating || placed.namespace != subject.namespace {
            return;
        }
        let Some(node) = eligible.get(placed.node) else { return };
        for count in self.counts.iter_mut().filter(|count| !count.counts_nothing() && count.selects(placed.labels)) {
            if let Some(value) = node.domain(count.constraint) {
                *count.domains.entry(value).or_default() += 1;
                *count.nodes.entry(placed.node).or_default() += 1;
            }
        }
    }

    /// Finds the lowest number of pods for each constraint. Call this after counting all
    /// placed pods.
    pub(super) fn find_lowest_counts(&mut self) {
        for count in &mut self.counts {
            let domains = i64::try_from(count.domains.len()).unwrap_or(i64::MAX);
            let enough = domains >= i64::from(count.constraint.min_domains.unwrap_or(1));
            count.lowest_count = count.domains.values().copied().min().filter(|_| enough).unwrap_or(0);
        }
    }

    /// Makes later checks assume that the subject's node affinity allows only the checked node. A
    /// constraint that honors node affinity then has a single domain, with the pods of this node.
    /// If `minDomains` is higher than 1, the scheduler compares this domain with a domain without
    /// pods.
    pub(super) fn narrow(&mut self) {
        for count in &mut self.counts {
            count.narrowed = count.constraint.honors_affinity() && count.constraint.min_domains.unwrap_or(1) > 1;
        }
    }

    /// Returns the first topology key of the constraints that the node does not have.
    pub(super) fn missing_key(&self, node: &Node) -> Option<&'a str> {
        let mut keys = self.counts.iter().map(|count| count.constraint.topology_key.as_str());
        keys.find(|key| !node.labels.contains_key(*key))
    }

    pub(super) fn check_node(&self, node: &Node) -> Result<(), Conflict> {
        let skewed = |count: &&DomainCounts<'_>| {
            let value = node.labels.get(&count.constraint.topology_key);
            let there = value.and_then(|value| count.domains.get(value.as_str())).copied().unwrap_or(0);
            let here = count.nodes.get(node.name.as_str()).copied().filter(|_| count.narrowed).unwrap_or(0);
            (there - count.lowest_count).max(here) + count.subject_count > i64::from(count.constraint.max_skew)
        };
        match self.counts.iter().find(skewed).map(|count| count.constraint) {
            Some(one) => Err(Conflict::Spread { topology_key: one.topology_key.clone(), max_skew: one.max_skew }),
            None => Ok(()),
        }
    }
}

/// A node that has every topology key of the subject's hard constraints.
#[derive(Debug)]
pub(super) struct EligibleNode<'a> {
    node: &'a Node,
    selected: bool,
    tolerated: bool,
}

impl<'a> EligibleNode<'a> {
    /// Returns the node's domain for a constraint. Returns `None` if the constraint's policies
    /// ignore the node.
    fn domain(&self, constraint: &SpreadConstraint) -> Option<&'a str> {
        let exclusion = constraint.honors_affinity() && !self.selected || constraint.honors_taints() && !self.tolerated;
        self.node.labels.get(&constraint.topology_key).filter(|_| !exclusion).map(String::as_str)
    }
}
