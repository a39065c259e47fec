//! The decision: from what is known of the node to what is done about it.
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use cleave_api::gpunode::{GpuNodeStatus, Partition, StepStatus};
use cleave_api::names::{STEP_DONE, STEP_WAITING};
use cleave_gpu::mps::wire::{self, Desired};
use cleave_gpu::nvml::Process;
use cleave_kubelet::{Device, DeviceId, DeviceList, ResourceName};

use super::diff::{Decision, Rules, decide, keeps};
use super::status::{self, Facts};
use super::{Actions, Node, WITHDRAW, cordon, faults};
use crate::allocation::pending::PendingAllocations;
use crate::allocation::table::AllocationTable;
use crate::allocation::usage::{Allocations, Usage};
use crate::checkpoint::Checkpoint;
use crate::event::NodeEvent;
use crate::gpu::hardware::{Hardware, KnownGpu};
use crate::gpu::layout::{Kind, Layout, Pool};
use crate::gpu::mig::{Change, Next, Order, Trial, next};
use crate::mps::HostView;
use crate::tenants::snapshot::{self, TenantSnapshot};

/// Between the kubelet's lists while slices are in use or a change waits for pods to end (which
/// somebody may wait for), and while none are.
pub(super) const LIST_IN_USE: Duration = Duration::from_secs(1);
const LIST_IDLE: Duration = Duration::from_secs(30);

/// Between looks at processes that are in the way.
const LOOK: Duration = Duration::from_secs(1);

impl Node {
    /// Decides what to do now, and brings the table up to date.
    pub fn reconcile(&mut self, table: &mut AllocationTable, now: Instant) -> Actions {
        let hardware = self.tracker.hardware();
        let in_use = self.in_use(&table.allocations);
        let usage = in_use.as_ref().filter(|_| self.held.is_some());
        let partitions: BTreeMap<String, Partition> = self
            .spec
            .iter()
            .flat_map(|(_, spec)| &spec.gpus)
            .map(|gpu| (gpu.uuid.clone(), gpu.partition.clone()))
            .collect();
        let rules = self.rules(&hardware, &partitions);
        let spec = self.spec.as_ref().map(|(_, spec)| spec);
        let decided = decide(&hardware, spec, &self.layouts, usage, &rules);
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
        let lists = self.lists(&hardware, &table.pending, in_use.as_ref());
        let mut events = self.events(&hardware);
        let pods = faults::Pods {
            held: self.held.as_deref().unwrap_or_default(),
            allocations: &table.allocations,
            pending: &table.pending,
        };
        let faults = self.faults.look(&self.view, &pods, now);
        events.extend(faults.events);
        let waits = self.steps.iter().any(|step| step.result == STEP_WAITING);
        let idle = !waits && usage.is_some_and(Usage::is_empty);
        let look = foreign && self.looked.is_none_or(|at| now.saturating_duration_since(at) >= LOOK);
        if look {
            self.looked = Some(now);
        }
        Actions {
            status: self.status(&hardware, table, &lists, in_use.as_ref(), applied),
            snapshot: self.snapshot(&hardware, table, &rules),
            checkpoint: self.checkpoint(&hardware, &table.allocations),
            unready: self.unready(&desired),
            again: self.again(foreign, faults.again, now),
            lists,
            renew: std::mem::take(&mut self.remembered),
            desired,
            events,
            faults: faults.faults,
            list_every: if idle { LIST_IDLE } else { LIST_IN_USE },
            sweep: self.held.is_some() && self.adopted_allocations.is_empty(),
            orders,
            look,
        }
    }

    /// What decisions about partitions have to respect. Brings up to date which GPUs MIG divides.
    fn rules(&mut self, hardware: &Hardware, partitions: &BTreeMap<String, Partition>) -> Rules {
        self.cut = cut(hardware, partitions, &self.cut, |uuid| self.trials.get(uuid).is_some_and(Trial::is_acting));
        let processes = foreign(hardware, &self.view);
        Rules { keep_mig_mode: self.keep_mig_mode, cut: self.cut.clone(), processes }
    }

    fn status(
        &self,
        hardware: &Hardware,
        table: &AllocationTable,
        lists: &BTreeMap<ResourceName, DeviceList>,
        in_use: Option<&Usage>,
        applied: bool,
    ) -> GpuNodeStatus {
        status::build(&Facts {
            hardware,
            inventoried: self.inventoried,
            object: &self.object,
            spec: self.spec.as_ref(),
            applied,
            layouts: &self.layouts,
            lists,
            usage: in_use,
            held: self.held.as_deref().unwrap_or_default(),
            held_error: self.held_error.as_deref(),
            allocations: &table.allocations,
            view: &self.view,
            absences: &self.absences,
            steps: &self.steps,
            findings: &self.findings,
            boot_id: &self.boot_id,
        })
    }

    fn snapshot(&self, hardware: &Hardware, table: &AllocationTable, rules: &Rules) -> TenantSnapshot {
        TenantSnapshot::new(&snapshot::SnapshotInputs {
            hardware,
            layouts: &self.layouts,
            spec: self.spec.as_ref().map(|(_, spec)| spec),
            view: &self.view,
            held: self.held.as_deref().filter(|_| self.held_error.is_none()),
            allocations: &table.allocations,
            foreign: &rules.processes,
        })
    }

    fn checkpoint(&self, hardware: &Hardware, allocations: &Allocations) -> Checkpoint {
        Checkpoint {
            boot_id: self.boot_id.clone(),
            generation: self.spec.as_ref().map_or(0, |(generation, _)| *generation),
            spec: self.spec.as_ref().map(|(_, spec)| spec.clone()),
            gpus: hardware.by_index().into_iter().map(|known| known.gpu.clone()).collect(),
            layouts: self.layouts.clone(),
            allocations: allocations.iter().map(|(_, allocation)| allocation.clone()).collect(),
            cut: self.cut.clone(),
            health: self.tracker.records(),
        }
    }

    /// When to reconcile again although nothing new is known, if at all.
    fn again(&self, foreign: bool, faults: Option<Duration>, now: Instant) -> Option<Duration> {
        let withdrawn = (!self.withdrawing.is_empty()).then_some(WITHDRAW);
        let tried = self.trials.values().filter_map(|trial| trial.pause(now)).min();
        let absent = self.absences.again(now);
        [withdrawn, foreign.then_some(LOOK), tried, faults, absent].into_iter().flatten().min()
    }

    /// Events since the last time: changes of GPUs, their health and their MPS daemons.
    fn events(&mut self, hardware: &Hardware) -> Vec<NodeEvent> {
        let mut events = std::mem::take(&mut self.news);
        events.extend(self.told_health.news(hardware));
        let devices = self.layouts.values().flat_map(|layout| layout.daemons.keys().cloned()).collect();
        events.extend(self.told.update(devices, &self.view));
        events
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
        // Without the checkpoint of before, what was given out is known only once the kubelet has
        // said it for some time.
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
                self.news.push(NodeEvent {
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

    /// Leaves out what a change that is being made takes away, though it may be wanted again by
    /// now.
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

    /// Holds back what takes slices away until the kubelet has had the time to hear of it. What it
    /// hands out meanwhile blocks the change.
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

    /// What is in use, as far as it may not be given to others. What was given out is known from
    /// the checkpoint before the kubelet has said anything.
    fn in_use(&self, allocations: &Allocations) -> Option<Usage> {
        let known = self.held.is_some() || self.remembers;
        known.then(|| Usage::new(self.held.as_deref().unwrap_or_default(), allocations))
    }

    fn lists(
        &self,
        hardware: &Hardware,
        pending: &PendingAllocations,
        in_use: Option<&Usage>,
    ) -> BTreeMap<ResourceName, DeviceList> {
        let spec = self.spec.as_ref().map(|(_, spec)| spec);
        let closed = cordon::closed(spec, &self.layouts, in_use, pending);
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

/// The GPUs that a spec has cut by MIG, and that are not whole again. What a change makes of one is
/// known when it has ended.
fn cut(
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

/// The processes on each GPU that are not of its MPS daemons: those know their clients, and a
/// client's allocation is known.
fn foreign(hardware: &Hardware, view: &HostView) -> BTreeMap<String, Vec<Process>> {
    let daemons = || view.status.daemons.values();
    let mut ours: BTreeSet<u32> = daemons().flat_map(|daemon| [daemon.pid, daemon.server_pid]).flatten().collect();
    ours.extend(daemons().flat_map(|daemon| &daemon.clients).map(|client| client.pid));
    let of = |known: &KnownGpu| -> Vec<Process> {
        known.processes.iter().filter(|process| !ours.contains(&process.pid)).cloned().collect()
    };
    hardware.gpus.iter().map(|(uuid, known)| (uuid.clone(), of(known))).collect()
}
