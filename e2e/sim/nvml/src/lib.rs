//! Simulates `libnvidia-ml.so.1`: provides NVML's C functions for the simulated machine. Programs
//! load it like the real library.
//!
//! The build produces `libnvidia_ml.so`, which is installed as `libnvidia-ml.so.1` (its soname).
//! The library uses the machine in `$SIMGPU_STATE`, or in `/var/lib/simgpu`. If the directory
//! contains no machine, `nvmlInit` reports that the driver is not loaded.
//!
//! Return codes and calls that return lists behave as measured on a real H200 with driver 580 and
//! MIG off. All other behaviour follows NVIDIA's documentation. The library also exports functions
//! that are not simulated, and these return `NVML_ERROR_NOT_SUPPORTED`. For calls that read the
//! machine's state, errors and hangs that `simgpu fail` and `simgpu hang` inject take precedence
//! over this state.
//!
//! As with the real library, programs can determine the number of SMs in several ways. For a MIG
//! device, `nvmlDeviceGetAttributes` returns the number. For a whole GPU, divide the result of
//! `nvmlDeviceGetNumGpuCores` by the number of cores per SM. If the largest GPU instance profile
//! has all SMs (Hopper), the number in that profile is also correct.

// This crate exports C functions, which have raw pointers and unmangled names. Only `abi::raw`
// dereferences pointers.
#![allow(unsafe_code)]
// The exported functions have NVML's names.
#![allow(non_snake_case)]

mod abi;
mod device;
mod events;
mod library;
mod mig;
mod unsupported;
