//! Pure planning: what GPUs are cut into, for whom, and why.
//!
//! Nothing here does I/O, reads a clock, draws a random number or is async, and the manifest keeps it so. Everything is a
//! function of its arguments, and maps are ordered, so that the same input gives the same output, byte for byte.
pub mod mps;
pub mod placement;
pub mod units;
