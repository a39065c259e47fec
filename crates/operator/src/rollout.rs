//! MPS hosts take a new release when nothing uses MPS on their node. Off unless asked for.
//!
//! An MPS daemon ends with its host's pod, and every client under it: so their `DaemonSet` replaces a pod only when somebody deletes it (`OnDelete`), and
//! the operator does that here, at a moment when no pod has shares on the node or is on its way to some.
//!
//! | an MPS host | |
//! |---|---|
//! | of its `DaemonSet`'s newest revision that serves | stays |
//! | of an older one, where somebody uses MPS, or the agent is of an older one too | stays |
//! | of an older one, where nobody does | nothing new is held for pods there; if that is still so [`SETTLE`] later, its pod is deleted |
//! | that is going, not there or not ready | nothing is held for pods there, for [`PATIENCE`] at most; others are replaced when it has served for [`STEADY`] |
//! | that does not serve within [`PATIENCE`] | stops it all, and is told, until it serves or its `DaemonSet` is changed again |
//!
//! [`Rollout`] is pure: views of nodes go in, pods to delete come out. It is part of the gate's look, so that nothing is held for a pod between the
//! moment when a node is found idle and the moment from when on nothing is. What it remembers are times alone: which hosts are outdated, going
//! or not ready is read from the cluster each time, so whoever leads next goes on from there. [`replace`] talks to the API server.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cleave_api::GpuNode;
use cleave_api::names::is_mps;
use cleave_plan::ledger::{Ask, Ledger, Place};
use futures::FutureExt as _;
use http::Request;
use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::ListParams;
use kube::runtime::reflector::Store;
use kube::{Api, Client, Resource};
use serde::Deserialize;

use crate::pods::full_name;
use crate::read::{self, AgentPod, AgentStore};

/// How long nothing must use MPS on a node while nothing new is held there, before its host is replaced: what the watches have not told yet
/// (pods that pass no gate) comes within it.
pub const SETTLE: Duration = Duration::from_secs(2);
/// How long a host may take from its end until its successor serves.
pub const PATIENCE: Duration = Duration::from_secs(300);
/// For how long a host must serve before others are replaced: one that starts and ends again and again serves for moments.
pub const STEADY: Duration = Duration::from_secs(10);
/// How often is looked at most: the gate looks at each change of a pod.
pub const PERIOD: Duration = Duration::from_secs(1);
/// How long is waited where the API server refuses to have a pod deleted.
const REFUSED: Duration = Duration::from_secs(60);
/// Of so many hosts one is replaced at once, when one of the newest revision has shown that it serves.
const ONE_OF: usize = 10;
/// How long one request may take; see [`crate::leader::CLAIM`].
const WRITE: Duration = Duration::from_secs(5);
/// The label by which a `DaemonSet`'s controller says of which revision a pod is; `ControllerRevision`s have it too.
const HASH: &str = "controller-revision-hash";
/// Taints of a node that has not been heard of.
const UNHEARD: [&str; 2] = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"];
/// The agent's word for a daemon that serves.
const ACTIVE: &str = "Active";
/// Nodes that a message names.
const NAMED: usize = 4;

/// What is kept of a `DaemonSet`'s revision: not the template that it was.
#[derive(Debug, Clone, Default, Deserialize, Resource)]
#[resource(inherit = "ControllerRevision")]
pub struct Revision {
    /// Labels and owner.
    pub metadata: ObjectMeta,
    /// The newest has the highest, also when that is an old template again.
    #[serde(default)]
    pub revision: i64,
}

/// MPS hosts as the watches last told of them.
#[derive(Debug, Clone, Default)]
pub struct Hosts {
    /// Their pods.
    pub pods: Vec<Arc<AgentPod>>,
    /// Revisions of their `DaemonSet`, and of the agents'.
    pub revisions: Vec<Arc<Revision>>,
}

/// What keeps [`Hosts`] up to date.
#[derive(Clone)]
pub(crate) struct Watched {
    pub(crate) pods: AgentStore,
    pub(crate) revisions: Store<Revision>,
    /// The namespace that they are in.
    pub(crate) namespace: String,
}

impl Watched {
    /// Nothing before both lists were had: the gate does not wait for them.
    pub(crate) fn state(&self) -> Option<Hosts> {
        let listed = matches!(self.pods.wait_until_ready().now_or_never(), Some(Ok(())))
            && matches!(self.revisions.wait_until_ready().now_or_never(), Some(Ok(())));
        listed.then(|| Hosts { pods: self.pods.state(), revisions: self.revisions.state() })
    }
}

/// The newest revision of each `DaemonSet`, by its UID.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Newest(BTreeMap<String, (i64, String)>);

impl Newest {
    /// Of revisions. One that nobody owns, or without the label, says nothing.
    pub fn of<'a>(revisions: impl IntoIterator<Item = &'a Revision>) -> Self {
        let mut newest: BTreeMap<String, (i64, String)> = BTreeMap::new();
        for Revision { metadata, revision } in revisions {
            let (Some(owner), Some(hash)) = (controller(metadata), hash(metadata)) else { continue };
            let entry = newest.entry(owner.uid.clone()).or_insert_with(|| (*revision, hash.to_owned()));
            if entry.0 < *revision {
                *entry = (*revision, hash.to_owned());
            }
        }
        Self(newest)
    }

    /// Whether a pod of this `DaemonSet` and revision is to be replaced. Of a `DaemonSet` that nothing is known of none is.
    pub fn is_outdated(&self, set: &str, hash: &str) -> bool {
        self.0.get(set).is_some_and(|(_, newest)| newest != hash)
    }

    /// The same of a pod.
    pub fn is_outdated_pod(&self, pod: &AgentPod) -> bool {
        let set = controller(&pod.metadata).map_or("", |owner| &owner.uid);
        self.is_outdated(set, hash(&pod.metadata).unwrap_or_default())
    }
}

fn controller(metadata: &ObjectMeta) -> Option<&OwnerReference> {
    metadata.owner_references.iter().flatten().find(|owner| owner.controller == Some(true) && owner.kind == "DaemonSet")
}

fn hash(metadata: &ObjectMeta) -> Option<&str> {
    metadata.labels.as_ref()?.get(HASH).map(String::as_str)
}

/// A node's MPS host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Host {
    /// Its pod, `namespace/name`.
    pub pod: String,
    /// The pod's UID.
    pub uid: String,
    /// The revision that it is of.
    pub hash: String,
    /// Name and UID of its `DaemonSet`.
    pub set: (String, String),
    /// Its `DaemonSet` has a newer revision.
    pub outdated: bool,
    /// It is ready.
    pub ready: bool,
    /// It is being deleted.
    pub leaving: bool,
}

impl Host {
    fn of(pod: &AgentPod, newest: &Newest) -> Self {
        let set = controller(&pod.metadata).map(|owner| (owner.name.clone(), owner.uid.clone())).unwrap_or_default();
        let hash = hash(&pod.metadata).unwrap_or_default().to_owned();
        Self {
            pod: full_name(&pod.metadata),
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            outdated: newest.is_outdated_pod(pod),
            ready: read::is_ready(pod),
            leaving: pod.metadata.deletion_timestamp.is_some(),
            hash,
            set,
        }
    }
}

/// MPS hosts by node. Where one goes and another is there, the other.
pub fn by_node<'a>(hosts: &'a Hosts, newest: &Newest) -> BTreeMap<&'a str, Host> {
    let mut found: BTreeMap<&str, Host> = BTreeMap::new();
    for pod in &hosts.pods {
        let Some(node) = pod.spec.node_name.as_deref() else { continue };
        let host = Host::of(pod, newest);
        if found.get(node).is_none_or(|known| (known.leaving, &known.pod) > (host.leaving, &host.pod)) {
            found.insert(node, host);
        }
    }
    found
}

/// What a `GpuNode` says of MPS on its node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mps {
    /// A daemon that does not serve, in words; not where the GPU itself is what is in the way.
    pub trouble: Option<String>,
    /// Who uses MPS, in words; or that this is not known.
    pub user: Option<String>,
    /// Resources whose names might be those of shares under MPS, and that are turns here.
    turns: BTreeSet<String>,
}

impl Mps {
    /// Of a node's object; `ready` is whether its agent is.
    pub fn of(object: &GpuNode, ready: bool) -> Self {
        let mut found = Self { turns: turns(object), ..Self::default() };
        let Some(status) = &object.status else {
            found.user = Some("its agent has not told who uses it".to_owned());
            return found;
        };
        for gpu in status.gpus.iter().filter(|gpu| gpu.health.class.is_empty()) {
            let idle = gpu.mps.iter().find(|daemon| daemon.state != ACTIVE);
            let tell = |daemon: &cleave_api::gpunode::MpsStatus| {
                let state = if daemon.state.is_empty() { "not there" } else { &daemon.state };
                let why = if daemon.message.is_empty() { String::new() } else { format!(": {}", daemon.message) };
                format!("the MPS daemon of {} is {state}{why}", daemon.device)
            };
            found.trouble = found.trouble.or_else(|| idle.map(tell));
        }
        let heard = object.metadata.generation.is_none_or(|generation| status.observed_generation >= generation);
        let held = || status.gpus.iter().flat_map(|gpu| &gpu.allocations).find(|held| found.serves(&held.resource));
        // Also where nobody can say who it is: what nobody knows to be free counts as in use.
        let used =
            || status.gpus.iter().flat_map(|gpu| &gpu.slices).find(|s| s.in_use > 0 && found.serves(&s.resource));
        let user = if !ready {
            Some("its agent is not ready".to_owned())
        } else if !heard {
            Some("its agent has not read what was written to it".to_owned())
        } else if let Some(held) = held() {
            Some(format!("{} holds {} of {}", held.pod, held.ids.len(), held.resource))
        } else {
            used().map(|slice| format!("{} of {} of {} are in use", slice.in_use, slice.resource, slice.device))
        };
        Self { user, ..found }
    }

    /// Whether a resource is, or may be, shares under MPS on this node.
    pub fn serves(&self, resource: &str) -> bool {
        is_mps(resource) && !self.turns.contains(resource)
    }
}

/// Time-sliced resources that go by names that shares could have. A name that is both on one node is not among them.
fn turns(object: &GpuNode) -> BTreeSet<String> {
    let partitions = || object.spec.gpus.iter().map(|gpu| &gpu.partition);
    let instances = || partitions().flat_map(|partition| partition.mig.iter().flatten().map(|mig| &mig.partition));
    let sliced = partitions().filter_map(|partition| partition.time_slicing.as_ref());
    let sliced = sliced.chain(instances().filter_map(|partition| partition.time_slicing.as_ref()));
    let mut turns: BTreeSet<String> =
        sliced.map(|turns| turns.resource.clone()).filter(|resource| is_mps(resource)).collect();
    let shared = partitions().filter_map(|partition| partition.mps.as_ref());
    let shared = shared.chain(instances().filter_map(|partition| partition.mps.as_ref()));
    for slices in shared.flat_map(|shares| &shares.slices) {
        turns.remove(&slices.resource);
    }
    // What a GPU is still served as, while pods hold what would go.
    for gpu in object.status.iter().flat_map(|status| &status.gpus) {
        for slice in gpu.slices.iter().filter(|slice| gpu.mps.iter().any(|daemon| daemon.device == slice.device)) {
            turns.remove(&slice.resource);
        }
    }
    turns
}

/// A node as it is looked at.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct View {
    /// Its MPS host; none where there should be one.
    pub host: Option<Host>,
    /// A daemon that does not serve, in words.
    pub trouble: Option<String>,
    /// Who uses MPS there or is on the way to it, in words.
    pub busy: Option<String>,
    /// It is not heard of, or was taken out of service: what is wrong there says nothing of a release.
    pub excused: bool,
}

impl View {
    /// Why its host does not serve, and whether that is because the host itself is down. Nothing of one that is outdated, which need not, unless it
    /// was `asked` to go.
    fn lacks(&self, asked: Option<&str>) -> Option<(String, bool)> {
        let Some(host) = &self.host else { return Some(("it has no MPS host".to_owned(), true)) };
        let pod = &host.pod;
        match host {
            Host { leaving: true, .. } => Some((format!("{pod} is ending"), true)),
            Host { outdated: true, uid, .. } => (asked == Some(uid)).then(|| (format!("{pod} is to end"), true)),
            Host { ready: false, .. } => Some((format!("{pod} is not ready"), true)),
            _ => self.trouble.clone().map(|trouble| (trouble, false)),
        }
    }
}

/// Whether a node is not heard of, or an administrator keeps pods away from it.
pub fn is_excused(node: &cleave_plan::snapshot::Node) -> bool {
    node.unschedulable || node.taints.iter().any(|taint| UNHEARD.contains(&taint.key.as_str()))
}

/// Who is on the way to MPS on each node, or has it as far as the ledger knows: one of them, in words.
pub fn on_the_way(ledger: &Ledger, serves: impl Fn(&str, &str) -> bool) -> BTreeMap<&str, String> {
    let mut found: BTreeMap<&str, String> = BTreeMap::new();
    for (pod, claim) in ledger.claims() {
        let nodes: Vec<&str> = match &claim.place {
            Place::OneOf { nodes, .. } => nodes.iter().map(String::as_str).collect(),
            Place::Bound(node) => vec![node],
        };
        for node in nodes.into_iter().filter(|node| claim.asks.iter().any(|ask| serves(node, &ask.resource))) {
            found.entry(node).or_insert_with(|| format!("room is held for {pod}"));
        }
    }
    for (pod, nomination) in ledger.nominations() {
        found.entry(&nomination.node).or_insert_with(|| format!("room is made for {pod}"));
    }
    found
}

/// A host whose pod is to be deleted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Replacement {
    /// The node.
    pub node: String,
    /// What is there.
    pub host: Host,
}

impl Replacement {
    /// The `DaemonSet`, for events.
    pub(crate) fn regarding(&self) -> ObjectReference {
        regarding(&self.host)
    }
}

fn regarding(host: &Host) -> ObjectReference {
    ObjectReference {
        api_version: Some("apps/v1".to_owned()),
        kind: Some("DaemonSet".to_owned()),
        namespace: host.pod.split_once('/').map(|(namespace, _)| namespace.to_owned()),
        name: Some(host.set.0.clone()),
        uid: Some(host.set.1.clone()),
        ..ObjectReference::default()
    }
}

/// What is to be done now.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Step {
    /// Pods to delete.
    pub replace: Vec<Replacement>,
    /// Why no more are, if that is so, and that was not so before; and of which `DaemonSet`.
    pub news: Option<(String, ObjectReference)>,
    /// No more are.
    pub stopped: bool,
    /// Nodes whose host is outdated and stays for now, and why.
    pub waiting: BTreeMap<String, String>,
    /// Hosts of older revisions.
    pub outdated: usize,
    /// When to look again though nothing changes, from now.
    pub next: Option<Duration>,
}

/// A node whose host does not serve.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Away {
    since: Duration,
    why: String,
    /// The host itself is down, and not one of its daemons.
    down: bool,
    /// For too long.
    late: bool,
    /// Since when it serves again, which has to last.
    serving: Option<Duration>,
}

/// What is remembered from one look to the next. Times are since the process started.
#[derive(Debug, Clone, Default)]
pub struct Rollout {
    /// Nodes where nothing is held any more: which host is to go, and since when.
    closing: BTreeMap<String, (String, Duration)>,
    /// Hosts that were deleted, by node, until another serves.
    asked: BTreeMap<String, String>,
    away: BTreeMap<String, Away>,
    /// The API server refused; until when nothing is tried.
    paused: Option<Duration>,
    /// What was told last.
    told: Option<String>,
}

impl Rollout {
    /// Whether nothing may be held for pods that want MPS on a node.
    pub fn withholds(&self, node: &str) -> bool {
        self.closing.contains_key(node) || self.away.get(node).is_some_and(|away| away.down && !away.late)
    }

    /// What to add for a pod that waits and could go to these nodes; empty where nothing that it asks for is withheld.
    pub fn in_words(&self, asks: &[Ask], nodes: &[&str]) -> String {
        let nodes = nodes.iter().copied().filter(|_| asks.iter().any(|ask| is_mps(&ask.resource)));
        let withheld: Vec<&str> = nodes.filter(|node| self.withholds(node)).take(NAMED).collect();
        if withheld.is_empty() {
            return String::new();
        }
        format!("; the MPS host of {} is being replaced, or not ready", withheld.join(", "))
    }

    /// Looks at the nodes.
    pub fn look(&mut self, nodes: &BTreeMap<String, View>, up: Duration) -> Step {
        self.see(nodes, up);
        let mut step = Step::default();
        let stopped = self.stopped(nodes);
        step.stopped = stopped.is_some();
        if stopped != self.told {
            let set = nodes.values().find_map(|view| view.host.as_ref()).map(regarding);
            step.news = stopped.clone().zip(set);
            self.told = stopped;
        }
        self.choose(nodes, up, step.stopped);
        for (name, (_, since)) in &self.closing {
            let due = since.saturating_add(SETTLE);
            let host = nodes.get(name).and_then(|view| view.host.clone());
            match host.filter(|_| due <= up) {
                Some(host) => step.replace.push(Replacement { node: name.clone(), host }),
                None => step.look_at(due, up),
            }
        }
        for away in self.away.values() {
            match away.serving {
                Some(serving) => step.look_at(serving.saturating_add(STEADY), up),
                None if away.late => {}
                None => step.look_at(away.since.saturating_add(PATIENCE), up),
            }
        }
        let is_outdated = |view: &&View| view.host.as_ref().is_some_and(|host| host.outdated && !host.leaving);
        step.outdated = nodes.values().filter(is_outdated).count();
        if let Some(until) = self.paused.filter(|until| step.outdated > 0 && *until > up) {
            step.look_at(until, up);
        }
        for (name, view) in nodes.iter().filter(|(name, view)| is_outdated(view) && !self.closing.contains_key(*name)) {
            let why = view.busy.clone().unwrap_or_else(|| "others are replaced first".to_owned());
            step.waiting.insert(name.clone(), why);
        }
        step
    }

    /// A pod was deleted.
    pub fn replaced(&mut self, replacement: &Replacement, up: Duration) {
        let Replacement { node, host } = replacement;
        self.closing.remove(node);
        self.asked.insert(node.clone(), host.uid.clone());
        let why = format!("{} is to end", host.pod);
        self.away.insert(node.clone(), Away { since: up, why, down: true, late: false, serving: None });
    }

    /// A pod is not to be deleted after all, or is gone: the next look sees what is there.
    pub fn given_up(&mut self, node: &str) {
        self.closing.remove(node);
    }

    /// The API server did not have a pod deleted. Nothing is kept from pods meanwhile.
    pub fn refused(&mut self, node: &str, up: Duration) {
        self.closing.remove(node);
        self.paused = Some(up.saturating_add(REFUSED));
    }

    /// Takes in what serves and what does not.
    fn see(&mut self, nodes: &BTreeMap<String, View>, up: Duration) {
        self.away.retain(|name, _| nodes.contains_key(name));
        for (name, view) in nodes {
            let since = self.away.get(name).map_or(up, |away| away.since);
            if let Some((why, down)) = view.lacks(self.asked.get(name).map(String::as_str)) {
                let late = up.saturating_sub(since) >= PATIENCE;
                self.away.insert(name.clone(), Away { since, why, down, late, serving: None });
            } else if let Some(away) = self.away.get_mut(name) {
                let serving = *away.serving.get_or_insert(up);
                away.down = false;
                if up.saturating_sub(serving) >= STEADY || view.host.as_ref().is_some_and(|host| host.outdated) {
                    self.away.remove(name);
                }
            }
        }
        let away = &self.away;
        self.asked.retain(|name, _| away.get(name).is_some_and(|away| !away.late));
        self.closing.retain(|name, (uid, _)| {
            let host = nodes.get(name).filter(|view| view.busy.is_none()).and_then(|view| view.host.as_ref());
            host.is_some_and(|host| host.outdated && !host.leaving && host.uid == *uid)
        });
        self.paused = self.paused.filter(|until| *until > up);
    }

    /// Why no more hosts are replaced, in words.
    fn stopped(&self, nodes: &BTreeMap<String, View>) -> Option<String> {
        let counts = |name: &str| nodes.get(name).is_some_and(|view| !view.excused);
        let late: Vec<_> = self.away.iter().filter(|(name, away)| away.late && counts(name)).collect();
        let named: Vec<String> =
            late.iter().take(NAMED).map(|(name, away)| format!("node {name}: {}", away.why)).collect();
        let more = late.len().saturating_sub(NAMED);
        let more = if more > 0 { format!("; and {more} more") } else { String::new() };
        let seconds = PATIENCE.as_secs();
        (!named.is_empty()).then(|| {
            format!(
                "no more MPS hosts are replaced: {}{more}; not serving for {seconds} s. It goes on when they serve, or when their DaemonSet is changed",
                named.join("; ")
            )
        })
    }

    /// Closes nodes, as many as may go at once.
    fn choose(&mut self, nodes: &BTreeMap<String, View>, up: Duration, stopped: bool) {
        if stopped || self.paused.is_some() {
            self.closing.clear();
            return;
        }
        let hosts = || nodes.iter().filter_map(|(name, view)| Some((name, view, view.host.as_ref()?)));
        let proven = hosts().any(|(name, _, host)| !host.outdated && !self.away.contains_key(name));
        let at_once = if proven { (hosts().count() / ONE_OF).max(1) } else { 1 };
        let excused = |name: &String| nodes.get(name).is_some_and(|view| view.excused);
        let going = self.away.keys().filter(|name| self.asked.contains_key(*name) || !excused(name)).count();
        // One that was well may have ended meanwhile.
        while !self.closing.is_empty() && going.saturating_add(self.closing.len()) > at_once {
            self.closing.pop_last();
        }
        let mut next: Vec<_> = hosts()
            .filter(|(name, view, host)| {
                host.outdated && !host.leaving && view.busy.is_none() && !self.closing.contains_key(*name)
            })
            .filter(|(name, _, _)| !self.away.contains_key(*name))
            // Those last that did not serve before: that they do not afterwards says little of the release.
            .map(|(name, view, host)| (!host.ready || view.trouble.is_some(), name.clone(), host.uid.clone()))
            .collect();
        next.sort();
        let room = at_once.saturating_sub(going.saturating_add(self.closing.len()));
        self.closing.extend(next.into_iter().take(room).map(|(_, name, uid)| (name, (uid, up))));
    }
}

impl Step {
    fn look_at(&mut self, at: Duration, up: Duration) {
        let from_now = at.saturating_sub(up);
        self.next = Some(self.next.map_or(from_now, |next| next.min(from_now)));
    }
}

/// How a deletion ended.
#[derive(Debug)]
pub(crate) enum Deleted {
    /// It ends.
    Done,
    /// It is gone, or another pod has its name, or it is not outdated any more.
    NotAnyMore,
    /// Anything else.
    Failed(kube::Error),
    /// No answer in time.
    Silence,
}

impl Deleted {
    /// As metrics name it.
    pub(crate) const fn as_str(&self) -> &'static str {
        match self {
            Self::Done => "replaced",
            Self::NotAnyMore => "gone",
            Self::Failed(_) | Self::Silence => "failed",
        }
    }
}

/// Deletes the pod of a host, if that is the one that was seen and is outdated.
pub(crate) async fn replace(client: &Client, watched: &Watched, replacement: &Replacement) -> Deleted {
    match tokio::time::timeout(WRITE, delete(client, watched, &replacement.host)).await {
        Ok(Ok(true)) => Deleted::Done,
        Ok(Ok(false)) => Deleted::NotAnyMore,
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => Deleted::NotAnyMore,
        Ok(Err(error)) => Deleted::Failed(error),
        Err(_) => Deleted::Silence,
    }
}

async fn delete(client: &Client, watched: &Watched, host: &Host) -> Result<bool, kube::Error> {
    // The watch of revisions may lag behind that of pods, and a pod of a revision that it has not told yet is a new one. A list is not older
    // than what was read before.
    let revisions: Api<Revision> = Api::namespaced(client.clone(), &watched.namespace);
    let listed = revisions.list(&ListParams::default()).await?;
    if !Newest::of(&listed.items).is_outdated(&host.set.1, &host.hash) {
        return Ok(false);
    }
    let Some((namespace, name)) = host.pod.split_once('/') else { return Ok(false) };
    let options = serde_json::json!({"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": host.uid}});
    let request = Request::delete(format!("/api/v1/namespaces/{namespace}/pods/{name}"))
        .header(http::header::CONTENT_TYPE, "application/json")
        .body(options.to_string().into_bytes())
        .map_err(kube::Error::HttpError)?;
    client.request_text(request).await.map(|_| true)
}

#[cfg(test)]
mod tests;
