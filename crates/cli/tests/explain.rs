//! Tests `cleave explain pod` for pods in different states.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
mod golden;

use std::collections::BTreeMap;

use cleave_api::{GpuNode, GpuQuota, SharingPolicy};
use cleave_cli::explain::report::{Explanation, NodeView, PodState};
use cleave_cli::explain::{LiveCluster, explain_pod, render};
use cleave_operator::dry_run::Objects;
use cleave_operator::pods::PodObject;
use cleave_operator::read::{AgentPod, NodeObject};
use golden::assert_matches_file;
use kube::core::DeserializeGuard;
use serde::Deserialize;

/// The structure of `explain/cluster.yaml`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Fixture {
    nodes: Vec<NodeObject>,
    agents: Vec<AgentPod>,
    gpu_nodes: Vec<DeserializeGuard<GpuNode>>,
    policies: Vec<DeserializeGuard<SharingPolicy>>,
    pods: Vec<PodObject>,
}

fn live_cluster() -> LiveCluster {
    let Fixture { nodes, agents, gpu_nodes, policies, pods } =
        serde_saphyr::from_str(include_str!("explain/cluster.yaml")).unwrap();
    LiveCluster::new(Objects { nodes, agents, gpu_nodes, policies, pods, ..Objects::default() }, 1000)
}

fn explanation_of(name: &str) -> Explanation {
    explain_pod(&live_cluster(), &format!("demo/{name}")).unwrap()
}

#[test]
fn output_matches_the_committed_files() {
    for name in ["five", "twelve", "two", "replica", "picky", "queued", "soon", "a", "plain", "done"] {
        assert_matches_file(&format!("explain/{name}.txt"), &render(&explanation_of(name)));
    }
    assert_matches_file("explain/five.json", &(serde_json::to_string_pretty(&explanation_of("five")).unwrap() + "\n"));
}

#[test]
fn each_pod_has_the_expected_state() {
    for (name, state) in [
        ("a", PodState::Bound),
        ("soon", PodState::Reserved),
        ("two", PodState::Fits),
        ("five", PodState::Waiting),
        ("twelve", PodState::Never),
        ("replica", PodState::Never),
        ("picky", PodState::Never),
        ("queued", PodState::OtherGate),
        ("plain", PodState::NotManaged),
        ("done", PodState::Ended),
    ] {
        assert_eq!(explanation_of(name).verdict.state, state, "{name}");
    }
    assert_eq!(explain_pod(&live_cluster(), "demo/nobody"), None);
}

/// Returns the objects of `explain/cluster.yaml` after `change`, at this time.
fn live_after_change(change: impl FnOnce(&mut Objects), now: u64) -> LiveCluster {
    let Fixture { nodes, agents, gpu_nodes, policies, pods } =
        serde_saphyr::from_str(include_str!("explain/cluster.yaml")).unwrap();
    let mut objects = Objects { nodes, agents, gpu_nodes, policies, pods, ..Objects::default() };
    change(&mut objects);
    LiveCluster::new(objects, now)
}

#[test]
fn a_reservation_that_the_operator_renews_is_valid_after_its_first_expiry() {
    let at = |now| explain_pod(&live_after_change(|_| {}, now), "demo/soon").unwrap();
    assert_eq!(at(1000).verdict.state, PodState::Reserved);
    let renewed = at(100_000);
    assert_eq!(renewed.verdict.state, PodState::Reserved, "{}", renewed.verdict.message);
    assert!(renewed.verdict.message.contains("renewed reservation"), "{}", renewed.verdict.message);
    assert_eq!(renewed.assignments.len(), at(1000).assignments.len());
}

#[test]
fn a_pod_whose_volume_is_on_another_node_does_not_fit() {
    let claim = serde_json::from_value(serde_json::json!({
        "metadata": {"name": "data", "namespace": "demo"}, "spec": {"volumeName": "disk"},
    }));
    let volume = serde_json::from_value(serde_json::json!({
        "metadata": {"name": "disk"},
        "spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["elsewhere"]}]},
        ]}}},
    }));
    let mount = serde_json::from_value(serde_json::json!({
        "metadata": {"name": "mounts", "namespace": "demo", "uid": "mounts"},
        "spec": {
            "schedulingGates": [{"name": "cleave.dev/placement"}],
            "containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu-mps": 1}}}],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        },
    }));
    let live = live_after_change(
        |objects| {
            objects.volume_claims.push(claim.unwrap());
            objects.volumes.push(volume.unwrap());
            objects.pods.push(mount.unwrap());
        },
        1000,
    );
    let found = explain_pod(&live, "demo/mounts").unwrap();
    assert_ne!(found.verdict.state, PodState::Fits, "{}", found.verdict.message);
}

#[test]
fn help_names_the_pods_to_remove_from_one_gpu() {
    let help = explanation_of("five").help;
    // Two GPUs have 3 free shares each. A GPU's free shares do not include shares that are reserved
    // for another pod.
    assert_eq!(help[0], "The pod would fit on GPU 0 on node1 without these pods: demo/a (lower priority).");
    assert!(help.iter().any(|line| line.starts_with("node2 has room, but")), "{help:?}");
}

#[test]
fn gated_pods_reserve_nothing() {
    // demo/two fits on node1, but has no reservation yet.
    let reserved =
        |name: &str| explanation_of(name).nodes[0].gpus.iter().map(|gpu| gpu.devices[0].reserved).collect::<Vec<u32>>();
    assert_eq!((reserved("five"), reserved("two"), reserved("soon")), (vec![0, 4], vec![0, 4], vec![0, 4]));
}

#[test]
fn the_table_shows_the_nodes_on_which_the_pod_fits_best() {
    let mut explanation = explanation_of("five");
    let far = explanation.nodes[0].clone();
    explanation.nodes.extend((0..40).map(|number| NodeView { name: format!("z{number:02}"), ..far.clone() }));
    explanation.nodes[30].gpus[0].devices[0].free = 9;
    let text = render(&explanation);
    assert!(text.contains(&explanation.nodes[30].name), "{text}");
    assert!(text.contains("\n28 other nodes with GPUs are not shown"), "{text}");
    assert!(!text.contains("node2   0"), "a node that refuses the pod is not shown: {text}");
}

#[test]
fn quotas_of_the_pods_namespace_are_described() {
    let quota = |name: &str, spec: serde_json::Value, status: serde_json::Value| {
        serde_json::from_value::<DeserializeGuard<GpuQuota>>(serde_json::json!({
            "apiVersion": "cleave.dev/v1alpha1", "kind": "GpuQuota", "metadata": {"name": name}, "spec": spec,
            "status": status,
        }))
        .unwrap()
    };
    let describe = |class: Option<&str>, spec: serde_json::Value| {
        let live = live_after_change(
            |objects| {
                let pod = objects.pods.iter_mut().find(|pod| pod.metadata.name.as_deref() == Some("a")).unwrap();
                let label = class.map(|class| ("cleave.dev/capacity".to_owned(), class.to_owned()));
                let labels: BTreeMap<String, String> = label.into_iter().collect();
                pod.metadata.labels = Some(labels.into());
                let namespace = serde_json::json!({"metadata": {"name": "demo", "labels": {"team": "d"}}});
                objects.namespaces.push(serde_json::from_value(namespace).unwrap());
            },
            1000,
        );
        let quotas = vec![quota("team", spec, serde_json::json!({"used": "3"}))];
        explain_pod(&live.with_quotas(quotas), "demo/a").unwrap().quotas
    };
    let named = || serde_json::json!({"namespaces": ["demo"], "min": "4", "max": "8"});
    assert_eq!(
        describe(Some("in-quota"), named()),
        ["Within the guarantee of team: 3 of 4 GPUs used. Its maximum is 8."]
    );
    assert_eq!(
        describe(Some("over-quota"), named()),
        ["Borrows: team uses 3 and is guaranteed 4 GPUs. Its maximum is 8."]
    );
    let labelled = serde_json::json!({"namespaceSelector": {"matchLabels": {"team": "d"}}, "mode": "Count"});
    assert_eq!(
        describe(None, labelled),
        ["team uses 3 and is guaranteed 0 GPUs. The quota only counts usage (mode Count)."]
    );
    let other = serde_json::json!({"namespaceSelector": {"matchLabels": {"team": "e"}}});
    assert_eq!(
        describe(None, other),
        ["No quota applies to namespace demo. Its pods borrow, unless the namespace is exempt."]
    );
    assert_eq!(explanation_of("a").quotas, Vec::<String>::new(), "a cluster without quotas has no sentence");
}

#[test]
fn a_pod_over_its_quotas_maximum_waits_though_a_gpu_has_room() {
    let quota = serde_json::from_value::<DeserializeGuard<GpuQuota>>(serde_json::json!({
        "apiVersion": "cleave.dev/v1alpha1", "kind": "GpuQuota", "metadata": {"name": "team"},
        "spec": {"namespaces": ["demo"], "max": "0.1"},
    }));
    assert_eq!(explanation_of("two").verdict.state, PodState::Fits);
    let found = explain_pod(&live_cluster().with_quotas(vec![quota.unwrap()]), "demo/two").unwrap();
    assert_eq!(found.verdict.state, PodState::Waiting, "{}", found.verdict.message);
    assert!(found.verdict.message.contains("the max of quota team is 0.1"), "{}", found.verdict.message);
}
