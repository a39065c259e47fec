//! The GPU controller: reads the cluster, plans every GPU from the policies and pods, writes the
//! plan, and reports the results.
//!
//! [`crate::policies`] contains the steps. One pass runs all steps. A pass writes only while this
//! process holds the lease.
use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleave_api::gpunode::StepStatus;
use cleave_api::names::{STEP_DONE, STEP_FAILED, STEP_REFUSED};
use cleave_api::{GpuNode, SharingPolicy};
use futures::StreamExt as _;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::core::DeserializeGuard;
use kube::{Api, Resource as _, ResourceExt};
use tokio::sync::watch;

use crate::events::{self, EventSelector};
use crate::metrics::{self, KindLabel, Outcome, WriteLabels};
use crate::policies::demand::{self, Reason, WaitingPod};
use crate::policies::pace::{PlanPace, QuietPeriod};
use crate::policies::repartition::Repartitions;
use crate::policies::snapshot::History;
use crate::policies::staging::Staging;
use crate::policies::status::{WrittenStatus, WrittenStatuses};
use crate::policies::taint::{self, TaintWriteResult, Taints};
use crate::policies::{apply, plan, status};
use crate::read::Observed;
use crate::task::{Context, Controller, Trigger};
use crate::watches::Wakers;
use crate::write::{MAX_IN_FLIGHT, publish, publish_all, with_timeout};

/// Maximum interval between passes while pods wait for GPUs. The limit is necessary because a pod
/// that frees only CPU and memory does not wake the controller.
const WAITING_PODS_INTERVAL: Duration = Duration::from_secs(5);
/// Delay between a failed pass and the next one. Each further failure doubles the delay.
const FIRST_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Maximum delay after a failed pass.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(30);

/// The inputs of the GPU controller.
pub(crate) struct ControllerInputs {
    pub(crate) context: Context,
    pub(crate) wakes: Wakers,
    /// Sends the placement controller each waiting pod's reason to wait.
    pub(crate) demand: watch::Sender<Arc<BTreeMap<String, WaitingPod>>>,
    /// Waiting pods for which no GPU need be partitioned, because of quotas.
    pub(crate) unplanned: watch::Receiver<Arc<BTreeSet<String>>>,
    /// Whether to taint nodes that cannot serve any pod.
    pub(crate) taint: bool,
}

/// The GPU controller.
pub(crate) struct GpuController {
    context: Context,
    wakes: Wakers,
    demand: watch::Sender<Arc<BTreeMap<String, WaitingPod>>>,
    unplanned: watch::Receiver<Arc<BTreeSet<String>>>,
    written: WrittenStatuses,
    started: Instant,
    history: History,
    staging: Staging,
    quiet: QuietPeriod,
    pace: PlanPace,
    publisher: EventSelector,
    /// The steps of each node when they were last counted.
    steps: BTreeMap<String, Vec<StepStatus>>,
    repartitions: Repartitions,
    /// Decides which nodes are tainted. `None` if tainting is disabled.
    taints: Option<Taints>,
    /// Delay before the next pass if nothing changes. `None` means that only a change causes a
    /// pass.
    next: Option<Duration>,
    /// Delay before the controller retries a failed pass. `None` if the last pass succeeded.
    retry: Option<Duration>,
}

/// The result of planning the GPUs that are partitioned on demand.
enum DemandResult {
    /// No policy partitions GPUs on demand.
    None,
    /// The operator waits for more pods before it plans.
    Batching,
    /// A plan.
    Planned(Box<demand::Outcome>),
}

/// Removes waiting pods for which no GPU need be partitioned.
fn leave_out(observed: &mut Observed, unplanned: &BTreeSet<String>) {
    observed.pods.retain(|claimant| claimant.node.is_some() || !unplanned.contains(&claimant.pod.name));
}

/// At least one write of a pass failed. Each failure is already logged.
#[derive(Debug)]
struct PassFailed;

impl Controller for GpuController {
    fn batch_window(&mut self) -> Duration {
        self.pace.plan_delay(self.started.elapsed())
    }

    async fn reconcile(&mut self, trigger: Trigger) -> Option<Duration> {
        self.retry = match self.run_pass(trigger.seen).await {
            Ok(()) => None,
            Err(PassFailed) => Some(self.retry.map_or(FIRST_RETRY_DELAY, |delay| (delay * 2).min(MAX_RETRY_DELAY))),
        };
        self.pace.record_plan(self.now(), trigger.more);
        self.retry.into_iter().chain(self.next).min()
    }
}

impl GpuController {
    pub(crate) fn new(parts: ControllerInputs) -> Self {
        let ControllerInputs { context, wakes, demand, unplanned, taint } = parts;
        Self {
            context,
            wakes,
            demand,
            unplanned,
            written: WrittenStatuses::new(),
            started: Instant::now(),
            history: History::default(),
            staging: Staging::default(),
            quiet: QuietPeriod::default(),
            pace: PlanPace::default(),
            publisher: EventSelector::default(),
            steps: BTreeMap::new(),
            repartitions: Repartitions::default(),
            taints: taint.then(Taints::default),
            next: None,
            retry: None,
        }
    }

    /// Returns the time since the process started.
    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Drops all remembered state of the cluster, because the state becomes obsolete while another
    /// process leads.
    fn forget_state(&mut self) {
        self.written = WrittenStatuses::new();
        self.history = History::default();
        self.staging = Staging::default();
        self.quiet = QuietPeriod::default();
        self.publisher = EventSelector::default();
        self.steps.clear();
        self.repartitions = Repartitions::default();
        self.taints = self.taints.is_some().then(Taints::default);
    }

    /// Reads, plans and writes once. If this process does not lead, drops all remembered state
    /// instead. `seen` is the time at which the controller saw the first change.
    async fn run_pass(&mut self, seen: Instant) -> Result<(), PassFailed> {
        self.next = None;
        if !self.context.claim.is_current() {
            self.forget_state();
            self.context.metrics.reset_passes();
            return Ok(());
        }
        let now = self.now();
        let mut observed = self.context.stores.observe();
        self.count_steps(&observed);
        self.measure_repartitions(&observed);
        self.history.restore_writes(&mut observed, now);
        let mut plan = plan::plan(&observed);
        self.wakes.set_partitions_on_demand(!plan.demand.is_empty());
        // Only plans for GPUs that are partitioned on demand read pods.
        if !plan.demand.is_empty() {
            self.context.stores.observe_pods(&mut observed);
            leave_out(&mut observed, &self.unplanned.borrow_and_update());
        }
        let failures = self.staging.withhold_changes(&mut plan, &observed, now);
        let outcome = self.plan_demand(&mut plan, &observed, now);
        self.next = self.next.into_iter().chain(failures).min();
        self.set_gauges(&observed, &plan);
        let nodes = self.apply_specs(&plan, &observed, seen).await;
        match &outcome {
            DemandResult::Planned(outcome) => {
                self.send_waiting_pods(&outcome.waiting);
                self.report_demand(outcome, &observed).await;
            }
            DemandResult::None => {
                self.send_waiting_pods(&BTreeMap::new());
                self.context.metrics.reset_demand();
                self.publisher = EventSelector::default();
            }
            DemandResult::Batching => {}
        }
        let policies = self.report_policies(&plan, &observed).await;
        let tainted = self.update_taints(&observed).await;
        let all = nodes && policies && tainted;
        let result = if all { "ok" } else { "failed" };
        self.context.metrics.passes.get_or_create(&Outcome { result }).inc();
        if all { Ok(()) } else { Err(PassFailed) }
    }

    /// Sends each pod's reason to wait to the placement controller, if a reason has changed.
    fn send_waiting_pods(&self, waiting: &BTreeMap<String, WaitingPod>) {
        let modified = self.demand.send_if_modified(|sent| {
            let modified = **sent != *waiting;
            if modified {
                *sent = Arc::new(waiting.clone());
            }
            modified
        });
        if modified {
            self.wakes.placement.notify_one();
        }
    }

    /// Plans the GPUs that are partitioned on demand.
    fn plan_demand(&mut self, plan: &mut plan::Plan, observed: &Observed, now: Duration) -> DemandResult {
        if plan.demand.is_empty() {
            return DemandResult::None;
        }
        let rules = || plan.demand.values().flat_map(BTreeMap::values).map(|by_demand| by_demand.batch_rules);
        let idle = rules().filter_map(|rule| rule.idle).min();
        let timeout = rules().filter_map(|rule| rule.timeout).min();
        let waiting = observed.pods.iter().filter(|claimant| claimant.node.is_none());
        if let Err(wait) =
            self.quiet.check_due(waiting.map(|claimant| claimant.pod.name.as_str()), (idle, timeout), now)
        {
            self.next = Some(wait);
            return DemandResult::Batching;
        }
        let started = Instant::now();
        let outcome = demand::decide_partitions(plan, observed, &mut self.history, now);
        let took = started.elapsed();
        let Some(planned) = outcome.planned.as_ref() else { return DemandResult::None };
        self.context.metrics.plan_seconds.observe(took.as_secs_f64());
        let result = match (outcome.violations.as_slice(), planned.plan.changed) {
            ([], true) => "changed",
            ([], false) => "unchanged",
            (some, _) => {
                let violations: Vec<String> = some.iter().take(8).map(ToString::to_string).collect();
                tracing::error!(violations = violations.join("; "), "discarded a plan that violates constraints");
                "refused"
            }
        };
        self.context.metrics.plans.get_or_create(&Outcome { result }).inc();
        for reason in Reason::ALL {
            let count = outcome.waiting.values().filter(|waiting| waiting.reason == reason).count();
            let label = metrics::ReasonLabel { reason: reason.as_str() };
            self.context.metrics.pods_waiting.get_or_create(&label).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
        self.context.metrics.fragmentation.set(f64::from(outcome.fragmentation) / 1000.0);
        self.context.metrics.nodes_excluded.set(i64::try_from(outcome.excluded_nodes.len()).unwrap_or(i64::MAX));
        if !outcome.repartitioned.is_empty() || !outcome.violations.is_empty() {
            tracing::info!(
                pods = outcome.waiting.len(),
                gpus = outcome.repartitioned.len(),
                milliseconds = took.as_millis(),
                "planned GPUs for waiting pods"
            );
        }
        self.next = outcome.next;
        if !outcome.waiting.is_empty() {
            self.next = Some(self.next.map_or(WAITING_PODS_INTERVAL, |next| next.min(WAITING_PODS_INTERVAL)));
        }
        DemandResult::Planned(Box::new(outcome))
    }

    /// Counts the steps that nodes have reported since the last pass.
    fn count_steps(&mut self, observed: &Observed) {
        self.steps.retain(|name, _| observed.nodes.contains_key(name));
        for (name, node) in &observed.nodes {
            let Some(status) = node.object().and_then(|object| object.status.as_ref()) else { continue };
            let before = self.steps.get(name);
            if before == Some(&status.steps) {
                continue;
            }
            // A previous process has already counted the steps that were reported before this
            // process started.
            if let Some(before) = before {
                for step in status.steps.iter().filter(|step| !before.contains(step)) {
                    let result = match step.result.as_str() {
                        STEP_DONE => "done",
                        STEP_FAILED => "failed",
                        STEP_REFUSED => "refused",
                        _ => "waiting",
                    };
                    self.context.metrics.steps.get_or_create(&Outcome { result }).inc();
                }
            }
            self.steps.insert(name.clone(), status.steps.clone());
        }
    }

    /// Records how long nodes took to serve the specs that this process wrote.
    fn measure_repartitions(&mut self, observed: &Observed) {
        let plan_of = |name: &str| {
            let status = observed.nodes.get(name)?.object().and_then(|object| object.status.as_ref());
            Some(status.map_or("", |status| status.plan_id.as_str()))
        };
        for took in self.repartitions.take_completed(plan_of, self.started.elapsed()) {
            self.context.metrics.repartition_seconds.observe(took.as_secs_f64());
        }
    }

    /// Publishes Events about the plan on pods and nodes. Does not retry failed Events.
    async fn report_demand(&mut self, outcome: &demand::Outcome, observed: &Observed) {
        let events = self.publisher.events(outcome, observed, self.now());
        publish_all(&self.context.recorder, &self.context.claim, events).await;
        if self.publisher.has_unreported_wait() {
            self.next = Some(self.next.map_or(events::EVENT_CHECK_DELAY, |next| next.min(events::EVENT_CHECK_DELAY)));
        }
    }

    /// Writes the changed `GpuNode` specs, several at a time. Returns false if a write failed, or
    /// if this process no longer leads.
    async fn apply_specs(&mut self, plan: &plan::Plan, observed: &Observed, seen: Instant) -> bool {
        let api: Api<DeserializeGuard<GpuNode>> = Api::all(self.context.client.clone());
        let changes = apply::changes(plan, observed);
        let (api, claim) = (&api, &self.context.claim);
        let write = |change| async move {
            let may_write = claim.is_current();
            (change, if may_write { Some(with_timeout(apply::write(api, change)).await) } else { None })
        };
        let writes: Vec<_> = changes.iter().map(write).collect();
        let mut writes = pin!(futures::stream::iter(writes).buffer_unordered(MAX_IN_FLIGHT));
        let mut all = true;
        let mut written_any = false;
        while let Some((change, written)) = writes.next().await {
            let Some(written) = written else {
                // This process no longer leads.
                all = false;
                continue;
            };
            let done = written.is_some_and(|written| log_applied(change, &written, seen));
            if done {
                let object = observed.nodes.get(&change.node).and_then(crate::read::Node::object);
                self.history.record_write(
                    &change.node,
                    object.and_then(|object| object.metadata.generation),
                    &change.spec,
                    self.now(),
                );
                self.repartitions.record_write(&change.node, &change.spec.plan_id, self.started.elapsed());
                written_any = true;
            }
            self.count_write("GpuNode", done, &mut all);
        }
        if written_any {
            self.context.metrics.reaction_seconds.observe(seen.elapsed().as_secs_f64());
        }
        all
    }

    /// Writes the changed policy statuses, and publishes Events about changed conditions. Returns
    /// false if a write failed, or if this process no longer leads.
    async fn report_policies(&mut self, plan: &plan::Plan, observed: &Observed) -> bool {
        let api: Api<DeserializeGuard<SharingPolicy>> = Api::all(self.context.client.clone());
        let mut all = true;
        self.written.retain(|policy, _| observed.policies.contains_key(policy));
        for update in status::updates(plan, observed, &self.written, Timestamp::now()) {
            if !self.context.claim.is_current() {
                return false;
            }
            let written = with_timeout(status::write(&api, &update)).await;
            let done = written.is_some_and(|written| match written {
                Ok(()) => true,
                Err(error) => {
                    tracing::warn!(
                        policy = update.policy,
                        error = &error as &dyn std::error::Error,
                        "failed to update policy status"
                    );
                    false
                }
            });
            self.count_write("SharingPolicy", done, &mut all);
            if done {
                self.publish_policy_events(&update, observed).await;
                let written = WrittenStatus { from: update.from, status: update.status };
                self.written.insert(update.policy, written);
            }
        }
        all
    }

    /// Adds the taint to nodes that can serve no pod, and removes the taint from other nodes,
    /// several nodes at a time. Does nothing if tainting is disabled. Each node has its own
    /// retries, so a failed write does not fail the pass. Returns false if this process no longer
    /// leads.
    async fn update_taints(&mut self, observed: &Observed) -> bool {
        let now = self.now();
        let Some(taints) = &mut self.taints else { return true };
        let (changes, next) = taints.update(observed, now);
        self.next = self.next.into_iter().chain(next).min();
        let results = taint::write_all(&self.context.client, &self.context.claim, &changes).await;
        let mut leads = true;
        for (change, written) in results {
            let Some(written) = written else {
                leads = false;
                continue;
            };
            let done = written == TaintWriteResult::Done;
            self.count_write("Node", done, &mut true);
            let now = self.now();
            let retry = self.taints.as_mut().and_then(|taints| taints.record_write(&change.node, done, now));
            self.next = self.next.into_iter().chain(retry).min();
        }
        leads
    }

    /// Publishes Events about a policy's changed conditions. Does not retry failed Events.
    async fn publish_policy_events(&self, update: &status::StatusUpdate, observed: &Observed) {
        let Some(Ok(policy)) = observed.policies.get(&update.policy) else { return };
        let regarding: ObjectReference = policy.object_ref(&());
        for event in update.changed.iter().filter_map(status::condition_event) {
            tracing::info!(
                policy = policy.name_any(),
                reason = event.reason,
                note = event.note,
                "policy condition changed"
            );
            publish(&self.context.recorder, &event, &regarding).await;
        }
    }

    /// Counts a write in the metrics. Sets `all` to false if the write failed.
    fn count_write(&self, kind: &'static str, done: bool, all: &mut bool) {
        let result = if done { "ok" } else { "failed" };
        self.context.metrics.writes.get_or_create(&WriteLabels { kind, result }).inc();
        *all &= done;
    }

    /// Updates the gauges of policies and nodes.
    fn set_gauges(&self, observed: &Observed, plan: &plan::Plan) {
        let size = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        let malformed_policies = observed.policies.values().filter(|policy| policy.is_err()).count();
        let nodes = observed.nodes.values();
        let malformed_nodes = nodes.filter(|node| node.has_gpu_node() && node.object().is_none()).count();
        self.context
            .metrics
            .malformed
            .get_or_create(&KindLabel { kind: "SharingPolicy" })
            .set(size(malformed_policies));
        self.context.metrics.malformed.get_or_create(&KindLabel { kind: "GpuNode" }).set(size(malformed_nodes));
        let in_force = plan.policies.values().filter(|report| report.invalid.is_none()).count();
        self.context.metrics.policies.set(size(in_force));
        self.context.metrics.nodes.set(size(plan.nodes.len()));
    }
}

/// Logs the result of a write. Returns whether the write succeeded.
fn log_applied(change: &apply::GpuNodeChange, written: &Result<(), apply::Error>, seen: Instant) -> bool {
    match written {
        Ok(()) => {
            tracing::info!(
                node = change.node,
                plan = change.spec.plan_id,
                gpus = change.spec.gpus.len(),
                created = change.create,
                milliseconds = seen.elapsed().as_millis(),
                "applied GpuNode spec"
            );
        }
        Err(error) => {
            let error = error as &dyn std::error::Error;
            tracing::warn!(node = change.node, error, "failed to apply GpuNode spec");
        }
    }
    written.is_ok()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use cleave_api::GpuNodeSpec;
    use cleave_api::gpunode::{GpuNodeStatus, GpuStatus, Health};
    use cleave_api::names::HEALTH_LOST;
    use futures::FutureExt as _;
    use kube::Client;
    use kube::client::Body;
    use kube::runtime::events::{Recorder, Reporter};
    use kube::runtime::reflector::{self, Store};
    use tokio_util::sync::CancellationToken;
    use tower_test::mock::Handle;

    use super::*;
    use crate::leader::LeaseGuard;
    use crate::metrics::Metrics;
    use crate::read::{Agent, Node, Stores};

    fn mock_client() -> (Client, Handle<http::Request<Body>, http::Response<Body>>) {
        let (service, server) = tower_test::mock::pair();
        (Client::new(service, "default"), server)
    }

    fn empty_store<K: kube::Resource<DynamicType = ()> + Clone + 'static>() -> Store<K> {
        reflector::store().0
    }

    /// Returns the controller of an empty cluster, and the receiver of the pods' reasons to wait.
    fn controller_of_empty_cluster(
        client: Client,
    ) -> (GpuController, watch::Receiver<Arc<BTreeMap<String, WaitingPod>>>) {
        let stores = Stores {
            policies: empty_store(),
            gpu_nodes: empty_store(),
            nodes: empty_store(),
            agents: empty_store(),
            pods: crate::pod_store::new_store().0,
            volume_claims: empty_store(),
            volumes: empty_store(),
            budgets: empty_store(),
            namespaces: empty_store(),
            quotas: empty_store(),
            has_no_quotas: Arc::default(),
        };
        let context = Context {
            recorder: Recorder::new(client.clone(), Reporter { controller: "test".to_owned(), instance: None }),
            client,
            stores,
            claim: LeaseGuard::of_leader(),
            metrics: Metrics::default(),
            listed: Arc::new(AtomicBool::new(true)),
            stop: CancellationToken::new(),
        };
        let waits = WaitingPod { reason: Reason::Scheduler, message: "On n1".to_owned() };
        let (demand, gated) = watch::channel(Arc::new(BTreeMap::from([("team/p".to_owned(), waits)])));
        let unplanned = watch::channel(Arc::default()).1;
        let inputs = ControllerInputs { context, wakes: Wakers::default(), demand, unplanned, taint: false };
        (GpuController::new(inputs), gated)
    }

    #[test]
    fn pods_that_quotas_keep_waiting_are_not_planned_for() {
        let claimant = |name: &str, node: Option<&str>| {
            let pod = cleave_plan::snapshot::Pod { name: name.to_owned(), ..Default::default() };
            crate::pods::Claimant { pod, node: node.map(str::to_owned), ..Default::default() }
        };
        let pods = vec![claimant("a/held", None), claimant("a/next", None), claimant("a/runs", Some("n1"))];
        let mut observed = Observed { pods, ..Observed::default() };
        leave_out(&mut observed, &["a/held".to_owned(), "a/runs".to_owned()].into());
        let left: Vec<&str> = observed.pods.iter().map(|claimant| claimant.pod.name.as_str()).collect();
        assert_eq!(left, ["a/next", "a/runs"]);
    }

    #[tokio::test]
    async fn without_an_on_demand_policy_no_pod_waits_for_a_plan() {
        let (mut passes, gated) = controller_of_empty_cluster(mock_client().0);
        let metrics = passes.context.metrics.clone();
        metrics.nodes_excluded.set(3);
        metrics.fragmentation.set(0.5);
        passes.run_pass(Instant::now()).await.unwrap();
        assert!(gated.borrow().is_empty(), "the gatekeeper must not act on the plan of a deleted policy");
        assert!(passes.wakes.placement.notified().now_or_never().is_some(), "the placement controller is woken");
        assert_eq!((metrics.nodes_excluded.get(), metrics.fragmentation.get()), (0, 0.0));
        passes.run_pass(Instant::now()).await.unwrap();
        assert!(passes.wakes.placement.notified().now_or_never().is_none(), "nothing has changed");
    }

    /// Returns a node whose only GPU is lost, so that the node gets a taint.
    fn lost_node() -> Node {
        let health = Health { class: HEALTH_LOST.to_owned(), ..Health::default() };
        let gpus = vec![GpuStatus { health, ..GpuStatus::default() }];
        let status = GpuNodeStatus { agent_version: "1".to_owned(), gpus, ..GpuNodeStatus::default() };
        let object = GpuNode { status: Some(status), ..GpuNode::new("n", GpuNodeSpec::default()) };
        let gpu_node = Some(Arc::new(DeserializeGuard(Ok(object))));
        Node { agent: Some(Agent { ready: true }), gpu_node, ..Node::default() }
    }

    #[tokio::test]
    async fn a_refused_taint_does_not_delay_the_next_pass() {
        let (client, mut server) = mock_client();
        let (mut passes, _gated) = controller_of_empty_cluster(client);
        passes.taints = Some(Taints::default());
        let nodes = BTreeMap::from([("n".to_owned(), lost_node())]);
        let observed = Observed { policies: BTreeMap::new(), nodes, pods: Vec::new() };
        let refuse = async {
            let (_, reply) = server.next_request().await.unwrap();
            let body = serde_json::json!({"kind": "Status", "status": "Failure", "message": "no", "code": 403});
            let response = http::Response::builder().status(403);
            reply.send_response(response.body(Body::from(body.to_string().into_bytes())).unwrap());
        };
        let (leads, ()) = tokio::join!(passes.update_taints(&observed), refuse);
        assert!(leads && passes.next.is_some_and(|next| next <= Duration::from_secs(1)), "{:?}", passes.next);
        assert!(passes.update_taints(&observed).now_or_never().is_some(), "no request is sent before the delay ends");
    }

    #[tokio::test]
    async fn a_pass_drops_all_remembered_state_while_another_process_leads() {
        let (mut passes, _gated) = controller_of_empty_cluster(mock_client().0);
        passes.taints = Some(Taints::default());
        let policy = serde_json::json!({"metadata": {"name": "p"}, "spec": {"mode": "Whole"}});
        let policy: SharingPolicy = serde_json::from_value(policy).unwrap();
        let gpus = vec![GpuStatus::default()];
        let status = GpuNodeStatus { agent_version: "1".to_owned(), gpus, ..GpuNodeStatus::default() };
        let object = GpuNode { status: Some(status), ..GpuNode::new("n", GpuNodeSpec::default()) };
        let node = Node { gpu_node: Some(Arc::new(DeserializeGuard(Ok(object)))), ..Node::default() };
        let observed = Observed {
            policies: BTreeMap::from([("p".to_owned(), Ok(policy))]),
            nodes: BTreeMap::from([("n".to_owned(), node)]),
            pods: Vec::new(),
        };
        passes.staging.withhold_changes(&mut plan::plan(&observed), &observed, Duration::ZERO);
        passes.history.record_write("n", None, &GpuNodeSpec::default(), Duration::ZERO);
        let (changes, next) = passes.taints.as_mut().unwrap().update(&observed, Duration::ZERO);
        assert!(changes.is_empty() && next.is_some(), "the node's agent is not ready");
        let written = WrittenStatus { from: None, status: cleave_api::sharingpolicy::SharingPolicyStatus::default() };
        passes.written.insert("p".to_owned(), written);
        passes
            .quiet
            .check_due(["team/p"].into_iter(), (Some(Duration::from_secs(1)), None), Duration::ZERO)
            .unwrap_err();
        passes.count_steps(&observed);
        let memory = |passes: &GpuController| {
            let GpuController { staging, history, taints, written, quiet, steps, .. } = passes;
            [
                format!("{staging:?}"),
                format!("{history:?}"),
                format!("{taints:?}"),
                format!("{written:?}"),
                format!("{quiet:?}"),
                format!("{steps:?}"),
            ]
        };
        let before = memory(&passes);
        passes.context.claim = LeaseGuard::of_standby();
        passes.run_pass(Instant::now()).await.unwrap();
        let (mut new, _gated) = super::tests::controller_of_empty_cluster(mock_client().0);
        new.taints = Some(Taints::default());
        assert_eq!(memory(&passes), memory(&new));
        assert!(before.iter().zip(memory(&new)).all(|(before, new)| *before != new), "{before:?}");
    }

    /// Answers requests in two groups. Answers each group only after [`MAX_IN_FLIGHT`] requests
    /// have arrived.
    async fn answer_in_groups(server: &mut Handle<http::Request<Body>, http::Response<Body>>) {
        for _ in 0..2 {
            let mut group = Vec::new();
            for _ in 0..MAX_IN_FLIGHT {
                group.push(server.next_request().await.unwrap());
            }
            for (request, reply) in group {
                let name = request.uri().path().rsplit('/').next().unwrap().to_owned();
                let body = serde_json::json!({"metadata": {"name": name}, "spec": {}}).to_string();
                reply.send_response(http::Response::new(Body::from(body.into_bytes())));
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn taints_of_many_nodes_are_written_at_the_same_time() {
        let (client, mut server) = mock_client();
        let (mut passes, _gated) = controller_of_empty_cluster(client);
        passes.taints = Some(Taints::default());
        let nodes = (0..2 * MAX_IN_FLIGHT).map(|index| (format!("n{index}"), lost_node())).collect();
        let observed = Observed { policies: BTreeMap::new(), nodes, pods: Vec::new() };
        let (leads, ()) = tokio::join!(passes.update_taints(&observed), answer_in_groups(&mut server));
        assert_eq!((leads, passes.next), (true, None), "all writes succeed");
    }

    /// The API server answers only after all writes of a group have arrived, so sequential writes
    /// would time out.
    #[tokio::test(start_paused = true)]
    async fn specs_of_many_nodes_are_written_at_the_same_time() {
        let (client, mut server) = mock_client();
        let (mut passes, _gated) = controller_of_empty_cluster(client);
        let names = || (0..2 * MAX_IN_FLIGHT).map(|index| format!("n{index}"));
        let nodes = names().map(|name| (name, GpuNodeSpec::default())).collect();
        let plan = plan::Plan { nodes, policies: BTreeMap::new(), demand: BTreeMap::new() };
        let nodes = names().map(|name| (name, Node::default())).collect();
        let observed = Observed { policies: BTreeMap::new(), nodes, pods: Vec::new() };
        let (all_written, ()) =
            tokio::join!(passes.apply_specs(&plan, &observed, Instant::now()), answer_in_groups(&mut server));
        assert!(all_written);
    }
}
