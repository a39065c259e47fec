//! The input of the model: a node's GPUs, and what each GPU offers.
use cleave_plan::mig::Profile;
use cleave_plan::mps::MAX_CLIENTS;
use cleave_plan::units::{Mebibytes, Sms};

use crate::names::GpuUuid;
use crate::wire::Taint;

/// A GPU of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// UUID of the GPU.
    pub uuid: GpuUuid,
    /// Product name.
    pub model: String,
    /// Version of the driver, such as `580.159.04`. An empty text means unknown.
    pub driver: String,
    /// Total memory.
    pub memory: Mebibytes,
    /// Number of streaming multiprocessors.
    pub sms: Sms,
    /// The PCIe root complex, such as `pci0000:00`. Other drivers publish the same attribute, so
    /// that a claim can request devices that are close to each other.
    pub pcie_root: Option<String>,
    /// MIG profiles and placements as NVML reports them. An empty list means that the GPU does not
    /// support MIG.
    pub profiles: Vec<Profile>,
    /// What claims can request of the GPU.
    pub offer: Offer,
    /// Reasons not to use the GPU. All devices of the GPU have these taints.
    pub taints: Vec<Taint>,
}

/// What claims can request of a GPU. If the offer contains several kinds, allocations decide which
/// kind the GPU serves.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Offer {
    /// The undivided GPU.
    pub whole: bool,
    /// Equal MPS shares, and their number.
    pub units: Option<Units>,
    /// MPS shares by memory, in GiB.
    pub memory: bool,
    /// Time-sliced replicas, and their number.
    pub replicas: Option<Replicas>,
    /// MIG instances.
    pub mig: Option<MigOffer>,
}

/// The MIG instances that a GPU offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigOffer {
    /// The placements.
    pub layout: Layout,
    /// Number of MPS shares of each instance. `None` if instances are not shared.
    pub units: Option<Units>,
}

/// The placements of MIG instances that a GPU offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Layout {
    /// Every placement that NVML reports. Allocations decide the layout.
    Any,
    /// These instances, each by the name of its profile and its first memory slice.
    Fixed(Vec<(String, u32)>),
}

/// Number of equal MPS shares of a device, 1 to 48.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Units(u32);

impl Units {
    /// Creates a number of shares. Returns `None` if the number is 0, or exceeds the number of
    /// clients of an MPS server.
    pub const fn new(units: u32) -> Option<Self> {
        if units == 0 || units > MAX_CLIENTS { None } else { Some(Self(units)) }
    }

    /// Returns the number.
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// Maximum number of time-sliced replicas of a GPU, as in `SharingPolicy`.
const MAX_REPLICAS: u32 = 100;

/// Number of time-sliced replicas of a GPU, 1 to 100.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Replicas(u32);

impl Replicas {
    /// Creates a number of replicas. Returns `None` if the number is 0 or exceeds 100.
    pub const fn new(replicas: u32) -> Option<Self> {
        if replicas == 0 || replicas > MAX_REPLICAS { None } else { Some(Self(replicas)) }
    }

    /// Returns the number.
    pub const fn get(self) -> u32 {
        self.0
    }
}
