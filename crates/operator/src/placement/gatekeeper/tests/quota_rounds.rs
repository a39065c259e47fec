//! Tests the delay of evictions that had no effect, because pods that the operator did not release
//! use what was freed.
use serde_json::{Value, json};

use super::quotas::Case;
use crate::evict::EvictionResult;

/// Returns the victims of all evictions, in order.
fn evicted(case: &Case) -> Vec<&str> {
    case.evicted.iter().map(|(_, _, victim)| victim.as_str()).collect()
}

/// Lets a pod request most of the CPUs of the node.
fn request_cpus(case: &mut Case, pod: &str) {
    let set = |pod: &mut Value| pod["spec"]["containers"][0]["resources"]["requests"] = json!({"cpu": "6"});
    case.world.change(|world| &mut world.pods, pod, set);
}

/// Pods that the operator does not release use the freed CPUs. The shares that a1 needs are always
/// free. Small pods come and go beside these shares.
#[test]
fn evictions_without_effect_are_delayed_although_pods_are_released_to_other_shares_of_the_gpu() {
    let mut case = Case::new(1, &[("a", json!({"min": 5, "lend": 0})), ("c", json!({"min": 5, "lend": 0}))])
        .running(&[(("c1", "c", 1, 0), 0)])
        .waiting(&[("a1", "a", 5, 0)]);
    request_cpus(&mut case, "a/a1");
    for round in 0..10 {
        if round < 4 {
            case.add((&format!("x{round}"), "-", 1, 0), Some(0));
            request_cpus(&mut case, &format!("other/x{round}"));
        }
        if round > 0 {
            case.end(&format!("c/s{}", round - 1));
        }
        let small = format!("s{round}");
        case.add((&small, "c", 1, 0), None);
        case.step();
        assert!(case.is_running().contains(&small), "{:?}", case.is_running());
    }
    assert_eq!(evicted(&case), ["x0", "x1", "x2"]);
}

/// The API server refuses to evict the last pod of a gang. The operator asks again and again.
#[test]
fn the_rest_of_a_gang_does_not_end_the_delay_of_evictions_without_effect() {
    let mut case = Case::new(2, &[("a", json!({"min": 10})), ("b", json!({}))])
        .waiting(&[("g1", "b", 10, 0), ("g2", "b", 10, 0)])
        .gang("b", "train", 2, &["g1", "g2"]);
    assert_eq!(case.step().releases.len(), 2);
    case.step();
    let gpu = usize::from(case.reality.given["b/g1"].0 == "n1-GPU-1");
    let mut case = case.waiting(&[("a1", "a", 10, 0)]);
    let mut retries = 0;
    for round in 0..40 {
        case.failing_eviction = Some(("b/g2".to_owned(), EvictionResult::Refused("no".to_owned())));
        case.step();
        retries += usize::from(case.failing_eviction.is_none());
        if round < 4 {
            case.add((&format!("x{round}"), "-", 10, 0), Some(gpu));
        }
    }
    assert!(retries >= 3, "{retries} requests to evict g2");
    assert_eq!(evicted(&case), ["g1", "x0", "x1", "x2"]);
}

/// Pods that the operator does not release use the shares that were evicted for a1. The pods of c
/// use the other shares of the GPU, and come and go.
#[test]
fn evictions_without_effect_are_delayed_although_all_other_pods_of_the_gpu_are_replaced() {
    let mut case = Case::new(1, &[("a", json!({"min": 5, "lend": 0})), ("c", json!({"min": 5, "lend": 0}))])
        .running(&[(("x0", "-", 5, 0), 0)])
        .waiting(&[("s0", "c", 1, 0), ("s1", "c", 1, 0), ("s2", "c", 1, 0), ("s3", "c", 1, 0), ("s4", "c", 1, 0)]);
    assert_eq!(case.step().releases.len(), 5);
    let mut case = case.waiting(&[("a1", "a", 5, 0)]);
    for round in 0..15 {
        case.step();
        if round < 3 {
            case.add((&format!("x{}", round + 1), "-", 5, 0), Some(0));
        }
        case.end(&format!("c/s{round}"));
        case.add((&format!("s{}", round + 5), "c", 1, 0), None);
    }
    assert_eq!(evicted(&case), ["x0", "x1", "x2"]);
}
