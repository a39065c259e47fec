//! Simulates `nvidia-cuda-mps-control` and the MPS server on the simulated machine.
//!
//! Handshake, commands, limits, users and faults are as measured with NVIDIA's programs, on one
//! H200 with driver 580 and CUDA 13.0 (protocol v2). Behaviour that was not measured follows
//! NVIDIA's documentation. Comments mark assumptions that neither source covers.
//!
//! | module | content |
//! |---|---|
//! | [`seqpacket`], [`handshake`] | the sockets, and both sides of the protocol on `control` |
//! | [`command`], [`limits`], [`breakage`] | pure: commands, limits, the breakage rule |
//! | [`daemon`], [`server`], [`tool`] | the two programs |
//! | [`client`] | the CUDA library's side of MPS |
//! | [`faults`] | faults that tests inject |

pub mod breakage;
pub mod client;
pub mod command;
pub mod daemon;
pub mod faults;
pub mod handshake;
pub mod limits;
pub mod log;
pub mod seqpacket;
pub mod server;
pub mod tool;
pub mod wire;
