//! The cluster's nodes: which nodes can run a pod, what serves a resource, and why a pod is not
//! placeable.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_api::GpuNode;
use cleave_api::names::is_served;
use cleave_plan::Quantity;
use cleave_plan::affinity::HOSTNAME;
use cleave_plan::constraints::Conflict;
use cleave_plan::ledger::{Holder, Ledger, Moment, NoFit, NodeFacts, PendingPod, Tightest};
use cleave_plan::scheduling::{self, Refused};
use cleave_plan::snapshot::{Node as PlanNode, Pod as PlanPod};
use kube::Resource;
use kube::core::DeserializeGuard;

use super::cluster::Cluster;
use super::facts;
use super::pod_tracker::PodTracker;
use super::verdict::{Exclusion, PermanentObstacle, Verdict};
use crate::pods::PodObject;
use crate::read::NodeObject;
use crate::rollout::{Mps, Rollout};

/// Nodes by name.
#[derive(Debug, Default)]
pub(super) struct Nodes(pub(super) BTreeMap<String, NodeState>);

/// The state of one node.
#[derive(Debug, Default)]
pub(super) struct NodeState {
    versions: Versions,
    pub(super) node: PlanNode,
    /// State of MPS that the `GpuNode` reports.
    pub(super) mps: Mps,
    /// Resources that the node's GPUs offer now or after a repartitioning.
    offers: BTreeSet<String>,
    /// Whether the node has a `GpuNode`.
    pub(super) managed: bool,
    /// Whether an agent of Cleave runs on the node, with or without a `GpuNode`.
    has_agent: bool,
    /// Pods with allocations on the node.
    allocated: BTreeSet<String>,
    /// Pods on devices that serve no new pods. Evicting these pods makes no units available.
    blocked: BTreeSet<String>,
}

/// The inputs of a [`NodeState`]. The state is computed again only if one of them changes.
#[derive(Debug, Default, PartialEq, Eq)]
struct Versions<S = String> {
    /// `resourceVersion` of the node.
    node: Option<S>,
    /// `resourceVersion` of the `GpuNode`.
    gpu_node: Option<S>,
    /// Whether the agent is ready. `None` without an agent.
    agent: Option<bool>,
    /// Whether the node's shares under MPS are withheld while the operator replaces its MPS host.
    withheld: bool,
}

impl Versions {
    fn as_deref(&self) -> Versions<&str> {
        let Self { node, gpu_node, agent, withheld } = self;
        Versions { node: node.as_deref(), gpu_node: gpu_node.as_deref(), agent: *agent, withheld: *withheld }
    }
}

impl Versions<&str> {
    fn into_owned(self) -> Versions {
        let Self { node, gpu_node, agent, withheld } = self;
        Versions { node: node.map(str::to_owned), gpu_node: gpu_node.map(str::to_owned), agent, withheld }
    }
}

impl NodeState {
    fn new(object: &NodeObject, gpu_node: Option<&DeserializeGuard<GpuNode>>, versions: Versions) -> Self {
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
            has_agent: versions.agent.is_some(),
            versions,
            ..Self::default()
        }
    }

    /// Updates the state from the `GpuNode`. Returns the node's devices for the ledger.
    fn read(&mut self, object: &GpuNode) -> NodeFacts {
        let is_ready = self.versions.agent.unwrap_or_default();
        self.mps = Mps::of(object, is_ready);
        let (facts, blocked) = facts::of_node(object, is_ready, &self.mps, self.versions.withheld);
        self.blocked = blocked;
        self.allocated = facts.allocations.iter().map(|allocation| allocation.pod.clone()).collect();
        self.offers = facts.devices.iter().map(|device| device.resource.clone()).collect();
        facts
    }

    /// The `resourceVersion` of the node.
    pub(super) fn version(&self) -> &str {
        self.versions.node.as_deref().unwrap_or_default()
    }

    /// Whether selector, affinity and taints allow the pod on the node now.
    fn admits(&self, pod: &PlanPod) -> bool {
        self.is_usable() && scheduling::admit(pod, &self.node).is_ok()
    }

    /// Whether selector, affinity and taints allow the pod on the node, now or after temporary
    /// obstacles such as a cordon end.
    fn may_admit_later(&self, pod: &PlanPod) -> bool {
        self.is_usable() && scheduling::admit(pod, &self.node).map_or_else(|refused| refused.may_pass(), |()| true)
    }

    /// The node's CPU, memory and other resources that no bound pod requests, in thousandths.
    pub(super) fn free_resources(&self, tracker: &PodTracker) -> BTreeMap<&str, u64> {
        let requested = tracker.requested(&self.node.name);
        let amounts = self.node.allocatable.iter().filter(|(resource, _)| !is_served(resource));
        let amounts = amounts.map(|(resource, quantity)| {
            let requested = requested.and_then(|requested| requested.get(resource)).copied().unwrap_or(0);
            let free = u128::from(quantity.milli().unwrap_or(0)).saturating_sub(requested);
            (resource.as_str(), u64::try_from(free).unwrap_or(u64::MAX))
        });
        amounts.collect()
    }

    /// Whether Cleave serves the node's GPUs and pods can be narrowed to the node.
    fn is_usable(&self) -> bool {
        self.managed && self.node.labels.contains_key(HOSTNAME)
    }

    /// Why a pod cannot use the node, regardless of the free units of its GPUs.
    fn exclusion(&self, pod: &PlanPod, checks: &NodeChecks<'_>) -> Option<Exclusion> {
        if !self.is_usable() {
            Some(Exclusion::NoHostname)
        } else if let Err(refused) = scheduling::admit(pod, &self.node) {
            Some(match refused {
                Refused::Cordoned => Exclusion::Cordoned,
                Refused::Selector(label) => Exclusion::Selector(label),
                Refused::Affinity => Exclusion::Affinity,
                Refused::Taint { key, .. } => Exclusion::Taint(key),
            })
        } else if let Err(conflict) = (checks.conflict)(&self.node) {
            Some(Exclusion::Conflict(conflict.to_string()))
        } else if !(checks.has_room)(&self.node.name) {
            Some(Exclusion::Full)
        } else {
            None
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
        let gpu_nodes: BTreeMap<&str, &DeserializeGuard<GpuNode>> = cluster
            .gpu_nodes
            .iter()
            .map(|object| (Resource::meta(&**object).name.as_deref().unwrap_or_default(), &**object))
            .collect();
        let mut changed = Vec::new();
        let mut present = BTreeSet::new();
        for object in &cluster.nodes {
            let name = object.metadata.name.as_deref().unwrap_or_default();
            present.insert(name);
            let gpu_node = gpu_nodes.get(name).copied();
            let versions = Versions {
                node: object.metadata.resource_version.as_deref(),
                gpu_node: gpu_node.and_then(|object| Resource::meta(object).resource_version.as_deref()),
                agent: agents.get(name).copied(),
                withheld: rollout.withholds(name),
            };
            if versions.node.is_some() && self.0.get(name).is_some_and(|known| known.versions.as_deref() == versions) {
                continue;
            }
            let mut state = NodeState::new(object, gpu_node, versions.into_owned());
            let facts = gpu_node.and_then(|object| object.0.as_ref().ok()).map(|object| state.read(object));
            self.0.insert(name.to_owned(), state);
            changed.push((name.to_owned(), facts));
        }
        let gone: Vec<String> = self.0.keys().filter(|name| !present.contains(name.as_str())).cloned().collect();
        for name in gone {
            self.0.remove(&name);
            changed.push((name, None));
        }
        changed
    }

    /// The nodes on which selector, affinity and taints allow the pod.
    pub(super) fn eligible(&self, pod: &PlanPod) -> Vec<&str> {
        self.0.values().filter(|state| state.admits(pod)).map(|state| state.node.name.as_str()).collect()
    }

    /// Whether selector, affinity and taints allow the pod on the node.
    pub(super) fn admits(&self, node: &str, pod: &PlanPod) -> bool {
        self.0.get(node).is_some_and(|state| state.admits(pod))
    }

    /// Whether the cluster has the node.
    pub(super) fn contains(&self, node: &str) -> bool {
        self.0.contains_key(node)
    }

    /// Value of a node's hostname label.
    pub(super) fn hostname(&self, node: &str) -> Option<&str> {
        self.0.get(node)?.node.labels.get(HOSTNAME).map(String::as_str)
    }

    /// Why a node does not accept a released pod now. `None` if the node accepts the pod. Other
    /// pods that are released to the node but not bound to it do not count.
    pub(super) fn refusal(&self, node: &str, pod: &PlanPod, tracker: &PodTracker) -> Option<String> {
        let Some(state) = self.0.get(node) else { return Some("the node no longer exists".to_owned()) };
        if !state.managed {
            return Some("the node has no GpuNode".to_owned());
        }
        let refused = scheduling::admit(pod, &state.node).err().map(|refused| refused.to_string());
        let full = || !has_room(&state.free_resources(tracker), &pod.requests);
        refused.or_else(|| full().then(|| "not enough CPU, memory or another resource".to_owned()))
    }

    /// Pods that preemption can evict, and ended or deleted pods whose node still reports their
    /// allocations. Ended and deleted pods count as terminating, so that no other pod is evicted
    /// for the same units.
    pub(super) fn holders(
        &self,
        living: &[&PodObject],
        protected: &BTreeMap<String, Duration>,
    ) -> BTreeMap<String, Holder> {
        let mut holders = BTreeMap::new();
        for pod in living.iter().filter(|pod| pod.requests_gpus()) {
            let Some(state) = pod.node().and_then(|node| self.0.get(node)) else { continue };
            let name = crate::pods::full_name(&pod.metadata);
            if state.blocked.contains(&name) {
                continue;
            }
            let created = pod.metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second());
            let holder = Holder {
                priority: pod.spec.priority.unwrap_or(0),
                started: Moment(u64::try_from(created).unwrap_or(0)),
                protected: protected.contains_key(&name),
                ending: pod.metadata.deletion_timestamp.is_some(),
            };
            holders.insert(name, holder);
        }
        let gone = Holder { priority: 0, started: Moment(0), protected: false, ending: true };
        for pod in self.0.values().flat_map(|state| state.allocated.difference(&state.blocked)) {
            if !holders.contains_key(pod) {
                holders.insert(pod.clone(), gone);
            }
        }
        holders
    }

    /// Why a pod is not placeable, and whether that can change. `why` is the ledger's answer for
    /// the nodes that passed all checks.
    pub(super) fn diagnose(
        &self,
        ledger: &Ledger,
        pending: PendingPod<'_>,
        pod: &PlanPod,
        checks: &NodeChecks<'_>,
        why: &NoFit,
    ) -> Verdict {
        if why.may_pass() {
            return Verdict::Waits(why.to_string());
        }
        // Search again among the nodes that the pod may use after temporary obstacles end.
        let is_possible = |state: &&NodeState| {
            state.may_admit_later(pod)
                && (checks.conflict)(&state.node).map_or_else(|conflict| conflict.may_pass(), |()| true)
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
            Err(why) if why.may_pass() => Verdict::Waits(why.to_string()),
            Err(why) => {
                let not_offered = matches!(why, NoFit::NotOffered { .. } | NoFit::NoNode);
                let impossible = if not_offered { PermanentObstacle::NotOffered } else { PermanentObstacle::TooLarge };
                Verdict::Never { message: why.to_string(), impossible }
            }
        }
    }

    /// Why the pod cannot use the nodes with GPUs. Lists each reason once, with the number of nodes
    /// and some of their names.
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

    /// Identifies what serves a resource.
    ///
    /// The kubelet of a node that has just lost its `GpuNode` or its policy may still report
    /// Cleave's resources. Such a report alone does not prove that another plugin serves the
    /// resources.
    pub(super) fn provider(&self, resource: &str) -> Provider {
        if self.0.values().any(|state| state.offers.contains(resource)) {
            return Provider::Cleave;
        }
        let offering = |state: &&NodeState| state.node.allocatable.get(resource).and_then(Quantity::count) > Some(0);
        let without_cleave = |state: &NodeState| !state.managed && !state.has_agent;
        let mut offering = self.0.values().filter(offering).map(without_cleave);
        match offering.next() {
            None => Provider::Nothing,
            Some(first) if first || offering.any(|other| other) => Provider::Another,
            Some(_) => Provider::Unclear,
        }
    }
}

/// Checks that can exclude a pod from a node besides selector, affinity and taints.
pub(super) struct NodeChecks<'a> {
    /// Returns the conflict between a node and the rules of this pod or other pods.
    pub(super) conflict: &'a dyn Fn(&PlanNode) -> Result<(), Conflict>,
    /// Whether a node has enough CPU, memory and pod slots.
    pub(super) has_room: &'a dyn Fn(&str) -> bool,
}

/// What serves a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Provider {
    /// GPUs that Cleave manages, now or after a repartitioning.
    Cleave,
    /// A device plugin on nodes where Cleave does not run.
    Another,
    /// Kubelets report the resource on nodes where Cleave runs, but Cleave does not serve it.
    /// Either another plugin serves it on these nodes, or the kubelet's report is old.
    Unclear,
    /// No node offers the resource.
    Nothing,
}

/// Whether `free` covers the requests and one pod slot. Requests that Cleave serves do not count.
pub(super) fn has_room(free: &BTreeMap<&str, u64>, requests: &BTreeMap<String, Quantity>) -> bool {
    let pods = free.get("pods").is_none_or(|pods| *pods >= 1000);
    let fits = |(name, quantity): (&String, &Quantity)| {
        let wanted = quantity.milli().unwrap_or(0);
        wanted == 0 || free.get(name.as_str()).is_some_and(|free| *free >= wanted)
    };
    pods && requests.iter().filter(|(name, _)| !is_served(name)).all(fits)
}
