//! Reads files.
use std::path::Path;

use anyhow::{Context as _, Result};

/// Reads a text file.
pub(crate) fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("failed to read {}", path.display()))
}
