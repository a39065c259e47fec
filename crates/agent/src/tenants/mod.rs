//! The tenant watch: who uses more of a shared GPU than its shares, or computes on it outside MPS,
//! is found within two seconds and told.
//!
//! ```text
//!  main loop ── TenantSnapshot ─┐                                                     ┌─▶ findings ─▶ main loop ─▶ GpuNode.status ─▶ operator
//!  NVML, a thread for each GPU ── Look (each second) ─▶ judge (pure) ─▶ Findings (pure) ┼─▶ events on pods
//!  /proc, same thread ─┤                                                     ├─▶ metrics
//!  API server ─ Names ─┘                                                     └─▶ MPS host: terminate, where the policy says Evict
//! ```
//!
//! Nothing is asked while nobody can use a shared device. A GPU that does not answer says nothing
//! of its tenants: none of them is accused and none is ended, and those of other GPUs are watched
//! as before.
pub mod findings;
pub mod judge;
pub mod names;
pub mod process;
pub mod snapshot;
