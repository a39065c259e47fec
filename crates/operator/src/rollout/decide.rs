//! Decides which MPS hosts are replaced now, and on which nodes no MPS shares may be reserved.
//! Pure: callers pass in the time.
use std::collections::BTreeMap;
use std::time::Duration;

use cleave_api::names::is_mps;
use cleave_plan::ledger::DeviceRequest;
use k8s_openapi::api::core::v1::ObjectReference;

use super::hosts::{MpsHost, daemon_set_reference};
use super::view::MpsHostView;

/// How long MPS must be unused on a closed node before its MPS host is replaced. During this time,
/// the watches report pods that bypass the gate.
pub(crate) const IDLE_TIME: Duration = Duration::from_secs(2);
/// Maximum time from the deletion of an MPS host until its successor serves.
pub(crate) const START_TIMEOUT: Duration = Duration::from_secs(300);
/// How long an MPS host must serve before other MPS hosts are replaced. A crash-looping MPS host
/// serves only briefly.
pub(crate) const STEADY_TIME: Duration = Duration::from_secs(10);
/// Minimum time between two updates. The placement controller reconciles more often, on each change
/// of a pod.
pub(crate) const UPDATE_INTERVAL: Duration = Duration::from_secs(1);
/// How long replacement is suspended after the API server refused to delete a pod or did not
/// answer.
const REFUSAL_BACKOFF: Duration = Duration::from_secs(60);
/// Once an MPS host of the newest revision has served, the operator replaces at most one in ten MPS
/// hosts at a time, but at least one.
const BATCH_DIVISOR: usize = 10;
/// Maximum number of nodes that a message names.
const MAX_NAMED_NODES: usize = 4;

/// An MPS host whose pod the operator deletes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Replacement {
    /// Name of the node.
    pub node: String,
    /// The MPS host on the node.
    pub host: MpsHost,
}

impl Replacement {
    /// Returns the MPS host's `DaemonSet`, for Events.
    pub(crate) fn daemon_set_reference(&self) -> ObjectReference {
        daemon_set_reference(&self.host)
    }
}

/// The actions to take now, and the state of the replacement.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RolloutStep {
    /// MPS hosts whose pods the operator deletes.
    pub replace: Vec<Replacement>,
    /// Why replacement stopped and which `DaemonSet` is affected. `None` if replacement is not
    /// stopped, or if the stop was already reported.
    pub stop_report: Option<(String, ObjectReference)>,
    /// Whether replacement is stopped.
    pub stopped: bool,
    /// Nodes whose outdated MPS host is not replaced yet, each with the reason.
    pub waiting: BTreeMap<String, String>,
    /// Number of outdated MPS hosts.
    pub outdated: usize,
    /// Time until the next update, even if nothing changes.
    pub next: Option<Duration>,
}

/// A node whose MPS host does not serve.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Outage {
    since: Duration,
    why: String,
    /// Whether the MPS host itself is down, and not only one of its daemons.
    down: bool,
    /// Whether the MPS host has not served for [`START_TIMEOUT`].
    late: bool,
    /// When the MPS host began to serve again. The outage ends after [`STEADY_TIME`] of service.
    serving: Option<Duration>,
}

/// The state of the replacement between updates. Times are durations since the process started.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rollout {
    /// Closed nodes, on which no MPS shares are reserved. Each value is the UID of the MPS host to
    /// replace and the time of closing.
    closed: BTreeMap<String, (String, Duration)>,
    /// The UIDs of deleted MPS hosts, by node, until the outage ends or has lasted for
    /// [`START_TIMEOUT`].
    deleted: BTreeMap<String, String>,
    outages: BTreeMap<String, Outage>,
    /// End of the suspension after the API server refused a deletion or did not answer.
    suspended: Option<Duration>,
    /// Why replacement is stopped, as last reported.
    reported: Option<String>,
}

impl Rollout {
    /// Returns whether no MPS shares may be reserved on a node.
    pub(crate) fn is_withheld(&self, node: &str) -> bool {
        self.closed.contains_key(node) || self.outages.get(node).is_some_and(|outage| outage.down && !outage.late)
    }

    /// Returns the text to add to the message of a waiting pod that could use these nodes. Returns
    /// "" if the nodes withhold none of the requested resources.
    pub(crate) fn describe_withheld(&self, device_requests: &[DeviceRequest], nodes: &[&str]) -> String {
        // Many pods may wait that can use many nodes.
        let is_any_withheld = !self.closed.is_empty() || self.outages.keys().any(|node| self.is_withheld(node));
        if !is_any_withheld || !device_requests.iter().any(|request| is_mps(&request.resource)) {
            return String::new();
        }
        let mut withheld = nodes.iter().copied().filter(|node| self.is_withheld(node));
        let named: Vec<&str> = withheld.by_ref().take(MAX_NAMED_NODES).collect();
        if named.is_empty() {
            return String::new();
        }
        let more = if withheld.next().is_some() { ", ..." } else { "" };
        format!("; nodes whose MPS host is being replaced or is not ready: {}{more}", named.join(", "))
    }

    /// Updates the state from the nodes. Returns the actions to take now.
    pub(crate) fn update(&mut self, nodes: &BTreeMap<String, MpsHostView>, up: Duration) -> RolloutStep {
        self.update_outages(nodes, up);
        let mut step = RolloutStep::default();
        let stopped = self.stop_reason(nodes);
        step.stopped = stopped.is_some();
        if stopped != self.reported {
            let set = nodes.values().find_map(|view| view.host.as_ref()).map(daemon_set_reference);
            step.stop_report = stopped.clone().zip(set);
            self.reported = stopped;
        }
        self.close_nodes(nodes, up, step.stopped);
        for (name, (_, since)) in &self.closed {
            let due = since.saturating_add(IDLE_TIME);
            let host = nodes.get(name).and_then(|view| view.host.clone());
            match host.filter(|_| due <= up) {
                Some(host) => step.replace.push(Replacement { node: name.clone(), host }),
                None => step.schedule_check(due, up),
            }
        }
        for outage in self.outages.values() {
            match outage.serving {
                Some(serving) => step.schedule_check(serving.saturating_add(STEADY_TIME), up),
                None if outage.late => {}
                None => step.schedule_check(outage.since.saturating_add(START_TIMEOUT), up),
            }
        }
        let is_outdated =
            |view: &&MpsHostView| view.host.as_ref().is_some_and(|host| host.outdated && !host.terminating);
        step.outdated = nodes.values().filter(is_outdated).count();
        if let Some(until) = self.suspended.filter(|until| step.outdated > 0 && *until > up) {
            step.schedule_check(until, up);
        }
        for (name, view) in nodes.iter().filter(|(name, view)| is_outdated(view) && !self.closed.contains_key(*name)) {
            let why = view.busy.clone().unwrap_or_else(|| "other MPS hosts are replaced first".to_owned());
            step.waiting.insert(name.clone(), why);
        }
        step
    }

    /// Records that a pod was deleted.
    pub(crate) fn record_replacement(&mut self, replacement: &Replacement, up: Duration) {
        let Replacement { node, host } = replacement;
        self.closed.remove(node);
        self.deleted.insert(node.clone(), host.uid.clone());
        let why = format!("{} is being deleted", host.pod);
        self.outages.insert(node.clone(), Outage { since: up, why, down: true, late: false, serving: None });
    }

    /// Records that the pod of an MPS host was not deleted or no longer exists. Reopens the node.
    pub(crate) fn record_no_deletion(&mut self, node: &str) {
        self.closed.remove(node);
    }

    /// Records that the API server refused a deletion or did not answer. Pods can use the node
    /// until replacement resumes.
    pub(crate) fn record_refusal(&mut self, node: &str, up: Duration) {
        self.closed.remove(node);
        self.suspended = Some(up.saturating_add(REFUSAL_BACKOFF));
    }

    /// Records the MPS hosts that do not serve, and when each stopped serving.
    fn update_outages(&mut self, nodes: &BTreeMap<String, MpsHostView>, up: Duration) {
        self.outages.retain(|name, _| nodes.contains_key(name));
        for (name, view) in nodes {
            let since = self.outages.get(name).map_or(up, |outage| outage.since);
            if let Some((why, down)) = view.outage(self.deleted.get(name).map(String::as_str)) {
                let late = up.saturating_sub(since) >= START_TIMEOUT;
                self.outages.insert(name.clone(), Outage { since, why, down, late, serving: None });
            } else if let Some(outage) = self.outages.get_mut(name) {
                let serving = *outage.serving.get_or_insert(up);
                outage.down = false;
                if up.saturating_sub(serving) >= STEADY_TIME || view.host.as_ref().is_some_and(|host| host.outdated) {
                    self.outages.remove(name);
                }
            }
        }
        let outages = &self.outages;
        self.deleted.retain(|name, _| outages.get(name).is_some_and(|outage| !outage.late));
        self.closed.retain(|name, (uid, _)| {
            let host = nodes.get(name).filter(|view| view.busy.is_none()).and_then(|view| view.host.as_ref());
            host.is_some_and(|host| host.outdated && !host.terminating && host.uid == *uid)
        });
        self.suspended = self.suspended.filter(|until| *until > up);
    }

    /// Returns why replacement is stopped. Returns `None` if replacement is not stopped.
    fn stop_reason(&self, nodes: &BTreeMap<String, MpsHostView>) -> Option<String> {
        let counts = |name: &str| nodes.get(name).is_some_and(|view| !view.excused);
        let late: Vec<_> = self.outages.iter().filter(|(name, outage)| outage.late && counts(name)).collect();
        let named: Vec<String> =
            late.iter().take(MAX_NAMED_NODES).map(|(name, outage)| format!("node {name}: {}", outage.why)).collect();
        let more = late.len().saturating_sub(MAX_NAMED_NODES);
        let more = if more > 0 { format!("; and {more} more") } else { String::new() };
        let seconds = START_TIMEOUT.as_secs();
        (!named.is_empty()).then(|| {
            format!(
                "stopped replacing MPS hosts, because replaced MPS hosts have not served for {seconds} s: {}{more}. Replacement continues when they serve or their DaemonSet changes",
                named.join("; ")
            )
        })
    }

    /// Selects nodes to close, up to the number of MPS hosts that may be replaced at a time.
    fn close_nodes(&mut self, nodes: &BTreeMap<String, MpsHostView>, up: Duration, stopped: bool) {
        if stopped || self.suspended.is_some() {
            self.closed.clear();
            return;
        }
        let hosts = || nodes.iter().filter_map(|(name, view)| Some((name, view, view.host.as_ref()?)));
        let proven = hosts().any(|(name, _, host)| !host.outdated && !self.outages.contains_key(name));
        let max_replacing = if proven { (hosts().count() / BATCH_DIVISOR).max(1) } else { 1 };
        let excused = |name: &String| nodes.get(name).is_some_and(|view| view.excused);
        let replacing = self.outages.keys().filter(|name| self.deleted.contains_key(*name) || !excused(name)).count();
        // Reopen nodes if too many are closed. Too many nodes are closed when MPS hosts stop
        // serving after nodes were closed.
        while !self.closed.is_empty() && replacing.saturating_add(self.closed.len()) > max_replacing {
            self.closed.pop_last();
        }
        let mut next: Vec<_> = hosts()
            .filter(|(name, view, host)| {
                host.outdated && !host.terminating && view.busy.is_none() && !self.closed.contains_key(*name)
            })
            .filter(|(name, _, _)| !self.outages.contains_key(*name))
            // First replace the MPS hosts that serve, then the other MPS hosts. If a new MPS host
            // fails on a node whose old MPS host did not serve, the failure does not show whether
            // the new release works.
            .map(|(name, view, host)| (!host.ready || view.daemon_problem.is_some(), name.clone(), host.uid.clone()))
            .collect();
        next.sort();
        let room = max_replacing.saturating_sub(replacing.saturating_add(self.closed.len()));
        self.closed.extend(next.into_iter().take(room).map(|(_, name, uid)| (name, (uid, up))));
    }
}

impl RolloutStep {
    fn schedule_check(&mut self, at: Duration, up: Duration) {
        let from_now = at.saturating_sub(up);
        self.next = Some(self.next.map_or(from_now, |next| next.min(from_now)));
    }
}

#[cfg(test)]
mod tests;
