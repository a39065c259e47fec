//! A model of the scheduler's rules for one pool: exclusive devices, consumable capacity, shared
//! counters and taints, as in `k8s.io/dynamic-resource-allocation` v0.37.2. The model reads only
//! the slices.
//!
//! The test `allocator` compares the model with the allocator itself.
use std::collections::{BTreeMap, BTreeSet};

use cleave_dra::wire::{AllocatedDevice, Capacity, Device, DeviceAllocation, ResourceSlice};
use cleave_plan::Quantity;

/// An amount of each capacity that a request names, in the units of the capacity.
pub(crate) type Amounts = BTreeMap<String, Quantity>;

/// The pool, and its allocated devices.
pub(crate) struct Scheduler {
    pool: String,
    driver: String,
    /// Devices in the order in which the scheduler tries them.
    devices: Vec<Device>,
    /// Available amounts of all counters.
    counters: Vec<u64>,
    /// The counters that each device consumes, as indices of `counters`, and the amounts.
    consumption: BTreeMap<String, Vec<(usize, u64)>>,
    allocated: Vec<AllocatedDevice>,
    shares: u32,
}

fn milli(quantity: &Quantity) -> u64 {
    quantity.milli().expect("a quantity")
}

impl Scheduler {
    pub(crate) fn new(slices: &[ResourceSlice]) -> Self {
        let mut slices: Vec<&ResourceSlice> = slices.iter().collect();
        slices.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
        let (mut counters, mut index) = (Vec::new(), BTreeMap::new());
        for set in slices.iter().flat_map(|slice| &slice.spec.shared_counters) {
            for (name, counter) in &set.counters {
                let before = index.insert((&set.name, name), counters.len());
                assert_eq!(before, None, "two sets have the name {}", set.name);
                counters.push(milli(&counter.value));
            }
        }
        let devices: Vec<Device> = slices.iter().flat_map(|slice| slice.spec.devices.clone()).collect();
        let consumption = devices.iter().map(|device| {
            let consumed = device.consumes_counters.iter().flat_map(|set| {
                set.counters.iter().map(|(name, counter)| (index[&(&set.counter_set, name)], milli(&counter.value)))
            });
            (device.name.clone(), consumed.collect())
        });
        let consumption = consumption.collect();
        let spec = slices.first().map(|slice| slice.spec.clone());
        Self {
            pool: spec.as_ref().map_or_else(String::new, |spec| spec.pool.name.clone()),
            driver: spec.map_or_else(String::new, |spec| spec.driver),
            devices,
            counters,
            consumption,
            allocated: Vec::new(),
            shares: 0,
        }
    }

    pub(crate) fn devices(&self) -> &[Device] {
        &self.devices
    }

    pub(crate) fn allocated(&self) -> &[AllocatedDevice] {
        &self.allocated
    }

    /// Returns the consumed amount of a capacity, or `None` if the policy does not allow the
    /// request.
    fn consumed(capacity: &Capacity, wanted: Option<&Quantity>) -> Option<u64> {
        let Some(policy) = &capacity.request_policy else {
            return Some(wanted.map_or_else(|| milli(&capacity.value), milli));
        };
        let range = &policy.valid_range;
        let Some(wanted) = wanted.map(milli) else { return Some(milli(&policy.default)) };
        let min = milli(&range.min);
        let rounded = match &range.step {
            _ if wanted < min => min,
            Some(step) => min + (wanted - min).div_ceil(milli(step)) * milli(step),
            None => wanted,
        };
        (rounded <= milli(&range.max)).then_some(rounded)
    }

    /// Returns the allocation of a device, or `None` if the device cannot be allocated now.
    pub(crate) fn try_device(&self, device: &Device, wanted: &Amounts) -> Option<AllocatedDevice> {
        let shared = device.allow_multiple_allocations == Some(true);
        let in_use = self.allocated.iter().any(|one| one.device == device.name);
        // The claims of the tests tolerate no taints.
        if !device.taints.is_empty()
            || in_use && !shared
            || wanted.keys().any(|name| !device.capacity.contains_key(name))
        {
            return None;
        }
        let mut consumed_capacity = BTreeMap::new();
        for (name, capacity) in &device.capacity {
            let amount = Self::consumed(capacity, wanted.get(name))?;
            let used = self.allocated.iter().filter(|one| shared && one.device == device.name);
            let used: u64 = used.map(|one| milli(&one.consumed_capacity[name])).sum();
            if used + amount > milli(&capacity.value) {
                return None;
            }
            consumed_capacity.insert(name.clone(), Quantity::new(&format!("{}", amount / 1000)));
        }
        if !in_use && !self.has_counters(device) {
            return None;
        }
        Some(AllocatedDevice {
            request: "gpu".to_owned(),
            driver: self.driver.clone(),
            pool: self.pool.clone(),
            device: device.name.clone(),
            admin_access: None,
            share_id: shared.then(|| format!("{:08x}-9dad-11d1-80b4-00c04fd430c8", self.shares)),
            consumed_capacity: if shared { consumed_capacity } else { BTreeMap::new() },
        })
    }

    /// Returns whether enough of each counter is left for a device that is not in use.
    fn has_counters(&self, device: &Device) -> bool {
        let mut in_use: BTreeSet<&str> = self.allocated.iter().map(|one| one.device.as_str()).collect();
        in_use.insert(&device.name);
        let mut left: Vec<Option<u64>> = self.counters.iter().copied().map(Some).collect();
        for &(counter, amount) in in_use.into_iter().flat_map(|name| &self.consumption[name]) {
            left[counter] = left[counter].and_then(|left| left.checked_sub(amount));
        }
        left.iter().all(Option::is_some)
    }

    pub(crate) fn allocate(&mut self, allocated: AllocatedDevice) {
        self.shares += 1;
        self.allocated.push(allocated);
    }

    pub(crate) fn free(&mut self, index: usize) {
        self.allocated.remove(index);
    }
}

/// Returns the allocation of a claim with one device.
pub(crate) fn claim_with(device: AllocatedDevice) -> DeviceAllocation {
    DeviceAllocation { results: vec![device], config: Vec::new() }
}
