//! Tests how a changed policy reaches nodes: policies and nodes in, specs and statuses out, without
//! a cluster.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test, its helpers included")]
mod canaries;
mod waves;
mod world;
