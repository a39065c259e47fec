//! The node agent: observe, diff, act, report.
pub mod allocate;
pub mod args;
pub mod cdi;
pub mod diff;
mod files;
pub mod hardware;
pub mod layout;
pub mod usage;

pub use args::AgentArgs;

/// Runs the agent until it is told to stop.
///
/// # Errors
/// When it cannot go on: another agent holds the node's lock, or a task that must not end has ended.
#[allow(clippy::unused_async, reason = "the signature comes before the body")]
pub async fn run(args: AgentArgs) -> anyhow::Result<()> {
    anyhow::bail!("the agent of {} cannot run yet", args.node_name)
}
