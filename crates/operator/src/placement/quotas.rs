//! Reads the pods and GPUs of each pool with quotas, for one reconcile.
//!
//! Each reconcile builds [`QuotaWorlds`] from the pods' annotations, the `GpuNode`s and the ledger.
//! No other state is stored, so a new leader makes the same decisions. `quota_pass` applies the
//! rules of `cleave_plan::quota` to the decisions of the reconcile.
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::gpunode::GpuStatus;
use cleave_plan::ledger::{DeviceAmounts, DeviceRequest, Ledger, Moment, Nomination, UnitsOnDevice};
use cleave_plan::quota::{Amount, GPU, Owner, Piece, Place, Pod, PodId, Quota, Settings, Unit, World, charge_per_gpu};
use kube::Resource as _;

use super::claims::PodClaims;
use super::cluster::Cluster;
use super::evictions::EvictionRecords;
use super::gang_restarts::GangRestarts;
use super::nodes::Nodes;
use super::pod_tracker::PodTracker;
use super::quota_costs::{EligibleCosts, NodeView, WaitingRequests, requests_of};
use super::quota_gangs::{Gangs, Location};
use super::quota_times::{ReleasedPlace, created};
use crate::pods::{PodObject, full_name};
use crate::quotas::charge::{DeviceCosts, NodeCosts, is_mig};
use crate::quotas::validate::{Quotas, Unnamed};

/// Settings of quotas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QuotaSettings {
    /// Settings of the rules.
    pub rules: Settings,
    /// How quotas treat pods of namespaces without a quota.
    pub unnamed: Unnamed,
    /// Whether pods get no label that shows whether a quota guarantees what they use.
    pub without_labels: bool,
}

/// What the operator has decided, and the watch may not have reported yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Decided<'a> {
    pub(super) evictions: &'a EvictionRecords,
    pub(super) claims: &'a PodClaims,
    pub(super) restarts: &'a GangRestarts,
}

impl Decided<'_> {
    /// Returns whether the API server accepted an eviction of the pod with this UID.
    fn is_evicted(&self, uid: &str) -> bool {
        self.evictions.is_accepted(uid)
    }

    /// Returns whether the pod with this UID is evicted, or about to be. Other pods do not join its
    /// gang.
    fn is_leaving(&self, uid: &str) -> bool {
        self.is_evicted(uid) || self.evictions.is_requested(uid)
    }

    /// Returns whether the release of a pod at the gate is decided.
    fn is_in_flight(&self, name: &str, pod: &PodObject) -> bool {
        self.claims.is_of(name, pod)
    }
}

/// The pods and GPUs of one pool.
#[derive(Debug)]
pub(crate) struct PoolWorld {
    pub(crate) world: World,
    /// Pods by name.
    pub(super) ids: BTreeMap<String, PodId>,
    /// Devices of the pool's GPUs, by node. An agent may report any UUID, so a report of one node
    /// never affects devices of other nodes.
    devices: BTreeMap<String, NodeDevices>,
    /// What the quotas count.
    pub(super) unit: Unit,
    /// Size of each GPU, healthy or not.
    pub(super) sizes: Vec<Amount>,
    /// Whether the pool has MIG instances.
    pub(super) has_mig: bool,
    /// The lowest cost of each waiting pod, if the cost depends on the GPU.
    pub(super) least: BTreeMap<PodId, Amount>,
    /// The highest cost of each nominated pod, if other devices may cost more than the nominated
    /// ones.
    pub(super) dearest: BTreeMap<PodId, Amount>,
    /// Pods that terminate, but later than an evicted pod would. They count as running.
    pub(super) terminates_late: BTreeSet<PodId>,
    /// When the rules next treat a released pod differently although the pod does not change.
    pub(super) next_change: Option<Moment>,
    /// Whether a quota of the pool is enforced.
    pub(crate) is_enforced: bool,
}

/// Devices of one node.
#[derive(Debug, Default)]
struct NodeDevices {
    /// GPUs by the UUID of a device on them.
    gpus: BTreeMap<String, usize>,
    /// What units cost on each device.
    costs: DeviceCosts,
}

/// All pools with quotas.
#[derive(Debug)]
pub(crate) struct QuotaWorlds {
    pub(crate) pools: Vec<PoolWorld>,
    /// The pools of each node's GPUs.
    pools_of_node: BTreeMap<String, NodePools>,
    /// Devices of the nodes that have GPUs of several pools.
    mixed: Vec<MixedDevice>,
    /// Whether the cluster has nodes with GPUs that are in no pool with an enforced quota.
    pub(super) has_other_nodes: bool,
    pub(super) gangs: Gangs,
    /// Whether it is not known what a quota guarantees, because the quota cannot be read.
    pub(super) are_incomplete: bool,
    pub(super) now: Moment,
}

/// The pools of a node's GPUs.
#[derive(Debug, Default)]
struct NodePools {
    pools: BTreeSet<usize>,
    /// Whether the node has GPUs that no enforced quota counts.
    has_others: bool,
}

/// A resource of a device of a node that has GPUs of several pools.
#[derive(Debug)]
struct MixedDevice {
    node: String,
    resource: String,
    device: String,
    /// The pool. `None` if no quota counts the GPU.
    pool: Option<usize>,
}

/// A released pod whose devices are not known.
struct Unlocated<'p> {
    name: String,
    pod: &'p PodObject,
    node: String,
}

/// Returns the valid quotas of a cluster.
pub(crate) fn quotas_of(cluster: &Cluster, nodes: &Nodes, unnamed: Unnamed) -> Quotas {
    let nothing = BTreeMap::new();
    let namespaces: Vec<(&str, &BTreeMap<String, String>)> = cluster
        .namespaces
        .iter()
        .filter_map(|object| {
            Some((object.metadata.name.as_deref()?, object.metadata.labels.as_ref().unwrap_or(&nothing)))
        })
        .collect();
    let gpus = nodes.with_gpus().filter_map(|(_, node, _)| node.status.as_ref());
    let products: BTreeSet<String> = gpus.flat_map(|status| &status.gpus).map(|gpu| gpu.model.clone()).collect();
    let objects = cluster.quotas.iter().filter_map(|object| object.0.as_ref().ok());
    Quotas::new(objects, &namespaces, &products, unnamed)
}

/// Returns whether a quota of the cluster is enforced.
pub(super) fn are_enforced(cluster: &Cluster, nodes: &Nodes, settings: &QuotaSettings) -> bool {
    let quotas = quotas_of(cluster, nodes, settings.unnamed);
    (0..quotas.pools.len()).any(|at| quotas.is_enforced(at))
}

impl QuotaWorlds {
    /// Reads the pools. Returns `None` if there is no valid quota. `waiting` contains the pods at
    /// the gate.
    pub(super) fn new<'a>(
        (cluster, gpu_nodes): (&Cluster, &Nodes),
        (tracker, ledger): (&PodTracker, &Ledger),
        waiting: impl Iterator<Item = (&'a str, &'a PodObject)>,
        decided: Decided<'_>,
        (settings, now): (&QuotaSettings, u64),
    ) -> Option<Self> {
        if cluster.quotas.is_empty() {
            return None;
        }
        let quotas = quotas_of(cluster, gpu_nodes, settings.unnamed);
        if quotas.pools.is_empty() {
            return None;
        }
        let (pools, pools_of_node) = (Vec::new(), BTreeMap::new());
        let (mixed, has_other_nodes, gangs) = (Vec::new(), false, Gangs::default());
        let are_incomplete = cluster.quotas.iter().any(|object| object.0.is_err());
        let mut worlds = Self { pools, pools_of_node, mixed, has_other_nodes, gangs, are_incomplete, now: Moment(now) };
        for (at, pool) in quotas.pools.iter().enumerate() {
            let world = World { quotas: pool.quotas.clone(), settings: settings.rules, ..World::default() };
            worlds.pools.push(PoolWorld {
                world,
                ids: BTreeMap::new(),
                devices: BTreeMap::new(),
                unit: pool.unit,
                sizes: Vec::new(),
                has_mig: false,
                least: BTreeMap::new(),
                dearest: BTreeMap::new(),
                terminates_late: BTreeSet::new(),
                next_change: None,
                is_enforced: quotas.is_enforced(at),
            });
        }
        let nodes = worlds.add_nodes(gpu_nodes, &quotas);
        worlds.has_other_nodes = gpu_nodes.managed().any(|node| worlds.has_others(node));
        let waiting: Vec<(&str, &PodObject)> = waiting.collect();
        let names: BTreeSet<&str> = waiting.iter().map(|(name, _)| *name).collect();
        let has_units = |name: &str| !ledger.units_of(name).is_empty();
        let is_evicted = |uid: &str| decided.is_evicted(uid);
        let is_in_flight = |name: &str, pod: &PodObject| decided.is_in_flight(name, pod);
        let is_leaving = |uid: &str| decided.is_leaving(uid);
        let decided_pods = (&is_leaving, &is_in_flight, decided.restarts);
        let mut gangs = Gangs::new((tracker, gpu_nodes), (&names, has_units), decided_pods, now);
        let mut costs: Vec<NodeCosts> = vec![NodeCosts::default(); worlds.pools.len()];
        nodes.iter().for_each(|node| costs[node.pool].extend(&node.costs));
        let known = (&quotas, &gangs);
        worlds.add_released(cluster, known, (tracker, ledger), (&nodes, &costs), &is_evicted);
        let mut eligible = EligibleCosts::new(gpu_nodes, &nodes, costs.len());
        for (name, pod) in waiting {
            let nominated = ledger.nominations().get(name);
            worlds.add_waiting(known, (name, pod), nominated, (&costs, &mut eligible));
        }
        worlds.pools.iter_mut().filter(|pool| pool.has_mig).for_each(PoolWorld::cut_charges);
        gangs.locate(|name| worlds.location(name));
        worlds.gangs = gangs;
        Some(worlds)
    }

    /// Returns where a pod is, or can be placed.
    fn location(&self, name: &str) -> Location {
        let pools = self.pools.iter().enumerate();
        let places: Vec<(usize, &Pod)> =
            pools.filter_map(|(at, pool)| Some((at, pool.world.pod(*pool.ids.get(name)?)))).collect();
        let runs = |pod: &Pod| matches!(pod.place, Place::Running { .. });
        let is_running = places.is_empty() || places.iter().any(|(_, pod)| runs(pod));
        let enforced = places.iter().filter(|(at, pod)| self.pools[*at].is_enforced && pod.gang.is_some());
        Location { enforced: enforced.map(|(at, _)| *at).collect(), is_running }
    }

    /// Returns whether a quota is enforced.
    pub(crate) fn are_enforced(&self) -> bool {
        self.pools.iter().any(|pool| pool.is_enforced)
    }

    /// Returns the pool if a quota of the pool is enforced.
    fn enforced(&self, pool: Option<usize>) -> Option<usize> {
        pool.filter(|pool| self.pools[*pool].is_enforced)
    }

    /// Returns whether a node has GPUs of a pool.
    pub(super) fn has_node(&self, pool: usize, node: &str) -> bool {
        self.pools_of_node.get(node).is_some_and(|of| of.pools.contains(&pool))
    }

    /// Returns whether a GPU of a node is in a pool with an enforced quota.
    pub(super) fn is_in_enforced_pool(&self, node: &str) -> bool {
        let is_enforced = |of: &NodePools| of.pools.iter().any(|pool| self.pools[*pool].is_enforced);
        self.pools_of_node.get(node).is_some_and(is_enforced)
    }

    /// Returns whether a node has GPUs that no enforced quota counts, or no known GPUs.
    pub(super) fn has_others(&self, node: &str) -> bool {
        self.pools_of_node.get(node).is_none_or(|of| of.has_others)
    }

    /// Returns whether a nomination is for a GPU of this pool. `None` stands for the GPUs that no
    /// enforced quota counts.
    pub(super) fn is_nominated_in(&self, pool: Option<usize>, nomination: &Nomination) -> bool {
        let mixed = |device: &str| self.mixed_device(&nomination.node, device);
        match nomination.takes.iter().find_map(|take| mixed(&take.device)) {
            Some(mixed) => self.enforced(mixed.pool) == pool,
            None => {
                pool.map_or_else(|| self.has_others(&nomination.node), |pool| self.has_node(pool, &nomination.node))
            }
        }
    }

    /// Returns a device of a node that has GPUs of several pools.
    fn mixed_device(&self, node: &str, device: &str) -> Option<&MixedDevice> {
        self.mixed.iter().find(|mixed| mixed.node == node && mixed.device == device)
    }

    /// Returns the devices that a pod may not use which runs in this pool, on nodes that have GPUs
    /// of several pools. `None` are the GPUs that no enforced quota counts.
    pub(super) fn withheld(&self, pool: Option<usize>) -> BTreeMap<String, DeviceAmounts> {
        let mut withheld: BTreeMap<String, DeviceAmounts> = BTreeMap::new();
        for MixedDevice { node, resource, device, .. } in
            self.mixed.iter().filter(|mixed| self.enforced(mixed.pool) != pool)
        {
            withheld.entry(node.clone()).or_default().insert((resource.clone(), device.clone()), u32::MAX);
        }
        withheld
    }

    /// Returns all pods in pools with an enforced quota, if a node has GPUs of several pools.
    /// Otherwise returns no pods, because no such pod runs beside GPUs that no enforced quota
    /// counts.
    pub(super) fn pods_beside_others(&self) -> BTreeSet<String> {
        if self.mixed.is_empty() {
            return BTreeSet::new();
        }
        let enforced = self.pools.iter().filter(|pool| pool.is_enforced);
        enforced.flat_map(|pool| pool.ids.keys().cloned()).collect()
    }

    /// Adds the GPUs of all nodes, each to the pool of its model. A node whose `GpuNode`
    /// disappeared, or is not valid now, has no capacity. Its pods still count, like pods on an
    /// unhealthy GPU.
    fn add_nodes<'a>(&mut self, gpu_nodes: &'a Nodes, quotas: &Quotas) -> Vec<NodeView<'a>> {
        let mut nodes: Vec<NodeView<'a>> = Vec::new();
        for (name, node, is_current) in gpu_nodes.with_gpus() {
            let Some(status) = &node.status else { continue };
            let (first, mut of_node) = (nodes.len(), NodePools::default());
            let mut devices = Vec::new();
            for gpu in &status.gpus {
                let pool = quotas.pool_of(&gpu.model);
                of_node.has_others |= self.enforced(pool).is_none();
                devices.extend(gpu.slices.iter().map(|slice| MixedDevice {
                    node: name.to_owned(),
                    resource: slice.resource.clone(),
                    device: slice.device.clone(),
                    pool,
                }));
                let Some(pool) = pool else { continue };
                of_node.pools.insert(pool);
                let at = self.pools[pool].add_gpu(name, gpu, is_current);
                let known = nodes[first..].iter().position(|view| view.pool == pool);
                let view = first + known.unwrap_or(nodes.len() - first);
                if view == nodes.len() {
                    nodes.push(NodeView { name, pool, costs: NodeCosts::default(), gpus: Vec::new() });
                }
                nodes[view].costs.add(gpu);
                nodes[view].gpus.push(at);
            }
            if devices.iter().any(|one| one.pool != devices[0].pool) {
                self.mixed.append(&mut devices);
            }
            self.pools_of_node.insert(name.to_owned(), of_node);
        }
        nodes
    }

    /// Adds the pods that are released, bound or running.
    fn add_released(
        &mut self,
        cluster: &Cluster,
        known: (&Quotas, &Gangs),
        (tracker, ledger): (&PodTracker, &Ledger),
        (nodes, costs): (&[NodeView<'_>], &[NodeCosts]),
        is_evicted: &impl Fn(&str) -> bool,
    ) {
        let mut by_name = ViewsOfNodes::new();
        nodes.iter().for_each(|view| by_name.entry(view.name).or_default().push(view));
        let mut used: BTreeSet<(usize, usize)> = BTreeSet::new();
        let mut unlocated = Vec::new();
        for pod in tracker.living_pods().filter(|pod| pod.requests_gpus()) {
            let name = full_name(&pod.metadata);
            let units = ledger.units_of(&name);
            let Some(node) = units.first().map(|(node, _)| *node).or_else(|| pod.node()) else { continue };
            let requests = requests_of(pod);
            let on_node = |(node, units): &(&str, Vec<UnitsOnDevice<'_>>)| {
                let views = by_name.get(node).map(Vec::as_slice).unwrap_or_default();
                let is_only = views.len() == 1 && !self.mixed.iter().any(|mixed| mixed.node == *node);
                let of_view = |view: &&NodeView<'_>| self.pieces_on(view, &requests, units, is_only);
                views.iter().filter_map(|view| Some((view.pool, of_view(view)?))).collect::<Vec<_>>()
            };
            let cost = |found: &Vec<(usize, Vec<Piece>)>| {
                found.iter().flat_map(|(_, pieces)| pieces).map(|piece| piece.charge).sum::<Amount>()
            };
            // A pod that may still be bound to one of several nodes has the highest cost of these
            // nodes.
            let dearest = units.iter().map(on_node).filter(|found| !found.is_empty()).max_by_key(cost);
            let is_elsewhere = |(node, units): &(&str, Vec<UnitsOnDevice<'_>>)| {
                units.iter().any(|(_, device, _)| self.mixed_device(node, device).is_some())
            };
            let Some(found) = dearest else {
                // No quota counts these GPUs.
                if units.iter().any(is_elsewhere) {
                    continue;
                }
                unlocated.push(Unlocated { name, pod, node: node.to_owned() });
                continue;
            };
            for (pool, pieces) in found {
                used.extend(pieces.iter().filter_map(|piece| Some((pool, piece.gpu?))));
                self.insert_released(known, (pool, &name, pod), pieces, is_evicted);
            }
        }
        self.add_unlocated(cluster, known, unlocated, (&by_name, costs, used), is_evicted);
    }

    /// Adds released pods whose devices are not known, and pods on nodes whose GPUs are not known.
    /// `used` contains the GPUs that other pods use.
    fn add_unlocated(
        &mut self,
        cluster: &Cluster,
        known: (&Quotas, &Gangs),
        unlocated: Vec<Unlocated<'_>>,
        (by_name, costs, mut used): (&ViewsOfNodes<'_, '_>, &[NodeCosts], BTreeSet<(usize, usize)>),
        is_evicted: &impl Fn(&str) -> bool,
    ) {
        let managed = OnceCell::new();
        let mut absent: BTreeMap<(usize, String), usize> = BTreeMap::new();
        for Unlocated { name, pod, node } in unlocated {
            let requests = requests_of(pod);
            let offers = |view: &&&NodeView<'_>| {
                let unit = self.pools[view.pool].unit;
                requests.iter().any(|request| view.costs.dearest(request, unit).is_some())
            };
            let views = by_name.get(node.as_str()).map(Vec::as_slice).unwrap_or_default();
            if let Some(view) = views.iter().find(offers).or(views.first()) {
                let (at, first) = (view.pool, view.gpus.first().copied());
                let pool = &self.pools[at];
                let dearest = |request: &DeviceRequest| {
                    view.costs.dearest(request, pool.unit).or_else(|| costs[at].dearest(request, pool.unit))
                };
                let unused =
                    |_: &DeviceRequest| view.gpus.iter().copied().find(|gpu| used.insert((at, *gpu))).or(first);
                let pieces = pool.pieces(&requests, (&node, &[]), dearest, unused);
                self.insert_released(known, (at, &name, pod), pieces, is_evicted);
            } else if !self.pools_of_node.contains_key(&node)
                && managed.get_or_init(|| nodes_of_cleave(cluster)).contains(node.as_str())
            {
                // The node's GPUs are not known. The pod counts in each pool in which it could be,
                // on a GPU without capacity.
                for (at, costs) in costs.iter().enumerate() {
                    let pool = &mut self.pools[at];
                    let dearest = |request: &DeviceRequest| costs.dearest(request, pool.unit);
                    if requests.iter().all(|request| dearest(request).is_none()) {
                        continue;
                    }
                    let gpu = *absent.entry((at, node.clone())).or_insert_with(|| {
                        pool.world.gpus.push(Amount::ZERO);
                        pool.sizes.push(Amount(u64::MAX));
                        pool.world.gpus.len() - 1
                    });
                    let pieces = pool.pieces(&requests, (&node, &[]), dearest, |_| Some(gpu));
                    self.insert_released(known, (at, &name, pod), pieces, is_evicted);
                }
            }
        }
    }

    /// Returns the parts that a pod with these units on a node uses of the node's GPUs of one pool.
    /// Returns `None` if the pod uses none of these GPUs. `is_only` states whether the node has no
    /// GPUs of other pools.
    fn pieces_on(
        &self,
        view: &NodeView<'_>,
        requests: &[DeviceRequest],
        units: &[UnitsOnDevice<'_>],
        is_only: bool,
    ) -> Option<Vec<Piece>> {
        let pool = &self.pools[view.pool];
        let is_here = |(_, device, _): &&UnitsOnDevice<'_>| is_only || pool.gpu(view.name, device).is_some();
        let here: Vec<UnitsOnDevice<'_>> = units.iter().filter(is_here).copied().collect();
        if here.is_empty() {
            return None;
        }
        let is_split = here.len() < units.len();
        let dearest = |request: &DeviceRequest| view.costs.dearest(request, pool.unit).filter(|_| !is_split);
        let pieces = pool.pieces(requests, (view.name, &here), dearest, |_| view.gpus.first().copied());
        (!pieces.is_empty()).then_some(pieces)
    }

    /// Adds a waiting pod to each pool that it may use. The cost may depend on the GPU, so the pod
    /// has the highest cost of the nodes that it may use.
    fn add_waiting(
        &mut self,
        known: (&Quotas, &Gangs),
        (name, pod): (&str, &PodObject),
        nominated: Option<&Nomination>,
        (costs, eligible): (&[NodeCosts], &mut EligibleCosts<'_, '_>),
    ) {
        let waiting = WaitingRequests::of(pod, eligible.nodes);
        let requests = &waiting.listed;
        for (at, all) in costs.iter().enumerate() {
            let unit = self.pools[at].unit;
            let differs = |request: &DeviceRequest| all.cheapest(request, unit) != all.dearest(request, unit);
            let here = if requests.iter().any(differs) { eligible.of(pod, at) } else { None };
            let of = |costs: &NodeCosts, request: &DeviceRequest| costs.dearest(request, unit);
            let dearest =
                |request: &DeviceRequest| here.and_then(|here| of(here, request)).or_else(|| of(all, request));
            let least = here.unwrap_or(all);
            let cheapest = |request: &DeviceRequest| least.cheapest(request, unit);
            let least = requests.iter().filter_map(cheapest).sum::<Amount>().plus(waiting.cost_of_more(cheapest));
            let more = waiting.cost_of_more(dearest);
            let most = requests.iter().filter_map(dearest).sum::<Amount>().plus(more);
            let nominated = nominated.filter(|of| self.is_nominated_in(Some(at), of));
            let takes = nominated.into_iter().flat_map(|of| &of.takes);
            let takes: Vec<UnitsOnDevice<'_>> =
                takes.map(|take| (take.resource.as_str(), take.device.as_str(), take.units)).collect();
            let (pool, node) = (&self.pools[at], nominated.map_or("", |of| of.node.as_str()));
            let pieces = pool.pieces(requests, (node, &takes), dearest, |_| None);
            let nominated = nominated.map(|_| pieces.first().and_then(|piece| piece.gpu).unwrap_or(0));
            let is_mig = pool.has_mig && matches!(&**requests, [request] if is_mig(&request.resource));
            if let Some(id) = self.insert(known, at, (name, pod), pieces, Place::Waiting { nominated }) {
                let pool = &mut self.pools[at];
                let charge = &mut pool.world.pods[id.0].charge;
                *charge = charge.plus(more);
                if known.1.of(name).is_some() {
                    // The pods of a gang may be released to other devices than the nominated ones.
                    *charge = (*charge).max(most);
                }
                if is_mig || least < most {
                    pool.least.insert(id, least);
                    pool.dearest.extend(nominated.map(|_| (id, most)));
                }
            }
        }
    }

    /// Adds a pod that is released, bound or running.
    fn insert_released(
        &mut self,
        known: (&Quotas, &Gangs),
        (pool, name, pod): (usize, &str, &PodObject),
        pieces: Vec<Piece>,
        is_evicted: &impl Fn(&str) -> bool,
    ) {
        let gpu = pieces.first().and_then(|piece| piece.gpu).unwrap_or(0);
        let rules = &self.pools[pool].world.settings;
        let ReleasedPlace { place, terminates_late, next_change } =
            ReleasedPlace::of(pod, gpu, is_evicted, (rules, self.now));
        let id = self.insert(known, pool, (name, pod), pieces, place);
        let pool = &mut self.pools[pool];
        pool.terminates_late.extend(id.filter(|_| terminates_late));
        pool.next_change = pool.next_change.into_iter().chain(next_change).min();
    }

    /// Adds a pod. Returns `None` if the pool serves nothing that the pod requests.
    fn insert(
        &mut self,
        (quotas, gangs): (&Quotas, &Gangs),
        pool: usize,
        (name, pod): (&str, &PodObject),
        pieces: Vec<Piece>,
        place: Place,
    ) -> Option<PodId> {
        if pieces.is_empty() {
            return None;
        }
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let owner = quotas.owner(pool, namespace);
        // Quotas neither delay nor evict pods that no enforced quota counts, so their gangs have no
        // effect.
        let is_enforced = match &owner {
            Owner::Quota(name) => self.pools[pool].world.quotas.get(name).is_some_and(Quota::is_enforced),
            Owner::Unnamed => true,
            Owner::Outside => false,
        };
        let PoolWorld { world, ids, .. } = &mut self.pools[pool];
        let id = PodId(world.pods.len());
        ids.insert(name.to_owned(), id);
        world.pods.push(Pod {
            name: name.to_owned(),
            owner,
            charge: pieces.iter().map(|piece| piece.charge).sum(),
            priority: pod.spec.priority.unwrap_or(0),
            created: created(pod),
            place,
            borrows: !pod.never_borrows,
            preempts: pod.spec.preemption_policy.as_deref() != Some("Never"),
            protected: None,
            gang: gangs.of(name).filter(|_| is_enforced),
            pieces: if pieces.len() > 1 { pieces } else { Vec::new() },
            gpus: None,
        });
        Some(id)
    }
}

impl PoolWorld {
    /// Adds a GPU of a node. Returns its index.
    fn add_gpu(&mut self, node: &str, gpu: &GpuStatus, is_current: bool) -> usize {
        let whole = match self.unit {
            Unit::Gpus => GPU,
            Unit::Memory => Amount(gpu.memory_mib),
        };
        let at = self.world.gpus.len();
        self.world.gpus.push(if is_current && gpu.health.healthy { whole } else { Amount::ZERO });
        self.sizes.push(whole);
        self.has_mig |= gpu.slices.iter().any(|slice| is_mig(&slice.resource));
        let devices = self.devices.entry(node.to_owned()).or_default();
        devices.costs.add(gpu);
        devices.gpus.insert(gpu.uuid.clone(), at);
        devices.gpus.extend(gpu.slices.iter().map(|slice| (slice.device.clone(), at)));
        at
    }

    /// Returns the node and the UUID of each device.
    pub(super) fn devices(&self) -> impl Iterator<Item = (&str, &str)> {
        self.devices.iter().flat_map(|(node, of)| of.gpus.keys().map(|device| (node.as_str(), device.as_str())))
    }

    /// Returns the GPU of a node's device.
    pub(super) fn gpu(&self, node: &str, device: &str) -> Option<usize> {
        self.devices.get(node)?.gpus.get(device).copied()
    }

    /// Returns what units of a resource cost on a node's device. Returns `None` if the pool has no
    /// such device, or the device does not offer the resource.
    pub(super) fn cost(&self, node: &str, (resource, device, units): UnitsOnDevice<'_>) -> Option<Amount> {
        self.devices.get(node)?.costs.cost(device, resource, units.get(), self.unit)
    }

    /// Returns what each request costs, and on which GPU. `units` are the pod's units on the node,
    /// if they are known. Other requests cost what `dearest` returns, and are on the GPU that
    /// `elsewhere` returns. Requests of resources that the pool does not offer are left out.
    fn pieces(
        &self,
        requests: &[DeviceRequest],
        (node, units): (&str, &[UnitsOnDevice<'_>]),
        dearest: impl Fn(&DeviceRequest) -> Option<Amount>,
        mut elsewhere: impl FnMut(&DeviceRequest) -> Option<usize>,
    ) -> Vec<Piece> {
        let mut left = units.to_vec();
        let mut piece = |request: &DeviceRequest| {
            let find = |is_exact: bool| {
                left.iter().position(|(resource, _, units)| {
                    *resource == request.resource && (!is_exact || *units == request.units)
                })
            };
            let taken = find(true).or_else(|| find(false)).map(|at| left.remove(at));
            let on_device = taken.and_then(|(resource, device, _)| {
                let charge = self.cost(node, (resource, device, request.units))?;
                Some(Piece { charge, gpu: self.gpu(node, device) })
            });
            on_device.or_else(|| Some(Piece { charge: dearest(request)?, gpu: elsewhere(request) }))
        };
        requests.iter().filter_map(&mut piece).collect()
    }

    /// Returns the amounts that the released pods of a quota use of each GPU. Nominated pods do not
    /// count. Otherwise the nomination of the pod whose turn it is would reduce the pod's own cost.
    pub(super) fn use_of(&self, owner: &Owner) -> BTreeMap<usize, Amount> {
        let mut sums: BTreeMap<usize, Amount> = BTreeMap::new();
        for pod in self.world.pods.iter().filter(|pod| pod.owner == *owner) {
            let gpu = match pod.place {
                Place::Running { gpu, .. } | Place::Leaving { gpu, .. } => gpu,
                Place::Waiting { .. } => continue,
            };
            let whole = pod.pieces.is_empty().then_some((gpu, pod.charge));
            let parts = pod.pieces.iter().filter_map(|piece| Some((piece.gpu?, piece.charge)));
            for (gpu, charge) in whole.into_iter().chain(parts) {
                let sum = sums.entry(gpu).or_default();
                *sum = sum.plus(charge);
            }
        }
        sums
    }

    /// Limits the sum of a quota's charges on one GPU to the size of the GPU. The charges of the
    /// newest pods are reduced.
    fn cut_charges(&mut self) {
        let Self { world, sizes, .. } = self;
        let mut on: BTreeMap<(usize, Owner), Vec<PartOfGpu>> = BTreeMap::new();
        for (at, pod) in world.pods.iter().enumerate() {
            let (since, gpu) = match pod.place {
                Place::Leaving { gpu, .. } => (Moment(0), Some(gpu)),
                Place::Running { gpu, since } => (since, Some(gpu)),
                Place::Waiting { nominated } => (Moment(u64::MAX), nominated),
            };
            let Some(gpu) = gpu else { continue };
            let mut add = |gpu: usize, piece: usize, charge: Amount| {
                on.entry((gpu, pod.owner.clone())).or_default().push((since, pod.created, at, piece, charge));
            };
            if pod.pieces.is_empty() {
                add(gpu, 0, pod.charge);
            }
            for (number, piece) in pod.pieces.iter().enumerate() {
                add(piece.gpu.unwrap_or(gpu), number, piece.charge);
            }
        }
        for ((gpu, _), mut charges) in on {
            charges.sort_unstable();
            let costs: Vec<Amount> = charges.iter().map(|(.., charge)| *charge).collect();
            for ((.., at, piece, charge), paid) in charges.into_iter().zip(charge_per_gpu(&costs, sizes[gpu])) {
                let pod = &mut world.pods[at];
                pod.charge = pod.charge.minus(charge.minus(paid));
                if let Some(piece) = pod.pieces.get_mut(piece) {
                    piece.charge = paid;
                }
            }
        }
    }
}

/// The GPUs of each node, by pool.
type ViewsOfNodes<'v, 'n> = BTreeMap<&'v str, Vec<&'v NodeView<'n>>>;

/// The part of a GPU that a pod uses: when the pod was released and created, its index, the index
/// of its piece, and the cost.
type PartOfGpu = (Moment, Moment, usize, usize, Amount);

/// Returns the nodes on which Cleave runs: those with a `GpuNode`, readable or not, or an agent.
fn nodes_of_cleave(cluster: &Cluster) -> BTreeSet<&str> {
    let objects = cluster.gpu_nodes.iter().filter_map(|object| object.meta().name.as_deref());
    let agents = cluster.agents.iter().filter_map(|pod| pod.spec.node_name.as_deref());
    objects.chain(agents).collect()
}
