//! Tests where units are reserved for pods that have waited long: only where these pods can use
//! them.
use cleave_api::names::GATE;
use cleave_plan::affinity::HOSTNAME;
use serde_json::{Value, json};

use super::quotas::Case;
use super::world::released;

/// Changes a cluster before its first reconcile.
type Prepare = fn(&mut Case);

/// Adds a pod without GPUs to the node.
fn add_guard(case: &mut Case, cpus: &str) {
    let guard = json!({"metadata": {"name": "guard", "namespace": "other", "uid": "guard", "labels": {"guard": "x"}},
        "spec": {"nodeName": "n1", "containers": [{"name": "main", "resources": {"requests": {"cpu": cpus}}}]}});
    case.world.pods.insert("other/guard".to_owned(), guard);
}

fn edit(case: &mut Case, pod: &str, edit: impl FnOnce(&mut Value)) {
    case.world.change(|world| &mut world.pods, pod, edit);
}

fn request_cpus(case: &mut Case, pod: &str, cpus: &str) {
    edit(case, pod, |pod| pod["spec"]["containers"][0]["resources"]["requests"] = json!({"cpu": cpus}));
}

/// Sets a required rule about pods with the label of the guard.
fn set_rule(case: &mut Case, pod: &str, kind: &str) {
    let term =
        json!({"labelSelector": {"matchLabels": {"guard": "x"}}, "topologyKey": HOSTNAME, "namespaces": ["other"]});
    let rules = json!({kind: {"requiredDuringSchedulingIgnoredDuringExecution": [term]}});
    edit(case, pod, |pod| pod["spec"]["affinity"] = rules);
}

/// A pod of a whole GPU waits, a smaller pod has overtaken it, and another small pod arrives.
/// Returns the pods that are released then.
fn released_beside_a_long_wait(prepare: impl FnOnce(&mut Case)) -> Vec<String> {
    let mut case = Case::new(1, &[("a", json!({})), ("b", json!({}))])
        .with_ageing(3)
        .waiting(&[("p", "a", 10, 0)])
        .running(&[(("s0", "b", 5, 0), 0)]);
    prepare(&mut case);
    for _ in 0..5 {
        let actions = case.step();
        assert!(actions.releases.is_empty() && actions.evictions.is_empty(), "{actions:?}");
    }
    case.add(("s1", "b", 5, 0), None);
    released(&case.step()).into_iter().map(|(pod, _)| pod.to_owned()).collect()
}

#[test]
fn room_is_reserved_for_a_pod_that_waits_only_for_pods_with_gpus() {
    assert!(released_beside_a_long_wait(|_| {}).is_empty());
    let released = released_beside_a_long_wait(|case| {
        request_cpus(case, "a/p", "6");
        request_cpus(case, "b/s0", "6");
    });
    assert!(released.is_empty(), "the pod that has overtaken it uses the CPU: {released:?}");
}

#[test]
fn no_room_is_reserved_for_a_pod_that_cannot_use_the_node() {
    let cases: [(&str, Prepare); 3] = [
        ("anti-affinity", |case| {
            add_guard(case, "1");
            set_rule(case, "a/p", "podAntiAffinity");
        }),
        ("affinity", |case| set_rule(case, "a/p", "podAffinity")),
        ("CPU", |case| {
            add_guard(case, "6");
            request_cpus(case, "a/p", "6");
        }),
    ];
    for (obstacle, prepare) in cases {
        assert_eq!(released_beside_a_long_wait(prepare), ["b/s1"], "{obstacle}");
    }
}

#[test]
fn a_pod_that_cannot_use_a_node_does_not_keep_the_next_pod_of_its_quota_from_a_reservation() {
    let prepare = |second: bool| {
        released_beside_a_long_wait(move |case| {
            set_rule(case, "a/p", "podAffinity");
            if second {
                case.add(("q", "a", 10, 0), None);
                case.end("b/s0");
                case.add(("s0", "b", 5, 0), Some(0));
            }
        })
    };
    assert_eq!(prepare(false), ["b/s1"]);
    assert!(prepare(true).is_empty(), "room is reserved for q");
}

#[test]
fn the_time_behind_another_gate_does_not_count() {
    let mut case = Case::new(1, &[("a", json!({})), ("b", json!({}))])
        .with_ageing(5)
        .waiting(&[("p", "a", 10, 0)])
        .running(&[(("s0", "b", 5, 0), 0)]);
    edit(&mut case, "a/p", |pod| pod["spec"]["schedulingGates"] = json!([{"name": "queue"}, {"name": GATE}]));
    for _ in 0..10 {
        case.step();
    }
    edit(&mut case, "a/p", |pod| pod["spec"]["schedulingGates"] = json!([{"name": GATE}]));
    case.step();
    case.add(("s1", "b", 5, 0), None);
    assert_eq!(released(&case.step()), [("b/s1", "reserved")], "it waits for 2 s");
    for _ in 0..5 {
        case.step();
    }
    case.end("b/s1");
    case.add(("s2", "b", 5, 0), None);
    assert_eq!(released(&case.step()), [], "it waits for 8 s");
}

/// While an older pod runs, too few units remain for the pod beside the amount that is not lent.
#[test]
fn no_room_is_reserved_while_older_pods_leave_too_little_for_other_guarantees() {
    let mut case = Case::new(2, &[("a", json!({})), ("b", json!({})), ("idle", json!({"min": 10, "lend": 6}))])
        .with_ageing(3)
        .running(&[(("s0", "b", 10, 0), 0)])
        .waiting(&[("p", "a", 10, 0)]);
    for _ in 0..5 {
        assert!(case.step().releases.is_empty());
    }
    case.add(("s1", "b", 5, 0), None);
    assert_eq!(released(&case.step()), [("b/s1", "reserved")]);
}

/// Otherwise small pods on other GPUs could keep the reserved units unused forever.
#[test]
fn borrowers_leave_room_for_a_reservation_beside_what_is_kept_for_guarantees() {
    let mut case = Case::new(2, &[("a", json!({})), ("b", json!({})), ("idle", json!({"min": 10, "lend": 6}))])
        .with_ageing(3)
        .waiting(&[("p", "a", 10, 0)])
        .running(&[(("s0", "b", 7, 0), 0)]);
    for _ in 0..5 {
        assert!(case.step().releases.is_empty(), "p would leave less than 0.4 GPUs");
    }
    case.add(("s1", "b", 3, 0), None);
    assert_eq!(released(&case.step()), []);
    case.end("b/s0");
    case.step();
    case.step();
    assert!(case.is_running().contains("p"), "{:?}", case.is_running());
}
