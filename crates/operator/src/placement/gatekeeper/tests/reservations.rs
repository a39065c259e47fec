//! Tests the duration and renewal of reservations.
use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::json;

use super::world::{ActualAllocations, TestCluster, at, reconcile, refuse, released, reservation};
use crate::placement::claims::{RESERVATION_TIME, UNREPORTED_CLAIM_TIME};
use crate::placement::cluster::ReconcileTime;
use crate::placement::gatekeeper::Gatekeeper;

#[test]
fn reserved_shares_are_not_reserved_twice_while_watches_lag() {
    let world = TestCluster::default().node("n1", &[4]).pod("a", 4).pod("b", 4);
    let mut keeper = Gatekeeper::default();
    assert_eq!(released(&reconcile(&mut keeper, &world, 0)), [("team/a", "reserved")]);
    let actions = reconcile(&mut keeper, &world, 1);
    assert_eq!(released(&actions), [], "the watch has not reported the release of a");
    assert!(actions.waiting.contains_key("team/b"));
    keeper.record_failed_release("team/a");
    assert_eq!(released(&reconcile(&mut keeper, &world, 2)), [("team/a", "reserved")], "the release failed");
}

#[test]
fn a_pod_with_an_unbound_volume_is_released_to_several_nodes_and_reserves_shares_on_each() {
    let volume = json!({"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]});
    let mut world = TestCluster::default().node("n1", &[0]).node("n2", &[0]).pod_with("a", 6, volume);
    let mut keeper = Gatekeeper::default();
    let actions = reconcile(&mut keeper, &world, 0);
    assert_eq!(reservation(&actions.releases[0]).nodes.keys().collect::<Vec<_>>(), ["n1", "n2"]);
    assert!(world.apply_release(&actions.releases[0]));
    let mut world = world.pod("b", 6);
    assert_eq!(released(&reconcile(&mut keeper, &world, 1)), []);
    world.change(|world| &mut world.pods, "team/a", |pod| pod["spec"]["nodeName"] = json!("n2"));
    let actions = reconcile(&mut keeper, &world, 2);
    assert_eq!(
        reservation(&actions.releases[0]).nodes.keys().collect::<Vec<_>>(),
        ["n1"],
        "the reservation on the other node ended"
    );
}

/// Nodes list allocations by the pod's name. The old pod's allocation would count as the new pod's
/// allocation, and end the new pod's reservation.
#[test]
fn a_pod_is_not_released_to_a_node_that_lists_an_earlier_pod_of_its_name() {
    let mut reality = ActualAllocations::default();
    reality.given.insert("team/web-0".into(), ("n1-GPU-0".into(), 6));
    // The pod at the gate replaces the deleted pod.
    let mut world = TestCluster::default().node("n1", &[0, 0]).pod("web-0", 6);
    reality.report(&mut world);
    let mut keeper = Gatekeeper::default();
    let actions = reconcile(&mut keeper, &world, 0);
    assert_eq!(released(&actions), []);
    let message = &actions.waiting["team/web-0"].message;
    assert!(message.contains("an earlier pod with this pod's name"), "{message}");
    let mut elsewhere = world.clone().node("n2", &[0, 0]);
    reality.report(&mut elsewhere);
    let actions = reconcile(&mut Gatekeeper::default(), &elsewhere, 0);
    assert_eq!(reservation(&actions.releases[0]).nodes.keys().collect::<Vec<_>>(), ["n2"]);
    let other = world.clone().pod("web-1", 6);
    let actions = reconcile(&mut Gatekeeper::default(), &other, 0);
    assert_eq!(released(&actions), [("team/web-1", "reserved")], "another replica uses the node");
    reality.given.clear();
    reality.report(&mut world);
    assert_eq!(released(&reconcile(&mut keeper, &world, 1)), [("team/web-0", "reserved")]);
}

#[test]
fn the_reservation_of_a_pod_that_is_not_bound_in_time_ends() {
    let mut world = TestCluster::default().node("n1", &[0]).pod("a", 6);
    let mut keeper = Gatekeeper::default().with_reports(false);
    let actions = reconcile(&mut keeper, &world, 0);
    assert!(world.apply_release(&actions.releases[0]));
    refuse(&mut world, "team/a");
    let world = world.pod("b", 6);
    let actions = reconcile(&mut keeper, &world, 1);
    assert_eq!(
        (released(&actions), actions.requeue),
        (vec![], Some(RESERVATION_TIME.checked_sub(Duration::from_secs(1)).unwrap()))
    );
    assert_eq!(released(&reconcile(&mut keeper, &world, RESERVATION_TIME.as_secs())), [("team/b", "reserved")]);
}

#[test]
fn a_reservation_by_an_operator_whose_clock_was_ahead_lasts_no_longer_than_other_reservations() {
    let mut world = TestCluster::default().node("n1", &[0]).pod("a", 6);
    let ahead = ReconcileTime { epoch: at(3_600).epoch, ..at(0) };
    let actions = Gatekeeper::default().reconcile(&world.cluster(), &BTreeMap::new(), ahead);
    assert!(world.apply_release(&actions.releases[0]));
    refuse(&mut world, "team/a");
    let world = world.pod("b", 6);
    let mut keeper = Gatekeeper::default().with_reports(false);
    let actions = reconcile(&mut keeper, &world, 0);
    assert_eq!((released(&actions), actions.requeue), (vec![], Some(RESERVATION_TIME)));
    assert_eq!(released(&reconcile(&mut keeper, &world, RESERVATION_TIME.as_secs())), [("team/b", "reserved")]);
    reconcile(&mut keeper, &world, RESERVATION_TIME.as_secs() + 1);
    assert!(keeper.ledger().unwrap().claim("team/a").is_none(), "the annotation no longer counts");
}

#[test]
fn the_claim_of_a_pod_that_is_deleted_before_its_node_reported_it_is_kept_briefly() {
    let mut world = TestCluster::default().node("n1", &[0]).pod("a", 6);
    let mut keeper = Gatekeeper::default();
    assert!(world.apply_release(&reconcile(&mut keeper, &world, 0).releases[0]));
    world.change(|world| &mut world.pods, "team/a", |pod| pod["spec"]["nodeName"] = json!("n1"));
    reconcile(&mut keeper, &world, 1);
    world.pods.clear();
    let world = world.pod("b", 6);
    let actions = reconcile(&mut keeper, &world, 2);
    assert_eq!((released(&actions), actions.requeue), (vec![], Some(UNREPORTED_CLAIM_TIME)));
    assert_eq!(
        released(&reconcile(&mut keeper, &world, 2 + UNREPORTED_CLAIM_TIME.as_secs())),
        [("team/b", "reserved")]
    );
}

#[test]
fn a_new_pod_of_the_same_name_gets_its_own_reservation() {
    let mut world = TestCluster::default().node("n1", &[0]).pod("a", 6);
    let mut keeper = Gatekeeper::default();
    assert!(world.apply_release(&reconcile(&mut keeper, &world, 0).releases[0]));
    world.pods.clear();
    let world = world.pod("a", 8);
    // The scheduler may have bound the deleted pod, and the watch may not have reported it yet.
    assert_eq!(released(&reconcile(&mut keeper, &world, 1)), []);
    let end = 1 + UNREPORTED_CLAIM_TIME.as_secs();
    assert_eq!(released(&reconcile(&mut keeper, &world, end)), [("team/a", "reserved")]);
}
