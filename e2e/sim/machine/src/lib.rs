//! The simulated machine: GPUs described by a file, state shared between processes.
//!
//! One directory (`/var/lib/simgpu`, or `$SIMGPU_STATE`) is one machine. The stand-in NVML reads
//! it, the stand-in MPS and CUDA programs register in it, `simgpu` changes it. It may be mounted
//! into containers at the same path, writable by any user: nothing in it is a secret, and a process
//! of any user may own a context on a GPU.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use sim_machine::{ContextKind, Machine};
//!
//! let machine = Machine::open_default()?;
//! let state = machine.snapshot()?; // an `Arc<State>`, parsed again only where something changed
//! for gpu in &state.gpus {
//!     println!("{} {} {}", gpu.index, gpu.uuid, state.model(gpu)?.name);
//! }
//! // A plain CUDA context of this process. Compute mode, MIG mode, a lost GPU and a full memory are honoured.
//! let context = machine.open_context(&state.gpus[0].uuid, ContextKind::Compute, 500 << 20)?;
//! context.allocate(1 << 30)?;
//! # Ok(())
//! # }
//! ```
//!
//! What the MPS stand-in needs:
//! - its server: `open_context(uuid, ContextKind::MpsServer, bytes)`: takes an `EXCLUSIVE_PROCESS`
//!   GPU for itself;
//! - its clients: [`Machine::register_client`] with the PID that `SCM_CREDENTIALS` attests, as the
//!   server's own PID namespace sees it. The context returned accounts for the client's memory;
//!   drop it when the client leaves.
//! - [`mps_sms`] for the SMs of a thread percentage, [`State::device`] for what a UUID names (a GPU
//!   or a MIG device), its SMs and memory, [`State::visible_devices`] for `CUDA_VISIBLE_DEVICES`;
//! - [`Machine::injected`] to honour errors and hangs injected with `simgpu fail` and `simgpu hang`
//!   under names of its own.
//!
//! A process is alive as long as it holds its lease: a lock on a file of its own under `leases/`,
//! which the kernel lets go however the process ends, in whatever PID namespace it is. Processes
//! that are gone count nowhere.

mod context;
mod description;
mod error;
mod mig;
mod model;
mod process;
mod state;
mod store;

pub use context::{Context, ContextKind, MemoryInfo};
pub use description::{Description, GpuDescription};
pub use error::{ContextError, Error};
pub use mig::{MigError, gpu_instance_id};
pub use model::{ComputeProfile, GpuProfile, Model, Placement, builtin_models, find_model};
pub use process::{PidRef, PidResolver, Process, ProcessKind};
pub use state::{
    ComputeInstance, ComputeMode, DeviceRef, Driver, Effect, Event, EventKind, Fault, Gpu, GpuInstance, Pci, State,
};
pub use store::{DEFAULT_DIR, Machine, STATE_ENV};

/// SMs that an MPS client sees for a thread percentage of a device with `total` SMs: rounded down
/// to an even count, never below 8 (nor above `total`). 100 % and more is the whole device.
#[must_use]
pub fn mps_sms(total: u32, percent: f64) -> u32 {
    if percent >= 100.0 || !percent.is_finite() {
        return total;
    }
    // The product of two small positive numbers: the cast cannot lose more than the fraction that
    // is meant to go.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let exact = (f64::from(total) * percent.max(0.0) / 100.0) as u32;
    (exact & !1).max(8).min(total)
}

#[cfg(test)]
mod tests {
    #[test]
    fn sms_of_a_percentage_are_those_measured_on_an_h200() {
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
            assert_eq!(super::mps_sms(132, f64::from(percent)), sms, "{percent} %");
        }
    }

    #[test]
    fn a_small_device_never_gives_more_than_it_has() {
        assert_eq!(super::mps_sms(6, 10.0), 6);
        assert_eq!(super::mps_sms(14, 250.0), 14);
    }
}
