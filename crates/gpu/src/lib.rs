//! Access to GPU hardware: NVML, and the control protocol, daemons and doors of MPS. Only the NVML
//! module contains unsafe code.
pub mod mps;
pub mod nvml;
