//! Selects the fields of a pod that planning and placement use, and sums the pod's requests as the
//! scheduler does. Pure.
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use cleave_api::names::{
    CONDITION_PLACED, CONDITION_WITHIN_SHARE, GATE, OTHER_NODES_ANNOTATION, REPLICA_PLACEMENT_ANNOTATION, RESOURCE_GPU,
    RESOURCE_MIG_PREFIX, UNSCHEDULABLE_ANNOTATION, is_served,
};
use cleave_api::placement::{self, Placement};
use cleave_api::sharingpolicy::ReplicaPlacement;
use cleave_plan::Quantity;
use cleave_plan::constraints::{HostPort, PodAffinityTerm, Rules, SpreadConstraint};
use cleave_plan::device::SHARED_SUFFIX;
use cleave_plan::ledger::{self, ContainerKind, DeviceRequest, Units};
use cleave_plan::snapshot::{NodeSelectorTerm, Pod as PlanPod, Toleration};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod as CorePod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource, ResourceExt};
use serde::Deserialize;
use serde::de::IgnoredAny;

/// A pod, with only the fields that the operator reads.
#[derive(Debug, Clone, Default, Deserialize, Resource)]
#[resource(inherit = "CorePod")]
#[expect(clippy::struct_excessive_bools, reason = "independent facts about a pod")]
pub struct PodObject {
    /// Name, namespace, UID and timestamps.
    pub metadata: ObjectMeta,
    /// Resource requests and constraints.
    #[serde(default)]
    pub spec: PodSpec,
    /// Phase and conditions.
    #[serde(default)]
    pub status: PodStatus,
    /// Whether the pod has annotations. Set by [`PodObject::trim`], which drops the annotations.
    #[serde(skip)]
    pub annotated: bool,
    /// The reservation in the pod's annotation, written when the pod was released.
    #[serde(skip)]
    pub placement: Option<Placement>,
    /// Whether the pod was released as unschedulable.
    #[serde(skip)]
    pub unschedulable: bool,
    /// Whether the pod was released to nodes on which another device plugin serves GPUs.
    #[serde(skip)]
    pub to_other_nodes: bool,
    /// Whether the pod is ready. Set by [`PodObject::trim`].
    #[serde(skip)]
    pub ready: bool,
    /// The controller that owns the pod. Set only while the pod is not bound.
    #[serde(skip)]
    pub controller: Option<Controller>,
    /// Identifies the controller that owns the pod. Set if the pod requests GPUs.
    #[serde(skip)]
    pub controller_id: Option<ControllerId>,
    /// How the pod is placed beside other replicas of its controller. `None` if the policies of the
    /// GPUs decide.
    #[serde(skip)]
    pub replica_placement: Option<ReplicaPlacement>,
}

/// A digest of a controller's UID. The digest needs less memory than the UID. If two controllers
/// had the same digest, their pods would be kept apart needlessly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ControllerId(u64);

impl ControllerId {
    /// Computes the digest of a UID.
    pub fn of(uid: &str) -> Self {
        let mut hasher = DefaultHasher::new();
        uid.hash(&mut hasher);
        Self(hasher.finish())
    }
}

/// The controller that owns a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Controller {
    /// Kind of the controller, such as `ReplicaSet` or `Job`.
    pub kind: String,
    /// Name of the controller.
    pub name: String,
    /// UID of the controller.
    pub uid: String,
}

/// How a controller reacts when one of its pods is evicted before the pod is bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replacement {
    /// The controller creates a new pod and counts no failure.
    Free,
    /// The controller creates a new pod and counts a failure. A `Job` does so up to its
    /// `backoffLimit`.
    CountsAsFailure,
    /// The reaction is unknown. The controller might not replace the pod.
    Unknown,
}

impl Controller {
    /// Returns how the controller reacts when one of its pods is evicted before the pod is bound.
    pub fn replacement(&self) -> Replacement {
        match self.kind.as_str() {
            "ReplicaSet" | "ReplicationController" | "StatefulSet" | "DaemonSet" => Replacement::Free,
            "Job" => Replacement::CountsAsFailure,
            _ => Replacement::Unknown,
        }
    }
}

/// The fields of a pod's spec that the operator reads.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodSpec {
    /// Name of the node, once the pod is bound.
    pub node_name: Option<String>,
    /// Priority of the pod.
    pub priority: Option<i32>,
    /// Labels that the node must have.
    pub node_selector: BTreeMap<String, String>,
    /// Affinity to nodes and other pods.
    pub affinity: Option<Box<Affinity>>,
    /// Tolerations of the pod.
    pub tolerations: Vec<Toleration>,
    /// Containers.
    pub containers: Vec<Container>,
    /// Init containers and sidecars.
    pub init_containers: Vec<Container>,
    /// Resources that the pod needs in addition to its containers' requests.
    pub overhead: BTreeMap<String, Quantity>,
    /// Pod-level resources, shared by all containers.
    pub resources: Option<Resources>,
    /// Scheduling gates.
    pub scheduling_gates: Vec<Gate>,
    /// `Never` if the pod does not preempt pods of lower priority, otherwise unset.
    pub preemption_policy: Option<String>,
    /// Maximum time for the pod to terminate, in seconds.
    pub termination_grace_period_seconds: Option<i64>,
    /// Topology spread constraints.
    pub topology_spread_constraints: Vec<SpreadConstraint>,
    /// Volumes of the pod.
    pub volumes: Vec<Volume>,
    /// Claims of dynamic resource allocation. Only the presence of claims matters.
    pub resource_claims: Vec<IgnoredAny>,
    /// Groups of units. The units of each group must be on one device. Set by [`PodObject::trim`].
    /// Excludes [interchangeable](is_interchangeable) resources.
    #[serde(skip)]
    pub device_requests: Vec<DeviceRequest>,
    /// Whether the scheduler may refuse a node for a reason that the operator does not evaluate,
    /// such as a claim of dynamic resource allocation.
    #[serde(skip)]
    pub particular: bool,
    /// Constraints that depend on other pods. Set by [`PodObject::trim`]. For a bound pod, contains
    /// only the constraints that keep other pods away.
    #[serde(skip)]
    pub rules: Rules,
    /// Names of the `PersistentVolumeClaim`s that the pod mounts. Kept only while the pod is not
    /// bound.
    #[serde(skip)]
    pub volume_claims: Vec<String>,
    /// The pod's requests, summed as the scheduler does. Set by [`PodObject::trim`].
    #[serde(skip)]
    pub requests: BTreeMap<String, Quantity>,
}

/// The fields of a pod's status that the operator reads.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct PodStatus {
    /// `Pending`, `Running`, `Succeeded` or `Failed`.
    pub phase: String,
    /// Conditions. After [`PodObject::trim`], only the operator's own conditions and the
    /// scheduler's.
    pub conditions: Vec<PodCondition>,
    /// The node on which the scheduler preempts other pods for this pod.
    #[serde(rename = "nominatedNodeName")]
    pub nominated_node_name: Option<String>,
}

/// The fields of a pod's condition that the operator reads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct PodCondition {
    /// Type of the condition, such as `PodScheduled`.
    #[serde(rename = "type")]
    pub type_: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// A machine-readable reason in CamelCase.
    pub reason: String,
    /// A message for people.
    pub message: String,
}

/// A pod's affinity.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Affinity {
    /// Affinity to nodes.
    pub node_affinity: Option<NodeAffinity>,
    /// Affinity to other pods.
    pub pod_affinity: Option<PodTerms>,
    /// Anti-affinity to other pods.
    pub pod_anti_affinity: Option<PodTerms>,
}

/// Affinity or anti-affinity to other pods.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodTerms {
    /// Required terms.
    pub required_during_scheduling_ignored_during_execution: Vec<PodAffinityTerm>,
}

/// The fields of a volume that may restrict the pod to some nodes.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Volume {
    /// Name of the volume in the pod.
    pub name: String,
    /// The claim that the volume mounts.
    pub persistent_volume_claim: Option<VolumeClaim>,
    /// Set if the API server creates the claim with the pod.
    pub ephemeral: Option<IgnoredAny>,
}

/// The claim that a volume mounts.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeClaim {
    /// Name of the claim.
    pub claim_name: String,
}

/// A pod's affinity to nodes.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeAffinity {
    /// Required terms.
    pub required_during_scheduling_ignored_during_execution: Option<NodeSelector>,
}

/// Terms. A node must match at least one of them.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeSelector {
    /// Terms of the selector.
    pub node_selector_terms: Vec<NodeSelectorTerm>,
}

/// The fields of a container that the operator reads.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Container {
    /// Resource requests and limits.
    pub resources: Resources,
    /// `Always` makes an init container a sidecar.
    pub restart_policy: Option<String>,
    /// Ports of the container.
    pub ports: Vec<Port>,
    /// Lifecycle hooks of the container.
    pub lifecycle: Option<Lifecycle>,
}

/// The fields of a container's lifecycle hooks that the operator reads.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Lifecycle {
    /// Set if the container has a preStop hook.
    pub pre_stop: Option<IgnoredAny>,
}

/// The fields of a container port that the operator reads.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Port {
    /// The node's port that this port is bound to.
    pub host_port: Option<u16>,
    /// The node's address that the port is bound to. An empty string means all addresses.
    #[serde(rename = "hostIP")]
    pub host_ip: String,
    /// TCP, UDP or SCTP.
    pub protocol: String,
}

/// Requests and limits.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Resources {
    /// Requested amounts.
    pub requests: BTreeMap<String, Quantity>,
    /// Limits. If `requests` does not name a resource, its limit is also its request.
    pub limits: BTreeMap<String, Quantity>,
}

/// Maximum number of claims that are read from one pod. No CSI driver mounts more on one node.
const MAX_VOLUME_CLAIMS: usize = 128;
/// Maximum number of devices that are listed for one pod. No node has more devices.
const MAX_DEVICES: u64 = 1024;

/// The condition in which the scheduler reports whether it found a node.
pub(crate) const POD_SCHEDULED: &str = "PodScheduled";
/// The condition in which the kubelet reports whether a pod is ready.
const READY: &str = "Ready";

/// A scheduling gate.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Gate {
    /// Name of the gate.
    pub name: String,
}

/// A pod that requests or uses resources of a node.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Claimant {
    /// UID of the pod.
    pub uid: String,
    /// Time at which the pod was created. `None` sorts first.
    pub created: Option<Timestamp>,
    /// The node that the pod is bound to. `None` while the pod is pending.
    pub node: Option<String>,
    /// The planner's input for the pod: `namespace/name`, requests and constraints.
    pub pod: PlanPod,
}

impl Claimant {
    /// Returns the pod's requests for GPU resources, as whole numbers.
    pub fn of_gpus(&self) -> impl Iterator<Item = (&str, u64)> {
        let served = |(name, quantity): (&'_ String, &Quantity)| is_served(name).then(|| quantity.count()).flatten();
        self.pod.requests.iter().filter_map(move |one| Some((one.0.as_str(), served(one).filter(|&count| count > 0)?)))
    }
}

impl PodObject {
    /// Returns all requests of the pod for devices. Units of [interchangeable](is_interchangeable)
    /// resources are listed one by one.
    pub fn device_requests(&self) -> Vec<DeviceRequest> {
        let mut device_requests = self.spec.device_requests.clone();
        for (resource, quantity) in
            self.spec.requests.iter().filter(|(name, _)| is_served(name) && is_interchangeable(name))
        {
            // Limit the length of the list. No node can serve more devices.
            let count = quantity.count().unwrap_or(0).min(MAX_DEVICES);
            let one = Units::new(1).map(|units| DeviceRequest { resource: resource.clone(), units });
            device_requests.extend((0..count).filter_map(|_| one.clone()));
        }
        device_requests
    }

    /// Returns whether the pod is not bound and the placement gate is its only scheduling gate.
    pub fn waits_at_gate(&self) -> bool {
        self.node().is_none() && matches!(self.spec.scheduling_gates.as_slice(), [gate] if gate.name == GATE)
    }

    /// Returns the node that the pod is bound to.
    pub fn node(&self) -> Option<&str> {
        self.spec.node_name.as_deref().filter(|node| !node.is_empty())
    }

    /// Returns whether the pod requests a resource that Cleave can serve. Call [`Self::trim`]
    /// first.
    pub fn requests_gpus(&self) -> bool {
        self.spec.requests.iter().any(|(name, quantity)| is_served(name) && quantity.milli() != Some(0))
    }

    /// Sums the requests and drops fields that are no longer needed. A cluster has many pods, and
    /// few of them wait for GPUs.
    pub fn trim(&mut self) {
        let meta = &mut self.metadata;
        // An annotation that does not parse was not written by the operator and is ignored.
        let annotation = |name: &str| meta.annotations.as_ref().and_then(|all| all.get(name));
        self.unschedulable = self.unschedulable || annotation(UNSCHEDULABLE_ANNOTATION).is_some();
        self.to_other_nodes = self.to_other_nodes || annotation(OTHER_NODES_ANNOTATION).is_some();
        let note = annotation(placement::PLACEMENT_ANNOTATION);
        self.placement = note.and_then(|text| Placement::parse(text).ok());
        let replica_placement = annotation(REPLICA_PLACEMENT_ANNOTATION).and_then(|text| ReplicaPlacement::parse(text));
        self.replica_placement = replica_placement.or(self.replica_placement);
        self.annotated = meta.annotations.is_some();
        // Labels are kept, because affinity and spread constraints of other pods select by them.
        (meta.managed_fields, meta.annotations) = (None, None);
        let owners = meta.owner_references.take().unwrap_or_default();
        let owner = owners.into_iter().find(|owner| owner.controller == Some(true));
        (meta.finalizers, meta.generate_name) = (None, None);
        if !self.spec.containers.is_empty() {
            self.spec.requests = requests(&self.spec);
            self.spec.device_requests = device_requests(&self.spec);
            self.spec.rules = rules(&mut self.spec);
            self.spec.volume_claims = volume_claims(&self.spec, self.metadata.name.as_deref().unwrap_or_default());
            let too_many_claims = self.spec.volume_claims.len() > MAX_VOLUME_CLAIMS;
            if too_many_claims {
                self.spec.volume_claims = Vec::new();
            }
            self.spec.particular = !self.spec.resource_claims.is_empty() || too_many_claims;
        }
        self.ready = self.ready || self.condition(READY).is_some_and(|condition| condition.status == "True");
        let ours = [CONDITION_WITHIN_SHARE, CONDITION_PLACED, POD_SCHEDULED];
        self.status.conditions.retain(|condition| ours.contains(&condition.type_.as_str()));
        self.status.conditions.shrink_to_fit();
        if let Some(owner) = owner.as_ref().filter(|_| self.requests_gpus()) {
            self.controller_id = Some(ControllerId::of(&owner.uid));
            // The Job retries its pods. The scheduler's default spreading excludes them too.
            if owner.kind == "Job" && self.replica_placement.is_none() {
                self.replica_placement = Some(ReplicaPlacement::Pack);
            }
        }
        let spec = &mut self.spec;
        (spec.containers, spec.init_containers, spec.overhead) = (Vec::new(), Vec::new(), BTreeMap::new());
        (spec.volumes, spec.topology_spread_constraints) = (Vec::new(), Vec::new());
        (spec.resources, spec.resource_claims) = (None, Vec::new());
        if spec.node_name.is_some() || !self.requests_gpus() {
            let spec = &mut self.spec;
            (spec.node_selector, spec.affinity, spec.tolerations) = (BTreeMap::new(), None, Vec::new());
            (spec.rules.affinity, spec.rules.spread, spec.volume_claims) = (Vec::new(), Vec::new(), Vec::new());
        } else if let Some(owner) = owner {
            self.controller = Some(Controller { kind: owner.kind, name: owner.name, uid: owner.uid });
        }
    }

    /// Returns whether the condition `PodScheduled` has the reason `Unschedulable`. The scheduler
    /// writes it for a released pod that it could not bind. The operator writes it for a pod at the
    /// gate that another node would help.
    pub fn is_reported_unschedulable(&self) -> bool {
        let reported = |condition: &PodCondition| condition.status == "False" && condition.reason == "Unschedulable";
        self.condition(POD_SCHEDULED).is_some_and(reported)
    }

    /// Returns the pod's condition of this type.
    pub fn condition(&self, type_: &str) -> Option<&PodCondition> {
        self.status.conditions.iter().find(|condition| condition.type_ == type_)
    }
}

/// Returns whether all units of a resource on a node are equivalent: whole GPUs and whole MIG
/// instances. Placement counts such units and does not choose devices for them.
pub fn is_interchangeable(resource: &str) -> bool {
    resource == RESOURCE_GPU || resource.starts_with(RESOURCE_MIG_PREFIX) && !resource.ends_with(SHARED_SUFFIX)
}

/// Returns the groups of units. The units of each group must be on one device.
fn device_requests(spec: &PodSpec) -> Vec<DeviceRequest> {
    let container = |(kind, container): (ContainerKind, &Container)| ledger::Container {
        kind,
        limits: container.resources.limits.iter().filter_map(mps_limit).collect(),
    };
    let limit_kind = |container: &Container| match container.restart_policy.as_deref() {
        Some("Always") => ContainerKind::Sidecar,
        _ => ContainerKind::Init,
    };
    let init = spec.init_containers.iter().map(|container| (limit_kind(container), container));
    let main = spec.containers.iter().map(|container| (ContainerKind::Main, container));
    ledger::device_requests(&init.chain(main).map(container).collect::<Vec<_>>())
}

/// Returns a limit whose units must be on one device. The API server refuses quantities that are
/// not numbers.
fn mps_limit((resource, quantity): (&String, &Quantity)) -> Option<(String, u32)> {
    let placed = is_served(resource) && !is_interchangeable(resource);
    let units = quantity.count().filter(|_| placed)?;
    Some((resource.clone(), u32::try_from(units).unwrap_or(u32::MAX)))
}

/// Removes the constraints that depend on other pods from a spec and returns them.
fn rules(spec: &mut PodSpec) -> Rules {
    let required = |terms: Option<PodTerms>| {
        terms.map(|terms| terms.required_during_scheduling_ignored_during_execution).unwrap_or_default()
    };
    let (mut affinity, mut anti_affinity) = (Vec::new(), Vec::new());
    if let Some(of) = &mut spec.affinity {
        affinity = required(of.pod_affinity.take());
        anti_affinity = required(of.pod_anti_affinity.take());
    }
    let mut spread = std::mem::take(&mut spec.topology_spread_constraints);
    spread.retain(SpreadConstraint::is_hard);
    let sidecars =
        spec.init_containers.iter().filter(|container| container.restart_policy.as_deref() == Some("Always"));
    let ports = spec.containers.iter().chain(sidecars).flat_map(|container| &container.ports);
    let ports = ports.filter_map(|port| {
        let number = port.host_port.filter(|port| *port > 0)?;
        Some(HostPort { ip: port.host_ip.clone(), protocol: port.protocol.clone(), port: number })
    });
    Rules { affinity, anti_affinity, spread, ports: ports.collect() }
}

/// Returns the names of the claims of a pod's volumes. A claim that is created with the pod is
/// named after the pod.
fn volume_claims(spec: &PodSpec, pod: &str) -> Vec<String> {
    let claim = |volume: &Volume| match (&volume.persistent_volume_claim, &volume.ephemeral) {
        (Some(claim), _) => Some(claim.claim_name.clone()),
        (None, Some(_)) => Some(format!("{pod}-{}", volume.name)),
        (None, None) => None,
    };
    let claims: BTreeSet<String> = spec.volumes.iter().filter_map(claim).collect();
    claims.into_iter().collect()
}

/// Converts a pod for planning. Returns `None` if the pod has ended, requests no GPU resources, or
/// may not be scheduled yet. Call [`PodObject::trim`] first.
pub fn claimant(pod: &PodObject) -> Option<Claimant> {
    if matches!(pod.status.phase.as_str(), "Succeeded" | "Failed") {
        return None;
    }
    let released_to = || {
        // One node has a reservation for the pod. The pod counts as bound, so that the planner does
        // not repartition a GPU with the reservation.
        let placement = pod.placement.as_ref().filter(|_| pod.spec.scheduling_gates.is_empty())?;
        placement.nodes.keys().next().filter(|_| placement.nodes.len() == 1).map(String::as_str)
    };
    let node = pod.node().or_else(released_to).map(str::to_owned);
    if node.is_none() {
        // Another gate, such as a queue's, means that the pod must not run yet. The placement gate
        // does not count, because the operator removes it.
        let gated = pod.spec.scheduling_gates.iter().any(|gate| gate.name != GATE);
        if gated || pod.metadata.deletion_timestamp.is_some() || !pod.requests_gpus() {
            return None;
        }
    }
    let spec = &pod.spec;
    let required = spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
    let terms = required.and_then(|affinity| affinity.required_during_scheduling_ignored_during_execution.as_ref());
    // An empty list of terms matches no node. Without any affinity, every node matches.
    let affinity = terms.map_or_else(Vec::new, |selector| match selector.node_selector_terms.as_slice() {
        [] => vec![NodeSelectorTerm::default()],
        some => some.to_vec(),
    });
    Some(Claimant {
        uid: pod.uid().unwrap_or_default(),
        created: pod.metadata.creation_timestamp.as_ref().map(|time| time.0),
        node,
        pod: PlanPod {
            name: full_name(&pod.metadata),
            priority: spec.priority.unwrap_or(0),
            requests: spec.requests.clone(),
            node_selector: spec.node_selector.clone(),
            affinity,
            tolerations: spec.tolerations.clone(),
            planned_node: None,
        },
    })
}

/// Returns the name of an object as `namespace/name`.
pub fn full_name(meta: &ObjectMeta) -> String {
    format!(
        "{}/{}",
        meta.namespace.as_deref().unwrap_or("default"),
        meta.name.as_deref().or(meta.generate_name.as_deref()).unwrap_or_default()
    )
}

/// Returns the sum of a pod's requests, as the scheduler computes it. The sum covers all containers
/// and sidecars, or the largest init container with the sidecars that start before it, whichever is
/// more. Pod-level requests replace this sum. The overhead is added.
pub fn requests(spec: &PodSpec) -> BTreeMap<String, Quantity> {
    let mut containers = Sum::default();
    spec.containers.iter().for_each(|container| containers.add(&container.resources));
    let mut sidecars = Sum::default();
    let mut first = Sum::default();
    for container in &spec.init_containers {
        let mut at_once = sidecars.clone();
        at_once.add(&container.resources);
        first.raise_to(&at_once);
        if container.restart_policy.as_deref() == Some("Always") {
            sidecars.add(&container.resources);
        }
    }
    containers.add_sum(&sidecars);
    containers.raise_to(&first);
    if let Some(pod) = &spec.resources {
        let mut whole = Sum::default();
        whole.add(pod);
        containers.amounts.extend(whole.amounts);
    }
    containers.add(&Resources { requests: spec.overhead.clone(), limits: BTreeMap::new() });
    containers.into_quantities()
}

/// Amounts by resource.
#[derive(Debug, Clone, Default)]
pub struct Sum {
    amounts: BTreeMap<String, Amount>,
}

/// An amount in thousandths, or a text that is not a quantity. One malformed quantity makes the
/// whole sum malformed.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Amount {
    Milli(u64),
    Malformed(Quantity),
}

impl Sum {
    fn add(&mut self, resources: &Resources) {
        let implied = resources.limits.iter().filter(|(name, _)| !resources.requests.contains_key(*name));
        for (name, quantity) in resources.requests.iter().chain(implied) {
            self.add_one(name, quantity);
        }
    }

    /// Adds an amount of one resource.
    pub fn add_one(&mut self, name: &str, quantity: &Quantity) {
        let amount = quantity.milli().map_or_else(|| Amount::Malformed(quantity.clone()), Amount::Milli);
        self.add_amount(name, amount);
    }

    fn add_amount(&mut self, name: &str, amount: Amount) {
        let sum = self.amounts.entry(name.to_owned()).or_insert(Amount::Milli(0));
        match (&mut *sum, amount) {
            (Amount::Milli(sum), Amount::Milli(more)) => *sum = sum.saturating_add(more),
            (Amount::Malformed(_), _) => {}
            (_, malformed) => *sum = malformed,
        }
    }

    fn add_sum(&mut self, other: &Self) {
        for (name, amount) in &other.amounts {
            self.add_amount(name, amount.clone());
        }
    }

    fn raise_to(&mut self, other: &Self) {
        for (name, amount) in &other.amounts {
            let sum = self.amounts.entry(name.clone()).or_insert(Amount::Milli(0));
            match (&mut *sum, amount) {
                (Amount::Milli(sum), Amount::Milli(least)) => *sum = (*sum).max(*least),
                (Amount::Malformed(_), _) => {}
                (_, malformed) => *sum = malformed.clone(),
            }
        }
    }

    /// Converts the amounts to quantities in Kubernetes notation.
    pub fn into_quantities(self) -> BTreeMap<String, Quantity> {
        let quantity = |amount: Amount| match amount {
            Amount::Milli(milli) if milli % 1000 == 0 => Quantity::whole(milli / 1000),
            Amount::Milli(milli) => Quantity::new(&format!("{milli}m")),
            Amount::Malformed(text) => text,
        };
        self.amounts.into_iter().map(|(name, amount)| (name, quantity(amount))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(yaml: &str) -> PodObject {
        let text = format!("metadata: {{name: p, namespace: team, uid: u}}\n{yaml}");
        let mut pod: PodObject = serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        pod.trim();
        pod
    }

    fn requested_millis(pod: &PodObject, resource: &str) -> Option<u64> {
        pod.spec.requests.get(resource).and_then(Quantity::milli)
    }

    #[test]
    fn requests_are_summed_as_the_scheduler_sums_them() {
        let pod = pod("
spec:
  overhead: {cpu: 100m}
  initContainers:
  - {resources: {requests: {cpu: '1'}}, restartPolicy: Always}
  - {resources: {requests: {cpu: '5', memory: 1Gi}}}
  containers:
  - {resources: {requests: {cpu: '2'}, limits: {nvidia.com/gpu-10gb: 1}}}
  - {resources: {requests: {cpu: 1500m, nvidia.com/gpu-10gb: 1}, limits: {nvidia.com/gpu-10gb: 1}}}");
        // The sidecar and the init container need 6 CPUs. The sidecar and the containers need 4.5.
        assert_eq!(requested_millis(&pod, "cpu"), Some(6100));
        assert_eq!(requested_millis(&pod, "memory"), Some((1 << 30) * 1000));
        assert_eq!(
            requested_millis(&pod, "nvidia.com/gpu-10gb"),
            Some(2000),
            "limits of extended resources are requests"
        );
    }

    #[test]
    fn pod_level_requests_replace_the_sum() {
        let pod = pod("
spec:
  resources: {requests: {cpu: '3'}}
  containers:
  - {resources: {requests: {cpu: '1', memory: 1Gi}}}");
        assert_eq!(
            (requested_millis(&pod, "cpu"), requested_millis(&pod, "memory")),
            (Some(3000), Some((1 << 30) * 1000))
        );
    }

    #[test]
    fn a_malformed_quantity_affects_only_its_pod_and_is_kept() {
        let pod = pod("
spec:
  containers:
  - {resources: {requests: {nvidia.com/gpu: one}}}
  - {resources: {requests: {nvidia.com/gpu: '1'}}}");
        assert_eq!(pod.spec.requests["nvidia.com/gpu"], Quantity::new("one"));
        assert!(claimant(&pod).is_some(), "the reason is reported to its owner");
    }

    const ONE_GPU_YAML: &str = "containers: [{resources: {limits: {nvidia.com/gpu: 1}}}]";

    #[test]
    fn only_pods_that_may_be_scheduled_are_claimants() {
        for (counts, yaml) in [
            (true, format!("spec: {{{ONE_GPU_YAML}}}")),
            (true, format!("spec: {{{ONE_GPU_YAML}, schedulingGates: [{{name: cleave.dev/placement}}]}}")),
            (false, format!("spec: {{{ONE_GPU_YAML}, schedulingGates: [{{name: kueue.x-k8s.io/admission}}]}}")),
            (false, format!("spec: {{{ONE_GPU_YAML}}}\nstatus: {{phase: Failed}}")),
            (false, "spec: {containers: [{resources: {limits: {cpu: 1}}}]}".to_owned()),
            (true, "spec: {nodeName: n1, containers: [{resources: {limits: {cpu: 1}}}]}".to_owned()),
        ] {
            assert_eq!(claimant(&pod(&yaml)).is_some(), counts, "{yaml}");
        }
        let mut terminating = pod(&format!("spec: {{{ONE_GPU_YAML}}}"));
        terminating.metadata.deletion_timestamp =
            Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(Timestamp::UNIX_EPOCH));
        assert_eq!(claimant(&terminating), None);
        terminating.spec.node_name = Some("n1".to_owned());
        assert!(claimant(&terminating).is_some(), "it keeps its devices until it is gone");
    }

    #[test]
    fn a_pod_released_to_one_node_counts_as_bound_to_it() {
        let with = |nodes: &str, gates: &str| {
            let note = format!(r#"{{"until": 1, "nodes": {nodes}}}"#);
            let text = format!(
                "metadata: {{name: p, annotations: {{cleave.dev/placement: '{note}'}}}}\nspec: {{{ONE_GPU_YAML}, schedulingGates: {gates}}}"
            );
            let mut pod: PodObject = serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
            pod.trim();
            claimant(&pod).and_then(|claimant| claimant.node)
        };
        assert_eq!(with(r#"{"n1": []}"#, "[]").as_deref(), Some("n1"));
        assert_eq!(with(r#"{"n1": [], "n2": []}"#, "[]"), None, "the scheduler chooses one of them");
        assert_eq!(
            with(r#"{"n1": []}"#, "[{name: cleave.dev/placement}]"),
            None,
            "the operator does not write this annotation on a gated pod"
        );
    }

    #[test]
    fn units_of_one_device_and_interchangeable_units_are_separated() {
        let pod = pod("
spec:
  initContainers:
  - {resources: {limits: {nvidia.com/gpu-mps: 2}}}
  - {resources: {limits: {nvidia.com/gpu-mps: 1}}, restartPolicy: Always}
  containers:
  - {resources: {limits: {nvidia.com/gpu-mps: 5, nvidia.com/mig-1g.10gb: 2}}}
  - {resources: {limits: {nvidia.com/mig-1g.10gb.shared: 3, cpu: 1}}}");
        let texts = |requests: &[DeviceRequest]| {
            requests
                .iter()
                .map(|request| format!("{} {}", request.units, request.resource.trim_start_matches("nvidia.com/")))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            texts(&pod.spec.device_requests),
            ["6 gpu-mps", "3 mig-1g.10gb.shared"],
            "units of the init container are used again, on its device"
        );
        assert_eq!(texts(&pod.device_requests())[2..], ["1 mig-1g.10gb", "1 mig-1g.10gb"]);
    }

    #[test]
    fn an_affinity_without_terms_matches_no_node() {
        let affinity =
            "affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: []}}}";
        let claimant = claimant(&pod(&format!("spec: {{{ONE_GPU_YAML}, {affinity}}}"))).unwrap();
        assert_eq!(claimant.pod.affinity, [NodeSelectorTerm::default()]);
        assert_eq!(claimant.pod.name, "team/p");
        assert_eq!(claimant.of_gpus().collect::<Vec<_>>(), [("nvidia.com/gpu", 1)]);
    }

    #[test]
    fn trim_drops_unused_fields() {
        let kept = pod(
            "spec: {nodeName: n1, nodeSelector: {a: b}, tolerations: [{operator: Exists}], containers: [{resources: {limits: {cpu: 1}}}]}",
        );
        assert!(
            kept.spec.containers.is_empty() && kept.spec.tolerations.is_empty() && kept.spec.node_selector.is_empty()
        );
    }
}
