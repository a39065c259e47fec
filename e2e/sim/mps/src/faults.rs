//! Applies faults that tests inject through the simulated machine (`simgpu fail`, `simgpu hang`),
//! by name:
//!
//! | name | `fail` (code) | `hang` |
//! |---|---|---|
//! | `mps:start` | the daemon exits with the code before it listens | it never listens |
//! | `mps:handshake` | the daemon greets like another driver's daemon | it sends no greeting |
//! | `mps:reply` | the daemon replies to a client like another driver's daemon | it sends no reply |
//! | `mps:client` | the daemon refuses clients after the handshake | it sends clients no socket to the server |
//! | `mps:command:<name>` | the command answers with the code as text | it does not answer |
//! | `mps:close:<name>` | the daemon closes the connection and does not execute the command | it does not answer |
//! | `mps:server` | the server exits with the code at its start | it remains INITIALIZING |
//! | `mps:heal` | the server remains in FAULT after its last broken client has exited | it hangs at that time |
//!
//! The server applies `mps:server` and `mps:heal`, and the daemon applies all other faults. A fault
//! for a GPU applies to the daemon and the servers whose first visible device is this GPU or one of
//! its MIG devices.

use std::sync::OnceLock;

use sim_machine::Machine;

/// The injected faults of one daemon or server.
#[derive(Debug)]
pub struct InjectedFaults {
    machine: OnceLock<Machine>,
    visible: Option<String>,
}

impl InjectedFaults {
    /// Returns the faults of a process with this value of `CUDA_VISIBLE_DEVICES`.
    pub fn new(visible: Option<String>) -> Self {
        Self { machine: OnceLock::new(), visible }
    }

    /// Applies the faults for a call. Waits if the call must hang, and returns a code if the call
    /// must fail.
    pub fn apply_faults(&self, call: &str) -> Option<i32> {
        let machine = self.machine()?;
        let device = machine.snapshot().ok().and_then(|state| {
            state.visible_devices(self.visible.as_deref()).first().map(|device| device.uuid().to_owned())
        });
        // Ignore errors, because without a machine, no faults exist.
        machine.apply_faults(call, device.as_deref()).ok().flatten()
    }

    fn machine(&self) -> Option<&Machine> {
        if self.machine.get().is_none() {
            // Ignore errors, because another thread may have stored a handle of this machine first.
            let _ = self.machine.set(Machine::open_default().ok()?);
        }
        self.machine.get()
    }
}
