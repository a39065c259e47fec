//! Tests that all pods of a gang are released, although each release is a request of its own.
use std::collections::BTreeMap;

use serde_json::json;

use super::quotas::{Case, keeper};
use super::world::{at, reservation};
use crate::placement::actions::{Actions, Release};
use crate::policies::demand::Reason;

const GPUS: usize = 1;

/// A gang of two pods. Together they need all shares.
fn gang() -> Case {
    Case::new(GPUS, &[("a", json!({})), ("c", json!({}))]).waiting(&[("g1", "a", 5, 0), ("g2", "a", 5, 0)]).gang(
        "a",
        "train",
        2,
        &["g1", "g2"],
    )
}

fn reconcile(case: &mut Case) -> Actions {
    case.seconds += 1;
    case.reality.report_on(&mut case.world, GPUS);
    case.keeper.reconcile(&case.world.cluster(), &BTreeMap::new(), at(case.seconds))
}

fn released(actions: &Actions) -> Vec<&str> {
    actions.releases.iter().map(|release| release.pod.as_str()).collect()
}

/// Applies a release, and binds the pod.
fn apply(case: &mut Case, release: &Release) {
    assert!(case.world.apply_release(release), "{release:?}");
    case.keeper.record_release(&release.pod);
    let reserved = reservation(release).nodes["n1"][0].clone();
    case.reality.given.insert(release.pod.clone(), (reserved.device, reserved.units));
    case.world.change(|world| &mut world.pods, &release.pod, |pod| pod["spec"]["nodeName"] = json!("n1"));
}

/// Releases the gang. A controller changes g2 meanwhile, so the API server does not apply its
/// release. Returns this release.
fn release_only_g1(case: &mut Case) -> Release {
    let actions = reconcile(case);
    assert_eq!(released(&actions), ["a/g1", "a/g2"]);
    apply(case, &actions.releases[0]);
    case.world.change(|world| &mut world.pods, "a/g2", |pod| pod["metadata"]["labels"] = json!({"step": "2"}));
    let release = actions.releases[1].clone();
    assert!(!case.world.apply_release(&release), "the pod has changed");
    release
}

#[test]
fn a_pod_whose_release_failed_keeps_its_units_and_is_released_again() {
    let outcomes: [fn(&mut Case, Release); 3] = [
        |case, release| case.keeper.record_failed_release(&release.pod),
        |case, release| {
            let up = at(case.seconds).up;
            case.keeper.record_refused_release(&release.pod, "the test failed", up);
        },
        |case, release| case.keeper.record_unanswered_release(release),
    ];
    for record in outcomes {
        let mut case = gang();
        let release = release_only_g1(&mut case);
        record(&mut case, release);
        // The quota of c1 has the lower share, so the turn of c1 is before the turn of g2.
        let mut case = case.waiting(&[("c1", "c", 5, 0)]);
        let actions = reconcile(&mut case);
        assert_eq!(released(&actions), ["a/g2"]);
        assert!(actions.evictions.is_empty() && actions.waiting.contains_key("c/c1"), "{actions:?}");
        apply(&mut case, &actions.releases[0]);
        assert_eq!(released(&reconcile(&mut case)), Vec::<&str>::new());
    }
}

#[test]
fn a_pod_whose_release_is_refused_until_its_reservation_ends_waits() {
    let mut case = gang();
    let release = release_only_g1(&mut case);
    let mut case = case.waiting(&[("c1", "c", 5, 0)]);
    for _ in 0..4 {
        let up = at(case.seconds).up;
        case.keeper.record_refused_release(&release.pod, "a policy denies it", up);
        let actions = reconcile(&mut case);
        assert!(!released(&actions).contains(&"c/c1"), "{actions:?}");
    }
    let up = at(case.seconds).up;
    case.keeper.record_refused_release(&release.pod, "a policy denies it", up);
    let actions = reconcile(&mut case);
    assert_eq!(released(&actions), Vec::<&str>::new(), "the release is delayed");
    let waiting = &actions.waiting["a/g2"];
    assert!(waiting.reason == Reason::Malformed && waiting.message.contains("a policy denies it"), "{waiting:?}");
    case.seconds += 300;
    assert!(released(&reconcile(&mut case)).contains(&"c/c1"), "the units are free");
}

#[test]
fn units_of_a_deleted_pod_are_not_kept() {
    let mut case = gang();
    let release = release_only_g1(&mut case);
    case.keeper.record_failed_release(&release.pod);
    case.end("a/g2");
    let mut case = case.waiting(&[("c1", "c", 5, 0)]);
    case.seconds += 10;
    reconcile(&mut case);
    case.seconds += 10;
    assert_eq!(released(&reconcile(&mut case)), ["c/c1"]);
}

/// The leader is lost after it has released one pod of each gang. The new leader knows no
/// reservation of the others. Without them, both gangs would wait for each other.
#[test]
fn a_new_leader_first_releases_the_rest_of_gangs_that_are_partly_released() {
    let mut case = Case::new(2, &[("a", json!({})), ("b", json!({})), ("c", json!({"min": 10}))])
        .waiting(&[("g1", "a", 5, 0), ("g2", "a", 5, 0), ("h1", "b", 5, 0), ("h2", "b", 5, 0)])
        .gang("a", "train", 2, &["g1", "g2"])
        .gang("b", "train", 2, &["h1", "h2"]);
    case.seconds += 1;
    case.reality.report_on(&mut case.world, 2);
    let actions = case.keeper.reconcile(&case.world.cluster(), &BTreeMap::new(), at(case.seconds));
    assert_eq!(released(&actions).len(), 4);
    for release in actions.releases.iter().filter(|release| ["a/g1", "b/h1"].contains(&release.pod.as_str())) {
        apply(&mut case, release);
    }
    // c1 is within its guarantee, and the quota of c uses nothing.
    let mut case = case.waiting(&[("c1", "c", 5, 0), ("c2", "c", 5, 0)]);
    case.keeper = keeper();
    case.seconds += 20;
    case.reality.report_on(&mut case.world, 2);
    let actions = case.keeper.reconcile(&case.world.cluster(), &BTreeMap::new(), at(case.seconds));
    assert_eq!(released(&actions), ["a/g2", "b/h2"]);
}

/// c1 has waited for longer than the time after which units are reserved for it.
#[test]
fn the_rest_of_a_partly_released_gang_precedes_a_pod_that_has_waited_long() {
    let mut case = Case::new(2, &[("a", json!({})), ("c", json!({}))])
        .with_ageing(10)
        .running(&[(("c0", "c", 10, 0), 1)])
        .waiting(&[("c1", "c", 5, 0), ("g1", "a", 5, 0), ("g2", "a", 5, 0)])
        .gang("a", "train", 2, &["g1", "g2"]);
    case.seconds += 1;
    case.reality.report_on(&mut case.world, 2);
    let actions = case.keeper.reconcile(&case.world.cluster(), &BTreeMap::new(), at(case.seconds));
    assert_eq!(released(&actions), ["a/g1", "a/g2"]);
    apply(&mut case, &actions.releases[0]);
    case.losses = 1;
    case.seconds += 20;
    assert_eq!(released(&case.step()), ["a/g2"]);
}

#[test]
fn a_replacement_does_not_come_first_after_a_change_of_the_leader() {
    let mut case = gang();
    for release in reconcile(&mut case).releases {
        apply(&mut case, &release);
    }
    case.end("a/g2");
    let mut case = case.waiting(&[("g2", "a", 5, 0), ("c1", "c", 5, 0)]).gang("a", "train", 2, &["g2"]);
    case.keeper = keeper();
    assert_eq!(released(&reconcile(&mut case)), ["c/c1"]);
}

/// Otherwise pods that can never be released would delay others.
#[test]
fn the_rest_of_a_gang_comes_first_only_while_its_reservation_would_last() {
    let mut case = gang();
    release_only_g1(&mut case);
    let mut case = case.waiting(&[("c1", "c", 5, 0)]);
    case.keeper = keeper();
    case.seconds += 300;
    assert_eq!(released(&reconcile(&mut case)), ["c/c1"]);
}
