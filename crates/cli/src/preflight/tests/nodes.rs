//! Tests of the checks of nodes.
use serde_json::{Value, json};

use super::{Level, Reason, finding, gpu_node, healthy_nodes, problems, report_of, report_of_node, report_with, with};

/// Fields of `status.nodeInfo`.
fn info(field: &str, value: &str) -> Value {
    json!({"status": {"nodeInfo": {field: value}}})
}

#[test]
fn gpu_nodes_are_counted_by_the_label_that_shows_them() {
    let report = report_of(&json!({"nodes": healthy_nodes()}));
    let found = finding(&report, Reason::GpuNodesFound);
    assert!(found.message.contains("2 nodes") && found.message.contains("cleave.dev/gpu (2)"), "{found:?}");
}

#[test]
fn a_cluster_without_gpu_nodes_is_reported() {
    let cpu = with(gpu_node("cpu"), &json!({"metadata": {"labels": {"cleave.dev/gpu": "false"}}}));
    let other = with(cpu.clone(), &json!({"metadata": {"name": "cpu-2"}}));
    let report = report_of(&json!({"nodes": [cpu, other]}));
    assert_eq!(problems(&report), [Reason::NoGpuNodes]);
    assert_eq!((report.nodes, report.gpu_nodes), (2, 0));
}

#[test]
fn gpus_without_a_label_of_the_chart_are_reported() {
    let unlabelled = json!({"metadata": {"labels": {"cleave.dev/gpu": null}}});
    for sign in [
        json!({"status": {"capacity": {"nvidia.com/gpu": "8"}}}),
        json!({"metadata": {"labels": {"nvidia.com/gpu.product": "NVIDIA-L4"}}}),
        json!({"metadata": {"labels": {"extensions.talos.dev/nvidia-container-toolkit-lts": "1"}}}),
        info("osImage", "Bottlerocket OS 1.63.0 (aws-k8s-1.34-nvidia)"),
    ] {
        let report = report_of_node(&with(unlabelled.clone(), &sign));
        let found = finding(&report, Reason::GpuLabelMissing);
        assert!(found.message.contains("gpu-1") && !found.message.contains("gpu-2"), "{sign}: {found:?}");
    }
    // The values file of Talos selects the node by this label.
    let talos = json!({"metadata": {"labels": {"extensions.talos.dev/nonfree-kmod-nvidia-lts": "1"}}});
    let report = report_of_node(&with(unlabelled.clone(), &talos));
    assert_eq!((report.gpu_nodes, problems(&report)), (2, vec![]));
    // A node with GPUs of another manufacturer.
    let amd = json!({"metadata": {"labels": {"karpenter.k8s.aws/instance-gpu-manufacturer": "amd"}}});
    assert_eq!(report_of_node(&with(unlabelled, &amd)).gpu_nodes, 1);
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
        let report = report_of_node(&with(without.clone(), &labelled));
        assert_eq!(problems(&report), [Reason::GpuLabelNotStable], "{label}");
        let found = finding(&report, Reason::GpuLabelNotStable);
        assert!(found.level == Level::Warning && found.action.contains("cleave.dev/gpu=true"), "{found:?}");
        assert!(found.message.contains("gpu-1") && !found.message.contains("gpu-2"), "{found:?}");
        // A single permanent label suffices.
        assert_eq!(problems(&report_of_node(&labelled)), [], "{label}");
        let accelerator = json!({"metadata": {"labels": {"k8s.amazonaws.com/accelerator": "l4"}}});
        let report = report_of_node(&with(with(without.clone(), &labelled), &accelerator));
        assert_eq!(problems(&report), [], "{label}");
    }
}

#[test]
fn only_resources_of_gpus_show_gpus() {
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
        let offered = json!({"status": {"capacity": {resource: "8"}, "allocatable": {resource: "8"}}});
        let report = report_of_node(&with(without.clone(), &offered));
        assert_eq!(report.gpu_nodes, gpu_nodes, "{resource}");
        // No other plugin serves GPUs on a GPU node with network devices.
        let served = problems(&report_of_node(&offered));
        assert_eq!(served.contains(&Reason::GpusServedByOthers), gpu_nodes == 2, "{resource}");
    }
}

#[test]
fn windows_nodes_are_ignored() {
    let report = report_of_node(&info("operatingSystem", "windows"));
    assert_eq!(report.gpu_nodes, 1);
}

#[test]
fn container_runtimes_are_checked() {
    for (runtime, expected) in [
        ("containerd://1.7.0", vec![]),
        ("containerd://2.1.5-k3s1", vec![]),
        ("cri-o://1.34.3-2.rhaos4.21", vec![]),
        ("containerd://1.6.36", vec![Reason::ContainerRuntimeWithoutCdi]),
        ("docker://27.3.1", vec![Reason::ContainerRuntimeUnsupported]),
    ] {
        let report = report_of_node(&info("containerRuntimeVersion", runtime));
        assert_eq!(problems(&report), expected, "{runtime}");
    }
    let report = report_of_node(&info("containerRuntimeVersion", "docker://27.3.1"));
    let found = finding(&report, Reason::ContainerRuntimeUnsupported);
    assert!(found.level == Level::Error && found.message.contains("docker://27.3.1 on gpu-1"), "{found:?}");
}

#[test]
fn kernels_without_pidfd_open_are_errors() {
    for (kernel, expected) in [
        ("5.4.0-216-generic", vec![]),
        ("6.12.46+", vec![]),
        ("5.3.18-150300.59", vec![Reason::KernelTooOld]),
        ("4.18.0-553.el8_10.x86_64", vec![Reason::KernelTooOld]),
    ] {
        assert_eq!(problems(&report_of_node(&info("kernelVersion", kernel))), expected, "{kernel}");
    }
}

#[test]
fn architectures_are_checked() {
    assert_eq!(problems(&report_of_node(&info("architecture", "ppc64le"))), [Reason::ArchitectureUnsupported]);
    let report = report_of_node(&info("architecture", "arm64"));
    assert_eq!(problems(&report), []);
    assert_eq!(finding(&report, Reason::Arm64).level, Level::Info);
}

#[test]
fn only_nodes_of_the_selector_are_checked() {
    let mut nodes = healthy_nodes();
    nodes[0] = with(nodes[0].clone(), &info("kernelVersion", "4.18.0"));
    nodes[1] = with(nodes[1].clone(), &json!({"metadata": {"labels": {"gpu": "cleave"}}}));
    let report = report_with(&super::facts(&json!({"nodes": nodes})), &[("gpu", "cleave")]);
    assert_eq!(problems(&report), []);
    assert_eq!(report.gpu_nodes, 1);
    assert_eq!(report.nested_values(), json!({"nodes": {"nodeSelector": {"gpu": "cleave"}}}));
}

#[test]
fn taints_that_pods_do_not_tolerate_are_reported() {
    for (key, effect, expected) in [
        ("sku", "NoSchedule", vec![Reason::TaintNotTolerated]),
        ("team", "NoExecute", vec![Reason::TaintNotTolerated]),
        ("sku", "PreferNoSchedule", vec![]),
        // Admission adds a toleration of this taint.
        ("nvidia.com/gpu", "NoSchedule", vec![]),
        // Kubernetes removes this taint itself.
        ("node.kubernetes.io/not-ready", "NoExecute", vec![]),
    ] {
        let tainted = json!({"spec": {"taints": [{"key": key, "value": "v", "effect": effect}]}});
        let report = report_of(&json!({"nodes": [with(gpu_node("a"), &tainted), gpu_node("b"), gpu_node("c")]}));
        assert_eq!(problems(&report), expected, "{key}:{effect}");
    }
}

#[test]
fn the_operator_needs_a_node() {
    let tainted = |key: &str, effect: &str| json!({"spec": {"taints": [{"key": key, "effect": effect}]}});
    let team = with(gpu_node("a"), &tainted("team", "NoSchedule"));
    let report = report_of(&json!({"nodes": [team.clone()]}));
    assert_eq!(finding(&report, Reason::OperatorUnschedulable).level, Level::Error);
    let tolerations = report.values["operator.tolerations"].as_array().unwrap();
    let tolerates = |key: &str| tolerations.contains(&json!({"key": key, "operator": "Exists"}));
    assert!(tolerates("team") && tolerates("nvidia.com/gpu"), "{tolerations:?}");

    // These taints do not exclude the operator: it tolerates them, or they are temporary or soft.
    for (key, effect) in [
        ("node-role.kubernetes.io/control-plane", "NoSchedule"),
        ("nvidia.com/gpu", "NoSchedule"),
        ("node.kubernetes.io/unreachable", "NoExecute"),
        ("team", "PreferNoSchedule"),
    ] {
        let usable = with(gpu_node("b"), &tainted(key, effect));
        let report = report_of(&json!({"nodes": [team.clone(), usable]}));
        assert!(finding(&report, Reason::OneOperatorNode).message.contains("node b "), "{key}");
        assert_eq!(report.values["operator.replicas"], 1);
    }
    assert_eq!(problems(&report_of(&json!({"nodes": healthy_nodes()}))), []);
}
