//! Tests the rules for pods of high priority that override quotas.
use proptest::prelude::*;

use super::super::{Exchange, Kind, Owner, Place, Pod, Quota, Settings, Wait, World, look, simulate};
use super::config;
use super::inputs::assert_rebuilt;
use super::naive_look::naive_look;
use super::steps::steps;
use super::worlds::{ANY, History, QUOTAS, Run, Start, describe, histories, settings, tenths, worlds};
use crate::ledger::Moment;

/// Lowest priority that overrides quotas. In random worlds, priorities are from -1 to 2.
const LIMIT: i32 = 1;

/// Returns random histories in which some pods override quotas.
fn overriding() -> impl Strategy<Value = History> {
    histories().prop_map(|mut history| {
        history.start.0.settings.override_priority = Some(LIMIT);
        history
    })
}

proptest! {
    #![proptest_config(config())]

    /// Only a pod of higher priority evicts a pod that overrides quotas. A pod that overrides
    /// quotas evicts only pods of lower priority, and of other quotas only if they are enforced.
    #[test]
    fn among_pods_that_override_quotas_priority_decides_alone(history in overriding()) {
        let mut run = Run::new(history.start.0.clone());
        for event in &history.events {
            let (steps, outcome) = steps(&run.world, run.now, assert_rebuilt);
            for step in &steps {
                let Some(Exchange { kind, victims, .. }) = &step.exchange else { continue };
                let (taker, pool) = (step.pod.0, &step.before);
                let priority = |pod: usize| pool.world.pods[pod].priority;
                for victim in victims {
                    let (owner, other) = (pool.owner(taker), pool.owner(victim.0));
                    if pool.overriding(victim.0).is_some() {
                        prop_assert!(*kind == Kind::Priority && priority(taker) > priority(victim.0), "{step:?}");
                    }
                    let is_crossing = owner != other && pool.quota(&owner).is_enforced();
                    if *kind == Kind::Priority && is_crossing {
                        let is_allowed = pool.overriding(taker).is_some() && pool.quota(&other).is_enforced();
                        prop_assert!(is_allowed && priority(taker) > priority(victim.0), "{step:?}");
                    }
                }
            }
            run.apply(&outcome);
            run.happen(event);
        }
    }

    /// The pool comes to rest although evicted pods are replaced at once.
    #[test]
    fn a_pool_with_pods_that_override_quotas_comes_to_rest(Start(mut start) in worlds(&ANY)) {
        start.settings.override_priority = Some(LIMIT);
        let text = describe(&start);
        prop_assert!(simulate(start, 50, |_, _| {}).is_ok(), "{text}");
    }

    /// At rest, a pod that overrides quotas waits only if it would fit on no GPU even without all
    /// pods of lower priority that may be evicted.
    #[test]
    fn a_pod_that_overrides_quotas_does_not_wait_for_pods_of_lower_priority(Start(mut start) in worlds(&ANY)) {
        start.settings.override_priority = Some(LIMIT);
        start.quotas.retain(|_, quota| quota.cells().is_none());
        let rest = simulate(start, 50, |_, _| {}).unwrap();
        let pool = super::naive::Pool::at(rest.world.clone(), Moment(u64::MAX / 2));
        for (at, pod) in rest.world.pods.iter().enumerate() {
            let quota = pool.quota(&pool.owner(at));
            let exceeds = quota.max().is_some_and(|max| pool.used(&pool.owner(at)).plus(pod.charge) > max);
            let waits = matches!(pod.place, Place::Waiting { .. });
            if !waits || pool.overriding(at).is_none() || exceeds || !pod.preempts || !pod.borrows {
                continue;
            }
            for gpu in 0..rest.world.gpus.len() {
                let stays = |other: usize| {
                    let one = &rest.world.pods[other];
                    let may_leave = one.priority < pod.priority
                        && pool.quota(&pool.owner(other)).is_enforced()
                        && one.protected.is_none();
                    pool.counts_on(other) == Some(gpu) && !may_leave
                };
                let room = rest.world.gpus[gpu].minus(pool.sum(stays));
                prop_assert!(room < pod.charge, "{} on {gpu}: {}", pod.name, describe(&rest.world));
            }
        }
    }

    /// Each pass of a history makes the same decisions as the naive model.
    #[test]
    fn the_naive_model_makes_the_same_decisions_about_pods_that_override_quotas(history in overriding()) {
        let mut run = Run::new(history.start.0.clone());
        run.world.pods.truncate(8);
        for event in &history.events {
            let outcome = look(&run.world, run.now);
            prop_assert_eq!(&outcome, &naive_look(&run.world, run.now), "{}", describe(&run.world));
            run.apply(&outcome);
            run.happen(event);
        }
    }
}

fn pod(name: &str, quota: usize, size: u64, priority: i32, place: Place) -> Pod {
    Pod {
        name: name.to_owned(),
        owner: Owner::Quota(QUOTAS[quota].to_owned()),
        charge: tenths(size),
        priority,
        created: Moment(1),
        place,
        borrows: true,
        preempts: true,
        protected: None,
        gang: None,
        gpus: None,
        spans_gpus: false,
    }
}

/// Returns a pool in which quota `b` guarantees the only GPU, and quota `a` guarantees nothing. A
/// pod of `b` runs on the GPU, and an urgent pod of `a` waits.
fn contended(override_priority: Option<i32>, urgent: i32) -> World {
    let quotas = [(QUOTAS[0], Quota::new(tenths(0))), (QUOTAS[1], Quota::new(tenths(10)))];
    World {
        gpus: vec![tenths(10)],
        quotas: quotas.map(|(name, quota)| (name.to_owned(), quota)).into_iter().collect(),
        pods: vec![
            pod("guaranteed", 1, 10, 50, Place::Running { gpu: 0, since: Moment(1) }),
            pod("urgent", 0, 10, urgent, Place::Waiting { nominated: None }),
        ],
        settings: Settings { override_priority, ..settings() },
    }
}

#[test]
fn a_pod_of_the_configured_priority_evicts_a_pod_within_another_quotas_guarantee() {
    let rest = simulate(contended(Some(100), 100), 50, |_, _| {}).unwrap();
    assert_eq!(
        (rest.leaves.len(), rest.leaves[0].kind, &rest.leaves[0].victims[0][..]),
        (1, Kind::Priority, "guaranteed")
    );
    assert!(rest.over.contains("urgent") && rest.waits["guaranteed"] == Wait::NoRoom, "it is not taken back: {rest:?}");
    for world in [contended(None, 100), contended(Some(101), 100), contended(Some(0), 50)] {
        let rest = simulate(world, 50, |_, _| {}).unwrap();
        assert!(rest.leaves.is_empty() && rest.within.contains("guaranteed"), "{rest:?}");
    }
}

#[test]
fn a_pod_that_overrides_quotas_stays_within_its_own_maximum() {
    let mut world = contended(Some(100), 100);
    world.quotas.insert(QUOTAS[0].to_owned(), Quota::new(tenths(0)).with_max(Some(tenths(9))).unwrap());
    let rest = simulate(world, 50, |_, _| {}).unwrap();
    assert_eq!((rest.leaves.len(), rest.waits["urgent"]), (0, Wait::LargerThanMax));
}
