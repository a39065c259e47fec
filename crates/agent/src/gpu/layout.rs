//! Computes layouts: the slices and MPS daemons that the spec requests for a GPU. Checks the spec
//! against the hardware. Pure.
use std::collections::BTreeMap;

use cleave_api::gpunode::{
    GpuSpec, MigInstanceSpec, MigPartition, MpsPartition, Partition, TimeSlicedPartition, Whole,
};
use cleave_api::names::{MODE_MIG, MODE_MPS, MODE_TIMESLICING, MODE_WHOLE, RESOURCE_GPU, mig_resource};
use cleave_api::sharingpolicy::{ComputeMode, Interval, MpsEnforcement};
use cleave_gpu::mps::wire;
use cleave_gpu::nvml::{Gpu, MigInstance, MigState};
use cleave_kubelet::ResourceName;
use cleave_plan::mps::MAX_CLIENTS;
use cleave_plan::units::Percent;
use serde::{Deserialize, Serialize};

use crate::gpu::mig::{MigChange, MigTarget, needed_changes};

/// Maximum number of slices in a pool. A larger number indicates a mistake in the spec.
const MAX_SLICES_PER_POOL: u32 = 1024;

/// The sharing mode of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SharingMode {
    /// The GPU is not shared.
    Whole,
    /// The GPU serves shares under MPS.
    Mps,
    /// The GPU serves time-sliced replicas.
    TimeSlicing,
    /// The GPU serves MIG instances.
    Mig,
}

impl SharingMode {
    /// Returns the name of the mode in a `GpuNode`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Whole => MODE_WHOLE,
            Self::Mps => MODE_MPS,
            Self::TimeSlicing => MODE_TIMESLICING,
            Self::Mig => MODE_MIG,
        }
    }
}

/// The slices and MPS daemons of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// The sharing mode of the GPU.
    pub mode: SharingMode,
    /// Pools of the GPU's slices.
    pub pools: Vec<Pool>,
    /// MPS daemons by device.
    pub daemons: BTreeMap<String, wire::DaemonSettings>,
}

/// Slices of one device with consecutive numbers, the same kind and the same resource name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pool {
    /// UUID of the GPU or MIG device.
    pub device: String,
    /// Valid name of the extended resource.
    pub resource: String,
    /// Number of the first slice.
    pub first: u32,
    /// Number of slices.
    pub count: u32,
    /// Kind of the slices.
    pub kind: PoolKind,
}

/// Kind of the slices in a pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum PoolKind {
    /// A whole GPU or MIG instance.
    Whole,
    /// A time-sliced replica.
    TimeSliced,
    /// A share under MPS.
    Mps {
        /// Memory limit of k shares in MiB, at index k − 1. An empty list means unlimited.
        memory_mib: Vec<u64>,
        /// Active thread percentage of k shares, at index k − 1. An empty list means unlimited.
        threads: Vec<u8>,
        /// Maximum number of clients of one allocation. `None` means unlimited.
        max_clients: Option<u32>,
    },
}

impl Pool {
    /// Returns the ids of the slices in this pool.
    pub fn ids(&self) -> impl Iterator<Item = String> {
        (self.first..self.first.saturating_add(self.count)).map(|number| slice_id(&self.device, number))
    }

    /// Returns whether this pool contains slice `number` of `device`.
    pub fn contains(&self, device: &str, number: u32) -> bool {
        self.device == device && number >= self.first && number - self.first < self.count
    }
}

impl Layout {
    /// Checks the counts, numbers and names of a layout that was read from a file. The agent
    /// creates an id for every slice, so a wrong count could exhaust memory.
    ///
    /// # Errors
    /// Returns a clause that states which value is invalid.
    pub fn check(&self) -> Result<(), String> {
        for Pool { resource, first, count, kind, .. } in &self.pools {
            check_resource_name(resource)?;
            if *count > MAX_SLICES_PER_POOL {
                return Err(format!(
                    "{resource}: one pool has {count} slices, more than the maximum of {MAX_SLICES_PER_POOL}"
                ));
            }
            if first.checked_add(*count).is_none() {
                return Err(format!("{resource}: {count} slices cannot be numbered from {first}"));
            }
            if let PoolKind::Mps { memory_mib, threads, .. } = kind {
                check_limit_counts(resource, *count, [threads.len(), memory_mib.len()])?;
            }
        }
        Ok(())
    }

    /// Replaces the pools and the daemon of a device with those in `before`.
    pub fn restore_device(&mut self, device: &str, before: Option<&Self>) {
        self.pools.retain(|pool| pool.device != device);
        self.daemons.remove(device);
        if let Some(before) = before {
            self.pools.extend(before.pools.iter().filter(|pool| pool.device == device).cloned());
            self.daemons.extend(before.daemons.get(device).map(|daemon| (device.to_owned(), daemon.clone())));
        }
    }
}

/// Returns the id of a slice. The format must not change, because the checkpoints of the kubelet
/// and the agent contain ids.
pub fn slice_id(device: &str, number: u32) -> String {
    format!("{device}::{number}")
}

/// Returns the device and number of a slice id. Accepts only ids that [`slice_id`] returns, so that
/// `GPU-x::07` and `GPU-x::7` cannot both name a slice.
pub fn parse_slice_id(id: &str) -> Option<(&str, u32)> {
    let (device, digits) = id.rsplit_once("::")?;
    let number: u32 = digits.parse().ok()?;
    let canonical = digits == "0" || !digits.starts_with(['0', '+']);
    (canonical && !device.is_empty()).then_some((device, number))
}

/// Returns the UUID of the device with this slice id. An id can be a device's UUID alone, because
/// other device plugins use UUIDs as ids.
pub fn device_of_id(id: &str) -> &str {
    parse_slice_id(id).map_or(id, |(device, _)| device)
}

/// A layout that the agent can serve now, and the changes of the GPU that the spec still needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TargetLayout {
    /// The layout that the agent can serve now.
    pub layout: Layout,
    /// The changes of the GPU that the spec still needs, in order.
    pub changes: Vec<MigChange>,
    /// States which part of the spec the agent ignores because it cannot apply that part. Empty if
    /// the agent can apply the whole spec.
    pub note: String,
}

impl From<Layout> for TargetLayout {
    fn from(layout: Layout) -> Self {
        Self { layout, changes: Vec::new(), note: String::new() }
    }
}

/// Returns the layout that `spec` requests. Without a spec, the layout contains the whole GPU or
/// its existing MIG instances. `was_mig` states whether an earlier spec partitioned the GPU by MIG.
/// If an earlier spec partitioned the GPU and `spec` is `None`, the changes remove the instances
/// and turn MIG mode off.
///
/// # Errors
/// Returns a clause for the step's message if the GPU cannot have the layout.
pub fn target_layout(spec: Option<&GpuSpec>, gpu: &Gpu, was_mig: bool) -> Result<TargetLayout, String> {
    let mig = gpu.mig.as_ref().filter(|mig| mig.enabled);
    let Some(GpuSpec { partition, .. }) = spec else {
        return Ok(match mig {
            Some(mig) if !was_mig => existing_instance_layout(mig),
            _ => layout_without_mig_mode(
                gpu,
                whole_gpu_layout(&gpu.uuid, RESOURCE_GPU),
                if was_mig { MigTarget::Off } else { MigTarget::Keep },
            )?,
        });
    };
    let Partition { whole: undivided, mps, time_slicing, mig: instances } = partition;
    let layout = match (undivided, mps, time_slicing, instances) {
        (Some(Whole { resource }), None, None, None) => Layout {
            pools: vec![whole_pool(&gpu.uuid, check_resource_name(resource)?)],
            ..empty_layout(SharingMode::Whole)
        },
        (None, Some(mps), None, None) => {
            if gpu.compute_capability < (7, 0) {
                let (major, minor) = gpu.compute_capability;
                return Err(format!(
                    "MPS limits need compute capability 7.0 (Volta) or newer; {} has {major}.{minor}",
                    gpu.model
                ));
            }
            let (pools, daemon) = mps_pools(&gpu.uuid, mps, false)?;
            Layout { pools, daemons: BTreeMap::from([(gpu.uuid.clone(), daemon)]), ..empty_layout(SharingMode::Mps) }
        }
        (None, None, Some(slicing), None) => {
            Layout { pools: vec![replica_pool(&gpu.uuid, slicing)?], ..empty_layout(SharingMode::TimeSlicing) }
        }
        (None, None, None, Some(instances)) => return mig_layout(gpu, instances),
        _ => return Err("the spec must set exactly one of whole, mps, timeSlicing and mig".into()),
    };
    let wanted = layout_without_mig_mode(gpu, layout, MigTarget::Off)?;
    Ok(TargetLayout { note: interval_note(time_slicing.as_ref()), ..wanted })
}

/// Returns the target of a GPU that the spec does not partition by MIG. The agent can serve
/// `layout` only while MIG mode is off.
fn layout_without_mig_mode(gpu: &Gpu, layout: Layout, target: MigTarget<'_>) -> Result<TargetLayout, String> {
    let mig_on = gpu.mig.as_ref().is_some_and(|mig| mig.enabled);
    let layout = if mig_on { empty_layout(SharingMode::Mig) } else { layout };
    Ok(TargetLayout { layout, changes: needed_changes(gpu, target)?, note: String::new() })
}

/// Returns a layout of the spec's existing instances, and the changes that create the missing
/// instances.
fn mig_layout(gpu: &Gpu, instances: &[MigInstanceSpec]) -> Result<TargetLayout, String> {
    let changes = needed_changes(gpu, MigTarget::On(instances))?;
    let (mut layout, mut rest) = (empty_layout(SharingMode::Mig), empty_layout(SharingMode::Mig));
    let there: &[MigInstance] = gpu.mig.as_ref().filter(|mig| mig.enabled).map_or(&[], |mig| &mig.instances);
    for spec in instances {
        let is =
            |found: &&MigInstance| found.profile == spec.profile && found.start == spec.start && !found.uuid.is_empty();
        match there.iter().find(is) {
            Some(found) => add_instance(&mut layout, found, &spec.partition)?,
            None => {
                // Check the partition before the instance exists, so that the agent creates no
                // instance that it cannot serve.
                let (profile, start) = (spec.profile.clone(), spec.start);
                let later =
                    MigInstance { uuid: String::new(), profile, start, gpu_instance: 0, compute_instance: None };
                add_instance(&mut rest, &later, &spec.partition)?;
            }
        }
    }
    Ok(TargetLayout { layout, changes, note: String::new() })
}

/// Returns a layout without slices.
fn empty_layout(mode: SharingMode) -> Layout {
    Layout { mode, pools: Vec::new(), daemons: BTreeMap::new() }
}

/// Returns the layout of a GPU that is served as a whole.
fn whole_gpu_layout(device: &str, resource: &str) -> Layout {
    Layout { pools: vec![whole_pool(device, resource.to_owned())], ..empty_layout(SharingMode::Whole) }
}

fn whole_pool(device: &str, resource: String) -> Pool {
    Pool { device: device.to_owned(), resource, first: 0, count: 1, kind: PoolKind::Whole }
}

/// Returns a layout that serves each existing MIG instance as a whole.
fn existing_instance_layout(mig: &MigState) -> TargetLayout {
    // Skip instances with a profile name that a resource name cannot contain, because no pod can
    // request them.
    let has_name = |instance: &&MigInstance| check_resource_name(&mig_resource(&instance.profile)).is_ok();
    let made = mig.instances.iter().filter(|instance| !instance.uuid.is_empty()).filter(has_name);
    let pools = made.map(|instance| whole_pool(&instance.uuid, mig_resource(&instance.profile)));
    Layout { pools: pools.collect(), ..empty_layout(SharingMode::Mig) }.into()
}

fn add_instance(layout: &mut Layout, instance: &MigInstance, partition: &MigPartition) -> Result<(), String> {
    let MigPartition { whole, mps, time_slicing } = partition;
    match (whole, mps, time_slicing) {
        (Some(Whole { resource }), None, None) => {
            layout.pools.push(whole_pool(&instance.uuid, check_resource_name(resource)?));
        }
        (None, Some(mps), None) => {
            let (pools, daemon) = mps_pools(&instance.uuid, mps, true)?;
            layout.pools.extend(pools);
            layout.daemons.insert(instance.uuid.clone(), daemon);
        }
        (None, None, Some(slicing)) => layout.pools.push(replica_pool(&instance.uuid, slicing)?),
        _ => {
            return Err(format!(
                "MIG instance {} at {}: the spec must set exactly one of whole, mps and timeSlicing",
                instance.profile, instance.start
            ));
        }
    }
    Ok(())
}

fn mps_pools(device: &str, partition: &MpsPartition, mig: bool) -> Result<(Vec<Pool>, wire::DaemonSettings), String> {
    let MpsPartition { multi_user, compute_mode, enforcement, slices } = partition;
    let total: u64 = slices.iter().map(|slices| u64::from(slices.count)).sum();
    if total == 0 || total > u64::from(MAX_CLIENTS) {
        return Err(format!("one device cannot have {total} MPS shares; it can have 1 to {MAX_CLIENTS}"));
    }
    let mut pools: Vec<Pool> = Vec::new();
    let (mut most_threads, mut most_memory) = (None, None);
    for slices in slices {
        let resource = check_resource_name(&slices.resource)?;
        if let Some(wrong) = slices.threads.iter().find(|&&percent| Percent::new(percent).is_err()) {
            return Err(format!("{resource}: {wrong} is not a thread percentage from 1 to 100"));
        }
        if slices.max_clients == Some(0) {
            return Err(format!("{resource}: maxClients must be at least 1"));
        }
        if slices.memory_mib.contains(&0) {
            return Err(format!("{resource}: 0 MiB is not a memory limit; the minimum is 1 MiB"));
        }
        check_limit_counts(&resource, slices.count, [slices.threads.len(), slices.memory_mib.len()])?;
        let Some(end) = slices.first.checked_add(slices.count) else {
            return Err(format!(
                "{resource}: the first of {} shares cannot have number {}",
                slices.count, slices.first
            ));
        };
        let overlaps =
            |pool: &&Pool| pool.resource == resource && pool.first < end && slices.first < pool.first + pool.count;
        if pools.iter().find(overlaps).is_some() {
            return Err(format!("{resource}: some shares from {} to {} are defined twice", slices.first, end - 1));
        }
        most_threads = most_threads.max(slices.threads.last().copied());
        most_memory = most_memory.max(slices.memory_mib.last().copied());
        let kind = PoolKind::Mps {
            memory_mib: slices.memory_mib.clone(),
            threads: slices.threads.clone(),
            max_clients: slices.max_clients,
        };
        pools.push(Pool { device: device.to_owned(), resource, first: slices.first, count: slices.count, kind });
    }
    let unlimited = |some: fn(&cleave_api::gpunode::MpsSlices) -> bool| slices.iter().any(some);
    let daemon = wire::DaemonSettings {
        multi_user: *multi_user,
        exclusive: !mig && *compute_mode == ComputeMode::ExclusiveProcess,
        // The daemon's default limits equal the limits of the largest allocation. The door sets the
        // lower limits of a smaller allocation. If the door cannot set limits, the environment
        // variables of the container do.
        default_threads: most_threads.filter(|_| !unlimited(|slices| slices.threads.is_empty())),
        default_memory_mib: most_memory.filter(|_| !unlimited(|slices| slices.memory_mib.is_empty())),
        accept_advisory: *enforcement == MpsEnforcement::Advisory,
    };
    Ok((pools, daemon))
}

/// Checks that each list of limits is empty or has an entry for every number of shares.
fn check_limit_counts(resource: &str, count: u32, limits: [usize; 2]) -> Result<(), String> {
    if limits.iter().any(|&limits| limits != 0 && limits < count as usize) {
        return Err(format!("{resource}: there are {count} shares but limits for fewer"));
    }
    Ok(())
}

/// Returns the pool of a time-sliced device's replicas.
fn replica_pool(device: &str, partition: &TimeSlicedPartition) -> Result<Pool, String> {
    let TimeSlicedPartition { resource, replicas, interval: _ } = partition;
    if *replicas == 0 || *replicas > MAX_SLICES_PER_POOL {
        return Err(format!(
            "one GPU cannot have {replicas} time-sliced replicas; it can have 1 to {MAX_SLICES_PER_POOL}"
        ));
    }
    let resource = check_resource_name(resource)?;
    Ok(Pool { device: device.to_owned(), resource, first: 0, count: *replicas, kind: PoolKind::TimeSliced })
}

fn interval_note(slicing: Option<&TimeSlicedPartition>) -> String {
    match slicing.map(|slicing| slicing.interval) {
        None | Some(Interval::Default) => String::new(),
        Some(interval) => format!("the time slice is unchanged: NVML has no call to set the interval {interval:?}"),
    }
}

/// Returns the resource name if it is valid.
fn check_resource_name(resource: &str) -> Result<String, String> {
    match ResourceName::parse(resource) {
        Ok(_) => Ok(resource.to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use cleave_api::gpunode::MpsSlices;
    use cleave_plan::units::{Mebibytes, Sms};
    use proptest::prelude::*;

    use super::*;
    use crate::fixtures::mps_partition;
    pub(crate) use crate::fixtures::{gpu, mps_spec};

    /// Returns a GPU with some of the MIG profiles of an 80 GB H100.
    pub(crate) fn mig_gpu(uuid: &str, enabled: bool, instances: Vec<MigInstance>) -> Gpu {
        let profile = |name: &str, slices, size, starts: &[u32]| cleave_gpu::nvml::MigProfile {
            id: slices,
            name: name.into(),
            memory: Mebibytes(u64::from(size) * 9_984),
            sms: Sms(slices * 16),
            slices,
            size,
            starts: starts.to_vec(),
        };
        let profiles = vec![
            profile("1g.10gb", 1, 1, &[0, 1, 2, 3, 4, 5, 6]),
            profile("2g.20gb", 2, 2, &[0, 2, 4]),
            profile("3g.40gb", 3, 4, &[0, 4]),
            profile("4g.40gb", 4, 4, &[0]),
            profile("7g.80gb", 7, 8, &[0]),
            profile("1g.10gb+me", 1, 1, &[0, 1, 2, 3, 4, 5, 6]),
            profile("1g.20gb", 1, 2, &[0, 2, 4, 6]),
        ];
        Gpu { mig: Some(MigState { enabled, pending: None, profiles, instances }), ..gpu(uuid, 0) }
    }

    pub(crate) fn timeslice_spec(uuid: &str, replicas: u32) -> GpuSpec {
        let partition =
            TimeSlicedPartition { resource: "nvidia.com/gpu-timeslice".into(), replicas, interval: Interval::Default };
        GpuSpec { partition: Partition { time_slicing: Some(partition), ..Partition::default() }, ..mps_spec(uuid, 1) }
    }

    #[test]
    fn a_gpu_without_a_spec_is_whole() {
        let TargetLayout { layout, changes, .. } = target_layout(None, &gpu("GPU-a", 0), false).unwrap();
        assert_eq!(layout, whole_gpu_layout("GPU-a", "nvidia.com/gpu"));
        assert_eq!(layout.pools[0].ids().collect::<Vec<_>>(), ["GPU-a::0"]);
        assert!(changes.is_empty());
    }

    #[test]
    fn the_daemons_default_limits_are_the_limits_of_the_largest_allocation() {
        let layout = target_layout(Some(&mps_spec("GPU-a", 10)), &gpu("GPU-a", 0), false).unwrap().layout;
        let daemon = &layout.daemons["GPU-a"];
        assert_eq!((daemon.default_threads, daemon.default_memory_mib), (Some(100), Some(143_027)));
        assert!(daemon.exclusive && daemon.multi_user);
        assert_eq!(layout.pools[0].ids().count(), 10);
    }

    #[test]
    fn the_daemon_has_no_default_limits_if_shares_have_no_limits() {
        let mut spec = mps_spec("GPU-a", 10);
        let slices = &mut spec.partition.mps.as_mut().unwrap().slices[0];
        slices.threads.clear();
        slices.memory_mib.clear();
        let layout = target_layout(Some(&spec), &gpu("GPU-a", 0), false).unwrap().layout;
        assert_eq!(layout.daemons["GPU-a"].default_threads, None);
        assert_eq!(layout.daemons["GPU-a"].default_memory_mib, None);
    }

    #[test]
    fn an_invalid_spec_is_refused_with_a_reason() {
        let refused = |change: &dyn Fn(&mut GpuSpec)| {
            let mut spec = mps_spec("GPU-a", 4);
            change(&mut spec);
            target_layout(Some(&spec), &gpu("GPU-a", 0), false).unwrap_err()
        };
        let slices = |change: &dyn Fn(&mut MpsSlices)| {
            refused(&|spec| change(&mut spec.partition.mps.as_mut().unwrap().slices[0]))
        };
        assert!(slices(&|s| s.count = 0).contains("1 to 48"));
        assert!(slices(&|s| s.count = 49).contains("49 MPS shares"));
        assert!(slices(&|s| s.threads[1] = 0).contains("0 is not a thread percentage"));
        assert!(slices(&|s| s.threads[1] = 101).contains("101"));
        assert!(slices(&|s| s.max_clients = Some(0)).contains("maxClients must be at least 1"));
        assert!(slices(&|s| s.memory_mib[0] = 0).contains("0 MiB"));
        assert!(slices(&|s| s.memory_mib.truncate(3)).contains("but limits for fewer"));
        assert!(slices(&|s| s.resource = "gpu".into()).contains("not the name of an extended resource"));
        assert!(slices(&|s| s.first = u32::MAX).contains("cannot have number"));
        assert!(refused(&|spec| spec.partition.mps = None).contains("exactly one"));
        assert!(
            refused(&|spec| spec.partition.whole = Some(Whole { resource: "nvidia.com/gpu".into() }))
                .contains("exactly one")
        );
        assert!(refused(&|spec| spec.partition.mps.as_mut().unwrap().slices.clear()).contains("0 MPS shares"));
        let twice = |spec: &mut GpuSpec| {
            let slices = &mut spec.partition.mps.as_mut().unwrap().slices;
            slices.push(slices[0].clone());
        };
        assert!(refused(&twice).contains("twice"));
        let old = Gpu { compute_capability: (6, 1), model: "Tesla P4".into(), ..gpu("GPU-a", 0) };
        assert!(target_layout(Some(&mps_spec("GPU-a", 4)), &old, false).unwrap_err().contains("Tesla P4 has 6.1"));
        assert!(
            target_layout(Some(&timeslice_spec("GPU-a", 0)), &old, false)
                .unwrap_err()
                .contains("0 time-sliced replicas")
        );
    }

    #[test]
    fn mig_instances_match_by_profile_and_placement_and_others_need_changes() {
        let instance = |profile: &str, start, uuid: &str| MigInstance {
            uuid: uuid.into(),
            profile: profile.into(),
            start,
            gpu_instance: start + 7,
            compute_instance: Some(0),
        };
        let instances =
            vec![instance("1g.10gb+me", 0, "MIG-a"), instance("3g.40gb", 4, "MIG-b"), instance("1g.10gb", 1, "")];
        let gpu = mig_gpu("GPU-a", true, instances.clone());
        let served = target_layout(None, &gpu, false).unwrap().layout;
        assert_eq!(
            served.pools.iter().map(|pool| (pool.device.as_str(), pool.resource.as_str())).collect::<Vec<_>>(),
            [("MIG-a", "nvidia.com/mig-1g.10gb.me"), ("MIG-b", "nvidia.com/mig-3g.40gb")]
        );
        let part = |profile: &str, start, partition| MigInstanceSpec { profile: profile.into(), start, partition };
        let spec = GpuSpec {
            partition: Partition {
                mig: Some(vec![
                    part("3g.40gb", 4, MigPartition { mps: Some(mps_partition(4)), ..MigPartition::default() }),
                    part("3g.40gb", 0, MigPartition { mps: Some(mps_partition(4)), ..MigPartition::default() }),
                ]),
                ..Partition::default()
            },
            ..mps_spec("GPU-a", 1)
        };
        let TargetLayout { layout, changes, .. } = target_layout(Some(&spec), &gpu, false).unwrap();
        assert_eq!(layout.pools.len(), 1);
        assert!(!layout.daemons["MIG-b"].exclusive, "never on MIG");
        let [first, _, third] = instances.try_into().unwrap();
        assert_eq!(
            changes,
            [
                MigChange::Destroy(first),
                MigChange::Destroy(third),
                MigChange::Create { profile: "3g.40gb".into(), start: 0 }
            ],
            "the instance of the spec is kept"
        );
        for (whole, was_mig) in [(Some(&mps_spec("GPU-a", 4)), false), (None, true)] {
            let TargetLayout { layout, changes, .. } = target_layout(whole, &gpu, was_mig).unwrap();
            assert_eq!(
                (layout, changes.len()),
                (empty_layout(SharingMode::Mig), 4),
                "only after the instances are destroyed and MIG mode is off"
            );
            assert_eq!(changes[3], MigChange::Mode(false));
            let off = mig_gpu("GPU-a", false, vec![]);
            assert!(target_layout(whole, &off, was_mig).unwrap().changes.is_empty());
            let mut pending = off;
            pending.mig.as_mut().unwrap().pending = Some(true);
            assert_eq!(target_layout(whole, &pending, was_mig).unwrap().changes, [MigChange::Mode(false)]);
        }
        assert!(target_layout(None, &gpu, false).unwrap().changes.is_empty(), "another program created them");
        let mut invalid = spec.clone();
        invalid.partition.mig.as_mut().unwrap()[1].partition = MigPartition::default();
        assert!(
            target_layout(Some(&invalid), &gpu, false).unwrap_err().contains("exactly one"),
            "before the instance is created"
        );
    }

    #[test]
    fn only_canonical_slice_ids_are_parsed() {
        assert_eq!(parse_slice_id("GPU-a::12"), Some(("GPU-a", 12)));
        assert_eq!(parse_slice_id("GPU-a::0"), Some(("GPU-a", 0)));
        for bad in
            ["", "GPU-a", "GPU-a::", "::1", "GPU-a::01", "GPU-a::+1", "GPU-a::-1", "GPU-a::1 ", "GPU-a::4294967296"]
        {
            assert_eq!(parse_slice_id(bad), None, "{bad}");
        }
    }

    proptest! {
        #[test]
        fn every_slice_id_is_parsed_to_its_device_and_number(device in "[A-Za-z0-9-]{1,40}", number: u32) {
            let id = slice_id(&device, number);
            prop_assert_eq!(parse_slice_id(&id), Some((device.as_str(), number)));
        }
    }
}
