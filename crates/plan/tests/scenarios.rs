//! Tests scenario files with their expectations, and the committed text of each plan.
//!
//! The `expect` of each file states the placed pods and the number of repartitioned GPUs, which
//! must not change. A difference in a committed text shows the effect of a change of the planner.
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

use cleave_plan::{ExplainedPlan, Policy, Snapshot, check, plan};
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Scenario {
    title: String,
    expect: ExpectedResult,
    snapshot: Snapshot,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ExpectedResult {
    placed: BTreeSet<String>,
    changed_gpus: usize,
}

fn plan_text(title: &str, planned: &ExplainedPlan) -> String {
    let mut text = format!("{title}\n\n");
    for gpu in &planned.plan.gpus {
        let _ =
            write!(text, "{} {} {:?}{}:", gpu.node, gpu.uuid, gpu.mode, if gpu.changed { " (changed)" } else { "" });
        for slice in &gpu.slices {
            let place = slice.placement.map(|place| format!("@{place}")).unwrap_or_default();
            let used = if slice.in_use { "*" } else { "" };
            let _ = write!(text, " {}x{}{place}{used}", slice.count, slice.resource.trim_start_matches("nvidia.com/"));
        }
        text.push('\n');
    }
    text.push('\n');
    for pod in &planned.report.pods {
        let _ = writeln!(text, "{} {}: {}", if pod.placed { '+' } else { '-' }, pod.pod, pod.reason);
    }
    for note in &planned.report.nodes {
        let _ = writeln!(text, "! {} {}: {}", note.node, note.gpu.as_deref().unwrap_or_default(), note.reason);
    }
    text
}

#[test]
fn scenarios_match_their_expectations() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scenarios");
    let mut files: Vec<_> = std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    assert!(files.len() >= 35, "the scenario files are there");

    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path(&directory);
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    let _bound = settings.bind_to_scope();
    let mut wrong = Vec::new();
    for path in files {
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let read = std::fs::read_to_string(&path).unwrap();
        let scenario: Scenario = serde_json::from_str(&read).unwrap_or_else(|error| panic!("{name}: {error}"));
        let planned = plan(&scenario.snapshot, &Policy::default());
        let placed: BTreeSet<String> = planned.plan.placements.iter().map(|placement| placement.pod.clone()).collect();
        if placed != scenario.expect.placed {
            wrong.push(format!("{name}: placed {placed:?}"));
        }
        let changed = planned.plan.gpus.iter().filter(|gpu| gpu.changed).count();
        if changed != scenario.expect.changed_gpus {
            wrong.push(format!("{name}: {changed} GPUs changed"));
        }
        for violation in check(&scenario.snapshot, &planned.plan) {
            wrong.push(format!("{name}: {violation}"));
        }
        insta::assert_snapshot!(name, plan_text(&scenario.title, &planned));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
