//! The NVML calls that the rest of Cleave makes.
use cleave_plan::topology::Topology;

use super::error::NvmlError;
use super::model::{
    ComputeMode, DeviceProcesses, DriverInfo, Gpu, GpuEvent, GpuObservation, GpuReadings, GpuVitals, MigActivation,
    MigInstance, Process,
};

/// The events of one GPU since its registration. Any thread may read them.
pub trait GpuEvents: Send {
    /// Returns the next event, or `None` if there is no further event yet. Does not wait for an
    /// event.
    fn next_event(&mut self) -> Result<Option<GpuEvent>, NvmlError>;
}

/// A node's GPUs. Threads may make calls concurrently. By default, most calls return the error that
/// NVML does not support them.
pub trait Gpus: Send + Sync {
    /// Returns the driver version and the number of GPUs. Accesses no GPU.
    fn driver_info(&self) -> Result<DriverInfo, NvmlError> {
        Err(NvmlError::NotSupported { call: "nvmlDeviceGetCount" })
    }

    /// Returns the GPU at one of NVML's indices. Accesses no other GPU.
    fn gpu_at(&self, _index: u32) -> Result<Gpu, NvmlError> {
        Err(NvmlError::NotSupported { call: "nvmlDeviceGetHandleByIndex" })
    }

    /// Returns the GPU at an index and its processes. The list is empty if the processes cannot be
    /// read.
    fn observe(&self, index: u32) -> Result<GpuObservation, NvmlError> {
        let gpu = self.gpu_at(index)?;
        let processes = self.processes(&gpu.uuid).unwrap_or_default();
        Ok(GpuObservation { gpu, processes })
    }

    /// Returns the links between the GPUs. Accesses all GPUs, and omits GPUs that fail. Marks links
    /// that could not be read as unknown. A GPU that hangs blocks the call, so make this call on a
    /// separate worker.
    fn topology(&self) -> Result<Topology, NvmlError> {
        Err(NvmlError::NotSupported { call: "nvmlDeviceGetTopologyCommonAncestor" })
    }

    /// Registers the GPU at an index for events. Accesses no other GPU. The registration ends when
    /// the returned value is dropped.
    fn open_events(&self, _index: u32) -> Result<Box<dyn GpuEvents>, NvmlError> {
        Err(NvmlError::NotSupported { call: "nvmlDeviceRegisterEvents" })
    }

    /// Returns the GPU with this UUID.
    fn gpu(&self, _uuid: &str) -> Result<Gpu, NvmlError> {
        Err(NvmlError::NotSupported { call: "nvmlDeviceGetHandleByUUID" })
    }

    /// Returns the processes that use the GPU or MIG device with this UUID.
    fn processes(&self, _uuid: &str) -> Result<Vec<Process>, NvmlError> {
        Err(NvmlError::NotSupported { call: "nvmlDeviceGetComputeRunningProcesses" })
    }

    /// Returns the memory errors of a GPU and the recovery action that its driver requests. Fails
    /// only if the GPU cannot be found, or if the GPU or the driver is lost.
    fn vitals(&self, _uuid: &str) -> Result<GpuVitals, NvmlError> {
        Ok(GpuVitals::default())
    }

    /// Returns the readings of a GPU's sensors. Fails only if the GPU cannot be found, or if the
    /// GPU or the driver is lost.
    fn readings(&self, _uuid: &str) -> Result<GpuReadings, NvmlError> {
        Ok(GpuReadings::default())
    }

    /// Returns the processes that use the GPU or MIG device with this UUID, and whether
    /// [`Process::mps`] is known.
    fn device_processes(&self, uuid: &str) -> Result<DeviceProcesses, NvmlError> {
        Ok(DeviceProcesses { processes: self.processes(uuid)?, are_clients_known: true })
    }

    /// Returns the newest CUDA version that the driver supports: its major and its minor number.
    fn cuda_version(&self) -> Result<(u32, u32), NvmlError> {
        Err(NvmlError::NotSupported { call: "nvmlSystemGetCudaDriverVersion" })
    }

    /// Returns the compute mode of a GPU.
    fn compute_mode(&self, _uuid: &str) -> Result<ComputeMode, NvmlError> {
        Err(NvmlError::NotSupported { call: "nvmlDeviceGetComputeMode" })
    }

    /// Sets the compute mode of a GPU and returns the previous mode.
    fn set_compute_mode(&self, _uuid: &str, _mode: ComputeMode) -> Result<ComputeMode, NvmlError> {
        Err(NvmlError::NotSupported { call: "nvmlDeviceSetComputeMode" })
    }

    /// Turns a GPU's MIG mode on or off. Returns when the change takes effect. The GPU must be
    /// idle. The driver may reset the GPU, and the reset may change other properties of the GPU.
    fn set_mig_mode(&self, _gpu: &str, _on: bool) -> Result<MigActivation, NvmlError> {
        Err(NvmlError::NotSupported { call: "nvmlDeviceSetMigMode" })
    }

    /// Creates a GPU instance of `profile` at exactly `start`, and one compute instance that spans
    /// the GPU instance. If the compute instance cannot be created, destroys the GPU instance
    /// again.
    fn create_mig_instance(&self, _gpu: &str, _profile: &str, _start: u32) -> Result<MigInstance, NvmlError> {
        Err(NvmlError::NotSupported { call: "nvmlDeviceCreateGpuInstanceWithPlacement" })
    }

    /// Destroys a GPU instance and its compute instances.
    fn destroy_mig_instance(&self, _gpu: &str, _gpu_instance: u32) -> Result<(), NvmlError> {
        Err(NvmlError::NotSupported { call: "nvmlGpuInstanceDestroy" })
    }
}
