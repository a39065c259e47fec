//! Decides which pods are released, and keeps the state for the next decision. Pure: callers pass
//! in the time.
use std::cell::LazyCell;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_api::names::CONDITION_PLACED;
use cleave_api::placement::{Placement, ReservedUnits};
use cleave_plan::ledger::{DeviceRequest, Fits, Ledger, Moment, Place, Reservation};
use kube::ResourceExt;

use super::actions::{Actions, Destination, Release, ReleaseReason};
use super::claims::{self, PodClaims};
use super::cluster::{Cluster, Input, Now, is_living, is_released};
use super::fragments::Fragments;
use super::growth::{Circumstances, Growth, Offers, Outlook};
use super::mps_hosts;
use super::nodes::Nodes;
use super::pod_tracker::PodTracker;
use super::preemption::PreemptionSearch;
use super::queue::{self, Queue};
use super::search::{Candidate, PlacementSearch};
use super::stranded::{self, Advice, Rescue, Stranded};
use crate::pods::{PodObject, full_name, is_interchangeable};
use crate::policies::demand::{Reason, WaitingPod};
use crate::rollout::{self, Rollout, Step};

/// Default time for which a pod must be unplaceable before it is released as unschedulable. A
/// policy, a node or its `GpuNode` may be absent for some time.
pub const UNSCHEDULABLE_AFTER: Duration = Duration::from_secs(180);
/// Time for which a pod counts as protected after a disruption budget refused its eviction.
const PROTECTION_TIME: Duration = Duration::from_secs(30);
/// Maximum number of pods released per reconcile. The operator writes their patches before it
/// reconciles again.
const MAX_RELEASES: usize = 128;
/// Why a pod waits if its controller repeatedly recreated stranded pods. See [`stranded`].
const DELAYED_MESSAGE: &str = "The scheduler repeatedly did not bind pods of this controller, and they were recreated. This pod is released later";

/// Keeps the ledger and decides which pods are released.
#[derive(Debug)]
pub struct Gatekeeper {
    unschedulable_after: Duration,
    /// The ledger. `None` until the first reconcile after a start or a change of the leader.
    ledger: Option<Ledger>,
    nodes: Nodes,
    tracker: PodTracker,
    claims: PodClaims,
    queue: Queue,
    /// Pods whose eviction a disruption budget refused, each with the time at which its protection
    /// ends.
    protected: BTreeMap<String, Duration>,
    stranded: Stranded,
    growth: Growth,
    fragments: Fragments,
    /// State of the replacement of MPS hosts.
    pub(crate) rollout: Rollout,
    /// Earliest time at which the next reconcile examines MPS hosts.
    next_rollout: Duration,
}

impl Default for Gatekeeper {
    fn default() -> Self {
        Self::new(UNSCHEDULABLE_AFTER)
    }
}

impl Gatekeeper {
    /// Creates a gatekeeper without a ledger. A pod must be unplaceable for `unschedulable_after`
    /// before it is released as unschedulable.
    pub fn new(unschedulable_after: Duration) -> Self {
        Self {
            unschedulable_after,
            ledger: None,
            nodes: Nodes::default(),
            tracker: PodTracker::default(),
            claims: PodClaims::default(),
            queue: Queue::default(),
            protected: BTreeMap::new(),
            stranded: Stranded::default(),
            growth: Growth::new(true),
            fragments: Fragments::new(false),
            rollout: Rollout::default(),
            next_rollout: Duration::ZERO,
        }
    }

    /// Decides whether pods at the gate are reported to cluster autoscalers. By default they are.
    #[must_use]
    pub fn with_reports(mut self, enabled: bool) -> Self {
        self.growth = Growth::new(enabled);
        self
    }

    /// Decides whether nodes that only look free to cluster autoscalers are tainted. By default
    /// they are not.
    #[must_use]
    pub fn with_taints(mut self, enabled: bool) -> Self {
        self.fragments = Fragments::new(enabled);
        self
    }

    /// Drops all state. Call this while another process leads.
    pub fn reset(&mut self) {
        *self = Self::new(self.unschedulable_after)
            .with_reports(self.growth.is_enabled())
            .with_taints(self.fragments.is_enabled());
    }

    /// Records that a pod could not be released, and ends its reservation.
    pub fn record_failed_release(&mut self, pod: &str) {
        self.claims.release(self.ledger.as_mut(), pod);
    }

    /// Records that the API server refused to release a pod, with its message. After several
    /// refusals, the release is delayed.
    pub fn record_refused_release(&mut self, pod: &str, message: &str, up: Duration) {
        self.record_failed_release(pod);
        self.queue.record_refusal(pod, message, up);
    }

    /// Records that the report about a pod at the gate could not be written.
    pub(crate) fn report_failed(&mut self, uid: &str) {
        self.growth.write_failed(uid);
    }

    /// Records that the taint of a node could not be written.
    pub(crate) fn taint_failed(&mut self, node: &str) {
        self.fragments.write_failed(node);
    }

    /// Records that a disruption budget refused a pod's eviction.
    pub fn record_protection(&mut self, pod: &str, up: Duration) {
        self.protected.insert(pod.to_owned(), up.saturating_add(PROTECTION_TIME));
    }

    /// Records that the condition of a stranded pod could not be written.
    pub(crate) fn record_failed_advice(&mut self, uid: &str) {
        self.stranded.record_failed_advice(uid);
    }

    /// Records that a stranded pod could not be evicted.
    pub(crate) fn record_failed_eviction(&mut self, uid: &str, up: Duration) {
        self.stranded.record_failed_eviction(uid, up);
    }

    /// The ledger, after the first reconcile.
    pub fn ledger(&self) -> Option<&Ledger> {
        self.ledger.as_ref()
    }

    /// Decides how to act on this state of the cluster. `demand` is what each pod waits for,
    /// according to the plan for GPUs that Cleave partitions on demand.
    pub fn reconcile(&mut self, cluster: &Cluster, demand: &BTreeMap<String, WaitingPod>, now: Now) -> Actions {
        let changed = self.nodes.update(cluster, &self.rollout);
        let living: Vec<&PodObject> = cluster.pods.iter().map(AsRef::as_ref).filter(|pod| is_living(pod)).collect();
        let mut ledger = match self.ledger.take() {
            Some(mut ledger) => {
                for (name, facts) in changed {
                    match facts {
                        Some(facts) => ledger.observe(&name, facts),
                        None => ledger.remove_node(&name),
                    }
                }
                ledger
            }
            None => {
                let nodes = changed.into_iter().filter_map(|(name, facts)| Some((name, facts?))).collect();
                self.claims.rebuild(nodes, &living, now)
            }
        };
        let (unsettled, maybe_deleted) = self.tracker.update(&cluster.pods);
        let waiting = self.track_pods(&mut ledger, &unsettled, maybe_deleted, now);
        self.claims.expire(&mut ledger, &unsettled, now);
        // This must precede any reservation. Otherwise a node that is found idle here could receive
        // a reservation in the same reconcile.
        let rollout = self.plan_rollout(cluster, &mut ledger, now.up);
        let requeue = self.next_deadline(&ledger, cluster, rollout.as_ref(), now);
        let mut actions = Actions { rollout, requeue, ..Actions::default() };
        let input = Input { cluster, living: &living, unsettled: &unsettled, demand, now };
        actions.rescue = self.rescue(&ledger, &input);
        if let Some(requeue) = actions.rescue.requeue {
            actions.requeue_in(requeue);
        }
        self.reserve_or_explain(&mut ledger, waiting, &input, &mut actions);
        actions.taints = self.fragments.update(&self.nodes, &ledger, self.growth.smallest());
        self.ledger = Some(ledger);
        actions
    }

    /// Updates claims and queue from the pods that are not settled. Returns the pods at the gate
    /// that have no reservation, in order of priority and age. `maybe_deleted` contains the names
    /// of pods that may have ended or been deleted.
    fn track_pods<'a>(
        &mut self,
        ledger: &mut Ledger,
        unsettled: &[&'a PodObject],
        maybe_deleted: BTreeSet<String>,
        now: Now,
    ) -> Vec<(String, &'a PodObject)> {
        let mut present = BTreeSet::new();
        let mut settled = Vec::new();
        let mut waiting = Vec::new();
        for pod in unsettled {
            let name = full_name(&pod.metadata);
            self.claims.release_predecessor(ledger, &name, &pod.uid().unwrap_or_default());
            if let Some(node) = pod.node() {
                if self.claims.bind(ledger, &name, pod, node) {
                    self.tracker.mark_settled(pod);
                    settled.push(name.clone());
                }
            } else if pod.waits_at_gate() {
                // A pod with a claim is already released, but the watch has not reported that yet.
                if ledger.claim(&name).is_none() {
                    waiting.push((name.clone(), *pod));
                }
            } else {
                self.claims.restore(ledger, &name, pod, now);
            }
            present.insert(name);
        }
        self.claims.remove_gone(ledger, &present, maybe_deleted, now.up);
        self.queue.update(&present, &waiting, now.up);
        for name in &settled {
            present.remove(name);
        }
        self.tracker.remember_unsettled(present);
        queue::sort(&mut waiting);
        waiting
    }

    /// Decides which MPS hosts to replace, if that is enabled and due. A node whose MPS host is
    /// about to be replaced receives no reservations.
    fn plan_rollout(&mut self, cluster: &Cluster, ledger: &mut Ledger, up: Duration) -> Option<Step> {
        let hosts = cluster.hosts.as_ref().filter(|_| self.next_rollout <= up)?;
        self.next_rollout = up.saturating_add(rollout::UPDATE_INTERVAL);
        let views = mps_hosts::host_views(cluster, hosts, &self.nodes, ledger);
        let step = self.rollout.update(&views, up);
        for (name, facts) in self.nodes.update(cluster, &self.rollout) {
            if let Some(facts) = facts {
                ledger.observe(&name, facts);
            }
        }
        Some(step)
    }

    /// Time until the next reconcile if nothing changes. A reconcile is due when a reservation or
    /// lingering claim ends, or when MPS hosts must be examined.
    fn next_deadline(&self, ledger: &Ledger, cluster: &Cluster, rollout: Option<&Step>, now: Now) -> Option<Duration> {
        let reservations = ledger.claims().values().filter_map(|claim| match &claim.place {
            Place::OneOf { expires, .. } => Some(Duration::from_secs(expires.0.saturating_sub(now.epoch).max(1))),
            Place::Bound(_) => None,
        });
        let hosts = match rollout {
            Some(step) => step.next,
            // This reconcile did not examine the MPS hosts. Their changes are handled at
            // `next_rollout`.
            None => cluster.hosts.as_ref().map(|_| self.next_rollout.saturating_sub(now.up)),
        };
        reservations.chain(self.claims.lingering_claim_expiries(now.up)).chain(hosts).min()
    }

    /// Decides how to handle released pods that are not bound.
    fn rescue(&mut self, ledger: &Ledger, input: &Input<'_>) -> Rescue {
        let Self { unschedulable_after, nodes, tracker, stranded, claims, .. } = self;
        let mut found: Vec<(&PodObject, stranded::Reason)> = Vec::new();
        let mut unschedulable: Vec<Candidate<'_>> = Vec::new();
        for pod in input.unsettled.iter().copied().filter(|pod| is_released(pod)) {
            if let Some(reason) = stranded::Reason::find(pod, ledger, nodes, tracker) {
                found.push((pod, reason));
            } else if pod.placement.is_none() && pod.unschedulable {
                unschedulable.push(Candidate::unschedulable(pod, nodes));
            }
        }
        let mut search = LazyCell::new(|| PlacementSearch::new(input, nodes, tracker, ledger));
        for candidate in unschedulable.iter().filter(|candidate| !candidate.device_requests.is_empty()) {
            let possible = match search.find(ledger, candidate) {
                Ok(_) => true,
                Err(verdict) => verdict.explain(&candidate.device_requests, input.demand.get(&candidate.name)).1,
            };
            if possible {
                found.push((candidate.pod, stranded::Reason::Possible));
            }
        }
        claims.drop_renewals(input.unsettled);
        let mut rescue = stranded.reconcile(found, *unschedulable_after, input.now.up);
        let is_over = |pod: &&&PodObject| {
            pod.node().is_some() && pod.condition(CONDITION_PLACED).is_some_and(|condition| condition.status == "False")
        };
        rescue.advise.extend(input.unsettled.iter().filter(is_over).map(|pod| Advice {
            pod: full_name(&pod.metadata),
            uid: pod.uid().unwrap_or_default(),
            message: None,
        }));
        rescue
    }

    /// Forgets pods that no longer count as protected by a disruption budget.
    fn end_protection(&mut self, up: Duration, actions: &mut Actions) {
        self.protected.retain(|_, until| *until > up);
        // No watch reports when a budget allows disruptions again.
        self.protected.values().for_each(|until| actions.requeue_in(until.saturating_sub(up)));
    }

    /// Reserves shares for the pods that fit, and explains what the others wait for.
    fn reserve_or_explain(
        &mut self,
        ledger: &mut Ledger,
        waiting: Vec<(String, &PodObject)>,
        input: &Input<'_>,
        actions: &mut Actions,
    ) {
        withdraw_other_nominations(ledger, &waiting);
        let up = input.now.up;
        if waiting.is_empty() {
            self.growth.report(&[], up, actions);
            return;
        }
        self.end_protection(up, actions);
        let Self { unschedulable_after, nodes, tracker, claims, queue, protected, rollout, stranded, growth, .. } =
            self;
        let candidates: Vec<Candidate<'_>> = queue
            .skip_refused(ledger, waiting, up, actions)
            .into_iter()
            .map(|(name, pod)| Candidate::new(name, pod, nodes, stranded.avoided_nodes(pod)))
            .collect();
        let mut search = PlacementSearch::new(input, nodes, tracker, ledger);
        let offers = LazyCell::new(|| Offers::of(input.cluster.policies.iter().map(AsRef::as_ref)));
        let holders = LazyCell::new(|| nodes.holders(input.living, protected));
        let mut preemption = PreemptionSearch { holders: &holders, protected, claims, considered: 0 };
        let mut reserved: Vec<(String, String)> = Vec::new();
        for candidate in &candidates {
            if actions.releases.len() >= MAX_RELEASES {
                actions.more = true;
                break;
            }
            let Candidate { name, pod, device_requests, .. } = candidate;
            let waited = queue.waited(name, up);
            if device_requests.is_empty() {
                actions.releases.push(candidate.release(ReleaseReason::NotServed, Destination::Anywhere, waited));
                continue;
            }
            if let Some(delay) = stranded.delay(pod, up) {
                actions.requeue_in(delay);
                drop(ledger.withdraw(name));
                actions.waiting.insert(name.clone(), no_room(DELAYED_MESSAGE.to_owned()));
                continue;
            }
            let verdict = match search.find(ledger, candidate) {
                Ok(fits) => {
                    let expires = claims::expiry(input.now);
                    if ledger.reserve(name, &fits, expires).is_ok() {
                        search.reserve(candidate, &fits);
                        reserved.push((name.clone(), pod.uid().unwrap_or_default()));
                        actions.releases.push(release_to(candidate, nodes, (&fits, expires), waited));
                    }
                    continue;
                }
                Err(verdict) => verdict,
            };
            let preempted = preemption.find(ledger, &search, candidate, &verdict);
            let circumstances = Circumstances {
                offers: &offers,
                demand: input.demand.get(name),
                preempts: preempted.is_some(),
                withheld: rollout.describe_withheld(device_requests, &search.eligible(candidate)),
            };
            let Outlook { need, message, may_pass } = growth.examine(candidate, verdict, &circumstances, up);
            match queue.unplaceable_for(name, may_pass, up) {
                Some(unplaceable) if unplaceable >= *unschedulable_after => {
                    actions.releases.push(candidate.release_unplaceable(need, message, waited));
                    continue;
                }
                Some(unplaceable) => actions.requeue_in(unschedulable_after.saturating_sub(unplaceable)),
                None => {}
            }
            match preempted {
                Some(found) => preemption.nominate(ledger, candidate, found, actions),
                None => drop(ledger.withdraw(name)),
            }
            actions.waiting.insert(name.clone(), no_room(message));
        }
        reserved.into_iter().for_each(|(name, uid)| claims.add(name, uid));
        growth.report(&candidates, up, actions);
    }
}

/// The release of a pod to the nodes of its reservation.
fn release_to(candidate: &Candidate<'_>, nodes: &Nodes, (fits, expires): (&Fits, Moment), waited: Duration) -> Release {
    let hostnames = fits.iter().filter_map(|fit| nodes.hostname(fit.node())).collect();
    let reason = ReleaseReason::Reserved(placement(&candidate.pod.spec.device_requests, fits, expires));
    candidate.release(reason, Destination::Hostnames(hostnames), waited)
}

fn no_room(message: String) -> WaitingPod {
    WaitingPod { reason: Reason::NoRoom, message }
}

/// Ends the nominations of pods that no longer wait.
fn withdraw_other_nominations(ledger: &mut Ledger, waiting: &[(String, &PodObject)]) {
    if ledger.nominations().is_empty() {
        return;
    }
    let waiting: BTreeSet<&str> = waiting.iter().map(|(name, _)| name.as_str()).collect();
    let over: Vec<String> =
        ledger.nominations().keys().filter(|pod| !waiting.contains(pod.as_str())).cloned().collect();
    over.iter().for_each(|pod| drop(ledger.withdraw(pod)));
}

/// Builds the reservation for the pod's annotation. The reservation lists groups of units in the
/// order of the pod's requests. The units of one group must be on one device.
fn placement(device_requests: &[DeviceRequest], fits: &Fits, expires: Moment) -> Placement {
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
    let nodes = fits.iter().map(|fit| (fit.node().to_owned(), held(fit.reservations()))).collect();
    Placement { until: expires.0, nodes }
}

#[cfg(test)]
mod tests;
