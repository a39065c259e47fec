//! Elastic quotas: reads `GpuQuota` objects.
//!
//! | module | content |
//! |---|---|
//! | `validate` | the valid quotas of each pool, and the problems of quotas |
//! | `status` | the status of quotas |
//! | `usage` | the use of quotas, for metrics |
//! | `charge` | the cost of a pod on the GPUs of a node |
//!
//! The rules are in `cleave_plan::quota`. [`crate::placement`] applies the rules.
pub mod charge;
pub mod status;
pub(crate) mod usage;
pub mod validate;
