//! The decisions of one reconcile: pods to release, pods to evict, and the reasons why other pods
//! wait.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_api::placement::Placement;
use cleave_plan::ledger::DeviceRequest;
use cleave_plan::quota::Kind;
use cleave_plan::snapshot::Requirement;
use serde_json::Value;

use super::stranded::StrandedActions;
use crate::pods::PodObject;
use crate::policies::demand::WaitingPod;
use crate::policies::taint::TaintChange;
use crate::rollout::RolloutStep;

/// Why a pod is released.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReleaseReason {
    /// The pod has a reservation.
    Reserved(Placement),
    /// The pod requests nothing that Cleave serves.
    NotServed,
    /// The pod fits on no node of Cleave, but on nodes of another device plugin.
    OtherPlugin,
    /// The pod fits no GPU of the cluster. Contains the explanation for the pod's owner.
    Unschedulable(String),
}

impl ReleaseReason {
    /// Returns the value of the `result` label in metrics.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Reserved(_) => "reserved",
            Self::NotServed => "not_managed",
            Self::OtherPlugin => "other_plugin",
            Self::Unschedulable(_) => "unschedulable",
        }
    }
}

/// A pod to release to the scheduler.
#[derive(Debug, Clone, PartialEq)]
pub struct Release {
    /// The pod, as `namespace/name`.
    pub pod: String,
    /// UID of the pod.
    pub uid: String,
    /// Why the pod is released.
    pub reason: ReleaseReason,
    /// Whether the pod is reported to cluster autoscalers. In this case, the operator withdraws the
    /// report before the release.
    pub reported: bool,
    /// How long the pod waited at the gate.
    pub waited: Duration,
    /// JSON Patch (RFC 6902) that releases the pod.
    pub patch: Value,
}

/// A pod to evict for a waiting pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Eviction {
    /// The pod, as `namespace/name`.
    pub pod: String,
    /// UID of the pod.
    pub uid: String,
    /// The waiting pod, as `namespace/name`.
    pub preemptor: String,
    /// Whether a disruption budget selects the pod, so that the API server may refuse the eviction.
    pub may_be_refused: bool,
    /// How quotas change the eviction. `None` if priority alone decides.
    pub quota: Option<QuotaEviction>,
    /// The gang that is evicted with the pod. `None` if the pod has no gang.
    pub gang: Option<GangId>,
}

/// A gang that was released.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct GangId {
    /// Namespace of the gang's pods.
    pub namespace: String,
    /// Name of the gang.
    pub name: String,
    /// When the gang was released, in seconds since the Unix epoch. `None` if its pods record no
    /// time.
    pub since: Option<u64>,
}

impl GangId {
    /// Returns the gang of a released pod.
    pub(super) fn of(pod: &PodObject) -> Option<Self> {
        let gang = pod.gang.as_ref()?;
        Some(Self { namespace: pod.namespace().to_owned(), name: gang.name.clone(), since: gang.released })
    }
}

/// The nomination of a waiting pod. The operator writes the nomination to the pod before it evicts
/// other pods. So the next leader keeps the same units for the pod, and evicts no further pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NominationRecord {
    /// The pod, as `namespace/name`.
    pub pod: String,
    /// UID of the pod.
    pub uid: String,
    /// The pod for which other pods are evicted: the pod itself, or another pod of its gang.
    pub preemptor: String,
    /// The nominated node and units.
    pub room: Placement,
}

/// A waiting pod within its guarantee that gets no GPU, because disruption budgets protect
/// borrowing pods. The start of this state is written to the pod, so that another leader does not
/// restart the count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProtectedPod {
    /// The pod, as `namespace/name`.
    pub pod: String,
    /// UID of the pod.
    pub uid: String,
    /// When budgets began to protect the borrowing pods, in seconds since the Unix epoch.
    pub since: u64,
}

/// How quotas change an eviction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuotaEviction {
    /// Why the pod is evicted.
    pub kind: Kind,
    /// Quota of the pod. `None` if the pod's namespace has no quota.
    pub from: Option<String>,
    /// Quota of the waiting pod. `None` if the waiting pod's namespace has no quota.
    pub to: Option<String>,
    /// Grace period in seconds. `None` means the pod's own grace period.
    pub grace: Option<u32>,
    /// Whether the pod is deleted although a disruption budget protects it.
    pub force: bool,
    /// Explanation for the pod's owner.
    pub message: String,
}

/// A pod whose condition `PodScheduled` changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AutoscalerReport {
    /// The pod, as `namespace/name`.
    pub pod: String,
    /// UID of the pod.
    pub uid: String,
    /// The `resourceVersion` that the decision is based on.
    pub version: String,
    /// Why another node is necessary. `None` if the report is withdrawn.
    pub message: Option<String>,
}

/// Maximum time until waiting pods are rechecked, even if no change wakes the placement controller.
const WAITING_RECHECK_TIME: Duration = Duration::from_secs(5);

/// The decisions of one reconcile.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Actions {
    /// Pods to release, in the order of the decisions.
    pub releases: Vec<Release>,
    /// Pods to evict. The ledger keeps the freed shares for the preemptor.
    pub evictions: Vec<Eviction>,
    /// Nominations to write to pods before the evictions.
    pub kept: Vec<NominationRecord>,
    /// Waiting pods within their guarantee that get no GPU because of disruption budgets, to be
    /// recorded.
    pub protected: Vec<ProtectedPod>,
    /// Pods that wait at the gate, each with the reason.
    pub waiting: BTreeMap<String, WaitingPod>,
    /// Pods for which no GPU need be partitioned: their quotas are at their maximum, or they wait
    /// for their guarantee.
    pub unplanned: BTreeSet<String>,
    /// Pods whose report to cluster autoscalers changes.
    pub reports: Vec<AutoscalerReport>,
    /// Number of pods at the gate that must be reported to cluster autoscalers.
    pub reported: usize,
    /// Nodes whose taint for cluster autoscalers changes. See [`super::fragments`].
    pub taints: Vec<TaintChange>,
    /// Actions for stranded pods.
    pub stranded: StrandedActions,
    /// Actions for MPS hosts. `None` if this reconcile did not examine MPS hosts.
    pub rollout: Option<RolloutStep>,
    /// Whether another reconcile can release more pods immediately.
    pub more: bool,
    /// Number of searches for pods to evict.
    pub preemption_searches: u64,
    /// Whether a change of a disruption budget may help a waiting pod.
    pub awaits_budgets: bool,
    /// Delay before the next reconcile if nothing changes.
    pub requeue: Option<Duration>,
}

impl Actions {
    /// Requests another reconcile within `time`.
    pub(super) fn requeue_in(&mut self, time: Duration) {
        self.requeue = Some(self.requeue.map_or(time, |requeue| requeue.min(time)));
    }

    /// Returns the maximum delay before the next reconcile. A change can wake the placement
    /// controller earlier. A change of a pod without GPUs does not wake the controller, but may
    /// free CPU or affect the rules of a waiting pod.
    pub(super) fn delay(&self) -> Option<Duration> {
        let recheck = (!self.waiting.is_empty()).then_some(WAITING_RECHECK_TIME);
        self.requeue.into_iter().chain(recheck).min()
    }
}

/// The nodes that a pod is released to.
#[derive(Debug, Clone)]
pub(super) enum Destination<'a> {
    /// Any node that the pod's own rules allow.
    Anywhere,
    /// The nodes with these hostname labels.
    Hostnames(Vec<&'a str>),
    /// Nodes that meet this requirement.
    Matching(Requirement),
    /// Nodes whose GPUs are large enough for the largest of these requests. No GPU of the cluster
    /// is large enough.
    LargerGpus(&'a [DeviceRequest]),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policies::demand::Reason;

    #[test]
    fn waiting_pods_are_rechecked_even_if_no_change_wakes_the_controller() {
        let mut actions = Actions::default();
        assert_eq!(actions.delay(), None, "no pod waits");
        actions.waiting.insert("team/a".to_owned(), WaitingPod { reason: Reason::NoRoom, message: String::new() });
        assert_eq!(actions.delay(), Some(WAITING_RECHECK_TIME));
        for (requeue, delay) in [(2, 2), (60, 5)] {
            actions.requeue = Some(Duration::from_secs(requeue));
            assert_eq!(actions.delay(), Some(Duration::from_secs(delay)));
        }
    }
}
