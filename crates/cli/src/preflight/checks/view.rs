//! The facts about a cluster, and derived values that several checks use.
use std::collections::BTreeSet;

use cleave_plan::scheduling::{NodeRefusal, admit};
use cleave_plan::snapshot;

use super::super::facts::{DaemonSet, Facts, Node, PodSpec, Target};
use super::super::platform::Platform;

/// The chart's `nodes.gpuLabels`: Cleave's `DaemonSets` run on nodes with at least one of these
/// labels. `None` means any value.
pub(in super::super) const GPU_LABELS: [(&str, Option<&str>); 10] = [
    ("cleave.dev/gpu", Some("true")),
    ("nvidia.com/gpu.present", Some("true")),
    ("feature.node.kubernetes.io/pci-10de.present", Some("true")),
    ("feature.node.kubernetes.io/pci-0302_10de.present", Some("true")),
    ("feature.node.kubernetes.io/pci-0300_10de.present", Some("true")),
    ("cloud.google.com/gke-accelerator", None),
    ("kubernetes.azure.com/accelerator", Some("nvidia")),
    ("k8s.amazonaws.com/accelerator", None),
    ("karpenter.k8s.aws/instance-gpu-manufacturer", Some("nvidia")),
    ("karpenter.azure.com/sku-gpu-manufacturer", Some("nvidia")),
];
/// The labels that the values file of Talos adds to `nodes.gpuLabels`.
pub(in super::super) const TALOS_GPU_LABELS: [&str; 4] = [
    "extensions.talos.dev/nvidia-open-gpu-kernel-modules-production",
    "extensions.talos.dev/nvidia-open-gpu-kernel-modules-lts",
    "extensions.talos.dev/nonfree-kmod-nvidia-production",
    "extensions.talos.dev/nonfree-kmod-nvidia-lts",
];
/// Labels that identify GPU nodes but are not in `nodes.gpuLabels`.
const OTHER_GPU_LABELS: [(&str, Option<&str>); 4] = [
    ("accelerator", Some("nvidia")),
    ("eks.amazonaws.com/instance-gpu-manufacturer", Some("nvidia")),
    ("nvidia.com/gpu.count", None),
    ("nvidia.com/gpu.product", None),
];
/// Prefix of the labels that Talos sets for most of NVIDIA's system extensions.
const TALOS_EXTENSION_LABEL_PREFIX: &str = "extensions.talos.dev/nvidia";
/// Prefixes of the labels that node feature discovery and NVIDIA's GPU feature discovery set. Both
/// may remove these labels while pods run.
const DISCOVERED_LABEL_PREFIXES: [&str; 2] = ["feature.node.kubernetes.io/", "nvidia.com/gpu."];
/// Prefix of the names of NVIDIA's resources.
const NVIDIA_RESOURCE_PREFIX: &str = "nvidia.com/";
/// Names of resources that are GPUs, without the prefix [`NVIDIA_RESOURCE_PREFIX`].
const GPU_RESOURCES: [&str; 3] = ["gpu", "gpu.shared", "pgpu"];
/// Prefixes of names of resources that are GPUs or parts of GPUs, without
/// [`NVIDIA_RESOURCE_PREFIX`]. The last three prefixes are for virtual GPUs.
const GPU_RESOURCE_PREFIXES: [&str; 5] = ["gpu-", "mig-", "vgpu", "GRID_", "NVIDIA_"];

/// The facts about a cluster, and derived values that several checks use.
pub(super) struct View<'a> {
    pub(super) facts: &'a Facts,
    pub(super) target: &'a Target,
    /// Linux nodes.
    pub(super) nodes: Vec<&'a Node>,
    /// Nodes with GPUs that Cleave will manage.
    pub(super) gpu_nodes: Vec<&'a Node>,
    pub(super) daemon_sets: &'a [DaemonSet],
    /// Platforms of the GPU nodes, or of all Linux nodes if there is no GPU node.
    pub(super) platforms: BTreeSet<Platform>,
    /// Whether agents of Cleave are installed.
    pub(super) has_agents: bool,
}

impl<'a> View<'a> {
    pub(super) fn new(facts: &'a Facts, target: &'a Target) -> Self {
        let nodes: Vec<&Node> = items(&facts.nodes)
            .iter()
            .filter(|node| matches!(node.status.node_info.operating_system.as_str(), "" | "linux"))
            .collect();
        let selected = |node: &&&Node| {
            target.node_selector.iter().all(|(key, value)| node.metadata.labels.get(key) == Some(value))
        };
        let gpu_nodes: Vec<&Node> = nodes.iter().filter(|node| has_gpus(node)).filter(selected).copied().collect();
        let of_platform = if gpu_nodes.is_empty() { &nodes } else { &gpu_nodes };
        let daemon_sets = items(&facts.daemon_sets);
        let has_agents = daemon_sets.iter().any(runs_cleave_agent);
        let platforms = of_platform.iter().filter_map(|node| Platform::of(node)).collect();
        Self { facts, target, nodes, gpu_nodes, daemon_sets, platforms, has_agents }
    }

    /// Returns the platform, if there is exactly one.
    pub(super) fn platform(&self) -> Option<Platform> {
        let mut all = self.platforms.iter();
        all.next().filter(|_| all.next().is_none()).copied()
    }
}

/// Returns the objects of a list, or an empty slice if the list could not be read.
pub(super) fn items<T>(known: &Result<Vec<T>, String>) -> &[T] {
    known.as_deref().unwrap_or_default()
}

/// Returns whether a pod with this specification can run on the node, now or without the node's
/// temporary taints.
pub(super) fn can_run(pod: &PodSpec, node: &Node) -> bool {
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

/// Returns whether the labels, the resources or the operating system show that the node has NVIDIA
/// GPUs.
fn has_gpus(node: &Node) -> bool {
    chart_labels(node).next().is_some()
        || matching_labels(node, &OTHER_GPU_LABELS).next().is_some()
        || node.metadata.labels.keys().any(|label| label.starts_with(TALOS_EXTENSION_LABEL_PREFIX))
        || node.status.capacity.keys().any(|name| is_gpu_resource(name))
        || is_bottlerocket_for_gpus(&node.status.node_info.os_image)
}

/// Returns whether a resource consists of NVIDIA GPUs or parts of GPUs. The NVIDIA Network Operator
/// advertises other devices, such as `nvidia.com/hostdev`.
pub(super) fn is_gpu_resource(name: &str) -> bool {
    name.strip_prefix(NVIDIA_RESOURCE_PREFIX).is_some_and(|name| {
        GPU_RESOURCES.contains(&name) || GPU_RESOURCE_PREFIXES.iter().any(|start| name.starts_with(start))
    })
}

/// Returns whether node feature discovery or GPU feature discovery sets the label.
pub(super) fn is_set_by_feature_discovery(label: &str) -> bool {
    DISCOVERED_LABEL_PREFIXES.iter().any(|start| label.starts_with(start))
}

/// Returns the labels of a node that make the chart select the node. Includes the labels that the
/// values file of Talos adds.
pub(super) fn chart_labels(node: &Node) -> impl Iterator<Item = &'static str> {
    let talos = |label: &&str| node.metadata.labels.contains_key(*label);
    matching_labels(node, &GPU_LABELS).chain(TALOS_GPU_LABELS.into_iter().filter(talos))
}

/// Returns whether an operating system is a variant of Bottlerocket for NVIDIA GPUs, such as
/// `Bottlerocket OS 1.53.0 (aws-k8s-1.34-nvidia)`.
fn is_bottlerocket_for_gpus(os_image: &str) -> bool {
    os_image.starts_with("Bottlerocket") && os_image.to_ascii_lowercase().contains("nvidia")
}

/// Returns the labels in `labels` that the node has.
fn matching_labels<'a>(
    node: &'a Node,
    labels: &'a [(&'static str, Option<&'static str>)],
) -> impl Iterator<Item = &'static str> + 'a {
    labels.iter().filter_map(|&(label, expected)| {
        let value = node.metadata.labels.get(label)?;
        expected.is_none_or(|expected| value == expected).then_some(label)
    })
}

/// Returns whether the `DaemonSet` runs Cleave's agents.
pub(super) fn runs_cleave_agent(set: &DaemonSet) -> bool {
    let command = |command: &String| command.ends_with("/cleave-agent");
    set.spec.template.spec.containers.iter().any(|container| container.command.iter().any(command))
}
