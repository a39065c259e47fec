//! Tests how a changed policy reaches nodes. The tests compute specs and statuses from policies and
//! nodes, without a cluster.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test, its helpers included")]
mod canaries;
mod waves;
mod world;
