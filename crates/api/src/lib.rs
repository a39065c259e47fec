//! The custom resources of Cleave (`cleave.dev/v1alpha1`), and the names, labels, conditions and
//! reasons that Cleave writes.
//!
//! This crate contains only types and pure functions, and never connects to a cluster. Users write
//! `SharingPolicy` and `GpuQuota`. `GpuNode` connects the operator and a node's agent: only the
//! operator writes its `spec`, and only the agent writes its `status`.
pub mod cordon;
pub mod crds;
pub mod gpunode;
pub mod gpuquota;
pub mod names;
pub mod placement;
pub mod reasons;
pub mod sharingpolicy;

pub use gpunode::{GpuNode, GpuNodeSpec, GpuNodeStatus};
pub use gpuquota::{GpuQuota, GpuQuotaSpec, GpuQuotaStatus};
pub use sharingpolicy::{SharingPolicy, SharingPolicySpec, SharingPolicyStatus};
