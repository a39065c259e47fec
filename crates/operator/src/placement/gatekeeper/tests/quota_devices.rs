//! Tests quotas of whole GPUs and MIG instances, and of nodes that differ.
use std::collections::BTreeMap;

use cleave_api::names::NOMINATION_ANNOTATION;
use cleave_plan::quota::Kind;
use serde_json::{Value, json};

use super::pools::{add, edit_gpu, quota};
use super::quota_amounts::{FOUR, THREE, bind, mig_cluster, used};
use super::quotas::keeper;
use super::world::{
    ActualAllocations, MPS_RESOURCE, TestCluster, at, nodes_of, reconcile, requesting, reservation, whole_gpus,
};
use crate::placement::actions::Actions;
use crate::policies::demand::Reason;

const GPU: &str = "nvidia.com/gpu";

/// Adds a waiting pod to a namespace.
fn request(world: &mut TestCluster, namespace: &str, name: &str, (resource, count): (&str, u32)) {
    *world = std::mem::take(world).pod_with(name, 0, requesting(resource, count));
    let mut pod = world.pods.remove(&format!("team/{name}")).unwrap();
    pod["metadata"]["namespace"] = json!(namespace);
    let created = jiff::Timestamp::from_second(1_000_000 - 1000 + i64::try_from(world.version).unwrap()).unwrap();
    pod["metadata"]["creationTimestamp"] = json!(created.to_string());
    world.pods.insert(format!("{namespace}/{name}"), pod);
}

fn add_quota(world: &mut TestCluster, name: &str, mut spec: Value) {
    spec["namespaces"] = json!([name]);
    world.quotas.push(
        json!({"apiVersion": "cleave.dev/v1alpha1", "kind": "GpuQuota", "metadata": {"name": name}, "spec": spec}),
    );
}

/// Makes pods of namespace `team` a gang.
fn make_gang(world: &mut TestCluster, pods: &[&str]) {
    for pod in pods {
        let annotations = json!({"cleave.dev/gang": "g", "cleave.dev/gang-size": pods.len().to_string()});
        world.change(
            |world| &mut world.pods,
            &format!("team/{pod}"),
            |pod| pod["metadata"]["annotations"] = annotations.clone(),
        );
    }
}

fn evicted(actions: &Actions) -> Vec<(&str, Option<Kind>)> {
    let quota = |eviction: &crate::placement::actions::Eviction| eviction.quota.as_ref().map(|quota| quota.kind);
    actions.evictions.iter().map(|eviction| (eviction.pod.as_str(), quota(eviction))).collect()
}

#[test]
fn mig_instances_count_against_the_maximum() {
    let mut world = mig_cluster(&["n1", "n2"]);
    for name in ["first", "second", "third"] {
        world = world.pod_with(name, 0, requesting(FOUR, 1));
    }
    world.quotas.clear();
    add_quota(&mut world, "team", json!({"max": "600m"}));
    let mut gate = keeper();
    let actions = reconcile(&mut gate, &world, 9);
    assert_eq!((actions.releases.len(), actions.waiting.len()), (1, 2), "{:?}", actions.waiting);
    assert!(actions.waiting.values().all(|wait| wait.reason == Reason::OverMax), "{:?}", actions.waiting);
    assert!(world.apply_release(&actions.releases[0]));
    assert!(world.pods[&actions.releases[0].pod]["metadata"]["labels"].is_object(), "the pod has a class");
}

#[test]
fn a_nominated_mig_instance_costs_its_part_of_the_gpu() {
    let mut world = mig_cluster(&["n1", "n2"]);
    for name in ["first", "second"] {
        world = world.pod_with(name, 0, requesting(FOUR, 1));
    }
    let nomination = json!({"until": 1_000_100, "nodes": {"n1": [{"resource": FOUR, "units": 1, "device": "n1-4g"}]}});
    world.change(
        |world| &mut world.pods,
        "team/first",
        |pod| pod["metadata"]["annotations"] = json!({NOMINATION_ANNOTATION: nomination.to_string()}),
    );
    let mut gate = keeper().with_settling_delay();
    assert_eq!(reconcile(&mut gate, &world, 1).releases.len(), 0, "nothing is decided yet");
    // Two instances of 4 slices cost more than the quota's maximum of one GPU.
    let actions = reconcile(&mut gate, &world, 9);
    assert_eq!(actions.releases.len(), 1, "{:?}", actions.releases);
}

#[test]
fn a_mig_instance_is_reclaimed_for_a_guarantee() {
    let mut world = mig_cluster(&["n1"]);
    world.quotas.clear();
    add_quota(&mut world, "a", json!({"min": "1"}));
    add_quota(&mut world, "b", json!({"min": "500m"}));
    request(&mut world, "b", "four", (FOUR, 1));
    request(&mut world, "b", "three", (THREE, 1));
    bind(&mut world, "b/three", "n1", (1, THREE));
    bind(&mut world, "b/four", "n1", (0, FOUR));
    request(&mut world, "a", "a1", (FOUR, 1));
    let actions = reconcile(&mut keeper(), &world, 9);
    assert_eq!(evicted(&actions), [("b/four", Some(Kind::Reclaim))], "{:?}", actions.waiting);
    // An instance within the guarantee of its quota is not evicted, whatever the priority.
    let mut world = mig_cluster(&["n1"]);
    world.quotas.clear();
    add_quota(&mut world, "a", json!({"min": "1"}));
    add_quota(&mut world, "b", json!({"min": "1"}));
    request(&mut world, "b", "four", (FOUR, 1));
    bind(&mut world, "b/four", "n1", (0, FOUR));
    request(&mut world, "a", "a1", (FOUR, 1));
    world.change(|world| &mut world.pods, "a/a1", |pod| pod["spec"]["priority"] = json!(1000));
    let actions = reconcile(&mut keeper(), &world, 9);
    assert_eq!((evicted(&actions).len(), actions.releases.len()), (0, 0));
    assert_eq!(actions.waiting["a/a1"].reason, Reason::NoRoom);
}

#[test]
fn whole_gpus_are_reclaimed_for_a_guarantee() {
    let mut world = whole_gpus(TestCluster::default(), "n1", &[0, 0]);
    add_quota(&mut world, "a", json!({"min": "1"}));
    add_quota(&mut world, "b", json!({"min": "1"}));
    for (name, device) in [("b1", 0), ("b2", 1)] {
        request(&mut world, "b", name, (GPU, 1));
        world.change(
            |world| &mut world.pods,
            &format!("b/{name}"),
            |pod| {
                pod["spec"]["nodeName"] = json!("n1");
                pod["spec"]["schedulingGates"] = json!([]);
            },
        );
        world.change(
            |world| &mut world.gpu_nodes,
            "n1",
            |object| {
                let gpu = &mut object["status"]["gpus"][device];
                gpu["slices"][0]["inUse"] = json!(1);
                let id = gpu["uuid"].clone();
                gpu["allocations"] = json!([{"pod": format!("b/{name}"), "container": "main", "resource": GPU,
                    "device": id, "ids": [id], "clients": 0}]);
            },
        );
    }
    request(&mut world, "a", "a1", (GPU, 1));
    let actions = reconcile(&mut keeper(), &world, 9);
    assert_eq!(evicted(&actions), [("b/b2", Some(Kind::Reclaim))], "{:?}", actions.waiting);
}

#[test]
fn gangs_of_whole_gpus_and_of_mig_instances_are_released_together() {
    let gpus = |used: &[u32]| {
        let mut world = whole_gpus(TestCluster::default(), "n1", used);
        for name in ["g1", "g2"] {
            world = world.pod_with(name, 0, requesting(GPU, 2));
        }
        add_quota(&mut world, "team", json!({}));
        make_gang(&mut world, &["g1", "g2"]);
        reconcile(&mut keeper(), &world, 9)
    };
    assert_eq!(gpus(&[0, 0, 0]).releases.len(), 0, "one of the two pods has room");
    assert_eq!(gpus(&[0, 0, 0, 0]).releases.len(), 2);
    let instances = |nodes: &[&str]| {
        let mut world = mig_cluster(nodes);
        world.quotas[0]["spec"]["max"] = json!("2");
        for name in ["g1", "g2"] {
            world = world.pod_with(name, 0, requesting(THREE, 1));
        }
        make_gang(&mut world, &["g1", "g2"]);
        reconcile(&mut keeper(), &world, 9)
    };
    assert_eq!(instances(&["n1"]).releases.len(), 0);
    assert_eq!(instances(&["n1", "n2"]).releases.len(), 2);
}

#[test]
fn nodes_that_a_pod_may_not_use_make_it_no_dearer() {
    // On n2, two shares are a whole GPU.
    let new = || {
        let mut world = TestCluster::default().node("n1", &[0]).node("n2", &[0]);
        edit_gpu(&mut world, "n2", |gpu| gpu["slices"][0]["total"] = json!(2));
        add_quota(&mut world, "a", json!({"min": "500m", "max": "500m"}));
        add_quota(&mut world, "b", json!({}));
        (world, ActualAllocations::default())
    };
    let select = |world: &mut TestCluster| {
        world.change(
            |world| &mut world.pods,
            "a/a1",
            |pod| pod["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": "n1"}),
        );
    };
    let (mut world, mut actual) = new();
    add(&mut world, &mut actual, ("b", "b1", 10), (Some("n1"), 0));
    add(&mut world, &mut actual, ("a", "a1", 2), (None, 0));
    edit_gpu(&mut world, "n2", |gpu| gpu["slices"][0]["inUse"] = json!(2));
    select(&mut world);
    let actions = reconcile(&mut keeper(), &world, 9);
    assert_eq!(evicted(&actions), [("b/b1", Some(Kind::Reclaim))], "{:?}", actions.waiting);
    // Five shares fit on no GPU of n2, so they cost half a GPU without a node selector too.
    let (mut world, mut actual) = new();
    add(&mut world, &mut actual, ("b", "b1", 10), (Some("n1"), 0));
    add(&mut world, &mut actual, ("a", "a1", 5), (None, 0));
    let actions = reconcile(&mut keeper(), &world, 9);
    assert_eq!(evicted(&actions), [("b/b1", Some(Kind::Reclaim))], "{:?}", actions.waiting);
}

#[test]
fn a_pod_uses_devices_where_it_costs_less_than_its_maximum_or_guarantee() {
    let never = json!({"cleave.dev/borrow": "Never"});
    let cases = [
        (json!({"max": "500m"}), Value::Null),
        (json!({"min": "500m"}), never.clone()),
        (json!({"min": "500m", "max": "500m"}), never),
    ];
    for (spec, annotations) in cases {
        for is_free in [true, false] {
            // On n2, two shares are a whole GPU. On n1, they are a fifth of a GPU.
            let (mut world, mut actual) =
                (TestCluster::default().node("n1", &[0]).node("n2", &[0]), ActualAllocations::default());
            edit_gpu(&mut world, "n2", |gpu| gpu["slices"][0]["total"] = json!(2));
            add_quota(&mut world, "a", spec.clone());
            add_quota(&mut world, "b", json!({}));
            if !is_free {
                add(&mut world, &mut actual, ("b", "b1", 10), (Some("n1"), 0));
            }
            add(&mut world, &mut actual, ("a", "a1", 2), (None, 0));
            world.change(|world| &mut world.pods, "a/a1", |pod| pod["metadata"]["annotations"] = annotations.clone());
            let actions = reconcile(&mut keeper(), &world, 9);
            let is_guaranteed = !spec["min"].is_null();
            let victims: &[_] = if is_guaranteed && !is_free { &[("b/b1", Some(Kind::Reclaim))] } else { &[] };
            assert_eq!(evicted(&actions), victims, "{spec}: {:?}", actions.waiting);
            let expected: &[[&str; 1]] = if is_free { &[["n1"]] } else { &[] };
            assert_eq!(nodes_of(&actions), expected, "{spec}: never on n2: {:?}", actions.waiting);
        }
    }
}

/// Two shares are a whole GPU of n2, and a fifth of a GPU elsewhere. Quota a is guaranteed one GPU,
/// and uses half of one.
fn nodes_with_different_shares(spec: Value) -> (TestCluster, ActualAllocations) {
    let (mut world, mut actual) = (TestCluster::default(), ActualAllocations::default());
    for name in ["n1", "n2", "n3"] {
        world = world.node(name, &[0]);
    }
    edit_gpu(&mut world, "n2", |gpu| gpu["slices"][0]["total"] = json!(2));
    add_quota(&mut world, "a", spec);
    add_quota(&mut world, "b", json!({}));
    add_quota(&mut world, "c", json!({"min": "2"}));
    add(&mut world, &mut actual, ("a", "a0", 5), (Some("n3"), 0));
    add(&mut world, &mut actual, ("c", "c1", 5), (Some("n3"), 0));
    (world, actual)
}

/// Marks all shares of n2 as used.
fn fill_n2(world: &mut TestCluster) {
    edit_gpu(world, "n2", |gpu| gpu["slices"][0]["inUse"] = json!(2));
}

#[test]
fn a_pod_that_exceeds_its_maximum_only_on_some_devices_reclaims_others() {
    for max in ["1", "1500m"] {
        for is_free in [true, false] {
            let (mut world, mut actual) = nodes_with_different_shares(json!({"min": "1", "max": max}));
            add(&mut world, &mut actual, ("b", "b1", 10), (Some("n1"), 0));
            add(&mut world, &mut actual, ("a", "a1", 2), (None, 0));
            let is_n2_full = max == "1500m" || !is_free;
            if is_n2_full {
                fill_n2(&mut world);
            }
            let mut gate = keeper();
            let actions = reconcile(&mut gate, &world, 9);
            assert_eq!(evicted(&actions), [("b/b1", Some(Kind::Reclaim))], "{max}: {:?}", actions.waiting);
            assert!(actions.unplanned.is_empty(), "a GPU with more shares would help");
            world.pods.remove("b/b1");
            actual.given.remove("b/b1");
            actual.report_on(&mut world, 1);
            if is_n2_full {
                fill_n2(&mut world);
            }
            let actions = reconcile(&mut gate, &world, 10);
            assert_eq!(nodes_of(&actions), [["n1"]], "{max}: {:?}", actions.waiting);
        }
    }
}

#[test]
fn a_pod_that_exceeds_its_maximum_only_on_some_devices_evicts_pods_of_its_quota_there() {
    for may_use_n3 in [true, false] {
        let (mut world, mut actual) = nodes_with_different_shares(json!({"max": "1"}));
        add(&mut world, &mut actual, ("c", "c2", 10), (Some("n1"), 0));
        add(&mut world, &mut actual, ("a", "a1", 2), (None, 5));
        if !may_use_n3 {
            // The free shares of n2 suffice if the quota uses less elsewhere.
            for node in ["n1", "n2"] {
                world.change(|world| &mut world.nodes, node, |node| node["metadata"]["labels"]["kind"] = json!("x"));
            }
            world.change(|world| &mut world.pods, "a/a1", |pod| pod["spec"]["nodeSelector"] = json!({"kind": "x"}));
        }
        let actions = reconcile(&mut keeper(), &world, 9);
        assert_eq!(evicted(&actions), [("a/a0", Some(Kind::Priority))], "{may_use_n3}: {:?}", actions.waiting);
    }
}

#[test]
fn a_nominated_pod_costs_what_its_devices_cost() {
    let (mut world, mut actual) = nodes_with_different_shares(json!({"min": "1", "max": "2"}));
    world = world.node("n4", &[0]);
    for node in ["n1", "n2"] {
        world.change(|world| &mut world.nodes, node, |node| node["metadata"]["labels"]["kind"] = json!("x"));
    }
    add(&mut world, &mut actual, ("b", "b1", 10), (Some("n1"), 0));
    add(&mut world, &mut actual, ("a", "a1", 2), (None, 5));
    world.change(|world| &mut world.pods, "a/a1", |pod| pod["spec"]["nodeSelector"] = json!({"kind": "x"}));
    add(&mut world, &mut actual, ("a", "a2", 8), (None, 5));
    fill_n2(&mut world);
    let actions = reconcile(&mut keeper(), &world, 9);
    assert_eq!(evicted(&actions), [("b/b1", Some(Kind::Reclaim))], "a1 costs a fifth of a GPU: {:?}", actions.waiting);
    assert_eq!(nodes_of(&actions), [["n4"]]);
}

/// Two shares are all of GPU 0, which is free, and a fifth of GPU 1, of which a0 and the borrower
/// b1 use a half each. The pod x of quota a waits for two shares.
fn gpus_with_different_shares(spec: Value, annotations: Value) -> (TestCluster, ActualAllocations) {
    let (mut world, mut actual) = (TestCluster::default().node("n1", &[0, 0]), ActualAllocations::default());
    edit_gpu(&mut world, "n1", |gpu| gpu["slices"][0]["total"] = json!(2));
    add_quota(&mut world, "a", spec);
    add_quota(&mut world, "b", json!({}));
    run_on(&mut world, &mut actual, ("a", "a0", 5), ("n1", 1));
    run_on(&mut world, &mut actual, ("b", "b1", 5), ("n1", 1));
    add(&mut world, &mut ActualAllocations::default(), ("a", "x", 2), (None, 0));
    actual.report_on(&mut world, 2);
    world.change(|world| &mut world.pods, "a/x", |pod| pod["metadata"]["annotations"] = annotations);
    (world, actual)
}

/// Returns the devices that are nominated for x.
fn nominated(gate: &crate::placement::gatekeeper::Gatekeeper) -> Vec<String> {
    let nomination = gate.ledger().unwrap().nominations().get("a/x");
    nomination.into_iter().flat_map(|of| &of.takes).map(|take| take.device.clone()).collect()
}

#[test]
fn a_nominated_pod_waits_for_its_devices_although_others_of_the_node_are_free() {
    let never = json!({"cleave.dev/borrow": "Never"});
    for (spec, annotations) in [(json!({"min": "1"}), never), (json!({"min": "1", "max": "1"}), json!({}))] {
        let (mut world, mut actual) = gpus_with_different_shares(spec.clone(), annotations);
        let mut gate = keeper();
        let actions = reconcile(&mut gate, &world, 9);
        assert_eq!(evicted(&actions), [("b/b1", Some(Kind::Reclaim))], "{spec}: {:?}", actions.waiting);
        assert_eq!(nominated(&gate), ["n1-GPU-1"], "{spec}");
        world.terminate("b/b1", "1970-01-12T13:47:40Z");
        for second in 10..14 {
            let actions = reconcile(&mut gate, &world, second);
            assert_eq!((evicted(&actions).len(), actions.releases.len()), (0, 0), "{spec}, {second} s");
            assert_eq!(nominated(&gate), ["n1-GPU-1"], "{spec}, {second} s: GPU 0 costs too much");
        }
        world.pods.remove("b/b1");
        actual.given.remove("b/b1");
        actual.report_on(&mut world, 2);
        let actions = reconcile(&mut gate, &world, 14);
        assert_eq!(nodes_of(&actions), [["n1"]], "{spec}: {:?}", actions.waiting);
        let placement = reservation(&actions.releases[0]);
        assert_eq!(placement.nodes["n1"][0].device, "n1-GPU-1", "{spec}");
    }
}

/// Earlier versions, or a quota that has changed, may have nominated the pod for these devices.
#[test]
fn a_pod_does_not_wait_for_nominated_devices_where_it_may_not_run() {
    let (mut world, _) = gpus_with_different_shares(json!({"min": "1"}), json!({}));
    let units = json!([{"resource": MPS_RESOURCE, "units": 2, "device": "n1-GPU-0"}]);
    let annotations = json!({
        "cleave.dev/borrow": "Never",
        NOMINATION_ANNOTATION: json!({"until": 1_000_100, "nodes": {"n1": units}}).to_string(),
    });
    world.change(|world| &mut world.pods, "a/x", |pod| pod["metadata"]["annotations"] = annotations);
    let mut gate = keeper();
    let actions = reconcile(&mut gate, &world, 9);
    assert_eq!(evicted(&actions), [("b/b1", Some(Kind::Reclaim))], "{:?}", actions.waiting);
    assert_eq!(nominated(&gate), ["n1-GPU-1"]);
}

#[test]
fn a_new_leader_nominates_no_other_devices_than_the_recorded_ones() {
    let (mut world, _) = gpus_with_different_shares(json!({"min": "1"}), json!({}));
    // GPU 0 is guaranteed to c, so x may not borrow it.
    add_quota(&mut world, "c", json!({"min": "1", "lend": "0"}));
    let units = json!([{"resource": MPS_RESOURCE, "units": 2, "device": "n1-GPU-1"}]);
    let note = json!({"until": 1_000_100, "nodes": {"n1": units}}).to_string();
    world.change(
        |world| &mut world.pods,
        "a/x",
        |pod| pod["metadata"]["annotations"] = json!({NOMINATION_ANNOTATION: note}),
    );
    let mut gate = keeper();
    let actions = reconcile(&mut gate, &world, 9);
    assert_eq!(actions.releases.len(), 0, "{:?}", nodes_of(&actions));
    assert_eq!(evicted(&actions), [("b/b1", Some(Kind::Reclaim))], "{:?}", actions.waiting);
}

/// A stolen token of an agent can report any UUID.
#[test]
fn a_node_that_reports_devices_of_another_node_does_not_change_what_pods_cost_there() {
    for forger in ["n0", "n9"] {
        let mut world = TestCluster::default().node("n5", &[0, 0]).node(forger, &[0, 0]);
        let mut actual = ActualAllocations::default();
        for guarantee in ["Count", "Cells"] {
            world.quotas.clear();
            add_quota(&mut world, "a", json!({"min": "1", "guarantee": guarantee}));
            add_quota(&mut world, "b", json!({"min": "2"}));
            for (pod, shares, gpu) in [(("a", "a1"), 3, 0), (("a", "a2"), 5, 0), (("b", "b1"), 10, 1)] {
                run_on(&mut world, &mut actual, (pod.0, pod.1, shares), ("n5", gpu));
            }
            add(&mut world, &mut ActualAllocations::default(), ("b", "b2", 5), (None, 0));
            actual.report_on(&mut world, 2);
            world.change(|world| &mut world.nodes, forger, |node| node["spec"] = json!({"unschedulable": true}));
            edit_gpu(&mut world, forger, |gpu| {
                let slice = gpu["slices"][0].clone();
                for device in ["n5-GPU-0", "n5-GPU-1"] {
                    let mut forged = slice.clone();
                    (forged["device"], forged["total"]) = (json!(device), json!(1));
                    gpu["slices"].as_array_mut().unwrap().push(forged);
                }
            });
            let actions = reconcile(&mut keeper(), &world, 9);
            assert_eq!(evicted(&actions), [], "{forger}, {guarantee}: the pods of a are within the guarantee");
            let used = keeper_reports(&world);
            assert_eq!(used["a"], 800_000, "{forger}, {guarantee}");
        }
    }
}

/// Returns what each quota uses, in millionths of a GPU.
fn keeper_reports(world: &TestCluster) -> BTreeMap<String, u64> {
    let mut gate = keeper();
    reconcile(&mut gate, world, 9);
    let reports = gate.quota_reports(&world.cluster(), &BTreeMap::new(), at(9));
    reports.usages.into_iter().map(|(name, usage)| (name, usage.usage.used.0)).collect()
}

/// Returns a node with an H100 and an L4, and a quota for each.
fn mixed_node() -> (TestCluster, ActualAllocations) {
    let mut world = TestCluster::default().node("n1", &[0, 0]);
    world.change(|world| &mut world.gpu_nodes, "n1", |object| object["status"]["gpus"][1]["model"] = json!("L4"));
    quota(&mut world, "h", &["h"], "H100", json!({"min": "2"}));
    quota(&mut world, "l", &["l"], "L4", json!({"min": "1"}));
    (world, ActualAllocations::default())
}

/// Adds a pod that runs on a GPU of a node with two GPUs.
fn run_on(world: &mut TestCluster, actual: &mut ActualAllocations, pod: (&str, &str, u32), (node, gpu): (&str, usize)) {
    add(world, &mut ActualAllocations::default(), pod, (Some(node), 0));
    actual.given.insert(format!("{}/{}", pod.0, pod.1), (format!("{node}-GPU-{gpu}"), pod.2));
    actual.report_on(world, 2);
}

#[test]
fn each_gpu_of_a_node_is_of_the_pool_of_its_model() {
    let (mut world, mut actual) = mixed_node();
    run_on(&mut world, &mut actual, ("h", "h1", 10), ("n1", 0));
    add(&mut world, &mut actual, ("h", "h2", 10), (None, 0));
    add(&mut world, &mut actual, ("l", "l1", 10), (None, 0));
    actual.report_on(&mut world, 2);
    let mut gate = keeper();
    let actions = reconcile(&mut gate, &world, 9);
    let released: Vec<&str> = actions.releases.iter().map(|release| release.pod.as_str()).collect();
    assert_eq!(released, ["l/l1"], "the L4 is guaranteed to l: {:?}", actions.waiting);
    assert_eq!(nodes_of(&actions), [["n1"]]);
    let sizes = |gate: &crate::placement::gatekeeper::Gatekeeper| {
        let reports = gate.quota_reports(&world.cluster(), &BTreeMap::new(), at(9));
        ["h", "l"].map(|name| reports.usages[name].usage.used.0)
    };
    assert_eq!(sizes(&gate), [1_000_000, 1_000_000]);
}

#[test]
fn a_guarantee_of_one_model_reclaims_no_gpu_of_another() {
    let (mut world, mut actual) = mixed_node();
    run_on(&mut world, &mut actual, ("h", "h1", 10), ("n1", 0));
    run_on(&mut world, &mut actual, ("other", "x", 10), ("n1", 1));
    add(&mut world, &mut actual, ("h", "h2", 10), (None, 0));
    actual.report_on(&mut world, 2);
    let actions = reconcile(&mut keeper(), &world, 9);
    assert_eq!((evicted(&actions).len(), actions.releases.len()), (0, 0), "{:?}", actions.evictions);
    // The quota of the L4 reclaims the L4.
    add(&mut world, &mut actual, ("l", "l1", 10), (None, 0));
    actual.report_on(&mut world, 2);
    let actions = reconcile(&mut keeper(), &world, 9);
    assert_eq!(evicted(&actions), [("other/x", Some(Kind::Reclaim))], "{:?}", actions.waiting);
}

#[test]
fn beside_gpus_of_a_quota_priority_decides_only_about_the_others() {
    let (mut world, mut actual) = mixed_node();
    world.quotas.truncate(1);
    run_on(&mut world, &mut actual, ("h", "h1", 10), ("n1", 0));
    run_on(&mut world, &mut actual, ("other", "low", 10), ("n1", 1));
    add(&mut world, &mut actual, ("other", "high", 5), (None, 10));
    actual.report_on(&mut world, 2);
    let actions = reconcile(&mut keeper(), &world, 9);
    assert_eq!(evicted(&actions), [("other/low", None)], "{:?}", actions.waiting);
}

#[test]
fn a_model_that_a_node_reports_ends_no_quota() {
    let mut world = TestCluster::default().node("h1", &[0]).node("l1", &[0]);
    let mut actual = ActualAllocations::default();
    edit_gpu(&mut world, "l1", |gpu| gpu["model"] = json!("L4"));
    quota(&mut world, "h", &["h"], "H100", json!({"min": "1"}));
    quota(&mut world, "l", &["l"], "L4", json!({"min": "1"}));
    add_quota(&mut world, "d", json!({"min": "1"}));
    add(&mut world, &mut actual, ("l", "l1", 10), (Some("l1"), 0));
    add(&mut world, &mut actual, ("d", "d1", 10), (None, 0));
    // The pods of the L4 are within their guarantee, and stay so.
    world = world.node("n7", &[10]);
    edit_gpu(&mut world, "n7", |gpu| gpu["model"] = json!("NVIDIA H100 L4"));
    edit_gpu(&mut world, "h1", |gpu| gpu["slices"][0]["inUse"] = json!(10));
    let mut gate = keeper();
    let actions = reconcile(&mut gate, &world, 9);
    assert_eq!((evicted(&actions).len(), actions.releases.len()), (0, 0), "{:?}", actions.evictions);
    let reports = gate.quota_reports(&world.cluster(), &actions.waiting, at(9));
    assert_eq!(reports.usages["l"].usage.within.0, 1_000_000);
    let ready = |name: &str| {
        let (_, status) = reports.statuses.iter().find(|(of, _)| of == name).unwrap();
        status.conditions.iter().find(|condition| condition.type_ == "Ready").unwrap().reason.clone()
    };
    assert_eq!((ready("h").as_str(), ready("l").as_str()), ("Valid", "ModelTaken"));
    assert_eq!(used_by(&reports, "l"), 1_000_000);
}

fn used_by(reports: &crate::placement::quota_reports::QuotaReports, name: &str) -> u64 {
    reports.usages[name].usage.used.0
}

#[test]
fn a_pod_of_shares_and_whole_instances_costs_all_of_them() {
    let mut world = mig_cluster(&["n1"]);
    let limits = json!({FOUR: "1", THREE: "1"});
    world = world.pod_with("both", 0, json!({"containers": [{"name": "main", "resources": {"limits": limits}}]}));
    world.quotas.clear();
    add_quota(&mut world, "team", json!({"max": "800m"}));
    let actions = reconcile(&mut keeper(), &world, 9);
    assert_eq!((actions.releases.len(), actions.waiting["team/both"].reason), (0, Reason::OverMax));
    world.quotas[0]["spec"]["max"] = json!("1100m");
    let actions = reconcile(&mut keeper(), &world, 9);
    assert_eq!(actions.releases.len(), 1);
    bind(&mut world, "team/both", "n1", (0, FOUR));
    bind(&mut world, "team/both", "n1", (1, THREE));
    let mut gate = keeper();
    reconcile(&mut gate, &world, 10);
    assert_eq!(used(&gate, &world), 1_000_000, "both instances are of one GPU");
}
