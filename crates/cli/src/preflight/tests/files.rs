//! Tests how preflight reads lists from files and renders a report.
use std::path::PathBuf;

use serde_json::json;

use super::{
    FindingReason, gpu_node, healthy_nodes, only_finding, report_for_node_selector, report_of, report_of_node,
};
use crate::preflight::facts::MajorMinor;
use crate::preflight::read::{from_directory, parse_labels};
use crate::preflight::text::{render, values_yaml};

/// A temporary directory. Drop removes it.
struct TemporaryDirectory(PathBuf);

impl TemporaryDirectory {
    fn new(test: &str, files: &[(&str, String)]) -> Self {
        let path = std::env::temp_dir().join(format!("cleave-preflight-{test}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        for (name, text) in files {
            std::fs::write(path.join(name), text).unwrap();
        }
        Self(path)
    }
}

impl Drop for TemporaryDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn lists_and_single_objects_are_read_from_files() {
    let namespace = super::namespace(&json!({"pod-security.kubernetes.io/enforce": "baseline"}));
    let directory = TemporaryDirectory::new(
        "lists",
        &[
            ("nodes.json", json!({"kind": "List", "items": healthy_nodes()}).to_string()),
            ("namespaces.json", namespace.to_string()),
        ],
    );
    let report = report_for_node_selector(&from_directory(&directory.0), &[]);
    assert_eq!(report.gpu_nodes, 2);
    only_finding(&report, FindingReason::PodSecurityTooStrict);
}

#[test]
fn missing_and_malformed_files_are_unknown() {
    let directory = TemporaryDirectory::new(
        "malformed",
        &[
            ("nodes.json", json!({"items": [{"metadata": "x"}]}).to_string()),
            ("daemonsets.json", "{".to_owned()),
            ("runtimeclasses.json", "{}".to_owned()),
        ],
    );
    let facts = from_directory(&directory.0);
    assert!(facts.nodes.unwrap_err().contains("nodes.json is malformed"));
    assert!(facts.daemon_sets.unwrap_err().contains("daemonsets.json is malformed"));
    assert!(facts.runtime_classes.unwrap_err().contains("neither a list nor an object"));
    assert!(facts.quotas.unwrap_err().contains("resourcequotas.json"));
}

#[test]
fn the_text_contains_every_finding_and_the_install_command() {
    let kernel = json!({"status": {"nodeInfo": {"kernelVersion": "4.18.0"}}});
    let report = report_of_node(&kernel);
    let text = render(&report).unwrap();
    for part in [
        "Kubernetes: v1.36.4\n",
        "Platform:   unmodified kubelet (kubeadm or Kubespray)\n",
        "Nodes:      2, 2 with GPUs\n",
        "ERROR    KernelTooOld\n  The kernel is 4.18.0 on gpu-1.",
        "\n  → Use nodes with Linux 5.4 or newer.\n",
        "1 error, 0 warnings, 3 facts.\n",
        "  helm install cleave charts/cleave --namespace cleave-system \\\n    \
         --values charts/cleave/platforms/kubeadm.yaml\n",
    ] {
        assert!(text.contains(part), "{part:?} in\n{text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    assert!(!text.contains("values.yaml`"), "no further values are needed:\n{text}");
}

#[test]
fn values_are_rendered_as_a_values_file() {
    let report = report_of(&json!({"nodes": [gpu_node("a")]}));
    assert_eq!(
        values_yaml(&report).unwrap(),
        "# Pass --values charts/cleave/platforms/kubeadm.yaml to Helm too.\noperator:\n  replicas: 1\n"
    );
    assert!(render(&report).unwrap().ends_with("  operator:\n    replicas: 1\n"));
    let healthy = report_of(&json!({"nodes": healthy_nodes()}));
    let text = values_yaml(&healthy).unwrap();
    assert!(serde_saphyr::from_str::<Option<serde_json::Value>>(&text).unwrap().is_none(), "{text}");
}

#[test]
fn json_contains_the_level_and_reason_of_each_finding() {
    let report = report_of_node(&json!({"status": {"nodeInfo": {"kernelVersion": "4.18.0"}}}));
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["findings"][0]["level"], "Error");
    assert_eq!(json["findings"][0]["reason"], "KernelTooOld");
    assert_eq!(json["valuesFiles"], json!(["platforms/kubeadm.yaml"]));
    assert_eq!(json["gpuNodes"], 2);
}

#[test]
fn labels_are_pairs_of_name_and_value_separated_by_commas() {
    let labels = parse_labels("gpu=cleave, zone=a").unwrap();
    assert_eq!(
        labels.into_iter().collect::<Vec<_>>(),
        [("gpu".to_owned(), "cleave".to_owned()), ("zone".to_owned(), "a".to_owned())]
    );
    assert!(parse_labels("").unwrap().is_empty());
    assert!(parse_labels("gpu").unwrap_err().contains("LABEL=VALUE"));
}

#[test]
fn a_version_is_reduced_to_its_first_two_numbers() {
    for (text, expected) in [
        ("v1.34.1-gke.1", Some(MajorMinor(1, 34))),
        ("1.7", Some(MajorMinor(1, 7))),
        ("1.34+", Some(MajorMinor(1, 34))),
        ("6.12.46+", Some(MajorMinor(6, 12))),
        ("5", None),
        ("", None),
        ("v.1", None),
    ] {
        assert_eq!(MajorMinor::parse(text), expected, "{text:?}");
    }
}
