//! `cleave plan`: what would be done for the pods that wait, and why.
use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::ValueEnum;
use cleave_plan::{GpuPlan, Planned, Policy, Snapshot};

/// Plan a snapshot: which GPUs are cut into what, and which pod goes where.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Snapshot of a cluster, as JSON; `-` is standard input.
    #[arg(long, value_name = "FILE")]
    snapshot: PathBuf,
    /// How the plan is printed.
    #[arg(long, value_enum, default_value_t = Output::Text)]
    output: Output,
    /// MPS shares of each GPU that does not say how many.
    #[arg(long, value_name = "N")]
    units: Option<u32>,
    /// Time-sliced replicas of each GPU that does not say how many.
    #[arg(long, value_name = "N")]
    replicas: Option<u32>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Output {
    /// For a program.
    Json,
    /// For a person.
    Text,
}

/// Prints the plan on standard output.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let snapshot = read(&args.snapshot)?;
    let policy = Policy { units: args.units, replicas: args.replicas, ..Policy::default() };
    let planned = cleave_plan::plan(&snapshot, &policy);
    let wrong = cleave_plan::check(&snapshot, &planned.plan);
    if !wrong.is_empty() {
        let wrong: Vec<String> = wrong.iter().map(ToString::to_string).collect();
        bail!("the plan breaks rules and must not be used:\n{}", wrong.join("\n"));
    }
    let text = match args.output {
        Output::Json => {
            let mut value = serde_json::to_value(&planned.plan).context("the plan as JSON")?;
            if let Some(fields) = value.as_object_mut() {
                fields.insert(
                    "notes".to_owned(),
                    serde_json::to_value(&planned.report.nodes).context("the notes as JSON")?,
                );
            }
            serde_json::to_string_pretty(&value).context("the plan as JSON")? + "\n"
        }
        Output::Text => text(&planned),
    };
    std::io::stdout().lock().write_all(text.as_bytes()).context("writing the plan")
}

fn read(path: &Path) -> anyhow::Result<Snapshot> {
    let name = path.display();
    let text = if path == Path::new("-") {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).map(|_| text)
    } else {
        std::fs::read_to_string(path)
    };
    let text = text.with_context(|| format!("reading the snapshot {name}"))?;
    serde_json::from_str(&text).with_context(|| format!("{name} is no snapshot"))
}

/// The plan in words: GPUs that change, then every pod.
fn text(planned: &Planned) -> String {
    let plan = &planned.plan;
    let mut text = String::new();
    let changed: Vec<&GpuPlan> = plan.gpus.iter().filter(|gpu| gpu.changed).collect();
    let _ = match changed.len() {
        0 => writeln!(text, "No GPU changes."),
        1 => writeln!(text, "1 of {} GPUs changes:", plan.gpus.len()),
        many => writeln!(text, "{many} of {} GPUs change:", plan.gpus.len()),
    };
    for gpu in changed {
        let _ = writeln!(text, "  {} on {}, {}: {}", gpu.uuid, gpu.node, gpu.mode, slices(gpu));
    }
    let _ = writeln!(text, "{} of {} pods have a place.", plan.placements.len(), planned.report.pods.len());
    for pod in &planned.report.pods {
        let _ = writeln!(text, "  {} {}: {}", if pod.placed { "+" } else { "-" }, pod.pod, pod.reason);
    }
    for note in &planned.report.nodes {
        let gpu = note.gpu.as_ref().map(|gpu| format!(" GPU {gpu}")).unwrap_or_default();
        let _ = writeln!(text, "Left as it is: {}{gpu}, {}.", note.node, note.reason);
    }
    text
}

/// `2 × nvidia.com/gpu-10gb, nvidia.com/mig-3g.20gb at 4 (in use)`.
fn slices(gpu: &GpuPlan) -> String {
    if gpu.slices.is_empty() {
        return "whole".to_owned();
    }
    let equal = |a: &cleave_plan::snapshot::Slice, b: &cleave_plan::snapshot::Slice| {
        (a.placement, &a.resource, a.in_use) == (b.placement, &b.resource, b.in_use)
    };
    let one = |run: &[cleave_plan::snapshot::Slice]| {
        let slice = run.first()?;
        let count: u32 = run.iter().map(|slice| slice.count).sum();
        let times = if count == 1 { String::new() } else { format!("{count} × ") };
        let place = slice.placement.map(|place| format!(" at {place}")).unwrap_or_default();
        Some(format!("{times}{}{place}{}", slice.resource, if slice.in_use { " (in use)" } else { "" }))
    };
    gpu.slices.chunk_by(equal).filter_map(one).collect::<Vec<_>>().join(", ")
}
