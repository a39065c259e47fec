//! Tests the gatekeeper's decisions in simulated clusters.
mod constraints;
mod growth;
mod lag;
mod mps_hosts;
mod preemption;
mod release;
mod reservations;
mod stranded;
mod waiting;
mod world;
