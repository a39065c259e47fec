//! The task that opens gates, apart from the passes: a pod that waits is not to wait for nodes to
//! be written.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use cleave_api::names::CONDITION_PLACED;
use futures::StreamExt as _;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::Recorder;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::cluster::{Cluster, Now};
use super::gatekeeper::Gatekeeper;
use super::stranded::{Advice, Recreation, Rescue};
use super::turn::{Eviction, Opening, Turn, Why};
use crate::events::{self, EventPublisher};
use crate::evict::{self, Evicted};
use crate::leader::LeaseGuard;
use crate::metrics::{Metrics, Outcome, Reason};
use crate::pod_condition;
use crate::pods::PodCondition;
use crate::policies::demand::Waiting;
use crate::read::Stores;
use crate::rollout::{self, Deleted, Step, Watched};
use crate::write::{WRITE, publish};

/// How long the first change waits for others: pods come in bursts.
const GATHER: Duration = Duration::from_millis(5);
/// Patches at once.
const WRITERS: usize = 16;
/// After how long what could not be written is looked at again, though nothing has changed.
const RETRY: Duration = Duration::from_secs(1);

/// What the task is made of.
pub(crate) struct Parts {
    pub(crate) client: Client,
    pub(crate) stores: Stores,
    pub(crate) claim: LeaseGuard,
    pub(crate) metrics: Metrics,
    pub(crate) recorder: Recorder,
    pub(crate) dirty: Arc<Notify>,
    /// What pods wait for that GPUs are cut for.
    pub(crate) demand: watch::Receiver<Arc<BTreeMap<String, Waiting>>>,
    /// MPS hosts, where they are to be replaced.
    pub(crate) hosts: Option<Watched>,
    /// How long a pod must be unplaceable before it is released as unschedulable.
    pub(crate) unschedulable_after: Duration,
    pub(crate) stop: CancellationToken,
}

/// Why a pod's patch was not written.
enum Failure {
    /// It may be the next time.
    Passing,
    /// The API server refused it, in these words.
    Refused(String),
}

/// The time of day at one moment, counted on by a clock that nobody sets. What is held is held
/// until a time, and one step of the node's clock would end all of it, or none for as long as the
/// step is.
#[derive(Debug, Clone, Copy)]
struct Epoch {
    at: Timestamp,
    since: Instant,
}

impl Epoch {
    /// It is `at` at `since`.
    const fn new(at: Timestamp, since: Instant) -> Self {
        Self { at, since }
    }

    /// Seconds of the Unix epoch at `now`.
    fn seconds(self, now: Instant) -> u64 {
        u64::try_from(self.at.as_second())
            .unwrap_or(0)
            .saturating_add(now.saturating_duration_since(self.since).as_secs())
    }
}

/// The task.
pub(crate) struct Gate {
    parts: Parts,
    keeper: Gatekeeper,
    publisher: EventPublisher,
    started: Instant,
    epoch: Epoch,
}

impl Gate {
    pub(crate) fn new(parts: Parts) -> Self {
        let started = Instant::now();
        let epoch = Epoch::new(Timestamp::now(), started);
        let keeper = Gatekeeper::new(parts.unschedulable_after);
        Self { parts, keeper, publisher: EventPublisher::default(), started, epoch }
    }

    /// Opens gates until `stop`.
    pub(crate) async fn run(mut self) -> Result<()> {
        let stop = self.parts.stop.clone();
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            ready = self.parts.stores.wait_until_ready() => ready.context("listing the cluster's objects")?,
        }
        let mut turned = self.parts.claim.clone();
        let mut pause = None;
        loop {
            // Cancel-safe: `notified` keeps its permit when dropped, the others are watch channels,
            // a token and a timer.
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                () = self.parts.dirty.notified() => tokio::time::sleep(GATHER).await,
                changed = self.parts.demand.changed() => if changed.is_err() { return Ok(()) },
                () = turned.changed() => {}
                () = async { tokio::time::sleep(pause.unwrap_or_default()).await }, if pause.is_some() => {}
            }
            pause = self.look().await;
        }
    }

    /// Looks once, and says when to look again.
    async fn look(&mut self) -> Option<Duration> {
        if !self.parts.claim.is_current() {
            self.keeper.reset();
            // Whoever leads next goes by the time of day as it is then.
            self.epoch = Epoch::new(Timestamp::now(), Instant::now());
            return None;
        }
        let stores = &self.parts.stores;
        let cluster = Cluster {
            pods: stores.pods.state(),
            nodes: stores.nodes.state(),
            gpu_nodes: stores.gpu_nodes.state(),
            agents: stores.agents.state(),
            hosts: self.parts.hosts.as_ref().and_then(Watched::state),
            volume_claims: stores.volume_claims.state(),
            volumes: stores.volumes.state(),
            namespaces: stores.namespaces.state(),
        };
        let up = self.started.elapsed();
        let epoch = self.epoch.seconds(Instant::now());
        let demand = Arc::clone(&self.parts.demand.borrow_and_update());
        let turn = self.keeper.look(&cluster, &demand, Now { up, epoch });
        self.measure(&turn);
        let failed = self.open(&turn.openings).await;
        for (pod, failure) in &failed {
            match failure {
                Failure::Passing => self.keeper.failed(pod),
                Failure::Refused(why) => self.keeper.refused(pod, why, self.started.elapsed()),
            }
        }
        let evicted = self.evict(&turn.evictions, up).await;
        self.rescue(&turn.rescue).await;
        let none_stranded = turn.rescue.recreate.is_empty() && turn.rescue.advise.is_empty();
        if let Some(step) = &turn.rollout {
            self.roll_out(step).await;
        }
        self.tell(&turn, &cluster, &demand, up).await;
        if turn.more {
            self.parts.dirty.notify_one();
        }
        let again = (!failed.is_empty() || !evicted || !none_stranded).then_some(RETRY);
        let told = self.publisher.is_waiting().then_some(events::LOOK_AGAIN);
        turn.next.into_iter().chain(again).chain(told).min()
    }

    /// Writes the patches, and says whose could not be written, and why.
    async fn open(&self, openings: &[Opening]) -> BTreeMap<String, Failure> {
        let writes: Vec<_> = openings.iter().map(|opening| self.release(opening)).collect();
        futures::stream::iter(writes).buffer_unordered(WRITERS).filter_map(std::future::ready).collect().await
    }

    /// Writes one, and says whose it is if it could not be written.
    async fn release(&self, opening: &Opening) -> Option<(String, Failure)> {
        let failure = self.write(opening).await.err();
        let result = if failure.is_none() { opening.why.as_str() } else { "failed" };
        self.parts.metrics.gates_opened.get_or_create(&Outcome { result }).inc();
        if failure.is_none() {
            self.parts.metrics.gate_seconds.observe(opening.waited.as_secs_f64());
        }
        failure.map(|failure| (opening.pod.clone(), failure))
    }

    async fn write(&self, opening: &Opening) -> Result<(), Failure> {
        if !self.parts.claim.is_current() {
            return Err(Failure::Passing);
        }
        let Some((namespace, name)) = opening.pod.split_once('/') else { return Err(Failure::Passing) };
        let request =
            http::Request::patch(format!("/api/v1/namespaces/{namespace}/pods/{name}?fieldManager=cleave-operator"))
                .header(http::header::CONTENT_TYPE, "application/json-patch+json")
                .body(opening.patch.to_string().into_bytes());
        let request = match request {
            Ok(request) => request,
            Err(error) => {
                tracing::error!(pod = opening.pod, error = &error as &dyn std::error::Error, "no request");
                return Err(Failure::Passing);
            }
        };
        match tokio::time::timeout(WRITE, self.parts.client.request_text(request)).await {
            Ok(Ok(_)) => {
                tracing::debug!(pod = opening.pod, why = opening.why.as_str(), "let through");
                Ok(())
            }
            // The pod has changed, or is gone: the next look sees it as it is.
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => {
                tracing::debug!(pod = opening.pod, code = status.code, message = status.message, "not let through");
                Err(Failure::Passing)
            }
            // That a pod has changed can be told so too.
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 400 | 403 | 413 | 422) => {
                tracing::debug!(pod = opening.pod, code = status.code, message = status.message, "not let through");
                Err(Failure::Refused(status.message.clone()))
            }
            Ok(Err(error)) => {
                tracing::warn!(pod = opening.pod, error = &error as &dyn std::error::Error, "not let through");
                Err(Failure::Passing)
            }
            Err(_) => {
                tracing::warn!(pod = opening.pod, "the API server did not answer within {} s", WRITE.as_secs());
                Err(Failure::Passing)
            }
        }
    }

    /// Evicts pods, as far as their disruption budgets let it. Says whether each was asked.
    async fn evict(&mut self, evictions: &[Eviction], up: Duration) -> bool {
        let mut all = true;
        for Eviction { pod, uid, by } in evictions {
            if !self.parts.claim.is_current() {
                return true;
            }
            let evicted = evict::evict(&self.parts.client, pod, uid).await;
            match &evicted {
                Evicted::Done => {
                    tracing::info!(pod, by, "evicted for a pod of higher priority");
                    let told = (events::of_pod(pod, uid), events::preempted(by));
                    let _ = tokio::time::timeout(WRITE, self.parts.recorder.publish(&told.1, &told.0)).await;
                }
                Evicted::Protected(message) => {
                    tracing::info!(pod, by, message, "a disruption budget protects it");
                    self.keeper.protect(pod, up);
                    // Somebody else may do.
                    self.parts.dirty.notify_one();
                }
                Evicted::Gone => {}
                Evicted::Failed(error) => {
                    tracing::warn!(pod, by, error, "not evicted");
                    all = false;
                }
            }
            self.parts.metrics.evictions.get_or_create(&Outcome { result: evicted.as_str() }).inc();
        }
        all
    }

    /// Has stranded pods re-created, and tells those that nobody re-creates. What fails is decided
    /// again at a later look.
    async fn rescue(&mut self, rescue: &Rescue) {
        let Parts { client, claim, metrics, recorder, .. } = &self.parts;
        for Recreation { pod, uid, version, message } in &rescue.recreate {
            if !claim.is_current() {
                return;
            }
            let evicted = evict::evict_unchanged(client, pod, uid, version).await;
            metrics.recreated.get_or_create(&Outcome { result: evicted.as_str() }).inc();
            match evicted {
                Evicted::Done => {
                    tracing::info!(pod, message, "evicted a stranded pod");
                    let publish = (events::of_pod(pod, uid), events::stranded(message));
                    let _ = tokio::time::timeout(WRITE, recorder.publish(&publish.1, &publish.0)).await;
                }
                Evicted::Gone => {}
                Evicted::Protected(why) => {
                    tracing::info!(pod, why, "a disruption budget protects a stranded pod");
                    self.keeper.not_recreated(uid, self.started.elapsed());
                }
                Evicted::Failed(error) => {
                    tracing::warn!(pod, error, "failed to evict a stranded pod");
                    self.keeper.not_recreated(uid, self.started.elapsed());
                }
            }
        }
        for Advice { pod, uid, message } in &rescue.advise {
            if !claim.is_current() {
                return;
            }
            let (status, reason) = if message.is_some() { ("False", "Stranded") } else { ("True", "Bound") };
            let condition = PodCondition {
                type_: CONDITION_PLACED.to_owned(),
                status: status.to_owned(),
                reason: reason.to_owned(),
                message: message.clone().unwrap_or_default(),
            };
            if !pod_condition::write(client, (pod, uid), &condition, true).await {
                self.keeper.not_advised(uid);
            } else if let Some(message) = message {
                let publish = (events::of_pod(pod, uid), events::stranded(message));
                let _ = tokio::time::timeout(WRITE, recorder.publish(&publish.1, &publish.0)).await;
            }
        }
    }

    /// Deletes MPS hosts' pods that are to be replaced, and tells how that goes on.
    async fn roll_out(&mut self, step: &Step) {
        let Parts { client, claim, metrics, recorder, hosts, .. } = &self.parts;
        let Some(hosts) = hosts else { return };
        metrics.hosts_outdated.set(i64::try_from(step.outdated).unwrap_or(i64::MAX));
        metrics.rollout_stopped.set(i64::from(step.stopped));
        for (node, why) in &step.waiting {
            tracing::debug!(node, why, "its MPS host is outdated and stays for now");
        }
        let mut events = Vec::new();
        if let Some((message, regarding)) = &step.news {
            tracing::warn!(message, "MPS hosts");
            events.push((regarding.clone(), events::rollout_stopped(message)));
        }
        for replacement in &step.replace {
            if !claim.is_current() {
                return;
            }
            let (node, pod) = (&replacement.node, &replacement.host.pod);
            let deleted = rollout::replace(client, hosts, replacement).await;
            metrics.hosts_replaced.get_or_create(&Outcome { result: deleted.as_str() }).inc();
            let up = self.started.elapsed();
            match deleted {
                Deleted::Done => {
                    tracing::info!(node, pod, "nothing uses MPS there: its MPS host is replaced by the newest");
                    self.keeper.rollout.replaced(replacement, up);
                    let event = events::host_replaced(node, pod, &replacement.host.uid);
                    events.push((replacement.regarding(), event));
                }
                Deleted::Gone => self.keeper.rollout.cancel(node),
                Deleted::Failed(error) => {
                    tracing::warn!(node, pod, error = &error as &dyn std::error::Error, "the MPS host is not replaced");
                    self.keeper.rollout.refused(node, up);
                }
                Deleted::Timeout => {
                    tracing::warn!(node, pod, "the API server did not answer within {} s", WRITE.as_secs());
                    self.keeper.rollout.refused(node, up);
                }
            }
            // What it withholds has changed.
            self.parts.dirty.notify_one();
        }
        for (regarding, event) in events {
            publish(recorder, &event, &regarding).await;
        }
    }

    /// Tells pods what they wait for, unless the passes do, which know more of GPUs that are cut.
    async fn tell(&mut self, turn: &Turn, cluster: &Cluster, demand: &BTreeMap<String, Waiting>, up: Duration) {
        let mut waiting = turn.waiting.clone();
        waiting.retain(|pod, _| !demand.contains_key(pod));
        let uids: BTreeMap<String, String> = if waiting.is_empty() {
            BTreeMap::new()
        } else {
            let pods = cluster.pods.iter().filter(|pod| pod.waits_at_gate());
            pods.map(|pod| (crate::pods::full_name(&pod.metadata), pod.metadata.uid.clone().unwrap_or_default()))
                .collect()
        };
        let mut all: Vec<(ObjectReference, kube::runtime::events::Event)> = self.publisher.of_pods(&waiting, &uids, up);
        for opening in &turn.openings {
            if let Why::Never(message) = &opening.why {
                all.push((events::of_pod(&opening.pod, &opening.uid), events::unschedulable(message)));
            }
        }
        for (regarding, event) in all {
            if !self.parts.claim.is_current() {
                return;
            }
            publish(&self.parts.recorder, &event, &regarding).await;
        }
    }

    fn measure(&self, turn: &Turn) {
        let waiting = i64::try_from(turn.waiting.len()).unwrap_or(i64::MAX);
        self.parts.metrics.gated.get_or_create(&Reason { reason: "no_room" }).set(waiting);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_that_holds_go_by_is_counted_on_and_never_goes_back() {
        let start = Instant::now();
        let epoch = Epoch::new(Timestamp::from_second(1_000).unwrap(), start);
        assert_eq!(epoch.seconds(start), 1_000);
        assert_eq!(epoch.seconds(start + Duration::from_millis(5_900)), 1_005);
        let ancient = Epoch::new(Timestamp::from_second(-7).unwrap(), start + Duration::from_secs(1));
        assert_eq!(ancient.seconds(start), 0);
    }
}
