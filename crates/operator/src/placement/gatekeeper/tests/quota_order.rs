//! Tests which waiting pod gets units first while quotas are enforced.
use serde_json::{Value, json};

use super::quotas::{Case, Ending};
use super::world::released;

/// Sets the CPUs that a pod requests.
pub(super) fn request_cpus(case: &mut Case, pod: &str, cpus: &str) {
    let set = |object: &mut Value| object["spec"]["containers"][0]["resources"]["requests"] = json!({"cpu": cpus});
    case.world.change(|world| &mut world.pods, pod, set);
}

/// Two pods that borrow terminate for two pods within their guarantees.
fn two_nominees_beside_each_other() -> Case {
    let mut case = Case::new(1, &[("a", json!({"min": 5})), ("b", json!({"min": 5})), ("c", json!({}))])
        .running(&[(("c1", "c", 5, 0), 0), (("c2", "c", 5, 0), 0)])
        .waiting(&[("b1", "b", 5, 0), ("a1", "a", 5, 0)]);
    case.ending = Ending::Terminating;
    assert_eq!(case.step().evictions.len(), 2);
    case
}

#[test]
fn of_two_nominated_pods_the_older_gets_the_first_room_and_does_not_wait_for_the_other() {
    for (first, second) in [("c/c1", "c/c2"), ("c/c2", "c/c1")] {
        let mut case = two_nominees_beside_each_other();
        assert_eq!(released(&case.step()), []);
        case.end(first);
        assert_eq!(released(&case.step()), [("b/b1", "reserved")], "{first} has ended");
        assert_eq!(released(&case.step()), []);
        case.end(second);
        assert_eq!(released(&case.step()), [("a/a1", "reserved")]);
        assert_eq!(case.evicted.len(), 2);
    }
}

#[test]
fn newer_nominated_pods_do_not_delay_an_older_one() {
    let mut case = two_nominees_beside_each_other();
    // The turn of a0 is before the turn of b1, because the priority of a0 is higher.
    case.add(("a0", "a", 3, 9), None);
    case.step();
    case.end("c/c1");
    let actions = case.step();
    assert_eq!(released(&actions), [("b/b1", "reserved")], "{actions:?}");
}

/// Shares and CPU are freed together. A pod that leaves the shares to another pod must also leave
/// the CPU.
#[test]
fn a_borrower_of_higher_priority_does_not_use_cpu_that_is_kept_for_a_guarantee() {
    let mut case = Case::new(1, &[("a", json!({"min": 5})), ("b", json!({})), ("c", json!({}))])
        .running(&[(("c1", "c", 6, 0), 0)])
        .waiting(&[("a1", "a", 5, 0), ("b1", "b", 2, 1000)]);
    for (pod, cpus) in [("c/c1", "6"), ("a/a1", "7"), ("b/b1", "2")] {
        request_cpus(&mut case, pod, cpus);
    }
    case.ending = Ending::Terminating;
    let actions = case.step();
    assert_eq!(
        (case.evicted.len(), released(&actions)),
        (1, vec![]),
        "b1 would use CPU that a1 waits for: {actions:?}"
    );
    case.end("c/c1");
    assert_eq!(released(&case.step()), [("a/a1", "reserved")]);
}

#[test]
fn from_the_configured_priority_on_a_pod_takes_what_another_quota_is_guaranteed() {
    let case = |limit: Option<i32>, priority: i32| {
        Case::new(1, &[("a", json!({})), ("b", json!({"min": 10}))])
            .with_override_priority(limit)
            .running(&[(("b1", "b", 10, 50), 0)])
            .waiting(&[("a1", "a", 10, priority)])
    };
    case(Some(100), 100).expect(&[("Priority", "a1", "b1")], &["a1"]);
    for (limit, priority) in [(None, 100), (Some(101), 100), (Some(0), 50)] {
        case(limit, priority).expect(&[], &["b1"]);
    }
}

#[test]
fn a_pod_that_overrides_quotas_stays_within_its_maximum() {
    Case::new(2, &[("a", json!({"min": 0, "max": 9})), ("b", json!({"min": 20}))])
        .with_override_priority(Some(100))
        .running(&[(("a1", "a", 5, 0), 0), (("b1", "b", 10, 0), 1)])
        .waiting(&[("a2", "a", 10, 100), ("a3", "a", 5, 100)])
        .expect(&[("Priority", "a3", "a1")], &["a3", "b1"]);
}

#[test]
fn only_a_higher_priority_evicts_a_pod_that_overrides_quotas() {
    Case::new(1, &[("a", json!({})), ("b", json!({"min": 10})), ("c", json!({}))])
        .with_override_priority(Some(100))
        .running(&[(("a1", "a", 10, 100), 0)])
        .waiting(&[("b1", "b", 10, 100), ("c1", "c", 10, 99)])
        .expect(&[], &["a1"]);
    Case::new(1, &[("a", json!({})), ("b", json!({"min": 10})), ("c", json!({}))])
        .with_override_priority(Some(100))
        .running(&[(("a1", "a", 10, 100), 0)])
        .waiting(&[("b1", "b", 10, 0), ("c1", "c", 10, 101)])
        .expect(&[("Priority", "c1", "a1")], &["c1"]);
}

#[test]
fn a_pod_that_overrides_quotas_uses_free_room_before_a_guarantee() {
    Case::new(1, &[("a", json!({})), ("b", json!({"min": 10, "lend": 0}))])
        .with_override_priority(Some(100))
        .waiting(&[("b1", "b", 10, 0), ("a1", "a", 10, 100)])
        .expect(&[], &["a1"]);
}
