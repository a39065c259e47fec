//! The node as the agent knows it, and what follows from it: one value that inputs change, and one
//! function that says what to do. Pure: the time is an argument, and nothing is read or written.
pub mod absence;
pub mod cordon;
mod daemons;
pub mod diff;
pub mod faults;
pub mod health_events;
mod reconcile;
pub mod status;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleave_api::GpuNodeSpec;
use cleave_api::gpunode::{FindingStatus, GpuNodeStatus, StepStatus};
use cleave_api::names::finding;
use cleave_gpu::mps::wire::{self, Desired};
use cleave_gpu::nvml::{Census, Gpu, NvmlError, Observation, Vitals};
use cleave_kubelet::{AllocatedDevices, DeviceList, HeldDevices, ResourceName};
use k8s_openapi::jiff::Timestamp;

use self::absence::Absences;
use self::daemons::{Acknowledged, ReportedDaemons};
use self::faults::Faults;
use self::health_events::Told as ToldHealth;
use crate::allocation::usage::{Allocations, Collected};
use crate::allocation::{Allocation, MpsLimits, allocation_id};
use crate::checkpoint::Checkpoint;
use crate::clock::Clock;
use crate::event::{NodeEvent, warning};
use crate::gpu::hardware::HardwareTracker;
use crate::gpu::layout::Layout;
use crate::gpu::mig::{Ended, Order, Trial};
use crate::gpu::xid::Class;
use crate::mps;
use crate::object::Object;
use crate::tenants::snapshot::TenantSnapshot;

/// How long slices are told as Unhealthy before they go: the kubelet may be handing one out just
/// now, and a pod that comes with a slice that is no more would fail for good.
pub const WITHDRAW: Duration = Duration::from_millis(300);

/// What to do.
#[derive(Debug)]
pub struct Actions {
    /// Devices by resource.
    pub lists: BTreeMap<ResourceName, DeviceList>,
    /// Resources whose lists the kubelet is to be sent again though they are equal, so that it
    /// writes its checkpoint.
    pub renew: BTreeSet<String>,
    /// What the MPS host shall run.
    pub desired: Desired,
    /// What the next agent has to know.
    pub checkpoint: Checkpoint,
    /// What the API server is told, its times left out.
    pub status: GpuNodeStatus,
    /// What has happened since the last turn.
    pub events: Vec<NodeEvent>,
    /// Fatal GPU errors since the last turn, by device.
    pub faults: BTreeMap<String, u64>,
    /// Why the agent is not ready, if so.
    pub unready: Option<String>,
    /// How often the kubelet is to be asked who holds what.
    pub list_every: Duration,
    /// Folders of allocations that are not wanted may go.
    pub sweep: bool,
    /// Changes of GPUs that are to be made now, each in its own time; how each ended is to be told
    /// to [`Node::ended`].
    pub orders: Vec<Order>,
    /// NVML is to be asked now.
    pub look: bool,
    /// What tenants are judged by.
    pub snapshot: TenantSnapshot,
    /// Actions again after this long, at the latest.
    pub again: Option<Duration>,
}

/// The node as the agent knows it.
#[derive(Debug)]
pub struct Node {
    boot_id: String,
    /// How long what the kubelet does not list is kept.
    grace: Duration,
    tracker: HardwareTracker,
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
    view: mps::HostView,
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
    /// When GPUs were last looked at after a change: an answer that was asked for before knows
    /// less.
    changed: BTreeMap<String, Instant>,
    /// Every allocation of before is known: the checkpoint was found.
    remembers: bool,
    /// Events of changes, until the next turn.
    news: Vec<NodeEvent>,
    looked: Option<Instant>,
    doors: Acknowledged,
    /// Daemons that are away for a moment.
    absences: Absences,
    told: ReportedDaemons,
    /// And of their faults.
    faults: Faults,
    /// What was told of GPUs' health.
    told_health: ToldHealth,
    /// Tenants that left their shares.
    findings: Vec<FindingStatus>,
}

impl Node {
    /// As a checkpoint left it; without one, as the last desired file of the MPS host lets it be
    /// known.
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
        let mut tracker = HardwareTracker::remembering(gpus, written_in == boot_id, clock).recalling(health, now);
        for gpu in spec.iter().flat_map(|spec| &spec.gpus) {
            gpu.cleared.iter().for_each(|until| tracker.cleared(&gpu.uuid, until));
        }
        let node = Self {
            told_health: ToldHealth::before(&tracker.hardware()),
            tracker,
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
            view: mps::HostView::default(),
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
            told: ReportedDaemons::default(),
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

    /// How long a suspect GPU must show nothing further before it can be healthy again;
    /// [`crate::gpu::health::QUIET`] unless this is said.
    pub fn quiet_for(&mut self, quiet: Duration) {
        self.tracker.quiet_for(quiet);
    }

    /// It is `wall` at `now`: for times that are told. To be told again and again, because the time
    /// of day may be set.
    pub fn set_time(&mut self, now: Instant, wall: Timestamp) {
        self.tracker.set_time(now, wall);
    }

    /// The GPUs that are known, in NVML's order.
    pub fn gpus(&self) -> Vec<Gpu> {
        self.tracker.hardware().by_index().into_iter().map(|known| known.gpu.clone()).collect()
    }

    /// What the driver answered when it was asked, at `asked`, how many GPUs it has.
    pub fn census(&mut self, answer: Result<Census, NvmlError>, asked: Instant) {
        self.tracker.census(answer, asked);
        self.inventoried |= self.tracker.is_complete();
    }

    /// What the GPU at one of NVML's indices answered, asked at `asked`.
    pub fn gpu(&mut self, index: u32, mut answer: Result<Observation, NvmlError>, asked: Instant) {
        if let Ok(Observation { gpu, .. }) = &mut answer
            && self.changed.get(&gpu.uuid).is_some_and(|at| asked < *at)
            && let Some(known) = self.tracker.known(&gpu.uuid)
        {
            gpu.clone_from(known);
        }
        self.tracker.answer(index, answer, asked);
        self.inventoried |= self.tracker.is_complete();
    }

    /// An order ended, or takes long.
    pub fn ended(&mut self, ended: Ended, now: Instant) {
        let Ended { order: Order { gpu: uuid, change }, outcome, after, at } = ended;
        if let Some((gpu, processes)) = after {
            self.tracker.see(gpu, processes);
            self.changed.insert(uuid.clone(), at);
        }
        let hardware = self.tracker.hardware();
        let after = hardware.gpus.get(&uuid).map(|known| (&known.gpu, known.health.healthy));
        let after = after.filter(|_| self.changed.get(&uuid) == Some(&at));
        let trial = self.trials.entry(uuid.clone()).or_insert_with(|| Trial::new(None));
        self.news.extend(trial.ended(&uuid, &change, &outcome, after, now).map(|note| warning("MigFailed", note)));
    }

    /// An XID; `ignored` are those that say nothing of the GPU. Says what it says of it.
    pub fn xid(&mut self, uuid: &str, xid: u64, gpu_instance: Option<u32>, ignored: &[u64], now: Instant) -> Class {
        self.tracker.xid(uuid, xid, gpu_instance, ignored, now)
    }

    /// What the driver says of a GPU's memory and needs, asked at `asked`.
    pub fn vitals(&mut self, uuid: &str, vitals: Vitals, asked: Instant) {
        self.tracker.vitals(uuid, vitals, asked);
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
            // Not planned yet: the operator has not seen what GPUs there are. What is served stays,
            // and nothing is served whole for a moment.
            Object::Present(_, spec) if spec.plan_id.is_empty() && spec.gpus.is_empty() => {}
            Object::Present(generation, spec) => {
                for gpu in &spec.gpus {
                    gpu.cleared.iter().for_each(|until| self.tracker.cleared(&gpu.uuid, until));
                }
                self.spec = Some((*generation, spec.clone()));
            }
            Object::Unknown | Object::Missing | Object::Malformed(_) => {}
        }
        self.object = object;
    }

    /// The MPS host was looked at.
    pub fn mps(&mut self, view: mps::HostView) {
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
        // A kubelet that has just started hears of its pods one by one; so it was, for all that a
        // process that has just started knows. It drops nothing from its checkpoint before it has
        // heard of all.
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

    /// An allocation of an agent whose checkpoint is lost: the kubelet knows its ids, the MPS host
    /// its limits.
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
}

#[cfg(test)]
impl Node {
    /// The driver and all of its GPUs answer, asked at `asked`.
    pub(crate) fn inventory(
        &mut self,
        answer: Result<crate::gpu::hardware::tests::Inventory, NvmlError>,
        asked: Instant,
    ) {
        match answer {
            Ok(inventory) => {
                let (census, gpus) = inventory.answers();
                self.census(Ok(census), asked);
                gpus.for_each(|(index, answer)| self.gpu(index, answer, asked));
            }
            Err(error) => self.census(Err(error), asked),
        }
    }
}
