//! Pure planning: what GPUs are cut into, for whom, and why.
//!
//! Nothing here does I/O, reads a clock, draws a random number or is async, and the manifest keeps
//! it so. Everything is a function of its arguments, and maps are ordered, so that the same input
//! gives the same output, byte for byte.
//!
//! [`plan`] makes a plan, [`check`] judges one, [`diff`] says what a node has to do.
pub mod affinity;
mod board;
mod check;
pub mod constraints;
mod cut;
pub mod device;
mod diff;
mod greedy;
pub mod ledger;
pub mod mig;
mod model;
pub mod mps;
pub mod placement;
mod planner;
mod quantity;
mod report;
pub mod scheduling;
mod search;
pub mod snapshot;
mod states;
pub mod units;

pub use check::{Violation, check};
pub use diff::{Desired, Observed, Step, diff};
pub use planner::{GpuPlan, Placement, Plan, Planned, Policy, Take, Unplaced, plan};
pub use quantity::Quantity;
pub use report::{NodeReport, PodReport, Report};
pub use snapshot::Snapshot;
