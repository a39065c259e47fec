//! Tracks allocations: the slices of devices that containers use or will use. Pure.
//!
//! This module does not depend on the device plugin. However, [`pending`] assumes that a request
//! names a number of slices but no pod. [`usage`] assumes that PodResources lists the slices of
//! each allocation as devices.
pub mod allocate;
pub mod pending;
pub mod table;
pub mod usage;
pub mod whole_gpus;

use std::fmt::Write as _;

use cleave_gpu::mps::wire;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Slices of one resource that the kubelet has allocated to a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allocation {
    /// Name of the extended resource.
    pub resource: String,
    /// Ids of the slices, sorted.
    pub ids: Vec<String>,
    /// UUIDs of the slices' devices. An allocation of MPS shares has exactly one device.
    pub devices: Vec<String>,
    /// MPS limits of the allocation. `None` if the device is not shared through MPS.
    pub mps: Option<MpsLimits>,
}

/// Limits that MPS enforces for one allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MpsLimits {
    /// Active thread percentage, 1 to 100. `None` means unlimited.
    pub threads: Option<u8>,
    /// Memory in MiB. `None` means unlimited.
    pub memory_mib: Option<u64>,
    /// Maximum number of MPS clients. `None` means unlimited.
    pub max_clients: Option<u32>,
}

impl Allocation {
    /// Returns the id of the allocation. The id depends on the set of slices, not on their order.
    pub fn id(&self) -> String {
        allocation_id(&self.resource, &self.ids)
    }

    /// Returns the id of the allocation and the settings of its door, for the MPS host. Returns
    /// `None` if the device is not shared through MPS.
    pub fn door(&self) -> Option<(String, wire::Allocation)> {
        self.door_settings().map(|settings| (self.id(), settings))
    }

    /// Returns the settings of the allocation's door, for the MPS host. Returns `None` if the
    /// device is not shared through MPS.
    pub fn door_settings(&self) -> Option<wire::Allocation> {
        let MpsLimits { threads, memory_mib, max_clients } = self.mps?;
        let device = self.devices.first()?.clone();
        Some(wire::Allocation { device, threads, memory_mib, max_clients })
    }
}

/// Returns the id of the allocation of these slices: 32 hexadecimal digits.
pub fn allocation_id(resource: &str, ids: &[String]) -> String {
    let mut sorted: Vec<&str> = ids.iter().map(String::as_str).collect();
    sorted.sort_unstable();
    let mut hash = Sha256::new_with_prefix(resource);
    for id in sorted {
        // A NUL byte is an unambiguous separator, because no id and no resource name contains one.
        hash.update([0]);
        hash.update(id);
    }
    hash.finalize().iter().take(16).fold(String::with_capacity(32), |mut digits, byte| {
        let _ = write!(digits, "{byte:02x}");
        digits
    })
}
