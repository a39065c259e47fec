//! Generates the tables of reasons for Events and conditions. Checks the agent and the operator for
//! reasons that no table lists.
use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use cleave_api::reasons::{self, Reason};

use crate::generated_parts::{fill_generated_parts, format_table};
use crate::text_file::read_text_file;

/// Source directories of the programs that write Events and conditions.
const EVENT_SOURCES: [&str; 2] = ["crates/agent/src", "crates/operator/src"];

/// The tables of reasons, each with the name of its part of the page.
const REASON_TABLES: [(&str, &[Reason]); 9] = [
    ("pod events of the operator", reasons::POD_EVENTS_OF_OPERATOR),
    ("pod events of the agent", reasons::POD_EVENTS_OF_AGENT),
    ("node events of the agent", reasons::NODE_EVENTS_OF_AGENT),
    ("node events of the operator", reasons::NODE_EVENTS_OF_OPERATOR),
    ("daemonset events", reasons::DAEMONSET_EVENTS),
    ("policy conditions", reasons::POLICY_CONDITIONS),
    ("node conditions", reasons::NODE_CONDITIONS),
    ("pod conditions", reasons::POD_CONDITIONS),
    ("quota conditions", reasons::QUOTA_CONDITIONS),
];

/// Returns the page with the generated tables.
pub(crate) fn render_page(page: &str) -> Result<String> {
    let required: Vec<String> = REASON_TABLES.iter().map(|(name, _)| (*name).to_owned()).collect();
    fill_generated_parts(page, &required, |name| match REASON_TABLES.iter().find(|(table, _)| *table == name) {
        Some((_, reasons)) => Ok(format_reason_table(reasons)),
        None => bail!("there is no such table of reasons"),
    })
}

/// Formats a table of reasons.
fn format_reason_table(reasons: &[Reason]) -> String {
    let row = |Reason { name, meaning, action }: &Reason| {
        vec![format!("`{name}`"), (*meaning).to_owned(), (*action).to_owned()]
    };
    format_table(&["reason", "meaning", "what to do"], &reasons.iter().map(row).collect::<Vec<_>>())
}

/// Returns the reasons in the code that no table lists, each as a sentence.
pub(crate) fn find_problems(root: &Path) -> Result<Vec<String>> {
    let known: BTreeSet<&str> =
        reasons::ALL_REASONS.iter().flat_map(|table| table.iter()).map(|reason| reason.name).collect();
    let mut problems = Vec::new();
    for source in EVENT_SOURCES {
        for (path, text) in read_rust_files(&root.join(source))? {
            let unknown = written_reasons(&text).into_iter().filter(|name| !known.contains(name.as_str()));
            problems.extend(unknown.map(|name| format!("{path}: crates/api/src/reasons.rs has no {name}")));
        }
    }
    Ok(problems)
}

/// Returns the reasons that a source file writes: the string after `reason:`, after an Event's
/// type, after `warning(`, or after the value of a condition.
fn written_reasons(source: &str) -> BTreeSet<String> {
    let code = source.split("\n#[cfg(test)]\nmod ").next().unwrap_or(source);
    let mut names = BTreeSet::new();
    for before in
        ["reason: \"", "EventType::Normal, \"", "EventType::Warning, \"", " warning(\"", "(true, \"", "(false, \""]
    {
        let found = code.split(before).skip(1).filter_map(|rest| rest.split_once('"')).map(|(name, _)| name);
        names.extend(found.filter(|name| name.starts_with(|c: char| c.is_ascii_uppercase())).map(str::to_owned));
    }
    names
}

/// Returns the paths and texts of the Rust files below a directory. Skips files and directories
/// whose names start with `tests`.
fn read_rust_files(directory: &Path) -> Result<Vec<(String, String)>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).with_context(|| format!("failed to list {}", directory.display()))? {
        let path = entry?.path();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if name.starts_with("tests") {
            continue;
        }
        if path.is_dir() {
            files.extend(read_rust_files(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push((path.display().to_string(), read_text_file(&path)?));
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_in_code_are_found_and_reasons_in_tests_are_ignored() {
        let code = "event(EventType::Warning, \"NoGpu\", x); E { reason: \"Split\", }; (false, \"Full\");\n#[cfg(test)]\nmod tests { reason: \"R\" }";
        assert_eq!(written_reasons(code).iter().collect::<Vec<_>>(), ["Full", "NoGpu", "Split"]);
    }

    #[test]
    fn each_table_lists_each_reason_once() {
        for (name, reasons) in REASON_TABLES {
            let names: BTreeSet<&str> = reasons.iter().map(|reason| reason.name).collect();
            assert_eq!(names.len(), reasons.len(), "{name}");
        }
    }
}
