//! Tests the slices against a model of the scheduler, NVML's rules, and Kubernetes' allocator.
#![allow(clippy::expect_used, clippy::panic, reason = "helpers of tests")]

mod allocator;
mod claims;
mod counters;
mod gpus;
mod scheduler;
mod slices;
