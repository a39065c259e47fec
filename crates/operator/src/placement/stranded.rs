//! Handles stranded pods: released pods that are not bound and that nodes no longer accept. Pure:
//! callers pass in the time.
//!
//! A scheduling gate cannot be added again. So if a pod has lost its reservation, or its nodes no
//! longer accept it, the pod's controller must recreate the pod. The operator evicts the pod, and
//! the replacement waits at the gate. The operator never evicts a stranded pod that no controller
//! recreates. Instead, a condition and an Event state how to resolve the problem.
//!
//! | a released pod that is not bound | is stranded |
//! |---|---|
//! | Its reservation ended, although one of its nodes accepts it. | immediately |
//! | All its nodes were deleted. | after [`MISSING_NODE_DELAY`] |
//! | All its nodes refuse it, for example because they are cordoned, tainted or full. | after `--unschedulable-after-seconds` |
//! | It was released to nodes of another device plugin, the scheduler refuses it, and it would fit on a node of Cleave now. | after [`MISSING_NODE_DELAY`] |
//! | It was released as unschedulable, and would wait or fit now. | after [`MISSING_NODE_DELAY`] |
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_api::names::CONDITION_PLACED;
use cleave_plan::ledger::Ledger;

use super::cluster::to_plan_pod;
use super::nodes::Nodes;
use super::pod_tracker::PodTracker;
use crate::pods::{Controller, PodObject, Replacement, full_name};

/// How long a pod's nodes must be missing before the operator acts. A watch may lag.
pub(super) const MISSING_NODE_DELAY: Duration = Duration::from_secs(20);
/// The first delay between two recreations for one controller. Each following delay is twice as
/// long.
const FIRST_BACKOFF: Duration = Duration::from_secs(10);
/// Maximum delay between two recreations for one controller.
const MAX_BACKOFF: Duration = Duration::from_secs(600);
/// How long a controller must have no stranded pod before its delay is reset.
const BACKOFF_RESET_DELAY: Duration = Duration::from_secs(1800);
/// Minimum delay after which replacements also wait at the gate. Otherwise, pods that the scheduler
/// repeatedly refuses would permanently reserve GPUs.
const MIN_GATE_DELAY: Duration = Duration::from_secs(40);
/// Delay before the operator retries a failed eviction.
const EVICTION_RETRY_DELAY: Duration = Duration::from_secs(30);
/// Maximum number of pods evicted, and of pods reported, in one reconcile.
const MAX_PODS_PER_RECONCILE: usize = 32;

/// Why a released pod is not bound.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Reason {
    /// The pod's reservation on these nodes ended and cannot be renewed.
    Expired(Vec<String>),
    /// All nodes that the pod was released to were deleted. Contains their names.
    Gone(Vec<String>),
    /// Every node that the pod was released to refuses the pod. Contains each node's reason.
    Refused(String),
    /// The pod was released as unschedulable, but may fit a GPU now.
    Possible,
    /// The pod was released to nodes of another device plugin, which have too few free resources.
    /// The pod fits on a node of Cleave now.
    OtherNodesFull,
}

impl Reason {
    /// Returns why a pod that was released to nodes will not be bound. Returns `None` if the
    /// scheduler may still bind the pod.
    pub(super) fn of_released_pod(
        pod: &PodObject,
        ledger: &Ledger,
        nodes: &Nodes,
        tracker: &PodTracker,
    ) -> Option<Self> {
        let placement = pod.placement.as_ref()?;
        let names = || placement.nodes.keys().cloned().collect();
        let plan_pod = to_plan_pod(pod);
        let nominated = pod.status.nominated_node_name.as_deref();
        let existing: Vec<&String> = placement.nodes.keys().filter(|node| nodes.contains(node)).collect();
        let refusal = |node: &&String| {
            let reason = nodes.refusal(node, &plan_pod, tracker).filter(|_| nominated != Some(node))?;
            Some(format!("{node}: {reason}"))
        };
        let refusals: Vec<String> = existing.iter().filter_map(refusal).collect();
        // Check the nodes first. The state of the nodes also explains why a reservation ended.
        if existing.is_empty() {
            Some(Self::Gone(names()))
        } else if refusals.len() == existing.len() {
            Some(Self::Refused(refusals.join("; ")))
        } else if ledger.claim(&full_name(&pod.metadata)).is_none() {
            Some(Self::Expired(names()))
        } else {
            None
        }
    }

    fn message(&self) -> String {
        match self {
            Self::Expired(nodes) => {
                format!("The scheduler did not bind this pod to {} before its reservation expired", nodes.join(", "))
            }
            Self::Gone(nodes) => {
                format!("The nodes to which this pod was released no longer exist: {}", nodes.join(", "))
            }
            Self::Refused(refusals) => {
                format!("The nodes to which this pod was released no longer accept it: {refusals}")
            }
            Self::OtherNodesFull => {
                "This pod was released to nodes of another device plugin, which have too few free resources for it. It would fit on a GPU that Cleave serves now".to_owned()
            }
            Self::Possible => "This pod was released as unschedulable, but it would fit on a GPU now".to_owned(),
        }
    }
}

/// A pod to evict so that its controller recreates it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recreation {
    /// The pod, as `namespace/name`.
    pub pod: String,
    /// UID of the pod.
    pub uid: String,
    /// The `resourceVersion` that the decision is based on. A pod that was bound after this version
    /// is not evicted.
    pub version: String,
    /// The explanation for the pod's owner.
    pub message: String,
}

/// A pod whose condition `Placed` changes. Either the pod is stranded and no controller recreates
/// it, or the stranded pod was bound later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacedReport {
    /// The pod, as `namespace/name`.
    pub pod: String,
    /// UID of the pod.
    pub uid: String,
    /// How to resolve the problem. `None` once the pod is bound.
    pub message: Option<String>,
}

/// Actions of one reconcile for stranded pods.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StrandedActions {
    /// Pods to evict.
    pub recreate: Vec<Recreation>,
    /// Pods whose condition changes.
    pub placed_reports: Vec<PlacedReport>,
    /// Delay before the next reconcile if nothing changes.
    pub requeue: Option<Duration>,
}

/// State of stranded pods between two reconciles.
#[derive(Debug, Default)]
pub(super) struct StrandedPods {
    /// When the operator first found why each pod is not bound, by UID.
    since: BTreeMap<String, Duration>,
    /// UIDs of pods whose condition was written.
    reported: BTreeSet<String>,
    /// Controllers whose pods were recreated, by UID.
    owners: BTreeMap<String, RecreationBackoff>,
    /// Pods whose eviction failed, by UID, with the time of the earliest retry.
    failed: BTreeMap<String, Duration>,
}

/// The delay between two recreations of pods of one controller.
#[derive(Debug, Clone)]
struct RecreationBackoff {
    /// When the delay began. Pods that were due before the delay began are still recreated.
    began: Duration,
    /// When the delay ends. No other pod of the controller is recreated before this time.
    until: Duration,
    /// The length of the delay.
    delay: Duration,
    /// Nodes to which the scheduler did not bind the controller's pods.
    avoid: BTreeSet<String>,
}

impl StrandedPods {
    /// Decides how to handle the released pods in `found`. Each pod has the reason why it is not
    /// bound.
    ///
    /// `patience` is how long nodes must refuse a pod for temporary reasons before the pod is
    /// stranded.
    pub(super) fn reconcile<'a>(
        &mut self,
        found: impl IntoIterator<Item = (&'a PodObject, Reason)>,
        patience: Duration,
        up: Duration,
    ) -> StrandedActions {
        let mut stranded_actions = StrandedActions::default();
        let mut present = BTreeSet::new();
        self.owners.retain(|_, backoff| up < backoff.until.saturating_add(BACKOFF_RESET_DELAY));
        for (pod, reason) in found {
            let uid = pod.uid().unwrap_or_default();
            let since = *self.since.entry(uid.clone()).or_insert(up);
            present.insert(uid.clone());
            let due = since.saturating_add(match reason {
                Reason::Expired(_) => Duration::ZERO,
                Reason::Gone(_) | Reason::Possible | Reason::OtherNodesFull => MISSING_NODE_DELAY,
                Reason::Refused(_) => patience,
            });
            let due = due.max(self.failed.get(&uid).copied().unwrap_or_default());
            if up < due {
                stranded_actions.requeue_in(due.saturating_sub(up));
            } else if stranded_actions.recreate.len().max(stranded_actions.placed_reports.len())
                >= MAX_PODS_PER_RECONCILE
            {
                stranded_actions.requeue_in(Duration::from_secs(1));
            } else {
                self.add_action(&mut stranded_actions, pod, &uid, &reason, (due, up));
            }
        }
        self.since.retain(|uid, _| present.contains(uid));
        self.reported.retain(|uid| present.contains(uid));
        self.failed.retain(|uid, _| present.contains(uid));
        stranded_actions
    }

    /// Adds the action for one pod that has been stranded since `due`.
    fn add_action(
        &mut self,
        stranded_actions: &mut StrandedActions,
        pod: &PodObject,
        uid: &str,
        reason: &Reason,
        (due, up): (Duration, Duration),
    ) {
        let (name, uid) = (full_name(&pod.metadata), uid.to_owned());
        let owner = pod.controller.as_ref().filter(|owner| match owner.replacement() {
            Replacement::Free => true,
            // A Job counts the eviction as a failure, as it counts a node failure. So evict only
            // a pod that can no longer run.
            Replacement::CountsAsFailure => matches!(reason, Reason::Gone(_) | Reason::Refused(_)),
            Replacement::Unknown => false,
        });
        let Some(owner) = owner else {
            let is_reported = pod.condition(CONDITION_PLACED).is_some_and(|condition| condition.status == "False");
            if self.reported.insert(uid.clone()) && !is_reported {
                let message = format!(
                    "{}. No controller recreates it. Delete and recreate it: the new pod waits at the placement gate.",
                    reason.message()
                );
                stranded_actions.placed_reports.push(PlacedReport { pod: name, uid, message: Some(message) });
            }
            return;
        };
        let backoff = self.owners.get(&owner.uid);
        match backoff.filter(|backoff| up < backoff.until && backoff.began < due) {
            Some(backoff) => stranded_actions.requeue_in(backoff.until.saturating_sub(up)),
            None => {
                if backoff.is_none_or(|backoff| backoff.until <= up) {
                    self.begin_backoff(owner, up);
                }
                if let (Reason::Expired(nodes), Some(backoff)) = (reason, self.owners.get_mut(&owner.uid)) {
                    backoff.avoid.extend(nodes.iter().cloned());
                }
                let message = format!(
                    "{}. Cleave evicts it so that {} {} recreates it.",
                    reason.message(),
                    owner.kind,
                    owner.name
                );
                let version = pod.metadata.resource_version.clone().unwrap_or_default();
                stranded_actions.recreate.push(Recreation { pod: name, uid, version, message });
            }
        }
    }

    /// Begins the next delay of a controller whose pods are recreated now. Pods that are stranded
    /// during the delay wait for its end.
    fn begin_backoff(&mut self, owner: &Controller, up: Duration) {
        let (delay, avoid) = match self.owners.remove(&owner.uid) {
            Some(before) => (before.delay.saturating_mul(2).min(MAX_BACKOFF), before.avoid),
            None => (FIRST_BACKOFF, BTreeSet::new()),
        };
        let next = RecreationBackoff { began: up, until: up.saturating_add(delay), delay, avoid };
        self.owners.insert(owner.uid.clone(), next);
    }

    /// Records that a pod could not be evicted. The operator evicts other pods before it retries
    /// this pod.
    pub(super) fn record_failed_eviction(&mut self, uid: &str, up: Duration) {
        self.failed.insert(uid.to_owned(), up.saturating_add(EVICTION_RETRY_DELAY));
    }

    /// Records that a pod's condition could not be written. A later reconcile retries the write.
    pub(super) fn record_failed_placed_report(&mut self, uid: &str) {
        self.reported.remove(uid);
    }

    /// Returns how long the gatekeeper delays a pod because pods of its controller were recreated
    /// repeatedly. Returns `None` if the pod is not delayed.
    pub(super) fn gate_delay(&self, pod: &PodObject, up: Duration) -> Option<Duration> {
        let backoff = self.owners.get(&pod.controller.as_ref()?.uid)?;
        let delayed = up < backoff.until && backoff.delay >= MIN_GATE_DELAY;
        delayed.then(|| backoff.until.saturating_sub(up))
    }

    /// Returns the nodes to which the scheduler did not bind pods of this pod's controller. The
    /// search tries other nodes first.
    pub(super) fn avoided_nodes(&self, pod: &PodObject) -> Option<&BTreeSet<String>> {
        let avoid = &self.owners.get(&pod.controller.as_ref()?.uid)?.avoid;
        (!avoid.is_empty()).then_some(avoid)
    }
}

impl StrandedActions {
    fn requeue_in(&mut self, time: Duration) {
        self.requeue = Some(self.requeue.map_or(time, |requeue| requeue.min(time)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REFUSAL_TIMEOUT: Duration = Duration::from_secs(180);

    fn owned_pod(name: &str, kind: &str, owner: &str) -> PodObject {
        let mut pod = PodObject::default();
        pod.metadata.name = Some(name.to_owned());
        pod.metadata.namespace = Some("team".into());
        pod.metadata.uid = Some(name.into());
        pod.metadata.resource_version = Some("7".to_owned());
        pod.controller = Some(Box::new(Controller { kind: kind.into(), name: owner.into(), uid: owner.into() }));
        pod
    }

    fn replica(name: &str) -> PodObject {
        owned_pod(name, "ReplicaSet", "web")
    }

    fn at(second: u64) -> Duration {
        Duration::from_secs(second)
    }

    fn expired_reason() -> Reason {
        Reason::Expired(vec!["n1".to_owned()])
    }

    fn recreated_pods(stranded_actions: &StrandedActions) -> Vec<&str> {
        stranded_actions.recreate.iter().map(|one| one.pod.as_str()).collect()
    }

    #[test]
    fn a_pod_of_a_controller_is_recreated_and_a_bare_pod_gets_a_condition_once() {
        let (owned, bare) = (replica("owned"), PodObject { controller: None, ..replica("bare") });
        let mut stranded = StrandedPods::default();
        let stranded_actions =
            stranded.reconcile([(&owned, expired_reason()), (&bare, expired_reason())], REFUSAL_TIMEOUT, at(0));
        assert_eq!(
            (recreated_pods(&stranded_actions), stranded_actions.recreate[0].version.as_str()),
            (vec!["team/owned"], "7")
        );
        assert!(
            stranded_actions.recreate[0].message.ends_with("Cleave evicts it so that ReplicaSet web recreates it.")
        );
        let report = stranded_actions.placed_reports[0].message.as_deref().unwrap();
        assert!(report.contains("Delete and recreate it"), "{report}");
        assert_eq!(stranded.reconcile([(&bare, expired_reason())], REFUSAL_TIMEOUT, at(1)).placed_reports, []);
        stranded.record_failed_placed_report("bare");
        assert_eq!(
            stranded.reconcile([(&bare, expired_reason())], REFUSAL_TIMEOUT, at(2)).placed_reports.len(),
            1,
            "the write failed"
        );
    }

    #[test]
    fn the_pod_of_a_job_is_evicted_only_if_it_cannot_run() {
        let gone = || Reason::Gone(vec!["n1".to_owned()]);
        for (kind, when_expired, when_gone) in
            [("ReplicaSet", 1, 1), ("StatefulSet", 1, 1), ("Job", 0, 1), ("Workflow", 0, 0), ("ConfigMap", 0, 0)]
        {
            let pod = owned_pod("a", kind, "x");
            let mut stranded = StrandedPods::default();
            let stranded_actions = stranded.reconcile([(&pod, expired_reason())], REFUSAL_TIMEOUT, at(0));
            assert_eq!(
                (stranded_actions.recreate.len(), stranded_actions.placed_reports.len()),
                (when_expired, 1 - when_expired),
                "{kind}"
            );
            let mut stranded = StrandedPods::default();
            stranded.reconcile([(&pod, gone())], REFUSAL_TIMEOUT, at(0));
            let stranded_actions = stranded.reconcile([(&pod, gone())], REFUSAL_TIMEOUT, at(20));
            assert_eq!(
                (stranded_actions.recreate.len(), stranded_actions.placed_reports.len()),
                (when_gone, 1 - when_gone),
                "{kind}"
            );
        }
    }

    #[test]
    fn a_brief_refusal_by_a_node_strands_no_pod() {
        let pod = replica("owned");
        let cordoned = || (&pod, Reason::Refused("n1: cordoned".to_owned()));
        let mut stranded = StrandedPods::default();
        let stranded_actions = stranded.reconcile([cordoned()], REFUSAL_TIMEOUT, at(0));
        assert_eq!((recreated_pods(&stranded_actions), stranded_actions.requeue), (vec![], Some(REFUSAL_TIMEOUT)));
        stranded.reconcile([], REFUSAL_TIMEOUT, at(179));
        let stranded_actions = stranded.reconcile([cordoned()], REFUSAL_TIMEOUT, at(180));
        assert_eq!(
            (recreated_pods(&stranded_actions), stranded_actions.requeue),
            (vec![], Some(REFUSAL_TIMEOUT)),
            "the time is counted from the second refusal"
        );
        assert_eq!(recreated_pods(&stranded.reconcile([cordoned()], REFUSAL_TIMEOUT, at(360))), ["team/owned"]);
    }

    #[test]
    fn pods_of_a_controller_are_recreated_together_and_each_delay_is_longer() {
        let pods = ["a", "b"].map(replica);
        let other = owned_pod("c", "ReplicaSet", "other");
        let mut stranded = StrandedPods::default();
        let all = |stranded: &mut StrandedPods, second| {
            // Each round uses new pods with the same names.
            stranded.since.clear();
            stranded.reconcile(pods.iter().map(|pod| (pod, expired_reason())), REFUSAL_TIMEOUT, at(second))
        };
        assert_eq!(recreated_pods(&all(&mut stranded, 0)), ["team/a", "team/b"]);
        let stranded_actions = all(&mut stranded, 4);
        assert_eq!((recreated_pods(&stranded_actions), stranded_actions.requeue), (vec![], Some(at(6))));
        assert_eq!(
            recreated_pods(&stranded.reconcile([(&other, expired_reason())], REFUSAL_TIMEOUT, at(5))),
            ["team/c"],
            "other controllers have no delay"
        );
        let (mut second, mut times) = (10, Vec::new());
        while times.len() < 9 {
            let stranded_actions = all(&mut stranded, second);
            assert_eq!(recreated_pods(&stranded_actions).len(), 2, "at {second}");
            times.push(second);
            second += all(&mut stranded, second + 1).requeue.unwrap().as_secs() + 1;
        }
        assert_eq!(times, [10, 30, 70, 150, 310, 630, 1230, 1830, 2430]);
        let rested = second + BACKOFF_RESET_DELAY.as_secs() + 600;
        all(&mut stranded, rested);
        assert_eq!(all(&mut stranded, rested + 1).requeue, Some(at(9)), "the delay restarts at its first value");
    }

    #[test]
    fn stranded_pods_of_a_large_controller_are_recreated_in_batches() {
        let pods: Vec<PodObject> = (0..100).map(|at| replica(&format!("p{at:02}"))).collect();
        let mut left: Vec<&PodObject> = pods.iter().collect();
        let mut stranded = StrandedPods::default();
        let mut batches = Vec::new();
        for second in 0..4 {
            let stranded_actions =
                stranded.reconcile(left.iter().map(|pod| (*pod, expired_reason())), REFUSAL_TIMEOUT, at(second));
            let gone: BTreeSet<String> = stranded_actions.recreate.iter().map(|one| one.uid.clone()).collect();
            left.retain(|pod| !gone.contains(&**pod.metadata.uid.as_ref().unwrap()));
            batches.push(gone.len());
            assert!(left.is_empty() || stranded_actions.requeue == Some(at(1)));
        }
        assert_eq!(batches, [32, 32, 32, 4]);
    }

    #[test]
    fn pods_that_the_scheduler_keeps_refusing_avoid_the_node_and_are_delayed() {
        let pod = replica("a");
        let mut stranded = StrandedPods::default();
        assert_eq!((stranded.avoided_nodes(&pod), stranded.gate_delay(&pod, at(0))), (None, None));
        for second in [0, 10, 30] {
            stranded.since.clear();
            stranded.reconcile([(&pod, expired_reason())], REFUSAL_TIMEOUT, at(second));
        }
        assert!(stranded.avoided_nodes(&pod).unwrap().contains("n1"));
        assert_eq!(stranded.gate_delay(&pod, at(31)), Some(at(39)));
        assert_eq!(stranded.gate_delay(&pod, at(70)), None);
        assert_eq!(stranded.gate_delay(&owned_pod("b", "ReplicaSet", "other"), at(31)), None);
    }
}
