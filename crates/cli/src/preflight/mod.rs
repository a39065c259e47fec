//! `cleave preflight`: checks a cluster before the chart is installed.
//!
//! The command reads lists of objects and writes nothing. A list that cannot be read becomes a
//! finding.
//!
//! ```text
//!  cluster ─┐
//!           ├─[read]─▶ Facts ─[checks]─▶ Report ─[text]─▶ terminal
//!  files ───┘                 (platform)    └─ values for the chart
//! ```
mod checks;
mod facts;
mod platform;
mod read;
mod report;
#[cfg(test)]
mod tests;
pub(crate) mod text;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::ValueEnum;
use cleave_plan::constraints::Labels;

use crate::client::ClusterArgs;
use crate::output::{print, to_json};
use checks::check;
use facts::Target;
use report::Level;

/// Examples in the help of `cleave preflight`.
pub(crate) const HELP_EXAMPLES: &str = "\
Examples:
  cleave preflight
  cleave preflight --namespace gpu-sharing --node-selector gpu=cleave
  cleave preflight -o values > values.yaml
  cleave preflight --from support-case/";

/// Options of `cleave preflight`.
#[derive(Debug, Clone, clap::Args)]
pub struct PreflightArgs {
    /// Namespace in which Cleave will be installed.
    #[arg(short, long, value_name = "NAME", default_value = "cleave-system")]
    namespace: String,
    /// Labels of the nodes that Cleave will manage, as LABEL=VALUE,... [default: all nodes with
    /// GPUs]
    #[arg(long, value_name = "LABELS", default_value = "", hide_default_value = true, value_parser = read::parse_labels)]
    node_selector: Labels,
    /// Instead of the cluster, read files that `kubectl get -o json` wrote.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["context", "kubeconfig"])]
    from: Option<PathBuf>,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = PreflightFormat::Text)]
    output: PreflightFormat,
    /// Connection to the cluster.
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// The format of the report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PreflightFormat {
    /// Human-readable text.
    Text,
    /// One JSON object.
    Json,
    /// Only the values for the chart, as a values file.
    Values,
}

/// Runs `cleave preflight`. The exit status is 1 if a finding is an error.
///
/// # Errors
/// Returns an error if the API server does not respond.
pub(crate) async fn run(args: PreflightArgs) -> Result<ExitCode> {
    let facts = match &args.from {
        Some(directory) => read::from_directory(directory),
        None => read::from_cluster(&args.cluster.connect().await?, &args.namespace).await?,
    };
    let target = Target { namespace: args.namespace, node_selector: args.node_selector };
    let report = check(&facts, &target);
    print(&match args.output {
        PreflightFormat::Text => text::render(&report)?,
        PreflightFormat::Json => to_json(&report)?,
        PreflightFormat::Values => text::values_yaml(&report)?,
    })?;
    Ok(if report.count(Level::Error) == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
