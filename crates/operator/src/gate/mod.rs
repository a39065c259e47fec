//! Lets pods through to the scheduler when room is held for them. Pure: times are given.
//!
//! ```text
//!  stores (pods, nodes, GpuNodes, agents) ──[facts]──▶ ledger ──▶ Turn { pods to let through, why others wait } ──▶ one patch each
//! ```
//!
//! A pod that asks for shares is created with our gate. Room of one device for each part of what it asks for is held in the ledger; then one patch
//! narrows the pod to the nodes where that is, notes it on the pod, and takes the gate away. The note is the only record: after a crash the ledger
//! is what pods say ([`Gatekeeper::look`] rebuilds it), and the node's agent reads it when the kubelet asks. Nothing is written anywhere else.
//!
//! | a gated pod that … | |
//! |---|---|
//! | fits | is let through to the node, or to a few where the scheduler may object for reasons that are not looked at here |
//! | fits when others are gone, or when a GPU has been cut | waits, and is told what for |
//! | no device here can ever hold | is let through away from nodes that would fail it: it is honestly unschedulable, and autoscalers act |
//! | asks for nothing that Cleave serves | is let through as it is |
mod facts;
mod nodes;
mod patch;
mod present;
mod run;

use std::cell::{LazyCell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cleave_api::GpuNode;
use cleave_api::placement::{Held, Placement};
use cleave_plan::Quantity;
use cleave_plan::ledger::{
    Ask, Claim, Facts, Fits, Ledger, Moment, NodeFacts, Nomination, Place, Preemption, Reservation, Tightest,
    Waiting as Asking,
};
use cleave_plan::snapshot::{NodeSelectorTerm, Pod as PlanPod, Toleration};
use kube::ResourceExt;
use kube::core::DeserializeGuard;
use serde_json::Value;

use crate::demand::{Reason, Waiting};
use crate::pods::{PodObject, claimant, counted};
use crate::read::{AgentPod, NodeObject};
use crate::rollout::{self, Hosts, Rollout, Step, View};

pub(crate) use run::{Gate, Parts};

use nodes::{Free, Nodes, Verdict};
use present::Present;

/// How long room is held for a pod that finds no node after all.
pub const HOLD: Duration = Duration::from_secs(300);
/// How many nodes a pod is let through to that the scheduler may keep from one for reasons that are not looked at here.
const SEVERAL: usize = 4;
/// How long nothing must have been able to hold a pod before it is let through as unschedulable: a policy may just have been applied.
pub const PATIENCE: Duration = Duration::from_secs(2);
/// How long what a bound pod asked for is kept after the pod is gone, if it was never seen with it: who is deleted without grace may still hold it.
pub const LINGER: Duration = Duration::from_secs(5);
/// How long a pod is believed to be protected by a disruption budget, once an eviction was refused.
const PROTECTED: Duration = Duration::from_secs(30);
/// How often in a row the API server may refuse a pod's patch, as it does where the pod has changed meanwhile.
const REFUSALS: u32 = 3;
/// How long a pod is left alone after so many refusals. Doubles with each, up to a minute.
const LEFT_ALONE: Duration = Duration::from_secs(1);
const LEFT_ALONE_LONGEST: Duration = Duration::from_secs(60);
/// For how many pods at once is thought about who has to leave: it is asked of every device.
const PREEMPTORS: usize = 8;
/// How many pods are let through at once: they are written before the next are looked at.
const AT_ONCE: usize = 128;

/// The cluster as the watches last told it.
#[derive(Debug, Clone, Default)]
pub struct Cluster {
    /// Pods that have not ended, trimmed.
    pub pods: Vec<Arc<PodObject>>,
    /// Nodes.
    pub nodes: Vec<Arc<NodeObject>>,
    /// `GpuNode`s.
    pub gpu_nodes: Vec<Arc<DeserializeGuard<GpuNode>>>,
    /// The agents' pods.
    pub agents: Vec<Arc<AgentPod>>,
    /// MPS hosts, where they are to be replaced and once they are known.
    pub hosts: Option<Hosts>,
}

/// Now.
#[derive(Debug, Clone, Copy)]
pub struct Now {
    /// Since the process started.
    pub up: Duration,
    /// Seconds of the Unix epoch, by a clock that nobody sets while this process leads: what is held is not to be lost, or kept, by a jump.
    pub epoch: u64,
}

/// Why a pod is let through.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Why {
    /// Room is held for it.
    Held(Placement),
    /// It asks for nothing that is served here.
    NotOurs,
    /// Nothing here can ever hold it; in words for its owner.
    Never(String),
}

impl Why {
    /// As metrics name it.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Held(_) => "held",
            Self::NotOurs => "not_ours",
            Self::Never(_) => "never",
        }
    }
}

/// A pod that is let through.
#[derive(Debug, Clone, PartialEq)]
pub struct Opening {
    /// `namespace/name`.
    pub pod: String,
    /// Its UID.
    pub uid: String,
    /// Why.
    pub why: Why,
    /// How long it was waited for.
    pub waited: Duration,
    /// A JSON Patch (RFC 6902).
    pub patch: Value,
}

/// A pod that is to leave for one of higher priority.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Eviction {
    /// `namespace/name`.
    pub pod: String,
    /// Its UID.
    pub uid: String,
    /// For whom: `namespace/name`.
    pub by: String,
}

/// What is to be done now.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Turn {
    /// Pods to let through, in order of priority and arrival.
    pub openings: Vec<Opening>,
    /// Pods to evict; the room that they leave is kept for whom they leave for.
    pub evictions: Vec<Eviction>,
    /// Pods that wait at the gate, and what for.
    pub waiting: BTreeMap<String, Waiting>,
    /// What is to be done about MPS hosts; nothing where they were not looked at.
    pub rollout: Option<Step>,
    /// There are more to let through.
    pub more: bool,
    /// When to look again though nothing changes, from now.
    pub next: Option<Duration>,
}

/// Holds the ledger.
#[derive(Debug, Default)]
pub struct Gatekeeper {
    /// None until the first look after a start, or after another process led.
    ledger: Option<Ledger>,
    nodes: Nodes,
    present: Present,
    /// UIDs of pods with a claim.
    uids: BTreeMap<String, String>,
    /// Pods that were seen with all that they asked for: when they go, and their node no longer tells of it, nothing is kept for them.
    served: BTreeSet<String>,
    /// UIDs of pods that found no node in time: what is noted on them is believed no more, however late the end is that it names.
    given_up: BTreeMap<String, String>,
    /// Pods that are gone and may hold something, and until when that is believed.
    lingering: BTreeMap<String, Duration>,
    /// Pods that a disruption budget protects, and until when that is believed.
    protected: BTreeMap<String, Duration>,
    /// Pods at the gate: UID, since when, and since when nothing could hold them.
    gated: BTreeMap<String, Gated>,
    /// Which MPS hosts are being replaced.
    pub(crate) rollout: Rollout,
    /// Until when they are not looked at again.
    rested: Duration,
}

#[derive(Debug)]
struct Gated {
    uid: String,
    since: Duration,
    never: Option<Duration>,
    refused: Option<Refused>,
}

/// The API server does not take what would let a pod through.
#[derive(Debug)]
struct Refused {
    /// How often in a row.
    times: u32,
    /// Until when it is left alone.
    until: Duration,
    /// In the API server's words.
    why: String,
}

impl Gated {
    /// For how long nothing could hold it; none where that may pass.
    fn never_for(&mut self, may_pass: bool, up: Duration) -> Option<Duration> {
        self.never = if may_pass { None } else { self.never.or(Some(up)) };
        Some(up.saturating_sub(self.never?))
    }
}

/// What of a pod decides whether it fits.
type Wish<'a> = (Vec<Ask>, i32, &'a BTreeMap<String, Quantity>, Signature<'a>);

/// What of a pod decides which nodes it may run on.
type Signature<'a> = (&'a BTreeMap<String, String>, &'a [NodeSelectorTerm], &'a [Toleration]);

impl Gatekeeper {
    /// Forgets everything: another process leads, or has led.
    pub fn reset(&mut self) {
        *self = Self::default();
    }

    /// A pod could not be let through: what was held for it is free.
    pub fn failed(&mut self, pod: &str) {
        self.uids.remove(pod);
        if let Some(ledger) = &mut self.ledger {
            ledger.release(pod);
        }
    }

    /// The API server refused what would let a pod through, in its words. One that it will always refuse, for its size say, is to take no
    /// room from others at each look, and its owner is to know.
    pub fn refused(&mut self, pod: &str, why: &str, up: Duration) {
        self.failed(pod);
        let Some(gated) = self.gated.get_mut(pod) else { return };
        let times = gated.refused.as_ref().map_or(1, |before| before.times.saturating_add(1));
        let pause = match times.checked_sub(REFUSALS) {
            None => Duration::ZERO,
            Some(more) => LEFT_ALONE.saturating_mul(2_u32.saturating_pow(more)).min(LEFT_ALONE_LONGEST),
        };
        let why = why.chars().take(300).collect();
        gated.refused = Some(Refused { times, until: up.saturating_add(pause), why });
    }

    /// A pod could not be evicted: its disruption budget has none left.
    pub fn protect(&mut self, pod: &str, up: Duration) {
        self.protected.insert(pod.to_owned(), up.saturating_add(PROTECTED));
    }

    /// The ledger, once there is one.
    pub fn ledger(&self) -> Option<&Ledger> {
        self.ledger.as_ref()
    }

    /// Looks at the cluster. `demand` is what pods wait for that GPUs are cut for.
    pub fn look(&mut self, cluster: &Cluster, demand: &BTreeMap<String, Waiting>, now: Now) -> Turn {
        let changed = self.nodes.see(cluster, &self.rollout);
        let living: Vec<&PodObject> = cluster.pods.iter().map(AsRef::as_ref).filter(|pod| is_living(pod)).collect();
        let mut ledger = match self.ledger.take() {
            Some(mut ledger) => {
                for (name, facts) in changed {
                    match facts {
                        Some(facts) => ledger.observe(&name, facts),
                        None => ledger.forget(&name),
                    }
                }
                ledger
            }
            None => {
                let nodes = changed.into_iter().filter_map(|(name, facts)| Some((name, facts?))).collect();
                self.rebuild(nodes, &living, now)
            }
        };
        let (open, left) = self.present.look(&cluster.pods);
        let candidates = self.see_pods(&mut ledger, &open, left, now);
        for (pod, _) in ledger.expire(Moment(now.epoch)) {
            if let Some(uid) = self.uids.remove(&pod) {
                self.given_up.insert(pod.clone(), uid);
            }
            tracing::warn!(pod, "no node was found for it in time: nothing is held for it any more");
        }
        // Before anything is held: a node that is found idle here is closed in the same look.
        let rollout = self.roll_out(cluster, &mut ledger, now.up);
        let next = ledger.claims().values().filter_map(|claim| match &claim.place {
            Place::OneOf { expires, .. } => Some(Duration::from_secs(expires.0.saturating_sub(now.epoch).max(1))),
            Place::Bound(_) => None,
        });
        let lingering = self.lingering.values().map(|until| until.saturating_sub(now.up).max(Duration::from_millis(1)));
        let rolls = match &rollout {
            Some(step) => step.next,
            // What has changed since they were looked at last is seen then.
            None => cluster.hosts.as_ref().map(|_| self.rested.saturating_sub(now.up)),
        };
        let mut turn = Turn { next: next.chain(lingering).chain(rolls).min(), rollout, ..Turn::default() };
        self.open(&mut ledger, candidates, &Seen { living: &living, open: &open, demand, now }, &mut turn);
        self.ledger = Some(ledger);
        turn
    }

    /// Looks at MPS hosts, where they are to be replaced: which are to go, and on which nodes nothing may be held for it.
    fn roll_out(&mut self, cluster: &Cluster, ledger: &mut Ledger, up: Duration) -> Option<Step> {
        let hosts = cluster.hosts.as_ref().filter(|_| self.rested <= up)?;
        self.rested = up.saturating_add(rollout::PERIOD);
        let newest = rollout::Newest::of(hosts.revisions.iter().map(AsRef::as_ref));
        let mut agents: BTreeMap<&str, bool> = BTreeMap::new();
        for pod in &cluster.agents {
            if let Some(node) = pod.spec.node_name.as_deref() {
                *agents.entry(node).or_default() |= newest.is_outdated_pod(pod);
            }
        }
        let mut hosts = rollout::by_node(hosts, &newest);
        let outdated = hosts.values().any(|host| host.outdated);
        let serves =
            |node: &str, resource: &str| self.nodes.0.get(node).is_some_and(|known| known.mps.serves(resource));
        let mut on_the_way = if outdated { rollout::on_the_way(ledger, serves) } else { BTreeMap::new() };
        let mut views = BTreeMap::new();
        for (name, known) in self.nodes.0.iter().filter(|(_, known)| known.ours) {
            let host = hosts.remove(name.as_str());
            let agent = agents.get(name.as_str());
            if host.is_some() || agent.is_some() {
                let user = known.mps.user.clone().or_else(|| on_the_way.remove(name.as_str()));
                // It brings the image, and knows what hosts of before it say.
                let first = || (agent == Some(&true)).then(|| "its agent is upgraded first".to_owned());
                let busy = user.or_else(first);
                let excused = rollout::is_excused(&known.node);
                views.insert(name.clone(), View { host, trouble: known.mps.trouble.clone(), busy, excused });
            }
        }
        let step = self.rollout.look(&views, up);
        for (name, facts) in self.nodes.see(cluster, &self.rollout) {
            if let Some(facts) = facts {
                ledger.observe(&name, facts);
            }
        }
        Some(step)
    }

    /// The ledger that pods' notes make.
    fn rebuild(&mut self, nodes: BTreeMap<String, NodeFacts>, living: &[&PodObject], now: Now) -> Ledger {
        self.uids.clear();
        let mut facts = Facts { nodes, ..Facts::default() };
        for pod in living.iter().filter(|pod| pod.wants_gpus()) {
            let Some(place) = place(pod, now) else { continue };
            let name = crate::pods::full_name(&pod.metadata);
            self.uids.insert(name.clone(), pod.uid().unwrap_or_default());
            facts.claims.insert(name, Claim { asks: pod.asks(), place, noted: facts::noted(pod) });
        }
        Ledger::rebuild(facts)
    }

    /// Takes in pods that are not settled: who is bound, who is gone; returns those that wait at our gate. `left` may be gone.
    fn see_pods<'a>(
        &mut self,
        ledger: &mut Ledger,
        pods: &[&'a PodObject],
        mut left: BTreeSet<String>,
        now: Now,
    ) -> Vec<(String, &'a PodObject)> {
        let mut there = BTreeSet::new();
        let mut candidates = Vec::new();
        let mut settled = Vec::new();
        for pod in pods {
            let open = pod.is_ours_to_open();
            let name = crate::pods::full_name(&pod.metadata);
            let uid = pod.uid().unwrap_or_default();
            if self.uids.get(&name).is_some_and(|known| *known != uid) {
                ledger.release(&name);
                self.uids.remove(&name);
                self.served.remove(&name);
            }
            if let Some(node) = pod.node() {
                let leaves = pod.metadata.deletion_timestamp.is_some();
                if leaves && self.served.contains(&name) {
                    ledger.release(&name);
                    self.uids.remove(&name);
                    there.insert(name);
                    continue;
                }
                if ledger.claim(&name).is_none() {
                    let place = Place::Bound(node.to_owned());
                    ledger.adopt(&name, Claim { asks: pod.asks(), place, noted: facts::noted(pod) });
                    self.uids.insert(name.clone(), uid);
                } else if !ledger
                    .claim(&name)
                    .is_some_and(|claim| matches!(&claim.place, Place::Bound(to) if to == node))
                {
                    ledger.bind(&name, node, &pod.asks());
                    self.uids.insert(name.clone(), uid);
                }
                if !self.served.contains(&name) && !ledger.is_unserved(&name) {
                    self.served.insert(name.clone());
                }
                if !leaves && self.served.contains(&name) {
                    self.present.settle(pod);
                    settled.push(name.clone());
                }
            } else if open {
                // One with a claim has been let through: the watch has not told it yet.
                if ledger.claim(&name).is_none() {
                    candidates.push((name.clone(), *pod));
                }
            } else if ledger.claim(&name).is_none()
                && self.given_up.get(&name) != Some(&uid)
                && let Some(place @ Place::OneOf { .. }) = place(pod, now)
            {
                ledger.adopt(&name, Claim { asks: pod.asks(), place, noted: facts::noted(pod) });
                self.uids.insert(name.clone(), uid);
            }
            there.insert(name);
        }
        self.lingering.retain(|name, _| !there.contains(name));
        left.extend(self.lingering.keys().cloned());
        left.retain(|name| !there.contains(name));
        for name in left.iter().filter(|name| ledger.claim(name).is_some()).cloned().collect::<Vec<_>>() {
            let until = self.lingering.entry(name.clone()).or_insert(now.up.saturating_add(LINGER));
            if self.served.contains(&name) || !ledger.is_unserved(&name) || *until <= now.up {
                ledger.release(&name);
                self.uids.remove(&name);
                self.lingering.remove(&name);
            }
        }
        for name in &left {
            self.served.remove(name);
            self.given_up.remove(name);
        }
        let gated = &mut self.gated;
        gated.retain(|name, _| there.contains(name));
        for name in &settled {
            there.remove(name);
        }
        self.present.remember(there);
        for (name, pod) in &candidates {
            let uid = pod.uid().unwrap_or_default();
            let new = || Gated { uid: uid.clone(), since: now.up, never: None, refused: None };
            let entry = gated.entry(name.clone()).or_insert_with(new);
            if entry.uid != uid {
                *entry = new();
            }
        }
        candidates.sort_by(|(name, pod), (other_name, other)| {
            let priority = |pod: &PodObject| pod.spec.priority.unwrap_or(0);
            let created = |pod: &PodObject| pod.metadata.creation_timestamp.as_ref().map(|time| time.0);
            let key = |pod| (std::cmp::Reverse(priority(pod)), created(pod));
            key(pod).cmp(&key(other)).then_with(|| name.cmp(other_name))
        });
        candidates
    }

    /// Holds room for those that fit.
    fn open(&mut self, ledger: &mut Ledger, candidates: Vec<(String, &PodObject)>, seen: &Seen<'_>, turn: &mut Turn) {
        withdraw_unless_waiting(ledger, &candidates);
        if candidates.is_empty() {
            return;
        }
        self.protected.retain(|_, until| *until > seen.now.up);
        // A budget that has some left again tells nobody here.
        self.protected.values().for_each(|until| turn.look_in(until.saturating_sub(seen.now.up)));
        let Self { nodes, present, uids, gated, protected, rollout, .. } = self;
        let candidates = leave_alone(ledger, gated, candidates, seen.now.up, turn);
        // Only who waits asks for them.
        let holders = LazyCell::new(|| nodes.holders(seen.living, protected));
        let mut preemptors = 0;
        let free = RefCell::new(Free::new(nodes, present, ledger, seen.open));
        let mut eligible: BTreeMap<Signature<'_>, Vec<&str>> = BTreeMap::new();
        let mut refused: BTreeMap<Wish<'_>, Verdict> = BTreeMap::new();
        let planned: Vec<(String, &PodObject, PlanPod)> =
            candidates.into_iter().map(|(name, pod)| (name, pod, planned(pod))).collect();
        for (name, pod, wanted) in &planned {
            if turn.openings.len() >= AT_ONCE {
                turn.more = true;
                break;
            }
            let waited = gated.get(name).map_or(Duration::ZERO, |gated| seen.now.up.saturating_sub(gated.since));
            let opening = |why: Why, towards: Towards<'_>| Opening {
                pod: name.clone(),
                uid: pod.uid().unwrap_or_default(),
                waited,
                patch: patch::open(pod, &why, towards),
                why,
            };
            let mut asks = pod.asks();
            asks.retain(|ask| !nodes.is_foreign(&ask.resource));
            if asks.is_empty() {
                turn.openings.push(opening(Why::NotOurs, Towards::Anywhere));
                continue;
            }
            asks.sort();
            let signature = (&wanted.node_selector, wanted.affinity.as_slice(), wanted.tolerations.as_slice());
            let asking = Asking { pod: name, priority: wanted.priority, asks: &asks };
            let key = (asks.clone(), wanted.priority, &wanted.requests, signature);
            let known = refused.get(&key).filter(|_| !ledger.nominations().contains_key(name)).cloned();
            let most = if pod.spec.particular { SEVERAL } else { 1 };
            let has_room = |node: &str| free.borrow_mut().has_room(node, &wanted.requests);
            // Most find a place, and then not every node has to be looked at.
            let may_go = |node: &str| nodes.may(node, wanted) && has_room(node);
            let quick = if known.is_none() { ledger.fit_tightest(asking, most, may_go) } else { None };
            let may = match &quick {
                Some(_) => &[][..],
                None => eligible.entry(signature).or_insert_with(|| nodes.eligible(wanted)).as_slice(),
            };
            let with_room = || may.iter().copied().filter(|node| has_room(node));
            let verdict = match (quick, known) {
                (Some(fits), _) => Ok(fits),
                (None, Some(known)) => Err(Ok(known)),
                (None, None) => ledger.fit_for(asking, with_room(), most, &Tightest).map_err(Err),
            };
            let verdict = match verdict {
                Ok(fits) => {
                    let expires = Moment(seen.now.epoch.saturating_add(HOLD.as_secs()));
                    if ledger.reserve(name, &fits, expires).is_ok() {
                        fits.iter().for_each(|fit| free.borrow_mut().take(fit.node(), &wanted.requests));
                        uids.insert(name.clone(), pod.uid().unwrap_or_default());
                        let hostnames = fits.iter().filter_map(|fit| nodes.hostname(fit.node())).collect();
                        let placement = note(&pod.spec.asks, &fits, expires);
                        turn.openings.push(opening(Why::Held(placement), Towards::Among(hostnames)));
                    }
                    continue;
                }
                Err(Ok(known)) => known,
                Err(Err(why)) => nodes.judge(ledger, asking, may, with_room().count(), &why),
            };
            let waits = matches!(verdict, Verdict::Waits(_)) && pod.spec.preemption_policy.as_deref() != Some("Never");
            let mut found = None;
            let over_others = || holders.values().any(|holder| holder.priority < wanted.priority);
            if waits && preemptors < PREEMPTORS && over_others() {
                preemptors += 1;
                found = ledger.preempt(asking, with_room(), &holders).filter(|found| can_leave(found, protected));
            }
            refused.insert(key, verdict.clone());
            let (message, may_pass) = verdict.told(&asks, seen.demand.get(name));
            let message = message + &rollout.in_words(&asks, may);
            let never = gated.get_mut(name).and_then(|gated| gated.never_for(may_pass, seen.now.up));
            match never {
                Some(never) if never >= PATIENCE => {
                    turn.openings.push(opening(Why::Never(message), Towards::Away(nodes.offering(&asks))));
                    continue;
                }
                Some(never) => {
                    turn.look_in(PATIENCE.saturating_sub(never));
                }
                None => {}
            }
            match found {
                Some(Preemption { node, takes, victims }) => {
                    let uid = |victim: &String| uids.get(victim).cloned().unwrap_or_default();
                    let eviction = |pod: String| Eviction { uid: uid(&pod), pod, by: name.clone() };
                    turn.evictions.extend(victims.into_iter().map(eviction));
                    // Refused only where it has a claim, and then it does not wait.
                    let _ = ledger.nominate(name, Nomination { priority: wanted.priority, node, takes });
                }
                None => drop(ledger.withdraw(name)),
            }
            turn.waiting.insert(name.clone(), Waiting { reason: Reason::NoRoom, message });
        }
    }
}

impl Turn {
    /// There is to be another look no later than this from now.
    fn look_in(&mut self, time: Duration) {
        self.next = Some(self.next.map_or(time, |next| next.min(time)));
    }
}

/// A budget that has none left is not asked again and again, and nobody leaves in vain beside one whom it protects.
fn can_leave(preemption: &Preemption, protected: &BTreeMap<String, Duration>) -> bool {
    !preemption.victims.iter().any(|victim| protected.contains_key(victim))
}

/// What is looked at beside nodes and ledger.
struct Seen<'a> {
    living: &'a [&'a PodObject],
    /// Of these, those that are not settled.
    open: &'a [&'a PodObject],
    demand: &'a BTreeMap<String, Waiting>,
    now: Now,
}

/// Where a pod is let through to.
#[derive(Debug, Clone)]
pub(crate) enum Towards<'a> {
    Anywhere,
    Among(Vec<&'a str>),
    Away(Vec<&'a str>),
}

fn is_living(pod: &PodObject) -> bool {
    let ended = matches!(pod.status.phase.as_str(), "Succeeded" | "Failed");
    // One that is deleted before it is bound will not come.
    !ended && (pod.node().is_some() || pod.metadata.deletion_timestamp.is_none())
}

/// Where a pod is, or may go by what is noted on it.
fn place(pod: &PodObject, now: Now) -> Option<Place> {
    if let Some(node) = pod.node() {
        return Some(Place::Bound(node.to_owned()));
    }
    if !pod.spec.scheduling_gates.is_empty() {
        return None;
    }
    let placement = pod.placement.as_ref().filter(|placement| placement.until > now.epoch)?;
    // Whoever wrote it may have had another clock: nothing is held for longer than from now on.
    let expires = Moment(placement.until.min(now.epoch.saturating_add(HOLD.as_secs())));
    Some(Place::OneOf { nodes: placement.nodes.keys().cloned().collect(), expires })
}

/// A pod as it is planned with; of one that nothing is planned for, what it asks for.
fn planned(pod: &PodObject) -> PlanPod {
    let plain = || PlanPod { requests: pod.spec.requests.clone(), ..Default::default() };
    claimant(pod).map_or_else(plain, |found| found.pod)
}

/// Room that is kept for pods that wait no more is free.
fn withdraw_unless_waiting(ledger: &mut Ledger, waiting: &[(String, &PodObject)]) {
    if ledger.nominations().is_empty() {
        return;
    }
    let waiting: BTreeSet<&str> = waiting.iter().map(|(name, _)| name.as_str()).collect();
    let over: Vec<String> =
        ledger.nominations().keys().filter(|pod| !waiting.contains(pod.as_str())).cloned().collect();
    over.iter().for_each(|pod| drop(ledger.withdraw(pod)));
}

/// Takes those out whose patch the API server has refused too often to try again now.
fn leave_alone<'a>(
    ledger: &mut Ledger,
    gated: &BTreeMap<String, Gated>,
    mut candidates: Vec<(String, &'a PodObject)>,
    up: Duration,
    turn: &mut Turn,
) -> Vec<(String, &'a PodObject)> {
    candidates.retain(|(name, _)| {
        let refused = gated.get(name).and_then(|gated| gated.refused.as_ref()).filter(|refused| refused.until > up);
        let Some(Refused { until, why, .. }) = refused else { return true };
        turn.look_in(until.saturating_sub(up));
        drop(ledger.withdraw(name));
        let message = format!("the API server refuses what would let it through: {why}");
        turn.waiting.insert(name.clone(), Waiting { reason: Reason::Malformed, message });
        false
    });
    candidates
}

/// What is noted on the pod: what has to be of one device each, in the order in which it is asked for.
fn note(asks: &[Ask], fits: &Fits, expires: Moment) -> Placement {
    let held = |takes: &[Reservation]| {
        let mut left: Vec<&Reservation> = takes.iter().filter(|take| !counted(&take.resource)).collect();
        let mut held = Vec::with_capacity(asks.len());
        for ask in asks {
            let same = |take: &&Reservation| take.resource == ask.resource && take.units == ask.units;
            if let Some(index) = left.iter().position(same) {
                let Reservation { resource, units, device } = left.remove(index).clone();
                held.push(Held { resource, units: units.get(), device });
            }
        }
        held
    };
    let nodes = fits.iter().map(|fit| (fit.node().to_owned(), held(fit.takes()))).collect();
    Placement { until: expires.0, nodes }
}

#[cfg(test)]
mod tests;
