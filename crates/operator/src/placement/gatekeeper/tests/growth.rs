//! Tests which pods at the gate are reported to cluster autoscalers.
use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

use super::world::{MPS_RESOURCE, TestCluster, add_replica_set_pod, at, reconcile, refuse, released, whole_gpus};
use crate::placement::actions::Actions;
use crate::placement::gatekeeper::{Gatekeeper, UNSCHEDULABLE_AFTER};
use crate::placement::growth::{FULL_AFTER, MAX_PREEMPTION_PAUSE, NO_NODE_AFTER};
use crate::placement::returning::RETURN_TIME;
use crate::placement::stranded;
use crate::policies::demand::{Reason, WaitingPod};

/// A change of the cluster.
type ClusterChange = fn(&mut TestCluster);

/// Returns the pods whose report changes, and whether each pod is now reported.
fn reports(actions: &Actions) -> Vec<(&str, bool)> {
    actions.reports.iter().map(|report| (report.pod.as_str(), report.message.is_some())).collect()
}

/// Reconciles once at the start and once later. Returns the second result.
fn reconcile_later(keeper: &mut Gatekeeper, world: &TestCluster, seconds: u64) -> Actions {
    reconcile(keeper, world, 0);
    reconcile(keeper, world, seconds)
}

fn restore_gate(world: &mut TestCluster, pod: &str) {
    let gated = json!([{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]);
    world.change(|world| &mut world.pods, pod, |pod| pod["status"]["conditions"] = gated);
}

/// Adds a policy, and a pod of priority 0 on the node `n1`. The pod has `shares` of the node's used
/// shares.
fn with_low_priority_pod(world: TestCluster, shares: u32) -> TestCluster {
    let bound = json!({"nodeName": "n1", "schedulingGates": [], "priority": 0});
    let mut world = world.pod_with("low", shares, bound).policy(10);
    let ids: Vec<String> = (0..shares).map(|id| format!("n1-GPU-0::{id}")).collect();
    let allocation = json!({"pod": "team/low", "container": "main", "resource": MPS_RESOURCE, "device": "n1-GPU-0", "ids": ids,
        "clients": 0});
    let allocate = |node: &mut Value| node["status"]["gpus"][0]["allocations"] = json!([allocation]);
    world.change(|world| &mut world.gpu_nodes, "n1", allocate);
    world
}

const FULL_SECONDS: u64 = FULL_AFTER.as_secs();
const NO_NODE_SECONDS: u64 = NO_NODE_AFTER.as_secs();

#[test]
fn a_pod_is_reported_while_the_pool_is_full_and_until_it_is_released() {
    let mut world = TestCluster::default().node("n1", &[7, 7]).pod("five", 5).policy(10);
    let mut keeper = Gatekeeper::default();
    let first = reconcile(&mut keeper, &world, 0);
    assert_eq!((reports(&first), first.reported), (vec![], 0), "pods may end and free shares");
    assert!(first.requeue.is_some_and(|requeue| requeue <= FULL_AFTER), "{:?}", first.requeue);
    let due = reconcile(&mut keeper, &world, FULL_SECONDS);
    assert_eq!((reports(&due), due.reported), (vec![("team/five", true)], 1));
    let message = due.reports[0].message.as_deref().unwrap();
    assert!(message.contains("no device has 5 nvidia.com/gpu-mps free"), "{message}");
    assert_eq!(due.reports[0].version, world.pods["team/five"]["metadata"]["resourceVersion"]);
    assert_eq!(reports(&reconcile(&mut keeper, &world, FULL_SECONDS + 1)), [], "the watch lags");
    refuse(&mut world, "team/five");
    assert_eq!(reports(&reconcile(&mut keeper, &world, FULL_SECONDS + 60)), [], "nothing has changed");
    world = world.node("n2", &[0]);
    let actions = reconcile(&mut keeper, &world, FULL_SECONDS + 61);
    assert_eq!(released(&actions), [("team/five", "reserved")]);
    assert_eq!((actions.releases[0].reported, reports(&actions), actions.reported), (true, vec![], 0));
}

#[test]
fn a_pool_grows_from_zero_if_a_policy_allows_the_request() {
    let cases = [
        // Each case has the request, the shares of each policy, and whether the pod is reported.
        (3, vec![10], true),
        (10, vec![10], true),
        (11, vec![10], false),
        (11, vec![10, 20], true),
        (3, vec![], false),
    ];
    for (shares, policies, expected) in cases {
        let world = policies.iter().fold(TestCluster::default().pod("a", shares), |world, units| world.policy(*units));
        let mut keeper = Gatekeeper::default();
        assert_eq!(reports(&reconcile_later(&mut keeper, &world, FULL_SECONDS)), [], "agents may be starting");
        let actions = reconcile(&mut keeper, &world, NO_NODE_SECONDS);
        assert_eq!(actions.reports.len(), usize::from(expected), "{shares} shares, policies {policies:?}");
        let much_later = reconcile(&mut keeper, &world, UNSCHEDULABLE_AFTER.as_secs());
        let waits = much_later.releases.is_empty();
        assert_eq!(waits, expected, "a reported pod stays at the gate: {shares} shares, policies {policies:?}");
    }
}

#[test]
fn a_pod_that_is_larger_than_any_known_gpu_is_not_reported() {
    let mut world = TestCluster::default().node("n1", &[10]).pod("eleven", 11).pod("one", 1).policy(10);
    let mut keeper = Gatekeeper::default();
    assert_eq!(reports(&reconcile_later(&mut keeper, &world, 60)), [("team/one", true)]);
    // The last node is removed. An autoscaler's new node would also be too small.
    refuse(&mut world, "team/one");
    (world.nodes, world.gpu_nodes, world.agents) = Default::default();
    world.policies = TestCluster::default().policy(20).policies;
    assert_eq!(reports(&reconcile(&mut keeper, &world, 100)), []);
    // The pod is released without a reservation, so it must not run on nodes with smaller GPUs.
    world.policies = TestCluster::default().policy(10).policies;
    let actions = reconcile(&mut keeper, &world, 101);
    assert_eq!(released(&actions), []);
    let actions = reconcile(&mut keeper, &world, 101 + UNSCHEDULABLE_AFTER.as_secs());
    assert_eq!(released(&actions), [("team/eleven", "unschedulable")]);
    assert!(actions.releases[0].patch.to_string().contains("largest.cleave.dev/gpu-mps"), "{actions:?}");
}

#[test]
fn a_pod_that_is_too_large_only_briefly_or_until_a_larger_gpu_exists_is_reported() {
    let larger = |world: &mut TestCluster| {
        world.change(
            |world| &mut world.gpu_nodes,
            "n1",
            |node| {
                let slice = &mut node["status"]["gpus"][0]["slices"][0];
                (slice["total"], slice["inUse"]) = (json!(20), json!(20));
            },
        );
    };
    let gone = |world: &mut TestCluster| (world.nodes, world.gpu_nodes, world.agents) = Default::default();
    let cases: [(ClusterChange, u64, u64); 3] =
        [(larger, 5, FULL_SECONDS), (larger, 40, FULL_SECONDS), (gone, 5, NO_NODE_SECONDS)];
    for (change, changed, patience) in cases {
        let mut world = TestCluster::default().node("n1", &[10]).pod("eleven", 11).policy(20);
        let mut keeper = Gatekeeper::default();
        reconcile(&mut keeper, &world, 0);
        assert_eq!(reports(&reconcile(&mut keeper, &world, changed - 1)), []);
        change(&mut world);
        assert_eq!(reports(&reconcile(&mut keeper, &world, changed)), []);
        let actions = reconcile(&mut keeper, &world, changed + patience);
        assert_eq!(reports(&actions), [("team/eleven", true)], "changed after {changed} s");
    }
}

#[test]
fn a_pod_that_cleave_delays_is_not_reported() {
    let mut world = add_replica_set_pod(TestCluster::default().node("n1", &[10]), "a", json!({})).policy(10);
    let mut keeper = Gatekeeper::default();
    assert_eq!(reports(&reconcile_later(&mut keeper, &world, FULL_SECONDS)), [("team/a", true)]);
    refuse(&mut world, "team/a");
    // The third recreation begins a delay of 40 s.
    let cluster = world.cluster();
    for seconds in [11, 21, 41] {
        let expired = stranded::Reason::Expired(vec!["n1".to_owned()]);
        keeper.stranded.reconcile([(&*cluster.pods[0], expired)], UNSCHEDULABLE_AFTER, at(seconds).up);
    }
    let actions = reconcile(&mut keeper, &world, 42);
    assert_eq!((reports(&actions), actions.reported), (vec![("team/a", false)], 0));
    restore_gate(&mut world, "team/a");
    assert_eq!(reports(&reconcile(&mut keeper, &world, 82)), [], "the delay has ended");
    assert_eq!(reports(&reconcile(&mut keeper, &world, 82 + FULL_SECONDS)), [("team/a", true)]);
}

#[test]
fn evictions_pause_for_a_limited_time_while_a_pod_may_get_units_without_them() {
    let world = with_low_priority_pod(TestCluster::default().node("n1", &[6]), 6).pod_with(
        "high",
        6,
        json!({"priority": 1000}),
    );
    let waits = |reason| BTreeMap::from([("team/high".to_owned(), WaitingPod { reason, message: "planned".into() })]);
    let mut keeper = Gatekeeper::default();
    let mut evictions =
        |reason, seconds| keeper.reconcile(&world.cluster(), &waits(reason), at(seconds)).evictions.len();
    let pause = MAX_PREEMPTION_PAUSE.as_secs();
    assert_eq!((evictions(Reason::Repartitioning, 0), evictions(Reason::NodeChanging, pause - 1)), (0, 0));
    assert_eq!(evictions(Reason::Repartitioning, pause), 1);
    let mut keeper = Gatekeeper::default();
    let actions = keeper.reconcile(&world.cluster(), &waits(Reason::Repartitioning), at(0));
    assert!(actions.requeue.is_some_and(|requeue| requeue <= MAX_PREEMPTION_PAUSE), "{:?}", actions.requeue);
    let actions = keeper.reconcile(&world.cluster(), &waits(Reason::NoRoom), at(1));
    assert_eq!(actions.evictions.len(), 1, "the operator evicts no more pods");
}

#[test]
fn a_pod_that_is_about_to_get_units_is_not_reported() {
    let world = with_low_priority_pod(TestCluster::default().node("n1", &[6]), 6).pod_with(
        "high",
        6,
        json!({"priority": 1000}),
    );
    let mut keeper = Gatekeeper::default();
    assert_eq!(reconcile(&mut keeper, &world, 0).evictions.len(), 1);
    assert_eq!(reports(&reconcile(&mut keeper, &world, 60)), []);

    let world = TestCluster::default().node("n1", &[10]).pod("a", 2).policy(10);
    for (reason, expected) in
        [(Reason::Repartitioning, 0), (Reason::NodeChanging, 0), (Reason::Scheduler, 0), (Reason::NoRoom, 1)]
    {
        let demand = BTreeMap::from([("team/a".to_owned(), WaitingPod { reason, message: "planned".into() })]);
        let mut keeper = Gatekeeper::default();
        keeper.reconcile(&world.cluster(), &demand, at(0));
        assert_eq!(keeper.reconcile(&world.cluster(), &demand, at(60)).reports.len(), expected, "{reason:?}");
    }
}

#[test]
fn a_pod_is_reported_once_a_search_shows_that_no_preemption_helps() {
    let mut world = with_low_priority_pod(TestCluster::default().node("n1", &[10]), 1);
    for shares in 2..=7 {
        world = world.pod_with(&format!("high-{shares}"), shares, json!({"priority": 1000}));
    }
    let mut keeper = Gatekeeper::default();
    assert!(reconcile(&mut keeper, &world, 0).more, "not every pod has its turn in one reconcile");
    for (seconds, expected) in [(FULL_SECONDS, 4), (2 * FULL_SECONDS - 1, 4), (2 * FULL_SECONDS, 6)] {
        assert_eq!(reconcile(&mut keeper, &world, seconds).reported, expected, "second {seconds}");
    }
    // A changed pod waits for its turn again.
    for shares in 2..=7 {
        refuse(&mut world, &format!("team/high-{shares}"));
    }
    for seconds in 0..3 {
        let actions = reconcile(&mut keeper, &world, 2 * FULL_SECONDS + seconds);
        assert_eq!((reports(&actions), actions.reported), (vec![], 6), "second {seconds}");
    }
    let actions = reconcile(&mut Gatekeeper::default(), &world, 0);
    assert_eq!((reports(&actions), actions.reported), (vec![], 6), "a new leader keeps the reports");
}

#[test]
fn a_pod_is_not_reported_while_the_status_of_a_node_is_missing() {
    let mut world = TestCluster::default().node("n1", &[0]).pod("a", 2).policy(10);
    world.gpu_nodes.clear();
    let actions = reconcile_later(&mut Gatekeeper::default(), &world, UNSCHEDULABLE_AFTER.as_secs());
    assert_eq!((reports(&actions), released(&actions)), (vec![], vec![]));
}

#[test]
fn pods_that_fit_a_node_whose_agent_is_briefly_not_ready_are_not_reported() {
    let not_ready: ClusterChange = |world| {
        world.change(
            |world| &mut world.agents,
            "n2",
            |agent| agent["status"]["conditions"][0]["status"] = json!("False"),
        );
    };
    let deleted: ClusterChange = |world| drop(world.agents.remove("n2"));
    let tainted: ClusterChange = |world| {
        drop(world.agents.remove("n2"));
        let taints = json!([{"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"},
            {"key": "cleave.dev/unhealthy", "effect": "NoSchedule"}]);
        world.change(|world| &mut world.nodes, "n2", |node| node["spec"]["taints"] = taints);
    };
    let removed: ClusterChange = |world| {
        drop(world.agents.remove("n2"));
        let taints = json!([{"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"},
            {"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]);
        world.change(|world| &mut world.nodes, "n2", |node| node["spec"]["taints"] = taints);
    };
    let faulty: ClusterChange = |world| {
        drop(world.agents.remove("n2"));
        world.change(
            |world| &mut world.gpu_nodes,
            "n2",
            |node| node["status"]["gpus"][0]["health"]["healthy"] = json!(false),
        );
    };
    // Only one of the two pods fits on the node.
    let one: &[_] = &[("team/b", true)];
    let both: &[_] = &[("team/a", true), ("team/b", true)];
    let cases = [
        ("not ready", not_ready, one),
        ("deleted", deleted, one),
        ("tainted", tainted, one),
        ("node is removed", removed, both),
        ("GPU is faulty", faulty, both),
    ];
    for (what, change, expected) in cases {
        let before = TestCluster::default().node("n1", &[10]).node("n2", &[8, 9]).pod("a", 2).pod("b", 2).policy(10);
        let mut world = before.clone();
        change(&mut world);
        let mut keeper = Gatekeeper::default();
        let actions = reconcile_later(&mut keeper, &world, FULL_SECONDS);
        assert_eq!(reports(&actions), expected, "{what}");
        refuse(&mut world, "team/b");
        if expected == one {
            let left = RETURN_TIME.saturating_sub(FULL_AFTER);
            assert!(actions.requeue.is_some_and(|requeue| requeue <= left), "{what}: {:?}", actions.requeue);
            let mut returned = before;
            refuse(&mut returned, "team/b");
            returned.version = world.version;
            returned.change(|world| &mut world.nodes, "n2", |_| ());
            returned.change(|world| &mut world.agents, "n2", |_| ());
            let limit = RETURN_TIME.as_secs();
            assert_eq!(reports(&reconcile(&mut keeper, &world, limit - 1)), [], "{what}");
            assert_eq!(reports(&reconcile(&mut keeper, &world, limit)), [], "{what}");
            let late = reconcile(&mut keeper, &world, limit + FULL_SECONDS);
            assert_eq!(reports(&late), [("team/a", true)], "{what}");
            let back = reconcile(&mut keeper, &returned, limit + FULL_SECONDS);
            assert_eq!(released(&back), [("team/a", "reserved")], "{what}");
        }
    }
}

#[test]
fn pods_that_fit_a_gpu_after_its_repartitioning_are_not_reported() {
    let mut world = whole_gpus(TestCluster::default(), "n1", &[0, 0]).pod("a", 6).pod("b", 6).pod("c", 4).policy(10);
    let mps = json!({"multiUser": true, "computeMode": "ExclusiveProcess", "slices": [{"resource": MPS_RESOURCE, "count": 10}]});
    let gpu = json!({"uuid": "n1-GPU-0", "enforcement": "Report", "partition": {"mps": mps}});
    world.change(|world| &mut world.gpu_nodes, "n1", |node| node["spec"] = json!({"planId": "p", "gpus": [gpu]}));
    let mut keeper = Gatekeeper::default();
    let actions = reconcile_later(&mut keeper, &world, FULL_SECONDS);
    assert_eq!(reports(&actions), [("team/b", true)], "the GPU will have ten shares");
    let late = RETURN_TIME.as_secs() + FULL_SECONDS;
    reconcile(&mut keeper, &world, RETURN_TIME.as_secs());
    refuse(&mut world, "team/b");
    let actions = reconcile(&mut keeper, &world, late);
    assert_eq!(reports(&actions), [("team/a", true), ("team/c", true)], "the repartitioning does not end");
}

#[test]
fn rules_between_pods_apply_on_nodes_whose_agent_is_not_ready() {
    let term = json!({"labelSelector": {"matchLabels": {"app": "web"}}, "topologyKey": "kubernetes.io/hostname"});
    let apart = json!({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}});
    let mut world = TestCluster::default().node("n1", &[10]).node("n2", &[0]).policy(10);
    world = add_replica_set_pod(add_replica_set_pod(world, "a", apart.clone()), "b", apart);
    world.change(
        |world| &mut world.pods,
        "team/a",
        |pod| {
            pod["spec"]["nodeName"] = json!("n2");
            pod["spec"]["schedulingGates"] = json!([]);
        },
    );
    world.agents.remove("n2");
    let actions = reconcile_later(&mut Gatekeeper::default(), &world, FULL_SECONDS);
    assert_eq!(reports(&actions), [("team/b", true)]);
}

#[test]
fn a_new_leader_changes_no_report_and_no_taint_before_it_reserves() {
    let mut world = TestCluster::default().node("n1", &[6, 6]).pod("five", 5).policy(10);
    refuse(&mut world, "team/five");
    let taint = json!([{"key": "cleave.dev/fragmented", "effect": "PreferNoSchedule"}]);
    world.change(|world| &mut world.nodes, "n1", |node| node["spec"]["taints"] = taint);
    let mut keeper = Gatekeeper::default().with_taints(true).with_settling_delay();
    for seconds in [0, 1, 60] {
        let actions = reconcile(&mut keeper, &world, seconds);
        assert_eq!((reports(&actions), actions.taints.as_slice()), (vec![], [].as_slice()), "second {seconds}");
    }
    keeper.reset();
    assert_eq!(reconcile(&mut keeper, &world, 61).taints, []);
    world.pods.clear();
    assert_eq!(reconcile(&mut keeper, &world, 120).taints.len(), 1, "a change of the leader keeps the settings");
}

#[test]
fn a_report_is_withdrawn_when_another_node_would_not_help() {
    let mut world = TestCluster::default().node("n1", &[10]).pod("a", 2).policy(10);
    refuse(&mut world, "team/a");
    let demand = |reason| BTreeMap::from([("team/a".to_owned(), WaitingPod { reason, message: "planned".into() })]);
    let mut keeper = Gatekeeper::default();
    let actions = keeper.reconcile(&world.cluster(), &demand(Reason::NoRoom), at(0));
    assert_eq!((reports(&actions), actions.reported), (vec![], 1), "a new leader keeps the former leader's report");
    let actions = keeper.reconcile(&world.cluster(), &demand(Reason::Repartitioning), at(1));
    assert_eq!((reports(&actions), actions.reported), (vec![("team/a", false)], 0));
    restore_gate(&mut world, "team/a");
    assert_eq!(reports(&keeper.reconcile(&world.cluster(), &demand(Reason::Repartitioning), at(2))), []);
    assert_eq!(reports(&keeper.reconcile(&world.cluster(), &demand(Reason::NoRoom), at(3))), []);
    assert_eq!(
        reports(&keeper.reconcile(&world.cluster(), &demand(Reason::NoRoom), at(3 + FULL_SECONDS))),
        [("team/a", true)]
    );
}

#[test]
fn reports_can_be_disabled() {
    let mut world = TestCluster::default().node("n1", &[10]).pod("a", 2).pod("b", 2).policy(10);
    let mut keeper = Gatekeeper::default().with_reports(false);
    refuse(&mut world, "team/b");
    assert_eq!(reports(&reconcile(&mut keeper, &world, 0)), [("team/b", false)], "earlier reports are withdrawn");
    restore_gate(&mut world, "team/b");
    assert_eq!(reports(&reconcile(&mut keeper, &world, 60)), []);
    let nothing = TestCluster::default().pod("a", 2).policy(10);
    let actions =
        reconcile_later(&mut Gatekeeper::default().with_reports(false), &nothing, UNSCHEDULABLE_AFTER.as_secs());
    assert_eq!(released(&actions), [("team/a", "unschedulable")], "the scheduler reports it");
}

#[test]
fn reports_are_limited_per_reconcile_and_repeated_after_a_failure() {
    let mut world = TestCluster::default().node("n1", &[10]).policy(10);
    for index in 0..1000 {
        world = world.pod(&format!("pod-{index:04}"), 1);
    }
    let mut keeper = Gatekeeper::default();
    let mut due = reconcile_later(&mut keeper, &world, FULL_SECONDS);
    assert_eq!((due.reports.len(), due.reported), (64, 1000));
    let failed = due.reports.remove(0);
    keeper.record_failed_report(&failed.uid);
    for report in &due.reports {
        refuse(&mut world, &report.pod);
    }
    let next = reconcile(&mut keeper, &world, FULL_SECONDS);
    assert_eq!((next.reports.len(), &next.reports[0].pod), (64, &failed.pod));
}

#[test]
fn a_node_whose_free_shares_are_on_several_gpus_is_tainted_for_the_autoscaler() {
    let mut world = TestCluster::default().node("n1", &[6, 6]).node("n2", &[9, 9]).pod("five", 5).policy(10);
    for name in ["a", "b"] {
        world = world.pod_with(name, 9, json!({"nodeName": "n2", "schedulingGates": []}));
    }
    let mut keeper = Gatekeeper::default().with_taints(true);
    assert_eq!(reconcile(&mut keeper, &world, 0).taints, [], "the pod is not reported yet");
    let actions = reconcile(&mut keeper, &world, FULL_SECONDS);
    let nodes: Vec<&str> = actions.taints.iter().map(|change| change.node.as_str()).collect();
    assert_eq!(nodes, ["n1"], "n2 has two free shares in all");
    assert!(actions.taints[0].patch.to_string().contains("PreferNoSchedule"), "{actions:?}");
    assert_eq!(reconcile(&mut keeper, &world, FULL_SECONDS).taints, [], "the watch lags");
    keeper.record_taint("n1", false, at(FULL_SECONDS).up);
    assert_eq!(keeper.next_taint_retry(at(FULL_SECONDS).up), Some(Duration::from_secs(1)));
    assert_eq!(reconcile(&mut keeper, &world, FULL_SECONDS).taints, [], "the node has a delay of its own");
    assert_eq!(reconcile(&mut keeper, &world, FULL_SECONDS + 1).taints.len(), 1, "the write failed");
    let taint = json!([{"key": "other", "effect": "NoExecute"}, {"key": "cleave.dev/fragmented", "effect": "PreferNoSchedule"}]);
    world.change(|world| &mut world.nodes, "n1", |node| node["spec"]["taints"] = taint);
    world.change(
        |world| &mut world.pods,
        "team/five",
        |pod| {
            pod["spec"]["tolerations"] = json!([{"operator": "Exists"}]);
        },
    );
    assert_eq!(reconcile(&mut keeper, &world, FULL_SECONDS + 1).taints, []);
    world.pods.clear();
    let actions = reconcile(&mut keeper, &world, FULL_SECONDS + 2);
    assert!(actions.taints[0].why.is_none() && actions.taints[0].patch.to_string().contains("/spec/taints/1"));
    let mut disabled = Gatekeeper::default();
    let world = TestCluster::default().node("n1", &[6, 6]).pod("five", 5).policy(10);
    assert_eq!(reconcile_later(&mut disabled, &world, FULL_SECONDS).taints, []);
}

#[test]
fn only_nodes_that_a_reported_pod_may_use_are_tainted_as_fragmented() {
    let mut world = TestCluster::default().policy(10);
    let nodes: [(&str, Value, Value); 5] = [
        ("chosen", json!({"pool": "a"}), json!([])),
        ("cordoned", json!({"pool": "a"}), json!([])),
        ("no-label", json!({}), json!([])),
        ("tainted", json!({"pool": "a"}), json!([{"key": "team", "value": "x", "effect": "NoSchedule"}])),
        ("other-pool", json!({"pool": "b"}), json!([])),
    ];
    for (name, labels, taints) in nodes {
        world = world.node(name, &[6, 6]);
        world.change(
            |world| &mut world.nodes,
            name,
            |node| {
                node["metadata"]["labels"].as_object_mut().unwrap().extend(labels.as_object().unwrap().clone());
                node["spec"]["taints"] = taints;
                node["spec"]["unschedulable"] = json!(name == "cordoned");
            },
        );
    }
    // The second pod may use the other pool, and requests more than the sum of a node's free units.
    for name in ["x", "y"] {
        world = world.pod_with(name, 6, json!({"nodeName": "other-pool", "schedulingGates": []}));
    }
    let world = world.pod_with("a", 5, json!({"nodeSelector": {"pool": "a"}})).pod_with(
        "b",
        9,
        json!({"nodeSelector": {"pool": "b"}}),
    );
    let mut keeper = Gatekeeper::default().with_taints(true);
    let actions = reconcile_later(&mut keeper, &world, FULL_SECONDS);
    assert_eq!(actions.reported, 2);
    let tainted: Vec<&str> = actions.taints.iter().map(|change| change.node.as_str()).collect();
    assert_eq!(tainted, ["chosen", "cordoned"], "a cordon ends");
}
