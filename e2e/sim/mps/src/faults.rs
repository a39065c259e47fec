//! Faults that a test injects through the simulated machine (`simgpu fail`, `simgpu hang`), by
//! name:
//!
//! | name | fails (code) | hangs |
//! |---|---|---|
//! | `mps:start` | the daemon exits with the code before it listens | it never listens |
//! | `mps:handshake` | the daemon speaks another driver's handshake, and programs understand it | it accepts and says nothing |
//! | `mps:client` | a client is turned away after its handshake | it gets no socket to the server |
//! | `mps:command:<name>` | the command answers with the code as text | it does not answer |
//! | `mps:server` | a server exits with the code as it starts | it stays INITIALIZING |
//! | `mps:heal` | a server stays in FAULT after the last of its broken clients | it hangs then |
//!
//! All but `mps:server` and `mps:heal` are the daemon's. A fault for a GPU hits the daemon that
//! serves it.

use std::sync::OnceLock;

use sim_machine::Machine;

/// What is injected for one daemon or server.
#[derive(Debug)]
pub struct Faults {
    machine: OnceLock<Machine>,
    visible: Option<String>,
}

impl Faults {
    /// Those of the process that sees these devices.
    pub fn new(visible: Option<String>) -> Self {
        Self { machine: OnceLock::new(), visible }
    }

    /// Waits where a call is to hang; the code with which it is to fail.
    pub fn injected(&self, call: &str) -> Option<i32> {
        let machine = self.machine()?;
        let device = machine.snapshot().ok().and_then(|state| {
            state.visible_devices(self.visible.as_deref()).first().map(|device| device.uuid().to_owned())
        });
        // Without a machine there is nothing to inject from.
        machine.injected(call, device.as_deref()).ok().flatten()
    }

    fn machine(&self) -> Option<&Machine> {
        if self.machine.get().is_none() {
            // Lost to another thread: the same machine.
            let _ = self.machine.set(Machine::open_default().ok()?);
        }
        self.machine.get()
    }
}
