//! Translates documents into a report, policies and values. Pure.
use std::collections::BTreeMap;

use anyhow::Result;
use serde::Serialize;
use serde_json::Value;

use super::groups;
use super::input::{self, Document};
use super::policies::{self, Rename};
use super::preview::{self, PodPreview};
use super::report::{Notes, ReportLine};

/// The result of a translation.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Migration {
    /// The outcome for each setting, grouped by source.
    pub(super) report: Vec<ReportLine>,
    /// The policies.
    pub(super) policies: Vec<Value>,
    /// Values of the chart, by path.
    #[serde(skip)]
    pub(super) values: BTreeMap<String, Value>,
    /// Values of the chart, as the content of a values file.
    #[serde(rename = "values")]
    pub(super) nested_values: Value,
    /// Values files in the chart's directory. If two files set the same value, the later file wins.
    pub(super) values_files: Vec<&'static str>,
    /// Resources that pods must request by a new name.
    pub(super) renames: Vec<Rename>,
    /// Whether the input configures HAMi, whose requests consist of several resources.
    #[serde(skip)]
    pub(super) from_hami: bool,
    /// What each pod gets, if the user requested a preview.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) pods: Option<Vec<PodPreview>>,
}

/// Translates documents.
///
/// # Errors
/// Returns an error if [`input::parse`] returns an error, or if the software that reads a setting
/// would refuse it.
pub(super) fn migrate(documents: Vec<Document>, preview: bool) -> Result<Migration> {
    let mut notes = Notes::default();
    let input = input::parse(documents, &mut notes)?;
    let groups = groups::group_nodes(&input, &mut notes);
    let plan = policies::plan(&groups, &input, &mut notes)?;
    let pods = preview.then(|| preview::preview(&input.workloads, &input.nodes, &plan));
    let nested_values = notes.nested_values();
    Ok(Migration {
        renames: plan.renames(),
        from_hami: input.hami.is_some(),
        report: notes.lines,
        policies: plan.policies,
        values: notes.values,
        nested_values,
        values_files: notes.values_files,
        pods,
    })
}
