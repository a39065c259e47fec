//! What is known of the nodes: which could take a pod, what is free there, and why none does.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_api::GpuNode;
use cleave_api::names::{RESOURCE_MIG_PREFIX, is_served};
use cleave_plan::Quantity;
use cleave_plan::affinity::HOSTNAME;
use cleave_plan::constraints::Conflict;
use cleave_plan::device::sized;
use cleave_plan::ledger::{Ask, Claim, Holder, Ledger, Moment, NoFit, NodeFacts, Place, Tightest, Waiting as Asking};
use cleave_plan::scheduling::{self, Refused};
use cleave_plan::snapshot::{Node as PlanNode, Pod as PlanPod};
use kube::Resource;
use kube::core::DeserializeGuard;

use super::cluster::Cluster;
use super::facts;
use super::present::Present;
use crate::pods::PodObject;
use crate::policies::demand::{Reason, Waiting};
use crate::rollout::{Mps, Rollout};

/// Nodes by name.
#[derive(Debug, Default)]
pub(super) struct Nodes(pub(super) BTreeMap<String, Known>);

/// How many nodes a message names for each reason.
const NAMED: usize = 3;

/// What of a node was taken in.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// Versions of the node and of its `GpuNode`, whether its agent is ready if it has one, and
    /// whether its shares under MPS are withheld.
    seen: (Option<String>, Option<String>, Option<bool>, bool),
    pub(super) node: PlanNode,
    /// What its `GpuNode` says of MPS.
    pub(super) mps: Mps,
    /// Resources that its GPUs offer, or will.
    offers: BTreeSet<String>,
    /// It has a `GpuNode`.
    pub(super) ours: bool,
    /// An agent of Cleave runs on it, whether it has a `GpuNode` or not.
    has_agent: bool,
    /// Pods that hold something of it.
    holding: BTreeSet<String>,
    /// Pods on devices that give nothing now, whoever leaves.
    stuck: BTreeSet<String>,
}

impl Known {
    /// Whether a pod may run on it now, whoever leaves.
    fn may(&self, pod: &PlanPod) -> bool {
        self.is_usable() && scheduling::admit(pod, &self.node).is_ok()
    }

    /// Whether a pod may run on it, now or once what passes by itself has passed.
    fn may_later(&self, pod: &PlanPod) -> bool {
        self.is_usable() && scheduling::admit(pod, &self.node).map_or_else(|refused| refused.may_pass(), |()| true)
    }

    /// What of its CPU, memory and the like no bound pod takes, in thousandths.
    fn unbound(&self, present: &Present) -> BTreeMap<&str, u64> {
        let taken = present.taken(&self.node.name);
        let amounts = self.node.allocatable.iter().filter(|(resource, _)| !is_served(resource));
        let amounts = amounts.map(|(resource, quantity)| {
            let taken = taken.and_then(|taken| taken.get(resource)).copied().unwrap_or(0);
            let left = u128::from(quantity.milli().unwrap_or(0)).saturating_sub(taken);
            (resource.as_str(), u64::try_from(left).unwrap_or(u64::MAX))
        });
        amounts.collect()
    }

    /// Whether Cleave serves it, and pods can be narrowed to it.
    fn is_usable(&self) -> bool {
        self.ours && self.node.labels.contains_key(HOSTNAME)
    }
}

impl Nodes {
    /// Takes in nodes that have changed, and says what their devices have; nothing for those that
    /// are gone.
    pub(super) fn see(&mut self, cluster: &Cluster, rollout: &Rollout) -> Vec<(String, Option<NodeFacts>)> {
        let mut ready: BTreeMap<&str, bool> = BTreeMap::new();
        for pod in &cluster.agents {
            if let Some(node) = &pod.spec.node_name {
                *ready.entry(node).or_default() |= crate::read::is_ready(pod);
            }
        }
        let gpu_nodes: BTreeMap<&str, &DeserializeGuard<GpuNode>> = cluster
            .gpu_nodes
            .iter()
            .map(|object| (Resource::meta(&**object).name.as_deref().unwrap_or_default(), &**object))
            .collect();
        let mut changed = Vec::new();
        let mut there = BTreeSet::new();
        for object in &cluster.nodes {
            let name = object.metadata.name.as_deref().unwrap_or_default();
            there.insert(name);
            let gpu_node = gpu_nodes.get(name).copied();
            let agent = ready.get(name).copied();
            let is_ready = agent.unwrap_or_default();
            let versions = (
                object.metadata.resource_version.as_deref(),
                gpu_node.and_then(|object| Resource::meta(object).resource_version.as_deref()),
            );
            let withheld = rollout.withholds(name);
            let same = |known: &Known| (known.seen.0.as_deref(), known.seen.1.as_deref()) == versions;
            let still = |known: &Known| (known.seen.2, known.seen.3) == (agent, withheld);
            if versions.0.is_some() && self.0.get(name).is_some_and(|known| same(known) && still(known)) {
                continue;
            }
            let known = self.0.entry(name.to_owned()).or_default();
            known.seen = (versions.0.map(str::to_owned), versions.1.map(str::to_owned), agent, withheld);
            known.node = PlanNode {
                name: name.to_owned(),
                labels: object.metadata.labels.clone().unwrap_or_default(),
                taints: object.spec.taints.clone(),
                unschedulable: object.spec.unschedulable,
                allocatable: object.status.allocatable.clone(),
                ..PlanNode::default()
            };
            let object = gpu_node.and_then(|object| object.0.as_ref().ok());
            known.mps = object.map(|object| Mps::of(object, is_ready)).unwrap_or_default();
            let (facts, stuck) = object.map(|object| facts::of(object, is_ready, &known.mps, withheld)).unzip();
            known.stuck = stuck.unwrap_or_default();
            known.holding =
                facts.iter().flat_map(|facts| &facts.allocations).map(|allocation| allocation.pod.clone()).collect();
            known.ours = gpu_node.is_some();
            known.has_agent = agent.is_some();
            known.offers =
                facts.iter().flat_map(|facts| &facts.devices).map(|device| device.resource.clone()).collect();
            changed.push((name.to_owned(), facts));
        }
        let gone: Vec<String> = self.0.keys().filter(|name| !there.contains(name.as_str())).cloned().collect();
        for name in gone {
            self.0.remove(&name);
            changed.push((name, None));
        }
        changed
    }

    /// Those that a pod may run on, whoever leaves.
    pub(super) fn eligible(&self, pod: &PlanPod) -> Vec<&str> {
        self.0.values().filter(|known| known.may(pod)).map(|known| known.node.name.as_str()).collect()
    }

    /// Whether a pod may run on one, whoever leaves.
    pub(super) fn may(&self, node: &str, pod: &PlanPod) -> bool {
        self.0.get(node).is_some_and(|known| known.may(pod))
    }

    /// Whether a node is there.
    pub(super) fn has(&self, node: &str) -> bool {
        self.0.contains_key(node)
    }

    /// Why a node does not take a released pod now, in words; nothing where it may. Whoever else is
    /// on the way there is not counted.
    pub(super) fn refusal(&self, node: &str, pod: &PlanPod, present: &Present) -> Option<String> {
        let Some(known) = self.0.get(node) else { return Some("the node is gone".to_owned()) };
        if !known.ours {
            return Some("it has no GpuNode".to_owned());
        }
        let refused = scheduling::admit(pod, &known.node).err().map(|refused| refused.to_string());
        let full = || !has_room(&known.unbound(present), &pod.requests);
        refused.or_else(|| full().then(|| "not enough CPU, memory or another resource".to_owned()))
    }

    /// Pods that can leave, and what has to be known of them for that. Those that are gone, and
    /// hold something as far as their node has told, are on their way out: nobody else has to leave
    /// for what they give back.
    pub(super) fn holders(
        &self,
        living: &[&PodObject],
        protected: &BTreeMap<String, Duration>,
    ) -> BTreeMap<String, Holder> {
        let mut holders = BTreeMap::new();
        for pod in living.iter().filter(|pod| pod.wants_gpus()) {
            let Some(known) = pod.node().and_then(|node| self.0.get(node)) else { continue };
            let name = crate::pods::full_name(&pod.metadata);
            if known.stuck.contains(&name) {
                continue;
            }
            let created = pod.metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second());
            let holder = Holder {
                priority: pod.spec.priority.unwrap_or(0),
                started: Moment(u64::try_from(created).unwrap_or(0)),
                protected: protected.contains_key(&name),
                ending: pod.metadata.deletion_timestamp.is_some(),
            };
            holders.insert(name, holder);
        }
        let gone = Holder { priority: 0, started: Moment(0), protected: false, ending: true };
        for pod in self.0.values().flat_map(|known| known.holding.difference(&known.stuck)) {
            if !holders.contains_key(pod) {
                holders.insert(pod.clone(), gone);
            }
        }
        holders
    }

    /// Why a pod does not fit on the nodes that were tried, and whether that can pass.
    pub(super) fn judge(
        &self,
        ledger: &Ledger,
        asking: Asking<'_>,
        pod: &PlanPod,
        rules: &Rules<'_>,
        why: &NoFit,
    ) -> Verdict {
        if why.may_pass() {
            return Verdict::Waits(why.to_string());
        }
        // What cannot be now: could it be once what passes by itself has passed?
        let lasting = |known: &&Known| {
            known.may_later(pod) && (rules.refuses)(&known.node).map_or_else(|conflict| conflict.may_pass(), |()| true)
        };
        let possible: Vec<&str> = self.0.values().filter(lasting).map(|known| known.node.name.as_str()).collect();
        if possible.is_empty() {
            return Verdict::Never { message: self.excluded(pod, rules), impossible: Impossible::Excluded };
        }
        match ledger.fit_for(asking, possible.iter().copied(), 1, &Tightest) {
            Ok(_) => Verdict::Waits(self.excluded(pod, rules)),
            Err(why) if why.may_pass() => Verdict::Waits(why.to_string()),
            Err(why) => {
                let not_offered = matches!(why, NoFit::NotOffered { .. } | NoFit::NoNode);
                let impossible = if not_offered { Impossible::NotOffered } else { Impossible::TooLarge };
                Verdict::Never { message: why.to_string(), impossible }
            }
        }
    }

    /// Why nodes with GPUs are excluded, in words: each reason once, with how many nodes and the
    /// names of some.
    fn excluded(&self, pod: &PlanPod, rules: &Rules<'_>) -> String {
        let mut reasons: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        for known in self.0.values().filter(|known| known.ours) {
            let node = &known.node;
            let reason = if !known.is_usable() {
                format!("no label {HOSTNAME}")
            } else if let Err(refused) = scheduling::admit(pod, node) {
                match refused {
                    Refused::Cordoned => "cordoned".to_owned(),
                    Refused::Selector(label) => format!("no label {label}, which the pod selects"),
                    Refused::Affinity => "the pod's node affinity".to_owned(),
                    Refused::Taint { key, .. } => format!("taint {key}"),
                }
            } else if let Err(conflict) = (rules.refuses)(node) {
                conflict.to_string()
            } else if !(rules.has_room)(&node.name) {
                "not enough CPU, memory or another resource".to_owned()
            } else {
                continue;
            };
            reasons.entry(reason).or_default().push(&node.name);
        }
        if reasons.is_empty() {
            return "No eligible GPU node: no node has GPUs that Cleave serves".to_owned();
        }
        let described = reasons.iter().map(|(reason, nodes)| {
            let more = if nodes.len() > NAMED { ", ..." } else { "" };
            let names = nodes.iter().take(NAMED).copied().collect::<Vec<_>>().join(", ");
            format!(
                "{} of {}: {reason} ({names}{more})",
                nodes.len(),
                self.0.values().filter(|known| known.ours).count()
            )
        });
        format!("No eligible GPU node: {}", described.collect::<Vec<_>>().join("; "))
    }

    pub(super) fn hostname(&self, node: &str) -> Option<&str> {
        self.0.get(node)?.node.labels.get(HOSTNAME).map(String::as_str)
    }

    /// Who serves a resource. What a node offers that has lost its `GpuNode` or its policy a moment
    /// ago may still be in its kubelet's last word, so that alone makes nothing foreign.
    pub(super) fn provider(&self, resource: &str) -> Provider {
        if self.0.values().any(|known| known.offers.contains(resource)) {
            return Provider::Cleave;
        }
        let offering = |known: &&Known| known.node.allocatable.get(resource).and_then(Quantity::count) > Some(0);
        let without_us = |known: &Known| !known.ours && !known.has_agent;
        let mut offering = self.0.values().filter(offering).map(without_us);
        match offering.next() {
            None => Provider::Nobody,
            Some(first) if first || offering.any(|other| other) => Provider::Another,
            Some(_) => Provider::Unclear,
        }
    }
}

/// What keeps a pod from nodes beside labels and taints.
pub(super) struct Rules<'a> {
    /// Why the pod's rules and those of other pods keep it from a node.
    pub(super) refuses: &'a dyn Fn(&PlanNode) -> Result<(), Conflict>,
    /// Whether a node has the CPU, memory and pod slots for it.
    pub(super) has_room: &'a dyn Fn(&str) -> bool,
}

/// Who serves a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Provider {
    /// GPUs that Cleave manages, now or as their spec says.
    Cleave,
    /// A device plugin on nodes where Cleave does not run.
    Another,
    /// Nodes where Cleave runs offer it, and Cleave does not: another plugin serves it there, or
    /// the kubelet's report is old.
    Unclear,
    /// Nobody.
    Nobody,
}

/// What is free of nodes' other resources, in thousandths; those on the way counted. Of each node
/// found out when it is asked about.
pub(super) struct Free<'a> {
    nodes: &'a Nodes,
    present: &'a Present,
    /// What those ask for that were let through to a node.
    promised: BTreeMap<&'a str, Vec<&'a BTreeMap<String, Quantity>>>,
    known: BTreeMap<&'a str, BTreeMap<&'a str, u64>>,
}

impl<'a> Free<'a> {
    pub(super) fn new(nodes: &'a Nodes, present: &'a Present, ledger: &Ledger, open: &[&'a PodObject]) -> Self {
        let mut promised: BTreeMap<&'a str, Vec<&'a BTreeMap<String, Quantity>>> = BTreeMap::new();
        for pod in open.iter().filter(|pod| pod.node().is_none()) {
            let claim = ledger.claim(&crate::pods::full_name(&pod.metadata));
            if let Some(Claim { place: Place::OneOf { nodes: to, .. }, .. }) = claim {
                for (name, _) in to.iter().filter_map(|node| nodes.0.get_key_value(node)) {
                    promised.entry(name).or_default().push(&pod.spec.requests);
                }
            }
        }
        Self { nodes, present, promised, known: BTreeMap::new() }
    }

    /// What is free of a node; nothing of one that is not ours.
    fn of(&mut self, node: &str) -> Option<&mut BTreeMap<&'a str, u64>> {
        let (name, known) = self.nodes.0.get_key_value(node).filter(|(_, known)| known.ours)?;
        if !self.known.contains_key(name.as_str()) {
            let mut free = known.unbound(self.present);
            for requests in self.promised.get(name.as_str()).into_iter().flatten() {
                take(&mut free, requests);
            }
            self.known.insert(name, free);
        }
        self.known.get_mut(name.as_str())
    }

    pub(super) fn has_room(&mut self, node: &str, requests: &BTreeMap<String, Quantity>) -> bool {
        self.of(node).is_some_and(|free| has_room(free, requests))
    }

    pub(super) fn take(&mut self, node: &str, requests: &BTreeMap<String, Quantity>) {
        if let Some(free) = self.of(node) {
            take(free, requests);
        }
    }
}

/// Why a pod does not fit.
#[derive(Debug, Clone)]
pub(super) enum Verdict {
    /// It can pass.
    Waits(String),
    /// It cannot.
    Never { message: String, impossible: Impossible },
}

/// Why no GPU can ever hold a pod, as things are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Impossible {
    /// No node with GPUs may take it.
    Excluded,
    /// Those that may do not offer what it asks for.
    NotOffered,
    /// They offer it, and no GPU is large enough, or no node has enough of them.
    TooLarge,
}

impl Verdict {
    /// Why it cannot pass, where it cannot.
    pub(super) fn impossible(&self) -> Option<Impossible> {
        match self {
            Self::Waits(_) => None,
            Self::Never { impossible, .. } => Some(*impossible),
        }
    }

    /// In words for the pod's owner, and whether it can pass. `demand` is what the pod waits for if
    /// GPUs may be cut for it.
    pub(super) fn told(self, asks: &[Ask], demand: Option<&Waiting>) -> (String, bool) {
        let may_be_cut = |ask: &Ask| sized(&ask.resource).is_some() || ask.resource.starts_with(RESOURCE_MIG_PREFIX);
        match (self, demand) {
            // What pods ask for decides what there is.
            (Self::Never { impossible, .. }, Some(waiting))
                if waiting.reason != Reason::Malformed
                    && (impossible == Impossible::NotOffered || asks.iter().any(may_be_cut)) =>
            {
                (waiting.message.clone(), true)
            }
            (Self::Never { message, .. }, _) => (message, false),
            (Self::Waits(message), _) => (message, true),
        }
    }
}

fn has_room(free: &BTreeMap<&str, u64>, requests: &BTreeMap<String, Quantity>) -> bool {
    let pods = free.get("pods").is_none_or(|pods| *pods >= 1000);
    let fits = |(name, quantity): (&String, &Quantity)| {
        let wanted = quantity.milli().unwrap_or(0);
        wanted == 0 || free.get(name.as_str()).is_some_and(|free| *free >= wanted)
    };
    pods && requests.iter().filter(|(name, _)| !is_served(name)).all(fits)
}

fn take(free: &mut BTreeMap<&str, u64>, requests: &BTreeMap<String, Quantity>) {
    for (name, quantity) in requests.iter().filter(|(name, _)| !is_served(name)) {
        if let Some(free) = free.get_mut(name.as_str()) {
            *free = free.saturating_sub(quantity.milli().unwrap_or(0));
        }
    }
    if let Some(pods) = free.get_mut("pods") {
        *pods = pods.saturating_sub(1000);
    }
}
