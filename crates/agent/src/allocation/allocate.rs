//! What the kubelet is answered: which slices to take, and what a container gets that holds them.
//! Pure.
//!
//! Shares under MPS, and turns where it can be, are of one GPU. `Allocate` answers from what is
//! served; a daemon that is away is no reason to refuse, since the container's start waits for it.
use std::collections::{BTreeMap, BTreeSet};

use super::pending::Kept;
use super::{Allocation, MpsLimits};
use crate::gpu::layout::{Kind, Pool, parse_id};

/// Longest sentence part that repeats what a caller sent.
const ECHO: usize = 80;

/// The pools of one resource, with what is needed to choose among them.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// The resource.
    pub resource: &'a str,
    /// Its pools on all devices.
    pub pools: &'a [Pool],
    /// Kept of the resource for pods that have not asked yet.
    pub kept: &'a [Kept<'a>],
}

impl<'a> View<'a> {
    fn pool(&self, id: &str) -> Option<&'a Pool> {
        let (device, number) = parse_id(id)?;
        self.pools.iter().find(|pool| pool.resource == self.resource && pool.holds(device, number))
    }
}

/// A choice of slices.
#[derive(Debug, Clone, Copy)]
pub struct Choice<'a> {
    /// What may be chosen from, `must_include` among it. The order means nothing.
    pub available: &'a [String],
    /// What must be part of the answer.
    pub must_include: &'a [String],
    /// How many to choose, `must_include` counted.
    pub size: usize,
}

/// Which slices to take.
///
/// All of one GPU, if one has them: of those, first one on which some are kept for a request of
/// just this size, in the order of what is kept; then one where the rest of the free slices still
/// holds what is kept there; then the one with the fewest free slices; then the first by UUID.
/// Where none has them, those with the most free, so that the fewest are touched. Lowest numbers
/// first. What must be included is.
pub fn prefer(view: &View<'_>, request: &Choice<'_>) -> Vec<String> {
    let must: BTreeSet<&str> = request.must_include.iter().map(String::as_str).collect();
    let mut free: BTreeMap<&str, BTreeSet<(u32, &str)>> = BTreeMap::new();
    for id in request.available {
        if let (Some((device, number)), Some(_)) = (parse_id(id), view.pool(id)) {
            free.entry(device).or_default().insert((number, id));
        }
    }
    let mut chosen: Vec<&str> = must.iter().copied().take(request.size).collect();
    let started: BTreeSet<&str> = must.iter().filter_map(|id| parse_id(id)).map(|(device, _)| device).collect();
    let room =
        |device: &str| free.get(device).map_or(0, |slices| slices.iter().filter(|(_, id)| !must.contains(id)).count());
    let missing = request.size.saturating_sub(chosen.len());
    let mut order: Vec<&str> = free.keys().copied().collect();
    order.sort_by_cached_key(|&device| {
        let free = room(device);
        let fits = free >= missing && (started.is_empty() || started.len() == 1 && started.contains(device));
        let kept = || view.kept.iter().filter(|kept| kept.device == device);
        let is_for_this = |kept: &Kept<'_>| kept.sizes.iter().any(|size| *size as usize == request.size);
        // An init container's request is for a part of what is kept, so that it matters whose is
        // first.
        let turn = view.kept.iter().position(|kept| kept.device == device && is_for_this(kept));
        let for_this = turn.is_some();
        let for_all = kept().fold(0_usize, |sum, kept| sum.saturating_add(kept.units as usize));
        let spares_others = for_this || free >= missing.saturating_add(for_all);
        let size = if fits { free } else { usize::MAX - free };
        (!fits, !started.contains(device), turn.unwrap_or(usize::MAX), !spares_others, size, device)
    });
    for device in order {
        for (_, id) in free.get(device).into_iter().flatten() {
            if chosen.len() < request.size && !must.contains(id) {
                chosen.push(id);
            }
        }
    }
    chosen.into_iter().map(str::to_owned).collect()
}

/// Why no container can be given these ids: a sentence for the pod's events.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// They are shares of several GPUs: the pod came around the gate, or what was held for it is
    /// gone.
    #[error("{0}")]
    Split(String),
    /// They make no sense.
    #[error("{0}")]
    Invalid(String),
}

/// The allocation of these ids.
///
/// # Errors
/// No container can be given these ids.
pub fn grant(view: &View<'_>, ids: &[String]) -> Result<Allocation, Denied> {
    let resource = view.resource;
    let invalid = |sentence| Err(Denied::Invalid(sentence));
    if ids.is_empty() {
        return invalid(format!("a container must ask for at least one {resource}"));
    }
    let mut sorted = BTreeSet::new();
    let mut devices = BTreeSet::new();
    let mut first: Option<&Pool> = None;
    for id in ids {
        let Some(pool) = view.pool(id) else {
            return invalid(format!("{:?} is not a device of {resource} on this node", echo(id)));
        };
        if !sorted.insert(id.clone()) {
            return invalid(format!("{id} is there twice"));
        }
        devices.insert(pool.device.clone());
        let same_kind =
            first.is_none_or(|first| std::mem::discriminant(&first.kind) == std::mem::discriminant(&pool.kind));
        if !same_kind {
            return invalid(format!("{id} is not the same kind of slice as the other devices of the request"));
        }
        first = first.or(Some(pool));
    }
    let mps = match first.map(|pool| &pool.kind) {
        None | Some(Kind::Whole | Kind::TimeSliced) => None,
        Some(Kind::Mps { memory_mib, threads, max_clients }) => {
            if devices.len() > 1 {
                return Err(Denied::Split(format!(
                    "{} {resource} cannot be shares of {} GPUs ({}): no single GPU had as many free",
                    ids.len(),
                    devices.len(),
                    devices.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
                )));
            }
            // A list is complete or empty: `layout` sees to it.
            let last = ids.len() - 1;
            Some(MpsLimits {
                threads: threads.get(last).copied(),
                memory_mib: memory_mib.get(last).copied(),
                max_clients: *max_clients,
            })
        }
    };
    Ok(Allocation {
        resource: resource.to_owned(),
        ids: sorted.into_iter().collect(),
        devices: devices.into_iter().collect(),
        mps,
    })
}

fn echo(text: &str) -> String {
    text.chars().take(ECHO).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::allocation::allocation_id;
    use crate::gpu::layout::device_id;

    const MPS: &str = "nvidia.com/gpu-mps";

    fn mps_pool(device: &str, count: u32) -> Pool {
        let kind = Kind::Mps {
            memory_mib: (1..=u64::from(count)).map(|k| k * 1000).collect(),
            threads: (1..=count).map(|k| u8::try_from(k * 100 / count).unwrap()).collect(),
            max_clients: Some(4),
        };
        Pool { device: device.into(), resource: MPS.into(), first: 0, count, kind }
    }

    fn pools(counts: &[u32]) -> Vec<Pool> {
        counts.iter().enumerate().map(|(gpu, &count)| mps_pool(&format!("GPU-{gpu}"), count)).collect()
    }

    fn view(pools: &[Pool]) -> View<'_> {
        View { resource: MPS, pools, kept: &[] }
    }

    fn ids(device: &str, numbers: impl IntoIterator<Item = u32>) -> Vec<String> {
        numbers.into_iter().map(|number| device_id(device, number)).collect()
    }

    fn request<'a>(available: &'a [String], must_include: &'a [String], size: usize) -> Choice<'a> {
        Choice { available, must_include, size }
    }

    #[test]
    fn the_smallest_gpu_that_holds_the_whole_request_is_preferred() {
        let pools = pools(&[10, 10, 10]);
        let available = [ids("GPU-0", 0..10), ids("GPU-1", [9, 3, 7]), ids("GPU-2", 4..9)].concat();
        assert_eq!(prefer(&view(&pools), &request(&available, &[], 2)), ids("GPU-1", [3, 7]));
        assert_eq!(prefer(&view(&pools), &request(&available, &[], 4)), ids("GPU-2", 4..8));
        assert_eq!(prefer(&view(&pools), &request(&available, &[], 6)), ids("GPU-0", 0..6));
    }

    #[test]
    fn what_is_kept_for_that_size_comes_first_and_the_rest_is_spared() {
        let pools = pools(&[10, 10, 10]);
        let available = [ids("GPU-0", 0..10), ids("GPU-1", 0..4), ids("GPU-2", 0..5)].concat();
        let keep = |device, units, sizes: &[u32]| Kept { device, units, sizes: sizes.to_vec() };
        let kept = [keep("GPU-0", 3, &[3]), keep("GPU-1", 4, &[4])];
        let with_kept = View { kept: &kept, ..view(&pools) };
        assert_eq!(prefer(&with_kept, &request(&available, &[], 3)), ids("GPU-0", 0..3), "what is kept for it");
        assert_eq!(prefer(&with_kept, &request(&available, &[], 2)), ids("GPU-2", 0..2), "not from what others hold");
        let kept = [keep("GPU-0", 5, &[2, 5])];
        let with_kept = View { kept: &kept, ..view(&pools) };
        assert_eq!(
            prefer(&with_kept, &request(&available, &[], 2)),
            ids("GPU-0", 0..2),
            "where its pod's others will be"
        );
        assert_eq!(prefer(&with_kept, &request(&available, &[], 3)), ids("GPU-1", 0..3));
        let must = ids("GPU-2", [0]);
        assert!(prefer(&with_kept, &request(&available, &must, 2)).iter().all(|id| id.starts_with("GPU-2")));
    }

    #[test]
    fn what_must_be_included_decides_the_gpu() {
        let pools = pools(&[10, 10]);
        let available = [ids("GPU-0", 0..2), ids("GPU-1", 0..9)].concat();
        let must = ids("GPU-1", [5]);
        let mut chosen = prefer(&view(&pools), &request(&available, &must, 2));
        chosen.sort();
        assert_eq!(chosen, ids("GPU-1", [0, 5]));
    }

    #[test]
    fn where_no_gpu_has_enough_the_fewest_are_touched() {
        let pools = pools(&[10, 10, 10]);
        let available = [ids("GPU-0", 0..1), ids("GPU-1", 0..3), ids("GPU-2", 0..2)].concat();
        assert_eq!(
            prefer(&view(&pools), &request(&available, &[], 5)),
            [ids("GPU-1", 0..3), ids("GPU-2", 0..2)].concat()
        );
    }

    #[test]
    fn nonsense_in_a_preferred_request_is_left_out() {
        let pools = pools(&[2]);
        let available = ["", "x", "GPU-0::7", "GPU-9::0", "GPU-0::1"].map(str::to_owned);
        assert_eq!(prefer(&view(&pools), &request(&available, &[], 3)), ["GPU-0::1"]);
        assert!(prefer(&view(&pools), &request(&[], &[], 3)).is_empty());
        assert!(prefer(&view(&pools), &request(&available, &[], 0)).is_empty());
    }

    #[test]
    fn k_shares_get_the_limits_of_k() {
        let pools = pools(&[10]);
        let granted = grant(&view(&pools), &ids("GPU-0", [7, 2, 5])).unwrap();
        assert_eq!(granted.ids, ids("GPU-0", [2, 5, 7]));
        assert_eq!(granted.mps, Some(MpsLimits { threads: Some(30), memory_mib: Some(3000), max_clients: Some(4) }));
    }

    #[test]
    fn sets_that_cannot_be_granted_are_refused_with_a_sentence() {
        let mut pools = pools(&[2, 2]);
        pools.push(Pool { device: "GPU-2".into(), resource: MPS.into(), first: 0, count: 1, kind: Kind::Whole });
        pools.push(Pool {
            device: "GPU-3".into(),
            resource: "nvidia.com/gpu".into(),
            first: 0,
            count: 1,
            kind: Kind::Whole,
        });
        let refused =
            |ids: &[&str]| grant(&view(&pools), &ids.iter().map(|&id| id.to_owned()).collect::<Vec<_>>()).unwrap_err();
        let split = refused(&["GPU-0::0", "GPU-1::0"]);
        assert!(matches!(split, Denied::Split(_)));
        assert_eq!(
            split.to_string(),
            "2 nvidia.com/gpu-mps cannot be shares of 2 GPUs (GPU-0, GPU-1): no single GPU had as many free"
        );
        let refused = |ids: &[&str]| match refused(ids) {
            Denied::Invalid(sentence) => sentence,
            Denied::Split(sentence) => panic!("{sentence}"),
        };
        assert_eq!(refused(&["GPU-0::0", "GPU-0::0"]), "GPU-0::0 is there twice");
        assert_eq!(refused(&["GPU-0::2"]), "\"GPU-0::2\" is not a device of nvidia.com/gpu-mps on this node");
        assert!(refused(&["GPU-3::0"]).contains("not a device"), "another resource's");
        assert!(refused(&["GPU-0::0", "GPU-2::0"]).contains("not the same kind"));
        assert!(refused(&[]).contains("at least one"));
        assert!(refused(&["\u{1}\n"]).contains("\\u{1}\\n"), "what is repeated is escaped");
        assert!(refused(&["x".repeat(100_000).as_str()]).len() < 200);
    }

    proptest! {
        /// Whatever is free: a request that one GPU can hold is never split, never more or less
        /// than asked, and can be granted.
        #[test]
        fn a_request_that_fits_is_never_split(
            free in prop::collection::vec(prop::collection::btree_set(0_u32..10, 0..10), 1..8),
            size in 1_usize..=10,
            seed in any::<u64>(),
        ) {
            let pools = pools(&vec![10; free.len()]);
            let mut available: Vec<String> =
                free.iter().enumerate().flat_map(|(gpu, free)| ids(&format!("GPU-{gpu}"), free.iter().copied())).collect();
            let chosen = prefer(&view(&pools), &request(&available, &[], size));
            prop_assert_eq!(chosen.len(), size.min(available.len()));
            if free.iter().any(|free| free.len() >= size) {
                let smallest = free.iter().map(BTreeSet::len).filter(|&free| free >= size).min();
                let granted = grant(&view(&pools), &chosen);
                prop_assert!(granted.is_ok(), "{:?}", granted);
                let gpu: usize = granted.unwrap().devices[0].trim_start_matches("GPU-").parse().unwrap();
                prop_assert_eq!(Some(free[gpu].len()), smallest);
            }
            // The kubelet's order is random.
            let turn = usize::try_from(seed % 7).unwrap() % available.len().max(1);
            available.rotate_left(turn);
            prop_assert_eq!(prefer(&view(&pools), &request(&available, &[], size)), chosen);
        }

        #[test]
        fn the_id_does_not_depend_on_the_order_and_tells_sets_apart(
            numbers in prop::collection::btree_set(0_u32..48, 1..8),
            others in prop::collection::btree_set(0_u32..48, 1..8),
        ) {
            let id = allocation_id(MPS, &ids("GPU-0", numbers.iter().copied()));
            prop_assert_eq!(id.len(), 32);
            prop_assert_eq!(&id, &allocation_id(MPS, &ids("GPU-0", numbers.iter().rev().copied())));
            prop_assert_eq!(numbers == others, id == allocation_id(MPS, &ids("GPU-0", others)));
        }

        /// Nothing that the kubelet, or whoever speaks in its place, sends can make it panic or
        /// grant what is not served.
        #[test]
        fn hostile_ids_are_refused(wild in prop::collection::vec("\\PC{0,24}|GPU-[0-3]::[0-9]{1,3}", 0..6)) {
            let pools = pools(&[3, 3]);
            if let Ok(granted) = grant(&view(&pools), &wild) {
                prop_assert_eq!(granted.devices.len(), 1);
                prop_assert!(granted.ids.iter().all(|id| view(&pools).pool(id).is_some()));
                prop_assert_eq!(granted.ids.len(), wild.len());
            }
        }
    }
}
