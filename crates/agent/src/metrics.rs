//! Prometheus metrics of the agent.
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use cleave_api::gpunode::GpuNodeStatus;
use cleave_serve::descriptors::{self, Usage};
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::gpu::mig::{self, MigChange};
use crate::gpu::xid::FaultClass;
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
    device: String,
    resource: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct GpuLabels {
    gpu: String,
    model: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DeviceLabels {
    device: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DoorLabels {
    device: String,
    door: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct XidLabels {
    device: String,
    xid: u64,
    class: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct UnhealthyLabels {
    device: String,
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

/// Result of terminating a client of a terminating pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum TerminationOutcome {
    /// The client was terminated.
    Done,
    /// An attempt failed. The agent repeats it.
    Failed,
    /// The client was not terminated before its pod's containers could be killed.
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
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FindingLabels {
    kind: String,
}

/// Handle to the agent's metrics.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    allocations: Family<AllocateLabels, Counter>,
    split_requests: Family<ResourceLabels, Counter>,
    waits: Family<WaitLabels, Counter>,
    total: Family<SliceLabels, Gauge>,
    in_use: Family<SliceLabels, Gauge>,
    unhealthy: Family<SliceLabels, Gauge>,
    gpu_healthy: Family<GpuLabels, Gauge>,
    gpu_quiesced: Family<GpuLabels, Gauge>,
    restarts: Family<DeviceLabels, Gauge>,
    doors: Family<DoorLabels, Gauge>,
    descriptors: DescriptorMetrics,
    clients: Family<DeviceLabels, Gauge>,
    unhealthy_devices: Family<UnhealthyLabels, Gauge>,
    xids: Family<XidLabels, Counter>,
    faults: Family<DeviceLabels, Counter>,
    errors: Family<ErrorLabels, Counter>,
    changes: Family<ChangeLabels, Counter>,
    terminations: Family<TerminationLabels, Counter>,
    tenants: TenantMetrics,
    registry: Arc<Mutex<Registry>>,
}

/// Open files of the agent's process.
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
    memory: Family<TenantLabels, Gauge>,
    limit: Family<TenantLabels, Gauge>,
    findings: Family<FindingLabels, Counter>,
    /// Labels that have a series. The series of a removed tenant is also removed.
    known: Arc<Mutex<BTreeSet<TenantLabels>>>,
}

impl TenantMetrics {
    fn register(&self, registry: &mut Registry) {
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
    /// Registers all metrics. Metrics of tenants have the prefix `cleave_tenant`, and metrics of
    /// open files have the prefix `process`. All others have `cleave_agent`.
    pub fn new() -> Self {
        let metrics = Self::default();
        let mut all = Registry::default();
        metrics.descriptors.register(&mut all);
        metrics.tenants.register(all.sub_registry_with_prefix("cleave_tenant"));
        let registry = all.sub_registry_with_prefix("cleave_agent");
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
        let quiesced = "Whether a GPU is quiesced. While one is, the node's other GPUs are not monitored";
        registry.register("gpu_quiesced", quiesced, metrics.gpu_quiesced.clone());
        registry.register("mps_restarts", "Restarts of an MPS daemon", metrics.restarts.clone());
        let doors = "1 for each MPS daemon, by whether its doors enforce limits: Hard, Advisory or Unknown";
        registry.register("mps_door", doors, metrics.doors.clone());
        registry.register("mps_clients", "MPS clients of a device's allocations", metrics.clients.clone());
        let help = "1 for each GPU and MIG device that cannot serve slices or should be reset, by class and reason";
        registry.register("gpu_problem", help, metrics.unhealthy_devices.clone());
        registry.register("xids", "XIDs, by device, number and health class", metrics.xids.clone());
        registry.register(
            "mps_faults",
            "Fatal GPU errors that broke all MPS clients of a device",
            metrics.faults.clone(),
        );
        registry.register(
            "mig_changes",
            "Changes of MIG mode and MIG instances, by change and result",
            metrics.changes.clone(),
        );
        let terminations = "Terminations of MPS clients of terminating pods, by outcome: done, failed, too late";
        registry.register("client_terminations", terminations, metrics.terminations.clone());
        registry.register("errors", "Failed operations that are retried, by reason", metrics.errors.clone());
        *metrics.registry.lock().unwrap_or_else(PoisonError::into_inner) = all;
        metrics
    }

    /// Counts an `Allocate` call.
    pub fn count_allocation(&self, resource: &str, outcome: AllocateOutcome) {
        self.allocations.get_or_create(&AllocateLabels { resource: resource.to_owned(), outcome }).inc();
    }

    /// Counts a request that was refused because its shares were on several GPUs.
    pub fn count_split_request(&self, resource: &str) {
        self.split_requests.get_or_create(&ResourceLabels { resource: resource.to_owned() }).inc();
    }

    /// Counts a request that waited until its pod was known. `in_time` states whether the API
    /// server reported the pod before the timeout.
    pub fn count_pod_wait(&self, in_time: bool) {
        self.waits.get_or_create(&WaitLabels { result: if in_time { "reported" } else { "timeout" } }).inc();
    }

    /// Counts an XID.
    pub fn count_xid(&self, gpu: &str, xid: u64, class: FaultClass) {
        self.xids.get_or_create(&XidLabels { device: gpu.to_owned(), xid, class: class.as_str() }).inc();
    }

    /// Counts fatal GPU errors under MPS.
    pub fn count_faults(&self, device: &str, count: u64) {
        self.faults.get_or_create(&DeviceLabels { device: device.to_owned() }).inc_by(count);
    }

    /// Counts the result of terminating a client of a terminating pod.
    pub fn count_termination(&self, outcome: TerminationOutcome) {
        self.terminations.get_or_create(&TerminationLabels { outcome }).inc();
    }

    /// Counts a MIG change.
    pub fn count_mig_change(&self, change: &MigChange, outcome: &mig::ChangeOutcome) {
        let change = match change {
            MigChange::Destroy(_) => "destroy",
            MigChange::Create { .. } => "create",
            MigChange::Mode(true) => "mode-on",
            MigChange::Mode(false) => "mode-off",
        };
        let result = match outcome {
            mig::ChangeOutcome::Done => "done",
            mig::ChangeOutcome::Busy(_) => "busy",
            mig::ChangeOutcome::AfterReset => "after-reset",
            mig::ChangeOutcome::Slow(_) => "slow",
            mig::ChangeOutcome::Failed(_) => "failed",
        };
        self.changes.get_or_create(&ChangeLabels { change, result }).inc();
    }

    /// Sets the memory use of tenants, and removes the series of tenants without an entry in
    /// `usage`.
    pub fn set_tenants(&self, usage: &[TenantUsage]) {
        let TenantMetrics { memory, limit, known, .. } = &self.tenants;
        let bytes = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        let mut current = BTreeSet::new();
        for TenantUsage { tenant, device, bytes: used, limit_mib } in usage {
            let label = TenantLabels {
                namespace: tenant.namespace.clone(),
                pod: tenant.pod.clone(),
                container: tenant.container.clone(),
                gpu: device.clone(),
            };
            memory.get_or_create(&label).set(bytes(*used));
            match limit_mib {
                Some(mib) => {
                    limit.get_or_create(&label).set(bytes(mib.saturating_mul(1 << 20)));
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

    /// Counts a failed operation that will be retried.
    pub fn count_error(&self, reason: &'static str) {
        self.errors.get_or_create(&ErrorLabels { reason: reason.to_owned() }).inc();
    }

    /// Sets the metrics of the node from its status, and removes the series of devices that the
    /// status does not list.
    pub fn set_node(&self, status: &GpuNodeStatus) {
        for family in [&self.total, &self.in_use, &self.unhealthy] {
            family.clear();
        }
        self.gpu_healthy.clear();
        self.gpu_quiesced.clear();
        self.unhealthy_devices.clear();
        self.restarts.clear();
        self.doors.clear();
        self.clients.clear();
        for gpu in &status.gpus {
            let of_gpu = GpuLabels { gpu: gpu.uuid.clone(), model: gpu.model.clone() };
            self.gpu_healthy.get_or_create(&of_gpu).set(i64::from(gpu.health.healthy));
            let quiesced = gpu.quiesce.as_ref().is_some_and(|quiesce| quiesce.quiesced);
            self.gpu_quiesced.get_or_create(&of_gpu).set(i64::from(quiesced));
            let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
            let instances = instances.filter_map(|instance| Some((&instance.uuid, instance.health.as_ref()?)));
            for (device, health) in instances.chain([(&gpu.uuid, &gpu.health)]) {
                if !health.reason.is_empty() {
                    let (device, class, reason) = (device.clone(), health.class.clone(), health.reason.clone());
                    self.unhealthy_devices.get_or_create(&UnhealthyLabels { device, class, reason }).set(1);
                }
            }
            for slices in &gpu.slices {
                let label = SliceLabels { device: slices.device.clone(), resource: slices.resource.clone() };
                self.total.get_or_create(&label).inc_by(i64::from(slices.total));
                self.in_use.get_or_create(&label).inc_by(i64::from(slices.in_use));
                self.unhealthy.get_or_create(&label).inc_by(i64::from(slices.unhealthy));
            }
            for daemon in &gpu.mps {
                self.restarts
                    .get_or_create(&DeviceLabels { device: daemon.device.clone() })
                    .set(i64::from(daemon.restarts));
                if !daemon.door.is_empty() {
                    let (device, door) = (daemon.device.clone(), daemon.door.clone());
                    self.doors.get_or_create(&DoorLabels { device, door }).set(1);
                }
            }
            for allocation in &gpu.allocations {
                self.clients
                    .get_or_create(&DeviceLabels { device: allocation.device.clone() })
                    .inc_by(i64::from(allocation.clients));
            }
        }
    }

    /// Returns the text of `/metrics`.
    ///
    /// # Errors
    /// Returns an error if a metric cannot be formatted.
    pub fn encode(&self) -> Result<String, std::fmt::Error> {
        self.descriptors.refresh();
        let mut text = String::new();
        encode(&mut text, &self.registry.lock().unwrap_or_else(PoisonError::into_inner))?;
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenants::violations::Tenant;

    #[test]
    fn gpu_quiesced_is_1_when_the_quiesce_is_complete() {
        let metrics = Metrics::new();
        let series = |quiesces: &[(&str, Option<bool>)]| {
            let gpu = |(uuid, quiesced): &(&str, Option<bool>)| {
                let mut gpu = serde_json::json!({"uuid": uuid, "index": 0, "model": "H100", "memoryMib": 1, "sms": 1,
                    "health": {"healthy": true}});
                if let Some(quiesced) = quiesced {
                    gpu["quiesce"] = serde_json::json!({"quiesced": quiesced, "message": ""});
                }
                gpu
            };
            let gpus: Vec<_> = quiesces.iter().map(gpu).collect();
            metrics.set_node(&serde_json::from_value(serde_json::json!({"gpus": gpus})).unwrap());
            let text = metrics.encode().unwrap();
            let value = |line: &str| line.strip_prefix("cleave_agent_gpu_quiesced{gpu=\"").map(str::to_owned);
            let mut values: Vec<String> = text.lines().filter_map(value).collect();
            values.sort();
            values
        };
        let of = |uuid: &str, value: u8| format!("{uuid}\",model=\"H100\"}} {value}");
        let all = series(&[("GPU-a", None), ("GPU-b", Some(false)), ("GPU-c", Some(true))]);
        assert_eq!(all, [of("GPU-a", 0), of("GPU-b", 0), of("GPU-c", 1)]);
        assert_eq!(series(&[("GPU-c", None)]), [of("GPU-c", 0)], "removed GPUs have no series");
    }

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
        metrics.set_tenants(&[usage("p", Some(4))]);
        let labels = r#"{namespace="ns",pod="p",container="c",gpu="GPU-a"}"#;
        assert_eq!(
            series(&metrics),
            [
                format!("cleave_tenant_memory_bytes{labels} 5242880"),
                format!("cleave_tenant_memory_limit_bytes{labels} 4194304"),
            ]
        );
        metrics.set_tenants(&[usage("p", None)]);
        assert_eq!(series(&metrics).len(), 1);
        metrics.set_tenants(&[usage("q", None)]);
        assert!(series(&metrics)[0].contains(r#"pod="q""#));
        metrics.set_tenants(&[]);
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
}
