//! Fuzz tests for input from outside Cleave: bytes of clients and daemons, files, messages and
//! objects.
//!
//! A [`Target`] is a function that reads bytes. A target must not panic, hang or use unbounded
//! memory. A target also asserts properties of the values that it reads. For example, encoding and
//! decoding preserve a value, a plan passes `check`, and an error has a printable message.
//! [`mutate`] changes samples at random. The samples come from the encoders of the types and from
//! `corpus/<target>/`. A mutated input that the target can read may also become a sample
//! ([`engine`]).
//!
//! `cargo test` runs each target on its corpus and then on a fixed number of inputs from a fixed
//! seed. `make fuzz` and the program of this crate run targets for a given time. They write a
//! failing input to a file. Add the file to the corpus in the commit that fixes the failure.
//!
//! The engine is part of this crate. It has about 420 lines of code and depends only on `fastrand`
//! and `serde_json`, which other crates of the workspace also use. The alternatives have
//! disadvantages. Coverage feedback (libFuzzer, `fuzzcheck`) needs a nightly compiler. Without
//! coverage feedback, `bolero` generates only random bytes. `bolero` also needs about forty more
//! crates, and has no mutations for JSON. `mutatis` changes Rust values, so it generates no
//! malformed text. `mutatis` also needs a newer compiler than the workspace.
pub mod engine;
pub mod guard;
pub mod mutate;
pub mod targets;

pub use targets::{all_targets, target_named};

use crate::mutate::InputShape;

/// The result of reading an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadResult {
    /// The target accepted the input as valid.
    Read,
    /// The target refused the input with an error.
    Refused,
}

/// A function that reads input from outside Cleave, with samples and settings for the fuzz test.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Name of the target and of its directory in the corpus.
    pub name: &'static str,
    /// Human-readable description of the input and its sender.
    pub what: &'static str,
    /// Format of the input.
    pub shape: InputShape,
    /// Words of the input format that mutations insert.
    pub words: &'static [&'static str],
    /// Valid inputs.
    pub samples: fn() -> Vec<Vec<u8>>,
    /// Number of inputs that `cargo test` runs. An unoptimized build runs all of them in about a
    /// second.
    pub inputs: u32,
    /// Reads an input. Panics if an assertion fails.
    pub run: fn(&[u8]) -> ReadResult,
}

/// Asserts that an error message is suitable for a status.
///
/// # Panics
/// Panics if the message is empty or longer than 2 KiB.
pub fn assert_printable(error: &str) {
    assert!(!error.trim().is_empty(), "an error has no message");
    assert!(
        error.len() <= 2048,
        "an error message has {} bytes: {}…",
        error.len(),
        error.chars().take(80).collect::<String>()
    );
}
