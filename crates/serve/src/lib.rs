//! Serves HTTP for the agent and the operator: ports with bounded resources, addresses of both IP
//! families, and the limit of open files.
//!
//! Any peer in the cluster can connect to these ports. [`http`] limits the connections of peers, so
//! that silent or slow peers cannot stop a program. This crate must not depend on Kubernetes or
//! GPUs.
pub mod descriptors;
pub mod http;
pub mod tcp;
