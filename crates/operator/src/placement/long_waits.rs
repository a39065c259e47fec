//! Finds the GPUs on which a pod that has waited long can run once other pods end.
//!
//! Such a pod is nominated only for these GPUs. If the pod could not use the node, for example
//! because of its anti-affinity or because pods without GPUs use the CPU, the capacity would stay
//! unused while the pod waits.
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};

use cleave_plan::Quantity;
use cleave_plan::ledger::{DeviceRequest, Ledger, Moment, Reservation};
use cleave_plan::quota::PodId;

use super::amounts;
use super::cluster::ReconcileInput;
use super::queue::Queue;
use super::quota_pass::{LongWait, QuotaPass};
use super::quota_times::released;
use super::quotas::PoolWorld;
use super::search::{Candidate, PlacementSearch, SearchKey};

/// Requests of pods with GPUs by node, each with the time of the pod's release.
type RequestsByNode<'a> = BTreeMap<&'a str, Vec<(Moment, &'a BTreeMap<String, Quantity>)>>;

/// Finds devices for pods that have waited long, within one reconcile.
struct LongWaits<'s, 'a> {
    search: &'s PlacementSearch<'a>,
    candidates: &'s BTreeMap<&'a str, &'a Candidate<'a>>,
    input: &'s ReconcileInput<'a>,
    queue: &'s Queue,
    running: OnceCell<RequestsByNode<'a>>,
    /// Properties of pods that can use no node. Replicas of a workload have the same result.
    futile: BTreeSet<SearchKey<'a>>,
}

/// Nominates pods that have waited long. `leads_since` is when this process became the leader, in
/// seconds since the Unix epoch.
pub(super) fn reserve<'a>(
    pass: &mut QuotaPass<'_>,
    (ledger, search): (&mut Ledger, &mut PlacementSearch<'a>),
    candidates: &'a [Candidate<'a>],
    (input, queue): (&ReconcileInput<'a>, &Queue),
    leads_since: u64,
) {
    let names = candidates.iter().map(|one| one.name.as_str());
    let left_out = pass.pools_of_unfinished_releases(names, leads_since);
    let candidates: BTreeMap<&str, &Candidate<'_>> = candidates.iter().map(|one| (one.name.as_str(), one)).collect();
    let (running, futile) = (OnceCell::new(), BTreeSet::new());
    let mut waits = LongWaits { search, candidates: &candidates, input, queue, running, futile };
    let reserved = pass.nominate_for_long_waits(ledger, &left_out, |ledger, pool, id| waits.find(ledger, pool, id));
    for (name, node) in reserved {
        if let Some(&candidate) = candidates.get(name) {
            search.nominate(candidate, &node);
        }
    }
}

impl<'a> LongWaits<'_, 'a> {
    /// Finds the devices for a pod. Only pods with one request are nominated, and only on GPUs with
    /// one device of the resource.
    fn find(&mut self, ledger: &Ledger, pool: &PoolWorld, id: PodId) -> LongWait {
        let pod = pool.world.pod(id);
        let Some(&candidate) = self.candidates.get(pod.name.as_str()) else { return LongWait::default() };
        let [DeviceRequest { resource, units }] = candidate.device_requests.as_slice() else {
            return LongWait::default();
        };
        let arrived = self.arrived(&pod.name, pod.created);
        let has_waited = |ageing: u64| arrived.0.saturating_add(ageing) <= self.input.now.epoch;
        if !pool.world.settings.ageing.is_some_and(has_waited) {
            return LongWait::default();
        }
        let key = self.search.key(candidate);
        if self.futile.contains(&key) {
            return LongWait::default();
        }
        let nodes = self.search.nodes_allowed_by_rules(ledger, candidate);
        let nodes: BTreeSet<&str> = nodes
            .into_iter()
            .filter(|node| {
                let mut missing = node.missing.iter();
                missing.all(|(resource, missing)| self.used_by_overtaking(node.name, resource, arrived) >= *missing)
            })
            .map(|node| node.name)
            .collect();
        if nodes.is_empty() {
            // The next pods with these properties arrived later, or are less important.
            self.futile.insert(key);
        }
        let take = Some(Reservation { resource: resource.clone(), units: *units, device: String::new() });
        LongWait { take, devices: self.devices(&nodes, resource, pool) }
    }

    /// Returns when a pod came to the gate. The time behind scheduling gates of others does not
    /// count as waiting.
    fn arrived(&self, pod: &str, created: Moment) -> Moment {
        let waited = self.queue.time_since_other_gates(pod, self.input.now.up);
        waited.map_or(created, |waited| Moment(self.input.now.epoch.saturating_sub(waited.as_secs())).max(created))
    }

    /// Returns how much of a node's resource is used by pods with GPUs that were released after a
    /// pod arrived, in thousandths. The pod waits for these pods to end, and for no others.
    fn used_by_overtaking(&self, node: &str, resource: &str, arrived: Moment) -> u128 {
        let pods = self.running().get(node).into_iter().flatten().filter(|(released, _)| *released > arrived);
        let amounts = pods.map(|(_, requests)| amounts::amount(requests, resource));
        amounts.map(|amount| u128::try_from(amount).unwrap_or(0)).fold(0, u128::saturating_add)
    }

    fn running(&self) -> &RequestsByNode<'a> {
        self.running.get_or_init(|| {
            let mut running = RequestsByNode::new();
            for pod in self.input.tracker.living_pods().filter(|pod| pod.requests_gpus()) {
                if let Some(node) = pod.node() {
                    running.entry(node).or_default().push((released(pod), &pod.spec.requests));
                }
            }
            running
        })
    }

    /// Returns the devices of a resource on nodes, by GPU of a pool. Omits GPUs with several such
    /// devices.
    fn devices(&self, nodes: &BTreeSet<&str>, resource: &str, pool: &PoolWorld) -> BTreeMap<usize, (String, String)> {
        let mut devices: BTreeMap<usize, Option<(String, String)>> = BTreeMap::new();
        for node in self.input.cluster.gpu_nodes.iter().filter_map(|node| node.0.as_ref().ok()) {
            let Some(name) = node.metadata.name.as_deref().filter(|name| nodes.contains(name)) else { continue };
            let slices = node.status.iter().flat_map(|status| &status.gpus).flat_map(|gpu| &gpu.slices);
            for slice in slices.filter(|slice| slice.resource == resource) {
                let Some(gpu) = pool.gpu(name, &slice.device) else { continue };
                let device = (name.to_owned(), slice.device.clone());
                devices.entry(gpu).and_modify(|known| *known = None).or_insert(Some(device));
            }
        }
        devices.into_iter().filter_map(|(gpu, device)| Some((gpu, device?))).collect()
    }
}
