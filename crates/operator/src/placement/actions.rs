//! What one reconcile of the gate decides: pods to release, pods to evict, and why other pods wait.
use std::collections::BTreeMap;
use std::time::Duration;

use cleave_api::placement::Placement;
use cleave_plan::ledger::DeviceRequest;
use serde_json::Value;

use super::stranded::Rescue;
use crate::policies::demand::WaitingPod;
use crate::rollout::Step;

/// Why a pod is released.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReleaseReason {
    /// It has a reservation.
    Reserved(Placement),
    /// It requests nothing that Cleave serves.
    NotServed,
    /// It fits no GPU of the cluster. Contains the explanation for its owner.
    Unschedulable(String),
}

impl ReleaseReason {
    /// The value of the `result` label in metrics.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Reserved(_) => "reserved",
            Self::NotServed => "not_managed",
            Self::Unschedulable(_) => "unschedulable",
        }
    }
}

/// A pod to release to the scheduler.
#[derive(Debug, Clone, PartialEq)]
pub struct Release {
    /// `namespace/name`.
    pub pod: String,
    /// Its UID.
    pub uid: String,
    /// Why it is released.
    pub reason: ReleaseReason,
    /// Time for which the pod waited at the gate.
    pub waited: Duration,
    /// The JSON Patch (RFC 6902) that releases it.
    pub patch: Value,
}

/// A pod to evict for a pod of higher priority.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Eviction {
    /// `namespace/name`.
    pub pod: String,
    /// Its UID.
    pub uid: String,
    /// The pod of higher priority: `namespace/name`.
    pub preemptor: String,
}

/// What one reconcile decides.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Actions {
    /// Pods to release, in order of priority and age.
    pub releases: Vec<Release>,
    /// Pods to evict. The shares that they free are kept for the preemptor.
    pub evictions: Vec<Eviction>,
    /// Pods that wait at the gate, and what each waits for.
    pub waiting: BTreeMap<String, WaitingPod>,
    /// What to do about stranded pods.
    pub rescue: Rescue,
    /// What to do about MPS hosts. `None` if this reconcile did not examine them.
    pub rollout: Option<Step>,
    /// Whether another reconcile can release more pods immediately.
    pub more: bool,
    /// Delay before the next reconcile if nothing changes.
    pub requeue: Option<Duration>,
}

impl Actions {
    /// Requests another reconcile after at most `time`.
    pub(super) fn requeue_in(&mut self, time: Duration) {
        self.requeue = Some(self.requeue.map_or(time, |requeue| requeue.min(time)));
    }
}

/// The nodes that a pod is released to.
#[derive(Debug, Clone)]
pub(super) enum Destination<'a> {
    /// Any node that the pod's own rules allow.
    Anywhere,
    /// The nodes with these hostname labels.
    Hostnames(Vec<&'a str>),
    /// Nodes with larger GPUs than the cluster has, for the largest of these requests.
    LargerGpus(&'a [DeviceRequest]),
}
