//! Tests that pods are released only to nodes that their rules and volumes allow.
use std::collections::{BTreeMap, BTreeSet};

use cleave_plan::affinity::HOSTNAME;
use serde_json::json;

use super::world::{TestCluster, add_replica_set_pod, nodes_of, reconcile, released};
use crate::placement::gatekeeper::Gatekeeper;

const ZONE: &str = "topology.kubernetes.io/zone";

/// Creates a cluster of these nodes, each with its zone.
fn nodes_in_zones(nodes: &[(&str, &str)]) -> TestCluster {
    let mut world = TestCluster::default();
    for (name, zone) in nodes {
        world = world.node(name, &[0]);
        world.change(|world| &mut world.nodes, name, |node| node["metadata"]["labels"][ZONE] = json!(zone));
    }
    world
}

#[test]
fn replicas_with_anti_affinity_are_released_to_different_nodes_in_one_reconcile() {
    let apart = json!({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"labelSelector": {"matchLabels": {"app": "web"}}, "topologyKey": HOSTNAME}]}}});
    let names = ["n1", "n2", "n3", "n4", "n5", "n6"];
    let mut world = names.iter().fold(TestCluster::default(), |world, name| world.node(name, &[0]));
    for at in 0..7 {
        world = add_replica_set_pod(world, &format!("r{at}"), apart.clone());
    }
    let mut keeper = Gatekeeper::default();
    let actions = reconcile(&mut keeper, &world, 0);
    let nodes: BTreeSet<String> = nodes_of(&actions).into_iter().flatten().collect();
    assert_eq!((actions.releases.len(), nodes.len()), (6, 6), "{actions:?}");
    let message = &actions.waiting["team/r6"].message;
    assert!(
        message.contains("6 nodes (n1, n2, n3, ...) are excluded: a pod in the node's topology domain"),
        "{message}"
    );
    // The released pods still count after the watch has reported them.
    actions.releases.iter().for_each(|release| assert!(world.apply_release(release)));
    assert_eq!(released(&reconcile(&mut keeper, &world, 1)), []);
    assert_eq!(released(&reconcile(&mut Gatekeeper::default(), &world, 2)), [], "a new leader makes the same decision");
    // A pod's anti-affinity also excludes pods without rules.
    let world = world.pod("plain", 2);
    let mut alike = world.clone();
    alike.change(|world| &mut world.pods, "team/plain", |pod| pod["metadata"]["labels"] = json!({"app": "web"}));
    assert_eq!(released(&reconcile(&mut Gatekeeper::default(), &alike, 3)), []);
    assert_eq!(released(&reconcile(&mut Gatekeeper::default(), &world, 3)), [("team/plain", "reserved")]);
}

/// The scheduler counts only the domains that the pod's node affinity allows. A released pod allows
/// only one node, so only one domain counts. With `minDomains: 2`, the scheduler compares with a
/// domain without pods.
#[test]
fn a_pod_with_min_domains_is_not_released_to_a_node_that_the_scheduler_then_refuses() {
    for (policy, expected) in [("Honor", 2), ("Ignore", 3)] {
        let spread = json!({"topologySpreadConstraints": [{"maxSkew": 1, "minDomains": 2, "topologyKey": HOSTNAME,
            "whenUnsatisfiable": "DoNotSchedule", "nodeAffinityPolicy": policy, "labelSelector": {"matchLabels": {"app": "web"}}}]});
        let mut world = TestCluster::default().node("n1", &[0]).node("n2", &[0]);
        for at in 0..3 {
            world = add_replica_set_pod(world, &format!("r{at}"), spread.clone());
        }
        let actions = reconcile(&mut Gatekeeper::default(), &world, 0);
        assert_eq!((actions.releases.len(), actions.waiting.len()), (expected, 3 - expected), "{policy}");
    }
}

#[test]
fn replicas_are_spread_over_zones_by_their_constraint() {
    let spread = json!({"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": ZONE, "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"app": "web"}}}]});
    let all = [("a1", "a"), ("a2", "a"), ("b1", "b"), ("c1", "c")];
    let mut world = nodes_in_zones(&all);
    for at in 0..6 {
        world = add_replica_set_pod(world, &format!("r{at}"), spread.clone());
    }
    let actions = reconcile(&mut Gatekeeper::default(), &world, 0);
    let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
    for node in nodes_of(&actions).into_iter().flatten() {
        *counts.entry(all.iter().find(|(name, _)| *name == node).unwrap().1).or_default() += 1;
    }
    assert_eq!(counts, BTreeMap::from([("a", 2), ("b", 2), ("c", 2)]));
}

#[test]
fn optional_fields_of_a_spread_constraint_are_evaluated() {
    let in_a = json!({ZONE: "a"});
    let cases = [
        // Each case contains fields, a node selector, whether the node of zone b has a taint, and
        // how many of four replicas are released.
        (json!({}), json!({}), false, 4),
        // The scheduler counts only the node to which a pod is released, so each node gets one pod.
        (json!({"minDomains": 2}), json!({}), false, 2),
        (json!({"minDomains": 2, "nodeAffinityPolicy": "Ignore"}), json!({}), false, 4),
        (json!({"minDomains": 3}), json!({}), false, 2),
        (json!({"minDomains": 3, "matchLabelKeys": ["revision"]}), json!({}), false, 4),
        (json!({}), json!({}), true, 1),
        (json!({"nodeTaintsPolicy": "Honor"}), json!({}), true, 4),
        (json!({}), in_a.clone(), false, 4),
        (json!({"nodeAffinityPolicy": "Ignore"}), in_a, false, 1),
    ];
    for (fields, selector, tainted, expected) in cases {
        let mut constraint = json!({"maxSkew": 1, "topologyKey": ZONE, "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {"app": "web"}}});
        constraint.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let mut world = nodes_in_zones(&[("a1", "a"), ("b1", "b")]);
        if tainted {
            let taints = json!([{"key": "team", "effect": "NoSchedule"}]);
            world.change(|world| &mut world.nodes, "b1", |node| node["spec"]["taints"] = taints);
        }
        for at in 0..4 {
            let spec = json!({"topologySpreadConstraints": [constraint], "nodeSelector": selector});
            world = add_replica_set_pod(world, &format!("r{at}"), spec);
            let label = |pod: &mut serde_json::Value| pod["metadata"]["labels"]["revision"] = json!(at.to_string());
            world.change(|world| &mut world.pods, &format!("team/r{at}"), label);
        }
        let actions = reconcile(&mut Gatekeeper::default(), &world, 0);
        assert_eq!(actions.releases.len(), expected, "{fields} {selector} tainted: {tainted}");
    }
}

#[test]
fn a_pod_is_released_only_to_the_node_of_its_volume() {
    let mounts = json!({"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]});
    let nodes = ["n1", "n2", "n3", "n4", "n5", "n6"];
    let mut world = nodes.iter().fold(TestCluster::default(), |world, name| world.node(name, &[0]));
    world.volume_claims =
        vec![json!({"metadata": {"name": "data", "namespace": "team"}, "spec": {"volumeName": "pv"}})];
    world.volumes =
        vec![json!({"metadata": {"name": "pv"}, "spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": HOSTNAME, "operator": "In", "values": ["n6"]}]}]}}}})];
    let actions = reconcile(&mut Gatekeeper::default(), &world.clone().pod_with("a", 2, mounts.clone()), 0);
    assert_eq!(nodes_of(&actions), [["n6"]]);
    // A volume without node affinity allows every node, so the pod is released to one node.
    world.volumes = vec![json!({"metadata": {"name": "pv"}, "spec": {}})];
    let actions = reconcile(&mut Gatekeeper::default(), &world.pod_with("a", 2, mounts), 0);
    assert_eq!(nodes_of(&actions)[0].len(), 1);
}

#[test]
fn a_released_replica_counts_before_the_watch_reports_its_release() {
    let apart = json!({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"labelSelector": {"matchLabels": {"app": "web"}}, "topologyKey": HOSTNAME}]}}});
    let world = add_replica_set_pod(TestCluster::default().node("n1", &[0]).node("n2", &[0]), "r0", apart.clone());
    let mut keeper = Gatekeeper::default();
    let first = nodes_of(&reconcile(&mut keeper, &world, 0));
    // The release is written, but the watch still shows the pod at the gate.
    let world = add_replica_set_pod(world, "r1", apart);
    let second = nodes_of(&reconcile(&mut keeper, &world, 1));
    assert_eq!(second.len(), 1);
    assert_ne!(first, second);
}
