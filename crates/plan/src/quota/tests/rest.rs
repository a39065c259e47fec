//! Tests the properties R5 and R6 of a pool at rest.
use proptest::option;
use proptest::prelude::*;

use super::super::{Amount, Class, Kind, Owner, Place, Quota, Rest, World, simulate};
use super::config;
use super::naive::Pool;
use super::worlds::{ANY, Guarantees, Shape, Start, count, describe, worlds};
use crate::ledger::Moment;

const SYSTEM: i32 = 2_000_000_000;

/// Worlds in which the promises have no exceptions.
const PLAIN: Shape = Shape { flags: false, counted_only: false, ..ANY };

fn at_rest(start: World) -> Rest {
    simulate(start, 50, |_, _| {}).unwrap()
}

/// Returns the pool at rest, and the waiting pods.
fn pool_of(rest: &Rest) -> (Pool, Vec<usize>) {
    let pool = Pool::at(rest.world.clone(), Moment(u64::MAX / 2));
    let waits = |pod: &usize| matches!(rest.world.pods[*pod].place, Place::Waiting { .. });
    let waiting = (0..rest.world.pods.len()).filter(waits).collect();
    (pool, waiting)
}

/// Returns the free capacity of a GPU without some of its pods.
fn room_without(pool: &Pool, gpu: usize, leaves: impl Fn(usize) -> bool) -> Amount {
    let pods = pool.world.pods.iter().enumerate();
    let stay =
        pods.filter(|(at, pod)| matches!(pod.place, Place::Running { gpu: on, .. } if on == gpu) && !leaves(*at));
    pool.world.gpus[gpu].minus(stay.map(|(_, pod)| pod.charge).sum())
}

fn show(rest: &Rest) -> String {
    format!("{}{:?}, over {:?}", describe(&rest.world), rest.leaves, rest.over)
}

proptest! {
    #![proptest_config(config())]

    /// The pool comes to rest within 50 passes although evicted pods are replaced at once, and no
    /// pod is evicted more than twice.
    #[test]
    fn r5_the_pool_comes_to_rest(Start(mut start) in worlds(&ANY), ageing in option::of(0..20_u64)) {
        start.settings.ageing = ageing;
        let rest = simulate(start, 50, |_, _| {});
        prop_assert!(rest.is_ok());
        let leaves = rest.unwrap().leaves;
        let times = count(leaves.iter().flat_map(|leave| &leave.victims));
        prop_assert!(times.values().all(|times| *times <= 2), "{times:?}");
    }

    /// P2: a pod within its quota's guarantee waits only if it would fit on no GPU even without all
    /// borrowing pods that may be evicted.
    #[test]
    fn r6_a_pod_within_its_guarantee_waits_only_for_fragmentation(start in worlds(&ANY)) {
        let rest = at_rest(start.0);
        let (pool, waiting) = pool_of(&rest);
        let classes = pool.classes();
        for pod in waiting {
            let (one, owner) = (&pool.world.pods[pod], pool.owner(pod));
            let quota = pool.quota(&owner);
            let is_within = quota.cells().is_none() && pool.is_within(pod) && quota.is_enforced() && one.preempts;
            if !is_within {
                continue;
            }
            let may_leave = |other: usize| {
                let other_pod = &pool.world.pods[other];
                classes.of.get(&other) == Some(&Class::Over)
                    && pool.quota(&pool.owner(other)).is_enforced()
                    && other_pod.protected.is_none()
                    && other_pod.priority < SYSTEM
            };
            for gpu in 0..pool.world.gpus.len() {
                prop_assert!(room_without(&pool, gpu, may_leave) < one.charge, "{} on {gpu}: {}", one.name, show(&rest));
            }
        }
    }

    /// P3: if all quotas guarantee cells, and the pool has enough healthy GPUs for all guarantees,
    /// no pod waits whose quota owns fewer cells than its guarantee and stays within its maximum
    /// with the pod.
    #[test]
    fn r6_in_cells_no_pod_within_its_guarantee_waits(
        Start(mut start) in worlds(&Shape { guarantees: Guarantees::Cells, ..PLAIN }),
    ) {
        let healthy = start.gpus.iter().filter(|size| **size > Amount::ZERO).count();
        while start.quotas.values().filter_map(Quota::cells).sum::<usize>() > healthy {
            start.quotas.pop_first();
        }
        let rest = at_rest(start);
        let (pool, waiting) = pool_of(&rest);
        let classes = pool.classes();
        for pod in waiting {
            let owner = pool.owner(pod);
            let (cells, max) = (pool.quota(&owner).cells().unwrap_or(0), pool.quota(&owner).max());
            // Pods of the quota that borrow elsewhere count against its maximum.
            if max.is_some_and(|max| pool.held(&owner).plus(pool.world.pods[pod].charge) > max) {
                continue;
            }
            prop_assert!(classes.cells(&owner) >= cells, "{} waits: {}", pool.world.pods[pod].name, show(&rest));
        }
    }

    /// P6: if no quota keeps capacity from borrowers, a borrowing pod waits only if an eviction
    /// would be unfair. With the pod, its quota would have a higher share than the quota of each
    /// possible victim without the victim.
    #[test]
    fn r6_fair_share_is_fair_up_to_one_pod(start in worlds(&ANY)) {
        let rest = at_rest(start.0);
        let (pool, waiting) = pool_of(&rest);
        let classes = pool.classes();
        let keeps_room = pool.owners().iter().any(|owner| pool.quota(owner).unlent() > Amount::ZERO);
        for pod in waiting.into_iter().filter(|_| !keeps_room) {
            let (one, owner) = (&pool.world.pods[pod], pool.owner(pod));
            let quota = pool.quota(&owner);
            let exceeds = quota.max().is_some_and(|max| pool.used(&owner).plus(one.charge) > max);
            if exceeds || !quota.is_enforced() || !one.preempts || !one.borrows || pool.is_within(pod) {
                continue;
            }
            for (at, victim) in pool.world.pods.iter().enumerate() {
                let Place::Running { gpu, .. } = victim.place else { continue };
                let other = pool.owner(at);
                let may_leave = classes.of[&at] == Class::Over
                    && other != owner
                    && other != Owner::Outside
                    && pool.quota(&other).is_enforced()
                    && victim.protected.is_none()
                    && victim.priority < SYSTEM;
                let has_room = room_without(&pool, gpu, |leaver| leaver == at) >= one.charge;
                // In a pool with cells, the exchange can change the classes of other pods.
                if may_leave && has_room && pool.meets_rules_after(pod, Kind::FairShare, gpu, &[at]) {
                    let share = pool.share(&owner, one.charge, Amount::ZERO);
                    let theirs = pool.share(&other, Amount::ZERO, victim.charge);
                    prop_assert!(share > theirs, "{} could take from {}: {}", one.name, victim.name, show(&rest));
                }
            }
        }
    }
}
