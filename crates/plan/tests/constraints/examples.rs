//! Tests examples from the Kubernetes documentation, and edge cases of each rule.
use std::cell::Cell;

use cleave_plan::constraints::{Conflict, Labels, MAX_REQUIREMENTS, NodeChecker, PlacedPod, Rules, Subject};
use cleave_plan::snapshot::{Node, Pod};

use super::{Cluster, TestPod, cluster, labels, node, pod, taint};

/// Returns a required term as JSON: selects pods with a value of the label `app`, in domains of a
/// topology key. `more` contains further fields.
fn affinity_term(app: &str, key: &str, more: &str) -> String {
    let selector = format!(r#""labelSelector": {{"matchLabels": {{"app": "{app}"}}}}"#);
    format!(r#"{{{selector}, "topologyKey": "{key}"{more}}}"#)
}

fn affinity_rules(terms: &[String]) -> String {
    format!(r#"{{"affinity": [{}]}}"#, terms.join(","))
}

fn anti_affinity_rules(terms: &[String]) -> String {
    format!(r#"{{"antiAffinity": [{}]}}"#, terms.join(","))
}

/// Returns a spread constraint as JSON: selects pods with `foo: bar`, with a maximum skew of 1.
/// `more` contains further fields.
fn spread_constraint(key: &str, more: &str) -> String {
    let selector = r#""labelSelector": {"matchLabels": {"foo": "bar"}}"#;
    format!(r#"{{"maxSkew": 1, "topologyKey": "{key}", "whenUnsatisfiable": "DoNotSchedule", {selector}{more}}}"#)
}

fn spread_rules(constraints: &[String]) -> String {
    format!(r#"{{"spread": [{}]}}"#, constraints.join(","))
}

const HOSTNAME_KEY: &str = "kubernetes.io/hostname";
const FOO_LABELS: &[(&str, &str)] = &[("foo", "bar")];

/// Returns the documentation's cluster of two zones with two nodes each.
fn two_zones() -> Cluster {
    cluster(&[("node1", "zoneA"), ("node2", "zoneA"), ("node3", "zoneB"), ("node4", "zoneB")])
}

#[test]
fn replicas_with_anti_affinity_on_the_hostname_run_on_separate_nodes() {
    let mut cluster = cluster(&[("n1", "a"), ("n2", "a"), ("n3", "b"), ("n4", "b"), ("n5", "c"), ("n6", "c")]);
    let replica = pod(&[("app", "db")], &anti_affinity_rules(&[affinity_term("db", HOSTNAME_KEY, "")]));
    let placed: Vec<_> = (0..7).map(|_| cluster.place_on_first_allowed_node(&replica)).collect();
    let names = ["n1", "n2", "n3", "n4", "n5", "n6"].map(|name| Some(name.to_owned()));
    assert_eq!(placed[..6], names);
    assert_eq!(placed[6], None, "no seventh node exists");
    let expected = Err(Conflict::PodAntiAffinity { topology_key: HOSTNAME_KEY.to_owned() });
    assert!(cluster.refusals_by_node(&replica).iter().all(|verdict| *verdict == expected));
}

#[test]
fn each_web_server_runs_beside_a_cache() {
    // "More practical use-cases": three caches, and three web servers beside them.
    let mut cluster = cluster(&[("node-1", "a"), ("node-2", "a"), ("node-3", "a"), ("node-4", "a")]);
    let cache = pod(&[("app", "store")], &anti_affinity_rules(&[affinity_term("store", HOSTNAME_KEY, "")]));
    let rules = format!(
        r#"{{"antiAffinity": [{}], "affinity": [{}]}}"#,
        affinity_term("web-store", HOSTNAME_KEY, ""),
        affinity_term("store", HOSTNAME_KEY, "")
    );
    let web = pod(&[("app", "web-store")], &rules);
    assert_eq!(cluster.place_on_first_allowed_node(&web), None, "no cache exists yet");
    for _ in 0..3 {
        cluster.place_on_first_allowed_node(&cache);
    }
    assert_eq!(
        (0..4).filter_map(|_| cluster.place_on_first_allowed_node(&web)).collect::<Vec<_>>(),
        ["node-1", "node-2", "node-3"]
    );
    assert_eq!(cluster.refusals_by_node(&web)[3], Err(Conflict::PodAffinity { topology_key: HOSTNAME_KEY.to_owned() }));
}

#[test]
fn anti_affinity_of_a_running_pod_excludes_other_pods_from_its_node() {
    let mut cluster = two_zones();
    cluster.pods.push(pod(&[], &anti_affinity_rules(&[affinity_term("batch", "zone", "")])).on_node("node1"));
    let batch = pod(&[("app", "batch")], "{}");
    assert_eq!(cluster.allowed_nodes(&batch), ["node3", "node4"]);
    assert_eq!(cluster.refusals_by_node(&batch)[1], Err(Conflict::AntiAffinityOf { topology_key: "zone".to_owned() }));
    assert_eq!(cluster.allowed_nodes(&pod(&[("app", "web")], "{}")).len(), 4);
    assert_eq!(
        cluster.allowed_nodes(&batch.clone().in_namespace("other")).len(),
        4,
        "the term is about the owner's namespace"
    );
    cluster.pods[0].terminating = true;
    assert_eq!(cluster.allowed_nodes(&batch).len(), 2, "a pod that terminates is still there");
}

#[test]
fn the_first_pod_of_a_group_needs_only_the_topology_keys() {
    let mut cluster = two_zones();
    cluster.nodes[0].labels.remove("zone");
    let member = pod(&[("app", "db")], &affinity_rules(&[affinity_term("db", "zone", "")]));
    assert_eq!(cluster.allowed_nodes(&member), ["node2", "node3", "node4"]);
    assert_eq!(cluster.refusals_by_node(&member)[0], Err(Conflict::NoTopologyKey { topology_key: "zone".to_owned() }));
    assert!(
        cluster.allowed_nodes(&TestPod { labels: Labels::new(), ..member.clone() }).is_empty(),
        "the pod is not in the group"
    );
    assert_eq!(cluster.place_on_first_allowed_node(&member).as_deref(), Some("node2"));
    assert_eq!(cluster.allowed_nodes(&member), ["node2"], "the others of the group follow");
    cluster.pods[0].node = "gone".to_owned();
    assert_eq!(cluster.allowed_nodes(&member).len(), 3, "a pod on a node that is gone is in no domain");
}

#[test]
fn all_affinity_terms_must_match_one_pod() {
    let mut cluster = two_zones();
    let both = pod(&[("app", "x")], &affinity_rules(&[affinity_term("a", "zone", ""), affinity_term("b", "zone", "")]));
    cluster.pods = vec![pod(&[("app", "a")], "{}").on_node("node1"), pod(&[("app", "b")], "{}").on_node("node1")];
    assert!(cluster.allowed_nodes(&both).is_empty());
    let either = r#"{"labelSelector": {"matchExpressions": [{"key": "app", "operator": "Exists"}]}, "topologyKey": "kubernetes.io/hostname"}"#;
    let both = pod(&[("app", "x")], &affinity_rules(&[affinity_term("a", "zone", ""), either.to_owned()]));
    assert_eq!(cluster.allowed_nodes(&both), ["node1"]);
}

#[test]
fn a_node_without_the_topology_key_never_breaks_anti_affinity() {
    let mut cluster = two_zones();
    let lone = pod(&[("app", "db")], &anti_affinity_rules(&[affinity_term("db", "zone", "")]));
    cluster.pods.push(lone.clone().on_node("node1"));
    assert_eq!(cluster.allowed_nodes(&lone), ["node3", "node4"]);
    cluster.nodes[0].labels.remove("zone");
    assert_eq!(cluster.allowed_nodes(&lone).len(), 4);
}

#[test]
fn terms_select_namespaces_as_kubernetes_does() {
    let mut cluster = cluster(&[("n1", "a")]);
    cluster.namespaces.insert("default".to_owned(), Labels::new());
    cluster.namespaces.insert("red".to_owned(), labels(&[("team", "red")]));
    cluster.namespaces.insert("blue".to_owned(), labels(&[("team", "blue")]));
    let team = r#", "namespaceSelector": {"matchLabels": {"team": "red"}}"#;
    let blue_or_team = format!(r#"{team}, "namespaces": ["blue"]"#);
    for (more, namespaces) in [
        ("", ["default"].as_slice()),
        (r#", "namespaces": ["blue"]"#, &["blue"]),
        (r#", "namespaceSelector": {}"#, &["default", "red", "blue", "unknown"]),
        (team, &["red"]),
        (&blue_or_team, &["red", "blue"]),
    ] {
        for namespace in ["default", "red", "blue", "unknown"] {
            cluster.pods = vec![pod(&[("app", "x")], "{}").in_namespace(namespace).on_node("n1")];
            let selected = namespaces.contains(&namespace);
            let beside = pod(&[], &affinity_rules(&[affinity_term("x", "zone", more)]));
            assert_eq!(!cluster.allowed_nodes(&beside).is_empty(), selected, "{namespace} by {more:?}");
            // If the labels of a namespace are unknown, anti-affinity excludes the node.
            let unsure = namespace == "unknown" && more.contains("team");
            let away = pod(&[], &anti_affinity_rules(&[affinity_term("x", "zone", more)]));
            assert_eq!(cluster.allowed_nodes(&away).is_empty(), selected || unsure, "{namespace} by {more:?}");
        }
    }
}

#[test]
fn a_pod_is_not_the_first_of_its_group_if_another_pod_may_match() {
    let mut cluster = two_zones();
    cluster.namespaces.insert("default".to_owned(), labels(&[("team", "red")]));
    let more = r#", "namespaceSelector": {"matchLabels": {"team": "red"}}"#;
    let member = pod(&[("app", "x")], &affinity_rules(&[affinity_term("x", "zone", more)]));
    assert_eq!(cluster.allowed_nodes(&member).len(), 4);
    cluster.pods.push(pod(&[("app", "x")], "{}").in_namespace("unknown").on_node("node1"));
    assert!(cluster.allowed_nodes(&member).is_empty());
}

#[test]
fn a_further_pod_runs_in_the_zone_with_fewer_pods() {
    // "Example: one topology spread constraint": three pods on node1, node2 and node3.
    let mut cluster = two_zones();
    cluster.pods = ["node1", "node2", "node3"].map(|node| pod(FOO_LABELS, "{}").on_node(node)).into();
    let mypod = pod(FOO_LABELS, &spread_rules(&[spread_constraint("zone", "")]));
    assert_eq!(cluster.allowed_nodes(&mypod), ["node3", "node4"]);
    assert_eq!(
        cluster.refusals_by_node(&mypod)[0],
        Err(Conflict::Spread { topology_key: "zone".to_owned(), max_skew: 1 })
    );
    let two = spread_constraint("zone", "").replace(r#""maxSkew": 1"#, r#""maxSkew": 2"#);
    assert_eq!(cluster.allowed_nodes(&pod(FOO_LABELS, &spread_rules(&[two]))).len(), 4);
    let soft = spread_constraint("zone", "").replace("DoNotSchedule", "ScheduleAnyway");
    assert_eq!(cluster.allowed_nodes(&pod(FOO_LABELS, &spread_rules(&[soft]))).len(), 4);
    assert_eq!(
        cluster.allowed_nodes(&pod(&[], &spread_rules(&[spread_constraint("zone", "")]))).len(),
        4,
        "the pod does not count itself"
    );
    // "Example: multiple topology spread constraints".
    let mypod = pod(FOO_LABELS, &spread_rules(&[spread_constraint("zone", ""), spread_constraint(HOSTNAME_KEY, "")]));
    assert_eq!(cluster.allowed_nodes(&mypod), ["node4"]);
}

#[test]
fn conflicting_spread_constraints_allow_no_node() {
    // "Example: conflicting topology spread constraints": two zones, three nodes.
    let mut cluster = cluster(&[("node1", "zoneA"), ("node2", "zoneA"), ("node3", "zoneB")]);
    cluster.pods = ["node1", "node1", "node2", "node3", "node3"].map(|node| pod(FOO_LABELS, "{}").on_node(node)).into();
    let mypod = pod(FOO_LABELS, &spread_rules(&[spread_constraint("zone", ""), spread_constraint(HOSTNAME_KEY, "")]));
    assert!(cluster.allowed_nodes(&mypod).is_empty());
}

#[test]
fn three_zones_fill_evenly() {
    let mut cluster = cluster(&[("n1", "a"), ("n2", "b"), ("n3", "c")]);
    let replica = pod(FOO_LABELS, &spread_rules(&[spread_constraint("zone", "")]));
    let placed: Vec<_> = (0..9).filter_map(|_| cluster.place_on_first_allowed_node(&replica)).collect();
    assert_eq!(placed, ["n1", "n2", "n3", "n1", "n2", "n3", "n1", "n2", "n3"]);
}

#[test]
fn node_affinity_excludes_zones_unless_the_policy_ignores_it() {
    // "Example: topology spread constraints with node affinity": zoneC is excluded, so it does not
    // count as the emptiest zone.
    let mut cluster = two_zones();
    cluster.nodes.push(node("node5", "zoneC"));
    cluster.pods = ["node1", "node2", "node3"].map(|node| pod(FOO_LABELS, "{}").on_node(node)).into();
    let not_c = r#"{"affinity": [{"matchExpressions": [{"key": "zone", "operator": "NotIn", "values": ["zoneC"]}]}]}"#;
    let mut mypod = pod(FOO_LABELS, &spread_rules(&[spread_constraint("zone", "")]));
    mypod.pod = serde_json::from_str(not_c).expect("a pod");
    assert_eq!(cluster.allowed_nodes(&mypod), ["node3", "node4", "node5"], "this check ignores node affinity");
    mypod.rules =
        pod(FOO_LABELS, &spread_rules(&[spread_constraint("zone", r#", "nodeAffinityPolicy": "Ignore""#)])).rules;
    assert_eq!(cluster.allowed_nodes(&mypod), ["node5"]);
    // A node selector is part of node affinity.
    mypod.pod = Pod { node_selector: labels(&[("zone", "zoneA")]), ..Pod::default() };
    mypod.rules = pod(FOO_LABELS, &spread_rules(&[spread_constraint("zone", "")])).rules;
    assert_eq!(cluster.allowed_nodes(&mypod), ["node1", "node2", "node3", "node4", "node5"]);
}

#[test]
fn taints_exclude_zones_if_the_policy_honors_them() {
    let mut cluster = two_zones();
    cluster.pods = vec![pod(FOO_LABELS, "{}").on_node("node1")];
    for node in &mut cluster.nodes[2..] {
        node.taints = vec![taint("gpu")];
    }
    let mut mypod = pod(FOO_LABELS, &spread_rules(&[spread_constraint("zone", "")]));
    assert_eq!(cluster.allowed_nodes(&mypod), ["node3", "node4"], "taints are ignored by default");
    mypod.rules =
        pod(FOO_LABELS, &spread_rules(&[spread_constraint("zone", r#", "nodeTaintsPolicy": "Honor""#)])).rules;
    assert_eq!(cluster.allowed_nodes(&mypod).len(), 4);
    mypod.pod = serde_json::from_str(r#"{"tolerations": [{"key": "gpu", "operator": "Exists"}]}"#).expect("a pod");
    assert_eq!(cluster.allowed_nodes(&mypod), ["node3", "node4"]);
}

#[test]
fn missing_domains_below_the_minimum_count_as_empty() {
    let mut cluster = two_zones();
    cluster.pods = ["node1", "node3"].map(|node| pod(FOO_LABELS, "{}").on_node(node)).into();
    let with = |more: &str| pod(FOO_LABELS, &spread_rules(&[spread_constraint("zone", more)]));
    assert_eq!(cluster.allowed_nodes(&with("")).len(), 4);
    assert_eq!(cluster.allowed_nodes(&with(r#", "minDomains": 2"#)).len(), 4);
    assert!(cluster.allowed_nodes(&with(r#", "minDomains": 3"#)).is_empty());
}

#[test]
fn spread_counts_only_running_pods_of_the_namespace_on_nodes_with_all_keys() {
    let replica = pod(FOO_LABELS, &spread_rules(&[spread_constraint("zone", ""), spread_constraint("rack", "")]));
    let mut cluster = two_zones();
    for node in &mut cluster.nodes {
        node.labels.insert("rack".to_owned(), "r".to_owned() + &node.name);
    }
    cluster.pods = vec![pod(FOO_LABELS, "{}").on_node("node1")];
    assert_eq!(cluster.allowed_nodes(&replica), ["node3", "node4"]);
    for (pod, why) in [
        (pod(FOO_LABELS, "{}").on_node("node1").terminating(), "the pod terminates"),
        (pod(FOO_LABELS, "{}").on_node("node1").in_namespace("other"), "the pod is in another namespace"),
        (pod(&[], "{}").on_node("node1"), "the pod has other labels"),
        (pod(FOO_LABELS, "{}").on_node("gone"), "the node does not exist"),
    ] {
        cluster.pods = vec![pod];
        assert_eq!(cluster.allowed_nodes(&replica).len(), 4, "{why}");
    }
    cluster.pods = vec![pod(FOO_LABELS, "{}").on_node("node1")];
    cluster.nodes[0].labels.remove("rack");
    assert_eq!(cluster.allowed_nodes(&replica), ["node2", "node3", "node4"], "node1 is in no domain of either key");
    assert_eq!(cluster.refusals_by_node(&replica)[0], Err(Conflict::NoTopologyKey { topology_key: "rack".to_owned() }));
}

#[test]
fn match_label_keys_separate_revisions() {
    let mut cluster = two_zones();
    let revision = |hash: &'static str| [("foo", "bar"), ("pod-template-hash", hash)];
    cluster.pods = vec![pod(&revision("old"), "{}").on_node("node1")];
    let by_revision = spread_rules(&[spread_constraint("zone", r#", "matchLabelKeys": ["pod-template-hash"]"#)]);
    assert_eq!(cluster.allowed_nodes(&pod(&revision("new"), &by_revision)).len(), 4);
    assert_eq!(cluster.allowed_nodes(&pod(&revision("old"), &by_revision)), ["node3", "node4"]);
    assert_eq!(
        cluster.allowed_nodes(&pod(FOO_LABELS, &by_revision)),
        ["node3", "node4"],
        "a key that it does not have is ignored"
    );
}

#[test]
fn a_missing_selector_and_an_unknown_operator_select_nothing() {
    let mut cluster = two_zones();
    cluster.pods = vec![pod(FOO_LABELS, "{}").on_node("node1")];
    let anti =
        |selector: &str| pod(FOO_LABELS, &format!(r#"{{"antiAffinity": [{{{selector}"topologyKey": "zone"}}]}}"#));
    let with = |one: &str| anti(&format!(r#""labelSelector": {{"matchExpressions": [{one}]}}, "#));
    for (nodes, subject) in [
        (4, anti("")),
        (2, anti(r#""labelSelector": {}, "#)),
        (2, with(r#"{"key": "foo", "operator": "In", "values": ["x", "bar"]}"#)),
        (2, with(r#"{"key": "other", "operator": "NotIn", "values": ["x"]}"#)),
        (2, with(r#"{"key": "foo", "operator": "Exists"}"#)),
        (4, with(r#"{"key": "foo", "operator": "DoesNotExist"}"#)),
        (4, with(r#"{"key": "foo", "operator": "Like", "values": ["bar"]}"#)),
        (4, with(r#"{"key": "foo", "operator": "Lt", "values": ["9"]}"#)),
    ] {
        assert_eq!(cluster.allowed_nodes(&subject).len(), nodes, "{:?}", subject.rules);
    }
    // Label selectors have no `Lt`. In a node selector, 3 would be less than 9 and would match.
    cluster.pods[0].labels = labels(&[("foo", "3")]);
    assert_eq!(cluster.allowed_nodes(&with(r#"{"key": "foo", "operator": "Lt", "values": ["9"]}"#)).len(), 4);
    let none = r#"{"spread": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]}"#;
    assert_eq!(cluster.allowed_nodes(&pod(FOO_LABELS, none)).len(), 4);
    let all = none.replace(r#""maxSkew""#, r#""labelSelector": {}, "maxSkew""#);
    assert_eq!(
        cluster.allowed_nodes(&pod(FOO_LABELS, &all)).len(),
        4,
        "the scheduler counts no pods for an empty selector"
    );
}

#[test]
fn host_ports_conflict_on_one_address_or_on_all() {
    let mut cluster = cluster(&[("n1", "a"), ("n2", "a")]);
    let with = |ip: &str, protocol: &str, port: u16| {
        pod(&[], &format!(r#"{{"ports": [{{"ip": "{ip}", "protocol": "{protocol}", "port": {port}}}]}}"#))
    };
    for (conflict, there, mine) in [
        (true, with("", "", 8080), with("", "TCP", 8080)),
        (true, with("0.0.0.0", "TCP", 8080), with("10.0.0.1", "TCP", 8080)),
        (true, with("10.0.0.1", "TCP", 8080), with("", "TCP", 8080)),
        (true, with("10.0.0.1", "TCP", 8080), with("10.0.0.1", "TCP", 8080)),
        (false, with("10.0.0.1", "TCP", 8080), with("10.0.0.2", "TCP", 8080)),
        (false, with("", "UDP", 8080), with("", "", 8080)),
        (false, with("", "TCP", 8081), with("", "TCP", 8080)),
        (false, with("", "TCP", 0), with("", "TCP", 0)),
    ] {
        cluster.pods = vec![there.terminating().on_node("n1")];
        let expected = if conflict { Err(Conflict::HostPort(8080)) } else { Ok(()) };
        assert_eq!(cluster.refusals_by_node(&mine), [expected, Ok(())], "{:?} {:?}", cluster.pods[0].rules, mine.rules);
    }
}

#[test]
fn a_bound_volume_restricts_the_pod_to_its_zone() {
    let cluster = two_zones();
    let terms = |json: &str| serde_json::from_str(json).expect("terms");
    let in_zone = |zone: &str| {
        terms(&format!(
            r#"[{{"matchExpressions": [{{"key": "zone", "operator": "In", "values": ["{zone}"]}}]}},
                {{"matchExpressions": [{{"key": "zone", "operator": "In", "values": ["elsewhere"]}}]}}]"#
        ))
    };
    let with = |volumes: &[Vec<_>]| TestPod { volumes: volumes.to_vec(), ..pod(&[], "{}") };
    assert_eq!(cluster.allowed_nodes(&with(&[in_zone("zoneB")])), ["node3", "node4"]);
    assert_eq!(cluster.refusals_by_node(&with(&[in_zone("zoneB")]))[0], Err(Conflict::Volume));
    assert!(cluster.allowed_nodes(&with(&[in_zone("zoneA"), in_zone("zoneB")])).is_empty());
    assert_eq!(cluster.allowed_nodes(&with(&[Vec::new()])).len(), 4);
    let name = r#"[{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node1"]}]}]"#;
    assert!(cluster.allowed_nodes(&with(&[terms(name)])).is_empty(), "the scheduler compares only labels");
}

#[test]
fn permanent_conflicts_are_reported_first() {
    let key = || "zone".to_owned();
    for (conflict, passes) in [
        (Conflict::Volume, false),
        (Conflict::NoTopologyKey { topology_key: key() }, false),
        (Conflict::TooManyRules, false),
        (Conflict::PodAffinity { topology_key: key() }, true),
        (Conflict::PodAntiAffinity { topology_key: key() }, true),
        (Conflict::AntiAffinityOf { topology_key: key() }, true),
        (Conflict::Spread { topology_key: key(), max_skew: 1 }, true),
        (Conflict::HostPort(80), true),
        (Conflict::Predecessor, true),
    ] {
        assert_eq!(conflict.is_temporary(), passes, "{conflict}");
    }
    let mut cluster = cluster(&[("n1", "a")]);
    let rules = r#"{"ports": [{"port": 80}], "affinity": [{"topologyKey": "rack"}]}"#;
    cluster.pods = vec![pod(&[], rules).on_node("n1")];
    let subject = pod(&[], rules);
    assert_eq!(cluster.refusals_by_node(&subject), [Err(Conflict::NoTopologyKey { topology_key: "rack".to_owned() })]);
}

#[test]
fn a_pod_without_rules_reads_no_nodes_and_only_repelling_pods() {
    let subject = pod(FOO_LABELS, "{}");
    let other = pod(&[], &anti_affinity_rules(&[affinity_term("somebody", "zone", "")]));
    let repelling = PlacedPod {
        namespace: &other.namespace,
        labels: &other.labels,
        node: "n1",
        rules: &other.rules,
        terminating: false,
    };
    let nodes = std::iter::from_fn(|| -> Option<&Node> { panic!("nodes are read") });
    let all = std::iter::from_fn(|| -> Option<PlacedPod<'_>> { panic!("all pods are read") });
    let checker = NodeChecker::new(subject.as_subject(), nodes, all, [repelling], |_| panic!("namespaces are read"));
    assert_eq!(checker.check_node(&node("n1", "a")), Ok(()));
}

#[test]
fn the_limit_bounds_the_cost_of_too_many_rules() {
    let selector = r#", "namespaceSelector": {"matchLabels": {"team": "red"}}"#;
    let terms: Vec<_> = (0..MAX_REQUIREMENTS).map(|_| affinity_term("x", "zone", selector)).collect();
    let large = pod(&[("app", "x")], &anti_affinity_rules(&terms));
    let keys: Vec<_> = (0..300).map(|index| spread_constraint(&format!("key{index}"), "")).collect();
    let wide = pod(FOO_LABELS, &spread_rules(&keys));
    let cluster = two_zones();
    for subject in [&large, &wide] {
        assert!(subject.rules.are_too_many());
        assert!(cluster.refusals_by_node(subject).iter().all(|verdict| *verdict == Err(Conflict::TooManyRules)));
        // The checker refuses a pod with too many rules before it reads any pod or node.
        let all = || std::iter::from_fn(|| -> Option<PlacedPod<'_>> { panic!("pods are read") });
        let nodes = std::iter::from_fn(|| -> Option<&Node> { panic!("nodes are read") });
        let _ = NodeChecker::new(subject.as_subject(), nodes, all(), all(), |_| None);
    }
    assert!(!pod(FOO_LABELS, &spread_rules(&keys[..80])).rules.are_too_many());
    // A running pod can also have too many rules. Only rules up to the limit count.
    let requested = Cell::new(0);
    let (rules, labels) = (Rules::default(), labels(&[("app", "x")]));
    let subject = Subject { namespace: "default", labels: &labels, rules: &rules, pod: &Pod::default(), volumes: &[] };
    let placed_pod =
        PlacedPod { namespace: "default", labels: &labels, node: "node1", rules: &large.rules, terminating: false };
    let checker = NodeChecker::new(subject, &cluster.nodes, [], [placed_pod], |_| {
        requested.set(requested.get() + 1);
        None
    });
    assert!(checker.check_node(&cluster.nodes[0]).is_err() && checker.check_node(&cluster.nodes[2]).is_ok());
    assert!((1..=MAX_REQUIREMENTS).contains(&requested.get()) && requested.get() < terms.len(), "{}", requested.get());
}
