//! The passes: read the cluster, plan every GPU by the policies and the pods, write, and report.
//!
//! The steps are in [`crate::policies`]. This task decides when they run, and makes their writes
//! while this process holds the lease.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use cleave_api::gpunode::StepStatus;
use cleave_api::names::{STEP_DONE, STEP_FAILED, STEP_REFUSED};
use cleave_api::{GpuNode, SharingPolicy};
use futures::FutureExt as _;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::core::DeserializeGuard;
use kube::runtime::events::Recorder;
use kube::{Api, Client, Resource as _, ResourceExt};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::events::{self, EventPublisher};
use crate::leader::LeaseGuard;
use crate::metrics::{self, Kind, Metrics, Outcome, Write};
use crate::policies::demand::{self, Reason, Waiting};
use crate::policies::pace::{Pace, QuietPeriod};
use crate::policies::snapshot::History;
use crate::policies::status::{WrittenStatus, WrittenStatuses};
use crate::policies::taint::{self, Taints};
use crate::policies::{apply, plan, status};
use crate::read::{Observed, Stores};
use crate::watches::Wakes;
use crate::write::{publish, within};

/// How often is planned while pods wait for room: what other pods give back (CPU, memory) is not
/// told on its own.
const WAITING: Duration = Duration::from_secs(5);
/// After how long a pass that failed is repeated, at first and at most.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// What the task is made of.
pub(crate) struct Parts {
    pub(crate) client: Client,
    pub(crate) stores: Stores,
    pub(crate) claim: LeaseGuard,
    pub(crate) metrics: Metrics,
    pub(crate) recorder: Recorder,
    pub(crate) wakes: Wakes,
    /// Set once all objects are listed.
    pub(crate) listed: Arc<AtomicBool>,
    /// What pods wait for, for the gate.
    pub(crate) demand: watch::Sender<Arc<BTreeMap<String, Waiting>>>,
    /// Whether nodes that can serve no pod get a taint.
    pub(crate) taint: bool,
    pub(crate) stop: CancellationToken,
}

/// The task that reads, plans and writes.
pub(crate) struct Passes {
    parts: Parts,
    written: WrittenStatuses,
    started: Instant,
    history: History,
    quiet: QuietPeriod,
    publisher: EventPublisher,
    /// Steps of each node as last counted.
    steps: BTreeMap<String, Vec<StepStatus>>,
    /// Which nodes are out of service, where these are to be tainted.
    taints: Option<Taints>,
    /// When to look again though nothing changes.
    next: Option<Duration>,
}

/// Writes of a pass failed; each was told where it happened.
#[derive(Debug)]
struct Failed;

impl Passes {
    pub(crate) fn new(parts: Parts) -> Self {
        let taints = parts.taint.then(Taints::default);
        Self {
            parts,
            written: WrittenStatuses::new(),
            started: Instant::now(),
            history: History::default(),
            quiet: QuietPeriod::default(),
            publisher: EventPublisher::default(),
            steps: BTreeMap::new(),
            taints,
            next: None,
        }
    }

    pub(crate) async fn run(mut self) -> Result<()> {
        let stop = self.parts.stop.clone();
        // A pass ends before the process does: what it writes is whole, and it asks for the claim
        // before each write.
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            ready = self.wait_for_lists() => ready?,
        }
        let mut turned = self.parts.claim.clone();
        let mut retry: Option<Duration> = None;
        let mut pace = Pace::default();
        loop {
            let pause = retry.into_iter().chain(self.next).min();
            let mut more = false;
            let mut seen = None;
            // Cancel-safe: `notified` keeps its permit when dropped, `turned` reads a watch
            // channel, the others are a token and a timer.
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                () = self.parts.wakes.passes.notified() => {
                    seen = Some(Instant::now());
                    tokio::time::sleep(pace.wait(self.now())).await;
                    // What came meanwhile is in this pass.
                    more = self.parts.wakes.passes.notified().now_or_never().is_some();
                }
                () = turned.changed() => {}
                () = async { tokio::time::sleep(pause.unwrap_or_default()).await }, if pause.is_some() => {}
            }
            retry = match self.pass(seen.unwrap_or_else(Instant::now)).await {
                Ok(()) => None,
                Err(Failed) => Some(retry.map_or(RETRY.0, |pause| (pause * 2).min(RETRY.1))),
            };
            pace.planned(self.now(), more);
        }
    }

    /// Since the process started.
    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    async fn wait_for_lists(&self) -> Result<()> {
        self.parts.stores.wait_until_ready().await.context("listing the cluster's objects")?;
        self.parts.listed.store(true, Ordering::Release);
        tracing::info!("all objects are listed");
        Ok(())
    }

    /// Reads, plans and writes once; does nothing where another leads. `seen` is when the first
    /// change was told.
    async fn pass(&mut self, seen: Instant) -> Result<(), Failed> {
        self.next = None;
        if !self.parts.claim.is_current() {
            return Ok(());
        }
        let now = self.now();
        let mut observed = self.parts.stores.observe();
        self.count_steps(&observed);
        self.history.restore_writes(&mut observed, now);
        let mut plan = plan::plan(&observed);
        self.parts.wakes.pods_decide(!plan.demand.is_empty());
        let outcome = self.plan_demand(&mut plan, &observed, now);
        self.measure(&observed, &plan);
        let nodes = self.apply(&plan, &observed, seen).await;
        if let Some(outcome) = &outcome {
            self.parts.demand.send_if_modified(|told| {
                let news = **told != outcome.waiting;
                if news {
                    *told = Arc::new(outcome.waiting.clone());
                }
                news
            });
            self.tell_of(outcome, &observed).await;
        }
        let policies = self.tell(&plan, &observed).await;
        let tainted = self.taint(&observed).await;
        let all = nodes && policies && tainted;
        let result = if all { "ok" } else { "failed" };
        self.parts.metrics.passes.get_or_create(&Outcome { result }).inc();
        if all { Ok(()) } else { Err(Failed) }
    }

    /// Plans the GPUs that pods decide about; nothing while pods are gathered.
    fn plan_demand(&mut self, plan: &mut plan::Plan, observed: &Observed, now: Duration) -> Option<demand::Outcome> {
        let rules = || plan.demand.values().flat_map(BTreeMap::values).map(|by_demand| by_demand.gathering);
        let idle = rules().filter_map(|rule| rule.idle).min();
        let timeout = rules().filter_map(|rule| rule.timeout).min();
        let waiting = observed.pods.iter().filter(|claimant| claimant.node.is_none());
        if let Err(wait) = self.quiet.due(waiting.map(|claimant| claimant.pod.name.as_str()), (idle, timeout), now) {
            self.next = Some(wait);
            return None;
        }
        let started = Instant::now();
        let outcome = demand::overlay(plan, observed, &mut self.history, now);
        let took = started.elapsed();
        let planned = outcome.planned.as_ref()?;
        self.parts.metrics.plan_seconds.observe(took.as_secs_f64());
        let result = match (outcome.violations.as_slice(), planned.plan.changed) {
            ([], true) => "changed",
            ([], false) => "unchanged",
            (some, _) => {
                let violations: Vec<String> = some.iter().take(8).map(ToString::to_string).collect();
                tracing::error!(violations = violations.join("; "), "the plan breaks rules and is not acted on");
                "refused"
            }
        };
        self.parts.metrics.plans.get_or_create(&Outcome { result }).inc();
        for reason in Reason::ALL {
            let count = outcome.waiting.values().filter(|waiting| waiting.reason == reason).count();
            let label = metrics::Reason { reason: reason.as_str() };
            self.parts.metrics.pods_waiting.get_or_create(&label).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
        self.parts.metrics.fragmentation.set(f64::from(outcome.fragmentation) / 1000.0);
        self.parts.metrics.left_out.set(i64::try_from(outcome.excluded_nodes.len()).unwrap_or(i64::MAX));
        if !outcome.repartitioned.is_empty() || !outcome.violations.is_empty() {
            tracing::info!(
                pods = outcome.waiting.len(),
                gpus = outcome.repartitioned.len(),
                milliseconds = took.as_millis(),
                "planned for pods"
            );
        }
        self.next = outcome.next;
        if !outcome.waiting.is_empty() {
            self.next = Some(self.next.map_or(WAITING, |next| next.min(WAITING)));
        }
        Some(outcome)
    }

    /// What nodes did, once each.
    fn count_steps(&mut self, observed: &Observed) {
        self.steps.retain(|name, _| observed.nodes.contains_key(name));
        for (name, node) in &observed.nodes {
            let Some(status) = node.object().and_then(|object| object.status.as_ref()) else { continue };
            let before = self.steps.get(name);
            if before == Some(&status.steps) {
                continue;
            }
            // What a process that starts finds was counted by the one before.
            if let Some(before) = before {
                for step in status.steps.iter().filter(|step| !before.contains(step)) {
                    let result = match step.result.as_str() {
                        STEP_DONE => "done",
                        STEP_FAILED => "failed",
                        STEP_REFUSED => "refused",
                        _ => "waiting",
                    };
                    self.parts.metrics.steps.get_or_create(&Outcome { result }).inc();
                }
            }
            self.steps.insert(name.clone(), status.steps.clone());
        }
    }

    /// Tells pods and nodes what came of the plan. Events are a courtesy: one that cannot be
    /// written is not tried again.
    async fn tell_of(&mut self, outcome: &demand::Outcome, observed: &Observed) {
        for (regarding, event) in self.publisher.events(outcome, observed, self.now()) {
            if !self.parts.claim.is_current() {
                return;
            }
            publish(&self.parts.recorder, &event, &regarding).await;
        }
        if self.publisher.is_waiting() {
            self.next = Some(self.next.map_or(events::LOOK_AGAIN, |next| next.min(events::LOOK_AGAIN)));
        }
    }

    /// Writes the nodes that differ; false where one could not be written.
    async fn apply(&mut self, plan: &plan::Plan, observed: &Observed, seen: Instant) -> bool {
        let api: Api<DeserializeGuard<GpuNode>> = Api::all(self.parts.client.clone());
        let mut all = true;
        let mut told = false;
        for change in apply::changes(plan, observed) {
            if !self.parts.claim.is_current() {
                return false;
            }
            let written = within(apply::write(&api, &change)).await;
            let done = written.is_some_and(|written| match written {
                Ok(()) => {
                    tracing::info!(
                        node = change.node,
                        plan = change.spec.plan_id,
                        gpus = change.spec.gpus.len(),
                        created = change.create,
                        milliseconds = seen.elapsed().as_millis(),
                        "planned"
                    );
                    true
                }
                Err(error) => {
                    tracing::warn!(node = change.node, error = &error as &dyn std::error::Error, "not planned");
                    false
                }
            });
            if done {
                let object = observed.nodes.get(&change.node).and_then(crate::read::Node::object);
                self.history.wrote(
                    &change.node,
                    object.and_then(|object| object.metadata.generation),
                    &change.spec,
                    self.now(),
                );
                told = true;
            }
            self.count("GpuNode", done, &mut all);
        }
        if told {
            self.parts.metrics.reaction_seconds.observe(seen.elapsed().as_secs_f64());
        }
        all
    }

    /// Writes the statuses that differ, and tells of what turned; false where one could not be
    /// written.
    async fn tell(&mut self, plan: &plan::Plan, observed: &Observed) -> bool {
        let api: Api<DeserializeGuard<SharingPolicy>> = Api::all(self.parts.client.clone());
        let mut all = true;
        self.written.retain(|policy, _| observed.policies.contains_key(policy));
        for update in status::updates(plan, observed, &self.written, Timestamp::now()) {
            if !self.parts.claim.is_current() {
                return false;
            }
            let written = within(status::write(&api, &update)).await;
            let done = written.is_some_and(|written| match written {
                Ok(()) => true,
                Err(error) => {
                    tracing::warn!(policy = update.policy, error = &error as &dyn std::error::Error, "status not told");
                    false
                }
            });
            self.count("SharingPolicy", done, &mut all);
            if done {
                self.publish(&update, observed).await;
                let written = WrittenStatus { from: update.from, status: update.status };
                self.written.insert(update.policy, written);
            }
        }
        all
    }

    /// Taints the nodes that can serve nobody, where that is asked for; false where one could not
    /// be written.
    async fn taint(&mut self, observed: &Observed) -> bool {
        let now = self.now();
        let Some(taints) = &mut self.taints else { return true };
        let (changes, next) = taints.update(observed, now);
        self.next = self.next.into_iter().chain(next).min();
        let mut all = true;
        for change in changes {
            if !self.parts.claim.is_current() {
                return false;
            }
            let taint::Change { node, why, .. } = &change;
            let done = match within(taint::write(&self.parts.client, &change)).await {
                Some(Ok(())) => {
                    tracing::info!(node, why, tainted = why.is_some(), "the node's taint was written");
                    true
                }
                // It has changed since it was looked at.
                Some(Err(kube::Error::Api(status))) if matches!(status.code, 409 | 422) => {
                    tracing::debug!(node, message = status.message, "the node's taint is looked at again");
                    false
                }
                Some(Err(error)) => {
                    tracing::warn!(
                        node,
                        why,
                        error = &error as &dyn std::error::Error,
                        "the node's taint was not written"
                    );
                    false
                }
                None => false,
            };
            self.count("Node", done, &mut all);
        }
        all
    }

    /// Events are a courtesy: one that cannot be written is not tried again.
    async fn publish(&self, update: &status::Update, observed: &Observed) {
        let Some(Ok(policy)) = observed.policies.get(&update.policy) else { return };
        let regarding: ObjectReference = policy.object_ref(&());
        for event in update.changed.iter().filter_map(status::event) {
            tracing::info!(policy = policy.name_any(), reason = event.reason, note = event.note, "policy turned");
            publish(&self.parts.recorder, &event, &regarding).await;
        }
    }

    fn count(&self, kind: &'static str, done: bool, all: &mut bool) {
        let result = if done { "ok" } else { "failed" };
        self.parts.metrics.writes.get_or_create(&Write { kind, result }).inc();
        *all &= done;
    }

    fn measure(&self, observed: &Observed, plan: &plan::Plan) {
        let size = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        let malformed_policies = observed.policies.values().filter(|policy| policy.is_err()).count();
        let nodes = observed.nodes.values();
        let malformed_nodes = nodes.filter(|node| node.has_object() && node.object().is_none()).count();
        self.parts.metrics.malformed.get_or_create(&Kind { kind: "SharingPolicy" }).set(size(malformed_policies));
        self.parts.metrics.malformed.get_or_create(&Kind { kind: "GpuNode" }).set(size(malformed_nodes));
        let in_force = plan.policies.values().filter(|report| report.invalid.is_none()).count();
        self.parts.metrics.policies.set(size(in_force));
        self.parts.metrics.nodes.set(size(plan.nodes.len()));
    }
}
