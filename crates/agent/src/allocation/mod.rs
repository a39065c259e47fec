//! Allocations: which slices of which devices containers hold, or will. Pure.
//!
//! Nothing here knows which front end asks for an allocation.
pub mod allocate;
pub mod pending;
pub mod table;
pub mod usage;

use std::fmt::Write as _;

use cleave_gpu::mps::wire;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Slices that a container holds, or is about to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allocation {
    /// The extended resource.
    pub resource: String,
    /// Ids, sorted.
    pub ids: Vec<String>,
    /// UUIDs of the devices; exactly one under MPS.
    pub devices: Vec<String>,
    /// Limits, under MPS.
    pub mps: Option<MpsLimits>,
}

/// What an allocation may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MpsLimits {
    /// Active thread percentage.
    pub threads: Option<u8>,
    /// Memory, MiB.
    pub memory_mib: Option<u64>,
    /// Most clients.
    pub max_clients: Option<u32>,
}

impl Allocation {
    /// The allocation's name: the same for the same slices, in whatever order they are given.
    pub fn id(&self) -> String {
        allocation_id(&self.resource, &self.ids)
    }

    /// Its door, by id, as the MPS host is to have it; none where it is not under MPS.
    pub fn door(&self) -> Option<(String, wire::Allocation)> {
        let MpsLimits { threads, memory_mib, max_clients } = self.mps?;
        let device = self.devices.first()?.clone();
        Some((self.id(), wire::Allocation { device, threads, memory_mib, max_clients }))
    }
}

/// The id of the allocation of these slices: 32 hexadecimal digits.
pub fn allocation_id(resource: &str, ids: &[String]) -> String {
    let mut sorted: Vec<&str> = ids.iter().map(String::as_str).collect();
    sorted.sort_unstable();
    let mut hash = Sha256::new_with_prefix(resource);
    for id in sorted {
        // No id and no resource name has a NUL, so that no two lists are the same text.
        hash.update([0]);
        hash.update(id);
    }
    hash.finalize().iter().take(16).fold(String::with_capacity(32), |mut digits, byte| {
        let _ = write!(digits, "{byte:02x}");
        digits
    })
}
