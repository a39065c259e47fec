//! `cleave plan`: shows how GPUs would be partitioned, where pending pods would run, and why.
use std::fmt::Write as _;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use cleave_operator::dry_run::{self, DryRun};
use cleave_operator::policies::plan::PolicyError;
use cleave_plan::snapshot::SliceGroup;
use cleave_plan::{ExplainedPlan, GpuPlan, Policy, Snapshot};
use serde_json::{Value, json};

use crate::client::{ClusterArgs, InstallationArgs};
use crate::output::{self, OutputFormat, print};

/// Examples in the help of `cleave plan`.
pub(crate) const HELP_EXAMPLES: &str = "\
Examples:
  cleave plan --live
  cleave plan --snapshot cluster.json -o json";

/// Options of `cleave plan`. Cluster options conflict with `--snapshot`, because a snapshot does
/// not use the cluster.
#[derive(Debug, Clone, clap::Args)]
#[command(
    group(clap::ArgGroup::new("source").required(true).args(["snapshot", "live"])),
    mut_arg("cleave_namespace", |arg| arg.alias("namespace"))
)]
pub struct PlanArgs {
    /// Plan for the cluster as it is now.
    #[arg(long)]
    live: bool,
    /// Plan for a JSON snapshot; `-` reads standard input.
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["context", "kubeconfig", "cleave_namespace", "agent_selector"]
    )]
    snapshot: Option<PathBuf>,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = OutputFormat::Text)]
    output: OutputFormat,
    /// Number of MPS shares of each GPU, if the snapshot does not specify it.
    #[arg(long, value_name = "N", conflicts_with = "live", help_heading = "Snapshot options")]
    units: Option<u32>,
    /// Number of time-sliced replicas of each GPU, if the snapshot does not specify it.
    #[arg(long, value_name = "N", conflicts_with = "live", help_heading = "Snapshot options")]
    replicas: Option<u32>,
    /// Connection to the cluster.
    #[command(flatten)]
    cluster: ClusterArgs,
    /// The Cleave installation.
    #[command(flatten)]
    install: InstallationArgs,
}

/// Runs `cleave plan`.
pub(crate) async fn run(args: PlanArgs) -> Result<()> {
    let Some(path) = &args.snapshot else { return run_live(&args).await };
    let snapshot = read_snapshot(path)?;
    let policy = Policy { units: args.units, replicas: args.replicas, ..Policy::default() };
    let planned = cleave_plan::plan(&snapshot, &policy);
    let wrong: Vec<String> = cleave_plan::check(&snapshot, &planned.plan).iter().map(ToString::to_string).collect();
    ensure!(wrong.is_empty(), "the plan violates constraints and must not be used:\n{}", wrong.join("\n"));
    print(&match args.output {
        OutputFormat::Json => output::to_json(&planned_json(&planned)?)?,
        OutputFormat::Text => planned_text(&planned),
    })
}

async fn run_live(args: &PlanArgs) -> Result<()> {
    let client = args.cluster.connect().await?;
    let InstallationArgs { cleave_namespace, agent_selector } = &args.install;
    let observed = dry_run::observe(&client, cleave_namespace, agent_selector).await?;
    print(&render(&dry_run::dry_run(&observed)?, args.output)?)
}

fn read_snapshot(path: &Path) -> Result<Snapshot> {
    let name = path.display();
    let text = if path == Path::new("-") {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).map(|_| text)
    } else {
        std::fs::read_to_string(path)
    };
    let text = text.with_context(|| format!("failed to read snapshot {name}"))?;
    serde_json::from_str(&text).with_context(|| format!("{name} is not a snapshot"))
}

/// Renders the changes that the operator would make now, and the reasons.
pub(crate) fn render(run: &DryRun, output: OutputFormat) -> Result<String> {
    match output {
        OutputFormat::Json => output::to_json(&dry_run_json(run)?),
        OutputFormat::Text => Ok(dry_run_text(run)),
    }
}

fn dry_run_json(run: &DryRun) -> Result<Value> {
    let mut value = run.outcome.planned.as_ref().map_or_else(|| Ok(json!({})), planned_json)?;
    let writes = run.changes.iter().map(|change| (change.node.clone(), json!(change.spec)));
    value["writes"] = Value::Object(writes.collect());
    value["changing"] = json!(run.outcome.changing);
    Ok(value)
}

fn planned_json(planned: &ExplainedPlan) -> Result<Value> {
    let mut value = serde_json::to_value(&planned.plan).context("failed to write the plan as JSON")?;
    value["notes"] = serde_json::to_value(&planned.report.nodes).context("failed to write the notes as JSON")?;
    Ok(value)
}

fn dry_run_text(run: &DryRun) -> String {
    let mut text = match &run.outcome.planned {
        Some(planned) => planned_text(planned),
        None => "No GPU has a policy that partitions it on demand.\n".to_owned(),
    };
    for node in &run.outcome.changing {
        let _ = writeln!(text, "Not planned: node {node} is still being repartitioned.");
    }
    for ((node, gpu), why) in &run.outcome.excluded_gpus {
        let _ = writeln!(text, "Unchanged: GPU {gpu} on node {node}: {why}.");
    }
    for (policy, report) in &run.plan.policies {
        match &report.invalid {
            Some(PolicyError::Malformed(error)) => {
                let _ = writeln!(text, "Policy {policy} is malformed: {error}.");
            }
            Some(PolicyError::Refused(error)) => {
                let _ = writeln!(text, "Policy {policy} is invalid: {error}.");
            }
            None => {}
        }
        for (gpu, reason) in &report.unsupported {
            let _ = writeln!(text, "Policy {policy} cannot apply to GPU {} on node {}: {reason}.", gpu.index, gpu.node);
        }
    }
    text
}

/// Renders the GPUs that change, then every pod, and then the notes about GPUs that do not change.
fn planned_text(planned: &ExplainedPlan) -> String {
    let plan = &planned.plan;
    let mut text = String::new();
    let changed: Vec<&GpuPlan> = plan.gpus.iter().filter(|gpu| gpu.changed).collect();
    let _ = match changed.len() {
        0 => writeln!(text, "No GPU changes."),
        1 => writeln!(text, "1 of {} GPUs changes:", plan.gpus.len()),
        many => writeln!(text, "{many} of {} GPUs change:", plan.gpus.len()),
    };
    for gpu in changed {
        let _ = writeln!(text, "  {} on node {}, {}: {}", gpu.uuid, gpu.node, gpu.mode, slices_text(gpu));
    }
    let _ = writeln!(text, "{} of {} pods fit.", plan.placements.len(), planned.report.pods.len());
    for pod in &planned.report.pods {
        let _ = writeln!(text, "  {} {}: {}", if pod.placed { "+" } else { "-" }, pod.pod, pod.reason);
    }
    for note in &planned.report.nodes {
        let gpu = note.gpu.as_ref().map(|gpu| format!("GPU {gpu} on ")).unwrap_or_default();
        let _ = writeln!(text, "Unchanged: {gpu}node {}: {}.", note.node, note.reason);
    }
    text
}

/// Returns the slices of a GPU, such as `2 × nvidia.com/gpu-10gb, nvidia.com/mig-3g.20gb at 4 (in
/// use)`.
fn slices_text(gpu: &GpuPlan) -> String {
    if gpu.slices.is_empty() {
        return "whole".to_owned();
    }
    let equal =
        |a: &SliceGroup, b: &SliceGroup| (a.placement, &a.resource, a.in_use) == (b.placement, &b.resource, b.in_use);
    let describe = |run: &[SliceGroup]| {
        let slice = run.first()?;
        let count: u32 = run.iter().map(|slice| slice.count).sum();
        let times = if count == 1 { String::new() } else { format!("{count} × ") };
        let place = slice.placement.map(|place| format!(" at {place}")).unwrap_or_default();
        Some(format!("{times}{}{place}{}", slice.resource, if slice.in_use { " (in use)" } else { "" }))
    };
    gpu.slices.chunk_by(equal).filter_map(describe).collect::<Vec<_>>().join(", ")
}
