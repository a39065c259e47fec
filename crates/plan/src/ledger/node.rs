//! One node: the units of its devices, and their reservations.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::device_units::DeviceUnits;
use super::facts::{Allocation, DeviceFacts, NodeFacts, Reservation};
use super::request::{DeviceRequest, Units};

/// Capacity, use and reservations of one resource on one device, for reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceUsage {
    /// Name of the extended resource.
    pub resource: String,
    /// UUID of the device.
    pub device: String,
    /// Units that the kubelet can allocate.
    pub capacity: u32,
    /// Units that are allocated.
    pub used: u32,
    /// Units that are reserved for pods.
    pub reserved: u32,
    /// Units that are neither allocated nor reserved.
    pub free: u32,
}

/// Units of one resource by device.
pub(super) type UnitsByDevice = BTreeMap<String, DeviceUnits>;

/// A node as the ledger last observed it, and the reservations on the node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) model: String,
    /// Units by resource, then by device.
    pub(super) units_by_device: BTreeMap<String, UnitsByDevice>,
    /// Allocations of each pod.
    pub(super) allocations: Allocations,
    /// Requests of claims that fit on no device.
    pub(super) short: Vec<DeviceRequest>,
}

/// Units of one device that the kubelet has allocated to a pod. Allocations of a node share their
/// strings to save memory, because a large cluster has many allocations.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct AllocatedUnits {
    /// Name of the extended resource.
    pub(super) resource: Arc<str>,
    /// UUID of the device.
    pub(super) device: Arc<str>,
    /// Number of units.
    pub(super) units: Units,
}

/// Allocations on a node, by pod.
pub(super) type Allocations = BTreeMap<Arc<str>, Box<[AllocatedUnits]>>;

/// Numbers of units by resource and device.
pub type DeviceAmounts = BTreeMap<(String, String), u32>;

impl Node {
    /// Creates a node without reservations. `shared_name` returns the copy of a pod's name that
    /// other maps use.
    pub(super) fn from_facts(facts: NodeFacts, shared_name: impl Fn(&str) -> Option<Arc<str>>) -> Self {
        let mut allocations: BTreeMap<Arc<str>, Vec<AllocatedUnits>> = BTreeMap::new();
        let mut texts: BTreeSet<Arc<str>> = BTreeSet::new();
        let mut share = |text: &str| {
            let known = texts.get(text).cloned();
            known.unwrap_or_else(|| {
                let text = Arc::from(text);
                texts.insert(Arc::clone(&text));
                text
            })
        };
        let mut amounts: BTreeMap<(String, String), (u32, u32)> = BTreeMap::new();
        for DeviceFacts { device, resource, capacity, used } in facts.devices {
            // If a device is listed twice, use the lower capacity and the higher number of used
            // units.
            let amount = amounts.entry((resource, device)).or_insert((capacity, used));
            *amount = (amount.0.min(capacity), amount.1.max(used));
        }
        let mut sums: BTreeMap<(String, String), u32> = BTreeMap::new();
        for allocation in facts.allocations {
            let sum = sums.entry((allocation.resource.clone(), allocation.device.clone())).or_default();
            *sum = sum.saturating_add(allocation.units.get());
            let pod = shared_name(&allocation.pod).unwrap_or_else(|| Arc::from(allocation.pod));
            let (resource, device) = (share(&allocation.resource), share(&allocation.device));
            allocations.entry(pod).or_default().push(AllocatedUnits { resource, device, units: allocation.units });
        }
        let sorted = |mut parts: Vec<AllocatedUnits>| {
            parts.sort();
            parts.into_boxed_slice()
        };
        let allocations = allocations.into_iter().map(|(pod, parts)| (pod, sorted(parts))).collect();
        let mut units_by_device: BTreeMap<String, UnitsByDevice> = BTreeMap::new();
        for ((resource, device), (capacity, used)) in amounts {
            let key = (resource, device);
            let used = used.max(sums.get(&key).copied().unwrap_or(0));
            units_by_device.entry(key.0).or_default().insert(key.1, DeviceUnits::new(capacity, used));
        }
        Self { model: facts.model, units_by_device, allocations, short: Vec::new() }
    }

    /// Returns facts from which [`Self::from_facts`] creates the same node.
    pub(super) fn facts(&self) -> NodeFacts {
        let devices = self.devices().map(|usage| {
            let DeviceUsage { resource, device, capacity, used, .. } = usage;
            DeviceFacts { device, resource, capacity, used }
        });
        NodeFacts { model: self.model.clone(), devices: devices.collect(), allocations: self.allocations().collect() }
    }

    /// Returns all allocations.
    pub(super) fn allocations(&self) -> impl Iterator<Item = Allocation> {
        self.allocations.iter().flat_map(|(pod, parts)| {
            parts.iter().map(|part| Allocation {
                pod: pod.to_string(),
                resource: part.resource.to_string(),
                device: part.device.to_string(),
                units: part.units,
            })
        })
    }

    pub(super) fn reservations(&self) -> impl Iterator<Item = Reservation> {
        self.units_by_device.iter().flat_map(|(resource, units_by_device)| {
            units_by_device.iter().flat_map(|(device, device_units)| {
                device_units.reservations().map(|units| Reservation {
                    resource: resource.clone(),
                    units,
                    device: device.clone(),
                })
            })
        })
    }

    /// Returns the capacity, use and reservations of each device and resource.
    pub(super) fn devices(&self) -> impl Iterator<Item = DeviceUsage> {
        self.units_by_device.iter().flat_map(|(resource, units_by_device)| {
            units_by_device.iter().map(move |(device, device_units)| DeviceUsage {
                resource: resource.clone(),
                device: device.clone(),
                capacity: device_units.capacity(),
                used: device_units.used(),
                reserved: device_units.reserved(),
                free: device_units.free(),
            })
        })
    }

    /// Returns the number of used units of a device that belong to no pod that the node lists.
    pub(super) fn unlisted_units(&self, resource: &str, device: &str) -> u32 {
        let used =
            self.units_by_device.get(resource).and_then(|devices| devices.get(device)).map_or(0, DeviceUnits::used);
        let parts = self.allocations.values().flat_map(|parts| parts.iter());
        let listed = parts.filter(|part| &*part.resource == resource && &*part.device == device);
        used.saturating_sub(listed.map(|part| part.units.get()).sum())
    }

    /// Returns the node as other pods may use it: nominated units count as reserved.
    pub(super) fn without_nominated(&self, nominated: &DeviceAmounts) -> Self {
        let mut node = self.clone();
        for ((resource, device), &units) in nominated {
            let device_units =
                node.units_by_device.get_mut(resource).and_then(|units_by_device| units_by_device.get_mut(device));
            if let Some(device_units) = device_units
                && let Some(units) = Units::new(units.min(device_units.free()))
            {
                // Ignore errors: only free units are reserved, so this always succeeds.
                let _ = device_units.reserve(units);
            }
        }
        node
    }
}
