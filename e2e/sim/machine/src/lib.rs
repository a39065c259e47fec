//! Simulates a machine with GPUs. A file describes the GPUs, and processes share the state of the
//! GPUs.
//!
//! A directory (`/var/lib/simgpu`, or `$SIMGPU_STATE`) contains the state of one machine. The
//! simulated NVML reads the directory, the simulated MPS and CUDA programs register in it, and
//! `simgpu` changes it. Containers may mount the directory at the same path. Every user may write
//! to it, because a process of any user may own a context on a GPU. It contains no secrets.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use sim_machine::{ContextKind, Machine};
//!
//! let machine = Machine::open_default()?;
//! // An `Arc<State>`. The state is parsed again only after a change.
//! let state = machine.snapshot()?;
//! for gpu in &state.gpus {
//!     println!("{} {} {}", gpu.index, gpu.uuid, state.model(gpu)?.name);
//! }
//! // A CUDA context of this process. The call respects compute mode, MIG, lost GPUs and memory.
//! let context = machine.open_context(&state.gpus[0].uuid, ContextKind::Compute, 500 << 20)?;
//! context.allocate(1 << 30)?;
//! # Ok(())
//! # }
//! ```
//!
//! The simulated MPS uses:
//! - [`Machine::open_context`] with [`ContextKind::MpsServer`] for its server, which then occupies
//!   an `EXCLUSIVE_PROCESS` GPU;
//! - [`Machine::register_client`] for its clients, with the PID from `SCM_CREDENTIALS`, which is a
//!   PID in the server's PID namespace. The returned context accounts for the client's memory. Drop
//!   it when the client disconnects;
//! - [`sms_of_mps_percentage`] for the SMs of a thread percentage, [`State::device`] for the device
//!   that a UUID names, [`State::visible_devices`] for `CUDA_VISIBLE_DEVICES`;
//! - [`Machine::apply_faults`] for the errors and hangs that `simgpu fail` and `simgpu hang`
//!   inject.
//!
//! A process counts as alive while its lease file under `leases/` is locked. The kernel releases
//! the lock when the process exits for any reason, in any PID namespace. Queries about processes
//! ignore processes that have exited.

mod context;
mod description;
mod error;
mod mig;
mod model;
mod process;
mod session;
mod state;
mod store;
mod topology;

pub use context::{Context, ContextKind, MemoryInfo};
pub use description::{GpuDescription, MachineDescription};
pub use error::{ContextError, Error};
pub use mig::{MigError, gpu_instance_id};
pub use model::{ComputeProfile, GpuProfile, Model, Placement, builtin_models, find_model};
pub use process::{PidRef, PidResolver, Process, ProcessKind};
pub use session::SessionLease;
pub use state::{
    ComputeInstance, ComputeMode, DeviceRef, Driver, Event, EventKind, Fault, FaultEffect, Gpu, GpuInstance, NvLinkEnd,
    PciAddress, State,
};
pub use store::{BegunCall, DEFAULT_STATE_DIRECTORY, Machine, STATE_DIRECTORY_ENV};
pub use topology::{CommonAncestor, MachineTopology, cube_mesh_nvlinks};

/// Returns the number of SMs that an MPS client sees for a thread percentage of a device with
/// `total` SMs. The result is rounded down to an even number, and is at least 8 and at most
/// `total`. From 100 % on, the result is `total`.
#[must_use]
pub fn sms_of_mps_percentage(total: u32, percent: f64) -> u32 {
    if percent >= 100.0 || !percent.is_finite() {
        return total;
    }
    // The product is small and positive, so the cast only drops the fraction.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let exact = (f64::from(total) * percent.max(0.0) / 100.0) as u32;
    (exact & !1).max(8).min(total)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_sms_of_a_percentage_are_those_of_an_h200() {
        let measured = [
            (1, 8),
            (2, 8),
            (5, 8),
            (10, 12),
            (12, 14),
            (14, 18),
            (20, 26),
            (25, 32),
            (33, 42),
            (50, 66),
            (66, 86),
            (75, 98),
            (90, 118),
            (100, 132),
        ];
        for (percent, sms) in measured {
            assert_eq!(super::sms_of_mps_percentage(132, f64::from(percent)), sms, "{percent} %");
        }
    }

    #[test]
    fn a_small_device_never_exceeds_its_sms() {
        assert_eq!(super::sms_of_mps_percentage(6, 10.0), 6);
        assert_eq!(super::sms_of_mps_percentage(14, 250.0), 14);
    }
}
