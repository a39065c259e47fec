//! Tests that both implementations agree on random small clusters.
use cleave_plan::constraints::{
    HostPort, LabelSelector, Labels, NodePolicy, PodAffinityTerm, Rules, SpreadConstraint, WhenUnsatisfiable,
};
use cleave_plan::snapshot::{Node, NodeSelectorTerm, Operator, Pod, Requirement, Toleration};
use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

use super::naive::{broken_rules, rule_of_conflict};
use super::{Cluster, TestPod, labels, taint};

const TOPOLOGY_KEYS: [&str; 2] = ["zone", "rack"];

fn any_text_of(of: &'static [&'static str]) -> impl Strategy<Value = String> {
    select(of).prop_map(str::to_owned)
}

fn some_labels() -> impl Strategy<Value = Labels> {
    btree_map(any_text_of(&["app", "app", "rev"]), any_text_of(&["a", "a", "b"]), 0..=2)
}

fn requirement(keys: &'static [&'static str]) -> impl Strategy<Value = Requirement> {
    let operator = select(vec![
        Operator::In,
        Operator::In,
        Operator::NotIn,
        Operator::Exists,
        Operator::DoesNotExist,
        Operator::Gt,
        Operator::Unknown,
    ]);
    (any_text_of(keys), operator, vec(any_text_of(&["a", "b"]), 1..=2))
        .prop_map(|(key, operator, values)| Requirement { key, operator, values })
}

fn selector() -> impl Strategy<Value = LabelSelector> {
    let labels = btree_map(any_text_of(&["app", "rev"]), any_text_of(&["a", "b"]), 0..=1);
    (labels, prop_oneof![3 => Just(Vec::new()), 1 => vec(requirement(&["app", "rev"]), 1..=2)])
        .prop_map(|(match_labels, match_expressions)| LabelSelector { match_labels, match_expressions })
}

fn affinity_term() -> impl Strategy<Value = PodAffinityTerm> {
    let namespaces = prop_oneof![2 => Just(Vec::new()), 1 => vec(any_text_of(&["one", "two", "three"]), 1..=2)];
    let namespace_selector = prop_oneof![2 => Just(None), 1 => selector().prop_map(Some)];
    (option::weighted(0.9, selector()), namespaces, namespace_selector, any_text_of(&TOPOLOGY_KEYS)).prop_map(
        |(label_selector, namespaces, namespace_selector, topology_key)| PodAffinityTerm {
            label_selector,
            namespaces,
            namespace_selector,
            topology_key,
        },
    )
}

fn policy() -> impl Strategy<Value = Option<NodePolicy>> {
    select(vec![None, Some(NodePolicy::Honor), Some(NodePolicy::Ignore)])
}

fn spread_constraint() -> impl Strategy<Value = SpreadConstraint> {
    let hard = WhenUnsatisfiable::DoNotSchedule;
    let when = select(vec![hard, hard, hard, WhenUnsatisfiable::ScheduleAnyway, WhenUnsatisfiable::Unknown]);
    let keys = prop_oneof![3 => Just(Vec::new()), 1 => vec(any_text_of(&["rev"]), 1)];
    let minimum = option::weighted(0.3, 1..=4);
    (1..=2, any_text_of(&TOPOLOGY_KEYS), when, option::weighted(0.9, selector()), minimum, policy(), policy(), keys)
        .prop_map(
            |(max_skew, topology_key, when_unsatisfiable, label_selector, min_domains, affinity, taints, keys)| {
                SpreadConstraint {
                    max_skew,
                    topology_key,
                    when_unsatisfiable,
                    label_selector,
                    min_domains,
                    node_affinity_policy: affinity,
                    node_taints_policy: taints,
                    match_label_keys: keys,
                }
            },
        )
}

fn host_port() -> impl Strategy<Value = HostPort> {
    (any_text_of(&["", "0.0.0.0", "10.0.0.1", "10.0.0.2"]), any_text_of(&["", "TCP", "UDP"]), 0..=2_u16)
        .prop_map(|(ip, protocol, port)| HostPort { ip, protocol, port })
}

/// Generates a list of at most two values, often an empty list.
fn at_most_two<T: std::fmt::Debug + Clone + 'static>(
    one: impl Strategy<Value = T> + 'static,
) -> impl Strategy<Value = Vec<T>> {
    prop_oneof![2 => Just(Vec::new()), 1 => vec(one, 1..=2)]
}

fn rules() -> impl Strategy<Value = Rules> {
    (
        at_most_two(affinity_term()),
        at_most_two(affinity_term()),
        at_most_two(spread_constraint()),
        at_most_two(host_port()),
    )
        .prop_map(|(affinity, anti_affinity, spread, ports)| Rules { affinity, anti_affinity, spread, ports })
}

fn selector_terms() -> impl Strategy<Value = Vec<NodeSelectorTerm>> {
    let term = vec(requirement(&["zone", "rack"]), 0..=1)
        .prop_map(|match_expressions| NodeSelectorTerm { match_expressions, match_fields: Vec::new() });
    at_most_two(term)
}

fn pod() -> impl Strategy<Value = TestPod> {
    let tolerations = prop_oneof![
        Just(Vec::new()),
        Just(vec![Toleration { operator: "Exists".to_owned(), ..Toleration::default() }])
    ];
    let place = any_text_of(&["n0", "n1", "n2", "n3", "n4", "nowhere"]);
    let volumes = prop_oneof![4 => Just(Vec::new()), 1 => vec(selector_terms(), 1..=2)];
    (
        any_text_of(&["one", "one", "one", "two", "three"]),
        some_labels(),
        rules(),
        selector_terms(),
        tolerations,
        volumes,
        prop::bool::weighted(0.2),
        place,
    )
        .prop_map(|(namespace, labels, rules, affinity, tolerations, volumes, terminating, node)| TestPod {
            namespace,
            labels,
            rules,
            pod: Pod { affinity, tolerations, ..Pod::default() },
            volumes,
            terminating,
            node,
        })
}

fn cluster() -> impl Strategy<Value = Cluster> {
    let label = || option::weighted(0.9, any_text_of(&["a", "a", "b", "b", "c"]));
    let labelled = (label(), label()).prop_map(|(zone, rack)| {
        let both = TOPOLOGY_KEYS.iter().zip([zone, rack]);
        both.filter_map(|(key, value)| Some(((*key).to_owned(), value?))).collect::<Labels>()
    });
    let node = (labelled, prop::bool::weighted(0.2), any::<bool>());
    (vec(node, 1..=5), vec(pod(), 0..=16), some_labels()).prop_map(|(nodes, pods, one)| {
        let nodes = nodes.into_iter().enumerate().map(|(index, (labels, tainted, unschedulable))| Node {
            name: format!("n{index}"),
            labels,
            taints: if tainted { vec![taint("gpu")] } else { Vec::new() },
            unschedulable,
            ..Node::default()
        });
        // The labels of namespace "three" are unknown.
        let namespaces = [("one".to_owned(), one), ("two".to_owned(), labels(&[("app", "a")]))];
        Cluster { nodes: nodes.collect(), pods, namespaces: namespaces.into() }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn both_implementations_agree(cluster in cluster(), subject in pod()) {
        let verdicts = cluster.refusals_by_node(&subject);
        for (node, verdict) in cluster.nodes.iter().zip(verdicts) {
            let broken = broken_rules(&cluster, &subject, node);
            match &verdict {
                Ok(()) => prop_assert!(broken.is_empty(), "{} is allowed, but breaks {broken:?}", node.name),
                Err(conflict) => {
                    prop_assert!(broken.contains(&rule_of_conflict(conflict)), "{}: {conflict:?} is not in {broken:?}", node.name);
                }
            }
        }
    }
}
