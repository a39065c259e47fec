//! Tests that a quota does not use a multiple of its guarantee while its deleted pods terminate.
use serde_json::{Value, json};

use super::quotas::Case;

/// A day after the first second of a case.
const A_DAY_LATER: &str = "1970-01-13T13:46:40Z";
/// Five minutes after the first second of a case: within the maximum grace period.
const SOON: &str = "1970-01-12T13:51:40Z";

/// A pod of the quota `a` uses half a GPU, and terminates until `until`. Another pod of the quota
/// waits, and needs the GPU that `b` borrows.
fn deleted_and_replaced(a: Value, until: &str) -> Case {
    let mut case = Case::new(2, &[("a", a), ("b", json!({})), ("c", json!({"min": 5}))])
        .running(&[(("a1", "a", 5, 0), 0), (("c1", "c", 5, 0), 0), (("b1", "b", 10, 0), 1)])
        .waiting(&[("a2", "a", 10, 0)]);
    case.world.terminate("a/a1", until);
    case
}

#[test]
fn a_guarantee_is_not_reclaimed_again_for_pods_that_still_terminate() {
    for (until, spec) in [
        (A_DAY_LATER, json!({"min": 10})),
        (SOON, json!({"min": 10})),
        (A_DAY_LATER, json!({"min": 10, "guarantee": "Cells"})),
        (SOON, json!({"min": 10, "guarantee": "Cells"})),
    ] {
        let mut case = deleted_and_replaced(spec.clone(), until);
        for _ in 0..3 {
            let actions = case.step();
            assert!(actions.evictions.is_empty(), "{until} {spec}: {:?}", case.evicted);
            let message = &actions.waiting["a/a2"].message;
            let says_why = message.contains("whose terminating pods still use 0.5 GPUs");
            assert_eq!(says_why, until == SOON, "{until} {spec}: {message}");
        }
        case.end("a/a1");
        case.step();
        let expected = [("Reclaim".to_owned(), "a2".to_owned(), "b1".to_owned())];
        assert_eq!(case.evicted, expected, "{until} {spec}: it has ended");
    }
}

#[test]
fn a_borrower_takes_no_fair_share_again_for_pods_that_still_terminate() {
    for until in [A_DAY_LATER, SOON] {
        let mut case = Case::new(3, &[("a", json!({})), ("b", json!({})), ("c", json!({"min": 5}))])
            .running(&[(("a1", "a", 5, 0), 0), (("c1", "c", 5, 0), 0)])
            .running(&[(("b1", "b", 10, 0), 1), (("b2", "b", 10, 0), 2)])
            .waiting(&[("a2", "a", 10, 0)]);
        case.world.terminate("a/a1", until);
        for _ in 0..3 {
            assert!(case.step().evictions.is_empty(), "{until}: {:?}", case.evicted);
        }
        case.end("a/a1");
        case.step();
        assert_eq!(case.evicted.len(), 1, "{until}: {:?}", case.evicted);
    }
}

/// Otherwise pods with a long grace period could not be evicted once they are deleted.
#[test]
fn pods_that_terminate_late_borrow_what_exceeds_their_guarantee() {
    let mut case = Case::new(2, &[("a", json!({"min": 10})), ("c", json!({"min": 10}))])
        .running(&[(("a1", "a", 10, 0), 0), (("a2", "a", 10, 0), 1)])
        .waiting(&[("c1", "c", 10, 0)]);
    for pod in ["a/a1", "a/a2"] {
        case.world.terminate(pod, A_DAY_LATER);
    }
    let actions = case.step();
    let victims: Vec<_> =
        actions.evictions.iter().map(|one| (one.pod.as_str(), one.quota.as_ref().unwrap().grace)).collect();
    assert_eq!(victims, [("a/a2", Some(30))]);
}

#[test]
fn a_pod_uses_the_room_of_a_pod_of_its_quota_that_terminates() {
    let mut case = Case::new(2, &[("a", json!({"min": 10})), ("b", json!({}))])
        .running(&[(("a1", "a", 10, 0), 0), (("b1", "b", 10, 0), 1)])
        .waiting(&[("a2", "a", 10, 0)]);
    case.world.terminate("a/a1", SOON);
    case.step();
    case.end("a/a1");
    let case = case.until_rest();
    assert!(case.evicted.is_empty() && case.is_running().contains("a2"), "{:?}", case.evicted);
}

#[test]
fn a_pod_of_several_gpus_counts_once_while_pods_of_its_quota_terminate() {
    let mut case = Case::new(3, &[("a", json!({"min": 30})), ("b", json!({}))])
        .running(&[(("a1", "a", 1, 0), 0), (("b1", "b", 10, 0), 1), (("b2", "b", 10, 0), 2)])
        .waiting(&[("a2", "a", 10, 0)]);
    let add_container = |pod: &mut Value| {
        let mut second = pod["spec"]["containers"][0].clone();
        second["name"] = json!("second");
        pod["spec"]["containers"].as_array_mut().unwrap().push(second);
    };
    case.world.change(|world| &mut world.pods, "a/a2", add_container);
    case.world.terminate("a/a1", SOON);
    case.step();
    let victims: Vec<&str> = case.evicted.iter().map(|(_, _, victim)| victim.as_str()).collect();
    assert_eq!(victims, ["b2"], "0.1 GPUs terminate, and 2 more are within the guarantee of 3");
}

#[test]
fn a_quota_does_not_use_unlent_room_again_for_pods_that_still_terminate() {
    for spec in [json!({"min": 10}), json!({"min": 10, "guarantee": "Cells"})] {
        let mut case = Case::new(3, &[("a", spec.clone()), ("b", json!({"min": 20, "lend": 0}))])
            .running(&[(("a1", "a", 10, 0), 0)])
            .waiting(&[("a2", "a", 10, 0)]);
        case.world.terminate("a/a1", SOON);
        for _ in 0..3 {
            let actions = case.step();
            assert!(actions.releases.is_empty(), "{spec}: the free GPUs are kept for b: {:?}", actions.releases);
        }
        case.end("a/a1");
        let case = case.until_rest();
        assert!(case.is_running().contains("a2"), "{spec}");
    }
}
