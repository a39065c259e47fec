//! The inputs of one reconcile: the objects of the watches, and the time.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cleave_api::{GpuNode, GpuQuota, SharingPolicy};
use cleave_plan::snapshot::Pod as PlanPod;
use kube::core::DeserializeGuard;

use super::pod_tracker::PodTracker;
use crate::pods::{PodObject, claimant};
use crate::policies::demand::WaitingPod;
use crate::read::{AgentPod, BudgetObject, NamespaceObject, NodeObject, VolumeClaimObject, VolumeObject};
use crate::rollout::MpsHosts;

/// The cluster's objects, as the watches last reported them.
#[derive(Debug, Clone, Default)]
pub struct Cluster {
    /// Pods that have not ended, trimmed by [`PodObject::trim`]. Empty in the operator, which
    /// passes changes of pods to [`super::Gatekeeper::reconcile_changes`].
    pub pods: Vec<Arc<PodObject>>,
    /// The cluster's nodes.
    pub nodes: Vec<Arc<NodeObject>>,
    /// The `GpuNode` of each node that Cleave manages.
    pub gpu_nodes: Vec<Arc<DeserializeGuard<GpuNode>>>,
    /// `SharingPolicy`s. Each policy states how replicas are placed on its GPUs, and how GPUs of
    /// future nodes are shared.
    pub policies: Vec<Arc<DeserializeGuard<SharingPolicy>>>,
    /// Pods of the agents.
    pub agents: Vec<Arc<AgentPod>>,
    /// MPS hosts. `None` if the operator does not replace MPS hosts, or has not listed them yet.
    pub hosts: Option<MpsHosts>,
    /// `PersistentVolumeClaim`s, to which pods refer.
    pub volume_claims: Vec<Arc<VolumeClaimObject>>,
    /// `PersistentVolume`s, to which claims are bound.
    pub volumes: Vec<Arc<VolumeObject>>,
    /// Quotas.
    pub quotas: Vec<Arc<DeserializeGuard<GpuQuota>>>,
    /// Disruption budgets.
    pub budgets: Vec<Arc<BudgetObject>>,
    /// Namespaces. Pod affinity can select namespaces by label.
    pub namespaces: Vec<Arc<NamespaceObject>>,
}

/// The time of one reconcile.
#[derive(Debug, Clone, Copy)]
pub struct ReconcileTime {
    /// Time since the process started.
    pub up: Duration,
    /// Seconds since the Unix epoch, from a clock that is never adjusted while this process leads.
    /// An adjustment of the node's clock must not end or prolong reservations.
    pub epoch: u64,
}

/// Inputs of one reconcile, other than the nodes and the ledger.
pub(super) struct ReconcileInput<'a> {
    pub(super) cluster: &'a Cluster,
    /// The pods of the cluster.
    pub(super) tracker: &'a PodTracker,
    /// The pods in `tracker` that are not settled.
    pub(super) unsettled: &'a [&'a PodObject],
    /// Why each pod waits, according to the plan for GPUs that Cleave partitions on demand.
    pub(super) demand: &'a BTreeMap<String, WaitingPod>,
    pub(super) now: ReconcileTime,
}

/// Returns whether a pod has no gate and is neither bound nor deleted.
pub(super) fn is_released_and_unbound(pod: &PodObject) -> bool {
    pod.node().is_none() && pod.spec.scheduling_gates.is_empty() && pod.metadata.deletion_timestamp.is_none()
}

/// Converts a pod to the planner's input. For a pod without GPU requests, the result contains only
/// the pod's other requests.
pub(super) fn to_plan_pod(pod: &PodObject) -> PlanPod {
    let plain = || PlanPod { requests: pod.spec.requests.clone(), ..Default::default() };
    claimant(pod).map_or_else(plain, |found| found.pod)
}
