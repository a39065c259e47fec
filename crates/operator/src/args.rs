//! The command line of `cleave operator`.
use std::net::SocketAddr;

/// Divides GPUs according to the cluster's `SharingPolicy` objects, places pods that request
/// shares, and reports.
#[derive(Debug, Clone, clap::Args)]
pub struct OperatorArgs {
    /// The namespace Cleave runs in. It has the agents' pods and the lease.
    #[arg(long, env = "POD_NAMESPACE", default_value = "cleave-system")]
    pub namespace: String,

    /// Label selector of the agents' pods. A node that runs one gets a `GpuNode`.
    #[arg(
        long,
        env = "CLEAVE_AGENT_SELECTOR",
        value_name = "SELECTOR",
        default_value = "app.kubernetes.io/name=cleave,app.kubernetes.io/component=agent"
    )]
    pub agent_selector: String,

    /// The name of the lease. Only its holder writes to the cluster.
    #[arg(long, env = "CLEAVE_LEASE", value_name = "NAME", default_value = "cleave-operator")]
    pub lease: String,

    /// This process's identity in the lease. It must be unique among running operators and stay the
    /// same when the container restarts.
    #[arg(long, env = "POD_NAME", value_name = "NAME")]
    pub identity: String,

    /// The address that serves /metrics, /healthz and /readyz.
    #[arg(long, env = "CLEAVE_METRICS_ADDR", value_name = "ADDR", default_value = "0.0.0.0:8080")]
    pub metrics_addr: SocketAddr,

    /// Enables the admission webhook. The value names its Service, its Secret and its
    /// `MutatingWebhookConfiguration`, which the chart creates.
    #[arg(long, env = "CLEAVE_WEBHOOK", value_name = "NAME")]
    pub webhook: Option<String>,

    /// Taints nodes with `cleave.dev/unhealthy:NoSchedule` while all of their GPUs are lost or need
    /// a reset, or while their agent has been not ready for a minute. Needs permission to patch
    /// nodes.
    #[arg(long, env = "CLEAVE_TAINT_UNHEALTHY", default_value_t = false)]
    pub taint_unhealthy: bool,

    /// Replaces MPS hosts whose revision is older than the newest of their `DaemonSet`, once
    /// nothing uses MPS on their node. The value is the label selector of their pods. Needs
    /// permission to delete pods and to list and watch controller revisions in its namespace.
    #[arg(long, env = "CLEAVE_REPLACE_MPS_HOSTS", value_name = "SELECTOR")]
    pub replace_mps_hosts: Option<String>,

    /// Seconds for which a pod must be unplaceable on every GPU before it is released as
    /// unschedulable.
    #[arg(long, env = "CLEAVE_UNSCHEDULABLE_AFTER_SECONDS", value_name = "SECONDS", default_value_t = 180)]
    pub unschedulable_after_seconds: u64,

    /// The address the admission webhook listens on.
    #[arg(long, env = "CLEAVE_WEBHOOK_ADDR", value_name = "ADDR", default_value = "0.0.0.0:9443")]
    pub webhook_addr: SocketAddr,
}
