//! Tests of the checks of the namespace and of webhooks.
use serde_json::{Value, json};

use super::{
    FindingReason, Level, NAMESPACE, facts, gpu_node, healthy_nodes, namespace, only_finding, problems,
    report_for_node_selector, report_of, with_changes,
};
use crate::preflight::report::Report;

fn report_of_namespace(labels: &Value) -> Report {
    report_of(&json!({"nodes": healthy_nodes(), "namespaces": [namespace(labels)]}))
}

#[test]
fn pod_security_must_allow_privileged_pods() {
    for standard in ["baseline", "restricted"] {
        let report = report_of_namespace(&json!({"pod-security.kubernetes.io/enforce": standard}));
        let found = only_finding(&report, FindingReason::PodSecurityTooStrict);
        assert!(found.level == Level::Error && found.message.contains(standard), "{found:?}");
        assert!(found.action.contains("pod-security.kubernetes.io/enforce=privileged"), "{found:?}");
    }
    let report = report_of_namespace(&json!({"pod-security.kubernetes.io/warn": "restricted"}));
    assert_eq!(problems(&report), []);
    assert_eq!(only_finding(&report, FindingReason::PodSecurityNotSet).level, Level::Info);
}

#[test]
fn a_missing_namespace_is_only_a_fact_and_no_error() {
    let report = report_of(&json!({"nodes": healthy_nodes(), "namespaces": [super::named_object("default")]}));
    assert_eq!(problems(&report), []);
    assert!(only_finding(&report, FindingReason::NamespaceMissing).action.contains(NAMESPACE));
}

#[test]
fn talos_needs_the_pod_security_label() {
    let talos = with_changes(gpu_node("a"), &json!({"status": {"nodeInfo": {"osImage": "Talos (v1.12.2)"}}}));
    let nodes = json!([talos, with_changes(talos.clone(), &json!({"metadata": {"name": "b"}}))]);
    let objects = |namespaces: Value| json!({"nodes": nodes.clone(), "namespaces": namespaces, "runtimeclasses": [super::named_object("nvidia")]});
    for namespaces in [json!([]), json!([namespace(&json!({}))])] {
        assert_eq!(problems(&report_of(&objects(namespaces))), [FindingReason::PodSecurityTooStrict]);
    }
    let labelled = json!([namespace(&json!({"pod-security.kubernetes.io/enforce": "privileged"}))]);
    assert_eq!(problems(&report_of(&objects(labelled))), []);
}

#[test]
fn service_meshes_are_reported() {
    for (labels, expected) in [
        (json!({"istio-injection": "enabled"}), vec![FindingReason::MeshInjection]),
        (json!({"istio.io/rev": "stable"}), vec![FindingReason::MeshInjection]),
        (json!({"kuma.io/sidecar-injection": "enabled"}), vec![FindingReason::MeshInjection]),
        (json!({"istio-injection": "disabled", "istio.io/rev": "stable"}), vec![]),
        (json!({"istio.io/dataplane-mode": "ambient"}), vec![]),
    ] {
        assert_eq!(problems(&report_of_namespace(&labels)), expected, "{labels}");
    }
    let linkerd =
        with_changes(namespace(&json!({})), &json!({"metadata": {"annotations": {"linkerd.io/inject": "enabled"}}}));
    let report = report_of(&json!({"nodes": healthy_nodes(), "namespaces": [linkerd]}));
    assert!(only_finding(&report, FindingReason::MeshInjection).message.starts_with("Linkerd"));
}

/// Returns a quota of the release's namespace.
fn quota(spec: &Value, used: &str) -> Value {
    json!({
        "metadata": {"name": "quota", "namespace": NAMESPACE},
        "spec": spec,
        "status": {"used": {"pods": used}}
    })
}

fn report_of_quota(quota: &Value) -> Report {
    report_of(&json!({"nodes": healthy_nodes(), "resourcequotas": [quota]}))
}

#[test]
fn quotas_must_allow_all_pods_of_cleave() {
    // The check counts eight pods: an agent, an MPS host and a kubelet relay on each of two nodes,
    // and two operators.
    for (hard, used, expected) in [
        ("8", "0", vec![]),
        ("10", "2", vec![]),
        ("7", "0", vec![FindingReason::QuotaTooSmall]),
        ("10", "3", vec![FindingReason::QuotaTooSmall]),
        ("10", "10", vec![FindingReason::QuotaRefusesPods]),
        ("0", "0", vec![FindingReason::QuotaRefusesPods]),
    ] {
        let report = report_of_quota(&quota(&json!({"hard": {"pods": hard}}), used));
        assert_eq!(problems(&report), expected, "{used} of {hard}");
    }
    let other = with_changes(quota(&json!({"hard": {"pods": "0"}}), "0"), &json!({"metadata": {"namespace": "team"}}));
    assert_eq!(problems(&report_of_quota(&other)), []);
}

#[test]
fn the_scopes_of_a_quota_determine_whether_it_applies() {
    let class = |operator: &str, values: &[&str]| json!({"matchExpressions": [{"scopeName": "PriorityClass", "operator": operator, "values": values}]});
    let refused = vec![FindingReason::QuotaRefusesPods];
    for (scopes, selector, expected) in [
        (json!([]), json!({}), refused.clone()),
        (json!(["NotBestEffort", "NotTerminating"]), json!({}), refused.clone()),
        (json!(["BestEffort"]), json!({}), vec![]),
        (json!(["Terminating"]), json!({}), vec![]),
        (json!([]), class("In", &["system-node-critical"]), refused.clone()),
        (json!([]), class("In", &["batch"]), vec![]),
        (json!([]), class("NotIn", &["system-node-critical", "system-cluster-critical"]), vec![]),
        (json!([]), class("NotIn", &["batch"]), refused.clone()),
        (json!([]), class("Exists", &[]), refused),
        (json!([]), class("DoesNotExist", &[]), vec![]),
    ] {
        let spec = json!({"hard": {"pods": "0"}, "scopes": scopes, "scopeSelector": selector});
        assert_eq!(problems(&report_of_quota(&quota(&spec, "0"))), expected, "{spec}");
    }
}

#[test]
fn quotas_for_limits_that_pods_do_not_set_are_errors() {
    for (resource, expected) in [
        ("limits.cpu", vec![FindingReason::QuotaRefusesPods]),
        ("limits.memory", vec![FindingReason::QuotaRefusesPods]),
        ("requests.cpu", vec![]),
        ("requests.nvidia.com/gpu", vec![]),
    ] {
        let quota = quota(&json!({"hard": {resource: "100"}}), "0");
        assert_eq!(problems(&report_of_quota(&quota)), expected, "{resource}");
    }
    // A LimitRange adds limits to containers that set no limits.
    let range = json!({
        "metadata": {"name": "defaults", "namespace": NAMESPACE},
        "spec": {"limits": [{"type": "Container", "default": {"cpu": "1"}}]}
    });
    let quota = quota(&json!({"hard": {"limits.cpu": "100"}}), "0");
    let objects = |range: Value| json!({"nodes": healthy_nodes(), "resourcequotas": [quota], "limitranges": [range]});
    assert_eq!(problems(&report_of(&objects(range.clone()))), []);
    let elsewhere = with_changes(range, &json!({"metadata": {"namespace": "team"}}));
    assert_eq!(problems(&report_of(&objects(elsewhere))), [FindingReason::QuotaRefusesPods]);
}

#[test]
fn gke_needs_a_quota_for_system_priority_classes() {
    let gke = json!({"status": {"nodeInfo": {"kubeletVersion": "v1.35.1-gke.1"}}});
    let nodes = json!([with_changes(gpu_node("a"), &gke), with_changes(gpu_node("b"), &gke)]);
    let report = report_of(&json!({"nodes": nodes.clone()}));
    assert_eq!(only_finding(&report, FindingReason::PriorityQuotaMissing).level, Level::Info);
    assert_eq!(report.values["priorityClass.quota"], true);

    let classes = ["system-node-critical", "system-cluster-critical"];
    let selector = json!({"matchExpressions": [{"scopeName": "PriorityClass", "operator": "In", "values": classes}]});
    let critical = quota(&json!({"hard": {"pods": "1000"}, "scopeSelector": selector}), "0");
    let report = report_of(&json!({"nodes": nodes, "resourcequotas": [critical]}));
    assert!(report.findings.iter().all(|finding| finding.reason != FindingReason::PriorityQuotaMissing));
    assert!(report.values.is_empty(), "{:?}", report.values);
}

/// Returns a webhook that the API server calls for each new pod.
fn webhook() -> Value {
    json!({
        "name": "pods.policy.example",
        "failurePolicy": "Fail",
        "namespaceSelector": {},
        "objectSelector": {},
        "rules": [{"apiGroups": [""], "operations": ["CREATE", "UPDATE"], "resources": ["pods", "services"]}]
    })
}

fn report_of_webhook(changes: &Value) -> Report {
    let configuration = json!({"metadata": {"name": "policy"}, "webhooks": [with_changes(webhook(), changes)]});
    report_of(&json!({"nodes": healthy_nodes(), "validatingwebhookconfigurations": [configuration]}))
}

#[test]
fn webhooks_that_can_block_the_pods_are_reported() {
    let namespaces = |operator: &str| {
        let expression = json!({"key": "kubernetes.io/metadata.name", "operator": operator, "values": [NAMESPACE]});
        json!({"namespaceSelector": {"matchExpressions": [expression]}})
    };
    let blocks = vec![FindingReason::WebhookMatchesNamespace];
    for (changes, expected) in [
        (json!({}), blocks.clone()),
        // The default of `failurePolicy` in the API is Fail.
        (json!({"failurePolicy": null}), blocks.clone()),
        (json!({"failurePolicy": "Ignore"}), vec![]),
        (json!({"rules": [{"apiGroups": ["*"], "operations": ["*"], "resources": ["*/*"]}]}), blocks.clone()),
        (json!({"rules": [{"apiGroups": [""], "operations": ["DELETE"], "resources": ["pods"]}]}), vec![]),
        (json!({"rules": [{"apiGroups": ["apps"], "operations": ["*"], "resources": ["*"]}]}), vec![]),
        (json!({"rules": [{"apiGroups": [""], "operations": ["*"], "resources": ["pods/exec"]}]}), vec![]),
        (namespaces("In"), blocks.clone()),
        (namespaces("NotIn"), vec![]),
        (json!({"namespaceSelector": {"matchLabels": {"policy": "on"}}}), vec![]),
        (json!({"objectSelector": {"matchLabels": {"app.kubernetes.io/component": "agent"}}}), blocks.clone()),
        (json!({"objectSelector": {"matchLabels": {"app.kubernetes.io/component": "kubelet-relay"}}}), blocks),
        (json!({"objectSelector": {"matchLabels": {"app": "web"}}}), vec![]),
    ] {
        assert_eq!(problems(&report_of_webhook(&changes)), expected, "{changes}");
    }
}

#[test]
fn labels_of_the_namespace_select_webhooks_and_cleaves_own_webhook_is_ignored() {
    let changes = json!({"namespaceSelector": {"matchLabels": {"policy": "on"}}});
    let configuration = json!({"metadata": {"name": "policy"}, "webhooks": [with_changes(webhook(), &changes)]});
    let mut objects = json!({
        "nodes": healthy_nodes(),
        "namespaces": [namespace(&json!({"policy": "on"}))],
        "mutatingwebhookconfigurations": [configuration]
    });
    let report = report_of(&objects);
    let found = only_finding(&report, FindingReason::WebhookMatchesNamespace);
    assert!(found.message.starts_with("MutatingWebhookConfiguration policy"), "{found:?}");

    objects["mutatingwebhookconfigurations"][0]["metadata"]["labels"] = json!({"app.kubernetes.io/name": "cleave"});
    assert_eq!(problems(&report_for_node_selector(&facts(&objects), &[])), []);
}
