//! The operator: decides how each GPU is shared, releases pods to the scheduler, and reports.
//!
//! Each controller is a pipeline of steps: read, validate, decide, apply, report.
//!
//! | module | from | to |
//! |---|---|---|
//! | [`policies`] | policies, `GpuNode.status`, waiting pods | `GpuNode.spec`, policies' status |
//! | [`placement`] | gated pods, free units, quotas | reservations, released pods, evictions, quotas' status |
//! | `tenants` | `GpuNode.status.findings` | pod conditions, evictions |
//! | `rollout` | outdated MPS hosts on idle nodes | their replacement, as part of placement |
//! | [`admission`] | new pods, on API servers without admission policies | webhook responses |
//!
//! All modules read the cluster through [`pods`] and [`read`]. `run` starts the tasks:
//!
//! ```text
//!  watches ──▶ stores ───────────────┬──▶ passes (policies) ──────────▶ writes
//!  lease thread ──▶ lease guard ─────┼──▶ gate (placement, rollout) ──▶ writes
//!  signals ──▶ cancellation token ───┴──▶ tenants ────────────────────▶ writes
//!  http task: /metrics /healthz /readyz
//!  webhook tasks, if the webhook is enabled
//! ```
//!
//! The GPUs of one policy can be on many nodes, so one pass plans the whole cluster. Only one pass
//! runs at a time. If a watch fails, its store keeps the objects that it last received. Every write
//! requires the lease, except writes of the webhook's certificate. The lease expires if the
//! operator cannot reach the API server, so a disconnected operator stops writing.
pub mod admission;
mod args;
mod catch_up;
pub mod dry_run;
mod events;
pub mod evict;
mod gang;
mod http;
pub mod leader;
mod metrics;
mod passes;
pub mod placement;
mod pod_condition;
mod pod_fields;
mod pod_metadata;
pub mod pod_store;
pub mod pods;
pub mod policies;
pub mod quotas;
pub mod read;
mod rollout;
mod run;
mod sums;
mod task;
mod tenants;
mod wait_clock;
mod watches;
mod write;

pub use args::OperatorArgs;
pub use run::run;
