//! The result of preflight: findings, and values for the chart.
use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Map, Value};

/// Severity of a finding. Errors sort first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(super) enum Level {
    /// The installation fails, or harms pods.
    Error,
    /// Something may not work, or needs a decision.
    Warning,
    /// A fact about the cluster.
    Info,
}

/// Declares [`FindingReason`] and [`FindingReason::ALL`].
macro_rules! reasons {
    ($($name:ident: $doc:literal,)*) => {
        /// The reason for a finding. The names are stable, so that scripts can depend on them.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
        pub(super) enum FindingReason { $(#[doc = $doc] $name,)* }

        impl FindingReason {
            /// All reasons, in the order of the documentation.
            #[cfg(test)]
            pub(super) const ALL: &'static [Self] = &[$(Self::$name,)*];
        }
    };
}

reasons! {
    NotChecked: "A part of the cluster could not be read.",
    KubernetesTooOld: "The API server is older than the oldest supported version.",
    KubernetesUntested: "The API server is newer than the newest tested version.",
    AdmissionPoliciesMissing: "The API server does not serve `ValidatingAdmissionPolicies`.",
    MutatingPoliciesMissing: "The API server should have `MutatingAdmissionPolicies`, but has none.",
    PlatformDetected: "The platform was detected.",
    PlatformUnknown: "The platform was not detected.",
    PlatformsMixed: "GPU nodes belong to several platforms.",
    PrivilegedPodsRefused: "The platform refuses privileged pods.",
    AlreadyInstalled: "Cleave is installed.",
    PriorityClassMissing: "A priority class of Cleave's pods does not exist.",
    GpuNodesFound: "GPU nodes were found.",
    NoGpuNodes: "No GPU node was found.",
    GpuLabelMissing: "GPU nodes have no label of `nodes.gpuLabels`.",
    GpuLabelNotStable: "Only feature discovery sets the labels that the chart uses to select GPU nodes.",
    ContainerRuntimeUnsupported: "A node's container runtime is neither containerd nor CRI-O.",
    ContainerRuntimeWithoutCdi: "A node's containerd is too old for CDI.",
    KernelTooOld: "A node's kernel is older than the oldest supported kernel.",
    ArchitectureUnsupported: "Cleave has no image for a node's architecture.",
    Arm64: "GPU nodes have the architecture arm64.",
    TaintNotTolerated: "Pods with shares do not tolerate a taint of GPU nodes.",
    OperatorUnschedulable: "No node can run the operator.",
    OneOperatorNode: "Only one node can run the operator.",
    DriverLayout: "The expected location of the driver.",
    RuntimeClassFound: "Cleave's pods will use the `RuntimeClass` of NVIDIA's runtime.",
    RuntimeHandlerUnknown: "The `RuntimeClass` of NVIDIA's runtime exists whether or not the runtime is installed.",
    RuntimeClassMissing: "The platform needs a `RuntimeClass` that does not exist.",
    RivalPlugin: "Another device plugin runs on GPU nodes.",
    RivalPluginElsewhere: "Another device plugin runs on no GPU node that Cleave will manage.",
    GpusServedByOthers: "A device plugin that is not a known `DaemonSet` serves GPUs.",
    OtherSoftwareInstalled: "Software that manages GPUs is installed, but runs no device plugin now.",
    DraDriver: "NVIDIA's DRA driver allocates GPUs.",
    MigManager: "NVIDIA's MIG manager changes MIG modes.",
    NamespaceMissing: "The namespace does not exist.",
    PodSecurityTooStrict: "Pod Security refuses privileged pods in the namespace.",
    PodSecurityNotSet: "The namespace has no Pod Security label.",
    QuotaRefusesPods: "A `ResourceQuota` refuses Cleave's pods.",
    QuotaTooSmall: "A `ResourceQuota` does not allow enough pods.",
    PriorityQuotaMissing: "The platform requires a `ResourceQuota` for system priority classes. The chart can create this quota.",
    WebhookMatchesNamespace: "A webhook must answer before Cleave's pods can be created.",
    MeshInjection: "A service mesh injects sidecars into the namespace's pods.",
}

/// One result of a check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub(super) level: Level,
    pub(super) reason: FindingReason,
    /// A description of the finding, in sentences.
    pub(super) message: String,
    /// The recommended action. Empty if preflight recommends no action.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) action: String,
}

/// The result of all checks.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Report {
    /// Version of the API server.
    pub(super) kubernetes: Option<String>,
    /// Names of the platforms of the GPU nodes, or of all Linux nodes if no GPU node was found.
    pub(super) platforms: Vec<String>,
    /// Number of GPU nodes that Cleave will manage.
    pub(super) gpu_nodes: usize,
    /// Number of nodes.
    pub(super) nodes: usize,
    /// The findings, errors first.
    pub(super) findings: Vec<Finding>,
    /// Values files in the chart's directory. If two files set the same value, the later file wins.
    pub(super) values_files: Vec<String>,
    /// Values to set in addition to the values files, by path.
    pub(super) values: BTreeMap<String, Value>,
    /// The namespace of the release.
    pub(super) namespace: String,
}

impl Report {
    /// Adds an error.
    pub(super) fn add_error(&mut self, reason: FindingReason, message: impl Into<String>, action: impl Into<String>) {
        self.add(Level::Error, reason, message, action);
    }

    /// Adds a warning.
    pub(super) fn add_warning(&mut self, reason: FindingReason, message: impl Into<String>, action: impl Into<String>) {
        self.add(Level::Warning, reason, message, action);
    }

    /// Adds a finding that needs no decision.
    pub(super) fn add_info(&mut self, reason: FindingReason, message: impl Into<String>, action: impl Into<String>) {
        self.add(Level::Info, reason, message, action);
    }

    /// Adds a finding.
    pub(super) fn add(
        &mut self,
        level: Level,
        reason: FindingReason,
        message: impl Into<String>,
        action: impl Into<String>,
    ) {
        self.findings.push(Finding { level, reason, message: message.into(), action: action.into() });
    }

    /// Sets a value of the chart.
    pub(super) fn set_chart_value(&mut self, path: &str, value: impl Into<Value>) {
        self.values.insert(path.to_owned(), value.into());
    }

    /// Returns the number of findings of a level.
    pub(super) fn count(&self, level: Level) -> usize {
        self.findings.iter().filter(|finding| finding.level == level).count()
    }

    /// Returns the values as nested objects, as in a values file.
    pub(super) fn nested_values(&self) -> Value {
        let mut root = Map::new();
        for (path, value) in &self.values {
            insert_value_at_path(&mut root, path, value);
        }
        Value::Object(root)
    }
}

/// Sets the value at a path of names, separated by dots. Omits the value if a shorter path has a
/// value.
fn insert_value_at_path(object: &mut Map<String, Value>, path: &str, value: &Value) {
    let Some((first, rest)) = path.split_once('.') else {
        object.insert(path.to_owned(), value.clone());
        return;
    };
    let below = object.entry(first).or_insert_with(|| Value::Object(Map::new()));
    if let Value::Object(below) = below {
        insert_value_at_path(below, rest, value);
    }
}

/// Maximum number of names in a sentence.
const MAX_LISTED_NAMES: usize = 5;

/// Sorts names, removes duplicates, and joins them, for example `a, b and 3 more`.
pub(super) fn join_names<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let mut names: Vec<&str> = names.into_iter().collect();
    names.sort_unstable();
    names.dedup();
    let shown = names.get(..MAX_LISTED_NAMES).unwrap_or(&names).join(", ");
    match names.len().saturating_sub(MAX_LISTED_NAMES) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Formats a count with its noun, for example `1 node` or `3 nodes`.
pub(super) fn format_count(count: usize, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}
