//! Stand-in `nvidia-cuda-mps-control` and its server over the simulated machine.
//!
//! They behave as NVIDIA's were measured to on one H200 under driver 580 with CUDA 13.0 (protocol
//! v2): handshake, commands, limits, users, faults. What was not measured follows NVIDIA's
//! documentation, and where that says nothing either, a comment says so.
//!
//! | module | what |
//! |---|---|
//! | [`seqpacket`], [`handshake`] | the sockets and what passes over `control`; both sides |
//! | [`command`], [`limits`], [`breakage`] | commands, limits and the odds of breakage, pure |
//! | [`daemon`], [`server`], [`tool`] | the two programs |
//! | [`client`] | the part of the CUDA library that talks to MPS |
//! | [`faults`] | what a test can inject |

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
