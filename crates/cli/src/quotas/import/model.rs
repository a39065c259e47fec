//! Drafts of quotas, and the result of the import.
use cleave_api::GpuQuota;
use cleave_api::gpuquota::{QuotaMode, QuotaNamespaceSelector};
use cleave_plan::quota::{Amount, Unit};

/// The result of an import.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Import {
    /// The `GpuQuota`s: first those of `ElasticQuota`s, then of `CompositeElasticQuota`s, then of
    /// `ClusterQueue`s.
    pub quotas: Vec<ImportedQuota>,
    /// Objects that have no counterpart because they limit no GPUs.
    pub skipped: Vec<Refusal>,
    /// Objects that could not be imported.
    pub refused: Vec<Refusal>,
    /// Differences that concern all quotas.
    pub notes: Vec<String>,
}

/// A `GpuQuota`, and notes about differences from the imported object.
#[derive(Debug, Clone, PartialEq)]
pub struct ImportedQuota {
    /// Kind and name of the imported object.
    pub origin: String,
    /// The quota.
    pub quota: GpuQuota,
    /// Notes about the conversion, for example about settings that have no counterpart.
    pub notes: Vec<String>,
}

/// An object that was not imported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Kind and name of the object.
    pub origin: String,
    /// Why the object was not imported.
    pub reason: String,
}

/// A quota before the import knows the names, weights and units of all quotas.
#[derive(Debug, Clone)]
pub(super) struct Draft {
    pub(super) origin: String,
    /// Possible names of the quota, the preferred name first.
    pub(super) names: Vec<String>,
    pub(super) namespaces: NamespaceSelection,
    /// Models of the pool. Empty if the models are not known.
    pub(super) models: Vec<String>,
    pub(super) unit: Unit,
    pub(super) min: Amount,
    pub(super) max: Option<Amount>,
    pub(super) lend: Option<Amount>,
    /// The weight before scaling. The final weights have the same ratio as these numbers.
    pub(super) weight: u64,
    pub(super) mode: QuotaMode,
    pub(super) notes: Vec<String>,
}

/// The namespaces of a draft.
#[derive(Debug, Clone)]
pub(super) enum NamespaceSelection {
    Names(Vec<String>),
    Labels(QuotaNamespaceSelector),
}
