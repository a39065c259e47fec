//! Where on a node a pod is best held, and why it cannot be.
use std::collections::BTreeMap;

use super::pack::{pack, tightest};
use super::stock::Stock;
use super::{Ask, Node, Reservation, Stocks, Units};
use crate::placement::{self, Demand, GPU, Rank, Score};

/// Why there is no place, by the node that comes closest.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum NoFit {
    /// No node was asked about, or none is known.
    #[error("no node is eligible")]
    NoNode,
    /// Nobody offers the resource.
    #[error("no eligible node offers {resource}")]
    NotOffered {
        /// The extended resource.
        resource: String,
    },
    /// No device has as many units, whoever leaves.
    #[error("no device has {asked} {resource}: the largest has {most}")]
    TooLarge {
        /// The extended resource.
        resource: String,
        /// What is asked for, of one device.
        asked: Units,
        /// What the largest device has.
        most: u32,
    },
    /// Each ask fits a device, but they never fit one node together.
    #[error("the parts of the request fit devices, but no node has room for all of them, even empty")]
    TooMany,
    /// A device is large enough, but has not enough free.
    #[error("no device has {asked} {resource} free: the emptiest has {most}")]
    NotFree {
        /// The extended resource.
        resource: String,
        /// What is asked for, of one device.
        asked: Units,
        /// What the emptiest device has free.
        most: u32,
    },
    /// Each ask would fit now, but not together.
    #[error("the parts of the request fit devices now, but not all of them at once")]
    NotFreeTogether,
}

impl NoFit {
    /// Whether it can change when pods go: otherwise only another node, or another policy, helps.
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::NotFree { .. } | Self::NotFreeTogether)
    }
}

/// Where the least is left: a score for those who have not learned what pods typically ask for.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tightest;

impl Score for Tightest {
    type Before = ();

    fn before(&self, _: &placement::Node) {}

    fn rank(&self, node: &placement::Node, (): &(), demand: &Demand, way: Option<usize>) -> Rank {
        Rank { score: 0.0, spread: 0.0, left: placement::left(node, demand, way) }
    }
}

impl Node {
    /// The best place for all asks, its score and what is left on the devices.
    pub(super) fn fit<S: Score>(&self, asks: &[Ask], score: &S) -> Result<(f64, u32, Vec<Reservation>), NoFit> {
        let mut by_resource: BTreeMap<&str, Vec<Units>> = BTreeMap::new();
        for ask in asks {
            by_resource.entry(&ask.resource).or_default().push(ask.units);
        }
        let (mut total, mut spare, mut takes) = (0.0, 0_u32, Vec::with_capacity(asks.len()));
        for (resource, units) in by_resource {
            let none = Stocks::new();
            let stocks = self.stocks.get(resource).unwrap_or(&none);
            let names: Vec<&String> = stocks.keys().collect();
            let sizes: Vec<u32> = units.iter().map(|units| units.get()).collect();
            let mut free: Vec<u32> = stocks.values().map(Stock::free).collect();
            let mut order = |size: u32, free: &[u32]| {
                let ranked = ranks(&self.model, stocks, size, free, score);
                ranked.into_iter().map(|(device, _)| device).collect()
            };
            let Some(devices) = pack(&sizes, &free, &mut order) else { return Err(no_fit(resource, &units, stocks)) };
            for (units, device) in units.into_iter().zip(devices) {
                let rank = ranks(&self.model, stocks, units.get(), &free, score);
                if let Some((_, rank)) = rank.into_iter().find(|(other, _)| *other == device) {
                    total += rank.score;
                }
                let (Some(name), Some(free)) = (names.get(device), free.get_mut(device)) else { continue };
                *free = free.saturating_sub(units.get());
                spare = spare.saturating_add(*free);
                takes.push(Reservation { resource: resource.to_owned(), units, device: (*name).clone() });
            }
        }
        Ok((total, spare, takes))
    }
}

/// Devices that have so many free, the best first. A score knows GPUs in thousandths: a unit is its part of the device.
fn ranks<S: Score>(model: &str, stocks: &Stocks, size: u32, free: &[u32], score: &S) -> Vec<(usize, Rank)> {
    let thousandths = |units: u32, capacity: u32| {
        let part = u64::from(units) * u64::from(GPU) / u64::from(capacity.max(1));
        u32::try_from(part).map_or(GPU, |part| part.min(GPU))
    };
    let gpus = stocks.values().zip(free).map(|(stock, free)| thousandths(*free, stock.capacity())).collect();
    // What else the node has is the scheduler's matter.
    let node = placement::Node { model: model.to_owned(), cpu_total: 0, cpu: 0, memory: 0, gpus };
    let before = score.before(&node);
    let mut ranked: Vec<(usize, u32, Rank)> = stocks
        .values()
        .zip(free)
        .enumerate()
        .filter(|(_, (_, free))| **free >= size)
        .map(|(device, (stock, free))| {
            let per_gpu = thousandths(size, stock.capacity());
            let demand = Demand { cpu: 0, memory: 0, gpus: 1, per_gpu, models: Vec::new() };
            (device, *free, score.rank(&node, &before, &demand, Some(device)))
        })
        .collect();
    ranked.sort_by(|(device, free, rank), (other, other_free, other_rank)| {
        other_rank
            .score
            .total_cmp(&rank.score)
            .then(rank.spread.total_cmp(&other_rank.spread))
            .then(free.cmp(other_free))
            .then(device.cmp(other))
    });
    ranked.into_iter().map(|(device, _, rank)| (device, rank)).collect()
}

/// Why so many units cannot be had of a node's devices, for the largest of them that cannot.
fn no_fit(resource: &str, units: &[Units], stocks: &Stocks) -> NoFit {
    let resource = resource.to_owned();
    let Some(&asked) = units.iter().max() else { return NoFit::NoNode };
    let (Some(largest), Some(emptiest)) =
        (stocks.values().map(Stock::capacity).max(), stocks.values().map(Stock::free).max())
    else {
        return NoFit::NotOffered { resource };
    };
    if asked.get() > largest {
        return if largest == 0 {
            NoFit::NotOffered { resource }
        } else {
            NoFit::TooLarge { resource, asked, most: largest }
        };
    }
    let sizes: Vec<u32> = units.iter().map(|units| units.get()).collect();
    let all: Vec<u32> = stocks.values().map(Stock::capacity).collect();
    if pack(&sizes, &all, &mut tightest).is_none() {
        NoFit::TooMany
    } else if asked.get() > emptiest {
        NoFit::NotFree { resource, asked, most: emptiest }
    } else {
        NoFit::NotFreeTogether
    }
}
