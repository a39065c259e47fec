//! Simulates one GPU in memory. The simulated GPU refuses changes as a real GPU does, and can fail
//! any change.
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use cleave_gpu::nvml::{
    ComputeMode, DriverInfo, Gpu, Gpus, MigActivation, MigInstance, MigProfile, MigState, NvmlError, Process,
};
use cleave_plan::units::{Mebibytes, Sms};
use sim_machine::{GpuDescription, MachineDescription, MigError, Model, Placement, find_model};

use crate::fixtures::{Inventory, gpu};

/// UUID of the simulated GPU.
pub(super) const GPU_UUID: &str = "GPU-a";

pub(super) struct SimulatedGpu {
    pub(super) state: sim_machine::Gpu,
    model: &'static Model,
    /// Number of compute instances created so far.
    created: u32,
    /// GPU instances of the processes, by PID. `None` for a process on a GPU without MIG mode.
    pub(super) processes: BTreeMap<u32, Option<u32>>,
    /// Number of further calls that fail, by name of the call.
    pub(super) failures: BTreeMap<&'static str, u32>,
    /// Names of all calls that change the GPU, in order.
    pub(super) calls: Vec<&'static str>,
}

/// A handle to a simulated GPU. All clones refer to the same GPU.
#[derive(Clone)]
pub(super) struct SharedGpu(Arc<Mutex<SimulatedGpu>>);

impl SimulatedGpu {
    pub(super) fn new(model: &str) -> Self {
        let description =
            GpuDescription { model: model.into(), uuid: Some(GPU_UUID.into()), ..GpuDescription::default() };
        let mut state =
            MachineDescription { gpus: vec![description], ..MachineDescription::default() }.state().unwrap();
        let model = find_model(&[], model).unwrap();
        let (processes, failures) = Default::default();
        Self { state: state.gpus.remove(0), model, created: 0, processes, failures, calls: Vec::new() }
    }

    /// Records a call. Returns an error while `failures` contains a count for the call.
    fn record_call(&mut self, name: &'static str) -> Result<(), NvmlError> {
        self.calls.push(name);
        match self.failures.get_mut(name) {
            Some(left) if *left > 0 => {
                *left -= 1;
                Err(NvmlError::Lost { call: name })
            }
            _ => Ok(()),
        }
    }

    pub(super) fn describe(&self) -> Gpu {
        let profile = |profile: &sim_machine::GpuProfile| MigProfile {
            id: profile.id,
            name: profile.name.clone(),
            memory: Mebibytes(profile.memory_mib),
            sms: Sms(profile.sms),
            slices: profile.slices,
            size: profile.size,
            starts: profile.starts.clone(),
        };
        let instance = |gi: &sim_machine::GpuInstance| MigInstance {
            uuid: gi.compute.first().map(|ci| ci.uuid.clone()).unwrap_or_default(),
            profile: self.model.gpu_profile(gi.profile).unwrap().name.clone(),
            start: gi.placement.start,
            gpu_instance: gi.id,
            compute_instance: gi.compute.first().map(|ci| ci.id),
        };
        let mig = self.model.is_mig_capable().then(|| MigState {
            enabled: self.state.mig,
            pending: (self.state.mig != self.state.mig_pending).then_some(self.state.mig_pending),
            profiles: self.model.gpu_profiles.iter().map(profile).collect(),
            instances: self.state.instances.iter().map(instance).collect(),
        });
        Gpu { mig, ..gpu(GPU_UUID, 0) }
    }

    pub(super) fn processes(&self) -> Vec<Process> {
        let process =
            |(&pid, &gpu_instance): (&u32, &Option<u32>)| Process { pid, memory: None, mps: false, gpu_instance };
        self.processes.iter().map(process).collect()
    }

    pub(super) fn create_gpu_instance(&mut self, profile: &str, start: u32) -> Result<u32, NvmlError> {
        self.record_call("gi")?;
        let profile = self.model.gpu_profiles.iter().find(|known| known.name == profile).unwrap();
        let at = Placement { start, size: profile.size };
        let no = |_| NvmlError::NotSupported { call: "nvmlDeviceCreateGpuInstanceWithPlacement" };
        self.state.create_gpu_instance(self.model, profile.id, Some(at)).map_err(no)
    }

    pub(super) fn create_compute_instance(&mut self, gpu_instance: u32) -> Result<(), NvmlError> {
        self.record_call("ci")?;
        let slices = |id| self.model.gpu_profile(id).unwrap().slices;
        let gi = self.state.instances.iter().find(|gi| gi.id == gpu_instance).unwrap();
        let whole = self.model.compute_profiles(gi.profile).into_iter().find(|ci| ci.slices == slices(gi.profile));
        self.state.create_compute_instance(self.model, gpu_instance, whole.unwrap().id, None).unwrap();
        // Every instance gets a new UUID, even at the placement of an earlier instance.
        self.created += 1;
        let instance = self.state.instances.iter_mut().find(|gi| gi.id == gpu_instance).unwrap();
        instance.compute[0].uuid = format!("MIG-{}", self.created);
        Ok(())
    }

    pub(super) fn destroy_compute_instance(&mut self, gpu_instance: u32) -> Result<(), NvmlError> {
        self.record_call("ci-destroy")?;
        let busy = self.processes.values().any(|inside| *inside == Some(gpu_instance));
        match self.state.destroy_compute_instance(gpu_instance, 0, |_| busy) {
            Ok(()) | Err(MigError::NotFound) => Ok(()),
            Err(_) => Err(NvmlError::InUse { call: "nvmlComputeInstanceDestroy" }),
        }
    }

    fn destroy_gpu_instance(&mut self, gpu_instance: u32) -> Result<(), NvmlError> {
        self.record_call("gi-destroy")?;
        self.state.destroy_gpu_instance(gpu_instance).map_err(|_| NvmlError::NotFound(gpu_instance.to_string()))
    }

    pub(super) fn instances(&self) -> Vec<(String, u32)> {
        let of = |instance: &MigInstance| (instance.profile.clone(), instance.start);
        self.describe().mig.iter().flat_map(|mig| &mig.instances).map(of).collect()
    }
}

impl SharedGpu {
    pub(super) fn new(model: &str) -> Self {
        Self(Arc::new(Mutex::new(SimulatedGpu::new(model))))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, SimulatedGpu> {
        self.0.lock().unwrap()
    }

    /// Returns NVML's answers about the driver and the GPU.
    #[expect(clippy::unnecessary_wraps, reason = "NVML calls return a Result")]
    pub(super) fn inventory(&self) -> Result<Inventory, NvmlError> {
        let gpu = self.lock();
        Ok(Inventory {
            driver: "580".into(),
            gpus: BTreeMap::from([(0, Ok(gpu.describe()))]),
            processes: BTreeMap::from([(GPU_UUID.to_owned(), gpu.processes())]),
        })
    }
}

impl Gpus for SharedGpu {
    fn driver_info(&self) -> Result<DriverInfo, NvmlError> {
        Ok(DriverInfo { driver: "580".into(), count: 1 })
    }
    fn gpu_at(&self, _: u32) -> Result<Gpu, NvmlError> {
        Ok(self.lock().describe())
    }
    fn gpu(&self, _: &str) -> Result<Gpu, NvmlError> {
        Ok(self.lock().describe())
    }
    fn processes(&self, _: &str) -> Result<Vec<Process>, NvmlError> {
        Ok(self.lock().processes())
    }
    fn set_compute_mode(&self, _: &str, _: ComputeMode) -> Result<ComputeMode, NvmlError> {
        unreachable!("only the MPS host sets the compute mode")
    }
    fn set_mig_mode(&self, _: &str, on: bool) -> Result<MigActivation, NvmlError> {
        let mut gpu = self.lock();
        gpu.record_call("mode")?;
        let (model, busy) = (gpu.model, !gpu.processes.is_empty());
        match gpu.state.set_mig_mode(model, on, busy) {
            Ok(()) => Ok(MigActivation::Now),
            Err(MigError::ResetRequired) => Ok(MigActivation::AfterReset),
            Err(MigError::InUse) => Ok(MigActivation::InUse),
            Err(_) => Err(NvmlError::NotSupported { call: "nvmlDeviceSetMigMode" }),
        }
    }
    fn create_mig_instance(&self, gpu: &str, profile: &str, start: u32) -> Result<MigInstance, NvmlError> {
        let id = self.lock().create_gpu_instance(profile, start)?;
        let created = self.lock().create_compute_instance(id);
        if let Err(error) = created {
            // Roll back as the agent's NVML module does. The rollback may also fail.
            let _ = self.lock().destroy_gpu_instance(id);
            return Err(error);
        }
        let instances = self.gpu(gpu)?.mig.unwrap().instances;
        Ok(instances.into_iter().find(|instance| instance.gpu_instance == id).unwrap())
    }
    fn destroy_mig_instance(&self, _: &str, gpu_instance: u32) -> Result<(), NvmlError> {
        self.lock().destroy_compute_instance(gpu_instance)?;
        self.lock().destroy_gpu_instance(gpu_instance)
    }
}
