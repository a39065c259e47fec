//! Tests on-demand partitioning: the operator's decisions in a cluster whose nodes apply their
//! specs or fail.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test, its helpers included")]
mod exclusions;
mod partitions;
mod progress;
mod world;
