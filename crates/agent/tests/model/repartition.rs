//! A GPU is cut and cut again, with the node's decisions and the changes as they are made, on a GPU
//! in memory that refuses what NVML refuses; and the agent, the driver and the kubelet do their
//! worst.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use cleave_api::GpuNodeSpec;
use cleave_api::gpunode::GpuSpec;
use cleave_gpu::mps::wire::{DaemonState, DaemonStatus, Desired, Enforcement, Status};
use cleave_gpu::nvml::{
    Census, ComputeMode, Gpu, Gpus, Mig, MigActivation, MigInstance, MigProfile, NvmlError, Process,
};
use cleave_kubelet::HeldDevices;
use cleave_plan::units::{Mebibytes, Sms};
use proptest::prelude::*;
use sim_machine::{Description, GpuDescription, MigError, Model, Placement, find_model};

use cleave_agent::act::perform;
use cleave_agent::allocation::allocate::{View, grant};
use cleave_agent::allocation::table::AllocationTable;
use cleave_agent::checkpoint::Checkpoint;
use cleave_agent::gpu::layout::parse_id;
use cleave_agent::gpu::mig::{ATTEMPTS, Change, Ended, Order, Outcome};
use cleave_agent::mps;
use cleave_agent::node::{Actions, Node, WITHDRAW};
use cleave_agent::object::Object;

use crate::fixtures::{Inventory, answer, gpu, mig_spec, mps_spec};

const GRACE: Duration = Duration::from_secs(30);
const GPU: &str = "GPU-a";
const WHOLE: &str = "nvidia.com/gpu";

/// A GPU, and what goes wrong with it.
struct Board {
    gpu: sim_machine::Gpu,
    model: &'static Model,
    made: u32,
    /// Processes by pid, each in a GPU instance or, with MIG mode off, on the GPU.
    processes: BTreeMap<u32, Option<u32>>,
    /// How many of these calls fail from now on.
    fails: BTreeMap<&'static str, u32>,
    calls: Vec<&'static str>,
}

#[derive(Clone)]
struct Shared(Arc<Mutex<Board>>);

fn lock(board: &Shared) -> MutexGuard<'_, Board> {
    board.0.lock().unwrap()
}

impl Board {
    fn new(model: &str) -> Self {
        let description = GpuDescription { model: model.into(), uuid: Some(GPU.into()), ..GpuDescription::default() };
        let mut state = Description { gpus: vec![description], ..Description::default() }.state().unwrap();
        let model = find_model(&[], model).unwrap();
        let (processes, fails) = Default::default();
        Self { gpu: state.gpus.remove(0), model, made: 0, processes, fails, calls: Vec::new() }
    }

    /// Counts a call, and fails where it shall.
    fn call(&mut self, name: &'static str) -> Result<(), NvmlError> {
        self.calls.push(name);
        match self.fails.get_mut(name) {
            Some(left) if *left > 0 => {
                *left -= 1;
                Err(NvmlError::Lost { call: name })
            }
            _ => Ok(()),
        }
    }

    fn describe(&self) -> Gpu {
        let profile = |profile: &sim_machine::GpuProfile| MigProfile {
            id: profile.id,
            name: profile.name.clone(),
            memory: Mebibytes(profile.memory_mib),
            sms: Sms(profile.sms),
            slices: profile.slices,
            size: profile.size,
            starts: profile.starts.clone(),
        };
        let instance = |gi: &sim_machine::GpuInstance| MigInstance {
            uuid: gi.compute.first().map(|ci| ci.uuid.clone()).unwrap_or_default(),
            profile: self.model.gpu_profile(gi.profile).unwrap().name.clone(),
            start: gi.placement.start,
            gpu_instance: gi.id,
            compute_instance: gi.compute.first().map(|ci| ci.id),
        };
        let mig = self.model.mig_capable().then(|| Mig {
            enabled: self.gpu.mig,
            pending: (self.gpu.mig != self.gpu.mig_pending).then_some(self.gpu.mig_pending),
            profiles: self.model.gpu_profiles.iter().map(profile).collect(),
            instances: self.gpu.instances.iter().map(instance).collect(),
        });
        Gpu { mig, ..gpu(GPU, 0) }
    }

    fn processes(&self) -> Vec<Process> {
        let process =
            |(&pid, &gpu_instance): (&u32, &Option<u32>)| Process { pid, memory: None, mps: false, gpu_instance };
        self.processes.iter().map(process).collect()
    }

    fn create_gpu_instance(&mut self, profile: &str, start: u32) -> Result<u32, NvmlError> {
        self.call("gi")?;
        let profile = self.model.gpu_profiles.iter().find(|known| known.name == profile).unwrap();
        let at = Placement { start, size: profile.size };
        let no = |_| NvmlError::NotSupported { call: "nvmlDeviceCreateGpuInstanceWithPlacement" };
        self.gpu.create_gpu_instance(self.model, profile.id, Some(at)).map_err(no)
    }

    fn create_compute_instance(&mut self, gpu_instance: u32) -> Result<(), NvmlError> {
        self.call("ci")?;
        let slices = |id| self.model.gpu_profile(id).unwrap().slices;
        let gi = self.gpu.instances.iter().find(|gi| gi.id == gpu_instance).unwrap();
        let whole = self.model.compute_profiles(gi.profile).into_iter().find(|ci| ci.slices == slices(gi.profile));
        self.gpu.create_compute_instance(self.model, gpu_instance, whole.unwrap().id, None).unwrap();
        // No two instances have one UUID, though one is where the other was.
        self.made += 1;
        let made = self.gpu.instances.iter_mut().find(|gi| gi.id == gpu_instance).unwrap();
        made.compute[0].uuid = format!("MIG-{}", self.made);
        Ok(())
    }

    fn destroy_compute_instance(&mut self, gpu_instance: u32) -> Result<(), NvmlError> {
        self.call("ci-destroy")?;
        let busy = self.processes.values().any(|inside| *inside == Some(gpu_instance));
        match self.gpu.destroy_compute_instance(gpu_instance, 0, |_| busy) {
            Ok(()) | Err(MigError::NotFound) => Ok(()),
            Err(_) => Err(NvmlError::InUse { call: "nvmlComputeInstanceDestroy" }),
        }
    }

    fn destroy_gpu_instance(&mut self, gpu_instance: u32) -> Result<(), NvmlError> {
        self.call("gi-destroy")?;
        self.gpu.destroy_gpu_instance(gpu_instance).map_err(|_| NvmlError::NotFound(gpu_instance.to_string()))
    }

    fn instances(&self) -> Vec<(String, u32)> {
        let of = |instance: &MigInstance| (instance.profile.clone(), instance.start);
        self.describe().mig.iter().flat_map(|mig| &mig.instances).map(of).collect()
    }
}

impl Shared {
    #[expect(clippy::unnecessary_wraps, reason = "an answer, as NVML gives it")]
    fn inventory(&self) -> Result<Inventory, NvmlError> {
        let board = lock(self);
        Ok(Inventory {
            driver: "580".into(),
            gpus: BTreeMap::from([(0, Ok(board.describe()))]),
            processes: BTreeMap::from([(GPU.to_owned(), board.processes())]),
        })
    }
}

impl Gpus for Shared {
    fn census(&self) -> Result<Census, NvmlError> {
        Ok(Census { driver: "580".into(), count: 1 })
    }
    fn gpu_at(&self, _: u32) -> Result<Gpu, NvmlError> {
        Ok(lock(self).describe())
    }
    fn gpu(&self, _: &str) -> Result<Gpu, NvmlError> {
        Ok(lock(self).describe())
    }
    fn processes(&self, _: &str) -> Result<Vec<Process>, NvmlError> {
        Ok(lock(self).processes())
    }
    fn set_compute_mode(&self, _: &str, _: ComputeMode) -> Result<ComputeMode, NvmlError> {
        unreachable!("the compute mode is the MPS host's")
    }
    fn set_mig_mode(&self, _: &str, on: bool) -> Result<MigActivation, NvmlError> {
        let mut board = lock(self);
        board.call("mode")?;
        let (model, busy) = (board.model, !board.processes.is_empty());
        match board.gpu.set_mig_mode(model, on, busy) {
            Ok(()) => Ok(MigActivation::Now),
            Err(MigError::ResetRequired) => Ok(MigActivation::AfterReset),
            Err(MigError::InUse) => Ok(MigActivation::InUse),
            Err(_) => Err(NvmlError::NotSupported { call: "nvmlDeviceSetMigMode" }),
        }
    }
    fn create_mig_instance(&self, gpu: &str, profile: &str, start: u32) -> Result<MigInstance, NvmlError> {
        let id = lock(self).create_gpu_instance(profile, start)?;
        let made = lock(self).create_compute_instance(id);
        if let Err(error) = made {
            // As the library does it; a rollback may fail too.
            let _ = lock(self).destroy_gpu_instance(id);
            return Err(error);
        }
        let there = self.gpu(gpu)?.mig.unwrap().instances;
        Ok(there.into_iter().find(|instance| instance.gpu_instance == id).unwrap())
    }
    fn destroy_mig_instance(&self, _: &str, gpu_instance: u32) -> Result<(), NvmlError> {
        lock(self).destroy_compute_instance(gpu_instance)?;
        lock(self).destroy_gpu_instance(gpu_instance)
    }
}

/// A node with that one GPU, its kubelet and its MPS host.
struct World {
    board: Shared,
    node: Node,
    table: AllocationTable,
    object: Object,
    now: Instant,
    last: Actions,
    orders: Vec<Order>,
    /// What pods hold, with the MIG instance or GPU that it is of.
    held: Vec<HeldDevices>,
    /// What the MPS host runs.
    host: Desired,
    notes: Vec<(&'static str, String)>,
    pods: u32,
}

impl World {
    fn new(model: &str) -> Self {
        Self::of(Shared(Arc::new(Mutex::new(Board::new(model)))), Instant::now(), None)
    }

    fn of(board: Shared, now: Instant, checkpoint: Option<Checkpoint>) -> Self {
        let (mut node, allocations) = Node::start("boot".into(), GRACE, checkpoint, None, now);
        let mut table = AllocationTable { allocations, ..AllocationTable::default() };
        let last = node.reconcile(&mut table, now);
        let mut world = Self {
            board,
            node,
            table,
            object: Object::Unknown,
            now,
            last,
            orders: Vec::new(),
            held: Vec::new(),
            host: Desired::default(),
            notes: Vec::new(),
            pods: 0,
        };
        world.look();
        world
    }

    /// An agent that starts after the last one was killed.
    fn restart(&mut self, with_checkpoint: bool) {
        let left = std::mem::replace(&mut self.object, Object::Unknown);
        let mut next = Self::of(self.board.clone(), self.now, with_checkpoint.then(|| self.last.checkpoint.clone()));
        (next.held, next.host, next.pods) = (std::mem::take(&mut self.held), self.host.clone(), self.pods);
        next.object = left.clone();
        next.node.object(left);
        *self = next;
        self.list();
        self.host_says(self.host.hash());
    }

    fn look(&mut self) {
        let inventory = self.board.inventory();
        answer(&mut self.node, inventory, self.now);
    }

    fn list(&mut self) {
        self.node.held(Ok(self.held.clone()), self.now, &mut self.table.allocations);
    }

    /// The MPS host acts upon the desired file and says so.
    fn host_acts(&mut self) {
        self.host = self.last.desired.clone();
        self.host_says(self.host.hash());
    }

    /// It has read that file, and daemons that shall end are on their way.
    fn host_reads(&mut self) {
        self.host_says(self.last.desired.hash());
    }

    fn host_says(&mut self, desired: String) {
        let daemon = |device: &String| {
            let (pid, server_pid, restarts, enforcement) = (Some(1), None, 0, Enforcement::Hard);
            let (message, clients) = Default::default();
            (
                device.clone(),
                DaemonStatus {
                    state: DaemonState::Active,
                    pid,
                    server_pid,
                    restarts,
                    enforcement,
                    message,
                    clients,
                    fault: None,
                },
            )
        };
        let daemons = self.host.daemons.keys().map(daemon).collect();
        let status = Status { version: 1, desired, daemons, ..Status::default() };
        self.node.mps(mps::View { alive: true, status, error: None });
    }

    fn want(&mut self, gpus: Vec<GpuSpec>) {
        let plan_id = format!("{gpus:?}");
        self.object = Object::Present(1, GpuNodeSpec { plan_id, gpus });
        self.node.object(self.object.clone());
    }

    fn turn(&mut self) {
        self.last = self.node.reconcile(&mut self.table, self.now);
        self.orders.append(&mut self.last.orders);
        self.notes.extend(self.last.events.iter().map(|event| (event.reason, event.note.clone())));
        assert!(self.orders.len() <= 1, "one change of a GPU at a time: {:?}", self.orders);
        self.ids_are_unique();
        for Order { change, .. } in &self.orders {
            let taken = match change {
                Change::Destroy(instance) => instance.uuid.as_str(),
                Change::Mode(true) => GPU,
                // While it is on, nothing but instances is served.
                Change::Mode(false) | Change::Create { .. } => continue,
            };
            let given_out = self.table.pools.values().flatten().any(|pool| pool.device == taken);
            assert!(!given_out, "{change} while its slices can be given out");
        }
    }

    fn ids_are_unique(&self) {
        for list in self.last.lists.values() {
            let ids: BTreeSet<&str> = list.iter().map(|device| device.id.as_str()).collect();
            assert_eq!(ids.len(), list.len());
        }
    }

    /// The devices that pods hold or that processes are in, as NVML's instance ids.
    fn in_use(&self) -> BTreeSet<String> {
        let held = self.held.iter().flat_map(|row| &row.ids).filter_map(|id| Some(parse_id(id)?.0.to_owned()));
        let given = self.table.allocations.iter().flat_map(|(_, given)| given.devices.clone());
        let board = lock(&self.board);
        let inside = |instance: &MigInstance| board.processes.values().any(|gi| *gi == Some(instance.gpu_instance));
        let gpu = board.describe();
        let instances = gpu.mig.iter().flat_map(|mig| &mig.instances).filter(|instance| inside(instance));
        let devices = held.chain(given).chain(instances.map(|instance| instance.uuid.clone()));
        let there: BTreeSet<String> =
            gpu.mig.iter().flat_map(|mig| &mig.instances).map(|i| i.uuid.clone()).chain([GPU.to_owned()]).collect();
        devices.filter(|device| there.contains(device)).collect()
    }

    /// GPU instance id and first slice of each MIG device. What has no compute instance is none,
    /// and nothing can be in it.
    fn places(&self) -> BTreeMap<String, (u32, u32)> {
        let gpu = lock(&self.board).describe();
        let made = gpu.mig.iter().flat_map(|mig| &mig.instances).filter(|instance| !instance.uuid.is_empty());
        made.map(|instance| (instance.uuid.clone(), (instance.gpu_instance, instance.start))).collect()
    }

    /// Makes the change that was ordered; nothing in use may be touched by it, and no daemon may
    /// run in what goes.
    fn act(&mut self) {
        let Some(order) = self.orders.pop() else { return };
        let (in_use, before, mode) = (self.in_use(), self.places(), lock(&self.board).gpu.mig);
        match &order.change {
            Change::Destroy(instance) => assert!(!self.host.daemons.contains_key(&instance.uuid), "{order:?}"),
            Change::Mode(_) => assert!(!self.host.daemons.contains_key(GPU), "{order:?}"),
            Change::Create { .. } => {}
        }
        let (outcome, after) = perform(&self.board, &order);
        let after_it = self.places();
        for device in in_use.iter().filter(|device| *device != GPU) {
            assert_eq!(before[device], after_it[device], "{order:?} took {device} from who holds it");
        }
        if in_use.contains(GPU) {
            assert_eq!(mode, lock(&self.board).gpu.mig, "{order:?}");
        }
        self.now += Duration::from_millis(1);
        self.node.ended(Ended { order, outcome, after, at: self.now }, self.now);
    }

    /// The kubelet gives a slice out, told as Healthy or, late as it is, not any more.
    fn give(&mut self, pick: usize) -> Option<String> {
        let slices: Vec<(String, String)> = (self.table.pools.iter())
            .flat_map(|(resource, pools)| {
                pools.iter().flat_map(move |pool| pool.ids().map(|id| (resource.clone(), id)))
            })
            .filter(|(resource, id)| !self.held.iter().any(|row| row.resource == *resource && row.ids.contains(id)))
            .collect();
        let (resource, id) = slices.get(pick.checked_rem(slices.len())?)?.clone();
        let view = View { resource: &resource, pools: &self.table.pools[&resource], kept: &[] };
        let given = grant(&view, std::slice::from_ref(&id)).unwrap();
        self.table.allocations.give(given, self.now);
        self.pods += 1;
        self.held.push(HeldDevices {
            namespace: "ns".into(),
            pod: format!("p{}", self.pods),
            container: "c".into(),
            resource,
            ids: vec![id.clone()],
        });
        Some(id)
    }

    /// All goes well for some time: everything that can happen does.
    fn rest(&mut self) {
        (0..80).for_each(|_| self.go_on());
    }

    /// The same until the node is as wanted, or for just as long.
    fn settle(&mut self) {
        self.turn();
        for _ in 0..80 {
            self.go_on();
            if self.applied() && self.orders.is_empty() {
                return;
            }
        }
    }

    fn go_on(&mut self) {
        self.host_acts();
        self.look();
        self.list();
        self.turn();
        self.act();
        self.now += Duration::from_secs(1);
    }

    fn steps(&self) -> Vec<(&str, &str)> {
        self.last.status.steps.iter().map(|step| (step.action.as_str(), step.result.as_str())).collect()
    }

    fn messages(&self) -> String {
        self.last.status.steps.iter().map(|step| step.message.as_str()).collect::<Vec<_>>().join("; ")
    }

    fn slices(&self, resource: &str) -> usize {
        let healthy = |list: &cleave_kubelet::DeviceList| list.iter().filter(|device| device.healthy).count();
        self.last.lists.get(resource).map_or(0, healthy)
    }

    fn applied(&self) -> bool {
        !self.last.status.plan_id.is_empty()
    }

    fn is(&self, wanted: &[(&str, u32)]) -> bool {
        let there = lock(&self.board).instances();
        let (there, wanted): (BTreeSet<_>, BTreeSet<_>) =
            (there.into_iter().collect(), wanted.iter().map(|&(name, start)| (name.to_owned(), start)).collect());
        there == wanted
    }
}

const MIXED: [(&str, u32, u32); 3] = [("3g.40gb", 4, 0), ("2g.20gb", 2, 4), ("1g.10gb", 0, 0)];

#[test]
fn a_whole_gpu_is_cut_and_cut_again_and_comes_back_whole() {
    let mut world = World::new("H100-80");
    world.want(vec![]);
    world.rest();
    assert_eq!(world.slices(WHOLE), 1);
    world.want(vec![mig_spec(GPU, &MIXED)]);
    world.turn();
    assert!(world.orders.is_empty(), "the kubelet hears first");
    assert_eq!(world.slices(WHOLE), 0);
    world.rest();
    assert!(world.applied() && world.is(&[("3g.40gb", 4), ("2g.20gb", 2), ("1g.10gb", 0)]), "{:?}", world.steps());
    assert_eq!(world.last.lists.len(), 3);
    assert_eq!(world.slices("nvidia.com/gpu-mps"), 4, "shares in an instance, under a daemon of its own");
    let status = &world.last.status.gpus[0];
    assert_eq!(status.mode, "Mig");
    assert_eq!(status.slices.iter().map(|slice| slice.start.unwrap()).collect::<BTreeSet<_>>(), [0, 2, 4].into());
    assert_eq!(status.mig.as_ref().unwrap().instances.len(), 3);
    let steps = world.steps();
    let serving = "serve 4 nvidia.com/gpu-mps, 1 nvidia.com/mig-1g.10gb, 1 nvidia.com/mig-3g.40gb";
    for done in [serving, "turn MIG mode on", "create MIG instance 3g.40gb at 4", "create MIG instance 1g.10gb at 0"] {
        assert!(steps.contains(&(done, "Done")), "{steps:?}");
    }
    let kept = world.places();
    world.want(vec![mig_spec(GPU, &[("3g.40gb", 4, 0), ("4g.40gb", 0, 0)])]);
    world.rest();
    assert!(world.applied() && world.is(&[("3g.40gb", 4), ("4g.40gb", 0)]));
    assert_eq!(world.places().keys().filter(|uuid| kept.contains_key(*uuid)).count(), 1, "what stays is not made anew");
    world.want(vec![]);
    world.rest();
    assert_eq!((world.slices(WHOLE), world.applied(), lock(&world.board).gpu.mig), (1, true, false));
    let reasons: Vec<&str> = world.notes.iter().map(|(reason, _)| *reason).collect();
    assert_eq!(reasons, ["MigChanged"; 3], "{:?}", world.notes);
}

#[test]
fn what_is_in_use_stays_where_it_is_and_hinders_nothing_beside_it() {
    let mut world = World::new("H100-80");
    world.want(vec![mig_spec(GPU, &[("3g.40gb", 4, 0), ("1g.10gb", 0, 0), ("1g.10gb", 1, 0)])]);
    world.rest();
    let used = world.places().into_iter().find(|(_, (_, start))| *start == 0).unwrap().0;
    while world.give(0).is_some_and(|id| !id.starts_with(&used)) {}
    world.held.retain(|row| row.ids[0].starts_with(&used));
    world.table.allocations = cleave_agent::allocation::usage::Allocations::default();
    world.want(vec![mig_spec(GPU, &[("2g.20gb", 0, 0), ("2g.20gb", 4, 0), ("1g.10gb", 3, 0)])]);
    world.list();
    world.turn();
    assert_eq!(world.slices("nvidia.com/mig-1g.10gb"), 1, "what stays is not told as Unhealthy");
    world.rest();
    assert!(world.is(&[("1g.10gb", 0), ("2g.20gb", 4), ("1g.10gb", 3)]));
    assert!(world.places().contains_key(&used) && !world.applied());
    assert!(world.messages().contains("in use by ns/p"), "{}", world.messages());
    assert_eq!(world.slices("nvidia.com/mig-1g.10gb"), 2, "the one in use is still served");
    world.held.clear();
    world.rest();
    assert!(world.applied() && world.is(&[("2g.20gb", 0), ("2g.20gb", 4), ("1g.10gb", 3)]), "{:?}", world.steps());
}

#[test]
fn a_process_that_no_pod_is_known_for_holds_its_instance_and_its_gpu() {
    let mut world = World::new("H100-80");
    world.want(vec![]);
    lock(&world.board).processes.insert(77, None);
    world.rest();
    world.want(vec![mig_spec(GPU, &[("1g.10gb", 0, 0)])]);
    world.rest();
    assert!(!lock(&world.board).gpu.mig && world.slices(WHOLE) == 1, "it stays what it is");
    assert!(world.messages().contains("pid 77"), "{}", world.messages());
    assert!(lock(&world.board).calls.is_empty());
    lock(&world.board).processes.clear();
    world.rest();
    assert!(world.applied());
    let instance = world.places().values().next().unwrap().0;
    // It comes when the slice is withdrawn already: seen right before the instance would go.
    world.want(vec![mig_spec(GPU, &[("2g.20gb", 0, 0)])]);
    world.turn();
    world.now += WITHDRAW;
    world.turn();
    assert_eq!(world.orders.len(), 1);
    lock(&world.board).processes.insert(78, Some(instance));
    world.act();
    world.rest();
    assert!(world.is(&[("1g.10gb", 0)]) && world.messages().contains("pid 78"), "{}", world.messages());
    lock(&world.board).processes.clear();
    world.rest();
    assert!(world.applied() && world.is(&[("2g.20gb", 0)]));
}

#[test]
fn a_creation_that_fails_leaves_nothing_is_tried_some_times_and_again_when_something_changes() {
    for (call, orphan) in [("gi", false), ("ci", false), ("ci", true)] {
        let mut world = World::new("H100-80");
        world.want(vec![mig_spec(GPU, &[("3g.40gb", 0, 0), ("1g.10gb", 4, 0)])]);
        lock(&world.board).fails = BTreeMap::from([(call, u32::MAX), ("gi-destroy", u32::from(orphan))]);
        world.rest();
        let tried = lock(&world.board).calls.iter().filter(|name| **name == call).count();
        assert_eq!(tried, 2 * usize::try_from(ATTEMPTS).unwrap(), "{call}: each of the two, and not for ever");
        assert!(world.is(&[]), "{call}: rolled back");
        let steps = world.steps();
        assert!(steps.contains(&("create MIG instance 3g.40gb at 0", "Failed")), "{steps:?}");
        assert!(world.messages().contains(&format!("the GPU is lost ({call}); tried 5 times, and not again until")));
        assert!(!world.applied());
        let failed = world.notes.iter().filter(|(reason, _)| *reason == "MigFailed").count();
        assert_eq!(failed, 4, "the first and the last of each: {:?}", world.notes);
        // The GPU is another: somebody made something.
        lock(&world.board).fails.clear();
        world.rest();
        assert!(world.is(&[]), "{call}: nothing has changed");
        let by_hand = lock(&world.board).create_gpu_instance("1g.10gb", 6).unwrap();
        lock(&world.board).create_compute_instance(by_hand).unwrap();
        world.rest();
        assert!(world.applied() && world.is(&[("3g.40gb", 0), ("1g.10gb", 4)]), "{call}: {:?}", world.steps());
        assert!(world.steps().iter().all(|(_, result)| *result == "Done"));
    }
}

#[test]
fn one_creation_that_fails_holds_no_other_up_and_a_new_spec_tries_it_again() {
    let mut world = World::new("H100-80");
    // There is one set of media engines.
    world.want(vec![mig_spec(GPU, &[("1g.10gb+me", 0, 0), ("1g.10gb+me", 1, 0), ("3g.40gb", 4, 0)])]);
    world.rest();
    assert!(world.is(&[("1g.10gb+me", 0), ("3g.40gb", 4)]), "{:?}", world.steps());
    assert_eq!(world.slices("nvidia.com/mig-3g.40gb"), 1);
    lock(&world.board).calls.clear();
    world.rest();
    assert!(lock(&world.board).calls.is_empty());
    world.want(vec![mig_spec(GPU, &[("1g.10gb", 0, 0), ("1g.10gb+me", 1, 0), ("3g.40gb", 4, 0)])]);
    world.rest();
    assert!(world.applied() && world.is(&[("1g.10gb", 0), ("1g.10gb+me", 1), ("3g.40gb", 4)]), "{:?}", world.steps());
}

#[test]
fn what_can_never_be_is_refused_and_touches_nothing() {
    let mut world = World::new("H100-80");
    world.want(vec![]);
    world.rest();
    for (bad, says) in [
        (&[("9g.90gb", 0, 0)][..], "no MIG profile 9g.90gb"),
        (&[("3g.40gb", 2, 0)][..], "cannot be at 2"),
        (&[("3g.40gb", 0, 0), ("1g.10gb", 3, 0)][..], "overlap"),
        (&[("1g.10gb", 3, 0), ("1g.10gb", 3, 0)][..], "overlap"),
        (&[("1g.10gb", 3, 49)][..], "49 MPS shares"),
    ] {
        world.want(vec![mig_spec(GPU, bad)]);
        world.rest();
        assert!(world.messages().contains(says), "{}", world.messages());
        assert_eq!((world.slices(WHOLE), world.steps().last().unwrap().1), (1, "Refused"));
    }
    assert!(lock(&world.board).calls.is_empty());
}

#[test]
fn a_mig_mode_that_needs_a_reset_is_told_and_waits_and_is_asked_for_once() {
    let mut world = World::new("A100-80");
    lock(&world.board).gpu.mig_needs_reset = true;
    world.want(vec![mig_spec(GPU, &[("1g.10gb", 0, 0)])]);
    world.rest();
    assert_eq!(lock(&world.board).calls, ["mode"]);
    assert!(world.messages().contains("next reset") && world.messages().contains("restart the node"));
    assert!(world.steps().contains(&("turn MIG mode on", "Waiting")), "{:?}", world.steps());
    assert_eq!(world.last.status.gpus[0].mig.as_ref().unwrap().pending, Some(true));
    // Not wanted any more, it is taken back, whoever uses the GPU: it serves as it is.
    world.want(vec![]);
    lock(&world.board).processes.insert(5, None);
    world.rest();
    lock(&world.board).processes.clear();
    assert!(world.applied() && world.slices(WHOLE) == 1, "{:?}", world.steps());
    assert!(!lock(&world.board).gpu.mig_pending);
    world.want(vec![mig_spec(GPU, &[("1g.10gb", 0, 0)])]);
    world.rest();
    lock(&world.board).gpu.reset();
    world.rest();
    assert!(world.applied() && world.is(&[("1g.10gb", 0)]), "{:?}", world.steps());
}

#[test]
fn where_mig_mode_is_a_persons_it_is_left_alone() {
    let mut world = World::new("H100-80");
    world.node = std::mem::replace(&mut world.node, Node::start(String::new(), GRACE, None, None, world.now).0)
        .keeping_mig_mode(true);
    world.want(vec![]);
    world.rest();
    world.want(vec![mig_spec(GPU, &[("1g.10gb", 0, 0)])]);
    world.rest();
    assert_eq!((world.slices(WHOLE), world.applied()), (1, false));
    assert!(world.messages().contains("--mig-mode never") && world.messages().contains("-mig 1"));
    assert!(lock(&world.board).calls.is_empty());
    (lock(&world.board).gpu.mig, lock(&world.board).gpu.mig_pending) = (true, true);
    world.rest();
    assert!(world.applied() && world.is(&[("1g.10gb", 0)]), "instances are made: {:?}", world.steps());
    world.want(vec![mps_spec(GPU, 4)]);
    world.rest();
    assert!(world.is(&[]) && lock(&world.board).gpu.mig && world.messages().contains("-mig 0"), "{}", world.messages());
    assert!(!lock(&world.board).calls.contains(&"mode"));
}

#[test]
fn instances_that_somebody_made_are_served_and_left_alone() {
    let mut world = World::new("H100-80");
    (lock(&world.board).gpu.mig, lock(&world.board).gpu.mig_pending) = (true, true);
    let made = lock(&world.board).create_gpu_instance("3g.40gb", 4).unwrap();
    lock(&world.board).create_gpu_instance("1g.10gb", 0).unwrap();
    lock(&world.board).create_compute_instance(made).unwrap();
    lock(&world.board).calls.clear();
    world.want(vec![]);
    world.rest();
    assert_eq!((world.slices("nvidia.com/mig-3g.40gb"), world.applied()), (1, true));
    assert!(lock(&world.board).calls.is_empty(), "not even the one without a compute instance");
    world.restart(true);
    world.rest();
    assert!(lock(&world.board).calls.is_empty());
}

#[test]
fn nothing_goes_while_the_kubelet_does_not_say_who_holds_what() {
    let mut world = World::new("H100-80");
    world.want(vec![mig_spec(GPU, &[("1g.10gb", 0, 0)])]);
    world.rest();
    let before = world.places();
    world.want(vec![mig_spec(GPU, &[("2g.20gb", 0, 0)])]);
    world.node.held(Err("no".into()), world.now, &mut world.table.allocations);
    for _ in 0..10 {
        world.turn();
        assert!(world.orders.is_empty());
        world.now += WITHDRAW;
    }
    assert_eq!(world.places(), before);
    // Without a checkpoint, what was given out is known only when the kubelet has said it for some
    // time.
    world.restart(false);
    for _ in 0..10 {
        world.turn();
        assert!(world.orders.is_empty(), "{:?}", world.orders);
        world.now += WITHDRAW;
    }
    world.now += GRACE;
    world.rest();
    assert!(world.applied() && world.is(&[("2g.20gb", 0)]));
}

#[test]
fn a_slice_in_use_stays_though_the_agent_that_gave_it_out_has_left_nothing() {
    let mut world = World::new("H100-80");
    world.want(vec![mig_spec(GPU, &[("1g.10gb", 0, 0)])]);
    world.rest();
    world.give(0);
    let before = world.places();
    world.want(vec![mig_spec(GPU, &[("2g.20gb", 0, 0)])]);
    world.restart(false);
    world.now += GRACE;
    world.rest();
    assert_eq!(world.places(), before);
    assert!(world.messages().contains("in use by ns/p1"), "{}", world.messages());
    world.held.clear();
    world.rest();
    assert!(world.applied() && world.is(&[("2g.20gb", 0)]));
}

#[test]
fn an_instance_goes_after_its_daemon() {
    let mut world = World::new("H100-80");
    world.want(vec![mig_spec(GPU, &[("2g.20gb", 0, 4)])]);
    world.rest();
    world.want(vec![mig_spec(GPU, &[])]);
    world.turn();
    assert!(world.orders.is_empty(), "the kubelet hears first");
    world.now += WITHDRAW;
    for (says, host) in [("has not ended yet", None), ("has not ended yet", Some(World::host_reads as fn(&mut World)))]
    {
        host.into_iter().for_each(|does| does(&mut world));
        world.turn();
        assert!(world.orders.is_empty() && world.messages().contains(says), "{}", world.messages());
    }
    world.host_acts();
    world.turn();
    assert!(matches!(world.orders[0].change, Change::Destroy(_)));
    world.act();
    world.rest();
    assert!(world.applied() && world.is(&[]));
}

#[test]
fn an_instance_stays_while_an_mps_host_that_starts_may_start_its_daemon() {
    let mut world = World::new("H100-80");
    world.want(vec![mig_spec(GPU, &[("2g.20gb", 0, 4)])]);
    world.rest();
    world.host = Desired::default();
    world.host_says(String::new());
    world.want(vec![mig_spec(GPU, &[])]);
    world.turn();
    world.now += WITHDRAW;
    world.turn();
    assert!(world.orders.is_empty() && world.messages().contains("has not read yet"), "{}", world.messages());
    world.host_acts();
    world.turn();
    assert_eq!(world.orders.len(), 1);
}

#[test]
fn an_answer_of_before_a_change_does_not_undo_what_is_known_of_it() {
    let mut world = World::new("H100-80");
    world.want(vec![mig_spec(GPU, &[("1g.10gb", 0, 0)])]);
    world.rest();
    let (asked, late) = (world.now, world.board.inventory());
    world.want(vec![mig_spec(GPU, &[("2g.20gb", 0, 0)])]);
    world.now += GRACE;
    world.rest();
    answer(&mut world.node, late, asked);
    world.turn();
    assert!(world.applied() && world.orders.is_empty() && world.slices("nvidia.com/mig-2g.20gb") == 1);
}

#[test]
fn a_change_that_hangs_is_told_and_the_gpu_is_left_alone_until_it_ends() {
    let mut world = World::new("H100-80");
    world.want(vec![mig_spec(GPU, &[("1g.10gb", 0, 0), ("1g.10gb", 1, 0)])]);
    while !matches!(world.orders.first(), Some(Order { change: Change::Create { .. }, .. })) {
        world.act();
        world.host_acts();
        world.list();
        world.now += GRACE;
        world.turn();
    }
    let order = world.orders.pop().unwrap();
    let slow = Outcome::Slow(Duration::from_secs(15));
    world.node.ended(Ended { order: order.clone(), outcome: slow, after: None, at: world.now }, world.now);
    for _ in 0..10 {
        world.look();
        world.turn();
        assert!(world.orders.is_empty());
        world.now += GRACE;
    }
    assert!(world.messages().contains("has not answered for 15 s"), "{}", world.messages());
    // An agent that starts meanwhile finds what the call has left.
    world.orders = vec![order];
    world.act();
    world.rest();
    assert!(world.applied() && world.is(&[("1g.10gb", 0), ("1g.10gb", 1)]), "{:?}", world.steps());
    assert!(world.steps().iter().all(|(_, result)| *result == "Done"), "{:?}", world.steps());
}

#[test]
fn a_device_that_is_being_taken_away_is_not_given_out_though_it_is_wanted_again() {
    let mut world = World::new("H100-80");
    world.want(vec![]);
    world.rest();
    world.want(vec![mig_spec(GPU, &[("1g.10gb", 0, 0)])]);
    world.turn();
    world.now += WITHDRAW;
    world.turn();
    assert_eq!(world.orders.len(), 1);
    world.want(vec![]);
    world.turn();
    assert!(world.give(0).is_none() && !world.applied());
    world.act();
    world.rest();
    assert!(world.applied() && world.slices(WHOLE) == 1);
}

/// Everything that a cut takes, and the agent killed after so many of the things that happen in it.
#[test]
fn an_agent_that_is_killed_at_any_step_is_followed_by_one_that_goes_on() {
    for checkpoint in [true, false] {
        for half in [false, true] {
            for killed_after in 0..40 {
                let mut world = World::new("H100-80");
                world.want(vec![mig_spec(GPU, &[("3g.40gb", 4, 0), ("1g.10gb", 0, 0), ("1g.10gb", 1, 4)])]);
                world.settle();
                world.give(usize::MAX);
                let used = world.held[0].ids[0].clone();
                let kept: Vec<_> =
                    world.places().into_iter().filter(|(uuid, _)| used.starts_with(uuid.as_str())).collect();
                let start = kept[0].1.1;
                let wanted = match start {
                    4 => vec![("3g.40gb", 4, 0), ("2g.20gb", 0, 4), ("1g.10gb", 2, 0)],
                    0 => vec![("1g.10gb", 0, 0), ("1g.10gb", 2, 0), ("2g.20gb", 4, 4)],
                    _ => vec![("1g.10gb", 1, 4), ("1g.10gb", 2, 0), ("2g.20gb", 4, 4)],
                };
                world.want(vec![mig_spec(GPU, &wanted)]);
                for step in 0..killed_after {
                    match step % 4 {
                        0 => world.turn(),
                        1 => world.host_acts(),
                        2 => world.act(),
                        _ => world.now += WITHDRAW,
                    }
                }
                if half && let Some(Order { change, .. }) = world.orders.pop() {
                    let mut board = lock(&world.board);
                    match change {
                        Change::Create { profile, start } => drop(board.create_gpu_instance(&profile, start)),
                        Change::Destroy(instance) => board.destroy_compute_instance(instance.gpu_instance).unwrap(),
                        Change::Mode(_) => {}
                    }
                }
                world.orders.clear();
                world.restart(checkpoint);
                world.now += GRACE;
                world.settle();
                let about = format!("after {killed_after}, half {half}, checkpoint {checkpoint}: {:?}", world.steps());
                assert!(world.applied(), "{about}");
                assert!(world.is(&wanted.iter().map(|&(name, start, _)| (name, start)).collect::<Vec<_>>()), "{about}");
                assert_eq!(world.places()[&kept[0].0], kept[0].1, "{about}");
            }
        }
    }
}

/// What can happen.
#[derive(Debug, Clone)]
enum Happens {
    Want(Vec<usize>),
    WantWhole,
    WantShares,
    Give(usize),
    End(usize),
    Process(usize),
    Processes,
    Fail(&'static str, u32),
    Kill { checkpoint: bool, half: bool },
    ByHand(usize),
    Reconcile,
    Act,
    Host,
    HostReads,
    List,
    Look,
    Time(u64),
}

/// Some of the places of an H100; a spec is of those that fit together.
const PLACES: [(&str, u32, u32, u32); 12] = [
    ("1g.10gb", 0, 1, 0),
    ("1g.10gb", 1, 1, 4),
    ("1g.10gb", 2, 1, 0),
    ("1g.10gb", 3, 1, 2),
    ("1g.10gb", 6, 1, 0),
    ("2g.20gb", 0, 2, 0),
    ("2g.20gb", 4, 2, 4),
    ("1g.20gb", 6, 2, 0),
    ("3g.40gb", 0, 4, 0),
    ("3g.40gb", 4, 4, 2),
    ("4g.40gb", 0, 4, 0),
    ("7g.80gb", 0, 8, 0),
];

fn fitting(picks: &[usize]) -> Vec<(&'static str, u32, u32)> {
    let mut taken: Vec<(&str, u32, u32, u32)> = Vec::new();
    for place in picks.iter().map(|pick| PLACES[pick % PLACES.len()]) {
        if taken.iter().all(|other| place.1 >= other.1 + other.2 || other.1 >= place.1 + place.2) {
            taken.push(place);
        }
    }
    taken.into_iter().map(|(profile, start, _, units)| (profile, start, units)).collect()
}

fn happens() -> impl Strategy<Value = Happens> {
    let call = prop::sample::select(vec!["gi", "ci", "ci-destroy", "gi-destroy", "mode"]);
    prop_oneof![
        3 => prop::collection::vec(0..PLACES.len(), 0..5).prop_map(Happens::Want),
        1 => Just(Happens::WantWhole),
        1 => Just(Happens::WantShares),
        3 => any::<usize>().prop_map(Happens::Give),
        2 => any::<usize>().prop_map(Happens::End),
        1 => any::<usize>().prop_map(Happens::Process),
        1 => Just(Happens::Processes),
        1 => (call, 1_u32..8).prop_map(|(call, times)| Happens::Fail(call, times)),
        1 => any::<(bool, bool)>().prop_map(|(checkpoint, half)| Happens::Kill { checkpoint, half }),
        1 => any::<usize>().prop_map(Happens::ByHand),
        8 => Just(Happens::Reconcile),
        6 => Just(Happens::Act),
        3 => Just(Happens::Host),
        2 => Just(Happens::HostReads),
        3 => Just(Happens::List),
        3 => Just(Happens::Look),
        4 => (1_u64..40_000).prop_map(Happens::Time),
    ]
}

impl World {
    fn happens(&mut self, what: &Happens) {
        match what {
            Happens::Want(picks) => self.want(vec![mig_spec(GPU, &fitting(picks))]),
            Happens::WantWhole => self.want(vec![]),
            Happens::WantShares => self.want(vec![mps_spec(GPU, 4)]),
            Happens::Give(pick) => drop(self.give(*pick)),
            Happens::End(pick) => {
                if let Some(at) = pick.checked_rem(self.held.len()) {
                    self.held.remove(at);
                }
            }
            Happens::Process(pick) => {
                let places: Vec<u32> = self.places().values().map(|(instance, _)| *instance).collect();
                let mut board = lock(&self.board);
                let pid = 1000 + u32::try_from(board.processes.len()).unwrap();
                match pick.checked_rem(places.len()) {
                    Some(at) => board.processes.insert(pid, Some(places[at])),
                    None if board.gpu.mig => None,
                    None => board.processes.insert(pid, None),
                };
            }
            Happens::Processes => lock(&self.board).processes.clear(),
            Happens::Fail(call, times) => drop(lock(&self.board).fails.insert(call, *times)),
            Happens::Kill { checkpoint, half } => {
                if let (true, Some(Order { change, .. })) = (*half, self.orders.pop()) {
                    let mut board = lock(&self.board);
                    match change {
                        Change::Create { profile, start } => drop(board.create_gpu_instance(&profile, start)),
                        Change::Destroy(instance) => drop(board.destroy_compute_instance(instance.gpu_instance)),
                        Change::Mode(_) => {}
                    }
                }
                self.orders.clear();
                // What is given out is in the checkpoint a moment later, and in the kubelet's list.
                self.last.checkpoint.allocations =
                    self.table.allocations.iter().map(|(_, allocation)| allocation.clone()).collect();
                self.restart(*checkpoint);
            }
            Happens::ByHand(pick) => {
                let (profile, start, _, _) = PLACES[pick % PLACES.len()];
                let mut board = lock(&self.board);
                if let (true, Ok(made)) = (board.gpu.mig, board.create_gpu_instance(profile, start)) {
                    let _ = board.create_compute_instance(made);
                }
            }
            Happens::Reconcile => self.turn(),
            Happens::Act => self.act(),
            Happens::Host => self.host_acts(),
            Happens::HostReads => self.host_reads(),
            Happens::List => self.list(),
            Happens::Look => self.look(),
            Happens::Time(ms) => self.now += Duration::from_millis(*ms),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// Whatever happens, in whatever order: what is in use is never taken (each change is checked
    /// as it is made), and when it ends, what is wanted comes to be. A second look changes nothing.
    #[test]
    fn whatever_happens_what_is_in_use_stays_and_what_is_wanted_comes(events in prop::collection::vec(happens(), 1..120), last in prop::collection::vec(0..PLACES.len(), 0..5)) {
        let mut world = World::new("H100-80");
        world.want(vec![]);
        for event in &events {
            world.happens(event);
        }
        let wanted = fitting(&last);
        world.want(vec![mig_spec(GPU, &wanted)]);
        lock(&world.board).fails.clear();
        lock(&world.board).processes.clear();
        // Pods that run on hold what they have.
        world.rest();
        world.held.clear();
        world.now += GRACE;
        world.settle();
        prop_assert!(world.is(&wanted.iter().map(|&(name, start, _)| (name, start)).collect::<Vec<_>>()), "{:?} {:?}", world.steps(), lock(&world.board).instances());
        prop_assert!(world.applied(), "{:?}", world.steps());
        lock(&world.board).calls.clear();
        (0..10).for_each(|_| world.go_on());
        prop_assert!(lock(&world.board).calls.is_empty());
        world.want(vec![]);
        world.settle();
        prop_assert!(world.applied() && world.slices(WHOLE) == 1, "{:?}", world.steps());
    }
}
