//! The content of `cleave quotas`. `--output json` prints these fields, except `is_malformed` and a
//! quota's `unnamed`.
use std::collections::BTreeMap;

use cleave_api::GpuQuota;
use cleave_api::gpuquota::{QuotaGuarantee, QuotaMode, QuotaPods, QuotaUnit, QuotaUnnamed, QuotaWaiting};
use cleave_api::names::{CONDITION_ENFORCED, CONDITION_GUARANTEED, CONDITION_READY};
use cleave_plan::Quantity;
use cleave_plan::quota::Amount;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt as _;
use kube::core::DeserializeGuard;
use serde::Serialize;

use crate::condition::ConditionValue;

/// The quotas of a cluster.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct QuotasReport {
    /// Quotas, sorted by pool and name.
    pub quotas: Vec<Quota>,
    /// Pools of GPUs with quotas.
    pub pools: Vec<Pool>,
}

/// A quota. Amounts are numbers of GPUs, or of memory such as `40Gi`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Quota {
    /// Name of the quota.
    pub name: String,
    /// Models of the pool. Empty means the GPUs that no other quota names.
    pub models: Vec<String>,
    /// Namespaces of the quota, if the quota names its namespaces.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub namespaces: Vec<String>,
    /// Labels that select the namespaces of the quota, if the quota selects its namespaces by
    /// labels.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub namespace_labels: BTreeMap<String, String>,
    /// What amounts count.
    pub unit: QuotaUnit,
    /// Guaranteed amount.
    pub min: String,
    /// Maximum amount.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<String>,
    /// Part of the guarantee that other quotas may borrow. `None` means all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lend: Option<String>,
    /// Weight of the quota.
    pub weight: u32,
    /// What is guaranteed.
    pub guarantee: QuotaGuarantee,
    /// Whether the quota is enforced.
    pub mode: QuotaMode,
    /// Amount that pods use, except pods that are being deleted.
    pub used: String,
    /// Amount that pods use, including pods that are being deleted.
    pub held: String,
    /// Amount that pods within the guarantee use.
    pub in_quota: String,
    /// Amount that pods use beyond the guarantee.
    pub borrowed: String,
    /// Unused part of the guarantee that other quotas may borrow.
    pub lent: String,
    /// Amount that the quota uses beyond its guarantee, divided by its weight.
    pub share: String,
    /// Number of GPUs that the quota owns. `None` unless whole GPUs are guaranteed (`guarantee:
    /// Cells`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cells: Option<u32>,
    /// Numbers of pods.
    pub pods: QuotaPods,
    /// Pods that wait.
    pub waiting: QuotaWaiting,
    /// Whether the quota counts all of its namespaces.
    pub ready: ConditionValue,
    /// Whether the guarantee holds. `None` if the operator does not report the condition.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guaranteed: Option<ConditionValue>,
    /// Whether the operator enforces the quota. `None` if the operator does not report the
    /// condition.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enforced: Option<ConditionValue>,
    /// Whether the status describes an older version of the spec.
    pub outdated: bool,
    /// Whether the object could not be parsed. If true, the amounts are unknown.
    #[serde(skip)]
    pub is_malformed: bool,
    /// What pods of namespaces without a quota use of the pool. Set only on the oldest quota of the
    /// pool.
    #[serde(skip)]
    pub unnamed: Option<QuotaUnnamed>,
}

/// The totals of all quotas of a pool.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Pool {
    /// Models of the pool. Empty means the GPUs that no quota names.
    pub models: Vec<String>,
    /// What amounts count.
    pub unit: QuotaUnit,
    /// Sum of the guarantees.
    pub guaranteed: String,
    /// Sum of the amounts that quotas use.
    pub used: String,
    /// Sum of the amounts that quotas borrow.
    pub borrowed: String,
    /// Sum of the amounts that quotas lend.
    pub lent: String,
    /// Number of pods that wait.
    pub waiting: u32,
    /// What pods of namespaces without a quota use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unnamed: Option<QuotaUnnamed>,
}

impl QuotasReport {
    /// Builds the report. Includes malformed objects, and reports them as malformed.
    pub fn new(quotas: Vec<DeserializeGuard<GpuQuota>>) -> Self {
        let mut quotas: Vec<Quota> = quotas.into_iter().map(Quota::new).collect();
        quotas.sort_by(|a, b| (&a.models, &a.name).cmp(&(&b.models, &b.name)));
        let mut by_pool: BTreeMap<(Vec<String>, bool), Vec<&Quota>> = BTreeMap::new();
        for quota in quotas.iter().filter(|quota| !quota.is_malformed) {
            by_pool.entry((quota.models.clone(), quota.unit == QuotaUnit::Memory)).or_default().push(quota);
        }
        let pools = by_pool.into_iter().map(|((models, _), quotas)| Pool::new(models, &quotas)).collect();
        Self { quotas, pools }
    }
}

impl Quota {
    fn new(object: DeserializeGuard<GpuQuota>) -> Self {
        let name = object.name_any();
        let (object, malformed) = match object.0 {
            Ok(object) => (object, None),
            Err(invalid) => (GpuQuota::new(&name, cleave_api::GpuQuotaSpec::default()), Some(invalid.error)),
        };
        let generation = object.metadata.generation.unwrap_or_default();
        let has_status = object.status.is_some();
        let (spec, status) = (object.spec, object.status.unwrap_or_default());
        let condition = |type_: &str| status.conditions.iter().find(|condition: &&Condition| condition.type_ == type_);
        let unknown = || ConditionValue::new("Unknown", "NotReported", "the operator has not evaluated the quota yet");
        let is_malformed = malformed.is_some();
        let ready = match malformed {
            Some(error) => ConditionValue::new("False", "Malformed", &error),
            None => condition(CONDITION_READY).map_or_else(unknown, ConditionValue::of),
        };
        Self {
            name,
            models: spec.gpus.map(|gpus| gpus.models).unwrap_or_default(),
            namespaces: spec.namespaces.unwrap_or_default(),
            namespace_labels: spec.namespace_selector.map(|selector| selector.match_labels).unwrap_or_default(),
            unit: spec.unit,
            min: spec.min.unwrap_or_else(|| "0".to_owned()),
            max: spec.max,
            lend: spec.lend,
            weight: spec.weight,
            guarantee: spec.guarantee,
            mode: spec.mode,
            ready,
            guaranteed: condition(CONDITION_GUARANTEED).map(ConditionValue::of),
            enforced: condition(CONDITION_ENFORCED).map(ConditionValue::of),
            is_malformed,
            unnamed: status.unnamed,
            outdated: has_status && status.observed_generation < generation,
            used: status.used,
            held: status.held,
            in_quota: status.in_quota,
            borrowed: status.borrowed,
            lent: status.lent,
            share: status.share,
            cells: status.cells,
            pods: status.pods,
            waiting: status.waiting,
        }
    }
}

impl Pool {
    fn new(models: Vec<String>, quotas: &[&Quota]) -> Self {
        let unit = quotas.first().map(|quota| quota.unit).unwrap_or_default();
        let sum = |field: fn(&Quota) -> &String| sum_text(unit, quotas.iter().map(|quota| field(quota)));
        Self {
            models,
            unit,
            guaranteed: sum(|quota| &quota.min),
            used: sum(|quota| &quota.used),
            borrowed: sum(|quota| &quota.borrowed),
            lent: sum(|quota| &quota.lent),
            waiting: quotas.iter().map(|quota| quota.waiting.pods).fold(0, u32::saturating_add),
            unnamed: quotas.iter().find_map(|quota| quota.unnamed.clone()),
        }
    }
}

/// Returns the sum of amounts. A text that is not an amount counts as 0.
fn sum_text<'a>(unit: QuotaUnit, amounts: impl Iterator<Item = &'a String>) -> String {
    let milli = amounts.map(|text| Quantity::new(text).milli().unwrap_or_default()).fold(0, u64::saturating_add);
    match unit {
        QuotaUnit::Gpus => Amount(milli.saturating_mul(1000)).to_string(),
        QuotaUnit::Memory => {
            let mib = milli / 1000 / (1 << 20);
            if mib.is_multiple_of(1 << 10) { format!("{}Gi", mib >> 10) } else { format!("{mib}Mi") }
        }
    }
}
