//! Creates the policies for groups of nodes, and determines which resources pods must request.
//! Pure.
use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use cleave_api::SharingPolicySpec;
use cleave_api::names::{RESOURCE_MPS, RESOURCE_TIMESLICE, mig_resource};
use cleave_api::sharingpolicy::GpuSelector;
use cleave_operator::policies::validate::{shared_instance_resource, validate};
use cleave_plan::constraints::Labels;
use serde::{Deserialize as _, Serialize};
use serde_json::{Value, json};

use super::groups::{Division, DivisionRule, NodeGroup};
use super::input::Input;
use super::report::{Notes, SettingPlace};
use super::sources::hami::HamiResources;
use super::sources::nos::NosValues;
use super::sources::plugin::{GPU, SharedBy};

/// Maximum length of a policy's name in bytes, without the numeric suffix that makes the name
/// unique.
const MAX_NAME_BYTES: usize = 60;

/// The policies, and the resources that pods get from them.
#[derive(Debug, Clone, Default)]
pub(super) struct Plan {
    /// The policies, as objects without the fields that have default values.
    pub(super) policies: Vec<Value>,
    /// The resources that pods get, by group of nodes.
    pub(super) groups: Vec<GroupCounterparts>,
}

/// The resources that pods get on a group of nodes.
#[derive(Debug, Clone)]
pub(super) struct GroupCounterparts {
    /// The nodes, as the report names them.
    pub(super) nodes: String,
    /// Current labels of the nodes.
    pub(super) labels: Labels,
    /// The counterpart of each resource that pods currently request.
    pub(super) counterparts: Vec<Counterpart>,
    /// The names of HAMi's resources, if HAMi manages the nodes.
    pub(super) hami: Option<HamiResources>,
}

/// The counterpart in Cleave of a resource that pods currently request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Counterpart {
    /// The resource that pods currently request. A final `*` stands for any text.
    pub(super) was: String,
    /// The resource that pods request from Cleave. A final `*` stands for the same text.
    pub(super) now: String,
    /// The meaning of one unit of the new resource.
    pub(super) unit: Unit,
    /// Whether the other software currently refuses requests for more than 1.
    pub(super) refuses_above_one: bool,
}

/// The meaning of one unit of a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    /// A GPU.
    Gpu,
    /// One share of a GPU that has this number of shares.
    Share(u32),
    /// One replica of a GPU that has this number of replicas.
    Replica(u32),
    /// A MIG instance.
    Instance,
    /// One share of a MIG instance that has this number of shares.
    InstanceShare(u32),
    /// One replica of a MIG instance that has this number of replicas.
    InstanceReplica(u32),
    /// A sized slice. The name of the resource contains its size.
    Sized,
}

/// A resource that pods must request by a new name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(super) struct Rename {
    /// The current name.
    pub(super) was: String,
    /// The name in Cleave.
    pub(super) now: String,
    /// The nodes on which pods must request the new name.
    pub(super) nodes: String,
}

impl Plan {
    /// Returns the resources that pods must request by a new name, in order. Excludes requests to
    /// HAMi, which [`super::preview`] translates for each pod.
    pub(super) fn renames(&self) -> Vec<Rename> {
        let mut renames = BTreeSet::new();
        for group in self.groups.iter().filter(|group| group.hami.is_none()) {
            for Counterpart { was, now, .. } in
                group.counterparts.iter().filter(|counterpart| counterpart.was != counterpart.now)
            {
                renames.insert(Rename { was: was.clone(), now: now.clone(), nodes: group.nodes.clone() });
            }
        }
        renames.into_iter().collect()
    }
}

/// Creates the policies, and determines the counterparts of the resources that pods currently
/// request.
///
/// # Errors
/// Returns an error if a group's selector has a value that a node label cannot have, or if the
/// operator would refuse a policy.
pub(super) fn plan(groups: &[NodeGroup], input: &Input, notes: &mut Notes) -> Result<Plan> {
    let mut plan = Plan::default();
    let mut names = BTreeSet::new();
    for group in groups {
        for value in group.selector.values() {
            ensure!(is_label_value(value), "{value:?} cannot be the value of a node label");
        }
        let mut counterparts = Vec::new();
        for rule in &group.rules {
            let mut spec = policy_spec(rule, input.nos.filter(|_| group.name.starts_with("nos-")));
            if let Some(object) = spec.as_object_mut() {
                if !group.selector.is_empty() {
                    object.insert("nodeSelector".to_owned(), json!(group.selector));
                }
                if let Some(gpus) = &rule.gpus {
                    object.insert("gpus".to_owned(), gpu_selector_json(gpus));
                }
            }
            let name = unique_name(&group.name, &mut names);
            validate_spec(&name, &spec).with_context(|| group.nodes.clone())?;
            counterparts.extend(keep_resource_names(rule, &mut spec));
            plan.policies.push(json!({
                "apiVersion": "cleave.dev/v1alpha1",
                "kind": "SharingPolicy",
                "metadata": {"name": name},
                "spec": spec,
            }));
        }
        if group.rules.iter().all(|rule| rule.gpus.is_some()) {
            counterparts.push(Counterpart::new(GPU, GPU, Unit::Gpu));
        }
        plan.groups.push(GroupCounterparts {
            nodes: group.nodes.clone(),
            labels: group.labels.clone(),
            counterparts,
            hami: group.hami.clone(),
        });
    }
    report_overruled_policies(groups, notes);
    Ok(plan)
}

/// Returns whether Kubernetes accepts a text as the value of a label.
fn is_label_value(text: &str) -> bool {
    let ends = |c: Option<char>| c.is_none_or(|c| c.is_ascii_alphanumeric());
    let allowed = text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'));
    allowed && text.len() <= 63 && ends(text.chars().next()) && ends(text.chars().last())
}

/// Returns an error if the operator would refuse the policy.
fn validate_spec(name: &str, spec: &Value) -> Result<()> {
    let spec = SharingPolicySpec::deserialize(spec).with_context(|| format!("policy {name} is malformed"))?;
    validate(name, None, &spec).with_context(|| format!("policy {name} is not valid"))?;
    Ok(())
}

fn gpu_selector_json(gpus: &GpuSelector) -> Value {
    let mut selector = serde_json::Map::new();
    if !gpus.models.is_empty() {
        selector.insert("models".to_owned(), json!(gpus.models));
    }
    if !gpus.indices.is_empty() {
        selector.insert("indices".to_owned(), json!(gpus.indices));
    }
    Value::Object(selector)
}

/// Returns the part of a policy that divides GPUs, without the fields that have default values.
fn policy_spec(rule: &DivisionRule, nos: Option<NosValues>) -> Value {
    let mut spec = match &rule.division {
        Division::Whole => json!({"mode": "Whole"}),
        Division::Equal(SharedBy::Mps, count) => json!({"mode": "Mps", "mps": equal_mps_shares(*count)}),
        Division::Equal(SharedBy::TimeSlicing, count) => {
            json!({"mode": "TimeSlicing", "timeSlicing": {"replicas": count}})
        }
        Division::Mig { layout, shared, .. } => {
            let mut mig = serde_json::Map::new();
            if let Some(layout) = layout {
                mig.insert("layout".to_owned(), json!(layout));
            }
            match shared {
                Some((SharedBy::Mps, count)) => {
                    mig.insert("sharing".to_owned(), json!({"mps": equal_mps_shares(*count)}));
                }
                Some((SharedBy::TimeSlicing, count)) => {
                    mig.insert("sharing".to_owned(), json!({"timeSlicing": {"replicas": count}}));
                }
                None => {}
            }
            if mig.is_empty() { json!({"mode": "Mig"}) } else { json!({"mode": "Mig", "mig": mig}) }
        }
        Division::Sizes => json!({"mode": "Mps", "mps": {"sizes": "Dynamic"}}),
        Division::Auto(None) => json!({"mode": "Auto"}),
        Division::Auto(Some(threads)) => json!({"mode": "Auto", "mps": {"threads": threads}}),
    };
    let mut dynamic = serde_json::Map::new();
    let NosValues { idle_seconds, timeout_seconds } = nos.unwrap_or_default();
    for (key, seconds) in [("idle", idle_seconds), ("timeout", timeout_seconds)] {
        if let Some(seconds) = seconds {
            dynamic.insert(key.to_owned(), json!(format!("{seconds}s")));
        }
    }
    if !dynamic.is_empty()
        && let Some(object) = spec.as_object_mut()
    {
        object.insert("dynamic".to_owned(), Value::Object(dynamic));
    }
    spec
}

/// Returns the settings of equal shares. Each share has an equal part of the SMs, as with NVIDIA's
/// plugin and GKE.
fn equal_mps_shares(count: u32) -> Value {
    json!({"units": count, "threads": "Strict"})
}

/// Keeps the resource names that pods currently request, if the operator accepts the names. Returns
/// the counterparts of the names.
fn keep_resource_names(rule: &DivisionRule, spec: &mut Value) -> Vec<Counterpart> {
    let refuses_above_one = rule.refuses_above_one;
    match &rule.division {
        Division::Whole => vec![Counterpart::new(&rule.name, GPU, Unit::Gpu)],
        Division::Equal(by, count) => {
            let (default, unit) = match by {
                SharedBy::Mps => (RESOURCE_MPS, Unit::Share(*count)),
                SharedBy::TimeSlicing => (RESOURCE_TIMESLICE, Unit::Replica(*count)),
            };
            let now = keep_resource_name(&rule.name, default, spec);
            vec![Counterpart { refuses_above_one, ..Counterpart::new(&rule.name, &now, unit) }]
        }
        Division::Mig { shared, names, .. } if names.is_empty() => {
            let any = mig_resource("*");
            let unit = match shared {
                None => Unit::Instance,
                Some((SharedBy::Mps, count)) => Unit::InstanceShare(*count),
                Some((SharedBy::TimeSlicing, count)) => Unit::InstanceReplica(*count),
            };
            vec![Counterpart::new(&any, &any, unit)]
        }
        Division::Mig { shared, names, .. } => {
            let counterpart = |(profile, was): (&String, &String)| match shared {
                None => Counterpart::new(was, &mig_resource(profile), Unit::Instance),
                Some((by, count)) => {
                    let default = shared_instance_resource(profile, None);
                    let now = if names.len() == 1 { keep_resource_name(was, &default, spec) } else { default };
                    let unit = match by {
                        SharedBy::Mps => Unit::InstanceShare(*count),
                        SharedBy::TimeSlicing => Unit::InstanceReplica(*count),
                    };
                    Counterpart { refuses_above_one, ..Counterpart::new(was, &now, unit) }
                }
            };
            names.iter().map(counterpart).collect()
        }
        Division::Sizes => vec![Counterpart::new("nvidia.com/gpu-*", "nvidia.com/gpu-*", Unit::Sized)],
        Division::Auto(_) => {
            let any = mig_resource("*");
            vec![
                Counterpart::new(&rule.name, GPU, Unit::Gpu),
                Counterpart::new("nvidia.com/gpu-*", "nvidia.com/gpu-*", Unit::Sized),
                Counterpart::new(&any, &any, Unit::Instance),
            ]
        }
    }
}

/// Sets the policy's `resourceName` to the name that pods currently request, if the operator
/// accepts that name. Returns the name that pods must request.
fn keep_resource_name(was: &str, default: &str, spec: &mut Value) -> String {
    if was == default {
        return default.to_owned();
    }
    let mut named = spec.clone();
    if let Some(object) = named.as_object_mut() {
        object.insert("resourceName".to_owned(), json!(was));
    }
    if validate_spec("renamed", &named).is_ok() {
        *spec = named;
        return was.to_owned();
    }
    default.to_owned()
}

impl Counterpart {
    fn new(was: &str, now: &str, unit: Unit) -> Self {
        Self { was: was.to_owned(), now: now.to_owned(), unit, refuses_above_one: false }
    }
}

/// Returns a unique name for a policy.
fn unique_name(wanted: &str, names: &mut BTreeSet<String>) -> String {
    let allowed = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    let name: String = wanted.chars().map(allowed).take(MAX_NAME_BYTES).collect();
    let name = match name.trim_matches('-') {
        "" => "migrated",
        name => name,
    };
    let numbered = (2..).map(|number| format!("{name}-{number}"));
    let free = std::iter::once(name.to_owned()).chain(numbered).find(|name| !names.contains(name));
    let free = free.unwrap_or_default();
    names.insert(free.clone());
    free
}

/// Reports policies that win over the policies of a more specific group, because they select GPUs
/// by model or index.
fn report_overruled_policies(groups: &[NodeGroup], notes: &mut Notes) {
    for general in groups {
        let selects_gpus = general.rules.iter().any(|rule| rule.gpus.is_some());
        for special in groups.iter().filter(|_| selects_gpus) {
            let contains = general.selector.iter().all(|(key, value)| special.selector.get(key) == Some(value));
            if contains
                && general.selector.len() < special.selector.len()
                && special.rules.iter().any(|rule| rule.gpus.is_none())
            {
                notes.decide(
                    SettingPlace::of_whole_source(&special.nodes),
                    format!(
                        "The policies {0} select GPUs by index or model, so they win over the policies {1} on these \
                         nodes. Give the nodes of {0} a label of their own.",
                        general.name, special.name
                    ),
                );
            }
        }
    }
}
