//! Models GPUs: their state, their health, and how they are partitioned. Pure.
pub mod hardware;
pub mod health;
pub mod layout;
pub mod mig;
pub mod xid;
