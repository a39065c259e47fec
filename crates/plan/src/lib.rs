//! Planning: decides how each GPU is partitioned, for which pods, and why.
//!
//! This crate does no I/O, reads no clock, draws no random numbers and is not async. The crate
//! depends only on `serde` and `thiserror`. Every result depends only on the arguments, and maps
//! are ordered. Equal inputs therefore produce equal outputs, byte for byte.
//!
//! [`plan`] creates a plan and [`check`] verifies one. [`ledger`] reserves units of devices for
//! pods.
pub mod affinity;
mod assignment;
mod check;
pub mod constraints;
pub mod device;
mod greedy;
pub mod ledger;
pub mod mig;
mod model;
pub mod mps;
mod partition;
pub mod placement;
mod planner;
mod policy;
mod quantity;
pub mod quota;
mod report;
pub mod scheduling;
mod search;
pub mod shared;
pub mod snapshot;
mod states;
pub mod topology;
pub mod units;

pub use check::{Violation, check};
pub use planner::{ExplainedPlan, GpuPlan, Placement, Plan, PlannedSlices, Unplaced, plan};
pub use policy::Policy;
pub use quantity::Quantity;
pub use report::{NodeReport, PlanReport, PodReport};
pub use snapshot::Snapshot;
