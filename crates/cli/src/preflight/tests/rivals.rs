//! Tests of the checks for other software that manages GPUs.
use serde_json::{Value, json};

use super::{
    FindingReason, Level, gpu_node, healthy_nodes, named_object, only_finding, problems, report_for_node_selector,
    report_of, with_changes,
};
use crate::preflight::report::Report;

/// Returns a `DaemonSet` with one container, on all nodes.
fn daemon_set(name: &str, image: &str) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "gpu-tools"},
        "spec": {"template": {"spec": {
            "containers": [{"name": "main", "image": image}],
            "tolerations": [{"operator": "Exists"}]
        }}}
    })
}

/// Returns the `DaemonSet`, restricted to nodes with a label.
fn restrict_to_label(set: Value, label: &str) -> Value {
    with_changes(set, &json!({"spec": {"template": {"spec": {"nodeSelector": {label: "true"}}}}}))
}

fn report_of_sets(sets: &[Value]) -> Report {
    report_of(&json!({"nodes": healthy_nodes(), "daemonsets": sets}))
}

#[test]
fn other_device_plugins_are_errors() {
    for (name, image, software) in [
        ("nvidia-device-plugin-daemonset", "nvcr.io/nvidia/k8s-device-plugin:v0.18.1", "NVIDIA's device plugin"),
        ("gpu-plugin", "mirror.example/nvidia/k8s-device-plugin@sha256:00", "NVIDIA's device plugin"),
        ("nvidia-gpu-device-plugin", "example/plugin:1", "a device plugin for NVIDIA GPUs"),
        ("hami-device-plugin", "projecthami/hami:v2.7.0", "HAMi"),
        ("nos-gpu-agent", "ghcr.io/nebuly-ai/nos-gpu-agent:0.1.2", "Nos"),
        ("plugin", "ghcr.io/nebuly-ai/k8s-device-plugin:0.13.0", "Nos"),
        ("volcano-device-plugin", "docker.io/volcanosh/volcano-vgpu-device-plugin:v1.11", "Volcano"),
        ("gpushare-device-plugin-ds", "registry.example/acs/k8s-gpushare-plugin:v2", "Alibaba Cloud"),
        ("nvidia-device-plugin-mps-control-daemon", "nvcr.io/nvidia/k8s-device-plugin:v0.18.1", "MPS control daemon"),
    ] {
        let report = report_of_sets(&[daemon_set(name, image)]);
        let found = only_finding(&report, FindingReason::RivalPlugin);
        assert_eq!(found.level, Level::Error);
        assert!(found.message.contains(software) && found.message.contains("gpu-1, gpu-2"), "{name}: {found:?}");
        assert!(found.message.contains(&format!("gpu-tools/{name}")), "{found:?}");
        assert_eq!(problems(&report), [FindingReason::RivalPlugin], "{name}");
    }
}

#[test]
fn plugins_of_gke_and_of_the_gpu_operator_are_disabled_by_a_label() {
    let gke = with_changes(
        daemon_set("nvidia-gpu-device-plugin-large-cos", "gke.gcr.io/nvidia-gpu-device-plugin:1"),
        &json!({"metadata": {"namespace": "kube-system"}}),
    );
    let report = report_of_sets(&[gke]);
    let action = &only_finding(&report, FindingReason::RivalPlugin).action;
    for step in [
        "gke-no-default-nvidia-gpu-device-plugin=true",
        "gpu-driver-version=disabled",
        "nvidia-driver-installer/cos/daemonset-preloaded.yaml",
        "nvidia-driver-installer/ubuntu/daemonset-preloaded.yaml",
    ] {
        assert!(action.contains(step), "{step} in {action}");
    }

    let label = "nvidia.com/gpu.deploy.device-plugin";
    let plugin = daemon_set("nvidia-device-plugin-daemonset", "nvcr.io/nvidia/k8s-device-plugin:v0.18.1");
    let plugin = restrict_to_label(plugin, label);
    let labelled = with_changes(gpu_node("gpu-3"), &json!({"metadata": {"labels": {label: "true"}}}));
    let nodes = json!([gpu_node("gpu-1"), gpu_node("gpu-2"), labelled]);
    let report =
        report_of(&json!({"nodes": nodes, "daemonsets": [plugin], "runtimeclasses": [named_object("nvidia")]}));
    let found = only_finding(&report, FindingReason::RivalPlugin);
    assert!(found.action.contains("nvidia.com/gpu.deploy.device-plugin=false"), "{found:?}");
    assert!(found.message.contains("runs on gpu-3."), "{found:?}");
    assert_eq!(report.values_files, ["platforms/kubeadm.yaml", "platforms/gpu-operator.yaml"]);
}

#[test]
fn a_plugin_on_other_nodes_is_only_a_fact() {
    let plugin = daemon_set("nvidia-device-plugin-daemonset", "nvcr.io/nvidia/k8s-device-plugin:v0.18.1");
    let elsewhere = restrict_to_label(plugin.clone(), "legacy");
    let report = report_of_sets(&[elsewhere]);
    assert_eq!(problems(&report), []);
    assert_eq!(only_finding(&report, FindingReason::RivalPluginElsewhere).level, Level::Info);

    // This node affinity excludes the nodes for Cleave, as docs/how-to/enable-nodes.md describes.
    let requirement = json!({"key": "gpu", "operator": "NotIn", "values": ["cleave"]});
    let terms = json!({"nodeSelectorTerms": [{"matchExpressions": [requirement]}]});
    let affinity = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}});
    let plugin = with_changes(plugin, &json!({"spec": {"template": {"spec": {"affinity": affinity}}}}));
    let mut nodes = healthy_nodes();
    nodes[1] = with_changes(nodes[1].clone(), &json!({"metadata": {"labels": {"gpu": "cleave"}}}));
    let facts = super::facts(&json!({"nodes": nodes, "daemonsets": [plugin]}));
    assert_eq!(problems(&report_for_node_selector(&facts, &[("gpu", "cleave")])), []);
    assert!(
        only_finding(&report_for_node_selector(&facts, &[]), FindingReason::RivalPlugin)
            .message
            .contains("runs on gpu-1.")
    );
}

#[test]
fn software_that_serves_no_gpus_is_not_a_rival() {
    let discovery = with_changes(
        daemon_set("gpu-feature-discovery", "nvcr.io/nvidia/k8s-device-plugin:v0.18.1"),
        &json!({"spec": {"template": {"spec": {"containers": [
            {"name": "main", "image": "nvcr.io/nvidia/k8s-device-plugin:v0.18.1", "command": ["gpu-feature-discovery"]}
        ]}}}}),
    );
    let exporter = daemon_set("dcgm-exporter", "nvcr.io/nvidia/k8s/dcgm-exporter:4.4.1");
    let toolkit = daemon_set("nvidia-container-toolkit-daemonset", "nvcr.io/nvidia/k8s/container-toolkit:v1.18.1");
    assert_eq!(problems(&report_of_sets(&[discovery, exporter, toolkit])), []);
}

#[test]
fn gpus_that_no_known_daemon_set_serves_are_errors() {
    let served = json!({"status": {"capacity": {"nvidia.com/gpu": "8"}, "allocatable": {"nvidia.com/gpu": "8"}}});
    let serving = |changes: &Value| {
        let node = with_changes(with_changes(gpu_node("gpu-1"), &served), changes);
        report_of(&json!({"nodes": [node, gpu_node("gpu-2")]}))
    };
    let found = serving(&json!({}));
    let found = only_finding(&found, FindingReason::GpusServedByOthers);
    assert!(found.level == Level::Error && found.message.contains("gpu-1"), "{found:?}");

    let os = |image: &str| json!({"status": {"nodeInfo": {"kubeletVersion": "v1.35.0-eks-1", "osImage": image}}});
    let bottlerocket = serving(&os("Bottlerocket OS 1.63.0 (aws-k8s-1.35-nvidia)"));
    let action = &only_finding(&bottlerocket, FindingReason::GpusServedByOthers).action;
    assert!(action.contains("settings.kubelet-device-plugins.nvidia.enabled"), "{action}");
    let auto = serving(&os("Bottlerocket (EKS Auto, Nvidia) 2026.1.1 (aws-k8s-1.35-nvidia)"));
    let action = &only_finding(&auto, FindingReason::GpusServedByOthers).action;
    assert!(action.contains("EKS Auto Mode"), "{action}");
}

#[test]
fn resources_of_a_removed_plugin_do_not_count_as_served() {
    // The kubelet still reports the capacity after the plugin has stopped, but no device is
    // allocatable.
    let left = json!({"status": {"capacity": {"nvidia.com/gpu": "8"}, "allocatable": {"nvidia.com/gpu": "0"}}});
    assert_eq!(problems(&report_of(&json!({"nodes": [with_changes(gpu_node("a"), &left), gpu_node("b")]}))), []);
}

#[test]
fn resources_of_an_installed_cleave_are_not_a_rival_plugin() {
    let served = json!({"status": {"allocatable": {"nvidia.com/gpu-mps": "10"}}});
    let agent = with_changes(
        daemon_set("cleave-agent", "localhost/cleave:0.1.0"),
        &json!({"spec": {"template": {"spec": {"containers": [
            {"name": "agent", "command": ["/usr/bin/cleave-supervise", "/usr/bin/cleave-agent"]}
        ]}}}}),
    );
    let nodes = json!([with_changes(gpu_node("a"), &served), gpu_node("b")]);
    let report = report_of(&json!({"nodes": nodes, "daemonsets": [agent]}));
    assert_eq!(problems(&report), []);
    only_finding(&report, FindingReason::AlreadyInstalled);
}

#[test]
fn the_dra_driver_is_an_error_only_if_it_allocates_gpus() {
    let driver = |containers: &[&str]| {
        let containers: Vec<Value> = containers
            .iter()
            .map(|name| json!({"name": name, "image": "nvcr.io/nvidia/k8s-dra-driver-gpu:v25.8.0"}))
            .collect();
        with_changes(
            daemon_set("nvidia-dra-driver-gpu-kubelet-plugin", ""),
            &json!({"spec": {"template": {"spec": {"containers": containers}}}}),
        )
    };
    let report = report_of_sets(&[driver(&["compute-domains", "gpus"])]);
    assert_eq!(only_finding(&report, FindingReason::DraDriver).level, Level::Error);
    assert_eq!(problems(&report_of_sets(&[driver(&["compute-domains"])])), []);
}

#[test]
fn the_suggested_values_leave_mig_mode_to_the_mig_manager() {
    let manager = daemon_set("nvidia-mig-manager", "nvcr.io/nvidia/cloud-native/k8s-mig-manager:v0.13.0");
    let report = report_of_sets(std::slice::from_ref(&manager));
    assert_eq!(only_finding(&report, FindingReason::MigManager).level, Level::Warning);
    assert_eq!(report.values["agent.migMode"], "Never");
    let report = report_of_sets(&[restrict_to_label(manager, "other")]);
    assert_eq!(problems(&report), []);
    assert!(report.values.is_empty());
}

#[test]
fn installed_operators_without_plugins_are_facts() {
    let objects = json!({
        "nodes": healthy_nodes(),
        "customresourcedefinitions": [named_object("clusterpolicies.nvidia.com"), named_object("widgets.example.com")]
    });
    let report = report_of(&objects);
    let found = only_finding(&report, FindingReason::OtherSoftwareInstalled);
    assert!(found.level == Level::Info && found.message.contains("GPU Operator"), "{found:?}");
}

#[test]
fn the_driver_container_needs_the_runtime_class() {
    let driver = daemon_set("nvidia-driver-daemonset", "nvcr.io/nvidia/driver:580.105.08-ubuntu24.04");
    let report = report_of_sets(std::slice::from_ref(&driver));
    assert_eq!(problems(&report), [FindingReason::RuntimeClassMissing]);
    assert!(only_finding(&report, FindingReason::DriverLayout).message.contains("/run/nvidia/driver"));

    let objects = json!({"nodes": healthy_nodes(), "daemonsets": [driver], "runtimeclasses": [named_object("nvidia")]});
    let report = report_of(&objects);
    assert_eq!(problems(&report), []);
    only_finding(&report, FindingReason::RuntimeClassFound);
    assert_eq!(report.values["driver.runtimeClassName"], "nvidia");
}

#[test]
fn a_platform_whose_runtime_is_not_the_default_needs_the_runtime_class() {
    let k3s = with_changes(gpu_node("a"), &json!({"status": {"nodeInfo": {"kubeletVersion": "v1.35.1+k3s1"}}}));
    let other = with_changes(k3s.clone(), &json!({"metadata": {"name": "b"}}));
    let report = report_of(&json!({"nodes": [k3s, other], "runtimeclasses": [named_object("crun")]}));
    assert_eq!(only_finding(&report, FindingReason::RuntimeClassMissing).level, Level::Error);
}

/// Checks a cluster with a `RuntimeClass` and two GPU nodes that have this kubelet version and
/// operating system.
fn report_of_kubelet(version: &str, os: &str, runtime_class: &str, sets: &[Value]) -> Report {
    let info = json!({"status": {"nodeInfo": {"kubeletVersion": version, "osImage": os}}});
    let nodes = json!([with_changes(gpu_node("a"), &info), with_changes(gpu_node("b"), &info)]);
    report_of(&json!({"nodes": nodes, "runtimeclasses": [named_object(runtime_class)], "daemonsets": sets}))
}

#[test]
fn a_runtime_class_that_the_platform_always_creates_does_not_prove_that_nodes_have_the_runtime() {
    for (version, directory) in [("v1.35.1+k3s1", "k3s"), ("v1.35.1+rke2r1", "rke2")] {
        let report = report_of_kubelet(version, "SLES 15", "nvidia", &[]);
        assert_eq!(problems(&report), [FindingReason::RuntimeHandlerUnknown], "{version}");
        let found = only_finding(&report, FindingReason::RuntimeHandlerUnknown);
        let command = format!("`grep nvidia /var/lib/rancher/{directory}/agent/etc/containerd/config.toml`");
        assert!(found.level == Level::Warning && found.action.contains(&command), "{found:?}");
        assert_eq!(report.values["driver.runtimeClassName"], "nvidia");
    }
}

#[test]
fn a_runtime_class_is_unused_if_nvidias_runtime_is_the_default() {
    for (version, os) in [
        ("v1.35.0-eks-1", "Amazon Linux 2023.9.20250929"),
        ("v1.35.0-eks-1", "Bottlerocket OS 1.63.0 (aws-k8s-1.35-nvidia)"),
        ("v1.35.0-gke.1", "Container-Optimized OS from Google"),
    ] {
        let report = report_of_kubelet(version, os, "nvidia", &[]);
        assert_eq!(problems(&report), [], "{os}");
        assert!(!report.values.contains_key("driver.runtimeClassName"), "{os}: {:?}", report.values);
    }
    // With an unmodified kubelet, an administrator creates the `RuntimeClass` if NVIDIA's runtime
    // is not the default.
    let report = report_of_kubelet("v1.35.0", "Ubuntu 24.04.3 LTS", "nvidia", &[]);
    assert_eq!(report.values["driver.runtimeClassName"], "nvidia");
}

#[test]
fn the_gpu_operators_values_need_the_runtime_class_on_every_platform() {
    let label = "nvidia.com/gpu.deploy.container-toolkit";
    let toolkit = daemon_set("nvidia-container-toolkit-daemonset", "nvcr.io/nvidia/k8s/container-toolkit:v1.18.1");
    let toolkit = restrict_to_label(toolkit, label);
    for version in ["v1.35.0-gke.1", "v1.35.0"] {
        let changes = json!({
            "metadata": {"labels": {label: "true"}},
            "status": {"nodeInfo": {"kubeletVersion": version}}
        });
        let nodes = json!([with_changes(gpu_node("a"), &changes), with_changes(gpu_node("b"), &changes)]);
        let report = |class: &str| {
            report_of(&json!({"nodes": nodes, "daemonsets": [toolkit], "runtimeclasses": [named_object(class)]}))
        };
        assert_eq!(report("nvidia").values_files.last().unwrap(), "platforms/gpu-operator.yaml");
        assert_eq!(problems(&report("nvidia")), [], "{version}");
        assert_eq!(problems(&report("gvisor")), [FindingReason::RuntimeClassMissing], "{version}");
    }
}
