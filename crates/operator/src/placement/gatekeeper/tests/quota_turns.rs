//! Tests which waiting pods have their turn when pods to evict are searched, and which pods are no
//! victims.
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use cleave_plan::quota::Settings;
use serde_json::{Value, json};

use super::quota_order::request_cpus;
use super::quotas::Case;
use super::world::{at, from_json, whole_gpus};
use crate::placement::cluster::{Cluster, ReconcileTime};
use crate::placement::gatekeeper::Gatekeeper;
use crate::placement::quotas::QuotaSettings;
use crate::pods::PodObject;
use crate::policies::demand::Reason;

/// Five minutes after the first second of a case: within the maximum grace period.
const SOON: &str = "1970-01-12T13:51:40Z";

/// Adds a hundred borrowers with different requests that no eviction helps, and waits until pods
/// to evict were searched for each of them. They are of this number of quotas without a guarantee.
fn with_hopeless_borrowers(mut case: Case, quotas: usize) -> Case {
    let template = case.world.quotas[0].clone();
    let names: Vec<String> = (0..quotas).map(|number| format!("hopeless-{number:02}")).collect();
    for name in &names {
        let mut quota = template.clone();
        (quota["metadata"]["name"], quota["spec"]) = (json!(name), json!({"namespaces": [name]}));
        case.world.quotas.push(quota);
    }
    for number in 0..100 {
        let (quota, name) = (names[number % quotas].as_str(), format!("p{number:03}"));
        case.add((&name, quota, 10, 0), None);
        request_cpus(&mut case, &format!("{quota}/{name}"), &format!("{}m", number + 1));
    }
    while case.step().more {}
    assert!(case.evicted.is_empty(), "{:?}", case.evicted);
    case
}

fn reclaims(case: &Case) -> Vec<(&str, &str)> {
    assert!(case.evicted.iter().all(|(kind, ..)| kind == "Reclaim"), "{:?}", case.evicted);
    case.evicted.iter().map(|(_, preemptor, victim)| (preemptor.as_str(), victim.as_str())).collect()
}

/// Repeated searches rotate. The result must not depend on whose turn it is.
const ROTATION: std::ops::Range<usize> = 0..4;

#[test]
fn a_pod_within_its_guarantee_does_not_wait_for_the_searches_of_borrowers() {
    for steps in ROTATION {
        let case = Case::new(2, &[("a", json!({"min": 10})), ("b", json!({})), ("c", json!({"min": 5}))]).running(&[
            (("a1", "a", 5, 0), 0),
            (("c1", "c", 5, 0), 0),
            (("b1", "b", 10, 0), 1),
        ]);
        let mut case = with_hopeless_borrowers(case, 20);
        case.world.terminate("a/a1", SOON);
        case.add(("a2", "a", 10, 0), None);
        // Its searches find nothing while a1 terminates.
        (0..=steps).for_each(|_| drop(case.step()));
        assert!(case.evicted.is_empty(), "{:?}", case.evicted);
        case.end("a/a1");
        case.step();
        assert_eq!(reclaims(&case), [("a2", "b1")], "after {steps} steps");
    }
}

#[test]
fn a_pod_whose_rights_rise_has_its_turn_at_once() {
    for steps in ROTATION {
        let case = Case::new(2, &[("a", json!({"min": 10})), ("b", json!({})), ("c", json!({"min": 5}))]).running(&[
            (("a0", "a", 5, 0), 0),
            (("c1", "c", 5, 0), 0),
            (("b1", "b", 10, 0), 1),
        ]);
        let mut case = with_hopeless_borrowers(case, 20);
        case.add(("a1", "a", 10, 0), None);
        (0..=steps).for_each(|_| drop(case.step()));
        assert!(case.evicted.is_empty(), "a1 borrows: {:?}", case.evicted);
        case.end("a/a0");
        case.step();
        assert_eq!(reclaims(&case), [("a1", "b1")], "after {steps} steps");
    }
}

#[test]
fn many_new_pods_of_a_quota_do_not_delay_the_guarantee_of_another() {
    let quotas =
        [("a", json!({"min": 10})), ("b", json!({})), ("c", json!({"min": 5})), ("large", json!({"min": 1000}))];
    let mut case = Case::new(2, &quotas).running(&[(("c1", "c", 5, 0), 0), (("b1", "b", 10, 0), 1)]);
    // The CPU that the large quota needs is not free.
    request_cpus(&mut case, "c/c1", "7");
    for number in 0..100 {
        let name = format!("p{number:03}");
        case.add((&name, "large", 10, 0), None);
        request_cpus(&mut case, &format!("large/{name}"), &format!("{}m", 5000 + number));
    }
    case.add(("a1", "a", 10, 0), None);
    case.step();
    assert_eq!(reclaims(&case), [("a1", "b1")]);
}

/// Otherwise the pods of one quota delay the borrowers of all others.
#[test]
fn a_quota_with_many_waiting_pods_does_not_delay_the_borrowers_of_another() {
    let case = Case::new(2, &[("a", json!({})), ("b", json!({})), ("c", json!({"min": 10}))]).running(&[
        (("b1", "b", 5, 0), 0),
        (("b2", "b", 5, 0), 0),
        (("c1", "c", 10, 0), 1),
    ]);
    let mut case = with_hopeless_borrowers(case, 1);
    // At first, not enough CPU is free.
    case.add(("a1", "a", 5, 0), None);
    request_cpus(&mut case, "c/c1", "6");
    request_cpus(&mut case, "a/a1", "7");
    case.step();
    assert!(case.evicted.is_empty(), "{:?}", case.evicted);
    request_cpus(&mut case, "c/c1", "0");
    case.step();
    assert_eq!(case.evicted, [("FairShare".to_owned(), "a1".to_owned(), "b2".to_owned())]);
}

#[test]
fn no_search_is_repeated_while_nothing_in_the_pool_changes() {
    let case = Case::new(1, &[("a", json!({"min": 10})), ("b", json!({}))]).running(&[(("a1", "a", 10, 0), 0)]);
    let mut case = with_hopeless_borrowers(case, 20);
    let (mut cluster, start) = (case.world.cluster(), case.seconds);
    let mut searches = |cluster: &Cluster, seconds: Range<u64>| -> u64 {
        let times = seconds.map(|second| at(start + second));
        times.map(|now| case.keeper.reconcile(cluster, &BTreeMap::new(), now).preemption_searches).sum()
    };
    searches(&cluster, 0..20);
    assert_eq!(searches(&cluster, 20..40), 0, "nothing changes");
    let elsewhere = json!({"metadata": {"name": "web", "namespace": "shop", "uid": "web"},
        "spec": {"nodeName": "without-gpus", "containers": [{"name": "main", "resources": {"requests": {"cpu": "1"}}}]}});
    let mut pod: PodObject = from_json(elsewhere);
    pod.trim();
    cluster.pods.push(Arc::new(pod));
    assert_eq!(searches(&cluster, 40..50), 0, "a pod starts on a node without GPUs");
    assert_eq!(searches(&cluster, 50..180), 200, "other changes take effect after a minute");
}

/// Each pod of a gang is a search of all devices.
#[test]
fn the_search_for_a_large_gang_is_not_repeated_for_ten_milliseconds_for_each_pod_beyond_eight() {
    for (pods, repeated) in [(8, [20, 40, 60]), (12, [40, 80, 120])] {
        let names: Vec<String> = (0..pods).map(|number| format!("g{number:02}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut case = Case::new(2, &[("a", json!({"min": 200}))])
            .waiting(&names.iter().map(|name| (*name, "a", 10, 0)).collect::<Vec<_>>())
            .gang("a", "train", pods, &names);
        let start = case.seconds;
        let mut searched = Vec::new();
        for millis in (0..=120).step_by(20) {
            // The pool changes each time.
            case.reality.given = BTreeMap::from([("team/x".to_owned(), ("n1-GPU-0".to_owned(), 1 + millis / 20))]);
            case.reality.report_on(&mut case.world, 2);
            let up = Duration::from_secs(start) + Duration::from_millis(millis.into());
            let now = ReconcileTime { up, epoch: at(start).epoch };
            let actions = case.keeper.reconcile(&case.world.cluster(), &BTreeMap::new(), now);
            searched.extend((actions.preemption_searches > 0).then_some(millis));
        }
        assert!(repeated.iter().all(|millis| searched.contains(millis)), "{pods} pods: {searched:?}");
        assert_eq!(searched.len(), if pods == 8 { 7 } else { 4 }, "{pods} pods: {searched:?}");
    }
}

#[test]
fn the_end_of_a_minimum_run_time_takes_effect_although_nothing_else_changes() {
    let mut case = Case::new(1, &[("a", json!({})), ("b", json!({}))])
        .running(&[(("b1", "b", 5, 0), 0), (("b2", "b", 5, 0), 0)])
        .waiting(&[("a1", "a", 5, 0)]);
    let rules = Settings { min_runtime_fair_share: 30, ..Settings::default() };
    case.keeper = Gatekeeper::default().with_quotas(QuotaSettings { rules, ..QuotaSettings::default() });
    case.reality.report_on(&mut case.world, 1);
    let cluster = case.world.cluster();
    let mut victims = |second: u64| -> Vec<String> {
        let actions = case.keeper.reconcile(&cluster, &BTreeMap::new(), at(second));
        actions.evictions.into_iter().map(|eviction| eviction.pod).collect()
    };
    // The pods were created after 1 s and 2 s.
    assert!((4..31).all(|second| victims(second).is_empty()));
    assert_eq!(victims(31), ["b/b1"]);
}

#[test]
fn a_request_for_any_number_of_gpus_counts_in_full() {
    let mut case = Case::new(1, &[("a", json!({"max": 10}))]);
    case.world = whole_gpus(std::mem::take(&mut case.world), "n1", &[0]);
    case.add(("a1", "a", 1, 0), None);
    let limits = json!({"limits": {"nvidia.com/gpu": "100000"}});
    let set = |pod: &mut Value| pod["spec"]["containers"][0]["resources"] = limits;
    case.world.change(|world| &mut world.pods, "a/a1", set);
    let actions = case.keeper.reconcile(&case.world.cluster(), &BTreeMap::new(), at(10));
    let wait = &actions.waiting["a/a1"];
    assert_eq!(wait.reason, Reason::OverMax);
    assert!(wait.message.starts_with("The pod requests 100000 GPUs"), "{}", wait.message);
}

/// The kubelet creates the mirror of a static pod again, and its program never ends.
#[test]
fn a_static_pod_is_not_evicted() {
    for (gpus, victims) in [(1, vec![]), (2, vec![("a1", "x")])] {
        let mut case = Case::new(gpus, &[("a", json!({"min": 10}))]).waiting(&[("a1", "a", 10, 0)]);
        if gpus == 2 {
            case.add(("x", "-", 10, 0), Some(1));
        }
        // It is the youngest.
        case.add(("s", "-", 10, 0), Some(0));
        let mirror = |pod: &mut Value| pod["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "1"});
        case.world.change(|world| &mut world.pods, "other/s", mirror);
        case.step();
        assert_eq!(reclaims(&case), victims);
    }
}

/// Pods that the operator does not release use the units again and again.
#[test]
fn evictions_without_effect_are_delayed() {
    let mut case = Case::new(1, &[("a", json!({"min": 10}))]).waiting(&[("a1", "a", 10, 0)]);
    for round in 0..4 {
        case.add((&format!("x{round}"), "-", 10, 0), Some(0));
        case.step();
    }
    assert_eq!(reclaims(&case), [("a1", "x0"), ("a1", "x1"), ("a1", "x2")]);
}

#[test]
fn evictions_without_effect_are_delayed_although_pods_are_released_to_other_gpus_of_the_node() {
    let mut case = Case::new(2, &[("a", json!({"min": 10})), ("c", json!({"min": 10}))])
        .running(&[(("c1", "c", 5, 0), 1)])
        .waiting(&[("a1", "a", 10, 0)]);
    for round in 0..4 {
        let small = format!("s{round}");
        case.add((&format!("x{round}"), "-", 10, 0), Some(0));
        case.add((&small, "c", 1, 0), None);
        case.step();
        assert!(case.is_running().contains(&small), "{:?}", case.is_running());
    }
    assert_eq!(reclaims(&case), [("a1", "x0"), ("a1", "x1"), ("a1", "x2")]);
}

#[test]
fn evictions_are_not_delayed_if_the_operator_gave_the_units_to_other_pods() {
    let mut case = Case::new(1, &[("a", json!({"min": 10}))]).waiting(&[("a1", "a", 10, 0)]);
    for round in 0..4 {
        let (borrower, important) = (format!("x{round}"), format!("high{round}"));
        case.add((&borrower, "-", 10, 0), Some(0));
        case.step();
        // A more important pod of the same quota uses the units before a1 does.
        case.add((&important, "a", 10, 100), None);
        case.step();
        assert!(case.is_running().contains(&important), "{:?}", case.is_running());
        case.step();
        case.end(&format!("a/{important}"));
    }
    assert_eq!(reclaims(&case), [("a1", "x0"), ("a1", "x1"), ("a1", "x2"), ("a1", "x3")]);
}

#[test]
fn evictions_for_a_pod_whose_rights_rise_are_not_delayed() {
    let quotas = [("a", json!({"min": 10})), ("b", json!({})), ("c", json!({"min": 10}))];
    let mut case = Case::new(3, &quotas)
        .running(&[(("a0", "a", 10, 0), 0), (("b0", "b", 10, 0), 1)])
        .waiting(&[("a1", "a", 10, 0)]);
    for round in 1..5 {
        case.add((&format!("b{round}"), "b", 10, 0), Some(2));
        case.step();
    }
    assert_eq!(case.evicted.len(), 3, "{:?}", case.evicted);
    assert!(case.evicted.iter().all(|(kind, preemptor, _)| kind == "FairShare" && preemptor == "a1"));
    case.end("a/a0");
    case.add(("c1", "c", 10, 0), Some(0));
    case.step();
    assert_eq!(case.evicted[3..], [("Reclaim".to_owned(), "a1".to_owned(), "b4".to_owned())]);
}
