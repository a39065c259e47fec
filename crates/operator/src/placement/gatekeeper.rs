//! Decides which pods are released, and keeps the state for the next decision. Pure: callers pass
//! in the time.
use std::cell::LazyCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cleave_api::names::CONDITION_PLACED;
use cleave_plan::ledger::{Chooser, Ledger, Moment, Place};

use super::actions::{Actions, Eviction, Release};
use super::budgets::{BudgetProtection, DisruptionBudgets};
use super::claims::{self, PodClaims};
use super::cluster::{Cluster, ReconcileInput, ReconcileTime, is_released_and_unbound};
use super::decisions::{Decisions, MAX_RELEASES};
use super::evictions::{Evictability, EvictionRecords};
use super::fragments::FragmentationTaints;
use super::gang_evictions::GangEvictions;
use super::gang_releases::GangReleases;
use super::gang_restarts::GangRestarts;
use super::growth::{AllowedUnits, AutoscalerReports};
use super::handover;
use super::nodes::Nodes;
use super::other_nodes::AgentLabels;
use super::pod_tracker::PodTracker;
use super::preemption::PreemptionSearch;
use super::preemptors::Preemptors;
use super::queue::{self, Queue};
use super::quota_objects::QuotaObjects;
use super::quota_pass::QuotaPass;
use super::quota_reports::{self, QuotaReports};
use super::quota_turns::TurnOrder;
use super::quotas::{Decided, QuotaSettings, QuotaWorlds, are_enforced};
use super::returning::Returning;
use super::search::{Candidate, PlacementSearch};
use super::stranded::{self, PlacedReport, StrandedActions, StrandedPods};
use super::unanswered::UnansweredReleases;
use super::unbound::unbound_pods;
use super::unlisted::UnlistedUnits;
use super::{learning, long_waits, mps_hosts};
use crate::evict::EvictionResult;
use crate::pod_store::PodChanges;
use crate::pods::{PodObject, full_name};
use crate::policies::demand::WaitingPod;
use crate::rollout::{self, Rollout, RolloutStep};

/// Default time for which a pod must be unplaceable before it is released as unschedulable. During
/// this time, a policy, a node or its `GpuNode` may appear.
pub const UNSCHEDULABLE_AFTER: Duration = Duration::from_secs(180);
/// Keeps the ledger and decides which pods are released.
#[derive(Debug)]
pub struct Gatekeeper {
    unschedulable_after: Duration,
    /// Labels of all nodes with an agent.
    agent_labels: AgentLabels,
    /// How long the gatekeeper reserves nothing after the ledger was built.
    settle_time: Duration,
    /// Earliest time at which pods get reservations.
    next_reservation: Duration,
    /// When the ledger was built, in seconds since the Unix epoch.
    leads_since: u64,
    /// The ledger. `None` until the first reconcile after a start or a change of the leader.
    ledger: Option<Ledger>,
    /// Ranks nodes and GPUs for the ledger.
    chooser: Chooser,
    nodes: Nodes,
    tracker: PodTracker,
    claims: PodClaims,
    unanswered: UnansweredReleases,
    /// Releases of pods of gangs, until the API server has applied them.
    gang_releases: GangReleases,
    queue: Queue,
    /// Results of evictions for waiting pods.
    evictions: EvictionRecords,
    /// Gangs of which some pods are not evicted yet.
    gang_evictions: GangEvictions,
    /// Numbers of evicted pods of gangs.
    gang_restarts: GangRestarts,
    /// Waiting pods for which the operator has searched for preemption victims.
    preemptors: Preemptors,
    /// Units of pods that nodes have just stopped listing.
    unlisted: UnlistedUnits,
    stranded: StrandedPods,
    growth: AutoscalerReports,
    returning: Returning,
    fragments: FragmentationTaints,
    quotas: QuotaSettings,
    quota_objects: QuotaObjects,
    /// Whether the next reconcile restores the nominations of an earlier leader.
    restores_nominations: bool,
    /// Whether the next reconcile continues the evictions of gangs that an earlier leader began.
    restores_evictions: bool,
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
            agent_labels: AgentLabels::new(),
            settle_time: Duration::ZERO,
            next_reservation: Duration::ZERO,
            leads_since: 0,
            ledger: None,
            chooser: Chooser::default(),
            nodes: Nodes::default(),
            tracker: PodTracker::default(),
            claims: PodClaims::default(),
            unanswered: UnansweredReleases::default(),
            gang_releases: GangReleases::default(),
            queue: Queue::default(),
            evictions: EvictionRecords::default(),
            gang_evictions: GangEvictions::default(),
            gang_restarts: GangRestarts::default(),
            preemptors: Preemptors::default(),
            unlisted: UnlistedUnits::default(),
            stranded: StrandedPods::default(),
            growth: AutoscalerReports::new(true),
            returning: Returning::default(),
            fragments: FragmentationTaints::new(false),
            quotas: QuotaSettings::default(),
            quota_objects: QuotaObjects::default(),
            restores_nominations: false,
            restores_evictions: false,
            rollout: Rollout::default(),
            next_rollout: Duration::ZERO,
        }
    }

    /// Sets the labels that every node with an agent has. Without labels, the gatekeeper releases
    /// no pod to nodes of another device plugin if Cleave serves the same resource.
    #[must_use]
    pub fn with_agent_labels(self, agent_labels: AgentLabels) -> Self {
        Self { agent_labels, ..self }
    }

    /// Delays reservations for some seconds after each build of the ledger from the cluster.
    ///
    /// A pod that was recently deleted without a grace period may still use shares that its node
    /// has not reported. A gatekeeper that saw the pod keeps its claim; see
    /// [`claims::UNREPORTED_CLAIM_TIME`]. A new gatekeeper did not see the pod, so it must delay
    /// reservations by the same duration.
    #[must_use]
    pub fn with_settling_delay(self) -> Self {
        Self { settle_time: claims::UNREPORTED_CLAIM_TIME, ..self }
    }

    /// Sets whether pods at the gate are reported to cluster autoscalers. Reports are enabled by
    /// default.
    #[must_use]
    pub fn with_reports(self, enabled: bool) -> Self {
        Self { growth: AutoscalerReports::new(enabled), ..self }
    }

    /// Sets whether the gatekeeper taints nodes that only look free to cluster autoscalers. Taints
    /// are disabled by default.
    #[must_use]
    pub fn with_taints(self, enabled: bool) -> Self {
        Self { fragments: FragmentationTaints::new(enabled), ..self }
    }

    /// Sets how quotas work.
    #[must_use]
    pub fn with_quotas(self, quotas: QuotaSettings) -> Self {
        Self { quotas, ..self }
    }

    /// Drops all state except the settings. Call this function while another process leads.
    pub fn reset(&mut self) {
        let agent_labels = std::mem::take(&mut self.agent_labels);
        let new = Self::new(self.unschedulable_after)
            .with_agent_labels(agent_labels)
            .with_reports(self.growth.is_enabled())
            .with_taints(self.fragments.is_enabled())
            .with_quotas(self.quotas);
        *self = Self { settle_time: self.settle_time, ..new };
    }

    /// Records that a pod was released.
    pub fn record_release(&mut self, pod: &str) {
        self.unanswered.remove(pod);
        self.gang_releases.remove(pod);
    }

    /// Records that it is unknown whether a pod was released. `release` has the patch that was
    /// sent. The pod keeps its reservation until the watch shows that it was not released.
    pub fn record_unanswered_release(&mut self, release: Release) {
        if self.ledger.as_ref().is_some_and(|ledger| ledger.claim(&release.pod).is_some()) {
            self.unanswered.record(release);
        }
    }

    /// Records that a pod could not be released, and ends its reservation. If an earlier patch had
    /// no answer, that patch may have released the pod, so the reservation is kept. A pod of a gang
    /// also keeps its reservation; see [`super::gang_releases`].
    pub fn record_failed_release(&mut self, pod: &str) {
        if !self.unanswered.contains(pod) && !self.gang_releases.record_failure(pod) {
            self.claims.end_claim(self.ledger.as_mut(), pod);
        }
    }

    /// Records that the API server refused to release a pod, with its message. After several
    /// refusals, the release is delayed.
    pub fn record_refused_release(&mut self, pod: &str, message: &str, up: Duration) {
        if !self.unanswered.contains(pod) {
            self.record_failed_release(pod);
            self.queue.record_refusal(pod, message, up);
        }
    }

    /// Records that a pod could not be released because it no longer exists. The pod is not
    /// released again, although the watch still has it. Returns whether a reservation ended, so
    /// that other pods may fit.
    pub fn record_missing_pod(&mut self, pod: &str, uid: &str, up: Duration) -> bool {
        self.queue.record_missing(pod, uid, up);
        self.gang_releases.remove(pod);
        !self.unanswered.contains(pod) && self.claims.end_claim(self.ledger.as_mut(), pod)
    }

    /// Records the result of an eviction for a waiting pod.
    pub fn record_eviction(&mut self, eviction: &Eviction, result: &EvictionResult, up: Duration) {
        self.evictions.record(&eviction.uid, result, up);
        self.gang_evictions.record(eviction, result, up);
        self.gang_restarts.record(eviction, result);
        // A pod that is not found has ended, so its eviction is not needed.
        if *result != EvictionResult::NotFound {
            self.preemptors.record_eviction(eviction, *result == EvictionResult::Done, up);
        }
    }

    /// Records that the report about a pod at the gate could not be written.
    pub(crate) fn record_failed_report(&mut self, uid: &str) {
        self.growth.record_failed_write(uid);
    }

    /// Records whether the taint of a node was written.
    pub(crate) fn record_taint(&mut self, node: &str, written: bool, up: Duration) {
        self.fragments.record_write(node, written, up);
    }

    /// Returns the time until the next retry of a taint that could not be written.
    pub(crate) fn next_taint_retry(&self, up: Duration) -> Option<Duration> {
        self.fragments.next_retry(up)
    }

    /// Records that the condition of a stranded pod could not be written.
    pub(crate) fn record_failed_placed_report(&mut self, uid: &str) {
        self.stranded.record_failed_placed_report(uid);
    }

    /// Records that a stranded pod could not be evicted.
    pub(crate) fn record_failed_eviction(&mut self, uid: &str, up: Duration) {
        self.stranded.record_failed_eviction(uid, up);
    }

    /// Returns the pods at the gate that have waited longest, at most `count`, longest first.
    pub(crate) fn longest_waits(&self, count: usize, up: Duration) -> Vec<(&str, Duration)> {
        self.queue.longest_waits(count, up)
    }

    /// Returns the UIDs of the pods at the gate, by name.
    pub(crate) fn gated_uids(&self) -> BTreeMap<String, String> {
        let gated = self.tracker.unsettled_pods().into_iter().filter(|pod| pod.waits_at_gate());
        gated.map(|pod| (full_name(&pod.metadata), pod.uid().unwrap_or_default())).collect()
    }

    /// Returns the reports about quotas. `waits` contains each pod's reason to wait at the gate.
    pub(crate) fn quota_reports(
        &self,
        cluster: &Cluster,
        waits: &BTreeMap<String, WaitingPod>,
        now: ReconcileTime,
    ) -> QuotaReports {
        let Some(ledger) = &self.ledger else { return QuotaReports::default() };
        let last_readable = self.quota_objects.last_readable(cluster);
        let cluster = last_readable.as_ref().unwrap_or(cluster);
        let unsettled = self.tracker.unsettled_pods();
        let waiting: Vec<(String, &PodObject)> = unsettled
            .iter()
            .filter(|pod| pod.node().is_none() && pod.waits_at_gate())
            .map(|pod| (full_name(&pod.metadata), pod.as_ref()))
            .filter(|(name, _)| ledger.claim(name).is_none())
            .collect();
        let waiting = waiting.iter().map(|(name, pod)| (name.as_str(), *pod));
        let state = (&self.tracker, ledger);
        quota_reports::build_reports(
            (cluster, &self.nodes),
            state,
            waiting,
            Decided { evictions: &self.evictions, claims: &self.claims, restarts: &self.gang_restarts },
            (&self.quotas, now.epoch),
            (waits, &self.quota_objects),
        )
    }

    /// Returns the ledger. Returns `None` before the first reconcile, and after [`Self::reset`].
    pub fn ledger(&self) -> Option<&Ledger> {
        self.ledger.as_ref()
    }

    /// Decides how to act on this state of the cluster. `demand` contains each pod's reason to
    /// wait, according to the plan for GPUs that Cleave partitions on demand.
    pub fn reconcile(
        &mut self,
        cluster: &Cluster,
        demand: &BTreeMap<String, WaitingPod>,
        now: ReconcileTime,
    ) -> Actions {
        self.reconcile_changes(cluster, PodChanges::All(cluster.pods.clone()), demand, now)
    }

    /// Decides like [`Self::reconcile`], but reads changes of pods from `changes`. Ignores the pods
    /// in `cluster`.
    pub fn reconcile_changes(
        &mut self,
        cluster: &Cluster,
        changes: PodChanges,
        demand: &BTreeMap<String, WaitingPod>,
        now: ReconcileTime,
    ) -> Actions {
        if self.quota_objects.update(&cluster.quotas, now.epoch) {
            self.preemptors.record_cluster_change();
        }
        let last_readable = self.quota_objects.last_readable(cluster);
        let cluster = last_readable.as_ref().unwrap_or(cluster);
        let mut tracker = std::mem::take(&mut self.tracker);
        let maybe_deleted = tracker.update(changes);
        let actions = self.decide(cluster, (&mut tracker, maybe_deleted), demand, now);
        self.tracker = tracker;
        actions
    }

    /// Decides with the pods in `tracker`. `maybe_deleted` contains the names of pods that may have
    /// ended or been deleted.
    fn decide(
        &mut self,
        cluster: &Cluster,
        (tracker, maybe_deleted): (&mut PodTracker, BTreeSet<String>),
        demand: &BTreeMap<String, WaitingPod>,
        now: ReconcileTime,
    ) -> Actions {
        self.unlisted.expire(now.up);
        let changed = self.nodes.update(cluster, &self.rollout);
        changed.iter().for_each(|(node, _)| self.preemptors.record_node_change(node));
        self.returning.update(&self.nodes, changed.iter().map(|(node, _)| node.as_str()), now.up);
        let mut ledger = match self.ledger.take() {
            Some(mut ledger) => {
                for (name, facts) in changed {
                    self.unlisted.update(&ledger, &name, facts.as_ref(), now.up);
                    match facts {
                        Some(facts) => ledger.observe(&name, facts),
                        None => ledger.remove_node(&name),
                    }
                }
                ledger
            }
            None => {
                let nodes = changed.into_iter().filter_map(|(name, facts)| Some((name, facts?))).collect();
                self.next_reservation = now.up.saturating_add(self.settle_time);
                self.leads_since = now.epoch;
                (self.restores_nominations, self.restores_evictions) = (true, true);
                let mut ledger = self.claims.rebuild(nodes, tracker, now);
                self.chooser = Chooser::default();
                ledger.synchronize(&mut self.chooser);
                learning::count_running_pods(&mut self.chooser, tracker);
                ledger
            }
        };
        let held = tracker.unsettled_pods();
        let unsettled: Vec<&PodObject> = held.iter().map(AsRef::as_ref).collect();
        let waiting = self.track_pods(&mut ledger, &unsettled, (tracker, maybe_deleted), now);
        self.claims.expire_reservations(&mut ledger, &unsettled, now);
        // Decide about MPS hosts before any reservation. Otherwise a node that is found idle here
        // could receive a reservation in the same reconcile.
        let rollout = self.plan_rollout(cluster, &mut ledger, now.up);
        let requeue = self.next_deadline(&ledger, cluster, rollout.as_ref(), now);
        let mut actions = Actions { rollout, requeue, ..Actions::default() };
        let changed_nodes = tracker.take_changed_nodes();
        let input = ReconcileInput { cluster, tracker, unsettled: &unsettled, demand, now };
        for node in changed_nodes.into_iter().chain(self.claims.take_freed_nodes()) {
            self.preemptors.record_node_change(&node);
        }
        ledger.synchronize(&mut self.chooser);
        actions.stranded = self.decide_about_stranded(&ledger, &input);
        if let Some(requeue) = actions.stranded.requeue {
            actions.requeue_in(requeue);
        }
        let settling = self.next_reservation.saturating_sub(now.up);
        if settling.is_zero() {
            let (parts, state) = ((&mut ledger, &mut self.claims), (&self.nodes, &self.queue));
            let retried = self.gang_releases.releases_to_retry(parts, &unsettled, state, &mut actions, now);
            actions.releases.extend(retried);
            self.update_preemption(&mut ledger, &waiting, &input, &mut actions);
            if waiting.is_empty() {
                self.growth.add_reports(&[], now.up, &mut actions);
            } else {
                self.reserve_or_explain(&mut ledger, waiting, &input, &mut actions);
            }
            self.gang_evictions.remember(&actions.evictions, tracker, now.epoch);
            self.gang_restarts.remember(&actions.evictions, tracker, now.up);
            actions.awaits_budgets |= !self.gang_evictions.is_empty();
            let room = MAX_RELEASES.saturating_sub(actions.releases.len());
            let queue = &self.queue;
            let retried = self.unanswered.releases_to_retry(&ledger, now);
            let retried = retried.filter(|release| queue.missing_time_left(&release.pod, now.up).is_none());
            actions.releases.extend(retried.take(room));
            let reported = self.growth.reported();
            actions.taints = self.fragments.update((&self.nodes, tracker), &ledger, reported, now.up);
        } else {
            actions.requeue_in(settling);
        }
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
        (tracker, maybe_deleted): (&mut PodTracker, BTreeSet<String>),
        now: ReconcileTime,
    ) -> Vec<(String, &'a PodObject)> {
        // Pods that wait for the shares of an earlier pod of the same name to become free.
        let mut successors = BTreeSet::new();
        let mut present = BTreeSet::new();
        let mut settled = Vec::new();
        let mut waiting = Vec::new();
        self.claims.record_ended_pods(tracker.take_ended_pods(), now.up);
        for pod in unsettled {
            let name = full_name(&pod.metadata);
            if !self.claims.end_predecessor_claim(ledger, &name, pod, now.up) {
                successors.insert(name);
                continue;
            }
            if pod.node().is_some() || !pod.waits_at_gate() {
                self.unanswered.remove(&name);
            } else if self.unanswered.is_refuted_by(&name, pod) {
                self.unanswered.remove(&name);
                if !self.gang_releases.record_failure(&name) {
                    self.claims.end_claim(Some(ledger), &name);
                }
            }
            if let Some(node) = pod.node() {
                if self.claims.record_binding(ledger, &name, pod, node) {
                    tracker.mark_settled(&name);
                    settled.push(name.clone());
                }
            } else if pod.waits_at_gate() {
                // A pod with a claim was released, but the watch has not reported that yet, or the
                // release is retried.
                if ledger.claim(&name).is_none() {
                    self.unanswered.remove(&name);
                    waiting.push((name.clone(), *pod));
                }
            } else {
                self.claims.restore_reservation(ledger, &name, pod, now);
            }
            present.insert(name);
        }
        self.unanswered.retain(&present);
        self.claims.remove_ended_pods(ledger, &present, maybe_deleted, now.up);
        present.append(&mut successors);
        let arrived = self.queue.update(&present, &waiting, now.up);
        self.queue.record_other_gates(unsettled);
        ledger.synchronize(&mut self.chooser);
        learning::count_arrived_pods(&mut self.chooser, &self.nodes, &arrived);
        for name in &settled {
            present.remove(name);
        }
        tracker.remember_unsettled(present);
        queue::sort_by_priority(&mut waiting);
        waiting
    }

    /// Decides which MPS hosts to replace, if replacement is enabled and due. A node whose MPS host
    /// is about to be replaced receives no reservations.
    fn plan_rollout(&mut self, cluster: &Cluster, ledger: &mut Ledger, up: Duration) -> Option<RolloutStep> {
        let hosts = cluster.hosts.as_ref().filter(|_| self.next_rollout <= up)?;
        self.next_rollout = up.saturating_add(rollout::UPDATE_INTERVAL);
        let views = mps_hosts::host_views(cluster, hosts, &self.nodes, ledger);
        let step = self.rollout.update(&views, up);
        for (name, facts) in self.nodes.update(cluster, &self.rollout) {
            self.preemptors.record_node_change(&name);
            self.unlisted.update(ledger, &name, facts.as_ref(), up);
            if let Some(facts) = facts {
                ledger.observe(&name, facts);
            }
        }
        Some(step)
    }

    /// Returns the time until the next reconcile if nothing changes. A reconcile is due when a
    /// reservation or lingering claim ends, or when MPS hosts must be examined.
    fn next_deadline(
        &self,
        ledger: &Ledger,
        cluster: &Cluster,
        rollout: Option<&RolloutStep>,
        now: ReconcileTime,
    ) -> Option<Duration> {
        let reservations = ledger.unbound_claims().filter_map(|(_, claim)| match &claim.place {
            Place::OneOf { expires, .. } => Some(Duration::from_secs(expires.0.saturating_sub(now.epoch).max(1))),
            Place::Bound(_) => None,
        });
        let hosts = match rollout {
            Some(step) => step.next,
            // This reconcile did not examine the MPS hosts. Changes of MPS hosts are handled at
            // `next_rollout`.
            None => cluster.hosts.as_ref().map(|_| self.next_rollout.saturating_sub(now.up)),
        };
        reservations.chain(self.claims.lingering_claim_expiries(now.up)).chain(hosts).min()
    }

    /// Decides how to handle released pods that are not bound.
    fn decide_about_stranded(&mut self, ledger: &Ledger, input: &ReconcileInput<'_>) -> StrandedActions {
        let Self { unschedulable_after, agent_labels, chooser, nodes, stranded, claims, .. } = self;
        let tracker = input.tracker;
        let mut found: Vec<(&PodObject, stranded::Reason)> = Vec::new();
        let mut unschedulable: Vec<Candidate<'_>> = Vec::new();
        let mut at_other_nodes: Vec<Candidate<'_>> = Vec::new();
        for pod in input.unsettled.iter().copied().filter(|pod| is_released_and_unbound(pod)) {
            if let Some(reason) = stranded::Reason::of_released_pod(pod, ledger, nodes, tracker) {
                found.push((pod, reason));
            } else if pod.placement.is_none() && pod.unschedulable {
                unschedulable.push(Candidate::from_unschedulable(pod, nodes));
            } else if pod.placement.is_none() && pod.to_other_nodes && pod.is_reported_unschedulable() {
                at_other_nodes.push(Candidate::from_other_nodes(pod, nodes, agent_labels));
            }
        }
        let parts = (&*nodes, tracker, &*claims);
        let mut search = LazyCell::new(|| PlacementSearch::new(input, parts, ledger, chooser));
        for candidate in unschedulable.iter().filter(|candidate| !candidate.device_requests.is_empty()) {
            let possible = match search.find(ledger, candidate) {
                Ok(_) => true,
                Err(verdict) => candidate.explain(verdict, input.demand.get(&candidate.name)).1,
            };
            if possible {
                found.push((candidate.pod, stranded::Reason::Possible));
            }
        }
        for candidate in at_other_nodes.iter().filter(|candidate| !candidate.device_requests.is_empty()) {
            if search.find(ledger, candidate).is_ok() {
                found.push((candidate.pod, stranded::Reason::OtherNodesFull));
            }
        }
        claims.drop_renewals(input.unsettled);
        let mut stranded_actions = stranded.reconcile(found, *unschedulable_after, input.now.up);
        let is_over = |pod: &&&PodObject| {
            pod.node().is_some() && pod.condition(CONDITION_PLACED).is_some_and(|condition| condition.status == "False")
        };
        stranded_actions.placed_reports.extend(input.unsettled.iter().filter(is_over).map(|pod| PlacedReport {
            pod: full_name(&pod.metadata),
            uid: pod.uid().unwrap_or_default(),
            message: None,
        }));
        stranded_actions
    }

    /// Updates the state of preemption, and ends the nominations of pods that no longer wait.
    fn update_preemption(
        &mut self,
        ledger: &mut Ledger,
        waiting: &[(String, &PodObject)],
        input: &ReconcileInput<'_>,
        actions: &mut Actions,
    ) {
        let up = input.now.up;
        self.preemptors.update(waiting);
        withdraw_other_nominations(ledger, waiting).iter().for_each(|node| self.preemptors.record_node_change(node));
        self.gang_restarts.update(input.tracker, up);
        if self.evictions.update(up) {
            self.preemptors.record_cluster_change();
        }
        let may_restore = || {
            let is_known = !input.cluster.quotas.is_empty() && !self.quota_objects.are_unknown();
            is_known && are_enforced(input.cluster, &self.nodes, &self.quotas)
        };
        if self.restores_evictions && may_restore() {
            self.restores_evictions = false;
            let grace_cap = Duration::from_secs(self.quotas.rules.grace_cap);
            let budgets = DisruptionBudgets::new(&input.cluster.budgets);
            let has_budget = |pod: &PodObject| budgets.protection(pod) != BudgetProtection::None;
            self.gang_evictions.restore(input.tracker, (input.now.epoch, grace_cap), has_budget);
        }
        let evictions = &self.evictions;
        let budgets = LazyCell::new(|| DisruptionBudgets::new(&input.cluster.budgets));
        let can_evict = |pod: &PodObject, eviction: &Eviction| {
            let force = eviction.quota.as_ref().is_some_and(|quota| quota.force);
            evictions.can_request(&eviction.uid, force, up)
                && (force || budgets.protection(pod) != BudgetProtection::Protected)
        };
        actions.evictions = self.gang_evictions.evict_rest(input.tracker, can_evict, up);
        self.evictions.set_requested(actions.evictions.iter().map(|eviction| eviction.uid.clone()).collect());
        if !waiting.is_empty() || !self.gang_evictions.is_empty() {
            self.preemptors.update_budgets(&input.cluster.budgets);
            self.evictions.deadlines(up).for_each(|deadline| actions.requeue_in(deadline));
            self.unlisted.next_expiry(up).into_iter().for_each(|expiry| actions.requeue_in(expiry));
        }
    }

    /// Reserves shares for the pods that fit, and explains why the other pods wait.
    fn reserve_or_explain(
        &mut self,
        ledger: &mut Ledger,
        waiting: Vec<(String, &PodObject)>,
        input: &ReconcileInput<'_>,
        actions: &mut Actions,
    ) {
        let up = input.now.up;
        let waiting = self.queue.remove_delayed(ledger, waiting, up, actions).into_iter();
        let Self { agent_labels, chooser, nodes, claims, queue, rollout, stranded, .. } = self;
        let tracker = input.tracker;
        let Self { evictions, preemptors, growth, returning, unlisted, gang_releases, .. } = self;
        let (nodes, stranded) = (&*nodes, &*stranded);
        let candidate = |(name, pod)| Candidate::new(name, pod, nodes, stranded.avoided_nodes(pod));
        let candidates: Vec<Candidate<'_>> = waiting.map(candidate).collect();
        let evictability = Evictability::new(&input.cluster.budgets, evictions, input.now.epoch);
        if std::mem::take(&mut self.restores_nominations) && !input.cluster.quotas.is_empty() {
            let is_ending = |node: &str, pod: &str| claims.is_ending(node, pod, up);
            let holders = || nodes.holders(tracker, &evictability, unlisted, is_ending);
            handover::restore_nominations(
                ledger,
                candidates.iter().map(Candidate::for_handover),
                holders,
                input.now.epoch,
            );
        }
        let worlds = QuotaWorlds::new(
            (input.cluster, nodes),
            (tracker, ledger),
            candidates.iter().map(|candidate| (candidate.name.as_str(), candidate.pod)),
            Decided { evictions, claims, restarts: &self.gang_restarts },
            (&self.quotas, input.now.epoch),
        )
        .filter(QuotaWorlds::are_enforced);
        preemptors.start_exchanges(worlds.as_ref(), input.now);
        if let Some(Moment(until)) = worlds.as_ref().and_then(|worlds| worlds.gangs.next_end) {
            actions.requeue_in(Duration::from_secs(until.saturating_sub(input.now.epoch)));
        }
        let unbound = worlds.as_ref().map(|worlds| {
            unbound_pods(ledger, (tracker, claims), &evictability, |node| worlds.is_in_enforced_pool(node))
        });
        let unbound = unbound.unwrap_or_default();
        let mut quotas = worlds.as_ref().map(|worlds| QuotaPass::new(worlds, ledger));
        let mut search = PlacementSearch::new(input, (nodes, tracker, &*claims), ledger, chooser);
        if let Some(pass) = &mut quotas {
            long_waits::reserve(pass, (ledger, &mut search), &candidates, (input, queue), self.leads_since);
        }
        let order = TurnOrder::new(quotas.as_ref(), candidates.iter().map(|one| one.name.as_str()), self.leads_since);
        let offers = AllowedUnits::of_policies(input.cluster.policies.iter().map(AsRef::as_ref));
        let mut decisions = Decisions {
            search: search.with_quotas(worlds.as_ref()),
            preemption: PreemptionSearch::new((nodes, tracker, unlisted), evictability, claims, preemptors, up)
                .with_unbound(unbound)
                .with_unknown_quotas(self.quota_objects.are_unknown()),
            returning: returning.units(nodes, (ledger, claims), up, actions),
            ledger,
            actions,
            queue,
            growth,
            input,
            nodes,
            stranded,
            rollout,
            agent_labels,
            offers: &offers,
            quotas,
            gang_releases,
            other_nodes: None,
            expires: claims::expiry(input.now),
            without_labels: self.quotas.without_labels,
            unschedulable_after: self.unschedulable_after,
            reserved: BTreeSet::new(),
            unplaceable_releases: 0,
        };
        decisions.decide_all(&candidates, order);
        let reserved = decisions.finish(&candidates);
        for candidate in candidates.iter().filter(|candidate| reserved.contains(&candidate.name)) {
            claims.add(Arc::from(candidate.name.as_str()), candidate.pod);
        }
    }
}

/// Ends the nominations of pods that no longer wait. Returns the nodes of these nominations.
fn withdraw_other_nominations(ledger: &mut Ledger, waiting: &[(String, &PodObject)]) -> Vec<String> {
    if ledger.nominations().is_empty() {
        return Vec::new();
    }
    let waiting: BTreeSet<&str> = waiting.iter().map(|(name, _)| name.as_str()).collect();
    let over: Vec<String> =
        ledger.nominations().keys().filter(|pod| !waiting.contains(pod.as_str())).cloned().collect();
    over.iter().filter_map(|pod| ledger.withdraw(pod)).map(|nomination| nomination.node).collect()
}

#[cfg(test)]
mod tests;
