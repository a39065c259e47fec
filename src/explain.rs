//! `cleave explain pod`: what a pod asks for, what each GPU has, why the pod waits, and what would help.
//!
//! It reads what the operator reads, and asks the same code the same questions; nothing is written. What a pod waits for may differ from what
//! the operator says where the cluster has changed between the two looks.
mod text;

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;
use cleave_api::cordon::Cordons;
use cleave_api::gpunode::GpuStatus;
use cleave_api::names::{GATE, is_served};
use cleave_api::{GpuNode, SharingPolicy};
use cleave_operator::dry;
use cleave_operator::gate::{Cluster, Gatekeeper, Now, PATIENCE, Why};
use cleave_operator::pods::{PodObject, claimant, full_name};
use cleave_operator::read::{AgentPod, NodeObject, Observed};
use cleave_plan::Quantity;
use cleave_plan::ledger::{Ask, Holder, Ledger, Moment, NoFit, Room, Tightest, Waiting};
use cleave_plan::scheduling::refusal;
use cleave_plan::snapshot::{Node as PlanNode, Pod as PlanPod};
use kube::api::ListParams;
use kube::core::DeserializeGuard;
use kube::{Api, Client};
use serde::Serialize;

use crate::status::connect;

/// Nodes that one line names.
const MOST_NAMED: usize = 5;

/// Explains why something is as it is.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// What a pod asks for, what each GPU has for it, why it waits, and what would help.
    Pod(PodArgs),
}

#[derive(Debug, clap::Args)]
struct PodArgs {
    /// The pod; of the namespace `default` where none is named.
    #[arg(value_name = "NAMESPACE/NAME")]
    pod: String,
    /// Its namespace.
    #[arg(short, long, value_name = "NAME")]
    namespace: Option<String>,
    /// How it is shown.
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    output: Output,
    /// The kubeconfig's context.
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
    /// The kubeconfig; else that of KUBECONFIG, of the home directory, or the pod's own account.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Where Cleave runs in the cluster.
    #[arg(long, value_name = "NAME", default_value = "cleave-system")]
    cleave_namespace: String,
    /// Labels of the agents' pods in the cluster.
    #[arg(
        long,
        value_name = "SELECTOR",
        default_value = "app.kubernetes.io/name=cleave,app.kubernetes.io/component=agent"
    )]
    agent_selector: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    /// For a person.
    Text,
    /// For a program.
    Json,
}

/// Reads the cluster and prints what there is to say of the pod.
pub(crate) async fn run(args: Args) -> Result<()> {
    let What::Pod(args) = args.what;
    let name = pod_name(&args.pod, args.namespace.as_deref())?;
    // An error says that one is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = connect(args.context, args.kubeconfig).await.context("finding the API server")?;
    let live = observe(&client, &args.cleave_namespace, &args.agent_selector, &name).await?;
    let Some(told) = explain(&live, &name) else {
        bail!("there is no pod {name}: kubectl get pods --all-namespaces lists those that there are");
    };
    crate::plan::print(&match args.output {
        Output::Text => text::render(&told),
        Output::Json => serde_json::to_string_pretty(&told).context("writing JSON")? + "\n",
    })
}

/// `namespace/name`.
fn pod_name(pod: &str, namespace: Option<&str>) -> Result<String> {
    let (within, name) = match pod.split_once('/') {
        Some((within, name)) => (Some(within), name),
        None => (None, pod),
    };
    if let (Some(within), Some(namespace)) = (within, namespace)
        && within != namespace
    {
        bail!("{pod} is not of the namespace {namespace}: leave one of the two out");
    }
    let of = within.or(namespace).unwrap_or("default");
    if of.is_empty() || name.is_empty() || name.contains('/') {
        bail!("{pod} is no pod's name: it is NAMESPACE/NAME");
    }
    Ok(format!("{of}/{name}"))
}

/// The cluster as the API server tells it now.
#[derive(Debug, Default)]
struct Live {
    cluster: Cluster,
    policies: Vec<DeserializeGuard<SharingPolicy>>,
    /// Seconds of the Unix epoch.
    now: u64,
}

async fn observe(client: &Client, namespace: &str, agent_selector: &str, pod: &str) -> Result<Live> {
    let all = ListParams::default();
    let agents = Api::<AgentPod>::namespaced(client.clone(), namespace);
    let agents = agents.list(&all.clone().labels(agent_selector)).await.context("listing the agents' pods")?;
    let nodes = Api::<NodeObject>::all(client.clone()).list(&all).await.context("listing nodes")?;
    let policies = Api::<DeserializeGuard<SharingPolicy>>::all(client.clone());
    let policies = policies.list(&all).await.context("listing SharingPolicies")?;
    let gpu_nodes =
        Api::<DeserializeGuard<GpuNode>>::all(client.clone()).list(&all).await.context("listing GpuNodes")?;
    let living = all.fields("status.phase!=Succeeded,status.phase!=Failed");
    let mut pods = Api::<PodObject>::all(client.clone()).list(&living).await.context("listing pods")?.items;
    if !pods.iter().any(|one| full_name(&one.metadata) == pod)
        && let Some((namespace, name)) = pod.split_once('/')
    {
        // One that has ended is not among them.
        let named = ListParams::default().fields(&format!("metadata.name={name}"));
        let ended = Api::<PodObject>::namespaced(client.clone(), namespace);
        pods.extend(ended.list(&named).await.with_context(|| format!("reading the pod {pod}"))?.items);
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    Ok(Live::new(pods, nodes.items, gpu_nodes.items, agents.items, policies.items, now))
}

impl Live {
    fn new(
        mut pods: Vec<PodObject>,
        nodes: Vec<NodeObject>,
        gpu_nodes: Vec<DeserializeGuard<GpuNode>>,
        agents: Vec<AgentPod>,
        policies: Vec<DeserializeGuard<SharingPolicy>>,
        now: u64,
    ) -> Self {
        pods.iter_mut().for_each(PodObject::trim);
        let cluster = Cluster {
            pods: pods.into_iter().map(Arc::new).collect(),
            nodes: nodes.into_iter().map(Arc::new).collect(),
            gpu_nodes: gpu_nodes.into_iter().map(Arc::new).collect(),
            agents: agents.into_iter().map(Arc::new).collect(),
            // Which MPS hosts are to be replaced is known to the operator, which says so to those that wait for one.
            hosts: None,
        };
        Self { cluster, policies, now }
    }

    /// As the operator's passes see it.
    fn observed(&self) -> Observed {
        let mut observed = Observed::default();
        self.cluster.nodes.iter().for_each(|node| observed.add_node(node));
        self.cluster.agents.iter().for_each(|pod| observed.add_agent(pod));
        self.cluster.gpu_nodes.iter().for_each(|object| observed.add_gpu_node(object));
        self.policies.iter().for_each(|policy| observed.add_policy(policy));
        observed.set_pods(self.cluster.pods.iter().map(AsRef::as_ref));
        observed
    }

    /// The cluster without those that wait at the gate: what they may get is not theirs yet.
    fn settled(&self) -> Cluster {
        let pods = self.cluster.pods.iter().filter(|pod| !pod.is_ours_to_open());
        Cluster { pods: pods.cloned().collect(), ..self.cluster.clone() }
    }
}

/// What there is to say of a pod: the form of `-o json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Explanation {
    pod: String,
    priority: i32,
    /// Scheduling gates that it still has.
    gates: Vec<String>,
    /// What it asks for: each of one device.
    asks: Vec<Part>,
    verdict: Verdict,
    /// What it has been given.
    holds: Vec<Given>,
    nodes: Vec<NodeView>,
    /// Nodes on which Cleave has no GPUs.
    other_nodes: usize,
    /// What would help, in words.
    help: Vec<String>,
}

/// Units that must be of one device.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Part {
    resource: String,
    units: u32,
}

/// What becomes of the pod.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Verdict {
    /// In one word.
    state: State,
    /// In words for its owner.
    message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
enum State {
    /// It is on a node.
    Bound,
    /// Room is held for it, and the scheduler may bind it.
    Held,
    /// There is room, and it will be let through.
    Fits,
    /// It waits for room.
    Waits,
    /// Nothing here can hold it.
    Never,
    /// Another gate keeps it.
    OtherGate,
    /// It is with the scheduler, and nothing is held for it.
    Scheduler,
    /// It asks for nothing that is served here.
    NotOurs,
    /// It has ended, or is about to.
    Ended,
}

impl State {
    /// Whether room is looked for.
    const fn looks_for_room(self) -> bool {
        matches!(self, Self::Fits) || self.wants_help()
    }

    const fn wants_help(self) -> bool {
        matches!(self, Self::Waits | Self::Never | Self::Scheduler)
    }
}

/// Units of one device that the pod has been given, or that are held for it.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Given {
    node: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<u32>,
    device: String,
    resource: String,
    units: u32,
    /// The container; none where it has not been given them yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    container: Option<String>,
}

/// A node as the pod sees it.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeView {
    name: String,
    /// Why the pod cannot go there, whatever its GPUs have; none where it can.
    #[serde(skip_serializing_if = "Option::is_none")]
    refusal: Option<String>,
    gpus: Vec<GpuView>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct GpuView {
    index: u32,
    uuid: String,
    model: String,
    mode: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    policy: Option<String>,
    /// Why it cannot give anything now; none where it can.
    #[serde(skip_serializing_if = "Option::is_none")]
    unable: Option<String>,
    devices: Vec<DeviceView>,
}

/// What a GPU or MIG device has of one resource.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct DeviceView {
    device: String,
    resource: String,
    total: u32,
    /// Held by pods, or not to be given.
    used: u32,
    /// Kept for pods on their way.
    held: u32,
    free: u32,
    /// What that means for this pod.
    note: String,
}

/// What there is to say of a pod of the cluster; none where there is no such pod.
fn explain(live: &Live, name: &str) -> Option<Explanation> {
    let pod = live.cluster.pods.iter().find(|pod| full_name(&pod.metadata) == name)?;
    let asks = pod.asks();
    let observed = live.observed();
    let mut others = Gatekeeper::default();
    look(&mut others, &live.settled(), &BTreeMap::new(), Now { up: Duration::ZERO, epoch: live.now });
    let empty = Ledger::default();
    let ledger = others.ledger().unwrap_or(&empty);
    let view = View { live, observed: &observed, ledger, pod, name, asks: &asks };
    let verdict = view.verdict();
    let holds = view.holds();
    let nodes = view.nodes(&holds, verdict.state);
    let help = if verdict.state.wants_help() { view.help(&nodes) } else { Vec::new() };
    Some(Explanation {
        pod: name.to_owned(),
        priority: pod.spec.priority.unwrap_or(0),
        gates: pod.spec.scheduling_gates.iter().map(|gate| gate.name.clone()).collect(),
        asks: asks.iter().map(|ask| Part { resource: ask.resource.clone(), units: ask.units.get() }).collect(),
        holds,
        verdict,
        other_nodes: live.cluster.nodes.len().saturating_sub(nodes.len()),
        nodes,
        help,
    })
}

type Demand = BTreeMap<String, cleave_operator::demand::Waiting>;

/// Lets all through who can be, as the operator does within moments; says what became of whom.
fn look(
    keeper: &mut Gatekeeper,
    cluster: &Cluster,
    demand: &Demand,
    now: Now,
) -> (BTreeMap<String, Why>, BTreeMap<String, String>) {
    let mut openings = BTreeMap::new();
    loop {
        let turn = keeper.look(cluster, demand, now);
        let more = turn.more && !turn.openings.is_empty();
        openings.extend(turn.openings.into_iter().map(|opening| (opening.pod, opening.why)));
        if !more {
            let waiting = turn.waiting.into_iter().map(|(pod, waiting)| (pod, waiting.message)).collect();
            return (openings, waiting);
        }
    }
}

/// The cluster, as one pod sees it.
struct View<'a> {
    live: &'a Live,
    observed: &'a Observed,
    /// What is used and held, the pod apart.
    ledger: &'a Ledger,
    pod: &'a PodObject,
    name: &'a str,
    asks: &'a [Ask],
}

impl View<'_> {
    fn verdict(&self) -> Verdict {
        let verdict = |state, message: String| Verdict { state, message };
        let pod = self.pod;
        if matches!(pod.status.phase.as_str(), "Succeeded" | "Failed") {
            return verdict(State::Ended, format!("It has ended: {}.", pod.status.phase));
        }
        let going = pod.metadata.deletion_timestamp.is_some();
        if let Some(node) = pod.node() {
            let going = if going { " It is being deleted, and holds what it has until it is gone." } else { "" };
            return verdict(State::Bound, format!("It is on {node}.{going}"));
        }
        if going {
            return verdict(State::Ended, "It is being deleted, and was on no node.".to_owned());
        }
        let foreign: Vec<&str> =
            pod.spec.scheduling_gates.iter().map(|gate| gate.name.as_str()).filter(|&gate| gate != GATE).collect();
        if !foreign.is_empty() {
            let message =
                format!("It waits at {}: Cleave looks at it once its own gate is the last.", foreign.join(", "));
            return verdict(State::OtherGate, message);
        }
        if pod.spec.scheduling_gates.is_empty() {
            return self.let_through();
        }
        let run = dry::dry_run(self.observed);
        let demand = run.map(|run| run.outcome.waiting).unwrap_or_default();
        let mut keeper = Gatekeeper::default();
        let epoch = self.live.now;
        let (mut openings, mut waiting) =
            look(&mut keeper, &self.live.cluster, &demand, Now { up: Duration::ZERO, epoch });
        if !openings.contains_key(self.name) {
            // What can never be had is waited for a moment: a policy may just have been applied.
            (openings, waiting) = look(&mut keeper, &self.live.cluster, &demand, Now { up: PATIENCE, epoch });
        }
        match openings.get(self.name) {
            Some(Why::Held(placement)) => {
                let nodes: Vec<&str> = placement.nodes.keys().map(String::as_str).collect();
                verdict(State::Fits, format!("There is room for it on {}: it will be let through.", nodes.join(", ")))
            }
            Some(Why::NotOurs) => {
                verdict(State::NotOurs, "It asks for nothing that is served here: it will be let through.".to_owned())
            }
            Some(Why::Never(message)) => {
                verdict(State::Never, format!("It can never fit as things are: {}.", bare(message)))
            }
            None => {
                let message = waiting.get(self.name).map_or("there is no room for it now", String::as_str);
                verdict(State::Waits, format!("It waits: {}.", bare(message)))
            }
        }
    }

    /// Of a pod that has no gate and no node.
    fn let_through(&self) -> Verdict {
        let placement = self.pod.placement.as_ref();
        let (state, message) = match placement {
            Some(placement) if placement.until > self.live.now => {
                let nodes: Vec<&str> = placement.nodes.keys().map(String::as_str).collect();
                let left = placement.until - self.live.now;
                (State::Held, format!("Room is held for it on {} for another {left} s: the scheduler is to bind it.", nodes.join(", ")))
            }
            Some(_) => (
                State::Scheduler,
                "Room was held for it, and no node was found in time: the scheduler still tries, and nothing is held any more.".to_owned(),
            ),
            None if self.asks.is_empty() => (State::NotOurs, "It asks for nothing that is served here.".to_owned()),
            None => (State::Scheduler, "It has no gate, and nothing is held for it: it is the scheduler's to place.".to_owned()),
        };
        Verdict { state, message }
    }

    /// What it has been given, and what is held for it.
    fn holds(&self) -> Vec<Given> {
        let mut holds = Vec::new();
        let mut indices: BTreeMap<(&str, &str), u32> = BTreeMap::new();
        for (node, gpu) in self.gpus() {
            indices.insert((node, &gpu.uuid), gpu.index);
            indices.extend(gpu.slices.iter().map(|slice| ((node, slice.device.as_str()), gpu.index)));
            for held in gpu.allocations.iter().filter(|held| held.pod == self.name) {
                holds.push(Given {
                    node: node.to_owned(),
                    gpu: Some(gpu.index),
                    device: held.device.clone(),
                    resource: held.resource.clone(),
                    units: u32::try_from(held.ids.len()).unwrap_or(u32::MAX),
                    container: Some(held.container.clone()),
                });
            }
        }
        let ended = matches!(self.pod.status.phase.as_str(), "Succeeded" | "Failed");
        let placement = self.pod.placement.as_ref().filter(|_| holds.is_empty() && !ended);
        for (node, held) in placement.iter().flat_map(|placement| &placement.nodes) {
            let past = self
                .pod
                .node()
                .map_or(placement.is_some_and(|note| note.until <= self.live.now), |bound| bound != node);
            for held in held.iter().filter(|_| !past) {
                holds.push(Given {
                    node: node.clone(),
                    gpu: indices.get(&(node.as_str(), held.device.as_str())).copied(),
                    device: held.device.clone(),
                    resource: held.resource.clone(),
                    units: held.units,
                    container: None,
                });
            }
        }
        holds
    }

    /// GPUs as the agents report them, by node.
    fn gpus(&self) -> impl Iterator<Item = (&str, &GpuStatus)> {
        self.observed
            .nodes
            .iter()
            .flat_map(|(name, node)| node.reported().unwrap_or_default().iter().map(move |gpu| (name.as_str(), gpu)))
    }

    /// Nodes on which Cleave has GPUs.
    fn nodes(&self, holds: &[Given], state: State) -> Vec<NodeView> {
        let wanted = self.wanted();
        let free = self.free();
        let ours = self.observed.nodes.iter().filter(|(_, node)| node.has_object());
        ours.map(|(name, node)| {
            let planned = plan_node(name, node);
            let refusal = match node.gpu_node.as_ref().map(|object| &object.0) {
                Some(Err(invalid)) => Some(format!("its GpuNode cannot be read: {}", invalid.error)),
                _ => refusal(&wanted, &planned)
                    .or_else(|| lack(free.get(name.as_str()), &wanted.requests))
                    .or_else(|| silent(node)),
            };
            let cordons = node.cordons();
            let rooms = self.ledger.rooms(name);
            let spec = node.object().map(|object| object.spec.gpus.as_slice()).unwrap_or_default();
            let gpus = node.reported().unwrap_or_default().iter().map(|gpu| {
                let spec = spec.iter().find(|spec| spec.uuid == gpu.uuid);
                let unable = unable(gpu, &cordons);
                let device =
                    |room| self.device(room, unable.as_deref(), holds.iter().filter(|held| held.node == *name), state);
                let devices = rooms.iter().filter(|room| is_of(room, gpu)).map(device).collect();
                GpuView {
                    index: gpu.index,
                    uuid: gpu.uuid.clone(),
                    model: gpu.model.clone(),
                    mode: gpu.mode.clone(),
                    policy: spec.and_then(|spec| spec.policy.clone()),
                    unable,
                    devices,
                }
            });
            NodeView { name: name.clone(), refusal, gpus: gpus.collect() }
        })
        .collect()
    }

    fn device<'h>(
        &self,
        room: &Room,
        unable: Option<&str>,
        holds: impl Iterator<Item = &'h Given>,
        state: State,
    ) -> DeviceView {
        let largest = self.asks.iter().filter(|ask| ask.resource == room.resource).map(|ask| ask.units.get()).max();
        let own: u32 = holds
            .filter(|held| held.device == room.device && held.resource == room.resource)
            .map(|held| held.units)
            .sum();
        let note = match (largest, unable) {
            (Some(_), _) if own > 0 => format!("{own} for this pod"),
            (_, Some(unable)) => unable.to_owned(),
            (None, _) => "not asked for".to_owned(),
            _ if !state.looks_for_room() => String::new(),
            (Some(most), _) if most > room.capacity => format!("too small for {most}"),
            (Some(most), _) if most > room.free => format!("{} too few for {most}", most - room.free),
            (Some(_), _) => "has room".to_owned(),
        };
        DeviceView {
            device: room.device.clone(),
            resource: room.resource.clone(),
            total: room.capacity,
            used: room.used,
            held: room.reserved,
            free: room.free,
            note,
        }
    }

    /// The pod as planning knows it.
    fn wanted(&self) -> PlanPod {
        let plain = || PlanPod { requests: self.pod.spec.requests.clone(), ..PlanPod::default() };
        claimant(self.pod).map_or_else(plain, |claimant| claimant.pod)
    }

    /// What is free of each node's other resources, in thousandths.
    fn free(&self) -> BTreeMap<&str, BTreeMap<&str, u64>> {
        let mut free: BTreeMap<&str, BTreeMap<&str, u64>> = BTreeMap::new();
        for (name, node) in &self.observed.nodes {
            let amounts = node.allocatable.iter().filter(|(resource, _)| !is_served(resource));
            free.insert(
                name,
                amounts.map(|(resource, amount)| (resource.as_str(), amount.milli().unwrap_or(0))).collect(),
            );
        }
        for pod in self.live.cluster.pods.iter().filter(|pod| full_name(&pod.metadata) != self.name) {
            let living = !matches!(pod.status.phase.as_str(), "Succeeded" | "Failed");
            let Some(amounts) = pod.node().filter(|_| living).and_then(|node| free.get_mut(node)) else { continue };
            let one = [("pods".to_owned(), Quantity::whole(1))];
            for (resource, amount) in pod.spec.requests.iter().chain(one.iter().map(|(name, amount)| (name, amount))) {
                if let Some(left) = amounts.get_mut(resource.as_str()) {
                    *left = left.saturating_sub(amount.milli().unwrap_or(0));
                }
            }
        }
        free
    }

    /// What would help a pod that waits.
    fn help(&self, nodes: &[NodeView]) -> Vec<String> {
        let mut help = Vec::new();
        if self.asks.is_empty() {
            return help;
        }
        let open: BTreeSet<&str> =
            nodes.iter().filter(|node| node.refusal.is_none()).map(|node| node.name.as_str()).collect();
        help.extend(self.leaving(&open));
        let mut closed: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for node in nodes {
            if let Some(refusal) = &node.refusal
                && self.ledger.fit(self.asks, [node.name.as_str()], 1, &Tightest).is_ok()
            {
                closed.entry(refusal).or_default().push(&node.name);
            }
        }
        for (refusal, nodes) in &closed {
            let (named, more) =
                (nodes.iter().take(MOST_NAMED).copied().collect::<Vec<_>>(), nodes.len().saturating_sub(MOST_NAMED));
            let named = named.join(", ") + &if more > 0 { format!(" and {more} more") } else { String::new() };
            let have = if nodes.len() == 1 { "has" } else { "have" };
            help.push(format!("{named} {have} room, but: {refusal}."));
        }
        if open.is_empty() && !closed.is_empty() {
            return help;
        }
        help.extend(self.resources(nodes, &open));
        help
    }

    /// Who would have to leave.
    fn leaving(&self, open: &BTreeSet<&str>) -> Option<String> {
        let pods = self.live.cluster.pods.iter().filter(|pod| pod.node().is_some());
        // What is on a GPU that gives nothing now frees nothing.
        let unable: BTreeSet<(&str, &str)> = self
            .gpus()
            .filter(|(node, gpu)| {
                let cordons = self.observed.nodes.get(*node).map(cleave_operator::read::Node::cordons);
                unable(gpu, &cordons.unwrap_or_default()).is_some()
            })
            .flat_map(|(node, gpu)| gpu.allocations.iter().map(move |held| (node, held.pod.as_str())))
            .collect();
        let mut holders = BTreeMap::new();
        for pod in pods {
            let name = full_name(&pod.metadata);
            if pod.node().is_some_and(|node| unable.contains(&(node, name.as_str()))) {
                continue;
            }
            let started = pod.metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second());
            holders.insert(
                name,
                Holder {
                    priority: pod.spec.priority.unwrap_or(0),
                    started: Moment(u64::try_from(started).unwrap_or(0)),
                    protected: false,
                    ending: pod.metadata.deletion_timestamp.is_some(),
                },
            );
        }
        // Whoever it is: it may be ended by hand, or end by itself.
        let others: BTreeMap<String, Holder> = holders
            .iter()
            .map(|(name, holder)| (name.clone(), Holder { priority: holder.priority.min(i32::MAX - 1), ..*holder }))
            .collect();
        let waiting = Waiting { pod: self.name, priority: i32::MAX, asks: self.asks };
        let found = self.ledger.preempt(waiting, open.iter().copied(), &others)?;
        let on: BTreeSet<String> = found.takes.iter().map(|take| self.gpu_of(&found.node, &take.device)).collect();
        let on = on.into_iter().collect::<Vec<_>>().join(", ");
        if found.victims.is_empty() {
            let fits = self.ledger.fit(self.asks, [found.node.as_str()], 1, &Tightest).is_ok();
            let why = if fits { "has room now" } else { "will have room when pods that are being deleted are gone" };
            return Some(format!("{} of {} {why}.", on, found.node));
        }
        let priority = self.pod.spec.priority.unwrap_or(0);
        let named = |victim: &String| {
            let of = holders.get(victim).map_or(0, |holder| holder.priority);
            let order = match of.cmp(&priority) {
                Ordering::Less => "lower",
                Ordering::Equal => "the same",
                Ordering::Greater => "higher",
            };
            format!("{victim} (of {order} priority)")
        };
        let victims: Vec<String> = found.victims.iter().map(named).collect();
        Some(format!("It would fit on {on} of {} if these were gone: {}.", found.node, victims.join(", ")))
    }

    /// What of the resources themselves stands in the way.
    fn resources(&self, nodes: &[NodeView], open: &BTreeSet<&str>) -> Vec<String> {
        let mut help = Vec::new();
        let resources: BTreeSet<&str> = self.asks.iter().map(|ask| ask.resource.as_str()).collect();
        for resource in resources {
            let most =
                self.asks.iter().filter(|ask| ask.resource == resource).map(|ask| ask.units.get()).max().unwrap_or(0);
            let offers = |node: &&NodeView| {
                node.gpus.iter().flat_map(|gpu| &gpu.devices).any(|device| device.resource == resource)
            };
            let here: Vec<&NodeView> =
                nodes.iter().filter(|node| open.contains(node.name.as_str())).filter(offers).collect();
            if here.is_empty() {
                let elsewhere = nodes.iter().any(|node| offers(&node));
                help.push(if elsewhere {
                    format!("{resource} is offered only where the pod cannot go: a SharingPolicy may make it of a GPU elsewhere.")
                } else {
                    format!("No GPU offers {resource}: a SharingPolicy may make it of one.")
                });
                continue;
            }
            let largest = here
                .iter()
                .flat_map(|node| &node.gpus)
                .flat_map(|gpu| &gpu.devices)
                .filter(|device| device.resource == resource)
                .map(|device| device.total)
                .max();
            if let Some(largest) = largest.filter(|largest| most > *largest) {
                help.push(format!("It asks for {most} {resource} of one GPU, and the largest has {largest}: ask for {largest} at most in one container, or a SharingPolicy with more of them for each GPU."));
            }
        }
        let fit = self.ledger.fit(self.asks, open.iter().copied(), 1, &Tightest);
        if matches!(fit, Err(NoFit::TooMany)) {
            help.push("Its containers together ask for more than any node has, even empty: a node with more GPUs, or fewer containers in one pod.".to_owned());
        }
        help
    }

    /// A device as people name it.
    fn gpu_of(&self, node: &str, device: &str) -> String {
        let of = |gpu: &GpuStatus| gpu.uuid == device || gpu.slices.iter().any(|slice| slice.device == device);
        let found = self.gpus().find(|(on, gpu)| *on == node && of(gpu));
        found.map_or_else(|| device.to_owned(), |(_, gpu)| format!("GPU {}", gpu.index))
    }
}

/// A text of one sentence without its full stop, for use within another.
fn bare(message: &str) -> &str {
    message.trim_end().trim_end_matches('.')
}

/// Why a GPU can give nothing now.
fn unable(gpu: &GpuStatus, cordons: &Cordons) -> Option<String> {
    if let Some(reason) = cordons.0.get(&gpu.uuid) {
        return Some(if reason.is_empty() { "cordoned".to_owned() } else { format!("cordoned: {reason}") });
    }
    let why = if gpu.health.message.is_empty() { &gpu.health.reason } else { &gpu.health.message };
    (!gpu.health.healthy).then(|| if why.is_empty() { "not healthy".to_owned() } else { format!("not healthy: {why}") })
}

/// Why a node whose labels and taints would do gives nothing.
fn silent(node: &cleave_operator::read::Node) -> Option<String> {
    match node.agent {
        None => Some("no agent of Cleave runs on it".to_owned()),
        Some(agent) if !agent.ready => Some("its agent is not ready".to_owned()),
        Some(_) if node.reported().is_none() => Some("its agent has not told what it has".to_owned()),
        Some(_) => None,
    }
}

fn plan_node(name: &str, node: &cleave_operator::read::Node) -> PlanNode {
    PlanNode {
        name: name.to_owned(),
        labels: node.labels.clone(),
        taints: node.taints.clone(),
        unschedulable: node.unschedulable,
        allocatable: node.allocatable.clone(),
        ..PlanNode::default()
    }
}

/// What a node has too little of besides GPUs.
fn lack(free: Option<&BTreeMap<&str, u64>>, requests: &BTreeMap<String, Quantity>) -> Option<String> {
    let none = BTreeMap::new();
    let free = free.unwrap_or(&none);
    let amount = |milli: u64| if milli.is_multiple_of(1000) { (milli / 1000).to_string() } else { format!("{milli}m") };
    if free.get("pods").is_some_and(|left| *left < 1000) {
        return Some("it has as many pods as it may".to_owned());
    }
    requests.iter().filter(|(resource, _)| !is_served(resource)).find_map(|(resource, wanted)| {
        let (wanted, left) = (wanted.milli().unwrap_or(0), free.get(resource.as_str()).copied().unwrap_or(0));
        (wanted > left).then(|| format!("too little {resource}: {} wanted, {} free", amount(wanted), amount(left)))
    })
}

/// Whether a device is a GPU, a part of it, or what it will be.
fn is_of(room: &Room, gpu: &GpuStatus) -> bool {
    room.device.starts_with(&gpu.uuid) || gpu.slices.iter().any(|slice| slice.device == room.device)
}

#[cfg(test)]
mod tests;
