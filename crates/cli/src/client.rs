//! Connects to a cluster.
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

/// Options that select the cluster.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ClusterArgs {
    /// Use this context of the kubeconfig.
    #[arg(long, value_name = "NAME", help_heading = "Cluster options")]
    pub context: Option<String>,
    /// Use this kubeconfig [default: $KUBECONFIG, ~/.kube/config, or the pod's service account]
    #[arg(long, value_name = "FILE", help_heading = "Cluster options")]
    pub kubeconfig: Option<PathBuf>,
}

/// Options that describe the Cleave installation. The defaults match the defaults of the chart.
#[derive(Debug, Clone, clap::Args)]
pub struct InstallationArgs {
    /// Namespace that Cleave runs in.
    #[arg(long, value_name = "NAME", default_value = "cleave-system", help_heading = "Cluster options")]
    pub cleave_namespace: String,
    /// Label selector of the agents' pods.
    #[arg(
        long,
        value_name = "SELECTOR",
        default_value = "app.kubernetes.io/name=cleave,app.kubernetes.io/component=agent",
        hide_default_value = true,
        help_heading = "Cluster options"
    )]
    pub agent_selector: String,
}

impl ClusterArgs {
    /// Finds the API server and the credentials, from the kubeconfig or the pod's service account.
    ///
    /// # Errors
    /// Returns an error if the kubeconfig cannot be read or does not have the context, or if there
    /// is neither a kubeconfig nor a service account.
    pub(crate) async fn kube_config(&self) -> Result<Config> {
        // TLS needs one provider of cryptography per process. Ignore errors: the process may
        // already have a provider.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let options = KubeConfigOptions { context: self.context.clone(), ..KubeConfigOptions::default() };
        let config = match &self.kubeconfig {
            Some(path) => match Kubeconfig::read_from(path) {
                Ok(kubeconfig) => Config::from_custom_kubeconfig(kubeconfig, &options).await,
                Err(error) => Err(error),
            },
            None if options.context.is_some() => Config::from_kubeconfig(&options).await,
            None => return Config::infer().await.context("failed to find a cluster"),
        };
        config.context("failed to load the kubeconfig")
    }

    /// Connects to the cluster. See [`ClusterArgs::kube_config`].
    pub(crate) async fn connect(&self) -> Result<Client> {
        Client::try_from(self.kube_config().await?).context("failed to create the Kubernetes client")
    }
}
