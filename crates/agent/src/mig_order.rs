//! Performs one change of a GPU's MIG mode or instances through NVML. Blocks until NVML answers.
use cleave_gpu::nvml::{Gpu, Gpus, MigActivation, MigInstance, NvmlError, Process};

use crate::gpu::hardware::error_chain;
use crate::gpu::mig::{ChangeOutcome, MigChange, MigOrder, in_use_message};

/// Performs a change, unless a process uses the MIG instance or the GPU. Returns the outcome. Also
/// returns the GPU and its processes after the change, if NVML reports them.
pub fn apply_order(gpus: &dyn Gpus, order: &MigOrder) -> (ChangeOutcome, Option<(Gpu, Vec<Process>)>) {
    let MigOrder { gpu, change } = order;
    let outcome = try_change(gpus, gpu, change).unwrap_or_else(|error| match error {
        NvmlError::InUse { .. } => ChangeOutcome::Busy(error_chain(&error)),
        error => ChangeOutcome::Failed(error_chain(&error)),
    });
    let observe = || Ok::<_, NvmlError>((gpus.gpu(gpu)?, gpus.processes(gpu)?));
    (outcome, observe().ok())
}

fn try_change(gpus: &dyn Gpus, uuid: &str, change: &MigChange) -> Result<ChangeOutcome, NvmlError> {
    let gpu = gpus.gpu(uuid)?;
    let there: &[MigInstance] = gpu.mig.as_ref().map_or(&[], |mig| &mig.instances);
    let users = |wanted: &dyn Fn(&Process) -> bool| -> Result<Option<ChangeOutcome>, NvmlError> {
        let processes = gpus.processes(uuid)?;
        let users: Vec<&Process> = processes.iter().filter(|process| wanted(process)).collect();
        Ok((!users.is_empty()).then(|| ChangeOutcome::Busy(in_use_message(&users))))
    };
    match change {
        MigChange::Destroy(instance) => {
            // Another instance may have replaced this one. Do not destroy the replacement.
            if !there.contains(instance) {
                return Ok(ChangeOutcome::Done);
            }
            if let Some(busy) = users(&|process| process.gpu_instance == Some(instance.gpu_instance))? {
                return Ok(busy);
            }
            gpus.destroy_mig_instance(uuid, instance.gpu_instance)?;
            Ok(ChangeOutcome::Done)
        }
        MigChange::Mode(on) => {
            // Cancelling a pending mode change does not affect programs on the GPU.
            if gpu.mig.as_ref().is_none_or(|mig| mig.enabled != *on) {
                if !there.is_empty() {
                    return Ok(ChangeOutcome::Busy("MIG instances still exist".into()));
                }
                if let Some(busy) = users(&|_| true)? {
                    return Ok(busy);
                }
            }
            Ok(match gpus.set_mig_mode(uuid, *on)? {
                MigActivation::Now => ChangeOutcome::Done,
                MigActivation::AfterReset => ChangeOutcome::AfterReset,
                MigActivation::InUse => ChangeOutcome::Busy(
                    "the driver reports that the GPU is in use, possibly by a monitoring program or the persistence daemon".into(),
                ),
            })
        }
        MigChange::Create { profile, start } => {
            let is = |found: &&MigInstance| found.profile == *profile && found.start == *start;
            if there.iter().find(is).is_none_or(|found| found.uuid.is_empty()) {
                gpus.create_mig_instance(uuid, profile, *start)?;
            }
            Ok(ChangeOutcome::Done)
        }
    }
}
