//! `GpuQuota`: how many GPUs are guaranteed to namespaces, and how many they may use and lend.
#![expect(unreachable_pub, reason = "the schema derives copy public structs into functions")]
#![expect(clippy::duplicated_attributes, reason = "columns of a type repeat `type_`")]

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// How many GPUs are guaranteed to a set of namespaces, and how many they may use and lend.
#[derive(CustomResource, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "cleave.dev",
    version = "v1alpha1",
    kind = "GpuQuota",
    plural = "gpuquotas",
    shortname = "gq",
    category = "cleave",
    status = "GpuQuotaStatus",
    derive = "PartialEq",
    doc = "How many GPUs are guaranteed to a set of namespaces, and how many they may use and lend. If two quotas select one namespace in the same pool, only one of them counts the namespace's pods: a quota that names the namespace before one that selects it by labels, then the older quota.",
    printcolumn(name = "Min", type_ = "string", json_path = ".spec.min", description = "Guaranteed amount"),
    printcolumn(name = "Max", type_ = "string", json_path = ".spec.max", description = "Maximum amount"),
    printcolumn(name = "Used", type_ = "string", json_path = ".status.used", description = "Amount that pods use"),
    printcolumn(
        name = "Borrowed",
        type_ = "string",
        json_path = ".status.borrowed",
        description = "Amount that pods use beyond the guarantee"
    ),
    printcolumn(
        name = "Lent",
        type_ = "string",
        json_path = ".status.lent",
        description = "Unused part of the guarantee that others may use"
    ),
    printcolumn(
        name = "Waiting",
        type_ = "integer",
        json_path = ".status.waiting.pods",
        description = "Number of pods that wait for GPUs"
    ),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status",
        description = "Whether the quota counts all of its namespaces"
    ),
    printcolumn(name = "Mode", type_ = "string", json_path = ".spec.mode", priority = 1),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason",
        priority = 1
    ),
    printcolumn(
        name = "Message",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].message",
        priority = 1
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.namespaces) != has(self.namespaceSelector)")
        .message("set namespaces or namespaceSelector, and not both: they select whose pods are counted"),
    validation = Rule::new("self.unit != 'Gpus' || [has(self.min) ? self.min : '0', has(self.max) ? self.max : '0', has(self.lend) ? self.lend : '0'].all(amount, amount.matches('^([0-9]{1,7}([.][0-9]{1,3})?|[0-9]{1,10}m)$'))")
        .message("an amount of GPUs is a number such as 4, 2.5 or 2500m: min, max and lend have at most three decimals"),
    validation = Rule::new("self.unit != 'Memory' || [has(self.min) ? self.min : '0', has(self.max) ? self.max : '0', has(self.lend) ? self.lend : '0'].all(amount, amount.matches('^(0|[0-9]{1,9}(Mi|Gi|Ti))$'))")
        .message("an amount of GPU memory is a whole number of Mi, Gi or Ti, such as 40Gi: set min, max and lend like this for unit Memory"),
    validation = Rule::new("!has(self.max) || !isQuantity(self.max) || !has(self.min) || !isQuantity(self.min) || quantity(self.min).compareTo(quantity(self.max)) <= 0")
        .message("min exceeds max: lower min, or raise max"),
    validation = Rule::new("!has(self.lend) || !isQuantity(self.lend) || (has(self.min) && !isQuantity(self.min)) || quantity(self.lend).compareTo(quantity(has(self.min) ? self.min : '0')) <= 0")
        .message("lend exceeds min: only what is guaranteed can be lent"),
    validation = Rule::new("self.guarantee != 'Cells' || self.unit == 'Gpus'")
        .message("guarantee Cells counts GPUs and needs unit Gpus, not Memory"),
    validation = Rule::new("self.guarantee != 'Cells' || !has(self.min) || self.unit != 'Gpus' || self.min.matches('^([0-9]{1,7}|[0-9]{1,7}000m)$')")
        .message("guarantee Cells guarantees whole GPUs: min must be a whole number")
)]
pub struct GpuQuotaSpec {
    /// Namespaces whose pods are counted. Set either `namespaces` or `namespaceSelector`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256), inner(length(max = 63)))]
    #[x_kube(validation = Rule::new("size(self) > 0")
        .message("namespaces is empty: name a namespace, or set namespaceSelector"))]
    pub namespaces: Option<Vec<String>>,
    /// Labels of the namespaces whose pods are counted. Set either `namespaces` or
    /// `namespaceSelector`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace_selector: Option<QuotaNamespaceSelector>,
    /// The quota's pool of GPUs. Default: the GPUs that no other quota names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpus: Option<QuotaPool>,
    /// What `min`, `max` and `lend` count.
    #[serde(default)]
    pub unit: QuotaUnit,
    /// Guaranteed amount, such as `4` or `2500m` GPUs, or `40Gi` of memory. Default: 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    pub min: Option<String>,
    /// Maximum amount. Default: no maximum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    pub max: Option<String>,
    /// Part of `min` that other quotas may use while it is unused. Default: all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    pub lend: Option<String>,
    /// Weight of the quota when quotas share unused GPUs, from 1 to 1000. A quota of weight 2 gets
    /// twice as much as a quota of weight 1.
    #[serde(default = "default_weight")]
    #[x_kube(validation = Rule::new("self >= 1 && self <= 1000").message("weight must be from 1 to 1000"))]
    pub weight: u32,
    /// Whether an amount or whole GPUs are guaranteed.
    #[serde(default)]
    pub guarantee: QuotaGuarantee,
    /// Whether the quota delays and evicts pods, or only counts them.
    #[serde(default)]
    pub mode: QuotaMode,
}

const fn default_weight() -> u32 {
    1
}

/// Namespaces by label.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct QuotaNamespaceSelector {
    /// Labels that a namespace must have.
    #[schemars(schema_with = "labels_schema")]
    #[x_kube(validation = Rule::new("size(self) > 0")
        .message("matchLabels is empty: name a label of the namespaces"))]
    pub match_labels: BTreeMap<String, String>,
}

/// Returns the schema of namespace labels. The schema is bounded, so that the cost of rules about
/// labels is bounded.
fn labels_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": 32,
        "additionalProperties": {"type": "string", "maxLength": 63},
    })
}

/// A pool of GPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
pub struct QuotaPool {
    /// Product names as NVML reports them, or parts of them between word boundaries, such as `H100`
    /// or `NVIDIA H200`.
    #[schemars(length(max = 32), inner(length(max = 96)))]
    #[x_kube(validation = Rule::new("size(self) > 0")
        .message("gpus.models is empty: omit gpus, or name a model"))]
    #[x_kube(validation = Rule::new(r"self.all(model, model.matches('^[A-Za-z0-9]([-A-Za-z0-9 ./()+]*[A-Za-z0-9)])?$'))")
        .message("a model is a product name or part of one, for example H100 or NVIDIA H200: letters, digits, spaces and -./()+ between them"))]
    pub models: Vec<String>,
}

/// What a quota counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum QuotaUnit {
    /// GPUs. Shares and MIG instances count as parts of a GPU.
    #[default]
    Gpus,
    /// GPU memory.
    Memory,
}

/// What a quota guarantees.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum QuotaGuarantee {
    /// The quota guarantees an amount, which can be on any GPUs. Fragmentation can break the
    /// guarantee.
    #[default]
    Count,
    /// The quota guarantees whole GPUs, which its pods fill.
    Cells,
}

/// Whether a quota is enforced.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum QuotaMode {
    /// Pods above `max` wait, and borrowing pods may be evicted for pods within a guarantee, or for
    /// quotas that borrow less. The condition `Enforced` reports whether the operator enforces the
    /// quota.
    #[default]
    Enforce,
    /// The operator counts and reports usage, but neither delays nor evicts pods.
    Count,
}

/// Observed state of a quota: usage, waiting pods and conditions.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuQuotaStatus {
    /// Generation of the spec that this status describes.
    #[serde(default)]
    pub observed_generation: i64,
    /// Amount that released and bound pods use, excluding pods that are being deleted.
    #[serde(default)]
    pub used: String,
    /// Amount that pods use, including pods that are being deleted.
    #[serde(default)]
    pub held: String,
    /// Amount that pods within the guarantee use.
    #[serde(default)]
    pub in_quota: String,
    /// Amount that pods use beyond the guarantee.
    #[serde(default)]
    pub borrowed: String,
    /// Unused part of the guarantee that others may use.
    #[serde(default)]
    pub lent: String,
    /// The quota's share: the amount that it uses beyond its guarantee, divided by its weight, in
    /// GPUs or GiB with two decimals. For fair share, pods of the quota with the highest share are
    /// evicted first.
    #[serde(default)]
    pub share: String,
    /// Number of GPUs that the quota owns. Set only with `guarantee: Cells`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cells: Option<u32>,
    /// Numbers of pods.
    #[serde(default)]
    pub pods: QuotaPods,
    /// Pods that wait for GPUs.
    #[serde(default)]
    pub waiting: QuotaWaiting,
    /// What pods of namespaces without a quota use of the same GPUs. Set only on the oldest quota
    /// of these GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unnamed: Option<QuotaUnnamed>,
    /// Conditions by type: `Ready`, `Guaranteed` and `Enforced`.
    #[serde(default)]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".to_owned()]))]
    pub conditions: Vec<Condition>,
}

/// Numbers of a quota's pods.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct QuotaPods {
    /// Number of pods within the guarantee.
    #[serde(default, rename = "in")]
    pub within: u32,
    /// Number of pods that borrow.
    #[serde(default)]
    pub over: u32,
    /// Number of pods that are being deleted.
    #[serde(default)]
    pub leaving: u32,
}

/// What pods of namespaces without a quota use. These pods have no guarantee, so they borrow all
/// that they use.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct QuotaUnnamed {
    /// Amount that the pods use, without pods that are being deleted.
    #[serde(default)]
    pub used: String,
    /// The amount in GPUs or GiB with two decimals, as `share` of a quota with weight 1.
    #[serde(default)]
    pub share: String,
    /// Number of pods that use GPUs.
    #[serde(default)]
    pub pods: u32,
    /// Number of pods that wait.
    #[serde(default)]
    pub waiting: u32,
}

/// Pods of a quota that wait for GPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct QuotaWaiting {
    /// Number of pods.
    #[serde(default)]
    pub pods: u32,
    /// Amount that these pods request.
    #[serde(default)]
    pub gpus: String,
    /// Number of pods by reason, such as `OverMax`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub reasons: BTreeMap<String, u32>,
}
