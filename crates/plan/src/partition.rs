//! Models one GPU: its slices, its possible partitions, and the partition that serves a set of
//! demands best.
use std::cmp::Ordering;
use std::rc::Rc;

use crate::device::{Families, Family};
use crate::mig::{Instance, Mask, ProfileTable};
use crate::mps::MAX_CLIENTS;

/// A resource, as its index in the model. Indices follow the order of names.
pub(crate) type ResourceId = u16;

/// Kind of a resource, derived from its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ResourceKind {
    Whole,
    Mig,
    /// A sized slice of this size in GiB.
    Sized(u64),
    /// Shares or replicas. All shares that one pod requests belong to one GPU or MIG instance.
    Shares,
}

/// A pod's request for one GPU: one slice, or some shares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GpuDemand {
    pub(crate) resource: ResourceId,
    pub(crate) kind: ResourceKind,
    /// Number of shares. 1 for any other kind of resource.
    pub(crate) units: u32,
}

/// Equal slices of one MIG instance or of the whole GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SliceCell {
    pub(crate) resource: ResourceId,
    pub(crate) kind: ResourceKind,
    /// The MIG instance that the slice is or belongs to. `None` without MIG.
    pub(crate) instance: Option<Instance>,
    pub(crate) count: u32,
}

/// How MIG instances are shared.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct InstanceSharing {
    pub(crate) units: u32,
    /// Resource of the shares of all profiles. `None` if each profile has its own resource.
    pub(crate) resource: Option<ResourceId>,
}

/// A table of MIG profiles that many classes use. Tables are compared by id.
#[derive(Debug, Clone)]
pub(crate) struct SharedTable {
    pub(crate) id: u32,
    pub(crate) table: Rc<ProfileTable>,
}

impl PartialEq for SharedTable {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl Eq for SharedTable {}

impl PartialOrd for SharedTable {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for SharedTable {
    fn cmp(&self, other: &Self) -> Ordering {
        self.id.cmp(&other.id)
    }
}

/// All properties of a GPU that affect a plan. GPUs of one class are interchangeable in a plan.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GpuClass {
    /// Families that the GPU can be repartitioned to. The set is empty for a GPU that must not be
    /// repartitioned.
    pub(crate) families: Families,
    /// Memory in MiB.
    pub(crate) memory: u64,
    /// Resource and number of the MPS shares that the GPU can have.
    pub(crate) shares: Option<(ResourceId, u32)>,
    /// Whether the GPU can have sized slices.
    pub(crate) sizes: bool,
    /// Resource and number of the replicas that the GPU can have.
    pub(crate) replicas: Option<(ResourceId, u32)>,
    pub(crate) instance_sharing: Option<InstanceSharing>,
    /// Resource of each MIG profile.
    pub(crate) mig: Vec<(ResourceId, u8)>,
    /// Resource of the shares of each MIG profile's instances.
    pub(crate) mig_shared: Vec<(ResourceId, u8)>,
    pub(crate) table: Option<SharedTable>,
    /// Slices in use, which are kept.
    pub(crate) in_use: Vec<SliceCell>,
    /// Slices not in use.
    pub(crate) free: Vec<SliceCell>,
}

/// A partition of a GPU that serves a set of demands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PackedPartition {
    /// Slices not in use yet: slices for the pods, and slices that remain free.
    pub(crate) free: Vec<SliceCell>,
    pub(crate) changed: bool,
    /// Number of free slices that the partition removes.
    pub(crate) destroyed: u32,
    /// Value of the remaining free capacity for future pods. The value is lower for fuller GPUs.
    pub(crate) room_value: i64,
    /// Memory and compute in use, in 65,536ths, rounded down.
    pub(crate) used: GpuUsage,
}

/// Memory and compute as parts of a GPU, in 65,536ths.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct GpuUsage {
    pub(crate) memory: u32,
    pub(crate) compute: u32,
}

/// A whole GPU in 65,536ths.
pub(crate) const WHOLE_GPU: u32 = 1 << 16;

/// Additional value of an unused GPU, because pods can request it whole or in another mode.
const IDLE_GPU_VALUE: i64 = 2000;
/// Value of a GPU whose memory and compute are entirely free.
const FULL_GPU_VALUE: u64 = 1000;

impl GpuClass {
    /// Checks whether the slices can exist on one GPU.
    pub(crate) fn check_consistency(&self) -> Result<(), String> {
        let cells = || self.in_use.iter().chain(&self.free);
        let mut families = Families::NONE;
        for cell in cells() {
            // A slice of a mode that the policy no longer allows has no family here, but is kept
            // while it is in use.
            families = self.family_of(cell).map_or(families, |family| families.with(family));
        }
        if ![Family::Whole, Family::Mps, Family::TimeSlicing, Family::Mig].iter().any(|&one| families.is_subset_of(one))
        {
            return Err("the GPU has slices that cannot exist on one GPU together".to_owned());
        }
        let (room, units) = (u128::from(self.memory), self.shares.map_or(1, |(_, units)| units));
        let of_mps = cells().filter(|cell| self.family_of(cell) == Some(Family::Mps));
        let taken: u128 = of_mps.map(|cell| self.scaled_memory(cell.kind, cell.count)).sum();
        if taken > room * u128::from(units) {
            return Err(format!("the GPU's slices exceed its memory of {} MiB", self.memory));
        }
        Ok(())
    }

    /// Returns the best partition that serves all demands. Returns `None` if no partition serves
    /// all demands.
    pub(crate) fn pack(&self, demands: &[GpuDemand]) -> Option<PackedPartition> {
        if self.needs_no_repartitioning(demands) {
            return Some(self.build_packed_partition(self.free.clone(), demands));
        }
        let free = self.repartition(demands)?;
        Some(self.build_packed_partition(free, demands))
    }

    /// Returns the name of the MIG profile with this index. Returns `None` if the GPU has no
    /// profile table, or its table has no such profile.
    pub(crate) fn profile_name(&self, profile: u8) -> Option<String> {
        self.table()?.name(profile).map(str::to_owned)
    }

    fn table(&self) -> Option<&ProfileTable> {
        self.table.as_ref().map(|shared| shared.table.as_ref())
    }

    fn build_packed_partition(&self, mut free: Vec<SliceCell>, demands: &[GpuDemand]) -> PackedPartition {
        free.retain(|cell| cell.count > 0);
        merge_cells(&mut free);
        let left = |cell: &SliceCell| {
            let same = free.iter().find(|other| other.resource == cell.resource && other.instance == cell.instance);
            same.map_or(0, |other| other.count).min(cell.count)
        };
        let destroyed = self.free.iter().map(|cell| cell.count - left(cell)).sum();
        let (room_value, used) = self.room_value_and_usage(&free, demands);
        PackedPartition { changed: free != self.free, destroyed, free, room_value, used }
    }

    /// Returns whether the existing slices serve the demands without a repartitioning.
    fn needs_no_repartitioning(&self, demands: &[GpuDemand]) -> bool {
        if demands.iter().any(|demand| demand.kind == ResourceKind::Whole) {
            let listed = self.free.iter().any(|cell| cell.kind == ResourceKind::Whole);
            let bare = self.in_use.is_empty() && self.free.is_empty() && self.families.has(Family::Whole);
            return demands.len() == 1 && (listed || bare);
        }
        let mut rest: Vec<(SliceCell, u32)> = self.free.iter().map(|cell| (*cell, cell.count)).collect();
        let mut sorted = demands.to_vec();
        // Place the largest groups of shares first, each in the cell where the fewest shares
        // remain.
        sorted.sort_unstable_by_key(|demand| (demand.resource, u32::MAX - demand.units));
        sorted.iter().all(|demand| allocate_from_fullest(&mut rest, demand).is_some())
    }

    fn families_in_use(&self) -> Families {
        self.in_use
            .iter()
            .fold(Families::NONE, |families, cell| self.family_of(cell).map_or(families, |f| families.with(f)))
    }

    /// Returns the family of a slice. Returns `None` for shares and replicas that the policy no
    /// longer allows.
    pub(crate) fn family_of(&self, cell: &SliceCell) -> Option<Family> {
        match cell.kind {
            ResourceKind::Whole => Some(Family::Whole),
            ResourceKind::Mig => Some(Family::Mig),
            ResourceKind::Sized(_) => Some(Family::Mps),
            ResourceKind::Shares if cell.instance.is_some() => Some(Family::Mig),
            ResourceKind::Shares if self.shares.is_some_and(|(resource, _)| resource == cell.resource) => {
                Some(Family::Mps)
            }
            ResourceKind::Shares if self.replicas.is_some_and(|(resource, _)| resource == cell.resource) => {
                Some(Family::TimeSlicing)
            }
            ResourceKind::Shares => None,
        }
    }

    /// Returns the family that serves a demand. Returns `None` if this GPU cannot serve the demand.
    pub(crate) fn family_for(&self, demand: &GpuDemand) -> Option<Family> {
        let named = |table: &[(ResourceId, u8)]| table.iter().any(|(resource, _)| *resource == demand.resource);
        let is = |offer: Option<(ResourceId, u32)>| offer.is_some_and(|(resource, _)| resource == demand.resource);
        let family = match demand.kind {
            ResourceKind::Whole => Family::Whole,
            ResourceKind::Mig if self.instance_sharing.is_none() && named(&self.mig) => Family::Mig,
            ResourceKind::Sized(_) if self.sizes => Family::Mps,
            ResourceKind::Shares if is(self.shares) && self.families.has(Family::Mps) => Family::Mps,
            ResourceKind::Shares if is(self.replicas) && self.families.has(Family::TimeSlicing) => Family::TimeSlicing,
            ResourceKind::Shares
                if self.instance_sharing.as_ref().is_some_and(|inside| inside.resource.is_none())
                    && named(&self.mig_shared) =>
            {
                Family::Mig
            }
            _ => return None,
        };
        self.families.has(family).then_some(family)
    }

    fn repartition(&self, demands: &[GpuDemand]) -> Option<Vec<SliceCell>> {
        let family = self.family_for(demands.first()?)?;
        if !self.families_in_use().is_subset_of(family) || self.in_use.iter().any(|cell| self.family_of(cell).is_none())
        {
            return None;
        }
        if demands.iter().any(|demand| self.family_for(demand) != Some(family)) {
            return None;
        }
        match family {
            Family::Whole => (demands.len() == 1 && self.in_use.is_empty()).then(Vec::new),
            Family::Mps => self.repartition_mps(demands),
            Family::TimeSlicing => self.repartition_time_slicing(demands),
            Family::Mig => self.repartition_mig(demands),
        }
    }

    fn repartition_time_slicing(&self, demands: &[GpuDemand]) -> Option<Vec<SliceCell>> {
        let (resource, replicas) = self.replicas?;
        let in_use: u32 = self.in_use.iter().map(|cell| cell.count).sum();
        let wanted: u32 = demands.iter().map(|demand| demand.units).try_fold(0, u32::checked_add)?;
        let free = replicas.checked_sub(in_use).filter(|&free| wanted <= free)?;
        Some(vec![SliceCell { resource, kind: ResourceKind::Shares, instance: None, count: free }])
    }

    /// Returns the memory in 1/n MiB, where n is the number of shares. In this unit, the memory of
    /// one share is a whole number.
    fn scaled_memory(&self, kind: ResourceKind, count: u32) -> u128 {
        let units = u128::from(self.shares.map_or(1, |(_, units)| units));
        let one = match kind {
            ResourceKind::Sized(gib) => u128::from(gib) * 1024 * units,
            _ => u128::from(self.memory),
        };
        one * u128::from(count)
    }

    fn repartition_mps(&self, demands: &[GpuDemand]) -> Option<Vec<SliceCell>> {
        let units = self.shares.map_or(1, |(_, units)| units);
        let mut room = (u128::from(self.memory)) * u128::from(units);
        // Limit the number of slices: each may have a client, and the MPS server limits its
        // clients.
        let mut clients = MAX_CLIENTS;
        let mut take = |kind: ResourceKind, count: u32| -> Option<()> {
            room = room.checked_sub(self.scaled_memory(kind, count))?;
            clients = clients.checked_sub(count)?;
            Some(())
        };
        for cell in &self.in_use {
            take(cell.kind, cell.count)?;
        }
        let mut free: Vec<SliceCell> = Vec::new();
        for demand in demands {
            take(demand.kind, demand.units)?;
            free.push(SliceCell { resource: demand.resource, kind: demand.kind, instance: None, count: demand.units });
        }
        merge_cells(&mut free);
        let is_share =
            |cell: &&SliceCell| cell.instance.is_none() && self.shares.is_some_and(|offer| offer.0 == cell.resource);
        let in_shares = |cells: &[SliceCell]| cells.iter().filter(is_share).map(|cell| cell.count).sum::<u32>();
        let (shares_in_use, wanted_shares, free_shares) =
            (in_shares(&self.in_use), in_shares(&free), in_shares(&self.free));
        if shares_in_use + wanted_shares > units {
            return None;
        }

        // Keep existing free slices that still fit. Start with the smallest, so that as many slices
        // as possible are kept.
        let mut spare: Vec<SliceCell> = Vec::new();
        for cell in &self.free {
            let ResourceKind::Sized(_) = cell.kind else { continue };
            let reused = free.iter().find(|wanted| wanted.resource == cell.resource).map_or(0, |wanted| wanted.count);
            spare.push(SliceCell { count: cell.count.saturating_sub(reused), ..*cell });
        }
        spare.sort_unstable_by_key(|cell| cell.kind);
        let extra = if wanted_shares > free_shares {
            units - shares_in_use - wanted_shares
        } else {
            free_shares - wanted_shares
        };
        if let Some((resource, _)) = self.shares {
            spare.push(SliceCell {
                resource,
                kind: ResourceKind::Shares,
                instance: None,
                count: extra.min(units - shares_in_use - wanted_shares),
            });
        }
        for cell in spare {
            let mut kept = 0;
            while kept < cell.count && take(cell.kind, 1).is_some() {
                kept += 1;
            }
            free.push(SliceCell { count: kept, ..cell });
        }
        Some(free)
    }

    fn repartition_mig(&self, demands: &[GpuDemand]) -> Option<Vec<SliceCell>> {
        let table = self.table()?;
        let (in_use, loose) = self.instances();
        let profile_in = |named: &[(ResourceId, u8)], demand: &GpuDemand| {
            named.iter().find(|(resource, _)| *resource == demand.resource).map(|(_, profile)| *profile)
        };
        let Some(inside) = &self.instance_sharing else {
            let wanted = demands.iter().map(|demand| profile_in(&self.mig, demand)).collect::<Option<Vec<u8>>>()?;
            let found = table.arrange(&in_use, &loose, &wanted)?;
            let all = found.placed.iter().chain(&found.kept);
            return Some(
                all.filter_map(|&instance| self.free_cell(instance, &self.mig, ResourceKind::Mig, 1)).collect(),
            );
        };
        // Place shares on instances in use first, then on new instances, each with `units` shares.
        let mut partly: Vec<(SliceCell, u32)> = self
            .free
            .iter()
            .filter(|cell| cell.instance.is_some_and(|instance| in_use.contains(&instance)))
            .map(|cell| (*cell, cell.count))
            .collect();
        let stay = partly.iter().map(|(cell, _)| *cell).collect::<Vec<_>>();
        let mut sorted = demands.to_vec();
        sorted.sort_unstable_by_key(|demand| (demand.resource, u32::MAX - demand.units));
        let mut fresh: Vec<(SliceCell, u32)> = Vec::new();
        let mut wanted = Vec::new();
        for demand in &sorted {
            if allocate_from_fullest(&mut partly, demand).is_some()
                || allocate_from_fullest(&mut fresh, demand).is_some()
            {
                continue;
            }
            let left = inside.units.checked_sub(demand.units)?;
            wanted.push(profile_in(&self.mig_shared, demand)?);
            let cell = SliceCell {
                resource: demand.resource,
                kind: ResourceKind::Shares,
                instance: None,
                count: inside.units,
            };
            fresh.push((cell, left));
        }
        let found = table.arrange(&in_use, &loose, &wanted)?;
        let cells = found.placed.iter().chain(&found.kept);
        let cells = cells
            .filter_map(|&instance| self.free_cell(instance, &self.mig_shared, ResourceKind::Shares, inside.units));
        Some(stay.into_iter().chain(cells).collect())
    }

    /// Returns the slices of an instance without slices in use: the existing slices, or the slices
    /// that will be created. Returns `None` if no slices exist and `named` has no resource for the
    /// profile.
    fn free_cell(
        &self,
        instance: Instance,
        named: &[(ResourceId, u8)],
        kind: ResourceKind,
        count: u32,
    ) -> Option<SliceCell> {
        if let Some(cell) = self.free.iter().find(|cell| cell.instance == Some(instance)) {
            return Some(*cell);
        }
        let (resource, _) = named.iter().find(|(_, profile)| *profile == instance.profile)?;
        Some(SliceCell { resource: *resource, kind, instance: Some(instance), count })
    }

    /// Returns the MIG instances with slices in use, then the MIG instances without slices in use.
    fn instances(&self) -> (Vec<Instance>, Vec<Instance>) {
        let mut in_use: Vec<Instance> = self.in_use.iter().filter_map(|cell| cell.instance).collect();
        in_use.sort_unstable();
        in_use.dedup();
        let mut free: Vec<Instance> = self.free.iter().filter_map(|cell| cell.instance).collect();
        free.retain(|instance| !in_use.contains(instance));
        free.sort_unstable();
        free.dedup();
        (in_use, free)
    }

    fn room_value_and_usage(&self, free: &[SliceCell], demands: &[GpuDemand]) -> (i64, GpuUsage) {
        let whole = GpuUsage { memory: WHOLE_GPU, compute: WHOLE_GPU };
        if demands.is_empty() && self.in_use.is_empty() {
            let full = i64::try_from(FULL_GPU_VALUE).unwrap_or(i64::MAX);
            return (if self.families == Families::NONE { 0 } else { IDLE_GPU_VALUE + full }, GpuUsage::default());
        }
        if demands.iter().any(|demand| demand.kind == ResourceKind::Whole)
            || self.in_use.iter().any(|cell| cell.kind == ResourceKind::Whole)
        {
            return (0, whole);
        }
        let (rest, total, used) = self.measure_partition(free, demands);
        let rest =
            u64::try_from(rest.saturating_mul(u128::from(FULL_GPU_VALUE)).checked_div(total).unwrap_or(0)).unwrap_or(0);
        let room_value = if self.families == Families::NONE { 0 } else { rest.min(FULL_GPU_VALUE) };
        (i64::try_from(room_value).unwrap_or(i64::MAX), used)
    }

    /// Returns the remaining value, the total value, and the used parts of the GPU. Without MIG,
    /// the value decreases with the square of the free capacity.
    fn measure_partition(&self, free: &[SliceCell], demands: &[GpuDemand]) -> (u128, u128, GpuUsage) {
        let part = |used: u128, all: u128| {
            let part = (used << 16).checked_div(all).unwrap_or(0).min(u128::from(WHOLE_GPU));
            let part = u32::try_from(part).unwrap_or(WHOLE_GPU);
            GpuUsage { memory: part, compute: part }
        };
        let taken = self.in_use.iter().map(|cell| (cell.kind, cell.count));
        let taken = taken.chain(demands.iter().map(|demand| (demand.kind, demand.units)));
        let of_mig = self.in_use.iter().any(|cell| cell.instance.is_some())
            || demands.first().is_some_and(|demand| self.family_for(demand) == Some(Family::Mig));
        if let Some(table) = self.table().filter(|_| of_mig) {
            let (mask, used) = self.mig_usage(table, free, demands);
            return (u128::from(table.estimate_room(mask)), u128::from(table.estimate_room(0)), used);
        }
        let replicas = self.replicas.filter(|(resource, _)| {
            self.in_use.iter().any(|cell| cell.resource == *resource)
                || demands.iter().any(|demand| demand.resource == *resource)
        });
        let (used, all) = if let Some((_, replicas)) = replicas {
            (taken.map(|(_, count)| u128::from(count)).sum(), u128::from(replicas))
        } else {
            let units = self.shares.map_or(1, |(_, units)| units);
            (
                taken.map(|(kind, count)| self.scaled_memory(kind, count)).sum(),
                u128::from(self.memory) * u128::from(units),
            )
        };
        let left = all.saturating_sub(used);
        (left.saturating_mul(left) / all.max(1), all, part(used, all))
    }

    /// Returns the mask of the memory slices that pods use or will use, and the parts of the GPU
    /// that they occupy.
    fn mig_usage(&self, table: &ProfileTable, free: &[SliceCell], demands: &[GpuDemand]) -> (Mask, GpuUsage) {
        let (in_use, _) = self.instances();
        let mut mask: Mask =
            in_use.iter().filter_map(|&instance| table.mask(instance)).fold(0, |mask, bits| mask | bits);
        let mut used = GpuUsage::default();
        let mut add = |profile: u8| {
            let (memory, compute) = table.memory_and_compute_part(profile);
            used = GpuUsage { memory: used.memory + memory, compute: used.compute + compute };
        };
        for instance in &in_use {
            add(instance.profile);
        }
        let mut rest: Vec<(SliceCell, u32)> = free.iter().map(|cell| (*cell, cell.count)).collect();
        for demand in demands {
            let Some(at) = allocate_from_fullest(&mut rest, demand) else { continue };
            let Some(instance) = rest.get(at).and_then(|(cell, _)| cell.instance) else { continue };
            let bits = table.mask(instance).unwrap_or(0);
            if mask & bits == 0 {
                add(instance.profile);
            }
            mask |= bits;
        }
        (mask, used)
    }

    /// Returns the smallest part of this GPU that a demand uses, in 65,536ths, rounded down.
    /// Returns `None` if this GPU cannot serve the demand.
    pub(crate) fn weight(&self, demand: &GpuDemand) -> Option<GpuUsage> {
        let whole = GpuUsage { memory: WHOLE_GPU, compute: WHOLE_GPU };
        let existing = self.free.iter().any(|cell| cell.resource == demand.resource);
        let both = |part: u128| {
            let part = u32::try_from(part).unwrap_or(WHOLE_GPU).min(WHOLE_GPU);
            GpuUsage { memory: part, compute: part }
        };
        match self.family_for(demand) {
            _ if self.families == Families::NONE => existing.then(GpuUsage::default),
            None => existing.then(GpuUsage::default),
            Some(Family::Whole) => Some(whole),
            Some(Family::Mps) => {
                let all = self.scaled_memory(ResourceKind::Shares, self.shares.map_or(1, |(_, units)| units));
                Some(both((self.scaled_memory(demand.kind, demand.units) << 16).checked_div(all).unwrap_or(0)))
            }
            Some(Family::TimeSlicing) => {
                let replicas = self.replicas.map_or(1, |(_, replicas)| replicas);
                Some(both((u128::from(demand.units) << 16).checked_div(u128::from(replicas)).unwrap_or(0)))
            }
            // A share may use no additional memory, because its instance may already exist for
            // another pod.
            Some(Family::Mig) if demand.kind == ResourceKind::Shares => Some(GpuUsage::default()),
            Some(Family::Mig) => {
                let (_, profile) = self.mig.iter().find(|(resource, _)| *resource == demand.resource)?;
                let (memory, compute) = self.table()?.memory_and_compute_part(*profile);
                Some(GpuUsage { memory, compute })
            }
        }
    }
}

/// Allocates a demand from the cell that has the fewest remaining slices afterwards. `rest`
/// contains each cell's number of remaining slices. Returns the index of the cell, or `None` if no
/// cell has enough slices.
fn allocate_from_fullest(rest: &mut [(SliceCell, u32)], demand: &GpuDemand) -> Option<usize> {
    let fits = |(cell, left): &(SliceCell, u32)| cell.resource == demand.resource && *left >= demand.units;
    let candidates = rest.iter().enumerate().filter(|(_, one)| fits(one));
    let (_, at) = candidates.map(|(at, (_, left))| (*left, at)).min()?;
    let (_, left) = rest.get_mut(at)?;
    *left -= demand.units;
    Some(at)
}

/// Sorts cells and merges equal cells.
pub(crate) fn merge_cells(cells: &mut Vec<SliceCell>) {
    cells.sort_unstable();
    cells.dedup_by(|next, first| {
        let same = (next.resource, next.kind, next.instance) == (first.resource, first.kind, first.instance);
        if same {
            first.count = first.count.saturating_add(next.count);
        }
        same
    });
}
