//! What is planned for: the nodes, GPUs and slices as observed, and the pods that wait.
//!
//! The serde format is that of `cleave plan --snapshot` (`docs/explanation/planning.md`). Unknown
//! fields are ignored, fields left out have the values that change nothing. A part that makes no
//! sense costs that part alone: it is left out of the plan, with a reason.
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::device::Mode;
use crate::mig::Profile;
use crate::quantity::Quantity;

/// A cluster at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Snapshot {
    /// Nodes with GPUs. Their order does not matter.
    pub nodes: Vec<Node>,
    /// Pods that wait for a node, in order of arrival.
    pub pods: Vec<Pod>,
}

/// One node.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Node {
    /// Name.
    pub name: String,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Taints.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub taints: Vec<Taint>,
    /// Cordoned.
    #[serde(skip_serializing_if = "is_false")]
    pub unschedulable: bool,
    /// What pods may use of each resource. CPU, memory, ephemeral storage and pods are unlimited
    /// where they are left out; of any other resource there is none.
    pub allocatable: BTreeMap<String, Quantity>,
    /// What pods that are bound to the node use.
    pub requested: BTreeMap<String, Quantity>,
    /// GPUs. Their order does not matter.
    pub gpus: Vec<Gpu>,
    /// Why the node takes no part in the plan: unknown, silent, on its way out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub left_out: Option<String>,
}

/// One GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Gpu {
    /// NVML's UUID.
    pub uuid: String,
    /// NVML's index.
    pub index: u32,
    /// Product name.
    pub model: String,
    /// Total memory.
    pub memory: Quantity,
    /// What the policy allows this GPU.
    pub mode: Mode,
    /// What it is cut into now. An empty list is a whole GPU.
    pub slices: Vec<Slice>,
    /// MIG profiles and places as NVML reports them; those known of the model where left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profiles: Option<Vec<Profile>>,
    /// MPS shares of the GPU, 1 to 48; none can be made where left out and the
    /// [`Policy`](crate::Policy) says nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub units: Option<u32>,
    /// Whether sized slices (`nvidia.com/gpu-10gb`) are cut as pods want them; yes where left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sizes: Option<bool>,
    /// Time-sliced replicas of the GPU; none can be made where left out and the
    /// [`Policy`](crate::Policy) says nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u32>,
    /// Another name for the shares or replicas.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_name: Option<String>,
    /// Sharing inside each MIG instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig_sharing: Option<MigSharing>,
    /// The slices are as the policy lays them out, and are not cut anew.
    #[serde(skip_serializing_if = "is_false")]
    pub fixed: bool,
    /// Why the GPU takes no part in the plan: lost, unhealthy, in a mode change.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub left_out: Option<String>,
}

/// Sharing inside MIG instances.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MigSharing {
    /// MPS shares or time-sliced replicas of each instance, 1 to 48.
    pub units: u32,
    /// Their resource; `nvidia.com/mig-<profile>.shared` where left out. Instances are cut for the
    /// latter only: a name that does not say which profile cannot say what to cut.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_name: Option<String>,
}

/// One or more equal slices of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Slice {
    /// First memory slice, for MIG instances and what is inside them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<u32>,
    /// The extended resource that it is served as.
    pub resource: String,
    /// A running pod holds it.
    #[serde(default)]
    pub in_use: bool,
    /// How many.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub count: u32,
    /// Profile of the MIG instance that the share is of, where the resource's name does not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// The pod that holds it, for the messages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
}

const fn one() -> u32 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
const fn is_one(count: &u32) -> bool {
    *count == 1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
const fn is_false(value: &bool) -> bool {
    !*value
}

/// A pod that waits.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Pod {
    /// Name, unique in the snapshot: `namespace/name` in a cluster.
    pub name: String,
    /// Priority; higher goes first.
    pub priority: i32,
    /// What the pod takes of a node: containers, init containers and overhead together, as the
    /// scheduler adds them up.
    pub requests: BTreeMap<String, Quantity>,
    /// Labels that the node must have.
    pub node_selector: BTreeMap<String, String>,
    /// Required node affinity: one of these terms must match. Empty is no requirement.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub affinity: Vec<NodeSelectorTerm>,
    /// Taints that it tolerates.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tolerations: Vec<Toleration>,
    /// The node that the last plan gave it. It keeps that where no plan is better, so that plans do
    /// not go back and forth between ways that are equally good.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub planned_node: Option<String>,
}

/// All of these must match; a term without any matches no node.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeSelectorTerm {
    /// On labels.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub match_expressions: Vec<Requirement>,
    /// On fields, of which Kubernetes has one: `metadata.name`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub match_fields: Vec<Requirement>,
}

/// One requirement on a label or field.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Requirement {
    /// The label or field.
    pub key: String,
    /// How it must be.
    pub operator: Operator,
    /// Compared with these.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub values: Vec<String>,
}

/// How a label must be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Operator {
    /// One of the values.
    #[default]
    In,
    /// None of the values, or no such label.
    NotIn,
    /// There.
    Exists,
    /// Not there.
    DoesNotExist,
    /// A greater integer.
    Gt,
    /// A smaller integer.
    Lt,
    /// One that this version does not know: nothing matches it.
    #[serde(other)]
    Unknown,
}

/// A taint of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Taint {
    /// Key.
    pub key: String,
    /// Value.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub value: String,
    /// `NoSchedule`, `NoExecute` or `PreferNoSchedule`.
    pub effect: String,
}

/// What a pod tolerates.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Toleration {
    /// Key; every key when empty, with `Exists`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub key: String,
    /// `Equal`, which is also what an empty text means, or `Exists`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub operator: String,
    /// Value, for `Equal`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub value: String,
    /// Effect; every effect when empty.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub effect: String,
}
