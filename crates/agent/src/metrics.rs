//! What Prometheus is told.
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use cleave_api::gpunode::GpuNodeStatus;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::gpu::mig::{self, Change};
use crate::gpu::xid::Class;
use crate::tenants::violations::Usage;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answer {
    resource: String,
    outcome: Outcome,
}

/// How a call of the kubelet ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum Outcome {
    /// Given out.
    Granted,
    /// Refused.
    Refused,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Slices {
    device: String,
    resource: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfGpu {
    gpu: String,
    model: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfDevice {
    device: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfXid {
    device: String,
    xid: u64,
    class: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfTrouble {
    device: String,
    class: String,
    reason: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Kind {
    reason: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfResource {
    resource: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Waited {
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Terminated {
    outcome: Termination,
}

/// The outcome of terminating a client of a pod that is being terminated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum Termination {
    /// It was ended.
    Done,
    /// An attempt failed; there will be another.
    Failed,
    /// It was not ended by the time at which its pod's containers may be killed.
    Late,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ChangeLabels {
    change: &'static str,
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, EncodeLabelSet)]
struct OfTenant {
    namespace: String,
    pod: String,
    container: String,
    gpu: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfKind {
    kind: String,
}

/// Metrics of the agent; a handle to share.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    allocations: Family<Answer, Counter>,
    splits: Family<OfResource, Counter>,
    waits: Family<Waited, Counter>,
    total: Family<Slices, Gauge>,
    in_use: Family<Slices, Gauge>,
    unhealthy: Family<Slices, Gauge>,
    gpu_healthy: Family<OfGpu, Gauge>,
    restarts: Family<OfDevice, Gauge>,
    clients: Family<OfDevice, Gauge>,
    trouble: Family<OfTrouble, Gauge>,
    xids: Family<OfXid, Counter>,
    faults: Family<OfDevice, Counter>,
    errors: Family<Kind, Counter>,
    changes: Family<ChangeLabels, Counter>,
    terminations: Family<Terminated, Counter>,
    tenants: Tenants,
    registry: Arc<Mutex<Registry>>,
}

/// What containers use of shared devices.
#[derive(Debug, Clone, Default)]
struct Tenants {
    memory: Family<OfTenant, Gauge>,
    limit: Family<OfTenant, Gauge>,
    findings: Family<OfKind, Counter>,
    /// Those that have a series: it goes with the tenant.
    known: Arc<Mutex<BTreeSet<OfTenant>>>,
}

impl Tenants {
    fn register(&self, registry: &mut Registry) {
        let memory = "Memory of a shared GPU that a container's processes use, as NVML counts it";
        registry.register("memory_bytes", memory, self.memory.clone());
        let limit = "Memory of a shared GPU that a container's shares allow";
        registry.register("memory_limit_bytes", limit, self.limit.clone());
        registry.register("findings", "Tenants found to have left their shares, by how", self.findings.clone());
    }
}

impl Metrics {
    /// Registered under `cleave_agent`, and `cleave_tenant` what is of tenants.
    pub fn new() -> Self {
        let metrics = Self::default();
        let mut all = Registry::default();
        metrics.tenants.register(all.sub_registry_with_prefix("cleave_tenant"));
        let registry = all.sub_registry_with_prefix("cleave_agent");
        registry.register("allocations", "Allocate calls of the kubelet", metrics.allocations.clone());
        registry.register("splits", "Allocate calls refused for shares of several GPUs", metrics.splits.clone());
        let waits = "GetPreferredAllocation calls that came before the API server had told of the pod";
        registry.register("pod_waits", waits, metrics.waits.clone());
        registry.register("slices", "Slices that the kubelet is told of", metrics.total.clone());
        registry.register("slices_in_use", "Slices that containers hold", metrics.in_use.clone());
        registry.register("slices_unhealthy", "Slices told as Unhealthy", metrics.unhealthy.clone());
        registry.register("gpu_healthy", "Whether a GPU can serve", metrics.gpu_healthy.clone());
        registry.register("mps_restarts", "Restarts of an MPS daemon", metrics.restarts.clone());
        registry.register("mps_clients", "Clients of the allocations of a device", metrics.clients.clone());
        let trouble = "GPUs and MIG devices that cannot serve, or should be reset: 1, by class and reason";
        registry.register("gpu_trouble", trouble, metrics.trouble.clone());
        registry.register("xids", "XIDs by GPU, number and what they say of the GPU", metrics.xids.clone());
        registry.register(
            "mps_faults",
            "Fatal GPU errors that broke all MPS clients of a device",
            metrics.faults.clone(),
        );
        registry.register("mig_changes", "MIG instances made and destroyed, by how it ended", metrics.changes.clone());
        let terminations = "Clients of pods that leave that were ended through MPS, attempts that failed, and clients that were too late";
        registry.register("client_terminations", terminations, metrics.terminations.clone());
        registry.register("errors", "What could not be done, by what it was", metrics.errors.clone());
        *metrics.registry.lock().unwrap_or_else(PoisonError::into_inner) = all;
        metrics
    }

    /// A call of `Allocate`.
    pub fn allocate(&self, resource: &str, outcome: Outcome) {
        self.allocations.get_or_create(&Answer { resource: resource.to_owned(), outcome }).inc();
    }

    /// A set of shares of several GPUs was refused.
    pub fn split(&self, resource: &str) {
        self.splits.get_or_create(&OfResource { resource: resource.to_owned() }).inc();
    }

    /// The kubelet waited for its answer, and the pod came, or did not.
    pub fn waited(&self, came: bool) {
        self.waits.get_or_create(&Waited { result: if came { "came" } else { "timeout" } }).inc();
    }

    /// An XID.
    pub fn xid(&self, gpu: &str, xid: u64, class: Class) {
        self.xids.get_or_create(&OfXid { device: gpu.to_owned(), xid, class: class.as_str() }).inc();
    }

    /// Fatal GPU errors under MPS.
    pub fn faults(&self, device: &str, count: u64) {
        self.faults.get_or_create(&OfDevice { device: device.to_owned() }).inc_by(count);
    }

    /// A client of a pod that leaves was to be ended.
    pub fn terminated(&self, outcome: Termination) {
        self.terminations.get_or_create(&Terminated { outcome }).inc();
    }

    /// A change of a GPU by MIG.
    pub fn change(&self, change: &Change, outcome: &mig::Outcome) {
        let change = match change {
            Change::Destroy(_) => "destroy",
            Change::Create { .. } => "create",
            Change::Mode(true) => "mode-on",
            Change::Mode(false) => "mode-off",
        };
        let result = match outcome {
            mig::Outcome::Done => "done",
            mig::Outcome::Busy(_) => "busy",
            mig::Outcome::AfterReset => "after-reset",
            mig::Outcome::Slow(_) => "slow",
            mig::Outcome::Failed(_) => "failed",
        };
        self.changes.get_or_create(&ChangeLabels { change, result }).inc();
    }

    /// What tenants use now; those that are not there any more have no series any more.
    pub fn tenants(&self, usage: &[Usage]) {
        let Tenants { memory, limit, known, .. } = &self.tenants;
        let bytes = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        let mut there = BTreeSet::new();
        for Usage { tenant, device, bytes: used, limit_mib } in usage {
            let label = OfTenant {
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
            there.insert(label);
        }
        let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
        for gone in known.difference(&there) {
            memory.remove(gone);
            limit.remove(gone);
        }
        *known = there;
    }

    /// A tenant was found to have left its share.
    pub fn finding(&self, kind: &str) {
        self.tenants.findings.get_or_create(&OfKind { kind: kind.to_owned() }).inc();
    }

    /// Something that will be tried again.
    pub fn error(&self, reason: &'static str) {
        self.errors.get_or_create(&Kind { reason: reason.to_owned() }).inc();
    }

    /// The node as its status says it; what is not in it any more is gone.
    pub fn node(&self, status: &GpuNodeStatus) {
        for family in [&self.total, &self.in_use, &self.unhealthy] {
            family.clear();
        }
        self.gpu_healthy.clear();
        self.trouble.clear();
        self.restarts.clear();
        self.clients.clear();
        for gpu in &status.gpus {
            let of_gpu = OfGpu { gpu: gpu.uuid.clone(), model: gpu.model.clone() };
            self.gpu_healthy.get_or_create(&of_gpu).set(i64::from(gpu.health.healthy));
            let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
            let instances = instances.filter_map(|instance| Some((&instance.uuid, instance.health.as_ref()?)));
            for (device, health) in instances.chain([(&gpu.uuid, &gpu.health)]) {
                if !health.reason.is_empty() {
                    let (device, class, reason) = (device.clone(), health.class.clone(), health.reason.clone());
                    self.trouble.get_or_create(&OfTrouble { device, class, reason }).set(1);
                }
            }
            for slices in &gpu.slices {
                let label = Slices { device: slices.device.clone(), resource: slices.resource.clone() };
                self.total.get_or_create(&label).inc_by(i64::from(slices.total));
                self.in_use.get_or_create(&label).inc_by(i64::from(slices.in_use));
                self.unhealthy.get_or_create(&label).inc_by(i64::from(slices.unhealthy));
            }
            for daemon in &gpu.mps {
                self.restarts
                    .get_or_create(&OfDevice { device: daemon.device.clone() })
                    .set(i64::from(daemon.restarts));
            }
            for allocation in &gpu.allocations {
                self.clients
                    .get_or_create(&OfDevice { device: allocation.device.clone() })
                    .inc_by(i64::from(allocation.clients));
            }
        }
    }

    /// The text of `/metrics`.
    pub fn encode(&self) -> Result<String, std::fmt::Error> {
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
    fn a_tenants_series_go_with_it_and_an_unlimited_one_has_no_limit() {
        let metrics = Metrics::new();
        let usage = |pod: &str, limit_mib| Usage {
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
        metrics.tenants(&[usage("p", Some(4))]);
        let labels = r#"{namespace="ns",pod="p",container="c",gpu="GPU-a"}"#;
        assert_eq!(
            series(&metrics),
            [
                format!("cleave_tenant_memory_bytes{labels} 5242880"),
                format!("cleave_tenant_memory_limit_bytes{labels} 4194304"),
            ]
        );
        metrics.tenants(&[usage("p", None)]);
        assert_eq!(series(&metrics).len(), 1);
        metrics.tenants(&[usage("q", None)]);
        assert!(series(&metrics)[0].contains(r#"pod="q""#));
        metrics.tenants(&[]);
        assert!(series(&metrics).is_empty());
        metrics.finding("OutsideMps");
        metrics.error("nvml");
        let text = metrics.encode().unwrap();
        assert!(text.contains(r#"cleave_tenant_findings_total{kind="OutsideMps"} 1"#), "{text}");
        assert!(text.contains(r#"cleave_agent_errors_total{reason="nvml"} 1"#), "the others are where they were");
    }
}
