//! The node as the agent knows it, and what follows from it: one value that inputs change, and one function that says what to do. Pure:
//! the time is an argument, and nothing is read or written.
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleave_api::GpuNodeSpec;
use cleave_api::gpunode::{FindingStatus, GpuNodeStatus, Partition, StepStatus};
use cleave_api::names::{STEP_DONE, STEP_WAITING, finding};
use cleave_gpu::mps::wire::{self, DaemonState, Desired};
use cleave_gpu::nvml::{Gpu, Inventory, NvmlError, Process, Vitals};
use cleave_kubelet::{AllocatedDevices, Device, DeviceId, DeviceList, HeldDevices, ResourceName};
use k8s_openapi::jiff::Timestamp;

use crate::absence::Absences;
use crate::allocate::{Allocation, MpsLimits, allocation_id};
use crate::checkpoint::Checkpoint;
use crate::cordon;
use crate::diff::{Decision, Rules, decide, keeps};
use crate::expected::Expected;
use crate::faults::{self, Faults};
use crate::hardware::{Book, Hardware, KnownGpu};
use crate::health::{Clock, Told as ToldHealth};
use crate::layout::{Kind, Layout, Pool};
use crate::mig::{Change, Next, Outcome, Trial, next};
use crate::mps;
use crate::serve::Table;
use crate::status::{self, Facts};
use crate::tenants::scene::{self, Scene};
use crate::usage::{Allocations, Collected, Usage};
use crate::xid::Class;

/// Between the kubelet's lists while slices are in use or a change waits for pods to end (which somebody may wait for), and while none are.
const LIST_IN_USE: Duration = Duration::from_secs(1);
const LIST_IDLE: Duration = Duration::from_secs(30);

/// How long slices are told as Unhealthy before they go: the kubelet may be handing one out just now, and a pod that comes with a slice that
/// is no more would fail for good.
pub const WITHDRAW: Duration = Duration::from_millis(300);

/// Between looks at processes that are in the way.
const LOOK: Duration = Duration::from_secs(1);

/// Desired files whose hash is remembered: more than the MPS host can be behind.
const REMEMBERED: usize = 64;

/// The node's `GpuNode`, as the API server has it.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Object {
    /// Not heard of yet.
    #[default]
    Unknown,
    /// There is none: the operator makes it.
    Missing,
    /// It is not what the definition says.
    Malformed(String),
    /// Its spec, and the generation of that.
    Present(i64, GpuNodeSpec),
}

/// Something that happened, for an `Event`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Occurrence {
    /// A warning, or good news.
    pub warning: bool,
    /// One word.
    pub reason: &'static str,
    /// A sentence.
    pub note: String,
    /// The pod that it is about; it is told on that pod too.
    pub regarding: Option<PodRef>,
    /// A pod that it comes from, where it is told on the node alone: what comes from two is told twice.
    pub related: Option<PodRef>,
}

/// A pod that something is told of.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodRef {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID; empty where it is not known.
    pub uid: String,
}

/// What to do.
#[derive(Debug)]
pub struct Turn {
    /// Devices by resource.
    pub lists: BTreeMap<ResourceName, DeviceList>,
    /// Resources whose lists the kubelet is to be sent again though they are equal, so that it writes its checkpoint.
    pub renew: BTreeSet<String>,
    /// What the MPS host shall run.
    pub desired: Desired,
    /// What the next agent has to know.
    pub checkpoint: Checkpoint,
    /// What the API server is told, its times left out.
    pub status: GpuNodeStatus,
    /// What has happened since the last turn.
    pub occurrences: Vec<Occurrence>,
    /// Fatal GPU errors since the last turn, by device.
    pub faults: BTreeMap<String, u64>,
    /// Why the agent is not ready, if so.
    pub unready: Option<String>,
    /// How often the kubelet is to be asked who holds what.
    pub list_every: Duration,
    /// Folders of allocations that are not wanted may go.
    pub sweep: bool,
    /// Changes of GPUs that are to be made now, each in its own time; how each ended is to be told to [`Node::ended`].
    pub orders: Vec<Order>,
    /// NVML is to be asked now.
    pub look: bool,
    /// What tenants are judged by.
    pub scene: Scene,
    /// Turn again after this long, at the latest.
    pub again: Option<Duration>,
}

/// A change that is to be made now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// The GPU.
    pub gpu: String,
    /// What.
    pub change: Change,
}

/// How an order ended, or that it has not yet.
#[derive(Debug)]
pub struct Ended {
    /// What was to be done.
    pub order: Order,
    /// How it ended.
    pub outcome: Outcome,
    /// The GPU afterwards, and the processes on it, where NVML says so.
    pub after: Option<(Gpu, Vec<Process>)>,
    /// When NVML had said that.
    pub at: Instant,
}

/// The node as the agent knows it.
#[derive(Debug)]
pub struct Node {
    boot_id: String,
    /// How long what the kubelet does not list is kept.
    grace: Duration,
    book: Book,
    inventoried: bool,
    object: Object,
    /// The last spec that was sound, which outlives the API server and the object.
    spec: Option<(i64, GpuNodeSpec)>,
    held: Option<Vec<HeldDevices>>,
    held_error: Option<String>,
    /// What a kubelet that started now would take for allocated, if that is known.
    on_disk: Option<Arc<AllocatedDevices>>,
    /// Resources of allocations that are over but for that.
    remembered: BTreeSet<String>,
    kubelet_since: Instant,
    view: mps::View,
    layouts: BTreeMap<String, Layout>,
    /// Daemons of an agent whose checkpoint is lost, until it is known that nobody uses them.
    adopted: BTreeMap<String, wire::Daemon>,
    adopted_allocations: BTreeMap<String, wire::Allocation>,
    steps: Vec<StepStatus>,
    /// Slices that are about to go, by resource and id, and since when the kubelet is told.
    withdrawing: BTreeMap<(String, String), Instant>,
    /// MIG mode is left alone.
    keep_mig_mode: bool,
    /// GPUs that a spec has cut by MIG.
    cut: BTreeSet<String>,
    /// What came of changes of GPUs.
    trials: BTreeMap<String, Trial>,
    /// When GPUs were last looked at after a change: an inventory that was asked for before knows less.
    changed: BTreeMap<String, Instant>,
    /// Every allocation of before is known: the checkpoint was found.
    remembers: bool,
    /// Events of changes, until the next turn.
    news: Vec<Occurrence>,
    looked: Option<Instant>,
    doors: Acknowledged,
    /// Daemons that are away for a moment.
    absences: Absences,
    /// What was told of daemons, by device.
    told: BTreeMap<String, Told>,
    /// And of their faults.
    faults: Faults,
    /// What was told of GPUs' health.
    told_health: ToldHealth,
    /// Tenants that left their shares.
    findings: Vec<FindingStatus>,
}

/// What was told of a daemon.
#[derive(Debug, Clone, Copy, Default)]
enum Told {
    /// Nothing: it starts, or this process does.
    #[default]
    New,
    /// That it serves, with so many restarts behind it.
    Serving(u32),
    /// That it does not.
    Troubled,
}

/// Which desired files the MPS host has acted upon.
#[derive(Debug, Default)]
struct Acknowledged {
    last: Desired,
    sequence: u64,
    hashes: VecDeque<(u64, String)>,
    changed: BTreeMap<String, u64>,
    removed: BTreeMap<String, u64>,
    acted: u64,
}

impl Acknowledged {
    /// Takes in what shall run now.
    fn wants(&mut self, desired: &Desired) {
        if *desired != self.last || self.sequence == 0 {
            self.sequence += 1;
            for (device, daemon) in &desired.daemons {
                if self.last.daemons.get(device) != Some(daemon) {
                    self.changed.insert(device.clone(), self.sequence);
                }
            }
            self.changed.retain(|device, _| desired.daemons.contains_key(device));
            let gone = self.last.daemons.keys().filter(|device| !desired.daemons.contains_key(*device));
            self.removed.extend(gone.map(|device| (device.clone(), self.sequence)));
            self.removed.retain(|device, sequence| *sequence > self.acted && !desired.daemons.contains_key(device));
            self.hashes.push_back((self.sequence, desired.hash()));
            if self.hashes.len() > REMEMBERED {
                self.hashes.pop_front();
            }
            self.last = desired.clone();
        }
    }

    /// Takes in what the MPS host says it acted upon.
    fn acted(&mut self, hash: &str) {
        if let Some((sequence, _)) = self.hashes.iter().rev().find(|(_, known)| known == hash) {
            self.acted = self.acted.max(*sequence);
        }
    }

    /// Whether the MPS host knows that the daemon shall not run.
    fn knows_gone(&self, device: &str) -> bool {
        self.removed.get(device).is_none_or(|sequence| self.acted >= *sequence)
    }

    /// Whether the daemon runs as it shall, and not as it should have before.
    fn knows(&self, device: &str) -> bool {
        self.changed.get(device).is_none_or(|sequence| self.acted >= *sequence)
    }
}

impl Node {
    /// As a checkpoint left it; without one, as the last desired file of the MPS host lets it be known.
    pub fn start(
        boot_id: String,
        grace: Duration,
        checkpoint: Option<Checkpoint>,
        last_desired: Option<Desired>,
        now: Instant,
    ) -> (Self, Allocations) {
        let found = checkpoint.is_some();
        let Checkpoint { boot_id: written_in, generation, spec, gpus, layouts, allocations, cut, health } =
            checkpoint.unwrap_or_default();
        let adopted = if found { Desired::default() } else { last_desired.unwrap_or_default() };
        let clock = Clock::new(now, Timestamp::UNIX_EPOCH);
        let mut book = Book::remembering(gpus, written_in == boot_id, clock).recalling(health, now);
        for gpu in spec.iter().flat_map(|spec| &spec.gpus) {
            gpu.cleared.iter().for_each(|until| book.cleared(&gpu.uuid, until));
        }
        let node = Self {
            told_health: ToldHealth::before(&book.hardware()),
            book,
            remembers: found,
            boot_id,
            grace,
            inventoried: false,
            object: Object::Unknown,
            spec: spec.map(|spec| (generation, spec)),
            held: None,
            held_error: None,
            on_disk: None,
            remembered: BTreeSet::new(),
            kubelet_since: now,
            view: mps::View::default(),
            layouts,
            adopted: adopted.daemons,
            adopted_allocations: adopted.allocations,
            steps: Vec::new(),
            withdrawing: BTreeMap::new(),
            keep_mig_mode: false,
            cut,
            trials: BTreeMap::new(),
            changed: BTreeMap::new(),
            news: Vec::new(),
            looked: None,
            doors: Acknowledged::default(),
            absences: Absences::default(),
            told: BTreeMap::new(),
            faults: Faults::default(),
            findings: Vec::new(),
        };
        (node, Allocations::remembering(allocations, now))
    }

    /// Leaves MIG mode of every GPU alone.
    #[must_use]
    pub fn keeping_mig_mode(self, keep_mig_mode: bool) -> Self {
        Self { keep_mig_mode, ..self }
    }

    /// How long a suspect GPU must show nothing further before it can be healthy again; [`crate::health::QUIET`] unless this is said.
    pub fn quiet_for(&mut self, quiet: Duration) {
        self.book.quiet_for(quiet);
    }

    /// It is `wall` at `now`: for times that are told. To be told again and again, because the time of day may be set.
    pub fn tell_time(&mut self, now: Instant, wall: Timestamp) {
        self.book.tell_time(now, wall);
    }

    /// NVML answered what it was asked at `asked`.
    pub fn inventory(&mut self, mut answer: Result<Inventory, NvmlError>, asked: Instant) {
        self.inventoried = true;
        for gpu in answer.iter_mut().flat_map(|inventory| inventory.gpus.values_mut()).flatten() {
            if self.changed.get(&gpu.uuid).is_some_and(|at| asked < *at)
                && let Some(known) = self.book.known(&gpu.uuid)
            {
                gpu.clone_from(known);
            }
        }
        self.book.observe(answer, asked);
    }

    /// An order ended, or takes long.
    pub fn ended(&mut self, ended: Ended, now: Instant) {
        let Ended { order: Order { gpu: uuid, change }, outcome, after, at } = ended;
        if let Some((gpu, processes)) = after {
            self.book.see(gpu, processes);
            self.changed.insert(uuid.clone(), at);
        }
        let hardware = self.book.hardware();
        let after = hardware.gpus.get(&uuid).map(|known| (&known.gpu, known.health.healthy));
        let after = after.filter(|_| self.changed.get(&uuid) == Some(&at));
        let trial = self.trials.entry(uuid.clone()).or_insert_with(|| Trial::new(None));
        self.news.extend(trial.ended(&uuid, &change, &outcome, after, now).map(|note| warning("MigFailed", note)));
    }

    /// An XID; `ignored` are those that say nothing of the GPU. Says what it says of it.
    pub fn xid(&mut self, uuid: &str, xid: u64, gpu_instance: Option<u32>, ignored: &[u64], now: Instant) -> Class {
        self.book.xid(uuid, xid, gpu_instance, ignored, now)
    }

    /// What the driver says of GPUs' memory and needs, asked at `asked`.
    pub fn vitals(&mut self, vitals: BTreeMap<String, Vitals>, asked: Instant) {
        self.book.vitals(vitals, asked);
    }

    /// The tenant watch's word on who left its share.
    pub fn findings(&mut self, findings: Vec<FindingStatus>) {
        let same = |a: &FindingStatus, b: &FindingStatus| {
            (&a.kind, &a.device, &a.uid, &a.container) == (&b.kind, &b.device, &b.uid, &b.container)
        };
        for new in findings.iter().filter(|new| !self.findings.iter().any(|old| same(old, new))) {
            let reason = match new.kind.as_str() {
                finding::MEMORY_EXCEEDED => finding::MEMORY_EXCEEDED,
                finding::OUTSIDE_MPS => finding::OUTSIDE_MPS,
                _ => finding::NO_SHARE,
            };
            self.news.push(warning(reason, new.message.clone()));
        }
        self.findings = findings;
    }

    /// The API server's word on the `GpuNode`.
    pub fn object(&mut self, object: Object) {
        match &object {
            // Not planned yet: the operator has not seen what GPUs there are. What is served stays, and nothing is served whole for a moment.
            Object::Present(_, spec) if spec.plan_id.is_empty() && spec.gpus.is_empty() => {}
            Object::Present(generation, spec) => {
                for gpu in &spec.gpus {
                    gpu.cleared.iter().for_each(|until| self.book.cleared(&gpu.uuid, until));
                }
                self.spec = Some((*generation, spec.clone()));
            }
            Object::Unknown | Object::Missing | Object::Malformed(_) => {}
        }
        self.object = object;
    }

    /// The MPS host was looked at.
    pub fn mps(&mut self, view: mps::View) {
        self.view = view;
    }

    /// The kubelet started.
    pub fn kubelet_started(&mut self, now: Instant) {
        self.kubelet_since = now;
    }

    /// The kubelet's checkpoint, read after the list that [`held`](Self::held) is told next.
    pub fn on_disk(&mut self, devices: Option<Arc<AllocatedDevices>>) {
        self.on_disk = devices;
    }

    /// The kubelet's list, asked at `asked`; returns how many allocations were over.
    pub fn held(
        &mut self,
        answer: Result<Vec<HeldDevices>, String>,
        asked: Instant,
        allocations: &mut Allocations,
    ) -> usize {
        let rows = match answer {
            Ok(rows) => rows,
            Err(error) => {
                self.held_error = Some(error);
                return 0;
            }
        };
        self.held_error = None;
        let on_disk = self.on_disk.clone();
        let stays = |row: &HeldDevices| {
            let slice = |id: &String| (row.resource.clone(), id.clone());
            on_disk.as_ref().is_none_or(|devices| row.ids.iter().any(|id| devices.contains(&slice(id))))
        };
        // A kubelet that has just started hears of its pods one by one; so it was, for all that a process that has just started knows. It
        // drops nothing from its checkpoint before it has heard of all.
        let settling = asked.saturating_duration_since(self.kubelet_since) < self.grace;
        let clients = self.view.status.daemons.values().flat_map(|daemon| &daemon.clients);
        let busy: BTreeSet<&str> = clients.filter_map(|client| client.allocation.as_deref()).collect();
        let over = if settling && on_disk.is_none() {
            allocations.mark(&rows);
            0
        } else {
            let on_disk = on_disk.clone().unwrap_or_default();
            let busy = |id: &str| busy.contains(id);
            let Collected { over, remembered } = allocations.collect(&rows, asked, self.grace, busy, &on_disk);
            self.remembered = remembered;
            over.len()
        };
        let rows = match self.held.take() {
            Some(before) if settling => {
                let mut all: BTreeSet<HeldDevices> = before.into_iter().filter(stays).collect();
                all.extend(rows);
                all.into_iter().collect()
            }
            _ => rows,
        };
        for row in &rows {
            self.adopt(row, allocations, asked);
        }
        self.held = Some(rows);
        over
    }

    /// An allocation of an agent whose checkpoint is lost: the kubelet knows its ids, the MPS host its limits.
    fn adopt(&mut self, row: &HeldDevices, allocations: &mut Allocations, now: Instant) {
        let id = allocation_id(&row.resource, &row.ids);
        let Some(wire::Allocation { device, threads, memory_mib, max_clients }) = self.adopted_allocations.remove(&id)
        else {
            return;
        };
        if allocations.get(&id).is_none() {
            let mut ids = row.ids.clone();
            ids.sort_unstable();
            let limits = MpsLimits { threads, memory_mib, max_clients };
            let resource = row.resource.clone();
            allocations.give(Allocation { resource, ids, devices: vec![device], mps: Some(limits) }, now);
        }
    }

    /// What follows from all that. Brings the table up to date.
    pub fn turn(&mut self, table: &mut Table, now: Instant) -> Turn {
        let hardware = self.book.hardware();
        let in_use = self.in_use(&table.allocations);
        let usage = in_use.as_ref().filter(|_| self.held.is_some());
        let spec = self.spec.as_ref().map(|(_, spec)| spec);
        let partitions: BTreeMap<&str, &Partition> =
            spec.iter().flat_map(|spec| &spec.gpus).map(|gpu| (gpu.uuid.as_str(), &gpu.partition)).collect();
        self.cut = cut(&hardware, &partitions, &self.cut, |uuid| self.trials.get(uuid).is_some_and(Trial::is_acting));
        let processes = foreign(&hardware, &self.view);
        let rules = Rules { keep_mig_mode: self.keep_mig_mode, cut: self.cut.clone(), processes };
        let decided = decide(&hardware, spec, &self.layouts, usage, &rules);
        let partitions: BTreeMap<String, Partition> =
            partitions.into_iter().map(|(uuid, partition)| (uuid.to_owned(), partition.clone())).collect();
        let Decision { layouts, mut steps, applied, changes, foreign } = self.withdraw(self.spare(decided), now);
        let served_otherwise = self.lay(layouts);
        self.let_go(usage);

        table.pools.clear();
        for pool in self.layouts.values().flat_map(|layout| &layout.pools) {
            table.pools.entry(pool.resource.clone()).or_default().push(pool.clone());
        }

        let desired = self.desired(&table.allocations);
        self.see_daemons(&desired, now);
        let orders = self.orders(&hardware, &partitions, changes, now);
        steps.extend(self.trials.values().flat_map(Trial::steps).cloned());
        self.remember(steps, served_otherwise);
        let lists = self.lists(&hardware, &table.expected, in_use.as_ref());
        let mut occurrences = self.occurrences(&hardware);
        let pods = faults::Pods {
            held: self.held.as_deref().unwrap_or_default(),
            allocations: &table.allocations,
            expected: &table.expected,
        };
        let faults = self.faults.look(&self.view, &pods, now);
        occurrences.extend(faults.occurrences);
        let status = status::build(&Facts {
            hardware: &hardware,
            inventoried: self.inventoried,
            object: &self.object,
            spec: self.spec.as_ref(),
            applied,
            layouts: &self.layouts,
            lists: &lists,
            usage: in_use.as_ref(),
            held: self.held.as_deref().unwrap_or_default(),
            held_error: self.held_error.as_deref(),
            allocations: &table.allocations,
            view: &self.view,
            absences: &self.absences,
            steps: &self.steps,
            findings: &self.findings,
            boot_id: &self.boot_id,
        });
        let scene = Scene::of(&scene::Facts {
            hardware: &hardware,
            layouts: &self.layouts,
            spec: self.spec.as_ref().map(|(_, spec)| spec),
            view: &self.view,
            held: self.held.as_deref().filter(|_| self.held_error.is_none()),
            allocations: &table.allocations,
            foreign: &rules.processes,
        });
        let checkpoint = Checkpoint {
            boot_id: self.boot_id.clone(),
            generation: self.spec.as_ref().map_or(0, |(generation, _)| *generation),
            spec: self.spec.as_ref().map(|(_, spec)| spec.clone()),
            gpus: hardware.by_index().into_iter().map(|known| known.gpu.clone()).collect(),
            layouts: self.layouts.clone(),
            allocations: table.allocations.iter().map(|(_, allocation)| allocation.clone()).collect(),
            cut: self.cut.clone(),
            health: self.book.records(),
        };
        let unready = self.unready(&desired);
        let waits = self.steps.iter().any(|step| step.result == STEP_WAITING);
        let idle = !waits && usage.is_some_and(Usage::is_empty);
        let list_every = if idle { LIST_IDLE } else { LIST_IN_USE };
        let look = foreign && self.looked.is_none_or(|at| now.saturating_duration_since(at) >= LOOK);
        if look {
            self.looked = Some(now);
        }
        let withdrawn = (!self.withdrawing.is_empty()).then_some(WITHDRAW);
        let tried = self.trials.values().filter_map(|trial| trial.pause(now)).min();
        let absent = self.absences.again(now);
        let again = [withdrawn, foreign.then_some(LOOK), tried, faults.again, absent].into_iter().flatten().min();
        let sweep = self.held.is_some() && self.adopted_allocations.is_empty();
        let faults = faults.faults;
        Turn {
            lists,
            renew: std::mem::take(&mut self.remembered),
            desired,
            checkpoint,
            status,
            occurrences,
            faults,
            unready,
            list_every,
            sweep,
            orders,
            look,
            scene,
            again,
        }
    }

    /// Serves GPUs as these layouts; whether that is another way than before.
    fn lay(&mut self, layouts: BTreeMap<String, Layout>) -> bool {
        let otherwise = layouts != self.layouts;
        if otherwise {
            self.absences.relaid(&self.layouts, &layouts);
        }
        self.layouts = layouts;
        otherwise
    }

    /// Which daemons are as they shall be now, and which are away.
    fn see_daemons(&mut self, desired: &Desired, now: Instant) {
        self.doors.wants(desired);
        self.doors.acted(&self.view.status.desired);
        let daemons = self.layouts.values().flat_map(|layout| layout.daemons.keys());
        self.absences.look(daemons, &self.view, |device| self.doors.knows(device), now);
    }

    /// The next change of each GPU that has some, where nothing is in its way.
    fn orders(
        &mut self,
        hardware: &Hardware,
        partitions: &BTreeMap<String, Partition>,
        mut changes: BTreeMap<String, Vec<Change>>,
        now: Instant,
    ) -> Vec<Order> {
        // Without the checkpoint of before, what was given out is known only once the kubelet has said it for some time.
        let settled = self.remembers || now.saturating_duration_since(self.kubelet_since) >= self.grace;
        let known = self.held.is_some() && self.held_error.is_none() && settled;
        self.trials.retain(|uuid, _| hardware.gpus.contains_key(uuid));
        let mut orders = Vec::new();
        for (uuid, KnownGpu { gpu, health, observed, .. }) in &hardware.gpus {
            let left = changes.remove(uuid).unwrap_or_default();
            let partition = partitions.get(uuid);
            if left.is_empty() && !self.trials.contains_key(uuid) {
                continue;
            }
            let mut trial = self.trials.remove(uuid).unwrap_or_else(|| Trial::new(partition));
            trial.review(partition, gpu, health.healthy);
            let next = if *observed && health.healthy {
                let served = |device: &str| {
                    self.layouts.get(uuid).is_some_and(|layout| layout.pools.iter().any(|pool| pool.device == device))
                };
                let may = left.iter().filter(|change| trial.may(change, now));
                next(may, gpu, known, served, |device| self.daemon_gone(device))
            } else {
                Next::Nothing
            };
            trial.plans(uuid, &left, &next);
            if let Some(done) = trial.told(&left) {
                self.news.push(Occurrence {
                    warning: false,
                    reason: "MigChanged",
                    note: format!("GPU {uuid}: {done}"),
                    regarding: None,
                    related: None,
                });
            }
            if let Next::Do(change) = next {
                orders.push(Order { gpu: uuid.clone(), change });
            }
            self.trials.insert(uuid.clone(), trial);
        }
        orders
    }

    /// Whether the MPS daemon of a device is no more, and will not be.
    fn daemon_gone(&self, device: &str) -> Result<(), String> {
        if self.adopted.contains_key(device) {
            return Err("the MPS daemon of an agent before this one serves it".into());
        }
        if self.view.status.daemons.contains_key(device) {
            return Err(if self.view.alive {
                "its MPS daemon has not ended yet".into()
            } else {
                "its MPS daemon may still run: the MPS host does not answer".into()
            });
        }
        if self.doors.knows_gone(device) {
            Ok(())
        } else {
            Err("the MPS host has not read yet that its MPS daemon shall end".into())
        }
    }

    /// Leaves out what a change that is being made takes away, though it may be wanted again by now.
    fn spare(&self, mut decided: Decision) -> Decision {
        for (uuid, trial) in self.trials.iter().filter(|(_, trial)| trial.is_acting()) {
            decided.applied = false;
            if let Some(layout) = decided.layouts.get_mut(uuid) {
                layout.pools.retain(|pool| !trial.takes(uuid, &pool.device));
                layout.daemons.retain(|device, _| !trial.takes(uuid, device));
            }
        }
        decided
    }

    /// Holds back what takes slices away until the kubelet has had the time to hear of it. What it hands out meanwhile blocks the change.
    fn withdraw(&mut self, mut decided: Decision, now: Instant) -> Decision {
        let mut withdrawing = BTreeMap::new();
        for (uuid, after) in &mut decided.layouts {
            let Some(before) = self.layouts.get(uuid) else { continue };
            let going = going(before, after);
            let since = |slice: &(String, String)| self.withdrawing.get(slice).copied().unwrap_or(now);
            if going.iter().any(|slice| now.saturating_duration_since(since(slice)) < WITHDRAW) {
                after.clone_from(before);
                decided.steps.retain(|step| step.gpu != *uuid || step.result != STEP_DONE);
                decided.applied = false;
                withdrawing.extend(going.into_iter().map(|slice| (slice.clone(), since(&slice))));
            }
        }
        self.withdrawing = withdrawing;
        decided
    }

    /// What is done stays told until the next change; what waits or is refused is as it is now.
    fn remember(&mut self, steps: Vec<StepStatus>, changed: bool) {
        if changed && steps.iter().any(|step| step.result == STEP_DONE) {
            self.steps = steps;
            return;
        }
        let open = |new: &StepStatus, old: &StepStatus| new.gpu == old.gpu && new.result != STEP_DONE;
        self.steps.retain(|old| old.result == STEP_DONE && !steps.iter().any(|new| open(new, old) || new == old));
        self.steps.extend(steps);
    }

    /// Lets daemons of a lost checkpoint go that are wanted anyway, or that nobody uses.
    fn let_go(&mut self, usage: Option<&Usage>) {
        let Some(usage) = usage else { return };
        self.adopted.retain(|device, _| {
            let used = usage.of(&BTreeSet::from([device.as_str()])).next().is_some();
            let wanted = self.layouts.values().any(|layout| layout.daemons.contains_key(device));
            used && !wanted
        });
        self.adopted_allocations.retain(|_, allocation| self.adopted.contains_key(&allocation.device));
    }

    fn desired(&self, allocations: &Allocations) -> Desired {
        let mut daemons = self.adopted.clone();
        for layout in self.layouts.values() {
            daemons.extend(layout.daemons.iter().map(|(device, daemon)| (device.clone(), daemon.clone())));
        }
        let mut doors = self.adopted_allocations.clone();
        doors.extend(allocations.iter().filter_map(|(_, allocation)| allocation.door()));
        Desired { version: wire::VERSION, daemons, allocations: doors }
    }

    /// What is in use, as far as it may not be given to others. What was given out is known from the checkpoint before the kubelet has said
    /// anything.
    fn in_use(&self, allocations: &Allocations) -> Option<Usage> {
        let known = self.held.is_some() || self.remembers;
        known.then(|| Usage::new(self.held.as_deref().unwrap_or_default(), allocations))
    }

    fn lists(
        &self,
        hardware: &Hardware,
        expected: &Expected,
        in_use: Option<&Usage>,
    ) -> BTreeMap<ResourceName, DeviceList> {
        let spec = self.spec.as_ref().map(|(_, spec)| spec);
        let closed = cordon::closed(spec, &self.layouts, in_use, expected);
        let mut lists: BTreeMap<ResourceName, DeviceList> = BTreeMap::new();
        for (uuid, layout) in &self.layouts {
            let Some(known) = hardware.gpus.get(uuid) else { continue };
            for pool in &layout.pools {
                let Ok(name) = ResourceName::parse(&pool.resource) else { continue };
                let serves = self.can_serve(known, pool).is_ok();
                let device = |id: String| {
                    let slice = (pool.resource.clone(), id.clone());
                    let healthy = serves && !self.withdrawing.contains_key(&slice) && !closed.contains(&slice);
                    Some(Device { id: DeviceId::parse(&id).ok()?, healthy, numa: known.gpu.numa })
                };
                lists.entry(name).or_default().extend(pool.ids().filter_map(device));
            }
        }
        lists
    }

    /// Whether slices of this pool can be given out now, and why not.
    fn can_serve(&self, known: &KnownGpu, pool: &Pool) -> Result<(), String> {
        if !known.health.healthy {
            return Err(known.health.message.clone());
        }
        if let Some(health) = known.instances.get(&pool.device) {
            return Err(health.message.clone());
        }
        let instances = known.gpu.mig.iter().flat_map(|mig| &mig.instances);
        if pool.device != known.gpu.uuid && !instances.clone().any(|instance| instance.uuid == pool.device) {
            return Err("the MIG instance is no more".into());
        }
        match pool.kind {
            Kind::Mps { .. } if self.absences.is_short(&pool.device) => Ok(()),
            Kind::Mps { .. } => status::daemon_trouble(&self.view, &pool.device).and_then(|()| {
                if self.doors.knows(&pool.device) {
                    Ok(())
                } else {
                    Err("the MPS host has not read its last settings yet".into())
                }
            }),
            Kind::Whole | Kind::TimeSliced => match self.view.status.daemons.get(&pool.device) {
                // Its compute mode is not put back before its end.
                Some(_) if self.view.alive => Err("its MPS daemon has not ended yet".into()),
                _ => Ok(()),
            },
        }
    }

    /// What is worth an event: daemons that went and came, GPUs that failed and recovered. Each once.
    fn occurrences(&mut self, hardware: &Hardware) -> Vec<Occurrence> {
        let mut found = std::mem::take(&mut self.news);
        found.extend(self.told_health.news(hardware));
        let devices: BTreeSet<String> =
            self.layouts.values().flat_map(|layout| layout.daemons.keys().cloned()).collect();
        self.told.retain(|device, _| devices.contains(device));
        for device in devices {
            let daemon = self.view.status.daemons.get(&device);
            let restarts = daemon.map_or(0, |daemon| daemon.restarts);
            // One that is Stopping is the last layout's, on its way out.
            let going = |state| matches!(state, DaemonState::Starting | DaemonState::Active | DaemonState::Stopping);
            let failing = daemon.is_some_and(|daemon| !going(daemon.state));
            let ended = |why: &str| warning("MpsUnavailable", format!("shares of {device}: {why}"));
            let back = || recovered(format!("shares of {device}: the MPS daemon serves again, with its limits"));
            let told = self.told.get(&device).copied().unwrap_or_default();
            let next = match (told, status::daemon_trouble(&self.view, &device)) {
                (Told::Serving(before), Ok(())) if restarts > before => {
                    // It was back before it was seen to be gone.
                    found.extend([ended("the MPS daemon ended"), back()]);
                    Told::Serving(restarts)
                }
                (Told::Troubled, Ok(())) => {
                    found.push(back());
                    Told::Serving(restarts)
                }
                (Told::New | Told::Serving(_), Ok(())) => Told::Serving(restarts),
                (Told::Serving(_), Err(why)) => {
                    found.push(ended(&why));
                    Told::Troubled
                }
                (Told::New, Err(why)) if failing => {
                    found.push(ended(&why));
                    Told::Troubled
                }
                // Starting is no trouble, and trouble is told once.
                (told @ (Told::New | Told::Troubled), Err(_)) => told,
            };
            self.told.insert(device, next);
        }
        found
    }

    fn unready(&self, desired: &Desired) -> Option<String> {
        if !self.inventoried {
            return Some("NVML has not answered yet".into());
        }
        if !self.view.alive && !desired.daemons.keys().all(|device| self.absences.is_short(device)) {
            return Some("the MPS host does not answer".into());
        }
        None
    }
}

/// Slices that are served and would go, or be others, by resource and id.
fn going(before: &Layout, after: &Layout) -> Vec<(String, String)> {
    let slices = before.pools.iter().flat_map(|pool| pool.ids().map(|id| (pool.resource.clone(), id)));
    slices.filter(|(resource, id)| !keeps(Some(before), after, resource, id)).collect()
}

/// The GPUs that a spec has cut by MIG, and that are not whole again. What a change makes of one is known when it has ended.
fn cut(
    hardware: &Hardware,
    partitions: &BTreeMap<&str, &Partition>,
    before: &BTreeSet<String>,
    changing: impl Fn(&str) -> bool,
) -> BTreeSet<String> {
    let wanted = |uuid: &str| partitions.get(uuid).is_some_and(|partition| partition.mig.is_some());
    let is = |uuid: &str| {
        let mig = hardware.gpus.get(uuid).and_then(|known| known.gpu.mig.as_ref());
        mig.is_none_or(|mig| mig.enabled || mig.pending == Some(true))
    };
    let stays = before.iter().filter(|uuid| is(uuid) || changing(uuid)).cloned();
    stays.chain(hardware.gpus.keys().filter(|uuid| wanted(uuid)).cloned()).collect()
}

/// The processes on each GPU that are not of its MPS daemons: those know their clients, and a client's allocation is known.
fn foreign(hardware: &Hardware, view: &mps::View) -> BTreeMap<String, Vec<Process>> {
    let daemons = || view.status.daemons.values();
    let mut ours: BTreeSet<u32> = daemons().flat_map(|daemon| [daemon.pid, daemon.server_pid]).flatten().collect();
    ours.extend(daemons().flat_map(|daemon| &daemon.clients).map(|client| client.pid));
    let of = |known: &KnownGpu| -> Vec<Process> {
        known.processes.iter().filter(|process| !ours.contains(&process.pid)).cloned().collect()
    };
    hardware.gpus.iter().map(|(uuid, known)| (uuid.clone(), of(known))).collect()
}

pub(crate) fn warning(reason: &'static str, note: String) -> Occurrence {
    Occurrence { warning: true, reason, note, regarding: None, related: None }
}

pub(crate) fn recovered(note: String) -> Occurrence {
    Occurrence { warning: false, reason: "Recovered", note, regarding: None, related: None }
}

#[cfg(test)]
mod tests {
    use cleave_gpu::mps::wire::{DaemonStatus, Door, Status};

    use super::*;
    use crate::absence::SHORT;
    use crate::layout::tests::{gpu, mps_spec};
    use crate::usage::tests::{MPS, allocation, held};

    const GRACE: Duration = Duration::from_secs(30);

    fn spec(units: u32) -> Object {
        let gpus = vec![mps_spec("GPU-a", units)];
        Object::Present(3, GpuNodeSpec { plan_id: format!("p{units}"), gpus })
    }

    #[expect(clippy::unnecessary_wraps, reason = "an answer, as NVML gives it")]
    fn inventory() -> Result<Inventory, NvmlError> {
        let gpus = BTreeMap::from([(0, Ok(gpu("GPU-a", 0)))]);
        Ok(Inventory { driver: "580".into(), gpus, processes: BTreeMap::new() })
    }

    /// A node that has started long ago, and its table.
    fn node(checkpoint: Option<Checkpoint>, last: Option<Desired>, start: Instant) -> (Node, Table) {
        let (node, allocations) = Node::start("boot".into(), GRACE, checkpoint, last, start);
        (node, Table { allocations, ..Table::default() })
    }

    fn view(state: DaemonState, restarts: u32, desired: &Desired) -> mps::View {
        let daemon = DaemonStatus {
            state,
            pid: Some(1),
            server_pid: None,
            restarts,
            door: Door::Hard,
            message: String::new(),
            clients: Vec::new(),
            fault: None,
        };
        let daemons = BTreeMap::from([("GPU-a".to_owned(), daemon)]);
        let status = Status { version: 1, desired: desired.hash(), daemons, ..Status::default() };
        mps::View { alive: true, status, error: None }
    }

    fn healthy(turn: &Turn) -> usize {
        turn.lists.values().flatten().filter(|device| device.healthy).count()
    }

    fn reasons(turn: &Turn) -> Vec<&'static str> {
        turn.occurrences.iter().map(|occurrence| occurrence.reason).collect()
    }

    /// With ten shares that are served.
    fn serving(start: Instant) -> (Node, Table, Desired) {
        let (mut node, mut table) = node(None, None, start);
        node.inventory(inventory(), start);
        node.object(spec(10));
        let desired = node.turn(&mut table, start).desired;
        node.mps(view(DaemonState::Active, 0, &desired));
        assert_eq!(healthy(&node.turn(&mut table, start)), 10);
        (node, table, desired)
    }

    #[test]
    fn a_daemon_that_is_away_for_a_moment_makes_no_share_unhealthy() {
        let start = Instant::now();
        let nothing = mps::View { alive: true, ..mps::View::default() };
        let desired = serving(start).2;
        let views = [
            ("it starts", view(DaemonState::Starting, 0, &desired)),
            ("it is started again", view(DaemonState::Restarting, 0, &desired)),
            ("the host is away", mps::View { alive: false, ..view(DaemonState::Active, 0, &desired) }),
            ("another host has not started it yet", nothing),
            ("the host has left nothing", mps::View::default()),
        ];
        for (what, away) in views {
            let (mut node, mut table, desired) = serving(start);
            let told = |turn: &Turn| {
                let gpu = &turn.status.gpus[0];
                (healthy(turn), gpu.slices[0].unhealthy, gpu.health.healthy, turn.unready.is_none(), turn.again)
            };
            for gone in [start + SHORT, start + 5 * SHORT] {
                // It serves for some time, and then is away: that counts from when it was seen to be.
                node.mps(view(DaemonState::Active, 0, &desired));
                assert_eq!(told(&node.turn(&mut table, gone)), (10, 0, true, true, None), "{what}");
                let gone = gone + SHORT;
                node.mps(away.clone());
                assert_eq!(told(&node.turn(&mut table, gone)), (10, 0, true, true, Some(SHORT)), "{what}");
                let pools = crate::allocate::View { resource: MPS, pools: &table.pools[MPS], kept: &[] };
                assert!(crate::allocate::grant(&pools, &["GPU-a::0".to_owned()]).is_ok(), "{what}: Allocate answers");
                let half = SHORT / 2;
                assert_eq!(told(&node.turn(&mut table, gone + half)), (10, 0, true, true, Some(half)), "{what}");
                for late in [gone + SHORT, gone + 2 * SHORT] {
                    let turn = node.turn(&mut table, late);
                    assert_eq!((healthy(&turn), turn.status.gpus[0].slices[0].unhealthy), (0, 10), "{what}");
                    assert_eq!((turn.again, turn.unready.is_none()), (None, node.view.alive), "{what}");
                }
            }
        }
    }

    #[test]
    fn what_is_no_matter_of_moments_is_told_at_once() {
        let start = Instant::now();
        for state in [DaemonState::Fault, DaemonState::BackOff, DaemonState::Stopping] {
            let (mut node, mut table, desired) = serving(start);
            for (state, shares) in [
                (DaemonState::Restarting, 10),
                (state, 0),
                (DaemonState::Restarting, 0),
                (DaemonState::Starting, 0),
                (DaemonState::Active, 10),
            ] {
                node.mps(view(state, 0, &desired));
                let turn = node.turn(&mut table, start);
                assert_eq!(healthy(&turn), shares, "{state:?}");
                assert_eq!(turn.status.gpus[0].slices[0].unhealthy, 10 - u32::try_from(shares).unwrap());
            }
            node.mps(mps::View { alive: false, ..view(state, 0, &desired) });
            assert_eq!(healthy(&node.turn(&mut table, start)), 0, "{state:?} was the host's last word");
        }
        let (mut node, mut table, desired) = serving(start);
        node.mps(view(DaemonState::Restarting, 0, &desired));
        node.xid("GPU-a", 79, None, &[], start);
        let turn = node.turn(&mut table, start);
        assert_eq!(
            (healthy(&turn), turn.status.gpus[0].health.reason.as_str()),
            (0, "ResetRequired"),
            "the GPU itself"
        );
    }

    #[test]
    fn shares_whose_daemon_has_not_served_them_yet_are_unhealthy() {
        let start = Instant::now();
        for state in [DaemonState::Starting, DaemonState::Restarting] {
            let (mut node, mut table) = node(None, None, start);
            node.inventory(inventory(), start);
            node.object(spec(10));
            let desired = node.turn(&mut table, start).desired;
            node.mps(view(state, 0, &desired));
            assert_eq!(healthy(&node.turn(&mut table, start)), 0, "{state:?}, and new");
        }

        let (mut first, mut table, desired) = serving(start);
        let checkpoint = first.turn(&mut table, start).checkpoint;
        let (mut next, mut table) = node(Some(checkpoint), None, start);
        next.mps(view(DaemonState::Restarting, 0, &desired));
        assert_eq!(healthy(&next.turn(&mut table, start)), 0, "an agent that has just started knows no better");

        // Another number of shares has other limits, under a daemon with other defaults or the same.
        for same_daemon in [false, true] {
            let (mut node, mut table, desired) = serving(start);
            node.held(Ok(vec![]), start + GRACE, &mut table.allocations);
            let Object::Present(generation, mut other) = spec(10) else { panic!() };
            let partition = other.gpus[0].partition.mps.as_mut().unwrap();
            if same_daemon {
                partition.slices[0].max_clients = Some(3);
            } else {
                partition.multi_user = false;
            }
            node.object(Object::Present(generation, other));
            node.mps(view(DaemonState::Restarting, 0, &desired));
            node.turn(&mut table, start);
            let turn = node.turn(&mut table, start + WITHDRAW);
            assert_eq!(turn.desired == desired, same_daemon);
            assert_eq!((healthy(&turn), turn.again), (0, None), "what is served is another");
            for state in [DaemonState::Active, DaemonState::Restarting] {
                node.mps(view(state, 0, &desired));
                let shares = healthy(&node.turn(&mut table, start));
                assert_eq!(shares, if same_daemon { 10 } else { 0 }, "{state:?}, with its last settings?");
            }
            node.mps(view(DaemonState::Active, 0, &turn.desired));
            assert_eq!(healthy(&node.turn(&mut table, start)), 10);
        }
    }

    #[test]
    fn a_new_allocation_does_not_make_shares_unhealthy_until_the_host_has_read_it() {
        let start = Instant::now();
        let (mut node, mut table, _) = serving(start);
        let given = Allocation {
            mps: Some(MpsLimits { threads: Some(20), memory_mib: Some(1), max_clients: None }),
            ..allocation(&["GPU-a::0"])
        };
        table.allocations.give(given, start);
        let turn = node.turn(&mut table, start);
        assert_eq!((healthy(&turn), turn.desired.allocations.len()), (10, 1));
    }

    #[test]
    fn a_whole_gpu_waits_for_the_end_of_its_daemon() {
        let start = Instant::now();
        let (mut node, mut table, desired) = serving(start);
        node.held(Ok(vec![]), start + GRACE, &mut table.allocations);
        node.object(Object::Present(4, GpuNodeSpec { plan_id: "w".into(), ..GpuNodeSpec::default() }));
        node.turn(&mut table, start);
        let turn = node.turn(&mut table, start + WITHDRAW);
        assert!(turn.desired.daemons.is_empty());
        assert_eq!((turn.lists.values().flatten().count(), healthy(&turn)), (1, 0));
        let mut gone = view(DaemonState::Active, 0, &desired);
        gone.status.daemons.clear();
        node.mps(gone);
        assert_eq!(healthy(&node.turn(&mut table, start)), 1);
    }

    #[test]
    fn each_end_of_a_daemon_is_told_once_and_so_is_its_return() {
        let start = Instant::now();
        let (mut node, mut table, desired) = serving(start);
        let mut told = |view: mps::View| {
            node.mps(view);
            reasons(&node.turn(&mut table, start))
        };
        assert!(told(view(DaemonState::Active, 0, &desired)).is_empty());
        assert_eq!(told(view(DaemonState::Restarting, 0, &desired)), ["MpsUnavailable"]);
        assert!(told(view(DaemonState::BackOff, 0, &desired)).is_empty());
        assert!(told(view(DaemonState::Starting, 1, &desired)).is_empty());
        assert_eq!(told(view(DaemonState::Active, 1, &desired)), ["Recovered"]);
        assert_eq!(
            told(view(DaemonState::Active, 2, &desired)),
            ["MpsUnavailable", "Recovered"],
            "too quick to be seen"
        );
        assert_eq!(told(mps::View { alive: false, ..view(DaemonState::Active, 2, &desired) }), ["MpsUnavailable"]);
    }

    #[test]
    fn a_start_is_no_event_and_a_start_that_fails_is() {
        let start = Instant::now();
        let (mut node, mut table) = node(None, None, start);
        node.inventory(inventory(), start);
        node.object(spec(10));
        let desired = node.turn(&mut table, start).desired;
        for state in [DaemonState::Stopping, DaemonState::Starting] {
            node.mps(view(state, 0, &desired));
            assert!(reasons(&node.turn(&mut table, start)).is_empty());
        }
        node.mps(view(DaemonState::BackOff, 0, &desired));
        assert_eq!(reasons(&node.turn(&mut table, start)), ["MpsUnavailable"]);
        node.mps(view(DaemonState::Active, 3, &desired));
        assert_eq!(reasons(&node.turn(&mut table, start)), ["Recovered"]);
    }

    #[test]
    fn an_agent_that_has_just_started_tells_nothing_as_free_that_may_be_in_use() {
        let start = Instant::now();
        let (mut first, mut table, _) = serving(start);
        table.allocations.give(allocation(&["GPU-a::1"]), start);
        let checkpoint = first.turn(&mut table, start).checkpoint;
        for (checkpoint, expected) in [(Some(checkpoint), 1), (None, 10)] {
            let (mut next, mut table) = node(checkpoint, None, start);
            next.inventory(inventory(), start);
            next.object(spec(10));
            let in_use = |turn: Turn| turn.status.gpus[0].slices[0].in_use;
            assert_eq!(in_use(next.turn(&mut table, start)), expected);
            next.held(Err("it starts".into()), start, &mut table.allocations);
            assert_eq!(in_use(next.turn(&mut table, start)), expected);
            next.held(Ok(vec![held("p", &["GPU-a::1"])]), start, &mut table.allocations);
            assert_eq!(in_use(next.turn(&mut table, start)), 1);
        }
    }

    #[test]
    fn what_the_kubelets_checkpoint_has_is_in_use_until_the_kubelet_has_written_another() {
        let start = Instant::now();
        let (mut node, mut table, _) = serving(start);
        let later = start + 2 * GRACE;
        table.allocations.give(allocation(&["GPU-a::1"]), start);
        node.held(Ok(vec![held("p", &["GPU-a::1"])]), later, &mut table.allocations);
        let in_use = |turn: &Turn| turn.status.gpus[0].slices[0].in_use;
        assert_eq!(in_use(&node.turn(&mut table, later)), 1);
        node.on_disk(Some(Arc::new([(MPS.to_owned(), "GPU-a::1".to_owned())].into())));
        assert_eq!(node.held(Ok(vec![]), later, &mut table.allocations), 0);
        let turn = node.turn(&mut table, later);
        assert_eq!((in_use(&turn), turn.renew), (1, BTreeSet::from([MPS.to_owned()])));
        assert!(node.turn(&mut table, later).renew.is_empty(), "once for each list");
        node.on_disk(Some(Arc::default()));
        assert_eq!(node.held(Ok(vec![]), later, &mut table.allocations), 1);
        let turn = node.turn(&mut table, later);
        assert_eq!((in_use(&turn), turn.renew), (0, BTreeSet::new()));
    }

    #[test]
    fn a_kubelet_that_has_just_started_is_believed_what_it_has_dropped_from_its_checkpoint() {
        let start = Instant::now();
        let (mut node, mut table, _) = serving(start);
        let later = start + 2 * GRACE;
        for id in ["GPU-a::1", "GPU-a::2"] {
            table.allocations.give(allocation(&[id]), start);
        }
        let both = [held("p", &["GPU-a::1"]), held("q", &["GPU-a::2"])];
        node.held(Ok(both.to_vec()), later, &mut table.allocations);
        node.kubelet_started(later);
        let slice = |id: &str| (MPS.to_owned(), id.to_owned());
        node.on_disk(Some(Arc::new([slice("GPU-a::1"), slice("GPU-a::2")].into())));
        assert_eq!(node.held(Ok(vec![]), later, &mut table.allocations), 0);
        let turn = node.turn(&mut table, later);
        assert_eq!(turn.status.gpus[0].allocations.len(), 2, "it has not heard of its pods yet");
        assert_eq!(turn.renew.len(), 1);
        node.on_disk(Some(Arc::new([slice("GPU-a::2")].into())));
        assert_eq!(node.held(Ok(vec![both[1].clone()]), later, &mut table.allocations), 1);
        let gpu = &node.turn(&mut table, later).status.gpus[0];
        assert_eq!((gpu.slices[0].in_use, gpu.allocations.len()), (1, 1));
    }

    #[test]
    fn a_kubelet_that_has_just_started_is_not_believed_that_pods_are_gone() {
        let start = Instant::now();
        let (mut node, mut table, _) = serving(start);
        let later = start + 2 * GRACE;
        node.held(Ok(vec![held("p", &["GPU-a::1"])]), later, &mut table.allocations);
        table.allocations.give(allocation(&["GPU-a::1"]), start);
        node.kubelet_started(later);
        assert_eq!(node.held(Ok(vec![]), later + GRACE / 2, &mut table.allocations), 0);
        node.object(spec(5));
        let turn = node.turn(&mut table, later + GRACE / 2);
        assert_eq!(turn.lists.values().flatten().count(), 10, "{:?}", turn.status.steps);
        assert_eq!(turn.list_every, LIST_IN_USE);
        assert_eq!(node.held(Ok(vec![]), later + GRACE, &mut table.allocations), 1);
        node.turn(&mut table, later + GRACE);
        assert_eq!(node.turn(&mut table, later + GRACE + WITHDRAW).lists.values().flatten().count(), 5);
    }

    #[test]
    fn slices_that_go_are_told_as_unhealthy_first_and_what_is_handed_out_meanwhile_keeps_them() {
        let start = Instant::now();
        let (mut node, mut table, _) = serving(start);
        node.held(Ok(vec![]), start + GRACE, &mut table.allocations);
        node.object(spec(5));
        let told = node.turn(&mut table, start);
        assert_eq!((told.lists.values().flatten().count(), healthy(&told)), (10, 0));
        assert_eq!(told.again, Some(WITHDRAW));
        assert!(told.status.plan_id.is_empty());
        table.allocations.give(allocation(&["GPU-a::1"]), start);
        let kept = node.turn(&mut table, start + WITHDRAW);
        assert_eq!((kept.lists.values().flatten().count(), healthy(&kept), kept.again), (10, 10, None));
        assert_eq!(kept.status.steps[0].result, "Waiting");
        table.allocations = Allocations::default();
        assert_eq!(healthy(&node.turn(&mut table, start + 2 * WITHDRAW)), 0, "told again");
        node.object(spec(10));
        let back = node.turn(&mut table, start + 3 * WITHDRAW);
        assert_eq!((healthy(&back), back.status.plan_id.as_str()), (10, "p10"));
    }

    #[test]
    fn an_error_of_the_kubelet_takes_nothing_away() {
        let start = Instant::now();
        let (mut node, mut table, _) = serving(start);
        table.allocations.give(allocation(&["GPU-a::1"]), start);
        let later = start + 2 * GRACE;
        assert_eq!(node.held(Err("no".into()), later, &mut table.allocations), 0);
        node.object(spec(5));
        let turn = node.turn(&mut table, later);
        assert_eq!(turn.lists.values().flatten().count(), 10);
        assert!(turn.status.conditions.iter().any(|condition| condition.message.contains("no")));
        assert!(!turn.sweep);
    }

    #[test]
    fn a_checkpoint_serves_before_anything_else_answers() {
        let start = Instant::now();
        let (mut first, mut table, desired) = serving(start);
        table.allocations.give(allocation(&["GPU-a::1"]), start);
        let left = first.turn(&mut table, start).checkpoint;
        let (mut second, mut table) = node(Some(left.clone()), None, start);
        second.mps(view(DaemonState::Active, 0, &desired));
        let turn = second.turn(&mut table, start);
        assert_eq!(healthy(&turn), 10);
        assert_eq!(turn.checkpoint, left);
        assert_eq!(turn.unready.as_deref(), Some("NVML has not answered yet"));
        assert!(turn.status.plan_id.is_empty(), "not before NVML has said what is there");
    }

    #[test]
    fn without_a_checkpoint_daemons_and_allocations_of_before_stay_while_pods_hold_them() {
        let start = Instant::now();
        let (mut first, mut table, _) = serving(start);
        let limits = MpsLimits { threads: Some(20), memory_mib: Some(5), max_clients: None };
        table.allocations.give(Allocation { mps: Some(limits), ..allocation(&["GPU-a::0", "GPU-a::1"]) }, start);
        let desired = first.turn(&mut table, start).desired;

        let (mut second, mut table) = node(None, Some(desired.clone()), start);
        assert_eq!(second.turn(&mut table, start).desired, desired, "before anything is known");
        second.inventory(inventory(), start);
        second.object(Object::Present(9, GpuNodeSpec { plan_id: "other".into(), ..GpuNodeSpec::default() }));
        second.held(Ok(vec![held("p", &["GPU-a::1", "GPU-a::0"])]), start, &mut table.allocations);
        let turn = second.turn(&mut table, start);
        assert_eq!(turn.desired, desired, "in use");
        let row = &turn.status.gpus[0].allocations[0];
        assert_eq!((row.sms, row.memory_mib, row.context_mib), (Some(26), Some(5), Some(123)));
        assert_eq!(turn.status.steps[0].message, "in use by ns/p");
        second.held(Ok(vec![]), start + GRACE, &mut table.allocations);
        let turn = second.turn(&mut table, start + GRACE);
        assert!(turn.desired.daemons.is_empty() && turn.desired.allocations.is_empty());
        assert!(turn.sweep);
    }

    #[test]
    fn a_spec_that_is_not_planned_yet_is_none_and_a_malformed_one_leaves_the_last() {
        let start = Instant::now();
        let (mut node, mut table) = node(None, None, start);
        node.inventory(inventory(), start);
        node.object(Object::Present(1, GpuNodeSpec::default()));
        let turn = node.turn(&mut table, start);
        assert!(turn.lists.is_empty(), "no whole GPU for a moment");
        assert_eq!(turn.status.observed_generation, 1);
        node.object(spec(10));
        node.turn(&mut table, start);
        node.object(Object::Malformed("units: what?".into()));
        let turn = node.turn(&mut table, start);
        assert_eq!(turn.lists.values().flatten().count(), 10);
        let applied = turn.status.conditions.iter().find(|condition| condition.type_ == "Applied").unwrap();
        assert_eq!((applied.reason.as_str(), applied.status.as_str()), ("Malformed", "False"));
        node.object(Object::Missing);
        assert_eq!(node.turn(&mut table, start).lists.values().flatten().count(), 10);
    }
}
