//! `cleave quotas`: shows quotas, and imports quotas of other systems.
//!
//! The command shows what the operator reported in the status of each `GpuQuota`. The command makes
//! no decisions of its own.
pub mod import;
pub mod report;
mod text;

use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;
use cleave_api::GpuQuota;
use kube::api::ListParams;
use kube::core::DeserializeGuard;
use kube::{Api, Client};

use crate::client::ClusterArgs;
use crate::output::{print, to_json, to_yaml};
use report::QuotasReport;

pub(crate) use text::render_short;
pub use text::{render, render_one};

/// Examples in the help of `cleave quotas`.
pub(crate) const HELP_EXAMPLES: &str = "\
Examples:
  cleave quotas
  cleave quotas team-a
  cleave quotas -o json
  cleave quotas import quotas.yaml";

/// Options of `cleave quotas`.
#[derive(Debug, Clone, clap::Args)]
pub struct QuotasArgs {
    /// Show only this quota, with all details.
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = QuotasFormat::Table)]
    output: QuotasFormat,
    /// Connection to the cluster.
    #[command(flatten)]
    cluster: ClusterArgs,
    /// The subcommand, if any.
    #[command(subcommand)]
    command: Option<QuotasCommand>,
}

/// The subcommands of `cleave quotas`.
#[derive(Debug, Clone, clap::Subcommand)]
enum QuotasCommand {
    /// Convert quotas of Nos and Kueue to GpuQuotas.
    ///
    /// Reads ElasticQuota and CompositeElasticQuota of Nos, and ClusterQueue, LocalQueue and
    /// ResourceFlavor of Kueue. Prints GpuQuotas as YAML. Comments in the YAML list settings
    /// without a counterpart. A report on standard error lists objects that were not imported.
    /// Writes nothing to the cluster.
    ///
    /// Exit status: 0 if no object was refused, 1 otherwise.
    #[command(after_long_help = import::HELP_EXAMPLES)]
    Import(import::ImportArgs),
}

/// The format of the quotas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum QuotasFormat {
    /// A table.
    Table,
    /// A table with all columns.
    Wide,
    /// One JSON object.
    Json,
    /// One YAML document.
    Yaml,
}

/// Runs `cleave quotas`.
pub(crate) async fn run(args: QuotasArgs) -> Result<ExitCode> {
    if let Some(QuotasCommand::Import(args)) = args.command {
        return import::run(args).await;
    }
    let client = args.cluster.connect().await?;
    let report = QuotasReport::new(list_quotas(&client).await?);
    let text = match &args.name {
        None => match args.output {
            QuotasFormat::Table => render(&report, false),
            QuotasFormat::Wide => render(&report, true),
            QuotasFormat::Json => to_json(&report)?,
            QuotasFormat::Yaml => to_yaml(&report)?,
        },
        Some(name) => {
            let Some(quota) = report.quotas.iter().find(|quota| &quota.name == name) else {
                bail!("GpuQuota {name} not found. Run `cleave quotas` to list quotas.");
            };
            match args.output {
                QuotasFormat::Table | QuotasFormat::Wide => render_one(quota),
                QuotasFormat::Json => to_json(quota)?,
                QuotasFormat::Yaml => to_yaml(quota)?,
            }
        }
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// Lists the quotas of a cluster. Returns none if the cluster lacks the CRD.
async fn list_quotas(client: &Client) -> Result<Vec<DeserializeGuard<GpuQuota>>> {
    let quotas = Api::<DeserializeGuard<GpuQuota>>::all(client.clone());
    match quotas.list(&ListParams::default()).await {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(Vec::new()),
        listed => Ok(listed.context("failed to list GpuQuotas")?.items),
    }
}

/// Lists the quotas of a cluster for commands that also show other objects. Returns none if the
/// user may not list quotas, or if the cluster lacks the CRD.
pub(crate) async fn list_quotas_if_allowed(client: &Client) -> Result<Vec<DeserializeGuard<GpuQuota>>> {
    let quotas = Api::<DeserializeGuard<GpuQuota>>::all(client.clone());
    match quotas.list(&ListParams::default()).await {
        Err(kube::Error::Api(status)) if matches!(status.code, 403 | 404) => Ok(Vec::new()),
        listed => Ok(listed.context("failed to list GpuQuotas")?.items),
    }
}

#[cfg(test)]
mod tests {
    use kube::client::Body;
    use tower_test::mock;

    use super::*;

    /// Calls [`list_quotas_if_allowed`] with a mock API server that responds with this status code.
    /// Returns the number of quotas.
    async fn count_listed_quotas(code: u16) -> Result<usize> {
        let (service, mut server) = mock::pair::<http::Request<Body>, http::Response<Body>>();
        let client = Client::new(service, "default");
        let listing = tokio::spawn(async move { list_quotas_if_allowed(&client).await });
        let (_, reply) = server.next_request().await.context("no request")?;
        let failure = serde_json::json!({"kind": "Status", "status": "Failure", "code": code, "message": "no"});
        let body = Body::from(failure.to_string().into_bytes());
        reply.send_response(http::Response::builder().status(code).body(body)?);
        listing.await?.map(|quotas| quotas.len())
    }

    #[tokio::test]
    async fn without_the_crd_or_the_right_to_list_quotas_other_commands_show_no_quotas() {
        for code in [403, 404] {
            assert_eq!(count_listed_quotas(code).await.ok(), Some(0), "{code}");
        }
        assert!(count_listed_quotas(500).await.is_err());
    }
}
