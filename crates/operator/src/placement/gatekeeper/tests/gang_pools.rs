//! Tests that all pods of a gang are released together, in one pool, or none of them.
use std::collections::BTreeMap;

use cleave_api::placement::PLACEMENT_ANNOTATION;
use serde_json::{Value, json};

use super::quota_pools::{of_h100, with_l4};
use super::quotas::{Case, keeper};
use super::world::{MPS_RESOURCE, TestCluster, at, nodes_of, released, requesting};
use crate::placement::actions::Actions;
use crate::placement::claims::UNREPORTED_CLAIM_TIME;
use crate::policies::demand::Reason;

/// Two quotas of the GPUs of the node `n1`. The node `n2` has an L4 GPU without a quota, with one
/// replica.
fn beside_an_l4(a: &Value) -> Case {
    let mut case = Case::new(3, &[("a", of_h100(a.clone())), ("b", of_h100(a.clone()))]);
    case.world = case.world.node("n2", &[0]);
    let set = |object: &mut Value| {
        let gpu = &mut object["status"]["gpus"][0];
        gpu["model"] = json!("L4");
        (gpu["slices"][0]["resource"], gpu["slices"][0]["total"]) = (json!("nvidia.com/gpu-timeslice"), json!(1));
    };
    case.world.change(|world| &mut world.gpu_nodes, "n2", set);
    case
}

fn request(world: &mut TestCluster, pod: &str, resource: &str, count: u32) {
    let containers = requesting(resource, count)["containers"].clone();
    world.change(|world| &mut world.pods, pod, |pod| pod["spec"]["containers"] = containers);
}

fn reconcile(case: &Case, seconds: u64) -> Actions {
    keeper().reconcile(&case.world.cluster(), &BTreeMap::new(), at(seconds))
}

/// Otherwise the first gang would get the H100 GPUs and the second the L4 GPU, and both would wait
/// forever.
#[test]
fn no_part_of_a_gang_is_released_if_its_pods_need_gpus_of_a_pool_and_others() {
    let mut case = beside_an_l4(&json!({"min": 30}));
    for quota in ["a", "b"] {
        let names: Vec<String> = (1..=4).map(|at| format!("{quota}{at}")).collect();
        for name in &names {
            // The pod b4 has its turn before the pod a4.
            case.add((name, quota, 10, i32::from(quota == "b")), None);
        }
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        case = case.gang(quota, "train", 4, &names);
        request(&mut case.world, &format!("{quota}/{quota}4"), "nvidia.com/gpu-timeslice", 1);
    }
    let actions = reconcile(&case, 20);
    assert_eq!(released(&actions), []);
    for pod in ["a/a1", "a/a4", "b/b1", "b/b4"] {
        let waiting = &actions.waiting[pod];
        assert_eq!(waiting.reason, Reason::GangIncomplete, "{pod}");
        assert!(waiting.message.contains("no pool has all of them"), "{pod}: {}", waiting.message);
    }
}

/// The other pods of the gang may be all that keeps a GPU from being partitioned for this pod.
#[test]
fn no_part_of_a_gang_is_released_while_no_gpu_offers_what_one_of_its_pods_requests() {
    let names = ["a1", "a2", "a3", "a4"];
    let mut case = Case::new(3, &[("a", json!({"min": 30}))])
        .waiting(&names.map(|name| (name, "a", 10, 0)))
        .gang("a", "train", 4, &names);
    request(&mut case.world, "a/a4", "nvidia.com/mig-1g.10gb", 1);
    let actions = reconcile(&case, 9);
    assert_eq!(released(&actions), []);
    assert!(actions.unplanned.is_empty(), "a GPU may be partitioned for the gang: {:?}", actions.unplanned);
    for name in names {
        let message = &actions.waiting[&format!("a/{name}")].message;
        assert!(message.starts_with("The pod a/a4 of the gang fits no GPU:"), "{name}: {message}");
    }
}

/// A pod with the name of a pod that may still use shares is not placed for some seconds.
#[test]
fn no_part_of_a_gang_is_released_while_one_of_its_pods_waits_for_an_earlier_pod_of_its_name() {
    let mut case = Case::new(4, &[("a", json!({}))]).waiting(&[("g0", "a", 10, 0)]);
    assert_eq!(released(&case.step()), [("a/g0", "reserved")]);
    // The node has not listed the shares of the pod yet.
    case.end("a/g0");
    let names = ["g0", "g1", "g2", "g3"];
    let mut case = case.waiting(&names.map(|name| (name, "a", 10, 0))).gang("a", "train", 4, &names);
    let actions = case.step();
    assert_eq!(released(&actions), []);
    let waiting = &actions.waiting["a/g1"];
    assert_eq!(waiting.reason, Reason::GangIncomplete);
    assert!(waiting.message.contains("The pod a/g0 of the gang train cannot be released now"), "{}", waiting.message);
    case.seconds += UNREPORTED_CLAIM_TIME.as_secs();
    assert_eq!(case.step().releases.len(), 4);
}

/// Releases the gang of `b` on H100 GPUs. Then the node of g2 is lost, a pod of `a` uses the GPU,
/// and L4 GPUs are added.
fn with_a_lost_pod(has_quota_of_l4: bool) -> Case {
    let mut quotas = vec![("a", of_h100(json!({"min": 20}))), ("b", of_h100(json!({})))];
    if has_quota_of_l4 {
        quotas.push(("l", json!({"gpus": {"models": ["L4"]}})));
    }
    let mut case =
        Case::new(2, &quotas).waiting(&[("g1", "b", 10, 0), ("g2", "b", 10, 0)]).gang("b", "train", 2, &["g1", "g2"]);
    assert_eq!(case.step().releases.len(), 2);
    case.step();
    case.end("b/g2");
    let mut case = case.waiting(&[("a1", "a", 10, 0)]);
    assert_eq!(nodes_of(&case.step()), [["n1"]]);
    with_l4(case, 2).waiting(&[("g2", "b", 10, 0)]).gang("b", "train", 2, &["g2"])
}

/// Otherwise a reclaim would evict only the pods in the pool, and the rest would keep its GPUs.
#[test]
fn a_replacement_pod_uses_only_the_pool_of_its_gang() {
    for has_quota_of_l4 in [true, false] {
        let mut case = with_a_lost_pod(has_quota_of_l4);
        let actions = case.step();
        assert_eq!(released(&actions), [], "quota of L4: {has_quota_of_l4}");
        assert!(!actions.waiting["b/g2"].message.is_empty());
        case.end("a/a1");
        assert_eq!(nodes_of(&case.step()), [["n1"]], "quota of L4: {has_quota_of_l4}");
        let mut case = case.waiting(&[("a2", "a", 10, 0)]);
        let of_n1 = |pod: &mut Value| pod["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": "n1"});
        case.world.change(|world| &mut world.pods, "a/a2", of_n1);
        case.step();
        let gone: Vec<&str> = case.evicted.iter().map(|(_, _, victim)| victim.as_str()).collect();
        assert_eq!(gone, ["g1", "g2"], "quota of L4: {has_quota_of_l4}");
    }
}

/// A change of quotas can put the GPUs of a running gang into two pools.
#[test]
fn a_gang_whose_gpus_are_in_two_pools_is_evicted_as_a_whole_or_not_at_all() {
    for (allowed, expected) in [(1, vec!["g1", "g2"]), (0, vec![])] {
        let quotas = [("a", of_h100(json!({"min": 10}))), ("b", json!({"gpus": {"models": ["H100", "L4"]}}))];
        let mut case = with_l4(Case::new(1, &quotas), 1).waiting(&[("g1", "b", 10, 0), ("g2", "b", 10, 0)]).gang(
            "b",
            "train",
            2,
            &["g1", "g2"],
        );
        // Before the change, one quota counts both models.
        let of_a = case.world.quotas.remove(0);
        assert_eq!(case.step().releases.len(), 2);
        case.world.quotas[0]["spec"]["gpus"] = json!({"models": ["L4"]});
        case.world.quotas.insert(0, of_a);
        let on_l4 = case.world.pods.values().find(|pod| pod["spec"]["nodeName"] == "n2").unwrap();
        let name = format!("b/{}", on_l4["metadata"]["name"].as_str().unwrap());
        let label = |pod: &mut Value| pod["metadata"]["labels"] = json!({"app": "far"});
        case.world.change(|world| &mut world.pods, &name, label);
        let budget = json!({"metadata": {"name": "keep", "namespace": "b", "generation": 1},
            "spec": {"minAvailable": 0, "selector": {"matchLabels": {"app": "far"}}},
            "status": {"disruptionsAllowed": allowed, "currentHealthy": 1, "desiredHealthy": 0, "expectedPods": 1, "observedGeneration": 1}});
        case.world.budgets.insert("keep".to_owned(), budget);
        let mut case = case.waiting(&[("a1", "a", 10, 0)]);
        case.step();
        let mut gone: Vec<&str> = case.evicted.iter().map(|(_, _, victim)| victim.as_str()).collect();
        gone.sort_unstable();
        assert_eq!(gone, expected, "{allowed} allowed");
    }
}

#[test]
fn a_gang_over_the_maximum_of_its_pool_uses_gpus_without_a_quota_and_keeps_them() {
    let mut case = with_l4(Case::new(2, &[("a", of_h100(json!({"max": 10})))]), 2)
        .waiting(&[("g1", "a", 10, 0), ("g2", "a", 10, 0)])
        .gang("a", "train", 2, &["g1", "g2"]);
    case.failing_release = Some("a/g2".to_owned());
    assert_eq!(nodes_of(&case.step()), [["n2"], ["n2"]]);
    case.failing_release = None;
    let mut case = case.waiting(&[("x1", "-", 10, 9)]);
    case.world.change(
        |world| &mut world.pods,
        "other/x1",
        |pod| pod["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": "n2"}),
    );
    assert_eq!(released(&case.step()), [("a/g2", "reserved")]);
}

#[test]
fn pods_of_a_gang_that_request_gpus_of_another_device_plugin_are_no_part_of_it() {
    let mut case = Case::new(2, &[("a", json!({}))])
        .waiting(&[("g1", "a", 10, 0), ("g2", "a", 10, 0), ("viewer", "a", 1, 0)])
        .gang("a", "train", 3, &["g1", "g2", "viewer"]);
    request(&mut case.world, "a/viewer", "nvidia.com/gpu", 1);
    let other = json!({"metadata": {"name": "n3", "uid": "n3", "resourceVersion": "1", "labels": {"kubernetes.io/hostname": "n3"}},
        "status": {"allocatable": {"cpu": "8", "pods": "110", "nvidia.com/gpu": "1"}}});
    case.world.nodes.insert("n3".to_owned(), other);
    let names: Vec<String> = reconcile(&case, 9).releases.into_iter().map(|release| release.pod).collect();
    assert_eq!(names.len(), 3, "{names:?}");
    assert!(MPS_RESOURCE != "nvidia.com/gpu");
}

/// Early versions did not record the time of the release.
#[test]
fn a_replacement_pod_joins_a_gang_whose_record_has_no_time() {
    let mut case = Case::new(2, &[("a", json!({"min": 10})), ("b", json!({}))])
        .waiting(&[("g1", "b", 10, 0), ("g2", "b", 10, 0)])
        .gang("b", "train", 2, &["g1", "g2"]);
    assert_eq!(case.step().releases.len(), 2);
    for pod in ["b/g1", "b/g2"] {
        let mut placement = TestCluster::placement(&case.world.pods[pod]).unwrap();
        placement.gang.as_mut().unwrap().since = None;
        let text = placement.to_text().unwrap();
        let set = |pod: &mut Value| pod["metadata"]["annotations"][PLACEMENT_ANNOTATION] = json!(text);
        case.world.change(|world| &mut world.pods, pod, set);
    }
    case.step();
    case.end("b/g2");
    case.seconds += UNREPORTED_CLAIM_TIME.as_secs();
    let mut case = case.waiting(&[("g2", "b", 10, 0)]).gang("b", "train", 2, &["g2"]);
    assert_eq!(released(&case.step()), [("b/g2", "reserved")]);
    case.step();
    let mut case = case.waiting(&[("a1", "a", 5, 0)]);
    case.step();
    let victims: Vec<&str> = case.evicted.iter().map(|(_, _, victim)| victim.as_str()).collect();
    assert_eq!(victims, ["g1", "g2"]);
}
