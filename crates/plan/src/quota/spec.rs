//! Parses quotas: from the written amounts to validated limits.
use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::amount::{Amount, GPU};
use crate::Quantity;
use crate::ledger::Moment;

/// What a quota counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub enum Unit {
    /// GPUs.
    #[default]
    Gpus,
    /// GPU memory.
    Memory,
}

/// What a quota guarantees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Guarantee {
    /// The quota guarantees an amount, which can be on any GPUs. Fragmentation can break the
    /// guarantee.
    #[default]
    Count,
    /// The quota guarantees whole GPUs, which its pods fill.
    Cells,
}

/// Whether a quota is enforced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Mode {
    /// The operator delays and evicts pods.
    #[default]
    Enforce,
    /// The operator counts and reports usage, but neither delays nor evicts pods.
    Count,
}

/// The namespaces of a quota.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Namespaces {
    /// Namespaces by name.
    Names(BTreeSet<String>),
    /// Namespaces with all of these labels.
    WithLabels(BTreeMap<String, String>),
}

/// A quota as written in its `GpuQuota`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuotaSpec {
    /// Name of the quota.
    pub name: String,
    /// Creation time of the quota. If two quotas conflict, the older one applies.
    pub created: Moment,
    /// The namespaces whose pods are counted.
    pub namespaces: Namespaces,
    /// Models of the GPUs of the quota's pool. Empty means the GPUs that no quota names.
    pub models: BTreeSet<String>,
    /// What `min`, `max` and `lend` count.
    pub unit: Unit,
    /// The guaranteed amount. `None` means 0.
    pub min: Option<Quantity>,
    /// The maximum. `None` means no maximum.
    pub max: Option<Quantity>,
    /// Part of `min` that others may use while it is unused. `None` means all of `min`.
    pub lend: Option<Quantity>,
    /// Weight of the quota when quotas share unused GPUs. `None` means 1.
    pub weight: Option<i64>,
    /// What is guaranteed.
    pub guarantee: Guarantee,
    /// Whether the quota is enforced.
    pub mode: Mode,
}

/// The limits of a quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quota {
    min: Amount,
    max: Option<Amount>,
    lend: Option<Amount>,
    weight: u32,
    guarantee: Guarantee,
    mode: Mode,
}

/// Why a quota is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidQuota {
    /// A number is negative or malformed.
    #[error("{field} {written:?} is not an amount: write a number such as 4, 2.5 or 2500m")]
    NotAnAmount {
        /// Name of the field.
        field: &'static str,
        /// The written text.
        written: String,
    },
    /// An amount of GPUs is not a multiple of a thousandth.
    #[error("{field} {written:?} is too precise: thousandths of a GPU are the smallest step")]
    TooPrecise {
        /// Name of the field.
        field: &'static str,
        /// The written text.
        written: String,
    },
    /// An amount exceeds `MAX_GPUS` GPUs or `MAX_MEBIBYTES` MiB.
    #[error("{field} is too large: the maximum is {MAX_GPUS} GPUs, or {MAX_MEBIBYTES} MiB for unit Memory")]
    TooLarge {
        /// Name of the field.
        field: &'static str,
    },
    /// The guarantee exceeds the maximum.
    #[error("min exceeds max: lower min, or raise max")]
    MinOverMax,
    /// The quota lends more than its guarantee.
    #[error("lend exceeds min: only what is guaranteed can be lent")]
    LendOverMin,
    /// The weight is out of range.
    #[error("weight {0} is not a whole number from 1 to {MAX_WEIGHT}")]
    Weight(i64),
    /// The quota guarantees cells, but the guarantee is not a whole number of GPUs.
    #[error("min must be a whole number of GPUs for guarantee Cells")]
    PartOfCell,
    /// The quota guarantees cells, but counts memory.
    #[error("guarantee Cells counts GPUs and needs unit Gpus, not Memory")]
    CellsOfMemory,
    /// The quota selects no namespaces.
    #[error("the quota names no namespaces: set namespaces or namespaceSelector")]
    NoNamespaces,
}

/// Maximum weight of a quota.
const MAX_WEIGHT: u32 = 1000;
/// Maximum amount of a quota in GPUs.
const MAX_GPUS: u64 = 1_000_000;
/// Maximum amount of a quota in MiB: 1,000,000 GPUs of 1 TiB.
const MAX_MEBIBYTES: u64 = MAX_GPUS << 20;

impl Quota {
    /// Parses the limits of a quota.
    pub fn parse(spec: &QuotaSpec) -> Result<Self, InvalidQuota> {
        let empty = match &spec.namespaces {
            Namespaces::Names(names) => names.is_empty(),
            Namespaces::WithLabels(labels) => labels.is_empty(),
        };
        if empty {
            return Err(InvalidQuota::NoNamespaces);
        }
        let amount = |field, written: &Option<Quantity>| {
            written.as_ref().map(|written| parse_amount(field, written, spec.unit)).transpose()
        };
        if spec.guarantee == Guarantee::Cells && spec.unit == Unit::Memory {
            return Err(InvalidQuota::CellsOfMemory);
        }
        let min = amount("min", &spec.min)?.unwrap_or_default();
        let (max, lend) = (amount("max", &spec.max)?, amount("lend", &spec.lend)?);
        Self::new(min)
            .with_max(max)?
            .with_lend(lend)?
            .with_weight(spec.weight.unwrap_or(1))?
            .with_mode(spec.mode)
            .with_guarantee(spec.guarantee)
    }

    /// Returns a quota that guarantees an amount, lends all of it, and has no maximum.
    pub const fn new(min: Amount) -> Self {
        Self { min, max: None, lend: None, weight: 1, guarantee: Guarantee::Count, mode: Mode::Enforce }
    }

    /// Sets the maximum.
    pub fn with_max(self, max: Option<Amount>) -> Result<Self, InvalidQuota> {
        if max.is_some_and(|max| max < self.min) { Err(InvalidQuota::MinOverMax) } else { Ok(Self { max, ..self }) }
    }

    /// Sets the part of the guaranteed amount that others may use while it is unused.
    pub fn with_lend(self, lend: Option<Amount>) -> Result<Self, InvalidQuota> {
        if lend.is_some_and(|lend| lend > self.min) {
            Err(InvalidQuota::LendOverMin)
        } else {
            Ok(Self { lend, ..self })
        }
    }

    /// Sets the weight.
    pub fn with_weight(self, weight: i64) -> Result<Self, InvalidQuota> {
        let valid = u32::try_from(weight).ok().filter(|weight| (1..=MAX_WEIGHT).contains(weight));
        valid.map(|weight| Self { weight, ..self }).ok_or(InvalidQuota::Weight(weight))
    }

    /// Sets what is guaranteed.
    pub const fn with_guarantee(self, guarantee: Guarantee) -> Result<Self, InvalidQuota> {
        match guarantee {
            Guarantee::Cells if !self.min.0.is_multiple_of(GPU.0) => Err(InvalidQuota::PartOfCell),
            _ => Ok(Self { guarantee, ..self }),
        }
    }

    /// Sets whether the quota is enforced.
    #[must_use]
    pub const fn with_mode(self, mode: Mode) -> Self {
        Self { mode, ..self }
    }

    /// Returns the guaranteed amount.
    pub const fn min(&self) -> Amount {
        self.min
    }

    /// Returns the maximum. `None` means no maximum.
    pub const fn max(&self) -> Option<Amount> {
        self.max
    }

    /// Returns the part of the guaranteed amount that other quotas must not use.
    pub fn unlent(&self) -> Amount {
        self.lend.map_or(Amount::ZERO, |lend| self.min.minus(lend))
    }

    /// Returns the quota's weight when quotas share unused GPUs.
    pub const fn weight(&self) -> u32 {
        self.weight
    }

    /// Returns the number of guaranteed GPUs, or `None` if an amount is guaranteed.
    pub fn cells(&self) -> Option<usize> {
        (self.guarantee == Guarantee::Cells).then(|| usize::try_from(self.min.0 / GPU.0).unwrap_or(usize::MAX))
    }

    /// Returns whether the operator delays and evicts pods as the quota requires.
    pub fn is_enforced(&self) -> bool {
        self.mode == Mode::Enforce
    }
}

fn parse_amount(field: &'static str, written: &Quantity, unit: Unit) -> Result<Amount, InvalidQuota> {
    let text = || written.to_string();
    let milli = written.milli().ok_or_else(|| InvalidQuota::NotAnAmount { field, written: text() })?;
    match unit {
        Unit::Gpus if milli > MAX_GPUS * 1000 => Err(InvalidQuota::TooLarge { field }),
        Unit::Gpus if is_finer_than_thousandths(&text()) => Err(InvalidQuota::TooPrecise { field, written: text() }),
        Unit::Gpus => Amount::from_milli_gpus(milli).ok_or(InvalidQuota::TooLarge { field }),
        Unit::Memory => {
            let mebibytes = written.as_mebibytes().filter(|&mebibytes| mebibytes <= MAX_MEBIBYTES);
            mebibytes.map(Amount).ok_or(InvalidQuota::TooLarge { field })
        }
    }
}

/// Returns whether a quantity has a suffix or digits below thousandths, which parsing rounds up.
fn is_finer_than_thousandths(text: &str) -> bool {
    let fraction = text.split_once('.').map_or("", |(_, fraction)| fraction);
    let digits = fraction.trim_end_matches(|c: char| !c.is_ascii_digit()).trim_end_matches('0').len();
    text.ends_with(['n', 'u']) || digits > if text.ends_with('m') { 0 } else { 3 }
}
