//! Tests which pods of a gang exist: pods without GPUs, pods that have ended, and pods that need
//! other GPUs.
use std::collections::BTreeMap;

use kube::runtime::watcher::Event;
use serde_json::{Value, json};

use super::quotas::{Case, keeper};
use super::world::{at, from_json, nodes_of, released};
use crate::gang_sizes::{GroupKind, GroupStore};
use crate::placement::gang_presence::MISSING_PODS_TIME;
use crate::policies::demand::Reason;

fn change_pod(case: &mut Case, pod: &str, edit: impl FnOnce(&mut Value)) {
    case.world.change(|world| &mut world.pods, pod, edit);
}

/// Makes a pod request no GPUs. Such a pod has no placement gate.
fn remove_gpus(case: &mut Case, pod: &str) {
    change_pod(case, pod, |pod| {
        pod["spec"]["containers"] = json!([{"name": "main", "resources": {"requests": {"cpu": "1"}}}]);
        pod["spec"]["schedulingGates"] = json!([]);
    });
}

/// Makes pods of the quota `a` a group of Kueue.
fn make_kueue_group(case: &mut Case, count: usize, pods: &[&str]) {
    for pod in pods {
        change_pod(case, pod, |pod| {
            pod["metadata"]["labels"] = json!({"kueue.x-k8s.io/pod-group-name": "train"});
            pod["metadata"]["annotations"] = json!({"kueue.x-k8s.io/pod-group-total-count": count.to_string()});
        });
    }
}

#[test]
fn pods_of_a_gang_that_request_no_gpus_count() {
    let mut case = Case::new(1, &[("a", json!({}))]).waiting(&[("g1", "a", 5, 0), ("g2", "a", 5, 0)]);
    make_kueue_group(&mut case, 3, &["a/g1", "a/g2"]);
    assert_eq!(case.step().waiting["a/g1"].reason, Reason::GangIncomplete, "the launcher is missing");
    let mut case = case.waiting(&[("launcher", "a", 1, 0)]);
    make_kueue_group(&mut case, 3, &["a/launcher"]);
    remove_gpus(&mut case, "a/launcher");
    assert_eq!(case.step().releases.len(), 2);
}

#[test]
fn a_lost_pod_of_a_gang_is_replaced_although_another_pod_has_ended() {
    let mut case = Case::new(2, &[("a", json!({}))])
        .running(&[(("g1", "a", 5, 0), 0), (("g2", "a", 5, 0), 0)])
        .waiting(&[("g3", "a", 5, 0)])
        .gang("a", "train", 4, &["g1", "g2", "g3"]);
    assert_eq!(case.step().waiting["a/g3"].reason, Reason::GangIncomplete, "the fourth pod may be recreated too");
    case.seconds += MISSING_PODS_TIME.as_secs();
    case.expect(&[], &["g1", "g2", "g3"]);
}

#[test]
fn a_gang_of_which_no_pod_runs_waits_for_its_pods_forever() {
    let mut case = Case::new(2, &[("a", json!({}))]).waiting(&[("g1", "a", 5, 0), ("g2", "a", 5, 0)]).gang(
        "a",
        "train",
        3,
        &["g1", "g2"],
    );
    case.seconds += 100 * MISSING_PODS_TIME.as_secs();
    assert_eq!(case.step().waiting["a/g1"].reason, Reason::GangIncomplete);
}

#[test]
fn a_group_that_kueue_admitted_does_not_wait_for_pods_that_have_ended() {
    let mut case = Case::new(2, &[("a", json!({}))]).waiting(&[("g1", "a", 5, 0), ("g2", "a", 5, 0)]);
    make_kueue_group(&mut case, 3, &["a/g1", "a/g2"]);
    case.seconds += MISSING_PODS_TIME.as_secs();
    let gates = |pod: &mut Value| pod["spec"]["schedulingGates"].take();
    let mut both = Value::Null;
    change_pod(&mut case, "a/g2", |pod| {
        both = gates(pod);
        let mut all = both.clone();
        all.as_array_mut().unwrap().push(json!({"name": "kueue.x-k8s.io/admission"}));
        pod["spec"]["schedulingGates"] = all;
    });
    assert_eq!(case.step().waiting["a/g1"].reason, Reason::GangIncomplete, "Kueue still holds g2");
    change_pod(&mut case, "a/g2", |pod| pod["spec"]["schedulingGates"] = both);
    assert_eq!(case.step().releases.len(), 2);
}

/// Two pools. Node `n1` has H100 GPUs with shares and replicas, and node `n2` has L4 GPUs with
/// shares.
fn two_pools() -> Case {
    let quotas = [("a", json!({"gpus": {"models": ["H100"]}, "min": 10})), ("l", json!({"gpus": {"models": ["L4"]}}))];
    let mut case = Case::new(2, &quotas);
    case.world = case.world.node("n2", &[0, 0]);
    let set = |object: &mut Value| {
        for gpu in object["status"]["gpus"].as_array_mut().unwrap() {
            gpu["model"] = json!("L4");
        }
    };
    case.world.change(|world| &mut world.gpu_nodes, "n2", set);
    let set = |object: &mut Value| {
        object["status"]["gpus"][1]["slices"][0]["resource"] = json!("nvidia.com/gpu-timeslice");
    };
    case.world.change(|world| &mut world.gpu_nodes, "n1", set);
    let set = |node: &mut Value| node["status"]["allocatable"]["nvidia.com/gpu-timeslice"] = json!("10");
    case.world.change(|world| &mut world.nodes, "n1", set);
    case
}

fn request(case: &mut Case, pod: &str, resource: &str) {
    let limits = json!({"limits": {resource: "5"}});
    change_pod(case, pod, |pod| pod["spec"]["containers"][0]["resources"] = limits);
}

#[test]
fn a_gang_whose_pods_need_different_pools_waits_and_its_pods_say_so() {
    let mut case = two_pools().waiting(&[("g1", "a", 5, 0), ("g2", "a", 5, 0)]).gang("a", "train", 2, &["g1", "g2"]);
    request(&mut case, "a/g2", "nvidia.com/gpu-timeslice");
    let set = |object: &mut Value| {
        for gpu in object["status"]["gpus"].as_array_mut().unwrap() {
            gpu["slices"][0]["resource"] = json!("nvidia.com/gpu-10gb");
        }
    };
    case.world.change(|world| &mut world.gpu_nodes, "n2", set);
    request(&mut case, "a/g1", "nvidia.com/gpu-10gb");
    let actions = keeper().reconcile(&case.world.cluster(), &BTreeMap::new(), at(9));
    assert!(actions.releases.is_empty(), "{actions:?}");
    for pod in ["a/g1", "a/g2"] {
        let waiting = &actions.waiting[pod];
        assert_eq!(waiting.reason, Reason::GangIncomplete, "{pod}");
        assert!(waiting.message.contains("different pools"), "{}", waiting.message);
    }
}

#[test]
fn a_gang_uses_the_pool_that_all_of_its_pods_can_use() {
    let gang = || two_pools().waiting(&[("g1", "a", 5, 0), ("g2", "a", 5, 0)]).gang("a", "train", 2, &["g1", "g2"]);
    let on_n1 = [["n1"], ["n1"]];
    let mut case = gang();
    request(&mut case, "a/g2", "nvidia.com/gpu-timeslice");
    let actions = keeper().reconcile(&case.world.cluster(), &BTreeMap::new(), at(9));
    assert_eq!(nodes_of(&actions), on_n1, "within the guarantee");
    // The namespace uses its guarantee of H100 GPUs, so alone g1 would use the other pool first.
    let mut case = gang().running(&[(("a1", "a", 5, 0), 0)]);
    case.world.quotas[0]["spec"]["min"] = json!("100m");
    request(&mut case, "a/g2", "nvidia.com/gpu-timeslice");
    case.reality.report_on(&mut case.world, 2);
    let actions = keeper().reconcile(&case.world.cluster(), &BTreeMap::new(), at(9));
    assert_eq!(
        (released(&actions).len(), nodes_of(&actions)),
        (2, on_n1.map(|nodes| nodes.map(str::to_owned).to_vec()).to_vec())
    );
}

#[test]
fn the_size_of_a_gang_comes_from_its_pod_group() {
    let mut case = Case::new(2, &[("a", json!({}))]).waiting(&[("g1", "a", 5, 0), ("g2", "a", 5, 0)]);
    for pod in ["a/g1", "a/g2"] {
        change_pod(&mut case, pod, |pod| {
            pod["metadata"]["labels"] = json!({"scheduling.x-k8s.io/pod-group": "train"});
        });
    }
    let groups = GroupStore::default();
    case.world.pod_groups = groups.state();
    let waiting = case.step().waiting["a/g1"].clone();
    assert!(waiting.message.contains("is not known yet"), "{}", waiting.message);
    let group = json!({"apiVersion": "scheduling.x-k8s.io/v1alpha1", "kind": "PodGroup",
        "metadata": {"name": "train", "namespace": "a"}, "spec": {"minMember": 3}});
    let kind = GroupKind::Coscheduling;
    for event in [Event::Init, Event::InitApply(from_json(group)), Event::InitDone] {
        groups.apply(kind, event);
    }
    case.world.pod_groups = groups.state();
    let waiting = case.step().waiting["a/g1"].clone();
    assert!(waiting.message.contains("before 3 pods exist"), "{}", waiting.message);
    groups.record_absence(kind);
    case.world.pod_groups = groups.state();
    assert_eq!(case.step().releases.len(), 2, "without the object, each pod may run");
}
