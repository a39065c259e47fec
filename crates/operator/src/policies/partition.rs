//! Converts between the partition of a GPU in a `GpuNode` and the slices of a plan. Pure.
//!
//! Slices in use keep their device ids and limits. Otherwise the agent would have to remove and
//! recreate them. Therefore the limits of a slice never depend on the number of other slices. Ids
//! in use do not change when other slices are added or removed.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::gpunode::{
    GpuStatus, MigInstanceSpec, MigPartition, MpsPartition, MpsSlices, Partition, TimeSlicedPartition, Whole,
};
use cleave_api::names::{RESOURCE_GPU, mig_resource};
use cleave_plan::device::{Family, SHARED_SUFFIX, sized_slice_gib};
use cleave_plan::mps::{self, MAX_CLIENTS};
use cleave_plan::snapshot::SliceGroup;
use cleave_plan::units::Mebibytes;

use crate::policies::plan::{mig_instance_partition, time_sliced_partition};
use crate::policies::validate::{Demand, InstanceShare, MpsRules, ShareSize, shared_instance_resource};

/// Returns the number of MPS shares of a GPU under a policy. Returns `None` if no share fits or the
/// policy has no shares.
pub(crate) fn share_count(demand: &Demand, gpu: &GpuStatus) -> Option<u32> {
    match demand.shares? {
        ShareSize::Units(units) => Some(units),
        ShareSize::Memory(one) => {
            let fit = mps::shareable_memory(Mebibytes(gpu.memory_mib)).0.checked_div(one.0).filter(|&fit| fit > 0)?;
            Some(u32::try_from(fit).unwrap_or(MAX_CLIENTS).min(MAX_CLIENTS))
        }
    }
}

/// Returns the slices of a GPU that the kubelet lists. An empty list means that the whole GPU is
/// free.
pub(crate) fn served_slices(gpu: &GpuStatus) -> Vec<SliceGroup> {
    let mut slices = Vec::new();
    for status in &gpu.slices {
        let instance = gpu.mig.iter().flat_map(|mig| &mig.instances).find(|instance| instance.uuid == status.device);
        let placement = status.start.or(instance.map(|instance| instance.start)).filter(|_| status.device != gpu.uuid);
        let profile = instance.filter(|_| placement.is_some()).map(|instance| instance.profile.as_str());
        let one = |in_use, count| SliceGroup { in_use, ..slice_group(placement, profile, &status.resource, count) };
        let in_use = status.in_use;
        let free = status.total.saturating_sub(in_use);
        if in_use > 0 {
            slices.push(one(true, in_use));
        }
        if free > 0 && status.resource != RESOURCE_GPU {
            slices.push(one(false, free));
        }
    }
    slices
}

/// Returns the slices of a GPU that the kubelet lists, and MIG instances that exist but are not
/// served.
pub(crate) fn observed_slices(gpu: &GpuStatus, each: Option<&InstanceShare>) -> Vec<SliceGroup> {
    let mut slices = served_slices(gpu);
    for instance in gpu.mig.iter().filter(|mig| mig.enabled).flat_map(|mig| &mig.instances) {
        if slices.iter().any(|slice| slice.placement == Some(instance.start)) {
            continue;
        }
        let profile = instance.profile.as_str();
        let (resource, count) = match each {
            None | Some(InstanceShare::Whole) => (mig_resource(profile), 1),
            Some(InstanceShare::Mps(share)) => {
                let count = if let ShareSize::Units(units) = share.size { units } else { 1 };
                (shared_instance_resource(profile, share.resource.as_deref()), count)
            }
            Some(InstanceShare::TimeSlicing(slicing)) => {
                (shared_instance_resource(profile, slicing.resource.as_deref()), slicing.replicas)
            }
        };
        slices.push(slice_group(Some(instance.start), Some(profile), &resource, count));
    }
    slices
}

/// Returns the slices that a GPU has after it gets this partition. Slices in use remain in use.
pub(crate) fn desired_slices(partition: &Partition, gpu: &GpuStatus) -> Vec<SliceGroup> {
    let mut all: Vec<SliceGroup> = Vec::new();
    let Partition { whole, mps, time_slicing, mig } = partition;
    let mut add = |placement,
                   profile: Option<&str>,
                   whole: Option<&Whole>,
                   mps: Option<&MpsPartition>,
                   slicing: Option<&TimeSlicedPartition>| {
        let equal = whole.map(|whole| (&whole.resource, 1));
        let shares = mps.iter().flat_map(|mps| &mps.slices).map(|slices| (&slices.resource, slices.count));
        let replicas = slicing.map(|slicing| (&slicing.resource, slicing.replicas));
        for (resource, count) in equal.into_iter().chain(shares).chain(replicas) {
            all.push(slice_group(placement, profile, resource, count));
        }
    };
    add(None, None, whole.as_ref(), mps.as_ref(), time_slicing.as_ref());
    for instance in mig.iter().flatten() {
        let MigPartition { whole, mps, time_slicing } = &instance.partition;
        add(Some(instance.start), Some(&instance.profile), whole.as_ref(), mps.as_ref(), time_slicing.as_ref());
    }
    let mut slices: Vec<SliceGroup> = served_slices(gpu).into_iter().filter(|slice| slice.in_use).collect();
    for used in &slices {
        let mut left = used.count;
        for slice in &mut all {
            if (slice.placement, &slice.resource) == (used.placement, &used.resource) {
                let taken = left.min(slice.count);
                (slice.count, left) = (slice.count - taken, left - taken);
            }
        }
    }
    all.retain(|slice| slice.count > 0 && slice.resource != RESOURCE_GPU);
    slices.append(&mut all);
    slices
}

fn slice_group(placement: Option<u32>, profile: Option<&str>, resource: &str, count: u32) -> SliceGroup {
    let is_default = |profile: &&str| {
        let named = mig_resource(profile);
        resource == named || resource.strip_suffix(SHARED_SUFFIX) == Some(&named)
    };
    SliceGroup {
        placement,
        resource: resource.to_owned(),
        in_use: false,
        count,
        profile: profile.filter(|profile| !is_default(profile)).map(str::to_owned),
        pod: None,
    }
}

/// Returns whether the kubelet lists exactly the slices of a partition.
pub(crate) fn has_partition(partition: &Partition, gpu: &GpuStatus) -> bool {
    if let Some(whole) = &partition.whole {
        return gpu.slices.iter().all(|status| status.resource == whole.resource && status.device == gpu.uuid)
            && gpu.slices.iter().any(|status| status.total > 0);
    }
    slice_counts(&desired_slices(partition, gpu)) == slice_counts(&served_slices(gpu))
}

fn slice_counts(slices: &[SliceGroup]) -> BTreeMap<(Option<u32>, &str), u32> {
    let mut counts = BTreeMap::new();
    for slice in slices.iter().filter(|slice| slice.count > 0) {
        *counts.entry((slice.placement, slice.resource.as_str())).or_default() += slice.count;
    }
    counts
}

/// Returns whether the agent has not reported the device ids of a slice in use yet. Without these
/// ids, the operator does not know which slices may be removed.
pub(crate) fn has_unknown_ids(gpu: &GpuStatus) -> bool {
    gpu.slices.iter().filter(|status| status.device == gpu.uuid && status.resource != RESOURCE_GPU).any(|status| {
        u32::try_from(numbers_in_use(gpu, &status.resource).len()).is_ok_and(|known| known < status.in_use)
    })
}

/// Builds the partition that has these slices.
///
/// # Errors
/// Returns a message for users if the policy does not allow these slices.
pub(crate) fn partition_with_slices(
    slices: &[SliceGroup],
    family: Family,
    demand: &Demand,
    gpu: &GpuStatus,
    current: Option<&Partition>,
) -> Result<Partition, String> {
    Ok(match family {
        _ if slices.iter().all(|slice| slice.resource == RESOURCE_GPU) => {
            Partition { whole: Some(Whole { resource: RESOURCE_GPU.to_owned() }), ..Partition::default() }
        }
        Family::Whole => return Err("the policy does not allow its sharing mode".to_owned()),
        Family::Mps => Partition {
            mps: Some(mps_partition(slices, demand, gpu, current.and_then(|current| current.mps.as_ref()))?),
            ..Partition::default()
        },
        Family::TimeSlicing => {
            let slicing = demand.time_slicing.as_ref().ok_or("the policy has no timeSlicing section")?;
            Partition { time_slicing: Some(time_sliced_partition(slicing, slicing.resource())), ..Partition::default() }
        }
        Family::Mig => Partition {
            mig: Some(mig_instances(slices, demand, gpu, current.and_then(|current| current.mig.as_deref()))?),
            ..Partition::default()
        },
    })
}

fn mps_partition(
    slices: &[SliceGroup],
    demand: &Demand,
    gpu: &GpuStatus,
    current: Option<&MpsPartition>,
) -> Result<MpsPartition, String> {
    // The settings of the MPS server and the limits of a running client cannot change.
    let kept = current.filter(|_| slices.iter().any(|slice| slice.in_use));
    let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
    for slice in slices {
        *counts.entry(&slice.resource).or_default() += slice.count;
    }
    let mut all = Vec::new();
    for (resource, count) in counts {
        let known = kept.iter().flat_map(|kept| &kept.slices).find(|kept| kept.resource == resource);
        let (memory_mib, threads, max_clients) = match known {
            Some(known) => (known.memory_mib.clone(), known.threads.clone(), known.max_clients),
            None => {
                let (memory, threads) = limits_by_count(resource, demand, gpu)?;
                (memory, threads, demand.mps.max_clients)
            }
        };
        for (first, count) in number_ranges(&id_numbers(resource, count, gpu, current)) {
            all.push(MpsSlices {
                resource: resource.to_owned(),
                count,
                first,
                memory_mib: memory_mib.clone(),
                threads: threads.clone(),
                max_clients,
            });
        }
    }
    Ok(MpsPartition {
        multi_user: kept.map_or(demand.mps.multi_user, |kept| kept.multi_user),
        compute_mode: kept.map_or(demand.mps.compute_mode, |kept| kept.compute_mode),
        enforcement: demand.mps.enforcement,
        slices: all,
    })
}

/// Returns the memory limits and thread limits for each number k of slices of a resource.
///
/// The list covers the maximum number of slices of the GPU, and its last entry is the whole GPU.
/// The length must not depend on the current number of slices. Otherwise, a new slice would change
/// the limits of slices in use, and the last entries, which are the daemon's defaults.
fn limits_by_count(resource: &str, demand: &Demand, gpu: &GpuStatus) -> Result<(Vec<u64>, Vec<u8>), String> {
    let MpsRules { threads, limited, memory_parts, .. } = demand.mps;
    let total = Mebibytes(gpu.memory_mib);
    let all = mps::shareable_memory(total);
    // Each row contains the memory of k slices, and their fraction of the GPU.
    let rows: Vec<(Mebibytes, u32, u32)> = if let Some(gib) = sized_slice_gib(resource) {
        let one = Mebibytes::from_gib(gib);
        let most = total.0.div_ceil(one.0).clamp(1, u64::from(MAX_CLIENTS));
        let row = |k: u64| {
            let size = Mebibytes(one.0.saturating_mul(k).min(total.0));
            (mps::sized_slice_memory(size, total), saturating_u32(size.0), saturating_u32(total.0))
        };
        (1..=most).map(row).collect()
    } else {
        let units = share_count(demand, gpu).ok_or_else(|| format!("the policy does not allow {resource}"))?;
        let row = |k: u32| {
            let memory = match demand.shares {
                Some(ShareSize::Memory(one)) => Mebibytes(one.0.saturating_mul(u64::from(k)).min(all.0)),
                _ => mps::memory_limit(k, units, total),
            };
            (memory, k, units)
        };
        (1..=units).map(row).collect()
    };
    let part = |memory: Mebibytes| (memory.0 / u64::from(memory_parts.max(1))).max(1);
    let mut memory: Vec<u64> = Vec::new();
    if limited {
        memory = rows.iter().map(|(memory, ..)| part(*memory)).collect();
        memory.extend((memory.last() != Some(&part(all))).then(|| part(all)));
    }
    let mut percents: Vec<u8> =
        rows.iter().filter_map(|&(_, some, of)| mps::thread_percentage(some, of, threads).map(u8::from)).collect();
    percents.extend((!percents.is_empty() && percents.last() != Some(&100)).then_some(100));
    Ok((memory, percents))
}

fn saturating_u32(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Returns the numbers in the device ids of a resource. Prefers numbers in use, then existing
/// numbers, then the lowest free numbers.
fn id_numbers(resource: &str, count: u32, gpu: &GpuStatus, current: Option<&MpsPartition>) -> BTreeSet<u32> {
    let mut numbers = numbers_in_use(gpu, resource);
    let existing = current.iter().flat_map(|current| &current.slices).filter(|slices| slices.resource == resource);
    let existing: BTreeSet<u32> =
        existing.flat_map(|slices| slices.first..slices.first.saturating_add(slices.count.min(MAX_CLIENTS))).collect();
    for number in existing.into_iter().chain(0..) {
        if numbers.len() >= count as usize {
            break;
        }
        numbers.insert(number);
    }
    numbers
}

fn numbers_in_use(gpu: &GpuStatus, resource: &str) -> BTreeSet<u32> {
    let allocations =
        gpu.allocations.iter().filter(|allocation| allocation.device == gpu.uuid && allocation.resource == resource);
    let number = |id: &String| id.rsplit_once("::").and_then(|(_, number)| number.parse().ok());
    allocations.flat_map(|allocation| &allocation.ids).filter_map(number).collect()
}

/// Returns the numbers as ranges of (first, count).
fn number_ranges(numbers: &BTreeSet<u32>) -> Vec<(u32, u32)> {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for &number in numbers {
        match ranges.last_mut() {
            Some((first, count)) if first.checked_add(*count) == Some(number) => *count += 1,
            _ => ranges.push((number, 1)),
        }
    }
    ranges
}

fn mig_instances(
    slices: &[SliceGroup],
    demand: &Demand,
    gpu: &GpuStatus,
    current: Option<&[MigInstanceSpec]>,
) -> Result<Vec<MigInstanceSpec>, String> {
    let profiles = gpu.mig.as_ref().map_or(&[][..], |mig| mig.profiles.as_slice());
    let mut by_place: BTreeMap<u32, (&str, bool)> = BTreeMap::new();
    for slice in slices {
        let start = slice.placement.ok_or_else(|| format!("{} has no MIG placement", slice.resource))?;
        let name = match &slice.profile {
            Some(profile) => profile.as_str(),
            None => {
                let named = slice.resource.strip_suffix(SHARED_SUFFIX).unwrap_or(&slice.resource);
                let known = profiles.iter().find(|profile| mig_resource(&profile.name) == named);
                known
                    .map(|profile| profile.name.as_str())
                    .ok_or_else(|| format!("the GPU has no MIG profile for {named}"))?
            }
        };
        by_place.entry(start).or_insert((name, false)).1 |= slice.in_use;
    }
    let mut all = Vec::with_capacity(by_place.len());
    for (start, (profile, in_use)) in by_place {
        let kept = current
            .filter(|_| in_use)
            .and_then(|current| current.iter().find(|kept| kept.start == start && kept.profile == profile));
        let partition = match kept {
            Some(kept) => kept.partition.clone(),
            None => mig_instance_partition(profile, &demand.each, gpu).map_err(|cannot| cannot.to_string())?,
        };
        all.push(MigInstanceSpec { profile: profile.to_owned(), start, partition });
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use cleave_api::gpunode::{AllocationStatus, MigProfileStatus, MigStatus, SliceStatus};
    use cleave_plan::mps::Threads;

    use super::*;
    use crate::policies::validate::MpsShare;

    fn demand() -> Demand {
        Demand {
            words: "mode Auto",
            mode: cleave_plan::device::Mode::Auto,
            mps: MpsRules { threads: Threads::Strict, ..MpsRules::default() },
            shares: None,
            time_slicing: None,
            each: InstanceShare::Whole,
        }
    }

    fn gpu() -> GpuStatus {
        GpuStatus { uuid: "GPU-a".into(), memory_mib: 40 * 1024, ..GpuStatus::default() }
    }

    fn free_slices(resource: &str, count: u32) -> SliceGroup {
        slice_group(None, None, resource, count)
    }

    fn used_slices(resource: &str, count: u32) -> SliceGroup {
        SliceGroup { in_use: true, ..free_slices(resource, count) }
    }

    fn mps(slices: &[SliceGroup], gpu: &GpuStatus, current: Option<&Partition>) -> MpsPartition {
        partition_with_slices(slices, Family::Mps, &demand(), gpu, current).unwrap().mps.unwrap()
    }

    fn id_ranges(mps: &MpsPartition, resource: &str) -> Vec<(u32, u32)> {
        mps.slices
            .iter()
            .filter(|slices| slices.resource == resource)
            .map(|slices| (slices.first, slices.count))
            .collect()
    }

    const SLICE_10GB_RESOURCE: &str = "nvidia.com/gpu-10gb";
    const SLICE_20GB_RESOURCE: &str = "nvidia.com/gpu-20gb";

    #[test]
    fn a_sized_slice_gets_proportional_memory_and_threads() {
        let mps = mps(&[free_slices(SLICE_10GB_RESOURCE, 2), free_slices(SLICE_20GB_RESOURCE, 1)], &gpu(), None);
        let all = 40 * 1024 - 128;
        assert_eq!(mps.slices[0].memory_mib, [all / 4, all / 2, all * 3 / 4, all]);
        assert_eq!(mps.slices[0].threads, [25, 50, 75, 100]);
        assert_eq!((&mps.slices[1].memory_mib[..], &mps.slices[1].threads[..]), (&[all / 2, all][..], &[50, 100][..]));
    }

    /// The agent cannot change a limit while a client runs. The last limit of each list is the
    /// daemon's default.
    #[test]
    fn the_limits_of_a_slice_do_not_depend_on_other_slices() {
        let small = mps(&[free_slices(SLICE_10GB_RESOURCE, 1)], &gpu(), None);
        let large = mps(&[free_slices(SLICE_10GB_RESOURCE, 2), free_slices("nvidia.com/gpu-7gb", 1)], &gpu(), None);
        assert_eq!(small.slices[0].memory_mib, large.slices[0].memory_mib);
        assert_eq!(small.slices[0].threads, large.slices[0].threads);
        assert_eq!(small.slices[0].memory_mib.last(), large.slices[1].memory_mib.last(), "the daemon's default");
        assert_eq!(large.slices[1].threads.last(), Some(&100));
        let many = mps(&[free_slices("nvidia.com/gpu-1gb", 40)], &GpuStatus { memory_mib: 81_559, ..gpu() }, None);
        assert_eq!((many.slices[0].memory_mib.len(), many.slices[0].memory_mib.last()), (49, Some(&(81_559 - 128))));
    }

    #[test]
    fn ids_in_use_are_kept_and_the_lowest_free_ids_are_added() {
        let current = mps(&[free_slices(SLICE_10GB_RESOURCE, 4)], &gpu(), None);
        let mut busy = gpu();
        busy.allocations = vec![AllocationStatus {
            device: "GPU-a".into(),
            resource: SLICE_10GB_RESOURCE.into(),
            ids: vec!["GPU-a::1".into(), "GPU-a::3".into()],
            ..AllocationStatus::default()
        }];
        let current = Partition { mps: Some(current), ..Partition::default() };
        let fewer =
            mps(&[used_slices(SLICE_10GB_RESOURCE, 2), free_slices(SLICE_20GB_RESOURCE, 1)], &busy, Some(&current));
        assert_eq!(
            (id_ranges(&fewer, SLICE_10GB_RESOURCE), id_ranges(&fewer, SLICE_20GB_RESOURCE)),
            (vec![(1, 1), (3, 1)], vec![(0, 1)])
        );
        let more = mps(
            &[used_slices(SLICE_10GB_RESOURCE, 2), free_slices(SLICE_10GB_RESOURCE, 1)],
            &busy,
            Some(&Partition { mps: Some(fewer), ..Partition::default() }),
        );
        assert_eq!(id_ranges(&more, SLICE_10GB_RESOURCE), [(0, 2), (3, 1)]);
    }

    #[test]
    fn limits_in_use_are_kept_when_the_policy_sets_other_limits() {
        let mut old = mps(&[free_slices(SLICE_10GB_RESOURCE, 4)], &gpu(), None);
        old.slices[0].threads = vec![50, 100];
        old.multi_user = false;
        let current = Partition { mps: Some(old), ..Partition::default() };
        let kept =
            mps(&[used_slices(SLICE_10GB_RESOURCE, 1), free_slices(SLICE_10GB_RESOURCE, 1)], &gpu(), Some(&current));
        assert_eq!((&kept.slices[0].threads[..], kept.multi_user), (&[50, 100][..], false));
        let fresh = mps(&[free_slices(SLICE_10GB_RESOURCE, 2)], &gpu(), Some(&current));
        assert_eq!((&fresh.slices[0].threads[..], fresh.multi_user), (&[25, 50, 75, 100][..], true));
    }

    #[test]
    fn a_partition_is_reached_once_the_kubelet_has_its_slices() {
        let slice_status = |resource: &str, total, in_use| SliceStatus {
            device: "GPU-a".into(),
            resource: resource.into(),
            total,
            in_use,
            ..SliceStatus::default()
        };
        let mut gpu = gpu();
        let spec = Partition {
            mps: Some(mps(&[free_slices(SLICE_10GB_RESOURCE, 2), free_slices(SLICE_20GB_RESOURCE, 1)], &gpu, None)),
            ..Partition::default()
        };
        gpu.slices = vec![slice_status(SLICE_10GB_RESOURCE, 4, 1)];
        assert!(!has_partition(&spec, &gpu));
        assert_eq!(
            desired_slices(&spec, &gpu),
            [
                used_slices(SLICE_10GB_RESOURCE, 1),
                free_slices(SLICE_10GB_RESOURCE, 1),
                free_slices(SLICE_20GB_RESOURCE, 1)
            ],
            "what it will be"
        );
        gpu.slices = vec![slice_status(SLICE_10GB_RESOURCE, 2, 1), slice_status(SLICE_20GB_RESOURCE, 1, 0)];
        assert!(has_partition(&spec, &gpu));
        let whole = Partition { whole: Some(Whole { resource: RESOURCE_GPU.into() }), ..Partition::default() };
        assert!(!has_partition(&whole, &gpu));
        gpu.slices = vec![slice_status(RESOURCE_GPU, 1, 0)];
        assert!(has_partition(&whole, &gpu) && served_slices(&gpu).is_empty());
        gpu.slices.clear();
        assert!(!has_partition(&whole, &gpu), "a GPU in MIG mode without instances is not whole");
    }

    #[test]
    fn unreported_device_ids_are_detected() {
        let mut gpu = gpu();
        gpu.slices = vec![SliceStatus {
            device: "GPU-a".into(),
            resource: SLICE_10GB_RESOURCE.into(),
            total: 2,
            in_use: 1,
            ..SliceStatus::default()
        }];
        assert!(has_unknown_ids(&gpu));
        gpu.allocations = vec![AllocationStatus {
            device: "GPU-a".into(),
            resource: SLICE_10GB_RESOURCE.into(),
            ids: vec!["GPU-a::0".into()],
            ..AllocationStatus::default()
        }];
        assert!(!has_unknown_ids(&gpu));
    }

    #[test]
    fn instances_have_the_planned_placement_and_the_sharing_of_the_policy() {
        let mut a100 = gpu();
        let profile = |name: &str, size, starts: &[u32]| MigProfileStatus {
            name: name.into(),
            size,
            starts: starts.to_vec(),
            memory_mib: 9728,
            ..MigProfileStatus::default()
        };
        a100.mig = Some(MigStatus {
            profiles: vec![profile("1g.5gb+me", 1, &[0, 1]), profile("2g.10gb", 2, &[0, 2, 4])],
            ..MigStatus::default()
        });
        let slices = [
            slice_group(Some(2), None, "nvidia.com/mig-2g.10gb", 1),
            slice_group(Some(0), None, "nvidia.com/mig-1g.5gb.me", 1),
        ];
        let mig = partition_with_slices(&slices, Family::Mig, &demand(), &a100, None).unwrap().mig.unwrap();
        let instances: Vec<(&str, u32)> = mig.iter().map(|one| (one.profile.as_str(), one.start)).collect();
        assert_eq!(instances, [("1g.5gb+me", 0), ("2g.10gb", 2)]);
        let each =
            InstanceShare::Mps(MpsShare { size: ShareSize::Units(4), rules: MpsRules::default(), resource: None });
        let shared = Demand { each, ..demand() };
        let slices = [
            slice_group(Some(2), None, "nvidia.com/mig-2g.10gb.shared", 3),
            SliceGroup { in_use: true, ..slice_group(Some(2), None, "nvidia.com/mig-2g.10gb.shared", 1) },
        ];
        let mig = partition_with_slices(&slices, Family::Mig, &shared, &a100, None).unwrap().mig.unwrap();
        assert_eq!((mig.len(), mig[0].partition.mps.as_ref().unwrap().slices[0].count), (1, 4));
        let unknown = [slice_group(Some(2), None, "nvidia.com/mig-3g.20gb", 1)];
        assert!(partition_with_slices(&unknown, Family::Mig, &demand(), &a100, None).is_err());
    }
}
