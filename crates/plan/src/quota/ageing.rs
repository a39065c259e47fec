//! Reserves room for pods that have waited long: a stream of small pods cannot starve a large pod.
//!
//! A pod overtakes another pod if it is created later, is not more important, and uses room that
//! the other pod could use. Once a pod has waited for
//! [`Settings::ageing`](super::Settings::ageing), room is reserved for it. The room is on one GPU,
//! on which it fits beside the pods that have not overtaken it. Other pods of the same class or of
//! a lower class no longer get this room. Exceptions are pods of its own quota with a higher
//! priority, and pods for which pods already leave. Pods of its own quota that are not more
//! important also leave it room below the quota's maximum and, if it does not borrow, within the
//! guarantee. Nobody is evicted.
//!
//! | limit | reason |
//! |---|---|
//! | one pod of each quota at a time: the first that has waited long | its quota's order stays |
//! | one reservation on each GPU, the longest waiting pod first | reserved room is unused |
//! | none if older or more important pods of the quota use its maximum | it might never end |
//! | none for gangs | their pods need room on several GPUs |
//!
//! **Bound.** Let `E` be the first time at which room is reserved for the pod. If no pod of its
//! class or of a lower class runs longer than `T`, and no evicted pod needs longer than `G` to
//! terminate, the pod is released at `E + G + T` at the latest, by the next pass. Reasons: all pods
//! on the GPU were released before `E`, or get room there for which pods leave already. Of the
//! possible GPUs, the one whose last pod was released first is chosen. This time never grows,
//! because no other pod is released there.
//!
//! Room is reserved as soon as the pod has waited for `ageing`, is the first such pod of its quota,
//! and fits on a GPU beside older pods and beside reservations of pods that have waited longer.
//! Pods that have overtaken it do not delay this: neither those that run nor those for which pods
//! leave. If they did, a stream of pods for which pods leave would postpone the reservation again
//! and again.
//!
//! The bound does not hold if pods of a higher class, or of its quota with a higher priority, take
//! the room, or if other quotas' guarantees leave it no room to borrow.
//!
//! Reservations are a function of the pods. Nothing is stored, so a restart changes nothing.
use std::cmp::Reverse;
use std::collections::VecDeque;

use super::amount::Amount;
use super::class::Class;
use super::state::State;
use super::world::PodId;
use crate::ledger::Moment;

/// Returns the pods that have waited long, and the GPUs on which room is reserved for them.
/// `queues` are the waiting pods of each account, the most important first.
pub(super) fn reservations(state: &State<'_>, queues: &[VecDeque<PodId>]) -> Vec<(PodId, usize)> {
    let Some(ageing) = state.world.settings.ageing else { return Vec::new() };
    let is_alone = |id: &PodId| state.world.pod(*id).gang.is_none();
    let is_old = |id: &PodId| state.world.pod(*id).created.0.saturating_add(ageing) <= state.now.0;
    let mut old: Vec<PodId> = queues
        .iter()
        .filter_map(|queue| queue.iter().copied().filter(is_alone).filter(is_old).find(|&id| may_run(state, id)))
        .collect();
    old.retain(|&id| state.nominated(id).is_none());
    if old.is_empty() {
        return Vec::new();
    }
    old.sort_by_key(|&id| {
        let pod = state.world.pod(id);
        let is_enforced = state.accounts.quota(state.accounts.rights_of(id)).is_enforced();
        (Reverse(is_enforced && state.accounts.is_within(id)), pod.created, &pod.name)
    });
    let mut gpus: Vec<(Moment, usize)> = (0..state.gpus.len()).map(|gpu| (last_release(state, gpu), gpu)).collect();
    gpus.sort_unstable();
    let mut reservations = Vec::new();
    for id in old {
        if let Some(at) = gpus.iter().position(|&(_, gpu)| is_overtaken_on(state, id, gpu)) {
            reservations.push((id, gpus.remove(at).1));
        }
    }
    reservations
}

/// Returns whether a pod that counts has overtaken a waiting pod: it was released after the waiting
/// pod's creation, or pods leave for it although it was created later.
fn has_overtaken(state: &State<'_>, other: PodId, id: PodId) -> bool {
    let (pod, other_pod) = (state.world.pod(id), state.world.pod(other));
    state.accounts.since(other).is_some_and(|since| match since.nominated {
        None => since.at > pod.created,
        Some(_) => (other_pod.created, &other_pod.name) > (pod.created, &pod.name),
    })
}

/// Returns whether a pod's quota would let it run if there were room, and if no pod of the quota
/// had overtaken it.
fn may_run(state: &State<'_>, id: PodId) -> bool {
    let (accounts, pod) = (&state.accounts, state.world.pod(id));
    let account = accounts.rights_of(id);
    let quota = accounts.quota(account);
    if !quota.is_enforced() {
        return true;
    }
    let is_before = |other: PodId| !has_overtaken(state, other, id) || accounts.priority(other) > pod.priority;
    let used: Amount =
        accounts.members(account).filter(|&other| is_before(other)).map(|other| state.charge(other)).sum();
    let is_never = !pod.borrows && quota.cells().is_none();
    let limits = [quota.max(), is_never.then_some(quota.min())];
    limits.into_iter().flatten().all(|limit| used.plus(pod.charge) <= limit)
}

/// Returns when the last pod of a GPU was or, if room is kept for pods, will be released.
fn last_release(state: &State<'_>, gpu: usize) -> Moment {
    let room = &state.gpus[gpu];
    if room.has_nominees() {
        return state.now;
    }
    room.pods.iter().filter_map(|&id| state.accounts.since(id)).map(|since| since.at).max().unwrap_or(Moment(0))
}

/// Returns whether a pod would fit on a GPU if no pod there had overtaken it.
fn is_overtaken_on(state: &State<'_>, id: PodId, gpu: usize) -> bool {
    let (accounts, pod, room) = (&state.accounts, state.world.pod(id), &state.gpus[gpu]);
    if room.size() < pod.charge || !pod.may_use(gpu) {
        return false;
    }
    let is_of_cells = accounts.quota(accounts.rights_of(id)).cells().is_some();
    if is_of_cells && accounts.is_within(id) && accounts.class_with(&[(id, gpu)], &[]) == Class::Over {
        return false;
    }
    let here = room.pods.iter().copied().chain(room.nominees());
    let older: Amount = here.filter(|&other| !has_overtaken(state, other, id)).map(|other| state.charge(other)).sum();
    room.size().minus(older) >= pod.charge
}
