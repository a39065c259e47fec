//! Maps the allocated devices of a claim to parts of GPUs.
//!
//! Anyone with the right to write a claim's status can write any allocation, and the scheduler's
//! allocation may be older than the slices. Therefore everything is checked against the pool.
use std::collections::BTreeSet;
use std::fmt;
use std::num::NonZeroU64;

use cleave_plan::Quantity;

use crate::devices::{Kind, OfferedDevice, Placement};
use crate::gpu::{Replicas, Units};
use crate::names::{DRIVER, GpuUuid, InvalidName, RequestName, ShareId, quoted};
use crate::pool::Pool;
use crate::slices::{CLIENTS, MEMORY, REPLICAS, UNITS};
use crate::wire::{AllocatedDevice, DeviceAllocation, MAX_RESULTS};

/// Maximum number of capacities that an error lists. A device has at most two.
const MAX_SHOWN_AMOUNTS: usize = 4;

/// What a claim holds of a node's GPUs: at least one part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimPlan {
    holdings: Vec<Holding>,
}

impl ClaimPlan {
    /// Returns the parts, in the order of the allocation.
    pub fn holdings(&self) -> &[Holding] {
        &self.holdings
    }
}

/// A part of a GPU that a claim holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding {
    /// The request of the claim.
    pub request: RequestName,
    /// Name of the device.
    pub device: String,
    /// The GPU.
    pub gpu: GpuUuid,
    /// The part of the GPU.
    pub part: Part,
    /// Identifies the share, if the device is shared.
    pub share: Option<ShareId>,
}

/// A part of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// The undivided GPU.
    Whole,
    /// Equal MPS shares of the GPU.
    Units(Share),
    /// MPS shares of the GPU by memory, in GiB.
    Memory(NonZeroU64),
    /// One of the GPU's time-sliced replicas.
    Replica(Replicas),
    /// An undivided MIG instance.
    Instance(Placement),
    /// Equal MPS shares of a MIG instance.
    InstanceUnits(Placement, Share),
}

/// A number of equal MPS shares, at least 1 and at most all shares of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    units: u32,
    of: Units,
}

impl Share {
    fn new(units: u64, of: Units) -> Option<Self> {
        let units = u32::try_from(units).ok().filter(|units| (1..=of.get()).contains(units))?;
        Some(Self { units, of })
    }

    /// Returns the number of shares.
    pub const fn units(self) -> u32 {
        self.units
    }

    /// Returns the number of shares of the device.
    pub const fn of(self) -> Units {
        self.of
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole => f.write_str("the whole GPU"),
            Self::Units(share) => write!(f, "{} of {} shares", share.units, share.of.get()),
            Self::Memory(gib) => write!(f, "shares of {gib} GiB"),
            Self::Replica(replicas) => write!(f, "one of {} replicas", replicas.get()),
            Self::Instance(placement) => write!(f, "MIG instance {placement}"),
            Self::InstanceUnits(placement, share) => {
                write!(f, "{} of {} shares of MIG instance {placement}", share.units, share.of.get())
            }
        }
    }
}

/// Why Cleave cannot prepare a claim.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClaimError {
    /// The allocation contains no device of this driver.
    #[error("the claim's allocation contains no device of driver {DRIVER}")]
    NoDevice,
    /// The allocation contains more devices than Kubernetes allows.
    #[error("the claim's allocation contains {0} devices, more than the maximum of {MAX_RESULTS}")]
    TooManyDevices(usize),
    /// The device belongs to another pool.
    #[error("device {device} is in pool {pool}, and this node serves pool {serves}")]
    OtherPool {
        /// Name of the device.
        device: String,
        /// The pool of the allocation.
        pool: String,
        /// The pool of this node.
        serves: String,
    },
    /// The pool does not offer the device.
    #[error(
        "this node offers no device {0}: the GPU is missing, or its policy changed. Delete the pod, so that the scheduler chooses another device"
    )]
    UnknownDevice(String),
    /// A name in the allocation is malformed.
    #[error("device {device}: {error}")]
    Name {
        /// Name of the device.
        device: String,
        /// The malformed name.
        error: InvalidName,
    },
    /// The claim requests administrative access.
    #[error("device {0}: Cleave does not offer administrative access. Remove adminAccess from the claim's request")]
    AdminAccess(String),
    /// The claim or its class configures the driver.
    #[error("driver {DRIVER} has no configuration. Remove the opaque parameters from the claim or its DeviceClass")]
    Configuration,
    /// The consumed capacity does not match the device.
    #[error("device {device}: the allocation consumes {consumed}, and {expected}")]
    Capacity {
        /// Name of the device.
        device: String,
        /// What the allocation consumes.
        consumed: String,
        /// What it could consume.
        expected: String,
    },
    /// The allocation has a share ID although the device is not shared, or none although it is.
    #[error("device {0}: a share ID is required for shared devices, and not allowed for other devices")]
    ShareIdMismatch(String),
    /// The allocation contains the same device or share twice.
    #[error("device {0} is allocated twice to the claim")]
    Twice(String),
    /// The claim has MPS shares and other devices.
    #[error("the claim has MPS shares of {shares} and also {other}. Use a separate claim for each")]
    MixedKinds {
        /// Name of the device with shares.
        shares: String,
        /// Name of the other device.
        other: String,
    },
    /// One request of the claim has several MPS shares.
    #[error("request {0} has a count above 1. To request several shares, set capacity.requests.units and no count")]
    CountOfShares(RequestName),
}

impl Pool {
    /// Returns what an allocated claim holds of this node's GPUs. Devices of other drivers, and
    /// configuration for other drivers, are ignored.
    ///
    /// # Errors
    /// Returns an error if the allocation contains no device of this pool, or if the pool cannot
    /// serve the allocation. The whole claim is then refused.
    pub fn read_claim(&self, allocation: &DeviceAllocation) -> Result<ClaimPlan, ClaimError> {
        if allocation.results.len() > MAX_RESULTS {
            return Err(ClaimError::TooManyDevices(allocation.results.len()));
        }
        let is_ours = |driver: &str| driver == DRIVER;
        let mut configured = allocation.config.iter().filter_map(|config| config.opaque.as_ref());
        if configured.any(|opaque| is_ours(&opaque.driver)) {
            return Err(ClaimError::Configuration);
        }
        let ours = allocation.results.iter().filter(|result| is_ours(&result.driver));
        let holdings = ours.map(|result| self.read_device(result)).collect::<Result<Vec<_>, _>>()?;
        if holdings.is_empty() {
            return Err(ClaimError::NoDevice);
        }
        let mut seen = BTreeSet::new();
        if let Some(again) = holdings.iter().find(|one| !seen.insert((&one.device, &one.share))) {
            return Err(ClaimError::Twice(again.device.clone()));
        }
        check_shares(&holdings)?;
        Ok(ClaimPlan { holdings })
    }

    fn read_device(&self, result: &AllocatedDevice) -> Result<Holding, ClaimError> {
        let device = result.device.clone();
        if result.pool != self.node().pool() {
            let (device, pool) = (quoted(&device), quoted(&result.pool));
            return Err(ClaimError::OtherPool { device, pool, serves: self.node().pool() });
        }
        let (gpu, offered) = self.device(&device).ok_or_else(|| ClaimError::UnknownDevice(quoted(&device)))?;
        if result.admin_access == Some(true) {
            return Err(ClaimError::AdminAccess(device));
        }
        let name = |error| ClaimError::Name { device: device.clone(), error };
        let request = RequestName::new(&result.request).map_err(name)?;
        let share = result.share_id.as_deref().map(ShareId::new).transpose().map_err(name)?;
        if share.is_some() != offered.kind.is_shared() {
            return Err(ClaimError::ShareIdMismatch(device));
        }
        let part = read_part(offered, result)?;
        Ok(Holding { request, device, gpu: gpu.gpu.uuid.clone(), part, share })
    }
}

/// Returns the part of a device that an allocation consumes.
fn read_part(offered: &OfferedDevice, result: &AllocatedDevice) -> Result<Part, ClaimError> {
    let consumed = |name: &str| result.consumed_capacity.get(name).and_then(Quantity::count);
    let only = |names: &[&str]| result.consumed_capacity.keys().eq(names);
    let (part, expected) = match &offered.kind {
        Kind::Whole => (only(&[]).then_some(Part::Whole), "the device has no capacity to consume".to_owned()),
        Kind::Instance(placement) => {
            let part = only(&[]).then(|| Part::Instance(placement.clone()));
            (part, "the device has no capacity to consume".to_owned())
        }
        Kind::Units(of) => {
            let share = consumed(UNITS).filter(|_| only(&[UNITS])).and_then(|units| Share::new(units, *of));
            (share.map(Part::Units), format!("it can consume {UNITS} from 1 to {}", of.get()))
        }
        Kind::InstanceUnits(placement, of) => {
            let share = consumed(UNITS).filter(|_| only(&[UNITS])).and_then(|units| Share::new(units, *of));
            let part = share.map(|share| Part::InstanceUnits(placement.clone(), share));
            (part, format!("it can consume {UNITS} from 1 to {}", of.get()))
        }
        Kind::Memory(total) => {
            let valid = only(&[CLIENTS, MEMORY]) && consumed(CLIENTS) == Some(1);
            let bytes = consumed(MEMORY).filter(|bytes| valid && bytes.is_multiple_of(1 << 30));
            let gib = bytes.map(|bytes| bytes >> 30).filter(|gib| gib <= total).and_then(NonZeroU64::new);
            (gib.map(Part::Memory), format!("it can consume {MEMORY} from 1Gi to {total}Gi, and 1 of {CLIENTS}"))
        }
        Kind::Replicas(replicas) => {
            let valid = only(&[REPLICAS]) && consumed(REPLICAS) == Some(1);
            (valid.then_some(Part::Replica(*replicas)), format!("it can consume 1 of {REPLICAS}"))
        }
    };
    part.ok_or_else(|| {
        let amounts = result.consumed_capacity.iter().take(MAX_SHOWN_AMOUNTS);
        let amounts = amounts.map(|(name, amount)| format!("{} of {}", quoted(&amount.to_string()), quoted(name)));
        let amounts = amounts.collect::<Vec<_>>().join(", ");
        let consumed = if amounts.is_empty() { "nothing".to_owned() } else { amounts };
        ClaimError::Capacity { device: result.device.clone(), consumed, expected }
    })
}

/// Checks the MPS shares of a claim. A program connects to one MPS daemon, so all shares must be of
/// one device, and programs with shares can use no other devices.
fn check_shares(holdings: &[Holding]) -> Result<(), ClaimError> {
    let is_mps = |part: &Part| match part {
        Part::Units(_) | Part::Memory(_) | Part::InstanceUnits(..) => true,
        Part::Whole | Part::Replica(_) | Part::Instance(_) => false,
    };
    let Some(shares) = holdings.iter().find(|one| is_mps(&one.part)) else { return Ok(()) };
    let mut requests = BTreeSet::new();
    for one in holdings {
        if is_mps(&one.part) && !requests.insert(&one.request) {
            return Err(ClaimError::CountOfShares(one.request.clone()));
        }
    }
    match holdings.iter().find(|one| one.device != shares.device) {
        Some(other) => Err(ClaimError::MixedKinds { shares: shares.device.clone(), other: other.device.clone() }),
        None => Ok(()),
    }
}
