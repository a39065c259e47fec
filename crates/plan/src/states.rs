//! Computes the states that GPUs can be in while pods are placed. Each state is computed once for
//! all equal GPUs.
//!
//! A state is a class of GPUs together with the demands placed on one of them. Thousands of GPUs
//! share a few states, so placing one more demand is a look-up.
use std::collections::BTreeMap;

use crate::partition::{GpuClass, GpuDemand, GpuUsage, PackedPartition};

/// Index of a class.
pub(crate) type ClassId = u32;
/// Index of a state.
pub(crate) type StateId = u32;
/// Index of a demand.
pub(crate) type DemandId = u16;

#[derive(Debug)]
struct GpuState {
    class: ClassId,
    /// Demands on the GPU, sorted.
    demands: Vec<DemandId>,
    packed: PackedPartition,
    /// For each demand, the state with this demand added, if it was computed.
    next: Vec<NextState>,
    /// Computed states with one demand less.
    before: Vec<(DemandId, StateId)>,
}

#[derive(Debug, Clone, Copy)]
enum NextState {
    NotComputed,
    Impossible,
    Possible(StateId),
}

/// All computed states, by id.
#[derive(Debug)]
pub(crate) struct States {
    classes: Vec<GpuClass>,
    demands: Vec<GpuDemand>,
    all: Vec<GpuState>,
    known: BTreeMap<(ClassId, Vec<DemandId>), StateId>,
    /// Number of look-ups. Searches limit this number, because a time limit would make plans depend
    /// on the machine.
    pub(crate) work: u64,
}

/// The properties of a state that a plan depends on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StateSummary {
    pub(crate) changed: bool,
    pub(crate) destroyed: u32,
    pub(crate) room_value: i64,
    pub(crate) used: GpuUsage,
}

impl States {
    pub(crate) fn new(classes: Vec<GpuClass>, demands: Vec<GpuDemand>) -> Self {
        Self { classes, demands, all: Vec::new(), known: BTreeMap::new(), work: 0 }
    }

    /// Returns the state of a GPU of this class without any pending pod.
    pub(crate) fn base_state(&mut self, class: ClassId) -> Option<StateId> {
        self.find_or_add_state(class, Vec::new())
    }

    fn find_or_add_state(&mut self, class: ClassId, demands: Vec<DemandId>) -> Option<StateId> {
        let key = (class, demands);
        if let Some(&known) = self.known.get(&key) {
            return Some(known);
        }
        let wanted: Vec<GpuDemand> =
            key.1.iter().filter_map(|&id| self.demands.get(usize::from(id)).copied()).collect();
        let packed = self.classes.get(class as usize)?.pack(&wanted)?;
        let id = u32::try_from(self.all.len()).ok()?;
        let next = vec![NextState::NotComputed; self.demands.len()];
        self.all.push(GpuState { class, demands: key.1.clone(), packed, next, before: Vec::new() });
        self.known.insert(key, id);
        Some(id)
    }

    /// Returns the state with one more demand. Returns `None` if the GPU cannot serve the
    /// additional demand.
    pub(crate) fn with_demand(&mut self, state: StateId, demand: DemandId) -> Option<StateId> {
        self.work += 1;
        let at = state as usize;
        match self.all.get(at)?.next.get(usize::from(demand))? {
            NextState::Possible(next) => return Some(*next),
            NextState::Impossible => return None,
            NextState::NotComputed => {}
        }
        let now = self.all.get(at)?;
        let mut demands = now.demands.clone();
        let place = demands.partition_point(|&other| other <= demand);
        demands.insert(place, demand);
        let next = self.find_or_add_state(now.class, demands);
        self.all.get_mut(at)?.next[usize::from(demand)] = next.map_or(NextState::Impossible, NextState::Possible);
        next
    }

    /// Returns the state with one demand less. A GPU that can serve a set of demands can serve each
    /// subset. Returns `None` if the state does not have the demand.
    pub(crate) fn without_demand(&mut self, state: StateId, demand: DemandId) -> Option<StateId> {
        self.work += 1;
        let now = self.all.get(state as usize)?;
        if let Some((_, before)) = now.before.iter().find(|(requested, _)| *requested == demand) {
            return Some(*before);
        }
        let mut demands = now.demands.clone();
        let place = demands.iter().position(|&other| other == demand)?;
        demands.remove(place);
        let before = self.find_or_add_state(now.class, demands)?;
        self.all.get_mut(state as usize)?.before.push((demand, before));
        Some(before)
    }

    /// Returns the properties of a state. An unknown state counts as a repartitioned GPU without
    /// value for future pods.
    pub(crate) fn summary(&self, state: StateId) -> StateSummary {
        let full = StateSummary { changed: true, destroyed: 0, room_value: 0, used: GpuUsage::default() };
        self.all.get(state as usize).map_or(full, |state| StateSummary {
            changed: state.packed.changed,
            destroyed: state.packed.destroyed,
            room_value: state.packed.room_value,
            used: state.packed.used,
        })
    }

    /// Returns the class and the partition of a state.
    pub(crate) fn class_and_partition(&self, state: StateId) -> Option<(&GpuClass, &PackedPartition)> {
        let state = self.all.get(state as usize)?;
        Some((self.classes.get(state.class as usize)?, &state.packed))
    }

    pub(crate) fn classes(&self) -> &[GpuClass] {
        &self.classes
    }

    pub(crate) fn class(&self, class: ClassId) -> Option<&GpuClass> {
        self.classes.get(class as usize)
    }

    pub(crate) fn demand(&self, demand: DemandId) -> Option<&GpuDemand> {
        self.demands.get(usize::from(demand))
    }
}
