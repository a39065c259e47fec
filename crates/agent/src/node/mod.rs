//! [`Node`] is the agent's model of the node. Inputs update the model, and [`Node::reconcile`]
//! decides what to do next. Pure: the time is an argument, and no code here does I/O.
pub mod absence;
pub mod cordon;
mod daemons;
pub mod diff;
pub mod faults;
pub mod health_events;
pub mod quiesce;
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
use cleave_gpu::nvml::{DriverInfo, Gpu, GpuObservation, GpuVitals, NvmlError};
use cleave_kubelet::{AllocatedDevices, ContainerDevices, DeviceList, ResourceName};
use k8s_openapi::jiff::Timestamp;

use self::absence::DaemonAbsences;
use self::daemons::{DesiredFileTracker, ReportedDaemons};
use self::faults::ReportedFaults;
use self::health_events::ReportedHealth;
use self::quiesce::Quiesces;
use crate::allocation::usage::{Allocations, RemovalResult};
use crate::allocation::{Allocation, MpsLimits, allocation_id};
use crate::checkpoint::Checkpoint;
use crate::clock::Clock;
use crate::event::{EventSubject, NodeEvent, PodRef, device_warning};
use crate::gpu::hardware::HardwareTracker;
use crate::gpu::layout::Layout;
use crate::gpu::mig::{MigOrder, MigOrderResult, MigProgress};
use crate::gpu::xid::FaultClass;
use crate::mps;
use crate::object::GpuNodeState;
use crate::tenants::snapshot::TenantSnapshot;

/// Time for which the agent lists slices as Unhealthy before it removes them. The delay is needed
/// because the kubelet may already be allocating a slice that the agent will remove. A pod that
/// starts with a removed slice would fail permanently.
pub const REMOVAL_DELAY: Duration = Duration::from_millis(300);

/// Result of a reconciliation: the work for the other tasks.
#[derive(Debug)]
pub struct Actions {
    /// Device lists for the kubelet, by resource.
    pub lists: BTreeMap<ResourceName, DeviceList>,
    /// Resources whose device lists the device plugin sends again, even if unchanged, so that the
    /// kubelet writes its checkpoint.
    pub resend: BTreeSet<String>,
    /// The daemons and doors that the MPS host should run.
    pub desired: Desired,
    /// The state that the next agent starts from.
    pub checkpoint: Checkpoint,
    /// Status for the API server. Its conditions have no times yet.
    pub status: GpuNodeStatus,
    /// Events to publish since the last reconciliation.
    pub events: Vec<NodeEvent>,
    /// Number of fatal GPU errors since the last reconciliation, by device.
    pub faults: BTreeMap<String, u64>,
    /// Why the agent is not ready. `None` if the agent is ready.
    pub not_ready: Option<String>,
    /// Interval between requests for the kubelet's PodResources list.
    pub list_interval: Duration,
    /// Whether to remove the directories of allocations that no longer exist.
    pub sweep_directories: bool,
    /// MIG changes to start now. Record the result of each change with
    /// [`Node::record_order_result`].
    pub orders: Vec<MigOrder>,
    /// Whether to poll NVML now.
    pub poll_nvml: bool,
    /// Whether to keep NVML closed, because at least one GPU is ready for its quiesce.
    pub close_nvml: bool,
    /// The limits and allocations with which the agent detects tenants that exceed their limits.
    pub snapshot: TenantSnapshot,
    /// Maximum time until the next reconciliation. `None` if the next reconciliation is needed only
    /// after new input.
    pub wake_after: Option<Duration>,
}

/// The agent's model of the node.
#[derive(Debug)]
pub struct Node {
    boot_id: String,
    /// Time for which the agent keeps an allocation that the kubelet has not listed yet.
    grace: Duration,
    tracker: HardwareTracker,
    inventoried: bool,
    object: GpuNodeState,
    /// Generation and content of the last valid spec. The spec remains in force while the API
    /// server does not answer, and when the object is deleted or malformed.
    spec: Option<(i64, GpuNodeSpec)>,
    pod_resources: Option<Vec<ContainerDevices>>,
    pod_resources_error: Option<String>,
    /// Slices in the kubelet's checkpoint, if known. A kubelet that restarted now would count these
    /// slices as allocated.
    kubelet_checkpoint: Option<Arc<AllocatedDevices>>,
    /// Resources of allocations that the agent keeps only because the kubelet's checkpoint contains
    /// them.
    resend_lists: BTreeSet<String>,
    kubelet_since: Instant,
    view: mps::HostView,
    layouts: BTreeMap<String, Layout>,
    /// For GPUs whose MIG mode is being turned on: the layout before the change, by UUID of the
    /// GPU.
    replaced: BTreeMap<String, Layout>,
    /// Daemons of the last desired file. The agent adopts them if the checkpoint is lost, and keeps
    /// each daemon until no pod uses it or a layout includes it.
    adopted: BTreeMap<String, wire::DaemonSettings>,
    adopted_allocations: BTreeMap<String, wire::Allocation>,
    steps: Vec<StepStatus>,
    /// Slices that the agent will remove, as resource and id. The value is the time at which the
    /// agent first listed the slice as Unhealthy.
    withdrawing: BTreeMap<(String, String), Instant>,
    /// Whether the agent must not change MIG mode.
    keep_mig_mode: bool,
    /// UUIDs of the GPUs that a spec has partitioned by MIG.
    mig_partitioned: BTreeSet<String>,
    /// Progress of MIG changes, by UUID of the GPU.
    mig_progress: BTreeMap<String, MigProgress>,
    /// Time at which NVML last described each GPU after a MIG change. Answers to earlier queries
    /// are outdated.
    changed: BTreeMap<String, Instant>,
    /// Whether the agent has restored a checkpoint. If so, the allocations at the last write of the
    /// checkpoint are known.
    has_checkpoint: bool,
    /// Events for the next reconciliation.
    pending_events: Vec<NodeEvent>,
    last_foreign_poll: Option<Instant>,
    acknowledged: DesiredFileTracker,
    /// Daemons with a short absence that the agent tolerates.
    absences: DaemonAbsences,
    reported_daemons: ReportedDaemons,
    /// Reported GPU faults.
    faults: ReportedFaults,
    /// Reported health of GPUs.
    reported_health: ReportedHealth,
    /// Findings about tenants that exceeded their limits.
    findings: Vec<FindingStatus>,
    /// The requested quiesces of GPUs.
    quiesces: Quiesces,
}

impl Node {
    /// Restores the node from a checkpoint. Without a checkpoint, adopts the daemons and
    /// allocations of the MPS host's last desired file.
    pub fn start(
        boot_id: String,
        grace: Duration,
        checkpoint: Option<Checkpoint>,
        last_desired: Option<Desired>,
        now: Instant,
    ) -> (Self, Allocations) {
        let found = checkpoint.is_some();
        let Checkpoint {
            boot_id: written_in,
            generation,
            spec,
            gpus,
            layouts,
            allocations,
            mig_partitioned,
            replaced,
            health,
        } = checkpoint.unwrap_or_default();
        let adopted = if found { Desired::default() } else { last_desired.unwrap_or_default() };
        let clock = Clock::new(now, Timestamp::UNIX_EPOCH);
        let mut tracker = HardwareTracker::restore(gpus, written_in == boot_id, clock).with_health_records(health, now);
        for gpu in spec.iter().flat_map(|spec| &spec.gpus) {
            gpu.cleared.iter().for_each(|until| tracker.clear_faults(&gpu.uuid, until));
        }
        let quiesced = spec.iter().flat_map(|spec| &spec.gpus).filter(|gpu| gpu.quiesced).map(|gpu| gpu.uuid.clone());
        let node = Self {
            quiesces: Quiesces::restore(quiesced, now),
            reported_health: ReportedHealth::after_restart(&tracker.hardware()),
            tracker,
            has_checkpoint: found,
            boot_id,
            grace,
            inventoried: false,
            object: GpuNodeState::Unknown,
            spec: spec.map(|spec| (generation, spec)),
            pod_resources: None,
            pod_resources_error: None,
            kubelet_checkpoint: None,
            resend_lists: BTreeSet::new(),
            kubelet_since: now,
            view: mps::HostView::default(),
            layouts,
            replaced,
            adopted: adopted.daemons,
            adopted_allocations: adopted.allocations,
            steps: Vec::new(),
            withdrawing: BTreeMap::new(),
            keep_mig_mode: false,
            mig_partitioned,
            mig_progress: BTreeMap::new(),
            changed: BTreeMap::new(),
            pending_events: Vec::new(),
            last_foreign_poll: None,
            acknowledged: DesiredFileTracker::default(),
            absences: DaemonAbsences::default(),
            reported_daemons: ReportedDaemons::default(),
            faults: ReportedFaults::default(),
            findings: Vec::new(),
        };
        (node, Allocations::restore(allocations, now))
    }

    /// Sets whether the agent must not change the MIG mode of any GPU.
    #[must_use]
    pub fn with_fixed_mig_mode(self, keep_mig_mode: bool) -> Self {
        Self { keep_mig_mode, ..self }
    }

    /// Sets the quiet period of suspect GPUs. The default is
    /// [`DEFAULT_QUIET_PERIOD`](crate::gpu::health::DEFAULT_QUIET_PERIOD).
    pub fn set_quiet_period(&mut self, quiet: Duration) {
        self.tracker.set_quiet_period(quiet);
    }

    /// Sets the time of day at `now` to `wall`, for reports. Call this method often, because an
    /// administrator may change the system clock.
    pub fn set_time(&mut self, now: Instant, wall: Timestamp) {
        self.tracker.set_time(now, wall);
    }

    /// Returns whether NVML must be closed, because at least one GPU is ready for its quiesce.
    pub fn needs_nvml_closed(&self) -> bool {
        self.quiesces.needs_nvml_closed()
    }

    /// Records whether this process has closed NVML.
    pub const fn record_nvml_closed(&mut self, closed: bool) {
        self.quiesces.record_nvml_closed(closed);
    }

    /// Records whether this process cannot close NVML, because a call to NVML hangs.
    pub const fn record_nvml_stuck(&mut self, stuck: bool) {
        self.quiesces.record_nvml_stuck(stuck);
    }

    /// Returns the known GPUs, in the order of their last NVML indices.
    pub fn gpus(&self) -> Vec<Gpu> {
        self.tracker.hardware().gpus_by_index().into_iter().map(|known| known.gpu.clone()).collect()
    }

    /// Records the driver's version and number of GPUs. The agent sent the query at `requested_at`.
    pub fn record_driver_info(&mut self, answer: Result<DriverInfo, NvmlError>, requested_at: Instant) {
        self.tracker.record_driver_info(answer, requested_at);
        self.inventoried |= self.tracker.is_complete();
    }

    /// Records NVML's answer for the GPU at an index. The agent sent the query at `requested_at`.
    pub fn record_gpu(&mut self, index: u32, mut answer: Result<GpuObservation, NvmlError>, requested_at: Instant) {
        if let Ok(GpuObservation { gpu, .. }) = &mut answer
            && self.changed.get(&gpu.uuid).is_some_and(|at| requested_at < *at)
            && let Some(known) = self.tracker.known_gpu(&gpu.uuid)
        {
            gpu.clone_from(known);
        }
        self.tracker.record_answer(index, answer, requested_at);
        self.inventoried |= self.tracker.is_complete();
    }

    /// Returns whether a change of a GPU is in progress. Do not hand over to another agent during a
    /// change.
    pub fn is_changing_hardware(&self) -> bool {
        self.mig_progress.values().any(MigProgress::is_in_progress)
    }

    /// Records the result of a MIG order, or that the driver has not answered the order yet.
    pub fn record_order_result(&mut self, ended: MigOrderResult, now: Instant) {
        let MigOrderResult { order: MigOrder { gpu: uuid, change }, outcome, after, at } = ended;
        if let Some((gpu, processes)) = after {
            self.tracker.record_gpu(gpu, processes);
            self.changed.insert(uuid.clone(), at);
        }
        let hardware = self.tracker.hardware();
        let after = hardware.gpus.get(&uuid).map(|known| (&known.gpu, known.health.healthy));
        let after = after.filter(|_| self.changed.get(&uuid) == Some(&at));
        let progress = self.mig_progress.entry(uuid.clone()).or_insert_with(|| MigProgress::new(None));
        self.pending_events.extend(
            progress
                .record_outcome(&uuid, &change, &outcome, after, now)
                .map(|note| device_warning("MigFailed", &uuid, note)),
        );
    }

    /// Records an XID and returns its class. XIDs in `ignored` do not affect the GPU's health.
    pub fn record_xid(
        &mut self,
        uuid: &str,
        xid: u64,
        gpu_instance: Option<u32>,
        ignored: &[u64],
        now: Instant,
    ) -> FaultClass {
        self.tracker.record_xid(uuid, xid, gpu_instance, ignored, now)
    }

    /// Records a GPU's error counters and recovery action from a query at `requested_at`.
    pub fn record_vitals(&mut self, uuid: &str, vitals: GpuVitals, requested_at: Instant) {
        self.tracker.record_vitals(uuid, vitals, requested_at);
    }

    /// Replaces the findings about tenants that exceeded their limits. Each new finding causes an
    /// Event.
    pub fn record_findings(&mut self, findings: Vec<FindingStatus>) {
        let same = |a: &FindingStatus, b: &FindingStatus| {
            (&a.kind, &a.device, &a.uid, &a.container) == (&b.kind, &b.device, &b.uid, &b.container)
        };
        for new in findings.iter().filter(|new| !self.findings.iter().any(|old| same(old, new))) {
            let reason = match new.kind.as_str() {
                finding::MEMORY_EXCEEDED => finding::MEMORY_EXCEEDED,
                finding::OUTSIDE_MPS => finding::OUTSIDE_MPS,
                _ => finding::NO_SHARE,
            };
            let FindingStatus { namespace, pod, uid, message, .. } = new;
            let pod = PodRef { namespace: namespace.clone(), name: pod.clone(), uid: uid.clone() };
            let related = Some(EventSubject::Pod(pod));
            self.pending_events.push(NodeEvent {
                warning: true,
                reason,
                note: message.clone(),
                regarding: None,
                related,
            });
        }
        self.findings = findings;
    }

    /// Records the `GpuNode` as read from the API server.
    pub fn record_gpu_node(&mut self, object: GpuNodeState) {
        match &object {
            // The spec is empty because the operator has not seen the GPUs yet. Keep the current
            // layouts: with an empty spec, the agent would serve every GPU as a whole.
            GpuNodeState::Present(_, spec) if spec.plan_id.is_empty() && spec.gpus.is_empty() => {}
            GpuNodeState::Present(generation, spec) => {
                for gpu in &spec.gpus {
                    gpu.cleared.iter().for_each(|until| self.tracker.clear_faults(&gpu.uuid, until));
                }
                self.spec = Some((*generation, spec.clone()));
            }
            GpuNodeState::Unknown | GpuNodeState::Missing | GpuNodeState::Malformed(_) => {}
        }
        self.object = object;
    }

    /// Forgets the missing GPUs that an administrator has forgotten in the spec.
    fn forget_removed_gpus(&mut self) {
        let removed = self.spec.iter().flat_map(|(_, spec)| &spec.gpus);
        let removed = removed.filter_map(|gpu| Some((&gpu.uuid, gpu.forgotten.as_ref()?)));
        for (uuid, until) in removed {
            let Some(gpu) = self.tracker.known_gpu(uuid).cloned() else { continue };
            if self.tracker.forget_gpu(uuid, until) {
                self.reported_health.forget_gpu(&gpu);
                self.pending_events.push(NodeEvent {
                    warning: false,
                    reason: "GpuForgotten",
                    note: format!("GPU {} ({uuid}) was removed from the node", gpu.index),
                    regarding: None,
                    related: EventSubject::device(uuid),
                });
            }
        }
    }

    /// Records the state of the MPS host.
    pub fn record_mps_view(&mut self, view: mps::HostView) {
        self.view = view;
    }

    /// Records that the kubelet started.
    pub fn record_kubelet_start(&mut self, now: Instant) {
        self.kubelet_since = now;
    }

    /// Records the kubelet's checkpoint. Read the checkpoint after requesting the list that the
    /// next call of [`record_pod_resources`](Self::record_pod_resources) records.
    pub fn record_kubelet_checkpoint(&mut self, devices: Option<Arc<AllocatedDevices>>) {
        self.kubelet_checkpoint = devices;
    }

    /// Records the kubelet's PodResources list. The agent sent the request at `requested_at`.
    /// Returns the number of allocations that have ended.
    pub fn record_pod_resources(
        &mut self,
        answer: Result<Vec<ContainerDevices>, String>,
        requested_at: Instant,
        allocations: &mut Allocations,
    ) -> usize {
        let rows = match answer {
            Ok(rows) => rows,
            Err(error) => {
                self.pod_resources_error = Some(error);
                return 0;
            }
        };
        self.pod_resources_error = None;
        let kubelet_checkpoint = self.kubelet_checkpoint.clone();
        let stays = |row: &ContainerDevices| {
            let slice = |id: &String| (row.resource.clone(), id.clone());
            kubelet_checkpoint.as_ref().is_none_or(|devices| row.ids.iter().any(|id| devices.contains(&slice(id))))
        };
        // A kubelet that has just started lists its pods one by one, so its list may be incomplete.
        // An agent that has just started assumes that its kubelet has also just started. However,
        // the kubelet removes no slices from its checkpoint before it knows all of its pods.
        let settling = requested_at.saturating_duration_since(self.kubelet_since) < self.grace;
        let clients = self.view.status.daemons.values().flat_map(|daemon| &daemon.clients);
        let busy: BTreeSet<&str> = clients.filter_map(|client| client.allocation.as_deref()).collect();
        let over = if settling && kubelet_checkpoint.is_none() {
            allocations.mark_listed(&rows);
            0
        } else {
            let kubelet_checkpoint = kubelet_checkpoint.clone().unwrap_or_default();
            let busy = |id: &str| busy.contains(id);
            let RemovalResult { ended, in_kubelet_checkpoint } =
                allocations.remove_ended(&rows, requested_at, self.grace, busy, &kubelet_checkpoint);
            self.resend_lists = in_kubelet_checkpoint;
            ended.len()
        };
        let rows = match self.pod_resources.take() {
            Some(before) if settling => {
                let mut all: BTreeSet<ContainerDevices> = before.into_iter().filter(stays).collect();
                all.extend(rows);
                all.into_iter().collect()
            }
            _ => rows,
        };
        for row in &rows {
            self.restore_allocation(row, allocations, requested_at);
        }
        self.pod_resources = Some(rows);
        over
    }

    /// Restores an allocation after the loss of the checkpoint. The ids come from the kubelet's
    /// list, and the limits from the MPS host's last desired file.
    fn restore_allocation(&mut self, row: &ContainerDevices, allocations: &mut Allocations, now: Instant) {
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
            allocations.insert(Allocation { resource, ids, devices: vec![device], mps: Some(limits) }, now);
        }
    }
}

#[cfg(test)]
impl Node {
    /// Records the answers of the driver and of all its GPUs to queries at `requested_at`.
    pub(crate) fn record_inventory(
        &mut self,
        answer: Result<crate::gpu::hardware::tests::Inventory, NvmlError>,
        requested_at: Instant,
    ) {
        match answer {
            Ok(inventory) => {
                let (record_driver_info, gpus) = inventory.answers();
                self.record_driver_info(Ok(record_driver_info), requested_at);
                gpus.for_each(|(index, answer)| self.record_gpu(index, answer, requested_at));
            }
            Err(error) => self.record_driver_info(Err(error), requested_at),
        }
    }
}
