//! A stand-in CUDA program over the simulated MPS.
fn main() {}
