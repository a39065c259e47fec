//! Tests that an evicted gang starts again although some of its pods had completed.
use serde_json::json;

use super::quotas::{Case, Ending};
use crate::evict::EvictionResult;
use crate::policies::demand::Reason;

/// Returns a case in which g2 of a gang of four pods completed, and the others were evicted for a2.
/// All GPUs are free again. Also returns when the newest pod of the gang was created.
fn evicted_after_completion() -> (Case, u64) {
    let mut case = Case::new(4, &[("a", json!({"min": 20})), ("b", json!({}))])
        .waiting(&[("g1", "b", 10, 0), ("g2", "b", 10, 0), ("g3", "b", 10, 0), ("g4", "b", 10, 0)])
        .gang("b", "train", 4, &["g1", "g2", "g3", "g4"]);
    assert_eq!(case.step().releases.len(), 4);
    case.step();
    case.end("b/g2");
    // The GPU of g2 is free for a1.
    let mut case = case.waiting(&[("a1", "a", 10, 0), ("a2", "a", 10, 0)]);
    case.step();
    let evicted: Vec<&str> = case.evicted.iter().map(|(_, _, victim)| victim.as_str()).collect();
    assert_eq!(evicted, ["g1", "g3", "g4"]);
    let created = case.seconds;
    case.step();
    case.end("a/a1");
    case.end("a/a2");
    (case, created)
}

#[test]
fn an_evicted_gang_starts_again_without_pods_that_had_completed() {
    let (mut case, created) = evicted_after_completion();
    while case.seconds < created + 29 {
        let actions = case.step();
        assert!(actions.releases.is_empty() && actions.waiting["b/g1"].reason == Reason::GangIncomplete);
    }
    assert_eq!(case.step().releases.len(), 3);
}

/// A controller may create the pods again one after the other.
#[test]
fn an_evicted_gang_waits_until_all_evicted_pods_exist() {
    let (mut case, created) = evicted_after_completion();
    case.end("b/g3");
    while case.seconds < created + 60 {
        let actions = case.step();
        assert!(actions.releases.is_empty() && actions.waiting["b/g1"].reason == Reason::GangIncomplete);
    }
    let mut case = case.waiting(&[("g3", "b", 10, 0)]).gang("b", "train", 4, &["g3"]);
    let created = case.seconds;
    while case.seconds < created + 29 {
        assert!(case.step().releases.is_empty());
    }
    assert_eq!(case.step().releases.len(), 3);
}

/// Returns the releases of pods of b within a minute.
fn releases_within_a_minute(case: &mut Case) -> Vec<String> {
    let released = (0..60).flat_map(|_| case.step().releases);
    released.map(|release| release.pod).filter(|pod| pod.starts_with("b/")).collect()
}

/// The launcher uses no GPU, so it is not evicted. The third worker takes long to end.
#[test]
fn an_evicted_gang_with_a_launcher_waits_until_all_evicted_pods_exist() {
    let mut case = Case::new(3, &[("a", json!({"min": 30})), ("b", json!({}))])
        .waiting(&[("w1", "b", 10, 0), ("w2", "b", 10, 0), ("w3", "b", 10, 0), ("launcher", "b", 0, 0)])
        .gang("b", "train", 4, &["w1", "w2", "w3", "launcher"]);
    let without_gpus = json!([{"name": "main", "resources": {"requests": {"cpu": "1"}}}]);
    case.world.change(
        |world| &mut world.pods,
        "b/launcher",
        |pod| (pod["spec"]["containers"], pod["spec"]["schedulingGates"]) = (without_gpus, json!([])),
    );
    assert_eq!(case.step().releases.len(), 3);
    case.step();
    case.ending = Ending::Terminating;
    let mut case = case.waiting(&[("a1", "a", 10, 0)]);
    case.step();
    assert_eq!(case.evicted.len(), 3);
    case.step();
    case.end("b/w1");
    case.end("b/w2");
    let mut case = case.waiting(&[("w1", "b", 10, 0), ("w2", "b", 10, 0)]).gang("b", "train", 4, &["w1", "w2"]);
    assert_eq!(releases_within_a_minute(&mut case), Vec::<String>::new());
}

/// The API server evicts g1, but its answer is lost.
#[test]
fn a_pod_that_may_have_been_evicted_belongs_to_its_gang() {
    let mut case = Case::new(3, &[("a", json!({"min": 5})), ("b", json!({}))])
        .waiting(&[("g1", "b", 10, 0), ("g2", "b", 10, 0), ("g3", "b", 10, 0)])
        .gang("b", "train", 3, &["g1", "g2", "g3"]);
    assert_eq!(case.step().releases.len(), 3);
    case.step();
    let mut case = case.waiting(&[("a1", "a", 5, 0)]);
    case.failing_eviction = Some(("b/g1".to_owned(), EvictionResult::Failed("timeout".to_owned())));
    case.step();
    case.world.terminate("b/g1", "2100-01-01T00:00:00Z");
    case.step();
    let evicted: Vec<&str> = case.evicted.iter().map(|(_, _, victim)| victim.as_str()).collect();
    assert_eq!(evicted, ["g2", "g3"]);
    assert_eq!(releases_within_a_minute(&mut case), Vec::<String>::new());
}
