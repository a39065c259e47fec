//! `cleave plan`: what would be done for the pods that wait, and why.
use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::ValueEnum;
use cleave_operator::dry::{self, DryRun};
use cleave_operator::plan::Invalid;
use cleave_plan::{GpuPlan, Planned, Policy, Snapshot};

/// Plan which GPUs are cut into what, and which waiting pod goes where: for a snapshot in a file, or for the cluster as it is.
///
/// Nothing is written, and nothing done.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("what").required(true).args(["snapshot", "live"])))]
pub(crate) struct Args {
    /// Snapshot of a cluster, as JSON; `-` is standard input.
    #[arg(long, value_name = "FILE")]
    snapshot: Option<PathBuf>,
    /// The cluster that kubectl talks to, as it is now: what the operator would do, and why.
    #[arg(long)]
    pub(crate) live: bool,
    /// How the plan is printed.
    #[arg(long, value_enum, default_value_t = Output::Text)]
    output: Output,
    /// MPS shares of each GPU of the snapshot that does not say how many.
    #[arg(long, value_name = "N", conflicts_with = "live")]
    units: Option<u32>,
    /// Time-sliced replicas of each GPU of the snapshot that does not say how many.
    #[arg(long, value_name = "N", conflicts_with = "live")]
    replicas: Option<u32>,
    /// Where Cleave runs in the cluster.
    #[arg(long, value_name = "NAME", default_value = "cleave-system", requires = "live")]
    namespace: String,
    /// Labels of the agents' pods in the cluster.
    #[arg(
        long,
        value_name = "SELECTOR",
        default_value = "app.kubernetes.io/name=cleave,app.kubernetes.io/component=agent",
        requires = "live"
    )]
    agent_selector: String,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Output {
    /// For a program.
    Json,
    /// For a person.
    Text,
}

/// Prints the plan of a snapshot on standard output.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let path = args.snapshot.as_ref().context("no snapshot is given")?;
    let snapshot = read(path)?;
    let policy = Policy { units: args.units, replicas: args.replicas, ..Policy::default() };
    let planned = cleave_plan::plan(&snapshot, &policy);
    let wrong = cleave_plan::check(&snapshot, &planned.plan);
    if !wrong.is_empty() {
        let wrong: Vec<String> = wrong.iter().map(ToString::to_string).collect();
        bail!("the plan breaks rules and must not be used:\n{}", wrong.join("\n"));
    }
    print(&match args.output {
        Output::Json => as_json(&json(&planned)?)?,
        Output::Text => text(&planned),
    })
}

/// Prints what the operator would do now.
pub(crate) async fn run_live(args: &Args) -> anyhow::Result<()> {
    // An error says that one is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = kube::Client::try_default().await.context("finding the API server")?;
    let observed = dry::observe(&client, &args.namespace, &args.agent_selector).await?;
    print(&told(&dry::dry_run(&observed)?, args.output)?)
}

/// What the operator would do, and why.
pub(crate) fn told(run: &DryRun, output: Output) -> anyhow::Result<String> {
    match output {
        Output::Json => {
            let mut value = run.outcome.planned.as_ref().map_or_else(|| Ok(serde_json::json!({})), json)?;
            if let Some(fields) = value.as_object_mut() {
                let writes = run.changes.iter().map(|change| (change.node.clone(), serde_json::json!(change.spec)));
                fields.insert("writes".to_owned(), serde_json::Value::Object(writes.collect()));
                fields.insert("changing".to_owned(), serde_json::json!(run.outcome.changing));
            }
            as_json(&value)
        }
        Output::Text => {
            let mut text = match &run.outcome.planned {
                Some(planned) => text(planned),
                None => "No GPU follows a policy that cuts it as pods ask for it.\n".to_owned(),
            };
            for node in &run.outcome.changing {
                let _ = writeln!(text, "Still being changed, and not cut meanwhile: {node}.");
            }
            for ((node, gpu), why) in &run.outcome.stuck {
                let _ = writeln!(text, "Left as it is: {node} GPU {gpu}, {why}.");
            }
            for (policy, report) in &run.plan.policies {
                match &report.invalid {
                    Some(Invalid::Malformed(error)) => {
                        let _ = writeln!(text, "Policy {policy} cannot be read: {error}.");
                    }
                    Some(Invalid::Refused(error)) => {
                        let _ = writeln!(text, "Policy {policy} means nothing: {error}.");
                    }
                    None => {}
                }
                for (gpu, cannot) in &report.cannot {
                    let _ = writeln!(text, "Policy {policy} cannot have GPU {} of {}: {cannot}.", gpu.index, gpu.node);
                }
            }
            Ok(text)
        }
    }
}

/// Writes to standard output; whoever reads it may have seen enough.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("writing the plan"),
    }
}

fn json(planned: &Planned) -> anyhow::Result<serde_json::Value> {
    let mut value = serde_json::to_value(&planned.plan).context("the plan as JSON")?;
    if let Some(fields) = value.as_object_mut() {
        fields.insert("notes".to_owned(), serde_json::to_value(&planned.report.nodes).context("the notes as JSON")?);
    }
    Ok(value)
}

fn as_json(value: &serde_json::Value) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(value).context("the plan as JSON")? + "\n")
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
