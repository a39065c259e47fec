//! The operator's tasks, and what they share.
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use cleave_api::gpunode::StepStatus;
use cleave_api::names::{ALLOW_LABEL, STEP_DONE, STEP_FAILED, STEP_REFUSED};
use cleave_api::{GpuNode, SharingPolicy};
use futures::{FutureExt as _, Stream, StreamExt as _};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Namespace, ObjectReference};
use kube::core::{DeserializeGuard, PartialObjectMeta};
use kube::runtime::WatchStreamExt;
use kube::runtime::events::{Recorder, Reporter};
use kube::runtime::reflector::{self, Store};
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::args::OperatorArgs;
use crate::certificate::{self, Keeper};
use crate::demand::{self, Reason, Waiting};
use crate::events::{self, Teller};
use crate::gate::{self, Gate};
use crate::http::{Health, serve};
use crate::leader::{Claim, Elector};
use crate::metrics::{self, Kind, Metrics, Outcome, Write};
use crate::pace::{Gather, Pace};
use crate::pods::PodObject;
use crate::read::{AgentPod, NodeObject, Observed, Stores, complete};
use crate::rollout::{Revision, Watched};
use crate::snapshot::Memory;
use crate::status::{Telling, Told};
use crate::taint::{self, Taints};
use crate::tenants::Tenants;
use crate::{apply, plan, status, webhook};

/// How long a write may take: with [`crate::leader::CLAIM`] it ends before another process may lead.
const WRITE: Duration = Duration::from_secs(5);
/// How often is planned while pods wait for room: what other pods give back (CPU, memory) is not told on its own.
const WAITING: Duration = Duration::from_secs(5);
/// After how long a pass that failed is repeated, at first and at most.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// The API server. Every task repeats what failed by itself, within a deadline of its own. A client that repeats what was answered by 429, as the
/// default one does for minutes, would keep from the gate that a disruption budget protects a pod: evictions are refused by that status.
async fn connect() -> Result<Client> {
    let mut config = kube::Config::infer().await?;
    config.default_retry = false;
    Ok(Client::try_from(config)?)
}

/// Runs the operator until SIGTERM or SIGINT, or until one of its tasks ends by itself.
pub async fn run(args: OperatorArgs) -> Result<()> {
    let OperatorArgs { namespace, agent_selector, lease, identity, metrics_addr, webhook, webhook_addr, .. } = args;
    // Two providers may be linked; an error says that one is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let listener = listen(metrics_addr).await?;
    let webhook = match webhook {
        None => None,
        Some(name) => Some((name, listen(webhook_addr).await?)),
    };
    let client = connect().await.context("finding the API server")?;
    let (stop, released) = (CancellationToken::new(), CancellationToken::new());
    let metrics = Metrics::default();
    let mut registry = Registry::default();
    metrics.register(&mut registry);

    let mut tasks: JoinSet<(&'static str, Result<()>)> = JoinSet::new();
    let wakes = Wakes::default();
    let mut watches = Watches { tasks: &mut tasks, wakes: &wakes, metrics: &metrics, stop: &stop };
    let stores = watches.stores(&client, &namespace, &agent_selector);
    let hosts = args.replace_mps_hosts.map(|selector| watches.hosts(&client, &namespace, &selector));
    let namespaces = webhook.is_some().then(|| {
        let excepted = watcher::Config::default().labels(ALLOW_LABEL);
        let watch = watcher(Api::<PartialObjectMeta<Namespace>>::all(client.clone()), excepted);
        watches.keep("Namespace", watch, (trim, |_| false), Wakes::all)
    });

    let (elector, claim) = Elector::new(Api::namespaced(client.clone(), &namespace), lease, identity.clone());
    {
        let (stop, released) = (stop.clone(), released.clone());
        tasks.spawn(async move {
            elector.run(stop, released).await;
            ("lease", Ok(()))
        });
    }
    let mut certified = None;
    if let Some(((name, listener), namespaces)) = webhook.zip(namespaces) {
        let (keeper, served) = Keeper::new(&client, &namespace, name, claim.clone());
        let tls = certificate::tls(served.clone()).context("setting up TLS")?;
        certified = Some(served);
        let (known, until) = (namespaces.clone(), stop.clone());
        tasks.spawn(async move {
            ("webhook", webhook::serve(listener, tls, known, until, webhook::LINGER).await.map_err(Into::into))
        });
        let stop = stop.clone();
        tasks.spawn(async move {
            // Nothing is answered, and nobody asks, before it is known where there are exceptions.
            tokio::select! {
                () = stop.cancelled() => {}
                listed = namespaces.wait_until_ready() => match listed {
                    Ok(()) => keeper.run(stop.clone()).await,
                    Err(error) => return ("certificate", Err(error.into())),
                }
            }
            ("certificate", Ok(()))
        });
    }
    let listed = Arc::new(AtomicBool::new(false));
    let (registry, all) = (Arc::new(registry), Arc::clone(&listed));
    let health = Health { listed: all, claim: claim.clone(), metrics: metrics.clone(), registry, certified };
    {
        let stop = stop.clone();
        tasks.spawn(async move { ("http", serve(listener, health, stop).await.map_err(Into::into)) });
    }
    let recorder =
        Recorder::new(client.clone(), Reporter { controller: "cleave-operator".to_owned(), instance: Some(identity) });
    let (demand, gated) = watch::channel(Arc::default());
    let at_gate = gate::Parts {
        client: client.clone(),
        stores: stores.clone(),
        claim: claim.clone(),
        metrics: metrics.clone(),
        recorder: recorder.clone(),
        dirty: Arc::clone(&wakes.gate),
        demand: gated,
        hosts,
        stop: stop.clone(),
    };
    let tenants = Tenants::beside(&at_gate, Arc::clone(&wakes.tenants));
    let passes = Passes {
        demand,
        client,
        stores,
        claim,
        metrics,
        recorder,
        wakes,
        listed,
        told: Told::new(),
        started: Instant::now(),
        memory: Memory::default(),
        gather: Gather::default(),
        teller: Teller::default(),
        steps: BTreeMap::new(),
        taints: args.taint_unhealthy.then(Taints::default),
        next: None,
        stop: stop.clone(),
    };
    tasks.spawn(async move {
        let (passes, gate, tenants) = tokio::join!(passes.run(), Gate::new(at_gate).run(), tenants.run());
        // Nothing is written from here on: the lease may go.
        released.cancel();
        ("passes", passes.and(gate).and(tenants))
    });
    finish(tasks, stop).await
}

async fn listen(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| format!("listening on {address}"))
}

/// Waits for a signal or the end of a task, and then for all of them.
async fn finish(mut tasks: JoinSet<(&'static str, Result<()>)>, stop: CancellationToken) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("listening for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listening for SIGINT")?;
    let mut outcome = Ok(());
    loop {
        // All cancel-safe: signals are streams, and `join_next` loses no task when it is dropped.
        tokio::select! {
            _ = terminate.recv(), if !stop.is_cancelled() => tracing::info!("SIGTERM: shutting down"),
            _ = interrupt.recv(), if !stop.is_cancelled() => tracing::info!("SIGINT: shutting down"),
            ended = tasks.join_next() => match ended {
                None => return outcome,
                Some(ended) => {
                    let unasked = !stop.is_cancelled();
                    match ended {
                        Err(panicked) => outcome = Err(anyhow!(panicked).context("a task panicked")),
                        Ok((task, Err(error))) => outcome = Err(error.context(format!("task {task}"))),
                        Ok((task, Ok(()))) if unasked => outcome = Err(anyhow!("task {task} ended by itself")),
                        Ok(_) => {}
                    }
                }
            },
        }
        stop.cancel();
    }
}

/// What is dropped of an object before it is kept, and whether a change of it is worth a look.
type Keeping<K> = (fn(&mut K), fn(&K) -> bool);

/// Whom changes wake.
#[derive(Debug, Clone, Default)]
struct Wakes {
    passes: Arc<Notify>,
    gate: Arc<Notify>,
    tenants: Arc<Notify>,
    /// Pods decide what no GPU becomes, as the last pass saw it.
    indifferent: Arc<AtomicBool>,
}

impl Wakes {
    /// Something that all look at.
    fn all(&self) {
        self.passes.notify_one();
        self.gate.notify_one();
        self.tenants.notify_one();
    }

    /// A pod: passes look at them only where pods decide what GPUs become. They come and go, and a pass is about all nodes.
    fn pod(&self) {
        if !self.indifferent.load(Ordering::Acquire) {
            self.passes.notify_one();
        }
        self.gate.notify_one();
        self.tenants.notify_one();
    }

    /// A pass has seen whether pods decide about GPUs. What came before it was known that they do is looked at again.
    fn pods_decide(&self, decide: bool) {
        let before = self.indifferent.swap(!decide, Ordering::AcqRel);
        if decide && before {
            self.passes.notify_one();
        }
    }
}

/// What the watches share.
struct Watches<'a> {
    tasks: &'a mut JoinSet<(&'static str, Result<()>)>,
    wakes: &'a Wakes,
    metrics: &'a Metrics,
    stop: &'a CancellationToken,
}

impl Watches<'_> {
    /// Keeps all that passes and the gate look at.
    fn stores(&mut self, client: &Client, namespace: &str, agent_selector: &str) -> Stores {
        let everything = watcher::Config::default();
        let agents = watcher::Config::default().labels(agent_selector);
        // Pods that have ended hold nothing; the API server need not even tell of them.
        let living = watcher::Config::default().fields("status.phase!=Succeeded,status.phase!=Failed");
        Stores {
            policies: self.keep(
                "SharingPolicy",
                watcher(Api::<DeserializeGuard<SharingPolicy>>::all(client.clone()), everything.clone()),
                (trim, |_| true),
                Wakes::all,
            ),
            gpu_nodes: self.keep(
                "GpuNode",
                watcher(Api::<DeserializeGuard<GpuNode>>::all(client.clone()), everything.clone()),
                (
                    |object| {
                        trim_others(object);
                        complete(object);
                    },
                    |_| true,
                ),
                Wakes::all,
            ),
            nodes: self.keep(
                "Node",
                watcher(Api::<NodeObject>::all(client.clone()), everything),
                (trim, |_| true),
                Wakes::all,
            ),
            agents: self.keep(
                "AgentPod",
                watcher(Api::<AgentPod>::namespaced(client.clone(), namespace), agents),
                (trim, |_| true),
                Wakes::all,
            ),
            // What other pods do changes little, and the next pass sees it.
            pods: self.keep(
                "Pod",
                watcher(Api::<PodObject>::all(client.clone()), living),
                (PodObject::trim, |pod| pod.wants_gpus() || pod.is_ours_to_open()),
                Wakes::pod,
            ),
        }
    }

    /// Keeps what MPS hosts are replaced by: the gate alone looks at it.
    fn hosts(&mut self, client: &Client, namespace: &str, selector: &str) -> Watched {
        let labelled = watcher::Config::default().labels(selector);
        let wake = |wakes: &Wakes| wakes.gate.notify_one();
        let pods = watcher(Api::<AgentPod>::namespaced(client.clone(), namespace), labelled);
        let revisions = watcher(Api::<Revision>::namespaced(client.clone(), namespace), watcher::Config::default());
        Watched {
            pods: self.keep("MpsHostPod", pods, (trim, |_| true), wake),
            revisions: self.keep("ControllerRevision", revisions, (trim, |_| true), wake),
            namespace: namespace.to_owned(),
        }
    }

    /// Keeps what a watch tells in a store, for ever. `trim` drops what nobody reads before it is kept; of what `matters` a pass is made.
    fn keep<K>(
        &mut self,
        kind: &'static str,
        watch: impl Stream<Item = watcher::Result<Event<K>>> + Send + 'static,
        (trim, matters): Keeping<K>,
        wake: fn(&Wakes),
    ) -> Store<K>
    where
        K: Resource<DynamicType = ()> + Clone + Debug + Send + Sync + 'static,
    {
        let (store, writer) = reflector::store();
        let (wakes, metrics, stop) = (self.wakes.clone(), self.metrics.clone(), self.stop.clone());
        // A bare watcher repeats a failed request at once; this waits from 0.8 to 30 s.
        let events = watch.default_backoff().modify(trim).reflect(writer);
        self.tasks.spawn(async move {
            let told = events.for_each(|event| {
                match event {
                    // A list in progress is not what the cluster says yet.
                    Ok(Event::Init | Event::InitApply(_)) => {}
                    Ok(Event::Apply(object) | Event::Delete(object)) if !matters(&object) => {}
                    Ok(Event::Apply(_) | Event::Delete(_) | Event::InitDone) => wake(&wakes),
                    Err(error) => {
                        metrics.watch_errors.get_or_create(&Kind { kind }).inc();
                        tracing::warn!(
                            kind,
                            error = &error as &dyn std::error::Error,
                            "the watch failed and is tried again"
                        );
                    }
                }
                std::future::ready(())
            });
            // Dropping a watch loses nothing that anybody still reads.
            tokio::select! {
                () = told => {}
                () = stop.cancelled() => {}
            }
            ("watch", Ok(()))
        });
        store
    }
}

/// Drops what nobody reads of any object.
fn trim<K: Resource>(object: &mut K) {
    let meta = object.meta_mut();
    meta.managed_fields = None;
    meta.annotations = None;
}

/// Drops what others wrote: what administrators say of GPUs is in annotations of ours.
fn trim_others<K: Resource>(object: &mut K) {
    let meta = object.meta_mut();
    meta.managed_fields = None;
    if let Some(annotations) = &mut meta.annotations {
        annotations.retain(|name, _| name.starts_with("cleave.dev/"));
    }
}

/// The task that reads, plans and writes.
struct Passes {
    client: Client,
    stores: Stores,
    claim: Claim,
    metrics: Metrics,
    recorder: Recorder,
    wakes: Wakes,
    listed: Arc<AtomicBool>,
    told: Told,
    started: Instant,
    memory: Memory,
    gather: Gather,
    teller: Teller,
    /// Steps of each node as last counted.
    steps: BTreeMap<String, Vec<StepStatus>>,
    /// Which nodes are out of service, where these are to be tainted.
    taints: Option<Taints>,
    /// When to look again though nothing changes.
    next: Option<Duration>,
    /// What pods wait for, for the gate.
    demand: watch::Sender<Arc<BTreeMap<String, Waiting>>>,
    stop: CancellationToken,
}

/// Writes of a pass failed; each was told where it happened.
#[derive(Debug)]
struct Failed;

impl Passes {
    async fn run(mut self) -> Result<()> {
        let stop = self.stop.clone();
        // A pass ends before the process does: what it writes is whole, and it asks for the claim before each write.
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            ready = self.wait_for_lists() => ready?,
        }
        let mut turned = self.claim.clone();
        let mut retry: Option<Duration> = None;
        let mut pace = Pace::default();
        loop {
            let pause = retry.into_iter().chain(self.next).min();
            let mut more = false;
            let mut seen = None;
            // Cancel-safe: `notified` keeps its permit when dropped, `turned` reads a watch channel, the others are a token and a timer.
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                () = self.wakes.passes.notified() => {
                    seen = Some(Instant::now());
                    tokio::time::sleep(pace.wait(self.now())).await;
                    // What came meanwhile is in this pass.
                    more = self.wakes.passes.notified().now_or_never().is_some();
                }
                () = turned.turned() => {}
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
        self.stores.wait_until_ready().await.context("listing the cluster's objects")?;
        self.listed.store(true, Ordering::Release);
        tracing::info!("all objects are listed");
        Ok(())
    }

    /// Reads, plans and writes once; does nothing where another leads. `seen` is when the first change was told.
    async fn pass(&mut self, seen: Instant) -> Result<(), Failed> {
        self.next = None;
        if !self.claim.is_current() {
            return Ok(());
        }
        let now = self.now();
        let mut observed = self.stores.observe();
        self.count_steps(&observed);
        self.memory.recall(&mut observed, now);
        let mut plan = plan::plan(&observed);
        self.wakes.pods_decide(!plan.demand.is_empty());
        let outcome = self.plan_demand(&mut plan, &observed, now);
        self.measure(&observed, &plan);
        let nodes = self.apply(&plan, &observed, seen).await;
        if let Some(outcome) = &outcome {
            self.demand.send_if_modified(|told| {
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
        self.metrics.passes.get_or_create(&Outcome { result }).inc();
        if all { Ok(()) } else { Err(Failed) }
    }

    /// Plans the GPUs that pods decide about; nothing while pods are gathered.
    fn plan_demand(&mut self, plan: &mut plan::Plan, observed: &Observed, now: Duration) -> Option<demand::Outcome> {
        let rules = || plan.demand.values().flat_map(BTreeMap::values).map(|by_demand| by_demand.gathering);
        let idle = rules().filter_map(|rule| rule.idle).min();
        let timeout = rules().filter_map(|rule| rule.timeout).min();
        let waiting = observed.pods.iter().filter(|claimant| claimant.node.is_none());
        if let Err(wait) = self.gather.due(waiting.map(|claimant| claimant.pod.name.as_str()), (idle, timeout), now) {
            self.next = Some(wait);
            return None;
        }
        let started = Instant::now();
        let outcome = demand::overlay(plan, observed, &mut self.memory, now);
        let took = started.elapsed();
        let planned = outcome.planned.as_ref()?;
        self.metrics.plan_seconds.observe(took.as_secs_f64());
        let result = match (outcome.violations.as_slice(), planned.plan.changed) {
            ([], true) => "changed",
            ([], false) => "unchanged",
            (some, _) => {
                let violations: Vec<String> = some.iter().take(8).map(ToString::to_string).collect();
                tracing::error!(violations = violations.join("; "), "the plan breaks rules and is not acted on");
                "refused"
            }
        };
        self.metrics.plans.get_or_create(&Outcome { result }).inc();
        for reason in Reason::ALL {
            let count = outcome.waiting.values().filter(|waiting| waiting.reason == reason).count();
            let label = metrics::Reason { reason: reason.as_str() };
            self.metrics.pods_waiting.get_or_create(&label).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
        self.metrics.fragmentation.set(f64::from(outcome.fragmentation) / 1000.0);
        self.metrics.left_out.set(i64::try_from(outcome.silent.len()).unwrap_or(i64::MAX));
        if !outcome.cuts.is_empty() || !outcome.violations.is_empty() {
            tracing::info!(
                pods = outcome.waiting.len(),
                gpus = outcome.cuts.len(),
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
                    self.metrics.steps.get_or_create(&Outcome { result }).inc();
                }
            }
            self.steps.insert(name.clone(), status.steps.clone());
        }
    }

    /// Tells pods and nodes what came of the plan. Events are a courtesy: one that cannot be written is not tried again.
    async fn tell_of(&mut self, outcome: &demand::Outcome, observed: &Observed) {
        for (regarding, event) in self.teller.events(outcome, observed, self.now()) {
            if !self.claim.is_current() {
                return;
            }
            let published = tokio::time::timeout(WRITE, self.recorder.publish(&event, &regarding)).await;
            if let Ok(Err(error)) = published {
                tracing::warn!(error = &error as &dyn std::error::Error, "no event");
            }
        }
        if self.teller.is_waiting() {
            self.next = Some(self.next.map_or(events::LOOK_AGAIN, |next| next.min(events::LOOK_AGAIN)));
        }
    }

    /// Writes the nodes that differ; false where one could not be written.
    async fn apply(&mut self, plan: &plan::Plan, observed: &Observed, seen: Instant) -> bool {
        let api: Api<DeserializeGuard<GpuNode>> = Api::all(self.client.clone());
        let mut all = true;
        let mut told = false;
        for change in apply::changes(plan, observed) {
            if !self.claim.is_current() {
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
                self.memory.wrote(
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
            self.metrics.reaction_seconds.observe(seen.elapsed().as_secs_f64());
        }
        all
    }

    /// Writes the statuses that differ, and tells of what turned; false where one could not be written.
    async fn tell(&mut self, plan: &plan::Plan, observed: &Observed) -> bool {
        let api: Api<DeserializeGuard<SharingPolicy>> = Api::all(self.client.clone());
        let mut all = true;
        self.told.retain(|policy, _| observed.policies.contains_key(policy));
        for update in status::updates(plan, observed, &self.told, Timestamp::now()) {
            if !self.claim.is_current() {
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
                let telling = Telling { from: update.from, status: update.status };
                self.told.insert(update.policy, telling);
            }
        }
        all
    }

    /// Taints the nodes that can serve nobody, where that is asked for; false where one could not be written.
    async fn taint(&mut self, observed: &Observed) -> bool {
        let now = self.now();
        let Some(taints) = &mut self.taints else { return true };
        let (changes, next) = taints.look(observed, now);
        self.next = self.next.into_iter().chain(next).min();
        let mut all = true;
        for change in changes {
            if !self.claim.is_current() {
                return false;
            }
            let taint::Change { node, why, .. } = &change;
            let done = match within(taint::write(&self.client, &change)).await {
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
        for event in update.turned.iter().filter_map(status::event) {
            tracing::info!(policy = policy.name_any(), reason = event.reason, note = event.note, "policy turned");
            let published = tokio::time::timeout(WRITE, self.recorder.publish(&event, &regarding)).await;
            if let Ok(Err(error)) = published {
                tracing::warn!(error = &error as &dyn std::error::Error, "no event");
            }
        }
    }

    fn count(&self, kind: &'static str, done: bool, all: &mut bool) {
        let result = if done { "ok" } else { "failed" };
        self.metrics.writes.get_or_create(&Write { kind, result }).inc();
        *all &= done;
    }

    fn measure(&self, observed: &Observed, plan: &plan::Plan) {
        let size = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        let malformed_policies = observed.policies.values().filter(|policy| policy.is_err()).count();
        let nodes = observed.nodes.values();
        let malformed_nodes = nodes.filter(|node| node.has_object() && node.object().is_none()).count();
        self.metrics.malformed.get_or_create(&Kind { kind: "SharingPolicy" }).set(size(malformed_policies));
        self.metrics.malformed.get_or_create(&Kind { kind: "GpuNode" }).set(size(malformed_nodes));
        let in_force = plan.policies.values().filter(|report| report.invalid.is_none()).count();
        self.metrics.policies.set(size(in_force));
        self.metrics.nodes.set(size(plan.nodes.len()));
    }
}

/// The outcome of a write, or nothing where none came in time.
async fn within<T>(write: impl Future<Output = T>) -> Option<T> {
    let written = tokio::time::timeout(WRITE, write).await;
    if written.is_err() {
        tracing::warn!("the API server did not answer a write within {} s", WRITE.as_secs());
    }
    written.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_administrators_say_of_a_gpu_node_is_kept_and_what_tools_wrote_is_not() {
        let mut node = cleave_api::GpuNode::new("n", cleave_api::GpuNodeSpec::default());
        let annotations =
            ["cleave.dev/cordon", "cleave.dev/cleared", "kubectl.kubernetes.io/last-applied-configuration"];
        node.metadata.annotations = Some(annotations.map(|name| (name.to_owned(), "x".to_owned())).into());
        node.metadata.managed_fields = Some(Vec::new());
        trim_others(&mut node);
        let kept: Vec<String> = node.metadata.annotations.into_iter().flatten().map(|(name, _)| name).collect();
        assert_eq!(kept, ["cleave.dev/cleared", "cleave.dev/cordon"]);
        assert_eq!(node.metadata.managed_fields, None);
    }

    #[test]
    fn pods_wake_passes_only_where_they_decide_what_gpus_become_and_none_is_missed_when_they_begin_to() {
        let wakes = Wakes::default();
        let woken = |of: &Arc<Notify>| of.notified().now_or_never().is_some();
        wakes.pod();
        assert!(woken(&wakes.passes) && woken(&wakes.gate), "before the first pass nobody knows");
        wakes.pods_decide(false);
        wakes.pod();
        assert!(!woken(&wakes.passes) && woken(&wakes.gate));
        wakes.all();
        assert!(woken(&wakes.passes) && woken(&wakes.gate));
        // This one comes after a pass has looked, and before that pass finds that pods decide.
        wakes.pod();
        wakes.pods_decide(true);
        assert!(woken(&wakes.passes));
        wakes.pods_decide(true);
        assert!(!woken(&wakes.passes), "and not again and again");
        wakes.pod();
        assert!(woken(&wakes.passes));
    }
}
