//! `cleave quotas import`: converts the quotas of Nos and Kueue to `GpuQuota`s.
//!
//! ```text
//!  YAML ─[input]─▶ Objects ─[nos]────▶ Draft ─[finish]─▶ Import ─[text]─▶ YAML, report
//!                     └────[kueue]──▶┘
//! ```
//!
//! Whatever has no counterpart is reported: a line of a quota in a comment above the `GpuQuota`, an
//! object that is not imported in the report. Every printed `GpuQuota` satisfies the rules of its
//! CRD and of the operator.
mod amounts;
mod finish;
mod input;
mod kueue;
mod live;
mod nos;
mod text;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;
use cleave_api::GpuQuota;
use cleave_api::gpuquota::{QuotaMode, QuotaNamespaceSelector};
use cleave_plan::quota::{Amount, Unit};

use crate::client::ClusterArgs;
use crate::output::{print, read_input};
use input::Objects;

pub use text::{render_report, render_yaml};

/// Examples in the help of `cleave quotas import`.
pub(super) const HELP_EXAMPLES: &str = "\
Examples:
  cleave quotas import quotas.yaml > gpuquotas.yaml
  kubectl get elasticquotas,compositeelasticquotas -A -o yaml | cleave quotas import -
  cleave quotas import --live --mode Count > gpuquotas.yaml";

/// Options of `cleave quotas import`.
#[derive(Debug, Clone, clap::Args)]
#[command(group(clap::ArgGroup::new("source").required(true).args(["files", "live"])))]
pub struct ImportArgs {
    /// YAML files, as `kubectl get -o yaml` prints them; `-` reads standard input.
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Read the objects from the cluster.
    #[arg(long, conflicts_with = "files")]
    live: bool,
    /// Mode of the GpuQuotas [default: Enforce for quotas of Nos, Count for those of Kueue].
    #[arg(long, value_enum, value_name = "MODE", ignore_case = true)]
    mode: Option<ImportMode>,
    /// Connection to the cluster.
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Mode of the printed quotas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "PascalCase")]
pub enum ImportMode {
    /// Pods are held and evicted.
    Enforce,
    /// Use is counted and reported.
    Count,
}

impl From<ImportMode> for QuotaMode {
    fn from(mode: ImportMode) -> Self {
        match mode {
            ImportMode::Enforce => Self::Enforce,
            ImportMode::Count => Self::Count,
        }
    }
}

/// The result of an import.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Import {
    /// The `GpuQuota`s, in the order of the input.
    pub quotas: Vec<ImportedQuota>,
    /// Objects that limit no GPUs, and so have no counterpart.
    pub skipped: Vec<Refusal>,
    /// Objects that could not be imported.
    pub refused: Vec<Refusal>,
    /// Differences that concern all quotas.
    pub notes: Vec<String>,
}

/// A `GpuQuota`, and what was lost on the way.
#[derive(Debug, Clone, PartialEq)]
pub struct ImportedQuota {
    /// Kind and name of the imported object.
    pub origin: String,
    /// The quota.
    pub quota: GpuQuota,
    /// What has no counterpart, or differs, one sentence each.
    pub notes: Vec<String>,
}

/// An object that was not imported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Kind and name of the object.
    pub origin: String,
    /// Why the object was not imported.
    pub reason: String,
}

/// A quota before names, weights and units of all quotas are known.
#[derive(Debug, Clone)]
struct Draft {
    origin: String,
    /// Names of the quota, the preferred one first.
    names: Vec<String>,
    namespaces: Selection,
    /// Models of the pool. Empty if the pool is not known.
    models: Vec<String>,
    unit: Unit,
    min: Amount,
    max: Option<Amount>,
    lend: Option<Amount>,
    /// A number in whose ratio the weights are.
    weight: u64,
    mode: QuotaMode,
    notes: Vec<String>,
}

/// The namespaces of a draft.
#[derive(Debug, Clone)]
enum Selection {
    Names(Vec<String>),
    Labels(QuotaNamespaceSelector),
}

/// Runs `cleave quotas import`. The exit status is 1 if an object could not be imported.
pub(crate) async fn run(args: ImportArgs) -> Result<ExitCode> {
    let mut objects = Objects::default();
    if args.live {
        live::read(&args.cluster.connect().await?, &mut objects).await?;
    }
    for path in &args.files {
        let name = path.display();
        let text = read_input(path).with_context(|| format!("failed to read {name}"))?;
        objects.add_documents(&text).with_context(|| name.to_string())?;
    }
    let imported = convert(objects, args.mode)?;
    eprint!("{}", render_report(&imported));
    print(&render_yaml(&imported)?)?;
    Ok(if imported.refused.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Converts the objects of a YAML stream. Pure.
///
/// # Errors
/// Returns an error if the text is not YAML, or has no quota of Nos or Kueue.
pub fn import(text: &str, mode: Option<ImportMode>) -> Result<Import> {
    let mut objects = Objects::default();
    objects.add_documents(text)?;
    convert(objects, mode)
}

fn convert(mut objects: Objects, mode: Option<ImportMode>) -> Result<Import> {
    let foreign: Vec<String> = objects.foreign.iter().cloned().collect();
    ensure!(
        !objects.is_empty() || foreign.is_empty(),
        "the input has no quota of Nos or Kueue. These kinds are not imported: {}",
        foreign.join(", ")
    );
    ensure!(
        !objects.is_empty(),
        "the input has no ElasticQuota or CompositeElasticQuota of Nos, and no ClusterQueue of Kueue"
    );
    let mut imported = Import { refused: std::mem::take(&mut objects.malformed), ..Import::default() };
    if !foreign.is_empty() {
        imported.notes.push(format!("These kinds are not imported: {}.", foreign.join(", ")));
    }
    let mut drafts = nos::drafts(&objects, mode.map_or(QuotaMode::Enforce, QuotaMode::from), &mut imported);
    drafts.extend(kueue::drafts(&objects, mode.map_or(QuotaMode::Count, QuotaMode::from), &mut imported));
    finish::finish(drafts, &mut imported);
    Ok(imported)
}
