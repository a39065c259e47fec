//! Tests properties of the gatekeeper that must hold however far the watches lag.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use serde_json::json;

use super::world::{ActualAllocations, GPUS_PER_NODE, NODES, TestCluster, at, reconcile, reservation};
use crate::catch_up::Versions;
use crate::placement::cluster::Cluster;
use crate::placement::gatekeeper::Gatekeeper;
use crate::placement::queue::MISSING_TIME;

/// One step in the history of a cluster.
#[derive(Debug, Clone)]
enum Step {
    /// A pod is created. Contains the number of shares that the pod requests.
    Create(u32),
    /// The gatekeeper reconciles. Contains the maximum number of release writes that succeed.
    Reconcile(usize),
    /// Like `Reconcile`, but all answers of the API server are lost.
    LoseAnswers(usize),
    /// The watch of pods reports all changes.
    ReportPods,
    /// The watch of `GpuNode`s reports all changes.
    ReportGpuNodes,
    /// The agents report allocations.
    ReportAllocations,
    /// The scheduler binds a pod.
    Bind(usize),
    /// The kubelet allocates the shares of a bound pod.
    Allocate(usize),
    /// A pod is deleted without a grace period.
    Delete(usize),
    /// The operator restarts.
    Restart,
    /// Another process acquires the lease. The other process's watches lag.
    FailOver,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1_u32..=10).prop_map(Step::Create),
        4 => (0_usize..8).prop_map(Step::Reconcile),
        1 => (0_usize..8).prop_map(Step::LoseAnswers),
        3 => Just(Step::ReportPods),
        2 => Just(Step::ReportGpuNodes),
        2 => Just(Step::ReportAllocations),
        4 => any::<usize>().prop_map(Step::Bind),
        4 => any::<usize>().prop_map(Step::Allocate),
        2 => any::<usize>().prop_map(Step::Delete),
        1 => Just(Step::Restart),
        1 => Just(Step::FailOver),
    ]
}

/// Without [`crate::catch_up`], a new leader would reserve shares twice.
#[test]
fn a_lagging_watch_leads_to_a_second_reservation_so_a_new_leader_waits_for_the_watch() {
    let world = TestCluster::default().node("n1", &[0]).pod("p2", 6);
    let (lagging, stored) = (world.cluster(), Versions { pods: world.version, ..Versions::default() });
    let mut world = world.pod_with("p1", 6, json!({"priority": 10}));
    let released = reconcile(&mut Gatekeeper::default(), &world, 0).releases;
    assert_eq!(released.iter().map(|release| &*release.pod).collect::<Vec<_>>(), ["team/p1"]);
    assert!(world.apply_release(&released[0]), "the former leader releases one pod");
    // Resource versions that the new leader's own write requires.
    let required = Versions { pods: world.version, ..Versions::default() };
    let second = Gatekeeper::default().reconcile(&lagging, &BTreeMap::new(), at(1)).releases;
    assert!(world.apply_release(&second[0]), "two pods reserve 6 of 10 shares each");
    assert!(!stored.has_reached(required), "the new leader must not act on this watch");
}

#[test]
fn a_pod_whose_release_had_no_answer_keeps_its_reservation_until_the_watch_shows_the_result() {
    let mut world = TestCluster::default().node("n1", &[0]).pod("p1", 6);
    let mut keeper = Gatekeeper::default();
    let lagging = world.cluster();
    let first = reconcile(&mut keeper, &world, 0).releases;
    assert!(world.apply_release(&first[0]), "the patch is applied, and its answer is lost");
    keeper.record_unanswered_release(first[0].clone());
    let retried = keeper.reconcile(&lagging, &BTreeMap::new(), at(1)).releases;
    assert_eq!(retried, first, "the same patch is sent again");
    assert!(!world.apply_release(&retried[0]));
    keeper.record_refused_release("team/p1", "the test failed", at(1).up);
    let mut world = world.pod("p2", 6);
    let pods = world.cluster().pods.into_iter().skip(1).chain(lagging.pods.clone()).collect();
    let unseen = Cluster { pods, ..world.cluster() };
    let releases = keeper.reconcile(&unseen, &BTreeMap::new(), at(2)).releases;
    assert_eq!(releases, first, "p2 does not fit, because p1 may have been released");
    assert_eq!(reconcile(&mut keeper, &world, 3).releases, [], "the watch shows that p1 was released");
    world.pods.remove("team/p1");
    assert_eq!(reconcile(&mut keeper, &world, 5).releases, [], "p1 may have been bound, and may still use its shares");
    let second = reconcile(&mut keeper, &world, 10).releases;
    assert_eq!(second.len(), 1);
    keeper.record_unanswered_release(second[0].clone());
    world.change(|world| &mut world.pods, "team/p2", |pod| pod["metadata"]["labels"] = json!({"a": "b"}));
    let third = reconcile(&mut keeper, &world, 11).releases;
    assert_eq!(third.len(), 1, "p2 changed, so it was not released, and waits again");
    assert_ne!(third, second);
    keeper.record_unanswered_release(third[0].clone());
    assert_eq!(reconcile(&mut keeper, &world, 252).releases.len(), 0, "too late for a retry");
    reconcile(&mut keeper, &world, 311);
    assert_eq!(reconcile(&mut keeper, &world, 312).releases.len(), 1, "the reservation expired");
}

/// Many pods may be deleted while the watch lags.
#[test]
fn a_pod_that_no_longer_exists_is_released_once() {
    let names = || (0..40).map(|index| format!("p{index}"));
    let world = names().fold(TestCluster::default().node("n1", &[0]), |world, name| world.pod(&name, 6));
    let mut keeper = Gatekeeper::default();
    let mut sent = Vec::new();
    for _ in 0..names().count() {
        for release in reconcile(&mut keeper, &world, 0).releases {
            assert!(keeper.record_missing_pod(&release.pod, &release.uid, at(0).up), "the reservation ends");
            assert!(!keeper.record_missing_pod(&release.pod, &release.uid, at(0).up), "it has ended");
            sent.push(release.pod);
        }
    }
    sent.sort();
    let mut expected: Vec<String> = names().map(|name| format!("team/{name}")).collect();
    expected.sort();
    assert_eq!(sent, expected, "each pod is released once, although the watch still has all of them");
    let limit = MISSING_TIME.as_secs();
    let actions = reconcile(&mut keeper, &world, limit - 1);
    assert_eq!((actions.releases.len(), actions.more, actions.waiting.len()), (0, false, 0));
    assert_eq!(actions.requeue, Some(Duration::from_secs(1)));
    let mut recreated = world.clone();
    recreated.pods.clear();
    let releases = reconcile(&mut keeper, &recreated.pod("p7", 6), limit - 1).releases;
    assert_eq!(releases.len(), 1, "a new pod has the name");
    let mut keeper = Gatekeeper::default();
    let first = reconcile(&mut keeper, &world, 0).releases.remove(0);
    keeper.record_missing_pod(&first.pod, &first.uid, at(0).up);
    let again = reconcile(&mut keeper, &world, limit).releases;
    assert_eq!(again[0].pod, first.pod, "the watch would have reported a deletion by now, so the answer was wrong");
}

#[test]
fn a_pod_whose_release_had_no_answer_keeps_its_reservation_if_it_no_longer_exists() {
    let world = TestCluster::default().node("n1", &[0]).pod("p1", 6);
    let mut keeper = Gatekeeper::default();
    let first = reconcile(&mut keeper, &world, 0).releases.remove(0);
    keeper.record_unanswered_release(first.clone());
    let world = world.pod("p2", 6);
    assert_eq!(reconcile(&mut keeper, &world, 1).releases, std::slice::from_ref(&first));
    assert!(!keeper.record_missing_pod(&first.pod, &first.uid, at(1).up), "the reservation is kept");
    assert_eq!(reconcile(&mut keeper, &world, 2).releases, [], "p1 may have been bound, and may still use its shares");
}

/// Regression test of a random sequence: a pod of 3 shares is allocated, and deleted without a
/// grace period. The operator restarts before the node reports the allocation.
#[test]
fn after_a_restart_shares_of_a_pod_that_was_just_deleted_are_not_reserved() {
    let world = TestCluster::default().node("n1", &[0]).pod("next", 8);
    let mut keeper = Gatekeeper::default().with_settling_delay();
    for second in [100, 104] {
        let actions = reconcile(&mut keeper, &world, second);
        assert!(actions.releases.is_empty(), "second {second}: the deleted pod may still use its shares");
        assert_eq!(actions.requeue.map(|requeue| requeue.as_secs()), Some(105 - second));
    }
    assert_eq!(reconcile(&mut keeper, &world, 105).releases.len(), 1);
    keeper.reset();
    assert!(reconcile(&mut keeper, &world, 200).releases.is_empty(), "another process led");
}

/// Regression test of a random sequence: a released pod is bound, allocated, and deleted without a
/// grace period. The watch of pods then reports only that the pod was deleted.
#[test]
fn shares_of_a_deleted_pod_that_was_never_seen_bound_are_not_reserved_immediately() {
    let mut world = TestCluster::default().node("n1", &[0]).pod("a", 6);
    let mut keeper = Gatekeeper::default();
    assert!(world.apply_release(&reconcile(&mut keeper, &world, 0).releases[0]));
    reconcile(&mut keeper, &world, 1);
    world.pods.clear();
    let world = world.pod("next", 6);
    for second in [2, 6] {
        let releases = reconcile(&mut keeper, &world, second).releases;
        assert_eq!(releases, [], "second {second}: the deleted pod may still use its shares");
    }
    assert_eq!(reconcile(&mut keeper, &world, 7).releases.len(), 1);
}

proptest! {
    /// Checks that a released pod always finds its units on the device in its annotation, despite
    /// lagging watches, failed writes and restarts of the operator.
    ///
    /// Also checks that a gatekeeper that examines only changed pods makes the same decisions as a
    /// gatekeeper that always examines all pods.
    #[test]
    fn no_released_pod_fails_at_the_kubelet(steps in proptest::collection::vec(step(), 1..80)) {
        let mut world = TestCluster::default().node("n1", &[0; GPUS_PER_NODE]).node("n2", &[0; GPUS_PER_NODE]);
        let mut reality = ActualAllocations::default();
        let (mut watched, mut keeper, mut names) = (world.cluster(), Gatekeeper::default().with_settling_delay(), 0_u32);
        let mut thorough = Gatekeeper::default().with_settling_delay();
        // The resource version of the watched pods, and the version that a new leader must have
        // seen.
        let (mut stored, mut required) = (Versions::default(), Versions::default());
        for (second, step) in steps.into_iter().enumerate() {
            let ActualAllocations { given, ending, .. } = &mut reality;
            given.retain(|name, _| ending.get(name).is_none_or(|end| *end > second));
            match step {
                Step::Create(units) => {
                    names += 1;
                    world = world.pod(&format!("p{names}"), units);
                }
                Step::Reconcile(_) | Step::LoseAnswers(_) if !stored.has_reached(required) => {}
                Step::Reconcile(written) | Step::LoseAnswers(written) => {
                    let actions = keeper.reconcile(&watched, &BTreeMap::new(), at(second as u64));
                    let copied = Cluster { pods: watched.pods.iter().map(|pod| Arc::new((**pod).clone())).collect(), ..watched.clone() };
                    prop_assert_eq!(&actions, &thorough.reconcile(&copied, &BTreeMap::new(), at(second as u64)));
                    prop_assert_eq!(keeper.ledger(), thorough.ledger());
                    for (index, release) in actions.releases.iter().enumerate() {
                        let done = index < written && world.apply_release(release);
                        for keeper in [&mut keeper, &mut thorough] {
                            match step {
                                Step::LoseAnswers(_) => keeper.record_unanswered_release(release.clone()),
                                _ if done => keeper.record_release(&release.pod),
                                _ => keeper.record_failed_release(&release.pod),
                            }
                        }
                    }
                }
                Step::ReportPods => {
                    watched.pods = world.changed_pods(&watched.pods);
                    stored.pods = world.version;
                }
                Step::ReportGpuNodes => watched.gpu_nodes = world.cluster().gpu_nodes,
                Step::ReportAllocations => reality.report(&mut world),
                Step::Bind(which) => {
                    let waiting: Vec<String> = world.pods.iter()
                        .filter(|(_, pod)| pod["spec"].get("schedulingGates").is_none() && pod["spec"].get("nodeName").is_none())
                        .map(|(name, _)| name.clone()).collect();
                    if waiting.is_empty() { continue }
                    let name = waiting[which % waiting.len()].clone();
                    let Some(placement) = TestCluster::placement(&world.pods[&name]) else { continue };
                    let node = placement.nodes.keys().next().unwrap().clone();
                    world.change(|world| &mut world.pods, &name, |pod| pod["spec"]["nodeName"] = json!(node));
                }
                Step::Allocate(which) => {
                    let bound: Vec<String> = world.pods.iter()
                        .filter(|(name, pod)| pod["spec"].get("nodeName").is_some() && !reality.given.contains_key(*name))
                        .map(|(name, _)| name.clone()).collect();
                    if bound.is_empty() { continue }
                    let name = bound[which % bound.len()].clone();
                    let pod = &world.pods[&name];
                    let (units, placement) = (TestCluster::units(pod), TestCluster::placement(pod).unwrap());
                    let device = placement.nodes[pod["spec"]["nodeName"].as_str().unwrap()][0].device.clone();
                    prop_assert!(reality.free(&device) >= units, "{name} wants {units} of {device}: {reality:?}");
                    reality.given.insert(name, (device, units));
                }
                Step::Delete(which) => {
                    if world.pods.is_empty() { continue }
                    let name = world.pods.keys().nth(which % world.pods.len()).unwrap().clone();
                    world.pods.remove(&name);
                    reality.ending.insert(name, second + 4);
                }
                Step::Restart => {
                    // After a restart, the operator lists all objects.
                    keeper.reset();
                    thorough.reset();
                    watched = world.cluster();
                    stored.pods = world.version;
                }
                Step::FailOver => {
                    keeper.reset();
                    thorough.reset();
                    required.pods = world.version;
                }
            }
        }
    }

    /// Checks that, once nothing changes, waiting pods fit no device.
    #[test]
    fn a_pod_that_fits_does_not_wait(sizes in proptest::collection::vec(1_u32..=10, 1..20)) {
        let mut world = TestCluster::default().node("n1", &[0; GPUS_PER_NODE]).node("n2", &[0; GPUS_PER_NODE]);
        for (index, units) in sizes.iter().enumerate() {
            world = world.pod(&format!("p{index}"), *units);
        }
        let (mut keeper, mut reality) = (Gatekeeper::default(), ActualAllocations::default());
        for second in 0..4 {
            let actions = reconcile(&mut keeper, &world, second);
            for release in &actions.releases {
                prop_assert!(world.apply_release(release));
                let placement = reservation(release);
                let (node, reserved) = placement.nodes.first_key_value().unwrap();
                world.change(|world| &mut world.pods, &release.pod, |pod| pod["spec"]["nodeName"] = json!(node));
                reality.given.insert(release.pod.clone(), (reserved[0].device.clone(), reserved[0].units));
            }
            reality.report(&mut world);
        }
        let most = NODES.iter().flat_map(|node| (0..GPUS_PER_NODE).map(move |index| format!("{node}-GPU-{index}")))
            .map(|gpu| reality.free(&gpu)).max().unwrap();
        for (name, pod) in &world.pods {
            prop_assert!(reality.given.contains_key(name) || TestCluster::units(pod) > most, "{name} could run: {reality:?}");
        }
    }
}
