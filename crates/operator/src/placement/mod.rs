//! Releases pods to the scheduler once they have a reservation.
//!
//! ```text
//!  stores ─▶ cluster ─[facts]─▶ ledger ─▶ gatekeeper ─▶ Turn { pods to release, why others wait } ─▶ run: one patch each
//! ```
//!
//! | step | module | what |
//! |---|---|---|
//! | read | `cluster`, `facts`, `nodes`, `present`, `surroundings` | the objects, and what the ledger and the scheduler's rules need of them |
//! | decide | `gatekeeper` | one [`Turn`] for each look, with `placing`, `preempting` and `stranded`, and MPS hosts with `crate::rollout` |
//! | apply, report | `run`, `patch` | patches, evictions, conditions, Events and metrics |
//!
//! A pod that requests shares is created with Cleave's scheduling gate. The ledger reserves shares
//! of one device for each request. Then one patch limits the pod to the nodes of the reservation,
//! writes the reservation into an annotation, and removes the gate. The annotation is the only
//! record: after a restart [`Gatekeeper::look`] rebuilds the ledger from pods, and the node's agent
//! reads it when the kubelet allocates.
//!
//! | a gated pod | result |
//! |---|---|
//! | fits | It is released to one node, or to a few if the scheduler may have reasons of its own to refuse a node. |
//! | fits after a pod ends, a GPU is repartitioned, or a temporary obstacle (a cordon, a node's condition) ends | It waits, with the reason in an Event. |
//! | fits no GPU for [`PATIENCE`], with temporary obstacles ignored | It is released as unschedulable, to nodes with larger GPUs than exist. |
//! | requests nothing that Cleave serves | It is released unchanged. |
//!
//! `stranded` helps a released pod that no node takes.
mod cluster;
mod facts;
mod gatekeeper;
mod nodes;
mod patch;
mod placing;
mod preempting;
mod present;
mod run;
mod stranded;
mod surroundings;
mod turn;

pub use cluster::{Cluster, Now};
pub use gatekeeper::{Gatekeeper, PATIENCE};
pub(crate) use run::{Gate, Parts};
pub use stranded::{Advice, Recreation, Rescue};
pub use turn::{Eviction, Opening, Turn, Why};
