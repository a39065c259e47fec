//! Tests gangs at the gate: pods that are released and evicted together.
use std::collections::BTreeMap;

use cleave_api::names::CAPACITY_LABEL;
use serde_json::{Value, json};

use super::quotas::{Case, Ending, keeper};
use super::world::at;
use crate::placement::claims::UNREPORTED_CLAIM_TIME;
use crate::placement::unlisted::UNLISTED_TIME;
use crate::policies::demand::Reason;

#[test]
fn a_gang_is_released_by_one_reconcile_or_not_at_all() {
    let gang =
        |gpus: usize| {
            Case::new(gpus, &[("a", json!({}))])
                .waiting(&[("g1", "a", 5, 0), ("g2", "a", 5, 0), ("g3", "a", 5, 0)])
                .gang("a", "train", 3, &["g1", "g2", "g3"])
        };
    let mut full = gang(1);
    let actions = full.step();
    assert!(actions.releases.is_empty() && actions.waiting.len() == 3, "{actions:?}");
    // The free units suffice for two of the three pods, and remain available to other pods.
    full.waiting(&[("other", "a", 10, 0)]).expect(&[], &["other"]);
    let mut enough = gang(2);
    assert_eq!(enough.step().releases.len(), 3, "in one reconcile");
}

#[test]
fn a_gang_waits_until_all_of_its_pods_exist() {
    let mut case = Case::new(2, &[("a", json!({"min": 20}))])
        .waiting(&[("g1", "a", 5, 0), ("g2", "a", 5, 0), ("alone", "a", 5, 0)])
        .gang("a", "train", 3, &["g1", "g2"]);
    let actions = case.step();
    assert_eq!(actions.releases.len(), 1, "the pod without a gang");
    for name in ["a/g1", "a/g2"] {
        let waiting = &actions.waiting[name];
        assert_eq!(waiting.reason, Reason::GangIncomplete, "{name}");
        assert!(waiting.message.contains("none is released before 3 pods exist"), "{}", waiting.message);
    }
    case.waiting(&[("g3", "a", 5, 0)]).gang("a", "train", 3, &["g3"]).expect(&[], &["alone", "g1", "g2", "g3"]);
}

#[test]
fn a_gang_within_its_guarantee_reclaims_units_for_all_of_its_pods() {
    Case::new(2, &[("a", json!({"min": 20})), ("b", json!({}))])
        .running(&[(("b1", "b", 10, 0), 0), (("b2", "b", 10, 0), 1)])
        .waiting(&[("g1", "a", 10, 0), ("g2", "a", 10, 0)])
        .gang("a", "train", 2, &["g1", "g2"])
        .expect(&[("Reclaim", "g1", "b1"), ("Reclaim", "g1", "b2")], &["g1", "g2"]);
}

/// The kubelet stops listing a pod before the agent reports that the pod's shares are free.
#[test]
fn nobody_else_is_evicted_for_a_gang_while_the_shares_of_its_victims_are_used_but_not_listed() {
    let mut case = Case::new(4, &[("a", json!({"min": 20})), ("b", json!({}))])
        .running(&[(("b1", "b", 10, 0), 0), (("b2", "b", 10, 0), 1), (("b3", "b", 10, 0), 2), (("b4", "b", 10, 0), 3)])
        .waiting(&[("g1", "a", 10, 0), ("g2", "a", 10, 0)])
        .gang("a", "train", 2, &["g1", "g2"]);
    case.ending = Ending::Unlisted;
    assert_eq!(case.step().evictions.len(), 2);
    for second in 0..3 {
        let actions = case.step();
        assert!(actions.evictions.is_empty() && actions.requeue.is_some(), "after {second} s: {actions:?}");
    }
    case.reality.unlisted.clear();
    let rest = case.until_rest();
    let is_running = rest.is_running();
    assert!(rest.evicted.len() == 2 && is_running.contains("g1") && is_running.contains("g2"), "{:?}", rest.evicted);
}

#[test]
fn a_gang_waits_only_briefly_for_used_shares_that_no_pod_is_listed_for() {
    let mut case = Case::new(3, &[("a", json!({"min": 20})), ("b", json!({}))])
        .running(&[(("b1", "b", 10, 0), 0), (("b2", "b", 10, 0), 1), (("b3", "b", 10, 0), 2)])
        .waiting(&[("g1", "a", 10, 0), ("g2", "a", 10, 0)])
        .gang("a", "train", 2, &["g1", "g2"]);
    case.ending = Ending::Unlisted;
    case.step();
    let stuck = case.reality.unlisted.keys().next().unwrap().clone();
    case.reality.unlisted.retain(|pod, _| *pod == stuck);
    for _ in 0..UNLISTED_TIME.as_secs() {
        assert!(case.step().evictions.is_empty(), "after {} s", case.seconds);
    }
    assert_eq!(case.step().evictions.len(), 1, "one GPU is missing");
}

#[test]
fn no_pod_is_evicted_for_a_gang_that_would_get_only_part_of_its_units() {
    Case::new(2, &[("a", json!({"min": 20})), ("b", json!({"min": 10})), ("c", json!({}))])
        .running(&[(("b1", "b", 10, 0), 0), (("c1", "c", 10, 0), 1)])
        .waiting(&[("g1", "a", 10, 0), ("g2", "a", 10, 0)])
        .gang("a", "train", 2, &["g1", "g2"])
        .expect(&[], &["b1", "c1"]);
}

#[test]
fn all_pods_of_a_gang_are_evicted_together() {
    Case::new(3, &[("a", json!({"min": 5})), ("b", json!({}))])
        .running(&[(("g1", "b", 10, 0), 0), (("g2", "b", 10, 0), 1), (("b3", "b", 10, 7), 2)])
        .gang("b", "train", 2, &["g1", "g2"])
        .waiting(&[("a1", "a", 5, 0)])
        .expect(&[("Reclaim", "a1", "g1"), ("Reclaim", "a1", "g2")], &["a1", "b3"]);
}

#[test]
fn a_disruption_budget_of_one_pod_protects_the_whole_gang() {
    let mut case = Case::new(2, &[("a", json!({"min": 5})), ("b", json!({}))])
        .running(&[(("g1", "b", 10, 0), 0), (("g2", "b", 10, 0), 1)])
        .gang("b", "train", 2, &["g1", "g2"])
        .waiting(&[("a1", "a", 5, 0)]);
    case.world.change(|world| &mut world.pods, "b/g2", |pod| pod["metadata"]["labels"] = json!({"app": "g2"}));
    let budget = json!({"metadata": {"name": "keep", "namespace": "b", "generation": 1},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "g2"}}},
        "status": {"disruptionsAllowed": 0, "currentHealthy": 1, "desiredHealthy": 2, "expectedPods": 1, "observedGeneration": 1}});
    case.world.budgets.insert("keep".to_owned(), budget);
    let actions = case.step();
    assert!(actions.evictions.is_empty(), "{actions:?}");
    assert_eq!(actions.waiting["a/a1"].reason, Reason::Protected);
}

#[test]
fn a_replacement_pod_of_a_running_gang_is_released_alone() {
    Case::new(2, &[("a", json!({}))])
        .running(&[(("g1", "a", 5, 0), 0)])
        .waiting(&[("g2", "a", 5, 0)])
        .gang("a", "train", 2, &["g1", "g2"])
        .expect(&[], &["g1", "g2"]);
}

#[test]
fn a_gang_has_one_class_and_one_label() {
    let mut case = Case::new(2, &[("a", json!({"min": 10}))])
        .waiting(&[("g1", "a", 6, 0), ("g2", "a", 6, 0), ("small", "a", 4, 0)])
        .gang("a", "train", 2, &["g1", "g2"]);
    while !case.step().releases.is_empty() {}
    let label = |name: &str| case.world.pods[name]["metadata"]["labels"][CAPACITY_LABEL].clone();
    assert_eq!([label("a/g1"), label("a/g2"), label("a/small")], ["over-quota", "over-quota", "in-quota"]);
}

/// A scheduler may bind a pod late or never.
#[test]
fn a_pod_that_is_released_but_not_bound_does_not_protect_its_gang() {
    for is_leader_lost in [false, true] {
        let mut case = Case::new(2, &[("a", json!({"min": 10})), ("b", json!({}))])
            .running(&[(("b3", "b", 10, 7), 1)])
            .waiting(&[("g1", "b", 9, 0), ("g2", "b", 1, 0)])
            .gang("b", "train", 2, &["g1", "g2"]);
        assert_eq!(case.step().releases.len(), 2);
        case.world.change(|world| &mut world.pods, "b/g2", |pod| pod["spec"]["nodeName"] = json!(null));
        case.reality.given.remove("b/g2");
        case.losses = if is_leader_lost { u64::MAX } else { 0 };
        let mut case = case.waiting(&[("a1", "a", 10, 0)]);
        for _ in 0..2 * UNREPORTED_CLAIM_TIME.as_secs() {
            case.step();
        }
        let is_evicted = |pod: &str| ("Reclaim".to_owned(), "a1".to_owned(), pod.to_owned());
        assert_eq!(case.evicted, ["g1", "g2"].map(is_evicted), "leader lost: {is_leader_lost}");
        assert_eq!(case.is_running(), ["a1", "b3"].map(str::to_owned).into());
    }
}

/// Starts four pods of b, one after the other. `change` changes each pod before its release, or
/// after it.
fn grown(is_changed_before: bool, change: impl Fn(&mut Value)) -> Case {
    let mut case = Case::new(2, &[("a", json!({})), ("b", json!({}))]);
    for name in ["b1", "b2", "b3", "b4"] {
        case = case.waiting(&[(name, "b", 5, 0)]);
        let full = format!("b/{name}");
        if is_changed_before {
            case.world.change(|world| &mut world.pods, &full, &change);
        }
        assert_eq!(case.step().releases.len(), 1, "{name}");
        if !is_changed_before {
            case.world.change(|world| &mut world.pods, &full, &change);
        }
    }
    case.waiting(&[("a1", "a", 5, 0), ("a2", "a", 5, 0), ("a3", "a", 5, 0)])
}

/// Otherwise one annotation would make all borrowers of a team immune to fair share.
#[test]
fn pods_that_were_not_released_together_are_no_gang_for_fair_share() {
    let name = |pod: &mut Value| pod["metadata"]["annotations"]["cleave.dev/gang"] = json!("all");
    let with_size = |pod: &mut Value| {
        name(pod);
        pod["metadata"]["annotations"]["cleave.dev/gang-size"] = json!("4");
    };
    let cases = [("grown", grown(true, name)), ("changed", grown(false, name)), ("with size", grown(false, with_size))];
    for (case, world) in cases {
        let rest = world.until_rest();
        let running = rest.is_running();
        let of = |quota: &str| running.iter().filter(|name| name.starts_with(quota)).count();
        assert_eq!((of("a"), of("b")), (2, 2), "{case}: {running:?}");
    }
}

/// Starts pods of b, one after the other, that state a gang of 1,000 pods. `change` changes each
/// pod before its release.
fn grown_with_a_stated_size(change: impl Fn(&mut Case, &str)) -> Case {
    let mut case = Case::new(2, &[("a", json!({})), ("b", json!({}))]);
    for name in ["b1", "b2", "b3", "b4"] {
        case = case.waiting(&[(name, "b", 5, 0)]);
        change(&mut case, &format!("b/{name}"));
        case.step();
        case.seconds += 31;
        case.step();
        assert!(case.is_running().contains(name), "{name} waits");
    }
    case
}

/// A gang is the pods that were really released together, not the pods that one of them states.
#[test]
fn a_stated_size_does_not_make_all_borrowers_one_gang() {
    let of_kueue = |case: &mut Case, name: &str| {
        let set = |pod: &mut Value| {
            pod["metadata"]["labels"] = json!({"kueue.x-k8s.io/pod-group-name": "all"});
            pod["metadata"]["annotations"] = json!({"kueue.x-k8s.io/pod-group-total-count": "1000"});
        };
        case.world.change(|world| &mut world.pods, name, set);
    };
    // Pods without GPUs complete the gang until its first pod is released.
    let without_gpus = |case: &mut Case, name: &str| {
        let annotations = json!({"cleave.dev/gang": "all", "cleave.dev/gang-size": "4"});
        let set = |pod: &mut Value| pod["metadata"]["annotations"] = annotations.clone();
        case.world.change(|world| &mut world.pods, name, set);
        for extra in ["x1", "x2", "x3"] {
            let full = format!("b/{extra}");
            if name == "b/b1" {
                case.add((extra, "b", 1, 0), None);
                let change = |pod: &mut Value| {
                    set(pod);
                    pod["spec"]["containers"][0]["resources"] = json!({});
                };
                case.world.change(|world| &mut world.pods, &full, change);
                case.world.change(|world| &mut world.pods, &full, |pod| pod["spec"]["schedulingGates"] = json!([]));
            } else {
                case.world.pods.remove(&full);
            }
        }
    };
    for (how, case) in
        [("Kueue", grown_with_a_stated_size(of_kueue)), ("without GPUs", grown_with_a_stated_size(without_gpus))]
    {
        let rest = case.waiting(&[("a1", "a", 5, 0), ("a2", "a", 5, 0), ("a3", "a", 5, 0)]).until_rest();
        let running = rest.is_running();
        let of = |quota: &str| running.iter().filter(|name| name.starts_with(quota)).count();
        assert_eq!((of("a"), of("b")), (2, 2), "{how}: {running:?}");
    }
}

#[test]
fn a_replacement_pod_belongs_to_its_gang() {
    let mut case = Case::new(3, &[("a", json!({"min": 5})), ("b", json!({}))])
        .waiting(&[("g1", "b", 10, 0), ("g2", "b", 10, 0), ("g3", "b", 10, 0)])
        .gang("b", "train", 3, &["g1", "g2", "g3"]);
    assert_eq!(case.step().releases.len(), 3);
    case.step();
    case.end("b/g2");
    let mut case = case.waiting(&[("g2", "b", 10, 0)]).gang("b", "train", 3, &["g2"]);
    assert_eq!(case.step().releases.len(), 1);
    let mut case = case.waiting(&[("a1", "a", 5, 0)]);
    case.step();
    let gone: Vec<&str> = case.evicted.iter().map(|(_, _, victim)| victim.as_str()).collect();
    assert_eq!(gone, ["g1", "g2", "g3"]);
}

/// Otherwise one cordon, fault or agent that is not ready would keep the GPUs of the whole gang
/// from a guarantee.
#[test]
fn a_pod_on_a_gpu_that_serves_no_new_pods_is_evicted_with_its_gang() {
    let cordon = |object: &mut Value| object["metadata"]["annotations"] = json!({"cleave.dev/cordon": "n1-GPU-1=fan"});
    let fault = |object: &mut Value| object["status"]["gpus"][1]["health"] = json!({"healthy": false});
    let changes: [fn(&mut Value); 2] = [cordon, fault];
    for (why, change) in ["cordon", "fault"].into_iter().zip(changes) {
        let mut case = Case::new(2, &[("a", json!({"min": 5})), ("b", json!({}))])
            .running(&[(("g1", "b", 10, 0), 0), (("g2", "b", 10, 0), 1)])
            .gang("b", "train", 2, &["g1", "g2"])
            .waiting(&[("a1", "a", 5, 0)]);
        case.world.change(|world| &mut world.gpu_nodes, "n1", change);
        case.step();
        let gone: Vec<&str> = case.evicted.iter().map(|(_, _, victim)| victim.as_str()).collect();
        assert_eq!(gone, ["g1", "g2"], "{why}");
        // Alone, the pod frees nothing.
        let mut case = Case::new(2, &[("a", json!({"min": 5})), ("c", json!({"min": 10})), ("b", json!({}))])
            .running(&[(("c1", "c", 10, 0), 0), (("b1", "b", 10, 0), 1)])
            .waiting(&[("a1", "a", 5, 0)]);
        case.world.change(|world| &mut world.gpu_nodes, "n1", change);
        case.step();
        assert_eq!(case.evicted, [], "{why}");
    }
}

#[test]
fn disruption_budgets_of_pods_on_a_cordoned_gpu_protect_their_gang() {
    for (allowed, evictions) in [(0, 0), (1, 0), (2, 3)] {
        let mut case = Case::new(2, &[("a", json!({"min": 5})), ("b", json!({}))])
            .running(&[(("g1", "b", 10, 0), 0), (("g2", "b", 5, 0), 1), (("g3", "b", 5, 0), 1)])
            .gang("b", "train", 3, &["g1", "g2", "g3"])
            .waiting(&[("a1", "a", 5, 0)]);
        for pod in ["b/g2", "b/g3"] {
            let label = |pod: &mut Value| pod["metadata"]["labels"] = json!({"app": "rest"});
            case.world.change(|world| &mut world.pods, pod, label);
        }
        let budget = json!({"metadata": {"name": "keep", "namespace": "b", "generation": 1},
            "spec": {"minAvailable": 0, "selector": {"matchLabels": {"app": "rest"}}},
            "status": {"disruptionsAllowed": allowed, "currentHealthy": 2, "desiredHealthy": 0, "expectedPods": 2, "observedGeneration": 1}});
        case.world.budgets.insert("keep".to_owned(), budget);
        let cordon = json!({"cleave.dev/cordon": "n1-GPU-1=fan"});
        case.world.change(|world| &mut world.gpu_nodes, "n1", |object| object["metadata"]["annotations"] = cordon);
        assert_eq!(case.step().evictions.len(), evictions, "{allowed} allowed");
    }
}

#[test]
fn at_the_maximum_a_pod_on_a_faulted_gpu_can_be_evicted() {
    let mut case = Case::new(2, &[("a", json!({"max": 10}))])
        .running(&[(("low", "a", 10, 0), 1)])
        .waiting(&[("high", "a", 10, 9)]);
    let fault = |object: &mut Value| object["status"]["gpus"][1]["health"] = json!({"healthy": false});
    case.world.change(|world| &mut world.gpu_nodes, "n1", fault);
    case.step();
    assert_eq!(case.evicted, [("Priority".to_owned(), "high".to_owned(), "low".to_owned())]);
}

#[test]
fn one_important_pod_does_not_let_its_gang_override_guarantees() {
    for (other, evictions) in [(0, 0), (100, 1)] {
        let mut case = Case::new(1, &[("a", json!({"min": 10})), ("b", json!({}))])
            .with_override_priority(Some(100))
            .running(&[(("a1", "a", 10, 0), 0)])
            .waiting(&[("g1", "b", 5, 100), ("g2", "b", 5, other)])
            .gang("b", "train", 2, &["g1", "g2"]);
        assert_eq!(case.step().evictions.len(), evictions, "{other}");
    }
}

/// Such a pod is never evicted. It could otherwise be added to a gang, and would protect it.
#[test]
fn a_component_of_the_system_belongs_to_no_gang() {
    let mut case = Case::new(2, &[("a", json!({"min": 10})), ("b", json!({}))]).waiting(&[
        ("g1", "b", 5, 0),
        ("g2", "b", 5, 0),
        ("g3", "b", 10, 2_000_000_000),
    ]);
    for pod in ["b/g1", "b/g2", "b/g3"] {
        let gang = |pod: &mut Value| pod["metadata"]["annotations"]["cleave.dev/gang"] = json!("train");
        case.world.change(|world| &mut world.pods, pod, gang);
    }
    assert_eq!(case.step().releases.len(), 3);
    let mut case = case.waiting(&[("a1", "a", 10, 0)]);
    case.step();
    let gone: Vec<&str> = case.evicted.iter().map(|(_, _, victim)| victim.as_str()).collect();
    assert_eq!(gone, ["g1", "g2"]);
}

/// The CPU, the anti-affinity and the replicas of the pods that were placed do not count for the
/// pods that come later.
#[test]
fn a_gang_that_fits_only_in_part_leaves_no_trace() {
    let mut case = Case::new(1, &[("a", json!({}))])
        .waiting(&[("g1", "a", 5, 9), ("g2", "a", 4, 9), ("g3", "a", 2, 9), ("other", "a", 5, 0)])
        .gang("a", "train", 3, &["g1", "g2", "g3"]);
    let term = json!({"labelSelector": {"matchLabels": {"app": "other"}}, "topologyKey": "kubernetes.io/hostname"});
    let rule = json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}});
    case.world.change(
        |world| &mut world.pods,
        "a/g1",
        |pod| {
            pod["spec"]["affinity"] = rule;
            pod["spec"]["containers"][0]["resources"]["requests"] = json!({"cpu": "6"});
        },
    );
    case.world.change(
        |world| &mut world.pods,
        "a/other",
        |pod| {
            pod["metadata"]["labels"] = json!({"app": "other"});
            pod["spec"]["containers"][0]["resources"]["requests"] = json!({"cpu": "6"});
        },
    );
    let released: Vec<String> = case.step().releases.into_iter().map(|release| release.pod).collect();
    assert_eq!(released, ["a/other"]);
}

#[test]
fn pods_beyond_the_size_of_a_gang_leave_alone() {
    Case::new(2, &[("a", json!({"min": 5})), ("b", json!({}))])
        .running(&[(("g1", "b", 5, 0), 0), (("g2", "b", 5, 0), 0), (("g3", "b", 5, 0), 1), (("g4", "b", 5, 0), 1)])
        .gang("b", "train", 3, &["g1", "g2", "g3", "g4"])
        .waiting(&[("a1", "a", 5, 0)])
        .expect(&[("Reclaim", "a1", "g4")], &["a1", "g1", "g2", "g3"]);
}

/// Each pass examines all pods of a gang.
#[test]
fn a_gang_with_too_many_pods_is_refused() {
    let mut case = Case::new(1, &[("a", json!({}))])
        .waiting(&[("g1", "a", 5, 0), ("g2", "a", 5, 0), ("alone", "a", 5, 0)])
        .gang("a", "train", 1_000_000, &["g1", "g2"]);
    let actions = case.step();
    assert_eq!(actions.releases.len(), 1, "the pod without a gang");
    let waiting = &actions.waiting["a/g1"];
    assert_eq!(waiting.reason, Reason::GangTooLarge);
    assert!(waiting.message.contains("1000000 pods: a gang may have at most 1000"), "{}", waiting.message);
}

#[test]
fn searches_for_a_gang_count_as_searches_for_its_pods() {
    let mut case = Case::new(2, &[("b", json!({"min": 20})), ("c", json!({"min": 1})), ("d", json!({}))])
        .running(&[(("b1", "b", 10, 0), 0), (("b2", "b", 10, 0), 1)]);
    let names: Vec<String> = (0..16).map(|at| format!("g{at}")).collect();
    for name in &names {
        case.add((name, "d", 1, 0), None);
    }
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut case = case.gang("d", "train", 16, &names).waiting(&[("c1", "c", 1, 0)]);
    let actions = case.step();
    assert_eq!(actions.preemption_searches, 1, "of c1, which is within its guarantee");
    assert_eq!(case.step().preemption_searches, 2, "of c1 and of the gang");
}

/// Kueue counts all pods of a group, also those that request no GPUs.
#[test]
fn pods_of_a_gang_without_gpus_count() {
    let mut case = Case::new(1, &[("a", json!({}))])
        .waiting(&[("g1", "a", 5, 0), ("g2", "a", 5, 0), ("launcher", "a", 1, 0)])
        .gang("a", "train", 3, &["g1", "g2", "launcher"]);
    let without_gpus = json!([{"name": "main", "resources": {"requests": {"cpu": "1"}}}]);
    case.world.change(
        |world| &mut world.pods,
        "a/launcher",
        |pod| (pod["spec"]["containers"], pod["spec"]["schedulingGates"]) = (without_gpus, json!([])),
    );
    assert_eq!(case.step().releases.len(), 2);
}

/// The operator does not watch ended pods. A controller that restarts a gang creates all pods
/// again.
#[test]
fn missing_pods_of_a_running_gang_count_as_ended_after_some_time() {
    let mut case = Case::new(2, &[("a", json!({}))])
        .running(&[(("g1", "a", 5, 0), 0), (("g2", "a", 5, 0), 0)])
        .waiting(&[("g3", "a", 5, 0)])
        .gang("a", "train", 4, &["g1", "g2", "g3"]);
    let created = case.seconds;
    while case.seconds < created + 29 {
        let actions = case.step();
        assert!(actions.releases.is_empty() && actions.waiting["a/g3"].reason == Reason::GangIncomplete);
        assert!(actions.requeue.is_some_and(|requeue| requeue.as_secs() <= created + 30 - case.seconds));
    }
    assert_eq!(case.step().releases.len(), 1);
}

/// Kueue admits a group once all of its pods exist.
#[test]
fn missing_pods_of_a_pod_group_of_kueue_count_as_ended_after_some_time() {
    let group = |case: &mut Case, kueue: bool| {
        let labels = if kueue { json!({"kueue.x-k8s.io/pod-group-name": "k"}) } else { json!({}) };
        let mut annotations = json!({"kueue.x-k8s.io/pod-group-total-count": "2"});
        if !kueue {
            annotations["cleave.dev/gang"] = json!("k");
        }
        let set = |pod: &mut Value| {
            (pod["metadata"]["labels"], pod["metadata"]["annotations"]) = (labels, annotations);
        };
        case.world.change(|world| &mut world.pods, "a/k1", set);
    };
    for (kueue, released) in [(true, 1), (false, 0)] {
        let mut case = Case::new(1, &[("a", json!({}))]).waiting(&[("k1", "a", 5, 0)]);
        group(&mut case, kueue);
        assert!(case.step().releases.is_empty());
        case.seconds += 30;
        assert_eq!(case.step().releases.len(), released, "kueue: {kueue}");
    }
}

/// A controller may change a pod while the operator releases it.
#[test]
fn a_pod_of_a_gang_whose_release_failed_keeps_its_room() {
    let mut case = Case::new(1, &[("a", json!({})), ("c", json!({}))])
        .waiting(&[("g1", "a", 5, 0), ("g2", "a", 5, 0)])
        .gang("a", "train", 2, &["g1", "g2"]);
    case.failing_release = Some("a/g2".to_owned());
    assert_eq!(case.step().releases.len(), 2);
    case.failing_release = None;
    // The quota of c1 has the lower share, so the turn of c1 is before the turn of g2.
    let case = case.waiting(&[("c1", "c", 5, 0)]).until_rest();
    assert_eq!(case.is_running(), ["g1", "g2"].map(str::to_owned).into(), "{:?}", case.evicted);
}

#[test]
fn a_gang_whose_pods_need_different_pools_waits_and_says_so() {
    let quotas = [("a", json!({"gpus": {"models": ["H100"]}})), ("b", json!({"gpus": {"models": ["L4"]}}))];
    let mut case =
        Case::new(1, &quotas).waiting(&[("g1", "a", 5, 0), ("g2", "a", 5, 0)]).gang("a", "train", 2, &["g1", "g2"]);
    case.world = case.world.node("n2", &[0]);
    let set = |object: &mut serde_json::Value| {
        let gpu = &mut object["status"]["gpus"][0];
        (gpu["model"], gpu["slices"][0]["resource"]) = (json!("L4"), json!("nvidia.com/gpu-timeslice"));
    };
    case.world.change(|world| &mut world.gpu_nodes, "n2", set);
    let limits = json!({"limits": {"nvidia.com/gpu-timeslice": "5"}});
    let other = |pod: &mut serde_json::Value| pod["spec"]["containers"][0]["resources"] = limits;
    case.world.change(|world| &mut world.pods, "a/g2", other);
    let actions = keeper().reconcile(&case.world.cluster(), &BTreeMap::new(), at(9));
    assert!(actions.releases.is_empty(), "{actions:?}");
    for pod in ["a/g1", "a/g2"] {
        assert!(actions.waiting[pod].message.contains("different pools"), "{:?}", actions.waiting[pod]);
    }
}

#[test]
fn gangs_have_no_effect_without_an_enforced_quota() {
    for quotas in [vec![], vec![("a", json!({"mode": "Count"}))]] {
        let case =
            Case::new(1, &quotas).waiting(&[("g1", "a", 6, 0), ("g2", "a", 6, 0)]).gang("a", "train", 2, &["g1", "g2"]);
        let actions = keeper().reconcile(&case.world.cluster(), &BTreeMap::new(), at(1));
        assert_eq!(actions.releases.len(), 1, "the pod that fits is released");
    }
}

#[test]
fn gangs_of_counted_quotas_and_of_exempt_namespaces_have_no_effect_beside_an_enforced_quota() {
    for is_exempt in [false, true] {
        let mut case = Case::new(1, &[("a", json!({"min": 5})), ("b", json!({"mode": "Count"}))]);
        if is_exempt {
            case.world.quotas.pop();
            let labels = json!({"cleave.dev/allow": "quota"});
            case.world.namespaces.push(json!({"metadata": {"name": "b", "labels": labels}}));
        }
        let mut case =
            case.waiting(&[("g1", "b", 5, 0), ("g2", "b", 5, 0)]).gang("b", "train", 1_000_000, &["g1", "g2"]);
        let actions = case.step();
        assert_eq!(actions.releases.len(), 2, "exempt {is_exempt}: {:?}", actions.waiting);
    }
}

/// The reservation of a released pod can expire before the pod is bound.
#[test]
fn a_pod_without_a_node_and_without_a_reservation_does_not_protect_its_gang() {
    let mut case = Case::new(1, &[("a", json!({"min": 10})), ("b", json!({}))])
        .running(&[(("g1", "b", 5, 0), 0), (("g2", "b", 5, 0), 0)])
        .waiting(&[("g3", "b", 5, 0), ("a1", "a", 10, 0)])
        .gang("b", "train", 3, &["g1", "g2", "g3"]);
    case.world.change(|world| &mut world.pods, "b/g3", |pod| pod["spec"]["schedulingGates"] = json!([]));
    case.step();
    let victims: Vec<&str> = case.evicted.iter().map(|(_, _, victim)| victim.as_str()).collect();
    assert_eq!(victims, ["g1", "g2"]);
}
