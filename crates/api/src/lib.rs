//! The custom resources of Cleave (`cleave.dev/v1alpha1`), and the names, labels, conditions and
//! reasons that it writes.
//!
//! Types only: nothing here talks to a cluster. `SharingPolicy` is what a person writes; `GpuNode`
//! lies between the operator, which alone writes its `spec`, and the node's agent, which alone
//! writes its `status`.
pub mod cordon;
pub mod crds;
pub mod gpunode;
pub mod names;
pub mod placement;
pub mod reasons;
pub mod sharingpolicy;

pub use gpunode::{GpuNode, GpuNodeSpec, GpuNodeStatus};
pub use sharingpolicy::{SharingPolicy, SharingPolicySpec, SharingPolicyStatus};
