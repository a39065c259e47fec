//! Checks the nodes: GPUs, container runtimes, kernels, architectures and taints.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::names::RESOURCE_GPU;
use cleave_plan::scheduling::NodeRefusal;
use cleave_plan::snapshot::{Taint, Toleration};
use serde_json::{Value, json};

use super::super::facts::{MajorMinor, Node, PodSpec};
use super::super::platform::Platform;
use super::super::report::{FindingReason, Report, format_count, join_names};
use super::view::{View, can_run, chart_labels, is_gpu_resource, is_set_by_feature_discovery};

/// Keys of taints that the operator tolerates by default.
pub(in super::super) const OPERATOR_TOLERATIONS: [&str; 2] =
    ["node-role.kubernetes.io/control-plane", "nvidia.com/gpu"];
/// The architectures of Cleave's image.
const SUPPORTED_ARCHITECTURES: [&str; 2] = ["amd64", "arm64"];
/// The oldest version of containerd that supports CDI.
const OLDEST_CONTAINERD_WITH_CDI: MajorMinor = MajorMinor(1, 7);
/// The oldest kernel that Cleave supports. The MPS host detects the exit of clients with
/// `pidfd_open`, which Linux has provided since version 5.3.
const OLDEST_KERNEL: MajorMinor = MajorMinor(5, 4);

/// Returns whether a device plugin serves GPUs on the node now.
pub(super) fn serves_gpus(node: &Node) -> bool {
    let served = |(name, amount): (&String, &cleave_plan::Quantity)| {
        is_gpu_resource(name) && amount.milli().is_some_and(|milli| milli > 0)
    };
    node.status.allocatable.iter().any(served)
}

/// Returns the names of nodes, shortened if there are many.
pub(super) fn join_node_names<'a>(nodes: impl IntoIterator<Item = &'a Node>) -> String {
    join_names(nodes.into_iter().map(|node| node.metadata.name.as_str()))
}

/// Adds the findings about nodes.
pub(super) fn check(view: &View<'_>, report: &mut Report) {
    if view.facts.nodes.is_err() {
        return;
    }
    check_gpus(view, report);
    check_runtimes(view, report);
    check_kernels(view, report);
    check_architectures(view, report);
    check_taints(view, report);
    check_operator(view, report);
}

fn check_gpus(view: &View<'_>, report: &mut Report) {
    if view.gpu_nodes.is_empty() {
        let action = "Label the GPU nodes: `kubectl label node NODE cleave.dev/gpu=true`. If the GPU nodes are scaled to zero, run preflight again when one exists.";
        report.add_warning(
            FindingReason::NoGpuNodes,
            "No node has a GPU label or a GPU resource, so preflight did not check GPU nodes.",
            action,
        );
        return;
    }
    let mut found_by: BTreeMap<&str, usize> = BTreeMap::new();
    for node in &view.gpu_nodes {
        for label in chart_labels(node) {
            *found_by.entry(label).or_default() += 1;
        }
    }
    let found_by: Vec<String> = found_by.iter().map(|(label, count)| format!("{label} ({count})")).collect();
    let labels = if found_by.is_empty() { "none".to_owned() } else { found_by.join(", ") };
    let message = format!(
        "{} with GPUs: {}. Labels that show GPUs: {labels}.",
        format_count(view.gpu_nodes.len(), "node"),
        join_node_names(view.gpu_nodes.iter().copied())
    );
    report.add_info(FindingReason::GpuNodesFound, message, "");
    check_labels(view, report);
}

/// Reports GPU nodes that the chart does not select, or selects only through labels that may
/// disappear.
fn check_labels(view: &View<'_>, report: &mut Report) {
    let (mut unlabelled, mut discovered) = (Vec::new(), Vec::new());
    for &node in &view.gpu_nodes {
        if chart_labels(node).next().is_none() {
            unlabelled.push(node);
        } else if chart_labels(node).all(is_set_by_feature_discovery) {
            discovered.push(node);
        }
    }
    if !unlabelled.is_empty() {
        report.add_warning(
            FindingReason::GpuLabelMissing,
            format!(
                "Cleave's agents will not run on these GPU nodes, because they have none of the labels in nodes.gpuLabels: {}.",
                join_node_names(unlabelled)
            ),
            "Run `kubectl label node NODE cleave.dev/gpu=true` for each of these nodes.",
        );
    }
    if !discovered.is_empty() {
        report.add_warning(
            FindingReason::GpuLabelNotStable,
            format!(
                "Only node feature discovery or GPU feature discovery labels {} as GPU nodes. If it removes its \
                 labels, for example when it restarts, Kubernetes deletes Cleave's pods there. This ends all \
                 programs that use MPS.",
                join_node_names(discovered)
            ),
            "Also label the nodes cleave.dev/gpu=true: in their node pool, in a MachineConfig, by the kubelet's option \
             --node-labels, or with `kubectl label node NODE cleave.dev/gpu=true`.",
        );
    }
}

fn check_runtimes(view: &View<'_>, report: &mut Report) {
    let mut unsupported: BTreeMap<&str, Vec<&Node>> = BTreeMap::new();
    let mut without_cdi: BTreeMap<&str, Vec<&Node>> = BTreeMap::new();
    for node in &view.gpu_nodes {
        let runtime = node.status.node_info.container_runtime_version.as_str();
        let Some((name, version)) = runtime.split_once("://") else { continue };
        if name == "containerd" {
            if MajorMinor::parse(version).is_some_and(|version| version < OLDEST_CONTAINERD_WITH_CDI) {
                without_cdi.entry(version).or_default().push(node);
            }
        } else if name != "cri-o" {
            unsupported.entry(runtime).or_default().push(node);
        }
    }
    for (runtime, nodes) in unsupported {
        report.add_error(
            FindingReason::ContainerRuntimeUnsupported,
            format!(
                "The container runtime is {runtime} on {}. Cleave supports containerd and CRI-O.",
                join_node_names(nodes)
            ),
            "Use nodes with containerd or CRI-O.",
        );
    }
    for (version, nodes) in without_cdi {
        report.add_warning(
            FindingReason::ContainerRuntimeWithoutCdi,
            format!(
                "containerd {version} on {} does not support CDI. Version 1.7 and newer versions do.",
                join_node_names(nodes)
            ),
            "Upgrade containerd, or use agent.deviceListStrategy Envvar or DeviceNodes.",
        );
    }
}

fn check_kernels(view: &View<'_>, report: &mut Report) {
    let mut old: BTreeMap<&str, Vec<&Node>> = BTreeMap::new();
    for node in &view.gpu_nodes {
        let kernel = node.status.node_info.kernel_version.as_str();
        if MajorMinor::parse(kernel).is_some_and(|version| version < OLDEST_KERNEL) {
            old.entry(kernel).or_default().push(node);
        }
    }
    for (kernel, nodes) in old {
        report.add_error(
            FindingReason::KernelTooOld,
            format!(
                "The kernel is {kernel} on {}. Cleave needs {OLDEST_KERNEL} or newer: \
                 without pidfd_open the MPS host cannot detect the exit of a client.",
                join_node_names(nodes)
            ),
            format!("Use nodes with Linux {OLDEST_KERNEL} or newer."),
        );
    }
}

fn check_architectures(view: &View<'_>, report: &mut Report) {
    let mut nodes_of: BTreeMap<&str, Vec<&Node>> = BTreeMap::new();
    for node in &view.gpu_nodes {
        nodes_of.entry(node.status.node_info.architecture.as_str()).or_default().push(node);
    }
    for (architecture, nodes) in nodes_of {
        if !architecture.is_empty() && !SUPPORTED_ARCHITECTURES.contains(&architecture) {
            report.add_error(
                FindingReason::ArchitectureUnsupported,
                format!(
                    "The architecture is {architecture} on {}. Cleave supports amd64 and arm64.",
                    join_node_names(nodes)
                ),
                "Use nodes of a supported architecture.",
            );
        } else if architecture == "arm64" {
            report.add_info(
                FindingReason::Arm64,
                format!("The architecture is arm64 on {}.", join_node_names(nodes)),
                "Also build the image for arm64. `make release` builds both architectures.",
            );
        }
    }
}

/// Reports taints of GPU nodes that pods with shares do not tolerate. By default, Cleave's own
/// `DaemonSets` tolerate every taint. Admission adds a toleration of `nvidia.com/gpu` to pods that
/// request GPUs.
fn check_taints(view: &View<'_>, report: &mut Report) {
    let mut tainted: BTreeMap<String, Vec<&Node>> = BTreeMap::new();
    for node in &view.gpu_nodes {
        for taint in lasting_taints(node).filter(|taint| taint.key != RESOURCE_GPU) {
            let value = if taint.value.is_empty() { String::new() } else { format!("={}", taint.value) };
            tainted.entry(format!("{}{value}:{}", taint.key, taint.effect)).or_default().push(node);
        }
    }
    for (taint, nodes) in tainted {
        report.add_warning(
            FindingReason::TaintNotTolerated,
            format!("Pods with shares do not tolerate the taint {taint} of {}.", join_node_names(nodes)),
            "Add a toleration to the pods that request GPUs. Cleave adds one for the key nvidia.com/gpu only.",
        );
    }
}

/// Returns the taints of a node that exclude pods until an administrator removes the taints.
fn lasting_taints(node: &Node) -> impl Iterator<Item = &Taint> {
    node.spec.taints.iter().filter(|taint| {
        let refusal = NodeRefusal::Taint { key: taint.key.clone(), value: taint.value.clone() };
        taint.effect != "PreferNoSchedule" && !refusal.is_temporary()
    })
}

/// Checks that enough nodes can run the operator's replicas.
fn check_operator(view: &View<'_>, report: &mut Report) {
    if view.nodes.is_empty() {
        return;
    }
    let exists = |key: &str| Toleration { key: key.to_owned(), operator: "Exists".to_owned(), ..Toleration::default() };
    let operator = PodSpec { tolerations: OPERATOR_TOLERATIONS.map(exists).to_vec(), ..PodSpec::default() };
    let usable: Vec<&Node> = view.nodes.iter().filter(|node| can_run(&operator, node)).copied().collect();
    match usable.as_slice() {
        [] => {
            let keys: BTreeSet<&str> =
                view.nodes.iter().flat_map(|node| lasting_taints(node)).map(|taint| taint.key.as_str()).collect();
            let all: BTreeSet<&str> = keys.iter().copied().chain(OPERATOR_TOLERATIONS).collect();
            let values: Vec<Value> = all.iter().map(|key| json!({"key": key, "operator": "Exists"})).collect();
            report.set_chart_value("operator.tolerations", values);
            report.add_error(
                FindingReason::OperatorUnschedulable,
                format!("Every node has a taint that the operator does not tolerate: {}.", join_names(keys)),
                "Add a node without taints, or set operator.tolerations.",
            );
        }
        [only] => {
            report.set_chart_value("operator.replicas", 1);
            report.add_warning(
                FindingReason::OneOperatorNode,
                format!(
                    "Only node {} can run the operator. With two operators the PodDisruptionBudget \
                     blocks the drain of that node.",
                    only.metadata.name
                ),
                "Set operator.replicas to 1, or add nodes.",
            );
        }
        _ => {}
    }
}

/// Returns whether EKS Auto Mode manages the node.
pub(super) fn is_eks_auto(node: &Node) -> bool {
    Platform::of(node) == Some(Platform::EksBottlerocket) && node.status.node_info.os_image.contains("EKS Auto")
}
