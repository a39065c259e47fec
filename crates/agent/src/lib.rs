//! The node agent: it observes the node, compares it with its `GpuNode`, acts, and reports.
//!
//! One task, the main loop, owns the model of the node ([`node::Node`]). The other tasks send their
//! observations to the main loop and carry out its decisions. All code that decides is pure: the
//! time is an argument, and the code does no I/O.
//!
//! ```text
//!  NVML, a thread per GPU: GPUs, XIDs ──┐             ┌─▶ device plugin: lists in open streams
//!  MPS host: status, liveness ──────────┤             ├─▶ files: desired.json, checkpoint, CDI
//!  kubelet: PodResources, checkpoint ───┼▶ main loop ─┤
//!  API server: the node's GpuNode ──────┤             ├─▶ API server: GpuNode.status, Events
//!  front ends: new allocations ─────────┘             └─▶ /metrics, /healthz, /readyz
//! ```
//!
//! Each module uses only modules that are listed before it:
//!
//! - [`event`], [`object`], [`clock`], [`cgroup`]: plain types that other modules use.
//! - [`gpu`]: state, health and partitions of GPUs. Pure.
//! - [`allocation`]: the slices that containers use or will use. Pure.
//! - [`mps`], [`checkpoint`], [`mig_order`]: access to the MPS host and to the checkpoint, and
//!   changes of MIG through NVML.
//! - [`tenants`], [`termination`], [`pods`]: the pods that use shares, and the pods that terminate.
//!   Pure except for `/proc`.
//! - [`hand_over`]: which of two agents of the node serves. Pure.
//! - [`node`]: the model of the node, and its decision [`node::Node::reconcile`]. Pure.
//! - [`share_clock`]: counts share-seconds. Pure.
//! - [`args`], [`metrics`], [`cdi`], [`toolkit`]: the command line, metrics, the CDI specification,
//!   and NVIDIA's container toolkit on the host, which knows the driver's files.
//! - [`container_edits`], [`allocator`]: the changes to a container, and the service that allocates
//!   slices.
//! - [`device_plugin`]: the front end for extended resources. The device plugin translates the
//!   kubelet's calls for the allocator. The earlier modules do not depend on the device plugin.
//!   However, [`allocation`] and [`node`] assume that the kubelet allocates extended resources and
//!   lists them in PodResources.
//! - `run`: the tasks.
//!
//! Front ends answer from [`allocation::table::AllocationTable`] under a lock, and then notify the
//! main loop. No front end holds the lock across an `await` point or during I/O. A separate task
//! terminates the programs of terminating pods, and waits for no other task. The first device lists
//! come from the checkpoint, because NVML, PodResources and the API server have not answered yet.
// The unit tests share fixtures with the model tests. The alias is needed because the fixtures
// refer to this crate by its name.
#[cfg(test)]
extern crate self as cleave_agent;

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
pub mod hand_over;
pub mod metrics;
pub mod mig_order;
pub mod mps;
pub mod node;
pub mod object;
pub mod pods;
mod run;
pub mod share_clock;
pub mod tenants;
pub mod termination;
pub mod toolkit;

pub use args::AgentArgs;
pub use run::run;
