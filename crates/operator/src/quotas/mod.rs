//! Elastic quotas: reads `GpuQuota` objects.
//!
//! | module | what |
//! |---|---|
//! | `validate` | the valid quotas of each pool, and what is wrong with the others |
//! | `status` | the status of quotas |
//! | `usage` | what quotas use, for metrics |
//! | `charge` | what a pod costs on the GPUs of a node |
//!
//! The rules are in `cleave_plan::quota`. The placement gate applies them.
pub mod charge;
pub mod status;
pub(crate) mod usage;
pub mod validate;
