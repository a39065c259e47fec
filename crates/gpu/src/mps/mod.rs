//! Runs the MPS daemons and doors of a node, and implements their protocols.
//!
//! ```text
//! desired.json ─▶ supervisor (the MPS host)
//! status.json  ◀──┘   │  ▲
//! host.sock           ▼  │ channel
//!                  device_process, one per device
//!                     └▶ reconciler ─▶ daemon ─────────▶ nvidia-cuda-mps-control -f
//!                           │            ▲ control lock    │
//!                           └──▶ door, one per allocation  └▶ nvidia-cuda-mps-server
//!                                  ▲ handshake, then relay ────▲
//!                                  │
//!                                a container's client
//! ```
//!
//! | module | purpose |
//! |---|---|
//! | [`wire`] | the contract with the agent: files and requests |
//! | [`protocol`], [`log`], [`drivers`], `diff`, `text` | pure: MPS packets, log lines, driver branches, changes of the desired state |
//! | `seqpacket`, `process`, `procfs`, `files`, `selinux` | the operating system |
//! | `control` | one exchange with a daemon |
//! | `context`, `error`, `compute_mode`, `args` | state, errors and options for all tasks |
//! | `daemon` | supervises the daemon of one device: lifecycle, probes, faults, clients |
//! | `door` | admits an allocation's clients under its limits |
//! | `reconciler`, `device_process` | applies the desired state of one device, main loop of its process |
//! | `channel` | messages between the MPS host and the process of a device |
//! | `supervisor`, `socket`, [`host`] | processes of all devices, requests and files of the agent, main loop |
//! | [`doctor`] | checks whether a driver behaves as Cleave expects |
//!
//! All tasks of a process run on one thread.
mod args;
mod channel;
mod compute_mode;
mod context;
mod control;
mod daemon;
mod device_process;
mod diff;
pub mod doctor;
mod door;
pub mod drivers;
mod error;
mod files;
pub mod host;
pub mod log;
mod process;
mod procfs;
pub mod protocol;
mod reconciler;
mod selinux;
mod seqpacket;
mod socket;
mod supervisor;
mod text;
pub mod wire;
