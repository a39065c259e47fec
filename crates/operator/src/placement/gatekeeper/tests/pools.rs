//! Tests pods that may use several pools of GPUs, and GPUs that no quota counts.
use std::collections::BTreeMap;

use cleave_plan::quota::Kind;
use serde_json::{Value, json};

use super::quotas::keeper;
use super::world::{ActualAllocations, TestCluster, at, nodes_of, reconcile};
use crate::evict::EvictionResult;
use crate::policies::demand::Reason;

/// Adds a quota of GPUs of one model.
pub(super) fn quota(world: &mut TestCluster, name: &str, namespaces: &[&str], model: &str, mut spec: Value) {
    spec["namespaces"] = json!(namespaces);
    spec["gpus"] = json!({"models": [model]});
    world.quotas.push(
        json!({"apiVersion": "cleave.dev/v1alpha1", "kind": "GpuQuota", "metadata": {"name": name}, "spec": spec}),
    );
}

pub(super) fn edit_gpu(world: &mut TestCluster, node: &str, edit: impl FnOnce(&mut Value)) {
    world.change(|world| &mut world.gpu_nodes, node, |object| edit(&mut object["status"]["gpus"][0]));
}

/// Returns a cluster with an H100 on node h1 and an L4 on node l1.
pub(super) fn two_models() -> TestCluster {
    let mut world = TestCluster::default().node("h1", &[0]).node("l1", &[0]);
    edit_gpu(&mut world, "l1", |gpu| gpu["model"] = json!("L4"));
    world
}

/// Adds a pod to a namespace. With a node, the pod runs there.
pub(super) fn add(
    world: &mut TestCluster,
    actual: &mut ActualAllocations,
    (namespace, name, shares): (&str, &str, u32),
    (node, priority): (Option<&str>, i32),
) {
    let mut spec = json!({"priority": priority});
    if let Some(node) = node {
        spec["nodeName"] = json!(node);
        spec["schedulingGates"] = json!([]);
        actual.given.insert(format!("{namespace}/{name}"), (format!("{node}-GPU-0"), shares));
    }
    *world = std::mem::take(world).pod_with(name, shares, spec);
    let mut pod = world.pods.remove(&format!("team/{name}")).unwrap();
    pod["metadata"]["namespace"] = json!(namespace);
    let created = jiff::Timestamp::from_second(1_000_000 - 1000 + i64::try_from(world.version).unwrap()).unwrap();
    pod["metadata"]["creationTimestamp"] = json!(created.to_string());
    world.pods.insert(format!("{namespace}/{name}"), pod);
    actual.report_on(world, 1);
}

#[test]
fn a_quota_of_one_model_does_not_lock_pods_out_of_other_gpus() {
    /// A name, and a change of the cluster.
    type Case = (&'static str, fn(&mut TestCluster));
    let cases: [Case; 4] = [
        ("no quota counts the L4", |_| {}),
        ("quotas of the L4 only count", |world| {
            quota(world, "l", &["b"], "L4", json!({"min": "1", "mode": "Count"}));
        }),
        ("the namespace is exempt", |world| {
            world.namespaces.push(json!({"metadata": {"name": "other", "labels": {"cleave.dev/allow": "quota"}}}));
            quota(world, "l", &["b"], "L4", json!({"min": "1"}));
        }),
        ("the namespace borrows in both pools", |world| quota(world, "l", &["b"], "L4", json!({"min": "1"}))),
    ];
    for (case, change) in cases {
        let (mut world, mut actual) = (two_models(), ActualAllocations::default());
        quota(&mut world, "h", &["a"], "H100", json!({"min": "1"}));
        change(&mut world);
        add(&mut world, &mut actual, ("a", "a1", 10), (Some("h1"), 0));
        // Pods without a quota use less of the H100s, so the H100s are tried first.
        add(&mut world, &mut actual, ("other", "y", 3), (Some("l1"), 0));
        add(&mut world, &mut actual, ("other", "x", 5), (None, 0));
        let actions = reconcile(&mut keeper(), &world, 9);
        assert_eq!(nodes_of(&actions), [["l1"]], "{case}: {:?}", actions.waiting);
    }
}

#[test]
fn a_pod_within_its_guarantee_uses_free_room_elsewhere_before_others_leave() {
    for is_healthy in [true, false] {
        let (mut world, mut actual) = (two_models(), ActualAllocations::default());
        quota(&mut world, "h", &["a"], "H100", json!({"min": "1"}));
        quota(&mut world, "l", &["b"], "L4", json!({"min": "1"}));
        add(&mut world, &mut actual, ("other", "borrower", 10), (Some("h1"), 0));
        add(&mut world, &mut actual, ("a", "a1", 10), (None, 0));
        edit_gpu(&mut world, "h1", |gpu| gpu["health"]["healthy"] = json!(is_healthy));
        let actions = reconcile(&mut keeper(), &world, 9);
        assert_eq!((nodes_of(&actions), actions.evictions.len()), (vec![vec!["l1".to_owned()]], 0));
    }
}

#[test]
fn a_pod_that_does_not_borrow_waits_although_another_pool_is_free() {
    let (mut world, mut actual) = (two_models(), ActualAllocations::default());
    quota(&mut world, "h", &["a"], "H100", json!({"min": "500m"}));
    quota(&mut world, "l", &["b"], "L4", json!({"min": "1"}));
    add(&mut world, &mut actual, ("a", "a1", 10), (None, 0));
    world.change(
        |world| &mut world.pods,
        "a/a1",
        |pod| pod["metadata"]["annotations"] = json!({"cleave.dev/borrow": "Never"}),
    );
    let actions = reconcile(&mut keeper(), &world, 9);
    assert_eq!((actions.releases.len(), actions.waiting["a/a1"].reason), (0, Reason::WaitsForGuarantee));
    assert!(actions.unplanned.contains("a/a1"), "no GPU is partitioned for the pod");
    // A pod on a GPU that no quota counts does not borrow.
    world.quotas.pop();
    let actions = reconcile(&mut keeper(), &world, 9);
    assert_eq!(nodes_of(&actions), [["l1"]]);
}

#[test]
fn a_pod_over_the_maximum_of_one_pool_can_use_another_pool() {
    let (mut world, mut actual) = (two_models(), ActualAllocations::default());
    quota(&mut world, "h", &["a"], "H100", json!({"max": "500m"}));
    add(&mut world, &mut actual, ("b", "b1", 6), (Some("l1"), 0));
    add(&mut world, &mut actual, ("a", "a1", 5), (Some("h1"), 0));
    add(&mut world, &mut actual, ("a", "a2", 5), (None, 0));
    let actions = reconcile(&mut keeper(), &world, 9);
    assert_eq!((actions.releases.len(), actions.waiting["a/a2"].reason), (0, Reason::OverMax));
    assert!(actions.unplanned.is_empty(), "an L4 can be partitioned for the pod");
    actual.given.remove("b/b1");
    world.pods.remove("b/b1");
    actual.report_on(&mut world, 1);
    assert_eq!(nodes_of(&reconcile(&mut keeper(), &world, 9)), [["l1"]]);
}

#[test]
fn on_gpus_that_no_quota_counts_priority_alone_decides() {
    let (mut world, mut actual) = (two_models(), ActualAllocations::default());
    quota(&mut world, "h", &["a"], "H100", json!({"min": "1"}));
    add(&mut world, &mut actual, ("a", "a1", 10), (Some("h1"), 0));
    add(&mut world, &mut actual, ("a", "low", 10), (Some("l1"), 0));
    add(&mut world, &mut actual, ("other", "high", 5), (None, 10));
    let mut keeper = keeper();
    let actions = reconcile(&mut keeper, &world, 9);
    let evicted: Vec<_> = actions.evictions.iter().map(|eviction| (&*eviction.pod, eviction.quota.is_some())).collect();
    assert_eq!(evicted, [("a/low", false)], "{:?}", actions.waiting);
    keeper.record_eviction(&actions.evictions[0], &EvictionResult::Done, at(9).up);
    world.terminate("a/low", "1970-01-12T13:46:59Z");
    for seconds in 10..13 {
        let actions = reconcile(&mut keeper, &world, seconds);
        assert_eq!((actions.evictions.len(), actions.releases.len()), (0, 0), "the pod keeps its nomination");
    }
    world.pods.remove("a/low");
    actual.given.remove("a/low");
    actual.report_on(&mut world, 1);
    assert_eq!(nodes_of(&reconcile(&mut keeper, &world, 13)), [["l1"]]);
}

#[test]
fn a_pod_keeps_its_nomination_in_the_second_pool() {
    let (mut world, mut actual) = (two_models(), ActualAllocations::default());
    quota(&mut world, "h", &["a"], "H100", json!({"min": "1"}));
    quota(&mut world, "c", &["c"], "L4", json!({}));
    quota(&mut world, "d", &["d"], "L4", json!({}));
    add(&mut world, &mut actual, ("a", "a1", 10), (Some("h1"), 0));
    add(&mut world, &mut actual, ("d", "d1", 5), (Some("l1"), 0));
    add(&mut world, &mut actual, ("d", "d2", 5), (Some("l1"), 0));
    add(&mut world, &mut actual, ("c", "c1", 5), (None, 0));
    let mut keeper = keeper();
    let actions = reconcile(&mut keeper, &world, 9);
    let evicted: BTreeMap<_, _> = actions
        .evictions
        .iter()
        .map(|eviction| (eviction.pod.as_str(), eviction.quota.as_ref().map(|quota| quota.kind)))
        .collect();
    assert_eq!(evicted, BTreeMap::from([("d/d2", Some(Kind::FairShare))]), "{:?}", actions.waiting);
    keeper.record_eviction(&actions.evictions[0], &EvictionResult::Done, at(9).up);
    world.terminate("d/d2", "1970-01-12T13:46:59Z");
    for seconds in 10..13 {
        let actions = reconcile(&mut keeper, &world, seconds);
        assert_eq!((actions.evictions.len(), actions.releases.len()), (0, 0), "{:?}", actions.waiting);
        assert!(actions.waiting["c/c1"].message.contains("terminate"), "{:?}", actions.waiting);
    }
}
