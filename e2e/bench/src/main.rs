//! `cleave-bench`: measures Cleave, and compares it with published figures or other policies.
mod kubelet;
mod planner;
mod quotas;
mod topology;
mod trace;

use clap::Parser;

#[derive(Parser)]
#[command(
    name = "cleave-bench",
    version,
    about = "Measures Cleave and compares it with published figures",
    arg_required_else_help = true
)]
enum Cli {
    /// Measure a device plugin from the kubelet's side.
    Kubelet(kubelet::KubeletArgs),
    /// Measure the planner on 10 to 1,000 nodes.
    Planner(planner::PlannerArgs),
    /// Measure a pass over the waiting pods with quotas.
    Quotas(quotas::QuotasArgs),
    /// Measure the choice of whole GPUs by their links.
    Topology(topology::TopologyArgs),
    /// Measure placement policies on a public GPU trace.
    Trace(trace::TraceArgs),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse() {
        Cli::Kubelet(args) => kubelet::run(&args),
        Cli::Planner(args) => planner::run(&args),
        Cli::Quotas(args) => quotas::run(&args),
        Cli::Topology(args) => topology::run(&args),
        Cli::Trace(args) => trace::run(&args),
    }
}
