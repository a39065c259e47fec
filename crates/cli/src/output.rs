//! Prints results.
use std::io::{self, Write as _};

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use serde::Serialize;

/// The format of a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// Human-readable text.
    Text,
    /// One JSON object.
    Json,
}

/// Writes to standard output. Does not fail if the reader, such as `head`, closes the pipe early.
pub(crate) fn print(text: &str) -> Result<()> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("failed to write to standard output"),
    }
}

/// Formats a value as indented JSON that ends with a newline.
pub(crate) fn to_json(value: &impl Serialize) -> Result<String> {
    Ok(serde_json::to_string_pretty(value).context("failed to write JSON")? + "\n")
}
