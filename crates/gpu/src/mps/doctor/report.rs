//! The report of the doctor, as JSON or as text of at most 100 columns.
use std::fmt::Write as _;

use serde::Serialize;

use super::facts::SystemFacts;
use super::judge::{CheckResult, CheckVerdict};

/// The doctor's facts and the results of its checks. The JSON output of the command is the
/// serialized report.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Report {
    #[serde(flatten)]
    pub(super) facts: SystemFacts,
    /// Why the doctor started no daemon. `None` if it tried to start one.
    pub(super) skip_reason: Option<String>,
    /// Whether no check differs.
    pub(super) as_expected: bool,
    pub(super) findings: Vec<CheckResult>,
}

/// Widths of the table's columns in characters: check, verdict, expected, observed.
const COLUMN_WIDTHS: [usize; 4] = [10, 8, 39, 37];
const COLUMN_GAP: &str = "  ";
/// Maximum width of a line, in columns.
const MAX_LINE_COLUMNS: usize = 100;

/// Formats the report for a terminal.
pub(super) fn format_report(report: &Report) -> String {
    let mut text = format_facts(&report.facts);
    if let Some(why) = &report.skip_reason {
        write_paragraph(
            &mut text,
            &format!("The doctor started nothing on the GPU: {why}. It ran none of the checks below."),
        );
    }
    text.push('\n');
    write_row(&mut text, ["CHECK", "", "CLEAVE EXPECTS", "OBSERVED"]);
    for finding in &report.findings {
        let verdict = match finding.verdict {
            CheckVerdict::AsExpected => "ok",
            CheckVerdict::Differs => "DIFFERS",
            CheckVerdict::NotTested => "-",
        };
        // The text above the table states the common reason of all checks once. Do not repeat it.
        let observed = match (&report.skip_reason, finding.verdict) {
            (Some(why), CheckVerdict::NotTested) if *why == finding.observed => "not tested".to_owned(),
            (_, CheckVerdict::NotTested) => format!("not tested: {}", finding.observed),
            _ => finding.observed.clone(),
        };
        write_row(&mut text, [finding.check, verdict, finding.expected, &observed]);
    }
    text.push('\n');
    let count = |verdict| report.findings.iter().filter(|finding| finding.verdict == verdict).count();
    let (good, differ, left) =
        (count(CheckVerdict::AsExpected), count(CheckVerdict::Differs), count(CheckVerdict::NotTested));
    let _ = writeln!(
        text,
        "{good} as expected, {differ} {}, {left} not tested.",
        if differ == 1 { "differs" } else { "differ" }
    );
    if differ > 0 {
        text.push_str("\nWhat that means:\n");
    }
    for finding in report.findings.iter().filter(|finding| finding.verdict == CheckVerdict::Differs) {
        write_paragraph(&mut text, &format!("- {}: {}.", finding.check, finding.impact));
    }
    text
}

/// Returns the facts about the GPU, driver and daemon, one per line.
fn format_facts(facts: &SystemFacts) -> String {
    let gpu = &facts.gpu;
    let unknown = || "unknown".to_owned();
    let control = match (&facts.control, facts.control_version) {
        (Some(path), Some(version)) => format!("{} (version {version})", path.display()),
        (Some(path), None) => path.display().to_string(),
        (None, _) => "not found".to_owned(),
    };
    let lines = [
        ("GPU", format!("{}, {}, {}", gpu.index, gpu.model, gpu.uuid)),
        ("", format!("{} SMs, {} MiB", gpu.sms, gpu.memory_mib)),
        (
            "",
            format!(
                "compute mode {}, MIG {}, {} processes",
                gpu.compute_mode.unwrap_or("unknown"),
                gpu.mig,
                gpu.processes.map_or_else(unknown, |count| count.to_string())
            ),
        ),
        ("Driver", format!("{}, CUDA {}", facts.driver, facts.cuda.clone().unwrap_or_else(unknown))),
        ("MPS", control),
        ("Kernel", format!("{}, control groups {}", facts.kernel, facts.cgroups)),
    ];
    lines.iter().map(|(name, value)| format!("{name:8}{value}").trim_end().to_owned() + "\n").collect()
}

/// Writes wrapped text. The lines of a list item after the first are indented.
fn write_paragraph(text: &mut String, words: &str) {
    for (number, line) in wrap_text(words, MAX_LINE_COLUMNS - 2).iter().enumerate() {
        let indent = if number > 0 && words.starts_with("- ") { "  " } else { "" };
        let _ = writeln!(text, "{indent}{line}");
    }
}

/// Writes a row of the table. A cell may need several lines.
fn write_row(text: &mut String, cells: [&str; 4]) {
    let mut columns = Vec::new();
    for (cell, width) in cells.iter().zip(COLUMN_WIDTHS) {
        columns.push(wrap_text(cell, width));
    }
    let height = columns.iter().map(Vec::len).max().unwrap_or_default();
    for number in 0..height {
        let line: Vec<String> = columns
            .iter()
            .zip(COLUMN_WIDTHS)
            .map(|(lines, width)| format!("{:width$}", lines.get(number).map_or("", String::as_str)))
            .collect();
        text.push_str(line.join(COLUMN_GAP).trim_end());
        text.push('\n');
    }
}

/// Wraps text to lines of at most `width` characters. Splits words that are longer than a line.
fn wrap_text(words: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in words.split_whitespace() {
        let mut rest: Vec<char> = word.chars().collect();
        while !rest.is_empty() {
            let piece: String = rest.drain(..rest.len().min(width)).collect();
            match lines.last_mut() {
                Some(line) if line.chars().count() + 1 + piece.chars().count() <= width => {
                    line.push(' ');
                    line.push_str(&piece);
                }
                _ => lines.push(piece),
            }
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::super::facts::GpuFacts;
    use super::super::judge::judge_all_checks;
    use super::super::observed::{Observations, TestOutcome, TestedGpu};
    use super::*;

    fn report(seen: &Observations, skip_reason: Option<&str>) -> Report {
        let gpu = GpuFacts {
            index: 0,
            uuid: "GPU-8a511988-43b7-5835-93fb-f2df4bbf83bc".to_owned(),
            model: "NVIDIA H200".to_owned(),
            sms: 132,
            memory_mib: 143_155,
            compute_mode: Some("Default"),
            mig: "off",
            processes: Some(0),
        };
        let facts = SystemFacts {
            kernel: "6.12.0".to_owned(),
            cgroups: "v2",
            driver: "580.159".to_owned(),
            cuda: Some("13.0".to_owned()),
            control: Some(PathBuf::from("/usr/bin/nvidia-cuda-mps-control")),
            control_version: None,
            gpu,
        };
        let findings = judge_all_checks(seen, TestedGpu { sms: 132, compute_mode: None });
        let as_expected = findings.iter().all(|finding| finding.verdict != CheckVerdict::Differs);
        Report { facts, skip_reason: skip_reason.map(str::to_owned), as_expected, findings }
    }

    #[test]
    fn lines_have_at_most_100_columns() {
        let mut seen = Observations::for_skipped_tests("none");
        seen.start = TestOutcome::Failed(format!("{} and {}", "x".repeat(300), "é ".repeat(200)));
        let text = format_report(&report(&seen, None));
        let longest = text.lines().map(|line| line.chars().count()).max().unwrap();
        assert!(longest <= MAX_LINE_COLUMNS, "{longest}\n{text}");
        assert!(text.contains(&"x".repeat(37)), "{text}");
    }

    #[test]
    fn differences_are_counted_and_explained() {
        let mut seen = Observations::for_skipped_tests("none");
        seen.start = TestOutcome::Observed(5);
        seen.greeting = TestOutcome::Observed(false);
        let text = format_report(&report(&seen, None));
        assert!(text.contains("1 as expected, 1 differs, 17 not tested."), "{text}");
        assert!(text.contains("\n- door: MPS shares are Unhealthy"), "{text}");
        assert!(!text.contains("- start:"), "{text}");
    }

    #[test]
    fn a_common_reason_for_skipping_is_stated_once() {
        let text =
            format_report(&report(&Observations::for_skipped_tests("the GPU is in use"), Some("the GPU is in use")));
        assert_eq!(text.matches("the GPU is in use").count(), 1, "{text}");
        assert!(text.contains("0 as expected, 0 differ, 19 not tested."), "{text}");
    }
}
