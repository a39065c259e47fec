//! The `cleave` commands for administrators and users.
//!
//! | module | commands | reads | writes |
//! |---|---|---|---|
//! | [`status`] | `status` | `GpuNode`s, `SharingPolicy`s, `GpuQuota`s | |
//! | [`quotas`] | `quotas`, `quotas import` | `GpuQuota`s; quotas of Nos and Kueue | |
//! | [`explain`] | `explain pod` | what the operator reads | |
//! | [`plan`] | `plan` | a snapshot, or what the operator reads | |
//! | [`simulate`] | `simulate` | YAML files, or a JSON file of quotas | |
//! | [`cordon`] | `cordon`, `uncordon` | one `GpuNode` | its annotations |
//! | [`forget`] | `forget` | one `GpuNode` | its annotations |
//! | [`drain`] | `drain` | one `GpuNode`, its pods | its annotations, evictions |
//! | [`crds`] | `crds` | | files |
//! | [`preflight`] | `preflight` | nodes, `DaemonSets`, quotas, webhooks, or files | |
//! | [`migrate`] | `migrate` | configurations of other software, or nodes and `ConfigMap`s | |
//!
//! The crate `cleave_gpu` implements `doctor`. The module `client` connects to a cluster, `gpu`
//! finds GPUs of a node, and `output` and `table` print results.
//!
//! Commands that predict the operator's actions call the operator's code in
//! [`cleave_operator::dry_run`] and [`cleave_operator::placement`].
mod client;
mod condition;
pub mod cordon;
pub mod crds;
pub mod drain;
pub mod explain;
pub mod forget;
mod gpu;
pub mod migrate;
mod output;
pub mod plan;
pub mod preflight;
pub mod quota_file;
pub mod quotas;
pub mod simulate;
pub mod status;
mod table;

use std::process::ExitCode;

use cleave_gpu::mps::doctor::{self, DoctorArgs};

pub use client::{ClusterArgs, InstallationArgs};
pub use gpu::{GpuArgs, NodeGpu};
pub use output::OutputFormat;

/// A command and its options. The doc comment of a variant is the command's help.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Show nodes, GPUs, policies, quotas, and the pods that use GPUs.
    ///
    /// Reads every GpuNode, SharingPolicy and GpuQuota, and shows what the agents and the operator
    /// reported.
    Status(status::StatusArgs),

    /// Show quotas: what teams are guaranteed, use, borrow and wait for.
    ///
    /// Reads every GpuQuota, and shows what the operator reported. With the name of a quota, shows
    /// all details of this quota.
    #[command(args_conflicts_with_subcommands = true, after_long_help = quotas::HELP_EXAMPLES)]
    Quotas(quotas::QuotasArgs),

    /// Explain why a pod waits, or show which GPU it has.
    ///
    /// Runs the operator's code for one pod and writes nothing. The result can differ from the
    /// operator's last decision if the cluster has changed since then.
    Explain(explain::ExplainArgs),

    /// Show what the operator would do now, and why.
    ///
    /// Shows how GPUs would be partitioned and where pending pods would run, in the current cluster
    /// (--live) or in a snapshot file (--snapshot). Writes nothing.
    #[command(after_long_help = plan::HELP_EXAMPLES)]
    Plan(plan::PlanArgs),

    /// Try policies and pods on nodes described in YAML files.
    ///
    /// Shows how GPUs would be partitioned, which pods would run where, and why other pods would
    /// not. Connects to no cluster.
    #[command(after_long_help = simulate::INPUT_HELP)]
    Simulate(simulate::SimulateArgs),

    /// Stop new pods from using one GPU.
    ///
    /// Pods that already use the GPU keep running. The agent reports the GPU's free shares to the
    /// kubelet as Unhealthy.
    #[command(after_long_help = cordon::HELP_EXAMPLES)]
    Cordon(cordon::CordonArgs),

    /// Make GPUs schedulable again, and clear their recorded faults.
    ///
    /// The command also ends the quiesce of the GPUs. Without GPU, the command uncordons all GPUs
    /// of the node, whatever the reason for each cordon.
    Uncordon(cordon::UncordonArgs),

    /// Cordon GPUs, evict their pods, and wait until the GPUs are free.
    ///
    /// Evictions respect disruption budgets. The GPUs remain cordoned, even if the drain fails or
    /// times out.
    ///
    /// Exit status: 0 if the GPUs are free, 1 on an error, 3 on a timeout.
    #[command(after_long_help = drain::HELP_EXAMPLES)]
    Drain(drain::DrainArgs),

    /// Remove a missing GPU from the status of its node.
    ///
    /// A GPU that NVML no longer lists stays in the node's status, so that a failed GPU is not
    /// overlooked. Run this command if the GPU was removed for good. The command also ends the
    /// GPU's cordon and quiesce. If the GPU returns, the agent serves it again.
    ///
    /// Exit status: 0 if the agent has forgotten the GPU, 1 on an error, 3 on a timeout.
    #[command(after_long_help = forget::HELP_EXAMPLES)]
    Forget(forget::ForgetArgs),

    /// Print the custom resource definitions.
    #[command(after_long_help = crds::HELP_EXAMPLES)]
    Crds(crds::CrdsArgs),

    /// Check a cluster before installation, and print values for the chart.
    ///
    /// Detects the platform, container runtimes, the driver's location, other device plugins,
    /// quotas, Pod Security and webhooks. Reads lists of objects and writes nothing. If you may not
    /// read a list, the report marks the checks that need the list as not done.
    ///
    /// Exit status: 0 if no finding is an error, 1 otherwise.
    #[command(after_long_help = preflight::HELP_EXAMPLES)]
    Preflight(preflight::PreflightArgs),

    /// Translate the configuration of other GPU sharing software.
    ///
    /// Reads configurations of NVIDIA's device plugin, the GPU Operator, mig-parted, GKE, Nos and
    /// HAMi. Reports what each setting becomes, and which names pods must change. Prints policies
    /// and values for the chart. Writes nothing to the cluster.
    ///
    /// Exit status: 0 if the input was translated, 1 on an error.
    #[command(after_long_help = migrate::INPUT_HELP)]
    Migrate(migrate::MigrateArgs),

    /// Check that this node's GPU driver enforces limits as Cleave expects.
    ///
    /// Run the doctor on the node as root, in the host's PID namespace. The doctor starts its own
    /// MPS daemon on an idle GPU. The doctor starts nothing on a GPU that is in use.
    ///
    /// Exit status: 0 if all checks that ran passed, even if none ran, 1 if a check failed, 2 if
    /// there is no result.
    Doctor(DoctorArgs),
}

impl Command {
    /// Runs the command and returns its exit status.
    ///
    /// # Errors
    /// Returns an error if the command fails.
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        let done = match self {
            Self::Status(args) => status::run(args).await,
            Self::Quotas(args) => return quotas::run(args).await,
            Self::Explain(args) => explain::run(args).await,
            Self::Plan(args) => plan::run(args).await,
            Self::Simulate(args) => simulate::run(&args),
            Self::Cordon(args) => cordon::run_cordon(args).await,
            Self::Uncordon(args) => cordon::run_uncordon(args).await,
            Self::Drain(args) => return drain::run(args).await,
            Self::Forget(args) => return forget::run(args).await,
            Self::Crds(args) => crds::run(&args),
            Self::Preflight(args) => return preflight::run(args).await,
            Self::Migrate(args) => migrate::run(args).await,
            Self::Doctor(args) => return Ok(run_doctor(args).await),
        };
        done.map(|()| ExitCode::SUCCESS)
    }
}

/// Runs `cleave doctor`. The exit status distinguishes an error from a failed check.
async fn run_doctor(args: DoctorArgs) -> ExitCode {
    match doctor::run(args).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("cleave: {:#}", anyhow::Error::from(error));
            ExitCode::from(2)
        }
    }
}
