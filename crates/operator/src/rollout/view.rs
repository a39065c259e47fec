//! What a node's objects say of MPS there: who uses it, and whether it serves.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::GpuNode;
use cleave_api::names::is_mps;
use cleave_plan::ledger::{Ledger, Place};

use super::hosts::Host;

/// Taints of a node that has not been heard of.
const UNHEARD: [&str; 2] = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"];
/// The agent's word for a daemon that serves.
const ACTIVE: &str = "Active";

/// What a `GpuNode` says of MPS on its node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Mps {
    /// A daemon that does not serve, in words; not where the GPU itself is what is in the way.
    pub trouble: Option<String>,
    /// Who uses MPS, in words; or that this is not known.
    pub user: Option<String>,
    /// Resources whose names might be those of shares under MPS, and that are turns here.
    turns: BTreeSet<String>,
}

impl Mps {
    /// Of a node's object; `ready` is whether its agent is.
    pub(crate) fn of(object: &GpuNode, ready: bool) -> Self {
        let mut found = Self { turns: turns(object), ..Self::default() };
        let Some(status) = &object.status else {
            found.user = Some("its agent has not told who uses it".to_owned());
            return found;
        };
        for gpu in status.gpus.iter().filter(|gpu| gpu.health.class.is_empty()) {
            let idle = gpu.mps.iter().find(|daemon| daemon.state != ACTIVE);
            let tell = |daemon: &cleave_api::gpunode::MpsStatus| {
                let state = if daemon.state.is_empty() { "not there" } else { &daemon.state };
                let why = if daemon.message.is_empty() { String::new() } else { format!(": {}", daemon.message) };
                format!("the MPS daemon of {} is {state}{why}", daemon.device)
            };
            found.trouble = found.trouble.or_else(|| idle.map(tell));
        }
        let heard = object.metadata.generation.is_none_or(|generation| status.observed_generation >= generation);
        let held = || status.gpus.iter().flat_map(|gpu| &gpu.allocations).find(|held| found.serves(&held.resource));
        // Also where nobody can say who it is: what nobody knows to be free counts as in use.
        let used =
            || status.gpus.iter().flat_map(|gpu| &gpu.slices).find(|s| s.in_use > 0 && found.serves(&s.resource));
        let user = if !ready {
            Some("its agent is not ready".to_owned())
        } else if !heard {
            Some("its agent has not read what was written to it".to_owned())
        } else if let Some(held) = held() {
            Some(format!("{} holds {} of {}", held.pod, held.ids.len(), held.resource))
        } else {
            used().map(|slice| format!("{} of {} of {} are in use", slice.in_use, slice.resource, slice.device))
        };
        Self { user, ..found }
    }

    /// Whether a resource is, or may be, shares under MPS on this node.
    pub(crate) fn serves(&self, resource: &str) -> bool {
        is_mps(resource) && !self.turns.contains(resource)
    }
}

/// Time-sliced resources that go by names that shares could have. A name that is both on one node
/// is not among them.
fn turns(object: &GpuNode) -> BTreeSet<String> {
    let partitions = || object.spec.gpus.iter().map(|gpu| &gpu.partition);
    let instances = || partitions().flat_map(|partition| partition.mig.iter().flatten().map(|mig| &mig.partition));
    let sliced = partitions().filter_map(|partition| partition.time_slicing.as_ref());
    let sliced = sliced.chain(instances().filter_map(|partition| partition.time_slicing.as_ref()));
    let mut turns: BTreeSet<String> =
        sliced.map(|turns| turns.resource.clone()).filter(|resource| is_mps(resource)).collect();
    let shared = partitions().filter_map(|partition| partition.mps.as_ref());
    let shared = shared.chain(instances().filter_map(|partition| partition.mps.as_ref()));
    for slices in shared.flat_map(|shares| &shares.slices) {
        turns.remove(&slices.resource);
    }
    // What a GPU is still served as, while pods hold what would go.
    for gpu in object.status.iter().flat_map(|status| &status.gpus) {
        for slice in gpu.slices.iter().filter(|slice| gpu.mps.iter().any(|daemon| daemon.device == slice.device)) {
            turns.remove(&slice.resource);
        }
    }
    turns
}

/// A node as it is looked at.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct View {
    /// Its MPS host; none where there should be one.
    pub host: Option<Host>,
    /// A daemon that does not serve, in words.
    pub trouble: Option<String>,
    /// Who uses MPS there or is on the way to it, in words.
    pub busy: Option<String>,
    /// It is not heard of, or was taken out of service: what is wrong there says nothing of a
    /// release.
    pub excused: bool,
}

impl View {
    /// Why its host does not serve, and whether that is because the host itself is down. Nothing of
    /// one that is outdated, which need not, unless it was `asked` to go.
    pub(super) fn lacks(&self, asked: Option<&str>) -> Option<(String, bool)> {
        let Some(host) = &self.host else { return Some(("it has no MPS host".to_owned(), true)) };
        let pod = &host.pod;
        match host {
            Host { leaving: true, .. } => Some((format!("{pod} is ending"), true)),
            Host { outdated: true, uid, .. } => (asked == Some(uid)).then(|| (format!("{pod} is to end"), true)),
            Host { ready: false, .. } => Some((format!("{pod} is not ready"), true)),
            _ => self.trouble.clone().map(|trouble| (trouble, false)),
        }
    }
}

/// Whether a node is not heard of, or an administrator keeps pods away from it.
pub(crate) fn is_excused(node: &cleave_plan::snapshot::Node) -> bool {
    node.unschedulable || node.taints.iter().any(|taint| UNHEARD.contains(&taint.key.as_str()))
}

/// Who is on the way to MPS on each node, or has it as far as the ledger knows: one of them, in
/// words.
pub(crate) fn on_the_way(ledger: &Ledger, serves: impl Fn(&str, &str) -> bool) -> BTreeMap<&str, String> {
    let mut found: BTreeMap<&str, String> = BTreeMap::new();
    for (pod, claim) in ledger.claims() {
        let nodes: Vec<&str> = match &claim.place {
            Place::OneOf { nodes, .. } => nodes.iter().map(String::as_str).collect(),
            Place::Bound(node) => vec![node],
        };
        for node in nodes.into_iter().filter(|node| claim.asks.iter().any(|ask| serves(node, &ask.resource))) {
            found.entry(node).or_insert_with(|| format!("room is held for {pod}"));
        }
    }
    for (pod, nomination) in ledger.nominations() {
        found.entry(&nomination.node).or_insert_with(|| format!("room is made for {pod}"));
    }
    found
}
