//! Releases pods to the scheduler once they have a reservation.
//!
//! ```text
//!  stores ─▶ cluster ─[facts]─▶ ledger ─▶ gatekeeper ─▶ Actions ─▶ run: one patch per pod
//! ```
//!
//! | step | module | purpose |
//! |---|---|---|
//! | read | `cluster`, `nodes`, `facts`, `pod_tracker`, `claims` | the objects, and the facts that the ledger and the scheduler's rules need |
//! | decide | `gatekeeper`, `decisions` | [`Actions`] of one reconcile |
//! | | `queue` | order and back-off of the pods at the gate |
//! | | `unanswered`, `gang_releases` | releases to send again |
//! | | `learning`, `replicas` | data by which the search ranks nodes |
//! | | `search`, `constraints`, `free_resources`, `amounts`, `verdict` | a placement for a pod, or why it is not placeable |
//! | | `quota_objects`, `quotas`, `quota_costs`, `quota_times`, `quota_pass`, `quota_turns`, `quota_waits` | quotas: the order of the pods, the units that each pod may use, and the pods that may be evicted for it |
//! | | `quota_gangs`, `gangs`, `gang_restarts` | pods that are released together |
//! | | `handover`, `long_waits` | nominations that remain when the leader changes, and nominations of pods that have waited long |
//! | | `preemption`, `preemptors`, `exchange_turns`, `eviction_rounds`, `evictions`, `gang_evictions`, `budgets`, `unlisted`, `unbound` | pods to evict for waiting pods |
//! | | `stranded` | released pods to evict |
//! | | `other_nodes` | nodes of other device plugins |
//! | | `growth`, `returning`, `fragments` | pods to report to cluster autoscalers, nodes that only look free to them |
//! | | `mps_hosts` | MPS hosts to replace, with `crate::rollout` |
//! | apply, report | `run`, `patch`, `quota_reports` | patches, evictions, conditions, Events and metrics |
//!
//! The API server creates a pod that requests GPUs with Cleave's scheduling gate. The ledger
//! reserves units of one device for each request. Then one patch narrows the pod to the nodes of
//! the reservation, writes the reservation into an annotation, and removes the gate. The annotation
//! is the only record of the reservation. After a restart, [`Gatekeeper::reconcile`] rebuilds the
//! ledger from the annotations. The node's agent reads the annotation when the kubelet allocates.
//!
//! | a gated pod | result |
//! |---|---|
//! | fits | It is released to one node, or to a few nodes if the scheduler applies rules that the operator does not evaluate. |
//! | fits after a pod ends, a GPU is repartitioned, or a temporary obstacle (a cordon, a node's condition) ends | It waits, with the reason in an Event. |
//! | fits no GPU for [`UNSCHEDULABLE_AFTER`], with temporary obstacles ignored | It is released as unschedulable: to nodes whose GPUs are larger than any GPU of the cluster, or to any node if no GPU serves the resource or if the pod requests whole GPUs. |
//! | fits on no node of Cleave, but on a node of another device plugin | It is released to the nodes of other plugins. |
//! | requests nothing that Cleave serves | It is released unchanged. |
//!
//! `stranded` handles released pods that no node accepts.
mod actions;
mod amounts;
mod budgets;
mod claims;
mod cluster;
mod constraints;
mod decisions;
mod eviction_rounds;
mod evictions;
mod exchange_turns;
mod facts;
mod fragments;
mod free_resources;
mod gang_evictions;
mod gang_releases;
mod gang_restarts;
mod gangs;
mod gatekeeper;
mod growth;
mod handover;
mod learning;
mod long_waits;
mod mps_hosts;
mod nodes;
mod other_nodes;
mod patch;
mod pod_tracker;
mod preemption;
mod preemptors;
mod queue;
mod quota_costs;
mod quota_gangs;
mod quota_objects;
mod quota_pass;
mod quota_reports;
mod quota_times;
mod quota_turns;
mod quota_waits;
pub(crate) mod quota_writer;
mod quotas;
mod replicas;
mod returning;
mod run;
mod search;
mod stranded;
mod unanswered;
mod unbound;
mod unlisted;
mod verdict;

pub use actions::{
    Actions, AutoscalerReport, Eviction, GangId, NominationRecord, ProtectedPod, QuotaEviction, Release, ReleaseReason,
};
pub use cluster::{Cluster, ReconcileTime};
pub use gatekeeper::{Gatekeeper, UNSCHEDULABLE_AFTER};
pub use quotas::QuotaSettings;
pub(crate) use run::{ControllerInputs, PlacementController};
pub use stranded::{PlacedReport, Recreation, StrandedActions};
