//! Converts `ClusterQueue`s of Kueue, with their `LocalQueue`s and `ResourceFlavor`s.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::gpuquota::{QuotaMode, QuotaNamespaceSelector};
use cleave_api::names::RESOURCE_GPU;
use cleave_plan::quota::{Amount, Unit};
use serde_json::Value;

use super::amounts::{InvalidAmount, parse_gpus, scale_weights};
use super::input::{ClusterQueueSpec, FlavorQuotas, FlavorSpec, Object, Objects, ResourceQuota};
use super::model::{Draft, Import, NamespaceSelection, Refusal};

/// The label that contains the name of a namespace. Every namespace has this label.
const NAMESPACE_NAME_LABEL: &str = "kubernetes.io/metadata.name";
/// Node labels with the model of the node's GPUs.
const MODEL_LABELS: [&str; 2] = ["nvidia.com/gpu.product", "cloud.google.com/gke-accelerator"];
/// GPU models that the import recognizes in node labels and in names of flavors.
const MODELS: [&str; 27] = [
    "A2", "A10", "A10G", "A16", "A30", "A40", "A100", "B100", "B200", "B300", "GB200", "GB300", "GH200", "H20", "H100",
    "H200", "H800", "L4", "L20", "L40", "L40S", "P4", "P40", "P100", "T4", "T4G", "V100",
];
/// Default values of `ClusterQueue` fields that have the same effect in Cleave: the field and its
/// value.
const DEFAULTS_WITH_SAME_EFFECT: [(&str, &str); 2] = [("queueingStrategy", "BestEffortFIFO"), ("stopPolicy", "None")];
/// Weight of a queue that sets no weight, in thousandths.
const DEFAULT_WEIGHT: u64 = 1000;

/// Why a queue is not imported.
enum Failure {
    /// The queue limits no GPUs.
    NoGpus,
    Refused(String),
}

impl From<InvalidAmount> for Failure {
    fn from(bad: InvalidAmount) -> Self {
        Self::Refused(bad.to_string())
    }
}

/// The limits of a queue in one pool.
#[derive(Default)]
struct PoolLimits {
    flavors: Vec<String>,
    nominal: Amount,
    borrowing: Vec<Option<Amount>>,
    lending: Amount,
}

/// Converts the queues. Each pool of GPUs of a queue becomes a quota.
pub(super) fn drafts(objects: &Objects, mode: QuotaMode, imported: &mut Import) -> Vec<Draft> {
    let mut drafts = Vec::new();
    for queue in &objects.cluster_queues {
        let origin = format!("ClusterQueue {}", queue.metadata.name);
        match queue_drafts(queue, &origin, objects, mode) {
            Ok(found) => drafts.extend(found),
            Err(Failure::NoGpus) => {
                let reason = format!("has no quota for {RESOURCE_GPU}");
                imported.skipped.push(Refusal { origin, reason });
            }
            Err(Failure::Refused(reason)) => imported.refused.push(Refusal { origin, reason }),
        }
    }
    set_weights(&mut drafts, imported);
    add_notes(objects, &drafts, imported);
    drafts
}

fn queue_drafts(
    queue: &Object<ClusterQueueSpec>,
    origin: &str,
    objects: &Objects,
    mode: QuotaMode,
) -> Result<Vec<Draft>, Failure> {
    let (name, spec) = (&queue.metadata.name, &queue.spec);
    let pools = pools(spec, &objects.flavors)?;
    let (namespaces, mut notes) = select_namespaces(name, spec, objects)?;
    notes.extend(loss_notes(spec));
    let is_alone = spec.cohort.as_ref().is_none_or(String::is_empty);
    let weight = match spec.fair_sharing.as_ref().and_then(|sharing| sharing.weight.as_ref()) {
        None => DEFAULT_WEIGHT,
        Some(written) => written.milli().ok_or_else(|| {
            Failure::Refused(format!("fairSharing.weight {:?} is negative or malformed", written.to_string()))
        })?,
    };
    let has_one_pool = pools.len() == 1;
    let draft = |(model, limits): (Option<&'static str>, PoolLimits)| {
        let mut notes = notes.clone();
        notes.extend(pool_notes(model, &limits));
        let borrowing: Option<Amount> = limits.borrowing.iter().copied().sum();
        let suffixed = format!("{name}-{}", model.unwrap_or("other").to_lowercase());
        Draft {
            origin: origin.to_owned(),
            names: if has_one_pool { vec![name.clone(), suffixed] } else { vec![suffixed] },
            namespaces: namespaces.clone(),
            models: model.into_iter().map(str::to_owned).collect(),
            unit: Unit::Gpus,
            min: limits.nominal,
            max: if is_alone { Some(limits.nominal) } else { borrowing.map(|more| limits.nominal.plus(more)) },
            lend: if is_alone {
                Some(Amount::ZERO)
            } else {
                Some(limits.lending.min(limits.nominal)).filter(|lending| *lending < limits.nominal)
            },
            weight,
            mode,
            notes,
        }
    };
    Ok(pools.into_iter().map(draft).collect())
}

/// Returns the limits of a queue by model. The key is `None` for flavors without a known model.
fn pools(
    spec: &ClusterQueueSpec,
    flavors: &BTreeMap<String, FlavorSpec>,
) -> Result<BTreeMap<Option<&'static str>, PoolLimits>, Failure> {
    let mut pools: BTreeMap<Option<&'static str>, PoolLimits> = BTreeMap::new();
    for flavor in spec.resource_groups.iter().flatten().flat_map(|group| &group.flavors) {
        for resource in flavor.resources.iter().filter(|resource| resource.name == RESOURCE_GPU) {
            let pool = pools.entry(model_of(&flavor.name, flavors.get(&flavor.name))).or_default();
            add_limits(pool, flavor, resource)?;
        }
    }
    if pools.is_empty() { Err(Failure::NoGpus) } else { Ok(pools) }
}

fn add_limits(pool: &mut PoolLimits, flavor: &FlavorQuotas, resource: &ResourceQuota) -> Result<(), InvalidAmount> {
    let field = |name: &str| format!("{name} of {RESOURCE_GPU} in flavor {}", flavor.name);
    let nominal = parse_gpus(&field("nominalQuota"), &resource.nominal_quota)?;
    let optional = |name: &str, written: &Option<cleave_plan::Quantity>| {
        written.as_ref().map(|written| parse_gpus(&field(name), written)).transpose()
    };
    pool.flavors.push(flavor.name.clone());
    pool.nominal = pool.nominal.plus(nominal);
    pool.borrowing.push(optional("borrowingLimit", &resource.borrowing_limit)?);
    pool.lending = pool.lending.plus(optional("lendingLimit", &resource.lending_limit)?.unwrap_or(nominal));
    Ok(())
}

/// Returns the model of a flavor's GPUs, if it is known: from the labels of its nodes, or from its
/// name if no label names the product.
fn model_of(name: &str, flavor: Option<&FlavorSpec>) -> Option<&'static str> {
    let labels = flavor.and_then(|flavor| flavor.node_labels.as_ref());
    let product = MODEL_LABELS.iter().find_map(|label| labels?.get(*label));
    only_model_in(product.map_or(name, String::as_str))
}

/// Returns the model that a text names, if the text names exactly one known model. Ignores case.
fn only_model_in(text: &str) -> Option<&'static str> {
    let words: BTreeSet<String> =
        text.split(|c: char| !c.is_ascii_alphanumeric()).map(str::to_ascii_uppercase).collect();
    let mut found = MODELS.into_iter().filter(|&model| words.contains(model));
    found.next().filter(|_| found.next().is_none())
}

/// Returns the namespaces of a queue, and a note about them. The namespaces are those of the
/// `LocalQueue`s, or else the namespaces that the queue selects.
fn select_namespaces(
    name: &str,
    spec: &ClusterQueueSpec,
    objects: &Objects,
) -> Result<(NamespaceSelection, Vec<String>), Failure> {
    let own = objects.local_queues.iter().filter(|queue| queue.spec.cluster_queue == name);
    let namespaces: BTreeSet<String> =
        own.map(|queue| queue.metadata.namespace.clone().unwrap_or_else(|| "default".to_owned())).collect();
    if !namespaces.is_empty() {
        let note =
            "Namespaces are those of its LocalQueues. All GPU pods of a namespace count, with or without a queue.";
        return Ok((NamespaceSelection::Names(namespaces.into_iter().collect()), vec![note.to_owned()]));
    }
    let selector = spec.namespace_selector.clone().unwrap_or_default();
    let (labels, expressions) =
        (selector.match_labels.unwrap_or_default(), selector.match_expressions.unwrap_or_default());
    let note = "No LocalQueue of the input uses the queue. Namespaces are those that the queue selects.";
    match (labels.is_empty(), expressions.as_slice()) {
        (false, []) => {
            let selector = QuotaNamespaceSelector { match_labels: labels };
            Ok((NamespaceSelection::Labels(selector), vec![note.to_owned()]))
        }
        (true, [one]) if one.key == NAMESPACE_NAME_LABEL && one.operator == "In" => {
            Ok((NamespaceSelection::Names(one.values.clone().unwrap_or_default()), vec![note.to_owned()]))
        }
        _ => Err(Failure::Refused(
            "no LocalQueue of the input uses the queue, and namespaceSelector is not a list of labels or names. Add \
             the LocalQueues to the input"
                .to_owned(),
        )),
    }
}

/// Returns notes about settings that have no counterpart, or a different effect, in Cleave.
fn loss_notes(spec: &ClusterQueueSpec) -> Vec<String> {
    let mut notes = Vec::new();
    let resources = spec.resource_groups.iter().flatten().flat_map(|group| &group.flavors).flat_map(|flavor| {
        let lost = flavor.resources.iter().filter(|resource| resource.name != RESOURCE_GPU);
        lost.map(move |resource| format!("{} {} of flavor {}", resource.name, resource.nominal_quota, flavor.name))
    });
    let resources: Vec<String> = resources.collect();
    if !resources.is_empty() {
        notes.push(format!("Dropped: {}. An imported quota counts {RESOURCE_GPU} only.", resources.join(", ")));
    }
    let set = |(field, value): (&String, &Value)| {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let is_default = value.is_null()
            || value.as_array().is_some_and(Vec::is_empty)
            || DEFAULTS_WITH_SAME_EFFECT.contains(&(field.as_str(), text.as_str()));
        let text = if value.is_object() { String::new() } else { format!(" {text}") };
        (!is_default).then(|| format!("{field}{text}"))
    };
    let lost: Vec<String> = spec.other.iter().filter_map(set).collect();
    if !lost.is_empty() {
        notes.push(format!("Dropped: {}. Cleave has no counterpart.", lost.join(", ")));
    }
    let preemption = spec.preemption.clone().unwrap_or_default();
    match preemption.reclaim_within_cohort.as_deref() {
        Some("Any") => {}
        Some("LowerPriority") => notes.push(
            "reclaimWithinCohort is LowerPriority. Cleave evicts borrowers of any priority for pods within a guarantee."
                .to_owned(),
        ),
        _ => notes.push(
            "reclaimWithinCohort is Never. With mode Enforce, Cleave evicts borrowers for pods within a guarantee."
                .to_owned(),
        ),
    }
    if preemption.within_cluster_queue.as_deref() != Some("LowerPriority") {
        let policy = preemption.within_cluster_queue.as_deref().unwrap_or("Never");
        notes.push(format!(
            "withinClusterQueue is {policy}. With mode Enforce, Cleave evicts pods of lower priority of the same quota."
        ));
    }
    let borrow = preemption.borrow_within_cohort.and_then(|borrow| borrow.policy);
    if let Some(policy) = borrow.filter(|policy| policy != "Never") {
        notes.push(format!(
            "borrowWithinCohort is {policy}. Between borrowers, Cleave compares shares and not priority."
        ));
    }
    notes
}

fn pool_notes(model: Option<&str>, limits: &PoolLimits) -> Vec<String> {
    let flavors = limits.flavors.join(" and ");
    let mut notes = Vec::new();
    if limits.flavors.len() > 1 {
        notes.push(format!("Adds up the flavors {flavors}: their GPUs are one pool."));
    }
    notes.push(match model {
        Some(model) => format!("Model {model} comes from flavor {flavors}."),
        None => {
            format!("The model of flavor {flavors} is not obvious. Set gpus.models if the cluster has several models.")
        }
    });
    notes
}

/// Sets weights that have the same ratio as the queues' weights.
fn set_weights(drafts: &mut [Draft], imported: &mut Import) {
    let numbers: Vec<u64> = drafts.iter().map(|draft| draft.weight).collect();
    let scaled = scale_weights(&numbers);
    for (draft, weight) in drafts.iter_mut().zip(scaled.weights) {
        if draft.weight == 0 {
            draft
                .notes
                .push("fairSharing.weight is 0. The quota gets weight 1, the minimum weight of a GpuQuota.".to_owned());
        }
        draft.weight = u64::from(weight);
    }
    if !scaled.is_exact {
        imported.notes.push("Weights are rounded to 1 to 1000: their ratio is too large.".to_owned());
    }
}

/// Adds the notes that concern all queues.
fn add_notes(objects: &Objects, drafts: &[Draft], imported: &mut Import) {
    let queues: BTreeSet<&str> = objects.cluster_queues.iter().map(|queue| queue.metadata.name.as_str()).collect();
    let unknown: BTreeSet<&str> = objects
        .local_queues
        .iter()
        .map(|queue| queue.spec.cluster_queue.as_str())
        .filter(|queue| !queues.contains(queue))
        .collect();
    if !unknown.is_empty() {
        let names = unknown.into_iter().collect::<Vec<_>>().join(", ");
        imported.notes.push(format!("LocalQueues use ClusterQueues that are not in the input: {names}."));
    }
    if !objects.cohorts.is_empty() {
        let names = objects.cohorts.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        imported.notes.push(format!(
            "Cohort objects are not imported ({names}). Quotas of Cleave have no parents and no amounts of their own."
        ));
    }
    let cohorts = objects.cluster_queues.iter().filter_map(|queue| queue.spec.cohort.as_deref());
    let cohorts: BTreeSet<&str> = cohorts.filter(|cohort| !cohort.is_empty()).collect();
    if cohorts.len() > 1 {
        let names = cohorts.into_iter().collect::<Vec<_>>().join(", ");
        imported.notes.push(format!(
            "Cleave has no cohorts ({names}). All quotas of a pool lend to each other; lend: \"0\" prevents it."
        ));
    }
    if drafts.iter().any(|draft| draft.mode == QuotaMode::Count) {
        let note = "Mode Count only reports. Keep it while Kueue admits the pods. Set mode Enforce once Kueue no \
                    longer manages these namespaces.";
        imported.notes.push(note.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::only_model_in;

    #[test]
    fn a_model_is_recognized_only_if_it_is_obvious() {
        for (text, model) in [
            ("NVIDIA-H100-80GB-HBM3", Some("H100")),
            ("NVIDIA-A100-SXM4-40GB", Some("A100")),
            ("nvidia-l4", Some("L4")),
            ("a100-spot", Some("A100")),
            ("default-flavor", None),
            ("a100-or-h100", None),
            ("ha100x", None),
            ("", None),
        ] {
            assert_eq!(only_model_in(text), model, "{text}");
        }
    }
}
