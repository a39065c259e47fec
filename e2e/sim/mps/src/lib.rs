//! Stand-in nvidia-cuda-mps-control and its server over the simulated machine.
