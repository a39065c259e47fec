//! Reads the pods and GPUs of each pool with quotas, for one reconcile.
//!
//! Each reconcile builds [`QuotaWorlds`] from the pods' annotations, the `GpuNode`s and the ledger.
//! No other state is stored, so a new leader makes the same decisions. `quota_pass` applies the
//! rules of `cleave_plan::quota` to the decisions of the reconcile.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cleave_plan::ledger::{DeviceRequest, Ledger, Moment, Reservation};
use cleave_plan::quota::{Amount, GPU, Gang, Place, Pod, PodId, Settings, Unit, World};

use super::claims::RESERVATION_TIME;
use super::cluster::Cluster;
use super::gang_presence::{count_gangs, gang_name};
use super::pod_tracker::PodTracker;
use crate::pods::{PodObject, full_name};
use crate::quotas::charge::NodeCosts;
use crate::quotas::validate::{Quotas, Unnamed};

/// Seconds after the end of a pod's grace period during which the pod counts towards its quota's
/// maximum.
const HELD_AFTER_GRACE_SECONDS: u64 = 30;

/// Settings of quotas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QuotaSettings {
    /// Durations of the rules.
    pub rules: Settings,
    /// How quotas treat pods of namespaces without a quota.
    pub unnamed: Unnamed,
}

/// The pods and GPUs of one pool.
#[derive(Debug)]
pub(crate) struct PoolWorld {
    pub(crate) world: World,
    /// Pods by name.
    pub(super) ids: BTreeMap<String, PodId>,
    /// GPUs by the UUID of a device on them.
    pub(super) gpus: BTreeMap<String, usize>,
    /// Waiting pods that have waited so long that they may be nominated.
    pub(super) long_waits: BTreeMap<PodId, LongWait>,
    /// Waiting pods of gangs of which other waiting pods cannot use the pool.
    pub(super) split_gangs: BTreeSet<PodId>,
    /// Whether a quota of the pool is enforced.
    pub(crate) is_enforced: bool,
}

/// A pod that has waited long.
#[derive(Debug)]
pub(super) struct LongWait {
    /// The units that the pod requests, without a device.
    pub(super) take: Reservation,
    /// The devices that the pod may use, by GPU: the name of the node, and the UUID of the device.
    pub(super) devices: BTreeMap<usize, (String, String)>,
}

/// A pod at the gate.
pub(super) struct WaitingRequests<'n, F> {
    /// The pod, as `namespace/name`.
    pub(super) name: &'n str,
    pub(super) requests: &'n [DeviceRequest],
    /// Returns the nodes that the pod may use.
    pub(super) eligible: F,
}

/// All pools with quotas.
#[derive(Debug)]
pub(crate) struct QuotaWorlds {
    pub(crate) pools: Vec<PoolWorld>,
    /// Pool of each node.
    pool_of_node: BTreeMap<String, usize>,
    pub(super) now: Moment,
}

/// A node with GPUs of a pool.
struct NodeView<'a> {
    name: &'a str,
    pool: usize,
    costs: NodeCosts,
    first_gpu: usize,
}

/// Returns the valid quotas of a cluster.
pub(crate) fn quotas_of(cluster: &Cluster, unnamed: Unnamed) -> Quotas {
    let nothing = BTreeMap::new();
    let namespaces: Vec<(&str, &BTreeMap<String, String>)> = cluster
        .namespaces
        .iter()
        .filter_map(|object| {
            Some((object.metadata.name.as_deref()?, object.metadata.labels.as_ref().unwrap_or(&nothing)))
        })
        .collect();
    let gpus = cluster.gpu_nodes.iter().filter_map(|node| node.0.as_ref().ok()?.status.as_ref());
    let products: BTreeSet<String> = gpus.flat_map(|status| &status.gpus).map(|gpu| gpu.model.clone()).collect();
    let objects = cluster.quotas.iter().filter_map(|object| object.0.as_ref().ok());
    Quotas::new(objects, &namespaces, &products, unnamed)
}

impl QuotaWorlds {
    /// Reads the pools. Returns `None` if there is no valid quota. `waiting` contains the pods at
    /// the gate. `is_evicted` returns whether the API server accepted an eviction of the pod with
    /// this UID.
    pub(crate) fn new<'a>(
        cluster: &Cluster,
        (tracker, ledger): (&PodTracker, &Ledger),
        waiting: impl Iterator<Item = (&'a str, &'a PodObject)>,
        is_evicted: impl Fn(&str) -> bool,
        (settings, now): (&QuotaSettings, u64),
    ) -> Option<Self> {
        if cluster.quotas.is_empty() {
            return None;
        }
        let quotas = quotas_of(cluster, settings.unnamed);
        if quotas.pools.is_empty() {
            return None;
        }
        let mut worlds = Self { pools: Vec::new(), pool_of_node: BTreeMap::new(), now: Moment(now) };
        for (at, pool) in quotas.pools.iter().enumerate() {
            let world = World { quotas: pool.quotas.clone(), settings: settings.rules, ..World::default() };
            let (ids, gpus, long_waits) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
            let (split_gangs, is_enforced) = (BTreeSet::new(), quotas.is_enforced(at));
            worlds.pools.push(PoolWorld { world, ids, gpus, long_waits, split_gangs, is_enforced });
        }
        let nodes = worlds.add_nodes(cluster, &quotas);
        let by_name: BTreeMap<&str, &NodeView<'_>> = nodes.iter().map(|node| (node.name, node)).collect();
        for pod in tracker.living_pods().filter(|pod| pod.requests_gpus()) {
            let name = full_name(&pod.metadata);
            let placed = ledger
                .devices_of(&name)
                .next()
                .map(|(node, devices)| (node.to_owned(), devices.first().map(|device| (*device).to_owned())));
            let placed = placed.or_else(|| pod.node().map(|node| (node.to_owned(), None)));
            let Some((node, device)) = placed else { continue };
            let Some(view) = by_name.get(node.as_str()) else { continue };
            let place = worlds.place_of(pod, view, device.as_deref(), &is_evicted);
            worlds.add_pod(&quotas, view, &name, pod, place);
        }
        let mut costs: Vec<NodeCosts> = vec![NodeCosts::default(); worlds.pools.len()];
        nodes.iter().for_each(|node| costs[node.pool].extend(&node.costs));
        let waiting: Vec<(&str, &PodObject)> = waiting.collect();
        for &(name, pod) in &waiting {
            let nominated = ledger.nominations().get(name);
            for (pool, costs) in costs.iter().enumerate() {
                let unit = quotas.pools[pool].unit;
                let Some(charge) = costs.cost(&pod.spec.device_requests, unit) else { continue };
                let in_pool = nominated.filter(|of| worlds.pool_of_node.get(&of.node) == Some(&pool));
                let nominated = in_pool
                    .and_then(|of| of.takes.first())
                    .map(|take| worlds.pools[pool].gpus.get(&take.device).copied().unwrap_or(0));
                worlds.insert(&quotas, pool, name, pod, (charge, Place::Waiting { nominated }));
            }
        }
        count_gangs(&mut worlds, (tracker, ledger), &waiting, is_evicted, &cluster.pod_groups);
        Some(worlds)
    }

    /// Finds the devices that long-waiting pods may use. Only pods with one request are nominated,
    /// and only on GPUs with one device of the resource.
    pub(super) fn find_long_waits<'n>(
        &mut self,
        cluster: &Cluster,
        waiting: impl Iterator<Item = WaitingRequests<'n, impl Fn() -> Vec<&'n str>>>,
    ) {
        let now = self.now.0;
        for WaitingRequests { name, requests, eligible } in waiting {
            for pool in self.pools.iter_mut().filter(|pool| pool.is_enforced) {
                let Some(&id) = pool.ids.get(name) else { continue };
                let ageing = pool.world.settings.ageing;
                let pod = &mut pool.world.pods[id.0];
                if ageing.is_none_or(|ageing| pod.created.0.saturating_add(ageing) > now) {
                    continue;
                }
                let devices = match requests {
                    [request] => devices_of(cluster, &eligible(), &request.resource, &pool.gpus),
                    _ => BTreeMap::new(),
                };
                pod.gpus = Some(Arc::new(devices.keys().copied().collect()));
                if let [DeviceRequest { resource, units }] = requests {
                    let take = Reservation { resource: resource.clone(), units: *units, device: String::new() };
                    pool.long_waits.insert(id, LongWait { take, devices });
                }
            }
        }
    }

    /// Returns whether a quota is enforced.
    pub(crate) fn are_enforced(&self) -> bool {
        self.pools.iter().any(|pool| pool.is_enforced)
    }

    /// Returns whether a node is in a pool.
    pub(super) fn has_node(&self, pool: usize, node: &str) -> bool {
        self.pool_of_node.get(node) == Some(&pool)
    }

    fn add_nodes<'a>(&mut self, cluster: &'a Cluster, quotas: &Quotas) -> Vec<NodeView<'a>> {
        let mut nodes = Vec::new();
        for node in cluster.gpu_nodes.iter().filter_map(|node| node.0.as_ref().ok()) {
            let (Some(name), Some(status)) = (node.metadata.name.as_deref(), &node.status) else { continue };
            let Some(pool) = status.gpus.first().and_then(|gpu| quotas.pool_of(&gpu.model)) else { continue };
            let PoolWorld { world, gpus, .. } = &mut self.pools[pool];
            let first_gpu = world.gpus.len();
            for gpu in &status.gpus {
                let whole = match quotas.pools[pool].unit {
                    Unit::Gpus => GPU,
                    Unit::Memory => Amount(gpu.memory_mib),
                };
                let at = world.gpus.len();
                world.gpus.push(if gpu.health.healthy { whole } else { Amount::ZERO });
                gpus.insert(gpu.uuid.clone(), at);
                gpus.extend(gpu.slices.iter().map(|slice| (slice.device.clone(), at)));
            }
            self.pool_of_node.insert(name.to_owned(), pool);
            nodes.push(NodeView { name, pool, costs: NodeCosts::new(node), first_gpu });
        }
        nodes
    }

    fn place_of(
        &self,
        pod: &PodObject,
        view: &NodeView<'_>,
        device: Option<&str>,
        is_evicted: &impl Fn(&str) -> bool,
    ) -> Place {
        let known = device.and_then(|device| self.pools[view.pool].gpus.get(device).copied());
        let gpu = known.unwrap_or(view.first_gpu);
        let seconds = |time: i64| u64::try_from(time).unwrap_or(0);
        if let Some(deleted) = &pod.metadata.deletion_timestamp {
            let held = self.now.0 < seconds(deleted.0.as_second()).saturating_add(HELD_AFTER_GRACE_SECONDS);
            return Place::Leaving { gpu, held };
        }
        if is_evicted(pod.metadata.uid.as_deref().unwrap_or_default()) {
            return Place::Leaving { gpu, held: true };
        }
        let released = pod.reserved_until.map(|until| until.saturating_sub(RESERVATION_TIME.as_secs()));
        Place::Running { gpu, since: Moment(released.unwrap_or_else(|| created(pod).0)) }
    }

    fn add_pod(&mut self, quotas: &Quotas, view: &NodeView<'_>, name: &str, pod: &PodObject, place: Place) {
        let unit = quotas.pools[view.pool].unit;
        if let Some(charge) = view.costs.cost(&pod.spec.device_requests, unit) {
            self.insert(quotas, view.pool, name, pod, (charge, place));
        }
    }

    fn insert(&mut self, quotas: &Quotas, pool: usize, name: &str, pod: &PodObject, (charge, place): (Amount, Place)) {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let gang = gang_name(pod).map(|name| Gang { name, size: 1 });
        let PoolWorld { world, ids, .. } = &mut self.pools[pool];
        ids.insert(name.to_owned(), PodId(world.pods.len()));
        world.pods.push(Pod {
            name: name.to_owned(),
            owner: quotas.owner(pool, namespace),
            charge,
            priority: pod.spec.priority.unwrap_or(0),
            created: created(pod),
            place,
            borrows: !pod.never_borrows,
            preempts: pod.spec.preemption_policy.as_deref() != Some("Never"),
            protected: None,
            gang,
            gpus: None,
        });
    }
}

/// Returns when a pod was created.
pub(super) fn created(pod: &PodObject) -> Moment {
    let seconds = pod.metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second());
    Moment(u64::try_from(seconds).unwrap_or(0))
}

/// Returns the devices of a resource on these nodes, by GPU. Omits GPUs with several devices of the
/// resource.
fn devices_of(
    cluster: &Cluster,
    nodes: &[&str],
    resource: &str,
    gpus: &BTreeMap<String, usize>,
) -> BTreeMap<usize, (String, String)> {
    let mut devices: BTreeMap<usize, Option<(String, String)>> = BTreeMap::new();
    for node in cluster.gpu_nodes.iter().filter_map(|node| node.0.as_ref().ok()) {
        let Some(name) = node.metadata.name.as_deref().filter(|name| nodes.contains(name)) else { continue };
        let slices = node.status.iter().flat_map(|status| &status.gpus).flat_map(|gpu| &gpu.slices);
        for slice in slices.filter(|slice| slice.resource == resource) {
            let Some(&gpu) = gpus.get(&slice.device) else { continue };
            let device = (name.to_owned(), slice.device.clone());
            devices.entry(gpu).and_modify(|known| *known = None).or_insert(Some(device));
        }
    }
    devices.into_iter().filter_map(|(gpu, device)| Some((gpu, device?))).collect()
}
