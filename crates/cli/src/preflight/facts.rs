//! The objects of a cluster that preflight reads, reduced to the fields that checks use.
use std::collections::BTreeMap;

use cleave_plan::Quantity;
use cleave_plan::constraints::{LabelSelector, Labels};
use cleave_plan::snapshot::{NodeSelectorTerm, Taint, Toleration};
use serde::Deserialize;

/// A part of the cluster, or the reason why it could not be read.
pub(super) type ReadResult<T> = Result<T, String>;

/// Namespace and nodes of the planned installation.
#[derive(Debug, Clone, Default)]
pub(super) struct Target {
    /// The namespace of the release.
    pub(super) namespace: String,
    /// Labels of the nodes that Cleave will manage. Empty for all nodes.
    pub(super) node_selector: Labels,
}

/// Everything that preflight knows about a cluster.
#[derive(Debug, Clone)]
pub(super) struct Facts {
    /// The version of the API server.
    pub(super) server: ReadResult<ServerVersion>,
    /// The resources of the API group `admissionregistration.k8s.io/v1`.
    pub(super) admission: ReadResult<ApiResources>,
    /// All nodes.
    pub(super) nodes: ReadResult<Vec<Node>>,
    /// The `DaemonSets` of all namespaces.
    pub(super) daemon_sets: ReadResult<Vec<DaemonSet>>,
    /// All `RuntimeClasses`.
    pub(super) runtime_classes: ReadResult<Vec<NamedObject>>,
    /// The `ResourceQuotas` of the target namespace. May include quotas of other namespaces.
    pub(super) quotas: ReadResult<Vec<ResourceQuota>>,
    /// The `LimitRanges` of the target namespace. May include `LimitRanges` of other namespaces.
    pub(super) limit_ranges: ReadResult<Vec<LimitRange>>,
    /// The target namespace, if it exists. May include other namespaces.
    pub(super) namespaces: ReadResult<Vec<NamedObject>>,
    /// All `PriorityClasses`.
    pub(super) priority_classes: ReadResult<Vec<NamedObject>>,
    /// The names of all custom resource definitions.
    pub(super) definitions: ReadResult<Vec<NamedObject>>,
    /// All `MutatingWebhookConfigurations`.
    pub(super) mutating_webhooks: ReadResult<Vec<WebhookConfiguration>>,
    /// All `ValidatingWebhookConfigurations`.
    pub(super) validating_webhooks: ReadResult<Vec<WebhookConfiguration>>,
}

/// The metadata of an object.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Metadata {
    pub(super) name: String,
    pub(super) namespace: String,
    pub(super) labels: Labels,
    pub(super) annotations: BTreeMap<String, String>,
}

impl Metadata {
    /// Returns `namespace/name`.
    pub(super) fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

/// An object. Preflight reads only its metadata.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct NamedObject {
    pub(super) metadata: Metadata,
}

/// The version of the API server, as `/version` or `kubectl version -o json` reports it.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ServerVersion {
    /// For example `v1.34.1-gke.1829001`.
    pub(super) git_version: String,
    /// The server's version, if the input is the output of `kubectl version`. That output also
    /// contains the client's version.
    pub(super) server_version: Option<Box<ServerVersion>>,
}

impl ServerVersion {
    /// Returns the version, as the server formats it.
    pub(super) fn text(&self) -> &str {
        self.server_version.as_ref().map_or(&self.git_version, |server| &server.git_version)
    }
}

/// The resources of an API group and version.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct ApiResources {
    pub(super) resources: Vec<ApiResource>,
}

/// One resource of an API group.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct ApiResource {
    pub(super) name: String,
}

/// A node.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct Node {
    pub(super) metadata: Metadata,
    pub(super) spec: NodeSpec,
    pub(super) status: NodeStatus,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct NodeSpec {
    pub(super) taints: Vec<Taint>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct NodeStatus {
    /// The kubelet reports a resource here for some minutes after its device plugin has stopped.
    pub(super) capacity: BTreeMap<String, Quantity>,
    pub(super) allocatable: BTreeMap<String, Quantity>,
    pub(super) node_info: NodeInfo,
}

/// The facts that the kubelet reports about its node.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct NodeInfo {
    /// For example `amd64`.
    pub(super) architecture: String,
    /// For example `containerd://2.1.4`.
    pub(super) container_runtime_version: String,
    /// For example `6.12.40-63.114.amzn2023.x86_64`.
    pub(super) kernel_version: String,
    /// For example `v1.34.1-eks-113cf36`.
    pub(super) kubelet_version: String,
    /// `linux` or `windows`.
    pub(super) operating_system: String,
    /// For example `Amazon Linux 2023.9.20250929`.
    pub(super) os_image: String,
}

/// A `DaemonSet`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct DaemonSet {
    pub(super) metadata: Metadata,
    pub(super) spec: DaemonSetSpec,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct DaemonSetSpec {
    pub(super) template: PodTemplate,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct PodTemplate {
    pub(super) spec: PodSpec,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct PodSpec {
    pub(super) containers: Vec<Container>,
    pub(super) node_selector: Labels,
    pub(super) affinity: Affinity,
    pub(super) tolerations: Vec<Toleration>,
}

impl PodSpec {
    /// Returns the terms of the required node affinity.
    pub(super) fn required_affinity(&self) -> &[NodeSelectorTerm] {
        &self.affinity.node_affinity.required_during_scheduling_ignored_during_execution.node_selector_terms
    }
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct Container {
    pub(super) name: String,
    pub(super) image: String,
    pub(super) command: Vec<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Affinity {
    pub(super) node_affinity: NodeAffinity,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct NodeAffinity {
    pub(super) required_during_scheduling_ignored_during_execution: NodeSelector,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct NodeSelector {
    pub(super) node_selector_terms: Vec<NodeSelectorTerm>,
}

/// A `ResourceQuota`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct ResourceQuota {
    pub(super) metadata: Metadata,
    pub(super) spec: QuotaSpec,
    pub(super) status: QuotaStatus,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct QuotaSpec {
    pub(super) hard: BTreeMap<String, Quantity>,
    pub(super) scopes: Vec<String>,
    pub(super) scope_selector: ScopeSelector,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct QuotaStatus {
    pub(super) used: BTreeMap<String, Quantity>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ScopeSelector {
    pub(super) match_expressions: Vec<ScopeRequirement>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ScopeRequirement {
    pub(super) scope_name: String,
    pub(super) operator: String,
    pub(super) values: Vec<String>,
}

/// A `LimitRange`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct LimitRange {
    pub(super) metadata: Metadata,
    pub(super) spec: LimitRangeSpec,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct LimitRangeSpec {
    pub(super) limits: Vec<LimitRangeItem>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct LimitRangeItem {
    /// Default limits of containers, by resource.
    pub(super) default: BTreeMap<String, Quantity>,
}

/// A `MutatingWebhookConfiguration` or a `ValidatingWebhookConfiguration`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct WebhookConfiguration {
    pub(super) metadata: Metadata,
    pub(super) webhooks: Vec<Webhook>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Webhook {
    pub(super) name: String,
    pub(super) failure_policy: String,
    pub(super) namespace_selector: LabelSelector,
    pub(super) object_selector: LabelSelector,
    pub(super) rules: Vec<WebhookRule>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct WebhookRule {
    pub(super) api_groups: Vec<String>,
    pub(super) operations: Vec<String>,
    pub(super) resources: Vec<String>,
}

/// The first two numbers of a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct MajorMinor(pub(super) u32, pub(super) u32);

impl MajorMinor {
    /// Reads the first two numbers of a version such as `v1.34.1+k3s1` or `5.15.0-1034-aws`.
    /// Returns `None` if the text does not start with two numbers.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (major, rest) = text.strip_prefix('v').unwrap_or(text).split_once('.')?;
        let end = rest.find(|digit: char| !digit.is_ascii_digit()).unwrap_or(rest.len());
        Some(Self(major.parse().ok()?, rest.get(..end)?.parse().ok()?))
    }
}

impl std::fmt::Display for MajorMinor {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}.{}", self.0, self.1)
    }
}
