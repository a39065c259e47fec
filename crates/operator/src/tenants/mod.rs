//! Reports pods that use a GPU outside their share, and evicts them if the policy specifies
//! eviction.
//!
//! Agents find such pods (`GpuNode.status.findings`) and have no permission to write pods. The
//! operator accepts an agent's findings only about pods of the agent's own node. `GpuNode.spec`,
//! which the operator itself writes, decides whether the pods are evicted.
//!
//! | step | module | purpose |
//! |---|---|---|
//! | decide | `decide` | findings and pods → conditions to write, pods to evict |
//! | apply, report | `run` | the writes, Events and metrics |
mod decide;
mod run;

pub(crate) use run::TenantController;
