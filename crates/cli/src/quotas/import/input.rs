//! Parses the objects of Nos and Kueue from YAML.
use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, bail};
use cleave_plan::Quantity;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::model::Refusal;

/// API groups of Nos. Nos used the second group in January 2023, before the tag 0.1.0.
pub(super) const NOS_GROUPS: [&str; 2] = ["nos.nebuly.com", "nos.nebuly.ai"];
/// API group of Kueue.
pub(super) const KUEUE_GROUP: &str = "kueue.x-k8s.io";
/// Maximum number of objects in the input.
const MAX_OBJECTS: usize = 100_000;
/// Start of the error message for a missing field.
const MISSING_FIELD_ERROR: &str = "missing field";
/// Maximum number of fields or elements that are searched for the cause of an error, at each level
/// of a malformed value.
const MAX_SEARCHED_PARTS: usize = 1000;

/// Amounts by resource.
pub(super) type Amounts = BTreeMap<String, Quantity>;

/// Name and namespace of an object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub(super) struct Metadata {
    #[serde(default)]
    pub(super) name: String,
    #[serde(default)]
    pub(super) namespace: Option<String>,
}

/// An object of the input.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Object<S> {
    #[serde(default)]
    pub(super) metadata: Metadata,
    pub(super) spec: S,
}

/// The spec of an `ElasticQuota`, or of a `CompositeElasticQuota`, which has namespaces.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct NosSpec {
    #[serde(default)]
    pub(super) namespaces: Option<Vec<String>>,
    #[serde(default)]
    pub(super) min: Option<Amounts>,
    #[serde(default)]
    pub(super) max: Option<Amounts>,
}

/// The spec of a `ClusterQueue`. The field of the cohort is `cohort` in older versions of the API,
/// and `cohortName` in newer versions.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ClusterQueueSpec {
    #[serde(default, alias = "cohortName")]
    pub(super) cohort: Option<String>,
    #[serde(default)]
    pub(super) namespace_selector: Option<LabelSelector>,
    #[serde(default)]
    pub(super) resource_groups: Option<Vec<ResourceGroup>>,
    #[serde(default)]
    pub(super) fair_sharing: Option<FairSharing>,
    #[serde(default)]
    pub(super) preemption: Option<Preemption>,
    /// Fields without a counterpart.
    #[serde(flatten)]
    pub(super) other: BTreeMap<String, Value>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct LabelSelector {
    #[serde(default)]
    pub(super) match_labels: Option<BTreeMap<String, String>>,
    #[serde(default)]
    pub(super) match_expressions: Option<Vec<MatchExpression>>,
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct MatchExpression {
    pub(super) key: String,
    pub(super) operator: String,
    #[serde(default)]
    pub(super) values: Option<Vec<String>>,
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct ResourceGroup {
    #[serde(default)]
    pub(super) flavors: Vec<FlavorQuotas>,
}

/// The quotas of one flavor.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct FlavorQuotas {
    pub(super) name: String,
    #[serde(default)]
    pub(super) resources: Vec<ResourceQuota>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ResourceQuota {
    pub(super) name: String,
    pub(super) nominal_quota: Quantity,
    #[serde(default)]
    pub(super) borrowing_limit: Option<Quantity>,
    #[serde(default)]
    pub(super) lending_limit: Option<Quantity>,
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct FairSharing {
    #[serde(default)]
    pub(super) weight: Option<Quantity>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Preemption {
    #[serde(default)]
    pub(super) reclaim_within_cohort: Option<String>,
    #[serde(default)]
    pub(super) within_cluster_queue: Option<String>,
    #[serde(default)]
    pub(super) borrow_within_cohort: Option<BorrowWithinCohort>,
}

#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct BorrowWithinCohort {
    #[serde(default)]
    pub(super) policy: Option<String>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct LocalQueueSpec {
    #[serde(default)]
    pub(super) cluster_queue: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct FlavorSpec {
    #[serde(default)]
    pub(super) node_labels: Option<BTreeMap<String, String>>,
}

/// The objects of the input. Each list has the order of the input.
#[derive(Debug, Default)]
pub(super) struct Objects {
    pub(super) elastic: Vec<Object<NosSpec>>,
    pub(super) composite: Vec<Object<NosSpec>>,
    pub(super) cluster_queues: Vec<Object<ClusterQueueSpec>>,
    pub(super) local_queues: Vec<Object<LocalQueueSpec>>,
    pub(super) flavors: BTreeMap<String, FlavorSpec>,
    /// Names of the `Cohort` objects.
    pub(super) cohorts: BTreeSet<String>,
    /// Objects that could not be parsed.
    pub(super) malformed: Vec<Refusal>,
    /// Kinds of objects that are not imported, such as `ElasticQuota of scheduling.x-k8s.io`.
    pub(super) foreign: BTreeSet<String>,
    count: usize,
}

impl Objects {
    /// Adds the objects of a YAML stream: documents, and Lists of objects.
    ///
    /// # Errors
    /// Returns an error if the text is not YAML, or contains something other than objects.
    pub(super) fn add_documents(&mut self, text: &str) -> Result<()> {
        // Without this option, YAML 1.1 rules parse a name such as `n` as a boolean.
        let options = serde_saphyr::options! { strict_booleans: true };
        let documents: Vec<Value> =
            serde_saphyr::from_multiple_with_options(text, options).context("not valid YAML")?;
        for (index, document) in documents.into_iter().enumerate().filter(|(_, document)| !document.is_null()) {
            self.add_object(document).with_context(|| format!("document {}", index + 1))?;
        }
        Ok(())
    }

    /// Adds one object, or the objects of a List.
    pub(super) fn add_object(&mut self, mut object: Value) -> Result<()> {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
        let (version, kind) = (text("/apiVersion"), text("/kind"));
        let (namespace, name) = (text("/metadata/namespace"), text("/metadata/name"));
        if let Some(Value::Array(items)) = object.get_mut("items").map(Value::take) {
            return items.into_iter().try_for_each(|item| self.add_object(item));
        }
        if kind.is_empty() {
            bail!("an object in the input has no kind");
        }
        self.count += 1;
        if self.count > MAX_OBJECTS {
            bail!("the input has more than {MAX_OBJECTS} objects");
        }
        let group = version.split_once('/').map_or("", |(group, _)| group);
        let full = match (namespace.is_empty(), name.is_empty()) {
            (_, true) => format!("without a name (object {} of the input)", self.count),
            (true, false) => name.clone(),
            (false, false) => format!("{namespace}/{name}"),
        };
        let origin = format!("{kind} {full}");
        let is_nos = NOS_GROUPS.contains(&group);
        match kind.as_str() {
            "ElasticQuota" if is_nos => push_parsed_object(&mut self.elastic, &mut self.malformed, origin, object),
            "CompositeElasticQuota" if is_nos => {
                push_parsed_object(&mut self.composite, &mut self.malformed, origin, object);
            }
            "ClusterQueue" if group == KUEUE_GROUP => {
                push_parsed_object(&mut self.cluster_queues, &mut self.malformed, origin, object);
            }
            "LocalQueue" if group == KUEUE_GROUP => {
                push_parsed_object(&mut self.local_queues, &mut self.malformed, origin, object);
            }
            "ResourceFlavor" if group == KUEUE_GROUP => {
                let spec = object.get_mut("spec").map(Value::take).unwrap_or_default();
                let spec: Option<Option<FlavorSpec>> = parse(&mut self.malformed, origin, "spec", &spec);
                self.flavors.insert(name, spec.flatten().unwrap_or_default());
            }
            "Cohort" if group == KUEUE_GROUP => {
                self.cohorts.insert(name);
            }
            "ElasticQuota" | "CompositeElasticQuota" | "ClusterQueue" => {
                let group = if group.is_empty() { "no API group" } else { group };
                self.foreign.insert(format!("{kind} of {group}"));
            }
            // Ignore other kinds: they are not quotas of Nos or Kueue.
            _ => {}
        }
        Ok(())
    }

    /// Returns whether the input has no quota of Nos or Kueue. A malformed object counts as a
    /// quota.
    pub(super) const fn is_empty(&self) -> bool {
        self.elastic.is_empty()
            && self.composite.is_empty()
            && self.cluster_queues.is_empty()
            && self.malformed.is_empty()
    }
}

fn push_parsed_object<S: DeserializeOwned>(
    into: &mut Vec<Object<S>>,
    malformed: &mut Vec<Refusal>,
    origin: String,
    mut object: Value,
) {
    let metadata = object.get_mut("metadata").map(Value::take).unwrap_or_default();
    let Some(metadata) = parse::<Option<Metadata>>(malformed, origin.clone(), "metadata", &metadata) else { return };
    let spec = object.get_mut("spec").map_or_else(|| Value::Object(serde_json::Map::new()), Value::take);
    if let Some(spec) = parse(malformed, origin, "spec", &spec) {
        into.push(Object { metadata: metadata.unwrap_or_default(), spec });
    }
}

/// Parses a field of an object. If the field is malformed, adds the reason to `malformed` and
/// returns `None`.
fn parse<T: DeserializeOwned>(malformed: &mut Vec<Refusal>, origin: String, field: &str, value: &Value) -> Option<T> {
    match T::deserialize(value) {
        Ok(parsed) => Some(parsed),
        Err(error) => {
            let path = malformed_path::<T>(value, &error.to_string());
            malformed.push(Refusal { origin, reason: format!("{field}{path} is malformed: {error}") });
            None
        }
    }
}

/// Returns the path of the value that causes an error, such as `.min`. The error message contains
/// no path. The function therefore removes each part of the value in turn: without the cause, the
/// error differs.
fn malformed_path<T: DeserializeOwned>(value: &Value, error: &str) -> String {
    let is_incomplete = error.starts_with(MISSING_FIELD_ERROR);
    let (mut pointer, mut path) = (String::new(), String::new());
    loop {
        let children: Vec<String> = match value.pointer(&pointer) {
            Some(Value::Object(fields)) => fields.keys().take(MAX_SEARCHED_PARTS).cloned().collect(),
            Some(Value::Array(items)) => {
                (0..items.len().min(MAX_SEARCHED_PARTS)).map(|index| index.to_string()).collect()
            }
            _ => return path,
        };
        let is_cause = |child: &String| {
            let mut rest = value.clone();
            match rest.pointer_mut(&pointer) {
                Some(Value::Object(fields)) => drop(fields.remove(child)),
                Some(Value::Array(items)) => drop(child.parse().map(|index: usize| items.remove(index))),
                _ => {}
            }
            // If an object lacks a field, the removal of another field only causes a second error
            // of this kind.
            let differs = |other: String| other != error && !(is_incomplete && other.starts_with(MISSING_FIELD_ERROR));
            T::deserialize(&rest).err().is_none_or(|other| differs(other.to_string()))
        };
        let Some(cause) = children.into_iter().find(is_cause) else { return path };
        match value.pointer(&pointer) {
            Some(Value::Array(_)) => path.extend(["[", &cause, "]"]),
            _ => path.extend([".", &cause]),
        }
        pointer.push('/');
        pointer.push_str(&cause.replace('~', "~0").replace('/', "~1"));
    }
}
