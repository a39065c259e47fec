//! Tests that preflight agrees with the chart, the manifest of the Job and the documentation.
use std::collections::BTreeSet;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::{gpu_node, healthy_nodes, named_object, report_of, with_changes};
use crate::preflight::checks::{
    GPU_LABELS, NEWEST_TESTED, OLDEST_SUPPORTED, OPERATOR_TOLERATIONS, SYSTEM_PRIORITY_CLASSES, TALOS_GPU_LABELS,
};
use crate::preflight::facts::MajorMinor;
use crate::preflight::platform::Platform;
use crate::preflight::read::SOURCES;
use crate::preflight::report::{FindingReason, Report};

/// Reads a file of the repository.
fn repository_file(path: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn read_yaml(path: &str) -> Value {
    serde_saphyr::from_str(&repository_file(path)).unwrap()
}

#[test]
fn supported_versions_equal_those_of_the_chart_and_the_cluster_tests() {
    let chart = read_yaml("charts/cleave/Chart.yaml");
    assert_eq!(chart["kubeVersion"], format!(">={OLDEST_SUPPORTED}.0-0"));
    // All cluster tests run on the Kubernetes version in go.mod. `make test-versions` adds results
    // of other versions.
    let module = repository_file("e2e/cluster/kube/go.mod");
    let default = module.lines().find_map(|line| line.trim().strip_prefix("k8s.io/kubernetes ")).unwrap();
    let results: Vec<Value> = serde_json::from_str(&repository_file("docs/data/kubernetes-versions.json")).unwrap();
    let passed = results.iter().filter(|result| result["failed"].as_array().is_some_and(Vec::is_empty));
    let versions = passed.filter_map(|result| result["version"].as_str()).chain([default]);
    let newest = versions.filter_map(MajorMinor::parse).max().unwrap();
    assert_eq!(NEWEST_TESTED, newest, "set NEWEST_TESTED to the newest version that passed");
}

#[test]
fn constants_about_the_chart_equal_its_values() {
    let values = read_yaml("charts/cleave/values.yaml");
    let labels: Vec<Value> = GPU_LABELS
        .iter()
        .map(|(label, value)| json!(value.map_or((*label).to_owned(), |value| format!("{label}={value}"))))
        .collect();
    assert_eq!(values["nodes"]["gpuLabels"], json!(labels));
    let tolerations = OPERATOR_TOLERATIONS.map(|key| json!({"key": key, "operator": "Exists"}));
    assert_eq!(values["operator"]["tolerations"], json!(tolerations));
    let classes = [&values["nodes"]["priorityClassName"], &values["operator"]["priorityClassName"]];
    assert_eq!(json!(classes), json!(SYSTEM_PRIORITY_CLASSES));
    assert_eq!(values["operator"]["replicas"], 2);
    // Agents tolerate every taint of GPU nodes.
    assert_eq!(values["nodes"]["tolerations"], json!([{"operator": "Exists"}]));
}

#[test]
fn the_labels_of_talos_equal_those_of_its_values_file() {
    let file = read_yaml("charts/cleave/platforms/talos.yaml");
    let labels: Vec<&str> = file["nodes"]["gpuLabels"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    let own = labels.into_iter().filter(|label| label.starts_with("extensions.talos.dev/"));
    assert_eq!(own.collect::<Vec<_>>(), TALOS_GPU_LABELS);
}

#[test]
fn each_values_file_that_preflight_names_exists() {
    let files = Platform::ALL.into_iter().filter_map(Platform::values_file);
    for file in files.chain(["gpu-operator"]) {
        repository_file(&format!("charts/cleave/platforms/{file}.yaml"));
    }
}

/// Returns reports of clusters for which preflight suggests values.
fn reports_with_values() -> Vec<Report> {
    let manager = json!({"metadata": {"name": "nvidia-mig-manager"}});
    let kubelet = |version: &str| json!({"status": {"nodeInfo": {"kubeletVersion": version}}});
    let taint = json!({"spec": {"taints": [{"key": "team", "effect": "NoSchedule"}]}});
    vec![
        report_of(&json!({
            "nodes": healthy_nodes(), "daemonsets": [manager], "runtimeclasses": [named_object("nvidia")]
        })),
        report_of(&json!({"nodes": [with_changes(gpu_node("a"), &kubelet("v1.35.0+k0s"))]})),
        report_of(&json!({"nodes": [with_changes(gpu_node("a"), &kubelet("v1.35.0-gke.1"))]})),
        report_of(&json!({"nodes": [with_changes(gpu_node("a"), &taint)]})),
    ]
}

#[test]
fn each_suggested_value_exists_in_the_chart() {
    let chart = read_yaml("charts/cleave/values.yaml");
    let reports = reports_with_values();
    let paths: BTreeSet<&String> = reports.iter().flat_map(|report| report.values.keys()).collect();
    assert!(paths.len() >= 6, "{paths:?}");
    for path in paths {
        let pointer = format!("/{}", path.replace('.', "/"));
        assert!(chart.pointer(&pointer).is_some(), "the chart has no value {path}");
    }
}

#[test]
fn the_role_of_the_job_allows_exactly_the_lists_that_preflight_reads() {
    let manifest: Vec<Value> = serde_saphyr::from_multiple(&repository_file("deploy/preflight.yaml")).unwrap();
    let role = manifest.iter().find(|object| object["kind"] == "ClusterRole").unwrap();
    let mut allowed = BTreeSet::new();
    for rule in role["rules"].as_array().unwrap() {
        assert_eq!(rule["verbs"], json!(["list"]));
        let [group] = rule["apiGroups"].as_array().unwrap().as_slice() else { panic!("{rule}") };
        for resource in rule["resources"].as_array().unwrap() {
            allowed.insert((group.as_str().unwrap(), resource.as_str().unwrap()));
        }
    }
    let read: BTreeSet<(&str, &str)> = SOURCES.iter().map(|source| (source.group, source.resource)).collect();
    assert_eq!(allowed, read);
}

#[test]
fn the_job_satisfies_the_restricted_standard() {
    let manifest: Vec<Value> = serde_saphyr::from_multiple(&repository_file("deploy/preflight.yaml")).unwrap();
    let of_kind = |kind: &str| manifest.iter().find(|object| object["kind"] == kind).unwrap();
    let job = of_kind("Job");
    let pod = &job["spec"]["template"]["spec"];
    assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
    // OpenShift refuses an explicit user, so the Job sets none. The image sets a numeric user.
    assert!(pod["securityContext"].get("runAsUser").is_none() && pod["securityContext"].get("runAsGroup").is_none());
    assert!(repository_file("deploy/Containerfile").contains("\nUSER 65532:65532\n"));
    assert_eq!(pod["tolerations"], json!([{"operator": "Exists"}]));
    assert_eq!(pod["securityContext"]["seccompProfile"], json!({"type": "RuntimeDefault"}));
    let container = &pod["containers"][0];
    assert_eq!(container["securityContext"]["allowPrivilegeEscalation"], false);
    assert_eq!(container["securityContext"]["capabilities"], json!({"drop": ["ALL"]}));
    assert_eq!(container["command"], json!(["/usr/bin/cleave", "preflight"]));
    let image = container["image"].as_str().unwrap();
    assert!(repository_file("deploy/manifests.yaml").contains(&format!("image: {image}\n")), "{image}");

    let subject = &of_kind("ClusterRoleBinding")["subjects"][0];
    let account = &of_kind("ServiceAccount")["metadata"];
    assert_eq!((&subject["name"], &subject["namespace"]), (&account["name"], &account["namespace"]));
    assert_eq!(pod["serviceAccountName"], account["name"]);
    assert_eq!(job["metadata"]["namespace"], of_kind("Namespace")["metadata"]["name"]);
}

#[test]
fn each_reason_is_documented() {
    let page = repository_file("docs/how-to/preflight.md");
    let documented: Vec<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
        .map(|(name, _)| name)
        .filter(|name| name.chars().all(char::is_alphanumeric) && name.starts_with(char::is_uppercase))
        .collect();
    let reasons: Vec<String> = FindingReason::ALL.iter().map(|reason| format!("{reason:?}")).collect();
    assert_eq!(documented, reasons);
}

#[test]
fn each_list_is_in_the_documented_command() {
    let page = repository_file("docs/how-to/preflight.md");
    for source in SOURCES {
        assert!(page.contains(source.resource), "{} is not documented", source.resource);
    }
}
