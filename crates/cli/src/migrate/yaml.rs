//! Parses YAML and JSON. Pure.
use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

/// Parses the documents of a stream. Rejects duplicate keys.
///
/// # Errors
/// Returns an error if the text is not valid YAML.
pub(super) fn parse_all(text: &str) -> Result<Vec<Value>> {
    // Without this option, YAML 1.1 rules parse a name such as `n` as a boolean.
    let options = serde_saphyr::options! { strict_booleans: true };
    serde_saphyr::from_multiple_with_options(text, options).context("not valid YAML")
}

/// Parses one document. Returns null for an empty text.
///
/// # Errors
/// Returns an error if the text is not valid YAML, or contains several documents.
pub(super) fn parse_one(text: &str) -> Result<Value> {
    let mut documents = parse_all(text)?;
    ensure!(documents.len() <= 1, "more than one YAML document");
    Ok(documents.pop().unwrap_or_default())
}
