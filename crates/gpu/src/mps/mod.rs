//! MPS: what the agent and the MPS host tell each other, the control protocol, the supervisor and the door.
//!
//! ```text
//! desired.json ─▶ host ─▶ daemon (one for each device) ──▶ nvidia-cuda-mps-control -f ──▶ nvidia-cuda-mps-server
//! status.json  ◀──┘  └──▶ door (one for each allocation)     ▲ control: commands, a client's handshake   ▲
//! host.sock                ▲ control ◀── a container's client └── under the device's gate               │
//!                                          └─────────── from then on by itself ────────────────────────┘
//! ```
//! [`wire`] is the contract with the agent. [`protocol`] (bytes and text) and `decide` (what to do next) do no I/O; `seqpacket`, `control` and
//! `process` are the operating system; `daemon`, `fault`, `door` and `host` are tasks on one thread.
mod compute_mode;
mod control;
mod daemon;
mod decide;
pub mod doctor;
mod door;
mod fault;
pub mod host;
mod process;
pub mod protocol;
mod seqpacket;
pub mod wire;

/// Longest part of what others wrote that is told on, in characters.
const TOLD: usize = 200;

/// The beginning of what others wrote, marked where it is not all.
fn beginning(text: &str) -> String {
    match text.char_indices().nth(TOLD) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}
