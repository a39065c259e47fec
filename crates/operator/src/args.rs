//! The command line of `cleave operator`.
use std::net::SocketAddr;

/// Plans how GPUs are shared, by the cluster's `SharingPolicy` objects.
#[derive(Debug, Clone, clap::Args)]
pub struct OperatorArgs {
    /// The namespace that Cleave runs in: its agents' pods and the lease are there.
    #[arg(long, env = "POD_NAMESPACE", default_value = "cleave-system")]
    pub namespace: String,

    /// Labels of the agents' pods: where one runs, the node gets a `GpuNode`.
    #[arg(
        long,
        env = "CLEAVE_AGENT_SELECTOR",
        value_name = "SELECTOR",
        default_value = "app.kubernetes.io/name=cleave,app.kubernetes.io/component=agent"
    )]
    pub agent_selector: String,

    /// The lease whose holder writes.
    #[arg(long, env = "CLEAVE_LEASE", value_name = "NAME", default_value = "cleave-operator")]
    pub lease: String,

    /// Who this process is in the lease: unique among those that run at once, and the same after a
    /// restart in place.
    #[arg(long, env = "POD_NAME", value_name = "NAME")]
    pub identity: String,

    /// Where /metrics, /healthz and /readyz are served.
    #[arg(long, env = "CLEAVE_METRICS_ADDR", value_name = "ADDR", default_value = "0.0.0.0:8080")]
    pub metrics_addr: SocketAddr,

    /// Answers API servers that ask which pods to gate: the name of the Service, the Secret and the
    /// `MutatingWebhookConfiguration` for it, which are part of the chart.
    #[arg(long, env = "CLEAVE_WEBHOOK", value_name = "NAME")]
    pub webhook: Option<String>,

    /// Taints nodes with `cleave.dev/unhealthy:NoSchedule` while all of their GPUs are lost or need
    /// a reset, or their agent has not been ready for a minute. Needs the right to patch nodes.
    #[arg(long, env = "CLEAVE_TAINT_UNHEALTHY", default_value_t = false)]
    pub taint_unhealthy: bool,

    /// Replaces MPS hosts of an older revision than their `DaemonSet`'s newest when nothing uses
    /// MPS on their node: labels of their pods. Needs the rights to delete pods and to list and
    /// watch controller revisions in its namespace.
    #[arg(long, env = "CLEAVE_REPLACE_MPS_HOSTS", value_name = "SELECTOR")]
    pub replace_mps_hosts: Option<String>,

    /// Seconds for which no GPU must be able to hold a pod, whatever passes by itself, before the
    /// pod is released as unschedulable.
    #[arg(long, env = "CLEAVE_UNSCHEDULABLE_AFTER_SECONDS", value_name = "SECONDS", default_value_t = 180)]
    pub unschedulable_after_seconds: u64,

    /// Where API servers are answered.
    #[arg(long, env = "CLEAVE_WEBHOOK_ADDR", value_name = "ADDR", default_value = "0.0.0.0:9443")]
    pub webhook_addr: SocketAddr,
}
