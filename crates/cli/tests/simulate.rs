//! Tests `cleave simulate` on a small cluster.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
use cleave_cli::OutputFormat;
use cleave_cli::simulate::simulate;
use serde_json::Value;

const CLUSTER_YAML: &str = "
kind: Node
metadata: {name: n1, labels: {zone: a}}
status: {allocatable: {cpu: '8'}}
gpus:
- {model: NVIDIA A100-SXM4-40GB, memory: 40Gi, count: 2}
---
apiVersion: cleave.dev/v1alpha1
kind: SharingPolicy
metadata: {name: auto}
spec: {mode: Auto}
---
kind: Deployment
metadata: {name: small, namespace: team}
spec:
  replicas: 4
  template:
    spec:
      containers: [{resources: {limits: {nvidia.com/gpu-10gb: 1}}}]
---
kind: List
items:
- kind: Pod
  metadata: {name: big}
  spec: {priorityClassName: high, containers: [{resources: {limits: {nvidia.com/gpu: 1}}}]}
- kind: Pod
  metadata: {name: elsewhere}
  spec: {nodeSelector: {zone: b}, containers: [{resources: {limits: {nvidia.com/gpu: 1}}}]}
- kind: PriorityClass
  metadata: {name: high}
  value: 1000
- kind: ConfigMap
";

#[test]
fn the_text_names_the_gpu_of_each_pod_or_the_reason_for_none() {
    let text = simulate(CLUSTER_YAML, OutputFormat::Text).unwrap();
    for line in [
        "1 of 2 GPUs changes:",
        "MPS: 4 × nvidia.com/gpu-10gb",
        "5 of 6 pods fit.",
        "+ team/small-3: ",
        "+ default/big: ",
        "- default/elsewhere: ",
    ] {
        assert!(text.contains(line), "{line:?} is not in\n{text}");
    }
    let refused = text.lines().find(|line| line.contains("default/elsewhere")).unwrap();
    assert!(refused.contains("n1") && refused.contains("zone=b"), "{refused}");
}

#[test]
fn the_json_contains_the_plan_and_the_writes() {
    let json: Value = serde_json::from_str(&simulate(CLUSTER_YAML, OutputFormat::Json).unwrap()).unwrap();
    let keys: Vec<&str> = json.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(keys, ["changed", "changing", "gpus", "notes", "placements", "unplaced", "writes"]);
    assert_eq!(json["placements"].as_array().map(Vec::len), Some(5));
    assert!(json["writes"]["n1"]["gpus"].is_array());
}

#[test]
fn malformed_input_is_an_error_that_names_the_input() {
    for (text, part) in [
        ("kind: Node\nmetadata: {name: n}\ngpus: [{model: A, memory: lots}]", "lots is not a memory size (GPU A)"),
        ("kind: Node\nmetadata: {name: n}\ngpus: [{model: A, memory: 1Gi, cuont: 2}]", "cuont"),
        ("kind: Node\nmetadata: {name: n}\ngpus: [{model: A, memory: 1Gi, count: 65}]", "more than 64 GPUs"),
        ("kind: Node\nmetadata: {name: n}\n---\nkind: Node\nmetadata: {name: n}", "two Nodes are named n"),
        ("metadata: {}", "no kind"),
        ("a: [", "not valid YAML"),
        ("kind: Job\nmetadata: {name: j}\nspec: {parallelism: 1000000, template: {}}", "exceed the limit of 100000"),
    ] {
        let error = format!("{:#}", simulate(text, OutputFormat::Text).unwrap_err());
        assert!(error.contains(part), "{part:?} is not in {error:?}");
    }
}

#[test]
fn an_invalid_policy_is_reported_by_name() {
    let policy = "kind: SharingPolicy\napiVersion: cleave.dev/v1alpha1\nmetadata: {name: p}\n\
                  spec: {mode: Mps, mps: {units: 49}}";
    let text = simulate(policy, OutputFormat::Text).unwrap();
    assert!(text.contains("Policy p is invalid: mps.units is 49"), "{text}");
}
