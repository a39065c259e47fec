//! Serves HTTP for the agent and the operator. The modules serve requests with bounded resources,
//! listen on addresses of IPv4 and IPv6, and raise the limit of open files.
//!
//! Without a network policy, any pod in the cluster can connect to these ports. [`http`] limits the
//! number and the idle time of connections, so silent or slow peers cannot stop a program.
//! `cleave-serve` must not depend on Kubernetes or GPUs.
pub mod descriptors;
pub mod http;
pub mod tcp;
