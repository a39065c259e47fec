//! Reads the state of the cluster as one value.
//!
//! Each watch drops the fields that the operator does not use before it stores an object:
//!
//! | object | stored fields |
//! |---|---|
//! | `SharingPolicy` | all except `managedFields` and annotations |
//! | `GpuNode` | all except `managedFields` and annotations of other writers |
//! | node | fields that the scheduler reads |
//! | agent pod | its node and its Ready condition |
//! | pod | fields of [`crate::pods::PodObject`] |
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use cleave_api::cordon::{Cordons, GpuTimes};
use cleave_api::gpunode::GpuStatus;
use cleave_api::names::{
    CLEARED_ANNOTATION, CORDON_ANNOTATION, FORGOTTEN_ANNOTATION, GPU_DEPLOY_LABEL_PREFIX, PAUSED_FOR_DRIVER_UPGRADE,
    PAUSED_FOR_MIG_CHANGE, QUIESCE_ANNOTATION,
};
use cleave_api::{GpuNode, GpuNodeSpec, GpuQuota, SharingPolicy};
use cleave_plan::Quantity;
use cleave_plan::constraints::LabelSelector;
use cleave_plan::snapshot::{NodeSelectorTerm, Taint};
use k8s_openapi::api::core::v1::{Namespace, Node as CoreNode, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::core::error_boundary::InvalidObject;
use kube::core::{DeserializeGuard, PartialObjectMeta};
use kube::runtime::reflector::Store;
use kube::runtime::reflector::store::WriterDropped;
use kube::{Resource, ResourceExt};
use serde::Deserialize;

use crate::pod_store::{self, PodStore};
use crate::pods::{self, Claimant, NodeSelector, PodObject};

/// Field selector of pods that have not ended. Ended pods use no devices, so the API server does
/// not need to send them.
pub(crate) const LIVING_PODS: &str = "status.phase!=Succeeded,status.phase!=Failed";

/// Stored `SharingPolicy`s, by name.
pub type PolicyStore = Store<DeserializeGuard<SharingPolicy>>;
/// Stored `GpuNode`s, by name.
pub type GpuNodeStore = Store<DeserializeGuard<GpuNode>>;
/// Stored nodes, by name.
pub type NodeStore = Store<NodeObject>;
/// Stored pods of the agents.
pub type AgentStore = Store<AgentPod>;
/// Stored `PersistentVolumeClaim`s.
pub type VolumeClaimStore = Store<VolumeClaimObject>;
/// Stored `PersistentVolume`s.
pub type VolumeStore = Store<VolumeObject>;
/// Stored `PodDisruptionBudget`s.
pub type BudgetStore = Store<BudgetObject>;
/// Labels of namespaces.
pub type NamespaceStore = Store<NamespaceObject>;
/// Stored `GpuQuota`s.
pub type QuotaStore = Store<DeserializeGuard<GpuQuota>>;

/// The metadata of a namespace.
pub type NamespaceObject = PartialObjectMeta<Namespace>;

/// The fields of a `PersistentVolumeClaim` that the operator reads.
#[derive(Debug, Clone, Default, Deserialize, Resource)]
#[resource(inherit = "PersistentVolumeClaim")]
pub struct VolumeClaimObject {
    /// Name and namespace of the claim.
    pub metadata: ObjectMeta,
    /// The bound volume.
    #[serde(default)]
    pub spec: VolumeClaimSpec,
}

/// The fields of a claim's spec that the operator reads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeClaimSpec {
    /// Name of the volume, once the claim is bound.
    pub volume_name: Option<String>,
}

/// The fields of a `PersistentVolume` that the operator reads.
#[derive(Debug, Clone, Default, Deserialize, Resource)]
#[resource(inherit = "PersistentVolume")]
pub struct VolumeObject {
    /// Name of the volume.
    pub metadata: ObjectMeta,
    /// The nodes that can mount the volume.
    #[serde(default)]
    pub spec: VolumeSpec,
}

/// The fields of a volume's spec that the operator reads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeSpec {
    /// The nodes that can mount the volume. `None` if all nodes can mount the volume.
    pub node_affinity: Option<VolumeNodeAffinity>,
}

/// Selects the nodes that can mount a volume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct VolumeNodeAffinity {
    /// The selector that a node must match.
    pub required: Option<NodeSelector>,
}

impl VolumeObject {
    /// Returns the terms of the selector. A node must match at least one term. Returns `None` if
    /// every node can mount the volume.
    pub fn required(&self) -> Option<&[NodeSelectorTerm]> {
        let required = self.spec.node_affinity.as_ref()?.required.as_ref()?;
        Some(&required.node_selector_terms)
    }
}

/// The fields of a `PodDisruptionBudget` that the operator reads.
#[derive(Debug, Clone, Default, Deserialize, Resource)]
#[resource(inherit = "PodDisruptionBudget")]
pub struct BudgetObject {
    /// Name and namespace of the budget.
    pub metadata: ObjectMeta,
    /// The pods that the budget protects.
    #[serde(default)]
    pub spec: BudgetSpec,
    /// The evictions that the budget allows.
    #[serde(default)]
    pub status: BudgetStatus,
}

/// The fields of a disruption budget's spec that the operator reads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BudgetSpec {
    /// Selects pods of the budget's namespace.
    pub selector: Option<LabelSelector>,
    /// `AlwaysAllow` if pods that are not ready can always be evicted.
    pub unhealthy_pod_eviction_policy: Option<String>,
}

/// The fields of a disruption budget's status that the operator reads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BudgetStatus {
    /// The generation of the budget that this status describes.
    pub observed_generation: i64,
    /// Number of evictions that are allowed now.
    pub disruptions_allowed: i32,
    /// Number of pods that are ready.
    pub current_healthy: i32,
    /// Minimum number of pods that must be ready.
    pub desired_healthy: i32,
    /// Pods whose eviction the API server accepted recently, each with the time of the eviction.
    pub disrupted_pods: BTreeMap<String, Time>,
}

/// The fields of a node that the operator reads.
#[derive(Debug, Clone, Default, Deserialize, Resource)]
#[resource(inherit = "CoreNode")]
pub struct NodeObject {
    /// Name, UID and labels of the node.
    pub metadata: ObjectMeta,
    /// Taints, and whether the node is cordoned.
    #[serde(default)]
    pub spec: NodeObjectSpec,
    /// The node's allocatable resources.
    #[serde(default)]
    pub status: NodeObjectStatus,
}

/// The fields of a node's spec that the operator reads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct NodeObjectSpec {
    /// Taints of the node.
    #[serde(default)]
    pub taints: Vec<Taint>,
    /// Whether the node is cordoned.
    #[serde(default)]
    pub unschedulable: bool,
}

/// The fields of a node's status that the operator reads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct NodeObjectStatus {
    /// Allocatable amount of each resource.
    #[serde(default)]
    pub allocatable: BTreeMap<String, Quantity>,
}

/// The fields of an agent's pod that the operator reads.
#[derive(Debug, Clone, Default, Deserialize, Resource)]
#[resource(inherit = "Pod")]
pub struct AgentPod {
    /// Name of the pod.
    pub metadata: ObjectMeta,
    /// The node that the pod is bound to.
    #[serde(default)]
    pub spec: AgentPodSpec,
    /// Whether the pod is ready.
    #[serde(default)]
    pub status: AgentPodStatus,
}

/// The fields of the spec of an agent's pod that the operator reads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentPodSpec {
    /// Name of the node, once the pod is bound.
    #[serde(default)]
    pub node_name: Option<String>,
}

/// The fields of the status of an agent's pod that the operator reads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct AgentPodStatus {
    /// Conditions of the pod.
    #[serde(default)]
    pub conditions: Vec<PodCondition>,
}

/// The fields of a pod's condition that the operator reads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct PodCondition {
    /// Type of the condition, such as `Ready`.
    #[serde(rename = "type", default)]
    pub type_: String,
    /// `True`, `False` or `Unknown`.
    #[serde(default)]
    pub status: String,
}

/// Returns whether two versions of an object are equal in the metadata that the operator reads,
/// apart from the resource version.
fn has_equal_metadata(a: &ObjectMeta, b: &ObjectMeta) -> bool {
    let read = |meta: &ObjectMeta| (meta.generation, meta.deletion_timestamp.clone());
    (&a.uid, &a.labels, &a.annotations, &a.owner_references) == (&b.uid, &b.labels, &b.annotations, &b.owner_references)
        && read(a) == read(b)
}

impl NodeObject {
    /// Returns whether both versions are equal in everything that the operator reads.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        has_equal_metadata(&self.metadata, &other.metadata) && self.spec == other.spec && self.status == other.status
    }
}

impl AgentPod {
    /// Returns whether both versions are equal in everything that the operator reads.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        has_equal_metadata(&self.metadata, &other.metadata) && self.spec == other.spec && self.status == other.status
    }
}

impl VolumeClaimObject {
    /// Returns whether both versions are equal in everything that the operator reads.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        has_equal_metadata(&self.metadata, &other.metadata) && self.spec == other.spec
    }
}

impl VolumeObject {
    /// Returns whether both versions are equal in everything that the operator reads.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        has_equal_metadata(&self.metadata, &other.metadata) && self.spec == other.spec
    }
}

impl BudgetObject {
    /// Returns whether both versions are equal in everything that the operator reads.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        has_equal_metadata(&self.metadata, &other.metadata) && self.spec == other.spec && self.status == other.status
    }
}

/// The state of the cluster at one moment.
#[derive(Debug, Clone, Default)]
pub struct Observed {
    /// Policies by name. Each malformed policy is an error and does not affect other policies.
    pub policies: BTreeMap<String, Result<SharingPolicy, InvalidObject>>,
    /// Nodes by name.
    pub nodes: BTreeMap<String, Node>,
    /// Pods that have not ended, in order of creation: pending pods and pods on a node with a
    /// `GpuNode`.
    pub pods: Vec<Claimant>,
}

/// A node of the cluster.
#[derive(Debug, Clone, Default)]
pub struct Node {
    /// UID of the node, for the owner reference of its `GpuNode`.
    pub uid: String,
    /// The node object's `resourceVersion`.
    pub version: String,
    /// Labels of the node.
    pub labels: BTreeMap<String, String>,
    /// Taints of the node.
    pub taints: Vec<Taint>,
    /// Whether the node is cordoned.
    pub unschedulable: bool,
    /// Allocatable amount of each resource.
    pub allocatable: BTreeMap<String, Quantity>,
    /// The node's agent. `None` if no agent runs on the node.
    pub agent: Option<Agent>,
    /// The node's `GpuNode`, if one exists. Shared with the watch's store, because most passes do
    /// not change it.
    pub gpu_node: Option<Arc<DeserializeGuard<GpuNode>>>,
}

/// A node's agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agent {
    /// Whether the kubelet reports the agent's pod as ready.
    pub ready: bool,
}

impl Node {
    /// Returns the node's GPUs as the agent last reported them. Returns `None` if no agent has
    /// reported.
    pub fn reported(&self) -> Option<&[GpuStatus]> {
        let status = self.object()?.status.as_ref()?;
        // Another writer may create the status first. Only the agent sets these fields.
        (!status.agent_version.is_empty() || !status.gpus.is_empty()).then_some(status.gpus.as_slice())
    }

    /// Returns the node's `GpuNode`. Returns `None` if the object does not exist or is malformed.
    pub fn object(&self) -> Option<&GpuNode> {
        self.gpu_node.as_ref().and_then(|object| object.0.as_ref().ok())
    }

    /// Returns the GPUs that an administrator has cordoned.
    pub fn cordons(&self) -> Cordons {
        Cordons::read(self.annotation(CORDON_ANNOTATION))
    }

    /// Returns whether a GPU must be quiesced. A GPU must be quiesced if an administrator requests
    /// it, or if the GPU Operator is about to replace the node's driver or to change MIG mode.
    pub fn is_quiesced(&self, uuid: &str) -> bool {
        let paused = |(name, value): (&String, &String)| {
            name.starts_with(GPU_DEPLOY_LABEL_PREFIX)
                && matches!(value.as_str(), PAUSED_FOR_DRIVER_UPGRADE | PAUSED_FOR_MIG_CHANGE)
        };
        self.labels.iter().any(paused) || Cordons::read(self.annotation(QUIESCE_ANNOTATION)).0.contains_key(uuid)
    }

    /// Returns the GPUs whose recorded faults an administrator has cleared.
    pub fn cleared_faults(&self) -> GpuTimes {
        GpuTimes::read(self.annotation(CLEARED_ANNOTATION))
    }

    /// Returns the missing GPUs that an administrator has forgotten.
    pub fn forgotten_gpus(&self) -> GpuTimes {
        GpuTimes::read(self.annotation(FORGOTTEN_ANNOTATION))
    }

    fn annotation(&self, name: &str) -> Option<&String> {
        self.object()?.metadata.annotations.as_ref()?.get(name)
    }

    /// Returns whether the node has a `GpuNode`, malformed or not.
    pub fn has_gpu_node(&self) -> bool {
        self.gpu_node.is_some()
    }

    /// Returns the desired state in the node's `GpuNode`. Returns an empty desired state if no
    /// `GpuNode` exists.
    ///
    /// # Errors
    /// Returns an error if the object is malformed.
    pub fn spec(&self) -> Result<GpuNodeSpec, &InvalidObject> {
        match self.gpu_node.as_ref().map(|object| &object.0) {
            None => Ok(GpuNodeSpec::default()),
            Some(Ok(object)) => Ok(object.spec.clone()),
            Some(Err(invalid)) => Err(invalid),
        }
    }
}

/// A watch stopped before it listed its objects.
#[derive(Debug, thiserror::Error)]
pub enum ListError {
    /// The watch of pods stopped.
    #[error(transparent)]
    Pods(#[from] pod_store::Stopped),
    /// Another watch stopped.
    #[error(transparent)]
    Other(#[from] WriterDropped),
}

/// The operator's copies of objects from the API server. Each watch updates one store.
#[derive(Clone)]
pub struct Stores {
    /// Stored `SharingPolicy`s.
    pub policies: PolicyStore,
    /// Stored `GpuNode`s.
    pub gpu_nodes: GpuNodeStore,
    /// Stored nodes.
    pub nodes: NodeStore,
    /// Stored pods of the agents.
    pub agents: AgentStore,
    /// Stored pods that have not ended.
    pub pods: PodStore,
    /// Stored `PersistentVolumeClaim`s.
    pub volume_claims: VolumeClaimStore,
    /// Stored `PersistentVolume`s.
    pub volumes: VolumeStore,
    /// Stored `PodDisruptionBudget`s.
    pub budgets: BudgetStore,
    /// Labels of namespaces.
    pub namespaces: NamespaceStore,
    /// Stored `GpuQuota`s. Empty if the cluster does not have the CRD.
    pub quotas: QuotaStore,
    /// Whether a watch found that the cluster does not have the CRD `GpuQuota`. Never cleared.
    pub has_no_quotas: Arc<AtomicBool>,
}

impl Stores {
    /// Waits until each watch has listed its objects once. Does not wait for quotas, because the
    /// cluster may not have the CRD if an older chart installed the CRDs.
    ///
    /// # Errors
    /// Returns an error if a watch stops.
    pub async fn wait_until_ready(&self) -> Result<(), ListError> {
        let Self { policies, gpu_nodes, nodes, agents, pods, volume_claims, volumes, budgets, namespaces, .. } = self;
        policies.wait_until_ready().await?;
        gpu_nodes.wait_until_ready().await?;
        nodes.wait_until_ready().await?;
        agents.wait_until_ready().await?;
        volume_claims.wait_until_ready().await?;
        volumes.wait_until_ready().await?;
        budgets.wait_until_ready().await?;
        namespaces.wait_until_ready().await?;
        Ok(pods.wait_until_ready().await?)
    }

    /// Converts the stored objects to one [`Observed`], without pods.
    pub fn observe(&self) -> Observed {
        let mut observed = Observed::default();
        self.nodes.state().iter().for_each(|node| observed.add_node(node));
        self.agents.state().iter().for_each(|pod| observed.add_agent(pod));
        self.gpu_nodes.state().into_iter().for_each(|object| observed.add_complete_gpu_node(object));
        self.policies.state().iter().for_each(|policy| observed.add_policy(policy));
        observed
    }

    /// Adds the stored pods to an [`Observed`]. This function needs a lot of time and memory,
    /// because a cluster has many pods.
    pub fn observe_pods(&self, observed: &mut Observed) {
        observed.set_pods(self.pods.state().iter().map(AsRef::as_ref));
    }
}

impl Observed {
    /// Adds a node. Call this function before you add the node's agent, `GpuNode` or pods.
    pub fn add_node(&mut self, node: &NodeObject) {
        let found = Node {
            uid: node.uid().unwrap_or_default(),
            version: node.resource_version().unwrap_or_default(),
            labels: node.metadata.labels.clone().unwrap_or_default(),
            taints: node.spec.taints.clone(),
            unschedulable: node.spec.unschedulable,
            allocatable: node.status.allocatable.clone(),
            agent: None,
            gpu_node: None,
        };
        self.nodes.insert(node.name_any(), found);
    }

    /// Adds an agent's pod.
    pub fn add_agent(&mut self, pod: &AgentPod) {
        if let Some(node) = pod.spec.node_name.as_ref().and_then(|name| self.nodes.get_mut(name)) {
            let ready = is_ready(pod) || node.agent.is_some_and(|agent| agent.ready);
            node.agent = Some(Agent { ready });
        }
    }

    /// Adds a node's `GpuNode` as the API server returns it.
    pub fn add_gpu_node(&mut self, object: &DeserializeGuard<GpuNode>) {
        let mut object = object.clone();
        copy_model_fields(&mut object);
        self.add_complete_gpu_node(Arc::new(object));
    }

    /// Adds a node's `GpuNode` whose status is already [complete](copy_model_fields).
    fn add_complete_gpu_node(&mut self, object: Arc<DeserializeGuard<GpuNode>>) {
        if let Some(node) = self.nodes.get_mut(&object.name_any()) {
            node.gpu_node = Some(object);
        }
    }

    /// Adds a policy. A policy that is being deleted is ignored.
    pub fn add_policy(&mut self, policy: &DeserializeGuard<SharingPolicy>) {
        if policy.meta().deletion_timestamp.is_none() {
            self.policies.insert(policy.name_any(), policy.0.clone());
        }
    }

    /// Replaces all pods.
    pub fn set_pods<'a>(&mut self, objects: impl Iterator<Item = &'a PodObject>) {
        let gpu_node = |name: &str| self.nodes.get(name).is_some_and(Node::has_gpu_node);
        // Plans do not need pods on nodes without GPUs.
        let found = objects.filter(|pod| pod.node().is_none_or(gpu_node)).filter_map(pods::claimant);
        self.pods = found.collect();
        self.pods.sort_by(|a, b| (&a.created, &a.pod.name).cmp(&(&b.created, &b.pod.name)));
    }
}

/// Copies the fields that the status contains once for each GPU model to the GPUs of that model.
pub(crate) fn copy_model_fields(object: &mut DeserializeGuard<GpuNode>) {
    if let Ok(GpuNode { status: Some(status), .. }) = &mut object.0 {
        *status = std::mem::take(status).move_profiles_to_gpus();
    }
}

/// Returns whether an agent's pod is ready and not terminating.
pub(crate) fn is_ready(pod: &AgentPod) -> bool {
    pod.metadata.deletion_timestamp.is_none()
        && pod.status.conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}
