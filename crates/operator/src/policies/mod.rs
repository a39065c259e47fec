//! From `SharingPolicy` to `GpuNode.spec`.
//!
//! ```text
//!  read::Observed ─▶ validate ─▶ select ─▶ plan (layout) ─▶ demand (snapshot, partition) ─▶ apply ─▶ status
//! ```
//!
//! | step | module | result |
//! |---|---|---|
//! | validate | [`validate`] | `SharingPolicySpec` → [`validate::Policy`], which is always valid |
//! | decide | `select`, [`plan`], `layout` | the policy of each GPU, and the partition that a fixed layout gives it: [`plan::Plan`] |
//! | decide | [`demand`], [`snapshot`], `partition` | the partition of each GPU that pods decide about, and why other pods wait |
//! | apply | [`apply`] | `GpuNode.spec` of the nodes that differ, by server-side apply |
//! | report | [`status`] | `SharingPolicy.status`, and an Event for each condition that changes |
//! | report | `taint` | the taint on nodes that can serve no pod, if the operator is configured to write it |
//!
//! `pace` decides when the steps run. Only [`apply`], [`status`] and `taint` talk to the API
//! server, in functions of their own; all decisions are pure.
pub mod apply;
pub mod demand;
mod layout;
pub(crate) mod pace;
pub(crate) mod partition;
pub mod plan;
mod select;
pub mod snapshot;
pub mod status;
pub(crate) mod taint;
pub mod validate;
