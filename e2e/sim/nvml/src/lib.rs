//! A stand-in `libnvidia-ml.so.1` over the simulated machine: the C ABI of NVML, loaded as the real
//! one is.
//!
//! The build makes `libnvidia_ml.so`, which is installed as `libnvidia-ml.so.1` (its soname). The
//! machine is that of `$SIMGPU_STATE`, or of `/var/lib/simgpu`; without one, `nvmlInit` says that
//! the driver is not loaded.
//!
//! Return codes, the two-call conventions and what a MIG device may be asked follow a real H200
//! with driver 580 where it could be asked (MIG off), and NVIDIA's documentation elsewhere. What is
//! not simulated is exported too and returns `NVML_ERROR_NOT_SUPPORTED`. Errors and hangs injected
//! with `simgpu fail` and `simgpu hang` come before everything else.
//!
//! SMs of a GPU, as with a real one: of a MIG device by `nvmlDeviceGetAttributes`; of a whole GPU
//! by `nvmlDeviceGetNumGpuCores` over the cores of an SM, or by the largest GPU instance profile
//! where it has all SMs (Hopper).

// This crate is a C ABI: raw pointers come in, and symbols go out unmangled. All dereferencing is
// in `abi::raw`.
#![allow(unsafe_code)]
// The names of C.
#![allow(non_snake_case)]

mod abi;
mod device;
mod events;
mod library;
mod mig;
mod unsupported;
