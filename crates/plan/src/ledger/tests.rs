use std::sync::LazyLock;

use proptest::prelude::*;

use super::*;
use crate::placement::{self, CapacityValue, Demand, ObservedDemands, THOUSANDTHS_PER_GPU};

const MPS_RESOURCE: &str = "nvidia.com/gpu-mps";

fn units(units: u32) -> Units {
    Units::new(units).unwrap()
}

fn device_requests(sizes: &[u32]) -> Vec<DeviceRequest> {
    sizes.iter().map(|&size| DeviceRequest { resource: MPS_RESOURCE.to_owned(), units: units(size) }).collect()
}

/// Returns a node with devices `a`, `b` and so on, of ten units each. `used` is the number of used
/// units of each device.
fn node(used: &[u32], allocated: &[(&str, &str, u32)]) -> NodeFacts {
    let name = |index: usize| char::from(b'a' + u8::try_from(index).unwrap()).to_string();
    NodeFacts {
        model: "m".to_owned(),
        devices: used
            .iter()
            .enumerate()
            .map(|(index, &used)| DeviceFacts {
                device: name(index),
                resource: MPS_RESOURCE.to_owned(),
                capacity: 10,
                used,
            })
            .collect(),
        allocations: allocated
            .iter()
            .map(|&(pod, device, size)| Allocation {
                pod: pod.to_owned(),
                resource: MPS_RESOURCE.to_owned(),
                device: device.to_owned(),
                units: units(size),
            })
            .collect(),
    }
}

fn ledger(used: &[u32]) -> Ledger {
    let mut ledger = Ledger::default();
    ledger.observe("n", node(used, &[]));
    ledger
}

fn reserve(ledger: &mut Ledger, pod: &str, sizes: &[u32], expires: u64) {
    let nodes: Vec<String> = ledger.nodes().map(str::to_owned).collect();
    let fits = ledger.fit(&device_requests(sizes), nodes.iter().map(String::as_str), 4, &Tightest).unwrap();
    ledger.reserve(pod, &fits, Moment(expires)).unwrap();
}

fn claims_of(ledger: &Ledger) -> BTreeMap<String, Claim> {
    ledger.claims().map(|(pod, claim)| (pod.to_owned(), claim.clone())).collect()
}

fn reserved_units(ledger: &Ledger, node: &str) -> Vec<(String, u32)> {
    ledger.reservations(node).into_iter().map(|reservation| (reservation.device, reservation.units.get())).collect()
}

fn units_on(device: &str, size: u32) -> (String, u32) {
    (device.to_owned(), size)
}

#[test]
fn a_node_keeps_the_facts_of_its_last_observation_beside_claims() {
    let facts = node(&[7, 3], &[("p", "a", 3), ("p", "b", 2), ("q", "a", 4)]);
    let mut ledger = Ledger::default();
    ledger.observe("n", node(&[0], &[]));
    ledger.observe("n", facts.clone());
    reserve(&mut ledger, "r", &[2], 100);
    assert_eq!((ledger.facts("n"), ledger.facts("m")), (Some(facts), None));
    assert_eq!(ledger.pods_with_claims("n").collect::<Vec<_>>(), ["r"]);
}

#[test]
fn the_tightest_device_is_chosen_until_it_is_full() {
    let mut ledger = ledger(&[3, 5, 0]);
    reserve(&mut ledger, "p", &[5], 1);
    assert_eq!(reserved_units(&ledger, "n"), [units_on("b", 5)]);
    reserve(&mut ledger, "q", &[5], 1);
    assert_eq!(reserved_units(&ledger, "n"), [units_on("a", 5), units_on("b", 5)]);
}

#[test]
fn six_free_units_on_two_devices_do_not_fit_a_request_for_five() {
    let ledger = ledger(&[7, 7]);
    let why = ledger.fit(&device_requests(&[5]), ["n"], 1, &Tightest).unwrap_err();
    assert_eq!(why.to_string(), "no device has 5 nvidia.com/gpu-mps free: the emptiest has 3");
    assert!(why.is_temporary());
}

#[test]
fn the_reported_reason_is_that_of_the_node_closest_to_fitting() {
    let mut ledger = ledger(&[5, 5]);
    let mut small = node(&[0], &[]);
    small.devices[0].capacity = 4;
    ledger.observe("small", small);
    let why = |sizes: &[u32], nodes: &[&str]| {
        ledger.fit(&device_requests(sizes), nodes.iter().copied(), 1, &Tightest).unwrap_err()
    };
    assert_eq!(why(&[5], &[]), NoFit::NoNode);
    assert_eq!(why(&[5], &["nobody"]), NoFit::NoNode);
    assert_eq!(
        why(&[5], &["small"]),
        NoFit::TooLarge { resource: MPS_RESOURCE.to_owned(), requested: units(5), most: 4 }
    );
    assert_eq!(
        why(&[11], &["n", "small"]),
        NoFit::TooLarge { resource: MPS_RESOURCE.to_owned(), requested: units(11), most: 10 }
    );
    assert_eq!(
        why(&[6], &["n", "small"]),
        NoFit::NotFree { resource: MPS_RESOURCE.to_owned(), requested: units(6), most: 5 }
    );
    assert_eq!(why(&[6, 6, 6], &["n", "small"]), NoFit::TooMany);
    assert_eq!(why(&[3, 3, 3], &["n"]), NoFit::NotFreeTogether);
    let (few, more) = (vec![1; 11], vec![1; 21]);
    let too_few_free = NoFit::TooFewFree { resource: MPS_RESOURCE.to_owned(), requested: 11, most: 10 };
    assert_eq!(why(&few, &["n", "small"]), too_few_free);
    assert_eq!(why(&few, &["small"]), NoFit::TooFew { resource: MPS_RESOURCE.to_owned(), requested: 11, most: 4 });
    assert_eq!(
        why(&more, &["n", "small"]),
        NoFit::TooFew { resource: MPS_RESOURCE.to_owned(), requested: 21, most: 20 }
    );
    let other = vec![DeviceRequest { resource: "other".to_owned(), units: units(1) }];
    let why = ledger.fit(&other, ["n"], 1, &Tightest).unwrap_err();
    assert_eq!(why, NoFit::NotOffered { resource: "other".to_owned() });
    assert!(!why.is_temporary());
}

#[test]
fn allocated_units_are_no_longer_reserved() {
    let mut ledger = ledger(&[0, 0]);
    reserve(&mut ledger, "p", &[3], 1);
    ledger.bind("p", "n", &device_requests(&[3]));
    assert_eq!(reserved_units(&ledger, "n"), [units_on("a", 3)]);
    ledger.observe("n", node(&[3, 0], &[("p", "a", 3)]));
    assert!(reserved_units(&ledger, "n").is_empty());
    assert_eq!(ledger.devices("n")[0].free, 7);
    ledger.remove_claim("p");
    assert_eq!(ledger.devices("n")[0].free, 7, "the units stay used until the node reports otherwise");
    ledger.observe("n", node(&[0, 0], &[]));
    assert_eq!(ledger.devices("n")[0].free, 10);
}

#[test]
fn two_equal_pods_can_swap_reservations() {
    let mut ledger = ledger(&[6, 7]);
    reserve(&mut ledger, "first", &[3], 9);
    reserve(&mut ledger, "second", &[3], 9);
    assert_eq!(reserved_units(&ledger, "n"), [units_on("a", 3), units_on("b", 3)]);
    ledger.observe("n", node(&[9, 7], &[("first", "a", 3)]));
    assert_eq!(reserved_units(&ledger, "n"), [units_on("b", 3)], "the first pod took the units of the second");
    ledger.observe("n", node(&[9, 10], &[("first", "a", 3), ("second", "b", 3)]));
    assert!(reserved_units(&ledger, "n").is_empty() && ledger.unplaced_requests("n").is_empty());
}

#[test]
fn reservations_stay_on_the_annotated_device_when_other_pods_end() {
    let mut ledger = ledger(&[0, 0]);
    for (pod, size) in [("p", 9), ("q", 9), ("r", 1), ("s", 1)] {
        reserve(&mut ledger, pod, &[size], 9);
    }
    assert_eq!(reserved_units(&ledger, "n"), [units_on("a", 1), units_on("a", 9), units_on("b", 1), units_on("b", 9)]);
    let annotated = |ledger: &Ledger, pod: &str| ledger.claim(pod).unwrap().annotated["n"][0].device.clone();
    assert_eq!((annotated(&ledger, "r"), annotated(&ledger, "s")), ("a".to_owned(), "b".to_owned()));
    ledger.remove_claim("r");
    assert_eq!(
        reserved_units(&ledger, "n"),
        [units_on("a", 9), units_on("b", 1), units_on("b", 9)],
        "s is allocated what its annotation names"
    );
    ledger.bind("s", "n", &device_requests(&[1]));
    ledger.remove_claim("q");
    assert_eq!(reserved_units(&ledger, "n"), [units_on("a", 9), units_on("b", 1)]);
}

#[test]
fn the_annotated_reservation_of_a_pod_allocated_elsewhere_blocks_no_device() {
    let mut ledger = ledger(&[0, 0, 0]);
    for (pod, size) in [("y", 9), ("first", 5), ("x", 4), ("swapped", 5)] {
        reserve(&mut ledger, pod, &[size], 9);
    }
    assert_eq!(reserved_units(&ledger, "n"), [units_on("a", 9), units_on("b", 4), units_on("b", 5), units_on("c", 5)]);
    ledger.observe("n", node(&[0, 0, 5], &[("first", "c", 5)]));
    assert_eq!(
        reserved_units(&ledger, "n"),
        [units_on("a", 9), units_on("b", 4), units_on("b", 5)],
        "the reservation of the first pod moved to the other"
    );
    ledger.remove_claim("swapped");
    assert_eq!(reserved_units(&ledger, "n"), [units_on("a", 9), units_on("b", 4)]);
    // Reserve all free units but one. The first pod's old reservation on `b` must not count.
    reserve(&mut ledger, "last", &[5, 4, 2], 9);
    assert_eq!(ledger.unplaced_requests("n"), []);
    let all = [units_on("a", 9), units_on("b", 2), units_on("b", 4), units_on("b", 4), units_on("c", 5)];
    assert_eq!(reserved_units(&ledger, "n"), all, "as annotated");
    // Annotations are not rewritten: the first pod's annotation still names the device of the last
    // pod.
    let mut claims = claims_of(&ledger);
    claims.get_mut("first").unwrap().annotated.get_mut("n").unwrap()[0].device = "b".to_owned();
    let nodes = BTreeMap::from([("n".to_owned(), node(&[0, 0, 5], &[("first", "c", 5)]))]);
    let rebuilt = Ledger::rebuild(Facts { nodes, claims });
    assert_eq!(rebuilt.unplaced_requests("n"), []);
    assert_eq!(reserved_units(&rebuilt, "n"), all);
}

#[test]
fn a_pod_has_reservations_on_several_nodes_until_it_is_bound() {
    let mut ledger = ledger(&[0]);
    ledger.observe("m", node(&[5], &[]));
    ledger.observe("full", node(&[9], &[]));
    reserve(&mut ledger, "p", &[4], 9);
    assert_eq!(
        (reserved_units(&ledger, "m"), reserved_units(&ledger, "n")),
        (vec![units_on("a", 4)], vec![units_on("a", 4)])
    );
    assert!(reserved_units(&ledger, "full").is_empty());
    ledger.bind("p", "n", &device_requests(&[4]));
    assert_eq!((reserved_units(&ledger, "m"), reserved_units(&ledger, "n")), (vec![], vec![units_on("a", 4)]));
}

#[test]
fn at_most_the_given_number_of_nodes_is_returned_best_first() {
    let mut ledger = ledger(&[0]);
    ledger.observe("m", node(&[5], &[]));
    ledger.observe("o", node(&[6], &[]));
    let fits = ledger.fit(&device_requests(&[4]), ["m", "n", "o", "o"], 2, &Tightest).unwrap();
    assert_eq!(fits.iter().map(Fit::node).collect::<Vec<_>>(), ["o", "m"]);
}

#[test]
fn only_claims_of_pods_that_are_not_bound_expire() {
    let mut ledger = ledger(&[0]);
    reserve(&mut ledger, "late", &[2], 10);
    reserve(&mut ledger, "later", &[3], 20);
    reserve(&mut ledger, "bound", &[4], 10);
    ledger.bind("bound", "n", &device_requests(&[4]));
    let unbound = |ledger: &Ledger| ledger.unbound_claims().map(|(pod, _)| pod.to_owned()).collect::<Vec<_>>();
    assert_eq!(unbound(&ledger), ["late", "later"]);
    assert!(ledger.pods_with_expired_claims(Moment(9)).is_empty());
    assert_eq!(ledger.pods_with_expired_claims(Moment(10)), ["late"]);
    ledger.remove_claim("late");
    assert_eq!(unbound(&ledger), ["later"]);
    assert_eq!(reserved_units(&ledger, "n"), [units_on("a", 3), units_on("a", 4)]);
    assert!(ledger.pods_with_expired_claims(Moment(10)).is_empty());
}

#[test]
fn a_reservation_that_no_longer_fits_moves_or_is_reported_as_short() {
    let mut ledger = ledger(&[0, 5]);
    reserve(&mut ledger, "p", &[5], 9);
    reserve(&mut ledger, "q", &[7], 9);
    assert_eq!(reserved_units(&ledger, "n"), [units_on("a", 7), units_on("b", 5)]);
    // A pod bypassed the gate and used a unit of `b`. The reservation of `p` cannot move, because
    // only three units remain on `a`.
    ledger.observe("n", node(&[0, 6], &[("x", "b", 1)]));
    assert_eq!(
        (reserved_units(&ledger, "n"), ledger.unplaced_requests("n").to_vec()),
        (vec![units_on("a", 7)], device_requests(&[5]))
    );
    // Add a device.
    ledger.observe("n", node(&[0, 6, 4], &[("x", "b", 1)]));
    assert_eq!(
        (reserved_units(&ledger, "n"), ledger.unplaced_requests("n").len()),
        (vec![units_on("a", 7), units_on("c", 5)], 0)
    );
    // Remove all devices.
    ledger.observe("n", NodeFacts::default());
    assert_eq!(ledger.unplaced_requests("n"), device_requests(&[5, 7]).into_iter().rev().collect::<Vec<_>>());
}

#[test]
fn a_pod_that_bypassed_the_gate_gets_a_reservation_if_it_fits() {
    let mut ledger = ledger(&[0]);
    ledger.bind("x", "n", &device_requests(&[4]));
    assert_eq!(reserved_units(&ledger, "n"), [units_on("a", 4)]);
    ledger.bind("y", "n", &device_requests(&[7]));
    assert_eq!(
        ledger.unplaced_requests("n"),
        device_requests(&[4]),
        "there is no room for both, and the larger one is placed first"
    );
    ledger.bind("z", "unknown", &device_requests(&[7]));
    ledger.observe("unknown", node(&[0], &[]));
    assert_eq!(reserved_units(&ledger, "unknown"), [units_on("a", 7)]);
}

#[test]
fn a_pod_of_several_containers_is_allocated_part_by_part() {
    let mut ledger = ledger(&[0, 0]);
    reserve(&mut ledger, "p", &[7, 6], 9);
    ledger.bind("p", "n", &device_requests(&[7, 6]));
    assert_eq!(reserved_units(&ledger, "n"), [units_on("a", 7), units_on("b", 6)]);
    ledger.observe("n", node(&[0, 6], &[("p", "b", 6)]));
    assert_eq!(reserved_units(&ledger, "n"), [units_on("a", 7)]);
    // The kubelet reuses the init container's units for a container that requests 3 units. The
    // other 4 units must be on the same device.
    ledger.observe("n", node(&[3, 6], &[("p", "a", 3), ("p", "b", 6)]));
    assert_eq!(reserved_units(&ledger, "n"), [units_on("a", 4)]);
    ledger.observe("n", node(&[7, 6], &[("p", "a", 3), ("p", "a", 4), ("p", "b", 6)]));
    assert!(reserved_units(&ledger, "n").is_empty());
}

#[test]
fn unexpected_allocations_reduce_the_remaining_requests() {
    let missing = |sizes: &[u32], parts: &[u32]| -> Vec<u32> {
        let parts: Vec<(&str, &str, u32)> = parts.iter().map(|&part| ("p", "a", part)).collect();
        let node = Node::from_facts(node(&[0], &parts), |_| None);
        let allocated = node.allocations.get("p").map(AsRef::as_ref).unwrap_or_default();
        missing_units(&device_requests(sizes), allocated)[MPS_RESOURCE].iter().map(|(units, _)| units.get()).collect()
    };
    assert_eq!(missing(&[5], &[]), [5]);
    assert_eq!(missing(&[5, 2], &[2]), [5]);
    assert_eq!(missing(&[5, 3], &[2]), [1, 5]);
    assert_eq!(missing(&[2, 3], &[5]), [0; 0]);
    assert_eq!(missing(&[2, 3], &[4]), [1]);
    assert_eq!(missing(&[2], &[9, 9]), [0; 0]);
}

#[test]
fn a_stale_fit_is_refused_and_nothing_is_reserved() {
    let mut ledger = ledger(&[4, 4]);
    let fits = ledger.fit(&device_requests(&[6, 2]), ["n"], 1, &Tightest).unwrap();
    reserve(&mut ledger, "other", &[5], 9);
    let before = ledger.clone();
    assert_eq!(ledger.reserve("p", &fits, Moment(9)), Err(ReserveError::Stale));
    assert_eq!(ledger, before);
    assert_eq!(ledger.reserve("other", &fits, Moment(9)), Err(ReserveError::Claimed));
}

#[test]
fn repeated_or_inconsistent_facts_free_no_units() {
    let mut ledger = Ledger::default();
    let mut facts = node(&[0, 0], &[("x", "a", 4), ("y", "a", 5)]);
    facts.devices.push(DeviceFacts { capacity: 3, ..facts.devices[1].clone() });
    ledger.observe("n", facts);
    assert_eq!(ledger.devices("n").iter().map(|device| device.free).collect::<Vec<_>>(), [1, 3]);
}

#[test]
fn a_ledger_rebuilt_from_facts_equals_the_lost_ledger() {
    let mut ledger = ledger(&[0, 5]);
    reserve(&mut ledger, "p", &[5], 9);
    reserve(&mut ledger, "q", &[3], 9);
    ledger.bind("q", "n", &device_requests(&[3]));
    let facts = Facts { nodes: BTreeMap::from([("n".to_owned(), node(&[0, 5], &[]))]), claims: claims_of(&ledger) };
    assert_eq!(Ledger::rebuild(facts.clone()), ledger);
    let mut unwritten = facts.clone();
    unwritten.claims.values_mut().for_each(|claim| claim.annotated.clear());
    let unwritten = Ledger::rebuild(unwritten);
    assert_eq!(
        reserved_units(&unwritten, "n").iter().map(|(_, size)| *size).sum::<u32>(),
        8,
        "claims without an annotation also count as reserved"
    );
    let unclaimed = Ledger::rebuild(Facts { claims: BTreeMap::new(), ..facts });
    assert!(reserved_units(&unclaimed, "n").is_empty(), "units without a claim are free");
}

#[test]
fn typical_requests_decide_on_which_device_units_remain_free() {
    // Pods request 6 and 4 units. `b` has 6 free units, which a pod of 6 could use, so a pod of 4
    // is placed on `a`. The tightest device for 4 is `b`.
    let mut observed = ObservedDemands::new(None);
    for _ in 0..10 {
        for per_gpu in [600, 400] {
            observed.add(&Demand { cpu: 0, gpus: 1, per_gpu, models: Vec::new() });
        }
    }
    let value = CapacityValue::learn(
        &observed.typical_pods(),
        &[placement::Node { model: "m".to_owned(), cpu_total: 1, cpu: 1, gpus: vec![THOUSANDTHS_PER_GPU; 2] }],
    );
    let ledger = ledger(&[0, 4]);
    let device = |fits: &Fits| fits.iter().next().unwrap().reservations()[0].device.clone();
    assert_eq!(device(&ledger.fit(&device_requests(&[4]), ["n"], 1, &Tightest).unwrap()), "b");
    assert_eq!(device(&ledger.fit(&device_requests(&[4]), ["n"], 1, &value).unwrap()), "a");
    assert_eq!(device(&ledger.fit(&device_requests(&[6]), ["n"], 1, &value).unwrap()), "b");
}

/// Learned only once, because learning takes about a second in unoptimized builds.
static LEARNED_VALUE: LazyLock<CapacityValue> = LazyLock::new(|| {
    let mut observed = ObservedDemands::new(None);
    for per_gpu in [600, 400, 300] {
        observed.add(&Demand { cpu: 1, gpus: 1, per_gpu, models: Vec::new() });
    }
    let there = placement::Node { model: "m".to_owned(), cpu_total: 1, cpu: 1, gpus: vec![THOUSANDTHS_PER_GPU; 2] };
    CapacityValue::learn(&observed.typical_pods(), &[there])
});

proptest! {
    /// The fast comparison of nodes equals the result of the full placement.
    #[test]
    fn rank_node_and_fit_return_the_same_rank(
        used in prop::collection::vec(0_u32..=10, 0..6),
        sizes in prop::collection::vec(1_u32..=11, 0..3),
    ) {
        let ledger = ledger(&used);
        let device_requests = device_requests(&sizes);
        let wanted = requested_units(&device_requests);
        let node = &ledger.nodes["n"];
        prop_assert_eq!(node.rank_node(&wanted, &*LEARNED_VALUE), node.fit_requests(&wanted, &*LEARNED_VALUE).map(|(worth, _)| worth));
        prop_assert_eq!(node.rank_node(&wanted, &Tightest), node.fit_requests(&wanted, &Tightest).map(|(worth, _)| worth));
    }
}
