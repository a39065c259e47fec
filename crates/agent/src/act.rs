//! Makes one change of a GPU. Blocks while NVML does.
use cleave_gpu::nvml::{Gpu, Gpus, MigActivation, MigInstance, NvmlError, Process};

use crate::gpu::hardware::chain;
use crate::gpu::mig::{Change, Order, Outcome, in_use_by};

/// Makes a change, unless something uses what would go, and looks at the GPU afterwards.
pub fn perform(gpus: &dyn Gpus, order: &Order) -> (Outcome, Option<(Gpu, Vec<Process>)>) {
    let Order { gpu, change } = order;
    let outcome = attempt(gpus, gpu, change).unwrap_or_else(|error| match error {
        NvmlError::InUse { .. } => Outcome::Busy(chain(&error)),
        error => Outcome::Failed(chain(&error)),
    });
    let look = || Ok::<_, NvmlError>((gpus.gpu(gpu)?, gpus.processes(gpu)?));
    (outcome, look().ok())
}

fn attempt(gpus: &dyn Gpus, uuid: &str, change: &Change) -> Result<Outcome, NvmlError> {
    let gpu = gpus.gpu(uuid)?;
    let there: &[MigInstance] = gpu.mig.as_ref().map_or(&[], |mig| &mig.instances);
    let users = |wanted: &dyn Fn(&Process) -> bool| -> Result<Option<Outcome>, NvmlError> {
        let processes = gpus.processes(uuid)?;
        let users: Vec<&Process> = processes.iter().filter(|process| wanted(process)).collect();
        Ok((!users.is_empty()).then(|| Outcome::Busy(in_use_by(&users))))
    };
    match change {
        Change::Destroy(instance) => {
            // Another one that has its place by now is not the one that was to go.
            if !there.contains(instance) {
                return Ok(Outcome::Done);
            }
            if let Some(busy) = users(&|process| process.gpu_instance == Some(instance.gpu_instance))? {
                return Ok(busy);
            }
            gpus.destroy_mig_instance(uuid, instance.gpu_instance)?;
            Ok(Outcome::Done)
        }
        Change::Mode(on) => {
            // Taking back what is only pending disturbs nobody.
            if gpu.mig.as_ref().is_none_or(|mig| mig.enabled != *on) {
                if !there.is_empty() {
                    return Ok(Outcome::Busy("MIG instances are there".into()));
                }
                if let Some(busy) = users(&|_| true)? {
                    return Ok(busy);
                }
            }
            Ok(match gpus.set_mig_mode(uuid, *on)? {
                MigActivation::Now => Outcome::Done,
                MigActivation::AfterReset => Outcome::AfterReset,
                MigActivation::InUse => Outcome::Busy(
                    "the driver says that the GPU is in use, if only by a monitor or the persistence daemon".into(),
                ),
            })
        }
        Change::Create { profile, start } => {
            let is = |found: &&MigInstance| found.profile == *profile && found.start == *start;
            if there.iter().find(is).is_none_or(|found| found.uuid.is_empty()) {
                gpus.create_mig_instance(uuid, profile, *start)?;
            }
            Ok(Outcome::Done)
        }
    }
}
