//! Describes the state of MPS on a node: which pods use MPS, and whether MPS serves.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::GpuNode;
use cleave_api::names::{daemon_state, is_mps};
use cleave_plan::ledger::{Ledger, Place};

use super::hosts::MpsHost;

/// Taints of a node whose kubelet has stopped reporting.
const UNREACHABLE_TAINTS: [&str; 2] = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"];

/// The state of MPS on a node, according to its `GpuNode`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct MpsState {
    /// Why a daemon does not serve. `None` if all daemons serve, or if the GPU itself is the cause.
    pub daemon_problem: Option<String>,
    /// A pod or program that uses MPS on the node, or why the users are unknown.
    pub user: Option<String>,
    /// Time-sliced resources of the node whose names could also be names of MPS shares.
    time_sliced: BTreeSet<String>,
}

impl MpsState {
    /// Reads the state from a node's `GpuNode`. `ready` states whether the node's agent is ready.
    pub(crate) fn of(object: &GpuNode, ready: bool) -> Self {
        let mut found = Self { time_sliced: time_sliced_resources(object), ..Self::default() };
        let Some(status) = &object.status else {
            found.user = Some("the agent has not reported which pods use MPS".to_owned());
            return found;
        };
        for gpu in status.gpus.iter().filter(|gpu| gpu.health.class.is_empty()) {
            let idle = gpu.mps.iter().find(|daemon| daemon.state != daemon_state::ACTIVE);
            let describe = |daemon: &cleave_api::gpunode::MpsStatus| {
                let state = if daemon.state.is_empty() { "absent" } else { &daemon.state };
                let why = if daemon.message.is_empty() { String::new() } else { format!(": {}", daemon.message) };
                format!("the MPS daemon of {} is {state}{why}", daemon.device)
            };
            found.daemon_problem = found.daemon_problem.or_else(|| idle.map(describe));
        }
        let is_current = object.metadata.generation.is_none_or(|generation| status.observed_generation >= generation);
        let allocated = || {
            status
                .gpus
                .iter()
                .flat_map(|gpu| &gpu.allocations)
                .find(|allocation| found.may_be_mps_resource(&allocation.resource))
        };
        // Also count slices in use whose pods are unknown, because they may belong to MPS clients.
        let used = || {
            status
                .gpus
                .iter()
                .flat_map(|gpu| &gpu.slices)
                .find(|s| s.in_use > 0 && found.may_be_mps_resource(&s.resource))
        };
        let user = if !ready {
            Some("the agent is not ready".to_owned())
        } else if !is_current {
            Some("the agent has not read the GpuNode spec".to_owned())
        } else if let Some(allocation) = allocated() {
            Some(format!("{} has {} {}", allocation.pod, allocation.ids.len(), allocation.resource))
        } else {
            used().map(|slice| format!("{} {} of device {} are in use", slice.in_use, slice.resource, slice.device))
        };
        Self { user, ..found }
    }

    /// Returns whether a resource is, or may be, a resource of MPS shares on this node.
    pub(crate) fn may_be_mps_resource(&self, resource: &str) -> bool {
        is_mps(resource) && !self.time_sliced.contains(resource)
    }
}

/// Returns the time-sliced resources whose names could also be names of MPS shares. Excludes names
/// that the node uses for both kinds.
fn time_sliced_resources(object: &GpuNode) -> BTreeSet<String> {
    let partitions = || object.spec.gpus.iter().map(|gpu| &gpu.partition);
    let instances = || partitions().flat_map(|partition| partition.mig.iter().flatten().map(|mig| &mig.partition));
    let sliced = partitions().filter_map(|partition| partition.time_slicing.as_ref());
    let sliced = sliced.chain(instances().filter_map(|partition| partition.time_slicing.as_ref()));
    let mut time_sliced: BTreeSet<String> =
        sliced.map(|time_sliced| time_sliced.resource.clone()).filter(|resource| is_mps(resource)).collect();
    let shared = partitions().filter_map(|partition| partition.mps.as_ref());
    let shared = shared.chain(instances().filter_map(|partition| partition.mps.as_ref()));
    for slices in shared.flat_map(|shares| &shares.slices) {
        time_sliced.remove(&slices.resource);
    }
    // The GPU may still serve shares with the same name while pods use slices that must be removed.
    for gpu in object.status.iter().flat_map(|status| &status.gpus) {
        for slice in gpu.slices.iter().filter(|slice| gpu.mps.iter().any(|daemon| daemon.device == slice.device)) {
            time_sliced.remove(&slice.resource);
        }
    }
    time_sliced
}

/// A node's MPS host and MPS users.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct MpsHostView {
    /// The node's MPS host. `None` if the node has no MPS host.
    pub host: Option<MpsHost>,
    /// Why a daemon does not serve.
    pub daemon_problem: Option<String>,
    /// Why the MPS host is in use: a pod or program that uses MPS on the node or has a reservation
    /// for MPS shares, or an outdated agent that is upgraded first.
    pub busy: Option<String>,
    /// Whether the node is unreachable or cordoned. If so, failures of the node are not attributed
    /// to a release.
    pub excused: bool,
}

impl MpsHostView {
    /// Returns why the MPS host or one of its daemons does not serve, and whether the MPS host
    /// itself is down. An outdated MPS host does not have to serve, so its outage counts only if it
    /// terminates, or if `deleted` is its UID.
    pub(super) fn outage(&self, deleted: Option<&str>) -> Option<(String, bool)> {
        let Some(host) = &self.host else { return Some(("the node has no MPS host".to_owned(), true)) };
        let pod = &host.pod;
        match host {
            MpsHost { terminating: true, .. } => Some((format!("{pod} is terminating"), true)),
            MpsHost { outdated: true, uid, .. } => {
                (deleted == Some(uid)).then(|| (format!("{pod} is being deleted"), true))
            }
            MpsHost { ready: false, .. } => Some((format!("{pod} is not ready"), true)),
            _ => self.daemon_problem.clone().map(|daemon_problem| (daemon_problem, false)),
        }
    }
}

/// Returns whether a node is unreachable or cordoned.
pub(crate) fn may_be_down(node: &cleave_plan::snapshot::Node) -> bool {
    node.unschedulable || node.taints.iter().any(|taint| UNREACHABLE_TAINTS.contains(&taint.key.as_str()))
}

/// Returns, for each node, one pod with a claim for MPS shares or with a nomination, according to
/// the ledger.
pub(crate) fn pending_users(ledger: &Ledger, serves: impl Fn(&str, &str) -> bool) -> BTreeMap<&str, String> {
    let mut found: BTreeMap<&str, String> = BTreeMap::new();
    for (pod, claim) in ledger.claims() {
        let nodes: Vec<&str> = match &claim.place {
            Place::OneOf { nodes, .. } => nodes.iter().map(String::as_str).collect(),
            Place::Bound(node) => vec![node],
        };
        for node in
            nodes.into_iter().filter(|node| claim.device_requests.iter().any(|request| serves(node, &request.resource)))
        {
            found.entry(node).or_insert_with(|| format!("{pod} has a reservation"));
        }
    }
    for (pod, nomination) in ledger.nominations() {
        found.entry(&nomination.node).or_insert_with(|| format!("pods are being evicted for {pod}"));
    }
    found
}
