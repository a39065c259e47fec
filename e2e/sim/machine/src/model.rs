//! Describes GPU models. `models.json` contains the built-in models, and a machine's description
//! may add more models.
//!
//! H100-80 and H200-141 have the values that real GPUs report under driver 580.159.04, including
//! MIG profiles and placements. An exception is the number of SMs of compute instances that share a
//! GPU instance. The other models follow NVIDIA's MIG guide and product data, and their total
//! memory under CUDA is an approximation.

use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

/// A GPU model.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Model {
    /// Short names that machine descriptions may use, such as `H100-80`.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// NVML's product name.
    pub name: String,
    /// The architecture, such as `Ampere`.
    pub architecture: String,
    /// CUDA compute capability.
    pub compute_capability: (i32, i32),
    /// Number of SMs.
    pub sms: u32,
    /// CUDA cores per SM.
    pub cores_per_sm: u32,
    /// Total memory that NVML reports, in MiB.
    pub memory_mib: u64,
    /// Total memory that CUDA reports, in MiB. The total excludes the memory that the driver
    /// reserves.
    pub cuda_memory_mib: u64,
    /// Width of the memory bus, in bits.
    pub memory_bus_width: u32,
    /// PCI device id and vendor id, in NVML's format.
    pub pci_device_id: u32,
    /// PCI subsystem id, in NVML's format.
    pub pci_subsystem_id: u32,
    /// Power in watts: the enforced limit, and the idle power.
    pub power_watts: (u32, u32),
    /// Number of memory slices, the unit of MIG placements. 0 means that the model does not support
    /// MIG.
    #[serde(default)]
    pub mig_memory_slices: u32,
    /// Whether the board stores MIG mode (Ampere). If so, a reboot keeps MIG mode. If not, a reboot
    /// turns MIG mode off (Hopper).
    #[serde(default)]
    pub mig_mode_stored: bool,
    /// Number of SMs per compute slice, for compute instances that are smaller than their GPU
    /// instance.
    #[serde(default)]
    pub sms_per_slice: u32,
    /// GPU instance profiles, in NVML's order.
    #[serde(default)]
    pub gpu_profiles: Vec<GpuProfile>,
}

/// A GPU instance profile, as `nvmlDeviceGetGpuInstanceProfileInfo` returns it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuProfile {
    /// The value of `NVML_GPU_INSTANCE_PROFILE_…` that identifies the profile in queries.
    pub index: u32,
    /// The profile id with which an instance is created, such as 19 for 1g.10gb on an H100.
    pub id: u32,
    /// The name, such as `1g.10gb` or `1g.10gb+me`.
    pub name: String,
    /// Number of compute slices.
    pub slices: u32,
    /// Maximum number of instances on an empty GPU.
    pub instances: u32,
    /// Number of SMs.
    pub sms: u32,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Number of copy engines.
    pub copy: u32,
    /// Number of decoders.
    pub decoders: u32,
    /// Number of encoders.
    #[serde(default)]
    pub encoders: u32,
    /// Number of JPEG engines.
    pub jpeg: u32,
    /// Number of optical flow accelerators.
    pub ofa: u32,
    /// `NVML_GPU_INSTANCE_PROFILE_CAPS_…`.
    #[serde(default)]
    pub capabilities: u32,
    /// Number of memory slices that an instance occupies.
    pub size: u32,
    /// The memory slices at which an instance may start.
    pub starts: Vec<u32>,
}

/// A compute instance profile within a GPU instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComputeProfile {
    /// The value of `NVML_COMPUTE_INSTANCE_PROFILE_…` that identifies the profile in queries.
    pub index: u32,
    /// The profile id with which an instance is created.
    pub id: u32,
    /// The name, such as `1c.3g.40gb`. The profile of a whole GPU instance has the name of the GPU
    /// instance profile.
    pub name: String,
    /// Number of compute slices.
    pub slices: u32,
    /// Maximum number of instances in an empty GPU instance.
    pub instances: u32,
    /// Number of SMs.
    pub sms: u32,
}

/// The slices of an instance: memory slices of a GPU, or compute slices of a GPU instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// The first slice.
    pub start: u32,
    /// The number of slices.
    pub size: u32,
}

impl Placement {
    /// Returns whether the two placements share a slice.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.start < other.start + other.size && other.start < self.start + self.size
    }
}

impl Model {
    /// Returns whether the model supports MIG.
    #[must_use]
    pub fn is_mig_capable(&self) -> bool {
        self.mig_memory_slices > 0
    }

    /// Returns a GPU instance profile by its id.
    #[must_use]
    pub fn gpu_profile(&self, id: u32) -> Option<&GpuProfile> {
        self.gpu_profiles.iter().find(|p| p.id == id)
    }

    /// Returns the compute instance profiles within a GPU instance profile, in NVML's order.
    #[must_use]
    pub fn compute_profiles(&self, gpu_profile: u32) -> Vec<ComputeProfile> {
        let Some(gi) = self.gpu_profile(gpu_profile) else { return Vec::new() };
        // Each entry is (index, id, slices).
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

    /// Returns a compute instance profile by its id.
    #[must_use]
    pub fn compute_profile(&self, gpu_profile: u32, id: u32) -> Option<ComputeProfile> {
        self.compute_profiles(gpu_profile).into_iter().find(|p| p.id == id)
    }
}

/// Returns the built-in models.
#[must_use]
pub fn builtin_models() -> &'static [Model] {
    static MODELS: OnceLock<Vec<Model>> = OnceLock::new();
    // The file is part of the crate and a test parses it, so parsing cannot fail here.
    MODELS.get_or_init(|| serde_json::from_str(include_str!("models.json")).unwrap_or_default())
}

/// Finds a model by its name or an alias, ignoring case. The models in `own` take precedence over
/// the built-in models.
#[must_use]
pub fn find_model<'a>(own: &'a [Model], name: &str) -> Option<&'a Model> {
    let named =
        |m: &&Model| m.name.eq_ignore_ascii_case(name) || m.aliases.iter().any(|a| a.eq_ignore_ascii_case(name));
    own.iter().find(named).or_else(|| builtin_models().iter().find(named))
}
