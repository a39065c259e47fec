//! The checks. Pure: facts about a cluster become a report.
mod cluster;
mod namespace;
mod nodes;
mod rivals;
mod webhooks;

use std::collections::BTreeSet;

use cleave_plan::scheduling::{NodeRefusal, admit};
use cleave_plan::snapshot;
use serde_json::json;

use super::facts::{DaemonSet, Facts, Node, PodSpec, Target};
use super::platform::Platform;
use super::report::Report;

#[cfg(test)]
pub(super) use cluster::{NEWEST_TESTED, OLDEST_SUPPORTED, SYSTEM_PRIORITY_CLASSES};
#[cfg(test)]
pub(super) use nodes::{GPU_LABELS, OPERATOR_TOLERATIONS};

/// Checks a cluster.
pub(super) fn check(facts: &Facts, target: &Target) -> Report {
    let view = View::new(facts, target);
    let mut report = Report {
        kubernetes: facts.server.as_ref().ok().map(|server| server.text().to_owned()),
        platforms: view.platforms.iter().map(|platform| platform.name().to_owned()).collect(),
        gpu_nodes: view.gpu_nodes.len(),
        nodes: facts.nodes.as_ref().map_or(0, Vec::len),
        namespace: target.namespace.clone(),
        ..Report::default()
    };
    cluster::check(&view, &mut report);
    nodes::check(&view, &mut report);
    rivals::check(&view, &mut report);
    namespace::check(&view, &mut report);
    webhooks::check(&view, &mut report);
    if !target.node_selector.is_empty() {
        report.set("nodes.nodeSelector", json!(target.node_selector));
    }
    report.findings.sort_by_key(|finding| finding.level);
    report
}

/// The facts, and what several checks derive from them.
pub(super) struct View<'a> {
    facts: &'a Facts,
    target: &'a Target,
    /// Linux nodes.
    nodes: Vec<&'a Node>,
    /// Nodes with GPUs that Cleave will manage.
    gpu_nodes: Vec<&'a Node>,
    daemon_sets: &'a [DaemonSet],
    /// Platforms of the GPU nodes, or of all nodes if there is no GPU node.
    platforms: BTreeSet<Platform>,
    /// Whether agents of Cleave are installed.
    installed: bool,
}

impl<'a> View<'a> {
    fn new(facts: &'a Facts, target: &'a Target) -> Self {
        let nodes: Vec<&Node> = items(&facts.nodes)
            .iter()
            .filter(|node| matches!(node.status.node_info.operating_system.as_str(), "" | "linux"))
            .collect();
        let selected = |node: &&&Node| {
            target.node_selector.iter().all(|(key, value)| node.metadata.labels.get(key) == Some(value))
        };
        let gpu_nodes: Vec<&Node> =
            nodes.iter().filter(|node| nodes::has_gpus(node)).filter(selected).copied().collect();
        let of_platform = if gpu_nodes.is_empty() { &nodes } else { &gpu_nodes };
        let daemon_sets = items(&facts.daemon_sets);
        let installed = daemon_sets.iter().any(rivals::is_cleave);
        let platforms = of_platform.iter().filter_map(|node| Platform::of(node)).collect();
        Self { facts, target, nodes, gpu_nodes, daemon_sets, platforms, installed }
    }

    /// Returns the platform, if there is exactly one.
    fn platform(&self) -> Option<Platform> {
        let mut all = self.platforms.iter();
        all.next().filter(|_| all.next().is_none()).copied()
    }
}

/// Returns the objects of a list, or nothing if the list could not be read.
fn items<T>(known: &Result<Vec<T>, String>) -> &[T] {
    known.as_deref().unwrap_or_default()
}

/// Returns whether a pod with this specification can run on the node, now or when the node has no
/// temporary taints.
fn can_run(pod: &PodSpec, node: &Node) -> bool {
    let constraints = snapshot::Pod {
        node_selector: pod.node_selector.clone(),
        affinity: pod.required_affinity().to_vec(),
        tolerations: pod.tolerations.clone(),
        ..snapshot::Pod::default()
    };
    let node = snapshot::Node {
        name: node.metadata.name.clone(),
        labels: node.metadata.labels.clone(),
        taints: node.spec.taints.clone(),
        ..snapshot::Node::default()
    };
    admit(&constraints, &node).map_or_else(|refusal: NodeRefusal| refusal.is_temporary(), |()| true)
}
