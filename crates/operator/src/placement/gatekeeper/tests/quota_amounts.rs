//! Tests what quotas count: all GPUs of a pod, on nodes that can be read and on others.
use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::quotas::{Case, keeper};
use super::world::{ActualAllocations, MPS_RESOURCE, TestCluster, at, nodes_of, reconcile, requesting, whole_gpus};
use crate::placement::gatekeeper::Gatekeeper;
use crate::policies::demand::Reason;

/// Changes that remove a GpuNode, make it unreadable, or remove its GPUs.
const LOSSES: [fn(&mut TestCluster); 3] = [
    |world| drop(world.gpu_nodes.remove("n2")),
    |world| world.change(|world| &mut world.gpu_nodes, "n2", |node| node["status"]["gpus"] = json!("new version")),
    |world| world.change(|world| &mut world.gpu_nodes, "n2", |node| node["status"]["gpus"] = json!([])),
];

#[test]
fn pods_count_while_the_object_of_their_node_is_missing() {
    for lose in LOSSES {
        for is_new_leader in [false, true] {
            let mut case = Case::new(1, &[("a", json!({"min": 8, "max": 8})), ("b", json!({}))])
                .running(&[(("b1", "b", 10, 0), 0)])
                .waiting(&[("a9", "a", 1, 0)]);
            case.world = std::mem::take(&mut case.world).node("n2", &[0]);
            case.add(("a1", "a", 8, 0), Some(0));
            case.world.change(|world| &mut world.pods, "a/a1", |pod| pod["spec"]["nodeName"] = json!("n2"));
            case.reality.given.insert("a/a1".to_owned(), ("n2-GPU-0".to_owned(), 8));
            let expect = |case: &mut Case, keeper: &mut Gatekeeper| {
                case.seconds += 1;
                let actions = keeper.reconcile(&case.world.cluster(), &BTreeMap::new(), at(case.seconds));
                assert_eq!((actions.evictions.len(), actions.releases.len()), (0, 0), "{actions:?}");
                assert_eq!(actions.waiting["a/a9"].reason, Reason::OverMax);
            };
            case.reality.report_on(&mut case.world, 1);
            let mut gate = keeper();
            expect(&mut case, &mut gate);
            lose(&mut case.world);
            if is_new_leader {
                gate = keeper();
            }
            expect(&mut case, &mut gate);
            let reports = gate.quota_reports(&case.world.cluster(), &BTreeMap::new(), at(case.seconds));
            assert_eq!(reports.usages["a"].usage.used.0, 800_000);
            // After the pod is deleted, the operator no longer counts it for the quota.
            case.end("a/a1");
            let actions = gate.reconcile(&case.world.cluster(), &BTreeMap::new(), at(case.seconds + 1));
            assert_eq!((actions.evictions.len(), actions.waiting.len()), (1, 1), "a9 is within the guarantee");
        }
    }
}

/// Returns a cluster of A100s with an instance of 4 and one of 3 slices each.
pub(super) fn mig_cluster(nodes: &[&str]) -> TestCluster {
    let mut world = TestCluster::default();
    for name in nodes {
        world = world.node(name, &[0]);
        world.change(
            |world| &mut world.nodes,
            name,
            |node| {
                node["status"]["allocatable"] = json!({"cpu": "8", "pods": "110", FOUR: "1", THREE: "1"});
            },
        );
        world.change(
            |world| &mut world.gpu_nodes,
            name,
            |node| {
                let gpu = &mut node["status"]["gpus"][0];
                (gpu["mode"], gpu["memoryMib"]) = (json!("Mig"), json!(81_920));
                gpu["slices"] = json!([
                {"device": format!("{name}-4g"), "resource": FOUR, "total": 1, "inUse": 0, "unhealthy": 0},
                {"device": format!("{name}-3g"), "resource": THREE, "total": 1, "inUse": 0, "unhealthy": 0}]);
            },
        );
    }
    world.quotas.push(json!({"apiVersion": "cleave.dev/v1alpha1", "kind": "GpuQuota", "metadata": {"name": "team"},
        "spec": {"namespaces": ["team"], "min": "1", "max": "1"}}));
    world
}

pub(super) const FOUR: &str = "nvidia.com/mig-4g.40gb";
pub(super) const THREE: &str = "nvidia.com/mig-3g.40gb";

/// Binds a pod to a node whose kubelet gives the pod a device.
pub(super) fn bind(world: &mut TestCluster, pod: &str, node: &str, (device, resource): (usize, &str)) {
    world.change(
        |world| &mut world.pods,
        pod,
        |pod| {
            pod["spec"]["nodeName"] = json!(node);
            pod["spec"]["schedulingGates"] = json!([]);
        },
    );
    world.change(
        |world| &mut world.gpu_nodes,
        node,
        |object| {
            let gpu = &mut object["status"]["gpus"][0];
            gpu["slices"][device]["inUse"] = json!(1);
            let name = gpu["slices"][device]["device"].clone();
            gpu["allocations"].as_array_mut().unwrap().push(
            json!({"pod": pod, "container": "main", "resource": resource, "device": name, "ids": [name], "clients": 0}),
        );
        },
    );
}

pub(super) fn used(keeper: &Gatekeeper, world: &TestCluster) -> u64 {
    keeper.quota_reports(&world.cluster(), &BTreeMap::new(), at(99)).usages["team"].usage.used.0
}

#[test]
fn a_whole_gpu_of_mig_instances_costs_one_gpu() {
    let world = mig_cluster(&["n1"]).pod_with("four", 0, requesting(FOUR, 1));
    let mut world = world.pod_with("three", 0, requesting(THREE, 1));
    let actions = reconcile(&mut keeper(), &world, 9);
    assert_eq!(nodes_of(&actions), [["n1"], ["n1"]], "together they cost one GPU: {:?}", actions.waiting);
    bind(&mut world, "team/four", "n1", (0, FOUR));
    let mut gate = keeper();
    let actions = reconcile(&mut gate, &world, 10);
    assert_eq!((used(&gate, &world), nodes_of(&actions)), (1_000_000, vec![vec!["n1".to_owned()]]));
    bind(&mut world, "team/three", "n1", (1, THREE));
    let mut gate = keeper();
    reconcile(&mut gate, &world, 11);
    assert_eq!(used(&gate, &world), 1_000_000);
}

#[test]
fn an_instance_on_another_gpu_costs_its_full_part_and_the_maximum_holds() {
    let world = mig_cluster(&["n1", "n2"]).pod_with("four", 0, requesting(FOUR, 1));
    let mut world = world.pod_with("three", 0, requesting(THREE, 1));
    bind(&mut world, "team/four", "n1", (0, FOUR));
    // The instance of the same GPU is not free.
    world.change(
        |world| &mut world.gpu_nodes,
        "n1",
        |object| object["status"]["gpus"][0]["slices"][1]["inUse"] = json!(1),
    );
    let actions = reconcile(&mut keeper(), &world, 9);
    assert_eq!((actions.releases.len(), actions.waiting["team/three"].reason), (0, Reason::OverMax));
}

#[test]
fn shares_cost_their_part_of_the_gpu_that_they_are_on() {
    let mut world = TestCluster::default().node("n1", &[0, 0]);
    // The second GPU has four shares.
    world.change(
        |world| &mut world.gpu_nodes,
        "n1",
        |object| object["status"]["gpus"][1]["slices"][0]["total"] = json!(4),
    );
    world.quotas.push(json!({"apiVersion": "cleave.dev/v1alpha1", "kind": "GpuQuota", "metadata": {"name": "team"},
        "spec": {"namespaces": ["team"], "min": "1"}}));
    let mut world = world.pod_with("a", 3, json!({"nodeName": "n1", "schedulingGates": []}));
    let mut actual = ActualAllocations::default();
    actual.given.insert("team/a".to_owned(), ("n1-GPU-0".to_owned(), 3));
    actual.report_on(&mut world, 2);
    let mut gate = keeper();
    reconcile(&mut gate, &world, 9);
    assert_eq!(used(&gate, &world), 300_000);
}

#[test]
fn whole_gpus_count_against_the_maximum() {
    let mut world = whole_gpus(TestCluster::default(), "n1", &[0, 0, 0]);
    world.quotas.push(json!({"apiVersion": "cleave.dev/v1alpha1", "kind": "GpuQuota", "metadata": {"name": "team"},
        "spec": {"namespaces": ["team"], "max": "2"}}));
    let world = world.pod_with("two", 0, requesting("nvidia.com/gpu", 2));
    let world = world.pod_with("one", 0, requesting("nvidia.com/gpu", 1));
    let actions = reconcile(&mut keeper(), &world, 9);
    let released: Vec<&str> = actions.releases.iter().map(|release| release.pod.as_str()).collect();
    assert_eq!((released.len(), actions.waiting.len()), (1, 1), "{:?}", actions.waiting);
    assert!(actions.waiting.values().all(|wait| wait.reason == Reason::OverMax), "{:?}", actions.waiting);
}

/// Returns a case in which a pod of two containers, each of which fills a GPU, waits.
fn two_gpus_wanted(cells: u32) -> Case {
    let quotas = [("a", json!({"min": cells * 10, "guarantee": "Cells"})), ("b", json!({}))];
    let mut case = Case::new(2, &quotas)
        .running(&[(("b1", "b", 10, 0), 0), (("b2", "b", 10, 0), 1)])
        .waiting(&[("a1", "a", 10, 0)]);
    let container = |name: &str| json!({"name": name, "resources": {"limits": {MPS_RESOURCE: "10"}}});
    case.world.change(
        |world| &mut world.pods,
        "a/a1",
        |pod| pod["spec"]["containers"] = json!([container("one"), container("two")]),
    );
    case
}

#[test]
fn a_pod_of_two_gpus_needs_two_cells() {
    let mut case = two_gpus_wanted(1);
    let actions = case.step();
    assert_eq!(actions.evictions, [], "one GPU is guaranteed, so the pod borrows");
    let mut case = two_gpus_wanted(2);
    let actions = case.step();
    let victims: Vec<&str> = actions.evictions.iter().map(|eviction| eviction.pod.as_str()).collect();
    assert_eq!(victims, ["b/b1", "b/b2"]);
    // Another team cannot own one of the two GPUs: both are kept for the pod.
    let actions = case.step();
    assert_eq!(actions.releases.iter().map(|release| release.pod.as_str()).collect::<Vec<_>>(), ["a/a1"]);
    let status = case.keeper.quota_reports(&case.world.cluster(), &actions.waiting, at(case.seconds));
    assert_eq!(status.usages["a"].usage.cells, Some(2));
}

#[test]
fn a_pod_that_does_not_borrow_is_not_evicted_for_another_team() {
    let never = |pod: &mut Value| pod["metadata"]["annotations"] = json!({"cleave.dev/borrow": "Never"});
    let mut case = Case::new(1, &[("a", json!({"min": 5})), ("b", json!({"min": 5}))])
        .running(&[(("a1", "a", 5, 0), 0), (("a2", "a", 5, 10), 0)])
        .waiting(&[("b1", "b", 5, 0)]);
    case.world.change(|world| &mut world.pods, "a/a1", never);
    let actions = case.step();
    let victims: Vec<&str> = actions.evictions.iter().map(|eviction| eviction.pod.as_str()).collect();
    assert_eq!(victims, ["a/a2"], "the pod of higher priority borrows");
    // Only a pod of the same quota with a higher priority evicts the pod.
    let case = case.until_rest();
    let kinds: Vec<(&str, &str)> = case.evicted.iter().map(|(kind, _, victim)| (&**kind, &**victim)).collect();
    assert_eq!(kinds, [("Reclaim", "a2"), ("Priority", "a1")]);
}

/// Otherwise a user could push a more important pod of the same quota out of the guarantee.
#[test]
fn an_annotation_that_is_written_after_the_release_changes_no_importance() {
    let mut case = Case::new(1, &[("a", json!({"min": 5})), ("b", json!({"min": 5}))])
        .waiting(&[("high", "a", 5, 9), ("low", "a", 5, 0)])
        .until_rest();
    case.world.change(
        |world| &mut world.pods,
        "a/low",
        |pod| pod["metadata"]["annotations"]["cleave.dev/borrow"] = json!("Never"),
    );
    let case = case.waiting(&[("b1", "b", 5, 0)]).until_rest();
    assert_eq!(case.evicted, [("Reclaim".to_owned(), "b1".to_owned(), "low".to_owned())]);
}
