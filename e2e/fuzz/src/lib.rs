//! Hostile input for everything that Cleave reads of others: bytes of clients and daemons, files,
//! messages, objects.
//!
//! A [`Target`] is a function of bytes that must not panic, hang or take memory without bound, and
//! asserts what must hold of what it reads: that it is written as it was read, that a plan passes
//! `check`, that an error can be shown to a person. Samples, from the types' own encoders and from
//! `corpus/<target>/`, are changed at random ([`mutate`]), and what a target reads becomes a sample
//! itself ([`engine`]).
//!
//! `cargo test` runs each target for a fixed number of inputs from a fixed seed, after its corpus;
//! `make fuzz` and the program of this crate run them for as long as they are told. An input that
//! fails is written down, and belongs into the corpus with the fix.
//!
//! The engine is ours, some 300 lines on `fastrand` and `serde_json`, which the workspace has
//! anyway: coverage feedback (libFuzzer, `fuzzcheck`) needs a nightly compiler; `bolero` without it
//! is random bytes from some forty further crates, and knows no JSON; `mutatis` changes Rust
//! values, so that no malformed text would ever be read, and asks for a newer compiler than the
//! workspace.
pub mod engine;
pub mod guard;
pub mod mutate;
pub mod targets;

pub use targets::{all, named};

use crate::mutate::Shape;

/// Whether a target could read its input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// As what it is for.
    Read,
    /// It is something else, and was told so.
    Refused,
}

/// Something that reads bytes of others.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Its name, which is that of its folder in the corpus.
    pub name: &'static str,
    /// What it reads, and of whom.
    pub what: &'static str,
    /// What its input is made of.
    pub shape: Shape,
    /// Words of its format.
    pub words: &'static [&'static str],
    /// Samples that it reads.
    pub samples: fn() -> Vec<Vec<u8>>,
    /// How many inputs `cargo test` runs: what takes about a second without optimization.
    pub inputs: u32,
    /// Reads an input; panics where something does not hold.
    pub run: fn(&[u8]) -> Seen,
}

/// Asserts that an error is one that can be shown: it says something, in one piece that fits into a
/// status.
///
/// # Panics
/// It is empty, or has more than 2 KiB.
pub fn assert_tells(error: &str) {
    assert!(!error.trim().is_empty(), "an error says nothing");
    assert!(error.len() <= 2048, "an error has {} bytes: {}…", error.len(), error.chars().take(80).collect::<String>());
}
