//! Decides whether a node's GPUs can serve several claims at the same time, by the rules of NVML
//! and MPS.
//!
//! The scheduler's allocations are not final on the node: a force-deleted pod frees its devices
//! while its programs run, and some versions of the scheduler forget counters. Therefore the agent
//! checks a claim against the claims that are still prepared. The check uses no counters.
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use cleave_plan::mps::MAX_CLIENTS;

use crate::claim::{ClaimPlan, Holding, Part};
use crate::devices::Placement;
use crate::names::GpuUuid;
use crate::pool::{OfferedGpu, Pool};

/// Claims that a GPU cannot serve at the same time.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("GPU {gpu} cannot serve its claims at the same time: {reason}")]
pub struct Conflict {
    /// The GPU.
    pub gpu: GpuUuid,
    /// The violated rule.
    pub reason: String,
}

impl Pool {
    /// Checks that the GPUs can serve all these claims at the same time.
    ///
    /// # Errors
    /// Returns the first GPU that cannot serve its claims.
    pub fn check<'a>(&self, claims: impl IntoIterator<Item = &'a ClaimPlan>) -> Result<(), Conflict> {
        let mut by_gpu: BTreeMap<&GpuUuid, Vec<&Holding>> = BTreeMap::new();
        for holding in claims.into_iter().flat_map(ClaimPlan::holdings) {
            by_gpu.entry(&holding.gpu).or_default().push(holding);
        }
        for (uuid, holdings) in by_gpu {
            let checked = match self.gpu(uuid) {
                Some(offered) => check_gpu(offered, &holdings),
                None => Err("the node does not have the GPU".to_owned()),
            };
            checked.map_err(|reason| Conflict { gpu: uuid.clone(), reason })?;
        }
        Ok(())
    }
}

/// How a GPU is partitioned. A GPU has one kind of partition at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Whole,
    Mps,
    TimeSlicing,
    Mig,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Whole => "the whole GPU",
            Self::Mps => "MPS shares",
            Self::TimeSlicing => "time-sliced replicas",
            Self::Mig => "MIG instances",
        })
    }
}

const fn kind(part: &Part) -> Kind {
    match part {
        Part::Whole => Kind::Whole,
        Part::Units(_) | Part::Memory(_) => Kind::Mps,
        Part::Replica(_) => Kind::TimeSlicing,
        Part::Instance(_) | Part::InstanceUnits(..) => Kind::Mig,
    }
}

fn check_gpu(offered: &OfferedGpu, holdings: &[&Holding]) -> Result<(), String> {
    let kinds: BTreeSet<Kind> = holdings.iter().map(|holding| kind(&holding.part)).collect();
    let mut kinds = kinds.into_iter();
    let Some(first) = kinds.next() else { return Ok(()) };
    if let Some(second) = kinds.next() {
        return Err(format!("{first} and {second} are both allocated"));
    }
    let mut seen = BTreeSet::new();
    if holdings.iter().filter_map(|holding| holding.share.as_ref()).any(|share| !seen.insert(share)) {
        return Err("two claims have the same share ID".to_owned());
    }
    match first {
        Kind::Whole if holdings.len() > 1 => Err(format!("{} claims have the whole GPU", holdings.len())),
        Kind::Whole => Ok(()),
        Kind::Mps => check_mps(offered, holdings),
        Kind::TimeSlicing => check_replicas(holdings),
        Kind::Mig => check_mig(offered, holdings),
    }
}

/// Checks that the shares do not exceed the GPU's memory, or the clients of an MPS server.
fn check_mps(offered: &OfferedGpu, holdings: &[&Holding]) -> Result<(), String> {
    let memory = u128::from(offered.gpu.memory.0);
    // The memory of k of n shares is k/n of the GPU. Compare in units of 1/n MiB, without rounding.
    let (mut units, mut of, mut mebibytes, mut clients) = (0_u32, None, 0_u128, 0_u32);
    for holding in holdings {
        match &holding.part {
            Part::Units(share) => {
                if of.is_some_and(|of| of != share.of()) {
                    return Err("claims divide the GPU into different numbers of shares".to_owned());
                }
                of = Some(share.of());
                units = units.saturating_add(share.units());
                clients = clients.saturating_add(share.units());
            }
            Part::Memory(gib) => {
                mebibytes += u128::from(gib.get()) * 1024;
                clients = clients.saturating_add(1);
            }
            _ => {}
        }
    }
    let total = of.map_or(1, |of| u128::from(of.get()));
    if of.is_some_and(|of| units > of.get()) {
        return Err(format!("{units} of {total} shares are allocated"));
    }
    if u128::from(units) * memory + mebibytes * total > memory * total {
        return Err(format!("{units} of {total} shares and {mebibytes} MiB exceed its {memory} MiB"));
    }
    if clients > MAX_CLIENTS {
        return Err(format!("it has {clients} shares, and an MPS server serves at most {MAX_CLIENTS} clients"));
    }
    Ok(())
}

fn check_replicas(holdings: &[&Holding]) -> Result<(), String> {
    let replicas = holdings.iter().filter_map(|holding| match &holding.part {
        Part::Replica(replicas) => usize::try_from(replicas.get()).ok(),
        _ => None,
    });
    match replicas.min() {
        Some(most) if holdings.len() > most => Err(format!("{} of {most} replicas are allocated", holdings.len())),
        _ => Ok(()),
    }
}

/// Checks that NVML can create the instances at their placements, and that each instance has one
/// claim, or enough shares for its claims.
fn check_mig(offered: &OfferedGpu, holdings: &[&Holding]) -> Result<(), String> {
    let mut shares: BTreeMap<&Placement, (u32, Option<u32>)> = BTreeMap::new();
    for holding in holdings {
        let (placement, units, of) = match &holding.part {
            Part::Instance(placement) => (placement, 1, 1),
            Part::InstanceUnits(placement, share) => (placement, share.units(), share.of().get()),
            _ => continue,
        };
        // An undivided instance counts as an instance with one share.
        let (used, total) = shares.entry(placement).or_insert((0, Some(of)));
        *used = used.saturating_add(units);
        *total = total.filter(|total| *total == of);
        if total.is_none_or(|total| *used > total) {
            return Err(format!("claims have {used} shares of MIG instance {placement}, which is divided into {of}"));
        }
    }
    let instances: Vec<&Placement> = shares.keys().copied().collect();
    if offered.table.can_coexist(instances.iter().map(|placement| (placement.profile(), placement.start()))) {
        return Ok(());
    }
    let list = instances.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    Err(format!("it cannot have these MIG instances together: {list}"))
}
