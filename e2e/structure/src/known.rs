//! Formats the list of known findings, and compares findings with the list.
use crate::model::Finding;

const LIST_HEADER: &str = "\
# Known cycles, long files, long functions and, by file, numbers of wide comments. `cargo test -p
# cleave-structure` fails for a finding that is not listed, and for a line without a finding.
# `cargo run -p cleave-structure -- --write` writes this file.
";

/// Formats the list that allows exactly `findings`.
pub fn format_list(findings: &[Finding]) -> String {
    let lines = findings.iter().map(|finding| format!("{}\n", finding.description));
    LIST_HEADER.chars().chain(lines.collect::<String>().chars()).collect()
}

/// The differences between the findings and the list of known findings.
#[derive(Debug, PartialEq, Eq)]
pub struct ListDifference<'a> {
    /// Findings that the list does not contain.
    pub new: Vec<&'a Finding>,
    /// Lines of the list that match no finding.
    pub obsolete: Vec<&'a str>,
}

/// Compares `findings` with the list `known`.
pub fn compare_with_list<'a>(findings: &'a [Finding], known: &'a str) -> ListDifference<'a> {
    let mut obsolete: Vec<&str> =
        known.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    let mut new = Vec::new();
    for finding in findings {
        // Each line allows one finding, so two functions with the same name need two lines.
        match obsolete.iter().position(|line| *line == finding.description) {
            Some(at) => _ = obsolete.remove(at),
            None => new.push(finding),
        }
    }
    ListDifference { new, obsolete }
}
