//! A kubelet that admits pods, as it does it, against what the agent knows of them: as long as what
//! is held for pods fits, none is ever split.
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use cleave_kubelet::HeldDevices;
use cleave_plan::ledger::{Container, Kind as When, asks, parts};
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

use cleave_agent::allocation::allocate::{Choice, ResourceView, grant, prefer};
use cleave_agent::allocation::pending::{BoundPod, ContainerRequest, PendingAllocations};
use cleave_agent::gpu::layout::{Kind, Pool, device_id};

const MPS: &str = "nvidia.com/gpu-mps";
const UNITS: u32 = 10;

/// Units of one ask of a pod, on a device.
#[derive(Debug, Clone)]
struct Hold {
    pod: String,
    ask: usize,
    units: u32,
    device: String,
}

#[derive(Debug, Clone)]
struct Pod {
    bound: BoundPod,
    containers: Vec<Container>,
    /// What its containers were given so far.
    given: Vec<Vec<String>>,
}

impl Pod {
    fn ids(&self) -> BTreeSet<&String> {
        self.given.iter().flatten().collect()
    }
}

struct World {
    pools: Vec<Pool>,
    pending: PendingAllocations,
    now: Instant,
    /// The ledger's, of pods that have not been given all.
    holds: Vec<Hold>,
    waiting: Vec<Pod>,
    running: Vec<Pod>,
    made: usize,
}

impl World {
    fn new(devices: usize) -> Self {
        let kind = Kind::Mps { memory_mib: vec![], threads: vec![], max_clients: None };
        let pool = |device| Pool {
            device: format!("GPU-{device}"),
            resource: MPS.into(),
            first: 0,
            count: UNITS,
            kind: kind.clone(),
        };
        Self {
            pools: (0..devices).map(pool).collect(),
            pending: PendingAllocations::with_watch(),
            now: Instant::now(),
            holds: Vec::new(),
            waiting: Vec::new(),
            running: Vec::new(),
            made: 0,
        }
    }

    fn devices(&self) -> Vec<String> {
        self.pools.iter().map(|pool| pool.device.clone()).collect()
    }

    /// Ids of a device that no pod has.
    fn free(&self, device: &str) -> Vec<String> {
        let taken: BTreeSet<&String> = self.running.iter().chain(&self.waiting).flat_map(Pod::ids).collect();
        (0..UNITS).map(|unit| device_id(device, unit)).filter(|id| !taken.contains(id)).collect()
    }

    fn room(&self, device: &str) -> i64 {
        let free = i64::try_from(self.free(device).len()).unwrap();
        let held = self.holds.iter().filter(|hold| hold.device == device);
        held.fold(free, |room, hold| room - i64::from(self.lacks(hold)))
    }

    /// What an ask has not been given yet.
    fn lacks(&self, hold: &Hold) -> u32 {
        let Some(pod) = self.waiting.iter().find(|pod| pod.bound.uid == hold.pod) else { return 0 };
        let of_ask = parts(&pod.containers).into_iter().zip(&pod.given).filter(|(part, _)| part.ask == hold.ask);
        let given: BTreeSet<&String> = of_ask.flat_map(|(_, ids)| ids).collect();
        hold.units - u32::try_from(given.len()).unwrap()
    }

    /// A pod is let through, where all that it asks for can be held, and bound.
    fn comes(&mut self, shape: &[(bool, u32)]) {
        let kind = |init: bool| if init { When::Init } else { When::Main };
        let mut containers: Vec<Container> = shape
            .iter()
            .map(|&(init, units)| Container { kind: kind(init), limits: BTreeMap::from([(MPS.to_owned(), units)]) })
            .collect();
        containers.sort_by_key(|container| container.kind == When::Main);
        self.made += 1;
        let uid = format!("{:03}", 7 * self.made % 1000);
        let before = self.holds.len();
        for (ask, wanted) in asks(&containers).iter().enumerate() {
            let units = wanted.units.get();
            let fits = |device: &String| self.room(device) >= i64::from(units);
            let Some(device) = self.devices().into_iter().find(fits) else {
                self.holds.truncate(before);
                self.waiting.retain(|pod| pod.bound.uid != uid);
                return;
            };
            self.holds.push(Hold { pod: uid.clone(), ask, units, device });
            // So that the next ask of the same pod sees it.
            if ask == 0 {
                let bound = BoundPod { uid: uid.clone(), ..bound() };
                self.waiting.push(Pod { bound, containers: containers.clone(), given: Vec::new() });
            }
        }
        let held: Vec<Hold> = self.holds[before..].to_vec();
        let want = |part: cleave_plan::ledger::Part| ContainerRequest {
            container: format!("c{}", part.container),
            resource: part.resource,
            units: part.units.get(),
            group: part.ask,
            needed: part.needed.get(),
            reserved_on: held.iter().find(|hold| hold.ask == part.ask).map(|hold| hold.device.clone()),
        };
        let requests = parts(&containers).into_iter().map(want).collect();
        let bound = BoundPod { uid: uid.clone(), name: format!("p{uid}"), requests, ..bound() };
        self.waiting.retain(|pod| pod.bound.uid != uid);
        self.pending.update_pod(bound.clone(), self.now);
        self.waiting.push(Pod { bound, containers, given: Vec::new() });
    }

    /// The kubelet asks for the next container of a pod, as its device manager does.
    fn asks(&mut self, index: usize, seed: usize) -> Result<(), TestCaseError> {
        let pod = self.waiting[index].clone();
        let number = pod.given.len();
        let size = pod.containers[number].limits[MPS] as usize;
        let inits = pod.given.iter().zip(&pod.containers).filter(|(_, container)| container.kind == When::Init);
        let mut reusable: BTreeSet<String> = inits.flat_map(|(ids, _)| ids).cloned().collect();
        for (ids, _) in pod.given.iter().zip(&pod.containers).filter(|(_, container)| container.kind == When::Main) {
            reusable.retain(|id| !ids.contains(id));
        }
        let must: Vec<String> = reusable.into_iter().take(size).collect();
        let mut free: Vec<String> = self.devices().iter().flat_map(|device| self.free(device)).collect();
        if !free.is_empty() {
            let turn = seed % free.len();
            free.rotate_left(turn);
        }
        prop_assert!(free.len() + must.len() >= size, "the scheduler counts");
        let ids = if must.len() == size {
            must
        } else if free.len() + must.len() == size {
            [must, free].concat()
        } else {
            prop_assert!(self.pending.expects(MPS, u32::try_from(size).unwrap()), "the pod is known, and not served");
            let available = [free, must.clone()].concat();
            let reserved = self.pending.reserved(MPS);
            let view = ResourceView { resource: MPS, pools: &self.pools, reserved: &reserved };
            prefer(&view, &Choice { available: &available, must_include: &must, size })
        };
        let granted = grant(&ResourceView { resource: MPS, pools: &self.pools, reserved: &[] }, &ids);
        prop_assert!(granted.is_ok(), "{granted:?} for {size} of {pod:?}; held: {:?}", self.holds);
        let device = granted.unwrap().devices.remove(0);
        self.pending.record_answer(MPS, u32::try_from(size).unwrap(), &device, self.now);
        self.follows(&pod, number, &device);
        self.waiting[index].given.push(ids);
        if self.waiting[index].given.len() == pod.containers.len() {
            let served = self.waiting.remove(index);
            self.holds.retain(|hold| hold.pod != served.bound.uid);
            self.running.push(served);
        }
        for device in self.devices() {
            prop_assert!(self.room(&device) >= 0, "{device} has not what is held there: {:?}", self.holds);
        }
        Ok(())
    }

    /// The ledger sees that a pod has taken what was held for another of that size: they swap.
    fn follows(&mut self, pod: &Pod, number: usize, device: &str) {
        let ask = parts(&pod.containers)[number].ask;
        let Some(own) = self.holds.iter().position(|hold| hold.pod == pod.bound.uid && hold.ask == ask) else { return };
        let Hold { units, device: held, .. } = self.holds[own].clone();
        if held == device {
            return;
        }
        let untouched = |hold: &Hold| hold.units == units && hold.device == device && self.lacks(hold) == units;
        if let Some(other) = self.holds.iter().position(untouched) {
            self.holds[other].device = held;
        }
        device.clone_into(&mut self.holds[own].device);
    }

    fn lists(&mut self) {
        // Of those that it never lists the kubelet has told the API server meanwhile.
        let unlisted = |pod: &&Pod| pod.containers.iter().all(|container| container.kind == When::Init);
        for pod in self.running.iter().filter(unlisted) {
            self.pending.update_pod(BoundPod { admitted: true, ..pod.bound.clone() }, self.now);
        }
        let row = |pod: &Pod, number: usize, ids: &[String]| HeldDevices {
            namespace: pod.bound.namespace.clone(),
            pod: pod.bound.name.clone(),
            container: format!("c{number}"),
            resource: MPS.into(),
            ids: ids.to_vec(),
        };
        let mut rows = Vec::new();
        for pod in self.waiting.iter().chain(&self.running) {
            for (number, (ids, container)) in pod.given.iter().zip(&pod.containers).enumerate() {
                if container.kind == When::Main {
                    rows.push(row(pod, number, ids));
                }
            }
        }
        self.pending.record_listed(&rows, self.now);
    }
}

fn bound() -> BoundPod {
    BoundPod {
        uid: String::new(),
        namespace: "ns".into(),
        name: String::new(),
        terminating: false,
        admitted: false,
        requests: Vec::new(),
    }
}

#[derive(Debug, Clone)]
enum Step {
    Comes(Vec<(bool, u32)>),
    /// The kubelet admits a pod, with lists between its containers.
    Admits(usize, bool),
    Lists,
    /// The API server tells that the kubelet has admitted a pod.
    Told(usize),
    Goes(usize),
}

fn steps(init: bool) -> impl Strategy<Value = Vec<Step>> {
    let container = (if init { any::<bool>().boxed() } else { Just(false).boxed() }, 1..=6_u32);
    let step = prop_oneof![
        4 => prop::collection::vec(container, 1..4).prop_map(Step::Comes),
        4 => (any::<usize>(), any::<bool>()).prop_map(|(pod, lists)| Step::Admits(pod, lists)),
        1 => Just(Step::Lists),
        1 => any::<usize>().prop_map(Step::Told),
        2 => any::<usize>().prop_map(Step::Goes),
    ];
    prop::collection::vec(step, 1..60)
}

/// `orderly`: the kubelet admits pods as they came.
fn run(devices: usize, steps: Vec<Step>, orderly: bool) -> Result<(), TestCaseError> {
    let mut world = World::new(devices);
    for step in steps {
        world.now += Duration::from_millis(100);
        match step {
            Step::Comes(shape) => world.comes(&shape),
            Step::Admits(_, _) if world.waiting.is_empty() => {}
            Step::Admits(pod, lists) => {
                let index = if orderly { 0 } else { pod % world.waiting.len() };
                for _ in 0..world.waiting[index].containers.len() {
                    world.asks(index, pod)?;
                    if lists {
                        world.lists();
                    }
                }
            }
            Step::Lists => world.lists(),
            Step::Told(pod) => {
                if let Some(pod) = world.running.get(pod % world.running.len().max(1)) {
                    world.pending.update_pod(BoundPod { admitted: true, ..pod.bound.clone() }, world.now);
                }
            }
            Step::Goes(pod) => {
                if !world.running.is_empty() {
                    let gone = world.running.remove(pod % world.running.len());
                    // The kubelet tells of a pod before it lets it go.
                    world.pending.update_pod(BoundPod { admitted: true, ..gone.bound.clone() }, world.now);
                    world.pending.remove_pod(&gone.bound.uid);
                }
            }
        }
    }
    Ok(())
}

/// The same sequences each time: with answers that name no pod the agent can be misled, in about
/// one of some thousand random ones.
fn search(init: bool) {
    let config = ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(config, rng);
    runner.run(&(1_usize..5, steps(init)), |(devices, steps)| run(devices, steps, init)).unwrap();
}

#[test]
fn in_whatever_order_the_kubelet_asks_no_pod_is_split() {
    search(false);
}

#[test]
fn with_init_containers_none_is_split_where_it_asks_in_the_order_in_which_pods_come() {
    search(true);
}
