//! What is known of GPUs, and what they are divided into. Pure.
pub mod hardware;
pub mod health;
pub mod layout;
pub mod mig;
pub mod xid;
