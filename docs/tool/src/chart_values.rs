//! Generates the reference page of the chart's values from the comments of `values.yaml`.
//!
//! A key without a value on its own line is a section if the schema lists its properties. The page
//! describes each field of a section. Every other key is one value.
use std::fmt::Write as _;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::wrapping::{wrap, wrap_list_item};

/// Returns the reference page of the chart's values.
pub(crate) fn render_page(values: &str, schema: &str) -> Result<String> {
    let schema: Value = serde_json::from_str(schema).context("values.schema.json is not JSON")?;
    let mut out = String::from(
        "# Chart values\n\n<!-- Generated from charts/cleave/values.yaml by `make docs`. Do not edit. -->\n\n\
         Values of the Helm chart `charts/cleave`, with their defaults. The chart refuses other values.\n",
    );
    let keys = parse_keys(values, &schema)?;
    out.push_str("\n## General\n\n");
    for key in keys.iter().filter(|key| key.path.len() == 1 && !key.is_section) {
        write_entry(&mut out, key);
    }
    for key in &keys {
        match (key.is_section, key.path.len()) {
            (true, 1) => {
                let _ = write!(out, "\n## {}\n\n", key.path[0]);
                write_comment(&mut out, &key.comment);
            }
            (true, _) if !key.comment.is_empty() => write_entry(&mut out, key),
            (false, 2..) => write_entry(&mut out, key),
            _ => {}
        }
    }
    Ok(out)
}

/// A key of `values.yaml`.
#[derive(Debug)]
struct ChartValue {
    path: Vec<String>,
    comment: Vec<String>,
    is_section: bool,
    /// The lines of the default value: one line, or the lines of a YAML block. Empty for a section.
    default: Vec<String>,
}

/// Returns all keys of `values.yaml`, in order. Does not split a value into the keys of its fields.
fn parse_keys(values: &str, schema: &Value) -> Result<Vec<ChartValue>> {
    let mut keys: Vec<ChartValue> = Vec::new();
    let mut comment: Vec<String> = Vec::new();
    let mut path: Vec<(usize, String)> = Vec::new();
    let mut leaf: Option<usize> = None;
    // Skip a comment on the first line, which describes the file.
    for (number, line) in values.lines().enumerate().skip_while(|(number, line)| *number == 0 && line.starts_with('#'))
    {
        let content = line.trim_start();
        let indent = line.len() - content.len();
        if content.is_empty() {
            comment.clear();
            continue;
        }
        if leaf.is_some_and(|leaf| indent > leaf) {
            if let Some(key) = keys.last_mut().filter(|_| !content.starts_with('#')) {
                key.default.push(line.to_owned());
            }
            continue;
        }
        leaf = None;
        if let Some(text) = content.strip_prefix('#') {
            comment.push(text.strip_prefix(' ').unwrap_or(text).to_owned());
            continue;
        }
        let Some((name, value)) = content.split_once(':') else { bail!("line {}: {line:?} is not a key", number + 1) };
        path.retain(|(outer, _)| *outer < indent);
        path.push((indent, name.to_owned()));
        let path: Vec<String> = path.iter().map(|(_, name)| name.clone()).collect();
        let pointer = path.iter().map(|name| format!("/properties/{name}")).collect::<String>();
        let is_section = schema.pointer(&pointer).is_some_and(|schema| schema.get("properties").is_some());
        let is_section = is_section && value.trim().is_empty();
        let default = if value.trim().is_empty() { Vec::new() } else { vec![value.trim().to_owned()] };
        if !is_section {
            leaf = Some(indent);
        }
        keys.push(ChartValue { path, comment: std::mem::take(&mut comment), is_section, default });
    }
    Ok(keys)
}

/// Writes the list item of one value.
fn write_entry(out: &mut String, key: &ChartValue) {
    let mut head = format!("`{}`", key.path.join("."));
    let block = match key.default.as_slice() {
        [line] if !line.starts_with(' ') => {
            // A YAML anchor is not part of the value.
            let _ = write!(head, " (`{}`)", line.split_once(" &").map_or(line.as_str(), |(value, _)| value));
            &[]
        }
        lines => lines,
    };
    let mut parts = parse_comment(&key.comment).into_iter().peekable();
    if let Some(CommentPart::Text(text)) = parts.peek() {
        let _ = write!(head, ": {text}");
        parts.next();
    }
    out.push_str(&wrap_list_item(&head));
    for part in parts {
        match part {
            CommentPart::Choice(choice) => out.push_str(&wrap(&choice, "  - ", "    ")),
            CommentPart::Text(text) => {
                out.push('\n');
                out.push_str(&wrap(&text, "  ", "  "));
            }
        }
    }
    if !block.is_empty() {
        let indent = block.iter().map(|line| line.len() - line.trim_start().len()).min().unwrap_or(0);
        out.push_str("\n  ```yaml\n");
        for line in block {
            let _ = writeln!(out, "  {}", line.get(indent..).unwrap_or(line));
        }
        out.push_str("  ```\n\n");
    }
}

/// Writes a section's comment as paragraphs and lists.
fn write_comment(out: &mut String, lines: &[String]) {
    let mut in_list = false;
    for part in parse_comment(lines) {
        match part {
            CommentPart::Choice(choice) => {
                out.push_str(&wrap_list_item(&choice));
                in_list = true;
            }
            CommentPart::Text(text) => {
                if std::mem::take(&mut in_list) {
                    out.push('\n');
                }
                out.push_str(&wrap(&text, "", ""));
                out.push('\n');
            }
        }
    }
    if in_list {
        out.push('\n');
    }
}

/// A part of a comment.
enum CommentPart {
    /// A paragraph.
    Text(String),
    /// An indented line that explains one choice, `word  meaning`, with its continuation lines.
    Choice(String),
}

/// Returns the paragraphs and choices of a comment, in order.
fn parse_comment(lines: &[String]) -> Vec<CommentPart> {
    let mut parts = Vec::new();
    for line in lines {
        let words = line.split_whitespace().collect::<Vec<_>>().join(" ");
        if line.starts_with("    ")
            && let Some(CommentPart::Choice(text)) = parts.last_mut()
        {
            // This line continues the previous choice.
            text.push(' ');
            text.push_str(&words);
        } else if line.starts_with("  ") {
            parts.push(CommentPart::Choice(match line.trim().split_once("  ") {
                Some((word, meaning)) => format!("`{word}`: {}", meaning.trim()),
                None => words,
            }));
        } else if let Some(CommentPart::Text(text)) = parts.last_mut() {
            text.push(' ');
            text.push_str(&words);
        } else {
            parts.push(CommentPart::Text(words));
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALUES_SCHEMA: &str = r#"{"properties": {"name": {"type": "string"}, "agent": {"properties":
        {"mode": {}, "selector": {"type": "object"}}}}}"#;

    #[test]
    fn values_sections_and_choices_are_listed() {
        let values = "# A file.\n# A name.\nname: \"\"\n\n# The agent.\nagent:\n  # What it does:\n  #   on   it runs\n  #        forever\n  # Or not.\n  mode: on\n  selector:\n    a: b\n";
        let page = render_page(values, VALUES_SCHEMA).unwrap_or_default();
        for part in [
            "## General\n\n- `name` (`\"\"`): A name.\n",
            "## agent\n\nThe agent.\n\n",
            "- `agent.mode` (`on`): What it does:\n  - `on`: it runs forever\n\n  Or not.\n",
            "- `agent.selector`\n\n  ```yaml\n  a: b\n  ```\n",
        ] {
            assert!(page.contains(part), "{part:?} is not in {page}");
        }
    }

    #[test]
    fn a_line_without_a_key_is_an_error() {
        assert!(render_page("- a\n", VALUES_SCHEMA).is_err());
    }
}
