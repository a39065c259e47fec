//! The fields of a pod that the operator reads, as the API server returns them.
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};

use cleave_plan::Quantity;
use cleave_plan::constraints::{PodAffinityTerm, Rules, SpreadConstraint};
use cleave_plan::ledger::DeviceRequest;
use cleave_plan::snapshot::{NodeSelectorTerm, Toleration};
use k8s_openapi::api::core::v1::Pod as CorePod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};

use crate::sums::Resources;

/// A field that the operator only checks for presence.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PresentField;

impl<'de> Deserialize<'de> for PresentField {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        IgnoredAny::deserialize(deserializer).map(|_| Self)
    }
}

/// A pod as the API server returns it, with only the fields that the operator reads.
#[derive(Debug, Clone, Default, Deserialize, Resource)]
#[resource(inherit = "CorePod")]
pub struct RawPod {
    /// Name, namespace, UID, labels, annotations and timestamps.
    pub metadata: ObjectMeta,
    /// Resource requests and constraints.
    #[serde(default)]
    pub spec: PodSpec,
    /// Phase and conditions.
    #[serde(default)]
    pub status: PodStatus,
}

/// The fields of a pod's spec that the operator reads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodSpec {
    /// Name of the node, once the pod is bound. `PodObject::trim` moves the name out of the spec,
    /// so that replicas have equal specs. See `PodObject::node`.
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
    /// `Never` if the pod does not preempt pods of lower priority.
    pub preemption_policy: Option<String>,
    /// Maximum time for the pod to terminate, in seconds.
    pub termination_grace_period_seconds: Option<i64>,
    /// Topology spread constraints.
    pub topology_spread_constraints: Vec<SpreadConstraint>,
    /// Volumes of the pod.
    pub volumes: Vec<Volume>,
    /// Claims of dynamic resource allocation. The operator only checks whether the pod has such
    /// claims.
    pub resource_claims: Vec<PresentField>,
    /// The group of the pod, in clusters that schedule groups (KEP-4671).
    pub scheduling_group: Option<SchedulingGroup>,
    /// The group of the pod in Kubernetes 1.35, before `schedulingGroup` replaced this field.
    pub workload_ref: Option<WorkloadRef>,
    /// Groups of units. The units of each group must be on one device. Set by `PodObject::trim`.
    /// Excludes interchangeable resources.
    #[serde(skip)]
    pub device_requests: Vec<DeviceRequest>,
    /// Whether the scheduler may refuse a node for a reason that the operator does not evaluate,
    /// such as a claim of dynamic resource allocation.
    #[serde(skip)]
    pub particular: bool,
    /// Constraints that depend on other pods. Set by `PodObject::trim`. For a bound pod, and for a
    /// pod without GPUs, contains only the constraints that exclude other pods.
    #[serde(skip)]
    pub rules: Rules,
    /// Names of the `PersistentVolumeClaim`s that the pod mounts. Kept only for pods with GPUs that
    /// are not bound.
    #[serde(skip)]
    pub volume_claims: Vec<String>,
    /// The pod's requests, summed as the scheduler does. Set by `PodObject::trim`.
    #[serde(skip)]
    pub requests: BTreeMap<String, Quantity>,
}

/// The fields of a pod's status that the operator reads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default)]
pub struct PodStatus {
    /// `Pending`, `Running`, `Succeeded` or `Failed`.
    pub phase: String,
    /// Conditions. After `PodObject::trim`, contains only the conditions of the operator and of the
    /// scheduler.
    pub conditions: Vec<PodCondition>,
    /// The node on which the scheduler preempts other pods for this pod.
    #[serde(rename = "nominatedNodeName")]
    pub nominated_node_name: Option<String>,
}

/// The fields of a pod's condition that the operator reads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Deserialize)]
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
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Deserialize)]
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
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodTerms {
    /// Required terms.
    pub required_during_scheduling_ignored_during_execution: Vec<PodAffinityTerm>,
}

/// The fields of a volume that may restrict the pod to some nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Volume {
    /// Name of the volume in the pod.
    pub name: String,
    /// The claim that the volume mounts.
    pub persistent_volume_claim: Option<VolumeClaim>,
    /// Set if Kubernetes creates the claim together with the pod.
    pub ephemeral: Option<PresentField>,
}

/// The claim that a volume mounts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeClaim {
    /// Name of the claim.
    pub claim_name: String,
}

/// A pod's affinity to nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeAffinity {
    /// Required terms.
    pub required_during_scheduling_ignored_during_execution: Option<NodeSelector>,
}

/// Terms. A node must match at least one of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeSelector {
    /// Terms of the selector.
    pub node_selector_terms: Vec<NodeSelectorTerm>,
}

/// The fields of a container that the operator reads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
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
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Lifecycle {
    /// Set if the container has a preStop hook.
    pub pre_stop: Option<PresentField>,
}

/// The fields of a container port that the operator reads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
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

/// The group of a pod that the scheduler places as a whole (KEP-4671).
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SchedulingGroup {
    /// Name of the `PodGroup`.
    pub pod_group_name: Option<String>,
}

/// The group of a pod in Kubernetes 1.35: one replica of a group of a `Workload`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct WorkloadRef {
    /// Name of the `Workload`.
    pub name: String,
    /// Name of the group in the `Workload`.
    pub pod_group: String,
    /// Key of the replica of the group. Empty if the group has one replica.
    pub pod_group_replica_key: String,
}

impl WorkloadRef {
    /// Returns the name of the group, which is unique in the namespace.
    pub fn group_name(&self) -> String {
        let parts = [&self.name, &self.pod_group, &self.pod_group_replica_key];
        let parts: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).map(String::as_str).collect();
        parts.join("/")
    }
}

/// Hashes only the fields that `PodObject::trim` keeps.
impl Hash for PodSpec {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.priority, &self.node_selector, &self.affinity, &self.tolerations).hash(state);
        (&self.scheduling_gates, &self.preemption_policy, self.termination_grace_period_seconds).hash(state);
        (&self.device_requests, self.particular, &self.rules).hash(state);
        (&self.volume_claims, &self.requests).hash(state);
    }
}

/// A scheduling gate.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default)]
pub struct Gate {
    /// Name of the gate.
    pub name: String,
}
