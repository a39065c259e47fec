//! Pods that were released and that no node takes: what helps them. Pure: the time is given.
//!
//! A scheduling gate cannot come back. So a pod that has lost its reservation, or whose nodes no
//! longer take it, is re-created by its controller: it is evicted, and its replacement waits at the
//! gate. A pod that nothing re-creates is never deleted; a condition and an Event say what to do.
//!
//! | a released pod that is not bound and ... | is stranded |
//! |---|---|
//! | whose reservation ended, and the scheduler refuses it or its GPUs have no room | at once |
//! | all of whose nodes are gone | after [`GONE_AFTER`] |
//! | all of whose nodes are cordoned, tainted or full | after the time that also releases a pod as unschedulable |
//! | was released as unschedulable, and would wait or fit now | after [`GONE_AFTER`] |
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_api::names::CONDITION_PLACED;

use crate::pods::{Controller, PodObject, Replacement, full_name};

/// How long a pod's nodes must be gone before something is done: a watch may be late.
pub(super) const GONE_AFTER: Duration = Duration::from_secs(20);
/// How long the pods of one controller are left alone after some were re-created. Doubles each
/// time, up to the second.
const BACK_OFF: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(600));
/// How long a controller must have had no stranded pod before its next one is handled like a first.
const FORGIVEN_AFTER: Duration = Duration::from_secs(1800);
/// From which pause on replacements are held back at the gate too: what is refused again and again
/// must not hold GPUs all the time.
const HELD_BACK_FROM: Duration = Duration::from_secs(40);
/// How long a pod is left alone that could not be evicted.
const FAILED_FOR: Duration = Duration::from_secs(30);
/// How many pods are re-created, or told, in one look.
const AT_ONCE: usize = 32;

/// Why a released pod is not bound.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Why {
    /// Its reservation on these nodes ended, and cannot be renewed.
    Expired(Vec<String>),
    /// All nodes that it was released to are gone.
    Gone(Vec<String>),
    /// All nodes that it was released to refuse it: each with the reason.
    Refused(String),
    /// It was released as unschedulable, and nothing keeps it from GPUs for good any more.
    Possible,
}

impl Why {
    fn message(&self) -> String {
        match self {
            Self::Expired(nodes) => {
                format!(
                    "The scheduler did not bind this pod to {} while GPU shares were reserved there",
                    nodes.join(", ")
                )
            }
            Self::Gone(nodes) => format!("This pod was released to nodes that are gone: {}", nodes.join(", ")),
            Self::Refused(reasons) => format!("This pod was released to nodes that no longer take it: {reasons}"),
            Self::Possible => "This pod was released as unschedulable, and GPUs could hold it now".to_owned(),
        }
    }
}

/// A pod that is evicted so that its controller re-creates it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recreation {
    /// `namespace/name`.
    pub pod: String,
    /// Its UID.
    pub uid: String,
    /// The version of the pod that was looked at: one that was bound since is left alone.
    pub version: String,
    /// Why, and what happens, for its owner.
    pub message: String,
}

/// What a pod that nothing re-creates is told, or that it is over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advice {
    /// `namespace/name`.
    pub pod: String,
    /// Its UID.
    pub uid: String,
    /// What to do; none once the pod is bound.
    pub message: Option<String>,
}

/// What to do in one look.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rescue {
    /// Pods to evict.
    pub recreate: Vec<Recreation>,
    /// Pods whose condition changes.
    pub advise: Vec<Advice>,
    /// When to look again though nothing changes, from now.
    pub next: Option<Duration>,
}

/// Remembers since when pods are stranded, and whose controllers are left alone.
#[derive(Debug, Default)]
pub(super) struct Stranded {
    /// By UID: since when.
    since: BTreeMap<String, Duration>,
    /// Pods that were told, by UID.
    advised: BTreeSet<String>,
    /// Controllers, by UID.
    owners: BTreeMap<String, BackOff>,
    /// Pods that could not be evicted, by UID, and until when they are left alone.
    failed: BTreeMap<String, Duration>,
}

#[derive(Debug, Clone)]
struct BackOff {
    /// When it began. Pods that were due by then still go.
    began: Duration,
    /// No other pod before this.
    until: Duration,
    /// How long this pause is.
    pause: Duration,
    /// Nodes that the scheduler did not bind its pods to.
    avoid: BTreeSet<String>,
}

impl Stranded {
    /// Decides about released pods that are not bound: `found` says of each why it is not.
    /// `patience` is how long nodes must refuse a pod by what may pass by itself.
    pub(super) fn look<'a>(
        &mut self,
        found: impl IntoIterator<Item = (&'a PodObject, Why)>,
        patience: Duration,
        up: Duration,
    ) -> Rescue {
        let mut rescue = Rescue::default();
        let mut there = BTreeSet::new();
        self.owners.retain(|_, back_off| up < back_off.until.saturating_add(FORGIVEN_AFTER));
        for (pod, why) in found {
            let uid = pod.metadata.uid.clone().unwrap_or_default();
            let since = *self.since.entry(uid.clone()).or_insert(up);
            there.insert(uid.clone());
            let due = since.saturating_add(match why {
                Why::Expired(_) => Duration::ZERO,
                Why::Gone(_) | Why::Possible => GONE_AFTER,
                Why::Refused(_) => patience,
            });
            let due = due.max(self.failed.get(&uid).copied().unwrap_or_default());
            if up < due {
                rescue.look_in(due.saturating_sub(up));
            } else if rescue.recreate.len().max(rescue.advise.len()) >= AT_ONCE {
                rescue.look_in(Duration::from_secs(1));
            } else {
                self.help(&mut rescue, pod, &uid, &why, (due, up));
            }
        }
        self.since.retain(|uid, _| there.contains(uid));
        self.advised.retain(|uid| there.contains(uid));
        self.failed.retain(|uid, _| there.contains(uid));
        rescue
    }

    /// Helps one pod that is stranded since `due`.
    fn help(&mut self, rescue: &mut Rescue, pod: &PodObject, uid: &str, why: &Why, (due, up): (Duration, Duration)) {
        let (name, uid) = (full_name(&pod.metadata), uid.to_owned());
        let owner = pod.controller.as_ref().filter(|owner| match owner.replacement() {
            Replacement::Free => true,
            // Where the pod cannot run any more, a failure that is counted is what the death of a
            // node costs too.
            Replacement::CountsAsFailure => matches!(why, Why::Gone(_) | Why::Refused(_)),
            Replacement::Unknown => false,
        });
        let Some(owner) = owner else {
            let is_told = pod.condition(CONDITION_PLACED).is_some_and(|condition| condition.status == "False");
            if self.advised.insert(uid.clone()) && !is_told {
                let message = format!(
                    "{}. Nothing re-creates it: delete it and create it again, and it waits for room at the placement gate.",
                    why.message()
                );
                rescue.advise.push(Advice { pod: name, uid, message: Some(message) });
            }
            return;
        };
        let back_off = self.owners.get(&owner.uid);
        match back_off.filter(|back_off| up < back_off.until && back_off.began < due) {
            Some(back_off) => rescue.look_in(back_off.until.saturating_sub(up)),
            None => {
                if back_off.is_none_or(|back_off| back_off.until <= up) {
                    self.begin_pause(owner, up);
                }
                if let (Why::Expired(nodes), Some(back_off)) = (why, self.owners.get_mut(&owner.uid)) {
                    back_off.avoid.extend(nodes.iter().cloned());
                }
                let message =
                    format!("{}. It is evicted, so that {} {} re-creates it.", why.message(), owner.kind, owner.name);
                let version = pod.metadata.resource_version.clone().unwrap_or_default();
                rescue.recreate.push(Recreation { pod: name, uid, version, message });
            }
        }
    }

    /// Pods of a controller are re-created now: those that are stranded later wait.
    fn begin_pause(&mut self, owner: &Controller, up: Duration) {
        let (pause, avoid) = match self.owners.remove(&owner.uid) {
            Some(before) => (before.pause.saturating_mul(2).min(BACK_OFF.1), before.avoid),
            None => (BACK_OFF.0, BTreeSet::new()),
        };
        let next = BackOff { began: up, until: up.saturating_add(pause), pause, avoid };
        self.owners.insert(owner.uid.clone(), next);
    }

    /// A pod could not be evicted: others have their turn first.
    pub(super) fn not_recreated(&mut self, uid: &str, up: Duration) {
        self.failed.insert(uid.to_owned(), up.saturating_add(FAILED_FOR));
    }

    /// A pod could not be told: it is told again.
    pub(super) fn not_advised(&mut self, uid: &str) {
        self.advised.remove(uid);
    }

    /// For how long yet a pod is held back at the gate, since pods of its controller were
    /// re-created again and again.
    pub(super) fn held_back(&self, pod: &PodObject, up: Duration) -> Option<Duration> {
        let back_off = self.owners.get(&pod.controller.as_ref()?.uid)?;
        let held = up < back_off.until && back_off.pause >= HELD_BACK_FROM;
        held.then(|| back_off.until.saturating_sub(up))
    }

    /// Whether the scheduler did not bind pods of this one's controller to a node: others are tried
    /// first.
    pub(super) fn avoids(&self, pod: &PodObject) -> Option<&BTreeSet<String>> {
        let avoid = &self.owners.get(&pod.controller.as_ref()?.uid)?.avoid;
        (!avoid.is_empty()).then_some(avoid)
    }
}

impl Rescue {
    fn look_in(&mut self, time: Duration) {
        self.next = Some(self.next.map_or(time, |next| next.min(time)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(180);

    fn owned(name: &str, kind: &str, owner: &str) -> PodObject {
        let mut pod = PodObject::default();
        pod.metadata.name = Some(name.to_owned());
        pod.metadata.namespace = Some("team".to_owned());
        pod.metadata.uid = Some(name.to_owned());
        pod.metadata.resource_version = Some("7".to_owned());
        pod.controller = Some(Controller { kind: kind.into(), name: owner.into(), uid: owner.into() });
        pod
    }

    fn replica(name: &str) -> PodObject {
        owned(name, "ReplicaSet", "web")
    }

    fn at(second: u64) -> Duration {
        Duration::from_secs(second)
    }

    fn expired() -> Why {
        Why::Expired(vec!["n1".to_owned()])
    }

    fn recreated(rescue: &Rescue) -> Vec<&str> {
        rescue.recreate.iter().map(|one| one.pod.as_str()).collect()
    }

    #[test]
    fn a_pod_of_a_controller_is_recreated_and_one_without_is_told_what_to_do_once() {
        let (owned, bare) = (replica("owned"), PodObject { controller: None, ..replica("bare") });
        let mut stranded = Stranded::default();
        let rescue = stranded.look([(&owned, expired()), (&bare, expired())], PATIENCE, at(0));
        assert_eq!((recreated(&rescue), rescue.recreate[0].version.as_str()), (vec!["team/owned"], "7"));
        assert!(rescue.recreate[0].message.ends_with("It is evicted, so that ReplicaSet web re-creates it."));
        let advice = rescue.advise[0].message.as_deref().unwrap();
        assert!(advice.contains("delete it and create it again"), "{advice}");
        assert_eq!(stranded.look([(&bare, expired())], PATIENCE, at(1)).advise, []);
        stranded.not_advised("bare");
        assert_eq!(stranded.look([(&bare, expired())], PATIENCE, at(2)).advise.len(), 1, "the write failed");
    }

    #[test]
    fn who_loses_something_by_an_eviction_is_evicted_only_where_it_cannot_run() {
        let gone = || Why::Gone(vec!["n1".to_owned()]);
        for (kind, when_expired, when_gone) in
            [("ReplicaSet", 1, 1), ("StatefulSet", 1, 1), ("Job", 0, 1), ("Workflow", 0, 0), ("ConfigMap", 0, 0)]
        {
            let pod = owned("a", kind, "x");
            let mut stranded = Stranded::default();
            let rescue = stranded.look([(&pod, expired())], PATIENCE, at(0));
            assert_eq!((rescue.recreate.len(), rescue.advise.len()), (when_expired, 1 - when_expired), "{kind}");
            let mut stranded = Stranded::default();
            stranded.look([(&pod, gone())], PATIENCE, at(0));
            let rescue = stranded.look([(&pod, gone())], PATIENCE, at(20));
            assert_eq!((rescue.recreate.len(), rescue.advise.len()), (when_gone, 1 - when_gone), "{kind}");
        }
    }

    #[test]
    fn a_node_that_refuses_for_a_moment_strands_nobody() {
        let pod = replica("owned");
        let cordoned = || (&pod, Why::Refused("n1: cordoned".to_owned()));
        let mut stranded = Stranded::default();
        let rescue = stranded.look([cordoned()], PATIENCE, at(0));
        assert_eq!((recreated(&rescue), rescue.next), (vec![], Some(PATIENCE)));
        stranded.look([], PATIENCE, at(179));
        let rescue = stranded.look([cordoned()], PATIENCE, at(180));
        assert_eq!((recreated(&rescue), rescue.next), (vec![], Some(PATIENCE)), "the time starts again");
        assert_eq!(recreated(&stranded.look([cordoned()], PATIENCE, at(360))), ["team/owned"]);
    }

    #[test]
    fn pods_of_one_controller_go_together_and_then_it_is_left_alone_for_longer_each_time() {
        let pods = ["a", "b"].map(replica);
        let other = owned("c", "ReplicaSet", "other");
        let mut stranded = Stranded::default();
        let all = |stranded: &mut Stranded, second| {
            // Others of the same names, each time.
            stranded.since.clear();
            stranded.look(pods.iter().map(|pod| (pod, expired())), PATIENCE, at(second))
        };
        assert_eq!(recreated(&all(&mut stranded, 0)), ["team/a", "team/b"]);
        let rescue = all(&mut stranded, 4);
        assert_eq!((recreated(&rescue), rescue.next), (vec![], Some(at(6))));
        assert_eq!(
            recreated(&stranded.look([(&other, expired())], PATIENCE, at(5))),
            ["team/c"],
            "others are not held up"
        );
        let (mut second, mut times) = (10, Vec::new());
        while times.len() < 9 {
            let rescue = all(&mut stranded, second);
            assert_eq!(recreated(&rescue).len(), 2, "at {second}");
            times.push(second);
            second += all(&mut stranded, second + 1).next.unwrap().as_secs() + 1;
        }
        assert_eq!(times, [10, 30, 70, 150, 310, 630, 1230, 1830, 2430]);
        let rested = second + FORGIVEN_AFTER.as_secs() + 600;
        all(&mut stranded, rested);
        assert_eq!(all(&mut stranded, rested + 1).next, Some(at(9)), "it is forgotten in the end");
    }

    #[test]
    fn all_pods_of_a_large_controller_that_are_stranded_together_go_one_bounded_batch_after_the_other() {
        let pods: Vec<PodObject> = (0..100).map(|at| replica(&format!("p{at:02}"))).collect();
        let mut left: Vec<&PodObject> = pods.iter().collect();
        let mut stranded = Stranded::default();
        let mut batches = Vec::new();
        for second in 0..4 {
            let rescue = stranded.look(left.iter().map(|pod| (*pod, expired())), PATIENCE, at(second));
            let gone: BTreeSet<String> = rescue.recreate.iter().map(|one| one.uid.clone()).collect();
            left.retain(|pod| !gone.contains(pod.metadata.uid.as_ref().unwrap()));
            batches.push(gone.len());
            assert!(left.is_empty() || rescue.next == Some(at(1)));
        }
        assert_eq!(batches, [32, 32, 32, 4]);
    }

    #[test]
    fn what_the_scheduler_refuses_again_and_again_is_tried_elsewhere_and_held_back() {
        let pod = replica("a");
        let mut stranded = Stranded::default();
        assert_eq!((stranded.avoids(&pod), stranded.held_back(&pod, at(0))), (None, None));
        for second in [0, 10, 30] {
            stranded.since.clear();
            stranded.look([(&pod, expired())], PATIENCE, at(second));
        }
        assert!(stranded.avoids(&pod).unwrap().contains("n1"));
        assert_eq!(stranded.held_back(&pod, at(31)), Some(at(39)));
        assert_eq!(stranded.held_back(&pod, at(70)), None);
        assert_eq!(stranded.held_back(&owned("b", "ReplicaSet", "other"), at(31)), None);
    }
}
