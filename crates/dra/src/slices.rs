//! The slices that a node publishes.
use std::collections::BTreeMap;

use cleave_plan::Quantity;
use cleave_plan::mps::{MAX_CLIENTS, memory_limit};
use cleave_plan::units::Mebibytes;

use crate::devices::{Kind, OfferedDevice, Placement};
use crate::names::DRIVER;
use crate::pool::{OfferedGpu, Pool};
use crate::wire::{
    Attribute, Capacity, CounterConsumption, Device, MAX_ATTRIBUTE_LENGTH, MAX_COUNTER_SETS, MAX_DEVICES, Metadata,
    RequestPolicy, ResourcePool, ResourceSlice, ResourceSliceSpec, ValidRange,
};

/// Capacity of shared devices: equal MPS shares.
pub(crate) const UNITS: &str = "units";
/// Capacity: memory. Claims consume the memory of devices that are shared by memory.
pub(crate) const MEMORY: &str = "memory";
/// Capacity of devices that are shared by memory: MPS clients. Each share consumes one.
pub(crate) const CLIENTS: &str = "clients";
/// Capacity of time-sliced devices: replicas. Each share consumes one.
pub(crate) const REPLICAS: &str = "replicas";
/// Capacity of devices that are not shared: streaming multiprocessors.
const MULTIPROCESSORS: &str = "multiprocessors";

impl Pool {
    /// Returns the slices of the node, in the order in which they should be written: counters
    /// first, because the scheduler uses no device whose counters are missing.
    ///
    /// Raise `generation` if the number of slices changes, or if more than one slice changes. The
    /// scheduler then ignores the pool until all slices of the new generation are there.
    pub fn slices(&self, generation: i64) -> Vec<ResourceSlice> {
        let sets = self
            .gpus
            .iter()
            .filter_map(|offered| Some(offered.counters.as_ref()?.counter_set(&offered.gpu.uuid.device_name())));
        let sets: Vec<_> = sets.collect();
        let mut contents: Vec<(Vec<_>, Vec<_>)> =
            sets.chunks(MAX_COUNTER_SETS).map(|sets| (sets.to_vec(), Vec::new())).collect();
        for offered in &self.gpus {
            let devices: Vec<Device> = offered.devices.iter().map(|device| offered.wire_device(device)).collect();
            contents.extend(devices.chunks(MAX_DEVICES).map(|devices| (Vec::new(), devices.to_vec())));
        }
        let pool = ResourcePool { name: self.node.pool(), generation, resource_slice_count: contents.len() };
        let slice = |(index, (shared_counters, devices))| ResourceSlice {
            api_version: "resource.k8s.io/v1".to_owned(),
            kind: "ResourceSlice".to_owned(),
            metadata: Metadata { name: self.node.slice(index) },
            spec: ResourceSliceSpec {
                driver: DRIVER.to_owned(),
                node_name: self.node.as_str().to_owned(),
                pool: pool.clone(),
                shared_counters,
                devices,
            },
        };
        contents.into_iter().enumerate().map(slice).collect()
    }
}

impl OfferedGpu {
    fn wire_device(&self, device: &OfferedDevice) -> Device {
        let consumes_counters = self.counters.iter().map(|counters| CounterConsumption {
            counter_set: self.gpu.uuid.device_name(),
            counters: counters.consumption(&device.kind),
        });
        Device {
            name: device.name.clone(),
            allow_multiple_allocations: device.kind.is_shared().then_some(true),
            attributes: self.attributes(&device.kind),
            capacity: self.capacity(&device.kind),
            consumes_counters: consumes_counters.collect(),
            taints: self.gpu.taints.clone(),
        }
    }

    /// Returns the attributes of a device. Names without a domain belong to the driver.
    fn attributes(&self, kind: &Kind) -> BTreeMap<String, Attribute> {
        let mut attributes = BTreeMap::new();
        let mut text = |name: &str, value: &str| {
            if !value.is_empty() {
                attributes.insert(name.to_owned(), Attribute::String(truncated(value)));
            }
        };
        text("kind", kind.attribute());
        text("uuid", self.gpu.uuid.as_str());
        text("model", &self.gpu.model);
        text("driver", &self.gpu.driver);
        text("resource.kubernetes.io/pcieRoot", self.gpu.pcie_root.as_deref().unwrap_or_default());
        if let Some(placement) = kind.placement() {
            text("profile", placement.profile());
            attributes.insert("memorySlice".to_owned(), Attribute::Int(i64::from(placement.start())));
        }
        let unit_memory = match kind {
            Kind::Units(units) => Some(memory_limit(1, units.get(), self.gpu.memory)),
            Kind::InstanceUnits(placement, units) => {
                self.instance_memory(placement).map(|memory| memory_limit(1, units.get(), memory))
            }
            Kind::Whole | Kind::Memory(_) | Kind::Replicas(_) | Kind::Instance(_) => None,
        };
        if let Some(memory) = unit_memory.and_then(|memory| i64::try_from(memory.0).ok()) {
            attributes.insert("unitMemoryMiB".to_owned(), Attribute::Int(memory));
        }
        attributes
    }

    /// Returns the capacities of a device. Requests consume every capacity of a shared device, so a
    /// shared device has no capacity that is only information.
    fn capacity(&self, kind: &Kind) -> BTreeMap<String, Capacity> {
        match kind {
            Kind::Whole => information(Some(self.gpu.memory), self.gpu.sms.0),
            Kind::Instance(placement) => {
                let profile = self.gpu.profiles.iter().find(|profile| profile.name == placement.profile());
                information(self.instance_memory(placement), profile.map_or(0, |profile| profile.sms))
            }
            Kind::Units(units) | Kind::InstanceUnits(_, units) => {
                BTreeMap::from([(UNITS.to_owned(), consumable(u64::from(units.get()), Quantity::whole))])
            }
            Kind::Memory(gib) => BTreeMap::from([
                (MEMORY.to_owned(), consumable(*gib, |gib| Quantity::new(&format!("{gib}Gi")))),
                (CLIENTS.to_owned(), one_of(u64::from(MAX_CLIENTS))),
            ]),
            Kind::Replicas(replicas) => BTreeMap::from([(REPLICAS.to_owned(), one_of(u64::from(replicas.get())))]),
        }
    }

    /// Returns the memory of an instance, if the profiles report it.
    fn instance_memory(&self, placement: &Placement) -> Option<Mebibytes> {
        let profile = self.gpu.profiles.iter().find(|profile| profile.name == placement.profile())?;
        Some(Mebibytes(profile.memory_mib)).filter(|memory| memory.0 > 0)
    }
}

impl Kind {
    /// Returns the value of the attribute `kind`, from which the device classes select.
    const fn attribute(&self) -> &'static str {
        match self {
            Self::Whole => "gpu",
            Self::Units(_) => "mps",
            Self::Memory(_) => "mem",
            Self::Replicas(_) => "timeslice",
            Self::Instance(_) => "mig",
            Self::InstanceUnits(..) => "mig-mps",
        }
    }
}

/// Returns capacities that requests only compare with.
fn information(memory: Option<Mebibytes>, sms: u32) -> BTreeMap<String, Capacity> {
    let only = |value| Capacity { value, request_policy: None };
    let memory = memory.filter(|memory| memory.0 > 0).map(|memory| (MEMORY, only(Quantity::mebibytes(memory.0))));
    let sms = (sms > 0).then(|| (MULTIPROCESSORS, only(Quantity::whole(u64::from(sms)))));
    memory.into_iter().chain(sms).map(|(name, capacity)| (name.to_owned(), capacity)).collect()
}

/// Returns a capacity of which a request consumes any whole amount from 1 on, and 1 by default.
fn consumable(total: u64, quantity: impl Fn(u64) -> Quantity) -> Capacity {
    let one = quantity(1);
    // The API refuses a step that exceeds the capacity together with the minimum.
    let step = (total > 1).then(|| one.clone());
    let valid_range = ValidRange { min: one.clone(), max: quantity(total), step };
    Capacity { value: quantity(total), request_policy: Some(RequestPolicy { default: one, valid_range }) }
}

/// Returns a capacity of which each request consumes exactly 1.
fn one_of(total: u64) -> Capacity {
    let one = Quantity::whole(1);
    let valid_range = ValidRange { min: one.clone(), max: one.clone(), step: None };
    Capacity { value: Quantity::whole(total), request_policy: Some(RequestPolicy { default: one, valid_range }) }
}

/// Shortens a text to the length that the API allows for an attribute.
fn truncated(text: &str) -> String {
    let end = (0..=MAX_ATTRIBUTE_LENGTH.min(text.len())).rev().find(|&end| text.is_char_boundary(end));
    text.get(..end.unwrap_or(0)).unwrap_or_default().to_owned()
}
