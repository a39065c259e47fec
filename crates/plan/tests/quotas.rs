//! Tests quotas: worlds with results worked out by hand, and properties of random worlds.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
use std::collections::BTreeMap;

use cleave_plan::ledger::Moment;
use cleave_plan::quota::{Amount, Kind, Owner, Place, Pod, PodId, Quota, Settings, Wait, World, simulate};
use proptest::prelude::*;

const TENTH: u64 = 100_000;

fn settings() -> Settings {
    Settings {
        min_runtime_fair_share: 0,
        min_runtime_reclaim: 0,
        budget_patience: None,
        ageing: None,
        max_preemptors: usize::MAX,
        ..Settings::default()
    }
}

fn pod(name: &str, quota: &str, tenths: u64, priority: i32, created: u64, gpu: Option<usize>) -> Pod {
    let place = match gpu {
        Some(gpu) => Place::Running { gpu, since: Moment(created) },
        None => Place::Waiting { nominated: None },
    };
    Pod {
        name: name.to_owned(),
        owner: if quota == "-" { Owner::Unnamed } else { Owner::Quota(quota.to_owned()) },
        charge: Amount(tenths * TENTH),
        priority,
        created: Moment(created),
        place,
        borrows: true,
        preempts: true,
        protected: None,
        gang: None,
        gpus: None,
    }
}

fn world(gpus: &[u64], quotas: &[(&str, u64)], pods: Vec<Pod>) -> World {
    let quotas = quotas.iter().map(|&(name, min)| (name.to_owned(), Quota::new(Amount(min * TENTH))));
    let gpus = gpus.iter().map(|size| Amount(size * TENTH)).collect();
    World { gpus, quotas: quotas.collect(), pods, settings: settings() }
}

fn left(world: World) -> Vec<(Kind, String, Vec<String>)> {
    let rest = simulate(world, 50, |_, _| {}).unwrap();
    rest.leaves.into_iter().map(|leave| (leave.kind, leave.taker, leave.victims)).collect()
}

#[test]
fn a_guaranteed_pod_takes_the_least_important_borrower() {
    // a guarantees 4 of 10. x and y borrow, y has the lower priority.
    let pods = vec![pod("x", "-", 5, 9, 1, Some(0)), pod("y", "-", 5, 0, 2, Some(0)), pod("a1", "a", 4, 0, 3, None)];
    let leaves = left(world(&[10], &[("a", 4)], pods));
    assert_eq!(leaves, [(Kind::Reclaim, "a1".to_owned(), vec!["y".to_owned()])]);
}

#[test]
fn at_the_maximum_a_pod_on_another_gpu_leaves() {
    // low leaves room below the maximum of 8. Its own GPU has too little room for high.
    let pods =
        vec![pod("other", "-", 6, 0, 1, Some(0)), pod("low", "a", 4, 0, 2, Some(0)), pod("high", "a", 8, 9, 3, None)];
    let mut world = world(&[10, 10], &[("a", 8)], pods);
    let quota = Quota::new(Amount(8 * TENTH)).with_max(Some(Amount(8 * TENTH))).unwrap();
    world.quotas.insert("a".to_owned(), quota);
    let rest = simulate(world, 50, |_, _| {}).unwrap();
    assert_eq!((rest.leaves[0].kind, rest.leaves[0].victims.as_slice()), (Kind::Priority, &["low".to_owned()][..]));
    assert_eq!(rest.waits["low"], Wait::OverMax);
}

fn random_world() -> impl Strategy<Value = World> {
    let gpus = prop::collection::vec(prop_oneof![1 => Just(0_u64), 6 => Just(10)], 1..5);
    let quotas = prop::collection::vec((0..16_u64, prop::option::of(0..12_u64), 1..4_i64, any::<bool>()), 1..5);
    let row = (0..6_usize, prop::sample::select(vec![1, 2, 3, 4, 5, 8, 10_u64]), -1..3_i32, any::<bool>(), 0..9_u8);
    (gpus, quotas, prop::collection::vec(row, 2..15)).prop_map(|(gpus, limits, rows)| {
        let names = ["a", "b", "c", "d"];
        let mut built = world(&gpus, &[], Vec::new());
        for (name, (min, more, weight, lends)) in names.iter().zip(&limits) {
            let amount = |tenths: u64| Amount(tenths * TENTH);
            let quota = Quota::new(amount(*min)).with_max(more.map(|more| amount(min + more))).unwrap();
            let quota = quota.with_lend((!lends).then_some(amount(min / 2))).unwrap().with_weight(*weight).unwrap();
            built.quotas.insert((*name).to_owned(), quota);
        }
        let mut used = vec![0; gpus.len()];
        for (at, (quota, tenths, priority, runs, flags)) in rows.into_iter().enumerate() {
            let quota = names.get(quota).filter(|name| built.quotas.contains_key(**name)).copied().unwrap_or("-");
            let gpu = (0..gpus.len()).find(|&gpu| runs && used[gpu] + tenths <= gpus[gpu]);
            used.iter_mut().enumerate().filter(|(at, _)| Some(*at) == gpu).for_each(|(_, used)| *used += tenths);
            let mut one = pod(&format!("p{at:02}"), quota, tenths, priority, at as u64 + 1, gpu);
            (one.borrows, one.protected) = (flags != 0, (flags == 1).then_some(Moment(0)));
            built.pods.push(one);
        }
        built
    })
}

fn used(world: &World, owner: &Owner, without: &[PodId]) -> Amount {
    let pods = world.pods.iter().enumerate().filter(|(at, pod)| pod.owner == *owner && !without.contains(&PodId(*at)));
    pods.filter(|(_, pod)| matches!(pod.place, Place::Running { .. })).map(|(_, pod)| pod.charge).sum()
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: std::env::var("QUOTA_WORLDS").ok().and_then(|worlds| worlds.parse().ok()).unwrap_or(2000),
        ..ProptestConfig::default()
    })]

    /// The pool comes to rest within 50 passes, and nobody leaves more than twice. Maxima hold for
    /// pods that are released, no GPU is overfull, victims are of another quota (of the own one for
    /// priority), and protected pods stay.
    #[test]
    fn random_worlds_come_to_rest_and_keep_the_rules(start in random_world()) {
        let rest = simulate(start.clone(), 50, |before, outcome| {
            for exchange in &outcome.exchanges {
                for victim in &exchange.victims {
                    let (taker, victim) = (before.pod(exchange.taker), before.pod(*victim));
                    assert_eq!(taker.owner == victim.owner, exchange.kind == Kind::Priority);
                    assert!(victim.protected.is_none() || matches!(victim.place, Place::Waiting { .. }));
                }
            }
        });
        prop_assert!(rest.is_ok(), "{start:?}");
        let rest = rest.unwrap();
        let mut evictions: BTreeMap<&str, u32> = BTreeMap::new();
        rest.leaves.iter().flat_map(|leave| &leave.victims).for_each(|pod| *evictions.entry(pod).or_default() += 1);
        prop_assert!(evictions.values().all(|times| *times <= 2), "{evictions:?}");
        for (name, quota) in &rest.world.quotas {
            let owner = Owner::Quota(name.clone());
            let limit = quota.max().map(|max| max.max(used(&start, &owner, &[])));
            prop_assert!(limit.is_none_or(|limit| used(&rest.world, &owner, &[]) <= limit), "{name}");
            let within = rest.world.pods.iter().filter(|pod| pod.owner == owner && rest.within.contains(&pod.name));
            prop_assert!(within.map(|pod| pod.charge).sum::<Amount>() <= quota.min());
        }
        for (gpu, size) in rest.world.gpus.iter().enumerate() {
            let on = rest.world.pods.iter().filter(|pod| matches!(pod.place, Place::Running { gpu: at, .. } if at == gpu));
            prop_assert!(on.map(|pod| pod.charge).sum::<Amount>() <= *size);
        }
    }
}
