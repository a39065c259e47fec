//! Tests the detection of each platform, with descriptions of clusters in `e2e/platforms`.
use std::path::PathBuf;

use serde_json::{Value, json};

use super::{
    FindingReason, Level, gpu_node, healthy_nodes, only_finding, problems, report_for_node_selector, report_of,
    with_changes,
};
use crate::preflight::facts::Node;
use crate::preflight::platform::Platform;
use crate::preflight::read::from_directory;
use crate::preflight::report::Report;

fn platform_directory(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../e2e/platforms").join(name)
}

fn report_of_platform(name: &str) -> Report {
    report_for_node_selector(&from_directory(&platform_directory(name)), &[])
}

#[test]
fn each_described_platform_is_detected_with_its_values_file() {
    for (name, platform, files) in [
        ("gke", Platform::Gke, vec!["gke"]),
        ("eks-al2023", Platform::EksAl2023, vec!["eks-al2023"]),
        ("eks-bottlerocket", Platform::EksBottlerocket, vec!["eks-bottlerocket"]),
        ("aks", Platform::Aks, vec!["aks"]),
        ("openshift", Platform::OpenShift, vec!["openshift", "gpu-operator"]),
        ("talos", Platform::Talos, vec!["talos"]),
        ("k3s", Platform::K3s, vec!["k3s"]),
        ("rke2", Platform::Rke2, vec!["rke2"]),
        ("kubeadm", Platform::Kubeadm, vec!["kubeadm"]),
        ("gpu-operator", Platform::Kubeadm, vec!["kubeadm", "gpu-operator"]),
    ] {
        let report = report_of_platform(name);
        assert_eq!(report.platforms, [platform.name()], "{name}");
        assert_eq!(only_finding(&report, FindingReason::PlatformDetected).level, Level::Info);
        let files: Vec<String> = files.iter().map(|file| format!("platforms/{file}.yaml")).collect();
        assert_eq!(report.values_files, files, "{name}");
        assert!(report.gpu_nodes > 0, "{name}");
    }
}

#[test]
fn descriptions_of_platforms_cause_only_the_findings_of_their_platform() {
    for (name, expected) in [
        ("gke", vec![]),
        ("eks-al2023", vec![]),
        ("eks-bottlerocket", vec![]),
        // The GPU node has the taint sku=gpu, and there is one other node.
        ("aks", vec![FindingReason::TaintNotTolerated, FindingReason::OneOperatorNode]),
        // Only node feature discovery and the GPU Operator set labels that identify GPU nodes.
        ("openshift", vec![FindingReason::GpuLabelNotStable]),
        // The namespace does not exist, and Talos enforces `baseline`.
        ("talos", vec![FindingReason::PodSecurityTooStrict]),
        // The platform creates the RuntimeClass on every cluster.
        ("k3s", vec![FindingReason::RuntimeHandlerUnknown]),
        ("rke2", vec![FindingReason::GpuLabelNotStable, FindingReason::RuntimeHandlerUnknown]),
        ("kubeadm", vec![FindingReason::GpuLabelNotStable]),
        ("gpu-operator", vec![FindingReason::GpuLabelNotStable]),
    ] {
        let mut found = problems(&report_of_platform(name));
        // Ignore unread lists: the descriptions of clusters omit some files.
        found.retain(|reason| *reason != FindingReason::NotChecked);
        assert_eq!(found, expected, "{name}");
    }
}

#[test]
fn the_drivers_location_and_runtime_class_depend_on_the_platform() {
    for (name, location, runtime_class) in [
        ("gke", "/home/kubernetes/bin/nvidia", None),
        ("eks-al2023", "usual directories", None),
        ("eks-bottlerocket", "Bottlerocket", None),
        ("talos", "/usr/local", Some("nvidia")),
        ("k3s", "usual directories", Some("nvidia")),
        ("openshift", "/run/nvidia/driver", Some("nvidia")),
        ("gpu-operator", "/run/nvidia/driver", Some("nvidia")),
    ] {
        let report = report_of_platform(name);
        assert!(only_finding(&report, FindingReason::DriverLayout).message.contains(location), "{name}");
        assert_eq!(report.values.get("driver.runtimeClassName").and_then(Value::as_str), runtime_class, "{name}");
    }
}

#[test]
fn labels_operating_systems_and_kubelet_versions_identify_platforms() {
    let kubelet = |version: &str| json!({"status": {"nodeInfo": {"kubeletVersion": version}}});
    let os = |image: &str| json!({"status": {"nodeInfo": {"osImage": image}}});
    let label = |name: &str| json!({"metadata": {"labels": {name: "x"}}});
    for (changes, expected) in [
        (kubelet("v1.34.1-gke.1829001"), Some(Platform::Gke)),
        (label("cloud.google.com/gke-nodepool"), Some(Platform::Gke)),
        (with_changes(kubelet("v1.34.1-eks-113cf36"), &os("Amazon Linux 2023.9.20250929")), Some(Platform::EksAl2023)),
        (
            with_changes(kubelet("v1.34.1-eks-113cf36"), &os("Bottlerocket OS 1.63.0 (aws-k8s-1.34-nvidia)")),
            Some(Platform::EksBottlerocket),
        ),
        (with_changes(kubelet("v1.34.1-eks-113cf36"), &os("Ubuntu 22.04.5 LTS")), None),
        (label("kubernetes.azure.com/cluster"), Some(Platform::Aks)),
        (os("Red Hat Enterprise Linux CoreOS 9.6.20251212-0 (Plow)"), Some(Platform::OpenShift)),
        (label("node.openshift.io/os_id"), Some(Platform::OpenShift)),
        // A node with OpenShift or Talos can also have the labels of its cloud.
        (with_changes(os("Talos (v1.11.2)"), &label("kubernetes.azure.com/cluster")), Some(Platform::Talos)),
        (kubelet("v1.34.1+k3s1"), Some(Platform::K3s)),
        (kubelet("v1.34.1+rke2r1"), Some(Platform::Rke2)),
        (kubelet("v1.34.1+k0s"), Some(Platform::K0s)),
        (label("microk8s.io/cluster"), Some(Platform::MicroK8s)),
        (kubelet("v1.34.1"), Some(Platform::Kubeadm)),
        (kubelet("v1.34.1+vendor.2"), None),
        (kubelet(""), None),
    ] {
        let node: Node = serde_json::from_value(with_changes(gpu_node("n"), &changes)).unwrap();
        assert_eq!(Platform::of(&node), expected, "{changes}");
    }
}

#[test]
fn a_platform_with_another_kubelet_directory_sets_the_value() {
    let node = with_changes(gpu_node("n"), &json!({"status": {"nodeInfo": {"kubeletVersion": "v1.35.1+k0s"}}}));
    let report = report_of(&json!({"nodes": [node]}));
    assert_eq!(report.values["paths.kubelet"], "/var/lib/k0s/kubelet");
    assert!(report.values_files.is_empty());
}

#[test]
fn an_unknown_platform_and_several_platforms_are_reported() {
    let other = with_changes(gpu_node("n"), &json!({"status": {"nodeInfo": {"kubeletVersion": "v1.35.1+vendor"}}}));
    assert_eq!(problems(&report_of(&json!({"nodes": [other.clone(), other]}))), [FindingReason::PlatformUnknown]);

    let k3s = with_changes(gpu_node("edge"), &json!({"status": {"nodeInfo": {"kubeletVersion": "v1.35.1+k3s1"}}}));
    let mut nodes = healthy_nodes();
    nodes.as_array_mut().unwrap().push(k3s);
    let report = report_of(&json!({"nodes": nodes, "runtimeclasses": [super::named_object("nvidia")]}));
    let mixed = only_finding(&report, FindingReason::PlatformsMixed);
    assert!(mixed.message.contains("k3s, unmodified kubelet (kubeadm or Kubespray)"), "{mixed:?}");
    assert!(report.values_files.is_empty(), "no file fits both platforms");
}

#[test]
fn gke_autopilot_is_an_error() {
    let node = |name: &str| {
        with_changes(gpu_node(name), &json!({"status": {"nodeInfo": {"kubeletVersion": "v1.35.1-gke.1"}}}))
    };
    let autopilot = report_of(&json!({"nodes": [node("gk3-pool-1"), node("gk3-pool-2")]}));
    assert_eq!(only_finding(&autopilot, FindingReason::PrivilegedPodsRefused).level, Level::Error);
    assert_eq!(problems(&report_of(&json!({"nodes": [node("gke-pool-1"), node("gke-pool-2")]}))), []);

    // A Standard cluster with a node that Autopilot manages.
    let mixed = report_of(&json!({"nodes": [node("gke-pool-1"), node("gke-pool-2"), node("gk3-pool-3")]}));
    let found = only_finding(&mixed, FindingReason::PrivilegedPodsRefused);
    assert!(found.level == Level::Warning && found.message.contains("gk3-pool-3 start"), "{found:?}");
    let without_gpu = with_changes(node("gk3-pool-3"), &json!({"metadata": {"labels": {"cleave.dev/gpu": null}}}));
    let elsewhere = report_of(&json!({"nodes": [node("gke-pool-1"), node("gke-pool-2"), without_gpu]}));
    assert_eq!(problems(&elsewhere), []);
}
