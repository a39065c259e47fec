//! The input of planning: the observed nodes, GPUs and slices, and the pending pods.
//!
//! The serde format is the format of `cleave plan --snapshot` (`docs/explanation/planning.md`).
//! Unknown fields are ignored. Omitted fields have neutral defaults. An invalid part does not make
//! the snapshot unreadable: only this part is excluded from the plan, with a reason.
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::device::Mode;
use crate::mig::Profile;
use crate::quantity::Quantity;

/// A cluster at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Snapshot {
    /// Nodes with GPUs, in any order.
    pub nodes: Vec<Node>,
    /// Pending pods, in order of arrival.
    pub pods: Vec<Pod>,
}

/// A node of the cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Node {
    /// Name of the node.
    pub name: String,
    /// Labels of the node.
    pub labels: BTreeMap<String, String>,
    /// Taints of the node.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub taints: Vec<Taint>,
    /// Whether the node is cordoned.
    #[serde(skip_serializing_if = "is_false")]
    pub unschedulable: bool,
    /// Allocatable amount of each resource. CPU, memory, ephemeral storage and pods are unlimited
    /// if they are omitted. Any other omitted resource counts as 0.
    pub allocatable: BTreeMap<String, Quantity>,
    /// Amounts that pods bound to the node request.
    pub requested: BTreeMap<String, Quantity>,
    /// GPUs in any order.
    pub gpus: Vec<Gpu>,
    /// Why the node is excluded from the plan, such as unreachable or terminating.
    #[serde(rename = "leftOut", skip_serializing_if = "Option::is_none")]
    pub exclusion: Option<String>,
}

/// A GPU of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Gpu {
    /// UUID, as NVML reports it.
    pub uuid: String,
    /// NVML index.
    pub index: u32,
    /// Product name.
    pub model: String,
    /// Total memory.
    pub memory: Quantity,
    /// Sharing mode that the policy allows.
    pub mode: Mode,
    /// Current slices. An empty list means that the GPU is whole.
    pub slices: Vec<SliceGroup>,
    /// MIG profiles and placements as NVML reports them. If the profiles are omitted, the planner
    /// uses the built-in profiles of the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profiles: Option<Vec<Profile>>,
    /// Number of MPS shares of the GPU, 1 to 48. If omitted, [`Policy`](crate::Policy) decides.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub units: Option<u32>,
    /// Whether sized slices (`nvidia.com/gpu-10gb`) are created when pods request them. True if
    /// omitted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sizes: Option<bool>,
    /// Number of time-sliced replicas of the GPU. If omitted, [`Policy`](crate::Policy) decides.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u32>,
    /// Name of the resource of the shares or replicas, if the name is not the default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_name: Option<String>,
    /// Sharing inside each MIG instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig_sharing: Option<MigSharing>,
    /// Whether the policy sets the slices, so that the GPU is never repartitioned.
    #[serde(skip_serializing_if = "is_false")]
    pub fixed: bool,
    /// Why the GPU is excluded from the plan, such as lost, unhealthy or changing its mode.
    #[serde(rename = "leftOut", skip_serializing_if = "Option::is_none")]
    pub exclusion: Option<String>,
}

/// Sharing inside MIG instances.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MigSharing {
    /// Number of MPS shares or time-sliced replicas of each instance, 1 to 48.
    pub units: u32,
    /// Resource of the shares or replicas. If omitted, the resource is
    /// `nvidia.com/mig-<profile>.shared`, and instances are created as pods request them. Any other
    /// name does not identify a profile, so no instance is created for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_name: Option<String>,
}

/// One or more equal slices of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SliceGroup {
    /// First memory slice, for MIG instances and shares of MIG instances.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<u32>,
    /// The extended resource of the slices.
    pub resource: String,
    /// Whether a running pod uses the slices.
    #[serde(default)]
    pub in_use: bool,
    /// Number of slices.
    #[serde(default = "default_count", skip_serializing_if = "is_one")]
    pub count: u32,
    /// Profile of the shares' MIG instance, if the resource's name does not contain the profile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// The pod that uses the slices, for messages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
}

const fn default_count() -> u32 {
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

/// A pending pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Pod {
    /// Name, unique in the snapshot. For pods of a cluster, the name is `namespace/name`.
    pub name: String,
    /// Priority. Higher priorities are placed first.
    pub priority: i32,
    /// Requests of the whole pod, summed as the scheduler does: containers, init containers and
    /// overhead.
    pub requests: BTreeMap<String, Quantity>,
    /// Labels that the node must have.
    pub node_selector: BTreeMap<String, String>,
    /// Required node affinity. The node must match one of these terms. An empty list means no
    /// requirement.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub affinity: Vec<NodeSelectorTerm>,
    /// Tolerations of the pod.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tolerations: Vec<Toleration>,
    /// The pod's node in the last plan. The pod is placed on this node again unless another plan is
    /// better, so that plans do not alternate between equally good nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub planned_node: Option<String>,
}

/// Requirements that must all match. A term without requirements matches no node.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeSelectorTerm {
    /// Requirements on labels.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub match_expressions: Vec<Requirement>,
    /// Requirements on fields. The only field is `metadata.name`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub match_fields: Vec<Requirement>,
}

/// One requirement on a label or field.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Requirement {
    /// Name of the label or field.
    pub key: String,
    /// How the value is compared.
    pub operator: Operator,
    /// Values to compare with.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub values: Vec<String>,
}

/// How the value of a label or field is compared with the values of a requirement.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Operator {
    /// The label has one of the values.
    #[default]
    In,
    /// The label has none of the values, or the node does not have the label.
    NotIn,
    /// The node has the label.
    Exists,
    /// The node does not have the label.
    DoesNotExist,
    /// The label is an integer greater than the value.
    Gt,
    /// The label is an integer smaller than the value.
    Lt,
    /// An operator that this version does not support. Nothing matches it.
    #[serde(other)]
    Unknown,
}

/// A taint of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Taint {
    /// Key of the taint.
    pub key: String,
    /// Value of the taint.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub value: String,
    /// Effect: `NoSchedule`, `NoExecute` or `PreferNoSchedule`.
    pub effect: String,
}

/// A toleration of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Toleration {
    /// Key. An empty key with `Exists` matches every key.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub key: String,
    /// `Equal` or `Exists`. An empty operator means `Equal`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub operator: String,
    /// Value, for `Equal`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub value: String,
    /// Effect. An empty effect matches every effect.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub effect: String,
}
