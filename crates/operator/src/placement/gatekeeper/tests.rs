//! Tests the gatekeeper's decisions in simulated clusters.
mod bad_input;
mod constraints;
mod growth;
mod histories;
mod lag;
mod mps_hosts;
mod other_nodes;
mod preemption;
mod release;
mod replicas;
mod reservations;
mod scale;
mod scheduler_sum;
mod stranded;
mod waiting;
mod whole_gpus;
mod world;
