//! Tests preemption while a node still lists allocations of a deleted pod, and a new pod already
//! has the same name.
use serde_json::{Value, json};

use super::world::{ActualAllocations, TestCluster, reconcile, released};
use crate::placement::actions::Actions;
use crate::placement::claims::LISTED_TIME;
use crate::placement::gatekeeper::Gatekeeper;

/// Returns the pods that are evicted.
fn victims(actions: &Actions) -> Vec<&str> {
    actions.evictions.iter().map(|eviction| eviction.pod.as_str()).collect()
}

/// Adds a bound pod with shares of a GPU.
fn with_bound_pod(
    world: TestCluster,
    reality: &mut ActualAllocations,
    name: &str,
    priority: i32,
    on: (&str, u32),
) -> TestCluster {
    let (device, shares) = on;
    let node = device.split_once('-').unwrap().0;
    reality.given.insert(format!("team/{name}"), (device.to_owned(), shares));
    world.pod_with(name, shares, json!({"nodeName": node, "schedulingGates": [], "priority": priority}))
}

/// Returns a node with two GPUs. The pod `web-0` of high priority uses one GPU, and the pod `batch`
/// of low priority uses the other GPU.
fn two_pods() -> (TestCluster, ActualAllocations) {
    let mut reality = ActualAllocations::default();
    let world =
        with_bound_pod(TestCluster::default().node("n1", &[0, 0]), &mut reality, "web-0", 1000, ("n1-GPU-0", 6));
    let mut world = with_bound_pod(world, &mut reality, "batch", 0, ("n1-GPU-1", 6));
    reality.report(&mut world);
    (world, reality)
}

/// Deletes `web-0` and creates a pod of the same name, as a `StatefulSet` does. The node still
/// lists the allocation of the deleted pod.
fn recreate(mut world: TestCluster, shares: u32, spec: Value) -> TestCluster {
    world.pods.remove("team/web-0");
    world.pod_with("web-0", shares, spec)
}

#[test]
fn a_recreated_pod_waits_for_the_shares_of_its_predecessor_and_no_pod_is_evicted_for_it() {
    let (world, mut reality) = two_pods();
    let mut keeper = Gatekeeper::default();
    for second in [0, 100] {
        assert_eq!(victims(&reconcile(&mut keeper, &world, second)), [""; 0]);
    }
    let mut world = recreate(world, 6, json!({"priority": 1000}));
    for second in [101, 102] {
        let actions = reconcile(&mut keeper, &world, second);
        assert_eq!((victims(&actions), released(&actions)), (vec![], vec![]), "second {second}");
    }
    reality.given.remove("team/web-0");
    reality.report(&mut world);
    assert_eq!(released(&reconcile(&mut keeper, &world, 103)), [("team/web-0", "reserved")]);
}

#[test]
fn other_pods_also_wait_for_the_shares_of_a_pod_that_was_recreated() {
    let (world, _) = two_pods();
    let mut keeper = Gatekeeper::default();
    for second in [0, 100] {
        reconcile(&mut keeper, &world, second);
    }
    let world = recreate(world, 6, json!({"priority": 0})).pod_with("high", 6, json!({"priority": 1000}));
    let limit = LISTED_TIME.as_secs();
    for second in [101, 100 + limit] {
        assert_eq!(victims(&reconcile(&mut keeper, &world, second)), [""; 0], "second {second}");
    }
    assert_eq!(victims(&reconcile(&mut keeper, &world, 101 + limit)), ["team/batch"], "the programs may still run");
}

/// The kubelet may admit a pod before the watch reports that the pod is bound.
#[test]
fn pods_also_wait_for_a_pod_that_was_deleted_before_the_watch_reported_its_node() {
    for is_recreated in [false, true] {
        let mut reality = ActualAllocations::default();
        let mut world =
            with_bound_pod(TestCluster::default().node("n1", &[0, 0]), &mut reality, "batch", 0, ("n1-GPU-1", 6));
        reality.report(&mut world);
        let mut keeper = Gatekeeper::default();
        reconcile(&mut keeper, &world, 0);
        let mut world = world.pod_with("web-0", 6, json!({"priority": 1000}));
        let actions = reconcile(&mut keeper, &world, 100);
        assert!(world.apply_release(&actions.releases[0]));
        reconcile(&mut keeper, &world, 101);
        reality.given.insert("team/web-0".to_owned(), ("n1-GPU-0".to_owned(), 6));
        reality.report(&mut world);
        world.pods.remove("team/web-0");
        if is_recreated {
            world = world.pod_with("web-0", 6, json!({"priority": 0}));
        }
        let world = world.pod_with("high", 6, json!({"priority": 1000}));
        let limit = LISTED_TIME.as_secs();
        for second in [102, 101 + limit] {
            let actions = reconcile(&mut keeper, &world, second);
            assert_eq!(victims(&actions), [""; 0], "second {second}, recreated: {is_recreated}");
        }
        assert_eq!(victims(&reconcile(&mut keeper, &world, 110 + limit)), ["team/batch"]);
    }
}

/// A search that includes the predecessor's node would always nominate the pod for this node.
#[test]
fn a_recreated_pod_preempts_elsewhere_if_its_predecessor_does_not_end() {
    let mut reality = ActualAllocations::default();
    let world = TestCluster::default().node("n1", &[0]).node("n2", &[0]).policy(10);
    let world = with_bound_pod(world, &mut reality, "web-0", 1000, ("n1-GPU-0", 4));
    let mut world = with_bound_pod(world, &mut reality, "batch", 0, ("n2-GPU-0", 8));
    reality.report_on(&mut world, 1);
    let mut keeper = Gatekeeper::default();
    reconcile(&mut keeper, &world, 0);
    let world = recreate(world, 4, json!({"priority": 1000}));
    let limit = LISTED_TIME.as_secs();
    for second in [100, 99 + limit] {
        assert_eq!(victims(&reconcile(&mut keeper, &world, second)), [""; 0], "second {second}");
    }
    assert_eq!(victims(&reconcile(&mut keeper, &world, 100 + limit)), ["team/batch"]);

    let mut alone = world;
    alone.nodes.remove("n2");
    let mut keeper = Gatekeeper::default();
    for (second, reported) in [(0, 0), (limit, 0), (limit + 60, 1)] {
        let actions = reconcile(&mut keeper, &alone, second);
        assert_eq!((victims(&actions), actions.reported), (vec![], reported), "second {second}");
    }
}

#[test]
fn no_pod_is_evicted_for_shares_that_an_earlier_pod_of_its_name_uses_on_another_node() {
    let mut reality = ActualAllocations::default();
    let mut world = TestCluster::default().node("n1", &[0, 0]).node("n2", &[0, 0]);
    world = with_bound_pod(world, &mut reality, "web-0", 100, ("n1-GPU-0", 6));
    world = with_bound_pod(world, &mut reality, "batch", 500, ("n1-GPU-1", 6));
    reality.report(&mut world);
    let (begin, later) = (0, 200);
    let victim = |change: fn(&mut Value)| {
        let mut keeper = Gatekeeper::default();
        reconcile(&mut keeper, &world, begin);
        let mut world = recreate(world.clone(), 6, json!({"nodeName": "n2", "schedulingGates": [], "priority": 100}));
        reconcile(&mut keeper, &world, begin + 1);
        world.change(|world| &mut world.pods, "team/web-0", change);
        let on_n1 = json!({"priority": 1000, "nodeSelector": {"kubernetes.io/hostname": "n1"}});
        let actions = reconcile(&mut keeper, &world.pod_with("high", 6, on_n1), later);
        victims(&actions).into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(victim(|_| ()), ["team/batch"], "the new pod frees no share of n1");
    // The grace period of the new pod ends at second 300.
    let terminating = |pod: &mut Value| pod["metadata"]["deletionTimestamp"] = json!("1970-01-12T13:51:40Z");
    assert_eq!(victim(terminating), ["team/batch"], "the end of the new pod frees no share of n1");
}

#[test]
fn a_predecessor_excludes_only_the_pod_of_its_name_from_its_node() {
    let mut reality = ActualAllocations::default();
    let mut world =
        with_bound_pod(TestCluster::default().node("n1", &[0, 0]), &mut reality, "batch", 0, ("n1-GPU-1", 6));
    reality.given.insert("team/web-0".to_owned(), ("n1-GPU-0".to_owned(), 6));
    reality.report(&mut world);
    let mut keeper = Gatekeeper::default();
    reconcile(&mut keeper, &world, 0);
    let world = world.pod_with("web-0", 6, json!({"priority": 1000}));
    for second in [100, 101] {
        assert_eq!(victims(&reconcile(&mut keeper, &world, second)), [""; 0], "second {second}");
    }
    let world = world.pod_with("web-1", 6, json!({"priority": 1000}));
    for second in [102, 103] {
        let actions = reconcile(&mut keeper, &world, second);
        let evictions: Vec<&str> = actions.evictions.iter().map(|eviction| eviction.preemptor.as_str()).collect();
        assert_eq!(evictions, ["team/web-1"], "second {second}");
    }
}

/// The kubelet may have admitted the first pod, so its programs may use the units. No pod is
/// evicted for units that are kept only for some seconds. Units of another GPU would not help,
/// because the node's report about the first pod would count for the second pod.
#[test]
fn a_recreated_pod_waits_until_the_units_of_its_unreported_predecessor_are_reported_or_free() {
    for is_reported_later in [false, true] {
        let mut keeper = Gatekeeper::default();
        let mut reality = ActualAllocations::default();
        let mut world =
            with_bound_pod(TestCluster::default().node("n1", &[0, 0]), &mut reality, "batch", 0, ("n1-GPU-1", 2));
        reality.report(&mut world);
        reconcile(&mut keeper, &world, 0);
        let mut world = world.pod_with("web-0", 9, json!({"priority": 1000}));
        let actions = reconcile(&mut keeper, &world, 100);
        assert!(world.apply_release(&actions.releases[0]));
        let mut world = recreate(world, 9, json!({"priority": 1000}));
        for second in [101, 104] {
            let actions = reconcile(&mut keeper, &world, second);
            assert_eq!((released(&actions), victims(&actions)), (vec![], vec![]), "second {second}");
        }
        if is_reported_later {
            reality.given.insert("team/web-0".to_owned(), ("n1-GPU-0".to_owned(), 9));
            reality.report(&mut world);
            for second in [105, 120] {
                let actions = reconcile(&mut keeper, &world, second);
                assert_eq!((released(&actions), victims(&actions)), (vec![], vec![]), "the node still lists them");
            }
            reality.given.remove("team/web-0");
            reality.report(&mut world);
        }
        let free = if is_reported_later { 121 } else { 106 };
        assert_eq!(released(&reconcile(&mut keeper, &world, free)), [("team/web-0", "reserved")]);
    }
}
