//! Tests preemption with examples, and compares its results with all sets of victims.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use cleave_plan::Quantity;
use cleave_plan::ledger::{
    Allocation, DeviceFacts, DeviceRequest, Holder, Holders, Ledger, Moment, NoFit, NodeFacts, Nomination, PendingPod,
    Preemption, PreemptionNode, Reservation, ReserveError, Tightest, Units,
};
use proptest::prelude::*;

const MPS_RESOURCE: &str = "nvidia.com/gpu-mps";
const TIMESLICE_RESOURCE: &str = "nvidia.com/gpu-timeslice";

fn units(units: u32) -> Units {
    Units::new(units).unwrap()
}

fn device_requests(sizes: &[u32]) -> Vec<DeviceRequest> {
    sizes.iter().map(|&size| DeviceRequest { resource: MPS_RESOURCE.to_owned(), units: units(size) }).collect()
}

fn allocation(pod: &str, device: &str, size: u32) -> Allocation {
    Allocation { pod: pod.to_owned(), resource: MPS_RESOURCE.to_owned(), device: device.to_owned(), units: units(size) }
}

/// Returns a node with devices of ten units with these names. `held` lists the allocated units: the
/// pod, the device and the number of units.
fn node(devices: &[&str], held: &[(&str, &str, u32)]) -> NodeFacts {
    let used = |device: &str| held.iter().filter(|held| held.1 == device).map(|held| held.2).sum();
    let device = |&device: &&str| DeviceFacts {
        device: device.to_owned(),
        resource: MPS_RESOURCE.to_owned(),
        capacity: 10,
        used: used(device),
    };
    NodeFacts {
        model: "m".to_owned(),
        devices: devices.iter().map(device).collect(),
        allocations: held.iter().map(|&(pod, device, size)| allocation(pod, device, size)).collect(),
    }
}

fn holder(priority: i32) -> Holder<'static> {
    Holder { priority, started: Moment(0), budget: None, ending: false, requests: None }
}

/// Returns pods on node `n`.
fn holders<'a>(all: &[(&str, Holder<'a>)]) -> Holders<'a> {
    let pods = all.iter().map(|(pod, holder)| ((*pod).to_owned(), *holder)).collect();
    Holders { pods: BTreeMap::from([("n".to_owned(), pods)]), ..Holders::default() }
}

/// Requests of pods for 0 to 3 CPUs.
static CPU_REQUESTS: LazyLock<Vec<BTreeMap<String, Quantity>>> =
    LazyLock::new(|| (0..4).map(|cpus| BTreeMap::from([("cpu".to_owned(), Quantity::whole(cpus))])).collect());

fn holder_with_cpus(holder: Holder<'static>, cpus: usize) -> Holder<'static> {
    Holder { requests: Some(&CPU_REQUESTS[cpus]), ..holder }
}

/// Returns node `n`, which is missing this number of CPUs.
fn node_missing_cpus(cpus: u32) -> PreemptionNode<'static> {
    let missing = (cpus > 0).then(|| ("cpu", u128::from(cpus) * 1000));
    PreemptionNode { name: "n", missing: missing.into_iter().collect() }
}

fn pending_pod<'a>(pod: &'a str, priority: i32, device_requests: &'a [DeviceRequest]) -> PendingPod<'a> {
    PendingPod { pod, priority, device_requests }
}

/// Preempts for a pod of priority 100 with these requests on node `n`.
fn preempt(ledger: &Ledger, sizes: &[u32], known: &[(&str, Holder)]) -> Option<Preemption> {
    ledger.preempt(pending_pod("p", 100, &device_requests(sizes)), ["n"], &holders(known), &BTreeSet::new())
}

fn victims(facts: NodeFacts, sizes: &[u32], known: &[(&str, Holder)]) -> Option<Vec<String>> {
    let mut ledger = Ledger::default();
    ledger.observe("n", facts);
    preempt(&ledger, sizes, known).map(|preemption| preemption.victims)
}

fn owned_names(pods: &[&str]) -> Vec<String> {
    pods.iter().map(|&pod| pod.to_owned()).collect()
}

#[test]
fn victims_are_on_one_device() {
    // By the sum of the node's units, `a1` and `b1` would suffice and have the lowest priorities.
    // However, 5 units of one device and 4 units of the other are then free, so a request for 6
    // units does not fit.
    let facts = node(&["a", "b"], &[("a1", "a", 4), ("a2", "a", 5), ("b1", "b", 3), ("b2", "b", 6)]);
    let known = [("a1", holder(1)), ("a2", holder(2)), ("b1", holder(1)), ("b2", holder(2))];
    assert_eq!(victims(facts.clone(), &[5], &known), Some(owned_names(&["a1"])));
    assert_eq!(victims(facts.clone(), &[6], &known), Some(owned_names(&["a2"])));
    assert_eq!(victims(facts.clone(), &[10], &known), Some(owned_names(&["a1", "a2"])));
    assert_eq!(victims(facts, &[11], &known), None, "no device is as large");
}

#[test]
fn the_cheapest_device_is_chosen() {
    let started = |priority, started| Holder { started: Moment(started), ..holder(priority) };
    let full = |a: &[u32], b: &[u32]| {
        let names = ["a1", "a2", "a3", "b1", "b2", "b3"];
        let held = |device: &'static str, sizes: &[u32], from: usize| -> Vec<(&str, &str, u32)> {
            sizes.iter().enumerate().map(|(index, &size)| (names[from + index], device, size)).collect()
        };
        node(&["a", "b"], &[held("a", a, 0), held("b", b, 3)].concat())
    };
    for (facts, known, expected, why) in [
        (full(&[10], &[10]), vec![("a1", holder(2)), ("b1", holder(1))], "b1", "the lowest priority"),
        (
            full(&[10], &[5, 5]),
            vec![("a1", holder(2)), ("b1", holder(1)), ("b2", holder(1))],
            "b1,b2",
            "lowest of the highest",
        ),
        (
            full(&[5, 5], &[10]),
            vec![("a1", holder(2)), ("a2", holder(-5)), ("b1", holder(2))],
            "b1",
            "the smallest sum",
        ),
        (
            full(&[5, 5], &[5, 5]),
            vec![("a1", holder(2)), ("a2", holder(2)), ("b1", holder(2)), ("b2", holder(1))],
            "b1,b2",
            "the smallest sum of as many",
        ),
        (
            full(&[5, 5], &[10]),
            vec![("a1", started(2, 9)), ("a2", started(2, 9)), ("b1", started(2, 1))],
            "b1",
            "the fewest",
        ),
        (full(&[10], &[10]), vec![("a1", started(2, 1)), ("b1", started(2, 2))], "b1", "the pod that started last"),
        (full(&[10], &[10]), vec![("b1", holder(2)), ("a1", holder(2))], "a1", "the first"),
        (full(&[10], &[10]), vec![("a1", holder(2))], "a1", "pod b1 is unknown"),
    ] {
        let expected: Vec<&str> = expected.split(',').collect();
        assert_eq!(victims(facts, &[10], &known), Some(owned_names(&expected)), "{why}");
    }
}

#[test]
fn as_few_pods_as_possible_are_preempted() {
    let facts = node(&["a"], &[("v", "a", 2), ("w", "a", 2), ("x", "a", 3), ("y", "a", 3)]);
    let late = |priority| Holder { started: Moment(9), ..holder(priority) };
    for (size, known, expected) in [
        (3, vec![("v", holder(1)), ("w", holder(2)), ("x", holder(3)), ("y", holder(4))], "v,w"),
        (3, vec![("v", holder(4)), ("w", holder(3)), ("x", holder(2)), ("y", holder(1))], "y"),
        (4, vec![("v", holder(1)), ("w", holder(1)), ("x", late(1)), ("y", holder(1))], "x,y"),
        (3, vec![("v", holder(1)), ("w", holder(1)), ("x", late(1)), ("y", holder(1))], "x"),
        (2, vec![("v", holder(100)), ("w", holder(101)), ("x", holder(99)), ("y", holder(i32::MAX))], "x"),
    ] {
        let expected: Vec<&str> = expected.split(',').collect();
        assert_eq!(victims(facts.clone(), &[size], &known), Some(owned_names(&expected)), "{size} {known:?}");
    }
    let equal = [("v", holder(100)), ("w", holder(101)), ("x", holder(100)), ("y", holder(100))];
    assert_eq!(victims(facts, &[1], &equal), None, "pods of the same priority stay");
}

#[test]
fn no_pod_is_preempted_for_units_that_are_free_or_becoming_free() {
    let facts = node(&["a", "b"], &[("v", "a", 6), ("w", "a", 4), ("x", "b", 5)]);
    let ending = Holder { ending: true, ..holder(200) };
    assert_eq!(victims(facts.clone(), &[5], &[("v", holder(1))]), Some(owned_names(&[])), "b has five free");
    assert_eq!(
        victims(facts.clone(), &[6], &[("v", holder(1)), ("x", ending)]),
        Some(owned_names(&[])),
        "x is the victim, regardless of its priority"
    );
    assert_eq!(
        victims(facts, &[8], &[("v", Holder { ending: true, ..holder(1) }), ("w", holder(1))]),
        Some(owned_names(&["w"]))
    );
}

#[test]
fn a_pod_of_the_same_name_on_another_node_frees_nothing() {
    let mut ledger = Ledger::default();
    ledger.observe("n", node(&["a"], &[("v", "a", 6)]));
    let elsewhere = |holder| {
        let pods = BTreeMap::from([("v".to_owned(), holder)]);
        Holders { pods: BTreeMap::from([("m".to_owned(), pods)]), ..Holders::default() }
    };
    for known in [holder(1), Holder { ending: true, ..holder(1) }] {
        let found =
            ledger.preempt(pending_pod("p", 100, &device_requests(&[5])), ["n"], &elsewhere(known), &BTreeSet::new());
        assert_eq!(found, None, "{known:?}");
    }
}

#[test]
fn units_of_a_terminating_predecessor_with_the_same_name_are_free() {
    let facts = node(&["a"], &[("p", "a", 6)]);
    assert_eq!(victims(facts.clone(), &[5], &[("p", holder(1))]), None, "a pod never preempts its predecessor");
    assert_eq!(victims(facts, &[5], &[("p", Holder { ending: true, ..holder(1) })]), Some(owned_names(&[])));
}

#[test]
fn a_kept_pod_is_not_preempted_but_frees_its_units_if_it_is_terminating() {
    let mut ledger = Ledger::default();
    ledger.observe("n", node(&["a", "b"], &[("v", "a", 6), ("w", "b", 6)]));
    let find = |v: Holder<'_>| {
        let (known, kept) = ([("v", v), ("w", holder(2))], owned_names(&["v"]).into_iter().collect());
        let requests = device_requests(&[6]);
        let found = ledger.preempt(pending_pod("p", 100, &requests), ["n"], &holders(&known), &kept);
        found.map(|found| found.victims)
    };
    assert_eq!(find(holder(1)), Some(owned_names(&["w"])));
    assert_eq!(find(Holder { ending: true, ..holder(1) }), Some(owned_names(&[])));
}

#[test]
fn a_victim_on_several_devices_must_help_on_one() {
    let facts = node(&["a", "b"], &[("both", "a", 5), ("both", "b", 5), ("x", "a", 5), ("y", "b", 5)]);
    let known = [("both", holder(1)), ("x", holder(2)), ("y", holder(2))];
    assert_eq!(victims(facts.clone(), &[5, 5], &known), Some(owned_names(&["both"])));
    assert_eq!(victims(facts.clone(), &[6], &known), Some(owned_names(&["both", "x"])));
    assert_eq!(
        victims(facts, &[10, 5], &known),
        Some(owned_names(&["both", "x"])),
        "because the pod `both` frees units of b too"
    );
}

#[test]
fn requests_are_placed_on_the_devices_with_the_lowest_total_cost() {
    let facts = node(&["a", "b", "c"], &[("a1", "a", 10), ("b1", "b", 10), ("c1", "c", 10)]);
    let known = [("a1", holder(3)), ("b1", holder(1)), ("c1", holder(2))];
    let mut ledger = Ledger::default();
    ledger.observe("n", facts);
    let preemption = preempt(&ledger, &[4, 8], &known).unwrap();
    assert_eq!(preemption.victims, ["b1", "c1"]);
    let takes: Vec<(&str, u32)> =
        preemption.takes.iter().map(|take| (take.device.as_str(), take.units.get())).collect();
    assert!(takes == [("b", 4), ("c", 8)] || takes == [("c", 4), ("b", 8)], "in the order of the requests: {takes:?}");
    assert_eq!(preempt(&ledger, &[4, 6], &known).unwrap().victims, ["b1"]);
    let many = preempt(&ledger, &[1; 30], &known).unwrap();
    assert_eq!((many.takes.len(), many.victims.len()), (30, 3), "too many combinations to check");
    assert_eq!(preempt(&ledger, &[1; 31], &known), None);
}

#[test]
fn a_placement_that_needs_backtracking_is_found() {
    let sizes = [14, 14, 12, 11, 11, 10, 10, 10, 9, 8, 8, 8, 7, 6, 5, 3, 2];
    let mut facts = node(&["a", "b", "c", "d", "e"], &[("v", "a", 1)]);
    for (device, capacity) in facts.devices.iter_mut().zip([29, 30, 30, 30, 29]) {
        device.capacity = capacity;
    }
    assert_eq!(sizes.iter().sum::<u32>(), 148, "no unit can be spared");
    assert_eq!(victims(facts, &sizes, &[("v", holder(1))]), Some(owned_names(&["v"])));
}

#[test]
fn reserved_units_are_not_free() {
    let mut ledger = Ledger::default();
    ledger.observe("n", node(&["a"], &[("v", "a", 5)]));
    let wanted = device_requests(&[4]);
    let fits = ledger.fit(&wanted, ["n"], 1, &Tightest).unwrap();
    ledger.reserve("low", &fits, Moment(9)).unwrap();
    assert_eq!(preempt(&ledger, &[7], &[("v", holder(1))]), None);
    assert_eq!(preempt(&ledger, &[6], &[("v", holder(1))]).unwrap().victims, ["v"]);
    // More units are claimed than exist, so units that become free are reserved for the claims
    // first.
    ledger.bind("around", "n", &device_requests(&[3]));
    assert!(!ledger.unplaced_requests("n").is_empty());
    assert_eq!(preempt(&ledger, &[1], &[("v", holder(1))]), None);
}

fn nomination(priority: i32, preemption: &Preemption) -> Nomination {
    Nomination { priority, node: preemption.node.clone(), takes: preemption.takes.clone() }
}

#[test]
fn units_that_victims_free_are_kept_for_the_preemptor() {
    let mut ledger = Ledger::default();
    ledger.observe("n", node(&["a"], &[("v", "a", 8)]));
    let want = device_requests(&[6]);
    let preemption = preempt(&ledger, &[6], &[("v", holder(1))]).unwrap();
    ledger.nominate("p", nomination(100, &preemption)).unwrap();
    let fit = |ledger: &Ledger, pod: &str, priority: i32, size: u32| {
        ledger.fit_for(pending_pod(pod, priority, &device_requests(&[size])), ["n"], 1, &Tightest)
    };
    let most = |ledger: &Ledger, pod: &str, priority: i32| {
        (1..=10).rev().find(|&size| fit(ledger, pod, priority, size).is_ok()).unwrap_or(0)
    };
    assert_eq!((most(&ledger, "new", 100), most(&ledger, "new", 101)), (0, 2));
    assert_eq!(
        fit(&ledger, "new", 100, 1).unwrap_err(),
        NoFit::NotFree { resource: MPS_RESOURCE.to_owned(), requested: units(1), most: 0 }
    );
    ledger.observe("n", node(&["a"], &[]));
    assert_eq!((most(&ledger, "low", -1), most(&ledger, "same", 100)), (4, 4));
    assert_eq!((most(&ledger, "high", 101), most(&ledger, "p", 100)), (10, 10));
    assert!(ledger.fit(&want, ["n"], 1, &Tightest).is_err(), "a pod without a priority has the lowest");
    let fits = fit(&ledger, "p", 100, 6).unwrap();
    ledger.reserve("p", &fits, Moment(9)).unwrap();
    assert!(ledger.nominations().is_empty(), "the pod has a claim instead");
    assert_eq!(ledger.nominate("p", nomination(100, &preemption)), Err(ReserveError::Claimed));
    assert_eq!(most(&ledger, "low", -1), 4);
}

#[test]
fn a_fit_is_stale_after_a_nomination() {
    let mut ledger = Ledger::default();
    ledger.observe("n", node(&["a"], &[]));
    let (want, takes) = (
        device_requests(&[6]),
        vec![Reservation { resource: MPS_RESOURCE.to_owned(), units: units(5), device: "a".to_owned() }],
    );
    let low = ledger.fit_for(pending_pod("low", 1, &want), ["n"], 1, &Tightest).unwrap();
    let high = ledger.fit_for(pending_pod("high", 101, &want), ["n"], 1, &Tightest).unwrap();
    ledger.nominate("p", Nomination { priority: 100, node: "n".to_owned(), takes }).unwrap();
    let before = ledger.clone();
    assert_eq!(ledger.reserve("low", &low, Moment(9)), Err(ReserveError::Stale));
    assert_eq!(ledger, before);
    ledger.reserve("high", &high, Moment(9)).unwrap();
    ledger.remove_claim("high");
    assert!(ledger.withdraw("p").is_some() && ledger.withdraw("p").is_none());
    ledger.reserve("low", &low, Moment(9)).unwrap();
}

#[test]
fn two_preemptors_do_not_use_the_same_units() {
    let mut ledger = Ledger::default();
    ledger.observe("n", node(&["a", "b"], &[("v", "a", 10), ("w", "b", 10)]));
    let known = [("v", holder(1)), ("w", holder(2))];
    let first = preempt(&ledger, &[6], &known).unwrap();
    assert_eq!(first.victims, ["v"]);
    ledger.nominate("first", nomination(100, &first)).unwrap();
    assert_eq!(preempt(&ledger, &[6], &known).unwrap().victims, ["w"]);
    assert_eq!(preempt(&ledger, &[4], &known).unwrap().victims, ["v"], "more units remain than the first pod requests");
    let higher = device_requests(&[6]);
    let higher =
        ledger.preempt(pending_pod("higher", 101, &higher), ["n"], &holders(&known), &BTreeSet::new()).unwrap();
    assert_eq!(higher.victims, ["v"], "a nomination of lower priority is no obstacle");
    ledger.remove_claim("first");
    assert_eq!(preempt(&ledger, &[6], &known).unwrap().victims, ["v"], "a pod that is gone keeps nothing");
}

#[test]
fn victims_free_the_cpu_and_the_pod_slots_that_the_node_is_missing() {
    let mut ledger = Ledger::default();
    ledger.observe("n", node(&["a", "b"], &[("v", "a", 5), ("w", "b", 5)]));
    let find = |target: PreemptionNode<'_>, known: &[(&str, Holder<'_>)]| {
        let requests = device_requests(&[5]);
        let found = ledger.preempt(pending_pod("p", 100, &requests), [target], &holders(known), &BTreeSet::new());
        found.map(|found| found.victims)
    };
    let known = [("v", holder_with_cpus(holder(1), 1)), ("w", holder_with_cpus(holder(2), 3))];
    assert_eq!(find(node_missing_cpus(0), &known), Some(owned_names(&[])), "five units are free");
    assert_eq!(find(node_missing_cpus(1), &known), Some(owned_names(&["v"])));
    assert_eq!(find(node_missing_cpus(2), &known), Some(owned_names(&["w"])), "v has too few CPUs");
    assert_eq!(find(node_missing_cpus(4), &known), Some(owned_names(&["v", "w"])));
    assert_eq!(find(node_missing_cpus(5), &known), None);
    let ending = [("v", known[0].1), ("w", Holder { ending: true, ..known[1].1 })];
    assert_eq!(
        find(node_missing_cpus(2), &ending),
        Some(owned_names(&[])),
        "w frees its CPUs, regardless of its priority"
    );
    assert_eq!(find(node_missing_cpus(1), &[("v", holder(1))]), None, "the CPUs of v are free already");
    let slot = PreemptionNode { name: "n", missing: BTreeMap::from([("pods", 1000)]) };
    assert_eq!(find(slot, &known), Some(owned_names(&["v"])), "each pod frees one slot");
}

#[test]
fn no_more_pods_of_a_budget_are_preempted_than_it_allows() {
    let facts = node(&["a"], &[("v", "a", 4), ("w", "a", 3), ("x", "a", 3)]);
    let of = |priority, budget| Holder { budget, ..holder(priority) };
    let find = |size, known: &[(&str, Holder<'_>)], budgets: &[u32]| {
        let mut ledger = Ledger::default();
        ledger.observe("n", facts.clone());
        let known = Holders { budgets: budgets.to_vec(), ..holders(known) };
        let requests = device_requests(&[size]);
        let found = ledger.preempt(pending_pod("p", 100, &requests), ["n"], &known, &BTreeSet::new());
        found.map(|found| found.victims)
    };
    let one = [("v", of(3, Some(0))), ("w", of(2, Some(0))), ("x", of(1, Some(0)))];
    assert_eq!(find(3, &one, &[1]), Some(owned_names(&["x"])), "the least important");
    assert_eq!(find(4, &one, &[1]), Some(owned_names(&["v"])), "one of w and x is too small, and both are too many");
    assert_eq!(find(6, &one, &[2]), Some(owned_names(&["w", "x"])));
    assert_eq!(find(7, &one, &[2]), Some(owned_names(&["v", "x"])), "the two that free enough and are least important");
    assert_eq!((find(5, &one, &[1]), find(3, &one, &[0])), (None, None));
    let two = [("v", of(3, None)), ("w", of(2, Some(0))), ("x", of(1, Some(1)))];
    assert_eq!(find(6, &two, &[1, 1]), Some(owned_names(&["w", "x"])));
    assert_eq!(find(6, &two, &[1, 0]), Some(owned_names(&["v", "w"])), "another pod in place of x");
}

#[test]
fn pods_that_are_being_evicted_use_up_their_budgets() {
    let mut known = holders(&[("v", Holder { budget: Some(0), ..holder(1) }), ("w", holder(1))]);
    known.budgets = vec![2];
    let victims = owned_names(&["v", "w", "unknown"]);
    for node in ["m", "n", "n"] {
        known.evict(node, &victims);
    }
    let is_ending = |pod: &str| known.get("n", pod).map(|holder| holder.ending);
    assert_eq!((is_ending("v"), is_ending("w"), known.budgets.as_slice()), (Some(true), Some(true), &[1][..]));
}

// Property tests follow.

const NODES: [&str; 2] = ["m", "n"];
const DEVICES: [&str; 3] = ["a", "b", "c"];

#[derive(Debug, Clone)]
struct PreemptionCase {
    nodes: BTreeMap<&'static str, NodeFacts>,
    /// Number of CPUs that each node lacks.
    missing: BTreeMap<&'static str, u32>,
    holders: Holders<'static>,
    reserved: Vec<u32>,
    device_requests: Vec<DeviceRequest>,
    priority: i32,
}

fn resource() -> impl Strategy<Value = String> {
    prop_oneof![4 => Just(MPS_RESOURCE.to_owned()), 1 => Just(TIMESLICE_RESOURCE.to_owned())]
}

fn facts() -> impl Strategy<Value = NodeFacts> {
    let device = (resource(), 0..DEVICES.len(), 2_u32..8, 0_u32..2);
    let held = (0_u32..5, resource(), 0..DEVICES.len(), 1_u32..5);
    (prop::collection::vec(device, 1..5), prop::collection::vec(held, 0..7)).prop_map(|(devices, held)| {
        let mut capacity: BTreeMap<(String, &str), (u32, u32)> = BTreeMap::new();
        for (resource, device, size, others) in devices {
            capacity.insert((resource, DEVICES[device]), (size, others));
        }
        let mut facts = NodeFacts { model: "m".to_owned(), ..NodeFacts::default() };
        for (pod, resource, device, size) in held {
            let device = DEVICES[device];
            let Some((capacity, _)) = capacity.get(&(resource.clone(), device)) else { continue };
            let already = sum_units(&facts.allocations, &resource, device);
            let Some(units) = Units::new(size.min(capacity.saturating_sub(already))) else { continue };
            facts.allocations.push(Allocation { pod: format!("h{pod}"), resource, device: device.to_owned(), units });
        }
        for ((resource, device), (capacity, others)) in capacity {
            // Pods that the node does not report can also have units, even more than exist.
            let used = sum_units(&facts.allocations, &resource, device) + others;
            facts.devices.push(DeviceFacts { device: device.to_owned(), resource, capacity, used });
        }
        facts
    })
}

fn sum_units(allocations: &[Allocation], resource: &str, device: &str) -> u32 {
    let of = |held: &&Allocation| held.resource == resource && held.device == device;
    allocations.iter().filter(of).map(|held| held.units.get()).sum()
}

fn preemption_case() -> impl Strategy<Value = PreemptionCase> {
    let budget = prop::option::weighted(0.4, 0_usize..2);
    let holder = (-1_i32..4, 0_u64..3, budget, prop::bool::weighted(0.1), prop::option::of(0_usize..3)).prop_map(
        |(priority, started, budget, ending, cpus)| {
            let requests = cpus.map(|cpus| &CPU_REQUESTS[cpus]);
            Holder { priority, started: Moment(started), budget, ending, requests }
        },
    );
    // Some pods are not in `holders`.
    let holders = prop::collection::btree_map((0_u32..5).prop_map(|pod| format!("h{pod}")), holder, 3..6);
    let device_requests = prop::collection::vec((resource(), 1_u32..6), 1..4).prop_map(|device_requests| {
        device_requests.into_iter().map(|(resource, size)| DeviceRequest { resource, units: units(size) }).collect()
    });
    let reserved = prop::collection::vec(1_u32..3, 0..3);
    let budgets = prop_oneof![Just(vec![9, 9]), prop::collection::vec(0_u32..3, 2)];
    let missing = prop_oneof![Just((0, 0)), (0_u32..4, 0_u32..4)];
    (facts(), facts(), holders, reserved, device_requests, 0_i32..5, budgets, missing).prop_map(
        |(m, n, holders, reserved, device_requests, priority, budgets, missing)| {
            // A pod is on only one node.
            let (mut m, mut n) = (m, n);
            for held in &mut m.allocations {
                held.pod.push_str("@m");
            }
            for held in &mut n.allocations {
                held.pod.push_str("@n");
            }
            let on = |node: &str| holders.iter().map(|(pod, holder)| (format!("{pod}@{node}"), *holder)).collect();
            let pods = NODES.map(|node| (node.to_owned(), on(node)));
            let holders = Holders { pods: pods.into(), budgets, ..Holders::default() };
            let missing = BTreeMap::from([("m", missing.0), ("n", missing.1)]);
            let nodes = BTreeMap::from([("m", m), ("n", n)]);
            PreemptionCase { nodes, missing, holders, reserved, device_requests, priority }
        },
    )
}

/// The key of a node's CPUs among its free amounts.
const CPU_SLOT: [&str; 2] = ["cpu", ""];

/// Free units by resource and device, and the spare CPUs. Negative if CPUs are missing.
type FreeUnits = BTreeMap<(String, String), i64>;

impl PreemptionCase {
    /// Returns a pod with allocations. The pod's name ends with the name of its node.
    fn holder(&self, pod: &str) -> Option<&Holder<'static>> {
        self.holders.get(pod.rsplit_once('@')?.1, pod)
    }

    fn ledger(&self) -> Ledger {
        let mut ledger = Ledger::default();
        for (name, facts) in &self.nodes {
            ledger.observe(name, facts.clone());
        }
        for (index, &size) in self.reserved.iter().enumerate() {
            if let Ok(fits) = ledger.fit(&device_requests(&[size]), NODES, 1, &Tightest) {
                ledger.reserve(&format!("let-through-{index}"), &fits, Moment(9)).unwrap();
            }
        }
        ledger
    }

    fn preempt(&self, ledger: &Ledger) -> Option<Preemption> {
        self.preempt_on(ledger, NODES)
    }

    fn preempt_on<const N: usize>(&self, ledger: &Ledger, nodes: [&'static str; N]) -> Option<Preemption> {
        let nodes = nodes.map(|name| {
            let missing = node_missing_cpus(self.missing.get(name).copied().unwrap_or(0)).missing;
            PreemptionNode { name, missing }
        });
        ledger.preempt(pending_pod("p", self.priority, &self.device_requests), nodes, &self.holders, &BTreeSet::new())
    }

    /// Returns the free units of a node after these pods and the terminating pods have ended.
    fn free_units(&self, ledger: &Ledger, node: &str, gone: &BTreeSet<&str>) -> FreeUnits {
        let facts = &self.nodes[node];
        let leaves = |held: &&Allocation| {
            gone.contains(held.pod.as_str()) || self.holder(&held.pod).is_some_and(|holder| holder.ending)
        };
        let freed: Vec<Allocation> = facts.allocations.iter().filter(leaves).cloned().collect();
        let reservations = ledger.reservations(node);
        let room = |facts: &DeviceFacts| {
            let reserved =
                reservations.iter().filter(|held| held.device == facts.device && held.resource == facts.resource);
            let reserved: u32 = reserved.map(|held| held.units.get()).sum();
            i64::from(facts.capacity) - i64::from(facts.used) - i64::from(reserved)
                + i64::from(sum_units(&freed, &facts.resource, &facts.device))
        };
        let mut units: FreeUnits =
            facts.devices.iter().map(|facts| ((facts.resource.clone(), facts.device.clone()), room(facts))).collect();
        let pods: BTreeSet<&str> = facts.allocations.iter().filter(leaves).map(|held| held.pod.as_str()).collect();
        let requests = pods.into_iter().filter_map(|pod| self.holder(pod)?.requests);
        let cpus: u64 = requests.filter_map(|requests| requests["cpu"].count()).sum();
        units.insert(CPU_SLOT.map(str::to_owned).into(), i64::try_from(cpus).unwrap() - i64::from(self.missing[node]));
        units
    }

    /// Returns whether the budgets allow these evictions.
    fn are_evictions_within_budgets(&self, victims: &[&str]) -> bool {
        (0_u32..).zip(&self.holders.budgets).all(|(index, allowed)| {
            let of = |victim: &&&str| self.holder(victim).unwrap().budget == usize::try_from(index).ok();
            victims.iter().filter(of).count() <= usize::try_from(*allowed).unwrap()
        })
    }

    /// Returns the possible victims on a node, in the order in which they are kept.
    fn possible_victims(&self, node: &str) -> Vec<&str> {
        let pods: BTreeSet<&str> = self.nodes[node].allocations.iter().map(|held| held.pod.as_str()).collect();
        let lower =
            |pod: &&str| self.holder(pod).is_some_and(|holder| holder.priority < self.priority && !holder.ending);
        let mut pods: Vec<&str> = pods.into_iter().filter(lower).collect();
        pods.sort_by_key(|&pod| {
            let holder = self.holder(pod).unwrap();
            (Reverse(holder.priority), holder.started, pod)
        });
        pods
    }

    fn victims_cost(&self, victims: &[&str]) -> (Option<i32>, i64, usize, Reverse<Option<Moment>>) {
        let of = || victims.iter().map(|victim| self.holder(victim).unwrap());
        let highest = of().map(|holder| holder.priority).max();
        (
            highest,
            of().map(|holder| i64::from(holder.priority) - i64::from(i32::MIN) + 1).sum(),
            victims.len(),
            Reverse(of().filter(|holder| Some(holder.priority) == highest).map(|holder| holder.started).min()),
        )
    }

    /// Returns all ways to place the requests on a node's devices.
    fn device_choices(&self, node: &str) -> Vec<Vec<(String, String)>> {
        let devices = &self.nodes[node].devices;
        self.device_requests.iter().fold(vec![Vec::new()], |ways, request| {
            let offers = |way: &Vec<(String, String)>| {
                let on = devices.iter().filter(|facts| facts.resource == request.resource);
                on.map(|facts| [way.clone(), vec![(facts.resource.clone(), facts.device.clone())]].concat())
                    .collect::<Vec<_>>()
            };
            ways.iter().flat_map(offers).collect()
        })
    }

    fn has_room(&self, free_units: &FreeUnits, way: &[(String, String)]) -> bool {
        let mut left = free_units.clone();
        let enough_cpus = free_units[&CPU_SLOT.map(str::to_owned).into()] >= 0;
        enough_cpus
            && way.iter().zip(&self.device_requests).all(|(spot, request)| {
                let left = left.get_mut(spot).unwrap();
                *left -= i64::from(request.units.get());
                *left >= 0
            })
    }
}

/// Returns all subsets of some pods.
fn subsets<'a>(pods: &[&'a str]) -> Vec<Vec<&'a str>> {
    (0..1_usize << pods.len())
        .map(|set| pods.iter().enumerate().filter(|(index, _)| set >> index & 1 == 1).map(|(_, pod)| *pod).collect())
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 800, ..ProptestConfig::default() })]

    /// The pod fits after the victims have terminated, each victim is needed, all victims have a
    /// lower priority, and their budgets allow the evictions. If no budget limits the victims, they
    /// are the best of all subsets for each way to place the requests. The chosen way has the
    /// lowest cost.
    #[test]
    fn victims_are_needed_and_no_other_choice_is_cheaper(case in preemption_case()) {
        let ledger = case.ledger();
        let (mut least, mut is_limited, mut is_possible) = (None, false, false);
        for node in NODES {
            let is_requested = |short: &DeviceRequest| case.device_requests.iter().any(|request| request.resource == short.resource);
            if ledger.unplaced_requests(node).iter().any(is_requested) {
                continue;
            }
            let lower = case.possible_victims(node);
            is_limited |= !case.are_evictions_within_budgets(&lower);
            let sets = subsets(&lower);
            let helps = |gone: &&Vec<&str>, way: &Vec<(String, String)>| {
                case.are_evictions_within_budgets(gone) && case.has_room(&case.free_units(&ledger, node, &gone.iter().copied().collect()), way)
            };
            for way in case.device_choices(node) {
                let helps = sets.iter().filter(|gone| helps(gone, &way));
                // Keep the pods at the start of `lower` (highest priority, then oldest) if
                // possible, even if more of the other pods are then evicted.
                let best = helps.min_by_key(|gone| lower.iter().map(|pod| gone.contains(pod)).collect::<Vec<bool>>());
                if let Some(gone) = best {
                    is_possible = true;
                    let cost = case.victims_cost(gone);
                    least = Some(least.map_or(cost, |least| cost.min(least)));
                }
            }
        }
        let found = case.preempt(&ledger);
        let is_simple = case.device_requests.len() == 1 && case.missing.values().all(|missing| *missing == 0);
        if !is_limited || is_simple {
            prop_assert_eq!(found.is_some(), is_possible, "{:?}", found);
        }
        let Some(found) = found else { return Ok(()) };
        let victims: Vec<&str> = found.victims.iter().map(String::as_str).collect();
        prop_assert!(case.are_evictions_within_budgets(&victims));
        if !is_limited {
            prop_assert_eq!(Some(case.victims_cost(&victims)), least);
        }

        let node = found.node.as_str();
        let lower = case.possible_victims(node);
        prop_assert!(victims.iter().all(|victim| lower.contains(victim)));
        let way: Vec<(String, String)> =
            found.takes.iter().map(|take| (take.resource.clone(), take.device.clone())).collect();
        prop_assert!(found.takes.iter().zip(&case.device_requests).all(|(take, request)| take.resource == request.resource && take.units == request.units));
        prop_assert_eq!(found.takes.len(), case.device_requests.len());
        let all: BTreeSet<&str> = victims.iter().copied().collect();
        prop_assert!(case.has_room(&case.free_units(&ledger, node, &all), &way), "{:?}", found);
        for victim in &victims {
            let mut but_one = all.clone();
            but_one.remove(victim);
            prop_assert!(!case.has_room(&case.free_units(&ledger, node, &but_one), &way), "{} need not go: {:?}", victim, found);
        }
    }

    /// The result does not depend on the order of the facts or of the nodes. While the victims
    /// terminate, another call returns no further victim, so callers need not store the victims.
    #[test]
    fn the_result_does_not_depend_on_order(case in preemption_case(), turn in 0_usize..6) {
        let ledger = case.ledger();
        let found = case.preempt(&ledger);
        let mut turned = case.clone();
        for facts in turned.nodes.values_mut() {
            facts.devices.reverse();
            let by = turn.min(facts.allocations.len());
            facts.allocations.rotate_left(by);
        }
        let other = turned.ledger();
        let nodes = ["n", "unknown", "m", "n"];
        prop_assert_eq!(&turned.preempt_on(&other, nodes), &found);
        let Some(found) = found else { return Ok(()) };
        let mut updated = case.clone();
        updated.holders.evict(&found.node, &found.victims);
        let again = updated.preempt(&ledger);
        prop_assert!(again.as_ref().is_some_and(|again| again.victims.is_empty()), "{:?}, then {:?}", found, again);
    }

    /// The preemptor receives the nominated units, even if pods of the same or lower priority
    /// arrive while its victims terminate one by one.
    #[test]
    fn nominated_units_are_allocated_to_their_pod(
        case in preemption_case(),
        newcomers in prop::collection::vec((-1_i32..5, prop::collection::vec((resource(), 1_u32..5), 1..3)), 0..8),
    ) {
        let mut ledger = case.ledger();
        let Some(found) = case.preempt(&ledger) else { return Ok(()) };
        ledger.nominate("p", nomination(case.priority, &found)).unwrap();
        let facts = &case.nodes[found.node.as_str()];
        let leaves = |pod: &String| found.victims.contains(pod) || case.holder(pod).is_some_and(|holder| holder.ending);
        let mut leaving: BTreeSet<String> = facts.allocations.iter().map(|held| held.pod.clone()).filter(leaves).collect();
        let mut facts = facts.clone();
        let mut newcomers = newcomers.into_iter();
        let mut count = 0;
        loop {
            for (priority, wants) in newcomers.by_ref().take(2) {
                let device_requests: Vec<DeviceRequest> = wants.into_iter().map(|(resource, size)| DeviceRequest { resource, units: units(size) }).collect();
                let (name, priority) = (format!("new-{count}"), priority.min(case.priority));
                count += 1;
                if let Ok(fits) = ledger.fit_for(pending_pod(&name, priority, &device_requests), NODES, 2, &Tightest) {
                    ledger.reserve(&name, &fits, Moment(9)).unwrap();
                }
            }
            let Some(pod) = leaving.pop_first() else { break };
            for device in &mut facts.devices {
                let held: Vec<Allocation> = facts.allocations.iter().filter(|held| held.pod == pod).cloned().collect();
                device.used -= sum_units(&held, &device.resource, &device.device);
            }
            facts.allocations.retain(|held| held.pod != pod);
            ledger.observe(&found.node, facts.clone());
        }
        let fits = ledger.fit_for(pending_pod("p", case.priority, &case.device_requests), [found.node.as_str()], 1, &Tightest);
        prop_assert!(fits.is_ok(), "{:?} is not there: {:?}", found, fits);
        prop_assert!(ledger.reserve("p", &fits.unwrap(), Moment(9)).is_ok());
    }
}
