//! Prometheus metrics of the agent.
//!
//! Metrics share the names of labels: `node`, `gpu` (NVML's index), `uuid` (of the GPU or MIG
//! device), `namespace`, `pod` and `container` of the pod that uses the device, and `resource`. The
//! agent removes the series of GPUs, pods and containers that no longer exist.
mod device_counters;
mod gpus;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cleave_api::gpunode::{AllocationStatus, GpuNodeStatus, GpuStatus};
use cleave_api::names::HEALTH_GPU_MISSING;
use cleave_gpu::nvml::GpuReadings;
use cleave_serve::descriptors::{self, Usage};
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use self::device_counters::DeviceCounters;
use self::gpus::{BYTES_PER_MIB, DeviceLabels, GpuMetrics, to_gauge_value};
use crate::gpu::mig::{self, MigChange};
use crate::gpu::xid::FaultClass;
use crate::share_clock::ShareClock;
use crate::tenants::violations::TenantUsage;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AllocateLabels {
    resource: String,
    outcome: AllocateOutcome,
}

/// Result of an `Allocate` call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum AllocateOutcome {
    /// The slices were allocated.
    Granted,
    /// The request was refused.
    Refused,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SliceLabels {
    gpu: String,
    uuid: String,
    resource: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct GpuLabels {
    gpu: String,
    uuid: String,
    model: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InfoLabels {
    version: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabels {
    call: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MigChangeLabels {
    change: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DoorLabels {
    gpu: String,
    uuid: String,
    door: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct UnhealthyLabels {
    gpu: String,
    uuid: String,
    class: String,
    reason: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ErrorLabels {
    reason: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResourceLabels {
    resource: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WaitLabels {
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TerminationLabels {
    outcome: TerminationOutcome,
}

/// Result of an attempt to terminate a client of a terminating pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum TerminationOutcome {
    /// The client was terminated.
    Done,
    /// The attempt failed. The agent tries again.
    Failed,
    /// The client was not terminated before the kubelet could kill the pod's containers.
    Late,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ChangeLabels {
    change: &'static str,
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, EncodeLabelSet)]
struct TenantLabels {
    namespace: String,
    pod: String,
    container: String,
    gpu: String,
    uuid: String,
}

/// Labels of a container's slices of one device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, EncodeLabelSet)]
struct ShareLabels {
    namespace: String,
    pod: String,
    container: String,
    gpu: String,
    uuid: String,
    resource: String,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, EncodeLabelSet)]
struct NamespaceLabels {
    namespace: String,
    gpu: String,
    uuid: String,
    resource: String,
}

impl From<&ShareLabels> for NamespaceLabels {
    fn from(ShareLabels { namespace, pod: _, container: _, gpu, uuid, resource }: &ShareLabels) -> Self {
        Self { namespace: namespace.clone(), gpu: gpu.clone(), uuid: uuid.clone(), resource: resource.clone() }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FindingLabels {
    kind: String,
}

/// Handle to the agent's metrics.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    info: Family<InfoLabels, Gauge>,
    allocations: Family<AllocateLabels, Counter>,
    split_requests: Family<ResourceLabels, Counter>,
    waits: Family<WaitLabels, Counter>,
    total: Family<SliceLabels, Gauge>,
    in_use: Family<SliceLabels, Gauge>,
    unhealthy: Family<SliceLabels, Gauge>,
    gpu_healthy: Family<GpuLabels, Gauge>,
    gpu_quiesced: Family<GpuLabels, Gauge>,
    expected_gpus: Gauge,
    missing_gpus: Gauge,
    restarts: Family<DeviceLabels, Gauge>,
    doors: Family<DoorLabels, Gauge>,
    descriptors: DescriptorMetrics,
    clients: Family<DeviceLabels, Gauge>,
    unhealthy_devices: Family<UnhealthyLabels, Gauge>,
    device_counters: DeviceCounters,
    errors: Family<ErrorLabels, Counter>,
    changes: Family<ChangeLabels, Counter>,
    terminations: Family<TerminationLabels, Counter>,
    namespace_share_seconds: Family<NamespaceLabels, Counter<f64, AtomicU64>>,
    durations: DurationMetrics,
    gpus: GpuMetrics,
    tenants: TenantMetrics,
    known: Arc<Mutex<KnownSeries>>,
    /// Locked while the agent encodes the metrics and while it replaces series, so that no scrape
    /// misses a series. Lock `registry` before `known`.
    registry: Arc<Mutex<Registry>>,
}

/// The devices, containers and namespaces that have series.
#[derive(Debug, Default)]
struct KnownSeries {
    /// Labels of the node's GPUs and MIG devices, by UUID.
    devices: BTreeMap<String, DeviceLabels>,
    /// The node's GPUs.
    gpus: BTreeSet<DeviceLabels>,
    /// Slices that are allocated to containers.
    shares: ShareClock<ShareLabels>,
    /// Time at which containers of a namespace last had slices of a device.
    namespaces: BTreeMap<NamespaceLabels, Instant>,
}

/// Time for which the agent keeps the share-seconds of a namespace without slices of a device, so
/// that Prometheus scrapes the last value. Without a limit, the series would accumulate.
const NAMESPACE_RETENTION: Duration = Duration::from_secs(3600);

/// Histograms of the durations of kubelet calls and MIG changes.
#[derive(Debug, Clone)]
struct DurationMetrics {
    calls: Family<CallLabels, Histogram>,
    mig_changes: Family<MigChangeLabels, Histogram>,
}

impl Default for DurationMetrics {
    fn default() -> Self {
        Self {
            // From 1 ms to 8 s, because a call may wait for a pod or for a door.
            calls: Family::new_with_constructor(|| Histogram::new(exponential_buckets(0.001, 2.0, 14))),
            // From 50 ms to 51 s.
            mig_changes: Family::new_with_constructor(|| Histogram::new(exponential_buckets(0.05, 2.0, 11))),
        }
    }
}

impl DurationMetrics {
    fn register(&self, registry: &mut Registry) {
        let calls = "Time to answer a call of the kubelet, including waits, by call";
        registry.register("rpc_seconds", calls, self.calls.clone());
        let changes = "Duration of a change of MIG mode or of a MIG instance, by change";
        registry.register("mig_change_seconds", changes, self.mig_changes.clone());
    }
}

/// The calls of the kubelet to the device plugin that the agent measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KubeletCall {
    /// `Allocate`.
    Allocate,
    /// `GetPreferredAllocation`.
    PreferredAllocation,
    /// `PreStartContainer`.
    PreStart,
}

impl KubeletCall {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Allocate => "Allocate",
            Self::PreferredAllocation => "GetPreferredAllocation",
            Self::PreStart => "PreStartContainer",
        }
    }
}

/// Metrics of the open files of the agent's process.
#[derive(Debug, Clone, Default)]
struct DescriptorMetrics {
    open: Gauge,
    limit: Gauge,
}

impl DescriptorMetrics {
    fn register(&self, registry: &mut Registry) {
        registry.register("process_open_fds", "Open files", self.open.clone());
        registry.register("process_max_fds", "Maximum number of open files", self.limit.clone());
    }

    /// Sets the metrics to the current values.
    fn refresh(&self) {
        if let Ok(Usage { open, limit }) = descriptors::usage() {
            self.open.set(i64::try_from(open).unwrap_or(i64::MAX));
            self.limit.set(limit.and_then(|limit| i64::try_from(limit).ok()).unwrap_or(i64::MAX));
        }
    }
}

/// Metrics of containers that use shared devices.
#[derive(Debug, Clone, Default)]
struct TenantMetrics {
    shares: Family<ShareLabels, Gauge>,
    share_seconds: Family<ShareLabels, Counter<f64, AtomicU64>>,
    sms: Family<ShareLabels, Gauge>,
    clients: Family<ShareLabels, Gauge>,
    memory: Family<TenantLabels, Gauge>,
    limit: Family<TenantLabels, Gauge>,
    findings: Family<FindingLabels, Counter>,
    /// Labels that have memory series.
    known: Arc<Mutex<BTreeSet<TenantLabels>>>,
}

impl TenantMetrics {
    fn register(&self, registry: &mut Registry) {
        registry.register("shares", "Slices of a resource allocated to a container on a GPU", self.shares.clone());
        let share_seconds = "Slices allocated to a container on a GPU, multiplied by the seconds of the allocation";
        registry.register("share_seconds", share_seconds, self.share_seconds.clone());
        registry.register("sm_limit", "SMs that a container's processes can use on a GPU", self.sms.clone());
        registry.register("mps_clients", "MPS clients of a container on a GPU", self.clients.clone());
        let memory = "Memory that a container's processes use on a shared GPU, as NVML reports it";
        registry.register("memory_bytes", memory, self.memory.clone());
        let limit = "Memory limit of a container's shares on a GPU";
        registry.register("memory_limit_bytes", limit, self.limit.clone());
        registry.register(
            "findings",
            "Findings about tenants that exceeded their limits, by kind",
            self.findings.clone(),
        );
    }
}

impl Metrics {
    /// Registers all metrics without the label `node`.
    pub fn new() -> Self {
        Self::with_registry(Registry::default())
    }

    /// Registers all metrics with the label `node`.
    pub fn for_node(name: &str) -> Self {
        Self::with_registry(Registry::with_labels(std::iter::once((Cow::from("node"), Cow::from(name.to_owned())))))
    }

    /// Registers all metrics. The metrics of [`GpuMetrics`] have the prefix `cleave_gpu`, those of
    /// [`TenantMetrics`] `cleave_tenant`, and those of [`DescriptorMetrics`] `process`. All others
    /// have the prefix `cleave_agent`, also the health of GPUs.
    fn with_registry(mut all: Registry) -> Self {
        let metrics = Self::default();
        metrics.descriptors.register(&mut all);
        metrics.gpus.register(all.sub_registry_with_prefix("cleave_gpu"));
        metrics.tenants.register(all.sub_registry_with_prefix("cleave_tenant"));
        metrics.durations.register(all.sub_registry_with_prefix("cleave_agent"));
        metrics.device_counters.register(all.sub_registry_with_prefix("cleave_agent"));
        let registry = all.sub_registry_with_prefix("cleave_agent");
        registry.register("info", "1, with the agent's version", metrics.info.clone());
        metrics.info.get_or_create(&InfoLabels { version: env!("CARGO_PKG_VERSION") }).set(1);
        registry.register(
            "allocations",
            "Allocate calls of the kubelet, by resource and outcome",
            metrics.allocations.clone(),
        );
        registry.register(
            "split_requests",
            "Allocate calls refused because the shares were on several GPUs, by resource",
            metrics.split_requests.clone(),
        );
        let waits = "GetPreferredAllocation calls that waited for the API server to report the pod, by result";
        registry.register("pod_waits", waits, metrics.waits.clone());
        registry.register("slices", "Slices advertised to the kubelet", metrics.total.clone());
        registry.register("slices_in_use", "Slices in use by containers", metrics.in_use.clone());
        registry.register("slices_unhealthy", "Slices reported to the kubelet as Unhealthy", metrics.unhealthy.clone());
        registry.register("gpu_healthy", "Whether a GPU can serve slices", metrics.gpu_healthy.clone());
        let quiesced = "Whether a GPU is quiesced. While a GPU is quiesced, the agent does not \
        monitor the node's other GPUs";
        registry.register("gpu_quiesced", quiesced, metrics.gpu_quiesced.clone());
        let expected = "GPUs that the node should have: every GPU that NVML has listed and that was not forgotten with cleave forget";
        registry.register("expected_gpus", expected, metrics.expected_gpus.clone());
        let missing = "GPUs that the node should have and that NVML does not list";
        registry.register("missing_gpus", missing, metrics.missing_gpus.clone());
        registry.register("mps_restarts", "Restarts of an MPS daemon", metrics.restarts.clone());
        let doors = "1 for each MPS daemon, by whether its doors enforce limits: Hard, Advisory or Unknown";
        registry.register("mps_door", doors, metrics.doors.clone());
        registry.register("mps_clients", "MPS clients of a device's allocations", metrics.clients.clone());
        let help = "1 for each GPU and MIG device that cannot serve slices or should be reset, by class and reason";
        registry.register("gpu_problem", help, metrics.unhealthy_devices.clone());
        registry.register(
            "mig_changes",
            "Changes of MIG mode and MIG instances, by change and result",
            metrics.changes.clone(),
        );
        let terminations = "Terminations of MPS clients of terminating pods, by outcome: Done, Failed or Late";
        registry.register("client_terminations", terminations, metrics.terminations.clone());
        let share_seconds =
            "Slices allocated to the containers of a namespace on a GPU, multiplied by the seconds of the allocation";
        registry.register("namespace_share_seconds", share_seconds, metrics.namespace_share_seconds.clone());
        registry.register("errors", "Failed operations, by reason", metrics.errors.clone());
        *metrics.registry.lock().unwrap_or_else(PoisonError::into_inner) = all;
        metrics
    }

    /// Counts an `Allocate` call.
    pub fn count_allocation(&self, resource: &str, outcome: AllocateOutcome) {
        self.allocations.get_or_create(&AllocateLabels { resource: resource.to_owned(), outcome }).inc();
    }

    /// Counts a request that the agent refused because its shares were on several GPUs.
    pub fn count_split_request(&self, resource: &str) {
        self.split_requests.get_or_create(&ResourceLabels { resource: resource.to_owned() }).inc();
    }

    /// Counts a request that waited for the API server to report its pod. `in_time` states whether
    /// the report came before the timeout.
    pub fn count_pod_wait(&self, in_time: bool) {
        self.waits.get_or_create(&WaitLabels { result: if in_time { "reported" } else { "timeout" } }).inc();
    }

    /// Counts an XID.
    pub fn count_xid(&self, gpu: &str, xid: u64, class: FaultClass) {
        self.device_counters.count_xid(gpu, xid, class);
    }

    /// Counts fatal GPU errors that broke all MPS clients of a device.
    pub fn count_faults(&self, device: &str, count: u64) {
        self.device_counters.count_faults(device, count);
    }

    /// Counts the result of an attempt to terminate a client of a terminating pod.
    pub fn count_termination(&self, outcome: TerminationOutcome) {
        self.terminations.get_or_create(&TerminationLabels { outcome }).inc();
    }

    /// Counts a MIG change by its result.
    pub fn count_mig_change(&self, change: &MigChange, outcome: &mig::ChangeOutcome) {
        let change = mig_change_name(change);
        let result = match outcome {
            mig::ChangeOutcome::Done => "done",
            mig::ChangeOutcome::Busy(_) => "busy",
            mig::ChangeOutcome::AfterReset => "after-reset",
            mig::ChangeOutcome::Slow(_) => "slow",
            mig::ChangeOutcome::Failed(_) => "failed",
        };
        self.changes.get_or_create(&ChangeLabels { change, result }).inc();
    }

    /// Records the duration of a MIG change.
    pub fn observe_mig_change(&self, change: &MigChange, took: Duration) {
        let label = MigChangeLabels { change: mig_change_name(change) };
        self.durations.mig_changes.get_or_create(&label).observe(took.as_secs_f64());
    }

    /// Records the time that the agent took to answer a call of the kubelet.
    pub fn observe_call(&self, call: KubeletCall, took: Duration) {
        self.durations.calls.get_or_create(&CallLabels { call: call.as_str() }).observe(took.as_secs_f64());
    }

    /// Sets the memory metrics of tenants, and removes the series of tenants without an entry in
    /// `usage`.
    pub fn set_tenant_memory(&self, usage: &[TenantUsage]) {
        let TenantMetrics { memory, limit, known, .. } = &self.tenants;
        let mut current = BTreeSet::new();
        for TenantUsage { tenant, device, bytes: used, limit_mib } in usage {
            let DeviceLabels { gpu, uuid } = self.lock_known().labels(device);
            let label = TenantLabels {
                namespace: tenant.namespace.clone(),
                pod: tenant.pod.clone(),
                container: tenant.container.clone(),
                gpu,
                uuid,
            };
            memory.get_or_create(&label).set(to_gauge_value(*used));
            match limit_mib {
                Some(mib) => {
                    limit.get_or_create(&label).set(to_gauge_value(mib.saturating_mul(BYTES_PER_MIB)));
                }
                None => {
                    limit.remove(&label);
                }
            }
            current.insert(label);
        }
        let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
        for gone in known.difference(&current) {
            memory.remove(gone);
            limit.remove(gone);
        }
        *known = current;
    }

    /// Counts a finding about a tenant that exceeded its limits.
    pub fn count_finding(&self, kind: &str) {
        self.tenants.findings.get_or_create(&FindingLabels { kind: kind.to_owned() }).inc();
    }

    /// Counts a failed operation.
    pub fn count_error(&self, reason: &'static str) {
        self.errors.get_or_create(&ErrorLabels { reason: reason.to_owned() }).inc();
    }

    /// Sets the metrics of the node from its status, and removes the series of devices and pods
    /// that the status does not list.
    pub fn set_node_status(&self, status: &GpuNodeStatus) {
        let _update = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let mut known = self.lock_known();
        self.count_share_seconds(&mut known, now);
        self.clear_node_status();
        known.devices = status.gpus.iter().flat_map(device_labels).collect();
        self.device_counters.set_devices(&known.devices);
        let gpus = status.gpus.iter().map(gpu_labels).collect();
        for removed in std::mem::replace(&mut known.gpus, gpus).difference(&known.gpus) {
            self.gpus.remove(removed);
        }
        self.expected_gpus.set(status.expected_gpus.into());
        let missing = status.gpus.iter().filter(|gpu| gpu.health.reason == HEALTH_GPU_MISSING).count();
        self.missing_gpus.set(i64::try_from(missing).unwrap_or(i64::MAX));
        let mut held = BTreeMap::new();
        for gpu in &status.gpus {
            self.set_gpu(&known, gpu);
            for allocation in &gpu.allocations {
                self.set_allocation(&known, allocation, &mut held);
            }
        }
        let ended: Vec<ShareLabels> =
            known.shares.replace(held.clone()).into_keys().filter(|label| !held.contains_key(label)).collect();
        for label in ended {
            self.tenants.share_seconds.remove(&label);
        }
        for label in held.keys() {
            drop(self.tenants.share_seconds.get_or_create(label));
            known.namespaces.insert(label.into(), now);
        }
    }

    /// Removes the series that [`Self::set_node_status`] sets again from the new status.
    fn clear_node_status(&self) {
        for family in [&self.total, &self.in_use, &self.unhealthy] {
            family.clear();
        }
        self.gpu_healthy.clear();
        self.gpu_quiesced.clear();
        self.unhealthy_devices.clear();
        self.doors.clear();
        self.restarts.clear();
        self.clients.clear();
        self.gpus.clear_status();
        for family in [&self.tenants.shares, &self.tenants.sms, &self.tenants.clients] {
            family.clear();
        }
    }

    /// Sets the metrics of a GPU and its MIG devices.
    fn set_gpu(&self, known: &KnownSeries, gpu: &GpuStatus) {
        let label = gpu_labels(gpu);
        let of_gpu = GpuLabels { gpu: label.gpu.clone(), uuid: label.uuid.clone(), model: gpu.model.clone() };
        self.gpu_healthy.get_or_create(&of_gpu).set(i64::from(gpu.health.healthy));
        let quiesced = gpu.quiesce.as_ref().is_some_and(|quiesce| quiesce.quiesced);
        self.gpu_quiesced.get_or_create(&of_gpu).set(i64::from(quiesced));
        self.gpus.set_status(&label, gpu);
        let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
        let instances = instances.filter_map(|instance| Some((&instance.uuid, instance.health.as_ref()?)));
        for (device, health) in instances.chain([(&gpu.uuid, &gpu.health)]) {
            if !health.reason.is_empty() {
                let DeviceLabels { gpu, uuid } = known.labels(device);
                let (class, reason) = (health.class.clone(), health.reason.clone());
                self.unhealthy_devices.get_or_create(&UnhealthyLabels { gpu, uuid, class, reason }).set(1);
            }
        }
        for slices in &gpu.slices {
            let DeviceLabels { gpu, uuid } = known.labels(&slices.device);
            let label = SliceLabels { gpu, uuid, resource: slices.resource.clone() };
            self.total.get_or_create(&label).inc_by(i64::from(slices.total));
            self.in_use.get_or_create(&label).inc_by(i64::from(slices.in_use));
            self.unhealthy.get_or_create(&label).inc_by(i64::from(slices.unhealthy));
        }
        for daemon in &gpu.mps {
            let label = known.labels(&daemon.device);
            self.restarts.get_or_create(&label).set(i64::from(daemon.restarts));
            if !daemon.door.is_empty() {
                let DeviceLabels { gpu, uuid } = label;
                self.doors.get_or_create(&DoorLabels { gpu, uuid, door: daemon.door.clone() }).set(1);
            }
        }
    }

    /// Sets the metrics of an allocation, and adds its slices to `held`.
    fn set_allocation(
        &self,
        known: &KnownSeries,
        allocation: &AllocationStatus,
        held: &mut BTreeMap<ShareLabels, u32>,
    ) {
        let device = known.labels(&allocation.device);
        self.clients.get_or_create(&device).inc_by(i64::from(allocation.clients));
        let DeviceLabels { gpu, uuid } = device;
        let (namespace, pod) = allocation.pod.split_once('/').unwrap_or(("", &allocation.pod));
        let label = ShareLabels {
            namespace: namespace.to_owned(),
            pod: pod.to_owned(),
            container: allocation.container.clone(),
            gpu,
            uuid,
            resource: allocation.resource.clone(),
        };
        let shares = u32::try_from(allocation.ids.len()).unwrap_or(u32::MAX);
        self.tenants.shares.get_or_create(&label).inc_by(shares.into());
        if let Some(sms) = allocation.sms {
            self.tenants.sms.get_or_create(&label).set(sms.into());
            self.tenants.clients.get_or_create(&label).set(allocation.clients.into());
        }
        *held.entry(label).or_default() += shares;
    }

    /// Counts share-seconds until `now`, and removes namespaces that have held no shares for long.
    fn count_share_seconds(&self, known: &mut KnownSeries, now: Instant) {
        for (label, seconds) in known.shares.advance(now) {
            self.tenants.share_seconds.get_or_create(label).inc_by(seconds);
            self.namespace_share_seconds.get_or_create(&label.into()).inc_by(seconds);
            known.namespaces.insert(label.into(), now);
        }
        known.namespaces.retain(|label, held_at| {
            let keep = now.saturating_duration_since(*held_at) < NAMESPACE_RETENTION;
            if !keep {
                self.namespace_share_seconds.remove(label);
            }
            keep
        });
    }

    /// Returns the UUIDs of the node's GPUs.
    pub fn gpu_uuids(&self) -> Vec<String> {
        self.lock_known().gpus.iter().map(|label| label.uuid.clone()).collect()
    }

    /// Sets the metrics of a GPU from NVML's readings. `None` means that NVML did not answer.
    /// Ignores GPUs that the last status does not list.
    pub fn set_readings(&self, uuid: &str, readings: Option<&GpuReadings>) {
        let _update = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        let known = self.lock_known();
        let Some(label) = known.gpus.iter().find(|label| label.uuid == uuid) else { return };
        self.gpus.set_readings(label, readings);
    }

    /// Removes the readings of a GPU, because the agent must not query the GPU now.
    pub fn forget_readings(&self, uuid: &str) {
        let _update = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        let known = self.lock_known();
        if let Some(label) = known.gpus.iter().find(|label| label.uuid == uuid) {
            self.gpus.forget_readings(label);
        }
    }

    fn lock_known(&self) -> MutexGuard<'_, KnownSeries> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the text of `/metrics`.
    ///
    /// # Errors
    /// Returns an error if a metric cannot be formatted.
    pub fn encode(&self) -> Result<String, std::fmt::Error> {
        self.descriptors.refresh();
        let registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        self.count_share_seconds(&mut self.lock_known(), Instant::now());
        let mut text = String::new();
        encode(&mut text, &registry)?;
        Ok(text)
    }
}

impl KnownSeries {
    /// Returns the labels of a GPU or MIG device. `gpu` is empty if the status does not list the
    /// device.
    fn labels(&self, uuid: &str) -> DeviceLabels {
        let unknown = || DeviceLabels { gpu: String::new(), uuid: uuid.to_owned() };
        self.devices.get(uuid).cloned().unwrap_or_else(unknown)
    }
}

fn gpu_labels(gpu: &GpuStatus) -> DeviceLabels {
    DeviceLabels { gpu: gpu.index.to_string(), uuid: gpu.uuid.clone() }
}

/// Returns the labels of a GPU, of its MIG devices and of all other devices in the GPU's status, by
/// UUID.
fn device_labels(gpu: &GpuStatus) -> impl Iterator<Item = (String, DeviceLabels)> {
    let instances = gpu.mig.iter().flat_map(|mig| &mig.instances).map(|instance| &instance.uuid);
    let served = gpu.slices.iter().map(|slices| &slices.device);
    let allocated = gpu.allocations.iter().map(|allocation| &allocation.device);
    let devices = instances.chain(served).chain(allocated).chain([&gpu.uuid]);
    let index = gpu.index.to_string();
    devices.map(move |uuid| (uuid.clone(), DeviceLabels { gpu: index.clone(), uuid: uuid.clone() }))
}

fn mig_change_name(change: &MigChange) -> &'static str {
    match change {
        MigChange::Destroy(_) => "destroy",
        MigChange::Create { .. } => "create",
        MigChange::Mode(true) => "mode-on",
        MigChange::Mode(false) => "mode-off",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenants::violations::Tenant;

    #[test]
    fn series_of_removed_tenants_are_deleted_and_unlimited_tenants_have_no_limit() {
        let metrics = Metrics::new();
        let usage = |pod: &str, limit_mib| TenantUsage {
            tenant: Tenant { namespace: "ns".into(), pod: pod.into(), container: "c".into() },
            device: "GPU-a".into(),
            bytes: 5 << 20,
            limit_mib,
        };
        let series = |metrics: &Metrics| {
            let text = metrics.encode().unwrap();
            let lines = text.lines().filter(|line| line.starts_with("cleave_tenant_memory"));
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        metrics.set_tenant_memory(&[usage("p", Some(4))]);
        let labels = r#"{namespace="ns",pod="p",container="c",gpu="",uuid="GPU-a"}"#;
        assert_eq!(
            series(&metrics),
            [
                format!("cleave_tenant_memory_bytes{labels} 5242880"),
                format!("cleave_tenant_memory_limit_bytes{labels} 4194304"),
            ]
        );
        metrics.set_tenant_memory(&[usage("p", None)]);
        assert_eq!(series(&metrics).len(), 1);
        metrics.set_tenant_memory(&[usage("q", None)]);
        assert!(series(&metrics)[0].contains(r#"pod="q""#));
        metrics.set_tenant_memory(&[]);
        assert!(series(&metrics).is_empty());
        metrics.count_finding("OutsideMps");
        metrics.count_error("nvml");
        let text = metrics.encode().unwrap();
        assert!(text.contains(r#"cleave_tenant_findings_total{kind="OutsideMps"} 1"#), "{text}");
        assert!(
            text.contains(r#"cleave_agent_errors_total{reason="nvml"} 1"#),
            "the agent's own metrics have their prefix"
        );
    }
    #[test]
    fn shares_have_series_until_their_container_ends_and_namespaces_keep_their_share_seconds() {
        let metrics = Metrics::for_node("n");
        let allocation = AllocationStatus {
            pod: "ns/p".into(),
            container: "c".into(),
            resource: "r".into(),
            device: "MIG-a".into(),
            ids: vec!["MIG-a::0".into(), "MIG-a::1".into()],
            sms: Some(26),
            memory_mib: Some(3),
            clients: 4,
            ..AllocationStatus::default()
        };
        let gpu =
            |allocations| GpuStatus { uuid: "GPU-a".into(), index: 7, sms: 132, allocations, ..GpuStatus::default() };
        let status = |allocations| GpuNodeStatus { gpus: vec![gpu(allocations)], ..GpuNodeStatus::default() };
        metrics.set_node_status(&status(vec![allocation]));
        let text = metrics.encode().unwrap();
        let labels = r#"node="n",namespace="ns",pod="p",container="c",gpu="7",uuid="MIG-a",resource="r""#;
        for line in [
            &format!("cleave_tenant_shares{{{labels}}} 2"),
            &format!("cleave_tenant_sm_limit{{{labels}}} 26"),
            &format!("cleave_tenant_mps_clients{{{labels}}} 4"),
            r#"cleave_gpu_sms{node="n",gpu="7",uuid="GPU-a"} 132"#,
            r#"cleave_gpu_sms_allocated{node="n",gpu="7",uuid="GPU-a"} 26"#,
            r#"cleave_gpu_memory_allocated_bytes{node="n",gpu="7",uuid="GPU-a"} 3145728"#,
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        assert!(text.contains(&format!("cleave_tenant_share_seconds_total{{{labels}}}")), "{text}");

        metrics.set_node_status(&status(vec![]));
        let text = metrics.encode().unwrap();
        assert!(!text.contains(r#"pod="p""#), "{text}");
        let seconds =
            r#"cleave_agent_namespace_share_seconds_total{node="n",namespace="ns",gpu="7",uuid="MIG-a",resource="r"} "#;
        assert!(text.contains(seconds), "{text}");
    }

    #[test]
    fn unreported_values_have_no_series_and_energy_restarts_with_the_driver() {
        let metrics = Metrics::new();
        let gpu = GpuStatus { uuid: "GPU-a".into(), ..GpuStatus::default() };
        metrics.set_node_status(&GpuNodeStatus { gpus: vec![gpu], ..GpuNodeStatus::default() });
        let value = |name: &str| {
            let text = metrics.encode().unwrap();
            let line = text.lines().find(|line| line.starts_with(&format!("{name}{{")))?;
            line.rsplit_once(' ').map(|(_, value)| value.to_owned())
        };
        let read = |energy_millijoules, busy_percent| {
            metrics.set_readings(
                "GPU-a",
                Some(&GpuReadings { energy_millijoules, busy_percent, ..GpuReadings::default() }),
            );
            (value("cleave_gpu_energy_joules_total"), value("cleave_gpu_utilization_ratio"))
        };
        assert_eq!(read(Some(2500), Some(50)), (Some("2.5".into()), Some("0.5".into())));
        assert_eq!(read(Some(4000), None), (Some("4.0".into()), None), "a GPU in MIG mode");
        assert_eq!(read(Some(1000), Some(0)), (Some("1.0".into()), Some("0.0".into())));
        assert_eq!(value("cleave_gpu_throttled"), None);
        metrics.set_readings("GPU-a", None);
        assert_eq!((value("cleave_gpu_up"), value("cleave_gpu_utilization_ratio")), (Some("0".into()), None));
    }
}
