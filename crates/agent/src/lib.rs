//! The node agent: it observes the node, compares it with its `GpuNode`, acts, and reports.
//!
//! One task, the main loop, owns the model of the node ([`node::Node`]). The other tasks send it
//! what they observe and carry out what it decides. Everything that decides is pure: time is an
//! argument, and nothing is read or written.
//!
//! ```text
//!  NVML, a thread for each GPU: GPUs, XIDs ──────┐             ┌─▶ device plugin: lists in the open streams
//!  MPS host: its status, whether it lives ───────┤             ├─▶ files: desired.json, checkpoint, CDI
//!  kubelet: PodResources, its checkpoint ────────┼▶ main loop ─┤
//!  API server: the node's own GpuNode ───────────┤             ├─▶ API server: GpuNode.status, events
//!  front ends: what they gave out ───────────────┘             └─▶ /metrics, /healthz, /readyz
//! ```
//!
//! The modules; each uses only those listed before it:
//!
//! - [`event`], [`object`], [`clock`], [`cgroup`]: plain types that all others share.
//! - [`gpu`]: what is known of GPUs, and how they are divided. Pure.
//! - [`allocation`]: which slices containers hold, or will hold. Pure.
//! - [`mps`], [`checkpoint`], [`act`]: the way to the MPS host, to the checkpoint and to NVML.
//! - [`tenants`], [`termination`], [`pods`]: who uses shares, and which pods end. Pure but for
//!   `/proc`.
//! - [`node`]: the model of the node and its one decision, [`node::Node::reconcile`]. Pure.
//! - [`args`], [`metrics`], [`cdi`]: the command line, metrics, and the CDI specification.
//! - [`container_edits`], [`allocator`]: what a container gets, and who gives it out.
//! - [`device_plugin`]: the front end for extended resources. It translates the kubelet's calls for
//!   the allocator. No module before it knows which front end asks.
//! - `run`: the tasks.
//!
//! Front ends are answered from [`allocation::table::AllocationTable`], under a lock that is never
//! held across an await or I/O; the main loop learns of it afterwards. A task of its own terminates
//! the programs of pods that end, and waits for nothing else. The first lists come from the
//! checkpoint, before NVML, PodResources and the API server have answered.
// The fixtures are also part of the model tests, which name this crate.
#[cfg(test)]
extern crate self as cleave_agent;

pub mod act;
pub mod allocation;
pub mod allocator;
pub mod args;
pub mod cdi;
pub mod cgroup;
pub mod checkpoint;
pub mod clock;
pub mod container_edits;
pub mod device_plugin;
pub mod event;
mod files;
#[cfg(test)]
#[path = "../tests/model/fixtures.rs"]
mod fixtures;
pub mod gpu;
pub mod metrics;
pub mod mps;
pub mod node;
pub mod object;
pub mod pods;
mod run;
pub mod tenants;
pub mod termination;

pub use args::AgentArgs;
pub use run::run;
