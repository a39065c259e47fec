//! Chooses the devices of a node for a pod, or reports why the pod does not fit.
use std::cmp::Ordering;
use std::collections::BTreeMap;

use super::device_units::DeviceUnits;
use super::facts::Reservation;
use super::node::{Node, UnitsByDevice};
use super::pack::{assign_to_devices, tightest_devices};
use super::request::{DeviceRequest, Units};
use crate::placement::{self, Demand, Rank, Score, THOUSANDTHS_PER_GPU};

/// Why a pod fits on no node, for the node that is closest to fitting the pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum NoFit {
    /// The list of nodes is empty, or the ledger knows none of the nodes in the list.
    #[error("no node is eligible")]
    NoNode,
    /// No node serves the resource.
    #[error("no eligible node serves {resource}")]
    NotOffered {
        /// Name of the extended resource.
        resource: String,
    },
    /// No device has enough units, even when the device is empty.
    #[error("no device has {requested} {resource}: the largest has {most}")]
    TooLarge {
        /// Name of the extended resource.
        resource: String,
        /// Units requested of one device.
        requested: Units,
        /// Units of the largest device.
        most: u32,
    },
    /// Each request fits on a device, but no node has room for all requests together, even when the
    /// node is empty.
    #[error("each part of the request fits on a device, but no node has room for all parts, even if the node is empty")]
    TooMany,
    /// No node has enough units, even when the node is empty. Each request is for one unit.
    #[error("no node has {requested} {resource}: the largest has {most}")]
    TooFew {
        /// Name of the extended resource.
        resource: String,
        /// Number of units requested.
        requested: u32,
        /// Units of the node with the most units.
        most: u32,
    },
    /// A device is large enough, but has too few free units.
    #[error("no device has {requested} {resource} free: the emptiest has {most}")]
    NotFree {
        /// Name of the extended resource.
        resource: String,
        /// Units requested of one device.
        requested: Units,
        /// Free units of the device with the most free units.
        most: u32,
    },
    /// A node has enough units, but too few of them are free. Each request is for one unit.
    #[error("no node has {requested} {resource} free: one node has {most}")]
    TooFewFree {
        /// Name of the extended resource.
        resource: String,
        /// Number of units requested.
        requested: u32,
        /// Free units of the node with the most free units.
        most: u32,
    },
    /// Each request fits now, but the requests do not fit together.
    #[error("each part of the request fits on a device now, but no node has room for all parts now")]
    NotFreeTogether,
}

impl NoFit {
    /// Returns whether the reason can end when pods terminate. If the reason cannot end, only
    /// another node or another policy helps.
    pub fn is_temporary(&self) -> bool {
        matches!(self, Self::NotFree { .. } | Self::TooFewFree { .. } | Self::NotFreeTogether)
    }
}

/// Requested units by resource.
pub(super) type RequestedUnits<'a> = BTreeMap<&'a str, Vec<Units>>;

/// Groups requests by resource, with one entry of units for each request.
pub(super) fn requested_units(device_requests: &[DeviceRequest]) -> RequestedUnits<'_> {
    let mut wanted = RequestedUnits::new();
    for request in device_requests {
        wanted.entry(&request.resource).or_default().push(request.units);
    }
    wanted
}

/// Rank of a placement on a node: its score (higher is better), and the remaining units of the
/// chosen devices (lower is better).
pub(super) type NodeRank = (f64, u32);

impl Node {
    /// Returns the rank of the best placement of all requests, as [`Node::fit_requests`] finds it.
    /// The ledger calls this function for every node, so one request has a faster path.
    pub(super) fn rank_node<S: Score>(&self, wanted: &RequestedUnits<'_>, score: &S) -> Result<NodeRank, NoFit> {
        let mut resources = wanted.iter();
        let (Some((resource, units)), None) = (resources.next(), resources.next()) else {
            return self.fit_requests(wanted, score).map(|(worth, _)| worth);
        };
        let &[size] = units.as_slice() else { return self.fit_requests(wanted, score).map(|(worth, _)| worth) };
        let none = UnitsByDevice::new();
        let units_by_device = self.units_by_device.get(*resource).unwrap_or(&none);
        let mut best: Option<Candidate> = None;
        if units_by_device.values().any(|device_units| device_units.free() >= size.get()) {
            let free: Vec<u32> = units_by_device.values().map(DeviceUnits::free).collect();
            for_each_device(&self.model, units_by_device, size.get(), &free, score, |candidate| {
                if best.as_ref().is_none_or(|best| candidate.compare(best).is_lt()) {
                    best = Some(candidate);
                }
            });
        }
        match best {
            Some(best) => Ok((best.rank.score, best.free - size.get())),
            None => Err(no_fit_reason(resource, units, units_by_device)),
        }
    }

    /// Finds a placement of all requests: each request on its best device, unless another request
    /// would then not fit.
    pub(super) fn fit_requests<S: Score>(
        &self,
        wanted: &RequestedUnits<'_>,
        score: &S,
    ) -> Result<(NodeRank, Vec<Reservation>), NoFit> {
        let (mut total, mut spare, mut takes) = (0.0, 0_u32, Vec::new());
        for (resource, units) in wanted {
            let none = UnitsByDevice::new();
            let units_by_device = self.units_by_device.get(*resource).unwrap_or(&none);
            let names: Vec<&String> = units_by_device.keys().collect();
            let sizes: Vec<u32> = units.iter().map(|units| units.get()).collect();
            let mut free: Vec<u32> = units_by_device.values().map(DeviceUnits::free).collect();
            let mut order = |size: u32, free: &[u32]| {
                let candidates = candidates(&self.model, units_by_device, size, free, score);
                candidates.into_iter().map(|candidate| candidate.device).collect()
            };
            let Some(devices) = assign_to_devices(&sizes, &free, &mut order) else {
                return Err(no_fit_reason(resource, units, units_by_device));
            };
            for (&units, device) in units.iter().zip(devices) {
                let candidates = candidates(&self.model, units_by_device, units.get(), &free, score);
                if let Some(candidate) = candidates.into_iter().find(|candidate| candidate.device == device) {
                    total += candidate.rank.score;
                }
                let (Some(name), Some(free)) = (names.get(device), free.get_mut(device)) else { continue };
                *free = free.saturating_sub(units.get());
                spare = spare.saturating_add(*free);
                takes.push(Reservation { resource: (*resource).to_owned(), units, device: (*name).clone() });
            }
        }
        Ok(((total, spare), takes))
    }
}

/// A device with enough free units.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    device: usize,
    free: u32,
    rank: Rank,
}

impl Candidate {
    /// Orders candidates from best to worst.
    fn compare(&self, other: &Self) -> Ordering {
        (other.rank.score.total_cmp(&self.rank.score))
            .then(self.rank.spread.total_cmp(&other.rank.spread))
            .then(self.free.cmp(&other.free))
            .then(self.device.cmp(&other.device))
    }
}

/// Returns the devices with at least `size` free units, best first.
fn candidates<S: Score>(
    model: &str,
    units_by_device: &UnitsByDevice,
    size: u32,
    free: &[u32],
    score: &S,
) -> Vec<Candidate> {
    let mut candidates = Vec::with_capacity(free.len());
    for_each_device(model, units_by_device, size, free, score, |candidate| candidates.push(candidate));
    candidates.sort_by(Candidate::compare);
    candidates
}

/// Calls `take` for each device with at least `size` free units. The function converts units to
/// thousandths of a GPU, because scores count in thousandths.
fn for_each_device<S: Score>(
    model: &str,
    units_by_device: &UnitsByDevice,
    size: u32,
    free: &[u32],
    score: &S,
    mut take: impl FnMut(Candidate),
) {
    let to_thousandths = |units: u32, capacity: u32| {
        let part = u64::from(units) * u64::from(THOUSANDTHS_PER_GPU) / u64::from(capacity.max(1));
        u32::try_from(part).map_or(THOUSANDTHS_PER_GPU, |part| part.min(THOUSANDTHS_PER_GPU))
    };
    let gpus = units_by_device
        .values()
        .zip(free)
        .map(|(device_units, free)| to_thousandths(*free, device_units.capacity()))
        .collect();
    // Pass 0 for other resources, because the scheduler checks them.
    let node = placement::Node { model: model.to_owned(), cpu_total: 0, cpu: 0, gpus };
    let before = score.precompute(&node);
    for (device, (device_units, &free)) in units_by_device.values().zip(free).enumerate() {
        if free >= size {
            let per_gpu = to_thousandths(size, device_units.capacity());
            let demand = Demand { cpu: 0, gpus: 1, per_gpu, models: Vec::new() };
            take(Candidate { device, free, rank: score.rank(&node, &before, &demand, Some(device)) });
        }
    }
}

/// Returns why these units do not fit on a node's devices. The reason refers to the largest
/// request, or to the number of requests for one unit.
fn no_fit_reason(resource: &str, units: &[Units], units_by_device: &UnitsByDevice) -> NoFit {
    let resource = resource.to_owned();
    let Some(&requested) = units.iter().max() else { return NoFit::NoNode };
    let (Some(largest), Some(emptiest)) = (
        units_by_device.values().map(DeviceUnits::capacity).max(),
        units_by_device.values().map(DeviceUnits::free).max(),
    ) else {
        return NoFit::NotOffered { resource };
    };
    if requested.get() > largest {
        return if largest == 0 {
            NoFit::NotOffered { resource }
        } else {
            NoFit::TooLarge { resource, requested, most: largest }
        };
    }
    if units.len() > 1 && units.iter().all(|units| units.get() == 1) {
        let sum = |amount: fn(&DeviceUnits) -> u32| units_by_device.values().map(amount).fold(0, u32::saturating_add);
        let requested = u32::try_from(units.len()).unwrap_or(u32::MAX);
        let (capacity, free) = (sum(DeviceUnits::capacity), sum(DeviceUnits::free));
        return if requested > capacity {
            NoFit::TooFew { resource, requested, most: capacity }
        } else {
            NoFit::TooFewFree { resource, requested, most: free }
        };
    }
    let sizes: Vec<u32> = units.iter().map(|units| units.get()).collect();
    let all = || units_by_device.values().map(DeviceUnits::capacity).collect::<Vec<u32>>();
    if sizes.len() > 1 && assign_to_devices(&sizes, &all(), &mut tightest_devices).is_none() {
        NoFit::TooMany
    } else if requested.get() > emptiest {
        NoFit::NotFree { resource, requested, most: emptiest }
    } else {
        NoFit::NotFreeTogether
    }
}
