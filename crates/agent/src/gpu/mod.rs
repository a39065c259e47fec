//! Models GPUs: their state, their health and their partitions. Pure.
pub mod hardware;
pub mod health;
pub mod layout;
pub mod mig;
pub mod xid;
