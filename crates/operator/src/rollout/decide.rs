//! Decides which MPS hosts are replaced now, and on which nodes nothing may be reserved meanwhile.
//! Pure: the time is given.
use std::collections::BTreeMap;
use std::time::Duration;

use cleave_api::names::is_mps;
use cleave_plan::ledger::Ask;
use k8s_openapi::api::core::v1::ObjectReference;

use super::hosts::{Host, regarding};
use super::view::View;

/// How long nothing must use MPS on a node while nothing new is held there, before its host is
/// replaced: what the watches have not told yet (pods that pass no gate) comes within it.
pub(crate) const SETTLE: Duration = Duration::from_secs(2);
/// How long a host may take from its end until its successor serves.
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);
/// For how long a host must serve before others are replaced: one that starts and ends again and
/// again serves for moments.
pub(crate) const STEADY: Duration = Duration::from_secs(10);
/// How often is looked at most: the gate looks at each change of a pod.
pub(crate) const PERIOD: Duration = Duration::from_secs(1);
/// How long is waited where the API server refuses to have a pod deleted.
const REFUSED: Duration = Duration::from_secs(60);
/// Of so many hosts one is replaced at once, when one of the newest revision has shown that it
/// serves.
const ONE_OF: usize = 10;
/// Nodes that a message names.
const NAMED: usize = 4;

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
pub(crate) struct Rollout {
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
    pub(crate) fn withholds(&self, node: &str) -> bool {
        self.closing.contains_key(node) || self.away.get(node).is_some_and(|away| away.down && !away.late)
    }

    /// What to add for a pod that waits and could go to these nodes; empty where nothing that it
    /// asks for is withheld.
    pub(crate) fn in_words(&self, asks: &[Ask], nodes: &[&str]) -> String {
        let nodes = nodes.iter().copied().filter(|_| asks.iter().any(|ask| is_mps(&ask.resource)));
        let withheld: Vec<&str> = nodes.filter(|node| self.withholds(node)).take(NAMED).collect();
        if withheld.is_empty() {
            return String::new();
        }
        format!("; the MPS host of {} is being replaced, or not ready", withheld.join(", "))
    }

    /// Looks at the nodes.
    pub(crate) fn look(&mut self, nodes: &BTreeMap<String, View>, up: Duration) -> Step {
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
    pub(crate) fn replaced(&mut self, replacement: &Replacement, up: Duration) {
        let Replacement { node, host } = replacement;
        self.closing.remove(node);
        self.asked.insert(node.clone(), host.uid.clone());
        let why = format!("{} is to end", host.pod);
        self.away.insert(node.clone(), Away { since: up, why, down: true, late: false, serving: None });
    }

    /// A pod is not to be deleted after all, or is gone: the next look sees what is there.
    pub(crate) fn given_up(&mut self, node: &str) {
        self.closing.remove(node);
    }

    /// The API server did not have a pod deleted. Nothing is kept from pods meanwhile.
    pub(crate) fn refused(&mut self, node: &str, up: Duration) {
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
            // Those last that did not serve before: that they do not afterwards says little of the
            // release.
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

#[cfg(test)]
mod tests;
