//! Hardware behind narrow traits: NVML (the only unsafe code) and the MPS control protocol,
//! supervision and door.
pub mod mps;
pub mod nvml;
