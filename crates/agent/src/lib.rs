//! The node agent: observe, diff, act, report.
//!
//! One task, the main loop, owns what is known of the node ([`node::Node`]); the others bring it what they see and take from it what
//! follows. Everything that decides is pure, and is in modules without I/O: [`layout`], [`diff`], [`allocate`], [`usage`], [`hardware`],
//! [`health`], [`absence`], [`node`], [`faults`], [`ending`], [`oom`], [`status`].
//!
//! ```text
//!  NVML, on its own threads ── inventory, XIDs ──┐                     ┌─▶ Plugins (kubelet crate): lists in the open streams
//!  MPS host: status.json, its life ──────────────┤                     ├─▶ desired.json, checkpoint, CDI specification: one writer thread
//!  kubelet: PodResources, when something changed ┼─ Input ▶ main loop ─┤
//!  API server: the node's own GpuNode ───────────┤                     ├─▶ GpuNode.status and events, when the API server answers
//!  kubelet: Allocate, answered from the table ───┘                     └─▶ /metrics, /healthz, /readyz
//! ```
//!
//! `Allocate` and `GetPreferredAllocation` are answered from [`serve::Table`] under a lock that nobody holds across an await; the main loop
//! is told afterwards. Pods that leave are the matter of a task of its own, [`ending`], which waits for nobody; containers that run out of memory
//! of another, [`oom`]. The first lists come from the checkpoint, before NVML, PodResources and the API server have answered.
pub mod absence;
mod act;
#[cfg(test)]
mod admissions;
pub mod allocate;
pub mod args;
pub mod cdi;
pub mod checkpoint;
mod connect;
pub mod cordon;
pub mod diff;
pub mod ending;
pub mod expected;
pub mod faults;
mod files;
pub mod hardware;
pub mod health;
pub mod http;
pub mod layout;
pub mod metrics;
pub mod mig;
pub mod mps;
pub mod node;
mod offline;
pub mod oom;
pub mod pods;
#[cfg(test)]
mod recut;
pub mod report;
pub mod serve;
pub mod status;
pub mod tenants;
pub mod usage;
pub mod xid;

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use cleave_api::gpunode::FindingStatus;
use cleave_gpu::mps::wire::{Desired, Paths};
use cleave_gpu::nvml::{EventWatch, GpuEvent, Gpus, Inventory, Nvml, NvmlError, Search, Vitals, Worker};
use cleave_kubelet::{
    AllocatedDevices, Config, HeldDevices, KubeletCheckpoint, Plugins, PluginsState, PodResources, Resource,
    ResourceName,
};
use k8s_openapi::jiff::Timestamp;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub use args::AgentArgs;

use crate::allocate::Handover;
use crate::args::{DeviceListStrategy, MigMode};
use crate::checkpoint::{Lock, Store};
use crate::ending::shutdown;
use crate::expected::Expected;
use crate::http::Pulse;
use crate::metrics::Metrics;
use crate::node::{Ended, Node, Object, Occurrence, Turn};
use crate::serve::{Counter, Served, Table};
use crate::tenants::scene::Scene;
use crate::tenants::tell::PodEvent;

/// Between inventories; an event asks for one at once.
const INVENTORY: Duration = Duration::from_secs(10);
/// How long an inventory may take. Eight GPUs answer within a second; a driver that hangs takes minutes.
const INVENTORY_DEADLINE: Duration = Duration::from_secs(20);
/// How long after an allocation the kubelet lists its pod, most often.
const LISTED: Duration = Duration::from_millis(300);
/// How long after a list was sent again the kubelet has written its checkpoint, most often. Doubles while it has not.
const WRITTEN: Duration = Duration::from_millis(20);
/// How long the kubelet may take for its list.
const LIST_DEADLINE: Duration = Duration::from_secs(5);
/// How long files and status may follow an allocation.
const SOON: Duration = Duration::from_millis(30);
/// The main loop turns at least so often: times run out without an input.
const TURN: Duration = Duration::from_secs(5);
/// Between attempts to write files.
const WRITE_AGAIN: Duration = Duration::from_secs(1);
/// Between two looks whether another agent has ended.
const LOCK: Duration = Duration::from_millis(50);

/// What the main loop is told.
enum Input {
    Inventory(Result<Inventory, NvmlError>, Instant),
    Vitals(BTreeMap<String, Vitals>, Instant),
    Ended(Ended),
    Event(GpuEvent),
    Object(Object),
    Mps(mps::View),
    /// The kubelet's list, when it was asked, and its checkpoint as it was afterwards.
    Held(Result<Vec<HeldDevices>, String>, Instant, Option<Arc<AllocatedDevices>>),
    KubeletStarted,
    Findings(Vec<FindingStatus>),
}

/// What is written to files.
#[derive(Clone, Default)]
struct Written {
    desired: Desired,
    checkpoint: Vec<u8>,
    nodes: BTreeMap<String, Vec<String>>,
    /// Whether folders of allocations that are over may go: not before it is known which are.
    sweep: bool,
}

/// Runs the agent until it is told to stop.
///
/// # Errors
/// When it cannot go on: a path that cannot work, or a task that must not end has ended.
pub async fn run(args: AgentArgs) -> anyhow::Result<()> {
    // Another provider may have been installed by whoever runs this; the first one stays.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let args = Arc::new(args);
    let store = Store::new(&args.state_dir);
    let _only = alone(&store).await;
    let now = Instant::now();
    let metrics = Metrics::new();
    let link = mps::Link::new(Paths::new(&args.run_dir));
    let (node, allocations) = remember(&args, &store, &link, now);
    let mut node = node.keeping_mig_mode(args.mig_mode == MigMode::Never);
    node.mps(link.look());
    let offline = args.offline.clone().map(offline::Folder::new);
    let spec = offline.as_ref().map(|folder| folder.read(1));
    node.object(spec.clone().unwrap_or_default());
    for (id, allocation) in allocations.iter().filter(|(_, allocation)| allocation.mps.is_some()) {
        // After a reboot the run directory is empty, and the kubelet starts its containers again without asking anew.
        if let Err(error) = link.make_folder(id) {
            tracing::warn!(%error, ids = ?allocation.ids, "cannot make the folder of an allocation");
        }
    }
    let expected = match &offline {
        Some(folder) if !folder.has_pods() => Expected::default(),
        _ => Expected::told(),
    };
    let table = Table { expected, allocations, ..Table::default() };
    let counter = Arc::new(Counter::new(table, Handover::new(&args), link.clone(), metrics.clone()));
    let plugins = Plugins::start(&Config::new(&args.device_plugin_dir))?;

    let (inputs, received) = mpsc::channel(64);
    let (pulse, pulses) = watch::channel(Pulse { turned: now, unready: Some("starting".into()) });
    let (written, to_write) = watch::channel(Written::default());
    let (status, statuses) = watch::channel(None);
    let (occurrences, to_tell) = mpsc::channel(64);
    let (unended, occurrences_of_memory) = (occurrences.clone(), occurrences.clone());
    let (listing, lists) = watch::channel(Listing { every: LISTED, given: 0, renewed: 0 });
    let (look, looks) = watch::channel(());
    let (scene, scenes) = watch::channel(Arc::new(Scene::default()));
    let (tell_pods, pod_events) = mpsc::channel(64);
    let search = search(&args);
    let main = Main {
        node,
        counter: Arc::clone(&counter),
        plugins,
        served: BTreeMap::new(),
        args: Arc::clone(&args),
        metrics: metrics.clone(),
        pulse,
        written,
        status,
        occurrences,
        listing,
        look,
        scene,
        search: search.clone(),
        inputs: inputs.downgrade(),
        steps: Vec::new(),
        kubelet_answers: true,
        stopping: CancellationToken::new(),
    };
    let plugin_states = main.plugins.state();

    let mut tasks = JoinSet::new();
    // The first to be polled: it serves what the checkpoint says before anything else is waited for.
    let stopping = main.stopping.clone();
    tasks.spawn(main.run(received));
    tasks.spawn(watch_hardware(search, inputs.clone(), looks));
    let view = watch::Sender::new(link.look());
    tasks.spawn(ending::run(link.clone(), Arc::clone(&counter), view.subscribe(), unended, metrics.clone()));
    tasks.spawn(watch_mps(link.clone(), view, inputs.clone()));
    let of_memory = oom::Parts {
        proc: args.proc.clone(),
        link: link.clone(),
        scene: scenes.clone(),
        names: counter.names.clone(),
        metrics: metrics.clone(),
        occurrences: occurrences_of_memory,
        tell: tell_pods.clone(),
    };
    tasks.spawn(oom::run(of_memory));
    let proc = args.proc.clone();
    let of_tenants = (link.clone(), counter.names.clone(), metrics.clone());
    tasks.spawn(watch_tenants(Arc::clone(&args), of_tenants, scenes, tell_pods, inputs.clone()));
    tasks.spawn(watch_pods(Arc::clone(&args), inputs.clone(), lists, metrics.clone()));
    tasks.spawn(watch_kubelet(plugin_states.clone(), inputs.clone(), stopping));
    tasks.spawn(write_files(Arc::clone(&args), store, link, to_write, metrics.clone()));
    tasks.spawn(http::serve(args.metrics_addr, metrics.clone(), pulses, plugin_states));
    match (offline, spec) {
        (Some(folder), Some(spec)) => {
            let of_pods = folder.clone();
            tasks.spawn(async move {
                of_pods.write_pod_events(pod_events).await;
                Ok(())
            });
            tasks.spawn(stay_offline(folder, spec, args.node_name.clone(), counter, inputs, statuses, to_tell))
        }
        _ => tasks.spawn(speak_to_the_api(args, counter, inputs, statuses, (to_tell, pod_events), metrics)),
    };
    let ended = first_to_end(&mut tasks).await;
    tasks.shutdown().await;
    // There may be no next agent.
    oom::forget(&proc);
    ended
}

/// All of them go on for ever: whichever ends first says why the agent does.
async fn first_to_end(tasks: &mut JoinSet<anyhow::Result<()>>) -> anyhow::Result<()> {
    match tasks.join_next().await {
        Some(Ok(result)) => result,
        Some(Err(error)) => Err(error).context("a task of the agent failed"),
        None => Ok(()),
    }
}

/// Waits until this is the node's only agent. Two of them, for a moment of an upgrade or by mistake, would each write what is wanted of the MPS host
/// without what the other has given out since, and so close doors of running pods.
///
/// Without a directory that can be locked it goes on: so does it without one that can be written.
async fn alone(store: &Store) -> Option<Lock> {
    let mut told = false;
    loop {
        match store.try_lock() {
            Ok(Some(lock)) => return Some(lock),
            Ok(None) if told => {}
            Ok(None) => {
                told = true;
                tracing::warn!("another agent of this node runs: waiting until it has ended");
            }
            Err(error) => {
                tracing::error!(%error, "the directory of the checkpoint cannot be locked: a second agent would not be noticed");
                return None;
            }
        }
        tokio::time::sleep(LOCK).await;
    }
}

/// The node as the last agent left it.
fn remember(args: &AgentArgs, store: &Store, link: &mps::Link, now: Instant) -> (Node, usage::Allocations) {
    let boot_id =
        std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|id| id.trim().to_owned()).unwrap_or_default();
    let checkpoint = store.load().unwrap_or_else(|error| {
        tracing::error!(
            error = &error as &dyn std::error::Error,
            "the checkpoint is no help; what runs is learned from the kubelet"
        );
        match store.put_aside() {
            Ok(path) => tracing::info!(path = %path.display(), "it is kept"),
            Err(error) => tracing::warn!(%error, "it cannot be kept"),
        }
        None
    });
    let last_desired = if checkpoint.is_none() { link.last_desired() } else { None };
    let (mut node, allocations) =
        Node::start(boot_id, Duration::from_secs(args.allocation_grace), checkpoint, last_desired, now);
    node.quiet_for(Duration::from_secs(args.suspect_quiet));
    node.tell_time(now, Timestamp::now());
    (node, allocations)
}

/// The main loop: the only one that decides.
struct Main {
    node: Node,
    counter: Arc<Counter>,
    plugins: Plugins,
    served: BTreeMap<ResourceName, Arc<Served>>,
    args: Arc<AgentArgs>,
    metrics: Metrics,
    pulse: watch::Sender<Pulse>,
    written: watch::Sender<Written>,
    status: watch::Sender<Option<cleave_api::GpuNodeStatus>>,
    occurrences: mpsc::Sender<Occurrence>,
    listing: watch::Sender<Listing>,
    look: watch::Sender<()>,
    scene: watch::Sender<Arc<Scene>>,
    search: Search,
    inputs: mpsc::WeakSender<Input>,
    /// What was logged.
    steps: Vec<cleave_api::gpunode::StepStatus>,
    kubelet_answers: bool,
    /// The agent was told to stop: what ends now ends for that.
    stopping: CancellationToken,
}

impl Main {
    async fn run(mut self, mut inputs: mpsc::Receiver<Input>) -> anyhow::Result<()> {
        let counter = Arc::clone(&self.counter);
        let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
        loop {
            let pause = self.turn().unwrap_or(TURN);
            tokio::select! {
                // Cancel-safe: a message that is not taken stays in the channel.
                input = inputs.recv() => match input {
                    Some(input) => self.take(input),
                    None => anyhow::bail!("nobody tells the main loop anything any more"),
                },
                // Cancel-safe: a notification that is not taken stays.
                () = counter.given.notified() => {
                    // The kubelet has its answer first, and a burst is one turn; a container that starts is worth a turn of its own.
                    let _ = tokio::time::timeout(SOON, counter.starting.notified()).await;
                    self.listing.send_modify(|listing| listing.given += 1);
                }
                // Cancel-safe: a signal that is not taken is seen by the next call.
                _ = terminate.recv() => {
                    tracing::info!("told to stop");
                    self.stopping.cancel();
                    self.plugins.shutdown().await;
                    return Ok(());
                }
                () = tokio::time::sleep(pause) => {}
            }
            // What came meanwhile is one turn.
            while let Ok(input) = inputs.try_recv() {
                self.take(input);
            }
        }
    }

    fn take(&mut self, input: Input) {
        // Each time: the time of day may have been set.
        self.node.tell_time(Instant::now(), Timestamp::now());
        match input {
            Input::Ended(ended) => {
                let Ended { order, outcome, .. } = &ended;
                tracing::info!(gpu = order.gpu, change = %order.change, ?outcome, "a GPU was to be changed");
                self.metrics.change(&order.change, outcome);
                self.node.ended(ended, Instant::now());
            }
            Input::Inventory(answer, asked) => {
                if let Err(error) = &answer {
                    self.metrics.error("nvml");
                    tracing::warn!(error = error as &dyn std::error::Error, "NVML does not say what GPUs there are");
                }
                self.node.inventory(answer, asked);
            }
            Input::Event(GpuEvent::Xid { uuid, xid, gpu_instance }) => {
                let class = self.node.xid(&uuid, xid, gpu_instance, &self.args.ignore_xids, Instant::now());
                tracing::warn!(
                    gpu = uuid,
                    xid,
                    gpu_instance,
                    class = class.as_str(),
                    meaning = xid::describe(xid),
                    "XID"
                );
                self.metrics.xid(&uuid, xid, class);
                self.look.send_replace(());
            }
            Input::Vitals(vitals, asked) => self.node.vitals(vitals, asked),
            Input::Event(GpuEvent::Look) => self.look.send_replace(()),
            Input::Object(object) => self.node.object(object),
            Input::Mps(view) => self.node.mps(view),
            Input::Held(answer, asked, on_disk) => {
                self.node.on_disk(on_disk);
                if answer.is_ok() != std::mem::replace(&mut self.kubelet_answers, answer.is_ok()) {
                    match &answer {
                        Ok(_) => tracing::info!("the kubelet says again who holds what"),
                        Err(error) => tracing::warn!(
                            error,
                            "the kubelet does not say who holds what; nothing that is served goes"
                        ),
                    }
                }
                if let Ok(rows) = &answer {
                    self.counter.departures.send_if_modified(|pods| pods.held(rows));
                }
                let mut table = self.counter.table();
                if let Ok(rows) = &answer {
                    table.expected.listed(rows, asked);
                }
                let over = self.node.held(answer, asked, &mut table.allocations);
                if over > 0 {
                    tracing::info!(over, "allocations that no pod holds any more");
                }
            }
            Input::KubeletStarted => self.node.kubelet_started(Instant::now()),
            Input::Findings(findings) => self.node.findings(findings),
        }
    }

    /// Looks at all that is known, and hands on what follows. Says when to do so again, if soon.
    fn turn(&mut self) -> Option<Duration> {
        let now = Instant::now();
        let mut table = self.counter.table();
        let Turn {
            lists,
            renew,
            desired,
            checkpoint,
            status,
            occurrences,
            faults,
            unready,
            list_every,
            sweep,
            orders,
            look,
            scene,
            again,
        } = self.node.turn(&mut table, now);
        let gpus: Vec<&cleave_gpu::nvml::Gpu> = checkpoint.gpus.iter().collect();
        table.nodes = match self.args.device_list_strategy {
            DeviceListStrategy::Envvar => BTreeMap::new(),
            DeviceListStrategy::Cdi | DeviceListStrategy::DeviceNodes => {
                if let Err(error) = cdi::make_capability_nodes(&gpus, &self.args.host_root) {
                    self.metrics.error("capability-nodes");
                    tracing::warn!(%error, "cannot make the device nodes of MIG instances");
                }
                cdi::device_nodes(&gpus, &self.args.host_root)
            }
        };
        let nodes = table.nodes.clone();
        let news = std::mem::take(&mut table.news);
        drop(table);
        // The kubelet hears of what goes first.
        self.serve(lists);
        let renewed = renew.iter().filter_map(|name| self.served.get(name.as_str()));
        if renewed.map(|served| served.renew()).count() > 0 {
            self.listing.send_modify(|listing| listing.renewed += 1);
        }
        self.write(Written { desired, checkpoint: checkpoint.encode(), nodes, sweep });
        self.metrics.node(&status);
        for (device, faults) in &faults {
            self.metrics.faults(device, *faults);
        }
        for step in status.steps.iter().filter(|step| !self.steps.contains(step)) {
            tracing::info!(gpu = step.gpu, action = step.action, result = step.result, message = step.message, "step");
        }
        self.steps.clone_from(&status.steps);
        self.status.send_if_modified(|last| {
            let changed = last.as_ref() != Some(&status);
            if changed {
                *last = Some(status);
            }
            changed
        });
        for occurrence in occurrences.into_iter().chain(news) {
            tracing::info!(warning = occurrence.warning, reason = occurrence.reason, note = occurrence.note, "event");
            if self.occurrences.try_send(occurrence).is_err() {
                self.metrics.error("event-dropped");
            }
        }
        self.scene.send_if_modified(|last| {
            let changed = **last != scene;
            if changed {
                *last = Arc::new(scene);
            }
            changed
        });
        self.listing.send_if_modified(|listing| std::mem::replace(&mut listing.every, list_every) != list_every);
        for order in orders {
            let inputs = self.inputs.clone();
            let tell = async move |ended| {
                if let Some(inputs) = inputs.upgrade() {
                    // Nobody listens any more when the agent ends.
                    let _ = inputs.send(Input::Ended(ended)).await;
                }
            };
            tokio::spawn(act::carry_out(self.search.clone(), order, tell));
        }
        if look {
            self.look.send_replace(());
        }
        self.pulse.send_replace(Pulse { turned: now, unready });
        again
    }

    /// Brings the lists to the open streams; the set of resources changes only where a name comes or goes.
    fn serve(&mut self, lists: BTreeMap<ResourceName, cleave_kubelet::DeviceList>) {
        let before: Vec<ResourceName> = self.served.keys().cloned().collect();
        self.served.retain(|name, _| lists.contains_key(name));
        for (name, devices) in lists {
            if let Some(served) = self.served.get(&name) {
                served.update(devices);
            } else {
                let served = Served::new(name.as_str().to_owned(), Arc::clone(&self.counter), devices);
                self.served.insert(name, Arc::new(served));
            }
        }
        if !self.served.keys().eq(before.iter()) {
            let resources =
                self.served.iter().map(|(name, served)| (name.clone(), Arc::clone(served) as Arc<dyn Resource>));
            self.plugins.set(resources.collect());
        }
    }

    fn write(&self, next: Written) {
        self.written.send_if_modified(|last| {
            let Written { desired, checkpoint, nodes, sweep } = &next;
            let changed = last.desired != *desired
                || last.checkpoint != *checkpoint
                || last.nodes != *nodes
                || last.sweep != *sweep;
            if changed {
                *last = next;
            }
            changed
        });
    }
}

/// The driver may hang: its calls are on a thread of their own, and its events on another.
async fn watch_hardware(
    search: Search,
    inputs: mpsc::Sender<Input>,
    mut look: watch::Receiver<()>,
) -> anyhow::Result<()> {
    let of_worker = search.clone();
    let open = move || Nvml::open(&of_worker).map(|nvml| Box::new(nvml) as Box<dyn Gpus>);
    let worker = Worker::start(Box::new(open)).context("cannot start the NVML thread")?;
    let (_watch, mut events) = EventWatch::start(search).context("cannot start the NVML event thread")?;
    let forward = async {
        while let Some(event) = events.recv().await {
            if inputs.send(Input::Event(event)).await.is_err() {
                break;
            }
        }
    };
    let inventory = async {
        loop {
            let asked = Instant::now();
            let answer = worker.call(INVENTORY_DEADLINE, |gpus| gpus.inventory()).await;
            let uuids: Vec<String> = answer
                .iter()
                .flat_map(|inventory| inventory.gpus.values())
                .flatten()
                .map(|gpu| gpu.uuid.clone())
                .collect();
            if inputs.send(Input::Inventory(answer, asked)).await.is_err() {
                break;
            }
            // What a GPU does not say is not told: the next look asks again.
            let vitals = move |gpus: &dyn Gpus| {
                let said = uuids.into_iter().filter_map(|uuid| gpus.vitals(&uuid).ok().map(|vitals| (uuid, vitals)));
                Ok(said.collect::<BTreeMap<String, Vitals>>())
            };
            if let Ok(vitals) = worker.call(INVENTORY_DEADLINE, vitals).await
                && inputs.send(Input::Vitals(vitals, asked)).await.is_err()
            {
                break;
            }
            tokio::select! {
                // Cancel-safe: a change that is not taken is seen by the next call.
                _ = look.changed() => {}
                () = tokio::time::sleep(INVENTORY) => {}
            }
        }
    };
    tokio::join!(forward, inventory);
    Ok(())
}

async fn watch_mps(
    link: mps::Link,
    sender: watch::Sender<mps::View>,
    inputs: mpsc::Sender<Input>,
) -> anyhow::Result<()> {
    let mut views = sender.subscribe();
    let forward = async {
        while views.changed().await.is_ok() {
            let view = views.borrow_and_update().clone();
            if inputs.send(Input::Mps(view)).await.is_err() {
                break;
            }
        }
    };
    tokio::select! {
        // Neither ends before the agent does.
        () = link.follow(&sender) => {}
        () = forward => {}
    }
    Ok(())
}

fn search(args: &AgentArgs) -> Search {
    Search {
        library: args.nvml_library.clone(),
        host_root: args.host_root.clone(),
        driver_root: args.driver_root.clone(),
    }
}

async fn watch_tenants(
    args: Arc<AgentArgs>,
    (link, names, metrics): (mps::Link, tenants::names::Directory, Metrics),
    scene: watch::Receiver<Arc<Scene>>,
    tell: mpsc::Sender<PodEvent>,
    inputs: mpsc::Sender<Input>,
) -> anyhow::Result<()> {
    let (findings, mut found) = mpsc::channel(4);
    let (search, proc) = (search(&args), args.proc.clone());
    let parts = tenants::Parts { search, proc, link, scene, names, metrics, findings, tell };
    let forward = async {
        while let Some(findings) = found.recv().await {
            if inputs.send(Input::Findings(findings)).await.is_err() {
                break;
            }
        }
    };
    tokio::select! {
        // Neither ends before the agent does.
        ended = tenants::watch(parts) => ended,
        () = forward => Ok(()),
    }
}

/// Device, inode and time of the socket that the kubelet answers at: each start of the kubelet makes another.
type SocketId = (u64, u64, i64, i64);

fn bound_at(socket: &Path) -> Option<SocketId> {
    let found = std::fs::symlink_metadata(socket).ok()?;
    Some((found.dev(), found.ino(), found.mtime(), found.mtime_nsec()))
}

/// Which kubelet answered last.
#[derive(Debug, Default)]
struct Bound {
    seen: Option<SocketId>,
    /// It was another than before, which nobody was told yet.
    news: bool,
}

impl Bound {
    /// Takes in where the socket is bound now, if at all; whether a kubelet has started since this last said so. The first is none that has started.
    fn is_another(&mut self, now: Option<SocketId>) -> bool {
        let Some(now) = now else { return false };
        self.news |= self.seen.replace(now).is_some_and(|before| before != now);
        self.news
    }
}

/// When the kubelet is asked who holds what.
#[derive(Debug, Clone, Copy)]
struct Listing {
    /// Between two questions.
    every: Duration,
    /// Allocations given out: after each, it is asked soon.
    given: u64,
    /// Lists sent again for the sake of its checkpoint: after each, it is asked at once.
    renewed: u64,
}

/// Asks the kubelet who holds what.
async fn watch_pods(
    args: Arc<AgentArgs>,
    inputs: mpsc::Sender<Input>,
    mut listing: watch::Receiver<Listing>,
    metrics: Metrics,
) -> anyhow::Result<()> {
    let socket = args.pod_resources_socket.as_path();
    let pods = PodResources::new(socket, LIST_DEADLINE)?;
    let mut checkpoint = KubeletCheckpoint::of(&args.device_plugin_dir);
    let mut kubelet = Bound::default();
    let (mut renewed, mut written) = (0, WRITTEN);
    loop {
        let asked = Instant::now();
        kubelet.is_another(bound_at(socket));
        let answer = pods.list().await.map_err(|error| {
            metrics.error("pod-resources");
            hardware::chain(&error)
        });
        let on_disk = checkpoint.devices().await.unwrap_or_else(|error| {
            metrics.error("kubelet-checkpoint");
            tracing::warn!(%error, "the kubelet's checkpoint cannot be read: what a kubelet that starts will take for allocated is not known");
            None
        });
        // One that has started lists nothing at first, and registers our plugins only later. Before its list is taken at its word:
        if kubelet.is_another(bound_at(socket)) {
            kubelet.news = false;
            if inputs.send(Input::KubeletStarted).await.is_err() {
                return Ok(());
            }
        }
        if inputs.send(Input::Held(answer, asked, on_disk)).await.is_err() {
            return Ok(());
        }
        let Listing { every, renewed: so_far, .. } = *listing.borrow_and_update();
        let mut given = false;
        if so_far == renewed {
            tokio::select! {
                // Cancel-safe: a change that is not taken is seen by the next call.
                _ = listing.changed() => given = true,
                () = tokio::time::sleep(every) => {}
            }
        }
        let before = std::mem::replace(&mut renewed, listing.borrow().renewed);
        if renewed == before {
            written = WRITTEN;
            if given {
                tokio::time::sleep(LISTED).await;
            }
        } else {
            tokio::time::sleep(written).await;
            written = (written * 2).min(every);
        }
    }
}

/// Notices that the kubelet started: it registers plugins anew, and does not know its pods yet.
async fn watch_kubelet(
    mut states: watch::Receiver<PluginsState>,
    inputs: mpsc::Sender<Input>,
    stopping: CancellationToken,
) -> anyhow::Result<()> {
    let mut seen: u64 = 0;
    while states.changed().await.is_ok() {
        let most =
            states.borrow_and_update().resources.values().map(|state| state.registrations).max().unwrap_or_default();
        if most > seen {
            seen = most;
            if inputs.send(Input::KubeletStarted).await.is_err() {
                break;
            }
        }
    }
    if stopping.is_cancelled() {
        // The main loop has ended it, and says by its own end that the agent may go.
        std::future::pending::<()>().await;
    }
    anyhow::bail!("the device plugins' manager has ended")
}

/// Writes files on a thread where a disk may take its time; what fails is tried again.
async fn write_files(
    args: Arc<AgentArgs>,
    store: Store,
    link: mps::Link,
    mut wanted: watch::Receiver<Written>,
    metrics: Metrics,
) -> anyhow::Result<()> {
    let mut done = Written::default();
    loop {
        let next = wanted.borrow_and_update().clone();
        let (args, store, link, before) = (Arc::clone(&args), store.clone(), link.clone(), done.clone());
        let written =
            tokio::task::spawn_blocking(move || write_once(&args, &store, &link, &before, &next).map(|()| next));
        match written.await.context("the writer failed")? {
            Ok(written) => done = written,
            Err(error) => {
                metrics.error("files");
                tracing::error!(%error, "cannot write what the MPS host and the next agent must know; trying again");
                tokio::time::sleep(WRITE_AGAIN).await;
                continue;
            }
        }
        if wanted.changed().await.is_err() {
            return Ok(());
        }
    }
}

fn write_once(
    args: &AgentArgs,
    store: &Store,
    link: &mps::Link,
    before: &Written,
    next: &Written,
) -> std::io::Result<()> {
    // First what the next agent starts with: should this one be killed in between, no door is closed for want of it. A disk that is full keeps
    // nobody's door shut.
    let saved = if next.checkpoint == before.checkpoint { Ok(()) } else { store.save(&next.checkpoint) };
    if next.desired != before.desired {
        link.write_desired(&next.desired)?;
    }
    saved?;
    if next.sweep {
        link.sweep_folders(|id| next.desired.allocations.contains_key(id));
    }
    if args.device_list_strategy == DeviceListStrategy::Cdi && next.nodes != before.nodes {
        cdi::write(args, &next.nodes)?;
    }
    Ok(())
}

async fn stay_offline(
    folder: offline::Folder,
    spec: Object,
    node: String,
    counter: Arc<Counter>,
    inputs: mpsc::Sender<Input>,
    statuses: watch::Receiver<Option<cleave_api::GpuNodeStatus>>,
    occurrences: mpsc::Receiver<Occurrence>,
) -> anyhow::Result<()> {
    let (objects, read) = mpsc::channel(4);
    tokio::join!(
        folder.follow(spec, objects),
        folder.follow_pods(&node, &counter),
        folder.write(statuses, occurrences),
        forward_objects(read, inputs),
    );
    Ok(())
}

async fn forward_objects(mut objects: mpsc::Receiver<Object>, inputs: mpsc::Sender<Input>) {
    while let Some(object) = objects.recv().await {
        if inputs.send(Input::Object(object)).await.is_err() {
            return;
        }
    }
}

async fn watch_shutdown(args: &AgentArgs, periods: shutdown::Periods, note: watch::Sender<Option<Instant>>) {
    // Without settings it is not known what a shutdown would come to; the kubelet does nothing at one unless it has such.
    if !periods.is_empty() {
        let kubelet = args.host_root.join(args.kubelet_dir.strip_prefix("/").unwrap_or(&args.kubelet_dir));
        shutdown::follow(kubelet, args.proc.clone(), periods, note).await;
    }
}

async fn speak_to_the_api(
    args: Arc<AgentArgs>,
    counter: Arc<Counter>,
    inputs: mpsc::Sender<Input>,
    statuses: watch::Receiver<Option<cleave_api::GpuNodeStatus>>,
    (occurrences, pod_events): (mpsc::Receiver<Occurrence>, mpsc::Receiver<PodEvent>),
    metrics: Metrics,
) -> anyhow::Result<()> {
    let name = args.node_name.clone();
    let client = report::connect(&metrics).await;
    let (server, seen) = watch::channel(report::Server::default());
    let (objects, read) = mpsc::channel(4);
    let (note, began) = watch::channel(None);
    let periods = shutdown::Periods::new(args.shutdown_grace.clone());
    tokio::join!(
        watch_shutdown(&args, periods.clone(), note),
        report::follow(client.clone(), name.clone(), objects, server, metrics.clone()),
        pods::follow(client.clone(), name.clone(), counter, (periods, began), metrics.clone()),
        report::write_status(client.clone(), name.clone(), statuses, seen.clone(), metrics.clone()),
        tenants::tell::write(client.clone(), name.clone(), pod_events, metrics.clone()),
        report::write_events(client, name, occurrences, seen, metrics),
        forward_objects(read, inputs),
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kubelet_that_made_its_socket_anew_has_started_and_the_first_has_not() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("kubelet.sock");
        let mut kubelet = Bound::default();
        assert!(!kubelet.is_another(bound_at(&socket)), "there is none");
        let bind = || drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        bind();
        assert!(!kubelet.is_another(bound_at(&socket)), "the first");
        assert!(!kubelet.is_another(bound_at(&socket)), "the same");
        // Kept, so that the next has another inode.
        std::fs::rename(&socket, folder.path().join("old")).unwrap();
        assert!(!kubelet.is_another(bound_at(&socket)), "it is away");
        bind();
        assert!(kubelet.is_another(bound_at(&socket)));
        assert!(kubelet.is_another(bound_at(&socket)), "until it was told");
        kubelet.news = false;
        assert!(!kubelet.is_another(bound_at(&socket)));
    }

    #[test]
    fn the_next_agent_knows_of_a_door_before_it_opens_and_a_full_disk_keeps_none_shut() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let args = args::tests::parse(&[]).unwrap();
        let next = Written {
            desired: Desired { version: cleave_gpu::mps::wire::VERSION, ..Desired::default() },
            checkpoint: b"{}".to_vec(),
            ..Written::default()
        };
        // A file stands where the folder would be.
        std::fs::write(path("broken"), "").unwrap();
        let write = |state: &str, run: &str| {
            let (store, link) = (Store::new(&path(state)), mps::Link::new(Paths::new(path(run))));
            let done = write_once(&args, &store, &link, &Written::default(), &next);
            (done.is_ok(), path(state).join("agent.json").exists(), link.last_desired().is_some())
        };
        assert_eq!(write("state", "broken"), (false, true, false));
        assert_eq!(write("broken", "run"), (false, false, true));
        assert_eq!(write("state", "run"), (true, true, true));
    }
}
