//! Decides about the pods at the gate, one after the other: each is released, or waits for a
//! reason.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_api::placement::{Placement, ReservedUnits};
use cleave_plan::ledger::{DeviceRequest, Fits, Ledger, Moment, Reservation};

use super::actions::{Actions, Destination, ReleaseReason};
use super::cluster::ReconcileInput;
use super::gang_releases::GangReleases;
use super::gangs::{self, BlockedPod};
use super::growth::{AllowedUnits, AutoscalerReports, NeedInputs, PlacementOutlook};
use super::nodes::Nodes;
use super::other_nodes::{AgentLabels, OtherNodes};
use super::preemption::PreemptionSearch;
use super::queue::Queue;
use super::quota_pass::{QuotaPass, QuotaTurn, Turns};
use super::quota_turns::TurnOrder;
use super::quota_waits::QuotaWait;
use super::returning::ReturningUnits;
use super::search::{Candidate, PlacementSearch};
use super::stranded::StrandedPods;
use super::verdict::{PreemptionProspect, Verdict};
use crate::pods::is_interchangeable;
use crate::policies::demand::{Reason, WaitingPod};
use crate::rollout::Rollout;

/// Maximum number of pods released per reconcile, unless a larger gang is released alone. The
/// operator writes their patches before it reconciles again.
pub(super) const MAX_RELEASES: usize = 128;
/// Maximum number of pods released as unschedulable per reconcile. If thousands of such pods have a
/// high priority, they must not use up the releases of pods that can run.
const MAX_UNPLACEABLE_RELEASES: usize = MAX_RELEASES / 2;
/// Why a pod waits if its controller repeatedly recreated stranded pods. See
/// [`stranded`](super::stranded).
const DELAYED_MESSAGE: &str = "The scheduler repeatedly did not bind pods of this controller, and they were recreated. This pod is released later";

/// What the decisions read and change, within one reconcile.
pub(super) struct Decisions<'a, 'm> {
    pub(super) ledger: &'m mut Ledger,
    pub(super) actions: &'m mut Actions,
    pub(super) queue: &'m mut Queue,
    pub(super) growth: &'m mut AutoscalerReports,
    pub(super) input: &'a ReconcileInput<'a>,
    pub(super) nodes: &'a Nodes,
    pub(super) stranded: &'a StrandedPods,
    pub(super) rollout: &'a Rollout,
    pub(super) agent_labels: &'a AgentLabels,
    /// Units that policies allow on GPUs of future nodes.
    pub(super) offers: &'a AllowedUnits,
    pub(super) search: PlacementSearch<'a>,
    pub(super) preemption: PreemptionSearch<'a>,
    pub(super) returning: ReturningUnits<'a>,
    pub(super) quotas: Option<QuotaPass<'a>>,
    /// Nodes of other device plugins. Examined for the first pod that fits on no node of Cleave.
    pub(super) other_nodes: Option<OtherNodes<'a>>,
    /// When new reservations expire.
    pub(super) expires: Moment,
    /// Whether pods get no label that shows whether a quota guarantees what they use.
    pub(super) without_labels: bool,
    /// How long a pod must be unplaceable before it is released as unschedulable.
    pub(super) unschedulable_after: Duration,
    pub(super) gang_releases: &'m mut GangReleases,
    /// Pods that received a reservation.
    pub(super) reserved: BTreeSet<String>,
    /// Number of pods released as unschedulable.
    pub(super) unplaceable_releases: usize,
}

/// Why a search found no free units for a pod.
struct NoRoom {
    /// Whether more GPUs would not help.
    needs_no_gpus: bool,
    /// Where the search tried to place the pod, in order, and why the pod did not fit there.
    attempts: Vec<(Option<QuotaTurn>, Verdict)>,
    /// Whether the rules of quotas did not permit a search for free units, and more GPUs would not
    /// change that.
    is_held: bool,
}

impl NoRoom {
    /// Adds a turn in which the pod may not use free units: its quota would exceed its maximum, or
    /// other quotas do not lend enough. More GPUs help against the latter.
    fn add_held(&mut self, turn: QuotaTurn) {
        self.is_held &= turn.needs_no_gpus();
        self.attempts.push((Some(turn), Verdict::Waits(String::new())));
    }

    /// Returns why the pod did not fit. Obstacles that may pass come first.
    fn verdict(&self) -> Verdict {
        let may_pass = self.attempts.iter().find(|(_, verdict)| verdict.permanent_obstacle().is_none());
        let first = may_pass.or(self.attempts.first());
        first.map_or_else(|| Verdict::Waits(String::new()), |(_, verdict)| verdict.clone())
    }
}

impl<'a> Decisions<'a, '_> {
    /// Decides about all waiting pods, until enough are released.
    pub(super) fn decide_all(&mut self, candidates: &'a [Candidate<'a>], mut order: TurnOrder) {
        while let Some(at) = order.next(self.quotas.as_ref()) {
            let Some(candidate) = candidates.get(at) else { break };
            let gang = gangs::in_placement_order(candidates, order.gang(at));
            // A gang that is larger than the limit is released alone.
            let is_too_much =
                self.actions.releases.len() + gang.len() > MAX_RELEASES && !self.actions.releases.is_empty();
            if self.actions.releases.len() >= MAX_RELEASES || is_too_much {
                self.actions.more = true;
                break;
            }
            if gang.is_empty() {
                self.decide(candidate);
            } else {
                self.decide_for_gang(&gang);
            }
        }
    }

    /// Ends the reconcile. Returns the names of the pods that received a reservation.
    pub(super) fn finish(self, candidates: &[Candidate<'_>]) -> BTreeSet<String> {
        let Self { ledger, actions, growth, mut preemption, quotas, reserved, .. } = self;
        preemption.finish(actions);
        actions.awaits_budgets |= quotas.is_some();
        quotas.into_iter().for_each(|pass| pass.finish(ledger));
        growth.add_reports(candidates, self.input.now.up, actions);
        reserved
    }

    /// Decides about one pod.
    fn decide(&mut self, candidate: &'a Candidate<'a>) {
        let Candidate { name, pod, device_requests, .. } = candidate;
        if device_requests.is_empty() {
            let waited = self.queue.waiting_time(name, self.input.now.up);
            self.actions.releases.push(candidate.release(ReleaseReason::NotServed, Destination::Anywhere, waited));
            return;
        }
        if let Some(delay) = self.stranded.gate_delay(pod, self.input.now.up) {
            self.actions.requeue_in(delay);
            self.make_wait(&[candidate], &waiting_for_free_units(DELAYED_MESSAGE.to_owned()));
            return;
        }
        let Turns { attempts, mut hold, needs_no_gpus } = self.start_turns(name);
        if attempts.is_empty()
            && let Some(hold) = hold.take()
        {
            self.actions.unplanned.extend(needs_no_gpus.then(|| name.clone()));
            self.make_wait_for_quota(&[candidate], hold);
            return;
        }
        let mut no_room = NoRoom { needs_no_gpus, attempts: Vec::new(), is_held: true };
        for turn in attempts {
            if let Some(held) = turn.filter(|turn| !turn.may_use_free_room) {
                no_room.add_held(held);
                continue;
            }
            self.start_attempt(name, turn);
            match self.search.find(self.ledger, candidate) {
                Ok(fits) if self.may_use(turn, &fits) => {
                    self.reserve(candidate, turn, &fits);
                    return;
                }
                Ok(_) => {
                    if let Some(fits) = self.find_cheaper(turn, candidate) {
                        self.reserve(candidate, turn, &fits);
                        return;
                    }
                    no_room.attempts.push((turn, Verdict::Waits(String::new())));
                }
                Err(verdict) => no_room.attempts.push((turn, verdict)),
            }
            no_room.is_held = false;
        }
        if let Some(requirement) = self.find_other_node(candidate).filter(|_| !no_room.is_held) {
            let waited = self.queue.waiting_time(name, self.input.now.up);
            self.actions.releases.push(candidate.release_to_other_nodes(requirement, waited));
            return;
        }
        let prospect = self.make_room(candidate, &no_room);
        let quota_wait = self.quotas.as_ref().and_then(|pass| {
            let turn = no_room.attempts.iter().find_map(|(turn, _)| *turn);
            match turn {
                Some(turn) => pass.explain_wait(&turn, prospect),
                None => hold,
            }
        });
        self.wait_or_give_up(candidate, &no_room, prospect, quota_wait);
    }

    /// Starts the turn of a waiting pod, or of its gang.
    fn start_turns(&mut self, name: &str) -> Turns {
        match &mut self.quotas {
            Some(pass) => pass.start_turns(self.ledger, name),
            None => Turns { attempts: vec![None], hold: None, needs_no_gpus: false },
        }
    }

    /// Starts an attempt to place a pod: in a pool with quotas, or on other nodes.
    fn start_attempt(&mut self, name: &str, turn: Option<QuotaTurn>) {
        self.search.set_turn(turn);
        if let Some(pass) = &self.quotas {
            pass.set_rank(self.ledger, name, turn);
            pass.withhold_others(self.ledger, turn);
        }
    }

    /// Returns whether a pod may use the placement that a search found.
    fn may_use(&mut self, turn: Option<QuotaTurn>, fits: &Fits) -> bool {
        self.quotas.as_mut().zip(turn).is_none_or(|(pass, turn)| pass.may_use(turn, fits))
    }

    /// Finds a placement on devices where the pod costs little enough, after a search that found
    /// another one.
    fn find_cheaper(&mut self, turn: Option<QuotaTurn>, candidate: &'a Candidate<'a>) -> Option<Fits> {
        let (pass, turn) = self.quotas.as_mut().zip(turn)?;
        pass.withhold_dear_devices(self.ledger, turn, &candidate.device_requests);
        let found = self.search.find_on_cheap_devices(self.ledger, candidate);
        pass.withhold_others(self.ledger, Some(turn));
        found.filter(|fits| pass.may_use(turn, fits))
    }

    /// Reserves units for a pod, and releases the pod.
    fn reserve(&mut self, candidate: &'a Candidate<'a>, turn: Option<QuotaTurn>, fits: &Fits) {
        let name = &candidate.name;
        if self.ledger.reserve(name, fits, self.expires).is_err() {
            return;
        }
        self.search.reserve(self.ledger, candidate, fits);
        self.release(&[candidate], turn, &[fits]);
        self.reserved.insert(name.clone());
    }

    /// Releases pods to the units that are reserved for them.
    fn release(&mut self, pods: &[&'a Candidate<'a>], turn: Option<QuotaTurn>, found: &[&Fits]) {
        let named: Vec<(&str, &Fits)> = pods.iter().map(|one| one.name.as_str()).zip(found.iter().copied()).collect();
        let label = self.quotas.as_mut().and_then(|pass| pass.label_released(turn, &named));
        let label = label.filter(|_| !self.without_labels);
        let now = self.input.now.epoch;
        for (one, fits) in pods.iter().zip(found) {
            let mut placement = build_placement(&one.pod.spec.device_requests, fits, self.expires);
            placement.gang = one.pod.gang.as_ref().map(|gang| {
                let record = self.quotas.as_ref().and_then(|pass| pass.gang_record(&one.name, pods.len(), now));
                record.unwrap_or_else(|| gang.released_alone(now))
            });
            placement.never_borrows = one.pod.never_borrows;
            let waited = self.queue.waiting_time(&one.name, self.input.now.up);
            let release = one.release_reserved(placement, self.nodes, (waited, label));
            if self.quotas.is_some() && one.pod.gang.is_some() {
                self.gang_releases.record(&release, label);
            }
            self.actions.releases.push(release);
        }
    }

    /// Finds a node of another device plugin with enough free resources for a pod. Returns the
    /// requirement that excludes the pod from Cleave's nodes.
    fn find_other_node(&mut self, candidate: &Candidate<'_>) -> Option<cleave_plan::snapshot::Requirement> {
        let (nodes, labels, input) = (self.nodes, self.agent_labels, self.input);
        let new = || OtherNodes::new(nodes, input.tracker, labels, input.unsettled);
        self.other_nodes.get_or_insert_with(new).place_pod(&candidate.plan_pod)
    }

    /// Returns what decides whether a pod needs another node, before pods are evicted for it.
    fn circumstances(
        &mut self,
        candidate: &'a Candidate<'a>,
        turns: impl Iterator<Item = Option<QuotaTurn>>,
    ) -> NeedInputs<'a> {
        let eligible = self.search.eligible_nodes(candidate);
        let withheld = self.rollout.describe_withheld(&candidate.device_requests, &eligible);
        let mut returns = false;
        for turn in turns {
            self.start_attempt(&candidate.name, turn);
            returns = returns || self.returning.serve(self.ledger, &self.search, candidate);
        }
        NeedInputs::new(self.offers, self.input.demand.get(&candidate.name), withheld, returns)
    }

    /// Evicts pods for a pod that does not fit, unless this pod is about to get units without
    /// evictions.
    fn make_room(&mut self, candidate: &'a Candidate<'a>, no_room: &NoRoom) -> PreemptionProspect {
        let name = &candidate.name;
        let turns = no_room.attempts.iter().map(|(turn, _)| *turn);
        let circumstances = self.circumstances(candidate, turns);
        let pause = self.growth.preemption_pause(candidate, &circumstances, self.input.now.up);
        let mut prospect = PreemptionProspect::Impossible;
        for (turn, verdict) in &no_room.attempts {
            self.start_attempt(name, *turn);
            let quota = self.quotas.as_mut().zip(*turn);
            let found = self.preemption.preempt(
                self.ledger,
                &mut self.search,
                candidate,
                (verdict, pause),
                quota,
                self.actions,
            );
            if found != PreemptionProspect::Impossible {
                prospect = found;
            }
            // Pods are evicted in one pool only. Another pool is no alternative for a pod whose
            // turn there has not come.
            if matches!(found, PreemptionProspect::Nominated | PreemptionProspect::Unknown) {
                break;
            }
        }
        self.returning.end_promise(name, prospect);
        if let Some(pass) = &self.quotas {
            pass.end_turn(self.ledger, name);
        }
        prospect
    }

    /// Returns what decides whether a pod needs another node, after the search for victims.
    fn need_inputs(&self, candidate: &'a Candidate<'a>, prospect: PreemptionProspect) -> NeedInputs<'a> {
        let eligible = self.search.eligible_nodes(candidate);
        let withheld = self.rollout.describe_withheld(&candidate.device_requests, &eligible);
        let returns = self.returning.is_promised(&candidate.name);
        let inputs = NeedInputs::new(self.offers, self.input.demand.get(&candidate.name), withheld, returns);
        NeedInputs { preemption: prospect, ..inputs }
    }

    /// Records why a pod waits, or releases it as unschedulable after some time. `quota_wait` is
    /// set if the rules of quotas explain the wait.
    fn wait_or_give_up(
        &mut self,
        candidate: &'a Candidate<'a>,
        no_room: &NoRoom,
        prospect: PreemptionProspect,
        quota_wait: Option<QuotaWait>,
    ) {
        let (name, up) = (&candidate.name, self.input.now.up);
        let verdict = no_room.verdict();
        let circumstances = self.need_inputs(candidate, prospect);
        if let Some(wait) = quota_wait.filter(|_| verdict.permanent_obstacle().is_none()) {
            self.actions.unplanned.extend(no_room.needs_no_gpus.then(|| name.clone()));
            if no_room.is_held {
                self.growth.record_delayed(candidate.pod, up);
            } else {
                self.growth.examine(candidate, verdict, &circumstances, up);
                self.queue.unplaceable_time(name, true, up);
            }
            self.actions.waiting.insert(name.clone(), wait.into_waiting_pod());
            return;
        }
        let PlacementOutlook { need, message, may_pass } = self.growth.examine(candidate, verdict, &circumstances, up);
        match self.queue.unplaceable_time(name, may_pass, up) {
            Some(time) if time < self.unschedulable_after => {
                self.actions.requeue_in(self.unschedulable_after.abs_diff(time));
            }
            Some(_) if self.unplaceable_releases >= MAX_UNPLACEABLE_RELEASES => self.actions.more = true,
            Some(_) => {
                self.unplaceable_releases += 1;
                let waited = self.queue.waiting_time(name, up);
                self.actions.releases.push(candidate.release_unplaceable(need, message, waited));
                return;
            }
            None => {}
        }
        self.actions.waiting.insert(name.clone(), waiting_for_free_units(message));
    }

    /// Decides about the waiting pods of a gang: all are released, or none.
    fn decide_for_gang(&mut self, gang: &[&'a Candidate<'a>]) {
        let Some(head) = gang.first() else { return };
        let up = self.input.now.up;
        let Turns { attempts, hold, needs_no_gpus } = self.start_turns(&head.name);
        let enforced: Vec<QuotaTurn> = attempts.iter().filter_map(|turn| *turn).collect();
        if needs_no_gpus {
            self.actions.unplanned.extend(gang.iter().map(|one| one.name.clone()));
        }
        let delay = gang.iter().filter_map(|one| self.stranded.gate_delay(one.pod, up)).max();
        if let Some(delay) = delay {
            self.actions.requeue_in(delay);
            self.make_wait(gang, &waiting_for_free_units(DELAYED_MESSAGE.to_owned()));
            return;
        }
        let mut no_room = NoRoom { needs_no_gpus, attempts: Vec::new(), is_held: true };
        let mut blocked: Option<BlockedPod<'a>> = None;
        for turn in attempts {
            if let Some(held) = turn.filter(|turn| !turn.may_use_free_room) {
                no_room.add_held(held);
                continue;
            }
            self.start_attempt(&head.name, turn);
            match gangs::reserve_all(self.ledger, &mut self.search, gang, self.expires) {
                Ok(found) => {
                    self.release(gang, turn, &found.iter().collect::<Vec<_>>());
                    self.reserved.extend(gang.iter().map(|one| one.name.clone()));
                    return;
                }
                Err(found) if turn.is_some() => {
                    no_room.is_held = false;
                    no_room.attempts.push((turn, found.1.clone()));
                    let may_pass = |(_, verdict): &BlockedPod<'_>| verdict.permanent_obstacle().is_none();
                    blocked = blocked.filter(may_pass).or(Some(found));
                }
                Err(_) => {}
            }
        }
        let Some(first) = enforced.first() else {
            let homeless = self.find_homeless(gang);
            self.make_gang_wait(gang, homeless, hold, PreemptionProspect::Impossible);
            return;
        };
        let prospect = self.make_room_for_gang(gang, &no_room, &enforced);
        let wait = self.quotas.as_ref().map(|pass| pass.explain_gang_wait(first, prospect));
        let waits = |_: &BlockedPod<'a>| !no_room.is_held;
        let blocked = blocked.or(Some((*head, Verdict::Waits(String::new())))).filter(waits);
        self.make_gang_wait(gang, blocked, wait, prospect);
    }

    /// Finds a pod of a gang that fits no GPU of the cluster. If each pod fits a GPU, but no pool
    /// has GPUs for all of them, more nodes do not help.
    fn find_homeless(&mut self, gang: &[&'a Candidate<'a>]) -> Option<BlockedPod<'a>> {
        let (pass, head) = (self.quotas.as_ref()?, gang.first()?);
        let is_in_no_pool = |one: &&&Candidate<'a>| pass.members(&one.name).is_empty();
        let may_be_released = pass.unit(&head.name).is_some_and(|unit| unit.obstacle().is_none());
        let one = *gang.iter().find(is_in_no_pool).filter(|_| may_be_released)?;
        self.start_attempt(&one.name, None);
        let verdict = self.search.find(self.ledger, one).err()?;
        verdict.permanent_obstacle().map(|_| (one, verdict))
    }

    /// Makes all waiting pods of a gang wait. `blocked` is a pod that finds no GPU: a node for the
    /// gang would help, so all of its pods are reported to autoscalers. An autoscaler that knew
    /// only some of them would plan these for the GPUs that the others need. A gang is never
    /// released as unschedulable, because a part of it could run.
    fn make_gang_wait(
        &mut self,
        gang: &[&'a Candidate<'a>],
        blocked: Option<BlockedPod<'a>>,
        quota_wait: Option<QuotaWait>,
        prospect: PreemptionProspect,
    ) {
        let up = self.input.now.up;
        let Some((blocked, verdict)) = blocked else {
            let wait = quota_wait.map_or_else(|| waiting_for_free_units(String::new()), QuotaWait::into_waiting_pod);
            if prospect == PreemptionProspect::Nominated {
                gang.iter().for_each(|one| self.growth.record_delayed(one.pod, up));
                self.actions.waiting.extend(gang.iter().map(|one| (one.name.clone(), wait.clone())));
            } else {
                self.make_wait(gang, &wait);
            }
            return;
        };
        let fits_nowhere = verdict.permanent_obstacle().map(|_| {
            let (message, _) = blocked.explain(verdict.clone(), self.input.demand.get(&blocked.name));
            waiting_for_free_units(format!("The pod {} of the gang fits no GPU: {message}", blocked.name))
        });
        let wait = fits_nowhere.or(quota_wait.map(QuotaWait::into_waiting_pod));
        let awaits_units = self.need_inputs(blocked, prospect).gets_units_without_evictions(blocked);
        for one in gang {
            let mut circumstances = self.need_inputs(one, prospect);
            circumstances.returns |= awaits_units;
            self.growth.examine(one, verdict.clone(), &circumstances, up);
            self.queue.unplaceable_time(&one.name, true, up);
            self.actions.waiting.extend(wait.clone().map(|wait| (one.name.clone(), wait)));
        }
    }

    /// Evicts pods for a gang that does not fit, unless one of its pods is about to get units
    /// without evictions.
    fn make_room_for_gang(
        &mut self,
        gang: &[&'a Candidate<'a>],
        no_room: &NoRoom,
        turns: &[QuotaTurn],
    ) -> PreemptionProspect {
        let mut pause = None;
        for one in gang {
            let circumstances = self.circumstances(one, turns.iter().map(|turn| Some(*turn)));
            pause = pause.max(self.growth.preemption_pause(one, &circumstances, self.input.now.up));
        }
        let mut prospect = PreemptionProspect::Impossible;
        for (turn, verdict) in &no_room.attempts {
            let (Some(head), Some(turn)) = (gang.first(), *turn) else { break };
            self.start_attempt(&head.name, Some(turn));
            let Some(pass) = &mut self.quotas else { break };
            let found = self.preemption.preempt_for_gang(
                self.ledger,
                &mut self.search,
                (gang, verdict, pause),
                (pass, turn),
                self.actions,
            );
            if found != PreemptionProspect::Impossible {
                prospect = found;
            }
            if matches!(found, PreemptionProspect::Nominated | PreemptionProspect::Unknown) {
                break;
            }
        }
        gang.iter().for_each(|one| self.returning.end_promise(&one.name, prospect));
        prospect
    }

    /// Records that pods wait because they may not get units now, and ends their nominations.
    fn make_wait(&mut self, pods: &[&'a Candidate<'a>], wait: &WaitingPod) {
        for one in pods {
            self.preemption.withdraw_nomination(self.ledger, &mut self.search, &one.name);
            self.growth.record_delayed(one.pod, self.input.now.up);
            self.actions.waiting.insert(one.name.clone(), wait.clone());
        }
    }

    /// Records that pods wait because the rules of quotas permit them no units now.
    fn make_wait_for_quota(&mut self, pods: &[&'a Candidate<'a>], wait: QuotaWait) {
        self.make_wait(pods, &wait.into_waiting_pod());
        if let (Some(pass), Some(first)) = (&self.quotas, pods.first()) {
            pass.end_turn(self.ledger, &first.name);
        }
    }
}

fn waiting_for_free_units(message: String) -> WaitingPod {
    WaitingPod { reason: Reason::NoRoom, message }
}

/// Builds the reservation for the pod's annotation. The reservation lists groups of units in the
/// order of the pod's requests, without whole GPUs and whole MIG instances. The units of one group
/// must be on one device.
fn build_placement(device_requests: &[DeviceRequest], fits: &Fits, expires: Moment) -> Placement {
    let held = |takes: &[Reservation]| {
        let mut left: Vec<&Reservation> = takes.iter().filter(|take| !is_interchangeable(&take.resource)).collect();
        let mut held = Vec::with_capacity(device_requests.len());
        for request in device_requests {
            let same = |take: &&Reservation| take.resource == request.resource && take.units == request.units;
            if let Some(index) = left.iter().position(same) {
                let Reservation { resource, units, device } = left.remove(index).clone();
                held.push(ReservedUnits { resource, units: units.get(), device });
            }
        }
        held
    };
    let nodes: BTreeMap<_, _> = fits.iter().map(|fit| (fit.node().to_owned(), held(fit.reservations()))).collect();
    Placement { until: expires.0, nodes, ..Placement::default() }
}
