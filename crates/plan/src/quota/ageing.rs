//! Reserves capacity for pods that have waited long, so that a stream of small pods cannot starve a
//! large pod.
//!
//! A pod overtakes a waiting pod if it uses capacity that the waiting pod could use, and was
//! released after the creation of the waiting pod. A nominated pod overtakes a waiting pod if it
//! was created later. Once a pod has waited for [`Settings::ageing`](super::Settings::ageing),
//! capacity is reserved for the pod. The pod must fit on the GPU of the reservation together with
//! the pods that have not overtaken it. Other pods of the same class or of a lower class can no
//! longer use this capacity. Exceptions are pods of the same quota with a higher priority, and pods
//! that are already nominated. Pods of the same quota that are not more important must also leave
//! enough of the quota's maximum unused and, if the waiting pod does not borrow, enough of the
//! guarantee. A reservation evicts no pods.
//!
//! | limit | reason |
//! |---|---|
//! | one pod of each quota at a time: the first that has waited long | the quota's order is kept |
//! | one reservation on each GPU: guaranteed pods first, then by age | reserved capacity is unused |
//! | none if older or more important pods of the quota use its maximum | the wait might never end |
//! | none if older pods leave too little for the guarantees of other quotas | the same |
//! | none on GPUs that the pod cannot use | the reserved capacity would stay unused |
//! | none for gangs, except the last pod of a running gang | their pods need several GPUs |
//!
//! **Bound.** Let `E` be the time at which capacity is first reserved for the pod. Let `E + G` be
//! the time at which all pods that were nominated at `E` have been released. If no pod of its class
//! or of a lower class runs longer than `T`, the pod is released at `E + G + T` at the latest, by
//! the next pass. Reasons: on each GPU, some pods must end before the pod fits. The chosen GPU is
//! the GPU on which the last of these pods was released first. At `E`, all these pods have been
//! released or nominated. Later, a pod is released to this GPU only if it fits beside the reserved
//! capacity, so it need not end. Therefore the time at which the last of these pods was released
//! never becomes later, even if another GPU is chosen.
//!
//! `G` is at most the longest time that an evicted pod needs to terminate, unless older pods are
//! nominated on the same GPU meanwhile. Newer pods do not delay the nominated pods: see
//! [`State::free_for_nominee`].
//!
//! Within the limits above, capacity is reserved as soon as the pod has waited for `ageing`, is the
//! first such pod of its quota, and fits beside older pods on a GPU without a reservation that
//! takes precedence. Running and nominated pods that have overtaken the pod do not delay the
//! reservation. Otherwise, a stream of nominated pods would delay the reservation again and again.
//!
//! The bound does not hold if pods of a higher class, or pods of the same quota with a higher
//! priority, use the capacity. The bound also does not hold if the guarantees of other quotas do
//! not allow the pod to borrow.
//!
//! Reservations depend only on the pods. No reservation is stored, so a restart changes nothing.
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::amount::Amount;
use super::class::Class;
use super::state::State;
use super::world::PodId;
use crate::ledger::Moment;

/// The GPUs that a pod may use, as indices. `None` means all.
pub(super) type UsableGpus = Option<Arc<BTreeSet<usize>>>;

/// Returns the pods that have waited long and have a reservation, with the GPU of the reservation.
/// `queues` are the waiting pods of each account, the most important first. `usable` returns the
/// GPUs that a pod may use. `usable` is called for a pod only if no earlier pod of its quota can
/// have a reservation.
pub(super) fn reservations(
    state: &State<'_>,
    queues: &[VecDeque<PodId>],
    usable: &mut dyn FnMut(PodId) -> UsableGpus,
) -> Vec<(PodId, usize)> {
    let Some(ageing) = state.world.settings.ageing else { return Vec::new() };
    let gangs = state.accounts.gangs();
    let is_alone = |id: &PodId| gangs.of(*id).is_none() || gangs.is_last(*id) && state.is_complete(*id);
    let is_old = |id: &PodId| state.world.pod(*id).created.0.saturating_add(ageing) <= state.now.0;
    let mut old: Vec<(PodId, UsableGpus)> = Vec::new();
    for queue in queues {
        // A pod that can use no GPU now does not keep the next pods of its quota from a
        // reservation.
        let mut may_run = queue.iter().copied().filter(is_alone).filter(is_old).filter(|&id| may_run(state, id));
        old.extend(may_run.find_map(|id| {
            let gpus = if state.nominated(id).is_some() { None } else { usable(id) };
            gpus.as_ref().is_none_or(|gpus| !gpus.is_empty()).then_some((id, gpus))
        }));
    }
    old.retain(|(id, _)| state.nominated(*id).is_none());
    if old.is_empty() {
        return Vec::new();
    }
    old.sort_by_key(|&(id, _)| {
        let pod = state.world.pod(id);
        let is_enforced = state.accounts.quota(state.accounts.rights_of(id)).is_enforced();
        (Reverse(is_enforced && state.accounts.is_within(id)), pod.created, &pod.name)
    });
    let mut gpus = AgeingGpus::new(state);
    old.into_iter().filter_map(|(id, usable)| Some((id, gpus.take(id, &usable)?))).collect()
}

/// A GPU, and the times at which its pods were released.
struct AgeingGpu {
    gpu: usize,
    /// Capacity without the nominations. Negative if more is nominated than exists.
    room: i128,
    /// Capacity without the nominations and the running pods.
    free: i128,
    /// Release time and charge of each running pod. The last release is first.
    running: Vec<(Moment, Amount)>,
    /// Time of the first of these releases. If no pod runs, the time of the pass.
    first_release: Moment,
    is_taken: bool,
}

impl AgeingGpu {
    fn new(state: &State<'_>, gpu: usize) -> Self {
        let of = &state.gpus[gpu];
        let room = i128::from(of.size()) - i128::from(of.nominated());
        let released = |&id: &PodId| Some((state.accounts.since(id)?.at, state.charge(id)));
        let mut running: Vec<(Moment, Amount)> = of.pods.iter().filter_map(released).collect();
        running.sort_unstable_by_key(|&release| Reverse(release));
        let used: i128 = running.iter().map(|&(_, charge)| i128::from(charge)).sum();
        let first_release = running.last().map_or(state.now, |&(at, _)| at);
        Self { gpu, room, free: room - used, running, first_release, is_taken: false }
    }

    /// Returns the earliest time for which this is true: the pod fits once all pods that were
    /// released up to this time have ended. Nominated pods count as released at `now`.
    fn last_to_end(&self, charge: Amount, now: Moment) -> Moment {
        let mut room = self.room - i128::from(charge);
        if room < 0 {
            return now;
        }
        for &(at, charge) in &self.running {
            room -= i128::from(charge);
            if room < 0 {
                return at;
            }
        }
        Moment(0)
    }
}

/// All GPUs, while capacity is reserved on them.
struct AgeingGpus<'s, 'w> {
    state: &'s State<'w>,
    /// GPUs in the order in which their first pods were released.
    gpus: Vec<AgeingGpu>,
    /// Positions in `gpus`. The GPU with the most free capacity is first.
    by_free: Vec<usize>,
}

impl<'s, 'w> AgeingGpus<'s, 'w> {
    fn new(state: &'s State<'w>) -> Self {
        let mut gpus: Vec<AgeingGpu> = (0..state.gpus.len()).map(|gpu| AgeingGpu::new(state, gpu)).collect();
        gpus.sort_by_key(|of| (of.first_release, of.gpu));
        let mut by_free: Vec<usize> = (0..gpus.len()).collect();
        by_free.sort_by_key(|&at| Reverse(gpus[at].free));
        Self { state, gpus, by_free }
    }

    /// Reserves capacity for a pod on the GPU that will have enough free capacity first if pods end
    /// in the order in which they were released.
    fn take(&mut self, id: PodId, usable: &UsableGpus) -> Option<usize> {
        let (state, charge) = (self.state, self.state.charge(id));
        let may_use = |gpu: usize| usable.as_ref().is_none_or(|gpus| gpus.contains(&gpu));
        let is_possible = |of: &AgeingGpu| !of.is_taken && may_use(of.gpu) && would_fit_on(state, id, of.gpu);
        let have_room = self.by_free.iter().copied().take_while(|&at| self.gpus[at].free >= i128::from(charge));
        let mut best =
            have_room.filter(|&at| is_possible(&self.gpus[at])).map(|at| (Moment(0), self.gpus[at].gpu, at)).min();
        if best.is_none() {
            for (at, of) in self.gpus.iter().enumerate() {
                if best.is_some_and(|(end, ..)| of.first_release > end) {
                    break;
                }
                let key = (of.last_to_end(charge, state.now), of.gpu, at);
                if best.is_none_or(|best| key < best) && is_possible(of) {
                    best = Some(key);
                }
            }
        }
        let (_, gpu, at) = best?;
        self.gpus[at].is_taken = true;
        Some(gpu)
    }
}

/// Returns whether a counted pod has overtaken a waiting pod: it was released after the waiting
/// pod's creation, or it is nominated although it was created later. A pod does not overtake pods
/// of its gang.
fn has_overtaken(state: &State<'_>, other: PodId, id: PodId) -> bool {
    let gangs = state.accounts.gangs();
    if gangs.of(id).is_some() && gangs.of(id) == gangs.of(other) {
        return false;
    }
    let (pod, other_pod) = (state.world.pod(id), state.world.pod(other));
    state.accounts.since(other).is_some_and(|since| match since.nominated {
        None => since.at > pod.created,
        Some(_) => (other_pod.created, &other_pod.name) > (pod.created, &pod.name),
    })
}

/// Returns whether a pod's quota would allow the pod to run if enough capacity were free, and if no
/// pod of the quota with at most its priority had overtaken it. The guarantees of other quotas must
/// also allow the pod to run.
fn may_run(state: &State<'_>, id: PodId) -> bool {
    let (accounts, pod) = (&state.accounts, state.world.pod(id));
    let account = accounts.rights_of(id);
    let quota = accounts.quota(account);
    if !quota.is_enforced() {
        return true;
    }
    let is_before = |other: PodId| !has_overtaken(state, other, id) || accounts.priority(other) > accounts.priority(id);
    let used: Amount =
        accounts.members(account).filter(|&other| is_before(other)).map(|other| state.charge(other)).sum();
    let is_never = !pod.borrows && quota.cells().is_none();
    let limits = [quota.max(), is_never.then_some(quota.min())];
    limits.into_iter().flatten().all(|limit| used.plus(pod.charge) <= limit) && leaves_kept_room(state, id)
}

/// Returns whether a pod would leave enough free for the guarantees of other quotas if no pod had
/// overtaken it. Otherwise the reserved capacity would stay unused until older pods end.
fn leaves_kept_room(state: &State<'_>, id: PodId) -> bool {
    let accounts = &state.accounts;
    let account = accounts.rights_of(id);
    if accounts.is_within(id) || accounts.overriding(id).is_some() || !accounts.has_unlent(account) {
        return true;
    }
    let mut overtaking: BTreeMap<usize, Amount> = BTreeMap::new();
    let mut left: i128 =
        state.gpus.iter().map(|gpu| i128::from(gpu.size())).sum::<i128>() - i128::from(state.charge(id));
    for other_account in 0..accounts.len() {
        for other in accounts.members(other_account) {
            if has_overtaken(state, other, id) {
                let sum = overtaking.entry(other_account).or_default();
                *sum = sum.plus(state.charge(other));
            } else {
                left -= i128::from(state.charge(other));
            }
        }
    }
    let kept = accounts.kept_from(account, &overtaking);
    kept == Amount::ZERO || left >= i128::from(kept)
}

/// Returns whether a pod would fit on a GPU if no pod there had overtaken it.
fn would_fit_on(state: &State<'_>, id: PodId, gpu: usize) -> bool {
    let (accounts, pod, room) = (&state.accounts, state.world.pod(id), &state.gpus[gpu]);
    if room.size() < pod.charge {
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
