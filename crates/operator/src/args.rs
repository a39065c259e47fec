//! The command line of `cleave operator`.
use std::net::SocketAddr;
use std::str::FromStr;

use cleave_plan::quota::Settings;

use crate::placement::QuotaSettings;
use crate::quotas::validate::Unnamed;

/// A label of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Label {
    /// Key of the label.
    pub key: String,
    /// Value of the label. May be empty.
    pub value: String,
}

impl FromStr for Label {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (key, value) = text.split_once('=').ok_or("a label has the form key=value")?;
        Ok(Self { key: key.to_owned(), value: value.to_owned() })
    }
}

/// Options of quotas.
#[derive(Debug, Clone, clap::Args)]
pub struct QuotaArgs {
    /// How quotas treat pods of namespaces without a `GpuQuota`, while the cluster has a
    /// `GpuQuota`. `Borrow`: like pods of a quota without a guarantee. `Exempt`: quotas neither
    /// delay nor evict these pods.
    #[arg(
        id = "quotas-unnamed",
        long = "quotas-unnamed",
        env = "CLEAVE_QUOTAS_UNNAMED",
        value_name = "WORD",
        default_value = "Borrow"
    )]
    pub unnamed: Unnamed,

    /// Minimum number of seconds that a pod runs before it can be evicted for another borrower.
    #[arg(long, env = "CLEAVE_QUOTAS_MIN_RUNTIME_FAIR_SHARE", value_name = "SECONDS", default_value_t = 300)]
    pub quotas_min_runtime_fair_share: u64,

    /// Minimum number of seconds that a borrower runs before it can be evicted for a pod within its
    /// guarantee.
    #[arg(long, env = "CLEAVE_QUOTAS_MIN_RUNTIME_RECLAIM", value_name = "SECONDS", default_value_t = 0)]
    pub quotas_min_runtime_reclaim: u64,

    /// Maximum grace period, in seconds, of a pod that the operator evicts by the rules of quotas.
    #[arg(long, env = "CLEAVE_QUOTAS_GRACE_CAP", value_name = "SECONDS", default_value_t = 300)]
    pub quotas_grace_cap: u64,

    /// Seconds for which a disruption budget can protect a borrower from eviction for a pod within
    /// its guarantee. After this time, the operator deletes the borrower. 0 means forever.
    #[arg(long, env = "CLEAVE_QUOTAS_BUDGET_PATIENCE", value_name = "SECONDS", default_value_t = 600)]
    pub quotas_budget_patience: u64,

    /// Pods of this priority and above override quotas. Such a pod may evict pods of lower priority
    /// of all enforced quotas, even pods within their guarantee. Without this option, no pod
    /// overrides quotas.
    #[arg(long, env = "CLEAVE_QUOTAS_OVERRIDE_PRIORITY", value_name = "PRIORITY", allow_negative_numbers = true)]
    pub quotas_override_priority: Option<i32>,

    /// Write the label `cleave.dev/capacity` to pods: whether a quota guarantees what they use.
    #[arg(
        long,
        env = "CLEAVE_QUOTAS_LABELS",
        value_name = "BOOL",
        action = clap::ArgAction::Set,
        default_value_t = true
    )]
    pub quotas_labels: bool,
}

impl QuotaArgs {
    /// Returns the settings of quotas, from these options.
    pub fn settings(&self) -> QuotaSettings {
        let rules = Settings {
            min_runtime_fair_share: self.quotas_min_runtime_fair_share,
            min_runtime_reclaim: self.quotas_min_runtime_reclaim,
            grace_cap: self.quotas_grace_cap,
            budget_patience: Some(self.quotas_budget_patience).filter(|patience| *patience > 0),
            override_priority: self.quotas_override_priority,
            ..Settings::default()
        };
        QuotaSettings { rules, unnamed: self.unnamed, without_labels: !self.quotas_labels }
    }
}

/// Plan how GPUs are shared, and write the plan to each node's GpuNode.
#[derive(Debug, Clone, clap::Args)]
#[expect(clippy::struct_excessive_bools, reason = "independent options")]
pub struct OperatorArgs {
    /// Namespace that Cleave runs in. This namespace contains the agents' pods and the lease.
    #[arg(long, env = "POD_NAMESPACE", default_value = "cleave-system")]
    pub namespace: String,

    /// Label selector of the agents' pods. Each node with an agent gets a `GpuNode`.
    #[arg(
        long,
        env = "CLEAVE_AGENT_SELECTOR",
        value_name = "SELECTOR",
        default_value = "app.kubernetes.io/name=cleave,app.kubernetes.io/component=agent"
    )]
    pub agent_selector: String,

    /// Name of the lease. Only the holder of the lease writes to the cluster.
    #[arg(long, env = "CLEAVE_LEASE", value_name = "NAME", default_value = "cleave-operator")]
    pub lease: String,

    /// Identity of this process in the lease. The identity must be unique among running operators
    /// and must not change when the container restarts.
    #[arg(long, env = "POD_NAME", value_name = "NAME")]
    pub identity: String,

    /// Address on which the operator serves /metrics, /healthz and /readyz. `[::]` includes IPv4.
    #[arg(long, env = "CLEAVE_METRICS_ADDR", value_name = "ADDR", default_value = "[::]:8080")]
    pub metrics_addr: SocketAddr,

    /// Enable the admission webhook. The value is the name of the webhook's Service, Secret and
    /// `MutatingWebhookConfiguration`.
    #[arg(long, env = "CLEAVE_WEBHOOK", value_name = "NAME")]
    pub webhook: Option<String>,

    /// When the admission webhook gates a pod that requests shares, add a toleration for taints
    /// with the key `nvidia.com/gpu`. Pods that already tolerate this key get no other toleration.
    #[arg(long, env = "CLEAVE_TOLERATE_GPU_TAINT", default_value_t = false)]
    pub tolerate_gpu_taint: bool,

    /// Taint nodes with `cleave.dev/unhealthy:NoSchedule` while all their GPUs are lost or need a
    /// reset, or once their agent has been not ready for 60 s. Needs permission to patch nodes.
    #[arg(long, env = "CLEAVE_TAINT_UNHEALTHY", default_value_t = false)]
    pub taint_unhealthy: bool,

    /// Label selector of MPS host pods. The operator replaces an outdated MPS host pod when no
    /// program uses MPS on the node. Needs permission to delete pods and to list and watch
    /// controller revisions.
    #[arg(long, env = "CLEAVE_REPLACE_MPS_HOSTS", value_name = "SELECTOR")]
    pub replace_mps_hosts: Option<String>,

    /// Seconds for which a pod must fit on no GPU before it is released as unschedulable.
    #[arg(long, env = "CLEAVE_UNSCHEDULABLE_AFTER_SECONDS", value_name = "SECONDS", default_value_t = 180)]
    pub unschedulable_after_seconds: u64,

    /// Labels that every node with an agent has, as `key=value`. Pods that do not fit on these
    /// nodes can be released to nodes where another device plugin serves GPUs.
    #[arg(long, env = "CLEAVE_NODE_SELECTOR", value_name = "LABELS", value_delimiter = ',')]
    pub node_selector: Vec<Label>,

    /// Taint nodes with `cleave.dev/fragmented:PreferNoSchedule` while an `Unschedulable` pod fits
    /// the sum of a node's free units but none of the node's GPUs. Needs permission to patch nodes.
    #[arg(long, env = "CLEAVE_TAINT_FRAGMENTED", default_value_t = false)]
    pub taint_fragmented: bool,

    /// Report pods at the placement gate as `Unschedulable` if they need another node, so that
    /// cluster autoscalers add nodes.
    #[arg(
        long,
        env = "CLEAVE_REPORT_UNSCHEDULABLE",
        value_name = "BOOL",
        action = clap::ArgAction::Set,
        default_value_t = true
    )]
    pub report_unschedulable: bool,

    /// How quotas work.
    #[command(flatten)]
    pub quotas: QuotaArgs,

    /// Address that the admission webhook listens on. `[::]` includes IPv4.
    #[arg(long, env = "CLEAVE_WEBHOOK_ADDR", value_name = "ADDR", default_value = "[::]:9443")]
    pub webhook_addr: SocketAddr,
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: OperatorArgs,
    }

    #[test]
    fn the_default_ports_listen_on_all_ipv4_and_ipv6_addresses() {
        let OperatorArgs { metrics_addr, webhook_addr, .. } =
            Cli::try_parse_from(["operator", "--identity", "a"]).unwrap().args;
        assert_eq!(metrics_addr, "[::]:8080".parse().unwrap());
        assert_eq!(webhook_addr, "[::]:9443".parse().unwrap());
    }
}
