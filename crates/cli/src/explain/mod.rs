//! `cleave explain pod`: explains why a pod waits or where it runs, and what would help.
//!
//! The command reads the objects that the operator reads, and calls the operator's code. The
//! command writes nothing. The result can differ from the operator's last decision if the cluster
//! has changed since then.
//!
//! ```text
//!  cluster ─[live]─▶ LiveCluster ─[view]─▶ verdict, allocations ┐
//!                      └──[nodes]──▶ nodes and GPUs ────────────┼─▶ Explanation ─[text]─▶ terminal
//!                                        └──[advice]────────────┘
//! ```
mod advice;
mod live;
mod nodes;
mod quota;
pub mod report;
mod text;
mod view;

use anyhow::{Context as _, Result, bail};
use kube::Client;

use crate::client::{ClusterArgs, InstallationArgs};
use crate::output::{OutputFormat, print, to_json};

pub use live::LiveCluster;
pub use text::render;
pub use view::explain_pod;

/// Options of `cleave explain`.
#[derive(Debug, Clone, clap::Args)]
pub struct ExplainArgs {
    /// The object to explain.
    #[command(subcommand)]
    what: ObjectKind,
}

/// The kinds of objects that `cleave explain` explains.
#[derive(Debug, Clone, clap::Subcommand)]
enum ObjectKind {
    /// Explain why a pod waits, or show which GPU it has.
    ///
    /// Shows the pod's requests, the free slices of each GPU, why the pod waits, and what would
    /// help.
    #[command(after_long_help = HELP_EXAMPLES)]
    Pod(PodArgs),
}

/// Examples in the help of `cleave explain pod`.
const HELP_EXAMPLES: &str = "\
Examples:
  cleave explain pod trainer
  cleave explain pod team-a/trainer -o json";

/// Options of `cleave explain pod`.
#[derive(Debug, Clone, clap::Args)]
struct PodArgs {
    /// NAME or NAMESPACE/NAME of the pod.
    #[arg(value_name = "POD")]
    pod: String,
    /// Namespace of the pod [default: the namespace of the kubeconfig's context].
    #[arg(short, long, value_name = "NAME")]
    namespace: Option<String>,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = OutputFormat::Text)]
    output: OutputFormat,
    /// Connection to the cluster.
    #[command(flatten)]
    cluster: ClusterArgs,
    /// The Cleave installation.
    #[command(flatten)]
    install: InstallationArgs,
}

/// Runs `cleave explain`.
pub(crate) async fn run(args: ExplainArgs) -> Result<()> {
    let ObjectKind::Pod(args) = args.what;
    let config = args.cluster.kube_config().await?;
    let name = full_pod_name(&args.pod, args.namespace.as_deref(), &config.default_namespace)?;
    let client = Client::try_from(config).context("failed to create the Kubernetes client")?;
    let live = LiveCluster::observe(&client, &args.install, &name).await?;
    let Some(explanation) = explain_pod(&live, &name) else {
        bail!("pod {name} not found. Run `kubectl get pods --all-namespaces` to list pods.");
    };
    print(&match args.output {
        OutputFormat::Text => render(&explanation),
        OutputFormat::Json => to_json(&explanation)?,
    })
}

/// Returns the full name of a pod, `namespace/name`.
fn full_pod_name(pod: &str, namespace: Option<&str>, default: &str) -> Result<String> {
    let (prefix, name) = match pod.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, pod),
    };
    if let (Some(prefix), Some(namespace)) = (prefix, namespace)
        && prefix != namespace
    {
        bail!("{pod} is not in namespace {namespace}. Specify the namespace once.");
    }
    let namespace = prefix.or(namespace).unwrap_or(default);
    if namespace.is_empty() || name.is_empty() || name.contains('/') {
        bail!("{pod:?} is not a pod name. Use NAME or NAMESPACE/NAME.");
    }
    Ok(format!("{namespace}/{name}"))
}

#[cfg(test)]
mod tests {
    use super::full_pod_name;

    #[test]
    fn a_pod_name_without_a_namespace_gets_the_default_namespace() {
        assert_eq!(full_pod_name("team/p", None, "mine").unwrap(), "team/p");
        assert_eq!(full_pod_name("p", None, "mine").unwrap(), "mine/p");
        assert_eq!(full_pod_name("p", Some("team"), "mine").unwrap(), "team/p");
        assert_eq!(full_pod_name("team/p", Some("team"), "mine").unwrap(), "team/p");
    }

    #[test]
    fn a_malformed_pod_name_is_rejected() {
        for (pod, namespace) in [("team/p", Some("other")), ("", None), ("team/", None), ("/p", None), ("a/b/c", None)]
        {
            assert!(full_pod_name(pod, namespace, "mine").is_err(), "{pod} {namespace:?}");
        }
    }
}
