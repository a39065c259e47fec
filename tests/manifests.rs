//! Tests the rendered manifests in `deploy/manifests.yaml`.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
use serde_json::{Value, json};

fn manifests() -> Vec<Value> {
    serde_saphyr::from_multiple(include_str!("../deploy/manifests.yaml")).unwrap()
}

fn objects_of_kind<'a>(all: &'a [Value], kind: &'a str) -> impl Iterator<Item = &'a Value> {
    all.iter().filter(move |object| object["kind"] == kind)
}

fn policy_selects_labels(policy: &Value, labels: &Value) -> bool {
    let wanted = policy["spec"]["podSelector"]["matchLabels"].as_object().unwrap();
    wanted.iter().all(|(name, value)| labels[name] == *value)
}

#[test]
fn each_workload_has_one_network_policy_that_allows_exactly_its_ports() {
    let all = manifests();
    let workloads: Vec<&Value> =
        objects_of_kind(&all, "DaemonSet").chain(objects_of_kind(&all, "Deployment")).collect();
    assert_eq!(workloads.len(), 4);
    for workload in workloads {
        let (name, template) = (&workload["metadata"]["name"], &workload["spec"]["template"]);
        // Network policies do not apply to pods that use the host's network.
        assert_eq!(template["spec"]["hostNetwork"], Value::Null, "{name}");
        let labels = &template["metadata"]["labels"];
        let policies: Vec<&Value> =
            objects_of_kind(&all, "NetworkPolicy").filter(|policy| policy_selects_labels(policy, labels)).collect();
        assert_eq!(policies.len(), 1, "{name}");
        let spec = &policies[0]["spec"];
        assert_eq!(policies[0]["metadata"]["namespace"], workload["metadata"]["namespace"], "{name}");
        assert_eq!(spec["policyTypes"], json!(["Ingress", "Egress"]), "{name}");
        let containers = template["spec"]["containers"].as_array().unwrap();
        let ports: Vec<&Value> = containers
            .iter()
            .flat_map(|container| container["ports"].as_array().into_iter().flatten())
            .map(|port| &port["containerPort"])
            .collect();
        let rules = spec["ingress"].as_array().unwrap();
        let opened: Vec<&Value> =
            rules.iter().flat_map(|rule| rule["ports"].as_array().unwrap()).map(|port| &port["port"]).collect();
        assert_eq!(opened, ports, "{name}");
        // A rule without `from`, or with an empty list, allows every peer.
        assert!(rules.iter().all(|rule| rule["from"].as_array().is_some_and(|peers| !peers.is_empty())), "{name}");
        let egress = spec["egress"].as_array().unwrap();
        assert!(egress.iter().all(|rule| rule["ports"].is_array()), "{name}: a rule without ports allows any port");
        assert_eq!(egress.is_empty(), name == "cleave-mps-host" || name == "cleave-kubelet-relay", "{name}");
    }
}
