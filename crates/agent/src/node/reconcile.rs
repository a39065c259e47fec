//! Decides the agent's next actions from the state of [`Node`] (see [`Node::reconcile`]).
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleave_api::gpunode::{GpuNodeStatus, Partition, StepStatus};
use cleave_api::names::{STEP_DONE, STEP_WAITING};
use cleave_gpu::mps::wire::{self, Desired};
use cleave_gpu::nvml::Process;
use cleave_kubelet::{Device, DeviceId, DeviceList, ResourceName};

use super::diff::{ChangeRules, LayoutDecision, decide_layouts, is_slice_unchanged};
use super::quiesce::GpuUse;
use super::status::{self, StatusInput};
use super::{Actions, Node, REMOVAL_DELAY, cordon, faults};
use crate::allocation::pending::PendingAllocations;
use crate::allocation::table::AllocationTable;
use crate::allocation::usage::{Allocations, SliceUsage};
use crate::checkpoint::Checkpoint;
use crate::event::{EventSubject, NodeEvent};
use crate::gpu::hardware::{Hardware, KnownGpu};
use crate::gpu::layout::{Layout, Pool, PoolKind, device_of_id, parse_slice_id};
use crate::gpu::mig::{MigChange, MigOrder, MigProgress, NextStep, SliceUsers, next_step};
use crate::mps::HostView;
use crate::tenants::snapshot::{self, TenantSnapshot};

/// Interval between PodResources requests while slices are or may be in use, or a change waits.
pub(super) const LIST_INTERVAL_WHILE_IN_USE: Duration = Duration::from_secs(1);
/// Interval between PodResources requests while no slices are in use and no change waits.
const LIST_INTERVAL_WHILE_IDLE: Duration = Duration::from_secs(30);

/// Interval between polls of NVML while processes outside of Kubernetes block a change.
const FOREIGN_PROCESS_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Interval between checks of a quiesce in progress.
const QUIESCE_CHECK_INTERVAL: Duration = Duration::from_millis(100);

impl Node {
    /// Decides the next actions, and updates the pools in the table.
    pub fn reconcile(&mut self, table: &mut AllocationTable, now: Instant) -> Actions {
        self.forget_removed_gpus();
        let hardware = self.tracker.hardware();
        let in_use = self.slices_in_use(&table.allocations);
        let usage = in_use.as_ref().filter(|_| self.pod_resources.is_some());
        let partitions: BTreeMap<String, Partition> = self
            .spec
            .iter()
            .flat_map(|(_, spec)| &spec.gpus)
            .map(|gpu| (gpu.uuid.clone(), gpu.partition.clone()))
            .collect();
        let rules = self.change_rules(&hardware, &partitions);
        let spec = self.spec.as_ref().map(|(_, spec)| spec);
        let decided = decide_layouts(&hardware, spec, &self.layouts, usage, &rules);
        let decided = self.restore_old_layouts(self.exclude_slices_being_removed(decided), now);
        let LayoutDecision { layouts, mut steps, applied, changes, foreign } = self.delay_removals(decided, now);
        let layouts_changed = self.set_layouts(layouts);
        self.release_adopted_daemons(usage);
        table.pools.clear();
        for pool in self.layouts.values().flat_map(|layout| &layout.pools) {
            table.pools.entry(pool.resource.clone()).or_default().push(pool.clone());
        }

        self.update_quiesces(&hardware, in_use.as_ref(), &table.pending, now);
        let desired = self.desired_mps_state(&hardware, &table.allocations);
        self.update_daemons(&desired, now);
        let users = self.slice_users(&hardware, usage, now);
        let orders = self.order_changes(&hardware, &partitions, changes, users, now);
        steps.extend(self.mig_progress.values().flat_map(MigProgress::steps).cloned());
        self.record_steps(steps, layouts_changed);
        let lists = self.device_lists(&hardware, &table.pending, in_use.as_ref());
        let mut events = self.take_events(&hardware);
        let pods = faults::PodSources {
            listed: self.pod_resources.as_deref().unwrap_or_default(),
            allocations: &table.allocations,
            pending: &table.pending,
        };
        let faults = self.faults.update(&self.view, &pods, now);
        events.extend(faults.events);
        let waits = self.steps.iter().any(|step| step.result == STEP_WAITING);
        let idle = !waits && usage.is_some_and(SliceUsage::is_empty);
        let poll_nvml = foreign
            && self
                .last_foreign_poll
                .is_none_or(|at| now.saturating_duration_since(at) >= FOREIGN_PROCESS_POLL_INTERVAL);
        if poll_nvml {
            self.last_foreign_poll = Some(now);
        }
        Actions {
            status: self.status(&hardware, table, &lists, in_use.as_ref(), applied),
            snapshot: self.tenant_snapshot(&hardware, table, &rules),
            checkpoint: self.checkpoint(&hardware, &table.allocations),
            not_ready: self.not_ready_reason(&desired),
            wake_after: self.next_wakeup(foreign, faults.wake_after, now),
            lists,
            resend: std::mem::take(&mut self.resend_lists),
            desired,
            events,
            faults: faults.faults,
            list_interval: if idle { LIST_INTERVAL_WHILE_IDLE } else { LIST_INTERVAL_WHILE_IN_USE },
            sweep_directories: self.pod_resources.is_some() && self.adopted_allocations.is_empty(),
            orders,
            poll_nvml,
            close_nvml: self.quiesces.needs_nvml_closed(),
        }
    }

    /// Returns the restrictions on changes, and updates the set of GPUs that are partitioned by
    /// MIG.
    fn change_rules(&mut self, hardware: &Hardware, partitions: &BTreeMap<String, Partition>) -> ChangeRules {
        self.mig_partitioned = mig_partitioned_gpus(hardware, partitions, &self.mig_partitioned, |uuid| {
            self.mig_progress.get(uuid).is_some_and(MigProgress::is_in_progress)
        });
        let processes = foreign_processes(hardware, &self.view);
        ChangeRules { keep_mig_mode: self.keep_mig_mode, mig_partitioned: self.mig_partitioned.clone(), processes }
    }

    fn status(
        &self,
        hardware: &Hardware,
        table: &AllocationTable,
        lists: &BTreeMap<ResourceName, DeviceList>,
        in_use: Option<&SliceUsage>,
        applied: bool,
    ) -> GpuNodeStatus {
        status::build_status(&StatusInput {
            hardware,
            inventoried: self.inventoried,
            object: &self.object,
            spec: self.spec.as_ref(),
            applied,
            layouts: &self.layouts,
            lists,
            usage: in_use,
            listed: self.pod_resources.as_deref().unwrap_or_default(),
            pod_resources_error: self.pod_resources_error.as_deref(),
            allocations: &table.allocations,
            view: &self.view,
            absences: &self.absences,
            outdated_daemons: &self.outdated_daemons(),
            steps: &self.steps,
            findings: &self.findings,
            boot_id: &self.boot_id,
            quiesces: &self.quiesces,
        })
    }

    /// Updates the progress of the quiesces that the spec requests.
    fn update_quiesces(
        &mut self,
        hardware: &Hardware,
        in_use: Option<&SliceUsage>,
        pending: &PendingAllocations,
        now: Instant,
    ) {
        let wanted: BTreeSet<String> = self
            .spec
            .iter()
            .flat_map(|(_, spec)| &spec.gpus)
            .filter(|gpu| gpu.quiesced && hardware.gpus.contains_key(&gpu.uuid))
            .map(|gpu| gpu.uuid.clone())
            .collect();
        let mut quiesces = std::mem::take(&mut self.quiesces);
        quiesces.update(&wanted, |uuid| self.gpu_use(uuid, hardware, in_use, pending), now);
        self.quiesces = quiesces;
    }

    /// Returns the current use of a GPU whose quiesce was requested.
    fn gpu_use(
        &self,
        uuid: &str,
        hardware: &Hardware,
        in_use: Option<&SliceUsage>,
        pending: &PendingAllocations,
    ) -> GpuUse {
        let layout = self.layouts.get(uuid);
        let instances = hardware.gpus.get(uuid).and_then(|known| known.gpu.mig.as_ref());
        let mut devices: BTreeSet<&str> = BTreeSet::from([uuid]);
        devices.extend(instances.iter().flat_map(|mig| &mig.instances).map(|instance| instance.uuid.as_str()));
        devices.extend(layout.iter().flat_map(|layout| &layout.pools).map(|pool| pool.device.as_str()));
        let pods: Option<BTreeSet<&str>> = in_use.map(|usage| {
            usage.slices_of_devices(&devices).flat_map(|(_, _, users)| users.iter().map(String::as_str)).collect()
        });
        let used = in_use.is_some_and(|usage| usage.slices_of_devices(&devices).next().is_some());
        let is_reserved = || {
            let resources: BTreeSet<&String> =
                layout.iter().flat_map(|layout| &layout.pools).map(|pool| &pool.resource).collect();
            let open = resources.iter().flat_map(|resource| pending.open_reservations(resource));
            open.into_iter().any(|reserved| devices.contains(reserved.device))
        };
        let why = match pods {
            None => Some("the kubelet has not reported yet which slices are in use".to_owned()),
            Some(pods) if used => {
                Some(format!("the GPU is in use by {}", pods.into_iter().collect::<Vec<_>>().join(", ")))
            }
            Some(_) if is_reserved() => Some("a pod that is starting has a reservation on the GPU".to_owned()),
            Some(_) if self.mig_progress.get(uuid).is_some_and(MigProgress::is_in_progress) => {
                Some("a change of MIG mode or of a MIG instance is in progress".to_owned())
            }
            Some(_) => None,
        };
        let daemons = devices.iter().find_map(|device| self.check_daemon_exited(device).err());
        GpuUse { in_use: why, daemons }
    }

    /// Returns the limits and allocations to compare with the tenants' processes.
    fn tenant_snapshot(&self, hardware: &Hardware, table: &AllocationTable, rules: &ChangeRules) -> TenantSnapshot {
        TenantSnapshot::new(&snapshot::SnapshotInputs {
            hardware,
            layouts: &self.layouts,
            spec: self.spec.as_ref().map(|(_, spec)| spec),
            view: &self.view,
            rows: self.pod_resources.as_deref().filter(|_| self.pod_resources_error.is_none()),
            allocations: &table.allocations,
            foreign: &rules.processes,
        })
    }

    fn checkpoint(&self, hardware: &Hardware, allocations: &Allocations) -> Checkpoint {
        Checkpoint {
            boot_id: self.boot_id.clone(),
            generation: self.spec.as_ref().map_or(0, |(generation, _)| *generation),
            spec: self.spec.as_ref().map(|(_, spec)| spec.clone()),
            gpus: hardware.gpus_by_index().into_iter().map(|known| known.gpu.clone()).collect(),
            layouts: self.layouts.clone(),
            allocations: allocations.iter().map(|(_, allocation)| Arc::clone(allocation)).collect(),
            mig_partitioned: self.mig_partitioned.clone(),
            replaced: self.replaced.clone(),
            health: self.tracker.health_records(),
        }
    }

    /// Returns the time after which to reconcile again without new input. Returns `None` if only
    /// new input requires another reconciliation.
    fn next_wakeup(&self, foreign: bool, faults: Option<Duration>, now: Instant) -> Option<Duration> {
        let withdrawn = (!self.withdrawing.is_empty()).then_some(REMOVAL_DELAY);
        let tried = self.mig_progress.values().filter_map(|progress| progress.next_retry(now)).min();
        let absent = self.absences.next_expiry(now);
        let quiescing = self.quiesces.is_in_progress().then_some(QUIESCE_CHECK_INTERVAL);
        [withdrawn, quiescing, foreign.then_some(FOREIGN_PROCESS_POLL_INTERVAL), tried, faults, absent]
            .into_iter()
            .flatten()
            .min()
    }

    /// Returns the Events since the last reconciliation, except those about fatal GPU errors.
    fn take_events(&mut self, hardware: &Hardware) -> Vec<NodeEvent> {
        let mut events = std::mem::take(&mut self.pending_events);
        events.extend(self.reported_health.update(hardware));
        let missing = |uuid: &str| hardware.gpus.get(uuid).is_some_and(|known| known.missing);
        let running = self.layouts.iter().filter(|(uuid, _)| !self.quiesces.stops_daemons(uuid) && !missing(uuid));
        let daemons = running.flat_map(|(_, layout)| &layout.daemons).collect();
        events.extend(self.reported_daemons.update(&daemons, &self.view));
        events.extend(self.quiesces.take_events());
        events
    }

    /// Replaces the layouts. Returns whether the layouts changed.
    fn set_layouts(&mut self, layouts: BTreeMap<String, Layout>) -> bool {
        let otherwise = layouts != self.layouts;
        if otherwise {
            self.absences.remove_changed_devices(&self.layouts, &layouts);
        }
        self.layouts = layouts;
        otherwise
    }

    /// Updates which settings the MPS host has applied, and which daemons are briefly unavailable.
    fn update_daemons(&mut self, desired: &Desired, now: Instant) {
        self.acknowledged.record_desired(desired);
        self.acknowledged.record_applied(&self.view.status.desired);
        let daemons = self.layouts.values().flat_map(|layout| &layout.daemons);
        self.absences.update(daemons, &self.view, |device| self.acknowledged.has_applied_settings(device), now);
    }

    /// Returns the devices with slices that are about to change, or with daemon settings that the
    /// MPS host has not applied yet.
    fn outdated_daemons(&self) -> BTreeSet<&str> {
        let changing = self.withdrawing.keys().filter_map(|(_, id)| parse_slice_id(id)).map(|(device, _)| device);
        let daemons = self.layouts.values().flat_map(|layout| layout.daemons.keys()).map(String::as_str);
        changing.chain(daemons.filter(|device| !self.acknowledged.has_applied_settings(device))).collect()
    }

    /// Returns whether the users of all slices are known. A kubelet that has just started lists its
    /// pods one by one. If the agent has no checkpoint of its own, the list counts as complete
    /// after the time `grace`, or once it contains all slices in the kubelet's checkpoint. The
    /// kubelet removes no slices from its checkpoint before it knows all of its pods.
    fn slice_users(&self, hardware: &Hardware, usage: Option<&SliceUsage>, now: Instant) -> SliceUsers {
        let Some(usage) = usage.filter(|_| self.pod_resources_error.is_none()) else {
            return SliceUsers::Unknown;
        };
        let lists_checkpoint = || {
            self.kubelet_checkpoint.as_ref().is_some_and(|devices| {
                let mut of_gpus = devices.iter().filter(|(_, id)| hardware.gpu_of(device_of_id(id)).is_some());
                of_gpus.all(|(resource, id)| usage.contains(resource, id))
            })
        };
        if self.has_checkpoint || now.saturating_duration_since(self.kubelet_since) >= self.grace || lists_checkpoint()
        {
            SliceUsers::Known
        } else {
            SliceUsers::KubeletSettling
        }
    }

    /// Returns an order for the next MIG change of each GPU, if the change can start now.
    fn order_changes(
        &mut self,
        hardware: &Hardware,
        partitions: &BTreeMap<String, Partition>,
        mut changes: BTreeMap<String, Vec<MigChange>>,
        users: SliceUsers,
        now: Instant,
    ) -> Vec<MigOrder> {
        self.mig_progress.retain(|uuid, _| hardware.gpus.contains_key(uuid));
        let mut orders = Vec::new();
        for (uuid, KnownGpu { gpu, health, observed, .. }) in &hardware.gpus {
            let left = changes.remove(uuid).unwrap_or_default();
            let partition = partitions.get(uuid);
            if left.is_empty() && !self.mig_progress.contains_key(uuid) {
                continue;
            }
            let mut progress = self.mig_progress.remove(uuid).unwrap_or_else(|| MigProgress::new(partition));
            progress.update(partition, gpu, health.healthy);
            let next = if *observed && health.healthy && !self.quiesces.is_requested(uuid) {
                let served = |device: &str| {
                    self.layouts.get(uuid).is_some_and(|layout| layout.pools.iter().any(|pool| pool.device == device))
                };
                let may = left.iter().filter(|change| progress.can_start(change, now));
                next_step(may, gpu, users, served, |device| self.check_daemon_exited(device))
            } else {
                NextStep::Nothing
            };
            progress.record_plan(uuid, &left, &next);
            if let Some(done) = progress.take_completed(&left) {
                self.pending_events.push(NodeEvent {
                    warning: false,
                    reason: "MigChanged",
                    note: format!("GPU {uuid}: {done}"),
                    regarding: None,
                    related: EventSubject::device(uuid),
                });
            }
            if let NextStep::Do(change) = next {
                orders.push(MigOrder { gpu: uuid.clone(), change });
            }
            self.mig_progress.insert(uuid.clone(), progress);
        }
        orders
    }

    /// Checks that the MPS daemon of a device has exited and will not restart. The error is a
    /// clause that states which condition is not met.
    fn check_daemon_exited(&self, device: &str) -> Result<(), String> {
        if self.adopted.contains_key(device) {
            return Err("an MPS daemon from an earlier agent still serves the device".into());
        }
        if self.view.status.daemons.contains_key(device) {
            return Err(if self.view.alive {
                "the MPS daemon has not exited yet".into()
            } else {
                "the MPS daemon may still run: the MPS host does not answer".into()
            });
        }
        if self.acknowledged.has_applied_removal(device) {
            Ok(())
        } else {
            Err("the MPS host has not yet read the request to stop the MPS daemon".into())
        }
    }

    /// Removes from the decision the slices that a change in progress removes, even if the spec
    /// includes these slices again.
    fn exclude_slices_being_removed(&self, mut decided: LayoutDecision) -> LayoutDecision {
        for (uuid, progress) in self.mig_progress.iter().filter(|(_, progress)| progress.is_in_progress()) {
            decided.applied = false;
            if let Some(layout) = decided.layouts.get_mut(uuid) {
                layout.pools.retain(|pool| !progress.is_removing(uuid, &pool.device));
                layout.daemons.retain(|device, _| !progress.is_removing(uuid, device));
            }
        }
        decided
    }

    /// Puts the old layout of a GPU into the decision again after the attempts to turn MIG mode on
    /// have failed. Without the old layout, the GPU would serve no slices until the next attempt.
    fn restore_old_layouts(&mut self, mut decided: LayoutDecision, now: Instant) -> LayoutDecision {
        let LayoutDecision { layouts, changes, .. } = &mut decided;
        let enables = |uuid: &String| changes.get(uuid).is_some_and(|changes| changes.contains(&MigChange::Mode(true)));
        let progress = &self.mig_progress;
        self.replaced.retain(|uuid, _| enables(uuid) || progress.get(uuid).is_some_and(MigProgress::is_in_progress));
        for (uuid, layout) in layouts.iter_mut().filter(|(uuid, _)| enables(uuid)) {
            if let Some(before) = self.layouts.get(uuid).filter(|before| !before.pools.is_empty()) {
                self.replaced.entry(uuid.clone()).or_insert_with(|| before.clone());
            }
            let has_failed = progress.get(uuid).is_some_and(|progress| progress.has_failed_to_enable(now));
            if let Some(before) = self.replaced.get(uuid).filter(|_| has_failed) {
                layout.clone_from(before);
            }
        }
        decided
    }

    /// Delays the removal of slices until the agent has listed them as Unhealthy for
    /// [`REMOVAL_DELAY`]. If the kubelet allocates one of the slices during the delay, the change
    /// waits.
    fn delay_removals(&mut self, mut decided: LayoutDecision, now: Instant) -> LayoutDecision {
        let mut withdrawing = BTreeMap::new();
        for (uuid, after) in &mut decided.layouts {
            let Some(before) = self.layouts.get(uuid) else { continue };
            let going = removed_or_changed_slices(before, after);
            let since = |slice: &(String, String)| self.withdrawing.get(slice).copied().unwrap_or(now);
            if going.iter().any(|slice| now.saturating_duration_since(since(slice)) < REMOVAL_DELAY) {
                after.clone_from(before);
                decided.steps.retain(|step| step.gpu != *uuid || step.result != STEP_DONE);
                decided.applied = false;
                withdrawing.extend(going.into_iter().map(|slice| (slice.clone(), since(&slice))));
            }
        }
        self.withdrawing = withdrawing;
        decided
    }

    /// Updates the steps. Keeps completed steps until the next change of a layout, and replaces all
    /// other steps.
    fn record_steps(&mut self, steps: Vec<StepStatus>, changed: bool) {
        if changed && steps.iter().any(|step| step.result == STEP_DONE) {
            self.steps = steps;
            return;
        }
        let open = |new: &StepStatus, old: &StepStatus| new.gpu == old.gpu && new.result != STEP_DONE;
        self.steps.retain(|old| old.result == STEP_DONE && !steps.iter().any(|new| open(new, old) || new == old));
        self.steps.extend(steps);
    }

    /// Removes the adopted daemons that the layouts now include, or that no pod uses.
    fn release_adopted_daemons(&mut self, usage: Option<&SliceUsage>) {
        let Some(usage) = usage else { return };
        self.adopted.retain(|device, _| {
            let used = usage.slices_of_devices(&BTreeSet::from([device.as_str()])).next().is_some();
            let wanted = self.layouts.values().any(|layout| layout.daemons.contains_key(device));
            used && !wanted
        });
        self.adopted_allocations.retain(|_, allocation| self.adopted.contains_key(&allocation.device));
    }

    /// Returns the daemons and doors that the MPS host must run.
    fn desired_mps_state(&self, hardware: &Hardware, allocations: &Allocations) -> Desired {
        let mut daemons = self.adopted.clone();
        let held: BTreeSet<&str> =
            allocations.iter().flat_map(|(_, allocation)| &allocation.devices).map(String::as_str).collect();
        for (uuid, layout) in self.layouts.iter().filter(|(uuid, _)| !self.quiesces.stops_daemons(uuid)) {
            // A daemon cannot start on a missing GPU, but a daemon that already runs may still have
            // clients.
            let missing = hardware.gpus.get(uuid).is_some_and(|known| known.missing);
            if missing && !layout.daemons.keys().any(|device| held.contains(device.as_str())) {
                continue;
            }
            daemons.extend(layout.daemons.iter().map(|(device, daemon)| (device.clone(), daemon.clone())));
        }
        let mut doors = self.adopted_allocations.clone();
        let known = allocations.iter().filter_map(|(id, allocation)| Some((id.clone(), allocation.door_settings()?)));
        if doors.is_empty() {
            // `collect` is much faster than `extend` here, because the ids are sorted.
            doors = known.collect();
        } else {
            doors.extend(known);
        }
        Desired { version: wire::FILE_FORMAT_VERSION, daemons, allocations: doors }
    }

    /// Returns the slices in use. Until the kubelet has listed its pods, only the agent's own
    /// allocations count as in use. Returns `None` if there is neither a list nor a checkpoint.
    fn slices_in_use(&self, allocations: &Allocations) -> Option<SliceUsage> {
        let known = self.pod_resources.is_some() || self.has_checkpoint;
        known.then(|| SliceUsage::new(self.pod_resources.as_deref().unwrap_or_default(), allocations))
    }

    fn device_lists(
        &self,
        hardware: &Hardware,
        pending: &PendingAllocations,
        in_use: Option<&SliceUsage>,
    ) -> BTreeMap<ResourceName, DeviceList> {
        let spec = self.spec.as_ref().map(|(_, spec)| spec);
        let withheld = cordon::withheld_slices(spec, &self.layouts, in_use, pending);
        let mut lists: BTreeMap<ResourceName, DeviceList> = BTreeMap::new();
        for (uuid, layout) in &self.layouts {
            let Some(known) = hardware.gpus.get(uuid) else { continue };
            for pool in &layout.pools {
                let Ok(name) = ResourceName::parse(&pool.resource) else { continue };
                let serves = self.check_can_serve(known, layout, pool).is_ok();
                let device = |id: String| {
                    let slice = (pool.resource.clone(), id.clone());
                    let healthy = serves && !self.withdrawing.contains_key(&slice) && !withheld.contains(&slice);
                    Some(Device { id: DeviceId::parse(&id).ok()?, healthy, numa: known.gpu.numa })
                };
                lists.entry(name).or_default().extend(pool.ids().filter_map(device));
            }
        }
        lists
    }

    /// Checks that slices of this pool can be allocated now. The error is a clause that states why
    /// the slices cannot be allocated.
    fn check_can_serve(&self, known: &KnownGpu, layout: &Layout, pool: &Pool) -> Result<(), String> {
        if !known.health.healthy {
            return Err(known.health.message.clone());
        }
        if let Some(health) = known.instances.get(&pool.device) {
            return Err(health.message.clone());
        }
        let instances = known.gpu.mig.iter().flat_map(|mig| &mig.instances);
        if pool.device != known.gpu.uuid && !instances.clone().any(|instance| instance.uuid == pool.device) {
            return Err("the MIG instance no longer exists".into());
        }
        match pool.kind {
            PoolKind::Mps { .. } if self.absences.is_absence_tolerated(&pool.device) => Ok(()),
            PoolKind::Mps { .. } => {
                let settings = layout.daemons.get(&pool.device).ok_or("the device has no MPS daemon")?;
                status::check_daemon(&self.view, &pool.device, settings)?;
                if self.acknowledged.has_applied_settings(&pool.device) {
                    Ok(())
                } else {
                    Err("the MPS host has not read the latest settings yet".into())
                }
            }
            // Wait until the MPS host confirms the exit of the daemon, because only then the MPS
            // host has restored the compute mode. A dead MPS host leaves the mode
            // `EXCLUSIVE_PROCESS`.
            PoolKind::Whole | PoolKind::TimeSliced => self.check_daemon_exited(&pool.device),
        }
    }

    fn not_ready_reason(&self, desired: &Desired) -> Option<String> {
        if !self.inventoried && !self.quiesces.needs_nvml_closed() {
            return Some("NVML has not answered yet".into());
        }
        if !self.view.alive && !desired.daemons.keys().all(|device| self.absences.is_absence_tolerated(device)) {
            return Some("the MPS host does not answer".into());
        }
        None
    }
}

/// Returns the slices of the old layout that the new layout removes or changes, as resource and id.
fn removed_or_changed_slices(before: &Layout, after: &Layout) -> Vec<(String, String)> {
    let slices = before.pools.iter().flat_map(|pool| pool.ids().map(|id| (pool.resource.clone(), id)));
    slices.filter(|(resource, id)| !is_slice_unchanged(Some(before), after, resource, id)).collect()
}

/// Returns the UUIDs of the GPUs that a spec has partitioned by MIG, if the partition still exists.
/// A GPU also remains in the set while a change of it is in progress.
fn mig_partitioned_gpus(
    hardware: &Hardware,
    partitions: &BTreeMap<String, Partition>,
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

/// Returns the processes on each GPU, except MPS daemons and servers and their clients.
fn foreign_processes(hardware: &Hardware, view: &HostView) -> BTreeMap<String, Vec<Process>> {
    let daemons = || view.status.daemons.values();
    let mut ours: BTreeSet<u32> = daemons().flat_map(|daemon| [daemon.pid, daemon.server_pid]).flatten().collect();
    ours.extend(daemons().flat_map(|daemon| &daemon.clients).map(|client| client.pid));
    let of = |known: &KnownGpu| -> Vec<Process> {
        known.processes.iter().filter(|process| !ours.contains(&process.pid)).cloned().collect()
    };
    hardware.gpus.iter().map(|(uuid, known)| (uuid.clone(), of(known))).collect()
}
