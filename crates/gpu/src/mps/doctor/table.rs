//! What a person reads, in at most 100 columns.
use std::fmt::Write as _;

use super::judge::Verdict;
use super::{Facts, Report};

/// Columns of the table: the check, the verdict, what is relied on and what was seen.
const WIDTHS: [usize; 4] = [10, 8, 39, 37];
const BETWEEN: &str = "  ";
/// Columns of a line of text.
const WIDTH: usize = 100;

/// The report as text.
pub(super) fn text(report: &Report) -> String {
    let mut text = facts(&report.facts);
    if let Some(why) = &report.left_out {
        paragraph(&mut text, &format!("Nothing was started on the GPU: {why}. What follows was not tried."));
    }
    text.push('\n');
    row(&mut text, ["CHECK", "", "CLEAVE RELIES ON", "SEEN"]);
    for finding in &report.findings {
        let verdict = match finding.verdict {
            Verdict::AsReliedOn => "ok",
            Verdict::Differs => "DIFFERS",
            Verdict::NotTried => "-",
        };
        // Once, above, where it is the same for all.
        let seen = match (&report.left_out, finding.verdict) {
            (Some(why), Verdict::NotTried) if *why == finding.seen => "not tried".to_owned(),
            (_, Verdict::NotTried) => format!("not tried: {}", finding.seen),
            _ => finding.seen.clone(),
        };
        row(&mut text, [finding.check, verdict, finding.relied_on, &seen]);
    }
    text.push('\n');
    let count = |verdict| report.findings.iter().filter(|finding| finding.verdict == verdict).count();
    let (good, differ, left) = (count(Verdict::AsReliedOn), count(Verdict::Differs), count(Verdict::NotTried));
    let _ = writeln!(
        text,
        "{good} as relied on, {differ} {}, {left} not tried.",
        if differ == 1 { "differs" } else { "differ" }
    );
    if differ > 0 {
        text.push_str("\nWhat that means:\n");
    }
    for finding in report.findings.iter().filter(|finding| finding.verdict == Verdict::Differs) {
        paragraph(&mut text, &format!("- {}: {}.", finding.check, finding.otherwise));
    }
    text
}

fn facts(facts: &Facts) -> String {
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

fn paragraph(text: &mut String, words: &str) {
    for (number, line) in wrapped(words, WIDTH - 2).iter().enumerate() {
        let indent = if number > 0 && words.starts_with("- ") { "  " } else { "" };
        let _ = writeln!(text, "{indent}{line}");
    }
}

fn row(text: &mut String, cells: [&str; 4]) {
    let mut columns = Vec::new();
    for (cell, width) in cells.iter().zip(WIDTHS) {
        columns.push(wrapped(cell, width));
    }
    let height = columns.iter().map(Vec::len).max().unwrap_or_default();
    for number in 0..height {
        let line: Vec<String> = columns
            .iter()
            .zip(WIDTHS)
            .map(|(lines, width)| format!("{:width$}", lines.get(number).map_or("", String::as_str)))
            .collect();
        text.push_str(line.join(BETWEEN).trim_end());
        text.push('\n');
    }
}

/// Lines of at most so many characters; a longer word is cut.
fn wrapped(words: &str, width: usize) -> Vec<String> {
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

    use super::super::GpuFacts;
    use super::super::judge::{Observed, Outcome, Whole, findings};
    use super::*;

    fn report(seen: &Observed, left_out: Option<&str>) -> Report {
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
        let facts = Facts {
            kernel: "6.12.0".to_owned(),
            cgroups: "v2",
            driver: "580.159".to_owned(),
            cuda: Some("13.0".to_owned()),
            control: Some(PathBuf::from("/usr/bin/nvidia-cuda-mps-control")),
            control_version: None,
            gpu,
        };
        let findings = findings(seen, Whole { sms: 132, compute_mode: None });
        let as_relied_on = findings.iter().all(|finding| finding.verdict != Verdict::Differs);
        Report { facts, left_out: left_out.map(str::to_owned), as_relied_on, findings }
    }

    #[test]
    fn a_line_has_at_most_100_columns_whatever_a_driver_says() {
        let mut seen = Observed::nothing("none");
        seen.start = Outcome::Failed(format!("{} and {}", "x".repeat(300), "é ".repeat(200)));
        let text = text(&report(&seen, None));
        let longest = text.lines().map(|line| line.chars().count()).max().unwrap();
        assert!(longest <= WIDTH, "{longest}\n{text}");
        assert!(text.contains(&"x".repeat(37)), "{text}");
    }

    #[test]
    fn what_differs_is_counted_and_said_what_it_means() {
        let mut seen = Observed::nothing("none");
        seen.start = Outcome::Seen(5);
        seen.greeting = Outcome::Seen(false);
        let text = text(&report(&seen, None));
        assert!(text.contains("1 as relied on, 1 differs, 17 not tried."), "{text}");
        assert!(text.contains("\n- door: limits are advisory"), "{text}");
        assert!(!text.contains("- start:"), "{text}");
    }

    #[test]
    fn why_nothing_was_tried_is_said_once() {
        let text = text(&report(&Observed::nothing("the GPU is in use"), Some("the GPU is in use")));
        assert_eq!(text.matches("the GPU is in use").count(), 1, "{text}");
        assert!(text.contains("0 as relied on, 0 differ, 19 not tried."), "{text}");
    }
}
