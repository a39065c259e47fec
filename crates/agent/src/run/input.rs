//! What the main loop learns from the other tasks.
use std::sync::Arc;
use std::time::Instant;

use cleave_api::gpunode::FindingStatus;
use cleave_gpu::nvml::{Census, GpuEvent, NvmlError, Observation, Vitals};
use cleave_kubelet::{AllocatedDevices, HeldDevices};

use crate::gpu::mig::Ended;
use crate::mps;
use crate::object::Object;

/// An input of the main loop.
pub(super) enum Input {
    /// Several inputs, to be taken in before anything is decided.
    Many(Vec<Self>),
    /// The answer of the driver, and when it was asked.
    Census(Result<Census, NvmlError>, Instant),
    /// The answer of the GPU at an index, and when it was asked.
    Gpu(u32, Result<Observation, NvmlError>, Instant),
    /// Memory errors and needs of a GPU, and when it was asked.
    Vitals(String, Vitals, Instant),
    Ended(Ended),
    Event(GpuEvent),
    Object(Object),
    Mps(mps::HostView),
    /// The pods that the kubelet lists, when it was asked, and its checkpoint as it was afterwards.
    Held(Result<Vec<HeldDevices>, String>, Instant, Option<Arc<AllocatedDevices>>),
    KubeletStarted,
    Findings(Vec<FindingStatus>),
}
