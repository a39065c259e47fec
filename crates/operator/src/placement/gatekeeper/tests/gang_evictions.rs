//! Tests that all pods of a gang are evicted, although each eviction is a request of its own.
use std::time::Duration;

use cleave_api::names::NOMINATION_ANNOTATION;
use serde_json::{Value, json};

use super::quota_evictions::add_budget;
use super::quotas::{Case, Ending};
use crate::evict::EvictionResult;

/// A gang of b uses three GPUs, and a1 reclaims a half of one of them.
fn case() -> Case {
    let mut case = Case::new(3, &[("a", json!({"min": 5})), ("b", json!({}))])
        .waiting(&[("g1", "b", 10, 0), ("g2", "b", 10, 0), ("g3", "b", 10, 0)])
        .gang("b", "train", 3, &["g1", "g2", "g3"]);
    assert_eq!(case.step().releases.len(), 3);
    case.step();
    case.waiting(&[("a1", "a", 5, 0)])
}

/// Reconciles for some seconds.
fn steps(case: &mut Case, seconds: u64) {
    (0..seconds).for_each(|_| drop(case.step()));
}

fn evicted(case: &Case) -> Vec<&str> {
    case.evicted.iter().map(|(_, _, victim)| victim.as_str()).collect()
}

fn failures() -> [EvictionResult; 4] {
    let message = || "the test failed".to_owned();
    [
        EvictionResult::Failed(message()),
        EvictionResult::Refused(message()),
        EvictionResult::Protected(message()),
        EvictionResult::Throttled(Duration::from_secs(1)),
    ]
}

#[test]
fn a_gang_of_which_one_eviction_fails_is_evicted_completely() {
    for failure in failures() {
        for is_leader_lost in [false, true] {
            let mut case = case();
            case.failing_eviction = Some(("b/g2".to_owned(), failure.clone()));
            case.step();
            assert_eq!(evicted(&case), ["g1"], "{failure:?}");
            case.losses = u64::from(is_leader_lost);
            steps(&mut case, 20);
            let mut all = case.evicted.clone();
            all.sort_unstable();
            let of = |victim: &str| ("Reclaim".to_owned(), "a1".to_owned(), victim.to_owned());
            assert_eq!(all, ["g1", "g2", "g3"].map(of), "{failure:?}, leader lost: {is_leader_lost}");
            assert_eq!(case.is_running(), ["a1".to_owned()].into(), "half a gang is useless");
        }
    }
}

#[test]
fn the_rest_of_a_gang_is_evicted_although_the_pod_that_needed_its_gpus_is_deleted() {
    let mut case = case();
    case.failing_eviction = Some(("b/g2".to_owned(), EvictionResult::Refused("no".to_owned())));
    case.step();
    case.end("a/a1");
    // The GPU of g1 is in use again.
    let mut case = case.waiting(&[("a2", "a", 5, 0)]);
    steps(&mut case, 20);
    assert_eq!(evicted(&case), ["g1", "g3", "g2"]);
}

#[test]
fn a_gang_of_which_no_pod_was_evicted_runs_on() {
    for failure in failures() {
        for is_leader_lost in [false, true] {
            let mut case = case();
            case.failing_eviction = Some(("b/g1".to_owned(), failure.clone()));
            case.step();
            case.end("a/a1");
            case.losses = u64::from(is_leader_lost);
            steps(&mut case, 20);
            assert_eq!(evicted(&case), Vec::<&str>::new(), "{failure:?}, leader lost: {is_leader_lost}");
        }
    }
}

#[test]
fn a_request_without_an_answer_may_have_evicted_a_pod() {
    let mut case = case();
    case.failing_eviction = Some(("b/g1".to_owned(), EvictionResult::Failed("timeout".to_owned())));
    case.step();
    case.world.terminate("b/g1", "1970-01-12T13:47:10Z");
    case.end("a/a1");
    steps(&mut case, 2);
    assert_eq!(evicted(&case), ["g2", "g3"]);
}

/// The replacements of the evicted pods find GPUs while the API server refuses to evict the last
/// pod. All pods of the gang run again, and nothing is left to evict.
#[test]
fn a_gang_that_is_complete_again_runs_on() {
    let mut case = case();
    case.failing_eviction = Some(("b/g2".to_owned(), EvictionResult::Refused("no".to_owned())));
    case.step();
    case.end("a/a1");
    steps(&mut case, 30);
    assert_eq!(evicted(&case), ["g1", "g3"]);
    assert_eq!(case.is_running(), ["g1", "g2", "g3"].map(str::to_owned).into());
}

/// Its owner deleted the pod, so its replacement waits alone.
#[test]
fn a_gang_that_loses_a_pod_otherwise_is_not_evicted() {
    for losses in [0, u64::MAX] {
        let mut case = case();
        case.end("a/a1");
        case.end("b/g1");
        case.losses = losses;
        steps(&mut case, 20);
        assert_eq!(evicted(&case), Vec::<&str>::new(), "losses {losses:x}");
    }
}

/// Returns the nomination that is written to a1.
fn note(case: &Case) -> String {
    case.world.pods["a/a1"]["metadata"]["annotations"][NOMINATION_ANNOTATION].as_str().unwrap_or_default().to_owned()
}

/// The evictions of the gang fail. Then one of its pods ends by itself, and a1 uses its GPU.
#[test]
fn a_new_leader_does_not_evict_a_gang_of_which_no_pod_was_evicted() {
    for failure in failures() {
        let mut case = case();
        case.failing_eviction = Some(("b/g1".to_owned(), failure.clone()));
        case.step();
        let is_unanswered = matches!(failure, EvictionResult::Failed(_));
        assert_eq!(note(&case).contains("evicts"), is_unanswered, "{failure:?}");
        case.end("b/g2");
        case.losses = 1;
        steps(&mut case, 20);
        assert_eq!(evicted(&case), Vec::<&str>::new(), "{failure:?}");
        assert_eq!(case.is_running(), ["a1", "g1", "g3"].map(str::to_owned).into(), "{failure:?}");
    }
}

/// The leader is lost before it knows the result of the first request.
#[test]
fn a_new_leader_evicts_the_rest_of_a_gang_if_a_pod_terminates_because_of_an_eviction() {
    for (is_eviction, rest) in [(true, vec!["g2", "g3"]), (false, vec![])] {
        let mut case = case();
        case.failing_eviction = Some(("b/g1".to_owned(), EvictionResult::Failed("timeout".to_owned())));
        case.step();
        case.world.terminate("b/g1", "1970-01-12T13:47:10Z");
        if is_eviction {
            let condition = json!([{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]);
            let set = |pod: &mut Value| pod["status"]["conditions"] = condition;
            case.world.change(|world| &mut world.pods, "b/g1", set);
        }
        case.losses = 1;
        steps(&mut case, 2);
        assert_eq!(evicted(&case), rest, "eviction {is_eviction}");
    }
}

#[test]
fn a_new_leader_continues_no_eviction_without_an_enforced_quota_or_while_a_quota_is_unknown() {
    type Change = fn(&mut Case);
    let count = |case: &mut Case| {
        case.world.quotas.iter_mut().for_each(|quota| quota["spec"]["mode"] = json!("Count"));
    };
    let add_unknown = |case: &mut Case| {
        let mut quota = case.world.quotas[0].clone();
        quota["metadata"]["name"] = json!("z");
        quota["spec"] = json!({"namespaces": ["z"], "mode": "Unknown"});
        case.world.quotas.push(quota);
    };
    let changes: [(&str, Change, usize); 3] = [("none", |_| {}, 3), ("count", count, 1), ("unknown", add_unknown, 1)];
    for (change, apply, evictions) in changes {
        let mut case = case();
        case.failing_eviction = Some(("b/g2".to_owned(), EvictionResult::Refused("no".to_owned())));
        case.step();
        assert!(note(&case).contains("\"begun\":true"), "{}", note(&case));
        apply(&mut case);
        case.losses = 1;
        steps(&mut case, 3);
        assert_eq!(evicted(&case).len(), evictions, "{change}: {:?}", case.evicted);
    }
}

/// Otherwise the disruption budget would protect the rest of the gang, and half a gang is useless.
#[test]
fn a_new_leader_deletes_the_rest_of_a_gang_that_the_old_leader_deleted() {
    let mut case = Case::new(3, &[("a", json!({"min": 5})), ("b", json!({}))])
        .with_budget_patience(3)
        .waiting(&[("g1", "b", 10, 0), ("g2", "b", 10, 0), ("g3", "b", 10, 0)])
        .gang("b", "train", 3, &["g1", "g2", "g3"]);
    assert_eq!(case.step().releases.len(), 3);
    case.step();
    let mut case = case.waiting(&[("a1", "a", 5, 0)]);
    add_budget(&mut case, "b", 0);
    case.failing_eviction = Some(("b/g2".to_owned(), EvictionResult::Failed("timeout".to_owned())));
    for _ in 0..10 {
        case.step();
        if !case.evicted.is_empty() {
            break;
        }
    }
    assert_eq!(evicted(&case), ["g1"]);
    case.losses = 1;
    let actions = case.step();
    let deleted: Vec<_> =
        actions.evictions.iter().map(|one| (one.pod.as_str(), one.quota.as_ref().unwrap().force)).collect();
    assert_eq!(deleted, [("b/g2", true), ("b/g3", true)]);
}

/// The API server refuses each eviction of g2. Its GPU never becomes free, so no other pod is
/// evicted there.
#[test]
fn a_pod_whose_eviction_is_requested_again_does_not_count_as_gone() {
    let mut case = Case::new(2, &[("a", json!({"min": 5})), ("b", json!({})), ("c", json!({"min": 10}))])
        .running(&[(("g1", "b", 10, 0), 0), (("g2", "b", 5, 0), 1), (("v", "b", 5, 7), 1)])
        .gang("b", "train", 2, &["g1", "g2"])
        .waiting(&[("a1", "a", 5, 0)]);
    let refusal = || Some(("b/g2".to_owned(), EvictionResult::Refused("no".to_owned())));
    case.failing_eviction = refusal();
    case.step();
    case.failing_eviction = refusal();
    case.step();
    assert!(case.is_running().contains("a1"), "{:?}", case.is_running());
    let mut case = case.waiting(&[("c1", "c", 10, 0)]);
    for _ in 0..60 {
        case.failing_eviction = refusal();
        case.step();
    }
    assert_eq!(evicted(&case), ["g1"]);
}

/// One of the evicted pods has completed, and is not created again.
#[test]
fn a_gang_whose_replacements_run_beside_the_rest_runs_on_although_a_pod_is_missing() {
    let mut case = case();
    let refusal = || Some(("b/g2".to_owned(), EvictionResult::Refused("no".to_owned())));
    case.failing_eviction = refusal();
    case.step();
    case.end("a/a1");
    case.failing_eviction = refusal();
    case.step();
    assert_eq!(evicted(&case), ["g1", "g3"]);
    case.end("b/g3");
    for _ in 0..100 {
        if case.is_running().contains("g1") {
            break;
        }
        case.failing_eviction = refusal();
        case.step();
    }
    assert!(case.is_running().contains("g1"), "{:?}", case.is_running());
    case.failing_eviction = None;
    steps(&mut case, 200);
    assert_eq!(evicted(&case), ["g1", "g3"]);
    assert_eq!(case.is_running(), ["g1", "g2"].map(str::to_owned).into());
}

/// a2 is nominated for a GPU of the gang, and no other pod is evicted for it while the API server
/// is asked to evict the rest of the gang.
#[test]
fn no_other_pods_are_evicted_for_a_pod_that_gets_a_gpu_of_a_partly_evicted_gang() {
    let mut case = Case::new(4, &[("a", json!({"min": 30})), ("b", json!({})), ("c", json!({}))])
        .waiting(&[("g1", "b", 10, 0), ("g2", "b", 10, 0), ("g3", "b", 10, 0)])
        .gang("b", "train", 3, &["g1", "g2", "g3"]);
    assert_eq!(case.step().releases.len(), 3);
    let mut case = case.waiting(&[("v", "c", 10, 5)]);
    assert_eq!(case.step().releases.len(), 1);
    case.step();
    case.ending = Ending::Terminating;
    let mut case = case.waiting(&[("a1", "a", 10, 0), ("a2", "a", 10, 0)]);
    case.failing_eviction = Some(("b/g2".to_owned(), EvictionResult::Failed("timeout".to_owned())));
    steps(&mut case, 5);
    assert_eq!(evicted(&case), ["g1", "g2", "g3"]);
}

/// An admission policy denies the eviction of g2. The replacements of the others get the GPUs
/// again, because the gang of a needs all three.
#[test]
fn a_gang_of_which_one_pod_can_never_be_evicted_is_not_evicted_in_circles() {
    let mut case = Case::new(3, &[("a", json!({"min": 30})), ("b", json!({}))])
        .waiting(&[("g1", "b", 10, 0), ("g2", "b", 10, 0), ("g3", "b", 10, 0)])
        .gang("b", "train", 3, &["g1", "g2", "g3"]);
    assert_eq!(case.step().releases.len(), 3);
    case.step();
    let mut case = case.waiting(&[("w1", "a", 10, 0), ("w2", "a", 10, 0), ("w3", "a", 10, 0)]).gang(
        "a",
        "serve",
        3,
        &["w1", "w2", "w3"],
    );
    for _ in 0..1500 {
        case.failing_eviction = Some(("b/g2".to_owned(), EvictionResult::Refused("denied".to_owned())));
        case.step();
    }
    assert!(evicted(&case).len() <= 2, "{:?}", evicted(&case));
}

/// A replacement of the gang waits in the reconcile that evicts the others.
#[test]
fn no_replacement_is_released_in_the_reconcile_that_evicts_its_gang() {
    let mut case = Case::new(4, &[("a", json!({"min": 30})), ("b", json!({})), ("c", json!({"min": 7, "lend": 0}))])
        .running(&[(("c1", "c", 7, 0), 3)])
        .waiting(&[("g1", "b", 10, 0), ("g2", "b", 10, 0), ("g3", "b", 10, 0), ("g4", "b", 3, 0)])
        .gang("b", "train", 4, &["g1", "g2", "g3", "g4"]);
    assert_eq!(case.step().releases.len(), 4);
    case.step();
    case.end("b/g4");
    case.ending = Ending::Terminating;
    let mut case = case.waiting(&[("a1", "a", 10, 0), ("g4", "b", 3, 0)]).gang("b", "train", 4, &["g4"]);
    let actions = case.step();
    assert_eq!(evicted(&case), ["g1", "g2", "g3"]);
    assert!(actions.releases.is_empty(), "{:?}", actions.releases);
}
