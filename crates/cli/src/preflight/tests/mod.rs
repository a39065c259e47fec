//! Tests of preflight. The tests describe clusters in JSON, as the API server returns them.
mod files;
mod live;
mod namespace;
mod nodes;
mod platforms;
mod published;
mod rivals;

use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::checks::{SYSTEM_PRIORITY_CLASSES, check};
use super::facts::{Facts, Target};
use super::report::{Finding, FindingReason, Level, Report};

/// The namespace of the release in tests.
const NAMESPACE: &str = "cleave-system";

/// Returns the facts about a cluster with these objects. `objects` maps the name of a resource to a
/// list. A missing resource has no objects.
fn facts(objects: &Value) -> Facts {
    fn list<T: DeserializeOwned>(objects: &Value, resource: &str) -> Vec<T> {
        match &objects[resource] {
            Value::Null => Vec::new(),
            items => serde_json::from_value(items.clone()).unwrap(),
        }
    }
    fn parse_value<T: DeserializeOwned>(value: Value) -> T {
        serde_json::from_value(value).unwrap()
    }
    Facts {
        server: Ok(parse_value(json!({"gitVersion": "v1.36.4"}))),
        admission: Ok(parse_value(json!({"resources": [
            {"name": "validatingadmissionpolicies"}, {"name": "mutatingadmissionpolicies"}
        ]}))),
        nodes: Ok(list(objects, "nodes")),
        daemon_sets: Ok(list(objects, "daemonsets")),
        runtime_classes: Ok(list(objects, "runtimeclasses")),
        quotas: Ok(list(objects, "resourcequotas")),
        limit_ranges: Ok(list(objects, "limitranges")),
        namespaces: Ok(match &objects["namespaces"] {
            Value::Null => {
                parse_value(json!([namespace(&json!({"pod-security.kubernetes.io/enforce": "privileged"}))]))
            }
            items => parse_value(items.clone()),
        }),
        priority_classes: Ok(parse_value(Value::Array(SYSTEM_PRIORITY_CLASSES.map(named_object).to_vec()))),
        definitions: Ok(list(objects, "customresourcedefinitions")),
        mutating_webhooks: Ok(list(objects, "mutatingwebhookconfigurations")),
        validating_webhooks: Ok(list(objects, "validatingwebhookconfigurations")),
    }
}

/// Returns an object that has only a name.
fn named_object(name: &str) -> Value {
    json!({"metadata": {"name": name}})
}

/// Returns the release's namespace with these labels.
fn namespace(labels: &Value) -> Value {
    json!({"metadata": {"name": NAMESPACE, "labels": labels}})
}

/// Returns two healthy GPU nodes of a kubeadm cluster, without a device plugin.
fn healthy_nodes() -> Value {
    json!([gpu_node("gpu-1"), gpu_node("gpu-2")])
}

/// Returns a healthy GPU node of a kubeadm cluster, with the recommended label.
fn gpu_node(name: &str) -> Value {
    json!({
        "metadata": {"name": name, "labels": {"cleave.dev/gpu": "true"}},
        "status": {"nodeInfo": {
            "architecture": "amd64",
            "containerRuntimeVersion": "containerd://2.1.4",
            "kernelVersion": "6.8.0-88-generic",
            "kubeletVersion": "v1.36.4",
            "operatingSystem": "linux",
            "osImage": "Ubuntu 24.04.3 LTS"
        }}
    })
}

/// Replaces fields of an object. `null` removes a field.
fn with_changes(mut object: Value, changes: &Value) -> Value {
    merge(&mut object, changes);
    object
}

fn merge(object: &mut Value, changes: &Value) {
    let (Value::Object(fields), Value::Object(changes)) = (&mut *object, changes) else {
        *object = changes.clone();
        return;
    };
    for (name, change) in changes {
        if change.is_null() {
            fields.remove(name);
        } else {
            merge(fields.entry(name).or_insert(Value::Null), change);
        }
    }
}

/// Checks a cluster, without a node selector.
fn report_of(objects: &Value) -> Report {
    report_for_node_selector(&facts(objects), &[])
}

fn report_for_node_selector(facts: &Facts, node_selector: &[(&str, &str)]) -> Report {
    let node_selector = node_selector.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    check(facts, &Target { namespace: NAMESPACE.to_owned(), node_selector })
}

/// Checks a cluster of two GPU nodes: one with these changes, and one healthy node.
fn report_of_node(changes: &Value) -> Report {
    report_of(&json!({"nodes": [with_changes(gpu_node("gpu-1"), changes), gpu_node("gpu-2")]}))
}

/// Returns the only finding with this reason. Panics if the report has no such finding or several.
#[track_caller]
fn only_finding(report: &Report, reason: FindingReason) -> &Finding {
    let found: Vec<&Finding> = report.findings.iter().filter(|finding| finding.reason == reason).collect();
    assert_eq!(found.len(), 1, "{reason:?} in {:#?}", report.findings);
    found[0]
}

/// Returns the reasons of all errors and warnings.
fn problems(report: &Report) -> Vec<FindingReason> {
    report.findings.iter().filter(|finding| finding.level != Level::Info).map(|finding| finding.reason).collect()
}

#[test]
fn a_healthy_cluster_has_no_problem() {
    let report = report_of(&json!({"nodes": healthy_nodes()}));
    assert_eq!(problems(&report), []);
    assert_eq!((report.nodes, report.gpu_nodes), (2, 2));
    assert_eq!(report.values_files, ["platforms/kubeadm.yaml"]);
    assert!(report.values.is_empty(), "{:?}", report.values);
}

#[test]
fn errors_are_reported_first() {
    let report = report_of_node(&json!({"status": {"nodeInfo": {"kernelVersion": "4.18.0", "architecture": "arm64"}}}));
    let levels: Vec<Level> = report.findings.iter().map(|finding| finding.level).collect();
    assert!(levels.is_sorted() && levels[0] == Level::Error, "{levels:?}");
}

#[test]
fn a_list_that_cannot_be_read_is_reported_and_skips_only_its_checks() {
    let mut facts = facts(&json!({"nodes": [with_changes(
        gpu_node("gpu-1"),
        &json!({"status": {"allocatable": {"nvidia.com/gpu": "8"}}})
    ), gpu_node("gpu-2")]}));
    facts.daemon_sets = Err("daemonsets.apps is forbidden".to_owned());
    let report = report_for_node_selector(&facts, &[]);
    let unread = only_finding(&report, FindingReason::NotChecked);
    assert_eq!(unread.level, Level::Warning);
    assert!(unread.message.starts_with("Not checked: ") && unread.message.contains("is forbidden"), "{unread:?}");
    // Without the list of DaemonSets, the report cannot name the plugin that serves the GPUs.
    assert_eq!(problems(&report), [FindingReason::NotChecked]);
    assert_eq!(report.gpu_nodes, 2);
}

#[test]
fn unread_lists_cause_no_other_findings() {
    let facts = Facts {
        server: Err("no".to_owned()),
        admission: Err("no".to_owned()),
        nodes: Err("no".to_owned()),
        daemon_sets: Err("no".to_owned()),
        runtime_classes: Err("no".to_owned()),
        quotas: Err("no".to_owned()),
        limit_ranges: Err("no".to_owned()),
        namespaces: Err("no".to_owned()),
        priority_classes: Err("no".to_owned()),
        definitions: Err("no".to_owned()),
        mutating_webhooks: Err("no".to_owned()),
        validating_webhooks: Err("no".to_owned()),
    };
    let report = report_for_node_selector(&facts, &[]);
    assert_eq!(report.findings.len(), 12);
    assert!(
        report.findings.iter().all(|finding| finding.reason == FindingReason::NotChecked),
        "{:#?}",
        report.findings
    );
}

#[test]
fn old_and_new_versions_of_kubernetes_are_reported() {
    for (version, expected) in [
        ("v1.33.9", vec![FindingReason::KubernetesTooOld]),
        ("v1.34.0-rc.1+k3s1", vec![]),
        ("v1.37.9", vec![]),
        ("v1.38.0", vec![FindingReason::KubernetesUntested]),
        ("latest", vec![FindingReason::NotChecked]),
    ] {
        let mut facts = facts(&json!({"nodes": healthy_nodes()}));
        facts.server = Ok(serde_json::from_value(json!({"gitVersion": version})).unwrap());
        assert_eq!(problems(&report_for_node_selector(&facts, &[])), expected, "{version}");
    }
}

#[test]
fn the_server_version_is_read_from_the_output_of_kubectl() {
    let mut facts = facts(&json!({"nodes": healthy_nodes()}));
    let version = json!({"clientVersion": {"gitVersion": "v1.36.0"}, "serverVersion": {"gitVersion": "v1.31.2-eks-1"}});
    facts.server = Ok(serde_json::from_value(version).unwrap());
    let report = report_for_node_selector(&facts, &[]);
    assert_eq!(report.kubernetes.as_deref(), Some("v1.31.2-eks-1"));
    only_finding(&report, FindingReason::KubernetesTooOld);
}

#[test]
fn missing_admission_policies_are_reported() {
    let mut facts = facts(&json!({"nodes": healthy_nodes()}));
    let resources = |names: &[&str]| {
        let resources: Vec<Value> = names.iter().map(|name| json!({"name": name})).collect();
        Ok(serde_json::from_value(json!({"resources": resources})).unwrap())
    };
    facts.admission = resources(&["validatingadmissionpolicies"]);
    let report = report_for_node_selector(&facts, &[]);
    assert_eq!(only_finding(&report, FindingReason::MutatingPoliciesMissing).level, Level::Warning);
    assert_eq!(report.values["admission.gate"], "webhook");

    // Before Kubernetes 1.36, `admission.gate: auto` means the webhook.
    facts.server = Ok(serde_json::from_value(json!({"gitVersion": "v1.35.1"})).unwrap());
    assert_eq!(problems(&report_for_node_selector(&facts, &[])), []);

    facts.admission = resources(&["mutatingadmissionpolicies"]);
    assert_eq!(
        only_finding(&report_for_node_selector(&facts, &[]), FindingReason::AdmissionPoliciesMissing).level,
        Level::Error
    );
}

#[test]
fn a_missing_priority_class_is_reported() {
    let mut facts = facts(&json!({"nodes": healthy_nodes()}));
    facts.priority_classes = Ok(serde_json::from_value(json!([named_object("system-node-critical")])).unwrap());
    let report = report_for_node_selector(&facts, &[]);
    assert!(only_finding(&report, FindingReason::PriorityClassMissing).message.contains("system-cluster-critical"));
}
