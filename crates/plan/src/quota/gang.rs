//! Gangs: pods that are released, counted and evicted together.
//!
//! | what | rule |
//! |---|---|
//! | release | once `size` pods exist, one pass releases all waiting pods or none |
//! | nomination | for all waiting pods or none |
//! | class | one class for all pods, from the sum of their charges |
//! | eviction | if one pod is evicted, all pods are evicted, and all count as victims |
//! | priority | the highest priority of its pods |
//!
//! A gang has either nominations for all of its waiting pods or none. So two gangs never wait for
//! each other. Pods that replace lost pods of a running gang are released together too.
//!
//! A pod without a gang is treated like a gang of one pod. Such a group of pods is a *unit*, and
//! its *head* is the waiting pod with the first name.
use std::collections::BTreeMap;

use super::amount::Amount;
use super::world::{Place, PodId, World};
use crate::ledger::Moment;

/// Maximum number of pods of a gang. A larger gang is never released, because its decisions would
/// delay each pass too much.
pub const MAX_GANG_PODS: usize = 1000;

/// A pod and the index of its GPU.
pub(super) type Part = (PodId, usize);

/// The gangs of a pool.
#[derive(Debug, Clone)]
pub(super) struct Gangs {
    /// Gang of each pod.
    of: Vec<Option<usize>>,
    all: Vec<Members>,
    /// All pods. A slice of one element is the unit of a pod without a gang.
    pods: Vec<PodId>,
}

#[derive(Debug, Clone)]
struct Members {
    /// Pods that are not terminating when the pass begins, in the order of their names.
    pods: Vec<PodId>,
    /// Pods that are waiting when the pass begins, in the order of their names.
    waiting: Vec<PodId>,
    size: usize,
    priority: i32,
    /// Sum of the charges of the waiting pods.
    charge: Amount,
    /// When the newest of the waiting pods was created.
    newest: Moment,
    /// Whether all pods may run outside their quota's guarantee.
    borrows: bool,
}

impl Members {
    const fn new() -> Self {
        let (charge, newest) = (Amount::ZERO, Moment(0));
        Self { pods: Vec::new(), waiting: Vec::new(), size: 0, priority: i32::MIN, charge, newest, borrows: true }
    }
}

impl Gangs {
    /// Finds the gangs. Pods of different accounts never belong to one gang.
    pub(super) fn new(world: &World, account_of: &[usize]) -> Self {
        let mut by_name: BTreeMap<(usize, &str), usize> = BTreeMap::new();
        let (mut of, mut all) = (vec![None; world.pods.len()], Vec::<Members>::new());
        for (at, pod) in world.pods.iter().enumerate() {
            let Some(gang) = &pod.gang else { continue };
            let index = *by_name.entry((account_of[at], &gang.name)).or_insert(all.len());
            if index == all.len() {
                all.push(Members::new());
            }
            let members = &mut all[index];
            members.size = members.size.max(gang.size);
            members.priority = members.priority.max(pod.priority);
            match pod.place {
                Place::Waiting { .. } => {
                    members.waiting.push(PodId(at));
                    members.charge = members.charge.plus(pod.charge);
                    members.newest = members.newest.max(pod.created);
                }
                Place::Running { .. } => {}
                Place::Leaving { .. } => continue,
            }
            members.borrows &= pod.borrows;
            members.pods.push(PodId(at));
            of[at] = Some(index);
        }
        for members in &mut all {
            members.pods.sort_by_key(|id| (&world.pod(*id).name, *id));
            members.waiting.sort_by_key(|id| (&world.pod(*id).name, *id));
        }
        Self { of, all, pods: (0..world.pods.len()).map(PodId).collect() }
    }

    /// Returns the gang of a pod. A pod that is terminating when the pass begins has no gang.
    pub(super) fn of(&self, id: PodId) -> Option<usize> {
        self.of[id.0]
    }

    /// Returns the pods of a pod's gang in the order of their names, or only the pod if it has no
    /// gang.
    pub(super) fn members(&self, id: PodId) -> &[PodId] {
        self.of[id.0].map_or(&self.pods[id.0..=id.0], |gang| &self.all[gang].pods)
    }

    /// Returns the pods of a gang.
    pub(super) fn members_of(&self, gang: usize) -> &[PodId] {
        &self.all[gang].pods
    }

    /// Returns the waiting pods of a gang.
    pub(super) fn waiting_of(&self, gang: usize) -> &[PodId] {
        &self.all[gang].waiting
    }

    /// Returns the unit of a waiting pod: the pod and the pods that are released together with it.
    pub(super) fn unit(&self, id: PodId) -> &[PodId] {
        self.of[id.0].map_or(&self.pods[id.0..=id.0], |gang| &self.all[gang].waiting)
    }

    /// Returns whether a pod is the only waiting pod of its gang, and other pods of the gang run.
    pub(super) fn is_last(&self, id: PodId) -> bool {
        self.unit(id) == [id] && self.members(id).len() > 1
    }

    /// Returns the number of pods of a pod's gang that must exist before any of them is released.
    pub(super) fn size(&self, id: PodId) -> usize {
        self.of[id.0].map_or(1, |gang| self.all[gang].size)
    }

    /// Returns the priority of a pod, which is the highest priority in its gang.
    pub(super) fn priority(&self, world: &World, id: PodId) -> i32 {
        self.of[id.0].map_or(world.pod(id).priority, |gang| self.all[gang].priority)
    }

    /// Returns the charge of a waiting pod's unit.
    pub(super) fn charge(&self, world: &World, id: PodId) -> Amount {
        self.of[id.0].map_or(world.pod(id).charge, |gang| self.all[gang].charge)
    }

    /// Returns the time at which the last pod of a waiting pod's unit was created.
    pub(super) fn created(&self, world: &World, id: PodId) -> Moment {
        self.of[id.0].map_or(world.pod(id).created, |gang| self.all[gang].newest)
    }

    /// Returns whether a pod may run outside its quota's guarantee. A gang may if all of its pods
    /// may.
    pub(super) fn borrows(&self, world: &World, id: PodId) -> bool {
        self.of[id.0].map_or(world.pod(id).borrows, |gang| self.all[gang].borrows)
    }

    /// Returns whether a pod's gang has, or states, more pods than a gang may have.
    pub(super) fn is_too_large(&self, id: PodId) -> bool {
        self.of[id.0].is_some_and(|gang| self.all[gang].size.max(self.all[gang].pods.len()) > MAX_GANG_PODS)
    }
}
