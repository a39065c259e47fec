//! The model of GPUs for Dynamic Resource Allocation (DRA).
//!
//! The scheduler chooses devices from the [`ResourceSlice`](wire::ResourceSlice)s that a node
//! publishes. [`Pool`] computes the slices of a node from its GPUs, and [`Pool::read_claim`] maps
//! the devices of an allocated claim back to parts of GPUs. [`Pool::check`] decides whether the
//! node's GPUs can serve several claims at the same time. The check uses the rules of NVML and MPS
//! and no counters, so tests compare the counters of the slices with it.
//!
//! This crate does no I/O, reads no clock, draws no random numbers and is not async.
pub mod check;
pub mod claim;
mod counters;
mod devices;
pub mod gpu;
pub mod names;
mod pool;
mod slices;
pub mod wire;

pub use claim::{ClaimError, ClaimPlan, Holding, Part, Share};
pub use devices::Placement;
pub use gpu::{Gpu, MigOffer, Offer};
pub use names::{DRIVER, GpuUuid, NodeName};
pub use pool::{Pool, Refusal};
