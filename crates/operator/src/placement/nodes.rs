//! The cluster's nodes. This module determines which nodes can run a pod, which component serves a
//! resource, and why a pod is not placeable.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cleave_api::GpuNode;
use cleave_api::names::{RESOURCE_GPU, is_served};
use cleave_plan::Quantity;
use cleave_plan::affinity::HOSTNAME;
use cleave_plan::constraints::Conflict;
use cleave_plan::ledger::{DeviceAmounts, Holder, Holders, Ledger, Moment, NoFit, NodeFacts, PendingPod, Tightest};
use cleave_plan::scheduling::{self, NodeRefusal};
use cleave_plan::snapshot::{Node as PlanNode, Pod as PlanPod};
use kube::Resource;
use kube::core::DeserializeGuard;

use super::amounts::{self, FreeAmounts, Shortage};
use super::cluster::Cluster;
use super::evictions::Evictability;
use super::facts::{self, Absence, Availability, Blocked, UnitCounts};
use super::pod_tracker::PodTracker;
use super::unlisted::UnlistedUnits;
use super::verdict::{Exclusion, PermanentObstacle, TOO_FEW_UNITS_IN_SUM, Verdict};
use crate::read::NodeObject;
use crate::rollout::{MpsState, Rollout};

/// Nodes by name, and the highest number of GPUs of one node.
#[derive(Debug, Default)]
pub(super) struct Nodes(pub(super) BTreeMap<String, NodeState>, usize);

/// The state of one node.
#[derive(Debug, Default)]
pub(super) struct NodeState {
    versions: NodeStateInputs,
    pub(super) node: PlanNode,
    /// State of MPS that the `GpuNode` reports.
    pub(super) mps: MpsState,
    /// GPU model of the node.
    pub(super) model: String,
    /// Names of the policies of the node's devices, by device.
    policies: BTreeMap<String, Arc<str>>,
    /// Resources that the node's GPUs serve now or after a repartitioning.
    offers: BTreeSet<String>,
    /// Current numbers of units of the node's GPUs, by resource.
    pub(super) unit_counts: BTreeMap<String, UnitCounts>,
    /// Resources that Cleave served on the node before the `GpuNode` or its status disappeared, and
    /// that the kubelet still reports.
    missing: BTreeSet<String>,
    /// Number of GPUs that the agent reports.
    gpus: usize,
    /// Whether the node has a `GpuNode`.
    pub(super) managed: bool,
    /// Whether the agent has written the status of the `GpuNode`.
    has_status: bool,
    /// Whether this process has ever seen a `GpuNode` or an agent on the node.
    was_managed: bool,
    /// Pods with allocations on the node.
    allocated: BTreeSet<String>,
    /// Devices that serve no new pods, and the pods on them.
    blocked: Blocked,
    /// Why units of the node are briefly unavailable. Empty if the end of these absences makes no
    /// units available.
    absences: BTreeSet<Absence>,
    /// The `GpuNode`, if units of the node are briefly unavailable.
    gpu_node: Option<Arc<DeserializeGuard<GpuNode>>>,
    /// The last valid `GpuNode` that had GPUs, and whether it is the present `GpuNode`.
    last_gpu_node: Option<(Arc<DeserializeGuard<GpuNode>>, bool)>,
}

/// No absences.
static NO_ABSENCES: BTreeSet<Absence> = BTreeSet::new();

/// The inputs of a [`NodeState`]. The state is recomputed only if one of these inputs changes.
#[derive(Debug, Default, PartialEq, Eq)]
struct NodeStateInputs<S = String> {
    /// `resourceVersion` of the node.
    node: Option<S>,
    /// `resourceVersion` of the `GpuNode`.
    gpu_node: Option<S>,
    /// Whether the agent is ready. `None` without an agent.
    agent: Option<bool>,
    /// Whether the node's MPS shares are withheld, because the node's MPS host is being replaced or
    /// is not ready.
    withheld: bool,
}

impl NodeStateInputs {
    fn as_deref(&self) -> NodeStateInputs<&str> {
        let Self { node, gpu_node, agent, withheld } = self;
        NodeStateInputs { node: node.as_deref(), gpu_node: gpu_node.as_deref(), agent: *agent, withheld: *withheld }
    }
}

impl NodeStateInputs<&str> {
    fn into_owned(self) -> NodeStateInputs {
        let Self { node, gpu_node, agent, withheld } = self;
        NodeStateInputs { node: node.map(str::to_owned), gpu_node: gpu_node.map(str::to_owned), agent, withheld }
    }
}

impl NodeState {
    fn new(object: &NodeObject, gpu_node: Option<&Arc<DeserializeGuard<GpuNode>>>, versions: NodeStateInputs) -> Self {
        Self {
            node: PlanNode {
                name: object.metadata.name.clone().unwrap_or_default(),
                labels: object.metadata.labels.clone().unwrap_or_default(),
                taints: object.spec.taints.clone(),
                unschedulable: object.spec.unschedulable,
                allocatable: object.status.allocatable.clone(),
                ..PlanNode::default()
            },
            managed: gpu_node.is_some(),
            versions,
            ..Self::default()
        }
    }

    /// Returns whether an agent of Cleave runs on the node, with or without a `GpuNode`.
    fn has_agent(&self) -> bool {
        self.versions.agent.is_some()
    }

    /// Updates the state from the `GpuNode`. Returns the node's devices for the ledger.
    fn update_from(&mut self, object: &GpuNode) -> NodeFacts {
        let is_ready = self.versions.agent.unwrap_or_default();
        self.mps = MpsState::of(object, is_ready);
        let (facts, blocked) = facts::node_facts(object, self.availability(&NO_ABSENCES), &self.mps);
        let absences = facts::absences(object, is_ready);
        if facts::node_facts(object, self.availability(&absences), &self.mps).0 != facts {
            self.absences = absences;
        }
        self.model.clone_from(&facts.model);
        self.policies = facts::policies_by_device(object);
        self.blocked = blocked;
        self.allocated = facts.allocations.iter().map(|allocation| allocation.pod.clone()).collect();
        self.offers = facts.devices.iter().map(|device| device.resource.clone()).collect();
        self.unit_counts = facts::unit_counts(object);
        self.has_status = object.status.is_some();
        self.gpus = object.status.as_ref().map_or(0, |status| status.gpus.len());
        facts
    }

    fn availability<'a>(&self, over: &'a BTreeSet<Absence>) -> Availability<'a> {
        Availability { ready: self.versions.agent.unwrap_or_default(), withheld: self.versions.withheld, over }
    }

    /// Returns why units of the node are briefly unavailable.
    pub(super) const fn absences(&self) -> &BTreeSet<Absence> {
        &self.absences
    }

    /// Returns the node's devices after the end of these absences. Returns `None` if the node has
    /// no valid `GpuNode`.
    pub(super) fn returned_facts(&self, over: &BTreeSet<Absence>) -> Option<NodeFacts> {
        let object = self.gpu_node.as_ref()?.0.as_ref().ok()?;
        Some(facts::node_facts(object, self.availability(over), &self.mps).0)
    }

    /// Returns the `resourceVersion` of the node.
    pub(super) fn resource_version(&self) -> &str {
        self.versions.node.as_deref().unwrap_or_default()
    }

    /// Returns whether the pod's selector and affinity and the node's taints allow the pod on the
    /// node now.
    fn admits(&self, pod: &PlanPod) -> bool {
        self.is_usable() && scheduling::admit(pod, &self.node).is_ok()
    }

    /// Returns whether selector, affinity and taints allow the pod on the node, now or after
    /// temporary obstacles such as a cordon end.
    pub(super) fn may_admit_later(&self, pod: &PlanPod) -> bool {
        self.is_usable() && scheduling::admit(pod, &self.node).map_or_else(|refused| refused.is_temporary(), |()| true)
    }

    /// Returns the name of the policy of a device.
    pub(super) fn policy_of_device(&self, device: &str) -> Option<&str> {
        self.policies.get(device).map(AsRef::as_ref)
    }

    /// Returns the node's CPU, memory and other resources that no bound pod requests, in
    /// thousandths. Excludes the resources that Cleave can serve. An amount is negative if pods
    /// request more than the node has.
    pub(super) fn free_resources(&self, tracker: &PodTracker) -> FreeAmounts<'_> {
        let mut free = self.free_resources_with_gpus(tracker);
        free.retain(|resource, _| !is_served(resource));
        free
    }

    /// Returns the units that the scheduler counts as free, by resource, in thousandths. The
    /// scheduler subtracts the requests of all bound pods from the healthy units. An amount is
    /// negative if pods request more units.
    ///
    /// The scheduler also counts pods on a faulted GPU, although the units of the GPU are no longer
    /// allocatable, and terminating pods that no longer use units. The result ignores the kubelet's
    /// report of allocatable units, which is some seconds late.
    pub(super) fn units_free_for_scheduler(&self, tracker: &PodTracker) -> FreeAmounts<'_> {
        let requested = tracker.requested(&self.node.name);
        let free = |(resource, counts): (&'_ String, &UnitCounts)| {
            let requested = requested.and_then(|requested| requested.get(resource)).copied().unwrap_or(0);
            i128::from(counts.healthy) * 1000 - i128::try_from(requested).unwrap_or(i128::MAX)
        };
        self.unit_counts.iter().map(|counts| (counts.0.as_str(), free(counts))).collect()
    }

    /// Returns whether the node's agent is ready.
    pub(super) fn has_ready_agent(&self) -> bool {
        self.versions.agent.unwrap_or_default()
    }

    /// Returns all of the node's resources that no bound pod requests, in thousandths. An amount
    /// is negative if pods request more than the node has.
    pub(super) fn free_resources_with_gpus(&self, tracker: &PodTracker) -> FreeAmounts<'_> {
        let requested = tracker.requested(&self.node.name);
        let amounts = self.node.allocatable.iter().map(|(resource, quantity)| {
            let requested = requested.and_then(|requested| requested.get(resource)).copied().unwrap_or(0);
            let requested = i128::try_from(requested).unwrap_or(i128::MAX);
            (resource.as_str(), i128::from(quantity.milli().unwrap_or(0)) - requested)
        });
        amounts.collect()
    }

    /// Returns whether Cleave serves GPUs on the node, has served GPUs before, or may serve GPUs
    /// soon.
    pub(super) fn may_be_managed(&self) -> bool {
        let has_gpus = !self.offers.is_empty() || self.node.allocatable.keys().any(|resource| is_served(resource));
        has_gpus && (self.managed || self.has_agent() || !self.missing.is_empty())
    }

    /// Returns whether another device plugin serves GPUs on the node.
    pub(super) fn has_another_plugin(&self) -> bool {
        let mut resources = self.node.allocatable.keys();
        resources.any(|resource| self.provider(resource) == ResourceProvider::Another)
    }

    /// Returns which component serves a resource on this node.
    fn provider(&self, resource: &str) -> ResourceProvider {
        let is_reported = || self.node.allocatable.get(resource).and_then(Quantity::count) > Some(0);
        if self.offers.contains(resource) {
            ResourceProvider::Cleave
        } else if !is_served(resource) || !is_reported() {
            ResourceProvider::Nothing
        } else if self.missing.contains(resource) || self.has_agent() && !self.has_status {
            ResourceProvider::Missing
        } else if self.managed || self.has_agent() {
            ResourceProvider::Unclear
        } else if !self.may_be_outdated() {
            ResourceProvider::Another
        } else if self.was_managed {
            ResourceProvider::Unclear
        } else {
            ResourceProvider::Outdated
        }
    }

    /// Returns whether the kubelet may have stopped its reports.
    fn may_be_outdated(&self) -> bool {
        self.node.taints.iter().any(|taint| OUTDATED_TAINTS.contains(&taint.key.as_str()))
    }

    /// Returns the resources that the node's kubelet has reported since before the `GpuNode`
    /// disappeared. `before` is the node's previous state.
    fn still_reported_resources(&self, before: Option<&Self>) -> BTreeSet<String> {
        let Some(before) = before.filter(|_| !self.has_status) else { return BTreeSet::new() };
        let mut served: BTreeSet<String> = before.offers.union(&before.missing).cloned().collect();
        served.retain(|resource| self.node.allocatable.get(resource).and_then(Quantity::count) > Some(0));
        served
    }

    /// Returns whether Cleave serves the node's GPUs and a release can narrow pods to the node.
    fn is_usable(&self) -> bool {
        self.managed && self.node.labels.contains_key(HOSTNAME)
    }

    /// Returns why a pod cannot use the node, regardless of the ledger's free units on the node.
    /// Returns `None` if the pod can use the node.
    fn exclusion(&self, pod: &PlanPod, checks: &NodeChecks<'_>) -> Option<Exclusion> {
        if !self.is_usable() {
            Some(Exclusion::NoHostname)
        } else if let Err(refused) = scheduling::admit(pod, &self.node) {
            Some(match refused {
                NodeRefusal::Cordoned => Exclusion::Cordoned,
                NodeRefusal::Selector(label) => Exclusion::Selector(label),
                NodeRefusal::Affinity => Exclusion::Affinity,
                NodeRefusal::Taint { key, .. } => Exclusion::Taint(key),
            })
        } else if let Err(conflict) = (checks.conflict)(&self.node) {
            Some(Exclusion::Conflict(conflict.to_string()))
        } else {
            (checks.shortage)(&self.node.name).map(|shortage| match shortage {
                Shortage::Resources => Exclusion::Full,
                Shortage::Units => Exclusion::TooFewUnitsInSum,
            })
        }
    }
}

impl Nodes {
    /// Updates the nodes that have changed. Returns the devices of each changed node, or `None` for
    /// a node that was deleted or has no valid `GpuNode`.
    pub(super) fn update(&mut self, cluster: &Cluster, rollout: &Rollout) -> Vec<(String, Option<NodeFacts>)> {
        let mut agents: BTreeMap<&str, bool> = BTreeMap::new();
        for pod in &cluster.agents {
            if let Some(node) = &pod.spec.node_name {
                *agents.entry(node).or_default() |= crate::read::is_ready(pod);
            }
        }
        let gpu_nodes: BTreeMap<&str, &Arc<DeserializeGuard<GpuNode>>> = cluster
            .gpu_nodes
            .iter()
            .map(|object| (Resource::meta(&**object).name.as_deref().unwrap_or_default(), object))
            .collect();
        let mut changed = Vec::new();
        let mut present = BTreeSet::new();
        for object in &cluster.nodes {
            let name = object.metadata.name.as_deref().unwrap_or_default();
            present.insert(name);
            let gpu_node = gpu_nodes.get(name).copied();
            let versions = NodeStateInputs {
                node: object.metadata.resource_version.as_deref(),
                gpu_node: gpu_node.and_then(|object| Resource::meta(&**object).resource_version.as_deref()),
                agent: agents.get(name).copied(),
                withheld: rollout.is_withheld(name),
            };
            if versions.node.is_some() && self.0.get(name).is_some_and(|known| known.versions.as_deref() == versions) {
                continue;
            }
            let mut state = NodeState::new(object, gpu_node, versions.into_owned());
            let facts = gpu_node.and_then(|object| object.0.as_ref().ok()).map(|object| state.update_from(object));
            state.gpu_node = gpu_node.filter(|_| !state.absences.is_empty()).cloned();
            let before = self.0.get(name);
            let with_gpus = gpu_node.filter(|_| state.gpus > 0 && facts.is_some());
            let last = || before?.last_gpu_node.as_ref().map(|(object, _)| (Arc::clone(object), false));
            state.last_gpu_node = with_gpus.map(|object| (Arc::clone(object), true)).or_else(last);
            state.missing = state.still_reported_resources(before);
            state.was_managed = before.is_some_and(|before| before.was_managed || before.managed || before.has_agent());
            self.0.insert(name.to_owned(), state);
            changed.push((name.to_owned(), facts));
        }
        let gone: Vec<String> = self.0.keys().filter(|name| !present.contains(name.as_str())).cloned().collect();
        for name in gone {
            self.0.remove(&name);
            changed.push((name, None));
        }
        if !changed.is_empty() {
            self.1 = self.0.values().map(|state| state.gpus).max().unwrap_or(0);
        }
        changed
    }

    /// Returns the nodes on which selector, affinity and taints allow the pod.
    pub(super) fn eligible_nodes(&self, pod: &PlanPod) -> Vec<&str> {
        self.0.values().filter(|state| state.admits(pod)).map(|state| state.node.name.as_str()).collect()
    }

    /// Returns whether selector, affinity and taints allow the pod on the node.
    pub(super) fn admits(&self, node: &str, pod: &PlanPod) -> bool {
        self.0.get(node).is_some_and(|state| state.admits(pod))
    }

    /// Returns the nodes with GPUs by name, each with its last valid `GpuNode` with GPUs, and
    /// whether this is the present `GpuNode`.
    pub(super) fn with_gpus(&self) -> impl Iterator<Item = (&str, &GpuNode, bool)> {
        self.0.iter().filter_map(|(name, state)| {
            let (object, is_current) = state.last_gpu_node.as_ref()?;
            Some((name.as_str(), object.0.as_ref().ok()?, *is_current))
        })
    }

    /// Returns the names of the nodes whose GPUs Cleave serves.
    pub(super) fn managed(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter(|(_, state)| state.managed).map(|(name, _)| name.as_str())
    }

    /// Returns whether the cluster has the node.
    pub(super) fn contains(&self, node: &str) -> bool {
        self.0.contains_key(node)
    }

    /// Returns whether a pod uses units on a node that the node withholds from new pods, for
    /// example units of a faulted GPU.
    pub(super) fn is_blocked(&self, node: &str, pod: &str) -> bool {
        self.0.get(node).is_some_and(|state| state.blocked.pods.contains(pod))
    }

    /// Returns the value of a node's hostname label.
    pub(super) fn hostname(&self, node: &str) -> Option<&str> {
        self.0.get(node)?.node.labels.get(HOSTNAME).map(String::as_str)
    }

    /// Returns why a node does not accept a released pod now. Returns `None` if the node accepts
    /// the pod. Ignores other pods that are released to the node but not bound to it.
    pub(super) fn refusal(&self, node: &str, pod: &PlanPod, tracker: &PodTracker) -> Option<String> {
        let Some(state) = self.0.get(node) else { return Some("the node no longer exists".to_owned()) };
        if !state.managed {
            return Some("the node has no GpuNode".to_owned());
        }
        let refused = scheduling::admit(pod, &state.node).err().map(|refused| refused.to_string());
        let full = || !amounts::has_room_for_pod(&state.free_resources(tracker), amounts::requested(&pod.requests));
        let lacks_units = || {
            let free = state.units_free_for_scheduler(tracker);
            let mut wanted = amounts::requested_units(&pod.requests);
            wanted.any(|(resource, wanted)| free.get(resource).is_some_and(|free| *free < wanted))
        };
        refused
            .or_else(|| full().then(|| "not enough CPU, memory or another resource".to_owned()))
            .or_else(|| lacks_units().then(|| TOO_FEW_UNITS_IN_SUM.to_owned()))
    }

    /// Returns the bound pods with GPUs that preemption can evict. Pods on devices that serve no
    /// new pods are [`blocked`](Holders::blocked). Also returns ended or deleted pods if their node
    /// still reports their allocations. Ended or deleted pods that `is_ending` accepts count as
    /// terminating, so that no other pod is evicted for the same units. The units of other ended or
    /// deleted pods count as used. `is_ending` receives the node and the name of the pod, because a
    /// pod of the same name may run on another node. `unlisted` contains units of pods that the
    /// nodes have just stopped listing.
    pub(super) fn holders<'a>(
        &self,
        tracker: &'a PodTracker,
        evictability: &Evictability<'a>,
        unlisted: &UnlistedUnits,
        is_ending: impl Fn(&str, &str) -> bool,
    ) -> Holders<'a> {
        let mut holders = Holders { budgets: evictability.allowed_evictions(), ..Holders::default() };
        let mut kept: BTreeSet<(&str, String)> = BTreeSet::new();
        for pod in tracker.living_pods().filter(|pod| pod.requests_gpus()) {
            let Some((node, state)) = pod.node().and_then(|node| self.0.get_key_value(node)) else { continue };
            let name = crate::pods::full_name(&pod.metadata);
            let is_blocked = state.blocked.pods.contains(&name);
            let pods = if is_blocked { &mut holders.blocked } else { &mut holders.pods };
            match evictability.holder(pod) {
                Some(holder) => drop(pods.entry(node.clone()).or_default().insert(name, holder)),
                None if is_blocked => {}
                None => drop(kept.insert((node, name))),
            }
        }
        let gone = Holder { priority: 0, started: Moment(0), budget: None, ending: true, requests: None };
        for (node, state) in &self.0 {
            for pod in state.allocated.difference(&state.blocked.pods) {
                let is_present = || holders.get(node, pod).is_some() || kept.contains(&(node.as_str(), pod.clone()));
                if is_ending(node, pod) && !is_present() {
                    holders.pods.entry(node.clone()).or_default().insert(pod.clone(), gone);
                }
            }
            // A pod that still runs, and that the node does not list for another reason, keeps its
            // units.
            let runs = |pod: &str| {
                holders.get(node, pod).is_some_and(|holder| !holder.ending)
                    || kept.contains(&(node.as_str(), pod.to_owned()))
            };
            let mut units = DeviceAmounts::new();
            for (_, of_pod) in unlisted.of_node(node).filter(|(pod, _)| !runs(pod)) {
                for (device, count) in of_pod.iter().filter(|((_, device), _)| !state.blocked.devices.contains(device))
                {
                    let sum = units.entry(device.clone()).or_default();
                    *sum = sum.saturating_add(*count);
                }
            }
            if !units.is_empty() {
                holders.unlisted.insert(node.clone(), units);
            }
        }
        holders
    }

    /// Returns why a pod is not placeable, and whether the pod may become placeable. `why` is the
    /// ledger's answer for the nodes that passed all checks.
    pub(super) fn explain_unplaceable(
        &self,
        ledger: &Ledger,
        pending: PendingPod<'_>,
        pod: &PlanPod,
        checks: &NodeChecks<'_>,
        why: &NoFit,
    ) -> Verdict {
        if why.is_temporary() {
            return Verdict::Waits(why.to_string());
        }
        // Include the nodes with too few units in the scheduler's sum if their GPUs also have too
        // few free units.
        let in_sum =
            |state: &&NodeState| state.managed && state.exclusion(pod, checks) == Some(Exclusion::TooFewUnitsInSum);
        let names = self.0.values().filter(in_sum).map(|state| state.node.name.as_str());
        if let Err(why) = ledger.fit_for(pending, names, 1, &Tightest)
            && why.is_temporary()
        {
            return Verdict::Waits(why.to_string());
        }
        // Search again, including the nodes that only temporary obstacles exclude. The pod may fit
        // on these nodes after a wait.
        let is_possible = |state: &&NodeState| {
            state.may_admit_later(pod)
                && (checks.conflict)(&state.node).map_or_else(|conflict| conflict.is_temporary(), |()| true)
        };
        let possible: Vec<&str> = self.0.values().filter(is_possible).map(|state| state.node.name.as_str()).collect();
        if possible.is_empty() {
            return Verdict::Never {
                message: self.explain_exclusions(pod, checks),
                impossible: PermanentObstacle::Excluded,
            };
        }
        match ledger.fit_for(pending, possible.iter().copied(), 1, &Tightest) {
            Ok(_) => Verdict::Waits(self.explain_exclusions(pod, checks)),
            Err(why) if why.is_temporary() => Verdict::Waits(why.to_string()),
            Err(why) => {
                let not_offered = matches!(why, NoFit::NotOffered { .. } | NoFit::NoNode);
                let impossible = if not_offered { PermanentObstacle::NotServed } else { PermanentObstacle::TooLarge };
                Verdict::Never { message: why.to_string(), impossible }
            }
        }
    }

    /// Returns why the pod cannot use the nodes with GPUs. Lists each reason once, with the number
    /// of nodes and some of their names.
    fn explain_exclusions(&self, pod: &PlanPod, checks: &NodeChecks<'_>) -> String {
        let mut exclusions: BTreeMap<Exclusion, Vec<&str>> = BTreeMap::new();
        for state in self.0.values().filter(|state| state.managed) {
            if let Some(exclusion) = state.exclusion(pod, checks) {
                exclusions.entry(exclusion).or_default().push(&state.node.name);
            }
        }
        if exclusions.is_empty() {
            return "No eligible GPU node: Cleave serves the GPUs of no node".to_owned();
        }
        let clauses: Vec<String> = exclusions.iter().map(|(exclusion, nodes)| exclusion.describe(nodes)).collect();
        format!("No eligible GPU node: {}", clauses.join("; "))
    }

    /// Returns which component serves a resource, for a pod that may run on any node. If several
    /// providers serve the resource, returns the provider that the pod waits for the longest.
    /// If another node reports the resource, ignores `NotReady` nodes that show no sign of Cleave.
    ///
    /// The kubelet of a node that has just lost its `GpuNode` or its policy may still report
    /// Cleave's resources. The kubelet's report alone does not prove that another plugin serves the
    /// resources.
    pub(super) fn provider(&self, resource: &str) -> ResourceProvider {
        if self.0.values().any(|state| state.offers.contains(resource)) {
            return ResourceProvider::Cleave;
        }
        self.0.values().map(|state| state.provider(resource)).max().unwrap_or(ResourceProvider::Nothing)
    }

    /// Returns the highest number of GPUs of one node.
    pub(super) const fn max_gpus(&self) -> usize {
        self.1
    }

    /// Returns a number of whole GPUs or MIG instances that is larger than any node has, or a
    /// future node may have. More units of a request make no difference to a placement.
    pub(super) fn too_many_units(&self, resource: &str) -> u64 {
        let gpus = u64::try_from(self.max_gpus().max(GPUS_OF_LARGE_NODE)).unwrap_or(u64::MAX);
        let units = if resource == RESOURCE_GPU { gpus } else { gpus.saturating_mul(MIG_INSTANCES_PER_GPU) };
        units.saturating_add(1)
    }
}

/// Checks, other than selector, affinity and taints, that can exclude a pod from a node.
pub(super) struct NodeChecks<'a> {
    /// Returns the conflict between a node and the rules of this pod or other pods.
    pub(super) conflict: &'a dyn Fn(&PlanNode) -> Result<(), Conflict>,
    /// Returns the kind of resource that a node lacks: CPU, memory and pod slots, or units in the
    /// scheduler's sum.
    pub(super) shortage: &'a dyn Fn(&str) -> Option<Shortage>,
}

/// Number of GPUs of a large node.
const GPUS_OF_LARGE_NODE: usize = 16;
/// Maximum number of MIG instances of one GPU.
const MIG_INSTANCES_PER_GPU: u64 = 7;

/// Taints of nodes whose kubelet may have stopped its reports.
pub(super) const OUTDATED_TAINTS: [&str; 2] = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"];

/// What serves a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ResourceProvider {
    /// No node serves the resource.
    Nothing,
    /// Only the kubelets of `NotReady` nodes on which Cleave never ran report the resource. These
    /// reports may be old.
    Outdated,
    /// Another device plugin, on nodes where Cleave does not run.
    Another,
    /// Kubelets report the resource on nodes where Cleave runs but does not serve the resource, or
    /// on `NotReady` nodes on which Cleave ran before. Either another plugin serves the resource,
    /// or the kubelet's report is old.
    Unclear,
    /// Cleave served the resource on a node, or its agent may serve it, but the `GpuNode` or its
    /// status is missing. The kubelet still reports the resource.
    Missing,
    /// Cleave, now or after a repartitioning.
    Cleave,
}
