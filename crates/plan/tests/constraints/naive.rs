//! A second implementation of the rules, written from their definitions. This implementation checks
//! one node at a time, without indices or counts.
use std::collections::BTreeSet;

use cleave_plan::constraints::{
    Conflict, LabelSelector, Labels, NodePolicy, PodAffinityTerm, SpreadConstraint, WhenUnsatisfiable,
};
use cleave_plan::scheduling;
use cleave_plan::snapshot::{Node, Operator, Pod};

use super::{Cluster, TestPod};

/// The rules, named after the scheduler's plugins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum BrokenRule {
    Affinity,
    AntiAffinity,
    AntiAffinityOfOthers,
    Spread,
    Key,
    Ports,
    Volume,
    Size,
}

pub(crate) fn rule_of_conflict(conflict: &Conflict) -> BrokenRule {
    match conflict {
        Conflict::PodAffinity { .. } => BrokenRule::Affinity,
        Conflict::PodAntiAffinity { .. } => BrokenRule::AntiAffinity,
        Conflict::AntiAffinityOf { .. } => BrokenRule::AntiAffinityOfOthers,
        Conflict::Spread { .. } => BrokenRule::Spread,
        Conflict::NoTopologyKey { .. } => BrokenRule::Key,
        Conflict::HostPort(_) => BrokenRule::Ports,
        Conflict::Predecessor => unreachable!("rules between pods never return it"),
        Conflict::Volume => BrokenRule::Volume,
        Conflict::TooManyRules => BrokenRule::Size,
    }
}

/// Returns all rules that the pod breaks on a node.
pub(crate) fn broken_rules(cluster: &Cluster, pod: &TestPod, node: &Node) -> BTreeSet<BrokenRule> {
    let mut broken = BTreeSet::new();
    let rules = &pod.rules;
    let hard: Vec<_> =
        rules.spread.iter().filter(|one| one.when_unsatisfiable == WhenUnsatisfiable::DoNotSchedule).collect();
    let near = rules.affinity.iter().map(|term| &term.topology_key);
    if near.chain(hard.iter().map(|one| &one.topology_key)).any(|key| !node.labels.contains_key(key)) {
        broken.insert(BrokenRule::Key);
    }
    if !satisfies_affinity(cluster, pod, node) {
        broken.insert(BrokenRule::Affinity);
    }
    for other in &cluster.pods {
        let Some(there) = cluster.nodes.iter().find(|node| node.name == other.node) else { continue };
        let conflicts = |term: &PodAffinityTerm, owner: &TestPod, target: &TestPod| {
            same_domain(&term.topology_key, node, there) && term_selects(cluster, term, owner, target) != Some(false)
        };
        if rules.anti_affinity.iter().any(|term| conflicts(term, pod, other)) {
            broken.insert(BrokenRule::AntiAffinity);
        }
        if other.rules.anti_affinity.iter().any(|term| conflicts(term, other, pod)) {
            broken.insert(BrokenRule::AntiAffinityOfOthers);
        }
    }
    for constraint in &hard {
        if exceeds_skew(cluster, pod, &hard, constraint, node) {
            broken.insert(BrokenRule::Spread);
        }
    }
    let taken = cluster.pods.iter().filter(|other| other.node == node.name).flat_map(|other| &other.rules.ports);
    let any = |ip: &str| ip.is_empty() || ip == "0.0.0.0";
    let tcp = |protocol: &str| if protocol.is_empty() { "TCP".to_owned() } else { protocol.to_owned() };
    for there in taken {
        for mine in rules.ports.iter().filter(|mine| mine.port > 0 && mine.port == there.port) {
            let address = any(&mine.ip) || any(&there.ip) || mine.ip == there.ip;
            if address && tcp(&mine.protocol) == tcp(&there.protocol) {
                broken.insert(BrokenRule::Ports);
            }
        }
    }
    for terms in &pod.volumes {
        let volume = Pod { affinity: terms.clone(), ..Pod::default() };
        let bare = Node { labels: node.labels.clone(), ..Node::default() };
        if scheduling::admit(&volume, &bare).is_err() {
            broken.insert(BrokenRule::Volume);
        }
    }
    broken
}

fn same_domain(key: &str, one: &Node, other: &Node) -> bool {
    one.labels.contains_key(key) && one.labels.get(key) == other.labels.get(key)
}

/// Returns whether a selector matches labels.
fn selector_matches(selector: Option<&LabelSelector>, labels: &Labels) -> bool {
    let Some(selector) = selector else { return false };
    for (key, value) in &selector.match_labels {
        if labels.get(key) != Some(value) {
            return false;
        }
    }
    for one in &selector.match_expressions {
        let holds = match (one.operator, labels.get(&one.key)) {
            (Operator::In, Some(value)) => one.values.contains(value),
            (Operator::NotIn, Some(value)) => !one.values.contains(value),
            (Operator::NotIn | Operator::DoesNotExist, None) | (Operator::Exists, Some(_)) => true,
            _ => false,
        };
        if !holds {
            return false;
        }
    }
    true
}

/// Returns whether a term of one pod selects another pod. Returns `None` if labels of a namespace
/// are unknown.
fn term_selects(cluster: &Cluster, term: &PodAffinityTerm, owner: &TestPod, target: &TestPod) -> Option<bool> {
    if !selector_matches(term.label_selector.as_ref(), &target.labels) {
        return Some(false);
    }
    if term.namespaces.is_empty() && term.namespace_selector.is_none() {
        return Some(owner.namespace == target.namespace);
    }
    if term.namespaces.contains(&target.namespace) {
        return Some(true);
    }
    let Some(selector) = &term.namespace_selector else { return Some(false) };
    if *selector == LabelSelector::default() {
        return Some(true);
    }
    cluster.namespaces.get(&target.namespace).map(|labels| selector_matches(Some(selector), labels))
}

fn satisfies_affinity(cluster: &Cluster, pod: &TestPod, node: &Node) -> bool {
    let terms = &pod.rules.affinity;
    if terms.is_empty() {
        return true;
    }
    let sure = |other: &TestPod| terms.iter().all(|term| term_selects(cluster, term, pod, other) == Some(true));
    let not_out = |other: &TestPod| terms.iter().all(|term| term_selects(cluster, term, pod, other) != Some(false));
    let node_of = |other: &TestPod| cluster.nodes.iter().find(|node| node.name == other.node);
    let beside = |term: &PodAffinityTerm| {
        cluster.pods.iter().any(|other| {
            sure(other) && node_of(other).is_some_and(|there| same_domain(&term.topology_key, node, there))
        })
    };
    let somewhere = cluster.pods.iter().any(|other| {
        let placed = |there: &Node| terms.iter().any(|term| there.labels.contains_key(&term.topology_key));
        not_out(other) && node_of(other).is_some_and(placed)
    });
    terms.iter().all(beside) || !somewhere && sure(pod)
}

fn exceeds_skew(
    cluster: &Cluster,
    pod: &TestPod,
    hard: &[&SpreadConstraint],
    constraint: &SpreadConstraint,
    node: &Node,
) -> bool {
    let key = &constraint.topology_key;
    let counts_as_domain = |there: &&Node| {
        let selected = Node { taints: Vec::new(), unschedulable: false, ..(*there).clone() };
        let free = Pod { node_selector: Labels::new(), affinity: Vec::new(), ..pod.pod.clone() };
        let uncordoned = Node { unschedulable: false, ..(*there).clone() };
        let matches = scheduling::admit(&pod.pod, &selected).is_ok();
        let tolerated = scheduling::admit(&free, &uncordoned).is_ok();
        hard.iter().all(|one| there.labels.contains_key(&one.topology_key))
            && (constraint.node_affinity_policy == Some(NodePolicy::Ignore) || matches)
            && (constraint.node_taints_policy != Some(NodePolicy::Honor) || tolerated)
    };
    let domains: Vec<&Node> = cluster.nodes.iter().filter(counts_as_domain).collect();
    let common = |labels: &Labels| {
        let keys = constraint.match_label_keys.iter();
        keys.filter(|key| pod.labels.contains_key(*key)).all(|key| labels.get(key) == pod.labels.get(key))
    };
    let selected = |labels: &Labels| selector_matches(constraint.label_selector.as_ref(), labels) && common(labels);
    // The scheduler counts no pods for a selector that matches everything.
    let all = constraint.label_selector == Some(LabelSelector::default())
        && !constraint.match_label_keys.iter().any(|key| pod.labels.contains_key(key));
    let count = |value: &String| {
        let there: Vec<_> = domains.iter().filter(|node| node.labels.get(key) == Some(value)).collect();
        let counted = |other: &&TestPod| {
            !all && !other.terminating
                && other.namespace == pod.namespace
                && selected(&other.labels)
                && there.iter().any(|node| node.name == other.node)
        };
        cluster.pods.iter().filter(counted).map(|_| 1).sum::<i32>()
    };
    let values: BTreeSet<&String> = domains.iter().filter_map(|node| node.labels.get(key)).collect();
    let few = values.iter().map(|_| 1).sum::<i32>() < constraint.min_domains.unwrap_or(1);
    let least = if few { 0 } else { values.iter().map(|value| count(value)).min().unwrap_or(0) };
    let here = node.labels.get(key).map_or(0, count);
    here + i32::from(selected(&pod.labels)) - least > constraint.max_skew
}
