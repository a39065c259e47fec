//! A simulated `libnvidia-ml.so.1`: NVML's C ABI for the simulated machine, loaded like the real
//! library.
//!
//! The build produces `libnvidia_ml.so`, which is installed as `libnvidia-ml.so.1` (its soname).
//! The library uses the machine in `$SIMGPU_STATE`, or in `/var/lib/simgpu`. Without a machine,
//! `nvmlInit` reports that the driver is not loaded.
//!
//! Return codes, two-call conventions and the calls that MIG devices support follow a real H200
//! with driver 580, measured with MIG off. All other behaviour follows NVIDIA's documentation. The
//! library also exports functions that are not simulated. They return `NVML_ERROR_NOT_SUPPORTED`.
//! Errors and hangs that `simgpu fail` and `simgpu hang` inject take precedence.
//!
//! The number of SMs comes from the same calls as with a real library. For a MIG device,
//! `nvmlDeviceGetAttributes` returns it. For a whole GPU, divide `nvmlDeviceGetNumGpuCores` by the
//! cores of an SM. Alternatively, if the largest GPU instance profile has all SMs (Hopper), use the
//! number of that profile.

// This crate is a C ABI with raw pointers and unmangled symbols. Only `abi::raw` dereferences
// pointers.
#![allow(unsafe_code)]
// NVML's C ABI determines the exported names.
#![allow(non_snake_case)]

mod abi;
mod device;
mod events;
mod library;
mod mig;
mod unsupported;
