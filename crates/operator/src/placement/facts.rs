//! Translates a `GpuNode` and the annotations of pods into entries of the ledger.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cleave_api::GpuNode;
use cleave_api::cordon::Cordons;
use cleave_api::gpunode::{GpuStatus, Partition};
use cleave_api::names::CORDON_ANNOTATION;
use cleave_api::placement::ReservedUnits;
use cleave_plan::ledger::{Allocation, DeviceFacts, NodeFacts, Reservation, Units};

use crate::pods::PodObject;
use crate::policies::partition;
use crate::rollout::MpsState;

/// Why units of a node are briefly unavailable.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Absence {
    /// The node's agent is not ready.
    Agent,
    /// The GPU with this UUID does not have the partition of its spec.
    Partition(String),
}

/// Conditions that, besides the `GpuNode`, determine which units of a node are available.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Availability<'a> {
    /// Whether the node's agent is ready. A pod that starts on a node without an agent fails.
    pub(super) ready: bool,
    /// Whether MPS shares are withheld, because the node's MPS host is being replaced or is not
    /// ready.
    pub(super) withheld: bool,
    /// Absences that are treated as if they had ended.
    pub(super) over: &'a BTreeSet<Absence>,
}

/// Returns why units of a node are briefly unavailable.
pub(super) fn absences(object: &GpuNode, ready: bool) -> BTreeSet<Absence> {
    let gpus = object.status.iter().flat_map(|status| &status.gpus);
    let is_due = |gpu: &&GpuStatus| planned_partition(object, gpu).is_some();
    let partitions = gpus.filter(is_due).map(|gpu| Absence::Partition(gpu.uuid.clone()));
    partitions.chain((!ready).then_some(Absence::Agent)).collect()
}

/// Returns the partition of a GPU in the spec, if the GPU has another partition.
fn planned_partition<'o>(object: &'o GpuNode, gpu: &GpuStatus) -> Option<&'o Partition> {
    let spec = object.spec.gpus.iter().find(|spec| spec.uuid == gpu.uuid)?;
    (!partition::has_partition(&spec.partition, gpu)).then_some(&spec.partition)
}

/// Devices that serve no new pods, and the pods on them. Evictions of these pods free no units for
/// other pods.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Blocked {
    pub(super) devices: BTreeSet<String>,
    pub(super) pods: BTreeSet<String>,
}

/// Returns the node's devices for the ledger, and the devices that serve no new pods.
///
/// Units that are unavailable now but may be available later count as used:
///
/// - all units of a GPU that is being repartitioned, or is unhealthy, quiesced or cordoned
/// - units that are reported as unhealthy
/// - units that `availability` excludes
pub(super) fn node_facts(object: &GpuNode, availability: Availability<'_>, mps: &MpsState) -> (NodeFacts, Blocked) {
    let Availability { ready, withheld, over } = availability;
    let ready = ready || over.contains(&Absence::Agent);
    let gpus = object.status.iter().flat_map(|status| &status.gpus);
    let annotations = object.metadata.annotations.as_ref();
    let cordons = Cordons::read(annotations.and_then(|annotations| annotations.get(CORDON_ANNOTATION)));
    let (mut facts, mut blocked) = (NodeFacts::default(), Blocked::default());
    for gpu in gpus {
        facts.model.clone_from(&gpu.model);
        let planned = planned_partition(object, gpu);
        let quiesced = object.spec.gpus.iter().any(|spec| spec.uuid == gpu.uuid && spec.quiesced);
        let usable = ready && gpu.health.healthy && !quiesced && !cordons.0.contains_key(&gpu.uuid);
        let available = usable && planned.is_none();
        let is_available = |resource: &str| available && !(withheld && mps.may_be_mps_resource(resource));
        for slice in &gpu.slices {
            let used = if is_available(&slice.resource) {
                slice.in_use.saturating_add(slice.unhealthy).min(slice.total)
            } else {
                blocked.devices.insert(slice.device.clone());
                slice.total
            };
            facts.devices.push(DeviceFacts {
                device: slice.device.clone(),
                resource: slice.resource.clone(),
                capacity: slice.total,
                used,
            });
        }
        if let Some(partition) = planned {
            let repartitioned = usable && over.contains(&Absence::Partition(gpu.uuid.clone()));
            facts.devices.extend(planned_devices(gpu, partition, repartitioned));
        }
        for allocation in &gpu.allocations {
            let units = u32::try_from(allocation.ids.len()).ok().and_then(Units::new);
            facts.allocations.extend(units.map(|units| Allocation {
                pod: allocation.pod.clone(),
                resource: allocation.resource.clone(),
                device: allocation.device.clone(),
                units,
            }));
            if !is_available(&allocation.resource) {
                blocked.pods.insert(allocation.pod.clone());
            }
        }
    }
    (facts, blocked)
}

/// The numbers of all units and of healthy units of one resource on a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct UnitCounts {
    pub(super) total: u64,
    /// Units that the agent reports to the kubelet as healthy. Once the kubelet has reported these
    /// units, they are the node's allocatable units.
    pub(super) healthy: u64,
}

/// Returns the numbers of units of the node's GPUs, by resource. A GPU's health does not determine
/// which units are healthy. Units remain healthy while an MPS daemon is briefly unavailable, and
/// units in use remain healthy on a cordoned GPU.
pub(super) fn unit_counts(object: &GpuNode) -> BTreeMap<String, UnitCounts> {
    let mut counts: BTreeMap<String, UnitCounts> = BTreeMap::new();
    let slices = object.status.iter().flat_map(|status| &status.gpus).flat_map(|gpu| &gpu.slices);
    for slice in slices {
        let counts = counts.entry(slice.resource.clone()).or_default();
        counts.total = counts.total.saturating_add(slice.total.into());
        counts.healthy = counts.healthy.saturating_add(slice.total.saturating_sub(slice.unhealthy).into());
    }
    counts
}

/// Returns the names of the policies of a node's devices, by device.
pub(super) fn policies_by_device(object: &GpuNode) -> BTreeMap<String, Arc<str>> {
    let mut names: BTreeMap<&str, Arc<str>> = BTreeMap::new();
    let mut of_devices = BTreeMap::new();
    for gpu in object.status.iter().flat_map(|status| &status.gpus) {
        let spec = object.spec.gpus.iter().find(|spec| spec.uuid == gpu.uuid);
        let Some(policy) = spec.and_then(|spec| spec.policy.as_deref()) else { continue };
        let name = names.entry(policy).or_insert_with(|| policy.into());
        of_devices.extend(gpu.slices.iter().map(|slice| (slice.device.clone(), Arc::clone(name))));
    }
    of_devices
}

/// Returns the devices of a GPU after its repartitioning. Unless `repartitioned`, all of their
/// units count as used.
fn planned_devices(gpu: &GpuStatus, partition: &Partition, repartitioned: bool) -> Vec<DeviceFacts> {
    let mut sums: BTreeMap<(Option<u32>, String), (u32, u32)> = BTreeMap::new();
    for slice in partition::desired_slices(partition, gpu) {
        let (capacity, used) = sums.entry((slice.placement, slice.resource)).or_default();
        *capacity = capacity.saturating_add(slice.count);
        if slice.in_use || !repartitioned {
            *used = used.saturating_add(slice.count);
        }
    }
    let device = |placement: Option<u32>| match placement {
        // A MIG instance has no UUID before it exists.
        Some(start) => format!("{} (planned MIG instance at {start})", gpu.uuid),
        None => format!("{} (planned)", gpu.uuid),
    };
    let facts =
        |((placement, resource), (capacity, used))| DeviceFacts { device: device(placement), resource, capacity, used };
    sums.into_iter().map(facts).collect()
}

/// Returns the reservations in a pod's annotation, by the name of their node.
pub(super) fn annotated_reservations(pod: &PodObject) -> BTreeMap<String, Vec<Reservation>> {
    let reservation = |held: &ReservedUnits| {
        let units = Units::new(held.units)?;
        Some(Reservation { resource: held.resource.clone(), units, device: held.device.clone() })
    };
    let nodes = pod.placement.iter().flat_map(|placement| &placement.nodes);
    nodes.map(|(node, held)| (node.clone(), held.iter().filter_map(reservation).collect())).collect()
}
