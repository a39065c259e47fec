//! Defines the inputs that other tasks send to the main loop.
use std::sync::Arc;
use std::time::Instant;

use cleave_api::gpunode::FindingStatus;
use cleave_gpu::nvml::{DriverInfo, GpuEvent, GpuObservation, GpuVitals, NvmlError};
use cleave_kubelet::{AllocatedDevices, ContainerDevices};
use cleave_plan::topology::Topology;

use crate::gpu::mig::MigOrderResult;
use crate::mps;
use crate::object::GpuNodeState;

/// An input of the main loop.
pub(super) enum Input {
    /// Several inputs that arrived together. The main loop reconciles once for all of them.
    Many(Vec<Self>),
    /// The driver's answer, and the time of the query.
    DriverInfo(Result<DriverInfo, NvmlError>, Instant),
    /// NVML's index of a GPU, the answer for the GPU, and the time of the query.
    Gpu(u32, Result<GpuObservation, NvmlError>, Instant),
    /// UUID of a GPU, its error counters and recovery action, and the time of the query.
    Vitals(String, GpuVitals, Instant),
    /// The links between the GPUs.
    Topology(Topology),
    MigOrderResult(MigOrderResult),
    Event(GpuEvent),
    Object(GpuNodeState),
    Mps(mps::HostView),
    /// The kubelet's PodResources list, the time of the request, and the content of the kubelet's
    /// checkpoint. The agent reads the checkpoint after the list.
    PodResources(Result<Vec<ContainerDevices>, String>, Instant, Option<Arc<AllocatedDevices>>),
    KubeletStarted,
    Findings(Vec<FindingStatus>),
}
