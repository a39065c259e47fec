//! Tests of the checks of nodes.
use serde_json::{Value, json};

use super::{
    FindingReason, Level, gpu_node, healthy_nodes, only_finding, problems, report_for_node_selector, report_of,
    report_of_node, with_changes,
};

/// Returns a node that has only this field of `status.nodeInfo`.
fn node_info(field: &str, value: &str) -> Value {
    json!({"status": {"nodeInfo": {field: value}}})
}

#[test]
fn gpu_nodes_are_counted_by_the_label_that_identifies_them() {
    let report = report_of(&json!({"nodes": healthy_nodes()}));
    let found = only_finding(&report, FindingReason::GpuNodesFound);
    assert!(found.message.contains("2 nodes") && found.message.contains("cleave.dev/gpu (2)"), "{found:?}");
}

#[test]
fn a_cluster_without_gpu_nodes_is_reported() {
    let cpu = with_changes(gpu_node("cpu"), &json!({"metadata": {"labels": {"cleave.dev/gpu": "false"}}}));
    let other = with_changes(cpu.clone(), &json!({"metadata": {"name": "cpu-2"}}));
    let report = report_of(&json!({"nodes": [cpu, other]}));
    assert_eq!(problems(&report), [FindingReason::NoGpuNodes]);
    assert_eq!((report.nodes, report.gpu_nodes), (2, 0));
}

#[test]
fn gpus_without_a_label_of_the_chart_are_reported() {
    let unlabelled = json!({"metadata": {"labels": {"cleave.dev/gpu": null}}});
    for sign in [
        json!({"status": {"capacity": {"nvidia.com/gpu": "8"}}}),
        json!({"metadata": {"labels": {"nvidia.com/gpu.product": "NVIDIA-L4"}}}),
        json!({"metadata": {"labels": {"extensions.talos.dev/nvidia-container-toolkit-lts": "1"}}}),
        node_info("osImage", "Bottlerocket OS 1.63.0 (aws-k8s-1.34-nvidia)"),
    ] {
        let report = report_of_node(&with_changes(unlabelled.clone(), &sign));
        let found = only_finding(&report, FindingReason::GpuLabelMissing);
        assert!(found.message.contains("gpu-1") && !found.message.contains("gpu-2"), "{sign}: {found:?}");
    }
    // The values file of Talos selects the node by this label.
    let talos = json!({"metadata": {"labels": {"extensions.talos.dev/nonfree-kmod-nvidia-lts": "1"}}});
    let report = report_of_node(&with_changes(unlabelled.clone(), &talos));
    assert_eq!((report.gpu_nodes, problems(&report)), (2, vec![]));
    // A node with GPUs of another manufacturer is not a GPU node for Cleave.
    let amd = json!({"metadata": {"labels": {"karpenter.k8s.aws/instance-gpu-manufacturer": "amd"}}});
    assert_eq!(report_of_node(&with_changes(unlabelled, &amd)).gpu_nodes, 1);
}

#[test]
fn labels_that_only_feature_discovery_sets_are_reported() {
    let without = json!({"metadata": {"labels": {"cleave.dev/gpu": null}}});
    for label in [
        "nvidia.com/gpu.present",
        "feature.node.kubernetes.io/pci-10de.present",
        "feature.node.kubernetes.io/pci-0302_10de.present",
        "feature.node.kubernetes.io/pci-0300_10de.present",
    ] {
        let labelled = json!({"metadata": {"labels": {label: "true"}}});
        let report = report_of_node(&with_changes(without.clone(), &labelled));
        assert_eq!(problems(&report), [FindingReason::GpuLabelNotStable], "{label}");
        let found = only_finding(&report, FindingReason::GpuLabelNotStable);
        assert!(found.level == Level::Warning && found.action.contains("cleave.dev/gpu=true"), "{found:?}");
        assert!(found.message.contains("gpu-1") && !found.message.contains("gpu-2"), "{found:?}");
        // One permanent label is sufficient.
        assert_eq!(problems(&report_of_node(&labelled)), [], "{label}");
        let accelerator = json!({"metadata": {"labels": {"k8s.amazonaws.com/accelerator": "l4"}}});
        let report = report_of_node(&with_changes(with_changes(without.clone(), &labelled), &accelerator));
        assert_eq!(problems(&report), [], "{label}");
    }
}

#[test]
fn only_gpu_resources_identify_gpu_nodes() {
    let without = json!({"metadata": {"labels": {"cleave.dev/gpu": null}}});
    for (resource, gpu_nodes) in [
        ("nvidia.com/gpu", 2),
        ("nvidia.com/gpu.shared", 2),
        ("nvidia.com/gpu-mps", 2),
        ("nvidia.com/mig-1g.10gb", 2),
        ("nvidia.com/pgpu", 2),
        ("nvidia.com/vgpu", 2),
        ("nvidia.com/GRID_T4-1Q", 2),
        ("nvidia.com/NVIDIA_A10-24Q", 2),
        // The NVIDIA Network Operator advertises these devices.
        ("nvidia.com/hostdev", 1),
        ("nvidia.com/rdma_shared_device_a", 1),
        ("nvidia.com/sriovrdma", 1),
        ("amd.com/gpu", 1),
    ] {
        let advertised = json!({"status": {"capacity": {resource: "8"}, "allocatable": {resource: "8"}}});
        let report = report_of_node(&with_changes(without.clone(), &advertised));
        assert_eq!(report.gpu_nodes, gpu_nodes, "{resource}");
        // No other plugin serves GPUs on a GPU node with network devices.
        let served = problems(&report_of_node(&advertised));
        assert_eq!(served.contains(&FindingReason::GpusServedByOthers), gpu_nodes == 2, "{resource}");
    }
}

#[test]
fn windows_nodes_are_ignored() {
    let report = report_of_node(&node_info("operatingSystem", "windows"));
    assert_eq!(report.gpu_nodes, 1);
}

#[test]
fn unsupported_runtimes_and_runtimes_without_cdi_are_reported() {
    for (runtime, expected) in [
        ("containerd://1.7.0", vec![]),
        ("containerd://2.1.5-k3s1", vec![]),
        ("cri-o://1.34.3-2.rhaos4.21", vec![]),
        ("containerd://1.6.36", vec![FindingReason::ContainerRuntimeWithoutCdi]),
        ("docker://27.3.1", vec![FindingReason::ContainerRuntimeUnsupported]),
    ] {
        let report = report_of_node(&node_info("containerRuntimeVersion", runtime));
        assert_eq!(problems(&report), expected, "{runtime}");
    }
    let report = report_of_node(&node_info("containerRuntimeVersion", "docker://27.3.1"));
    let found = only_finding(&report, FindingReason::ContainerRuntimeUnsupported);
    assert!(found.level == Level::Error && found.message.contains("docker://27.3.1 on gpu-1"), "{found:?}");
}

#[test]
fn kernels_without_pidfd_open_are_errors() {
    for (kernel, expected) in [
        ("5.4.0-216-generic", vec![]),
        ("6.12.46+", vec![]),
        ("5.3.18-150300.59", vec![FindingReason::KernelTooOld]),
        ("4.18.0-553.el8_10.x86_64", vec![FindingReason::KernelTooOld]),
    ] {
        assert_eq!(problems(&report_of_node(&node_info("kernelVersion", kernel))), expected, "{kernel}");
    }
}

#[test]
fn unsupported_architectures_and_arm64_are_reported() {
    assert_eq!(
        problems(&report_of_node(&node_info("architecture", "ppc64le"))),
        [FindingReason::ArchitectureUnsupported]
    );
    let report = report_of_node(&node_info("architecture", "arm64"));
    assert_eq!(problems(&report), []);
    assert_eq!(only_finding(&report, FindingReason::Arm64).level, Level::Info);
}

#[test]
fn only_nodes_that_the_node_selector_selects_are_checked() {
    let mut nodes = healthy_nodes();
    nodes[0] = with_changes(nodes[0].clone(), &node_info("kernelVersion", "4.18.0"));
    nodes[1] = with_changes(nodes[1].clone(), &json!({"metadata": {"labels": {"gpu": "cleave"}}}));
    let report = report_for_node_selector(&super::facts(&json!({"nodes": nodes})), &[("gpu", "cleave")]);
    assert_eq!(problems(&report), []);
    assert_eq!(report.gpu_nodes, 1);
    assert_eq!(report.nested_values(), json!({"nodes": {"nodeSelector": {"gpu": "cleave"}}}));
}

#[test]
fn taints_that_pods_do_not_tolerate_are_reported() {
    for (key, effect, expected) in [
        ("sku", "NoSchedule", vec![FindingReason::TaintNotTolerated]),
        ("team", "NoExecute", vec![FindingReason::TaintNotTolerated]),
        ("sku", "PreferNoSchedule", vec![]),
        // Admission adds a toleration of this taint.
        ("nvidia.com/gpu", "NoSchedule", vec![]),
        // Kubernetes removes this taint when the node is ready.
        ("node.kubernetes.io/not-ready", "NoExecute", vec![]),
    ] {
        let tainted = json!({"spec": {"taints": [{"key": key, "value": "v", "effect": effect}]}});
        let report =
            report_of(&json!({"nodes": [with_changes(gpu_node("a"), &tainted), gpu_node("b"), gpu_node("c")]}));
        assert_eq!(problems(&report), expected, "{key}:{effect}");
    }
}

#[test]
fn a_lack_of_nodes_for_the_operator_is_reported() {
    let tainted = |key: &str, effect: &str| json!({"spec": {"taints": [{"key": key, "effect": effect}]}});
    let team = with_changes(gpu_node("a"), &tainted("team", "NoSchedule"));
    let report = report_of(&json!({"nodes": [team.clone()]}));
    assert_eq!(only_finding(&report, FindingReason::OperatorUnschedulable).level, Level::Error);
    let tolerations = report.values["operator.tolerations"].as_array().unwrap();
    let tolerates = |key: &str| tolerations.contains(&json!({"key": key, "operator": "Exists"}));
    assert!(tolerates("team") && tolerates("nvidia.com/gpu"), "{tolerations:?}");

    // These taints do not exclude the operator: the operator tolerates them, or they are temporary
    // or not binding.
    for (key, effect) in [
        ("node-role.kubernetes.io/control-plane", "NoSchedule"),
        ("nvidia.com/gpu", "NoSchedule"),
        ("node.kubernetes.io/unreachable", "NoExecute"),
        ("team", "PreferNoSchedule"),
    ] {
        let usable = with_changes(gpu_node("b"), &tainted(key, effect));
        let report = report_of(&json!({"nodes": [team.clone(), usable]}));
        assert!(only_finding(&report, FindingReason::OneOperatorNode).message.contains("node b "), "{key}");
        assert_eq!(report.values["operator.replicas"], 1);
    }
    assert_eq!(problems(&report_of(&json!({"nodes": healthy_nodes()}))), []);
}
