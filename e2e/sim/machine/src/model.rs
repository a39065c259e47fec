//! GPU models as data: `models.json` has the built-in ones, a machine's description may bring more.
//!
//! H100-80 and H200-141 are as real ones with driver 580.159.04 answered, MIG profiles and
//! placements included (but for the SMs of compute instances that share a GPU instance). The others
//! follow NVIDIA's MIG guide and product data; what CUDA gives as their total memory is an
//! approximation.

use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

/// A GPU model.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Model {
    /// Short names that descriptions may use, such as `H100-80`.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// NVML's product name.
    pub name: String,
    /// `Ampere` and so on.
    pub architecture: String,
    /// CUDA compute capability.
    pub compute_capability: (i32, i32),
    /// SMs.
    pub sms: u32,
    /// CUDA cores of one SM.
    pub cores_per_sm: u32,
    /// MiB that NVML gives as the total.
    pub memory_mib: u64,
    /// MiB that CUDA gives as the total: less what the driver reserves.
    pub cuda_memory_mib: u64,
    /// Bits of the memory bus.
    pub memory_bus_width: u32,
    /// PCI device and vendor id, as NVML packs them.
    pub pci_device_id: u32,
    /// PCI subsystem id, as NVML packs it.
    pub pci_subsystem_id: u32,
    /// Watts: enforced limit, and drawn when idle.
    pub power_watts: (u32, u32),
    /// Memory slices that MIG placements count in; 0: no MIG.
    #[serde(default)]
    pub mig_memory_slices: u32,
    /// MIG mode is stored on the board: a reset switches it, a reboot keeps it (Ampere). Otherwise
    /// it switches at once and a reboot loses it (Hopper).
    #[serde(default)]
    pub mig_mode_stored: bool,
    /// SMs of one compute slice of a GPU instance that is cut into several compute instances.
    #[serde(default)]
    pub sms_per_slice: u32,
    /// MIG's GPU instance profiles, in NVML's order.
    #[serde(default)]
    pub gpu_profiles: Vec<GpuProfile>,
}

/// A GPU instance profile, as `nvmlDeviceGetGpuInstanceProfileInfo` gives it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuProfile {
    /// `NVML_GPU_INSTANCE_PROFILE_…`, the index by which NVML is asked.
    pub index: u32,
    /// The id by which instances are created (19 for 1g.10gb on an H100).
    pub id: u32,
    /// `1g.10gb`, `1g.10gb+me`.
    pub name: String,
    /// Compute slices.
    pub slices: u32,
    /// How many fit on an empty GPU.
    pub instances: u32,
    /// SMs.
    pub sms: u32,
    /// MiB.
    pub memory_mib: u64,
    /// Copy engines.
    pub copy: u32,
    /// Decoders.
    pub decoders: u32,
    /// Encoders.
    #[serde(default)]
    pub encoders: u32,
    /// JPEG engines.
    pub jpeg: u32,
    /// Optical flow accelerators.
    pub ofa: u32,
    /// `NVML_GPU_INSTANCE_PROFILE_CAPS_…`.
    #[serde(default)]
    pub capabilities: u32,
    /// Memory slices taken.
    pub size: u32,
    /// Where an instance may start.
    pub starts: Vec<u32>,
}

/// A compute instance profile within a GPU instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComputeProfile {
    /// `NVML_COMPUTE_INSTANCE_PROFILE_…`, the index by which NVML is asked.
    pub index: u32,
    /// The id by which instances are created.
    pub id: u32,
    /// `1c.3g.40gb`; the GPU instance's own name where it takes the whole.
    pub name: String,
    /// Compute slices.
    pub slices: u32,
    /// How many fit in an empty GPU instance.
    pub instances: u32,
    /// SMs.
    pub sms: u32,
}

/// Slices that an instance takes: memory slices of a GPU, or compute slices of a GPU instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// The first.
    pub start: u32,
    /// How many.
    pub size: u32,
}

impl Placement {
    /// Whether the two share a slice.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.start < other.start + other.size && other.start < self.start + self.size
    }
}

impl Model {
    /// Whether it has MIG at all.
    #[must_use]
    pub fn mig_capable(&self) -> bool {
        self.mig_memory_slices > 0
    }

    /// A GPU instance profile by its id.
    #[must_use]
    pub fn gpu_profile(&self, id: u32) -> Option<&GpuProfile> {
        self.gpu_profiles.iter().find(|p| p.id == id)
    }

    /// The compute instance profiles of a GPU instance of this profile, in NVML's order.
    #[must_use]
    pub fn compute_profiles(&self, gpu_profile: u32) -> Vec<ComputeProfile> {
        let Some(gi) = self.gpu_profile(gpu_profile) else { return Vec::new() };
        // (index, id, slices)
        let all = [(0, 0, 1), (1, 1, 2), (2, 2, 3), (3, 3, 4), (4, 4, 7)];
        let profile = |(index, id, slices)| ComputeProfile {
            index,
            id,
            slices,
            name: if slices == gi.slices { gi.name.clone() } else { format!("{slices}c.{}", gi.name) },
            instances: gi.slices / slices,
            sms: if slices == gi.slices { gi.sms } else { self.sms_per_slice * slices },
        };
        all.into_iter().filter(|(_, _, slices)| *slices <= gi.slices).map(profile).collect()
    }

    /// A compute instance profile by its id.
    #[must_use]
    pub fn compute_profile(&self, gpu_profile: u32, id: u32) -> Option<ComputeProfile> {
        self.compute_profiles(gpu_profile).into_iter().find(|p| p.id == id)
    }
}

/// The models that are always known.
#[must_use]
pub fn builtin_models() -> &'static [Model] {
    static MODELS: OnceLock<Vec<Model>> = OnceLock::new();
    // The file is part of the crate, and a test parses it: it cannot be malformed in a build that
    // passed.
    MODELS.get_or_init(|| serde_json::from_str(include_str!("models.json")).unwrap_or_default())
}

/// A model by its name or an alias, without regard to case; `own` goes before the built-in ones.
#[must_use]
pub fn find_model<'a>(own: &'a [Model], name: &str) -> Option<&'a Model> {
    let named =
        |m: &&Model| m.name.eq_ignore_ascii_case(name) || m.aliases.iter().any(|a| a.eq_ignore_ascii_case(name));
    own.iter().find(named).or_else(|| builtin_models().iter().find(named))
}
