//! Parses the configurations of other software into types. Pure.
//!
//! | module | reads |
//! |---|---|
//! | [`plugin`] | configurations of NVIDIA's device plugin |
//! | [`charts`] | values of NVIDIA's charts, and the `ClusterPolicy` of the GPU Operator |
//! | [`mig_parted`] | configurations of NVIDIA's mig-parted and MIG manager |
//! | [`nos`] | values of the Nos chart |
//! | [`gke`] | node pools of GKE |
//! | [`hami`] | configurations and values of HAMi |
pub(super) mod charts;
pub(super) mod gke;
pub(super) mod hami;
pub(super) mod mig_parted;
pub(super) mod nos;
pub(super) mod plugin;
