//! Names, checks and builds the quotas.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::gpuquota::{QuotaGuarantee, QuotaPool, QuotaUnit};
use cleave_api::{GpuQuota, GpuQuotaSpec};
use cleave_plan::Quantity;
use cleave_plan::ledger::Moment;
use cleave_plan::quota::{Amount, Guarantee, Mode, Namespaces, Quota, QuotaSpec, Unit};

use super::amounts::amount_text;
use super::model::{Draft, Import, ImportedQuota, NamespaceSelection, Refusal};

/// Maximum number of namespaces of a quota.
const MAX_NAMESPACES: usize = 256;
/// Maximum length of a namespace's name.
const MAX_NAMESPACE_LENGTH: usize = 63;
/// Maximum length of a quota's name.
const MAX_NAME_LENGTH: usize = 253;

/// The names, namespaces and units of the quotas that were built before.
#[derive(Default)]
struct EarlierQuotas {
    names: BTreeSet<String>,
    /// Owner of each namespace in each pool.
    owners: BTreeMap<(Vec<String>, String), String>,
    /// Unit of each pool, and the quota that set it.
    units: BTreeMap<Vec<String>, (Unit, String)>,
}

/// Builds a quota from each draft and adds it to `imported`. Adds the reason if a draft is refused.
pub(super) fn finish(drafts: Vec<Draft>, imported: &mut Import) {
    let mut earlier = EarlierQuotas::default();
    let mut count: BTreeMap<String, usize> = BTreeMap::new();
    for draft in &drafts {
        *count.entry(draft.names.first().cloned().unwrap_or_default()).or_default() += 1;
    }
    for draft in drafts {
        let is_unique = |name: &&String| count.get(*name).is_none_or(|&count| count == 1);
        let name = draft.names.iter().find(is_unique).or(draft.names.last()).cloned().unwrap_or_default();
        match earlier.check(&draft, &name).and_then(|()| build(&draft, &name)) {
            Ok(quota) => {
                earlier.add(&draft, name);
                imported.quotas.push(ImportedQuota { origin: draft.origin, quota, notes: draft.notes });
            }
            Err(reason) => imported.refused.push(Refusal { origin: draft.origin, reason }),
        }
    }
}

impl EarlierQuotas {
    fn check(&self, draft: &Draft, name: &str) -> Result<(), String> {
        if self.names.contains(name) {
            return Err(format!("another quota is named {name}. Rename one of the two"));
        }
        if let Some((unit, other)) = self.units.get(&draft.models)
            && *unit != draft.unit
        {
            let words = |unit: Unit| if unit == Unit::Gpus { "GPUs" } else { "GPU memory" };
            return Err(format!(
                "counts {}, and {other} counts {} of the same pool. All quotas of a pool must count the same resource",
                words(draft.unit),
                words(*unit)
            ));
        }
        let NamespaceSelection::Names(namespaces) = &draft.namespaces else { return Ok(()) };
        let owner = |namespace: &String| self.owners.get(&(draft.models.clone(), namespace.clone()));
        match namespaces.iter().find_map(|namespace| Some((namespace, owner(namespace)?))) {
            Some((namespace, owner)) => Err(format!(
                "namespace {namespace} is in {owner} too. Cleave counts all pods of a namespace in one quota of a pool: add the amounts of both to one quota"
            )),
            None => Ok(()),
        }
    }

    fn add(&mut self, draft: &Draft, name: String) {
        if let NamespaceSelection::Names(namespaces) = &draft.namespaces {
            let key = |namespace: &String| ((draft.models.clone(), namespace.clone()), draft.origin.clone());
            self.owners.extend(namespaces.iter().map(key));
        }
        self.units.entry(draft.models.clone()).or_insert((draft.unit, draft.origin.clone()));
        self.names.insert(name);
    }
}

/// Builds the quota, and checks it against the operator's rules.
fn build(draft: &Draft, name: &str) -> Result<GpuQuota, String> {
    if !is_dns_name(name, MAX_NAME_LENGTH, true) {
        return Err(format!("{name:?} is not a valid name of a Kubernetes object"));
    }
    let text = |amount: Amount| amount_text(amount, draft.unit);
    let min = (draft.min > Amount::ZERO).then(|| text(draft.min));
    let (max, lend) = (draft.max.map(text), draft.lend.map(text));
    let weight = u32::try_from(draft.weight).unwrap_or(u32::MAX);
    let (namespaces, selector) = match &draft.namespaces {
        NamespaceSelection::Names(names) => (Some(names.clone()), None),
        NamespaceSelection::Labels(labels) => (None, Some(labels.clone())),
    };
    if let Some(names) = &namespaces {
        if names.len() > MAX_NAMESPACES {
            return Err(format!(
                "has {} namespaces, but a GpuQuota has at most {MAX_NAMESPACES}. Split the quota, or select the namespaces by label",
                names.len()
            ));
        }
        if let Some(bad) = names.iter().find(|name| !is_dns_name(name, MAX_NAMESPACE_LENGTH, false)) {
            return Err(format!("{bad:?} is not a valid name of a namespace"));
        }
    }
    let quantity = |text: &Option<String>| text.as_deref().map(Quantity::new);
    let spec = QuotaSpec {
        name: name.to_owned(),
        created: Moment(0),
        namespaces: match (&namespaces, &selector) {
            (_, Some(selector)) => Namespaces::WithLabels(selector.match_labels.clone()),
            (names, None) => Namespaces::Names(names.iter().flatten().cloned().collect()),
        },
        models: draft.models.iter().cloned().collect(),
        unit: draft.unit,
        min: quantity(&min),
        max: quantity(&max),
        lend: quantity(&lend),
        weight: Some(i64::from(weight)),
        guarantee: Guarantee::Count,
        mode: Mode::Enforce,
    };
    Quota::parse(&spec).map_err(|invalid| invalid.to_string())?;
    Ok(GpuQuota::new(
        name,
        GpuQuotaSpec {
            namespaces,
            namespace_selector: selector,
            gpus: (!draft.models.is_empty()).then(|| QuotaPool { models: draft.models.clone() }),
            unit: if draft.unit == Unit::Gpus { QuotaUnit::Gpus } else { QuotaUnit::Memory },
            min,
            max,
            lend,
            weight,
            guarantee: QuotaGuarantee::Count,
            mode: draft.mode,
        },
    ))
}

/// Returns whether a text is valid for the name of a Kubernetes object: parts of lowercase letters,
/// digits and hyphens that start and end with a letter or a digit. With `with_dots`, dots separate
/// several parts.
fn is_dns_name(name: &str, longest: usize, with_dots: bool) -> bool {
    let is_edge = |byte: Option<&u8>| byte.is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_part = |part: &str| {
        let bytes = part.as_bytes();
        is_edge(bytes.first()) && is_edge(bytes.last()) && part.bytes().all(is_inner)
    };
    name.len() <= longest && if with_dots { name.split('.').all(is_part) } else { is_part(name) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_api_server_accepts_names_that_the_import_accepts() {
        for name in ["a", "team-a", "a.b", "0.x-1"] {
            assert!(is_dns_name(name, 253, true), "{name}");
        }
        for name in ["", "-a", "a-", "a..b", ".a", "a.", "a.-b", "A", "a_b", "ä"] {
            assert!(!is_dns_name(name, 253, true), "{name}");
        }
        assert!(!is_dns_name("a.b", 63, false) && !is_dns_name("aaaa", 3, true));
    }
}
