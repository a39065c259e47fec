//! A stream of small pods does not starve a large pod.
use proptest::collection::vec;
use proptest::prelude::*;

use super::super::look::Pass;
use super::super::{Owner, Place, Pod, PodId, Quota, World, look};
use super::config;
use super::worlds::{QUOTAS, Run, settings, tenths};
use crate::ledger::Moment;

/// Quota of the large pod. Small pods are of this quota too.
const OWN: &str = QUOTAS[0];
/// Maximum number of seconds until the pods are released for which pods left already when room was
/// reserved. A victim terminates within 1 s here. Nominated pods that are older come first.
const MAX_SETTLING: u64 = 4;

/// What limits the large pod, beside room.
#[derive(Debug, Clone, Copy)]
enum Limit {
    /// All pods borrow.
    Room,
    /// All pods are within a guarantee.
    Guaranteed,
    /// All pods borrow, and the quota has a maximum.
    Max,
    /// All pods borrow, and another quota keeps a GPU for itself.
    Kept,
    /// No pod borrows, and the guarantee is little more than the large pod.
    Never,
}

/// A large pod, and small pods that arrive after it.
#[derive(Debug, Clone)]
struct Stream {
    limit: Limit,
    gpus: usize,
    large: u64,
    /// How long a pod waits before it has waited long.
    ageing: u64,
    /// How long each small pod runs.
    runtime: u64,
    /// Quota, size and GPU of small pods that run already.
    running: Vec<(usize, u64, usize)>,
    /// Quota and size of the small pods that arrive, again and again.
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
            pieces: Vec::new(),
            gpus: None,
        }
    }

    /// Returns the pool when the large pod arrives, which is the first pod.
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

    /// Returns after how many seconds the large pod is released, at most `limit`. Also returns
    /// after how many seconds room is reserved for it, and the pods have been released for which
    /// room was kept at that time.
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

    /// Room is reserved for the large pod once it has waited long and the pods have ended that were
    /// released before its creation. Then it waits at most until the pods are released for which
    /// pods left already, and as long as a small pod runs.
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

/// A pod that waits for older pods reserves nothing.
#[test]
fn no_room_is_reserved_beside_older_pods() {
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

/// Pods of the large pod's quota for which pods leave when room is reserved postpone neither the
/// reservation nor, for long, the release.
#[test]
fn pods_for_which_pods_leave_delay_a_large_pod_only_until_they_have_ended() {
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

/// Pods that run beside the reserved room do not change the GPU on which room is reserved.
#[test]
fn room_stays_reserved_on_a_gpu_that_pods_share_with_it() {
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
