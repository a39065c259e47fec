//! The placement controller: applies the gatekeeper's decisions and reports them. The controller is
//! separate from the passes, so that a release does not wait for writes of `GpuNode`s.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleave_api::names::CONDITION_PLACED;
use futures::StreamExt as _;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use tokio::sync::watch;

use super::actions::{Actions, AutoscalerReport, Release, ReleaseReason};
use super::cluster::{Cluster, ReconcileTime};
use super::gatekeeper::Gatekeeper;
use super::patch;
use super::quota_writer::QuotaChanges;
use super::quotas::QuotaSettings;
use super::stranded::{PlacedReport, Recreation, StrandedActions};
use crate::events::{self, EventSelector};
use crate::evict::{self, EvictionResult};
use crate::metrics::Outcome;
use crate::pod_condition::{self, ConditionTarget, WriteResult};
use crate::pods::{POD_SCHEDULED, PodCondition};
use crate::policies::demand::WaitingPod;
use crate::policies::taint::{self, TaintChange, TaintWriteResult};
use crate::rollout::{self, DeletionResult, MpsHostStores, Replacement, RolloutStep};
use crate::task::{Context, Controller, Trigger};
use crate::watches::Wakers;
use crate::write::{MAX_IN_FLIGHT, WRITE_TIMEOUT, publish, publish_all};

mod evictions;
mod quotas;

/// Time to wait for further changes after the first one. Pods are often created in bursts.
const BATCH_WINDOW: Duration = Duration::from_millis(5);
/// Delay between a failed write and the next reconcile, even if nothing has changed.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Delay before the next check whether quotas are listed.
const QUOTA_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The inputs of the placement controller.
pub(crate) struct ControllerInputs {
    pub(crate) context: Context,
    /// Notifications that wake the controllers.
    pub(crate) wakes: Wakers,
    /// Why each pod waits, according to the plan for GPUs that Cleave partitions on demand.
    pub(crate) demand: watch::Receiver<Arc<BTreeMap<String, WaitingPod>>>,
    /// Sends the GPU controller the pods for which no GPU need be partitioned.
    pub(crate) unplanned: watch::Sender<Arc<BTreeSet<String>>>,
    /// MPS hosts. `None` if the operator does not replace MPS hosts.
    pub(crate) hosts: Option<MpsHostStores>,
    /// Time for which a pod must be unplaceable before it is released as unschedulable.
    pub(crate) unschedulable_after: Duration,
    /// Labels that every node with an agent has.
    pub(crate) agent_labels: BTreeMap<String, String>,
    /// Whether pods at the gate are reported to cluster autoscalers.
    pub(crate) report_unschedulable: bool,
    /// Whether nodes that only look free to cluster autoscalers are tainted.
    pub(crate) taint_fragmented: bool,
    /// Settings of quotas.
    pub(crate) quotas: QuotaSettings,
    /// Receives the statuses of quotas and the labels of pods that must be written.
    pub(crate) quota_changes: watch::Sender<QuotaChanges>,
}

/// Why a pod was not released.
#[derive(Debug)]
enum ReleaseFailure {
    /// The pod changed. The next reconcile handles its new state.
    Changed,
    /// The pod no longer exists. The watch will report the deletion.
    Missing,
    /// The pod was not released. A retry may succeed.
    Retry,
    /// The pod may have been released. Contains the release with the patch that was sent.
    Unknown(Box<Release>),
    /// The API server refused the patch. Contains its message.
    Refused(String),
}

/// The results of the writes of one reconcile.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct WriteSummary {
    /// Whether a write must be repeated, even if no change wakes the controller.
    is_incomplete: bool,
    /// Whether the API server limited the rate of writes, did not answer, or failed.
    is_impaired: bool,
    /// Whether the reservation of a pod that no longer exists ended, so that other pods may fit.
    freed_room: bool,
}

impl WriteSummary {
    /// Records why a pod was not released.
    fn record(&mut self, failure: &ReleaseFailure) {
        self.is_incomplete |= !matches!(failure, ReleaseFailure::Missing);
        self.is_impaired |= matches!(failure, ReleaseFailure::Retry | ReleaseFailure::Unknown(_));
    }
}

/// Returns the delay before the next reconcile if no change wakes the placement controller earlier.
/// If the API server did not accept writes, the next reconcile does not follow immediately, because
/// the next reconcile would repeat the same writes. `later` is the time until Events, failed taint
/// writes or reports about quotas are due.
fn next_delay(actions: &Actions, writes: WriteSummary, later: Option<Duration>) -> Option<Duration> {
    if writes.is_impaired {
        return Some(RETRY_DELAY);
    }
    let retry = writes.is_incomplete.then_some(RETRY_DELAY);
    let more = (actions.more || writes.freed_room).then_some(BATCH_WINDOW);
    actions.delay().into_iter().chain(retry).chain(more).chain(later).min()
}

/// The time of day, read once and then advanced by a monotonic clock. Reservations end at a time of
/// day, and an adjustment of the node's clock must not end or prolong reservations.
#[derive(Debug, Clone, Copy)]
struct SteadyClock {
    time: Timestamp,
    read_at: Instant,
}

impl SteadyClock {
    /// Creates a clock whose time at `read_at` is `time`.
    const fn new(time: Timestamp, read_at: Instant) -> Self {
        Self { time, read_at }
    }

    /// Reads the node's clock.
    fn read() -> Self {
        Self::new(Timestamp::now(), Instant::now())
    }

    /// Returns the seconds since the Unix epoch at `now`.
    fn epoch_seconds(self, now: Instant) -> u64 {
        u64::try_from(self.time.as_second())
            .unwrap_or(0)
            .saturating_add(now.saturating_duration_since(self.read_at).as_secs())
    }
}

/// Maximum number of waiting pods that metrics list by name.
const MAX_LISTED_WAITS: usize = 20;

/// The placement controller.
pub(crate) struct PlacementController {
    context: Context,
    wakes: Wakers,
    demand: watch::Receiver<Arc<BTreeMap<String, WaitingPod>>>,
    unplanned: watch::Sender<Arc<BTreeSet<String>>>,
    hosts: Option<MpsHostStores>,
    keeper: Gatekeeper,
    /// Earliest time at which quotas are reported.
    next_quota_reports: Duration,
    /// Whether the last report had quotas, or labels remain from earlier quotas.
    reports_quotas: bool,
    /// Statuses and labels for the task that writes them.
    quota_changes: watch::Sender<QuotaChanges>,
    publisher: EventSelector,
    started: Instant,
    clock: SteadyClock,
}

impl Controller for PlacementController {
    fn batch_window(&mut self) -> Duration {
        BATCH_WINDOW
    }

    async fn reconcile(&mut self, _: Trigger) -> Option<Duration> {
        if !self.context.claim.is_current() {
            self.keeper.reset();
            self.context.stores.pods.forget_changes();
            self.context.metrics.reset_placement();
            self.reports_quotas = true;
            // Read the clock while another process leads, so that `clock` is current when this
            // process becomes the leader.
            self.clock = SteadyClock::read();
            return None;
        }
        if !self.are_quotas_listed() {
            return Some(QUOTA_POLL_INTERVAL);
        }
        let began = Instant::now();
        let (cluster, changes) = (self.cluster(), self.context.stores.pods.changes());
        let up = self.started.elapsed();
        let epoch = self.clock.epoch_seconds(began);
        let demand = Arc::clone(&self.demand.borrow_and_update());
        let actions = self.keeper.reconcile_changes(&cluster, changes, &demand, ReconcileTime { up, epoch });
        self.context.metrics.placement_seconds.observe(began.elapsed().as_secs_f64());
        self.set_gauges(&actions, &demand, up);
        self.send_unplanned(&actions);
        self.context.metrics.preemption_searches.inc_by(actions.preemption_searches);
        let mut writes = self.release_all(&actions.releases).await;
        writes.is_incomplete |= !self.evict_all(&actions).await;
        self.write_protected(&actions.protected).await;
        self.wakes.set_awaits_budgets(actions.awaits_budgets);
        self.apply_stranded_actions(&actions.stranded).await;
        writes.is_impaired |= !self.report_all(&actions.reports).await;
        self.taint_all(&actions.taints).await;
        writes.is_incomplete |= !actions.stranded.recreate.is_empty() || !actions.stranded.placed_reports.is_empty();
        if let Some(step) = &actions.rollout {
            self.apply_rollout_step(step).await;
        }
        let statuses = self.report_quotas(&cluster, &actions, ReconcileTime { up, epoch });
        drop(cluster);
        self.publish_events(&actions, &demand, up).await;
        let events = self.publisher.has_unreported_wait().then_some(events::EVENT_CHECK_DELAY);
        let taints = self.keeper.next_taint_retry(self.started.elapsed());
        next_delay(&actions, writes, events.into_iter().chain(taints).chain(statuses).min())
    }
}

impl PlacementController {
    pub(crate) fn new(parts: ControllerInputs) -> Self {
        let ControllerInputs { context, wakes, demand, unplanned, hosts, unschedulable_after, agent_labels, .. } =
            parts;
        Self {
            context,
            wakes,
            demand,
            unplanned,
            hosts,
            keeper: Gatekeeper::new(unschedulable_after)
                .with_agent_labels(agent_labels)
                .with_reports(parts.report_unschedulable)
                .with_taints(parts.taint_fragmented)
                .with_quotas(parts.quotas)
                .with_settling_delay(),
            next_quota_reports: Duration::ZERO,
            reports_quotas: true,
            quota_changes: parts.quota_changes,
            publisher: EventSelector::default(),
            started: Instant::now(),
            clock: SteadyClock::read(),
        }
    }

    /// Returns the current content of the stores, without pods.
    fn cluster(&self) -> Cluster {
        let stores = &self.context.stores;
        Cluster {
            pods: Vec::new(),
            nodes: stores.nodes.state(),
            gpu_nodes: stores.gpu_nodes.state(),
            policies: stores.policies.state(),
            agents: stores.agents.state(),
            hosts: self.hosts.as_ref().and_then(MpsHostStores::state),
            volume_claims: stores.volume_claims.state(),
            volumes: stores.volumes.state(),
            quotas: stores.quotas.state(),
            budgets: stores.budgets.state(),
            namespaces: stores.namespaces.state(),
        }
    }

    /// Releases pods.
    async fn release_all(&mut self, releases: &[Release]) -> WriteSummary {
        let writes: Vec<_> = releases.iter().map(|release| self.release(release)).collect();
        let results: Vec<(&Release, Result<(), ReleaseFailure>)> =
            futures::stream::iter(writes).buffer_unordered(MAX_IN_FLIGHT).collect().await;
        let mut all = WriteSummary::default();
        for (Release { pod, uid, .. }, result) in results {
            if let Err(failure) = &result {
                all.record(failure);
            }
            match result {
                Ok(()) => self.keeper.record_release(pod),
                Err(ReleaseFailure::Unknown(release)) => self.keeper.record_unanswered_release(*release),
                Err(ReleaseFailure::Changed | ReleaseFailure::Retry) => self.keeper.record_failed_release(pod),
                Err(ReleaseFailure::Missing) => {
                    all.freed_room |= self.keeper.record_missing_pod(pod, uid, self.started.elapsed());
                }
                Err(ReleaseFailure::Refused(message)) => {
                    self.keeper.record_refused_release(pod, &message, self.started.elapsed());
                }
            }
        }
        all
    }

    /// Releases one pod, and counts the result.
    async fn release<'r>(&self, release: &'r Release) -> (&'r Release, Result<(), ReleaseFailure>) {
        let result = self.send_release_patch(release).await;
        let label = if result.is_ok() { release.reason.as_str() } else { "failed" };
        self.context.metrics.pods_released.get_or_create(&Outcome { result: label }).inc();
        if result.is_ok() {
            self.context.metrics.gate_wait_seconds.observe(release.waited.as_secs_f64());
        }
        (release, result)
    }

    /// Writes the patch that releases a pod.
    async fn send_release_patch(&self, release: &Release) -> Result<(), ReleaseFailure> {
        if !self.context.claim.is_current() {
            return Err(ReleaseFailure::Retry);
        }
        let pod = &release.pod;
        let body = if release.reported { self.withdraw_report(release).await? } else { release.patch.clone() };
        let unknown = |patch| ReleaseFailure::Unknown(Box::new(Release { reported: false, patch, ..release.clone() }));
        let Some((namespace, name)) = pod.split_once('/') else { return Err(ReleaseFailure::Retry) };
        let request =
            http::Request::patch(format!("/api/v1/namespaces/{namespace}/pods/{name}?fieldManager=cleave-operator"))
                .header(http::header::CONTENT_TYPE, "application/json-patch+json")
                .body(body.to_string().into_bytes());
        let request = match request {
            Ok(request) => request,
            Err(error) => {
                tracing::error!(
                    pod,
                    error = &error as &dyn std::error::Error,
                    "failed to build the request that releases a pod"
                );
                return Err(ReleaseFailure::Retry);
            }
        };
        match tokio::time::timeout(WRITE_TIMEOUT, self.context.client.request_text(request)).await {
            Ok(Ok(_)) => {
                tracing::debug!(pod, reason = release.reason.as_str(), "released a pod");
                Ok(())
            }
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => {
                tracing::debug!(pod, message = status.message, "failed to release a pod: it no longer exists");
                Err(ReleaseFailure::Missing)
            }
            Ok(Err(kube::Error::Api(status))) if status.code == 409 => {
                tracing::debug!(pod, message = status.message, "failed to release a changed pod");
                Err(ReleaseFailure::Changed)
            }
            // A changed pod also causes one of these statuses, because the `test` operation of the
            // patch fails.
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 400 | 403 | 413 | 422) => {
                tracing::debug!(
                    pod,
                    code = status.code,
                    message = status.message,
                    "the API server refused to release a pod"
                );
                Err(ReleaseFailure::Refused(status.message.clone()))
            }
            Ok(Err(error)) => {
                tracing::warn!(pod, error = &error as &dyn std::error::Error, "failed to release a pod");
                let refused = matches!(&error, kube::Error::Api(status) if status.code < 500);
                Err(if refused { ReleaseFailure::Retry } else { unknown(body) })
            }
            Err(_) => {
                tracing::warn!(
                    pod,
                    seconds = WRITE_TIMEOUT.as_secs(),
                    "failed to release a pod: the API server did not answer"
                );
                Err(unknown(body))
            }
        }
    }

    /// Withdraws the report about a pod that is released, because on a released pod only the
    /// scheduler may report `Unschedulable`. Returns the patch that then releases the pod.
    async fn withdraw_report(&self, release: &Release) -> Result<serde_json::Value, ReleaseFailure> {
        let version = patch::resource_version(&release.patch);
        let target = ConditionTarget { pod: &release.pod, uid: &release.uid, version };
        match pod_condition::write_to(&self.context.client, target, &scheduled_condition(None), false).await {
            WriteResult::Done(version) => Ok(patch::with_resource_version(&release.patch, version)),
            WriteResult::Obsolete => Err(ReleaseFailure::Changed),
            WriteResult::Missing => Err(ReleaseFailure::Missing),
            WriteResult::Failed => Err(ReleaseFailure::Retry),
        }
    }

    /// Reports pods at the gate to cluster autoscalers, or withdraws reports. Returns false if a
    /// write failed.
    async fn report_all(&mut self, reports: &[AutoscalerReport]) -> bool {
        if !self.context.claim.is_current() {
            return true;
        }
        let writes: Vec<_> = reports.iter().map(|report| self.report_pod(report)).collect();
        let results: Vec<(&str, WriteResult)> =
            futures::stream::iter(writes).buffer_unordered(MAX_IN_FLIGHT).collect().await;
        let failed = results.into_iter().filter(|(_, written)| *written == WriteResult::Failed);
        failed.map(|(uid, _)| self.keeper.record_failed_report(uid)).count() == 0
    }

    /// Taints nodes, or removes taints. Each node has its own retries.
    async fn taint_all(&mut self, changes: &[TaintChange]) {
        for (change, written) in taint::write_all(&self.context.client, &self.context.claim, changes).await {
            if let Some(written) = written {
                // If the node changed, the next reconcile reads it again, so no retry is necessary.
                self.keeper.record_taint(&change.node, written != TaintWriteResult::Failed, self.started.elapsed());
            }
        }
    }

    /// Writes one report.
    async fn report_pod<'r>(&self, report: &'r AutoscalerReport) -> (&'r str, WriteResult) {
        let AutoscalerReport { pod, uid, version, message } = report;
        let target = ConditionTarget { pod, uid, version: Some(version) };
        let condition = scheduled_condition(message.as_deref());
        (uid, pod_condition::write_to(&self.context.client, target, &condition, false).await)
    }

    /// Evicts stranded pods so that their controllers recreate them, and writes the condition of
    /// other stranded pods. After a failed write, a later reconcile repeats the decision.
    async fn apply_stranded_actions(&mut self, stranded_actions: &StrandedActions) {
        for recreation in &stranded_actions.recreate {
            if !self.context.claim.is_current() {
                return;
            }
            self.evict_stranded_pod(recreation).await;
        }
        let writes: Vec<_> =
            stranded_actions.placed_reports.iter().map(|report| self.write_placed_report(report)).collect();
        let results: Vec<(&str, bool)> = futures::stream::iter(writes).buffer_unordered(MAX_IN_FLIGHT).collect().await;
        for (uid, _) in results.into_iter().filter(|(_, written)| !written) {
            self.keeper.record_failed_placed_report(uid);
        }
    }

    async fn evict_stranded_pod(&mut self, Recreation { pod, uid, version, message }: &Recreation) {
        let evicted = evict::evict_unchanged(&self.context.client, pod, uid, version).await;
        self.context.metrics.stranded_pods_recreated.get_or_create(&Outcome { result: evicted.as_str() }).inc();
        match evicted {
            EvictionResult::Done => {
                tracing::info!(pod, message, "evicted a stranded pod");
                publish(&self.context.recorder, &events::stranded_event(message), &events::pod_reference(pod, uid))
                    .await;
            }
            EvictionResult::NotFound => {}
            EvictionResult::Throttled(_) => {
                tracing::warn!(pod, "the API server limits evictions");
                self.keeper.record_failed_eviction(uid, self.started.elapsed());
            }
            EvictionResult::Protected(why) => {
                tracing::info!(pod, why, "a disruption budget prevented the eviction of a stranded pod");
                self.keeper.record_failed_eviction(uid, self.started.elapsed());
            }
            EvictionResult::Refused(error) | EvictionResult::Failed(error) => {
                tracing::warn!(pod, error, "failed to evict a stranded pod");
                self.keeper.record_failed_eviction(uid, self.started.elapsed());
            }
        }
    }

    /// Writes the condition of one stranded pod. Returns false if a retry is necessary.
    async fn write_placed_report<'a>(&self, PlacedReport { pod, uid, message }: &'a PlacedReport) -> (&'a str, bool) {
        if !self.context.claim.is_current() {
            return (uid, false);
        }
        let (status, reason) = if message.is_some() { ("False", "Stranded") } else { ("True", "Bound") };
        let condition = PodCondition {
            type_: CONDITION_PLACED.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            message: message.clone().unwrap_or_default(),
        };
        let written = pod_condition::write(&self.context.client, (pod, uid), &condition, true).await;
        if let Some(message) = message.as_deref().filter(|_| written) {
            publish(&self.context.recorder, &events::stranded_event(message), &events::pod_reference(pod, uid)).await;
        }
        (uid, written)
    }

    /// Deletes the pods of the MPS hosts to replace, and reports the progress.
    async fn apply_rollout_step(&mut self, step: &RolloutStep) {
        let metrics = &self.context.metrics;
        metrics.hosts_outdated.set(i64::try_from(step.outdated).unwrap_or(i64::MAX));
        metrics.rollout_stopped.set(i64::from(step.stopped));
        for (node, why) in &step.waiting {
            tracing::debug!(node, why, "postponed the replacement of an MPS host");
        }
        let mut events = Vec::new();
        if let Some((message, regarding)) = &step.stop_report {
            tracing::warn!(message, "stopped the replacement of MPS hosts");
            events.push((regarding.clone(), events::rollout_stopped_event(message)));
        }
        for replacement in &step.replace {
            if !self.context.claim.is_current() {
                return;
            }
            events.extend(self.replace_mps_host(replacement).await);
            // Reconcile again: the node's shares are now withheld, or no longer withheld.
            self.wakes.placement.notify_one();
        }
        for (regarding, event) in events {
            publish(&self.context.recorder, &event, &regarding).await;
        }
    }

    /// Deletes the pod of one MPS host. Returns the Event to publish, or `None` if the pod was not
    /// deleted.
    async fn replace_mps_host(
        &mut self,
        replacement: &Replacement,
    ) -> Option<(ObjectReference, kube::runtime::events::Event)> {
        let hosts = self.hosts.as_ref()?;
        let (node, pod) = (&replacement.node, &replacement.host.pod);
        let deleted = rollout::replace(&self.context.client, hosts, replacement).await;
        self.context.metrics.hosts_replaced.get_or_create(&Outcome { result: deleted.as_str() }).inc();
        let up = self.started.elapsed();
        match deleted {
            DeletionResult::Done => {
                tracing::info!(node, pod, "deleted an outdated MPS host");
                self.keeper.rollout.record_replacement(replacement, up);
                return Some((
                    replacement.daemon_set_reference(),
                    events::mps_host_replaced_event(node, pod, &replacement.host.uid),
                ));
            }
            DeletionResult::Skipped => self.keeper.rollout.record_no_deletion(node),
            DeletionResult::Failed(error) => {
                tracing::warn!(node, pod, error = &error as &dyn std::error::Error, "failed to delete an MPS host");
                self.keeper.rollout.record_refusal(node, up);
            }
            DeletionResult::Timeout => {
                tracing::warn!(
                    node,
                    pod,
                    seconds = WRITE_TIMEOUT.as_secs(),
                    "failed to delete an MPS host: the API server did not answer"
                );
                self.keeper.rollout.record_refusal(node, up);
            }
        }
        None
    }

    /// Publishes Events about pods that wait and pods that were released as unschedulable. The
    /// passes report the pods in `demand`, because only the passes have the plan for GPUs that are
    /// partitioned on demand.
    async fn publish_events(&mut self, actions: &Actions, demand: &BTreeMap<String, WaitingPod>, up: Duration) {
        let mut waiting = actions.waiting.clone();
        waiting.retain(|pod, _| !demand.contains_key(pod));
        let uids = if waiting.is_empty() { BTreeMap::new() } else { self.keeper.gated_uids() };
        let mut all = self.publisher.pod_events(&waiting, &uids, up);
        for release in &actions.releases {
            if let ReleaseReason::Unschedulable(message) = &release.reason {
                all.push((events::pod_reference(&release.pod, &release.uid), events::unschedulable_event(message)));
            }
        }
        publish_all(&self.context.recorder, &self.context.claim, all).await;
    }

    /// Updates the gauges of pods at the gate. For a pod in `demand`, uses the reason in `demand`.
    fn set_gauges(&self, actions: &Actions, demand: &BTreeMap<String, WaitingPod>, up: Duration) {
        let reason = |pod: &str, gated: &WaitingPod| demand.get(pod).map_or(gated.reason, |planned| planned.reason);
        let mut gated = BTreeMap::new();
        for (pod, waiting) in &actions.waiting {
            *gated.entry(reason(pod, waiting).as_str()).or_default() += 1;
        }
        let mut longest = Vec::new();
        for (pod, waited) in self.keeper.longest_waits(MAX_LISTED_WAITS, up) {
            if let Some(waiting) = actions.waiting.get(pod) {
                longest.push((pod, reason(pod, waiting).as_str(), waited));
            }
        }
        self.context.metrics.set_gated(gated, &longest);
        self.context.metrics.reported.set(i64::try_from(actions.reported).unwrap_or(i64::MAX));
    }
}

/// Returns the condition `PodScheduled` of a pod at the gate. With a message, the condition reports
/// that the pod needs another node. Without a message, the function returns the condition that the
/// API server writes for a new pod with a gate.
fn scheduled_condition(message: Option<&str>) -> PodCondition {
    let (reason, message) = match message {
        Some(message) => ("Unschedulable", format!("{message}. The pod waits at Cleave's placement gate")),
        None => ("SchedulingGated", "Scheduling is blocked due to non-empty scheduling gates".to_owned()),
    };
    PodCondition { type_: POD_SCHEDULED.to_owned(), status: "False".to_owned(), reason: reason.to_owned(), message }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn further_writes_wait_while_the_api_server_accepts_none() {
        let mut actions = Actions { more: true, ..Actions::default() };
        actions.requeue_in(Duration::from_millis(50));
        let delay = |actions: &Actions, failures: &[ReleaseFailure]| {
            let mut writes = WriteSummary::default();
            failures.iter().for_each(|failure| writes.record(failure));
            next_delay(actions, writes, None)
        };
        assert_eq!(delay(&actions, &[]), Some(BATCH_WINDOW));
        for failure in [ReleaseFailure::Changed, ReleaseFailure::Missing, ReleaseFailure::Refused("no".to_owned())] {
            assert_eq!(delay(&actions, &[failure]), Some(BATCH_WINDOW), "other pods can be released");
        }
        assert_eq!(delay(&actions, &[ReleaseFailure::Changed, ReleaseFailure::Retry]), Some(RETRY_DELAY));
        let idle = Actions::default();
        assert_eq!((delay(&idle, &[]), delay(&idle, &[ReleaseFailure::Changed])), (None, Some(RETRY_DELAY)));
        assert_eq!(delay(&idle, &[ReleaseFailure::Missing]), None, "the watch reports the deletion");
        assert_eq!(next_delay(&idle, WriteSummary::default(), Some(RETRY_DELAY * 2)), Some(RETRY_DELAY * 2));
        let freed = WriteSummary { freed_room: true, ..WriteSummary::default() };
        assert_eq!(next_delay(&idle, freed, None), Some(BATCH_WINDOW), "another pod may fit now");
        assert_eq!(next_delay(&idle, WriteSummary { is_impaired: true, ..freed }, None), Some(RETRY_DELAY));
    }

    #[test]
    fn the_clock_of_reservations_advances_steadily_from_one_reading() {
        let start = Instant::now();
        let clock = SteadyClock::new(Timestamp::from_second(1_000).unwrap(), start);
        assert_eq!(clock.epoch_seconds(start), 1_000);
        assert_eq!(clock.epoch_seconds(start + Duration::from_millis(5_900)), 1_005);
        let before_1970 = SteadyClock::new(Timestamp::from_second(-7).unwrap(), start + Duration::from_secs(1));
        assert_eq!(before_1970.epoch_seconds(start), 0);
    }
}
