//! Finds the valid quotas of each pool of GPUs, and the problems of quotas.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::GpuQuota;
use cleave_api::gpuquota::{QuotaGuarantee, QuotaMode, QuotaUnit};
use cleave_api::names::{ALLOW_LABEL, ALLOW_QUOTA};
use cleave_plan::Quantity;
use cleave_plan::ledger::Moment;
use cleave_plan::quota::{Guarantee, Mode, Namespaces, Owner, Quota, QuotaSpec, Unit};

use crate::policies::select::matches_model;

/// How quotas treat pods of namespaces without a quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Unnamed {
    /// The pods borrow, like pods of a quota without a guarantee.
    #[default]
    Borrow,
    /// Quotas neither delay nor evict the pods.
    Exempt,
}

impl std::str::FromStr for Unnamed {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "Borrow" => Ok(Self::Borrow),
            "Exempt" => Ok(Self::Exempt),
            _ => Err("the value must be Borrow or Exempt"),
        }
    }
}

/// Why a quota, or a part of a quota, is not in effect.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The spec is invalid.
    #[error("{0}")]
    Invalid(String),
    /// The operator cannot read the quota, but knows an earlier version. Contains the reason.
    #[error("This version of Cleave cannot read the quota: {0}. The last version that it could read remains in effect")]
    Malformed(String),
    /// The operator cannot read the quota, and knows no earlier version. Contains the reason.
    #[error(
        "This version of Cleave cannot read the quota: {0}. Until it can, the operator evicts no pods of one quota for pods of another"
    )]
    Unknown(String),
    /// A namespace belongs to another quota of the same pool, which is older or names the
    /// namespace.
    #[error(
        "namespace {namespace} belongs to quota {quota} of the same GPUs, which is older or names the namespace. This quota does not count the namespace"
    )]
    NamespaceTaken {
        /// A namespace.
        namespace: String,
        /// The quota that counts the namespace.
        quota: String,
    },
    /// Some GPUs are of the pool of an older quota.
    #[error("GPUs of the model {product} count for the quota {quota}, which is older: this quota does not count them")]
    ModelTaken {
        /// Product name of the GPUs.
        product: String,
        /// The oldest quota of their pool.
        quota: String,
    },
    /// The written models overlap with those of an older quota.
    #[error(
        "the models overlap with the models of the older quota {0}. Name the same models, or models that do not overlap"
    )]
    PoolOverlaps(String),
    /// An older quota of the same pool has another unit.
    #[error("the older quota {0} of the same GPUs has another unit. Use the same unit in all quotas of these GPUs")]
    UnitDiffers(String),
}

impl Problem {
    /// Returns the reason of the condition `Ready`.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Invalid(_) => "Invalid",
            Self::Malformed(_) | Self::Unknown(_) => "Malformed",
            Self::NamespaceTaken { .. } => "NamespaceTaken",
            Self::ModelTaken { .. } => "ModelTaken",
            Self::PoolOverlaps(_) => "PoolOverlaps",
            Self::UnitDiffers(_) => "UnitDiffers",
        }
    }
}

/// The quotas of one pool of GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    /// Models of the pool. If empty, the pool consists of the GPUs that no other pool names.
    pub models: BTreeSet<String>,
    /// What the quotas count.
    pub unit: Unit,
    /// The valid quotas by name.
    pub quotas: BTreeMap<String, Quota>,
    /// The quota of each namespace.
    owners: BTreeMap<String, String>,
    /// The oldest quota of the pool.
    first: String,
}

/// All valid quotas.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Quotas {
    /// Pools of GPUs.
    pub pools: Vec<Pool>,
    /// The problems of quotas, by the name of the quota.
    pub problems: BTreeMap<String, Problem>,
    /// Namespaces whose pods quotas neither delay nor evict.
    exempt: BTreeSet<String>,
    unnamed: Unnamed,
}

/// A namespace and its labels.
pub type LabelledNamespace<'a> = (&'a str, &'a BTreeMap<String, String>);

impl Pool {
    /// Returns the name of the oldest quota of the pool.
    pub fn oldest(&self) -> &str {
        &self.first
    }

    /// Returns whether the models name a GPU with this product name.
    fn names(&self, product: &str) -> bool {
        self.models.iter().any(|model| matches_model(model, product))
    }
}

impl Quotas {
    /// Returns what pods of namespaces without a quota may do.
    pub const fn unnamed(&self) -> Unnamed {
        self.unnamed
    }

    /// Validates quotas. `products` are the product names of the cluster's GPUs. Nodes report these
    /// names, so the names never decide whether a quota is valid. GPUs that two pools name belong
    /// to the older pool.
    pub fn new<'a>(
        objects: impl Iterator<Item = &'a GpuQuota>,
        namespaces: &[LabelledNamespace<'_>],
        products: &BTreeSet<String>,
        unnamed: Unnamed,
    ) -> Self {
        let mut specs: Vec<QuotaSpec> = objects.map(quota_spec).collect();
        specs.sort_by(|one, other| (one.created, &one.name).cmp(&(other.created, &other.name)));
        let is_exempt = |labels: &BTreeMap<String, String>| {
            labels.get(ALLOW_LABEL).is_some_and(|words| words.split('.').any(|word| word == ALLOW_QUOTA))
        };
        let exempt = namespaces.iter().filter(|(_, labels)| is_exempt(labels)).map(|(name, _)| (*name).to_owned());
        let mut quotas = Self { pools: Vec::new(), problems: BTreeMap::new(), exempt: exempt.collect(), unnamed };
        let mut valid: Vec<(usize, &QuotaSpec)> = Vec::new();
        for spec in &specs {
            match quotas.add(spec) {
                Ok(pool) => valid.push((pool, spec)),
                Err(problem) => drop(quotas.problems.insert(spec.name.clone(), problem)),
            }
        }
        // Quotas that name a namespace come before quotas that select it by its labels.
        valid.sort_by_key(|(_, spec)| matches!(spec.namespaces, Namespaces::WithLabels(_)));
        for (pool, spec) in valid {
            quotas.claim_namespaces(pool, spec, namespaces);
        }
        products.iter().for_each(|product| quotas.report_shared_model(product));
        quotas
    }

    /// Adds a quota to its pool. Returns the index of the pool.
    fn add(&mut self, spec: &QuotaSpec) -> Result<usize, Problem> {
        let quota = Quota::parse(spec).map_err(|error| Problem::Invalid(error.to_string()))?;
        if let Some(at) = self.pools.iter().position(|pool| pool.models == spec.models) {
            let pool = &mut self.pools[at];
            if pool.unit != spec.unit {
                return Err(Problem::UnitDiffers(pool.first.clone()));
            }
            pool.quotas.insert(spec.name.clone(), quota);
            return Ok(at);
        }
        if let Some(pool) = self.pools.iter().find(|pool| models_overlap(&pool.models, &spec.models)) {
            return Err(Problem::PoolOverlaps(pool.first.clone()));
        }
        self.pools.push(Pool {
            models: spec.models.clone(),
            unit: spec.unit,
            quotas: BTreeMap::from([(spec.name.clone(), quota)]),
            owners: BTreeMap::new(),
            first: spec.name.clone(),
        });
        Ok(self.pools.len() - 1)
    }

    /// Reports GPUs that several pools name, at the quotas that do not count them.
    fn report_shared_model(&mut self, product: &str) {
        let mut named = self.pools.iter().filter(|pool| pool.names(product));
        let Some(oldest) = named.next() else { return };
        for name in named.flat_map(|pool| pool.quotas.keys()) {
            let problem = Problem::ModelTaken { product: product.to_owned(), quota: oldest.first.clone() };
            self.problems.entry(name.clone()).or_insert(problem);
        }
    }

    fn claim_namespaces(&mut self, pool: usize, spec: &QuotaSpec, namespaces: &[LabelledNamespace<'_>]) {
        let claimed: Vec<String> = match &spec.namespaces {
            Namespaces::Names(names) => names.iter().cloned().collect(),
            Namespaces::WithLabels(wanted) => {
                let has_labels = |labels: &BTreeMap<String, String>| {
                    wanted.iter().all(|(key, value)| labels.get(key) == Some(value))
                };
                namespaces.iter().filter(|(_, labels)| has_labels(labels)).map(|(name, _)| (*name).to_owned()).collect()
            }
        };
        for namespace in claimed {
            let owner = self.pools[pool].owners.entry(namespace.clone()).or_insert_with(|| spec.name.clone());
            if *owner != spec.name {
                let problem = Problem::NamespaceTaken { namespace, quota: owner.clone() };
                self.problems.entry(spec.name.clone()).or_insert(problem);
            }
        }
    }

    /// Returns the pool of a GPU with this product name.
    pub fn pool_of(&self, product: &str) -> Option<usize> {
        self.pools
            .iter()
            .position(|pool| pool.names(product))
            .or_else(|| self.pools.iter().position(|pool| pool.models.is_empty()))
    }

    /// Returns the owner that pods of a namespace are charged to in a pool.
    pub fn owner(&self, pool: usize, namespace: &str) -> Owner {
        match self.pools[pool].owners.get(namespace) {
            _ if self.exempt.contains(namespace) => Owner::Outside,
            Some(quota) => Owner::Quota(quota.clone()),
            None if self.unnamed == Unnamed::Exempt => Owner::Outside,
            None => Owner::Unnamed,
        }
    }

    /// Returns whether a quota of the pool is enforced. Otherwise, the quotas only count the use.
    pub fn is_enforced(&self, pool: usize) -> bool {
        self.pools[pool].quotas.values().any(Quota::is_enforced)
    }
}

/// Returns whether the written models of two pools overlap: a model is part of another.
fn models_overlap(one: &BTreeSet<String>, other: &BTreeSet<String>) -> bool {
    let has = |models: &BTreeSet<String>, product: &str| models.iter().any(|model| matches_model(model, product));
    one.iter().any(|model| has(other, model)) || other.iter().any(|model| has(one, model))
}

fn quota_spec(object: &GpuQuota) -> QuotaSpec {
    let spec = &object.spec;
    let created = object.metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second());
    let namespaces = match (&spec.namespaces, &spec.namespace_selector) {
        (Some(names), None) => Namespaces::Names(names.iter().cloned().collect()),
        (None, Some(selector)) => Namespaces::WithLabels(selector.match_labels.clone()),
        // An older CRD accepted both fields, or neither.
        _ => Namespaces::Names(BTreeSet::new()),
    };
    let quantity = |written: &Option<String>| written.as_deref().map(Quantity::new);
    QuotaSpec {
        name: object.metadata.name.clone().unwrap_or_default(),
        created: Moment(u64::try_from(created).unwrap_or(0)),
        namespaces,
        models: spec.gpus.iter().flat_map(|pool| &pool.models).map(|model| model.trim().to_lowercase()).collect(),
        unit: match spec.unit {
            QuotaUnit::Gpus => Unit::Gpus,
            QuotaUnit::Memory => Unit::Memory,
        },
        min: quantity(&spec.min),
        max: quantity(&spec.max),
        lend: quantity(&spec.lend),
        weight: Some(spec.weight.into()),
        guarantee: match spec.guarantee {
            QuotaGuarantee::Count => Guarantee::Count,
            QuotaGuarantee::Cells => Guarantee::Cells,
        },
        mode: match spec.mode {
            QuotaMode::Enforce => Mode::Enforce,
            QuotaMode::Count => Mode::Count,
        },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn quota(name: &str, created: &str, spec: Value) -> GpuQuota {
        let metadata = json!({"name": name, "creationTimestamp": created});
        let mut object = json!({"apiVersion": "cleave.dev/v1alpha1", "kind": "GpuQuota", "metadata": metadata});
        object["spec"] = spec;
        serde_json::from_value(object).unwrap()
    }

    fn older_quota(name: &str, spec: Value) -> GpuQuota {
        quota(name, "2026-01-01T00:00:00Z", spec)
    }

    fn newer_quota(name: &str, spec: Value) -> GpuQuota {
        quota(name, "2026-02-01T00:00:00Z", spec)
    }

    fn validate_quotas(quotas: &[GpuQuota]) -> Quotas {
        let labels = BTreeMap::from([("team".to_owned(), "a".to_owned())]);
        let exempt = BTreeMap::from([(ALLOW_LABEL.to_owned(), "placement.quota".to_owned())]);
        let none = BTreeMap::new();
        let namespaces = [("a-train", &labels), ("b", &none), ("system", &exempt)];
        let products = BTreeSet::from(["NVIDIA H100 80GB HBM3".to_owned(), "NVIDIA L4".to_owned()]);
        Quotas::new(quotas.iter(), &namespaces, &products, Unnamed::Borrow)
    }

    fn reasons(quotas: &Quotas) -> Vec<(&str, &'static str)> {
        quotas.problems.iter().map(|(name, problem)| (name.as_str(), problem.reason())).collect()
    }

    #[test]
    fn a_namespace_belongs_to_the_quota_that_names_it_or_to_the_older_quota() {
        let quotas = validate_quotas(&[
            newer_quota("young", json!({"namespaces": ["b", "c"], "min": "1"})),
            older_quota("selector", json!({"namespaceSelector": {"matchLabels": {"team": "a"}}})),
            newer_quota("named", json!({"namespaces": ["a-train"]})),
            older_quota("old", json!({"namespaces": ["b"]})),
        ]);
        assert_eq!(reasons(&quotas), [("selector", "NamespaceTaken"), ("young", "NamespaceTaken")]);
        for (namespace, owner) in [("a-train", "named"), ("b", "old"), ("c", "young")] {
            assert_eq!(quotas.owner(0, namespace), Owner::Quota(owner.to_owned()), "{namespace}");
        }
        assert_eq!((quotas.owner(0, "other"), quotas.owner(0, "system")), (Owner::Unnamed, Owner::Outside));
    }

    #[test]
    fn quotas_of_a_pool_have_one_unit_and_pools_do_not_overlap() {
        let quotas = validate_quotas(&[
            older_quota("a", json!({"namespaces": ["a"], "gpus": {"models": ["H100"]}, "min": "2"})),
            newer_quota(
                "differs",
                json!({"namespaces": ["b"], "gpus": {"models": ["h100"]}, "unit": "Memory", "min": "4Gi"}),
            ),
            newer_quota("overlaps", json!({"namespaces": ["c"], "gpus": {"models": ["NVIDIA H100"]}})),
            newer_quota("rest", json!({"namespaces": ["d"]})),
        ]);
        assert_eq!(reasons(&quotas), [("differs", "UnitDiffers"), ("overlaps", "PoolOverlaps")]);
        assert_eq!((quotas.pool_of("NVIDIA H100 80GB HBM3"), quotas.pool_of("NVIDIA L4")), (Some(0), Some(1)));
        assert_eq!(quotas.owner(0, "b"), Owner::Unnamed, "the pods of a quota that is not in effect borrow");
    }

    #[test]
    fn gpus_that_two_pools_name_are_of_the_older_pool_and_both_stay_valid() {
        let quotas = validate_quotas(&[
            newer_quota("young", json!({"namespaces": ["a"], "gpus": {"models": ["80GB"]}, "min": "1"})),
            older_quota("old", json!({"namespaces": ["b"], "gpus": {"models": ["H100"]}, "min": "1"})),
            newer_quota("other", json!({"namespaces": ["c"], "gpus": {"models": ["L4"]}, "min": "1"})),
        ]);
        assert_eq!(reasons(&quotas), [("young", "ModelTaken")]);
        assert!(quotas.problems["young"].to_string().contains("count for the quota old"));
        let pool = |product: &str| quotas.pool_of(product);
        assert_eq!((pool("NVIDIA H100 80GB HBM3"), pool("NVIDIA L4")), (Some(0), Some(1)));
        assert_eq!(pool("NVIDIA A100 80GB PCIe"), Some(2), "the younger pool keeps its other GPUs");
        assert_eq!(quotas.owner(2, "a"), Owner::Quota("young".to_owned()));
    }

    #[test]
    fn an_invalid_quota_is_ignored_and_affects_no_other_quota() {
        let namespaces = json!(["a"]);
        for spec in [
            json!({"namespaces": namespaces, "min": "5", "max": "4"}),
            json!({"namespaces": namespaces, "min": "1", "lend": "2"}),
            json!({"namespaces": namespaces, "min": "-1"}),
            json!({"namespaces": namespaces, "min": "1e18"}),
            json!({"namespaces": namespaces, "weight": 0}),
            json!({"namespaces": []}),
            json!({}),
            json!({"namespaces": namespaces, "guarantee": "Cells", "min": "2500m"}),
            json!({"namespaces": namespaces, "guarantee": "Cells", "unit": "Memory", "min": "4Gi"}),
        ] {
            let quotas =
                validate_quotas(&[older_quota("bad", spec.clone()), newer_quota("good", json!({"namespaces": ["a"]}))]);
            assert_eq!(reasons(&quotas), [("bad", "Invalid")], "{spec}");
            assert_eq!(quotas.owner(0, "a"), Owner::Quota("good".to_owned()), "{spec}");
        }
    }
}
