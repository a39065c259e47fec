//! Tests clusters in which Cleave serves a resource on some nodes, and another device plugin serves
//! it on other nodes.
use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::world::{MPS_RESOURCE, TestCluster, reconcile, refuse, released, requesting, whole_gpus};
use crate::placement::gatekeeper::{Gatekeeper, UNSCHEDULABLE_AFTER};
use crate::placement::stranded::MISSING_NODE_DELAY;

/// A change of the cluster.
type ClusterChange = fn(&mut TestCluster);

const GPU_RESOURCE: &str = "nvidia.com/gpu";
const LONG_WAIT_SECONDS: u64 = 10 * UNSCHEDULABLE_AFTER.as_secs();

/// Adds a node on which another device plugin serves whole GPUs.
fn with_other_node(mut world: TestCluster, name: &str, gpus: u32) -> TestCluster {
    world.version += 1;
    let node = json!({"metadata": {"name": name, "resourceVersion": world.version.to_string(), "labels": {"kubernetes.io/hostname": name}},
        "status": {"allocatable": {"cpu": "8", "pods": "110", GPU_RESOURCE: gpus.to_string()}}});
    world.nodes.insert(name.into(), node);
    world
}

/// Adds a label to a node.
fn label_node(world: &mut TestCluster, node: &str) {
    world.change(|world| &mut world.nodes, node, |node| node["metadata"]["labels"]["gpu"] = json!("cleave"));
}

/// Adds all labels of nodes with an agent to a node.
fn add_agent_labels(world: &mut TestCluster, node: &str) {
    label_node(world, node);
    world.change(
        |world| &mut world.nodes,
        node,
        |node| node["metadata"]["labels"]["kubernetes.io/os"] = json!("linux"),
    );
}

/// Returns a cluster with one whole GPU on Cleave's node n1, and pods at the gate that request one
/// GPU each.
fn cluster_with_waiting_pods(pods: &[&str]) -> TestCluster {
    let mut world = whole_gpus(TestCluster::default(), "n1", &[0]);
    label_node(&mut world, "n1");
    pods.iter().fold(world, |world, pod| world.pod_with(pod, 1, requesting(GPU_RESOURCE, 1)))
}

/// Returns a gatekeeper whose agents run only on nodes with two labels.
fn gatekeeper_with_agent_labels() -> Gatekeeper {
    let labels = [("gpu", "cleave"), ("kubernetes.io/os", "linux")];
    Gatekeeper::default().with_agent_labels(labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into())
}

/// Binds a pod to a node, as the scheduler does.
fn bind_pod(world: &mut TestCluster, pod: &str, node: &str) {
    world.change(|world| &mut world.pods, pod, |pod| pod["spec"]["nodeName"] = json!(node));
}

#[test]
fn pods_that_request_a_resource_that_cleave_does_not_serve_are_released_immediately() {
    let world = TestCluster::default().node("n1", &[0]).pod_with("a", 1, requesting(GPU_RESOURCE, 1));
    let mut world = with_other_node(world, "other", 1);
    for taken in [false, true] {
        let actions = reconcile(&mut gatekeeper_with_agent_labels(), &world, 0);
        assert_eq!(released(&actions), [("team/a", "not_managed")], "whether or not the node has room");
        let mut patched = world.clone();
        assert!(patched.apply_release(&actions.releases[0]));
        assert_eq!(patched.pods["team/a"]["spec"].get("affinity"), None);
        if !taken {
            world = world.pod_with("taker", 1, requesting(GPU_RESOURCE, 1));
            world.change(|world| &mut world.pods, "team/taker", |pod| pod["spec"]["schedulingGates"] = json!([]));
            bind_pod(&mut world, "team/taker", "other");
        }
    }
}

#[test]
fn pods_use_cleaves_nodes_first_and_then_the_free_gpus_of_other_nodes() {
    let mut world = with_other_node(cluster_with_waiting_pods(&["a", "b", "c", "d", "taker"]), "other", 3);
    world.change(|world| &mut world.pods, "team/taker", |pod| pod["spec"]["schedulingGates"] = json!([]));
    bind_pod(&mut world, "team/taker", "other");
    let mut keeper = gatekeeper_with_agent_labels();
    let actions = reconcile(&mut keeper, &world, 0);
    let expected = [("team/a", "reserved"), ("team/b", "other_plugin"), ("team/c", "other_plugin")];
    assert_eq!(released(&actions), expected);
    assert!(actions.waiting.contains_key("team/d"));
    assert!(actions.releases.iter().all(|release| world.apply_release(release)));
    let spec = &world.pods["team/b"]["spec"];
    let terms =
        &spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
    let away = json!([{"matchExpressions": [{"key": "gpu", "operator": "NotIn", "values": ["cleave"]}]}]);
    assert_eq!(*terms, away, "a label, not a list of nodes");
    assert_eq!(released(&reconcile(&mut keeper, &world, 1)), [], "b and c count although they are not bound yet");
    bind_pod(&mut world, "team/b", "other");
    bind_pod(&mut world, "team/c", "other");
    assert_eq!(released(&reconcile(&mut keeper, &world, 2)), []);
    assert_eq!(released(&reconcile(&mut keeper, &world, LONG_WAIT_SECONDS)), [], "d may fit later");
    drop(world.pods.remove("team/b"));
    assert_eq!(released(&reconcile(&mut keeper, &world, LONG_WAIT_SECONDS + 1)), [("team/d", "other_plugin")]);
}

#[test]
fn a_pod_is_released_only_to_other_nodes_that_accept_it_and_have_all_resources() {
    let spec = |rest: Value| {
        let mut spec = requesting(GPU_RESOURCE, 1);
        spec.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
        spec
    };
    let mut large = requesting(GPU_RESOURCE, 1);
    large["containers"][0]["resources"]["requests"] = json!({"cpu": "9"});
    let unchanged: ClusterChange = |_| ();
    let tainted: ClusterChange = |world| {
        let taints = json!([{"key": GPU_RESOURCE, "effect": "NoSchedule"}]);
        world.change(|world| &mut world.nodes, "other", |node| node["spec"]["taints"] = taints);
    };
    let labelled: ClusterChange = |world| label_node(world, "other");
    let not_ready: ClusterChange = |world| {
        let taints = json!([{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]);
        world.change(|world| &mut world.nodes, "other", |node| node["spec"]["taints"] = taints);
    };
    let tolerant = spec(json!({"tolerations": [{"key": GPU_RESOURCE, "operator": "Exists"}]}));
    let cases = [
        ("a taint", tainted, spec(json!({})), false),
        ("a tolerated taint", tainted, tolerant, true),
        ("an unreachable node", not_ready, spec(json!({})), false),
        ("a node selector", unchanged, spec(json!({"nodeSelector": {"zone": "b"}})), false),
        ("too little CPU", unchanged, large, false),
        ("the label of Cleave's nodes", labelled, spec(json!({})), false),
        ("room", unchanged, spec(json!({})), true),
    ];
    for (what, change, pod, fits) in cases {
        let mut world = with_other_node(cluster_with_waiting_pods(&["a"]), "other", 2).pod_with("b", 1, pod);
        change(&mut world);
        let actions = reconcile(&mut gatekeeper_with_agent_labels(), &world, 0);
        let expected: &[_] =
            if fits { &[("team/a", "reserved"), ("team/b", "other_plugin")] } else { &[("team/a", "reserved")] };
        assert_eq!(released(&actions), expected, "{what}");
    }
    // If no label distinguishes the nodes, the scheduler could bind the pod to a full node of
    // Cleave.
    let mut world = with_other_node(cluster_with_waiting_pods(&["a", "b"]), "other", 2);
    let actions = reconcile(&mut Gatekeeper::default(), &world, 0);
    assert_eq!(released(&actions), [("team/a", "reserved")], "no labels are known");
    world.change(|world| &mut world.nodes, "n1", |node| node["metadata"]["labels"]["gpu"] = json!("old"));
    let actions = reconcile(&mut gatekeeper_with_agent_labels(), &world, 0);
    assert_eq!(released(&actions), [("team/a", "reserved")], "a node of Cleave lacks the label");
}

#[test]
fn a_pod_that_other_nodes_refuse_is_recreated_when_it_fits_on_a_node_of_cleave() {
    let mut world = with_other_node(cluster_with_waiting_pods(&["a", "b"]), "other", 1);
    world.change(
        |world| &mut world.pods,
        "team/b",
        |pod| {
            let owner =
                json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": "set", "controller": true});
            pod["metadata"]["ownerReferences"] = json!([owner]);
        },
    );
    let mut keeper = gatekeeper_with_agent_labels();
    let actions = reconcile(&mut keeper, &world, 0);
    assert!(actions.releases.iter().all(|release| world.apply_release(release)));
    let recreated = |keeper: &mut Gatekeeper, world: &TestCluster, second| {
        let stranded_actions = reconcile(keeper, world, second).stranded;
        stranded_actions.recreate.into_iter().map(|one| one.pod).collect::<Vec<_>>()
    };
    refuse(&mut world, "team/b");
    assert_eq!(recreated(&mut keeper, &world, 1), [""; 0]);
    assert_eq!(recreated(&mut keeper, &world, LONG_WAIT_SECONDS), [""; 0], "Cleave's node is full too");
    // The operator drops the reservation of pod `a` when the pod is deleted.
    drop(world.pods.remove("team/a"));
    for second in [LONG_WAIT_SECONDS + 10, LONG_WAIT_SECONDS + 20] {
        assert_eq!(recreated(&mut keeper, &world, second), [""; 0]);
    }
    assert_eq!(recreated(&mut keeper, &world, LONG_WAIT_SECONDS + 20 + MISSING_NODE_DELAY.as_secs()), ["team/b"]);
}

#[test]
fn no_pod_is_released_while_gpu_nodes_are_missing_and_kubelets_still_report() {
    let cases: [(&str, ClusterChange); 3] = [
        ("the GpuNode is deleted", |world| drop(world.gpu_nodes.remove("n1"))),
        ("the GpuNode and the agent are deleted", |world| {
            drop(world.gpu_nodes.remove("n1"));
            drop(world.agents.remove("n1"));
        }),
        ("the GpuNode is created again without a status", |world| {
            world.change(
                |world| &mut world.gpu_nodes,
                "n1",
                |node| drop(node.as_object_mut().unwrap().remove("status")),
            );
        }),
    ];
    for (what, change) in cases {
        // One case requests a whole GPU, and the other case requests a share of a full GPU.
        let whole = whole_gpus(TestCluster::default(), "n1", &[1]).pod_with("a", 1, requesting(GPU_RESOURCE, 1));
        for before in [whole, TestCluster::default().node("n1", &[10]).pod("a", 1)] {
            let mut keeper = gatekeeper_with_agent_labels();
            assert_eq!(released(&reconcile(&mut keeper, &before, 0)), []);
            let mut world = before.clone();
            change(&mut world);
            for second in [1, LONG_WAIT_SECONDS, 2 * LONG_WAIT_SECONDS] {
                let actions = reconcile(&mut keeper, &world, second);
                assert_eq!(released(&actions), [], "{what}");
                assert!(actions.waiting["team/a"].message.contains("its GpuNode"), "{what}: {actions:?}");
                // A heartbeat of the kubelet changes the node's version.
                world.change(|world| &mut world.nodes, "n1", |_| ());
            }
        }
    }
    // When the kubelet no longer reports the resource, the pod is released as unschedulable.
    let mut world = TestCluster::default().node("n1", &[10]).pod("a", 1);
    let mut keeper = gatekeeper_with_agent_labels();
    reconcile(&mut keeper, &world, 0);
    cases[1].1(&mut world);
    reconcile(&mut keeper, &world, 1);
    world.change(|world| &mut world.nodes, "n1", |node| node["status"]["allocatable"][MPS_RESOURCE] = json!("0"));
    reconcile(&mut keeper, &world, 2);
    assert_eq!(released(&reconcile(&mut keeper, &world, LONG_WAIT_SECONDS)), [("team/a", "unschedulable")]);
}

#[test]
fn other_nodes_do_not_hide_that_a_gpu_node_is_missing() {
    let mut world = with_other_node(cluster_with_waiting_pods(&["a", "b"]), "other", 1);
    let mut keeper = gatekeeper_with_agent_labels();
    world.gpu_nodes = BTreeMap::new();
    let actions = reconcile(&mut keeper, &world, 0);
    assert_eq!(released(&actions), [("team/a", "other_plugin")], "the other node has only one GPU");
    assert!(actions.waiting["team/b"].message.contains("its GpuNode"), "{actions:?}");
}

#[test]
fn a_not_ready_node_of_another_plugin_delays_no_pod() {
    let not_ready = |world: &mut TestCluster, node: &str| {
        let taints = json!([{"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}]);
        world.change(|world| &mut world.nodes, node, |node| node["spec"]["taints"] = taints);
    };
    // Cleave serves shares on n1, and another plugin serves whole GPUs on two nodes.
    let world = TestCluster::default().node("n1", &[10]).pod_with("a", 1, requesting(GPU_RESOURCE, 1));
    let mut world = with_other_node(with_other_node(world, "dead", 1), "other", 1);
    not_ready(&mut world, "dead");
    for mut keeper in [gatekeeper_with_agent_labels(), Gatekeeper::default()] {
        assert_eq!(released(&reconcile(&mut keeper, &world, 0)), [("team/a", "not_managed")]);
    }
    // Every node may have the labels of nodes with an agent, for example `kubernetes.io/os`.
    let mut labelled = world.clone();
    add_agent_labels(&mut labelled, "dead");
    let mut keeper = gatekeeper_with_agent_labels();
    assert_eq!(released(&reconcile(&mut keeper, &labelled, 0)), [("team/a", "not_managed")], "all labels");
    // Cleave ran on the node before the node failed.
    for had_agent in [true, false] {
        let mut before = TestCluster::default().node("dead", &[10]);
        if had_agent {
            before.gpu_nodes.clear();
        } else {
            before.agents.clear();
        }
        let mut keeper = gatekeeper_with_agent_labels();
        reconcile(&mut keeper, &before, 0);
        assert_eq!(released(&reconcile(&mut keeper, &world, 1)), [], "an agent: {had_agent}");
        world.change(|world| &mut world.nodes, "dead", |_| ());
        assert_eq!(released(&reconcile(&mut keeper, &world, 2)), [], "an agent: {had_agent}");
        assert!(!released(&reconcile(&mut keeper, &world, LONG_WAIT_SECONDS)).is_empty());
    }
    // No other node reports the resource, and the report of this node may be old.
    not_ready(&mut world, "other");
    let mut keeper = gatekeeper_with_agent_labels();
    assert_eq!(released(&reconcile(&mut keeper, &world, 0)), []);
    assert!(!released(&reconcile(&mut keeper, &world, LONG_WAIT_SECONDS)).is_empty());
}
