//! The operator: decides how each GPU is shared, releases pods to the scheduler, and reports.
//!
//! Each controller is a folder that reads as a pipeline: read, validate, decide, apply, report.
//!
//! | module | from | to |
//! |---|---|---|
//! | [`policies`] | `SharingPolicy`, `GpuNode.status`, waiting pods | `GpuNode.spec`, `SharingPolicy.status` |
//! | [`placement`] | gated pods, free shares | reservations, released pods |
//! | `tenants` | `GpuNode.status.findings` | pod conditions, evictions |
//! | `rollout` | MPS hosts of an older release on idle nodes | their replacement, as part of placement |
//! | [`admission`] | API servers without the policies that gate pods | answers of the webhook |
//!
//! [`pods`] and [`read`] hold what all of them read. `run` starts the tasks:
//!
//! ```text
//!  watches ──▶ stores ───────────────┬──▶ passes (policies) ──▶ writes, while this process holds the lease
//!  lease task ──▶ claim ─────────────┼──▶ gate (placement, rollout) ──▶ writes, likewise
//!  signals ──▶ cancellation token ───┴──▶ tenants ──▶ writes, likewise
//!  http task: /metrics /healthz /readyz
//!  webhook tasks, if the webhook is enabled
//! ```
//!
//! GPUs of one policy are on many nodes, so one pass plans the whole cluster. There is one pass at
//! a time. A watch that fails keeps the last objects it received. Every write needs the lease,
//! which only the API server can renew: without an API server nothing is written.
pub mod admission;
mod args;
pub mod dry;
mod events;
pub mod evict;
mod http;
pub mod leader;
mod metrics;
mod passes;
pub mod placement;
mod pod_condition;
pub mod pods;
pub mod policies;
pub mod read;
mod rollout;
mod run;
mod task;
mod tenants;
mod watches;
mod write;

pub use args::OperatorArgs;
pub use run::run;
