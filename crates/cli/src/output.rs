//! Prints results, and reads input files.
use std::io::{self, Read as _, Write as _};
use std::path::Path;

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

/// Formats a value as YAML that ends with a newline.
pub(crate) fn to_yaml(value: &impl Serialize) -> Result<String> {
    Ok(serde_saphyr::to_string(value).context("failed to write YAML")?.trim_end().to_owned() + "\n")
}

/// Reads a file, or standard input if the path is `-`.
pub(crate) fn read_input(path: &Path) -> io::Result<String> {
    if path == Path::new("-") {
        let mut text = String::new();
        return io::stdin().read_to_string(&mut text).map(|_| text);
    }
    std::fs::read_to_string(path)
}
