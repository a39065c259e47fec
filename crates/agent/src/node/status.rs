//! `GpuNode.status` from what is known. Pure.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::GpuNodeSpec;
use cleave_api::gpunode::{
    AllocationStatus, FindingStatus, GpuNodeStatus, GpuStatus, Health, MigInstanceStatus, MigProfileStatus, MigStatus,
    MpsStatus, SliceStatus, StepStatus, Summary,
};
use cleave_api::names::{CONDITION_APPLIED, CONDITION_GPUS_HEALTHY, CONDITION_READY, STEP_DONE};
use cleave_gpu::mps::wire::{DaemonState, DaemonStatus, Enforcement};
use cleave_gpu::nvml::{Gpu, Mig, MigInstance, MigProfile};
use cleave_kubelet::{DeviceList, HeldDevices, ResourceName};
use cleave_plan::mps::{context, sms};
use cleave_plan::units::{Percent, Sms};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::allocation::usage::{Allocations, Usage};
use crate::allocation::{Allocation, MpsLimits, allocation_id};
use crate::gpu::hardware::{Driver, Hardware, KnownGpu};
use crate::gpu::layout::{Layout, parse_id};
use crate::mps::View;
use crate::node::absence::Absences;
use crate::object::Object;

/// Reasons of a `GpuNode`'s conditions.
pub mod reason {
    /// Ready: every GPU and daemon serves.
    pub const SERVING: &str = "Serving";
    /// Not Ready: NVML has not answered yet.
    pub const STARTING: &str = "Starting";
    /// Not Ready: no driver, or one that does not answer.
    pub const NO_DRIVER: &str = "NoDriver";
    /// Not Ready: a driver, and no GPU.
    pub const NO_GPU: &str = "NoGpu";
    /// Not Ready: GPUs that cannot serve.
    pub const GPU_UNHEALTHY: &str = "GpuUnhealthy";
    /// Not Ready: MPS daemons that cannot serve.
    pub const MPS_UNAVAILABLE: &str = cleave_api::names::HEALTH_MPS_UNAVAILABLE;
    /// Applied: the node is as the spec says.
    pub const APPLIED: &str = "Applied";
    /// Not Applied: pods hold what would change.
    pub const WAITING: &str = "Waiting";
    /// Not Applied: the spec cannot be had.
    pub const REFUSED: &str = "Refused";
    /// Not Applied: no spec has been read.
    pub const NO_SPEC: &str = "NoSpec";
    /// Not Applied: the object is not what its definition says.
    pub const MALFORMED: &str = "Malformed";
    /// GPUs healthy: all of them.
    pub const HEALTHY: &str = "Healthy";
}

/// All that a status is made of.
#[derive(Debug, Clone, Copy)]
pub struct Facts<'a> {
    /// The GPUs.
    pub hardware: &'a Hardware,
    /// NVML has answered.
    pub inventoried: bool,
    /// The object.
    pub object: &'a Object,
    /// The spec in force, and its generation.
    pub spec: Option<&'a (i64, GpuNodeSpec)>,
    /// The node is as the spec says.
    pub applied: bool,
    /// What GPUs are served as.
    pub layouts: &'a BTreeMap<String, Layout>,
    /// What the kubelet is told.
    pub lists: &'a BTreeMap<ResourceName, DeviceList>,
    /// What is in use, once that is known.
    pub usage: Option<&'a Usage>,
    /// What the kubelet lists.
    pub held: &'a [HeldDevices],
    /// Why the kubelet does not list it, if so.
    pub held_error: Option<&'a str>,
    /// What was given out.
    pub allocations: &'a Allocations,
    /// The MPS host.
    pub view: &'a View,
    /// Daemons that are away for a moment.
    pub absences: &'a Absences,
    /// Steps.
    pub steps: &'a [StepStatus],
    /// Tenants that left their shares.
    pub findings: &'a [FindingStatus],
    /// Boot id.
    pub boot_id: &'a str,
}

/// Why the daemon of a device cannot serve, if so.
pub fn daemon_trouble(view: &View, device: &str) -> Result<(), String> {
    if !view.alive {
        return Err("the MPS host does not answer".into());
    }
    match view.status.daemons.get(device) {
        Some(DaemonStatus { state: DaemonState::Active, .. }) => Ok(()),
        Some(DaemonStatus { state, message, .. }) if message.is_empty() => {
            Err(format!("the MPS daemon is in state {state:?}"))
        }
        Some(DaemonStatus { state, message, .. }) => Err(format!("the MPS daemon is in state {state:?}: {message}")),
        None => Err(match &view.error {
            Some(error) => format!("the MPS host says: {error}"),
            None => "the MPS host has not started its daemon yet".into(),
        }),
    }
}

/// The status; its conditions have no times yet.
pub fn build(facts: &Facts<'_>) -> GpuNodeStatus {
    let Facts { hardware, spec, applied, steps, boot_id, .. } = *facts;
    let gpus: Vec<GpuStatus> = hardware.by_index().into_iter().map(|known| gpu(facts, known)).collect();
    let generation = match (facts.object, spec) {
        (Object::Present(generation, _), _) | (_, Some((generation, _))) => *generation,
        _ => 0,
    };
    let matches = applied && facts.inventoried;
    GpuNodeStatus {
        observed_generation: generation,
        plan_id: spec.filter(|_| matches).map(|(_, spec)| spec.plan_id.clone()).unwrap_or_default(),
        agent_version: env!("CARGO_PKG_VERSION").into(),
        driver: hardware.driver.version().unwrap_or_default().to_owned(),
        boot_id: boot_id.to_owned(),
        conditions: vec![
            condition(CONDITION_READY, generation, ready(facts, &gpus)),
            condition(CONDITION_APPLIED, generation, is_applied(facts)),
            condition(CONDITION_GPUS_HEALTHY, generation, gpus_healthy(facts)),
        ],
        summary: Some(Summary::of(&gpus)),
        models: Vec::new(),
        gpus,
        steps: steps.to_vec(),
        findings: facts.findings.to_vec(),
    }
    .compact()
}

fn gpu(facts: &Facts<'_>, known: &KnownGpu) -> GpuStatus {
    let KnownGpu { gpu, health, instances, .. } = known;
    let layout = facts.layouts.get(&gpu.uuid);
    let devices = devices(gpu, layout);
    let mut health = health.clone();
    let daemons: Vec<&String> = layout.iter().flat_map(|layout| layout.daemons.keys()).collect();
    let mps: Vec<MpsStatus> = daemons.iter().map(|device| daemon(facts.view, device)).collect();
    if health.healthy {
        let starting = |device: &str| {
            facts.view.alive && facts.view.status.daemons.get(device).is_none_or(|d| d.state == DaemonState::Starting)
        };
        let trouble = daemons
            .iter()
            .filter(|device| !starting(device) && !facts.absences.is_short(device))
            .find_map(|device| daemon_trouble(facts.view, device).err());
        if let Some(message) = trouble {
            health = Health { healthy: false, reason: reason::MPS_UNAVAILABLE.into(), message, ..Health::default() };
        }
    }
    GpuStatus {
        uuid: gpu.uuid.clone(),
        index: gpu.index,
        model: gpu.model.clone(),
        memory_mib: gpu.memory.0,
        sms: gpu.sms.0,
        pci: gpu.pci.clone(),
        numa: gpu.numa,
        mig: gpu.mig.as_ref().map(|of| mig(of, instances)),
        mode: layout.map(|layout| layout.mode.as_str().to_owned()).unwrap_or_default(),
        slices: layout.iter().flat_map(|layout| &layout.pools).map(|pool| slices(facts, gpu, pool)).collect(),
        allocations: allocations(facts, gpu, &devices),
        health,
        mps,
    }
}

/// The GPU and its MIG devices, those that slices are of though they are there no more included.
fn devices<'a>(gpu: &'a Gpu, layout: Option<&'a Layout>) -> BTreeSet<&'a str> {
    let mut devices = BTreeSet::from([gpu.uuid.as_str()]);
    devices.extend(gpu.mig.iter().flat_map(|mig| &mig.instances).map(|instance| instance.uuid.as_str()));
    devices.extend(layout.iter().flat_map(|layout| &layout.pools).map(|pool| pool.device.as_str()));
    devices.remove("");
    devices
}

fn mig(mig: &Mig, unhealthy: &BTreeMap<String, Health>) -> MigStatus {
    let Mig { enabled, pending, profiles, instances } = mig;
    let profile = |profile: &MigProfile| {
        let MigProfile { id: _, name, memory, sms, slices: _, size, starts } = profile;
        MigProfileStatus { name: name.clone(), memory_mib: memory.0, sms: sms.0, size: *size, starts: starts.clone() }
    };
    let instance = |instance: &MigInstance| {
        let MigInstance { uuid, profile, start, gpu_instance, compute_instance } = instance.clone();
        let health = unhealthy.get(&uuid).cloned();
        MigInstanceStatus { uuid, profile, start, gpu_instance, compute_instance, health }
    };
    MigStatus {
        enabled: *enabled,
        pending: *pending,
        profiles: profiles.iter().map(profile).collect(),
        instances: instances.iter().map(instance).collect(),
    }
}

fn slices(facts: &Facts<'_>, gpu: &Gpu, pool: &crate::gpu::layout::Pool) -> SliceStatus {
    let device = BTreeSet::from([pool.device.as_str()]);
    let of_pool = |id: &str| parse_id(id).is_some_and(|(device, number)| pool.holds(device, number));
    // What nobody knows to be free is not: pods are let through to what is.
    let in_use = facts.usage.map_or(pool.count as usize, |usage| {
        usage.of(&device).filter(|(resource, id, _)| *resource == pool.resource && of_pool(id)).count()
    });
    let unhealthy = facts
        .lists
        .get(pool.resource.as_str())
        .map_or(0, |list| list.iter().filter(|device| !device.healthy && of_pool(device.id.as_str())).count());
    let instance = gpu.mig.iter().flat_map(|mig| &mig.instances).find(|instance| instance.uuid == pool.device);
    SliceStatus {
        device: pool.device.clone(),
        resource: pool.resource.clone(),
        start: instance.map(|instance| instance.start),
        total: pool.count,
        in_use: count(in_use),
        unhealthy: count(unhealthy),
    }
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// What containers hold of a GPU, a row for each container, resource and device.
fn allocations(facts: &Facts<'_>, gpu: &Gpu, devices: &BTreeSet<&str>) -> Vec<AllocationStatus> {
    let mut rows = Vec::new();
    for held in facts.held {
        let mut by_device: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for id in &held.ids {
            if let Some((device, _)) = parse_id(id).filter(|(device, _)| devices.contains(device)) {
                by_device.entry(device).or_default().push(id.clone());
            }
        }
        let allocation = facts.allocations.get(&allocation_id(&held.resource, &held.ids));
        for (device, mut ids) in by_device {
            ids.sort_by_key(|id| parse_id(id).map(|(_, number)| number));
            let limits = allocation.and_then(|allocation| allocation.mps);
            let whole = gpu.uuid == device;
            // Of a MIG instance NVML says the SMs by its profile.
            let total = if whole { Some(gpu.sms) } else { instance_sms(gpu, device) };
            let sms = limits.and_then(|limits| limited(limits, total));
            let memory_mib = limits.and_then(|limits| limits.memory_mib);
            rows.push(AllocationStatus {
                pod: format!("{}/{}", held.namespace, held.pod),
                container: held.container.clone(),
                resource: held.resource.clone(),
                device: device.to_owned(),
                ids,
                threads: limits.and_then(|limits| limits.threads),
                sms: sms.map(|sms| sms.0),
                memory_mib,
                // Measured on whole GPUs.
                context_mib: sms
                    .filter(|_| whole && memory_mib.is_some())
                    .and_then(|sms| context(gpu.compute_capability, facts.hardware.driver.version()?, sms))
                    .map(|memory| memory.0),
                clients: allocation.map_or(0, |allocation| clients(facts.view, device, allocation)),
            });
        }
    }
    rows.sort_by(|a, b| {
        (&a.pod, &a.container, &a.resource, &a.device).cmp(&(&b.pod, &b.container, &b.resource, &b.device))
    });
    rows
}

fn limited(limits: MpsLimits, total: Option<Sms>) -> Option<Sms> {
    let threads = limits.threads.and_then(|threads| Percent::new(threads).ok());
    total.map(|total| sms(threads, total))
}

fn instance_sms(gpu: &Gpu, device: &str) -> Option<Sms> {
    let mig = gpu.mig.as_ref()?;
    let instance = mig.instances.iter().find(|instance| instance.uuid == device)?;
    mig.profiles.iter().find(|profile| profile.name == instance.profile).map(|profile| profile.sms)
}

fn clients(view: &View, device: &str, allocation: &Allocation) -> u32 {
    let id = allocation.id();
    let of_allocation = |client: &&cleave_gpu::mps::wire::Client| client.allocation.as_deref() == Some(id.as_str());
    view.status.daemons.get(device).map_or(0, |daemon| count(daemon.clients.iter().filter(of_allocation).count()))
}

fn daemon(view: &View, device: &str) -> MpsStatus {
    let status = view.status.daemons.get(device).filter(|_| view.alive);
    MpsStatus {
        device: device.to_owned(),
        state: status.map(|daemon| format!("{:?}", daemon.state)).unwrap_or_default(),
        pid: status.and_then(|daemon| daemon.pid),
        door: match status.map(|daemon| daemon.enforcement) {
            Some(Enforcement::Hard) => "Hard".into(),
            Some(Enforcement::Advisory) => "Advisory".into(),
            None => String::new(),
        },
        restarts: status.map_or(0, |daemon| daemon.restarts),
        message: match status {
            Some(daemon) => daemon.message.clone(),
            None => daemon_trouble(view, device).err().unwrap_or_default(),
        },
    }
}

struct Verdict {
    status: &'static str,
    reason: &'static str,
    message: String,
}

fn verdict(status: bool, reason: &'static str, message: impl Into<String>) -> Verdict {
    Verdict { status: if status { "True" } else { "False" }, reason, message: message.into() }
}

fn ready(facts: &Facts<'_>, gpus: &[GpuStatus]) -> Verdict {
    match &facts.hardware.driver {
        Driver::Unknown => return verdict(false, reason::STARTING, "NVML has not answered yet"),
        Driver::Missing(why) => return verdict(false, reason::NO_DRIVER, why.clone()),
        Driver::Present(_) if gpus.is_empty() && !facts.inventoried => {
            return verdict(false, reason::STARTING, "no GPU has answered NVML yet");
        }
        Driver::Present(version) if gpus.is_empty() && facts.hardware.unnamed.is_empty() => {
            return verdict(false, reason::NO_GPU, format!("driver {version} finds no GPU"));
        }
        Driver::Present(_) => {}
    }
    let trouble = |is: fn(&Health) -> bool| {
        let said: Vec<String> = gpus
            .iter()
            .filter(|gpu| is(&gpu.health))
            .map(|gpu| format!("GPU {} ({}): {}", gpu.index, gpu.uuid, gpu.health.message))
            .collect();
        (!said.is_empty()).then(|| said.join("; "))
    };
    let sick = trouble(|health| !health.healthy && health.reason != reason::MPS_UNAVAILABLE);
    let sick: Vec<String> = unnamed(facts.hardware).chain(sick).collect();
    if !sick.is_empty() {
        return verdict(false, reason::GPU_UNHEALTHY, sick.join("; "));
    }
    if let Some(message) = trouble(|health| !health.healthy) {
        return verdict(false, reason::MPS_UNAVAILABLE, message);
    }
    verdict(true, reason::SERVING, "")
}

/// GPUs that NVML lists and that have never said which they are: they have no row of their own.
fn unnamed(hardware: &Hardware) -> impl Iterator<Item = String> {
    hardware.unnamed.iter().map(|(index, why)| format!("GPU {index}: {why}"))
}

/// Of the GPUs alone: what MPS does is another condition's. One that is to be reset some time is
/// healthy, and is told.
fn gpus_healthy(facts: &Facts<'_>) -> Verdict {
    if !facts.inventoried {
        return verdict(false, reason::STARTING, "NVML has not answered yet");
    }
    let (mut sick, mut pending): (Vec<String>, _) = (unnamed(facts.hardware).collect(), Vec::new());
    for KnownGpu { gpu, health, instances, .. } in facts.hardware.by_index() {
        let name = format!("GPU {} ({})", gpu.index, gpu.uuid);
        let of_gpu = (!health.message.is_empty()).then(|| format!("{name}: {}", health.message));
        let list = if health.healthy { &mut pending } else { &mut sick };
        list.extend(of_gpu);
        sick.extend(instances.iter().map(|(device, health)| format!("{device} of {name}: {}", health.message)));
    }
    match (sick.is_empty(), pending.is_empty()) {
        (false, _) => {
            verdict(false, reason::GPU_UNHEALTHY, sick.into_iter().chain(pending).collect::<Vec<_>>().join("; "))
        }
        (true, false) => verdict(true, crate::gpu::health::reason::RESET_PENDING, pending.join("; ")),
        (true, true) => verdict(true, reason::HEALTHY, ""),
    }
}

fn is_applied(facts: &Facts<'_>) -> Verdict {
    if let Object::Malformed(why) = facts.object {
        return verdict(false, reason::MALFORMED, format!("the last sound spec stays in force: {why}"));
    }
    if facts.spec.is_none() {
        let why = match facts.object {
            Object::Missing => "there is no GpuNode of this node yet: the operator makes it",
            Object::Present(..) => "the operator has not planned this node yet",
            Object::Unknown | Object::Malformed(_) => "the API server has not answered yet",
        };
        return verdict(false, reason::NO_SPEC, why);
    }
    if !facts.inventoried {
        return verdict(false, reason::STARTING, "NVML has not answered yet");
    }
    if facts.applied {
        return verdict(true, reason::APPLIED, "");
    }
    let open: Vec<&StepStatus> = facts.steps.iter().filter(|step| step.result != STEP_DONE).collect();
    let refused = open.iter().any(|step| step.result == cleave_api::names::STEP_REFUSED);
    let mut said: Vec<String> = open.iter().map(|step| format!("{}: {}", step.gpu, step.message)).collect();
    said.extend(facts.held_error.map(|error| format!("the kubelet does not say which slices are in use: {error}")));
    if said.is_empty() {
        said.push("the GPUs are being changed".into());
    }
    verdict(false, if refused { reason::REFUSED } else { reason::WAITING }, said.join("; "))
}

fn condition(type_: &str, generation: i64, verdict: Verdict) -> Condition {
    let Verdict { status, reason, message } = verdict;
    Condition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message,
        observed_generation: Some(generation),
        last_transition_time: Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH),
    }
}

/// Gives conditions their times: that of `before` where the verdict is the same, else `now`.
pub fn with_times(mut status: GpuNodeStatus, before: &[Condition], now: k8s_openapi::jiff::Timestamp) -> GpuNodeStatus {
    for condition in &mut status.conditions {
        let same = before.iter().find(|old| old.type_ == condition.type_ && old.status == condition.status);
        condition.last_transition_time = same.map_or(Time(now), |old| old.last_transition_time.clone());
    }
    status
}

/// Whether all that is to be told is that containers have been given more, or run more or fewer
/// clients: nothing that anybody waits for.
pub fn only_more_is_given(told: &GpuNodeStatus, wanted: &GpuNodeStatus) -> bool {
    let bare = |status: &GpuNodeStatus| {
        let mut bare = GpuNodeStatus { summary: None, ..status.clone() };
        for gpu in &mut bare.gpus {
            gpu.allocations = Vec::new();
            gpu.slices.iter_mut().for_each(|slice| slice.in_use = 0);
        }
        bare
    };
    let same = |one: &AllocationStatus, other: &AllocationStatus| {
        let clients = other.clients;
        *other == AllocationStatus { clients, ..one.clone() }
    };
    let keeps = |(told, wanted): (&GpuStatus, &GpuStatus)| {
        told.allocations.iter().all(|row| wanted.allocations.iter().any(|other| same(row, other)))
            && told.slices.iter().zip(&wanted.slices).all(|(told, wanted)| told.in_use <= wanted.in_use)
    };
    told.gpus.iter().zip(&wanted.gpus).all(keeps) && bare(told) == bare(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(pods: &[&str], change: impl FnOnce(&mut GpuStatus)) -> GpuNodeStatus {
        let row = |pod: &&str| AllocationStatus { pod: (*pod).to_owned(), ..AllocationStatus::default() };
        let slices = vec![SliceStatus { total: 10, in_use: count(pods.len()), ..SliceStatus::default() }];
        let mut gpu = GpuStatus { allocations: pods.iter().map(row).collect(), slices, ..GpuStatus::default() };
        change(&mut gpu);
        let gpus = vec![gpu];
        GpuNodeStatus { summary: Some(Summary::of(&gpus)), gpus, ..GpuNodeStatus::default() }
    }

    #[test]
    fn only_what_nobody_waits_for_is_gathered() {
        let before = told(&["a", "b"], |_| {});
        for (gathered, what, after) in [
            (true, "one more", told(&["a", "b", "c"], |_| {})),
            (true, "a client", told(&["a", "b"], |gpu| gpu.allocations[0].clients = 1)),
            (false, "one less", told(&["a"], |_| {})),
            (false, "one less and one more", told(&["a", "c"], |_| {})),
            (false, "fewer in use", told(&["a", "b"], |gpu| gpu.slices[0].in_use = 1)),
            (false, "another device", told(&["a", "b"], |gpu| gpu.allocations[0].device = "GPU-1".into())),
            (false, "a share that is not healthy", told(&["a", "b", "c"], |gpu| gpu.slices[0].unhealthy = 1)),
            (false, "health", told(&["a", "b", "c"], |gpu| gpu.health.reason = "XidError".into())),
            (false, "a GPU less", GpuNodeStatus { summary: before.summary.clone(), ..GpuNodeStatus::default() }),
            (false, "a plan", GpuNodeStatus { plan_id: "p".into(), ..told(&["a", "b", "c"], |_| {}) }),
        ] {
            assert_eq!(only_more_is_given(&before, &after), gathered, "{what}");
        }
    }
}
