//! Renders the result as text and as YAML. Pure.
use std::fmt::Write as _;

use anyhow::{Context as _, Result};

use super::migration::Migration;
use super::preview::PodPreview;
use super::report::{Outcome, ReportLine};
use crate::preflight::text::write_wrapped;

/// Width of the outcome column, in characters.
const OUTCOME_WIDTH: usize = 12;

/// Renders the report, the policies and values, the renamed resources, and the preview.
pub(super) fn render_report(migration: &Migration) -> String {
    let mut text = String::new();
    let mut source = None;
    for line in &migration.report {
        if source != Some(&line.source) {
            let gap = if source.is_some() { "\n" } else { "" };
            let _ = writeln!(text, "{gap}{}", line.source);
            source = Some(&line.source);
        }
        write_report_line(&mut text, line);
    }
    let counts = Outcome::ALL.map(|outcome| {
        let count = migration.report.iter().filter(|line| line.outcome == outcome).count();
        format!("{count} {}", outcome.name())
    });
    let _ = writeln!(text, "\n{}.", counts.join(", "));
    write_policies(&mut text, migration);
    write_renames(&mut text, migration);
    if let Some(pods) = &migration.pods {
        write_pods(&mut text, pods);
    }
    text
}

fn write_report_line(text: &mut String, line: &ReportLine) {
    let setting = match (line.setting.as_str(), line.value.as_str()) {
        ("", _) => String::new(),
        (setting, "") => setting.to_owned(),
        (setting, value) => format!("{setting} = {value}"),
    };
    let word = line.outcome.name();
    if setting.is_empty() {
        write_wrapped(text, &format!("  {word:<OUTCOME_WIDTH$}"), &line.text);
    } else {
        let _ = writeln!(text, "  {word:<OUTCOME_WIDTH$}{setting}");
        write_wrapped(text, &format!("  {:OUTCOME_WIDTH$}", ""), &line.text);
    }
}

fn write_policies(text: &mut String, migration: &Migration) {
    let _ = writeln!(text, "\nPolicies (`-o policies` prints them):");
    if migration.policies.is_empty() {
        let _ = writeln!(text, "  none: GPUs stay whole");
    }
    for policy in &migration.policies {
        let field = |pointer: &str| policy.pointer(pointer).map(ToString::to_string).unwrap_or_default();
        let name = policy.pointer("/metadata/name").and_then(serde_json::Value::as_str).unwrap_or_default();
        let mode = policy.pointer("/spec/mode").and_then(serde_json::Value::as_str).unwrap_or_default();
        let nodes = match field("/spec/nodeSelector") {
            selector if selector.is_empty() => "all nodes".to_owned(),
            selector => selector,
        };
        let gpus = field("/spec/gpus");
        let gap = if gpus.is_empty() { "" } else { ", gpus " };
        let _ = writeln!(text, "  {name}: mode {mode}, {nodes}{gap}{gpus}");
    }
    if !migration.values.is_empty() || !migration.values_files.is_empty() {
        let _ = writeln!(text, "\nValues of the chart (`-o values` prints them):");
        for file in &migration.values_files {
            let _ = writeln!(text, "  --values charts/cleave/{file}");
        }
        for (path, value) in &migration.values {
            let _ = writeln!(text, "  {path}: {value}");
        }
    }
}

/// Writes the resources that manifests must request by a new name.
fn write_renames(text: &mut String, migration: &Migration) {
    let renames = &migration.renames;
    if migration.from_hami {
        let _ = writeln!(
            text,
            "\nHAMi: pods that request memory of a GPU must request nvidia.com/gpu-<G>gb instead. G depends on the\n\
             pod: with `--preview`, the report has the request of each pod."
        );
    } else if renames.is_empty() {
        let _ = writeln!(text, "\nNo resource changes its name.");
    }
    if renames.is_empty() {
        return;
    }
    let _ = writeln!(text, "\nManifests must change, because a policy cannot serve these names:");
    for rename in renames {
        let _ = writeln!(text, "  {} → {} ({})", rename.was, rename.now, rename.nodes);
    }
    for rename in renames {
        let is_only = renames.iter().all(|other| other.was != rename.was || other.now == rename.now);
        let is_first = renames.iter().find(|other| other.was == rename.was) == Some(rename);
        if is_only && is_first {
            let was = rename.was.replace('.', "\\.");
            let _ = writeln!(text, "  sed -E -i 's#\\b{was}([^a-z0-9._-]?:)#{}\\1#g' FILE…", rename.now);
        } else if is_first {
            let _ = writeln!(text, "  {}: choose the new name by the nodes of each workload.", rename.was);
        }
    }
}

fn write_pods(text: &mut String, pods: &[PodPreview]) {
    let _ = writeln!(text, "\nPods:");
    if pods.is_empty() {
        let _ = writeln!(text, "  none that request GPUs");
    }
    for pod in pods {
        let _ = writeln!(text, "  {}", pod.pod);
        for request in &pod.requests {
            for becomes in &request.becomes {
                let now = becomes.now.as_deref().unwrap_or("no counterpart");
                let _ = writeln!(text, "    {}: {} → {now}", request.container, request.was);
                if !becomes.nodes.is_empty() {
                    write_wrapped(text, "      On: ", &becomes.nodes);
                }
                write_wrapped(text, "      ", &becomes.text);
            }
        }
        for note in &pod.notes {
            write_wrapped(text, "    - ", note);
        }
    }
}

/// Renders the policies as a YAML stream.
///
/// # Errors
/// Returns an error if a policy cannot be written as YAML.
pub(super) fn policies_yaml(migration: &Migration) -> Result<String> {
    let mut text = String::new();
    if migration.policies.is_empty() {
        text.push_str("# No policy is needed: GPUs stay whole.\n");
    }
    for (index, policy) in migration.policies.iter().enumerate() {
        if index > 0 {
            text.push_str("---\n");
        }
        let yaml = serde_saphyr::to_string(policy).context("failed to write YAML")?;
        text.push_str(yaml.trim_end());
        text.push('\n');
    }
    Ok(text)
}

/// Renders the values as a values file for Helm. Without values, the file contains only comments.
///
/// # Errors
/// Returns an error if the values cannot be written as YAML.
pub(super) fn values_yaml(migration: &Migration) -> Result<String> {
    let mut text = String::new();
    for file in &migration.values_files {
        let _ = writeln!(text, "# Pass --values charts/cleave/{file} to Helm too.");
    }
    if migration.values.is_empty() {
        text.push_str("# No further values are needed.\n");
        return Ok(text);
    }
    let yaml = serde_saphyr::to_string(&migration.nested_values).context("failed to write YAML")?;
    text.push_str(yaml.trim_end());
    text.push('\n');
    Ok(text)
}
