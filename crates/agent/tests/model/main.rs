//! Tests the agent's model through its public interface, against models of a kubelet, an MPS host
//! and a GPU.
#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used, reason = "a test fails with a panic")]
mod admission;
mod fixtures;
mod repartition;
mod snapshot;
