//! Builds `GpuNode.status`. Pure.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::GpuNodeSpec;
use cleave_api::gpunode::{
    AllocationStatus, FindingStatus, GpuNodeStatus, GpuStatus, Health, MigInstanceStatus, MigProfileStatus, MigStatus,
    MpsStatus, SliceStatus, StepStatus, Summary, UnidentifiedGpuStatus,
};
use cleave_api::names::{
    CONDITION_APPLIED, CONDITION_GPUS_HEALTHY, CONDITION_GPUS_PRESENT, CONDITION_LIMITS_ENFORCED, CONDITION_READY,
    STEP_DONE, daemon_state, door,
};
use cleave_gpu::mps::drivers::DriverEvidence;
use cleave_gpu::mps::wire::{DaemonSettings, DaemonState, DaemonStatus, Enforcement};
use cleave_gpu::nvml::{Gpu, MigInstance, MigProfile, MigState};
use cleave_kubelet::{ContainerDevices, DeviceList, ResourceName};
use cleave_plan::mps::{context_memory, usable_sms};
use cleave_plan::units::{Percent, Sms};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::allocation::usage::{Allocations, SliceUsage};
use crate::allocation::{Allocation, MpsLimits, allocation_id};
use crate::gpu::hardware::{DriverState, Hardware, KnownGpu};
use crate::gpu::layout::{Layout, parse_slice_id};
use crate::mps::HostView;
use crate::node::absence::DaemonAbsences;
use crate::node::quiesce::Quiesces;
use crate::object::GpuNodeState;

/// Reasons for the conditions of a `GpuNode`.
pub mod reason {
    /// `Ready` is True: every GPU and every MPS daemon can serve.
    pub const SERVING: &str = "Serving";
    /// A condition is False because NVML has not answered yet.
    pub const STARTING: &str = "Starting";
    /// `Ready` or `GpusPresent` is False: no driver is installed, or the driver does not answer.
    pub const NO_DRIVER: &str = "NoDriver";
    /// `Ready` is False: the driver finds no GPU.
    pub const NO_GPU: &str = "NoGpu";
    /// `Ready` or `GpusHealthy` is False: a GPU cannot serve.
    pub const GPU_UNHEALTHY: &str = "GpuUnhealthy";
    /// `Ready` is False: an MPS daemon cannot serve.
    pub const MPS_UNAVAILABLE: &str = cleave_api::names::HEALTH_MPS_UNAVAILABLE;
    /// `Applied` is True: the node matches the spec.
    pub const APPLIED: &str = "Applied";
    /// `Applied` is False: a change is in progress, has failed, or waits, for example for pods that
    /// use slices.
    pub const WAITING: &str = "Waiting";
    /// `Applied` is False: the agent cannot apply the spec on this node.
    pub const REFUSED: &str = "Refused";
    /// `Applied` is False: the agent has not read a spec yet.
    pub const NO_SPEC: &str = "NoSpec";
    /// `Applied` is False: the object does not match its CRD.
    pub const MALFORMED: &str = "Malformed";
    /// `GpusHealthy` is True: all GPUs are healthy.
    pub const HEALTHY: &str = "Healthy";
    /// `GpusPresent` is True: NVML lists every GPU that the node should have.
    pub const ALL_PRESENT: &str = "AllPresent";
    /// `GpusPresent` is False: the node had GPUs that NVML no longer lists.
    pub const GPU_MISSING: &str = cleave_api::names::HEALTH_GPU_MISSING;
    /// `LimitsEnforced` is True: doors enforce the limits of all shares.
    pub const DOORS_ENFORCE: &str = "DoorsEnforce";
    /// `LimitsEnforced` is False: the MPS handshake of the driver is unknown, or a daemon's replies
    /// to clients are unexpected. The daemon's shares are Unhealthy.
    pub const UNKNOWN_HANDSHAKE: &str = "UnknownHandshake";
    /// `LimitsEnforced` is False: the handshake is unknown, and the policy accepts advisory limits.
    pub const ADVISORY_LIMITS: &str = "AdvisoryLimits";
}

/// The inputs of a status.
#[derive(Debug, Clone, Copy)]
pub struct StatusInput<'a> {
    /// The GPUs and the driver.
    pub hardware: &'a Hardware,
    /// Whether the driver and every GPU have answered or failed at least once.
    pub inventoried: bool,
    /// The node's `GpuNode`.
    pub object: &'a GpuNodeState,
    /// Generation and content of the spec in force.
    pub spec: Option<&'a (i64, GpuNodeSpec)>,
    /// Whether the node matches the spec.
    pub applied: bool,
    /// Layout of each GPU, by UUID.
    pub layouts: &'a BTreeMap<String, Layout>,
    /// The device lists for the kubelet.
    pub lists: &'a BTreeMap<ResourceName, DeviceList>,
    /// The slices in use, if known.
    pub usage: Option<&'a SliceUsage>,
    /// The kubelet's PodResources list.
    pub listed: &'a [ContainerDevices],
    /// Why the kubelet did not answer the last PodResources request. `None` if the kubelet
    /// answered.
    pub pod_resources_error: Option<&'a str>,
    /// The agent's allocations.
    pub allocations: &'a Allocations,
    /// State of the MPS host.
    pub view: &'a HostView,
    /// Daemons with a short absence that the agent tolerates.
    pub absences: &'a DaemonAbsences,
    /// Devices whose daemon does not have its current settings and shares yet. The MPS host's
    /// status of such a device still describes the daemon with the older settings.
    pub outdated_daemons: &'a BTreeSet<&'a str>,
    /// Steps of changes.
    pub steps: &'a [StepStatus],
    /// Findings about tenants that exceeded their limits.
    pub findings: &'a [FindingStatus],
    /// Boot id of the node.
    pub boot_id: &'a str,
    /// The requested quiesces of GPUs.
    pub quiesces: &'a Quiesces,
}

/// Problem of a daemon whose handshake is unknown.
const UNKNOWN_HANDSHAKE: &str = "the driver's MPS handshake is unknown, so doors cannot enforce the limits of shares. Run `cleave doctor` on the node. To serve shares whose limits pods can change, set `mps.enforcement: Advisory` in the SharingPolicy";

/// Problem of a daemon whose doors hold clients.
const HELD_CLIENTS: &str = "the MPS daemon sends unexpected replies to programs that start. New programs wait at their doors, so that no program starts without limits. Programs that already use the GPU continue. Run `cleave doctor` on the node";

/// Checks that the MPS daemon of a device serves, and that its handshake is accepted.
///
/// # Errors
/// Returns a clause that states why the daemon does not serve.
pub fn check_daemon(view: &HostView, device: &str, settings: &DaemonSettings) -> Result<(), String> {
    if !view.alive {
        return Err("the MPS host does not answer".into());
    }
    if view.has_unknown_handshake(device, settings) {
        return Err(if view.holds_clients(device) { HELD_CLIENTS } else { UNKNOWN_HANDSHAKE }.into());
    }
    match view.status.daemons.get(device) {
        Some(DaemonStatus { state: DaemonState::Active, .. }) => Ok(()),
        Some(DaemonStatus { state, message, .. }) if message.is_empty() => {
            Err(format!("the MPS daemon is in state {state:?}"))
        }
        Some(DaemonStatus { state, message, .. }) => Err(format!("the MPS daemon is in state {state:?}: {message}")),
        None => Err(match &view.error {
            Some(error) => format!("the MPS host reports: {error}"),
            None => "the MPS host has not started the MPS daemon yet".into(),
        }),
    }
}

/// Builds the status. Its conditions have no times yet.
pub fn build_status(input: &StatusInput<'_>) -> GpuNodeStatus {
    let StatusInput { hardware, spec, applied, steps, boot_id, .. } = *input;
    let gpus: Vec<GpuStatus> = hardware.gpus_by_index().into_iter().map(|known| gpu_status(input, known)).collect();
    let generation = match (input.object, spec) {
        (GpuNodeState::Present(generation, _), _) | (_, Some((generation, _))) => *generation,
        _ => 0,
    };
    let matches = applied && input.inventoried;
    GpuNodeStatus {
        observed_generation: generation,
        plan_id: spec.filter(|_| matches).map(|(_, spec)| spec.plan_id.clone()).unwrap_or_default(),
        agent_version: env!("CARGO_PKG_VERSION").into(),
        driver: hardware.driver.version().unwrap_or_default().to_owned(),
        boot_id: boot_id.to_owned(),
        conditions: [
            Some((CONDITION_READY, ready_condition(input, &gpus))),
            Some((CONDITION_APPLIED, applied_condition(input))),
            Some((CONDITION_GPUS_HEALTHY, gpus_healthy_condition(input))),
            Some((CONDITION_GPUS_PRESENT, gpus_present_condition(input))),
            limits_enforced_condition(input, &gpus).map(|content| (CONDITION_LIMITS_ENFORCED, content)),
        ]
        .into_iter()
        .flatten()
        .map(|(type_, content)| condition(type_, generation, content))
        .collect(),
        expected_gpus: saturate_u32(hardware.expected_gpus()),
        summary: Some(Summary::from_gpus(&gpus)),
        models: Vec::new(),
        gpus,
        unidentified_gpus: unidentified_gpus(hardware),
        steps: steps.to_vec(),
        findings: input.findings.to_vec(),
    }
    .move_profiles_to_models()
}

/// Returns the status of a GPU. The GPU is also unhealthy if one of its MPS daemons or doors fails,
/// or if it is being quiesced.
fn gpu_status(input: &StatusInput<'_>, known: &KnownGpu) -> GpuStatus {
    let KnownGpu { gpu, health, instances, .. } = known;
    let layout = input.layouts.get(&gpu.uuid);
    let devices = devices_of_gpu(gpu, layout);
    let mut health = health.clone();
    let daemons: Vec<(&String, &DaemonSettings)> = layout.iter().flat_map(|layout| &layout.daemons).collect();
    let mps: Vec<MpsStatus> = daemons.iter().map(|(device, settings)| daemon_status(input, device, settings)).collect();
    let mut problems = daemons.iter().filter_map(|(device, settings)| mps_problem(input, device, settings));
    if health.healthy
        && let Some(message) = problems.next()
    {
        health = Health { healthy: false, reason: reason::MPS_UNAVAILABLE.into(), message, ..Health::default() };
    }
    let quiesce = input.quiesces.status(&gpu.uuid);
    if let Some(quiesce) = quiesce.as_ref().filter(|_| !known.missing && input.quiesces.stops_daemons(&gpu.uuid)) {
        let reason = crate::gpu::health::reason::QUIESCED.into();
        health = Health { healthy: false, reason, message: quiesce.message.clone(), ..Health::default() };
    }
    GpuStatus {
        uuid: gpu.uuid.clone(),
        index: gpu.index,
        model: gpu.model.clone(),
        memory_mib: gpu.memory.0,
        sms: gpu.sms.0,
        pci: gpu.pci.clone(),
        numa: gpu.numa,
        mig: gpu.mig.as_ref().map(|of| mig_status(of, instances)),
        mode: layout.map(|layout| layout.mode.as_str().to_owned()).unwrap_or_default(),
        slices: layout.iter().flat_map(|layout| &layout.pools).map(|pool| slice_status(input, gpu, pool)).collect(),
        allocations: allocation_statuses(input, gpu, &devices),
        health,
        mps,
        quiesce,
    }
}

/// Returns the problem of a device's MPS daemon or of its doors, if any. A daemon that is starting
/// or briefly unavailable is not a problem, but a failed door always is.
fn mps_problem(input: &StatusInput<'_>, device: &str, settings: &DaemonSettings) -> Option<String> {
    let view = input.view;
    let daemon = view.status.daemons.get(device);
    let is_starting = view.alive && daemon.is_none_or(|daemon| daemon.state == DaemonState::Starting);
    let of_daemon = if is_starting || input.absences.is_absence_tolerated(device) {
        None
    } else {
        check_daemon(view, device, settings).and_then(|()| check_settings(input, device)).err()
    };
    // The status of an MPS host that does not answer may be out of date.
    let of_door = || view.status.door_errors.get(device).filter(|_| view.alive);
    of_daemon.or_else(|| of_door().map(|error| format!("the MPS host reports: {error}")))
}

/// Checks that the MPS host reports no error about the current settings of a daemon.
fn check_settings(input: &StatusInput<'_>, device: &str) -> Result<(), String> {
    match &input.view.status.error {
        Some(error) if input.outdated_daemons.contains(device) => Err(format!("the MPS host reports: {error}")),
        _ => Ok(()),
    }
}

/// Returns the UUIDs of the GPU, of its MIG devices, and of devices in the layout that no longer
/// exist.
fn devices_of_gpu<'a>(gpu: &'a Gpu, layout: Option<&'a Layout>) -> BTreeSet<&'a str> {
    let mut devices = BTreeSet::from([gpu.uuid.as_str()]);
    devices.extend(gpu.mig.iter().flat_map(|mig| &mig.instances).map(|instance| instance.uuid.as_str()));
    devices.extend(layout.iter().flat_map(|layout| &layout.pools).map(|pool| pool.device.as_str()));
    devices.remove("");
    devices
}

/// Converts NVML's description of a GPU's MIG mode, profiles and instances. Adds the health of
/// unhealthy instances.
fn mig_status(mig: &MigState, unhealthy: &BTreeMap<String, Health>) -> MigStatus {
    let MigState { enabled, pending, profiles, instances } = mig;
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

/// Returns the total, used and unhealthy numbers of slices of a pool.
fn slice_status(input: &StatusInput<'_>, gpu: &Gpu, pool: &crate::gpu::layout::Pool) -> SliceStatus {
    let device = BTreeSet::from([pool.device.as_str()]);
    let of_pool = |id: &str| parse_slice_id(id).is_some_and(|(device, number)| pool.contains(device, number));
    // While usage is unknown, all slices count as used. If the slices counted as free, the operator
    // would release pods for slices that may be in use.
    let in_use = input.usage.map_or(pool.count as usize, |usage| {
        usage.slices_of_devices(&device).filter(|(resource, id, _)| *resource == pool.resource && of_pool(id)).count()
    });
    let unhealthy = input
        .lists
        .get(pool.resource.as_str())
        .map_or(0, |list| list.iter().filter(|device| !device.healthy && of_pool(device.id.as_str())).count());
    let instance = gpu.mig.iter().flat_map(|mig| &mig.instances).find(|instance| instance.uuid == pool.device);
    SliceStatus {
        device: pool.device.clone(),
        resource: pool.resource.clone(),
        start: instance.map(|instance| instance.start),
        total: pool.count,
        in_use: saturate_u32(in_use),
        unhealthy: saturate_u32(unhealthy),
    }
}

/// Converts a count. Larger counts become [`u32::MAX`].
fn saturate_u32(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Returns the allocations of a GPU, with a row for each container, resource and device.
fn allocation_statuses(input: &StatusInput<'_>, gpu: &Gpu, devices: &BTreeSet<&str>) -> Vec<AllocationStatus> {
    let mut rows = Vec::new();
    for row in input.listed {
        let mut by_device: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for id in &row.ids {
            if let Some((device, _)) = parse_slice_id(id).filter(|(device, _)| devices.contains(device)) {
                by_device.entry(device).or_default().push(id.clone());
            }
        }
        let allocation = input.allocations.get(&allocation_id(&row.resource, &row.ids));
        for (device, mut ids) in by_device {
            ids.sort_by_key(|id| parse_slice_id(id).map(|(_, number)| number));
            let limits = allocation.and_then(|allocation| allocation.mps);
            let whole = gpu.uuid == device;
            // For a MIG instance, the number of SMs comes from the instance's profile in NVML.
            let total = if whole { Some(gpu.sms) } else { instance_sms(gpu, device) };
            let sms = limits.and_then(|limits| limited_sms(limits, total));
            let memory_mib = limits.and_then(|limits| limits.memory_mib);
            rows.push(AllocationStatus {
                pod: format!("{}/{}", row.namespace, row.pod),
                container: row.container.clone(),
                resource: row.resource.clone(),
                device: device.to_owned(),
                ids,
                threads: limits.and_then(|limits| limits.threads),
                sms: sms.map(|sms| sms.0),
                memory_mib,
                // Context sizes are known only for whole GPUs, because contexts on MIG instances
                // were not measured.
                context_mib: sms
                    .filter(|_| whole && memory_mib.is_some())
                    .and_then(|sms| context_memory(gpu.compute_capability, input.hardware.driver.version()?, sms))
                    .map(|memory| memory.0),
                clients: allocation.map_or(0, |allocation| count_clients(input.view, device, allocation)),
            });
        }
    }
    rows.sort_by(|a, b| {
        (&a.pod, &a.container, &a.resource, &a.device).cmp(&(&b.pod, &b.container, &b.resource, &b.device))
    });
    rows
}

/// Returns the number of SMs that an allocation can use, as the driver rounds it. Returns `None` if
/// the number of the device's SMs is unknown.
fn limited_sms(limits: MpsLimits, total: Option<Sms>) -> Option<Sms> {
    let threads = limits.threads.and_then(|threads| Percent::new(threads).ok());
    total.map(|total| usable_sms(threads, total))
}

fn instance_sms(gpu: &Gpu, device: &str) -> Option<Sms> {
    let mig = gpu.mig.as_ref()?;
    let instance = mig.instances.iter().find(|instance| instance.uuid == device)?;
    mig.profiles.iter().find(|profile| profile.name == instance.profile).map(|profile| profile.sms)
}

/// Returns the number of an allocation's MPS clients.
fn count_clients(view: &HostView, device: &str, allocation: &Allocation) -> u32 {
    let id = allocation.id();
    let of_allocation = |client: &&cleave_gpu::mps::wire::Client| client.allocation.as_deref() == Some(id.as_str());
    view.status
        .daemons
        .get(device)
        .map_or(0, |daemon| saturate_u32(daemon.clients.iter().filter(of_allocation).count()))
}

/// Returns the status of a device's MPS daemon. The state is empty while the MPS host does not
/// answer or has not started the daemon.
fn daemon_status(input: &StatusInput<'_>, device: &str, settings: &DaemonSettings) -> MpsStatus {
    let StatusInput { view, outdated_daemons, .. } = input;
    let status = view.status.daemons.get(device).filter(|_| view.alive);
    let state = |daemon: &DaemonStatus| match daemon.state {
        DaemonState::Active if outdated_daemons.contains(device) => DaemonState::Restarting,
        state => state,
    };
    MpsStatus {
        device: device.to_owned(),
        state: status.map(|daemon| daemon_state_name(state(daemon)).to_owned()).unwrap_or_default(),
        pid: status.and_then(|daemon| daemon.pid),
        door: match status.map(|daemon| daemon.enforcement) {
            Some(_) if view.holds_clients(device) => door::UNKNOWN.into(),
            Some(Enforcement::Hard) => door::HARD.into(),
            Some(Enforcement::Advisory) if settings.accept_advisory => door::ADVISORY.into(),
            Some(Enforcement::Advisory) => door::UNKNOWN.into(),
            None => String::new(),
        },
        restarts: status.map_or(0, |daemon| daemon.restarts),
        message: match status {
            Some(daemon) => daemon.message.clone(),
            None => check_daemon(view, device, settings).err().unwrap_or_default(),
        },
    }
}

const fn daemon_state_name(state: DaemonState) -> &'static str {
    match state {
        DaemonState::Starting => daemon_state::STARTING,
        DaemonState::Active => daemon_state::ACTIVE,
        DaemonState::Fault => daemon_state::FAULT,
        DaemonState::Restarting => daemon_state::RESTARTING,
        DaemonState::BackOff => daemon_state::BACK_OFF,
        DaemonState::Stopping => daemon_state::STOPPING,
    }
}

/// A condition without its type, generation and time.
struct ConditionContent {
    status: &'static str,
    reason: &'static str,
    message: String,
}

fn condition_content(status: bool, reason: &'static str, message: impl Into<String>) -> ConditionContent {
    ConditionContent { status: if status { "True" } else { "False" }, reason, message: message.into() }
}

/// Returns the condition `Ready`.
fn ready_condition(input: &StatusInput<'_>, gpus: &[GpuStatus]) -> ConditionContent {
    match &input.hardware.driver {
        DriverState::Unknown => return condition_content(false, reason::STARTING, "NVML has not answered yet"),
        DriverState::Missing(why) => return condition_content(false, reason::NO_DRIVER, why.clone()),
        DriverState::Present(_) if gpus.is_empty() && !input.inventoried => {
            return condition_content(false, reason::STARTING, "NVML has not answered for any GPU yet");
        }
        DriverState::Present(version) if gpus.is_empty() && input.hardware.unnamed.is_empty() => {
            return condition_content(false, reason::NO_GPU, format!("driver {version} finds no GPU"));
        }
        DriverState::Present(_) => {}
    }
    let problem = |is: fn(&Health) -> bool| {
        let messages: Vec<String> = gpus
            .iter()
            .filter(|gpu| is(&gpu.health))
            .map(|gpu| format!("GPU {} ({}): {}", gpu.index, gpu.uuid, gpu.health.message))
            .collect();
        (!messages.is_empty()).then(|| messages.join("; "))
    };
    let unhealthy = problem(|health| !health.healthy && health.reason != reason::MPS_UNAVAILABLE);
    let unhealthy: Vec<String> = unidentified_gpu_messages(input.hardware).chain(unhealthy).collect();
    if !unhealthy.is_empty() {
        return condition_content(false, reason::GPU_UNHEALTHY, unhealthy.join("; "));
    }
    if let Some(message) = problem(|health| !health.healthy) {
        return condition_content(false, reason::MPS_UNAVAILABLE, message);
    }
    condition_content(true, reason::SERVING, "")
}

/// Returns the status rows of listed GPUs whose UUID NVML has never reported.
fn unidentified_gpus(hardware: &Hardware) -> Vec<UnidentifiedGpuStatus> {
    let row = |(index, why): (&u32, &String)| UnidentifiedGpuStatus { index: *index, message: why.clone() };
    hardware.unnamed.iter().map(row).collect()
}

/// Returns a clause with the error of each listed GPU whose UUID NVML has never reported.
fn unidentified_gpu_messages(hardware: &Hardware) -> impl Iterator<Item = String> {
    hardware.unnamed.iter().map(|(index, why)| format!("GPU {index}: {why}"))
}

/// Returns the condition `GpusHealthy`. The condition ignores MPS daemons, because `Ready` reports
/// the problems of daemons. A GPU that serves but should be reset is healthy, and the message
/// mentions the reset.
fn gpus_healthy_condition(input: &StatusInput<'_>) -> ConditionContent {
    if !input.inventoried {
        return condition_content(false, reason::STARTING, "NVML has not answered yet");
    }
    let (mut unhealthy, mut pending): (Vec<String>, _) =
        (unidentified_gpu_messages(input.hardware).collect(), Vec::new());
    for KnownGpu { gpu, health, instances, .. } in input.hardware.gpus_by_index() {
        let name = format!("GPU {} ({})", gpu.index, gpu.uuid);
        let of_gpu = (!health.message.is_empty()).then(|| format!("{name}: {}", health.message));
        let list = if health.healthy { &mut pending } else { &mut unhealthy };
        list.extend(of_gpu);
        unhealthy.extend(instances.iter().map(|(device, health)| format!("{device} of {name}: {}", health.message)));
    }
    match (unhealthy.is_empty(), pending.is_empty()) {
        (false, _) => condition_content(
            false,
            reason::GPU_UNHEALTHY,
            unhealthy.into_iter().chain(pending).collect::<Vec<_>>().join("; "),
        ),
        (true, false) => condition_content(true, crate::gpu::health::reason::RESET_PENDING, pending.join("; ")),
        (true, true) => condition_content(true, reason::HEALTHY, ""),
    }
}

/// Returns the condition `GpusPresent`. Only `cleave forget` removes a known GPU from the expected
/// GPUs.
fn gpus_present_condition(input: &StatusInput<'_>) -> ConditionContent {
    let hardware = input.hardware;
    if let DriverState::Missing(why) = &hardware.driver {
        return condition_content(false, reason::NO_DRIVER, why.clone());
    }
    let missing = hardware.missing_gpus();
    if missing.is_empty() {
        return if input.inventoried {
            condition_content(true, reason::ALL_PRESENT, "")
        } else {
            condition_content(false, reason::STARTING, "NVML has not answered yet")
        };
    }
    let names: Vec<String> = missing.iter().map(|gpu| format!("GPU {} ({})", gpu.index, gpu.uuid)).collect();
    let expected = hardware.expected_gpus();
    let listed = expected - missing.len();
    let message = format!(
        "NVML lists {listed} of {expected} GPUs. Missing: {}. Repair or replace the missing GPUs. Run `cleave forget` for GPUs that were removed for good",
        names.join(", ")
    );
    condition_content(false, reason::GPU_MISSING, message)
}

/// Returns the condition `LimitsEnforced`, or `None` if no MPS daemon has reported its handshake.
fn limits_enforced_condition(input: &StatusInput<'_>, gpus: &[GpuStatus]) -> Option<ConditionContent> {
    let doors = || gpus.iter().flat_map(|gpu| gpu.mps.iter().map(move |daemon| (gpu, daemon)));
    let devices_with = |kind: &str, held: bool| {
        let of_kind =
            doors().filter(|(_, daemon)| daemon.door == kind && input.view.holds_clients(&daemon.device) == held);
        of_kind.map(|(gpu, daemon)| format!("{} (GPU {})", daemon.device, gpu.index)).collect::<Vec<_>>().join(", ")
    };
    let version = input.hardware.driver.version().unwrap_or_default();
    let unknown: Vec<String> = [(false, UNKNOWN_HANDSHAKE), (true, HELD_CLIENTS)]
        .into_iter()
        .map(|(held, problem)| (devices_with(door::UNKNOWN, held), problem))
        .filter(|(devices, _)| !devices.is_empty())
        .map(|(devices, problem)| format!("{devices}, driver {version}: {problem}"))
        .collect();
    if !unknown.is_empty() {
        return Some(condition_content(false, reason::UNKNOWN_HANDSHAKE, unknown.join("; ")));
    }
    let advisory = devices_with(door::ADVISORY, false);
    if !advisory.is_empty() {
        let message = format!(
            "{advisory}, driver {version}: the MPS handshake is unknown, and the SharingPolicy accepts advisory limits. Pods can change their limits and send commands to the MPS daemon"
        );
        return Some(condition_content(false, reason::ADVISORY_LIMITS, message));
    }
    doors().any(|(_, daemon)| daemon.door == door::HARD).then(|| match DriverEvidence::of_version(version) {
        DriverEvidence::Measured => condition_content(true, reason::DOORS_ENFORCE, ""),
        DriverEvidence::Assumed => condition_content(
            true,
            reason::DOORS_ENFORCE,
            format!("driver {version} uses the known MPS handshake, but Cleave was not tested with this driver. Run `cleave doctor`"),
        ),
    })
}

/// Returns the condition `Applied`.
fn applied_condition(input: &StatusInput<'_>) -> ConditionContent {
    if let GpuNodeState::Malformed(why) = input.object {
        return condition_content(false, reason::MALFORMED, format!("the last valid spec still applies: {why}"));
    }
    if input.spec.is_none() {
        let why = match input.object {
            GpuNodeState::Missing => "this node has no GpuNode yet; the operator creates it",
            GpuNodeState::Present(..) => "the operator has not planned this node yet",
            GpuNodeState::Unknown | GpuNodeState::Malformed(_) => "the API server has not answered yet",
        };
        return condition_content(false, reason::NO_SPEC, why);
    }
    if !input.inventoried {
        return condition_content(false, reason::STARTING, "NVML has not answered yet");
    }
    if input.applied {
        return condition_content(true, reason::APPLIED, "");
    }
    let open: Vec<&StepStatus> = input.steps.iter().filter(|step| step.result != STEP_DONE).collect();
    let refused = open.iter().any(|step| step.result == cleave_api::names::STEP_REFUSED);
    let mut messages: Vec<String> = open.iter().map(|step| format!("{}: {}", step.gpu, step.message)).collect();
    messages.extend(
        input.pod_resources_error.map(|error| format!("the kubelet does not report which slices are in use: {error}")),
    );
    if messages.is_empty() {
        messages.push("the GPUs are being repartitioned".into());
    }
    condition_content(false, if refused { reason::REFUSED } else { reason::WAITING }, messages.join("; "))
}

fn condition(type_: &str, generation: i64, content: ConditionContent) -> Condition {
    let ConditionContent { status, reason, message } = content;
    Condition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message,
        observed_generation: Some(generation),
        last_transition_time: Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH),
    }
}

/// Sets the transition times of conditions. A condition with an unchanged status keeps its time
/// from `before`. All other conditions get the time `now`.
pub fn with_condition_times(
    mut status: GpuNodeStatus,
    before: &[Condition],
    now: k8s_openapi::jiff::Timestamp,
) -> GpuNodeStatus {
    for condition in &mut status.conditions {
        let same = before.iter().find(|old| old.type_ == condition.type_ && old.status == condition.status);
        condition.last_transition_time = same.map_or(Time(now), |old| old.last_transition_time.clone());
    }
    status
}

/// Returns whether the statuses differ only in new allocations or in numbers of clients. The agent
/// may delay the write of a status that changed only in these respects.
pub fn is_minor_change(reported: &GpuNodeStatus, new: &GpuNodeStatus) -> bool {
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
    let keeps = |(reported, new): (&GpuStatus, &GpuStatus)| {
        reported.allocations.iter().all(|row| new.allocations.iter().any(|other| same(row, other)))
            && reported.slices.iter().zip(&new.slices).all(|(reported, new)| reported.in_use <= new.in_use)
    };
    reported.gpus.iter().zip(&new.gpus).all(keeps) && bare(reported) == bare(new)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node_status_with(pods: &[&str], change: impl FnOnce(&mut GpuStatus)) -> GpuNodeStatus {
        let row = |pod: &&str| AllocationStatus { pod: (*pod).to_owned(), ..AllocationStatus::default() };
        let slices = vec![SliceStatus { total: 10, in_use: saturate_u32(pods.len()), ..SliceStatus::default() }];
        let mut gpu = GpuStatus { allocations: pods.iter().map(row).collect(), slices, ..GpuStatus::default() };
        change(&mut gpu);
        let gpus = vec![gpu];
        GpuNodeStatus { summary: Some(Summary::from_gpus(&gpus)), gpus, ..GpuNodeStatus::default() }
    }

    #[test]
    fn only_new_allocations_and_client_counts_are_minor_changes() {
        let before = node_status_with(&["a", "b"], |_| {});
        for (minor, what, after) in [
            (true, "one more allocation", node_status_with(&["a", "b", "c"], |_| {})),
            (true, "another number of clients", node_status_with(&["a", "b"], |gpu| gpu.allocations[0].clients = 1)),
            (false, "one allocation less", node_status_with(&["a"], |_| {})),
            (false, "another allocation", node_status_with(&["a", "c"], |_| {})),
            (false, "fewer slices in use", node_status_with(&["a", "b"], |gpu| gpu.slices[0].in_use = 1)),
            (false, "another device", node_status_with(&["a", "b"], |gpu| gpu.allocations[0].device = "GPU-1".into())),
            (false, "an unhealthy share", node_status_with(&["a", "b", "c"], |gpu| gpu.slices[0].unhealthy = 1)),
            (false, "health", node_status_with(&["a", "b", "c"], |gpu| gpu.health.reason = "XidError".into())),
            (false, "one GPU less", GpuNodeStatus { summary: before.summary.clone(), ..GpuNodeStatus::default() }),
            (
                false,
                "another plan",
                GpuNodeStatus { plan_id: "p".into(), ..node_status_with(&["a", "b", "c"], |_| {}) },
            ),
        ] {
            assert_eq!(is_minor_change(&before, &after), minor, "{what}");
        }
    }
}
