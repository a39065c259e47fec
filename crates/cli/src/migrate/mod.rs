//! `cleave migrate`: translates the configuration of other software that shares GPUs.
//!
//! The command writes nothing to a cluster. The report has a line for each setting of the input.
//! The line names the counterpart in Cleave, or explains why Cleave has none. The command ignores
//! no key silently.
//!
//! ```text
//!  files ───┐          ┌▶[fields, sources]──▶ Notes: the report
//!           ├─[read]─▶[input]─▶ Input ─[groups]─▶ Group ─[policies]─▶ Plan ─[preview]─▶ pods
//!  cluster ─┘                                                          │
//!                                                                   [text]─▶ terminal
//! ```
mod fields;
mod groups;
mod input;
mod migration;
mod pods;
mod policies;
mod preview;
mod read;
mod report;
mod sources;
#[cfg(test)]
mod tests;
mod text;
mod yaml;

use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;

use crate::client::ClusterArgs;
use crate::output::{print, to_json};
use migration::migrate;

/// The input formats and examples in the help of `cleave migrate`.
pub(crate) const INPUT_HELP: &str = "\
Input:
  YAML or JSON files, recognized by their content:
  - configurations of NVIDIA's device plugin, also in ConfigMaps
  - configurations of mig-parted (mig-configs), also in ConfigMaps
  - values of the charts of NVIDIA's device plugin, the GPU Operator, Nos and
    HAMi, and ClusterPolicy objects
  - configurations of HAMi's scheduler and nodes, also in ConfigMaps
  - node pools of GKE, as `gcloud container node-pools describe --format yaml`
    prints them
  - Nodes, whose labels select their configurations. Without Nodes, the command
    translates all configurations.
  - for --preview: Pods, Deployments and other objects that create pods

Examples:
  kubectl get nodes -o yaml | cleave migrate config.yaml -
  cleave migrate config.yaml -o policies > policies.yaml
  cleave migrate config.yaml -o values > values.yaml
  cleave migrate --from-cluster --preview";

/// Options of `cleave migrate`.
#[derive(Debug, Clone, clap::Args)]
pub struct MigrateArgs {
    /// YAML files with configurations, values, nodes and pods; `-` reads standard input.
    #[arg(required_unless_present = "from_cluster", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Read Nodes, `ConfigMaps`, `ClusterPolicies` and, for --preview, Pods from the cluster.
    #[arg(long)]
    from_cluster: bool,
    /// Show what each pod of the input would get from Cleave.
    #[arg(long)]
    preview: bool,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = MigrateFormat::Text)]
    output: MigrateFormat,
    /// Connection to the cluster.
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// The format of the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum MigrateFormat {
    /// The report as human-readable text.
    Text,
    /// Everything as one JSON object.
    Json,
    /// Only the policies, as YAML.
    Policies,
    /// Only the values for the chart, as a values file.
    Values,
}

/// Runs `cleave migrate`.
///
/// # Errors
/// Returns an error if the input cannot be read, or if the software that reads a setting would
/// refuse it.
pub(crate) async fn run(args: MigrateArgs) -> Result<()> {
    let mut documents = read::from_files(&args.files)?;
    if args.from_cluster {
        documents.extend(read::from_cluster(&args.cluster.connect().await?, args.preview).await?);
    }
    let migration = migrate(documents, args.preview)?;
    print(&match args.output {
        MigrateFormat::Text => text::render_report(&migration),
        MigrateFormat::Json => to_json(&migration)?,
        MigrateFormat::Policies => text::policies_yaml(&migration)?,
        MigrateFormat::Values => text::values_yaml(&migration)?,
    })
}

/// The rendered result of [`translate`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Translation {
    /// The outcome for each setting, and what each pod gets.
    pub report: String,
    /// The `SharingPolicy`s, as a YAML stream.
    pub policies: String,
    /// The values for the chart.
    pub values: String,
}

/// Translates the contents of files, and shows what each pod of the input would get. Each entry of
/// `files` is a file name and its content.
///
/// # Errors
/// Returns an error if a file is not valid YAML, or if the software that reads a setting would
/// refuse it.
pub fn translate(files: &[(&str, &str)]) -> Result<Translation> {
    let mut documents = Vec::new();
    for (name, text) in files {
        documents.extend(read::parse_documents(name, text)?);
    }
    let migration = migrate(documents, true)?;
    Ok(Translation {
        report: text::render_report(&migration),
        policies: text::policies_yaml(&migration)?,
        values: text::values_yaml(&migration)?,
    })
}
