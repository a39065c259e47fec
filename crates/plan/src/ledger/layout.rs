//! Decides on which devices of a node the ledger reserves the units of its claims.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::claims::Claims;
use super::device_units::DeviceUnits;
use super::facts::Reservation;
use super::node::{AllocatedUnits, Allocations, UnitsByDevice};
use super::pack::{assign_to_devices, tightest_devices};
use super::request::{DeviceRequest, Units};

/// A pod's claim on one node.
pub(super) struct NodeClaim<'a> {
    device_requests: &'a [DeviceRequest],
    /// The pod's annotated reservations on the node.
    annotated: &'a [Reservation],
    /// The pod's allocations on the node.
    allocated: &'a [AllocatedUnits],
}

/// Returns the claims of these pods on a node, one claim for each pod.
pub(super) fn claims_on_node<'a>(
    claims: &'a Claims,
    pods: &BTreeSet<Arc<str>>,
    node: &str,
    allocated: &'a Allocations,
) -> Vec<NodeClaim<'a>> {
    let of = |pod: &Arc<str>| {
        let claim = claims.get(pod);
        let annotated = claim.and_then(|claim| claim.annotated.get(node));
        NodeClaim {
            device_requests: claim.map(|claim| claim.device_requests.as_slice()).unwrap_or_default(),
            annotated: annotated.map(Vec::as_slice).unwrap_or_default(),
            allocated: allocated.get(pod).map(AsRef::as_ref).unwrap_or_default(),
        }
    };
    pods.iter().map(of).collect()
}

fn matches_device(reservation: &Reservation, allocation: &AllocatedUnits) -> bool {
    matches_units(reservation, allocation) && *reservation.device == *allocation.device
}

fn matches_units(reservation: &Reservation, allocation: &AllocatedUnits) -> bool {
    reservation.units == allocation.units && *reservation.resource == *allocation.resource
}

impl<'a> NodeClaim<'a> {
    /// Compares allocations with annotated reservations. Returns the indices of reservations
    /// without an allocation, and the allocations without a reservation.
    fn compare_with_annotation(&self) -> (Vec<usize>, Vec<&'a AllocatedUnits>) {
        let mut left: Vec<usize> = (0..self.annotated.len()).collect();
        let elsewhere = self.allocated.iter().filter(|part| {
            let index = left.iter().position(|note| matches_device(&self.annotated[*note], part));
            index.map(|index| left.remove(index)).is_none()
        });
        let elsewhere = elsewhere.collect();
        (left, elsewhere)
    }
}

/// Swaps the annotated reservations of two pods if one pod was allocated the units that the other
/// pod's annotation names. If the kubelet allocated other units to a pod, and no other pod's
/// annotation names these units, the pod's reservation moves to them.
pub(super) fn swap_reservations(claims: &mut Claims, pods: &BTreeSet<Arc<str>>, node: &str, allocated: &Allocations) {
    let all = claims_on_node(claims, pods, node, allocated);
    if all
        .iter()
        .all(|one| one.allocated.is_empty() || one.annotated.is_empty() || one.compare_with_annotation().1.is_empty())
    {
        return;
    }
    let mut notes: Vec<Vec<Reservation>> = all.iter().map(|one| one.annotated.to_vec()).collect();
    let (mut left, elsewhere): (Vec<_>, Vec<_>) = all.iter().map(NodeClaim::compare_with_annotation).unzip();
    for (pod, parts) in elsewhere.into_iter().enumerate() {
        for part in parts {
            // A swap with an earlier pod may already have moved the reservation to this device.
            let own = left[pod].iter().position(|note| matches_device(&notes[pod][*note], part));
            let own = own.or_else(|| left[pod].iter().position(|note| matches_units(&notes[pod][*note], part)));
            let Some(own) = own.map(|own| left[pod].remove(own)) else { continue };
            let other = left.iter().enumerate().filter(|(other, _)| *other != pod).find_map(|(other, left)| {
                Some((other, *left.iter().find(|note| matches_device(&notes[other][**note], part))?))
            });
            let device = std::mem::replace(&mut notes[pod][own].device, part.device.to_string());
            if let Some((other, note)) = other.filter(|_| *device != *part.device) {
                notes[other][note].device = device;
            }
        }
    }
    let changed = pods.iter().zip(&all).zip(notes).filter(|((_, one), notes)| one.annotated != notes.as_slice());
    let changed: Vec<(Arc<str>, Vec<Reservation>)> = changed.map(|((pod, _), notes)| (pod.clone(), notes)).collect();
    set_reservations(claims, node, changed);
}

/// Replaces the annotated reservations of these pods on a node, in the ledger only.
pub(super) fn set_reservations(claims: &mut Claims, node: &str, notes: Vec<(Arc<str>, Vec<Reservation>)>) {
    for (pod, notes) in notes {
        claims.change(&pod, |claim| drop(claim.annotated.insert(node.to_owned(), notes)));
    }
}

/// Returns new reservations for all units of the claims: allocated units where they are, and
/// missing units regardless of the annotated reservations. Returns `None` if the missing units do
/// not fit together.
pub(super) fn new_reservations(
    units_by_device: &BTreeMap<String, UnitsByDevice>,
    claimed: &[NodeClaim<'_>],
) -> Option<Vec<Vec<Reservation>>> {
    let note = |resource: &str, units, device: &str| Reservation {
        resource: resource.to_owned(),
        units,
        device: device.to_owned(),
    };
    let given =
        |one: &NodeClaim<'_>| one.allocated.iter().map(|part| note(&part.resource, part.units, &part.device)).collect();
    let mut notes: Vec<Vec<Reservation>> = claimed.iter().map(given).collect();
    let mut wanted: BTreeMap<&str, Vec<(usize, Units)>> = BTreeMap::new();
    for (pod, one) in claimed.iter().enumerate() {
        for (resource, missing) in missing_units(one.device_requests, one.allocated) {
            wanted.entry(resource).or_default().extend(missing.iter().map(|(units, _)| (pod, *units)));
        }
    }
    for (resource, parts) in wanted.into_iter().filter(|(_, parts)| !parts.is_empty()) {
        let units_by_device = units_by_device.get(resource)?;
        let free: Vec<u32> =
            units_by_device.values().map(|device_units| device_units.without_reservations().free()).collect();
        let sizes: Vec<u32> = parts.iter().map(|(_, units)| units.get()).collect();
        let devices = assign_to_devices(&sizes, &free, &mut tightest_devices)?;
        for ((pod, units), device) in parts.into_iter().zip(devices) {
            notes.get_mut(pod)?.push(note(resource, units, units_by_device.keys().nth(device)?));
        }
    }
    Some(notes)
}

/// Replaces all reservations of a node by the reservations that its claims need. Returns the
/// requests that fit on no device.
pub(super) fn reserve_missing(
    units_by_device: &mut BTreeMap<String, UnitsByDevice>,
    claimed: &[NodeClaim<'_>],
) -> Vec<DeviceRequest> {
    let mut wanted: BTreeMap<&str, Vec<Units>> = BTreeMap::new();
    let mut annotated: Vec<&Reservation> = Vec::new();
    // If the kubelet has allocated a part of a request, prefer the same device for the remaining
    // units.
    let mut started_on: BTreeSet<(&str, &str)> = BTreeSet::new();
    for one in claimed {
        let (left, _) = one.compare_with_annotation();
        let mut left: Vec<&Reservation> = left.into_iter().map(|note| &one.annotated[note]).collect();
        for (resource, missing) in missing_units(one.device_requests, one.allocated) {
            started_on.extend(missing.iter().filter_map(|(_, device)| Some((resource, (*device)?))));
            for (units, _) in missing {
                wanted.entry(resource).or_default().push(units);
                let note = left.iter().position(|note| note.units == units && note.resource == resource);
                annotated.extend(note.map(|note| left.remove(note)));
            }
        }
    }
    // Place large reservations first, because they are harder to place elsewhere.
    annotated.sort_unstable_by(|one, other| other.units.cmp(&one.units).then_with(|| one.cmp(other)));
    for device_units in units_by_device.values_mut().flat_map(BTreeMap::values_mut) {
        *device_units = device_units.without_reservations();
    }
    for note in annotated {
        let Some(missing) = wanted.get_mut(note.resource.as_str()) else { continue };
        let Some(index) = missing.iter().position(|units| *units == note.units) else { continue };
        let device_units =
            units_by_device.get_mut(&note.resource).and_then(|units_by_device| units_by_device.get_mut(&note.device));
        if device_units.is_some_and(|device_units| device_units.reserve(note.units)) {
            missing.swap_remove(index);
        }
    }
    let mut short = Vec::new();
    for (resource, mut missing) in wanted {
        missing.sort_unstable_by(|one, other| other.cmp(one));
        let mut none = UnitsByDevice::new();
        let units_by_device = units_by_device.get_mut(resource).unwrap_or(&mut none);
        let started_on: Vec<bool> =
            units_by_device.keys().map(|device| started_on.contains(&(resource, device.as_str()))).collect();
        let left = reserve_sizes(units_by_device, &started_on, &missing);
        short.extend(left.into_iter().map(|units| DeviceRequest { resource: resource.to_owned(), units }));
    }
    short
}

/// Reserves these sizes, in descending order, on devices. If not all sizes fit, reserves as many as
/// fit one by one. Returns the sizes that do not fit.
fn reserve_sizes(units_by_device: &mut UnitsByDevice, started_on: &[bool], sizes: &[Units]) -> Vec<Units> {
    let mut free: Vec<u32> = units_by_device.values().map(DeviceUnits::free).collect();
    let mut order = |size: u32, free: &[u32]| {
        let mut devices = tightest_devices(size, free);
        devices.sort_by_key(|device| !started_on.get(*device).copied().unwrap_or_default());
        devices
    };
    let numbers: Vec<u32> = sizes.iter().map(|units| units.get()).collect();
    let together = assign_to_devices(&numbers, &free, &mut order);
    let mut left = Vec::new();
    for (index, &units) in sizes.iter().enumerate() {
        let device = match &together {
            Some(devices) => devices.get(index).copied(),
            None => order(units.get(), &free).first().copied(),
        };
        let device_units =
            device.and_then(|device| Some((units_by_device.values_mut().nth(device)?, free.get_mut(device)?)));
        let reserved = device_units.is_some_and(|(device_units, free)| {
            let reserved = device_units.reserve(units);
            *free = device_units.free();
            reserved
        });
        if !reserved {
            left.push(units);
        }
    }
    left
}

/// Units that a pod still needs, and the device on which the kubelet has allocated a part of the
/// same request.
type MissingUnits<'a> = (Units, Option<&'a str>);

/// Returns the units that a pod still needs, by resource.
///
/// Each allocation satisfies a request of the same size, if the pod has such a request. Otherwise
/// the allocation satisfies a part of the smallest larger request, because several containers can
/// share one request. Any other allocation reduces the remaining requests, the largest first.
pub(super) fn missing_units<'a>(
    device_requests: &'a [DeviceRequest],
    allocated: &'a [AllocatedUnits],
) -> BTreeMap<&'a str, Vec<MissingUnits<'a>>> {
    let mut missing: BTreeMap<&str, Vec<(u32, Option<&str>)>> = BTreeMap::new();
    for request in device_requests {
        missing.entry(&request.resource).or_default().push((request.units.get(), None));
    }
    for (resource, sizes) in &mut missing {
        let mut allocated: Vec<(u32, &str)> = allocated
            .iter()
            .filter(|part| *part.resource == **resource)
            .map(|part| (part.units.get(), &*part.device))
            .collect();
        allocated.retain(|(part, _)| match sizes.iter().position(|(size, _)| size == part) {
            Some(index) => {
                sizes.swap_remove(index);
                false
            }
            None => true,
        });
        allocated.sort_unstable_by(|one, other| other.cmp(one));
        for (mut part, device) in allocated {
            sizes.sort_unstable();
            if let Some((larger, started_on)) = sizes.iter_mut().find(|(size, _)| *size >= part) {
                *larger -= part;
                *started_on = Some(device);
            } else {
                while let Some((largest, started_on)) = sizes.pop() {
                    let settled = largest.min(part);
                    part -= settled;
                    if largest > settled {
                        sizes.push((largest - settled, started_on.or(Some(device))));
                    }
                    if part == 0 {
                        break;
                    }
                }
            }
            sizes.retain(|(size, _)| *size > 0);
        }
        sizes.sort_unstable();
    }
    let units = |(size, started_on): (u32, _)| Some((Units::new(size)?, started_on));
    missing.into_iter().map(|(resource, sizes)| (resource, sizes.into_iter().filter_map(units).collect())).collect()
}
