//! The result of an import as YAML with comments, and the report.
use std::fmt::Write as _;

use anyhow::{Context as _, Result};

use super::model::{Import, Refusal};

/// Maximum number of characters in a line of a comment.
const MAX_COMMENT_LINE_CHARS: usize = 100;

/// Renders the quotas as YAML. A comment above each quota names the imported object, and lists the
/// differences.
///
/// # Errors
/// Returns an error if the YAML writer fails.
pub fn render_yaml(import: &Import) -> Result<String> {
    let mut text = String::new();
    for imported in &import.quotas {
        if !text.is_empty() {
            text.push_str("---\n");
        }
        comment(&mut text, "", &format!("From {}.", imported.origin));
        imported.notes.iter().for_each(|note| comment(&mut text, "- ", note));
        text.push_str(&serde_saphyr::to_string(&imported.quota).context("failed to write YAML")?);
        if !text.ends_with('\n') {
            text.push('\n');
        }
    }
    Ok(text)
}

/// Renders the report: how many objects were imported, and which objects were not.
pub fn render_report(import: &Import) -> String {
    let mut text = String::new();
    let counts = [import.quotas.len(), import.skipped.len(), import.refused.len()];
    let [quotas, skipped, refused] = counts;
    let s = if quotas == 1 { "" } else { "s" };
    let _ =
        writeln!(text, "{quotas} GpuQuota{s} printed. Objects skipped: {skipped}. Objects not imported: {refused}.");
    let lines = |text: &mut String, heading: &str, all: &[Refusal]| {
        for Refusal { origin, reason } in all {
            let _ = writeln!(text, "{heading}: {}: {}.", one_line(origin), one_line(reason));
        }
    };
    lines(&mut text, "Not imported", &import.refused);
    lines(&mut text, "Skipped", &import.skipped);
    for note in &import.notes {
        let _ = writeln!(text, "Note: {}", one_line(note));
    }
    text
}

/// Adds a wrapped comment. Replaces control characters, so that text of the input cannot end the
/// comment.
fn comment(text: &mut String, bullet: &str, sentence: &str) {
    let sentence = one_line(sentence);
    let mut line = format!("# {bullet}");
    let indent = format!("# {}", " ".repeat(bullet.len()));
    let mut is_empty = true;
    for word in sentence.split_whitespace() {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > MAX_COMMENT_LINE_CHARS {
            let _ = writeln!(text, "{line}");
            line.clone_from(&indent);
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(word);
        is_empty = false;
    }
    let _ = writeln!(text, "{line}");
}

fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}
