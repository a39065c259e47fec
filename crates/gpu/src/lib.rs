//! Accesses GPU hardware behind narrow traits: NVML (the only unsafe code), and the control
//! protocol, supervision and doors of MPS.
pub mod mps;
pub mod nvml;
