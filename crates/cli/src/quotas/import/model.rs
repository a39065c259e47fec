//! Quotas on their way from the imported objects to `GpuQuota`s, and the result of the import.
use cleave_api::GpuQuota;
use cleave_api::gpuquota::{QuotaMode, QuotaNamespaceSelector};
use cleave_plan::quota::{Amount, Unit};

/// The result of an import.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Import {
    /// The `GpuQuota`s, in the order of the input.
    pub quotas: Vec<ImportedQuota>,
    /// Objects that limit no GPUs, and so have no counterpart.
    pub skipped: Vec<Refusal>,
    /// Objects that could not be imported.
    pub refused: Vec<Refusal>,
    /// Differences that concern all quotas.
    pub notes: Vec<String>,
}

/// A `GpuQuota`, and what was lost on the way.
#[derive(Debug, Clone, PartialEq)]
pub struct ImportedQuota {
    /// Kind and name of the imported object.
    pub origin: String,
    /// The quota.
    pub quota: GpuQuota,
    /// What has no counterpart, or differs, one sentence each.
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

/// A quota before names, weights and units of all quotas are known.
#[derive(Debug, Clone)]
pub(super) struct Draft {
    pub(super) origin: String,
    /// Names of the quota, the preferred one first.
    pub(super) names: Vec<String>,
    pub(super) namespaces: Selection,
    /// Models of the pool. Empty if the pool is not known.
    pub(super) models: Vec<String>,
    pub(super) unit: Unit,
    pub(super) min: Amount,
    pub(super) max: Option<Amount>,
    pub(super) lend: Option<Amount>,
    /// A number in whose ratio the weights are.
    pub(super) weight: u64,
    pub(super) mode: QuotaMode,
    pub(super) notes: Vec<String>,
}

/// The namespaces of a draft.
#[derive(Debug, Clone)]
pub(super) enum Selection {
    Names(Vec<String>),
    Labels(QuotaNamespaceSelector),
}
