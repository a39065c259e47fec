//! A stand-in libnvidia-ml.so.1 over the simulated machine.
