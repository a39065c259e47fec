//! Reads the pods and GPUs of each pool with quotas, for one reconcile.
//!
//! Each reconcile builds [`QuotaWorlds`] from the pods' annotations, the `GpuNode`s and the ledger.
//! No other state is stored, so a new leader makes the same decisions. `quota_pass` applies the
//! rules of `cleave_plan::quota` to the decisions of the reconcile.
use std::collections::{BTreeMap, BTreeSet};

use cleave_plan::ledger::{Ledger, Moment};
use cleave_plan::quota::{Amount, GPU, Gang, Place, Pod, PodId, Settings, Unit, World};

use super::claims::RESERVATION_TIME;
use super::cluster::Cluster;
use super::nodes::Nodes;
use super::pod_tracker::PodTracker;
use crate::pods::{PodObject, full_name};
use crate::quotas::charge::NodeCosts;
use crate::quotas::validate::{Quotas, Unnamed};

/// Seconds after the end of a pod's grace period during which the pod counts towards its quota's
/// maximum.
const HELD_AFTER_GRACE_SECONDS: u64 = 30;
/// A pod terminates late if it ends more than this time after the maximum grace period of evicted
/// pods. The time is for clocks that differ.
const LATE_AFTER_GRACE_CAP: u64 = 30;

/// Settings of quotas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QuotaSettings {
    /// Durations of the rules.
    pub rules: Settings,
    /// How quotas treat pods of namespaces without a quota.
    pub unnamed: Unnamed,
    /// Whether pods get no label that shows whether a quota guarantees what they use.
    pub without_labels: bool,
}

/// The pods and GPUs of one pool.
#[derive(Debug)]
pub(crate) struct PoolWorld {
    pub(crate) world: World,
    /// Pods by name.
    pub(super) ids: BTreeMap<String, PodId>,
    /// GPUs by the UUID of a device on them.
    pub(super) gpus: BTreeMap<String, usize>,
    /// Pods that terminate, but later than an evicted pod would. They count as running.
    pub(super) terminates_late: BTreeSet<PodId>,
    /// Whether a quota of the pool is enforced.
    pub(crate) is_enforced: bool,
}

/// All pools with quotas.
#[derive(Debug)]
pub(crate) struct QuotaWorlds {
    pub(crate) pools: Vec<PoolWorld>,
    /// Pool of each node.
    pool_of_node: BTreeMap<String, usize>,
    /// Whether the cluster has nodes with GPUs that are in no pool with an enforced quota.
    pub(super) has_other_nodes: bool,
    pub(super) now: Moment,
}

/// Pods of one gang that exist, in all pools and without GPUs.
#[derive(Debug, Clone, Copy, Default)]
struct GangPresence {
    pods: usize,
    /// Whether a pod of the gang was released.
    is_released: bool,
}

/// A node with GPUs of a pool.
struct NodeView<'a> {
    name: &'a str,
    pool: usize,
    costs: NodeCosts,
    first_gpu: usize,
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

impl QuotaWorlds {
    /// Reads the pools. Returns `None` if there is no valid quota. `waiting` contains the pods at
    /// the gate. `is_evicted` returns whether the API server accepted an eviction of the pod with
    /// this UID.
    pub(crate) fn new<'a>(
        (cluster, gpu_nodes): (&Cluster, &Nodes),
        (tracker, ledger): (&PodTracker, &Ledger),
        waiting: impl Iterator<Item = (&'a str, &'a PodObject)>,
        is_evicted: impl Fn(&str) -> bool,
        (settings, now): (&QuotaSettings, u64),
    ) -> Option<Self> {
        if cluster.quotas.is_empty() {
            return None;
        }
        let quotas = quotas_of(cluster, gpu_nodes, settings.unnamed);
        if quotas.pools.is_empty() {
            return None;
        }
        let pool_of_node = BTreeMap::new();
        let mut worlds = Self { pools: Vec::new(), pool_of_node, has_other_nodes: false, now: Moment(now) };
        for (at, pool) in quotas.pools.iter().enumerate() {
            let world = World { quotas: pool.quotas.clone(), settings: settings.rules, ..World::default() };
            worlds.pools.push(PoolWorld {
                world,
                ids: BTreeMap::new(),
                gpus: BTreeMap::new(),
                terminates_late: BTreeSet::new(),
                is_enforced: quotas.is_enforced(at),
            });
        }
        let nodes = worlds.add_nodes(gpu_nodes, &quotas);
        worlds.has_other_nodes = gpu_nodes.managed().any(|node| !worlds.is_in_enforced_pool(node));
        let gangs = gangs_of(tracker);
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
            let (place, is_late) = worlds.place_of(pod, view, device.as_deref(), &is_evicted, settings.rules.grace_cap);
            let id = worlds.add_pod((&quotas, &gangs), view, &name, pod, place);
            worlds.pools[view.pool].terminates_late.extend(id.filter(|_| is_late));
        }
        let mut costs: Vec<NodeCosts> = vec![NodeCosts::default(); worlds.pools.len()];
        nodes.iter().for_each(|node| costs[node.pool].extend(&node.costs));
        for (name, pod) in waiting {
            let nominated = ledger.nominations().get(name);
            for (pool, costs) in costs.iter().enumerate() {
                let unit = quotas.pools[pool].unit;
                let Some(charge) = costs.cost(&pod.device_requests(), unit) else { continue };
                let in_pool = nominated.filter(|of| worlds.pool_of_node.get(&of.node) == Some(&pool));
                let nominated = in_pool
                    .and_then(|of| of.takes.first())
                    .map(|take| worlds.pools[pool].gpus.get(&take.device).copied().unwrap_or(0));
                worlds.insert((&quotas, &gangs), pool, name, pod, (charge, Place::Waiting { nominated }));
            }
        }
        Some(worlds)
    }

    /// Returns whether a quota is enforced.
    pub(crate) fn are_enforced(&self) -> bool {
        self.pools.iter().any(|pool| pool.is_enforced)
    }

    /// Returns whether a node is in a pool.
    pub(super) fn has_node(&self, pool: usize, node: &str) -> bool {
        self.pool_of_node.get(node) == Some(&pool)
    }

    /// Returns whether a node is in a pool with an enforced quota.
    pub(super) fn is_in_enforced_pool(&self, node: &str) -> bool {
        self.pool_of_node.get(node).is_some_and(|pool| self.pools[*pool].is_enforced)
    }

    /// Adds the GPUs of all nodes. A node whose `GpuNode` disappeared, or is not valid now, has no
    /// room. Its pods still count, as they do on a GPU that is unhealthy.
    fn add_nodes<'a>(&mut self, gpu_nodes: &'a Nodes, quotas: &Quotas) -> Vec<NodeView<'a>> {
        let mut nodes = Vec::new();
        for (name, node, is_current) in gpu_nodes.with_gpus() {
            let Some(status) = &node.status else { continue };
            let Some(pool) = status.gpus.first().and_then(|gpu| quotas.pool_of(&gpu.model)) else { continue };
            let PoolWorld { world, gpus, .. } = &mut self.pools[pool];
            let first_gpu = world.gpus.len();
            for gpu in &status.gpus {
                let whole = match quotas.pools[pool].unit {
                    Unit::Gpus => GPU,
                    Unit::Memory => Amount(gpu.memory_mib),
                };
                let at = world.gpus.len();
                world.gpus.push(if gpu.health.healthy && is_current { whole } else { Amount::ZERO });
                gpus.insert(gpu.uuid.clone(), at);
                gpus.extend(gpu.slices.iter().map(|slice| (slice.device.clone(), at)));
            }
            self.pool_of_node.insert(name.to_owned(), pool);
            nodes.push(NodeView { name, pool, costs: NodeCosts::new(node), first_gpu });
        }
        nodes
    }

    /// Returns where a pod is, and whether it terminates later than an evicted pod would. Such a pod
    /// counts as running: otherwise a long grace period would keep its room from a guarantee.
    fn place_of(
        &self,
        pod: &PodObject,
        view: &NodeView<'_>,
        device: Option<&str>,
        is_evicted: &impl Fn(&str) -> bool,
        grace_cap: u64,
    ) -> (Place, bool) {
        let known = device.and_then(|device| self.pools[view.pool].gpus.get(device).copied());
        let gpu = known.unwrap_or(view.first_gpu);
        let seconds = |time: i64| u64::try_from(time).unwrap_or(0);
        let is_evicted = is_evicted(pod.metadata.uid.as_deref().unwrap_or_default());
        let deleted = pod.metadata.deletion_timestamp.as_ref().map(|deleted| seconds(deleted.0.as_second()));
        let latest = self.now.0.saturating_add(grace_cap).saturating_add(LATE_AFTER_GRACE_CAP);
        let is_late = !is_evicted && deleted.is_some_and(|deleted| deleted > latest);
        match deleted {
            _ if is_evicted => return (Place::Leaving { gpu, held: true }, false),
            Some(deleted) if !is_late => {
                let held = self.now.0 < deleted.saturating_add(HELD_AFTER_GRACE_SECONDS);
                return (Place::Leaving { gpu, held }, false);
            }
            _ => {}
        }
        (Place::Running { gpu, since: released(pod) }, is_late)
    }

    fn add_pod(
        &mut self,
        known: (&Quotas, &Gangs<'_>),
        view: &NodeView<'_>,
        name: &str,
        pod: &PodObject,
        place: Place,
    ) -> Option<PodId> {
        let unit = known.0.pools[view.pool].unit;
        let charge = view.costs.cost(&pod.device_requests(), unit)?;
        Some(self.insert(known, view.pool, name, pod, (charge, place)))
    }

    fn insert(
        &mut self,
        (quotas, gangs): (&Quotas, &Gangs<'_>),
        pool: usize,
        name: &str,
        pod: &PodObject,
        (charge, place): (Amount, Place),
    ) -> PodId {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let gang = pod.gang.as_ref().map(|gang| {
            let present = gangs.get(&(namespace, gang.name.as_str())).copied().unwrap_or_default();
            // A gang that was released once, or of which all pods exist somewhere, misses none.
            let size = if present.is_released || present.pods >= gang.size { 1 } else { gang.size };
            Gang { name: format!("{namespace}/{}", gang.name), size }
        });
        let PoolWorld { world, ids, .. } = &mut self.pools[pool];
        let id = PodId(world.pods.len());
        ids.insert(name.to_owned(), id);
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
            spans_gpus: pod.device_requests().len() > 1,
        });
        id
    }
}

/// Gangs by namespace and name.
type Gangs<'a> = BTreeMap<(&'a str, &'a str), GangPresence>;

/// Counts the pods of each gang. Pods count that request no GPUs, or GPUs of other pools. Pods do
/// not count that terminate, or that have another scheduling gate.
fn gangs_of(tracker: &PodTracker) -> Gangs<'_> {
    let mut gangs = Gangs::new();
    for pod in tracker.living_pods().filter(|pod| pod.metadata.deletion_timestamp.is_none()) {
        let Some(gang) = &pod.gang else { continue };
        let is_released = pod.node().is_some() || pod.spec.scheduling_gates.is_empty();
        if is_released || pod.waits_at_gate() || !pod.requests_gpus() {
            let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
            let present = gangs.entry((namespace, gang.name.as_str())).or_default();
            present.pods += 1;
            present.is_released |= is_released && pod.requests_gpus();
        }
    }
    gangs
}

/// Returns when a pod was released. A pod that did not wait at the gate counts from its creation.
pub(super) fn released(pod: &PodObject) -> Moment {
    let released = pod.reserved_until.map(|until| until.saturating_sub(RESERVATION_TIME.as_secs()));
    released.map_or_else(|| created(pod), Moment)
}

fn created(pod: &PodObject) -> Moment {
    let seconds = pod.metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second());
    Moment(u64::try_from(seconds).unwrap_or(0))
}
