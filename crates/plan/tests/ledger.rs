//! Tests the ledger in a simulated cluster. Pods are created, bound, allocated and deleted in any
//! order. The ledger is lost and rebuilt, devices shrink, and pods bypass the gate.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use cleave_plan::ledger::{
    Allocation, ChoiceCriteria, Chooser, Claim, DeviceFacts, DeviceRequest, Facts, Fit, Fits, Ledger, Moment,
    NodeFacts, PendingPod, Place, Reservation, Siblings, Tightest, Units,
};
use cleave_plan::placement::learned::to_thousandths;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const MPS_RESOURCE: &str = "nvidia.com/gpu-mps";
const NODES: [&str; 3] = ["n0", "n1", "n2"];
const DEVICES: [&str; 3] = ["a", "b", "c"];
const DEVICE_CAPACITY: u32 = 10;
/// Lifetime of a claim, in the seconds of `Event::Tick`.
const CLAIM_SECONDS: u64 = 5;

/// An event of the simulation. Each number counts modulo the number of choices at that moment.
#[derive(Debug, Clone)]
enum Event {
    /// A pod with containers of these sizes is created, and gets reservations on at most `most`
    /// nodes.
    Create { sizes: Vec<u32>, most: usize },
    /// The scheduler binds a released pod.
    Bind { pod: usize, node: usize },
    /// The kubelet allocates the units of a bound pod. `device` chooses among equal reservations.
    Allocate { pod: usize, device: usize },
    /// A pod is deleted, whatever its state.
    Delete { pod: usize },
    /// Time passes.
    Tick { by: u64 },
    /// The operator is killed and restarted.
    Crash,
    /// The capacity of a device changes. This event and the next two break the ledger's
    /// assumptions.
    Resize { node: usize, device: usize, capacity: u32 },
    /// A pod uses units without a reservation.
    Bypass { node: usize, device: usize, units: u32 },
    /// A node becomes unknown until it is observed again.
    Forget { node: usize },
    /// A node is observed.
    Observe { node: usize },
}

fn request_sizes() -> impl Strategy<Value = Vec<u32>> {
    prop_oneof![
        4 => (1..=DEVICE_CAPACITY).prop_map(|size| vec![size]),
        1 => prop::collection::vec(1..=6_u32, 2..4),
    ]
}

fn orderly_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => (request_sizes(), 1..=3_usize).prop_map(|(sizes, most)| Event::Create { sizes, most }),
        5 => (any::<usize>(), any::<usize>()).prop_map(|(pod, node)| Event::Bind { pod, node }),
        5 => (any::<usize>(), any::<usize>()).prop_map(|(pod, device)| Event::Allocate { pod, device }),
        3 => any::<usize>().prop_map(|pod| Event::Delete { pod }),
        1 => (0..=CLAIM_SECONDS).prop_map(|by| Event::Tick { by }),
        1 => Just(Event::Crash),
    ]
}

fn hostile_event() -> impl Strategy<Value = Event> {
    let node = 0..NODES.len();
    let device = 0..DEVICES.len();
    prop_oneof![
        20 => orderly_event(),
        1 => (node.clone(), device.clone(), 0..=12_u32)
            .prop_map(|(node, device, capacity)| Event::Resize { node, device, capacity }),
        1 => (node.clone(), device, 1..=5_u32).prop_map(|(node, device, units)| Event::Bypass { node, device, units }),
        1 => node.clone().prop_map(|node| Event::Forget { node }),
        2 => node.prop_map(|node| Event::Observe { node }),
    ]
}

fn units(units: u32) -> Units {
    Units::new(units).unwrap()
}

fn device_requests(sizes: &[u32]) -> Vec<DeviceRequest> {
    sizes.iter().map(|&size| DeviceRequest { resource: MPS_RESOURCE.to_owned(), units: units(size) }).collect()
}

/// A pod of the cluster.
#[derive(Debug, Clone)]
struct Pod {
    sizes: Vec<u32>,
    nodes: Vec<String>,
    bound: Option<String>,
    served: bool,
    /// The annotation written when the pod was released. The annotation never changes.
    annotated: ReservationsByNode,
}

/// Reservations by node.
type ReservationsByNode = BTreeMap<String, Vec<Reservation>>;

/// The simulated cluster and its ledger.
struct Simulation {
    pods: BTreeMap<String, Pod>,
    capacity: BTreeMap<(&'static str, &'static str), u32>,
    allocations: BTreeMap<&'static str, Vec<Allocation>>,
    now: u64,
    count: usize,
    ledger: Ledger,
    chooser: Chooser,
    /// The facts that the ledger observed last.
    known: BTreeMap<String, NodeFacts>,
    /// Pods that failed because the kubelet could not allocate their units.
    refused: Vec<String>,
}

impl Simulation {
    fn new() -> Self {
        let all = NODES.iter().flat_map(|node| DEVICES.iter().map(move |device| ((*node, *device), DEVICE_CAPACITY)));
        let mut simulation = Self {
            pods: BTreeMap::new(),
            capacity: all.collect(),
            allocations: BTreeMap::new(),
            now: 0,
            count: 0,
            ledger: Ledger::default(),
            chooser: Chooser::default(),
            known: BTreeMap::new(),
            refused: Vec::new(),
        };
        NODES.iter().for_each(|node| simulation.observe(node));
        simulation
    }

    fn count_used(&self, node: &str, device: &str) -> u32 {
        let allocations = self.allocations.get(node).into_iter().flatten();
        allocations.filter(|allocation| allocation.device == device).map(|allocation| allocation.units.get()).sum()
    }

    fn observe(&mut self, node: &'static str) {
        let devices = DEVICES.iter().map(|device| DeviceFacts {
            device: (*device).to_owned(),
            resource: MPS_RESOURCE.to_owned(),
            capacity: self.capacity[&(node, *device)],
            used: self.count_used(node, device),
        });
        let facts = NodeFacts {
            model: "m".to_owned(),
            devices: devices.collect(),
            allocations: self.allocations.get(node).cloned().unwrap_or_default(),
        };
        self.known.insert(node.to_owned(), facts.clone());
        self.ledger.observe(node, facts);
    }

    fn pick_pod(&self, number: usize, wanted: impl Fn(&Pod) -> bool) -> Option<String> {
        let names: Vec<&String> = self.pods.iter().filter(|(_, pod)| wanted(pod)).map(|(name, _)| name).collect();
        names.get(number % names.len().max(1)).map(|name| (*name).clone())
    }

    fn apply(&mut self, event: &Event) {
        match event {
            Event::Create { sizes, most } => self.create_pod(sizes, *most),
            Event::Bind { pod, node } => {
                let Some(name) = self.pick_pod(*pod, |pod| pod.bound.is_none()) else { return };
                let pod = self.pods.get_mut(&name).unwrap();
                let node = pod.nodes[node % pod.nodes.len()].clone();
                pod.bound = Some(node.clone());
                self.ledger.bind(&name, &node, &device_requests(&pod.sizes));
            }
            Event::Allocate { pod, device } => {
                if let Some(name) = self.pick_pod(*pod, |pod| pod.bound.is_some() && !pod.served) {
                    self.allocate_pod(&name, *device);
                }
            }
            Event::Delete { pod } => {
                if let Some(name) = self.pick_pod(*pod, |_| true) {
                    self.delete_pod(&name);
                }
            }
            Event::Tick { by } => {
                self.now += by;
                for pod in self.ledger.pods_with_expired_claims(Moment(self.now)) {
                    let claim = self.ledger.remove_claim(&pod).unwrap();
                    assert!(matches!(claim.place, Place::OneOf { .. }), "{pod} is bound");
                    self.delete_pod(&pod);
                }
            }
            Event::Crash => {
                self.ledger = self.rebuild_ledger(|_, pod| pod.annotated.clone());
                self.chooser = Chooser::default();
            }
            Event::Resize { node, device, capacity } => {
                self.capacity.insert((NODES[*node], DEVICES[*device]), *capacity);
                self.observe(NODES[*node]);
            }
            Event::Bypass { node, device, units: size } => {
                let (node, device) = (NODES[*node], DEVICES[*device]);
                let free = self.capacity[&(node, device)].saturating_sub(self.count_used(node, device));
                let Some(size) = Units::new(free.min(*size)) else { return };
                let pod = format!("around-{}", self.count);
                self.count += 1;
                self.allocations.entry(node).or_default().push(allocation(&pod, device, size));
                self.observe(node);
            }
            Event::Forget { node } => {
                self.known.remove(NODES[*node]);
                self.ledger.remove_node(NODES[*node]);
            }
            Event::Observe { node } => self.observe(NODES[*node]),
        }
    }

    fn create_pod(&mut self, sizes: &[u32], most: usize) {
        let name = format!("p{}", self.count);
        self.count += 1;
        let fits = self.ledger.fit(&device_requests(sizes), NODES, most, &Tightest);
        // Checks that the cached choice finds a placement with the same rank as the full search.
        let device_requests = device_requests(sizes);
        let waiting = PendingPod { pod: &name, priority: 0, device_requests: &device_requests };
        self.ledger.synchronize(&mut self.chooser);
        let siblings = Siblings::default();
        let beside = ChoiceCriteria { cpu: 0, siblings: &siblings };
        let found = self.ledger.choose(waiting, beside, &mut self.chooser, most, |node| NODES.contains(&node));
        let searched = self.ledger.fit_for(waiting, NODES, most, &Tightest).ok();
        if sizes.len() == 1 {
            // A full search compares units, and the cached choice compares parts of a GPU.
            let is_uniform = self.capacity.values().all(|capacity| *capacity == DEVICE_CAPACITY);
            let left = |fit: &Fit| if is_uniform { self.remaining_thousandths(fit) } else { 0 };
            let left = |fits: &Option<Fits>| fits.iter().flat_map(Fits::iter).map(left).collect::<Vec<_>>();
            assert_eq!(left(&found), left(&searched));
        }
        let possible: BTreeSet<&str> = NODES.into_iter().filter(|node| self.can_fit(node, sizes)).collect();
        let Ok(fits) = fits else {
            assert!(possible.is_empty(), "{sizes:?} would fit {possible:?}: {fits:?}");
            return;
        };
        let nodes: Vec<String> = fits.iter().map(|fit| fit.node().to_owned()).collect();
        assert_eq!(nodes.len(), most.min(possible.len()), "{nodes:?} of {possible:?}");
        self.ledger.reserve(&name, &fits, Moment(self.now + CLAIM_SECONDS)).unwrap();
        let annotated = fits.iter().map(|fit| (fit.node().to_owned(), fit.reservations().to_vec())).collect();
        self.pods.insert(name, Pod { sizes: sizes.to_vec(), nodes, bound: None, served: false, annotated });
    }

    /// Returns the part of the chosen device that remains, in thousandths.
    fn remaining_thousandths(&self, fit: &Fit) -> u32 {
        let devices = self.ledger.devices(fit.node());
        let device = devices.iter().find(|device| device.device == fit.reservations()[0].device).unwrap();
        to_thousandths(device.free, device.capacity)
            - to_thousandths(fit.reservations()[0].units.get(), device.capacity)
    }

    /// Returns whether the sizes fit, by trying all assignments.
    fn can_fit(&self, node: &str, sizes: &[u32]) -> bool {
        fn fit(free: &mut [u32], sizes: &[u32]) -> bool {
            let Some((&size, rest)) = sizes.split_first() else { return true };
            (0..free.len()).any(|device| {
                free[device] >= size && {
                    free[device] -= size;
                    let found = fit(free, rest);
                    free[device] += size;
                    found
                }
            })
        }
        let mut free: Vec<u32> = self.ledger.devices(node).iter().map(|device| device.free).collect();
        self.known.contains_key(node) && fit(&mut free, sizes)
    }

    /// Allocates like the agent. On one device, the agent prefers a reservation of exactly this
    /// size, and it counts its own allocations.
    fn allocate_pod(&mut self, name: &str, number: usize) {
        let pod = self.pods[name].clone();
        let node = NODES.into_iter().find(|node| Some(*node) == pod.bound.as_deref()).unwrap();
        let mut reservations = self.ledger.reservations(node);
        for &size in &pod.sizes {
            let free = |device: &str| self.capacity[&(node, device)].saturating_sub(self.count_used(node, device));
            let able: Vec<&'static str> = DEVICES.into_iter().filter(|device| free(device) >= size).collect();
            let held =
                |device: &str| reservations.iter().position(|held| held.device == device && held.units.get() == size);
            let meant: Vec<&'static str> = able.iter().copied().filter(|device| held(device).is_some()).collect();
            let choice = if meant.is_empty() { &able } else { &meant };
            let Some(device) = choice.get(number % choice.len().max(1)).copied() else {
                self.refused.push(name.to_owned());
                return self.delete_pod(name);
            };
            if let Some(index) = held(device) {
                reservations.remove(index);
            }
            self.allocations.entry(node).or_default().push(allocation(name, device, units(size)));
        }
        self.pods.get_mut(name).unwrap().served = true;
        self.observe(node);
    }

    fn delete_pod(&mut self, name: &str) {
        let pod = self.pods.remove(name).unwrap();
        self.ledger.remove_claim(name);
        if let Some(node) = NODES.into_iter().find(|node| Some(*node) == pod.bound.as_deref()) {
            self.allocations.entry(node).or_default().retain(|allocation| allocation.pod != name);
            self.observe(node);
        }
    }

    /// Returns a ledger rebuilt from the nodes and the annotations of the pods.
    fn rebuild_ledger(&self, annotated: impl Fn(&str, &Pod) -> ReservationsByNode) -> Ledger {
        let claims = self.pods.iter().map(|(name, pod)| {
            let place = pod.bound.clone().map_or_else(
                || {
                    let Some(Claim { place: Place::OneOf { expires, .. }, .. }) = self.ledger.claim(name) else {
                        panic!("{name} has lost its claim")
                    };
                    Place::OneOf { nodes: pod.nodes.iter().cloned().collect(), expires: *expires }
                },
                Place::Bound,
            );
            (
                name.clone(),
                Claim { device_requests: device_requests(&pod.sizes), place, annotated: annotated(name, pod) },
            )
        });
        Ledger::rebuild(Facts { nodes: self.known.clone(), claims: claims.collect() })
    }

    /// Checks the ledger's invariants.
    fn check_invariants(&self) {
        for node in NODES {
            let known = self.known.get(node);
            let held: Vec<Reservation> = self.ledger.reservations(node);
            for facts in known.into_iter().flat_map(|known| &known.devices) {
                let reserved: u32 =
                    held.iter().filter(|held| held.device == facts.device).map(|held| held.units.get()).sum();
                let free = facts.capacity.saturating_sub(facts.used);
                assert!(reserved <= free, "{reserved} reserved of {free} on {node} {}", facts.device);
            }
            assert!(known.is_some() || held.is_empty(), "{node} is not known: {held:?}");
            // Every pod that may still run on the node has a reservation or is reported as short.
            let waits = |pod: &&Pod| {
                !pod.served && pod.bound.as_ref().map_or(pod.nodes.iter().any(|one| one == node), |bound| bound == node)
            };
            let mut wanted: Vec<u32> =
                self.pods.values().filter(waits).flat_map(|pod| pod.sizes.iter().copied()).collect();
            let short = self.ledger.unplaced_requests(node).iter().map(|request| request.units.get());
            let mut kept: Vec<u32> = held.iter().map(|held| held.units.get()).chain(short).collect();
            wanted.sort_unstable();
            kept.sort_unstable();
            assert!(known.is_none() || wanted == kept, "{node}: wanted {wanted:?}, kept {kept:?}");
        }
        let known =
            |name: &str, _: &Pod| self.ledger.claim(name).map(|claim| claim.annotated.clone()).unwrap_or_default();
        let rebuilt = self.rebuild_ledger(known);
        for node in NODES {
            let of = |ledger: &Ledger| {
                (ledger.reservations(node), ledger.unplaced_requests(node).to_vec(), ledger.devices(node))
            };
            // If a node is short of units, a rebuild may place all pods. The two ledgers then
            // differ.
            let found = !self.ledger.unplaced_requests(node).is_empty() && rebuilt.unplaced_requests(node).is_empty();
            assert!(found || of(&rebuilt) == of(&self.ledger), "{node}: {:?}, {:?}", of(&rebuilt), of(&self.ledger));
        }
        if NODES.iter().all(|node| self.ledger.unplaced_requests(node).is_empty()) {
            assert_eq!(rebuilt, self.ledger);
        }
    }
}

fn allocation(pod: &str, device: &str, units: Units) -> Allocation {
    Allocation { pod: pod.to_owned(), resource: MPS_RESOURCE.to_owned(), device: device.to_owned(), units }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// Invariants after any events:
    /// - No device has more reserved units than free units.
    /// - No released pod loses its claim.
    /// - A fit is found if and only if one exists.
    /// - A rebuilt ledger equals the lost ledger unless a pod is short.
    #[test]
    fn the_ledger_never_overcommits_and_keeps_every_claim(events in prop::collection::vec(hostile_event(), 0..80)) {
        let mut simulation = Simulation::new();
        for event in &events {
            simulation.apply(event);
            simulation.check_invariants();
        }
    }

    /// If no pod bypasses the gate and no device shrinks, the kubelet allocates all units of every
    /// released pod. The order of events, the choice among equal devices and restarts of the
    /// operator do not matter.
    #[test]
    fn released_pods_are_always_allocated_their_units(events in prop::collection::vec(orderly_event(), 0..120)) {
        let mut simulation = Simulation::new();
        for event in &events {
            simulation.apply(event);
            prop_assert!(simulation.refused.is_empty(), "{:?} after {:?}", simulation.refused, event);
            prop_assert!(NODES.iter().all(|node| simulation.ledger.unplaced_requests(node).is_empty()), "short after {:?}", event);
        }
        simulation.check_invariants();
    }
}
