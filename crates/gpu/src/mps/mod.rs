//! MPS: what the agent and the MPS host tell each other, the control protocol, the supervisor and the door.
//!
//! ```text
//! desired.json ─▶ host ─▶ daemon (one for each device) ──▶ nvidia-cuda-mps-control -f ──▶ nvidia-cuda-mps-server
//! status.json  ◀──┘  └──▶ door (one for each allocation)     ▲ control: commands, a client's handshake   ▲
//! host.sock                ▲ control ◀── a container's client └── under the device's gate               │
//!                                          └─────────── from then on by itself ────────────────────────┘
//! ```
//! [`wire`] is the contract with the agent. `protocol` (bytes and text) and `decide` (what to do next) do no I/O; `seqpacket`, `control` and
//! `process` are the operating system; `daemon`, `fault`, `door` and `host` are tasks on one thread.
mod compute_mode;
mod control;
mod daemon;
mod decide;
mod door;
mod fault;
pub mod host;
mod process;
mod protocol;
mod seqpacket;
pub mod wire;
