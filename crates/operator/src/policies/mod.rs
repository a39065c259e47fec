//! Computes `GpuNode.spec` from `SharingPolicy` objects.
//!
//! ```text
//!  read::Observed ─▶ validate ─▶ select ─▶ plan (layout)
//!      ─▶ staging (waves) ─▶ demand (snapshot, partition) ─▶ apply ─▶ status
//! ```
//!
//! | step | module | result |
//! |---|---|---|
//! | validate | [`validate`] | `SharingPolicySpec` → [`validate::Policy`], which is always valid |
//! | decide | `select`, [`plan`], `layout` | the policy of each GPU, and fixed partitions |
//! | decide | [`staging`], [`waves`] | which nodes a changed policy reaches now |
//! | decide | [`demand`], [`snapshot`], `partition` | on-demand partitions, and why pods wait |
//! | apply | [`apply`] | changed `GpuNode.spec` of nodes, by server-side apply |
//! | report | [`status`] | `SharingPolicy.status`, and an Event for each condition that changes |
//! | report | `taint` | the taint on nodes that can serve no pod, if enabled |
//!
//! `pace` decides when the steps run. Only [`apply`], [`status`] and `taint` send requests to the
//! API server, and they do so in separate functions. All decisions are pure.
pub mod apply;
pub mod demand;
mod layout;
pub(crate) mod pace;
pub(crate) mod partition;
pub mod plan;
pub(crate) mod repartition;
pub(crate) mod select;
pub mod snapshot;
pub mod staging;
pub mod status;
pub(crate) mod taint;
pub mod validate;
pub mod waves;
