//! Chooses devices for pods by a score. Stores the ledger's nodes in the form that the score needs,
//! and caches ranks, so that a choice takes little time in a large cluster.
//!
//! ```text
//!  Ledger ──[synchronize: changed nodes]──▶ Chooser ──[candidates, best first]──▶ Ledger::choose
//!  CPU of nodes ──[set_cpu]──────────────────▲   ▲
//!  arrived pods ──[count, learn]─────────────────┘
//! ```
//!
//! The operator and the trace benchmark use the same functions.
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::iter;

use super::node::Node;
use super::request::DeviceRequest;
use crate::placement::learned::{Learner, to_thousandths};
use crate::placement::{self, Candidate, Demand, LearnedScore, Placer, ReplicaCounts, Score};

/// Maximum number of resources whose requests are learned. All other resources use the tightest
/// fit.
const MAX_LEARNED_RESOURCES: usize = 64;
/// Maximum size of all tables together.
const TABLE_LIMITS: TableLimits = TableLimits { tables: 256, ranks: 1 << 21 };
/// CPU of a node whose CPU is unknown, in thousandths of a core.
const UNKNOWN_CPU: NodeCpu = NodeCpu { total: 0, free: u32::MAX as u64 };

/// Nodes that changed since the last [`Ledger::synchronize`].
#[derive(Debug, Clone, Default)]
pub(super) struct ChangedNodes(pub(super) BTreeSet<String>);

/// The comparison ignores changes: two ledgers with the same nodes and claims are equal.
impl PartialEq for ChangedNodes {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for ChangedNodes {}

/// CPU of a node, in thousandths of a core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeCpu {
    /// Allocatable CPU.
    pub total: u64,
    /// CPU that no pod requests.
    pub free: u64,
}

/// The replicas of one controller: how many are on each node, and on each of its devices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Siblings(BTreeMap<String, (u32, BTreeMap<String, u32>)>);

impl Siblings {
    /// Adds a pod that uses these devices of a node.
    pub fn add<'a>(&mut self, node: &str, devices: impl IntoIterator<Item = &'a str>) {
        let devices: BTreeSet<&str> = devices.into_iter().collect();
        let (on_node, on_devices) = self.0.entry(node.to_owned()).or_default();
        *on_node += 1;
        devices.into_iter().for_each(|device| *on_devices.entry(device.to_owned()).or_default() += 1);
    }

    /// Returns whether a node runs no replica.
    pub fn has_none_on(&self, node: &str) -> bool {
        !self.0.contains_key(node)
    }
}

/// Properties of a pod, other than its requests, that determine which devices the ledger chooses.
#[derive(Debug, Clone, Copy)]
pub struct ChoiceCriteria<'a> {
    /// CPU that the pod requests, in thousandths of a core.
    pub cpu: u64,
    /// Replicas that the pod is kept apart from, first by GPU and then by node.
    pub siblings: &'a Siblings,
}

/// The nodes that serve one resource on devices of equal capacity.
#[derive(Debug, Default)]
struct NodeTable<S: Score> {
    placer: Placer<S>,
    /// Node and devices of each row of the placer. Unused rows have no devices.
    rows: Vec<NodeRow>,
    by_node: BTreeMap<String, usize>,
    unused: Vec<usize>,
    is_learned: bool,
    /// Number of the choice that last used the table. See [`Chooser::choices`].
    used: u64,
}

#[derive(Debug, Clone, Default)]
struct NodeRow {
    node: String,
    devices: Vec<String>,
}

/// Limits of the tables' size.
#[derive(Debug, Clone, Copy)]
struct TableLimits {
    /// Number of tables above which tables without nodes are dropped. GPUs that are partitioned on
    /// demand may serve a resource or size only temporarily.
    tables: usize,
    /// Number of cached ranks, of 24 bytes each. One table may use a quarter of this number.
    ranks: usize,
}

/// Chooses devices for pods by the score `S`.
#[derive(Debug)]
pub struct Chooser<S: Score = LearnedScore> {
    /// Tables by resource, then by the capacity of a device.
    tables: BTreeMap<String, BTreeMap<u32, NodeTable<S>>>,
    cpu: BTreeMap<String, NodeCpu>,
    /// Learners by resource. Each learner records typical requests for its resource.
    learners: BTreeMap<String, Learner>,
    /// Number of choices since the chooser was created.
    choices: u64,
    limits: TableLimits,
}

impl<S: Score + Default> Default for Chooser<S> {
    fn default() -> Self {
        let (tables, cpu, learners) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { tables, cpu, learners, choices: 0, limits: TABLE_LIMITS }
    }
}

impl<S: Score + Default> Chooser<S> {
    /// Records the CPU of a node.
    pub fn set_cpu(&mut self, node: &str, cpu: NodeCpu) {
        match self.cpu.get_mut(node) {
            Some(known) if *known == cpu => return,
            Some(known) => *known = cpu,
            None => drop(self.cpu.insert(node.to_owned(), cpu)),
        }
        for table in self.tables.values_mut().flat_map(BTreeMap::values_mut) {
            if let Some(&row) = table.by_node.get(node) {
                table.placer.change(row, |node| (node.cpu_total, node.cpu) = (cpu.total, cpu.free));
            }
        }
    }

    /// Subtracts the CPU of a pod that is released to a node.
    pub fn subtract_cpu(&mut self, node: &str, millicores: u64) {
        if let Some(&cpu) = self.cpu.get(node) {
            self.set_cpu(node, NodeCpu { free: cpu.free.saturating_sub(millicores), ..cpu });
        }
    }

    /// Replaces a node. `None` means that the node no longer exists.
    pub(super) fn update(&mut self, name: &str, node: Option<&Node>) {
        if node.is_none() {
            self.cpu.remove(name);
        }
        let mut rows: BTreeMap<(&str, u32), (placement::Node, Vec<&String>)> = BTreeMap::new();
        let cpu = self.cpu.get(name).copied().unwrap_or(UNKNOWN_CPU);
        for (resource, units_by_device) in node.iter().flat_map(|node| &node.units_by_device) {
            for (device, device_units) in units_by_device.iter().filter(|(_, device_units)| device_units.capacity() > 0)
            {
                let (row, devices) = rows.entry((resource, device_units.capacity())).or_insert_with(|| {
                    let model = node.map(|node| node.model.clone()).unwrap_or_default();
                    (placement::Node { model, cpu_total: cpu.total, cpu: cpu.free, gpus: Vec::new() }, Vec::new())
                });
                row.gpus.push(to_thousandths(device_units.free(), device_units.capacity()));
                devices.push(device);
            }
        }
        for (resource, tables) in &mut self.tables {
            for (capacity, table) in tables {
                if !rows.contains_key(&(resource.as_str(), *capacity)) {
                    table.remove_node(name);
                }
            }
        }
        for ((resource, capacity), (row, devices)) in rows {
            if !self.tables.contains_key(resource) {
                self.tables.insert(resource.to_owned(), BTreeMap::new());
            }
            if let Some(tables) = self.tables.get_mut(resource) {
                tables.entry(capacity).or_default().set_node(name, row, &devices);
            }
        }
        self.drop_empty_tables();
    }

    /// Drops the tables without nodes if there are too many tables. The chooser learns their scores
    /// again when nodes serve the resources again.
    fn drop_empty_tables(&mut self) {
        if self.tables.values().map(BTreeMap::len).sum::<usize>() > self.limits.tables {
            self.tables.values_mut().for_each(|tables| tables.retain(|_, table| !table.by_node.is_empty()));
            self.tables.retain(|_, tables| !tables.is_empty());
        }
    }
}

impl<S: Score> Chooser<S> {
    /// Returns the score for devices of this resource and capacity. Returns `None` if no table has
    /// such devices.
    pub fn score(&self, resource: &str, capacity: u32) -> Option<&S> {
        Some(self.tables.get(resource)?.get(&capacity)?.placer.score())
    }

    /// Replaces the score for devices of this resource and capacity, if a table has such devices.
    pub fn set_score(&mut self, resource: &str, capacity: u32, score: S) {
        if let Some(table) = self.tables.get_mut(resource).and_then(|tables| tables.get_mut(&capacity)) {
            table.placer.set_score(score);
        }
    }

    /// Returns the nodes and devices that fit the requests, best first. A pod with several requests
    /// has candidates only if they are equal requests for whole devices.
    pub(super) fn candidates(
        &mut self,
        device_requests: &[DeviceRequest],
        criteria: ChoiceCriteria<'_>,
    ) -> impl Iterator<Item = (&str, Vec<&str>)> {
        self.clear_oldest_caches();
        let mut lists = Vec::new();
        if let Some((resource, units, gpus)) = equal_requests(device_requests) {
            for (&capacity, table) in self.tables.get_mut(resource).into_iter().flatten() {
                table.used = self.choices;
                if if gpus == 1 { units <= capacity } else { units == capacity } {
                    let per_gpu = to_thousandths(units, capacity);
                    let demand = Demand { cpu: criteria.cpu, gpus, per_gpu, models: Vec::new() };
                    lists.push(table.candidates(demand, criteria.siblings).peekable());
                }
            }
        }
        iter::from_fn(move || {
            let heads = lists.iter_mut().enumerate();
            let heads =
                heads.filter_map(|(index, list)| list.peek().map(|(candidate, ..)| (*candidate, Reverse(index))));
            let (_, Reverse(index)) = heads.max()?;
            lists.get_mut(index)?.next().map(|(_, node, devices)| (node, devices))
        })
    }
}

impl<S: Score> Chooser<S> {
    /// Clears the caches of the least recently used tables, until the remaining caches are within
    /// the limit.
    fn clear_oldest_caches(&mut self) {
        self.choices += 1;
        let all = || self.tables.values().flat_map(BTreeMap::values);
        let mut cached: usize = all().map(|table| table.placer.count_cached_ranks()).sum();
        while cached > self.limits.ranks {
            let tables = self.tables.values_mut().flat_map(BTreeMap::values_mut);
            let in_use = tables.filter(|table| table.placer.count_cached_ranks() > 0);
            let Some(oldest) = in_use.min_by_key(|table| table.used) else { return };
            cached -= oldest.placer.count_cached_ranks();
            oldest.placer.clear();
        }
    }
}

impl Chooser<LearnedScore> {
    /// Counts an arrived pod. `models` are the GPU models that the pod can run on. An empty list
    /// means any model.
    pub fn count_arrival(&mut self, device_requests: &[DeviceRequest], cpu: u64, models: Vec<String>) {
        let Some((resource, demand)) = to_demand(device_requests, cpu, models) else { return };
        if !self.tables.contains_key(resource) && !self.learners.contains_key(resource) {
            // No node serves the resource. The scores of the existing GPUs do not depend on
            // requests for the resource.
            return;
        }
        if self.learners.len() < MAX_LEARNED_RESOURCES || self.learners.contains_key(resource) {
            self.learners.entry(resource.to_owned()).or_default().add(&demand);
        }
    }

    /// Learns a new score if enough pods arrived. Learns at most one score in each call, because
    /// learning takes milliseconds.
    ///
    /// `waiting` are the requests of pending pods, with their CPU.
    pub fn learn(&mut self, waiting: impl Iterator<Item = (Vec<DeviceRequest>, u64)>) {
        for (resource, learner) in self.learners.iter_mut().filter(|(_, learner)| learner.is_update_due()) {
            learner.record_update();
            let tables = self.tables.get_mut(resource).into_iter().flat_map(BTreeMap::values_mut);
            tables.for_each(|table| table.is_learned = false);
        }
        let learners = &self.learners;
        let known = self.tables.iter_mut().filter_map(|(resource, tables)| {
            let learner = learners.get(resource).filter(|learner| learner.has_enough_pods())?;
            Some(tables.iter_mut().map(move |(&capacity, table)| (resource, learner, capacity, table)))
        });
        let mut due = known.flatten().filter(|(.., table)| !table.is_learned);
        let Some((resource, learner, capacity, table)) = due.next() else { return };
        let waiting: Vec<Demand> = waiting
            .filter_map(|(device_requests, cpu)| {
                to_demand(&device_requests, cpu, Vec::new()).filter(|(of, _)| of == resource).map(|(_, demand)| demand)
            })
            .collect();
        let nodes: Vec<placement::Node> =
            table.placer.nodes().iter().filter(|node| !node.gpus.is_empty()).cloned().collect();
        let score = learner.score(capacity, &nodes, waiting.iter());
        table.placer.set_score(score);
        learner.frequent_requests(capacity).for_each(|demand| table.placer.cache_ranks(&demand));
        table.is_learned = true;
    }
}

impl<S: Score> NodeTable<S> {
    /// Adds or changes a node.
    fn set_node(&mut self, name: &str, node: placement::Node, devices: &[&String]) {
        let index = match self.by_node.get(name).copied() {
            Some(index) => index,
            None => {
                let index = self.unused.pop().unwrap_or_else(|| {
                    self.rows.push(NodeRow::default());
                    self.placer.add(placement::Node::default())
                });
                self.by_node.insert(name.to_owned(), index);
                index
            }
        };
        if let Some(row) = self.rows.get_mut(index)
            && (row.node != name || !row.devices.iter().eq(devices.iter().copied()))
        {
            *row = NodeRow { node: name.to_owned(), devices: devices.iter().copied().cloned().collect() };
        }
        if self.placer.nodes().get(index) != Some(&node) {
            self.placer.change(index, |row| *row = node);
        }
    }

    fn remove_node(&mut self, name: &str) {
        if let Some(index) = self.by_node.remove(name) {
            self.placer.change(index, |row| *row = placement::Node::default());
            self.rows.get_mut(index).into_iter().for_each(|row| *row = NodeRow::default());
            self.unused.push(index);
        }
    }

    /// Returns the candidates for a pod, best first, with the names of node and devices.
    fn candidates(
        &mut self,
        demand: Demand,
        siblings: &Siblings,
    ) -> impl Iterator<Item = (Candidate, &str, Vec<&str>)> {
        let Self { placer, rows, by_node, .. } = self;
        let replicas = siblings.0.iter().filter_map(|(node, (on_node, on_devices))| {
            let index = *by_node.get(node)?;
            let devices = &rows.get(index)?.devices;
            let on_gpus = devices.iter().enumerate().filter_map(|(gpu, name)| Some((gpu, *on_devices.get(name)?)));
            Some((index, ReplicaCounts { on_node: *on_node, on_gpus: on_gpus.collect() }))
        });
        let replicas = replicas.collect();
        let rows = &*rows;
        let found = placer.candidates(demand, replicas);
        found.filter_map(move |(candidate, gpus)| {
            let row = rows.get(candidate.node)?;
            let devices = gpus.into_iter().filter_map(|gpu| row.devices.get(gpu)).map(String::as_str);
            Some((candidate, row.node.as_str(), devices.collect()))
        })
    }
}

/// Returns the resource, the units and the number of requests if all requests are equal. Returns
/// `None` otherwise.
fn equal_requests(device_requests: &[DeviceRequest]) -> Option<(&str, u32, u32)> {
    let (first, others) = device_requests.split_first()?;
    let count = u32::try_from(device_requests.len()).ok()?;
    others.iter().all(|ask| ask == first).then(|| (first.resource.as_str(), first.units.get(), count))
}

/// Returns the requests in the form that the learner counts, with units in `per_gpu`.
fn to_demand(device_requests: &[DeviceRequest], cpu: u64, models: Vec<String>) -> Option<(&str, Demand)> {
    let (resource, per_gpu, gpus) = equal_requests(device_requests)?;
    Some((resource, Demand { cpu, gpus, per_gpu, models }))
}

#[cfg(test)]
mod tests {
    use super::super::{DeviceFacts, Ledger, NodeFacts, Units};
    use super::*;
    use crate::placement::Tightest;

    /// Returns a node with one free device of each of these resources.
    fn node(resources: impl Iterator<Item = usize>) -> NodeFacts {
        let device = |resource: usize| DeviceFacts {
            device: "a".to_owned(),
            resource: format!("r{resource}"),
            capacity: 10,
            used: 0,
        };
        NodeFacts { devices: resources.map(device).collect(), ..NodeFacts::default() }
    }

    fn candidates(chooser: &mut Chooser<Tightest>, resource: usize, units: u32) -> usize {
        let units = Units::new(units).unwrap();
        let beside = ChoiceCriteria { cpu: 0, siblings: &Siblings::default() };
        chooser.candidates(&[DeviceRequest { resource: format!("r{resource}"), units }], beside).count()
    }

    fn cached_rank_counts(chooser: &Chooser<Tightest>) -> Vec<usize> {
        chooser.tables.values().flat_map(BTreeMap::values).map(|table| table.placer.count_cached_ranks()).collect()
    }

    #[test]
    fn the_number_of_ranks_is_limited_and_the_oldest_ranks_are_dropped_first() {
        let mut chooser =
            Chooser { limits: TableLimits { ranks: 7, ..TABLE_LIMITS }, ..Chooser::<Tightest>::default() };
        let mut ledger = Ledger::default();
        ledger.observe("m", node(0..3));
        ledger.observe("n", node(0..3));
        ledger.synchronize(&mut chooser);
        // Each kind of request has a rank on each of two nodes.
        for (resource, units) in [(0, 1), (1, 1), (0, 2), (2, 1)] {
            assert_eq!(candidates(&mut chooser, resource, units), 2);
        }
        assert_eq!(cached_rank_counts(&chooser), [4, 2, 2], "dropped before the next choice");
        assert_eq!(candidates(&mut chooser, 0, 3), 2);
        assert_eq!(cached_rank_counts(&chooser), [6, 0, 2], "the second table was not used for the longest time");
        assert_eq!(candidates(&mut chooser, 1, 1), 2, "a dropped rank is computed again");
        assert_eq!(cached_rank_counts(&chooser), [6, 2, 0]);
    }

    #[test]
    fn tables_without_nodes_are_dropped_when_there_are_too_many_tables() {
        let mut chooser =
            Chooser { limits: TableLimits { tables: 4, ..TABLE_LIMITS }, ..Chooser::<Tightest>::default() };
        let mut ledger = Ledger::default();
        for resource in 0..100 {
            ledger.observe("n", node(resource..resource + 2));
            ledger.synchronize(&mut chooser);
            assert!(chooser.tables.len() <= 4);
            assert_eq!((candidates(&mut chooser, resource, 1), candidates(&mut chooser, resource + 1, 1)), (1, 1));
        }
        ledger.observe("n", node(0..9));
        ledger.synchronize(&mut chooser);
        assert_eq!(chooser.tables.len(), 9, "tables with nodes stay");
    }
}
