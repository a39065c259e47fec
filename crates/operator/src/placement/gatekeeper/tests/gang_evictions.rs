//! Tests that all pods of a gang are evicted, although each eviction is a request of its own.
use std::time::Duration;

use serde_json::json;

use super::quotas::Case;
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
