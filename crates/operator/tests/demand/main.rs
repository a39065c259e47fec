//! Sharing by demand: the operator's decisions over a cluster whose nodes apply their specs, or
//! fail to.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test, its helpers included")]
mod exclusions;
mod partitions;
mod progress;
mod world;
