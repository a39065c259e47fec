//! What pods and nodes are told by events: once each, and not all at once. Pure: the time is given.
use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType};

use crate::policies::demand::{Outcome, Reason, Waiting};
use crate::policies::status::shorten;
use crate::read::Observed;

/// How long a pod must have been without room before it is told so: most find some meanwhile.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a pod is not told of another reason.
const AGAIN: Duration = Duration::from_secs(300);
/// Events of one pass: a thousand pods that wait are no reason for a thousand events at once.
const AT_ONCE: usize = 20;
/// The API server takes notes of up to 1 KiB.
const LONGEST: usize = 1000;

/// Remembers what was told.
#[derive(Debug, Default)]
pub(crate) struct Teller {
    pods: BTreeMap<String, Told>,
    silent: BTreeMap<String, String>,
    stuck: BTreeMap<(String, String), String>,
}

/// What one pod was told.
#[derive(Debug)]
struct Told {
    reason: Reason,
    /// Since when it waits for this reason.
    since: Duration,
    /// What it was told last, and when.
    last: Option<(String, Duration)>,
}

/// When pods that were not told yet are to be.
pub(crate) const LOOK_AGAIN: Duration = PATIENCE;

impl Teller {
    /// The events to publish now.
    pub(crate) fn events(
        &mut self,
        outcome: &Outcome,
        observed: &Observed,
        now: Duration,
    ) -> Vec<(ObjectReference, Event)> {
        let mut events = self.of_nodes(outcome, observed);
        let waiting = observed.pods.iter().filter(|claimant| claimant.node.is_none());
        let uids = waiting.map(|claimant| (claimant.pod.name.clone(), claimant.uid.clone())).collect();
        events.extend(self.of_pods(&outcome.waiting, &uids, now));
        events
    }

    /// The events of pods that wait. `uids` are those of the pods that are there.
    pub(crate) fn of_pods(
        &mut self,
        waiting: &BTreeMap<String, Waiting>,
        uids: &BTreeMap<String, String>,
        now: Duration,
    ) -> Vec<(ObjectReference, Event)> {
        self.pods.retain(|pod, _| waiting.contains_key(pod));
        let mut events = Vec::new();
        for (name, waiting) in waiting {
            let Some(uid) = uids.get(name) else { continue };
            let told = self.pods.entry(name.clone()).or_insert(Told { reason: waiting.reason, since: now, last: None });
            if told.reason != waiting.reason {
                (told.reason, told.since) = (waiting.reason, now);
            }
            let (type_, reason, patience) = match waiting.reason {
                Reason::Cutting => (EventType::Normal, "GpuPlanned", Duration::ZERO),
                Reason::NoRoom => (EventType::Warning, "NoGpu", PATIENCE),
                Reason::Malformed => (EventType::Warning, "NoGpu", Duration::ZERO),
                // The scheduler tells what it waits for itself, and a change of a node is soon
                // over.
                Reason::Scheduler | Reason::NodeChanging => continue,
            };
            let news = told
                .last
                .as_ref()
                .is_none_or(|(message, at)| *message != waiting.message && now.saturating_sub(*at) >= AGAIN);
            if !news || now.saturating_sub(told.since) < patience || events.len() >= AT_ONCE {
                continue;
            }
            told.last = Some((waiting.message.clone(), now));
            events.push((of_pod(name, uid), event(type_, reason, &waiting.message)));
        }
        events
    }

    fn of_nodes(&mut self, outcome: &Outcome, observed: &Observed) -> Vec<(ObjectReference, Event)> {
        let mut events = Vec::new();
        for (node, why) in &outcome.silent {
            if self.silent.get(node) != Some(why) {
                let note = format!("it is left out of GPU plans: {why}");
                events.push((of_node(observed, node), event(EventType::Warning, "GpuNodeLeftOut", &note)));
            }
        }
        for node in self.silent.keys().filter(|node| !outcome.silent.contains_key(*node)) {
            let note = "it takes part in GPU plans again";
            events.push((of_node(observed, node), event(EventType::Normal, "GpuNodeTakenBack", note)));
        }
        self.silent.clone_from(&outcome.silent);
        for (at, why) in outcome.stuck.iter().filter(|(at, why)| self.stuck.get(*at) != Some(*why)) {
            let note = format!("GPU {} is left as it is: {why}", at.1);
            events.push((of_node(observed, &at.0), event(EventType::Warning, "GpuLeftOut", &note)));
        }
        self.stuck.clone_from(&outcome.stuck);
        events.truncate(AT_ONCE);
        events
    }

    /// Whether some pod has been without room for a while and may have to be told.
    pub(crate) fn is_waiting(&self) -> bool {
        self.pods.values().any(|told| told.last.is_none() && told.reason == Reason::NoRoom)
    }
}

/// A pod, `namespace/name`.
pub(crate) fn of_pod(pod: &str, uid: &str) -> ObjectReference {
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

/// A pod was released though nothing here can hold it.
pub(crate) fn unschedulable(message: &str) -> Event {
    let note = format!("{message}. No GPU of this cluster can hold the pod: it is released as unschedulable.");
    event(EventType::Warning, "NoGpuFits", &note)
}

/// No node takes a pod that was released.
pub(crate) fn stranded(message: &str) -> Event {
    Event { action: "Recreate".to_owned(), ..event(EventType::Warning, "Stranded", message) }
}

/// A pod leaves for one of higher priority.
pub(crate) fn preempted(by: &str) -> Event {
    let note = format!("it leaves for {by}, which has a higher priority and needs the room on its GPU");
    Event { action: "Preempt".to_owned(), ..event(EventType::Normal, "Preempted", &note) }
}

/// A pod leaves because it left its share.
pub(crate) fn expelled(node: &str, message: &str) -> Event {
    let note = format!("it is evicted from {node}, as the policy of its GPU says: {message}");
    Event { action: "Evict".to_owned(), ..event(EventType::Warning, "EvictedOutsideShare", &note) }
}

/// A pod that left its share cannot be evicted yet.
pub(crate) fn protected(message: &str) -> Event {
    let note = format!("it is to be evicted because it left its share, and a disruption budget protects it: {message}");
    Event { action: "Evict".to_owned(), ..event(EventType::Warning, "EvictionProtected", &note) }
}

/// An MPS host gives way to one of its `DaemonSet`'s newest revision.
pub(crate) fn host_replaced(node: &str, pod: &str, uid: &str) -> Event {
    let note = format!("{pod} is replaced by one of the newest revision: nothing uses MPS on node {node}");
    // Of events that differ in their note alone a recorder writes the first and counts the others.
    let secondary = Some(of_pod(pod, uid));
    Event { action: "Replace".to_owned(), secondary, ..event(EventType::Normal, "MpsHostReplaced", &note) }
}

/// No more MPS hosts are replaced.
pub(crate) fn rollout_stopped(message: &str) -> Event {
    Event { action: "Replace".to_owned(), ..event(EventType::Warning, "MpsHostUpgradeStopped", message) }
}

fn of_node(observed: &Observed, node: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Node".to_owned()),
        name: Some(node.to_owned()),
        uid: observed.nodes.get(node).map(|node| node.uid.clone()),
        ..ObjectReference::default()
    }
}

fn event(type_: EventType, reason: &str, note: &str) -> Event {
    Event {
        type_,
        reason: reason.to_owned(),
        note: Some(shorten(note, LONGEST)),
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
        let waiting = (0..pods).map(|at| (format!("team/p{at}"), Waiting { reason, message: message.to_owned() }));
        Outcome { waiting: waiting.collect(), ..Outcome::default() }
    }

    fn at(second: u64) -> Duration {
        Duration::from_secs(second)
    }

    #[test]
    fn a_pod_is_told_once_why_there_is_no_room_and_again_when_that_is_another_reason() {
        let mut teller = Teller::default();
        let cluster = cluster(1);
        let full = outcome(1, Reason::NoRoom, "No node can take it. n1: it is full.");
        assert!(teller.events(&full, &cluster, at(0)).is_empty(), "it may find room yet");
        let events = teller.events(&full, &cluster, at(2));
        let (regarding, event) = &events[0];
        assert_eq!((regarding.namespace.as_deref(), regarding.name.as_deref()), (Some("team"), Some("p0")));
        assert_eq!(
            (event.reason.as_str(), event.note.as_deref()),
            ("NoGpu", Some("No node can take it. n1: it is full."))
        );
        assert!(teller.events(&full, &cluster, at(600)).is_empty(), "the same again");
        let other = outcome(1, Reason::NoRoom, "No node can take it. n1: it is cordoned.");
        assert_eq!(teller.events(&other, &cluster, at(601)).len(), 1);
        assert!(teller.events(&full, &cluster, at(602)).is_empty(), "not too often");
    }

    #[test]
    fn many_pods_are_not_told_at_once_and_all_in_the_end() {
        let mut teller = Teller::default();
        let (cluster, full) = (cluster(50), outcome(50, Reason::NoRoom, "full"));
        teller.events(&full, &cluster, at(0));
        let told: Vec<usize> = (2..6).map(|second| teller.events(&full, &cluster, at(second)).len()).collect();
        assert_eq!(told, [20, 20, 10, 0]);
    }

    #[test]
    fn a_cut_is_told_at_once_and_what_the_scheduler_does_is_not() {
        let mut teller = Teller::default();
        let cluster = cluster(1);
        assert_eq!(teller.events(&outcome(1, Reason::Cutting, "On n1"), &cluster, at(0)).len(), 1);
        assert!(teller.events(&outcome(1, Reason::Scheduler, "On n1"), &cluster, at(1)).is_empty());
    }

    #[test]
    fn each_replaced_mps_host_is_an_event_of_its_own() {
        let [first, second] = ["a", "b"].map(|name| host_replaced("n1", &format!("ns/{name}"), name).secondary);
        assert!(first.is_some() && first != second, "{first:?}, {second:?}");
    }

    #[test]
    fn a_node_is_told_that_it_is_left_out_and_that_it_is_taken_back() {
        let mut teller = Teller::default();
        let silent =
            Outcome { silent: BTreeMap::from([("n1".into(), "its agent is not ready".into())]), ..Outcome::default() };
        let reasons = |events: Vec<(ObjectReference, Event)>| {
            events.into_iter().map(|(_, event)| event.reason).collect::<Vec<_>>()
        };
        assert_eq!(reasons(teller.events(&silent, &cluster(0), at(0))), ["GpuNodeLeftOut"]);
        assert!(teller.events(&silent, &cluster(0), at(1)).is_empty());
        assert_eq!(reasons(teller.events(&Outcome::default(), &cluster(0), at(2))), ["GpuNodeTakenBack"]);
    }
}
