//! Reads text files, and names the file in each error.
use std::path::Path;

use anyhow::{Context as _, Result};

/// Reads a UTF-8 text file. Each error names the path.
pub(crate) fn read_text_file(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("failed to read {}", path.display()))
}
