//! The pods, GPUs and quotas of one pool, as a pass reads them.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::amount::Amount;
use super::spec::Quota;
use crate::ledger::Moment;

/// Index of a pod in [`World::pods`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodId(pub usize);

/// The quota against which a pod counts, if any.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    /// The pod counts against the quota with this name.
    Quota(String),
    /// The pod has no quota and borrows. All such pods together count as a quota without a
    /// guarantee and with weight 1.
    Unnamed,
    /// The pod has no quota, and its namespace is exempt. Quotas neither delay nor evict the pod.
    Outside,
}

/// Where a pod is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The pod has the placement gate.
    Waiting {
        /// The nominated GPU of the pod, as an index into [`World::gpus`].
        nominated: Option<usize>,
    },
    /// The pod is released, bound or running.
    Running {
        /// Index of the GPU.
        gpu: usize,
        /// Time at which the pod was released or, if it bypassed the gate, started.
        since: Moment,
    },
    /// The pod was evicted or deleted, but has not exited yet.
    Leaving {
        /// Index of the GPU.
        gpu: usize,
        /// Whether the pod still counts against its quota's maximum: true until 30 s after the
        /// pod's grace period.
        held: bool,
    },
}

/// The gang of a pod. Pods of a gang are useful only together, so they are released together,
/// counted as one pod, and evicted together.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Gang {
    /// Name of the gang. Pods with the same owner and the same gang name form one gang. Therefore,
    /// the name must include the namespace if a quota has several namespaces.
    pub name: String,
    /// Minimum number of pods: no pod of the gang is released before this number of pods exists. If
    /// the pods of a gang state different numbers, the largest number applies.
    pub size: usize,
}

/// The part of one GPU that a pod uses or requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Charge of this part.
    pub charge: Amount,
    /// Index of the GPU in [`World::gpus`]. `None` if the pod has no GPU for this part yet.
    pub gpu: Option<usize>,
}

/// A pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// Name of the pod. The name decides the order of otherwise equal pods.
    pub name: String,
    /// The quota against which the pod counts, if any.
    pub owner: Owner,
    /// Amount that counts against the quota, which is also the capacity that the pod uses.
    pub charge: Amount,
    /// Priority of the pod.
    pub priority: i32,
    /// When the pod was created.
    pub created: Moment,
    /// Whether the pod waits, runs or is terminating, and on which GPU.
    pub place: Place,
    /// Whether the pod may run outside its quota's guarantee: `cleave.dev/borrow` is not `Never`.
    pub borrows: bool,
    /// Whether pods may be evicted for this pod: its `preemptionPolicy` is not `Never`.
    pub preempts: bool,
    /// Time since which a disruption budget refuses to evict the pod. `None` if the pod may be
    /// evicted.
    pub protected: Option<Moment>,
    /// The gang of the pod. Most pods have no gang.
    pub gang: Option<Gang>,
    /// The parts of GPUs that the pod uses or requests, if it requests parts of several GPUs. Empty
    /// for other pods. Only callers of [`Book`](super::Book) pass such pods: [`look`](super::look)
    /// does not place them.
    pub pieces: Vec<Piece>,
    /// The GPUs that the pod may use, as indices into [`World::gpus`]. `None` means all.
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
    /// Minimum time that a pod runs before a borrowing pod of another quota may evict it.
    pub min_runtime_fair_share: u64,
    /// Minimum time that a pod runs before a pod within its guarantee may evict it.
    pub min_runtime_reclaim: u64,
    /// Maximum grace period of an evicted pod.
    pub grace_cap: u64,
    /// Maximum time for which a disruption budget may block the eviction of a borrowing pod for a
    /// pod within its guarantee. `None` means no limit.
    pub budget_patience: Option<u64>,
    /// Time that a pod waits before capacity is reserved for it. `None` means that no capacity is
    /// reserved.
    pub ageing: Option<u64>,
    /// Pods of this priority and above override quotas. `None` means that no pod does.
    pub override_priority: Option<i32>,
    /// Maximum number of pods for which one pass searches for victims.
    pub max_preemptors: usize,
}

impl Settings {
    /// Returns the priority if it overrides quotas.
    ///
    /// Among pods whose priority overrides quotas, priority alone decides. Such pods use free
    /// capacity before all other pods, and may evict pods of lower priority of every enforced
    /// quota. Only pods of a higher priority evict such pods. Pods that override quotas still stay
    /// within their own quota's maximum.
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

/// The inputs of a pass.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct World {
    /// Capacity of each GPU of the pool. The capacity of an unhealthy GPU is 0.
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
