//! The operator: reads policies and nodes, plans, writes each node's desired state, and tells what came of it.
//!
//! One pass is a pipeline; each step is a module, and only the first and the last two talk to a cluster:
//!
//! | step | module | what |
//! |---|---|---|
//! | read | [`read`] | watches → [`read::Observed`], one consistent value |
//! | validate | [`validate`] | `SharingPolicySpec` → [`validate::Policy`], which cannot be wrong |
//! | plan | [`select`], [`plan`], [`layout`] | which policy each GPU follows, and what that makes of it: [`plan::Plan`] |
//! | apply | [`apply`] | `GpuNode.spec` of the nodes that differ, by server-side apply |
//! | taint | [`taint`] | nodes that can serve nobody, where that is asked for |
//! | roll out | [`rollout`] | MPS hosts of an older release, when nothing uses MPS on their node, where that is asked for; in the gate's look |
//! | status | [`status`] | `SharingPolicy.status`, and an event where something turned |
//!
//! ```text
//!  watches (policies, gpunodes, nodes' metadata, agents' pods) ──▶ stores ─┐ dirty
//!  lease task ──▶ claim (watch channel) ───────────────────────────────────┼─▶ pass task ──▶ writes, while the claim lasts
//!  signals ──▶ cancellation token ─────────────────────────────────────────┘
//!  http task: /metrics /healthz /readyz
//!  webhook tasks, where the API server has no policies that gate pods: [`webhook`] answers, [`certificate`] keeps what it answers with
//! ```
//!
//! The cluster is planned as a whole, since GPUs of one policy are on many nodes: there is one pass at a time, and no controller per object.
//! A watch that errs keeps what it last knew; a pass writes only while this process holds the lease, which it can only renew through the same
//! API server: without one, nothing is written.
pub mod apply;
pub mod args;
pub mod certificate;
pub mod cut;
pub mod demand;
pub mod dry;
pub mod events;
mod evict;
pub mod gate;
mod http;
pub mod layout;
pub mod leader;
mod metrics;
pub mod pace;
pub mod plan;
pub mod pods;
pub mod read;
pub mod rollout;
mod run;
pub mod select;
pub mod snapshot;
pub mod status;
pub mod taint;
pub mod tenants;
pub mod validate;
pub mod webhook;

pub use args::OperatorArgs;
pub use run::run;
