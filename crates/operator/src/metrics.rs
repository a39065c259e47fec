//! What the operator counts.
use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

/// The operator's metrics. Clones count together.
#[derive(Debug, Clone)]
pub(crate) struct Metrics {
    /// Passes: what was read, planned and written as one.
    pub(crate) passes: Family<Outcome, Counter>,
    /// Objects written.
    pub(crate) writes: Family<Write, Counter>,
    /// Errors of watches; each is tried again.
    pub(crate) watch_errors: Family<Kind, Counter>,
    /// Objects that are not what their definition says.
    pub(crate) malformed: Family<Kind, Gauge>,
    /// Policies that are in force.
    pub(crate) policies: Gauge,
    /// Nodes that are planned.
    pub(crate) nodes: Gauge,
    /// Plans of GPUs by demand.
    pub(crate) plans: Family<Outcome, Counter>,
    /// How long one took to make.
    pub(crate) plan_seconds: Histogram,
    /// From the first change that was seen to the last node written, where something was.
    pub(crate) reaction_seconds: Histogram,
    /// What nodes did of what they were told.
    pub(crate) steps: Family<Outcome, Counter>,
    /// Pods that wait for GPUs.
    pub(crate) pods_waiting: Family<Reason, Gauge>,
    /// Pods let through to the scheduler, by why.
    pub(crate) gates_opened: Family<Outcome, Counter>,
    /// From the first sight of a pod at the gate to the patch that let it through.
    pub(crate) gate_seconds: Histogram,
    /// Pods told to leave for others of higher priority.
    pub(crate) evictions: Family<Outcome, Counter>,
    /// Stranded pods evicted so that their controllers re-create them.
    pub(crate) recreated: Family<Outcome, Counter>,
    /// Pods told to leave because they left their shares.
    pub(crate) expelled: Family<Outcome, Counter>,
    /// Pods told, or told no more, that they left their shares.
    pub(crate) judged: Family<Outcome, Counter>,
    /// MPS hosts of an older revision than their `DaemonSet`'s newest.
    pub(crate) hosts_outdated: Gauge,
    /// MPS hosts deleted to be replaced.
    pub(crate) hosts_replaced: Family<Outcome, Counter>,
    /// 1 while no more MPS hosts are replaced because one that was does not serve.
    pub(crate) rollout_stopped: Gauge,
    /// Pods that wait at the gate.
    pub(crate) gated: Family<Reason, Gauge>,
    /// Of the free memory of GPUs by demand, the part that lies beside something in use.
    pub(crate) fragmentation: Gauge<f64, AtomicU64>,
    /// Nodes that plans leave out.
    pub(crate) left_out: Gauge,
    /// 1 while this process holds the lease.
    pub(crate) leader: Gauge,
    resident: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        // A millisecond to half a minute.
        let seconds = || Histogram::new(exponential_buckets(0.001, 2.0, 16));
        Self {
            passes: Family::default(),
            writes: Family::default(),
            watch_errors: Family::default(),
            malformed: Family::default(),
            policies: Gauge::default(),
            nodes: Gauge::default(),
            plans: Family::default(),
            plan_seconds: seconds(),
            reaction_seconds: seconds(),
            steps: Family::default(),
            pods_waiting: Family::default(),
            gates_opened: Family::default(),
            gate_seconds: seconds(),
            hosts_outdated: Gauge::default(),
            hosts_replaced: Family::default(),
            rollout_stopped: Gauge::default(),
            gated: Family::default(),
            evictions: Family::default(),
            recreated: Family::default(),
            expelled: Family::default(),
            judged: Family::default(),
            fragmentation: Gauge::default(),
            left_out: Gauge::default(),
            leader: Gauge::default(),
            resident: Gauge::default(),
        }
    }
}

/// What pods wait for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Reason {
    pub(crate) reason: &'static str,
}

/// How a pass ended.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Outcome {
    pub(crate) result: &'static str,
}

/// What was written, and how that ended.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Write {
    pub(crate) kind: &'static str,
    pub(crate) result: &'static str,
}

/// A kind of object.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Kind {
    pub(crate) kind: &'static str,
}

impl Metrics {
    /// Registers all of them.
    pub(crate) fn register(&self, registry: &mut Registry) {
        registry.register("process_resident_memory_bytes", "Resident memory", self.resident.clone());
        let registry = registry.sub_registry_with_prefix("cleave_operator");
        registry.register("passes", "Passes over the whole cluster", self.passes.clone());
        registry.register("writes", "Objects written", self.writes.clone());
        registry.register("watch_errors", "Errors of watches, each tried again", self.watch_errors.clone());
        registry.register(
            "malformed_objects",
            "Objects that are not what their definition says",
            self.malformed.clone(),
        );
        registry.register("policies", "Policies in force", self.policies.clone());
        registry.register("nodes", "Nodes that are planned", self.nodes.clone());
        registry.register("plans", "Plans of GPUs that are cut as pods ask for it", self.plans.clone());
        registry.register("plan_seconds", "Time that a plan took to make", self.plan_seconds.clone());
        registry.register(
            "reaction_seconds",
            "Time from the first change seen to the last node written, where something was written",
            self.reaction_seconds.clone(),
        );
        registry.register("steps", "What nodes did of what they were told", self.steps.clone());
        registry.register("pods_waiting", "Pods that wait for GPUs, by what for", self.pods_waiting.clone());
        registry.register("gates_opened", "Pods let through to the scheduler, by why", self.gates_opened.clone());
        registry.register("gate_seconds", "Time that a pod spent at the gate", self.gate_seconds.clone());
        registry.register("evictions", "Pods told to leave for others of higher priority", self.evictions.clone());
        registry.register(
            "stranded_pods_recreated",
            "Evictions of released pods that no node took, so that their controllers re-create them, by result",
            self.recreated.clone(),
        );
        registry.register(
            "tenant_evictions",
            "Pods told to leave because they left their shares",
            self.expelled.clone(),
        );
        registry.register(
            "tenant_conditions",
            "Conditions of pods written that say whether they keep to their shares",
            self.judged.clone(),
        );
        registry.register(
            "mps_hosts_outdated",
            "MPS hosts of an older revision than their DaemonSet's newest, where they are to be replaced",
            self.hosts_outdated.clone(),
        );
        registry.register("mps_hosts_replaced", "MPS hosts deleted to be replaced", self.hosts_replaced.clone());
        registry.register(
            "mps_host_upgrade_stopped",
            "1 while no more MPS hosts are replaced because one does not serve",
            self.rollout_stopped.clone(),
        );
        registry.register("pods_gated", "Pods that wait at the gate, by what for", self.gated.clone());
        registry.register(
            "fragmentation_ratio",
            "Of the free memory of GPUs that are cut as pods ask for it, the part that lies beside something in use",
            self.fragmentation.clone(),
        );
        registry.register("nodes_left_out", "Nodes that plans leave out", self.left_out.clone());
        registry.register("leader", "1 while this process holds the lease", self.leader.clone());
    }

    /// Reads what is only known when it is asked for.
    pub(crate) fn refresh(&self, leads: bool) {
        self.leader.set(i64::from(leads));
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        self.resident.set(resident(&status).unwrap_or(0));
    }
}

/// Resident memory in bytes, of `/proc/self/status`: unlike `statm` it needs no page size.
fn resident(status: &str) -> Option<i64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<i64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::resident;

    #[test]
    fn resident_memory_is_read_in_bytes() {
        assert_eq!(resident("Name:\tcleave\nVmHWM:\t 9000 kB\nVmRSS:\t  8192 kB\n"), Some(8 << 20));
        for nonsense in ["", "VmRSS:", "VmRSS: kB", "VmRSS: x kB", "VmRSS: 9223372036854775807 kB"] {
            assert_eq!(resident(nonsense), None, "{nonsense:?}");
        }
    }
}
