//! Implements NVML's MIG calls: handles of instances, and changes to instances.

use nvml_wrapper_sys::bindings as sys;
use sim_machine::{
    ComputeInstance, ComputeProfile, EventKind, Gpu, GpuInstance, GpuProfile, Machine, Model, Placement, State,
};

use crate::device;
use crate::events;
use crate::library::{Code, Handle, HandleTarget, MachineView, Result, handle_of, object_of_handle};

/// Returns a GPU's MIG devices in NVML's order: by GPU instance, and then by compute instance.
pub(crate) fn mig_devices(gpu: &Gpu) -> Vec<(&GpuInstance, &ComputeInstance)> {
    gpu.instances.iter().flat_map(|gi| gi.compute.iter().map(move |ci| (gi, ci))).collect()
}

/// Returns the maximum number of MIG devices on the GPU, or 0 if MIG is off.
pub(crate) fn max_mig_devices(gpu: &Gpu, model: &Model) -> u32 {
    if gpu.mig { model.gpu_profiles.iter().map(|p| p.instances).max().unwrap_or(0) } else { 0 }
}

/// Returns a GPU instance profile by NVML's index. If the index exists in NVML but not for this
/// model, the error is "not supported". Other indices are invalid arguments.
pub(crate) fn profile_by_index(model: &Model, index: u32) -> Result<&GpuProfile> {
    if index >= sys::NVML_GPU_INSTANCE_PROFILE_COUNT {
        return Err(Code::INVALID_ARGUMENT);
    }
    model.gpu_profiles.iter().find(|p| p.index == index).ok_or(Code::NOT_SUPPORTED)
}

/// Returns a GPU instance profile by its id.
pub(crate) fn profile_by_id(model: &Model, id: u32) -> Result<&GpuProfile> {
    if !model.is_mig_capable() {
        return Err(Code::NOT_SUPPORTED);
    }
    model.gpu_profile(id).ok_or(Code::INVALID_ARGUMENT)
}

/// Returns a compute instance profile of a GPU instance by NVML's index.
pub(crate) fn compute_profile_by_index(
    model: &Model,
    gi: &GpuInstance,
    index: u32,
    engine: u32,
) -> Result<ComputeProfile> {
    if index >= sys::NVML_COMPUTE_INSTANCE_PROFILE_COUNT || engine >= sys::NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_COUNT {
        return Err(Code::INVALID_ARGUMENT);
    }
    model.compute_profiles(gi.profile).into_iter().find(|p| p.index == index).ok_or(Code::NOT_SUPPORTED)
}

/// Returns a compute instance profile of a GPU instance by its id.
pub(crate) fn compute_profile_by_id(model: &Model, gi: &GpuInstance, id: u32) -> Result<ComputeProfile> {
    model.compute_profile(gi.profile, id).ok_or(Code::INVALID_ARGUMENT)
}

/// Returns the GPU's UUID and the instance id for the handle of a GPU instance.
pub(crate) fn gpu_instance_of_handle(instance: Handle) -> Result<(String, u32)> {
    match object_of_handle(instance)? {
        HandleTarget::GpuInstance(gpu, id) => Ok((gpu, id)),
        _ => Err(Code::INVALID_ARGUMENT),
    }
}

/// Returns the GPU's UUID, the GPU instance id and the compute instance id for the handle of a
/// compute instance.
pub(crate) fn compute_instance_of_handle(instance: Handle) -> Result<(String, u32, u32)> {
    match object_of_handle(instance)? {
        HandleTarget::ComputeInstance(gpu, gi, id) => Ok((gpu, gi, id)),
        _ => Err(Code::INVALID_ARGUMENT),
    }
}

/// Returns a GPU instance in its current state.
pub(crate) fn find_gpu_instance<'v>(
    view: &'v MachineView,
    gpu: &str,
    id: u32,
) -> Result<(&'v Gpu, &'v Model, &'v GpuInstance)> {
    let (gpu, model) = view.gpu(gpu)?;
    let found = gpu.instances.iter().find(|i| i.id == id).ok_or(Code::NOT_FOUND)?;
    Ok((gpu, model, found))
}

/// Switches MIG mode. The returned code states whether the new mode is active. An error means that
/// NVML refused the request.
pub(crate) fn set_mig_mode(view: &MachineView, uuid: &str, on: bool) -> Result<sys::nvmlReturn_t> {
    view.machine.update(|state| {
        let processes = device::processes_on_gpu(&view.machine, state, uuid);
        let is_ampere = state.model(state.gpu(uuid)?)?.architecture == "Ampere";
        // The program's own session does not count, but its event registrations count, because they
        // open the GPU a second time.
        let sessions = || view.machine.open_sessions(Some(uuid), true) > 0 || events::is_registered(uuid);
        let busy = !processes.is_empty() || (is_ampere && sessions());
        let (gpu, model) = gpu_to_change(state, uuid)?;
        let activation = match gpu.set_mig_mode(&model, on, busy) {
            Ok(()) => sys::nvmlReturn_enum_NVML_SUCCESS,
            Err(sim_machine::MigError::NotSupported) => return Err(Code::NOT_SUPPORTED),
            Err(later) => Code::from(later).0,
        };
        state.push_event(uuid, EventKind::MigConfigChange, 0, None);
        Ok(activation)
    })
}

/// Creates a GPU instance.
pub(crate) fn create_gpu_instance(
    view: &MachineView,
    uuid: &str,
    profile: u32,
    at: Option<Placement>,
) -> Result<Handle> {
    let id = change_gpu(&view.machine, uuid, |gpu, model| Ok(gpu.create_gpu_instance(model, profile, at)?))?;
    Ok(handle_of(HandleTarget::GpuInstance(uuid.to_owned(), id)))
}

/// Destroys a GPU instance.
pub(crate) fn destroy_gpu_instance(view: &MachineView, uuid: &str, id: u32) -> Result<()> {
    change_gpu(&view.machine, uuid, |gpu, _| Ok(gpu.destroy_gpu_instance(id)?))
}

/// Creates a compute instance.
pub(crate) fn create_compute_instance(
    view: &MachineView,
    uuid: &str,
    gi: u32,
    profile: u32,
    at: Option<Placement>,
) -> Result<Handle> {
    let id = change_gpu(&view.machine, uuid, |gpu, model| Ok(gpu.create_compute_instance(model, gi, profile, at)?))?;
    Ok(handle_of(HandleTarget::ComputeInstance(uuid.to_owned(), gi, id)))
}

/// Destroys a compute instance that no process uses.
pub(crate) fn destroy_compute_instance(view: &MachineView, uuid: &str, gi: u32, id: u32) -> Result<()> {
    // Processes register under the same lock, so no process can appear before the instance is
    // destroyed.
    view.machine.update(|state| {
        let processes = view.machine.live_processes(state);
        let (gpu, _) = gpu_to_change(state, uuid)?;
        gpu.destroy_compute_instance(gi, id, |uuid| processes.iter().any(|p| p.device == uuid))?;
        state.push_event(uuid, EventKind::MigConfigChange, 0, None);
        Ok(())
    })
}

/// Changes the instances of a GPU, and records an event.
fn change_gpu<T>(machine: &Machine, uuid: &str, change: impl FnOnce(&mut Gpu, &Model) -> Result<T>) -> Result<T> {
    machine.update(|state| {
        let (gpu, model) = gpu_to_change(state, uuid)?;
        let done = change(gpu, &model)?;
        state.push_event(uuid, EventKind::MigConfigChange, 0, None);
        Ok(done)
    })
}

/// Returns the GPU to change, and its model. Fails if the GPU is lost.
fn gpu_to_change<'s>(state: &'s mut State, uuid: &str) -> Result<(&'s mut Gpu, Model)> {
    let model = state.model(state.gpu(uuid)?)?.clone();
    let gpu = state.gpu_mut(uuid)?;
    if gpu.lost { Err(Code::GPU_IS_LOST) } else { Ok((gpu, model)) }
}
