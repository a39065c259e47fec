//! The simulated machine: GPUs described by a file, state shared between processes.
