//! Tests where replicas of one controller are placed, and what the gatekeeper learns from pods.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::names::REPLICA_PLACEMENT_ANNOTATION;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::world::{MPS_RESOURCE, TestCluster, add_replica_set_pod, at, reconcile, released, reservation};
use crate::placement::actions::Actions;
use crate::placement::gatekeeper::Gatekeeper;

/// Returns the GPUs of the released pods, by pod.
fn gpus_by_pod(actions: &Actions) -> BTreeMap<String, String> {
    let gpu = |release| {
        let mut nodes = reservation(release).nodes.into_values();
        nodes.next().and_then(|mut units| units.pop()).map(|units| units.device).unwrap_or_default()
    };
    actions.releases.iter().map(|release| (release.pod.clone(), gpu(release))).collect()
}

/// Returns the number of different GPUs of the released pods.
fn count_gpus(actions: &Actions) -> usize {
    gpus_by_pod(actions).into_values().collect::<BTreeSet<String>>().len()
}

/// Returns two nodes of two GPUs, and replicas of one controller.
fn cluster_with_replicas(replicas: usize) -> TestCluster {
    let world = TestCluster::default().node("n1", &[0, 0]).node("n2", &[0, 0]);
    (0..replicas).fold(world, |world, at| add_replica_set_pod(world, &format!("r{at}"), json!({})))
}

fn annotate_all_pods(world: &mut TestCluster, value: &str) {
    for name in world.pods.keys().cloned().collect::<Vec<_>>() {
        world.change(
            |world| &mut world.pods,
            &name,
            |pod| pod["metadata"]["annotations"] = json!({ REPLICA_PLACEMENT_ANNOTATION: value }),
        );
    }
}

/// Assigns all GPUs to a policy with this placement of replicas.
fn set_policy(world: &mut TestCluster, placement: &str) {
    let policy = json!({"apiVersion": "cleave.dev/v1alpha1", "kind": "SharingPolicy", "metadata": {"name": "shares"},
        "spec": {"mode": "Mps", "mps": {"units": 10}, "replicaPlacement": placement}});
    world.policies.insert("shares".to_owned(), policy);
    for node in world.gpu_nodes.keys().cloned().collect::<Vec<_>>() {
        world.change(
            |world| &mut world.gpu_nodes,
            &node,
            |object| {
                let gpus = object["status"]["gpus"].as_array().unwrap();
                let partition = json!({"mps": {"multiUser": true, "computeMode": "ExclusiveProcess",
                    "slices": [{"resource": MPS_RESOURCE, "count": 10}]}});
                let spec =
                    gpus.iter().map(|gpu| json!({"uuid": gpu["uuid"], "policy": "shares", "partition": partition}));
                let spec: Vec<Value> = spec.collect();
                object["spec"] = json!({ "gpus": spec });
            },
        );
    }
}

#[test]
fn replicas_use_different_gpus_and_nodes_before_they_share_a_gpu() {
    let mut world = cluster_with_replicas(2);
    let mut keeper = Gatekeeper::default();
    let actions = reconcile(&mut keeper, &world, 0);
    let nodes: BTreeSet<String> =
        actions.releases.iter().flat_map(|release| reservation(release).nodes.into_keys()).collect();
    assert_eq!(nodes.len(), 2, "two replicas use two nodes");
    actions.releases.iter().for_each(|release| assert!(world.apply_release(release)));
    let first: BTreeSet<String> = gpus_by_pod(&actions).into_values().collect();
    for at in 2..6 {
        world = add_replica_set_pod(world, &format!("r{at}"), json!({}));
    }
    // A new leader finds the nodes of the replicas.
    for mut keeper in [keeper, Gatekeeper::default()] {
        let actions = reconcile(&mut keeper, &world, 1);
        let gpus: Vec<String> = gpus_by_pod(&actions).into_values().collect();
        assert!(!first.contains(&gpus[0]) && !first.contains(&gpus[1]) && gpus[0] != gpus[1], "{gpus:?}");
        assert_eq!(gpus.len(), 4, "replicas share GPUs if there are no others");
    }
}

#[test]
fn pods_without_a_controller_and_pods_of_other_controllers_share_a_gpu() {
    let world = cluster_with_replicas(0).pod("a", 2).pod("b", 2).pod("c", 2);
    assert_eq!(count_gpus(&reconcile(&mut Gatekeeper::default(), &world, 0)), 1);
    let mut world = cluster_with_replicas(3);
    for (name, controller) in [("r0", "one"), ("r1", "two"), ("r2", "three")] {
        world.change(
            |world| &mut world.pods,
            &format!("team/{name}"),
            |pod| pod["metadata"]["ownerReferences"][0]["uid"] = json!(controller),
        );
    }
    assert_eq!(count_gpus(&reconcile(&mut Gatekeeper::default(), &world, 0)), 1);
}

#[test]
fn pods_of_a_job_share_a_gpu_unless_their_annotation_requests_spreading() {
    let mut world = cluster_with_replicas(4);
    for at in 0..4 {
        world.change(
            |world| &mut world.pods,
            &format!("team/r{at}"),
            |pod| pod["metadata"]["ownerReferences"][0]["kind"] = json!("Job"),
        );
    }
    assert_eq!(count_gpus(&reconcile(&mut Gatekeeper::default(), &world, 0)), 1);
    annotate_all_pods(&mut world, "Spread");
    assert_eq!(count_gpus(&reconcile(&mut Gatekeeper::default(), &world, 0)), 4);
}

#[test]
fn a_policy_or_an_annotation_packs_replicas() {
    let mut world = cluster_with_replicas(4);
    assert_eq!(count_gpus(&reconcile(&mut Gatekeeper::default(), &world, 0)), 4);
    set_policy(&mut world, "Spread");
    assert_eq!(count_gpus(&reconcile(&mut Gatekeeper::default(), &world, 0)), 4);
    set_policy(&mut world, "Pack");
    let actions = reconcile(&mut Gatekeeper::default(), &world, 0);
    assert_eq!((actions.releases.len(), count_gpus(&actions)), (4, 1), "the policy packs");
    annotate_all_pods(&mut world, "Spread");
    assert_eq!(count_gpus(&reconcile(&mut Gatekeeper::default(), &world, 0)), 4, "the annotation overrides");
    let mut world = cluster_with_replicas(4);
    annotate_all_pods(&mut world, "Pack");
    assert_eq!(count_gpus(&reconcile(&mut Gatekeeper::default(), &world, 0)), 1);
    annotate_all_pods(&mut world, "neither");
    assert_eq!(count_gpus(&reconcile(&mut Gatekeeper::default(), &world, 0)), 4, "another value has no effect");
}

/// Returns a cluster with the node `n1`, whose two GPUs have 10 and 6 free shares. 60 pods of 6 or
/// 4 shares already run on a node that is not in the cluster.
fn cluster_with_past_pods() -> TestCluster {
    let mut world = TestCluster::default();
    for at in 0..60 {
        let name = format!("old{at}");
        world = world.pod_with(&name, if at % 2 == 0 { 6 } else { 4 }, json!({}));
        world.change(
            |world| &mut world.pods,
            &format!("team/{name}"),
            |pod| {
                pod["spec"]["schedulingGates"] = json!([]);
                pod["spec"]["nodeName"] = json!("elsewhere");
            },
        );
    }
    world.node("n1", &[0, 4])
}

#[test]
fn after_a_restart_typical_requests_are_learned_from_running_pods() {
    // The second GPU has 6 free shares, which a typical pod of 6 shares can use.
    let gpu = |world: TestCluster| {
        let world = world.pod("new", 4);
        gpus_by_pod(&reconcile(&mut Gatekeeper::default(), &world, 0))["team/new"].clone()
    };
    assert_eq!(gpu(TestCluster::default().node("n1", &[0, 4])), "n1-GPU-1", "without a history: the tightest fit");
    assert_eq!(gpu(cluster_with_past_pods()), "n1-GPU-0");
}

#[test]
fn typical_requests_are_learned_from_arriving_pods() {
    let mut world = TestCluster::default().node("full", &[10]);
    let mut keeper = Gatekeeper::default();
    for at in 0..60 {
        world = world.pod(&format!("p{at:02}"), if at % 2 == 0 { 6 } else { 4 });
    }
    assert_eq!(released(&reconcile(&mut keeper, &world, 0)), []);
    world.pods.clear();
    let world = world.node("n1", &[0, 4]).pod("new", 4);
    assert_eq!(gpus_by_pod(&reconcile(&mut keeper, &world, 1))["team/new"], "n1-GPU-0");
    keeper.reset();
    assert_eq!(gpus_by_pod(&reconcile(&mut keeper, &world, 2))["team/new"], "n1-GPU-1", "a new leader knows no pods");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Spreading and learning only order the GPUs, so a pod that fits on a GPU is always released.
    #[test]
    fn a_replica_that_fits_is_always_released(
        used in prop::collection::vec(prop::collection::vec(0_u32..=10, 1..4), 1..4),
        replicas in 1_usize..12,
        pack in any::<bool>(),
        learned in any::<bool>(),
    ) {
        let mut world = if learned { cluster_with_past_pods() } else { TestCluster::default() };
        world.nodes.remove("n1");
        world.gpu_nodes.clear();
        for (at, used) in used.iter().enumerate() {
            world = world.node(&format!("m{at}"), used);
        }
        for at in 0..replicas {
            world = add_replica_set_pod(world, &format!("r{at:02}"), json!({}));
        }
        if pack {
            annotate_all_pods(&mut world, "Pack");
        }
        let room: u32 = used.iter().flatten().map(|used| (10 - used) / 2).sum();
        let actions = Gatekeeper::default().reconcile(&world.cluster(), &BTreeMap::new(), at(0));
        prop_assert_eq!(actions.releases.len(), replicas.min(room as usize));
    }
}
