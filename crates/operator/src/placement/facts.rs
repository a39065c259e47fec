//! What a `GpuNode` says to the ledger.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::GpuNode;
use cleave_api::cordon::Cordons;
use cleave_api::gpunode::GpuStatus;
use cleave_api::names::CORDON_ANNOTATION;
use cleave_api::placement::ReservedUnits;
use cleave_plan::ledger::{Allocation, DeviceFacts, NodeFacts, Reservation, Units};

use crate::pods::PodObject;
use crate::policies::partition;
use crate::rollout::Mps;

/// What its devices have. Units that cannot be given now, and may be later, count as used: those of
/// a GPU that becomes something else, that are told as unhealthy or cordoned, or of a node whose
/// agent is not ready, since a pod that comes there fails; shares under MPS where these are
/// `withheld`, since their MPS host is being replaced.
///
/// And the pods on devices that give nothing now: their leaving frees nothing.
pub(super) fn of(object: &GpuNode, ready: bool, mps: &Mps, withheld: bool) -> (NodeFacts, BTreeSet<String>) {
    let gpus = object.status.iter().flat_map(|status| &status.gpus);
    let annotations = object.metadata.annotations.as_ref();
    let cordons = Cordons::read(annotations.and_then(|annotations| annotations.get(CORDON_ANNOTATION)));
    let (mut facts, mut stuck) = (NodeFacts::default(), BTreeSet::new());
    for gpu in gpus {
        facts.model.clone_from(&gpu.model);
        let wanted = object.spec.gpus.iter().find(|spec| spec.uuid == gpu.uuid);
        let becoming = wanted.filter(|spec| !partition::is_reached(&spec.partition, gpu));
        let given = ready && gpu.health.healthy && becoming.is_none() && !cordons.0.contains_key(&gpu.uuid);
        let given_of = |resource: &str| given && !(withheld && mps.serves(resource));
        for slice in &gpu.slices {
            let used = if given_of(&slice.resource) {
                slice.in_use.saturating_add(slice.unhealthy).min(slice.total)
            } else {
                slice.total
            };
            facts.devices.push(DeviceFacts {
                device: slice.device.clone(),
                resource: slice.resource.clone(),
                capacity: slice.total,
                used,
            });
        }
        if let Some(spec) = becoming {
            facts.devices.extend(promised(gpu, &spec.partition));
        }
        for held in &gpu.allocations {
            let units = u32::try_from(held.ids.len()).ok().and_then(Units::new);
            facts.allocations.extend(units.map(|units| Allocation {
                pod: held.pod.clone(),
                resource: held.resource.clone(),
                device: held.device.clone(),
                units,
            }));
            if !given_of(&held.resource) {
                stuck.insert(held.pod.clone());
            }
        }
    }
    (facts, stuck)
}

/// What a GPU will have: nothing of it is free yet.
fn promised(gpu: &GpuStatus, partition: &cleave_api::gpunode::Partition) -> Vec<DeviceFacts> {
    let mut sums: BTreeMap<(Option<u32>, String), u32> = BTreeMap::new();
    for slice in partition::desired(partition, gpu) {
        let sum = sums.entry((slice.placement, slice.resource)).or_default();
        *sum = sum.saturating_add(slice.count);
    }
    let device = |placement: Option<u32>| match placement {
        // It has no UUID before it is there.
        Some(start) => format!("{} at {start}, to be made", gpu.uuid),
        None => format!("{}, to be cut", gpu.uuid),
    };
    let facts = |((placement, resource), capacity)| DeviceFacts {
        device: device(placement),
        resource,
        capacity,
        used: capacity,
    };
    sums.into_iter().map(facts).collect()
}

/// What is noted on a pod, as the ledger has it.
pub(super) fn noted(pod: &PodObject) -> BTreeMap<String, Vec<Reservation>> {
    let reservation = |held: &ReservedUnits| {
        let units = Units::new(held.units)?;
        Some(Reservation { resource: held.resource.clone(), units, device: held.device.clone() })
    };
    let nodes = pod.placement.iter().flat_map(|placement| &placement.nodes);
    nodes.map(|(node, held)| (node.clone(), held.iter().filter_map(reservation).collect())).collect()
}
