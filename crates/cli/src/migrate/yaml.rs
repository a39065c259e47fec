//! Reads YAML, and with it JSON. Pure.
use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

/// Parses the documents of a stream. Duplicate keys are errors.
///
/// # Errors
/// The text is not valid YAML.
pub(super) fn parse_all(text: &str) -> Result<Vec<Value>> {
    // In YAML 1.1 the name `n` is a boolean.
    let options = serde_saphyr::options! { strict_booleans: true };
    serde_saphyr::from_multiple_with_options(text, options).context("not valid YAML")
}

/// Parses one document. An empty text is an empty document.
///
/// # Errors
/// The text is not valid YAML, or a stream of documents.
pub(super) fn parse_one(text: &str) -> Result<Value> {
    let mut documents = parse_all(text)?;
    ensure!(documents.len() <= 1, "more than one YAML document");
    Ok(documents.pop().unwrap_or_default())
}
