//! What NVML allows with MIG: modes, GPU instances and compute instances. Pure: the callers say what is in use.

use crate::description::derive_uuid;
use crate::model::{GpuProfile, Model, Placement};
use crate::state::{ComputeInstance, Gpu, GpuInstance};

/// Why MIG refuses; each is one of NVML's return codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MigError {
    /// The model has no MIG, or MIG mode is off.
    #[error("not supported")]
    NotSupported,
    /// No such profile, or the placement is none of the profile's.
    #[error("invalid argument")]
    InvalidArgument,
    /// The slices are taken, or the media engines are.
    #[error("insufficient resources")]
    InsufficientResources,
    /// A process or an instance is inside.
    #[error("in use")]
    InUse,
    /// No such instance.
    #[error("not found")]
    NotFound,
}

/// The id of a GPU instance, which follows from where it is: the nodes of a binary tree over the memory slices, from the root.
#[must_use]
pub fn gpu_instance_id(memory_slices: u32, placement: Placement) -> u32 {
    let size = placement.size.max(1);
    memory_slices / size - 1 + placement.start / size
}

impl Gpu {
    fn mig_ready(&self, model: &Model) -> Result<(), MigError> {
        if self.mig && model.mig_capable() { Ok(()) } else { Err(MigError::NotSupported) }
    }

    /// Where instances of a profile could be made now, lowest first.
    #[must_use]
    pub fn free_placements(&self, model: &Model, profile: &GpuProfile) -> Vec<Placement> {
        let placements = profile.starts.iter().map(|&start| Placement { start, size: profile.size });
        let taken = |p: Placement| self.instances.iter().any(|i| i.placement.overlaps(p));
        if self.lacks_engines(model, profile) { Vec::new() } else { placements.filter(|p| !taken(*p)).collect() }
    }

    /// Engines are not placed, only counted: an optical flow accelerator, for one, is there once.
    fn lacks_engines(&self, model: &Model, wanted: &GpuProfile) -> bool {
        let Some(whole) = model.gpu_profiles.iter().max_by_key(|p| p.slices) else { return true };
        let held = || self.instances.iter().filter_map(|i| model.gpu_profile(i.profile)).chain([wanted]);
        held().map(|p| p.ofa).sum::<u32>() > whole.ofa
            || held().map(|p| p.jpeg).sum::<u32>() > whole.jpeg
            || held().map(|p| p.decoders).sum::<u32>() > whole.decoders
    }

    /// How many more instances of a profile fit.
    #[must_use]
    pub fn remaining_capacity(&self, model: &Model, profile: &GpuProfile) -> u32 {
        let mut trial = self.clone();
        let mut count = 0;
        while trial.create_gpu_instance(model, profile.id, None).is_ok() {
            count += 1;
        }
        count
    }

    /// Makes a GPU instance, where asked or where it takes the least from larger profiles; returns its id.
    ///
    /// # Errors
    /// MIG is off, no such profile or placement, or no room.
    pub fn create_gpu_instance(&mut self, model: &Model, id: u32, at: Option<Placement>) -> Result<u32, MigError> {
        self.mig_ready(model)?;
        let profile = model.gpu_profile(id).ok_or(MigError::InvalidArgument)?;
        let free = self.free_placements(model, profile);
        let placement = match at {
            Some(at) if at.size != profile.size || !profile.starts.contains(&at.start) => {
                return Err(MigError::InvalidArgument);
            }
            Some(at) => free.into_iter().find(|p| *p == at),
            // As the driver does it: seven 1g go to 6, 4, 5, 0, 1, 2, 3.
            None => free.into_iter().min_by_key(|p| (self.blocked_by(model, *p), p.start)),
        };
        let placement = placement.ok_or(MigError::InsufficientResources)?;
        let id = gpu_instance_id(model.mig_memory_slices, placement);
        self.instances.push(GpuInstance { id, profile: profile.id, placement, compute: Vec::new() });
        self.instances.sort_by_key(|i| i.id);
        Ok(id)
    }

    /// How many placements of any profile, free now, an instance there would block.
    fn blocked_by(&self, model: &Model, placement: Placement) -> usize {
        let free = |p: &GpuProfile| self.free_placements(model, p);
        model.gpu_profiles.iter().flat_map(free).filter(|p| p.overlaps(placement)).count()
    }

    /// Destroys a GPU instance.
    ///
    /// # Errors
    /// It does not exist, or has compute instances.
    pub fn destroy_gpu_instance(&mut self, id: u32) -> Result<(), MigError> {
        let at = self.instances.iter().position(|i| i.id == id).ok_or(MigError::NotFound)?;
        if !self.instances[at].compute.is_empty() {
            return Err(MigError::InUse);
        }
        self.instances.remove(at);
        Ok(())
    }

    /// Where compute instances of so many slices could be made in a GPU instance now, lowest first.
    #[must_use]
    pub fn free_compute_placements(&self, model: &Model, gpu_instance: u32, size: u32) -> Vec<Placement> {
        let Some(gi) = self.instances.iter().find(|i| i.id == gpu_instance) else { return Vec::new() };
        let slices = model.gpu_profile(gi.profile).map_or(0, |p| p.slices);
        let taken = |p: &Placement| gi.compute.iter().any(|c| c.placement.overlaps(*p));
        (0..=slices.saturating_sub(size)).map(|start| Placement { start, size }).filter(|p| !taken(p)).collect()
    }

    /// Makes a compute instance, where asked or as low as it fits; returns its id.
    ///
    /// # Errors
    /// MIG is off, no such instance, profile or placement, or no room.
    pub fn create_compute_instance(
        &mut self,
        model: &Model,
        gpu_instance: u32,
        id: u32,
        at: Option<Placement>,
    ) -> Result<u32, MigError> {
        self.mig_ready(model)?;
        let gi = self.instances.iter().find(|i| i.id == gpu_instance).ok_or(MigError::NotFound)?;
        let profile = model.compute_profile(gi.profile, id).ok_or(MigError::InvalidArgument)?;
        let mut free = self.free_compute_placements(model, gpu_instance, profile.slices).into_iter();
        let placement = match at {
            Some(at) if at.size != profile.slices => return Err(MigError::InvalidArgument),
            Some(at) => free.find(|p| *p == at),
            None => free.next(),
        };
        let placement = placement.ok_or(MigError::InsufficientResources)?;
        let id = (0..).find(|n| gi.compute.iter().all(|c| c.id != *n)).unwrap_or(u32::MAX);
        let names = ["mig", &self.uuid, &gpu_instance.to_string(), &id.to_string()];
        let uuid = format!("MIG-{}", derive_uuid(&names));
        let made = ComputeInstance { id, profile: profile.id, placement, uuid };
        if let Some(gi) = self.instances.iter_mut().find(|i| i.id == gpu_instance) {
            gi.compute.push(made);
            gi.compute.sort_by_key(|c| c.id);
        }
        Ok(id)
    }

    /// Destroys a compute instance; `busy` says whether a process is in the device with that UUID.
    ///
    /// # Errors
    /// It does not exist, or a process is in it.
    pub fn destroy_compute_instance(
        &mut self,
        gpu_instance: u32,
        id: u32,
        busy: impl Fn(&str) -> bool,
    ) -> Result<(), MigError> {
        let gi = self.instances.iter_mut().find(|i| i.id == gpu_instance).ok_or(MigError::NotFound)?;
        let at = gi.compute.iter().position(|c| c.id == id).ok_or(MigError::NotFound)?;
        if busy(&gi.compute[at].uuid) {
            return Err(MigError::InUse);
        }
        gi.compute.remove(at);
        Ok(())
    }
}
