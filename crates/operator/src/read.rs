//! What the cluster says, as one value.
//!
//! Five watches, each trimmed to what is used before it is kept: policies and `GpuNode`s whole (but
//! never their `managedFields`), of nodes what the scheduler looks at, of the agents' pods the node
//! and the Ready condition, and pods as [`crate::pods`] keeps them.
use std::collections::BTreeMap;
use std::sync::Arc;

use cleave_api::cordon::{Cleared, Cordons};
use cleave_api::gpunode::GpuStatus;
use cleave_api::names::{CLEARED_ANNOTATION, CORDON_ANNOTATION};
use cleave_api::{GpuNode, GpuNodeSpec, SharingPolicy};
use cleave_plan::Quantity;
use cleave_plan::snapshot::{NodeSelectorTerm, Taint};
use k8s_openapi::api::core::v1::{Namespace, Node as CoreNode, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::error_boundary::InvalidObject;
use kube::core::{DeserializeGuard, PartialObjectMeta};
use kube::runtime::reflector::Store;
use kube::runtime::reflector::store::WriterDropped;
use kube::{Resource, ResourceExt};
use serde::Deserialize;

use crate::pods::{self, Claimant, NodeSelector, PodObject};

/// Policies, by name.
pub type PolicyStore = Store<DeserializeGuard<SharingPolicy>>;
/// `GpuNode`s, by name.
pub type GpuNodeStore = Store<DeserializeGuard<GpuNode>>;
/// Nodes.
pub type NodeStore = Store<NodeObject>;
/// The agents' pods.
pub type AgentStore = Store<AgentPod>;
/// All pods that have not ended.
pub type PodStore = Store<PodObject>;
/// Claims of volumes.
pub type VolumeClaimStore = Store<VolumeClaimObject>;
/// Volumes.
pub type VolumeStore = Store<VolumeObject>;
/// Namespaces.
pub type NamespaceStore = Store<NamespaceObject>;

/// What is kept of a namespace: its labels.
pub type NamespaceObject = PartialObjectMeta<Namespace>;

/// What is kept of a claim of a volume.
#[derive(Debug, Clone, Default, Deserialize, Resource)]
#[resource(inherit = "PersistentVolumeClaim")]
pub struct VolumeClaimObject {
    /// Its name and namespace.
    pub metadata: ObjectMeta,
    /// Its volume.
    #[serde(default)]
    pub spec: VolumeClaimSpec,
}

/// What is kept of a claim's spec.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeClaimSpec {
    /// The volume, once it is bound to one.
    pub volume_name: Option<String>,
}

/// What is kept of a volume.
#[derive(Debug, Clone, Default, Deserialize, Resource)]
#[resource(inherit = "PersistentVolume")]
pub struct VolumeObject {
    /// Its name.
    pub metadata: ObjectMeta,
    /// Where it can be mounted.
    #[serde(default)]
    pub spec: VolumeSpec,
}

/// What is kept of a volume's spec.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeSpec {
    /// The nodes that can mount it; none where all can.
    pub node_affinity: Option<VolumeNodeAffinity>,
}

/// Which nodes can mount a volume.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct VolumeNodeAffinity {
    /// What must hold of the node.
    pub required: Option<NodeSelector>,
}

impl VolumeObject {
    /// The node selector terms of which a node must match one; none where every node can mount it.
    pub fn required(&self) -> Option<&[NodeSelectorTerm]> {
        let required = self.spec.node_affinity.as_ref()?.required.as_ref()?;
        Some(&required.node_selector_terms)
    }
}

/// What is kept of a node.
#[derive(Debug, Clone, Default, Deserialize, Resource)]
#[resource(inherit = "CoreNode")]
pub struct NodeObject {
    /// Name, UID, labels.
    pub metadata: ObjectMeta,
    /// What keeps pods away.
    #[serde(default)]
    pub spec: NodeObjectSpec,
    /// What pods may use.
    #[serde(default)]
    pub status: NodeObjectStatus,
}

/// What is kept of a node's spec.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct NodeObjectSpec {
    /// Taints.
    #[serde(default)]
    pub taints: Vec<Taint>,
    /// Cordoned.
    #[serde(default)]
    pub unschedulable: bool,
}

/// What is kept of a node's status.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct NodeObjectStatus {
    /// What pods may use of each resource.
    #[serde(default)]
    pub allocatable: BTreeMap<String, Quantity>,
}

/// What is kept of an agent's pod.
#[derive(Debug, Clone, Default, Deserialize, Resource)]
#[resource(inherit = "Pod")]
pub struct AgentPod {
    /// Its name.
    pub metadata: ObjectMeta,
    /// Where it runs.
    #[serde(default)]
    pub spec: AgentPodSpec,
    /// Whether it is ready.
    #[serde(default)]
    pub status: AgentPodStatus,
}

/// What is kept of an agent's pod's spec.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentPodSpec {
    /// The node, once it is bound.
    #[serde(default)]
    pub node_name: Option<String>,
}

/// What is kept of an agent's pod's status.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct AgentPodStatus {
    /// Its conditions.
    #[serde(default)]
    pub conditions: Vec<PodCondition>,
}

/// What is kept of a pod's condition.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct PodCondition {
    /// Its type.
    #[serde(rename = "type", default)]
    pub type_: String,
    /// True, False or Unknown.
    #[serde(default)]
    pub status: String,
}

/// The cluster at one moment.
#[derive(Debug, Clone, Default)]
pub struct Observed {
    /// Policies by name; one that is not what the definition says is an error here and stops
    /// nobody.
    pub policies: BTreeMap<String, Result<SharingPolicy, InvalidObject>>,
    /// Nodes by name.
    pub nodes: BTreeMap<String, Node>,
    /// Pods that have not ended: those that wait, in order of arrival, and those that are on a
    /// node, by name.
    pub pods: Vec<Claimant>,
}

/// A node of the cluster.
#[derive(Debug, Clone, Default)]
pub struct Node {
    /// UID, for the owner reference of its `GpuNode`.
    pub uid: String,
    /// The version of the object that this is of.
    pub version: String,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Taints.
    pub taints: Vec<Taint>,
    /// Cordoned.
    pub unschedulable: bool,
    /// What pods may use of each resource.
    pub allocatable: BTreeMap<String, Quantity>,
    /// Its agent's pod, if there is one.
    pub agent: Option<Agent>,
    /// Its `GpuNode`, if there is one; shared with the watch's store, since most passes change
    /// none.
    pub gpu_node: Option<Arc<DeserializeGuard<GpuNode>>>,
}

/// A node's agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agent {
    /// The kubelet says that it is ready.
    pub ready: bool,
}

impl Node {
    /// Its GPUs as its agent last reported them; none where no agent has.
    pub fn reported(&self) -> Option<&[GpuStatus]> {
        let status = self.object()?.status.as_ref()?;
        // Whoever writes a status first, the agent fills this in with its GPUs.
        (!status.agent_version.is_empty() || !status.gpus.is_empty()).then_some(status.gpus.as_slice())
    }

    /// Its `GpuNode`, where that is what the definition says.
    pub fn object(&self) -> Option<&GpuNode> {
        self.gpu_node.as_ref().and_then(|object| object.0.as_ref().ok())
    }

    /// Its GPUs that an administrator has cordoned.
    pub fn cordons(&self) -> Cordons {
        Cordons::read(self.annotation(CORDON_ANNOTATION))
    }

    /// Its GPUs of which an administrator says that what was wrong is over.
    pub fn cleared(&self) -> Cleared {
        Cleared::read(self.annotation(CLEARED_ANNOTATION))
    }

    fn annotation(&self, name: &str) -> Option<&String> {
        self.object()?.metadata.annotations.as_ref()?.get(name)
    }

    /// Whether there is a `GpuNode`, malformed or not.
    pub fn has_object(&self) -> bool {
        self.gpu_node.is_some()
    }

    /// What its `GpuNode` says that it shall be; nothing where there is no object yet, and an error
    /// where that is malformed.
    pub fn spec(&self) -> Result<GpuNodeSpec, &InvalidObject> {
        match self.gpu_node.as_ref().map(|object| &object.0) {
            None => Ok(GpuNodeSpec::default()),
            Some(Ok(object)) => Ok(object.spec.clone()),
            Some(Err(invalid)) => Err(invalid),
        }
    }
}

/// The stores that the watches fill.
#[derive(Clone)]
pub struct Stores {
    /// Policies.
    pub policies: PolicyStore,
    /// `GpuNode`s.
    pub gpu_nodes: GpuNodeStore,
    /// Nodes.
    pub nodes: NodeStore,
    /// Agents.
    pub agents: AgentStore,
    /// Pods.
    pub pods: PodStore,
    /// Claims of volumes.
    pub volume_claims: VolumeClaimStore,
    /// Volumes.
    pub volumes: VolumeStore,
    /// Namespaces.
    pub namespaces: NamespaceStore,
}

impl Stores {
    /// Waits until each watch has listed all of its objects once.
    ///
    /// # Errors
    /// A watch has ended.
    pub async fn wait_until_ready(&self) -> Result<(), WriterDropped> {
        let Self { policies, gpu_nodes, nodes, agents, pods, volume_claims, volumes, namespaces } = self;
        policies.wait_until_ready().await?;
        gpu_nodes.wait_until_ready().await?;
        nodes.wait_until_ready().await?;
        agents.wait_until_ready().await?;
        volume_claims.wait_until_ready().await?;
        volumes.wait_until_ready().await?;
        namespaces.wait_until_ready().await?;
        pods.wait_until_ready().await
    }

    /// The cluster as the watches last told it.
    pub fn observe(&self) -> Observed {
        let mut observed = Observed::default();
        self.nodes.state().iter().for_each(|node| observed.add_node(node));
        self.agents.state().iter().for_each(|pod| observed.add_agent(pod));
        self.gpu_nodes.state().into_iter().for_each(|object| observed.share_gpu_node(object));
        self.policies.state().iter().for_each(|policy| observed.add_policy(policy));
        observed.set_pods(self.pods.state().iter().map(AsRef::as_ref));
        observed
    }
}

impl Observed {
    /// One node; before what is on it.
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

    /// One agent's pod.
    pub fn add_agent(&mut self, pod: &AgentPod) {
        if let Some(node) = pod.spec.node_name.as_ref().and_then(|name| self.nodes.get_mut(name)) {
            let ready = is_ready(pod) || node.agent.is_some_and(|agent| agent.ready);
            node.agent = Some(Agent { ready });
        }
    }

    /// One node's `GpuNode`, as the API server tells it.
    pub fn add_gpu_node(&mut self, object: &DeserializeGuard<GpuNode>) {
        let mut object = object.clone();
        complete(&mut object);
        self.share_gpu_node(Arc::new(object));
    }

    /// One node's `GpuNode`, [complete].
    fn share_gpu_node(&mut self, object: Arc<DeserializeGuard<GpuNode>>) {
        if let Some(node) = self.nodes.get_mut(&object.name_any()) {
            node.gpu_node = Some(object);
        }
    }

    /// One policy; one that is being deleted is none.
    pub fn add_policy(&mut self, policy: &DeserializeGuard<SharingPolicy>) {
        if policy.meta().deletion_timestamp.is_none() {
            self.policies.insert(policy.name_any(), policy.0.clone());
        }
    }

    /// All pods.
    pub fn set_pods<'a>(&mut self, objects: impl Iterator<Item = &'a PodObject>) {
        let gpu_node = |name: &str| self.nodes.get(name).is_some_and(Node::has_object);
        // A pod on a node without GPUs is nobody's matter here.
        let found = objects.filter(|pod| pod.node().is_none_or(gpu_node)).filter_map(pods::claimant);
        self.pods = found.collect();
        self.pods.sort_by(|a, b| (&a.created, &a.pod.name).cmp(&(&b.created, &b.pod.name)));
    }
}

/// Makes each GPU of a `GpuNode` complete: what its status tells once for all GPUs of a model is
/// told of each.
pub(crate) fn complete(object: &mut DeserializeGuard<GpuNode>) {
    if let Ok(GpuNode { status: Some(status), .. }) = &mut object.0 {
        *status = std::mem::take(status).complete();
    }
}

/// Whether an agent's pod is ready and staying.
pub(crate) fn is_ready(pod: &AgentPod) -> bool {
    pod.metadata.deletion_timestamp.is_none()
        && pod.status.conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}
