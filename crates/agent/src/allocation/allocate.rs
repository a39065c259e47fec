//! Decides which slices and limits a container's request receives. Pure.
//!
//! All MPS shares of a request are on one device. The replicas of a request are on one device if
//! possible. `Allocate` does not depend on the state of MPS daemons, because a container starts
//! only after its daemon is available.
use std::collections::{BTreeMap, BTreeSet};

use super::pending::OpenReservation;
use super::{Allocation, MpsLimits};
use crate::gpu::layout::{Pool, PoolKind, parse_slice_id};

/// Maximum number of characters that an error message quotes from another program's text.
const MAX_QUOTED_CHARS: usize = 80;

/// Pools and reservations of one resource.
#[derive(Debug, Clone, Copy)]
pub struct ResourceView<'a> {
    /// Name of the extended resource.
    pub resource: &'a str,
    /// Pools of the resource on all devices.
    pub pools: &'a [Pool],
    /// Reservations of the resource that are not allocated yet.
    pub reserved: &'a [OpenReservation<'a>],
}

impl<'a> ResourceView<'a> {
    /// Returns the pool of this resource that contains the slice with this id.
    pub(super) fn pool_of_slice(&self, id: &str) -> Option<&'a Pool> {
        let (device, number) = parse_slice_id(id)?;
        self.pools.iter().find(|pool| pool.resource == self.resource && pool.contains(device, number))
    }
}

/// A request from the kubelet to choose `size` of the available slices.
#[derive(Debug, Clone, Copy)]
pub struct ChoiceRequest<'a> {
    /// Ids to choose from, including `must_include`, in any order.
    pub available: &'a [String],
    /// Ids that the choice must contain.
    pub must_include: &'a [String],
    /// Number of ids to choose, including `must_include`.
    pub size: usize,
}

/// Chooses the slices for a request. On each GPU, the choice starts with the lowest numbers. The
/// choice contains all of `must_include`, or `size` of these ids if there are more.
///
/// If one GPU has enough free slices, and `must_include` names no other GPU, all slices come from
/// one GPU. The function prefers GPUs in this order:
/// - a GPU with a reservation for a request of this size; the earliest reservation comes first
/// - a GPU with enough free slices for the request and for all reservations on the GPU
/// - the GPU with the fewest free slices
/// - the first GPU by UUID
///
/// Otherwise, slices come first from the GPUs of `must_include`, then from GPUs with a reservation
/// for a request of this size, then from the GPUs with the most free slices, so that the request
/// uses few GPUs.
pub fn choose_preferred(view: &ResourceView<'_>, request: &ChoiceRequest<'_>) -> Vec<String> {
    let must: BTreeSet<&str> = request.must_include.iter().map(String::as_str).collect();
    let mut free: BTreeMap<&str, BTreeSet<(u32, &str)>> = BTreeMap::new();
    for id in request.available {
        if let (Some((device, number)), Some(_)) = (parse_slice_id(id), view.pool_of_slice(id)) {
            free.entry(device).or_default().insert((number, id));
        }
    }
    let mut chosen: Vec<&str> = must.iter().copied().take(request.size).collect();
    let started: BTreeSet<&str> = must.iter().filter_map(|id| parse_slice_id(id)).map(|(device, _)| device).collect();
    let room =
        |device: &str| free.get(device).map_or(0, |slices| slices.iter().filter(|(_, id)| !must.contains(id)).count());
    let missing = request.size.saturating_sub(chosen.len());
    let mut order: Vec<&str> = free.keys().copied().collect();
    order.sort_by_cached_key(|&device| {
        let free = room(device);
        let fits = free >= missing && (started.is_empty() || started.len() == 1 && started.contains(device));
        let reserved = || view.reserved.iter().filter(|reserved| reserved.device == device);
        let is_for_this =
            |reserved: &OpenReservation<'_>| reserved.sizes.iter().any(|size| *size as usize == request.size);
        // The size must match an expected call, not the reservation: an init container's request
        // uses only a part of its reservation.
        let rank = view.reserved.iter().position(|reserved| reserved.device == device && is_for_this(reserved));
        let for_this = rank.is_some();
        let for_all = reserved().fold(0_usize, |sum, reserved| sum.saturating_add(reserved.units as usize));
        let spares_others = for_this || free >= missing.saturating_add(for_all);
        let size = if fits { free } else { usize::MAX - free };
        (!fits, !started.contains(device), rank.unwrap_or(usize::MAX), !spares_others, size, device)
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

/// Why slices cannot be allocated together. The text is a clause that the kubelet copies to the
/// pod's status.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DenialReason {
    /// The ids belong to shares of several devices: the pod bypassed the placement gate, or lost
    /// its reservation.
    #[error("{0}")]
    Split(String),
    /// No ids are given, or the ids are malformed, duplicate, unknown, or of different kinds.
    #[error("{0}")]
    Invalid(String),
}

/// Creates the allocation of the slices with these ids.
///
/// # Errors
/// Returns [`DenialReason`] if the slices cannot be allocated together.
pub fn grant_allocation(view: &ResourceView<'_>, ids: &[String]) -> Result<Allocation, DenialReason> {
    let resource = view.resource;
    let invalid = |sentence| Err(DenialReason::Invalid(sentence));
    if ids.is_empty() {
        return invalid(format!("a container must request at least one {resource}"));
    }
    let mut sorted = BTreeSet::new();
    let mut devices = BTreeSet::new();
    let mut first: Option<&Pool> = None;
    for id in ids {
        let Some(pool) = view.pool_of_slice(id) else {
            return invalid(format!("{:?} is not a device of {resource} on this node", truncate(id)));
        };
        if !sorted.insert(id.clone()) {
            return invalid(format!("{id} is requested twice"));
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
        None | Some(PoolKind::Whole | PoolKind::TimeSliced) => None,
        Some(PoolKind::Mps { memory_mib, threads, max_clients }) => {
            if devices.len() > 1 {
                return Err(DenialReason::Split(format!(
                    "{} {resource} cannot come from {} GPUs ({}): no single GPU had enough free shares",
                    ids.len(),
                    devices.len(),
                    devices.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
                )));
            }
            // `layout` has checked that each list is empty or has a limit for every number of
            // shares.
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

/// Returns the first [`MAX_QUOTED_CHARS`] characters of a text, for an error message.
fn truncate(text: &str) -> String {
    text.chars().take(MAX_QUOTED_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::allocation::allocation_id;
    use crate::gpu::layout::slice_id;

    const MPS_RESOURCE: &str = "nvidia.com/gpu-mps";

    fn mps_pool(device: &str, count: u32) -> Pool {
        let kind = PoolKind::Mps {
            memory_mib: (1..=u64::from(count)).map(|k| k * 1000).collect(),
            threads: (1..=count).map(|k| u8::try_from(k * 100 / count).unwrap()).collect(),
            max_clients: Some(4),
        };
        Pool { device: device.into(), resource: MPS_RESOURCE.into(), first: 0, count, kind }
    }

    fn pools(counts: &[u32]) -> Vec<Pool> {
        counts.iter().enumerate().map(|(gpu, &count)| mps_pool(&format!("GPU-{gpu}"), count)).collect()
    }

    fn resource_view(pools: &[Pool]) -> ResourceView<'_> {
        ResourceView { resource: MPS_RESOURCE, pools, reserved: &[] }
    }

    fn share_ids(device: &str, numbers: impl IntoIterator<Item = u32>) -> Vec<String> {
        numbers.into_iter().map(|number| slice_id(device, number)).collect()
    }

    fn choice_request<'a>(available: &'a [String], must_include: &'a [String], size: usize) -> ChoiceRequest<'a> {
        ChoiceRequest { available, must_include, size }
    }

    #[test]
    fn the_gpu_with_the_fewest_free_slices_that_fits_the_request_is_preferred() {
        let pools = pools(&[10, 10, 10]);
        let available = [share_ids("GPU-0", 0..10), share_ids("GPU-1", [9, 3, 7]), share_ids("GPU-2", 4..9)].concat();
        assert_eq!(
            choose_preferred(&resource_view(&pools), &choice_request(&available, &[], 2)),
            share_ids("GPU-1", [3, 7])
        );
        assert_eq!(
            choose_preferred(&resource_view(&pools), &choice_request(&available, &[], 4)),
            share_ids("GPU-2", 4..8)
        );
        assert_eq!(
            choose_preferred(&resource_view(&pools), &choice_request(&available, &[], 6)),
            share_ids("GPU-0", 0..6)
        );
    }

    #[test]
    fn a_gpu_with_a_reservation_of_the_same_size_is_preferred_and_other_reservations_stay_free() {
        let pools = pools(&[10, 10, 10]);
        let available = [share_ids("GPU-0", 0..10), share_ids("GPU-1", 0..4), share_ids("GPU-2", 0..5)].concat();
        let keep = |device, units, sizes: &[u32]| OpenReservation { device, units, sizes: sizes.to_vec() };
        let reserved = [keep("GPU-0", 3, &[3]), keep("GPU-1", 4, &[4])];
        let with_kept = ResourceView { reserved: &reserved, ..resource_view(&pools) };
        assert_eq!(
            choose_preferred(&with_kept, &choice_request(&available, &[], 3)),
            share_ids("GPU-0", 0..3),
            "the pod's own reservation"
        );
        assert_eq!(
            choose_preferred(&with_kept, &choice_request(&available, &[], 2)),
            share_ids("GPU-2", 0..2),
            "not from others' reservations"
        );
        let reserved = [keep("GPU-0", 5, &[2, 5])];
        let with_kept = ResourceView { reserved: &reserved, ..resource_view(&pools) };
        assert_eq!(
            choose_preferred(&with_kept, &choice_request(&available, &[], 2)),
            share_ids("GPU-0", 0..2),
            "the GPU with the reservations of the pod's other containers"
        );
        assert_eq!(choose_preferred(&with_kept, &choice_request(&available, &[], 3)), share_ids("GPU-1", 0..3));
        let must = share_ids("GPU-2", [0]);
        assert!(
            choose_preferred(&with_kept, &choice_request(&available, &must, 2))
                .iter()
                .all(|id| id.starts_with("GPU-2"))
        );
    }

    #[test]
    fn ids_that_must_be_included_determine_the_gpu() {
        let pools = pools(&[10, 10]);
        let available = [share_ids("GPU-0", 0..2), share_ids("GPU-1", 0..9)].concat();
        let must = share_ids("GPU-1", [5]);
        let mut chosen = choose_preferred(&resource_view(&pools), &choice_request(&available, &must, 2));
        chosen.sort();
        assert_eq!(chosen, share_ids("GPU-1", [0, 5]));
    }

    #[test]
    fn if_no_gpu_fits_the_request_the_fewest_gpus_are_used() {
        let pools = pools(&[10, 10, 10]);
        let available = [share_ids("GPU-0", 0..1), share_ids("GPU-1", 0..3), share_ids("GPU-2", 0..2)].concat();
        assert_eq!(
            choose_preferred(&resource_view(&pools), &choice_request(&available, &[], 5)),
            [share_ids("GPU-1", 0..3), share_ids("GPU-2", 0..2)].concat()
        );
    }

    #[test]
    fn invalid_available_ids_are_ignored() {
        let pools = pools(&[2]);
        let available = ["", "x", "GPU-0::7", "GPU-9::0", "GPU-0::1"].map(str::to_owned);
        assert_eq!(choose_preferred(&resource_view(&pools), &choice_request(&available, &[], 3)), ["GPU-0::1"]);
        assert!(choose_preferred(&resource_view(&pools), &choice_request(&[], &[], 3)).is_empty());
        assert!(choose_preferred(&resource_view(&pools), &choice_request(&available, &[], 0)).is_empty());
    }

    #[test]
    fn an_allocation_gets_the_limits_for_its_number_of_shares() {
        let pools = pools(&[10]);
        let granted = grant_allocation(&resource_view(&pools), &share_ids("GPU-0", [7, 2, 5])).unwrap();
        assert_eq!(granted.ids, share_ids("GPU-0", [2, 5, 7]));
        assert_eq!(granted.mps, Some(MpsLimits { threads: Some(30), memory_mib: Some(3000), max_clients: Some(4) }));
    }

    #[test]
    fn requests_that_cannot_be_granted_are_refused_with_a_reason() {
        let mut pools = pools(&[2, 2]);
        pools.push(Pool {
            device: "GPU-2".into(),
            resource: MPS_RESOURCE.into(),
            first: 0,
            count: 1,
            kind: PoolKind::Whole,
        });
        pools.push(Pool {
            device: "GPU-3".into(),
            resource: "nvidia.com/gpu".into(),
            first: 0,
            count: 1,
            kind: PoolKind::Whole,
        });
        let refused = |ids: &[&str]| {
            grant_allocation(&resource_view(&pools), &ids.iter().map(|&id| id.to_owned()).collect::<Vec<_>>())
                .unwrap_err()
        };
        let split = refused(&["GPU-0::0", "GPU-1::0"]);
        assert!(matches!(split, DenialReason::Split(_)));
        assert_eq!(
            split.to_string(),
            "2 nvidia.com/gpu-mps cannot come from 2 GPUs (GPU-0, GPU-1): no single GPU had enough free shares"
        );
        let refused = |ids: &[&str]| match refused(ids) {
            DenialReason::Invalid(sentence) => sentence,
            DenialReason::Split(sentence) => panic!("{sentence}"),
        };
        assert_eq!(refused(&["GPU-0::0", "GPU-0::0"]), "GPU-0::0 is requested twice");
        assert_eq!(refused(&["GPU-0::2"]), "\"GPU-0::2\" is not a device of nvidia.com/gpu-mps on this node");
        assert!(refused(&["GPU-3::0"]).contains("not a device"), "an id of another resource");
        assert!(refused(&["GPU-0::0", "GPU-2::0"]).contains("not the same kind"));
        assert!(refused(&[]).contains("at least one"));
        assert!(refused(&["\u{1}\n"]).contains("\\u{1}\\n"), "repeated text is escaped");
        assert!(refused(&["x".repeat(100_000).as_str()]).len() < 200);
    }

    proptest! {
        /// `choose_preferred` never splits a request between GPUs if one GPU has enough free
        /// slices, and returns exactly `size` ids. `grant_allocation` accepts these ids.
        #[test]
        fn a_request_that_fits_on_one_gpu_is_never_split(
            free in prop::collection::vec(prop::collection::btree_set(0_u32..10, 0..10), 1..8),
            size in 1_usize..=10,
            seed in any::<u64>(),
        ) {
            let pools = pools(&vec![10; free.len()]);
            let mut available: Vec<String> =
                free.iter().enumerate().flat_map(|(gpu, free)| share_ids(&format!("GPU-{gpu}"), free.iter().copied())).collect();
            let chosen = choose_preferred(&resource_view(&pools), &choice_request(&available, &[], size));
            prop_assert_eq!(chosen.len(), size.min(available.len()));
            if free.iter().any(|free| free.len() >= size) {
                let smallest = free.iter().map(BTreeSet::len).filter(|&free| free >= size).min();
                let granted = grant_allocation(&resource_view(&pools), &chosen);
                prop_assert!(granted.is_ok(), "{:?}", granted);
                let gpu: usize = granted.unwrap().devices[0].trim_start_matches("GPU-").parse().unwrap();
                prop_assert_eq!(Some(free[gpu].len()), smallest);
            }
            // The kubelet sends ids in random order.
            let shift = usize::try_from(seed % 7).unwrap() % available.len().max(1);
            available.rotate_left(shift);
            prop_assert_eq!(choose_preferred(&resource_view(&pools), &choice_request(&available, &[], size)), chosen);
        }

        #[test]
        fn an_allocation_id_depends_on_the_set_of_slices_but_not_their_order(
            numbers in prop::collection::btree_set(0_u32..48, 1..8),
            others in prop::collection::btree_set(0_u32..48, 1..8),
        ) {
            let id = allocation_id(MPS_RESOURCE, &share_ids("GPU-0", numbers.iter().copied()));
            prop_assert_eq!(id.len(), 32);
            prop_assert_eq!(&id, &allocation_id(MPS_RESOURCE, &share_ids("GPU-0", numbers.iter().rev().copied())));
            prop_assert_eq!(numbers == others, id == allocation_id(MPS_RESOURCE, &share_ids("GPU-0", others)));
        }

        /// `grant_allocation` grants only served slices, and never panics.
        #[test]
        fn ids_that_are_not_served_are_never_granted(wild in prop::collection::vec("\\PC{0,24}|GPU-[0-3]::[0-9]{1,3}", 0..6)) {
            let pools = pools(&[3, 3]);
            if let Ok(granted) = grant_allocation(&resource_view(&pools), &wild) {
                prop_assert_eq!(granted.devices.len(), 1);
                prop_assert!(granted.ids.iter().all(|id| resource_view(&pools).pool_of_slice(id).is_some()));
                prop_assert_eq!(granted.ids.len(), wild.len());
            }
        }
    }
}
