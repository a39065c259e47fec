//! Pure planning: what GPUs are cut into, for whom, and why.
//!
//! Nothing here does I/O, reads a clock, draws a random number or is async, and the manifest keeps
//! it so. Everything is a function of its arguments, and maps are ordered, so that the same input
//! gives the same output, byte for byte.
//!
//! [`plan`] makes a plan, [`check`] judges one, [`diff`] says what a node has to do.
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
mod report;
pub mod scheduling;
mod search;
pub mod snapshot;
mod states;
pub mod units;

pub use check::{Violation, check};
pub use planner::{GpuPlan, Placement, Plan, Planned, Take, Unplaced, plan};
pub use policy::Policy;
pub use quantity::Quantity;
pub use report::{NodeReport, PodReport, Report};
pub use snapshot::Snapshot;
