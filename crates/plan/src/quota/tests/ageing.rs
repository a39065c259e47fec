//! Tests that a stream of small pods does not starve a large pod.
use proptest::collection::vec;
use proptest::prelude::*;

use super::super::look::Pass;
use super::super::{Gang, Owner, Place, Pod, PodId, Quota, World, look};
use super::config;
use super::worlds::{QUOTAS, Run, settings, tenths};
use crate::ledger::Moment;

/// Quota of the large pod. Some small pods have this quota too.
const OWN: &str = QUOTAS[0];
/// Maximum number of seconds until the pods that are nominated at the time of the reservation are
/// released. Victims terminate within 1 s in these tests. Older nominated pods come first.
const MAX_SETTLING: u64 = 4;

/// What limits the large pod, besides free capacity.
#[derive(Debug, Clone, Copy)]
enum Limit {
    /// All pods borrow.
    Room,
    /// All pods are within a guarantee.
    Guaranteed,
    /// All pods borrow, and the quota has a maximum.
    Max,
    /// All pods borrow, and another quota does not lend its GPU.
    Kept,
    /// No pod may borrow, and the guarantee is only slightly larger than the large pod.
    Never,
}

/// A large pod, and small pods that arrive after it.
#[derive(Debug, Clone)]
struct Stream {
    limit: Limit,
    gpus: usize,
    large: u64,
    /// Seconds that a pod waits before it has waited long.
    ageing: u64,
    /// Seconds that each small pod runs.
    runtime: u64,
    /// Quota, size and GPU of small pods that run when the large pod arrives.
    running: Vec<(usize, u64, usize)>,
    /// Quota and size of the arriving small pods. The list repeats.
    arriving: Vec<(usize, u64)>,
}

fn stream() -> impl Strategy<Value = Stream> {
    let limit = prop_oneof![
        Just(Limit::Room),
        Just(Limit::Guaranteed),
        Just(Limit::Max),
        Just(Limit::Kept),
        Just(Limit::Never)
    ];
    let times = (0..7_u64, 2..7_u64);
    let pods = (vec((0..4_usize, 1..5_u64, 0..3_usize), 0..6), vec((0..4_usize, 1..5_u64), 4..16));
    (limit, 1..4_usize, 6..11_u64, times, pods).prop_map(
        |(limit, gpus, large, (ageing, runtime), (running, arriving))| Stream {
            limit,
            gpus,
            large,
            ageing,
            runtime,
            running,
            arriving,
        },
    )
}

impl Stream {
    fn pod(&self, number: usize, quota: usize, size: u64, created: u64) -> Pod {
        let owner = match (self.limit, QUOTAS.get(quota).filter(|_| quota < 3)) {
            (Limit::Never, _) | (Limit::Guaranteed, None) => Owner::Quota(OWN.to_owned()),
            (_, Some(name)) => Owner::Quota((*name).to_owned()),
            (_, None) => Owner::Unnamed,
        };
        Pod {
            name: format!("p{number:04}"),
            owner,
            charge: tenths(size),
            priority: 0,
            created: Moment(created),
            place: Place::Waiting { nominated: None },
            borrows: !matches!(self.limit, Limit::Never),
            preempts: true,
            protected: None,
            gang: None,
            gpus: None,
        }
    }

    /// Returns the pool at the arrival of the large pod, which is the first pod in the pool.
    fn start(&self) -> World {
        let idle = Quota::new(tenths(10)).with_lend(Some(tenths(0))).unwrap();
        let own = match self.limit {
            Limit::Guaranteed => Quota::new(tenths(100)),
            Limit::Never => Quota::new(tenths(self.large + 1)),
            Limit::Max => Quota::new(tenths(0)).with_max(Some(tenths(self.large + 1))).unwrap(),
            Limit::Room | Limit::Kept => Quota::new(tenths(0)),
        };
        let other = if matches!(self.limit, Limit::Guaranteed) { own } else { Quota::new(tenths(0)) };
        let quotas = [(0, own), (1, other), (2, other)].map(|(at, quota)| (QUOTAS[at].to_owned(), quota));
        let kept = usize::from(matches!(self.limit, Limit::Kept));
        let mut world = World {
            gpus: vec![tenths(10); self.gpus + kept],
            quotas: quotas.into_iter().collect(),
            pods: vec![self.pod(0, 0, self.large, 10)],
            settings: super::super::Settings { ageing: Some(self.ageing), ..settings() },
        };
        if kept > 0 {
            world.quotas.insert("idle".to_owned(), idle);
        }
        let mut free = vec![10; self.gpus];
        for (at, &(quota, size, gpu)) in self.running.iter().enumerate() {
            let gpu = gpu % self.gpus;
            if free[gpu] >= size {
                free[gpu] -= size;
                let mut pod = self.pod(at + 1, quota, size, 10);
                pod.place = Place::Running { gpu, since: Moment(10 - at as u64) };
                world.pods.push(pod);
            }
        }
        world
    }

    /// Returns the number of seconds until the large pod is released, at most `limit`. Also returns
    /// the seconds until capacity is reserved for the pod, and the seconds until all pods that were
    /// nominated at that time have been released.
    fn wait(&self, limit: u64) -> (u64, Option<u64>, Option<u64>) {
        let (mut reserved, mut settled) = (None, None);
        let mut nominated: Vec<String> = Vec::new();
        let mut run = Run::new(self.start());
        let mut arriving = self.arriving.iter().cycle();
        for seconds in 0..limit {
            run.now = Moment(10 + seconds);
            let has_ended =
                |pod: &Pod| matches!(pod.place, Place::Running { since, .. } if since.0 + self.runtime <= run.now.0);
            run.world.pods.retain(|pod| !has_ended(pod));
            while run.world.pods.iter().filter(|pod| matches!(pod.place, Place::Waiting { .. })).count() < 8 {
                let &(quota, size) = arriving.next().unwrap();
                run.add(|number, now| self.pod(number, quota, size, now.0));
            }
            let is_nominated = |pod: &&Pod| matches!(pod.place, Place::Waiting { nominated: Some(_) });
            if reserved.is_none() && Pass::new(&run.world, run.now).state.is_reserved_for(PodId(0)) {
                reserved = Some(seconds);
                nominated = run.world.pods.iter().filter(is_nominated).map(|pod| pod.name.clone()).collect();
            }
            let outcome = look(&run.world, run.now);
            nominated.retain(|name| outcome.released.iter().all(|one| run.world.pod(one.pod).name != *name));
            nominated.retain(|name| run.world.pods.iter().filter(is_nominated).any(|pod| pod.name == *name));
            if reserved.is_some() && nominated.is_empty() && settled.is_none() {
                settled = Some(seconds);
            }
            if outcome.released.iter().any(|released| released.pod.0 == 0) {
                return (seconds, reserved, settled);
            }
            run.apply(&outcome);
            run.replace(false);
        }
        (limit, reserved, settled)
    }
}

proptest! {
    #![proptest_config(config())]

    /// Capacity is reserved for the large pod once it has waited long and the pods that were
    /// released before its creation have ended. Then the pod waits at most until the already
    /// nominated pods are released, and for the run time of a small pod.
    #[test]
    fn a_stream_of_small_pods_does_not_starve_a_large_pod(stream in stream()) {
        let start = stream.ageing.max(stream.runtime);
        let (wait, reserved, settled) = stream.wait(start + 100);
        let is_early = wait <= start || reserved.is_some_and(|reserved| reserved <= start);
        prop_assert!(is_early, "room is reserved after {reserved:?} s, not {start}; waits {wait} s");
        let bound = settled.unwrap_or(start).max(start) + stream.runtime + 1;
        prop_assert!(wait <= bound, "waits {wait} s, not {bound}; reserved {reserved:?}, settled {settled:?}");
        prop_assert!(wait <= start + stream.runtime + MAX_SETTLING, "waits {wait} s; settled {settled:?}");
    }
}

/// Without ageing, the stream starves the large pod.
#[test]
fn without_ageing_a_stream_starves_a_large_pod() {
    let stream = Stream {
        limit: Limit::Guaranteed,
        gpus: 1,
        large: 10,
        ageing: 1_000_000,
        runtime: 3,
        running: vec![(0, 3, 0), (1, 3, 0)],
        arriving: vec![(0, 3), (1, 3), (2, 2)],
    };
    assert_eq!(stream.wait(500).0, 500);
    assert!(Stream { ageing: 2, ..stream }.wait(500).0 <= 7);
}

/// No capacity is reserved for a pod that waits for older pods.
#[test]
fn no_capacity_is_reserved_for_a_pod_that_waits_for_older_pods() {
    let stream = Stream {
        limit: Limit::Room,
        gpus: 1,
        large: 8,
        ageing: 0,
        runtime: 1_000_000,
        running: vec![(1, 5, 0)],
        arriving: vec![(2, 5)],
    };
    let mut world = stream.start();
    world.pods.push(stream.pod(9, 2, 5, 11));
    let released: Vec<usize> = look(&world, Moment(20)).released.iter().map(|released| released.pod.0).collect();
    assert_eq!(released, [2]);
}

/// Nominated pods of the large pod's quota do not delay the reservation, and delay the release only
/// briefly.
#[test]
fn nominated_pods_delay_a_large_pod_only_until_they_have_ended() {
    let stream = Stream {
        limit: Limit::Max,
        gpus: 2,
        large: 8,
        ageing: 6,
        runtime: 5,
        running: vec![(3, 1, 2), (2, 1, 2), (0, 2, 1), (0, 4, 1)],
        arriving: [(0, 2), (3, 1), (0, 2), (0, 3), (1, 4), (3, 2), (3, 2), (3, 4), (1, 1), (2, 3)].to_vec(),
    };
    assert_eq!(stream.wait(100), (10, Some(6), Some(6)));
}

/// Pods that run beside the reserved capacity do not change the GPU of the reservation.
#[test]
fn a_reservation_stays_on_its_gpu_while_other_pods_run_beside_it() {
    let stream = Stream {
        limit: Limit::Max,
        gpus: 2,
        large: 6,
        ageing: 0,
        runtime: 5,
        running: vec![(0, 2, 0), (3, 2, 0), (0, 4, 2), (0, 1, 0)],
        arriving: [(1, 1), (1, 2), (2, 4), (1, 4), (0, 2), (2, 1), (3, 2), (0, 2)].to_vec(),
    };
    let (wait, reserved, _) = stream.wait(100);
    assert!(wait <= 11 && reserved == Some(5), "{wait} {reserved:?}");
}

/// Capacity is reserved for the only pod that a running gang waits for, but not for other pods of
/// gangs.
#[test]
fn capacity_is_reserved_for_the_last_pod_of_a_running_gang() {
    let stream = Stream {
        limit: Limit::Room,
        gpus: 2,
        large: 8,
        ageing: 0,
        runtime: 1_000_000,
        running: vec![(1, 2, 0), (0, 5, 1)],
        arriving: vec![(2, 5)],
    };
    let reserved = |gang_size: usize, runs: bool, waiting: usize| {
        let mut world = stream.start();
        let gang = || Some(Gang { name: "g".to_owned(), size: gang_size });
        let large = world.pods.iter().position(|pod| matches!(pod.place, Place::Waiting { .. })).unwrap();
        world.pods[large].gang = gang();
        for number in 1..waiting {
            let pod = Pod { name: format!("more{number}"), ..world.pods[large].clone() };
            world.pods.push(pod);
        }
        if runs {
            let mate = world.pods.iter().position(|pod| matches!(pod.place, Place::Running { gpu: 1, .. })).unwrap();
            let owner = world.pods[large].owner.clone();
            (world.pods[mate].gang, world.pods[mate].owner) = (gang(), owner);
        }
        // A pod that was created later overtakes the large pod if no capacity is reserved.
        world.pods.push(Pod { place: Place::Running { gpu: 0, since: Moment(12) }, ..stream.pod(50, 2, 3, 11) });
        Pass::new(&world, Moment(20)).state.is_reserved_for(PodId(large))
    };
    assert!(reserved(2, true, 1));
    assert!(!reserved(3, true, 1), "a pod is missing");
    assert!(!reserved(3, true, 2), "two pods wait");
    assert!(!reserved(1, false, 2), "no pod runs");
}
