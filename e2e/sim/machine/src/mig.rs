//! Implements NVML's rules for MIG mode, GPU instances and compute instances. Pure: callers pass in
//! whether devices are in use.

use crate::description::derive_uuid;
use crate::model::{GpuProfile, Model, Placement};
use crate::state::{ComputeInstance, ComputeMode, Gpu, GpuInstance};

/// Why a MIG change is refused. Each variant corresponds to an NVML return code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MigError {
    /// The model does not support MIG, or MIG mode is off.
    #[error("not supported")]
    NotSupported,
    /// The profile does not exist, or the profile does not allow the placement.
    #[error("invalid argument")]
    InvalidArgument,
    /// Other instances use the slices or the media engines.
    #[error("insufficient resources")]
    InsufficientResources,
    /// A process or an instance uses the GPU or the instance.
    #[error("in use")]
    InUse,
    /// The instance does not exist.
    #[error("not found")]
    NotFound,
    /// MIG mode can change only at the next reset.
    #[error("reset required")]
    ResetRequired,
}

/// Returns the id of a GPU instance, which depends only on its placement. The ids number the nodes
/// of a binary tree over the memory slices, starting at the root.
#[must_use]
pub fn gpu_instance_id(memory_slices: u32, placement: Placement) -> u32 {
    let size = placement.size.max(1);
    memory_slices / size - 1 + placement.start / size
}

impl Gpu {
    fn require_mig_mode(&self, model: &Model) -> Result<(), MigError> {
        if self.mig && model.is_mig_capable() { Ok(()) } else { Err(MigError::NotSupported) }
    }

    /// Switches MIG mode. `busy` is true if a process uses the GPU or one of its instances. If the
    /// GPU is in use or requires a reset, the change remains pending until the next reset, and the
    /// error contains the reason.
    ///
    /// # Errors
    /// Returns an error if the model does not support MIG, a process or an instance uses the GPU,
    /// or a reset is required.
    pub fn set_mig_mode(&mut self, model: &Model, on: bool, busy: bool) -> Result<(), MigError> {
        if !model.is_mig_capable() {
            return Err(MigError::NotSupported);
        }
        self.mig_pending = on;
        if on == self.mig {
            return Ok(());
        }
        if busy || !self.instances.is_empty() {
            return Err(MigError::InUse);
        }
        if self.mig_needs_reset {
            return Err(MigError::ResetRequired);
        }
        self.reset();
        Ok(())
    }

    /// Resets the GPU. The pending MIG mode becomes current, and all instances are destroyed. A
    /// lost GPU works again, unless it was removed.
    pub fn reset(&mut self) {
        self.mig = self.mig_pending;
        self.instances.clear();
        self.lost = self.removed;
        // A reset clears volatile counters, remaps pending rows and performs the recovery action
        // that the driver requested. A reset does not repair failed remapping.
        (self.ecc, self.remap_pending, self.recovery) = ([0, 0], false, 0);
        if self.mig {
            self.compute_mode = ComputeMode::Default;
        }
    }

    /// Returns the placements where an instance of a profile can be created now, lowest first.
    #[must_use]
    pub fn free_placements(&self, model: &Model, profile: &GpuProfile) -> Vec<Placement> {
        let placements = profile.starts.iter().map(|&start| Placement { start, size: profile.size });
        let taken = |p: Placement| self.instances.iter().any(|i| i.placement.overlaps(p));
        if self.lacks_engines(model, profile) { Vec::new() } else { placements.filter(|p| !taken(*p)).collect() }
    }

    /// Returns whether an instance of `wanted` needs more media engines than are free. Media
    /// engines have no placement, so only their number matters. For example, a GPU has one optical
    /// flow accelerator.
    fn lacks_engines(&self, model: &Model, wanted: &GpuProfile) -> bool {
        let Some(whole) = model.gpu_profiles.iter().max_by_key(|p| p.slices) else { return true };
        let used = || self.instances.iter().filter_map(|i| model.gpu_profile(i.profile)).chain([wanted]);
        used().map(|p| p.ofa).sum::<u32>() > whole.ofa
            || used().map(|p| p.jpeg).sum::<u32>() > whole.jpeg
            || used().map(|p| p.decoders).sum::<u32>() > whole.decoders
    }

    /// Returns the number of further instances of a profile that fit. If MIG is off, assumes that
    /// it is on.
    #[must_use]
    pub fn remaining_capacity(&self, model: &Model, profile: &GpuProfile) -> u32 {
        let mut trial = Self { mig: true, ..self.clone() };
        let mut count = 0;
        while trial.create_gpu_instance(model, profile.id, None).is_ok() {
            count += 1;
        }
        count
    }

    /// Creates a GPU instance at the requested placement. Without one, chooses the placement that
    /// blocks the fewest free placements of all profiles. Returns the id of the GPU instance.
    ///
    /// # Errors
    /// Returns an error if MIG is off, if the profile or placement does not exist, or if too few
    /// slices or media engines are free.
    pub fn create_gpu_instance(
        &mut self,
        model: &Model,
        profile_id: u32,
        at: Option<Placement>,
    ) -> Result<u32, MigError> {
        self.require_mig_mode(model)?;
        let profile = model.gpu_profile(profile_id).ok_or(MigError::InvalidArgument)?;
        let free = self.free_placements(model, profile);
        let placement = match at {
            Some(at) if at.size != profile.size || !profile.starts.contains(&at.start) => {
                return Err(MigError::InvalidArgument);
            }
            Some(at) => free.into_iter().find(|p| *p == at),
            // This is the driver's order: seven 1g instances start at 6, 4, 5, 0, 1, 2, 3.
            None => free.into_iter().min_by_key(|p| (self.count_blocked_placements(model, *p), p.start)),
        };
        let placement = placement.ok_or(MigError::InsufficientResources)?;
        let id = gpu_instance_id(model.mig_memory_slices, placement);
        self.instances.push(GpuInstance { id, profile: profile.id, placement, compute: Vec::new() });
        self.instances.sort_by_key(|i| i.id);
        Ok(id)
    }

    /// Returns the number of free placements of all profiles that an instance at this placement
    /// would block.
    fn count_blocked_placements(&self, model: &Model, placement: Placement) -> usize {
        let free = |p: &GpuProfile| self.free_placements(model, p);
        model.gpu_profiles.iter().flat_map(free).filter(|p| p.overlaps(placement)).count()
    }

    /// Destroys a GPU instance.
    ///
    /// # Errors
    /// Returns an error if the instance does not exist, or has compute instances.
    pub fn destroy_gpu_instance(&mut self, id: u32) -> Result<(), MigError> {
        let at = self.instances.iter().position(|i| i.id == id).ok_or(MigError::NotFound)?;
        if !self.instances[at].compute.is_empty() {
            return Err(MigError::InUse);
        }
        self.instances.remove(at);
        Ok(())
    }

    /// Returns the placements in a GPU instance where a compute instance of `size` slices can be
    /// created now, lowest first.
    #[must_use]
    pub fn free_compute_placements(&self, model: &Model, gpu_instance: u32, size: u32) -> Vec<Placement> {
        let Some(gi) = self.instances.iter().find(|i| i.id == gpu_instance) else { return Vec::new() };
        let slices = model.gpu_profile(gi.profile).map_or(0, |p| p.slices);
        let taken = |p: &Placement| gi.compute.iter().any(|c| c.placement.overlaps(*p));
        (0..=slices.saturating_sub(size)).map(|start| Placement { start, size }).filter(|p| !taken(p)).collect()
    }

    /// Creates a compute instance at the requested placement, or at the lowest free placement.
    /// Returns the id of the compute instance.
    ///
    /// # Errors
    /// Returns an error if MIG is off, if the GPU instance, profile or placement does not exist, or
    /// if too few slices are free.
    pub fn create_compute_instance(
        &mut self,
        model: &Model,
        gpu_instance: u32,
        id: u32,
        at: Option<Placement>,
    ) -> Result<u32, MigError> {
        self.require_mig_mode(model)?;
        let gi = self.instances.iter().find(|i| i.id == gpu_instance).ok_or(MigError::NotFound)?;
        let profile = model.compute_profile(gi.profile, id).ok_or(MigError::InvalidArgument)?;
        let mut free = self.free_compute_placements(model, gpu_instance, profile.slices).into_iter();
        let placement = match at {
            Some(at) if at.size != profile.slices => return Err(MigError::InvalidArgument),
            Some(at) => free.find(|p| *p == at),
            None => free.next(),
        };
        let placement = placement.ok_or(MigError::InsufficientResources)?;
        let taken = |n: &u32| gi.compute.iter().any(|c| c.id == *n);
        let id = (0..8).find(|n| !taken(n)).ok_or(MigError::InsufficientResources)?;
        let names = ["mig", &self.uuid, &gpu_instance.to_string(), &id.to_string()];
        let uuid = format!("MIG-{}", derive_uuid(&names));
        let made = ComputeInstance { id, profile: profile.id, placement, uuid };
        if let Some(gi) = self.instances.iter_mut().find(|i| i.id == gpu_instance) {
            gi.compute.push(made);
            gi.compute.sort_by_key(|c| c.id);
        }
        Ok(id)
    }

    /// Destroys a compute instance. `busy` returns whether a process uses the MIG device with this
    /// UUID.
    ///
    /// # Errors
    /// Returns an error if the instance does not exist, or if a process uses the instance.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::description::{GpuDescription, MachineDescription};
    use crate::model::{builtin_models, find_model};

    fn gpu(model: &str) -> (Gpu, &'static Model) {
        let gpus = vec![GpuDescription { model: model.to_owned(), mig: true, ..GpuDescription::default() }];
        let mut state =
            MachineDescription { name: "test".to_owned(), gpus, ..MachineDescription::default() }.state().unwrap();
        (state.gpus.remove(0), find_model(&[], model).unwrap())
    }

    fn profile_id(model: &Model, name: &str) -> u32 {
        model.gpu_profiles.iter().find(|p| p.name == name).unwrap().id
    }

    fn placement_at(start: u32, size: u32) -> Placement {
        Placement { start, size }
    }

    #[test]
    fn the_built_in_models_are_consistent() {
        let names: Vec<&String> = builtin_models().iter().flat_map(|m| m.aliases.iter().chain([&m.name])).collect();
        let distinct: std::collections::BTreeSet<&String> = names.iter().copied().collect();
        assert!(!names.is_empty() && distinct.len() == names.len(), "names and aliases are unique: {names:?}");
        for model in builtin_models() {
            for p in &model.gpu_profiles {
                let text = format!("{} {}", model.name, p.name);
                let apart = p.starts.windows(2).all(|w| w[1] - w[0] >= p.size) || p.size == 1;
                assert!(apart && p.starts.iter().all(|s| s + p.size <= model.mig_memory_slices), "{text}");
                assert!(p.instances as usize <= p.starts.len() && p.sms <= model.sms, "{text}");
                assert!(p.memory_mib * u64::from(p.instances) <= model.memory_mib, "{text}");
                let (fresh, _) = gpu(&model.name);
                assert_eq!(fresh.remaining_capacity(model, p), p.instances, "{text}");
            }
        }
    }

    #[test]
    fn instances_get_the_drivers_placements_and_ids() {
        let (mut a100, model) = gpu("A100-40");
        let seven: Vec<u32> = (0..7).map(|_| a100.create_gpu_instance(model, 19, None).unwrap()).collect();
        assert_eq!(seven, [13, 11, 12, 7, 8, 9, 10]);
        assert_eq!(a100.create_gpu_instance(model, 19, None), Err(MigError::InsufficientResources));
        let (mut a100, model) = gpu("A100-40");
        let halves: Vec<u32> = (0..2).map(|_| a100.create_gpu_instance(model, 9, None).unwrap()).collect();
        assert_eq!(halves, [2, 1]);
        let (mut a100, model) = gpu("A100-40");
        let mixed = [19, 14, 5].map(|p| a100.create_gpu_instance(model, p, None).unwrap());
        assert_eq!(mixed, [13, 5, 1]);
    }

    #[test]
    fn an_invalid_or_taken_placement_is_refused() {
        let (mut h100, model) = gpu("H100-80");
        let (three, four, two) =
            (profile_id(model, "3g.40gb"), profile_id(model, "4g.40gb"), profile_id(model, "2g.20gb"));
        assert_eq!(h100.create_gpu_instance(model, three, Some(placement_at(2, 4))), Err(MigError::InvalidArgument));
        assert_eq!(h100.create_gpu_instance(model, three, Some(placement_at(4, 3))), Err(MigError::InvalidArgument));
        assert_eq!(h100.create_gpu_instance(model, 99, None), Err(MigError::InvalidArgument));
        assert_eq!(h100.create_gpu_instance(model, three, Some(placement_at(0, 4))), Ok(1));
        assert_eq!(h100.create_gpu_instance(model, four, None), Err(MigError::InsufficientResources));
        assert_eq!(
            h100.create_gpu_instance(model, two, Some(placement_at(2, 2))),
            Err(MigError::InsufficientResources)
        );
        assert_eq!(h100.create_gpu_instance(model, two, Some(placement_at(4, 2))), Ok(5));
        let one = model.gpu_profiles.iter().find(|p| p.name == "1g.10gb").unwrap();
        assert_eq!(h100.remaining_capacity(model, one), 1);
    }

    #[test]
    fn media_engines_limit_the_number_of_instances() {
        let (mut h200, model) = gpu("H200-141");
        let me = profile_id(model, "1g.18gb+me");
        h200.create_gpu_instance(model, me, None).unwrap();
        assert_eq!(h200.create_gpu_instance(model, me, None), Err(MigError::InsufficientResources));
        let plain = model.gpu_profiles.iter().find(|p| p.name == "1g.18gb").unwrap();
        assert_eq!(h200.remaining_capacity(model, plain), 6);
    }

    #[test]
    fn instances_in_use_are_not_destroyed() {
        let (mut a30, model) = gpu("A30");
        let gi = a30.create_gpu_instance(model, profile_id(model, "2g.12gb"), None).unwrap();
        let ci = a30.create_compute_instance(model, gi, 1, None).unwrap();
        assert_eq!(a30.destroy_gpu_instance(gi), Err(MigError::InUse));
        assert_eq!(a30.destroy_compute_instance(gi, ci, |_| true), Err(MigError::InUse));
        a30.destroy_compute_instance(gi, ci, |_| false).unwrap();
        a30.destroy_gpu_instance(gi).unwrap();
        assert_eq!(a30.destroy_gpu_instance(gi), Err(MigError::NotFound));
    }

    #[test]
    fn compute_instances_share_a_gpu_instance() {
        let (mut h100, model) = gpu("H100-80");
        let gi = h100.create_gpu_instance(model, 0, None).unwrap();
        let (three, two) = (2, 1);
        let ids: Vec<u32> = [three, three].map(|p| h100.create_compute_instance(model, gi, p, None).unwrap()).to_vec();
        assert_eq!(ids, [0, 1]);
        assert_eq!(h100.create_compute_instance(model, gi, two, None), Err(MigError::InsufficientResources));
        assert_eq!(h100.create_compute_instance(model, gi, 0, Some(placement_at(6, 1))), Ok(2));
        h100.destroy_compute_instance(gi, 0, |_| false).unwrap();
        assert_eq!(h100.create_compute_instance(model, gi, two, None), Ok(0));
        let compute = &h100.instances[0].compute;
        assert_eq!(compute.iter().map(|c| c.placement.start).collect::<Vec<_>>(), [0, 3, 6]);
        assert_ne!(compute[0].uuid, compute[1].uuid);
    }

    #[test]
    fn mig_mode_changes_on_an_idle_gpu_or_at_the_required_reset() {
        let (mut a100, model) = gpu("A100-80");
        a100.create_gpu_instance(model, 0, None).unwrap();
        assert_eq!(a100.set_mig_mode(model, false, false), Err(MigError::InUse));
        assert_eq!((a100.mig, a100.mig_pending), (true, false));
        a100.destroy_gpu_instance(0).unwrap();
        assert_eq!(a100.set_mig_mode(model, false, true), Err(MigError::InUse));
        assert_eq!(a100.set_mig_mode(model, false, false), Ok(()));
        assert_eq!(a100.create_gpu_instance(model, 0, None), Err(MigError::NotSupported));
        a100.mig_needs_reset = true;
        assert_eq!(a100.set_mig_mode(model, true, false), Err(MigError::ResetRequired));
        assert!(!a100.mig);
        a100.reset();
        assert!(a100.mig);
        let t4 = find_model(&[], "T4").unwrap();
        assert_eq!(a100.set_mig_mode(t4, true, false), Err(MigError::NotSupported));
    }
}
