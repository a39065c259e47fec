//! The pods, GPUs and quotas of one pool, as a pass reads them.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::amount::Amount;
use super::spec::Quota;
use crate::ledger::Moment;

/// Index of a pod in [`World::pods`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodId(pub usize);

/// What a pod is counted against.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    /// The quota of this name.
    Quota(String),
    /// No quota. The pod borrows: all such pods together are a quota with no guarantee and weight
    /// 1.
    Unnamed,
    /// No quota, and the namespace is exempt. Quotas neither hold nor evict the pod.
    Outside,
}

/// Where a pod is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Behind the placement gate.
    Waiting {
        /// The GPU whose room is kept for the pod, as an index of [`World::gpus`].
        nominated: Option<usize>,
    },
    /// Released, bound or running.
    Running {
        /// Index of the GPU.
        gpu: usize,
        /// When the pod was released or, if it bypassed the gate, when it started.
        since: Moment,
    },
    /// Evicted or deleted, and not yet gone.
    Leaving {
        /// Index of the GPU.
        gpu: usize,
        /// Whether the pod still counts against its quota's maximum. It does until 30 s after its
        /// grace period.
        held: bool,
    },
}

/// Pods that are of use only together. They are released together, counted as one pod, and evicted
/// together.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Gang {
    /// Name of the gang. Pods with the same owner and the same name are one gang, so a name must
    /// include the namespace if a quota has several.
    pub name: String,
    /// Number of pods without which none of them is released. If pods of a gang disagree, the
    /// largest number is valid.
    pub size: usize,
}

/// What a pod uses of one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// What it costs.
    pub charge: Amount,
    /// The GPU, as an index of [`World::gpus`]. `None` if the pod waits and has no room.
    pub gpu: Option<usize>,
}

/// A pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// Name of the pod. Equal pods are ordered by name.
    pub name: String,
    /// What the pod is counted against.
    pub owner: Owner,
    /// What the pod costs, and how much room it needs.
    pub charge: Amount,
    /// Priority of the pod.
    pub priority: i32,
    /// When the pod was created.
    pub created: Moment,
    /// Where the pod is.
    pub place: Place,
    /// Whether the pod may run outside its quota's guarantee: `cleave.dev/borrow` is not `Never`.
    pub borrows: bool,
    /// Whether pods may be evicted for this pod: its `preemptionPolicy` is not `Never`.
    pub preempts: bool,
    /// Since when a disruption budget refuses to evict the pod. `None` if the pod may be evicted.
    pub protected: Option<Moment>,
    /// The gang of the pod. Most pods have none.
    pub gang: Option<Gang>,
    /// What the pod uses of each GPU, if it requests parts of several GPUs. Empty for other pods.
    /// Only [`Book`](super::Book) reads the pieces: [`look`](super::look) places no such pods.
    pub pieces: Vec<Piece>,
    /// The GPUs that the pod may use, as indexes of [`World::gpus`]. `None` means all.
    pub gpus: Option<Arc<BTreeSet<usize>>>,
}

impl Pod {
    /// Returns whether the pod may use a GPU.
    pub fn may_use(&self, gpu: usize) -> bool {
        self.gpus.as_ref().is_none_or(|gpus| gpus.contains(&gpu))
    }
}

/// Settings of the cluster. Durations are in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// How long a pod runs at least before another borrower may take its room.
    pub min_runtime_fair_share: u64,
    /// How long a pod runs at least before a pod within its guarantee may take its room.
    pub min_runtime_reclaim: u64,
    /// Maximum grace period of an evicted pod.
    pub grace_cap: u64,
    /// How long a disruption budget may keep a borrower whose room is guaranteed to others. `None`
    /// means forever.
    pub budget_patience: Option<u64>,
    /// How long a pod waits before room is reserved for it. `None` means forever.
    pub ageing: Option<u64>,
    /// Pods of this priority and above do not stop at the borders of quotas. `None` means no pod.
    pub override_priority: Option<i32>,
    /// Maximum number of pods for which one pass looks for victims.
    pub max_preemptors: usize,
}

impl Settings {
    /// Returns the priority if pods of this priority do not stop at the borders of quotas.
    ///
    /// Among such pods priority alone decides. They use free room before all others, and may evict
    /// pods of lower priority of every quota that is enforced. Only pods of a higher priority evict
    /// them. They still stay within their own quota's maximum.
    pub fn overriding(&self, priority: i32) -> Option<i32> {
        self.override_priority.filter(|&limit| priority >= limit).map(|_| priority)
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            min_runtime_fair_share: 300,
            min_runtime_reclaim: 0,
            grace_cap: 300,
            budget_patience: Some(600),
            ageing: Some(600),
            override_priority: None,
            max_preemptors: 8,
        }
    }
}

/// Everything that a pass reads.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct World {
    /// Room of each GPU of the pool. The room of an unhealthy GPU is 0.
    pub gpus: Vec<Amount>,
    /// The quotas of the pool by name.
    pub quotas: BTreeMap<String, Quota>,
    /// The pods that run in the pool or wait for it.
    pub pods: Vec<Pod>,
    /// Settings of the cluster.
    pub settings: Settings,
}

impl World {
    /// Returns a pod.
    ///
    /// # Panics
    /// Panics if the id is of another world.
    pub fn pod(&self, id: PodId) -> &Pod {
        &self.pods[id.0]
    }
}
