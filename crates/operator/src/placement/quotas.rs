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
/// How long waiting pods of a gang wait for pods that are missing, in seconds after the newest of
/// them was created. A controller that restarts a gang creates all pods again within this time. The
/// operator does not watch ended pods, so it cannot count them.
const MISSING_PODS_TIME: u64 = 30;

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
    /// Waiting pods that have waited so long that they may be nominated.
    pub(super) long_waits: BTreeMap<PodId, LongWait>,
    /// Pods that terminate, but later than an evicted pod would. They count as running.
    pub(super) terminates_late: BTreeSet<PodId>,
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
    /// Whether the cluster has nodes with GPUs that are in no pool with an enforced quota.
    pub(super) has_other_nodes: bool,
    /// When missing pods of a gang next count as ended.
    pub(super) next_gang: Option<Moment>,
    pub(super) now: Moment,
}

/// Pods of one gang that exist, in all pools and without GPUs.
#[derive(Debug, Clone, Copy, Default)]
struct GangPresence {
    pods: usize,
    /// Whether a pod of the gang was released.
    is_released: bool,
    /// The largest size that a released pod states.
    stated: Option<usize>,
    /// The largest size that a pod states.
    size: usize,
    /// When the newest pod was created that waits at the gate, in seconds since the Unix epoch.
    newest: u64,
    /// Whether Kueue admits the pods.
    is_of_kueue: bool,
    /// Whether a pod with GPUs has a gate of another controller.
    has_other_gates: bool,
}

impl GangPresence {
    /// Returns when missing pods count as ended, in seconds since the Unix epoch. Returns `None` if
    /// no pod is missing, or missing pods may still be created.
    fn missing_until(&self) -> Option<u64> {
        let may_have_ended = self.is_released || self.is_of_kueue;
        let is_short = self.pods < self.size;
        (is_short && may_have_ended && !self.has_other_gates).then(|| self.newest.saturating_add(MISSING_PODS_TIME))
    }

    /// Returns the number of pods without which none of the waiting pods is released. A gang of
    /// which all pods exist somewhere misses none.
    fn needed(&self, now: u64) -> usize {
        let is_over = self.missing_until().is_some_and(|until| until <= now);
        if self.pods >= self.size || is_over { 1 } else { self.size }
    }
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
        let mut worlds =
            Self { pools: Vec::new(), pool_of_node, has_other_nodes: false, next_gang: None, now: Moment(now) };
        for (at, pool) in quotas.pools.iter().enumerate() {
            let world = World { quotas: pool.quotas.clone(), settings: settings.rules, ..World::default() };
            worlds.pools.push(PoolWorld {
                world,
                ids: BTreeMap::new(),
                gpus: BTreeMap::new(),
                long_waits: BTreeMap::new(),
                terminates_late: BTreeSet::new(),
                is_enforced: quotas.is_enforced(at),
            });
        }
        let nodes = worlds.add_nodes(gpu_nodes, &quotas);
        worlds.has_other_nodes = gpu_nodes.managed().any(|node| !worlds.is_in_enforced_pool(node));
        let gangs = gangs_of(tracker);
        worlds.next_gang =
            gangs.values().filter_map(GangPresence::missing_until).filter(|until| *until > now).map(Moment).min();
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
        worlds.limit_gangs(&gangs);
        Some(worlds)
    }

    /// Limits which running pods of a gang are counted and evicted together. Otherwise all borrowers
    /// of a quota could become one gang, one by one. Such a gang can never leave for a smaller pod.
    ///
    /// A gang is at most as many pods as it states: those that were released first. A gang that
    /// states no size is the pods that one reconcile released.
    fn limit_gangs(&mut self, gangs: &Gangs<'_>) {
        let stated: BTreeMap<String, usize> = gangs
            .iter()
            .filter_map(|((namespace, name), present)| Some((format!("{namespace}/{name}"), present.stated?)))
            .collect();
        let mut running: BTreeMap<String, Vec<(Moment, String, usize, usize)>> = BTreeMap::new();
        for (pool, of) in self.pools.iter().enumerate() {
            for (at, pod) in of.world.pods.iter().enumerate() {
                if let (Some(gang), Place::Running { since, .. }) = (&pod.gang, pod.place) {
                    running.entry(gang.name.clone()).or_default().push((since, pod.name.clone(), pool, at));
                }
            }
        }
        let size_of = |gang: &str| stated.get(gang).copied();
        let is_full = |gang: &str, count: usize| size_of(gang).is_some_and(|size| count >= size);
        let full: BTreeSet<String> =
            running.iter().filter(|(gang, pods)| is_full(gang, pods.len())).map(|(gang, _)| gang.clone()).collect();
        for (gang, mut pods) in running {
            pods.sort_unstable();
            for (position, (since, _, pool, at)) in pods.into_iter().enumerate() {
                let of = &mut self.pools[pool].world.pods[at].gang;
                match size_of(&gang) {
                    Some(size) if position >= size => *of = None,
                    Some(_) => {}
                    None => *of = Some(Gang { name: format!("{gang} {}", since.0), size: 1 }),
                }
            }
        }
        for pod in self.pools.iter_mut().flat_map(|pool| &mut pool.world.pods) {
            // These pods are more than the gang states. They are released together.
            if let (Some(gang), Place::Waiting { .. }) = (&mut pod.gang, pod.place)
                && full.contains(&gang.name)
            {
                *gang = Gang { name: format!("{} more", gang.name), size: 1 };
            }
        }
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
        let released = pod.reserved_until.map(|until| until.saturating_sub(RESERVATION_TIME.as_secs()));
        (Place::Running { gpu, since: Moment(released.unwrap_or_else(|| created(pod).0)) }, is_late)
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
            let size = present.needed(self.now.0);
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
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let present = gangs.entry((namespace, gang.name.as_str())).or_default();
        present.size = present.size.max(gang.size.unwrap_or(1));
        present.is_of_kueue |= gang.is_of_kueue;
        let is_released = pod.node().is_some() || pod.spec.scheduling_gates.is_empty();
        if !pod.requests_gpus() {
            present.pods += 1;
        } else if is_released {
            present.pods += 1;
            present.is_released = true;
            present.stated = present.stated.max(gang.size);
        } else if pod.waits_at_gate() {
            present.pods += 1;
            present.newest = present.newest.max(created(pod).0);
        } else {
            present.has_other_gates = true;
        }
    }
    gangs
}

fn created(pod: &PodObject) -> Moment {
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
