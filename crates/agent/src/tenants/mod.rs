//! The tenant watch reports containers that use more memory of a shared GPU than their shares
//! allow, or that use the GPU outside MPS or without shares. The watch reports a violation within
//! two seconds.
//!
//! ```text
//!  main loop ─ TenantSnapshot ─┐
//!  NVML and /proc, ────────────┼─▶ find_violations ─▶ Findings ─┬─▶ main loop ─▶ GpuNode.status
//!    one thread per GPU:       │       (pure)          (pure)   ├─▶ Events on pods
//!    ProcessSample each second │                                ├─▶ metrics
//!  API server ─ PodNames ──────┘                                └─▶ MPS host: terminate clients
//!                                                                   if the policy is Evict
//! ```
//!
//! The operator reads `GpuNode.status` and evicts pods.
//!
//! The watch queries nothing while no process can use a shared device. While NVML does not answer
//! for a GPU, the watch reports no new violations of the GPU's tenants, and terminates none of
//! their clients. The watch of other GPUs continues.
pub mod findings;
pub mod names;
pub mod process;
pub mod snapshot;
pub mod violations;
