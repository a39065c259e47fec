//! The operator's metrics.
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cleave_serve::descriptors;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::policies::demand;
use crate::wait_clock::WaitClock;

mod quotas;

pub(crate) use quotas::{NO_QUOTA, QuotaMetrics};

/// The operator's metrics. Clones share their values.
#[derive(Debug, Clone)]
pub(crate) struct Metrics {
    /// Passes over the whole cluster, by result.
    pub(crate) passes: Family<Outcome, Counter>,
    /// Objects written, by kind and result.
    pub(crate) writes: Family<WriteLabels, Counter>,
    /// Errors of watches, by kind. Each watch retries.
    pub(crate) watch_errors: Family<KindLabel, Counter>,
    /// Terms in which the stores took too long to become as new as the lease.
    pub(crate) catch_ups_late: Counter,
    /// Malformed objects, by kind.
    pub(crate) malformed: Family<KindLabel, Gauge>,
    /// Valid policies.
    pub(crate) policies: Gauge,
    /// Nodes with a desired state.
    pub(crate) nodes: Gauge,
    /// Plans of GPUs that are partitioned on demand, by result.
    pub(crate) plans: Family<Outcome, Counter>,
    /// Time to compute one plan.
    pub(crate) plan_seconds: Histogram,
    /// Time from the first observed change to the last `GpuNode` that a pass writes. Passes that
    /// write no `GpuNode` are not measured.
    pub(crate) reaction_seconds: Histogram,
    /// Time from the write of a changed `GpuNode` spec until its agent reports that it is served.
    pub(crate) repartition_seconds: Histogram,
    /// Steps that agents reported, by result.
    pub(crate) steps: Family<Outcome, Counter>,
    /// Pods that wait for GPUs that are partitioned on demand, by reason.
    pub(crate) pods_waiting: Family<ReasonLabel, Gauge>,
    /// Pods released to the scheduler, by result.
    pub(crate) pods_released: Family<Outcome, Counter>,
    /// Duration of one decision about gated pods, including reads of the stores and excluding
    /// writes.
    pub(crate) placement_seconds: Histogram,
    /// Time from the operator's first reconcile with a pod at the placement gate to the patch that
    /// released the pod.
    pub(crate) gate_wait_seconds: Histogram,
    /// Pods evicted for waiting pods, by result.
    pub(crate) evictions: Family<Outcome, Counter>,
    /// Searches for preemption victims.
    pub(crate) preemption_searches: Counter,
    /// Stranded pods evicted so that their controllers recreate them, by result.
    pub(crate) stranded_pods_recreated: Family<Outcome, Counter>,
    /// Pods evicted because they exceeded their limits, by result.
    pub(crate) tenant_evictions: Family<Outcome, Counter>,
    /// Writes of the condition `WithinShare` of pods, by result.
    pub(crate) tenant_conditions: Family<Outcome, Counter>,
    /// MPS hosts whose `DaemonSet` has a newer revision.
    pub(crate) hosts_outdated: Gauge,
    /// MPS hosts deleted for replacement, by result.
    pub(crate) hosts_replaced: Family<Outcome, Counter>,
    /// 1 while the replacement of MPS hosts is stopped because a new MPS host is not working.
    pub(crate) rollout_stopped: Gauge,
    /// Pods at the placement gate, by reason.
    pub(crate) gated: Family<ReasonLabel, Gauge>,
    /// The pods at the placement gate that have waited longest.
    pub(crate) longest_waits: Family<GatedPodLabels, Gauge<f64, AtomicU64>>,
    /// Waiting time of all pods at the placement gate, by reason.
    pub(crate) gated_seconds: Family<ReasonLabel, Counter<f64, AtomicU64>>,
    waits: Arc<Mutex<WaitClock>>,
    /// Pods at the placement gate that are reported to cluster autoscalers.
    pub(crate) reported: Gauge,
    /// Fraction of the free memory of GPUs partitioned on demand that is on partly used GPUs.
    pub(crate) fragmentation: Gauge<f64, AtomicU64>,
    /// Nodes that are excluded from plans.
    pub(crate) nodes_excluded: Gauge,
    /// 1 while this process is the leader.
    pub(crate) leader: Gauge,
    /// Amounts, pods and evictions of quotas.
    pub(crate) quotas: QuotaMetrics,
    resident: Gauge,
    open_files: Gauge,
    max_open_files: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        // Buckets from 1 ms to 33 s.
        let seconds = || Histogram::new(exponential_buckets(0.001, 2.0, 16));
        Self {
            passes: Family::default(),
            writes: Family::default(),
            watch_errors: Family::default(),
            catch_ups_late: Counter::default(),
            malformed: Family::default(),
            policies: Gauge::default(),
            nodes: Gauge::default(),
            plans: Family::default(),
            plan_seconds: seconds(),
            reaction_seconds: seconds(),
            // From 0.1 s to 55 minutes, because a repartitioning may wait until pods end.
            repartition_seconds: Histogram::new(exponential_buckets(0.1, 2.0, 16)),
            steps: Family::default(),
            pods_waiting: Family::default(),
            pods_released: Family::default(),
            placement_seconds: Histogram::new(PLACEMENT_BUCKETS),
            gate_wait_seconds: seconds(),
            hosts_outdated: Gauge::default(),
            hosts_replaced: Family::default(),
            rollout_stopped: Gauge::default(),
            gated: Family::default(),
            longest_waits: Family::default(),
            gated_seconds: Family::default(),
            waits: Arc::default(),
            reported: Gauge::default(),
            evictions: Family::default(),
            preemption_searches: Counter::default(),
            stranded_pods_recreated: Family::default(),
            tenant_evictions: Family::default(),
            tenant_conditions: Family::default(),
            fragmentation: Gauge::default(),
            nodes_excluded: Gauge::default(),
            leader: Gauge::default(),
            quotas: QuotaMetrics::default(),
            resident: Gauge::default(),
            open_files: Gauge::default(),
            max_open_files: Gauge::default(),
        }
    }
}

/// Upper bounds of the buckets of [`Metrics::placement_seconds`], in seconds. Most bounds are below
/// 100 ms, the range of most decisions.
const PLACEMENT_BUCKETS: [f64; 16] =
    [0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 1.0, 5.0];

/// Label: why a pod waits.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct ReasonLabel {
    pub(crate) reason: &'static str,
}

/// Labels: a pod at the placement gate, and why the pod waits.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct GatedPodLabels {
    pub(crate) namespace: String,
    pub(crate) pod: String,
    pub(crate) reason: &'static str,
}

/// Label: the result of an operation.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Outcome {
    pub(crate) result: &'static str,
}

/// Labels: the kind of the written object, and the result of the write.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct WriteLabels {
    pub(crate) kind: &'static str,
    pub(crate) result: &'static str,
}

/// Label: a kind of object.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct KindLabel {
    pub(crate) kind: &'static str,
}

impl Metrics {
    /// Registers all metrics.
    pub(crate) fn register(&self, registry: &mut Registry) {
        registry.register("process_resident_memory_bytes", "Resident memory", self.resident.clone());
        registry.register("process_open_fds", "Open files", self.open_files.clone());
        registry.register("process_max_fds", "Maximum number of open files", self.max_open_files.clone());
        self.quotas.register(registry.sub_registry_with_prefix("cleave_quota"));
        let registry = registry.sub_registry_with_prefix("cleave_operator");
        registry.register("passes", "Passes over the whole cluster, by result", self.passes.clone());
        registry.register("writes", "Objects written, by kind and result", self.writes.clone());
        registry.register("watch_errors", "Watch errors, by kind; every watch is retried", self.watch_errors.clone());
        registry.register(
            "catch_ups_late",
            "Terms of leadership in which the operator could not write for a minute or longer, because watches lagged or requests failed",
            self.catch_ups_late.clone(),
        );
        registry.register("malformed_objects", "Objects that do not match their CRD, by kind", self.malformed.clone());
        registry.register("policies", "SharingPolicies that are valid", self.policies.clone());
        registry.register("nodes", "Nodes with a desired state", self.nodes.clone());
        registry.register("plans", "Plans for GPUs that are partitioned on demand, by result", self.plans.clone());
        registry.register("plan_seconds", "Time to compute one plan", self.plan_seconds.clone());
        registry.register(
            "reaction_seconds",
            "Time from the first change of an object to the last GpuNode written",
            self.reaction_seconds.clone(),
        );
        registry.register(
            "repartition_seconds",
            "Time from a changed GpuNode until its node serves it, including waits for pods",
            self.repartition_seconds.clone(),
        );
        registry.register("steps", "Steps that agents reported, by result", self.steps.clone());
        self.register_placement(registry);
        registry.register("nodes_excluded", "Nodes excluded from plans", self.nodes_excluded.clone());
        registry.register("leader", "1 while this process is the leader", self.leader.clone());
    }

    /// Registers the metrics of waiting pods, evictions and MPS hosts.
    fn register_placement(&self, registry: &mut Registry) {
        registry.register(
            "pods_waiting",
            "Pods that wait for GPUs that are partitioned on demand, by reason",
            self.pods_waiting.clone(),
        );
        registry.register("pods_released", "Pods released to the scheduler, by result", self.pods_released.clone());
        registry.register(
            "placement_seconds",
            "Time of one decision about pods at the placement gate, without writes",
            self.placement_seconds.clone(),
        );
        registry.register(
            "gate_wait_seconds",
            "Time that a pod waited at the placement gate",
            self.gate_wait_seconds.clone(),
        );
        registry.register("evictions", "Pods evicted for waiting pods, by result", self.evictions.clone());
        registry.register("preemption_searches", "Searches for preemption victims", self.preemption_searches.clone());
        registry.register(
            "stranded_pods_recreated",
            "Stranded pods evicted so that their controllers recreate them, by result",
            self.stranded_pods_recreated.clone(),
        );
        registry.register(
            "tenant_evictions",
            "Pods evicted because they exceeded their limits, by result",
            self.tenant_evictions.clone(),
        );
        registry.register(
            "tenant_conditions",
            "Writes of the pod condition cleave.dev/WithinShare, by result",
            self.tenant_conditions.clone(),
        );
        registry.register(
            "mps_hosts_outdated",
            "MPS hosts that do not run the newest revision of their DaemonSet",
            self.hosts_outdated.clone(),
        );
        registry.register(
            "mps_hosts_replaced",
            "MPS hosts deleted for replacement, by result",
            self.hosts_replaced.clone(),
        );
        registry.register(
            "mps_host_upgrade_stopped",
            "1 while the replacement of MPS hosts is stopped because a new MPS host is not working",
            self.rollout_stopped.clone(),
        );
        registry.register("pods_gated", "Pods at the placement gate, by reason", self.gated.clone());
        registry.register(
            "pod_waiting_seconds",
            "How long a pod has waited at the placement gate, for the 20 pods that have waited longest",
            self.longest_waits.clone(),
        );
        registry.register(
            "pods_gated_seconds",
            "Total waiting time of all pods at the placement gate, by reason",
            self.gated_seconds.clone(),
        );
        registry.register(
            "pods_reported_unschedulable",
            "Pods at the placement gate that are reported as unschedulable, so that autoscalers add nodes",
            self.reported.clone(),
        );
        registry.register(
            "fragmentation_ratio",
            "Fraction of the free memory of GPUs partitioned on demand that is on partly used GPUs",
            self.fragmentation.clone(),
        );
    }

    /// Clears the metrics that passes set. A process that does not lead reports no values, or 0, so
    /// that the sum over all replicas is the leader's value.
    pub(crate) fn reset_passes(&self) {
        self.malformed.clear();
        self.policies.set(0);
        self.nodes.set(0);
        self.reset_demand();
    }

    /// Clears the metrics of plans for GPUs that are partitioned on demand.
    pub(crate) fn reset_demand(&self) {
        self.pods_waiting.clear();
        self.fragmentation.set(0.0);
        self.nodes_excluded.set(0);
    }

    /// Clears the metrics that placement sets; see [`Metrics::reset_passes`].
    pub(crate) fn reset_placement(&self) {
        self.set_gated(BTreeMap::new(), &[]);
        self.gated.clear();
        self.reported.set(0);
        self.hosts_outdated.set(0);
        self.rollout_stopped.set(0);
        self.quotas.clear_gauges();
    }

    /// Sets the number of pods at the placement gate by reason. Also sets the waiting time of the
    /// pods that have waited longest, each with its reason.
    pub(crate) fn set_gated(&self, gated: BTreeMap<&'static str, u32>, longest: &[(&str, &'static str, Duration)]) {
        let mut waits = self.lock_waits();
        self.count_waits(&mut waits);
        for reason in demand::Reason::ALL.map(demand::Reason::as_str) {
            let pods = gated.get(reason).copied().unwrap_or(0);
            self.gated.get_or_create(&ReasonLabel { reason }).set(pods.into());
        }
        waits.replace(gated);
        self.longest_waits.clear();
        for (pod, reason, waited) in longest {
            let (namespace, pod) = pod.split_once('/').unwrap_or(("", pod));
            let label = GatedPodLabels { namespace: namespace.to_owned(), pod: pod.to_owned(), reason };
            self.longest_waits.get_or_create(&label).set(waited.as_secs_f64());
        }
    }

    fn count_waits(&self, waits: &mut WaitClock) {
        for (reason, seconds) in waits.advance(Instant::now()) {
            self.gated_seconds.get_or_create(&ReasonLabel { reason }).inc_by(seconds);
        }
    }

    fn lock_waits(&self) -> MutexGuard<'_, WaitClock> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Updates the metrics that are computed at each scrape.
    pub(crate) fn refresh(&self, leads: bool) {
        self.count_waits(&mut self.lock_waits());
        self.leader.set(i64::from(leads));
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        self.resident.set(resident_bytes(&status).unwrap_or(0));
        if let Ok(descriptors::Usage { open, limit }) = descriptors::usage() {
            self.open_files.set(i64::try_from(open).unwrap_or(i64::MAX));
            self.max_open_files.set(limit.and_then(|limit| i64::try_from(limit).ok()).unwrap_or(i64::MAX));
        }
    }
}

/// Returns the resident memory in bytes, from the text of `/proc/self/status`. Unlike `statm`, this
/// file does not depend on the page size.
fn resident_bytes(status: &str) -> Option<i64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<i64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;

    use super::{GatedPodLabels, KindLabel, Metrics, ReasonLabel, resident_bytes};

    /// Sets each gauge about the cluster to a value other than 0.
    fn set_all_cluster_gauges(metrics: &Metrics) {
        // Do not use `..`, so that the compiler reports an error here when a metric is added. Set
        // new gauges below.
        let Metrics {
            malformed,
            policies,
            nodes,
            pods_waiting,
            hosts_outdated,
            rollout_stopped,
            gated,
            longest_waits,
            reported,
            fragmentation,
            nodes_excluded,
            quotas,
            // Gauges about this process.
            leader: _,
            resident: _,
            open_files: _,
            max_open_files: _,
            // Counters and histograms.
            passes: _,
            writes: _,
            watch_errors: _,
            catch_ups_late: _,
            plans: _,
            plan_seconds: _,
            reaction_seconds: _,
            steps: _,
            pods_released: _,
            placement_seconds: _,
            gate_wait_seconds: _,
            gated_seconds: _,
            waits: _,
            repartition_seconds: _,
            evictions: _,
            preemption_searches: _,
            stranded_pods_recreated: _,
            tenant_evictions: _,
            tenant_conditions: _,
            hosts_replaced: _,
        } = metrics;
        malformed.get_or_create(&KindLabel { kind: "GpuNode" }).set(1);
        pods_waiting.get_or_create(&ReasonLabel { reason: "no_room" }).set(1);
        gated.get_or_create(&ReasonLabel { reason: "no_room" }).set(1);
        let pod = GatedPodLabels { namespace: "team".to_owned(), pod: "a".to_owned(), reason: "no_room" };
        longest_waits.get_or_create(&pod).set(1.0);
        for gauge in [policies, nodes, hosts_outdated, rollout_stopped, reported, nodes_excluded] {
            gauge.set(1);
        }
        fragmentation.set(1.0);
        quotas.set_gauges(&super::quotas::tests::usages(&["a"]));
    }

    /// Returns the names of the registered gauges about the cluster, and the names of the gauges
    /// that are not 0. A metric family without series is not registered.
    fn cluster_gauges(registry: &Registry) -> (BTreeSet<String>, BTreeSet<String>) {
        const PROCESS_GAUGES: [&str; 4] =
            ["cleave_operator_leader", "process_resident_memory_bytes", "process_open_fds", "process_max_fds"];
        let mut text = String::new();
        encode(&mut text, registry).unwrap();
        let gauge = |line: &str| Some(line.strip_prefix("# TYPE ")?.strip_suffix(" gauge")?.to_owned());
        let mut gauges: BTreeSet<String> = text.lines().filter_map(gauge).collect();
        gauges.retain(|name| !PROCESS_GAUGES.contains(&name.as_str()));
        let series =
            text.lines().filter_map(|line| line.rsplit_once(' ')).filter(|(_, value)| value.parse() != Ok(0.0));
        let names = series.filter_map(|(labelled, _)| labelled.split('{').next().map(str::to_owned));
        let nonzero = names.filter(|name| gauges.contains(name)).collect();
        (gauges, nonzero)
    }

    #[test]
    fn a_process_that_does_not_lead_reports_no_state_of_the_cluster() {
        let metrics = Metrics::default();
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        set_all_cluster_gauges(&metrics);
        let (gauges, nonzero) = cluster_gauges(&registry);
        assert_eq!(nonzero, gauges, "set_all_cluster_gauges sets all gauges");
        metrics.reset_passes();
        metrics.reset_placement();
        assert_eq!(cluster_gauges(&registry).1, BTreeSet::new());
    }

    #[test]
    fn resident_memory_is_read_in_bytes() {
        assert_eq!(resident_bytes("Name:\tcleave\nVmHWM:\t 9000 kB\nVmRSS:\t  8192 kB\n"), Some(8 << 20));
        for nonsense in ["", "VmRSS:", "VmRSS: kB", "VmRSS: x kB", "VmRSS: 9223372036854775807 kB"] {
            assert_eq!(resident_bytes(nonsense), None, "{nonsense:?}");
        }
    }
}
