//! Decides, look by look, which pods are released, and remembers what lies between two looks. Pure:
//! the time is given.
use std::cell::LazyCell;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_api::names::CONDITION_PLACED;
use cleave_api::placement::{Placement, ReservedUnits};
use cleave_plan::ledger::{
    Ask, Claim, Facts, Fits, Ledger, Moment, NodeFacts, Nomination, Place, Preemption, Reservation,
};
use kube::ResourceExt;

use super::cluster::{Cluster, Now, Seen, is_living, planned};
use super::nodes::Nodes;
use super::placing::{Candidate, Placing};
use super::preempting::Preempting;
use super::present::Present;
use super::stranded::{Advice, Rescue, Stranded};
use super::turn::{Towards, Turn, Why};
use super::{facts, stranded};
use crate::pods::{PodObject, is_interchangeable};
use crate::policies::demand::{Reason, Waiting};
use crate::rollout::{self, Rollout, Step, View};

/// How long room is held for a pod that finds no node after all.
const HOLD: Duration = Duration::from_secs(300);
/// How long a pod must be unplaceable before it is released as unschedulable, unless the operator
/// is told otherwise: a policy, a node or its `GpuNode` may be away for a while.
pub const PATIENCE: Duration = Duration::from_secs(180);
/// How long what a bound pod asked for is kept after the pod is gone, if it was never seen with it:
/// who is deleted without grace may still hold it.
const LINGER: Duration = Duration::from_secs(5);
/// How long a pod is believed to be protected by a disruption budget, once an eviction was refused.
const PROTECTED: Duration = Duration::from_secs(30);
/// How often in a row the API server may refuse a pod's patch, as it does where the pod has changed
/// meanwhile.
const REFUSALS: u32 = 3;
/// How long a pod is left alone after so many refusals. Doubles with each, up to a minute.
const LEFT_ALONE: Duration = Duration::from_secs(1);
const LEFT_ALONE_LONGEST: Duration = Duration::from_secs(60);
/// How often a reservation is renewed: after an hour nobody seems to look at the pod.
const MOST_RENEWALS: u32 = 11;
/// What a pod is told that is held back: see [`stranded`].
const HELD_BACK: &str = "Pods of this controller were re-created again and again because the scheduler did not bind them: the next is released later";
/// How many pods are let through at once: they are written before the next are looked at.
const AT_ONCE: usize = 128;

/// Holds the ledger.
#[derive(Debug)]
pub struct Gatekeeper {
    /// How long a pod must be unplaceable before it is released as unschedulable.
    patience: Duration,
    /// None until the first look after a start, or after another process led.
    ledger: Option<Ledger>,
    nodes: Nodes,
    present: Present,
    /// UIDs of pods with a claim.
    uids: BTreeMap<String, String>,
    /// Pods that were seen with all that they asked for: when they go, and their node no longer
    /// tells of it, nothing is kept for them.
    served: BTreeSet<String>,
    /// UIDs of pods that found no node in time: what is noted on them is believed no more, however
    /// late the end is that it names.
    given_up: BTreeMap<String, String>,
    /// How often the reservation of a pod was renewed, by UID.
    renewals: BTreeMap<String, u32>,
    /// Pods that are gone and may hold something, and until when that is believed.
    lingering: BTreeMap<String, Duration>,
    /// Pods that a disruption budget protects, and until when that is believed.
    protected: BTreeMap<String, Duration>,
    /// Pods at the gate: UID, since when, and since when nothing could hold them.
    gated: BTreeMap<String, Gated>,
    /// Released pods that no node takes.
    stranded: Stranded,
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

impl Default for Gatekeeper {
    fn default() -> Self {
        Self::new(PATIENCE)
    }
}

impl Gatekeeper {
    /// Knows nothing yet. A pod must be unplaceable for `patience` before it is released as
    /// unschedulable.
    pub fn new(patience: Duration) -> Self {
        Self {
            patience,
            ledger: None,
            nodes: Nodes::default(),
            present: Present::default(),
            uids: BTreeMap::new(),
            served: BTreeSet::new(),
            given_up: BTreeMap::new(),
            renewals: BTreeMap::new(),
            lingering: BTreeMap::new(),
            protected: BTreeMap::new(),
            gated: BTreeMap::new(),
            stranded: Stranded::default(),
            rollout: Rollout::default(),
            rested: Duration::ZERO,
        }
    }

    /// Forgets everything: another process leads, or has led.
    pub fn reset(&mut self) {
        *self = Self::new(self.patience);
    }

    /// A pod could not be let through: what was held for it is free.
    pub fn failed(&mut self, pod: &str) {
        self.uids.remove(pod);
        if let Some(ledger) = &mut self.ledger {
            ledger.release(pod);
        }
    }

    /// The API server refused what would let a pod through, in its words. One that it will always
    /// refuse, for its size say, is to take no room from others at each look, and its owner is to
    /// know.
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
        self.expire(&mut ledger, &open, now);
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
        let seen = Seen { cluster, living: &living, open: &open, demand, now };
        turn.rescue = self.rescue(&ledger, &seen);
        if let Some(next) = turn.rescue.next {
            turn.look_in(next);
        }
        self.open(&mut ledger, candidates, &seen, &mut turn);
        self.ledger = Some(ledger);
        turn
    }

    /// Ends reservations whose time has come and whose pod the scheduler refuses. Others are kept:
    /// the scheduler may be slow, or wait for a volume that is being made, and what keeps the nodes
    /// from the pod may pass. [`stranded`] watches for how long.
    fn expire(&mut self, ledger: &mut Ledger, open: &[&PodObject], now: Now) {
        let mut due: BTreeSet<String> = ledger.overdue(Moment(now.epoch)).into_iter().collect();
        for pod in open.iter().filter(|pod| is_released(pod)) {
            let name = crate::pods::full_name(&pod.metadata);
            if !due.remove(&name) {
                continue;
            }
            let uid = pod.uid().unwrap_or_default();
            let nominated = pod.status.nominated_node_name.as_deref().is_some_and(|node| !node.is_empty());
            let renewals = self.renewals.entry(uid.clone()).or_default();
            if *renewals < MOST_RENEWALS && (nominated || !pod.is_refused_by_scheduler()) {
                *renewals += 1;
                ledger.extend(&name, Moment(now.epoch.saturating_add(HOLD.as_secs())));
                continue;
            }
            tracing::warn!(pod = name, "reservation expired before the pod was bound");
            ledger.release(&name);
            self.uids.remove(&name);
            self.given_up.insert(name, uid);
        }
        // Of pods that are gone, or that the watch has not told of yet.
        for pod in due {
            ledger.release(&pod);
            self.uids.remove(&pod);
        }
    }

    /// What helps released pods that are not bound.
    fn rescue(&mut self, ledger: &Ledger, seen: &Seen<'_>) -> Rescue {
        let Self { patience, nodes, present, stranded, renewals, .. } = self;
        let mut found: Vec<(&PodObject, stranded::Why)> = Vec::new();
        let mut unschedulable: Vec<Candidate<'_>> = Vec::new();
        for pod in seen.open.iter().copied().filter(|pod| is_released(pod)) {
            if let Some(why) = why_unbound(pod, ledger, nodes, present) {
                found.push((pod, why));
            } else if pod.placement.is_none() && pod.unschedulable {
                unschedulable.push(Candidate::released(pod, nodes));
            }
        }
        let mut placing = LazyCell::new(|| Placing::new(seen, nodes, present, ledger));
        for candidate in unschedulable.iter().filter(|candidate| !candidate.asks.is_empty()) {
            let possible = placing
                .find(ledger, candidate)
                .map_or_else(|verdict| verdict.told(&candidate.asks, seen.demand.get(&candidate.name)).1, |_| true);
            if possible {
                found.push((candidate.pod, stranded::Why::Possible));
            }
        }
        let unbound: BTreeSet<&str> = unbound_uids(seen.open);
        renewals.retain(|uid, _| unbound.contains(uid.as_str()));
        let mut rescue = stranded.look(found, *patience, seen.now.up);
        let over = |pod: &&&PodObject| {
            pod.node().is_some() && pod.condition(CONDITION_PLACED).is_some_and(|condition| condition.status == "False")
        };
        rescue.advise.extend(seen.open.iter().filter(over).map(|pod| Advice {
            pod: crate::pods::full_name(&pod.metadata),
            uid: pod.uid().unwrap_or_default(),
            message: None,
        }));
        rescue
    }

    /// A pod could not be told that it is stranded.
    pub(crate) fn not_advised(&mut self, uid: &str) {
        self.stranded.not_advised(uid);
    }

    /// A stranded pod could not be evicted.
    pub(crate) fn not_recreated(&mut self, uid: &str, up: Duration) {
        self.stranded.not_recreated(uid, up);
    }

    /// Looks at MPS hosts, where they are to be replaced: which are to go, and on which nodes
    /// nothing may be held for it.
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
        let mut on_the_way = if outdated { rollout::pending_users(ledger, serves) } else { BTreeMap::new() };
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
        let step = self.rollout.update(&views, up);
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

    /// Takes in pods that are not settled: who is bound, who is gone; returns those that wait at
    /// our gate. `left` may be gone.
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
            let open = pod.waits_at_gate();
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

    /// Reserves room for those that fit, and says of the others what they wait for.
    fn open(&mut self, ledger: &mut Ledger, candidates: Vec<(String, &PodObject)>, seen: &Seen<'_>, turn: &mut Turn) {
        withdraw_unless_waiting(ledger, &candidates);
        if candidates.is_empty() {
            return;
        }
        self.protected.retain(|_, until| *until > seen.now.up);
        // A budget that allows disruptions again is not reported to the gate.
        self.protected.values().for_each(|until| turn.look_in(until.saturating_sub(seen.now.up)));
        let Self { patience, nodes, present, uids, gated, protected, rollout, stranded, .. } = self;
        let candidates = leave_alone(ledger, gated, candidates, seen.now.up, turn);
        let candidates: Vec<Candidate<'_>> =
            candidates.into_iter().map(|(name, pod)| Candidate::new(name, pod, nodes, stranded.avoids(pod))).collect();
        let mut placing = Placing::new(seen, nodes, present, ledger);
        let holders = LazyCell::new(|| nodes.holders(seen.living, protected));
        let mut preempting = Preempting { holders: &holders, protected, uids, tried: 0 };
        let mut newly_held: Vec<(String, String)> = Vec::new();
        for candidate in &candidates {
            if turn.openings.len() >= AT_ONCE {
                turn.more = true;
                break;
            }
            let Candidate { name, pod, asks, .. } = candidate;
            let waited = gated.get(name).map_or(Duration::ZERO, |gated| seen.now.up.saturating_sub(gated.since));
            if asks.is_empty() {
                turn.openings.push(candidate.opening(Why::NotOurs, Towards::Anywhere, waited));
                continue;
            }
            if let Some(pause) = stranded.held_back(pod, seen.now.up) {
                turn.look_in(pause);
                drop(ledger.withdraw(name));
                turn.waiting.insert(name.clone(), Waiting { reason: Reason::NoRoom, message: HELD_BACK.to_owned() });
                continue;
            }
            let verdict = match placing.find(ledger, candidate) {
                Ok(fits) => {
                    let expires = Moment(seen.now.epoch.saturating_add(HOLD.as_secs()));
                    if ledger.reserve(name, &fits, expires).is_ok() {
                        placing.placed(candidate, &fits);
                        newly_held.push((name.clone(), pod.uid().unwrap_or_default()));
                        let hostnames = fits.iter().filter_map(|fit| nodes.hostname(fit.node())).collect();
                        let why = Why::Held(note(&pod.spec.asks, &fits, expires));
                        turn.openings.push(candidate.opening(why, Towards::Among(hostnames), waited));
                    }
                    continue;
                }
                Err(verdict) => verdict,
            };
            let found = preempting.preempt(ledger, &placing, candidate, &verdict);
            let impossible = verdict.impossible();
            let (message, may_pass) = verdict.told(asks, seen.demand.get(name));
            let message = message + &rollout.describe_withheld(asks, &placing.eligible(candidate));
            let never = gated.get_mut(name).and_then(|gated| gated.never_for(may_pass, seen.now.up));
            match never {
                Some(never) if never >= *patience => {
                    turn.openings.push(candidate.give_up(impossible, message, waited));
                    continue;
                }
                Some(never) => turn.look_in(patience.saturating_sub(never)),
                None => {}
            }
            match found {
                Some(Preemption { node, takes, victims }) => {
                    turn.evictions.extend(preempting.evictions(victims, name));
                    // Refused only where it has a claim, and then it does not wait.
                    let _ = ledger.nominate(name, Nomination { priority: candidate.wanted.priority, node, takes });
                }
                None => drop(ledger.withdraw(name)),
            }
            turn.waiting.insert(name.clone(), Waiting { reason: Reason::NoRoom, message });
        }
        uids.extend(newly_held);
    }
}

/// UIDs of released pods that are not bound.
fn unbound_uids<'a>(open: &[&'a PodObject]) -> BTreeSet<&'a str> {
    open.iter().filter(|pod| is_released(pod)).filter_map(|pod| pod.metadata.uid.as_deref()).collect()
}

/// Whether a pod has no gate and is not bound, and nobody has deleted it.
fn is_released(pod: &PodObject) -> bool {
    pod.node().is_none() && pod.spec.scheduling_gates.is_empty() && pod.metadata.deletion_timestamp.is_none()
}

/// Why a pod that was released to nodes is not bound and will not be; nothing where the scheduler
/// may still bind it.
fn why_unbound(pod: &PodObject, ledger: &Ledger, nodes: &Nodes, present: &Present) -> Option<stranded::Why> {
    let placement = pod.placement.as_ref()?;
    let names = || placement.nodes.keys().cloned().collect();
    let wanted = planned(pod);
    let nominated = pod.status.nominated_node_name.as_deref();
    let there: Vec<&String> = placement.nodes.keys().filter(|node| nodes.has(node)).collect();
    let refusal = |node: &&String| {
        let reason = nodes.refusal(node, &wanted, present).filter(|_| nominated != Some(node))?;
        Some(format!("{node}: {reason}"))
    };
    let reasons: Vec<String> = there.iter().filter_map(refusal).collect();
    // What its nodes say comes first: it also holds once the reservation has ended.
    if there.is_empty() {
        Some(stranded::Why::Gone(names()))
    } else if reasons.len() == there.len() {
        Some(stranded::Why::Refused(reasons.join("; ")))
    } else if ledger.claim(&crate::pods::full_name(&pod.metadata)).is_none() {
        Some(stranded::Why::Expired(names()))
    } else {
        None
    }
}

/// Where a pod is, or may go by what is noted on it.
fn place(pod: &PodObject, now: Now) -> Option<Place> {
    if let Some(node) = pod.node() {
        return Some(Place::Bound(node.to_owned()));
    }
    if !pod.spec.scheduling_gates.is_empty() {
        return None;
    }
    let placement = pod.placement.as_ref()?;
    // Whoever wrote it may have had another clock, and may have renewed it: from now on it is held
    // for no longer than any other, and what is over is looked at at once.
    let expires = Moment(placement.until.clamp(now.epoch, now.epoch.saturating_add(HOLD.as_secs())));
    Some(Place::OneOf { nodes: placement.nodes.keys().cloned().collect(), expires })
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

/// What is noted on the pod: what has to be of one device each, in the order in which it is asked
/// for.
fn note(asks: &[Ask], fits: &Fits, expires: Moment) -> Placement {
    let held = |takes: &[Reservation]| {
        let mut left: Vec<&Reservation> = takes.iter().filter(|take| !is_interchangeable(&take.resource)).collect();
        let mut held = Vec::with_capacity(asks.len());
        for ask in asks {
            let same = |take: &&Reservation| take.resource == ask.resource && take.units == ask.units;
            if let Some(index) = left.iter().position(same) {
                let Reservation { resource, units, device } = left.remove(index).clone();
                held.push(ReservedUnits { resource, units: units.get(), device });
            }
        }
        held
    };
    let nodes = fits.iter().map(|fit| (fit.node().to_owned(), held(fit.takes()))).collect();
    Placement { until: expires.0, nodes }
}

#[cfg(test)]
mod tests;
