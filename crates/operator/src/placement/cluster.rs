//! What one look reads: the objects of the watches, and the time.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cleave_api::GpuNode;
use cleave_plan::snapshot::Pod as PlanPod;
use kube::core::DeserializeGuard;

use crate::pods::{PodObject, claimant};
use crate::policies::demand::Waiting;
use crate::read::{AgentPod, NamespaceObject, NodeObject, VolumeClaimObject, VolumeObject};
use crate::rollout::Hosts;

/// The cluster as the watches last told it.
#[derive(Debug, Clone, Default)]
pub struct Cluster {
    /// Pods that have not ended, trimmed.
    pub pods: Vec<Arc<PodObject>>,
    /// Nodes.
    pub nodes: Vec<Arc<NodeObject>>,
    /// `GpuNode`s.
    pub gpu_nodes: Vec<Arc<DeserializeGuard<GpuNode>>>,
    /// The agents' pods.
    pub agents: Vec<Arc<AgentPod>>,
    /// MPS hosts, where they are to be replaced and once they are known.
    pub hosts: Option<Hosts>,
    /// Claims of volumes.
    pub volume_claims: Vec<Arc<VolumeClaimObject>>,
    /// Volumes.
    pub volumes: Vec<Arc<VolumeObject>>,
    /// Namespaces, for pods' affinity to pods of namespaces with some labels.
    pub namespaces: Vec<Arc<NamespaceObject>>,
}

/// Now.
#[derive(Debug, Clone, Copy)]
pub struct Now {
    /// Since the process started.
    pub up: Duration,
    /// Seconds of the Unix epoch, by a clock that nobody sets while this process leads: what is
    /// held is not to be lost, or kept, by a jump.
    pub epoch: u64,
}

/// What is looked at beside nodes and ledger.
pub(super) struct Seen<'a> {
    pub(super) cluster: &'a Cluster,
    pub(super) living: &'a [&'a PodObject],
    /// Of these, those that are not settled.
    pub(super) open: &'a [&'a PodObject],
    pub(super) demand: &'a BTreeMap<String, Waiting>,
    pub(super) now: Now,
}

pub(super) fn is_living(pod: &PodObject) -> bool {
    let ended = matches!(pod.status.phase.as_str(), "Succeeded" | "Failed");
    // One that is deleted before it is bound will not come.
    !ended && (pod.node().is_some() || pod.metadata.deletion_timestamp.is_none())
}

/// A pod as it is planned with; of one that nothing is planned for, what it asks for.
pub(super) fn planned(pod: &PodObject) -> PlanPod {
    let plain = || PlanPod { requests: pod.spec.requests.clone(), ..Default::default() };
    claimant(pod).map_or_else(plain, |found| found.pod)
}
