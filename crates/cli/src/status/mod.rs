//! `cleave status`: shows nodes, GPUs, policies, quotas, and the pods that use GPUs.
//!
//! The command reads only `GpuNode`s, `SharingPolicy`s and `GpuQuota`s. The agents and the operator
//! write the status of these objects.
pub mod report;
mod text;

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use cleave_api::gpunode::GpuNode;
use cleave_api::sharingpolicy::SharingPolicy;
use kube::Api;
use kube::api::ListParams;
use kube::core::DeserializeGuard;

use crate::client::ClusterArgs;
use crate::gpu::gpu_node_not_found;
use crate::output::{print, to_json};
use crate::quotas::list_quotas_if_allowed;
use report::StatusReport;

pub(crate) use text::NO_GPU_NODES;
pub use text::render;

/// Options of `cleave status`.
#[derive(Debug, Clone, clap::Args)]
pub struct StatusArgs {
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = StatusFormat::Table)]
    output: StatusFormat,
    /// Show only this node.
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    /// Connection to the cluster.
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// The format of the status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum StatusFormat {
    /// Tables.
    Table,
    /// Tables with all columns.
    Wide,
    /// One JSON object.
    Json,
}

/// Runs `cleave status`.
pub(crate) async fn run(args: StatusArgs) -> Result<()> {
    let client = args.cluster.connect().await?;
    let all = ListParams::default();
    let nodes = Api::<DeserializeGuard<GpuNode>>::all(client.clone()).list(&all).await;
    let nodes = nodes.context("failed to list GpuNodes")?;
    let policies = Api::<DeserializeGuard<SharingPolicy>>::all(client.clone()).list(&all).await;
    let policies = policies.context("failed to list SharingPolicies")?;
    let report = StatusReport::new(nodes.items, policies.items, args.node.as_deref());
    let report = report.with_quotas(list_quotas_if_allowed(&client).await?);
    if let Some(node) = args.node.filter(|_| report.nodes.is_empty()) {
        return Err(gpu_node_not_found(&node));
    }
    print(&match args.output {
        StatusFormat::Table => render(&report, false),
        StatusFormat::Wide => render(&report, true),
        StatusFormat::Json => to_json(&report)?,
    })
}
