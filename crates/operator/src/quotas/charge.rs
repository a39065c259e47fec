//! Computes what a pod costs on the GPUs of a node.
use std::collections::BTreeMap;

use cleave_api::gpunode::{GpuStatus, SliceStatus};
use cleave_api::names::{RESOURCE_GPU, RESOURCE_MIG_PREFIX};
use cleave_plan::device::sized_slice_gib;
use cleave_plan::ledger::DeviceRequest;
use cleave_plan::quota::{Amount, MigSlice, Requested, Unit};
use cleave_plan::units::Mebibytes;

/// Suffix of the names of resources that are shares of a MIG instance.
const SHARED_SUFFIX: &str = ".shared";

/// The part of a GPU that one unit of a resource represents, on one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct UnitOfResource {
    requested: RequestedUnits,
    memory: Mebibytes,
    /// Units that the device has, if one request can be for several units.
    total: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequestedUnits {
    Whole,
    Shares { of: u32 },
    Sized { gib: u64 },
    Mig(MigSlice),
    MigShares { slice: MigSlice, of: u32 },
}

impl UnitOfResource {
    fn new(gpu: &GpuStatus, slice: &SliceStatus) -> Option<Self> {
        let memory = Mebibytes(gpu.memory_mib);
        let resource = slice.resource.as_str();
        let requested = if resource == RESOURCE_GPU {
            RequestedUnits::Whole
        } else if let Some(profile) = resource.strip_prefix(RESOURCE_MIG_PREFIX) {
            let shared = profile.strip_suffix(SHARED_SUFFIX);
            let profile = mig_slice(shared.unwrap_or(profile), memory)?;
            match shared {
                Some(_) => RequestedUnits::MigShares { slice: profile, of: slice.total },
                None => RequestedUnits::Mig(profile),
            }
        } else if let Some(gib) = sized_slice_gib(resource) {
            RequestedUnits::Sized { gib }
        } else {
            RequestedUnits::Shares { of: slice.total }
        };
        // Requests for several whole GPUs or MIG instances are for several devices.
        let is_divided = !matches!(requested, RequestedUnits::Whole | RequestedUnits::Mig(_));
        Some(Self { requested, memory, total: is_divided.then_some(slice.total) })
    }

    /// Returns whether this many units can be on one device.
    fn fits(&self, count: u32) -> bool {
        self.total.is_none_or(|total| count <= total)
    }

    fn cost(&self, count: u32, unit: Unit) -> Amount {
        let times = |requested: Requested, count: u32| {
            let one = self.amount(requested, unit);
            Amount(one.0.saturating_mul(count.into()))
        };
        match self.requested {
            RequestedUnits::Whole => self.amount(Requested::Whole { count }, unit),
            RequestedUnits::Shares { of } => self.amount(Requested::Shares { count, of }, unit),
            RequestedUnits::Sized { gib } => {
                let mib = Mebibytes(Mebibytes::from_gib(gib).0.saturating_mul(count.into()));
                self.amount(Requested::Memory { mib }, unit)
            }
            RequestedUnits::Mig(slice) => times(Requested::Mig { slice }, count),
            RequestedUnits::MigShares { slice, of } => self.amount(Requested::MigShares { slice, count, of }, unit),
        }
    }

    fn amount(&self, requested: Requested, unit: Unit) -> Amount {
        match unit {
            Unit::Gpus => requested.gpus(self.memory),
            Unit::Memory => requested.memory(self.memory),
        }
    }
}

/// Parses a MIG profile such as `1g.10gb`. The name does not contain the number of memory slices.
/// The function computes this number from the profile's memory: one memory slice is an eighth of
/// the GPU's memory.
fn mig_slice(profile: &str, memory: Mebibytes) -> Option<MigSlice> {
    let (compute, rest) = profile.split_once("g.")?;
    let gib: u64 = rest.split("gb").next()?.parse().ok()?;
    let eighth = (memory.0 / 8).max(1);
    let mib = Mebibytes::from_gib(gib);
    let slices = (mib.0.saturating_add(eighth / 2) / eighth).clamp(1, 8);
    Some(MigSlice { compute: compute.parse().ok()?, memory: u32::try_from(slices).unwrap_or(8), mib })
}

/// What requests cost on each device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceCosts(BTreeMap<String, Vec<(String, UnitOfResource)>>);

impl DeviceCosts {
    /// Adds the devices of a GPU.
    pub fn add(&mut self, gpu: &GpuStatus) {
        for slice in &gpu.slices {
            let of = self.0.entry(slice.device.clone()).or_default();
            of.extend(UnitOfResource::new(gpu, slice).map(|unit| (slice.resource.clone(), unit)));
        }
    }

    /// Returns what units of a resource cost on a device. Returns `None` if the device does not
    /// serve the resource.
    pub fn cost(&self, device: &str, resource: &str, units: u32, unit: Unit) -> Option<Amount> {
        let (_, of) = self.0.get(device)?.iter().find(|(name, _)| name == resource)?;
        Some(of.cost(units, unit))
    }
}

/// Returns whether a resource is a MIG instance, or a share of one. Instances of one GPU can cost
/// more than the GPU in total.
pub fn is_mig(resource: &str) -> bool {
    resource.starts_with(RESOURCE_MIG_PREFIX)
}

/// What requests cost on some GPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeCosts(BTreeMap<String, Vec<UnitOfResource>>);

impl NodeCosts {
    /// Adds the costs on a GPU.
    pub fn add(&mut self, gpu: &GpuStatus) {
        for slice in &gpu.slices {
            let of = self.0.entry(slice.resource.clone()).or_default();
            of.extend(UnitOfResource::new(gpu, slice).filter(|unit| !of.contains(unit)));
        }
    }

    /// Adds the costs of another node.
    pub fn extend(&mut self, other: &Self) {
        for (resource, units) in &other.0 {
            let of = self.0.entry(resource.clone()).or_default();
            units.iter().for_each(|unit| {
                if !of.contains(unit) {
                    of.push(*unit);
                }
            });
        }
    }

    /// Returns the highest cost of a request on the GPUs on which it fits, or on all GPUs if it
    /// fits on none. Returns `None` if no GPU serves the resource.
    pub fn dearest(&self, request: &DeviceRequest, unit: Unit) -> Option<Amount> {
        self.each(request, unit).max()
    }

    /// Returns the lowest cost of a request on the GPUs on which it fits, or on all GPUs if it fits
    /// on none. Returns `None` if no GPU serves the resource.
    pub fn cheapest(&self, request: &DeviceRequest, unit: Unit) -> Option<Amount> {
        self.each(request, unit).min()
    }

    fn each(&self, request: &DeviceRequest, unit: Unit) -> impl Iterator<Item = Amount> {
        let count = request.units.get();
        let units = || self.0.get(&request.resource).into_iter().flatten();
        // A request that fits nowhere still has a cost.
        let fits_nowhere = !units().any(|of| of.fits(count));
        units().filter(move |of| fits_nowhere || of.fits(count)).map(move |of| of.cost(count, unit))
    }
}

#[cfg(test)]
mod tests {
    use cleave_plan::ledger::Units;

    use super::*;

    fn costs(memory_mib: u64, resource: &str, total: u32) -> NodeCosts {
        let slice = SliceStatus { resource: resource.to_owned(), total, ..SliceStatus::default() };
        let gpu = GpuStatus { memory_mib, ..GpuStatus::default() };
        NodeCosts(BTreeMap::from([(resource.to_owned(), UnitOfResource::new(&gpu, &slice).into_iter().collect())]))
    }

    #[test]
    fn each_kind_of_request_costs_its_part_of_a_gpu() {
        for (memory, resource, total, count, expected) in [
            (81_920, "nvidia.com/gpu", 1, 2, 2_000_000),
            (81_559, "nvidia.com/gpu-mps", 10, 3, 300_000),
            (81_559, "nvidia.com/gpu-timeslice", 4, 1, 250_000),
            (81_559, "nvidia.com/gpu-10gb", 8, 1, 125_553),
            (81_920, "nvidia.com/mig-1g.10gb", 1, 1, 142_857),
            (81_920, "nvidia.com/mig-1g.20gb", 1, 1, 250_000),
            (81_920, "nvidia.com/mig-3g.40gb", 1, 1, 500_000),
            (81_920, "nvidia.com/mig-4g.40gb", 1, 1, 571_428),
            (143_771, "nvidia.com/mig-1g.18gb", 1, 1, 142_857),
            (81_920, "nvidia.com/mig-3g.40gb.shared", 4, 1, 125_000),
        ] {
            let request = DeviceRequest { resource: resource.to_owned(), units: Units::new(count).unwrap() };
            let cost = costs(memory, resource, total).dearest(&request, Unit::Gpus);
            assert_eq!(cost, Some(Amount(expected)), "{count} of {resource}");
        }
    }

    #[test]
    fn gpus_on_which_a_request_does_not_fit_make_it_no_dearer() {
        let mut both = costs(81_920, "nvidia.com/gpu-mps", 10);
        both.extend(&costs(81_920, "nvidia.com/gpu-mps", 2));
        let cost = |units: u32| {
            let request =
                DeviceRequest { resource: "nvidia.com/gpu-mps".to_owned(), units: Units::new(units).unwrap() };
            (both.cheapest(&request, Unit::Gpus).unwrap().0, both.dearest(&request, Unit::Gpus).unwrap().0)
        };
        assert_eq!((cost(2), cost(5), cost(20)), ((200_000, 1_000_000), (500_000, 500_000), (2_000_000, 10_000_000)));
    }
}
