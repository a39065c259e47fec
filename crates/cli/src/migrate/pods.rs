//! Pods of the input, and objects that create pods. Pure.
use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use cleave_plan::Quantity;
use cleave_plan::constraints::Labels;
use serde::Deserialize;
use serde_json::Value;

/// Prefixes of the resources that the preview includes.
const RESOURCE_PREFIXES: [&str; 2] = ["nvidia.com/", "nos.nebuly.com/"];

/// A pod, or an object that creates pods.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Workload {
    /// Kind, namespace and name of the object, or of its first owner if it has owners.
    pub(super) what: String,
    /// The fields of the pod that affect the preview.
    pub(super) spec: PodSpec,
    /// Annotations of the pod.
    pub(super) annotations: BTreeMap<String, String>,
}

/// The fields of a pod that affect the preview.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct PodSpec {
    /// The node on which the pod runs.
    pub(super) node_name: Option<String>,
    /// The pod's node selector.
    pub(super) node_selector: Labels,
    /// The scheduler that the pod names.
    pub(super) scheduler_name: String,
    /// Whether the pod uses the host's IPC namespace.
    #[serde(rename = "hostIPC")]
    pub(super) host_ipc: bool,
    /// The init containers, which run one after another before the containers.
    pub(super) init_containers: Vec<Container>,
    /// The containers.
    pub(super) containers: Vec<Container>,
}

/// A container.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Container {
    /// Name of the container.
    pub(super) name: String,
    /// The environment variables, without their values.
    pub(super) env: Vec<Variable>,
    /// The container's resource limits.
    resources: Resources,
}

/// An environment variable.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Variable {
    /// Name of the variable.
    pub(super) name: String,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
struct Resources {
    limits: BTreeMap<String, Quantity>,
}

impl Container {
    /// Returns the requests of GPU resources, except zeros. An amount that is not a whole number
    /// counts as zero.
    pub(super) fn requests(&self) -> BTreeMap<&str, u64> {
        let of_gpus = |name: &str| RESOURCE_PREFIXES.iter().any(|start| name.starts_with(start));
        let requests = self.resources.limits.iter().filter(|(name, _)| of_gpus(name));
        let requests = requests.map(|(name, amount)| (name.as_str(), amount.count().unwrap_or_default()));
        requests.filter(|(_, amount)| *amount > 0).collect()
    }
}

impl Workload {
    /// Parses an object. Returns `None` if the object is neither a pod nor of a built-in kind that
    /// creates pods.
    ///
    /// # Errors
    /// Returns an error if a field of the object is missing or has a wrong type.
    pub(super) fn parse(object: &Value) -> Result<Option<Self>> {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        let template = match text("/kind") {
            "Pod" => "",
            "Deployment" | "ReplicaSet" | "StatefulSet" | "DaemonSet" | "Job" | "ReplicationController" => {
                "/spec/template"
            }
            "CronJob" => "/spec/jobTemplate/spec/template",
            _ => return Ok(None),
        };
        let owner = object.pointer("/metadata/ownerReferences/0");
        let of_owner = |key: &str| owner.and_then(|owner| owner.get(key)).and_then(Value::as_str);
        let (kind, name) = match (of_owner("kind"), of_owner("name")) {
            (Some(kind), Some(name)) => (kind, name),
            _ => (text("/kind"), text("/metadata/name")),
        };
        let namespace = match text("/metadata/namespace") {
            "" => "default",
            namespace => namespace,
        };
        let what = format!("{kind} {namespace}/{name}");
        let pod = object.pointer(template).with_context(|| format!("{what} has no {template}"))?;
        let spec = pod.get("spec").with_context(|| format!("{what}: the pod has no spec"))?;
        let spec = PodSpec::deserialize(spec).with_context(|| format!("{what} is malformed"))?;
        let annotations = pod.pointer("/metadata/annotations").filter(|annotations| !annotations.is_null());
        let annotations = annotations.map(BTreeMap::deserialize).transpose();
        let annotations = annotations.with_context(|| format!("{what}: metadata.annotations"))?.unwrap_or_default();
        Ok(Some(Self { what, spec, annotations }))
    }

    /// Returns the containers, init containers first.
    pub(super) fn containers(&self) -> impl Iterator<Item = &Container> {
        self.spec.init_containers.iter().chain(&self.spec.containers)
    }
}
