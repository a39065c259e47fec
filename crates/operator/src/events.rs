//! Decides which Events to publish about pods and nodes. Selects each Event once, and limits the
//! number of Events per pass. Pure: callers pass in the time.
use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType};

use crate::policies::demand::{Outcome, Reason, WaitingPod};
use crate::policies::status::shorten;
use crate::read::Observed;

/// How long a pod must wait before an Event reports the wait. Most pods get a reservation sooner.
const WAIT_EVENT_DELAY: Duration = Duration::from_secs(2);
/// Minimum time between two Events about one pod with different messages.
const MIN_EVENT_INTERVAL: Duration = Duration::from_secs(300);
/// Maximum number of Events about pods in one pass, and maximum number of Events about nodes. A
/// thousand waiting pods must not cause a thousand Events in one pass.
const MAX_EVENTS_PER_PASS: usize = 20;
/// Maximum length of an Event's note in bytes. The API server refuses notes above 1 KiB.
const MAX_NOTE_BYTES: usize = 1000;

/// Stores the reported messages, so that each Event is published once.
#[derive(Debug, Default)]
pub(crate) struct EventSelector {
    pods: BTreeMap<String, PodReport>,
    excluded_nodes: BTreeMap<String, String>,
    excluded_gpus: BTreeMap<(String, String), String>,
}

/// The last report about one pod.
#[derive(Debug)]
struct PodReport {
    reason: Reason,
    /// When the pod began to wait for its current reason.
    since: Duration,
    /// Message and time of the pod's last Event.
    last: Option<(String, Duration)>,
}

/// Delay before the next check of pods that have not waited long enough for an Event.
pub(crate) const EVENT_CHECK_DELAY: Duration = WAIT_EVENT_DELAY;

impl EventSelector {
    /// Returns the Events to publish now.
    pub(crate) fn events(
        &mut self,
        outcome: &Outcome,
        observed: &Observed,
        now: Duration,
    ) -> Vec<(ObjectReference, Event)> {
        let mut events = self.node_events(outcome, observed);
        let waiting = observed.pods.iter().filter(|claimant| claimant.node.is_none());
        let uids = waiting.map(|claimant| (claimant.pod.name.clone(), claimant.uid.clone())).collect();
        events.extend(self.pod_events(&outcome.waiting, &uids, now));
        events
    }

    /// Returns the Events to publish now for waiting pods. `uids` maps the names of existing pods
    /// to their UIDs.
    pub(crate) fn pod_events(
        &mut self,
        waiting: &BTreeMap<String, WaitingPod>,
        uids: &BTreeMap<String, String>,
        now: Duration,
    ) -> Vec<(ObjectReference, Event)> {
        self.pods.retain(|pod, _| waiting.contains_key(pod));
        let mut events = Vec::new();
        for (name, waiting) in waiting {
            let Some(uid) = uids.get(name) else { continue };
            let reported =
                self.pods.entry(name.clone()).or_insert(PodReport { reason: waiting.reason, since: now, last: None });
            if reported.reason != waiting.reason {
                (reported.reason, reported.since) = (waiting.reason, now);
            }
            let (type_, reason, patience) = match waiting.reason {
                Reason::Repartitioning => (EventType::Normal, "GpuRepartitioning", Duration::ZERO),
                Reason::NoRoom
                | Reason::OverMax
                | Reason::WaitsForGuarantee
                | Reason::Protected
                | Reason::GangIncomplete => (EventType::Warning, "NoGpu", WAIT_EVENT_DELAY),
                Reason::Malformed | Reason::GangTooLarge => (EventType::Warning, "NoGpu", Duration::ZERO),
                // Publish no Event: the scheduler itself reports pods that it has not bound, and a
                // change of a node ends soon.
                Reason::Scheduler | Reason::NodeChanging => continue,
            };
            let is_new = reported.last.as_ref().is_none_or(|(message, at)| {
                *message != waiting.message && now.saturating_sub(*at) >= MIN_EVENT_INTERVAL
            });
            if !is_new || now.saturating_sub(reported.since) < patience || events.len() >= MAX_EVENTS_PER_PASS {
                continue;
            }
            reported.last = Some((waiting.message.clone(), now));
            events.push((pod_reference(name, uid), new_event(type_, reason, &waiting.message)));
        }
        events
    }

    fn node_events(&mut self, outcome: &Outcome, observed: &Observed) -> Vec<(ObjectReference, Event)> {
        let mut events = Vec::new();
        for (node, why) in &outcome.excluded_nodes {
            if self.excluded_nodes.get(node) != Some(why) {
                let note = format!("GPU plans exclude the node: {why}");
                events.push((node_reference(observed, node), new_event(EventType::Warning, "GpuNodeExcluded", &note)));
            }
        }
        for node in self.excluded_nodes.keys().filter(|node| !outcome.excluded_nodes.contains_key(*node)) {
            let note = "GPU plans include the node again";
            events.push((node_reference(observed, node), new_event(EventType::Normal, "GpuNodeIncluded", note)));
        }
        self.excluded_nodes.clone_from(&outcome.excluded_nodes);
        for (at, why) in outcome.excluded_gpus.iter().filter(|(at, why)| self.excluded_gpus.get(*at) != Some(*why)) {
            let note = format!("GPU {} is not repartitioned: {why}", at.1);
            let node = node_reference(observed, &at.0);
            // Without a different `secondary`, the recorder would merge the Events of two GPUs, and
            // keep only the first note.
            let secondary = Some(ObjectReference { field_path: Some(at.1.clone()), ..node.clone() });
            events.push((node, Event { secondary, ..new_event(EventType::Warning, "GpuExcluded", &note) }));
        }
        self.excluded_gpus.clone_from(&outcome.excluded_gpus);
        events.truncate(MAX_EVENTS_PER_PASS);
        events
    }

    /// Returns whether a pod waits for a free GPU or free shares and has no Event yet.
    pub(crate) fn has_unreported_wait(&self) -> bool {
        self.pods.values().any(|reported| reported.last.is_none() && reported.reason == Reason::NoRoom)
    }
}

/// Returns a reference to the pod `namespace/name`.
pub(crate) fn pod_reference(pod: &str, uid: &str) -> ObjectReference {
    let (namespace, name) = pod.split_once('/').unwrap_or(("default", pod));
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: Some(namespace.to_owned()),
        name: Some(name.to_owned()),
        uid: Some(uid.to_owned()),
        ..ObjectReference::default()
    }
}

/// Creates the Event of a pod that was released as unschedulable.
pub(crate) fn unschedulable_event(message: &str) -> Event {
    let note = format!(
        "{message}. The pod fits on no GPU of the cluster, so it was released as unschedulable. Change its requests or constraints, or add a GPU node, then recreate the pod."
    );
    new_event(EventType::Warning, "NoGpuFits", &note)
}

/// Creates the Event of a released pod that no node accepts.
pub(crate) fn stranded_event(message: &str) -> Event {
    Event { action: "Recreate".to_owned(), ..new_event(EventType::Warning, "Stranded", message) }
}

/// Creates the Event of a pod that is evicted for a pod of higher priority.
pub(crate) fn preempted_event(by: &str) -> Event {
    let note = format!("evicted so that {by}, which has a higher priority, can run");
    Event { action: "Preempt".to_owned(), ..new_event(EventType::Normal, "Preempted", &note) }
}

/// Creates the Event of a pod that is evicted by the rules of quotas. `by` is the pod that gets the
/// released resources.
pub(crate) fn reclaimed_event(by: &str, why: &str) -> Event {
    let note = format!("evicted for {by}: {why}");
    Event { action: "Preempt".to_owned(), ..new_event(EventType::Normal, "Reclaimed", &note) }
}

/// Creates the Event of a pod that is evicted because it used a GPU outside its share.
pub(crate) fn outside_share_event(node: &str, message: &str) -> Event {
    let note = format!("evicted from {node}, because the GPU's policy sets `enforcement: Evict`: {message}");
    Event { action: "Evict".to_owned(), ..new_event(EventType::Warning, "EvictedOutsideShare", &note) }
}

/// Creates the Event of a pod whose eviction a disruption budget refuses.
pub(crate) fn protected_event(message: &str) -> Event {
    let note = format!(
        "The pod exceeded its limits, but a disruption budget prevents its eviction. Delete the pod, or change the \
         budget. The API server answered: {message}"
    );
    Event { action: "Evict".to_owned(), ..new_event(EventType::Warning, "EvictionProtected", &note) }
}

/// Creates the Event of an MPS host that is replaced with a pod of the newest revision of its
/// `DaemonSet`.
pub(crate) fn mps_host_replaced_event(node: &str, pod: &str, uid: &str) -> Event {
    let note = format!("replacing {pod} with a pod of the newest revision, because nothing uses MPS on node {node}");
    // The recorder merges Events that differ only in their note. A different `secondary` prevents
    // the merge.
    let secondary = Some(pod_reference(pod, uid));
    Event { action: "Replace".to_owned(), secondary, ..new_event(EventType::Normal, "MpsHostReplaced", &note) }
}

/// Creates the Event that reports that the replacement of MPS hosts has stopped.
pub(crate) fn rollout_stopped_event(message: &str) -> Event {
    Event { action: "Replace".to_owned(), ..new_event(EventType::Warning, "MpsHostUpgradeStopped", message) }
}

fn node_reference(observed: &Observed, node: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Node".to_owned()),
        name: Some(node.to_owned()),
        uid: observed.nodes.get(node).map(|node| node.uid.clone()),
        ..ObjectReference::default()
    }
}

fn new_event(type_: EventType, reason: &str, note: &str) -> Event {
    Event {
        type_,
        reason: reason.to_owned(),
        note: Some(shorten(note, MAX_NOTE_BYTES)),
        action: "Plan".to_owned(),
        secondary: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::Claimant;

    fn cluster(pods: usize) -> Observed {
        let claimant = |at: usize| Claimant {
            pod: cleave_plan::snapshot::Pod { name: format!("team/p{at}"), ..Default::default() },
            ..Claimant::default()
        };
        Observed { pods: (0..pods).map(claimant).collect(), ..Observed::default() }
    }

    fn outcome(pods: usize, reason: Reason, message: &str) -> Outcome {
        let waiting = (0..pods).map(|at| (format!("team/p{at}"), WaitingPod { reason, message: message.to_owned() }));
        Outcome { waiting: waiting.collect(), ..Outcome::default() }
    }

    fn at(second: u64) -> Duration {
        Duration::from_secs(second)
    }

    #[test]
    fn a_pod_that_waits_gets_one_event_for_each_reason() {
        let mut publisher = EventSelector::default();
        let cluster = cluster(1);
        let full = outcome(1, Reason::NoRoom, "No eligible GPU node. n1: full.");
        assert!(publisher.events(&full, &cluster, at(0)).is_empty(), "it may still find room");
        let events = publisher.events(&full, &cluster, at(2));
        let (regarding, event) = &events[0];
        assert_eq!((regarding.namespace.as_deref(), regarding.name.as_deref()), (Some("team"), Some("p0")));
        assert_eq!((event.reason.as_str(), event.note.as_deref()), ("NoGpu", Some("No eligible GPU node. n1: full.")));
        assert!(publisher.events(&full, &cluster, at(600)).is_empty(), "the same reason");
        let other = outcome(1, Reason::NoRoom, "No eligible GPU node. n1: cordoned.");
        assert_eq!(publisher.events(&other, &cluster, at(601)).len(), 1);
        assert!(publisher.events(&full, &cluster, at(602)).is_empty(), "not too often");
    }

    #[test]
    fn events_of_many_pods_are_spread_over_passes() {
        let mut publisher = EventSelector::default();
        let (cluster, full) = (cluster(50), outcome(50, Reason::NoRoom, "full"));
        publisher.events(&full, &cluster, at(0));
        let published: Vec<usize> = (2..6).map(|second| publisher.events(&full, &cluster, at(second)).len()).collect();
        assert_eq!(published, [20, 20, 10, 0]);
    }

    #[test]
    fn a_repartitioning_is_reported_immediately_and_a_wait_for_the_scheduler_is_not() {
        let mut publisher = EventSelector::default();
        let cluster = cluster(1);
        assert_eq!(publisher.events(&outcome(1, Reason::Repartitioning, "On n1"), &cluster, at(0)).len(), 1);
        assert!(publisher.events(&outcome(1, Reason::Scheduler, "On n1"), &cluster, at(1)).is_empty());
    }

    #[test]
    fn each_replaced_mps_host_gets_its_own_event() {
        let [first, second] =
            ["a", "b"].map(|name| mps_host_replaced_event("n1", &format!("ns/{name}"), name).secondary);
        assert!(first.is_some() && first != second, "{first:?}, {second:?}");
    }

    #[test]
    fn a_node_gets_events_when_plans_exclude_it_and_include_it_again() {
        let mut publisher = EventSelector::default();
        let excluded = Outcome {
            excluded_nodes: BTreeMap::from([("n1".into(), "the agent is not ready".into())]),
            ..Outcome::default()
        };
        let reasons = |events: Vec<(ObjectReference, Event)>| {
            events.into_iter().map(|(_, event)| event.reason).collect::<Vec<_>>()
        };
        assert_eq!(reasons(publisher.events(&excluded, &cluster(0), at(0))), ["GpuNodeExcluded"]);
        assert!(publisher.events(&excluded, &cluster(0), at(1)).is_empty());
        assert_eq!(reasons(publisher.events(&Outcome::default(), &cluster(0), at(2))), ["GpuNodeIncluded"]);
    }
}
