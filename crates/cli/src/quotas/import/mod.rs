//! `cleave quotas import`: converts the quotas of Nos and Kueue to `GpuQuota`s.
//!
//! ```text
//!  YAML ─[input]─▶ Objects ─[nos]────▶ Draft ─[finish]─▶ Import ─[text]─▶ YAML, report
//!                     └────[kueue]──▶┘
//! ```
//!
//! The command reports everything that has no counterpart. A comment above each `GpuQuota` lists
//! the settings that were dropped. The report lists the objects that were not imported. Every
//! printed `GpuQuota` satisfies the rules of its CRD and of the operator.
mod amounts;
mod finish;
mod input;
mod kueue;
mod live;
mod model;
mod nos;
mod text;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;
use cleave_api::gpuquota::QuotaMode;

use crate::client::ClusterArgs;
use crate::output::{print, read_input};
use input::Objects;

pub use model::{Import, ImportedQuota, Refusal};
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
    /// Mode of the GpuQuotas [default: Enforce for quotas of Nos, Count for quotas of Kueue].
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
    /// Limit pods, and evict borrowers for a guarantee.
    Enforce,
    /// Only count and report usage.
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
