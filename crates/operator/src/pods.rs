//! Selects the fields of a pod that planning and placement use, and sums the pod's requests as the
//! scheduler does. Pure.
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use cleave_api::names::{
    BORROW_ANNOTATION, BORROW_NEVER, CONDITION_PLACED, CONDITION_WITHIN_SHARE, GATE, NOMINATION_ANNOTATION,
    OTHER_NODES_ANNOTATION, PROTECTED_SINCE_ANNOTATION, REPLICA_PLACEMENT_ANNOTATION, RESOURCE_GPU,
    RESOURCE_MIG_PREFIX, UNSCHEDULABLE_ANNOTATION, is_served,
};
use cleave_api::placement::{self, Placement};
use cleave_api::sharingpolicy::ReplicaPlacement;
use cleave_plan::Quantity;
use cleave_plan::constraints::{HostPort, Rules, SpreadConstraint};
use cleave_plan::device::SHARED_SUFFIX;
use cleave_plan::ledger::{self, ContainerKind, DeviceRequest, Units};
use cleave_plan::shared::Shared;
use cleave_plan::snapshot::{NodeSelectorTerm, Pod as PlanPod};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::Deserialize;

pub use crate::gang::PodGang;
pub use crate::pod_fields::{
    Affinity, Container, Gate, NodeAffinity, NodeSelector, PodCondition, PodSpec, PodStatus, PodTerms, Port, RawPod,
    Volume, VolumeClaim,
};
pub use crate::sums::{Resources, Sum};

/// A pod, with only the fields that the operator reads. The operator stores every pod of the
/// cluster, so this type is small: pods of one controller share equal parts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(from = "RawPod")]
#[expect(clippy::struct_excessive_bools, reason = "independent facts about a pod")]
pub struct PodObject {
    /// Name, namespace, UID, labels and timestamps.
    pub metadata: PodMeta,
    /// Resource requests and constraints.
    pub spec: Shared<PodSpec>,
    /// Phase and conditions.
    pub status: Shared<PodStatus>,
    /// Name of the node that the pod is bound to. Set by [`PodObject::trim`].
    pub(crate) bound_to: Option<Arc<str>>,
    /// Whether the pod has annotations. Set by [`PodObject::trim`], which drops the annotations.
    pub annotated: bool,
    /// The reservation in the pod's annotation, written when the pod was released.
    pub placement: Option<Shared<Placement>>,
    /// The time in `placement` at which the reservation expires, in seconds since the Unix epoch. A
    /// bound pod keeps this time, although the time in its `placement` is 0.
    pub reserved_until: Option<u64>,
    /// Whether the pod was released as unschedulable.
    pub unschedulable: bool,
    /// Whether the pod was released to nodes on which another device plugin serves GPUs.
    pub to_other_nodes: bool,
    /// Whether the pod is the mirror of a static pod, which only its node's kubelet ends.
    pub is_static: bool,
    /// Whether the pod is ready. Set by [`PodObject::trim`].
    pub ready: bool,
    /// The controller that owns the pod. Set only for pods with GPUs that are not bound.
    pub controller: Option<Box<Controller>>,
    /// Identifies the controller that owns the pod. Set if the pod requests GPUs.
    pub controller_id: Option<ControllerId>,
    /// How the pod is placed relative to other replicas of its controller. `None` if the policies
    /// of the GPUs decide.
    pub replica_placement: Option<ReplicaPlacement>,
    /// Whether the pod runs only within its quota's guarantee.
    pub never_borrows: bool,
    /// The pod's gang: the pods that are released and evicted together. Most pods have none. Set by
    /// [`PodObject::trim`]. For a released pod, the gang that it had when it was released.
    pub gang: Option<Shared<PodGang>>,
    /// The nomination that an earlier leader of the operator wrote to the waiting pod.
    pub nomination: Option<Shared<Placement>>,
    /// When disruption budgets began to block evictions for the waiting pod's guarantee, in seconds
    /// since the Unix epoch.
    pub protected_since: Option<u64>,
}

impl From<RawPod> for PodObject {
    fn from(raw: RawPod) -> Self {
        let RawPod { metadata: meta, spec, status } = raw;
        let owner = meta.owner_references.unwrap_or_default().into_iter().find(|owner| owner.controller == Some(true));
        let metadata = PodMeta {
            name: meta.name.or(meta.generate_name),
            namespace: meta.namespace.map(Arc::from),
            uid: meta.uid.map(Arc::from),
            resource_version: meta.resource_version,
            creation_timestamp: meta.creation_timestamp,
            deletion_timestamp: meta.deletion_timestamp,
            labels: meta.labels.map(Shared::from),
            annotations: meta.annotations.map(Box::new),
            owner: owner.map(|owner| Box::new(Controller { kind: owner.kind, name: owner.name, uid: owner.uid })),
        };
        Self { metadata, spec: Shared::from(spec), status: Shared::from(status), ..Self::default() }
    }
}

/// The fields of a pod's metadata that the operator reads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodMeta {
    /// Name of the pod.
    pub name: Option<String>,
    /// Namespace of the pod.
    pub namespace: Option<Arc<str>>,
    /// UID of the pod.
    pub uid: Option<Arc<str>>,
    /// Resource version of the object. The watch drops the version if no write of the operator
    /// depends on it.
    pub resource_version: Option<String>,
    /// Time at which the pod was created.
    pub creation_timestamp: Option<Time>,
    /// Set if the pod is being deleted.
    pub deletion_timestamp: Option<Time>,
    /// Labels of the pod. Affinity and spread constraints of other pods select pods by these
    /// labels.
    pub labels: Option<Shared<BTreeMap<String, String>>>,
    /// Annotations of the pod. [`PodObject::trim`] drops them.
    #[expect(clippy::box_collection, reason = "the operator stores many pods without annotations")]
    annotations: Option<Box<BTreeMap<String, String>>>,
    /// The controller that owns the pod. [`PodObject::trim`] drops it.
    owner: Option<Box<Controller>>,
}

/// A digest of a controller's UID. The digest needs less memory than the UID. If two controllers
/// have the same digest, the operator needlessly spreads their pods.
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
    /// The controller creates a new pod and counts a failure. A `Job` creates new pods up to its
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

/// Maximum number of claims that the operator reads from one pod. For a pod with more claims, the
/// operator does not evaluate volumes.
const MAX_VOLUME_CLAIMS: usize = 128;
/// Maximum number of devices that the operator lists for one pod. No node has more devices.
const MAX_DEVICES: u64 = 1024;

/// The kubelet's annotation of the mirror of a static pod. The API server refuses to add or remove
/// the annotation later.
const MIRROR_ANNOTATION: &str = "kubernetes.io/config.mirror";

/// The condition in which the scheduler reports whether it found a node.
pub(crate) const POD_SCHEDULED: &str = "PodScheduled";
/// The condition in which the API server reports that a pod was evicted.
pub(crate) const DISRUPTION_TARGET: &str = "DisruptionTarget";
/// The condition in which the kubelet reports whether a pod is ready.
const READY: &str = "Ready";

/// No labels.
const NO_LABELS: &BTreeMap<String, String> = &BTreeMap::new();

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
    pub fn gpu_requests(&self) -> impl Iterator<Item = (&str, u64)> {
        let served = |(name, quantity): (&'_ String, &Quantity)| is_served(name).then(|| quantity.count()).flatten();
        self.pod.requests.iter().filter_map(move |one| Some((one.0.as_str(), served(one).filter(|&count| count > 0)?)))
    }
}

impl PodObject {
    /// Returns all requests of the pod for devices. Units of [interchangeable](is_interchangeable)
    /// resources are listed one by one.
    pub fn device_requests(&self) -> Vec<DeviceRequest> {
        self.device_requests_up_to(|_| MAX_DEVICES)
    }

    /// Like [`Self::device_requests`], but lists at most `most` units of each interchangeable
    /// resource.
    pub(crate) fn device_requests_up_to(&self, most: impl Fn(&str) -> u64) -> Vec<DeviceRequest> {
        let mut device_requests = self.spec.device_requests.clone();
        for (resource, quantity) in
            self.spec.requests.iter().filter(|(name, _)| is_served(name) && is_interchangeable(name))
        {
            // Limit the length of the list. No node can serve more devices.
            let count = quantity.count().unwrap_or(0).min(MAX_DEVICES).min(most(resource));
            let one = Units::new(1).map(|units| DeviceRequest { resource: resource.clone(), units });
            device_requests.extend((0..count).filter_map(|_| one.clone()));
        }
        device_requests
    }

    /// Returns whether the pod is not bound and the placement gate is its only scheduling gate.
    pub fn waits_at_gate(&self) -> bool {
        self.node().is_none() && matches!(self.spec.scheduling_gates.as_slice(), [gate] if gate.name == GATE)
    }

    /// Returns the node that the pod is bound to. Call [`Self::trim`] first.
    pub fn node(&self) -> Option<&str> {
        self.bound_to.as_deref()
    }

    /// Returns whether all of the pod's containers have ended permanently.
    pub fn has_ended(&self) -> bool {
        matches!(self.status.phase.as_str(), "Succeeded" | "Failed")
    }

    /// Returns whether the pod requests a resource that Cleave can serve. Call [`Self::trim`]
    /// first.
    pub fn requests_gpus(&self) -> bool {
        self.spec.requests.iter().any(|(name, quantity)| is_served(name) && quantity.milli() != Some(0))
    }

    /// Sums the requests and drops fields that are no longer needed. A cluster has many pods, and
    /// few of them wait for GPUs. A pod that is already trimmed does not change.
    pub fn trim(&mut self) {
        let annotations = self.metadata.annotations.take();
        // An annotation that does not parse was not written by the operator and is ignored.
        let annotation = |name: &str| annotations.as_ref().and_then(|all| all.get(name));
        self.unschedulable = self.unschedulable || annotation(UNSCHEDULABLE_ANNOTATION).is_some();
        self.to_other_nodes = self.to_other_nodes || annotation(OTHER_NODES_ANNOTATION).is_some();
        self.is_static = self.is_static || annotation(MIRROR_ANNOTATION).is_some();
        let note = annotation(placement::PLACEMENT_ANNOTATION);
        let mut note = note.and_then(|text| Placement::parse(text).ok());
        // Equal placements are shared, so the gang and the right to borrow are stored beside them.
        let released_gang = note.as_mut().map(|note| note.gang.take());
        let released_never_borrows = note.as_mut().map(|note| std::mem::take(&mut note.never_borrows));
        let note = note.map(Shared::from);
        self.reserved_until = note.as_ref().map(|note| note.until).or(self.reserved_until);
        self.placement = note.or(self.placement.take());
        let replica_placement = annotation(REPLICA_PLACEMENT_ANNOTATION).and_then(|text| ReplicaPlacement::parse(text));
        self.replica_placement = replica_placement.or(self.replica_placement);
        self.never_borrows |= released_never_borrows
            .unwrap_or_else(|| annotation(BORROW_ANNOTATION).is_some_and(|value| value == BORROW_NEVER));
        let nomination = annotation(NOMINATION_ANNOTATION).and_then(|text| Placement::parse(text).ok());
        self.nomination = nomination.map(Shared::from).or(self.nomination.take());
        let protected_since = annotation(PROTECTED_SINCE_ANNOTATION).and_then(|text| text.trim().parse().ok());
        self.protected_since = protected_since.or(self.protected_since);
        let workload = self.spec.workload_ref.take().map(|workload| workload.group_name());
        let group = self.spec.scheduling_group.take().and_then(|group| group.pod_group_name).or(workload);
        let gang = PodGang::find(self.labels(), |name| annotation(name).map(String::as_str), group.as_deref());
        self.gang = match released_gang {
            Some(released) => released.map(PodGang::from).map(Shared::from),
            // The pod is already trimmed.
            None if self.placement.is_some() => self.gang.take(),
            None => self.gang.take().or(gang.map(Shared::from)),
        };
        self.annotated = self.annotated || annotations.is_some();
        let node = self.spec.node_name.take().filter(|node| !node.is_empty());
        self.bound_to = node.map(Arc::from).or(self.bound_to.take());
        self.ready = self.ready || self.condition(READY).is_some_and(|condition| condition.status == "True");
        let read = [CONDITION_WITHIN_SHARE, CONDITION_PLACED, POD_SCHEDULED, DISRUPTION_TARGET];
        self.status.conditions.retain(|condition| read.contains(&condition.type_.as_str()));
        let spec = &mut *self.spec;
        if !spec.containers.is_empty() {
            spec.sum_requests(self.metadata.name.as_deref().unwrap_or_default());
        }
        let requests_gpus = self.requests_gpus();
        let owner = self.metadata.owner.take().filter(|_| requests_gpus);
        if let Some(owner) = &owner {
            self.controller_id = Some(ControllerId::of(&owner.uid));
            // Do not spread the pods of Jobs. A Job retries its pods, and the scheduler's default
            // spreading also excludes Jobs.
            if owner.kind == "Job" && self.replica_placement.is_none() {
                self.replica_placement = Some(ReplicaPlacement::Pack);
            }
        }
        if self.bound_to.is_some() || !requests_gpus {
            let spec = &mut *self.spec;
            (spec.node_selector, spec.affinity, spec.tolerations) = (BTreeMap::new(), None, Vec::new());
            (spec.rules.affinity, spec.rules.spread, spec.volume_claims) = (Vec::new(), Vec::new(), Vec::new());
        } else {
            self.controller = owner.or(self.controller.take());
        }
    }

    /// Records that the pod is bound to a node, as the scheduler does.
    pub fn bind(&mut self, node: &str) {
        self.bound_to = Some(Arc::from(node));
    }

    /// Returns the UID of the pod.
    pub fn uid(&self) -> Option<String> {
        self.metadata.uid.as_deref().map(str::to_owned)
    }

    /// Returns whether the operator has released the pod, or the pod never waited at the gate.
    pub fn has_left_gate(&self) -> bool {
        self.node().is_some() || self.spec.scheduling_gates.is_empty()
    }

    /// Returns the resource version of the object.
    pub fn resource_version(&self) -> Option<String> {
        self.metadata.resource_version.clone()
    }

    /// Returns the name of the pod.
    pub fn name_any(&self) -> String {
        self.metadata.name.clone().unwrap_or_default()
    }

    /// Returns the namespace of the pod.
    pub fn namespace(&self) -> &str {
        self.metadata.namespace.as_deref().unwrap_or("default")
    }

    /// Returns the labels of the pod.
    pub fn labels(&self) -> &BTreeMap<String, String> {
        self.metadata.labels.as_deref().unwrap_or(NO_LABELS)
    }

    /// Returns whether the condition `PodScheduled` has the reason `Unschedulable`. The scheduler
    /// writes this reason for a released pod that it could not bind. The operator writes this
    /// reason for a gated pod that an additional node could serve.
    pub fn is_reported_unschedulable(&self) -> bool {
        let reported = |condition: &PodCondition| condition.status == "False" && condition.reason == "Unschedulable";
        self.condition(POD_SCHEDULED).is_some_and(reported)
    }

    /// Returns the pod's condition of this type.
    pub fn condition(&self, type_: &str) -> Option<&PodCondition> {
        self.status.conditions.iter().find(|condition| condition.type_ == type_)
    }
}

impl PodSpec {
    /// Sums the requests of the pod with this name, and drops the summed fields.
    fn sum_requests(&mut self, pod: &str) {
        self.requests = requests(self);
        self.device_requests = device_requests(self);
        self.rules = take_rules(self);
        self.volume_claims = volume_claims(self, pod);
        let too_many_claims = self.volume_claims.len() > MAX_VOLUME_CLAIMS;
        if too_many_claims {
            self.volume_claims = Vec::new();
        }
        self.particular = !self.resource_claims.is_empty() || too_many_claims;
        (self.containers, self.init_containers, self.overhead) = (Vec::new(), Vec::new(), BTreeMap::new());
        (self.volumes, self.topology_spread_constraints) = (Vec::new(), Vec::new());
        (self.resources, self.resource_claims) = (None, Vec::new());
    }
}

/// Returns whether all units of a resource on a node are equivalent: whole GPUs and whole MIG
/// instances. Placement only counts these units, and does not choose devices for them.
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

/// Returns a limit whose units must be on one device. Returns `None` for other limits. The API
/// server refuses quantities that are not numbers.
fn mps_limit((resource, quantity): (&String, &Quantity)) -> Option<(String, u32)> {
    let placed = is_served(resource) && !is_interchangeable(resource);
    let units = quantity.count().filter(|_| placed)?;
    Some((resource.clone(), u32::try_from(units).unwrap_or(u32::MAX)))
}

/// Removes the constraints that depend on other pods from a spec and returns them.
fn take_rules(spec: &mut PodSpec) -> Rules {
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

/// Returns the names of the claims of a pod's volumes. The name of a claim that is created with the
/// pod begins with the pod's name.
fn volume_claims(spec: &PodSpec, pod: &str) -> Vec<String> {
    let claim = |volume: &Volume| match (&volume.persistent_volume_claim, &volume.ephemeral) {
        (Some(claim), _) => Some(claim.claim_name.clone()),
        (None, Some(_)) => Some(format!("{pod}-{}", volume.name)),
        (None, None) => None,
    };
    let claims: BTreeSet<String> = spec.volumes.iter().filter_map(claim).collect();
    claims.into_iter().collect()
}

/// Returns whether a pod runs or can still run.
pub(crate) fn is_living(pod: &PodObject) -> bool {
    // A pod that is deleted before it is bound never runs.
    !pod.has_ended() && (pod.node().is_some() || pod.metadata.deletion_timestamp.is_none())
}

/// Converts a pod for planning. Returns `None` if the pod has ended. Also returns `None` for a pod
/// without a node that requests no GPU resources, terminates, or may not be scheduled yet. Call
/// [`PodObject::trim`] first.
pub fn claimant(pod: &PodObject) -> Option<Claimant> {
    if pod.has_ended() {
        return None;
    }
    let released_to = || {
        // The pod has a reservation on one node. The pod counts as bound, so that the planner does
        // not repartition the reserved GPU.
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

/// Returns the name of a pod as `namespace/name`.
pub fn full_name(meta: &PodMeta) -> String {
    format!("{}/{}", meta.namespace.as_deref().unwrap_or("default"), meta.name.as_deref().unwrap_or_default())
}

/// Returns the sum of a pod's requests, as the scheduler computes it. The sum covers all containers
/// and sidecars, or the largest init container with the sidecars that start before it, whichever is
/// larger. Pod-level requests replace this sum. The result includes the overhead.
pub fn requests(spec: &PodSpec) -> BTreeMap<String, Quantity> {
    let mut containers = Sum::default();
    spec.containers.iter().for_each(|container| containers.add(&container.resources));
    let mut sidecars = Sum::default();
    let mut first = Sum::default();
    for container in &spec.init_containers {
        let mut concurrent = sidecars.clone();
        concurrent.add(&container.resources);
        first.raise_to(&concurrent);
        if container.restart_policy.as_deref() == Some("Always") {
            sidecars.add(&container.resources);
        }
    }
    containers.add_sum(&sidecars);
    containers.raise_to(&first);
    if let Some(pod) = &spec.resources {
        let mut whole = Sum::default();
        whole.add(pod);
        containers.replace(whole);
    }
    containers.add(&Resources { requests: spec.overhead.clone(), limits: BTreeMap::new() });
    containers.into_quantities()
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
    fn requests_are_summed_as_in_the_scheduler() {
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
        assert!(claimant(&pod).is_some(), "the pod's owner receives the reason");
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
        terminating.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
        assert_eq!(claimant(&terminating), None);
        terminating.bind("n1");
        assert!(claimant(&terminating).is_some(), "a terminating pod keeps its devices until it ends");
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
            "the containers reuse the init container's units and device"
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
        assert_eq!(claimant.gpu_requests().collect::<Vec<_>>(), [("nvidia.com/gpu", 1)]);
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
