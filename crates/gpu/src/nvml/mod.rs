//! Reads a node's GPUs and their state through NVML, and changes the few settings that Cleave
//! needs.
//!
//! | module | purpose |
//! |---|---|
//! | `model`, `error` | types that the calls return |
//! | `gpus` | [`Gpus`], the calls that the rest of Cleave makes, and [`GpuEvents`] |
//! | `find` | [`LibrarySearch`], where the library file may be |
//! | `links` | combines NVLinks and PCIe paths into the node's topology |
//! | `sys` | the calls that nvml-wrapper lacks; the only unsafe code of the product |
//! | `readings` | reads the sensors of one GPU |
//! | `xid` | reads XID events of one GPU |
//! | `session` | [`Nvml`] implements [`Gpus`] with the loaded library |
//! | `library` | [`Library`], one session that all threads of a process share |
//! | `worker`, `watch` | threads for calls that may hang: [`Worker`] and [`EventWatch`] |
//!
//! GPUs fail independently, and a call may hang in the driver until the node reboots. Therefore
//! each call concerns one GPU, except [`Gpus::driver_info`], [`Gpus::cuda_version`] and
//! [`Gpus::topology`]. A program that must not block runs the calls for each GPU on a separate
//! [`Worker`], and `topology` on another worker.
mod error;
mod find;
mod gpus;
mod library;
mod links;
mod model;
mod readings;
mod session;
mod sys;
mod watch;
mod worker;
mod xid;

use std::path::Path;

pub use error::NvmlError;
pub use find::LibrarySearch;
pub use gpus::{GpuEvents, Gpus};
pub use library::{ClosedLibrary, Library};
pub use model::{
    ComputeMode, DeviceProcesses, DriverInfo, Gpu, GpuEvent, GpuObservation, GpuReadings, GpuVitals, MigActivation,
    MigInstance, MigProfile, MigState, Process, RecoveryAction, ThrottleReason,
};
pub use session::Nvml;
pub use watch::EventWatch;
pub use worker::Worker;

/// Sets the compute mode of a GPU and returns the previous mode.
///
/// For a short-lived process: loads the library only for this call.
///
/// # Errors
/// Returns [`NvmlError`] if the library cannot be loaded, or NVML refuses the call.
pub fn set_compute_mode(library: Option<&Path>, uuid: &str, mode: ComputeMode) -> Result<ComputeMode, NvmlError> {
    let search = LibrarySearch { library: library.map(Path::to_owned), ..LibrarySearch::default() };
    Nvml::open(&search)?.set_compute_mode(uuid, mode)
}
