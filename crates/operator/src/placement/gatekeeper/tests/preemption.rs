//! Tests which pods are evicted for pods of higher priority.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::world::{ActualAllocations, MPS_RESOURCE, TestCluster, at, reconcile, released};
use crate::evict::EvictionResult;
use crate::placement::actions::Actions;
use crate::placement::claims::LISTED_TIME;
use crate::placement::cluster::Cluster;
use crate::placement::gatekeeper::Gatekeeper;
use crate::placement::unlisted::UNLISTED_TIME;

#[test]
fn a_pod_preempts_a_pod_of_lower_priority_and_gets_its_shares() {
    let mut world = TestCluster::default().node("n1", &[0, 0]);
    let mut reality = ActualAllocations::default();
    for (name, units, device, priority) in [("low", 7, 0, 1), ("other", 9, 1, 5), ("small", 3, 0, 3)] {
        world = world.pod_with(name, units, json!({"nodeName": "n1", "schedulingGates": [], "priority": priority}));
        reality.given.insert(format!("team/{name}"), (format!("n1-GPU-{device}"), units));
    }
    reality.report(&mut world);
    let mut world = world.pod_with("high", 6, json!({"priority": 9}));
    let mut keeper = Gatekeeper::default();
    let actions = reconcile(&mut keeper, &world, 0);
    let evicted: Vec<(&str, &str)> =
        actions.evictions.iter().map(|eviction| (eviction.pod.as_str(), eviction.preemptor.as_str())).collect();
    assert_eq!(
        (evicted, released(&actions)),
        (vec![("team/low", "team/high")], vec![]),
        "the operator evicts only the pod of the lowest priority"
    );
    let uid = world.pods["team/low"]["metadata"]["uid"].as_str().unwrap();
    assert_eq!(actions.evictions[0].uid, uid);
    world.terminate("team/low", "2026-01-01T00:00:00Z");
    assert_eq!(reconcile(&mut keeper, &world, 1).evictions, [], "the victim terminates");
    world.pods.remove("team/low");
    reality.given.remove("team/low");
    reality.report(&mut world);
    let world = world.pod_with("newcomer", 6, json!({"priority": 2}));
    let actions = reconcile(&mut keeper, &world, 2);
    assert_eq!(
        (released(&actions), actions.waiting.len()),
        (vec![("team/high", "reserved")], 1),
        "the freed shares are kept for the preemptor"
    );
}

#[test]
fn a_pod_of_equal_priority_or_with_preemption_policy_never_preempts_no_pod() {
    for (spec, why) in [
        (json!({"priority": 9, "preemptionPolicy": "Never"}), "the pod's policy forbids preemption"),
        (json!({"priority": 1}), "equal priority"),
    ] {
        let mut world = TestCluster::default().node("n1", &[0, 0]).pod_with(
            "low",
            7,
            json!({"nodeName": "n1", "schedulingGates": [], "priority": 1}),
        );
        let mut reality = ActualAllocations::default();
        reality.given.insert("team/low".into(), ("n1-GPU-0".into(), 7));
        reality.given.insert("kube-system/other".into(), ("n1-GPU-1".into(), 7));
        reality.report(&mut world);
        let actions = reconcile(&mut Gatekeeper::default(), &world.pod_with("a", 6, spec), 0);
        assert_eq!((actions.evictions, actions.waiting.len()), (vec![], 1), "{why}");
    }
}

/// Without the victim, the preemptor's affinity would exclude the node. The victim's controller
/// would recreate the victim, and the operator would evict it again.
#[test]
fn a_pod_that_the_preemptors_affinity_needs_is_not_evicted() {
    let mut world =
        TestCluster::default().node("n1", &[0]).pod_with("beside", 2, json!({"nodeName": "n1", "schedulingGates": []}));
    world.change(|world| &mut world.pods, "team/beside", |pod| pod["metadata"]["labels"] = json!({"app": "web"}));
    let mut reality = ActualAllocations::default();
    reality.given.insert("team/beside".into(), ("n1-GPU-0".into(), 2));
    reality.report_on(&mut world, 1);
    let evictions = |app: &str| {
        let term = json!({"labelSelector": {"matchLabels": {"app": app}}, "topologyKey": "kubernetes.io/hostname"});
        let affinity = json!({"requiredDuringSchedulingIgnoredDuringExecution": [term]});
        let spec = json!({"priority": 9, "affinity": {"podAffinity": affinity}});
        let mut world = world.clone().pod_with("high", 9, spec);
        world.change(|world| &mut world.pods, "team/high", |pod| pod["metadata"]["labels"] = json!({"app": "own"}));
        reconcile(&mut Gatekeeper::default(), &world, 0).evictions.len()
    };
    assert_eq!(evictions("web"), 0, "without the victim, the affinity selects no pod");
    assert_eq!(evictions("own"), 1, "the pod is the first of its group");
}

/// In a `Deployment` whose pods must run in the same zone, a new pod waits for the pod that it
/// replaces.
#[test]
fn a_pod_waits_for_a_terminating_pod_that_its_affinity_selects() {
    let mut world = TestCluster::default().node("n1", &[0, 0]).node("n2", &[0, 0]);
    let mut reality = ActualAllocations::default();
    for (name, shares, device, priority) in [
        ("old", 6, "n1-GPU-0", 1000),
        ("batch", 6, "n1-GPU-1", 0),
        ("sibling", 10, "n2-GPU-0", 1000),
        ("full", 10, "n2-GPU-1", 1000),
    ] {
        let node = &device[..2];
        world = world.pod_with(name, shares, json!({"nodeName": node, "schedulingGates": [], "priority": priority}));
        reality.given.insert(format!("team/{name}"), (device.to_owned(), shares));
    }
    reality.report(&mut world);
    for node in ["n1", "n2"] {
        world.change(|world| &mut world.nodes, node, |node| node["metadata"]["labels"]["zone"] = json!("a"));
    }
    let term = json!({"labelSelector": {"matchLabels": {"app": "x"}}, "topologyKey": "zone"});
    let affinity = json!({"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}});
    world = world.pod_with("new", 6, json!({"priority": 1000, "affinity": affinity}));
    for pod in ["team/old", "team/sibling", "team/new"] {
        label_pod(&mut world, pod, "x");
    }
    // This time is second 1 000 060. The test starts at second 1 000 000.
    world.terminate("team/old", "1970-01-12T13:47:40Z");
    let mut keeper = Gatekeeper::default();
    assert_eq!(victims(&reconcile(&mut keeper, &world, 0)), [""; 0]);
    assert!(keeper.ledger().unwrap().nominations().contains_key("team/new"), "it waits for the shares");
}

/// The scheduler may refuse the node. The pod's controller would then recreate the pod, and the pod
/// would repeatedly preempt others.
#[test]
fn a_pod_whose_volume_is_not_bound_preempts_no_pod() {
    let (mut world, _) = busy_node("2");
    let evicted = |world: &TestCluster| {
        let mounts = json!([{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]);
        let world = world.clone().pod_with("high", 9, json!({"priority": 9, "volumes": mounts}));
        reconcile(&mut Gatekeeper::default(), &world, 0).evictions.len()
    };
    assert_eq!(evicted(&world), 0, "the operator knows no node where the volume can be created");
    world.volume_claims =
        vec![json!({"metadata": {"name": "data", "namespace": "team"}, "spec": {"volumeName": "pv"}})];
    world.volumes = vec![json!({"metadata": {"name": "pv"}, "spec": {}})];
    assert_eq!(evicted(&world), 1, "each node can mount the volume");
}

/// Returns two running pods, each on its own GPU, and a waiting pod. The operator must evict one
/// running pod for the waiting pod.
fn cluster_with_two_victims_and_a_preemptor() -> (TestCluster, ActualAllocations) {
    let mut world = TestCluster::default().node("n1", &[0, 0]);
    let mut reality = ActualAllocations::default();
    for (name, device) in [("first", 0), ("second", 1)] {
        world = world.pod_with(name, 7, json!({"nodeName": "n1", "schedulingGates": [], "priority": 1}));
        reality.given.insert(format!("team/{name}"), (format!("n1-GPU-{device}"), 7));
    }
    reality.report(&mut world);
    (world.pod_with("high", 6, json!({"priority": 9})), reality)
}

/// Returns the pods that are evicted.
fn victims(actions: &Actions) -> Vec<&str> {
    actions.evictions.iter().map(|eviction| eviction.pod.as_str()).collect()
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[test]
fn a_pod_that_cannot_be_evicted_is_avoided_and_another_pod_is_evicted() {
    for result in [
        // The Eviction API refuses a pod with two disruption budgets.
        EvictionResult::Refused("This pod has more than one PodDisruptionBudget".to_owned()),
        EvictionResult::Refused("admission webhook denied the request".to_owned()),
        EvictionResult::Protected("Cannot evict pod as it would violate the pod's disruption budget.".to_owned()),
    ] {
        let (world, _) = cluster_with_two_victims_and_a_preemptor();
        let mut keeper = Gatekeeper::default().with_reports(false);
        let first = reconcile(&mut keeper, &world, 0).evictions[0].clone();
        keeper.record_eviction(&first, &result, seconds(0));
        let second = reconcile(&mut keeper, &world, 1).evictions[0].clone();
        assert_ne!(first.pod, second.pod, "{result:?}");
        keeper.record_eviction(&second, &result, seconds(1));
        let none = reconcile(&mut keeper, &world, 2);
        assert_eq!((victims(&none), none.requeue), (vec![], Some(seconds(8))), "both are avoided");
        let again = reconcile(&mut keeper, &world, 10);
        assert_eq!(victims(&again), [first.pod.as_str()], "the first delay is over");
        keeper.record_eviction(&first, &result, seconds(10));
        assert_eq!(
            victims(&reconcile(&mut keeper, &world, 11)),
            [second.pod.as_str()],
            "the pod's next delay is longer"
        );
    }
}

#[test]
fn a_throttled_eviction_is_repeated_later_and_no_other_pod_is_evicted() {
    let (world, _) = cluster_with_two_victims_and_a_preemptor();
    let mut keeper = Gatekeeper::default();
    let first = reconcile(&mut keeper, &world, 0).evictions[0].clone();
    keeper.record_eviction(&first, &EvictionResult::Throttled(seconds(4)), seconds(0));
    let paused = reconcile(&mut keeper, &world, 1);
    assert_eq!((victims(&paused), paused.requeue), (vec![], Some(seconds(3))));
    assert_eq!(victims(&reconcile(&mut keeper, &world, 4)), [first.pod.as_str()], "it counts as unprotected");
}

#[test]
fn an_accepted_eviction_is_not_repeated_before_the_watch_reports_it() {
    let (world, _) = cluster_with_two_victims_and_a_preemptor();
    let mut keeper = Gatekeeper::default();
    let first = reconcile(&mut keeper, &world, 0).evictions[0].clone();
    keeper.record_eviction(&first, &EvictionResult::Done, seconds(0));
    assert_eq!(reconcile(&mut keeper, &world, 1).evictions, []);
    assert_eq!(victims(&reconcile(&mut keeper, &world, 10)), [first.pod.as_str()], "the pod did not terminate");
}

/// Adds a disruption budget for the pods with the label `app: NAME`, or for all pods.
fn with_budget(mut world: TestCluster, name: &str, app: Option<&str>, allowed: u32) -> TestCluster {
    let selector = app.map_or_else(|| json!({}), |app| json!({"matchLabels": {"app": app}}));
    let budget = json!({"metadata": {"name": name, "namespace": "team", "generation": 1}, "spec": {"selector": selector},
        "status": {"observedGeneration": 1, "disruptionsAllowed": allowed, "currentHealthy": 1, "desiredHealthy": 2}});
    world.budgets.insert(name.to_owned(), budget);
    world
}

fn label_pod(world: &mut TestCluster, pod: &str, app: &str) {
    world.change(|world| &mut world.pods, pod, |pod| pod["metadata"]["labels"] = json!({"app": app}));
}

#[test]
fn no_eviction_is_requested_that_a_disruption_budget_does_not_allow() {
    let (mut world, _) = cluster_with_two_victims_and_a_preemptor();
    label_pod(&mut world, "team/first", "a");
    label_pod(&mut world, "team/second", "b");
    let found = |world: TestCluster| {
        let actions = reconcile(&mut Gatekeeper::default(), &world, 0);
        victims(&actions).into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(found(with_budget(world.clone(), "x", Some("a"), 0)), ["team/second"]);
    assert_eq!(found(with_budget(world.clone(), "x", Some("b"), 0)), ["team/first"]);
    assert_eq!(found(with_budget(world.clone(), "x", None, 0)), [""; 0], "an empty selector selects both");
    let two = with_budget(with_budget(world.clone(), "x", Some("a"), 5), "y", None, 5);
    assert_eq!(found(two), ["team/second"], "two budgets select the first");
}

#[test]
fn a_pod_is_evicted_as_soon_as_its_budget_allows_it() {
    let (world, _) = cluster_with_two_victims_and_a_preemptor();
    let mut keeper = Gatekeeper::default();
    let mut cluster = with_budget(world.clone(), "x", None, 0).cluster();
    let actions = keeper.reconcile(&cluster, &BTreeMap::new(), at(0));
    assert_eq!((victims(&actions), actions.awaits_budgets), (vec![], true));
    assert_eq!(keeper.reconcile(&cluster, &BTreeMap::new(), at(1)).evictions, []);
    // Only the budget changes.
    cluster.budgets = with_budget(world, "x", None, 1).cluster().budgets;
    assert_eq!(keeper.reconcile(&cluster, &BTreeMap::new(), at(2)).evictions.len(), 1);
}

#[test]
fn two_preemptors_do_not_exceed_one_budget() {
    let (world, _) = cluster_with_two_victims_and_a_preemptor();
    let world = with_budget(world.pod_with("other", 6, json!({"priority": 9})), "x", None, 1);
    let actions = reconcile(&mut Gatekeeper::default(), &world, 0);
    assert_eq!(actions.evictions.len(), 1, "{actions:?}");
}

/// Returns a node with 8 CPUs and free shares, and a pod of low priority that requests `cpus` of
/// the CPUs.
fn busy_node(cpus: &str) -> (TestCluster, ActualAllocations) {
    let containers = json!([{"resources": {"requests": {"cpu": cpus}, "limits": {MPS_RESOURCE: "2"}}}]);
    let spec = json!({"nodeName": "n1", "schedulingGates": [], "priority": 0, "containers": containers});
    let mut world = TestCluster::default().node("n1", &[0]).pod_with("low", 2, spec);
    let mut reality = ActualAllocations::default();
    reality.given.insert("team/low".into(), ("n1-GPU-0".into(), 2));
    reality.report_on(&mut world, 1);
    (world, reality)
}

fn spec_requesting_cpus(priority: i32, cpus: &str) -> Value {
    json!({"priority": priority, "containers": [{"resources": {"requests": {"cpu": cpus}, "limits": {MPS_RESOURCE: "2"}}}]})
}

#[test]
fn a_pod_preempts_on_a_node_that_lacks_cpu_and_the_freed_cpu_is_kept_for_it() {
    let (world, mut reality) = busy_node("6");
    let mut world = world.pod_with("high", 2, spec_requesting_cpus(1000, "4"));
    let mut keeper = Gatekeeper::default();
    let actions = reconcile(&mut keeper, &world, 0);
    assert_eq!((victims(&actions), released(&actions)), (vec!["team/low"], vec![]));
    world.terminate("team/low", "2026-01-01T00:00:00Z");
    assert_eq!(reconcile(&mut keeper, &world, 1).evictions, [], "the victim terminates");
    world.pods.remove("team/low");
    reality.given.remove("team/low");
    reality.report_on(&mut world, 1);
    // After the preemption, enough shares are free for the new pod, but too few CPUs.
    let world = world.pod_with("newcomer", 2, spec_requesting_cpus(1000, "5"));
    let actions = reconcile(&mut keeper, &world, 2);
    assert_eq!((released(&actions).len(), actions.releases[0].pod.as_str()), (1, "team/high"), "{actions:?}");
}

/// A rule of the pod may exclude the node after the evictions. The victims' replacements would then
/// return.
#[test]
fn a_pod_whose_evictions_have_no_effect_waits_longer_each_time() {
    let (world, _) = busy_node("6");
    let mut world = world.pod_with("high", 2, spec_requesting_cpus(1000, "4"));
    let mut keeper = Gatekeeper::default();
    let mut rounds = Vec::new();
    for second in (0..3600).step_by(30) {
        let actions = reconcile(&mut keeper, &world, second);
        for eviction in &actions.evictions {
            rounds.push(second);
            keeper.record_eviction(eviction, &EvictionResult::Done, seconds(second));
        }
        // The node briefly refuses the pod, and then runs the victim's replacement.
        for cordoned in [true, false] {
            world.change(|world| &mut world.nodes, "n1", |node| node["spec"]["unschedulable"] = json!(cordoned));
            if cordoned {
                reconcile(&mut keeper, &world, second + 1);
            }
        }
    }
    assert_eq!(rounds, [0, 30, 60, 120, 240, 480, 960, 1920]);
}

#[test]
fn a_round_of_many_evictions_is_counted_once_and_completed_after_throttling() {
    let mut world = TestCluster::default().node("n1", &[0]);
    let mut reality = ActualAllocations::default();
    for index in 0..5 {
        let name = format!("low-{index}");
        world = world.pod_with(&name, 2, json!({"nodeName": "n1", "schedulingGates": []}));
        reality.given.insert(format!("team/{name}"), ("n1-GPU-0".into(), 2));
    }
    reality.report_on(&mut world, 1);
    let mut world = world.pod_with("high", 10, json!({"priority": 9}));
    let mut keeper = Gatekeeper::default();
    let evictions = reconcile(&mut keeper, &world, 0).evictions;
    let (throttled, accepted) = evictions.split_last().unwrap();
    assert_eq!(accepted.len(), 4);
    for (index, eviction) in (1..).zip(accepted) {
        keeper.record_eviction(eviction, &EvictionResult::Done, Duration::from_millis(index));
        world.terminate(&eviction.pod, "2026-01-01T00:00:00Z");
    }
    keeper.record_eviction(throttled, &EvictionResult::Throttled(seconds(1)), Duration::from_millis(5));
    assert_eq!(victims(&reconcile(&mut keeper, &world, 2)), [throttled.pod.as_str()]);
    assert!(keeper.ledger().unwrap().nominations().contains_key("team/high"));
}

#[test]
fn a_search_that_no_longer_helps_any_pod_does_not_cause_immediate_reconciles() {
    let mut world = with_pods_that_no_eviction_helps(node_with_cpus_that_no_eviction_frees(), 1);
    let mut keeper = Gatekeeper::default();
    assert_eq!(reconcile(&mut keeper, &world, 0).preemption_searches, 1);
    // No pod of lower priority is left.
    world.pods.remove("team/low");
    reconcile(&mut keeper, &world, 1);
    for second in [61, 62] {
        assert_ne!(reconcile(&mut keeper, &world, second).requeue, Some(Duration::ZERO), "second {second}");
    }
}

#[test]
fn a_pod_of_lower_priority_does_not_use_cpu_of_a_nomination() {
    let (world, _) = busy_node("6");
    // Two of eight CPUs are free.
    let world =
        world.pod_with("high", 2, spec_requesting_cpus(1000, "4")).pod_with("small", 2, spec_requesting_cpus(1, "2"));
    let actions = reconcile(&mut Gatekeeper::default(), &world, 0);
    assert_eq!((victims(&actions), released(&actions)), (vec!["team/low"], vec![]));
}

#[test]
fn no_pod_is_evicted_on_a_node_that_is_too_small() {
    let (world, _) = busy_node("6");
    let actions = reconcile(&mut Gatekeeper::default(), &world.pod_with("high", 2, spec_requesting_cpus(1000, "9")), 0);
    assert_eq!((victims(&actions), released(&actions)), (vec![], vec![]));
}

/// Reconciles until no pod waits for its turn. Returns the evicted pods and the number of
/// reconciles.
fn reconcile_until_settled(keeper: &mut Gatekeeper, world: &TestCluster) -> (Vec<String>, usize) {
    let (cluster, mut evicted) = (world.cluster(), Vec::new());
    for count in 1..100 {
        let actions = keeper.reconcile(&cluster, &BTreeMap::new(), at(0));
        evicted.extend(victims(&actions).into_iter().map(str::to_owned));
        for eviction in &actions.evictions {
            keeper.record_eviction(eviction, &EvictionResult::Done, seconds(0));
        }
        if !actions.more {
            return (evicted, count);
        }
    }
    panic!("it does not end");
}

/// Adds waiting pods of high priority that no eviction helps, because no node has enough free CPUs.
/// The pods differ, so that each needs its own search.
fn with_pods_that_no_eviction_helps(mut world: TestCluster, count: u32) -> TestCluster {
    for index in 0..count {
        let cpus = format!("{}m", 7500 + index);
        world = world.pod_with(&format!("hopeless-{index:02}"), 2, spec_requesting_cpus(1000, &cpus));
    }
    world
}

/// Returns a node with a pod of low priority, and CPUs that no eviction frees.
fn node_with_cpus_that_no_eviction_frees() -> TestCluster {
    let (world, _) = busy_node("2");
    let fixed = json!({"nodeName": "n1", "schedulingGates": [], "priority": 2000,
        "containers": [{"resources": {"requests": {"cpu": "5"}}}]});
    world.pod_with("fixed", 0, fixed)
}

#[test]
fn pods_that_no_eviction_helps_do_not_block_other_preemptors() {
    let world = with_pods_that_no_eviction_helps(node_with_cpus_that_no_eviction_frees(), 30).pod_with(
        "zz-helped",
        2,
        spec_requesting_cpus(9, "3"),
    );
    let (evicted, reconciles) = reconcile_until_settled(&mut Gatekeeper::default(), &world);
    assert_eq!(evicted, ["team/low"]);
    assert!((4..12).contains(&reconciles), "a reconcile does limited work and skips no pod: {reconciles}");
}

#[test]
fn one_search_suffices_for_replicas_that_no_eviction_helps() {
    let mut world = node_with_cpus_that_no_eviction_frees();
    for index in 0..100 {
        world = world.pod_with(&format!("hopeless-{index:02}"), 2, spec_requesting_cpus(1000, "7"));
    }
    let world = world.pod_with("helped", 2, spec_requesting_cpus(9, "3"));
    let (evicted, reconciles) = reconcile_until_settled(&mut Gatekeeper::default(), &world);
    assert_eq!((evicted, reconciles), (vec!["team/low".to_owned()], 1));
}

#[test]
fn a_nomination_is_kept_while_victims_terminate_and_many_pods_wait() {
    let (world, mut reality) = cluster_with_two_victims_and_a_preemptor();
    let mut keeper = Gatekeeper::default();
    let victim = reconcile(&mut keeper, &world, 0).evictions[0].clone();
    keeper.record_eviction(&victim, &EvictionResult::Done, seconds(0));
    // Pods of the same priority also wait, and their names sort first.
    let mut world = world;
    for index in 0..20 {
        world = world.pod_with(&format!("a-{index:02}"), 6, json!({"priority": 9, "containers": [{"resources": {"requests": {"cpu": format!("{}m", 1000 + index)}, "limits": {MPS_RESOURCE: "10"}}}]}));
    }
    label_pod(&mut world, "team/first", "kept");
    label_pod(&mut world, "team/second", "kept");
    let mut world = with_budget(world, "x", Some("kept"), 0);
    world.terminate(&victim.pod, "2026-01-01T00:00:00Z");
    for second in 1..5 {
        reconcile(&mut keeper, &world, second);
        let nominated = keeper.ledger().unwrap().nominations().contains_key("team/high");
        assert!(nominated, "after {second} s");
    }
    world.pods.remove(&victim.pod);
    reality.given.remove(&victim.pod);
    reality.report(&mut world);
    let newcomer = world.pod_with("newcomer", 6, json!({"priority": 9}));
    assert_eq!(reconcile(&mut keeper, &newcomer, 5).releases[0].pod, "team/high");
}

#[test]
fn a_search_without_a_result_is_repeated_only_after_a_change() {
    let world = with_pods_that_no_eviction_helps(node_with_cpus_that_no_eviction_frees(), 1);
    let mut keeper = Gatekeeper::default();
    let mut cluster = world.cluster();
    let mut searches =
        |cluster: &Cluster, second| keeper.reconcile(cluster, &BTreeMap::new(), at(second)).preemption_searches;
    assert_eq!((searches(&cluster, 0), searches(&cluster, 1)), (1, 0), "nothing has changed");
    let pods = world.cluster().pods;
    let low = pods.iter().position(|pod| pod.metadata.name.as_deref() == Some("low")).unwrap();
    cluster.pods[low] = Arc::clone(&pods[low]);
    assert_eq!((searches(&cluster, 2), searches(&cluster, 3)), (1, 0), "a pod of the node has changed");
    assert_eq!(searches(&cluster, 63), 1, "a minute later");
}

#[test]
fn a_victim_that_does_not_terminate_does_not_block_the_preemptor() {
    let (mut world, _) = cluster_with_two_victims_and_a_preemptor();
    let mut keeper = Gatekeeper::default();
    let first = reconcile(&mut keeper, &world, 0).evictions[0].pod.clone();
    // The test starts at second 1 000 000.
    world.terminate(&first, "1970-01-12T13:46:40Z");
    let actions = reconcile(&mut keeper, &world, 59);
    assert_eq!((victims(&actions), actions.requeue.is_some()), (vec![], true));
    let actions = reconcile(&mut keeper, &world, 60);
    assert!(actions.evictions.len() == 1 && actions.evictions[0].pod != first, "{actions:?}");
}

#[test]
fn no_other_pod_is_evicted_for_shares_that_a_deleted_pod_frees() {
    let (mut world, mut reality) = cluster_with_two_victims_and_a_preemptor();
    let mut keeper = Gatekeeper::default();
    let first = reconcile(&mut keeper, &world, 0).evictions[0].pod.clone();
    // The node of the deleted pod has not reported that its shares are free.
    world.pods.remove(&first);
    let actions = reconcile(&mut keeper, &world, 1);
    assert_eq!((actions.evictions, actions.waiting.len()), (vec![], 1));
    reality.given.remove(&first);
    reality.report(&mut world);
    assert_eq!(released(&reconcile(&mut keeper, &world, 2)), [("team/high", "reserved")]);
}

/// Deletes a pod. The pod's node no longer lists the pod, but still counts the pod's shares as
/// used.
fn delete_pod_with_unlisted_shares(world: &mut TestCluster, pod: &str) {
    world.pods.remove(pod);
    unlist(world, pod);
}

/// Removes a pod from the allocations of its node. The node still counts the pod's shares as used.
fn unlist(world: &mut TestCluster, pod: &str) {
    world.change(
        |world| &mut world.gpu_nodes,
        "n1",
        |object| {
            for gpu in object["status"]["gpus"].as_array_mut().unwrap() {
                gpu["allocations"].as_array_mut().unwrap().retain(|row| row["pod"] != *pod);
            }
        },
    );
}

/// The kubelet stops listing a pod before the agent reports that the pod's shares are free.
#[test]
fn no_other_pod_is_evicted_while_the_shares_of_a_deleted_pod_are_used_but_not_listed() {
    let (mut world, mut reality) = cluster_with_two_victims_and_a_preemptor();
    let mut keeper = Gatekeeper::default();
    let first = reconcile(&mut keeper, &world, 0).evictions[0].pod.clone();
    delete_pod_with_unlisted_shares(&mut world, &first);
    for second in 1..4 {
        let actions = reconcile(&mut keeper, &world, second);
        assert_eq!((victims(&actions), actions.requeue.is_some()), (vec![], true), "second {second}");
    }
    reality.given.remove(&first);
    reality.report(&mut world);
    assert_eq!(released(&reconcile(&mut keeper, &world, 4)), [("team/high", "reserved")]);
}

/// The node may stop listing a pod before the watch reports that the pod no longer exists.
#[test]
fn no_other_pod_is_evicted_while_a_terminating_pod_is_not_listed() {
    let (mut world, mut reality) = cluster_with_two_victims_and_a_preemptor();
    let mut keeper = Gatekeeper::default();
    let first = reconcile(&mut keeper, &world, 0).evictions[0].pod.clone();
    world.terminate(&first, "2026-01-01T00:00:00Z");
    unlist(&mut world, &first);
    assert_eq!(victims(&reconcile(&mut keeper, &world, 1)), [""; 0], "the victim terminates");
    world.pods.remove(&first);
    assert_eq!(victims(&reconcile(&mut keeper, &world, 2)), [""; 0], "the victim has ended");
    reality.given.remove(&first);
    reality.report(&mut world);
    assert_eq!(released(&reconcile(&mut keeper, &world, 3)), [("team/high", "reserved")]);
}

/// A GPU fault ends the pods on the GPU. Their units do not become free.
#[test]
fn units_of_ended_pods_on_a_faulted_gpu_do_not_count_as_about_to_be_free() {
    let (mut world, _) = cluster_with_two_victims_and_a_preemptor();
    let mut keeper = Gatekeeper::default();
    world.pods.remove("team/high");
    reconcile(&mut keeper, &world, 0);
    delete_pod_with_unlisted_shares(&mut world, "team/first");
    let fault = |object: &mut Value| object["status"]["gpus"][0]["health"] = json!({"healthy": false, "reasons": []});
    world.change(|world| &mut world.gpu_nodes, "n1", fault);
    let world = world.pod_with("high", 6, json!({"priority": 9}));
    assert_eq!(victims(&reconcile(&mut keeper, &world, 1)), ["team/second"]);
}

#[test]
fn pods_wait_only_briefly_for_used_shares_of_no_listed_pod() {
    let (mut world, _) = cluster_with_two_victims_and_a_preemptor();
    let mut keeper = Gatekeeper::default();
    let first = reconcile(&mut keeper, &world, 0).evictions[0].pod.clone();
    let second = if first == "team/first" { "team/second" } else { "team/first" };
    delete_pod_with_unlisted_shares(&mut world, &first);
    assert_eq!(victims(&reconcile(&mut keeper, &world, 1)), [""; 0]);
    assert_eq!(victims(&reconcile(&mut keeper, &world, 1 + UNLISTED_TIME.as_secs())), [second]);
}

#[test]
fn pods_wait_only_briefly_for_a_deleted_pod_whose_node_still_lists_it() {
    let (mut world, _) = cluster_with_two_victims_and_a_preemptor();
    let mut keeper = Gatekeeper::default();
    let first = reconcile(&mut keeper, &world, 0).evictions[0].pod.clone();
    let second = if first == "team/first" { "team/second" } else { "team/first" };
    world.pods.remove(&first);
    let limit = LISTED_TIME.as_secs();
    for second in [1, limit] {
        let actions = reconcile(&mut keeper, &world, second);
        assert_eq!((victims(&actions), actions.requeue.is_some()), (vec![], true), "second {second}");
    }
    assert_eq!(victims(&reconcile(&mut keeper, &world, 1 + limit)), [second]);
    // A new leader does not know when the pod was deleted.
    let mut keeper = Gatekeeper::default();
    for second in [500, 499 + limit] {
        assert_eq!(victims(&reconcile(&mut keeper, &world, second)), [""; 0], "second {second}");
    }
    let actions = reconcile(&mut keeper, &world, 500 + limit);
    assert_eq!((victims(&actions), released(&actions)), (vec![second], vec![]), "the listed units still count as used");
}
