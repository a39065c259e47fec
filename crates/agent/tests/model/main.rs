//! The agent's model, driven through its public interface against models of a kubelet and a GPU.
#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used, reason = "a test fails by a panic")]
mod admission;
mod fixtures;
mod repartition;
mod snapshot;
