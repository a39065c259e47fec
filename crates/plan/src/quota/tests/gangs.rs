//! Tests the rules for gangs.
use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::super::{Amount, Class, Exchange, Gang, Kind, Outcome, Owner, Place, Pod, PodId, Quota, Wait, World};
use super::super::{look, simulate};
use super::config;
use super::inputs::{assert_rebuilt, named};
use super::naive::Pool;
use super::steps::{each_pass, each_step, steps};
use super::worlds::{
    ANY, Guarantees, QUOTAS, Run, Shape, Start, count, describe, histories_of, settings, tenths, worlds,
};
use crate::ledger::Moment;

const GANGS: Shape = Shape { gangs: true, pods: 4..15, ..ANY };

/// Worlds in which the promises have no exceptions.
const PLAIN: Shape = Shape { flags: false, counted_only: false, ..GANGS };

type GangKey = (Owner, String);

/// Returns the pods of each gang, without terminating pods.
fn gangs(pool: &Pool) -> BTreeMap<GangKey, Vec<usize>> {
    let mut gangs: BTreeMap<GangKey, Vec<usize>> = BTreeMap::new();
    for pod in pool.pods() {
        let one = &pool.world.pods[pod];
        if let (Some(gang), false) = (&one.gang, matches!(one.place, Place::Leaving { .. })) {
            gangs.entry((pool.owner(pod), gang.name.clone())).or_default().push(pod);
        }
    }
    gangs
}

fn size(pool: &Pool, members: &[usize]) -> usize {
    // Terminating pods do not belong to the gang, but the size that they state counts.
    let owner = pool.owner(members[0]);
    let name = &pool.world.pods[members[0]].gang.as_ref().unwrap().name;
    let of_gang = pool.world.pods.iter().enumerate().filter(|(pod, _)| pool.owner(*pod) == owner);
    let sizes = of_gang.filter_map(|(_, pod)| pod.gang.as_ref().filter(|gang| gang.name == *name));
    sizes.map(|gang| gang.size).max().unwrap()
}

/// Returns the priority of a pod's gang, including pods that were evicted during the pass.
fn priority_at_start(pool: &Pool, pod: usize) -> i32 {
    let gang = |pod: usize| pool.world.pods[pod].gang.as_ref().map(|gang| (pool.owner(pod), &gang.name));
    let same = pool.pods().filter(|&other| other == pod || gang(pod).is_some() && gang(pod) == gang(other));
    same.map(|other| pool.world.pods[other].priority).max().unwrap()
}

fn waits(pool: &Pool, pod: usize) -> bool {
    matches!(pool.world.pods[pod].place, Place::Waiting { .. })
}

/// Checks that a pass treats the pods of each gang alike.
fn assert_gangs_stay_together(pool: &Pool, outcome: &Outcome) {
    let show = || format!("{pool:?}{outcome:?}");
    let released: BTreeSet<usize> = outcome.released.iter().map(|released| released.pod.0).collect();
    let evicted: BTreeSet<usize> = outcome.exchanges.iter().flat_map(|one| &one.victims).map(|pod| pod.0).collect();
    for members in gangs(pool).values() {
        let waiting: Vec<usize> = members.iter().copied().filter(|&pod| waits(pool, pod)).collect();
        let gone = members.iter().filter(|pod| evicted.contains(pod)).count();
        let running = members.len() - waiting.len();
        let starts = waiting.iter().filter(|pod| released.contains(pod)).count();
        assert!(starts == 0 || starts == waiting.len(), "some are released: {}", show());
        let kept = waiting.iter().filter(|&&pod| outcome.nominations.contains_key(&PodId(pod))).count();
        assert!(kept == 0 || kept == waiting.len(), "some are nominated: {}", show());
        if starts + kept > 0 {
            assert!(members.len() >= size(pool, members), "pods are missing: {}", show());
        }
        // After the running pods were evicted, the waiting pods may be enough for the gang.
        let is_new = gone == running && starts >= size(pool, members);
        assert!(gone == 0 || gone == running + starts || is_new, "some are evicted: {}", show());
        if kept > 0 && gone > 0 {
            assert!(waiting.len() >= size(pool, members), "nominations are kept without the evicted pods: {}", show());
        }
    }
    for Exchange { victims, .. } in &outcome.exchanges {
        let unique: BTreeSet<&PodId> = victims.iter().collect();
        assert_eq!(unique.len(), victims.len(), "{}", show());
    }
}

/// Returns whether pods fit into the free capacity of GPUs. Tries all combinations.
fn fit(pods: &[Amount], rooms: &mut Vec<Amount>) -> bool {
    let Some((first, rest)) = pods.split_first() else { return true };
    (0..rooms.len()).any(|gpu| {
        let before = rooms[gpu];
        if before < *first {
            return false;
        }
        rooms[gpu] = before.minus(*first);
        let fits = fit(rest, rooms);
        rooms[gpu] = before;
        fits
    })
}

/// Returns the free capacity that each GPU would have without the pods that `leaves` selects.
fn rooms(pool: &Pool, leaves: impl Fn(usize) -> bool) -> Vec<Amount> {
    let on = |gpu: usize| pool.sum(|pod| pool.counts_on(pod) == Some(gpu) && !leaves(pod));
    (0..pool.world.gpus.len()).map(|gpu| pool.world.gpus[gpu].minus(on(gpu))).collect()
}

/// Returns the complete gangs whose pods all wait.
fn whole_gangs(pool: &Pool) -> Vec<Vec<usize>> {
    let whole =
        |members: &Vec<usize>| members.iter().all(|&pod| waits(pool, pod)) && members.len() >= size(pool, members);
    gangs(pool).into_values().filter(whole).collect()
}

proptest! {
    #![proptest_config(config())]

    /// Each pass releases all waiting pods of a gang or none, nominates all or none, and evicts all
    /// running pods or none.
    #[test]
    fn pods_of_a_gang_are_released_nominated_and_evicted_together(history in histories_of(&GANGS)) {
        each_pass(&history, |run, outcome| assert_gangs_stay_together(&Pool::at(run.world.clone(), run.now), outcome));
    }

    /// The rules R1 to R4 also apply to gangs.
    #[test]
    fn exchanges_with_gangs_follow_the_rules(history in histories_of(&GANGS)) {
        each_step(&history, |step| {
            let owner = step.after.owner(step.pod.0);
            let quota = step.after.quota(&owner);
            let max = quota.max().filter(|_| quota.is_enforced() && step.released.is_some());
            assert!(max.is_none_or(|max| step.after.held(&owner) <= max), "{step:?}");
            let Some(exchange) = &step.exchange else { return };
            let (before, after) = (step.before.classes(), step.after.classes());
            let share = |pod: usize| step.after.share(&step.after.owner(pod), Amount::ZERO, Amount::ZERO);
            for &PodId(victim) in &exchange.victims {
                let theirs = step.before.owner(victim);
                assert!(step.before.world.pods[victim].priority < 2_000_000_000, "{step:?}");
                match exchange.kind {
                    Kind::Priority => assert!(step.before.priority(victim) < priority_at_start(&step.before, step.pod.0), "{step:?}"),
                    _ => assert!(theirs != owner && before.of[&victim] == Class::Over && step.before.quota(&theirs).is_enforced(), "{step:?}"),
                }
                assert!(exchange.kind != Kind::FairShare || share(step.pod.0) <= share(victim), "{step:?}");
            }
            if exchange.kind == Kind::Reclaim {
                assert_eq!(after.of[&step.pod.0], Class::In, "{step:?}");
                assert!(quota.cells().is_some() || step.after.used(&owner) <= quota.min(), "{step:?}");
            }
        });
    }

    /// Pods within a guarantee use no more than the guarantee, and the pods of a gang have one
    /// class.
    #[test]
    fn all_pods_of_a_gang_have_one_class(history in histories_of(&GANGS)) {
        each_pass(&history, |run, outcome| {
            let mut run = run.clone();
            run.apply(outcome);
            let pool = Pool::at(run.world.clone(), run.now);
            let again = look(&run.world, run.now);
            let class = |pod: usize| again.classes[pod];
            for members in gangs(&pool).values() {
                let running: BTreeSet<_> = members.iter().filter(|&&pod| !waits(&pool, pod)).map(|&pod| class(pod)).collect();
                let evicted = running.contains(&None);
                assert!(evicted || running.len() <= 1, "{}", describe(&run.world));
            }
            for owner in pool.owners().into_iter().filter(|owner| pool.quota(owner).is_enforced()) {
                let within = pool.sum(|pod| pool.owner(pod) == owner && class(pod) == Some(Class::In));
                let quota = pool.quota(&owner);
                assert!(quota.cells().is_some() || within <= quota.min(), "{}", describe(&run.world));
            }
        });
    }

    /// The order of the input does not matter, and the state depends only on the pods.
    #[test]
    fn decisions_about_gangs_depend_only_on_the_pods(history in histories_of(&GANGS), rotation in any::<usize>()) {
        each_pass(&history, |run, outcome| {
            let mut other = run.world.clone();
            let length = other.pods.len().max(1);
            other.pods.rotate_left(rotation % length);
            if rotation % 2 == 1 {
                other.pods.reverse();
            }
            let all = |_: &Pod| true;
            let shuffled = look(&other, run.now);
            assert_eq!(named(&run.world, outcome, all), named(&other, &shuffled, all), "{}", describe(&run.world));
            steps(&run.world, run.now, assert_rebuilt);
        });
    }

    /// The pool comes to rest within 50 passes, although evicted pods are replaced at once, and no
    /// pod is evicted more than three times. No two gangs wait for each other: a waiting gang does
    /// not fit into the free capacity, and a waiting gang within its guarantee would not fit
    /// without all borrowing pods.
    #[test]
    fn pools_with_gangs_come_to_rest(start in worlds(&PLAIN)) {
        let rest = simulate(start.0.clone(), 50, |world, outcome| assert_gangs_stay_together(&Pool::at(world.clone(), Moment(0)), outcome));
        prop_assert!(rest.is_ok());
        let rest = rest.unwrap();
        let times = count(rest.leaves.iter().flat_map(|leave| &leave.victims));
        prop_assert!(times.values().all(|times| *times <= 3), "{times:?}");
        let pool = Pool::at(rest.world.clone(), Moment(u64::MAX / 2));
        let classes = pool.classes();
        let keeps_room = pool.owners().iter().any(|owner| pool.quota(owner).unlent() > Amount::ZERO);
        for members in whole_gangs(&pool) {
            let owner = pool.owner(members[0]);
            let quota = pool.quota(&owner);
            let charges: Vec<Amount> = members.iter().map(|&pod| pool.charge(pod)).collect();
            let charge: Amount = charges.iter().copied().sum();
            if quota.max().is_some_and(|max| pool.held(&owner).plus(charge) > max) {
                continue;
            }
            let is_within = quota.cells().is_none() && pool.used(&owner).plus(charge) <= quota.min();
            if is_within || !keeps_room {
                prop_assert!(!fit(&charges, &mut rooms(&pool, |_| false)), "{members:?} fit: {}", describe(&pool.world));
            }
            let may_leave = |other: usize| classes.of.get(&other) == Some(&Class::Over);
            if is_within {
                prop_assert!(!fit(&charges, &mut rooms(&pool, may_leave)), "{members:?} may reclaim: {}", describe(&pool.world));
            }
        }
    }

    /// In an empty pool, a gang within its guarantee is released, even if several gangs need the
    /// same GPUs.
    #[test]
    fn in_an_empty_pool_one_of_many_gangs_is_released(Start(mut start) in worlds(&PLAIN)) {
        start.pods.iter_mut().for_each(|pod| pod.place = Place::Waiting { nominated: None });
        let rest = simulate(start, 50, |_, _| {}).unwrap();
        let pool = Pool::at(rest.world.clone(), Moment(u64::MAX / 2));
        if rest.within.is_empty() && rest.over.is_empty() {
            for members in whole_gangs(&pool) {
                let charges: Vec<Amount> = members.iter().map(|&pod| pool.charge(pod)).collect();
                let quota = pool.quota(&pool.owner(members[0]));
                let is_within = charges.iter().copied().sum::<Amount>() <= quota.min() && quota.cells().is_none();
                prop_assert!(!is_within || !fit(&charges, &mut rooms(&pool, |_| false)), "{}", describe(&pool.world));
            }
        }
    }

    /// A gang of one pod is treated like a pod without a gang, unless pods are evicted for it: a
    /// gang chooses victims among the pods of all GPUs. Worlds with cells are excluded, because
    /// gangs choose GPUs differently there.
    #[test]
    fn a_gang_of_one_pod_is_treated_like_a_pod_without_a_gang(history in histories_of(&Shape { guarantees: Guarantees::Counts, ..ANY })) {
        each_pass(&history, |run, outcome| {
            let mut world = run.world.clone();
            for pod in &mut world.pods {
                pod.gang = Some(Gang { name: pod.name.clone(), size: 1 });
            }
            world.settings.ageing = None;
            let mut without = run.world.clone();
            without.settings.ageing = None;
            let (one, other) = (look(&without, run.now), look(&world, run.now));
            let is_simple = |outcome: &Outcome| outcome.nominations.is_empty() && outcome.exchanges.is_empty();
            if [&one, &other, outcome].into_iter().all(is_simple) {
                assert_eq!(one.released, other.released, "{}", describe(&world));
                assert_eq!(one.classes, other.classes, "{}", describe(&world));
            }
        });
    }
}

fn member(name: &str, quota: usize, size: u64, gang: (&str, usize), gpu: Option<usize>) -> Pod {
    Pod {
        name: name.to_owned(),
        owner: Owner::Quota(QUOTAS[quota].to_owned()),
        charge: tenths(size),
        priority: 0,
        created: Moment(1),
        place: gpu.map_or(Place::Waiting { nominated: None }, |gpu| Place::Running { gpu, since: Moment(1) }),
        borrows: true,
        preempts: true,
        protected: None,
        gang: Some(Gang { name: gang.0.to_owned(), size: gang.1 }),
        pieces: Vec::new(),
        gpus: None,
    }
}

fn pool(gpus: usize, mins: &[u64], pods: Vec<Pod>) -> World {
    let quotas = QUOTAS.iter().zip(mins).map(|(name, min)| ((*name).to_owned(), Quota::new(tenths(*min))));
    World { gpus: vec![tenths(10); gpus], quotas: quotas.collect(), pods, settings: settings() }
}

#[test]
fn an_incomplete_gang_has_no_nominations() {
    let mut world = pool(2, &[20], vec![member("a1", 0, 10, ("g", 2), None), member("x", 0, 10, ("h", 1), None)]);
    world.pods[0].place = Place::Waiting { nominated: Some(0) };
    let outcome = look(&world, Moment(9));
    assert_eq!(outcome.waits, BTreeMap::from([(PodId(0), Wait::GangIncomplete)]));
    assert_eq!(outcome.released.iter().map(|released| released.pod.0).collect::<Vec<_>>(), [1]);
    assert!(outcome.nominations.is_empty());
    world.pods.push(member("a2", 0, 10, ("g", 2), None));
    let released: Vec<usize> = look(&world, Moment(9)).released.iter().map(|released| released.pod.0).collect();
    assert_eq!(released, [0, 2], "the gang has the first name");
}

#[test]
fn two_gangs_that_want_the_same_gpus_do_not_block_each_other() {
    let of = |gang: &'static str| {
        (0..2).map(move |at| member(&format!("{gang}{at}"), 0, 10, (gang, 2), None)).collect::<Vec<_>>()
    };
    let rest = simulate(pool(3, &[40], [of("g"), of("h")].concat()), 50, |_, _| {}).unwrap();
    assert_eq!(rest.within.iter().collect::<Vec<_>>(), ["g0", "g1"]);
    assert_eq!(rest.waits.values().collect::<Vec<_>>(), [&Wait::NoRoom, &Wait::NoRoom]);
}

#[test]
fn a_gang_is_evicted_and_counted_as_a_whole() {
    // The gang of `b` borrows on both GPUs. The pod of `a` needs a whole GPU.
    let gang = || vec![member("b1", 1, 5, ("g", 2), Some(0)), member("b2", 1, 5, ("g", 2), Some(1))];
    let mut pods = gang();
    pods.push(member("b3", 1, 5, ("h", 1), Some(0)));
    pods.push(member("a1", 0, 10, ("i", 1), None));
    let rest = simulate(pool(2, &[10, 5], pods), 50, |_, _| {}).unwrap();
    let left: Vec<_> = rest.leaves.iter().map(|leave| (leave.kind, leave.victims.join(" "))).collect();
    assert_eq!(left, [(Kind::Reclaim, "b1 b2".to_owned())], "b3 is within the guarantee, the gang is not");
    assert_eq!(rest.within.iter().collect::<Vec<_>>(), ["a1", "b3"]);
}

#[test]
fn pods_on_several_gpus_are_evicted_for_a_gang_and_their_gpus_are_nominated() {
    let borrowers = (0..3).map(|at| member(&format!("b{at}"), 1, 10, (&format!("b{at}"), 1), Some(at)));
    let mut pods: Vec<Pod> = borrowers.collect();
    pods.extend((0..2).map(|at| member(&format!("a{at}"), 0, 10, ("g", 2), None)));
    let mut run = Run::new(pool(3, &[20], pods));
    run.world.pods[0].priority = 5;
    let outcome = look(&run.world, run.now);
    assert_eq!(outcome.exchanges[0].victims, [PodId(1), PodId(2)]);
    assert_eq!(outcome.nominations.len(), 2);
    run.apply(&outcome);
    // One of the two victims has exited. The gang waits for the other victim, and no other pod gets
    // the freed GPU.
    run.world.pods.remove(1);
    run.world.pods.push(member("c", 2, 10, ("c", 1), None));
    let outcome = look(&run.world, run.now);
    assert!(outcome.released.is_empty() && outcome.nominations.len() == 2);
    run.apply(&outcome);
    run.world.pods.remove(1);
    assert_eq!(look(&run.world, run.now).released.len(), 2);
}
