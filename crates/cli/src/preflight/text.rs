//! Renders a report as text, and its values as YAML.
use std::fmt::Write as _;

use anyhow::{Context as _, Result};

use super::report::{Level, Report, format_count};

/// Maximum number of characters of a line.
const MAX_LINE_CHARS: usize = 100;

/// Renders a report.
///
/// # Errors
/// Returns an error if the values cannot be written as YAML.
pub(super) fn render(report: &Report) -> Result<String> {
    let mut text = String::new();
    let platforms = report.platforms.join(", ");
    for (heading, value) in [
        ("Kubernetes:", report.kubernetes.as_deref().unwrap_or_default()),
        ("Platform:", &platforms),
        ("Nodes:", &format!("{}, {} with GPUs", report.nodes, report.gpu_nodes)),
        ("Namespace:", &report.namespace),
    ] {
        let _ = writeln!(text, "{heading:<12}{}", if value.is_empty() { "unknown" } else { value });
    }
    for finding in &report.findings {
        let _ = writeln!(text, "\n{:<9}{:?}", level_name(finding.level), finding.reason);
        write_wrapped(&mut text, "  ", &finding.message);
        write_wrapped(&mut text, "  → ", &finding.action);
    }
    let _ = writeln!(
        text,
        "\n{}, {}, {}.",
        format_count(report.count(Level::Error), "error"),
        format_count(report.count(Level::Warning), "warning"),
        format_count(report.count(Level::Info), "fact")
    );
    text.push_str(&install_text(report)?);
    Ok(text)
}

const fn level_name(level: Level) -> &'static str {
    match level {
        Level::Error => "ERROR",
        Level::Warning => "WARNING",
        Level::Info => "INFO",
    }
}

/// Writes words in lines of at most [`MAX_LINE_CHARS`] characters. The first line starts with
/// `start`, and the other lines have the same indentation.
pub(crate) fn write_wrapped(text: &mut String, start: &str, words: &str) {
    let indent = start.chars().count();
    let mut column = 0;
    for word in words.split_whitespace() {
        let length = word.chars().count();
        if column == 0 {
            text.push_str(start);
            column = indent;
        } else if column + 1 + length > MAX_LINE_CHARS {
            let _ = write!(text, "\n{:indent$}", "");
            column = indent;
        } else {
            text.push(' ');
            column += 1;
        }
        text.push_str(word);
        column += length;
    }
    if column > 0 {
        text.push('\n');
    }
}

/// Renders the command that installs the chart, and the values.
fn install_text(report: &Report) -> Result<String> {
    let mut text =
        format!("\nInstall the chart with:\n  helm install cleave charts/cleave --namespace {}", report.namespace);
    for file in &report.values_files {
        let _ = write!(text, " \\\n    --values charts/cleave/{file}");
    }
    if report.values.is_empty() {
        text.push('\n');
        return Ok(text);
    }
    text.push_str(" \\\n    --values values.yaml\n\nvalues.yaml (`cleave preflight -o values` prints it):\n");
    for line in values_yaml(report)?.lines() {
        let _ = writeln!(text, "  {line}");
    }
    Ok(text)
}

/// Renders the values as a values file for Helm. Without values, the file contains only comments.
///
/// # Errors
/// Returns an error if the values cannot be written as YAML.
pub(super) fn values_yaml(report: &Report) -> Result<String> {
    let mut text = String::new();
    for file in &report.values_files {
        let _ = writeln!(text, "# Pass --values charts/cleave/{file} to Helm too.");
    }
    if report.values.is_empty() {
        text.push_str("# No further values are needed.\n");
        return Ok(text);
    }
    let yaml = serde_saphyr::to_string(&report.nested_values()).context("failed to write YAML")?;
    text.push_str(yaml.trim_end());
    text.push('\n');
    Ok(text)
}
