//! Converts `ElasticQuota` and `CompositeElasticQuota` of Nos.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::gpuquota::QuotaMode;
use cleave_api::names::{RESOURCE_GPU, RESOURCE_MIG_PREFIX, RESOURCE_SHARES_PREFIX};
use cleave_plan::Quantity;
use cleave_plan::quota::{Amount, Unit};

use super::amounts::{InvalidAmount, parse_gigabytes, parse_gpus, scale_weights};
use super::input::{Amounts, NOS_GROUPS, NosSpec, Object, Objects};
use super::model::{Draft, Import, NamespaceSelection, Refusal};

/// Name of Nos's resource for GPU memory, without its API group.
const GPU_MEMORY: &str = "gpu-memory";

/// What a quota of Nos counts.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Counted {
    /// GB of GPU memory. The resource has this name.
    Memory(String),
    /// GPUs.
    Gpus,
    /// Slices: the size in GB of each resource.
    Slices(BTreeMap<String, u64>),
}

/// Converts the quotas. Refuses a quota with a namespace of an earlier quota. Nos deletes an
/// `ElasticQuota` in a namespace of a `CompositeElasticQuota`.
pub(super) fn drafts(objects: &Objects, mode: QuotaMode, imported: &mut Import) -> Vec<Draft> {
    let mut owners: BTreeMap<String, String> = BTreeMap::new();
    let mut drafts = Vec::new();
    for (quota, is_composite) in
        objects.elastic.iter().map(|quota| (quota, false)).chain(objects.composite.iter().map(|quota| (quota, true)))
    {
        let origin = origin_of(quota, is_composite);
        let refused = match namespaces_of(quota, is_composite, &owners) {
            Err(reason) => Some(reason),
            Ok(namespaces) => {
                owners.extend(namespaces.iter().map(|namespace| (namespace.clone(), origin.clone())));
                match draft(quota, &origin, namespaces, mode) {
                    Ok(Some(draft)) => {
                        drafts.push(draft);
                        None
                    }
                    Ok(None) => {
                        let reason = "names no GPUs. Limit other resources with a ResourceQuota".to_owned();
                        imported.skipped.push(Refusal { origin: origin.clone(), reason });
                        None
                    }
                    Err(bad) => Some(bad.to_string()),
                }
            }
        };
        imported.refused.extend(refused.map(|reason| Refusal { origin, reason }));
    }
    set_weights(&mut drafts, imported);
    if drafts.iter().any(|draft| draft.unit == Unit::Memory) {
        let note = "Nos counts each nvidia.com/gpu as 32 GB unless configured otherwise. Cleave counts the memory of \
                    the GPU's model. Check the amounts of namespaces whose pods request whole GPUs.";
        imported.notes.push(note.to_owned());
    }
    if !drafts.is_empty() {
        let note = "In Cleave, a quota may borrow everything that is free, up to max. In Nos, a quota may borrow only what \
                    other quotas are guaranteed and do not use.";
        imported.notes.push(note.to_owned());
    }
    drafts
}

fn origin_of(quota: &Object<NosSpec>, is_composite: bool) -> String {
    let kind = if is_composite { "CompositeElasticQuota" } else { "ElasticQuota" };
    let namespace = quota.metadata.namespace.as_deref().unwrap_or("default");
    format!("{kind} {namespace}/{}", quota.metadata.name)
}

/// Returns the namespaces of a quota. Returns the reason as an error if a CompositeElasticQuota
/// lists no namespaces, or if another quota already has one of the namespaces.
fn namespaces_of(
    quota: &Object<NosSpec>,
    is_composite: bool,
    owners: &BTreeMap<String, String>,
) -> Result<Vec<String>, String> {
    let own = || vec![quota.metadata.namespace.clone().unwrap_or_else(|| "default".to_owned())];
    let named = quota.spec.namespaces.clone().unwrap_or_default();
    let all: BTreeSet<String> = if is_composite { named } else { own() }.into_iter().collect();
    if all.is_empty() {
        return Err("spec.namespaces is empty".to_owned());
    }
    let taken = all.iter().find_map(|namespace| Some((namespace, owners.get(namespace)?)));
    match taken {
        Some((namespace, owner)) if is_composite && owner.starts_with("ElasticQuota") => Err(format!(
            "namespace {namespace} has {owner}, which Nos would delete. Cleave deletes nothing: remove one of the two from the input"
        )),
        Some((namespace, owner)) => Err(format!(
            "namespace {namespace} has {owner} already. A namespace can have one quota: remove one of the two from the input"
        )),
        None => Ok(all.into_iter().collect()),
    }
}

/// Converts one quota. Returns `None` if the quota names no GPU resource.
fn draft(
    quota: &Object<NosSpec>,
    origin: &str,
    namespaces: Vec<String>,
    mode: QuotaMode,
) -> Result<Option<Draft>, InvalidAmount> {
    let (min, max) = (quota.spec.min.clone().unwrap_or_default(), quota.spec.max.clone().unwrap_or_default());
    let resources: BTreeSet<&str> = min.keys().chain(max.keys()).map(String::as_str).collect();
    let Some(counted) = counted_resources(&resources) else { return Ok(None) };
    let mut notes = Vec::new();
    let min_amount = counted.sum("min", &min)?.unwrap_or_default();
    let max_amount = match &counted {
        Counted::Slices(sizes) if !max.is_empty() && !sizes.keys().all(|resource| max.contains_key(resource)) => {
            notes.push("max was dropped: it does not name all slices of min, so the others have no limit.".to_owned());
            None
        }
        _ => counted.sum("max", &max)?,
    };
    if let Counted::Slices(sizes) = &counted {
        let names: Vec<&str> = sizes.keys().map(String::as_str).collect();
        notes.push(format!("Counts the memory of {} together.", names.join(" and ")));
    }
    let lost = |field: &str, amounts: &Amounts| {
        let lost = amounts.iter().filter(|(resource, _)| !counted.counts(resource));
        lost.map(|(resource, amount)| format!("{field} {resource} {amount}")).collect::<Vec<String>>()
    };
    let lost: Vec<String> = lost("min", &min).into_iter().chain(lost("max", &max)).collect();
    if !lost.is_empty() {
        notes.push(format!("Dropped: {}. {}", lost.join(", "), counted.reason_for_loss(&lost.join(" "))));
    }
    let (name, namespace) = (&quota.metadata.name, quota.metadata.namespace.as_deref().unwrap_or("default"));
    Ok(Some(Draft {
        origin: origin.to_owned(),
        names: vec![name.clone(), format!("{namespace}-{name}")],
        namespaces: NamespaceSelection::Names(namespaces),
        models: Vec::new(),
        unit: counted.unit(),
        min: min_amount,
        max: max_amount,
        lend: None,
        weight: min_amount.0,
        mode,
        notes,
    }))
}

/// Returns what a quota with these resources counts: memory if it names memory, otherwise GPUs,
/// otherwise slices. Returns `None` if the quota names no GPU resource.
fn counted_resources(resources: &BTreeSet<&str>) -> Option<Counted> {
    if let Some(memory) = resources.iter().find(|resource| is_gpu_memory(resource)) {
        return Some(Counted::Memory((*memory).to_owned()));
    }
    if resources.contains(RESOURCE_GPU) {
        return Some(Counted::Gpus);
    }
    let sizes = resources.iter().filter_map(|resource| Some(((*resource).to_owned(), slice_gigabytes(resource)?)));
    let sizes: BTreeMap<String, u64> = sizes.collect();
    (!sizes.is_empty()).then_some(Counted::Slices(sizes))
}

fn is_gpu_memory(resource: &str) -> bool {
    resource.split_once('/').is_some_and(|(group, name)| name == GPU_MEMORY && NOS_GROUPS.contains(&group))
}

/// Returns the size of a slice in GB, from a name such as `nvidia.com/gpu-10gb` or
/// `nvidia.com/mig-1g.10gb`. Returns `None` for any other name.
fn slice_gigabytes(resource: &str) -> Option<u64> {
    let mig = resource.strip_prefix(RESOURCE_MIG_PREFIX).and_then(|profile| profile.split_once("g."));
    let size = match mig {
        Some((_, size)) => size,
        None => resource.strip_prefix(RESOURCE_SHARES_PREFIX)?,
    };
    size.strip_suffix("gb")?.parse().ok()
}

impl Counted {
    const fn unit(&self) -> Unit {
        match self {
            Self::Gpus => Unit::Gpus,
            Self::Memory(_) | Self::Slices(_) => Unit::Memory,
        }
    }

    fn counts(&self, resource: &str) -> bool {
        match self {
            Self::Memory(memory) => resource == memory,
            Self::Gpus => resource == RESOURCE_GPU,
            Self::Slices(sizes) => sizes.contains_key(resource),
        }
    }

    /// Returns the sum of the amounts that the quota counts. Returns `None` if `amounts` contains
    /// none of the counted resources.
    fn sum(&self, field: &str, amounts: &Amounts) -> Result<Option<Amount>, InvalidAmount> {
        let parse = |resource: &String, written: &Quantity| {
            let name = format!("{field} {resource}");
            match self {
                Self::Gpus => parse_gpus(&name, written),
                Self::Memory(_) => parse_gigabytes(&name, written, 1),
                Self::Slices(sizes) => {
                    parse_gigabytes(&name, written, sizes.get(resource).copied().unwrap_or_default())
                }
            }
        };
        let counted = amounts.iter().filter(|(resource, _)| self.counts(resource));
        let parsed: Vec<Amount> =
            counted.map(|(resource, written)| parse(resource, written)).collect::<Result<_, _>>()?;
        Ok((!parsed.is_empty()).then(|| parsed.into_iter().sum()))
    }

    fn reason_for_loss(&self, lost: &str) -> &'static str {
        let names_gpus = lost.split(' ').any(|word| word == RESOURCE_GPU || slice_gigabytes(word).is_some());
        match (self, names_gpus) {
            (_, false) => "A GpuQuota limits only GPUs. Limit other resources with a ResourceQuota.",
            (Self::Memory(_), true) => "A GpuQuota counts one thing, here the GPU memory of all GPU resources.",
            (Self::Gpus, true) => "A GpuQuota counts one thing, here GPUs. Slices count as parts of a GPU.",
            (Self::Slices(_), true) => "A GpuQuota counts one thing, here the memory of slices.",
        }
    }
}

/// Sets weights that have the same ratio as the guarantees, because Nos distributes unused amounts
/// in this ratio. Scales each unit separately: amounts of different units have no ratio.
fn set_weights(drafts: &mut [Draft], imported: &mut Import) {
    for unit in [Unit::Gpus, Unit::Memory] {
        let guarantees: Vec<u64> = drafts.iter().filter(|draft| draft.unit == unit).map(|draft| draft.weight).collect();
        let scaled = scale_weights(&guarantees);
        for (draft, weight) in drafts.iter_mut().filter(|draft| draft.unit == unit).zip(scaled.weights) {
            if draft.weight == 0 {
                let note = "Without a guarantee, a quota gets no unused amount from Nos. The minimum weight of a GpuQuota is 1.";
                draft.notes.push(note.to_owned());
            }
            draft.weight = u64::from(weight);
        }
        if !scaled.is_exact {
            imported
                .notes
                .push("Weights are rounded to 1 to 1000: the ratio of the guarantees is too large.".to_owned());
        }
    }
}
