//! Generates the table of Kubernetes versions, with the results of the cluster tests.
//!
//! `make test-versions` writes the results. The table has all versions that the launcher of the
//! local cluster builds, whether tested or not.
use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::generated_parts::{fill_generated_parts, format_table};
use crate::text_file::read_text_file;
use crate::wrapping::wrap_list_item;

/// File with the results of the tests, by version.
const RESULTS_FILE: &str = "docs/data/kubernetes-versions.json";
/// Go module that builds the default Kubernetes version. The directory `versions` in this module
/// contains the modules of other versions.
const DEFAULT_VERSION_MODULE: &str = "e2e/cluster/kube";
/// Name of the generated part of the page.
const PART_NAME: &str = "kubernetes versions";

/// Results of the cluster tests that `make test-versions` ran on one Kubernetes version.
#[derive(Debug, Clone, PartialEq, Eq)]
struct VersionResults {
    date: String,
    gate: &'static str,
    passed: usize,
    failed: Vec<String>,
    /// Skipped tests, each with the reason.
    skipped: Vec<(String, String)>,
}

/// Returns the page with the generated table of Kubernetes versions.
pub(crate) fn render_page(root: &Path, page: &str) -> Result<String> {
    let versions = buildable_versions(root)?;
    let results = parse_results(&read_text_file(&root.join(RESULTS_FILE))?)
        .with_context(|| format!("failed to parse {RESULTS_FILE}"))?;
    let text = render_versions(&versions, &results)?;
    fill_generated_parts(page, &[PART_NAME.to_owned()], |name| match name {
        PART_NAME => Ok(text.clone()),
        _ => bail!("there is no such table of versions"),
    })
}

/// Returns the versions that the launcher builds, from the oldest to the newest.
fn buildable_versions(root: &Path) -> Result<Vec<String>> {
    let module = root.join(DEFAULT_VERSION_MODULE);
    let mut versions = vec![required_kubernetes_version(&read_text_file(&module.join("go.mod"))?)?];
    let directory = module.join("versions");
    for entry in std::fs::read_dir(&directory).with_context(|| format!("failed to list {}", directory.display()))? {
        versions.push(entry?.file_name().to_string_lossy().into_owned());
    }
    versions
        .sort_by_cached_key(|version| version.split('.').map(|part| part.parse().unwrap_or(0)).collect::<Vec<u32>>());
    Ok(versions)
}

/// Returns the version of `k8s.io/kubernetes` that a `go.mod` requires.
fn required_kubernetes_version(go_mod: &str) -> Result<String> {
    let required = go_mod.lines().find_map(|line| line.trim().strip_prefix("k8s.io/kubernetes v"));
    Ok(required.context("go.mod does not require k8s.io/kubernetes")?.to_owned())
}

/// Parses the results of all versions.
fn parse_results(json: &str) -> Result<BTreeMap<String, VersionResults>> {
    let records: Vec<Value> = serde_json::from_str(json)?;
    let parse = |record: &Value| {
        let version = string_field(record, "version")?;
        let results = parse_version_results(record).with_context(|| format!("the results of {version}"))?;
        Ok((version, results))
    };
    records.iter().map(parse).collect()
}

/// Parses the results of one version.
fn parse_version_results(record: &Value) -> Result<VersionResults> {
    let list = |field: &str| record[field].as_array().with_context(|| format!("{field} is not a list"));
    let names = |field: &str| -> Result<Vec<String>> {
        list(field)?.iter().map(|name| Ok(name.as_str().context("a test has no name")?.to_owned())).collect()
    };
    let skipped = list("skipped")?.iter().map(|one| Ok((string_field(one, "test")?, string_field(one, "reason")?)));
    Ok(VersionResults {
        date: string_field(record, "date")?,
        gate: match record["gate"].as_str() {
            Some("policy") => "policy",
            Some("webhook") => "webhook",
            _ => bail!("gate is neither policy nor webhook"),
        },
        passed: names("passed")?.len(),
        failed: names("failed")?,
        skipped: skipped.collect::<Result<_>>()?,
    })
}

fn string_field(record: &Value, field: &str) -> Result<String> {
    Ok(record[field].as_str().with_context(|| format!("{field} is not a string"))?.to_owned())
}

/// Returns the table, and a list of the tests that did not pass.
fn render_versions(versions: &[String], results: &BTreeMap<String, VersionResults>) -> Result<String> {
    if let Some(unknown) = results.keys().find(|version| !versions.contains(version)) {
        bail!("{RESULTS_FILE} has results of {unknown}, which the launcher does not build");
    }
    let row = |version: &String| match results.get(version) {
        Some(found) => vec![
            version.clone(),
            found.gate.to_owned(),
            found.passed.to_string(),
            found.skipped.len().to_string(),
            found.failed.len().to_string(),
            found.date.clone(),
        ],
        None => vec![version.clone(), String::new(), String::new(), String::new(), String::new(), "not yet".to_owned()],
    };
    let head = ["Kubernetes", "the gate is added by", "passed tests", "skipped", "failed", "tested on"];
    let mut out = format_table(&head, &versions.iter().map(row).collect::<Vec<_>>());
    let items = describe_exceptions(versions, results);
    if !items.is_empty() {
        out.push('\n');
    }
    out.extend(items.iter().map(|item| wrap_list_item(item)));
    Ok(out)
}

/// Returns a list item for each reason to skip tests, and for each version with failed tests.
fn describe_exceptions(versions: &[String], results: &BTreeMap<String, VersionResults>) -> Vec<String> {
    let tested = || versions.iter().filter_map(|version| Some((version.as_str(), results.get(version)?)));
    // For each reason, the versions and tests without duplicates, in order.
    let mut reasons: BTreeMap<&str, (Vec<&str>, Vec<&str>)> = BTreeMap::new();
    for (version, found) in tested() {
        for (test, reason) in &found.skipped {
            let (versions, tests) = reasons.entry(reason).or_default();
            push_if_absent(versions, version);
            push_if_absent(tests, test);
        }
    }
    let skipped = reasons.into_iter().map(|(reason, (versions, tests))| {
        format!("Skipped on {}: {}. {reason}.", versions.join(", "), format_code_list(&tests))
    });
    let failed = tested().filter(|(_, found)| !found.failed.is_empty()).map(|(version, found)| {
        let tests: Vec<&str> = found.failed.iter().map(String::as_str).collect();
        format!("Failed on {version}: {}.", format_code_list(&tests))
    });
    skipped.chain(failed).collect()
}

fn push_if_absent<'a>(list: &mut Vec<&'a str>, item: &'a str) {
    if !list.contains(&item) {
        list.push(item);
    }
}

/// Joins names as a list of code spans.
fn format_code_list(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESULTS_JSON: &str = r#"[
        {"version": "1.34.4", "date": "2026-11-23", "commit": "abc", "gate": "webhook",
         "passed": ["a::b", "a::c"], "failed": ["d::e"],
         "skipped": [{"test": "f::g", "reason": "It needs a policy"}, {"test": "f::h", "reason": "It needs a policy"}]},
        {"version": "1.35.8", "date": "2026-11-24", "commit": "abc", "gate": "webhook",
         "passed": [], "failed": [], "skipped": [{"test": "f::g", "reason": "It needs a policy"}]}
    ]"#;

    fn versions(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn each_version_has_a_row_and_tests_that_did_not_pass_are_listed() -> Result<()> {
        let rendered = render_versions(&versions(&["1.34.4", "1.35.8", "1.36.4"]), &parse_results(RESULTS_JSON)?)?;
        let expected = "\
| Kubernetes | the gate is added by | passed tests | skipped | failed | tested on |
|---|---|---|---|---|---|
| 1.34.4 | webhook | 2 | 2 | 1 | 2026-11-23 |
| 1.35.8 | webhook | 0 | 1 | 0 | 2026-11-24 |
| 1.36.4 |  |  |  |  | not yet |

- Skipped on 1.34.4, 1.35.8: `f::g`, `f::h`. It needs a policy.
- Failed on 1.34.4: `d::e`.
";
        assert_eq!(rendered, expected);
        Ok(())
    }

    #[test]
    fn results_of_another_version_or_without_a_field_are_errors() -> Result<()> {
        assert!(render_versions(&versions(&["1.34.4"]), &parse_results(RESULTS_JSON)?).is_err());
        for field in ["version", "date", "gate", "passed", "failed", "skipped"] {
            let mut records: Vec<Value> = serde_json::from_str(RESULTS_JSON)?;
            records[0][field] = Value::Null;
            assert!(parse_results(&serde_json::to_string(&records)?).is_err(), "without {field}");
        }
        Ok(())
    }

    #[test]
    fn the_required_version_is_read_from_go_mod() -> Result<()> {
        let go_mod = "module m\n\nrequire (\n\tk8s.io/kubectl v0.36.4\n\tk8s.io/kubernetes v1.36.4\n)\n";
        assert_eq!(required_kubernetes_version(go_mod)?, "1.36.4");
        assert!(required_kubernetes_version("module m\n").is_err());
        Ok(())
    }
}
